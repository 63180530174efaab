//! `--compare OLD NEW`: compares two saved runs row by row, and measures nothing.

use super::compare::differences;
use super::output;
use super::record::{self, Figures, Record};
use crate::{ExitResult, FAILURE, USAGE, finish};
use serde::Serialize;
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::Path;

/// Number of iterations from which the shortest one is compared with the other run's median. Without a change, all
/// of n iterations exceed that median once in 2^n runs.
const MANY_ITERATIONS: usize = 10;

/// Number of iterations below which a row shows no spread.
const FEW_ITERATIONS: usize = 3;

/// How two measurements of a call differ, judged by the spread of their iterations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum NoiseVerdict {
    /// The new run is faster, beyond its noise.
    Faster,
    /// The new run is slower, beyond its noise.
    Slower,
    /// The difference is within the spread of the iterations.
    WithinNoise,
    /// A row has too few iterations to show a spread.
    Unknown,
}

impl NoiseVerdict {
    fn of(old: &Figures, new: &Figures) -> NoiseVerdict {
        if old.iterations.min(new.iterations) < FEW_ITERATIONS {
            return NoiseVerdict::Unknown;
        }
        match (exceeds(new, old), exceeds(old, new)) {
            (true, _) => NoiseVerdict::Slower,
            (_, true) => NoiseVerdict::Faster,
            _ => NoiseVerdict::WithinNoise,
        }
    }

    fn text(self) -> &'static str {
        match self {
            NoiseVerdict::Faster => "faster",
            NoiseVerdict::Slower => "SLOWER",
            NoiseVerdict::WithinNoise => "~",
            NoiseVerdict::Unknown => "?",
        }
    }
}

/// Returns whether the iterations of `slow` are longer than those of `fast` beyond noise: all of them exceed the
/// median of `fast`, or with few iterations, all of its iterations.
fn exceeds(slow: &Figures, fast: &Figures) -> bool {
    let bound = match slow.iterations < MANY_ITERATIONS {
        true => fast.p99_us,
        false => fast.time_us,
    };
    slow.min_us > bound
}

/// Properties by which rows of two runs are paired; the algorithm comes in addition.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
struct RowKey {
    collective: String,
    ranks: usize,
    ranks_per_gpu: usize,
    hosts: usize,
    /// Model of the GPU, `host memory` or `emulated links`.
    device: String,
    mode: String,
    #[serde(rename = "type")]
    dtype: String,
    redop: String,
    root: i64,
    codec: String,
    size: usize,
}

impl RowKey {
    fn of(record: &Record) -> RowKey {
        RowKey {
            collective: record.collective.clone(),
            ranks: record.ranks,
            ranks_per_gpu: record.ranks_per_gpu,
            hosts: record.hosts,
            device: match (record.is_emulated(), record.run.gpu.as_str()) {
                (true, _) => "emulated links".into(),
                (false, "") => "host memory".into(),
                (false, gpu) => gpu.into(),
            },
            mode: record.mode.clone(),
            dtype: record.dtype.clone(),
            redop: record.redop.clone(),
            root: record.root,
            codec: record.codec.clone(),
            size: record.size,
        }
    }
}

/// Returns algorithm and kernel of a row, as one word.
fn algorithm(record: &Record) -> String {
    match record.protocol.as_str() {
        "-" => record.algo.clone(),
        protocol => format!("{}/{protocol}", record.algo),
    }
}

/// Rows of two runs: those with a partner, and those without.
struct Pairing<'a> {
    pairs: Vec<(&'a Record, &'a Record)>,
    only_old: Vec<&'a Record>,
    only_new: Vec<&'a Record>,
}

/// Pairs rows by key and algorithm, then the remaining rows by key alone: the planner may have chosen another
/// algorithm. Equal rows of one run are paired in their order.
fn pair<'a>(old: &'a [Record], new: &'a [Record]) -> Pairing<'a> {
    let mut partner: Vec<Option<usize>> = vec![None; new.len()];
    let mut taken = vec![false; old.len()];
    for by_algorithm in [true, false] {
        let name = |record: &Record| {
            let algorithm = by_algorithm.then(|| algorithm(record));
            (RowKey::of(record), algorithm)
        };
        let mut waiting: BTreeMap<_, Vec<usize>> = BTreeMap::new();
        for (at, record) in old.iter().enumerate().rev() {
            if !taken[at] {
                waiting.entry(name(record)).or_default().push(at);
            }
        }
        for (at, record) in new.iter().enumerate() {
            if partner[at].is_some() {
                continue;
            }
            if let Some(found) = waiting.get_mut(&name(record)).and_then(Vec::pop) {
                partner[at] = Some(found);
                taken[found] = true;
            }
        }
    }
    let pairs = new.iter().zip(&partner);
    Pairing {
        pairs: pairs
            .clone()
            .filter_map(|(new, at)| Some((&old[(*at)?], new)))
            .collect(),
        only_old: old
            .iter()
            .zip(&taken)
            .filter_map(|(old, taken)| (!taken).then_some(old))
            .collect(),
        only_new: pairs
            .filter_map(|(new, at)| at.is_none().then_some(new))
            .collect(),
    }
}

/// Placement of a paired row, as a JSON line.
#[derive(Serialize)]
struct ComparedRow<'a> {
    #[serde(flatten)]
    key: RowKey,
    placement: &'static str,
    old_algo: String,
    new_algo: String,
    /// New time over old time; below 1 the new run is faster.
    time_ratio: f64,
    /// New over old `eff_bus_bw`; null if the old one is 0.
    bandwidth_ratio: Option<f64>,
    verdict: NoiseVerdict,
    old: &'a Figures,
    new: &'a Figures,
}

impl<'a> ComparedRow<'a> {
    /// Returns the placements that both rows have.
    fn of(old: &'a Record, new: &'a Record) -> Vec<ComparedRow<'a>> {
        let in_place = old.in_place.as_ref().zip(new.in_place.as_ref());
        let placements = [
            Some(("out_of_place", (&old.out_of_place, &new.out_of_place))),
            in_place.map(|both| ("in_place", both)),
        ];
        let compared = placements.into_iter().flatten();
        compared
            .map(|(placement, (before, now))| ComparedRow {
                key: RowKey::of(new),
                placement,
                old_algo: algorithm(old),
                new_algo: algorithm(new),
                time_ratio: now.time_us / before.time_us,
                bandwidth_ratio: (before.eff_bus_bw > 0.0)
                    .then(|| now.eff_bus_bw / before.eff_bus_bw),
                verdict: NoiseVerdict::of(before, now),
                old: before,
                new: now,
            })
            .collect()
    }
}

/// A row without a partner, as a JSON line.
#[derive(Serialize)]
struct LoneRow {
    /// `old` or `new`.
    only_in: &'static str,
    #[serde(flatten)]
    key: RowKey,
    algo: String,
}

/// Runs `cinch bench --compare OLD NEW`. Writes one JSON line for each placement of each pair and for each row without
/// a partner to `json`, if it is given.
///
/// # Errors
/// Returns an exit code and an error message if a file cannot be read, has a line that is no row, or cannot be written.
pub fn main(old: &Path, new: &Path, json: Option<&Path>) -> ExitResult {
    let read = |path: &Path| {
        let records = record::read(path);
        records.map_err(|error| (USAGE, format!("--compare: {}", error.message())))
    };
    let (before, now) = (read(old)?, read(new)?);
    let pairing = pair(&before, &now);
    if let Some(path) = json {
        let text = json_lines(&pairing).map_err(|error| (FAILURE, error.to_string()))?;
        output::save(path, |out| out.write_all(text.as_bytes()))
            .map_err(|error| (FAILURE, error.to_string()))?;
    }
    finish(write(&pairing, (old, new), &mut io::stdout().lock()))
}

fn json_lines(pairing: &Pairing) -> serde_json::Result<String> {
    let mut lines = Vec::new();
    for (old, new) in &pairing.pairs {
        for row in ComparedRow::of(old, new) {
            lines.push(serde_json::to_string(&row)?);
        }
    }
    let lone = [("old", &pairing.only_old), ("new", &pairing.only_new)];
    for (only_in, records) in lone {
        for record in records {
            lines.push(serde_json::to_string(&LoneRow {
                only_in,
                key: RowKey::of(record),
                algo: algorithm(record),
            })?);
        }
    }
    Ok(lines.iter().map(|line| format!("{line}\n")).collect())
}

/// Prints what differs between the runs, the pairs in groups, rows without partners, and totals.
fn write(pairing: &Pairing, (old, new): (&Path, &Path), out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "# old: {}\n# new: {}", old.display(), new.display())?;
    if let Some((old, new)) = pairing.pairs.first() {
        for line in differences(old, new) {
            writeln!(out, "# changed since then: {line}")?;
        }
    }
    let mut rows: Vec<ComparedRow> = pairing
        .pairs
        .iter()
        .flat_map(|(old, new)| ComparedRow::of(old, new))
        .collect();
    // The sort is stable, so placements of a row stay together.
    rows.sort_by(|a, b| a.key.cmp(&b.key));
    let mut group = None;
    for row in &rows {
        let heading = group_of(&row.key);
        if group.as_ref() != Some(&heading) {
            write_heading(&heading, out)?;
            group = Some(heading);
        }
        write_row(row, out)?;
    }
    write_lone("old", &pairing.only_old, out)?;
    write_lone("new", &pairing.only_new, out)?;
    write_totals(&rows, pairing, out)
}

/// Returns the heading above rows that differ in type, codec and size only.
fn group_of(key: &RowKey) -> String {
    let several = |number: usize, what: &str| match number {
        1 => String::new(),
        number => format!(", {number} {what}"),
    };
    let reduction = match key.redop.as_str() {
        "none" => String::new(),
        redop => format!(" {redop}"),
    };
    let root = match key.root {
        -1 => String::new(),
        root => format!(", root {root}"),
    };
    format!(
        "{}{reduction} over {} ranks{}{}, {}, {}{root}",
        key.collective,
        key.ranks,
        several(key.ranks_per_gpu, "on each GPU"),
        several(key.hosts, "hosts"),
        key.device,
        key.mode
    )
}

fn write_heading(group: &str, out: &mut dyn Write) -> io::Result<()> {
    writeln!(
        out,
        "\n# {group}\n{:>12} {:>5} {:<19} {:<14} {:<3} {:>11} {:>11} {:>7} {:>9} {:>9} {:>9} {:>9}  change",
        "size",
        "type",
        "codec",
        "algo",
        "in",
        "old us",
        "new us",
        "ratio",
        "old GB/s",
        "new GB/s",
        "old error",
        "new error"
    )
}

fn write_row(row: &ComparedRow, out: &mut dyn Write) -> io::Result<()> {
    let algo = match row.old_algo == row.new_algo {
        true => row.new_algo.clone(),
        false => format!("{} was {}", row.new_algo, row.old_algo),
    };
    let placement = if row.placement == "in_place" {
        "in"
    } else {
        "out"
    };
    writeln!(
        out,
        "{:>12} {:>5} {:<19} {algo:<14} {placement:<3} {:>11.2} {:>11.2} {:>7.3} {:>9.3} {:>9.3} {:>9} {:>9}  {}",
        row.key.size,
        row.key.dtype,
        row.key.codec,
        row.old.time_us,
        row.new.time_us,
        row.time_ratio,
        row.old.eff_bus_bw,
        row.new.eff_bus_bw,
        error_of(row.old),
        error_of(row.new),
        row.verdict.text()
    )
}

/// Returns the RMS error relative to the result, or the number of wrong elements if there are any.
fn error_of(figures: &Figures) -> String {
    match (figures.nwrong, figures.rms_rel_err) {
        (Some(1..), _) => format!("{} bad", figures.nwrong.unwrap_or(0)),
        (_, Some(error)) => format!("{error:.2e}"),
        _ => "-".into(),
    }
}

fn write_lone(side: &str, records: &[&Record], out: &mut dyn Write) -> io::Result<()> {
    if records.is_empty() {
        return Ok(());
    }
    writeln!(
        out,
        "\n# {} rows of the {side} run have no partner:",
        records.len()
    )?;
    for record in records {
        let key = RowKey::of(record);
        writeln!(
            out,
            "#{:>12} {:>5} {:<19} {:<14} {}",
            key.size,
            key.dtype,
            key.codec,
            algorithm(record),
            group_of(&key)
        )?;
    }
    Ok(())
}

fn write_totals(rows: &[ComparedRow], pairing: &Pairing, out: &mut dyn Write) -> io::Result<()> {
    if rows.is_empty() {
        return writeln!(out, "\n# the runs have no row in common");
    }
    let count = |verdict| rows.iter().filter(|row| row.verdict == verdict).count();
    let logs = rows.iter().map(|row| row.time_ratio.ln());
    writeln!(
        out,
        "\n# {} pairs, geometric mean of time over the old run's: {:.3}; {} slower, {} faster, {} within noise (~), \
         {} with too few iterations (?)",
        pairing.pairs.len(),
        (logs.sum::<f64>() / rows.len() as f64).exp(),
        count(NoiseVerdict::Slower),
        count(NoiseVerdict::Faster),
        count(NoiseVerdict::WithinNoise),
        count(NoiseVerdict::Unknown)
    )
}

#[cfg(test)]
mod tests {
    use super::super::record::tests::record;
    use super::*;

    /// Returns a row whose iterations last from `shortest` over `median` to `longest` microseconds.
    fn timed(size: usize, [shortest, median, longest]: [f64; 3], iterations: usize) -> Record {
        let mut record = record(size, "raw");
        let figures = &mut record.out_of_place;
        (figures.min_us, figures.time_us, figures.p99_us) = (shortest, median, longest);
        figures.iterations = iterations;
        record.in_place = None;
        record
    }

    fn verdict(old: [f64; 3], new: [f64; 3], iterations: usize) -> NoiseVerdict {
        let (old, new) = (timed(8, old, iterations), timed(8, new, iterations));
        NoiseVerdict::of(&old.out_of_place, &new.out_of_place)
    }

    #[test]
    fn change_within_the_spread_of_iterations_is_noise() {
        let old = [9.0, 10.0, 14.0];
        assert_eq!(
            verdict(old, [9.9, 11.0, 15.0], 20),
            NoiseVerdict::WithinNoise
        );
        assert_eq!(verdict(old, [10.1, 11.0, 15.0], 20), NoiseVerdict::Slower);
        assert_eq!(verdict([10.1, 11.0, 15.0], old, 20), NoiseVerdict::Faster);
        // Few iterations count only if those of the runs do not overlap.
        assert_eq!(
            verdict(old, [10.1, 11.0, 15.0], 5),
            NoiseVerdict::WithinNoise
        );
        assert_eq!(verdict(old, [14.1, 15.0, 16.0], 5), NoiseVerdict::Slower);
        assert_eq!(verdict(old, [14.1, 15.0, 16.0], 2), NoiseVerdict::Unknown);
    }

    #[test]
    fn rows_pair_by_algorithm_first_and_devices_never_mix() {
        let with = |algo: &str, gpu: &str| {
            let mut record = timed(64, [9.0, 10.0, 11.0], 20);
            record.algo = algo.into();
            record.run.gpu = gpu.into();
            record
        };
        let old = [with("tree", ""), with("ring", ""), with("ring", "H100")];
        let new = [with("ring", ""), with("direct", ""), with("ring", "H200")];
        let pairing = pair(&old, &new);
        let pairs: Vec<_> = pairing
            .pairs
            .iter()
            .map(|(old, new)| (old.algo.as_str(), new.algo.as_str()))
            .collect();
        assert_eq!(pairs, [("ring", "ring"), ("tree", "direct")]);
        assert_eq!(pairing.only_old[0].run.gpu, "H100");
        assert_eq!(pairing.only_new[0].run.gpu, "H200");
        assert_eq!((pairing.only_old.len(), pairing.only_new.len()), (1, 1));
    }

    #[test]
    fn text_and_json_have_ratios_and_rows_without_partner() {
        let old = [
            timed(64, [9.0, 10.0, 11.0], 20),
            timed(128, [9.0, 10.0, 11.0], 20),
        ];
        let new = [
            timed(64, [19.0, 20.0, 21.0], 20),
            timed(256, [9.0, 10.0, 11.0], 20),
        ];
        let pairing = pair(&old, &new);
        let mut text = Vec::new();
        write(&pairing, (Path::new("a"), Path::new("b")), &mut text).unwrap();
        let text = String::from_utf8(text).unwrap();
        for part in [
            "# all_reduce sum over 4 ranks, host memory, eager\n",
            "2.000",
            "SLOWER",
            "# 1 rows of the old run have no partner:\n#         128",
            "# 1 rows of the new run have no partner:\n#         256",
            "mean of time over the old run's: 2.000; 1 slower, 0 faster",
        ] {
            assert!(text.contains(part), "{part:?} is not in\n{text}");
        }
        let lines = json_lines(&pairing).unwrap();
        let lines: Vec<serde_json::Value> = lines
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        assert_eq!(lines.len(), 3);
        assert_eq!(lines[0]["time_ratio"], 2.0);
        assert_eq!(lines[0]["verdict"], "slower");
        assert_eq!(lines[0]["old"]["p99_us"], 11.0);
        assert_eq!(
            (&lines[1]["only_in"], &lines[1]["size"]),
            (&"old".into(), &128.into())
        );
        assert_eq!(
            (&lines[2]["only_in"], &lines[2]["size"]),
            (&"new".into(), &256.into())
        );
    }

    #[test]
    fn baselines_compare_with_themselves_without_a_change() {
        let path =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../benches/baselines/gpu-h200x8.jsonl");
        let records = record::read(&path).unwrap();
        let pairing = pair(&records, &records);
        assert_eq!(pairing.pairs.len(), records.len());
        assert!(pairing.only_old.is_empty() && pairing.only_new.is_empty());
        for (old, new) in &pairing.pairs {
            for row in ComparedRow::of(old, new) {
                assert_eq!(row.time_ratio, 1.0);
                let changed = [NoiseVerdict::Slower, NoiseVerdict::Faster].contains(&row.verdict);
                assert!(!changed, "{:?}", row.key);
            }
        }
    }

    #[test]
    fn line_that_is_no_row_is_refused_by_its_number() {
        let path = std::env::temp_dir().join(format!("cinch-saved-{}", std::process::id()));
        let line = serde_json::to_string(&record(8, "raw")).unwrap();
        std::fs::write(&path, format!("{line}\n\n{{\"size\":8}}\n")).unwrap();
        let (code, sentence) = main(&path, &path, None).unwrap_err();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(code, USAGE);
        assert!(sentence.contains("line 3: not a row"), "{sentence}");
    }
}
