//! Predicts a training step on a machine with measured costs, to find which codec pays at which
//! rank count.
//!
//! Costs are affine, T(x) = A + B x, as in "CaSync" (HiPress, section 4). Encodes, decodes and
//! messages are counted in the library's own schedules. Let L be the busiest rank's time on the
//! wire in one pass, and C its time in encode, decode and add. Let H be the time of one hop: wire,
//! encode, decode and add. The first pass takes `max(hops H, L + C) + hops latency`. Every further
//! pass takes `max(L, C)`, because passes overlap. The number of passes is the cheapest power of
//! two up to 64.
//!
//! Gradients become ready from the last layer to the first. They are summed one after the other
//! while the backward pass goes on; the time of sums after its end is exposed. The model assumes
//! that codecs do not slow the training down. On a host whose cores also train, add their time to
//! the backward times.

use super::network::Layer;
use cinch::codec::{self, Codec, Reencode};
use cinch::cpu::Isa;
use cinch::error::{Error, Result};
use cinch::schedule::{self, SchedulePattern};
use cinch::types::{Algorithm, CodecKind, CodecSpec, Collective, DType};

/// Largest number of pipeline passes that a message is divided into.
const MOST_PASSES: usize = 64;

/// Smallest number of elements in a chunk.
const LEAST_CHUNK: usize = 1024;

/// Costs of a link between a rank and the others, in one direction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkCost {
    /// Seconds from the last byte of a message to the peer's next action.
    pub latency: f64,
    /// Seconds that every message occupies the sender, whatever its length.
    pub message: f64,
    /// Bandwidth, in bytes per second.
    pub bandwidth: f64,
}

/// Cost of a codec on one rank, per element.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CodecCost {
    /// Codec with its parameters, to which the times below apply.
    pub spec: CodecSpec,
    /// Seconds to encode an element.
    pub encode: f64,
    /// Seconds to decode an element, with or without adding the result.
    pub decode: f64,
}

/// Measured costs of one machine.
#[derive(Clone, Debug, PartialEq)]
pub struct Costs {
    /// Costs of the link.
    pub link: LinkCost,
    /// Seconds per element of adding fp32 to fp32.
    pub add: f64,
    /// Costs of the codecs; `raw` is the cost of copying.
    pub codecs: Vec<CodecCost>,
}

impl Costs {
    /// Checks that the costs are possible.
    ///
    /// # Errors
    /// Returns an invalid-argument error for a negative or non-finite cost, or for a codec with
    /// costs twice. Costs of `raw` must exist, as all codecs are compared with them.
    pub fn check(&self) -> Result<()> {
        let link = &self.link;
        let mut costs = vec![
            ("latency".to_string(), link.latency),
            ("time per message".into(), link.message),
            ("time per added element".into(), self.add),
        ];
        for cost in &self.codecs {
            costs.push((format!("encode time of {}", cost.spec), cost.encode));
            costs.push((format!("decode time of {}", cost.spec), cost.decode));
        }
        for (name, value) in costs {
            if !(value.is_finite() && value >= 0.0) {
                return Err(Error::invalid_argument(format!(
                    "the {name} is {value}; it must be a number of seconds, 0 or more"
                )));
            }
        }
        if !(link.bandwidth.is_finite() && link.bandwidth > 0.0) {
            return Err(Error::invalid_argument(format!(
                "the bandwidth is {} bytes per second; it must be more than 0",
                link.bandwidth
            )));
        }
        for (at, cost) in self.codecs.iter().enumerate() {
            if self.codecs[..at]
                .iter()
                .any(|other| other.spec == cost.spec)
            {
                return Err(Error::invalid_argument(format!(
                    "codec {} has costs twice",
                    cost.spec
                )));
            }
        }
        if !self.codecs.iter().any(|cost| cost.spec == CodecSpec::RAW) {
            return Err(Error::invalid_argument(
                "the costs lack codec raw, with which the others are compared: encode and decode \
                 are a copy then",
            ));
        }
        Ok(())
    }
}

/// The predicted training step with one codec at one rank count.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prediction {
    /// Number of ranks that train together, each with a batch of equal size.
    pub nranks: usize,
    /// Codec of all gradient all_reduce calls in the predicted step.
    pub codec: CodecSpec,
    /// Seconds of all all_reduce calls of a step together.
    pub sums: f64,
    /// Seconds of the all_reduce calls after the end of the backward pass.
    pub exposed: f64,
    /// Seconds of a training step.
    pub step: f64,
    /// Training samples per second relative to one rank, with a batch of equal size on each rank. 0
    /// if the layers have no times.
    pub speedup: f64,
    /// Bytes that the busiest rank sends in a step.
    pub wire_bytes: f64,
    /// Step time with raw over the step time with this codec.
    pub against_raw: f64,
    /// Step time with the fastest codec of 16 bits or more (including raw) over the step time with
    /// this codec.
    pub against_wide: f64,
}

impl Prediction {
    /// Returns whether the codec pays: a step is shorter than with any codec of 16 bits or more.
    pub fn pays(&self) -> bool {
        self.against_wide > 1.0
    }
}

/// Predicts a step with each codec of `costs` on `nranks` ranks.
///
/// # Errors
/// Returns the errors of [`Costs::check`], and an invalid-argument error for 0 ranks.
pub fn predict(layers: &[Layer], costs: &Costs, nranks: usize) -> Result<Vec<Prediction>> {
    costs.check()?;
    if nranks == 0 {
        return Err(Error::invalid_argument("a prediction for 0 ranks"));
    }
    let compute: f64 = layers
        .iter()
        .map(|layer| layer.forward + layer.backward)
        .sum();
    let mut outcomes = Vec::new();
    for cost in &costs.codecs {
        let mut done = layers.iter().map(|layer| layer.forward).sum::<f64>();
        let (mut wire_free, mut sums, mut wire_bytes) = (0.0, 0.0, 0.0);
        let shape = ScheduleShape::of_all(cost, nranks)?;
        for layer in layers.iter().rev() {
            done += layer.backward;
            let (seconds, bytes) = cheapest(&shape, layer.elements, cost, costs);
            wire_free = f64::max(wire_free, done) + seconds;
            sums += seconds;
            wire_bytes += bytes;
        }
        let step = f64::max(compute, wire_free);
        outcomes.push(Prediction {
            nranks,
            codec: cost.spec,
            sums,
            exposed: step - compute,
            step,
            speedup: if step > 0.0 {
                nranks as f64 * compute / step
            } else {
                nranks as f64
            },
            wire_bytes,
            against_raw: 1.0,
            against_wide: 1.0,
        });
    }
    let least = |wide: &dyn Fn(CodecKind) -> bool| {
        let steps = outcomes.iter().filter(|outcome| wide(outcome.codec.kind));
        steps
            .map(|outcome| outcome.step)
            .fold(f64::INFINITY, f64::min)
    };
    let raw = least(&CodecKind::is_raw);
    let wide = least(&|kind| bytes_per_element(CodecSpec::of(kind)) >= 2.0);
    for outcome in &mut outcomes {
        outcome.against_raw = ratio(raw, outcome.step);
        outcome.against_wide = ratio(wide, outcome.step);
    }
    Ok(outcomes)
}

fn ratio(other: f64, own: f64) -> f64 {
    if own > 0.0 { other / own } else { 1.0 }
}

/// Returns the wire bytes per element of a long message.
fn bytes_per_element(spec: CodecSpec) -> f64 {
    const LONG: usize = 1 << 20;
    match codec::build(spec, Isa::Scalar) {
        Ok(Some(codec)) => codec.wire_bytes(LONG) as f64 / LONG as f64,
        _ => DType::F32.size() as f64,
    }
}

/// Message and codec counts of an algorithm's schedule with a codec, independent of the message
/// length.
struct ScheduleShape {
    parts: usize,
    hops: f64,
    /// Messages of the busiest rank, in the direction with more of them.
    messages: f64,
    sends: f64,
    encodes: f64,
    decodes: f64,
    adds: f64,
    codec: Option<std::sync::Arc<dyn Codec>>,
}

impl ScheduleShape {
    /// Returns the counts of each algorithm that the planner considers.
    fn of_all(cost: &CodecCost, nranks: usize) -> Result<Vec<ScheduleShape>> {
        let codec = codec::build(cost.spec, Isa::Scalar)?;
        let loses = codec
            .as_ref()
            .is_some_and(|codec| codec.reencode() == Reencode::Lossy);
        schedule::algorithms(Collective::AllReduce)
            .iter()
            // The planner excludes rings with codecs that would round partial sums at every hop,
            // and so does the model.
            .filter(|algorithm| !(loses && nranks > 2 && **algorithm == Algorithm::Ring))
            .map(|&algorithm| {
                let pattern = SchedulePattern::flat(Collective::AllReduce, algorithm, nranks);
                let mut busiest = schedule::CostCounts::default();
                for rank in [0, 1 % nranks, nranks / 2] {
                    let counts = schedule::cost_counts(&pattern.schedule(rank)?, &pattern.groups);
                    if counts.sends + counts.recvs >= busiest.sends + busiest.recvs {
                        busiest = counts;
                    }
                }
                let coded = if codec.is_none() { busiest.coded } else { 0 };
                Ok(ScheduleShape {
                    parts: pattern.parts(),
                    hops: pattern.hops().total() as f64,
                    messages: busiest.sends.max(busiest.recvs) as f64,
                    sends: busiest.sends as f64,
                    encodes: (busiest.encodes - coded) as f64,
                    decodes: (busiest.decodes - coded) as f64,
                    adds: busiest.reduces as f64,
                    codec: codec.clone(),
                })
            })
            .collect()
    }

    /// Returns the seconds and the wire bytes of an all_reduce of `elements` in `passes` passes.
    fn run(&self, elements: usize, passes: usize, cost: &CodecCost, costs: &Costs) -> (f64, f64) {
        let chunk = elements.div_ceil(self.parts * passes);
        let bytes = match &self.codec {
            Some(codec) => codec.wire_bytes(chunk),
            None => chunk * DType::F32.size(),
        } as f64;
        let chunk = chunk as f64;
        let wire = bytes / costs.link.bandwidth;
        // Decode-and-add costs as much as a decode, so only raw elements have a cost of adding.
        let add = if self.codec.is_some() { 0.0 } else { costs.add };
        let on_wire = self.messages * (costs.link.message + wire);
        let on_core =
            chunk * (self.encodes * cost.encode + self.decodes * cost.decode + self.adds * add);
        let hop = wire + chunk * (cost.encode + cost.decode + add);
        let first = f64::max(self.hops * hop, on_wire + on_core) + self.hops * costs.link.latency;
        let seconds = first + (passes - 1) as f64 * f64::max(on_wire, on_core);
        (seconds, self.sends * bytes * passes as f64)
    }
}

fn cheapest(
    shapes: &[ScheduleShape],
    elements: usize,
    cost: &CodecCost,
    costs: &Costs,
) -> (f64, f64) {
    let mut best = (f64::INFINITY, 0.0);
    for shape in shapes {
        let mut passes = 1;
        while passes <= MOST_PASSES {
            let found = shape.run(elements, passes, cost, costs);
            if found.0 < best.0 {
                best = found;
            }
            if elements / (shape.parts * passes * 2) < LEAST_CHUNK {
                break;
            }
            passes *= 2;
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    fn costs(bandwidth: f64) -> Costs {
        let cost = |kind, encode, decode| CodecCost {
            spec: CodecSpec::of(kind),
            encode,
            decode,
        };
        Costs {
            link: LinkCost {
                latency: 20e-6,
                message: 5e-6,
                bandwidth,
            },
            add: 0.1e-9,
            codecs: vec![
                cost(CodecKind::Raw, 0.2e-9, 0.2e-9),
                cost(CodecKind::CastBf16, 0.3e-9, 0.2e-9),
                cost(CodecKind::Linear8, 0.4e-9, 0.2e-9),
            ],
        }
    }

    /// Returns the seconds, and the wire bytes of the busiest rank, of one all_reduce of `elements`
    /// fp32 with the cheapest algorithm.
    fn sum_seconds(
        elements: usize,
        cost: &CodecCost,
        costs: &Costs,
        nranks: usize,
    ) -> Result<(f64, f64)> {
        Ok(cheapest(
            &ScheduleShape::of_all(cost, nranks)?,
            elements,
            cost,
            costs,
        ))
    }

    fn layers(elements: usize, backward: f64) -> Vec<Layer> {
        vec![Layer {
            name: "only".into(),
            elements,
            forward: backward / 2.0,
            backward,
        }]
    }

    fn step_of(outcomes: &[Prediction], kind: CodecKind) -> &Prediction {
        let found = outcomes.iter().find(|outcome| outcome.codec.kind == kind);
        found.unwrap()
    }

    #[test]
    fn two_ranks_and_one_pass_are_counted_by_hand() {
        // 1,000 elements are too few for several passes. A ring of two ranks sends half of them
        // twice, with 2 hops of latency and 2 messages. Per chunk it makes 1 + 1 encodes (copies),
        // 2 + 1 decodes and 1 addition. One-shot sends all of them once: 1 message, 1 encode, 1
        // decode, 1 addition.
        let costs = costs(1e9);
        let raw = costs.codecs[0];
        let (seconds, bytes) = sum_seconds(1000, &raw, &costs, 2).unwrap();
        let by_hand = 20e-6 + 5e-6 + 4000.0 / 1e9 + 1000.0 * (0.2e-9 + 0.2e-9 + 0.1e-9);
        assert!((seconds - by_hand).abs() < 1e-9, "{seconds} {by_hand}");
        assert_eq!(bytes, 4000.0);
    }

    #[test]
    fn long_messages_cost_their_bytes() {
        // With 64 Mi elements and 1 GB/s each rank sends 2 (N-1)/N of the message, and other costs
        // are negligible.
        let costs = costs(1e9);
        for nranks in [2, 4, 8, 16] {
            for (cost, width) in costs.codecs.iter().zip([4.0, 2.0, 1.0 + 4.0 / 256.0]) {
                let n = 1usize << 26;
                let (seconds, bytes) = sum_seconds(n, cost, &costs, nranks).unwrap();
                let least = 2.0 * (nranks - 1) as f64 / nranks as f64 * n as f64 * width;
                assert!(
                    (bytes / least - 1.0).abs() < 1e-3,
                    "{nranks} {cost:?} {bytes}"
                );
                let ratio = seconds / (least / 1e9);
                assert!((1.0..1.1).contains(&ratio), "{nranks} {cost:?} {ratio}");
            }
        }
    }

    #[test]
    fn a_codec_pays_on_a_slow_wire_and_not_on_a_fast_one() {
        let slow = predict(&layers(1 << 24, 0.01), &costs(1e9), 8).unwrap();
        let linear = step_of(&slow, CodecKind::Linear8);
        assert!(linear.pays() && linear.against_raw > 2.0, "{linear:?}");
        assert!(linear.against_wide < linear.against_raw);
        let fast = predict(&layers(1 << 24, 0.01), &costs(1e12), 8).unwrap();
        assert!(!step_of(&fast, CodecKind::Linear8).pays());
        // A codec also does not pay if computing hides all communication except for a small last
        // gradient.
        let mut hidden = layers(1 << 20, 10.0);
        hidden.insert(0, layers(1000, 1e-3).remove(0));
        let hidden = predict(&hidden, &costs(1e9), 8).unwrap();
        let ratio = step_of(&hidden, CodecKind::Linear8).against_raw;
        assert!((ratio - 1.0).abs() < 1e-3, "{ratio}");
    }

    #[test]
    fn one_rank_needs_no_wire() {
        for outcome in predict(&layers(1 << 20, 0.01), &costs(1e9), 1).unwrap() {
            assert_eq!(outcome.wire_bytes, 0.0);
            assert!(
                outcome.speedup > 0.8 && outcome.speedup <= 1.0,
                "{outcome:?}"
            );
        }
    }

    #[test]
    fn sums_wait_for_their_gradients_and_for_each_other() {
        // The sum of the last layer starts after its backward pass and overlaps the backward pass
        // of the first layer.
        let costs = costs(1e9);
        let raw = costs.codecs[0];
        let two = vec![
            Layer {
                name: "first".into(),
                elements: 1 << 16,
                forward: 1e-3,
                backward: 5e-3,
            },
            Layer {
                name: "last".into(),
                elements: 1 << 20,
                forward: 1e-3,
                backward: 2e-3,
            },
        ];
        let long = sum_seconds(1 << 20, &raw, &costs, 4).unwrap().0;
        let short = sum_seconds(1 << 16, &raw, &costs, 4).unwrap().0;
        let outcome = predict(&two, &costs, 4).unwrap()[0];
        let expected = f64::max(4e-3 + long, 9e-3) + short;
        assert!((outcome.step - expected).abs() < 1e-12);
        assert!((outcome.exposed - (expected - 9e-3)).abs() < 1e-12);
        assert!((outcome.speedup - 4.0 * 9e-3 / expected).abs() < 1e-9);
    }

    #[test]
    fn impossible_costs_are_named() {
        let layers = layers(10, 0.0);
        let mut bad = costs(0.0);
        let said = |costs: &Costs| predict(&layers, costs, 2).unwrap_err().to_string();
        assert!(said(&bad).contains("bandwidth is 0"));
        bad = costs(1e9);
        bad.codecs[2].encode = f64::NAN;
        assert!(said(&bad).contains("encode time of linear8:block=256 is NaN"));
        bad = costs(1e9);
        bad.codecs.remove(0);
        assert!(said(&bad).contains("lack codec raw"));
        bad = costs(1e9);
        bad.codecs.push(bad.codecs[0]);
        assert!(said(&bad).contains("raw has costs twice"));
        assert!(predict(&layers, &costs(1e9), 0).is_err());
    }
}
