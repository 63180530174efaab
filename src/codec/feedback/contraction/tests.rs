//! Attacks the stated contraction of every codec: random and worst-case blocks, and hill climbing from each.

use super::*;
use crate::codec::{RoundingRandom, build};
use crate::cpu::Isa;
use crate::testing::{gaussian, random_word};
use crate::types::{CodecKind, ScaleRule};
use std::sync::Arc;

/// Number of encodes over which an error with stochastic rounding is averaged.
const DRAWS: u64 = 400;

/// Number of attempts of a climb to increase the ratio of error and input.
const CLIMBS: u64 = 150;

struct Attack {
    codec: Arc<dyn Codec>,
    contraction: Contraction,
}

impl Attack {
    fn new(spec: CodecSpec) -> Attack {
        Attack {
            codec: build(spec, Isa::detect()).unwrap().unwrap(),
            contraction: contraction(spec).unwrap(),
        }
    }

    /// Returns C(x), damped.
    fn decoded(&self, x: &[f32], operation: u64) -> Vec<f32> {
        let random = RoundingRandom::new(5, operation, 0);
        let span = Span::whole(x.len()).drawing(random);
        let mut wire = vec![0; self.codec.wire_bytes(x.len())];
        let mut y = vec![0.0; x.len()];
        self.codec.encode(span, x, None, &mut wire, None);
        damp(&*self.codec, span, x.len(), &mut wire);
        self.codec.decode(span, &wire, &mut y);
        y
    }

    /// Returns the ratio of error and input, which the contraction bounds, and that of output and input.
    fn ratios(&self, x: &[f32], draws: u64) -> (f64, f64) {
        let norm = |x: &mut dyn Iterator<Item = f64>| match self.contraction.norm {
            Norm::Largest => x.fold(0.0, |most, x| x.abs().max(most)),
            Norm::Euclidean => x.map(|x| x * x).sum::<f64>().sqrt(),
        };
        let law = self.codec.description().errors;
        let (mut error, mut output) = (0.0f64, 0.0f64);
        for draw in 0..draws {
            let y = self.decoded(x, draw);
            let e = norm(&mut x.iter().zip(&y).map(|(x, y)| f64::from(*x) - f64::from(*y)));
            let y = norm(&mut y.iter().map(|y| f64::from(*y)));
            match self.contraction.norm {
                Norm::Largest => (error, output) = (error.max(e), output.max(y)),
                Norm::Euclidean => {
                    error += e * e / draws as f64;
                    output += y * y / draws as f64;
                }
            }
        }
        if self.contraction.norm == Norm::Euclidean {
            (error, output) = (error.sqrt(), output.sqrt());
        }
        let input = norm(&mut x.iter().map(|x| f64::from(*x)));
        let floor = self.contraction.floor + law.floor;
        (
            ((error - floor).max(0.0)) / input,
            (output - floor).max(0.0) / input,
        )
    }

    fn assert_holds(&self, what: &str, x: &[f32]) -> f64 {
        let spec = self.codec.spec();
        let is_random =
            spec.kind.has_seed() && (spec.seed != 0 || spec.kind == CodecKind::TernGrad);
        let draws = if is_random { DRAWS } else { 1 };
        let (error, output) = self.ratios(x, draws);
        // Four standard errors of a mean over the draws, and roundings of fp32.
        let slack = match (is_random, self.contraction.norm) {
            (true, Norm::Euclidean) => 4.0 / (DRAWS as f64).sqrt() * 0.25,
            _ => 2f64.powi(-19),
        };
        let Contraction {
            error: q,
            output: d,
            ..
        } = self.contraction;
        assert!(error <= q + slack, "{spec} {what}: error {error} > {q}");
        assert!(output <= d + slack, "{spec} {what}: output {output} > {d}");
        error
    }

    /// Changes elements of `x` while this increases the error.
    fn climb(&self, mut x: Vec<f32>, seed: u64) -> Vec<f32> {
        let spec = self.codec.spec();
        let draws = if spec.kind == CodecKind::TernGrad {
            20
        } else {
            1
        };
        let mut best = self.ratios(&x, draws).0;
        for step in 0..CLIMBS {
            let word = |which| random_word(seed, 4 * step + which);
            let mut tried = x.clone();
            let at = word(0) as usize % x.len();
            let value = match word(1) % 4 {
                0 => 0.0,
                1 => x[word(2) as usize % x.len()],
                2 => -x[at],
                _ => x[at] * (1.0 + gaussian(word(2)) as f32),
            };
            // Half of the attempts change a run of elements.
            let len = 1 + (word(3) % 2) as usize * (word(3) >> 8) as usize % 40;
            let end = (at + len).min(x.len());
            tried[at..end].fill(value);
            if tried.iter().all(|x| *x == 0.0) {
                continue;
            }
            let found = self.ratios(&tried, draws).0;
            if found >= best {
                (best, x) = (found, tried);
            }
        }
        x
    }
}

/// Returns blocks on which codecs err most, of magnitude about 1.
fn blocks(n: usize, seed: u64) -> Vec<(&'static str, Vec<f32>)> {
    let normal = |at: usize| gaussian(random_word(seed, at as u64)) as f32;
    let of = |what, of: &dyn Fn(usize) -> f32| (what, (0..n).map(of).collect());
    vec![
        of("normal", &normal),
        of("heavy tails", &|at| {
            normal(at) * (1.5 * normal(at + n)).exp().min(50.0)
        }),
        of("a spike", &|at| f32::from(u8::from(at == 0))),
        of("a spike among small elements", &|at| {
            if at == 0 { 1.0 } else { 0.0108 }
        }),
        of("a spike among tiny elements", &|at| {
            if at == 0 { 1.0 } else { 0.0025 }
        }),
        of("two ends and zeros", &|at| [1.0, -1.0, 0.0][at.min(2)]),
        of("just below the middle", &|at| [-1.0, 3.0, 0.999][at.min(2)]),
        of("just above the middle", &|at| [-1.0, 3.0, 1.001][at.min(2)]),
        of("equal", &|_| -0.7),
        of("halves of steps", &|at| (at % 255) as f32 + 0.5),
    ]
}

#[test]
fn error_of_every_codec_is_within_its_contraction() {
    for spec in CodecSpec::samples() {
        if matches!(spec.scale, ScaleRule::Tensor { .. }) && spec.kind.has_scale() {
            // A kept scale saturates, which is no property of one encode.
            continue;
        }
        let attack = Attack::new(spec);
        let largest = attack.codec.description().errors.largest as f32;
        let n = match spec.scale {
            ScaleRule::Block(block) if spec.kind.has_scale() => block as usize,
            _ => 64,
        };
        let mut worst = 0f64;
        for (what, mut x) in blocks(n, 7) {
            let most = x.iter().fold(0f32, |most, x| most.max(x.abs()));
            // Bounds hold up to the largest value of a fixed range.
            let scale = if largest.is_finite() {
                0.9 * largest.min(1e30) / most
            } else {
                1.0
            };
            x.iter_mut().for_each(|x| *x *= scale);
            worst = worst.max(attack.assert_holds(what, &x));
            if n <= 256 {
                let climbed = attack.climb(x, 11);
                if climbed.iter().all(|x| x.abs() <= largest) {
                    worst = worst.max(attack.assert_holds("climbed", &climbed));
                }
            }
        }
        if attack.codec.granule() == 1 {
            // Each element is a block of its own.
            for at in 0..20_000 {
                let decades = 9.0 * (random_word(3, at) >> 40) as f32 / (1 << 24) as f32;
                let x = 0.9 * largest.min(1e30) * 10f32.powf(-decades);
                worst = worst.max(attack.assert_holds("one element", &[x]));
            }
        }
        println!(
            "{spec}: error {worst:.5} of {:.5}",
            attack.contraction.error
        );
    }
}

#[test]
fn only_minmax1_with_a_seed_is_refused() {
    for spec in CodecSpec::samples() {
        let setting = CodecSetting {
            intra: spec,
            inter: spec,
            auto: false,
        };
        let is_refused = spec.kind == CodecKind::MinMax1 && spec.seed != 0;
        assert_eq!(check_codecs(setting).is_err(), is_refused, "{spec}");
    }
    let setting = "intra=raw,inter=minmax1:seed=3".parse().unwrap();
    let error = check_codecs(setting).unwrap_err();
    for word in [
        "minmax1:block=256:seed=3",
        "1.5 times",
        "use \"minmax1:block=256\"",
    ] {
        assert!(error.message().contains(word), "{error}");
    }
}

/// Fused kernels have no damping: their codecs need none.
#[test]
fn codecs_of_fused_kernels_are_not_damped() {
    for kind in crate::codec::FUSED_CODECS {
        assert_eq!(damping(CodecSpec::of(kind)), 1.0, "{kind:?}");
    }
}
