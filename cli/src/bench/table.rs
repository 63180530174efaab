//! Text tables: nccl-tests' columns, and columns about compression.

use super::columns::{CellValue, PlacedRecord, named};
use super::record::{Figures, Record};
use std::io::{self, Write};

/// A column of a text table: its name in [`super::columns`], heading, unit and width.
type Cell = (&'static str, &'static str, &'static str, usize);

/// Columns of the host table that describe the call. The next lists hold the columns of each
/// placement, and of both placements together.
const CALL: [Cell; 5] = [
    ("size", "size", "(B)", 12),
    ("count", "count", "(elements)", 12),
    ("type", "type", "", 7),
    ("redop", "redop", "", 9),
    ("root", "root", "", 5),
];
const PLACEMENT: [Cell; 4] = [
    ("time_us", "time", "(us)", 9),
    ("alg_bw", "algbw", "(GB/s)", 7),
    ("bus_bw", "busbw", "(GB/s)", 7),
    ("nwrong", "#wrong", "", 6),
];
const BOTH: [Cell; 8] = [
    ("algo", "algo", "", 9),
    ("codec", "codec", "", 19),
    ("wire_bytes", "wire", "(B)", 10),
    ("ratio", "ratio", "", 6),
    ("eff_bus_bw", "eff.busbw", "(GB/s)", 9),
    ("max_abs_err", "max_err", "", 9),
    ("rms_rel_err", "rms_err", "", 9),
    ("identical", "same", "", 4),
];
const HOST_LEGEND: &str = "#
# time: median over iterations of the slowest rank. GB/s = 1e9 bytes a second.
# algbw: uncompressed bytes per time. busbw: what the links see, wire bytes counted.
# eff.busbw: the busbw that an exact run would need for this time (out of place).
# wire: payload bytes sent by the busiest rank. ratio: exact bytes over wire bytes.
# max_err: largest difference from fp64; rms_err: RMS difference over RMS of the result.
#";

/// Columns of the GPU table, for one placement and for NCCL.
const GPU: [Cell; 19] = [
    ("size", "size", "", 12),
    ("count", "count", "", 11),
    ("type", "type", "", 7),
    ("redop", "redop", "", 9),
    ("codec", "codec", "", 19),
    ("time_us", "time(us)", "", 9),
    ("alg_bw", "algbw", "", 8),
    ("bus_bw", "busbw", "", 8),
    ("eff_bus_bw", "eff.bw", "", 8),
    ("wire_bytes", "wire", "", 11),
    ("max_abs_err", "max_err", "", 8),
    ("rms_rel_err", "rms_err", "", 8),
    ("nwrong", "#wrong", "", 6),
    ("identical", "same", "", 4),
    ("channels", "blocks", "", 6),
    ("protocol", "proto", "", 7),
    ("algo", "algo", "", 7),
    ("vs_us", "nccl(us)", "", 9),
    ("vs_ratio", "x", "", 6),
];
const GPU_LEGEND: &str = "#
# time: median over repetitions of the slowest rank, between events, per call; out of place.
# algbw: uncompressed bytes per time. busbw: what the links see, wire bytes counted.
# eff.bw: the bus bandwidth that an exact run would need for this time. GB/s = 1e9 bytes/s.
# wire: payload bytes sent by the busiest rank. max_err: largest difference from fp64;
# rms_err: RMS difference over RMS of the result. nccl: its time, raw; x: that over ours.
#";

/// Kind of text table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TableKind {
    /// Table for host memory, with both placements.
    #[default]
    Host,
    /// Table for GPU memory, with one placement, and NCCL beside it.
    Gpu,
}

impl TableKind {
    /// Writes the legend and headings. Lines that are not rows begin with `#`.
    ///
    /// # Errors
    /// Returns the writer's errors.
    pub fn write_head(self, out: &mut dyn Write) -> io::Result<()> {
        match self {
            TableKind::Host => {
                writeln!(out, "{HOST_LEGEND}")?;
                let blank = " ".repeat(48);
                writeln!(out, "#{blank}  {:^31}  {:^31}", "out-of-place", "in-place")?;
                writeln!(out, "#{}", &host_line(|_, cell| cell.1.into())[1..])?;
                writeln!(
                    out,
                    "#{}",
                    host_line(|_, cell| cell.2.into())[1..].trim_end()
                )
            }
            TableKind::Gpu => {
                let heads = GPU.map(|cell| pad(&cell, cell.1));
                writeln!(out, "{GPU_LEGEND}\n#{}", &heads.join(" ")[1..])
            }
        }
    }

    /// Writes one row.
    ///
    /// # Errors
    /// Returns the writer's errors.
    pub fn write_row(self, record: &Record, out: &mut dyn Write) -> io::Result<()> {
        let shown = |key: &str, figures: Option<&Figures>| {
            let value = figures.map(|figures| {
                (named(key).value)(&PlacedRecord {
                    record,
                    placement: "",
                    figures,
                })
            });
            value.unwrap_or(CellValue::Missing("-")).shown()
        };
        let worst = record.worst();
        let line = match self {
            TableKind::Host => host_line(|part, cell| match part {
                1 => shown(cell.0, Some(&record.out_of_place)),
                2 => shown(cell.0, record.in_place.as_ref()),
                _ => shown(cell.0, Some(&worst)),
            }),
            TableKind::Gpu => GPU
                .map(|cell| pad(&cell, &shown(cell.0, Some(&worst))))
                .join(" "),
        };
        match record.is_emulated() {
            true => writeln!(out, "{line} emulated"),
            false => writeln!(out, "{line}"),
        }
    }

    /// Writes averages, and whether all results are right. With `color` a failure is printed in
    /// red.
    ///
    /// # Errors
    /// Returns the writer's errors.
    pub fn write_foot(
        self,
        records: &[Record],
        color: bool,
        out: &mut dyn Write,
    ) -> io::Result<()> {
        let placements = records.iter().flat_map(Record::placements);
        let figures: Vec<&Figures> = placements.map(|(_, figures)| figures).collect();
        write_verdicts(&figures, color, out)?;
        if self == TableKind::Host {
            let mean = |pick: fn(&Figures) -> f64| {
                let sum: f64 = figures.iter().map(|figures| pick(figures)).sum();
                sum / figures.len().max(1) as f64
            };
            return writeln!(
                out,
                "# Avg bus bandwidth         : {:.4} GB/s on the links, {:.4} GB/s effective",
                mean(|figures| figures.bus_bw),
                mean(|figures| figures.eff_bus_bw)
            );
        }
        let ratios: Vec<f64> = records
            .iter()
            .filter_map(|record| record.vs.as_ref().map(|vs| vs.ratio))
            .collect();
        let Some(least) = ratios.iter().copied().reduce(f64::min) else {
            return Ok(());
        };
        let logs: f64 = ratios.iter().map(|ratio| ratio.ln()).sum();
        writeln!(
            out,
            "# Against NCCL              : least {least:.2}x, geometric mean {:.2}x of {} rows",
            (logs / ratios.len() as f64).exp(),
            ratios.len()
        )
    }
}

/// Formats a line of the host table. `text` receives the column group (0: call; 1 and 2:
/// placements; 3: both) and the column, and returns the cell's text.
fn host_line(text: impl Fn(usize, &Cell) -> String) -> String {
    let parts: [&[Cell]; 4] = [&CALL, &PLACEMENT, &PLACEMENT, &BOTH];
    let cells = parts.iter().enumerate().flat_map(|(part, cells)| {
        let text = &text;
        cells.iter().map(move |cell| pad(cell, &text(part, cell)))
    });
    cells.collect::<Vec<_>>().join(" ")
}

fn pad(&(key, _, _, width): &Cell, text: &str) -> String {
    match key {
        "codec" => format!("{text:<width$}"),
        _ => format!("{text:>width$}"),
    }
}

/// Writes the number of wrong values, and the number of rows in which ranks differ.
fn write_verdicts(figures: &[&Figures], color: bool, out: &mut dyn Write) -> io::Result<()> {
    let checked = figures.iter().any(|figures| figures.nwrong.is_some());
    let wrong: u64 = figures.iter().filter_map(|figures| figures.nwrong).sum();
    let differing = figures
        .iter()
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
        "# Out of bounds values      : {wrong} {}\n\
         # Ranks with different bits : {differing} rows {}",
        verdict(wrong == 0),
        verdict(differing == 0)
    )
}

#[cfg(test)]
mod tests {
    use super::super::emulate::EmulationInfo;
    use super::super::record::Versus;
    use super::super::record::tests::record;
    use super::*;

    fn text(write: impl Fn(&mut Vec<u8>) -> io::Result<()>) -> String {
        let mut out = Vec::new();
        write(&mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    fn beside_nccl(ratio: f64) -> Record {
        Record {
            vs: Some(Versus {
                nccl: "2.28.9".into(),
                time_us: 5231.0,
                min_us: 5200.0,
                p99_us: 5300.0,
                ratio,
            }),
            in_place: None,
            ..record(1 << 30, "dynamic8:block=4096")
        }
    }

    #[test]
    fn rows_align_with_their_heads() {
        let host = record(1 << 20, "dynamic8:block=4096");
        let alone = Record {
            vs: None,
            ..beside_nccl(1.0)
        };
        for (table, record, fields) in [
            (TableKind::Host, host, 5 + 4 + 4 + 8),
            (TableKind::Gpu, alone, 19),
            (TableKind::Gpu, beside_nccl(2.25), 19),
        ] {
            let head = text(|out| table.write_head(out));
            let heads = head.lines().find(|line| line.contains("#wrong")).unwrap();
            let row = text(|out| table.write_row(&record, out));
            let row = row.trim_end();
            assert_eq!(heads.len(), row.len(), "\n{heads}\n{row}");
            let size = record.size.to_string();
            for (name, value) in [
                ("size", size.as_str()),
                ("rms_err", "7.50e-3"),
                ("same", "yes"),
            ] {
                let end = heads.find(name).unwrap() + name.len();
                assert!(row[..end].ends_with(value), "{name}:\n{heads}\n{row}");
            }
            assert!(head.lines().all(|line| line.starts_with('#')));
            assert_eq!(row.split_whitespace().count(), fields);
        }
    }

    #[test]
    fn emulated_row_is_marked() {
        let mut row = record(1 << 20, "raw");
        let ends =
            |row: &Record| text(|out| TableKind::Host.write_row(row, out)).ends_with(" emulated\n");
        assert!(!ends(&row));
        row.run.emulated = Some(EmulationInfo {
            file: "A.xml".into(),
            scale: 100,
        });
        assert!(ends(&row));
    }

    #[test]
    fn foot_has_verdict_averages_and_ratios() {
        let foot = |table: TableKind, records: &[Record], color| {
            text(|out| table.write_foot(records, color, out))
        };
        let good = foot(TableKind::Host, &[record(8, "raw")], true);
        assert!(good.contains("0 OK") && good.contains("0.5700 GB/s on the links"));
        let mut bad = record(8, "raw");
        bad.out_of_place.nwrong = Some(7);
        let plain = foot(TableKind::Host, std::slice::from_ref(&bad), false);
        assert!(plain.contains("7 FAILED") && !plain.contains('\x1b'));
        let gpu = foot(TableKind::Gpu, std::slice::from_ref(&bad), true);
        assert!(gpu.contains('\x1b') && !gpu.contains("NCCL"), "{gpu}");
        let ratios = foot(TableKind::Gpu, &[beside_nccl(2.0), beside_nccl(0.5)], false);
        let words = "least 0.50x, geometric mean 1.00x of 2 rows";
        assert!(
            ratios.contains(words) && ratios.contains("0 OK"),
            "{ratios}"
        );
    }
}
