//! Decoding of every codec, whose wire bytes come from a peer.

use super::input::Input;
use cinch::codec::{Span, build_for};
use cinch::cpu::Isa;
use cinch::{CodecKind, CodecSpec, DType, ScaleRule};

/// Decodes any bytes with a codec of the input. All instruction sets must give the bits of the scalar codec.
pub fn codec_decode(data: &[u8]) -> Option<bool> {
    let mut input = Input(data);
    let mut spec = CodecSpec::of(CodecKind::ALL[input.below(CodecKind::ALL.len())]);
    let parameters = input.u8();
    if parameters & 1 != 0 {
        spec.scale = match input.u8() {
            shift @ 0..=13 => ScaleRule::Block(1 << shift),
            64.. => ScaleRule::Tensor {
                refresh: input.u32(),
            },
            _ => ScaleRule::Threshold(input.u32()),
        };
    }
    if parameters & 2 != 0 {
        spec.offset = input.u8() as i8;
    }
    if parameters & 4 != 0 {
        spec.seed = input.u8();
    }
    let dtype = [DType::F32, DType::F16, DType::BF16][usize::from(parameters >> 3) % 3];
    let elements = usize::from(input.u16()) % 1500 + 1;
    let isas = Isa::available();
    let Ok(scalar) = build_for(spec, dtype, Isa::Scalar) else {
        for isa in isas {
            assert!(
                build_for(spec, dtype, isa).is_err(),
                "{spec} is valid for {isa:?}"
            );
        }
        return None;
    };
    let scalar = scalar?;
    let granule = scalar.granule();
    // A span in the middle of a chunk begins at a multiple of the granule.
    let at = usize::from(input.u8()) * granule;
    let chunk = at + elements;
    let mut wire = input.0.to_vec();
    let has_all = wire.len() >= scalar.wire_bytes(chunk);
    wire.resize(scalar.wire_bytes(chunk), 0x5a);
    let span = Span::new(chunk, at);
    let start = |index: usize| index as f32 * 0.25 - 3.0;
    let run = |isa| {
        let codec = build_for(spec, dtype, isa).ok().flatten();
        let codec = codec.expect("a codec for one instruction set only");
        let mut plain = vec![7.0_f32; elements];
        codec.decode(span, &wire, &mut plain);
        let mut sums: Vec<f32> = (0..elements).map(start).collect();
        codec.decode_reduce(span, &wire, &mut sums);
        let bits = plain.into_iter().chain(sums).map(f32::to_bits);
        bits.collect::<Vec<u32>>()
    };
    let expected = run(Isa::Scalar);
    for isa in isas {
        assert!(
            run(isa) == expected,
            "{spec} {dtype} {isa:?}: other bits than the scalar codec"
        );
    }
    has_all.then_some(at > 0 && dtype != DType::F16)
}
