//! Groups of calls. The submodules run the calls on host memory and on GPUs.

mod gpu;
mod host;

use super::check::{self, BufferRanges};
use super::sample::Admission;
use super::{Call, Communicator, PanicGuard, Report};
use crate::cpu::FloatEnvironment;
use crate::error::{Error, ErrorKind, Result};
use crate::mem::{Buffers, DeviceBuffers, UserBuffers};
use crate::sys::nvtx;
use host::{HostCalls, HostRun};

/// Calls that run together. Sends and receives that depend on each other need a group, and so does a
/// thread that holds several ranks.
#[derive(Debug, Default)]
pub struct Group<'a> {
    calls: Vec<GroupCall<'a>>,
}

/// A call of a group.
#[derive(Debug)]
struct GroupCall<'a> {
    comm: &'a Communicator,
    call: Call,
    admission: Admission,
    /// The buffers of the call, taken when the call is planned or queued.
    buffers: Option<Buffers<'a>>,
}

impl<'a> GroupCall<'a> {
    fn is_of(&self, comm: &Communicator) -> bool {
        std::ptr::eq(self.comm, comm)
    }

    fn host_buffers(&self) -> Option<&UserBuffers<'a>> {
        match &self.buffers {
            Some(Buffers::Host(buffers)) => Some(buffers),
            _ => None,
        }
    }

    /// Returns whether the call is a message from the rank to itself that moves data.
    fn is_own_message(&self) -> bool {
        let call = &self.call;
        call.collective.is_message() && call.root == call.peer && call.count > 0
    }

    /// Returns whether the call is the sending side of a message of the rank to itself.
    fn is_own_send(&self) -> bool {
        let buffers = self.buffers.as_ref();
        buffers.is_some_and(|buffers| buffers.output_bytes() == 0)
    }
}

impl<'a> Group<'a> {
    /// Makes an empty group.
    pub fn new() -> Group<'a> {
        Group::default()
    }

    /// Adds a call on host memory. Nothing moves before [`Group::run`].
    ///
    /// # Errors
    /// The errors of the checks of [`Communicator::call`]. An error leaves the group as it was.
    pub fn add(
        &mut self,
        comm: &'a Communicator,
        call: &Call,
        buffers: UserBuffers<'a>,
    ) -> Result<()> {
        comm.check_fault()?;
        comm.host_engine()?;
        check::call(comm, call, &BufferRanges::from(&buffers))?;
        // Calls in groups are never sampled: other ranks may have other calls in their groups, and
        // would sample a different call.
        let admission = comm.admit(call, false)?;
        self.push(comm, call, admission, Buffers::Host(buffers));
        Ok(())
    }

    /// Adds a call on a GPU. Nothing is queued before [`Group::run`].
    ///
    /// # Errors
    /// The errors of the checks of [`Communicator::call_on`]. An error leaves the group as it was.
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
        self.push(comm, call, admission, Buffers::Gpu(buffers));
        Ok(())
    }

    fn push(
        &mut self,
        comm: &'a Communicator,
        call: &Call,
        admission: Admission,
        buffers: Buffers<'a>,
    ) {
        self.calls.push(GroupCall {
            comm,
            call: *call,
            admission,
            buffers: Some(buffers),
        });
    }

    /// Moves the collectives of each communicator ahead of its sends and receives, and keeps both in
    /// order. Calls that do not depend on each other may then be added in a different order on each
    /// rank. Reports come in the new order.
    pub fn collectives_first(&mut self) {
        let comms = self.comms();
        // Communicators keep the order in which they were first named.
        self.calls.sort_by_key(|entry| {
            let named = comms.iter().position(|comm| entry.is_of(comm));
            (named, entry.call.collective.is_message())
        });
    }

    /// Returns the communicators of the group, in the order in which they were first named.
    fn comms(&self) -> Vec<&'a Communicator> {
        let mut comms: Vec<&Communicator> = Vec::new();
        for entry in &self.calls {
            if !comms.iter().any(|comm| entry.is_of(comm)) {
                comms.push(entry.comm);
            }
        }
        comms
    }

    /// Runs all calls and returns their reports, in the order in which the calls were added. Calls of
    /// one communicator start in order; sends and receives between two collectives run at once.
    ///
    /// Small all_reduces of host memory are fused if they follow one another on a communicator and
    /// differ in data and count only (`CINCH_FUSE_BYTES`). Their buffers must not depend on each
    /// other, and all ranks must group them alike. So they must for small collectives on GPUs, up to 16 of which share a
    /// launch.
    ///
    /// A group of one call behaves like the call alone, except for `CINCH_CODEC_SAMPLE`. Calls on
    /// host memory in groups are not sampled, so all ranks must make a coded sum in a group, or
    /// none.
    ///
    /// Calls on GPUs are queued before anything waits, communicator by communicator in the order in
    /// which the group first names them. That order must be equal on all ranks that share a stream.
    /// Calls of one communicator run on the stream of its first call, after the earlier work on the
    /// streams of all its calls. Later work on those streams waits for the calls.
    ///
    /// A driver blocks a thread after some 1,000 launches of a stream. Launches for several GPUs
    /// are therefore interleaved; launches for one GPU are not. Then the calls on host memory run
    /// to their ends.
    ///
    /// # Errors
    /// The error that refuses a call, before anything of the group moves; else the first failure,
    /// with which all communicators of the group fail.
    pub fn run(mut self) -> Result<Vec<Report>> {
        let _environment = FloatEnvironment::standard();
        let comms = self.comms();
        for comm in &comms {
            comm.owner.check()?;
            comm.started.wait_idle();
        }
        self.pair_own_messages()?;
        let count = self.calls.len();
        let _range = nvtx::range(|| format!("group of {count} calls"), 0);
        let _guards: Vec<PanicGuard<'_>> = comms.iter().map(|comm| PanicGuard(comm)).collect();
        let mut reports = vec![None; self.calls.len()];
        if let [comm] = comms[..] {
            host::run_repeated_messages(comm, &mut self.calls, &mut reports)?;
        }
        let is_repeated: Vec<bool> = reports.iter().map(Option::is_some).collect();
        if !is_repeated.contains(&false) {
            return Ok(reports.into_iter().flatten().collect());
        }
        let mut hosts = HostCalls::find(&self.calls, &comms)?;
        let run = HostRun::plan(&mut hosts, &mut self.calls)?;
        // GPU calls are queued only after every check that can refuse the group. Otherwise a
        // program that makes a refused group again would queue them twice.
        gpu::queue(&mut self.calls, &comms, &mut reports)?;
        run.drive(&mut self.calls, &mut reports)
            .inspect_err(|error| fail_all(&comms, error))?;
        hosts.into_iter().for_each(HostCalls::keep_memory);
        let reports: Vec<Report> = reports
            .into_iter()
            .map(|report| report.ok_or_else(|| Error::internal("a call of a group has no report")))
            .collect::<Result<_>>()?;
        let ended = self.calls.iter().zip(&reports).zip(is_repeated);
        for ((entry, report), _) in ended.filter(|(_, is_repeated)| !is_repeated) {
            let decision = &entry.admission.decision;
            entry.comm.count_call(&entry.call, decision, report, None);
        }
        Ok(reports)
    }

    /// Pairs the messages of ranks to themselves: the first send with the first receive, and so on.
    fn pair_own_messages(&mut self) -> Result<()> {
        let mut unpaired: Vec<usize> = Vec::new();
        for index in 0..self.calls.len() {
            let entry = &self.calls[index];
            if !entry.is_own_message() {
                continue;
            }
            let partner = unpaired.iter().position(|&other| {
                let other = &self.calls[other];
                other.is_of(entry.comm) && other.is_own_send() != entry.is_own_send()
            });
            let Some(position) = partner else {
                unpaired.push(index);
                continue;
            };
            let other = unpaired.remove(position);
            match self.calls[index].is_own_send() {
                true => self.join_own_message(index, other)?,
                false => self.join_own_message(other, index)?,
            }
        }
        let Some(&index) = unpaired.first() else {
            return Ok(());
        };
        let (does, lacks) = match self.calls[index].is_own_send() {
            true => ("sends to", "receive"),
            false => ("receives from", "send"),
        };
        Err(Error::invalid_usage(format!(
            "rank {} {does} itself, and the group has no {lacks} for it",
            self.calls[index].call.root,
        )))
    }

    /// Makes one local copy of a send and its receive, in the send's place. The receive keeps its
    /// entry, with empty buffers, for its report.
    fn join_own_message(&mut self, send: usize, recv: usize) -> Result<()> {
        let (a, b) = (self.calls[send].call, self.calls[recv].call);
        if (a.count, a.dtype) != (b.count, b.dtype) {
            return Err(Error::new(
                ErrorKind::Mismatch,
                format!(
                    "rank {} sends itself {} {}, but receives {} {}",
                    a.root, a.count, a.dtype, b.count, b.dtype
                ),
            ));
        }
        let places = |index: usize| self.calls[index].buffers.as_ref().map(Buffers::places);
        if let (Some((input, _)), Some((_, output))) = (places(send), places(recv)) {
            check::own_message_buffers(&a, input, output)?;
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
        Ok(())
    }
}

/// Fails all communicators of a group with the error of one of its calls, because other ranks may
/// wait for any of the calls.
fn fail_all(comms: &[&Communicator], error: &Error) {
    for comm in comms {
        let error = error.clone();
        comm.fail(error.context("another call of the same group failed"));
    }
}

impl Drop for Group<'_> {
    /// Subtracts coded sums that were not queued from the counter by which calls are sampled. Other
    /// ranks may not have counted a group that is dropped or refused. Without this, ranks would
    /// sample different calls.
    fn drop(&mut self) {
        for entry in &self.calls {
            if let Some(Buffers::Gpu(_)) = entry.buffers {
                entry.comm.rollback(&entry.admission);
            }
        }
    }
}
