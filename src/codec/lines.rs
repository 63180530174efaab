//! Nearest magnitude by linear functions, for tables whose magnitudes are equally far apart in few regions.
//!
//! The codes of a region are successive, and its thresholds equally far apart. So the code of y is the integer
//! part of a linear function of y, which is computed in steps of 2^-16. At the last threshold of a region, its
//! border, the distance changes; a comparison with the exact border finds the region, whose largest code is the
//! limit.
//!
//! Roundings of the function, and of thresholds to fp32, are less than 2 steps together. At [`GUARD`] steps or
//! more from a threshold the integer part is therefore the exact code. The codes of elements nearer to a
//! threshold come from [`Buckets`], which compare with the exact threshold. Of random numbers 1 in 8192 needs
//! this, so of groups of 64 elements 1 in 128; the numbers nearest to 0 always do in static8.
//!
//! The top 16 bits of an fp32 number are about linear in its logarithm, and borders alternate around a geometric
//! sequence. So there are cells, equally wide in these bits, with one border in each. An element of a border's
//! cell lies in the region below the border or in the one above, and one comparison decides.
//!
//! Entry i of a table belongs to a region, and to the cell with the region's border. Vectors of eight elements
//! read the upper half of a table faster than all of it. Therefore the last region has the last entry, and most
//! data needs only the upper half. Tables of up to eight regions have two equal halves.

use super::simd::{Lanes, WIDEST, four};
use super::table::{Buckets, Magnitudes};

/// Number of entries of a table.
const ENTRIES: usize = 16;
/// First entry of the upper half.
const UPPER: usize = ENTRIES / 2;
/// Steps of the function from one code to the next.
const STEPS: f64 = 65_536.0;
/// Distance from a threshold, in steps, from which on the function decides.
const GUARD: i32 = 4;

/// Tables by region, and the cells.
#[derive(Debug)]
pub(super) struct Lines {
    /// The largest y of the region; infinity for the last.
    borders: [f32; ENTRIES],
    /// Slope of the function, in steps per unit of y.
    slopes: [f32; ENTRIES],
    /// Value of the function at y = 0, in steps, plus [`GUARD`].
    intercepts: [f32; ENTRIES],
    /// The largest code of the region.
    last_codes: [u8; ENTRIES],
    /// Entries of `last_codes` as integers, stored as float bits.
    wide_last_codes: [f32; ENTRIES],
    /// Upper limit of y, beyond all borders.
    largest: f32,
    /// Above this y, which is negative if the halves are equal, the upper half of each table suffices.
    upper: f32,
    cells: BorderCells,
    buckets: Buckets,
}

/// Cells of equally many fp32 numbers, with one border in each.
#[derive(Clone, Copy, Debug)]
struct BorderCells {
    /// Top 16 bits of the first number of cell 0, which also holds all smaller numbers.
    start: i32,
    /// Reciprocal of the width of a cell in the top 16 bits, times 2^16.
    factor: i32,
}

/// The tables of [`Lines`], in registers.
pub(super) struct LineRegisters<'a, L: Lanes> {
    borders: L::T16<'a>,
    slopes: L::T16<'a>,
    intercepts: L::T16<'a>,
    last_codes: L::T16<'a>,
    largest: L::F,
    upper: L::F,
    start: L::I,
    factor: L::I,
    lines: &'a Lines,
}

impl<L: Lanes> Clone for LineRegisters<'_, L> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<L: Lanes> Copy for LineRegisters<'_, L> {}

impl Lines {
    /// Creates the tables. `regions` are the numbers of magnitudes in each region, in ascending order. If there are
    /// more than 16, the lowest ones share an entry that never decides.
    ///
    /// # Panics
    /// If the magnitudes have no such regions.
    pub fn new(magnitudes: &Magnitudes, regions: &[usize]) -> Lines {
        let (sorted, codes) = (magnitudes.sorted(), magnitudes.codes());
        let thresholds = magnitudes.thresholds();
        let mut lines = Lines {
            borders: [f32::INFINITY; ENTRIES],
            slopes: [0.0; ENTRIES],
            intercepts: [0.0; ENTRIES],
            last_codes: [0; ENTRIES],
            wide_last_codes: [0.0; ENTRIES],
            largest: magnitudes.largest(),
            upper: -1.0,
            cells: BorderCells {
                start: 0,
                factor: 0,
            },
            buckets: magnitudes.buckets().clone(),
        };
        // Few regions have entries in both halves. Else entries below the first region's are equal to it, but have
        // no border.
        let entries = if regions.len() <= UPPER {
            UPPER
        } else {
            ENTRIES
        };
        let unused = entries.saturating_sub(regions.len());
        let undecided = (regions.len() + 1).saturating_sub(entries);
        let mut first = 0;
        for (region, &count) in regions.iter().enumerate() {
            let last = first + count - 1;
            let entry = (entries + region).saturating_sub(regions.len());
            if let Some(&border) = thresholds.get(last) {
                lines.borders[entry] = border;
            }
            // A function that is 0 leaves all elements to the buckets.
            if undecided <= 1 || region >= undecided {
                let [code, last_code] = [first, last].map(|rank| usize::from(codes[rank]));
                assert_eq!(last_code - code, last - first);
                let (mut slope, mut intercept) = (0.0, code as f64 + 0.5);
                if count > 1 {
                    let [low, high] = [first, last].map(|rank| f64::from(sorted[rank]));
                    slope = (count - 1) as f64 / (high - low);
                    intercept -= low * slope;
                }
                let from = if first == 0 { 0 } else { entry };
                lines.slopes[from..=entry].fill((slope * STEPS) as f32);
                lines.intercepts[from..=entry].fill((intercept * STEPS) as f32 + GUARD as f32);
                lines.last_codes[from..=entry].fill(codes[last]);
            }
            first = last + 1;
        }
        assert_eq!(first, sorted.len(), "regions hold all magnitudes");
        lines.cells = BorderCells::new(unused, &lines.borders[unused..entries - 1]);
        if entries == UPPER {
            lines.borders.copy_within(..UPPER, UPPER);
            lines.slopes.copy_within(..UPPER, UPPER);
            lines.intercepts.copy_within(..UPPER, UPPER);
            lines.last_codes.copy_within(..UPPER, UPPER);
        } else {
            lines.upper = lines.cells.end(UPPER as i32 - 1);
        }
        lines.wide_last_codes = lines.last_codes.map(|code| f32::from_bits(code.into()));
        lines
    }

    #[inline(always)]
    pub fn registers<L: Lanes>(&self, lanes: L) -> LineRegisters<'_, L> {
        LineRegisters {
            borders: lanes.table16(&self.borders),
            slopes: lanes.table16(&self.slopes),
            intercepts: lanes.table16(&self.intercepts),
            last_codes: lanes.table16(&self.wide_last_codes),
            largest: lanes.splat(self.largest),
            upper: lanes.splat(self.upper),
            start: lanes.splat_i(self.cells.start << 16),
            factor: lanes.splat_i(self.cells.factor << 16),
            lines: self,
        }
    }
}

impl BorderCells {
    /// Returns cells of which number `first` holds the first border, the next the second, and so on. Of all widths
    /// it takes the one that leaves the start the most room.
    ///
    /// # Panics
    /// If there are none.
    fn new(first: usize, borders: &[f32]) -> BorderCells {
        let mut best = (
            0,
            BorderCells {
                start: 0,
                factor: 0,
            },
        );
        for factor in 64..1024 {
            let (mut low, mut high) = (0, i64::from(i32::MAX >> 16));
            for (border, cell) in borders.iter().zip(first as i64..) {
                let border = i64::from(border.to_bits() >> 16);
                // cell <= (border - start) * factor / 2^16 < cell + 1
                high = high.min(border - (cell << 16) / factor - 1);
                low = low.max(border - ((cell + 1) << 16) / factor + 1);
            }
            if high - low > best.0 {
                let start = ((low + high) / 2) as i32;
                best = (
                    high - low,
                    BorderCells {
                        start,
                        factor: factor as i32,
                    },
                );
            }
        }
        assert!(best.0 > 0, "no cells hold the borders");
        best.1
    }

    /// Returns the last number of a cell.
    fn end(self, cell: i32) -> f32 {
        let next = self.start + (((cell + 1) << 16) + self.factor - 1) / self.factor;
        f32::from_bits((next << 16) as u32).next_down()
    }
}

/// A vector of magnitudes, located.
#[derive(Clone, Copy)]
struct Located<L: Lanes> {
    region: L::I,
    /// Value of the region's function, in steps, plus [`GUARD`].
    steps: L::I,
}

impl<L: Lanes> LineRegisters<'_, L> {
    /// Locates magnitudes. Without `ALL` they must be above [`Lines::upper`].
    #[inline(always)]
    fn place<const ALL: bool>(self, lanes: L, y: L::F) -> Located<L> {
        let above = lanes.subs_u16(lanes.bits(y), self.start);
        let cell = lanes.shr::<16>(lanes.mul_halves(above, self.factor));
        let border = Self::lookup::<ALL>(lanes, self.borders, cell);
        let region = lanes.increment(lanes.gt(y, border), cell);
        let slope = Self::lookup::<ALL>(lanes, self.slopes, region);
        let intercept = Self::lookup::<ALL>(lanes, self.intercepts, region);
        Located {
            region,
            steps: lanes.truncate(lanes.fma(y, slope, intercept)),
        }
    }

    #[inline(always)]
    fn lookup<const ALL: bool>(lanes: L, table: L::T16<'_>, at: L::I) -> L::F {
        if ALL {
            lanes.lookup16(table, at)
        } else {
            lanes.lookup_upper(table, at)
        }
    }

    /// Returns the codes nearest to magnitudes `y`. Any code may stand for a NaN.
    #[inline(always)]
    pub fn nearest(self, lanes: L, y: L::F) -> L::I {
        // Narrow vectors gather about as fast as they read whole tables.
        if L::N == WIDEST {
            let place = self.place::<true>(lanes, lanes.min(y, self.largest));
            if !lanes.any_low_half_below([place.steps; 4], 2 * GUARD) {
                let last = lanes.bits(lanes.lookup16(self.last_codes, place.region));
                return lanes.min_i(lanes.shr::<16>(place.steps), last);
            }
        }
        self.lines.buckets.nearest(lanes, y)
    }

    /// Returns the codes nearest to four vectors of magnitudes, as [`Lanes::pack`] packs them. Any code may stand
    /// for a NaN.
    #[inline(always)]
    pub fn pack_nearest(self, lanes: L, y: [L::F; 4]) -> L::I {
        let near = four!(i => lanes.min(y[i], self.largest));
        let places = if L::N == WIDEST || !lanes.all_gt(near, self.upper) {
            four!(i => self.place::<true>(lanes, near[i]))
        } else {
            four!(i => self.place::<false>(lanes, near[i]))
        };
        let steps = four!(i => places[i].steps);
        if lanes.any_low_half_below(steps, 2 * GUARD) {
            return lanes.pack(four!(i => self.lines.buckets.nearest(lanes, y[i])));
        }
        let codes = lanes.pack(four!(i => lanes.shr::<16>(steps[i])));
        let regions = lanes.pack(four!(i => places[i].region));
        lanes.min_bytes(codes, lanes.lookup_bytes(&self.lines.last_codes, regions))
    }
}

#[cfg(test)]
pub(super) use tests::check;

#[cfg(test)]
mod tests {
    use super::super::simd::{Available, SimdKernel, launch};
    use super::*;
    use crate::cpu::Isa;

    /// Compares the functions with the codes of successive fp32 numbers, and returns how many the functions leave
    /// to the buckets.
    struct Compare<'a> {
        lines: &'a Lines,
        magnitudes: &'a Magnitudes,
        bits: std::ops::Range<u32>,
    }

    impl Compare<'_> {
        fn check(&self, y: f32, steps: i32, region: i32) -> usize {
            if steps & 0xffff < 2 * GUARD {
                return 1;
            }
            let last = self.lines.last_codes[region as usize];
            let code = (steps >> 16).min(last.into());
            assert_eq!(code, i32::from(self.magnitudes.nearest(y)), "{y:e}");
            0
        }

        #[inline(always)]
        fn place<const ALL: bool, L: Lanes>(&self, lanes: L, y: &[f32]) -> usize {
            let registers = self.lines.registers(lanes);
            let place = registers.place::<ALL>(lanes, lanes.load(y));
            let (mut steps, mut regions) = ([0.0; WIDEST], [0.0; WIDEST]);
            lanes.store(lanes.float(place.steps), &mut steps);
            lanes.store(lanes.float(place.region), &mut regions);
            let places = steps.iter().zip(&regions).zip(y).take(L::N);
            let bits = |x: &f32| x.to_bits() as i32;
            places
                .map(|((steps, region), &y)| self.check(y, bits(steps), bits(region) & 15))
                .sum()
        }
    }

    impl SimdKernel for Compare<'_> {
        type Output = usize;

        fn scalar(self) -> usize {
            0
        }

        #[inline(always)]
        fn vector<L: Lanes>(self, lanes: L) -> usize {
            let mut left = 0;
            for first in self.bits.clone().step_by(L::N) {
                let y: [f32; WIDEST] = std::array::from_fn(|i| f32::from_bits(first + i as u32));
                left += self.place::<true, L>(lanes, &y);
                if y[0] > self.lines.upper {
                    self.place::<false, L>(lanes, &y);
                }
            }
            left
        }
    }

    /// Compares every fp32 number up to the largest magnitude; without `every`, those around thresholds and
    /// magnitudes. Returns the largest number that the functions of an instruction set leave to the buckets.
    pub(in super::super) fn check(magnitudes: &Magnitudes, lines: &Lines, every: bool) -> usize {
        let top = lines.largest.to_bits();
        let ranges: Vec<std::ops::Range<u32>> = if every {
            std::iter::once(0..top + 1).collect()
        } else {
            let special = magnitudes.thresholds().iter().chain(magnitudes.sorted());
            let around = |y: &f32| {
                let bits = y.to_bits().clamp(512, top - 512);
                bits - 512..bits + 512
            };
            special.map(around).collect()
        };
        let mut most = 0;
        for isa in Isa::available() {
            let isa = Available::new(isa).unwrap();
            let (mut left, mut all) = (0, 0);
            for bits in ranges.clone() {
                all += bits.len();
                left += launch(
                    isa,
                    Compare {
                        lines,
                        magnitudes,
                        bits,
                    },
                );
            }
            println!("{isa:?}: {left} of {all} are left to the buckets");
            most = most.max(left);
        }
        most
    }
}
