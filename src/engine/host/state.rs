//! State that the steps of a call share: scratch memory, unfinished sums, input statistics and reducers. Also
//! the keys of residuals that are kept from call to call.

use crate::codec::feedback::{Residuals, Role, Shape};
use crate::codec::{EncodeStats, RoundingRandom, TensorScales};
use crate::cpu::{Isa, Tile};
use crate::error::Result;
use crate::plan::{Plan, Request};
use crate::reduce::{Reducer, scale_of};
use crate::schedule::{Op, Own, Step, Visit, WalkCursor};
use crate::types::{CodecSpec, DType, ReduceOp};

/// Number of elements of a tile. It is a power of two that holds the largest block. It is small
/// enough that accumulators, source and destination fit into a first-level cache together.
pub(super) const TILE: usize = 4096;

/// Working memory of an engine.
#[derive(Debug)]
pub(super) struct Scratch {
    /// Accumulators of the sum.
    pub acc: Tile,
    /// This rank's contribution, if it is not the first term of the sum.
    pub own: Tile,
    /// Elements on their way between a buffer and the accumulators.
    pub bytes: Vec<u8>,
    /// This rank's encoded contribution. Some steps add the values that peers get when they decode this
    /// contribution.
    pub wire: Vec<u8>,
    /// Decoded result of an encode with error feedback. Empty before the first such encode.
    pub decoded: Tile,
    /// A message that goes to slots when it is complete. Empty if no connection prefers that.
    pub stage: Tile,
    /// Whether a connection may prefer that.
    pub may_stage: bool,
}

impl Scratch {
    pub(super) fn new(may_stage: bool) -> Scratch {
        Scratch {
            acc: Tile::new(TILE),
            own: Tile::new(TILE),
            bytes: vec![0; TILE * 8],
            wire: Vec::new(),
            decoded: Tile::new(0),
            stage: Tile::new(0),
            may_stage,
        }
    }

    /// Makes room for the tiles and encodings of `plan`, and begins a new call in its kept scales and
    /// residuals. All allocation of the call happens here and in `Run::reserve_residuals`, so that steps need none.
    pub(super) fn prepare(
        &mut self,
        plan: &Plan,
        scales: Option<&mut TensorScales>,
        feedback: Option<(Shape, &mut Residuals)>,
    ) {
        let chunk = plan.geometry.chunk();
        let steps = &plan.schedule.steps;
        let chained = steps.iter().any(|step| step.more && step.op.sums());
        let coded = steps
            .iter()
            .any(|step| matches!(step.own, Own::Coded { .. }));
        let wire = if coded && plan.is_coded() {
            plan.wire_bytes(chunk)
        } else {
            0
        };
        // A chain of steps and kept scales need a whole chunk in the accumulators.
        let tile = if chained || scales.is_some() {
            chunk.max(TILE)
        } else {
            TILE
        };
        self.reserve(tile, wire);
        if self.may_stage {
            let messages = steps.iter().map(|step| plan.bytes_for(step.gives, chunk));
            let most = messages.max().unwrap_or(0);
            if self.stage.capacity() < most {
                self.stage = Tile::new(most.div_ceil(size_of::<u64>()));
            }
        }
        if let Some((shape, residuals)) = feedback {
            if self.decoded.capacity() < tile * 8 {
                self.decoded = Tile::new(tile);
            }
            residuals.begin(shape);
        }
        if let Some(scales) = scales {
            scales.begin(plan.count, plan.geometry.passes() * steps.len());
        }
    }

    /// Makes room for tiles of `elements` elements, and for encodings of `wire` bytes.
    fn reserve(&mut self, elements: usize, wire: usize) {
        if self.bytes.len() < elements * 8 {
            self.acc = Tile::new(elements);
            self.own = Tile::new(elements);
            self.bytes.resize(elements * 8, 0);
        }
        if self.wire.len() < wire {
            self.wire.resize(wire, 0);
        }
    }
}

/// Position and size of one step's chunk.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chunk {
    /// Number of elements of the chunk.
    pub elements: usize,
    /// Index of the first element in the input; `None` if this rank's input does not have the
    /// chunk.
    pub input: Option<usize>,
    /// Index of the first element in the output; `None` if this rank's output does not have the
    /// chunk.
    pub output: Option<usize>,
    /// Bytes of each message that the step receives.
    pub taken: usize,
    /// Bytes of each message that the step sends.
    pub given: usize,
    /// Number of the step's encode within the call, which is the index of its kept scale.
    pub site: usize,
    /// Number of the chunk within the call, which is the index of its residuals.
    pub number: usize,
}

impl Chunk {
    /// Returns the position and size of the chunk of `step`, which is the plan's step number `index`, in a pass on
    /// `rank`.
    pub(super) fn of(plan: &Plan, rank: usize, pass: usize, index: usize, step: &Step) -> Chunk {
        let input = plan.pattern.input(rank, step.chunk as usize);
        let output = plan.pattern.output(rank, step.chunk as usize);
        let elements = plan.elements(step.chunk as usize, pass);
        Chunk {
            elements,
            input: input.map(|place| plan.start(place, pass)),
            output: output.map(|place| plan.start(place, pass)),
            taken: plan.bytes_for(step.takes, elements),
            given: plan.bytes_for(step.gives, elements),
            site: pass * plan.schedule.steps.len() + index,
            number: pass * plan.schedule.chunks + step.chunk as usize,
        }
    }
}

/// The sum of a chain of steps; [`Step`] explains chains.
#[derive(Debug, Default)]
pub(super) struct Chain {
    /// Between steps, the unfinished sum; during a step, the scratch accumulators that the sum
    /// replaces.
    acc: Option<Tile>,
    /// Accumulators of the last chain, which the next chain reuses.
    spare: Option<Tile>,
    /// Whether the sum has at least one term.
    pub started: bool,
    /// Whether the sum has all its terms; an average has then been divided.
    pub complete: bool,
}

impl Chain {
    /// Replaces the scratch accumulators by the unfinished sum if `step` belongs to a chain of sums. Returns
    /// whether it does.
    pub(super) fn enter(&mut self, step: &Step, scratch: &mut Scratch, chunk: usize) -> bool {
        let chained = step.op.sums() && (step.more || self.acc.is_some());
        if chained {
            let open = self.acc.take().or_else(|| self.spare.take());
            let open = open.unwrap_or_else(|| Tile::new(chunk));
            self.acc = Some(std::mem::replace(&mut scratch.acc, open));
        }
        chained
    }

    /// Takes the unfinished sum out of `scratch` again, if `enter` has returned that the step is `chained`. The last
    /// step of a chain resets the sum.
    pub(super) fn leave(&mut self, step: &Step, chained: bool, scratch: &mut Scratch) {
        if !chained {
            (self.started, self.complete) = (false, false);
            return;
        }
        let replaced = self.acc.take();
        let open = replaced.map(|tile| std::mem::replace(&mut scratch.acc, tile));
        if step.more {
            self.acc = open;
        } else {
            let spare = open.or_else(|| self.spare.take());
            *self = Chain {
                spare,
                ..Chain::default()
            };
        }
    }
}

/// Statistics of this rank's input, for the report.
#[derive(Clone, Copy, Debug)]
pub(super) struct InputStats {
    /// Whether the report has these statistics: at least one message of the call is encoded.
    pub wanted: bool,
    /// Whether the statistics include any part of the input.
    pub seen: bool,
    pub input: EncodeStats,
}

impl InputStats {
    pub(super) fn new(wanted: bool) -> InputStats {
        InputStats {
            wanted,
            seen: false,
            input: EncodeStats::default(),
        }
    }

    /// Returns the statistics of the input, if any. Those of an average were taken from the input times
    /// 2^-`shift`; the inverse is exact.
    pub(super) fn of_input(&self, shift: u32) -> Option<EncodeStats> {
        let raise = 1.0 / f64::from(scale_of(shift));
        self.seen.then_some(EncodeStats {
            abs_max: (f64::from(self.input.abs_max) * raise) as f32,
            sum_squares: self.input.sum_squares * raise * raise,
            ..self.input
        })
    }
}

/// State of one channel of a running call. A channel runs every `channels`-th pass, over its own
/// connections.
#[derive(Debug)]
pub(super) struct ChannelRun {
    pub channel: usize,
    pub cursor: WalkCursor,
    /// The next step to run, which may wait for its peers; `None` after the last step.
    pub current: Option<Visit>,
    /// Progress of the current step if it sends or receives without slots.
    pub zero_copy: ZeroCopyProgress,
    /// The sum that the current chain of steps forms.
    pub chain: Chain,
}

/// Progress of a step that sends or receives without slots.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ZeroCopyProgress {
    /// Whether the step has received its messages, and its result lies in the buffer from which it
    /// is sent.
    pub arrived: bool,
    /// Bit i is set once the step has sent to its i-th peer.
    pub sent: u8,
}

/// Returns the shape that calls must share to use the same residuals. With another algorithm a rank encodes
/// other partial sums, and a residual of one codec may be far beyond what another codec sends in a call.
pub(super) fn residual_shape(request: &Request, plan: &Plan) -> Shape {
    Shape {
        kind: request.collective as u64
            | u64::from(request.op.number()) << 8
            | (request.dtype as u64) << 16
            | (plan.specs.inter.kind as u64) << 24
            | (request.root as u64) << 32
            | (plan.specs.intra.kind as u64) << 48
            | (plan.algorithm as u64) << 56,
        count: plan.count as u64,
        chunk: plan.geometry.chunk() as u64,
        chunks: (plan.geometry.passes() * plan.schedule.chunks) as u64,
    }
}

/// Returns the role, chunk number and elements of everything that a call with feedback encodes.
pub(super) fn residual_chunks(plan: &Plan) -> Vec<(Role, usize, usize)> {
    let encodes = |step: &&Step| {
        let is_sent = !step.send_to.is_empty() && step.op != Op::RecvCopySend;
        is_sent && plan.codec_of(step.gives).is_some()
    };
    let steps: Vec<&Step> = plan.schedule.steps.iter().filter(encodes).collect();
    let of_pass = |pass: usize| {
        steps.iter().map(move |step| {
            let chunk = step.chunk as usize;
            let number = pass * plan.schedule.chunks + chunk;
            (residual_role(step), number, plan.elements(chunk, pass))
        })
    };
    let mut chunks: Vec<_> = (0..plan.geometry.passes()).flat_map(of_pass).collect();
    chunks.sort_unstable_by_key(|&(role, number, _)| (number, role as usize));
    chunks.dedup();
    chunks
}

/// Returns whether a step encodes a contribution or a finished sum.
pub(super) fn residual_role(step: &Step) -> Role {
    match step.op {
        Op::RecvReduceCopySend => Role::Owner,
        _ => Role::Worker,
    }
}

/// Returns the random numbers for this rank's encodes of a chunk: first for contributions, then for
/// sums.
pub(super) fn randoms(
    spec: CodecSpec,
    chunk: &Chunk,
    operation: u64,
    rank: usize,
) -> [RoundingRandom; 2] {
    let first = chunk.input.or(chunk.output).unwrap_or(0);
    Plan::draws(spec, operation, rank).map(|random| random.from(first))
}

/// Reducers that a call uses.
#[derive(Debug)]
pub(super) struct Arithmetic {
    dtype: DType,
    op: ReduceOp,
    /// Contributions to an average are multiplied by 2^-shift ([`Plan::average_shift`]).
    shift: u32,
    /// Multiplies this rank's own elements by this rank's factor, or by 2^-shift.
    pub own: Reducer,
    /// Adds elements that peers sent, which already contain the peers' factors.
    pub received: Reducer,
    /// Adds accumulators to accumulators.
    pub accumulators: Reducer,
}

impl Arithmetic {
    /// Returns whether these are the reducers of `request`, for averages scaled by 2^-`shift`.
    pub(super) fn serves(&self, request: &Request, shift: u32) -> bool {
        self.dtype == request.dtype && self.op == request.op && self.shift == shift
    }

    pub(super) fn new(request: &Request, shift: u32, isa: Isa) -> Result<Arithmetic> {
        let combining = match request.op {
            ReduceOp::PreMulSum(_) | ReduceOp::Avg => ReduceOp::Sum,
            other => other,
        };
        Ok(Arithmetic {
            dtype: request.dtype,
            op: request.op,
            shift,
            own: match request.op {
                ReduceOp::Avg => Reducer::averaging(request.dtype, shift, isa)?,
                op => Reducer::new(request.dtype, op, isa)?,
            },
            received: Reducer::new(request.dtype, combining, isa)?,
            accumulators: Reducer::new(request.dtype.accumulator(), combining, isa)?,
        })
    }
}
