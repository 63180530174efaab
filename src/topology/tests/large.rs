//! Machines with more GPUs than a machine word has bits.

use super::machines::switched;
use crate::topology::{LinkTime, MachineGraph, Paths, PeerAccess, predict};

/// Machines of one socket reach the bound of their GPUs' links, as machine A does: of a message of S bytes, 2 S (N-1) bytes
/// leave N GPUs. Two sockets send each other S bytes each way, as on machine C.
#[test]
fn bounds_of_large_machines_scale_with_those_of_small_ones() {
    let mut wrong = Vec::new();
    for (sockets, switches, per_switch) in [
        (1, 2, 4),
        (1, 13, 5),
        (1, 9, 8),
        (1, 16, 8),
        (1, 10, 13),
        (2, 2, 2),
        (2, 9, 4),
        (2, 5, 13),
    ] {
        let machine = switched(sockets, 16, switches, per_switch, 48);
        let graph = MachineGraph::new(&machine);
        let n = graph.gpus.len() as u64;
        let prediction = predict(&graph, &Paths::new(&graph, &PeerAccess::Rule));
        let expected = match sockets {
            1 => LinkTime::new(2 * (n - 1), n, 48_000),
            _ => LinkTime::new(1, 1, 16_000),
        };
        let (bound, best) = (prediction.bound, prediction.best());
        let ms = [bound, expected, best].map(|time| time.milliseconds(256 << 20));
        if bound != expected || ms[0] > ms[2] * (1.0 + 1e-6) {
            wrong.push(format!("{n} GPUs: bound, expected, best {ms:?}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
