//! What is measured, in which order, until the time is spent.
//!
//! Every rank runs the search, and all of them on the same times, so that all measure the same.

use super::choose;
use crate::bench::metrics::{count_of, size_of};
use crate::bench::row::Row;
use cinch::plan::{KernelVariant, WireClass};
use cinch::types::CodecSetting;
use cinch::{Collective, DType, ReduceOp, Result};

/// What measures; in tests a model of times.
pub trait Stopwatch {
    /// The ways of a row's call that are worth a measurement.
    fn variants(&mut self, row: &Row) -> Result<Vec<KernelVariant>>;
    /// Whether the row's call can go this way.
    fn can(&mut self, row: &Row, way: &KernelVariant) -> Result<bool>;
    /// Seconds of the call each way: medians over so many repetitions, in which all take turns. The
    /// same on all ranks.
    fn time(&mut self, row: &Row, ways: &[KernelVariant], repetitions: usize) -> Result<Vec<f64>>;
    /// Seconds since the beginning. The same on all ranks.
    fn elapsed(&mut self) -> Result<f64>;
    /// Keeps a measurement.
    fn keep(&mut self, row: &Row, size: usize, times: &[(KernelVariant, f64)], repetitions: usize);
}

/// Calls whose sizes are swept: one part of a table.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sweep {
    /// The collective.
    pub collective: Collective,
    /// Its elements.
    pub dtype: DType,
    /// Its codec.
    pub codec: CodecSetting,
}

impl Sweep {
    /// The call whose larger buffer has about `bytes`.
    pub fn row(&self, nranks: usize, bytes: usize) -> Row {
        Row {
            collective: self.collective,
            dtype: self.dtype,
            op: ReduceOp::Sum,
            root: 0,
            count: count_of(self.collective, self.dtype, nranks, bytes),
            codec: Some(self.codec),
            algorithm: None,
        }
    }

    /// What its messages hold.
    pub fn wire(&self) -> WireClass {
        WireClass {
            codec: self.codec.inter.kind,
            element_bytes: self.dtype.size(),
        }
    }
}

/// What was measured at one size.
#[derive(Clone, Debug, PartialEq)]
pub struct Point {
    /// Bytes of the larger buffer.
    pub size: usize,
    /// Seconds each way, of the ways that stayed in the race.
    pub times: Vec<(KernelVariant, f64)>,
}

impl Point {
    /// Seconds of a way, if it was measured.
    pub fn time(&self, way: &KernelVariant) -> Option<f64> {
        let known = self.times.iter().find(|(known, _)| known == way);
        known.map(|(_, seconds)| *seconds)
    }

    /// The fastest.
    pub fn best(&self) -> (KernelVariant, f64) {
        let least = self.times.iter().min_by(|a, b| a.1.total_cmp(&b.1));
        *least.unwrap_or(&self.times[0])
    }

    fn set(&mut self, way: KernelVariant, seconds: f64) {
        match self.times.iter_mut().find(|(known, _)| *known == way) {
            Some(known) => known.1 = seconds,
            None => self.times.push((way, seconds)),
        }
    }
}

/// Factor between the sizes that are measured first.
const COARSE: usize = 4;
/// Factor between neighbours that choose differently below which nothing between them is measured, unless
/// the time at the border between them would be a cliff.
const FINE: f64 = 1.25;
/// Repetitions by which ways are thrown out, and by which those that stay are compared.
const TRIAL: usize = 1;
const FINAL: usize = 5;
/// How many times slower than the fastest a way may be in its trial and stay.
const STAYS: f64 = 1.3;
/// How many stay at most.
const MOST_STAY: usize = 6;
/// Times that are closer are one.
const SAME: f64 = 1.05;

/// The sizes that are measured first, the largest included.
pub fn coarse(low: usize, high: usize) -> Vec<usize> {
    let mut sizes: Vec<usize> =
        std::iter::successors(Some(low.max(1)), |size| size.checked_mul(COARSE))
            .take_while(|&size| size < high)
            .collect();
    sizes.push(high.max(low));
    sizes
}

/// One part of a table in the making.
pub struct Search {
    sweep: Sweep,
    nranks: usize,
    /// By size.
    points: Vec<Point>,
    /// Sizes between which all has been measured that can be.
    settled: Vec<(usize, usize)>,
    /// Ways that cannot be taken at a size.
    refused: Vec<(usize, KernelVariant)>,
}

impl Search {
    /// Nothing is measured yet.
    pub fn new(sweep: Sweep, nranks: usize) -> Search {
        Search {
            sweep,
            nranks,
            points: Vec::new(),
            settled: Vec::new(),
            refused: Vec::new(),
        }
    }

    /// What is swept.
    pub fn sweep(&self) -> &Sweep {
        &self.sweep
    }

    /// What was measured, by size.
    pub fn points(&self) -> &[Point] {
        &self.points
    }

    /// Measures all ways at a size: all of them shortly, then the fastest ones and `also` in turns.
    ///
    /// # Errors
    /// Those of the watch.
    pub fn measure(
        &mut self,
        watch: &mut impl Stopwatch,
        bytes: usize,
        also: &[KernelVariant],
    ) -> Result<()> {
        let row = self.sweep.row(self.nranks, bytes);
        let size = size_of(row.collective, row.dtype, self.nranks, row.count);
        if row.count == 0 || self.points.iter().any(|point| point.size == size) {
            return Ok(());
        }
        let ways = watch.variants(&row)?;
        if ways.is_empty() {
            return Ok(());
        }
        let trial = watch.time(&row, &ways, TRIAL)?;
        let mut order: Vec<(KernelVariant, f64)> = ways.into_iter().zip(trial).collect();
        watch.keep(&row, size, &order, TRIAL);
        order.sort_by(|a, b| a.1.total_cmp(&b.1));
        let least = order[0].1;
        let stays = |&(at, (way, seconds)): &(usize, (KernelVariant, f64))| {
            at < MOST_STAY && seconds <= STAYS * least || also.contains(&way)
        };
        let stay: Vec<KernelVariant> = order
            .into_iter()
            .enumerate()
            .filter(stays)
            .map(|(_, (way, _))| way)
            .collect();
        let times = watch.time(&row, &stay, FINAL)?;
        let times: Vec<(KernelVariant, f64)> = stay.into_iter().zip(times).collect();
        watch.keep(&row, size, &times, FINAL);
        let at = self.points.partition_point(|point| point.size < size);
        self.points.insert(at, Point { size, times });
        Ok(())
    }

    /// Measures at a point that is there the ways that are missing, beside its best one.
    fn add(&mut self, watch: &mut impl Stopwatch, at: usize, ways: &[KernelVariant]) -> Result<()> {
        let point = &self.points[at];
        let size = point.size;
        let missing = |way: &&KernelVariant| {
            point.time(way).is_none() && !self.refused.contains(&(size, **way))
        };
        let missing: Vec<KernelVariant> = ways.iter().filter(missing).copied().collect();
        if missing.is_empty() {
            return Ok(());
        }
        let row = self.sweep.row(self.nranks, size);
        let mut takes: Vec<KernelVariant> = Vec::new();
        for way in missing {
            match watch.can(&row, &way)? {
                true => takes.push(way),
                false => self.refused.push((size, way)),
            }
        }
        if takes.is_empty() {
            return Ok(());
        }
        takes.push(self.points[at].best().0);
        let times = watch.time(&row, &takes, FINAL)?;
        let times: Vec<(KernelVariant, f64)> = takes.into_iter().zip(times).collect();
        watch.keep(&row, size, &times, FINAL);
        for (way, seconds) in times {
            self.points[at].set(way, seconds);
        }
        Ok(())
    }

    /// Measures what the two ends of the widest gap leave open; `false` if there is none.
    ///
    /// # Errors
    /// Those of the watch.
    pub fn refine(&mut self, watch: &mut impl Stopwatch) -> Result<bool> {
        let open = |(at, pair): (usize, &[Point])| {
            let (low, high) = (pair[0].size, pair[1].size);
            let settled = self.settled.contains(&(low, high));
            (!settled).then_some((at, high as f64 / low as f64))
        };
        let gaps = self.points.windows(2).enumerate().filter_map(open);
        let Some((at, ratio)) = gaps.max_by(|a, b| a.1.total_cmp(&b.1)) else {
            return Ok(false);
        };
        let (low, high) = (self.points[at].size, self.points[at + 1].size);
        let ways = [self.points[at].best().0, self.points[at + 1].best().0];
        // Each must have run at both ends, or the border between them is a guess.
        self.add(watch, at, &ways)?;
        self.add(watch, at + 1, &ways)?;
        self.settled.push((low, high));
        let pair = &self.points[at..=at + 1];
        // A size that is slower than the next larger one is one that was disturbed.
        if pair[0].best().1 > SAME * pair[1].best().1 {
            let again: Vec<KernelVariant> = pair[0].times.iter().map(|(way, _)| *way).collect();
            let row = self.sweep.row(self.nranks, low);
            let times = watch.time(&row, &again, 2 * FINAL)?;
            let times: Vec<(KernelVariant, f64)> = again.into_iter().zip(times).collect();
            watch.keep(&row, low, &times, 2 * FINAL);
            self.points[at].times = times;
        }
        let pair = &self.points[at..=at + 1];
        let ends = [pair[0].best(), pair[1].best()];
        let alike = |point: &Point, way: &KernelVariant, best: f64| {
            point
                .time(way)
                .is_some_and(|seconds| seconds <= SAME * best)
        };
        let agree = ends[0].0 == ends[1].0
            || alike(&pair[0], &ends[1].0, ends[0].1) && alike(&pair[1], &ends[0].0, ends[1].1);
        // Where two ways meet the time is a guess, which a way that cannot run at the other end makes
        // a poor one: above the time of the larger size it is a cliff, or a wrong guess.
        let border = choose::border(&pair[0], &pair[1], (ends[0].0, ends[1].0));
        let between = if agree {
            None
        } else if ratio > FINE {
            Some((low as f64 * high as f64).sqrt() as usize)
        } else {
            let is_cliff = border.1 > SAME * ends[1].1 && high - low > 1;
            is_cliff.then(|| border.0.clamp(low + 1, high - 1))
        };
        if let Some(between) = between {
            let before = self.points.len();
            self.measure(watch, between, &[ends[0].0, ends[1].0])?;
            if self.points.len() > before {
                self.settled.retain(|gap| *gap != (low, high));
            }
        }
        Ok(true)
    }
}

/// Measures all of `sweeps` within `seconds`: first every size coarsely, then the gaps, each sweep in
/// its turn. What was left out comes as sentences.
///
/// # Errors
/// Those of the watch.
pub fn run(
    watch: &mut impl Stopwatch,
    sweeps: &[Sweep],
    nranks: usize,
    (low, high): (usize, usize),
    seconds: f64,
) -> Result<(Vec<Search>, Vec<String>)> {
    let mut searches: Vec<Search> = sweeps
        .iter()
        .map(|sweep| Search::new(*sweep, nranks))
        .collect();
    let mut notes = Vec::new();
    let sizes = coarse(low, high);
    for (index, &size) in sizes.iter().enumerate() {
        for search in &mut searches {
            if index > 0 && watch.elapsed()? >= seconds {
                notes.push(format!(
                    "the time was spent before {size} bytes of {} were measured: give more --seconds",
                    search.sweep.collective
                ));
                return Ok((searches, notes));
            }
            search.measure(watch, size, &[])?;
        }
    }
    let mut open = true;
    while open {
        open = false;
        for search in &mut searches {
            if watch.elapsed()? >= seconds {
                notes.push("the time was spent before all borders were measured".into());
                return Ok((searches, notes));
            }
            open |= search.refine(watch)?;
        }
    }
    Ok((searches, notes))
}
