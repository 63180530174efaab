//! Runs the calls of a group on host memory: fuses small calls, plans them, and lets all engines
//! make progress in turn.

use super::super::Communicator;
use super::super::fuse::{self, FusedCall};
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

/// Runs the repeated messages of a group of messages: first the sends, then the receives whose messages arrive within some
/// looks. Puts their reports into `reports` and takes their buffers. Does nothing unless every message is cached, and every
/// send has room.
pub(super) fn run_repeated_messages(
    comm: &Communicator,
    calls: &mut [GroupCall<'_>],
    reports: &mut [Option<Report>],
) -> Result<()> {
    let mut collectives = calls.iter().map(|it| it.call.collective);
    if comm.gpu_context().is_some() || !collectives.all(|it| it.is_message()) {
        return Ok(());
    }
    // While another thread has the engine, the group waits for it as other groups do.
    let Ok(mut engine) = comm.host_engine()?.try_lock() else {
        return Ok(());
    };
    let Some(places) = cached_places(comm, &mut engine, calls) else {
        return Ok(());
    };
    let mut ran = Ok(());
    for look in 0..=engine.looks() {
        let mut waits = false;
        for ((entry, report), &place) in calls.iter_mut().zip(&mut *reports).zip(&places) {
            let sends = entry.call.root == comm.rank();
            if report.is_some() || sends != (look == 0) || ran.is_err() {
                waits |= report.is_none();
                continue;
            }
            if let Some(Buffers::Host(buffers)) = &mut entry.buffers
                && engine.is_ready_message(place)
            {
                // The times of calls in groups are not counted.
                ran = engine.run_cached(place, buffers, None).map(|done| {
                    *report = Some(done);
                    entry.buffers = None;
                });
            } else {
                waits = true;
            }
        }
        if !waits {
            break;
        }
        std::hint::spin_loop();
    }
    drop(engine);
    comm.fail_on_error(ran)
}

/// Number of messages above which a group is not looked up in the cache.
const MOST_REPEATED: usize = 64;

/// Returns the places of all messages in the cache; `None` if one is missing, or could wait for another message of the
/// group.
fn cached_places(
    comm: &Communicator,
    engine: &mut HostEngine,
    calls: &[GroupCall<'_>],
) -> Option<Vec<usize>> {
    let pair = |it: &GroupCall<'_>| (it.call.root, it.call.peer);
    // The second message of a pair may have no room before the peer has received the first.
    let is_second = |at: usize| calls[..at].iter().any(|it| pair(it) == pair(&calls[at]));
    if calls.len() > MOST_REPEATED || (0..calls.len()).any(is_second) {
        return None;
    }
    let place = |entry: &GroupCall<'_>| {
        let place = engine.find_cached(&entry.call, entry.host_buffers()?)?;
        let receives = entry.call.root != comm.rank();
        (receives || engine.is_ready_message(place)).then_some(place)
    };
    calls.iter().map(place).collect()
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
                self.cache_messages(&results);
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

    /// Caches the messages that have run, so that a group of equal messages plans nothing.
    fn cache_messages(&mut self, results: &GroupResults<'_, '_>) {
        for HostBatch { comm, engine, .. } in &mut self.batches {
            for (entry, report) in results.calls.iter().zip(&*results.reports) {
                let GroupCall {
                    call, admission, ..
                } = entry;
                let reason = admission.decision.raw_reason;
                if let (true, Some(reason), Some(report)) = (
                    entry.is_of(comm) && call.collective.is_message(),
                    reason,
                    report,
                ) {
                    let request = call.resolve(admission.decision.codec);
                    let counts = || comm.count_repeats(call, reason, report);
                    engine.cache_call(call, &request, report, counts);
                }
            }
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
