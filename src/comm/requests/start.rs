//! Starts calls on host memory, and inits, that run while the program goes on.

use super::{CallRequest, RequestCompleter};
use crate::bootstrap::UniqueId;
use crate::comm::check::{self, BufferRanges};
use crate::comm::{Call, Communicator, Report};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::mem::{UserBuffers, bytes_of, bytes_of_mut};
use crate::sys::process::thread_error;
use crate::types::{Collective, Element, ReduceOp};
use std::sync::Arc;

/// Arrays of a started call, and its report.
pub type StartedArrays<T> = (Vec<T>, Report);

impl Communicator {
    /// Starts a call on host memory and returns at once. A thread of the library runs the communicator's started
    /// calls in order. Calls that do not return at once wait until all started calls have ended, so all ranks may
    /// mix both kinds if they make all calls in the same order.
    ///
    /// # Errors
    /// The errors of the checks of [`Communicator::call`]; system if the thread cannot be started. Other errors are
    /// those of [`CallRequest::wait`].
    pub fn start(
        self: &Arc<Self>,
        call: &Call,
        buffers: UserBuffers<'static>,
    ) -> Result<CallRequest<Report>> {
        self.check_start(call, &BufferRanges::from(&buffers))?;
        let call = *call;
        self.enqueue(move |comm| comm.run_call(&call, buffers))
    }

    /// Starts an all_reduce in place of `data`, which the request returns.
    ///
    /// # Errors
    /// As [`Communicator::start`].
    pub fn all_reduce_start<T: Element + Send + 'static>(
        self: &Arc<Self>,
        data: Vec<T>,
        op: ReduceOp,
    ) -> Result<CallRequest<StartedArrays<T>>> {
        let call = Call {
            op,
            ..Call::new(Collective::AllReduce, T::DTYPE, data.len())
        };
        let bytes = size_of_val(data.as_slice());
        self.start_in_place(call, data, bytes)
    }

    /// Starts a broadcast of the root's `data`, which the request returns on every rank.
    ///
    /// # Errors
    /// As [`Communicator::start`].
    pub fn broadcast_start<T: Element + Send + 'static>(
        self: &Arc<Self>,
        data: Vec<T>,
        root: usize,
    ) -> Result<CallRequest<StartedArrays<T>>> {
        let call = Call {
            root,
            ..Call::new(Collective::Broadcast, T::DTYPE, data.len())
        };
        let bytes = match root == self.rank() {
            true => size_of_val(data.as_slice()),
            false => 0,
        };
        self.start_in_place(call, data, bytes)
    }

    /// Starts an all_gather of `input`. The request returns the inputs of all ranks, in rank order.
    ///
    /// # Errors
    /// As [`Communicator::start`].
    pub fn all_gather_start<T: Element + Default + Send + 'static>(
        self: &Arc<Self>,
        input: Vec<T>,
    ) -> Result<CallRequest<StartedArrays<T>>> {
        let call = Call::new(Collective::AllGather, T::DTYPE, input.len());
        let elements = input.len().saturating_mul(self.nranks());
        self.start_owned(call, input, elements)
    }

    /// Starts a reduce_scatter of `input`, whose length is a multiple of the number of ranks. The request returns
    /// this rank's block of the result.
    ///
    /// # Errors
    /// As [`Communicator::start`]; invalid argument for another length.
    pub fn reduce_scatter_start<T: Element + Default + Send + 'static>(
        self: &Arc<Self>,
        input: Vec<T>,
        op: ReduceOp,
    ) -> Result<CallRequest<StartedArrays<T>>> {
        let (length, nranks) = (input.len(), self.nranks());
        if !length.is_multiple_of(nranks) {
            return Err(Error::invalid_argument(format!(
                "reduce_scatter of {length} elements: {nranks} ranks do not divide them"
            )));
        }
        let call = Call {
            op,
            ..Call::new(Collective::ReduceScatter, T::DTYPE, length / nranks)
        };
        self.start_owned(call, input, length / nranks)
    }

    /// Starts to join the communicator of `id` on a thread, as [`Communicator::init`] does.
    ///
    /// # Errors
    /// System if the thread cannot be started. Other errors are those of [`CallRequest::wait`].
    pub fn init_start(
        id: &UniqueId,
        rank: usize,
        nranks: usize,
        config: Config,
    ) -> Result<CallRequest<Communicator>> {
        let (request, completer) = CallRequest::pair();
        let id = *id;
        std::thread::Builder::new()
            .name("cinch-init".into())
            .spawn(move || completer.complete(Communicator::init(&id, rank, nranks, config)))
            .map_err(|cause| thread_error("an init", cause))?;
        Ok(request)
    }

    /// Starts a call in place of `data`, whose first `input_bytes` bytes are the input.
    fn start_in_place<T: Element + Send + 'static>(
        self: &Arc<Self>,
        call: Call,
        mut data: Vec<T>,
        input_bytes: usize,
    ) -> Result<CallRequest<StartedArrays<T>>> {
        let ranges = BufferRanges::from(&in_place(&mut data, input_bytes)?);
        self.check_start(&call, &ranges)?;
        self.enqueue(move |comm| {
            let report = comm.run_call(&call, in_place(&mut data, input_bytes)?)?;
            Ok((data, report))
        })
    }

    /// Starts a call with an output of `elements` elements of its own.
    fn start_owned<T: Element + Default + Send + 'static>(
        self: &Arc<Self>,
        call: Call,
        input: Vec<T>,
        elements: usize,
    ) -> Result<CallRequest<StartedArrays<T>>> {
        let mut output = Vec::new();
        output.try_reserve_exact(elements).map_err(|_| {
            let what = format!("memory for {elements} elements of output");
            Error::system(what, std::io::ErrorKind::OutOfMemory)
        })?;
        output.resize(elements, T::default());
        let buffers = UserBuffers::new(bytes_of(&input), bytes_of_mut(&mut output));
        self.check_start(&call, &BufferRanges::from(&buffers))?;
        self.enqueue(move |comm| {
            let buffers = UserBuffers::new(bytes_of(&input), bytes_of_mut(&mut output));
            let report = comm.run_call(&call, buffers)?;
            Ok((output, report))
        })
    }

    /// Refuses a call before it is queued.
    fn check_start(&self, call: &Call, ranges: &BufferRanges) -> Result<()> {
        self.check_fault()?;
        self.host_engine()?;
        check::call(self, call, ranges)?;
        check::own_message_is_grouped(self, call)?;
        self.choose(call).map(|_| ())
    }

    fn enqueue<T: Send + 'static>(
        self: &Arc<Self>,
        run: impl FnOnce(&Communicator) -> Result<T> + Send + 'static,
    ) -> Result<CallRequest<T>> {
        let (request, completer): (_, RequestCompleter<T>) = CallRequest::pair();
        let comm = self.clone();
        self.started.push(Box::new(move || {
            let outcome = run(&comm);
            // A program that has seen the end of the call may destroy the communicator, which then ends in its thread.
            drop(comm);
            completer.complete(outcome);
        }))?;
        Ok(request)
    }
}

fn in_place<T: Element>(data: &mut [T], input_bytes: usize) -> Result<UserBuffers<'_>> {
    UserBuffers::in_place(bytes_of_mut(data), 0, input_bytes)
}
