//! The batches in which one thread queues the calls of several GPU ranks.
//!
//! A driver takes some 1,000 launches of a stream, and keeps whoever makes more waiting until some have
//! ended. Those of one rank may wait for those of another one, which the same thread makes: so each GPU
//! gets a part of its launches in turn. Communicators of one GPU keep their order, since they may share a
//! stream.

use std::collections::VecDeque;
use std::ops::Range;

/// Calls of a turn, unless those that belong together are more.
const MIN_BATCH_CALLS: usize = 64;

/// The calls of one communicator, as far as batches go.
#[derive(Debug)]
pub(super) struct GpuCalls {
    /// Which GPU they are for.
    pub gpu: usize,
    /// For each whether a turn may begin with it: where all ranks queue what is before it by itself.
    pub may_begin: Vec<bool>,
}

/// Which communicator's turn it is, and for which of its calls.
pub(super) type LaunchBatch = (usize, Range<usize>);

/// All batches, in the order in which they are queued.
pub(super) fn interleave(all: &[GpuCalls]) -> Vec<LaunchBatch> {
    let is_alone = all.iter().all(|waiting| waiting.gpu == all[0].gpu);
    let mut queues: Vec<(usize, VecDeque<LaunchBatch>)> = Vec::new();
    for (index, waiting) in all.iter().enumerate() {
        let least = if is_alone {
            usize::MAX
        } else {
            MIN_BATCH_CALLS
        };
        let parts = parts(&waiting.may_begin, least);
        let queue = queues.iter().position(|(gpu, _)| *gpu == waiting.gpu);
        let queue = queue.unwrap_or_else(|| {
            queues.push((waiting.gpu, VecDeque::new()));
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

/// Ranges of at least so many calls, except for the last.
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
    fn gpus_take_turns_and_communicators_of_one_do_not() {
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
    fn what_belongs_together_has_one_turn() {
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
