//! A record of a measured row: the call, its times, its errors and the machine. A file of results
//! holds one record per line, each a self-contained JSON object.

use super::combine::Measured;
use super::emulate::EmulationInfo;
use super::metrics::rates;
use super::options::BenchOptions;
use super::row::Row;
use crate::machine::MachineInfo;
use cinch::config::{KNOBS, Origin};
use cinch::gpu::Device;
use cinch::{Config, Error, Result};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

/// Largest number of rows that are read from a file.
const MAX_ROWS: usize = 100_000;

/// Transport in the records of emulated links.
const EMULATED: &str = "emulated";

/// Results of one row of a benchmark: a call, with its times and errors in each placement.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Record {
    /// Name of the collective.
    pub collective: String,
    /// Number of ranks.
    pub ranks: usize,
    /// Ranks on each GPU; 1 on host memory.
    pub ranks_per_gpu: usize,
    /// Number of hosts with ranks, real or simulated by `--hosts`.
    #[serde(default = "one_host")]
    pub hosts: usize,
    /// Whether each rank has a process of its own.
    pub processes: bool,
    /// `graph` if replays of a CUDA graph were timed; `eager` if calls on a stream or on host
    /// memory were.
    pub mode: String,
    /// Calls in one repetition.
    pub calls: usize,
    /// Kernel and protocol of cinch, such as `fused-ll128`; `-` on host memory.
    pub protocol: String,
    /// Bytes of the larger buffer, over all ranks.
    pub size: usize,
    /// Element count of the call.
    pub count: usize,
    /// Name of the element type, such as `f32`.
    #[serde(rename = "type")]
    pub dtype: String,
    /// Reduction, or `none` for collectives that reduce nothing.
    pub redop: String,
    /// Root rank, or -1 for collectives without a root.
    pub root: i64,
    /// Codec that the call used.
    pub codec: String,
    /// Algorithm that the call used.
    pub algo: String,
    /// Slowest transport that carried data, or `none`; `emulated` if links were emulated, so that the row is no
    /// measurement of the machine.
    pub transport: String,
    /// Payload bytes that the busiest rank sent.
    pub wire_bytes: u64,
    /// Bytes that an uncompressed run would have sent, divided by the bytes that were sent.
    pub ratio: Option<f64>,
    /// Number of channels; on GPUs the number of blocks of the kernel.
    pub channels: usize,
    /// Figures with separate buffers for input and output.
    pub out_of_place: Figures,
    /// Figures with input and output in one buffer; null if that was not measured.
    pub in_place: Option<Figures>,
    /// NCCL's times, if it was measured.
    pub vs: Option<Versus>,
    /// NCCL's times on symmetric windows, if they were measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub symmetric: Option<Versus>,
    /// Machine, versions, date and command.
    pub run: RunInfo,
}

/// Figures of one placement. Rates are in GB/s (1e9 bytes a second).
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Figures {
    /// Median over the iterations, in microseconds; the time of an iteration is that of its slowest
    /// rank.
    pub time_us: f64,
    /// Shortest iteration, in microseconds.
    pub min_us: f64,
    /// 99th percentile of the iterations, in microseconds.
    pub p99_us: f64,
    /// Number of timed iterations.
    pub iterations: usize,
    /// Microseconds of each iteration on each rank, for the file of `-J`. No part of the JSON lines.
    #[serde(skip)]
    pub rank_times_us: Vec<Vec<f64>>,
    /// Algorithm bandwidth: uncompressed bytes over time.
    pub alg_bw: f64,
    /// Bus bandwidth on the links; equals `eff_bus_bw` without compression.
    pub bus_bw: f64,
    /// Bus bandwidth that an uncompressed run would need to take equally long: nccl-tests' busbw.
    pub eff_bus_bw: f64,
    /// Number of wrong elements; null if results were not compared.
    pub nwrong: Option<u64>,
    /// Largest difference from the exact result; null if results were not compared.
    pub max_abs_err: Option<f64>,
    /// RMS difference divided by the RMS of the exact result; null if results were not compared.
    pub rms_rel_err: Option<f64>,
    /// Whether all ranks hold the same bits; null if not compared, or if ranks get different data.
    pub identical: Option<bool>,
    /// Hash over the outputs of all ranks in hexadecimal, for comparing runs; null if results were
    /// not compared.
    #[serde(default)]
    pub bits: Option<String>,
}

/// NCCL's times of the same call, without compression.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Versus {
    /// Version of the measured NCCL library, as `major.minor.patch`.
    pub nccl: String,
    /// Median over the repetitions, in microseconds; the time of a repetition is that of its
    /// slowest rank.
    pub time_us: f64,
    /// Shortest repetition, in microseconds.
    pub min_us: f64,
    /// 99th percentile of the repetitions, in microseconds.
    pub p99_us: f64,
    /// NCCL's time divided by cinch's; above 1 cinch is faster.
    pub ratio: f64,
}

/// Machine, versions, date and command of a run. Only `CINCH_` variables of the environment are
/// kept, as others may hold secrets.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RunInfo {
    /// Name of the GPU model; empty for host memory.
    pub gpu: String,
    /// Number of GPUs that the process sees.
    pub gpus: u32,
    /// Version of the GPU driver.
    pub driver: String,
    /// CUDA version that the driver supports.
    pub cuda: String,
    /// Version of the measured cinch library.
    pub cinch: String,
    /// Whether and how cinch was built with GPU kernels.
    pub kernels: String,
    /// Date of the run, in UTC.
    pub date: String,
    /// The command line, without the folder of the program.
    pub command: String,
    /// Options of the benchmark, as written on the command line.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub options: BTreeMap<String, String>,
    /// `CINCH_` settings that differ from their defaults.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub settings: BTreeMap<String, String>,
    /// The machine whose links were emulated, if links were emulated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub emulated: Option<EmulationInfo>,
    /// Description of the host on which the benchmark ran.
    pub machine: MachineInfo,
}

/// Default for `hosts`: records of older versions lack the field.
fn one_host() -> usize {
    1
}

/// Number and placement of the ranks in a run.
#[derive(Clone, Copy, Debug)]
pub struct RankSetup {
    /// Number of ranks.
    pub nranks: usize,
    /// Ranks on each GPU; 1 on host memory.
    pub per_gpu: usize,
    /// Number of hosts with ranks, real or simulated by `--hosts`.
    pub hosts: usize,
    /// Whether each rank has a process of its own.
    pub processes: bool,
}

impl Record {
    /// Creates the record of a row from its out-of-place measurement, and its in-place measurement
    /// if there is one.
    pub fn new(
        ranks: RankSetup,
        run: &RunInfo,
        row: &Row,
        out: &Measured,
        in_place: Option<&Measured>,
    ) -> Record {
        let figures = |measured: &Measured| Figures::new(row, ranks.nranks, measured);
        Record {
            collective: row.collective.name().into(),
            ranks: ranks.nranks,
            ranks_per_gpu: ranks.per_gpu,
            hosts: ranks.hosts,
            processes: ranks.processes,
            mode: if row.graph { "graph" } else { "eager" }.into(),
            calls: 1,
            protocol: "-".into(),
            size: row.size(ranks.nranks),
            count: row.count,
            dtype: row.dtype.name().into(),
            redop: row.reduction().map_or("none", |op| op.name()).into(),
            root: match row.collective.has_root() {
                true => row.root as i64,
                false => -1,
            },
            codec: out.codecs.to_string(),
            algo: out.algorithm.name().into(),
            transport: match &run.emulated {
                Some(_) => EMULATED.into(),
                None => out.transport.map_or("none", |kind| kind.name()).into(),
            },
            wire_bytes: out.wire_bytes,
            ratio: out.ratio,
            channels: out.channels,
            out_of_place: figures(out),
            in_place: in_place.map(figures),
            vs: None,
            symmetric: None,
            run: run.clone(),
        }
    }

    /// Returns the measured placements with their names.
    pub fn placements(&self) -> impl Iterator<Item = (&'static str, &Figures)> {
        let out = std::iter::once(("out_of_place", &self.out_of_place));
        out.chain(self.in_place.iter().map(|figures| ("in_place", figures)))
    }

    /// Returns the out-of-place figures, with the larger errors of both placements.
    pub fn worst(&self) -> Figures {
        let mut worst = self.out_of_place.clone();
        if let Some(other) = &self.in_place {
            let larger = |a: Option<f64>, b: Option<f64>| a.into_iter().chain(b).reduce(f64::max);
            let same = worst.identical.into_iter().chain(other.identical);
            worst.max_abs_err = larger(worst.max_abs_err, other.max_abs_err);
            worst.rms_rel_err = larger(worst.rms_rel_err, other.rms_rel_err);
            worst.identical = same.reduce(|a, b| a && b);
        }
        worst
    }

    /// Returns whether any element is wrong or the outputs of ranks differ.
    pub fn failed(&self) -> bool {
        self.placements().any(|(_, figures)| {
            figures.nwrong.is_some_and(|wrong| wrong > 0) || figures.identical == Some(false)
        })
    }

    /// Returns whether links were emulated.
    pub fn is_emulated(&self) -> bool {
        self.run.emulated.is_some()
    }

    /// Drops the times of each iteration, which may be millions.
    pub fn forget_rank_times(&mut self) {
        let figures = std::iter::once(&mut self.out_of_place).chain(&mut self.in_place);
        figures.for_each(|figures| figures.rank_times_us = Vec::new());
    }

    /// Returns whether a lossy codec was used.
    pub fn lossy(&self) -> bool {
        self.codec != "raw"
    }
}

impl Figures {
    fn new(row: &Row, nranks: usize, measured: &Measured) -> Figures {
        let times = &measured.times;
        let size = row.size(nranks);
        let rates = rates(row.collective, nranks, size, times.median, measured.ratio);
        Figures {
            time_us: times.median * 1e6,
            min_us: times.least * 1e6,
            p99_us: times.p99 * 1e6,
            iterations: measured.iterations,
            rank_times_us: microseconds(&measured.rank_times),
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

fn microseconds(ranks: &[Vec<f64>]) -> Vec<Vec<f64>> {
    let of_rank = |times: &Vec<f64>| times.iter().map(|time| time * 1e6).collect();
    ranks.iter().map(of_rank).collect()
}

impl RunInfo {
    /// Describes this run on GPUs of the model `device`; the process sees `gpus` GPUs.
    pub fn on_gpus(device: &Device, gpus: u32) -> RunInfo {
        let version = device.driver().version();
        RunInfo {
            gpu: device.name.clone(),
            gpus,
            driver: driver_version(),
            cuda: format!("{}.{}", version / 1000, version % 1000 / 10),
            ..RunInfo::on_host()
        }
    }

    /// Describes this run on host memory.
    pub fn on_host() -> RunInfo {
        let words: Vec<String> = std::env::args().skip(1).collect();
        RunInfo {
            gpu: String::new(),
            gpus: 0,
            driver: String::new(),
            cuda: String::new(),
            cinch: cinch::VERSION.into(),
            kernels: cinch::gpu::kernels::STATE.to_string(),
            date: Timestamp::now().strftime("%F").to_string(),
            command: format!("cinch {}", words.join(" ")),
            options: BTreeMap::new(),
            settings: BTreeMap::new(),
            emulated: None,
            machine: MachineInfo::detect(),
        }
    }

    /// Adds the settings that differ from their defaults, and the emulated machine.
    pub fn under(self, config: &Config) -> RunInfo {
        let set = KNOBS.iter().zip(&config.origins);
        let set = set.filter(|(_, origin)| **origin != Origin::Default);
        let emulated = config.emulated.as_ref();
        RunInfo {
            emulated: emulated.map(|machine| EmulationInfo {
                file: machine.file.clone(),
                scale: machine.scale,
            }),
            settings: set
                .map(|(knob, _)| (knob.name.to_string(), (knob.show)(config)))
                .collect(),
            ..self
        }
    }

    /// Adds the options of the benchmark.
    pub fn with(self, options: &BenchOptions) -> RunInfo {
        RunInfo {
            options: options.shown(),
            ..self
        }
    }
}

/// Reads a file of records.
///
/// # Errors
/// Returns an invalid-argument error that names file and line.
pub fn read(path: &Path) -> Result<Vec<Record>> {
    let name = path.display();
    let refuse = |why: String| Err(Error::invalid_argument(why));
    let text = std::fs::read_to_string(path)
        .map_err(|error| Error::invalid_argument(format!("{name}: {error}")))?;
    let mut records = Vec::new();
    for (at, line) in text.lines().enumerate() {
        if line.trim().is_empty() {
            continue;
        }
        if records.len() == MAX_ROWS {
            return refuse(format!("{name}: more than {MAX_ROWS} rows"));
        }
        match serde_json::from_str(line) {
            Ok(record) => records.push(record),
            Err(error) => {
                let line = at + 1;
                return refuse(format!(
                    "{name}, line {line}: not a row of `cinch bench --json`: {error}"
                ));
            }
        }
    }
    match records.is_empty() {
        true => refuse(format!("{name}: no row of `cinch bench --json` is in it")),
        false => Ok(records),
    }
}

/// Formats the driver's version as NVIDIA's tools do.
pub fn driver_version() -> String {
    driver_version_below(Path::new("/")).unwrap_or("unknown".into())
}

/// Returns the version of NVIDIA's driver on the machine whose file systems are at `root`; `None` if it is not loaded.
pub fn driver_version_below(root: &Path) -> Option<String> {
    let text = std::fs::read_to_string(root.join("proc/driver/nvidia/version")).ok()?;
    let digits = |word: &&str| word.contains('.') && word.starts_with(|c: char| c.is_ascii_digit());
    let line = text.lines().next()?;
    line.split_whitespace().find(digits).map(str::to_string)
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// Returns a record of an uncompressed all_reduce of f32 over 4 ranks, with figures that tests
    /// recognise.
    pub fn record(size: usize, codec: &str) -> Record {
        let figures = Figures {
            time_us: size as f64 / 1000.0 + 5.0,
            min_us: 4.0,
            p99_us: 99.5,
            iterations: 20,
            rank_times_us: Vec::new(),
            alg_bw: 1.5,
            bus_bw: 0.57,
            eff_bus_bw: 2.25,
            nwrong: Some(0),
            max_abs_err: Some(0.015625),
            rms_rel_err: Some(0.0075),
            identical: Some(true),
            bits: Some("00c1c400c1c400c1".into()),
        };
        Record {
            collective: "all_reduce".into(),
            ranks: 4,
            ranks_per_gpu: 1,
            hosts: 1,
            processes: true,
            mode: "eager".into(),
            calls: 1,
            protocol: "-".into(),
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
            vs: None,
            symmetric: None,
            run: RunInfo::on_host(),
        }
    }

    #[test]
    fn record_survives_json() {
        let line = serde_json::to_string(&record(1024, "linear8")).unwrap();
        assert!(!line.contains('\n'));
        let value: serde_json::Value = serde_json::from_str(&line).unwrap();
        for key in [
            "type",
            "redop",
            "codec",
            "algo",
            "transport",
            "protocol",
            "mode",
        ] {
            assert!(value[key].is_string(), "{key}");
        }
        for key in ["size", "count", "root", "wire_bytes", "ranks", "calls"] {
            assert!(value[key].is_number(), "{key}");
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
                assert!(value[placement][key].is_number(), "{placement} {key}");
            }
            assert!(value[placement]["identical"].is_boolean());
        }
        assert_eq!(value["run"]["date"].as_str().unwrap().len(), 10);
        let back: Record = serde_json::from_str(&line).unwrap();
        assert_eq!((back.size, back.dtype.as_str()), (1024, "f32"));
    }

    #[test]
    fn run_info_has_the_settings_that_were_set() {
        let mut config = Config::default();
        let json = |config: &Config| {
            serde_json::to_value(RunInfo::on_host().under(config)).unwrap()["settings"].clone()
        };
        assert!(json(&config).is_null());
        config
            .set("CINCH_GPU_CHANNELS", "128", Origin::Environment)
            .unwrap();
        assert_eq!(json(&config)["CINCH_GPU_CHANNELS"], "128");
    }

    #[test]
    fn run_info_has_the_emulated_machine() {
        let config = Config {
            emulated: Some(cinch::config::EmulatedMachine {
                file: "A.xml".into(),
                xml: String::new(),
                scale: 100,
            }),
            ..Config::default()
        };
        let run = serde_json::to_value(RunInfo::on_host().under(&config)).unwrap();
        assert_eq!(
            run["emulated"],
            serde_json::json!({"file": "A.xml", "scale": 100})
        );
        let plain = serde_json::to_value(RunInfo::on_host()).unwrap();
        assert!(plain["emulated"].is_null());
    }

    #[test]
    fn record_fails_on_wrong_values_and_different_ranks() {
        let good = record(1024, "raw");
        assert!(!good.failed());
        let mut wrong = good.clone();
        wrong.out_of_place.nwrong = Some(1);
        assert!(wrong.failed());
        let mut differs = good;
        differs.in_place.as_mut().unwrap().identical = Some(false);
        assert!(differs.failed());
        assert_eq!(differs.worst().identical, Some(false));
    }

    #[test]
    fn read_names_file_and_line_of_malformed_records() {
        let error = read(Path::new("/no/such/rows")).unwrap_err();
        assert!(error.message().contains("/no/such/rows"), "{error}");
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../benches/baselines");
        let error = read(&folder.join("host-codecs.jsonl")).unwrap_err();
        assert!(
            error.message().contains("host-codecs.jsonl, line 1"),
            "{error}"
        );
    }
}
