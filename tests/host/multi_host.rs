//! Tests ranks on several simulated hosts, which are threads with different host ids. Hierarchical
//! collectives are compared with the definitions in `oracle`. Further tests cover different codecs
//! inside and between hosts, and the transport between each pair of ranks.

use crate::support::oracle::{Case, check, factor};
use crate::support::{OPS, Rng, seed};
use cinch::comm::{Call, Group};
use cinch::config::Origin;
use cinch::mem::{UserBuffers, bytes_of_mut};
use cinch::plan::Limits;
use cinch::types::{CodecKind, Level, TransportKind};
use cinch::{
    Algorithm, CodecSpec, Collective, Communicator, Config, DType, ErrorKind, ReduceOp, Report,
    UniqueId,
};
use std::time::Duration;

/// Host of each rank: two hosts in turn; three hosts with different numbers of ranks; four hosts in
/// blocks.
const MAPS: [&[usize]; 3] = [
    &[0, 1, 0, 1],
    &[0, 1, 0, 2, 2, 0],
    &[0, 0, 1, 1, 2, 2, 3, 3],
];

const TWO_LEVELS: [Collective; 5] = [
    Collective::AllReduce,
    Collective::AllGather,
    Collective::ReduceScatter,
    Collective::Broadcast,
    Collective::Reduce,
];

fn settings() -> Config {
    Config {
        timeout: Duration::from_secs(20),
        init_timeout: Duration::from_secs(20),
        ..Config::default()
    }
}

fn with(name: &str, value: &str) -> Config {
    let mut config = settings();
    config.set(name, value, Origin::Program).unwrap();
    config
}

/// Runs `body` as each rank of `map`. Returns the results in rank order.
fn world<R: Send>(
    map: &[usize],
    config: &Config,
    body: impl Fn(Communicator) -> R + Sync,
) -> Vec<R> {
    try_world(map, |_| config.clone(), |comm| body(comm.unwrap()))
}

fn try_world<R: Send>(
    map: &[usize],
    config: impl Fn(usize) -> Config + Sync,
    body: impl Fn(cinch::Result<Communicator>) -> R + Sync,
) -> Vec<R> {
    let id = UniqueId::create(&config(0)).unwrap();
    let (config, body) = (&config, &body);
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..map.len())
            .map(|rank| {
                scope.spawn(move || {
                    let config = Config {
                        host_id: Some(format!("host {}", map[rank])),
                        ..config(rank)
                    };
                    body(Communicator::init(&id, rank, map.len(), config))
                })
            })
            .collect();
        let ranks = ranks.into_iter();
        ranks.map(|rank| rank.join().expect("see above")).collect()
    })
}

type Done = (Vec<u8>, Report);

fn run_case(case: &Case, comm: &Communicator) -> cinch::Result<Done> {
    let (rank, nranks) = (comm.rank(), comm.nranks());
    let input = case.input(rank, nranks);
    let mut output = vec![0x5a; case.output_bytes(rank, nranks)];
    let call = case.call_of(rank);
    if !case.in_place || input.is_empty() || output.is_empty() {
        let report = comm.call(&call, UserBuffers::new(&input, &mut output))?;
        return Ok((output, report));
    }
    let block = case.call.count * case.call.dtype.size();
    let mut both = vec![0x5a; input.len().max(output.len())];
    let own = rank * block;
    let (ins, outs) = match case.call.collective {
        Collective::AllGather | Collective::Gather => (own..own + block, 0..output.len()),
        Collective::ReduceScatter | Collective::Scatter => (0..input.len(), own..own + block),
        _ => (0..input.len(), 0..output.len()),
    };
    both[ins.clone()].copy_from_slice(&input);
    let report = comm.call(
        &call,
        UserBuffers::overlapping(&mut both, ins, outs.clone())?,
    )?;
    Ok((both[outs].to_vec(), report))
}

/// Runs `cases` on one communicator. Returns, for each case, the outputs and reports of all ranks.
fn run(map: &[usize], config: &Config, cases: &[Case], limits: Option<&Limits>) -> Vec<Vec<Done>> {
    let by_rank = world(map, config, |comm| {
        if let Some(limits) = limits {
            comm.copy_limits(limits.clone()).unwrap();
        }
        let outcome = |case| run_case(case, &comm).unwrap_or_else(|e| panic!("{case:?}: {e}"));
        cases.iter().map(outcome).collect::<Vec<_>>()
    });
    let of_case = |at: usize| by_rank.iter().map(|rank| rank[at].clone()).collect();
    (0..cases.len()).map(of_case).collect()
}

/// Checks outputs against the definitions. Where all ranks must hold equal outputs, compares the
/// outputs with each other.
fn check_all(map: &[usize], cases: &[Case], all: &[Vec<Done>]) {
    let nranks = map.len();
    for (case, done) in cases.iter().zip(all) {
        let inputs: Vec<_> = (0..nranks).map(|rank| case.input(rank, nranks)).collect();
        for (rank, (output, report)) in done.iter().enumerate() {
            check(case, rank, &inputs, output, report)
                .unwrap_or_else(|wrong| panic!("{map:?}, {case:?}: {wrong}"));
            if let Some(algorithm) = case.call.algorithm {
                assert_eq!(report.algorithm, algorithm);
            }
            let shared = [
                Collective::AllReduce,
                Collective::AllGather,
                Collective::Broadcast,
            ];
            if shared.contains(&case.call.collective) {
                assert!(
                    *output == done[0].0,
                    "{map:?}, {case:?}: rank {rank} differs"
                );
            }
        }
    }
}

fn assert_same(cases: &[Case], one: &[Vec<Done>], other: &[Vec<Done>], what: &str) {
    for ((case, one), other) in cases.iter().zip(one).zip(other) {
        for (rank, (one, other)) in one.iter().zip(other).enumerate() {
            assert!(
                one.0 == other.0,
                "{what}: rank {rank} has other bits: {case:?}"
            );
        }
    }
}

/// Returns cases of every two-level collective with every type and operation.
fn raw_cases(nranks: usize, rng: &mut Rng) -> Vec<Case> {
    let mut cases = Vec::new();
    for collective in TWO_LEVELS {
        let ops = if collective.reduces() {
            &OPS[..]
        } else {
            &OPS[..1]
        };
        for dtype in DType::ALL {
            for &op in ops {
                let mut call = Call::new(collective, dtype, rng.pick(&[0, 1, 17, 257, 9_011]));
                call.op = op;
                if let ReduceOp::PreMulSum(_) = op {
                    call.op = ReduceOp::PreMulSum(factor(dtype, 0));
                }
                if collective.has_root() {
                    call.root = rng.below(nranks);
                }
                call.algorithm = Some(Algorithm::Hierarchical);
                let mut case = Case::new(call, rng.next());
                case.in_place = rng.below(2) == 0;
                cases.push(case);
            }
        }
    }
    cases
}

fn coded_cases(nranks: usize, rng: &mut Rng) -> Vec<Case> {
    let mut cases = Vec::new();
    let seeded = "minmax2:seed=5".parse().unwrap();
    let codecs = CodecKind::ALL[1..].iter().map(|&kind| CodecSpec::of(kind));
    for codec in codecs.chain([seeded]) {
        for collective in TWO_LEVELS {
            let dtype = rng.pick(&[DType::F32, DType::BF16, DType::F16]);
            let mut call = Call::new(collective, dtype, rng.pick(&[257, 4101, 20_003]));
            if collective.reduces() {
                call.op = rng.pick(&[OPS[0], OPS[4], OPS[5]]);
            }
            if collective.has_root() {
                call.root = rng.below(nranks);
            }
            call.codec = Some(codec.into());
            call.algorithm = Some(Algorithm::Hierarchical);
            let mut case = Case::new(call, rng.next());
            case.in_place = rng.below(2) == 0;
            cases.push(case);
        }
    }
    cases
}

/// Returns the planner's limits on the hosts of `map`. Another communicator that copies them plans
/// the same schedules.
fn limits_of(map: &[usize]) -> Limits {
    world(map, &settings(), |comm| comm.limits().unwrap()).swap_remove(0)
}

#[test]
fn every_collective_type_and_operation_is_right_on_several_hosts() {
    let mut rng = Rng(seed());
    for map in MAPS {
        let cases = raw_cases(map.len(), &mut rng);
        let mixed = run(map, &settings(), &cases, None);
        check_all(map, &cases, &mixed);
        // Costs decide the schedule between hosts, so both runs need equal limits.
        let limits = limits_of(map);
        let tcp = run(map, &with_tcp(&settings()), &cases, Some(&limits));
        assert_same(&cases, &mixed, &tcp, "tcp everywhere");
    }
}

#[test]
fn compressed_results_equal_the_same_schedule_in_shared_memory() {
    let mut rng = Rng(seed() + 1);
    for map in MAPS {
        let cases = coded_cases(map.len(), &mut rng);
        let mixed = run(map, &settings(), &cases, None);
        check_all(map, &cases, &mixed);
        let one_host = vec![0; map.len()];
        let limits = limits_of(map);
        for kind in ["shm", "loopback"] {
            let config = with("CINCH_TRANSPORT", kind);
            let shared = run(&one_host, &config, &cases, Some(&limits));
            assert_same(&cases, &mixed, &shared, kind);
        }
    }
}

#[test]
fn levels_have_codecs_of_their_own() {
    let mut rng = Rng(seed() + 2);
    let mut cases = Vec::new();
    for op in [OPS[0], OPS[4], OPS[5]] {
        for collective in TWO_LEVELS {
            let dtype = rng.pick(&[DType::F32, DType::BF16]);
            let mut call = Call::new(collective, dtype, 12_021);
            call.op = op;
            call.algorithm = Some(Algorithm::Hierarchical);
            cases.push(Case::new(call, rng.next()));
        }
    }
    // A maximum must not be encoded, even where codecs are set.
    let mut largest = Call::new(Collective::AllReduce, DType::F32, 999);
    largest.op = ReduceOp::Max;
    cases.push(Case::new(largest, 3));
    for text in [
        "intra=raw,inter=dynamic8:block=256",
        "intra=linear8:block=64,inter=raw",
        "intra=cast_bf16,inter=linear8:block=4096",
        "intra=minmax4:block=256:seed=3,inter=dynamic8:block=256",
    ] {
        for map in MAPS {
            let config = with("CINCH_CODEC", text);
            let all = run(map, &config, &cases, None);
            let again = run(map, &with_tcp(&config), &cases, Some(&limits_of(map)));
            assert_same(&cases, &all, &again, text);
            for (case, done) in cases.iter().zip(&all) {
                let gradients = [Collective::AllReduce, Collective::ReduceScatter];
                let coded =
                    gradients.contains(&case.call.collective) && case.call.op != ReduceOp::Max;
                let shown = if coded { text } else { "raw" };
                for (_, report) in done {
                    assert_eq!(report.codec.to_string(), shown, "{case:?}");
                }
            }
            // Checks results against the error bound of the codec that loses more. This bound also
            // leaves room for the encodes of the other codec.
            let looser = |level: Level| -> Vec<Vec<Done>> {
                let swap = |(output, report): &Done| {
                    let codec = report.codec.at(level).into();
                    (output.clone(), Report { codec, ..*report })
                };
                all.iter()
                    .map(|done| done.iter().map(swap).collect())
                    .collect()
            };
            let worse = match text.starts_with("intra=raw") || text.starts_with("intra=cast") {
                true => Level::Inter,
                false => Level::Intra,
            };
            check_all(map, &cases, &looser(worse));
        }
    }
}

fn with_tcp(config: &Config) -> Config {
    Config {
        transport: Some(TransportKind::Tcp),
        ..config.clone()
    }
}

/// With an 8-bit codec between hosts, a quarter of the bytes crosses hosts; inside hosts
/// contributions are sent uncompressed.
#[test]
fn wire_bytes_follow_the_codec_of_each_level() {
    let count = 1 << 16;
    let sent = |codec: &str| {
        let config = with("CINCH_CODEC", codec);
        let case = {
            let mut call = Call::new(Collective::AllReduce, DType::F32, count);
            call.algorithm = Some(Algorithm::Hierarchical);
            Case::new(call, 1)
        };
        let done = run(MAPS[2], &config, &[case], None);
        done[0]
            .iter()
            .map(|(_, report)| report.wire_bytes)
            .sum::<u64>()
    };
    let bytes = 4 * count as u64;
    // There are eight ranks on four hosts. Four ranks send a contribution to the first rank of
    // their host, sums take three hops between hosts, and seven ranks receive the total.
    let (inside, onward) = (4 * bytes, (3 + 7) * bytes);
    assert_eq!(sent("raw"), inside + onward);
    let levels = sent("intra=raw,inter=linear8");
    let expected = inside + onward / 4;
    assert!(
        levels >= expected && levels < expected + expected / 40,
        "{levels} for {expected}"
    );
}

/// `raw_bytes` counts the bytes of a call without compression, so it does not depend on the codecs
/// inside and between hosts.
#[test]
fn raw_bytes_do_not_depend_on_the_codecs_of_levels() {
    let mut call = Call::new(Collective::AllReduce, DType::F32, 1 << 16);
    call.algorithm = Some(Algorithm::Hierarchical);
    let case = Case::new(call, 1);
    let counted = |codec: &str| {
        world(&[0, 0, 1, 1], &with("CINCH_CODEC", codec), |comm| {
            run_case(&case, &comm).unwrap();
            comm.codec_stats()
        })
    };
    let exact = counted("raw");
    assert!(exact.iter().all(|one| one.raw_bytes == one.wire_bytes));
    assert!(exact.iter().all(|one| one.raw_bytes > 0));
    for codec in [
        "intra=raw,inter=linear8",
        "intra=linear8,inter=raw",
        "linear8",
    ] {
        let coded = counted(codec);
        for (coded, exact) in coded.iter().zip(&exact) {
            assert_eq!((coded.coded_calls, coded.exact_calls), (1, [0; 11]));
            assert_eq!(coded.raw_bytes, exact.raw_bytes, "{codec}");
            assert!(coded.wire_bytes <= coded.raw_bytes, "{codec}");
        }
        assert!(coded.iter().any(|one| one.bytes_saved() > 0), "{codec}");
    }
}

/// Without a codec, `raw_bytes` equals the bytes that the schedule of each algorithm sends.
#[test]
fn uncompressed_calls_report_equal_raw_and_wire_bytes() {
    for map in [MAPS[1], &[0, 0, 0, 0]] {
        world(map, &settings(), |comm| {
            for collective in Collective::ALL {
                if collective == Collective::SendRecv && comm.rank() > 1 {
                    continue; // from 0 to 1
                }
                let ran = Algorithm::ALL.into_iter().filter(|&algorithm| {
                    let mut call = Call::new(collective, DType::F32, 9_011);
                    call.algorithm = Some(algorithm);
                    match collective {
                        Collective::SendRecv => call.peer = 1,
                        rooted if rooted.has_root() => call.root = 1,
                        _ => {}
                    }
                    let what = format!("{collective} {algorithm}");
                    match run_case(&Case::new(call, 1), &comm) {
                        Ok((_, report)) => {
                            assert_eq!(report.wire_bytes, report.raw_bytes, "{what}");
                            true
                        }
                        Err(error) => {
                            assert_eq!(error.kind(), ErrorKind::Unsupported, "{what}: {error}");
                            false
                        }
                    }
                });
                assert!(ran.count() > 0, "{collective}");
            }
        });
    }
}

#[test]
fn ranks_use_tcp_between_hosts_only() {
    let map = MAPS[1];
    for (rank, kinds) in world(map, &settings(), |comm| comm.info().transports)
        .into_iter()
        .enumerate()
    {
        for (peer, kind) in kinds.into_iter().enumerate() {
            let expected = match (peer == rank, map[peer] == map[rank]) {
                (true, _) => None,
                (_, true) => Some(TransportKind::Loopback),
                (_, false) => Some(TransportKind::Tcp),
            };
            assert_eq!(kind, expected, "{rank} to {peer}");
        }
    }
    for kind in ["shm", "loopback"] {
        let errors = try_world(
            map,
            |_| with("CINCH_TRANSPORT", kind),
            |comm| comm.unwrap_err().to_string(),
        );
        for error in errors {
            assert!(error.contains("CINCH_HOST_ID"), "{error}");
        }
    }
}

#[test]
fn hierarchical_where_it_is_unsupported_is_refused_with_the_reason() {
    let ask = |map: &[usize], collective: Collective| {
        let mut call = Call::new(collective, DType::F32, 64);
        call.algorithm = Some(Algorithm::Hierarchical);
        let case = Case::new(call, 1);
        world(map, &settings(), |comm| run_case(&case, &comm).unwrap_err()).swap_remove(0)
    };
    for (map, collective, part) in [
        (
            &[0, 0, 0][..],
            Collective::AllReduce,
            "all ranks are on one host",
        ),
        (
            &[0, 1, 2][..],
            Collective::Broadcast,
            "each of the 3 hosts has one rank",
        ),
        (
            MAPS[0],
            Collective::AllToAll,
            "every block is for one rank alone",
        ),
    ] {
        let error = ask(map, collective);
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.message().contains(part), "{error}");
    }
    // CINCH_ALGO=hierarchical has no effect on collectives without this algorithm; `explain`
    // reports why.
    let config = with("CINCH_ALGO", "hierarchical");
    let texts = world(MAPS[0], &config, |comm| {
        let exchange = Call::new(Collective::AllToAll, DType::F32, 64);
        let sum = Call::new(Collective::AllReduce, DType::F32, 64);
        let done = run_case(&Case::new(sum, 1), &comm).unwrap();
        assert_eq!(done.1.algorithm, Algorithm::Hierarchical);
        run_case(&Case::new(exchange, 1), &comm).unwrap();
        (
            comm.explain(&exchange).unwrap(),
            comm.explain(&sum).unwrap(),
        )
    });
    let (exchange, sum) = &texts[0];
    assert!(
        exchange.contains("no hierarchical: all_to_all"),
        "{exchange}"
    );
    assert!(
        sum.contains("4 ranks on 2 hosts of 2 ranks over tcp"),
        "{sum}"
    );
    assert!(sum.contains("hierarchical/tree"), "{sum}");
    assert!(!sum.contains("  ring"), "{sum}");
}

/// The hierarchical algorithm is the cheapest if data then crosses between hosts once, and not once
/// for each rank.
#[test]
fn large_messages_choose_hierarchical_by_cost() {
    for (map, dealt) in [
        (&[0, 1, 2, 3, 0, 1, 2, 3], true),
        (&[0, 0, 1, 1, 2, 2, 3, 3], false),
    ] {
        let chosen = world(map, &settings(), |comm| {
            let call = Call::new(Collective::AllReduce, DType::F32, 4 << 20);
            comm.explain(&call).unwrap()
        });
        assert!(chosen.iter().all(|text| *text == chosen[0]));
        let best = chosen[0].lines().find(|line| line.contains("cheapest"));
        assert!(
            best.unwrap().contains("hierarchical"),
            "{dealt}: {}",
            chosen[0]
        );
    }
}

#[test]
fn different_intra_host_codecs_are_refused_when_joining() {
    let config = |rank: usize| match rank {
        2 => with("CINCH_CODEC", "intra=linear8,inter=dynamic8"),
        _ => with("CINCH_CODEC", "intra=raw,inter=dynamic8"),
    };
    for error in try_world(MAPS[0], config, |comm| comm.unwrap_err()) {
        let text = error.to_string();
        assert!(text.contains("intra=raw,inter=dynamic8"), "{text}");
        assert!(text.contains("intra=linear8:block=256"), "{text}");
    }
}

/// A single host sends nothing between hosts, so only the intra-host codec applies.
#[test]
fn single_host_uses_the_intra_host_codec() {
    for (text, shown) in [
        ("intra=raw,inter=dynamic8", "raw"),
        ("intra=linear8,inter=raw", "linear8:block=256"),
    ] {
        let sum = Case::new(Call::new(Collective::AllReduce, DType::F32, 999), 1);
        let done = run(&[0, 0, 0], &with("CINCH_CODEC", text), &[sum], None);
        assert_eq!(done[0][1].1.codec.to_string(), shown);
        check_all(&[0, 0, 0], &[sum], &done);
    }
}

/// Fused small sums must have separate scale blocks, whether the codec is inside hosts, between
/// hosts, or both.
#[test]
fn fused_tensors_share_no_block_on_either_level() {
    for codec in [
        "intra=linear8,inter=raw",
        "intra=raw,inter=linear8",
        "intra=linear8:block=64,inter=minmax8",
    ] {
        world(&[0, 0, 1, 1], &with("CINCH_CODEC", codec), |comm| {
            let call = Call {
                algorithm: Some(Algorithm::Hierarchical),
                ..Call::new(Collective::AllReduce, DType::F32, 40)
            };
            let mut tensors = [[1e3f32; 40], [1e-3; 40], [f32::INFINITY; 40]];
            let mut group = Group::new();
            for tensor in &mut tensors {
                let bytes = bytes_of_mut(tensor);
                let buffers = UserBuffers::in_place(bytes, 0, 160).unwrap();
                group.add(&comm, &call, buffers).unwrap();
            }
            let reports = group.run().unwrap();
            for (at, (tensor, value)) in tensors.iter().zip([4e3, 4e-3]).enumerate() {
                let right = |x: &f32| (x / value - 1.0).abs() < 0.01;
                assert!(
                    tensor.iter().all(right),
                    "{codec}: {tensor:?} is tensor {at}"
                );
            }
            for (report, non_finite) in reports.iter().zip([0, 0, 40]) {
                assert_eq!(report.fused, 3);
                assert_eq!(report.input.unwrap().non_finite, non_finite, "{codec}");
            }
        });
    }
}
