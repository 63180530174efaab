//! The first screen of a report: a line of numbers for each section and codec.

use super::record::Record;
use serde::Serialize;

/// Number of rows, and how many of them have wrong values or ranks that differ.
#[derive(Serialize)]
pub struct Summary {
    rows: usize,
    failed: usize,
    columns: [&'static str; 7],
    lines: Vec<SummaryLine>,
}

/// Numbers of the rows of a section with one codec.
#[derive(Serialize)]
struct SummaryLine {
    /// Number of the section to which the line leads.
    section: usize,
    collective: String,
    dtype: String,
    codec: String,
    cells: Vec<String>,
}

const COLUMNS: [&str; 7] = [
    "what",
    "codec",
    "smallest message",
    "largest message",
    "over raw, at best",
    "over NCCL",
    "worst RMS error",
];

/// Returns a codec's name without the usual block size.
pub fn short_codec(codec: &str) -> String {
    codec.replace(":block=256", "")
}

/// Returns the numbers of all sections.
pub fn summary(sections: &[(String, Vec<&Record>)]) -> Summary {
    let all = || sections.iter().flat_map(|(_, rows)| rows);
    let mut lines = Vec::new();
    for (at, (title, rows)) in sections.iter().enumerate() {
        let mut codecs: Vec<String> = Vec::new();
        for row in rows {
            let codec = short_codec(&row.codec);
            if !codecs.contains(&codec) {
                codecs.push(codec);
            }
        }
        lines.extend(
            codecs
                .into_iter()
                .filter_map(|codec| line((at, title), rows, codec)),
        );
    }
    Summary {
        rows: all().count(),
        failed: all().filter(|row| row.failed()).count(),
        columns: COLUMNS,
        lines,
    }
}

fn line((section, title): (usize, &str), rows: &[&Record], codec: String) -> Option<SummaryLine> {
    let own = || {
        rows.iter()
            .copied()
            .filter(|row| short_codec(&row.codec) == codec)
    };
    // If a size ran in several modes, the fastest row of a size counts.
    let fastest = |size: usize| {
        let rows = own().filter(|row| row.size == size);
        rows.min_by(|a, b| a.out_of_place.time_us.total_cmp(&b.out_of_place.time_us))
    };
    let small = fastest(own().map(|row| row.size).min()?)?;
    let large = fastest(own().map(|row| row.size).max()?)?;
    let cells = vec![
        title.to_string(),
        codec.clone(),
        format!("{:.2} us for {} B", small.out_of_place.time_us, small.size),
        format!(
            "{:.2} GB/s for {}",
            large.out_of_place.eff_bus_bw,
            shown_size(large.size)
        ),
        over_raw(rows, &codec),
        over_nccl(own()),
        worst_error(own()),
    ];
    Some(SummaryLine {
        section,
        collective: small.collective.clone(),
        dtype: small.dtype.clone(),
        codec,
        cells,
    })
}

/// Returns a size in the largest binary unit that divides it.
fn shown_size(size: usize) -> String {
    let units = [(30, "G"), (20, "M"), (10, "K")];
    let whole = units
        .into_iter()
        .find(|(shift, _)| size > 0 && size.is_multiple_of(1 << shift));
    match whole {
        Some((shift, unit)) => format!("{}{unit}", size >> shift),
        None => size.to_string(),
    }
}

/// Returns the largest ratio of the raw time to the codec's time, among rows of one size and mode.
fn over_raw(rows: &[&Record], codec: &str) -> String {
    let raw = |row: &Record| {
        let partner = rows.iter().find(|raw| {
            !raw.lossy()
                && (raw.size, &raw.mode, raw.processes) == (row.size, &row.mode, row.processes)
        })?;
        Some((
            partner.out_of_place.time_us / row.out_of_place.time_us,
            row.size,
        ))
    };
    let own = rows
        .iter()
        .filter(|row| row.lossy() && short_codec(&row.codec) == codec);
    let best = own
        .filter_map(|row| raw(row))
        .max_by(|a, b| a.0.total_cmp(&b.0));
    best.map_or("-".into(), |(ratio, size)| {
        format!("{ratio:.2}x at {}", shown_size(size))
    })
}

/// Returns the smallest and the largest ratio of NCCL's time to ours.
fn over_nccl<'a>(rows: impl Iterator<Item = &'a Record>) -> String {
    let ratios = rows.filter_map(|row| row.vs.as_ref()).map(|vs| vs.ratio);
    let range = ratios.fold(None, |range: Option<(f64, f64)>, ratio| {
        let (low, high) = range.unwrap_or((ratio, ratio));
        Some((low.min(ratio), high.max(ratio)))
    });
    range.map_or("-".into(), |(low, high)| format!("{low:.2}x to {high:.2}x"))
}

fn worst_error<'a>(rows: impl Iterator<Item = &'a Record>) -> String {
    let errors = rows.filter_map(|row| row.worst().rms_rel_err);
    let worst = errors.reduce(f64::max);
    worst.map_or("not compared".into(), |error| format!("{error:.2e}"))
}

#[cfg(test)]
mod tests {
    use super::super::record::tests::record;
    use super::*;

    #[test]
    fn line_has_the_numbers_of_its_codec() {
        let mut rows = [
            record(1000, "raw"),
            record(1 << 20, "raw"),
            record(1000, "linear8:block=256"),
            record(1 << 20, "linear8:block=256"),
        ];
        let times = [10.0, 400.0, 20.0, 100.0];
        for (row, time) in rows.iter_mut().zip(times) {
            row.out_of_place.time_us = time;
        }
        rows[3].out_of_place.eff_bus_bw = 12.5;
        rows[3].in_place.as_mut().unwrap().rms_rel_err = Some(0.02);
        rows[0].out_of_place.nwrong = Some(1);
        let sections = [("all_reduce".to_string(), rows.iter().collect::<Vec<_>>())];
        let found = summary(&sections);
        assert_eq!((found.rows, found.failed), (4, 1));
        let [raw, coded] = &found.lines[..] else {
            panic!("{} lines", found.lines.len());
        };
        assert_eq!(raw.cells[4], "-");
        let expected = [
            "all_reduce",
            "linear8",
            "20.00 us for 1000 B",
            "12.50 GB/s for 1M",
            "4.00x at 1M",
            "-",
            "2.00e-2",
        ];
        assert_eq!(coded.cells, expected);
    }
}
