//! More ranks than a launch has peers, all on one GPU: every collective, with and without codecs, and a group in
//! which each rank sends to and receives from all others.

use crate::case::Case;
use crate::coded;
use crate::cover::{self, Rng};
use crate::harness::{Check, Setup, Verdict, ensure};
use crate::world::World;
use cinch::comm::{Call, Group};
use cinch::testing::random_word;
use cinch::{Algorithm, Collective, DType};

/// Numbers of ranks: a few more than a launch has peers, and many more.
const RANKS: [usize; 2] = [34, 48];
/// Elements that a rank sends to each other rank in the group: of several chunks.
const COUNT: usize = 5003;
/// Part of the coded cases that is run: one of so many.
const CODED_PART: usize = 8;

pub fn checks() -> Vec<Check> {
    let mut checks = Vec::new();
    for nranks in RANKS {
        let raw = format!("many-ranks/raw-n{nranks}");
        let raw = Check::new(raw, 1, move |setup| raw_cases(setup, nranks));
        checks.push(raw.within(120).also_on_host());
        let coded = format!("many-ranks/coded-n{nranks}");
        let coded = Check::new(coded, 1, move |setup| coded_cases(setup, nranks));
        checks.push(coded.within(240).also_on_host());
        let group = format!("many-ranks/group-n{nranks}");
        let group = Check::new(group, 1, move |setup| messages_to_all(setup, nranks));
        checks.push(group.within(120).also_on_host());
    }
    checks
}

/// Lets the planner choose where the case asks for an algorithm that a kernel cannot run on so many ranks.
fn possible(mut case: Case) -> Case {
    let Call {
        collective,
        algorithm,
        ..
    } = case.call;
    let is_divisible = matches!(
        collective,
        Collective::AllToAll | Collective::Gather | Collective::Scatter | Collective::SendRecv
    );
    use Algorithm::{Direct, FlatTree, OneShot};
    let sends_to_all = matches!(algorithm, Some(Direct | OneShot | FlatTree));
    if sends_to_all && !is_divisible {
        case.call.algorithm = None;
    }
    case
}

fn raw_cases(setup: &Setup, nranks: usize) -> Verdict {
    let mut rng = Rng::new(setup.options.seed ^ nranks as u64);
    let number = setup.options.either(60, 240);
    let cases = cover::random(&mut rng, nranks, number, 1 << 18);
    let cases: Vec<Case> = cases.into_iter().map(possible).collect();
    let ran = World::new(setup, nranks, 1).judge(&cases)?;
    Ok(format!("{ran} cases"))
}

fn coded_cases(setup: &Setup, nranks: usize) -> Verdict {
    let mut rng = Rng::new(setup.options.seed ^ nranks as u64);
    let cases = coded::cases(&mut rng, nranks, 1, 1 << 18);
    let cases = cases.into_iter().step_by(CODED_PART).map(possible);
    let cases: Vec<Case> = cases.collect();
    // A ring of so many ranks rounds too often for the limits of other checks.
    let world = World::new(setup, nranks, 1);
    coded::has_bits_of_host_engine(&world, &cases, |_, _| Ok(()))?;
    Ok(format!("{} cases, equal to the host engine", cases.len()))
}

/// Returns what `from` sends to `to`, as bytes.
fn message(from: usize, to: usize) -> Vec<u8> {
    let seed = (from << 8 | to) as u64;
    let words = (0..COUNT as u64).map(|at| random_word(seed, at) as u32);
    words.flat_map(u32::to_le_bytes).collect()
}

fn messages_to_all(setup: &Setup, nranks: usize) -> Verdict {
    let world = World::new(setup, nranks, 1);
    let bytes = 4 * COUNT;
    let arenas = world.arenas(2 * nranks * bytes)?;
    let wrong = world.run(|comm| {
        let (rank, arena) = (comm.rank(), &arenas[comm.rank()]);
        let place = |half: usize, peer: usize| ((half * nranks + peer) * bytes, bytes);
        for peer in 0..nranks {
            arena.write(place(0, peer).0, &message(rank, peer))?;
            arena.write(place(1, peer).0, &vec![0xa5; bytes])?;
        }
        let mut group = Group::new();
        for peer in (0..nranks).filter(|&peer| peer != rank) {
            let mut call = Call::new(Collective::SendRecv, DType::U32, COUNT);
            let stream = arena.stream().ok();
            (call.root, call.peer) = (rank, peer);
            arena.add_at(&mut group, comm, &call, (place(0, peer), (0, 0)), stream)?;
            (call.root, call.peer) = (peer, rank);
            arena.add_at(&mut group, comm, &call, ((0, 0), place(1, peer)), stream)?;
        }
        group.run()?;
        arena.wait(comm)?;
        let mut wrong = Vec::new();
        for peer in (0..nranks).filter(|&peer| peer != rank) {
            let mut found = vec![0; bytes];
            arena.read(place(1, peer).0, &mut found)?;
            wrong.extend((found != message(peer, rank)).then_some(peer));
        }
        Ok(wrong)
    })?;
    for (rank, wrong) in wrong.iter().enumerate() {
        ensure(wrong.is_empty(), || {
            format!("rank {rank} received other data than sent from {wrong:?}")
        })?;
    }
    Ok(format!(
        "{} messages of {bytes} bytes",
        nranks * (nranks - 1)
    ))
}
