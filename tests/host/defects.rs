//! Regression tests of fixed defects in groups, empty buffers, kept scales, and the reports of
//! failures to other ranks.

#![allow(unsafe_code)]

use crate::support::{config, world};
use cinch::comm::{Call, Group};
use cinch::mem::{UserBuffers, bytes_of, bytes_of_mut};
use cinch::types::TransportKind;
use cinch::{Algorithm, CodecSetting, Collective, DType, ErrorKind, ReduceOp};
use std::time::{Duration, Instant};

fn codec(text: &str) -> Option<CodecSetting> {
    Some(text.parse().unwrap())
}

#[test]
fn messages_of_one_tensor_id_run_in_one_group() {
    world(2, &config(TransportKind::Loopback), |comm| {
        let (me, other) = (comm.rank(), 1 - comm.rank());
        let counts = [300_000, 10];
        let input = vec![1.0f32; counts[me]];
        let mut output = vec![0.0f32; counts[other]];
        let mut send = Call::new(Collective::SendRecv, DType::F32, counts[me]);
        (send.root, send.peer, send.tensor) = (me, other, Some(7));
        send.codec = codec("linear8:tensor=50");
        let recv = Call {
            count: counts[other],
            root: other,
            peer: me,
            ..send
        };
        for _ in 0..3 {
            let mut group = Group::new();
            group
                .add(&comm, &send, UserBuffers::new(bytes_of(&input), &mut []))
                .unwrap();
            let into = UserBuffers::new(&[], bytes_of_mut(&mut output));
            group.add(&comm, &recv, into).unwrap();
            group.run().unwrap();
        }
        assert!(output.iter().all(|&x| x == 1.0));
    });
}

#[test]
fn kept_scales_belong_to_one_kind_of_call() {
    world(4, &config(TransportKind::Loopback), |comm| {
        let input = vec![1.0f32; 1000];
        let mut output = vec![0.0f32; 1000];
        for (op, expected) in [
            (ReduceOp::Avg, 1.0),
            (ReduceOp::Sum, 4.0),
            (ReduceOp::Avg, 1.0),
            (ReduceOp::PreMulSum(cinch::types::Scalar::Float(8.0)), 32.0),
            (ReduceOp::PreMulSum(cinch::types::Scalar::Float(0.5)), 2.0),
        ] {
            let mut call = Call::new(Collective::AllReduce, DType::F32, 1000);
            (call.op, call.tensor) = (op, Some(3));
            call.codec = codec("linear8:tensor=50");
            call.algorithm = Some(Algorithm::Direct);
            let buffers = UserBuffers::new(bytes_of(&input), bytes_of_mut(&mut output));
            let report = comm.call(&call, buffers).unwrap();
            assert_eq!(report.input.unwrap().saturated, 0, "{op}");
            for &x in &output {
                assert!(
                    (x - expected).abs() <= 1e-6 * expected,
                    "{op}: {x} for {expected}"
                );
            }
        }
    });
}

#[test]
fn kept_scales_saturate_until_they_are_refreshed_and_reports_count_it() {
    world(2, &config(TransportKind::Loopback), |comm| {
        let mut call = Call::new(Collective::AllReduce, DType::F32, 1000);
        (call.codec, call.tensor) = (codec("dynamic8:tensor=3"), Some(1));
        call.algorithm = Some(Algorithm::Ring);
        let mut seen = Vec::new();
        for size in [1.0f32, 2.0, 2.0, 2.0] {
            let input = vec![size; 1000];
            let mut output = vec![0.0f32; 1000];
            let buffers = UserBuffers::new(bytes_of(&input), bytes_of_mut(&mut output));
            let report = comm.call(&call, buffers).unwrap();
            seen.push((output[7], report.input.unwrap().saturated > 0));
        }
        assert_eq!(seen[0], (2.0, false));
        assert!(seen[1].1 && seen[2].1 && seen[1].0 < 4.0, "{seen:?}");
        assert_eq!(seen[3], (4.0, false));
    });
}

#[test]
fn empty_buffers_may_be_null() {
    for nranks in 1..=3 {
        world(nranks, &config(TransportKind::Loopback), |comm| {
            for collective in &Collective::OF_ALL_RANKS {
                let call = Call::new(*collective, DType::F32, 0);
                // SAFETY: both buffers are empty, so the call reads and writes nothing at the null
                // pointers.
                let buffers =
                    unsafe { UserBuffers::from_raw(std::ptr::null(), 0, std::ptr::null_mut(), 0) };
                comm.call(&call, buffers).unwrap();
            }
        });
    }
}

#[test]
fn group_that_makes_progress_does_not_time_out() {
    let mut config = config(TransportKind::Loopback);
    config.timeout = Duration::from_secs(1);
    world(2, &config, |first| {
        let second = first.split(Some(0), 0).unwrap().unwrap();
        let mut data = [1.0f32; 4];
        if first.rank() == 0 {
            // The all_reduce on `first` ends long before the messages on `second` arrive.
            let mut buffers = vec![[0u8; 16]; 5];
            let bytes = size_of_val(&data);
            let mut group = Group::new();
            let call = Call::new(Collective::AllReduce, DType::F32, 4);
            let own = UserBuffers::in_place(bytes_of_mut(&mut data), 0, bytes).unwrap();
            group.add(&first, &call, own).unwrap();
            for buffer in &mut buffers {
                let mut recv = Call::new(Collective::SendRecv, DType::U8, 16);
                (recv.root, recv.peer) = (1, 0);
                group
                    .add(&second, &recv, UserBuffers::new(&[], buffer))
                    .unwrap();
            }
            group.run().unwrap();
        } else {
            first.all_reduce_in_place(&mut data, ReduceOp::Sum).unwrap();
            for _ in 0..5 {
                std::thread::sleep(Duration::from_millis(400));
                second.send(&[1u8; 16], 0).unwrap();
            }
        }
        assert_eq!(data, [2.0; 4]);
    });
}

#[test]
fn a_broadcast_needs_an_output_on_its_root() {
    world(2, &config(TransportKind::Loopback), |comm| {
        let call = Call::new(Collective::Broadcast, DType::F32, 100);
        let data = vec![1.0f32; 100];
        let error = comm
            .call(&call, UserBuffers::new(bytes_of(&data), &mut []))
            .unwrap_err();
        if comm.rank() == 0 {
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        }
        // The refused call sent nothing, so the communicator still works.
        comm.barrier().unwrap();
    });
}

#[test]
fn saturated_elements_are_counted_once_for_all_peers() {
    for nranks in [4, 9, 10, 18] {
        world(nranks, &config(TransportKind::Loopback), |comm| {
            let input = vec![1e6f32; 100];
            let mut output = vec![0.0f32; 100 * nranks];
            for algorithm in [Algorithm::Direct, Algorithm::Ring] {
                let mut call = Call::new(Collective::AllGather, DType::F32, 100);
                (call.codec, call.algorithm) = (codec("static8"), Some(algorithm));
                let buffers = UserBuffers::new(bytes_of(&input), bytes_of_mut(&mut output));
                let report = comm.call(&call, buffers).unwrap();
                assert_eq!(report.input.unwrap().saturated, 100, "{nranks} {algorithm}");
            }
        });
    }
}

#[test]
fn split_communicator_reports_that_its_parent_failed() {
    let mut config = config(TransportKind::Shm);
    config.timeout = Duration::from_secs(20);
    world(3, &config, |comm| {
        let rank = comm.rank();
        let child = comm.split((rank < 2).then_some(0), 0).unwrap();
        let mut data = [1.0f32; 4];
        match rank {
            0 => {
                std::thread::sleep(Duration::from_millis(900));
                let child = child.unwrap();
                assert!(child.all_reduce_in_place(&mut data, ReduceOp::Sum).is_err());
                std::thread::sleep(Duration::from_secs(1));
            }
            1 => {
                // Without the parent communicator, rank 1 can learn of the failure only from the
                // child communicator.
                drop(comm);
                let start = Instant::now();
                let error = child
                    .unwrap()
                    .all_reduce_in_place(&mut data, ReduceOp::Sum)
                    .unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Aborted, "{error}");
                assert!(start.elapsed() < Duration::from_secs(10));
            }
            _ => {
                std::thread::sleep(Duration::from_millis(300));
                comm.abort();
            }
        }
    });
}

#[test]
fn send_without_receive_times_out_and_names_the_peer() {
    let mut config = config(TransportKind::Tcp);
    (config.timeout, config.slots, config.slot_bytes) = (Duration::from_secs(1), 64, 1 << 20);
    (config.channels, config.tcp_sockets, config.buffer_bytes) = (1, 1, 2 << 30);
    world(2, &config, |comm| {
        if comm.rank() == 0 {
            let error = comm.send(&vec![1u8; 60 << 20], 1).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Timeout);
            assert!(error.message().contains("for rank 1 (host"), "{error}");
        } else {
            std::thread::sleep(Duration::from_secs(2));
        }
    });
}

#[test]
fn failed_split_fails_on_all_ranks() {
    let mut config = config(TransportKind::Loopback);
    config.timeout = Duration::from_secs(1);
    world(3, &config, |comm| {
        if comm.rank() == 2 {
            std::thread::sleep(Duration::from_millis(1500));
        }
        assert!(comm.split(Some(0), 0).is_err());
        assert!(comm.async_error().is_some());
    });
}

#[test]
fn lossy_reductions_do_not_choose_a_ring() {
    for (transport, nranks) in [(TransportKind::Tcp, 8), (TransportKind::Loopback, 12)] {
        world(nranks, &config(transport), |comm| {
            for collective in [
                Collective::AllReduce,
                Collective::Reduce,
                Collective::ReduceScatter,
            ] {
                for count in [1000, 16_000_000] {
                    let mut call = Call::new(collective, DType::F32, count);
                    call.codec = codec("linear8");
                    let text = comm.explain(&call).unwrap();
                    assert!(!text.contains("ring"), "{text}");
                    call.algorithm = Some(Algorithm::Ring);
                    assert!(comm.explain(&call).unwrap().contains("ring"));
                }
            }
        });
    }
}

/// The limit on tensors with residuals must count the tensors that a group adds, not only those
/// that had residuals before.
#[test]
fn group_above_the_residual_limit_is_refused() {
    const MOST: usize = 65_536;
    world(2, &config(TransportKind::Loopback), |comm| {
        let input = [1.0f32];
        let mut outputs = vec![0.0f32; MOST + 1];
        let mut call = Call::new(Collective::AllReduce, DType::F32, 1);
        call.codec = codec("linear8");
        let mut group = Group::new();
        for (tensor, output) in outputs.chunks_mut(1).enumerate() {
            call.feedback = Some(tensor as u64);
            let buffers = UserBuffers::new(bytes_of(&input), bytes_of_mut(output));
            group.add(&comm, &call, buffers).unwrap();
        }
        let error = group.run().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidUsage);
        assert!(error.message().contains("tensor 65536"), "{error}");
        // No call of the refused group ran, and its last call succeeds alone.
        comm.call(
            &call,
            UserBuffers::new(bytes_of(&input), bytes_of_mut(&mut outputs[..1])),
        )
        .unwrap();
        assert_eq!((outputs[0], outputs[1]), (2.0, 0.0));
    });
}

/// A group that the library refuses must not make a sampled call fail the communicator.
#[test]
fn refused_sampled_call_leaves_the_communicator_usable() {
    let mut config = config(TransportKind::Loopback);
    for (name, value) in [("CINCH_CODEC", "linear8"), ("CINCH_CODEC_SAMPLE", "1")] {
        config
            .set(name, value, cinch::config::Origin::Program)
            .unwrap();
    }
    world(2, &config, |comm| {
        let input = vec![1.0f32; 100_000];
        let mut output = vec![0.0f32; 100_000];
        let mut call = Call::new(Collective::AllReduce, DType::F32, 100_000);
        for (algorithm, possible) in [
            (None, true),
            (Some(Algorithm::Hierarchical), false),
            (None, true),
        ] {
            call.algorithm = algorithm;
            let buffers = UserBuffers::new(bytes_of(&input), bytes_of_mut(&mut output));
            match comm.call(&call, buffers) {
                Ok(_) => assert!(possible),
                Err(error) => assert!(
                    !possible && error.kind() == ErrorKind::Unsupported,
                    "{error}"
                ),
            }
            assert_eq!(comm.async_error(), None);
        }
        assert_eq!(comm.codec_stats().sampled, 2);
    });
}

/// If the send and receive buffers of a message to oneself overlap in part, copying would overwrite
/// bytes that are still to be sent.
#[test]
fn message_to_oneself_with_partly_overlapping_buffers_is_refused() {
    world(1, &config(TransportKind::Loopback), |comm| {
        let mut memory: Vec<u8> = (0..100).collect();
        let mut call = Call::new(Collective::SendRecv, DType::U8, 50);
        (call.root, call.peer) = (0, 0);
        let start = memory.as_mut_ptr();
        for (to, possible) in [(0, true), (1, false), (49, false), (50, true)] {
            let mut group = Group::new();
            // SAFETY: both ranges are within `memory`, which outlives the group.
            let [send, recv] = unsafe {
                [
                    UserBuffers::from_raw(start, 50, start, 0),
                    UserBuffers::from_raw(start, 0, start.add(to), 50),
                ]
            };
            group.add(&comm, &call, send).unwrap();
            group.add(&comm, &call, recv).unwrap();
            match group.run() {
                Ok(_) => assert!(possible, "{to}"),
                Err(error) => {
                    assert!(
                        !possible && error.kind() == ErrorKind::InvalidArgument,
                        "{error}"
                    );
                    assert!(error.message().contains("50 bytes"), "{error}");
                }
            }
        }
        assert!(memory[50..].iter().copied().eq(0..50));
    });
}
