//! Arrays between host memory and a GPU, packed on the way: the path that ADT took for weights.
//!
//! Each worker, a thread of the host, has a stream and two pieces of staging, and takes the next
//! piece of the array when it has room: it packs the piece into pinned memory, queues its copy and
//! the kernel that unpacks it, and packs the next one meanwhile. Workers share nothing, so as many
//! pieces are packed at once as there are workers while the copies of others are on their way. To
//! the host it runs backwards.
//!
//! Order: a copy begins behind the work that the caller's stream has, and that stream goes on
//! behind the copy. A call returns when the host array may be used again: towards the GPU when it
//! has been packed, towards the host when it is complete. It therefore cannot be captured.
//!
//! SYNC POINT piece: the stream of a worker orders a copy before the kernel that reads its staging
//!   and both before the event that the worker waits for before it uses the staging again.

use super::stand_alone::{CodecKernels, DeviceCodec, Elements};
use crate::codec::{Layout, Random, StandAlone};
use crate::error::{Error, ErrorKind, Result};
use crate::gpu::{Context, DeviceMemory, Event, PinnedMemory, Stream};
use crate::reduce::Reducer;
use crate::simd::{Isa, Tile};
use crate::types::{CodecKind, CodecSpec, DType, ReduceOp};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Elements of a piece: a multiple of every block, large enough that a copy is as fast as the bus,
/// small enough that packed and unpacked form of a piece stay in a core's cache.
const PIECE: usize = 256 << 10;
/// Bytes of staging of a piece: codes of 3 bytes, or of 1 with a number for 32 elements.
const STAGING: usize = 3 * PIECE + 256;
/// Pieces that a worker has on their way.
const DEPTH: usize = 2;
/// Workers unless somebody says how many: more bring nothing where one bus takes all copies.
const WORKERS: usize = 8;

/// Which way, with the caller's memory.
#[derive(Clone, Copy, Debug)]
enum Way {
    ToDevice(*const u8),
    ToHost(*mut u8),
}

/// Copies between host memory and one GPU. One copy at a time: others wait for it.
#[derive(Debug)]
pub struct HostCopier {
    kernels: Arc<CodecKernels>,
    workers: Mutex<Vec<Worker>>,
    begun: Event,
    patience: Duration,
}

/// What one copy is about.
#[derive(Clone, Copy)]
struct Copy<'a> {
    host: &'a StandAlone,
    device: &'a DeviceCodec,
    spec: CodecSpec,
    dtype: DType,
    count: usize,
    draw: u64,
    way: Way,
    address: u64,
    patience: Duration,
    next: &'a AtomicUsize,
    stopped: &'a AtomicBool,
}

// SAFETY: the host memory is the caller's for the length of the call, in which each worker uses
// the pieces that it took alone.
unsafe impl Sync for Copy<'_> {}
// SAFETY: as above.
unsafe impl Send for Copy<'_> {}

/// A thread's share of the machinery.
#[derive(Debug)]
struct Worker {
    stream: Stream,
    slots: [Slot; DEPTH],
    ended: Event,
    /// Elements that are no fp32, widened.
    tile: Tile,
}

/// Staging of one piece.
#[derive(Debug)]
struct Slot {
    pinned: PinnedMemory,
    device: DeviceMemory,
    /// Behind the last use of `pinned` by the driver.
    used: Event,
}

impl HostCopier {
    /// With `workers` threads, or 0 for as many as the machine has cores, 8 at most. Each takes
    /// 1.5 MiB of pinned memory and as much on the GPU. A copy whose stream does not get on within
    /// `patience` fails.
    ///
    /// # Errors
    /// As [`CodecKernels::new`]; system if there is not that much memory.
    pub fn new(context: &Arc<Context>, workers: usize, patience: Duration) -> Result<HostCopier> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let workers = if workers == 0 {
            cores.min(WORKERS)
        } else {
            workers
        };
        Ok(HostCopier {
            kernels: Arc::new(CodecKernels::new(context)?),
            workers: Mutex::new(
                (0..workers)
                    .map(|_| Worker::new(context))
                    .collect::<Result<_>>()?,
            ),
            begun: Event::new(context)?,
            patience,
        })
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
        let way = Way::ToDevice(src.as_ptr());
        // SAFETY: as ours.
        unsafe { self.copy(spec, dtype, draw, way, src.len(), address, stream) }
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
        let way = Way::ToHost(dst.as_mut_ptr());
        // SAFETY: as ours.
        unsafe { self.copy(spec, dtype, draw, way, dst.len(), address, stream) }
    }

    #[allow(clippy::too_many_arguments)]
    unsafe fn copy(
        &self,
        spec: CodecSpec,
        dtype: DType,
        draw: u64,
        way: Way,
        bytes: usize,
        address: u64,
        stream: &Stream,
    ) -> Result<()> {
        if spec.kind != CodecKind::Trunc16 {
            // trunc24 was seen to bring wrong elements of 256 MiB, and no other codec as much.
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "a packed copy through {spec}: only trunc16 is shown right for arrays of any \
                     size; take it, or cinch_encode and cinch_decode"
                ),
            ));
        }
        let host = StandAlone::new(spec, Layout::Chunk, Isa::detect())?;
        let device = DeviceCodec::new(&self.kernels, spec, Layout::Chunk)?;
        let size = dtype.size();
        if !bytes.is_multiple_of(size) || !address.is_multiple_of(size as u64) {
            return Err(Error::invalid_argument(format!(
                "{bytes} bytes at {address:#x} are no whole, aligned elements of {dtype}"
            )));
        }
        if !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
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
        let mut workers = self
            .workers
            .lock()
            .map_err(|_| Error::internal("an earlier copy panicked; make another copier"))?;
        self.begun.record(stream)?;
        let (next, stopped) = (AtomicUsize::new(0), AtomicBool::new(false));
        let copy = Copy {
            host: &host,
            device: &device,
            spec,
            dtype,
            count: bytes / size,
            draw,
            way,
            address,
            patience: self.patience,
            next: &next,
            stopped: &stopped,
        };
        let needed = copy.count.div_ceil(PIECE).min(workers.len());
        let begun = &self.begun;
        let run = |worker: &mut Worker| {
            worker
                .run(&copy, begun)
                .inspect_err(|_| stopped.store(true, Ordering::Relaxed))
        };
        let outcomes: Vec<Result<()>> = match &mut workers[..needed] {
            [only] => vec![run(only)],
            several => std::thread::scope(|scope| {
                let run = &run;
                let threads: Vec<_> = several
                    .iter_mut()
                    .map(|worker| scope.spawn(move || run(worker)))
                    .collect();
                let joined = threads.into_iter().map(|thread| {
                    let panicked = || Error::internal("a thread of a packed copy panicked");
                    thread.join().unwrap_or_else(|_| Err(panicked()))
                });
                joined.collect()
            }),
        };
        // Whatever happened, the stream stays behind what was queued.
        let ended = workers[..needed]
            .iter()
            .try_for_each(|worker| stream.wait_event(&worker.ended));
        outcomes.into_iter().collect::<Result<()>>()?;
        ended
    }
}

impl Worker {
    fn new(context: &Arc<Context>) -> Result<Worker> {
        let slot = || {
            Ok::<_, Error>(Slot {
                pinned: PinnedMemory::new(context, STAGING)?,
                device: DeviceMemory::new(context, STAGING)?,
                used: Event::new(context)?,
            })
        };
        Ok(Worker {
            stream: Stream::new(context)?,
            slots: [slot()?, slot()?],
            ended: Event::new(context)?,
            tile: Tile::new(PIECE),
        })
    }

    fn run(&mut self, copy: &Copy<'_>, begun: &Event) -> Result<()> {
        self.stream.wait_event(begun)?;
        let moved = match copy.way {
            Way::ToDevice(src) => self.pack_all(copy, src),
            Way::ToHost(dst) => self.unpack_all(copy, dst),
        };
        self.ended.record(&self.stream)?;
        moved
    }

    fn pack_all(&mut self, copy: &Copy<'_>, src: *const u8) -> Result<()> {
        let mut turn = 0;
        while let Some(piece) = copy.take() {
            let slot = &mut self.slots[turn % DEPTH];
            turn += 1;
            slot.used.wait(copy.patience)?; // SYNC POINT piece
            let size = copy.dtype.size();
            // SAFETY: the caller's memory, `count` elements of it, in which this piece is; he
            // leaves it alone until the call returns.
            let bytes = unsafe {
                std::slice::from_raw_parts(src.add(piece.start * size), piece.len() * size)
            };
            let packed = copy.device.bytes(piece.len());
            let staging = slot.staging(packed)?;
            copy.pack(bytes, piece.start, &mut self.tile, staging)?;
            // SAFETY: pinned and device memory of at least so many bytes, used by this stream
            // alone until `used` has happened.
            unsafe {
                let (from, to) = (slot.pinned.address(), slot.device.address());
                memcpy(&self.stream, to, from, packed)?;
                slot.used.record(&self.stream)?;
                let wire = (slot.device.address(), packed);
                copy.device
                    .decode(wire, copy.elements(&piece), &self.stream)?;
            }
        }
        // Nothing of the source is needed any more; what is queued uses staging alone.
        Ok(())
    }

    fn unpack_all(&mut self, copy: &Copy<'_>, dst: *mut u8) -> Result<()> {
        let mut waiting: Option<(usize, Range<usize>)> = None;
        let mut turn = 0;
        loop {
            let piece = copy.take();
            if let Some(piece) = &piece {
                let slot = &self.slots[turn % DEPTH];
                let packed = copy.device.bytes(piece.len());
                // SAFETY: as in `pack_all`; the piece before the last in this slot was unpacked.
                unsafe {
                    let (wire, first) = ((slot.device.address(), packed), piece.start);
                    let elements = copy.elements(piece);
                    let draw = copy.draw;
                    copy.device
                        .encode_from(elements, draw, first, wire, &self.stream)?;
                    let (from, to) = (slot.device.address(), slot.pinned.address());
                    memcpy(&self.stream, to, from, packed)?;
                }
                slot.used.record(&self.stream)?;
            }
            if let Some((slot, piece)) = waiting.take() {
                let slot = &mut self.slots[slot];
                slot.used.wait(copy.patience)?; // SYNC POINT piece
                let packed = copy.device.bytes(piece.len());
                let size = copy.dtype.size();
                // SAFETY: as in `pack_all`; no other worker has this piece.
                let bytes = unsafe {
                    std::slice::from_raw_parts_mut(dst.add(piece.start * size), piece.len() * size)
                };
                copy.unpack(slot.staging(packed)?, &mut self.tile, bytes)?;
            }
            let Some(piece) = piece else { return Ok(()) };
            waiting = Some((turn % DEPTH, piece));
            turn += 1;
        }
    }
}

impl Slot {
    fn staging(&mut self, bytes: usize) -> Result<&mut [u8]> {
        if bytes > self.pinned.bytes() {
            return Err(Error::internal(format!(
                "a piece of {bytes} bytes does not fit the staging of {}",
                self.pinned.bytes()
            )));
        }
        // SAFETY: as many bytes, which the driver does not use: the caller has waited for it.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.pinned.host().as_ptr(), bytes) })
    }
}

impl Copy<'_> {
    /// The next piece that nobody has, unless another worker failed.
    fn take(&self) -> Option<Range<usize>> {
        let start = self.next.fetch_add(1, Ordering::Relaxed) * PIECE;
        let more = start < self.count && !self.stopped.load(Ordering::Relaxed);
        more.then(|| start..(start + PIECE).min(self.count))
    }

    fn elements(&self, piece: &Range<usize>) -> Elements {
        Elements {
            address: self.address + (piece.start * self.dtype.size()) as u64,
            count: piece.len(),
            dtype: self.dtype,
        }
    }

    fn converter(&self) -> Result<Reducer> {
        Reducer::new(self.dtype, ReduceOp::Sum, Isa::detect())
    }

    fn pack(&self, bytes: &[u8], first: usize, tile: &mut Tile, to: &mut [u8]) -> Result<()> {
        let random = Random::new(self.spec.seed.into(), self.draw, 0).from(first);
        if self.dtype == DType::F32 {
            // SAFETY: any bytes are fp32 numbers.
            let (before, all, _) = unsafe { bytes.align_to::<f32>() };
            if before.is_empty() {
                return self.host.encode_drawing(all, random, to);
            }
        }
        self.converter()?.load(bytes, tile);
        let n = bytes.len() / self.dtype.size();
        self.host.encode_drawing(tile.f32(n), random, to)
    }

    fn unpack(&self, from: &[u8], tile: &mut Tile, bytes: &mut [u8]) -> Result<()> {
        if self.dtype == DType::F32 {
            // SAFETY: any bytes are fp32 numbers, and any of those are bytes.
            let (before, all, _) = unsafe { bytes.align_to_mut::<f32>() };
            if before.is_empty() {
                return self.host.decode(from, all);
            }
        }
        let n = bytes.len() / self.dtype.size();
        self.host.decode(from, tile.f32_mut(n))?;
        self.converter()?.store(tile, bytes);
        Ok(())
    }
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
