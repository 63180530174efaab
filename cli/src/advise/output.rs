//! Prints advice as text and JSON.

use super::{CommSummary, RunAdvice};
use std::io::{self, Write};

/// The page with the error bounds of codecs.
const NUMERICS: &str = include_str!("../../../docs/numerics.md");

/// Returns the largest error of one encode of a codec, from the table of docs/numerics.md.
pub fn error_bound(codec: &str) -> String {
    let quoted = format!("`{codec}`");
    // `minmax1`, `2`, `4`, `8` and `trunc24`, `trunc16`, `trunc8` share rows.
    let family = codec.trim_end_matches(|letter: char| letter.is_ascii_digit());
    let section = NUMERICS.split("## One encode").nth(1).unwrap_or_default();
    let section = section.split("\n## ").next().unwrap_or_default();
    let rows = section.lines().filter(|line| line.starts_with("| `"));
    let row = rows
        .clone()
        .find(|line| line.contains(&quoted))
        .or_else(|| {
            let begins = format!("| `{family}");
            rows.clone().find(|line| line.starts_with(&begins))
        });
    let cell = row.and_then(|row| row.trim_matches('|').split('|').nth(1));
    cell.map_or("see docs/numerics.md".into(), |cell| {
        cell.trim().to_string()
    })
}

/// Prints the advice as one JSON object.
///
/// # Errors
/// Returns the writer's errors.
pub fn write_json(advice: &RunAdvice, out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "{}", serde_json::to_string_pretty(advice)?)
}

/// Prints what was read, and the codecs that save time.
///
/// # Errors
/// Returns the writer's errors.
pub fn write_text(advice: &RunAdvice, out: &mut dyn Write) -> io::Result<()> {
    for comm in &advice.communicators {
        write_communicator(comm, out)?;
    }
    if advice.codecs.is_empty() {
        return writeln!(
            out,
            "\nNo rule would shorten this run: with each of the codecs, coding takes as long as sending less saves, or \
             the calls are none that rules apply to."
        );
    }
    writeln!(
        out,
        "\nA rank was {:.3} s in timed calls. By the cost model, with costs of cores measured here and a link fitted to \
         the run, if elements are f32:",
        advice.seconds
    )?;
    for codec in &advice.codecs {
        let bytes: f64 = codec.communicators.iter().map(|it| it.saves_bytes).sum();
        writeln!(
            out,
            "\n  {} would save {:.3} s, {:.0} % of the time, and send {:.3} GB less on each rank",
            codec.codec,
            codec.saves_seconds,
            codec.saves_share * 100.0,
            bytes * 1e-9
        )?;
        writeln!(out, "    CINCH_CODEC_RULES=\"{}\"", codec.rules)?;
        writeln!(
            out,
            "    largest error of one encode: {}",
            codec.error_bound
        )?;
    }
    writeln!(
        out,
        "\nA is the largest magnitude of a block. Results pass several encodes, see docs/numerics.md; \
         CINCH_CODEC_SAMPLE=1000 logs the errors of a run. Rules apply to sums and averages of floats only."
    )
}

fn write_communicator(comm: &CommSummary, out: &mut dyn Write) -> io::Result<()> {
    let name = match comm.communicator.as_str() {
        "" => "communicators without a name".to_string(),
        name => format!("communicator {name}"),
    };
    write!(
        out,
        "{name}, {} ranks on {} hosts: {:.3} s in calls",
        comm.ranks, comm.hosts, comm.seconds
    )?;
    if comm.wait_seconds > 0.0 {
        write!(out, ", {:.3} s of waits for other ranks", comm.wait_seconds)?;
    }
    if let Some(link) = comm.link_gb_per_s {
        write!(out, ", link of {link:.3} GB/s")?;
    }
    if comm.untimed_bytes > 0.0 {
        write!(
            out,
            ", {:.3} GB sent without times",
            comm.untimed_bytes * 1e-9
        )?;
    }
    if comm.coded_calls > 0.0 {
        write!(out, ", {:.0} calls have a codec already", comm.coded_calls)?;
    }
    writeln!(out)?;
    match &comm.note {
        Some(note) => writeln!(out, "  {note}"),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cinch::types::CodecKind;

    #[test]
    fn every_lossy_codec_has_an_error_bound() {
        for kind in CodecKind::ALL.into_iter().filter(|kind| !kind.is_raw()) {
            let bound = error_bound(kind.name());
            assert!(!bound.contains("docs/"), "{} has no row", kind.name());
        }
        assert!(error_bound("linear8").contains("A / 254"));
        assert!(error_bound("minmax4").contains("half of (max - min)"));
        assert!(error_bound("fp8_e5m2").contains("x / 8"));
        assert!(error_bound("trunc16").contains("x / 128"));
    }

    #[test]
    fn run_without_gain_has_a_sentence() {
        let advice = RunAdvice {
            communicators: Vec::new(),
            seconds: 1.0,
            codecs: Vec::new(),
        };
        let mut out = Vec::new();
        write_text(&advice, &mut out).unwrap();
        assert!(
            String::from_utf8(out)
                .unwrap()
                .contains("No rule would shorten this run")
        );
    }
}
