//! Encodes and decodes large arrays on several threads.
//!
//! Each thread gets a run of whole pieces. No byte of an encoding holds elements of two pieces, and neither
//! blocks nor random numbers depend on pieces. So the bytes equal those of a single thread.

use super::{ArrayForm, StandAlone};
use crate::codec::{Codec, EncodeStats, RoundingRandom, Span};
use crate::types::ScaleRule;

/// Number of elements of a piece: a multiple of every block and of the elements in a cache line of
/// 1-bit codes. The encoding of a piece fits a second-level cache. A thread gets at least one
/// piece, unless it has the end of the array.
pub(super) const PIECE: usize = 1 << 16;

impl StandAlone {
    /// Smallest number of elements at which an array may be split among threads.
    pub const SPLITS_FROM: usize = PIECE + 1;

    /// Returns the codec on up to `threads` threads, the caller's included; 0 counts as 1. The number of
    /// threads only affects the last bits of [`EncodeStats::sum_squares`]. Arrays with a single scale, as in
    /// CompLL's message, are encoded by one thread. CompLL's message is also decoded by one thread.
    pub fn with_threads(self, threads: usize) -> StandAlone {
        StandAlone {
            threads: threads.max(1),
            ..self
        }
    }

    /// Returns the number of elements of each thread's part of an array with `n` elements. The
    /// result is at least `n` if one thread is enough.
    fn part(&self, n: usize) -> usize {
        let pieces = n.div_ceil(PIECE);
        let threads = self.threads.min(pieces).max(1);
        pieces.div_ceil(threads).max(1) * PIECE
    }

    /// Encodes on several threads. Returns `None` if the array is too small or its layout cannot be split.
    pub(super) fn encode_split(
        &self,
        x: &[f32],
        random: RoundingRandom,
        to: &mut [u8],
    ) -> Option<EncodeStats> {
        let part = self.part(x.len());
        if part >= x.len() {
            return None;
        }
        let whole = matches!(self.spec.scale, ScaleRule::Tensor { .. });
        let works = match &self.form {
            ArrayForm::Chunk(codec) => {
                let form = codec.description();
                if whole && form.block_numbers > 0 {
                    return None;
                }
                let codes = (x.len() * form.code_bits).div_ceil(8);
                let codes = match form.block_numbers {
                    // If the blocks have no numbers, such as scales, the padding at the end belongs
                    // to the last part.
                    0 => to.len(),
                    _ => codes.next_multiple_of(16),
                };
                let (codes, numbers) = to.split_at_mut(codes.min(to.len()));
                let each = part / codec.granule() * form.block_numbers * size_of::<f32>();
                let numbers = numbers.chunks_mut(each.max(1));
                let numbers = numbers.map(Some).chain(std::iter::repeat_with(|| None));
                let codes = codes.chunks_mut(part * form.code_bits / 8);
                let parts = x.chunks(part).zip(codes).zip(numbers).enumerate();
                let works = parts.map(|(at, ((x, codes), numbers))| {
                    let random = random.from(at * part);
                    move || match numbers {
                        None => encode(&**codec, x, random, codes),
                        Some(numbers) => encode_blocks(&**codec, x, random, codes, numbers),
                    }
                });
                run(works)
            }
            ArrayForm::Published(layout) => {
                let each = layout.packed_bytes()? * part;
                let parts = x.chunks(part).zip(to.chunks_mut(each));
                run(parts.map(|(x, to)| {
                    move || {
                        let mut stats = EncodeStats::default();
                        layout.encode(x, random, to, &mut stats);
                        stats
                    }
                }))
            }
        };
        let mut all = EncodeStats::default();
        works.iter().for_each(|stats| all.merge(stats));
        Some(all)
    }

    /// Decodes on several threads. Returns false, and decodes nothing, if the array is too small or
    /// its layout cannot be split.
    pub(super) fn decode_split(&self, from: &[u8], y: &mut [f32]) -> bool {
        let (n, part) = (y.len(), self.part(y.len()));
        if part >= n {
            return false;
        }
        let parts = y.chunks_mut(part).enumerate();
        match &self.form {
            ArrayForm::Chunk(codec) => {
                run(parts.map(|(at, y)| move || codec.decode(Span::new(n, at * part), from, y)));
            }
            ArrayForm::Published(layout) => {
                let Some(each) = layout.packed_bytes() else {
                    return false;
                };
                let from = from.chunks(each * part);
                run(parts
                    .zip(from)
                    .map(|((_, y), from)| move || layout.decode(from, y)));
            }
        }
        true
    }
}

/// Encodes a part as a chunk of its own, with a codec whose blocks have no numbers.
fn encode(codec: &dyn Codec, x: &[f32], random: RoundingRandom, to: &mut [u8]) -> EncodeStats {
    let mut stats = EncodeStats::default();
    let span = Span::whole(x.len()).drawing(random);
    codec.encode(span, x, None, to, Some(&mut stats));
    stats
}

/// Encodes each piece of a part as a chunk of its own. Then copies the codes and the blocks' numbers to their
/// places in the chunk of the whole array.
fn encode_blocks(
    codec: &dyn Codec,
    x: &[f32],
    random: RoundingRandom,
    codes: &mut [u8],
    numbers: &mut [u8],
) -> EncodeStats {
    let mut stats = EncodeStats::default();
    let form = codec.description();
    let mut wire = vec![0u8; codec.wire_bytes(PIECE.min(x.len()))];
    let code_bytes = PIECE * form.code_bits / 8;
    let number_bytes = PIECE / codec.granule() * form.block_numbers * size_of::<f32>();
    let places = codes
        .chunks_mut(code_bytes)
        .zip(numbers.chunks_mut(number_bytes));
    for (at, (x, (codes, numbers))) in x.chunks(PIECE).zip(places).enumerate() {
        let span = Span::whole(x.len()).drawing(random.from(at * PIECE));
        codec.encode(span, x, None, &mut wire, Some(&mut stats));
        codes.copy_from_slice(&wire[..codes.len()]);
        numbers.copy_from_slice(&wire[codes.len()..][..numbers.len()]);
    }
    stats
}

/// Runs the first closure on the caller's thread and each other closure on a new thread. Returns their
/// results in order. A panic of a closure is passed on.
fn run<T: Send, W: FnOnce() -> T + Send>(works: impl Iterator<Item = W>) -> Vec<T> {
    let mut works = works;
    let Some(first) = works.next() else {
        return Vec::new();
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = works.map(|work| scope.spawn(work)).collect();
        let mut results = vec![first()];
        for thread in threads {
            match thread.join() {
                Ok(result) => results.push(result),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        results
    })
}

#[cfg(test)]
mod tests {
    use super::super::Layout;
    use super::*;
    use crate::cpu::Isa;
    use crate::types::{CodecKind, CodecSpec};

    fn samples(n: usize) -> Vec<f32> {
        let value = |i: usize| ((i * 7919) % 99_991) as f32 * 1e-3 - 40.0;
        (0..n).map(value).collect()
    }

    /// With every codec in both layouts, the bytes, decoded numbers and statistics of several
    /// threads equal those of one thread.
    #[test]
    fn several_threads_give_the_bytes_of_one() {
        let mut split = 0;
        for n in [PIECE - 1, PIECE + 1, 3 * PIECE, 5 * PIECE + 4321] {
            let mut x = samples(n);
            x[n / 2] = f32::NAN;
            for spec in CodecSpec::samples() {
                for layout in [Layout::Chunk, Layout::Published] {
                    let Ok(one) = StandAlone::new(spec, layout, Isa::detect()) else {
                        continue;
                    };
                    let mut expected = vec![0xee; one.bytes(n) + 3];
                    let known = one.encode(&x, 9, &mut expected).unwrap();
                    let mut y = vec![0f32; n];
                    let end = one.bytes(n);
                    one.decode(&expected[..end], &mut y).unwrap();
                    for threads in [2, 3, 64] {
                        let many = one.clone().with_threads(threads);
                        let mut bytes = vec![0xee; expected.len()];
                        let stats = many.encode(&x, 9, &mut bytes).unwrap();
                        assert!(bytes == expected, "{spec} {layout:?} {n} on {threads}");
                        let known = (known.abs_max, known.non_finite, known.saturated);
                        let found = (stats.abs_max, stats.non_finite, stats.saturated);
                        assert_eq!(known, found, "{spec}");
                        let mut z = vec![0f32; n];
                        many.decode(&bytes[..end], &mut z).unwrap();
                        let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                        assert!(bits(&y) == bits(&z), "{spec} {layout:?} {n} on {threads}");
                        let random = RoundingRandom::new(spec.seed.into(), 9, 0);
                        split +=
                            usize::from(many.encode_split(&x, random, &mut bytes[..end]).is_some());
                    }
                }
            }
        }
        // All arrays were split, except arrays below a piece, arrays with a single scale, and
        // CompLL's messages.
        assert!(split > 3 * 3 * 40, "{split} encodes were split");
    }

    #[test]
    fn part_is_whole_pieces_spread_over_the_threads() {
        let spec = CodecSpec::of(CodecKind::Trunc16);
        let codec = StandAlone::new(spec, Layout::Published, Isa::Scalar).unwrap();
        for (threads, n, part) in [
            (1, 10 * PIECE, 10 * PIECE),
            (4, 10 * PIECE, 3 * PIECE),
            (4, 1000, PIECE),
            (16, 10 * PIECE + 1, PIECE),
            (4, 0, PIECE),
        ] {
            assert_eq!(codec.clone().with_threads(threads).part(n), part);
        }
    }
}
