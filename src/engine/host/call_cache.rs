//! [`CallCache`]: calls without a codec that have run, with all that equal calls need.

use super::super::Report;
use super::state::{Arithmetic, Chain, Chunk};
use super::step::StepPath;
use crate::mem::UserBuffers;
use crate::plan::{Plan, Request};
use crate::recorder::RepeatedCall;
use crate::transport::Header;
use crate::types::{Call, InPlace};
use std::sync::Arc;

/// Binary logarithm of the number of places. A group runs as cached messages if no two of its calls share a place, which
/// 20 messages do with a probability of a sixth.
const PLACES_LOG2: u32 = 10;

/// The cached calls of an engine. A call has one place, which the fields that usually differ decide. It enters the
/// cache when it runs for the second time, so that calls of one kind that never repeat replace nothing.
#[derive(Debug)]
pub(super) struct CallCache {
    places: Box<[Option<Box<CachedCall>>]>,
    /// For each place, a digest of the last call that was not in the cache.
    seen: [u64; 1 << PLACES_LOG2],
}

impl CallCache {
    pub fn new() -> CallCache {
        CallCache {
            places: (0..1 << PLACES_LOG2).map(|_| None).collect(),
            seen: [0; 1 << PLACES_LOG2],
        }
    }

    /// Returns a digest of a call; its highest bits are the place.
    #[inline]
    fn digest(call: &Call) -> u64 {
        let kind =
            (call.collective as u64) << 16 | (call.dtype as u64) << 8 | u64::from(call.op.number());
        let peers = (call.root as u64) << 32 ^ call.peer as u64;
        let mixed = (call.count as u64 ^ kind << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed ^ peers).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }

    #[inline]
    fn place(digest: u64) -> usize {
        (digest >> (64 - PLACES_LOG2)) as usize
    }

    /// Returns the place of the cached call that equals `call`.
    #[inline]
    pub fn find(&self, call: &Call) -> Option<usize> {
        let at = CallCache::place(CallCache::digest(call));
        let cached = self.places[at].as_ref()?;
        (cached.call == *call).then_some(at)
    }

    /// Returns whether a call that is not in the cache should enter it.
    pub fn wants(&mut self, call: &Call) -> bool {
        let digest = CallCache::digest(call);
        std::mem::replace(&mut self.seen[CallCache::place(digest)], digest) == digest
    }

    pub fn insert(&mut self, cached: CachedCall) {
        let at = CallCache::place(CallCache::digest(&cached.call));
        self.places[at] = Some(Box::new(cached));
    }

    /// Returns the cached call at a place.
    #[inline]
    pub fn get(&self, at: usize) -> Option<&CachedCall> {
        self.places[at].as_deref()
    }

    /// Takes the cached call out of a place, so that the engine can run it.
    ///
    /// # Panics
    /// If the place is empty.
    #[inline]
    pub fn take(&mut self, at: usize) -> Box<CachedCall> {
        self.places[at].take().expect("a cached call")
    }

    /// Puts a call back that was taken out of a place.
    #[inline]
    pub fn put_back(&mut self, at: usize, cached: Box<CachedCall>) {
        self.places[at] = Some(cached);
    }

    /// Empties the cache, because equal calls are planned otherwise from now on.
    pub fn clear(&mut self) {
        self.places.fill_with(|| None);
    }
}

/// A call that has run twice, with all that an equal call needs.
#[derive(Debug)]
pub(super) struct CachedCall {
    pub call: Call,
    /// Counters of the repeats.
    pub counts: Arc<RepeatedCall>,
    pub request: Request,
    pub plan: Arc<Plan>,
    pub arithmetic: Arc<Arithmetic>,
    /// Header of its messages. Each run sets the sequence number, each step the number of bytes.
    pub header: Header,
    /// Whether messages may leave this process after they are published.
    pub flushes: bool,
    pub extents: BufferExtents,
    /// The steps, in the order in which they run.
    pub steps: Box<[CachedStep]>,
    /// Accumulators of chains, which later calls reuse. Between calls no sum is open.
    pub chain: Chain,
    pub report: Report,
}

/// A step of a cached call.
#[derive(Debug)]
pub(super) struct CachedStep {
    /// Index in the plan's schedule.
    pub index: usize,
    pub chunk: Chunk,
    pub path: StepPath,
}

/// Bytes that a call needs in its buffers, and where they may overlap.
#[derive(Clone, Copy, Debug)]
pub(super) struct BufferExtents {
    input: usize,
    pub output: usize,
    /// Address of the input less the address of the output in an in-place call; `None` if they must be disjoint.
    in_place: Option<isize>,
}

impl BufferExtents {
    pub fn of(call: &Call, rank: usize, nranks: usize) -> Option<BufferExtents> {
        let is_root = call.root == rank;
        let size = call.dtype.size();
        let block = (call.count * size * rank) as isize;
        let collective = call.collective;
        Some(BufferExtents {
            input: collective
                .input_extent(is_root)
                .elements(call.count, nranks)?
                * size,
            output: collective
                .output_extent(is_root)
                .elements(call.count, nranks)?
                * size,
            in_place: match collective.in_place() {
                InPlace::Same => Some(0),
                InPlace::InputInOutput => Some(block),
                InPlace::OutputInInput => Some(-block),
                InPlace::Never => None,
            },
        })
    }

    /// Returns whether the buffers are large enough, and disjoint or in place. The checks of a call give the reason
    /// if they are not.
    pub fn fit(&self, buffers: &UserBuffers<'_>) -> bool {
        if buffers.input_bytes() < self.input || buffers.output_bytes() < self.output {
            return false;
        }
        let (input, output) = (buffers.input_address(), buffers.output_address());
        self.input == 0
            || self.output == 0
            || input + self.input <= output
            || output + self.output <= input
            || self.in_place == Some(input.wrapping_sub(output) as isize)
    }
}
