//! Ratios of this run to an earlier one.

use super::report::{Entry, Results};
use std::io::{self, Write};
use std::path::Path;

/// Reads an earlier run's JSON file.
///
/// # Errors
/// A sentence with the file's name.
pub fn read(path: &Path) -> Result<Results, String> {
    let file = std::fs::File::open(path).map_err(|error| format!("{}: {error}", path.display()))?;
    serde_json::from_reader(io::BufReader::new(file)).map_err(|error| {
        format!(
            "{}: not a file of `cinch bench --json`: {error}",
            path.display()
        )
    })
}

/// Prints, for each row that both runs have, new time over old time: below 1 is faster.
///
/// # Errors
/// Those of writing.
pub fn write(old: &[Entry], new: &[Entry], out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "#\n# Time over the earlier run's, below 1 is faster:")?;
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
    use super::super::report::tests::entry;
    use super::*;

    #[test]
    fn rows_are_matched_and_divided() {
        let old = [entry(1000, "raw"), entry(2000, "raw")];
        let mut new = [entry(2000, "raw"), entry(4000, "raw")];
        new[0].out_of_place.time_us *= 0.5;
        let mut out = Vec::new();
        write(&old, &new, &mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert!(text.contains("0.500") && text.contains("1.000"), "{text}");
        assert!(text.contains("mean of 1 rows: 0.500"), "{text}");
    }

    #[test]
    fn other_files_are_refused() {
        let error = read(Path::new("/proc/version")).unwrap_err();
        assert!(error.contains("--json"), "{error}");
        assert!(read(Path::new("/no/such/file")).is_err());
    }
}
