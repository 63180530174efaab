//! A stand-in for the schedule kernel that runs on the host, over the memory that a launch names.
//! It supports simple FIFOs and f32 only. It uses the real kernel's counters, slots, headers and
//! cursors, and shares no code with it.

use super::super::pack::WorkBuffer;
use super::interpreter::{World, order};
use crate::codec::{Codec, chunk_bytes};
use crate::gpu::abi::{self, KernelWork};
use crate::gpu::abi::{
    CommView, Control, Counters, Cursor, LINE_BYTES, MAX_PEERS, Protocol, SIGNATURE_WORDS,
    TROUBLE_COMPLETE, TROUBLE_MISMATCH, TROUBLE_TIMEOUT, Trouble,
};
use std::mem::offset_of;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// State of one launch.
pub(crate) struct Kernel<'a> {
    view: &'a CommView,
    work_buffer: &'a WorkBuffer,
    codec: Option<&'a dyn Codec>,
}

struct Block {
    work: KernelWork,
    channel: usize,
    batches: Vec<(u64, usize, usize)>,
    at: usize,
    /// Bit p is set once this block has received a message from peer p; `sent` marks peers to which
    /// it has sent.
    received: u32,
    sent: u32,
}

impl<'a> Kernel<'a> {
    pub fn new(
        view: &'a CommView,
        work_buffer: &'a WorkBuffer,
        codec: Option<&'a dyn Codec>,
    ) -> Kernel<'a> {
        assert_eq!(view.protocol, Protocol::Simple as u32);
        Kernel {
            view,
            work_buffer,
            codec,
        }
    }

    /// Runs all blocks until they end, or until one has to stop.
    pub fn run(&self) {
        let nobody = vec![Vec::new(); self.view.nranks as usize];
        let mut world = World::new(&nobody, self.codec, 2);
        let mut blocks: Vec<Block> = Vec::new();
        for work in &self.work_buffer.works {
            for channel in 0..u64::from(work.channels) {
                blocks.push(Block {
                    work: *work,
                    channel: usize::from(work.first_channel) + channel as usize,
                    batches: order(work, &self.work_buffer.steps, channel),
                    at: 0,
                    received: 0,
                    sent: 0,
                });
            }
        }
        let mut since = Instant::now();
        while blocks.iter().any(|block| block.at < block.batches.len()) {
            let mut moved = false;
            for block in &mut blocks {
                while block.at < block.batches.len() && self.waits_for(block).is_none() {
                    if !self.batch(block, &mut world) {
                        return;
                    }
                    block.at += 1;
                    moved = true;
                }
            }
            if moved {
                since = Instant::now();
                continue;
            }
            let abort = self.control() as usize + offset_of!(Control, abort);
            // SAFETY: the word lies in the control block, which the connections keep until the
            // launch has ended.
            if unsafe { &*(abort as *const AtomicU32) }.load(Ordering::Relaxed) != 0 {
                return;
            }
            if since.elapsed() > Duration::from_nanos(self.view.timeout_ns) {
                let waiting = blocks.iter().find_map(|block| self.waits_for(block));
                let (peer, sends, channel) = waiting.unwrap_or_default();
                return self.report(Trouble {
                    kind: TROUBLE_TIMEOUT,
                    peer: self.view.ranks[peer].into(),
                    sends: u32::from(sends),
                    channel: channel as u32,
                    mine: blocks[0].work.signature,
                    ..Trouble::default()
                });
            }
            std::thread::sleep(Duration::from_micros(20));
        }
    }

    fn control(&self) -> *mut Control {
        self.view.control as *mut Control
    }

    fn report(&self, trouble: Trouble) {
        // SAFETY: this rank's control block; the simulated driver runs one launch of a rank at a
        // time.
        unsafe {
            let place = &raw mut (*self.control()).trouble;
            place.write_volatile(Trouble {
                state: 1,
                ..trouble
            });
            AtomicU32::from_ptr(&raw mut (*place).state).store(TROUBLE_COMPLETE, Ordering::Release);
        }
    }

    fn cursor(&self, channel: usize, peer: usize) -> &'a mut Cursor {
        let cursors = self.view.cursors as *mut Cursor;
        // SAFETY: the index lies inside the array of cursors; launches of one rank do not overlap.
        unsafe {
            let rank = usize::from(self.view.ranks[peer]);
            &mut *cursors.add(channel * self.view.nranks as usize + rank)
        }
    }

    fn counter(&self, base: u64, channel: usize, offset: usize) -> &'a AtomicU64 {
        let at = base + self.view.fifo.counters + (channel * LINE_BYTES + offset) as u64;
        // SAFETY: the counter lies in a peer buffer that the view names and the connections keep.
        unsafe { &*(at as *const AtomicU64) }
    }

    fn slot(&self, base: u64, channel: usize, number: u64) -> *mut u8 {
        let fifo = &self.view.fifo;
        let place = channel as u64 * u64::from(fifo.depth) + number % u64::from(fifo.depth);
        (base + fifo.slots + place * u64::from(fifo.stride)) as *mut u8
    }

    fn batch_of<'b>(&self, block: &'b Block) -> (u64, &'a [abi::KernelStep], &'b KernelWork) {
        let (pass, first, len) = block.batches[block.at];
        (
            pass,
            &self.work_buffer.steps[first..first + len],
            &block.work,
        )
    }

    /// Returns the first missing message or credit as (peer, whether this rank sends, channel).
    fn waits_for(&self, block: &Block) -> Option<(usize, bool, usize)> {
        let batch = block.batches.get(block.at)?;
        let first = &self.work_buffer.steps[batch.1];
        let channel = block.channel;
        (0..MAX_PEERS).find_map(|peer| {
            let cursor = || self.cursor(channel, peer);
            let inbox = self.view.inbox[peer];
            if first.recv_mask >> peer & 1 == 1 {
                let tail = self.counter(inbox, channel, offset_of!(Counters, tail));
                if tail.load(Ordering::Acquire) <= cursor().received {
                    return Some((peer, false, channel));
                }
            }
            if first.send_mask >> peer & 1 == 1 {
                let head = self.counter(inbox, channel, offset_of!(Counters, head));
                let depth = u64::from(self.view.fifo.depth);
                if head.load(Ordering::Acquire) + depth <= cursor().sent {
                    return Some((peer, true, channel));
                }
            }
            None
        })
    }

    /// Returns the bytes of a message of a step's chunk.
    fn bytes(&self, work: &KernelWork, step: &abi::KernelStep, pass: u64, is_intra: bool) -> usize {
        let start = (pass * u64::from(work.parts) + u64::from(step.part)) * work.chunk;
        let n = (work.count - start.min(work.count)).min(work.chunk) as usize;
        match work.intra {
            abi::INTRA_RAW if is_intra => 4 * n,
            abi::INTRA_CAST16 | abi::INTRA_CAST_BF16 if is_intra => 2 * n,
            number @ abi::INTRA_LINEAR8.. if is_intra => {
                let block = 1 << (number - abi::INTRA_LINEAR8);
                chunk_bytes(n, 8, n.div_ceil(block))
            }
            _ => self.codec.map_or(4 * n, |codec| codec.wire_bytes(n)),
        }
    }

    /// Runs one batch; returns false if a peer runs another call.
    fn batch(&self, block: &mut Block, world: &mut World<'_>) -> bool {
        let (pass, steps, work) = self.batch_of(block);
        let (work, channel) = (*work, block.channel);
        let mut taken = Vec::new();
        let mut sent = Vec::new();
        for step in steps {
            let first = usize::from(step.peers);
            let middle = first + usize::from(step.nrecv);
            let peers = &self.work_buffer.peers[first..middle + usize::from(step.nsend)];
            let (recv, send) = peers.split_at(usize::from(step.nrecv));
            let mut received = Vec::new();
            for (at, &peer) in recv.iter().enumerate() {
                let is_intra = at < usize::from(step.intra_recv);
                let bytes = self.bytes(&work, step, pass, is_intra);
                let peer = usize::from(peer);
                let number = self.cursor(channel, peer).received;
                let slot = self.slot(self.view.inbox[peer], channel, number);
                if block.received >> peer & 1 == 0 {
                    // SAFETY: the peer has published the slot, so its header is complete and stays
                    // until credit returns.
                    let theirs = unsafe {
                        slot.sub(LINE_BYTES)
                            .cast::<[u64; SIGNATURE_WORDS]>()
                            .read_volatile()
                    };
                    if theirs != work.signature {
                        self.report(Trouble {
                            kind: TROUBLE_MISMATCH,
                            peer: self.view.ranks[peer].into(),
                            channel: channel as u32,
                            mine: work.signature,
                            theirs,
                            ..Trouble::default()
                        });
                        return false;
                    }
                }
                block.received |= 1 << peer;
                // SAFETY: the peer has published the slot, and its payload of `bytes` stays until
                // credit returns.
                received.push(unsafe { std::slice::from_raw_parts(slot, bytes) }.to_vec());
                taken.push(peer);
            }
            let message = world.step(&work, step, pass, &received);
            for &peer in send {
                let peer = usize::from(peer);
                let bytes = self.bytes(&work, step, pass, step.intra_send == 1);
                assert_eq!(message.len(), bytes);
                sent.push((peer, message.clone()));
            }
        }
        for peer in taken {
            let cursor = self.cursor(channel, peer);
            cursor.received += 1;
            self.counter(self.view.outbox[peer], channel, offset_of!(Counters, head))
                .store(cursor.received, Ordering::Release);
        }
        for (peer, message) in sent {
            let cursor = self.cursor(channel, peer);
            let slot = self.slot(self.view.outbox[peer], channel, cursor.sent);
            // SAFETY: the slot is free, so only this rank writes it; it has room for a header and a
            // chunk.
            unsafe {
                slot.copy_from(message.as_ptr(), message.len());
                if block.sent >> peer & 1 == 0 {
                    slot.sub(LINE_BYTES)
                        .cast::<[u64; SIGNATURE_WORDS]>()
                        .write_volatile(work.signature);
                }
            }
            block.sent |= 1 << peer;
            cursor.sent += 1;
            self.counter(self.view.outbox[peer], channel, offset_of!(Counters, tail))
                .store(cursor.sent, Ordering::Release);
        }
        true
    }
}
