//! Rows for machines: one JSON object on each line, complete in itself.

use super::measure::Measured;
use super::report::Entry;
use super::row::Row;
use super::settings;
use crate::machine::Machine;
use cinch::Config;
use cinch::gpu::Device;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

/// One row of one run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Record {
    /// Collective.
    pub collective: String,
    /// Ranks.
    pub ranks: usize,
    /// Of them on each GPU.
    pub ranks_per_gpu: usize,
    /// Hosts that they stand for.
    #[serde(default = "one")]
    pub hosts: usize,
    /// Whether each has a process of its own.
    pub processes: bool,
    /// `graph` or `eager`.
    pub mode: String,
    /// Calls of a repetition.
    pub calls: usize,
    /// Protocol of our kernels.
    pub protocol: String,
    /// The row, as on host memory.
    #[serde(flatten)]
    pub entry: Entry,
    /// The other library's.
    pub vs: Option<Versus>,
    /// The other library's on symmetric windows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub symmetric: Option<Versus>,
    /// Where, when and how.
    pub run: RunRecord,
}

/// The other library's times of the same call, without a codec.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Versus {
    /// Version.
    pub nccl: String,
    /// Median over repetitions of the slowest rank's time.
    pub time_us: f64,
    /// Least of them.
    pub min_us: f64,
    /// 99th percentile.
    pub p99_us: f64,
    /// Its time over ours: above 1 we are faster.
    pub ratio: f64,
}

/// Where, when and how.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RunRecord {
    /// Name of the GPUs; empty for host memory.
    pub gpu: String,
    /// How many the machine shows.
    pub gpus: u32,
    /// Version of the driver.
    pub driver: String,
    /// CUDA version of the driver.
    pub cuda: String,
    /// Version of this library.
    pub cinch: String,
    /// The state of its kernels.
    pub kernels: String,
    /// Day, in universal time.
    pub date: String,
    /// The command, without the folder of the program.
    pub command: String,
    /// `CINCH_` settings that are not at their defaults.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub settings: BTreeMap<String, String>,
    /// The host.
    pub machine: Machine,
}

/// The hosts of rows that were written before ranks could stand for several.
fn one() -> usize {
    1
}

/// How a row was run.
#[derive(Clone, Copy, Debug)]
pub struct How {
    /// Ranks.
    pub nranks: usize,
    /// Of them on each GPU.
    pub per_gpu: usize,
    /// Hosts that they stand for.
    pub hosts: usize,
    /// Whether each has a process of its own.
    pub processes: bool,
    /// Whether replays of graphs are timed.
    pub graph: bool,
}

impl Record {
    /// The record of a row, compared with nothing.
    pub fn new(
        how: How,
        run: &RunRecord,
        row: &Row,
        measured: &Measured,
        calls: usize,
        protocol: &str,
    ) -> Record {
        Record {
            collective: row.collective.name().into(),
            ranks: how.nranks,
            ranks_per_gpu: how.per_gpu,
            hosts: how.hosts,
            processes: how.processes,
            mode: if how.graph { "graph" } else { "eager" }.into(),
            calls,
            protocol: protocol.into(),
            entry: Entry::new(row, how.nranks, measured, None),
            vs: None,
            symmetric: None,
            run: run.clone(),
        }
    }
}

impl Versus {
    /// Median, least and 99th percentile of the other library's times, in seconds, beside our median.
    pub fn new(nccl: Option<&str>, times: [f64; 3], ours: f64) -> Versus {
        let [time_us, min_us, p99_us] = times.map(|seconds| seconds * 1e6);
        Versus {
            nccl: nccl.unwrap_or("unknown").into(),
            time_us,
            min_us,
            p99_us,
            ratio: times[0] / ours,
        }
    }
}

impl RunRecord {
    /// This run, on GPUs like `device`, of which there are `gpus`.
    pub fn new(device: &Device, gpus: u32) -> RunRecord {
        let version = device.driver().version();
        RunRecord {
            gpu: device.name.clone(),
            gpus,
            driver: driver_version(),
            cuda: format!("{}.{}", version / 1000, version % 1000 / 10),
            ..RunRecord::on_host()
        }
    }

    /// This run, on host memory.
    pub fn on_host() -> RunRecord {
        let words: Vec<String> = std::env::args().skip(1).collect();
        let seconds = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |time| time.as_secs());
        RunRecord {
            gpu: String::new(),
            gpus: 0,
            driver: String::new(),
            cuda: String::new(),
            cinch: cinch::VERSION.into(),
            kernels: cinch::gpu::kernels::STATE.to_string(),
            date: day(seconds / 86400),
            command: format!("cinch {}", words.join(" ")),
            settings: BTreeMap::new(),
            machine: Machine::detect(),
        }
    }

    /// The same, under these settings.
    pub fn under(self, config: &Config) -> RunRecord {
        RunRecord {
            settings: settings(config),
            ..self
        }
    }
}

/// The version of the driver, as its maker counts.
pub fn driver_version() -> String {
    let text = std::fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
    let digits = |word: &&str| word.contains('.') && word.starts_with(|c: char| c.is_ascii_digit());
    let line = text.lines().next().unwrap_or_default();
    line.split_whitespace()
        .find(digits)
        .unwrap_or("unknown")
        .into()
}

/// The date of a day since 1970-01-01, as year-month-day.
fn day(since: u64) -> String {
    // Years are counted from March on, so that the odd day of a leap year is the last one.
    let days = since + 719_468;
    let (era, of_era) = (days / 146_097, days % 146_097);
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let (month, later) = if month < 10 {
        (month + 3, 0)
    } else {
        (month - 9, 1)
    };
    format!("{:04}-{month:02}-{day:02}", era * 400 + year + later)
}

#[cfg(test)]
mod tests {
    use super::*;
    use cinch::config::Origin;

    /// A row says what was set, and nothing where nothing was.
    #[test]
    fn rows_have_their_settings() {
        let mut config = Config::default();
        let json = |config: &Config| {
            serde_json::to_value(RunRecord::on_host().under(config)).unwrap()["settings"].clone()
        };
        assert!(json(&config).is_null());
        config
            .set("CINCH_GPU_CHANNELS", "128", Origin::Environment)
            .unwrap();
        assert_eq!(json(&config)["CINCH_GPU_CHANNELS"], "128");
    }

    #[test]
    fn days_are_dates() {
        for (since, date) in [
            (0, "1970-01-01"),
            (58, "1970-02-28"),
            (59, "1970-03-01"),
            (11_016, "2000-02-29"),
            (19_782, "2024-02-29"),
            (19_783, "2024-03-01"),
            (20_777, "2026-11-20"),
        ] {
            assert_eq!(day(since), date);
        }
    }
}
