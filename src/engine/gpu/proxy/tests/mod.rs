//! Tests proxies between ranks of several hosts; [`world`] simulates the hosts.

mod world;

use super::super::GpuCall;
use super::super::tests::request;
use super::*;
use crate::error::ErrorKind;
use crate::gpu::{CaptureMode, Graph, Stream};
use crate::mem::DeviceBuffers;
use crate::sys::cuda::CuResult;
use crate::testing::Problem;
use crate::types::{Algorithm, Collective, DType, ReduceOp, TransportKind};
use world::{World, inputs, small};

const WAIT: Duration = Duration::from_secs(60);

/// Runs every collective with every algorithm, all of them over the same connections.
#[test]
fn collectives_across_hosts_match_the_reference() {
    for hosts in [vec![0, 1], vec![0, 0, 1, 1], vec![0, 1, 0, 2, 1]] {
        let world = World::new(&hosts, &small());
        let nranks = hosts.len();
        let ran = world.run(|rank| {
            let mut ran = 0;
            for (peer, host) in hosts.iter().enumerate() {
                let network = match &rank.paths[peer] {
                    Some(path) => path.transport() == TransportKind::Tcp,
                    None => false,
                };
                assert_eq!(network, *host != hosts[rank.rank], "{:?}", rank.paths);
            }
            for collective in Collective::ALL {
                let mut algorithms = vec![None, Some(Algorithm::Hierarchical)];
                let flat = crate::schedule::algorithms(collective);
                algorithms.extend(flat.iter().copied().map(Some));
                let by_level =
                    crate::schedule::SchedulePattern::no_hierarchy(collective, &rank.hosts())
                        .is_none();
                for algorithm in algorithms {
                    if algorithm == Some(Algorithm::Hierarchical) && !by_level {
                        continue;
                    }
                    for (count, codec) in [(1, "raw"), (200_003, "raw"), (30_001, "linear8")] {
                        if codec != "raw" && !collective.reduces() {
                            continue;
                        }
                        rank.one(collective, algorithm, count, codec);
                        ran += 1;
                    }
                }
            }
            assert!(rank.fault.reason().is_none());
            rank.exchange.barrier().unwrap();
            ran
        });
        assert!(ran.iter().all(|&ran| ran > 40), "{nranks}: {ran:?}");
    }
}

/// Replays continue the connections' counters where the last launch left them, since no counter is
/// a kernel argument.
#[test]
fn graph_replay_across_hosts_matches_the_reference() {
    let world = World::new(&[0, 1, 1], &small());
    world.run(|rank| {
        let mut problem = Problem::new(Collective::AllReduce, DType::F32, 3, 70_001);
        problem.op = ReduceOp::Sum;
        let inputs = inputs(&problem, 3);
        let input = rank.holding(&inputs[rank.rank]);
        let outputs = [(); 2].map(|()| rank.memory(4 * problem.count));
        let calls = [0, 1].map(|at| {
            rank.call(
                request(&problem, ["raw", "linear8"][at]),
                &input,
                &outputs[at],
            )
        });
        let stream = Stream::new(&rank.context).unwrap();
        let on = |call: GpuCall<'static>| {
            let place = |(address, bytes)| (address, bytes);
            // SAFETY: `input` and `outputs` outlive the graph, which is dropped at the end of this
            // closure.
            let buffers = unsafe {
                DeviceBuffers::new(
                    place(call.buffers.input()),
                    place(call.buffers.output()),
                    stream.handle().addr(),
                )
            };
            GpuCall { buffers, ..call }
        };
        let engine = rank.engine.as_mut().unwrap();
        // Calls outside the graph run before its capture and after its replays.
        engine.run(&calls[..1]).unwrap();
        let graph = Graph::capture(&stream, CaptureMode::Global, |_| {
            for call in calls {
                engine.run(&[on(call)])?;
            }
            Ok(())
        })
        .unwrap();
        let mut coded = None;
        for replay in 0..20 {
            for output in &outputs {
                output.fill(0, &rank.stream).unwrap();
            }
            graph.launch(&stream).unwrap();
            let found = rank.read(&outputs[0], 4 * problem.count);
            let found = problem.check(&inputs, rank.rank, &found, 0.0).unwrap();
            assert_eq!(found.wrong, 0, "replay {replay}");
            let found = rank.read(&outputs[1], 4 * problem.count);
            assert_eq!(
                *coded.get_or_insert(found.clone()),
                found,
                "replay {replay}"
            );
        }
        rank.engine.as_mut().unwrap().run(&calls[..1]).unwrap();
        assert!(rank.fault.reason().is_none());
        rank.exchange.barrier().unwrap();
    });
}

/// Every rank sends to and receives from every other rank in one group, both on its own host and on
/// the other.
#[test]
fn message_groups_across_hosts_match_the_reference() {
    let world = World::new(&[0, 1, 0, 1], &small());
    let counts = [3usize, 40_000, 1];
    let word = |from: usize, to: usize, k: usize| (100 * from + 10 * to + k) as f32;
    world.run(|rank| {
        let (me, nranks) = (rank.rank, rank.nranks);
        let mut memory = Vec::new();
        for other in (0..nranks).filter(|&other| other != me) {
            for (k, &count) in counts.iter().enumerate() {
                let sent = word(me, other, k).to_le_bytes().repeat(count);
                memory.push((other, k, rank.holding(&sent), rank.memory(4 * count)));
            }
        }
        let mut calls = Vec::new();
        for (other, k, input, output) in &memory {
            let mut problem = Problem::new(Collective::SendRecv, DType::F32, nranks, counts[*k]);
            (problem.root, problem.peer) = (me, *other);
            calls.push(rank.call(request(&problem, "raw"), input, output));
            (problem.root, problem.peer) = (*other, me);
            calls.push(rank.call(request(&problem, "raw"), input, output));
        }
        let reports = rank.engine().run(&calls).unwrap();
        let crossing =
            |report: &&crate::engine::Report| report.transport == Some(TransportKind::Tcp);
        assert_eq!(
            reports.iter().filter(crossing).count(),
            2 * 2 * counts.len()
        );
        for (other, k, _, output) in &memory {
            let wanted = word(*other, me, *k).to_le_bytes();
            let found = rank.read(output, 4 * counts[*k]);
            assert!(
                found.chunks(4).all(|found| found == wanted),
                "{other} to {me}"
            );
        }
        rank.exchange.barrier().unwrap();
    });
}

/// The proxy finishes sending a message although its rank closes right after the call.
#[test]
fn messages_arrive_after_the_sender_closes() {
    let world = World::new(&[0, 1], &small());
    world.run(|rank| {
        let mut problem = Problem::new(Collective::Broadcast, DType::F32, 2, 500_000);
        problem.root = 0;
        let inputs = inputs(&problem, 9);
        let input = rank.holding(&inputs[rank.rank]);
        let output = rank.memory(4 * problem.count);
        if rank.rank == 1 {
            std::thread::sleep(Duration::from_millis(50));
        }
        let call = rank.call(request(&problem, "raw"), &input, &output);
        rank.engine().run(&[call]).unwrap();
        rank.engine = None;
        assert!(rank.fault.reason().is_none());
        let found = rank.read(&output, 4 * problem.count);
        let found = problem.check(&inputs, rank.rank, &found, 0.0).unwrap();
        assert_eq!(found.wrong, 0);
    });
}

/// Rank 1 closes its connections while kernels of other ranks wait for its messages.
#[test]
fn broken_connection_names_the_peer_and_aborts_kernels() {
    let world = World::new(&[0, 1, 2], &small());
    world.run(|rank| {
        if rank.rank == 1 {
            rank.engine = None;
            return;
        }
        let problem = Problem::new(Collective::AllReduce, DType::F32, 3, 100_000);
        let memory = rank.memory(4 * problem.count);
        let call = rank.call(request(&problem, "raw"), &memory, &memory);
        let begin = Instant::now();
        rank.engine().run(&[call]).unwrap();
        let error = rank.fault.check().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Remote);
        assert!(error.message().contains("rank 1 "), "{error}");
        println!("freed after {:?}", begin.elapsed());
        assert!(
            rank.connections.trouble().is_none(),
            "no kernel had to time out"
        );
    });
}

#[test]
fn closed_peer_fails_no_idle_rank() {
    let world = World::new(&[0, 1], &small());
    world.run(|rank| {
        if rank.rank == 1 {
            rank.engine = None;
            return;
        }
        std::thread::sleep(3 * BROKEN_LINK_TIMEOUT);
        assert!(rank.fault.reason().is_none());
    });
}

/// Rank 1 closes after it has sent its message, and before rank 2 has sent its own.
#[test]
fn closed_peer_fails_no_call_that_has_its_messages() {
    let world = World::new(&[0, 1, 2], &small());
    world.run(|rank| {
        let mut problem = Problem::new(Collective::Gather, DType::F32, 3, 1000);
        problem.root = 0;
        let inputs = inputs(&problem, 4);
        let input = rank.holding(&inputs[rank.rank]);
        let bytes = 4 * problem.nranks * problem.count;
        let output = rank.memory(bytes);
        if rank.rank == 2 {
            std::thread::sleep(3 * BROKEN_LINK_TIMEOUT);
        }
        let call = rank.call(request(&problem, "raw"), &input, &output);
        rank.engine().run(&[call]).unwrap();
        rank.engine = None;
        rank.exchange.leave();
        assert!(rank.fault.reason().is_none(), "{:?}", rank.fault.reason());
        if rank.rank == 0 {
            let found = rank.read(&output, bytes);
            let found = problem.check(&inputs, 0, &found, 0.0).unwrap();
            assert_eq!(found.wrong, 0);
        }
    });
}

/// The peer has closed, so the kernel's messages cannot be sent; teardown returns without waiting.
#[test]
fn teardown_does_not_wait_for_a_dead_peer() {
    let world = World::new(&[0, 1], &small());
    world.run(|rank| {
        if rank.rank == 1 {
            rank.engine = None;
            rank.exchange.barrier().unwrap();
            return;
        }
        let mut problem = Problem::new(Collective::Broadcast, DType::F32, 2, 1000);
        problem.root = 0;
        let memory = rank.memory(4 * problem.count);
        rank.exchange.barrier().unwrap();
        // The proxy checks the connections at least once in this time.
        std::thread::sleep(20 * IDLE_POLL_INTERVAL);
        let call = rank.call(request(&problem, "raw"), &memory, &memory);
        let begin = Instant::now();
        rank.engine().run(&[call]).unwrap();
        rank.engine = None;
        assert!(begin.elapsed() < Duration::from_secs(5));
        let error = rank.fault.check().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Remote);
        assert!(error.message().contains("rank 1 "), "{error}");
    });
}

#[test]
fn abort_ends_kernels_and_the_proxy() {
    let world = World::new(&[0, 1], &small());
    world.run(|rank| {
        if rank.rank == 0 {
            let fault = rank.fault.clone();
            std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(50));
                fault.raise(Error::new(
                    ErrorKind::Aborted,
                    "rank 0 aborted the communicator",
                ));
            });
            let problem = Problem::new(Collective::AllReduce, DType::F32, 2, 100_000);
            let memory = rank.memory(4 * problem.count);
            let call = rank.call(request(&problem, "raw"), &memory, &memory);
            rank.engine().run(&[call]).unwrap();
            assert_eq!(rank.fault.check().unwrap_err().kind(), ErrorKind::Aborted);
        } else {
            std::thread::sleep(Duration::from_millis(200));
        }
        rank.engine = None;
    });
}

/// A kernel that the driver reports as failed raises the fault, so that other ranks stop waiting.
#[test]
fn failed_kernel_raises_the_fault() {
    let world = World::new(&[0, 1], &small());
    let died = CuResult(719);
    world.run(|rank| {
        let problem = Problem::new(Collective::AllReduce, DType::F32, 2, 1000);
        let memory = rank.memory(4 * problem.count);
        let call = rank.call(request(&problem, "raw"), &memory, &memory);
        rank.exchange.barrier().unwrap();
        world.process.fail("cuEventQuery", 0, usize::MAX, died);
        rank.engine().run(&[call]).unwrap();
        let begin = Instant::now();
        while rank.fault.reason().is_none() {
            assert!(begin.elapsed() < WAIT, "nobody noticed");
            std::thread::sleep(Duration::from_millis(1));
        }
        let error = rank.fault.check().unwrap_err();
        assert!(error.message().contains("cuEventQuery"), "{error}");
    });
}

/// Communicators with proxies free all pinned memory, whether they close in order or after a fault.
#[test]
fn teardown_leaves_no_threads_or_descriptors() {
    let world = World::new(&[0, 1], &small());
    for round in 0..3 {
        world.run(|rank| {
            rank.one(Collective::AllReduce, None, 10_000, "raw");
            // A rank that closed earlier would fail ranks that still wait for its messages.
            rank.exchange.barrier().unwrap();
            if round == 2 && rank.rank == 0 {
                rank.fault.raise(Error::new(ErrorKind::Aborted, "a test"));
            }
        });
    }
    let leftovers = world.process.leftovers();
    let pinned = leftovers.iter().find(|left| left.contains("pinned"));
    assert_eq!(pinned, None, "{leftovers:?}");
}

/// Ranks that run different calls fail at the first message.
#[test]
fn different_calls_are_a_mismatch_in_kernels() {
    let world = World::new(&[0, 1], &small());
    world.run(|rank| {
        let count = 1000 + rank.rank;
        let problem = Problem::new(Collective::AllReduce, DType::F32, 2, count);
        let memory = rank.memory(4 * count);
        let call = rank.call(request(&problem, "raw"), &memory, &memory);
        // The control plane also compares the calls, and may raise the mismatch first.
        let _ = rank.engine().run(&[call]);
        let begin = Instant::now();
        while rank.fault.reason().is_none() {
            assert!(begin.elapsed() < WAIT, "nobody noticed");
            std::thread::sleep(Duration::from_millis(1));
        }
        let error = rank.fault.check().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
        rank.exchange.announce(&error);
    });
}
