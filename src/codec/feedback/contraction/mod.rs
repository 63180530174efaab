//! Contraction factors of codecs: whether residuals of error feedback stay bounded, and by how much.
//!
//! Error feedback encodes v = x + r and keeps r' = v - C(v), where C encodes and decodes. If
//! ‖v - C(v)‖ <= q ‖v‖ for every v, with q < 1, then ‖r‖ never exceeds q / (1 - q) times the largest ‖x‖.
//! In the literature q² = 1 - δ (Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient
//! Compression Schemes", 2019).
//!
//! Some codecs are no contraction: a `minmax1` block of -1, 1 and 254 zeros decodes to -1 and 1 only. Their
//! decoded values are multiplied by a damping factor when feedback is on. An unbiased C with
//! E‖C(v)‖² <= (1 + ω) ‖v‖² becomes a contraction if it is multiplied by 1 / (1 + ω) (Horváth and Richtárik, "A
//! Better Alternative to Error Feedback", 2021; Richtárik, Sokolov, Fatkhullin, "EF21", 2021). The encoder
//! multiplies the numbers of the block, so neither the wire layout nor decoders change. What damping
//! holds back stays in the residual and is sent by later calls.

use super::super::{Codec, Span, info};
use crate::error::{Error, Result};
use crate::types::{CodecSetting, CodecSpec};

/// Norm in which a codec contracts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Norm {
    /// The largest magnitude of a block, or the magnitude of an element of formats without blocks. The bound
    /// holds for every encode.
    Largest,
    /// The Euclidean norm of a block. The bound holds on average over random numbers.
    Euclidean,
}

/// How the error of one encode with error feedback relates to the encoded values. Rounding errors of fp32 and
/// [`ErrorLaw::floor`](crate::codec::ErrorLaw::floor) are not included. The bound holds for magnitudes up to
/// [`ErrorLaw::largest`](crate::codec::ErrorLaw::largest). A call reduces a larger magnitude by `largest`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Contraction {
    /// Norm of the bound.
    pub norm: Norm,
    /// Bound q of ‖x - C(x)‖ / ‖x‖, with C damped. From 1 on the codec is refused with feedback.
    pub error: f64,
    /// Bound of ‖C(x)‖ / ‖x‖, with C damped.
    pub output: f64,
    /// Constant part of the bound: the threshold of `threshold2`, else 0.
    pub floor: f64,
    /// Factor by which encoders multiply the numbers of a block with feedback; a power of two.
    pub damping: f32,
}

impl Contraction {
    /// Creates the contraction of a codec that decodes no value beyond the largest of its block, and errs by
    /// at most `error` times that value.
    pub(crate) const fn largest(error: f64) -> Contraction {
        Contraction {
            norm: Norm::Largest,
            error,
            output: 1.0,
            floor: 0.0,
            damping: 1.0,
        }
    }

    /// Creates the contraction of a codec that errs by at most `error` times each element.
    pub(crate) const fn relative(error: f64) -> Contraction {
        Contraction {
            output: 1.0 + error,
            ..Contraction::largest(error)
        }
    }

    /// Creates the contraction of a codec with E‖x - C(x)‖² <= (1 - `delta`) ‖x‖².
    pub(crate) fn euclidean(delta: f64, output: f64, damping: f32) -> Contraction {
        Contraction {
            norm: Norm::Euclidean,
            error: (1.0 - delta).sqrt(),
            output,
            floor: 0.0,
            damping,
        }
    }

    /// Returns δ, where ‖x - C(x)‖² <= (1 - δ) ‖x‖².
    pub fn delta(&self) -> f64 {
        1.0 - self.error * self.error
    }

    /// Returns whether residuals stay bounded.
    pub fn is_bounded(&self) -> bool {
        self.error < 1.0
    }

    /// Returns the bound of the residual of an encode whose inputs have at most the norm `input` in every
    /// call.
    pub fn residual_bound(&self, input: f64) -> f64 {
        (self.error * input + self.floor) / (1.0 - self.error)
    }

    /// Returns the bound of the decoded values of an encode whose inputs have at most the norm `input` in
    /// every call.
    pub fn output_bound(&self, input: f64) -> f64 {
        self.output * (input + self.residual_bound(input))
    }
}

/// Returns the contraction of a codec; `None` for raw.
pub fn contraction(spec: CodecSpec) -> Option<Contraction> {
    info(spec.kind).map(|info| (info.contraction)(spec))
}

/// Returns the factor by which encoders multiply the numbers of a block with error feedback.
pub fn damping(spec: CodecSpec) -> f32 {
    contraction(spec).map_or(1.0, |contraction| contraction.damping)
}

/// Damps the `n` elements of `span` in `wire`, as each encode with error feedback does.
pub fn damp(codec: &dyn Codec, span: Span, n: usize, wire: &mut [u8]) {
    let factor = damping(codec.spec());
    if factor != 1.0 {
        codec.damp(span, n, factor, wire);
    }
}

/// Checks that residuals stay bounded with both codecs of a call.
///
/// # Errors
/// Invalid argument if a codec is no contraction.
pub fn check_codecs(setting: CodecSetting) -> Result<()> {
    for spec in [setting.intra, setting.inter] {
        let Some(contraction) = contraction(spec).filter(|found| !found.is_bounded()) else {
            continue;
        };
        let plain = CodecSpec { seed: 0, ..spec };
        return Err(Error::invalid_argument(format!(
            "codec \"{spec}\" with error feedback: the error of an encode may be {} times the largest \
             value of its block, so residuals would grow without bound; use \"{plain}\", which rounds to \
             nearest, or a codec of more bits",
            contraction.error
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
