//! Charts of records: a report as one HTML file with its script inside, and an SVG.

use super::columns::{PlacedRecord, named};
use super::page_summary::{self, Summary, short_codec};
use super::record::Record;
use crate::plot::{Panel, Series, svg};
use serde::Serialize;
use std::collections::BTreeSet;

const TEMPLATE: &str = include_str!("../../assets/report.html");
/// uPlot 1.6.32, MIT licence: `assets/uPlot-LICENSE`.
const SCRIPT: &str = include_str!("../../assets/uPlot.min.js");
const STYLE: &str = include_str!("../../assets/uPlot.min.css");

/// Columns of the tables in the report.
const TABLE: [&str; 18] = [
    "size",
    "codec",
    "mode",
    "algo",
    "protocol",
    "channels",
    "time_us",
    "eff_bus_bw",
    "wire_bytes",
    "vs_us",
    "vs_ratio",
    "symmetric_us",
    "symmetric_ratio",
    "limit_us",
    "rms_rel_err",
    "max_abs_err",
    "nwrong",
    "identical",
];

/// Columns that are drawn as charts, each with whether its vertical axis is logarithmic.
const PANELS: [(&str, bool); 7] = [
    ("time_us", true),
    ("eff_bus_bw", false),
    ("vs_ratio", false),
    ("symmetric_ratio", false),
    ("limit_ratio", false),
    ("rms_rel_err", true),
    ("max_abs_err", true),
];

/// The data that the script of the report draws.
#[derive(Serialize)]
struct Page {
    runs: Vec<String>,
    notes: Vec<&'static str>,
    columns: Vec<&'static str>,
    summary: Summary,
    sections: Vec<Section>,
}

/// Records of one collective with one type, reduction, root and kind of memory.
#[derive(Serialize)]
struct Section {
    title: String,
    collective: String,
    dtype: String,
    panels: Vec<Chart>,
    rows: Vec<Cells>,
}

/// A chart, with the values of all lines at common horizontal positions.
#[derive(Serialize)]
struct Chart {
    label: String,
    logarithmic: bool,
    x: Vec<f64>,
    lines: Vec<ChartLine>,
}

#[derive(Serialize)]
struct ChartLine {
    name: String,
    /// Codec of the rows; `None` for lines of other libraries, which are always shown.
    codec: Option<String>,
    dashed: bool,
    y: Vec<Option<f64>>,
}

#[derive(Serialize)]
struct Cells {
    failed: bool,
    codec: String,
    cells: Vec<String>,
}

/// Returns the HTML report of `records`, one file that loads nothing from elsewhere.
pub fn report(records: &[Record]) -> String {
    let mut sections: Vec<(String, Vec<&Record>)> = Vec::new();
    for record in records {
        let title = title(record);
        match sections.iter_mut().find(|(known, _)| *known == title) {
            Some((_, rows)) => rows.push(record),
            None => sections.push((title, vec![record])),
        }
    }
    let mut runs: Vec<String> = Vec::new();
    for run in records.iter().map(run) {
        if !runs.contains(&run) {
            runs.push(run);
        }
    }
    let page = Page {
        runs,
        notes: notes(records),
        columns: TABLE.map(|key| named(key).title).into(),
        summary: page_summary::summary(&sections),
        sections: sections.into_iter().map(section).collect(),
    };
    // Escaping `<` keeps texts from closing the script element that holds the data.
    let data = serde_json::to_string(&page).unwrap_or_default();
    let data = data.replace('<', "\\u003c");
    TEMPLATE
        .replace("/*uplot.css*/", STYLE)
        .replace("/*uplot.js*/", SCRIPT)
        .replace("/*data*/", &data)
}

/// Returns a section with its charts and rows.
fn section((title, rows): (String, Vec<&Record>)) -> Section {
    let of_first =
        |text: fn(&Record) -> &String| rows.first().map_or(String::new(), |row| text(row).clone());
    Section {
        title,
        collective: of_first(|row| &row.collective),
        dtype: of_first(|row| &row.dtype),
        panels: panels(&rows).iter().map(chart).collect(),
        rows: rows.iter().map(|row| cells(row)).collect(),
    }
}

/// Returns the title of a record's section, such as `reduce (max) of f32 at root 1, 2 ranks, H200`.
fn title(record: &Record) -> String {
    let redop = match record.redop.as_str() {
        "none" => String::new(),
        redop => format!(" ({redop})"),
    };
    let root = match record.root {
        -1 => String::new(),
        root => format!(" at root {root}"),
    };
    let memory = match record.run.gpu.as_str() {
        "" => "host memory",
        gpu => gpu,
    };
    let Record {
        collective,
        dtype,
        ranks,
        ..
    } = record;
    format!("{collective}{redop} of {dtype}{root}, {ranks} ranks, {memory}")
}

/// Describes machine, versions and command of a record.
fn run(record: &Record) -> String {
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
    format!(
        "{}: cinch {}, {place}{nccl}. {}",
        run.date, run.cinch, run.command
    )
}

/// Returns remarks that explain the figures and name comparisons that were not run.
fn notes(records: &[Record]) -> Vec<&'static str> {
    let mut notes = vec![
        "Times are medians of the slowest rank, out of place.",
        "Effective bus bandwidth is the bus bandwidth that an exact run would need for this time.",
        "A ratio above 1 is a library that takes longer than cinch in the same run.",
        "The limit is the launch, the messages that follow one another, and the longer one of wire \
         (370 GB/s) and memory (3,915 GB/s); it is drawn for H100 and H200 with NVLink only.",
        "Errors are against fp64.",
    ];
    if !records.iter().any(|record| record.vs.is_some()) {
        notes.push("No other library was run beside these rows.");
    } else if !records.iter().any(|record| record.symmetric.is_some()) {
        notes.push("NCCL's symmetric windows were not run.");
    }
    notes.push("PyTorch's symmetric memory was not run.");
    notes
}

/// Makes a section's panels and leaves out empty ones.
fn panels(rows: &[&Record]) -> Vec<Panel> {
    let ours = |row: &Record| {
        let codec = short_codec(&row.codec);
        let processes = if row.processes { ", processes" } else { "" };
        format!("{codec}, {}{processes}", row.mode)
    };
    let mut panels = Vec::new();
    for (key, logarithmic) in PANELS {
        let mut series = lines(rows, key, ours);
        if key == "time_us" {
            for (other, who) in [
                ("vs_us", "NCCL"),
                ("symmetric_us", "NCCL, symmetric windows"),
            ] {
                // NCCL's uncompressed call is in the rows of every codec, so it is drawn from only
                // one row of each size.
                let raw = raw_first(rows);
                let theirs = lines(&raw, other, |row| format!("{who}, {}", row.mode));
                series.extend(theirs.into_iter().map(|line| Series {
                    dashed: true,
                    ..line
                }));
            }
        }
        if !series.is_empty() {
            panels.push(Panel {
                label: named(key).title.into(),
                logarithmic,
                series,
            });
        }
    }
    panels
}

/// Returns one row for each size and mode: an uncompressed row if there is one.
fn raw_first<'a>(rows: &[&'a Record]) -> Vec<&'a Record> {
    let mut found: Vec<&Record> = Vec::new();
    let (raw, coded): (Vec<&Record>, Vec<&Record>) = rows.iter().partition(|row| !row.lossy());
    for row in raw.into_iter().chain(coded) {
        let same = |known: &&Record| (known.size, &known.mode) == (row.size, &row.mode);
        if !found.iter().any(same) {
            found.push(row);
        }
    }
    found
}

/// Returns a line for each name, which shows a column's values over size.
fn lines(rows: &[&Record], key: &str, name: impl Fn(&Record) -> String) -> Vec<Series> {
    let column = named(key);
    let points = rows.iter().filter_map(|row| {
        let value = column.number(row)?;
        Some((name(row), false, (row.size as f64, value)))
    });
    let mut all = collected(points);
    for line in &mut all {
        line.points.sort_by(|a, b| a.0.total_cmp(&b.0));
    }
    all
}

/// Groups points into lines by name.
fn collected(points: impl Iterator<Item = (String, bool, (f64, f64))>) -> Vec<Series> {
    let mut all: Vec<Series> = Vec::new();
    for (name, dashed, point) in points {
        match all.iter_mut().find(|line| line.name == name) {
            Some(line) => line.points.push(point),
            None => all.push(Series {
                name,
                dashed,
                points: vec![point],
            }),
        }
    }
    all
}

/// Aligns all lines of a panel at common horizontal positions, as the script needs them.
fn chart(panel: &Panel) -> Chart {
    let points = panel.series.iter().flat_map(|line| &line.points);
    let sizes: BTreeSet<u64> = points.map(|point| point.0 as u64).collect();
    let line = |series: &Series| ChartLine {
        name: series.name.clone(),
        // Lines of cinch are named by codec and mode.
        codec: (!series.name.starts_with("NCCL")).then(|| {
            series
                .name
                .split(',')
                .next()
                .unwrap_or_default()
                .to_string()
        }),
        dashed: series.dashed,
        y: sizes
            .iter()
            .map(|&size| {
                let here = series.points.iter().find(|point| point.0 as u64 == size);
                here.map(|point| point.1)
            })
            .collect(),
    };
    Chart {
        label: panel.label.clone(),
        logarithmic: panel.logarithmic,
        lines: panel.series.iter().map(line).collect(),
        x: sizes.iter().map(|&size| size as f64).collect(),
    }
}

/// Returns the table cells of a record.
fn cells(record: &Record) -> Cells {
    let placed = PlacedRecord::out_of_place(record);
    Cells {
        failed: record.failed(),
        codec: short_codec(&record.codec),
        cells: TABLE
            .iter()
            .map(|key| (named(key).value)(&placed).shown())
            .collect(),
    }
}

/// Draws records as SVG: bandwidth above; below it the error if a codec ran, otherwise the time.
pub fn drawing(records: &[Record]) -> String {
    let all: Vec<PlacedRecord> = records.iter().flat_map(PlacedRecord::all).collect();
    let panel = |key: &str, logarithmic| {
        let column = named(key);
        let points = all.iter().filter_map(|placed| {
            let value = (column.value)(placed).number()?;
            let Record {
                codec,
                dtype,
                redop,
                root,
                ..
            } = placed.record;
            let mut name = format!("{codec} {dtype}");
            if redop != "none" {
                name += &format!(" {redop}");
            }
            if *root >= 0 {
                name += &format!(" root {root}");
            }
            let in_place = placed.placement == "in_place";
            name += if in_place {
                ", in place"
            } else {
                ", out of place"
            };
            Some((name, in_place, (placed.record.size as f64, value)))
        });
        Panel {
            label: column.title.into(),
            logarithmic,
            series: collected(points),
        }
    };
    let moves = records
        .iter()
        .any(|record| record.out_of_place.eff_bus_bw > 0.0);
    let checked = |record: &Record| record.lossy() && record.out_of_place.rms_rel_err.is_some();
    let lower = match records.iter().any(checked) {
        true => "rms_rel_err",
        false => "time_us",
    };
    let (title, subtitle) = records.first().map_or_else(Default::default, |record| {
        let transports: BTreeSet<&str> = records.iter().map(|row| row.transport.as_str()).collect();
        let transports: Vec<&str> = transports.into_iter().collect();
        let run = &record.run;
        (
            format!("{}, {} ranks", record.collective, record.ranks),
            format!(
                "cinch {}, {}, {} cores, transport {}, median of the slowest rank",
                run.cinch,
                run.machine.cpu,
                run.machine.cores,
                transports.join(" and ")
            ),
        )
    });
    let upper = panel(if moves { "eff_bus_bw" } else { "alg_bw" }, false);
    svg(
        "message size (bytes)",
        &title,
        &subtitle,
        &[upper, panel(lower, true)],
    )
}

#[cfg(test)]
mod tests {
    use super::super::record::{Versus, read, tests::record};
    use super::*;
    use std::path::{Path, PathBuf};

    fn baselines() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../benches/baselines")
    }

    fn baseline() -> Vec<Record> {
        read(&baselines().join("gpu-h200x2.jsonl")).unwrap()
    }

    /// Returns the JSON data inside a report.
    fn data(text: &str) -> serde_json::Value {
        let (_, rest) = text.split_once("id=\"data\">").unwrap();
        serde_json::from_str(rest.split_once("</script>").unwrap().0).unwrap()
    }

    fn texts(values: &serde_json::Value, key: &str) -> Vec<String> {
        let values = values.as_array().unwrap();
        let text = |value: &serde_json::Value| value[key].as_str().unwrap().to_string();
        values.iter().map(text).collect()
    }

    #[test]
    fn report_of_a_baseline_has_every_row_and_loads_nothing() {
        let records = baseline();
        let text = report(&records);
        let data = data(&text);
        // The two sections are all_reduce of f32 and of bf16.
        let sections = data["sections"].as_array().unwrap();
        assert_eq!(sections.len(), 2);
        let rows = sections
            .iter()
            .map(|section| section["rows"].as_array().unwrap().len());
        assert_eq!(rows.sum::<usize>(), records.len());
        let labels = texts(&sections[0]["panels"], "label");
        for label in [
            "time (us)",
            "effective bus bandwidth (GB/s)",
            "NCCL's time over ours",
            "the limit over our time",
            "RMS error / RMS of result",
            "largest error",
        ] {
            assert!(labels.iter().any(|known| known == label), "{label}");
        }
        assert_eq!(sections[0]["collective"], "all_reduce");
        let drawn = sections[0]["panels"][0]["lines"].as_array().unwrap();
        let codec = |name: &str| &drawn.iter().find(|it| it["name"] == name).unwrap()["codec"];
        assert_eq!(codec("dynamic8, graph"), "dynamic8");
        assert!(codec("NCCL, graph").is_null());
        let lines = texts(&sections[0]["panels"][0]["lines"], "name");
        for line in ["NCCL, graph", "dynamic8, graph"] {
            assert!(lines.iter().any(|known| known == line), "{line}: {lines:?}");
        }
        for word in [
            "NVIDIA H200",
            "symmetric windows were not run",
            "without NVLink multicast",
        ] {
            assert!(text.contains(word), "{word}");
        }
        for foreign in [
            "<link", "<img", " src=", " href=", "@import", "url(", "/*data*/",
        ] {
            assert!(!text.contains(foreign), "{foreign}");
        }
    }

    #[test]
    fn every_baseline_of_the_bench_is_readable() {
        let mut read_files = 0;
        for entry in std::fs::read_dir(baselines()).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap();
            // Baseline files that other programs wrote have rows of another format.
            let other = ["torch-symm", "interpreter-vs-fused"]
                .iter()
                .any(|part| name.contains(part));
            if name.starts_with("gpu-") && !other {
                let records = read(&path).unwrap();
                assert!(report(&records).contains(&records[0].collective), "{name}");
                read_files += 1;
            }
        }
        assert!(read_files >= 8, "{read_files}");
    }

    /// Sums, maxima and different roots must not share a line.
    #[test]
    fn operations_and_roots_have_sections_of_their_own() {
        let mut sum = baseline().swap_remove(0);
        sum.collective = "reduce".into();
        (sum.redop, sum.root) = ("sum".into(), 0);
        let (mut max, mut elsewhere, mut moved) = (sum.clone(), sum.clone(), sum.clone());
        max.redop = "max".into();
        elsewhere.root = 1;
        moved.collective = "all_gather".into();
        (moved.redop, moved.root) = ("none".into(), -1);
        let page = data(&report(&[sum.clone(), max, elsewhere, moved, sum]));
        assert_eq!(
            texts(&page["sections"], "title"),
            [
                "reduce (sum) of f32 at root 0, 2 ranks, NVIDIA H200",
                "reduce (max) of f32 at root 0, 2 ranks, NVIDIA H200",
                "reduce (sum) of f32 at root 1, 2 ranks, NVIDIA H200",
                "all_gather of f32, 2 ranks, NVIDIA H200",
            ]
        );
    }

    #[test]
    fn table_of_the_report_has_every_figure_of_a_row() {
        let mut row = baseline().swap_remove(0);
        row.symmetric = Some(Versus {
            nccl: "2.28.9".into(),
            time_us: 123.25,
            min_us: 1.0,
            p99_us: 200.0,
            ratio: 4.5,
        });
        row.out_of_place.nwrong = Some(3);
        row.run.command = "</script><b>".into();
        let text = report(&[row]);
        assert!(!text.contains("</script><b>"));
        let page = data(&text);
        let shown = &page["sections"][0]["rows"][0];
        assert_eq!(shown["failed"], true);
        let cells: Vec<&str> = shown["cells"]
            .as_array()
            .unwrap()
            .iter()
            .map(|cell| cell.as_str().unwrap())
            .collect();
        assert_eq!((cells[11], cells[12], cells[16]), ("123.25", "4.50", "3"));
        // The hardware limit for 8 bytes is a launch (2 us) and a message (0.74 us).
        assert_eq!(cells[13], "2.74");
        let lines = texts(&page["sections"][0]["panels"][0]["lines"], "name");
        assert!(
            lines.contains(&"NCCL, symmetric windows, graph".to_string()),
            "{lines:?}"
        );
    }

    #[test]
    fn drawing_shows_the_error_of_lossy_runs_and_the_time_of_exact_ones() {
        let rows = |codec: &str| -> Vec<Record> {
            (10..20).map(|power| record(1 << power, codec)).collect()
        };
        let lossy = drawing(&rows("linear8:block=256"));
        assert!(lossy.contains("RMS error") && !lossy.contains("time (us)"));
        assert!(lossy.contains("linear8:block=256 f32 sum, in place"));
        let exact = drawing(&rows("raw"));
        assert!(exact.contains("time (us)") && !exact.contains("RMS error"));
    }
}
