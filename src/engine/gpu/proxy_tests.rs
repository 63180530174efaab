//! Ranks of several hosts, which are threads: simulated GPUs, kernels that are played on the host
//! (see `fake_kernel_tests.rs`), real proxies and real sockets on the loopback.

use super::super::abi::Args;
use super::super::fake_kernel::Kernel;
use super::super::kernels::Kernels;
use super::super::pack::Blob;
use super::super::{GpuCall, GpuEngine, Parts, Wiring};
use super::*;
use crate::bootstrap::LocalExchange;
use crate::codec;
use crate::config::Config;
use crate::error::ErrorKind;
use crate::gpu::{CaptureMode, Context, Device, DeviceMemory, Driver, Graph, Module, Stream};
use crate::mem::DeviceBuffers;
use crate::plan::{Request, Resident};
use crate::simd::Isa;
use crate::sys::cuda::CuResult;
use crate::sys::cuda::mock::{Machine as Gpus, Process};
use crate::testing::{Data, Pattern, Problem};
use crate::transport::ConnectContext;
use crate::transport::cuda::{self, PeerPath};
use crate::types::{Algorithm, Collective, DType, Protocol, ReduceOp, TransportKind};

const WAIT: Duration = Duration::from_secs(60);

struct World {
    process: Process,
    context: Arc<Context>,
    kernels: Arc<Kernels>,
    configs: Vec<Config>,
}

impl World {
    /// A rank on each of these hosts, all of one process and GPU.
    fn new(hosts: &[usize], config: &Config) -> World {
        let gpus = Gpus::new(1);
        let process = gpus.process();
        for (name, spec) in [
            ("cinch_move", "raw"),
            ("cinch_raw_f32", "raw"),
            ("cinch_coded_linear8_f32", "linear8"),
        ] {
            let codec = codec::build(spec.parse().unwrap(), Isa::Scalar).unwrap();
            gpus.kernel(name, size_of::<Args>(), move |launch| {
                // SAFETY: integers and addresses.
                let args: Args = unsafe { launch.args() };
                let mut bytes = args.blob.to_vec();
                if let Some(far) = launch.reach(args.far, 64 << 10) {
                    // SAFETY: a whole pinned buffer, which is written before the launch.
                    bytes = unsafe { std::slice::from_raw_parts(far, 64 << 10) }.to_vec();
                }
                let blob = Blob::read(&bytes, [args.nworks, args.nsteps, args.npeers]);
                Kernel::new(&args.comm, &blob, codec.as_deref()).run();
                CuResult::SUCCESS
            });
        }
        let driver = Driver::with(Box::new(process.clone())).unwrap();
        let context = Context::primary(&Device::at(&driver, 0).unwrap()).unwrap();
        let module = Module::load(&context, "played", &[0; 64]).unwrap();
        let kernels = Kernels::find_in(&context, &[module]).unwrap();
        let config_of = |host: &usize| Config {
            host_id: Some(format!("host {host}")),
            // The slots of ranks of one host lie in host memory: no kernel tries the paths.
            p2p_disable: true,
            protocol: Some(Protocol::Simple),
            ..config.clone()
        };
        World {
            process,
            context,
            kernels: Arc::new(kernels),
            configs: hosts.iter().map(config_of).collect(),
        }
    }

    /// Runs `body` as every rank.
    fn run<R: Send>(&self, body: impl Fn(&mut Rank) -> R + Sync) -> Vec<R> {
        let faults: Vec<Arc<Fault>> = self.configs.iter().map(|_| Fault::new()).collect();
        let exchanges = LocalExchange::world_of(&self.configs, &faults);
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

struct Rank {
    engine: Option<GpuEngine>,
    wiring: Arc<dyn Wiring>,
    paths: Vec<Option<PeerPath>>,
    context: Arc<Context>,
    stream: Stream,
    exchange: ExchangeRef,
    fault: Arc<Fault>,
    rank: usize,
    nranks: usize,
}

impl Rank {
    fn join(
        world: &World,
        exchange: Arc<LocalExchange>,
        fault: Arc<Fault>,
        config: &Config,
    ) -> Rank {
        let exchange: ExchangeRef = exchange;
        let connecting = ConnectContext {
            exchange: &*exchange,
            config,
            fault: &fault,
            deadline: Instant::now() + WAIT,
            verbs: None,
        };
        let links = cuda::connect(&connecting, &world.context).unwrap();
        let (paths, network) = (links.paths.clone(), links.take_network());
        let wiring: Arc<dyn Wiring> = Arc::new(links);
        let parts = Parts {
            context: world.context.clone(),
            kernels: world.kernels.clone(),
            wiring: wiring.clone(),
            exchange: exchange.clone(),
            fault: fault.clone(),
            resident: Resident::both(16),
            network,
        };
        let engine = GpuEngine::new(parts, config, Isa::Scalar).unwrap();
        Rank {
            engine: Some(engine),
            wiring,
            paths,
            context: world.context.clone(),
            stream: Stream::new(&world.context).unwrap(),
            rank: exchange.rank(),
            nranks: exchange.peers().len(),
            exchange,
            fault,
        }
    }

    fn engine(&mut self) -> &mut GpuEngine {
        self.engine.as_mut().unwrap()
    }

    fn memory(&self, bytes: usize) -> DeviceMemory {
        DeviceMemory::zeroed(&self.context, bytes.max(4), WAIT).unwrap()
    }

    fn holding(&self, bytes: &[u8]) -> DeviceMemory {
        let memory = self.memory(bytes.len());
        memory.write(0, bytes, &self.stream, WAIT).unwrap();
        memory
    }

    fn read(&self, memory: &DeviceMemory, bytes: usize) -> Vec<u8> {
        let mut found = vec![0; bytes];
        memory.read(0, &mut found, &self.stream, WAIT).unwrap();
        found
    }

    fn call(
        &self,
        request: Request,
        input: &DeviceMemory,
        output: &DeviceMemory,
    ) -> GpuCall<'static> {
        let place = |memory: &DeviceMemory| (memory.address(), memory.bytes());
        // SAFETY: live until the call has run, which it has when it returns.
        let buffers =
            unsafe { DeviceBuffers::new(place(input), place(output), self.stream.handle().0) };
        GpuCall { request, buffers }
    }
}

fn request(problem: &Problem, codec: &str) -> Request {
    let peer = match problem.collective {
        Collective::SendRecv => problem.peer,
        _ => 0,
    };
    Request {
        collective: problem.collective,
        dtype: problem.dtype,
        op: problem.op,
        count: problem.count,
        root: problem.root,
        peer,
        codec: codec.parse().unwrap(),
        auto: false,
        intra: codec.parse().unwrap(),
        algorithm: None,
        tensor: None,
        feedback: None,
    }
}

fn small() -> Config {
    Config {
        buffer_bytes: 4 << 20,
        timeout: Duration::from_secs(20),
        ..Config::default()
    }
}

fn inputs(problem: &Problem, seed: u64) -> Vec<Vec<u8>> {
    let data = Data {
        pattern: Pattern::Small,
        dtype: DType::F32,
        seed,
    };
    (0..problem.nranks)
        .map(|rank| data.vec(rank, problem.input_elements(rank)))
        .collect()
}

/// Every collective by every algorithm, one after the other over the same connections.
#[test]
fn ranks_of_several_hosts_have_what_the_definition_says() {
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
                    crate::schedule::Pattern::no_hierarchy(collective, &rank.hosts()).is_none();
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

impl Rank {
    fn hosts(&self) -> crate::schedule::Hosts {
        crate::schedule::Hosts::new(self.exchange.peers().iter().map(|peer| peer.host_id))
    }

    /// One call, and what it must give.
    fn one(
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
            assert!(found.unwrap().rms_rel_err() < 0.05, "{what}");
        }
    }
}

/// A graph's replays go on where the last launch ended: no counter is an argument.
#[test]
fn graphs_replay_over_the_network() {
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
            // SAFETY: live until the graph is dropped.
            let buffers = unsafe {
                DeviceBuffers::new(
                    place(call.buffers.input()),
                    place(call.buffers.output()),
                    stream.handle().0,
                )
            };
            GpuCall { buffers, ..call }
        };
        let engine = rank.engine.as_mut().unwrap();
        // Beside a call outside, before and behind.
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

/// Messages of a group to and from everybody, inside hosts and between them.
#[test]
fn groups_of_messages_meet_between_hosts() {
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

/// The rest of a message leaves although its rank goes at once.
#[test]
fn what_was_sent_arrives_although_the_sender_leaves() {
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

/// One rank's connections close while another's kernel waits for it.
#[test]
fn a_peer_that_is_gone_is_named_and_kernels_are_freed() {
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
        assert!(rank.wiring.trouble().is_none(), "no kernel had to time out");
    });
}

#[test]
fn a_peer_that_left_fails_nobody_who_does_not_wait() {
    let world = World::new(&[0, 1], &small());
    world.run(|rank| {
        if rank.rank == 1 {
            rank.engine = None;
            return;
        }
        std::thread::sleep(3 * GRACE);
        assert!(rank.fault.reason().is_none());
    });
}

/// The first of two senders leaves when its part is on its way; the other one is late.
#[test]
fn a_peer_that_left_fails_no_call_that_has_its_part() {
    let world = World::new(&[0, 1, 2], &small());
    world.run(|rank| {
        let mut problem = Problem::new(Collective::Gather, DType::F32, 3, 1000);
        problem.root = 0;
        let inputs = inputs(&problem, 4);
        let input = rank.holding(&inputs[rank.rank]);
        let bytes = 4 * problem.nranks * problem.count;
        let output = rank.memory(bytes);
        if rank.rank == 2 {
            std::thread::sleep(3 * GRACE);
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

/// What a kernel sent can no longer leave: the end of the communicator says so, and does not wait
/// for a peer that is gone.
#[test]
fn an_end_does_not_wait_for_a_peer_that_is_gone() {
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
        // The proxy looks at the connections at least this often.
        std::thread::sleep(20 * BEAT);
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
fn an_abort_frees_kernels_and_ends_the_proxy() {
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

/// Nothing of the driver's is left when communicators with proxies are gone, in order or not.
#[test]
fn nothing_is_left() {
    let world = World::new(&[0, 1], &small());
    for round in 0..3 {
        world.run(|rank| {
            rank.one(Collective::AllReduce, None, 10_000, "raw");
            if round == 2 && rank.rank == 0 {
                rank.fault.raise(Error::new(ErrorKind::Aborted, "a test"));
            }
        });
    }
    let leftovers = world.process.leftovers();
    let pinned = leftovers.iter().find(|left| left.contains("pinned"));
    assert_eq!(pinned, None, "{leftovers:?}");
}

/// Ranks that run different calls find out from the first message.
#[test]
fn calls_that_differ_are_found_by_the_kernels() {
    let world = World::new(&[0, 1], &small());
    world.run(|rank| {
        let count = 1000 + rank.rank;
        let problem = Problem::new(Collective::AllReduce, DType::F32, 2, count);
        let memory = rank.memory(4 * count);
        let call = rank.call(request(&problem, "raw"), &memory, &memory);
        // Told to the control side too, which may be first.
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

/// What this thread's proxy has had of a core, in seconds; there is one such thread.
fn proxy_seconds() -> f64 {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let mut nanoseconds = 0;
    for task in tasks {
        let path = task.unwrap().path();
        let name = std::fs::read_to_string(path.join("comm")).unwrap_or_default();
        if name.trim() == "cinch-proxy" {
            let text = std::fs::read_to_string(path.join("schedstat")).unwrap_or_default();
            let first = text.split(' ').next().unwrap_or_default();
            nanoseconds += first.parse::<u64>().unwrap_or(0);
        }
    }
    nanoseconds as f64 * 1e-9
}

/// Prints what the proxies of two ranks take while nothing is in flight, and while a kernel waits.
/// Run it alone: `cargo test --lib what_a_proxy_costs -- --ignored --nocapture`.
#[test]
#[ignore = "prints figures, which other tests beside it would disturb"]
fn what_a_proxy_costs() {
    const QUIET: Duration = Duration::from_secs(3);
    let world = World::new(&[0, 1], &small());
    world.run(|rank| {
        rank.one(Collective::AllReduce, None, 1000, "raw");
        let share = |rank: &Rank, what: &str, wait: &mut dyn FnMut()| {
            rank.exchange.barrier().unwrap();
            let before = proxy_seconds();
            wait();
            let took = (proxy_seconds() - before) / QUIET.as_secs_f64();
            if rank.rank == 1 {
                println!("{what}: both proxies took {:.2} % of a core", 100.0 * took);
            }
        };
        std::thread::sleep(2 * LIVELY);
        share(rank, "idle", &mut || std::thread::sleep(QUIET));
        rank.exchange.barrier().unwrap();
        if rank.rank == 1 {
            share(rank, "one rank's kernel waits", &mut || {
                std::thread::sleep(QUIET)
            });
        } else {
            rank.exchange.barrier().unwrap();
        }
        rank.one(Collective::AllReduce, None, 1000, "raw");
        let mut times: Vec<Duration> = Vec::new();
        for _ in 0..200 {
            rank.exchange.barrier().unwrap();
            let begin = Instant::now();
            rank.one(Collective::AllReduce, None, 4, "raw");
            times.push(begin.elapsed());
        }
        times.sort();
        if rank.rank == 0 {
            println!("16 bytes, kernels played on the host: {:?}", times[100]);
        }
        rank.exchange.barrier().unwrap();
    });
}
