//! Counts differences between a result and the expected values.

/// Result of a comparison. Results for parts of an output can be merged into the result for all of
/// it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Comparison {
    /// Number of elements that were compared.
    pub elements: u64,
    /// Elements outside their bound.
    pub wrong: u64,
    /// Index of the first wrong element.
    pub first_wrong: Option<u64>,
    /// Largest error; infinite if exactly one of an actual and an expected value is not finite.
    pub max_abs_err: f64,
    /// Sum of the squares of finite errors.
    pub error_squares: f64,
    /// Sum of the squares of finite expected values.
    pub value_squares: f64,
}

impl Comparison {
    /// Returns the root mean square of the errors relative to that of the expected values; infinite if all
    /// expected values are zero and some error is not.
    pub fn rms_rel_err(&self) -> f64 {
        if self.error_squares == 0.0 {
            return 0.0;
        }
        (self.error_squares / self.value_squares).sqrt()
    }

    /// Adds the result for the elements that follow the elements compared here.
    pub fn merge(&mut self, other: &Comparison) {
        let shifted = other.first_wrong.map(|at| self.elements + at);
        self.first_wrong = self.first_wrong.or(shifted);
        self.elements += other.elements;
        self.wrong += other.wrong;
        self.max_abs_err = self.max_abs_err.max(other.max_abs_err);
        self.error_squares += other.error_squares;
        self.value_squares += other.value_squares;
    }

    /// Adds one element. `right` states whether the caller accepts its value.
    #[inline]
    pub(super) fn add(&mut self, expected: f64, actual: f64, right: bool) {
        let at = self.elements;
        self.elements += 1;
        if !right {
            self.wrong += 1;
            self.first_wrong.get_or_insert(at);
        }
        match (expected.is_finite(), actual.is_finite()) {
            (true, true) => {
                let error = (actual - expected).abs();
                self.max_abs_err = self.max_abs_err.max(error);
                self.error_squares += error * error;
                self.value_squares += expected * expected;
            }
            (false, false) => {}
            // The sums leave out non-finite elements, so the largest error must show the mismatch.
            _ => self.max_abs_err = f64::INFINITY,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_merge_into_the_whole() {
        let elements = [
            (1.0, 1.5, true),
            (2.0, 2.0, true),
            (-2.0, 0.0, false),
            (f64::NAN, f64::INFINITY, true),
            (0.0, 0.25, false),
        ];
        let compare = |part: &[(f64, f64, bool)]| {
            let mut found = Comparison::default();
            for &(expected, actual, right) in part {
                found.add(expected, actual, right);
            }
            found
        };
        let whole = compare(&elements);
        let mut merged = compare(&elements[..1]);
        merged.merge(&compare(&elements[1..4]));
        merged.merge(&compare(&elements[4..]));
        assert_eq!(merged, whole);
        assert_eq!(
            (whole.elements, whole.wrong, whole.first_wrong),
            (5, 2, Some(2))
        );
        assert_eq!(whole.max_abs_err, 2.0);
        assert_eq!(whole.rms_rel_err(), ((0.25 + 4.0 + 0.0625) / 9.0f64).sqrt());
        assert_eq!(Comparison::default().rms_rel_err(), 0.0);
        for right in [false, true] {
            let one_sided = compare(&[(1.0, f64::NAN, right)]);
            assert_eq!(one_sided.max_abs_err, f64::INFINITY);
            assert_eq!(one_sided.rms_rel_err(), 0.0);
        }
    }
}
