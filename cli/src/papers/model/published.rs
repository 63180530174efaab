//! Figures of Dettmers, "8-Bit Approximations for Parallelism in Deep Learning" ("the paper" in
//! this file). Each stands beside the result of the paper's formulas and a corrected value.
//!
//! Corrected values take 8-bit messages as a quarter of 32-bit ones; the paper takes an eighth.
//! They use the printed latencies, except for 8 bits at 12288: the paper prints 0.06 ms but uses
//! 0.6 ms. Sums are the sums of the printed terms.

use super::source::{
    FRAMEWORKS, Framework, Width, activation_sync, cluster, full, gradient_sync, penalty,
    penalty_summed, single, single_node, total,
};
use serde::{Serialize, Serializer};

/// A figure that the paper prints.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Figure {
    /// Number of the paper's table.
    pub table: u32,
    /// Name of the row.
    pub row: String,
    /// Name of the column.
    pub column: String,
    /// The figure as printed; a number in JSON and CSV.
    #[serde(serialize_with = "as_number")]
    pub printed: &'static str,
    /// Result of the paper's formulas. In Table 6 the formula starts from the printed figure to the
    /// left, in Table 7 from the printed total.
    pub computed: f64,
    /// Result of the corrected formulas, without using printed figures as intermediate results.
    pub corrected: f64,
    /// Reason why the printed figure does not follow from the formula, if it does not.
    pub exception: Option<&'static str>,
}

impl Figure {
    /// Returns the printed figure as a number.
    pub fn value(&self) -> f64 {
        number(self.printed)
    }

    /// Returns whether the computed figure rounds to the printed digits.
    pub fn rounds(&self) -> bool {
        let unit = unit(self.printed);
        ((self.computed / unit).round() - (self.value() / unit).round()).abs() < 0.5
    }
}

fn as_number<S: Serializer>(printed: &str, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(number(printed))
}

fn number(printed: &str) -> f64 {
    // Printed figures are constants of this file, and all of them are numbers.
    printed.parse().unwrap_or(f64::NAN)
}

/// Returns the value of one unit in the last printed digit.
fn unit(printed: &str) -> f64 {
    let decimals = printed
        .split_once('.')
        .map_or(0, |(_, digits)| digits.len());
    0.1f64.powi(decimals as i32)
}

/// Returns every figure of Tables 1, 3, 6 and 7, in this order.
pub fn figures() -> Vec<Figure> {
    let mut figures = table1();
    figures.extend(table3());
    figures.extend(CLUSTER.iter().flat_map(ClusterRow::table6));
    figures.extend(CLUSTER.iter().flat_map(ClusterRow::table7));
    figures
}

/// Remarks for readers of the printed tables.
pub const NOTES: [&str; 7] = [
    "Table 1: the 32-bit penalty of 6.81 ms is a sum of terms that give 7.01; the speed-up stays \
     3.53.",
    "Table 3: fully connected activations are counted whole, the convolutional one as a quarter; \
     the caption has quarter.",
    "Table 5: all 8-bit sizes are an eighth of the 32-bit ones and should be a quarter.",
    "Table 6: the row 2048 uses latencies of 0.3 and 0.04 ms where Table 5 prints 0.7 and 0.07; \
     the row 12288 uses 0.6 ms for 8 bits where Table 5 prints 0.06.",
    "Table 6: a full pass multiplies by 31 peers and ignores the 96 to 1 forward passes.",
    "Table 7: with quarter sizes and printed latencies the 8-bit peak is 42.3 at sub-batch 1024, \
     not 50.6 at 2048.",
    "The paper's 1 and 0.5 ns a number for compressing are 0.104 and 0.051 in its own log.",
];

fn table1() -> Vec<Figure> {
    let printed = [["3.53", "3.67"], ["3.71", "3.8"]];
    let mut figures = Vec::new();
    for (framework, printed) in FRAMEWORKS.into_iter().zip(printed) {
        for ((width, name), printed) in WIDTHS.into_iter().zip(printed) {
            figures.push(Figure {
                table: 1,
                row: framework.name.into(),
                column: format!("4 GPUs, {name}"),
                printed,
                computed: single_node(framework, penalty(width)),
                corrected: single_node(framework, penalty_summed(width)),
                exception: None,
            });
        }
    }
    figures
}

fn table3() -> Vec<Figure> {
    // The number of parameters is outputs * inputs * kernel height * kernel width.
    let gradients = [
        ("conv1", 64 * 3 * 121, 3.5, ".05"),
        ("conv2", 192 * 64 * 25, 5.0, ".45"),
        ("conv3", 384 * 192 * 9, 5.0, "1"),
        ("conv4", 256 * 384 * 9, 5.0, "1.3"),
        ("conv5", 256 * 256 * 9, 5.0, ".9"),
    ];
    let activations = [
        ("activations of conv5", 128 * 9216, 5.0, ".9"),
        ("activations of fc 4096", 3 << 19, 5.0, "1.1"),
        ("activations of fc 1000", 128 * 4000, 4.7, ".4"),
    ];
    let figure = |row: &str, printed, computed| Figure {
        table: 3,
        row: row.into(),
        column: "sync ms, 32 bit".into(),
        printed,
        computed,
        corrected: computed,
        exception: None,
    };
    let gradients = gradients.map(|(row, parameters, rate, printed)| {
        figure(row, printed, gradient_sync(f64::from(parameters), rate))
    });
    let activations = activations.map(|(row, bytes, rate, printed)| {
        figure(row, printed, activation_sync(f64::from(bytes), rate))
    });
    gradients.into_iter().chain(activations).collect()
}

const WIDTHS: [(Width, &str); 2] = [(Width::Bits32, "32 bit"), (Width::Bits8, "8 bit")];

/// The figures for one sub-batch size. Each pair holds the figure for 32 bits, then the one for 8
/// bits.
struct ClusterRow {
    sub_batch: u32,
    /// Milliseconds per message, as Table 5 prints them.
    latency: [f64; 2],
    single: [&'static str; 2],
    full: [&'static str; 2],
    total: [&'static str; 2],
    /// Speed-ups, with a pair for each framework.
    speedup: [[&'static str; 2]; 2],
    /// Reasons why a figure does not follow from its formula, for the columns single, full and
    /// total.
    exceptions: [[Option<&'static str>; 2]; 3],
}

const NONE: [Option<&str>; 2] = [None; 2];

const CLUSTER: [ClusterRow; 6] = [
    ClusterRow {
        sub_batch: 128,
        latency: [0.035, 0.007],
        single: ["2.1", ".35"],
        full: ["24.8", ".35"],
        total: ["650", "624"],
        speedup: [["13.4", "13.8"], ["20.7", "21.4"]],
        exceptions: [NONE, NONE, [Some("624 + 24.8 is 648.8"), None]],
    },
    ClusterRow {
        sub_batch: 256,
        latency: [0.07, 0.01],
        single: ["4.2", ".55"],
        full: ["89.9", ".55"],
        total: ["402", "312"],
        speedup: [["20", "24.4"], ["29.7", "35.2"]],
        exceptions: [[None, Some("the formula gives .563")], NONE, NONE],
    },
    ClusterRow {
        sub_batch: 512,
        latency: [0.1, 0.02],
        single: ["7.15", "1.13"],
        full: ["181", "1.13"],
        total: ["337", "157"],
        speedup: [["23", "39.3"], ["33.5", "51.9"]],
        exceptions: [NONE; 3],
    },
    ClusterRow {
        sub_batch: 1024,
        latency: [0.3, 0.04],
        single: ["17.4", "2.25"],
        full: ["499", "29.5"],
        total: ["577", "108"],
        speedup: [["14.8", "48.6"], ["22.7", "61"]],
        exceptions: [NONE; 3],
    },
    ClusterRow {
        sub_batch: 2048,
        latency: [0.7, 0.07],
        single: ["25.5", "3.26"],
        full: ["750", "60.8"],
        total: ["789", "100"],
        speedup: [["11.3", "50.6"], ["17.7", "62.8"]],
        exceptions: [
            [
                Some("uses the latency of 1024, 0.3 ms"),
                Some("uses the latency of 1024, 0.04 ms"),
            ],
            NONE,
            NONE,
        ],
    },
    ClusterRow {
        sub_batch: 12288,
        latency: [5.0, 0.06],
        single: ["250", "31"],
        full: ["7750", "921"],
        total: ["7750", "928"],
        speedup: [["1.3", "9.7"], ["2.15", "15.5"]],
        exceptions: [
            [
                Some("the formula gives 252.1"),
                Some("uses a latency of 0.6 ms"),
            ],
            [Some("31 * 250: drops the overlap"), None],
            [Some("drops the 6.5 ms of computing"), None],
        ],
    },
];

/// Message sizes relative to 32 bits; the paper takes an eighth for 8 bits.
const PAPER_SIZE: [f64; 2] = [1.0, 0.125];
const RIGHT_SIZE: [f64; 2] = [1.0, 0.25];

impl ClusterRow {
    fn size(&self) -> f64 {
        f64::from(self.sub_batch)
    }

    /// Returns the milliseconds in the columns "single", "full" and "total" of Table 6, computed
    /// from corrected message sizes and latencies.
    fn corrected(&self, width: usize) -> [f64; 3] {
        let latency = match (self.sub_batch, width) {
            (12288, 1) => 0.6,
            _ => self.latency[width],
        };
        let single = single(self.size(), RIGHT_SIZE[width], latency);
        let full = full(single);
        [single, full, total(self.size(), full)]
    }

    fn table6(&self) -> Vec<Figure> {
        let mut figures = Vec::new();
        for (width, (_, name)) in WIDTHS.into_iter().enumerate() {
            let corrected = self.corrected(width);
            let columns = [
                (
                    "single",
                    self.single[width],
                    single(self.size(), PAPER_SIZE[width], self.latency[width]),
                ),
                ("full", self.full[width], full(number(self.single[width]))),
                (
                    "total",
                    self.total[width],
                    total(self.size(), number(self.full[width])),
                ),
            ];
            for (at, (column, printed, computed)) in columns.into_iter().enumerate() {
                figures.push(Figure {
                    table: 6,
                    row: format!("sub-batch {}", self.sub_batch),
                    column: format!("{column} ms, {name}"),
                    printed,
                    computed,
                    corrected: corrected[at],
                    exception: self.exceptions[at][width],
                });
            }
        }
        figures
    }

    fn table7(&self) -> Vec<Figure> {
        let mut figures = Vec::new();
        let speedups = FRAMEWORKS.into_iter().zip(self.speedup);
        for (framework, printed) in speedups {
            for (width, (_, name)) in WIDTHS.into_iter().enumerate() {
                figures.push(self.speedup(framework, width, name, printed[width]));
            }
        }
        figures
    }

    fn speedup(
        &self,
        framework: Framework,
        width: usize,
        name: &str,
        printed: &'static str,
    ) -> Figure {
        Figure {
            table: 7,
            row: format!("sub-batch {}", self.sub_batch),
            column: format!("{}, {name}", framework.name),
            printed,
            computed: cluster(framework, number(self.total[width])),
            corrected: cluster(framework, self.corrected(width)[2]),
            exception: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns whether the computed figure is within one unit of the last printed digit, as the
    /// paper truncates digits as often as it rounds.
    fn follows(figure: &Figure) -> bool {
        (figure.computed - figure.value()).abs() < unit(figure.printed)
    }

    fn table(number: u32) -> Vec<Figure> {
        let mut figures = figures();
        figures.retain(|figure| figure.table == number);
        figures
    }

    fn assert_close(figures: &[Figure], expected: &[f64], of: impl Fn(&Figure) -> f64) {
        assert_eq!(figures.len(), expected.len());
        for (figure, &expected) in figures.iter().zip(expected) {
            let found = of(figure);
            let slack = f64::max(0.0006, 1e-4 * expected);
            assert!((found - expected).abs() <= slack, "{figure:?} {expected}");
        }
    }

    #[test]
    fn table_1_formulas_give_the_printed_digits() {
        let figures = table(1);
        assert_close(&figures, &[3.534, 3.667, 3.712, 3.797], |f| f.computed);
        assert!(figures.iter().all(Figure::rounds));
        assert_close(&figures, &[3.528, 3.667, 3.708, 3.797], |f| f.corrected);
    }

    #[test]
    fn table_3_formulas_give_the_printed_figures() {
        let figures = table(3);
        let expected = [0.0495, 0.458, 0.989, 1.318, 0.879, 0.879, 1.172, 0.406];
        assert_close(&figures, &expected, |f| f.computed);
        assert!(figures.iter().all(follows));
    }

    #[test]
    fn table_6_formulas_give_all_but_the_known_exceptions() {
        let figures = table(6);
        #[rustfmt::skip]
        let computed = [
            2.097, 24.8, 648.8, 0.3435, 0.35, 624.35,
            4.193, 89.9, 401.9, 0.563, 0.55, 312.55,
            7.147, 181.35, 337.0, 1.126, 1.13, 157.13,
            17.393, 499.1, 577.0, 2.252, 29.45, 107.5,
            37.886, 750.2, 789.0, 4.193, 60.76, 99.8,
            252.12, 7709.7, 7756.5, 14.0, 920.7, 927.5,
        ];
        assert_close(&figures, &computed, |f| f.computed);
        let mut exceptions = Vec::new();
        for figure in &figures {
            assert_eq!(follows(figure), figure.exception.is_none(), "{figure:?}");
            if figure.exception.is_some() {
                exceptions.push(format!("{}, {}", figure.row, figure.column));
            }
        }
        let known = [
            "sub-batch 128, total ms, 32 bit",
            "sub-batch 256, single ms, 8 bit",
            "sub-batch 2048, single ms, 32 bit",
            "sub-batch 2048, single ms, 8 bit",
            "sub-batch 12288, single ms, 32 bit",
            "sub-batch 12288, full ms, 32 bit",
            "sub-batch 12288, total ms, 32 bit",
            "sub-batch 12288, single ms, 8 bit",
        ];
        assert_eq!(exceptions, known);
    }

    #[test]
    fn the_reasons_of_the_exceptions_hold() {
        for (sub_batch, size, latency, printed) in [
            (2048.0, 1.0, 0.3, "25.5"),
            (2048.0, 0.125, 0.04, "3.26"),
            (12288.0, 0.125, 0.6, "31"),
        ] {
            let mut figure = table(6).remove(0);
            figure.printed = printed;
            figure.computed = single(sub_batch, size, latency);
            assert!(follows(&figure), "{figure:?}");
        }
        assert_eq!(31.0 * 250.0, 7750.0);
    }

    #[test]
    fn table_7_formulas_give_the_printed_digits() {
        let figures = table(7);
        #[rustfmt::skip]
        let computed = [
            13.368, 13.849, 20.709, 21.387,
            20.003, 24.398, 29.680, 35.217,
            22.995, 39.252, 33.482, 51.884,
            14.814, 48.607, 22.732, 61.013,
            11.272, 50.575, 17.709, 62.817,
            1.273, 9.744, 2.145, 15.468,
        ];
        assert_close(&figures, &computed, |f| f.computed);
        for figure in &figures {
            assert!(figure.rounds(), "{figure:?}");
        }
    }

    #[test]
    fn corrected_speed_ups_peak_elsewhere() {
        let figures = table(7);
        #[rustfmt::skip]
        let corrected = [
            "13.4", "13.8", "20.7", "21.4",
            "20.0", "24.3", "29.7", "35.2",
            "23.0", "37.9", "33.5", "50.5",
            "14.8", "42.3", "22.7", "54.9",
            "7.9", "34.6", "12.6", "47.0",
            "1.3", "7.2", "2.1", "11.6",
        ];
        for (figure, expected) in figures.iter().zip(corrected) {
            assert_eq!(format!("{:.1}", figure.corrected), expected, "{figure:?}");
        }
    }
}
