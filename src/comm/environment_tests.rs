//! Results do not depend on the floating-point environment of the program, on any rank.

use super::{Call, Communicator, Group};
use crate::config::Config;
use crate::cpu::{self, STRANGE};
use crate::mem::{UserBuffers, bytes_of, bytes_of_mut};
use crate::testing::local_world;
use crate::types::{Algorithm, CodecSpec, Collective, DType, ReduceOp, ScaleRule};

const RANKS: usize = 3;
const COUNT: usize = 1500;

/// Returns subnormal numbers, blocks with a subnormal scale, and values whose sums need rounding.
fn data(rank: usize) -> Vec<f32> {
    let value = |i: usize| {
        let noise = ((i * 7919 + rank * 104_729) % 9973) as f32 - 4986.0;
        let magnitude = [1e-42, 3e-39, 0.37, 1e33][i / 256 % 4];
        noise * magnitude
    };
    (0..COUNT).map(value).collect()
}

/// Returns the ranks' sums by all codecs, alone and in a group. Rank 1 calls with `word` in its
/// floating-point control register.
fn sums(word: Option<u32>) -> Vec<Vec<Vec<u32>>> {
    local_world(RANKS, &Config::default(), |comm| {
        let input = data(comm.rank());
        let run = || {
            let codecs = CodecSpec::samples().into_iter().chain([CodecSpec::RAW]);
            let mut found: Vec<Vec<u32>> = codecs
                .flat_map(|codec| {
                    let flat = match codec.scale {
                        ScaleRule::Tensor { .. } => Algorithm::Direct,
                        _ => Algorithm::OneShot,
                    };
                    [Algorithm::Ring, flat].map(|algorithm| sum(comm, &input, codec, algorithm))
                })
                .collect();
            found.push(grouped(comm, &input));
            found
        };
        match word.filter(|_| comm.rank() == 1) {
            Some(word) => cpu::under(word, run),
            None => run(),
        }
    })
}

fn call(codec: CodecSpec, algorithm: Algorithm) -> Call {
    Call {
        op: ReduceOp::Avg,
        codec: Some(codec.into()),
        algorithm: Some(algorithm),
        ..Call::new(Collective::AllReduce, DType::F32, COUNT)
    }
}

fn bits(values: Vec<f32>) -> Vec<u32> {
    values.into_iter().map(f32::to_bits).collect()
}

fn sum(comm: &Communicator, input: &[f32], codec: CodecSpec, algorithm: Algorithm) -> Vec<u32> {
    let mut output = vec![0f32; COUNT];
    let buffers = UserBuffers::new(bytes_of(input), bytes_of_mut(&mut output));
    let call = Call {
        tensor: Some(1),
        ..call(codec, algorithm)
    };
    comm.call(&call, buffers).unwrap();
    bits(output)
}

fn grouped(comm: &Communicator, input: &[f32]) -> Vec<u32> {
    let mut outputs = [vec![0f32; COUNT], vec![0f32; COUNT]];
    let mut group = Group::new();
    for output in &mut outputs {
        let buffers = UserBuffers::new(bytes_of(input), bytes_of_mut(output));
        let call = call("linear8".parse().unwrap(), Algorithm::OneShot);
        group.add(comm, &call, buffers).unwrap();
    }
    group.run().unwrap();
    bits(outputs.concat())
}

#[test]
fn rounding_mode_of_one_rank_changes_no_bit() {
    let expected = sums(None);
    assert!(expected.iter().all(|rank| *rank == expected[0]));
    let subnormal = |bits: &u32| bits & 0x7f80_0000 == 0 && bits & 0x7f_ffff != 0;
    assert!(
        expected[0]
            .iter()
            .flatten()
            .filter(|bits| subnormal(bits))
            .count()
            > 1000
    );
    for word in STRANGE {
        for (rank, found) in sums(Some(word)).iter().enumerate() {
            for (at, (found, expected)) in found.iter().zip(&expected[0]).enumerate() {
                assert!(found == expected, "rank {rank}, sum {at}, under {word:#x}");
            }
        }
    }
}
