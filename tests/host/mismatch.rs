//! Tests ranks that disagree about a call. Each rank must fail within a second, with an error that
//! names both ranks and both values. `CINCH_TEST_MISMATCHES=1000 cargo test --test host mismatch`
//! runs 1000 pairs of calls.

use crate::support::{self, Rng, config, number, seed, world};
use cinch::comm::Call;
use cinch::mem::UserBuffers;
use cinch::types::TransportKind;
use cinch::{CodecSetting, Collective, Communicator, DType, Error, ErrorKind, ReduceOp};
use std::time::{Duration, Instant};

/// Time within which every rank must report the error.
const REPORT_LIMIT: Duration = Duration::from_secs(1);

/// The argument in which the call of one rank differs from the calls of all others.
#[derive(Clone, Copy, Debug)]
enum Field {
    Collective,
    Count,
    DType,
    Op,
    Root,
    Codec,
    Order,
}

const FIELDS: [Field; 7] = [
    Field::Collective,
    Field::Count,
    Field::DType,
    Field::Op,
    Field::Root,
    Field::Codec,
    Field::Order,
];

/// Two disagreeing lists of calls: one rank makes the calls `odd`, all others the calls `most`. The
/// error must name both `values`.
#[derive(Debug)]
struct Pair {
    field: Field,
    most: Vec<Call>,
    odd: Vec<Call>,
    values: [String; 2],
}

const OPS: [ReduceOp; 5] = [
    ReduceOp::Sum,
    ReduceOp::Prod,
    ReduceOp::Min,
    ReduceOp::Max,
    ReduceOp::Avg,
];
const DTYPES: [DType; 4] = [DType::F32, DType::I32, DType::F64, DType::BF16];

/// Picks two different elements.
fn two<T: Copy + PartialEq>(rng: &mut Rng, of: &[T]) -> [T; 2] {
    let first = rng.pick(of);
    loop {
        let second = rng.pick(of);
        if second != first {
            return [first, second];
        }
    }
}

fn pair(rng: &mut Rng, nranks: usize) -> Pair {
    // Leaves out SendRecv, which only two ranks call.
    let all = &Collective::OF_ALL_RANKS;
    let counts = [1, 2, 100, 1000, 4097, 200_000];
    let mut call = Call::new(rng.pick(all), DType::F32, rng.pick(&counts));
    let field = rng.pick(&FIELDS);
    let (mut most, mut odd, values);
    match field {
        Field::Collective => {
            let [a, b] = two(rng, all);
            (most, odd) = (call, call);
            (most.collective, odd.collective) = (a, b);
            values = [a.to_string(), b.to_string()];
        }
        Field::Count => {
            let [a, b] = two(rng, &counts);
            (most, odd) = (call, call);
            (most.count, odd.count) = (a, b);
            values = [format!("of {a} "), format!("of {b} ")];
        }
        Field::DType => {
            let [a, b] = two(rng, &DTYPES);
            (most, odd) = (call, call);
            (most.dtype, odd.dtype) = (a, b);
            values = [a.to_string(), b.to_string()];
        }
        Field::Op => {
            call.collective = rng.pick(&[
                Collective::AllReduce,
                Collective::ReduceScatter,
                Collective::Reduce,
            ]);
            let [a, b] = two(rng, &OPS);
            (most, odd) = (call, call);
            (most.op, odd.op) = (a, b);
            values = [format!("op {a}"), format!("op {b}")];
        }
        Field::Root => {
            call.collective = rng.pick(&[
                Collective::Broadcast,
                Collective::Reduce,
                Collective::Gather,
                Collective::Scatter,
            ]);
            let ranks: Vec<usize> = (0..nranks).collect();
            let [a, b] = two(rng, &ranks);
            (most, odd) = (call, call);
            (most.root, odd.root) = (a, b);
            values = [format!("root {a}"), format!("root {b}")];
        }
        Field::Codec => {
            let codecs = [
                "raw",
                "linear8",
                "linear8:block=128",
                "dynamic8",
                "cast_bf16",
            ];
            let [a, b] = two(rng, &codecs).map(|text| text.parse::<CodecSetting>().unwrap());
            (most, odd) = (call, call);
            (most.codec, odd.codec) = (Some(a), Some(b));
            values = [format!("codec {a}"), format!("codec {b}")];
        }
        Field::Order => {
            let [a, b] = two(rng, all);
            let [mut first, mut second] = [call, call];
            (first.collective, second.collective) = (a, b);
            return Pair {
                field,
                most: vec![first, second],
                odd: vec![second, first],
                values: [a.to_string(), b.to_string()],
            };
        }
    }
    Pair {
        field,
        most: vec![most],
        odd: vec![odd],
        values,
    }
}

fn make(comm: &Communicator, call: &Call) -> Result<(), Error> {
    let is_root = comm.rank() == call.root;
    let bytes = |extent: cinch::types::Extent| {
        extent.elements(call.count, comm.nranks()).unwrap() * call.dtype.size()
    };
    // Codecs need finite numbers; bytes of 1 are finite in every type.
    let input = vec![1; bytes(call.collective.input_extent(is_root))];
    let mut output = vec![0; bytes(call.collective.output_extent(is_root))];
    comm.call(call, UserBuffers::new(&input, &mut output))
        .map(|_| ())
}

/// Makes the calls. Returns the error, if any, and the time until it was reported.
fn until_error(comm: &Communicator, calls: &[Call]) -> (Option<Error>, Duration) {
    let start = Instant::now();
    for call in calls {
        if let Err(error) = make(comm, call) {
            return (Some(error), start.elapsed());
        }
    }
    // A rank that only sends may return before another rank disagrees.
    let returned = Instant::now();
    while returned.elapsed() < REPORT_LIMIT {
        if let Some(error) = comm.async_error() {
            return (Some(error), returned.elapsed());
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    (None, returned.elapsed())
}

#[test]
fn every_rank_reports_a_mismatch_with_both_sides_named() {
    let mut rng = Rng(seed());
    let pairs = number("CINCH_TEST_MISMATCHES").unwrap_or(30);
    let mut worst = Duration::ZERO;
    for round in 0..pairs {
        let nranks = 2 + rng.below(3);
        let transport = rng.pick(&support::TRANSPORTS);
        let odd_rank = rng.below(nranks);
        let pair = pair(&mut rng, nranks);
        let what = format!(
            "pair {round}, {transport}, {nranks} ranks, rank {odd_rank} has another {:?}: {pair:?}",
            pair.field
        );
        let failures = world(nranks, &config(transport), |comm| {
            let calls = if comm.rank() == odd_rank {
                &pair.odd
            } else {
                &pair.most
            };
            comm.barrier().unwrap();
            until_error(&comm, calls)
        });
        for (rank, (error, after)) in failures.into_iter().enumerate() {
            let error = error.unwrap_or_else(|| panic!("{what}: rank {rank} reports no error"));
            check(&error, &pair, nranks, odd_rank)
                .unwrap_or_else(|why| panic!("{what}: rank {rank}: {why}: {error}"));
            assert!(
                after <= REPORT_LIMIT,
                "{what}: rank {rank} failed after {after:?}"
            );
            worst = worst.max(after);
        }
    }
    println!("{pairs} pairs; the last rank failed after at most {worst:?}");
}

fn check(error: &Error, pair: &Pair, nranks: usize, odd: usize) -> Result<(), String> {
    if error.kind() != ErrorKind::Mismatch {
        return Err(format!("is a {:?}", error.kind()));
    }
    let names = |rank: usize| error.message().contains(&format!("rank {rank} (host "));
    if !names(odd) {
        return Err(format!("does not name rank {odd}, which is the odd one"));
    }
    if !(0..nranks).any(|rank| rank != odd && names(rank)) {
        return Err("names one side only".into());
    }
    match pair
        .values
        .iter()
        .find(|value| !error.message().contains(*value))
    {
        Some(value) => Err(format!("does not give {value:?}")),
        None => Ok(()),
    }
}

#[test]
fn factors_of_a_premultiplied_sum_may_differ() {
    use cinch::types::Scalar;
    let outputs = world(3, &config(TransportKind::Loopback), |comm| {
        let mut data = [1.0f32, 2.0];
        let factor = comm.rank() as f64 + 1.0;
        comm.all_reduce_in_place(&mut data, ReduceOp::PreMulSum(Scalar::Float(factor)))
            .map(|_| data)
    });
    for output in outputs {
        assert_eq!(output, Ok([6.0, 12.0]));
    }
}

#[test]
fn send_and_receive_of_different_counts_fail_on_all_ranks() {
    for transport in support::TRANSPORTS {
        let failures = world(3, &config(transport), |comm| {
            // Rank 0 sends 100 elements to rank 2, which expects 90. Rank 1 makes no call.
            let count = if comm.rank() == 0 { 100 } else { 90 };
            let mut call = Call::new(Collective::SendRecv, DType::F32, count);
            (call.root, call.peer) = (0, 2);
            let calls = if comm.rank() == 1 { vec![] } else { vec![call] };
            comm.barrier().unwrap();
            until_error(&comm, &calls)
        });
        for (rank, (error, after)) in failures.into_iter().enumerate() {
            let error =
                error.unwrap_or_else(|| panic!("{transport}: rank {rank} reports no error"));
            let message = error.message();
            assert_eq!(error.kind(), ErrorKind::Mismatch, "{transport}: {error}");
            for part in ["rank 0 (host ", "rank 2 (host ", "of 100 ", "of 90 "] {
                assert!(message.contains(part), "{transport}, rank {rank}: {error}");
            }
            assert!(
                after <= REPORT_LIMIT,
                "{transport}: rank {rank} failed after {after:?}"
            );
        }
    }
}
