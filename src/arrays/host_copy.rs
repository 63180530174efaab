//! Packed copies of whole arrays between host memory and a GPU, as ADT copies weights.
//!
//! An array is copied in pieces. Towards the GPU, host threads pack pieces into pinned staging memory. The
//! calling thread queues the copy and the unpack kernel of each packed piece. Towards the host, the calling
//! thread queues the pack kernel and the copy of each piece, and the host threads unpack pieces that have
//! arrived. Only the calling thread calls the driver, because threads that call it together would contend for
//! its lock.
//!
//! A slot is the staging memory of one piece. Channels pass slots between threads, and the thread that holds
//! a slot owns it.
//!
//! A copy begins after earlier work in the caller's stream, and later work in the stream waits for the copy.
//! A call returns when the host array may be used again. Towards the GPU this is when it has been packed,
//! towards the host when it is complete. Hence a copy cannot be captured.

use super::device_codec::{CodecKernels, DeviceCodec, Elements};
use super::{Layout, StandAlone};
use crate::codec::RoundingRandom;
use crate::cpu::{Isa, Tile};
use crate::error::{Error, ErrorKind, Result};
use crate::gpu::{Context, DeviceMemory, Event, PinnedMemory, Stream};
use crate::reduce::Reducer;
use crate::types::{CodecSpec, DType, ReduceOp};
use std::collections::VecDeque;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Number of elements of a piece: a multiple of every block, and so large that copying takes longer than
/// queueing.
const PIECE: usize = 512 << 10;
/// Bytes of a piece's staging memory. The largest encoding has 3 bytes per element; a code of 1 byte with two
/// fp32 numbers per 32 elements also fits.
const STAGING: usize = 3 * PIECE + 256;
/// Number of slots beyond one slot per thread, for pieces that are being copied.
const IN_FLIGHT: usize = 6;
/// Number of streams over which pieces alternate, so that the copy of one piece overlaps the kernel
/// of another piece.
const STREAMS: usize = 3;
/// Largest default number of threads. More threads gain nothing, since one bus carries all copies.
const MOST_THREADS: usize = 16;
/// Longest wait of the calling thread for a packing thread before it polls the GPU again.
const GPU_POLL_INTERVAL: Duration = Duration::from_micros(20);

/// Copies arrays between host memory and one GPU. Concurrent copies run one after the other.
#[derive(Debug)]
pub struct HostCopier {
    kernels: Arc<CodecKernels>,
    resources: Mutex<CopyResources>,
    begun: Event,
    timeout: Duration,
}

#[derive(Debug)]
struct CopyResources {
    /// Streams, each with an event that is recorded behind a copy's work on the stream.
    streams: Vec<(Stream, Event)>,
    slots: Vec<StagingSlot>,
    /// Scratch memory of each thread, for elements that are widened to fp32.
    tiles: Vec<Tile>,
}

/// Staging memory of one piece.
#[derive(Debug)]
struct StagingSlot {
    /// Index of the stream on which all uses of the slot are queued.
    stream: usize,
    /// This field is dropped before `pinned`. Freeing device memory waits for copies between both.
    device: DeviceMemory,
    pinned: PinnedMemory,
    /// Event behind the driver's last use of `pinned`.
    used: Event,
}

/// Parameters of one copy.
struct Copy<'a> {
    host: &'a StandAlone,
    device: &'a DeviceCodec,
    spec: CodecSpec,
    dtype: DType,
    draw: u64,
    address: u64,
    timeout: Duration,
}

/// A packed piece of `n` elements in its slot.
struct Packed {
    slot: StagingSlot,
    first: usize,
    n: usize,
}

/// A part of the host array, and the index of its first element.
struct ArrayPiece<B> {
    first: usize,
    bytes: B,
}

impl HostCopier {
    /// Creates a copier with `threads` packing threads; 0 means one thread for each core, at most 16. It
    /// allocates one slot per thread and 6 more. A slot takes 1.5 MiB of pinned memory and 1.5 MiB of GPU
    /// memory. A copy fails if it makes no progress for `timeout`.
    ///
    /// # Errors
    /// See [`CodecKernels::new`]; system if memory is short.
    pub fn new(context: &Arc<Context>, threads: usize, timeout: Duration) -> Result<HostCopier> {
        let threads = match threads {
            0 => HostCopier::default_threads(),
            some => some,
        };
        let stream = |_| Ok::<_, Error>((Stream::new(context)?, Event::new(context)?));
        let resources = CopyResources {
            streams: (0..STREAMS).map(stream).collect::<Result<_>>()?,
            slots: (0..threads + IN_FLIGHT)
                .map(|number| StagingSlot::new(context, number % STREAMS))
                .collect::<Result<_>>()?,
            tiles: (0..threads).map(|_| Tile::new(PIECE)).collect(),
        };
        Ok(HostCopier {
            kernels: Arc::new(CodecKernels::new(context)?),
            resources: Mutex::new(resources),
            begun: Event::new(context)?,
            timeout,
        })
    }

    /// Returns the number of threads that 0 selects.
    pub fn default_threads() -> usize {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        cores.min(MOST_THREADS)
    }

    /// Returns the GPU's context.
    pub fn context(&self) -> &Arc<Context> {
        self.kernels.context()
    }

    /// Copies the elements of `src` through codec `spec` to device memory at `address`. Returns when `src` has
    /// been read. Work queued on `stream` afterwards runs behind the copy. See [`StandAlone::encode`] for
    /// `draw`.
    ///
    /// # Errors
    /// Invalid argument for bytes that are no whole elements, and for a misaligned address; invalid usage if
    /// the stream is being captured; the errors of [`DeviceCodec::new`]; timeout if the stream makes no
    /// progress; the driver's errors. After a timeout or a driver's error the memory at `address` is
    /// undefined.
    ///
    /// # Safety
    /// `address` is memory of the stream's GPU, with as many bytes as `src` has. No other code frees or uses it
    /// while the copy runs in the stream.
    pub unsafe fn to_device(
        &self,
        spec: CodecSpec,
        dtype: DType,
        draw: u64,
        src: &[u8],
        address: u64,
        stream: &Stream,
    ) -> Result<()> {
        self.copy(
            (spec, dtype, draw),
            (src.len(), address),
            stream,
            |copy, resources| copy.to_device(src, resources),
        )
    }

    /// Copies the elements at `address` through codec `spec` to `dst`. Returns when `dst` is complete.
    ///
    /// # Errors
    /// See [`HostCopier::to_device`].
    ///
    /// # Safety
    /// `address` is memory of the stream's GPU, with as many bytes as `dst` has. No other code frees or writes
    /// it while the copy runs in the stream.
    pub unsafe fn to_host(
        &self,
        spec: CodecSpec,
        dtype: DType,
        draw: u64,
        address: u64,
        dst: &mut [u8],
        stream: &Stream,
    ) -> Result<()> {
        self.copy(
            (spec, dtype, draw),
            (dst.len(), address),
            stream,
            |copy, resources| copy.to_host(dst, resources),
        )
    }

    fn copy(
        &self,
        (spec, dtype, draw): (CodecSpec, DType, u64),
        (bytes, address): (usize, u64),
        stream: &Stream,
        run: impl FnOnce(&Copy<'_>, &mut CopyResources) -> Result<()>,
    ) -> Result<()> {
        let host = StandAlone::new(spec, Layout::Chunk, Isa::detect())?.for_elements(dtype);
        let device = DeviceCodec::new(&self.kernels, spec, Layout::Chunk)?;
        let size = dtype.size();
        if !bytes.is_multiple_of(size) || !address.is_multiple_of(size as u64) {
            return Err(Error::invalid_argument(format!(
                "{bytes} bytes at {address:#x} are no whole, aligned elements of {dtype}"
            )));
        }
        if !dtype.has_codecs() {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!("codecs encode f32, f16 and bf16, not {dtype}"),
            ));
        }
        if stream.is_capturing()? {
            return Err(Error::invalid_usage(
                "a packed copy works on the host's threads and cannot be captured; copy before or \
                 after the capture",
            ));
        }
        if bytes == 0 {
            return Ok(());
        }
        let copy = Copy {
            host: &host,
            device: &device,
            spec,
            dtype,
            draw,
            address,
            timeout: self.timeout,
        };
        let mut resources = self
            .resources
            .lock()
            .map_err(|_| Error::internal("an earlier copy panicked; make another copier"))?;
        self.begun.record(stream)?;
        for (own, _) in &resources.streams {
            own.wait_event(&self.begun)?;
        }
        let all = resources.slots.len();
        let outcome = run(&copy, &mut resources);
        // Even after an error, later work in the caller's stream must wait for the work that was
        // queued.
        let ended = resources.streams.iter().try_for_each(|(own, ended)| {
            ended.record(own)?;
            stream.wait_event(ended)
        });
        if resources.slots.len() < all {
            // A thread that failed has dropped its slots, so new slots replace them.
            let missing = all - resources.slots.len();
            let context = self.context();
            let made = (0..missing).map(|number| StagingSlot::new(context, number % STREAMS));
            resources.slots.extend(made.collect::<Result<Vec<_>>>()?);
        }
        outcome.and(ended)
    }
}

impl Copy<'_> {
    fn to_device(&self, src: &[u8], resources: &mut CopyResources) -> Result<()> {
        let CopyResources {
            streams,
            slots,
            tiles,
        } = resources;
        let run = PIECE * self.dtype.size();
        let count = src.len().div_ceil(run);
        let pieces = Mutex::new(pieces(src.chunks(run)));
        let (frees, free) = channel::<StagingSlot>();
        let (dones, done) = channel::<Result<Packed>>();
        let free = Mutex::new(free);
        let mut in_flight = VecDeque::from(std::mem::take(slots));
        let threads = tiles.len().min(count);
        let outcome = std::thread::scope(|scope| {
            for tile in &mut tiles[..threads] {
                let (pieces, free, dones) = (&pieces, &free, dones.clone());
                scope.spawn(move || {
                    loop {
                        // The thread takes a piece before it takes a slot, so that a thread without
                        // a piece holds no slot.
                        let Some(piece) = locked(pieces).next() else {
                            return;
                        };
                        let Ok(slot) = locked(free).recv() else {
                            return;
                        };
                        if dones.send(self.pack(piece, slot, tile)).is_err() {
                            return;
                        }
                    }
                });
            }
            // Dropping this sender at the end of the scope ends the threads that wait for a slot.
            let (frees, _) = (frees, drop(dones));
            for _ in 0..count {
                let mut timeout = ProgressTimeout::new(self.timeout);
                let packed = loop {
                    while let Some(slot) = in_flight.pop_front() {
                        if !slot.used.has_happened()? {
                            in_flight.push_front(slot);
                            break;
                        }
                        let _ = frees.send(slot);
                    }
                    match done.recv_timeout(GPU_POLL_INTERVAL) {
                        Ok(outcome) => break outcome?,
                        Err(RecvTimeoutError::Timeout) => timeout.check()?,
                        Err(RecvTimeoutError::Disconnected) => return Err(panicked()),
                    }
                };
                let queued = self.send(&packed, &streams[packed.slot.stream].0);
                in_flight.push_back(packed.slot);
                queued?;
            }
            Ok(())
        });
        slots.extend(in_flight);
        slots.extend(locked(&free).try_iter());
        slots.extend(done.try_iter().flatten().map(|packed| packed.slot));
        outcome
    }

    fn to_host(&self, dst: &mut [u8], resources: &mut CopyResources) -> Result<()> {
        let CopyResources {
            streams,
            slots,
            tiles,
        } = resources;
        let run = PIECE * self.dtype.size();
        let threads = tiles.len().min(dst.len().div_ceil(run));
        let mut pieces = pieces(dst.chunks_mut(run));
        let (arrives, arrived) = channel::<(StagingSlot, ArrayPiece<&mut [u8]>)>();
        let (dones, done) = channel::<Result<StagingSlot>>();
        let arrived = Mutex::new(arrived);
        let mut in_flight = VecDeque::new();
        let outcome = std::thread::scope(|scope| {
            for tile in &mut tiles[..threads] {
                let (arrived, dones) = (&arrived, dones.clone());
                scope.spawn(move || {
                    loop {
                        let Ok((slot, piece)) = locked(arrived).recv() else {
                            return;
                        };
                        if dones.send(self.unpack(piece, slot, tile)).is_err() {
                            return;
                        }
                    }
                });
            }
            // Dropping this sender at the end of the scope ends the threads.
            let (arrives, _) = (arrives, drop(dones));
            let mut unpacking = 0;
            let mut timeout = ProgressTimeout::new(self.timeout);
            loop {
                while !slots.is_empty()
                    && let Some(piece) = pieces.next()
                    && let Some(slot) = slots.pop()
                {
                    let n = piece.bytes.len() / self.dtype.size();
                    let queued = self.fetch(&slot, piece.first, n, &streams[slot.stream].0);
                    in_flight.push_back((slot, piece));
                    queued?;
                }
                while let Some((slot, piece)) = in_flight.pop_front() {
                    if !slot.used.has_happened()? {
                        in_flight.push_front((slot, piece));
                        break;
                    }
                    let _ = arrives.send((slot, piece));
                    unpacking += 1;
                    timeout = ProgressTimeout::new(self.timeout);
                }
                if in_flight.is_empty() && unpacking == 0 {
                    return Ok(());
                }
                match done.recv_timeout(GPU_POLL_INTERVAL) {
                    Ok(outcome) => {
                        slots.push(outcome?);
                        unpacking -= 1;
                    }
                    Err(RecvTimeoutError::Timeout) => timeout.check()?,
                    Err(RecvTimeoutError::Disconnected) => return Err(panicked()),
                }
            }
        });
        slots.extend(in_flight.into_iter().map(|(slot, _)| slot));
        slots.extend(locked(&arrived).try_iter().map(|(slot, _)| slot));
        slots.extend(done.try_iter().flatten());
        outcome
    }

    /// Queues the copy of a packed piece to the GPU and its unpack kernel.
    fn send(&self, packed: &Packed, stream: &Stream) -> Result<()> {
        let Packed { slot, first, n } = packed;
        let bytes = self.device.bytes(*n);
        let (from, to) = (slot.pinned.address(), slot.device.address());
        // SAFETY: the slot owns pinned and device memory of at least `bytes` bytes. No thread writes the pinned
        // memory before `used` has happened, and only this stream uses the device memory. The caller of
        // `to_device` guarantees the elements.
        unsafe {
            memcpy(stream, to, from, bytes)?;
            slot.used.record(stream)?;
            self.device
                .decode((to, bytes), self.elements(*first, *n), stream)
        }
    }

    /// Queues the pack kernel of a piece and its copy from the GPU.
    fn fetch(&self, slot: &StagingSlot, first: usize, n: usize, stream: &Stream) -> Result<()> {
        let bytes = self.device.bytes(n);
        let (from, to) = (slot.device.address(), slot.pinned.address());
        // SAFETY: the slot owns pinned and device memory of at least `bytes` bytes. No thread reads the pinned
        // memory before `used` has happened, and only this stream uses the device memory. The caller of
        // `to_host` guarantees the elements.
        unsafe {
            let elements = self.elements(first, n);
            self.device
                .encode_from(elements, self.draw, first, (from, bytes), stream)?;
            memcpy(stream, to, from, bytes)?;
        }
        slot.used.record(stream)
    }

    fn elements(&self, first: usize, count: usize) -> Elements {
        Elements {
            address: self.address + (first * self.dtype.size()) as u64,
            count,
            dtype: self.dtype,
        }
    }

    fn converter(&self) -> Result<Reducer> {
        Reducer::new(self.dtype, ReduceOp::Sum, Isa::detect())
    }

    fn pack(
        &self,
        piece: ArrayPiece<&[u8]>,
        mut slot: StagingSlot,
        tile: &mut Tile,
    ) -> Result<Packed> {
        let ArrayPiece { first, bytes } = piece;
        let n = bytes.len() / self.dtype.size();
        let to = slot.staging(self.device.bytes(n))?;
        let random = RoundingRandom::new(self.spec.seed.into(), self.draw, 0).from(first);
        if let Some(elements) = self.in_place(bytes) {
            self.host.encode_drawing(elements, random, to)?;
        } else {
            self.converter()?.load(bytes, tile);
            self.host.encode_drawing(tile.f32(n), random, to)?;
        }
        Ok(Packed { slot, first, n })
    }

    fn unpack(
        &self,
        piece: ArrayPiece<&mut [u8]>,
        mut slot: StagingSlot,
        tile: &mut Tile,
    ) -> Result<StagingSlot> {
        let n = piece.bytes.len() / self.dtype.size();
        let from = slot.staging(self.device.bytes(n))?;
        if self.in_place(piece.bytes).is_some() {
            // SAFETY: every byte pattern is a valid fp32 number, and `in_place` has checked the alignment.
            let (_, elements, _) = unsafe { piece.bytes.align_to_mut::<f32>() };
            self.host.decode(from, elements)?;
        } else {
            self.host.decode(from, tile.f32_mut(n))?;
            self.converter()?.store(tile, piece.bytes);
        }
        Ok(slot)
    }

    /// Returns the bytes as fp32 elements if the array's type is fp32 and the bytes are aligned for
    /// it.
    fn in_place<'b>(&self, bytes: &'b [u8]) -> Option<&'b [f32]> {
        // SAFETY: every byte pattern is a valid fp32 number.
        let (before, all, _) = unsafe { bytes.align_to::<f32>() };
        (self.dtype == DType::F32 && before.is_empty()).then_some(all)
    }
}

impl StagingSlot {
    fn new(context: &Arc<Context>, stream: usize) -> Result<StagingSlot> {
        Ok(StagingSlot {
            stream,
            pinned: PinnedMemory::new(context, STAGING)?,
            device: DeviceMemory::new(context, STAGING)?,
            used: Event::new(context)?,
        })
    }

    /// Returns the pinned memory of a slot whose event `used` has happened.
    fn staging(&mut self, bytes: usize) -> Result<&mut [u8]> {
        if bytes > self.pinned.bytes() {
            return Err(Error::internal(format!(
                "a piece of {bytes} bytes does not fit the staging of {}",
                self.pinned.bytes()
            )));
        }
        // SAFETY: `pinned` owns at least `bytes` bytes. The thread that passed the slot on has seen `used`
        // happen, so the driver does not access them.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.pinned.host().as_ptr(), bytes) })
    }
}

/// Detects that the calling thread has seen no progress for `timeout`.
struct ProgressTimeout {
    since: Instant,
    timeout: Duration,
}

impl ProgressTimeout {
    fn new(timeout: Duration) -> ProgressTimeout {
        ProgressTimeout {
            since: Instant::now(),
            timeout,
        }
    }

    fn check(&mut self) -> Result<()> {
        if self.since.elapsed() < self.timeout {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Timeout,
            format!(
                "a packed copy has not moved for {:?}; it may still",
                self.timeout
            ),
        ))
    }
}

/// Returns the chunks of an array as pieces. All pieces but the last have [`PIECE`] elements.
fn pieces<B>(chunks: impl Iterator<Item = B>) -> impl Iterator<Item = ArrayPiece<B>> {
    chunks.enumerate().map(|(number, bytes)| ArrayPiece {
        first: number * PIECE,
        bytes,
    })
}

/// Locks the mutex even if a thread has panicked, because each change leaves the guarded value
/// consistent.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn panicked() -> Error {
    Error::internal("the threads of a packed copy panicked")
}

/// Queues a copy.
///
/// # Safety
/// `to` and `from` are addresses of `bytes` bytes that the stream's GPU can access until the copy has run.
unsafe fn memcpy(stream: &Stream, to: u64, from: u64, bytes: usize) -> Result<()> {
    let context = stream.context();
    let _bound = context.bind()?;
    // SAFETY: the caller guarantees both ranges, and `stream` is open.
    let queued = unsafe {
        let api = context.driver().api();
        api.cuMemcpyAsync(to, from, bytes, stream.handle())
    };
    context.driver().check("cuMemcpyAsync", queued)
}
