//! Tests programmatic dependent launches: kernels that start while earlier kernels of the stream still run.
//! Each call's input is written late, by a kernel that lets the next kernel start at once.

#![allow(unsafe_code)] // a kernel takes a raw address

use crate::arena::Arena;
use crate::harness::{Check, Setup, Stop, Verdict, ensure};
use crate::world::World;
use cinch::comm::Call;
use cinch::gpu::probe::{LateFill, probe_word};
use cinch::gpu::{CaptureMode, Graph, Stream};
use cinch::types::KernelProtocol;
use cinch::{Collective, Communicator, DType, Result};
use std::time::Duration;

/// Elements of a call: several chunks, and few enough for a fused kernel.
const COUNT: usize = 30_000;
const BYTES: usize = 4 * COUNT;
const WORDS: u64 = COUNT as u64 / 2;
const ROUNDS: usize = 20;
/// Time from the start of the writing kernel to its first write.
const DELAY: Duration = Duration::from_micros(100);

pub fn checks() -> Vec<Check> {
    let protocols = [
        KernelProtocol::FUSED_LL,
        KernelProtocol::FUSED_LL128,
        KernelProtocol::LL,
        KernelProtocol::LL128,
        KernelProtocol::SIMPLE,
    ];
    let mut checks = Vec::new();
    for (nranks, gpus) in [(2, 1), (2, 2), (8, 2)] {
        for protocol in protocols {
            let name = format!(
                "early/{}-n{nranks}-gpus{gpus}",
                super::cover::name(Some(protocol))
            );
            checks.push(Check::new(name, gpus, move |setup| {
                late_inputs(setup, nranks, gpus, protocol)
            }));
        }
    }
    checks
}

/// Queues a kernel that writes its output late, a call that reads this output, and a second call that reads
/// the first call's output. Runs all three on a stream and in a graph.
fn late_inputs(setup: &Setup, nranks: usize, gpus: usize, protocol: KernelProtocol) -> Verdict {
    let mut world = World::new(setup, nranks, gpus);
    world.config.force_kernel(Some(protocol));
    let arenas = world.arenas(3 * BYTES)?;
    world.run(|comm| {
        let arena = &arenas[comm.rank()];
        let late = LateFill::new(arena.stream()?.context())?;
        let stream = arena.stream()?;
        // The first work on a stream may wait for all kernels on the GPU. This write is the stream's first
        // work, and runs before any kernel waits for a peer.
        arena.write(0, &vec![0; 3 * BYTES])?;
        comm.barrier()?;
        // Fused LL128 kernels add floats only, whose sums would be rounded; they gather instead.
        let collective = match protocol {
            KernelProtocol::FUSED_LL128 => Collective::AllGather,
            _ => Collective::AllReduce,
        };
        for round in 0..ROUNDS {
            queue(comm, arena, &late, collective, round, stream)?;
            judge(comm, arena, collective, round)
                .map_err(|stop| stop.context(format!("round {round}")))?;
        }
        let graph = Graph::capture(stream, CaptureMode::ThreadLocal, |stream| {
            // The first call of a graph also waits for an event, unlike the calls after it.
            queue(comm, arena, &late, collective, 0, stream)?;
            queue(comm, arena, &late, collective, ROUNDS, stream)
        })?;
        comm.barrier()?;
        for replay in 0..ROUNDS {
            arena.write(0, &vec![replay as u8; 3 * BYTES])?;
            graph.launch(stream)?;
            judge(comm, arena, collective, ROUNDS)
                .map_err(|stop| stop.context(format!("replay {replay}")))?;
        }
        comm.barrier()?;
        drop(graph);
        Ok(())
    })?;
    Ok(format!("{ROUNDS} rounds and replays"))
}

fn seed(rank: usize, round: usize) -> u64 {
    (round * 64 + rank) as u64
}

/// Queues a late write of the input, a collective on it, and a collective on the first one's
/// output.
fn queue(
    comm: &Communicator,
    arena: &Arena,
    late: &LateFill,
    collective: Collective,
    round: usize,
    stream: &Stream,
) -> Result<()> {
    let target = arena.memory()?.place(0, BYTES)?;
    // SAFETY: `place` keeps the target within the rank's memory, and all other uses of it come
    // later in the stream.
    unsafe { late.queue((target, WORDS), seed(comm.rank(), round), DELAY, stream)? };
    let blocks = match collective {
        Collective::AllGather => comm.nranks(),
        _ => 1,
    };
    let call = Call::new(collective, DType::U32, COUNT / blocks);
    let block = BYTES / blocks;
    for pass in 0..2 {
        // The second all_gather sends the rank's own block of the data that the first all_gather
        // received.
        let own = pass * (comm.rank() % blocks) * block;
        let (input, output) = ((pass * BYTES + own, block), ((pass + 1) * BYTES, BYTES));
        arena.call_at(comm, &call, input, output, Some(stream))?;
    }
    Ok(())
}

fn judge(
    comm: &Communicator,
    arena: &Arena,
    collective: Collective,
    round: usize,
) -> std::result::Result<(), Stop> {
    arena.wait(comm)?;
    let mut found = vec![0; 2 * BYTES];
    arena.read(BYTES, &mut found)?;
    for (index, element) in found.chunks_exact(4).enumerate() {
        let at = (index % COUNT) as u64;
        let word = |rank: u64, at: u64| {
            (probe_word(seed(rank as usize, round), at / 2) >> (32 * (at % 2))) as u32
        };
        let expected = match collective {
            Collective::AllGather => {
                let block = (COUNT / comm.nranks()) as u64;
                word(at / block, at % block)
            }
            _ => {
                let sum = (0..comm.nranks() as u64)
                    .fold(0u32, |sum, rank| sum.wrapping_add(word(rank, at)));
                let factor = if index < COUNT {
                    1
                } else {
                    comm.nranks() as u32
                };
                sum.wrapping_mul(factor)
            }
        };
        let expected = expected.to_le_bytes();
        ensure(element == expected, || {
            format!("element {index} is {element:x?}, expected {expected:x?}")
        })?;
    }
    Ok(())
}
