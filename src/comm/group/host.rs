//! Runs the calls of a group on host memory: fuses small calls, plans them, and lets all engines
//! make progress in turn.

use super::super::Communicator;
use super::super::fuse::{self, FusedCall};
use super::super::stats;
use super::GroupCall;
use crate::engine::{Batch, Caller, HostEngine, Report};
use crate::error::Result;
use crate::mem::{Buffers, UserBuffers};
use crate::types::ResolvedCall;
use std::sync::MutexGuard;

/// The fused calls of one communicator, and the memory of each.
pub(super) struct HostCalls<'c> {
    comm: &'c Communicator,
    fused: Vec<FusedCall>,
    memory: Vec<Vec<u8>>,
}

impl<'c> HostCalls<'c> {
    /// Finds the communicators of host memory among `comms`, and the calls that are fused.
    pub fn find(calls: &[GroupCall<'_>], comms: &[&'c Communicator]) -> Result<Vec<HostCalls<'c>>> {
        let mut hosts: Vec<&Communicator> = comms.to_vec();
        hosts.retain(|comm| comm.gpu_context().is_none());
        // Two threads that group the same communicators must lock their engines in one order.
        hosts.sort_by_key(|comm| std::ptr::from_ref(*comm) as usize);
        hosts
            .into_iter()
            .map(|comm| {
                let fused = fused_calls(calls, comm)?;
                let memory = fused.iter().map(|one| comm.take_fuse_buffer(one.bytes()));
                Ok(HostCalls {
                    comm,
                    memory: memory.collect(),
                    fused,
                })
            })
            .collect()
    }

    /// Returns the memory to the communicator, for its next group.
    pub fn keep_memory(self) {
        for memory in self.memory {
            self.comm.keep_fuse_buffer(memory);
        }
    }
}

/// Runs a group of repeated messages: first the sends, which have room, then the receives. Returns `None`, before
/// anything moves, if a message must be planned, or must wait for another one of the group.
pub(super) fn run_repeated_messages(
    comm: &Communicator,
    calls: &mut [GroupCall<'_>],
) -> Option<Result<Vec<Report>>> {
    let mut engine = comm.host_engine().ok()?.try_lock().ok()?;
    let mut places = Vec::with_capacity(calls.len());
    for (index, entry) in calls.iter().enumerate() {
        let call = &entry.call;
        let pair = (call.root, call.peer);
        let earlier = calls[..index].iter();
        // The second message of a pair may have to wait until the first is received.
        let is_second = earlier
            .map(|it| (it.call.root, it.call.peer))
            .any(|it| it == pair);
        let place = engine.find_cached(call, entry.host_buffers()?)?;
        if is_second || !engine.is_independent_message(place) {
            return None;
        }
        places.push(place);
    }
    let mut reports = vec![None; calls.len()];
    for sends in [true, false] {
        for (index, entry) in calls.iter_mut().enumerate() {
            if (entry.call.root == comm.rank()) != sends {
                continue;
            }
            let Some(Buffers::Host(buffers)) = &mut entry.buffers else {
                continue;
            };
            let begun = comm.start_clock(stats::call_bytes(&entry.call, comm.nranks()));
            match engine.run_cached(places[index], buffers, begun) {
                Ok(report) => reports[index] = Some(report),
                Err(error) => {
                    drop(engine);
                    return Some(comm.fail_on_error(Err(error)));
                }
            }
        }
    }
    Some(Ok(reports.into_iter().flatten().collect()))
}

/// Caches the messages of a group that has run, so that groups of equal messages plan nothing.
pub(super) fn cache_messages(calls: &[GroupCall<'_>], reports: &[Report]) -> Result<()> {
    for (entry, report) in calls.iter().zip(reports) {
        let GroupCall {
            comm,
            call,
            admission,
            ..
        } = entry;
        let reason = admission.decision.raw_reason;
        if let (true, None, Some(reason)) =
            (call.collective.is_message(), comm.gpu_context(), reason)
        {
            let request = call.resolve(admission.decision.codec);
            let counts = || comm.count_repeats(call, reason, report);
            comm.engine()?.cache_call(call, &request, report, counts);
        }
    }
    Ok(())
}

/// Finds the small calls of `comm` that are fused.
fn fused_calls(calls: &[GroupCall<'_>], comm: &Communicator) -> Result<Vec<FusedCall>> {
    let own: Vec<_> = calls
        .iter()
        .enumerate()
        .filter(|(_, entry)| entry.is_of(comm))
        .map(|(index, entry)| (index, &entry.call, entry.admission.decision.codec))
        .collect();
    let fused = fuse::fused_calls(comm, &own)?;
    for fused in &fused {
        fuse::check_apart(fused.members.iter().filter_map(|&index| {
            let buffers = calls[index].host_buffers()?;
            let (input, output) = (buffers.input_address(), buffers.output_address());
            let bytes = calls[index].call.count * calls[index].call.dtype.size();
            Some((index, [input..input + bytes, output..output + bytes]))
        }))?;
    }
    Ok(fused)
}

/// Returns the calls that the engine of `comm` runs, each with its index. A fused call is in the
/// place of its first member, and in its own memory.
fn resolved_calls<'p, 'a: 'p>(
    calls: &mut [GroupCall<'a>],
    comm: &Communicator,
    fused: &[FusedCall],
    memory: &'p mut [Vec<u8>],
) -> Result<Vec<(usize, ResolvedCall, UserBuffers<'p>)>> {
    let mut resolved = Vec::new();
    let mut fused = fused.iter().zip(memory).peekable();
    let mut members: &[usize] = &[];
    for (index, entry) in calls.iter_mut().enumerate() {
        if !entry.is_of(comm) || members.binary_search(&index).is_ok() {
            continue;
        }
        if let Some((fused, memory)) = fused.next_if(|(fused, _)| fused.first() == index) {
            let bytes = memory.len();
            members = &fused.members;
            let buffers = UserBuffers::in_place(memory, 0, bytes)?;
            resolved.push((index, fused.resolve(&entry.call), buffers));
        } else if let Some(Buffers::Host(buffers)) = entry.buffers.take() {
            let call = entry.call.resolve(entry.admission.decision.codec);
            resolved.push((index, call, buffers));
        }
    }
    Ok(resolved)
}

/// The calls of one communicator, bound to its engine.
struct HostBatch<'c, 'p> {
    comm: &'c Communicator,
    engine: MutexGuard<'c, HostEngine>,
    batch: Batch<'p>,
}

/// The planned calls of all communicators of host memory, whose engines are locked.
pub(super) struct HostRun<'c, 'p> {
    batches: Vec<HostBatch<'c, 'p>>,
    /// The fused calls, in the order of their first members.
    fused: Vec<FusedCall>,
}

impl<'c, 'p> HostRun<'c, 'p> {
    /// Locks the engines and plans all calls. Nothing moves.
    ///
    /// # Errors
    /// As for [`Batch::new`].
    pub fn plan<'a: 'p>(
        hosts: &'p mut [HostCalls<'c>],
        calls: &mut [GroupCall<'a>],
    ) -> Result<HostRun<'c, 'p>> {
        let mut batches = Vec::with_capacity(hosts.len());
        let mut all_fused = Vec::new();
        let engines: Result<Vec<_>> = hosts.iter().map(|host| host.comm.engine()).collect();
        for (host, mut engine) in hosts.iter_mut().zip(engines?) {
            let HostCalls {
                comm,
                fused,
                memory,
            } = host;
            let batch = Batch::new(&mut engine, resolved_calls(calls, comm, fused, memory)?)?;
            batches.push(HostBatch {
                comm,
                engine,
                batch,
            });
            all_fused.append(fused);
        }
        all_fused.sort_unstable_by_key(FusedCall::first);
        Ok(HostRun {
            batches,
            fused: all_fused,
        })
    }

    /// Runs all calls to their ends and puts their reports into `reports`.
    ///
    /// # Errors
    /// The first failure; its communicator has failed.
    pub fn drive<'a>(
        mut self,
        calls: &mut [GroupCall<'a>],
        reports: &mut [Option<Report>],
    ) -> Result<()> {
        let mut results = GroupResults {
            calls,
            fused: std::mem::take(&mut self.fused),
            reports,
        };
        let mut scans = 0;
        loop {
            let (mut moved, mut done) = (false, true);
            // Each engine makes progress in turn, because its calls may wait for calls of another
            // engine.
            for HostBatch {
                comm,
                engine,
                batch,
            } in &mut self.batches
            {
                let progress = comm.fail_on_error(batch.poll(engine, &mut results))?;
                moved |= progress.moved;
                done &= progress.done;
            }
            if done {
                return Ok(());
            }
            if moved {
                scans = 0;
                continue;
            }
            let turns = self.batches.len();
            for HostBatch {
                comm,
                engine,
                batch,
            } in &mut self.batches
            {
                comm.fail_on_error(batch.idle(engine, scans, turns))?;
            }
            scans += 1;
        }
    }
}

/// Collects the results of the calls. A fused call gathers the inputs of its members when it starts
/// and scatters their outputs when it ends. So earlier and later calls find the buffers as with
/// separate calls.
struct GroupResults<'g, 'a> {
    calls: &'g mut [GroupCall<'a>],
    /// The fused calls, in the order of their first members.
    fused: Vec<FusedCall>,
    /// The report of each call, in the order of `calls`.
    reports: &'g mut [Option<Report>],
}

impl GroupResults<'_, '_> {
    fn fused_at(&self, index: usize) -> Option<usize> {
        let found = self.fused.binary_search_by_key(&index, FusedCall::first);
        found.ok()
    }
}

impl Caller for GroupResults<'_, '_> {
    fn starts(&mut self, index: usize, buffers: &mut UserBuffers<'_>) -> Result<()> {
        let Some(at) = self.fused_at(index) else {
            return Ok(());
        };
        let fused = &mut self.fused[at];
        let members = fused.members.clone();
        let inputs = members
            .iter()
            .filter_map(|&index| self.calls[index].host_buffers());
        fused.gather(inputs, buffers.output_mut(0, buffers.output_bytes()))
    }

    fn ends(&mut self, index: usize, buffers: &UserBuffers<'_>, report: Report) {
        let Some(at) = self.fused_at(index) else {
            self.reports[index] = Some(report);
            return;
        };
        let fused = &self.fused[at];
        for (member, report) in fused.reports(&report).into_iter().enumerate() {
            let index = fused.members[member];
            if let Some(Buffers::Host(output)) = &mut self.calls[index].buffers {
                fused.scatter(member, buffers, output);
            }
            self.reports[index] = Some(report);
        }
    }
}
