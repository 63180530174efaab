//! The residuals of error feedback of one rank, in its GPU's memory.
//!
//! What [`crate::adapt::Residuals`] keeps chunk by chunk lies here element by element: two arrays of
//! fp32, one that the last call left and one that a call leaves. A rank encodes each element as a
//! contribution or in a finished sum, never as both: so an element takes 8 bytes, of the input in a
//! reduce_scatter. Which array is which stands beside them, and the kernel turns it: a graph that is
//! replayed goes on from where its last replay, or the last call, left off.

use super::GpuEngine;
use super::abi::{RESIDUALS_BYTES, ResidualsHeader};
use super::launch_order::LaunchOrder;
use crate::adapt::{BY_ELEMENT, Feedback, Residuals, Role, Shape};
use crate::error::{Error, ErrorKind, Result};
use crate::gpu::{Context, DeviceMemory, Event, Stream};
use crate::plan::{Plan, Request};
use crate::sys::log::{self, Level};
use crate::types::Collective;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

/// Elements in which the cut of a call is written into the kind of its residuals: another cut encodes
/// other elements, or the same ones in another role.
const CUT_UNIT: u64 = 32;

/// Residuals by tensor.
#[derive(Debug)]
pub(super) struct DeviceResiduals {
    /// Where they are allocated, set to zero, and freed: a caller's stream may be gone by then, or
    /// be recording a graph.
    stream: Arc<Stream>,
    tensors: HashMap<u64, Tensor>,
    /// Too small for what came later; a kernel may still use them.
    outgrown: Vec<Arc<DeviceMemory>>,
}

#[derive(Debug)]
struct Tensor {
    shape: Shape,
    memory: Arc<DeviceMemory>,
    /// They were put here, and no call has used them yet.
    restored: bool,
}

impl Tensor {
    /// Says that residuals that the program has imported are of no use to the first call of `shape`.
    fn report_lost(&self, tensor: u64, request: &Request, shape: &Shape) {
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

/// Where the residuals of a call are.
#[derive(Debug)]
pub(super) struct Place {
    /// Address of the header.
    pub address: u64,
    /// Elements of an array.
    pub span: u64,
    pub memory: Arc<DeviceMemory>,
}

/// What calls must have in common to share residuals; a chunk stands for an array.
///
/// # Errors
/// Unsupported from 2^32 elements on.
fn shape_of(request: &Request, plan: &Plan) -> Result<Shape> {
    let blocks = match plan.collective {
        Collective::ReduceScatter => plan.pattern.nranks,
        _ => 1,
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
            | (plan.geometry.chunk() as u64 / CUT_UNIT % (1 << 16)) << 40
            | (plan.algorithm as u64) << 56
            | BY_ELEMENT,
        count: plan.count as u64,
        chunk: span as u64,
        chunks: 1,
    })
}

/// The byte at which an array of residuals begins; the third is not there.
fn place_of(shape: &Shape, array: usize) -> usize {
    RESIDUALS_BYTES + array * shape.chunk as usize * size_of::<f32>()
}

impl DeviceResiduals {
    /// None yet.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn new(context: &Arc<Context>) -> Result<DeviceResiduals> {
        Ok(DeviceResiduals {
            stream: Arc::new(Stream::new(context)?),
            tensors: HashMap::new(),
            outgrown: Vec::new(),
        })
    }

    /// Refuses calls of a group whose residuals cannot be had, before anything is queued.
    ///
    /// # Errors
    /// Invalid usage if there are none of a call's kind yet and the calls are being captured: a graph
    /// would forget them in every replay. Unsupported from 2^32 elements on; as
    /// [`Feedback::admit_to`].
    pub fn check<'a>(
        &self,
        calls: impl Iterator<Item = (u64, &'a Request, &'a Plan)> + Clone,
        captured: bool,
    ) -> Result<()> {
        let ids = calls.clone().map(|(tensor, ..)| tensor);
        let is_known = |tensor| self.tensors.contains_key(&tensor);
        Feedback::admit_to(self.tensors.len(), is_known, ids)?;
        for (tensor, request, plan) in calls {
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

    /// The residuals for a call on `stream` that [`DeviceResiduals::check`] admitted, zero if
    /// `tensor` has none of calls of its kind. They are made zero behind the last call of `order`.
    ///
    /// # Errors
    /// As [`DeviceMemory::queued`].
    pub fn place(
        &mut self,
        tensor: u64,
        (request, plan): (&Request, &Plan),
        order: &mut LaunchOrder,
        stream: &Stream,
    ) -> Result<Place> {
        let shape = shape_of(request, plan)?;
        let known = self.tensors.remove(&tensor);
        let memory = match known {
            Some(known) if known.shape == shape => known.memory,
            other => {
                if let Some(known) = &other {
                    known.report_lost(tensor, request, &shape);
                }
                order.enter(&self.stream, None)?;
                let memory = self.zeros(other, &shape)?;
                let zeroed = Event::new(self.stream.context())?;
                zeroed.record(&self.stream)?;
                stream.wait_event(&zeroed)?;
                memory
            }
        };
        let place = Place {
            address: memory.address(),
            span: shape.chunk,
            memory: memory.clone(),
        };
        let used = Tensor {
            shape,
            memory,
            restored: false,
        };
        self.tensors.insert(tensor, used);
        Ok(place)
    }

    /// Memory with zeros queued into it: that of earlier residuals, if it is enough.
    fn zeros(&mut self, known: Option<Tensor>, shape: &Shape) -> Result<Arc<DeviceMemory>> {
        let bytes = place_of(shape, 2);
        let memory = match known.map(|known| known.memory) {
            // A graph that holds it goes on there, with residuals of other calls.
            Some(memory) if memory.bytes() >= bytes && !is_held(&memory) => memory,
            outgrown => {
                // Much at once: what is outgrown stays until residuals are forgotten.
                let most = outgrown.as_ref().map_or(0, |memory| memory.bytes() / 2 * 3);
                self.outgrown.extend(outgrown);
                let bytes = bytes.max(most);
                Arc::new(DeviceMemory::queued(&self.stream, bytes)?)
            }
        };
        memory.fill(0, &self.stream)?;
        Ok(memory)
    }

    /// All residuals, on the host. No call may be running.
    ///
    /// # Errors
    /// Those of the driver; timeout.
    pub fn load(&self, patience: Duration) -> Result<Feedback> {
        let stream = &self.stream;
        let mut feedback = Feedback::new();
        for (&id, tensor) in &self.tensors {
            let Tensor { shape, memory, .. } = tensor;
            let turn = turn_of(memory, stream, patience)?;
            let mut bytes = vec![0; shape.chunk as usize * size_of::<f32>()];
            memory.read(place_of(shape, turn), &mut bytes, stream, patience)?;
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

    /// Puts residuals that [`DeviceResiduals::load`] gave in the place of all. No call may be
    /// running.
    ///
    /// # Errors
    /// Invalid argument if they lie as those of host buffers do, or as none; nothing changes then.
    /// As [`DeviceMemory::queued`]; timeout.
    pub fn store(&mut self, feedback: &Feedback, patience: Duration) -> Result<()> {
        feedback.check_elements()?;
        let mut tensors = HashMap::new();
        for (id, residuals) in feedback.iter() {
            let shape = residuals.shape();
            let memory = match self.tensors.remove(&id) {
                // Where graphs look for them.
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
                memory.write(place_of(&shape, 0), &bytes, &self.stream, patience)?;
            }
            let restored = residuals.is_restored();
            let stored = Tensor {
                shape,
                memory,
                restored,
            };
            tensors.insert(id, stored);
        }
        // What was not stored is forgotten.
        self.forget(None, patience)?;
        self.tensors.extend(tensors);
        Ok(())
    }

    /// Forgets the residuals of one tensor, or of all: those that a graph would go on from are zero
    /// from now on, others go. No call may be running.
    ///
    /// # Errors
    /// Those of the driver; timeout.
    pub fn forget(&mut self, tensor: Option<u64>, patience: Duration) -> Result<()> {
        for (id, known) in &self.tensors {
            if tensor.is_none_or(|tensor| tensor == *id) && is_held(&known.memory) {
                known.memory.fill(0, &self.stream)?;
            }
        }
        self.stream.wait(patience)?;
        self.tensors.retain(|id, known| {
            tensor.is_some_and(|tensor| tensor != *id) || is_held(&known.memory)
        });
        self.outgrown.clear();
        Ok(())
    }

    /// All of it, which a kernel that does not end may use.
    pub fn take(&mut self) -> impl Send + use<> {
        let tensors = std::mem::take(&mut self.tensors);
        (tensors, std::mem::take(&mut self.outgrown))
    }
}

impl GpuEngine {
    /// Waits until no call uses residuals, as [`GpuEngine::drain`] does: other work of the caller's
    /// streams may take longer than peers have time. Behind a fault kernels end by themselves.
    fn settle(&self) -> Result<()> {
        match self.fault.is_raised() {
            true => self.order.wait(self.timeout),
            false => self.drain(),
        }
    }

    /// The residuals of error feedback, on the host. Waits for the calls that were launched outside
    /// captures; graphs with calls of this communicator must not be running.
    ///
    /// # Errors
    /// As [`GpuEngine::drain`]; where the communicator had failed, timeout if they do not end.
    pub fn export_residuals(&self) -> Result<Feedback> {
        self.settle()?;
        self.residuals.load(self.timeout)
    }

    /// Puts residuals in the place of all that there are, after waiting as
    /// [`GpuEngine::export_residuals`] does.
    ///
    /// # Errors
    /// Invalid argument if they are those of host buffers; as there; system if there is not that
    /// much memory.
    pub fn import_residuals(&mut self, feedback: &Feedback) -> Result<()> {
        self.settle()?;
        self.residuals.store(feedback, self.timeout)
    }

    /// Forgets the residuals of one tensor, or of all, after waiting likewise.
    ///
    /// # Errors
    /// As [`GpuEngine::export_residuals`].
    pub fn forget_residuals(&mut self, tensor: Option<u64>) -> Result<()> {
        self.settle()?;
        self.residuals.forget(tensor, self.timeout)
    }
}

/// Whether a graph may replay calls that use it.
fn is_held(memory: &Arc<DeviceMemory>) -> bool {
    Arc::strong_count(memory) > 1
}

fn turn_of(memory: &DeviceMemory, stream: &Stream, patience: Duration) -> Result<usize> {
    let mut header = [0; size_of::<ResidualsHeader>()];
    memory.read(0, &mut header, stream, patience)?;
    let turn = u32::from_le_bytes([header[0], header[1], header[2], header[3]]);
    Ok((turn & 1) as usize)
}
