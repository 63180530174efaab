//! Chooses a kernel variant for each measured size and makes the entries of a tuning table.

use super::point::{Point, Sweep};
use cinch::plan::{KernelVariant, TableEntry};

/// A variant that the next smaller size uses is kept if its time is at most this factor times the
/// fastest variant's time.
const AS_FAST: f64 = 1.02;
/// A variant with fewer blocks is chosen if its time is at most this factor times the fastest
/// variant's time. The saved blocks stay free for the caller's own kernels.
const WITH_FEWER: f64 = 1.01;
/// A size takes the variant of the next larger size if that variant needs less than this share of
/// the current variant's time.
const SLOWER: f64 = 0.95;

/// Returns the variant for each measured size: the variant with the fewest blocks among the
/// variants within 1 % of the fastest time. A size keeps the variant of the next smaller size if
/// this variant is within 2 % and has no more blocks. A size takes the variant of the next larger
/// size if this variant is more than 5 % faster.
pub fn variants(points: &[Point]) -> Vec<KernelVariant> {
    let mut chosen: Vec<KernelVariant> = Vec::with_capacity(points.len());
    for point in points {
        let (best, seconds) = sparing(point);
        let is_as_good = |variant: &KernelVariant| {
            variant.channels <= best.channels
                && point
                    .time(variant)
                    .is_some_and(|own| own <= AS_FAST * seconds)
        };
        let before = chosen.last().copied().filter(is_as_good);
        chosen.push(before.unwrap_or(best));
    }
    for at in (1..points.len()).rev() {
        let (variant, next) = (chosen[at - 1], chosen[at]);
        let point = &points[at - 1];
        if let (Some(own), Some(other)) = (point.time(&variant), point.time(&next))
            && other < SLOWER * own
        {
            chosen[at - 1] = next;
        }
    }
    chosen
}

/// Returns the variant with the fewest blocks among the variants within 1 % of the fastest time,
/// and the fastest time. Among variants with equally few blocks it returns the fastest.
fn sparing(point: &Point) -> (KernelVariant, f64) {
    let (best, seconds) = point.best();
    let as_fast = point
        .times
        .iter()
        .filter(|(_, own)| *own <= WITH_FEWER * seconds);
    let fewest = as_fast.min_by(|(a, own), (b, other)| {
        let by_blocks = a.channels.cmp(&b.channels);
        by_blocks.then(own.total_cmp(other))
    });
    (fewest.map_or(best, |(variant, _)| *variant), seconds)
}

/// Returns the table entries of a sweep. Between two sizes with different variants, the border lies
/// where the lines through both variants' times cross, in logarithms of size and time.
pub fn entries(sweep: &Sweep, points: &[Point]) -> Vec<TableEntry> {
    let chosen = variants(points);
    let entry = |variant: KernelVariant, from: (usize, f64), to: (usize, f64)| TableEntry {
        collective: sweep.collective,
        wire: sweep.wire(),
        from: from.0,
        to: to.0,
        variant,
        seconds: [from.1, to.1],
    };
    let end = |at: usize| {
        let point: &Point = &points[at];
        (
            point.size,
            point.time(&chosen[at]).unwrap_or(point.best().1),
        )
    };
    let mut entries = Vec::new();
    if let [point] = points {
        let (_, seconds) = end(0);
        let last = (point.size + 1, seconds);
        entries.push(entry(chosen[0], end(0), last));
    }
    for at in 1..points.len() {
        let (low, high) = (end(at - 1), end(at));
        let [first, second] = [chosen[at - 1], chosen[at]];
        if first == second {
            entries.push(entry(first, low, high));
            continue;
        }
        let border = border(&points[at - 1], &points[at], (first, second));
        if border.0 > low.0 {
            entries.push(entry(first, low, border));
        }
        if border.0 < high.0 {
            entries.push(entry(second, border, high));
        }
    }
    entries
}

/// Returns the size where the second variant becomes faster than the first, and the time there.
pub fn border(
    low: &Point,
    high: &Point,
    (first, second): (KernelVariant, KernelVariant),
) -> (usize, f64) {
    let times = |variant: &KernelVariant| [low.time(variant), high.time(variant)];
    let [first, second] = [times(&first), times(&second)];
    let share = match (first, second) {
        ([Some(a), Some(b)], [Some(c), Some(d)]) => {
            let (before, after) = ((c / a).ln().max(0.0), (b / d).ln().max(0.0));
            match before + after > 0.0 {
                true => before / (before + after),
                false => 0.5,
            }
        }
        // If a variant was not measured at the other end of the interval, the whole interval goes
        // to the other variant.
        ([_, None], [Some(_), _]) => 0.0,
        ([_, Some(_)], [None, _]) => 1.0,
        _ => 0.5,
    };
    let between = |a: f64, b: f64| (a.ln() + share * (b.ln() - a.ln())).exp();
    let size = between(low.size as f64, high.size as f64).round() as usize;
    let size = match share {
        // The smaller size itself belongs to the first variant.
        0.0 => low.size + 1,
        _ => size.clamp(low.size, high.size),
    };
    let seconds = match (first, second) {
        ([Some(a), Some(b)], _) | (_, [Some(a), Some(b)]) => between(a, b),
        ([a, _], [_, b]) => between(a.unwrap_or(low.best().1), b.unwrap_or(high.best().1)),
    };
    (size, seconds)
}
