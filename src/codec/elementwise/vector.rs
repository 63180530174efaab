//! Loops over elements, in scalar and in vector form.

use super::super::EncodeStats;
use super::super::pack::{code_bytes, load, load_part, put, store, store_packed, store_part, take};
use super::super::simd::{
    Lanes, SimdKernel, WIDEST, abs, abs_bits, four, load_part as load_floats,
};
use super::{ElementFormat, Limit};

/// Bits of the largest finite magnitude.
const FINITE: i32 = 0x7f7f_ffff;

/// Vector form of an [`ElementFormat`]. Methods are `#[inline(always)]`.
pub(in super::super) trait VectorElementFormat: ElementFormat {
    /// Tables that a loop keeps in registers.
    type Registers<'a, L: Lanes>: Copy;

    /// Loads the tables that a loop keeps in registers.
    fn registers<L: Lanes>(&self, lanes: L) -> Self::Registers<'_, L>;

    /// Vector form of [`ElementFormat::encode`].
    fn encode_lanes<L: Lanes>(lanes: L, registers: Self::Registers<'_, L>, x: L::F) -> L::I;

    /// Returns the codes of four vectors, as [`Lanes::pack_bytes`] packs them, of a format of up to 8 bits.
    #[inline(always)]
    fn encode_packed<L: Lanes>(lanes: L, registers: Self::Registers<'_, L>, x: [L::F; 4]) -> L::I {
        lanes.pack_bytes(four!(i => Self::encode_lanes(lanes, registers, x[i])))
    }

    /// Vector form of [`ElementFormat::decode`].
    fn decode_lanes<L: Lanes>(lanes: L, registers: Self::Registers<'_, L>, code: L::I) -> L::F;
}

/// Encodes the elements `src` to `codes`, and adds their statistics to `stats` if it is set.
pub(super) struct EncodeElements<'a, F> {
    pub format: &'a F,
    pub limit: Option<Limit>,
    pub src: &'a [f32],
    pub codes: &'a mut [u8],
    pub stats: Option<&'a mut EncodeStats>,
}

impl<F: VectorElementFormat> SimdKernel for EncodeElements<'_, F> {
    type Output = ();

    fn scalar(self) {
        if F::BITS < 8 {
            self.codes.fill(0);
        }
        for (i, &x) in self.src.iter().enumerate() {
            let x = self.limit.map_or(x, |limit| limit.apply(x));
            put(F::BITS, self.codes, i, self.format.encode(x));
        }
        if let Some(stats) = self.stats {
            for &x in self.src {
                if x.is_finite() {
                    stats.abs_max = stats.abs_max.max(x.abs());
                    stats.sum_squares += f64::from(x) * f64::from(x);
                    stats.saturated += u64::from(x.abs() > self.format.largest());
                } else {
                    stats.non_finite += 1;
                }
            }
        }
    }

    #[inline(always)]
    fn vector<L: Lanes>(mut self, lanes: L) {
        match self.stats.take() {
            Some(stats) => {
                let found = self.run::<L, true>(lanes);
                stats.merge(&found);
            }
            None => {
                self.run::<L, false>(lanes);
            }
        }
    }
}

impl<F: VectorElementFormat> EncodeElements<'_, F> {
    #[inline(always)]
    fn run<L: Lanes, const STATS: bool>(self, lanes: L) -> EncodeStats {
        let registers = self.format.registers(lanes);
        let largest = self.format.largest().to_bits() as i32;
        let mut stats = EncodeStats::default();
        // The counters of [`LaneStats`] have 32 bits; pieces of this many elements keep them from
        // overflowing.
        const PIECE: usize = 1 << 20;
        let pieces = self.codes.chunks_mut(code_bytes(PIECE, F::BITS));
        for (piece, codes) in self.src.chunks(PIECE).zip(pieces) {
            let mut lane_stats = LaneStats::new(lanes, largest);
            let quads = match F::BITS {
                0..=8 => piece.len() / (4 * L::N) * (4 * L::N),
                _ => 0,
            };
            let (first, piece) = piece.split_at(quads);
            let (quad_codes, codes) = codes.split_at_mut(code_bytes(quads, F::BITS));
            let out = quad_codes.chunks_exact_mut(code_bytes(4 * L::N, F::BITS));
            for (x, out) in first.chunks_exact(4 * L::N).zip(out) {
                let x = four!(i => lanes.load(&x[i * L::N..]));
                let limited = four!(i => limited(lanes, self.limit, x[i]));
                let packed = F::encode_packed(lanes, registers, limited);
                store_packed(F::BITS, lanes, packed, out);
                if STATS {
                    for x in x {
                        lane_stats.add(x);
                    }
                }
            }
            let mut whole = piece.chunks_exact(L::N);
            let mut out = codes.chunks_exact_mut(code_bytes(L::N, F::BITS));
            for (x, out) in (&mut whole).zip(&mut out) {
                let x = lanes.load(x);
                let code = F::encode_lanes(lanes, registers, limited(lanes, self.limit, x));
                store(F::BITS, lanes, code, out);
                if STATS {
                    lane_stats.add(x);
                }
            }
            let rest = whole.remainder();
            if !rest.is_empty() {
                let x = load_floats(lanes, rest);
                let code = F::encode_lanes(lanes, registers, limited(lanes, self.limit, x));
                let at = code_bytes(piece.len() - rest.len(), F::BITS);
                store_part(F::BITS, lanes, code, rest.len(), &mut codes[at..]);
                if STATS {
                    lane_stats.add(x);
                }
            }
            if STATS {
                stats.merge(&lane_stats.total());
            }
        }
        stats
    }
}

impl Limit {
    /// Returns the number to encode for x.
    fn apply(self, x: f32) -> f32 {
        if x.abs() > self.limit && x.abs() < self.overflow {
            self.limit.copysign(x)
        } else {
            x
        }
    }
}

/// Vector form of [`Limit::apply`]; without a limit returns `x`.
#[inline(always)]
fn limited<L: Lanes>(lanes: L, limit: Option<Limit>, x: L::F) -> L::F {
    let Some(Limit { limit, overflow }) = limit else {
        return x;
    };
    let magnitude = abs(lanes, x);
    let sign = lanes.and(lanes.bits(x), lanes.splat_i(i32::MIN));
    let limit = lanes.splat(limit);
    let signed = lanes.float(lanes.or(lanes.bits(limit), sign));
    let beyond = lanes.select(lanes.gt(magnitude, limit), signed, x);
    lanes.select(lanes.gt(lanes.splat(overflow), magnitude), beyond, x)
}

/// Statistics that are kept separately for each element position of a vector.
struct LaneStats<L: Lanes> {
    lanes: L,
    largest: L::I,
    most: L::I,
    squares: L::D,
    saturated: L::I,
    non_finite: L::I,
}

impl<L: Lanes> LaneStats<L> {
    #[inline(always)]
    fn new(lanes: L, largest: i32) -> LaneStats<L> {
        let zero = lanes.splat_i(0);
        LaneStats {
            lanes,
            largest: lanes.splat_i(largest),
            most: zero,
            squares: lanes.zero_sum(),
            saturated: zero,
            non_finite: zero,
        }
    }

    #[inline(always)]
    fn add(&mut self, x: L::F) {
        let lanes = self.lanes;
        let (zero, one) = (lanes.splat_i(0), lanes.splat_i(1));
        let bits = abs_bits(lanes, x);
        let wild = lanes.gt_i(bits, lanes.splat_i(FINITE));
        let bits = lanes.select_i(wild, zero, bits);
        self.non_finite = lanes.add_i(self.non_finite, lanes.select_i(wild, one, zero));
        let beyond = lanes.gt_i(bits, self.largest);
        self.saturated = lanes.add_i(self.saturated, lanes.select_i(beyond, one, zero));
        self.most = lanes.max_i(self.most, bits);
        self.squares = lanes.add_squares(self.squares, lanes.float(bits));
    }

    #[inline(always)]
    fn total(self) -> EncodeStats {
        EncodeStats {
            saturated: self.lanes.reduce_sum(self.saturated),
            non_finite: self.lanes.reduce_sum(self.non_finite),
            abs_max: f32::from_bits(self.lanes.reduce_max(self.most) as u32),
            sum_squares: self.lanes.total(self.squares),
        }
    }
}

/// Decodes a span into `dst`, or adds it to `dst`.
pub(super) struct DecodeElements<'a, F, const REDUCE: bool> {
    pub format: &'a F,
    pub codes: &'a [u8],
    pub dst: &'a mut [f32],
}

impl<F: VectorElementFormat, const REDUCE: bool> SimdKernel for DecodeElements<'_, F, REDUCE> {
    type Output = ();

    fn scalar(self) {
        for (i, out) in self.dst.iter_mut().enumerate() {
            let value = self.format.decode(take(F::BITS, self.codes, i));
            *out = if REDUCE { *out + value } else { value };
        }
    }

    #[inline(always)]
    fn vector<L: Lanes>(self, lanes: L) {
        let registers = self.format.registers(lanes);
        let at = code_bytes(self.dst.len() / L::N * L::N, F::BITS);
        let (whole, rest) = self.codes.split_at(at);
        let whole = whole.chunks_exact(code_bytes(L::N, F::BITS));
        let mut out = self.dst.chunks_exact_mut(L::N);
        for (codes, out) in whole.zip(&mut out) {
            let value = F::decode_lanes(lanes, registers, load(F::BITS, lanes, codes));
            let sum = if REDUCE {
                lanes.add(lanes.load(out), value)
            } else {
                value
            };
            lanes.store(sum, out);
        }
        let out = out.into_remainder();
        if !out.is_empty() {
            let value = F::decode_lanes(lanes, registers, load_part(F::BITS, lanes, rest));
            let sum = if REDUCE {
                lanes.add(load_floats(lanes, out), value)
            } else {
                value
            };
            let mut buffer = [0.0; WIDEST];
            lanes.store(sum, &mut buffer);
            out.copy_from_slice(&buffer[..out.len()]);
        }
    }
}
