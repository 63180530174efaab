//! Counts the rings that a channel carries, their directions, and the slots that they need.

use super::ring_orders::RingOrders;
use crate::types::Collective;
use std::collections::HashMap;

/// Returns whether `collective` may have several rings per channel; chains have only one.
pub const fn has_several_rings(collective: Collective) -> bool {
    matches!(
        collective,
        Collective::AllReduce | Collective::AllGather | Collective::ReduceScatter
    )
}

/// Returns the rings per channel of `collective`: `most` if it may have several, otherwise 1.
pub(super) fn rings(collective: Collective, most: usize) -> usize {
    match has_several_rings(collective) {
        true => most,
        false => 1,
    }
}

/// Returns the number of ring directions that lead to different neighbours.
pub const fn directions(nranks: usize) -> usize {
    if nranks > 2 { 2 } else { 1 }
}

/// Returns the number of slots that each connection needs for freedom from deadlock: one more than the rings that
/// cross the busiest connection.
pub(super) fn slots(orders: &RingOrders, rings: usize, nranks: usize) -> usize {
    1 + match orders.pairs() {
        1 => rings.div_ceil(directions(nranks)),
        _ => most_rings_of_a_connection(orders, rings, nranks),
    }
}

fn most_rings_of_a_connection(orders: &RingOrders, rings: usize, nranks: usize) -> usize {
    let mut crossing: HashMap<[usize; 2], usize> = HashMap::new();
    for ring in 0..rings {
        let order = orders.of_ring(ring);
        for place in 0..nranks {
            let mut connection = [place, (place + 1) % nranks].map(|place| order.at(place));
            if ring % directions(nranks) == 1 {
                connection.reverse();
            }
            *crossing.entry(connection).or_default() += 1;
        }
    }
    crossing.into_values().max().unwrap_or(0)
}

/// Returns the largest number of steps of one ring in a pass, over all collectives; all_reduce has
/// it.
pub const fn ring_steps(nranks: usize) -> usize {
    2 * nranks - 1
}
