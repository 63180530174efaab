use super::*;
use crate::bench::data::Distribution;
use crate::bench::world::threads::{self, Flaw};
use cinch::testing::{set_value, value};
use cinch::types::TransportKind;
use cinch::{Algorithm, CodecSetting, Collective, DType};

const RANKS: usize = 3;
/// Elements between the beginnings of consecutive inputs.
const STRIDE: usize = 5000;
const SETS: usize = 4;

/// Contender, number of calls, and whether a graph is replayed.
type Start = (Contender, usize, bool);

/// A simulated GPU: it computes an output when the output is read.
struct PaperGpu<'a> {
    source: &'a InputSource,
    rank: usize,
    row: Option<Row>,
    peer: bool,
    /// Rank and element whose output is wrong, and the error that is added.
    spoilt: (usize, usize, f64),
    poisoned: bool,
    graphs: [usize; 3],
    started: Vec<Start>,
}

impl CallQueue for PaperGpu<'_> {
    fn begin(&mut self, row: &Row) -> Result<()> {
        self.row = Some(*row);
        Ok(())
    }

    fn has(&self, contender: Contender, _: &Row) -> bool {
        contender == Contender::Ours || contender == Contender::Peer && self.peer
    }

    fn record(&mut self, contender: Contender, calls: usize) -> Result<()> {
        self.graphs[contender as usize] = calls;
        Ok(())
    }

    fn start(&mut self, contender: Contender, calls: usize, replay: bool) -> Result<()> {
        assert!(!replay || self.graphs[contender as usize] == calls);
        self.poisoned &= contender == Contender::Peer;
        self.started.push((contender, calls, replay));
        Ok(())
    }

    fn finish(&mut self) -> Result<f64> {
        // The last rank is the slowest; every third repetition is slow.
        let (contender, calls, replay) = *self.started.last().unwrap();
        let late = if self.started.len().is_multiple_of(3) {
            2.0
        } else {
            1.0
        };
        let each = match (contender, replay) {
            (Contender::Ours, true) => 1e-4 * late,
            (Contender::Ours, false) => 2e-4,
            (Contender::Peer | Contender::Symmetric, _) => 3e-4,
        };
        Ok(calls as f64 * each * (self.rank + 1) as f64)
    }

    fn poison(&mut self) -> Result<()> {
        self.poisoned = true;
        Ok(())
    }

    fn output(&self, call: usize) -> (usize, usize, usize) {
        let count = self.row.unwrap().count;
        (count, call % SETS, call % SETS * STRIDE)
    }

    fn read(&mut self, set: usize, start: usize, bytes: &mut [u8]) -> Result<()> {
        assert!(!self.poisoned, "the compared output is an earlier call's");
        let row = self.row.unwrap();
        let mut sums = vec![0.0; bytes.len() / 4];
        let mut input = vec![0; bytes.len()];
        for rank in 0..RANKS {
            let stream = self.source.stream(row.dtype, Some(row.op), rank, 0);
            stream.fill(set * STRIDE + start, &mut input);
            for (sum, x) in sums.iter_mut().zip(input.chunks(4)) {
                *sum += value(row.dtype, x);
            }
        }
        let (rank, element, by) = self.spoilt;
        if rank == self.rank && (start..start + sums.len()).contains(&element) {
            sums[element - start] += by;
        }
        for (sum, out) in sums.into_iter().zip(bytes.chunks_mut(4)) {
            set_value(row.dtype, sum, out);
        }
        Ok(())
    }

    fn report(&self) -> Result<Report> {
        Ok(Report {
            codec: CodecSetting::RAW,
            algorithm: Algorithm::Direct,
            transport: Some(TransportKind::Cuda),
            channels: 8,
            wire_bytes: 100,
            raw_bytes: 300,
            input: None,
            residual_norm: None,
            fused: 1,
        })
    }
}

fn measure(
    count: usize,
    peer: bool,
    mode: Mode,
    spoilt: (usize, usize, f64),
) -> Vec<(GpuMeasured, Vec<Start>)> {
    // The period is shorter than the row, and shorter than the offset of the second buffer set.
    // Data therefore wraps around in every buffer.
    let source = InputSource::generated(7, Distribution::Gaussian, RANKS).repeating(4099);
    let row = Row::new(Collective::AllReduce, DType::F32, count);
    let effort = Effort {
        iterations: 7,
        warmup: 5,
        checks: 1,
        deadline: None,
    };
    threads::run(RANKS, Flaw::None, |world| {
        let mut queue = PaperGpu {
            source: &source,
            rank: world.rank(),
            row: None,
            peer,
            spoilt,
            poisoned: false,
            graphs: [0; 3],
            started: Vec::new(),
        };
        let found = run(world, &mut queue, &source, &row, effort, mode).unwrap();
        (found, queue.started)
    })
}

const GOOD: (usize, usize, f64) = (9, 0, 0.0);

#[test]
fn contenders_take_turns_in_rotating_order() {
    for (found, started) in measure(20_000, true, Mode::Graph, GOOD) {
        // The slowest rank takes 0.6 ms for a call on a stream, so 14 calls fill a repetition of
        // about 8 ms.
        assert_eq!(found.calls, 14);
        let timed: Vec<Contender> = started[8..22].iter().map(|start| start.0).collect();
        assert!(started[6..].iter().all(|start| start.1 == 14 && start.2));
        for (repetition, pair) in timed.chunks(2).enumerate() {
            let expected = match repetition % 2 {
                0 => [Contender::Ours, Contender::Peer],
                _ => [Contender::Peer, Contender::Ours],
            };
            assert_eq!(pair, expected);
        }
        // The last of the 23 repetitions is the compared one, which runs cinch.
        assert_eq!((started.len(), started[22].0), (23, Contender::Ours));
        let peer = found.peer.unwrap();
        assert!((peer.median - 9e-4).abs() < 1e-12 && peer.p99 >= peer.median);
        assert!((found.measured.times.median - 3e-4).abs() < 1e-12);
        assert_eq!(found.measured.iterations, 7);
        assert!(found.measured.times.p99 > 5e-4);
        assert_eq!(
            (found.measured.wrong, found.measured.identical),
            (Some(0), Some(true))
        );
    }
}

#[test]
fn without_a_graph_calls_go_to_the_stream() {
    let (found, started) = &measure(100, false, Mode::Eager, GOOD)[1];
    assert!(
        started
            .iter()
            .all(|start| start.0 == Contender::Ours && !start.2)
    );
    assert_eq!(found.peer, None);
    assert!((found.measured.times.median - 6e-4).abs() < 1e-12);
}

#[test]
fn a_wrong_element_is_found_by_the_rank_that_compares_it() {
    // Rank 0 compares piece 0 and rank 1 compares piece 1, but every rank hashes all pieces.
    for rank in 0..RANKS {
        let found = &measure(300_000, false, Mode::Graph, (rank, 299_999, 1.0))[2]
            .0
            .measured;
        assert_eq!(found.identical, Some(false), "rank {rank}");
        assert_eq!(found.wrong, Some(u64::from(rank == 1)), "rank {rank}");
    }
    let found = &measure(300_000, false, Mode::Graph, (0, 17, 1.0))[2]
        .0
        .measured;
    assert_eq!((found.wrong, found.identical), (Some(1), Some(false)));
    assert!((found.max_abs_err.unwrap() - 1.0).abs() < 1e-5);
}
