//! Batches in which a thread queues the calls of several GPU ranks.
//!
//! A driver takes some 1,000 launches of a stream, and then blocks the launching thread until some
//! have ended. Launches of one rank may wait for later launches of another rank by the same thread.
//! So the thread alternates between GPUs, with batches of limited size. Communicators of one GPU
//! keep their order, because they may share a stream.

use std::collections::VecDeque;
use std::ops::Range;

/// Smallest number of calls in a batch; calls that must stay together may make a batch larger.
const MIN_BATCH_CALLS: usize = 64;

/// The calls of one communicator, as [`interleave`] needs them.
#[derive(Debug)]
pub(super) struct GpuCalls {
    /// Number of the GPU that runs the calls.
    pub gpu: usize,
    /// For each call, whether a batch may begin with it.
    pub may_begin: Vec<bool>,
}

/// Index of a communicator, and the range of its calls.
pub(super) type LaunchBatch = (usize, Range<usize>);

/// Returns all batches in the order in which they are queued.
pub(super) fn interleave(all: &[GpuCalls]) -> Vec<LaunchBatch> {
    let is_alone = all.iter().all(|calls| calls.gpu == all[0].gpu);
    let mut queues: Vec<(usize, VecDeque<LaunchBatch>)> = Vec::new();
    for (index, calls) in all.iter().enumerate() {
        let least = if is_alone {
            usize::MAX
        } else {
            MIN_BATCH_CALLS
        };
        let parts = parts(&calls.may_begin, least);
        let queue = queues.iter().position(|(gpu, _)| *gpu == calls.gpu);
        let queue = queue.unwrap_or_else(|| {
            queues.push((calls.gpu, VecDeque::new()));
            queues.len() - 1
        });
        queues[queue]
            .1
            .extend(parts.into_iter().map(|part| (index, part)));
    }
    let mut batches = Vec::new();
    while queues.iter().any(|(_, queue)| !queue.is_empty()) {
        batches.extend(queues.iter_mut().filter_map(|(_, queue)| queue.pop_front()));
    }
    batches
}

/// Divides calls into ranges of at least `least` calls, except for the last range.
fn parts(may_begin: &[bool], least: usize) -> Vec<Range<usize>> {
    let (mut parts, mut begin) = (Vec::new(), 0);
    for (at, &may_begin) in may_begin.iter().enumerate() {
        if may_begin && at - begin >= least {
            parts.push(begin..at);
            begin = at;
        }
    }
    parts.push(begin..may_begin.len());
    parts
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn of(gpu: usize, calls: usize) -> GpuCalls {
        GpuCalls {
            gpu,
            may_begin: vec![true; calls],
        }
    }

    #[test]
    fn batches_of_several_gpus_are_interleaved() {
        assert_eq!(interleave(&[]), []);
        assert_eq!(
            interleave(&[of(0, 200), of(0, 3)]),
            [(0, 0..200), (1, 0..3)]
        );
        let all = [of(0, 130), of(1, 64), of(0, 10), of(1, 65)];
        let expected = [
            (0, 0..64),
            (1, 0..64),
            (0, 64..128),
            (3, 0..64),
            (0, 128..130),
            (3, 64..65),
            (2, 0..10),
        ];
        assert_eq!(interleave(&all), expected);
    }

    #[test]
    fn calls_that_stay_together_are_one_batch() {
        let mut messages = of(0, 300);
        for at in 50..200 {
            messages.may_begin[at] = false;
        }
        let batches = interleave(&[messages, of(1, 1)]);
        assert_eq!(
            batches,
            [(0, 0..200), (1, 0..1), (0, 200..264), (0, 264..300)]
        );
    }
}
