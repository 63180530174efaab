//! Reduction operators.

use std::fmt;

/// The factor of a pre-multiplied sum.
#[derive(Clone, Copy, Debug)]
pub enum Scalar {
    /// Factor for floating types.
    Float(f64),
    /// Factor for integer types.
    Int(i128),
    /// Device address of the factor, an element of the call's type. Kernels read it when the call
    /// runs.
    Device(u64),
}

impl PartialEq for Scalar {
    /// Compares by bits: 0 and -0 give different products, and a NaN gives the products of an equal NaN.
    fn eq(&self, other: &Scalar) -> bool {
        match (self, other) {
            (Scalar::Float(a), Scalar::Float(b)) => a.to_bits() == b.to_bits(),
            (Scalar::Int(a), Scalar::Int(b)) => a == b,
            (Scalar::Device(a), Scalar::Device(b)) => a == b,
            _ => false,
        }
    }
}

/// How contributions are combined.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ReduceOp {
    /// Sum; integers wrap.
    Sum,
    /// Product; integers wrap.
    Prod,
    /// Largest; NaN if any contribution is NaN.
    Max,
    /// Smallest; NaN if any contribution is NaN.
    Min,
    /// Sum divided once by the number of ranks, after accumulation. An average of 16- and 8-bit floats never
    /// overflows. Integers are refused, because their sum wraps; [`super::Call::wrapping_average`] admits them,
    /// and they truncate.
    Avg,
    /// Sum of contributions, each multiplied by its own rank's factor first.
    PreMulSum(Scalar),
}

impl ReduceOp {
    /// Names, in the order of [`ReduceOp::number`].
    const NAMES: [&str; 6] = ["sum", "prod", "max", "min", "avg", "premulsum"];

    /// Returns the name, without the factor.
    pub const fn name(self) -> &'static str {
        ReduceOp::NAMES[self.number() as usize]
    }

    /// Returns the number that travels in call signatures. It leaves out the factor of a
    /// pre-multiplied sum, which may differ from rank to rank. The first five numbers are those of
    /// `ncclRedOp_t`.
    pub const fn number(self) -> u8 {
        match self {
            ReduceOp::Sum => 0,
            ReduceOp::Prod => 1,
            ReduceOp::Max => 2,
            ReduceOp::Min => 3,
            ReduceOp::Avg => 4,
            ReduceOp::PreMulSum(_) => 5,
        }
    }

    /// Returns the name of the operator with this number.
    pub(crate) fn number_name(number: u8) -> &'static str {
        let name = ReduceOp::NAMES.get(usize::from(number));
        name.copied().unwrap_or("unknown")
    }

    /// Returns whether lossy codecs may carry the contributions. Only sums may, because rounding
    /// errors of the contributions just add up.
    pub const fn is_additive(self) -> bool {
        matches!(self, ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PreMulSum(_))
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
