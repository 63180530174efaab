//! Bounds how far a correct raw result may be from the exact result.

use super::numbers::FloatFormat;
use crate::types::{DType, ReduceOp};

/// The error bound of a raw reduction of floats, whatever the algorithm.
///
/// Arithmetic is in the accumulator type, with unit roundoff a. Rings and trees round partial
/// results to the element type, with unit roundoff d, whenever they travel. A contribution t meets
/// at most one rounding of either kind per rank, one for a factor and one for a division. It
/// arrives as t (1 + e) with |e| <= (1 + a)^(n+2) (1 + d)^n - 1 = g. The sum's error is at most g
/// times the sum of |t|, and a product's at most g times its magnitude. Each rounding below the
/// normal range adds at most half a subnormal step. For f64 the reference itself rounds as often,
/// so g counts twice the roundings.
///
/// The bound of maximum and minimum is 0.
#[derive(Clone, Copy, Debug)]
pub struct RawBound {
    op: ReduceOp,
    nranks: f64,
    relative: f64,
    absolute: f64,
    largest: f64,
}

impl RawBound {
    /// Creates the bound for `nranks` contributions of `dtype`; for integers it is 0.
    pub fn new(dtype: DType, op: ReduceOp, nranks: usize) -> RawBound {
        let exact = RawBound {
            op,
            nranks: nranks as f64,
            relative: 0.0,
            absolute: 0.0,
            largest: f64::INFINITY,
        };
        let formats = (FloatFormat::of(dtype), FloatFormat::of(dtype.accumulator()));
        let (Some(element), Some(accumulator)) = formats else {
            return exact;
        };
        if matches!(op, ReduceOp::Max | ReduceOp::Min) {
            return exact;
        }
        let narrow = dtype != dtype.accumulator();
        let hops = if narrow { nranks as f64 } else { 0.0 };
        let steps = nranks as f64 + 2.0;
        let steps = if dtype == DType::F64 {
            2.0 * steps
        } else {
            steps
        };
        let growth =
            steps * accumulator.unit_roundoff().ln_1p() + hops * element.unit_roundoff().ln_1p();
        // An average halves its contributions until no sum overflows (`Plan::average_shift`), which rounds
        // them below the normal range. The division then raises all roundings by up to 4.
        let averages_narrow = op == ReduceOp::Avg && narrow;
        let raised = if averages_narrow { 8.0 } else { 1.0 };
        let absolute = raised * (steps * accumulator.smallest() + hops * element.smallest());
        RawBound {
            // The last factor covers the rounding errors of this computation.
            relative: growth.exp_m1() * (1.0 + 1e-9),
            absolute: absolute * growth.exp(),
            largest: match averages_narrow {
                true => f64::INFINITY,
                false => element.largest.min(accumulator.largest),
            },
            ..exact
        }
    }

    /// Returns the error bound of one element whose exact result is `value`. For sums, `magnitude` is the sum
    /// of the contributions' magnitudes. For products it is the product of max(1, |x|).
    #[inline]
    pub fn of(&self, value: f64, magnitude: f64) -> f64 {
        let scale = match self.op {
            ReduceOp::Prod => return self.relative * value.abs() + self.absolute * magnitude,
            ReduceOp::Avg => magnitude / self.nranks,
            _ => magnitude,
        };
        self.relative * scale + self.absolute
    }

    /// Returns whether a partial result may exceed the type's range, so that a non-finite result is also
    /// correct. In averages of narrow floats none may. For `magnitude` see [`RawBound::of`].
    #[inline]
    pub fn may_overflow(&self, magnitude: f64) -> bool {
        let reach = magnitude * (1.0 + self.relative) + self.absolute;
        reach.is_nan() || reach >= self.largest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_about_the_roundings_that_happen() {
        let sum = |dtype, n| RawBound::new(dtype, ReduceOp::Sum, n).of(0.0, 1.0);
        let near = |x: f64, expected: f64| {
            assert!(
                (x / expected - 1.0).abs() < 0.01,
                "{x:e} is not near {expected:e}"
            );
        };
        near(sum(DType::F32, 4), 6.0 * 2f64.powi(-24));
        near(sum(DType::F64, 4), 12.0 * 2f64.powi(-53));
        near(sum(DType::F16, 4), 4.0 * 2f64.powi(-11));
        // Eight roundings with a relative error of 1/8 each compound. The bound also allows eight
        // steps of the smallest subnormal, 1/65536.
        near(
            sum(DType::F8E5M2, 8),
            1.125f64.powi(8) * (1.0 + 8.0 / 65536.0) - 1.0,
        );
        assert_eq!(
            RawBound::new(DType::I32, ReduceOp::Sum, 4).of(9.0, 9.0),
            0.0
        );
        assert_eq!(
            RawBound::new(DType::F32, ReduceOp::Max, 4).of(9.0, 9.0),
            0.0
        );
    }

    #[test]
    fn an_average_errs_less_than_its_sum() {
        let bound = |op| RawBound::new(DType::F32, op, 4).of(1.0, 1.0);
        assert!((bound(ReduceOp::Avg) / bound(ReduceOp::Sum) - 0.25).abs() < 1e-9);
    }

    #[test]
    fn overflow_is_foreseen() {
        let bound = RawBound::new(DType::F8E4M3, ReduceOp::Sum, 2);
        assert!(!bound.may_overflow(300.0));
        assert!(bound.may_overflow(448.0));
        assert!(bound.may_overflow(f64::NAN));
        assert!(!RawBound::new(DType::I64, ReduceOp::Sum, 2).may_overflow(1e30));
    }
}
