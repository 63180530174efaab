//! Tests invalid calls. Each must return an error with the expected kind and message, launch
//! nothing, and leave the communicator usable.

#![allow(unsafe_code)] // invalid buffers are made of raw addresses

use crate::arena::{Arena, PATIENCE, context};
use crate::case::{Case, GUARD, Values};
use crate::harness::{Check, Setup, Stop, Verdict, ensure};
use crate::world::{World, expect_error};
use cinch::comm::{Call, Group};
use cinch::gpu::{CaptureMode, Graph, PinnedMemory, Stream};
use cinch::mem::{DeviceBuffers, UserBuffers};
use cinch::testing::{Data, Pattern};
use cinch::types::{DeviceChoice, TransportKind};
use cinch::{Collective, Communicator, DType, ErrorKind, ReduceOp, Report, Result};

const COUNT: usize = 1000;
const BYTES: usize = 1 << 16;

pub fn checks() -> Vec<Check> {
    type Run = fn(&Setup) -> Verdict;
    let one: [(&str, Run); 7] = [
        ("refuse/misaligned", |setup| on_two(setup, misaligned)),
        ("refuse/host-pointer", |setup| on_two(setup, host_pointer)),
        ("refuse/host-buffers", |setup| on_two(setup, host_buffers)),
        ("refuse/sizes-and-roots", |setup| on_two(setup, impossible)),
        ("refuse/groups", |setup| on_two(setup, groups)),
        ("refuse/captures", |setup| on_two(setup, captures)),
        ("refuse/device-buffers-on-host", on_host),
    ];
    let mut checks: Vec<Check> = one
        .into_iter()
        .map(|(name, run)| Check::new(name, 1, run))
        .collect();
    checks.push(Check::new("refuse/stream-of-another-gpu", 2, |setup| {
        on_two(setup, foreign_stream)
    }));
    checks
}

/// A function that makes invalid calls on each of two ranks and returns their number.
type Body = fn(&Communicator, &Arena) -> std::result::Result<usize, Stop>;

/// Returns the input at the start of a rank's memory, which differs between ranks.
fn input_of(rank: usize) -> Vec<u8> {
    let data = Data {
        pattern: Pattern::Gaussian,
        dtype: DType::F32,
        seed: 8,
    };
    data.vec(rank, COUNT)
}

/// Runs `body` on two ranks, then checks that no memory changed and that a valid call works.
fn on_two(setup: &Setup, body: Body) -> Verdict {
    let world = World::new(setup, 2, 1);
    let arenas = world.arenas(BYTES)?;
    let case = Case {
        shifted: true,
        ..Case::new(
            Call::new(Collective::AllReduce, DType::F32, COUNT),
            Values::Of(Pattern::Small),
            7,
        )
    };
    let inputs = case.inputs(2);
    let counts = world.run(|comm| {
        let arena = &arenas[comm.rank()];
        let mut before = vec![GUARD; BYTES];
        before[..4 * COUNT].copy_from_slice(&input_of(comm.rank()));
        arena.write(0, &before)?;
        let count = body(comm, arena)?;
        if let Some(error) = comm.async_error() {
            return Stop::wrong(format!("a refusal failed the communicator: {error}"));
        }
        arena.stream()?.wait(PATIENCE)?;
        let mut after = vec![0; BYTES];
        arena.read(0, &mut after)?;
        ensure(after == before, || {
            "something was written in spite of a refusal".into()
        })?;
        let done = arena.run(&case, comm, &inputs[comm.rank()])?;
        Ok((count, done))
    })?;
    let (counts, done): (Vec<usize>, Vec<_>) = counts.into_iter().unzip();
    case.judge(&inputs, &done, 0.0).map_err(Stop::Wrong)?;
    Ok(format!("{} refusals", counts[0]))
}

fn refuses<T: std::fmt::Debug>(
    result: Result<T>,
    kind: ErrorKind,
    words: &[&str],
) -> std::result::Result<(), Stop> {
    match result {
        Err(error) => expect_error(&error, kind, words),
        Ok(done) => Stop::wrong(format!("not refused (expected {words:?}): {done:?}")),
    }
}

fn sum(dtype: DType, count: usize) -> Call {
    Call::new(Collective::AllReduce, dtype, count)
}

/// Makes a call on (offset, length) ranges of the arena.
fn call_at(
    comm: &Communicator,
    arena: &Arena,
    call: &Call,
    input: (usize, usize),
    output: (usize, usize),
) -> Result<Report> {
    comm.call_on(call, arena.buffers(input, output, arena.stream()?)?)
}

fn misaligned(comm: &Communicator, arena: &Arena) -> std::result::Result<usize, Stop> {
    let kind = ErrorKind::InvalidArgument;
    let mut count = 0;
    for dtype in DType::ALL {
        let (size, bytes) = (dtype.size(), dtype.size() * COUNT);
        for shift in (1..size).filter(|shift| [1, size / 2].contains(shift)) {
            let call = sum(dtype, COUNT);
            let (right, wrong) = ((16384, bytes), (shift, bytes));
            let words = ["aligned", dtype.name()];
            refuses(call_at(comm, arena, &call, wrong, right), kind, &words)?;
            refuses(call_at(comm, arena, &call, right, wrong), kind, &words)?;
            count += 2;
        }
    }
    Ok(count)
}

fn host_pointer(comm: &Communicator, arena: &Arena) -> std::result::Result<usize, Stop> {
    let kind = ErrorKind::InvalidArgument;
    let bytes = 4 * COUNT;
    let pageable = vec![0u64; bytes / 8];
    let context = comm.gpu().ok_or_else(|| Stop::Wrong("no GPU".into()))?;
    let pinned = PinnedMemory::new(context, bytes)?;
    let good = (arena.memory()?.address(), bytes);
    let mut count = 0;
    for (address, words) in [
        (pageable.as_ptr() as u64, ["host memory", "GPU"]),
        (pinned.host().as_ptr() as u64, ["host memory", "GPU"]),
        (16, ["host memory", "GPU"]),
    ] {
        for (input, output) in [((address, bytes), good), (good, (address, bytes))] {
            let stream = arena.stream()?.handle().addr();
            // SAFETY: the call checks both addresses first and refuses them, so no kernel uses
            // them.
            let buffers = unsafe { DeviceBuffers::new(input, output, stream) };
            refuses(comm.call_on(&sum(DType::F32, COUNT), buffers), kind, &words)?;
            count += 1;
        }
    }
    Ok(count)
}

fn host_buffers(comm: &Communicator, _: &Arena) -> std::result::Result<usize, Stop> {
    let (input, mut output) = (vec![1u8; 4 * COUNT], vec![0u8; 4 * COUNT]);
    let call = sum(DType::F32, COUNT);
    let words = ["host buffers", "CINCH_DEVICE"];
    let kind = ErrorKind::InvalidUsage;
    refuses(
        comm.call(&call, UserBuffers::new(&input, &mut output)),
        kind,
        &words,
    )?;
    let mut group = Group::new();
    let added = group.add(comm, &call, UserBuffers::new(&input, &mut output));
    refuses(added, kind, &words)?;
    Ok(2)
}

fn impossible(comm: &Communicator, arena: &Arena) -> std::result::Result<usize, Stop> {
    let kind = ErrorKind::InvalidArgument;
    let (input, output) = ((0, 4 * COUNT), (16384, 4 * COUNT));
    let call = sum(DType::F32, COUNT);
    refuses(
        call_at(comm, arena, &call, (0, 4 * COUNT - 4), output),
        kind,
        &["input", "3996", "4000"],
    )?;
    refuses(
        call_at(comm, arena, &call, input, (16384, 16)),
        kind,
        &["output", "16 bytes", "4000"],
    )?;
    refuses(
        call_at(comm, arena, &call, input, (400, 4 * COUNT)),
        kind,
        &["overlap"],
    )?;
    let mut rooted = Call::new(Collective::Broadcast, DType::F32, COUNT);
    rooted.root = 2;
    refuses(
        call_at(comm, arena, &rooted, input, output),
        kind,
        &["root 2", "communicator of 2"],
    )?;
    let mut coded = call;
    coded.codec = "linear8".parse().ok();
    coded.op = ReduceOp::Max;
    refuses(
        call_at(comm, arena, &coded, input, output),
        kind,
        &["linear8", "max"],
    )?;
    let mut kept = call;
    kept.codec = "linear8:tensor=4".parse().ok();
    refuses(
        call_at(comm, arena, &kept, input, output),
        kind,
        &["tensor=4", "tensor id"],
    )?;
    Ok(6)
}

fn groups(comm: &Communicator, arena: &Arena) -> std::result::Result<usize, Stop> {
    let context = comm.gpu().ok_or_else(|| Stop::Wrong("no GPU".into()))?;
    let other = Stream::new(context)?;
    let (rank, peer) = (comm.rank(), 1 - comm.rank());
    let message = |root, peer| Call {
        root,
        peer,
        ..Call::new(Collective::SendRecv, DType::F32, COUNT)
    };
    // A group may span two streams: cinch must accept it and deliver the message.
    let mut group = Group::new();
    let (input, output, none) = ((0, 4 * COUNT), (16384, 4 * COUNT), (0, 0));
    let sends = arena.buffers(input, none, arena.stream()?)?;
    let receives = arena.buffers(none, output, &other)?;
    group.add_on(comm, &message(rank, peer), sends)?;
    group.add_on(comm, &message(peer, rank), receives)?;
    group.run()?;
    other.wait(comm.config().timeout)?;
    arena.stream()?.wait(comm.config().timeout)?;
    let mut arrived = vec![0; output.1];
    arena.read(output.0, &mut arrived)?;
    ensure(arrived == input_of(peer), || {
        "another message arrived than the one that was sent".into()
    })?;
    arena.write(output.0, &[GUARD; 4 * COUNT])?;

    let mut group = Group::new();
    let sent = arena.buffers(input, none, arena.stream()?)?;
    group.add_on(comm, &message(rank, rank), sent)?;
    refuses(group.run(), ErrorKind::InvalidUsage, &["itself"])?;
    let sent = arena.buffers(input, none, arena.stream()?)?;
    let alone = comm.call_on(&message(rank, rank), sent);
    refuses(alone, ErrorKind::InvalidUsage, &["itself", "group"])?;
    Ok(2)
}

fn captures(comm: &Communicator, arena: &Arena) -> std::result::Result<usize, Stop> {
    let context = comm.gpu().ok_or_else(|| Stop::Wrong("no GPU".into()))?;
    let (captured, free) = (Stream::new(context)?, Stream::new(context)?);
    let call = sum(DType::F32, COUNT);
    let (input, output) = ((0, 4 * COUNT), (16384, 4 * COUNT));
    // Calls inside and outside of a capture cannot be ordered, so a group may not mix them.
    let graph = Graph::capture(&captured, CaptureMode::ThreadLocal, |stream| {
        let mut group = Group::new();
        group.add_on(comm, &call, arena.buffers(input, output, stream)?)?;
        group.add_on(comm, &call, arena.buffers(input, output, &free)?)?;
        let refused = group.run();
        refuses(refused, ErrorKind::InvalidUsage, &["same capture"])
            .map_err(|stop| cinch::Error::internal(format!("{stop:?}")))?;
        // A refused call must not invalidate the capture.
        let wrong = arena.buffers((2, 4 * COUNT), output, stream)?;
        refuses(
            comm.call_on(&call, wrong),
            ErrorKind::InvalidArgument,
            &["aligned"],
        )
        .map_err(|stop| cinch::Error::internal(format!("{stop:?}")))
    })?;
    drop(graph);
    Ok(2)
}

fn foreign_stream(comm: &Communicator, arena: &Arena) -> std::result::Result<usize, Stop> {
    let foreign = Stream::new(&context(1)?)?;
    let (input, output) = ((0, 4 * COUNT), (16384, 4 * COUNT));
    let call = sum(DType::F32, COUNT);
    let kind = ErrorKind::InvalidUsage;
    let buffers = arena.buffers(input, output, &foreign)?;
    refuses(comm.call_on(&call, buffers), kind, &["stream", "GPU 0"])?;
    let there = Arena::new(Some(1), BYTES)?;
    let buffers = there.buffers(input, output, arena.stream()?)?;
    let kind = ErrorKind::InvalidArgument;
    refuses(comm.call_on(&call, buffers), kind, &["memory of GPU 1"])?;
    Ok(2)
}

/// Device buffers must be refused by a communicator on host memory, alone and in a group.
fn on_host(setup: &Setup) -> Verdict {
    let world = World::new(setup, 2, 1);
    let arenas = world.arenas(BYTES)?;
    let mut host_world = world.clone();
    host_world.config.device = DeviceChoice::Host;
    host_world.config.transport = Some(TransportKind::Loopback);
    host_world.gpus = vec![None; 2];
    let call = sum(DType::F32, COUNT);
    let counts = host_world.run(|comm| {
        let arena = &arenas[comm.rank()];
        let (input, output) = ((0, 4 * COUNT), (16384, 4 * COUNT));
        let words = ["device buffers", "host memory"];
        let kind = ErrorKind::InvalidUsage;
        refuses(call_at(comm, arena, &call, input, output), kind, &words)?;
        let mut group = Group::new();
        let buffers = arena.buffers(input, output, arena.stream()?)?;
        refuses(group.add_on(comm, &call, buffers), kind, &words)?;
        let (ones, mut sums) = (vec![1f32; COUNT], vec![0f32; COUNT]);
        comm.all_reduce(&ones, &mut sums, ReduceOp::Sum)?;
        ensure(sums.iter().all(|&x| x == 2.0), || {
            "a wrong sum on the host".into()
        })?;
        Ok(2)
    })?;
    Ok(format!("{} refusals", counts[0]))
}
