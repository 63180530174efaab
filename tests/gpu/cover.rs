//! Selects cases as a pure function of the seed. Every collective and operation runs with every
//! type for every number of ranks, and every pair of two choices occurs.

use crate::case::{Case, Values, factor};
use cinch::comm::Call;
use cinch::schedule::algorithms;
use cinch::testing::{Pattern, random_word};
use cinch::types::KernelProtocol;
use cinch::{Algorithm, Collective, DType, ReduceOp};
use std::collections::HashSet;

pub const RANKS: [usize; 4] = [2, 3, 5, 8];
pub const KERNELS: [Option<KernelProtocol>; 6] = [
    None,
    Some(KernelProtocol::SIMPLE),
    Some(KernelProtocol::LL),
    Some(KernelProtocol::LL128),
    Some(KernelProtocol::FUSED_LL),
    Some(KernelProtocol::FUSED_LL128),
];

/// Returns the kernel and protocol as written in names of checks, such as `fused-ll128`.
pub fn name(kernel: Option<KernelProtocol>) -> String {
    kernel.map_or("auto".into(), |kernel| kernel.to_string().replace(' ', "-"))
}
/// Elements of the largest buffer of a large case.
const LARGE: usize = 1 << 20;
/// Element counts. The last two are large, and only the last is a power of two.
const COUNTS: [usize; 9] = [0, 1, 3, 17, 257, 1000, 4096 + 1, LARGE + 1, LARGE];
const OPS: [ReduceOp; 6] = [
    ReduceOp::Sum,
    ReduceOp::Prod,
    ReduceOp::Min,
    ReduceOp::Max,
    ReduceOp::Avg,
    ReduceOp::PreMulSum(cinch::types::Scalar::Int(1)),
];

/// SplitMix64 generator: its seed and how many numbers it has returned.
#[derive(Clone, Debug)]
pub struct Rng(pub u64, u64);

impl Rng {
    pub fn new(seed: u64) -> Rng {
        Rng(seed, 0)
    }

    pub fn next(&mut self) -> u64 {
        self.1 += 1;
        random_word(self.0, self.1)
    }

    pub fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }
}

/// Cases that run with one number of ranks and one kernel.
#[derive(Clone, Debug)]
pub struct Batch {
    pub nranks: usize,
    pub kernel: Option<KernelProtocol>,
    pub cases: Vec<Case>,
}

impl Batch {
    pub fn name(&self) -> String {
        format!("n{}-{}", self.nranks, name(self.kernel))
    }
}

/// The choices that define a case, each as an index into a list of options. The position in the
/// array identifies the list.
type Choice = [usize; 8];

/// Returns each collective with each of its operations.
pub fn operations() -> Vec<(Collective, ReduceOp)> {
    let mut all = Vec::new();
    for collective in Collective::ALL {
        let ops = if collective.reduces() { 6 } else { 1 };
        all.extend(OPS[..ops].iter().map(|&op| (collective, op)));
    }
    all
}

/// Returns the algorithms that a call may request; `None` leaves the choice to cinch.
fn choices(collective: Collective) -> Vec<Option<Algorithm>> {
    let mut all = vec![None];
    if collective != Collective::SendRecv {
        all.extend(algorithms(collective).iter().map(|&one| Some(one)));
    }
    all
}

/// Returns all batches, the number of pairs of choices that they cover, and the number of possible
/// pairs.
pub fn batches(seed: u64, rounds: usize) -> (Vec<Batch>, usize, usize) {
    let mut rng = Rng::new(seed);
    let mut covered: HashSet<(usize, usize, usize, usize)> = HashSet::new();
    let operations = operations();
    let mut batches = Vec::new();
    for (ranks, &nranks) in RANKS.iter().enumerate() {
        for (protocol, &asked) in KERNELS.iter().enumerate() {
            let mut cases = Vec::new();
            for _ in 0..rounds {
                for (operation, &(collective, op)) in operations.iter().enumerate() {
                    for (dtype, &element) in DType::ALL.iter().enumerate() {
                        let fixed = [operation, dtype, ranks, protocol];
                        let choice = choose(fixed, collective, &covered, &mut rng);
                        covered.extend(pairs(&choice));
                        let call = Call {
                            op,
                            ..Call::new(collective, element, 0)
                        };
                        cases.push(case(call, &choice, nranks, &mut rng));
                    }
                }
            }
            batches.push(Batch {
                nranks,
                kernel: asked,
                cases,
            });
        }
    }
    (batches, covered.len(), possible())
}

/// Draws 16 random choices and returns the choice that covers most new pairs. If no choice covers a
/// new pair, returns the first.
fn choose(
    fixed: [usize; 4],
    collective: Collective,
    covered: &HashSet<(usize, usize, usize, usize)>,
    rng: &mut Rng,
) -> Choice {
    let [operation, dtype, ranks, protocol] = fixed;
    let sends = collective == Collective::SendRecv;
    let mut best: Option<(usize, Choice)> = None;
    for attempt in 0..16 {
        let counts = COUNTS.len() - usize::from(attempt == 0);
        let choice = [
            operation,
            dtype,
            ranks,
            protocol,
            rng.below(counts),
            algorithm_number(rng.pick(&choices(collective))),
            if sends { 0 } else { rng.below(2) },
            rng.below(2),
        ];
        let fresh = pairs(&choice).filter(|pair| !covered.contains(pair));
        let fresh = fresh.count();
        if best.is_none_or(|(most, _)| fresh > most) {
            best = Some((fresh, choice));
        }
    }
    best.map_or([0; 8], |(_, choice)| choice)
}

fn algorithm_number(algorithm: Option<Algorithm>) -> usize {
    algorithm.map_or(0, |algorithm| algorithm as usize + 1)
}

fn pairs(choice: &Choice) -> impl Iterator<Item = (usize, usize, usize, usize)> + use<> {
    let choice = *choice;
    (0..choice.len())
        .flat_map(move |a| (a + 1..choice.len()).map(move |b| (a, choice[a], b, choice[b])))
}

/// Returns the number of possible pairs of choices.
fn possible() -> usize {
    let operations = operations();
    let sizes = [
        operations.len(),
        DType::ALL.len(),
        RANKS.len(),
        KERNELS.len(),
        COUNTS.len(),
        Algorithm::FLAT.len() + 1,
        2,
        2,
    ];
    let mut all = 0;
    for a in 0..sizes.len() {
        for b in a + 1..sizes.len() {
            all += sizes[a] * sizes[b];
        }
    }
    // Not every collective has every algorithm, and a send/recv is never in place.
    for (collective, _) in operations {
        all -= Algorithm::FLAT.len() + 1 - choices(collective).len();
        all -= usize::from(collective == Collective::SendRecv);
    }
    all
}

fn case(mut call: Call, choice: &Choice, nranks: usize, rng: &mut Rng) -> Case {
    let [.., count, algorithm, place, shift] = *choice;
    call.count = COUNTS[count];
    let large = call.count >= LARGE;
    if large && spreads(call.collective) {
        call.count = call.count.div_ceil(nranks);
    }
    call.algorithm = Algorithm::FLAT.get(algorithm.wrapping_sub(1)).copied();
    finish(call, nranks, place == 1, shift == 1, large, rng)
}

/// Sets the root, the factor and the input values of a case.
fn finish(
    mut call: Call,
    nranks: usize,
    in_place: bool,
    shifted: bool,
    large: bool,
    rng: &mut Rng,
) -> Case {
    if call.collective.has_root() {
        call.root = rng.below(nranks);
    }
    if let ReduceOp::PreMulSum(_) = call.op {
        call.op = ReduceOp::PreMulSum(factor(call.dtype, 0));
    }
    // With random bits, the order of a product decides whether it overflows. In f64 this holds for
    // sums as well, because the reference has no wider type.
    let ordered = call.op == ReduceOp::Prod || call.dtype == DType::F64;
    let values = if large {
        Values::Of(Pattern::Small)
    } else if call.dtype.is_float() && (!call.collective.reduces() || !ordered) {
        let bits = Values::Bits;
        rng.pick(&[
            bits,
            Values::Of(Pattern::Gaussian),
            Values::Of(Pattern::HeavyTailed),
        ])
    } else {
        Values::Of(Pattern::Gaussian)
    };
    Case {
        in_place,
        shifted,
        ..Case::new(call, values, rng.next())
    }
}

/// Returns whether a buffer of the collective has one block for each rank.
fn spreads(collective: Collective) -> bool {
    collective.has_blocks()
}

/// Returns cases of every operation and type that fused kernels run. Each requests the algorithm that the
/// kernel replaces, in messages that fit the kernel's smallest buffer.
pub fn fused_cases(rng: &mut Rng, nranks: usize) -> Vec<Case> {
    let mut cases = Vec::new();
    for (collective, op) in operations() {
        let algorithms: &[Algorithm] = match collective {
            Collective::AllReduce => &[Algorithm::OneShot, Algorithm::Direct],
            Collective::AllGather | Collective::ReduceScatter | Collective::AllToAll => {
                &[Algorithm::Direct]
            }
            // Only the fused LL128 kernel runs broadcasts and reduces.
            Collective::Broadcast | Collective::Reduce => &[Algorithm::OneShot],
            _ => continue,
        };
        let calls = algorithms
            .iter()
            .flat_map(|&algorithm| DType::ALL.map(|dtype| (algorithm, dtype)));
        for (algorithm, dtype) in calls {
            let call = Call {
                op,
                algorithm: Some(algorithm),
                ..Call::new(collective, dtype, rng.pick(&[1, 7, 77, 1000, 2047]))
            };
            let (in_place, shifted) = (rng.below(2) == 0, rng.below(2) == 0);
            cases.push(finish(call, nranks, in_place, shifted, false, rng));
        }
    }
    cases
}

/// Returns `number` random cases with up to `most` elements per buffer.
pub fn random(rng: &mut Rng, nranks: usize, number: usize, most: usize) -> Vec<Case> {
    let operations = operations();
    let one = |rng: &mut Rng| {
        let (collective, op) = rng.pick(&operations);
        let largest = most / if spreads(collective) { nranks } else { 1 };
        let bound = rng.pick(&[4, 300, 5000, largest]).min(largest);
        let call = Call {
            op,
            algorithm: rng.pick(&choices(collective)),
            ..Call::new(collective, rng.pick(&DType::ALL), rng.below(bound + 1))
        };
        let in_place = collective != Collective::SendRecv && rng.below(2) == 0;
        let shifted = rng.below(4) == 0;
        finish(call, nranks, in_place, shifted, bound > 100_000, rng)
    };
    (0..number).map(|_| one(rng)).collect()
}
