//! Launches of collectives: one launch for a call, several where it has more peers than a kernel, or one for small calls of
//! a group (`plan::LaunchPlace`).

use super::launch::{KeptMemory, PreparedPlan, copy};
use super::pack::{PackedSchedule, WorkBuffer};
use super::residuals::ResidualPlace;
use super::{GpuCall, GpuEngine, PreparedCall};
use crate::error::{Error, Result};
use crate::gpu::Stream;
use crate::gpu::abi::WORK_BUFFER_BYTES;
use crate::plan::{LaunchPlace, Request};
use crate::types::{ReduceOp, SIGNATURE_WORDS, Scalar};
use std::ops::Range;

/// A call that has been given its signature.
#[derive(Clone, Copy)]
pub(super) struct BegunCall<'c, 'b> {
    pub call: &'c GpuCall<'b>,
    pub prepared: &'c PreparedCall,
    pub signature: [u64; SIGNATURE_WORDS],
}

impl BegunCall<'_, '_> {
    /// Returns the tensor whose residuals the call updates, if any.
    fn feedback_tensor(&self) -> Option<u64> {
        self.prepared.run.feedback_tensor(&self.call.request)
    }

    /// Returns whether this call or an earlier one writes memory that the other one uses.
    fn touches(&self, earlier: &BegunCall<'_, '_>) -> bool {
        let meet = |a: &Range<u64>, b: &Range<u64>| a.start < b.end && b.start < a.end;
        let writes = |one: &BegunCall<'_, '_>, used: &[Range<u64>]| {
            let output = range(one.call.buffers.output());
            used.iter().any(|used| meet(&output, used))
        };
        let used = |one: &BegunCall<'_, '_>| {
            let request = &one.call.request;
            let factor = match request.op {
                ReduceOp::PreMulSum(Scalar::Device(at)) if request.collective.reduces() => at,
                _ => 0,
            };
            let buffers = &one.call.buffers;
            let factor = (factor, if factor == 0 { 0 } else { request.dtype.size() });
            [buffers.input(), buffers.output(), factor].map(range)
        };
        writes(self, &used(earlier)) || writes(earlier, &used(self))
    }
}

fn range((address, bytes): (u64, usize)) -> Range<u64> {
    address..address + bytes as u64
}

/// Calls that will be one launch.
#[derive(Default)]
struct SharedLaunch<'a, 'c, 'b> {
    calls: Vec<&'a BegunCall<'c, 'b>>,
    /// Bytes of their work buffer.
    bytes: usize,
}

impl<'a, 'c, 'b> SharedLaunch<'a, 'c, 'b> {
    /// Adds a call, and returns whether the launch takes it. All its calls have one kernel and are independent of each other.
    /// Its work buffer fits the arguments: others would need pinned memory, whose allocation may wait for a kernel that waits
    /// for this thread's next launch. Statistics have one place for a launch.
    fn add(&mut self, one: &'a BegunCall<'c, 'b>) -> bool {
        let run = &one.prepared.run;
        let packed = &run.packed[0];
        let is_plain = |one: &BegunCall<'_, '_>| {
            let is_fused = one.prepared.run.plan.kernel.is_fused();
            !is_fused && one.call.buffers.statistics().is_none()
        };
        let (mut bytes, mut takes) = (packed.bytes(), true);
        if let Some(last) = self.calls.last() {
            let known = &last.prepared.run.packed[0];
            if (&known.steps, &known.peers) == (&packed.steps, &packed.peers) {
                bytes = PackedSchedule::WORK_BYTES;
            }
            takes = is_plain(last)
                && is_plain(one)
                && last.prepared.run.function.name() == run.function.name()
                && self.bytes + bytes <= WORK_BUFFER_BYTES
                && !self.calls.iter().any(|earlier| one.touches(earlier));
        }
        if takes {
            self.bytes += bytes;
            self.calls.push(one);
        }
        takes
    }
}

impl GpuEngine {
    /// Returns the places of the calls of a group, each beside whether it may share a launch. They are equal on all ranks.
    pub fn launch_places(&self, group: &[(Request, bool)]) -> Vec<LaunchPlace> {
        self.planner.launch_places(group, self.fuse_bytes)
    }

    /// Checks that connections have the channels of a call at its place.
    ///
    /// # Errors
    /// Internal if they do not.
    pub(super) fn check_channels(&self, run: &PreparedPlan, place: &LaunchPlace) -> Result<()> {
        let known = self.planner.limits().gpu.as_ref();
        let channels = known.map_or(0, |gpu| gpu.fifos[run.fifo() as usize].1);
        match place.first_channel == 0 || place.first_channel + run.plan.channels <= channels {
            true => Ok(()),
            false => Err(Error::internal(format!(
                "channels {} to {} of a shared launch, of {channels}",
                place.first_channel,
                place.first_channel + run.plan.channels
            ))),
        }
    }

    /// Launches collectives whose places share a launch: in one where possible. Where that is not possible, they follow each
    /// other on this rank alone.
    pub(super) fn together(
        &mut self,
        calls: &[BegunCall<'_, '_>],
        stream: &Stream,
        capture: Option<u64>,
    ) -> Result<()> {
        let mut launch = SharedLaunch::default();
        for one in calls {
            if !launch.add(one) {
                self.one_launch(&std::mem::take(&mut launch).calls, stream, capture)?;
                launch.add(one);
            }
        }
        self.one_launch(&launch.calls, stream, capture)
    }

    /// Launches the calls of a [`SharedLaunch`], if there are any.
    fn one_launch(
        &mut self,
        calls: &[&BegunCall<'_, '_>],
        stream: &Stream,
        capture: Option<u64>,
    ) -> Result<()> {
        match calls {
            [] => return Ok(()),
            [one] => {
                let run = &one.prepared.run;
                return self.with_statistics(one.call, run, (stream, capture), |engine| {
                    engine.collective(one, stream, capture)
                });
            }
            _ => {}
        }
        let mut work_buffer = WorkBuffer::default();
        for one in calls {
            let kept = KeptMemory {
                ends: true,
                ..KeptMemory::default()
            };
            let packed = &one.prepared.run.packed[0];
            self.add_work((&mut work_buffer, packed), one, kept, capture)?;
        }
        self.launch(
            &calls[0].prepared.run,
            &work_buffer,
            Vec::new(),
            stream,
            capture,
        )
    }

    /// Launches one collective, or copies where it has a single rank.
    pub(super) fn collective(
        &mut self,
        one: &BegunCall<'_, '_>,
        stream: &Stream,
        capture: Option<u64>,
    ) -> Result<()> {
        let BegunCall {
            call,
            prepared,
            signature,
        } = *one;
        let run = &prepared.run;
        if run.only_copies(call.request.op) {
            return self.queue(stream, capture, |engine| {
                copy(
                    stream,
                    call.addresses(),
                    run.plan.count * run.plan.dtype.size(),
                )?;
                engine.keep(stream, capture, None, Vec::new())
            });
        }
        let residuals = self.place_residuals(one, stream)?;
        if let Some(fused) = run.fused(call, signature, residuals.as_ref())? {
            let memory = residuals.map(|place| place.memory).into_iter().collect();
            return self.queue(stream, capture, |engine| {
                fused.launch(
                    run,
                    &*engine.connections,
                    engine.timeout,
                    stream,
                    engine.launch_mode,
                )?;
                engine.keep(stream, capture, None, memory)
            });
        }
        let scales = self.place_scales(&call.request, run, signature, stream)?;
        let launches = run.packed.iter().filter(|packed| !packed.steps.is_empty());
        let count = launches.clone().count();
        for (number, packed) in launches.enumerate() {
            let mut work_buffer = WorkBuffer::default();
            let kept = KeptMemory {
                residuals: residuals.as_ref(),
                scales: scales.as_ref(),
                ends: number + 1 == count,
            };
            self.add_work((&mut work_buffer, packed), one, kept, capture)?;
            let memory = residuals.iter().map(|place| &place.memory).chain(&scales);
            self.launch(
                run,
                &work_buffer,
                memory.cloned().collect(),
                stream,
                capture,
            )?;
        }
        Ok(())
    }

    /// Returns the residuals that a call reads and updates, if any.
    fn place_residuals(
        &mut self,
        one: &BegunCall<'_, '_>,
        stream: &Stream,
    ) -> Result<Option<ResidualPlace>> {
        let Some(tensor) = one.feedback_tensor() else {
            return Ok(None);
        };
        let call = (&one.call.request, &*one.prepared.run.plan);
        let place = self
            .residuals
            .place(tensor, call, &mut self.order, stream)?;
        Ok(Some(place))
    }

    /// Adds the steps of one launch of a call to its work buffer.
    fn add_work(
        &self,
        to: (&mut WorkBuffer, &PackedSchedule),
        one: &BegunCall<'_, '_>,
        kept: KeptMemory<'_>,
        capture: Option<u64>,
    ) -> Result<()> {
        one.prepared.run.add_to(
            to,
            one.call,
            (one.signature, one.prepared.place.first_channel),
            kept,
            capture.is_some(),
            self.launch_mode,
        )
    }
}
