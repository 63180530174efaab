//! Orders of the rings of a channel, which may differ from ring to ring.

use super::rank_order::RankOrder;
use std::sync::Arc;

/// The orders in which the rings of each channel pass the ranks; equal on all ranks. Rings 2 i and 2 i + 1 follow
/// order i, modulo the number of orders, and run in opposite directions. So an order carries half of its data each way
/// round.
///
/// Cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RingOrders(Orders);

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Orders {
    One(RankOrder),
    /// At least two orders, not all equal.
    Several(Arc<[RankOrder]>),
}

impl RingOrders {
    /// All rings pass the ranks in the order of their numbers.
    pub const BY_RANK: RingOrders = RingOrders(Orders::One(RankOrder::BY_RANK));

    /// Creates the orders of `orders.len()` pairs of rings; [`RingOrders::BY_RANK`] if there are none.
    pub fn of_pairs(orders: Vec<RankOrder>) -> RingOrders {
        match orders.first() {
            None => RingOrders::BY_RANK,
            Some(first) if orders.iter().all(|order| order == first) => first.clone().into(),
            Some(_) => RingOrders(Orders::Several(orders.into())),
        }
    }

    /// Returns the order of ring `ring` of a channel. Chains follow the order of ring 0.
    pub fn of_ring(&self, ring: usize) -> &RankOrder {
        match &self.0 {
            Orders::One(order) => order,
            Orders::Several(orders) => &orders[ring / 2 % orders.len()],
        }
    }

    /// Returns the number of pairs of rings after which the orders repeat; 1 if all rings follow one order.
    pub fn pairs(&self) -> usize {
        self.as_slice().len()
    }

    /// Returns the orders of all pairs of rings.
    pub fn as_slice(&self) -> &[RankOrder] {
        match &self.0 {
            Orders::One(order) => std::slice::from_ref(order),
            Orders::Several(orders) => orders,
        }
    }
}

impl From<RankOrder> for RingOrders {
    fn from(order: RankOrder) -> RingOrders {
        RingOrders(Orders::One(order))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_of_rings_follow_the_orders_in_turn() {
        let [a, b] = [[0, 2, 1, 3], [0, 1, 3, 2]].map(|ranks| RankOrder::of_ring(&ranks).unwrap());
        let orders = RingOrders::of_pairs(vec![a.clone(), b.clone(), b.clone()]);
        let followed: Vec<_> = (0..8).map(|ring| orders.of_ring(ring)).collect();
        assert_eq!(followed, [&a, &a, &b, &b, &b, &b, &a, &a]);
        assert_eq!(orders.pairs(), 3);
        assert_eq!(orders.as_slice(), [a, b.clone(), b]);
    }

    #[test]
    fn equal_orders_are_one_order() {
        let order = RankOrder::of_ring(&[0, 2, 1, 3]).unwrap();
        let several = RingOrders::of_pairs(vec![order.clone(); 3]);
        assert_eq!(several, RingOrders::from(order.clone()));
        assert_eq!((several.pairs(), several.of_ring(5)), (1, &order));
        assert_eq!(RingOrders::of_pairs(Vec::new()), RingOrders::BY_RANK);
    }
}
