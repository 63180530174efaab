//! Reduction operators.

use std::fmt;

/// The factor of a pre-multiplied sum.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scalar {
    /// For floating types.
    Float(f64),
    /// For integer types.
    Int(i128),
    /// The address of an element of the call's type, which kernels of the communicator's GPU read
    /// when the call runs.
    Device(u64),
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
    /// Sum divided once by the number of ranks, after accumulation; integers truncate.
    Avg,
    /// Sum of contributions, each multiplied by its own rank's factor first.
    PreMulSum(Scalar),
}

impl ReduceOp {
    /// Name, without the factor.
    pub const fn name(self) -> &'static str {
        match self {
            ReduceOp::Sum => "sum",
            ReduceOp::Prod => "prod",
            ReduceOp::Max => "max",
            ReduceOp::Min => "min",
            ReduceOp::Avg => "avg",
            ReduceOp::PreMulSum(_) => "premulsum",
        }
    }

    /// Number on the wire. The factor of a pre-multiplied sum is each rank's own business.
    /// The first five are those of `ncclRedOp_t`.
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

    /// Name of a wire number.
    pub const fn number_name(number: u8) -> &'static str {
        match number {
            0 => "sum",
            1 => "prod",
            2 => "max",
            3 => "min",
            4 => "avg",
            5 => "premulsum",
            _ => "unknown",
        }
    }

    /// Whether a lossy codec may carry the contributions: only sums commute with rounding.
    pub const fn is_additive(self) -> bool {
        matches!(self, ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PreMulSum(_))
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
