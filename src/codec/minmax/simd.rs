//! Vector form of the minmax codecs, by arithmetic without a table.

use super::super::blocked::{Numbers, load_any};
use super::super::simd::{Lanes, WIDEST};
use super::{Decoder, Encoder};

/// 2^23. From here on all fp32 numbers are integers, so that adding it rounds to an integer, half
/// to even.
const INTEGERS: f32 = 8_388_608.0;

/// Returns the smallest and the largest element. The last vector is padded with the first element, which
/// changes neither.
#[inline(always)]
pub(super) fn fit<L: Lanes>(lanes: L, x: &[f32]) -> Numbers {
    let first = lanes.splat(x[0]);
    // Two accumulators for each extreme, so that a comparison need not wait for the one before it.
    let (mut low, mut high) = ([first; 2], [first; 2]);
    let mut pairs = x.chunks_exact(2 * L::N);
    for pair in &mut pairs {
        let (a, b) = (lanes.load(pair), lanes.load(&pair[L::N..]));
        low = [lanes.min(low[0], a), lanes.min(low[1], b)];
        high = [lanes.max(high[0], a), lanes.max(high[1], b)];
    }
    for rest in pairs.remainder().chunks(L::N) {
        let a = if rest.len() == L::N {
            load_any(lanes, rest)
        } else {
            let mut filled = [x[0]; WIDEST];
            filled[..rest.len()].copy_from_slice(rest);
            lanes.load(&filled)
        };
        low[0] = lanes.min(low[0], a);
        high[0] = lanes.max(high[0], a);
    }
    let (mut lows, mut highs) = ([0.0; WIDEST], [0.0; WIDEST]);
    lanes.store(lanes.min(low[0], low[1]), &mut lows);
    lanes.store(lanes.max(high[0], high[1]), &mut highs);
    let (mut low, mut high) = (lows[0], highs[0]);
    for i in 1..L::N {
        low = low.min(lows[i]);
        high = high.max(highs[i]);
    }
    [low + 0.0, high + 0.0]
}

#[inline(always)]
pub(super) fn code<L: Lanes>(lanes: L, encoder: Encoder, x: L::F) -> L::I {
    let integers = lanes.splat(INTEGERS);
    let sum = lanes.add(place(lanes, encoder, x), integers);
    lanes.sub_i(lanes.bits(sum), lanes.bits(integers))
}

#[inline(always)]
pub(super) fn draw<L: Lanes>(lanes: L, encoder: Encoder, x: L::F, u: L::F, levels: i32) -> L::I {
    let place = place(lanes, encoder, x);
    let below = lanes.truncate(place);
    let fraction = lanes.sub(place, lanes.convert(below));
    let above = lanes.add_i(below, lanes.splat_i(1));
    let code = lanes.select_i(lanes.gt(fraction, u), above, below);
    lanes.min_i(code, lanes.splat_i(levels))
}

#[inline(always)]
fn place<L: Lanes>(lanes: L, encoder: Encoder, x: L::F) -> L::F {
    let raised = lanes.mul(x, lanes.splat(encoder.raise));
    let above = lanes.sub(raised, lanes.splat(encoder.low));
    lanes.mul(above, lanes.splat(encoder.factor))
}

#[inline(always)]
pub(super) fn value<L: Lanes>(lanes: L, decoder: Decoder, code: L::I) -> L::F {
    let (gap, low) = (lanes.splat(decoder.gap), lanes.splat(decoder.low));
    let raised = lanes.fma(lanes.convert(code), gap, low);
    let value = lanes.mul(raised, lanes.splat(decoder.lower));
    lanes.add(value, lanes.splat(0.0))
}
