//! Soak test of error feedback: residuals of every codec stay within the bound that follows from its stated
//! contraction, over thousands of calls with inputs that attack it.
//!
//! `cargo test --test host feedback_soak -- --ignored --nocapture` runs all combinations.

use cinch::codec::Description;
use cinch::codec::feedback::{Contraction, Norm, contraction};
use cinch::comm::{Call, Group};
use cinch::cpu::Isa;
use cinch::mem::{UserBuffers, bytes_of, bytes_of_mut};
use cinch::testing::{gaussian, local_world, random_word};
use cinch::types::CodecKind;
use cinch::{Algorithm, CodecSpec, Collective, Communicator, Config, DType};

/// Number of elements of a chunk, which is one block of each codec with blocks.
const BLOCK: usize = 32;

/// Number of different inputs of a rank, which the calls use in turn.
const INPUTS: usize = 12;

const CODECS: [&str; 23] = [
    "linear8:block=32",
    "linear8:tensor=7",
    "linear8:block=32:seed=3",
    "dynamic8:block=32",
    "dynamic8:block=32:seed=3",
    "static8",
    "mantissa8",
    "cast_bf16",
    "cast16",
    "minmax1:block=32",
    "minmax2:block=32",
    "minmax2:block=32:seed=3",
    "minmax4:block=32",
    "minmax4:block=32:seed=3",
    "minmax8:block=32",
    "trunc8",
    "trunc16",
    "trunc24",
    "fp8_e4m3:block=32",
    "fp8_e5m2:block=32",
    "terngrad:block=32",
    "onebit:block=32",
    "threshold2:tau=40",
];

#[test]
fn list_has_every_codec() {
    for kind in &CodecKind::ALL[1..] {
        let mut specs = CODECS.iter().map(|text| text.parse::<CodecSpec>().unwrap());
        assert!(specs.any(|spec| spec.kind == *kind), "{kind:?}");
    }
}

/// Returns element `at` of a rank's input, of magnitude at most 1. Every third input is normal, or has a
/// spike that moves, or lies just beside the middle of its range.
fn element(rank: usize, input: usize, at: usize) -> f32 {
    let word = random_word(100 * rank as u64 + input as u64, at as u64);
    let place = at % BLOCK;
    match input % 3 {
        0 => (gaussian(word) / 6.5) as f32,
        1 if place == (input * 5 + at / BLOCK) % BLOCK => 1.0,
        1 => 0.01 * (gaussian(word) / 6.5) as f32,
        _ => match place {
            0 => -0.3,
            1 => 1.0,
            _ => 0.34 + (word % 32) as f32 * 1e-3,
        },
    }
}

/// Largest norms of one tensor over a part of the calls.
#[derive(Clone, Copy, Debug, Default)]
struct Most {
    residual: f64,
    output: f64,
}

/// Runs `calls` calls with every codec of `codecs`, each with its own tensor, in one group. Returns the
/// largest norms in the second and in the last third of the calls, by codec.
fn soak(
    comm: &Communicator,
    algorithm: Algorithm,
    codecs: &[&str],
    calls: usize,
) -> Vec<[Most; 2]> {
    let count = BLOCK * comm.nranks();
    let inputs: Vec<Vec<f32>> = (0..INPUTS)
        .map(|input| {
            (0..count)
                .map(|at| element(comm.rank(), input, at))
                .collect()
        })
        .collect();
    let mut outputs = vec![vec![0f32; count]; codecs.len()];
    let mut most = vec![[Most::default(); 2]; codecs.len()];
    for call in 0..calls {
        let mut group = Group::new();
        for (at, (codec, output)) in codecs.iter().zip(&mut outputs).enumerate() {
            let request = Call {
                codec: Some(codec.parse().unwrap()),
                algorithm: Some(algorithm),
                tensor: Some(1 + at as u64),
                feedback: Some(1 + at as u64),
                ..Call::new(Collective::AllReduce, DType::F32, count)
            };
            let input = &inputs[call % INPUTS];
            let buffers = UserBuffers::new(bytes_of(input), bytes_of_mut(output));
            group.add(comm, &request, buffers).unwrap();
        }
        let reports = group.run().unwrap();
        if call < calls / 3 {
            continue;
        }
        let part = usize::from(call >= calls * 2 / 3);
        for ((report, output), most) in reports.iter().zip(&outputs).zip(&mut most) {
            let most = &mut most[part];
            most.residual = most.residual.max(report.residual_norm.unwrap());
            let largest = output
                .iter()
                .fold(0f64, |most, x| most.max(f64::from(x.abs())));
            assert!(output.iter().all(|x| x.is_finite()));
            most.output = most.output.max(largest);
        }
    }
    most
}

/// Returns the bound of the L2 norm of a rank's residuals that follows from the contraction; infinite if the
/// contraction does not bound sums of bursts or saturating scales.
fn bound(spec: CodecSpec, nranks: usize, algorithm: Algorithm) -> f64 {
    let Contraction { norm, .. } = contraction(spec).unwrap();
    let description: Description = cinch::codec::build(spec, Isa::Scalar)
        .unwrap()
        .unwrap()
        .description();
    let contraction = Contraction {
        // Includes roundings of fp32.
        error: contraction(spec).unwrap().error + 1e-6,
        floor: contraction(spec).unwrap().floor + description.errors.floor,
        ..contraction(spec).unwrap()
    };
    if spec.kind == CodecKind::Threshold2 {
        // Each of the other ranks sends at most the threshold T more in any number of calls than it
        // contributes, and 2 T less.
        let ranks = if algorithm == Algorithm::Direct {
            nranks
        } else {
            return f64::INFINITY;
        };
        return 2.0 * contraction.floor * ranks as f64 * ((BLOCK * nranks) as f64).sqrt();
    }
    if spec.to_string().contains("tensor") {
        return f64::INFINITY;
    }
    // Norm of a block of elements of at most 1.
    let root = (BLOCK as f64).sqrt();
    let own = match norm {
        Norm::Largest => 1.0,
        Norm::Euclidean => root,
    };
    let hops = |received: f64, hops: usize| {
        let add = |sum: f64, _| own + received * contraction.output_bound(sum);
        (0..hops).fold(own, add)
    };
    let last = match algorithm {
        Algorithm::Ring => hops(1.0, nranks - 1),
        Algorithm::Tree => hops(2.0, nranks.ilog2() as usize + 1),
        _ => own + (nranks - 1) as f64 * contraction.output_bound(own),
    };
    let block = match norm {
        Norm::Largest => root * contraction.residual_bound(last),
        // Four times the root of the mean square.
        Norm::Euclidean => 4.0 * contraction.residual_bound(last),
    };
    // A rank has residuals of at most all chunks and of its own sum.
    block * ((nranks + 1) as f64).sqrt()
}

fn check(nranks: usize, algorithm: Algorithm, codecs: &[&str], calls: usize) {
    let config = Config::default();
    let found = local_world(nranks, &config, |comm| soak(comm, algorithm, codecs, calls));
    for (at, codec) in codecs.iter().enumerate() {
        let spec: CodecSpec = codec.parse().unwrap();
        let bound = bound(spec, nranks, algorithm);
        let of = |part: usize| {
            found.iter().fold(Most::default(), |most, rank| Most {
                residual: most.residual.max(rank[at][part].residual),
                output: most.output.max(rank[at][part].output),
            })
        };
        let (before, after) = (of(0), of(1));
        println!(
            "{nranks:2} {algorithm:7} {codec:24} residual {:9.3e} then {:9.3e} of {bound:9.3e}, output {:9.3e}",
            before.residual, after.residual, after.output
        );
        for most in [before, after] {
            assert!(
                most.residual <= bound,
                "{codec} {algorithm} {nranks}: {most:?} of {bound}"
            );
        }
        // Inputs repeat, so residuals that grow would be larger in the last third of the calls.
        assert!(
            after.residual <= 1.5 * before.residual,
            "{codec} {algorithm} {nranks}: {before:?} {after:?}"
        );
    }
}

#[test]
fn residuals_stay_bounded_in_300_calls() {
    check(2, Algorithm::Ring, &CODECS, 300);
    check(
        8,
        Algorithm::Ring,
        &["minmax1:block=32", "terngrad", "onebit:block=32"],
        300,
    );
    check(
        8,
        Algorithm::Direct,
        &["minmax1", "minmax2:seed=3", "terngrad"],
        300,
    );
}

fn check_10000_calls(algorithm: Algorithm) {
    for nranks in [2, 8, 32] {
        check(nranks, algorithm, &CODECS, 10_000);
    }
}

#[test]
#[ignore = "takes minutes"]
fn residuals_on_ring_stay_bounded_in_10000_calls() {
    check_10000_calls(Algorithm::Ring);
}

#[test]
#[ignore = "takes minutes"]
fn residuals_on_tree_stay_bounded_in_10000_calls() {
    check_10000_calls(Algorithm::Tree);
}

#[test]
#[ignore = "takes minutes"]
fn residuals_on_direct_stay_bounded_in_10000_calls() {
    check_10000_calls(Algorithm::Direct);
}

/// With error feedback, a codec that is no contraction is refused before anything moves.
#[test]
fn codec_that_is_no_contraction_is_refused() {
    local_world(2, &Config::default(), |comm| {
        let mut output = [0f32; 64];
        let mut call = Call {
            codec: Some("minmax1:seed=3".parse().unwrap()),
            feedback: Some(1),
            ..Call::new(Collective::AllReduce, DType::F32, 64)
        };
        for is_refused in [true, false] {
            let buffers = UserBuffers::new(bytes_of(&[1f32; 64]), bytes_of_mut(&mut output));
            let ran = comm.call(&call, buffers);
            assert_eq!(ran.is_err(), is_refused);
            if let Err(error) = ran {
                assert!(error.message().contains("1.5 times"), "{error}");
            }
            call.feedback = None;
        }
    });
}
