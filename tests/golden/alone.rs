//! Cases that need no communicator: codecs of arrays, and helpers for training.

use super::abi::{self, CAwp, CLossScaler};
use super::cases::codecs;
use super::data::{BF16, DTYPES, F16, F32, Hash, Inputs, Pattern};
use super::run::{Outcome, Outcomes};

const PUBLISHED: u32 = 1;
/// A `cinch_layout_t` and its name.
const LAYOUTS: [(u32, &str); 2] = [(0, "chunk"), (PUBLISHED, "published")];
const COUNTS: [usize; 4] = [0, 1, 17, 2405];

pub fn run() -> Outcomes {
    let mut outcomes = Outcomes::new();
    let mut inputs = Inputs::new(0);
    for codec in codecs() {
        for layout in LAYOUTS {
            let name = format!("alone/{}/{codec}", layout.1);
            outcomes.insert(name, encoded(&mut inputs, codec, layout.0));
        }
    }
    for dtype in DTYPES {
        let mut hash = Hash::NEW;
        let values = inputs.take(dtype, Pattern::Special, 0, 2405);
        let (code, found) = abi::count_non_finite(values, 2405, dtype.number);
        hash.word(code.into());
        hash.word(found);
        let error = (code != 0).then_some(code);
        outcomes.insert(
            format!("non_finite/{}", dtype.name),
            Outcome { hash, error },
        );
    }
    outcomes.insert("awp".into(), precision());
    outcomes.insert("loss_scaler".into(), loss_scaler());
    outcomes
}

/// Encodes and decodes arrays of each type, pattern and count. Hashes the encoded bytes, the decoded
/// elements, and the element count in headers of the published layout.
fn encoded(inputs: &mut Inputs, codec: &str, layout: u32) -> Outcome {
    let mut outcome = Outcome {
        hash: Hash::NEW,
        error: None,
    };
    let mut add = |code: abi::Code, bytes: &[u8]| {
        outcome.hash.word(code.into());
        if code == 0 {
            outcome.hash.bytes(bytes);
        }
        outcome.error = outcome.error.or((code != 0).then_some(code));
    };
    for dtype in [F32, F16, BF16] {
        for (pattern, count) in Pattern::ALL
            .into_iter()
            .flat_map(|p| COUNTS.map(|c| (p, c)))
        {
            let values = inputs.take(dtype, pattern, 0, count);
            let (code, wire) = abi::encode(codec, layout, values, count, dtype.number, 5);
            add(code, &wire);
            if layout == PUBLISHED {
                let (code, held) = abi::wire_count(codec, layout, &wire);
                add(code, &held.to_le_bytes());
            }
            let to = (dtype.number, dtype.size);
            let (code, elements) = abi::decode(codec, layout, &wire, count, to);
            add(code, &elements);
        }
    }
    outcome
}

/// Updates adaptive weight precision with norms that grow, that stay equal, and that are NaN.
fn precision() -> Outcome {
    let mut hash = Hash::NEW;
    for (step_bits, bits, most_bits) in [(0, 0, 0), (4, 8, 0), (7, 30, 0), (8, 8, 16)] {
        let mut awp = CAwp::new();
        (awp.threshold, awp.interval) = (0.05, 3);
        (awp.step_bits, awp.bits, awp.most_bits) = (step_bits, bits, most_bits);
        for batch in 0..40 {
            let norm = match batch {
                5 | 17 => f64::NAN,
                0..20 => 1.0 + 0.1 * f64::from(batch % 7),
                _ => 3.0,
            };
            let (code, codec) = awp.update(norm);
            for word in [code, awp.bits, awp.count, awp.step_bits, awp.has_previous] {
                hash.word(word.into());
            }
            hash.word(awp.previous.to_bits());
            hash.bytes(codec.as_bytes());
        }
    }
    Outcome { hash, error: None }
}

/// Updates a loss scaler over several steps; some steps have values that are not finite.
fn loss_scaler() -> Outcome {
    let mut hash = Hash::NEW;
    let mut scaler = CLossScaler::new();
    scaler.interval = 4;
    for step in 0..60 {
        let (code, apply) = scaler.update(step % 11 == 3 || step > 50);
        for word in [code, apply as u32, scaler.clean] {
            hash.word(word.into());
        }
        hash.word(scaler.scale.to_bits());
        hash.word(scaler.rescale.to_bits());
        hash.word(scaler.skipped);
    }
    Outcome { hash, error: None }
}
