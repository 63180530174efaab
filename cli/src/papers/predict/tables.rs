//! Prints the tables of Dettmers, "8-Bit Approximations for Parallelism in Deep Learning". Each
//! figure appears as published, as the paper's formulas give it, and as formulas with corrected
//! inputs give it.

use super::output::to_csv;
use crate::papers::model::published::{Figure, NOTES, figures};
use serde_json::json;
use std::io::{Result, Write};

/// Prints all figures and the notes.
///
/// # Errors
/// Returns the writer's errors.
pub fn write(out: &mut dyn Write) -> Result<()> {
    writeln!(
        out,
        "# speed-up model of \"8-Bit Approximations for Parallelism in Deep Learning\", section 5\n\
         # computed: from the figure to its left as printed; corrected: from the start, 8-bit sizes \
         a quarter, latencies as printed"
    )?;
    let mut table = 0;
    for figure in figures() {
        if figure.table != table {
            table = figure.table;
            writeln!(
                out,
                "\nTable {table}\n{:<24} {:<18} {:>8} {:>10} {:>10}",
                "row", "column", "printed", "computed", "corrected"
            )?;
        }
        writeln!(
            out,
            "{:<24} {:<18} {:>8} {:>10.3} {:>10.3}  {}",
            figure.row,
            figure.column,
            figure.printed,
            figure.computed,
            figure.corrected,
            remark(&figure)
        )?;
    }
    writeln!(out)?;
    for note in NOTES {
        writeln!(out, "# {note}")?;
    }
    Ok(())
}

fn remark(figure: &Figure) -> String {
    match figure.exception {
        Some(why) => format!("does not follow: {why}"),
        None if figure.rounds() => String::new(),
        None => "cut off or rounded up".into(),
    }
}

/// Formats the figures as a JSON array.
pub fn json() -> String {
    format!("{:#}\n", json!(figures()))
}

/// Formats the figures as CSV.
pub fn csv() -> String {
    to_csv(figures().iter())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_figure_is_in_every_output_format() {
        let count = figures().len();
        // There are 4 figures in Table 1, 8 in Table 3, 36 in Table 6 and 24 in Table 7.
        assert_eq!(count, 72);
        let mut out = Vec::new();
        write(&mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert_eq!(text.matches("does not follow").count(), 8);
        let peak = "sub-batch 1024           nervana, 8 bit         48.6     48.607     42.263";
        assert!(text.contains(peak), "{text}");
        assert_eq!(csv().lines().count(), count + 1);
        let rows: Vec<serde_json::Value> = serde_json::from_str(&json()).unwrap();
        assert_eq!(rows.len(), count);
        assert_eq!(rows[0]["printed"], 3.53);
    }
}
