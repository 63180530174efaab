//! CUDA graphs, several communicators at once, and calls that change streams.
//!
//! A chain of collectives transforms integer state again and again, and the host computes the
//! expected state. A replay that runs too early, too late or not at all leaves wrong state in every
//! later step.

use crate::arena::{Arena, PATIENCE};
use crate::case::factor;
use crate::cover::Rng;
use crate::harness::{Check, Setup, Stop, Verdict, ensure};
use crate::options::Options;
use crate::world::World;
use cinch::comm::{Call, Group};
use cinch::gpu::{CaptureMode, Event, Graph, Stream};
use cinch::types::Scalar;
use cinch::{Collective, Communicator, DType, ReduceOp, Result};
use std::sync::Barrier;

/// Elements of a block of the state: each rank has `nranks` blocks in each of s, t and u.
const PART: usize = 700;
/// Elements of the data that the compressed calls sum.
const CODED: usize = 20_000;
/// Replays or steps between two comparisons with the model.
const BATCH: usize = 10;

pub fn checks(options: &Options) -> Vec<Check> {
    let mut checks = Vec::new();
    for (nranks, gpus) in [(2, 1), (3, 1), (5, 1), (2, 2), (8, 2), (4, 4), (8, 8)] {
        let name = format!("graph/replays-n{nranks}-gpus{gpus}");
        let check = Check::new(name, gpus, move |setup| {
            replays(setup, &World::new(setup, nranks, gpus), 1000)
        });
        checks.push(check.within(options.either(90, 180)));
        let name = format!("graph/streams-n{nranks}-gpus{gpus}");
        let check = Check::new(name, gpus, move |setup| {
            streams(setup, &World::new(setup, nranks, gpus))
        });
        checks.push(check.within(60).also_on_host());
        let name = format!("graph/mixed-n{nranks}-gpus{gpus}");
        let check = Check::new(name, gpus, move |setup| {
            mixed(setup, &World::new(setup, nranks, gpus))
        });
        checks.push(check.within(60));
        let name = format!("graph/mixed-one-thread-n{nranks}-gpus{gpus}");
        let check = Check::new(name, gpus, move |setup| {
            mixed_by_one_thread(setup, &World::new(setup, nranks, gpus))
        });
        checks.push(check.within(60));
        let name = format!("graph/groups-n{nranks}-gpus{gpus}");
        let check = Check::new(name, gpus, move |setup| {
            groups(setup, &World::new(setup, nranks, gpus))
        });
        checks.push(check.within(60));
        let name = format!("graph/communicators-n{nranks}-gpus{gpus}");
        let check = Check::new(name, gpus, move |setup| {
            communicators(setup, &World::new(setup, nranks, gpus))
        });
        checks.push(check.within(60));
    }
    checks
}

/// Expected state of all ranks. Each of the arrays s, t and u has `nranks` times [`PART`] elements
/// on each rank.
struct Model {
    nranks: usize,
    s: Vec<Vec<u32>>,
    t: Vec<Vec<u32>>,
    u: Vec<Vec<u32>>,
}

/// Byte offsets of the arrays in each rank's memory. `coded` holds the compressed calls' input and
/// two outputs.
struct Offsets {
    s: usize,
    t: usize,
    u: usize,
    coded: [usize; 3],
    bytes: usize,
}

impl Offsets {
    fn new(nranks: usize) -> Offsets {
        let part = (4 * PART * nranks).next_multiple_of(256);
        let coded = |i: usize| 3 * part + i * 4 * CODED;
        Offsets {
            s: 0,
            t: part,
            u: 2 * part,
            coded: [coded(0), coded(1), coded(2)],
            bytes: coded(3),
        }
    }
}

fn odd(rank: usize) -> u32 {
    match factor(DType::U32, rank) {
        Scalar::Int(factor) => factor as u32,
        Scalar::Float(_) | Scalar::Device(_) => 1,
    }
}

impl Model {
    fn new(nranks: usize, rng: &mut Rng) -> Model {
        let mut random = || -> Vec<Vec<u32>> {
            let mut words = || (0..nranks * PART).map(|_| rng.next() as u32).collect();
            (0..nranks).map(|_| words()).collect()
        };
        Model {
            nranks,
            s: random(),
            t: random(),
            u: random(),
        }
    }

    fn weighted(&self, of: &[Vec<u32>], at: usize) -> u32 {
        let ranks = of.iter().enumerate();
        ranks.fold(0, |sum, (rank, values)| {
            sum.wrapping_add(values[at].wrapping_mul(odd(rank)))
        })
    }

    /// Computes on the host what [`queue`] does on the GPUs.
    fn step(&mut self) {
        let n = self.nranks;
        for rank in 0..n {
            for from in 0..n {
                let block = &self.s[from][rank * PART..(rank + 1) * PART];
                self.t[rank][from * PART..(from + 1) * PART].copy_from_slice(block);
            }
        }
        let sums: Vec<u32> = (0..PART).map(|at| self.weighted(&self.t, at)).collect();
        for t in &mut self.t {
            t[..PART].copy_from_slice(&sums);
        }
        for rank in 0..n {
            for at in 0..PART {
                self.s[rank][at] = self.weighted(&self.t, rank * PART + at);
            }
        }
        for rank in 0..n {
            for from in 0..n {
                let block = self.s[from][..PART].to_vec();
                self.u[rank][from * PART..(from + 1) * PART].copy_from_slice(&block);
            }
        }
        for rank in 0..n {
            let from = (rank + n - 1) % n;
            let block = self.t[from][PART..2 * PART].to_vec();
            self.s[rank][PART..2 * PART].copy_from_slice(&block);
        }
        let root = n - 1;
        let block = self.t[root][(n - 1) * PART..].to_vec();
        for u in &mut self.u {
            u[..PART].copy_from_slice(&block);
        }
    }
}

/// Queues a step of the chain on `stream`, or runs it on host memory if there is none.
fn queue(
    comm: &Communicator,
    arena: &Arena,
    offsets: &Offsets,
    stream: Option<&Stream>,
) -> Result<()> {
    let (rank, n) = (comm.rank(), comm.nranks());
    let (s, t, u) = (offsets.s, offsets.t, offsets.u);
    let (one, all) = (4 * PART, 4 * PART * n);
    let call = |collective| Call {
        op: ReduceOp::PreMulSum(factor(DType::U32, rank)),
        ..Call::new(collective, DType::U32, PART)
    };
    let on = |call: &Call, input, output| -> Result<()> {
        arena.call_at(comm, call, input, output, stream).map(drop)
    };
    on(&call(Collective::AllToAll), (s, all), (t, all))?;
    on(&call(Collective::AllReduce), (t, one), (t, one))?;
    on(&call(Collective::ReduceScatter), (t, all), (s, one))?;
    on(&call(Collective::AllGather), (s, one), (u, all))?;
    let mut group = Group::new();
    let mut send = call(Collective::SendRecv);
    (send.root, send.peer) = (rank, (rank + 1) % n);
    let mut recv = send;
    (recv.root, recv.peer) = ((rank + n - 1) % n, rank);
    let (sends, receives) = (((t + one, one), (0, 0)), ((0, 0), (s + one, one)));
    arena.add_at(&mut group, comm, &send, sends, stream)?;
    arena.add_at(&mut group, comm, &recv, receives, stream)?;
    group.run()?;
    let mut broadcast = call(Collective::Broadcast);
    broadcast.root = n - 1;
    on(&broadcast, (t + (n - 1) * one, one), (u, one))
}

fn bytes_of(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// Compares a rank's memory with the model.
fn compare(
    model: &Model,
    rank: usize,
    arena: &Arena,
    offsets: &Offsets,
) -> std::result::Result<(), Stop> {
    for (name, at, expected) in [
        ("s", offsets.s, &model.s[rank]),
        ("t", offsets.t, &model.t[rank]),
        ("u", offsets.u, &model.u[rank]),
    ] {
        let mut found = vec![0; 4 * expected.len()];
        arena.read(at, &mut found)?;
        let words = found.chunks_exact(4).enumerate();
        let wrong = words
            .map(|(i, word)| (i, u32::from_le_bytes([word[0], word[1], word[2], word[3]])))
            .find(|&(i, word)| word != expected[i]);
        if let Some((i, word)) = wrong {
            return Stop::wrong(format!(
                "rank {rank}: {name}[{i}] is {word:#x}, expected {:#x}",
                expected[i]
            ));
        }
    }
    Ok(())
}

/// Writes the model's state into a rank's memory.
fn write_state(model: &Model, rank: usize, arena: &Arena, offsets: &Offsets) -> Result<()> {
    arena.write(offsets.s, &bytes_of(&model.s[rank]))?;
    arena.write(offsets.t, &bytes_of(&model.t[rank]))?;
    arena.write(offsets.u, &bytes_of(&model.u[rank]))
}

/// Queues two compressed all_reduces from offset `from` to offset `to`.
fn compressed(
    comm: &Communicator,
    arena: &Arena,
    (from, to): (usize, usize),
    stream: &Stream,
) -> Result<()> {
    let half = CODED / 2 - 13;
    for (at, codec) in [(0, "linear8"), (half, "dynamic8:block=64")] {
        let mut call = Call::new(Collective::AllReduce, DType::F32, half);
        call.codec = codec.parse().ok();
        let place = |base: usize| (base + 4 * at, 4 * half);
        comm.call_on(&call, arena.buffers(place(from), place(to), stream)?)?;
    }
    Ok(())
}

/// Replays a graph with two branches, each on its own communicator. The second branch is
/// compressed.
pub fn replays(setup: &Setup, world: &World, total: usize) -> Verdict {
    let nranks = world.nranks();
    let offsets = Offsets::new(nranks);
    let arenas = world.arenas(offsets.bytes)?;
    world.run(|comm| {
        let arena = &arenas[comm.rank()];
        let stream = arena.stream()?;
        let reversed = comm.split(Some(0), -(comm.rank() as i64))?;
        let other = reversed.ok_or_else(|| Stop::Wrong("no communicator of a split".into()))?;
        let branch = Stream::new(stream.context())?;
        let (fork, join) = (Event::new(stream.context())?, Event::new(stream.context())?);
        let [from, to, eager] = offsets.coded;
        let graph = Graph::capture(stream, CaptureMode::ThreadLocal, |stream| {
            fork.record(stream)?;
            branch.wait_event(&fork)?;
            compressed(&other, arena, (from, to), &branch)?;
            queue(comm, arena, &offsets, Some(stream))?;
            join.record(&branch)?;
            stream.wait_event(&join)
        })?;
        // All graphs must exist before a kernel waits for a peer, because creating a graph may have
        // to wait for running kernels.
        comm.barrier()?;
        // All ranks build equal models, because they share the seed.
        let mut rng = Rng::new(setup.options.seed ^ 0x67);
        for batch in 0..total / BATCH {
            let mut model = Model::new(nranks, &mut rng);
            write_state(&model, comm.rank(), arena, &offsets)?;
            let data = cinch::testing::Data {
                pattern: cinch::testing::Pattern::HeavyTailed,
                dtype: DType::F32,
                seed: batch as u64,
            };
            arena.write(from, &data.vec(comm.rank(), CODED))?;
            arena.write(to, &vec![0; 4 * CODED])?;
            for _ in 0..BATCH {
                graph.launch(stream)?;
                model.step();
            }
            arena.wait(comm)?;
            let context = |stop: Stop| stop.context(format!("replay {}", (batch + 1) * BATCH));
            compare(&model, comm.rank(), arena, &offsets).map_err(context)?;
            arena.write(eager, &vec![0; 4 * CODED])?;
            compressed(&other, arena, (from, eager), stream)?;
            arena.wait(&other)?;
            let (mut replayed, mut direct) = (vec![0; 4 * CODED], vec![0; 4 * CODED]);
            arena.read(to, &mut replayed)?;
            arena.read(eager, &mut direct)?;
            let differ = replayed.iter().zip(&direct).position(|(a, b)| a != b);
            ensure(differ.is_none() && direct.iter().any(|&b| b != 0), || {
                format!("compressed: replay and call differ at byte {differ:?}, batch {batch}")
            })?;
        }
        // The barrier keeps ranks from freeing the graph's resources while a peer's kernel runs.
        // The free would wait for the kernel, and the kernel for this rank.
        comm.barrier()?;
        drop(graph);
        other.finalize()?;
        Ok(())
    })?;
    Ok(format!("{total} replays of 8 calls on 2 communicators"))
}

/// Runs the chain outside of graphs and changes the stream with every step.
pub fn streams(setup: &Setup, world: &World) -> Verdict {
    let nranks = world.nranks();
    let offsets = Offsets::new(nranks);
    let arenas = world.arenas(offsets.bytes)?;
    let batches = setup.options.either(20, 100);
    world.run(|comm| {
        let arena = &arenas[comm.rank()];
        let streams: Vec<Stream> = match comm.gpu() {
            Some(_) => [0, 0, -1]
                .map(|priority| arena.new_stream(priority))
                .into_iter()
                .collect::<Result<_>>()?,
            None => Vec::new(),
        };
        // All streams must exist before a kernel waits for a peer, because creating a stream may
        // have to wait for running kernels.
        comm.barrier()?;
        let mut rng = Rng::new(setup.options.seed ^ 0x57);
        for batch in 0..batches {
            let mut model = Model::new(nranks, &mut rng);
            write_state(&model, comm.rank(), arena, &offsets)?;
            for step in 0..BATCH {
                queue(comm, arena, &offsets, streams.get((step * 5 + batch) % 3))?;
                model.step();
            }
            for stream in &streams {
                stream.wait(PATIENCE)?;
            }
            arena.wait(comm)?;
            compare(&model, comm.rank(), arena, &offsets)
                .map_err(|stop| stop.context(format!("batch {batch}")))?;
        }
        Ok(())
    })?;
    Ok(format!("{} steps on 3 streams in turn", batches * BATCH))
}

/// Two graphs and direct calls of a rank, each on its own stream. Only the library orders the
/// streams.
struct Interleaved<'a> {
    comm: &'a Communicator,
    arena: &'a Arena,
    offsets: &'a Offsets,
    streams: [Stream; 3],
    graphs: [Graph; 2],
}

impl<'a> Interleaved<'a> {
    /// Number of steps of the chain in a launch of each graph, and in a direct call.
    const STEPS: [usize; 3] = [1, 2, 1];

    fn new(
        comm: &'a Communicator,
        arena: &'a Arena,
        offsets: &'a Offsets,
    ) -> Result<Interleaved<'a>> {
        let streams = [
            arena.new_stream(0)?,
            arena.new_stream(0)?,
            arena.new_stream(0)?,
        ];
        let graph_of = |turn: usize| {
            Graph::capture(&streams[turn], CaptureMode::ThreadLocal, |stream| {
                let mut steps = 0..Interleaved::STEPS[turn];
                steps.try_for_each(|_| queue(comm, arena, offsets, Some(stream)))
            })
        };
        let graphs = [graph_of(0)?, graph_of(1)?];
        Ok(Interleaved {
            comm,
            arena,
            offsets,
            streams,
            graphs,
        })
    }

    fn take(&self, turn: usize) -> Result<()> {
        let stream = &self.streams[turn];
        match self.graphs.get(turn) {
            Some(graph) => graph.launch(stream),
            None => queue(self.comm, self.arena, self.offsets, Some(stream)),
        }
    }

    fn compare(&self, model: &Model) -> std::result::Result<(), Stop> {
        for stream in &self.streams {
            stream.wait(PATIENCE)?;
        }
        self.arena.wait(self.comm)?;
        compare(model, self.comm.rank(), self.arena, self.offsets)
    }
}

/// Mixes replays and direct calls, with a thread per rank.
pub fn mixed(setup: &Setup, world: &World) -> Verdict {
    let offsets = Offsets::new(world.nranks());
    let arenas = world.arenas(offsets.bytes)?;
    let batches = setup.options.either(30, 200);
    world.run(|comm| {
        let ranks = [Interleaved::new(comm, &arenas[comm.rank()], &offsets)?];
        // All streams and graphs must exist before a kernel waits for a peer, because creating them
        // may have to wait for running kernels.
        comm.barrier()?;
        run_interleaved(setup, &ranks, batches)?;
        // The barrier keeps ranks from freeing the graphs' resources while a peer's kernel runs.
        // The free would wait for the kernel, and the kernel for this rank.
        comm.barrier()?;
        Ok(())
    })?;
    Ok(format!("{} replays and calls in turn", batches * BATCH))
}

/// Mixes replays and direct calls of all ranks in one thread.
pub fn mixed_by_one_thread(setup: &Setup, world: &World) -> Verdict {
    let offsets = Offsets::new(world.nranks());
    let arenas = world.arenas(offsets.bytes)?;
    let batches = setup.options.either(30, 200);
    let comms = world.communicators()?;
    let each = comms.iter().zip(&arenas);
    let ranks: Vec<Interleaved> = each
        .map(|(comm, arena)| Interleaved::new(comm, arena, &offsets))
        .collect::<Result<_>>()?;
    run_interleaved(setup, &ranks, batches)?;
    Ok(format!("{} replays and calls in turn", batches * BATCH))
}

/// Launches a random sequence of replays and direct calls, equal on all ranks. `ranks` are the
/// ranks of this thread.
fn run_interleaved(
    setup: &Setup,
    ranks: &[Interleaved<'_>],
    batches: usize,
) -> std::result::Result<(), Stop> {
    let mut rng = Rng::new(setup.options.seed ^ 0x77);
    for batch in 0..batches {
        let mut model = Model::new(ranks[0].comm.nranks(), &mut rng);
        for rank in ranks {
            write_state(&model, rank.comm.rank(), rank.arena, rank.offsets)?;
        }
        for _ in 0..BATCH {
            let turn = (rng.next() % 3) as usize;
            ranks.iter().try_for_each(|rank| rank.take(turn))?;
            (0..Interleaved::STEPS[turn]).for_each(|_| model.step());
        }
        for rank in ranks {
            let context = |stop: Stop| stop.context(format!("batch {batch}"));
            rank.compare(&model).map_err(context)?;
        }
    }
    Ok(())
}

/// Runs groups of two calls on two streams. Earlier work of either stream must precede both calls,
/// and later work of either stream must follow both.
pub fn groups(setup: &Setup, world: &World) -> Verdict {
    const BYTES: usize = 8 << 20;
    let nranks = world.nranks();
    let arenas = [world.arenas(BYTES)?, world.arenas(BYTES)?];
    let rounds = setup.options.either(50, 300);
    world.run(|comm| {
        let [x, y] = [&arenas[0][comm.rank()], &arenas[1][comm.rank()]];
        let one = x.stream()?;
        let two = &y.new_stream(0)?;
        // All streams must exist before a kernel waits for a peer, because creating a stream may
        // have to wait for running kernels.
        comm.barrier()?;
        let call = Call::new(Collective::AllReduce, DType::U8, BYTES);
        for round in 0..rounds {
            let value = (round % 100) as u8;
            // These fills keep the second stream busy before it writes the first call's input.
            for late in [101, 102, 103, 104, 105, value] {
                y.memory()?.fill(late.wrapping_add(1), two)?;
                x.memory()?.fill(late, two)?;
            }
            let mut group = Group::new();
            x.add_at(&mut group, comm, &call, ((0, BYTES), (0, BYTES)), Some(one))?;
            y.add_at(&mut group, comm, &call, ((0, BYTES), (0, BYTES)), Some(two))?;
            group.run()?;
            for (of, on, value) in [(y, one, value + 1), (x, two, value)] {
                let mut end = [0; 64];
                of.memory()?
                    .read(BYTES - end.len(), &mut end, on, PATIENCE)?;
                let sum = value.wrapping_mul(nranks as u8);
                ensure(end == [sum; 64], || {
                    format!("round {round}: {} where all have {value}", end[63])
                })?;
            }
            x.wait(comm)?;
            two.wait(PATIENCE)?;
        }
        Ok(())
    })?;
    Ok(format!("{rounds} groups on 2 streams"))
}

/// Runs several communicators of the same ranks at once. Each rank has a thread and a stream per
/// communicator.
pub fn communicators(setup: &Setup, world: &World) -> Verdict {
    const COMMS: usize = 3;
    let nranks = world.nranks();
    let worlds = vec![world.clone(); COMMS];
    let offsets = Offsets::new(nranks);
    let mut arenas = Vec::new();
    for world in &worlds {
        let own = world.gpus.iter();
        let own: Result<Vec<Arena>, _> = own
            .map(|gpu| Arena::with_one_stream(*gpu, offsets.bytes))
            .collect();
        arenas.push(own?);
    }
    let batches = setup.options.either(20, 100);
    // No rank may allocate or free memory while a kernel waits for a peer.
    let gate = Barrier::new(COMMS * nranks);
    let results: Vec<std::result::Result<Vec<()>, Stop>> = std::thread::scope(|scope| {
        let (gate, offsets) = (&gate, &offsets);
        let start = |(number, world): (usize, &'_ World)| {
            let world = world.clone();
            let arenas = &arenas[number];
            scope.spawn(move || {
                world.run(|comm| {
                    gate.wait();
                    let arena = &arenas[comm.rank()];
                    let mut rng = Rng::new(setup.options.seed ^ number as u64);
                    let mut work = || -> std::result::Result<(), Stop> {
                        for batch in 0..batches {
                            let mut model = Model::new(nranks, &mut rng);
                            write_state(&model, comm.rank(), arena, offsets)?;
                            for _ in 0..BATCH {
                                queue(comm, arena, offsets, Some(arena.stream()?))?;
                                model.step();
                            }
                            arena.wait(comm)?;
                            compare(&model, comm.rank(), arena, offsets).map_err(|stop| {
                                stop.context(format!("communicator {number}, batch {batch}"))
                            })?;
                        }
                        Ok(())
                    };
                    let worked = work();
                    if worked.is_err() {
                        comm.abort();
                    }
                    gate.wait();
                    worked
                })
            })
        };
        let threads: Vec<_> = worlds.iter().enumerate().map(start).collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, _>| {
            thread
                .join()
                .unwrap_or_else(|_| Stop::wrong("a thread panicked"))
        };
        threads.into_iter().map(join).collect()
    });
    for result in results {
        result?;
    }
    Ok(format!("{COMMS} at once, {} steps each", batches * BATCH))
}
