//! Emulates the ranks of a communicator, which run the kernels of the schedule interpreter on the
//! host side by side (`block.h`).

use super::interpreter_work::{Buffers, Residuals, Scales, Work};
use super::library::{Library, starts};
use cinch::CallStatistics;
use cinch::codec::kernel_params;
use cinch::cpu::Isa;
use cinch::engine::gpu::kernels;
use cinch::engine::gpu::pack::{self, PackedSchedule, WorkBuffer};
use cinch::engine::gpu::signature_hash;
use cinch::error::ErrorKind;
use cinch::gpu::abi::{
    CodecWords, CommView, Control, KernelWork, MAX_PEERS, SUMS_OFFSET, ScheduleArgs,
    StatisticsSums, Trouble, WORK_BUFFER_BYTES, cursors_bytes,
};
use cinch::mem::PeerBufferLayout;
use cinch::plan::{Limits, Plan, Planner};
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::Arc;

/// The type of `test_interpreter` in `interpreter.cpp`: a kernel, the number of ranks, and the
/// blocks and arguments of each rank.
type Launch = unsafe extern "C" fn(*const c_void, u32, *const u32, *const ScheduleArgs);

/// The schedule kernels of one file of `kernels/entry/`, compiled for the host.
pub struct Kernels {
    library: Library,
    launch: Launch,
}

impl Kernels {
    /// Compiles `kernels/entry/ENTRY.cu`; `None`, with a message, if there is no g++.
    pub fn compile(entry: &str) -> Option<Kernels> {
        if !starts("g++") {
            println!("skipped: no g++ is here to compile the kernels");
            return None;
        }
        let define = format!("-DCINCH_ENTRY=\"entry/{entry}.cu\"");
        // Optimisation would take longer than the tests save by it.
        let options = [
            "-O0",
            "-Wno-unknown-pragmas",
            "-Wno-unused-function",
            &define,
        ];
        let library = Library::compile("g++", "interpreter", &options, &["tests/cuda_host/host"]);
        let launch = library.find("test_interpreter");
        // SAFETY: `interpreter.cpp` defines `test_interpreter` with the parameters of `Launch`.
        let launch = unsafe { std::mem::transmute::<*mut c_void, Launch>(launch) };
        Some(Kernels { library, launch })
    }

    /// Returns the kernel of a plan.
    fn kernel(&self, plan: &Plan) -> *const c_void {
        let name = kernels::name_for(plan);
        let found = self.library.look_up(&name);
        found.unwrap_or_else(|| panic!("{name} is missing"))
    }

    /// Returns whether the file defines this kernel.
    pub fn has(&self, name: &str) -> bool {
        self.library.look_up(name).is_some()
    }
}

/// The memory that one rank has for a call.
pub struct RankMemory {
    pub buffers: Buffers,
    /// With error feedback.
    pub residuals: Option<Residuals>,
    /// With a codec that keeps scales.
    pub scales: Option<Scales>,
    /// With a kernel that writes them.
    pub statistics: Option<CallStatistics>,
}

/// The memory of all ranks of a communicator, and the number of calls that they have made.
pub struct World {
    limits: Limits,
    shape: PeerBufferLayout,
    /// The peer buffer that rank `from` writes and rank `to` reads is element `from * ranks + to`.
    peer_buffers: Vec<Vec<u128>>,
    cursors: Vec<Vec<u64>>,
    controls: Vec<Control>,
    /// Number of calls so far: of collectives, or of messages by sender and receiver.
    calls: HashMap<Option<(usize, usize)>, u64>,
}

impl World {
    /// Creates ranks with these limits, whose peer buffers have the layout `shape`.
    pub fn new(limits: Limits, shape: PeerBufferLayout) -> World {
        let ranks = limits.nranks;
        let words = (cursors_bytes(ranks) + SUMS_OFFSET + size_of::<StatisticsSums>()) / 8;
        let control = Control {
            abort: 0,
            unused: [0; 31],
            trouble: Trouble::default(),
        };
        World {
            limits,
            peer_buffers: vec![vec![0; shape.bytes().div_ceil(16)]; ranks * ranks],
            shape,
            cursors: vec![vec![0; words]; ranks],
            controls: vec![control; ranks],
            calls: HashMap::new(),
        }
    }

    /// Returns the plan of `rank` for a call, with the kernel that the call forces; `None` if there
    /// is none.
    pub fn plan(&self, work: &Work, rank: usize) -> Option<Arc<Plan>> {
        let mut limits = work.limits(&self.limits);
        limits.algorithm = None;
        let mut planner = Planner::new(limits, rank, Isa::Scalar);
        match planner.plan(&work.request()) {
            Ok(plan) => {
                let runs =
                    plan.kernel == work.kernel && Some(plan.algorithm) == work.call.algorithm;
                runs.then_some(plan)
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
                None
            }
        }
    }

    /// Makes a call on all ranks, each with an element of `memory`; returns the failure that a rank reported, if any.
    pub fn run(
        &mut self,
        library: &Kernels,
        work: &Work,
        plans: &[Arc<Plan>],
        memory: &mut [RankMemory],
    ) -> Result<(), Box<Trouble>> {
        let kernel = library.kernel(&plans[0]);
        let sequence = self.sequence(work);
        // The launches of each rank, one after the other.
        let ranks = plans.iter().zip(memory);
        let mut launches: Vec<std::vec::IntoIter<WorkBuffer>> = ranks
            .map(|(plan, memory)| work_buffers(work, sequence, plan, memory))
            .map(Vec::into_iter)
            .collect();
        loop {
            let next = launches
                .iter_mut()
                .map(|launches| launches.next().unwrap_or_default());
            let next: Vec<WorkBuffer> = next.collect();
            if next.iter().all(WorkBuffer::is_empty) {
                return Ok(());
            }
            self.launch(library, kernel, work, &next)?;
        }
    }

    /// Makes calls of one kernel in one launch of each rank, each on channels of its own. `memory` has that of the ranks for
    /// each call.
    pub fn run_together(
        &mut self,
        library: &Kernels,
        calls: &[(&Work, &[Arc<Plan>])],
        memory: &mut [Vec<RankMemory>],
    ) -> Result<(), Box<Trouble>> {
        let mut launches = vec![WorkBuffer::default(); self.limits.nranks];
        let mut first_channel = 0;
        for (&(work, plans), memory) in calls.iter().zip(memory) {
            let sequence = self.sequence(work);
            for (rank, launch) in launches.iter_mut().enumerate() {
                let plan = &plans[rank];
                let packed = PackedSchedule::launches(&plan.schedule, &plan.pattern).unwrap();
                let mut one = work_item(work, sequence, plan, &mut memory[rank]);
                one.first_channel = first_channel;
                launch.add(&packed[0], one).unwrap();
            }
            first_channel += plans[0].channels as u16;
        }
        let (work, plans) = calls[0];
        self.launch(library, library.kernel(&plans[0]), work, &launches)
    }

    /// Returns the number of a call, which counts the calls that the same ranks made before.
    fn sequence(&mut self, work: &Work) -> u64 {
        let pair = (work.call.root, work.call.peer);
        let key = work.call.collective.is_message().then_some(pair);
        let number = self.calls.entry(key);
        *number.and_modify(|calls| *calls += 1).or_insert(0)
    }

    /// Runs a launch of each rank; an empty one stands for none.
    fn launch(
        &mut self,
        library: &Kernels,
        kernel: *const c_void,
        work: &Work,
        launches: &[WorkBuffer],
    ) -> Result<(), Box<Trouble>> {
        let ranks = self.limits.nranks;
        let packed: Vec<Vec<u8>> = launches
            .iter()
            .map(|launch| {
                let mut bytes = vec![0; launch.len().max(WORK_BUFFER_BYTES)];
                launch.write(&mut bytes);
                bytes
            })
            .collect();
        let args: Vec<ScheduleArgs> = (0..ranks)
            .map(|rank| self.args(work, rank, &launches[rank], &packed[rank]))
            .collect();
        let blocks: Vec<u32> = (0..ranks)
            .map(|rank| match work.takes_part(rank) {
                true => launches[rank].channels() as u32,
                false => 0,
            })
            .collect();
        // SAFETY: `kernel` is a schedule kernel of this library. There are blocks and arguments for
        // each rank, and all memory that the arguments point to outlives the call.
        unsafe {
            (library.launch)(kernel, ranks as u32, blocks.as_ptr(), args.as_ptr());
        }
        match self.controls.iter().find(|one| one.trouble.state != 0) {
            Some(one) => Err(Box::new(one.trouble)),
            None => Ok(()),
        }
    }

    fn args(
        &mut self,
        work: &Work,
        rank: usize,
        launch: &WorkBuffer,
        packed: &[u8],
    ) -> ScheduleArgs {
        let [nworks, nsteps, npeers] = launch.counts();
        let mut work_buffer = [0; WORK_BUFFER_BYTES];
        let fits = launch.len() <= WORK_BUFFER_BYTES;
        if fits {
            work_buffer.copy_from_slice(&packed[..WORK_BUFFER_BYTES]);
        }
        ScheduleArgs {
            comm: self.view(work, rank, launch.ranks()),
            overflow: if fits {
                0
            } else {
                packed.as_ptr().addr() as u64
            },
            nworks,
            nsteps,
            npeers,
            unused: 0,
            work_buffer,
        }
    }

    fn view(&mut self, work: &Work, rank: usize, peers: &[u8]) -> CommView {
        let ranks = self.limits.nranks;
        let mut buffer = |from: usize, to: usize| match from == to {
            true => 0,
            false => self.peer_buffers[from * ranks + to].as_mut_ptr().addr() as u64,
        };
        let mut view = CommView {
            inbox: [0; MAX_PEERS],
            outbox: [0; MAX_PEERS],
            cursors: 0,
            control: 0,
            // The emulated clock advances at each reading, so this ends a wait that hangs.
            timeout_ns: 100_000_000,
            rank: rank as u32,
            nranks: ranks as u32,
            fifo: self.shape.fifo(work.kernel.protocol),
            protocol: work.kernel.number(),
            npeers: peers.len() as u32,
            ranks: [0; MAX_PEERS],
        };
        for (number, &peer) in peers.iter().enumerate() {
            view.ranks[number] = peer;
            view.inbox[number] = buffer(peer.into(), rank);
            view.outbox[number] = buffer(rank, peer.into());
        }
        view.cursors = self.cursors[rank].as_mut_ptr().addr() as u64;
        view.control = (&raw mut self.controls[rank]).addr() as u64;
        view
    }
}

/// Returns the work item of each launch of a rank, with its steps.
fn work_buffers(
    work: &Work,
    sequence: u64,
    plan: &Plan,
    memory: &mut RankMemory,
) -> Vec<WorkBuffer> {
    let packed = PackedSchedule::launches(&plan.schedule, &plan.pattern).unwrap();
    let packed_count = packed.len();
    let mut one = work_item(work, sequence, plan, memory);
    let launches = packed.iter().enumerate().map(|(number, packed)| {
        let mut launch = WorkBuffer::default();
        one.ends = u8::from(number + 1 == packed_count);
        launch.add(packed, one).unwrap();
        launch
    });
    launches.collect()
}

/// Returns the work item of a rank, without its steps.
fn work_item(work: &Work, sequence: u64, plan: &Plan, memory: &mut RankMemory) -> KernelWork {
    let rank = plan.schedule.rank;
    let mut one = pack::work(plan, work.op(rank), memory.buffers.addresses()).unwrap();
    let signature = work
        .request()
        .signature(plan.algorithm, plan.specs.intra, sequence)
        .words();
    (one.signature, one.signature_hash) = (signature, signature_hash(signature));
    if let Some(residuals) = &mut memory.residuals {
        (one.residuals, one.span) = residuals.place();
    }
    one.scales = memory.scales.as_mut().map_or(0, Scales::address);
    one.statistics = memory.statistics.as_mut().map_or(0, |place| {
        std::ptr::from_mut(place).expose_provenance() as u64
    });
    one.codec = codec_words(plan, sequence);
    one
}

/// Returns the codec's parameters for number `sequence`, or without a codec the size of an element.
fn codec_words(plan: &Plan, sequence: u64) -> CodecWords {
    let mut word = [0; 8];
    match &plan.codec {
        Some(codec) => {
            let limit = codec.element_limit().unwrap_or(0.0);
            let draws = Plan::draws(plan.specs.inter, sequence, plan.schedule.rank);
            word = kernel_params(plan.specs.inter, limit, draws);
        }
        None => word[0] = plan.dtype.size() as u32,
    }
    CodecWords { word }
}
