//! Compares element types and reduction arithmetic of the CUDA headers with the scalar
//! specification.

use super::host::{Bytes, all};
use crate::support::{Rng, seed};
use cinch::cpu::{Isa, Tile};
use cinch::reduce::{Reducer, narrow, widen};
use cinch::types::Scalar;
use cinch::{DType, ReduceOp};

/// Returns the types whose arithmetic is in fp32, after conversion.
fn narrow_types() -> impl Iterator<Item = DType> {
    let in_fp32 = |dtype: &DType| dtype.accumulator() == DType::F32 && *dtype != DType::F32;
    DType::ALL.into_iter().filter(in_fp32)
}

#[test]
fn small_floats_of_all_bits_convert_as_specified() {
    let mut random = Rng(seed());
    let mut wide: Vec<f32> = (0..=u16::MAX)
        .flat_map(|upper| {
            [
                0u32, 1, 0xfff, 0x1000, 0x1001, 0x7fff, 0x8000, 0x8001, 0xffff,
            ]
            .map(|lower| f32::from_bits(u32::from(upper) << 16 | lower))
        })
        .collect();
    wide.extend((0..1 << 18).map(|_| f32::from_bits(random.next() as u32)));
    for (compiler, host) in all().iter().filter(|(_, host)| !host.second) {
        for dtype in narrow_types() {
            let codes: Vec<u8> = match dtype.size() {
                1 => (0..=u8::MAX).collect(),
                _ => (0..=u16::MAX).flat_map(u16::to_le_bytes).collect(),
            };
            let mut expected = vec![0f32; codes.len() / dtype.size()];
            widen(dtype, Isa::Scalar, &codes, &mut expected);
            let found = host.widen(dtype, &Bytes::from(&codes));
            // Compares bits, so that NaNs must be equal too.
            for (i, (a, b)) in expected.iter().zip(&found).enumerate() {
                assert_eq!(a.to_bits(), b.to_bits(), "{dtype} {i:#x} by {compiler}");
            }
            let mut expected = vec![0; wide.len() * dtype.size()];
            narrow(dtype, Isa::Scalar, &wide, &mut expected);
            let found = host.narrow(dtype, &wide);
            let size = dtype.size();
            for (i, x) in wide.iter().enumerate() {
                let of = |bytes: &[u8]| bytes[i * size..(i + 1) * size].to_vec();
                let (a, b) = (of(&expected), of(found.slice()));
                assert_eq!(a, b, "{dtype} of {:#x} by {compiler}", x.to_bits());
            }
        }
    }
}

/// Returns elements that are difficult to round: random bits, small integers, values of one
/// magnitude, and special values.
fn data(dtype: DType, n: usize, random: &mut Rng) -> Bytes {
    let mut bytes = Bytes::new(n * dtype.size(), 0);
    let special64 = [
        f64::NAN,
        f64::INFINITY,
        f64::NEG_INFINITY,
        0.0,
        -0.0,
        1.0,
        f64::MIN_POSITIVE,
        f64::MAX,
    ];
    for element in bytes.slice_mut().chunks_exact_mut(dtype.size()) {
        let bits = random.next();
        let pick = special64[random.below(8)];
        let raw = match (random.below(4), dtype) {
            (0, DType::F64) => pick.to_bits(),
            (0, DType::F32) => (pick as f32).to_bits().into(),
            (0, DType::F16) => half::f16::from_f64_const(pick).to_bits().into(),
            (0, DType::BF16) => half::bf16::from_f64_const(pick).to_bits().into(),
            (1, DType::F64) => ((bits % 17) as f64 - 8.0).to_bits(),
            (1, DType::F32) => ((bits % 17) as f32 - 8.0).to_bits().into(),
            (1, _) if !dtype.is_float() => {
                [0, 1, u64::MAX, 1 << (8 * dtype.size() - 1), 7][bits as usize % 5]
            }
            _ => bits,
        };
        element.copy_from_slice(&raw.to_le_bytes()[..dtype.size()]);
    }
    bytes
}

fn assert_equal(dtype: DType, op: &str, compiler: &str, expected: &[u8], found: &[u8]) {
    for (i, (a, b)) in expected
        .chunks(dtype.size())
        .zip(found.chunks(dtype.size()))
        .enumerate()
    {
        assert_eq!(a, b, "{op} of {dtype}, element {i}, by {compiler}");
    }
}

#[test]
fn reductions_of_every_type_equal_the_specification() {
    let mut random = Rng(seed());
    const N: usize = 1 << 16;
    for dtype in DType::ALL {
        let (a, b) = (data(dtype, N, &mut random), data(dtype, N, &mut random));
        let mut tile = Tile::new(N);
        for (compiler, host) in all().iter().filter(|(_, host)| !host.second) {
            let ops = [ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Max, ReduceOp::Min];
            for op in ops {
                let reducer = Reducer::new(dtype, op, Isa::Scalar).unwrap();
                let mut expected = vec![0; a.slice().len()];
                reducer.pair(a.slice(), b.slice(), &mut expected);
                let found = host.element(dtype, op.number().into(), 0, &a, &b);
                assert_equal(dtype, op.name(), compiler, &expected, found.slice());
            }
            for scalar in [0.3, -7.0, 0.0, f64::MAX] {
                let scalar = match dtype.is_float() {
                    true => Scalar::Float(scalar),
                    false => Scalar::Int(scalar as i64 as i128),
                };
                let op = ReduceOp::PreMulSum(scalar);
                let reducer = Reducer::new(dtype, op, Isa::Scalar).unwrap();
                let word = match (scalar, dtype.accumulator()) {
                    (Scalar::Int(factor), _) => factor as u64,
                    (Scalar::Float(factor), DType::F64) => factor.to_bits(),
                    (Scalar::Float(factor), _) => (factor as f32).to_bits().into(),
                    (Scalar::Device(_), _) => unreachable!("no case has one"),
                };
                reducer.load(a.slice(), &mut tile);
                let mut expected = vec![0; a.slice().len()];
                reducer.store(&tile, &mut expected);
                let found = host.element(dtype, 4, word, &a, &b);
                assert_equal(dtype, "premulsum", compiler, &expected, found.slice());
            }
            for nranks in [1usize, 2, 3, 7, 8, 100, 1000] {
                let reducer = Reducer::new(dtype, ReduceOp::Avg, Isa::Scalar).unwrap();
                reducer.load(a.slice(), &mut tile);
                reducer.finish(&mut tile, N, nranks);
                let mut expected = vec![0; a.slice().len()];
                reducer.store(&tile, &mut expected);
                let found = host.element(dtype, 5, nranks as u64, &a, &b);
                assert_equal(dtype, "avg", compiler, &expected, found.slice());
                if dtype.accumulator() != DType::F32 {
                    continue;
                }
                let shift = nranks.next_power_of_two().ilog2() + 1;
                let reducer = Reducer::averaging(dtype, shift, Isa::Scalar).unwrap();
                reducer.load(a.slice(), &mut tile);
                reducer.finish(&mut tile, N, nranks);
                reducer.store(&tile, &mut expected);
                let factor = u64::from(cinch::reduce::scale_of(shift).to_bits());
                let found = host.element(dtype, 5, factor << 32 | nranks as u64, &a, &b);
                assert_equal(dtype, "scaled avg", compiler, &expected, found.slice());
            }
            let reducer = Reducer::new(dtype, ReduceOp::Avg, Isa::Scalar).unwrap();
            let mut expected = vec![0; a.slice().len()];
            reducer.load(a.slice(), &mut tile);
            reducer.combine(b.slice(), &mut tile);
            reducer.limit(&mut tile, N);
            reducer.store(&tile, &mut expected);
            let found = host.element(dtype, 7, 0, &a, &b);
            assert_equal(dtype, "partial avg", compiler, &expected, found.slice());
            let found = host.element(dtype, 6, 0, &a, &b);
            let reducer = Reducer::new(dtype, ReduceOp::Sum, Isa::Scalar).unwrap();
            reducer.load(a.slice(), &mut tile);
            let mut expected = vec![0; a.slice().len()];
            reducer.store(&tile, &mut expected);
            assert_equal(dtype, "load and store", compiler, &expected, found.slice());
        }
    }
}
