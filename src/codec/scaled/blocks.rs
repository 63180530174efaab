//! The loops over blocks, the same for every width: what differs is a [`Part`].

use super::super::simd::{Kernel, Lanes};
use super::super::wire::{read_scale, write_scale};
use super::vector::{ScalarPart, VectorPart};
use super::{
    EncodeStats, ScaledFormat, TINY, VectorFormat, decode_element, encode_element, scan_slowly,
};

/// Bits of infinity: magnitudes from here up are not finite.
const INFINITE: u32 = 0x7f80_0000;

/// Elements that are looked at together under a tensor scale, so that what was scanned is still
/// in the first-level cache when it is encoded.
const PIECE: usize = 256;

/// What one look at a block tells.
#[derive(Clone, Copy)]
pub(super) struct Scan {
    /// Bits of the largest magnitude; NaN counts above infinity.
    pub max_bits: u32,
    /// Sum of squares, if asked for.
    pub squares: f64,
}

/// The inner loops, scalar or vector. Implementations are `#[inline(always)]`.
pub(super) trait Part {
    fn scan<const SQUARES: bool>(&self, x: &[f32]) -> Scan;
    /// Encodes finite elements under an ordinary factor.
    fn encode(&self, x: &[f32], factor: f32, codes: &mut [u8]);
    /// Decodes under an ordinary unit.
    fn decode<const REDUCE: bool>(&self, codes: &[u8], unit: f32, dst: &mut [f32]);
}

/// Encodes a span.
pub(super) struct Encode<'a, F> {
    pub format: &'a F,
    /// Elements of a block; `None` under a tensor scale.
    pub block: Option<usize>,
    /// The tensor scale.
    pub given: Option<f32>,
    pub starts_chunk: bool,
    /// Where the span's scales start.
    pub first_block: usize,
    pub src: &'a [f32],
    pub codes: &'a mut [u8],
    pub scales: &'a mut [u8],
    pub stats: Option<&'a mut EncodeStats>,
}

impl<F: VectorFormat> Kernel for Encode<'_, F> {
    type Output = ();

    fn scalar(self) {
        let part = ScalarPart {
            format: self.format,
        };
        self.run(part);
    }

    #[inline(always)]
    fn vector<L: Lanes>(self, lanes: L) {
        let part = VectorPart::new(self.format, lanes);
        self.run(part);
    }
}

impl<F: VectorFormat> Encode<'_, F> {
    #[inline(always)]
    fn run<P: Part>(self, part: P) {
        match self.stats.is_some() {
            true => self.rule::<P, true>(part),
            false => self.rule::<P, false>(part),
        }
    }

    #[inline(always)]
    fn rule<P: Part, const STATS: bool>(self, part: P) {
        match self.block {
            Some(block) => self.blocks::<P, STATS>(part, block),
            None => self.tensor::<P, STATS>(part),
        }
    }

    #[inline(always)]
    fn blocks<P: Part, const STATS: bool>(self, part: P, block: usize) {
        let mut stats = EncodeStats::default();
        let pieces = self.src.chunks(block).zip(self.codes.chunks_mut(block));
        for (index, (x, codes)) in pieces.enumerate() {
            let scan = part.scan::<STATS>(x);
            let finite = scan.max_bits < INFINITE;
            if STATS {
                record(&mut stats, &scan, x);
            }
            let scale = match finite {
                true => f32::from_bits(scan.max_bits),
                false => f32::NAN,
            };
            write_scale(self.scales, self.first_block + index, scale);
            if !finite || scale == 0.0 {
                codes.fill(0);
            } else if scale < TINY {
                encode_slowly(self.format, x, scale, codes);
            } else {
                part.encode(x, F::factor(scale), codes);
            }
        }
        if let Some(total) = self.stats {
            total.merge(&stats);
        }
    }

    #[inline(always)]
    fn tensor<P: Part, const STATS: bool>(self, part: P) {
        let mut stats = EncodeStats::default();
        let scale = self.given.unwrap_or(f32::NAN);
        // A scale that is none poisons the chunk like an element that is none.
        let usable = scale.is_finite() && scale >= 0.0;
        let mut poisoned = !usable;
        let factor = F::factor(scale);
        for (x, codes) in self.src.chunks(PIECE).zip(self.codes.chunks_mut(PIECE)) {
            let scan = part.scan::<STATS>(x);
            let finite = scan.max_bits < INFINITE;
            if STATS {
                record(&mut stats, &scan, x);
                if usable && (!finite || f32::from_bits(scan.max_bits) > scale) {
                    let beyond = |&&x: &&f32| x.is_finite() && x.abs() > scale;
                    stats.saturated += x.iter().filter(beyond).count() as u64;
                }
            }
            poisoned |= !finite;
            if !usable || scale == 0.0 {
                codes.fill(0);
            } else if !finite || scale < TINY {
                encode_slowly(self.format, x, scale, codes);
            } else {
                part.encode(x, factor, codes);
            }
        }
        // An empty chunk has no scale; one that an earlier span poisoned stays so.
        if !self.scales.is_empty() {
            if poisoned {
                write_scale(self.scales, 0, f32::NAN);
            } else if self.starts_chunk {
                write_scale(self.scales, 0, scale);
            }
        }
        if let Some(total) = self.stats {
            total.merge(&stats);
        }
    }
}

/// Decodes a span into `dst`, or adds it to `dst`.
pub(super) struct Decode<'a, F, const REDUCE: bool> {
    pub format: &'a F,
    pub block: Option<usize>,
    pub first_block: usize,
    pub codes: &'a [u8],
    pub scales: &'a [u8],
    pub dst: &'a mut [f32],
}

impl<F: VectorFormat, const REDUCE: bool> Kernel for Decode<'_, F, REDUCE> {
    type Output = ();

    fn scalar(self) {
        let part = ScalarPart {
            format: self.format,
        };
        self.run(part);
    }

    #[inline(always)]
    fn vector<L: Lanes>(self, lanes: L) {
        let part = VectorPart::new(self.format, lanes);
        self.run(part);
    }
}

impl<F: VectorFormat, const REDUCE: bool> Decode<'_, F, REDUCE> {
    #[inline(always)]
    fn run<P: Part>(self, part: P) {
        let block = self.block.unwrap_or(self.codes.len()).max(1);
        let pieces = self.codes.chunks(block).zip(self.dst.chunks_mut(block));
        for (index, (codes, dst)) in pieces.enumerate() {
            let scale = read_scale(self.scales, self.first_block + index);
            if !scale.is_finite() {
                // Not 0 * NaN: what that leaves in sign and payload differs between machines.
                dst.fill(f32::NAN);
            } else if scale.abs() < TINY && scale != 0.0 {
                for (&code, out) in codes.iter().zip(dst) {
                    let acc = if REDUCE { *out } else { 0.0 };
                    *out = decode_element(self.format, code, scale, acc);
                }
            } else {
                part.decode::<REDUCE>(codes, F::unit(scale), dst);
            }
        }
    }
}

/// Brings statistics up to date; a block that holds a non-finite element is looked at again.
#[inline(always)]
fn record(stats: &mut EncodeStats, scan: &Scan, x: &[f32]) {
    if scan.max_bits < INFINITE {
        stats.abs_max = stats.abs_max.max(f32::from_bits(scan.max_bits));
        stats.sum_squares += scan.squares;
    } else {
        stats.merge(&scan_slowly(x));
    }
}

/// Any elements, any scale above 0.
#[cold]
fn encode_slowly<F: ScaledFormat>(format: &F, x: &[f32], scale: f32, codes: &mut [u8]) {
    for (&x, code) in x.iter().zip(codes) {
        *code = match x.is_finite() {
            true => encode_element(format, x, scale),
            false => 0,
        };
    }
}
