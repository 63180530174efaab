//! Tables of 128 magnitudes, and the search for the nearest magnitude.
//!
//! The nearest magnitude of y follows from the number of thresholds below y. A threshold is the exact
//! midpoint of two adjacent magnitudes, rounded down if fp32 cannot hold it. No fp32 number lies between the
//! midpoint and the threshold, so "y > threshold" gives the exact result. A tie goes to the smaller
//! magnitude.

/// Number of low fp32 bits that do not select a bucket: there are 32 buckets per octave. Magnitudes are far
/// enough apart that a bucket holds at most one threshold.
const KEY_SHIFT: u32 = 18;
const REST_MASK: u32 = (1 << KEY_SHIFT) - 1;

/// Table of 128 magnitudes by code, with the search for the nearest magnitude.
#[derive(Debug)]
pub(super) struct Magnitudes {
    values: [f32; 128],
    /// Distinct magnitudes, ascending.
    sorted: Vec<f32>,
    /// The smallest code of each distinct magnitude.
    codes: Vec<u8>,
    /// Thresholds between adjacent distinct magnitudes.
    thresholds: Vec<f32>,
    buckets: Buckets,
}

impl Magnitudes {
    /// Creates a table from its magnitudes by code; `values[0]` must be 0.
    pub fn new(values: [f32; 128]) -> Magnitudes {
        let mut order: Vec<u8> = (0..128).collect();
        order.sort_by(|&a, &b| values[a as usize].total_cmp(&values[b as usize]));
        // The sort is stable, so that the smallest code among equal magnitudes comes first, and
        // `dedup_by` keeps it.
        order.dedup_by(|a, b| values[*a as usize] == values[*b as usize]);
        let sorted: Vec<f32> = order.iter().map(|&code| values[code as usize]).collect();
        let thresholds: Vec<f32> = sorted.windows(2).map(|w| threshold(w[0], w[1])).collect();
        let buckets = Buckets::new(&thresholds, &order);
        Magnitudes {
            values,
            sorted,
            codes: order,
            thresholds,
            buckets,
        }
    }

    /// Returns the magnitudes by code.
    pub fn values(&self) -> &[f32; 128] {
        &self.values
    }

    /// Returns the distinct magnitudes, ascending.
    pub fn sorted(&self) -> &[f32] {
        &self.sorted
    }

    /// Returns the smallest code of each distinct magnitude, ascending by magnitude.
    pub fn codes(&self) -> &[u8] {
        &self.codes
    }

    /// Returns the thresholds between distinct magnitudes, ascending.
    pub fn thresholds(&self) -> &[f32] {
        &self.thresholds
    }

    /// Returns the largest magnitude.
    pub fn largest(&self) -> f32 {
        self.sorted[self.sorted.len() - 1]
    }

    /// Returns the code of the magnitude nearest to y >= 0.
    pub fn nearest(&self, y: f32) -> u8 {
        self.codes[self.thresholds.partition_point(|&t| y > t)]
    }

    /// Returns the tables with which vector code finds the nearest magnitude in constant time.
    pub fn buckets(&self) -> &Buckets {
        &self.buckets
    }

    /// Returns half of the widest gap between magnitudes that contains a number within one part in 2^20 of `y
    /// >= 0`.
    pub fn half_gap(&self, y: f64) -> f64 {
        let slack = y * 2f64.powi(-20);
        self.sorted
            .windows(2)
            .map(|w| (f64::from(w[0]), f64::from(w[1])))
            .filter(|&(low, high)| low <= y + slack && y - slack <= high)
            .map(|(low, high)| (high - low) / 2.0)
            .fold(0.0, f64::max)
    }
}

/// Returns the largest fp32 number that is not above the midpoint of two adjacent magnitudes.
fn threshold(low: f32, high: f32) -> f32 {
    // The sum is exact in fp64, because the exponents of adjacent magnitudes differ little.
    let middle = (f64::from(low) + f64::from(high)) / 2.0;
    let rounded = middle as f32;
    if f64::from(rounded) > middle {
        rounded.next_down()
    } else {
        rounded
    }
}

/// Buckets of fp32 bit patterns, 32 per octave. Each has a threshold and the codes on both sides of it. A
/// search costs one load and one comparison.
///
/// The most significant 18 bits of an entry are the low bits of the threshold, whose upper bits select the
/// bucket. Next come the code above the threshold and the code up to it, 7 bits each.
#[derive(Clone, Debug)]
pub(super) struct Buckets {
    entries: Vec<i32>,
    /// First bit pattern of the first bucket; smaller patterns have its code.
    first: u32,
    /// Last bit pattern of the last bucket; larger patterns have its code.
    last: u32,
}

impl Buckets {
    fn new(thresholds: &[f32], codes: &[u8]) -> Buckets {
        let key = |bits: u32| bits >> KEY_SHIFT;
        let low = key(thresholds[0].to_bits());
        let high = key(thresholds[thresholds.len() - 1].to_bits());
        let mut entries = Vec::new();
        let mut next = 0;
        for bucket in low..=high {
            let below = codes[next];
            let mut rest = 0;
            if let Some(t) = thresholds.get(next)
                && key(t.to_bits()) == bucket
            {
                rest = t.to_bits() & REST_MASK;
                next += 1;
            }
            let above = codes[next];
            entries.push((rest << 14 | u32::from(above) << 7 | u32::from(below)) as i32);
        }
        assert_eq!(next, thresholds.len(), "two thresholds share a bucket");
        Buckets {
            entries,
            first: low << KEY_SHIFT,
            last: high << KEY_SHIFT | REST_MASK,
        }
    }
}

mod vector {
    use super::super::simd::Lanes;
    use super::{Buckets, KEY_SHIFT, REST_MASK};

    impl Buckets {
        /// Vector form of [`super::Magnitudes::nearest`]. Any code may stand for a NaN.
        #[inline(always)]
        pub fn nearest<L: Lanes>(&self, lanes: L, y: L::F) -> L::I {
            let first = lanes.splat_i(self.first as i32);
            let bits = lanes.max_i(lanes.bits(y), first);
            let bits = lanes.min_i(bits, lanes.splat_i(self.last as i32));
            let key = lanes.shr::<KEY_SHIFT>(lanes.sub_i(bits, first));
            let entry = lanes.gather(&self.entries, key);
            let rest = lanes.and(bits, lanes.splat_i(REST_MASK as i32));
            let is_above = lanes.gt_i(rest, lanes.shr::<14>(entry));
            let code = lanes.select_i(is_above, lanes.shr::<7>(entry), entry);
            lanes.and(code, lanes.splat_i(0x7f))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Magnitudes {
        // The table has 0, a duplicate of 1, then magnitudes an eighth of an octave apart, in
        // another order than their codes.
        let mut values: [f32; 128] =
            std::array::from_fn(|i| (i as f32 / 8.0).floor().exp2() * (1.0 + (i % 8) as f32 / 8.0));
        values[0] = 0.0;
        values[1] = 1.0;
        values.swap(40, 90);
        values[100] = 1.0;
        Magnitudes::new(values)
    }

    #[test]
    fn nearest_equals_a_search_of_all_codes() {
        let table = table();
        for t in table.thresholds() {
            for step in -3i32..=3 {
                let y = f32::from_bits(t.to_bits().wrapping_add_signed(step));
                let distance = |code: u8| {
                    let v = table.values()[code as usize];
                    ((f64::from(v) - f64::from(y)).abs(), v)
                };
                let best = (0..128).min_by(|&a, &b| distance(a).partial_cmp(&distance(b)).unwrap());
                let found = table.nearest(y);
                assert_eq!(distance(best.unwrap()), distance(found), "y {y:e}");
            }
        }
        assert_eq!(table.nearest(1.0), 1, "the smaller of two codes");
        assert_eq!(table.nearest(f32::INFINITY), 127);
        assert_eq!(table.nearest(f32::from_bits(1)), 0);
    }

    #[test]
    fn threshold_is_the_largest_number_up_to_the_midpoint() {
        for (low, high) in [
            (1.0f32, 1.0f32.next_up()),
            (0.1, 0.3),
            (0.0, 2.75e-6),
            (3.0, 5.0),
        ] {
            let middle = (f64::from(low) + f64::from(high)) / 2.0;
            let t = threshold(low, high);
            assert!(f64::from(t) <= middle && f64::from(t.next_up()) > middle);
        }
    }
}
