//! Ranks on several simulated hosts, as threads of one process. GPUs are simulated, and kernels run on the
//! host (`engine/gpu/tests/fake_kernel.rs`). Proxies, and sockets on the loopback, are real.

use super::super::super::kernels::Kernels;
use super::super::super::pack::WorkBuffer;
use super::super::super::tests::fake_kernel::Kernel;
use super::super::super::tests::request;
use super::super::super::{Connections, EngineParts, GpuCall, GpuEngine};
use super::WAIT;
use crate::bootstrap::{LocalOutOfBand, OutOfBandRef};
use crate::codec;
use crate::config::Config;
use crate::cpu::Isa;
use crate::gpu::abi::ScheduleArgs;
use crate::gpu::{Context, Device, DeviceMemory, Driver, Module, Stream};
use crate::gpu_links::{self, PeerPath};
use crate::mem::DeviceBuffers;
use crate::plan::{Request, Resident};
use crate::schedule::Groups;
use crate::sync::Fault;
use crate::sys::cuda::CuResult;
use crate::sys::cuda::mock::{MockMachine as Gpus, Process};
use crate::testing::{Data, Pattern, Problem};
use crate::transport::ConnectContext;
use crate::types::{Algorithm, Collective, DType, KernelProtocol, ReduceOp, TransportKind};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(super) struct World {
    pub process: Process,
    context: Arc<Context>,
    kernels: Arc<Kernels>,
    configs: Vec<Config>,
}

impl World {
    /// Creates ranks on the given hosts. All ranks share one process and one GPU.
    pub fn new(hosts: &[usize], config: &Config) -> World {
        let gpus = Gpus::new(1);
        let process = gpus.process();
        for (name, spec) in [
            ("ncclDevKernel_cinch_move", "raw"),
            ("ncclDevKernel_cinch_raw_f32", "raw"),
            ("ncclDevKernel_cinch_coded_linear8_f32", "linear8"),
        ] {
            let codec = codec::build(spec.parse().unwrap(), Isa::Scalar).unwrap();
            gpus.kernel(name, size_of::<ScheduleArgs>(), move |launch| {
                // SAFETY: `ScheduleArgs` consists of integers and addresses, for which any bytes
                // are valid.
                let args: ScheduleArgs = unsafe { launch.args() };
                let mut bytes = args.work_buffer.to_vec();
                if let Some(far) = launch.reach(args.overflow, 64 << 10) {
                    // SAFETY: the engine's work buffer pool owns a pinned buffer of 64 KiB and
                    // wrote it before the launch.
                    bytes = unsafe { std::slice::from_raw_parts(far, 64 << 10) }.to_vec();
                }
                let work_buffer = WorkBuffer::read(&bytes, [args.nworks, args.nsteps, args.npeers]);
                Kernel::new(&args.comm, &work_buffer, codec.as_deref()).run();
                CuResult::SUCCESS
            });
        }
        let driver = Driver::with(Box::new(process.clone())).unwrap();
        let context = Context::primary(&Device::at(&driver, 0).unwrap()).unwrap();
        let module = Module::load(&context, "played", &[0; 64]).unwrap();
        let kernels = Kernels::find_in(&context, &[module]).unwrap();
        let config_of = |host: &usize| Config {
            host_id: Some(format!("host {host}")),
            // Without peer access, slots of ranks on one host lie in host memory, and no probe
            // kernel runs.
            p2p_disable: true,
            protocol: Some(KernelProtocol::SIMPLE.protocol),
            kernel: Some(KernelProtocol::SIMPLE.kernel),
            ..config.clone()
        };
        World {
            process,
            context,
            kernels: Arc::new(kernels),
            configs: hosts.iter().map(config_of).collect(),
        }
    }

    /// Runs `body` on every rank, each on its own thread.
    pub fn run<R: Send>(&self, body: impl Fn(&mut Rank) -> R + Sync) -> Vec<R> {
        let faults: Vec<Arc<Fault>> = self.configs.iter().map(|_| Fault::new()).collect();
        let exchanges = LocalOutOfBand::world_of(&self.configs, &faults);
        std::thread::scope(|scope| {
            let ranks = exchanges.into_iter().zip(faults).zip(&self.configs);
            let threads: Vec<_> = ranks
                .map(|((exchange, fault), config)| {
                    let body = &body;
                    scope.spawn(move || body(&mut Rank::join(self, exchange, fault, config)))
                })
                .collect();
            let join = |thread: std::thread::ScopedJoinHandle<'_, R>| thread.join().unwrap();
            threads.into_iter().map(join).collect()
        })
    }
}

pub(super) struct Rank {
    pub engine: Option<GpuEngine>,
    pub connections: Arc<dyn Connections>,
    pub paths: Vec<Option<PeerPath>>,
    pub context: Arc<Context>,
    pub stream: Stream,
    pub exchange: OutOfBandRef,
    pub fault: Arc<Fault>,
    pub rank: usize,
    pub nranks: usize,
}

impl Rank {
    fn join(
        world: &World,
        exchange: Arc<LocalOutOfBand>,
        fault: Arc<Fault>,
        config: &Config,
    ) -> Rank {
        let exchange: OutOfBandRef = exchange;
        let connecting = ConnectContext {
            exchange: &*exchange,
            config,
            fault: &fault,
            deadline: Instant::now() + WAIT,
            place: crate::topology::RankPlace::Unknown,
            sys: std::path::Path::new(crate::sys::numa::SYS),
            verbs: None,
        };
        let links = gpu_links::connect(&connecting, &world.context).unwrap();
        let (paths, network) = (links.paths.clone(), links.take_network());
        let connections: Arc<dyn Connections> = Arc::new(links);
        let parts = EngineParts {
            context: world.context.clone(),
            kernels: world.kernels.clone(),
            connections: connections.clone(),
            exchange: exchange.clone(),
            fault: fault.clone(),
            resident: Resident::both(16),
            network,
        };
        let engine = GpuEngine::new(parts, config, Isa::Scalar).unwrap();
        Rank {
            engine: Some(engine),
            connections,
            paths,
            context: world.context.clone(),
            stream: Stream::new(&world.context).unwrap(),
            rank: exchange.rank(),
            nranks: exchange.peers().len(),
            exchange,
            fault,
        }
    }

    pub fn engine(&mut self) -> &mut GpuEngine {
        self.engine.as_mut().unwrap()
    }

    pub fn memory(&self, bytes: usize) -> DeviceMemory {
        DeviceMemory::zeroed(&self.context, bytes.max(4), WAIT).unwrap()
    }

    pub fn holding(&self, bytes: &[u8]) -> DeviceMemory {
        let memory = self.memory(bytes.len());
        memory.write(0, bytes, &self.stream, WAIT).unwrap();
        memory
    }

    pub fn read(&self, memory: &DeviceMemory, bytes: usize) -> Vec<u8> {
        let mut found = vec![0; bytes];
        memory.read(0, &mut found, &self.stream, WAIT).unwrap();
        found
    }

    pub fn call(
        &self,
        request: Request,
        input: &DeviceMemory,
        output: &DeviceMemory,
    ) -> GpuCall<'static> {
        let place = |memory: &DeviceMemory| (memory.address(), memory.bytes());
        // SAFETY: the callers keep `input` and `output` until the simulated call, which runs at
        // once, has returned.
        let buffers =
            unsafe { DeviceBuffers::new(place(input), place(output), self.stream.handle().addr()) };
        GpuCall { request, buffers }
    }
}

pub(super) fn small() -> Config {
    Config {
        buffer_bytes: 4 << 20,
        timeout: Duration::from_secs(20),
        ..Config::default()
    }
}

pub(super) fn inputs(problem: &Problem, seed: u64) -> Vec<Vec<u8>> {
    let data = Data {
        pattern: Pattern::Small,
        dtype: DType::F32,
        seed,
    };
    (0..problem.nranks)
        .map(|rank| data.vec(rank, problem.input_elements(rank)))
        .collect()
}

impl Rank {
    pub fn hosts(&self) -> Groups {
        Groups::of_hosts(self.exchange.peers().iter().map(|peer| peer.host_id))
    }

    /// Runs one call and checks its result.
    pub fn one(
        &mut self,
        collective: Collective,
        algorithm: Option<Algorithm>,
        count: usize,
        codec: &str,
    ) {
        let mut problem = Problem::new(collective, DType::F32, self.nranks, count);
        if collective.reduces() {
            problem.op = ReduceOp::Avg;
        }
        let inputs = inputs(&problem, count as u64);
        let at_work =
            collective != Collective::SendRecv || [problem.root, problem.peer].contains(&self.rank);
        let input = self.holding(&inputs[self.rank]);
        let bytes = 4 * problem.output_elements(self.rank);
        let output = self.memory(bytes);
        let what = format!("{collective} by {algorithm:?} of {count} in {codec}");
        if at_work {
            let call = self.call(
                Request {
                    algorithm,
                    ..request(&problem, codec)
                },
                &input,
                &output,
            );
            let report = self.engine().run(&[call]).expect(&what)[0];
            if report.wire_bytes > 0 && collective != Collective::SendRecv {
                assert_eq!(report.transport, Some(TransportKind::Tcp), "{what}");
            }
        }
        let found = self.read(&output, bytes);
        assert_eq!(self.fault.reason(), None, "{what}");
        if codec == "raw" {
            let found = problem.check(&inputs, self.rank, &found, 0.0).unwrap();
            assert_eq!(found.wrong, 0, "{what} on rank {}", self.rank);
        } else {
            let found = problem.check(&inputs, self.rank, &found, f64::INFINITY);
            let found = found.unwrap();
            assert!(found.max_abs_err.is_finite(), "{what}");
            assert!(found.rms_rel_err() < 0.05, "{what}");
        }
    }
}
