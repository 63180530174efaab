//! The inner loops: the scalar ones, and those over [`Lanes`].

use super::super::simd::{Lanes, WIDEST, abs, abs_bits, load_part, with_sign};
use super::blocks::{Part, Scan};
use super::{ScaledFormat, encode_with_factor};

/// A format in vector form. Methods are `#[inline(always)]`.
pub(in super::super) trait VectorFormat: ScaledFormat {
    /// What is kept in registers through a loop.
    type Registers<'a, L: Lanes>: Copy;

    /// Fills the registers.
    fn registers<L: Lanes>(&self, lanes: L) -> Self::Registers<'_, L>;

    /// [`ScaledFormat::magnitude`].
    fn magnitude_lanes<L: Lanes>(
        lanes: L,
        registers: Self::Registers<'_, L>,
        x: L::F,
        factor: L::F,
    ) -> L::I;

    /// [`ScaledFormat::value`].
    fn value_lanes<L: Lanes>(lanes: L, registers: Self::Registers<'_, L>, code: L::I) -> L::F;
}

/// The specification.
pub(super) struct ScalarPart<'a, F> {
    pub format: &'a F,
}

impl<F: ScaledFormat> Part for ScalarPart<'_, F> {
    #[inline(always)]
    fn scan<const SQUARES: bool>(&self, x: &[f32]) -> Scan {
        let bits = x.iter().map(|x| x.to_bits() & 0x7fff_ffff);
        let squares = x.iter().map(|&x| f64::from(x) * f64::from(x));
        Scan {
            max_bits: bits.max().unwrap_or(0),
            squares: if SQUARES { squares.sum() } else { 0.0 },
        }
    }

    #[inline(always)]
    fn encode(&self, x: &[f32], factor: f32, codes: &mut [u8]) {
        for (&x, code) in x.iter().zip(codes) {
            *code = encode_with_factor(self.format, x, factor);
        }
    }

    #[inline(always)]
    fn decode<const REDUCE: bool>(&self, codes: &[u8], unit: f32, dst: &mut [f32]) {
        for (&code, out) in codes.iter().zip(dst) {
            let acc = if REDUCE { *out } else { 0.0 };
            *out = self.format.value(code).mul_add(unit, acc);
        }
    }
}

/// The same, [`Lanes::N`] elements at a time. What remains of a block goes through a buffer that
/// zeros fill up: they change neither the largest magnitude nor the sum of squares.
pub(super) struct VectorPart<'a, F: VectorFormat, L: Lanes> {
    lanes: L,
    registers: F::Registers<'a, L>,
}

impl<'a, F: VectorFormat, L: Lanes> VectorPart<'a, F, L> {
    #[inline(always)]
    pub fn new(format: &'a F, lanes: L) -> VectorPart<'a, F, L> {
        VectorPart {
            lanes,
            registers: format.registers(lanes),
        }
    }

    #[inline(always)]
    fn encode_lanes(&self, x: L::F, factor: L::F) -> L::I {
        let magnitude = abs(self.lanes, x);
        let code = F::magnitude_lanes(self.lanes, self.registers, magnitude, factor);
        with_sign(self.lanes, code, x)
    }

    #[inline(always)]
    fn decode_lanes(&self, code: L::I, unit: L::F, acc: L::F) -> L::F {
        let value = F::value_lanes(self.lanes, self.registers, code);
        self.lanes.fma(value, unit, acc)
    }
}

impl<F: VectorFormat, L: Lanes> Part for VectorPart<'_, F, L> {
    #[inline(always)]
    fn scan<const SQUARES: bool>(&self, x: &[f32]) -> Scan {
        let lanes = self.lanes;
        // Two chains each, so that additions of one need not wait for those of the other.
        let mut most = [lanes.splat_i(0); 2];
        let mut sums = [lanes.zero_sum(); 2];
        let mut pairs = x.chunks_exact(2 * L::N);
        for pair in &mut pairs {
            let (a, b) = (lanes.load(pair), lanes.load(&pair[L::N..]));
            most[0] = lanes.max_i(most[0], abs_bits(lanes, a));
            most[1] = lanes.max_i(most[1], abs_bits(lanes, b));
            if SQUARES {
                sums[0] = lanes.add_squares(sums[0], a);
                sums[1] = lanes.add_squares(sums[1], b);
            }
        }
        for rest in pairs.remainder().chunks(L::N) {
            let a = load_part(lanes, rest);
            most[0] = lanes.max_i(most[0], abs_bits(lanes, a));
            if SQUARES {
                sums[0] = lanes.add_squares(sums[0], a);
            }
        }
        Scan {
            max_bits: lanes.reduce_max(lanes.max_i(most[0], most[1])) as u32,
            squares: match SQUARES {
                true => lanes.total(sums[0]) + lanes.total(sums[1]),
                false => 0.0,
            },
        }
    }

    #[inline(always)]
    fn encode(&self, x: &[f32], factor: f32, codes: &mut [u8]) {
        let factor = self.lanes.splat(factor);
        let mut whole = x.chunks_exact(L::N);
        let mut out = codes.chunks_exact_mut(L::N);
        for (x, out) in (&mut whole).zip(&mut out) {
            let code = self.encode_lanes(self.lanes.load(x), factor);
            self.lanes.store_u8(code, out);
        }
        let (rest, out) = (whole.remainder(), out.into_remainder());
        if !rest.is_empty() {
            let mut buffer = [0; WIDEST];
            let code = self.encode_lanes(load_part(self.lanes, rest), factor);
            self.lanes.store_u8(code, &mut buffer);
            out.copy_from_slice(&buffer[..rest.len()]);
        }
    }

    #[inline(always)]
    fn decode<const REDUCE: bool>(&self, codes: &[u8], unit: f32, dst: &mut [f32]) {
        let lanes = self.lanes;
        let unit = lanes.splat(unit);
        let mut whole = codes.chunks_exact(L::N);
        let mut out = dst.chunks_exact_mut(L::N);
        for (codes, out) in (&mut whole).zip(&mut out) {
            let acc = match REDUCE {
                true => lanes.load(out),
                false => lanes.splat(0.0),
            };
            lanes.store(self.decode_lanes(lanes.load_u8(codes), unit, acc), out);
        }
        let (rest, out) = (whole.remainder(), out.into_remainder());
        if !rest.is_empty() {
            let mut padded = [0; WIDEST];
            padded[..rest.len()].copy_from_slice(rest);
            let acc = match REDUCE {
                true => load_part(lanes, out),
                false => lanes.splat(0.0),
            };
            let mut buffer = [0.0; WIDEST];
            lanes.store(
                self.decode_lanes(lanes.load_u8(&padded), unit, acc),
                &mut buffer,
            );
            out.copy_from_slice(&buffer[..rest.len()]);
        }
    }
}
