//! What the steps of a call share: working memory, open sums, what was learnt about the input,
//! arithmetic, and scales that are kept from call to call.

use super::host::{HostEngine, ScaleKey};
use crate::adapt::{Residuals, Shape};
use crate::codec::{EncodeStats, Random, TensorScales};
use crate::cpu::{Isa, Tile};
use crate::error::Result;
use crate::plan::{Plan, Request};
use crate::reduce::Reducer;
use crate::schedule::Own;
use crate::types::{CodecSpec, DType, ReduceOp, SIGNATURE_WORDS, Scalar, ScaleRule};

/// Elements of a tile: a power of two that holds the largest block, small enough for the
/// accumulators, the source and the destination to share a first-level cache.
pub(super) const TILE: usize = 4096;

/// Working memory of an engine.
#[derive(Debug)]
pub(super) struct Scratch {
    /// The sum.
    pub acc: Tile,
    /// This rank's contribution, where it is not the first.
    pub own: Tile,
    /// Elements on their way between a buffer and the accumulators.
    pub bytes: Vec<u8>,
    /// Encoding of this rank's own contribution, where all ranks must add what all others see.
    pub wire: Vec<u8>,
    /// What an encode under error feedback decodes to. Empty until there is one.
    pub decoded: Tile,
}

impl Scratch {
    pub(super) fn new() -> Scratch {
        Scratch {
            acc: Tile::new(TILE),
            own: Tile::new(TILE),
            bytes: vec![0; TILE * 8],
            wire: Vec::new(),
            decoded: Tile::new(0),
        }
    }

    /// Makes room for tiles of `elements`, and for encodings of `wire` bytes.
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

/// Where one step's chunk lies.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chunk {
    /// How many elements.
    pub elements: usize,
    /// First element in the input, if this rank has one.
    pub input: Option<usize>,
    /// First element in the output, if this rank has one.
    pub output: Option<usize>,
    /// Bytes of each message that the step takes.
    pub taken: usize,
    /// Bytes of each message that it gives.
    pub given: usize,
    /// Number of this encode site within the call, for scales that are kept.
    pub site: usize,
    /// Number of the chunk within the call, for residuals that are kept.
    pub number: usize,
}

/// A sum that several steps form together: see "Chains" at [`Step`].
#[derive(Debug, Default)]
pub(super) struct Chain {
    pub acc: Option<Tile>,
    /// The accumulators of the last chain, for the next one.
    pub spare: Option<Tile>,
    pub started: bool,
    pub complete: bool,
}

/// What was learnt about this rank's input.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stats {
    pub wanted: bool,
    pub seen: bool,
    pub input: EncodeStats,
}

impl Stats {
    pub(super) fn new(wanted: bool) -> Stats {
        Stats {
            wanted,
            seen: false,
            input: EncodeStats::default(),
        }
    }

    pub(super) fn of_input(&self) -> Option<EncodeStats> {
        self.seen.then_some(self.input)
    }
}

/// Prepares an engine for a call: scales that live from call to call, room for whole chunks.
pub(super) fn begin(
    engine: &mut HostEngine,
    plan: &Plan,
    kept: Option<&mut (ScaleKey, TensorScales)>,
    fed: Option<(Shape, &mut Residuals)>,
) {
    let chunk = plan.geometry.chunk();
    let chained = plan
        .schedule
        .steps
        .iter()
        .any(|step| step.more && step.op.sums());
    let coded = plan
        .schedule
        .steps
        .iter()
        .any(|step| matches!(step.own, Own::Coded { .. }));
    let wire = if coded && plan.is_coded() {
        plan.wire_bytes(chunk)
    } else {
        0
    };
    let whole = chained || kept.is_some();
    let tile = if whole { chunk.max(TILE) } else { TILE };
    engine.scratch.reserve(tile, wire);
    if let Some((shape, residuals)) = fed {
        if engine.scratch.decoded.capacity() < tile * 8 {
            engine.scratch.decoded = Tile::new(tile);
        }
        residuals.begin(shape);
    }
    if let Some((_, scales)) = kept {
        scales.begin(
            plan.count,
            plan.geometry.passes() * plan.schedule.steps.len(),
        );
    }
}

/// Whose scales a call keeps, if it keeps any.
pub(super) fn scale_key(
    request: &Request,
    plan: &Plan,
    signature: [u64; SIGNATURE_WORDS],
) -> Option<ScaleKey> {
    let ScaleRule::Tensor { refresh } = plan.specs.inter.scale else {
        return None;
    };
    let tensor = request
        .tensor
        .filter(|_| plan.specs.inter.kind.has_scale())?;
    let mut call = signature;
    call[3] = 0;
    let factor = match request.op {
        ReduceOp::PreMulSum(Scalar::Float(factor)) => i128::from(factor.to_bits()),
        ReduceOp::PreMulSum(Scalar::Int(factor)) => factor,
        _ => 0,
    };
    Some(ScaleKey {
        tensor,
        refresh,
        call,
        factor,
    })
}

/// What calls have in common that share residuals.
pub(super) fn shape(request: &Request, plan: &Plan) -> Shape {
    Shape {
        kind: request.collective as u64
            | u64::from(request.op.number()) << 8
            | (request.dtype as u64) << 16
            | (request.root as u64) << 32,
        count: plan.count as u64,
        chunk: plan.geometry.chunk() as u64,
        chunks: (plan.geometry.passes() * plan.schedule.chunks) as u64,
    }
}

/// What this rank's encodes of the chunk draw in an operation: those of contributions, and those of
/// sums, through the codec of one level.
pub(super) fn randoms(spec: CodecSpec, chunk: &Chunk, operation: u64, rank: usize) -> [Random; 2] {
    let first = chunk.input.or(chunk.output).unwrap_or(0);
    Plan::draws(spec, operation, rank).map(|random| random.from(first))
}

/// The element arithmetic of a call.
#[derive(Debug)]
pub(super) struct Arithmetic {
    dtype: DType,
    op: ReduceOp,
    /// For this rank's own elements: with its factor.
    pub own: Reducer,
    /// For elements that peers sent: their factors are in them.
    pub received: Reducer,
    /// For adding accumulators to accumulators.
    pub accumulators: Reducer,
}

impl Arithmetic {
    pub(super) fn serves(&self, request: &Request) -> bool {
        self.dtype == request.dtype && self.op == request.op
    }

    pub(super) fn new(request: &Request, isa: Isa) -> Result<Arithmetic> {
        let combining = match request.op {
            ReduceOp::PreMulSum(_) | ReduceOp::Avg => ReduceOp::Sum,
            other => other,
        };
        Ok(Arithmetic {
            dtype: request.dtype,
            op: request.op,
            own: Reducer::new(request.dtype, request.op, isa)?,
            received: Reducer::new(request.dtype, combining, isa)?,
            accumulators: Reducer::new(request.dtype.accumulator(), combining, isa)?,
        })
    }
}
