//! Which codecs CUDA kernels have, and what a kernel is told about one.

use super::Random;
use crate::cpu::FloatEnvironment;
use crate::types::{CodecKind, CodecSpec, ScaleRule};

/// The lossy codecs that kernels have too; on GPUs there are no others. Names of kernels, what a
/// GPU refuses and the tests on GPUs follow from this list.
pub const KERNEL_CODECS: [CodecKind; 18] = [
    CodecKind::Linear8,
    CodecKind::Dynamic8,
    CodecKind::Static8,
    CodecKind::Mantissa8,
    CodecKind::CastBf16,
    CodecKind::Cast16,
    CodecKind::MinMax1,
    CodecKind::MinMax2,
    CodecKind::MinMax4,
    CodecKind::MinMax8,
    CodecKind::Trunc8,
    CodecKind::Trunc16,
    CodecKind::Trunc24,
    CodecKind::Fp8E4M3,
    CodecKind::Fp8E5M2,
    CodecKind::TernGrad,
    CodecKind::OneBit,
    CodecKind::Threshold2,
];

/// Those that small and middle messages go through in one fused kernel: the ones that tables are measured
/// for.
pub const FUSED_CODECS: [CodecKind; 3] =
    [CodecKind::Linear8, CodecKind::Dynamic8, CodecKind::MinMax4];

/// What the kernels of a codec have in their names. Widths that differ in nothing but a parameter
/// share kernels.
pub const fn kernel_family(kind: CodecKind) -> &'static str {
    match kind {
        CodecKind::MinMax1 | CodecKind::MinMax2 | CodecKind::MinMax8 => "minmax",
        CodecKind::Trunc8 | CodecKind::Trunc16 | CodecKind::Trunc24 => "trunc",
        _ => kind.name(),
    }
}

/// The same of the kernels for whole arrays: by tables where there are some, which give the same
/// codes for a fifth of the instructions or less.
pub const fn array_family(kind: CodecKind) -> &'static str {
    match kind {
        CodecKind::Dynamic8 => "dynamic8_tabled",
        CodecKind::Static8 => "static8_tabled",
        CodecKind::Mantissa8 => "mantissa8_tabled",
        _ => kernel_family(kind),
    }
}

/// The eight words of `cinch_codec_params` or `cinch_bits_params` (`kernels/codec/params.h`) for
/// a legal spec of one of [`KERNEL_CODECS`], under a tensor rule with the `scale` of the chunk to
/// encode. `draws` are what contributions and what sums draw, where the codec draws; of their
/// places in a message a kernel knows itself.
///
/// A decimal unit is a sum of two fp32 numbers, so that a kernel rounds the values of the table
/// from it as the parser does. `tests/cuda_codecs.rs` holds them to that for every offset.
pub fn kernel_params(spec: CodecSpec, scale: f32, draws: [Random; 2]) -> [u32; 8] {
    let _environment = FloatEnvironment::standard();
    let mut words = [0; 8];
    match spec.scale {
        ScaleRule::Block(block) if spec.kind.has_scale() => words[0] = block.ilog2(),
        ScaleRule::Tensor { .. } if spec.kind.has_scale() => words[1] = scale.to_bits(),
        ScaleRule::Threshold(bits) if spec.kind.has_threshold() => words[1] = bits,
        _ => {}
    }
    words[6] = match spec.kind {
        CodecKind::MinMax1 => 1,
        CodecKind::MinMax2 => 2,
        CodecKind::MinMax4 => 4,
        CodecKind::MinMax8 | CodecKind::Trunc8 => 8,
        CodecKind::Trunc16 => 16,
        CodecKind::Trunc24 => 24,
        _ => 0,
    };
    if spec.kind.has_seed() {
        let [[a, b], [c, d]] = draws.map(|random| random.parts().0);
        words[2..6].copy_from_slice(&[a, b, c, d]);
        words[7] = u32::from(spec.seed != 0);
    }
    let offset = i32::from(spec.offset);
    // The unit of decade 4 and the value that is 1 in a kernel's view of the largest decade.
    let (unit, top) = match spec.kind {
        CodecKind::Static8 => (decimal(125, offset - 6), decimal(1, -(offset + 2))),
        CodecKind::Mantissa8 => (decimal(1, offset - 2), decimal(1, -(offset + 1))),
        _ => return words,
    };
    let below = match spec.kind {
        CodecKind::Static8 => decimal(125, offset - 10),
        _ => decimal(1, offset - 6),
    };
    // Where values are small, the second number of a unit would be subnormal and lose its bits.
    let raise = if offset < 0 { 64 } else { 0 };
    let two = |unit: f64| {
        let raised = unit * 2f64.powi(raise);
        let first = raised as f32;
        [first, (raised - f64::from(first)) as f32].map(f32::to_bits)
    };
    words[2..4].copy_from_slice(&two(unit));
    words[4..6].copy_from_slice(&two(below));
    words[6] = 2f32.powi(-raise).to_bits();
    words[7] = (top as f32).to_bits();
    words
}

/// `digits` times ten to `power`, correctly rounded, which a product would not be.
fn decimal(digits: u32, power: i32) -> f64 {
    format!("{digits}e{power}").parse().unwrap_or(0.0)
}
