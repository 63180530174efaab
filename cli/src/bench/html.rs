//! A report from rows: one file of HTML with its drawings inside.

use super::limit;
use super::record::{Record, Versus};
use crate::plot::{Panel, Series, escape, svg};
use crate::{FAILURE, USAGE};
use std::fmt::Write;
use std::path::Path;

/// The largest number of rows that a report takes; more would be no report.
const MOST_ROWS: usize = 100_000;

/// Reads rows: one JSON object on each line, as `cinch bench --json` and `--suite` write them for GPUs.
///
/// # Errors
/// A sentence with file and line.
pub fn read(path: &Path) -> Result<Vec<Record>, String> {
    let name = path.display();
    let text = std::fs::read_to_string(path).map_err(|error| format!("{name}: {error}"))?;
    let mut records = Vec::new();
    for (at, line) in text.lines().enumerate() {
        if line.trim().is_empty() {
            continue;
        }
        if records.len() == MOST_ROWS {
            return Err(format!("{name}: more than {MOST_ROWS} rows"));
        }
        records.push(
            serde_json::from_str(line)
                .map_err(|error| format!("{name}, line {}: no row of a bench: {error}", at + 1))?,
        );
    }
    match records.is_empty() {
        true => Err(format!("{name}: there are no rows")),
        false => Ok(records),
    }
}

/// Reads the rows of `from` and writes their report to `to`.
///
/// # Errors
/// Exit code and sentence, with the file that cannot be read or written.
pub fn redraw(from: &Path, to: &Path) -> Result<usize, (i32, String)> {
    let records = read(from).map_err(|sentence| (USAGE, sentence))?;
    std::fs::write(to, report(&records))
        .map_err(|error| (FAILURE, format!("{}: {error}", to.display())))?;
    Ok(records.len())
}

/// What rows of one drawing have in common.
#[derive(PartialEq)]
struct Group {
    collective: String,
    ranks: usize,
    place: String,
    dtype: String,
    /// `none` where nothing is reduced.
    redop: String,
    /// -1 where there is none.
    root: i64,
}

impl Group {
    fn of(record: &Record) -> Group {
        Group {
            collective: record.collective.clone(),
            ranks: record.ranks,
            place: match record.run.gpu.as_str() {
                "" => "host memory".into(),
                gpu => gpu.to_string(),
            },
            dtype: record.entry.dtype.clone(),
            redop: record.entry.redop.clone(),
            root: record.entry.root,
        }
    }

    /// `reduce (max) of f32 at root 1, 2 ranks`
    fn title(&self) -> String {
        let redop = match self.redop.as_str() {
            "none" => String::new(),
            redop => format!(" ({redop})"),
        };
        let root = match self.root {
            -1 => String::new(),
            root => format!(" at root {root}"),
        };
        let (collective, dtype, ranks) = (&self.collective, &self.dtype, self.ranks);
        format!("{collective}{redop} of {dtype}{root}, {ranks} ranks")
    }
}

/// The whole report.
pub fn report(records: &[Record]) -> String {
    let mut groups: Vec<(_, Vec<&Record>)> = Vec::new();
    for record in records {
        let key = Group::of(record);
        match groups.iter_mut().find(|(known, _)| *known == key) {
            Some((_, rows)) => rows.push(record),
            None => groups.push((key, vec![record])),
        }
    }
    let mut out = String::from(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <title>cinch bench</title>\n<style>\n\
         body { font-family: Helvetica, Arial, sans-serif; margin: 2em auto; max-width: 1100px; color: #111 }\n\
         table { border-collapse: collapse; font-size: 12px }\n\
         td, th { border: 1px solid #ccc; padding: 2px 6px; text-align: right }\n\
         .bad { background: #fdd }\n</style>\n</head>\n<body>\n<h1>cinch bench</h1>\n",
    );
    head(records, &mut out);
    for (group, rows) in &groups {
        let (title, place) = (group.title(), &group.place);
        // Writing to a string cannot fail.
        let _ = writeln!(out, "<h2>{}, {}</h2>", escape(&title), escape(place));
        let subtitle = format!("{place}; median of the slowest rank; out of place");
        out += &svg(&title, &subtitle, &panels(rows));
        table(rows, &mut out);
    }
    out += "</body>\n</html>\n";
    out
}

/// Machines, versions, commands, and how to read it.
fn head(records: &[Record], out: &mut String) {
    let mut runs: Vec<String> = Vec::new();
    for record in records {
        let run = &record.run;
        let place = match run.gpus {
            0 => format!("{}, {} cores", run.machine.cpu, run.machine.cores),
            gpus => format!(
                "{} of {gpus} {}, driver {}, CUDA {}, {}",
                record.ranks, run.gpu, run.driver, run.cuda, run.kernels
            ),
        };
        let nccl = record.vs.as_ref().map_or(String::new(), |vs| {
            format!("; beside NCCL {} without NVLink multicast", vs.nccl)
        });
        let text = format!(
            "{}: cinch {}, {place}{nccl}. {}",
            run.date, run.cinch, run.command
        );
        if !runs.contains(&text) {
            runs.push(text);
        }
    }
    *out += "<ul>\n";
    for run in runs {
        let _ = writeln!(out, "<li><code>{}</code></li>", escape(&run));
    }
    *out += "</ul>\n<p>Effective bus bandwidth is the bus bandwidth that an exact run would need for \
             this time. A ratio above 1 is a library that takes longer than cinch does in the same run. The limit is \
             the launch, the messages that follow one another, and the longer one of wire (370 GB/s) and memory \
             (3,915 GB/s); it is drawn for H100 and H200 with NVLink only. Errors are against fp64.";
    if !records.iter().any(|record| record.vs.is_some()) {
        *out += " No other library was run beside these rows.";
    } else if !records.iter().any(|record| record.symmetric.is_some()) {
        *out += " NCCL's symmetric windows were not run.";
    }
    *out += " PyTorch's symmetric memory was not run.</p>\n";
}

/// The name of a row's line.
fn name(record: &Record) -> String {
    let codec = record.entry.codec.replace(":block=256", "");
    let processes = if record.processes { ", processes" } else { "" };
    format!("{codec}, {}{processes}", record.mode)
}

/// Figures over size, those that there are.
fn panels(rows: &[&Record]) -> Vec<Panel> {
    type Value = fn(&Record) -> Option<f64>;
    let ours: [(&str, bool, Value); 7] = [
        ("time (microseconds)", true, |row| {
            Some(row.entry.out_of_place.time_us)
        }),
        ("effective bus bandwidth (GB/s)", false, |row| {
            Some(row.entry.out_of_place.eff_bus_bw)
        }),
        ("NCCL's time over ours", false, |row| {
            row.vs.as_ref().map(|versus| versus.ratio)
        }),
        ("NCCL's, symmetric windows, over ours", false, |row| {
            row.symmetric.as_ref().map(|versus| versus.ratio)
        }),
        ("the limit over our time", false, |row| {
            Some(limit::of_record(row)? / row.entry.out_of_place.time_us)
        }),
        ("RMS error / RMS of result", true, |row| {
            row.entry.out_of_place.rms_rel_err
        }),
        ("largest error", true, |row| {
            row.entry.out_of_place.max_abs_err
        }),
    ];
    let mut panels = Vec::new();
    for (label, logarithmic, value) in ours {
        let mut series = lines(rows, name, value);
        if label.starts_with("time") {
            type Other = fn(&Record) -> Option<f64>;
            let others: [(&str, Other); 2] = [
                ("NCCL", |row| Some(row.vs.as_ref()?.time_us)),
                ("NCCL, symmetric windows", |row| {
                    Some(row.symmetric.as_ref()?.time_us)
                }),
            ];
            for (who, other) in others {
                // Its raw call stands beside each of ours; once is enough.
                let raw: Vec<&Record> = raw_first(rows);
                let named = |row: &Record| format!("{who}, {}", row.mode);
                series.extend(lines(&raw, named, other).into_iter().map(|line| Series {
                    dashed: true,
                    ..line
                }));
            }
        }
        if series.iter().any(|line| !line.points.is_empty()) {
            panels.push(Panel {
                label: label.into(),
                logarithmic,
                series,
            });
        }
    }
    panels
}

/// One row of each size and mode, that without a codec where there is one.
fn raw_first<'a>(rows: &[&'a Record]) -> Vec<&'a Record> {
    let mut found: Vec<&Record> = Vec::new();
    let (raw, coded): (Vec<&Record>, Vec<&Record>) =
        rows.iter().partition(|row| !row.entry.lossy());
    for row in raw.into_iter().chain(coded) {
        let key = |row: &Record| (row.entry.size, row.mode.clone());
        if !found.iter().any(|known| key(known) == key(row)) {
            found.push(row);
        }
    }
    found
}

/// A line for each name, its points by size.
fn lines(
    rows: &[&Record],
    name: impl Fn(&Record) -> String,
    value: impl Fn(&Record) -> Option<f64>,
) -> Vec<Series> {
    let mut all: Vec<Series> = Vec::new();
    for row in rows {
        let Some(value) = value(row) else { continue };
        let (name, point) = (name(row), (row.entry.size as f64, value));
        match all.iter_mut().find(|line| line.name == name) {
            Some(line) => line.points.push(point),
            None => all.push(Series {
                name,
                dashed: false,
                points: vec![point],
            }),
        }
    }
    for line in &mut all {
        line.points.sort_by(|a, b| a.0.total_cmp(&b.0));
    }
    all
}

/// All figures, for who looks closer.
fn table(rows: &[&Record], out: &mut String) {
    *out += "<details><summary>rows</summary>\n<table>\n<tr><th>size</th><th>codec</th><th>mode</th>\
             <th>algorithm</th><th>protocol</th><th>blocks</th><th>time (us)</th><th>eff. bus (GB/s)</th>\
             <th>wire bytes</th><th>NCCL (us)</th><th>x</th><th>symmetric (us)</th><th>x</th>\
             <th>limit (us)</th><th>RMS error</th><th>largest</th><th>wrong</th><th>same bits</th></tr>\n";
    for row in rows {
        let (entry, figures) = (&row.entry, &row.entry.out_of_place);
        let number = |value: Option<f64>, digits: usize| {
            value.map_or("-".into(), |value| format!("{value:.digits$}"))
        };
        let error = |value: Option<f64>| value.map_or("-".into(), |value| format!("{value:.2e}"));
        let versus = |versus: &Option<Versus>| {
            let versus = versus.as_ref();
            let time = number(versus.map(|versus| versus.time_us), 2);
            (time, number(versus.map(|versus| versus.ratio), 2))
        };
        let (nccl, symmetric) = (versus(&row.vs), versus(&row.symmetric));
        let cells = [
            entry.size.to_string(),
            entry.codec.clone(),
            row.mode.clone(),
            entry.algo.clone(),
            row.protocol.clone(),
            entry.channels.to_string(),
            number(Some(figures.time_us), 2),
            number(Some(figures.eff_bus_bw), 2),
            entry.wire_bytes.to_string(),
            nccl.0,
            nccl.1,
            symmetric.0,
            symmetric.1,
            number(limit::of_record(row), 2),
            error(figures.rms_rel_err),
            error(figures.max_abs_err),
            figures.nwrong.map_or("-".into(), |wrong| wrong.to_string()),
            figures
                .identical
                .map_or("-", |same| if same { "yes" } else { "NO" })
                .into(),
        ];
        let bad = if entry.failed() { " class=\"bad\"" } else { "" };
        let _ = write!(out, "<tr{bad}>");
        for cell in cells {
            let _ = write!(out, "<td>{}</td>", escape(&cell));
        }
        *out += "</tr>\n";
    }
    *out += "</table>\n</details>\n";
}

#[cfg(test)]
mod tests {
    use super::*;

    fn baseline(name: &str) -> std::path::PathBuf {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../benches/baselines");
        folder.join(name)
    }

    #[test]
    fn committed_rows_are_drawn() {
        let path = baseline("gpu-h200x2.jsonl");
        let records = read(&path).unwrap();
        let lines = std::fs::read_to_string(&path).unwrap().lines().count();
        assert_eq!((records.len(), lines > 30), (lines, true));
        let text = report(&records);
        // all_reduce of f32 and of bf16.
        assert_eq!(text.matches("<svg").count(), 2);
        assert_eq!(text.matches("<tr>").count(), 2 + lines);
        assert!(!text.contains("class=\"bad\""));
        for word in [
            "NVIDIA H200",
            "time (microseconds)",
            "effective bus bandwidth",
            "NCCL&#39;s time over ours",
            "the limit over our time",
            "RMS error",
            "largest error",
            "NCCL, graph",
            "dynamic8, graph",
            "symmetric windows were not run",
            "without NVLink multicast",
        ] {
            assert!(
                text.contains(word) || text.contains(&word.replace("&#39;", "'")),
                "{word}"
            );
        }
        // Nothing is loaded from elsewhere.
        for foreign in ["<script", "<link", "<img", "src=", "href="] {
            assert!(!text.contains(foreign), "{foreign}");
        }
    }

    /// Sums and maxima take other times, and roots other ways: a line through both would mean nothing.
    #[test]
    fn operations_and_roots_are_drawn_apart() {
        let mut sum = read(&baseline("gpu-h200x2.jsonl")).unwrap().swap_remove(0);
        sum.collective = "reduce".into();
        (sum.entry.redop, sum.entry.root) = ("sum".into(), 0);
        let (mut max, mut elsewhere, mut moved) = (sum.clone(), sum.clone(), sum.clone());
        max.entry.redop = "max".into();
        elsewhere.entry.root = 1;
        moved.collective = "all_gather".into();
        (moved.entry.redop, moved.entry.root) = ("none".into(), -1);
        let text = report(&[sum.clone(), max, elsewhere, moved, sum]);
        assert_eq!(text.matches("<svg").count(), 4);
        for title in [
            "reduce (sum) of f32 at root 0, 2 ranks",
            "reduce (max) of f32 at root 0, 2 ranks",
            "reduce (sum) of f32 at root 1, 2 ranks",
            "all_gather of f32, 2 ranks",
        ] {
            assert!(text.contains(&format!("<h2>{title}, ")), "{title}");
        }
    }

    #[test]
    fn every_figure_of_a_row_is_where_it_belongs() {
        let records = read(&baseline("gpu-h200x2.jsonl")).unwrap();
        let mut record = records[0].clone();
        record.symmetric = Some(Versus {
            nccl: "2.28.9".into(),
            time_us: 123.25,
            min_us: 1.0,
            p99_us: 200.0,
            ratio: 4.5,
        });
        record.entry.out_of_place.nwrong = Some(3);
        let text = report(&[record.clone()]);
        assert!(text.contains("<td>123.25</td><td>4.50</td>"), "{text}");
        assert!(
            text.contains("<tr class=\"bad\">") && text.contains("NCCL, symmetric windows, graph")
        );
        // 8 bytes: a launch and a message.
        assert!(text.contains("<td>2.75</td>"));
        let line = serde_json::to_string(&record).unwrap();
        let again: Record = serde_json::from_str(&line).unwrap();
        assert_eq!(again.symmetric.unwrap().ratio, 4.5);
    }

    #[test]
    fn what_is_no_file_of_rows_is_named() {
        assert!(
            read(Path::new("/no/such/rows"))
                .unwrap_err()
                .contains("/no/such/rows")
        );
        let error = read(&baseline("host-codecs.jsonl")).unwrap_err();
        assert!(error.contains("host-codecs.jsonl, line 1"), "{error}");
    }
}
