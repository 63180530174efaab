//! Adaptive weight precision (ADT, "Reducing data motion to accelerate the training of deep
//! neural networks", algorithm 1): a group of tensors starts with few bits, and gets more once
//! its L2 norm has stopped growing.
//!
//! The paper's text and its authors' programs differ in details. [`Awp`] follows the text: it takes
//! the signed change relative to the norm of the previous batch. Bits never go down.

use crate::error::{Error, Result};

/// Parameters of [`Awp`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AwpConfig {
    /// T: the relative change of the norm above which it counts as growing. T depends on the model:
    /// it is the mean change of the norm over the epochs until the validation error first drops. The
    /// authors' scripts use 8e-5 and 1e-4.
    pub threshold: f64,
    /// Number of successive batches without growth after which bits are added; about an epoch.
    pub interval: u32,
    /// N: number of bits added at a time, 1 to 32.
    pub step_bits: u32,
    /// Number of bits at the start, 1 to `most_bits`.
    pub start_bits: u32,
    /// Largest number of bits, 1 to 32. The paper has 32; 16 moves at most half of the bytes of fp32.
    pub most_bits: u32,
}

impl AwpConfig {
    /// Creates the paper's parameters: 8 bits at the start, and 8 more each time, up to 32.
    pub fn new(threshold: f64, interval: u32) -> AwpConfig {
        AwpConfig {
            threshold,
            interval,
            step_bits: 8,
            start_bits: 8,
            most_bits: 32,
        }
    }
}

/// The mutable part of an [`Awp`], to be stored with a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AwpState {
    /// Number of bits to keep.
    pub bits: u32,
    /// Norm of the previous batch; `None` at the start and after bits were added.
    pub previous: Option<f64>,
    /// Number of successive batches without growth.
    pub count: u32,
}

/// Chooses the number of bits of one group of tensors.
///
/// Every rank must pass in the same norm, or ranks choose different codecs. Weights are equal on all
/// ranks, and so is their norm after `trunc*`, where the authors' programs take it. For other data,
/// sum the norms over the ranks first.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Awp {
    config: AwpConfig,
    state: AwpState,
}

impl Awp {
    /// Creates the state of a group before its first batch.
    ///
    /// # Errors
    /// Invalid argument naming the parameter that is outside its range.
    pub fn new(config: AwpConfig) -> Result<Awp> {
        let state = AwpState {
            bits: config.start_bits,
            previous: None,
            count: 0,
        };
        Awp::restore(config, state)
    }

    /// Creates a group that continues from a checkpoint with the same parameters.
    ///
    /// # Errors
    /// As [`Awp::new`]; invalid argument if no update can reach `state`.
    pub fn restore(config: AwpConfig, state: AwpState) -> Result<Awp> {
        let bad = |what: String| Err(Error::invalid_argument(format!("AWP: {what}")));
        if !config.threshold.is_finite() {
            return bad(format!("a threshold of {}", config.threshold));
        }
        if config.interval == 0 {
            return bad("an interval of 0 batches; it is about an epoch".into());
        }
        for (name, bits) in [
            ("step", config.step_bits),
            ("start", config.start_bits),
            ("most", config.most_bits),
        ] {
            if !(1..=32).contains(&bits) {
                return bad(format!("{name} bits of {bits}; they are 1 to 32"));
            }
        }
        if !(1..=config.most_bits).contains(&state.bits) {
            return bad(format!(
                "{} bits to begin with; they are 1 to {}",
                state.bits, config.most_bits
            ));
        }
        if state.previous.is_some_and(|norm| !is_norm(norm)) || state.count >= config.interval {
            return bad(format!(
                "a state with the norm {:?} and {} of {} batches",
                state.previous, state.count, config.interval
            ));
        }
        Ok(Awp { config, state })
    }

    /// Takes the group's L2 norm after a batch and returns the number of bits to keep from now on. A
    /// norm that is not finite changes nothing: it belongs to a step that a loss scaler skips.
    ///
    /// # Errors
    /// Invalid argument if the norm is finite and negative; nothing changes.
    pub fn update(&mut self, norm: f64) -> Result<u32> {
        if !norm.is_finite() {
            return Ok(self.state.bits);
        }
        if norm < 0.0 {
            return Err(Error::invalid_argument(format!(
                "AWP: an L2 norm of {norm}"
            )));
        }
        let state = &mut self.state;
        // After a norm of 0 the quotient is NaN, which counts as no growth, or infinite, which
        // counts as growth.
        let grown = state
            .previous
            .is_some_and(|previous| (norm - previous) / previous > self.config.threshold);
        state.count = if grown { 0 } else { state.count + 1 };
        state.previous = Some(norm);
        if state.count >= self.config.interval {
            *state = AwpState {
                bits: (state.bits + self.config.step_bits).min(self.config.most_bits),
                previous: None,
                count: 0,
            };
        }
        Ok(self.state.bits)
    }

    /// Returns the number of bits to keep.
    pub fn bits(&self) -> u32 {
        self.state.bits
    }

    /// Returns the codec that keeps these bits, rounded up to bytes: `trunc8`, `trunc16`, `trunc24`, or
    /// `raw` for all four.
    pub fn codec(&self) -> &'static str {
        match self.state.bits.div_ceil(8) {
            1 => "trunc8",
            2 => "trunc16",
            3 => "trunc24",
            _ => "raw",
        }
    }

    /// Returns the parameters.
    pub fn config(&self) -> AwpConfig {
        self.config
    }

    /// Returns the state to store with a checkpoint.
    pub fn state(&self) -> AwpState {
        self.state
    }
}

fn is_norm(norm: f64) -> bool {
    norm.is_finite() && norm >= 0.0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs the algorithm as the paper lists it, norm by norm.
    fn oracle(config: AwpConfig, norms: &[f64]) -> Vec<u32> {
        let (mut bits, mut previous, mut count) = (config.start_bits, f64::NAN, 0);
        let mut answers = Vec::new();
        for &norm in norms {
            if previous.is_nan() {
                count += 1;
            } else if (norm - previous) / previous > config.threshold {
                count = 0;
            } else {
                count += 1;
            }
            previous = norm;
            if count == config.interval {
                bits = u32::min(config.most_bits, bits + config.step_bits);
                (previous, count) = (f64::NAN, 0);
            }
            answers.push(bits);
        }
        answers
    }

    #[test]
    fn norm_without_growth_adds_bits() {
        let mut awp = Awp::new(AwpConfig::new(1e-3, 3)).unwrap();
        let answers: Vec<u32> = [
            1.0, 1.1, 1.2, 1.3, // growing
            1.3, 1.3001, 1.2, // three without growth
            1.2, 1.2, 1.2, // the first norm after a step counts
            2.0, 3.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0,
        ]
        .into_iter()
        .map(|norm| awp.update(norm).unwrap())
        .collect();
        let expected = [
            8, 8, 8, 8, 8, 8, 16, 16, 16, 24, 24, 24, 24, 24, 32, 32, 32, 32, 32,
        ];
        assert_eq!(answers, expected);
        assert_eq!(awp.codec(), "raw");
    }

    #[test]
    fn random_walks_give_the_bits_of_the_listing() {
        for seed in 0..200u64 {
            let mut word = seed;
            let mut norm = 10.0;
            let norms: Vec<f64> = (0..300)
                .map(|_| {
                    word = word
                        .wrapping_mul(6364136223846793005)
                        .wrapping_add(1442695040888963407);
                    norm *= 1.0 + ((word >> 40) as f64 / (1 << 24) as f64 - 0.5) * 1e-2;
                    norm
                })
                .collect();
            let config = AwpConfig {
                threshold: 1e-3,
                interval: 2 + (seed % 5) as u32,
                step_bits: 1 + (seed % 9) as u32,
                start_bits: 8,
                most_bits: 8 + (seed % 25) as u32,
            };
            let mut awp = Awp::new(config).unwrap();
            let mut answers = Vec::new();
            for &norm in &norms {
                answers.push(awp.update(norm).unwrap());
                // A restored group must continue like the original.
                awp = Awp::restore(config, awp.state()).unwrap();
            }
            assert_eq!(answers, oracle(config, &norms), "seed {seed}");
        }
    }

    #[test]
    fn norms_that_are_zero_or_not_finite_are_handled() {
        let mut awp = Awp::new(AwpConfig::new(0.0, 2)).unwrap();
        let before = awp.state();
        for norm in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            assert_eq!(awp.update(norm).unwrap(), 8);
            assert_eq!(awp.state(), before);
        }
        assert!(awp.update(-1.0).is_err());
        awp.update(0.0).unwrap();
        assert_eq!(awp.update(1e-300).unwrap(), 8);
        let mut flat = Awp::new(AwpConfig::new(0.0, 2)).unwrap();
        flat.update(0.0).unwrap();
        assert_eq!(flat.update(0.0).unwrap(), 16);
    }

    #[test]
    fn bits_select_trunc_codecs_then_raw() {
        let mut awp = Awp::new(AwpConfig::new(1.0, 1)).unwrap();
        let mut codecs = vec![awp.codec()];
        for _ in 0..4 {
            awp.update(1.0).unwrap();
            codecs.push(awp.codec());
        }
        assert_eq!(codecs, ["trunc8", "trunc16", "trunc24", "raw", "raw"]);
    }

    #[test]
    fn bad_parameter_is_named_in_the_error() {
        let good = AwpConfig::new(1e-4, 10);
        for (config, said) in [
            (
                AwpConfig {
                    threshold: f64::NAN,
                    ..good
                },
                "threshold of NaN",
            ),
            (
                AwpConfig {
                    interval: 0,
                    ..good
                },
                "interval of 0",
            ),
            (
                AwpConfig {
                    step_bits: 0,
                    ..good
                },
                "step bits of 0",
            ),
            (
                AwpConfig {
                    start_bits: 33,
                    ..good
                },
                "start bits of 33",
            ),
            (
                AwpConfig {
                    most_bits: 0,
                    ..good
                },
                "most bits of 0",
            ),
            (
                AwpConfig {
                    start_bits: 17,
                    most_bits: 16,
                    ..good
                },
                "17 bits to begin with; they are 1 to 16",
            ),
        ] {
            let error = Awp::new(config).unwrap_err();
            assert!(error.message().contains(said), "{error}");
        }
        let state = AwpState {
            bits: 8,
            previous: Some(-1.0),
            count: 0,
        };
        assert!(Awp::restore(good, state).is_err());
    }
}
