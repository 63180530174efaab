//! Measures one row on host memory: buffers, timed loop and comparison.
//!
//! The time of an iteration runs from a barrier before the call to its return on the slowest rank.
//! The row's time is the median over iterations.

use super::combine::{Measured, share};
use super::data::InputSource;
use super::pipeline::{Backend, Effort, is_late};
use super::record::{RankSetup, Record, RunInfo};
use super::row::{Row, buffer_bytes, call_of, is_root, keeps_scales, set_count};
use super::verify::{Check, CheckOutcome, POISON};
use super::world::BenchRank;
use cinch::comm::Call;
use cinch::mem::{UserBuffers, bytes_of_mut};
use cinch::types::InPlace;
use cinch::{Collective, Report, Result};
use std::hash::{Hash, Hasher};
use std::ops::Range;
use std::time::Instant;

/// Whether input and output share one buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// Separate buffers.
    OutOfPlace,
    /// Input and output share one buffer.
    InPlace,
}

/// The backend for host memory.
pub struct HostBackend<'a, W: BenchRank> {
    /// This rank, and its connection to the others.
    pub world: &'a W,
    /// Input data of all ranks.
    pub source: &'a InputSource,
    /// Number and placement of the ranks.
    pub ranks: RankSetup,
    /// Machine, versions, date and command.
    pub run: RunInfo,
    /// Whether rows are also measured in place, where the call allows that.
    pub in_place: bool,
}

impl<W: BenchRank> Backend for HostBackend<'_, W> {
    type Rank = W;

    fn world(&self) -> &W {
        self.world
    }

    fn explain(&self, row: &Row) -> Result<String> {
        let call = Call {
            tensor: tensor(row, Placement::OutOfPlace),
            ..call_of(row, self.world.rank(), self.world.nranks())
        };
        self.world.explain(&call)
    }

    fn measure(&mut self, row: &Row, effort: Effort) -> Result<Record> {
        let mut host = HostRow::new(self.world, self.source, *row, effort)?;
        let out = host.run(Placement::OutOfPlace)?;
        // A send and its receive always have separate buffers.
        let in_place = match self.in_place && row.collective != Collective::SendRecv {
            true => Some(host.run(Placement::InPlace)?),
            false => None,
        };
        Ok(Record::new(
            self.ranks,
            &self.run,
            row,
            &out,
            in_place.as_ref(),
        ))
    }
}

/// Returns a tensor name for codecs that keep a scale between calls. Each row and placement gets
/// another name, so that none uses another's scale.
fn tensor(row: &Row, placement: Placement) -> Option<u64> {
    keeps_scales(row).then(|| {
        let mut hasher = std::hash::DefaultHasher::new();
        (placement == Placement::InPlace, row.count).hash(&mut hasher);
        (row.root, row.dtype, row.op.number()).hash(&mut hasher);
        hasher.finish()
    })
}

/// A row's buffers and calls on this rank.
pub struct HostRow<'a, W: BenchRank> {
    world: &'a W,
    source: &'a InputSource,
    row: Row,
    effort: Effort,
    input_bytes: usize,
    output_bytes: usize,
    sets: Vec<BufferSet>,
}

/// A pair of buffers; calls use several such sets in rotation.
struct BufferSet {
    input: AlignedBuffer,
    /// The output. For in-place calls it holds both input and output, and is as large as the larger
    /// of the two.
    work: AlignedBuffer,
}

impl<'a, W: BenchRank> HostRow<'a, W> {
    /// Allocates and fills the buffers.
    ///
    /// # Errors
    /// Returns an invalid-argument error if the sizes overflow.
    pub fn new(world: &'a W, source: &'a InputSource, row: Row, effort: Effort) -> Result<Self> {
        let (rank, nranks) = (world.rank(), world.nranks());
        let (input_bytes, output_bytes) = buffer_bytes(&row, is_root(&row, rank), nranks)?;
        let mut host = HostRow {
            world,
            source,
            row,
            effort,
            input_bytes,
            output_bytes,
            sets: Vec::new(),
        };
        for index in 0..set_count(&row, nranks) {
            let mut set = BufferSet {
                input: AlignedBuffer::new(input_bytes),
                work: AlignedBuffer::new(input_bytes.max(output_bytes)),
            };
            source
                .stream(row.dtype, row.reduction(), rank, index)
                .fill(0, set.input.bytes());
            set.work.bytes().fill(POISON);
            host.sets.push(set);
        }
        Ok(host)
    }

    /// Warms up, measures the row and compares results. All ranks get the same result.
    ///
    /// # Errors
    /// Returns the errors of the calls.
    pub fn run(&mut self, placement: Placement) -> Result<Measured> {
        let mut outcome = (self.effort.checks > 0).then(CheckOutcome::default);
        let half = self.effort.half();
        // The first call is compared as well, because it runs on buffers that no call has used
        // before.
        let (mut report, mut each) = self.checked_call(placement, &mut outcome)?;
        for _ in 1..self.effort.checks {
            if is_late(self.world, half)? {
                break;
            }
            (report, each) = self.checked_call(placement, &mut outcome)?;
        }
        let start = Instant::now();
        for iteration in 0..self.effort.warmup as usize {
            if is_late(self.world, half)? {
                break;
            }
            let set = self.prepare(placement, iteration, usize::MAX);
            report = self.call(placement, set)?;
            each = start.elapsed().as_secs_f64() / (iteration + 1) as f64;
        }
        let iterations = self.effort.affordable(self.world, each)?;
        let mut times = Vec::with_capacity(iterations);
        for iteration in 0..iterations {
            let set = self.prepare(placement, iteration, iterations);
            self.world.barrier()?;
            let start = Instant::now();
            report = self.call(placement, set)?;
            times.push(start.elapsed().as_secs_f64());
        }
        self.compare(
            placement,
            &report,
            (iterations - 1) % self.sets.len(),
            &mut outcome,
        );
        share(self.world, &self.row, &report, &times, outcome)
    }

    /// Makes a call on the first buffers, compares its result if results are compared, and returns its report
    /// and seconds.
    fn checked_call(
        &mut self,
        placement: Placement,
        outcome: &mut Option<CheckOutcome>,
    ) -> Result<(Report, f64)> {
        self.poison(0..1);
        self.reset(placement, 0..1);
        let start = Instant::now();
        let report = self.call(placement, 0)?;
        let each = start.elapsed().as_secs_f64();
        self.compare(placement, &report, 0, outcome);
        Ok((report, each))
    }

    /// Prepares the buffers of an iteration outside the timed region and returns the number of the
    /// buffer set. Outputs are overwritten before their last use, so that the comparison cannot
    /// accept a result of an earlier iteration.
    fn prepare(&mut self, placement: Placement, iteration: usize, iterations: usize) -> usize {
        let set = iteration % self.sets.len();
        if set == 0 {
            if iterations - iteration <= self.sets.len() {
                self.poison(0..self.sets.len());
            }
            self.reset(placement, 0..self.sets.len());
        }
        set
    }

    /// Restores inputs that in-place calls have overwritten. All sets are restored together, so
    /// that the caches no longer hold the first set when it is used.
    fn reset(&mut self, placement: Placement, sets: Range<usize>) {
        if placement == Placement::OutOfPlace {
            return;
        }
        let range = self.in_place().0;
        for set in &mut self.sets[sets] {
            set.work.bytes()[range.clone()].copy_from_slice(set.input.bytes());
        }
    }

    fn poison(&mut self, sets: Range<usize>) {
        for set in &mut self.sets[sets] {
            set.work.bytes().fill(POISON);
        }
    }

    /// Returns the byte ranges of input and output in one buffer, as NCCL defines in-place calls.
    fn in_place(&self) -> (Range<usize>, Range<usize>) {
        let block = self.row.count * self.row.dtype.size();
        let own = self.world.rank() * block;
        let (input, output) = (self.input_bytes, self.output_bytes);
        match self.row.collective.in_place() {
            InPlace::InputInOutput if output > input => (own..own + input, 0..output),
            InPlace::OutputInInput if input > output => (0..input, own..own + output),
            _ => (0..input, 0..output),
        }
    }

    fn call(&mut self, placement: Placement, set: usize) -> Result<Report> {
        let call = Call {
            tensor: tensor(&self.row, placement),
            ..call_of(&self.row, self.world.rank(), self.world.nranks())
        };
        let (input_range, output_range) = self.in_place();
        let (input_bytes, output_bytes) = (self.input_bytes, self.output_bytes);
        let BufferSet { input, work } = &mut self.sets[set];
        if self.row.collective == Collective::SendRecv {
            let (me, n) = (self.world.rank(), self.world.nranks());
            let recv = Call {
                root: (me + n - 1) % n,
                peer: me,
                ..call
            };
            return self.world.exchange(
                (&call, input.bytes()),
                (&recv, &mut work.bytes()[..output_bytes]),
            );
        }
        let buffers = match placement {
            Placement::OutOfPlace => UserBuffers::new(
                &input.bytes()[..input_bytes],
                &mut work.bytes()[..output_bytes],
            ),
            Placement::InPlace => {
                UserBuffers::overlapping(work.bytes(), input_range, output_range)?
            }
        };
        self.world.call(&call, buffers)
    }

    fn compare(
        &mut self,
        placement: Placement,
        report: &Report,
        set: usize,
        outcome: &mut Option<CheckOutcome>,
    ) {
        let Some(outcome) = outcome else { return };
        let range = match placement {
            Placement::InPlace => self.in_place().1,
            Placement::OutOfPlace => 0..self.output_bytes,
        };
        let check = Check {
            source: self.source,
            row: &self.row,
            rank: self.world.rank(),
            nranks: self.world.nranks(),
            set,
            shift: 0,
            codec: report.codec.into(),
            algorithm: report.algorithm,
        };
        outcome.merge(&check.run(&self.sets[set].work.bytes()[range]));
    }
}

/// Zeroed bytes that begin at a cache line boundary.
struct AlignedBuffer {
    words: Vec<u64>,
    skip: usize,
    length: usize,
}

impl AlignedBuffer {
    fn new(length: usize) -> AlignedBuffer {
        const LINE: usize = 64;
        let words = vec![0u64; (length + LINE).div_ceil(8)];
        let skip = words.as_ptr().addr().wrapping_neg() % LINE;
        AlignedBuffer {
            words,
            skip,
            length,
        }
    }

    fn bytes(&mut self) -> &mut [u8] {
        &mut bytes_of_mut(&mut self.words)[self.skip..][..self.length]
    }
}

#[cfg(test)]
mod tests {
    use super::super::data::Distribution;
    use super::super::verify::same_on_all_ranks;
    use super::super::world::threads::{self, Flaw};
    use super::*;
    use cinch::testing::{largest, value};
    use cinch::types::{CodecKind, Scalar};
    use cinch::{CodecSpec, Config, DType, ReduceOp};

    fn measure(row: Row, flaw: Flaw, placement: Placement, nranks: usize) -> Vec<Measured> {
        let source = InputSource::generated(11, Distribution::Gaussian, nranks);
        let effort = Effort {
            iterations: 3,
            warmup: 1,
            checks: 1,
            deadline: None,
        };
        threads::run(nranks, flaw, |world| {
            let mut host = HostRow::new(world, &source, row, effort).unwrap();
            host.run(placement).unwrap()
        })
    }

    fn row(collective: Collective, dtype: DType, op: ReduceOp) -> Row {
        Row {
            op,
            root: 1,
            ..Row::new(collective, dtype, 1000)
        }
    }

    #[test]
    fn correct_results_of_every_collective_pass() {
        for collective in Collective::ALL {
            for placement in [Placement::OutOfPlace, Placement::InPlace] {
                if collective == Collective::SendRecv && placement == Placement::InPlace {
                    continue;
                }
                for found in measure(
                    row(collective, DType::F32, ReduceOp::Sum),
                    Flaw::None,
                    placement,
                    3,
                ) {
                    assert_eq!(found.wrong, Some(0), "{collective} {placement:?}");
                    assert!(
                        found.times.median >= found.times.least
                            && found.times.p99 >= found.times.median
                    );
                    assert_eq!(
                        found.identical,
                        same_on_all_ranks(collective).then_some(true)
                    );
                }
            }
        }
    }

    #[test]
    fn correct_results_of_every_type_and_reduction_pass() {
        for dtype in DType::ALL {
            for op in [
                ReduceOp::Sum,
                ReduceOp::Prod,
                ReduceOp::Min,
                ReduceOp::Max,
                ReduceOp::Avg,
                ReduceOp::PreMulSum(Scalar::Int(1)),
            ] {
                let row = row(Collective::ReduceScatter, dtype, op);
                let found = &measure(row, Flaw::None, Placement::InPlace, 3)[0];
                assert_eq!(found.wrong, Some(0), "{dtype} {op}");
            }
        }
    }

    #[test]
    fn one_wrong_element_is_found_everywhere() {
        for collective in Collective::ALL {
            let mut row = row(collective, DType::F32, ReduceOp::Sum);
            row.root = 1;
            let found = measure(row, Flaw::WrongElement, Placement::OutOfPlace, 4);
            // The first and the last iteration each find one wrong element, on one rank.
            assert!(found.iter().all(|f| f.wrong == Some(2)), "{collective}");
            if same_on_all_ranks(collective) {
                assert_eq!(found[0].identical, Some(false), "{collective}");
            }
        }
        for dtype in [DType::I8, DType::U32, DType::I64, DType::F16, DType::F8E4M3] {
            let row = row(Collective::AllReduce, dtype, ReduceOp::Sum);
            let found = measure(row, Flaw::WrongElement, Placement::InPlace, 2);
            assert_eq!(found[1].wrong, Some(2), "{dtype}");
        }
    }

    #[test]
    fn results_of_an_earlier_call_do_not_count() {
        for collective in Collective::ALL {
            let row = row(collective, DType::I32, ReduceOp::Sum);
            let found = measure(row, Flaw::OnlyOnce, Placement::OutOfPlace, 2);
            assert!(
                found[0].wrong > Some(900),
                "{collective}: {:?}",
                found[0].wrong
            );
        }
    }

    /// The error bound of some codecs exceeds every sum, so any number would pass the check. NaN
    /// must fail it.
    #[test]
    fn unwritten_outputs_are_wrong_with_every_codec() {
        for codec in CodecSpec::samples() {
            for collective in Collective::ALL {
                for dtype in [DType::F32, DType::BF16, DType::F16] {
                    let row = Row {
                        codec: Some(codec.into()),
                        ..row(collective, dtype, ReduceOp::Sum)
                    };
                    let what = format!("{collective} of {dtype} with {codec}");
                    let found = measure(row, Flaw::None, Placement::OutOfPlace, 2);
                    assert_eq!(found[0].wrong, Some(0), "{what}");
                    let found = measure(row, Flaw::OnlyOnce, Placement::OutOfPlace, 2);
                    assert!(found[0].wrong >= Some(1000), "{what}: {:?}", found[0].wrong);
                }
            }
        }
        for dtype in DType::ALL.into_iter().filter(|dtype| dtype.is_float()) {
            let poison = value(dtype, &[POISON; 8][..dtype.size()]);
            assert!(poison.is_nan() || poison == -largest(dtype), "{dtype}");
        }
    }

    #[test]
    fn zeros_are_wrong_where_a_codec_leaves_more() {
        for codec in CodecSpec::samples() {
            let row = Row {
                codec: Some(codec.into()),
                ..row(Collective::AllReduce, DType::F32, ReduceOp::Sum)
            };
            let found = measure(row, Flaw::Zeros, Placement::OutOfPlace, 2);
            // This codec sets elements below its threshold to zero, so a zero output may be
            // correct.
            let may_be = codec.kind == CodecKind::Threshold2;
            let wrong = found[0].wrong.unwrap();
            assert_eq!(wrong > 0, !may_be, "{codec}: {wrong}");
        }
    }

    #[test]
    fn ranks_that_differ_within_the_bound_are_not_identical() {
        let row = row(Collective::AllReduce, DType::F32, ReduceOp::Sum);
        let found = measure(row, Flaw::OneUlp, Placement::OutOfPlace, 4);
        assert_eq!((found[0].wrong, found[0].identical), (Some(0), Some(false)));
    }

    #[test]
    fn noise_is_measured_and_judged_by_the_codec() {
        let mut row = row(Collective::AllReduce, DType::F32, ReduceOp::Sum);
        row.codec = Some("linear8".parse().unwrap());
        let found = &measure(row, Flaw::Noise(0.003), Placement::OutOfPlace, 4)[0];
        assert_eq!((found.wrong, found.identical), (Some(0), Some(true)));
        let rms = found.rms_rel_err.unwrap();
        assert!((rms / 0.003 - 1.0).abs() < 1e-3, "{rms}");
        row.codec = None;
        let found = &measure(row, Flaw::Noise(0.003), Placement::OutOfPlace, 4)[0];
        assert!(found.wrong.unwrap() > 1000);
    }

    /// `--explain` must pass the peer of a send, and a tensor name for a codec that keeps scales.
    #[test]
    fn every_row_is_explained() {
        let source = InputSource::generated(1, Distribution::Gaussian, 2);
        let all = Collective::ALL.map(|collective| row(collective, DType::F32, ReduceOp::Sum));
        let tensor = Row {
            codec: Some("linear8:tensor=5".parse().unwrap()),
            ..all[0]
        };
        for row in all.into_iter().chain([tensor]) {
            let texts = cinch::testing::local_world(2, &Config::default(), |comm| {
                let backend = HostBackend {
                    world: comm,
                    source: &source,
                    ranks: RankSetup {
                        nranks: 2,
                        per_gpu: 1,
                        hosts: 1,
                        processes: false,
                    },
                    run: RunInfo::on_host(),
                    in_place: true,
                };
                backend.explain(&row).unwrap()
            });
            let name = row.collective.name();
            assert!(texts.iter().all(|text| text.contains(name)), "{texts:?}");
        }
    }

    #[test]
    fn errors_pass_through() {
        let source = InputSource::generated(1, Distribution::Gaussian, 1);
        let row = Row {
            count: 5,
            ..row(Collective::AllReduce, DType::F32, ReduceOp::Sum)
        };
        let effort = Effort {
            iterations: 1,
            warmup: 0,
            checks: 1,
            deadline: None,
        };
        let failed = threads::run(1, Flaw::Error, |world| {
            HostRow::new(world, &source, row, effort)
                .unwrap()
                .run(Placement::InPlace)
                .is_err()
        });
        assert_eq!(failed, [true]);
    }

    #[test]
    fn a_deadline_in_the_past_leaves_one_iteration() {
        let source = InputSource::generated(1, Distribution::Gaussian, 2);
        let row = row(Collective::AllReduce, DType::F32, ReduceOp::Sum);
        let effort = Effort {
            iterations: 50,
            warmup: 1,
            checks: 0,
            deadline: Some(Instant::now()),
        };
        let found = threads::run(2, Flaw::None, |world| {
            HostRow::new(world, &source, row, effort)
                .unwrap()
                .run(Placement::OutOfPlace)
                .unwrap()
        });
        assert_eq!(found[1].iterations, 1);
        assert_eq!(found[1].wrong, None);
    }
}
