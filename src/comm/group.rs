//! Groups of calls.

use super::check::{self, BufferRanges};
use super::fuse::{self, FusedCall};
use super::gpu::GpuState;
use super::launch_interleave::{GpuCalls, interleave};
use super::sample::Admission;
use super::{Call, Communicator, PanicGuard, Report};
use crate::cpu::FloatEnvironment;
use crate::engine::gpu::GpuCall;
use crate::engine::{Batch, Caller};
use crate::error::{Error, Result};
use crate::mem::{Buffers, DeviceBuffers, UserBuffers};
use crate::plan::Request;
use crate::types::Collective;
use std::sync::Arc;

/// Calls that run together: needed for sends and receives that depend on each other, and for one
/// thread that holds several ranks.
#[derive(Debug, Default)]
pub struct Group<'a> {
    calls: Vec<GroupCall<'a>>,
}

#[derive(Debug)]
struct GroupCall<'a> {
    comm: &'a Communicator,
    call: Call,
    admission: Admission,
    buffers: Option<Buffers<'a>>,
}

impl<'a> Group<'a> {
    /// An empty group.
    pub fn new() -> Group<'a> {
        Group::default()
    }

    /// Adds a call. Nothing moves before [`Group::run`].
    ///
    /// # Errors
    /// As the checks of [`Communicator::call`]; the group stays as it was.
    pub fn add(
        &mut self,
        comm: &'a Communicator,
        call: &Call,
        buffers: UserBuffers<'a>,
    ) -> Result<()> {
        comm.check_fault()?;
        comm.host_engine()?;
        check::call(comm, call, &BufferRanges::from(&buffers))?;
        // Not sampled even alone: what else a rank has in its groups the others do not know.
        let admission = comm.admit(call, false)?;
        self.calls.push(GroupCall {
            comm,
            call: *call,
            admission,
            buffers: Some(Buffers::Host(buffers)),
        });
        Ok(())
    }

    /// Adds a call on a GPU. Nothing is queued before [`Group::run`].
    ///
    /// # Errors
    /// As the checks of [`Communicator::call_on`]; the group stays as it was.
    pub fn add_on(
        &mut self,
        comm: &'a Communicator,
        call: &Call,
        buffers: DeviceBuffers<'a>,
    ) -> Result<()> {
        comm.check_fault()?;
        let _bound = comm.gpu_state()?.context().bind()?;
        comm.check_on(call, &buffers)?;
        let admission = comm.admit_on(call, &buffers)?;
        self.calls.push(GroupCall {
            comm,
            call: *call,
            admission,
            buffers: Some(Buffers::Gpu(buffers)),
        });
        Ok(())
    }

    /// Lets the collectives of each communicator run ahead of its sends and receives, both in their order:
    /// calls that do not depend on each other may then be added in an order of each rank's own. Reports
    /// come in the new order.
    pub fn collectives_first(&mut self) {
        let mut comms: Vec<*const Communicator> = Vec::new();
        for entry in &self.calls {
            let comm = std::ptr::from_ref(entry.comm);
            if !comms.contains(&comm) {
                comms.push(comm);
            }
        }
        // Communicators keep the order in which they were first named.
        self.calls.sort_by_key(|entry| {
            let comm = std::ptr::from_ref(entry.comm);
            let named = comms.iter().position(|other| *other == comm);
            (named, entry.call.collective == Collective::SendRecv)
        });
    }

    /// Runs all calls. Those of one communicator start in order; sends and receives between two
    /// collectives run at once. Reports come in the order in which calls were added.
    ///
    /// Small all_reduces of host memory that follow one another on a communicator and differ in
    /// nothing but their data and count travel as one (`CINCH_FUSE_BYTES`): their buffers must not
    /// depend on each other. All ranks must group them alike. A group of one call is as that call without
    /// a group, but for `CINCH_CODEC_SAMPLE`: calls on host memory that are in groups are not sampled, so
    /// that with it all ranks must make a coded sum in a group, or none.
    ///
    /// Calls on GPUs are queued, those of all communicators before anything waits, in the order in which
    /// the communicators were first named: it is the same on all ranks where they share a stream. Those
    /// of one communicator run on the stream of the first of them, behind what is on the streams of all,
    /// which go on behind them. A driver takes some 1,000 launches of a stream before it keeps this thread
    /// waiting: ranks of one thread on several GPUs get theirs in turns, those on one GPU do not. Then the
    /// calls on host memory run to their ends.
    ///
    /// # Errors
    /// What refuses a call, before anything of the group moves; then the first failure, with which
    /// the communicators of the group fail, those of its other calls too.
    pub fn run(mut self) -> Result<Vec<Report>> {
        let _environment = FloatEnvironment::standard();
        let mut comms: Vec<&Communicator> = Vec::new();
        for entry in &self.calls {
            if !comms.iter().any(|comm| std::ptr::eq(*comm, entry.comm)) {
                comms.push(entry.comm);
            }
        }
        self.pair_own_messages()?;
        let _guards: Vec<PanicGuard<'_>> = comms.iter().map(|comm| PanicGuard(comm)).collect();
        let mut hosts = comms.clone();
        hosts.retain(|comm| comm.gpu().is_none());
        // Two threads that group the same communicators must lock them in one order.
        hosts.sort_by_key(|comm| std::ptr::from_ref(*comm) as usize);
        let mut engines = Vec::with_capacity(hosts.len());
        for comm in &hosts {
            engines.push(comm.engine()?);
        }
        let mut fused = Vec::with_capacity(hosts.len());
        let mut memories: Vec<Vec<Vec<u8>>> = Vec::with_capacity(hosts.len());
        for comm in &hosts {
            let own = self.fused(comm)?;
            let memory = own.iter().map(|fused| comm.take_fuse_buffer(fused.bytes()));
            memories.push(memory.collect());
            fused.push(own);
        }
        let mut batches = Vec::with_capacity(hosts.len());
        let places = fused.iter().zip(&mut memories);
        for ((comm, engine), (fused, memory)) in hosts.iter().zip(&mut engines).zip(places) {
            batches.push(Batch::new(engine, self.requests(comm, fused, memory)?)?);
        }
        // Behind everything that can be refused on host memory: a group that is made anew would
        // queue these calls twice.
        let mut reports = vec![None; self.calls.len()];
        self.queue(&comms, &mut reports)?;
        let mut fused: Vec<FusedCall> = fused.into_iter().flatten().collect();
        fused.sort_unstable_by_key(FusedCall::first);
        let mut results = GroupResults {
            calls: &mut self.calls,
            fused,
            reports,
        };
        let mut failure = None;
        // Each communicator's engine gets a turn until all are done.
        let mut scans = 0;
        while failure.is_none() && !batches.is_empty() {
            let mut moved = false;
            let mut done = true;
            for (batch, (comm, engine)) in batches.iter_mut().zip(hosts.iter().zip(&mut engines)) {
                match batch.poll(engine, &mut results) {
                    Ok(progress) => {
                        moved |= progress.moved;
                        done &= progress.done;
                    }
                    Err(error) => failure = comm.fail_on_error::<()>(Err(error)).err(),
                }
            }
            if done {
                break;
            }
            if moved || failure.is_some() {
                scans = 0;
                continue;
            }
            let turns = batches.len();
            for (batch, (comm, engine)) in batches.iter_mut().zip(hosts.iter().zip(&mut engines)) {
                if let Err(error) = batch.idle(engine, scans, turns) {
                    failure = comm.fail_on_error::<()>(Err(error)).err();
                }
            }
            scans += 1;
        }
        drop(batches);
        drop(engines);
        let GroupResults { reports, .. } = results;
        if let Some(error) = failure {
            for comm in comms {
                comm.fail(
                    error
                        .clone()
                        .context("another call of the same group failed"),
                );
            }
            return Err(error);
        }
        for (comm, memories) in hosts.iter().zip(memories) {
            memories
                .into_iter()
                .for_each(|memory| comm.keep_fuse_buffer(memory));
        }
        let reports: Vec<Report> = reports
            .into_iter()
            .map(|report| report.ok_or_else(|| Error::internal("a call of a group has no report")))
            .collect::<Result<_>>()?;
        for (entry, report) in self.calls.iter().zip(&reports) {
            entry.comm.counters.ran(&entry.admission.decision, report);
        }
        Ok(reports)
    }

    /// The small calls of `comm` that travel as one.
    fn fused(&self, comm: &Communicator) -> Result<Vec<FusedCall>> {
        let own = self.calls.iter().enumerate();
        let own: Vec<_> = own
            .filter(|(_, entry)| std::ptr::eq(entry.comm, comm))
            .map(|(index, entry)| (index, &entry.call, entry.admission.decision.codec))
            .collect();
        let fused = fuse::fused_calls(comm, &own)?;
        for fused in &fused {
            fuse::check_apart(fused.members.iter().filter_map(|&index| {
                let buffers = self.calls[index].host()?;
                let (input, output) = (buffers.input_address(), buffers.output_address());
                let bytes = self.calls[index].call.count * self.calls[index].call.dtype.size();
                Some((index, [input..input + bytes, output..output + bytes]))
            }))?;
        }
        Ok(fused)
    }

    /// What the engine of `comm` runs, each call with its index: one for each fused, in its
    /// memory and at the place of its first call.
    fn requests<'p>(
        &mut self,
        comm: &Communicator,
        fused: &[FusedCall],
        memories: &'p mut [Vec<u8>],
    ) -> Result<Vec<(usize, Request, UserBuffers<'p>)>>
    where
        'a: 'p,
    {
        let mut requests = Vec::new();
        let mut fused = fused.iter().zip(memories).peekable();
        let mut members: &[usize] = &[];
        for index in 0..self.calls.len() {
            let entry = &self.calls[index];
            if !std::ptr::eq(entry.comm, comm) || members.binary_search(&index).is_ok() {
                continue;
            }
            if let Some((fused, memory)) = fused.next_if(|(fused, _)| fused.first() == index) {
                let request = fused.request(&entry.call);
                let bytes = memory.len();
                members = &fused.members;
                requests.push((index, request, UserBuffers::in_place(memory, 0, bytes)?));
                continue;
            }
            let (call, codec) = (entry.call, entry.admission.decision.codec);
            if let Some(Buffers::Host(buffers)) = self.calls[index].buffers.take() {
                requests.push((index, call.request(codec), buffers));
            }
        }
        Ok(requests)
    }

    /// Queues what is on GPUs, once all of it was admitted, communicator by communicator in the order in
    /// which they were first named: no launch waits for another. On one stream their kernels run one
    /// after the other, so ranks that took them in orders of their own, by address say, would wait for
    /// each other for ever. Those of several GPUs take turns ([`interleave`]). A failure in between fails all
    /// communicators of the group.
    fn queue(&mut self, comms: &[&Communicator], reports: &mut [Option<Report>]) -> Result<()> {
        let mut all = Vec::new();
        for comm in comms.iter().filter(|comm| comm.gpu().is_some()) {
            all.push(self.queued(comm)?);
        }
        // Locked in one order by all threads, as engines of host memory are.
        let mut by_address: Vec<usize> = (0..all.len()).collect();
        by_address.sort_by_key(|&at| std::ptr::from_ref(all[at].comm) as usize);
        let mut engines = Vec::with_capacity(all.len());
        for at in by_address {
            engines.push((at, all[at].gpu.engine()?));
        }
        engines.sort_by_key(|(at, _)| *at);
        let mut admitted = Vec::new();
        for (which, batch) in interleave(&gpu_calls(&all)) {
            let queued = &all[which];
            let calls = &queued.calls[batch.clone()];
            let parts = queued
                .comm
                .prepare_on(queued.gpu, &mut engines[which].1, calls)?;
            admitted.push((which, &queued.indices[batch], parts));
        }
        // From here on they count, whatever comes of them.
        for entry in &mut self.calls {
            entry
                .buffers
                .take_if(|buffers| matches!(buffers, Buffers::Gpu(_)));
        }
        for (which, indices, parts) in admitted {
            let GpuGroup { comm, gpu, .. } = &all[which];
            match comm.launch_on(gpu, &mut engines[which].1, &parts) {
                Ok(ran) => {
                    for (&index, report) in indices.iter().zip(ran) {
                        reports[index] = Some(report);
                    }
                }
                Err(error) => {
                    // Other ranks queue their part of each: no call of it may wait for this rank.
                    for other in comms {
                        other.fail(
                            error
                                .clone()
                                .context("another call of the same group failed"),
                        );
                    }
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// The calls of `comm`, which is on a GPU.
    fn queued<'c>(&self, comm: &'c Communicator) -> Result<GpuGroup<'a, 'c>> {
        let own = self.calls.iter().enumerate();
        let (indices, calls) = own
            .filter(|(_, entry)| std::ptr::eq(entry.comm, comm))
            .filter_map(|(index, entry)| {
                let Some(Buffers::Gpu(buffers)) = entry.buffers else {
                    return None;
                };
                let request = entry.call.request(entry.admission.decision.codec);
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

    /// Joins each message of a rank to itself with its receive: the first send with the first
    /// receive, and so on. The pair becomes one local copy, run in the send's place; the receive
    /// keeps its entry with empty buffers for the sake of its report.
    fn pair_own_messages(&mut self) -> Result<()> {
        let is_own = |entry: &GroupCall<'_>| {
            entry.call.collective == Collective::SendRecv
                && entry.call.root == entry.call.peer
                && entry.call.count > 0
        };
        let own: Vec<usize> = (0..self.calls.len())
            .filter(|&i| is_own(&self.calls[i]))
            .collect();
        let is_send = |entry: &GroupCall<'_>| {
            entry
                .buffers
                .as_ref()
                .is_some_and(|b| b.output_bytes() == 0)
        };
        let mut unpaired: Vec<usize> = Vec::new();
        for index in own {
            let entry = &self.calls[index];
            let partner = unpaired.iter().position(|&other| {
                let other = &self.calls[other];
                std::ptr::eq(other.comm, entry.comm) && is_send(other) != is_send(entry)
            });
            let Some(position) = partner else {
                unpaired.push(index);
                continue;
            };
            let other = unpaired.remove(position);
            let (send, recv) = if is_send(entry) {
                (index, other)
            } else {
                (other, index)
            };
            let (a, b) = (self.calls[send].call, self.calls[recv].call);
            if (a.count, a.dtype) != (b.count, b.dtype) {
                return Err(Error::new(
                    crate::error::ErrorKind::Mismatch,
                    format!(
                        "rank {} sends itself {} {}, but receives {} {}",
                        a.root, a.count, a.dtype, b.count, b.dtype
                    ),
                ));
            }
            let places = |index: usize| self.calls[index].buffers.as_ref().map(Buffers::places);
            if let (Some((input, _)), Some((_, output))) = (places(send), places(recv)) {
                check::to_oneself(&a, input, output)?;
            }
            let input = self.calls[send].buffers.take();
            let output = self.calls[recv].buffers.take();
            if let (Some(input), Some(output)) = (input, output)
                && let Some((both, rest)) = Buffers::joined(input, output)
            {
                self.calls[send].buffers = Some(both);
                self.calls[recv].buffers = Some(rest);
                self.calls[recv].call.count = 0;
            }
        }
        match unpaired.first() {
            None => Ok(()),
            Some(&index) => Err(Error::invalid_usage(format!(
                "rank {} {} itself, and the group has no {} for it",
                self.calls[index].call.root,
                if is_send(&self.calls[index]) {
                    "sends to"
                } else {
                    "receives from"
                },
                if is_send(&self.calls[index]) {
                    "receive"
                } else {
                    "send"
                },
            ))),
        }
    }
}

/// What a group has for one communicator on a GPU.
struct GpuGroup<'a, 'c> {
    comm: &'c Communicator,
    gpu: &'c GpuState,
    /// Of the calls in the group.
    indices: Vec<usize>,
    calls: Vec<(GpuCall<'a>, Admission)>,
}

impl GpuGroup<'_, '_> {
    /// Whether a turn may begin with each call: a collective launches by itself on all ranks, messages
    /// between two of these go together. On several streams all calls have one place in each.
    fn may_begin(&self) -> Vec<bool> {
        let launches = |at: usize| {
            let request = &self.calls[at].0.request;
            request.collective != Collective::SendRecv && request.count > 0
        };
        let stream = |at: usize| self.calls[at].0.buffers.stream();
        let is_one = (0..self.calls.len()).all(|at| stream(at) == stream(0));
        let may_begin = |at: usize| is_one && (at == 0 || launches(at - 1) || launches(at));
        (0..self.calls.len()).map(may_begin).collect()
    }
}

/// What the turns of these depend on.
fn gpu_calls(all: &[GpuGroup<'_, '_>]) -> Vec<GpuCalls> {
    let gpu = |queued: &GpuGroup<'_, '_>| {
        let gpu = queued.comm.gpu()?;
        Some((Arc::as_ptr(gpu.driver()), gpu.handle()))
    };
    let waiting = |queued: &GpuGroup<'_, '_>| GpuCalls {
        gpu: all
            .iter()
            .position(|other| gpu(other) == gpu(queued))
            .unwrap_or_default(),
        may_begin: queued.may_begin(),
    };
    all.iter().map(waiting).collect()
}

impl<'a> GroupCall<'a> {
    fn host(&self) -> Option<&UserBuffers<'a>> {
        match &self.buffers {
            Some(Buffers::Host(buffers)) => Some(buffers),
            _ => None,
        }
    }
}

/// Takes down what comes of the calls on host memory. Those that travel as one give their inputs when
/// the call that stands for them starts, and have their outputs when it ends: what they depend on, and
/// what depends on them, is as it is with separate calls.
struct GroupResults<'g, 'a> {
    calls: &'g mut [GroupCall<'a>],
    /// In the order of their first calls.
    fused: Vec<FusedCall>,
    /// By call.
    reports: Vec<Option<Report>>,
}

impl GroupResults<'_, '_> {
    fn fused_of(&self, index: usize) -> Option<usize> {
        let found = self.fused.binary_search_by_key(&index, FusedCall::first);
        found.ok()
    }
}

impl Caller for GroupResults<'_, '_> {
    fn starts(&mut self, index: usize, buffers: &mut UserBuffers<'_>) -> Result<()> {
        let Some(at) = self.fused_of(index) else {
            return Ok(());
        };
        let fused = &mut self.fused[at];
        let members = fused.members.clone();
        let inputs = members.iter().filter_map(|&index| self.calls[index].host());
        fused.gather(inputs, buffers.output_mut(0, buffers.output_bytes()))
    }

    fn ends(&mut self, index: usize, buffers: &UserBuffers<'_>, report: Report) {
        let Some(at) = self.fused_of(index) else {
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

impl Drop for Group<'_> {
    /// Calls that were not queued, of a group that is dropped or refused, take no number among the coded
    /// sums with them: other ranks may count none for them, and would sample another call than this one.
    fn drop(&mut self) {
        for entry in &self.calls {
            if let Some(Buffers::Gpu(_)) = entry.buffers {
                entry.comm.rollback(&entry.admission);
            }
        }
    }
}
