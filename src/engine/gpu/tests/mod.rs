//! Tests engines of all ranks on a simulated GPU. Its kernels record their arguments, and
//! [`interpreter`] executes the records.

use super::*;
use crate::gpu::abi::{self, OneshotArgs, ScheduleArgs};
use interpreter::World;

use crate::bootstrap::LocalOutOfBand;
use crate::codec::FUSED_CODECS;
use crate::error::{Error, ErrorKind};
use crate::gpu::abi::{CommView, Protocol, TROUBLE_MISMATCH, TROUBLE_TIMEOUT, Trouble};
use crate::gpu::{CaptureMode, Device, DeviceMemory, Driver, Graph, Module};
use crate::gpu_links::PairLinks;
use crate::mem::PeerBufferLayout;
use crate::sys::cuda::CuResult;
use crate::sys::cuda::mock::{MockMachine as Gpus, Process};
use crate::testing::{Data, Pattern, Problem, plan_request};
use crate::types::{Algorithm, CodecSpec, DType, ReduceOp, Scalar};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

pub(super) mod fake_kernel;
mod fused;
pub(super) mod interpreter;
mod launch_order;
mod messages;
mod refusals;
mod residuals;
mod sample_window;
mod scales;
mod shared_launches;

pub(crate) const WAIT: Duration = Duration::from_secs(20);

/// The arguments of one recorded launch.
#[derive(Clone)]
enum Seen {
    WorkBuffer(String, WorkBuffer),
    Fused(String, Box<OneshotArgs>, u32),
}

/// A simulated GPU that records its launches.
pub(crate) struct Bench {
    pub(crate) process: Process,
    pub(crate) context: Arc<Context>,
    kernels: Arc<Kernels>,
    seen: Arc<Mutex<Vec<Seen>>>,
}

impl Bench {
    pub(crate) fn new() -> Bench {
        let gpus = Gpus::new(2);
        let process = gpus.process();
        let seen: Arc<Mutex<Vec<Seen>>> = Arc::default();
        for name in [
            "ncclDevKernel_cinch_move",
            "ncclDevKernel_cinch_move_ll",
            "ncclDevKernel_cinch_raw_f32",
            "ncclDevKernel_cinch_raw_f32_ll",
            "ncclDevKernel_cinch_coded_linear8_f32",
        ] {
            let seen = seen.clone();
            gpus.kernel(name, size_of::<ScheduleArgs>(), move |launch| {
                assert_eq!(launch.block, [abi::BLOCK_THREADS, 1, 1]);
                let stages = if name.starts_with("ncclDevKernel_cinch_coded_") {
                    16
                } else {
                    0
                };
                assert_eq!(launch.shared, stages * abi::STAGE_BYTES);
                // SAFETY: `ScheduleArgs` consists of integers and addresses, for which any bytes
                // are valid.
                let args: ScheduleArgs = unsafe { launch.args() };
                let counts = [args.nworks, args.nsteps, args.npeers];
                let mut bytes = args.work_buffer.to_vec();
                if let Some(far) = launch.reach(args.overflow, 64 << 10) {
                    // SAFETY: the engine's work buffer pool owns a pinned buffer of 64 KiB and
                    // wrote it before the launch.
                    bytes = unsafe { std::slice::from_raw_parts(far, 64 << 10) }.to_vec();
                }
                let work_buffer = WorkBuffer::read(&bytes, counts);
                assert_eq!(work_buffer.channels(), launch.grid[0] as usize);
                let seen_one = Seen::WorkBuffer(name.into(), work_buffer);
                seen.lock().unwrap().push(seen_one);
                CuResult::SUCCESS
            });
        }
        for name in [
            "ncclDevKernel_cinch_fused_f32_ll",
            "ncclDevKernel_cinch_fused_scatter_f32_ll",
            "ncclDevKernel_cinch_fused_two_shot_f32_ll",
            "ncclDevKernel_cinch_fused_move_ll",
            "ncclDevKernel_cinch_fused_scatter_move_ll",
            "ncclDevKernel_cinch_fused_f32_ll128",
            "ncclDevKernel_cinch_fused_two_shot_f32_ll128",
            "ncclDevKernel_cinch_fused_move_ll128",
            "ncclDevKernel_cinch_fused_from_root_move_ll128",
            "ncclDevKernel_cinch_fused_to_root_f32_ll128",
            "ncclDevKernel_cinch_fused_linear8_f32_ll",
            "ncclDevKernel_cinch_fused_linear8_f32_ll128",
            "ncclDevKernel_cinch_fused_dynamic8_bf16_ll128",
            "ncclDevKernel_cinch_fused_minmax4_f16_ll128",
        ] {
            let seen = seen.clone();
            gpus.kernel(name, size_of::<OneshotArgs>(), move |launch| {
                let has_stages = FUSED_CODECS.iter().any(|codec| name.contains(codec.name()));
                let stages = if has_stages { 16 } else { 0 };
                assert_eq!(launch.block, [abi::FUSED_THREADS, 1, 1]);
                assert_eq!(launch.shared, stages * abi::STAGE_BYTES);
                // SAFETY: `OneshotArgs` consists of integers and addresses, for which any bytes are
                // valid.
                let args: OneshotArgs = unsafe { launch.args() };
                let seen_one = Seen::Fused(name.into(), Box::new(args), launch.grid[0]);
                seen.lock().unwrap().push(seen_one);
                CuResult::SUCCESS
            });
        }
        let driver = Driver::with(Box::new(process.clone())).unwrap();
        let context = Context::primary(&Device::at(&driver, 0).unwrap()).unwrap();
        let module = Module::load(&context, "noted", &[0; 64]).unwrap();
        let kernels = Kernels::find_in(&context, &[module]).unwrap();
        Bench {
            process,
            context,
            kernels: Arc::new(kernels),
            seen,
        }
    }

    pub(crate) fn stream(&self) -> Stream {
        Stream::new(&self.context).unwrap()
    }

    pub(crate) fn memory(&self, bytes: usize) -> DeviceMemory {
        DeviceMemory::zeroed(&self.context, bytes.max(4), WAIT).unwrap()
    }

    /// Makes one engine for each rank of a communicator.
    pub(crate) fn ranks(&self, nranks: usize, resident: usize, config: &Config) -> Vec<Rank> {
        let faults: Vec<Arc<Fault>> = (0..nranks).map(|_| Fault::new()).collect();
        let exchanges = LocalOutOfBand::world_with(nranks, &faults, config);
        let ranks = exchanges.into_iter().zip(faults).enumerate();
        ranks
            .map(|(rank, (exchange, fault))| {
                let mut wires = Wires::new(rank, nranks);
                wires.whole_lines = config.protocol == Some(Protocol::Ll128);
                let wires = Arc::new(wires);
                let parts = EngineParts {
                    context: self.context.clone(),
                    kernels: self.kernels.clone(),
                    connections: wires.clone(),
                    exchange: exchange.clone(),
                    fault: fault.clone(),
                    resident: Resident::both(resident),
                    network: None,
                };
                let engine = GpuEngine::new(parts, config, Isa::Scalar).unwrap();
                Rank {
                    engine,
                    wires,
                    exchange,
                    fault,
                }
            })
            .collect()
    }

    /// Removes and returns the launches recorded since the last call of `take`.
    fn take(&self) -> Vec<Seen> {
        std::mem::take(&mut *self.seen.lock().unwrap())
    }

    /// Removes and returns the work buffers of those launches, which must be of schedule kernels.
    fn take_work_buffers(&self) -> Vec<WorkBuffer> {
        self.take().into_iter().map(work_buffer).collect()
    }

    /// Returns the element count of each call launched since the last call of `take` or `counts`.
    pub(crate) fn counts(&self) -> Vec<u64> {
        let counts = |seen| match seen {
            Seen::WorkBuffer(_, work_buffer) => {
                work_buffer.works().iter().map(|work| work.count).collect()
            }
            Seen::Fused(_, args, _) => vec![args.count],
        };
        self.take().into_iter().flat_map(counts).collect::<Vec<_>>()
    }
}

pub(crate) struct Rank {
    pub(crate) engine: GpuEngine,
    wires: Arc<Wires>,
    pub(crate) exchange: OutOfBandRef,
    pub(crate) fault: Arc<Fault>,
}

/// Connections without peer buffers, for simulated kernels that record their arguments and access
/// nothing.
#[derive(Debug)]
struct Wires {
    shape: PeerBufferLayout,
    rank: usize,
    whole_lines: bool,
    aborted: AtomicBool,
    unmapped: Arc<AtomicBool>,
    trouble: Mutex<Option<Trouble>>,
}

impl Wires {
    fn new(rank: usize, nranks: usize) -> Wires {
        Wires {
            shape: PeerBufferLayout::new(nranks, 64 << 20, 64).unwrap(),
            rank,
            whole_lines: false,
            aborted: AtomicBool::new(false),
            unmapped: Arc::default(),
            trouble: Mutex::new(None),
        }
    }
}

impl Connections for Wires {
    fn shape(&self) -> &PeerBufferLayout {
        &self.shape
    }
    fn view(&self, peers: &[u8], protocol: Protocol, timeout: Duration) -> CommView {
        CommView {
            inbox: [0; 32],
            outbox: [0; 32],
            cursors: 0,
            control: 0,
            timeout_ns: timeout.as_nanos() as u64,
            rank: self.rank as u32,
            nranks: self.shape.nranks() as u32,
            fifo: self.shape.fifo(protocol),
            protocol: protocol as u32,
            npeers: peers.len() as u32,
            ranks: std::array::from_fn(|peer| peers.get(peer).copied().unwrap_or(0)),
        }
    }
    fn epochs(&self) -> [u64; 2] {
        [0x1000, 0x1010]
    }
    fn abort(&self) {
        self.aborted.store(true, Ordering::Relaxed);
    }
    fn unmap(&self) {
        self.unmapped.store(true, Ordering::Relaxed);
    }
    fn unmap_local_peers(&self) -> bool {
        false
    }
    fn is_mapped_by_peers(&self) -> bool {
        false
    }
    fn trouble(&self) -> Option<Trouble> {
        *self.trouble.lock().unwrap()
    }
    fn lines_arrive_whole(&self) -> bool {
        self.whole_lines
    }
    fn pair_links(&self) -> PairLinks {
        match self.whole_lines {
            true => PairLinks::NVLINK,
            false => PairLinks::SPLITTING,
        }
    }
}

pub(super) fn request(problem: &Problem, codec: &str) -> Request {
    let request = plan_request(problem.collective, problem.count, codec);
    Request {
        dtype: problem.dtype,
        op: problem.op,
        root: problem.root,
        peer: if problem.collective == Collective::SendRecv {
            problem.peer
        } else {
            0
        },
        ..request
    }
}

fn call<'a>(
    request: Request,
    input: &'a DeviceMemory,
    output: &'a DeviceMemory,
    stream: &Stream,
) -> GpuCall<'a> {
    let buffers = buffers(input, output, stream);
    GpuCall { request, buffers }
}

pub(crate) fn buffers<'a>(
    input: &'a DeviceMemory,
    output: &'a DeviceMemory,
    stream: &Stream,
) -> DeviceBuffers<'a> {
    let place = |memory: &DeviceMemory| (memory.address(), memory.bytes());
    // SAFETY: `input` and `output` outlive the call, which has run when the engine returns.
    unsafe { DeviceBuffers::new(place(input), place(output), stream.handle().addr()) }
}

/// CUDA does not define what happens to freed memory that another process still maps.
#[test]
fn closed_engine_unmaps_peers_and_rejects_calls() {
    let bench = Bench::new();
    let stream = bench.stream();
    let memory = bench.memory(4096);
    let problem = Problem::new(Collective::AllReduce, DType::F32, 2, 1000);
    for is_captured in [false, true] {
        let mut ranks = bench.ranks(2, 16, &simple());
        let Rank {
            mut engine, wires, ..
        } = ranks.remove(0);
        let unmapped = wires.unmapped.clone();
        drop(wires);
        let mut run = |stream: &Stream| {
            let call = call(request(&problem, "raw"), &memory, &memory, stream);
            engine.run(&[call]).map(drop)
        };
        run(&stream).unwrap();
        let capture = || Graph::capture(&stream, CaptureMode::Relaxed, &mut run).unwrap();
        let graph = is_captured.then(capture);
        engine.close();
        // A replay would use the connections, so the memory stays mapped if a call was captured.
        assert_eq!(unmapped.load(Ordering::Relaxed), !is_captured);
        let call = call(request(&problem, "raw"), &memory, &memory, &stream);
        let error = engine.run(&[call]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidUsage, "{error}");
        drop(graph);
    }
}

/// Returns the work buffer of the launch, which must be of a schedule kernel.
fn work_buffer(seen: Seen) -> WorkBuffer {
    let Seen::WorkBuffer(_, work_buffer) = seen else {
        panic!("a fused launch")
    };
    work_buffer
}

fn simple() -> Config {
    Config {
        protocol: Some(Protocol::Simple),
        kernel: Some(crate::types::Kernel::Schedule),
        ..Config::default()
    }
}

#[test]
fn collective_is_one_launch_with_the_reference_result() {
    let bench = Bench::new();
    let stream = bench.stream();
    for nranks in [2, 3, 8] {
        let mut ranks = bench.ranks(nranks, 16, &simple());
        for collective in Collective::ALL {
            for count in [1, 100_003] {
                let problem = Problem::new(collective, DType::F32, nranks, count);
                let data = Data {
                    pattern: Pattern::Small,
                    dtype: DType::F32,
                    seed: 5,
                };
                let inputs: Vec<Vec<u8>> = (0..nranks)
                    .map(|rank| data.vec(rank, problem.input_elements(rank)))
                    .collect();
                let memory: Vec<_> = (0..nranks)
                    .map(|rank| {
                        let input = bench.memory(inputs[rank].len());
                        input.write(0, &inputs[rank], &stream, WAIT).unwrap();
                        (input, bench.memory(4 * problem.output_elements(rank)))
                    })
                    .collect();
                let mut launches = Vec::new();
                for (rank, (input, output)) in memory.iter().enumerate() {
                    let at_work = collective != Collective::SendRecv
                        || [problem.root, problem.peer].contains(&rank);
                    if at_work {
                        let call = call(request(&problem, "raw"), input, output, &stream);
                        let reports = ranks[rank].engine.run(&[call]).unwrap();
                        assert_eq!(reports[0].transport, Some(TransportKind::Cuda));
                    }
                    launches.push(bench.take_work_buffers());
                    assert_eq!(launches[rank].len(), usize::from(at_work));
                }
                // Collectives that run rings in both directions need three slots, others two.
                let slots = 2 + usize::from(crate::schedule::has_several_rings(collective));
                assert!(
                    World::new(&launches, None, slots).run(),
                    "{collective} on {nranks}"
                );
                for (rank, (_, output)) in memory.iter().enumerate() {
                    let mut bytes = vec![0; 4 * problem.output_elements(rank)];
                    output.read(0, &mut bytes, &stream, WAIT).unwrap();
                    let found = problem.check(&inputs, rank, &bytes, 0.0).unwrap();
                    assert_eq!(found.wrong, 0, "{collective} of {count} on {nranks}");
                }
            }
        }
    }
}

/// A factor in device memory reaches the kernels as its address.
#[test]
fn device_factor_is_passed_by_address() {
    let bench = Bench::new();
    let stream = bench.stream();
    let mut ranks = bench.ranks(2, 16, &Config::default());
    let memory = bench.memory(4 << 20);
    for (count, codec) in [(1000, "raw"), (1 << 20, "raw"), (1 << 20, "linear8")] {
        let mut problem = Problem::new(Collective::AllReduce, DType::F32, 2, count);
        problem.op = ReduceOp::PreMulSum(Scalar::Device(memory.address() + 64));
        let call = call(request(&problem, codec), &memory, &memory, &stream);
        ranks[0].engine.run(&[call]).unwrap();
        let (factor, flags) = match &bench.take()[0] {
            Seen::WorkBuffer(_, work_buffer) => {
                (work_buffer.works()[0].factor, work_buffer.works()[0].flags)
            }
            Seen::Fused(_, args, _) => (args.factor, args.flags),
        };
        assert_eq!(factor, memory.address() + 64);
        let both = abi::PREMULTIPLY | abi::FACTOR_AT;
        assert_eq!(flags & both, both, "{count} {codec}");
    }
}

#[test]
fn small_sums_use_fused_kernels_and_count_wire_bytes() {
    let bench = Bench::new();
    let stream = bench.stream();
    let mut ranks = bench.ranks(4, 16, &Config::default());
    let memory = bench.memory(4 << 20);
    let mut run = |count: usize, codec: &str, op| {
        let mut problem = Problem::new(Collective::AllReduce, DType::F32, 4, count);
        problem.op = op;
        let call = call(request(&problem, codec), &memory, &memory, &stream);
        (ranks[1].engine.run(&[call]).unwrap()[0], bench.take())
    };
    let (report, seen) = run(1000, "raw", ReduceOp::Avg);
    let Seen::Fused(_, args, grid) = &seen[0] else {
        panic!("not fused")
    };
    assert_eq!((args.count, *grid as usize), (1000, report.channels));
    assert_eq!(
        args.flags,
        abi::AVERAGE | abi::ALIGNED | abi::LAUNCH_DEPENDENTS
    );
    assert_eq!(
        (report.algorithm, report.wire_bytes),
        (Algorithm::OneShot, 12_000)
    );
    // GPUs that are not all connected by one switch use a ring, in which each rank sends three
    // quarters of the message twice.
    let (report, _) = run(1 << 20, "raw", ReduceOp::Sum);
    assert_eq!(
        (report.algorithm, report.wire_bytes),
        (Algorithm::Ring, 6 << 20)
    );
    let (report, seen) = run(1 << 20, "linear8", ReduceOp::Sum);
    assert_eq!(report.wire_bytes, (6 << 20) / 4 / 256 * 260);
    let Seen::WorkBuffer(name, work_buffer) = &seen[0] else {
        panic!("fused")
    };
    assert_eq!(name, "ncclDevKernel_cinch_coded_linear8_f32");
    assert_eq!(work_buffer.works()[0].codec.word[0], 8, "log2 of a block");
    let (report, seen) = run(0, "raw", ReduceOp::Sum);
    assert!(seen.is_empty() && report.transport.is_none());
}

#[test]
fn single_rank_call_is_a_copy() {
    let bench = Bench::new();
    let stream = bench.stream();
    let mut ranks = bench.ranks(1, 16, &Config::default());
    let (input, output) = (bench.memory(40), bench.memory(40));
    input.fill(7, &stream).unwrap();
    let problem = Problem::new(Collective::AllReduce, DType::F32, 1, 10);
    let report = ranks[0]
        .engine
        .run(&[call(request(&problem, "raw"), &input, &output, &stream)])
        .unwrap()[0];
    assert!(bench.take().is_empty() && report.transport.is_none());
    let mut bytes = [0; 40];
    output.read(0, &mut bytes, &stream, WAIT).unwrap();
    assert_eq!(bytes, [7; 40]);
}

#[test]
fn kernel_failure_is_reported_on_all_ranks_and_aborts_kernels() {
    let bench = Bench::new();
    let signature = |count| {
        let problem = Problem::new(Collective::AllReduce, DType::F32, 3, count);
        request(&problem, "raw")
            .signature(Algorithm::Direct, CodecSpec::RAW, 4)
            .words()
    };
    let report = Trouble {
        state: 2,
        peer: 2,
        channel: 5,
        step: 3,
        pass: 9,
        expected: 77,
        seen: 75,
        mine: signature(1024),
        theirs: signature(1000),
        ..Trouble::default()
    };
    for (kind, error_kind, words) in [
        (
            TROUBLE_TIMEOUT,
            ErrorKind::Timeout,
            vec![
                "rank 2",
                "rank 1",
                "step 3 of pass 9 on channel 5",
                "77",
                "75",
                "1024",
            ],
        ),
        (
            TROUBLE_MISMATCH,
            ErrorKind::Mismatch,
            vec!["rank 2", "rank 1", "1024", "1000", "call 4"],
        ),
    ] {
        let ranks = bench.ranks(3, 16, &Config::default());
        *ranks[1].wires.trouble.lock().unwrap() = Some(Trouble { kind, ..report });
        for rank in &ranks {
            let begin = std::time::Instant::now();
            while !rank.wires.aborted.load(Ordering::Relaxed) {
                assert!(begin.elapsed() < WAIT, "no abort");
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        let error = ranks[1].fault.check().unwrap_err();
        assert_eq!(error.kind(), error_kind);
        for word in words {
            assert!(error.message().contains(word), "{word}: {error}");
        }
    }
}

#[test]
fn kernel_that_never_ends_keeps_its_memory() {
    let bench = Bench::new();
    let stream = bench.stream();
    let config = Config {
        timeout: Duration::from_millis(10),
        ..simple()
    };
    let mut ranks = bench.ranks(2, 16, &config);
    let memory = bench.memory(4096);
    let problem = Problem::new(Collective::AllReduce, DType::F32, 2, 1000);
    let fed = Request {
        feedback: Some(1),
        ..request(&problem, "linear8")
    };
    let call = call(fed, &memory, &memory, &stream);
    ranks[0].engine.run(&[call]).unwrap();
    bench.process.hang(true);
    let wires = ranks[0].wires.clone();
    let aborted = Error::new(ErrorKind::Aborted, "a test");
    ranks[0].fault.raise(aborted);
    drop(ranks);
    assert!(wires.aborted.load(Ordering::Relaxed), "it was told to stop");
    assert!(Arc::strong_count(&wires) > 1, "its memory is kept");
    let kept = "1 queued device allocations".to_string();
    assert!(bench.process.leftovers().contains(&kept), "residuals too");
    bench.process.hang(false);
    let begin = Instant::now();
    while Arc::strong_count(&wires) > 1 || bench.process.leftovers().contains(&kept) {
        assert!(begin.elapsed() < WAIT, "nobody frees it");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The deadline of calls limits waits for peers, and not the caller's earlier work on the stream.
#[test]
fn teardown_waits_for_earlier_work_of_the_stream() {
    let bench = Bench::new();
    let stream = bench.stream();
    let config = Config {
        timeout: Duration::from_millis(10),
        ..simple()
    };
    let memory = bench.memory(4096);
    let problem = Problem::new(Collective::AllReduce, DType::F32, 2, 1000);
    for fails in [false, true] {
        let mut ranks = bench.ranks(2, 16, &config);
        let call = call(request(&problem, "raw"), &memory, &memory, &stream);
        ranks[0].engine.run(&[call]).unwrap();
        let (wires, fault) = (ranks[0].wires.clone(), ranks[0].fault.clone());
        bench.process.hang(true);
        std::thread::scope(|scope| {
            scope.spawn(|| drop(ranks));
            std::thread::sleep(20 * config.timeout);
            assert!(!wires.aborted.load(Ordering::Relaxed));
            assert!(fault.reason().is_none());
            match fails {
                true => _ = fault.raise(Error::new(ErrorKind::Aborted, "a test")),
                false => bench.process.hang(false),
            }
        });
        assert_eq!(wires.aborted.load(Ordering::Relaxed), fails);
        bench.process.hang(false);
    }
}
