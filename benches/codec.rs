//! Benchmarks the codecs on one core, beside memcpy in the same run.
//!
//! The first tables show GB/s of fp32, and the ratio to a memcpy of 16 MiB that alternates with the
//! codec. They cover packing of whole arrays with ADT's Bitpack, on one thread and on all cores, and
//! every codec. `cargo bench --bench codec -- --ratios` stops after these tables; `--json` also stops
//! there, and prints JSON lines for `benches/baselines/`. Otherwise criterion then measures each codec
//! on 16 MiB, and on a tile of 2,048 elements in the first-level cache. A step of a collective calls a
//! codec with tiles of this size.

use cinch::CodecSpec;
use cinch::arrays::{Layout, StandAlone};
use cinch::codec::{Codec, EncodeStats, Span, build};
use cinch::cpu::Isa;
use cinch::types::CodecKind;
use criterion::{Criterion, Throughput};
use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

const LARGE: usize = 4 << 20;
const TILE: usize = 2048;
/// Number of alternations of codec and memcpy. The median of their ratios is printed.
const ROUNDS: usize = 15;

/// Returns every codec with its default parameters.
fn specs() -> Vec<CodecSpec> {
    CodecKind::ALL[1..]
        .iter()
        .map(|&kind| CodecSpec::of(kind))
        .collect()
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let x = gaussian(LARGE);
    let asked = |name: &str| arguments.iter().any(|argument| argument == name);
    let print: fn(&Row) = if asked("--json") { json } else { text };
    if !asked("--json") {
        println!("{HEADING}");
    }
    packing(&x, print);
    ratios(&x, print);
    if asked("--ratios") || asked("--json") {
        return;
    }
    let mut criterion = Criterion::default().configure_from_args().sample_size(20);
    for n in [TILE, LARGE] {
        measure(&mut criterion, &x[..n]);
    }
    criterion.final_summary();
}

/// A codec with its buffers.
struct Subject {
    codec: Arc<dyn Codec>,
    span: Span,
    wire: Vec<u8>,
    y: Vec<f32>,
}

impl Subject {
    fn new(spec: CodecSpec, isa: Isa, x: &[f32]) -> Subject {
        let codec = build(spec, isa).unwrap().unwrap();
        let mut subject = Subject {
            span: Span::whole(x.len()),
            wire: vec![0; codec.wire_bytes(x.len())],
            y: vec![0.0; x.len()],
            codec,
        };
        subject.run(Work::Encode, x);
        subject
    }

    fn run(&mut self, work: Work, x: &[f32]) {
        let Subject {
            codec,
            span,
            wire,
            y,
        } = self;
        match work {
            Work::Encode => codec.encode(*span, black_box(x), None, wire, None),
            Work::EncodeStats => {
                let mut stats = EncodeStats::default();
                codec.encode(*span, black_box(x), None, wire, Some(&mut stats));
                black_box(stats);
            }
            Work::Decode => codec.decode(*span, black_box(wire), y),
            Work::DecodeReduce => codec.decode_reduce(*span, black_box(wire), y),
        }
        black_box((&self.wire, &self.y));
    }
}

#[derive(Clone, Copy, Debug)]
enum Work {
    Encode,
    EncodeStats,
    Decode,
    DecodeReduce,
}

const WORKS: [Work; 4] = [
    Work::Encode,
    Work::EncodeStats,
    Work::Decode,
    Work::DecodeReduce,
];

/// A row of the tables.
struct Row {
    codec: String,
    isa: Isa,
    work: String,
    threads: usize,
    /// GB/s of the codec, GB/s of memcpy, and the median of their ratios.
    speeds: (f64, f64, f64),
}

fn text(row: &Row) {
    let (speed, memcpy, ratio) = row.speeds;
    println!(
        "{:<20} {:<7} {:<13} {:>7} {speed:>6.2} {memcpy:>7.2} {ratio:>6.2}",
        row.codec,
        row.isa.name(),
        row.work,
        row.threads
    );
}

fn json(row: &Row) {
    let (speed, memcpy, ratio) = row.speeds;
    println!(
        "{{\"bench\": \"codec\", \"codec\": \"{}\", \"isa\": \"{}\", \"work\": \"{}\", \"threads\": \
         {}, \"bytes\": {}, \"gb_per_s\": {speed:.2}, \"memcpy_gb_per_s\": {memcpy:.2}, \"ratio\": \
         {ratio:.3}}}",
        row.codec,
        row.isa.name(),
        row.work,
        row.threads,
        LARGE * 4,
    );
}

const HEADING: &str = "codec                isa     work          threads   GB/s  memcpy  ratio   \
                       (16 MiB of fp32; memcpy on one core)";

/// Returns the number of rounds of a measurement. The scalar code only serves as a specification, so a single
/// round suffices for it.
fn rounds(isa: Isa) -> usize {
    if isa == Isa::Scalar { 1 } else { ROUNDS }
}

/// Measures ADT's packing of whole arrays. The goal is 0.7 of memcpy's input bandwidth on one core.
fn packing(x: &[f32], print: fn(&Row)) {
    let mut copy = vec![0f32; x.len()];
    let mut y = vec![0f32; x.len()];
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut cases: Vec<(Isa, usize)> = Isa::available().into_iter().map(|isa| (isa, 1)).collect();
    if cores > 1 {
        cases.push((Isa::detect(), cores));
    }
    for (isa, threads) in cases {
        for name in ["trunc8", "trunc16", "trunc24"] {
            let spec = name.parse().unwrap();
            let codec = StandAlone::new(spec, Layout::Published, isa).unwrap();
            let codec = codec.with_threads(threads);
            let mut bytes = vec![0u8; codec.bytes(x.len())];
            let mut memcpy = || {
                copy.copy_from_slice(black_box(x));
                black_box(&copy);
            };
            let pack = compare(
                x.len() * 4,
                rounds(isa),
                || {
                    codec.encode(black_box(x), 0, &mut bytes).unwrap();
                    black_box(&bytes);
                },
                &mut memcpy,
            );
            let unpack = compare(
                x.len() * 4,
                rounds(isa),
                || {
                    codec.decode(black_box(&bytes), &mut y).unwrap();
                    black_box(&y);
                },
                &mut memcpy,
            );
            for (work, speeds) in [("Pack", pack), ("Unpack", unpack)] {
                print(&Row {
                    codec: name.into(),
                    isa,
                    work: work.into(),
                    threads,
                    speeds,
                });
            }
        }
    }
}

fn ratios(x: &[f32], print: fn(&Row)) {
    let mut copy = vec![0f32; x.len()];
    for isa in Isa::available() {
        for spec in specs() {
            let mut subject = Subject::new(spec, isa, x);
            for work in WORKS {
                let speeds = compare(
                    x.len() * 4,
                    rounds(isa),
                    || subject.run(work, x),
                    || {
                        copy.copy_from_slice(black_box(x));
                        black_box(&copy);
                    },
                );
                print(&Row {
                    codec: spec.to_string(),
                    isa,
                    work: format!("{work:?}"),
                    threads: 1,
                    speeds,
                });
            }
        }
    }
}

/// Returns the median GB/s of `subject`, the median GB/s of `memcpy`, and the median ratio of their speeds.
/// The two alternate, and each goes first in half of the rounds.
fn compare(
    bytes: usize,
    rounds: usize,
    mut subject: impl FnMut(),
    mut memcpy: impl FnMut(),
) -> (f64, f64, f64) {
    let mut rows = Vec::new();
    subject();
    memcpy();
    for round in 0..rounds {
        let (a, b) = if round % 2 == 0 {
            let a = time(&mut subject);
            (a, time(&mut memcpy))
        } else {
            let b = time(&mut memcpy);
            (time(&mut subject), b)
        };
        rows.push((bytes as f64 / a / 1e9, bytes as f64 / b / 1e9, b / a));
    }
    let median = |pick: fn(&(f64, f64, f64)) -> f64| {
        let mut values: Vec<f64> = rows.iter().map(pick).collect();
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    (median(|r| r.0), median(|r| r.1), median(|r| r.2))
}

fn time(work: &mut impl FnMut()) -> f64 {
    let start = Instant::now();
    work();
    start.elapsed().as_secs_f64()
}

fn measure(criterion: &mut Criterion, x: &[f32]) {
    let mut group = criterion.benchmark_group(format!("{} elements", x.len()));
    group.throughput(Throughput::Bytes(4 * x.len() as u64));
    let mut copy = vec![0f32; x.len()];
    group.bench_function("memcpy", |bencher| {
        bencher.iter(|| {
            copy.copy_from_slice(black_box(x));
            black_box(&copy);
        })
    });
    for spec in specs() {
        let mut subject = Subject::new(spec, Isa::detect(), x);
        for work in WORKS {
            group.bench_function(format!("{spec}/{work:?}"), |bencher| {
                bencher.iter(|| subject.run(work, x))
            });
        }
    }
    group.finish();
}

/// Returns sums of twelve uniform numbers, which are close enough to Gaussian data for a speed test.
fn gaussian(n: usize) -> Vec<f32> {
    let mut state = 1u64;
    let mut uniform = move || {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1 << 24) as f32
    };
    (0..n)
        .map(|_| (0..12).map(|_| uniform()).sum::<f32>() - 6.0)
        .collect()
}
