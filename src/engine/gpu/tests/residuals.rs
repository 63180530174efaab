//! Tests the memory of residuals of error feedback on a GPU, and its lifetime.

use super::*;
use crate::codec::feedback::{Feedback, Role};

/// Calls that name one tensor find its residuals at the same address; another tensor has its residuals in
/// other memory. During a capture no residuals are allocated.
#[test]
fn residuals_of_one_shape_keep_their_memory() {
    let bench = Bench::new();
    let stream = bench.stream();
    let mut ranks = bench.ranks(3, 16, &Config::default());
    let engine = &mut ranks[0].engine;
    let memory = bench.memory(4 << 20);
    let fed = |tensor: u64, collective, count: usize, codec: &str| {
        let problem = Problem::new(collective, DType::F32, 3, count);
        Request {
            feedback: Some(tensor),
            ..request(&problem, codec)
        }
    };
    let mut place = |request: Request| {
        engine
            .run(&[call(request, &memory, &memory, &stream)])
            .unwrap();
        match &bench.take()[0] {
            Seen::WorkBuffer(_, work_buffer) => (
                work_buffer.works()[0].residuals,
                work_buffer.works()[0].span,
            ),
            Seen::Fused(_, args, _) => (args.residuals, args.span),
        }
    };
    let sum = Collective::AllReduce;
    let first = place(fed(1, sum, 5000, "linear8"));
    assert!(first.0 != 0 && first.1 == 5000);
    assert_eq!(place(fed(1, sum, 5000, "linear8")), first);
    let other = place(fed(2, sum, 5000, "linear8"));
    assert!(other.0.abs_diff(first.0) >= 8 * 5000);
    // A smaller call reuses the memory; a larger call allocates anew.
    assert_eq!(place(fed(1, sum, 4000, "linear8")), (first.0, 4000));
    assert_ne!(place(fed(1, sum, 9000, "linear8")).0, first.0);
    let parts = place(fed(3, Collective::ReduceScatter, 5000, "linear8"));
    assert_eq!(parts.1, 15_000);
    // A raw call loses no information, so it has no residuals.
    assert_eq!(place(fed(4, sum, 5000, "raw")), (0, 0));

    let captured = Graph::capture(&stream, CaptureMode::ThreadLocal, |stream| {
        let known = fed(2, sum, 5000, "linear8");
        engine.run(&[call(known, &memory, &memory, stream)])?;
        let unknown = fed(5, sum, 5000, "linear8");
        let error = engine
            .run(&[call(unknown, &memory, &memory, stream)])
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidUsage);
        assert!(error.message().contains("tensor 5"), "{error}");
        Ok(())
    });
    captured.unwrap();
}

/// A graph replay uses the residual buffer that the captured call used. Importing or forgetting residuals
/// writes into that buffer. Calls with another number of elements do not reuse the buffer.
#[test]
fn residuals_held_by_a_graph_keep_their_memory() {
    let bench = Bench::new();
    let stream = bench.stream();
    let mut ranks = bench.ranks(3, 16, &Config::default());
    let engine = &mut ranks[0].engine;
    let memory = bench.memory(4 << 20);
    let fed = |count: usize| Request {
        feedback: Some(1),
        ..request(
            &Problem::new(Collective::AllReduce, DType::F32, 3, count),
            "linear8",
        )
    };
    let place = |engine: &mut GpuEngine, count: usize| {
        engine
            .run(&[call(fed(count), &memory, &memory, &stream)])
            .unwrap();
        match &bench.take()[0] {
            Seen::WorkBuffer(_, work_buffer) => work_buffer.works()[0].residuals,
            Seen::Fused(_, args, _) => args.residuals,
        }
    };
    let kept = |engine: &GpuEngine| {
        let feedback = engine.export_residuals().unwrap();
        let residuals = feedback.residuals(1).unwrap();
        residuals.sum_squares()
    };
    let first = place(engine, 5000);
    let _graph = Graph::capture(&stream, CaptureMode::ThreadLocal, |stream| {
        engine
            .run(&[call(fed(5000), &memory, &memory, stream)])
            .map(drop)
    });
    let mut feedback = engine.export_residuals().unwrap();
    let mut residuals = feedback.take(1);
    residuals.put(Role::Worker, 0, vec![1.0; 5000]);
    feedback.give_back(1, residuals);
    engine.import_residuals(&feedback).unwrap();
    assert_eq!(kept(engine), 5000.0);
    assert_eq!(place(engine, 5000), first);
    engine.forget_residuals(None).unwrap();
    assert_eq!(kept(engine), 0.0);
    assert_eq!(place(engine, 5000), first);
    engine.import_residuals(&feedback).unwrap();
    engine.import_residuals(&Feedback::new()).unwrap();
    assert_eq!(kept(engine), 0.0);
    assert_eq!(place(engine, 5000), first);
    assert_ne!(place(engine, 4000), first);
}

/// Residuals that were imported and not used keep that mark when they are exported and imported, as
/// a rescale does. Other residuals do not get the mark.
#[test]
fn imported_residuals_stay_marked_until_first_use() {
    let bench = Bench::new();
    let stream = bench.stream();
    let mut ranks = bench.ranks(3, 16, &Config::default());
    let engine = &mut ranks[0].engine;
    let memory = bench.memory(4 << 20);
    let run = |engine: &mut GpuEngine, count: usize| {
        let problem = Problem::new(Collective::AllReduce, DType::F32, 3, count);
        let fed = Request {
            feedback: Some(1),
            ..request(&problem, "linear8")
        };
        engine.run(&[call(fed, &memory, &memory, &stream)]).unwrap();
    };
    // Exports and imports residuals, as `rescale_residuals` does.
    let over_the_host = |engine: &mut GpuEngine| {
        let feedback = engine.export_residuals().unwrap();
        engine.import_residuals(&feedback).unwrap();
        feedback
    };
    let is_restored = |feedback: &Feedback| feedback.residuals(1).unwrap().is_restored();
    run(engine, 5000);
    assert!(!is_restored(&over_the_host(engine)));
    let kept = over_the_host(engine);
    assert!(!is_restored(&kept));
    let imported = Feedback::import(&kept.export(0, 3), 0, 3).unwrap();
    for count in [5000, 4000] {
        engine.import_residuals(&imported).unwrap();
        assert!(is_restored(&over_the_host(engine)));
        assert!(is_restored(&over_the_host(engine)));
        // A call with another count drops the imported residuals and logs a warning.
        run(engine, count);
        assert!(!is_restored(&over_the_host(engine)));
    }
}

/// The deadline of calls limits waits for peers, and not the caller's earlier work on the stream.
#[test]
fn residual_export_waits_behind_other_work() {
    let bench = Bench::new();
    let stream = bench.stream();
    let config = Config {
        timeout: Duration::from_millis(10),
        ..simple()
    };
    let mut ranks = bench.ranks(2, 16, &config);
    let memory = bench.memory(4096);
    let fed = Request {
        feedback: Some(1),
        ..request(
            &Problem::new(Collective::AllReduce, DType::F32, 2, 1000),
            "linear8",
        )
    };
    let engine = &mut ranks[0].engine;
    engine.run(&[call(fed, &memory, &memory, &stream)]).unwrap();
    let behind = |waits: &mut dyn FnMut()| {
        bench.process.hang(true);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(20 * config.timeout);
                bench.process.hang(false);
            });
            waits();
        });
    };
    let mut kept = Feedback::new();
    behind(&mut || kept = engine.export_residuals().unwrap());
    assert!(kept.residuals(1).is_some());
    behind(&mut || engine.import_residuals(&kept).unwrap());
    behind(&mut || engine.forget_residuals(None).unwrap());
    assert!(engine.export_residuals().unwrap().residuals(1).is_none());
}

/// A group that names more tensors than the limit fails as a whole, even if none of them has
/// residuals yet.
#[test]
fn group_with_too_many_tensors_fails_as_a_whole() {
    let bench = Bench::new();
    let stream = bench.stream();
    let mut ranks = bench.ranks(2, 16, &simple());
    let engine = &mut ranks[0].engine;
    let memory = bench.memory(4096);
    let problem = Problem::new(Collective::AllReduce, DType::F32, 2, 64);
    let fed = |tensor: u64| Request {
        feedback: Some(tensor),
        ..request(&problem, "linear8")
    };
    let calls: Vec<_> = (0..=65_536)
        .map(|tensor| call(fed(tensor), &memory, &memory, &stream))
        .collect();
    let error = engine.run(&calls).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidUsage);
    assert!(error.message().contains("tensor 65536"), "{error}");
    assert!(bench.take().is_empty());
    engine.run(&calls[65_536..]).unwrap();
    let kept = engine.export_residuals().unwrap();
    assert_eq!(
        kept.iter().map(|(tensor, _)| tensor).collect::<Vec<_>>(),
        [65_536]
    );
}
