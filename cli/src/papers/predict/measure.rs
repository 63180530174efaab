//! Measures the costs of codecs on one core of this host.

use crate::papers::model::{CodecCost, Costs, LinkCost};
use cinch::codec::{Span, build};
use cinch::cpu::Isa;
use cinch::testing::{gaussian, random_word};
use cinch::types::{CodecKind, CodecSpec};
use std::hint::black_box;
use std::time::Instant;

/// Number of elements; their 4 MiB exceed a second-level cache, as gradients do.
const ELEMENTS: usize = 1 << 20;

/// Number of rounds; the median over the rounds is used.
const ROUNDS: usize = 9;

/// Measures copying, adding, and each codec's encode and decode-and-add. `link` gives the costs of
/// the link, which are not measured.
///
/// # Errors
/// Returns an error message if a codec cannot be built.
pub fn costs(link: LinkCost) -> Result<Costs, String> {
    let x = samples();
    let mut y = vec![0f32; ELEMENTS];
    let copy = per_element(|| {
        y.copy_from_slice(black_box(&x));
        black_box(&y);
    });
    let add = per_element(|| {
        for (y, x) in y.iter_mut().zip(black_box(&x)) {
            *y += x;
        }
        black_box(&y);
    });
    let mut codecs = Vec::new();
    for kind in CodecKind::ALL {
        let spec = CodecSpec::of(kind);
        let built = build(spec, Isa::detect()).map_err(|error| error.to_string())?;
        let Some(codec) = built else {
            codecs.push(CodecCost {
                spec,
                encode: copy,
                decode: copy,
            });
            continue;
        };
        let mut wire = vec![0u8; codec.wire_bytes(ELEMENTS)];
        let span = Span::whole(ELEMENTS);
        let encode = per_element(|| {
            codec.encode(span, black_box(&x), None, &mut wire, None);
            black_box(&wire);
        });
        y.fill(0.0);
        let decode = per_element(|| {
            codec.decode_reduce(span, black_box(&wire), &mut y);
            black_box(&y);
        });
        codecs.push(CodecCost {
            spec,
            encode,
            decode,
        });
    }
    Ok(Costs { link, add, codecs })
}

/// Returns the median seconds per element of `work` on [`ELEMENTS`].
fn per_element(mut work: impl FnMut()) -> f64 {
    work();
    let mut times: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            let start = Instant::now();
            work();
            start.elapsed().as_secs_f64()
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[ROUNDS / 2] / ELEMENTS as f64
}

fn samples() -> Vec<f32> {
    const SEED: u64 = 1;
    (0..ELEMENTS as u64)
        .map(|at| gaussian(random_word(SEED, at)) as f32)
        .collect()
}
