//! Tests codecs such as `auto:dynamic8`, where the cost model decides for each call whether to
//! compress. All ranks must decide alike. Reports and explanations must name the codec that ran,
//! and results must be right.

use cinch::comm::{Call, Group};
use cinch::mem::{UserBuffers, bytes_of, bytes_of_mut};
use cinch::plan::{Affine, MeasuredCosts};
use cinch::testing::{gaussian, local_world, random_word};
use cinch::types::TransportKind;
use cinch::{Collective, Communicator, Config, DType, ReduceOp, Report};

fn config(codec: &str, transport: TransportKind) -> Config {
    let mut config = Config {
        transport: Some(transport),
        ..Config::default()
    };
    let origin = cinch::config::Origin::Program;
    config.set("CINCH_CODEC", codec, origin).unwrap();
    config
}

fn input(rank: usize, count: usize) -> Vec<f32> {
    (0..count as u64)
        .map(|at| gaussian(random_word(rank as u64, at)) as f32)
        .collect()
}

/// Sums `call.count` numbers, checks the sum, and returns the report.
fn sum(comm: &Communicator, call: &Call) -> Report {
    let mine = input(comm.rank(), call.count);
    let mut output = vec![0f32; call.count];
    let buffers = UserBuffers::new(bytes_of(&mine), bytes_of_mut(&mut output));
    let report = comm.call(call, buffers).unwrap();
    check(comm.nranks(), &output, &report);
    report
}

/// Checks the error of a sum: only rounding errors if the call ran without a codec, otherwise the
/// codec's error.
fn check(nranks: usize, output: &[f32], report: &Report) {
    let inputs: Vec<_> = (0..nranks).map(|rank| input(rank, output.len())).collect();
    let (mut error, mut scale) = (0f64, 0f64);
    for (at, &sum) in output.iter().enumerate() {
        let exact: f64 = inputs.iter().map(|input| f64::from(input[at])).sum();
        error += (exact - f64::from(sum)).powi(2);
        scale += exact.powi(2);
    }
    let relative = (error / scale).sqrt();
    match report.codec.is_lossy() {
        // An 8-bit codec has a measurable error, below 5 %.
        true => assert!(relative > 1e-3 && relative < 0.05, "{relative}"),
        false => assert!(relative < 1e-6, "{relative}"),
    }
}

#[test]
fn all_ranks_decide_alike_and_report_the_codec() {
    for transport in [TransportKind::Loopback, TransportKind::Tcp] {
        for nranks in [1, 2, 3, 5] {
            let ran = local_world(nranks, &config("auto:dynamic8", transport), |comm| {
                let limits = comm.limits().unwrap();
                let costs = limits.machine.measured.expect("costs were measured");
                let mut decided = Vec::new();
                for count in [1, 100, 5_000, 100_003, 400_000] {
                    let call = Call::new(Collective::AllReduce, DType::F32, count);
                    let explained = comm.explain(&call).unwrap();
                    let report = sum(comm, &call);
                    let verdict = format!("so {} runs", report.codec);
                    assert!(explained.contains(&verdict), "{explained}");
                    assert!(explained.contains("measured, the largest of all ranks"));
                    decided.push((report.codec, report.algorithm, explained));
                }
                (costs, decided)
            });
            for other in &ran {
                assert_eq!(*other, ran[0], "{nranks} over {transport}");
            }
            let costs = &ran[0].0;
            assert_eq!(costs.send.fixed > 0.0, nranks > 1, "{costs:?}");
            // A single rank sends no bytes, so compression never pays.
            if nranks == 1 {
                assert!(ran[0].1.iter().all(|one| !one.0.is_lossy()));
            }
        }
    }
}

#[test]
fn fixed_codec_measures_no_costs() {
    for codec in ["raw", "linear8"] {
        let measured = local_world(2, &config(codec, TransportKind::Loopback), |comm| {
            comm.limits().unwrap().machine.measured
        });
        assert_eq!(measured, [None, None]);
    }
}

/// Returns a communicator's default codec and measured costs.
fn in_effect(comm: &Communicator) -> (String, Option<MeasuredCosts>) {
    let costs = comm.limits().unwrap().machine.measured;
    (comm.codec_policy().codecs[0].codec.to_string(), costs)
}

/// Ranks may reach one effective codec policy by different settings. The effective policy must
/// decide whether they measure costs. A rank that measured alone would wait for its peers for ever.
#[test]
fn effective_policy_decides_whether_costs_are_measured() {
    for (settings, measures) in [
        // Compression is off on both ranks: on rank 0 by a rule, on rank 1 by CINCH_CODEC.
        (
            [
                &[
                    ("CINCH_CODEC", "auto:linear8"),
                    ("CINCH_CODEC_RULES", "*=off"),
                ][..],
                &[("CINCH_CODEC", "off")],
            ],
            false,
        ),
        (
            [
                &[
                    ("CINCH_CODEC", "auto:linear8"),
                    ("CINCH_CODEC_LINKS", "network"),
                ],
                &[],
            ],
            false,
        ),
        (
            [
                &[
                    ("CINCH_CODEC", "auto:linear8"),
                    ("CINCH_CODEC_RULES", "*=static8"),
                ],
                &[("CINCH_CODEC_RULES", "*=static8")],
            ],
            false,
        ),
        (
            [
                &[("CINCH_CODEC_RULES", "*=auto:static8")],
                &[("CINCH_CODEC", "auto:static8")],
            ],
            true,
        ),
    ] {
        let id = cinch::UniqueId::create(&Config::default()).unwrap();
        let ranks: Vec<_> = std::thread::scope(|scope| {
            let ranks = settings.into_iter().enumerate().map(|(rank, settings)| {
                scope.spawn(move || {
                    let mut config = Config {
                        init_timeout: std::time::Duration::from_secs(20),
                        ..config("raw", TransportKind::Loopback)
                    };
                    let origin = cinch::config::Origin::Environment;
                    config.set("CINCH_CODEC", "raw", origin).unwrap();
                    for (name, value) in settings {
                        config.set(name, value, origin).unwrap();
                    }
                    in_effect(&Communicator::init(&id, rank, 2, config).unwrap())
                })
            });
            let ranks: Vec<_> = ranks.collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        assert_eq!(ranks[0], ranks[1], "{settings:?}");
        assert_eq!(ranks[0].1.is_some(), measures, "{settings:?}");
    }
}

/// Returns costs: `message` seconds for a message, `byte` seconds for a byte sent, and `element`
/// seconds to encode or decode an element.
fn costs(message: f64, byte: f64, element: f64) -> MeasuredCosts {
    let line = |each| Affine { fixed: 0.0, each };
    let mut costs = MeasuredCosts::of_core(
        Affine {
            fixed: message,
            each: byte,
        },
        &[],
        cinch::cpu::Isa::Scalar,
    )
    .unwrap();
    costs.reduce = line(0.1e-9);
    costs.encode = costs.encode.map(|_| line(element));
    costs.decode = costs.decode.map(|_| line(element));
    costs
}

#[test]
fn auto_codec_of_a_call_decides_alone_and_in_groups() {
    let config = Config {
        fuse_bytes: 0,
        ..config("auto:raw", TransportKind::Loopback)
    };
    for (costs, lossy) in [
        // On a network of 1 Gbit/s with a fast codec, compression pays for large messages; latency
        // dominates small ones.
        (costs(50e-6, 8e-9, 0.2e-9), [false, true]),
        // On a network as fast as memory, compression never pays.
        (costs(1e-6, 0.01e-9, 0.2e-9), [false, false]),
    ] {
        local_world(3, &config, |comm| {
            comm.set_costs(costs).unwrap();
            let call = |count| Call {
                codec: Some("auto:linear8".parse().unwrap()),
                ..Call::new(Collective::AllReduce, DType::F32, count)
            };
            // The default `auto:raw` never compresses; a call that names linear8 always does.
            let plain = Call::new(Collective::AllReduce, DType::F32, 300_000);
            assert!(!sum(comm, &plain).codec.is_lossy());
            let always = Call {
                codec: Some("linear8".parse().unwrap()),
                ..call(64)
            };
            assert!(sum(comm, &always).codec.is_lossy());
            let counts = [64, 300_000];
            for (count, lossy) in counts.into_iter().zip(lossy) {
                assert_eq!(sum(comm, &call(count)).codec.is_lossy(), lossy, "{count}");
            }
            let inputs = counts.map(|count| input(comm.rank(), count));
            let mut outputs = counts.map(|count| vec![0f32; count]);
            let mut group = Group::new();
            for (input, output) in inputs.iter().zip(&mut outputs) {
                let buffers = UserBuffers::new(bytes_of(input), bytes_of_mut(output));
                group.add(comm, &call(input.len()), buffers).unwrap();
            }
            let reports = group.run().unwrap();
            for ((report, output), lossy) in reports.iter().zip(&outputs).zip(lossy) {
                assert_eq!(report.codec.is_lossy(), lossy);
                check(3, output, report);
            }
        });
    }
}

#[test]
fn auto_codec_of_an_unsupported_call_is_refused() {
    local_world(2, &config("auto:raw", TransportKind::Loopback), |comm| {
        let call = Call {
            codec: Some("auto:linear8".parse().unwrap()),
            op: ReduceOp::Max,
            ..Call::new(Collective::AllReduce, DType::F32, 8)
        };
        let mut output = [0f32; 8];
        let buffers = UserBuffers::new(bytes_of(&[1f32; 8]), bytes_of_mut(&mut output));
        let error = comm.call(&call, buffers).unwrap_err();
        assert!(error.message().contains("linear8"), "{error}");
    });
}

/// If messages are cheap, the planner must divide a call into more chunks than the slots require,
/// so that transfers overlap with encoding.
#[test]
fn cost_model_picks_the_number_of_chunks() {
    let config = Config {
        slot_bytes: 16 << 20,
        buffer_bytes: 1 << 30,
        ..config("auto:raw", TransportKind::Tcp)
    };
    let passes = |explained: &str| {
        let line = explained.lines().find(|line| line.contains("<- cheapest"));
        let words: Vec<_> = line.unwrap().split_whitespace().collect();
        words[2].parse::<usize>().unwrap()
    };
    local_world(2, &config, |comm| {
        let call = Call {
            codec: Some("linear8".parse().unwrap()),
            algorithm: Some(cinch::Algorithm::Direct),
            ..Call::new(Collective::AllReduce, DType::F32, 1 << 20)
        };
        comm.set_costs(costs(1e-6, 1e-9, 1e-9)).unwrap();
        let cheap = passes(&comm.explain(&call).unwrap());
        sum(comm, &call);
        comm.set_costs(costs(10e-3, 1e-9, 1e-9)).unwrap();
        let dear = passes(&comm.explain(&call).unwrap());
        sum(comm, &call);
        assert!(cheap > 4 && dear == 1, "{cheap} and {dear} passes");
    });
}
