//! Sequence numbers of calls. A signature carries them, so that ranks detect a different call order.

use crate::plan::Request;
use crate::types::Collective;

/// Counts the calls of one rank: all its collectives, and its messages by peer and direction.
#[derive(Debug)]
pub(super) struct CallNumbers {
    rank: usize,
    collectives: u64,
    /// Number of messages sent to each rank, and received from it.
    messages: Vec<[u64; 2]>,
}

impl CallNumbers {
    pub(super) fn new(rank: usize, nranks: usize) -> CallNumbers {
        CallNumbers {
            rank,
            collectives: 0,
            messages: vec![[0; 2]; nranks],
        }
    }

    /// Passes over the number of a barrier, which counts as a collective.
    pub(super) fn pass(&mut self) {
        self.collectives += 1;
    }

    /// Returns the number of this call, and increments the counter. A collective is numbered among all
    /// collectives; a message is numbered among the messages of its pair and direction.
    pub(super) fn next(&mut self, request: &Request) -> u64 {
        let counter = if request.collective == Collective::SendRecv {
            let sends = request.root == self.rank;
            let other = if sends { request.peer } else { request.root };
            &mut self.messages[other][usize::from(!sends)]
        } else {
            &mut self.collectives
        };
        *counter += 1;
        *counter - 1
    }
}
