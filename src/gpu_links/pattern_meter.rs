//! Measures traffic patterns on this machine's GPUs with copy kernels, as the library's kernels move data.
//!
//! All copies of a pattern wait for one event, and events on each stream time them. A copy that ended early would
//! leave its bandwidth to the others. So two short rounds find the rates, and in a third round each copy has as many
//! bytes as its rate moves in equal time.

use crate::error::{Error, ErrorKind, Result};
use crate::gpu::probe::{LateFill, Probe, check_peer};
use crate::gpu::{Context, Device, DeviceMemory, Driver, Event, PinnedMemory, Stream};
use crate::sys::cuda::CUdeviceptr;
use crate::topology::probe::{FlowEnd, PatternMeter, ProbeFlow};
use crate::topology::{BusId, GpuFacts, MachineGraph, NodeId, NodeKind, PeerAccess};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Bytes of each memory that copies read or write.
const BYTES: u64 = 32 << 20;

/// Bytes of each copy of the first round, which also warms up the links.
const FIRST_BYTES: u64 = 1 << 20;

/// Seconds of the second and third round.
const ROUNDS: [f64; 2] = [3e-3, 10e-3];

/// Timeout of one round.
const ROUND_TIMEOUT: Duration = Duration::from_secs(10);

/// Time that the host has to queue one copy before all copies start.
const QUEUE_TIME: Duration = Duration::from_micros(40);

/// Blocks of the copy kernels of one GPU together, and of one copy at most. All blocks are resident together.
const GPU_BLOCKS: u32 = 128;
const COPY_BLOCKS: u32 = 64;

/// Largest number of launches of one copy in a round.
const MOST_LAUNCHES: u64 = 1024;

/// Loads the kernels on a GPU: copies, and the kernel behind which all copies of a pattern start.
type LoadKernels<'a> = &'a dyn Fn(&Arc<Context>) -> Result<(Probe, LateFill)>;

/// A pattern meter on the GPUs of a machine.
#[derive(Debug)]
pub struct GpuPatternMeter {
    gpus: Vec<MeteredGpu>,
    /// For each ordered pair whether the first GPU accesses the second GPU's memory, and data arrives.
    access: Vec<bool>,
    host: BTreeMap<NodeId, HostBuffers>,
}

/// A GPU with the memory that flows from it read, and the memory that flows to it write.
#[derive(Debug)]
struct MeteredGpu {
    probe: Probe,
    gate: LateFill,
    source: DeviceMemory,
    target: DeviceMemory,
    /// Streams of this GPU's copies; grows as patterns need more.
    streams: Vec<Stream>,
}

/// Host memory of a socket: read by flows from it, and written by flows to it or through it.
#[derive(Debug)]
struct HostBuffers {
    source: PinnedMemory,
    target: PinnedMemory,
}

/// A copy by one GPU. A flow is one copy, or two through host memory.
#[derive(Clone, Copy, Debug)]
struct TimedCopy {
    flow: usize,
    gpu: usize,
    source: CUdeviceptr,
    target: CUdeviceptr,
    /// Bytes of the longest launch.
    room: u64,
}

impl GpuPatternMeter {
    /// Opens the GPUs of `graph`, and checks with data which of them access each other's memory. No pair does if
    /// `p2p_disable` is set.
    ///
    /// # Errors
    /// Unsupported without the CUDA driver or kernels, or if a GPU is hidden from this process or divided into slices;
    /// system, with the sizes, if memory is short; timeout; the driver's errors.
    pub fn new(graph: &MachineGraph, p2p_disable: bool) -> Result<GpuPatternMeter> {
        let load = |context: &Arc<Context>| Ok((Probe::new(context)?, LateFill::new(context)?));
        GpuPatternMeter::of(&Driver::load()?, graph, p2p_disable, &load)
    }

    /// Opens the GPUs as [`GpuPatternMeter::new`] does, with the kernels that `load` returns.
    fn of(
        driver: &Arc<Driver>,
        graph: &MachineGraph,
        p2p_disable: bool,
        load: LoadKernels<'_>,
    ) -> Result<GpuPatternMeter> {
        let devices = driver.devices()?;
        let open = |gpu: &GpuFacts| open(gpu, &devices, load);
        let gpus = graph.gpus.iter().map(open).collect::<Result<Vec<_>>>()?;
        let access = match p2p_disable {
            // Each GPU accesses its own memory.
            true => (0..gpus.len() * gpus.len())
                .map(|at| at % (gpus.len() + 1) == 0)
                .collect(),
            false => peer_access(&gpus)?,
        };
        Ok(GpuPatternMeter {
            gpus,
            access,
            host: BTreeMap::new(),
        })
    }

    /// Returns the pairs of GPUs that access each other's memory.
    pub fn peer_access(&self) -> PeerAccess {
        PeerAccess::Pairs(self.access.clone())
    }

    /// Allocates the host memory of a socket, at the first use.
    fn allocate_host(&mut self, graph: &MachineGraph, socket: NodeId) -> Result<()> {
        if self.host.contains_key(&socket) {
            return Ok(());
        }
        let gpu = self.gpus.first().ok_or_else(no_gpu)?;
        let name = &graph.nodes[socket].name;
        let node = name
            .strip_prefix("socket ")
            .and_then(|number| number.parse().ok());
        let context = gpu.probe.context();
        let memory = || PinnedMemory::near(context, BYTES as usize, node);
        let buffers = HostBuffers {
            source: memory()?,
            target: memory()?,
        };
        // SAFETY: this function alone has the memory.
        unsafe { gpu.probe.fill(buffers.source.address(), BYTES / 8, 2)? };
        self.host.insert(socket, buffers);
        Ok(())
    }

    /// Returns the copies of the flows. Copies that write to one memory write to distinct parts of it.
    fn copies(&mut self, graph: &MachineGraph, flows: &[ProbeFlow]) -> Result<Vec<TimedCopy>> {
        let mut copies = Vec::new();
        // Memory that each copy writes: of a GPU (`false`) or of a socket.
        let mut targets: Vec<(bool, usize)> = Vec::new();
        for (flow, ends) in flows.iter().enumerate() {
            let mut add = |gpu, source, target, place| {
                copies.push(TimedCopy {
                    flow,
                    gpu,
                    source,
                    target,
                    room: BYTES,
                });
                targets.push(place);
            };
            match (ends.from, ends.to) {
                (FlowEnd::Gpu(from), FlowEnd::Gpu(to)) => {
                    let mover = if ends.is_read { to } else { from };
                    let other = if ends.is_read { from } else { to };
                    let (source, target) = (self.source(from)?, self.target(to)?);
                    if self.access[mover * self.gpus.len() + other] {
                        add(mover, source, target, (false, to));
                        continue;
                    }
                    // The way of ranks without peer access: through memory of the receiver's socket.
                    let socket = socket_of(graph, to)?;
                    self.allocate_host(graph, socket)?;
                    let staging = self.host[&socket].target.address();
                    add(from, source, staging, (true, socket));
                    add(to, staging, target, (false, to));
                }
                (FlowEnd::Gpu(from), FlowEnd::Host(socket)) => {
                    self.allocate_host(graph, socket)?;
                    let target = self.host[&socket].target.address();
                    add(from, self.source(from)?, target, (true, socket));
                }
                (FlowEnd::Host(socket), FlowEnd::Gpu(to)) => {
                    self.allocate_host(graph, socket)?;
                    let source = self.host[&socket].source.address();
                    add(to, source, self.target(to)?, (false, to));
                }
                (FlowEnd::Host(_), FlowEnd::Host(_)) => {
                    let text = "a flow between host memories is not measured: no GPU moves it";
                    return Err(Error::invalid_argument(text));
                }
            }
        }
        for (copy, (offset, room)) in copies.iter_mut().zip(parts(&targets)) {
            copy.target += offset;
            // A copy out of staging memory may read any part of it.
            copy.room = room;
        }
        Ok(copies)
    }

    fn source(&self, gpu: usize) -> Result<CUdeviceptr> {
        Ok(self.gpus.get(gpu).ok_or_else(no_gpu)?.source.address())
    }

    fn target(&self, gpu: usize) -> Result<CUdeviceptr> {
        Ok(self.gpus.get(gpu).ok_or_else(no_gpu)?.target.address())
    }

    /// Runs all copies at once, each with its number of bytes, and returns the bytes per second of each.
    fn run(&mut self, copies: &[TimedCopy], bytes: &[u64]) -> Result<Vec<f64>> {
        let mut counts = vec![0usize; self.gpus.len()];
        let places: Vec<usize> = copies
            .iter()
            .map(|copy| {
                counts[copy.gpu] += 1;
                counts[copy.gpu] - 1
            })
            .collect();
        for (gpu, &count) in self.gpus.iter_mut().zip(&counts) {
            while gpu.streams.len() < count {
                gpu.streams.push(Stream::new(gpu.probe.context())?);
            }
        }
        let stream = |at: usize| &self.gpus[copies[at].gpu].streams[places[at]];
        let first = &self.gpus[copies[0].gpu];
        let gate = Event::new(first.probe.context())?;
        let delay = QUEUE_TIME * (copies.len() as u32 + 1);
        // SAFETY: this value alone has the memory, and `wait_all` waits for the kernel.
        unsafe {
            first
                .gate
                .queue((first.target.address(), 1), 3, delay, stream(0))?
        };
        gate.record(stream(0))?;
        let mut sent = Vec::new();
        let mut times = Vec::new();
        let queued = (0..copies.len()).try_for_each(|at| {
            let (copy, stream) = (copies[at], stream(at));
            let context = self.gpus[copy.gpu].probe.context();
            let (begin, end) = (Event::timed(context)?, Event::timed(context)?);
            stream.wait_event(&gate)?;
            begin.record(stream)?;
            let (launches, each) = launches(bytes[at], copy.room);
            let blocks = (GPU_BLOCKS / counts[copy.gpu] as u32).clamp(1, COPY_BLOCKS);
            let probe = &self.gpus[copy.gpu].probe;
            for _ in 0..launches {
                // SAFETY: `copies` checked peer access, so that the GPU reaches both ranges, which this value keeps
                // allocated. Only copies of this meter use them, and contents do not matter.
                unsafe { probe.queue_copy(copy.target, copy.source, each, blocks, stream)? };
            }
            end.record(stream)?;
            sent.push(launches * each);
            times.push((begin, end));
            Ok(())
        });
        // Waits for every stream even if queueing failed, because copies may run.
        let waited = (0..copies.len()).map(|at| stream(at).wait(ROUND_TIMEOUT));
        let waited: Vec<Result<()>> = waited.collect();
        queued.and(waited.into_iter().collect::<Result<()>>())?;
        let rate = |((begin, end), &bytes): (&(Event, Event), &u64)| {
            // The GPU's clock has a resolution of half a microsecond.
            Ok(bytes as f64 / end.since(begin)?.max(1e-6))
        };
        times.iter().zip(&sent).map(rate).collect()
    }
}

impl PatternMeter for GpuPatternMeter {
    fn measure(&mut self, graph: &MachineGraph, flows: &[ProbeFlow]) -> Result<Vec<u32>> {
        let copies = self.copies(graph, flows)?;
        if copies.is_empty() {
            return Ok(Vec::new());
        }
        let mut rates = self.run(&copies, &vec![FIRST_BYTES; copies.len()])?;
        for seconds in ROUNDS {
            let bytes: Vec<u64> = rates.iter().map(|rate| (rate * seconds) as u64).collect();
            rates = self.run(&copies, &bytes)?;
        }
        let of_flow = |flow: usize| {
            let of_copies = copies
                .iter()
                .zip(&rates)
                .filter(|(copy, _)| copy.flow == flow);
            let slowest = of_copies
                .map(|(_, &rate)| rate)
                .fold(f64::INFINITY, f64::min);
            (slowest / 1e6).round().max(1.0) as u32
        };
        Ok((0..flows.len()).map(of_flow).collect())
    }
}

/// Opens a GPU, and fills the memory that its flows read.
fn open(gpu: &GpuFacts, devices: &[Device], load: LoadKernels<'_>) -> Result<MeteredGpu> {
    let unsupported = |why: &str| {
        let text = format!("GPU {} cannot be measured: {why}", gpu.bus_id);
        Error::new(ErrorKind::Unsupported, text)
    };
    if gpu.mig {
        return Err(unsupported("it is divided into slices (MIG)"));
    }
    let is_at = |address: &str| address.to_ascii_lowercase().parse::<BusId>() == Ok(gpu.bus_id);
    let device = devices.iter().find(|device| is_at(&device.pci_bus_id));
    let hidden = "the CUDA driver does not list it; unset CUDA_VISIBLE_DEVICES";
    let context = Context::primary(device.ok_or_else(|| unsupported(hidden))?)?;
    let (probe, gate) = load(&context)?;
    let source = DeviceMemory::new(&context, BYTES as usize)?;
    // SAFETY: this function alone has the memory.
    unsafe { probe.fill(source.address(), BYTES / 8, 1)? };
    Ok(MeteredGpu {
        target: DeviceMemory::zeroed(&context, BYTES as usize, ROUND_TIMEOUT)?,
        streams: Vec::new(),
        source,
        gate,
        probe,
    })
}

/// Enables peer access between all pairs of GPUs, and returns the pairs where data arrives.
fn peer_access(gpus: &[MeteredGpu]) -> Result<Vec<bool>> {
    const CHECKED_WORDS: u64 = 1 << 13;
    let mut access = Vec::new();
    for (at, from) in gpus.iter().enumerate() {
        for (place, to) in gpus.iter().enumerate() {
            if at == place {
                access.push(true);
                continue;
            }
            if !from.probe.context().enable_peer(to.probe.context())? {
                access.push(false);
                continue;
            }
            let address = to.target.address();
            // SAFETY: `to` keeps the bytes, which the borrowed value does not free, and only this thread uses them.
            // The GPU was given access to them above.
            let checked = unsafe {
                let bytes = (CHECKED_WORDS * 8) as usize;
                let part = DeviceMemory::lent(to.probe.context(), address, bytes);
                check_peer(
                    &from.probe,
                    address,
                    &to.probe,
                    &part,
                    (at * gpus.len() + place) as u64,
                )
            };
            access.push(checked.is_ok());
        }
    }
    Ok(access)
}

fn socket_of(graph: &MachineGraph, gpu: usize) -> Result<NodeId> {
    let root = graph.ancestors(graph.gpus[gpu].node).last();
    root.filter(|&root| graph.nodes[root].kind == NodeKind::Socket)
        .ok_or_else(|| Error::internal(format!("GPU {gpu} is at no socket")))
}

fn no_gpu() -> Error {
    Error::invalid_argument("a flow names a GPU that the machine does not have")
}

/// Returns offset and size of the part of its memory that each copy writes. Copies with equal targets share it evenly.
fn parts<K: PartialEq>(targets: &[K]) -> Vec<(u64, u64)> {
    let part = |(at, target): (usize, &K)| {
        let count = |all: &[K]| all.iter().filter(|other| *other == target).count() as u64;
        // A part is a multiple of 256 bytes, as fast copies need.
        let room = BYTES / count(targets).max(1) / 256 * 256;
        (count(&targets[..at]) * room, room)
    };
    targets.iter().enumerate().map(part).collect()
}

/// Returns how often a copy kernel is launched to move about `bytes` bytes, and the bytes of each launch: a
/// multiple of 16 that is at most `room`.
fn launches(bytes: u64, room: u64) -> (u64, u64) {
    let count = bytes.div_ceil(room).clamp(1, MOST_LAUNCHES);
    let each = (bytes / count).clamp(1 << 16, room) / 16 * 16;
    (count, each)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::Module;
    use crate::gpu::probe::probe_word;
    use crate::sys::cuda::CuResult;
    use crate::sys::cuda::mock::MockMachine;
    use crate::topology::probe::{measure, plan};
    use crate::topology::{CpuSocket, Gpu, Machine, Paths, PciDevice};
    use std::sync::Mutex;

    /// Returns the graph of `count` GPUs at the addresses of the simulated driver, at one socket.
    fn graph(count: u8) -> MachineGraph {
        let gpu = |number: u8| PciDevice {
            gpu: Some(Gpu {
                dev: number.into(),
                ..Gpu::default()
            }),
            ..PciDevice::new(BusId::new(0, number, 0, 0))
        };
        let socket = CpuSocket {
            devices: (0..count).map(gpu).collect(),
            ..CpuSocket::default()
        };
        MachineGraph::new(&Machine {
            sockets: vec![socket],
            ..Machine::default()
        })
    }

    /// Targets of the copies of a simulated machine, each with its number of bytes.
    type Targets = Arc<Mutex<Vec<(u64, u64)>>>;

    /// Adds simulated kernels. Copies fault if their GPU does not reach both ranges, or if the source is zero.
    fn kernels(machine: &MockMachine) -> Targets {
        let targets = Targets::default();
        for (name, bytes) in [("cinch_probe_pingpong", 56), ("cinch_probe_late", 32)] {
            machine.kernel(name, bytes, |_| CuResult::SUCCESS);
        }
        machine.kernel("cinch_probe_fill", 24, |launch| {
            // SAFETY: every bit pattern of the integers is valid, and only the test has the memory.
            unsafe {
                let [target, words, seed]: [u64; 3] = launch.args();
                let Some(words) = launch.words(target, words) else {
                    return CuResult::ILLEGAL_ADDRESS;
                };
                words.fill(probe_word(seed, 0));
            }
            CuResult::SUCCESS
        });
        // Peer access works wherever the driver offers it.
        machine.kernel("cinch_probe_check", 32, |_| CuResult::SUCCESS);
        let copied = targets.clone();
        machine.kernel("cinch_probe_copy", 24, move |launch| {
            // SAFETY: every bit pattern of the integers is valid, and only the meter has the memory.
            unsafe {
                let [target, source, vectors]: [u64; 3] = launch.args();
                let bytes = vectors as usize * 16;
                let (Some(to), Some(from)) =
                    (launch.reach(target, bytes), launch.reach(source, bytes))
                else {
                    return CuResult::ILLEGAL_ADDRESS;
                };
                to.cast::<u64>().write(from.cast::<u64>().read());
                copied.lock().unwrap().push((target, bytes as u64));
                match from.cast::<u64>().read() {
                    0 => CuResult::INVALID_VALUE,
                    _ => CuResult::SUCCESS,
                }
            }
        });
        targets
    }

    fn meter(
        machine: &Arc<MockMachine>,
        graph: &MachineGraph,
        off: bool,
    ) -> Result<GpuPatternMeter> {
        let driver = Driver::with(Box::new(machine.process())).unwrap();
        let load = |context: &Arc<Context>| {
            let module = Module::load(context, "probe", &[0; 8])?;
            let function = |name: &str| module.function(name);
            Ok((Probe::of(context, function)?, LateFill::of(function)?))
        };
        GpuPatternMeter::of(&driver, graph, off, &load)
    }

    #[test]
    fn every_pattern_is_measured_by_gpus_that_reach_its_memory() {
        let graph = graph(3);
        let machine = MockMachine::new(3);
        machine.refuse_peers(0, 2);
        let targets = kernels(&machine);
        for off in [false, true] {
            let mut meter = meter(&machine, &graph, off).unwrap();
            let access = meter.peer_access();
            let expected = |at: usize| at.is_multiple_of(4) || !off && ![2, 6].contains(&at);
            assert_eq!(access, PeerAccess::Pairs((0..9).map(expected).collect()));
            let patterns = plan(&graph, &Paths::new(&graph, &access));
            assert!(patterns.len() > 20, "{}", patterns.len());
            for one in measure(&graph, patterns, &mut meter).unwrap() {
                assert!(one.mb_s.iter().all(|&mb_s| mb_s > 0), "{one:?}");
            }
            assert!(!targets.lock().unwrap().is_empty());
        }
    }

    #[test]
    fn flows_without_peer_access_go_through_host_memory() {
        let graph = graph(2);
        let machine = MockMachine::new(2);
        kernels(&machine);
        let flow = ProbeFlow {
            from: FlowEnd::Gpu(0),
            to: FlowEnd::Gpu(1),
            is_read: false,
        };
        for (off, expected) in [(false, vec![0]), (true, vec![0, 1])] {
            let mut meter = meter(&machine, &graph, off).unwrap();
            let copies = meter.copies(&graph, &[flow]).unwrap();
            let gpus: Vec<usize> = copies.iter().map(|copy| copy.gpu).collect();
            assert_eq!(gpus, expected);
            assert_eq!(copies.last().unwrap().target, meter.target(1).unwrap());
            if off {
                assert_eq!(copies[0].target, copies[1].source);
            }
        }
    }

    #[test]
    fn hidden_gpus_and_failing_copies_are_errors_with_a_reason() {
        let machine = MockMachine::new(1);
        kernels(&machine);
        let error = meter(&machine, &graph(2), false).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        for part in ["GPU 0000:01:00.0", "CUDA_VISIBLE_DEVICES"] {
            assert!(error.message().contains(part), "{part} is not in {error}");
        }
        let graph = graph(1);
        let mut meter = meter(&machine, &graph, false).unwrap();
        machine.kernel("cinch_probe_copy", 24, |_| CuResult::ILLEGAL_ADDRESS);
        let patterns = plan(&graph, &Paths::new(&graph, &PeerAccess::Never));
        let error = measure(&graph, patterns, &mut meter).unwrap_err();
        assert!(
            error.message().contains("while measuring GPU 0 to memory"),
            "{error}"
        );
    }

    #[test]
    fn copies_to_one_memory_write_distinct_parts_of_it() {
        let parts = parts(&[(false, 1), (true, 0), (false, 1), (false, 1)]);
        let third = BYTES / 3 / 256 * 256;
        assert_eq!(
            parts,
            [(0, third), (0, BYTES), (third, third), (2 * third, third)]
        );
    }

    #[test]
    fn launches_move_about_the_bytes_and_fit_the_memory() {
        for (bytes, room, expected) in [
            (0, BYTES, (1, 1 << 16)),
            (1 << 20, BYTES, (1, 1 << 20)),
            (3 * BYTES / 2, BYTES, (2, 3 * BYTES / 4)),
            (u64::MAX, BYTES, (MOST_LAUNCHES, BYTES)),
        ] {
            assert_eq!(launches(bytes, room), expected);
        }
    }
}
