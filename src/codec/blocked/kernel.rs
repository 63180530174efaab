//! The loops over blocks; what differs between scalar and vector form is a [`Part`].

use super::super::pack::{code_bytes, load, load_part, put, store, store_part, take};
use super::super::simd::{Kernel, Lanes, WIDEST, abs_bits, load_part as load_floats};
use super::super::stats::scan_slowly;
use super::super::wire::{read_scale, write_scale};
use super::super::{EncodeStats, Random};
use super::{BlockFormat, Numbers};
use std::marker::PhantomData;

/// Bits of infinity: magnitudes from here up are not finite.
const INFINITE: u32 = 0x7f80_0000;

/// The inner loops of one block. Implementations are `#[inline(always)]`.
trait Part<F: BlockFormat> {
    /// Bits of the largest magnitude (NaN above infinity), and the sum of squares if asked for.
    fn scan<const SQUARES: bool>(&self, x: &[f32]) -> (u32, f64);
    fn fit(&self, x: &[f32]) -> Numbers;
    /// Encodes; what is drawn is for the first element of `x`.
    fn encode<const DRAW: bool>(
        &self,
        x: &[f32],
        encoder: F::Encoder,
        random: Random,
        codes: &mut [u8],
    );
    fn decode<const REDUCE: bool>(&self, codes: &[u8], decoder: F::Decoder, dst: &mut [f32]);
}

/// Encodes a span.
pub(super) struct Encode<'a, F> {
    pub format: PhantomData<F>,
    pub block: usize,
    /// Number of the span's first block in the chunk.
    pub first_block: usize,
    /// Number of the span's first element in the chunk.
    pub first: usize,
    /// What is drawn, if anything is.
    pub random: Option<Random>,
    pub src: &'a [f32],
    pub codes: &'a mut [u8],
    pub numbers: &'a mut [u8],
    pub stats: Option<&'a mut EncodeStats>,
}

impl<F: BlockFormat> Kernel for Encode<'_, F> {
    type Output = ();

    fn scalar(self) {
        self.run(ScalarPart);
    }

    #[inline(always)]
    fn vector<L: Lanes>(self, lanes: L) {
        self.run(VectorPart { lanes });
    }
}

impl<F: BlockFormat> Encode<'_, F> {
    #[inline(always)]
    fn run<P: Part<F>>(self, part: P) {
        match self.stats.is_some() {
            true => self.blocks::<P, true>(part),
            false => self.blocks::<P, false>(part),
        }
    }

    #[inline(always)]
    fn blocks<P: Part<F>, const STATS: bool>(self, part: P) {
        let mut stats = EncodeStats::default();
        let codes = self.codes.chunks_mut(code_bytes(self.block, F::BITS));
        for (index, (x, codes)) in self.src.chunks(self.block).zip(codes).enumerate() {
            let (max_bits, squares) = part.scan::<STATS>(x);
            let finite = max_bits < INFINITE;
            if STATS && finite {
                stats.abs_max = stats.abs_max.max(f32::from_bits(max_bits));
                stats.sum_squares += squares;
            } else if STATS {
                stats.merge(&scan_slowly(x));
            }
            let numbers = match finite {
                true => part.fit(x),
                false => [f32::NAN; 2],
            };
            for (which, &number) in numbers[..F::NUMBERS].iter().enumerate() {
                let at = (self.first_block + index) * F::NUMBERS + which;
                write_scale(self.numbers, at, number);
            }
            let encoder = F::encoder(numbers);
            match self.random {
                _ if !finite => codes.fill(0),
                Some(random) => {
                    let random = random.from(self.first + index * self.block);
                    part.encode::<true>(x, encoder, random, codes);
                }
                None => part.encode::<false>(x, encoder, Random::default(), codes),
            }
        }
        if let Some(total) = self.stats {
            total.merge(&stats);
        }
    }
}

/// Decodes a span into `dst`, or adds it to `dst`.
pub(super) struct Decode<'a, F, const REDUCE: bool> {
    pub format: PhantomData<F>,
    pub block: usize,
    pub first_block: usize,
    pub codes: &'a [u8],
    pub numbers: &'a [u8],
    pub dst: &'a mut [f32],
}

impl<F: BlockFormat, const REDUCE: bool> Kernel for Decode<'_, F, REDUCE> {
    type Output = ();

    fn scalar(self) {
        self.run(ScalarPart);
    }

    #[inline(always)]
    fn vector<L: Lanes>(self, lanes: L) {
        self.run(VectorPart { lanes });
    }
}

impl<F: BlockFormat, const REDUCE: bool> Decode<'_, F, REDUCE> {
    #[inline(always)]
    fn run<P: Part<F>>(self, part: P) {
        let codes = self.codes.chunks(code_bytes(self.block, F::BITS));
        for (index, (codes, dst)) in codes.zip(self.dst.chunks_mut(self.block)).enumerate() {
            let mut numbers = [0.0; 2];
            for (which, number) in numbers[..F::NUMBERS].iter_mut().enumerate() {
                let at = (self.first_block + index) * F::NUMBERS + which;
                *number = read_scale(self.numbers, at);
            }
            match numbers.iter().all(|number| number.is_finite()) {
                true => part.decode::<REDUCE>(codes, F::decoder(numbers), dst),
                false => dst.fill(f32::NAN),
            }
        }
    }
}

/// The specification.
struct ScalarPart;

impl<F: BlockFormat> Part<F> for ScalarPart {
    #[inline(always)]
    fn scan<const SQUARES: bool>(&self, x: &[f32]) -> (u32, f64) {
        let bits = x.iter().map(|x| x.to_bits() & 0x7fff_ffff);
        let squares = x.iter().map(|&x| f64::from(x) * f64::from(x));
        let squares = if SQUARES { squares.sum() } else { 0.0 };
        (bits.max().unwrap_or(0), squares)
    }

    #[inline(always)]
    fn fit(&self, x: &[f32]) -> Numbers {
        F::fit(x)
    }

    #[inline(always)]
    fn encode<const DRAW: bool>(
        &self,
        x: &[f32],
        encoder: F::Encoder,
        random: Random,
        codes: &mut [u8],
    ) {
        codes.fill(0);
        for (i, &x) in x.iter().enumerate() {
            let code = match DRAW {
                true => F::draw(encoder, x, random.fraction(i)),
                false => F::code(encoder, x),
            };
            put(F::BITS, codes, i, code);
        }
    }

    #[inline(always)]
    fn decode<const REDUCE: bool>(&self, codes: &[u8], decoder: F::Decoder, dst: &mut [f32]) {
        for (i, out) in dst.iter_mut().enumerate() {
            let value = F::value(decoder, take(F::BITS, codes, i));
            *out = if REDUCE { *out + value } else { value };
        }
    }
}

/// The same, [`Lanes::N`] elements at a time; tails go through buffers that zeros fill up.
struct VectorPart<L> {
    lanes: L,
}

impl<F: BlockFormat, L: Lanes> Part<F> for VectorPart<L> {
    #[inline(always)]
    fn scan<const SQUARES: bool>(&self, x: &[f32]) -> (u32, f64) {
        let lanes = self.lanes;
        let mut most = lanes.splat_i(0);
        let mut sum = lanes.zero_sum();
        for x in x.chunks(L::N) {
            let x = load_any(lanes, x);
            most = lanes.max_i(most, abs_bits(lanes, x));
            if SQUARES {
                sum = lanes.add_squares(sum, x);
            }
        }
        let squares = if SQUARES { lanes.total(sum) } else { 0.0 };
        (lanes.reduce_max(most) as u32, squares)
    }

    #[inline(always)]
    fn fit(&self, x: &[f32]) -> Numbers {
        F::fit_lanes(self.lanes, x)
    }

    #[inline(always)]
    fn encode<const DRAW: bool>(
        &self,
        x: &[f32],
        encoder: F::Encoder,
        random: Random,
        codes: &mut [u8],
    ) {
        let lanes = self.lanes;
        let codes = codes.chunks_mut(code_bytes(L::N, F::BITS));
        for (index, (part, to)) in x.chunks(L::N).zip(codes).enumerate() {
            let x = load_any(lanes, part);
            let code = if DRAW {
                let u = random.fractions(lanes, index * L::N);
                F::draw_lanes(lanes, encoder, x, u)
            } else {
                F::code_lanes(lanes, encoder, x)
            };
            match part.len() == L::N {
                true => store(F::BITS, lanes, code, to),
                false => store_part(F::BITS, lanes, code, part.len(), to),
            }
        }
    }

    #[inline(always)]
    fn decode<const REDUCE: bool>(&self, codes: &[u8], decoder: F::Decoder, dst: &mut [f32]) {
        let lanes = self.lanes;
        let codes = codes.chunks(code_bytes(L::N, F::BITS));
        for (codes, out) in codes.zip(dst.chunks_mut(L::N)) {
            let code = match out.len() == L::N {
                true => load(F::BITS, lanes, codes),
                false => load_part(F::BITS, lanes, codes),
            };
            let value = F::value_lanes(lanes, decoder, code);
            let sum = match REDUCE {
                true => lanes.add(load_any(lanes, out), value),
                false => value,
            };
            if out.len() == L::N {
                lanes.store(sum, out);
            } else {
                let mut buffer = [0.0; WIDEST];
                lanes.store(sum, &mut buffer);
                out.copy_from_slice(&buffer[..out.len()]);
            }
        }
    }
}

/// A whole vector, or what there is of it and zeros.
#[inline(always)]
pub(in super::super) fn load_any<L: Lanes>(lanes: L, x: &[f32]) -> L::F {
    match x.len() == L::N {
        true => lanes.load(x),
        false => load_floats(lanes, x),
    }
}
