//! Compares vector forms with the scalar form on inputs that random tests might miss.

use super::*;

#[test]
fn vector_form_on_all_16_bit_values_equals_the_scalar_form() {
    let bf16 = (0..=u16::MAX).map(|bits| half::bf16::from_bits(bits).to_f32());
    let f16 = (0..=u16::MAX).map(|bits| half::f16::from_bits(bits).to_f32_const());
    let mut finite: Vec<f32> = bf16
        .clone()
        .chain(f16.clone())
        .filter(|x| x.is_finite())
        .collect();
    // After sorting, the elements of a block have similar magnitudes. Otherwise all but the largest would
    // become 0.
    finite.sort_by(|a, b| a.abs().total_cmp(&b.abs()));
    let mut shuffled = finite.clone();
    let mut random = TestRandom(5);
    (1..shuffled.len()).for_each(|i| shuffled.swap(i, random.below(i + 1)));
    let inputs = [bf16.collect(), f16.collect(), finite, shuffled];
    for spec in specs() {
        let scalar = codec(&spec, Isa::Scalar);
        for x in &inputs {
            let (wire, stats) = encode(&*scalar, x);
            let y = decode(&*scalar, &wire, x.len());
            for isa in Isa::available() {
                let vector = codec(&spec, isa);
                let (found, looked) = encode(&*vector, x);
                assert!(found == wire, "{spec} {isa:?}");
                assert!(
                    same(&decode(&*vector, &wire, x.len()), &y),
                    "{spec} {isa:?}"
                );
                let parts = |s: &EncodeStats| (s.abs_max, s.non_finite, s.saturated);
                assert_eq!(parts(&looked), parts(&stats), "{spec} {isa:?}");
            }
        }
    }
}

#[test]
fn any_bytes_decode_alike_without_a_panic() {
    let mut random = TestRandom(6);
    let scales = [
        0.0f32,
        -0.0,
        f32::NAN,
        f32::INFINITY,
        f32::NEG_INFINITY,
        -1.0,
        1e-42,
        -1e-35,
        1e-31,
        f32::MAX,
    ];
    for spec in specs() {
        for n in [1, 40, 1000] {
            let scalar = codec(&spec, Isa::Scalar);
            let description = scalar.description();
            let codes = (n * description.code_bits).div_ceil(8);
            let mut wire: Vec<u8> = (0..scalar.wire_bytes(n))
                .map(|_| random.next() as u8)
                .collect();
            let at = wire.len() - wire.len() % 4;
            for scale in scales {
                if description.block_numbers > 0 {
                    for bytes in wire[codes.next_multiple_of(16)..at].chunks_exact_mut(4) {
                        bytes.copy_from_slice(&scale.to_le_bytes());
                    }
                }
                let y = decode(&*scalar, &wire, n);
                let acc: Vec<f32> = (0..n).map(|_| random.unit()).collect();
                let mut sum = acc.clone();
                scalar.decode_reduce(Span::whole(n), &wire, &mut sum);
                for isa in Isa::available() {
                    let vector = codec(&spec, isa);
                    assert!(same(&decode(&*vector, &wire, n), &y), "{spec} {isa:?}");
                    let mut found = acc.clone();
                    vector.decode_reduce(Span::whole(n), &wire, &mut found);
                    assert!(same(&found, &sum), "{spec} {isa:?}");
                }
            }
        }
    }
}

#[test]
fn dynamic8_vectors_at_every_threshold_equal_the_scalar_form() {
    // With a tensor scale of 1 the factor is 1, so that each element is looked up unchanged.
    let magnitudes = super::super::table::Magnitudes::new(std::array::from_fn(|code| {
        let scalar = codec("dynamic8:tensor=1", Isa::Scalar);
        let mut wire = vec![0; 20];
        wire[0] = code as u8;
        wire[16..].copy_from_slice(&1f32.to_le_bytes());
        decode(&*scalar, &wire, 1)[0]
    }));
    let around = magnitudes
        .thresholds()
        .iter()
        .chain(magnitudes.sorted())
        .flat_map(|t| {
            let bits = t.to_bits() as i32;
            (-64..=64).map(move |step| f32::from_bits((bits + step).max(0) as u32))
        });
    let one = 1f32.to_bits();
    // Optimised builds test every bit pattern; debug builds test every 509th.
    let step = if cfg!(debug_assertions) { 509 } else { 1 };
    let dense = (0..=one).step_by(step).map(f32::from_bits);
    let mut x: Vec<f32> = Vec::with_capacity(1 << 16);
    let check = |x: &[f32]| {
        let x: Vec<f32> = x.iter().map(|x| x.min(1.0)).collect();
        let span = Span::whole(x.len());
        let codes = |isa| {
            let codec = codec("dynamic8:tensor=1", isa);
            let mut wire = vec![0; codec.wire_bytes(x.len())];
            codec.encode(span, &x, Some(1.0), &mut wire, None);
            wire
        };
        let scalar = codes(Isa::Scalar);
        for (x, &code) in x.iter().zip(&scalar) {
            debug_assert_eq!(code, magnitudes.nearest(*x));
        }
        for isa in Isa::available() {
            assert!(codes(isa) == scalar, "{isa:?} from {:e}", x[0]);
        }
    };
    for y in around.chain(dense) {
        x.push(y);
        if x.len() == 1 << 16 {
            check(&x);
            x.clear();
        }
    }
    check(&x);
}
