//! Layout of GPU buffers, number of calls per repetition, and choice of the output pieces to
//! compare.

use crate::bench::row::{COLD_BYTES, COLD_FROM, Row, buffer_bytes};
use cinch::Result;
use std::ops::Range;

/// Number of elements after which a rank's data repeats. It is no multiple of any chunk size, so
/// that misplaced chunks show.
pub const PERIOD: usize = (4 << 20) + 4099;

/// Target length of a repetition in seconds, long compared with a graph launch and a barrier.
const REPETITION_SECONDS: f64 = 8e-3;

/// How the calls of a repetition are launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Each call is launched on a stream.
    Eager,
    /// Each call is launched on a stream of a GPU that several ranks share.
    Crowded,
    /// All calls are launched as one CUDA graph.
    Graph,
}

impl Mode {
    /// Returns the largest number of calls in a repetition. Recording and releasing a longer graph
    /// takes too long. On a stream the driver blocks after about a thousand queued launches. Ranks
    /// that share a GPU queue few calls. A call behind many queued calls may allocate memory, and
    /// the allocation waits for the kernels of other ranks. If those kernels wait for this call,
    /// all ranks deadlock.
    pub fn most_calls(self) -> usize {
        match self {
            Mode::Eager => 200,
            Mode::Crowded => 4,
            Mode::Graph => 400,
        }
    }
}

/// Outputs up to this many bytes are compared in full.
const WHOLE_BYTES: usize = 64 << 20;

/// Bytes of one compared piece of a larger output.
const PIECE_BYTES: usize = 1 << 20;

/// Number of pieces between the first and the last one of a larger output.
const PIECES: usize = 14;

/// Where a row's buffers lie in a rank's two arenas (inputs and outputs). All ranks use the same
/// layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArenaLayout {
    /// Bytes between the beginnings of consecutive inputs.
    pub input: usize,
    /// Bytes between the beginnings of consecutive outputs.
    pub output: usize,
    /// Number of input and output pairs that calls use in rotation.
    pub sets: usize,
}

impl ArenaLayout {
    /// Lays out the buffers of a row. Large rows rotate through several pairs, so that caches do
    /// not hold the data.
    ///
    /// # Errors
    /// Returns an invalid-argument error if the sizes overflow.
    pub fn new(row: &Row, nranks: usize) -> Result<ArenaLayout> {
        let (root, other) = (
            buffer_bytes(row, true, nranks)?,
            buffer_bytes(row, false, nranks)?,
        );
        let stride = |bytes: usize| bytes.next_multiple_of(256).max(256);
        let (input, output) = (stride(root.0.max(other.0)), stride(root.1.max(other.1)));
        let size = row.size(nranks);
        let sets = match size < COLD_FROM {
            true => 1,
            false => COLD_BYTES.div_ceil(input + output).clamp(1, 64),
        };
        Ok(ArenaLayout {
            input,
            output,
            sets,
        })
    }

    /// Reduces the number of pairs to what the arenas (bytes of inputs, of outputs) can hold. A row
    /// of a size between the planned sizes may need more. For example, two pairs of 65 MiB exceed
    /// an arena for one pair of 128 MiB.
    pub fn within(self, arenas: (usize, usize)) -> ArenaLayout {
        let room = (arenas.0 / self.input).min(arenas.1 / self.output);
        ArenaLayout {
            sets: self.sets.min(room).max(1),
            ..self
        }
    }

    /// Returns the bytes of the input arena and the output arena that fit all rows.
    ///
    /// # Errors
    /// Returns the errors of [`ArenaLayout::new`].
    pub fn arenas(rows: &[Row], nranks: usize) -> Result<(usize, usize)> {
        let mut arenas = (256, 256);
        for row in rows {
            let layout = ArenaLayout::new(row, nranks)?;
            arenas.0 = arenas.0.max(layout.sets * layout.input);
            arenas.1 = arenas.1.max(layout.sets * layout.output);
        }
        Ok(arenas)
    }
}

/// Chooses the buffer pair of each call, the same on all ranks. A repetition on a stream continues
/// where the previous one ended. Otherwise a repetition of few calls would find its pairs in the
/// caches.
#[derive(Clone, Copy, Debug)]
pub struct Rotation {
    sets: usize,
    /// Pair that the first call of this repetition uses.
    first: usize,
    /// Pair that the first call of the next repetition on a stream uses.
    next: usize,
}

impl Rotation {
    /// Creates a rotation over `sets` pairs of input and output buffers, starting at the first
    /// pair.
    pub fn new(sets: usize) -> Rotation {
        Rotation {
            sets: sets.max(1),
            first: 0,
            next: 0,
        }
    }

    /// Begins a repetition of `calls` calls on a stream.
    pub fn begin(&mut self, calls: usize) {
        self.first = self.next;
        self.next = (self.first + calls) % self.sets;
    }

    /// Begins a repetition whose calls are recorded into a graph, or replayed from it.
    pub fn begin_graph(&mut self) {
        self.first = 0;
    }

    /// Returns the buffer pair of call number `call` in this repetition.
    pub fn set(&self, call: usize) -> usize {
        (self.first + call) % self.sets
    }
}

/// Returns the number of calls in a repetition if one call takes about `seconds`.
pub fn calls(seconds: f64, mode: Mode) -> usize {
    let calls = (REPETITION_SECONDS / seconds.max(1e-9)).ceil() as usize;
    calls.clamp(1, mode.most_calls())
}

/// Returns the ranges of elements to compare in an output of `elements` elements of `size` bytes. A
/// large output is compared at both ends and in places that `seed` selects.
pub fn pieces(elements: usize, size: usize, seed: u64) -> Vec<Range<usize>> {
    let piece = PIECE_BYTES / size;
    let all = elements.div_ceil(piece);
    let cut = |index: usize| index * piece..elements.min((index + 1) * piece);
    if elements * size <= WHOLE_BYTES {
        return (0..all).map(cut).collect();
    }
    // Each of `PIECES` equal parts yields one piece, so that pieces are spread out and in order.
    let between = (0..PIECES).map(|part| {
        let (from, to) = (
            1 + part * (all - 2) / PIECES,
            1 + (part + 1) * (all - 2) / PIECES,
        );
        let mut z = seed.wrapping_add((part as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        z = (z ^ (z >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
        from + (z >> 33) as usize % (to - from)
    });
    let indices = std::iter::once(0).chain(between).chain([all - 1]);
    indices.map(cut).collect()
}

/// Returns kernel and protocol of the cheapest candidate in the output of `Communicator::explain`,
/// such as `fused-ll128`.
pub fn protocol(explained: &str) -> Option<String> {
    let line = explained.lines().find(|line| line.contains("<- "))?;
    let mut words = line.split_whitespace().skip(1);
    Some(format!("{}-{}", words.next()?, words.next()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use cinch::{Collective, DType};

    fn row(collective: Collective, count: usize) -> Row {
        Row::new(collective, DType::F32, count)
    }

    #[test]
    fn large_rows_rotate_and_small_ones_stay() {
        let layout = |count| ArenaLayout::new(&row(Collective::AllReduce, count), 8).unwrap();
        assert_eq!((layout(2).input, layout(2).sets), (256, 1));
        assert_eq!(layout(1 << 18).sets, 64);
        assert_eq!(layout(4 << 20).sets, 4);
        assert_eq!(layout(256 << 20).sets, 1);
        let gather = ArenaLayout::new(&row(Collective::AllGather, 1 << 17), 8).unwrap();
        assert_eq!((gather.input, gather.output), (1 << 19, 1 << 22));
        // The root of a broadcast has only an input, every other rank only an output.
        let broadcast = ArenaLayout::new(&row(Collective::Broadcast, 1000), 8).unwrap();
        assert_eq!((broadcast.input, broadcast.output), (4096, 4096));
        let rows = [
            row(Collective::AllReduce, 1),
            row(Collective::AllReduce, 1 << 20),
        ];
        assert_eq!(ArenaLayout::arenas(&rows, 8).unwrap(), (64 << 20, 64 << 20));
    }

    /// `cinch tune` also measures sizes between those for which its arenas were allocated.
    #[test]
    fn rows_between_those_of_the_arenas_fit_them() {
        for collective in [Collective::AllReduce, Collective::AllGather] {
            let of = |bytes: usize| row(collective, bytes / 4);
            for last in [2 << 20, 16 << 20, 64 << 20, 256 << 20] {
                let known: Vec<Row> = (0..8).map(|fours| of(last >> (2 * fours))).collect();
                let arenas = ArenaLayout::arenas(&known, 2).unwrap();
                let mut larger = 0;
                for size in (last >> 6..=last).step_by(last >> 8) {
                    let layout = ArenaLayout::new(&of(size), 2).unwrap();
                    let fitting = layout.within(arenas);
                    let (input, output) =
                        (fitting.sets * fitting.input, fitting.sets * fitting.output);
                    assert!(input <= arenas.0 && output <= arenas.1, "{size} of {last}");
                    let size_as_is = layout.sets * layout.output;
                    larger += usize::from(size_as_is > arenas.1);
                    assert_eq!(fitting == layout, size_as_is <= arenas.1, "{size}");
                }
                assert!(larger > 0 || last > 64 << 20, "{last}");
                for row in known {
                    let layout = ArenaLayout::new(&row, 2).unwrap();
                    assert_eq!(layout.within(arenas), layout);
                }
            }
        }
    }

    #[test]
    fn repetitions_of_few_calls_go_through_all_buffers() {
        let calls = Mode::Crowded.most_calls();
        let mut rotation = Rotation::new(64);
        let mut taken = Vec::new();
        for _ in 0..16 {
            rotation.begin(calls);
            taken.extend((0..calls).map(|call| rotation.set(call)));
        }
        assert_eq!(taken, (0..64).collect::<Vec<_>>());
        rotation.begin(3);
        assert_eq!((rotation.set(0), rotation.set(2)), (0, 2));
        // A graph always begins with the first pair, whichever pair the calls on a stream used
        // last.
        rotation.begin_graph();
        assert_eq!(rotation.set(65), 1);
        rotation.begin(62);
        assert_eq!((rotation.set(0), rotation.set(61)), (3, 0));
        let mut one = Rotation::new(1);
        one.begin(5);
        assert_eq!(one.set(4), 0);
    }

    #[test]
    fn repetitions_take_about_eight_milliseconds() {
        assert_eq!(calls(8e-3, Mode::Graph), 1);
        assert_eq!(calls(5.2, Mode::Eager), 1);
        assert_eq!(calls(1e-4, Mode::Graph), 80);
        let most = [Mode::Eager, Mode::Crowded, Mode::Graph].map(|mode| calls(1e-6, mode));
        assert_eq!(most, [200, 4, 400]);
        assert_eq!(calls(0.0, Mode::Graph), 400);
    }

    #[test]
    fn pieces_cover_small_outputs_and_sample_large_ones() {
        assert!(pieces(0, 4, 1).is_empty());
        assert_eq!(pieces(1000, 4, 1), vec![0..1000; 1]);
        let whole = pieces((16 << 20) - 5, 4, 1);
        assert_eq!(whole.len(), 64);
        assert!(whole.windows(2).all(|w| w[0].end == w[1].start));
        assert_eq!(whole[63].end, (16 << 20) - 5);
        let elements = (256 << 20) + 7;
        let sampled = pieces(elements, 4, 1);
        assert_eq!(sampled.len(), 16);
        assert!(sampled.windows(2).all(|w| w[0].end <= w[1].start));
        assert_eq!((sampled[0].start, sampled[15].end), (0, elements));
        assert_ne!(sampled, pieces(elements, 4, 2));
        assert_eq!(pieces((16 << 20) + 1, 4, 3).len(), 16);
    }

    #[test]
    fn the_winners_protocol_is_read() {
        let text = "all_reduce of 2 f32, codec raw, 8 ranks over cuda\n  \
                    algorithm  kernel    protocol  chunk(elements)\n  \
                    ring       schedule  ll                     2       1      1     7      2          1.00\n  \
                    oneshot    fused     ll                     2       1      1     1      7          0.50 <- cheapest\n";
        assert_eq!(protocol(text).as_deref(), Some("fused-ll"));
        assert_eq!(protocol("nothing"), None);
    }
}
