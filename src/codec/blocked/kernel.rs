//! Loops over the blocks of a span. [`BlockLoops`] holds the inner loops over one block, in scalar
//! and in vector form.

use super::super::pack::{code_bytes, load, load_part, put, store, store_packed, store_part, take};
use super::super::simd::{Lanes, SimdKernel, WIDEST, abs_bits, four, load_part as load_floats};
use super::super::stats::scan_slowly;
use super::super::wire::{read_number, write_number};
use super::super::{EncodeStats, RoundingRandom};
use super::{BlockFormat, Draws, Numbers};

/// Bits of fp32 infinity. A magnitude with bits from here up is not finite.
const INFINITE: u32 = 0x7f80_0000;

/// Number of elements that are scanned and then encoded under a tensor scale. It is small enough that the
/// scanned elements are still in the first-level cache when they are encoded.
const PIECE: usize = 256;

/// Result of one pass over a block.
#[derive(Clone, Copy)]
struct Scan {
    /// Bits of the largest magnitude in the block; NaN counts above infinity.
    max_bits: u32,
    /// Sum of the elements' squares; 0 if it was not requested.
    squares: f64,
}

impl Scan {
    #[inline(always)]
    fn is_finite(self) -> bool {
        self.max_bits < INFINITE
    }

    /// Adds the scan of block `x` to the statistics. A block with a non-finite element is scanned
    /// again, to count such elements.
    #[inline(always)]
    fn record(self, stats: &mut EncodeStats, x: &[f32]) {
        if self.is_finite() {
            stats.abs_max = stats.abs_max.max(f32::from_bits(self.max_bits));
            stats.sum_squares += self.squares;
        } else {
            stats.merge(&scan_slowly(x));
        }
    }
}

/// Inner loops over the elements of one block. Implementations are `#[inline(always)]`.
trait BlockLoops<F: BlockFormat> {
    /// Whether the format may fit a block that has not been scanned.
    const FITS_UNSCANNED: bool;
    fn scan<const SQUARES: bool>(&self, x: &[f32]) -> Scan;
    fn fit(&self, x: &[f32], largest: f32) -> Numbers;
    /// Encodes finite elements. The first number of `random` is for the first element of `x`.
    fn encode<const DRAW: bool>(
        &self,
        x: &[f32],
        encoder: F::Encoder,
        random: RoundingRandom,
        codes: &mut [u8],
    );
    fn decode<const REDUCE: bool>(&self, codes: &[u8], decoder: F::Decoder, dst: &mut [f32]);
}

/// Encodes a span, block by block.
pub(super) struct EncodeBlocks<'a, F> {
    pub format: &'a F,
    pub block: usize,
    /// Index, in the chunk, of the span's first block.
    pub first_block: usize,
    /// Index, in the chunk, of the span's first element.
    pub first: usize,
    /// Random numbers of the chunk; `None` if rounding is deterministic.
    pub random: Option<RoundingRandom>,
    pub src: &'a [f32],
    pub codes: &'a mut [u8],
    pub numbers: &'a mut [u8],
    pub stats: Option<&'a mut EncodeStats>,
}

impl<F: BlockFormat> SimdKernel for EncodeBlocks<'_, F> {
    type Output = ();

    fn scalar(self) {
        let loops = ScalarLoops {
            format: self.format,
        };
        self.run(loops);
    }

    #[inline(always)]
    fn vector<L: Lanes>(self, lanes: L) {
        let loops = VectorLoops::new(self.format, lanes);
        self.run(loops);
    }
}

impl<F: BlockFormat> EncodeBlocks<'_, F> {
    #[inline(always)]
    fn run<P: BlockLoops<F>>(self, loops: P) {
        if self.stats.is_some() {
            self.blocks::<P, true>(loops);
        } else {
            self.blocks::<P, false>(loops);
        }
    }

    #[inline(always)]
    fn blocks<P: BlockLoops<F>, const STATS: bool>(self, loops: P) {
        let mut stats = EncodeStats::default();
        let codes = self.codes.chunks_mut(code_bytes(self.block, F::BITS));
        for (index, (x, codes)) in self.src.chunks(self.block).zip(codes).enumerate() {
            let largest = if P::FITS_UNSCANNED && !STATS {
                Some(0.0)
            } else {
                let scan = loops.scan::<STATS>(x);
                if STATS {
                    scan.record(&mut stats, x);
                }
                scan.is_finite().then(|| f32::from_bits(scan.max_bits))
            };
            let numbers = match largest {
                Some(largest) => loops.fit(x, largest),
                None => [f32::NAN; 2],
            };
            let is_finite = match P::FITS_UNSCANNED {
                true => numbers.iter().all(|number| number.is_finite()),
                false => largest.is_some(),
            };
            let numbers = if is_finite { numbers } else { [f32::NAN; 2] };
            for (which, &number) in numbers[..F::NUMBERS].iter().enumerate() {
                let at = (self.first_block + index) * F::NUMBERS + which;
                write_number(self.numbers, at, number);
            }
            if !is_finite || F::is_zero(numbers) {
                codes.fill(0);
                continue;
            }
            let random = drawn::<F>(self.random, self.first + index * self.block);
            if F::needs_scalar(numbers) {
                encode_scalar(self.format, x, numbers, random, codes);
            } else {
                encode_elements(&loops, x, F::encoder(numbers), random, codes);
            }
        }
        if let Some(total) = self.stats {
            total.merge(&stats);
        }
    }
}

/// Encodes a span under a scale that the caller gives for the whole chunk.
pub(super) struct EncodeTensor<'a, F> {
    pub format: &'a F,
    pub scale: f32,
    /// Index, in the chunk, of the span's first element.
    pub first: usize,
    /// Random numbers of the chunk; `None` if rounding is deterministic.
    pub random: Option<RoundingRandom>,
    pub src: &'a [f32],
    pub codes: &'a mut [u8],
    /// Bytes of the chunk's scale on the wire; empty if the chunk has no elements.
    pub number: &'a mut [u8],
    pub stats: Option<&'a mut EncodeStats>,
}

impl<F: BlockFormat> SimdKernel for EncodeTensor<'_, F> {
    type Output = ();

    fn scalar(self) {
        let loops = ScalarLoops {
            format: self.format,
        };
        self.run(loops);
    }

    #[inline(always)]
    fn vector<L: Lanes>(self, lanes: L) {
        let loops = VectorLoops::new(self.format, lanes);
        self.run(loops);
    }
}

impl<F: BlockFormat> EncodeTensor<'_, F> {
    #[inline(always)]
    fn run<P: BlockLoops<F>>(self, loops: P) {
        if self.stats.is_some() {
            self.pieces::<P, true>(loops);
        } else {
            self.pieces::<P, false>(loops);
        }
    }

    #[inline(always)]
    fn pieces<P: BlockLoops<F>, const STATS: bool>(self, loops: P) {
        let mut stats = EncodeStats::default();
        let scale = self.scale;
        // Like a non-finite element, a scale that is negative or not finite makes the whole chunk
        // decode to NaN.
        let is_usable = scale.is_finite() && scale >= 0.0;
        let mut is_poisoned = !is_usable;
        let numbers = [scale, 0.0];
        let encoder = F::encoder(numbers);
        let codes = self.codes.chunks_mut(code_bytes(PIECE, F::BITS));
        for (index, (x, codes)) in self.src.chunks(PIECE).zip(codes).enumerate() {
            let scan = loops.scan::<STATS>(x);
            if STATS {
                scan.record(&mut stats, x);
                if is_usable && (!scan.is_finite() || f32::from_bits(scan.max_bits) > scale) {
                    let is_beyond = |&&x: &&f32| x.is_finite() && x.abs() > scale;
                    stats.saturated += x.iter().filter(is_beyond).count() as u64;
                }
            }
            is_poisoned |= !scan.is_finite();
            let random = drawn::<F>(self.random, self.first + index * PIECE);
            if !is_usable || F::is_zero(numbers) {
                codes.fill(0);
            } else if !scan.is_finite() || F::needs_scalar(numbers) {
                encode_scalar(self.format, x, numbers, random, codes);
            } else {
                encode_elements(&loops, x, encoder, random, codes);
            }
        }
        // The first span of a chunk writes the scale. Later spans at most replace the scale by NaN, so a NaN
        // of an earlier span remains. An empty chunk has no scale.
        if !self.number.is_empty() {
            if is_poisoned {
                write_number(self.number, 0, f32::NAN);
            } else if self.first == 0 {
                write_number(self.number, 0, scale);
            }
        }
        if let Some(total) = self.stats {
            total.merge(&stats);
        }
    }
}

/// Returns the random numbers of a span's elements from element `first` of the chunk on; `None` if rounding is
/// deterministic, which the compiler knows of formats that never draw.
#[inline(always)]
fn drawn<F: BlockFormat>(random: Option<RoundingRandom>, first: usize) -> Option<RoundingRandom> {
    match F::DRAWS {
        Draws::Never => None,
        _ => random.map(|random| random.from(first)),
    }
}

/// Encodes finite elements of one block.
#[inline(always)]
fn encode_elements<F: BlockFormat, P: BlockLoops<F>>(
    loops: &P,
    x: &[f32],
    encoder: F::Encoder,
    random: Option<RoundingRandom>,
    codes: &mut [u8],
) {
    match random {
        Some(random) => loops.encode::<true>(x, encoder, random, codes),
        None => loops.encode::<false>(x, encoder, RoundingRandom::NONE, codes),
    }
}

/// Encodes any elements in scalar form; a non-finite element gets the code of 0.
#[cold]
fn encode_scalar<F: BlockFormat>(
    format: &F,
    x: &[f32],
    numbers: Numbers,
    random: Option<RoundingRandom>,
    codes: &mut [u8],
) {
    let encoder = F::encoder(numbers);
    codes.fill(0);
    for (i, &x) in x.iter().enumerate() {
        let x = if x.is_finite() { x } else { 0.0 };
        let code = match random {
            Some(random) => format.draw(encoder, x, random.fraction(i)),
            None => format.code(encoder, x),
        };
        put(F::BITS, codes, i, code);
    }
}

/// Decodes a span into `dst`, or adds it to `dst`.
pub(super) struct DecodeBlocks<'a, F, const REDUCE: bool> {
    pub format: &'a F,
    pub block: usize,
    pub first_block: usize,
    pub codes: &'a [u8],
    pub numbers: &'a [u8],
    pub dst: &'a mut [f32],
}

impl<F: BlockFormat, const REDUCE: bool> SimdKernel for DecodeBlocks<'_, F, REDUCE> {
    type Output = ();

    fn scalar(self) {
        let loops = ScalarLoops {
            format: self.format,
        };
        self.run(loops);
    }

    #[inline(always)]
    fn vector<L: Lanes>(self, lanes: L) {
        let loops = VectorLoops::new(self.format, lanes);
        self.run(loops);
    }
}

impl<F: BlockFormat, const REDUCE: bool> DecodeBlocks<'_, F, REDUCE> {
    #[inline(always)]
    fn run<P: BlockLoops<F>>(self, loops: P) {
        let codes = self.codes.chunks(code_bytes(self.block, F::BITS));
        for (index, (codes, dst)) in codes.zip(self.dst.chunks_mut(self.block)).enumerate() {
            let mut numbers = [0.0; 2];
            for (which, number) in numbers[..F::NUMBERS].iter_mut().enumerate() {
                let at = (self.first_block + index) * F::NUMBERS + which;
                *number = read_number(self.numbers, at);
            }
            if !numbers.iter().all(|number| number.is_finite()) {
                // Writes NaN directly: the sign and payload of 0 * NaN differ between machines.
                dst.fill(f32::NAN);
            } else if F::needs_scalar(numbers) {
                let loops = ScalarLoops {
                    format: self.format,
                };
                loops.decode::<REDUCE>(codes, F::decoder(numbers), dst);
            } else {
                loops.decode::<REDUCE>(codes, F::decoder(numbers), dst);
            }
        }
    }
}

/// Scalar loops, which specify the result of the vector loops.
struct ScalarLoops<'a, F> {
    format: &'a F,
}

impl<F: BlockFormat> BlockLoops<F> for ScalarLoops<'_, F> {
    const FITS_UNSCANNED: bool = false;

    #[inline(always)]
    fn scan<const SQUARES: bool>(&self, x: &[f32]) -> Scan {
        let bits = x.iter().map(|x| x.to_bits() & 0x7fff_ffff);
        let squares = x.iter().map(|&x| f64::from(x) * f64::from(x));
        Scan {
            max_bits: bits.max().unwrap_or(0),
            squares: if SQUARES { squares.sum() } else { 0.0 },
        }
    }

    #[inline(always)]
    fn fit(&self, x: &[f32], largest: f32) -> Numbers {
        F::fit(x, largest)
    }

    #[inline(always)]
    fn encode<const DRAW: bool>(
        &self,
        x: &[f32],
        encoder: F::Encoder,
        random: RoundingRandom,
        codes: &mut [u8],
    ) {
        codes.fill(0);
        for (i, &x) in x.iter().enumerate() {
            let code = if DRAW {
                self.format.draw(encoder, x, random.fraction(i))
            } else {
                self.format.code(encoder, x)
            };
            put(F::BITS, codes, i, code);
        }
    }

    #[inline(always)]
    fn decode<const REDUCE: bool>(&self, codes: &[u8], decoder: F::Decoder, dst: &mut [f32]) {
        for (i, out) in dst.iter_mut().enumerate() {
            let code = take(F::BITS, codes, i);
            *out = if REDUCE {
                self.format.add(decoder, code, *out)
            } else {
                self.format.value(decoder, code)
            };
        }
    }
}

/// Vector loops over [`Lanes::N`] elements at a time. The last elements of a block are padded with
/// zeros to a full vector. Zeros change neither the largest magnitude nor the sum of squares.
struct VectorLoops<'a, F: BlockFormat, L: Lanes> {
    lanes: L,
    registers: F::Registers<'a, L>,
}

impl<'a, F: BlockFormat, L: Lanes> VectorLoops<'a, F, L> {
    #[inline(always)]
    fn new(format: &'a F, lanes: L) -> VectorLoops<'a, F, L> {
        VectorLoops {
            lanes,
            registers: format.registers(lanes),
        }
    }

    /// Returns the codes of a vector whose first element has index `at` in the block.
    #[inline(always)]
    fn code<const DRAW: bool>(
        &self,
        x: L::F,
        encoder: F::Encoder,
        random: RoundingRandom,
        at: usize,
    ) -> L::I {
        if DRAW {
            let u = random.fractions(self.lanes, at);
            F::draw_lanes(self.lanes, self.registers, encoder, x, u)
        } else {
            F::code_lanes(self.lanes, self.registers, encoder, x)
        }
    }
}

impl<F: BlockFormat, L: Lanes> BlockLoops<F> for VectorLoops<'_, F, L> {
    const FITS_UNSCANNED: bool = F::FIT_FINDS_NON_FINITE;

    #[inline(always)]
    fn scan<const SQUARES: bool>(&self, x: &[f32]) -> Scan {
        let lanes = self.lanes;
        // Two independent accumulators, so that an operation need not wait for the one before it.
        let mut most = [lanes.splat_i(0); 2];
        let mut sums = [lanes.zero_sum(); 2];
        let mut pairs = x.chunks_exact(2 * L::N);
        for pair in &mut pairs {
            let (a, b) = (lanes.load(pair), lanes.load(&pair[L::N..]));
            most[0] = lanes.max_i(most[0], abs_bits(lanes, a));
            most[1] = lanes.max_i(most[1], abs_bits(lanes, b));
            if SQUARES {
                sums[0] = lanes.add_squares(sums[0], a);
                sums[1] = lanes.add_squares(sums[1], b);
            }
        }
        for rest in pairs.remainder().chunks(L::N) {
            let a = load_floats(lanes, rest);
            most[0] = lanes.max_i(most[0], abs_bits(lanes, a));
            if SQUARES {
                sums[0] = lanes.add_squares(sums[0], a);
            }
        }
        Scan {
            max_bits: lanes.reduce_max(lanes.max_i(most[0], most[1])) as u32,
            squares: if SQUARES {
                lanes.total(sums[0]) + lanes.total(sums[1])
            } else {
                0.0
            },
        }
    }

    #[inline(always)]
    fn fit(&self, x: &[f32], largest: f32) -> Numbers {
        F::fit_lanes(self.lanes, x, largest)
    }

    #[inline(always)]
    fn encode<const DRAW: bool>(
        &self,
        x: &[f32],
        encoder: F::Encoder,
        random: RoundingRandom,
        codes: &mut [u8],
    ) {
        let lanes = self.lanes;
        let quads = x.len() / (4 * L::N) * (4 * L::N);
        let (first, rest) = x.split_at(quads);
        let (quad_codes, codes) = codes.split_at_mut(code_bytes(quads, F::BITS));
        let out = quad_codes.chunks_exact_mut(code_bytes(4 * L::N, F::BITS));
        for (index, (x, out)) in first.chunks_exact(4 * L::N).zip(out).enumerate() {
            let x = four!(i => lanes.load(&x[i * L::N..]));
            let at = index * 4 * L::N;
            let packed = if DRAW {
                let u = four!(i => random.fractions(lanes, at + i * L::N));
                F::draw_packed(lanes, self.registers, encoder, x, u)
            } else {
                F::code_packed(lanes, self.registers, encoder, x)
            };
            store_packed(F::BITS, lanes, packed, out);
        }
        let mut whole = rest.chunks_exact(L::N);
        let mut out = codes.chunks_exact_mut(code_bytes(L::N, F::BITS));
        for (index, (x, out)) in (&mut whole).zip(&mut out).enumerate() {
            let code = self.code::<DRAW>(lanes.load(x), encoder, random, quads + index * L::N);
            store(F::BITS, lanes, code, out);
        }
        let rest = whole.remainder();
        if !rest.is_empty() {
            let at = x.len() - rest.len();
            let code = self.code::<DRAW>(load_floats(self.lanes, rest), encoder, random, at);
            let out = &mut codes[code_bytes(at - quads, F::BITS)..];
            store_part(F::BITS, self.lanes, code, rest.len(), out);
        }
    }

    #[inline(always)]
    fn decode<const REDUCE: bool>(&self, codes: &[u8], decoder: F::Decoder, dst: &mut [f32]) {
        let (lanes, registers) = (self.lanes, self.registers);
        let whole = codes.chunks_exact(code_bytes(L::N, F::BITS));
        let done = dst.len() / L::N * L::N;
        let mut out = dst.chunks_exact_mut(L::N);
        for (codes, out) in whole.zip(&mut out) {
            let code = load(F::BITS, lanes, codes);
            let result = if REDUCE {
                F::add_lanes(lanes, registers, decoder, code, lanes.load(out))
            } else {
                F::value_lanes(lanes, registers, decoder, code)
            };
            lanes.store(result, out);
        }
        let out = out.into_remainder();
        if !out.is_empty() {
            let rest = &codes[code_bytes(done, F::BITS)..];
            let code = load_part(F::BITS, lanes, rest);
            let result = if REDUCE {
                F::add_lanes(lanes, registers, decoder, code, load_floats(lanes, out))
            } else {
                F::value_lanes(lanes, registers, decoder, code)
            };
            let mut buffer = [0.0; WIDEST];
            lanes.store(result, &mut buffer);
            out.copy_from_slice(&buffer[..out.len()]);
        }
    }
}

/// Loads a whole vector, or fewer elements padded with zeros.
#[inline(always)]
pub(in super::super) fn load_any<L: Lanes>(lanes: L, x: &[f32]) -> L::F {
    if x.len() == L::N {
        lanes.load(x)
    } else {
        load_floats(lanes, x)
    }
}
