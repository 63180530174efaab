//! Finds the nearest leaf without a search or a gather, for vectors of 16 elements.
//!
//! Within half a decade all leaves are equally wide. So there are twelve segments between 0 and 1 in which
//! the index of y among the magnitudes is a linear function of y. A multiply-add gives the magnitude below y.
//! A comparison with the exact threshold above that magnitude then decides. An octave contains the start of
//! at most one segment, so the exponent of y and one comparison find the segment. All tables fit into
//! registers.
//!
//! The linear function need not be exact. Where its rounding matters, y is next to a magnitude and far from a
//! threshold, and both results lead to equal codes.

use super::super::simd::Lanes;

/// Bits of the smallest y that the tables resolve; all smaller y are nearest to 0. Octaves are numbered by
/// the low five bits of the fp32 exponent field. From this y to 1 these numbers are distinct.
const SMALLEST: u32 = 96 << 23;

/// Tables that are indexed by octave, by segment, or by code.
#[derive(Debug)]
pub(super) struct Segments {
    /// By octave: the start of the segment that begins in it; infinity if none begins there.
    starts: [f32; 32],
    /// By octave: the segment that contains the octave's lower end, an integer stored as float
    /// bits.
    segments: [f32; 32],
    /// By segment: slope of the linear function, in codes per unit of y.
    slopes: [f32; 16],
    /// By segment: value of the linear function at y = 0, in codes.
    intercepts: [f32; 16],
    /// By code: the largest y that is nearest to the code's value. Code 1 stands for the value 0 here, and
    /// code 128 for the value 1.
    thresholds: [f32; 128],
}

/// The tables of [`Segments`], in registers.
pub(super) struct SegmentRegisters<'a, L: Lanes> {
    starts: L::T32<'a>,
    segments: L::T32<'a>,
    slopes: L::T16<'a>,
    intercepts: L::T16<'a>,
    thresholds: L::T128<'a>,
}

impl<L: Lanes> Clone for SegmentRegisters<'_, L> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<L: Lanes> Copy for SegmentRegisters<'_, L> {}

impl Segments {
    /// Creates the tables from the thresholds between the 128 magnitudes.
    pub fn new(thresholds: &[f32]) -> Segments {
        let mut tables = Segments {
            starts: [f32::INFINITY; 32],
            segments: [f32::from_bits(0); 32],
            slopes: [0.0; 16],
            intercepts: [0.0; 16],
            thresholds: [f32::INFINITY; 128],
        };
        tables.thresholds[1..].copy_from_slice(&thresholds[..127]);
        let mut lows = Vec::new();
        for (decade, bits) in (1..=6).enumerate() {
            let unit = 10f64.powi(decade as i32 - 5);
            let leaves = 1 << (bits - 1);
            for (low, width, first) in [(0.1, 0.35, 1 << bits), (0.45, 0.55, (1 << bits) + leaves)]
            {
                let slope = f64::from(leaves) / (width * unit);
                tables.slopes[lows.len()] = slope as f32;
                // The linear function must reach a leaf's code at the middle of the leaf, which is
                // the leaf's value.
                let intercept = f64::from(first) - 0.5 - low * unit * slope;
                tables.intercepts[lows.len()] = intercept as f32;
                lows.push((low * unit) as f32);
            }
        }
        for octave in 0..32 {
            let from = f32::from_bits(SMALLEST + (octave << 23));
            let segment = lows[1..].iter().filter(|&&low| low <= from).count();
            tables.segments[octave as usize] = f32::from_bits(segment as u32);
            if let Some(&next) = lows.get(segment + 1)
                && next < 2.0 * from
            {
                tables.starts[octave as usize] = next;
            }
        }
        tables
    }

    #[inline(always)]
    pub fn registers<L: Lanes>(&self, lanes: L) -> SegmentRegisters<'_, L> {
        SegmentRegisters {
            starts: lanes.table32(&self.starts),
            segments: lanes.table32(&self.segments),
            slopes: lanes.table16(&self.slopes),
            intercepts: lanes.table16(&self.intercepts),
            thresholds: lanes.table128(&self.thresholds),
        }
    }
}

impl<L: Lanes> SegmentRegisters<'_, L> {
    /// Returns the codes nearest to magnitudes `y`, none of which is NaN.
    #[inline(always)]
    pub fn nearest(self, lanes: L, y: L::F) -> L::I {
        let (zero, one) = (lanes.splat_i(0), lanes.splat_i(1));
        let bits = lanes.max_i(lanes.bits(y), lanes.splat_i(SMALLEST as i32));
        let bits = lanes.min_i(bits, lanes.splat_i(1f32.to_bits() as i32));
        let y = lanes.float(bits);

        let octave = lanes.shr::<23>(bits);
        let beyond = lanes.gt(y, lanes.lookup32(self.starts, octave));
        let segment = lanes.bits(lanes.lookup32(self.segments, octave));
        let segment = lanes.add_i(segment, lanes.select_i(beyond, one, zero));

        let slope = lanes.lookup16(self.slopes, segment);
        let intercept = lanes.lookup16(self.intercepts, segment);
        let below = lanes.truncate(lanes.fma(y, slope, intercept));
        let beyond = lanes.gt(y, lanes.lookup128(self.thresholds, below));
        let code = lanes.add_i(below, lanes.select_i(beyond, one, zero));

        // Translates to wire codes: above, 1 stands for the value 0 and 128 for the value 1.
        let is_one = lanes.gt_i(code, lanes.splat_i(127));
        let is_leaf = lanes.gt_i(code, one);
        lanes.select_i(is_one, one, lanes.select_i(is_leaf, code, zero))
    }
}
