//! Runs lists of cases on rank threads. The oracle checks every rank's output, and checks that no call
//! changes memory outside its output.

use super::{Case, check};
use crate::support::{config, world};
use cinch::mem::UserBuffers;
use cinch::types::TransportKind;
use cinch::{Algorithm, CodecSetting, Collective, Communicator, ErrorKind, Report};
use std::collections::BTreeSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::Duration;

/// Byte that fills the memory around buffers.
const GUARD: u8 = 0x5a;

/// Result of a collective on one rank.
struct Done {
    output: Vec<u8>,
    report: Report,
    /// First byte outside the output that changed.
    stray: Option<usize>,
}

type Outcome = Result<Done, cinch::Error>;

/// Input and output of a rank in one allocation, at the alignment that the case requests, with
/// guard bytes around both.
struct Memory {
    bytes: Vec<u8>,
    input: (usize, usize),
    output: (usize, usize),
}

impl Memory {
    fn new(case: &Case, rank: usize, nranks: usize) -> Memory {
        let input = case.input(rank, nranks);
        let (ins, outs) = (input.len(), case.output_bytes(rank, nranks));
        let block = case.call.count * case.call.dtype.size();
        let round = |bytes: usize| bytes.next_multiple_of(64) + 64;
        let mut bytes = vec![GUARD; round(ins) + round(outs) + 256];
        let base = bytes.as_ptr().align_offset(64) + 64;
        let input_at = base + case.align[0];
        let output_at = if !case.in_place || ins == 0 || outs == 0 {
            base + round(ins) + case.align[1]
        } else {
            match case.call.collective {
                Collective::ReduceScatter => input_at + rank * block,
                Collective::Scatter => input_at + case.call.root * block,
                _ => input_at,
            }
        };
        let input_at = match case.call.collective {
            Collective::AllGather | Collective::Gather if output_at == input_at => {
                input_at + rank * block
            }
            _ => input_at,
        };
        bytes[input_at..input_at + ins].copy_from_slice(&input);
        Memory {
            bytes,
            input: (input_at, ins),
            output: (output_at, outs),
        }
    }

    #[allow(unsafe_code)]
    fn buffers(&mut self) -> UserBuffers<'_> {
        let ((input_at, ins), (output_at, outs)) = (self.input, self.output);
        assert!(input_at + ins <= self.bytes.len() && output_at + outs <= self.bytes.len());
        let start = self.bytes.as_mut_ptr();
        // SAFETY: the assertion keeps both ranges within `bytes`, which the result borrows.
        unsafe { UserBuffers::from_raw(start.add(input_at), ins, start.add(output_at), outs) }
    }

    fn run(case: &Case, comm: &Communicator) -> Outcome {
        let mut memory = Memory::new(case, comm.rank(), comm.nranks());
        let before = memory.bytes.clone();
        let report = comm.call(&case.call_of(comm.rank()), memory.buffers())?;
        let (at, length) = memory.output;
        let outside = (0..at).chain(at + length..before.len());
        Ok(Done {
            output: memory.bytes[at..at + length].to_vec(),
            report,
            stray: outside
                .into_iter()
                .find(|&at| memory.bytes[at] != before[at]),
        })
    }
}

/// Results of a list of cases.
#[derive(Default)]
pub struct Tally {
    /// Number of cases that ran.
    pub ran: usize,
    /// Pairs of a collective and an algorithm that the library refused.
    pub refused: BTreeSet<(&'static str, &'static str)>,
    /// Hash of each case's output if all ranks must agree on it, else 0.
    pub hashes: Vec<u64>,
}

/// Runs `cases` in order on one communicator, and checks every rank's output while later cases run.
pub fn run(transport: TransportKind, nranks: usize, cases: &[Case]) -> Tally {
    let (senders, receivers): (Vec<_>, Vec<_>) = (0..nranks)
        .map(|_| {
            let (sender, receiver) = sync_channel::<Outcome>(2);
            (Mutex::new(Some(sender)), receiver)
        })
        .unzip();
    std::thread::scope(|scope| {
        let checker = scope.spawn(move || check_all(transport, nranks, cases, &receivers));
        world(nranks, &config(transport), |comm| {
            // Moving the sender into this thread closes the checker's channel if the rank panics.
            let sender = senders[comm.rank()].lock().unwrap().take().unwrap();
            for case in cases {
                // A failed send means that the checker has dropped its receivers after the first
                // failure.
                if sender.send(Memory::run(case, &comm)).is_err() {
                    break;
                }
            }
        });
        checker.join().expect("a case failed, see above")
    })
}

fn check_all(
    transport: TransportKind,
    nranks: usize,
    cases: &[Case],
    ranks: &[Receiver<Outcome>],
) -> Tally {
    let mut tally = Tally::default();
    for case in cases {
        let outcomes: Vec<Outcome> = ranks
            .iter()
            .map(|rank| {
                rank.recv_timeout(Duration::from_secs(60))
                    .expect("a rank is stuck")
            })
            .collect();
        let what = format!("{transport}, {nranks} ranks, {case:?}");
        let refusal = |outcome: &Outcome| {
            outcome.as_ref().is_err_and(|error| {
                matches!(
                    error.kind(),
                    ErrorKind::InvalidUsage | ErrorKind::Unsupported
                )
            })
        };
        if let Some(algorithm) = case.call.algorithm
            && (case.call.collective != Collective::AllReduce || !sums(algorithm))
            && outcomes.iter().all(refusal)
        {
            tally
                .refused
                .insert((case.call.collective.name(), algorithm.name()));
            tally.hashes.push(0);
            continue;
        }
        let done: Vec<Done> = outcomes
            .into_iter()
            .map(|outcome| outcome.unwrap_or_else(|error| panic!("{what}: {error}")))
            .collect();
        let inputs: Vec<_> = (0..nranks).map(|rank| case.input(rank, nranks)).collect();
        for (rank, done) in done.iter().enumerate() {
            check(case, rank, &inputs, &done.output, &done.report)
                .unwrap_or_else(|wrong| panic!("{what}: {wrong}"));
            assert_eq!(
                done.stray, None,
                "{what}: rank {rank} wrote outside its output"
            );
            check_report(case, nranks, transport, &done.report, &what);
        }
        tally.hashes.push(if same_everywhere(case.call.collective) {
            for (rank, other) in done.iter().enumerate() {
                assert!(
                    done[0].output == other.output,
                    "{what}: rank {rank} has other bits"
                );
            }
            let mut hasher = DefaultHasher::new();
            done[0].output.hash(&mut hasher);
            hasher.finish()
        } else {
            0
        });
        tally.ran += 1;
    }
    tally
}

fn same_everywhere(collective: Collective) -> bool {
    collective.replicates_output()
}

fn check_report(case: &Case, nranks: usize, transport: TransportKind, report: &Report, what: &str) {
    if nranks == 1 || case.call.count == 0 {
        return;
    }
    let asked = case.call.codec.unwrap_or(CodecSetting::RAW);
    assert_eq!(report.codec, asked, "{what}: {report:?}");
    if let Some(algorithm) = case.call.algorithm {
        assert_eq!(report.algorithm, algorithm, "{what}: {report:?}");
    }
    if report.wire_bytes > 0 {
        assert_eq!(report.transport, Some(transport), "{what}: {report:?}");
    }
}

/// Returns whether all_reduce must have this algorithm: every one but those that the table of schedules
/// gives to other collectives alone.
fn sums(algorithm: Algorithm) -> bool {
    algorithm == Algorithm::Hierarchical
        || cinch::schedule::algorithms(Collective::AllReduce).contains(&algorithm)
}
