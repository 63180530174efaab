//! Arrays between host memory and a GPU, packed on the way: the path that ADT took for weights.
//!
//! An array goes in pieces. Towards the GPU, threads of the host pack pieces into pinned staging,
//! and the calling thread queues the copy of each packed piece and the kernel that unpacks it.
//! Towards the host the calling thread queues the kernel that packs a piece and its copy, and the
//! threads unpack what has arrived. The calling thread alone talks to the driver, whose lock
//! threads would otherwise fight for; the others do nothing but pack.
//!
//! A slot, the staging of a piece, belongs to whoever holds it: it wanders between threads by
//! channels, and nobody shares it.
//!
//! LaunchOrder: a copy begins behind the work that the caller's stream has, and that stream goes on
//! behind the copy. A call returns when the host array may be used again: towards the GPU when it
//! has been packed, towards the host when it is complete. It therefore cannot be captured.

use super::stand_alone::{CodecKernels, DeviceCodec, Elements};
use crate::codec::{Layout, Random, StandAlone};
use crate::cpu::{Isa, Tile};
use crate::error::{Error, ErrorKind, Result};
use crate::gpu::{Context, DeviceMemory, Event, PinnedMemory, Stream};
use crate::reduce::Reducer;
use crate::types::{CodecSpec, DType, ReduceOp};
use std::collections::VecDeque;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Elements of a piece: a multiple of every block, and so many that the copy of a packed piece
/// takes longer than queueing it.
const PIECE: usize = 512 << 10;
/// Bytes of staging of a piece: codes of 3 bytes, or of 1 with two numbers for 32 elements.
const STAGING: usize = 3 * PIECE + 256;
/// Pieces on their way beside those that are being packed.
const UNDERWAY: usize = 6;
/// Streams that take turns, so that the copy of a piece goes on beside the kernel of another.
const LANES: usize = 3;
/// Threads unless somebody says how many: more bring nothing where one bus takes all copies.
const THREADS: usize = 16;
/// How long the calling thread waits for a thread before it looks after the GPU again.
const GLANCE: Duration = Duration::from_micros(20);

/// Copies between host memory and one GPU. One copy at a time: others wait for it.
#[derive(Debug)]
pub struct HostCopier {
    kernels: Arc<CodecKernels>,
    machinery: Mutex<Machinery>,
    begun: Event,
    patience: Duration,
}

#[derive(Debug)]
struct Machinery {
    /// Streams with an event behind what a copy has queued on each.
    channels: Vec<(Stream, Event)>,
    slots: Vec<Slot>,
    /// One for each thread: elements that are no fp32, widened.
    tiles: Vec<Tile>,
}

/// Staging of one piece.
#[derive(Debug)]
struct Slot {
    /// The channel on which all uses of it are queued.
    channel: usize,
    /// In front of `pinned`: to free it waits for copies between the two.
    device: DeviceMemory,
    pinned: PinnedMemory,
    /// Behind the last use of `pinned` by the driver.
    used: Event,
}

/// What one copy is about.
struct Copy<'a> {
    host: &'a StandAlone,
    device: &'a DeviceCodec,
    spec: CodecSpec,
    dtype: DType,
    draw: u64,
    address: u64,
    patience: Duration,
}

/// A piece in its slot, `n` elements.
struct Packed {
    slot: Slot,
    first: usize,
    n: usize,
}

/// A part of the host array, and the number of its first element.
struct Piece<B> {
    first: usize,
    bytes: B,
}

impl HostCopier {
    /// With `threads` that pack, or 0 for as many as the machine has cores, 16 at most. There are 6
    /// pieces of staging more than threads, each of 1.5 MiB of pinned memory and as much on the GPU.
    /// A copy that does not get on for `patience` fails.
    ///
    /// # Errors
    /// As [`CodecKernels::new`]; system if there is not that much memory.
    pub fn new(context: &Arc<Context>, threads: usize, patience: Duration) -> Result<HostCopier> {
        let threads = match threads {
            0 => HostCopier::default_threads(),
            some => some,
        };
        let channel = |_| Ok::<_, Error>((Stream::new(context)?, Event::new(context)?));
        let machinery = Machinery {
            channels: (0..LANES).map(channel).collect::<Result<_>>()?,
            slots: (0..threads + UNDERWAY)
                .map(|number| Slot::new(context, number % LANES))
                .collect::<Result<_>>()?,
            tiles: (0..threads).map(|_| Tile::new(PIECE)).collect(),
        };
        Ok(HostCopier {
            kernels: Arc::new(CodecKernels::new(context)?),
            machinery: Mutex::new(machinery),
            begun: Event::new(context)?,
            patience,
        })
    }

    /// Threads of a copier that is told none.
    pub fn default_threads() -> usize {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        cores.min(THREADS)
    }

    /// The GPU's context.
    pub fn context(&self) -> &Arc<Context> {
        self.kernels.context()
    }

    /// Copies the elements of `src` to the GPU's memory at `address`, as they are after `spec`.
    /// Returns when `src` has been read; what is queued on `stream` afterwards finds them there.
    /// `draw` is as for [`StandAlone::encode`].
    ///
    /// # Errors
    /// Invalid argument for bytes that are no whole elements, and for an address that is not
    /// aligned; invalid usage if the stream is being captured; as [`DeviceCodec::new`]; timeout if
    /// the stream does not get on; those of the driver. What is at `address` is undefined after
    /// an error behind the checks.
    ///
    /// # Safety
    /// `address` is memory of the stream's GPU for as many bytes as `src` has, live and used by
    /// nobody else from where the call stands in the stream until the stream is past it.
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
            |copy, machinery| copy.to_device(src, machinery),
        )
    }

    /// Copies the elements at `address` to `dst`, as they are after `spec`. Returns when they are
    /// there.
    ///
    /// # Errors
    /// As [`HostCopier::to_device`].
    ///
    /// # Safety
    /// As there; nobody writes them.
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
            |copy, machinery| copy.to_host(dst, machinery),
        )
    }

    fn copy(
        &self,
        (spec, dtype, draw): (CodecSpec, DType, u64),
        (bytes, address): (usize, u64),
        stream: &Stream,
        run: impl FnOnce(&Copy<'_>, &mut Machinery) -> Result<()>,
    ) -> Result<()> {
        let host = StandAlone::new(spec, Layout::Chunk, Isa::detect())?;
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
            patience: self.patience,
        };
        let mut machinery = self
            .machinery
            .lock()
            .map_err(|_| Error::internal("an earlier copy panicked; make another copier"))?;
        self.begun.record(stream)?;
        for (own, _) in &machinery.channels {
            own.wait_event(&self.begun)?;
        }
        let all = machinery.slots.len();
        let outcome = run(&copy, &mut machinery);
        // Whatever happened, the stream stays behind what was queued.
        let ended = machinery.channels.iter().try_for_each(|(own, ended)| {
            ended.record(own)?;
            stream.wait_event(ended)
        });
        if machinery.slots.len() < all {
            // Some went down with a thread that failed.
            let missing = all - machinery.slots.len();
            let context = self.context();
            let made = (0..missing).map(|number| Slot::new(context, number % LANES));
            machinery.slots.extend(made.collect::<Result<Vec<_>>>()?);
        }
        outcome.and(ended)
    }
}

impl Copy<'_> {
    fn to_device(&self, src: &[u8], machinery: &mut Machinery) -> Result<()> {
        let Machinery {
            channels,
            slots,
            tiles,
        } = machinery;
        let run = PIECE * self.dtype.size();
        let count = src.len().div_ceil(run);
        let pieces = Mutex::new(pieces(src.chunks(run)));
        let (frees, free) = channel::<Slot>();
        let (dones, done) = channel::<Result<Packed>>();
        let free = Mutex::new(free);
        let mut underway = VecDeque::from(std::mem::take(slots));
        let threads = tiles.len().min(count);
        let outcome = std::thread::scope(|scope| {
            for tile in &mut tiles[..threads] {
                let (pieces, free, dones) = (&pieces, &free, dones.clone());
                scope.spawn(move || {
                    loop {
                        // A piece first: who has none needs no slot.
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
            // Threads that wait for a slot end with the sender.
            let (frees, _) = (frees, drop(dones));
            for _ in 0..count {
                let mut patience = Patience::new(self.patience);
                let packed = loop {
                    while let Some(slot) = underway.pop_front() {
                        if !slot.used.has_happened()? {
                            underway.push_front(slot);
                            break;
                        }
                        let _ = frees.send(slot);
                    }
                    match done.recv_timeout(GLANCE) {
                        Ok(outcome) => break outcome?,
                        Err(RecvTimeoutError::Timeout) => patience.check()?,
                        Err(RecvTimeoutError::Disconnected) => return Err(panicked()),
                    }
                };
                let queued = self.send(&packed, &channels[packed.slot.channel].0);
                underway.push_back(packed.slot);
                queued?;
            }
            Ok(())
        });
        slots.extend(underway);
        slots.extend(locked(&free).try_iter());
        slots.extend(done.try_iter().flatten().map(|packed| packed.slot));
        outcome
    }

    fn to_host(&self, dst: &mut [u8], machinery: &mut Machinery) -> Result<()> {
        let Machinery {
            channels,
            slots,
            tiles,
        } = machinery;
        let run = PIECE * self.dtype.size();
        let threads = tiles.len().min(dst.len().div_ceil(run));
        let mut pieces = pieces(dst.chunks_mut(run));
        let (arrives, arrived) = channel::<(Slot, Piece<&mut [u8]>)>();
        let (dones, done) = channel::<Result<Slot>>();
        let arrived = Mutex::new(arrived);
        let mut underway = VecDeque::new();
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
            // Threads end with the sender.
            let (arrives, _) = (arrives, drop(dones));
            let mut unpacking = 0;
            let mut patience = Patience::new(self.patience);
            loop {
                while !slots.is_empty()
                    && let Some(piece) = pieces.next()
                    && let Some(slot) = slots.pop()
                {
                    let n = piece.bytes.len() / self.dtype.size();
                    let queued = self.fetch(&slot, piece.first, n, &channels[slot.channel].0);
                    underway.push_back((slot, piece));
                    queued?;
                }
                while let Some((slot, piece)) = underway.pop_front() {
                    if !slot.used.has_happened()? {
                        underway.push_front((slot, piece));
                        break;
                    }
                    let _ = arrives.send((slot, piece));
                    unpacking += 1;
                    patience = Patience::new(self.patience);
                }
                if underway.is_empty() && unpacking == 0 {
                    return Ok(());
                }
                match done.recv_timeout(GLANCE) {
                    Ok(outcome) => {
                        slots.push(outcome?);
                        unpacking -= 1;
                    }
                    Err(RecvTimeoutError::Timeout) => patience.check()?,
                    Err(RecvTimeoutError::Disconnected) => return Err(panicked()),
                }
            }
        });
        slots.extend(underway.into_iter().map(|(slot, _)| slot));
        slots.extend(locked(&arrived).try_iter().map(|(slot, _)| slot));
        slots.extend(done.try_iter().flatten());
        outcome
    }

    /// Queues the way of a packed piece to the GPU.
    fn send(&self, packed: &Packed, stream: &Stream) -> Result<()> {
        let Packed { slot, first, n } = packed;
        let bytes = self.device.bytes(*n);
        let (from, to) = (slot.pinned.address(), slot.device.address());
        // SAFETY: pinned and device memory of at least so many bytes: the one is not written until
        // `used` has happened, the other is used in the order of this stream alone. The elements
        // are the caller's.
        unsafe {
            memcpy(stream, to, from, bytes)?;
            slot.used.record(stream)?;
            self.device
                .decode((to, bytes), self.elements(*first, *n), stream)
        }
    }

    /// Queues the way of a piece from the GPU.
    fn fetch(&self, slot: &Slot, first: usize, n: usize, stream: &Stream) -> Result<()> {
        let bytes = self.device.bytes(n);
        let (from, to) = (slot.device.address(), slot.pinned.address());
        // SAFETY: as in `send`; the pinned bytes are not read until `used` has happened.
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

    fn pack(&self, piece: Piece<&[u8]>, mut slot: Slot, tile: &mut Tile) -> Result<Packed> {
        let Piece { first, bytes } = piece;
        let n = bytes.len() / self.dtype.size();
        let to = slot.staging(self.device.bytes(n))?;
        let random = Random::new(self.spec.seed.into(), self.draw, 0).from(first);
        if let Some(elements) = self.in_place(bytes) {
            self.host.encode_drawing(elements, random, to)?;
        } else {
            self.converter()?.load(bytes, tile);
            self.host.encode_drawing(tile.f32(n), random, to)?;
        }
        Ok(Packed { slot, first, n })
    }

    fn unpack(&self, piece: Piece<&mut [u8]>, mut slot: Slot, tile: &mut Tile) -> Result<Slot> {
        let n = piece.bytes.len() / self.dtype.size();
        let from = slot.staging(self.device.bytes(n))?;
        if self.in_place(piece.bytes).is_some() {
            // SAFETY: any fp32 numbers are bytes, and the other way round; `in_place` found them
            // aligned.
            let (_, elements, _) = unsafe { piece.bytes.align_to_mut::<f32>() };
            self.host.decode(from, elements)?;
        } else {
            self.host.decode(from, tile.f32_mut(n))?;
            self.converter()?.store(tile, piece.bytes);
        }
        Ok(slot)
    }

    /// The bytes as elements, if they are what codecs work on and aligned.
    fn in_place<'b>(&self, bytes: &'b [u8]) -> Option<&'b [f32]> {
        // SAFETY: any bytes are fp32 numbers.
        let (before, all, _) = unsafe { bytes.align_to::<f32>() };
        (self.dtype == DType::F32 && before.is_empty()).then_some(all)
    }
}

impl Slot {
    fn new(context: &Arc<Context>, channel: usize) -> Result<Slot> {
        Ok(Slot {
            channel,
            pinned: PinnedMemory::new(context, STAGING)?,
            device: DeviceMemory::new(context, STAGING)?,
            used: Event::new(context)?,
        })
    }

    /// The pinned bytes, of a slot whose `used` has happened.
    fn staging(&mut self, bytes: usize) -> Result<&mut [u8]> {
        if bytes > self.pinned.bytes() {
            return Err(Error::internal(format!(
                "a piece of {bytes} bytes does not fit the staging of {}",
                self.pinned.bytes()
            )));
        }
        // SAFETY: as many bytes, which the driver does not use: whoever handed the slot on has
        // seen that.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.pinned.host().as_ptr(), bytes) })
    }
}

/// When the calling thread last saw something move.
struct Patience {
    since: Instant,
    patience: Duration,
}

impl Patience {
    fn new(patience: Duration) -> Patience {
        Patience {
            since: Instant::now(),
            patience,
        }
    }

    fn check(&mut self) -> Result<()> {
        if self.since.elapsed() < self.patience {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Timeout,
            format!(
                "a packed copy has not moved for {:?}; it may still",
                self.patience
            ),
        ))
    }
}

/// The chunks of an array as pieces. All but the last have [`PIECE`] elements.
fn pieces<B>(chunks: impl Iterator<Item = B>) -> impl Iterator<Item = Piece<B>> {
    chunks.enumerate().map(|(number, bytes)| Piece {
        first: number * PIECE,
        bytes,
    })
}

/// What a mutex guards here stays whole whatever a thread does.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn panicked() -> Error {
    Error::internal("the threads of a packed copy panicked")
}

/// Queues a copy.
///
/// # Safety
/// Both are addresses of as many bytes that the stream's GPU reaches, until it is past this.
unsafe fn memcpy(stream: &Stream, to: u64, from: u64, bytes: usize) -> Result<()> {
    let context = stream.context();
    let _bound = context.bind()?;
    // SAFETY: as ours; a live stream.
    let queued = unsafe {
        let api = context.driver().api();
        api.cuMemcpyAsync(to, from, bytes, stream.handle())
    };
    context.driver().check("cuMemcpyAsync", queued)
}
