//! Defines the sample window of a coded sum: a range of elements that is also summed exactly, to
//! report the codec's error.

use super::Request;
use crate::types::{CallTuning, CodecSetting, Collective, DType, Fused, ReduceOp};

/// Largest number of elements of a window, over all blocks together.
pub const SAMPLE_WINDOW_ELEMENTS: usize = 4096;

/// A window begins at a multiple of this many elements: whole cache lines, so that copies are
/// aligned.
const ALIGNMENT: usize = 64;

/// An equal range of elements in every block of a call's input, and in its output.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SampleWindow {
    dtype: DType,
    op: ReduceOp,
    /// Number of blocks of the input: one per rank for reduce_scatter, otherwise 1.
    blocks: usize,
    /// Number of elements of a block.
    count: usize,
    /// Index of the window's first element in each block.
    start: usize,
    /// Number of elements of the window in each block.
    elements: usize,
}

impl SampleWindow {
    /// Chooses the window of the `number`-th sample; `None` if the call is not a sum or has too
    /// many ranks.
    pub fn of(request: &Request, nranks: usize, number: u64) -> Option<SampleWindow> {
        let blocks = match request.collective {
            Collective::AllReduce => 1,
            Collective::ReduceScatter => nranks,
            _ => return None,
        };
        let elements = request.count.min(SAMPLE_WINDOW_ELEMENTS / blocks);
        if elements == 0 {
            return None;
        }
        // The window moves from sample to sample, so that samples cover the whole block. All ranks
        // compute an equal window.
        let places = (request.count - elements) / ALIGNMENT + 1;
        let scattered = number.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        Some(SampleWindow {
            dtype: request.dtype,
            op: request.op,
            blocks,
            count: request.count,
            start: scattered as usize % places * ALIGNMENT,
            elements,
        })
    }

    /// Returns the type of the elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the number of bytes of the window in one block.
    pub fn part_bytes(&self) -> usize {
        self.elements * self.dtype.size()
    }

    /// Returns the number of bytes of the window in all blocks together.
    pub fn bytes(&self) -> usize {
        self.part_bytes() * self.blocks
    }

    /// Returns the byte offset of the window in each block of the input, in order.
    pub fn input_places(&self) -> impl Iterator<Item = usize> {
        let (count, start, size) = (self.count, self.start, self.dtype.size());
        (0..self.blocks).map(move |block| (block * count + start) * size)
    }

    /// Returns the byte offset of the window in this rank's output.
    pub fn output_place(&self) -> usize {
        self.start * self.dtype.size()
    }

    /// Returns a request that sums the windows of all ranks without a codec, in place.
    pub fn exact_sum(&self) -> Request {
        self.request(Collective::AllReduce, self.elements * self.blocks)
    }

    /// Returns a request that all-gathers the window of each rank's output; `None` if the
    /// collective already replicates its output.
    pub fn gather(&self) -> Option<Request> {
        let spread = self.blocks > 1;
        spread.then(|| self.request(Collective::AllGather, self.elements))
    }

    fn request(&self, collective: Collective, count: usize) -> Request {
        Request {
            collective,
            dtype: self.dtype,
            op: match collective.reduces() {
                true => self.op,
                false => ReduceOp::Sum,
            },
            count,
            root: 0,
            peer: 0,
            codec: CodecSetting::RAW,
            algorithm: None,
            tuning: CallTuning::AUTO,
            tensor: None,
            feedback: None,
            fused: Fused::ALONE,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(collective: Collective, count: usize) -> Request {
        Request {
            collective,
            dtype: DType::BF16,
            op: ReduceOp::Avg,
            count,
            root: 0,
            peer: 0,
            codec: "linear8".parse().unwrap(),
            algorithm: None,
            tuning: CallTuning::AUTO,
            tensor: Some(3),
            feedback: None,
            fused: Fused::ALONE,
        }
    }

    #[test]
    fn windows_lie_within_and_move() {
        for (collective, nranks) in [
            (Collective::AllReduce, 5),
            (Collective::ReduceScatter, 2),
            (Collective::ReduceScatter, 7),
        ] {
            for count in [1, 63, 64, 4096, 4097, 1 << 20] {
                let request = request(collective, count);
                let blocks = SampleWindow::of(&request, nranks, 0)
                    .unwrap()
                    .input_places()
                    .count();
                let window_elements = count.min(SAMPLE_WINDOW_ELEMENTS / blocks);
                let mut starts = std::collections::BTreeSet::new();
                for number in 0..100 {
                    let window = SampleWindow::of(&request, nranks, number).unwrap();
                    assert!(window.output_place() + window.part_bytes() <= 2 * count);
                    assert!(window.bytes() <= 2 * SAMPLE_WINDOW_ELEMENTS);
                    let places: Vec<usize> = window.input_places().collect();
                    for (block, place) in places.iter().enumerate() {
                        assert_eq!(*place, window.output_place() + 2 * block * count);
                    }
                    assert_eq!(places.len() * window.part_bytes(), window.bytes());
                    starts.insert(window.output_place());
                }
                let moves = (count - window_elements) / ALIGNMENT > 0;
                assert_eq!(starts.len() > 1, moves, "{count}: {starts:?}");
                assert!(count < 1 << 20 || starts.len() > 50);
            }
        }
    }

    #[test]
    fn what_runs_is_exact_and_covers_the_window() {
        let scattered = request(Collective::ReduceScatter, 10_000);
        let window = SampleWindow::of(&scattered, 4, 9).unwrap();
        let sum = window.exact_sum();
        assert_eq!((sum.collective, sum.count), (Collective::AllReduce, 4096));
        assert_eq!((sum.op, sum.tensor), (ReduceOp::Avg, None));
        assert!(!sum.codec.is_lossy());
        let gather = window.gather().unwrap();
        assert_eq!(gather.count * 4, sum.count);
        let reduced = request(Collective::AllReduce, 10_000);
        assert!(SampleWindow::of(&reduced, 4, 9).unwrap().gather().is_none());
        for (collective, count, nranks) in [
            (Collective::AllGather, 100, 2),
            (Collective::AllReduce, 0, 2),
            (Collective::ReduceScatter, 100, 5000),
        ] {
            assert!(SampleWindow::of(&request(collective, count), nranks, 0).is_none());
        }
    }
}
