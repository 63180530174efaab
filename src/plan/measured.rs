//! Defines the costs that a communicator measures at init: T(x) = A + B x, as in "CaSync" (HiPress,
//! section 4), for sending, reducing, encoding and decoding. With them the planner knows this
//! machine's links and cores, selects the number of chunks, and predicts whether a codec saves
//! time.
//!
//! Ranks measure different numbers and must select alike. [`MeasuredCosts::agreed`] takes the
//! largest number of all ranks.

use super::work::{CandidateWork, moves_beside};
use crate::codec::{self, Span};
use crate::cpu::Isa;
use crate::error::{Error, ErrorKind, Result};
use crate::reduce::{Reducer, Tile};
use crate::types::{CodecKind, CodecSpec, DType, ReduceOp, ScaleRule, TransportKind};
use std::hint::black_box;
use std::time::Instant;

/// T(x) = `fixed` + `each` x, in seconds, where x is a number of bytes or elements.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Affine {
    /// Seconds at size 0.
    pub fixed: f64,
    /// Seconds per byte or element.
    pub each: f64,
}

impl Affine {
    /// Returns the line through two measurements, (size, seconds) each, the smaller size first. A
    /// coefficient that noise would make negative is 0.
    pub fn through(small: (usize, f64), large: (usize, f64)) -> Affine {
        let each = (large.1 - small.1) / (large.0 - small.0).max(1) as f64;
        let each = each.max(0.0);
        Affine {
            fixed: (small.1 - each * small.0 as f64).max(0.0),
            each,
        }
    }

    fn at(self, size: f64) -> f64 {
        self.fixed + self.each * size
    }

    fn max(self, other: Affine) -> Affine {
        Affine {
            fixed: self.fixed.max(other.fixed),
            each: self.each.max(other.each),
        }
    }
}

const KINDS: usize = CodecKind::ALL.len();

/// Number of lines T(x) that ranks exchange: the link, the reduction, and two per codec.
const LINES: usize = 2 + 2 * KINDS;

/// Measured costs, equal on all ranks of a communicator.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MeasuredCosts {
    /// Seconds to send a message from one rank's buffer to another's, by its bytes.
    pub send: Affine,
    /// Seconds to add received elements to fp32 elements, without a codec, by their number.
    pub reduce: Affine,
    /// Seconds to encode fp32 elements, by their number; indexed by [`CodecKind`].
    pub encode: [Affine; KINDS],
    /// Seconds to decode elements and add them up, by their number; indexed by [`CodecKind`].
    pub decode: [Affine; KINDS],
}

/// Elements of the smaller and the larger measurement: a scale block, and a tile, which an engine
/// encodes at once. Both fit the first-level cache, as the engine's tiles do.
const SIZES: [usize; 2] = [256, 4096];

/// Number of measurements of each size. The shortest counts, because interruptions lengthen the
/// others.
const ROUNDS: usize = 7;

/// Fraction of a message's fixed cost in which the core of each side is busy. During the rest the
/// message travels. The constants of `cost.rs` have an equal proportion.
const WORK: f64 = 0.2;

impl MeasuredCosts {
    /// Measures `specs`, and codecs of other kinds with default parameters, on this core. Of several specs of one
    /// kind the slowest counts. `send` is the measured cost of the link. Takes about a millisecond.
    ///
    /// # Errors
    /// Invalid argument if one of `specs` has impossible parameters.
    pub fn of_core(send: Affine, specs: &[CodecSpec], isa: Isa) -> Result<MeasuredCosts> {
        let mut costs = MeasuredCosts {
            send,
            reduce: reduce(isa)?,
            encode: [Affine::default(); KINDS],
            decode: [Affine::default(); KINDS],
        };
        for kind in CodecKind::ALL {
            let mut measured: Vec<CodecSpec> = specs.to_vec();
            measured.retain(|spec| spec.kind == kind);
            if measured.is_empty() {
                measured.push(CodecSpec::of(kind));
            }
            for spec in measured {
                let [encode, decode] = coded(spec, isa)?;
                let (encodes, decodes) = (&mut costs.encode, &mut costs.decode);
                encodes[kind as usize] = encodes[kind as usize].max(encode);
                decodes[kind as usize] = decodes[kind as usize].max(decode);
            }
        }
        Ok(costs)
    }

    /// Returns the costs as bytes, for exchange with other ranks.
    pub fn to_bytes(self) -> Vec<u8> {
        let lines = [&[self.send, self.reduce][..], &self.encode, &self.decode].concat();
        let words = lines.iter().flat_map(|line| [line.fixed, line.each]);
        words.flat_map(f64::to_le_bytes).collect()
    }

    fn from_bytes(bytes: &[u8]) -> Option<MeasuredCosts> {
        let mut lines = [Affine::default(); LINES];
        if bytes.len() != LINES * 16 {
            return None;
        }
        for (line, words) in lines.iter_mut().zip(bytes.chunks_exact(16)) {
            let (fixed, each) = words.split_at(8);
            line.fixed = f64::from_le_bytes(fixed.try_into().ok()?);
            line.each = f64::from_le_bytes(each.try_into().ok()?);
            let sane = |x: f64| x.is_finite() && x >= 0.0;
            if !(sane(line.fixed) && sane(line.each)) {
                return None;
            }
        }
        Some(MeasuredCosts {
            send: lines[0],
            reduce: lines[1],
            encode: lines[2..2 + KINDS].try_into().ok()?,
            decode: lines[2 + KINDS..].try_into().ok()?,
        })
    }

    /// Returns the costs that all ranks use: for each cost, the largest value of all ranks. The
    /// slowest link and the slowest core set the pace of a collective.
    ///
    /// # Errors
    /// Mismatch, naming the rank, if a rank sent something else than costs.
    pub fn agreed(said: &[Vec<u8>]) -> Result<MeasuredCosts> {
        let mut most: Option<MeasuredCosts> = None;
        for (rank, bytes) in said.iter().enumerate() {
            let costs = MeasuredCosts::from_bytes(bytes).ok_or_else(|| {
                Error::new(
                    ErrorKind::Mismatch,
                    format!(
                        "rank {rank} described its costs in {} bytes that are none: use one \
                         version of the library",
                        bytes.len()
                    ),
                )
            })?;
            most = Some(most.map_or(costs, |most| most.max(&costs)));
        }
        most.ok_or_else(|| Error::internal("a communicator without ranks measured costs"))
    }

    fn max(&self, other: &MeasuredCosts) -> MeasuredCosts {
        let most = |a: &[Affine; KINDS], b: &[Affine; KINDS]| {
            let mut most = *a;
            for (most, b) in most.iter_mut().zip(b) {
                *most = most.max(*b);
            }
            most
        };
        MeasuredCosts {
            send: self.send.max(other.send),
            reduce: self.reduce.max(other.reduce),
            encode: most(&self.encode, &other.encode),
            decode: most(&self.decode, &other.decode),
        }
    }

    /// Returns the costs of the measured link, which runs over `transport`. On several hosts the
    /// link connects two hosts. All ranks of a host measured at the same time and shared its
    /// bandwidth, as they do in a call.
    pub(super) fn link(&self, transport: TransportKind) -> Link {
        Link {
            latency: (1.0 - 2.0 * WORK) * self.send.fixed,
            work: WORK * self.send.fixed,
            byte: self.send.each,
            beside: moves_beside(transport),
        }
    }

    /// Returns the predicted seconds of `work`, where `near` is the link inside hosts and `far` the
    /// link between hosts.
    ///
    /// The first pass takes the longer of two times: the busiest rank's work, or one chunk's way
    /// over all hops. The latencies of the hops are added. Every further pass adds its work.
    /// Transfers that need no core overlap with computation; the longer of the two counts.
    pub(super) fn seconds(&self, work: &CandidateWork, near: Link, far: Link) -> f64 {
        let counts = &work.counts;
        let [near_bytes, far_bytes] = work.wire_bytes.map(|bytes| bytes as f64);
        let both = |[sends, recvs]: [usize; 2]| (sends + recvs) as f64;
        let (crossing, intra) = (both(counts.crossing), both(counts.intra));
        let inside = both([counts.sends, counts.recvs]) - crossing - intra;
        let fixed = crossing * far.work + (intra + inside) * near.work;
        // Each side counts half of a message's time. With as many sends as receives, a full-duplex
        // link takes as long as its busier direction.
        let crossed = crossing * far_bytes * far.byte / 2.0;
        let stayed = (intra * near_bytes + inside * far_bytes) * near.byte / 2.0;
        let (mut beside, mut core) = (0.0, self.computing(work));
        for (link, seconds) in [(far, crossed), (near, stayed)] {
            match link.beside {
                true => beside += seconds,
                // On this link the cores that compute also move the bytes.
                false => core += seconds,
            }
        }
        let hop = |level: usize, link: Link| {
            link.byte * work.wire_bytes[level] as f64
                + match work.codecs[level] {
                    raw if raw.is_raw() => self.reduce.at(work.chunk as f64),
                    codec => self.coding(codec, work.chunk).iter().sum(),
                }
        };
        let hops = [work.hops.inside, work.hops.between].map(|hops| hops as f64);
        let chain = hops[0] * hop(0, near) + hops[1] * hop(1, far);
        let first = chain.max(fixed + beside + core);
        let next = fixed + beside.max(core);
        hops[0] * near.latency + hops[1] * far.latency + first + (work.passes - 1) as f64 * next
    }

    /// Returns the seconds that the busiest rank computes in one pass.
    fn computing(&self, work: &CandidateWork) -> f64 {
        let counts = &work.counts;
        let [encodes, decodes] = counts.intra_coded;
        let coded = [
            [encodes, decodes],
            [counts.encodes - encodes, counts.decodes - decodes],
        ];
        let mut seconds = 0.0;
        let mut exact = 0;
        for (codec, [encodes, decodes]) in work.codecs.into_iter().zip(coded) {
            if codec.is_raw() {
                exact += decodes;
                continue;
            }
            // The measured decode cost includes the addition.
            let [encode, decode] = self.coding(codec, work.chunk);
            seconds += encodes as f64 * encode + decodes as f64 * decode;
        }
        let reduces = match work.codecs.iter().all(|codec| codec.is_raw()) {
            true => counts.reduces,
            false => counts.reduces.min(exact),
        };
        seconds + reduces as f64 * self.reduce.at(work.chunk as f64)
    }

    /// Returns the seconds to encode and to decode a chunk.
    fn coding(&self, codec: CodecKind, chunk: usize) -> [f64; 2] {
        [&self.encode, &self.decode].map(|costs| costs[codec as usize].at(chunk as f64))
    }

    /// Returns the measured costs from which the planner decides about codec `kind`, as text.
    pub fn describe(&self, kind: CodecKind) -> String {
        let line = |name: &str, line: Affine, unit: &str| {
            format!(
                "{name} {:.3} us + {:.4} ns {unit}",
                line.fixed * 1e6,
                line.each * 1e9
            )
        };
        let mut text = format!(
            "measured, the largest of all ranks: {}; {}",
            line("send", self.send, "a byte"),
            line("reduce", self.reduce, "an element")
        );
        if !kind.is_raw() {
            let name = kind.name();
            for (what, costs) in [("encode", &self.encode), ("decode", &self.decode)] {
                text += "; ";
                text += &line(
                    &format!("{name} {what}"),
                    costs[kind as usize],
                    "an element",
                );
            }
        }
        text
    }
}

/// Costs of messages over one class of links: inside hosts or between hosts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Link {
    /// Seconds that an empty message travels.
    pub latency: f64,
    /// Seconds of core time for an empty message, on each side.
    pub work: f64,
    /// Seconds per byte, half of them on each side.
    pub byte: f64,
    /// Whether the link moves bytes while the cores work on something else.
    pub beside: bool,
}

/// Runs `work` a few times on each of [`SIZES`], and returns the line through the shortest times.
fn measure(mut work: impl FnMut(usize)) -> Affine {
    let mut shortest = |n: usize| {
        work(n);
        let times = (0..ROUNDS).map(|_| {
            let start = Instant::now();
            work(n);
            start.elapsed().as_secs_f64()
        });
        (n, times.fold(f64::INFINITY, f64::min))
    };
    Affine::through(shortest(SIZES[0]), shortest(SIZES[1]))
}

fn reduce(isa: Isa) -> Result<Affine> {
    let reducer = Reducer::new(DType::F32, ReduceOp::Sum, isa)?;
    let source = vec![0u8; SIZES[1] * DType::F32.size()];
    let mut tile = Tile::new(SIZES[1]);
    Ok(measure(|n| {
        reducer.combine(black_box(&source[..n * DType::F32.size()]), &mut tile);
        black_box(&tile);
    }))
}

fn coded(spec: CodecSpec, isa: Isa) -> Result<[Affine; 2]> {
    let Some(codec) = codec::build(spec, isa)? else {
        return Ok([Affine::default(); 2]);
    };
    let x = samples();
    let mut wire = vec![0u8; codec.wire_bytes(SIZES[1])];
    let scale = matches!(spec.scale, ScaleRule::Tensor { .. }) && spec.kind.has_tensor_scale();
    let scale = scale.then_some(SPREAD);
    let encode = measure(|n| {
        codec.encode(Span::whole(n), black_box(&x[..n]), scale, &mut wire, None);
        black_box(&wire);
    });
    let mut y = vec![0f32; SIZES[1]];
    let decode = measure(|n| {
        codec.decode_reduce(Span::whole(n), black_box(&wire), &mut y[..n]);
        black_box(&y);
    });
    Ok([encode, decode])
}

/// Largest magnitude that [`samples`] returns.
const SPREAD: f32 = 1.0;

/// Returns numbers of many magnitudes and both signs, equal on every rank.
fn samples() -> Vec<f32> {
    let mut state = 1u64;
    let mut unit = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - SPREAD
    };
    (0..SIZES[1]).map(|_| unit() * unit() * unit()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::{CostCounts, Hops};

    #[test]
    fn lines_go_through_their_points_and_never_below_zero() {
        let line = Affine::through((100, 3.0), (300, 5.0));
        assert_eq!((line.fixed, line.each), (2.0, 0.01));
        let noise = Affine::through((100, 3.0), (300, 2.0));
        assert_eq!((noise.fixed, noise.each), (3.0, 0.0));
        let steep = Affine::through((100, 1.0), (300, 9.0));
        assert_eq!((steep.fixed, steep.each), (0.0, 0.04));
    }

    fn costs(seed: f64) -> MeasuredCosts {
        let line = |k: f64| Affine {
            fixed: (seed * k).sin().abs(),
            each: (seed * k).cos().abs(),
        };
        let mut costs = MeasuredCosts {
            send: line(1.0),
            reduce: line(2.0),
            encode: [Affine::default(); KINDS],
            decode: [Affine::default(); KINDS],
        };
        for kind in 1..KINDS {
            costs.encode[kind] = line(3.0 + kind as f64);
            costs.decode[kind] = line(40.0 + kind as f64);
        }
        costs
    }

    #[test]
    fn ranks_agree_on_the_largest_of_each_number() {
        let ranks = [costs(1.0), costs(2.0), costs(3.0)];
        let said: Vec<_> = ranks.iter().map(|costs| costs.to_bytes()).collect();
        let agreed = MeasuredCosts::agreed(&said).unwrap();
        let most = |pick: fn(&MeasuredCosts) -> f64| ranks.iter().map(pick).fold(0.0, f64::max);
        assert_eq!(agreed.send.fixed, most(|costs| costs.send.fixed));
        assert_eq!(agreed.reduce.each, most(|costs| costs.reduce.each));
        assert_eq!(agreed.encode[2].fixed, most(|costs| costs.encode[2].fixed));
        let last = KINDS - 1;
        assert_eq!(
            agreed.decode[last].each,
            most(|costs| costs.decode[KINDS - 1].each)
        );
        for spoilt in [vec![], said[0][1..].to_vec(), vec![0xff; said[0].len()]] {
            let error = MeasuredCosts::agreed(&[said[0].clone(), spoilt]).unwrap_err();
            assert!(error.message().contains("rank 1"), "{error}");
        }
    }

    #[test]
    fn a_core_has_costs_for_every_codec() {
        let isa = Isa::detect();
        let costs = MeasuredCosts::of_core(
            Affine::default(),
            &["linear8:tensor=5".parse().unwrap()],
            isa,
        );
        let costs = costs.unwrap();
        for kind in &CodecKind::ALL[1..] {
            for line in [costs.encode[*kind as usize], costs.decode[*kind as usize]] {
                assert!(line.at(4096.0) > 0.0, "{kind:?}: {line:?}");
            }
        }
    }

    /// Returns the work of the busiest rank in a two-shot all_reduce of four ranks, divided into
    /// `passes` passes.
    fn work(codec: CodecKind, passes: usize) -> CandidateWork {
        CandidateWork {
            counts: CostCounts {
                sends: 6,
                recvs: 6,
                encodes: 4,
                decodes: 7,
                reduces: 3,
                ..CostCounts::default()
            },
            hops: Hops {
                inside: 2,
                between: 0,
            },
            passes,
            slots: 4,
            chunk: (1 << 20) / passes,
            element_bytes: 4,
            wire_bytes: [(1 << 20) / passes * if codec == CodecKind::Raw { 4 } else { 1 }; 2],
            codecs: [codec; 2],
            leaving: 0,
            hosts: 1,
        }
    }

    #[test]
    fn a_codec_pays_where_the_wire_is_slow() {
        let mut costs = costs(0.0);
        let ns = |each: f64| Affine {
            fixed: 0.0,
            each: each * 1e-9,
        };
        (costs.reduce, costs.encode[1], costs.decode[1]) = (ns(0.1), ns(0.3), ns(0.1));
        let seconds = |costs: &MeasuredCosts, codec| {
            let link = costs.link(TransportKind::Tcp);
            costs.seconds(&work(codec, 1), link, link)
        };
        costs.send = ns(8.0);
        assert!(seconds(&costs, CodecKind::Linear8) < 0.4 * seconds(&costs, CodecKind::Raw));
        costs.send = ns(0.01);
        assert!(seconds(&costs, CodecKind::Linear8) > seconds(&costs, CodecKind::Raw));
    }

    #[test]
    fn passes_hide_work_behind_the_wire_until_messages_cost_more() {
        let mut costs = costs(0.0);
        let line = |fixed: f64, each: f64| Affine { fixed, each };
        (costs.reduce, costs.encode[1], costs.decode[1]) =
            (line(0.0, 1e-10), line(0.0, 1e-9), line(0.0, 1e-9));
        costs.send = line(20e-6, 2e-9);
        let seconds = |passes, transport| {
            let link = costs.link(transport);
            costs.seconds(&work(CodecKind::Linear8, passes), link, link)
        };
        let times: Vec<f64> = [1, 8, 4096]
            .map(|passes| seconds(passes, TransportKind::Tcp))
            .to_vec();
        assert!(times[1] < times[0] && times[1] < times[2], "{times:?}");
        // If cores move the bytes, nothing overlaps, so more passes do not help.
        assert!(seconds(1, TransportKind::Shm) <= seconds(8, TransportKind::Shm));
    }
}
