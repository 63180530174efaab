//! Memory of one rank, allocated before any collective runs and freed after the last one. Freeing
//! memory makes the driver wait for all queued work, and ranks on one GPU wait for each other.

#![allow(unsafe_code)] // buffers are made of raw addresses

use crate::case::{Case, Done, GUARD, Layout, Outcome};
use cinch::comm::{Call, Group};
use cinch::gpu::{Context, Device, DeviceMemory, Driver, Stream};
use cinch::mem::{DeviceBuffers, UserBuffers};
use cinch::{CallStatistics, Collective, Communicator, Error, Report, Result};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Time limit of a call; a longer call fails the test.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Fields of its statistics that a call takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Takes {
    All,
    /// The verdict of the output alone.
    Verdict,
}

/// Memory and streams of one rank. Cases alternate between the two streams.
pub enum Arena {
    Gpu {
        memory: DeviceMemory,
        stream: Arc<Stream>,
        other: Arc<Stream>,
    },
    Host {
        memory: Mutex<Vec<u64>>,
        bytes: usize,
    },
}

/// Returns the primary context of GPU number `gpu`.
pub fn context(gpu: usize) -> Result<Arc<Context>> {
    Context::primary(&Device::at(&Driver::load()?, gpu as u32)?)
}

/// Creates a stream and runs a fill on it. The first work of a stream may wait for all work on the GPU, so
/// call this while no kernel waits for another rank.
fn warmed_up_stream(memory: &DeviceMemory, priority: i32) -> Result<Stream> {
    let stream = Stream::with_priority(memory.context(), priority)?;
    memory.fill(0, &stream)?;
    stream.wait(PATIENCE)?;
    Ok(stream)
}

impl Arena {
    /// Allocates `bytes` bytes on GPU number `gpu`, or on the host for `None`.
    pub fn new(gpu: Option<usize>, bytes: usize) -> Result<Arena> {
        Arena::on(gpu, bytes, |memory| {
            let stream = || warmed_up_stream(memory, 0).map(Arc::new);
            Ok([stream()?, stream()?])
        })
    }

    /// Allocates an arena with one stream. A GPU has 32 queues for the streams of a process: kernels of two ranks in one queue could
    /// wait for each other for ever, so a check with many ranks or arenas creates no more streams than it uses.
    pub fn with_one_stream(gpu: Option<usize>, bytes: usize) -> Result<Arena> {
        Arena::on(gpu, bytes, |memory| {
            let stream = Arc::new(warmed_up_stream(memory, 0)?);
            Ok([stream.clone(), stream])
        })
    }

    /// Allocates more memory on the streams of this arena.
    pub fn beside(&self, gpu: Option<usize>, bytes: usize) -> Result<Arena> {
        Arena::on(gpu, bytes, |_| match self {
            Arena::Gpu { stream, other, .. } => Ok([stream.clone(), other.clone()]),
            Arena::Host { .. } => Err(Error::internal("host memory has no streams")),
        })
    }

    fn on(
        gpu: Option<usize>,
        bytes: usize,
        streams: impl FnOnce(&DeviceMemory) -> Result<[Arc<Stream>; 2]>,
    ) -> Result<Arena> {
        let bytes = bytes.max(256).next_multiple_of(256);
        let Some(gpu) = gpu else {
            return Ok(Arena::Host {
                memory: Mutex::new(vec![0; bytes / 8]),
                bytes,
            });
        };
        let memory = DeviceMemory::new(&context(gpu)?, bytes)?;
        let [stream, other] = streams(&memory)?;
        Ok(Arena::Gpu {
            memory,
            stream,
            other,
        })
    }

    /// Creates another stream on this GPU and runs a fill on it; the fill zeroes the memory.
    pub fn new_stream(&self, priority: i32) -> Result<Stream> {
        warmed_up_stream(self.memory()?, priority)
    }

    pub fn stream(&self) -> Result<&Stream> {
        match self {
            Arena::Gpu { stream, .. } => Ok(stream),
            Arena::Host { .. } => Err(Error::internal("host memory has no stream")),
        }
    }

    /// Returns the stream on which `case` is called; host memory has none.
    fn stream_of(&self, case: &Case) -> Option<&Stream> {
        match self {
            Arena::Gpu { other, .. } if case.seed & 1 == 1 => Some(other),
            Arena::Gpu { stream, .. } => Some(stream),
            Arena::Host { .. } => None,
        }
    }

    pub fn memory(&self) -> Result<&DeviceMemory> {
        match self {
            Arena::Gpu { memory, .. } => Ok(memory),
            Arena::Host { .. } => Err(Error::internal("this is host memory")),
        }
    }

    pub fn write(&self, at: usize, bytes: &[u8]) -> Result<()> {
        match self {
            Arena::Gpu { memory, stream, .. } => memory.write(at, bytes, stream, PATIENCE),
            Arena::Host {
                memory,
                bytes: room,
            } => {
                assert!(at + bytes.len() <= *room, "past the end");
                let mut words = memory.lock().expect("no panic before");
                let start = words.as_mut_ptr().cast::<u8>();
                // SAFETY: the assertion keeps the range within the vector, which the lock guards.
                unsafe {
                    start
                        .add(at)
                        .copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
                }
                Ok(())
            }
        }
    }

    pub fn read(&self, at: usize, bytes: &mut [u8]) -> Result<()> {
        match self {
            Arena::Gpu { memory, stream, .. } => memory.read(at, bytes, stream, PATIENCE),
            Arena::Host {
                memory,
                bytes: room,
            } => {
                assert!(at + bytes.len() <= *room, "past the end");
                let words = memory.lock().expect("no panic before");
                let start = words.as_ptr().cast::<u8>();
                // SAFETY: the assertion keeps the range within the vector, which the lock guards.
                unsafe {
                    start
                        .add(at)
                        .copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len());
                }
                Ok(())
            }
        }
    }

    /// Waits for the queued work of both streams. Returns an error of the communicator rather than
    /// a timeout of the wait, if there are both.
    pub fn wait(&self, comm: &Communicator) -> Result<()> {
        let waited = match self {
            Arena::Gpu { stream, other, .. } => {
                stream.wait(PATIENCE).and_then(|()| other.wait(PATIENCE))
            }
            Arena::Host { .. } => Ok(()),
        };
        match comm.async_error() {
            Some(error) => Err(error),
            None => waited,
        }
    }

    /// Returns device buffers at these (offset, length) ranges of the memory, on `stream`.
    pub fn buffers(
        &self,
        input: (usize, usize),
        output: (usize, usize),
        stream: &Stream,
    ) -> Result<DeviceBuffers<'_>> {
        let memory = self.memory()?;
        let place = |(at, bytes): (usize, usize)| -> Result<(u64, usize)> {
            match bytes {
                0 => Ok((0, 0)),
                _ => Ok((memory.place(at, bytes)?, bytes)),
            }
        };
        let (input, output) = (place(input)?, place(output)?);
        // SAFETY: `place` keeps the ranges within the memory. Tests drop arenas after the
        // communicators, so the memory outlives the calls. Each rank has its own arena and uses it
        // on one stream at a time.
        Ok(unsafe { DeviceBuffers::new(input, output, stream.handle().addr()) })
    }

    /// Returns the buffers of [`Arena::buffers`] for a call that writes its statistics to byte `at` of the memory, all of
    /// them or the verdict alone.
    pub fn buffers_with_statistics(
        &self,
        input: (usize, usize),
        output: (usize, usize),
        (at, takes): (usize, Takes),
        stream: &Stream,
    ) -> Result<DeviceBuffers<'_>> {
        let address = self.memory()?.place(at, size_of::<CallStatistics>())?;
        let buffers = self.buffers(input, output, stream)?;
        // SAFETY: `place` keeps the statistics within the memory, which no other call uses meanwhile.
        Ok(unsafe {
            match takes {
                Takes::All => buffers.with_statistics(address),
                Takes::Verdict => buffers.with_verdict(address),
            }
        })
    }

    /// Returns the statistics at byte `at`, once the work of `stream` has ended.
    pub fn statistics(
        &self,
        comm: &Communicator,
        at: usize,
        stream: &Stream,
    ) -> Result<CallStatistics> {
        let bytes = size_of::<CallStatistics>();
        let all = comm.read_statistics(self.buffers((at, bytes), (0, 0), stream)?)?;
        let first = all.first().copied();
        first.ok_or_else(|| Error::internal("an array without statistics"))
    }

    fn host(&self, input: (usize, usize), output: (usize, usize)) -> UserBuffers<'_> {
        let Arena::Host { memory, bytes } = self else {
            panic!("not host memory");
        };
        assert!(input.0 + input.1 <= *bytes && output.0 + output.1 <= *bytes);
        let start = memory.lock().expect("no panic before").as_mut_ptr();
        let start = start.cast::<u8>();
        // SAFETY: the assertion keeps the ranges within the vector, which never moves. Only this
        // rank uses the memory, by one call at a time.
        unsafe { UserBuffers::from_raw(start.add(input.0), input.1, start.add(output.0), output.1) }
    }

    /// Writes the input, fills the rest of the memory with `GUARD`, and returns the bytes written.
    pub fn prepare(
        &self,
        case: &Case,
        rank: usize,
        nranks: usize,
        input: &[u8],
    ) -> Result<Vec<u8>> {
        let layout = case.layout(rank, nranks);
        let mut image = vec![GUARD; layout.bytes];
        image[layout.input.0..][..layout.input.1].copy_from_slice(input);
        self.write(0, &image)?;
        Ok(image)
    }

    /// Starts the case on its stream.
    pub fn call(&self, case: &Case, comm: &Communicator) -> Result<Report> {
        let mut group = Group::new();
        let layout = case.layout(comm.rank(), comm.nranks());
        let call = case.call_of(comm.rank());
        if case.call.collective != Collective::SendRecv {
            let stream = self.stream_of(case);
            return self.call_at(comm, &call, layout.input, layout.output, stream);
        }
        self.add(&mut group, case, comm)?;
        let mut reports = group.run()?;
        reports
            .pop()
            .ok_or_else(|| Error::internal("a group without reports"))
    }

    /// Adds the case to a group; a send/recv case adds two calls.
    pub fn add<'a>(
        &'a self,
        group: &mut Group<'a>,
        case: &Case,
        comm: &'a Communicator,
    ) -> Result<()> {
        let (rank, nranks) = (comm.rank(), comm.nranks());
        let Layout { input, output, .. } = case.layout(rank, nranks);
        let none = (0, 0);
        let mut parts = vec![(case.call_of(rank), input, output)];
        if case.call.collective == Collective::SendRecv {
            let mut send = case.call;
            (send.root, send.peer) = (rank, (rank + 1) % nranks);
            let mut recv = case.call;
            (recv.root, recv.peer) = ((rank + nranks - 1) % nranks, rank);
            parts = vec![(send, input, none), (recv, none, output)];
        }
        for (call, input, output) in parts {
            self.add_at(group, comm, &call, (input, output), self.stream_of(case))?;
        }
        Ok(())
    }

    /// Adds a call on (offset, length) ranges of this memory to a group. Device memory needs a
    /// stream; host memory takes none.
    pub fn add_at<'a>(
        &'a self,
        group: &mut Group<'a>,
        comm: &'a Communicator,
        call: &Call,
        (input, output): ((usize, usize), (usize, usize)),
        stream: Option<&Stream>,
    ) -> Result<()> {
        let call = &Call {
            wrapping_average: true,
            ..*call
        };
        match stream {
            Some(stream) => group.add_on(comm, call, self.buffers(input, output, stream)?),
            None => group.add(comm, call, self.host(input, output)),
        }
    }

    /// Makes a call on (offset, length) ranges of this memory, outside of any group.
    pub fn call_at(
        &self,
        comm: &Communicator,
        call: &Call,
        input: (usize, usize),
        output: (usize, usize),
        stream: Option<&Stream>,
    ) -> Result<Report> {
        let call = &Call {
            wrapping_average: true,
            ..*call
        };
        match stream {
            Some(stream) => comm.call_on(call, self.buffers(input, output, stream)?),
            None => comm.call(call, self.host(input, output)),
        }
    }

    /// Reads the output of a finished case, and finds the first byte outside the output that has
    /// changed.
    pub fn collect(
        &self,
        case: &Case,
        rank: usize,
        nranks: usize,
        before: &[u8],
        report: Report,
    ) -> Outcome {
        let layout = case.layout(rank, nranks);
        let mut image = vec![0; layout.bytes];
        self.read(0, &mut image)?;
        let (at, length) = layout.output;
        let mut outside = (0..at).chain(at + length..image.len());
        Ok(Done {
            stray: outside.find(|&at| image[at] != before[at]),
            output: image[at..at + length].to_vec(),
            report,
        })
    }

    /// Writes the input of the case, runs it on the rank of `comm`, and reads its output.
    pub fn run(&self, case: &Case, comm: &Communicator, input: &[u8]) -> Outcome {
        let (rank, nranks) = (comm.rank(), comm.nranks());
        let before = self.prepare(case, rank, nranks, input)?;
        let report = self.call(case, comm)?;
        self.wait(comm)?;
        self.collect(case, rank, nranks, &before, report)
    }
}
