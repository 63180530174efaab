//! The table of nccl-tests: its columns, widths, heading and closing lines, which scripts search for.

use super::super::gpu::options::BufferPlace;
use super::super::options::BenchOptions;
use super::super::record::{Figures, Record};
use cinch::types::Collective;
use jiff::Timestamp;
use std::io::{self, Write};

/// Width of the column of `-S`, with the blanks before it.
const STAMP: usize = 21;

/// Returns the name of an element type in nccl-tests.
pub fn type_name(dtype: &str) -> &str {
    match dtype {
        "i8" => "int8",
        "u8" => "uint8",
        "i32" => "int32",
        "u32" => "uint32",
        "i64" => "int64",
        "u64" => "uint64",
        "f16" => "half",
        "f32" => "float",
        "f64" => "double",
        "bf16" => "bfloat16",
        other => other,
    }
}

/// Returns the name of a reduction in nccl-tests.
pub fn reduction_name(redop: &str) -> &str {
    match redop {
        "premulsum" => "mulsum",
        other => other,
    }
}

/// Formats a number in `width` columns, with as many of two digits after the point as fit. Larger
/// numbers widen the column.
fn fitted(value: f64, width: usize) -> String {
    let texts = [2, 1, 0].map(|digits| format!("{value:width$.digits$}"));
    let fitting = texts.into_iter().find(|text| text.len() <= width);
    fitting.unwrap_or_else(|| format!("{value:.0}"))
}

/// Writes the heading: the options of the run, its ranks by host and process, then the columns.
///
/// # Errors
/// Returns the writer's errors.
pub fn write_head(
    options: &BenchOptions,
    places: &[(String, u32)],
    out: &mut dyn Write,
) -> io::Result<()> {
    let sizes = options.sizes(None).unwrap_or_default();
    let size = |found: Option<&usize>| found.copied().unwrap_or(0);
    let (step, kind) = match options.stepfactor {
        Some(factor) => (factor, "factor"),
        None => (options.stepbytes, "bytes"),
    };
    writeln!(
        out,
        "# nThread 1 nGpus {} minBytes {} maxBytes {} step: {step}({kind}) warmup iters: {} iters: {} agg iters: 1 \
         validation: {} graph: {}\n#",
        options.gpu.gpus.unwrap_or(1),
        size(sizes.first()),
        options.maxbytes.unwrap_or(size(sizes.last())),
        options.warmup,
        options.iters,
        options.check,
        u8::from(options.gpu.graph),
    )?;
    writeln!(out, "# Using devices")?;
    for (rank, (host, pid)) in places.iter().enumerate() {
        let device = options.gpu.gpu_of(rank, places.len());
        let place = match options.gpu.device {
            BufferPlace::Gpu => format!("device {device:>2}"),
            BufferPlace::Host => "host memory".into(),
        };
        writeln!(
            out,
            "#  Rank {rank:>2} Group  0 Pid {pid:>6} on {host:>10} {place}"
        )?;
    }
    writeln!(out, "#")?;
    let stamp = match options.nccl_tests.report_timestamps {
        0 => "",
        _ => "timestamp",
    };
    let placements = "          out-of-place                       in-place          ";
    writeln!(out, "#{:60}{placements}", "")?;
    let line = |cells: [&str; 9], stamp: &str| {
        let call = format!(
            "{:>11}  {:>12}  {:>8}  {:>6}  {:>6}",
            cells[0], cells[1], cells[2], cells[3], cells[4]
        );
        let figures = format!(
            "  {:>7}  {:>6}  {:>6} {:>6}",
            cells[5], cells[6], cells[7], cells[8]
        );
        let stamp = if stamp.is_empty() {
            String::new()
        } else {
            format!("{stamp:>STAMP$}")
        };
        format!("#{call}{figures}{figures}{stamp}")
    };
    let names = [
        "size", "count", "type", "redop", "root", "time", "algbw", "busbw", "#wrong",
    ];
    writeln!(out, "{}", line(names, stamp))?;
    let units = [
        "(B)",
        "(elements)",
        "",
        "",
        "",
        "(us)",
        "(GB/s)",
        "(GB/s)",
        "",
    ];
    writeln!(out, "{}", line(units, ""))
}

/// Writes one row. A placement that was not measured has N/A in each column.
///
/// # Errors
/// Returns the writer's errors.
pub fn write_row(options: &BenchOptions, record: &Record, out: &mut dyn Write) -> io::Result<()> {
    write!(
        out,
        "{:>12}  {:>12}  {:>8}  {:>6}  {:>6}{}{}",
        record.size,
        record.count,
        type_name(&record.dtype),
        reduction_name(&record.redop),
        record.root,
        figures(Some(&record.out_of_place)),
        figures(record.in_place.as_ref()),
    )?;
    if options.nccl_tests.report_timestamps > 0 {
        let now = Timestamp::now().strftime("%Y-%m-%d %H:%M:%S").to_string();
        write!(out, "{now:>STAMP$}")?;
    }
    writeln!(out)
}

fn figures(figures: Option<&Figures>) -> String {
    let Some(figures) = figures else {
        return format!("  {:>7}  {:>6}  {:>6} {:>6}", "N/A", "N/A", "N/A", "N/A");
    };
    let wrong = figures
        .nwrong
        .map_or("N/A".into(), |wrong| wrong.to_string());
    // Its busbw counts uncompressed bytes.
    let (alg, bus) = (fitted(figures.alg_bw, 6), fitted(figures.eff_bus_bw, 6));
    format!("  {}  {alg}  {bus} {wrong:>6}", fitted(figures.time_us, 7))
}

/// Writes the closing lines: wrong values and the average bus bandwidth.
///
/// # Errors
/// Returns the writer's errors.
pub fn write_foot(records: &[Record], out: &mut dyn Write) -> io::Result<()> {
    let (wrong, mean) = totals(records);
    let verdict = if wrong == 0 { "OK" } else { "FAILED" };
    writeln!(out, "# {:<20} : {wrong} {verdict}", "Out of bounds values")?;
    writeln!(out, "# {:<20} : {mean} \n#", "Avg bus bandwidth")
}

/// Returns the number of wrong values, and the mean bus bandwidth over rows and placements. Rows whose ranks
/// differ count as one wrong value.
pub fn totals(records: &[Record]) -> (u64, f64) {
    let figures: Vec<&Figures> = records
        .iter()
        .flat_map(Record::placements)
        .map(|(_, it)| it)
        .collect();
    let wrong = figures.iter().map(|it| {
        it.nwrong
            .unwrap_or(0)
            .max(u64::from(it.identical == Some(false)))
    });
    let bus: f64 = figures.iter().map(|it| it.eff_bus_bw).sum();
    let mean = bus / figures.len().max(1) as f64;
    (wrong.sum(), (mean * 1e6).round() / 1e6)
}

/// Returns the name of the program of nccl-tests that measures a collective.
pub fn program(collective: Collective) -> String {
    format!(
        "{}_perf",
        collective
            .name()
            .replace("all_to_all", "alltoall")
            .replace("send_recv", "sendrecv")
    )
}

#[cfg(test)]
mod tests {
    use super::super::super::record::tests::record;
    use super::*;
    use crate::testing::parsed;

    fn text(line: &str, records: &[Record]) -> String {
        let options: BenchOptions = parsed(line).unwrap();
        let mut out = Vec::new();
        write_head(&options, &[("node".into(), 7)], &mut out).unwrap();
        for record in records {
            write_row(&options, record, &mut out).unwrap();
        }
        write_foot(records, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    /// Reads a table as SuperBench does: the lines between the ones with "out-of-place" and "Out of bounds values",
    /// with columns counted from the end, because columns before may be empty.
    fn superbench(text: &str) -> Vec<(usize, f64, f64, f64)> {
        let lines: Vec<&str> = text.lines().collect();
        let at = |part: &str| lines.iter().rposition(|line| line.contains(part)).unwrap();
        let lines = &lines[at("out-of-place") + 1..at("Out of bounds values")];
        let heads = lines
            .iter()
            .find(|line| line.contains("time") && line.contains("busbw"))
            .unwrap();
        let heads: Vec<&str> = heads[1..].split_whitespace().collect();
        let column =
            |name: &str| heads.len() - heads.iter().position(|&head| head == name).unwrap();
        let rows = lines
            .iter()
            .filter(|line| line.trim().starts_with(|c: char| c.is_ascii_digit()));
        rows.map(|row| {
            let cells: Vec<&str> = row.split_whitespace().collect();
            let number = |name: &str| cells[cells.len() - column(name)].parse::<f64>().unwrap();
            (
                cells[0].parse().unwrap(),
                number("busbw"),
                number("algbw"),
                number("time"),
            )
        })
        .collect()
    }

    #[test]
    fn parsers_of_nccl_tests_find_the_numbers() {
        let mut rows = [record(1024, "raw"), record(1 << 30, "linear8")];
        rows[1].out_of_place.time_us = 12_345.678;
        let text = text("all_reduce -b 1K -e 1G -f 1048576", &rows);
        let expected = [(1024, 2.25, 1.5, 6.02), (1 << 30, 2.25, 1.5, 12345.7)];
        assert_eq!(superbench(&text), expected);
        let last = text
            .lines()
            .find(|line| line.starts_with("# Avg bus bandwidth"))
            .unwrap();
        assert_eq!(last.split_whitespace().last(), Some("2.25"));
        assert!(text.contains("# Out of bounds values : 0 OK\n"), "{text}");
        assert!(text.contains(
            "minBytes 1024 maxBytes 1073741824 step: 1048576(factor) warmup iters: 5 iters: 20"
        ));
    }

    #[test]
    fn columns_stand_below_their_heads() {
        let row = Record {
            in_place: None,
            ..record(1 << 20, "raw")
        };
        for line in ["all_reduce", "all_reduce -S 1"] {
            let text = text(line, std::slice::from_ref(&row));
            let heads = text.lines().find(|line| line.contains("#wrong")).unwrap();
            let cells = text.lines().find(|line| line.contains("1048576 ")).unwrap();
            assert_eq!(heads.len(), cells.len(), "\n{heads}\n{cells}");
            let end = heads.find("type").unwrap() + 4;
            assert!(cells[..end].ends_with("float"), "\n{heads}\n{cells}");
            assert_eq!(cells.matches("N/A").count(), 4);
        }
    }

    #[test]
    fn numbers_keep_their_width() {
        let cases = [
            (6.024, "   6.02"),
            (12345.678, "12345.7"),
            (1234567.8, "1234568"),
            (123456789.0, "123456789"),
        ];
        for (value, expected) in cases {
            assert_eq!(fitted(value, 7), expected);
        }
    }

    #[test]
    fn rows_whose_ranks_differ_fail() {
        let mut row = record(8, "raw");
        row.out_of_place.identical = Some(false);
        assert!(text("all_reduce", &[row]).contains("values : 1 FAILED"));
    }
}
