//! An interpreter of packed schedules that shares nothing with the kernels but the header, over
//! connections of two slots: what it gives is compared with the reference.

use super::*;
use crate::codec::{self, Codec, Span};
use crate::plan::Geometry;
use crate::simd::Isa;
use crate::testing::{Data, Pattern as Numbers, Problem};
use crate::types::{Algorithm, CodecSpec, Collective, DType, Protocol, Scalar};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

const SLOTS: usize = 2;

/// All ranks' launches, those of one rank one after the other. Addresses in works are of memory
/// of f32 that lives as long.
pub(in crate::engine::gpu) struct World<'a> {
    launches: &'a [Vec<Blob>],
    codec: Option<&'a dyn Codec>,
    /// Messages on their way, by lane, sender and receiver.
    wires: HashMap<(usize, usize, usize), VecDeque<Vec<u8>>>,
}

impl Blob {
    /// What [`Blob::write`] has written.
    pub(in crate::engine::gpu) fn read(bytes: &[u8], counts: [u32; 3]) -> Blob {
        fn take<T: Copy>(bytes: &[u8], count: u32) -> (Vec<T>, &[u8]) {
            let (front, rest) = bytes.split_at(count as usize * size_of::<T>());
            // SAFETY: structs of integers, as many as the slice has bytes for.
            let items = (0..count as usize)
                .map(|at| unsafe { front.as_ptr().cast::<T>().add(at).read_unaligned() });
            (items.collect(), rest)
        }
        let (works, rest) = take::<Work>(bytes, counts[0]);
        let (steps, rest) = take(rest, counts[1]);
        let (peers, _) = take(rest, counts[2]);
        let channels = works.iter().map(|work| usize::from(work.channels)).sum();
        Blob {
            works,
            steps,
            peers,
            channels,
        }
    }
}

/// One block of one rank's launch.
struct Block {
    rank: usize,
    launch: usize,
    work: Work,
    lane: usize,
    /// Pass, first step and number of steps of each batch, in the order in which they run.
    batches: Vec<(u64, usize, usize)>,
    at: usize,
}

impl<'a> World<'a> {
    pub fn new(launches: &'a [Vec<Blob>], codec: Option<&'a dyn Codec>) -> World<'a> {
        World {
            launches,
            codec,
            wires: HashMap::new(),
        }
    }

    fn blocks(&self) -> Vec<Block> {
        let mut blocks = Vec::new();
        for (rank, launches) in self.launches.iter().enumerate() {
            for (launch, blob) in launches.iter().enumerate() {
                for work in &blob.works {
                    for channel in 0..u64::from(work.channels) {
                        let lane = u64::from(work.first_lane) + channel;
                        blocks.push(Block {
                            rank,
                            launch,
                            work: *work,
                            lane: lane as usize,
                            batches: order(work, &blob.steps, channel),
                            at: 0,
                        });
                    }
                }
            }
        }
        blocks
    }

    /// Runs all blocks to their ends; whether they got there, and nothing was left over.
    pub fn run(&mut self) -> bool {
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

    fn blob(&self, block: &Block) -> &Blob {
        &self.launches[block.rank][block.launch]
    }

    fn steps(&self, block: &Block) -> &[abi::Step] {
        let (_, first, len) = block.batches[block.at];
        &self.blob(block).steps[first..first + len]
    }

    fn peers(&self, block: &Block, step: &abi::Step) -> (Vec<usize>, Vec<usize>) {
        let first = usize::from(step.peers);
        let middle = first + usize::from(step.nrecv);
        let end = middle + usize::from(step.nsend);
        let peers = &self.blob(block).peers;
        let ranks = |peers: &[u8]| peers.iter().map(|&peer| usize::from(peer)).collect();
        (ranks(&peers[first..middle]), ranks(&peers[middle..end]))
    }

    /// Whether all messages of the batch are there, and all of its slots free.
    fn ready(&self, block: &Block) -> bool {
        let held = |from, to| {
            let wire = self.wires.get(&(block.lane, from, to));
            wire.map_or(0, VecDeque::len)
        };
        self.steps(block).iter().all(|step| {
            let (recv, send) = self.peers(block, step);
            recv.iter().all(|&from| held(from, block.rank) > 0)
                && send.iter().all(|&to| held(block.rank, to) < SLOTS)
        })
    }

    fn batch(&mut self, block: &Block) {
        let (pass, ..) = block.batches[block.at];
        let (rank, lane) = (block.rank, block.lane);
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
                .map(|&from| self.wires[&(lane, from, rank)][0].clone())
                .collect();
            let message = self.step(&block.work, &step, pass, &received);
            taken.extend(recv.iter().map(|&from| (lane, from, rank)));
            sent.extend(send.iter().map(|&to| ((lane, rank, to), message.clone())));
        }
        let bits = |peers: &mut dyn Iterator<Item = usize>| peers.fold(0u32, |b, p| b | 1 << p);
        let used = (
            bits(&mut taken.iter().map(|wire| wire.1)),
            bits(&mut sent.iter().map(|(wire, _)| wire.2)),
        );
        assert_eq!(masks, used);
        assert_eq!(
            taken.len() + sent.len(),
            (masks.0.count_ones() + masks.1.count_ones()) as usize
        );
        // As late as a kernel may: whoever runs earlier waits less.
        for wire in &taken {
            self.wires.get_mut(wire).unwrap().pop_front();
        }
        for (wire, message) in &sent {
            let queue = self.wires.entry(*wire).or_default();
            queue.push_back(message.clone());
        }
    }

    /// Runs one step; what it sends, if it does.
    fn step(&mut self, work: &Work, step: &abi::Step, pass: u64, received: &[Vec<u8>]) -> Vec<u8> {
        let start = ((pass * u64::from(work.parts) + u64::from(step.part)) * work.chunk)
            .min(work.count) as usize;
        let n = (work.chunk as usize).min(work.count as usize - start);
        let place = |block: u16| usize::from(block) * work.count as usize + start;
        let (from, to) = (place(step.in_block), place(step.out_block));
        let own = || {
            let factor = f32::from_bits(work.factor as u32);
            let scaled = work.flags & abi::PREMULTIPLY != 0;
            // SAFETY: the caller's memory, of the size that the call implies.
            let input = unsafe { std::slice::from_raw_parts(input(work).add(from), n) };
            input
                .iter()
                .map(|x| if scaled { x * factor } else { *x })
                .collect::<Vec<f32>>()
        };
        let op = step.op;
        if op == Op::Send as u8 {
            return self.encode(&own());
        }
        let (result, message) = if op == Op::Copy as u8 {
            (own(), Vec::new())
        } else if op == Op::Recv as u8 || op == Op::RecvCopySend as u8 {
            (self.decode(&received[0], n), received[0].clone())
        } else {
            let mut sum: Option<Vec<f32>> = None;
            for term in 0..=received.len() {
                if step.own != abi::OWN_ABSENT && usize::from(step.own_after) == term {
                    let own = own();
                    if step.own == abi::OWN_CODED && self.codec.is_some() {
                        self.add(&mut sum, work, &self.encode(&own), n);
                    } else {
                        combine(&mut sum, work, &own);
                    }
                }
                if let Some(message) = received.get(term) {
                    self.add(&mut sum, work, message, n);
                }
            }
            let mut sum = sum.expect("a sum of nothing");
            let last = op != Op::RecvReduceSend as u8;
            if last && work.flags & abi::AVERAGE != 0 {
                let nranks = self.launches.len() as f32;
                sum.iter_mut().for_each(|x| *x /= nranks);
            }
            let message = self.encode(&sum);
            if op == Op::RecvReduceCopySend as u8 {
                sum = self.decode(&message, n);
            }
            (sum, message)
        };
        if op != Op::RecvReduceSend as u8 {
            // SAFETY: as for the input.
            unsafe { std::ptr::copy(result.as_ptr(), output(work).add(to), n) };
        }
        message
    }

    fn add(&self, sum: &mut Option<Vec<f32>>, work: &Work, message: &[u8], n: usize) {
        match (self.codec, &mut *sum) {
            (Some(codec), Some(sum)) if n > 0 => codec.decode_reduce(span(n), message, sum),
            _ => combine(sum, work, &self.decode(message, n)),
        }
    }

    fn encode(&self, values: &[f32]) -> Vec<u8> {
        match self.codec {
            None => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
            Some(codec) => {
                let mut wire = vec![0; codec.wire_bytes(values.len())];
                codec.encode(span(values.len()), values, None, &mut wire, None);
                wire
            }
        }
    }

    fn decode(&self, message: &[u8], n: usize) -> Vec<f32> {
        match self.codec {
            None => floats(&message[..4 * n]),
            Some(codec) => {
                let mut values = vec![0.0; n];
                codec.decode(span(n), message, &mut values);
                values
            }
        }
    }
}

fn input(work: &Work) -> *const f32 {
    std::ptr::with_exposed_provenance(work.input as usize)
}

fn output(work: &Work) -> *mut f32 {
    std::ptr::with_exposed_provenance_mut(work.output as usize)
}

fn span(chunk: usize) -> Span {
    Span { chunk, at: 0 }
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    let words = bytes.chunks_exact(4);
    words
        .map(|word| f32::from_le_bytes(word.try_into().unwrap()))
        .collect()
}

fn combine(sum: &mut Option<Vec<f32>>, work: &Work, term: &[f32]) {
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

/// By time; within one time the oldest pass, which is at the latest stage, first.
fn order(work: &Work, steps: &[abi::Step], channel: u64) -> Vec<(u64, usize, usize)> {
    let (first, nsteps) = (usize::from(work.steps), usize::from(work.nsteps));
    let channels = u64::from(work.channels);
    let passes = (u64::from(work.passes) - channel).div_ceil(channels);
    let mut order = Vec::new();
    for time in 0..passes + u64::from(work.stages) - 1 {
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

/// A call, bound to plans by hand: chunks of at most `chunk_max` elements.
struct Case {
    problem: Problem,
    algorithm: Algorithm,
    channels: usize,
    granule: usize,
    chunk_max: usize,
    codec: Option<Arc<dyn Codec>>,
}

impl Case {
    fn plan(&self, rank: usize) -> Plan {
        let Problem {
            collective,
            nranks,
            root,
            peer,
            count,
            dtype,
            ..
        } = self.problem;
        let pattern = Pattern {
            collective,
            algorithm: self.algorithm,
            nranks,
            root,
            peer,
        };
        let geometry = Geometry::new(count, pattern.parts(), self.granule, self.chunk_max);
        Plan {
            collective,
            dtype,
            algorithm: self.algorithm,
            schedule: Arc::new(pattern.schedule(rank).unwrap()),
            geometry,
            codec: self.codec.clone(),
            spec: self.codec.as_ref().map_or(CodecSpec::RAW, |c| c.spec()),
            count,
            pattern,
            notes_input: Vec::new(),
            channels: self.channels.min(geometry.passes()),
            protocol: Protocol::Simple,
        }
    }

    /// All ranks' outputs; `None` if the ranks wait for each other for ever.
    fn outputs(&self, inputs: &[Vec<u8>]) -> Option<Vec<Vec<f32>>> {
        let nranks = self.problem.nranks;
        let inputs: Vec<Vec<f32>> = inputs.iter().map(|bytes| floats(bytes)).collect();
        let elements = (0..nranks).map(|rank| self.problem.output_elements(rank));
        let mut outputs: Vec<Vec<f32>> = elements.map(|n| vec![f32::NAN; n]).collect();
        let launches: Vec<Vec<Blob>> = (0..nranks)
            .map(|rank| {
                let plan = self.plan(rank);
                let packed = PackedSchedule::new(&plan.schedule, &plan.pattern).unwrap();
                let mut op = self.problem.op;
                if let (ReduceOp::PreMulSum(factor), Some(own)) =
                    (&mut op, self.problem.factors.get(rank))
                {
                    *factor = *own;
                }
                let mut blob = Blob::default();
                let at = Addresses {
                    input: inputs[rank].as_ptr().expose_provenance() as u64,
                    output: outputs[rank].as_mut_ptr().expose_provenance() as u64,
                };
                blob.add(&packed, work(&plan, op, at).unwrap()).unwrap();
                vec![blob]
            })
            .collect();
        let ended = World::new(&launches, self.codec.as_deref()).run();
        ended.then_some(outputs)
    }

    fn inputs(&self, pattern: Numbers) -> Vec<Vec<u8>> {
        let data = Data {
            pattern,
            dtype: DType::F32,
            seed: 7,
        };
        let ranks = 0..self.problem.nranks;
        ranks
            .map(|rank| data.vec(rank, self.problem.input_elements(rank)))
            .collect()
    }

    fn check(&self) {
        let inputs = self.inputs(Numbers::Small);
        let what = format!(
            "{} by {} on {} ranks, {} channels",
            self.problem.collective, self.algorithm, self.problem.nranks, self.channels
        );
        let outputs = self.outputs(&inputs);
        let outputs = outputs.unwrap_or_else(|| panic!("deadlock or left-over: {what}"));
        for (rank, output) in outputs.iter().enumerate() {
            let bytes: Vec<u8> = output.iter().flat_map(|x| x.to_le_bytes()).collect();
            let found = self.problem.check(&inputs, rank, &bytes, 0.0).unwrap();
            assert_eq!(found.wrong, 0, "{what}, rank {rank}");
        }
    }
}

fn case(collective: Collective, algorithm: Algorithm, nranks: usize, channels: usize) -> Case {
    let mut problem = Problem::new(collective, DType::F32, nranks, 0);
    if collective != Collective::SendRecv {
        problem.root = nranks / 2;
    }
    let pattern = Pattern {
        collective,
        algorithm,
        nranks,
        root: problem.root,
        peer: problem.peer,
    };
    // All overlaps of passes, and a ragged end.
    let stages = pattern.schedule(0).unwrap().stages;
    problem.count = channels * (stages + 2) * pattern.parts() * 2 - 1;
    Case {
        problem,
        algorithm,
        channels,
        granule: 1,
        chunk_max: 2,
        codec: None,
    }
}

/// Two slots a connection, batches as packed, every overlap of passes: nobody waits for ever, and
/// everybody gets what the reference gives.
#[test]
fn packed_schedules_end_and_are_right() {
    for nranks in (1..=17).chain([24, 32]) {
        // A message to oneself has its two buffers in two calls: no business of a schedule.
        let all = Collective::ALL.into_iter();
        for collective in all.filter(|&c| nranks > 1 || c != Collective::SendRecv) {
            for &algorithm in crate::schedule::algorithms(collective) {
                for channels in [1, 3] {
                    if nranks <= 17 || channels == 1 {
                        case(collective, algorithm, nranks, channels).check();
                    }
                }
            }
        }
    }
}

#[test]
fn roots_everywhere() {
    for nranks in [2, 3, 5, 8, 11] {
        for collective in Collective::ALL.into_iter().filter(|c| c.has_root()) {
            for &algorithm in crate::schedule::algorithms(collective) {
                for root in 0..nranks {
                    let mut case = case(collective, algorithm, nranks, 2);
                    case.problem.root = root;
                    case.check();
                }
            }
        }
    }
}

#[test]
fn operators_are_applied_once() {
    let factors = |n: usize| {
        (0..n)
            .map(|rank| Scalar::Float(rank as f64 - 1.5))
            .collect()
    };
    for op in [
        ReduceOp::Max,
        ReduceOp::Min,
        ReduceOp::Avg,
        ReduceOp::PreMulSum(Scalar::Float(0.0)),
    ] {
        for collective in Collective::ALL.into_iter().filter(|c| c.reduces()) {
            for &algorithm in crate::schedule::algorithms(collective) {
                for nranks in [1, 2, 4, 11] {
                    let mut case = case(collective, algorithm, nranks, 2);
                    case.problem.op = op;
                    if matches!(op, ReduceOp::PreMulSum(_)) {
                        case.problem.factors = factors(nranks);
                    }
                    case.check();
                }
            }
        }
    }
}

/// Under a lossy codec all ranks still end with the same bits, whatever the fan.
#[test]
fn lossy_results_agree() {
    let spec: CodecSpec = "linear8:block=32".parse().unwrap();
    for nranks in [2, 3, 8, 13] {
        for collective in [
            Collective::AllReduce,
            Collective::AllGather,
            Collective::Broadcast,
        ] {
            for &algorithm in crate::schedule::algorithms(collective) {
                let mut case = case(collective, algorithm, nranks, 2);
                case.codec = codec::build(spec, Isa::Scalar).unwrap();
                (case.granule, case.chunk_max) = (32, 64);
                case.problem.count = 64 * nranks * 5 - 7;
                let inputs = case.inputs(Numbers::Gaussian);
                let outputs = case.outputs(&inputs).unwrap();
                let bits =
                    |output: &[f32]| -> Vec<u32> { output.iter().map(|x| x.to_bits()).collect() };
                for output in &outputs {
                    assert!(
                        bits(output) == bits(&outputs[0]),
                        "{collective} {algorithm}"
                    );
                }
            }
        }
    }
}

#[test]
fn waits_are_taken_together() {
    let plan = case(Collective::AllReduce, Algorithm::Direct, 8, 1).plan(3);
    let packed = PackedSchedule::new(&plan.schedule, &plan.pattern).unwrap();
    let batches: Vec<u8> = packed.steps.iter().map(|step| step.batch).collect();
    assert_eq!(batches, [7, 0, 0, 0, 0, 0, 0, 1, 7, 0, 0, 0, 0, 0, 0]);
    // Fans beyond a schedule step's width are one step again.
    let plan = case(Collective::AllGather, Algorithm::Direct, 32, 1).plan(9);
    let packed = PackedSchedule::new(&plan.schedule, &plan.pattern).unwrap();
    let source = packed.steps[0];
    assert_eq!(
        (source.op, source.nsend),
        (Op::RecvReduceCopySend as u8, 31)
    );
    assert_eq!(packed.steps[1].batch, 31);
    let plan = case(Collective::ReduceScatter, Algorithm::Direct, 32, 1).plan(9);
    let packed = PackedSchedule::new(&plan.schedule, &plan.pattern).unwrap();
    let sum = packed.steps[packed.steps.len() - 1];
    assert_eq!((sum.nrecv, sum.own_after), (31, 9));
}

#[test]
fn a_blob_lies_as_the_header_says() {
    let mut blob = Blob::default();
    for rank in [0, 1] {
        let plan = case(Collective::AllReduce, Algorithm::Direct, 3, 2).plan(rank);
        let packed = PackedSchedule::new(&plan.schedule, &plan.pattern).unwrap();
        let at = Addresses {
            input: 32,
            output: 64 + 8 * rank as u64,
        };
        blob.add(&packed, work(&plan, ReduceOp::Sum, at).unwrap())
            .unwrap();
    }
    assert_eq!(blob.channels(), 4);
    let [works, steps, peers] = blob.counts().map(|count| count as usize);
    assert_eq!((works, blob.len()), (2, 2 * 136 + 24 * steps + peers));
    let mut bytes = vec![0xee; blob.len() + 1];
    blob.write(&mut bytes);
    assert_eq!(bytes[blob.len()], 0xee);
    let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    let half = |at: usize| u16::from_le_bytes(bytes[at..at + 2].try_into().unwrap());
    // Second work: output, first block, first step, alignment; its first step's peers.
    assert_eq!((word(136 + 8), half(136 + 88)), (72, 2));
    assert_eq!(usize::from(half(136 + 96)) * 2, steps);
    assert_eq!(
        (bytes[101] & abi::ALIGNED, bytes[136 + 101] & abi::ALIGNED),
        (4, 0)
    );
    let first = 272 + 24 * (steps / 2);
    assert_eq!(usize::from(half(first + 12)), peers / 2);
    let peer = bytes[272 + 24 * steps + peers / 2];
    assert_eq!(peer, 2, "rank 1 of 3 sends to rank 2 first");
}
