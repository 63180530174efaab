//! Speed of large all_reduces whose ranks share a GPU and whose messages pass through pinned host memory, so that
//! every byte crosses PCIe twice: beside the driver's copies in both directions at once, and with codecs beside raw.

#![allow(unsafe_code)] // the driver's copies take raw addresses

use crate::arena::{Arena, PATIENCE};
use crate::harness::{Check, Setup, Verdict, ensure};
use crate::world::World;
use cinch::comm::Call;
use cinch::gpu::probe::Probe;
use cinch::gpu::{PinnedMemory, Stream};
use cinch::testing::{gaussian, set_value, value};
use cinch::{Collective, Communicator, DType, Result};
use std::time::{Duration, Instant};

const BYTES: usize = 256 << 20;
/// Bytes that are random; the rest of a buffer repeats them.
const RANDOM: usize = 4 << 20;
/// Measurements of each kind, in turns; the median counts. The first is left out.
const TURNS: usize = 5;
const CALLS: u32 = 10;
/// Least rate of raw messages, as a part of what the driver's copies carry, on a machine that others use as well.
const LEAST: f64 = 0.85;

pub fn checks() -> Vec<Check> {
    let mut checks = Vec::new();
    for nranks in [2, 4] {
        for dtype in [DType::F32, DType::BF16] {
            let name = format!("pinned/figures-{dtype}-n{nranks}");
            let check = Check::new(name, 1, move |setup| figures(setup, nranks, dtype));
            checks.push(check.within(120));
        }
    }
    checks
}

/// Pinned memory and streams for copies in both directions at once.
struct Copies {
    host: [PinnedMemory; 2],
    streams: [Stream; 2],
}

impl Copies {
    fn new(arena: &Arena) -> Result<Copies> {
        let context = arena.memory()?.context();
        let host = || PinnedMemory::new(context, BYTES);
        let stream = || Stream::new(context);
        Ok(Copies {
            host: [host()?, host()?],
            streams: [stream()?, stream()?],
        })
    }

    /// Returns the time of a copy of [`BYTES`] each way.
    fn time(&self, arena: &Arena) -> Result<Duration> {
        let memory = arena.memory()?;
        let device = memory.address();
        let begin = Instant::now();
        let copies = [
            (self.host[0].address(), device, &self.streams[0]),
            (
                device + BYTES as u64,
                self.host[1].address(),
                &self.streams[1],
            ),
        ];
        for (to, from, stream) in copies {
            // SAFETY: both memories have the bytes, and this rank's arena has two halves of them. They outlive the
            // copies, for which this function waits.
            unsafe { Probe::queue_driver_copy(to, from, BYTES, stream)? };
        }
        for stream in &self.streams {
            stream.wait(PATIENCE)?;
        }
        Ok(begin.elapsed())
    }
}

fn median(times: &mut [Duration]) -> f64 {
    times.sort();
    times[times.len() / 2].as_secs_f64()
}

/// Returns the time of an all_reduce, whose input and output are the halves of the arena.
fn all_reduce(comm: &Communicator, arena: &Arena, call: &Call) -> Result<Duration> {
    let stream = arena.stream()?;
    comm.barrier()?;
    let begin = Instant::now();
    for _ in 0..CALLS {
        let buffers = arena.buffers((0, BYTES), (BYTES, BYTES), stream)?;
        comm.call_on(call, buffers)?;
    }
    stream.wait(PATIENCE)?;
    Ok(begin.elapsed() / CALLS)
}

/// Returns the RMS of the differences of `found` from the sum of all ranks' elements, over the RMS of the sum, and the
/// largest difference.
fn errors(dtype: DType, nranks: usize, found: &[u8]) -> [f64; 2] {
    let (mut squares, mut all, mut largest) = (0.0, 0.0, 0.0f64);
    for (at, element) in found.chunks_exact(dtype.size()).enumerate() {
        let sum: f64 = (0..nranks).map(|rank| element_of(dtype, rank, at)).sum();
        let difference = value(dtype, element) - sum;
        squares += difference * difference;
        all += sum * sum;
        largest = largest.max(difference.abs());
    }
    [(squares / all).sqrt(), largest]
}

/// Returns element `at` of a rank's input, as its type holds it.
fn element_of(dtype: DType, rank: usize, at: usize) -> f64 {
    let mut bytes = [0; 4];
    let number = gaussian(((rank << 32 | at) as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    set_value(dtype, number, &mut bytes[..dtype.size()]);
    value(dtype, &bytes[..dtype.size()])
}

fn figures(setup: &Setup, nranks: usize, dtype: DType) -> Verdict {
    const SPECS: [&str; 4] = ["raw", "linear8", "dynamic8", "minmax4"];
    let mut world = World::new(setup, nranks, 1);
    world.config.p2p_disable = true;
    let arenas = world.arenas(2 * BYTES)?;
    let measured = world.run(|comm| {
        let arena = &arenas[comm.rank()];
        let mut data = vec![0; RANDOM];
        for (at, element) in data.chunks_exact_mut(dtype.size()).enumerate() {
            set_value(dtype, element_of(dtype, comm.rank(), at), element);
        }
        for at in (0..BYTES).step_by(RANDOM) {
            arena.write(at, &data)?;
        }
        let copies = (comm.rank() == 0).then(|| Copies::new(arena)).transpose()?;
        let calls = SPECS.map(|text| Call {
            codec: text.parse().ok(),
            ..Call::new(Collective::AllReduce, dtype, BYTES / dtype.size())
        });
        let mut copied = Vec::new();
        let mut times: [Vec<Duration>; SPECS.len()] = std::array::from_fn(|_| Vec::new());
        let mut found = vec![0; RANDOM];
        let mut errors_of = [[0.0; 2]; SPECS.len()];
        for turn in 0..=TURNS {
            comm.barrier()?;
            let copy = copies
                .as_ref()
                .map(|copies| copies.time(arena))
                .transpose()?;
            let mut of_turn = [Duration::ZERO; SPECS.len()];
            for (at, call) in calls.iter().enumerate() {
                of_turn[at] = all_reduce(comm, arena, call)?;
                if turn == 0 && comm.rank() == 0 {
                    arena.read(BYTES, &mut found)?;
                    errors_of[at] = errors(dtype, nranks, &found);
                }
            }
            if turn > 0 {
                copied.extend(copy);
                (times.iter_mut().zip(of_turn)).for_each(|(times, time)| times.push(time));
            }
        }
        Ok((copied, times, errors_of))
    })?;
    let mut copied = measured[0].0.clone();
    let copied = median(&mut copied);
    let slowest = |spec: usize| -> f64 {
        let of = |turn: usize| measured.iter().map(|rank| rank.1[spec][turn]).max();
        let mut times: Vec<Duration> = (0..TURNS).filter_map(of).collect();
        median(&mut times)
    };
    // All ranks send, and receive, 2 (N-1)/N messages each over one link.
    let crossing = 2 * (nranks - 1) * BYTES;
    let rate = |seconds: f64| crossing as f64 / seconds;
    let raw = slowest(0);
    let part = rate(raw) / (BYTES as f64 / copied);
    let mut lines = vec![format!(
        "cuMemcpyAsync both ways {:.1} GB/s each; raw {:.2} ms, {:.1} GB/s, {part:.3} of it",
        BYTES as f64 / copied / 1e9,
        raw * 1e3,
        rate(raw) / 1e9,
    )];
    for (at, text) in SPECS.iter().enumerate().skip(1) {
        let [rms, largest] = measured[0].2[at];
        lines.push(format!(
            "{text} {:.2} ms, {:.2}x raw, RMS error {:.2} %, largest {largest:.3}",
            slowest(at) * 1e3,
            raw / slowest(at),
            100.0 * rms,
        ));
    }
    let text = lines.join("; ");
    let limits = [
        if dtype == DType::F32 { 1e-6 } else { 0.01 },
        0.02,
        0.03,
        0.2,
    ];
    let errors = measured[0].2.map(|[rms, _]| rms);
    let is_right = errors.iter().zip(limits).all(|(rms, limit)| *rms < limit);
    ensure(is_right, || {
        format!("RMS errors {errors:?} of {SPECS:?}: {text}")
    })?;
    ensure(part >= LEAST, || text.clone())?;
    Ok(text)
}
