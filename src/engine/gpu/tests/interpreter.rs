//! An interpreter of packed schedules that shares only the ABI header with the kernels. Connections
//! have as few slots as the pattern allows, and each step starts as late as a kernel may start it.

use super::super::pack::WorkBuffer;
use crate::codec::{self, Codec, Span};
use crate::cpu::Isa;
use crate::gpu::abi::{self, KernelWork};
use crate::schedule::Op;
use crate::types::{CodecKind, CodecSpec, ScaleRule};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

/// The launches of all ranks. Each rank runs its launches one after the other. The input and output
/// addresses in each launch's [`KernelWork`] items point to f32 buffers that outlive this value.
pub(crate) struct World<'a> {
    launches: &'a [Vec<WorkBuffer>],
    codec: Option<&'a dyn Codec>,
    /// Number of slots of a connection.
    slots: usize,
    /// Messages in flight, by channel, sender and receiver.
    wires: HashMap<(usize, usize, usize), VecDeque<Vec<u8>>>,
}

impl WorkBuffer {
    /// Parses the bytes that [`WorkBuffer::write`] wrote.
    pub(crate) fn read(bytes: &[u8], counts: [u32; 3]) -> WorkBuffer {
        fn take<T: Copy>(bytes: &[u8], count: u32) -> (Vec<T>, &[u8]) {
            let (front, rest) = bytes.split_at(count as usize * size_of::<T>());
            // SAFETY: the structs consist of integers, and the slice has bytes for `count` of them.
            let items = (0..count as usize)
                .map(|at| unsafe { front.as_ptr().cast::<T>().add(at).read_unaligned() });
            (items.collect(), rest)
        }
        let (works, rest) = take::<KernelWork>(bytes, counts[0]);
        let (steps, rest) = take(rest, counts[1]);
        let (peers, _) = take(rest, counts[2]);
        let channels = works.iter().map(|work| usize::from(work.channels)).sum();
        WorkBuffer {
            // As in a communicator of few ranks.
            ranks: (0..32).collect(),
            works,
            steps,
            peers,
            channels,
        }
    }
}

/// State of one block of a rank's launch.
struct Block {
    rank: usize,
    launch: usize,
    work: KernelWork,
    channel: usize,
    /// Each batch in the order in which they run: its pass, its first step and its number of steps.
    batches: Vec<(u64, usize, usize)>,
    at: usize,
}

impl<'a> World<'a> {
    pub(crate) fn new(
        launches: &'a [Vec<WorkBuffer>],
        codec: Option<&'a dyn Codec>,
        slots: usize,
    ) -> World<'a> {
        World {
            launches,
            codec,
            slots,
            wires: HashMap::new(),
        }
    }

    fn blocks(&self) -> Vec<Block> {
        let mut blocks = Vec::new();
        for (rank, launches) in self.launches.iter().enumerate() {
            for (launch, work_buffer) in launches.iter().enumerate() {
                for work in &work_buffer.works {
                    for channel in 0..u64::from(work.channels) {
                        let fifo = u64::from(work.first_channel) + channel;
                        blocks.push(Block {
                            rank,
                            launch,
                            work: *work,
                            channel: fifo as usize,
                            batches: order(work, &work_buffer.steps, channel),
                            at: 0,
                        });
                    }
                }
            }
        }
        blocks
    }

    /// Runs all blocks. Returns whether all blocks ended and every message was received.
    pub(crate) fn run(&mut self) -> bool {
        let mut blocks = self.blocks();
        loop {
            let mut moved = false;
            for index in 0..blocks.len() {
                let (rank, launch) = (blocks[index].rank, blocks[index].launch);
                let earlier = blocks[..index].iter();
                let waits = earlier
                    .filter(|other| other.rank == rank && other.launch < launch)
                    .any(|other| other.at < other.batches.len());
                if waits {
                    continue;
                }
                let block = &mut blocks[index];
                while block.at < block.batches.len() && self.ready(block) {
                    self.batch(block);
                    block.at += 1;
                    moved = true;
                }
            }
            if blocks.iter().all(|block| block.at == block.batches.len()) {
                return self.wires.values().all(VecDeque::is_empty);
            }
            if !moved {
                return false;
            }
        }
    }

    fn work_buffer(&self, block: &Block) -> &WorkBuffer {
        &self.launches[block.rank][block.launch]
    }

    fn steps(&self, block: &Block) -> &[abi::KernelStep] {
        let (_, first, len) = block.batches[block.at];
        &self.work_buffer(block).steps[first..first + len]
    }

    fn peers(&self, block: &Block, step: &abi::KernelStep) -> (Vec<usize>, Vec<usize>) {
        let first = usize::from(step.peers);
        let middle = first + usize::from(step.nrecv);
        let end = middle + usize::from(step.nsend);
        let WorkBuffer { peers, ranks, .. } = self.work_buffer(block);
        let rank = |&peer: &u8| usize::from(ranks[usize::from(peer)]);
        let ranks = |peers: &[u8]| peers.iter().map(rank).collect();
        (ranks(&peers[first..middle]), ranks(&peers[middle..end]))
    }

    /// Returns whether all messages of the current batch have arrived and all of its slots are
    /// free.
    fn ready(&self, block: &Block) -> bool {
        let held = |from, to| {
            let wire = self.wires.get(&(block.channel, from, to));
            wire.map_or(0, VecDeque::len)
        };
        self.steps(block).iter().all(|step| {
            let (recv, send) = self.peers(block, step);
            recv.iter().all(|&from| held(from, block.rank) > 0)
                && send.iter().all(|&to| held(block.rank, to) < self.slots)
        })
    }

    fn batch(&mut self, block: &Block) {
        let (pass, ..) = block.batches[block.at];
        let (rank, channel) = (block.rank, block.channel);
        let masks = (
            self.steps(block)[0].recv_mask,
            self.steps(block)[0].send_mask,
        );
        let mut sent = Vec::new();
        let mut taken = Vec::new();
        for step in self.steps(block).to_vec() {
            let (recv, send) = self.peers(block, &step);
            let received: Vec<Vec<u8>> = recv
                .iter()
                .map(|&from| self.wires[&(channel, from, rank)][0].clone())
                .collect();
            let message = self.step(&block.work, &step, pass, &received);
            taken.extend(recv.iter().map(|&from| (channel, from, rank)));
            sent.extend(
                send.iter()
                    .map(|&to| ((channel, rank, to), message.clone())),
            );
        }
        let all = &self.work_buffer(block).ranks;
        let number = |rank: usize| {
            all.iter()
                .position(|&one| usize::from(one) == rank)
                .unwrap()
        };
        let bits =
            |ranks: &mut dyn Iterator<Item = usize>| ranks.fold(0u32, |b, r| b | 1 << number(r));
        let used = (
            bits(&mut taken.iter().map(|wire| wire.1)),
            bits(&mut sent.iter().map(|(wire, _)| wire.2)),
        );
        assert_eq!(masks, used);
        assert_eq!(
            taken.len() + sent.len(),
            (masks.0.count_ones() + masks.1.count_ones()) as usize
        );
        // All steps of a batch start together, as late as a kernel may start them. A kernel that
        // starts a step earlier waits for less.
        for wire in &taken {
            self.wires.get_mut(wire).unwrap().pop_front();
        }
        for (wire, message) in &sent {
            let queue = self.wires.entry(*wire).or_default();
            queue.push_back(message.clone());
        }
    }

    /// Runs one step; returns the message that it sends, if any.
    pub(crate) fn step(
        &mut self,
        work: &KernelWork,
        step: &abi::KernelStep,
        pass: u64,
        received: &[Vec<u8>],
    ) -> Vec<u8> {
        let start = ((pass * u64::from(work.parts) + u64::from(step.part)) * work.chunk)
            .min(work.count) as usize;
        let n = (work.chunk as usize).min(work.count as usize - start);
        let place = |block: u8| usize::from(block) * work.count as usize + start;
        let (from, to) = (place(step.in_block), place(step.out_block));
        let own = || {
            let factor = f32::from_bits(work.factor as u32);
            let scaled = work.flags & abi::PREMULTIPLY != 0;
            // SAFETY: the caller's input buffer has the elements that the call implies, and
            // outlives the run.
            let input = unsafe { std::slice::from_raw_parts(input(work).add(from), n) };
            input
                .iter()
                .map(|x| if scaled { x * factor } else { *x })
                .collect::<Vec<f32>>()
        };
        let op = step.op;
        let intra = intra_codec(work.intra);
        let intra = match &intra {
            Intra::Coded => self.codec,
            Intra::Own(codec) => codec.as_deref(),
        };
        let codec_of = |is_intra: bool| if is_intra { intra } else { self.codec };
        let message_of = |values: &[f32]| encode(codec_of(step.intra_send == 1), values);
        if op == Op::Send as u8 {
            return message_of(&own());
        }
        let (result, message) = if op == Op::Copy as u8 {
            (own(), Vec::new())
        } else if op == Op::Recv as u8 || op == Op::RecvCopySend as u8 {
            (decode(self.codec, &received[0], n), received[0].clone())
        } else {
            let mut sum: Option<Vec<f32>> = None;
            for term in 0..=received.len() {
                if step.own != abi::OWN_ABSENT && usize::from(step.own_after) == term {
                    let own = own();
                    if step.own == abi::OWN_CODED && self.codec.is_some() {
                        add(self.codec, &mut sum, work, &encode(self.codec, &own), n);
                    } else {
                        combine(&mut sum, work, &own);
                    }
                }
                if let Some(message) = received.get(term) {
                    let codec = codec_of(term < usize::from(step.intra_recv));
                    add(codec, &mut sum, work, message, n);
                }
            }
            let mut sum = sum.expect("a sum of nothing");
            if op != Op::RecvReduceSend as u8 && work.flags & abi::AVERAGE != 0 {
                let nranks = self.launches.len() as f32;
                sum.iter_mut().for_each(|x| *x /= nranks);
            }
            let message = message_of(&sum);
            if op == Op::RecvReduceCopySend as u8 {
                sum = decode(self.codec, &message, n);
            }
            (sum, message)
        };
        if op != Op::RecvReduceSend as u8 && op != Op::RecvReduceFinishSend as u8 {
            // SAFETY: the caller's output buffer has the elements that the call implies, and
            // outlives the run.
            unsafe { std::ptr::copy(result.as_ptr(), output(work).add(to), n) };
        }
        message
    }
}

/// The codec of messages inside groups.
enum Intra {
    /// The codec of all messages.
    Coded,
    /// Its own codec; `None` for raw messages.
    Own(Option<Arc<dyn Codec>>),
}

fn intra_codec(number: u8) -> Intra {
    let spec = match number {
        abi::INTRA_CODED => return Intra::Coded,
        abi::INTRA_RAW => return Intra::Own(None),
        abi::INTRA_CAST16 => CodecSpec::of(CodecKind::Cast16),
        abi::INTRA_CAST_BF16 => CodecSpec::of(CodecKind::CastBf16),
        _ => CodecSpec {
            scale: ScaleRule::Block(1 << (number - abi::INTRA_LINEAR8)),
            ..CodecSpec::of(CodecKind::Linear8)
        },
    };
    Intra::Own(codec::build(spec, Isa::Scalar).unwrap())
}

fn add(
    codec: Option<&dyn Codec>,
    sum: &mut Option<Vec<f32>>,
    work: &KernelWork,
    message: &[u8],
    n: usize,
) {
    match (codec, &mut *sum) {
        (Some(codec), Some(sum)) if n > 0 => codec.decode_reduce(span(n), message, sum),
        _ => combine(sum, work, &decode(codec, message, n)),
    }
}

fn encode(codec: Option<&dyn Codec>, values: &[f32]) -> Vec<u8> {
    match codec {
        None => raw(values),
        Some(codec) => {
            let mut wire = vec![0; codec.wire_bytes(values.len())];
            codec.encode(span(values.len()), values, None, &mut wire, None);
            wire
        }
    }
}

fn decode(codec: Option<&dyn Codec>, message: &[u8], n: usize) -> Vec<f32> {
    match codec {
        None => floats(&message[..4 * n]),
        Some(codec) => {
            let mut values = vec![0.0; n];
            codec.decode(span(n), message, &mut values);
            values
        }
    }
}

fn input(work: &KernelWork) -> *const f32 {
    std::ptr::with_exposed_provenance(work.input as usize)
}

fn output(work: &KernelWork) -> *mut f32 {
    std::ptr::with_exposed_provenance_mut(work.output as usize)
}

fn span(chunk: usize) -> Span {
    Span::whole(chunk)
}

fn raw(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

pub(crate) fn floats(bytes: &[u8]) -> Vec<f32> {
    let words = bytes.chunks_exact(4);
    words
        .map(|word| f32::from_le_bytes(word.try_into().unwrap()))
        .collect()
}

fn combine(sum: &mut Option<Vec<f32>>, work: &KernelWork, term: &[f32]) {
    let Some(sum) = sum else {
        *sum = Some(term.to_vec());
        return;
    };
    for (sum, term) in sum.iter_mut().zip(term) {
        *sum = match work.combine {
            0 => *sum + term,
            1 => *sum * term,
            2 => sum.max(*term),
            _ => sum.min(*term),
        };
    }
}

/// Returns the batches of a channel in the order in which they run. Within one time step the oldest
/// pass, which is at the latest stage, comes first.
pub(crate) fn order(
    work: &KernelWork,
    steps: &[abi::KernelStep],
    channel: u64,
) -> Vec<(u64, usize, usize)> {
    let (first, nsteps) = (usize::from(work.steps), usize::from(work.nsteps));
    let channels = u64::from(work.channels);
    let passes = u64::from(work.passes)
        .saturating_sub(channel)
        .div_ceil(channels);
    let mut order = Vec::new();
    for time in 0..(passes + u64::from(work.stages)).saturating_sub(1) {
        for stage in (0..work.stages).rev() {
            let Some(pass) = time.checked_sub(stage.into()).filter(|&p| p < passes) else {
                continue;
            };
            let mut at = first;
            while at < first + nsteps {
                let len = usize::from(steps[at].batch);
                assert!(len > 0, "a batch begins at every step that none covers");
                assert!(steps[at + 1..at + len].iter().all(|step| step.batch == 0));
                if steps[at].stage == stage {
                    order.push((pass * channels + channel, at, len));
                }
                at += len;
            }
        }
    }
    order
}
