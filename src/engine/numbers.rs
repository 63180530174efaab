//! Numbers of calls: what tells ranks that make other calls in the same place apart.

use crate::plan::Request;
use crate::types::Collective;

/// How many calls a rank has made: of the communicator, and of each pair and direction.
#[derive(Debug)]
pub(super) struct CallNumbers {
    rank: usize,
    /// Collectives so far.
    calls: u64,
    /// Messages so far to and from each rank.
    messages: Vec<[u64; 2]>,
}

impl CallNumbers {
    pub(super) fn new(rank: usize, nranks: usize) -> CallNumbers {
        CallNumbers {
            rank,
            calls: 0,
            messages: vec![[0; 2]; nranks],
        }
    }

    /// Number of this call among those that must come in the same order on its ranks.
    pub(super) fn next(&mut self, request: &Request) -> u64 {
        let counter = if request.collective == Collective::SendRecv {
            let sends = request.root == self.rank;
            let other = if sends { request.peer } else { request.root };
            &mut self.messages[other][usize::from(!sends)]
        } else {
            &mut self.calls
        };
        *counter += 1;
        *counter - 1
    }
}
