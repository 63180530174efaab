//! Tests the order of calls over streams, groups and graphs.

use super::*;
use crate::sys::cuda::PER_THREAD_STREAM;
use crate::sys::cuda::mock::PROGRAMMATIC_LAUNCHES;
use crate::types::KernelProtocol;

#[test]
fn launches_on_other_streams_wait_for_the_last_launch() {
    let bench = Bench::new();
    let (one, two) = (bench.stream(), bench.stream());
    let mut ranks = bench.ranks(2, 16, &simple());
    let engine = &mut ranks[0].engine;
    let memory = bench.memory(4096);
    let problem = Problem::new(Collective::AllReduce, DType::F32, 2, 1000);
    let mut run = |stream: &Stream| {
        let before = bench.process.calls("cuStreamWaitEvent");
        let call = call(request(&problem, "raw"), &memory, &memory, stream);
        engine.run(&[call]).unwrap();
        bench.process.calls("cuStreamWaitEvent") - before
    };
    assert_eq!([run(&one), run(&one), run(&two), run(&one)], [0, 0, 1, 1]);
    // The per-thread default streams of all threads share this handle, so it never counts as the
    // last stream.
    // SAFETY: default streams exist as long as the context.
    let own = unsafe { Stream::borrowed(&bench.context, PER_THREAD_STREAM) };
    assert_eq!([run(&own), run(&own), run(&one)], [1, 1, 1]);
    bench.take();
    // A graph's replay runs after earlier calls outside the graph, and before later calls.
    let graph = Graph::capture(&two, CaptureMode::Global, |stream| {
        assert_eq!([run(stream), run(stream), run(stream)], [1, 0, 0]);
        Ok(())
    })
    .unwrap();
    assert!(bench.take().is_empty());
    // The graph has a wait, three calls, and the end mark behind the last call.
    assert_eq!(bench.process.marks(), [(4, vec![4])]);
    // A replay may have run on any stream, so every first call on a stream waits.
    assert_eq!([run(&one), run(&one), run(&two)], [1, 1, 1]);
    bench.take();
    graph.launch(&two).unwrap();
    graph.launch(&two).unwrap();
    assert_eq!(bench.take().len(), 6);
}

/// The driver may reuse the handle of a destroyed stream for the next stream. Work that was queued on the old
/// stream may then still run.
#[test]
fn reused_stream_handle_counts_as_another_stream() {
    let bench = Bench::new();
    let mut ranks = bench.ranks(2, 16, &simple());
    let engine = &mut ranks[0].engine;
    let memory = bench.memory(4096);
    let problem = Problem::new(Collective::AllReduce, DType::F32, 2, 1000);
    let mut run = |stream: &Stream| {
        let before = bench.process.calls("cuStreamWaitEvent");
        let call = call(request(&problem, "raw"), &memory, &memory, stream);
        engine.run(&[call]).unwrap();
        bench.process.calls("cuStreamWaitEvent") - before
    };
    let one = bench.stream();
    let handle = one.handle();
    assert_eq!([run(&one), run(&one)], [0, 0]);
    drop(one);
    let two = bench.stream();
    assert_eq!(two.handle(), handle);
    assert_eq!([run(&two), run(&two)], [1, 0]);
    // Without cuStreamGetId, a new stream with a reused handle looks like the old one, so each call
    // waits.
    let missing = CuResult::FUNCTION_MISSING;
    bench.process.fail("cuStreamGetId", 0, usize::MAX, missing);
    assert_eq!([run(&two), run(&two)], [1, 1]);
    // SAFETY: handle 0 is the legacy default stream, which exists as long as the context.
    let legacy = unsafe { Stream::borrowed(&bench.context, std::ptr::null_mut()) };
    assert_eq!([run(&legacy), run(&legacy)], [1, 0]);
}

/// Tests fused kernels and schedule kernels.
#[test]
fn launches_are_programmatic_unless_disabled() {
    let bench = Bench::new();
    let stream = bench.stream();
    let memory = bench.memory(4096);
    let problem = Problem::new(Collective::AllReduce, DType::F32, 2, 1000);
    for early_launch in [true, false] {
        for protocol in [KernelProtocol::FUSED_LL, KernelProtocol::SIMPLE] {
            let config = Config {
                early_launch,
                protocol: Some(protocol.protocol),
                kernel: Some(protocol.kernel),
                ..Config::default()
            };
            let mut ranks = bench.ranks(2, 16, &config);
            let counts =
                || ["cuLaunchKernel", PROGRAMMATIC_LAUNCHES].map(|name| bench.process.calls(name));
            let before = counts();
            let call = call(request(&problem, "raw"), &memory, &memory, &stream);
            ranks[0].engine.run(&[call]).unwrap();
            let [launches, early] = counts();
            assert_eq!(launches - before[0], 1, "{protocol:?}");
            assert_eq!(early - before[1], usize::from(early_launch), "{protocol:?}");
            let flags = match &bench.take()[0] {
                Seen::WorkBuffer(_, work_buffer) => work_buffer.works()[0].flags,
                Seen::Fused(_, args, _) => args.flags,
            };
            let lets = flags & abi::LAUNCH_DEPENDENTS != 0;
            assert_eq!(lets, early_launch, "{protocol:?}");
        }
    }
}

#[test]
fn graph_without_mixing_contains_only_calls() {
    let bench = Bench::new();
    let stream = bench.stream();
    let config = Config {
        graph_mixing: false,
        ..simple()
    };
    let mut ranks = bench.ranks(2, 16, &config);
    let memory = bench.memory(4096);
    let problem = Problem::new(Collective::AllReduce, DType::F32, 2, 1000);
    let mut run = |stream: &Stream| {
        let before = bench.process.calls("cuStreamWaitEvent");
        let call = call(request(&problem, "raw"), &memory, &memory, stream);
        ranks[0].engine.run(&[call]).unwrap();
        bench.process.calls("cuStreamWaitEvent") - before
    };
    let graph = Graph::capture(&stream, CaptureMode::Global, |stream| {
        assert_eq!([run(stream), run(stream)], [0, 0]);
        Ok(())
    })
    .unwrap();
    assert!(bench.process.marks().is_empty());
    assert_eq!([run(&stream), run(&stream)], [0, 0]);
    bench.take();
    graph.launch(&stream).unwrap();
    assert_eq!(bench.take().len(), 2);
}

#[test]
fn group_on_several_streams_is_ordered_in_each() {
    let bench = Bench::new();
    let streams = [bench.stream(), bench.stream(), bench.stream()];
    let mut ranks = bench.ranks(2, 16, &simple());
    let engine = &mut ranks[0].engine;
    let memory = bench.memory(4096);
    let counted = |count| Problem::new(Collective::AllReduce, DType::F32, 2, count);
    let mut run = |counts: [usize; 3]| {
        let before = ["cuEventRecord", "cuStreamWaitEvent"].map(|name| bench.process.calls(name));
        let calls: Vec<_> = counts
            .iter()
            .zip(&streams)
            .map(|(&count, stream)| {
                let problem = counted(count);
                call(request(&problem, "raw"), &memory, &memory, stream)
            })
            .collect();
        engine.run(&calls).unwrap();
        let after = ["cuEventRecord", "cuStreamWaitEvent"].map(|name| bench.process.calls(name));
        [after[0] - before[0], after[1] - before[1]]
    };
    // The first stream waits for both others, and both others wait for it. Each of the three calls
    // records an event.
    assert_eq!(run([1000, 500, 100]), [2 + 3, 2 + 2]);
    // The call on the second stream is empty, so that stream takes no part. The last launch was on
    // the first stream.
    assert_eq!(run([1000, 0, 100]), [1 + 2, 1 + 1]);
    // A group of empty calls records and waits for nothing.
    assert_eq!(run([0, 0, 0]), [0, 0]);
}

#[test]
fn graph_replay_after_drop_of_the_communicator_works() {
    let bench = Bench::new();
    let stream = bench.stream();
    let mut ranks = bench.ranks(2, 16, &simple());
    let memory = bench.memory(4096);
    let problem = Problem::new(Collective::Broadcast, DType::F32, 2, 1000);
    let graph = Graph::capture(&stream, CaptureMode::ThreadLocal, |stream| {
        let call = call(request(&problem, "raw"), &memory, &memory, stream);
        ranks[0].engine.run(&[call]).map(drop)
    })
    .unwrap();
    let wires = Arc::downgrade(&ranks[0].wires);
    drop(ranks);
    assert!(
        wires.upgrade().is_some(),
        "the graph still names its memory"
    );
    graph.launch(&stream).unwrap();
    drop(graph);
}

#[test]
fn interleaved_captures_keep_separate_orders() {
    let bench = Bench::new();
    let [one, two, three] = [bench.stream(), bench.stream(), bench.stream()];
    let mut ranks = bench.ranks(2, 16, &simple());
    let engine = &mut ranks[0].engine;
    let memory = bench.memory(4096);
    let problem = Problem::new(Collective::AllReduce, DType::F32, 2, 1000);
    let mut run = |stream: &Stream| -> Result<usize> {
        let before = bench.process.calls("cuStreamWaitEvent");
        let call = call(request(&problem, "raw"), &memory, &memory, stream);
        engine.run(&[call]).map(drop)?;
        Ok(bench.process.calls("cuStreamWaitEvent") - before)
    };
    let mut inner = None;
    let outer = Graph::capture(&one, CaptureMode::Relaxed, |one| {
        assert_eq!(run(one)?, 1);
        inner = Some(Graph::capture(&two, CaptureMode::Relaxed, |two| {
            assert_eq!([run(two)?, run(one)?, run(two)?], [1, 0, 0]);
            Ok(())
        })?);
        assert_eq!(run(one)?, 0);
        Ok(())
    })
    .unwrap();
    // Each graph has one end mark, behind its wait for earlier calls and its last call.
    let mut marks = bench.process.marks();
    marks.sort();
    assert_eq!(marks, [(3, vec![3]), (4, vec![4])]);
    // A later call waits for one event, while the graphs exist and after they are destroyed.
    assert_eq!(run(&three).unwrap(), 1);
    drop((outer, inner));
    assert_eq!(run(&three).unwrap(), 1);
}
