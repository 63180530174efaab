//! Tests of default codecs on communicators of threads: which calls they encode, that ranks agree, and
//! which statistics are counted.

use cinch::comm::{Call, RawReason};
use cinch::config::Origin;
use cinch::mem::UserBuffers;
use cinch::testing::{local_world, try_local_world};
use cinch::{Algorithm, Collective, Communicator, Config, DType, ErrorKind, ReduceOp, UniqueId};

fn config(settings: &[(&str, &str)]) -> Config {
    let mut config = Config::default();
    for (name, value) in settings {
        config.set(name, value, Origin::Environment).unwrap();
    }
    config
}

/// Returns a number that depends on the rank and the index, and that no 8-bit codec represents
/// exactly.
fn datum(rank: usize, at: usize) -> f32 {
    let mixed = (at as u32).wrapping_mul(2_654_435_761) ^ (rank as u32).wrapping_mul(40_503);
    (mixed >> 8) as f32 / (1 << 24) as f32 - 0.5
}

fn input(rank: usize, count: usize) -> Vec<f32> {
    (0..count).map(|at| datum(rank, at)).collect()
}

#[test]
fn calls_without_codec_are_counted_by_reason() {
    let config = config(&[("CINCH_CODEC", "linear8"), ("CINCH_CODEC_MIN_BYTES", "4K")]);
    let stats = local_world(3, &config, |comm| {
        let mut large = input(comm.rank(), 10_000);
        comm.all_reduce_in_place(&mut large, ReduceOp::Sum).unwrap();
        let mut small = input(comm.rank(), 1000);
        comm.all_reduce_in_place(&mut small, ReduceOp::Sum).unwrap();
        comm.all_reduce_in_place(&mut large, ReduceOp::Max).unwrap();
        let mut integers = vec![comm.rank() as i32; 10_000];
        comm.all_reduce_in_place(&mut integers, ReduceOp::Sum)
            .unwrap();
        let mut all = vec![0f32; 30_000];
        comm.all_gather(&large, &mut all).unwrap();
        comm.broadcast(&mut large, 1).unwrap();
        // The input of a single block has fewer bytes than CINCH_CODEC_MIN_BYTES; the input of
        // three blocks has more.
        let mut block = vec![0f32; 400];
        comm.reduce_scatter(&input(comm.rank(), 1200), &mut block, ReduceOp::Avg)
            .unwrap();
        let asked = Call {
            codec: Some("raw".parse().unwrap()),
            ..Call::new(Collective::AllReduce, DType::F32, 2000)
        };
        let mut bytes = vec![0u8; 8000];
        comm.call(&asked, UserBuffers::in_place(&mut bytes, 0, 8000).unwrap())
            .unwrap();
        comm.codec_stats()
    });
    for stats in stats {
        assert_eq!(stats.coded_calls, 2, "{stats:?}");
        for (why, count) in [
            (RawReason::Small, 1),
            (RawReason::Operation, 1),
            (RawReason::DType, 1),
            (RawReason::Collective, 2),
            (RawReason::ByCall, 1),
        ] {
            assert_eq!(stats.exact(why), count, "{why:?} {stats:?}");
        }
        assert_eq!(stats.exact_calls.iter().sum::<u64>(), 6);
        // Two calls sum 44,800 bytes. Every rank sends at least two thirds, of which linear8 saves
        // three quarters.
        assert!(stats.bytes_saved() > 15_000, "{stats:?}");
    }
}

#[test]
fn rules_choose_the_codec_by_name_also_after_a_split() {
    let rules = "dp*=dynamic8:min=0,tp=off";
    let mut config = config(&[("CINCH_CODEC", "linear8"), ("CINCH_CODEC_RULES", rules)]);
    config.comm_name = "dp0".into();
    let ran = local_world(2, &config, |comm| {
        let run = |comm: &Communicator, codec: Option<&str>| {
            let call = Call {
                codec: codec.map(|codec| codec.parse().unwrap()),
                ..Call::new(Collective::AllReduce, DType::F32, 100)
            };
            let mut bytes = vec![0u8; 400];
            let buffers = UserBuffers::in_place(&mut bytes, 0, 400).unwrap();
            comm.call(&call, buffers).unwrap().codec.to_string()
        };
        let named = |name: &str| {
            let mut config = comm.config().clone();
            config.comm_name = name.into();
            let fault = comm.fault().child();
            let split = comm.split_watched(Some(0), 0, config, fault);
            split.unwrap().unwrap()
        };
        let (tp, other) = (named("tp"), named("pp"));
        let same = comm.split(Some(0), 0).unwrap().unwrap();
        let policy = tp.codec_policy().to_string();
        assert!(
            policy.starts_with("compression off") && policy.contains("tp=off"),
            "{policy}"
        );
        [
            run(comm, None),
            run(&same, None),
            run(&other, None),
            run(&tp, None),
            // The codec of a call cannot override the rule `off`.
            run(&tp, Some("cast16")),
            run(&other, Some("cast16")),
        ]
    });
    for codecs in ran {
        assert_eq!(
            codecs,
            [
                "dynamic8:block=256",
                "dynamic8:block=256",
                "linear8:block=256",
                "raw",
                "raw",
                "cast16"
            ]
        );
    }
}

#[test]
fn init_with_different_rules_reports_both() {
    let sets = [
        [("CINCH_CODEC_RULES", "dp*=dynamic8")],
        [("CINCH_CODEC_RULES", "dp=off")],
    ];
    let id = UniqueId::create(&Config::default()).unwrap();
    std::thread::scope(|scope| {
        let ranks: Vec<_> = sets
            .iter()
            .enumerate()
            .map(|(rank, set)| {
                let mut config = config(set);
                config.comm_name = "dp".into();
                let id = &id;
                scope.spawn(move || Communicator::init(id, rank, 2, config))
            })
            .collect();
        for rank in ranks {
            let error = rank.join().unwrap().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
            for part in [
                "rank 0",
                "rank 1",
                "CINCH_CODEC is dynamic8",
                " and off on ",
            ] {
                assert!(error.message().contains(part), "{error}");
            }
        }
    });
    // Ranks with different rules agree if the rules give this communicator the same codec.
    let same = [
        [("CINCH_CODEC_RULES", "dp*=dynamic8,tp=off")],
        [("CINCH_CODEC", "dynamic8")],
    ];
    let id = UniqueId::create(&Config::default()).unwrap();
    std::thread::scope(|scope| {
        for (rank, set) in same.iter().enumerate() {
            let mut config = config(set);
            config.comm_name = "dp".into();
            let id = &id;
            scope.spawn(move || drop(Communicator::init(id, rank, 2, config).unwrap()));
        }
    });
}

/// Samples every k-th call: all ranks must find the same error, and it must have the expected size.
#[test]
fn sampled_calls_measure_the_error_alike_on_all_ranks() {
    for collective in [Collective::AllReduce, Collective::ReduceScatter] {
        let nranks = 4;
        let (count, calls) = (3000, 10);
        let config = config(&[("CINCH_CODEC", "linear8"), ("CINCH_CODEC_SAMPLE", "3")]);
        let stats = local_world(nranks, &config, |comm| {
            for _ in 0..calls {
                match collective {
                    Collective::AllReduce => {
                        let mut data = input(comm.rank(), count);
                        comm.all_reduce_in_place(&mut data, ReduceOp::Sum).unwrap();
                    }
                    _ => {
                        let mut block = vec![0f32; count];
                        let all = input(comm.rank(), count * nranks);
                        comm.reduce_scatter(&all, &mut block, ReduceOp::Avg)
                            .unwrap();
                    }
                }
            }
            comm.codec_stats()
        });
        for one in &stats {
            assert_eq!((one.sampled, one.coded_calls), (4, calls), "{collective}");
            assert!(!one.switched_off);
            assert_eq!(one.worst_error, stats[0].worst_error, "{collective}");
            // Uniform data with a largest magnitude of 0.5 has an RMS of 0.289. Rounding it to
            // steps of 1/254 gives a relative error of 0.0039 per encode.
            assert!((0.002..0.02).contains(&one.worst_error), "{one:?}");
        }
    }
}

/// A call that fails on one rank only must not shift the sampling of that rank.
#[test]
fn rejected_call_is_not_counted_for_sampling() {
    let config = config(&[("CINCH_CODEC", "linear8"), ("CINCH_CODEC_SAMPLE", "2")]);
    let stats = local_world(2, &config, |comm| {
        if comm.rank() == 0 {
            let call = Call {
                algorithm: Some(Algorithm::Tree),
                ..Call::new(Collective::ReduceScatter, DType::F32, 100)
            };
            let mut block = [0u8; 400];
            let refused = comm.call(&call, UserBuffers::new(&[0; 800], &mut block));
            let error = refused.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        }
        for _ in 0..3 {
            let mut data = input(comm.rank(), 100);
            comm.all_reduce_in_place(&mut data, ReduceOp::Sum).unwrap();
        }
        comm.codec_stats()
    });
    for one in stats {
        assert_eq!((one.sampled, one.coded_calls), (2, 3));
    }
}

#[test]
fn sample_beyond_the_bound_switches_the_codec_off_on_all_ranks() {
    for collective in [Collective::AllReduce, Collective::ReduceScatter] {
        let config = config(&[
            ("CINCH_CODEC", "linear8"),
            ("CINCH_CODEC_SAMPLE", "2"),
            ("CINCH_CODEC_BOUND", "1e-6"),
        ]);
        let all = local_world(3, &config, |comm| {
            let exact: Vec<f32> = (0..900)
                .map(|at| (0..3).map(|rank| datum(rank, at)).sum())
                .collect();
            let mut last = Vec::new();
            for _ in 0..3 {
                last = match collective {
                    Collective::AllReduce => {
                        let mut data = input(comm.rank(), 900);
                        comm.all_reduce_in_place(&mut data, ReduceOp::Sum).unwrap();
                        data
                    }
                    _ => {
                        let mut block = vec![0f32; 300];
                        let all = input(comm.rank(), 900);
                        comm.reduce_scatter(&all, &mut block, ReduceOp::Sum)
                            .unwrap();
                        block
                    }
                };
            }
            let from = if last.len() == 900 {
                0
            } else {
                300 * comm.rank()
            };
            for (at, value) in last.iter().enumerate() {
                assert!((value - exact[from + at]).abs() < 1e-6, "{collective} {at}");
            }
            comm.codec_stats()
        });
        for stats in all {
            assert!(stats.switched_off);
            assert_eq!(
                (stats.coded_calls, stats.exact(RawReason::SwitchedOff)),
                (1, 2)
            );
        }
    }
}

#[test]
fn shm_transport_with_shm_disabled_fails() {
    let config = config(&[("CINCH_SHM_DISABLE", "1"), ("CINCH_TRANSPORT", "shm")]);
    for error in try_local_world(2, &config, |comm| comm.map(drop)) {
        let error = error.unwrap_err();
        assert!(error.message().contains("CINCH_SHM_DISABLE=1"), "{error}");
    }
}
