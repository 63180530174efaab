//! `--compare OLD`: prints ratios of this run's times to those of an earlier run. `compare_saved` compares two files.

use super::record::{self, Record, RunInfo};
use cinch::{Collective, Error, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};
use std::path::Path;

/// Reads the `--json` file of an earlier run, which must have the given collective and number of
/// ranks.
///
/// # Errors
/// Returns an invalid-argument error that names the file.
pub fn read(path: &Path, collective: Collective, nranks: usize) -> Result<Vec<Record>> {
    let records = record::read(path).map_err(|error| error.context("--compare"))?;
    let other = records
        .iter()
        .find(|record| (record.collective.as_str(), record.ranks) != (collective.name(), nranks));
    match other {
        Some(record) => Err(Error::invalid_argument(format!(
            "--compare {}: the file holds {} over {} ranks, but this run is {collective} over {nranks} ranks",
            path.display(),
            record.collective,
            record.ranks
        ))),
        None => Ok(records),
    }
}

/// Prints how the runs differ, and new time over old time for each row that both runs have. A ratio
/// below 1 means that the new run is faster.
///
/// # Errors
/// Returns the writer's errors.
pub fn write(old: &[Record], new: &[Record], out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "#\n# Time over the earlier run's, below 1 is faster:")?;
    if let ([old, ..], [new, ..]) = (old, new) {
        for line in differences(old, new) {
            writeln!(out, "# changed since then: {line}")?;
        }
    }
    writeln!(
        out,
        "#{:>11} {:>7} {:>9} {:>5} {:<19} {:>8} {:>13} {:>13}",
        "size", "type", "redop", "root", "codec", "algo", "out-of-place", "in-place"
    )?;
    let mut logs = Vec::new();
    for record in new {
        let Some(before) = old.iter().find(|old| key(old) == key(record)) else {
            continue;
        };
        let out_of_place = record.out_of_place.time_us / before.out_of_place.time_us;
        logs.push(out_of_place.ln());
        let in_place = match (&record.in_place, &before.in_place) {
            (Some(new), Some(old)) => format!("{:.3}", new.time_us / old.time_us),
            _ => "-".into(),
        };
        writeln!(
            out,
            "#{:>11} {:>7} {:>9} {:>5} {:<19} {:>8} {out_of_place:>13.3} {in_place:>13}",
            record.size, record.dtype, record.redop, record.root, record.codec, record.algo,
        )?;
    }
    match logs.len() {
        0 => writeln!(out, "# the runs have no row in common"),
        n => writeln!(
            out,
            "# geometric mean of {n} rows: {:.3}",
            (logs.iter().sum::<f64>() / n as f64).exp()
        ),
    }
}

/// Lists the options, settings and machine properties that differ between the runs.
pub fn differences(old: &Record, new: &Record) -> Vec<String> {
    let mut lines = Vec::new();
    let mut note = |what: &str, before: &str, now: &str| {
        if before != now {
            lines.push(format!("{what} {now}, was {before}"));
        }
    };
    note("hosts", &old.hosts.to_string(), &new.hosts.to_string());
    let (before, now): (&RunInfo, &RunInfo) = (&old.run, &new.run);
    note("version", &before.cinch, &now.cinch);
    note("GPU", &before.gpu, &now.gpu);
    for (before, now) in [
        (&before.options, &now.options),
        (&before.settings, &now.settings),
    ] {
        let names: BTreeSet<_> = before.keys().chain(now.keys()).collect();
        for name in names {
            let value = |map: &BTreeMap<String, String>| {
                map.get(name).map_or("unset", String::as_str).to_string()
            };
            note(name, &value(before), &value(now));
        }
    }
    let (before, now) = (&before.machine, &now.machine);
    note("processor", &before.cpu, &now.cpu);
    note("cores", &before.cores.to_string(), &now.cores.to_string());
    note("instructions", &before.isa, &now.isa);
    note("kernel", &before.kernel, &now.kernel);
    lines
}

/// Returns the properties by which rows of two runs match. The algorithm is left out: the planner
/// may choose another one in each run.
fn key(record: &Record) -> (usize, &str, &str, i64, &str, &str) {
    (
        record.size,
        &record.dtype,
        &record.redop,
        record.root,
        &record.codec,
        &record.mode,
    )
}

#[cfg(test)]
mod tests {
    use super::super::record::tests::record;
    use super::*;

    #[test]
    fn rows_of_both_runs_are_matched_and_divided() {
        let old = [record(1000, "raw"), record(2000, "raw")];
        let mut new = [record(2000, "raw"), record(4000, "raw")];
        new[0].out_of_place.time_us *= 0.5;
        let written = |new: &[Record]| {
            let mut out = Vec::new();
            write(&old, new, &mut out).unwrap();
            String::from_utf8(out).unwrap()
        };
        let text = written(&new);
        assert!(text.contains("0.500") && text.contains("1.000"), "{text}");
        assert!(text.contains("mean of 1 rows: 0.500"), "{text}");
        assert!(!text.contains("changed since then"), "{text}");
        let run = &mut new[0].run;
        run.machine.cores += 1;
        run.settings.insert("CINCH_SLOTS".into(), "8".into());
        let text = written(&new);
        assert!(text.contains("then: CINCH_SLOTS 8, was unset"), "{text}");
        assert!(text.contains("then: cores "), "{text}");
    }

    #[test]
    fn files_of_other_calls_are_refused() {
        let read = |path: &Path, ranks| read(path, Collective::AllReduce, ranks);
        let error = read(Path::new("/proc/version"), 4).unwrap_err();
        assert!(error.message().contains("--json"), "{error}");
        assert!(read(Path::new("/no/such/file"), 4).is_err());
        let path = std::env::temp_dir().join(format!("cinch-compare-{}", std::process::id()));
        std::fs::write(&path, serde_json::to_string(&record(8, "raw")).unwrap()).unwrap();
        let (same, other) = (read(&path, 4), read(&path, 2));
        std::fs::remove_file(&path).unwrap();
        assert!(same.is_ok());
        assert!(other.unwrap_err().message().contains("over 4 ranks"));
    }
}
