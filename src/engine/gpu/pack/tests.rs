//! Runs packed schedules in an interpreter and compares the outputs with the reference.

use super::super::tests::interpreter::{World, floats};
use super::*;
use crate::codec::{self, Codec};
use crate::cpu::Isa;
use crate::plan::Geometry;
use crate::schedule::{GroupUnit, Groups, RankOrder, RingOrders};
use crate::testing::{Data, Pattern, Problem};
use crate::types::{Algorithm, CodecSpec, Collective, DType, KernelProtocol, Scalar};
use std::sync::Arc;

/// A call from which the test makes plans itself, with chunks of at most `chunk_max` elements.
pub(super) struct Case {
    pub(super) problem: Problem,
    algorithm: Algorithm,
    channels: usize,
    granule: usize,
    chunk_max: usize,
    codec: Option<Arc<dyn Codec>>,
    hosts: Groups,
    between: Algorithm,
    rings: usize,
    orders: RingOrders,
}

impl Case {
    fn pattern(&self) -> SchedulePattern {
        let Problem {
            collective,
            nranks,
            root,
            peer,
            ..
        } = self.problem;
        SchedulePattern {
            root,
            peer,
            groups: self.hosts.clone(),
            between: self.between,
            rings: self.rings,
            orders: self.orders.clone(),
            ..SchedulePattern::flat(collective, self.algorithm, nranks)
        }
    }

    /// Sets the element count so that passes overlap in every possible way and the last chunk is
    /// shorter.
    fn fill(&mut self) {
        let pattern = self.pattern();
        let stages = pattern.schedule(0).unwrap().stages;
        self.problem.count = self.channels * (stages + 2) * pattern.parts() * 2 - 1;
    }

    /// Returns the smallest number of slots with which the pattern does not deadlock.
    fn slots(&self) -> usize {
        self.pattern().slots()
    }

    pub(super) fn plan(&self, rank: usize) -> Plan {
        let Problem {
            collective,
            count,
            dtype,
            ..
        } = self.problem;
        let pattern = self.pattern();
        let geometry = Geometry::new(count, pattern.parts(), self.granule, self.chunk_max);
        Plan {
            collective,
            dtype,
            algorithm: self.algorithm,
            schedule: Arc::new(pattern.schedule(rank).unwrap()),
            geometry,
            codec: self.codec.clone(),
            intra: self.codec.clone(),
            specs: (self.codec.as_ref())
                .map_or(CodecSpec::RAW, |c| c.spec())
                .into(),
            count,
            pattern,
            notes_input: Vec::new(),
            channels: self.channels.min(geometry.passes()),
            kernel: KernelProtocol::SIMPLE,
            raw_bytes: 0,
        }
    }

    /// Returns all ranks' outputs; `None` if the ranks deadlock.
    fn outputs(&self, inputs: &[Vec<u8>]) -> Option<Vec<Vec<f32>>> {
        let nranks = self.problem.nranks;
        let inputs: Vec<Vec<f32>> = inputs.iter().map(|bytes| floats(bytes)).collect();
        let elements = (0..nranks).map(|rank| self.problem.output_elements(rank));
        let mut outputs: Vec<Vec<f32>> = elements.map(|n| vec![f32::NAN; n]).collect();
        let launches: Vec<Vec<WorkBuffer>> = (0..nranks)
            .map(|rank| {
                let plan = self.plan(rank);
                let mut op = self.problem.op;
                if let (ReduceOp::PreMulSum(factor), Some(own)) =
                    (&mut op, self.problem.factors.get(rank))
                {
                    *factor = *own;
                }
                let at = Addresses {
                    input: inputs[rank].as_ptr().expose_provenance() as u64,
                    output: outputs[rank].as_mut_ptr().expose_provenance() as u64,
                };
                let launches = PackedSchedule::launches(&plan.schedule, &plan.pattern).unwrap();
                let packed = launches.iter().map(|packed| {
                    let mut work_buffer = WorkBuffer::default();
                    let work = work(&plan, op, at).unwrap();
                    work_buffer.add(packed, work).unwrap();
                    work_buffer
                });
                packed.collect()
            })
            .collect();
        let ended = World::new(&launches, self.codec.as_deref(), self.slots()).run();
        ended.then_some(outputs)
    }

    fn inputs(&self, pattern: Pattern) -> Vec<Vec<u8>> {
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

    pub(super) fn check(&self) {
        let inputs = self.inputs(Pattern::Small);
        let what = format!(
            "{} by {}/{} of {} rings on {} ranks, {}, {} channels",
            self.problem.collective,
            self.algorithm,
            self.between,
            self.rings,
            self.problem.nranks,
            self.hosts,
            self.channels
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

pub(super) fn case(
    collective: Collective,
    algorithm: Algorithm,
    nranks: usize,
    channels: usize,
) -> Case {
    let flat = (Groups::ONE, Algorithm::Direct);
    case_on(flat, collective, algorithm, nranks, channels)
}

pub(super) fn case_on(
    (hosts, between): (Groups, Algorithm),
    collective: Collective,
    algorithm: Algorithm,
    nranks: usize,
    channels: usize,
) -> Case {
    let mut problem = Problem::new(collective, DType::F32, nranks, 0);
    if collective != Collective::SendRecv {
        problem.root = nranks / 2;
    }
    let mut case = Case {
        problem,
        algorithm,
        channels,
        granule: 1,
        chunk_max: 2,
        codec: None,
        hosts,
        between,
        rings: 1,
        orders: RingOrders::BY_RANK,
    };
    case.fill();
    case
}

/// Runs packed schedules with the smallest number of slots and with passes that overlap in every possible
/// way. No rank may deadlock.
#[test]
fn packed_schedules_end_with_the_reference_result() {
    for nranks in (1..=17).chain([24, 32]) {
        // A message of a rank to itself is a copy between two calls, which no schedule runs.
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

/// Tests 2 to 5 rings per channel, in both directions.
#[test]
fn rings_in_several_directions_end_with_the_reference_result() {
    for nranks in (2..=17).chain([32]) {
        for collective in Collective::ALL {
            if !crate::schedule::algorithms(collective).contains(&Algorithm::Ring) {
                continue;
            }
            for rings in 2..=5 {
                let mut case = case(collective, Algorithm::Ring, nranks, 2);
                case.rings = rings;
                case.fill();
                case.check();
            }
        }
    }
}

/// Ranks batch their steps differently if their rings have several orders.
#[test]
fn rings_in_several_orders_end_with_the_reference_result() {
    for nranks in (3..=17).chain([32]) {
        for collective in Collective::ALL {
            if !crate::schedule::has_several_rings(collective) {
                continue;
            }
            for (orders, rings) in [(2, 4), (3, 6), (3, 5), (5, 10)] {
                let mut case = case(collective, Algorithm::Ring, nranks, 2);
                // Order i skips i ranks at a time, as far as it can, and then takes those that are left.
                let order = |skips: usize| {
                    let mut ranks: Vec<usize> = (0..nranks).collect();
                    ranks.sort_by_key(|rank| rank % (skips + 1));
                    RankOrder::of_ring(&ranks).unwrap()
                };
                case.rings = rings;
                case.orders = RingOrders::of_pairs((0..orders).map(order).collect());
                case.fill();
                case.check();
            }
        }
    }
}

/// Tests hierarchical schedules on hosts, and on groups inside a host, with any number of ranks, with the
/// ranks in any order.
#[test]
fn hierarchical_schedules_end_with_the_reference_result() {
    let mut worlds: Vec<Groups> = Vec::new();
    for hosts in 2..=5 {
        worlds.extend((2..=6).map(|ranks| Groups::even_hosts(hosts, ranks)));
    }
    worlds.push(Groups::even_hosts(4, 8));
    worlds.push(Groups::of_hosts([0, 1, 0, 1, 1, 2, 1]));
    worlds.push(Groups::of_hosts([2, 0, 0, 0, 1, 0, 2, 0, 1, 1, 0]));
    worlds.push(Groups::of_hosts((0..13).map(|rank| rank % 3 * (rank / 4))));
    for members in [
        vec![vec![2], vec![1, 0]],
        vec![vec![3, 1], vec![0, 2], vec![6, 5], vec![4, 7]],
        vec![vec![4, 0, 2], vec![3, 7], vec![1, 5, 6]],
        vec![vec![0, 1], vec![4, 5, 6, 7], vec![2, 3], vec![8, 9, 10, 11]],
        vec![vec![9], vec![0, 2, 4, 6], vec![8], vec![1, 3, 5, 7]],
    ] {
        worlds.push(Groups::of_members(GroupUnit::Switch, &members).unwrap());
    }
    for hosts in worlds {
        let nranks = hosts.nranks().unwrap();
        for collective in Collective::ALL {
            for &between in SchedulePattern::between_groups(collective) {
                for channels in [1, 3] {
                    let levels = (hosts.clone(), between);
                    let algorithm = Algorithm::Hierarchical;
                    case_on(levels, collective, algorithm, nranks, channels).check();
                }
            }
        }
    }
}

#[test]
fn rooted_collectives_with_any_root_match_the_reference() {
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
fn operators_apply_factor_and_division_once() {
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

/// Tests that all ranks get identical bits with a lossy codec, for any number of peers per step.
#[test]
fn lossy_results_agree_on_all_ranks() {
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
                let inputs = case.inputs(Pattern::Gaussian);
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

/// Returns the packed schedule of a plan that takes one launch.
pub(super) fn only(plan: &Plan) -> PackedSchedule {
    let mut launches = PackedSchedule::launches(&plan.schedule, &plan.pattern).unwrap();
    assert_eq!(launches.len(), 1);
    launches.swap_remove(0)
}

#[test]
fn independent_steps_form_batches() {
    let plan = case(Collective::AllReduce, Algorithm::Direct, 8, 1).plan(3);
    let packed = only(&plan);
    let batches: Vec<u8> = packed.steps.iter().map(|step| step.batch).collect();
    assert_eq!(batches, [7, 0, 0, 0, 0, 0, 0, 1, 7, 0, 0, 0, 0, 0, 0]);
    // The host schedule splits a step with 31 peers into several steps; packing joins them into one
    // step.
    let plan = case(Collective::AllGather, Algorithm::Direct, 32, 1).plan(9);
    let packed = only(&plan);
    let source = packed.steps[0];
    assert_eq!(
        (source.op, source.nsend),
        (Op::RecvReduceCopySend as u8, 31)
    );
    assert_eq!(packed.steps[1].batch, 31);
    let plan = case(Collective::ReduceScatter, Algorithm::Direct, 32, 1).plan(9);
    let packed = only(&plan);
    let sum = packed.steps[packed.steps.len() - 1];
    assert_eq!((sum.nrecv, sum.own_after), (31, 9));
}

#[test]
fn work_buffer_has_the_layout_of_the_header() {
    const SIZE: usize = 176;
    let mut work_buffer = WorkBuffer::default();
    for rank in [0, 1] {
        let plan = case(Collective::AllReduce, Algorithm::Direct, 3, 2).plan(rank);
        let packed = only(&plan);
        let at = Addresses {
            input: 32,
            output: 64 + 8 * rank as u64,
        };
        work_buffer
            .add(&packed, work(&plan, ReduceOp::Sum, at).unwrap())
            .unwrap();
    }
    assert_eq!(work_buffer.channels(), 4);
    let [works, steps, peers] = work_buffer.counts().map(|count| count as usize);
    assert_eq!(
        (works, work_buffer.len()),
        (2, 2 * SIZE + 24 * steps + peers)
    );
    let mut bytes = vec![0xee; work_buffer.len() + 1];
    work_buffer.write(&mut bytes);
    assert_eq!(bytes[work_buffer.len()], 0xee);
    let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    let half = |at: usize| u16::from_le_bytes(bytes[at..at + 2].try_into().unwrap());
    // Checks the second work item: its output address, first block, first step and alignment flag, then the
    // first peer of its first step.
    assert_eq!((word(SIZE + 8), half(SIZE + 128)), (72, 2));
    assert_eq!(usize::from(half(SIZE + 136)) * 2, steps);
    assert_eq!(
        (bytes[141] & abi::ALIGNED, bytes[SIZE + 141] & abi::ALIGNED),
        (4, 0)
    );
    let first = 2 * SIZE + 24 * (steps / 2);
    assert_eq!(usize::from(half(first + 12)), peers / 2);
    let peer = bytes[2 * SIZE + 24 * steps + peers / 2];
    assert_eq!(peer, 2, "rank 1 of 3 sends to rank 2 first");
}
