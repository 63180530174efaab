//! Finds the amounts of items whose sum is largest, where items take room in several rows and each row has
//! limited room. Uses the simplex method in exact integers.

/// The best packing: `amounts[i] / whole` of each item.
pub(super) struct Packing {
    /// Amount of each item with a positive amount: its index and the numerator.
    pub amounts: Vec<(usize, u64)>,
    /// Denominator of all amounts.
    pub whole: u64,
}

/// Returns the amounts of `items` with the largest sum, if item i takes `items[i][row]` of each `rooms[row]` per
/// unit. `None` if `rooms` has a zero, if an item takes nothing, or if numbers outgrow 128 bits.
///
/// The pivots are fraction-free (Bareiss): the inverse of the basis is kept as integers over its determinant. Entering
/// items are the most profitable, leaving rows the tightest, and of equals the first. Degenerate pivots cannot cycle
/// for ever, because the number of pivots is limited.
pub(super) fn pack(items: &[Vec<u32>], rooms: &[u64]) -> Option<Packing> {
    let takes_nothing = |item: &Vec<u32>| item.iter().all(|&takes| takes == 0);
    if rooms.contains(&0) || items.is_empty() || items.iter().any(takes_nothing) {
        return None;
    }
    let mut basis = Basis::new(rooms);
    for _ in 0..MAX_PIVOTS {
        match basis.most_profitable(items)? {
            None => break,
            Some(item) => basis.enter(item, &items[item])?,
        }
    }
    basis.packing()
}

/// Number of pivots after which the packing so far is taken.
const MAX_PIVOTS: usize = 1_000;

struct Basis {
    /// Inverse of the basis times `whole`.
    inverse: Vec<Vec<i128>>,
    /// The item in the basis at each row, or `None` for room that is left.
    items: Vec<Option<usize>>,
    /// Amounts at each row times `whole`.
    amounts: Vec<i128>,
    whole: i128,
}

impl Basis {
    fn new(rooms: &[u64]) -> Basis {
        let rows = rooms.len();
        Basis {
            inverse: (0..rows)
                .map(|a| (0..rows).map(|b| i128::from(a == b)).collect())
                .collect(),
            items: vec![None; rows],
            amounts: rooms.iter().map(|&room| room.into()).collect(),
            whole: 1,
        }
    }

    /// Returns the item whose entry raises the sum most per unit; `Some(None)` if none raises it, and `None` on
    /// overflow.
    fn most_profitable(&self, items: &[Vec<u32>]) -> Option<Option<usize>> {
        let rows = self.items.len();
        // Dual price of a unit of each row's room, times `whole`.
        let mut prices = vec![0i128; rows];
        for (row, _) in self
            .items
            .iter()
            .enumerate()
            .filter(|(_, item)| item.is_some())
        {
            for (price, value) in prices.iter_mut().zip(&self.inverse[row]) {
                *price = price.checked_add(*value)?;
            }
        }
        let mut best = (0, None);
        for (at, item) in items.iter().enumerate() {
            let mut profit = self.whole;
            for (price, &takes) in prices.iter().zip(item).filter(|(_, takes)| **takes > 0) {
                profit = profit.checked_sub(price.checked_mul(takes.into())?)?;
            }
            if profit > best.0 {
                best = (profit, Some(at));
            }
        }
        Some(best.1)
    }

    /// Puts an item into the basis, in the place of the row that limits it first.
    fn enter(&mut self, item: usize, takes: &[u32]) -> Option<()> {
        let column: Vec<i128> = self
            .inverse
            .iter()
            .map(|row| {
                let terms = row.iter().zip(takes).filter(|(_, takes)| **takes > 0);
                terms
                    .map(|(value, &takes)| value.checked_mul(takes.into()))
                    .try_fold(0i128, |sum, term| sum.checked_add(term?))
            })
            .collect::<Option<_>>()?;
        let mut leaving: Option<usize> = None;
        for row in (0..column.len()).filter(|&row| column[row] > 0) {
            let tighter = match leaving {
                None => true,
                Some(best) => {
                    let [this, other] = [(row, best), (best, row)]
                        .map(|(a, b)| self.amounts[a].checked_mul(column[b]));
                    this? < other?
                }
            };
            if tighter {
                leaving = Some(row);
            }
        }
        let pivot = leaving?;
        for row in (0..column.len()).filter(|&row| row != pivot) {
            let scaled = |value: i128, at_pivot: i128| -> Option<i128> {
                let kept = value.checked_mul(column[pivot])?;
                Some(kept.checked_sub(column[row].checked_mul(at_pivot)?)? / self.whole)
            };
            let new: Option<Vec<i128>> = self.inverse[row]
                .iter()
                .zip(&self.inverse[pivot])
                .map(|(&value, &at_pivot)| scaled(value, at_pivot))
                .collect();
            self.amounts[row] = scaled(self.amounts[row], self.amounts[pivot])?;
            self.inverse[row] = new?;
        }
        self.whole = column[pivot];
        self.items[pivot] = Some(item);
        Some(())
    }

    /// Returns the amounts, reduced to 64 bits.
    fn packing(&self) -> Option<Packing> {
        let found = self.items.iter().zip(&self.amounts);
        let found: Vec<(usize, u128)> = found
            .filter_map(|(item, &amount)| Some((((*item)?), amount.max(0) as u128)))
            .filter(|(_, amount)| *amount > 0)
            .collect();
        let largest = found
            .iter()
            .map(|(_, amount)| *amount)
            .chain([self.whole as u128])
            .max()?;
        // Sums of amounts and products with small factors must fit 64 bits.
        let shift = 128_u32
            .saturating_sub(largest.leading_zeros())
            .saturating_sub(40);
        let mut amounts: Vec<(usize, u64)> = found
            .into_iter()
            .map(|(item, amount)| (item, (amount >> shift) as u64))
            .collect();
        amounts.sort_unstable();
        Some(Packing {
            amounts,
            whole: (self.whole as u128 >> shift) as u64,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_packing_is_found() {
        // Three items share three rooms in pairs: half of each is best.
        let items = [vec![1, 1, 0], vec![0, 1, 1], vec![1, 0, 1]];
        let packing = pack(&items, &[1, 1, 1]).unwrap();
        let sum: u64 = packing.amounts.iter().map(|(_, amount)| amount).sum();
        assert_eq!((2 * sum, packing.amounts.len()), (3 * packing.whole, 3));
        // The second item takes less of the room that limits.
        let packing = pack(&[vec![2, 1], vec![1, 1]], &[10, 30]).unwrap();
        assert_eq!(packing.amounts, [(1, 10 * packing.whole)]);
        assert!(pack(&[vec![0]], &[1]).is_none());
        assert!(pack(&[vec![1]], &[0]).is_none());
    }
}
