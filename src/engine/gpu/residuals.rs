//! The residuals of error feedback of one rank, in its GPU's memory.
//!
//! What [`crate::adapt::Residuals`] keeps chunk by chunk lies here element by element: two arrays of
//! fp32, one that the last call left and one that a call leaves, and two more where an algorithm
//! encodes an element both as a contribution and in a finished sum. Which of a pair is which stands
//! beside them, and the kernel turns it: a graph that is replayed goes on from where its last replay,
//! or the last call, left off.

use super::abi::{self, RESIDUALS_BYTES, ResidualsHeader};
use crate::adapt::{BY_ELEMENT, Feedback, Residuals, Role, Shape};
use crate::error::{Error, ErrorKind, Result};
use crate::gpu::{DeviceMemory, Stream};
use crate::plan::{Plan, Request};
use crate::schedule::Op;
use crate::types::Collective;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

/// Elements in which the cut of a call is written into the kind of its residuals: another cut encodes
/// other elements, or the same ones in another role.
const CUT_UNIT: u64 = 32;

/// Residuals by tensor.
#[derive(Debug, Default)]
pub(super) struct DeviceResiduals {
    tensors: HashMap<u64, Tensor>,
    /// Too small for what came later; a kernel may still use them.
    outgrown: Vec<Arc<DeviceMemory>>,
}

#[derive(Debug)]
struct Tensor {
    layout: Layout,
    memory: Arc<DeviceMemory>,
}

/// Where the residuals of a call are.
#[derive(Debug)]
pub(super) struct Place {
    /// Address of the header.
    pub address: u64,
    pub span: u64,
    /// Of the work.
    pub flags: u8,
    pub memory: Arc<DeviceMemory>,
}

/// What calls must have in common to share residuals, and the arrays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Layout {
    shape: Shape,
    owners: bool,
}

impl Layout {
    fn of(request: &Request, plan: &Plan) -> Result<Layout> {
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
        let chunks_of = |owner: bool| {
            let steps = plan.schedule.steps.iter();
            let encode = move |op| match op {
                Op::RecvReduceCopySend => owner,
                Op::Send | Op::RecvReduceSend => !owner,
                _ => false,
            };
            steps
                .filter(move |step| encode(step.op))
                .map(|step| step.chunk)
        };
        Ok(Layout {
            shape: Shape {
                kind: request.collective as u64
                    | u64::from(request.op.number()) << 8
                    | (request.dtype as u64) << 16
                    | (request.root as u64) << 32
                    | (plan.spec.kind as u64) << 24
                    | (plan.geometry.chunk() as u64 / CUT_UNIT % (1 << 16)) << 40
                    | (plan.algorithm as u64) << 56
                    | BY_ELEMENT,
                count: plan.count as u64,
                chunk: span as u64,
                chunks: 1,
            },
            owners: chunks_of(true).any(|owned| chunks_of(false).any(|chunk| chunk == owned)),
        })
    }

    fn arrays(&self) -> usize {
        if self.owners { 4 } else { 2 }
    }

    fn span(&self) -> usize {
        self.shape.chunk as usize
    }

    fn bytes(&self) -> usize {
        RESIDUALS_BYTES + self.arrays() * self.span() * 4
    }

    /// The byte at which an array begins.
    fn at(&self, array: usize) -> usize {
        RESIDUALS_BYTES + array * self.span() * 4
    }
}

impl DeviceResiduals {
    /// Refuses a call whose residuals cannot be had, before anything is queued.
    ///
    /// # Errors
    /// Invalid usage if there are none of its kind yet and the call is being captured: a graph would
    /// forget them in every replay. Unsupported from 2^32 elements on; as [`Feedback::admit`].
    pub fn check(
        &self,
        tensor: u64,
        (request, plan): (&Request, &Plan),
        captured: bool,
    ) -> Result<()> {
        let layout = Layout::of(request, plan)?;
        let known = self.tensors.get(&tensor);
        Feedback::admit_to(self.tensors.len(), known.is_some(), tensor)?;
        if captured && known.is_none_or(|known| known.layout != layout) {
            return Err(Error::invalid_usage(format!(
                "tensor {tensor} has no residuals of {} of {} {} yet, and a capture cannot make \
                 them: make the call once before it is captured",
                request.collective, plan.count, plan.dtype
            )));
        }
        Ok(())
    }

    /// The residuals for a call that [`DeviceResiduals::check`] admitted, zero if `tensor` has none
    /// of calls of its kind. What is queued for that comes behind what `stream` waits for.
    ///
    /// # Errors
    /// As [`DeviceMemory::queued`].
    pub fn place(
        &mut self,
        tensor: u64,
        (request, plan): (&Request, &Plan),
        stream: &Stream,
    ) -> Result<Place> {
        let layout = Layout::of(request, plan)?;
        let known = self.tensors.remove(&tensor);
        let memory = match known {
            Some(known) if known.layout == layout => known.memory,
            other => self.zeros(other, &layout, stream)?,
        };
        let place = Place {
            address: memory.address(),
            span: layout.span() as u64,
            flags: if layout.owners { abi::OWNERS } else { 0 },
            memory: memory.clone(),
        };
        self.tensors.insert(tensor, Tensor { layout, memory });
        Ok(place)
    }

    /// Memory with zeros queued into it: that of earlier residuals, if it is enough.
    fn zeros(
        &mut self,
        known: Option<Tensor>,
        layout: &Layout,
        stream: &Stream,
    ) -> Result<Arc<DeviceMemory>> {
        let bytes = layout.bytes();
        let memory = match known.map(|known| known.memory) {
            // A graph that holds it goes on there, with residuals of other calls.
            Some(memory) if memory.bytes() >= bytes && !is_held(&memory) => memory,
            outgrown => {
                // Much at once: what is outgrown stays until residuals are forgotten.
                let most = outgrown.as_ref().map_or(0, |memory| memory.bytes() / 2 * 3);
                self.outgrown.extend(outgrown);
                let bytes = bytes.max(most);
                Arc::new(DeviceMemory::queued(stream.context(), bytes, stream)?)
            }
        };
        memory.fill(0, stream)?;
        Ok(memory)
    }

    /// All residuals, on the host. No call may be running.
    ///
    /// # Errors
    /// Those of the driver; timeout.
    pub fn load(&self, stream: &Stream, patience: Duration) -> Result<Feedback> {
        let mut feedback = Feedback::new();
        for (&id, tensor) in &self.tensors {
            let Tensor { layout, memory } = tensor;
            let turn = turn_of(memory, stream, patience)?;
            let mut residuals = Residuals::new();
            residuals.begin(layout.shape);
            for role in roles(layout.owners) {
                let mut bytes = vec![0; layout.span() * 4];
                let at = layout.at(2 * role as usize + turn);
                memory.read(at, &mut bytes, stream, patience)?;
                let words = bytes.chunks_exact(4);
                let values =
                    words.map(|word| f32::from_le_bytes([word[0], word[1], word[2], word[3]]));
                residuals.put(role, 0, values.collect());
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
    pub fn store(
        &mut self,
        feedback: &Feedback,
        stream: &Stream,
        patience: Duration,
    ) -> Result<()> {
        feedback.check_elements()?;
        let mut tensors = HashMap::new();
        for (id, residuals) in feedback.iter() {
            let layout = Layout {
                shape: residuals.shape(),
                owners: residuals.iter().any(|(role, ..)| role == Role::Owner),
            };
            let memory = match self.tensors.remove(&id) {
                // Where graphs look for them.
                Some(known) if known.layout == layout => {
                    known.memory.fill(0, stream)?;
                    known.memory
                }
                other => self.zeros(other, &layout, stream)?,
            };
            for (role, _, values) in residuals.iter() {
                let bytes: Vec<u8> = values
                    .iter()
                    .flat_map(|value| value.to_le_bytes())
                    .collect();
                memory.write(layout.at(2 * role as usize), &bytes, stream, patience)?;
            }
            tensors.insert(id, Tensor { layout, memory });
        }
        // What was not stored is forgotten.
        self.forget(None, stream, patience)?;
        self.tensors.extend(tensors);
        Ok(())
    }

    /// Forgets the residuals of one tensor, or of all: those that a graph would go on from are zero
    /// from now on, others go. No call may be running.
    ///
    /// # Errors
    /// Those of the driver; timeout.
    pub fn forget(
        &mut self,
        tensor: Option<u64>,
        stream: &Stream,
        patience: Duration,
    ) -> Result<()> {
        for (id, known) in &self.tensors {
            if tensor.is_none_or(|tensor| tensor == *id) && is_held(&known.memory) {
                known.memory.fill(0, stream)?;
            }
        }
        stream.wait(patience)?;
        self.tensors.retain(|id, known| {
            tensor.is_some_and(|tensor| tensor != *id) || is_held(&known.memory)
        });
        self.outgrown.clear();
        Ok(())
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

fn roles(owners: bool) -> impl Iterator<Item = Role> {
    let all = [Role::Worker, Role::Owner];
    all.into_iter().take(if owners { 2 } else { 1 })
}
