//! The text table: nccl-tests' columns, and what compression adds.

use super::report::{Entry, Figures};
use std::io::{self, Write};

/// Legend and column heads. Lines that are not rows begin with `#`.
///
/// # Errors
/// Those of writing.
pub fn write_head(out: &mut dyn Write) -> io::Result<()> {
    writeln!(
        out,
        "#\n\
         # time: median over iterations of the slowest rank. GB/s = 1e9 bytes a second.\n\
         # algbw: uncompressed bytes per time. busbw: what the links see, wire bytes counted.\n\
         # eff.busbw: the busbw that an exact run would need for this time (out of place).\n\
         # wire: payload bytes sent by the busiest rank. ratio: exact bytes over wire bytes.\n\
         # max_err: largest difference from fp64; rms_err: RMS difference over RMS of the result."
    )?;
    writeln!(out, "#")?;
    let place = "time   algbw   busbw  #wrong";
    writeln!(
        out,
        "#{:>11} {:>12} {:>7} {:>9} {:>5}  {:^31}  {:^31}",
        "", "", "", "", "", "out-of-place", "in-place"
    )?;
    writeln!(
        out,
        "#{:>11} {:>12} {:>7} {:>9} {:>5}  {:>31}  {:>31}  {:>8} {:<19} {:>10} {:>6} {:>9} {:>9} {:>9} {:>4}",
        "size",
        "count",
        "type",
        "redop",
        "root",
        place,
        place,
        "algo",
        "codec",
        "wire",
        "ratio",
        "eff.busbw",
        "max_err",
        "rms_err",
        "same"
    )?;
    let units = "(us)  (GB/s)  (GB/s)        ";
    writeln!(
        out,
        "#{:>11} {:>12} {:>7} {:>9} {:>5}  {:>31}  {:>31}  {:>8} {:<19} {:>10} {:>6} {:>9} {:>9} {:>9} {:>4}",
        "(B)", "(elements)", "", "", "", units, units, "", "", "(B)", "", "(GB/s)", "", "", ""
    )
}

/// One row. The added columns show the worse of both placements.
///
/// # Errors
/// Those of writing.
pub fn write_row(entry: &Entry, out: &mut dyn Write) -> io::Result<()> {
    let worst = |pick: fn(&Figures) -> Option<f64>| {
        entry
            .placements()
            .filter_map(|(_, figures)| pick(figures))
            .reduce(f64::max)
    };
    let same = entry
        .placements()
        .filter_map(|(_, figures)| figures.identical)
        .reduce(|a, b| a && b);
    writeln!(
        out,
        "{:>12} {:>12} {:>7} {:>9} {:>5}  {}  {}  {:>8} {:<19} {:>10} {:>6} {:>9} {:>9} {:>9} {:>4}",
        entry.size,
        entry.count,
        entry.dtype,
        entry.redop,
        entry.root,
        placement(Some(&entry.out_of_place)),
        placement(entry.in_place.as_ref()),
        entry.algo,
        entry.codec,
        entry.wire_bytes,
        entry
            .ratio
            .map_or("-".into(), |ratio| format!("{ratio:.2}")),
        rate(entry.out_of_place.eff_bus_bw),
        error(worst(|figures| figures.max_abs_err)),
        error(worst(|figures| figures.rms_rel_err)),
        match same {
            Some(true) => "yes",
            Some(false) => "NO",
            None => "-",
        },
    )
}

/// Totals and verdict. `color` marks a failure red.
///
/// # Errors
/// Those of writing.
pub fn write_foot(entries: &[Entry], color: bool, out: &mut dyn Write) -> io::Result<()> {
    let figures: Vec<&Figures> = entries
        .iter()
        .flat_map(|entry| entry.placements().map(|(_, figures)| figures))
        .collect();
    let average = |pick: fn(&Figures) -> f64| match figures.len() {
        0 => 0.0,
        n => figures.iter().map(|figures| pick(figures)).sum::<f64>() / n as f64,
    };
    write_verdicts(figures.iter().copied(), color, out)?;
    writeln!(
        out,
        "# Avg bus bandwidth         : {:.4} GB/s on the links, {:.4} GB/s effective",
        average(|figures| figures.bus_bw),
        average(|figures| figures.eff_bus_bw)
    )
}

/// Wrong values, and ranks that differ, in all rows. `color` marks a failure red.
///
/// # Errors
/// Those of writing.
pub fn write_verdicts<'a>(
    figures: impl Iterator<Item = &'a Figures> + Clone,
    color: bool,
    out: &mut dyn Write,
) -> io::Result<()> {
    let checked = figures.clone().any(|figures| figures.nwrong.is_some());
    let wrong: u64 = figures.clone().filter_map(|figures| figures.nwrong).sum();
    let differing = figures
        .filter(|figures| figures.identical == Some(false))
        .count();
    let verdict = |good: bool| match (checked, good, color) {
        (false, ..) => "unchecked",
        (_, true, _) => "OK",
        (_, false, true) => "\x1b[31mFAILED\x1b[0m",
        (_, false, false) => "FAILED",
    };
    writeln!(
        out,
        "# Out of bounds values      : {wrong} {}",
        verdict(wrong == 0)
    )?;
    writeln!(
        out,
        "# Ranks with different bits : {differing} rows {}",
        verdict(differing == 0)
    )
}

fn placement(figures: Option<&Figures>) -> String {
    match figures {
        Some(figures) => format!(
            "{:>8} {:>7} {:>7} {:>6}",
            time(figures.time_us),
            rate(figures.alg_bw),
            rate(figures.bus_bw),
            figures
                .nwrong
                .map_or("N/A".into(), |wrong| wrong.to_string())
        ),
        None => format!("{:>8} {:>7} {:>7} {:>6}", "-", "-", "-", "-"),
    }
}

/// Four significant digits, as nccl-tests does.
pub fn time(microseconds: f64) -> String {
    match microseconds {
        us if us >= 100_000.0 => format!("{us:.0}"),
        us if us >= 1000.0 => format!("{us:.1}"),
        us => format!("{us:.2}"),
    }
}

pub fn rate(rate: f64) -> String {
    format!(
        "{rate:.prec$}",
        prec = if rate > 0.0 && rate < 0.1 { 4 } else { 2 }
    )
}

pub fn error(error: Option<f64>) -> String {
    match error {
        None => "N/A".into(),
        Some(0.0) => "0".into(),
        Some(error) => format!("{error:.2e}"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::report::tests::entry;
    use super::*;

    fn text(write: impl Fn(&mut Vec<u8>) -> io::Result<()>) -> String {
        let mut out = Vec::new();
        write(&mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn rows_align_with_their_heads() {
        let head = text(|out| write_head(out));
        let heads = head
            .lines()
            .find(|line| line.contains("algbw   busbw"))
            .unwrap();
        let row = text(|out| write_row(&entry(1 << 20, "dynamic8:block=4096"), out));
        let row = row.trim_end();
        assert_eq!(heads.len(), row.len(), "\n{heads}\n{row}");
        for (name, value) in [("size", "1048576"), ("rms_err", "7.50e-3"), ("same", "yes")] {
            let end = heads.find(name).unwrap() + name.len();
            assert!(row[..end].ends_with(value), "{name}:\n{heads}\n{row}");
        }
        assert!(head.lines().all(|line| line.starts_with('#')));
        assert_eq!(row.split_whitespace().count(), 5 + 4 + 4 + 8);
    }

    #[test]
    fn the_foot_gives_the_verdict() {
        let good = text(|out| write_foot(&[entry(8, "raw")], true, out));
        assert!(good.contains("0 OK") && good.contains("0.5700 GB/s on the links"));
        let mut bad = entry(8, "raw");
        bad.out_of_place.nwrong = Some(7);
        let plain = text(|out| write_foot(&[bad.clone()], false, out));
        assert!(plain.contains("7 FAILED") && !plain.contains('\x1b'));
        assert!(text(|out| write_foot(&[bad.clone()], true, out)).contains('\x1b'));
    }
}
