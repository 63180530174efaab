//! Rows for people.

use crate::bench::record::Record;
use crate::bench::table::{error, rate, time, write_verdicts};
use std::io::{self, Write};

/// Legend and column heads. Lines that are not rows begin with `#`.
///
/// # Errors
/// Those of writing.
pub fn write_head(out: &mut dyn Write) -> io::Result<()> {
    writeln!(
        out,
        "#\n\
         # time: median over repetitions of the slowest rank, between events, per call; out of place.\n\
         # algbw: uncompressed bytes per time. busbw: what the links see, wire bytes counted.\n\
         # eff.bw: the bus bandwidth that an exact run would need for this time. GB/s = 1e9 bytes/s.\n\
         # wire: payload bytes sent by the busiest rank. max_err: largest difference from fp64;\n\
         # rms_err: RMS difference over RMS of the result. nccl: its time, raw; x: that over ours.\n\
         #"
    )?;
    writeln!(
        out,
        "#{:>11} {:>11} {:>7} {:>9} {:<19} {:>9} {:>8} {:>8} {:>8} {:>11} {:>8} {:>8} {:>6} {:>4} {:>6} {:>7} {:>7} {:>9} {:>6}",
        "size",
        "count",
        "type",
        "redop",
        "codec",
        "time(us)",
        "algbw",
        "busbw",
        "eff.bw",
        "wire",
        "max_err",
        "rms_err",
        "#wrong",
        "same",
        "blocks",
        "proto",
        "algo",
        "nccl(us)",
        "x"
    )
}

/// One row.
///
/// # Errors
/// Those of writing.
pub fn write_row(record: &Record, out: &mut dyn Write) -> io::Result<()> {
    let entry = &record.entry;
    let figures = &entry.out_of_place;
    let versus = |show: fn(&crate::bench::record::Versus) -> String| {
        record.vs.as_ref().map_or("-".into(), show)
    };
    writeln!(
        out,
        "{:>12} {:>11} {:>7} {:>9} {:<19} {:>9} {:>8} {:>8} {:>8} {:>11} {:>8} {:>8} {:>6} {:>4} {:>6} {:>7} {:>7} {:>9} {:>6}",
        entry.size,
        entry.count,
        entry.dtype,
        entry.redop,
        entry.codec,
        time(figures.time_us),
        rate(figures.alg_bw),
        rate(figures.bus_bw),
        rate(figures.eff_bus_bw),
        entry.wire_bytes,
        error(figures.max_abs_err),
        error(figures.rms_rel_err),
        figures
            .nwrong
            .map_or("N/A".into(), |wrong| wrong.to_string()),
        match figures.identical {
            Some(true) => "yes",
            Some(false) => "NO",
            None => "-",
        },
        entry.channels,
        record.protocol,
        entry.algo,
        versus(|vs| time(vs.time_us)),
        versus(|vs| format!("{:.2}", vs.ratio)),
    )
}

/// The verdict.
///
/// # Errors
/// Those of writing.
pub fn write_foot(records: &[Record], out: &mut dyn Write) -> io::Result<()> {
    let figures = records.iter().map(|record| &record.entry.out_of_place);
    write_verdicts(figures, false, out)?;
    let ratios: Vec<f64> = records
        .iter()
        .filter_map(|record| record.vs.as_ref().map(|vs| vs.ratio))
        .collect();
    if let Some(least) = ratios.iter().copied().reduce(f64::min) {
        let logs: f64 = ratios.iter().map(|ratio| ratio.ln()).sum();
        writeln!(
            out,
            "# Against NCCL              : least {least:.2}x, geometric mean {:.2}x of {} rows",
            (logs / ratios.len() as f64).exp(),
            ratios.len()
        )?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::record::{RunRecord, Versus};
    use crate::bench::report::tests::entry;
    use crate::machine::Machine;

    fn record(codec: &str, ratio: Option<f64>) -> Record {
        Record {
            collective: "all_reduce".into(),
            ranks: 8,
            ranks_per_gpu: 1,
            hosts: 1,
            processes: false,
            mode: "graph".into(),
            calls: 7,
            protocol: "ll128".into(),
            entry: entry(1 << 30, codec),
            vs: ratio.map(|ratio| Versus {
                nccl: "2.28.9".into(),
                time_us: 5231.0,
                min_us: 5200.0,
                p99_us: 5300.0,
                ratio,
            }),
            symmetric: None,
            run: RunRecord {
                gpu: "H200".into(),
                gpus: 8,
                driver: "580".into(),
                cuda: "13.0".into(),
                cinch: "0".into(),
                kernels: "built".into(),
                date: "2026-11-20".into(),
                command: "cinch bench".into(),
                settings: Default::default(),
                machine: Machine::detect(),
            },
        }
    }

    fn text(write: impl Fn(&mut Vec<u8>) -> io::Result<()>) -> String {
        let mut out = Vec::new();
        write(&mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn rows_align_with_their_heads() {
        let head = text(|out| write_head(out));
        let heads = head.lines().last().unwrap();
        for ratio in [None, Some(2.25)] {
            let row = text(|out| write_row(&record("dynamic8:block=4096", ratio), out));
            let row = row.trim_end();
            assert_eq!(heads.len(), row.len(), "\n{heads}\n{row}");
            assert_eq!(
                row.split_whitespace().count(),
                heads.trim_start_matches('#').split_whitespace().count(),
                "{row}"
            );
        }
        assert!(head.lines().all(|line| line.starts_with('#')));
    }

    #[test]
    fn the_foot_has_verdict_and_ratios() {
        let good =
            text(|out| write_foot(&[record("raw", Some(2.0)), record("raw", Some(0.5))], out));
        assert!(
            good.contains("least 0.50x, geometric mean 1.00x of 2 rows"),
            "{good}"
        );
        assert!(good.contains("0 OK"), "{good}");
        let mut bad = record("raw", None);
        bad.entry.out_of_place.nwrong = Some(3);
        let bad = text(|out| write_foot(std::slice::from_ref(&bad), out));
        assert!(bad.contains("3 FAILED") && !bad.contains("NCCL"), "{bad}");
    }

    #[test]
    fn lines_of_json_are_whole() {
        let line = serde_json::to_string(&record("raw", Some(1.5))).unwrap();
        let value: serde_json::Value = serde_json::from_str(&line).unwrap();
        assert_eq!(value["size"], 1 << 30);
        assert_eq!(value["vs"]["ratio"], 1.5);
        assert_eq!(value["protocol"], "ll128");
        assert!(value["out_of_place"]["time_us"].is_number() && !line.contains('\n'));
        assert_eq!(value["run"]["date"], "2026-11-20");
    }
}
