//! Calls that repeat an earlier call give its bits, and fail as it does.

use super::{Call, Communicator};
use crate::config::Config;
use crate::error::ErrorKind;
use crate::mem::UserBuffers;
use crate::testing::local_world;
use crate::types::{Collective, DType, ReduceOp, Scalar};

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

/// Runs a call with the data of `turn`. Returns the output, and whether the call repeated an earlier one.
fn run(comm: &Communicator, call: &Call, turn: usize) -> (Vec<u8>, bool) {
    let (rank, nranks) = (comm.rank(), comm.nranks());
    let is_root = call.root == rank;
    let bytes = |extent: crate::types::Extent| {
        extent.elements(call.count, nranks).unwrap() * call.dtype.size()
    };
    let source = bytes(call.collective.input_extent(is_root));
    let source = input(call, source, rank, turn);
    let mut output = vec![0xee; bytes(call.collective.output_extent(is_root))];
    if call.collective.is_message() && rank != call.root && rank != call.peer {
        return (output, true);
    }
    let buffers = UserBuffers::new(&source, &mut output);
    let repeats = comm.engine().unwrap().find_repeated(call, &buffers);
    comm.call(call, buffers).unwrap();
    (output, repeats.is_some())
}

#[test]
fn repeated_calls_have_the_bits_of_first_calls() {
    for nranks in [1, 2, 3, 5, 11] {
        for call in calls(nranks) {
            let config = Config::default();
            let repeated = local_world(nranks, &config, |comm| {
                assert!(!run(comm, &call, 0).1 || call.collective.is_message());
                run(comm, &call, 1)
            });
            let first = local_world(nranks, &config, |comm| run(comm, &call, 1).0);
            for (rank, ((output, repeats), first)) in repeated.iter().zip(&first).enumerate() {
                assert!(repeats, "{call:?} on rank {rank} of {nranks} was not kept");
                assert_eq!(output, first, "{call:?} on rank {rank} of {nranks}");
            }
        }
    }
}

#[test]
fn in_place_calls_repeat_out_of_place_calls() {
    let call = Call::new(Collective::AllReduce, DType::F32, COUNT);
    let sums = local_world(3, &Config::default(), |comm| {
        let (expected, _) = run(comm, &call, 1);
        let mut data = input(&call, COUNT * 4, comm.rank(), 1);
        let bytes = data.len();
        let buffers = UserBuffers::in_place(&mut data, 0, bytes).unwrap();
        let repeats = comm.engine().unwrap().find_repeated(&call, &buffers);
        comm.call(&call, buffers).unwrap();
        (data, expected, repeats)
    });
    for (data, expected, repeats) in sums {
        assert!(repeats.is_some());
        assert_eq!(data, expected);
    }
}

/// Buffers are checked in every call, whatever calls ran before.
#[test]
fn buffers_of_repeated_calls_are_checked() {
    let call = Call::new(Collective::AllReduce, DType::F32, COUNT);
    local_world(2, &Config::default(), |comm| {
        run(comm, &call, 0);
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
fn mismatch_of_a_repeated_and_a_new_call_names_both_ranks() {
    let call = Call::new(Collective::AllReduce, DType::F32, COUNT);
    let errors = local_world(2, &Config::default(), |comm| {
        run(comm, &call, 0);
        let other = Call {
            count: COUNT - comm.rank(),
            ..call
        };
        let source = vec![0; COUNT * 4];
        let mut output = vec![0; COUNT * 4];
        comm.call(&other, UserBuffers::new(&source, &mut output))
            .unwrap_err()
    });
    for error in errors {
        assert_eq!(error.kind(), ErrorKind::Mismatch);
        for part in ["rank 0", "rank 1", "of 37 f32", "of 36 f32"] {
            assert!(error.message().contains(part), "{error}");
        }
    }
}

/// A call that waits for a rank which has left ends with an error that names the rank.
#[test]
fn repeated_calls_name_the_rank_that_left() {
    let call = Call::new(Collective::AllReduce, DType::F32, COUNT);
    let errors = local_world(2, &Config::default(), |comm| {
        run(comm, &call, 0);
        if comm.rank() == 1 {
            comm.abort();
            return None;
        }
        let source = vec![0; COUNT * 4];
        let mut output = vec![0; COUNT * 4];
        let called = comm.call(&call, UserBuffers::new(&source, &mut output));
        Some(called.unwrap_err())
    });
    let error = errors[0].as_ref().unwrap();
    assert!(error.message().contains("rank 1"), "{error}");
}
