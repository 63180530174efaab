//! `cinch codecs --attack` and `--exhaustive`: searches for errors beyond the documented bounds, and compares codecs
//! with the nearest number by exact arithmetic, for every fp32 number.

use cinch::CodecSpec;
use cinch::codec::{Codec, Span, build};
use cinch::cpu::Isa;
use cinch::testing::attack;
use cinch::types::{CodecKind, ScaleRule};
use std::collections::BTreeMap;
use std::io::{Error, Result, Write};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};

/// Attacks the bounds of every codec with a number of encoded blocks, and prints the largest ratio of an error to
/// its bound.
///
/// # Errors
/// Returns an error if a ratio exceeds 1, after all codecs were attacked. Returns the writer's errors.
pub fn run_attacks(evaluations: u64, seed: u64, out: &mut dyn Write) -> Result<()> {
    writeln!(
        out,
        "# {evaluations} blocks of 32 elements for each codec, seed {seed}"
    )?;
    writeln!(
        out,
        "{:<26} {:>11}  closest element",
        "codec", "error/bound"
    )?;
    let mut over = Vec::new();
    let specs = CodecSpec::samples();
    let attack = |spec: &CodecSpec| attack(*spec, evaluations, seed).ok();
    on_all_cores(&specs, attack, |spec, found| {
        let Some(found) = found else {
            return Ok(());
        };
        let (x, y) = found.element;
        writeln!(
            out,
            "{:<26} {:>11.7}  {x:e} became {y:e}",
            spec.to_string(),
            found.ratio
        )?;
        out.flush()?;
        if found.ratio > 1.0 {
            let bits: Vec<String> = found
                .block
                .iter()
                .map(|x| format!("{:08x}", x.to_bits()))
                .collect();
            writeln!(out, "  block {}", bits.join(" "))?;
            over.push(spec.to_string());
        }
        Ok(())
    })?;
    match over.is_empty() {
        true => Ok(()),
        false => Err(Error::other(format!(
            "errors exceed their bounds: {}",
            over.join(", ")
        ))),
    }
}

/// Runs `work` on each of `tasks`, with a thread on each core, and passes the results to `print` in the order of the
/// tasks.
///
/// # Errors
/// Returns the first error of `print`, after the tasks that run.
fn on_all_cores<T: Sync, R: Send>(
    tasks: &[T],
    work: impl Fn(&T) -> R + Sync,
    mut print: impl FnMut(&T, R) -> Result<()>,
) -> Result<()> {
    let next = AtomicUsize::new(0);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        let (sender, results) = mpsc::channel();
        for _ in 0..threads.min(tasks.len()) {
            let (sender, next, work) = (sender.clone(), &next, &work);
            scope.spawn(move || {
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    // The receiver is gone after an error of `print`.
                    if at >= tasks.len() || sender.send((at, work(&tasks[at]))).is_err() {
                        break;
                    }
                }
            });
        }
        drop(sender);
        let mut early = BTreeMap::new();
        let mut printed = 0;
        for (at, result) in results {
            early.insert(at, result);
            while let Some(result) = early.remove(&printed) {
                print(&tasks[printed], result)?;
                printed += 1;
            }
        }
        Ok(())
    })
}

/// Number of elements that are encoded together.
const PIECE: usize = 1 << 16;
/// Number of finite magnitudes.
const FINITE: u32 = 0x7f80_0000;
/// Codecs without scales.
const UNSCALED: [&str; 7] = [
    "cast16",
    "cast_bf16",
    "trunc8",
    "trunc16",
    "trunc24",
    "static8",
    "mantissa8",
];
/// Codecs with a scale, which `check_magnitudes` sets.
const SCALED: [&str; 4] = [
    "linear8:tensor=1",
    "dynamic8:tensor=1",
    "fp8_e4m3:tensor=1",
    "fp8_e5m2:tensor=1",
];
/// Scales of the codecs with scales. The reciprocal of the second is rounded.
const SCALES: [f32; 2] = [1.0, 3.0];

/// How a codec breaks ties between two codes.
#[derive(Clone, Copy, PartialEq)]
enum Ties {
    Smaller,
    Even,
}

/// The code that a codec must give to each magnitude, from exact arithmetic.
struct Oracle {
    /// Magnitudes with the smallest code of each, ascending.
    values: Vec<(f64, u32)>,
    ties: Ties,
    /// Distance from a midpoint within which roundings of the codec may choose either neighbour.
    slack: f64,
}

impl Oracle {
    /// Creates the oracle of a codec that rounds to nearest; `None` for other codecs.
    fn new(codec: &dyn Codec, scale: f64) -> Option<Oracle> {
        let kind = codec.spec().kind;
        let codes = match kind {
            CodecKind::Cast16 => 0..0x7c00u32,
            CodecKind::CastBf16 => 0..0x7f80,
            CodecKind::Fp8E4M3 => 0..0x7f,
            CodecKind::Fp8E5M2 => 0..0x7c,
            CodecKind::Linear8
            | CodecKind::Dynamic8
            | CodecKind::Static8
            | CodecKind::Mantissa8 => 0..0x80,
            _ => return None,
        };
        let bits = codec.description().code_bits;
        let most = f64::from(codes.end - 1);
        let value = |code: u32| match kind {
            CodecKind::Linear8 => f64::from(code) * scale / most,
            CodecKind::Fp8E4M3 => minifloat(code, 3, 7) * scale / 448.0,
            CodecKind::Fp8E5M2 => minifloat(code, 2, 15) * scale / 57_344.0,
            CodecKind::Dynamic8 => f64::from(decoded(codec, bits, code, 1.0)) * scale,
            _ => f64::from(decoded(codec, bits, code, 1.0)),
        };
        let mut values: Vec<(f64, u32)> = codes.map(|code| (value(code), code)).collect();
        values.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        values.dedup_by(|b, a| a.0 == b.0);
        let even = matches!(
            kind,
            CodecKind::Cast16 | CodecKind::CastBf16 | CodecKind::Fp8E4M3 | CodecKind::Fp8E5M2
        );
        Some(Oracle {
            values,
            ties: if even { Ties::Even } else { Ties::Smaller },
            slack: if kind.has_scale() {
                scale * 2f64.powi(-21)
            } else {
                0.0
            },
        })
    }

    fn middle(&self, at: usize) -> f64 {
        (self.values[at].0 + self.values[at + 1].0) / 2.0
    }

    /// Moves `at` to the value nearest to `x`, which is not smaller than in the last call.
    fn advance(&self, at: &mut usize, x: f64) {
        while *at + 1 < self.values.len() {
            let middle = self.middle(*at);
            let is_tie_up = x == middle && self.ties == Ties::Even && self.values[*at].1 % 2 == 1;
            if x < middle || x == middle && !is_tie_up {
                break;
            }
            *at += 1;
        }
    }

    /// Returns whether `code` is a neighbour of value `at` whose midpoint is within the slack of `x`.
    fn is_near_tie(&self, at: usize, code: u32, x: f64) -> bool {
        let close = |at: usize| (self.middle(at) - x).abs() <= self.slack;
        let below = at > 0 && self.values[at - 1].1 == code && close(at - 1);
        below || at + 1 < self.values.len() && self.values[at + 1].1 == code && close(at)
    }
}

/// Returns the value of a code of a float with `mantissa` bits and this bias.
fn minifloat(code: u32, mantissa: u32, bias: i32) -> f64 {
    let (exponent, fraction) = ((code >> mantissa) as i32, f64::from(code % (1 << mantissa)));
    let unit = 2f64.powi(-(mantissa as i32));
    match exponent {
        0 => fraction * unit * 2f64.powi(1 - bias),
        _ => (1.0 + fraction * unit) * 2f64.powi(exponent - bias),
    }
}

/// Decodes one code, with the number 1 for the scale.
fn decoded(codec: &dyn Codec, bits: usize, code: u32, scale: f32) -> f32 {
    let mut wire = vec![0; codec.wire_bytes(1)];
    wire[..bits / 8].copy_from_slice(&code.to_le_bytes()[..bits / 8]);
    if wire.len() > 16 {
        wire[16..20].copy_from_slice(&scale.to_le_bytes());
    }
    let mut y = [0.0];
    codec.decode(Span::whole(1), &wire, &mut y);
    y[0]
}

/// Compares the codes of every fp32 number with exact arithmetic, and prints the count of near ties: numbers within
/// 2^-21 of the scale from the middle of two values, which roundings of a scaled codec may take to either.
///
/// # Errors
/// Returns an error that names the first wrong code. Returns the writer's errors.
pub fn run_exhaustive(out: &mut dyn Write) -> Result<()> {
    writeln!(
        out,
        "{:<17} {:>5} {:>12} {:>10}",
        "codec", "scale", "numbers", "near ties"
    )?;
    let scaled = |name| SCALES.map(|scale| (name, Some(scale)));
    let mut tasks: Vec<(&str, Option<f32>)> = UNSCALED.map(|name| (name, None)).to_vec();
    tasks.extend(SCALED.into_iter().flat_map(scaled));
    on_all_cores(
        &tasks,
        |&(name, scale)| check_all(name, scale),
        |&(name, scale), ties| {
            let scale = scale.map_or("-".into(), |scale| scale.to_string());
            let numbers = 2 * u64::from(FINITE);
            writeln!(out, "{name:<17} {scale:>5} {numbers:>12} {:>10}", ties?)?;
            out.flush()
        },
    )
}

/// Checks the codes of all finite numbers. Returns the count of near ties.
fn check_all(name: &str, scale: Option<f32>) -> Result<u64> {
    let spec: CodecSpec = name.parse().map_err(Error::other)?;
    let codec = build(spec, Isa::detect()).map_err(Error::other)?;
    let codec: Arc<dyn Codec> = codec.ok_or_else(|| Error::other("raw has no codes"))?;
    assert!(
        scale.is_some()
            == (spec.kind.has_scale() && matches!(spec.scale, ScaleRule::Tensor { .. }))
    );
    check_magnitudes(&*codec, scale, 0..FINITE)
}

/// Checks the codes of finite numbers with these magnitude bits, of both signs. Returns the count of near ties.
fn check_magnitudes(
    codec: &dyn Codec,
    scale: Option<f32>,
    magnitudes: std::ops::Range<u32>,
) -> Result<u64> {
    let kind = codec.spec().kind;
    let oracle = Oracle::new(codec, scale.unwrap_or(1.0).into());
    let bytes = codec.description().code_bits / 8;
    let keeps_sign_of_zero = matches!(
        kind,
        CodecKind::Cast16
            | CodecKind::CastBf16
            | CodecKind::Trunc8
            | CodecKind::Trunc16
            | CodecKind::Trunc24
    );
    let mut wire = vec![0; codec.wire_bytes(PIECE)];
    let mut x = Vec::with_capacity(PIECE);
    let (mut at, mut near_ties) = (0, 0u64);
    let mut first = magnitudes.start;
    while first < magnitudes.end {
        let last = magnitudes.end.min(first + PIECE as u32);
        let start = at;
        for sign in [0, 1u32 << 31] {
            x.clear();
            x.extend((first..last).map(|bits| f32::from_bits(bits | sign)));
            codec.encode(Span::whole(x.len()), &x, scale, &mut wire, None);
            at = start;
            for (i, &x) in x.iter().enumerate() {
                let mut code = [0; 4];
                code[..bytes].copy_from_slice(&wire[i * bytes..(i + 1) * bytes]);
                let code = u32::from_le_bytes(code);
                let top = 1 << (8 * bytes - 1);
                let (is_negative, code) = (code & top != 0, code & !top);
                let magnitude = f64::from(x.abs());
                let right = match &oracle {
                    None => code == truncated(x.abs(), 8 * bytes as u32),
                    Some(oracle) => {
                        oracle.advance(&mut at, magnitude);
                        let is_near =
                            oracle.values[at].1 != code && oracle.is_near_tie(at, code, magnitude);
                        near_ties += u64::from(is_near);
                        is_near || oracle.values[at].1 == code
                    }
                };
                let expects_sign = sign != 0 && (code != 0 || keeps_sign_of_zero);
                if !right || is_negative != expects_sign {
                    return Err(Error::other(format!(
                        "{} gives {x:e} ({:08x}) code {code:x}, sign {is_negative}",
                        codec.spec(),
                        x.to_bits()
                    )));
                }
            }
        }
        first = last;
    }
    Ok(near_ties)
}

/// Returns the code of a finite magnitude by truncation; one byte saturates below the code of infinity.
fn truncated(x: f32, bits: u32) -> u32 {
    let magnitude = match bits {
        8 => x.to_bits().min(0x7eff_ffff),
        _ => x.to_bits(),
    };
    magnitude >> (32 - bits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_printed_in_order_and_an_error_ends_the_work() {
        let tasks: Vec<usize> = (0..100).collect();
        let mut printed = Vec::new();
        let print = |&task: &usize, double: usize| {
            printed.push(double);
            if task == 70 {
                return Err(Error::other("no space"));
            }
            Ok(())
        };
        assert!(on_all_cores(&tasks, |task| 2 * task, print).is_err());
        assert_eq!(printed, (0..=70).map(|task| 2 * task).collect::<Vec<_>>());
    }

    /// Checks two octaves below 1 and the numbers around 65,504, and that a wrong scale is found.
    #[test]
    fn codes_are_nearest_by_exact_arithmetic() {
        for name in UNSCALED {
            let codec = build(name.parse().unwrap(), Isa::detect())
                .unwrap()
                .unwrap();
            for range in [
                0x3f7c_0000..0x3f81_0000,
                0x477f_0000..0x4781_0000,
                0..0x2_0000,
            ] {
                assert_eq!(check_magnitudes(&*codec, None, range).unwrap(), 0, "{name}");
            }
        }
        let codec = build("linear8:tensor=1".parse().unwrap(), Isa::detect());
        let codec = codec.unwrap().unwrap();
        let range = 0x3f00_0000..0x3f02_0000;
        assert!(check_magnitudes(&*codec, Some(3.0), range.clone()).is_ok());
        let oracle = Oracle::new(&*codec, 3.0).unwrap();
        assert_eq!(oracle.values.len(), 128);
        let mut at = 0;
        oracle.advance(&mut at, 1.5);
        assert_eq!(oracle.values[at].1, 63, "a tie goes to the smaller code");
    }
}
