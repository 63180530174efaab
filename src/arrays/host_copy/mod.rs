//! Packed copies of whole arrays between host memory and a GPU, as ADT copies weights.
//!
//! An array is copied in pieces. Towards the GPU, host threads pack pieces into pinned staging memory. The
//! calling thread queues the copy and the unpack kernel of each packed piece. Towards the host, the calling
//! thread queues the pack kernel and the copy of each piece, and the host threads unpack pieces that have
//! arrived. Only the calling thread calls the driver, because threads that call it together would contend for
//! its lock.
//!
//! A slot is the staging memory of one piece. Channels pass slots between threads, and the thread that holds
//! a slot owns it. A copy to several places packs each piece once: the piece crosses the bus once for each GPU, from the
//! pinned memory of a slot of the first GPU to the device memory of a slot of each.
//!
//! A copy begins after earlier work in the caller's stream, and later work in the stream waits for the copy.
//! A call returns when the host array may be used again. Towards the GPU this is when it has been packed,
//! towards the host when it is complete. A copy that is captured works at each replay (`captured`).

mod captured;
mod pieces;
mod staging;

use super::device_codec::{CodecKernels, DeviceCodec, Elements};
use super::{Layout, StandAlone};
use crate::cpu::{Isa, Tile};
use crate::error::{Error, ErrorKind, Result};
use crate::gpu::{Context, Event, Stream};
use crate::types::{CodecSpec, DType};
use captured::HostArray;
use pieces::Copy;
use staging::{CopyResources, IN_FLIGHT, STAGING, STREAMS, StagingSlot, memcpy};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// Number of elements of a piece: a multiple of every block, and so large that copying takes longer than
/// queueing.
const PIECE: usize = 512 << 10;
/// Largest default number of threads. More threads gain nothing, since one bus carries all copies.
const MOST_THREADS: usize = 16;

/// Copies arrays between host memory and a GPU. Concurrent copies run one after the other.
#[derive(Debug)]
pub struct HostCopier {
    kernels: Arc<CodecKernels>,
    resources: Mutex<CopyResources>,
    begun: Event,
    timeout: Duration,
}

/// A place in a GPU's memory to which an array is copied.
#[derive(Clone, Copy, Debug)]
pub struct CopyTarget<'a> {
    /// The copier of the GPU.
    pub copier: &'a HostCopier,
    /// Address of the first element.
    pub address: u64,
    /// A stream of the GPU, in which the copy has its place.
    pub stream: &'a Stream,
}

/// A GPU of a copy, with its codec and the addresses of the arrays in its memory.
struct GpuCopy<'a> {
    device: DeviceCodec,
    targets: Vec<CopyTarget<'a>>,
    resources: MutexGuard<'a, CopyResources>,
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
                .map(|number| StagingSlot::new(context, number % STREAMS, STAGING))
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

    /// Copies the elements of `src` through codec `spec` to device memory at `address`. See [`HostCopier::to_devices`].
    ///
    /// # Errors
    /// See [`HostCopier::to_devices`].
    ///
    /// # Safety
    /// See [`HostCopier::to_devices`].
    pub unsafe fn to_device(
        &self,
        spec: CodecSpec,
        dtype: DType,
        draw: u64,
        src: &[u8],
        address: u64,
        stream: &Stream,
    ) -> Result<()> {
        let target = CopyTarget {
            copier: self,
            address,
            stream,
        };
        // SAFETY: the caller keeps the contract, which the callee shares.
        unsafe { HostCopier::to_devices(spec, dtype, draw, src, &[target]) }
    }

    /// Copies the elements of `src` through codec `spec` to each target, on one or several GPUs; they are packed once.
    /// Returns when `src` has been read, and with several GPUs when all have read the encoding: the slowest of their streams
    /// delays the others. Work queued on a target's stream afterwards runs behind its copy. See
    /// [`StandAlone::encode`] for `draw`.
    ///
    /// # Errors
    /// Invalid argument for bytes that are no whole elements, for a misaligned address, and without targets; invalid usage
    /// in a capture with several streams; the errors of [`DeviceCodec::new`]; timeout if a GPU's streams make no progress;
    /// the driver's errors. After a timeout or a driver's error the memory of the targets is undefined.
    ///
    /// In a capture nothing is read yet: each replay copies what `src` has then, with the same `draw`. One replay of the copy
    /// runs at a time. An internal error in a replay ends the process.
    ///
    /// # Safety
    /// Each address is memory of its stream's GPU, with as many bytes as `src` has. No other code frees or uses it while
    /// the copy runs in the stream. If the copy is captured, `src` stays as long as the graph may be replayed, and no code
    /// writes it during a replay.
    pub unsafe fn to_devices(
        spec: CodecSpec,
        dtype: DType,
        draw: u64,
        src: &[u8],
        targets: &[CopyTarget<'_>],
    ) -> Result<()> {
        let host = StandAlone::new(spec, Layout::Chunk, Isa::detect())?.for_elements(dtype);
        let mut targets = targets.to_vec();
        // All copies lock the copiers of several GPUs in this order.
        targets.sort_by_key(|target| std::ptr::from_ref(target.copier));
        let Some(first) = targets.first() else {
            return Err(Error::invalid_argument("a packed copy to no place"));
        };
        let timeout = first.copier.timeout;
        for target in &targets {
            check(dtype, (src.len(), target.address))?;
        }
        if src.is_empty() {
            return Ok(());
        }
        let copy = Copy {
            host,
            spec,
            dtype,
            draw,
            timeout,
        };
        if is_captured(&targets)? {
            let array = HostArray::Source(src.as_ptr().expose_provenance());
            // SAFETY: the caller keeps the arrays for replays.
            return unsafe { first.copier.capture(&copy, (array, src.len()), &targets) };
        }
        let same =
            |one: &CopyTarget<'_>, other: &CopyTarget<'_>| std::ptr::eq(one.copier, other.copier);
        let gpus = targets.chunk_by(same);
        let mut gpus: Vec<GpuCopy<'_>> = gpus
            .map(|targets| {
                let copier = targets[0].copier;
                Ok(GpuCopy {
                    device: DeviceCodec::new(&copier.kernels, spec, Layout::Chunk)?,
                    targets: targets.to_vec(),
                    resources: copier.lock()?,
                })
            })
            .collect::<Result<_>>()?;
        for gpu in &gpus {
            gpu.begin()?;
        }
        let slots: Vec<usize> = gpus.iter().map(|gpu| gpu.resources.slots.len()).collect();
        let outcome = copy.to_devices(src, &mut gpus);
        // Even after an error, later work in the callers' streams must wait for the work that was queued.
        // Each GPU has its turn, whatever fails on others.
        let each = gpus.iter_mut().zip(slots).map(|(gpu, slots)| {
            let context = gpu.targets[0].copier.context();
            let ended = gpu.end();
            ended.and(gpu.resources.replace_lost_slots(context, slots))
        });
        each.fold(outcome, Result::and)
    }

    /// Copies the elements at `address` through codec `spec` to `dst`. Returns when `dst` is complete; in a capture, each replay
    /// completes it.
    ///
    /// # Errors
    /// See [`HostCopier::to_devices`].
    ///
    /// # Safety
    /// `address` is memory of the stream's GPU, with as many bytes as `dst` has. No other code frees or writes
    /// it while the copy runs in the stream. If the copy is captured, `dst` stays as long as the graph may be replayed, and no
    /// other code uses it during a replay.
    pub unsafe fn to_host(
        &self,
        spec: CodecSpec,
        dtype: DType,
        draw: u64,
        address: u64,
        dst: &mut [u8],
        stream: &Stream,
    ) -> Result<()> {
        let host = StandAlone::new(spec, Layout::Chunk, Isa::detect())?.for_elements(dtype);
        check(dtype, (dst.len(), address))?;
        if dst.is_empty() {
            return Ok(());
        }
        let copy = Copy {
            host,
            spec,
            dtype,
            draw,
            timeout: self.timeout,
        };
        let target = CopyTarget {
            copier: self,
            address,
            stream,
        };
        if is_captured(&[target])? {
            let array = HostArray::Target(dst.as_mut_ptr().expose_provenance());
            // SAFETY: the caller keeps the arrays for replays.
            return unsafe { self.capture(&copy, (array, dst.len()), &[target]) };
        }
        let mut gpu = GpuCopy {
            device: DeviceCodec::new(&self.kernels, spec, Layout::Chunk)?,
            targets: vec![target],
            resources: self.lock()?,
        };
        gpu.begin()?;
        let slots = gpu.resources.slots.len();
        let outcome = copy.to_host(dst, &mut gpu);
        let ended = gpu.end();
        gpu.resources.replace_lost_slots(self.context(), slots)?;
        outcome.and(ended)
    }

    fn lock(&self) -> Result<MutexGuard<'_, CopyResources>> {
        self.resources
            .lock()
            .map_err(|_| Error::internal("an earlier copy panicked; make another copier"))
    }
}

/// Checks an array of so many bytes in a GPU's memory.
fn check(dtype: DType, (bytes, address): (usize, u64)) -> Result<()> {
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
    Ok(())
}

/// Returns whether a stream of the targets is being captured.
fn is_captured(targets: &[CopyTarget<'_>]) -> Result<bool> {
    for target in targets {
        if target.stream.is_capturing()? {
            return Ok(true);
        }
    }
    Ok(false)
}

impl GpuCopy<'_> {
    /// Lets the copier's streams wait for earlier work of the targets' streams.
    fn begin(&self) -> Result<()> {
        for target in &self.targets {
            let begun = &target.copier.begun;
            begun.record(target.stream)?;
            for (own, _) in &self.resources.streams {
                own.wait_event(begun)?;
            }
        }
        Ok(())
    }

    /// Lets the targets' streams wait for the copy.
    fn end(&self) -> Result<()> {
        for (own, ended) in &self.resources.streams {
            ended.record(own)?;
            for target in &self.targets {
                target.stream.wait_event(ended)?;
            }
        }
        Ok(())
    }

    /// Queues the copy of `n` packed elements, from `first` on, to the slot's device memory, and the unpack kernel of each
    /// target.
    fn send(
        &self,
        pinned: u64,
        slot: &StagingSlot,
        (first, n): (usize, usize),
        dtype: DType,
    ) -> Result<()> {
        let bytes = self.device.bytes(n);
        let (stream, to) = (
            &self.resources.streams[slot.stream].0,
            slot.device.address(),
        );
        // SAFETY: `pinned` and the slot's device memory have at least `bytes` bytes. No thread writes the pinned memory
        // before `used` has happened, and only this stream uses the device memory. The caller of `to_devices` guarantees
        // the elements.
        unsafe {
            memcpy(stream, to, pinned, bytes)?;
            slot.used.record(stream)?;
            for target in &self.targets {
                let elements = elements(target.address, dtype, first, n);
                self.device.decode((to, bytes), elements, stream)?;
            }
        }
        Ok(())
    }

    /// Queues the pack kernel of a piece and its copy from the GPU.
    fn fetch(&self, copy: &Copy, slot: &StagingSlot, first: usize, n: usize) -> Result<()> {
        let stream = &self.resources.streams[slot.stream].0;
        let bytes = self.device.bytes(n);
        let (from, to) = (slot.device.address(), slot.pinned.address());
        // SAFETY: the slot owns pinned and device memory of at least `bytes` bytes. No thread reads the pinned
        // memory before `used` has happened, and only this stream uses the device memory. The caller of
        // `to_host` guarantees the elements.
        unsafe {
            let elements = elements(self.targets[0].address, copy.dtype, first, n);
            self.device
                .encode_from(elements, copy.draw, first, (from, bytes), stream)?;
            memcpy(stream, to, from, bytes)?;
        }
        slot.used.record(stream)
    }
}

fn elements(address: u64, dtype: DType, first: usize, count: usize) -> Elements {
    Elements {
        address: address + (first * dtype.size()) as u64,
        count,
        dtype,
    }
}
