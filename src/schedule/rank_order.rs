//! Orders in which rings and chains pass the ranks.

use crate::error::{Error, Result};
use std::sync::Arc;

/// The order in which a ring passes the ranks; equal on all ranks. A ring has no first rank, so orders that
/// differ by a rotation are equal.
///
/// Cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct RankOrder(Option<Arc<Permutation>>);

#[derive(Debug, PartialEq, Eq, Hash)]
struct Permutation {
    /// Ranks by place in the order; rank 0 is at place 0.
    ranks: Vec<u32>,
    /// Place of each rank.
    places: Vec<u32>,
}

impl RankOrder {
    /// From rank r to rank r + 1, for any number of ranks.
    pub const BY_RANK: RankOrder = RankOrder(None);

    /// Creates the order of a ring that passes `ranks` in turn.
    ///
    /// # Errors
    /// Internal if `ranks` are not the numbers below their count, each once.
    pub fn of_ring(ranks: &[usize]) -> Result<RankOrder> {
        let count = ranks.len();
        let first = ranks.iter().position(|&rank| rank == 0).unwrap_or(0);
        let mut places = vec![None; count];
        for (at, &rank) in ranks.iter().enumerate() {
            match places.get_mut(rank) {
                Some(place @ None) => *place = Some(((at + count - first) % count) as u32),
                found => {
                    let why = found.map_or("does not exist", |_| "is in it twice");
                    return Err(Error::internal(format!(
                        "a ring of {count} ranks: rank {rank} {why}"
                    )));
                }
            }
        }
        let mut ranks = ranks.to_vec();
        ranks.rotate_left(first);
        if ranks.iter().enumerate().all(|(place, &rank)| place == rank) {
            return Ok(RankOrder::BY_RANK);
        }
        Ok(RankOrder(Some(Arc::new(Permutation {
            ranks: ranks.into_iter().map(|rank| rank as u32).collect(),
            places: places.into_iter().flatten().collect(),
        }))))
    }

    /// Returns the place of a rank in the order.
    ///
    /// # Panics
    /// If the order lists ranks and lacks this rank.
    pub fn place(&self, rank: usize) -> usize {
        match &self.0 {
            None => rank,
            Some(permutation) => permutation.places[rank] as usize,
        }
    }

    /// Returns the rank at a place of the order.
    ///
    /// # Panics
    /// If the order lists ranks and has no such place.
    pub fn at(&self, place: usize) -> usize {
        match &self.0 {
            None => place,
            Some(permutation) => permutation.ranks[place] as usize,
        }
    }

    /// Returns the number of ranks; `None` for [`RankOrder::BY_RANK`], which fits any number.
    pub fn nranks(&self) -> Option<usize> {
        self.0.as_ref().map(|permutation| permutation.ranks.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_and_ranks_are_inverse() {
        let order = RankOrder::of_ring(&[3, 1, 0, 4, 2]).unwrap();
        let ranks: Vec<_> = (0..5).map(|place| order.at(place)).collect();
        assert_eq!(ranks, [0, 4, 2, 3, 1]);
        assert!((0..5).all(|rank| order.at(order.place(rank)) == rank));
        assert_eq!(order.nranks(), Some(5));
    }

    #[test]
    fn rotated_rings_are_equal() {
        let order = |ranks: &[usize]| RankOrder::of_ring(ranks).unwrap();
        assert_eq!(order(&[2, 0, 1, 3]), order(&[1, 3, 2, 0]));
        assert_ne!(order(&[2, 0, 1, 3]), order(&[3, 1, 0, 2]));
        for by_rank in [&[0, 1, 2][..], &[2, 0, 1], &[1, 0], &[0], &[]] {
            assert_eq!(order(by_rank), RankOrder::BY_RANK);
        }
        assert_eq!(RankOrder::BY_RANK.place(7), 7);
    }

    #[test]
    fn rings_that_are_no_permutation_are_refused() {
        for (ranks, part) in [
            (&[0, 1, 1][..], "ring of 3 ranks: rank 1 is in it twice"),
            (&[0, 3, 1], "ring of 3 ranks: rank 3 does not exist"),
        ] {
            let error = RankOrder::of_ring(ranks).unwrap_err();
            assert!(error.message().contains(part), "{error}");
        }
    }
}
