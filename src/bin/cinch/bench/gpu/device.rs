//! One rank's GPU: its communicators, its buffers, its stream.

use super::layout::{Layout, PERIOD, Rotation};
use super::peer::PeerComm;
use super::runner::{Lane, Side};
use crate::bench::data::Source;
use crate::bench::row::{Row, buffer_bytes, call_of, is_root};
use crate::bench::verify::POISON;
use cinch::comm::{Call, Group};
use cinch::gpu::{CaptureMode, Context, DeviceMemory, Event, Graph, Stream};
use cinch::mem::DeviceBuffers;
use cinch::plan::KernelVariant;
use cinch::{Collective, Communicator, DType, Error, ErrorKind, ReduceOp, Report, Result};
use std::sync::Arc;
use std::time::Duration;

/// A rank's communicator, that of the other library, and what they work on.
pub struct GpuLane<'a> {
    // Dropped from first to last: graphs name memory of the communicators.
    graphs: [Option<Graph>; 3],
    /// Of our calls, each another way.
    ways: Vec<Graph>,
    marks: [Event; 2],
    peer: Option<PeerComm>,
    comm: Communicator,
    stream: Stream,
    inputs: DeviceMemory,
    outputs: DeviceMemory,
    source: &'a Source,
    /// The type and the reduction that the inputs are made for.
    filled: Option<(DType, Option<ReduceOp>)>,
    row: Option<(Row, Layout)>,
    rotation: Rotation,
    report: Option<Report>,
    patience: Duration,
}

impl<'a> GpuLane<'a> {
    /// Allocates arenas of `bytes` for inputs and outputs.
    ///
    /// # Errors
    /// System if there is not as much memory; those of the driver.
    pub fn new(
        context: &Arc<Context>,
        comm: Communicator,
        peer: Option<PeerComm>,
        source: &'a Source,
        bytes: (usize, usize),
    ) -> Result<GpuLane<'a>> {
        let mut lane = GpuLane {
            graphs: [const { None }; 3],
            ways: Vec::new(),
            marks: [Event::timed(context)?, Event::timed(context)?],
            peer,
            // A call that lasts longer has failed by then.
            patience: 2 * comm.config().timeout,
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
        // The first kernel of a stream may wait for all that run on the GPU. Where those are of other
        // ranks, which wait for this one's, that is for ever: on 2 H200 with 4 ranks each, half of the
        // first all_gathers of 64 MiB did not begin on some rank.
        lane.poison()?;
        Ok(lane)
    }

    /// The candidates for a row's call, and the winner.
    ///
    /// # Errors
    /// As [`Communicator::explain`].
    pub fn explain(&self, row: &Row) -> Result<String> {
        self.comm.explain(&self.call(row))
    }

    /// Ends both communicators in good order. All ranks call it together.
    ///
    /// # Errors
    /// Those of the communicators.
    pub fn end(mut self) -> Result<()> {
        self.forget_graphs();
        if let Some(peer) = self.peer.take() {
            peer.destroy()?;
        }
        self.comm.finalize()
    }

    /// Drops the graphs. What they kept is released on other threads, and freeing memory waits for
    /// kernels: that is over before there are any again.
    fn forget_graphs(&mut self) {
        if self.graphs.iter().any(Option::is_some) || !self.ways.is_empty() {
            self.graphs = [const { None }; 3];
            self.ways.clear();
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Our communicator.
    pub fn comm(&self) -> &Communicator {
        &self.comm
    }

    /// What this rank calls for a row.
    fn call(&self, row: &Row) -> Call {
        let (rank, nranks) = (self.comm.rank(), self.comm.nranks());
        call_of(row, rank, nranks)
    }

    /// As [`Communicator::variants`].
    ///
    /// # Errors
    /// As there.
    pub fn variants(&self, row: &Row) -> Result<Vec<KernelVariant>> {
        self.comm.variants(&self.call(row))
    }

    /// As [`Communicator::supports`].
    ///
    /// # Errors
    /// As there.
    pub fn supports(&self, row: &Row, way: &KernelVariant) -> Result<bool> {
        self.comm.supports(&self.call(row), way)
    }

    /// Queues a mark, `calls` of our calls, and another mark.
    ///
    /// # Errors
    /// Those of the calls.
    pub fn start_ours(&mut self, calls: usize) -> Result<()> {
        self.start(Side::Ours, calls, false)
    }

    /// Records a graph of `calls` calls that go the way that they go now, beside those of other ways.
    ///
    /// # Errors
    /// Those of the calls.
    pub fn record_way(&mut self, calls: usize) -> Result<()> {
        let graph = self.capture(Side::Ours, calls)?;
        self.ways.push(graph);
        Ok(())
    }

    /// Queues a mark, a replay of the graph of this number, and another mark.
    ///
    /// # Errors
    /// Internal if there is no such graph; those of the driver.
    pub fn start_way(&mut self, way: usize) -> Result<()> {
        let none = || Error::internal("no graph was recorded");
        self.marks[0].record(&self.stream)?;
        self.ways.get(way).ok_or_else(none)?.launch(&self.stream)?;
        self.marks[1].record(&self.stream)
    }

    /// Forgets the graphs of ways.
    pub fn end_ways(&mut self) {
        self.forget_graphs();
    }

    fn capture(&mut self, side: Side, calls: usize) -> Result<Graph> {
        self.rotation.begin_graph();
        // The stream is part of `self`, which records: a second value of it does.
        // SAFETY: of the same context, and gone before the lane's stream is.
        let stream = unsafe { Stream::borrowed(self.stream.context(), self.stream.handle()) };
        Graph::capture(&stream, CaptureMode::ThreadLocal, |_| {
            self.queue_all(side, calls)
        })
    }

    fn row(&self) -> Result<(Row, Layout)> {
        self.row
            .ok_or_else(|| Error::internal("the bench runs no row"))
    }

    /// Address and bytes of this rank's buffers of a set.
    fn buffers(
        &self,
        row: &Row,
        layout: &Layout,
        side: Side,
        set: usize,
    ) -> Result<[(u64, usize); 2]> {
        let (rank, nranks) = (self.comm.rank(), self.comm.nranks());
        let bytes = buffer_bytes(row, is_root(row, rank), nranks)?;
        let place = |memory: &DeviceMemory, stride: usize, bytes: usize| match bytes {
            0 => Ok((0, 0)),
            _ => Ok::<_, Error>((memory.place(set * stride, bytes)?, bytes)),
        };
        let windows = self.peer.as_ref().and_then(PeerComm::windows);
        let (inputs, outputs) = match (side, windows) {
            (Side::Symmetric, Some(windows)) => windows,
            (Side::Symmetric, None) => return Err(Error::internal("there are no windows")),
            _ => (&self.inputs, &self.outputs),
        };
        Ok([
            place(inputs, layout.input, bytes.0)?,
            place(outputs, layout.output, bytes.1)?,
        ])
    }

    /// Queues call number `index` of a repetition.
    fn queue(&mut self, side: Side, index: usize) -> Result<()> {
        let (row, layout) = self.row()?;
        let [input, output] = self.buffers(&row, &layout, side, self.rotation.set(index))?;
        if side != Side::Ours {
            let peer = self.peer.as_ref();
            let peer = peer.ok_or_else(|| Error::internal("there is no other library"))?;
            // SAFETY: memory of this rank's GPU, which lives as long as `self`; every use of it is
            // waited for by `finish`, and the stream is the lane's.
            return unsafe { peer.queue(&row, input.0, output.0, &self.stream) };
        }
        let (rank, nranks) = (self.comm.rank(), self.comm.nranks());
        let call = self.call(&row);
        // SAFETY: as above; of what a graph has recorded, each replay.
        let buffers =
            |input, output| unsafe { DeviceBuffers::new(input, output, self.stream.handle().0) };
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

    fn queue_all(&mut self, side: Side, calls: usize) -> Result<()> {
        (0..calls).try_for_each(|index| self.queue(side, index))
    }

    /// Fills the inputs with this rank's data, one period after the other.
    fn fill(&mut self, dtype: DType, op: Option<ReduceOp>) -> Result<()> {
        let bytes = (PERIOD * dtype.size()).min(self.inputs.bytes());
        let mut data = vec![0; bytes / dtype.size() * dtype.size()];
        let stream = self.source.stream(dtype, op, self.comm.rank(), 0);
        stream.fill(0, &mut data);
        let windows = self.peer.as_ref().and_then(PeerComm::windows);
        for inputs in [Some(&self.inputs), windows.map(|windows| windows.0)] {
            let Some(inputs) = inputs else { continue };
            inputs.write(0, &data, &self.stream, self.patience)?;
            inputs.repeat(data.len(), &self.stream)?;
        }
        self.stream.wait(self.patience)
    }
}

impl Lane for GpuLane<'_> {
    fn begin(&mut self, row: &Row) -> Result<()> {
        self.forget_graphs();
        let op = Some(row.op).filter(|_| row.collective.reduces());
        if self.filled != Some((row.dtype, op)) {
            self.fill(row.dtype, op)?;
            self.filled = Some((row.dtype, op));
        }
        // The arenas are the same on all ranks, and so are the sets.
        let layout = Layout::new(row, self.comm.nranks())?;
        let arenas = (self.inputs.bytes(), self.outputs.bytes());
        let layout = layout.within(arenas);
        self.row = Some((*row, layout));
        self.rotation = Rotation::new(layout.sets);
        Ok(())
    }

    fn has(&self, side: Side, row: &Row) -> bool {
        let peer = self.peer.as_ref();
        match side {
            Side::Ours => true,
            Side::Peer => peer.is_some_and(|peer| peer.has(row)),
            Side::Symmetric => peer.is_some_and(|peer| peer.has_symmetric(row)),
        }
    }

    fn record(&mut self, side: Side, calls: usize) -> Result<()> {
        let graph = self.capture(side, calls)?;
        self.graphs[side as usize] = Some(graph);
        Ok(())
    }

    fn start(&mut self, side: Side, calls: usize, replay: bool) -> Result<()> {
        match replay {
            true => self.rotation.begin_graph(),
            false => self.rotation.begin(calls),
        }
        self.marks[0].record(&self.stream)?;
        match (&self.graphs[side as usize], replay) {
            (Some(graph), true) => graph.launch(&self.stream)?,
            (None, true) => return Err(Error::internal("no graph was recorded")),
            (_, false) => self.queue_all(side, calls)?,
        }
        self.marks[1].record(&self.stream)
    }

    fn finish(&mut self) -> Result<f64> {
        let ended = self.marks[1].wait(self.patience);
        // Kernels that failed have ended too, and their time means nothing.
        if let Some(error) = self.comm.async_error() {
            return Err(error);
        }
        ended.map_err(|error| match error.kind() {
            ErrorKind::Timeout => error.context("queued calls did not end"),
            _ => error,
        })?;
        self.marks[1].since(&self.marks[0])
    }

    fn poison(&mut self) -> Result<()> {
        self.outputs.fill(POISON, &self.stream)?;
        self.stream.wait(self.patience)
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
        self.outputs.read(at, bytes, &self.stream, self.patience)
    }

    fn report(&self) -> Result<Report> {
        self.report
            .ok_or_else(|| Error::internal("no call was made"))
    }
}
