//! Block formats whose one-byte codes are multiples of a scale: `linear8`, `dynamic8`, `fp8`.
//!
//! The number of a block is the scale s, its largest magnitude. With a scale below 2^-100, its reciprocal or
//! its unit would overflow or lose bits. Encoder and decoder then work in scalar code with numbers multiplied
//! by 2^64, which is exact.
//!
//! With a seed, rounding is stochastic. Let d(c) be what code c decodes to. The nearest code and d give the two
//! neighbouring codes, low and high, with d(low) <= |x| <= d(high). The upper is taken with the probability
//! (|x| - d(low)) / (d(high) - d(low)), up to 2^-22. So the mean of many draws is x itself, whatever the
//! roundings of factor and unit, and a magnitude that a code decodes to keeps that code.

use super::super::simd::{Lanes, abs, four, with_sign};
use super::super::{ErrorLaw, Zero};
use super::{BlockFormat, Draws, Numbers};
use crate::types::CodecKind;
use std::fmt::Debug;

/// Scales below this, and the elements that they scale, are multiplied by [`RAISE`].
const TINY: f32 = f32::from_bits((127 - 100) << 23);
/// 2^64, by which small numbers are multiplied.
const RAISE: f32 = f32::from_bits((127 + 64) << 23);
/// 2^-64, which undoes [`RAISE`].
const LOWER: f32 = f32::from_bits((127 - 64) << 23);

/// Part of the scale that the roundings of factor, unit and products add to half a step: 2^-21. Above a scale
/// of 2^126 the factor of `dynamic8` is subnormal, and its rounding alone is up to 2^-22.
pub(in super::super) const ROUNDING: f64 = 1.0 / 2_097_152.0;

/// Defines what a code means: bit 7 is the sign, the other bits are the magnitude code.
pub(in super::super) trait ScaledFormat: Debug + Send + Sync + 'static {
    const KIND: CodecKind;

    /// When rounding is stochastic.
    const DRAWS: Draws = Draws::Never;

    /// The code of the largest magnitude.
    const TOP: u8 = 0x7f;

    /// Bound of the error of an element, rounded to nearest.
    const ERRORS: ErrorLaw;

    /// Returns the factor that [`ScaledFormat::magnitude`] takes for a block with this scale.
    fn factor(scale: f32) -> f32;

    /// Returns the value of one unit of [`ScaledFormat::value`] in a block with this scale.
    fn unit(scale: f32) -> f32;

    /// Returns the code, 0 to 127, of magnitude `x` in a block with this factor.
    fn magnitude(&self, x: f32, factor: f32) -> u8;

    /// Returns the signed value of a code, in units of the block.
    fn value(&self, code: u8) -> f32;

    /// Returns the code of the next smaller magnitude; `code` is not 0.
    #[inline(always)]
    fn code_below(code: u8) -> u8 {
        code - 1
    }

    /// Returns the code of the next larger magnitude; `code` is not [`ScaledFormat::TOP`].
    #[inline(always)]
    fn code_above(code: u8) -> u8 {
        code + 1
    }

    /// Returns a bound of the error of rounding to nearest at |x| <= scale, without the rounding of fp32 arithmetic.
    fn half_step(&self, x: f64, scale: f64) -> f64;
}

/// Vector form of a [`ScaledFormat`]. Methods are `#[inline(always)]`.
pub(in super::super) trait VectorScaledFormat: ScaledFormat {
    /// Tables that a loop keeps in registers.
    type Registers<'a, L: Lanes>: Copy;

    /// Loads the tables that a loop keeps in registers.
    fn registers<L: Lanes>(&self, lanes: L) -> Self::Registers<'_, L>;

    /// Vector form of [`ScaledFormat::magnitude`].
    fn magnitude_lanes<L: Lanes>(
        lanes: L,
        registers: Self::Registers<'_, L>,
        x: L::F,
        factor: L::F,
    ) -> L::I;

    /// Returns the codes of four vectors of magnitudes, as [`Lanes::pack`] packs them.
    #[inline(always)]
    fn pack_magnitudes<L: Lanes>(
        lanes: L,
        registers: Self::Registers<'_, L>,
        x: [L::F; 4],
        factor: L::F,
    ) -> L::I {
        lanes.pack(four!(i => Self::magnitude_lanes(lanes, registers, x[i], factor)))
    }

    /// Returns the codes of magnitudes `x` under stochastic rounding, for random numbers `u`; the vector form of
    /// what [`Scaled`] does with scalars. Formats that never draw need none.
    #[inline(always)]
    fn draw_lanes<L: Lanes>(
        lanes: L,
        registers: Self::Registers<'_, L>,
        x: L::F,
        steps: VectorSteps<L>,
        u: L::F,
    ) -> L::I {
        let _ = u;
        Self::magnitude_lanes(lanes, registers, x, steps.factor)
    }

    /// Vector form of [`ScaledFormat::value`].
    fn value_lanes<L: Lanes>(lanes: L, registers: Self::Registers<'_, L>, code: L::I) -> L::F;
}

/// The factor and the unit of a block, in all elements of a vector.
#[derive(Clone, Copy)]
pub(in super::super) struct VectorSteps<L: Lanes> {
    pub factor: L::F,
    pub unit: L::F,
}

/// Returns whether stochastic rounding of magnitude `x` takes the upper of the neighbours `low` and `high`.
#[inline(always)]
pub(in super::super) fn takes_upper<L: Lanes>(
    lanes: L,
    x: L::F,
    low: L::F,
    high: L::F,
    u: L::F,
) -> L::M {
    lanes.gt(lanes.sub(x, low), lanes.mul(u, lanes.sub(high, low)))
}

/// Adapts a [`ScaledFormat`] to [`BlockFormat`].
#[derive(Debug)]
pub(in super::super) struct Scaled<F>(pub F);

/// Values for encoding: code = magnitude(|x| * raise, factor). Vector forms leave out `raise`,
/// which is 1 for them. Only stochastic rounding reads `unit`.
#[derive(Clone, Copy)]
pub(in super::super) struct ScaledEncoder {
    raise: f32,
    factor: f32,
    unit: f32,
}

impl ScaledEncoder {
    /// Returns what a magnitude of `value` units decodes to, times `raise`. A raised block decodes to multiples
    /// of the smallest subnormal number.
    #[inline(always)]
    fn decoded(self, value: f32) -> f32 {
        let raised = value * self.unit;
        if self.raise == 1.0 {
            raised
        } else {
            raised * LOWER * RAISE
        }
    }
}

/// Values for decoding: value = code * unit * lower. Vector forms leave out `lower`, which is 1 for
/// them.
#[derive(Clone, Copy)]
pub(in super::super) struct ScaledDecoder {
    unit: f32,
    lower: f32,
}

impl<F: VectorScaledFormat> BlockFormat for Scaled<F> {
    const KIND: CodecKind = F::KIND;
    const BITS: usize = 8;
    const NUMBERS: usize = 1;
    const FITS_EXTREMES: bool = true;
    const ZERO: Zero = Zero::Positive;
    const DRAWS: Draws = F::DRAWS;

    type Encoder = ScaledEncoder;
    type Decoder = ScaledDecoder;
    type Registers<'a, L: Lanes> = F::Registers<'a, L>;

    fn errors() -> ErrorLaw {
        F::ERRORS
    }

    /// Returns half a step of the format, or a step, plus [`ROUNDING`] of the scale.
    fn error_bound(&self, _: ErrorLaw, halves: f64, x: f64, scale: f64) -> f64 {
        halves * self.0.half_step(x, scale) + scale * ROUNDING
    }

    #[inline(always)]
    fn registers<L: Lanes>(&self, lanes: L) -> F::Registers<'_, L> {
        self.0.registers(lanes)
    }

    #[inline(always)]
    fn fit(_: &[f32], largest: f32) -> Numbers {
        [largest, 0.0]
    }

    #[inline(always)]
    fn fit_lanes<L: Lanes>(_: L, _: &[f32], largest: f32) -> Numbers {
        [largest, 0.0]
    }

    #[inline(always)]
    fn encoder(numbers: Numbers) -> ScaledEncoder {
        let scale = numbers[0];
        if Self::needs_scalar(numbers) {
            ScaledEncoder {
                raise: RAISE,
                factor: F::factor(scale * RAISE),
                unit: F::unit(scale * RAISE),
            }
        } else {
            ScaledEncoder {
                raise: 1.0,
                factor: F::factor(scale),
                unit: F::unit(scale),
            }
        }
    }

    #[inline(always)]
    fn decoder(numbers: Numbers) -> ScaledDecoder {
        let scale = numbers[0];
        if Self::needs_scalar(numbers) {
            ScaledDecoder {
                unit: F::unit(scale * RAISE),
                lower: LOWER,
            }
        } else {
            ScaledDecoder {
                unit: F::unit(scale),
                lower: 1.0,
            }
        }
    }

    #[inline(always)]
    fn is_zero([scale, _]: Numbers) -> bool {
        scale == 0.0
    }

    #[inline(always)]
    fn needs_scalar([scale, _]: Numbers) -> bool {
        scale.abs() < TINY && scale != 0.0
    }

    /// If the product with `raise` is infinite, the code saturates.
    #[inline(always)]
    fn code(&self, encoder: ScaledEncoder, x: f32) -> u32 {
        signed(self.0.magnitude(x.abs() * encoder.raise, encoder.factor), x)
    }

    #[inline(always)]
    fn code_lanes<L: Lanes>(
        lanes: L,
        registers: F::Registers<'_, L>,
        encoder: ScaledEncoder,
        x: L::F,
    ) -> L::I {
        let factor = lanes.splat(encoder.factor);
        let magnitude = F::magnitude_lanes(lanes, registers, abs(lanes, x), factor);
        with_sign(lanes, magnitude, x)
    }

    #[inline(always)]
    fn code_packed<L: Lanes>(
        lanes: L,
        registers: F::Registers<'_, L>,
        encoder: ScaledEncoder,
        x: [L::F; 4],
    ) -> L::I {
        let factor = lanes.splat(encoder.factor);
        let magnitudes = four!(i => abs(lanes, x[i]));
        let codes = F::pack_magnitudes(lanes, registers, magnitudes, factor);
        lanes.in_order(lanes.with_signs(codes, x))
    }

    /// Random numbers are multiples of 2^-24, and each of three operations rounds by as much of the gap.
    #[inline(always)]
    fn draw(&self, encoder: ScaledEncoder, x: f32, u: f32) -> u32 {
        let y = x.abs() * encoder.raise;
        let decoded = |code| encoder.decoded(self.0.value(code));
        let nearest = self.0.magnitude(y, encoder.factor);
        let below = if decoded(nearest) > y {
            F::code_below(nearest)
        } else {
            nearest
        };
        if below == F::TOP {
            return signed(below, x);
        }
        let above = F::code_above(below);
        let (low, high) = (decoded(below), decoded(above));
        signed(
            if y - low > u * (high - low) {
                above
            } else {
                below
            },
            x,
        )
    }

    #[inline(always)]
    fn draw_lanes<L: Lanes>(
        lanes: L,
        registers: F::Registers<'_, L>,
        encoder: ScaledEncoder,
        x: L::F,
        u: L::F,
    ) -> L::I {
        let steps = VectorSteps {
            factor: lanes.splat(encoder.factor),
            unit: lanes.splat(encoder.unit),
        };
        let magnitude = F::draw_lanes(lanes, registers, abs(lanes, x), steps, u);
        with_sign(lanes, magnitude, x)
    }

    #[inline(always)]
    fn value(&self, decoder: ScaledDecoder, code: u32) -> f32 {
        self.add(decoder, code, 0.0)
    }

    #[inline(always)]
    fn value_lanes<L: Lanes>(
        lanes: L,
        registers: F::Registers<'_, L>,
        decoder: ScaledDecoder,
        code: L::I,
    ) -> L::F {
        Self::add_lanes(lanes, registers, decoder, code, lanes.splat(0.0))
    }

    /// Rounds only once, because a fused multiply-add adds the product.
    #[inline(always)]
    fn add(&self, decoder: ScaledDecoder, code: u32, sum: f32) -> f32 {
        let value = self.0.value(code as u8);
        if decoder.lower == 1.0 {
            value.mul_add(decoder.unit, sum)
        } else {
            (value * decoder.unit).mul_add(decoder.lower, sum)
        }
    }

    #[inline(always)]
    fn add_lanes<L: Lanes>(
        lanes: L,
        registers: F::Registers<'_, L>,
        decoder: ScaledDecoder,
        code: L::I,
        sum: L::F,
    ) -> L::F {
        let value = F::value_lanes(lanes, registers, code);
        lanes.fma(value, lanes.splat(decoder.unit), sum)
    }
}

/// Returns the code of a magnitude code with the sign of `x`; code 0 has none.
#[inline(always)]
fn signed(magnitude: u8, x: f32) -> u32 {
    let sign = ((x.to_bits() >> 24) & 0x80) as u8;
    u32::from(if magnitude == 0 { 0 } else { magnitude | sign })
}
