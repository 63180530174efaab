//! Chooses which message sizes and kernel variants are measured, and in which order, until the time
//! is spent.
//!
//! Every rank runs the search on the same times, so that all ranks measure the same.

use super::choose;
use super::point::{Point, Sweep};
use crate::bench::row::Row;
use cinch::Result;
use cinch::plan::KernelVariant;

/// Measures kernel variants. Tests replace it by a model.
pub trait Stopwatch {
    /// Returns the kernel variants of a row's call that are worth measuring.
    fn variants(&mut self, row: &Row) -> Result<Vec<KernelVariant>>;
    /// Returns whether the row's call can run with this variant.
    fn supports(&mut self, row: &Row, variant: &KernelVariant) -> Result<bool>;
    /// Returns the seconds of the call with each variant, equal on all ranks. Each time is a median
    /// over `repetitions` repetitions, in which the variants alternate.
    fn time(
        &mut self,
        row: &Row,
        variants: &[KernelVariant],
        repetitions: usize,
    ) -> Result<Vec<f64>>;
    /// Returns the seconds since the beginning of the search, the same on all ranks.
    fn elapsed(&mut self) -> Result<f64>;
    /// Logs the measured seconds of a row's kernel variants, each a median over `repetitions`
    /// repetitions.
    fn keep(&mut self, row: &Row, size: usize, times: &[(KernelVariant, f64)], repetitions: usize);
}

/// Factor between neighbouring sizes of the first, coarse pass.
const COARSE: usize = 4;
/// If neighbouring sizes are closer than this factor, no size between them is measured, even if
/// their variants differ. The exception is a sudden rise of the time between them.
const FINE: f64 = 1.25;
/// Number of repetitions of the first round, which eliminates slow variants, and of the final
/// round.
const TRIAL: usize = 1;
const FINAL: usize = 5;
/// A variant reaches the final round if its first time is at most this factor times the fastest
/// time.
const STAYS: f64 = 1.3;
/// Largest number of variants in the final round.
const MOST_STAY: usize = 6;
/// Times that differ by at most this factor count as equal.
const SAME: f64 = 1.05;

/// Returns the sizes of the coarse pass, including the largest size.
pub fn coarse(low: usize, high: usize) -> Vec<usize> {
    let mut sizes: Vec<usize> =
        std::iter::successors(Some(low.max(1)), |size| size.checked_mul(COARSE))
            .take_while(|&size| size < high)
            .collect();
    sizes.push(high.max(low));
    sizes
}

/// The measurements for one part of a tuning table: one collective, type and codec.
pub struct Search {
    sweep: Sweep,
    nranks: usize,
    /// Measured sizes with their times, in ascending order of size.
    points: Vec<Point>,
    /// Intervals between neighbouring measured sizes (lower and upper size) in which nothing is
    /// left to measure.
    settled: Vec<(usize, usize)>,
    /// Pairs of a size and a variant that cannot run at this size.
    refused: Vec<(usize, KernelVariant)>,
}

impl Search {
    /// Creates a search that has measured nothing yet.
    pub fn new(sweep: Sweep, nranks: usize) -> Search {
        Search {
            sweep,
            nranks,
            points: Vec::new(),
            settled: Vec::new(),
            refused: Vec::new(),
        }
    }

    /// Returns the collective, type and codec whose sizes are measured.
    pub fn sweep(&self) -> &Sweep {
        &self.sweep
    }

    /// Returns the measured sizes in ascending order.
    pub fn points(&self) -> &[Point] {
        &self.points
    }

    /// Measures a size: all variants once, then the fastest variants and the variants in `also`,
    /// alternating.
    ///
    /// # Errors
    /// Returns the stopwatch's errors.
    pub fn measure(
        &mut self,
        watch: &mut impl Stopwatch,
        bytes: usize,
        also: &[KernelVariant],
    ) -> Result<()> {
        let row = self.sweep.row(self.nranks, bytes);
        let size = row.size(self.nranks);
        if row.count == 0 || self.points.iter().any(|point| point.size == size) {
            return Ok(());
        }
        let variants = watch.variants(&row)?;
        if variants.is_empty() {
            return Ok(());
        }
        let trial = watch.time(&row, &variants, TRIAL)?;
        let mut order: Vec<(KernelVariant, f64)> = variants.into_iter().zip(trial).collect();
        watch.keep(&row, size, &order, TRIAL);
        order.sort_by(|a, b| a.1.total_cmp(&b.1));
        let least = order[0].1;
        let stays = |&(at, (variant, seconds)): &(usize, (KernelVariant, f64))| {
            at < MOST_STAY && seconds <= STAYS * least || also.contains(&variant)
        };
        let stay: Vec<KernelVariant> = order
            .into_iter()
            .enumerate()
            .filter(stays)
            .map(|(_, (variant, _))| variant)
            .collect();
        let times = watch.time(&row, &stay, FINAL)?;
        let times: Vec<(KernelVariant, f64)> = stay.into_iter().zip(times).collect();
        watch.keep(&row, size, &times, FINAL);
        let at = self.points.partition_point(|point| point.size < size);
        self.points.insert(at, Point { size, times });
        Ok(())
    }

    /// Measures the variants of `variants` that have no time yet at point number `at`. The point's
    /// best variant is measured again for comparison.
    fn add(
        &mut self,
        watch: &mut impl Stopwatch,
        at: usize,
        variants: &[KernelVariant],
    ) -> Result<()> {
        let point = &self.points[at];
        let size = point.size;
        let missing = |variant: &&KernelVariant| {
            point.time(variant).is_none() && !self.refused.contains(&(size, **variant))
        };
        let missing: Vec<KernelVariant> = variants.iter().filter(missing).copied().collect();
        if missing.is_empty() {
            return Ok(());
        }
        let row = self.sweep.row(self.nranks, size);
        let mut takes: Vec<KernelVariant> = Vec::new();
        for variant in missing {
            match watch.supports(&row, &variant)? {
                true => takes.push(variant),
                false => self.refused.push((size, variant)),
            }
        }
        if takes.is_empty() {
            return Ok(());
        }
        takes.push(self.points[at].best().0);
        let times = watch.time(&row, &takes, FINAL)?;
        let times: Vec<(KernelVariant, f64)> = takes.into_iter().zip(times).collect();
        watch.keep(&row, size, &times, FINAL);
        for (variant, seconds) in times {
            self.points[at].set(variant, seconds);
        }
        Ok(())
    }

    /// Measures a size in the widest interval between two measured sizes where the best variant is
    /// still open. Returns `false` if no such interval is left.
    ///
    /// # Errors
    /// Returns the stopwatch's errors.
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
        let variants = [self.points[at].best().0, self.points[at + 1].best().0];
        // Both variants must be measured at both ends; otherwise the border between them is only a
        // guess.
        self.add(watch, at, &variants)?;
        self.add(watch, at + 1, &variants)?;
        self.settled.push((low, high));
        let pair = &self.points[at..=at + 1];
        // A size that takes longer than the next larger size was probably disturbed, so it is
        // measured again.
        if pair[0].best().1 > SAME * pair[1].best().1 {
            let again: Vec<KernelVariant> =
                pair[0].times.iter().map(|(variant, _)| *variant).collect();
            let row = self.sweep.row(self.nranks, low);
            let times = watch.time(&row, &again, 2 * FINAL)?;
            let times: Vec<(KernelVariant, f64)> = again.into_iter().zip(times).collect();
            watch.keep(&row, low, &times, 2 * FINAL);
            self.points[at].times = times;
        }
        let pair = &self.points[at..=at + 1];
        let ends = [pair[0].best(), pair[1].best()];
        let alike = |point: &Point, variant: &KernelVariant, best: f64| {
            point
                .time(variant)
                .is_some_and(|seconds| seconds <= SAME * best)
        };
        let agree = ends[0].0 == ends[1].0
            || alike(&pair[0], &ends[1].0, ends[0].1) && alike(&pair[1], &ends[0].0, ends[1].1);
        // If a variant cannot run at the other end of the interval, its time at the border is
        // extrapolated. If this time exceeds the time of the larger size, the time really jumps, or
        // the extrapolation is wrong.
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

/// Measures all of `sweeps` within `seconds`, taking turns between the sweeps: first the coarse
/// sizes, then sizes in the intervals between them. Also returns notes about sizes that were left
/// out.
///
/// # Errors
/// Returns the stopwatch's errors.
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
