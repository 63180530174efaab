//! The table of cases.
//!
//! The table has no `auto:` codecs, because the library decides by measured times whether they run.

use super::abi::CCall;
use super::data::{BF16, DTYPES, DType, F16, F32, Pattern};

/// Element count that is smaller than any codec's block.
const SMALL: usize = 17;
/// Element count of several blocks with a partial last block. It is not a multiple of any number of
/// ranks.
const MIDDLE: usize = 5003;
/// Element count that covers every kind of value in [`Pattern::Special`].
const SPECIAL: usize = 2405;
/// Element count that exceeds the capacity of all slots of a connection.
const LARGE: usize = 300_001;

/// Names of the collectives by their number in the header. The last entry stands for a send with a
/// receive.
pub const COLLECTIVES: [&str; 9] = [
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
    "send_recv",
];

pub const ALL_REDUCE: u32 = 0;
const ALL_GATHER: u32 = 1;
const REDUCE_SCATTER: u32 = 2;
const BROADCAST: u32 = 3;
const REDUCE: u32 = 4;
pub const SEND_RECV: u32 = 8;

const RING: u32 = 2;
const TREE: u32 = 3;
const ONESHOT: u32 = 4;
const DIRECT: u32 = 5;
const HIERARCHICAL: u32 = 6;

/// Algorithms of each collective on one host.
const PAIRS: [(u32, &[u32]); 9] = [
    (ALL_REDUCE, &[RING, TREE, ONESHOT, DIRECT]),
    (ALL_GATHER, &[RING, DIRECT]),
    (REDUCE_SCATTER, &[RING, DIRECT]),
    (BROADCAST, &[RING, TREE, ONESHOT, DIRECT]),
    (REDUCE, &[RING, TREE, ONESHOT, DIRECT]),
    (5, &[DIRECT]),
    (6, &[DIRECT]),
    (7, &[DIRECT]),
    (SEND_RECV, &[DIRECT]),
];

/// Returns the algorithm's name, or an empty name if the library chooses.
pub fn algorithm_name(algorithm: u32) -> &'static str {
    [
        "",
        "auto",
        "ring",
        "tree",
        "oneshot",
        "direct",
        "hierarchical",
    ][algorithm as usize]
}

fn pairs() -> impl Iterator<Item = (u32, u32)> {
    let of = |(collective, algorithms): (u32, &'static [u32])| {
        algorithms
            .iter()
            .map(move |&algorithm| (collective, algorithm))
    };
    PAIRS.into_iter().flat_map(of)
}

/// Returns each reducing collective with each of its algorithms.
fn sums() -> impl Iterator<Item = (u32, u32)> {
    pairs().filter(|(collective, _)| [ALL_REDUCE, REDUCE_SCATTER, REDUCE].contains(collective))
}

/// Every codec with default parameters. `threshold2` has no default for `tau`.
const CODECS: [&str; 19] = [
    "raw",
    "linear8",
    "dynamic8",
    "static8",
    "mantissa8",
    "cast_bf16",
    "cast16",
    "minmax1",
    "minmax2",
    "minmax4",
    "minmax8",
    "trunc8",
    "trunc16",
    "trunc24",
    "fp8_e4m3",
    "fp8_e5m2",
    "terngrad",
    "onebit",
    "threshold2:tau=0.5",
];

/// Codecs with other parameters.
const VARIANTS: [&str; 25] = [
    "linear8:block=64",
    "linear8:tensor=3",
    "dynamic8:block=1024",
    "dynamic8:tensor=2",
    "static8:offset=-2",
    "mantissa8:offset=2",
    "minmax1:block=64",
    "minmax1:seed=7",
    "minmax2:block=32",
    "minmax2:seed=7",
    "minmax4:block=4096",
    "minmax4:seed=7",
    "minmax8:block=128",
    "minmax8:block=64:seed=200",
    "fp8_e4m3:block=512",
    "fp8_e4m3:tensor=4",
    "fp8_e5m2:block=32",
    "fp8_e5m2:tensor=1",
    "terngrad:block=64:seed=9",
    "onebit:block=4096",
    "onebit:block=32",
    "threshold2:tau=0.01",
    "linear8:seed=7",
    "linear8:tensor=3:seed=9",
    "dynamic8:block=64:seed=200",
];

pub fn codecs() -> impl Iterator<Item = &'static str> {
    CODECS.into_iter().chain(VARIANTS)
}

fn has_tensor(codec: &str) -> bool {
    codec.contains(":tensor=")
}

/// Operator of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// A built-in reduction, as its number in `cinch_op_t`.
    BuiltIn(u32),
    /// A pre-multiplied sum, which each rank creates with its own factor.
    PreMulSum,
}

const SUM: Op = Op::BuiltIn(0);
const AVG: Op = Op::BuiltIn(4);
const OPS: [(&str, Op); 6] = [
    ("sum", SUM),
    ("prod", Op::BuiltIn(1)),
    ("max", Op::BuiltIn(2)),
    ("min", Op::BuiltIn(3)),
    ("avg", AVG),
    ("premulsum", Op::PreMulSum),
];

/// A call that all ranks make.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    pub collective: u32,
    pub algorithm: u32,
    /// Codec of the call; `None` uses the communicator's codec.
    pub codec: Option<&'static str>,
    pub dtype: DType,
    pub op: Op,
    pub count: usize,
    pub root: usize,
    /// Id of the tensor whose scale the codec keeps; 0 for none.
    pub tensor: u64,
    /// Id of the tensor whose error-feedback residuals the library keeps; 0 for none.
    pub feedback: u64,
    pub pattern: Pattern,
    /// Seed that selects different inputs for calls with equal pattern.
    pub salt: u64,
}

fn call(collective: u32, algorithm: u32, count: usize) -> Call {
    Call {
        collective,
        algorithm,
        codec: None,
        dtype: F32,
        op: SUM,
        count,
        root: 0,
        tensor: 0,
        feedback: 0,
        pattern: Pattern::Normal,
        salt: 0,
    }
}

impl Call {
    fn codec(self, codec: &'static str) -> Call {
        Call {
            codec: Some(codec),
            ..self
        }
    }

    /// Sets the tensor id if the codec keeps a scale for each tensor. Ids must be unique in a
    /// batch.
    fn tensor(self, tensor: usize) -> Call {
        let tensor = if self.codec.is_some_and(has_tensor) {
            tensor as u64
        } else {
            0
        };
        Call { tensor, ..self }
    }

    fn pattern(self, pattern: Pattern) -> Call {
        Call { pattern, ..self }
    }

    fn salt(self, salt: u64) -> Call {
        Call { salt, ..self }
    }
}

/// A function that makes a call invalid.
pub type Change = fn(&mut CCall);

/// A step of a case, which all ranks perform.
#[derive(Clone, Debug)]
pub enum Step {
    Call(Call),
    /// Runs the call through the C function of its collective.
    Function(Call),
    /// Runs the call after a change that makes it invalid.
    Broken(Call, Change),
    /// Runs the calls in one group.
    Group(Vec<Call>),
    /// Splits the ranks by parity, in reverse order, and runs the call on the new communicator.
    Split(Call),
    /// Calls `cinch_feedback_rescale` with this factor.
    Rescale(f64),
    /// Exports, forgets and imports all residuals of the rank.
    Transfer,
    /// Calls `cinch_feedback_forget` for this tensor.
    Forget(u64),
}

/// A case, whose result is one line of the golden file.
#[derive(Clone, Debug)]
pub struct Case {
    pub name: String,
    pub steps: Vec<Step>,
}

fn case(name: impl Into<String>, steps: Vec<Step>) -> Case {
    Case {
        name: name.into(),
        steps,
    }
}

fn pair_name((collective, algorithm): (u32, u32)) -> String {
    let name = COLLECTIVES[collective as usize];
    format!("{name}/{}", algorithm_name(algorithm))
}

/// Settings of a communicator. Zeros select the library's defaults.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    pub codec: Option<&'static str>,
    pub codec_min_bytes: u64,
    pub slot_bytes: u64,
    pub slots: u32,
    pub channels: u32,
    pub tcp_sockets: u32,
    pub algorithm: u32,
}

/// Cases that run on one communicator, in this order. Random numbers of codecs depend on the number
/// of earlier calls, so new cases belong at the end of a batch.
#[derive(Clone, Debug)]
pub struct Batch {
    pub name: String,
    pub settings: Settings,
    pub cases: Vec<Case>,
}

fn batch(name: impl Into<String>, cases: Vec<Case>) -> Batch {
    Batch {
        name: name.into(),
        settings: Settings::default(),
        cases,
    }
}

/// Returns the batches of a communicator of `nranks` on one host.
pub fn flat(nranks: usize) -> Vec<Batch> {
    let defaults = || CODECS.into_iter().map(|codec| every_pair(codec, nranks));
    match nranks {
        1 => ["raw", "linear8", "minmax4:seed=7", "cast16"]
            .into_iter()
            .map(|codec| every_pair(codec, nranks))
            .chain([groups(1), functions(1)])
            .collect(),
        5 => defaults().collect(),
        _ => {
            let mut all: Vec<Batch> = defaults().collect();
            all.extend([groups(nranks), functions(nranks)]);
            if nranks > 2 {
                all.extend(VARIANTS.map(|codec| every_pair(codec, nranks)));
            }
            match nranks {
                3 => three_ranks(&mut all),
                4 => all.push(raw_operators()),
                _ => {}
            }
            all.push(large(nranks));
            all
        }
    }
}

/// Adds the batches that only run with three ranks.
fn three_ranks(all: &mut Vec<Batch>) {
    all.extend(codecs().map(patterns));
    for dtype in [F16, BF16] {
        all.extend(codecs().map(|codec| halves(codec, dtype)));
    }
    all.extend(codecs().map(operators));
    all.extend(codecs().filter(|&codec| codec != "raw").map(feedback));
    all.extend(codecs().filter(|&codec| has_tensor(codec)).map(kept_scales));
    all.push(raw_dtypes());
    all.push(moved_dtypes());
    all.push(split());
    all.push(refusals(3));
    all.extend(CODECS.map(many_passes));
    all.extend(communicator_codecs());
}

/// Runs every collective and algorithm with `codec`.
fn every_pair(codec: &'static str, nranks: usize) -> Batch {
    let cases = pairs().enumerate().map(|(at, pair)| {
        let small = call(pair.0, pair.1, SMALL).codec(codec).tensor(2 * at + 1);
        let middle = Call {
            count: MIDDLE,
            root: nranks - 1,
            ..small.tensor(2 * at + 2)
        };
        let calls = vec![Step::Call(small), Step::Call(middle)];
        case(pair_name(pair), calls)
    });
    batch(codec, cases.collect())
}

/// Encodes special values, and values of very different magnitudes.
fn patterns(codec: &'static str) -> Batch {
    let mut cases = Vec::new();
    for pair in [
        (ALL_REDUCE, RING),
        (ALL_REDUCE, DIRECT),
        (REDUCE_SCATTER, DIRECT),
        (BROADCAST, TREE),
    ] {
        let wide = call(pair.0, pair.1, SPECIAL)
            .codec(codec)
            .tensor(2 * cases.len() + 1);
        let special = wide.tensor(2 * cases.len() + 2);
        let calls = [
            wide.pattern(Pattern::Wide),
            special.pattern(Pattern::Special),
        ];
        cases.push(case(pair_name(pair), calls.map(Step::Call).into()));
    }
    batch(format!("patterns/{codec}"), cases)
}

/// Encodes 16-bit floats.
fn halves(codec: &'static str, dtype: DType) -> Batch {
    let mut cases = Vec::new();
    for pair in [
        (ALL_REDUCE, RING),
        (ALL_REDUCE, TREE),
        (ALL_REDUCE, ONESHOT),
        (ALL_REDUCE, DIRECT),
        (ALL_GATHER, RING),
    ] {
        let call = call(pair.0, pair.1, MIDDLE)
            .codec(codec)
            .tensor(cases.len() + 1);
        let special = Call {
            pattern: Pattern::Special,
            count: SPECIAL,
            ..call.tensor(cases.len() + 101)
        };
        let calls = [call, special].map(|call| Step::Call(Call { dtype, ..call }));
        cases.push(case(pair_name(pair), calls.into()));
    }
    batch(format!("{}/{codec}", dtype.name), cases)
}

/// Runs averages and pre-multiplied sums with `codec`.
fn operators(codec: &'static str) -> Batch {
    let pairs = sums().filter(|&(collective, _)| collective != REDUCE);
    let cases = pairs.enumerate().map(|(at, pair)| {
        let avg = call(pair.0, pair.1, MIDDLE).codec(codec).tensor(2 * at + 1);
        let premulsum = Call {
            op: Op::PreMulSum,
            ..avg.tensor(2 * at + 2)
        };
        let calls = [Call { op: AVG, ..avg }, premulsum];
        case(pair_name(pair), calls.map(Step::Call).into())
    });
    batch(format!("ops/{codec}"), cases.collect())
}

/// Keeps residuals over several calls. Between calls they are exported and imported, rescaled, or
/// reset.
fn feedback(codec: &'static str) -> Batch {
    let cases = sums().enumerate().map(|(at, pair)| {
        let id = at as u64 + 1;
        let call = |salt| {
            let call = call(pair.0, pair.1, 1501)
                .codec(codec)
                .tensor(at + 1)
                .salt(salt);
            Step::Call(Call {
                feedback: id,
                ..call
            })
        };
        let steps = vec![
            call(1),
            call(2),
            Step::Transfer,
            call(3),
            Step::Rescale(0.5),
            call(4),
            Step::Forget(id),
            call(5),
        ];
        case(pair_name(pair), steps)
    });
    batch(format!("feedback/{codec}"), cases.collect())
}

/// Reduces a tensor several times, so that later calls use the scale that an earlier call measured.
fn kept_scales(codec: &'static str) -> Batch {
    let pairs = pairs().filter(|&(_, algorithm)| algorithm != ONESHOT);
    let cases = pairs.enumerate().map(|(at, pair)| {
        let call = |salt| {
            call(pair.0, pair.1, 1501)
                .codec(codec)
                .tensor(at + 1)
                .salt(salt)
        };
        let wide = call(4).pattern(Pattern::Wide);
        let steps = [call(1), call(2), call(3), wide, call(5)].map(Step::Call);
        case(pair_name(pair), steps.into())
    });
    batch(format!("kept/{codec}"), cases.collect())
}

/// Reduces every type with every operator, without a codec.
fn raw_dtypes() -> Batch {
    let mut cases = Vec::new();
    for dtype in DTYPES {
        for (name, op) in OPS {
            for pair in sums() {
                let call = call(pair.0, pair.1, MIDDLE);
                let special = Call {
                    pattern: Pattern::Special,
                    count: SPECIAL,
                    root: 1,
                    ..call
                };
                let calls = [call, special].map(|call| Step::Call(Call { dtype, op, ..call }));
                let name = format!("{}/{name}/{}", dtype.name, pair_name(pair));
                cases.push(case(name, calls.into()));
            }
        }
    }
    batch("dtypes", cases)
}

/// Reduces every type without a codec. Each case calls every operator.
fn raw_operators() -> Batch {
    let mut cases = Vec::new();
    for dtype in DTYPES {
        for pair in sums() {
            let calls = OPS.map(|(_, op)| Call {
                dtype,
                op,
                ..call(pair.0, pair.1, MIDDLE)
            });
            let name = format!("{}/{}", dtype.name, pair_name(pair));
            cases.push(case(name, calls.map(Step::Call).into()));
        }
    }
    batch("dtypes", cases)
}

/// Runs the collectives that only copy data, with every type.
fn moved_dtypes() -> Batch {
    let mut cases = Vec::new();
    for dtype in DTYPES {
        for pair in pairs().filter(|&pair| !sums().any(|sum| sum == pair)) {
            let call = call(pair.0, pair.1, 1009);
            let calls = [call, call.pattern(Pattern::Special)];
            let calls = calls.map(|call| Step::Call(Call { dtype, ..call }));
            let name = format!("{}/{}", dtype.name, pair_name(pair));
            cases.push(case(name, calls.into()));
        }
    }
    batch("moves", cases)
}

/// Sends messages so large that they take several passes through the slots.
fn large(nranks: usize) -> Batch {
    let mut cases = Vec::new();
    for codec in ["raw", "linear8", "minmax4:seed=7", "onebit"] {
        for pair in pairs().filter(|&(collective, _)| collective != SEND_RECV) {
            let whole = [ALL_REDUCE, BROADCAST, REDUCE].contains(&pair.0);
            let count = if whole { LARGE } else { LARGE / 3 };
            let call = call(pair.0, pair.1, count).codec(codec);
            let call = Call {
                root: nranks / 2,
                ..call
            };
            let name = format!("{codec}/{}", pair_name(pair));
            cases.push(case(name, vec![Step::Call(call)]));
        }
    }
    Batch {
        settings: Settings {
            channels: 3,
            tcp_sockets: 2,
            ..Settings::default()
        },
        ..batch("large", cases)
    }
}

/// Connects ranks by two slots of the smallest size, so that small messages take many passes.
fn many_passes(codec: &'static str) -> Batch {
    Batch {
        name: format!("passes/{codec}"),
        settings: Settings {
            slot_bytes: 4096,
            slots: 2,
            ..Settings::default()
        },
        ..every_pair(codec, 3)
    }
}

/// Runs groups of small all_reduces, which cinch fuses into one message, and groups of every
/// collective.
fn groups(nranks: usize) -> Batch {
    let mut cases = Vec::new();
    for codec in ["raw", "linear8", "cast16", "onebit", "minmax4:seed=7"] {
        let sum = |count, salt| call(ALL_REDUCE, 0, count).codec(codec).salt(salt);
        for algorithm in [RING, TREE, ONESHOT, DIRECT] {
            let sums = [(300, 1), (1, 2), (1000, 3), (17, 4), (4099, 5)];
            let sums = sums.map(|(count, salt)| Call {
                algorithm,
                ..sum(count, salt)
            });
            let name = format!("{codec}/{}", pair_name((ALL_REDUCE, algorithm)));
            cases.push(case(name, vec![Step::Group(sums.into())]));
        }
        let mixed = pairs().map(|(collective, algorithm)| Call {
            root: nranks - 1,
            ..call(collective, algorithm, 301).codec(codec)
        });
        let name = format!("{codec}/mixed");
        cases.push(case(name, vec![Step::Group(mixed.collect())]));
    }
    for (name, op) in OPS {
        let sums = [300, 1, 1000].map(|count| Call {
            op,
            ..call(ALL_REDUCE, DIRECT, count)
        });
        cases.push(case(name, vec![Step::Group(sums.into())]));
    }
    batch("groups", cases)
}

/// Calls `cinch_all_reduce` and the other functions of collectives instead of `cinch_call`.
fn functions(nranks: usize) -> Batch {
    let cases = (0..COLLECTIVES.len() as u32).map(|collective| {
        let call = |count| Call {
            root: nranks - 1,
            ..call(collective, 0, count)
        };
        let calls = [call(0), call(1), call(MIDDLE)].map(Step::Function);
        case(COLLECTIVES[collective as usize], calls.into())
    });
    Batch {
        settings: Settings {
            algorithm: DIRECT,
            ..Settings::default()
        },
        ..batch("functions", cases.collect())
    }
}

/// Splits the communicator for each call.
fn split() -> Batch {
    let mut cases = Vec::new();
    for codec in ["raw", "linear8", "minmax4:seed=7"] {
        for pair in pairs() {
            let call = call(pair.0, pair.1, 1009).codec(codec);
            let name = format!("{codec}/{}", pair_name(pair));
            cases.push(case(name, vec![Step::Split(call)]));
        }
    }
    batch("split", cases)
}

/// Sets codecs for the communicator, and none for its calls.
fn communicator_codecs() -> Vec<Batch> {
    let of = |codec: &'static str, codec_min_bytes| {
        let pairs = pairs().filter(|&(collective, _)| collective != SEND_RECV);
        let cases = pairs.map(|pair| {
            let calls = [SMALL, MIDDLE].map(|count| Step::Call(call(pair.0, pair.1, count)));
            case(pair_name(pair), calls.into())
        });
        Batch {
            settings: Settings {
                codec: Some(codec),
                codec_min_bytes,
                ..Settings::default()
            },
            ..batch(
                format!("default/{codec}/{codec_min_bytes}"),
                cases.collect(),
            )
        }
    };
    vec![
        of("dynamic8", 1),
        of("minmax8:seed=3", 10_000),
        of("intra=linear8,inter=cast16", 1),
        of("off", 1),
    ]
}

/// Makes calls that the library refuses, and valid ones that resemble them.
fn refusals(nranks: usize) -> Batch {
    let mut cases = Vec::new();
    for collective in 0..COLLECTIVES.len() as u32 {
        for algorithm in RING..=HIERARCHICAL {
            let pair = (collective, algorithm);
            if !pairs().any(|known| known == pair) {
                let call = call(collective, algorithm, SMALL);
                cases.push(case(pair_name(pair), vec![Step::Call(call)]));
            }
        }
    }
    for dtype in DTYPES {
        for collective in [ALL_REDUCE, BROADCAST] {
            let call = call(collective, DIRECT, SMALL).codec("linear8");
            let name = format!("codec/{}/{}", dtype.name, COLLECTIVES[collective as usize]);
            cases.push(case(name, vec![Step::Call(Call { dtype, ..call })]));
        }
    }
    for (name, op) in OPS {
        let call = call(ALL_REDUCE, DIRECT, SMALL).codec("linear8");
        cases.push(case(
            format!("codec/{name}"),
            vec![Step::Call(Call { op, ..call })],
        ));
    }
    for codec in [
        "",
        "int8",
        "raw:block=64",
        "linear8:block=31",
        "linear8:block=8192",
        "linear8:block=64:tensor=2",
        "linear8:tensor=2",
        "fp8_e4m3:seed=1",
        "static8:offset=31",
        "minmax4:seed=256",
        "threshold2",
        "threshold2:tau=0",
        "auto",
        "intra=raw,inter=linear8",
    ] {
        let call = call(ALL_REDUCE, DIRECT, SMALL).codec(codec);
        cases.push(case(format!("codec/\"{codec}\""), vec![Step::Call(call)]));
    }
    let sum = call(ALL_REDUCE, DIRECT, SMALL);
    let broadcast = Call {
        feedback: 1,
        ..call(BROADCAST, DIRECT, SMALL).codec("linear8")
    };
    cases.push(case("feedback/broadcast", vec![Step::Call(broadcast)]));
    let exact = Call { feedback: 1, ..sum };
    cases.push(case("feedback/raw", vec![Step::Call(exact)]));
    let root = Call {
        root: nranks,
        ..call(BROADCAST, DIRECT, SMALL)
    };
    cases.push(case("root", vec![Step::Call(root)]));
    let changes: [(&str, Change); 13] = [
        ("dtype", |call| call.dtype = 12),
        ("op", |call| call.op = 5),
        ("operator", |call| call.op = u32::MAX),
        ("collective", |call| call.collective = 10),
        ("algorithm", |call| call.algorithm = 99),
        ("algorithm/auto", |call| call.algorithm = 1),
        ("comm", |call| call.comm = std::ptr::null_mut()),
        ("sendbuf", |call| call.sendbuf = std::ptr::null()),
        ("recvbuf", |call| call.recvbuf = std::ptr::null_mut()),
        ("count", |call| call.count = usize::MAX),
        ("count/memory", |call| call.count = 1 << 61),
        ("overlap", |call| {
            call.recvbuf = call.sendbuf.cast_mut().wrapping_byte_add(4)
        }),
        ("peer", |call| {
            call.collective = 8;
            call.peer = 99;
        }),
    ];
    for (name, change) in changes {
        let name = format!("broken/{name}");
        cases.push(case(name, vec![Step::Broken(sum, change)]));
    }
    batch("refused", cases)
}

/// Returns the batches of ranks on several hosts. `variants` adds codecs with other parameters.
pub fn on_hosts(nranks: usize, variants: bool) -> Vec<Batch> {
    const TWO_LEVELS: [u32; 5] = [ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST, REDUCE];
    let hierarchical = |codec: Option<&'static str>, tensor: usize, collective| {
        let small = Call {
            codec,
            ..call(collective, HIERARCHICAL, SMALL)
        };
        let small = small.tensor(2 * tensor + 1);
        let middle = Call {
            count: MIDDLE,
            root: nranks - 1,
            ..small.tensor(2 * tensor + 2)
        };
        let calls = vec![Step::Call(small), Step::Call(middle)];
        case(pair_name((collective, HIERARCHICAL)), calls)
    };
    let mut all: Vec<Batch> = codecs()
        .filter(|codec| variants || CODECS.contains(codec))
        .map(|codec| {
            let cases = TWO_LEVELS.iter().enumerate();
            let cases = cases.map(|(at, &collective)| hierarchical(Some(codec), at, collective));
            batch(codec, cases.collect())
        })
        .collect();
    for codec in ["raw", "linear8", "minmax4:seed=7"] {
        let mut whole = every_pair(codec, nranks);
        whole.name = format!("flat/{codec}");
        all.push(whole);
    }
    let feedback = ["linear8", "cast_bf16", "terngrad"].map(|codec| {
        let call = |salt| {
            let call = call(ALL_REDUCE, HIERARCHICAL, MIDDLE)
                .codec(codec)
                .salt(salt);
            Step::Call(Call {
                feedback: 1,
                ..call
            })
        };
        case(codec, vec![call(1), call(2), Step::Transfer, call(3)])
    });
    all.push(batch("feedback", feedback.into()));
    for codec in [
        "intra=raw,inter=linear8",
        "intra=raw,inter=dynamic8",
        "intra=cast_bf16,inter=minmax4:seed=7",
        "intra=linear8:block=64,inter=raw",
        "intra=raw,inter=fp8_e4m3:tensor=2",
        "inter=onebit,intra=trunc16",
    ] {
        let mut cases: Vec<Case> = [ALL_REDUCE, REDUCE_SCATTER, BROADCAST]
            .into_iter()
            .map(|collective| hierarchical(None, 0, collective))
            .collect();
        for algorithm in [RING, DIRECT] {
            let call = call(ALL_REDUCE, algorithm, MIDDLE);
            cases.push(case(
                pair_name((ALL_REDUCE, algorithm)),
                vec![Step::Call(call)],
            ));
        }
        let tensor = Call {
            tensor: 1,
            ..call(ALL_REDUCE, HIERARCHICAL, MIDDLE)
        };
        cases.push(case(
            "tensor",
            [1, 2, 3].map(|salt| Step::Call(tensor.salt(salt))).into(),
        ));
        all.push(Batch {
            settings: Settings {
                codec: Some(codec),
                codec_min_bytes: 1,
                ..Settings::default()
            },
            ..batch(format!("levels/{codec}"), cases)
        });
    }
    let large = ["raw", "linear8"].map(|codec| {
        let large = call(ALL_REDUCE, HIERARCHICAL, LARGE).codec(codec);
        case(format!("{codec}/large"), vec![Step::Call(large)])
    });
    all.push(batch("large", large.into()));
    all
}

/// Leaves the algorithm to the library, which chooses by transport and size.
pub fn chosen() -> Batch {
    let mut cases = Vec::new();
    for codec in ["raw", "linear8", "cast16"] {
        for collective in 0..COLLECTIVES.len() as u32 {
            let calls = [0, 1, SMALL, MIDDLE, 70_001];
            let calls = calls.map(|count| Step::Call(call(collective, 0, count).codec(codec)));
            let name = format!("{codec}/{}", COLLECTIVES[collective as usize]);
            cases.push(case(name, calls.into()));
        }
    }
    batch("chosen", cases)
}
