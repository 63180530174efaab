//! Queues the calls of a group on GPUs: admits them together, then queues interleaved batches.

use super::super::gpu::GpuState;
use super::super::launch_interleave::{GpuCalls, interleave};
use super::super::sample::Admission;
use super::super::{Communicator, Report};
use super::{GroupCall, fail_all};
use crate::engine::gpu::{GpuCall, GpuEngine};
use crate::error::Result;
use crate::mem::Buffers;
use std::sync::{Arc, MutexGuard};

/// The calls of a group on one communicator of a GPU.
struct GpuGroup<'a, 'c> {
    comm: &'c Communicator,
    gpu: &'c GpuState,
    /// Indices of the calls in the group.
    indices: Vec<usize>,
    calls: Vec<(GpuCall<'a>, Admission)>,
}

/// Queues the calls on GPUs once all of them are admitted, and puts their reports into `reports`.
///
/// Communicators come in the order in which they were first named. On one stream their kernels run
/// one after the other: ranks with different orders would wait for each other for ever. Launches
/// for several GPUs are interleaved ([`interleave`]).
///
/// # Errors
/// The error that refuses a call, before any is queued; else the first failure, with which all
/// communicators of the group have failed.
pub(super) fn queue(
    calls: &mut [GroupCall<'_>],
    comms: &[&Communicator],
    reports: &mut [Option<Report>],
) -> Result<()> {
    let mut all = Vec::new();
    for comm in comms.iter().filter(|comm| comm.gpu_context().is_some()) {
        all.push(GpuGroup::find(calls, comm)?);
    }
    // All threads lock engines in the order of their addresses, so that no two threads deadlock.
    let mut by_address: Vec<usize> = (0..all.len()).collect();
    by_address.sort_by_key(|&at| std::ptr::from_ref(all[at].comm) as usize);
    let mut engines = Vec::with_capacity(all.len());
    for at in by_address {
        engines.push((at, all[at].gpu.engine()?));
    }
    engines.sort_by_key(|(at, _)| *at);
    let mut admitted = Vec::new();
    for (which, batch) in interleave(&gpu_calls(&all, &engines)) {
        let GpuGroup {
            comm,
            gpu,
            indices,
            calls,
        } = &all[which];
        let parts = comm.prepare_on(gpu, &mut engines[which].1, &calls[batch.clone()])?;
        admitted.push((which, &indices[batch], parts));
    }
    // From here on the calls count among the coded sums, even if they fail.
    for entry in calls {
        entry
            .buffers
            .take_if(|buffers| matches!(buffers, Buffers::Gpu(_)));
    }
    for (which, indices, parts) in admitted {
        let GpuGroup { comm, gpu, .. } = &all[which];
        let ran = comm
            .launch_on(gpu, &mut engines[which].1, &parts)
            .inspect_err(|error| fail_all(comms, error))?;
        for (&index, report) in indices.iter().zip(ran) {
            reports[index] = Some(report);
        }
    }
    Ok(())
}

impl<'a, 'c> GpuGroup<'a, 'c> {
    /// Finds the calls of `comm`.
    fn find(calls: &[GroupCall<'a>], comm: &'c Communicator) -> Result<GpuGroup<'a, 'c>> {
        let own = calls.iter().enumerate();
        let (indices, calls) = own
            .filter(|(_, entry)| entry.is_of(comm))
            .filter_map(|(index, entry)| {
                let Some(Buffers::Gpu(buffers)) = entry.buffers else {
                    return None;
                };
                let request = entry.call.resolve(entry.admission.decision.codec);
                Some((index, (GpuCall { request, buffers }, entry.admission)))
            })
            .unzip();
        Ok(GpuGroup {
            comm,
            gpu: comm.gpu_state()?,
            indices,
            calls,
        })
    }

    /// Returns for each call whether a batch may begin with it. A collective is a separate launch on all ranks, or shares
    /// one with those before it; messages between two collectives are one launch. Calls on several streams form
    /// one batch, because the batch joins the streams before and after its calls.
    fn may_begin(&self, engine: &GpuEngine) -> Vec<bool> {
        let mut group = Vec::with_capacity(self.calls.len());
        for (call, admission) in &self.calls {
            // A sampled call is queued by itself.
            group.push((call.request, admission.window.is_none()));
        }
        let places = engine.launch_places(&group);
        let launches = |at: usize| {
            let request = &self.calls[at].0.request;
            !request.collective.is_message() && request.count > 0
        };
        let stream = |at: usize| self.calls[at].0.buffers.stream();
        let is_one = (0..self.calls.len()).all(|at| stream(at) == stream(0));
        let may_begin = |at: usize| {
            is_one && places[at].begins && (at == 0 || launches(at - 1) || launches(at))
        };
        (0..self.calls.len()).map(may_begin).collect()
    }
}

/// Numbers the GPUs of the communicators for [`interleave`].
fn gpu_calls(
    all: &[GpuGroup<'_, '_>],
    engines: &[(usize, MutexGuard<'_, GpuEngine>)],
) -> Vec<GpuCalls> {
    let gpu = |group: &GpuGroup<'_, '_>| {
        let gpu = group.comm.gpu_context()?;
        Some((Arc::as_ptr(gpu.driver()), gpu.handle()))
    };
    let numbered =
        |(group, (_, engine)): (&GpuGroup<'_, '_>, &(usize, MutexGuard<'_, GpuEngine>))| GpuCalls {
            gpu: all
                .iter()
                .position(|other| gpu(other) == gpu(group))
                .unwrap_or_default(),
            may_begin: group.may_begin(engine),
        };
    all.iter().zip(engines).map(numbered).collect()
}
