//! Loops over the elements of a tile, written once for every format and operator. `simd` compiles them for
//! each instruction set, and the compiler vectorises them. Elements are independent of each other, so that
//! any vector width gives equal bits.

use super::Observation;
use super::format::Format;
use super::number::{Number, Operator};
use crate::cpu::Tile;

/// Number of elements of a scratch block: 1 KiB, which fits the first-level cache beside the tile.
const BLOCK: usize = 256;

/// Number of partial sums of [`observe`]. It determines the order of additions, and so the bits of
/// the result.
const LANES: usize = 16;

#[inline(always)]
pub(super) fn load<F: Format>(src: &[u8], acc: &mut Tile, _: u64) {
    let raw = F::raw(src);
    F::widen_slice(raw, acc.view_mut(raw.len()));
}

#[inline(always)]
pub(super) fn load_scaled<F: Format>(src: &[u8], acc: &mut Tile, factor: u64) {
    load::<F>(src, acc, factor);
    let factor = F::Accumulator::from_word(factor);
    for number in acc.view_mut::<F::Accumulator>(F::raw(src).len()) {
        *number = number.prod(factor);
    }
}

#[inline(always)]
pub(super) fn combine<F: Format, O: Operator>(src: &[u8], acc: &mut Tile) {
    let raw = F::raw(src);
    let acc = acc.view_mut::<F::Accumulator>(raw.len());
    if !F::BLOCKED {
        for (number, raw) in acc.iter_mut().zip(raw) {
            *number = O::apply(*number, F::widen(*raw));
        }
        return;
    }
    let mut scratch = [F::Accumulator::from_word(0); BLOCK];
    for (acc, raw) in acc.chunks_mut(BLOCK).zip(raw.chunks(BLOCK)) {
        let wide = &mut scratch[..raw.len()];
        F::widen_slice(raw, wide);
        for (number, wide) in acc.iter_mut().zip(wide) {
            *number = O::apply(*number, *wide);
        }
    }
}

/// Sets dst = a op b in one pass. The result equals `load`, then `combine`, then `store`.
#[inline(always)]
pub(super) fn pair<F: Format, O: Operator>(a: &[u8], b: &[u8], dst: &mut [u8]) {
    let (a, b, dst) = (F::raw(a), F::raw(b), F::raw_mut(dst));
    assert!(
        a.len() == dst.len() && b.len() == dst.len(),
        "elements in and out"
    );
    if !F::BLOCKED {
        for ((dst, a), b) in dst.iter_mut().zip(a).zip(b) {
            *dst = F::narrow(O::apply(F::widen(*a), F::widen(*b)));
        }
        return;
    }
    let zero = F::Accumulator::from_word(0);
    let (mut sum, mut other) = ([zero; BLOCK], [zero; BLOCK]);
    for ((dst, a), b) in dst
        .chunks_mut(BLOCK)
        .zip(a.chunks(BLOCK))
        .zip(b.chunks(BLOCK))
    {
        let (sum, other) = (&mut sum[..dst.len()], &mut other[..dst.len()]);
        F::widen_slice(a, sum);
        F::widen_slice(b, other);
        for (sum, other) in sum.iter_mut().zip(other) {
            *sum = O::apply(*sum, *other);
        }
        F::narrow_slice(sum, dst);
    }
}

/// Sets dst = dst op b in one pass.
#[inline(always)]
pub(super) fn assign<F: Format, O: Operator>(dst: &mut [u8], b: &[u8]) {
    let (dst, b) = (F::raw_mut(dst), F::raw(b));
    assert!(b.len() == dst.len(), "elements in and out");
    if !F::BLOCKED {
        for (dst, b) in dst.iter_mut().zip(b) {
            *dst = F::narrow(O::apply(F::widen(*dst), F::widen(*b)));
        }
        return;
    }
    let zero = F::Accumulator::from_word(0);
    let (mut sum, mut other) = ([zero; BLOCK], [zero; BLOCK]);
    for (dst, b) in dst.chunks_mut(BLOCK).zip(b.chunks(BLOCK)) {
        let (sum, other) = (&mut sum[..dst.len()], &mut other[..dst.len()]);
        F::widen_slice(dst, sum);
        F::widen_slice(b, other);
        for (sum, other) in sum.iter_mut().zip(other) {
            *sum = O::apply(*sum, *other);
        }
        F::narrow_slice(sum, dst);
    }
}

#[inline(always)]
pub(super) fn divide<F: Format>(acc: &mut Tile, n: usize, nranks: usize) {
    let by = F::Accumulator::divisor(nranks);
    for number in acc.view_mut::<F::Accumulator>(n) {
        *number = number.divide(by);
    }
}

/// Limits the finite numbers among the first `n` to a magnitude of at most `most`, and divides by `divisor`.
#[inline(always)]
pub(super) fn average(acc: &mut Tile, n: usize, divisor: f32, most: f32) {
    for number in acc.view_mut::<f32>(n) {
        let beyond = number.is_finite() && number.abs() > most;
        let limited = if beyond {
            most.copysign(*number)
        } else {
            *number
        };
        *number = limited.divide(divisor);
    }
}

#[inline(always)]
pub(super) fn store<F: Format>(acc: &Tile, dst: &mut [u8]) {
    let raw = F::raw_mut(dst);
    F::narrow_slice(acc.view(raw.len()), raw);
}

#[inline(always)]
pub(super) fn widen<F: Format<Accumulator = f32>>(src: &[u8], dst: &mut [f32]) {
    let raw = F::raw(src);
    assert_eq!(raw.len(), dst.len(), "elements in and out");
    F::widen_slice(raw, dst);
}

#[inline(always)]
pub(super) fn narrow<F: Format<Accumulator = f32>>(src: &[f32], dst: &mut [u8]) {
    let raw = F::raw_mut(dst);
    assert_eq!(src.len(), raw.len(), "elements in and out");
    F::narrow_slice(src, raw);
}

#[inline(always)]
pub(super) fn observe(src: &[f32]) -> Observation {
    let mut squares = [0f64; LANES];
    let mut largest = [0u32; LANES];
    let mut non_finite = [0u64; LANES];
    let mut add = |lane: usize, x: f32| {
        let magnitude = x.to_bits() & 0x7fff_ffff;
        let finite = magnitude < 0x7f80_0000;
        let kept = if finite { magnitude } else { 0 };
        let x = f64::from(f32::from_bits(kept));
        squares[lane] += x * x;
        // The bits of non-negative floats, as integers, are ordered like the floats.
        largest[lane] = largest[lane].max(kept);
        non_finite[lane] += u64::from(!finite);
    };
    let (chunks, tail) = src.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, &x) in chunk.iter().enumerate() {
            add(lane, x);
        }
    }
    for (lane, &x) in tail.iter().enumerate() {
        add(lane, x);
    }
    Observation {
        non_finite: non_finite.iter().sum(),
        abs_max: f32::from_bits(largest.into_iter().fold(0, u32::max)),
        sum_squares: squares.iter().sum(),
    }
}
