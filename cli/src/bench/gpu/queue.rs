//! A rank's GPU in a benchmark: communicators, buffers, and the stream on which calls are queued.

use super::layout::{ArenaLayout, PERIOD, Rotation};
use super::peer::PeerComm;
use super::runner::{CallQueue, Contender};
use crate::bench::data::InputSource;
use crate::bench::row::{Row, buffer_bytes, call_of, is_root, keeps_scales};
use crate::bench::verify::POISON;
use cinch::comm::{Call, Group};
use cinch::gpu::{CaptureMode, Context, DeviceMemory, Event, Graph, Stream};
use cinch::mem::DeviceBuffers;
use cinch::plan::KernelVariant;
use cinch::{Collective, Communicator, DType, Error, ErrorKind, ReduceOp, Report, Result};
use std::sync::Arc;
use std::time::Duration;

/// A rank's cinch and NCCL communicators, with their buffers.
pub struct GpuQueue<'a> {
    // Rust drops fields in the order of declaration. Graphs must be dropped first, because they
    // refer to memory of the communicators.
    graphs: [Option<Graph>; 3],
    /// Graphs of cinch calls. Entry i holds the graph of kernel variant i.
    variants: Vec<Graph>,
    events: [Event; 2],
    peer: Option<PeerComm>,
    comm: Communicator,
    stream: Stream,
    inputs: DeviceMemory,
    outputs: DeviceMemory,
    source: &'a InputSource,
    /// Element type and reduction for which the inputs were generated.
    filled: Option<(DType, Option<ReduceOp>)>,
    row: Option<(Row, ArenaLayout)>,
    rotation: Rotation,
    report: Option<Report>,
    call_timeout: Duration,
}

impl<'a> GpuQueue<'a> {
    /// Allocates arenas of `bytes` for inputs and outputs.
    ///
    /// # Errors
    /// Returns a system error if the GPU has too little free memory; returns the driver's errors.
    pub fn new(
        context: &Arc<Context>,
        comm: Communicator,
        peer: Option<PeerComm>,
        source: &'a InputSource,
        bytes: (usize, usize),
    ) -> Result<GpuQueue<'a>> {
        let mut queue = GpuQueue {
            graphs: [const { None }; 3],
            variants: Vec::new(),
            events: [Event::timed(context)?, Event::timed(context)?],
            peer,
            // Twice the communicator's timeout: a call that takes longer has already failed by
            // itself.
            call_timeout: 2 * comm.config().timeout,
            comm,
            stream: Stream::new(context)?,
            inputs: DeviceMemory::new(context, bytes.0)?,
            outputs: DeviceMemory::new(context, bytes.1)?,
            source,
            filled: None,
            row: None,
            rotation: Rotation::new(1),
            report: None,
        };
        // The first kernel on a stream may wait for all kernels on the GPU. It would deadlock if
        // kernels of other ranks wait for this rank, so it runs before they exist.
        queue.poison()?;
        Ok(queue)
    }

    /// Formats the planner's candidates for a row's call and the winner.
    ///
    /// # Errors
    /// Returns the communicator's errors.
    pub fn explain(&self, row: &Row) -> Result<String> {
        self.comm.explain(&self.call(row))
    }

    /// Destroys the NCCL communicator, then finalizes cinch's. All ranks must call it together.
    ///
    /// # Errors
    /// Returns the communicators' errors.
    pub fn end(mut self) -> Result<()> {
        self.forget_graphs();
        if let Some(peer) = self.peer.take() {
            peer.destroy()?;
        }
        self.comm.finalize()
    }

    /// Drops the graphs, then pauses. Other threads free the resources of the graphs, and freeing
    /// waits for kernels. The pause lets the freeing finish before the next kernel is queued.
    fn forget_graphs(&mut self) {
        if self.graphs.iter().any(Option::is_some) || !self.variants.is_empty() {
            self.graphs = [const { None }; 3];
            self.variants.clear();
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Returns the cinch communicator.
    pub fn comm(&self) -> &Communicator {
        &self.comm
    }

    /// Returns the call that this rank makes for a row.
    fn call(&self, row: &Row) -> Call {
        let (rank, nranks) = (self.comm.rank(), self.comm.nranks());
        Call {
            // The value does not matter, because a tensor's scales belong to its count and type, too.
            tensor: keeps_scales(row).then_some(0),
            ..call_of(row, rank, nranks)
        }
    }

    /// Returns the kernel variants of a row's call; see [`Communicator::variants`].
    ///
    /// # Errors
    /// Returns the communicator's errors.
    pub fn variants(&self, row: &Row) -> Result<Vec<KernelVariant>> {
        self.comm.variants(&self.call(row))
    }

    /// Returns whether a row's call can run with a kernel variant; see [`Communicator::supports`].
    ///
    /// # Errors
    /// Returns the communicator's errors.
    pub fn supports(&self, row: &Row, variant: &KernelVariant) -> Result<bool> {
        self.comm.supports(&self.call(row), variant)
    }

    /// Queues an event, `calls` cinch calls, and another event.
    ///
    /// # Errors
    /// Returns the errors of the calls.
    pub fn start_ours(&mut self, calls: usize) -> Result<()> {
        self.start(Contender::Ours, calls, false)
    }

    /// Records a graph of `calls` calls with the kernel variant that the communicator currently
    /// forces.
    ///
    /// # Errors
    /// Returns the errors of the calls.
    pub fn record_variant(&mut self, calls: usize) -> Result<()> {
        let graph = self.capture(Contender::Ours, calls)?;
        self.variants.push(graph);
        Ok(())
    }

    /// Queues an event, a replay of the graph of variant number `variant`, and another event.
    ///
    /// # Errors
    /// Returns an internal error if no such graph was recorded; returns the driver's errors.
    pub fn start_variant(&mut self, variant: usize) -> Result<()> {
        let none = || Error::internal("no graph was recorded");
        self.events[0].record(&self.stream)?;
        self.variants
            .get(variant)
            .ok_or_else(none)?
            .launch(&self.stream)?;
        self.events[1].record(&self.stream)
    }

    /// Drops the graphs of all variants.
    pub fn end_variants(&mut self) {
        self.forget_graphs();
    }

    fn capture(&mut self, contender: Contender, calls: usize) -> Result<Graph> {
        self.rotation.begin_graph();
        // `queue_all` borrows `self` during the capture, so the capture gets a second handle of the
        // stream.
        // SAFETY: `self.stream` owns the handle and outlives this function.
        let stream = unsafe { Stream::borrowed(self.stream.context(), self.stream.handle()) };
        Graph::capture(&stream, CaptureMode::ThreadLocal, |_| {
            self.queue_all(contender, calls)
        })
    }

    fn row(&self) -> Result<(Row, ArenaLayout)> {
        self.row
            .ok_or_else(|| Error::internal("no row was prepared"))
    }

    /// Returns address and bytes of this rank's input and of its output in buffer set `set`.
    fn buffers(
        &self,
        row: &Row,
        layout: &ArenaLayout,
        contender: Contender,
        set: usize,
    ) -> Result<[(u64, usize); 2]> {
        let (rank, nranks) = (self.comm.rank(), self.comm.nranks());
        let bytes = buffer_bytes(row, is_root(row, rank), nranks)?;
        let place = |memory: &DeviceMemory, stride: usize, bytes: usize| match bytes {
            0 => Ok((0, 0)),
            _ => Ok::<_, Error>((memory.place(set * stride, bytes)?, bytes)),
        };
        let windows = self.peer.as_ref().and_then(PeerComm::windows);
        let (inputs, outputs) = match (contender, windows) {
            (Contender::Symmetric, Some(windows)) => windows,
            (Contender::Symmetric, None) => return Err(Error::internal("there are no windows")),
            _ => (&self.inputs, &self.outputs),
        };
        Ok([
            place(inputs, layout.input, bytes.0)?,
            place(outputs, layout.output, bytes.1)?,
        ])
    }

    /// Queues call number `index` of a repetition.
    fn queue(&mut self, contender: Contender, index: usize) -> Result<()> {
        let (row, layout) = self.row()?;
        let [input, output] = self.buffers(&row, &layout, contender, self.rotation.set(index))?;
        if contender != Contender::Ours {
            let peer = self.peer.as_ref();
            let peer = peer.ok_or_else(|| Error::internal("no NCCL library was loaded"))?;
            // SAFETY: `self` owns the memory and the stream; `finish` waits for every use of them.
            return unsafe { peer.queue(&row, input.0, output.0, &self.stream) };
        }
        let (rank, nranks) = (self.comm.rank(), self.comm.nranks());
        let call = self.call(&row);
        // SAFETY: `self` owns the memory and the stream; `finish` waits for every call and every
        // replay.
        let buffers = |input, output| unsafe {
            DeviceBuffers::new(input, output, self.stream.handle().addr())
        };
        let report = match row.collective {
            Collective::SendRecv => {
                let recv = Call {
                    root: (rank + nranks - 1) % nranks,
                    peer: rank,
                    ..call
                };
                let mut group = Group::new();
                group.add_on(&self.comm, &call, buffers(input, (0, 0)))?;
                group.add_on(&self.comm, &recv, buffers((0, 0), output))?;
                group.run()?.first().copied()
            }
            _ => Some(self.comm.call_on(&call, buffers(input, output))?),
        };
        self.report = report;
        Ok(())
    }

    fn queue_all(&mut self, contender: Contender, calls: usize) -> Result<()> {
        (0..calls).try_for_each(|index| self.queue(contender, index))
    }

    /// Fills the input arena with copies of one period of this rank's data.
    fn fill(&mut self, dtype: DType, op: Option<ReduceOp>) -> Result<()> {
        let bytes = (PERIOD * dtype.size()).min(self.inputs.bytes());
        let mut data = vec![0; bytes / dtype.size() * dtype.size()];
        let stream = self.source.stream(dtype, op, self.comm.rank(), 0);
        stream.fill(0, &mut data);
        let windows = self.peer.as_ref().and_then(PeerComm::windows);
        for inputs in [Some(&self.inputs), windows.map(|windows| windows.0)] {
            let Some(inputs) = inputs else { continue };
            inputs.write(0, &data, &self.stream, self.call_timeout)?;
            inputs.repeat(data.len(), &self.stream)?;
        }
        self.stream.wait(self.call_timeout)
    }
}

impl CallQueue for GpuQueue<'_> {
    fn begin(&mut self, row: &Row) -> Result<()> {
        self.forget_graphs();
        let op = row.reduction();
        if self.filled != Some((row.dtype, op)) {
            self.fill(row.dtype, op)?;
            self.filled = Some((row.dtype, op));
        }
        // All ranks have arenas and buffer sets of the same size.
        let layout = ArenaLayout::new(row, self.comm.nranks())?;
        let arenas = (self.inputs.bytes(), self.outputs.bytes());
        let layout = layout.within(arenas);
        self.row = Some((*row, layout));
        self.rotation = Rotation::new(layout.sets);
        Ok(())
    }

    fn has(&self, contender: Contender, row: &Row) -> bool {
        let peer = self.peer.as_ref();
        match contender {
            Contender::Ours => true,
            Contender::Peer => peer.is_some_and(|peer| peer.has(row)),
            Contender::Symmetric => peer.is_some_and(|peer| peer.has_symmetric(row)),
        }
    }

    fn record(&mut self, contender: Contender, calls: usize) -> Result<()> {
        let graph = self.capture(contender, calls)?;
        self.graphs[contender as usize] = Some(graph);
        Ok(())
    }

    fn start(&mut self, contender: Contender, calls: usize, replay: bool) -> Result<()> {
        match replay {
            true => self.rotation.begin_graph(),
            false => self.rotation.begin(calls),
        }
        self.events[0].record(&self.stream)?;
        match (&self.graphs[contender as usize], replay) {
            (Some(graph), true) => graph.launch(&self.stream)?,
            (None, true) => return Err(Error::internal("no graph was recorded")),
            (_, false) => self.queue_all(contender, calls)?,
        }
        self.events[1].record(&self.stream)
    }

    fn finish(&mut self) -> Result<f64> {
        let ended = self.events[1].wait(self.call_timeout);
        // An asynchronous error is checked before the time is read. Failed kernels also end, but
        // their time is meaningless.
        if let Some(error) = self.comm.async_error() {
            return Err(error);
        }
        ended.map_err(|error| match error.kind() {
            ErrorKind::Timeout => error.context("queued calls did not end"),
            _ => error,
        })?;
        self.events[1].since(&self.events[0])
    }

    fn poison(&mut self) -> Result<()> {
        self.outputs.fill(POISON, &self.stream)?;
        self.stream.wait(self.call_timeout)
    }

    fn output(&self, call: usize) -> (usize, usize, usize) {
        let Ok((row, layout)) = self.row() else {
            return (0, 0, 0);
        };
        let set = self.rotation.set(call);
        let size = row.dtype.size();
        let root = is_root(&row, self.comm.rank());
        let bytes = buffer_bytes(&row, root, self.comm.nranks()).map_or(0, |bytes| bytes.1);
        (bytes / size, set, set * layout.input / size)
    }

    fn read(&mut self, set: usize, start: usize, bytes: &mut [u8]) -> Result<()> {
        let (row, layout) = self.row()?;
        let at = set * layout.output + start * row.dtype.size();
        self.outputs
            .read(at, bytes, &self.stream, self.call_timeout)
    }

    fn report(&self) -> Result<Report> {
        self.report
            .ok_or_else(|| Error::internal("no call was made"))
    }
}
