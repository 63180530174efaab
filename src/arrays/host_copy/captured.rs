//! Packed copies that graphs replay.
//!
//! A capture records, for each piece, a host function that packs or unpacks it, the copy of its encoding, and the kernels.
//! Host functions have a stream of their own, so that the packing of one piece overlaps the transfer of another. Towards
//! a GPU:
//!
//! ```text
//! host stream      pack 0   pack 1            pack 2, when slot 0 has been read ...
//! caller's stream           copy 0, unpack 0  copy 1, unpack 1 ...
//! ```
//!
//! The graph keeps all that its replays use, but for the arrays. A host function runs on a thread of the driver and
//! calls no driver function; it packs on threads of its own.

use super::pieces::{Copy, locked, panicked};
use super::staging::{StagingSlot, memcpy};
use super::{CopyTarget, HostCopier, PIECE, elements};
use crate::arrays::Layout;
use crate::arrays::device_codec::DeviceCodec;
use crate::cpu::Tile;
use crate::error::{Error, Result};
use crate::gpu::{Event, Stream};
use crate::sys::log::{Level, line};
use std::ffi::c_void;
use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};
use std::sync::{Arc, Mutex};

/// Number of pieces whose encodings are in memory at a time: one is packed while another is transferred.
const SLOTS: usize = 2;

/// Direction of a copy, with the host array's address.
#[derive(Clone, Copy, Debug)]
pub enum HostArray {
    /// The copy reads the array.
    Source(usize),
    /// The copy writes the array.
    Target(usize),
}

/// A copy that a graph replays. The graph keeps it.
struct CapturedCopy {
    pieces: Vec<CapturedPiece>,
    device: DeviceCodec,
    host_stream: Stream,
    /// Events in the caller's stream before the copy, and in the host stream behind it.
    begun: Event,
    ended: Event,
    /// Events behind the last host function of each slot.
    worked: Vec<Event>,
}

/// Elements that one host function packs or unpacks.
struct CapturedPiece {
    shared: Arc<HostWork>,
    first: usize,
    n: usize,
    slot: usize,
}

/// Code and memory that the host functions of a copy share.
struct HostWork {
    copy: Copy,
    array: HostArray,
    slots: Vec<StagingSlot>,
    /// Bytes from the encoding of one part of [`PIECE`] elements to the next in a slot.
    stride: usize,
    /// Scratch memory of each thread. A host function locks it, so that replays at one time do not meet in a slot.
    tiles: Mutex<Vec<Tile>>,
}

/// At most [`PIECE`] elements of a captured piece, and the offset of their encoding in its slot.
#[derive(Clone, Copy)]
struct Part {
    first: usize,
    n: usize,
    at: usize,
}

impl HostCopier {
    /// Records a copy between `array`, which has `bytes` bytes, and the targets, all on one stream that is being captured.
    ///
    /// # Errors
    /// Invalid usage for targets on several streams; system if memory is short; the driver's errors, after which a part of
    /// the copy may be recorded.
    ///
    /// # Safety
    /// As for [`HostCopier::to_devices`] and [`HostCopier::to_host`] in a capture.
    pub(super) unsafe fn capture(
        &self,
        copy: &Copy,
        (array, bytes): (HostArray, usize),
        targets: &[CopyTarget<'_>],
    ) -> Result<()> {
        let stream = targets[0].stream;
        // Default streams of two GPUs have one handle.
        let of = |stream: &Stream| (stream.context().handle(), stream.handle());
        let is_other = |target: &CopyTarget<'_>| of(target.stream) != of(stream);
        if targets.iter().any(is_other) {
            return Err(Error::invalid_usage(
                "a packed copy to arrays on several streams cannot be captured: record a copy on each stream",
            ));
        }
        let captured = Arc::new(self.captured(copy, (array, bytes / copy.dtype.size()))?);
        // Replays of what is recorded before an error use the copy, too.
        if !stream.keep_for_replay(captured.clone())? {
            return Err(Error::invalid_usage(
                "the stream's capture has ended while a packed copy was recorded",
            ));
        }
        captured.begun.record(stream)?;
        captured.host_stream.wait_event(&captured.begun)?;
        let mut pieces = captured.pieces.iter().enumerate();
        let outcome = pieces.try_for_each(|(number, piece)| match array {
            HostArray::Source(_) => captured.send(piece, number, targets),
            HostArray::Target(_) => captured.fetch(piece, number, &targets[0]),
        });
        // The host stream joins the caller's even after an error, because a capture cannot end with a stream that has not.
        let joined = captured.ended.record(&captured.host_stream);
        outcome.and(joined.and(stream.wait_event(&captured.ended)))
    }

    /// Returns a copy of `count` elements with its memory, of which nothing is recorded.
    fn captured(&self, copy: &Copy, (array, count): (HostArray, usize)) -> Result<CapturedCopy> {
        let context = self.context();
        let parts = count.div_ceil(PIECE).min(self.lock()?.tiles.len()).max(1);
        let run = parts * PIECE;
        let stride = copy.host.bytes(PIECE.min(count)).next_multiple_of(256);
        let slots = 0..SLOTS.min(count.div_ceil(run));
        let slot = |_| StagingSlot::new(context, 0, stride * parts);
        let worked = slots.clone().map(|_| Event::new(context));
        let shared = Arc::new(HostWork {
            copy: copy.clone(),
            array,
            slots: slots.clone().map(slot).collect::<Result<_>>()?,
            stride,
            tiles: Mutex::new((0..parts).map(|_| Tile::new(copy.part())).collect()),
        });
        let pieces = (0..count).step_by(run).enumerate();
        let pieces = pieces.map(|(number, first)| CapturedPiece {
            shared: shared.clone(),
            first,
            n: run.min(count - first),
            slot: number % SLOTS,
        });
        Ok(CapturedCopy {
            pieces: pieces.collect(),
            device: DeviceCodec::new(&self.kernels, copy.spec, Layout::Chunk)?,
            host_stream: Stream::new(context)?,
            begun: Event::new(context)?,
            ended: Event::new(context)?,
            worked: worked.collect::<Result<_>>()?,
        })
    }
}

impl CapturedCopy {
    /// Records the copy of piece `number` to the targets.
    fn send(&self, piece: &CapturedPiece, number: usize, targets: &[CopyTarget<'_>]) -> Result<()> {
        let (stream, slot, copy) = (targets[0].stream, piece.staging(), &piece.shared.copy);
        if number >= SLOTS {
            self.host_stream.wait_event(&slot.used)?;
        }
        self.record_work(piece)?;
        stream.wait_event(&self.worked[piece.slot])?;
        let to = slot.device.address();
        // SAFETY: the slot owns pinned and device memory for the piece, and the graph keeps the slot. The recorded order keeps
        // host function, copy and kernels apart. The caller of `capture` guarantees the elements.
        unsafe {
            memcpy(stream, to, slot.pinned.address(), piece.bytes())?;
            slot.used.record(stream)?;
            for part in piece.parts() {
                let encoding = (to + part.at as u64, copy.host.bytes(part.n));
                for target in targets {
                    let elements = elements(target.address, copy.dtype, part.first, part.n);
                    self.device.decode(encoding, elements, stream)?;
                }
            }
        }
        Ok(())
    }

    /// Records the copy of piece `number` from the GPU.
    fn fetch(&self, piece: &CapturedPiece, number: usize, from: &CopyTarget<'_>) -> Result<()> {
        let (stream, slot, copy) = (from.stream, piece.staging(), &piece.shared.copy);
        let at = slot.device.address();
        // SAFETY: as in `send`.
        unsafe {
            for part in piece.parts() {
                let encoding = (at + part.at as u64, copy.host.bytes(part.n));
                let elements = elements(from.address, copy.dtype, part.first, part.n);
                let device = &self.device;
                device.encode_from(elements, copy.draw, part.first, encoding, stream)?;
            }
            if number >= SLOTS {
                stream.wait_event(&self.worked[piece.slot])?;
            }
            memcpy(stream, slot.pinned.address(), at, piece.bytes())?;
        }
        slot.used.record(stream)?;
        self.host_stream.wait_event(&slot.used)?;
        self.record_work(piece)
    }

    /// Records the host function of a piece.
    fn record_work(&self, piece: &CapturedPiece) -> Result<()> {
        let data = std::ptr::from_ref(piece).cast_mut().cast();
        // SAFETY: the graph keeps the piece, which `work_on` takes, until it is destroyed.
        unsafe { self.host_stream.host_function(work_on, data)? };
        self.worked[piece.slot].record(&self.host_stream)
    }
}

/// Packs or unpacks a [`CapturedPiece`]. Nothing could report an error of a replay, and later work of the stream would use wrong
/// elements, so an error ends the process.
unsafe extern "C" fn work_on(piece: *mut c_void) {
    // SAFETY: `record_work` passed a piece that the graph keeps.
    let piece = unsafe { &*piece.cast::<CapturedPiece>() };
    if let Err(error) = piece.work() {
        line(
            Level::Warn,
            format_args!("a packed copy in a graph failed, so the process ends: {error}"),
        );
        std::process::abort();
    }
}

impl CapturedPiece {
    fn staging(&self) -> &StagingSlot {
        &self.shared.slots[self.slot]
    }

    fn parts(&self) -> impl Iterator<Item = Part> {
        let (begin, end, stride) = (self.first, self.first + self.n, self.shared.stride);
        let parts = (begin..end).step_by(PIECE).enumerate();
        parts.map(move |(number, first)| Part {
            first,
            n: PIECE.min(end - first),
            at: number * stride,
        })
    }

    /// Returns the bytes in the slot from the first part to the end of the last one.
    fn bytes(&self) -> usize {
        let last = self.parts().last();
        last.map_or(0, |part| part.at + self.shared.copy.host.bytes(part.n))
    }

    /// Packs or unpacks all parts, on a thread for each while the system has threads.
    fn work(&self) -> Result<()> {
        let mut tiles = locked(&self.shared.tiles);
        let parts = Mutex::new(self.parts());
        let work = |tile: &mut Tile| -> Result<()> {
            loop {
                let Some(part) = locked(&parts).next() else {
                    return Ok(());
                };
                self.work_on(part, tile)?;
            }
        };
        let Some((own, others)) = tiles.split_first_mut() else {
            return Err(Error::internal("a captured copy without threads"));
        };
        std::thread::scope(|scope| {
            let others = others[..self.parts().count() - 1].iter_mut();
            let threads: Vec<_> = others
                .filter_map(|tile| {
                    let thread = std::thread::Builder::new().name("cinch-pack".into());
                    thread.spawn_scoped(scope, || work(tile)).ok()
                })
                .collect();
            let outcome = work(own);
            threads.into_iter().fold(outcome, |outcome, thread| {
                outcome.and(thread.join().unwrap_or_else(|_| Err(panicked())))
            })
        })
    }

    fn work_on(&self, part: Part, tile: &mut Tile) -> Result<()> {
        let shared = &*self.shared;
        let copy = &shared.copy;
        let size = copy.dtype.size();
        let (offset, bytes) = (part.first * size, part.n * size);
        // SAFETY: the slot has room for all parts, no two of which overlap. The recorded order keeps the GPU away meanwhile, and
        // the lock of `work` other replays.
        let encoding = unsafe {
            let slot = self.staging().pinned.host().as_ptr().add(part.at);
            std::slice::from_raw_parts_mut(slot, copy.host.bytes(part.n))
        };
        match shared.array {
            HostArray::Source(address) => {
                let from = with_exposed_provenance::<u8>(address + offset);
                // SAFETY: the caller of `capture` keeps the array readable while graphs may be replayed.
                let from = unsafe { std::slice::from_raw_parts(from, bytes) };
                copy.pack(part.first, from, encoding, tile)
            }
            HostArray::Target(address) => {
                let to = with_exposed_provenance_mut::<u8>(address + offset);
                // SAFETY: the caller of `capture` keeps the array writable while graphs may be replayed, and no other part has
                // these bytes.
                let to = unsafe { std::slice::from_raw_parts_mut(to, bytes) };
                copy.unpack(encoding, to, tile)
            }
        }
    }
}
