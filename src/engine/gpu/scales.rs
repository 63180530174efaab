//! Scales that tensors keep from call to call (`tensor=K`), in a rank's GPU memory.
//!
//! The header of a tensor counts its calls on the GPU, so that a graph's replays count too: the kernel drops the scales
//! in calls 1, K+1, 2K+1 and so on. A rank encodes each chunk either as a contribution or as a finished sum, so one
//! scale per chunk is enough.

use super::GpuEngine;
use super::launch::PreparedPlan;
use super::launch_order::LaunchOrder;
use crate::engine::scale_key::{KEPT_TENSORS, ScaleKey};
use crate::error::{Error, ErrorKind, Result};
use crate::gpu::abi::SCALES_BYTES;
use crate::gpu::{DeviceMemory, Event, Stream};
use crate::plan::{Plan, Request};
use crate::types::{CallSignature, SIGNATURE_WORDS, ScaleRule};
use std::collections::HashMap;
use std::sync::Arc;

/// Scales of all tensors.
#[derive(Debug)]
pub(super) struct DeviceScales {
    /// Stream that allocates, zeroes and frees scales. The program may have destroyed the caller's stream, or be
    /// capturing a graph on it.
    stream: Arc<Stream>,
    tensors: HashMap<ScaleKey, TensorScaleMemory>,
}

/// Scales of one tensor in one kind of call.
#[derive(Debug)]
struct TensorScaleMemory {
    /// Elements of a full chunk; with other chunks all scales are dropped.
    chunk: usize,
    memory: Arc<DeviceMemory>,
}

/// Returns the bytes of the header and the scales of all chunks that a rank may encode.
///
/// # Errors
/// Unsupported from 2^32 elements on.
fn bytes_of(plan: &Plan) -> Result<usize> {
    let blocks = match plan.collective.has_blocks() {
        true => plan.pattern.nranks,
        false => 1,
    };
    let elements = plan.count * blocks;
    if u32::try_from(elements).is_err() {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "kept scales for {elements} elements on a GPU, where a tensor has at most {} of them: split the \
                 call, or give the codec a block",
                u32::MAX
            ),
        ));
    }
    let chunks = elements / plan.geometry.chunk() + blocks + 1;
    Ok(SCALES_BYTES + chunks * size_of::<f32>())
}

impl DeviceScales {
    /// Creates the registry, without scales; `stream` is for its own work.
    pub fn new(stream: Arc<Stream>) -> DeviceScales {
        DeviceScales {
            stream,
            tensors: HashMap::new(),
        }
    }

    /// Checks that a call can keep its scales, before anything is queued.
    ///
    /// # Errors
    /// Invalid usage if a captured call has no scales yet: a graph would drop them in every replay. Unsupported from
    /// 2^32 elements on.
    fn check(&self, key: &ScaleKey, plan: &Plan, is_captured: bool) -> Result<()> {
        bytes_of(plan)?;
        let chunk = plan.geometry.chunk();
        let known = self
            .tensors
            .get(key)
            .is_some_and(|known| known.chunk == chunk);
        match is_captured && !known {
            false => Ok(()),
            true => Err(Error::invalid_usage(format!(
                "{} of {} {} with codec {} keeps no scales yet, and a capture cannot make room for them: make the call \
                 once before it is captured",
                plan.collective, plan.count, plan.dtype, plan.specs.inter
            ))),
        }
    }

    /// Returns the memory with the scales for a checked call on `stream`. New memory is zeroed after the last call of
    /// `order`.
    ///
    /// # Errors
    /// See [`DeviceMemory::queued`].
    fn place(
        &mut self,
        key: ScaleKey,
        plan: &Plan,
        order: &mut LaunchOrder,
        stream: &Stream,
    ) -> Result<Arc<DeviceMemory>> {
        let chunk = plan.geometry.chunk();
        if let Some(known) = self.tensors.get(&key)
            && known.chunk == chunk
        {
            return Ok(known.memory.clone());
        }
        // The stream then frees memory behind the last call that uses it.
        order.enter(&self.stream, None)?;
        if self.tensors.len() >= KEPT_TENSORS {
            self.tensors.clear();
        }
        let memory = Arc::new(DeviceMemory::queued(&self.stream, bytes_of(plan)?)?);
        memory.fill(0, &self.stream)?;
        let zeroed = Event::new(self.stream.context())?;
        zeroed.record(&self.stream)?;
        stream.wait_event(&zeroed)?;
        let known = TensorScaleMemory {
            chunk,
            memory: memory.clone(),
        };
        self.tensors.insert(key, known);
        Ok(memory)
    }

    /// Removes and returns all memory, for teardown while a kernel still runs.
    pub fn take(&mut self) -> impl Send + use<> {
        std::mem::take(&mut self.tensors)
    }
}

impl PreparedPlan {
    /// Returns the key of a call's kept scales; `None` if it keeps none.
    fn scale_key(&self, request: &Request, signature: [u64; SIGNATURE_WORDS]) -> Option<ScaleKey> {
        let moves = request.count > 0 && self.plan.is_coded() && !self.only_copies(request.op);
        ScaleKey::new(request, &self.plan, signature).filter(|_| moves)
    }
}

impl GpuEngine {
    /// Checks that calls can keep their scales, before anything is queued.
    ///
    /// # Errors
    /// Invalid usage if a captured call has no scales yet; unsupported from 2^32 elements on.
    pub(super) fn check_scales<'a>(
        &self,
        calls: impl Iterator<Item = (&'a Request, &'a PreparedPlan)>,
        is_captured: bool,
    ) -> Result<()> {
        let keeps =
            |run: &PreparedPlan| matches!(run.plan.specs.inter.scale, ScaleRule::Tensor { .. });
        for (request, run) in calls.filter(|(_, run)| keeps(run)) {
            let signature = run.plan.decided(request).signature(
                run.plan.algorithm,
                run.plan.specs.intra,
                CallSignature::CAPTURED,
            );
            if let Some(key) = run.scale_key(request, signature.words()) {
                self.scales.check(&key, &run.plan, is_captured)?;
            }
        }
        Ok(())
    }

    /// Returns the memory with the kept scales of a checked call; `None` if it keeps none.
    ///
    /// # Errors
    /// System if memory is short; the driver's errors.
    pub(super) fn place_scales(
        &mut self,
        request: &Request,
        run: &PreparedPlan,
        signature: [u64; SIGNATURE_WORDS],
        stream: &Stream,
    ) -> Result<Option<Arc<DeviceMemory>>> {
        let Some(key) = run.scale_key(request, signature) else {
            return Ok(None);
        };
        let memory = self.scales.place(key, &run.plan, &mut self.order, stream)?;
        Ok(Some(memory))
    }
}
