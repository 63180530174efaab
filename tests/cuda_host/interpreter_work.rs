//! Calls for kernels of the schedule interpreter, with the memory of each rank.

use cinch::engine::gpu::pack::Addresses;
use cinch::gpu::abi::{RESIDUALS_BYTES, SCALES_BYTES};
use cinch::plan::{GpuLimits, Limits, Plan, Request, Resident};
use cinch::schedule::Groups;
use cinch::testing::{Data, set_value};
use cinch::types::{
    Algorithm, Call, CallTuning, Collective, Extent, Fused, InPlace, KernelProtocol, ReduceOp,
    Scalar,
};
use std::fmt;

/// A call that all ranks make, perhaps several times, with a named codec and algorithm.
#[derive(Clone, Debug)]
pub struct Work {
    pub call: Call,
    pub nranks: usize,
    /// The kernel that runs the call.
    pub kernel: KernelProtocol,
    /// Largest number of blocks of a launch.
    pub blocks: usize,
    /// Whether input and output overlap by the collective's in-place rule.
    pub in_place: bool,
    /// Distance in elements of the buffers from an aligned address.
    pub shift: usize,
    pub data: Data,
    /// How often the call is made, with other data each time. Error feedback and kept scales act from the second time
    /// on.
    pub times: usize,
    /// Whether an element is not finite, or large, in the second of several calls or the only one.
    pub is_poisoned: bool,
}

impl Work {
    /// Returns the hosts of the ranks, which are several for hierarchical schedules only.
    pub fn hosts(&self) -> Groups {
        match self.call.algorithm {
            Some(Algorithm::Hierarchical) => {
                Groups::of_hosts((0..self.nranks).map(|rank| rank / 2))
            }
            _ => Groups::ONE,
        }
    }

    /// Returns the limits under which the call is planned, with `base` for all ranks of the world.
    pub fn limits(&self, base: &Limits) -> Limits {
        let resident = Resident {
            channels: self.blocks,
            fused: self.blocks,
        };
        let forced = |gpu: GpuLimits| GpuLimits {
            resident,
            ..gpu.forced(self.kernel)
        };
        Limits {
            hosts: self.hosts(),
            gpu: base.gpu.clone().map(forced),
            ..base.clone()
        }
    }

    /// Returns the operator of a rank: each rank has its own factor.
    pub fn op(&self, rank: usize) -> ReduceOp {
        match self.call.op {
            ReduceOp::PreMulSum(Scalar::Float(factor)) => {
                ReduceOp::PreMulSum(Scalar::Float(factor + rank as f64 / 4.0))
            }
            ReduceOp::PreMulSum(Scalar::Int(factor)) => {
                ReduceOp::PreMulSum(Scalar::Int(factor + rank as i128))
            }
            op => op,
        }
    }

    pub fn request(&self) -> Request {
        let call = &self.call;
        Request {
            collective: call.collective,
            dtype: call.dtype,
            op: call.op,
            count: call.count,
            root: call.root,
            peer: call.peer,
            codec: call.codec.unwrap(),
            algorithm: call.algorithm,
            tuning: CallTuning::AUTO,
            tensor: call.tensor,
            feedback: call.feedback,
            fused: Fused::ALONE,
        }
    }

    /// Returns whether `rank` makes the call: only two ranks make a send/recv.
    pub fn takes_part(&self, rank: usize) -> bool {
        !self.call.collective.is_message() || [self.call.root, self.call.peer].contains(&rank)
    }

    /// Returns the bytes of input and output of a rank.
    pub fn bytes(&self, rank: usize) -> [usize; 2] {
        let is_root = rank == self.call.root;
        let collective = self.call.collective;
        if !self.takes_part(rank) {
            return [0, 0];
        }
        [
            collective.input_extent(is_root),
            collective.output_extent(is_root),
        ]
        .map(|extent: Extent| {
            let elements = extent.elements(self.call.count, self.nranks).unwrap();
            elements * self.call.dtype.size()
        })
    }

    /// Returns the input of a rank for the call number `time`.
    pub fn input(&self, rank: usize, time: usize) -> Vec<u8> {
        let (dtype, elements) = (
            self.call.dtype,
            self.bytes(rank)[0] / self.call.dtype.size(),
        );
        let data = Data {
            seed: self.data.seed + time as u64,
            ..self.data
        };
        let mut input = data.vec(rank, elements);
        let is_now = time == 1 || self.times == 1;
        if self.is_poisoned && is_now && rank + 1 == self.nranks && elements > 0 {
            let places = [0, elements * 2 / 3, elements - 1];
            let at = places[(self.data.seed / 3 % 3) as usize] * dtype.size();
            // Sums with the large element may leave the range of the type.
            let large = if dtype.size() == 1 { 400.0 } else { 6e4 };
            let x = [f64::NAN, f64::INFINITY, large][(self.data.seed % 3) as usize];
            set_value(dtype, x, &mut input[at..][..dtype.size()]);
        }
        input
    }

    /// Returns the offsets of input and output in a rank's memory, and the bytes of the memory.
    fn places(&self, rank: usize) -> ([usize; 2], usize) {
        let [sent, got] = self.bytes(rank);
        let begin = GUARD + self.shift * self.call.dtype.size();
        let own = rank * self.call.count * self.call.dtype.size();
        let apart = (begin + sent).next_multiple_of(16) + GUARD;
        let output = apart + self.shift % 2 * self.call.dtype.size();
        let rule = match self.in_place && sent > 0 && got > 0 {
            true => self.call.collective.in_place(),
            false => InPlace::Never,
        };
        let places = match rule {
            InPlace::Same => [begin, begin],
            InPlace::InputInOutput => [begin + own, begin],
            InPlace::OutputInInput => [begin, begin + own],
            InPlace::Never => [begin, output],
        };
        (places, apart + got.max(sent) + 2 * GUARD)
    }
}

impl fmt::Display for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Call {
            collective,
            dtype,
            op,
            count,
            root,
            ..
        } = self.call;
        write!(
            f,
            "{collective} of {count} {dtype} ({}) root {root} on {} ranks, {:?}, {}, codec {}, {} \
             blocks, in place {}, shift {}, {} times, seed {}",
            op.name(),
            self.nranks,
            self.call.algorithm,
            self.kernel,
            self.call.codec.unwrap(),
            self.blocks,
            self.in_place,
            self.shift,
            self.times,
            self.data.seed
        )
    }
}

/// Bytes around buffers that no kernel may change.
const GUARD: usize = 64;

/// The buffers of one rank in memory that is aligned to 16 bytes.
pub struct Buffers {
    memory: Vec<u128>,
    before: Vec<u8>,
    places: [usize; 2],
    bytes: [usize; 2],
}

impl Buffers {
    pub fn new(work: &Work, rank: usize) -> Buffers {
        let (places, bytes) = work.places(rank);
        let mut buffers = Buffers {
            memory: vec![u128::MAX / 255 * 0xa5; bytes.div_ceil(16)],
            before: Vec::new(),
            places,
            bytes: work.bytes(rank),
        };
        buffers.before = buffers.slice_mut().to_vec();
        buffers.reset(&work.input(rank, 0));
        buffers
    }

    /// Puts an input in place and all other bytes back, for the next time of the call.
    pub fn reset(&mut self, input: &[u8]) {
        let mut before = std::mem::take(&mut self.before);
        before[self.places[0]..][..input.len()].copy_from_slice(input);
        self.slice_mut().copy_from_slice(&before);
        self.before = before;
    }

    fn slice_mut(&mut self) -> &mut [u8] {
        let bytes = size_of_val(&self.memory[..]);
        // SAFETY: the vectors are initialised and have this many bytes; `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.memory.as_mut_ptr().cast(), bytes) }
    }

    /// Returns the addresses for a kernel; 0 for a buffer that the rank does not have.
    pub fn addresses(&mut self) -> Addresses {
        let base = self.memory.as_mut_ptr().expose_provenance();
        let [input, output] = [0, 1].map(|at| match self.bytes[at] {
            0 => 0,
            _ => (base + self.places[at]) as u64,
        });
        Addresses { input, output }
    }

    /// Returns the output.
    ///
    /// # Panics
    /// If bytes around the output changed.
    pub fn output(&mut self, what: &dyn fmt::Display) -> Vec<u8> {
        let (begin, end) = (self.places[1], self.places[1] + self.bytes[1]);
        let before = std::mem::take(&mut self.before);
        let now = self.slice_mut();
        let same = now[..begin] == before[..begin] && now[end..] == before[end..];
        assert!(same, "{what}: bytes around the output changed");
        let output = now[begin..end].to_vec();
        self.before = before;
        output
    }
}

/// The residuals of one rank: a header and two arrays of fp32 numbers.
pub struct Residuals {
    memory: Vec<u128>,
    span: usize,
}

impl Residuals {
    pub fn new(work: &Work) -> Residuals {
        let blocks = match work.call.collective.splits_input() {
            true => work.nranks,
            false => 1,
        };
        let span = work.call.count * blocks;
        let bytes = RESIDUALS_BYTES + 2 * span * size_of::<f32>();
        Residuals {
            memory: vec![0; bytes.div_ceil(16)],
            span,
        }
    }

    /// Returns the address and the number of elements of an array.
    pub fn place(&mut self) -> (u64, u64) {
        let address = self.memory.as_mut_ptr().expose_provenance();
        (address as u64, self.span as u64)
    }
}

/// The kept scales of one rank: a header and one fp32 number for each chunk.
pub struct Scales {
    memory: Vec<u128>,
}

impl Scales {
    pub fn new(work: &Work, plan: &Plan) -> Scales {
        let blocks = match work.call.collective.has_blocks() {
            true => work.nranks,
            false => 1,
        };
        let chunks = work.call.count * blocks / plan.geometry.chunk() + blocks + 1;
        let bytes = SCALES_BYTES + chunks * size_of::<f32>();
        Scales {
            memory: vec![0; bytes.div_ceil(16)],
        }
    }

    pub fn address(&mut self) -> u64 {
        self.memory.as_mut_ptr().expose_provenance() as u64
    }
}

/// Returns the collectives of `reduces` calls, each with every algorithm.
pub fn shapes(reduces: impl Fn(Collective) -> bool) -> Vec<(Collective, Algorithm)> {
    let collectives = Collective::ALL.into_iter().filter(|&one| reduces(one));
    collectives
        .flat_map(|collective| Algorithm::ALL.map(|algorithm| (collective, algorithm)))
        .collect()
}
