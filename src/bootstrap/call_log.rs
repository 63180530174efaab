//! Call log: the signatures of the calls that each rank started, compared by sequence number.
//!
//! Ranks that exchange data find a disagreement in the header of the first message. The call log
//! finds other disagreements: two ranks that wait for different peers, or a call without data.

use super::PeerInfo;
use crate::error::{Error, ErrorKind};
use crate::types::{CallSignature, Collective, SEQUENCE_WORD, SIGNATURE_WORDS};

/// Number of calls kept until the next heartbeat; older calls are not compared.
pub(super) const KEPT: usize = 64;

/// A signature as words on the wire.
pub(super) type Words = [u64; SIGNATURE_WORDS];

/// The latest calls of this rank.
#[derive(Debug)]
pub(super) struct CallLog {
    ring: [Words; KEPT],
    written: usize,
    taken: usize,
}

impl CallLog {
    pub(super) fn new() -> CallLog {
        CallLog {
            ring: [[0; SIGNATURE_WORDS]; KEPT],
            written: 0,
            taken: 0,
        }
    }

    #[inline]
    pub(super) fn push(&mut self, words: Words) {
        self.ring[self.written % KEPT] = words;
        self.written += 1;
    }

    /// Returns the calls since the previous `take`, at most the latest [`KEPT`].
    pub(super) fn take(&mut self) -> Vec<Words> {
        let from = self.taken.max(self.written.saturating_sub(KEPT));
        self.taken = self.written;
        (from..self.written)
            .map(|at| self.ring[at % KEPT])
            .collect()
    }
}

/// Returns whether ranks can compare this call. Sequence numbers of send and recv count the calls
/// of a pair, not of the communicator.
#[inline]
pub(super) fn is_comparable(words: &Words) -> bool {
    (words[0] >> 8) as u8 != Collective::SendRecv as u8
}

/// Compares the calls of all ranks by sequence number. Keeps each call for as long as a slow rank
/// may still make it.
#[derive(Debug)]
pub(super) struct CallOrderChecker {
    /// First rank and signature at each sequence number, modulo the length.
    first: Vec<Option<(usize, Words)>>,
}

impl CallOrderChecker {
    pub(super) fn new() -> CallOrderChecker {
        CallOrderChecker {
            first: vec![None; 16 * KEPT],
        }
    }

    /// Enters a call. Returns an error, naming both ranks and both calls, if another rank made
    /// another call under this number.
    pub(super) fn enter(&mut self, rank: usize, words: Words, peers: &[PeerInfo]) -> Option<Error> {
        if !is_comparable(&words) {
            return None;
        }
        let index = (words[SEQUENCE_WORD] % self.first.len() as u64) as usize;
        match &self.first[index] {
            Some((other, known)) if known[SEQUENCE_WORD] == words[SEQUENCE_WORD] => {
                if *known == words {
                    return None;
                }
                let name = |rank: usize| {
                    let peer = peers.get(rank);
                    peer.map_or(format!("rank {rank}"), |peer| peer.to_string())
                };
                Some(Error::new(
                    ErrorKind::Mismatch,
                    format!(
                        "{} makes {}, {} makes {}: all ranks must make the same calls in the \
                         same order",
                        name(*other),
                        CallSignature::describe(known),
                        name(rank),
                        CallSignature::describe(&words),
                    ),
                ))
            }
            // This rank is too far behind to be compared.
            Some((_, known)) if known[SEQUENCE_WORD] > words[SEQUENCE_WORD] => None,
            _ => {
                self.first[index] = Some((rank, words));
                None
            }
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::types::{Algorithm, CallTuning, CodecSpec, DType, Fused};

    pub(in crate::bootstrap) fn call(collective: Collective, sequence: u64, count: u64) -> Words {
        CallSignature {
            collective,
            dtype: DType::ALL[0],
            op: 0,
            algorithm: Algorithm::ALL[0],
            tuning: CallTuning::AUTO,
            root: 0,
            peer: 0,
            fused: Fused::ALONE,
            count,
            sequence,
            codec: CodecSpec::RAW,
            intra: CodecSpec::RAW,
        }
        .words()
    }

    #[test]
    fn call_log_keeps_the_latest_calls() {
        let mut log = CallLog::new();
        let sum = |count| call(Collective::AllReduce, count, 8);
        (0..3).for_each(|count| log.push(sum(count)));
        assert_eq!(log.take(), [sum(0), sum(1), sum(2)]);
        assert!(log.take().is_empty());
        (3..200).for_each(|count| log.push(sum(count)));
        let taken = log.take();
        assert_eq!(taken.len(), KEPT);
        assert_eq!((taken[0][3], taken[KEPT - 1][3]), (136, 199));
    }

    #[test]
    fn different_calls_of_one_number_are_an_error() {
        let mut checker = CallOrderChecker::new();
        let sum = |count| call(Collective::AllReduce, 7, count);
        assert!(checker.enter(0, sum(1024), &[]).is_none());
        assert!(checker.enter(1, sum(1024), &[]).is_none());
        let error = checker.enter(2, sum(1000), &[]).unwrap();
        for word in ["rank 0", "rank 2", "1024", "1000", "call 7"] {
            assert!(error.message().contains(word), "{error}");
        }
        // Neither call is compared: the first has a later number at an index in use, and the second
        // comes from a slow rank.
        assert!(
            checker
                .enter(0, call(Collective::AllReduce, 7 + 1024, 5), &[])
                .is_none()
        );
        assert!(checker.enter(1, sum(1), &[]).is_none());
        // Each pair counts its own sends and recvs.
        assert!(
            checker
                .enter(0, call(Collective::SendRecv, 9, 1), &[])
                .is_none()
        );
        assert!(
            checker
                .enter(1, call(Collective::SendRecv, 9, 2), &[])
                .is_none()
        );
    }
}
