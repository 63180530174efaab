//! Finds the amounts of items whose sum is largest, where items take room in several rows and each row has
//! limited room. Uses the simplex method in exact integers.

/// The best packing: `amounts[i] / whole` of each item.
pub(super) struct Packing {
    /// Amount of each item with a positive amount: its index and the numerator.
    pub amounts: Vec<(usize, u64)>,
    /// Denominator of all amounts.
    pub whole: u64,
    /// Whether no packing has a larger sum. False if the search stopped at its limit.
    pub is_best: bool,
}

/// Returns the amounts of items with the largest sum. `takes` has a number for each row of each item, item by item: what a
/// unit of the item takes of `rooms[row]`. `None` if `rooms` is empty or has a zero, if an item takes nothing, or if
/// numbers outgrow 128 bits.
///
/// The pivots are fraction-free (Bareiss): the inverse of the basis is kept as integers over its determinant. Entering
/// items are the most profitable, leaving rows the tightest, and of equals the first. Degenerate pivots cannot cycle
/// for ever, because the number of pivots is limited.
pub(super) fn pack(takes: &[u32], rooms: &[u64]) -> Option<Packing> {
    pack_within(takes, rooms, MAX_PIVOTS)
}

/// As [`pack`], with at most `pivots` pivots.
fn pack_within(takes: &[u32], rooms: &[u64], pivots: usize) -> Option<Packing> {
    if rooms.is_empty() || rooms.contains(&0) || takes.is_empty() {
        return None;
    }
    let of_item = |item: &[u32]| item.iter().map(|&takes| u64::from(takes)).sum::<u64>();
    let totals = takes.chunks_exact(rooms.len()).map(of_item);
    let (least, most) = totals.fold((u64::MAX, 0), |(least, most), total| {
        (least.min(total), most.max(total))
    });
    if least == 0 {
        return None;
    }
    let mut basis = Basis::new(rooms, most);
    for _ in 0..pivots {
        match basis.most_profitable(takes)? {
            None => return basis.packing(true),
            Some(item) => basis.enter(item, &takes[item * rooms.len()..][..rooms.len()])?,
        }
    }
    let is_best = basis.most_profitable(takes)?.is_none();
    basis.packing(is_best)
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
    /// Largest sum of what an item takes of all rows.
    most: u64,
}

impl Basis {
    fn new(rooms: &[u64], most: u64) -> Basis {
        let rows = rooms.len();
        Basis {
            inverse: (0..rows)
                .map(|a| (0..rows).map(|b| i128::from(a == b)).collect())
                .collect(),
            items: vec![None; rows],
            amounts: rooms.iter().map(|&room| room.into()).collect(),
            whole: 1,
            most,
        }
    }

    /// Returns the item whose entry raises the sum most per unit; `Some(None)` if none raises it, and `None` on
    /// overflow.
    fn most_profitable(&self, takes: &[u32]) -> Option<Option<usize>> {
        let rows = self.items.len();
        // Dual price of a unit of each row's room, times `whole`.
        let mut prices = vec![0i128; rows];
        let basic = self.items.iter().zip(&self.inverse);
        for (_, inverse) in basic.filter(|(item, _)| item.is_some()) {
            for (price, value) in prices.iter_mut().zip(inverse) {
                *price = price.checked_add(*value)?;
            }
        }
        // Few rows are full, and only these have a price.
        let prices = prices.into_iter().enumerate();
        let priced: Vec<(usize, i128)> = prices.filter(|(_, price)| *price != 0).collect();
        let items = takes.chunks_exact(rows);
        match self.small(&priced) {
            Some((priced, whole)) => {
                let profit = |item: &[u32]| {
                    let terms = priced
                        .iter()
                        .map(|&(row, price)| price * i64::from(item[row]));
                    Some(whole - terms.sum::<i64>())
                };
                largest(items.map(profit), 0)
            }
            None => {
                let profit = |item: &[u32]| {
                    let mut terms = priced.iter().filter(|(row, _)| item[*row] > 0);
                    terms.try_fold(self.whole, |profit, &(row, price)| {
                        profit.checked_sub(price.checked_mul(item[row].into())?)
                    })
                };
                largest(items.map(profit), 0)
            }
        }
    }

    /// Returns `prices` and `whole` in 64 bits, in which sums take a fraction of the time; `None` if the profit of an item
    /// could outgrow them.
    fn small(&self, prices: &[(usize, i128)]) -> Option<(Vec<(usize, i64)>, i64)> {
        let limit = i128::from(i64::MAX / 2) / i128::from(self.most);
        let to_small = |number: i128| (number.abs() < limit).then_some(number as i64);
        let prices = prices.iter();
        let prices = prices.map(|&(row, price)| Some((row, to_small(price)?)));
        Some((prices.collect::<Option<_>>()?, to_small(self.whole)?))
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
    fn packing(&self, is_best: bool) -> Option<Packing> {
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
            is_best,
        })
    }
}

/// Returns the index of the first of the largest numbers above `least`; `Some(None)` if there is none, and `None` if a
/// number is missing.
fn largest<T: PartialOrd>(
    numbers: impl Iterator<Item = Option<T>>,
    least: T,
) -> Option<Option<usize>> {
    let mut best = (least, None);
    for (at, number) in numbers.enumerate() {
        let number = number?;
        if number > best.0 {
            best = (number, Some(at));
        }
    }
    Some(best.1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_packing_is_found() {
        // Three items share three rooms in pairs: half of each is best.
        let takes = [[1, 1, 0], [0, 1, 1], [1, 0, 1]].concat();
        let stopped = pack_within(&takes, &[1, 1, 1], 1).unwrap();
        assert_eq!(
            (stopped.amounts, stopped.is_best),
            (vec![(0, stopped.whole)], false)
        );
        let packing = pack(&takes, &[1, 1, 1]).unwrap();
        assert!(packing.is_best);
        let sum: u64 = packing.amounts.iter().map(|(_, amount)| amount).sum();
        assert_eq!((2 * sum, packing.amounts.len()), (3 * packing.whole, 3));
        // The second item takes less of the room that limits.
        let packing = pack(&[2, 1, 1, 1], &[10, 30]).unwrap();
        assert_eq!(packing.amounts, [(1, 10 * packing.whole)]);
        assert!(pack(&[0], &[1]).is_none());
        assert!(pack(&[1], &[0]).is_none());
    }
}
