//! Cached calls give the bits of other calls, and fail as they do.

use super::{Call, Communicator, Group};
use crate::config::Config;
use crate::error::ErrorKind;
use crate::mem::{UserBuffers, bytes_of, bytes_of_mut};
use crate::recorder::CallState;
use crate::testing::local_world;
use crate::types::{Collective, DType, Extent, ReduceOp, SEQUENCE_WORD, Scalar};
use std::sync::Barrier;
use std::time::Duration;

/// Number of elements of a call, or of a rank's block. It is no multiple of a vector.
const COUNT: usize = 37;

/// Returns the bytes of a rank's input. They are small numbers of any type, so that averages are exact too.
fn input(call: &Call, bytes: usize, rank: usize, turn: usize) -> Vec<u8> {
    let value = |i: usize| ((i * 31 + rank * 17 + turn * 7) % 23) as u8;
    match call.dtype {
        DType::F32 => (0..bytes / 4)
            .flat_map(|i| f32::from(value(i)).to_le_bytes())
            .collect(),
        // The upper half of an f32 is a bf16.
        DType::BF16 => (0..bytes / 2)
            .flat_map(|i| ((f32::from(value(i)).to_bits() >> 16) as u16).to_le_bytes())
            .collect(),
        _ => (0..bytes).map(value).collect(),
    }
}

fn calls(nranks: usize) -> Vec<Call> {
    let mut calls = Vec::new();
    for collective in Collective::ALL {
        for dtype in [DType::F32, DType::BF16, DType::U8] {
            let factor = match dtype.is_float() {
                true => Scalar::Float(0.5),
                false => Scalar::Int(3),
            };
            let mut ops = vec![ReduceOp::Sum];
            if collective.reduces() {
                ops.extend([ReduceOp::Max, ReduceOp::PreMulSum(factor)]);
                ops.extend(dtype.is_float().then_some(ReduceOp::Avg));
            }
            calls.extend(ops.into_iter().map(|op| Call {
                op,
                root: nranks - 1,
                ..Call::new(collective, dtype, COUNT)
            }));
        }
    }
    if nranks == 1 {
        calls.retain(|call| !call.collective.is_message());
    }
    calls
}

/// Runs a call with the data of `turn`. Returns the output, and whether the call was cached.
fn run(comm: &Communicator, call: &Call, turn: usize) -> (Vec<u8>, bool) {
    let (rank, nranks) = (comm.rank(), comm.nranks());
    let is_root = call.root == rank;
    let bytes = |extent: Extent| extent.elements(call.count, nranks).unwrap() * call.dtype.size();
    let source = bytes(call.collective.input_extent(is_root));
    let source = input(call, source, rank, turn);
    let mut output = vec![0xee; bytes(call.collective.output_extent(is_root))];
    if call.collective.is_message() && rank != call.root && rank != call.peer {
        return (output, true);
    }
    let buffers = UserBuffers::new(&source, &mut output);
    let repeats = comm.engine().unwrap().find_cached(call, &buffers);
    comm.call(call, buffers).unwrap();
    (output, repeats.is_some())
}

#[test]
fn cached_calls_have_the_bits_of_first_calls() {
    for nranks in [1, 2, 3, 5, 11] {
        for call in calls(nranks) {
            let config = Config::default();
            let repeated = local_world(nranks, &config, |comm| {
                let is_idle =
                    call.collective.is_message() && ![call.root, call.peer].contains(&comm.rank());
                for turn in [0, 2] {
                    assert!(is_idle || !run(comm, &call, turn).1);
                }
                run(comm, &call, 1)
            });
            let first = local_world(nranks, &config, |comm| run(comm, &call, 1).0);
            for (rank, ((output, repeats), first)) in repeated.iter().zip(&first).enumerate() {
                assert!(
                    repeats,
                    "{call:?} on rank {rank} of {nranks} was not cached"
                );
                assert_eq!(output, first, "{call:?} on rank {rank} of {nranks}");
            }
        }
    }
}

/// Runs a call twice, after which it is cached.
fn cache(comm: &Communicator, call: &Call) {
    for turn in [0, 2] {
        run(comm, call, turn);
    }
}

/// Runs a cached call with other data, without buffers of its own.
fn sum(comm: &Communicator, call: &Call) -> crate::Result<super::Report> {
    let source = vec![0; COUNT * 4];
    let mut output = vec![0; COUNT * 4];
    comm.call(call, UserBuffers::new(&source, &mut output))
}

#[test]
fn in_place_calls_are_cached() {
    const RANKS: usize = 3;
    for collective in [
        Collective::AllReduce,
        Collective::AllGather,
        Collective::ReduceScatter,
    ] {
        let call = Call::new(collective, DType::F32, COUNT);
        let found = local_world(RANKS, &Config::default(), |comm| {
            let rank = comm.rank();
            cache(comm, &call);
            let (expected, _) = run(comm, &call, 1);
            let block = COUNT * 4;
            let (from, to, bytes) = match collective {
                Collective::AllReduce => (0..block, 0..block, block),
                Collective::AllGather => (
                    rank * block..(rank + 1) * block,
                    0..RANKS * block,
                    RANKS * block,
                ),
                _ => (
                    0..RANKS * block,
                    rank * block..(rank + 1) * block,
                    RANKS * block,
                ),
            };
            let mut data = vec![0xee; bytes];
            data[from.clone()].copy_from_slice(&input(&call, from.len(), rank, 1));
            let buffers = UserBuffers::overlapping(&mut data, from.clone(), to.clone()).unwrap();
            let cached = comm.engine().unwrap().find_cached(&call, &buffers);
            comm.call(&call, buffers).unwrap();
            // A place that in-place calls do not have is not admitted.
            if rank > 0 && collective != Collective::AllReduce {
                let moved =
                    UserBuffers::overlapping(&mut data, 0..from.len(), 0..to.len()).unwrap();
                assert!(comm.engine().unwrap().find_cached(&call, &moved).is_none());
            }
            (data[to].to_vec(), expected, cached)
        });
        for (data, expected, cached) in found {
            assert!(cached.is_some(), "{collective}");
            assert_eq!(data, expected, "{collective}");
        }
    }
}

/// Buffers are checked in every call, whatever calls ran before.
#[test]
fn buffers_of_cached_calls_are_checked() {
    let call = Call::new(Collective::AllReduce, DType::F32, COUNT);
    local_world(2, &Config::default(), |comm| {
        cache(comm, &call);
        let (source, mut output) = (vec![0; COUNT * 4], vec![0; COUNT * 4 - 1]);
        let error = comm.call(&call, UserBuffers::new(&source, &mut output));
        let error = error.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(
            error.message().contains("has 147 bytes, but 148"),
            "{error}"
        );
        let mut both = vec![0; COUNT * 4 + 4];
        let (from, to) = (0..COUNT * 4, 4..COUNT * 4 + 4);
        let overlapping = UserBuffers::overlapping(&mut both, from, to).unwrap();
        let error = comm.call(&call, overlapping).unwrap_err();
        assert!(error.message().contains("overlap"), "{error}");
        // The communicator stays usable, and other ranks did not notice.
        assert!(run(comm, &call, 1).1);
    });
}

#[test]
fn changes_of_plans_empty_the_cache() {
    let call = Call::new(Collective::AllReduce, DType::F32, COUNT);
    local_world(2, &Config::default(), |comm| {
        cache(comm, &call);
        assert!(run(comm, &call, 1).1);
        let mut engine = comm.engine().unwrap();
        let limits = engine.limits().clone();
        engine.copy_limits(limits);
        drop(engine);
        assert!(!run(comm, &call, 1).1);
    });
}

/// Cached and other calls, alone and in groups, have one sequence of numbers, and all are recorded.
#[test]
fn cached_calls_are_numbered_and_recorded_like_others() {
    let call = Call::new(Collective::AllReduce, DType::F32, COUNT);
    let calls = local_world(2, &Config::default(), |comm| {
        cache(comm, &call);
        assert!(run(comm, &call, 1).1);
        comm.barrier().unwrap();
        let (source, mut output) = (vec![0; COUNT * 4], vec![0; COUNT * 4]);
        let mut group = Group::new();
        let buffers = UserBuffers::new(&source, &mut output);
        group.add(comm, &call, buffers).unwrap();
        group.run().unwrap();
        assert!(run(comm, &call, 1).1);
        let records = comm.recorder.records();
        let numbers: Vec<u64> = records
            .iter()
            .map(|call| call.words[SEQUENCE_WORD])
            .collect();
        assert!(records.iter().all(|call| call.state == CallState::Done));
        (numbers, comm.codec_stats().exact_calls.iter().sum::<u64>())
    });
    for (numbers, counted) in calls {
        assert_eq!(numbers, [0, 1, 2, 3, 4, 5]);
        assert_eq!(counted, 6);
    }
}

#[test]
fn mismatch_of_a_cached_and_a_new_call_names_both_ranks() {
    let call = Call::new(Collective::AllReduce, DType::F32, COUNT);
    let errors = local_world(2, &Config::default(), |comm| {
        cache(comm, &call);
        let count = COUNT - comm.rank();
        sum(comm, &Call { count, ..call }).unwrap_err()
    });
    for error in errors {
        assert_eq!(error.kind(), ErrorKind::Mismatch);
        for part in ["rank 0", "rank 1", "of 37 f32", "of 36 f32"] {
            assert!(error.message().contains(part), "{error}");
        }
    }
}

#[test]
fn cached_calls_name_the_rank_that_left() {
    let call = Call::new(Collective::AllReduce, DType::F32, COUNT);
    let errors = local_world(2, &Config::default(), |comm| {
        cache(comm, &call);
        // The other rank drops its communicator.
        (comm.rank() == 0).then(|| sum(comm, &call).unwrap_err())
    });
    let error = errors[0].as_ref().unwrap();
    assert_eq!(error.kind(), ErrorKind::Remote);
    for part in ["rank 1", "left the communicator", "chunk 0"] {
        assert!(error.message().contains(part), "{error}");
    }
}

#[test]
fn cached_calls_time_out() {
    let call = Call::new(Collective::AllReduce, DType::F32, COUNT);
    let config = Config {
        timeout: Duration::from_millis(300),
        ..Config::default()
    };
    let gate = Barrier::new(2);
    let errors = local_world(2, &config, |comm| {
        cache(comm, &call);
        let found = (comm.rank() == 0).then(|| sum(comm, &call).unwrap_err());
        gate.wait();
        found
    });
    let error = errors[0].as_ref().unwrap();
    assert_eq!(error.kind(), ErrorKind::Timeout);
    assert!(error.message().contains("rank 1"), "{error}");
}

/// Returns elements that differ between ranks, turns and messages.
fn numbers(rank: usize, turn: usize, message: usize) -> Vec<f32> {
    let first = (rank * 10_000 + turn * 100 + message) as f32;
    (0..COUNT).map(|i| first + i as f32 / 64.0).collect()
}

/// Makes a group in which each rank sends `messages` to the next rank, and receives as many from the one before.
/// Returns whether the messages were cached.
fn pass_on(comm: &Communicator, turn: usize, messages: usize) -> bool {
    let (rank, nranks) = (comm.rank(), comm.nranks());
    let (next, before) = ((rank + 1) % nranks, (rank + nranks - 1) % nranks);
    let message = |root, peer| Call {
        root,
        peer,
        ..Call::new(Collective::SendRecv, DType::F32, COUNT)
    };
    let sent: Vec<Vec<f32>> = (0..messages).map(|it| numbers(rank, turn, it)).collect();
    let mut received = vec![vec![0f32; COUNT]; messages];
    let mut group = Group::new();
    let mut cached = true;
    for (from, to) in sent.iter().zip(&mut received) {
        let (send, recv) = (message(rank, next), message(before, rank));
        let input = UserBuffers::new(bytes_of(from), &mut []);
        let output = UserBuffers::new(&[], bytes_of_mut(to));
        let engine = comm.engine().unwrap();
        cached &= engine.find_cached(&send, &input).is_some();
        cached &= engine.find_cached(&recv, &output).is_some();
        drop(engine);
        group.add(comm, &recv, output).unwrap();
        group.add(comm, &send, input).unwrap();
    }
    let reports = group.run().unwrap();
    let bytes = (COUNT * 4) as u64;
    let sent: Vec<u64> = reports.iter().map(|report| report.wire_bytes).collect();
    assert_eq!(sent, [0, bytes].repeat(messages));
    for (message, found) in received.iter().enumerate() {
        assert_eq!(
            *found,
            numbers(before, turn, message),
            "rank {rank} turn {turn}"
        );
    }
    cached
}

#[test]
fn groups_of_repeated_messages_have_the_bits_of_first_ones() {
    for nranks in [2, 3, 5] {
        local_world(nranks, &Config::default(), |comm| {
            for turn in 0..100 {
                assert_eq!(pass_on(comm, turn, 1), turn >= 2, "turn {turn}");
            }
            // More messages of a pair than a connection has slots: a send waits for a receive of the same group.
            for turn in 0..20 {
                pass_on(comm, turn, 3 * comm.config().slots);
            }
        });
    }
}

#[test]
fn repeated_sends_wait_for_a_slow_receiver() {
    for grouped in [false, true] {
        local_world(2, &Config::default(), |comm| {
            let call = Call {
                peer: 1,
                ..Call::new(Collective::SendRecv, DType::F32, COUNT)
            };
            for turn in 0..40 {
                let mut values = numbers(0, turn, 0);
                let buffers = if comm.rank() == 0 {
                    UserBuffers::new(bytes_of(&values), &mut [])
                } else {
                    if turn % 10 == 9 {
                        std::thread::sleep(Duration::from_millis(20));
                    }
                    values.fill(0.0);
                    UserBuffers::new(&[], bytes_of_mut(&mut values))
                };
                if grouped {
                    let mut group = Group::new();
                    group.add(comm, &call, buffers).unwrap();
                    group.run().unwrap();
                } else {
                    comm.call(&call, buffers).unwrap();
                }
                assert_eq!(values, numbers(0, turn, 0));
            }
        });
    }
}

/// Makes a group on rank 0 of messages from ranks 1 and 2, which send outside groups.
fn gather(comm: &Communicator, turn: usize) -> crate::Result<()> {
    let message = |root| Call {
        root,
        peer: 0,
        ..Call::new(Collective::SendRecv, DType::F32, COUNT)
    };
    let rank = comm.rank();
    let mut values = [numbers(rank, turn, 0), numbers(rank, turn, 0)];
    if rank > 0 {
        let buffers = UserBuffers::new(bytes_of(&values[0]), &mut []);
        return comm.call(&message(rank), buffers).map(|_| ());
    }
    let mut group = Group::new();
    for (index, to) in values.iter_mut().enumerate() {
        let buffers = UserBuffers::new(&[], bytes_of_mut(to));
        group.add(comm, &message(index + 1), buffers)?;
    }
    group.run()?;
    assert_eq!(values, [numbers(1, turn, 0), numbers(2, turn, 0)]);
    Ok(())
}

#[test]
fn groups_of_repeated_messages_name_the_rank_that_left() {
    let gate = Barrier::new(2);
    let errors = local_world(3, &Config::default(), |comm| {
        for turn in 0..4 {
            gather(comm, turn).unwrap();
        }
        // Rank 2 drops its communicator. Rank 1, whose message comes first in the group, is only late.
        let error = (comm.rank() == 0).then(|| gather(comm, 4).unwrap_err());
        if comm.rank() < 2 {
            gate.wait();
        }
        error
    });
    let error = errors[0].as_ref().unwrap();
    assert_eq!(error.kind(), ErrorKind::Remote);
    assert!(error.message().contains("rank 2"), "{error}");
}

#[test]
fn groups_of_repeated_messages_are_counted_and_recorded_once() {
    let numbers = local_world(3, &Config::default(), |comm| {
        for turn in 0..50 {
            gather(comm, turn).unwrap();
        }
        let recorded = comm.recorder.records();
        assert!(recorded.iter().all(|it| it.state == CallState::Done));
        let counted = comm.codec_stats().exact_calls.iter().sum::<u64>();
        (comm.recorder.count(), counted)
    });
    assert_eq!(numbers, [(100, 100), (50, 50), (50, 50)]);
}

#[test]
fn mismatch_of_repeated_messages_of_a_group_names_both_counts() {
    let errors = local_world(2, &Config::default(), |comm| {
        let mut found = None;
        for turn in 0..5 {
            // Rank 1 sends an element less in the last turn.
            let count = COUNT - usize::from(turn == 4 && comm.rank() == 1);
            let call = Call {
                root: 1,
                ..Call::new(Collective::SendRecv, DType::F32, count)
            };
            let mut values = numbers(1, turn, 0);
            let buffers = match comm.rank() {
                0 => UserBuffers::new(&[], bytes_of_mut(&mut values)),
                _ => UserBuffers::new(bytes_of(&values[..count]), &mut []),
            };
            let mut group = Group::new();
            group.add(comm, &call, buffers).unwrap();
            found = group.run().err();
        }
        found
    });
    let error = errors[0].as_ref().unwrap();
    assert_eq!(error.kind(), ErrorKind::Mismatch);
    for part in ["rank 0", "rank 1", "of 37 f32", "of 36 f32"] {
        assert!(error.message().contains(part), "{error}");
    }
}
