//! Ratios of this run to an earlier one.

use super::report::{Entry, Results};
use cinch::Collective;
use std::collections::BTreeSet;
use std::io::{self, Write};
use std::path::Path;

/// Reads an earlier run's JSON file, of the same collective over as many ranks.
///
/// # Errors
/// A sentence with the file's name.
pub fn read(path: &Path, collective: Collective, nranks: usize) -> Result<Results, String> {
    let path_name = path.display();
    let file = std::fs::File::open(path).map_err(|error| format!("{path_name}: {error}"))?;
    let results: Results = serde_json::from_reader(io::BufReader::new(file))
        .map_err(|error| format!("{path_name}: not a file of `cinch bench --json`: {error}"))?;
    let before = &results.config;
    if (before.collective.as_str(), before.ranks) != (collective.name(), nranks) {
        return Err(format!(
            "--compare {path_name}: that is {} over {} ranks, and this is {collective} over {nranks}",
            before.collective, before.ranks
        ));
    }
    Ok(results)
}

/// Prints what is different about the runs and, for each row that both have, new time over old time:
/// below 1 is faster.
///
/// # Errors
/// Those of writing.
pub fn write(old: &Results, new: &Results, out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "#\n# Time over the earlier run's, below 1 is faster:")?;
    for line in differences(old, new) {
        writeln!(out, "# other than then: {line}")?;
    }
    let (old, new) = (&old.results, &new.results);
    writeln!(
        out,
        "#{:>11} {:>7} {:>9} {:>5} {:<19} {:>8} {:>13} {:>13}",
        "size", "type", "redop", "root", "codec", "algo", "out-of-place", "in-place"
    )?;
    let mut logs = Vec::new();
    for entry in new {
        let Some(before) = old.iter().find(|old| key(old) == key(entry)) else {
            continue;
        };
        let out_of_place = entry.out_of_place.time_us / before.out_of_place.time_us;
        logs.push(out_of_place.ln());
        let in_place = match (&entry.in_place, &before.in_place) {
            (Some(new), Some(old)) => format!("{:.3}", new.time_us / old.time_us),
            _ => "-".into(),
        };
        writeln!(
            out,
            "#{:>11} {:>7} {:>9} {:>5} {:<19} {:>8} {:>13.3} {:>13}",
            entry.size,
            entry.dtype,
            entry.redop,
            entry.root,
            entry.codec,
            entry.algo,
            out_of_place,
            in_place
        )?;
    }
    match logs.len() {
        0 => writeln!(out, "# no row is in both runs"),
        n => writeln!(
            out,
            "# geometric mean of {n} rows: {:.3}",
            (logs.iter().sum::<f64>() / n as f64).exp()
        ),
    }
}

/// What was said or is there otherwise than in the earlier run.
fn differences(old: &Results, new: &Results) -> Vec<String> {
    let (before, now) = (&old.config, &new.config);
    let mut lines = Vec::new();
    let mut note = |what: &str, before: &str, now: &str| {
        if before != now {
            lines.push(format!("{what} {now}, was {before}"));
        }
    };
    note("version", &old.version, &new.version);
    note("hosts", &before.hosts.to_string(), &now.hosts.to_string());
    for (before, now) in [
        (&before.options, &now.options),
        (&before.settings, &now.settings),
    ] {
        let names: BTreeSet<_> = before.keys().chain(now.keys()).collect();
        for name in names {
            let value = |map: &std::collections::BTreeMap<String, String>| {
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

/// What makes two rows the same. The algorithm is an outcome, not a part of the question.
fn key(entry: &Entry) -> (usize, &str, &str, i64, &str) {
    (
        entry.size,
        &entry.dtype,
        &entry.redop,
        entry.root,
        &entry.codec,
    )
}

#[cfg(test)]
mod tests {
    use super::super::report::tests::{entry, results};
    use super::*;

    #[test]
    fn rows_are_matched_and_divided() {
        let old = results(vec![entry(1000, "raw"), entry(2000, "raw")]);
        let mut new = results(vec![entry(2000, "raw"), entry(4000, "raw")]);
        new.results[0].out_of_place.time_us *= 0.5;
        let said = |new: &Results| {
            let mut out = Vec::new();
            write(&old, new, &mut out).unwrap();
            String::from_utf8(out).unwrap()
        };
        let text = said(&new);
        assert!(text.contains("0.500") && text.contains("1.000"), "{text}");
        assert!(text.contains("mean of 1 rows: 0.500"), "{text}");
        assert!(!text.contains("other than then"), "{text}");
        new.config.machine.cores += 1;
        let slots = ("CINCH_SLOTS".to_string(), "8".to_string());
        new.config.settings.extend([slots]);
        let text = said(&new);
        assert!(text.contains("then: CINCH_SLOTS 8, was unset"), "{text}");
        assert!(text.contains("then: cores "), "{text}");
    }

    #[test]
    fn other_files_are_refused() {
        let read = |path: &Path, ranks| read(path, Collective::AllReduce, ranks);
        let error = read(Path::new("/proc/version"), 4).unwrap_err();
        assert!(error.contains("--json"), "{error}");
        assert!(read(Path::new("/no/such/file"), 4).is_err());
        let path = std::env::temp_dir().join(format!("cinch-compare-{}", std::process::id()));
        std::fs::write(&path, serde_json::to_string(&results(Vec::new())).unwrap()).unwrap();
        let (same, other) = (read(&path, 4), read(&path, 2));
        std::fs::remove_file(&path).unwrap();
        assert!(same.is_ok());
        assert!(other.unwrap_err().contains("over 4 ranks"));
    }
}
