//! Results as JSON and CSV.

use super::measure::Measured;
use super::metrics::{rates, size_of};
use super::row::Row;
use crate::machine::Machine;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::{self, Write};

/// Everything that a run leaves: the JSON file.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Results {
    /// The library's version.
    pub version: String,
    /// How the run was made.
    pub config: RunConfig,
    /// One entry for each row.
    pub results: Vec<Entry>,
}

/// How a run was made. Never the whole environment: that would leak what is in it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RunConfig {
    /// Collective.
    pub collective: String,
    /// Number of ranks.
    pub ranks: usize,
    /// Number of hosts.
    pub hosts: usize,
    /// Options, as they are written on the command line.
    pub options: BTreeMap<String, String>,
    /// `CINCH_` settings that are not at their defaults.
    pub settings: BTreeMap<String, String>,
    /// Rank 0's machine.
    pub machine: Machine,
}

/// One row.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Entry {
    /// Bytes of the larger buffer, over all ranks.
    pub size: usize,
    /// Elements, as the call counts them.
    pub count: usize,
    /// Element type.
    #[serde(rename = "type")]
    pub dtype: String,
    /// Reduction, or none.
    pub redop: String,
    /// Root, or -1.
    pub root: i64,
    /// Codec that ran.
    pub codec: String,
    /// Algorithm that ran.
    pub algo: String,
    /// Slowest transport that carried data, or none.
    pub transport: String,
    /// Payload bytes that the busiest rank sent.
    pub wire_bytes: u64,
    /// Bytes of an exact run over those that travelled.
    pub ratio: Option<f64>,
    /// Lanes.
    pub channels: usize,
    /// With separate buffers.
    pub out_of_place: Figures,
    /// With one buffer; null where the call has no such form.
    pub in_place: Option<Figures>,
}

/// Figures of one placement. Rates are in GB/s, 1e9 bytes a second.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Figures {
    /// Median over iterations of the slowest rank's time.
    pub time_us: f64,
    /// Least of them.
    pub min_us: f64,
    /// 99th percentile.
    pub p99_us: f64,
    /// Timed iterations.
    pub iterations: usize,
    /// Uncompressed bytes per time.
    pub alg_bw: f64,
    /// What the links see; equals eff_bus_bw where nothing is compressed.
    pub bus_bw: f64,
    /// The bus bandwidth that an exact run would need for this time: nccl-tests' busbw.
    pub eff_bus_bw: f64,
    /// Wrong elements; null if unchecked.
    pub nwrong: Option<u64>,
    /// Largest difference from the exact result; null if unchecked.
    pub max_abs_err: Option<f64>,
    /// RMS difference over the RMS of the exact result; null if unchecked.
    pub rms_rel_err: Option<f64>,
    /// Same bits on all ranks; null if unchecked or if ranks get different data.
    pub identical: Option<bool>,
    /// Hash of all ranks' outputs, in hexadecimal, to compare runs by; null if unchecked.
    #[serde(default)]
    pub bits: Option<String>,
}

impl Entry {
    /// The entry of a row.
    pub fn new(row: &Row, nranks: usize, out: &Measured, in_place: Option<&Measured>) -> Entry {
        let figures = |measured: &Measured| Figures::new(row, nranks, measured);
        Entry {
            size: size_of(row.collective, row.dtype, nranks, row.count),
            count: row.count,
            dtype: row.dtype.name().into(),
            redop: match row.collective.reduces() {
                true => row.op.name().into(),
                false => "none".into(),
            },
            root: match row.collective.has_root() {
                true => row.root as i64,
                false => -1,
            },
            codec: out.codecs.to_string(),
            algo: out.algorithm.name().into(),
            transport: out.transport.map_or("none", |kind| kind.name()).into(),
            wire_bytes: out.wire_bytes,
            ratio: out.ratio,
            channels: out.channels,
            out_of_place: figures(out),
            in_place: in_place.map(figures),
        }
    }

    /// Both placements, those that there are.
    pub fn placements(&self) -> impl Iterator<Item = (&'static str, &Figures)> {
        let out = std::iter::once(("out_of_place", &self.out_of_place));
        out.chain(self.in_place.iter().map(|figures| ("in_place", figures)))
    }

    /// Whether any element is wrong or any rank differs.
    pub fn failed(&self) -> bool {
        self.placements().any(|(_, figures)| {
            figures.nwrong.is_some_and(|wrong| wrong > 0) || figures.identical == Some(false)
        })
    }

    /// Whether data was changed on purpose.
    pub fn lossy(&self) -> bool {
        self.codec != "raw"
    }
}

impl Figures {
    fn new(row: &Row, nranks: usize, measured: &Measured) -> Figures {
        let size = size_of(row.collective, row.dtype, nranks, row.count);
        let rates = rates(
            row.collective,
            nranks,
            size,
            measured.median,
            measured.ratio,
        );
        Figures {
            time_us: measured.median * 1e6,
            min_us: measured.least * 1e6,
            p99_us: measured.p99 * 1e6,
            iterations: measured.iterations,
            alg_bw: rates.alg,
            bus_bw: rates.bus,
            eff_bus_bw: rates.effective,
            nwrong: measured.wrong,
            max_abs_err: measured.max_abs_err,
            rms_rel_err: measured.rms_rel_err,
            identical: measured.identical,
            bits: measured.bits.map(|bits| format!("{bits:016x}")),
        }
    }
}

/// Columns of the CSV file.
pub const CSV_COLUMNS: [&str; 23] = [
    "size",
    "count",
    "type",
    "redop",
    "root",
    "codec",
    "algo",
    "transport",
    "wire_bytes",
    "ratio",
    "channels",
    "placement",
    "time_us",
    "min_us",
    "p99_us",
    "iterations",
    "alg_bw",
    "bus_bw",
    "eff_bus_bw",
    "nwrong",
    "max_abs_err",
    "rms_rel_err",
    "identical",
];

/// Writes one row for each entry and placement. A codec for each level has a comma, and gets quotes.
///
/// # Errors
/// Those of writing.
pub fn write_csv(entries: &[Entry], out: &mut impl Write) -> io::Result<()> {
    fn field<T: ToString>(value: Option<T>) -> String {
        value.map_or(String::new(), |value| value.to_string())
    }
    writeln!(out, "{}", CSV_COLUMNS.join(","))?;
    for entry in entries {
        for (placement, figures) in entry.placements() {
            let fields = [
                entry.size.to_string(),
                entry.count.to_string(),
                entry.dtype.clone(),
                entry.redop.clone(),
                entry.root.to_string(),
                quoted(&entry.codec),
                entry.algo.clone(),
                entry.transport.clone(),
                entry.wire_bytes.to_string(),
                field(entry.ratio),
                entry.channels.to_string(),
                placement.to_string(),
                figures.time_us.to_string(),
                figures.min_us.to_string(),
                figures.p99_us.to_string(),
                figures.iterations.to_string(),
                figures.alg_bw.to_string(),
                figures.bus_bw.to_string(),
                figures.eff_bus_bw.to_string(),
                field(figures.nwrong),
                field(figures.max_abs_err),
                field(figures.rms_rel_err),
                field(figures.identical),
            ];
            writeln!(out, "{}", fields.join(","))?;
        }
    }
    Ok(())
}

/// A field of a CSV file, in quotes if it needs them.
fn quoted(text: &str) -> String {
    match text.contains([',', '"']) {
        true => format!("\"{}\"", text.replace('"', "\"\"")),
        false => text.into(),
    }
}

/// Writes the JSON object.
///
/// # Errors
/// Those of writing.
pub fn write_json(results: &Results, out: &mut impl Write) -> io::Result<()> {
    serde_json::to_writer_pretty(&mut *out, results)?;
    writeln!(out)
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A run of all_reduce over 4 ranks, with these rows.
    pub fn results(entries: Vec<Entry>) -> Results {
        Results {
            version: "1.2.3".into(),
            config: RunConfig {
                collective: "all_reduce".into(),
                ranks: 4,
                hosts: 1,
                options: Default::default(),
                settings: Default::default(),
                machine: Machine::detect(),
            },
            results: entries,
        }
    }

    /// An entry with figures that are easy to recognise.
    pub fn entry(size: usize, codec: &str) -> Entry {
        let figures = Figures {
            time_us: size as f64 / 1000.0 + 5.0,
            min_us: 4.0,
            p99_us: 99.5,
            iterations: 20,
            alg_bw: 1.5,
            bus_bw: 0.57,
            eff_bus_bw: 2.25,
            nwrong: Some(0),
            max_abs_err: Some(0.015625),
            rms_rel_err: Some(0.0075),
            identical: Some(true),
            bits: Some("00c1c400c1c400c1".into()),
        };
        Entry {
            size,
            count: size / 4,
            dtype: "f32".into(),
            redop: "sum".into(),
            root: -1,
            codec: codec.into(),
            algo: "direct".into(),
            transport: "shm".into(),
            wire_bytes: size as u64 / 3,
            ratio: Some(3.94),
            channels: 2,
            out_of_place: figures.clone(),
            in_place: Some(figures),
        }
    }

    #[test]
    fn json_has_the_promised_shape() {
        let results = Results {
            version: cinch::VERSION.into(),
            config: RunConfig {
                collective: "all_reduce".into(),
                ranks: 4,
                hosts: 1,
                options: BTreeMap::new(),
                settings: BTreeMap::new(),
                machine: Machine::detect(),
            },
            results: vec![entry(1024, "linear8"), entry(2048, "linear8")],
        };
        let mut text = Vec::new();
        write_json(&results, &mut text).unwrap();
        let value: serde_json::Value = serde_json::from_slice(&text).unwrap();
        let keys: Vec<_> = value.as_object().unwrap().keys().collect();
        assert_eq!(keys, ["config", "results", "version"]);
        for entry in value["results"].as_array().unwrap() {
            for key in [
                "size",
                "count",
                "type",
                "redop",
                "root",
                "codec",
                "algo",
                "transport",
                "wire_bytes",
            ] {
                assert!(!entry[key].is_null(), "{key}");
            }
            for placement in ["out_of_place", "in_place"] {
                for key in [
                    "time_us",
                    "alg_bw",
                    "bus_bw",
                    "nwrong",
                    "max_abs_err",
                    "rms_rel_err",
                ] {
                    assert!(entry[placement][key].is_number(), "{placement} {key}");
                }
                assert!(entry[placement]["identical"].is_boolean());
            }
        }
        let back: Results = serde_json::from_slice(&text).unwrap();
        assert_eq!(back.results[1].size, 2048);
    }

    #[test]
    fn csv_is_rectangular_without_blanks() {
        let mut unchecked = entry(4096, "raw");
        unchecked.out_of_place.nwrong = None;
        unchecked.in_place = None;
        let mut text = Vec::new();
        write_csv(&[entry(1024, "linear8:block=32"), unchecked], &mut text).unwrap();
        let text = String::from_utf8(text).unwrap();
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines.len(), 1 + 2 + 1);
        for line in &lines {
            assert_eq!(line.split(',').count(), CSV_COLUMNS.len(), "{line}");
            assert!(!line.contains(' '), "{line}");
        }
        assert!(lines[1].contains(",out_of_place,") && lines[2].contains(",in_place,"));
        assert!(
            lines[1].starts_with("1024,256,f32,sum,-1,linear8:block=32,direct,shm,341,3.94,2,")
        );
    }

    #[test]
    fn codecs_of_two_levels_are_one_field() {
        let mut text = Vec::new();
        let codec = "intra=raw,inter=dynamic8:block=256";
        write_csv(&[entry(1024, codec)], &mut text).unwrap();
        let text = String::from_utf8(text).unwrap();
        let line = text.lines().nth(1).unwrap();
        assert!(
            line.starts_with(&format!("1024,256,f32,sum,-1,\"{codec}\",direct,")),
            "{line}"
        );
        assert_eq!(
            line.replace(codec, "").split(',').count(),
            CSV_COLUMNS.len()
        );
        assert_eq!(quoted("a\"b"), "\"a\"\"b\"");
    }

    #[test]
    fn wrong_values_and_different_ranks_fail() {
        let good = entry(1024, "raw");
        assert!(!good.failed());
        let mut wrong = good.clone();
        wrong.out_of_place.nwrong = Some(1);
        assert!(wrong.failed());
        let mut differs = good;
        differs.in_place.as_mut().unwrap().identical = Some(false);
        assert!(differs.failed());
    }
}
