//! Which cases run: every collective and operation with every type in every world, and every
//! pair of two choices somewhere. A pure function of the seed.

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

/// The name of a kernel and its protocol in names of checks: `fused-ll128`.
pub fn name(kernel: Option<KernelProtocol>) -> String {
    kernel.map_or("auto".into(), |kernel| kernel.to_string().replace(' ', "-"))
}
/// Elements of the largest buffer of a large case.
const LARGE: usize = 1 << 20;
/// Counts; the last two stand for large ones, of which one is no multiple of anything.
const COUNTS: [usize; 9] = [0, 1, 3, 17, 257, 1000, 4096 + 1, LARGE + 1, LARGE];
const OPS: [ReduceOp; 6] = [
    ReduceOp::Sum,
    ReduceOp::Prod,
    ReduceOp::Min,
    ReduceOp::Max,
    ReduceOp::Avg,
    ReduceOp::PreMulSum(cinch::types::Scalar::Int(1)),
];

/// SplitMix64.
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

/// The cases of one world.
#[derive(Clone, Debug)]
pub struct Lot {
    pub nranks: usize,
    pub kernel: Option<KernelProtocol>,
    pub cases: Vec<Case>,
}

impl Lot {
    pub fn name(&self) -> String {
        format!("n{}-{}", self.nranks, name(self.kernel))
    }
}

/// What a case chooses, in small numbers; the place in the array names the choice.
type Choice = [usize; 8];

/// Collectives, each with every operation that it has.
pub fn works() -> Vec<(Collective, ReduceOp)> {
    let mut all = Vec::new();
    for collective in Collective::ALL {
        let ops = if collective.reduces() { 6 } else { 1 };
        all.extend(OPS[..ops].iter().map(|&op| (collective, op)));
    }
    all
}

/// Algorithms that a call may ask for; the first asks for none.
fn choices(collective: Collective) -> Vec<Option<Algorithm>> {
    let mut all = vec![None];
    if collective != Collective::SendRecv {
        all.extend(algorithms(collective).iter().map(|&one| Some(one)));
    }
    all
}

/// Every lot, and how many pairs of choices they cover of how many there are.
pub fn lots(seed: u64, rounds: usize) -> (Vec<Lot>, usize, usize) {
    let mut rng = Rng::new(seed);
    let mut covered: HashSet<(usize, usize, usize, usize)> = HashSet::new();
    let works = works();
    let mut lots = Vec::new();
    for (ranks, &nranks) in RANKS.iter().enumerate() {
        for (protocol, &asked) in KERNELS.iter().enumerate() {
            let mut cases = Vec::new();
            for _ in 0..rounds {
                for (work, &(collective, op)) in works.iter().enumerate() {
                    for (dtype, &element) in DType::ALL.iter().enumerate() {
                        let fixed = [work, dtype, ranks, protocol];
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
            lots.push(Lot {
                nranks,
                kernel: asked,
                cases,
            });
        }
    }
    (lots, covered.len(), possible())
}

/// The most useful of a few random choices; where none is of use, a cheap one.
fn choose(
    fixed: [usize; 4],
    collective: Collective,
    covered: &HashSet<(usize, usize, usize, usize)>,
    rng: &mut Rng,
) -> Choice {
    let [work, dtype, ranks, protocol] = fixed;
    let sends = collective == Collective::SendRecv;
    let mut best: Option<(usize, Choice)> = None;
    for attempt in 0..16 {
        let counts = COUNTS.len() - usize::from(attempt == 0);
        let choice = [
            work,
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

/// How many pairs there are.
fn possible() -> usize {
    let works = works();
    let sizes = [
        works.len(),
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
    // Not every collective has every algorithm; messages are never in place.
    for (collective, _) in works {
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

/// Root, factor and data of a case.
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
    // The order of a sum or product decides where one of such numbers overflows; of f64 the
    // reference has no more room than the ranks.
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

/// Whether a buffer holds a block for each rank.
fn spreads(collective: Collective) -> bool {
    collective.has_blocks()
}

/// Every operation and type of what fused kernels do, each by the schedule that they stand for, in messages
/// that fit the smallest area of such kernels.
pub fn exchanges(rng: &mut Rng, nranks: usize) -> Vec<Case> {
    let mut cases = Vec::new();
    for (collective, op) in works() {
        let algorithms: &[Algorithm] = match collective {
            Collective::AllReduce => &[Algorithm::OneShot, Algorithm::Direct],
            Collective::AllGather | Collective::ReduceScatter | Collective::AllToAll => {
                &[Algorithm::Direct]
            }
            // In lines.
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

/// `number` random cases with up to `most` elements a buffer.
pub fn random(rng: &mut Rng, nranks: usize, number: usize, most: usize) -> Vec<Case> {
    let works = works();
    let one = |rng: &mut Rng| {
        let (collective, op) = rng.pick(&works);
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
