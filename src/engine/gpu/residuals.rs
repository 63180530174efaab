//! Residuals of error feedback in a rank's GPU memory.
//!
//! [`crate::codec::feedback::Residuals`] stores residuals by chunk; the GPU stores them by element, in two
//! fp32 arrays. A call reads the array that the last call wrote, and writes the other array. A rank encodes
//! each element either as a contribution or in a finished sum, so one residual per element is enough. Two
//! arrays take 8 bytes per element (per input element in a reduce_scatter). The header names the current
//! array and the kernel switches it. So a graph's replay continues after its last replay or the last call.

use super::GpuEngine;
use super::launch_order::LaunchOrder;
use crate::codec::feedback::{self, BY_ELEMENT, Feedback, Residuals, Role, Shape};
use crate::error::{Error, ErrorKind, Result};
use crate::gpu::abi::{RESIDUALS_BYTES, ResidualsHeader};
use crate::gpu::{Context, DeviceMemory, Event, Stream};
use crate::plan::{Plan, Request};
use crate::sys::log::{self, Level};
use crate::types::KernelIntra;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

/// Unit in which a shape's kind records a call's chunk size. Calls with different chunk sizes must not share
/// residuals. They encode different elements, or encode an element once as a contribution and once in a sum.
const CUT_UNIT: u64 = 32;

/// Residuals of all tensors, each in memory of the rank's GPU.
#[derive(Debug)]
pub(super) struct DeviceResiduals {
    /// Stream that allocates, zeroes and frees residuals. The caller's stream cannot do this work: the
    /// program may have destroyed that stream, or be capturing a graph on it.
    stream: Arc<Stream>,
    tensors: HashMap<u64, TensorResiduals>,
    /// Memory that was replaced by memory for a larger call; a kernel may still use it.
    outgrown: Vec<Arc<DeviceMemory>>,
}

/// Residuals of one tensor.
#[derive(Debug)]
struct TensorResiduals {
    shape: Shape,
    memory: Arc<DeviceMemory>,
    /// Whether the program imported these residuals and no call has used them yet.
    restored: bool,
}

impl TensorResiduals {
    /// Logs a warning if imported residuals do not fit the first call, which has `shape`.
    fn warn_of_drop(&self, tensor: u64, request: &Request, shape: &Shape) {
        if !self.restored {
            return;
        }
        log::line(
            Level::Warn,
            format_args!(
                "the imported residuals of tensor {tensor} are dropped: they are of {} elements, and \
                 {} has {}, or another operator, type, codec or cut",
                self.shape.count, request.collective, shape.count
            ),
        );
    }
}

/// Device memory with the residuals of a call.
#[derive(Debug)]
pub(super) struct ResidualPlace {
    /// Address of the header.
    pub address: u64,
    /// Number of elements of one array.
    pub span: u64,
    pub memory: Arc<DeviceMemory>,
}

/// Returns the shape that calls must share to use the same residuals. The shape has one chunk, which is a
/// whole array.
///
/// # Errors
/// Unsupported from 2^32 elements on.
fn shape_of(request: &Request, plan: &Plan) -> Result<Shape> {
    let blocks = match plan.collective.splits_input() {
        true => plan.pattern.nranks,
        false => 1,
    };
    let span = plan.count * blocks;
    if u32::try_from(span).is_err() {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "error feedback of {span} elements on a GPU, where a tensor has at most {} of \
                 them: split the call",
                u32::MAX
            ),
        ));
    }
    Ok(Shape {
        kind: request.collective as u64
            | u64::from(request.op.number()) << 8
            | (request.dtype as u64) << 16
            | (request.root as u64) << 32
            | (plan.specs.inter.kind as u64) << 24
            | (plan.geometry.chunk() as u64 / CUT_UNIT % (1 << 14)) << 40
            | KernelIntra::of(plan.specs).map_or(0, intra_bits)
            | (plan.algorithm as u64) << 56
            | BY_ELEMENT,
        count: plan.count as u64,
        chunk: span as u64,
        chunks: 1,
    })
}

/// Returns the bits of a shape that tell how messages inside groups are encoded: two below the algorithm's, the third above.
fn intra_bits(intra: KernelIntra) -> u64 {
    let number = intra as u64;
    (number & 3) << 54 | number >> 2 << 60
}

/// Returns the offset of an array of residuals; index 2 gives the end of the memory.
fn array_offset(shape: &Shape, array: usize) -> usize {
    RESIDUALS_BYTES + array * shape.chunk as usize * size_of::<f32>()
}

impl DeviceResiduals {
    /// Creates the registry, without residuals.
    ///
    /// # Errors
    /// The driver's errors.
    pub fn new(context: &Arc<Context>) -> Result<DeviceResiduals> {
        Ok(DeviceResiduals {
            stream: Arc::new(Stream::new(context)?),
            tensors: HashMap::new(),
            outgrown: Vec::new(),
        })
    }

    /// Returns the stream on which memory that outlives calls is allocated.
    pub fn stream(&self) -> &Arc<Stream> {
        &self.stream
    }

    /// Checks that all calls of a group can have residuals, before anything is queued.
    ///
    /// # Errors
    /// Invalid argument if residuals would grow without bound with a codec; see [`feedback::check_codecs`].
    /// Invalid usage if a captured call has no residuals yet: a graph would zero them in every replay.
    /// Unsupported from 2^32 elements on; see [`Feedback::admit_to`].
    pub fn check<'a>(
        &self,
        calls: impl Iterator<Item = (u64, &'a Request, &'a Plan)> + Clone,
        captured: bool,
    ) -> Result<()> {
        let ids = calls.clone().map(|(tensor, ..)| tensor);
        let is_known = |tensor| self.tensors.contains_key(&tensor);
        Feedback::admit_to(self.tensors.len(), is_known, ids)?;
        for (tensor, request, plan) in calls {
            feedback::check_codecs(plan.specs)?;
            let shape = shape_of(request, plan)?;
            let known = self.tensors.get(&tensor);
            if captured && known.is_none_or(|known| known.shape != shape) {
                return Err(Error::invalid_usage(format!(
                    "tensor {tensor} has no residuals of {} of {} {} yet, and a capture cannot \
                     make them: make the call once before it is captured",
                    request.collective, plan.count, plan.dtype
                )));
            }
        }
        Ok(())
    }

    /// Returns the residuals for a checked call on `stream`. New residuals are zeroed after the last call of
    /// `order`.
    ///
    /// # Errors
    /// See [`DeviceMemory::queued`].
    pub fn place(
        &mut self,
        tensor: u64,
        (request, plan): (&Request, &Plan),
        order: &mut LaunchOrder,
        stream: &Stream,
    ) -> Result<ResidualPlace> {
        let shape = shape_of(request, plan)?;
        let known = self.tensors.remove(&tensor);
        let memory = match known {
            Some(known) if known.shape == shape => known.memory,
            other => {
                if let Some(known) = &other {
                    known.warn_of_drop(tensor, request, &shape);
                }
                order.enter(&self.stream, None)?;
                let memory = self.zeros(other, &shape)?;
                let zeroed = Event::new(self.stream.context())?;
                zeroed.record(&self.stream)?;
                stream.wait_event(&zeroed)?;
                memory
            }
        };
        let place = ResidualPlace {
            address: memory.address(),
            span: shape.chunk,
            memory: memory.clone(),
        };
        let used = TensorResiduals {
            shape,
            memory,
            restored: false,
        };
        self.tensors.insert(tensor, used);
        Ok(place)
    }

    /// Returns memory with zeros queued into it, and reuses the memory of earlier residuals if it suffices.
    fn zeros(
        &mut self,
        known: Option<TensorResiduals>,
        shape: &Shape,
    ) -> Result<Arc<DeviceMemory>> {
        let bytes = array_offset(shape, 2);
        let memory = match known.map(|known| known.memory) {
            // Memory that a graph holds is not reused: replays of the graph would overwrite the new
            // call's residuals.
            Some(memory) if memory.bytes() >= bytes && !is_held(&memory) => memory,
            outgrown => {
                // New memory has at least 1.5 times the old size, because the old memory is kept until
                // residuals are forgotten.
                let most = outgrown.as_ref().map_or(0, |memory| memory.bytes() / 2 * 3);
                self.outgrown.extend(outgrown);
                let bytes = bytes.max(most);
                Arc::new(DeviceMemory::queued(&self.stream, bytes)?)
            }
        };
        memory.fill(0, &self.stream)?;
        Ok(memory)
    }

    /// Copies all residuals to the host. No call may be running.
    ///
    /// # Errors
    /// The driver's errors; timeout.
    pub fn load(&self, timeout: Duration) -> Result<Feedback> {
        let stream = &self.stream;
        let mut feedback = Feedback::new();
        for (&id, tensor) in &self.tensors {
            let TensorResiduals { shape, memory, .. } = tensor;
            let turn = turn_of(memory, stream, timeout)?;
            let mut bytes = vec![0; shape.chunk as usize * size_of::<f32>()];
            memory.read(array_offset(shape, turn), &mut bytes, stream, timeout)?;
            let words = bytes.chunks_exact(4);
            let values = words.map(|word| f32::from_le_bytes([word[0], word[1], word[2], word[3]]));
            let mut residuals = Residuals::new();
            residuals.begin(*shape);
            residuals.put(Role::Worker, 0, values.collect());
            if !tensor.restored {
                residuals.mark_used();
            }
            feedback.give_back(id, residuals);
        }
        Ok(feedback)
    }

    /// Replaces all residuals by those that [`DeviceResiduals::load`] returned. No call may be running.
    ///
    /// # Errors
    /// Invalid argument for residuals of host buffers, or with an invalid layout; nothing changes then. See
    /// [`DeviceMemory::queued`]; timeout.
    pub fn store(&mut self, feedback: &Feedback, timeout: Duration) -> Result<()> {
        feedback.check_elements()?;
        let mut tensors = HashMap::new();
        for (id, residuals) in feedback.iter() {
            let shape = residuals.shape();
            let memory = match self.tensors.remove(&id) {
                // Memory of the same shape is kept in place, because graphs hold its address.
                Some(known) if known.shape == shape => {
                    known.memory.fill(0, &self.stream)?;
                    known.memory
                }
                other => self.zeros(other, &shape)?,
            };
            for (_, _, values) in residuals.iter() {
                let bytes: Vec<u8> = values
                    .iter()
                    .flat_map(|value| value.to_le_bytes())
                    .collect();
                memory.write(array_offset(&shape, 0), &bytes, &self.stream, timeout)?;
            }
            let restored = residuals.is_restored();
            let stored = TensorResiduals {
                shape,
                memory,
                restored,
            };
            tensors.insert(id, stored);
        }
        // Residuals of tensors that were not imported are forgotten.
        self.forget(None, timeout)?;
        self.tensors.extend(tensors);
        Ok(())
    }

    /// Forgets the residuals of one tensor, or of all tensors. Residuals that a graph holds become zero; others
    /// are freed. No call may be running.
    ///
    /// # Errors
    /// The driver's errors; timeout.
    pub fn forget(&mut self, tensor: Option<u64>, timeout: Duration) -> Result<()> {
        for (id, known) in &self.tensors {
            if tensor.is_none_or(|tensor| tensor == *id) && is_held(&known.memory) {
                known.memory.fill(0, &self.stream)?;
            }
        }
        self.stream.wait(timeout)?;
        self.tensors.retain(|id, known| {
            tensor.is_some_and(|tensor| tensor != *id) || is_held(&known.memory)
        });
        self.outgrown.clear();
        Ok(())
    }

    /// Removes and returns all memory, for teardown while a kernel still runs.
    pub fn take(&mut self) -> impl Send + use<> {
        let tensors = std::mem::take(&mut self.tensors);
        (tensors, std::mem::take(&mut self.outgrown))
    }
}

impl GpuEngine {
    /// Waits until no call uses residuals, as [`GpuEngine::drain`] does. After a fault kernels end by
    /// themselves, within the deadline of waits.
    fn wait_for_calls(&self) -> Result<()> {
        match self.fault.is_raised() {
            true => self.order.wait(self.timeout),
            false => self.drain(),
        }
    }

    /// Copies the residuals of error feedback to the host. Waits for calls that were launched outside captures;
    /// the caller ensures that no graph with calls of this communicator runs.
    ///
    /// # Errors
    /// See [`GpuEngine::drain`]; after a fault, timeout if calls do not end.
    pub fn export_residuals(&self) -> Result<Feedback> {
        self.wait_for_calls()?;
        self.residuals.load(self.timeout)
    }

    /// Replaces all residuals, after waiting as [`GpuEngine::export_residuals`] does.
    ///
    /// # Errors
    /// Invalid argument for residuals of host buffers; system if memory is short; see
    /// [`GpuEngine::export_residuals`].
    pub fn import_residuals(&mut self, feedback: &Feedback) -> Result<()> {
        self.wait_for_calls()?;
        self.residuals.store(feedback, self.timeout)
    }

    /// Forgets the residuals of one tensor, or of all tensors, after waiting as
    /// [`GpuEngine::export_residuals`] does.
    ///
    /// # Errors
    /// See [`GpuEngine::export_residuals`].
    pub fn forget_residuals(&mut self, tensor: Option<u64>) -> Result<()> {
        self.wait_for_calls()?;
        self.residuals.forget(tensor, self.timeout)
    }
}

/// Returns whether a graph may replay calls that use the memory.
fn is_held(memory: &Arc<DeviceMemory>) -> bool {
    Arc::strong_count(memory) > 1
}

fn turn_of(memory: &DeviceMemory, stream: &Stream, timeout: Duration) -> Result<usize> {
    let mut header = [0; size_of::<ResidualsHeader>()];
    memory.read(0, &mut header, stream, timeout)?;
    let turn = u32::from_le_bytes([header[0], header[1], header[2], header[3]]);
    Ok((turn & 1) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kind of a shape has the chunk from bit 40, the algorithm from bit 56, and [`BY_ELEMENT`].
    #[test]
    fn encodings_inside_groups_have_bits_of_their_own() {
        let all = [
            KernelIntra::Coded,
            KernelIntra::Raw,
            KernelIntra::Cast16,
            KernelIntra::CastBf16,
            KernelIntra::Linear8,
        ]
        .map(intra_bits);
        let others = ((1 << 54) - 1) | (7 << 56) | BY_ELEMENT;
        for (number, bits) in all.iter().enumerate() {
            assert_eq!(bits & others, 0, "{number}");
            assert!(!all[..number].contains(bits), "{number}");
        }
    }
}
