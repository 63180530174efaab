//! Calls of communicators on a simulated GPU, whose kernels only record their launches.

use super::*;
use crate::bootstrap::LocalOutOfBand;
use crate::comm::Group;
use crate::comm::requests::CallThread;
use crate::config::{CommFacts, Origin};
use crate::engine::gpu::tests::{Bench, WAIT, buffers};
use crate::gpu::{Device, Stream};
use crate::mem::UserBuffers;
use crate::plan::Resident;
use crate::sys::cuda::CuResult;
use crate::sys::fork::{ForkOwned, ProcessId};
use crate::testing::try_local_world;
use crate::types::{Algorithm, TransportKind};
use std::sync::OnceLock;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

/// Returns the communicators of two ranks, which sample every second coded sum.
fn communicators(bench: &Bench) -> Vec<Communicator> {
    communicators_with(bench, Config::default().timeout)
}

/// Makes the communicators with this timeout.
fn communicators_with(bench: &Bench, timeout: Duration) -> Vec<Communicator> {
    let config = Config {
        codec_sample: 2,
        timeout,
        ..Config::default()
    };
    let ranks = bench.ranks(2, 16, &config).into_iter();
    let comms = ranks.map(|rank| Communicator {
        info: CommInfo {
            transports: vec![None; 2],
            classes: Vec::new(),
            channels: 16,
            slot_bytes: 0,
            slots: 0,
            buffer_bytes: 0,
            hosts: Groups::of_hosts(rank.exchange.peers().iter().map(|peer| peer.host_id)),
        },
        owner: ProcessId::this(),
        exchange: rank.exchange,
        fault: rank.fault,
        announced: AtomicBool::new(false),
        policy: CodecPolicy::new(&config, CommFacts::first(2, 1)),
        config: config.clone(),
        sampler: Default::default(),
        counters: Default::default(),
        recorder: crate::recorder::register(Default::default(), Default::default()),
        state: DeviceState::Gpu(ForkOwned::new(Box::new(GpuState {
            context: bench.context.clone(),
            engine: Mutex::new(rank.engine),
            windows: Some(SampleWindows::new(&bench.context, WAIT).unwrap()),
        }))),
        started: ForkOwned::new(CallThread::default()),
        spare_buffers: Mutex::default(),
        shrink_rendezvous: OnceLock::new(),
        grow_id: Mutex::default(),
    });
    comms.collect()
}

/// Returns a sum that has a kernel for fp32 but none for fp16.
fn sum(dtype: DType) -> Call {
    Call {
        codec: Some("linear8".parse().unwrap()),
        algorithm: Some(Algorithm::Direct),
        ..Call::new(Collective::AllReduce, dtype, 1000)
    }
}

/// A call that is refused before anything is queued changes nothing: the communicator stays usable,
/// and its next sample stays due.
#[test]
fn refused_call_leaves_the_sample_due() {
    let bench = Bench::new();
    let stream = bench.stream();
    let other = Device::at(bench.context.driver(), 1).unwrap();
    let foreign = Stream::new(&Context::primary(&other).unwrap()).unwrap();
    let memory = bench.memory(4000);
    let comms = communicators(&bench);
    let on = |stream: &Stream| buffers(&memory, &memory, stream);
    let launches = || bench.process.calls("cuLaunchKernel");
    let run = |comm: &Communicator| {
        let before = launches();
        comm.call_on(&sum(DType::F32), on(&stream)).unwrap();
        launches() - before
    };
    let refused = |comm: &Communicator| {
        let before = launches();
        for (dtype, stream, kind) in [
            (DType::F16, &stream, ErrorKind::Unsupported),
            (DType::F32, &foreign, ErrorKind::InvalidUsage),
        ] {
            let error = comm.call_on(&sum(dtype), on(stream)).unwrap_err();
            assert_eq!(error.kind(), kind, "{error}");
            assert_eq!(comm.async_error(), None);
        }
        assert_eq!(launches(), before);
    };
    let [one, two] = &comms[..] else {
        panic!("two ranks")
    };
    // A sampled call makes two launches: the coded sum and the exact sum of its window.
    refused(one);
    assert_eq!([run(one), run(one), run(one)], [2, 1, 2]);
    refused(one);
    assert_eq!([run(one), run(one)], [1, 2]);
    assert_eq!(one.codec_stats().sampled, 2);

    // Refusing a group leaves the next sample due, as refusing a single call does, whichever of the group's
    // calls is sampled.
    let mut group = Group::new();
    for dtype in [DType::F16, DType::F32] {
        group.add_on(one, &sum(dtype), on(&stream)).unwrap();
    }
    assert_eq!(group.run().unwrap_err().kind(), ErrorKind::Unsupported);
    assert_eq!([run(one), run(one)], [1, 2]);
    // The refused call belongs to the first communicator, so nothing of the group is queued.
    let mut group = Group::new();
    for (comm, dtype) in [(one, DType::F16), (two, DType::F32)] {
        group.add_on(comm, &sum(dtype), on(&stream)).unwrap();
    }
    assert_eq!(group.run().unwrap_err().kind(), ErrorKind::Unsupported);
    assert_eq!([run(one), run(one)], [1, 2]);
    assert_eq!([run(two), run(two)], [2, 1]);
}

/// Ranks decide on the codec by the comparison of a sample, so a rank without the comparison fails.
#[test]
fn sample_that_does_not_end_fails_its_communicator() {
    let bench = Bench::new();
    let stream = bench.stream();
    let memory = bench.memory(4000);
    let comms = communicators_with(&bench, Duration::from_millis(10));
    let run = || comms[0].call_on(&sum(DType::F32), buffers(&memory, &memory, &stream));
    run().unwrap();
    run().unwrap();
    bench.process.hang(true);
    let error = run().unwrap_err();
    bench.process.hang(false);
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    assert_eq!(comms[0].async_error(), Some(error.clone()));
    assert_eq!(run().unwrap_err(), error);
    assert!(comms[1].fault().is_raised());
}

/// A call that a group refuses, because another call of the group has a pending sample, does not
/// count as a coded sum.
#[test]
fn call_without_a_sample_in_its_group_is_not_counted() {
    let bench = Bench::new();
    let stream = bench.stream();
    let memory = bench.memory(4000);
    let comms = communicators(&bench);
    let on = || buffers(&memory, &memory, &stream);
    let launched = |run: &dyn Fn()| {
        let before = bench.process.calls("cuLaunchKernel");
        run();
        bench.process.calls("cuLaunchKernel") - before
    };
    let run = || {
        comms[0].call_on(&sum(DType::F32), on()).unwrap();
    };
    let mut group = Group::new();
    for _ in 0..2 {
        group.add_on(&comms[0], &sum(DType::F32), on()).unwrap();
    }
    for _ in 0..2 {
        let error = group.add_on(&comms[0], &sum(DType::F32), on()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidUsage, "{error}");
    }
    group.run().unwrap();
    assert_eq!([launched(&run), launched(&run)], [2, 1]);
}

/// If one communicator refuses a call of a group, no call of the group has an effect, even if a sample splits
/// the group.
#[test]
fn group_with_a_refused_call_queues_nothing() {
    let bench = Bench::new();
    let stream = bench.stream();
    let memory = bench.memory(4000);
    let comms = communicators(&bench);
    let on = || buffers(&memory, &memory, &stream);
    let launches = || bench.process.calls("cuLaunchKernel");
    let [one, two] = &comms[..] else {
        panic!("two ranks")
    };
    let before = launches();
    for calls in [
        // The refused call belongs to the second communicator and follows a sampled call.
        [(one, DType::F32), (two, DType::F16)],
        [(one, DType::F32), (one, DType::F16)],
    ] {
        let mut group = Group::new();
        for (comm, dtype) in calls {
            group.add_on(comm, &sum(dtype), on()).unwrap();
        }
        assert_eq!(group.run().unwrap_err().kind(), ErrorKind::Unsupported);
        assert_eq!(launches(), before);
        assert!(comms.iter().all(|comm| comm.async_error().is_none()));
    }
    for comm in [one, two] {
        let ran = [(); 2].map(|()| {
            let before = launches();
            comm.call_on(&sum(DType::F32), on()).unwrap();
            launches() - before
        });
        assert_eq!(ran, [2, 1]);
    }
}

#[test]
fn group_with_a_failed_launch_fails_all_its_communicators() {
    let bench = Bench::new();
    let stream = bench.stream();
    let memory = bench.memory(4000);
    let worlds = [(); 2].map(|()| communicators(&bench));
    let mut group = Group::new();
    for comms in &worlds {
        let buffers = buffers(&memory, &memory, &stream);
        group.add_on(&comms[0], &sum(DType::F32), buffers).unwrap();
    }
    // Each communicator launches a coded sum and an exact sum.
    bench
        .process
        .fail("cuLaunchKernel", 2, 1, CuResult::UNKNOWN);
    let error = group.run().unwrap_err();
    assert_eq!(worlds[1][0].async_error(), Some(error));
    let error = worlds[0][0].async_error();
    let error = error.expect("other ranks wait for it");
    assert!(error.message().contains("the same group"), "{error}");
}

/// Returns the communicators of two ranks on host memory.
fn on_hosts(timeout: Duration) -> Vec<Communicator> {
    let config = Config {
        transport: Some(TransportKind::Loopback),
        timeout,
        ..Config::default()
    };
    try_local_world(2, &config, Result::unwrap)
}

/// A group is refused before any GPU call is queued. Otherwise a program that makes the group again
/// would queue its calls twice.
#[test]
fn group_refused_on_host_memory_queues_nothing() {
    let bench = Bench::new();
    let stream = bench.stream();
    let memory = bench.memory(4000);
    let comms = communicators(&bench);
    let hosts = on_hosts(Config::default().timeout);
    let impossible = Call {
        algorithm: Some(Algorithm::Tree),
        ..Call::new(Collective::AllToAll, DType::F32, 1)
    };
    let launches = || bench.process.calls("cuLaunchKernel");
    let run = || {
        let before = launches();
        let on = buffers(&memory, &memory, &stream);
        comms[0].call_on(&sum(DType::F32), on).unwrap();
        launches() - before
    };
    let before = launches();
    let (input, mut output) = ([0; 8], [0; 8]);
    let mut group = Group::new();
    let on = buffers(&memory, &memory, &stream);
    group.add_on(&comms[0], &sum(DType::F32), on).unwrap();
    let there = UserBuffers::new(&input, &mut output);
    group.add(&hosts[0], &impossible, there).unwrap();
    let error = group.run().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    assert_eq!(launches(), before);
    for comm in [&comms[0], &hosts[0]] {
        assert_eq!(comm.async_error(), None);
    }
    assert_eq!([run(), run()], [2, 1]);
}

/// A kernel that a group has queued may wait for another rank, which in turn waits in the group's
/// call on host memory.
#[test]
fn failure_on_host_memory_fails_all_communicators_of_the_group() {
    let bench = Bench::new();
    let stream = bench.stream();
    let memory = bench.memory(4000);
    let comms = communicators(&bench);
    let hosts = on_hosts(Duration::from_millis(50));
    let alone = Call::new(Collective::AllReduce, DType::F32, 2);
    let (input, mut output) = ([0; 8], [0; 8]);
    let mut group = Group::new();
    let on = buffers(&memory, &memory, &stream);
    group.add_on(&comms[0], &sum(DType::F32), on).unwrap();
    let there = UserBuffers::new(&input, &mut output);
    group.add(&hosts[0], &alone, there).unwrap();
    let error = group.run().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    let error = comms[0].async_error().expect("other ranks wait for it");
    assert!(error.message().contains("the same group"), "{error}");
}

/// The calls of a group that is dropped or refused do not count among the sampled calls.
#[test]
fn dropped_group_leaves_the_sample_due() {
    let bench = Bench::new();
    let stream = bench.stream();
    let memory = bench.memory(4000);
    let comms = communicators(&bench);
    let comm = &comms[0];
    let on = || buffers(&memory, &memory, &stream);
    let run = || {
        let before = bench.process.calls("cuLaunchKernel");
        comm.call_on(&sum(DType::F32), on()).unwrap();
        bench.process.calls("cuLaunchKernel") - before
    };
    for sampled in [true, false] {
        let mut group = Group::new();
        group.add_on(comm, &sum(DType::F32), on()).unwrap();
        drop(group);
        let alone = Call::new(Collective::SendRecv, DType::F32, 10);
        let mut group = Group::new();
        group.add_on(comm, &sum(DType::F32), on()).unwrap();
        group.add_on(comm, &alone, on()).unwrap();
        let error = group.run().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidUsage, "{error}");
        assert_eq!(run(), if sampled { 2 } else { 1 });
    }
}

/// A driver blocks a thread with too many pending launches. These may wait for launches on another GPU that the
/// thread has not made yet.
#[test]
fn large_group_on_several_gpus_is_interleaved() {
    let benches = [Bench::new(), Bench::new()];
    let memory = benches.each_ref().map(|bench| bench.memory(4000));
    let streams = benches.each_ref().map(|bench| bench.stream());
    let worlds = benches.each_ref().map(communicators);
    let exact = |dtype| Call {
        codec: None,
        ..sum(dtype)
    };
    let group = |dtype| {
        let mut group = Group::new();
        for at in [0, 1] {
            for index in 0..200 {
                let last = [DType::F32, dtype][usize::from(at == 1 && index == 199)];
                let on = buffers(&memory[at], &memory[at], &streams[at]);
                group.add_on(&worlds[at][0], &exact(last), on).unwrap();
            }
        }
        group.run()
    };
    let launches = || benches.each_ref().map(|bench| bench.counts().len());
    assert_eq!(group(DType::F32).unwrap().len(), 400);
    assert_eq!(launches(), [200, 200]);
    let error = group(DType::F16).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    assert_eq!(launches(), [0, 0]);
    assert_eq!(worlds[0][0].async_error(), None);
    let refuse = CuResult::INVALID_VALUE;
    benches[1].process.fail("cuLaunchKernel", 0, 1, refuse);
    group(DType::F32).unwrap_err();
    assert_eq!(launches(), [64, 0]);
    for comms in &worlds {
        assert!(comms[0].async_error().is_some());
    }
}

/// Returns how many thread blocks each of two ranks may have resident, if `CINCH_GPU_CHANNELS` is
/// `channels`. The GPUs have these numbers and hold 132 blocks each.
fn resident_on(gpus: [u32; 2], channels: &str) -> usize {
    let bench = Bench::new();
    let mut config = Config::default();
    config
        .set("CINCH_GPU_CHANNELS", channels, Origin::Environment)
        .unwrap();
    let faults = [(); 2].map(|()| Fault::new());
    let exchanges = LocalOutOfBand::world_with(2, &faults, &config);
    let said = std::thread::scope(|scope| {
        let asking = exchanges.iter().zip(gpus).map(|(exchange, gpu)| {
            let driver = bench.context.driver();
            let asked = config.gpu_channels;
            let exchange: OutOfBandRef = exchange.clone();
            scope.spawn(move || {
                let context = Context::primary(&Device::at(driver, gpu).unwrap()).unwrap();
                resident(&exchange, &context, Resident::both(132), asked).unwrap()
            })
        });
        let asking: Vec<_> = asking.collect();
        let said = asking.into_iter().map(|rank| rank.join().unwrap());
        said.collect::<Vec<_>>()
    });
    assert_eq!(said[0], said[1]);
    assert_eq!(said[0].channels, said[0].fused);
    said[0].channels
}

#[test]
fn settings_of_host_memory_are_warned_of_on_gpus() {
    let mut config = Config::default();
    assert_eq!(without_effect(&config), None);
    let said = Origin::Environment;
    config.set("CINCH_SLOT_BYTES", "16K", said).unwrap();
    let why = without_effect(&config).unwrap();
    assert!(why.ends_with(": CINCH_SLOT_BYTES"), "{why}");
    config.set("CINCH_SLOTS", "8", said).unwrap();
    let why = without_effect(&config).unwrap();
    assert!(why.ends_with(": CINCH_SLOT_BYTES, CINCH_SLOTS"), "{why}");
}

/// Half of a GPU is left to other kernels, unless a setting requests more channels. Ranks of a GPU share it evenly.
#[test]
fn resident_blocks_leave_half_of_the_gpu_free() {
    for channels in ["auto", "1", "8", "64", "66"] {
        assert_eq!(resident_on([0, 1], channels), 66, "{channels}");
    }
    assert_eq!(resident_on([0, 1], "100"), 100);
    assert_eq!(resident_on([0, 1], "128"), 128);
    for (channels, blocks) in [("auto", 33), ("50", 50), ("128", 66)] {
        assert_eq!(
            resident_on([0, 0], channels),
            blocks,
            "{channels} of two ranks"
        );
    }
}

/// The order must not depend on addresses of communicators, which differ between processes: on one
/// stream all ranks must queue communicators in one order.
#[test]
fn communicators_of_a_group_are_queued_in_order_of_first_call() {
    let bench = Bench::new();
    let stream = bench.stream();
    let memory = bench.memory(4000);
    let worlds = [(); 2].map(|()| communicators(&bench));
    let [one, two] = worlds.each_ref().map(|comms| &comms[0]);
    for (first, second) in [(one, two), (two, one)] {
        let mut group = Group::new();
        for (comm, count) in [(first, 500), (second, 300), (first, 400)] {
            let call = Call {
                count,
                codec: None,
                algorithm: Some(Algorithm::Ring),
                ..sum(DType::F32)
            };
            let on = buffers(&memory, &memory, &stream);
            group.add_on(comm, &call, on).unwrap();
        }
        bench.counts();
        group.run().unwrap();
        assert_eq!(bench.counts(), [500, 400, 300]);
    }
}

/// A kernel that does not end may still write a sample, so the memory of the window is kept, like
/// the engine's.
#[test]
fn windows_of_a_kernel_that_does_not_end_are_not_freed() {
    let bench = Bench::new();
    let stream = bench.stream();
    let memory = bench.memory(4000);
    let device = |count: usize| format!("{count} device allocations");
    for hangs in [false, true] {
        let mut comms = communicators_with(&bench, Duration::from_millis(10));
        let on = buffers(&memory, &memory, &stream);
        comms[0].call_on(&sum(DType::F32), on).unwrap();
        // Three allocations: the caller's memory, and a sample window of each of the two ranks.
        assert!(bench.process.leftovers().contains(&device(3)));
        bench.process.hang(hangs);
        if hangs {
            comms[0].abort();
        }
        drop(comms.remove(0));
        let left = if hangs { 3 } else { 2 };
        assert!(bench.process.leftovers().contains(&device(left)));
        bench.process.hang(false);
        drop(comms);
        // The memory is freed once the kernel has ended.
        let begin = Instant::now();
        while !bench.process.leftovers().contains(&device(1)) {
            assert!(begin.elapsed() < WAIT, "nobody frees it");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// `close` waits for the caller's earlier work on the stream even beyond the timeout of calls; a
/// failure ends this wait.
#[test]
fn close_waits_for_earlier_work_of_the_stream() {
    let bench = Bench::new();
    let stream = bench.stream();
    let memory = bench.memory(4000);
    let timeout = Duration::from_millis(10);
    for fails in [false, true] {
        let comms = communicators_with(&bench, timeout);
        let run = || comms[0].call_on(&sum(DType::F32), buffers(&memory, &memory, &stream));
        run().unwrap();
        bench.process.hang(true);
        let retired = std::thread::scope(|scope| {
            let retires = scope.spawn(|| comms[0].close());
            std::thread::sleep(20 * timeout);
            assert!(!retires.is_finished());
            assert_eq!(comms[1].async_error(), None);
            match fails {
                true => comms[0].abort(),
                false => bench.process.hang(false),
            }
            retires.join().unwrap()
        });
        bench.process.hang(false);
        match fails {
            true => assert_eq!(retired.unwrap_err().kind(), ErrorKind::Aborted),
            false => {
                retired.unwrap();
                let error = run().unwrap_err();
                assert!(error.message().contains("finalized"), "{error}");
            }
        }
    }
}

/// The exit of another rank is no error for a rank whose calls have all ended.
#[test]
fn close_succeeds_after_the_exit_of_a_rank_that_ended_no_call() {
    let bench = Bench::new();
    let stream = bench.stream();
    let memory = bench.memory(4000);
    let comms = communicators(&bench);
    let call = || comms[0].call_on(&sum(DType::F32), buffers(&memory, &memory, &stream));
    call().unwrap();
    bench.process.hang(true);
    std::thread::scope(|scope| {
        let retires = scope.spawn(|| comms[0].close());
        std::thread::sleep(Duration::from_millis(50));
        let died = Error::new(ErrorKind::Remote, "rank 1 died");
        comms[0].fault().raise_at(died, Instant::now() + WAIT);
        bench.process.hang(false);
        retires.join().unwrap().unwrap();
    });
    assert!(!comms[1].fault().is_raised());
}

/// `wait_closed` waits for ranks that have not closed beyond the timeout of calls.
#[test]
fn wait_closed_waits_for_late_ranks_beyond_the_call_timeout() {
    let bench = Bench::new();
    let timeout = Duration::from_millis(10);
    let comms = communicators_with(&bench, timeout);
    comms[0].close().unwrap();
    std::thread::scope(|scope| {
        let outlasts = scope.spawn(|| comms[0].wait_peers_closed(Duration::ZERO));
        std::thread::sleep(20 * timeout);
        assert!(!outlasts.is_finished());
        comms[1].exchange.leave();
    });
}

#[test]
fn codecs_by_level_without_a_kernel_are_refused_with_advice() {
    let two = Groups::even_hosts(2, 2);
    let check = |groups: &Groups, codec: &str| {
        let config = Config {
            codec: codec.parse().unwrap(),
            ..Config::default()
        };
        let policy = CodecPolicy::new(&config, CommFacts::first(4, groups.count()));
        refuse_codec_by_level(groups, &policy)
    };
    for codec in [
        "linear8",
        "intra=raw,inter=linear8",
        "intra=cast16,inter=minmax4",
        "intra=cast_bf16,inter=dynamic8",
        "intra=linear8,inter=minmax4",
    ] {
        check(&two, codec).unwrap();
    }
    for (codec, advice) in [
        ("intra=dynamic8,inter=minmax4", "linear8 (blocks"),
        ("intra=linear8:seed=7,inter=minmax4", "no seed)"),
        ("intra=linear8:block=1024,inter=minmax4", "up to 512, "),
        ("intra=cast16,inter=raw", "set CINCH_CODEC=cast16 for all"),
        (
            "intra=linear8,inter=raw",
            "set CINCH_CODEC=linear8:block=256 for all",
        ),
    ] {
        check(&Groups::ONE, codec).unwrap();
        let error = check(&two, codec).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.message().contains(advice), "{error}");
    }
}
