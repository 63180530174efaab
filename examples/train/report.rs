//! Results of the runs as a table, as CSV and as a drawing.

use super::parallel::{Model, Outcome};
use cinch::CodecSpec;
use std::fmt::Write;

/// Results of all runs with one model, codec and choice of feedback.
pub struct Row {
    pub model: Model,
    pub codec: CodecSpec,
    pub feedback: bool,
    runs: usize,
    /// Mean share of wrongly labelled test images, and half the width of its 95 % confidence
    /// interval.
    error: (f64, f64),
    loss: f64,
    steps_per_second: f64,
    /// Payload bytes that a rank sends per step.
    bytes_per_step: f64,
}

pub const HEADING: &str = "\
model  codec                    feedback  test error %   95 % interval   last loss   \
steps/s  bytes/step    ratio";

impl Row {
    pub fn new(model: Model, codec: CodecSpec, feedback: bool, outcomes: &[Outcome]) -> Row {
        let mean = |of: &dyn Fn(&Outcome) -> f64| {
            outcomes.iter().map(of).sum::<f64>() / outcomes.len() as f64
        };
        let errors: Vec<f64> = outcomes.iter().map(|outcome| outcome.test_error).collect();
        Row {
            model,
            codec,
            feedback,
            runs: outcomes.len(),
            error: interval(&errors),
            loss: mean(&|outcome| outcome.loss),
            steps_per_second: mean(&|outcome| outcome.steps as f64 / outcome.seconds),
            bytes_per_step: mean(&|outcome| outcome.wire_bytes / outcome.steps as f64),
        }
    }

    fn low(&self) -> f64 {
        self.error.0 - self.error.1
    }

    fn high(&self) -> f64 {
        self.error.0 + self.error.1
    }

    /// Formats the row; the last column is the bytes of `exact`, or of this row, for each byte of this row.
    pub fn line(&self, exact: Option<&Row>) -> String {
        let exact = exact.unwrap_or(self);
        format!(
            "{:<6} {:<24} {:<8} {:>13.2} {:>7.2} to {:>5.2} {:>11.4} {:>9.1} {:>11.0} {:>8.3}",
            self.model.name(),
            self.codec.to_string(),
            if self.feedback { "yes" } else { "no" },
            100.0 * self.error.0,
            100.0 * self.low(),
            100.0 * self.high(),
            self.loss,
            self.steps_per_second,
            self.bytes_per_step,
            exact.bytes_per_step / self.bytes_per_step,
        )
    }
}

/// Returns the mean of `values` and half the width of its 95 % confidence interval, by Student's
/// distribution.
fn interval(values: &[f64]) -> (f64, f64) {
    let n = values.len() as f64;
    let mean = values.iter().sum::<f64>() / n;
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    let deviation = (squares / (n - 1.0)).sqrt();
    (mean, student(values.len() - 1) * deviation / n.sqrt())
}

/// Returns the 97.5 % quantile of Student's distribution, accurate to 0.1 % above ten degrees of
/// freedom.
fn student(freedom: usize) -> f64 {
    const FEW: [f64; 10] = [
        12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    ];
    match FEW.get(freedom.wrapping_sub(1)) {
        Some(&quantile) => quantile,
        None => {
            // Computes the first terms of the quantile's expansion around the normal quantile.
            let (z, n) = (1.959_964f64, freedom as f64);
            z + (z.powi(3) + z) / (4.0 * n)
                + (5.0 * z.powi(5) + 16.0 * z.powi(3) + 3.0 * z) / (96.0 * n * n)
        }
    }
}

pub fn csv(rows: &[Row]) -> String {
    let mut text = String::from(
        "model,codec,feedback,runs,test_error,low,high,last_loss,steps_per_second,bytes_per_step\n",
    );
    for row in rows {
        let _ = writeln!(
            text,
            "{},{},{},{},{:.6},{:.6},{:.6},{:.6},{:.1},{:.0}",
            row.model.name(),
            row.codec,
            row.feedback,
            row.runs,
            row.error.0,
            row.low(),
            row.high(),
            row.loss,
            row.steps_per_second,
            row.bytes_per_step
        );
    }
    text
}

const WIDTH: f64 = 860.0;
const LEFT: f64 = 260.0;
const RIGHT: f64 = 30.0;
const LINE: f64 = 22.0;
const TOP: f64 = 70.0;

/// Draws the test error of each codec with its interval. The shaded band is the interval of raw.
pub fn svg(rows: &[Row]) -> String {
    let models: Vec<Model> = Model::ALL
        .into_iter()
        .filter(|&model| rows.iter().any(|row| row.model == model))
        .collect();
    let height = TOP + (rows.len() + 2 * models.len()) as f64 * LINE + 40.0;
    // The axis ends at five times the best result. A codec under which the network learns nothing thus does
    // not compress the other rows.
    let exact = rows
        .iter()
        .map(|row| row.high())
        .fold(f64::INFINITY, f64::min);
    let most = rows.iter().map(|row| row.high()).fold(0.0, f64::max);
    let most = most.min(5.0 * exact).max(0.01);
    let at = |error: f64| LEFT + (error / most).clamp(0.0, 1.0) * (WIDTH - LEFT - RIGHT);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
         width=\"{WIDTH}\" height=\"{height}\" font-family=\"Helvetica, Arial, sans-serif\">\n\
         <title>Test error by codec</title>\n\
         <rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#ffffff\"/>\n"
    );
    text(&mut out, (20.0, 28.0), "start", 18, "Test error by codec");
    let subtitle = "handwritten digits, 4 ranks; mean and 95 % interval over seeds; band: raw; \
                    arrow: beyond the axis";
    text(&mut out, (20.0, 48.0), "start", 12, subtitle);
    let mut y = TOP;
    for model in models {
        text(&mut out, (20.0, y + LINE / 2.0), "start", 13, model.name());
        y += LINE;
        let of_model = || rows.iter().filter(|row| row.model == model);
        if let Some(raw) = of_model().next() {
            let _ = writeln!(
                out,
                "<rect x=\"{:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{:.1}\" \
                 fill=\"#dce6f0\"/>",
                at(raw.low()),
                y - LINE / 2.0,
                at(raw.high()) - at(raw.low()),
                of_model().count() as f64 * LINE
            );
        }
        for row in of_model() {
            let suffix = if row.feedback { " + feedback" } else { "" };
            let name = format!("{}{suffix}", row.codec);
            text(&mut out, (LEFT - 12.0, y + 4.0), "end", 12, &name);
            let colour = if row.feedback { "#ee6677" } else { "#4477aa" };
            let _ = writeln!(
                out,
                "<line x1=\"{:.1}\" y1=\"{y}\" x2=\"{:.1}\" y2=\"{y}\" stroke=\"{colour}\" \
                 stroke-width=\"2\"/>",
                at(row.low()),
                at(row.high())
            );
            let place = at(row.error.0);
            let _ = if row.error.0 > most {
                writeln!(
                    out,
                    "<path d=\"M{place:.1} {y} l-10 -5 v10 z\" fill=\"{colour}\"/>"
                )
            } else {
                writeln!(
                    out,
                    "<circle cx=\"{place:.1}\" cy=\"{y}\" r=\"4\" fill=\"{colour}\"/>"
                )
            };
            y += LINE;
        }
        y += LINE;
    }
    for tick in 0..=5 {
        let error = most * f64::from(tick) / 5.0;
        let label = format!("{:.1} %", 100.0 * error);
        text(&mut out, (at(error), y), "middle", 11, &label);
    }
    out.push_str("</svg>\n");
    out
}

fn text(out: &mut String, at: (f64, f64), anchor: &str, size: u32, text: &str) {
    let _ = writeln!(
        out,
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"{anchor}\" font-size=\"{size}\" \
         fill=\"#222222\">{text}</text>",
        at.0, at.1
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interval_equals_students_distribution() {
        let (mean, half) = interval(&[1.0, 2.0, 3.0]);
        assert!((mean - 2.0).abs() < 1e-12);
        assert!((half - 4.303 / 3f64.sqrt()).abs() < 1e-9, "{half}");
        for (freedom, quantile) in [(11, 2.201), (20, 2.086), (30, 2.042), (100, 1.984)] {
            assert!(
                (student(freedom) / quantile - 1.0).abs() < 1e-3,
                "{freedom}"
            );
        }
    }

    #[test]
    fn table_csv_and_drawing_contain_every_row() {
        let outcome = |test_error| Outcome {
            test_error,
            loss: 0.1,
            steps: 10,
            seconds: 0.5,
            wire_bytes: 1000.0,
        };
        let row = |feedback, error: f64| {
            let outcomes = [outcome(error), outcome(error + 0.01)];
            Row::new(Model::Mlp, CodecSpec::RAW, feedback, &outcomes)
        };
        let rows = [row(false, 0.02), row(true, 0.9)];
        assert!(
            rows[0].line(None).contains("20.0         100"),
            "{}",
            rows[0].line(None)
        );
        assert_eq!(csv(&rows).lines().count(), 3);
        let drawing = svg(&rows);
        assert_eq!(
            (
                drawing.matches("<circle").count(),
                drawing.matches("<path").count()
            ),
            (1, 1)
        );
    }
}
