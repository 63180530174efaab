//! Automatic loss scaling ("Training with mixed precision"): the loss is multiplied by the largest
//! scale at which no gradient overflows.
//!
//! **All ranks decide alike without exchanging a message.** A value that is not finite reaches every
//! rank through any codec (see [`crate::manual::numerics`]). A sum that overflows does so on every
//! rank. Every rank thus finds the same [`count_non_finite`] in the *output* of its all_reduce, or in
//! all outputs of a step, and decides by this count. On a GPU the calls take this verdict while they run
//! ([`DeviceBuffers::with_verdict`](crate::mem::DeviceBuffers::with_verdict)): pass their [`CallStatistics`] to
//! [`LossScaler::step`]. Do not use `Report::input`: it covers only the
//! data that this rank encoded.
//!
//! **Codecs that saturate need one more check.** They replace a value or sum beyond their largest
//! value by that largest value, on all ranks alike, so outputs do not show it. These codecs are
//! `cast16`, `cast_bf16`, `static8`, `mantissa8`, `trunc8`, `threshold2`, and codecs with the scales
//! that `tensor=K` keeps. With them the ranks must also sum `saturated` of their reports, and skip the
//! step unless the sum is 0. On a GPU [`CallStatistics::saturated`] counts elements of the input and no sums: use other
//! codecs there.
//!
//! **Unscaling** is free as part of the sum: use a pre-multiplied sum with the factor
//! [`LossScaler::inverse`], taken before [`LossScaler::update`]. Residuals of error feedback then
//! have the unit of the unscaled gradient and stay as they are. If scaled gradients are summed
//! instead, multiply the residuals by [`Verdict::rescale`].

use crate::error::{Error, Result};
use crate::types::CallStatistics;

/// Parameters of [`LossScaler`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScalerConfig {
    /// Scale of the first step.
    pub start: f64,
    /// Factor applied after [`LossScalerConfig::interval`] clean steps; more than 1.
    pub growth: f64,
    /// Factor applied after a step with a non-finite value; between 0 and 1.
    pub backoff: f64,
    /// Number of successive clean steps until the scale grows.
    pub interval: u32,
    /// Lower bound of the scale.
    pub smallest: f64,
    /// Upper bound of the scale.
    pub largest: f64,
}

impl Default for LossScalerConfig {
    /// Returns a scale of 2^16 that doubles after 2,000 clean steps and halves after each step with a
    /// non-finite value. It stays between 2^-126 and 2^127, so that the scale and its inverse are normal fp32
    /// numbers.
    fn default() -> LossScalerConfig {
        LossScalerConfig {
            start: 65536.0,
            growth: 2.0,
            backoff: 0.5,
            interval: 2000,
            smallest: 2f64.powi(-126),
            largest: 2f64.powi(127),
        }
    }
}

/// The mutable part of a [`LossScaler`], to be stored with a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScalerState {
    /// Scale of the next step.
    pub scale: f64,
    /// Number of steps without a non-finite value since the scale changed.
    pub clean: u32,
    /// Number of steps skipped so far.
    pub skipped: u64,
}

/// The decision about a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Verdict {
    /// Whether to update the weights with this step's gradients; otherwise skip the step.
    pub apply: bool,
    /// New scale divided by the old scale; 1 if it did not change.
    pub rescale: f64,
}

/// Adapts the scale of the loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScaler {
    config: LossScalerConfig,
    state: LossScalerState,
}

impl LossScaler {
    /// Creates a scaler before its first step.
    ///
    /// # Errors
    /// Invalid argument naming the parameter that is outside its range.
    pub fn new(config: LossScalerConfig) -> Result<LossScaler> {
        let state = LossScalerState {
            scale: config.start,
            clean: 0,
            skipped: 0,
        };
        LossScaler::restore(config, state)
    }

    /// Creates a scaler that continues from a checkpoint with the same parameters.
    ///
    /// # Errors
    /// As [`LossScaler::new`]; invalid argument if no update can reach `state`.
    pub fn restore(config: LossScalerConfig, state: LossScalerState) -> Result<LossScaler> {
        let bad = |what: String| Err(Error::invalid_argument(format!("loss scaler: {what}")));
        let LossScalerConfig {
            start,
            growth,
            backoff,
            interval,
            smallest,
            largest,
        } = config;
        if !(smallest > 0.0 && smallest <= largest && largest.is_finite()) {
            return bad(format!("a range of scales from {smallest} to {largest}"));
        }
        for (name, scale) in [("first", start), ("present", state.scale)] {
            if !(smallest..=largest).contains(&scale) {
                return bad(format!(
                    "a {name} scale of {scale}, outside {smallest} to {largest}"
                ));
            }
        }
        if !(growth > 1.0 && growth.is_finite()) {
            return bad(format!("a growth of {growth}; it is more than 1"));
        }
        if !(backoff > 0.0 && backoff < 1.0) {
            return bad(format!("a backoff of {backoff}; it is between 0 and 1"));
        }
        if interval == 0 || state.clean >= interval {
            return bad(format!(
                "{} clean steps of an interval of {interval}",
                state.clean
            ));
        }
        Ok(LossScaler { config, state })
    }

    /// Returns the factor for the loss.
    pub fn scale(&self) -> f64 {
        self.state.scale
    }

    /// Returns the factor that unscales gradients of the scaled loss.
    pub fn inverse(&self) -> f64 {
        1.0 / self.state.scale
    }

    /// Decides about a step and sets the scale of the next step. `non_finite` is true if any summed
    /// gradient of the step had a non-finite value.
    pub fn update(&mut self, non_finite: bool) -> Verdict {
        let LossScalerConfig {
            growth,
            backoff,
            interval,
            smallest,
            largest,
            ..
        } = self.config;
        let state = &mut self.state;
        let old = state.scale;
        if non_finite {
            state.scale = (old * backoff).max(smallest);
            state.clean = 0;
            state.skipped += 1;
        } else {
            state.clean += 1;
            if state.clean == interval {
                state.scale = (old * growth).min(largest);
                state.clean = 0;
            }
        }
        Verdict {
            apply: !non_finite,
            rescale: state.scale / old,
        }
    }

    /// Decides about a step as [`LossScaler::update`] does, by the verdicts that the calls of the step have taken of
    /// their outputs. Codecs that saturate hide sums that overflow: use others with this function.
    ///
    /// # Errors
    /// Invalid argument if there are no statistics, or if no call has written one of them; nothing changes.
    pub fn step(&mut self, statistics: &[CallStatistics]) -> Result<Verdict> {
        let mut non_finite = false;
        for (at, one) in statistics.iter().enumerate() {
            let Some(found) = one.has_non_finite_output() else {
                return Err(Error::invalid_argument(format!(
                    "loss scaler: no call has written statistics {at} of {}",
                    statistics.len()
                )));
            };
            non_finite |= found;
        }
        if statistics.is_empty() {
            return Err(Error::invalid_argument(
                "loss scaler: a step without statistics has no verdict",
            ));
        }
        Ok(self.update(non_finite))
    }

    /// Returns the parameters.
    pub fn config(&self) -> LossScalerConfig {
        self.config
    }

    /// Returns the state to store with a checkpoint.
    pub fn state(&self) -> LossScalerState {
        self.state
    }
}

/// Counts NaN and infinite elements.
pub fn count_non_finite(values: &[f32]) -> u64 {
    const EXPONENT: u32 = 0x7f80_0000;
    let is = |value: &f32| u64::from(value.to_bits() & EXPONENT == EXPONENT);
    values.iter().map(is).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn small() -> LossScalerConfig {
        LossScalerConfig {
            interval: 3,
            ..LossScalerConfig::default()
        }
    }

    #[test]
    fn default_scaler_doubles_and_halves_as_published() {
        let mut scaler = LossScaler::new(LossScalerConfig::default()).unwrap();
        assert_eq!(scaler.scale(), 65536.0);
        for step in 1..2000 {
            let verdict = scaler.update(false);
            assert!(verdict.apply && verdict.rescale == 1.0, "{step}");
        }
        assert_eq!(scaler.update(false).rescale, 2.0);
        assert_eq!(scaler.scale(), 131072.0);
        assert_eq!(
            scaler.update(true),
            Verdict {
                apply: false,
                rescale: 0.5
            }
        );
        assert_eq!((scaler.scale(), scaler.state().skipped), (65536.0, 1));
        assert_eq!(scaler.inverse() * 65536.0, 1.0);
    }

    #[test]
    fn non_finite_step_restarts_the_interval() {
        let mut scaler = LossScaler::new(small()).unwrap();
        let mut scales = Vec::new();
        for bad in [0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 1] {
            scaler.update(bad == 1);
            scales.push(scaler.scale() / 65536.0);
            let state = scaler.state();
            scaler = LossScaler::restore(small(), state).unwrap();
        }
        assert_eq!(
            scales,
            [1.0, 1.0, 0.5, 0.5, 0.5, 1.0, 1.0, 1.0, 2.0, 1.0, 0.5]
        );
        assert_eq!(scaler.state().skipped, 3);
    }

    #[test]
    fn scale_at_a_bound_stays_there() {
        let config = LossScalerConfig {
            smallest: 16384.0,
            largest: 100_000.0,
            ..small()
        };
        let mut scaler = LossScaler::new(config).unwrap();
        for _ in 0..5 {
            scaler.update(true);
        }
        assert_eq!(scaler.scale(), 16384.0);
        assert_eq!(scaler.update(true).rescale, 1.0);
        for _ in 0..30 {
            scaler.update(false);
        }
        assert_eq!(scaler.scale(), 100_000.0);
    }

    #[test]
    fn long_run_skips_one_step_per_interval() {
        // Gradients overflow at scales of 2^20 and more, so in the long run one step in 2001 is
        // skipped.
        let mut scaler = LossScaler::new(LossScalerConfig::default()).unwrap();
        let mut skipped = 0;
        for _ in 0..100_000 {
            let overflow = scaler.scale() >= 2f64.powi(20);
            skipped += u64::from(!scaler.update(overflow).apply);
        }
        assert_eq!(skipped, scaler.state().skipped);
        assert!((45..=50).contains(&skipped), "{skipped}");
    }

    #[test]
    fn step_decides_by_the_verdicts_of_all_calls() {
        let calls = |verdicts: &[u32]| {
            let of = |&verdict: &u32| CallStatistics {
                verdict,
                known: CallStatistics::NON_FINITE,
                ..CallStatistics::default()
            };
            verdicts.iter().map(of).collect::<Vec<_>>()
        };
        let mut scaler = LossScaler::new(small()).unwrap();
        assert!(scaler.step(&calls(&[0, 0])).unwrap().apply);
        assert!(
            !scaler
                .step(&calls(&[0, CallStatistics::NON_FINITE]))
                .unwrap()
                .apply
        );
        let before = scaler;
        assert!(scaler.step(&[]).is_err());
        assert!(scaler.step(&[CallStatistics::default()]).is_err());
        assert_eq!(scaler, before);
    }

    #[test]
    fn bad_parameter_is_named_in_the_error() {
        let good = LossScalerConfig::default();
        for (config, said) in [
            (LossScalerConfig { start: 0.0, ..good }, "first scale of 0"),
            (
                LossScalerConfig {
                    growth: 1.0,
                    ..good
                },
                "growth of 1",
            ),
            (
                LossScalerConfig {
                    backoff: 1.0,
                    ..good
                },
                "backoff of 1",
            ),
            (
                LossScalerConfig {
                    interval: 0,
                    ..good
                },
                "interval of 0",
            ),
            (
                LossScalerConfig {
                    smallest: f64::NAN,
                    ..good
                },
                "from NaN",
            ),
            (
                LossScalerConfig {
                    largest: f64::INFINITY,
                    ..good
                },
                "to inf",
            ),
        ] {
            let error = LossScaler::new(config).unwrap_err();
            assert!(error.message().contains(said), "{error}");
        }
    }

    #[test]
    fn count_non_finite_counts_nan_and_infinity() {
        let values = [0.0, f32::MAX, f32::NAN, f32::NEG_INFINITY, -0.0, 1e-45];
        assert_eq!(count_non_finite(&values), 2);
        assert_eq!(count_non_finite(&[]), 0);
    }
}
