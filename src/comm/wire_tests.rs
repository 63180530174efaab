//! Tests that no secret of a communicator is among the bytes that ranks write to sockets.

use super::Communicator;
use crate::bootstrap::{UniqueId, keys};
use crate::config::Config;
use crate::sys::socket;
use crate::types::{ReduceOp, TransportKind};
use std::collections::HashSet;
use std::sync::{Mutex, mpsc};
use std::time::Duration;

const RANKS: usize = 4;
/// Bytes of a secret that count as the secret.
const PART: usize = 16;

/// Makes a sum to which this rank contributes `own`.
fn sums(comm: &Communicator, own: usize, right: i64) {
    let mut sum = [own as i64];
    comm.all_reduce_in_place(&mut sum, ReduceOp::Sum).unwrap();
    assert_eq!(sum, [right]);
}

/// Init, two splits in two colours, a shrink and a grow, over TCP. The id of the grow is given to `new`.
fn rank_main(id: &UniqueId, rank: usize, config: &Config, new: &Mutex<mpsc::Sender<UniqueId>>) {
    let sums = |comm: &Communicator, right| sums(comm, rank, right);
    let comm = Communicator::init(id, rank, RANKS, config.clone()).unwrap();
    sums(&comm, 6);
    for turn in 0..2 {
        let color = (rank % 2) as u32;
        let part = comm.split(Some(color), turn).unwrap().unwrap();
        sums(&part, [2, 4][rank % 2]);
        part.finalize().unwrap();
    }
    comm.prepare_to_shrink().unwrap();
    if rank == 0 {
        return;
    }
    let rest = comm.shrink(&[], config.clone()).unwrap();
    sums(&rest, 6);
    if rank == 1 {
        new.lock().unwrap().send(rest.grow_id().unwrap()).unwrap();
    }
    let grown = rest.grow(RANKS, config.clone()).unwrap();
    sums(&grown, 10);
    grown.finalize().unwrap();
}

/// Returns the first and the last bytes of secrets. Secrets that a test made of a few values are left out,
/// because other data may contain them.
fn parts(secrets: &[Vec<u8>]) -> HashSet<[u8; PART]> {
    let is_random = |secret: &&Vec<u8>| {
        let values: HashSet<&u8> = secret.iter().collect();
        secret.len() >= PART && values.len() > 8
    };
    let ends = |secret: &Vec<u8>| {
        [0, secret.len() - PART].map(|from| std::array::from_fn(|at| secret[from + at]))
    };
    secrets.iter().filter(is_random).flat_map(ends).collect()
}

fn secrets_in(bytes: &[u8], parts: &HashSet<[u8; PART]>) -> usize {
    let windows = bytes
        .windows(PART)
        .filter_map(|window| window.first_chunk::<PART>());
    windows.filter(|window| parts.contains(*window)).count()
}

#[test]
fn no_secret_is_on_the_wire_of_init_split_shrink_and_grow() {
    let config = Config {
        transport: Some(TransportKind::Tcp),
        timeout: Duration::from_secs(20),
        init_timeout: Duration::from_secs(20),
        log_level: "none".into(),
        ..Config::default()
    };
    keys::recording::start();
    socket::recording::start();
    let id = UniqueId::create_for_one_host(&config).unwrap();
    let (new, grows) = mpsc::channel();
    let new = Mutex::new(new);
    std::thread::scope(|scope| {
        for rank in 0..RANKS {
            let (id, config, new) = (&id, &config, &new);
            scope.spawn(move || rank_main(id, rank, config, new));
        }
        let id = grows.recv().unwrap();
        let joined = Communicator::init(&id, RANKS - 1, RANKS, config.clone()).unwrap();
        sums(&joined, 4, 10);
        joined.finalize().unwrap();
    });
    let (written, secrets) = (socket::recording::stop(), keys::recording::stop());
    let parts = parts(&secrets);
    println!("{} parts of secrets, {} bytes", parts.len(), written.len());
    // Each of 6 communicators has keys for its rendezvous, control and data connections on every rank.
    assert!(parts.len() > 100 && written.len() > 10_000);
    assert_eq!(secrets_in(&written, &parts), 0);
    // The search finds a secret between other bytes.
    let leak = [&written[..100], secrets.last().unwrap(), &written[..100]].concat();
    assert_eq!(secrets_in(&leak, &parts), 2);
}
