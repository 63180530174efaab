//! Packs and unpacks the pieces of a copy on several threads, while the calling thread queues their copies.

use super::staging::StagingSlot;
use super::{GpuCopy, PIECE};
use crate::arrays::StandAlone;
use crate::codec::RoundingRandom;
use crate::cpu::{Isa, StreamFence, Tile};
use crate::error::{Error, ErrorKind, Result};
use crate::reduce::Reducer;
use crate::types::{CodecSpec, DType, ReduceOp};
use std::collections::VecDeque;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Number of elements that a thread packs or unpacks at a time if the codec's blocks have no numbers: a multiple of the
/// elements in a cache line of 1-bit codes. As fp32 they fit the second-level cache.
const PART: usize = 16 << 10;

/// Longest wait of the calling thread for a packing thread before it polls the GPU again.
const GPU_POLL_INTERVAL: Duration = Duration::from_micros(20);

/// Coding of one copy.
#[derive(Clone)]
pub struct Copy {
    pub host: StandAlone,
    pub spec: CodecSpec,
    pub dtype: DType,
    pub draw: u64,
    pub timeout: Duration,
}

/// A packed piece that is being copied: its slot, and a slot of each other GPU.
type InFlight = (StagingSlot, Vec<StagingSlot>);

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

impl Copy {
    pub fn to_devices(&self, src: &[u8], gpus: &mut [GpuCopy<'_>]) -> Result<()> {
        let Some((gpu, others)) = gpus.split_first_mut() else {
            return Ok(());
        };
        let mut tiles = std::mem::take(&mut gpu.resources.tiles);
        let run = PIECE * self.dtype.size();
        let count = src.len().div_ceil(run);
        let pieces = Mutex::new(pieces(src.chunks(run)));
        let (frees, free) = channel::<StagingSlot>();
        let (dones, done) = channel::<Result<Packed>>();
        let free = Mutex::new(free);
        let mut in_flight = VecDeque::new();
        for slot in gpu.resources.slots.drain(..) {
            in_flight.push_back((slot, Vec::new()));
        }
        let threads = tiles.len().min(count);
        let mut outcome = std::thread::scope(|scope| {
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
                        if dones.send(self.pack_piece(piece, slot, tile)).is_err() {
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
                    collect_ended(&mut in_flight, others, &frees)?;
                    match done.recv_timeout(GPU_POLL_INTERVAL) {
                        Ok(outcome) => break outcome?,
                        Err(RecvTimeoutError::Timeout) => timeout.check()?,
                        Err(RecvTimeoutError::Disconnected) => return Err(panicked()),
                    }
                };
                self.send(packed, (gpu, others), &mut in_flight, &frees)?;
            }
            Ok(())
        });
        for (slot, copies) in in_flight {
            match self.wait_for_readers(&copies) {
                Ok(()) => gpu.resources.slots.push(slot),
                Err(error) => {
                    outcome = outcome.and(Err(error));
                    // A GPU may still read the slot, so its memory is never freed.
                    std::mem::forget(slot);
                }
            }
            for (gpu, slot) in others.iter_mut().zip(copies) {
                gpu.resources.slots.push(slot);
            }
        }
        gpu.resources.slots.extend(locked(&free).try_iter());
        let packed = done.try_iter().flatten();
        gpu.resources.slots.extend(packed.map(|packed| packed.slot));
        gpu.resources.tiles = tiles;
        outcome
    }

    /// Waits until the copies of a piece to other GPUs have read the pinned memory of its slot.
    fn wait_for_readers(&self, copies: &[StagingSlot]) -> Result<()> {
        for copy in copies {
            copy.used.wait(self.timeout)?;
        }
        Ok(())
    }

    /// Queues the copies of a packed piece to all GPUs.
    fn send(
        &self,
        packed: Packed,
        (gpu, others): (&GpuCopy<'_>, &mut [GpuCopy<'_>]),
        in_flight: &mut VecDeque<InFlight>,
        frees: &Sender<StagingSlot>,
    ) -> Result<()> {
        let Packed { slot, first, n } = packed;
        let mut timeout = ProgressTimeout::new(self.timeout);
        while others.iter().any(|gpu| gpu.resources.slots.is_empty()) {
            let moved = collect_ended(in_flight, others, frees).and_then(|()| timeout.check());
            if let Err(error) = moved {
                in_flight.push_back((slot, Vec::new()));
                return Err(error);
            }
            std::thread::sleep(GPU_POLL_INTERVAL);
        }
        // The slots that have been free for longest, so that neighbouring pieces have different streams.
        let oldest = |gpu: &mut GpuCopy<'_>| gpu.resources.slots.remove(0);
        let copies: Vec<StagingSlot> = others.iter_mut().map(oldest).collect();
        let pinned = slot.pinned.address();
        let mut queued = gpu.send(pinned, &slot, (first, n), self.dtype);
        for (gpu, copy) in others.iter().zip(&copies) {
            queued = queued.and(gpu.send(pinned, copy, (first, n), self.dtype));
        }
        in_flight.push_back((slot, copies));
        queued
    }

    pub fn to_host(&self, dst: &mut [u8], gpu: &mut GpuCopy<'_>) -> Result<()> {
        let mut slots = std::mem::take(&mut gpu.resources.slots);
        let mut tiles = std::mem::take(&mut gpu.resources.tiles);
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
                        if dones.send(self.unpack_piece(piece, slot, tile)).is_err() {
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
                    let queued = gpu.fetch(self, &slot, piece.first, n);
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
        gpu.resources.slots = slots;
        gpu.resources.tiles = tiles;
        outcome
    }

    fn converter(&self) -> Result<Reducer> {
        Reducer::new(self.dtype, ReduceOp::Sum, Isa::detect())
    }

    /// Returns the number of elements that a thread packs or unpacks at a time.
    pub fn part(&self) -> usize {
        if self.host.has_block_numbers() {
            PIECE
        } else {
            PART
        }
    }

    fn pack_piece(
        &self,
        piece: ArrayPiece<&[u8]>,
        mut slot: StagingSlot,
        tile: &mut Tile,
    ) -> Result<Packed> {
        let ArrayPiece { first, bytes } = piece;
        let n = bytes.len() / self.dtype.size();
        self.pack(first, bytes, slot.staging(self.host.bytes(n))?, tile)?;
        Ok(Packed { slot, first, n })
    }

    /// Packs the elements from index `first` on of the host array, which are `bytes`.
    pub fn pack(&self, first: usize, bytes: &[u8], to: &mut [u8], tile: &mut Tile) -> Result<()> {
        let (size, part) = (self.dtype.size(), self.part());
        let random = RoundingRandom::new(self.spec.seed.into(), self.draw, 0);
        for (number, bytes) in bytes.chunks(part * size).enumerate() {
            let (at, n) = (number * part, bytes.len() / size);
            let to = &mut to[self.host.bytes(at)..][..self.host.bytes(n)];
            let elements = match self.in_place(bytes) {
                Some(elements) => elements,
                None => {
                    self.converter()?.load(bytes, tile);
                    tile.f32(n)
                }
            };
            self.host
                .encode_drawing(elements, random.from(first + at), to)?;
        }
        Ok(())
    }

    fn unpack_piece(
        &self,
        piece: ArrayPiece<&mut [u8]>,
        mut slot: StagingSlot,
        tile: &mut Tile,
    ) -> Result<StagingSlot> {
        let n = piece.bytes.len() / self.dtype.size();
        self.unpack(slot.staging(self.host.bytes(n))?, piece.bytes, tile)?;
        Ok(slot)
    }

    /// Unpacks elements of the host array, which are to be `bytes`.
    pub fn unpack(&self, from: &[u8], bytes: &mut [u8], tile: &mut Tile) -> Result<()> {
        let (size, part) = (self.dtype.size(), self.part());
        let stores = StreamFence::new();
        for (number, bytes) in bytes.chunks_mut(part * size).enumerate() {
            let (at, n) = (number * part, bytes.len() / size);
            let from = &from[self.host.bytes(at)..][..self.host.bytes(n)];
            if part == PIECE && self.in_place(bytes).is_some() {
                // SAFETY: every byte pattern is a valid fp32 number, and `in_place` has checked the alignment.
                let (_, elements, _) = unsafe { bytes.align_to_mut::<f32>() };
                self.host.decode(from, elements)?;
                continue;
            }
            self.host.decode(from, tile.f32_mut(n))?;
            if part == PART && self.dtype == DType::F32 {
                stores.copy(bytes, tile.view(bytes.len()));
            } else {
                self.converter()?.store(tile, bytes);
            }
        }
        drop(stores);
        Ok(())
    }

    /// Returns the bytes as fp32 elements if the array's type is fp32 and the bytes are aligned for
    /// it.
    fn in_place<'b>(&self, bytes: &'b [u8]) -> Option<&'b [f32]> {
        // SAFETY: every byte pattern is a valid fp32 number.
        let (before, all, _) = unsafe { bytes.align_to::<f32>() };
        (self.dtype == DType::F32 && before.is_empty()).then_some(all)
    }
}

/// Moves the slots of ended copies from the front of `in_flight`: those of the first GPU to `free`, the others back to
/// their GPUs.
fn collect_ended(
    in_flight: &mut VecDeque<InFlight>,
    others: &mut [GpuCopy<'_>],
    free: &Sender<StagingSlot>,
) -> Result<()> {
    while let Some((slot, copies)) = in_flight.front() {
        for slot in std::iter::once(slot).chain(copies) {
            if !slot.used.has_happened()? {
                return Ok(());
            }
        }
        if let Some((slot, copies)) = in_flight.pop_front() {
            let _ = free.send(slot);
            for (gpu, slot) in others.iter_mut().zip(copies) {
                gpu.resources.slots.push(slot);
            }
        }
    }
    Ok(())
}

/// Detects that the calling thread has seen no progress for `timeout`.
struct ProgressTimeout {
    since: Instant,
    pub timeout: Duration,
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
pub fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub fn panicked() -> Error {
    Error::internal("the threads of a packed copy panicked")
}
