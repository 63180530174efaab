//! The columns of results. Text tables, CSV, charts and the HTML report all take them from this
//! list.

use super::limit;
use super::record::{Figures, Record, Versus};

/// A record together with one of its placements (out of place or in place).
pub struct PlacedRecord<'a> {
    /// Record of the benchmark row, with the results of all placements.
    pub record: &'a Record,
    /// `out_of_place` or `in_place`.
    pub placement: &'static str,
    /// Figures of this placement.
    pub figures: &'a Figures,
}

/// The value of a column for one placement. Its variant decides how it is printed.
#[derive(Clone, Debug, PartialEq)]
pub enum CellValue {
    /// A name, such as a codec's.
    Text(String),
    /// An integer, such as a size in bytes or a root rank.
    Count(i64),
    /// Microseconds, printed with four significant digits as nccl-tests does.
    Time(f64),
    /// A rate in GB/s.
    Rate(f64),
    /// A ratio without a unit, such as the compression ratio.
    Ratio(f64),
    /// A difference from the exact result.
    Error(f64),
    /// Whether all ranks hold the same bits.
    Same(bool),
    /// No value; tables print this text in its place.
    Missing(&'static str),
}

/// A column of the results.
pub struct Column {
    /// Name in the CSV header.
    pub key: &'static str,
    /// Heading in the report, and label of its chart.
    pub title: &'static str,
    /// Function that reads the column's value from a record and placement.
    pub value: fn(&PlacedRecord<'_>) -> CellValue,
}

/// All columns, in the order of the CSV file.
pub static COLUMNS: [Column; 33] = [
    column("size", "size", |at| count(at.record.size)),
    column("count", "count", |at| count(at.record.count)),
    column("type", "type", |at| text(&at.record.dtype)),
    column("redop", "reduction", |at| text(&at.record.redop)),
    column("root", "root", |at| CellValue::Count(at.record.root)),
    column("codec", "codec", |at| text(&at.record.codec)),
    column("algo", "algorithm", |at| text(&at.record.algo)),
    column("transport", "transport", |at| text(&at.record.transport)),
    column("wire_bytes", "wire bytes", |at| {
        CellValue::Count(at.record.wire_bytes as i64)
    }),
    column("ratio", "ratio", |at| {
        or("-", at.record.ratio, CellValue::Ratio)
    }),
    column("channels", "channels", |at| count(at.record.channels)),
    column("placement", "placement", |at| text(at.placement)),
    column("time_us", "time (us)", |at| {
        CellValue::Time(at.figures.time_us)
    }),
    column("min_us", "shortest (us)", |at| {
        CellValue::Time(at.figures.min_us)
    }),
    column("p99_us", "99th percentile (us)", |at| {
        CellValue::Time(at.figures.p99_us)
    }),
    column("iterations", "iterations", |at| {
        count(at.figures.iterations)
    }),
    column("alg_bw", "algorithm bandwidth (GB/s)", |at| {
        CellValue::Rate(at.figures.alg_bw)
    }),
    column("bus_bw", "bus bandwidth (GB/s)", |at| {
        CellValue::Rate(at.figures.bus_bw)
    }),
    column("eff_bus_bw", "effective bus bandwidth (GB/s)", |at| {
        CellValue::Rate(at.figures.eff_bus_bw)
    }),
    column("nwrong", "wrong", |at| {
        or("N/A", at.figures.nwrong, |wrong| {
            CellValue::Count(wrong as i64)
        })
    }),
    column("max_abs_err", "largest error", |at| {
        or("N/A", at.figures.max_abs_err, CellValue::Error)
    }),
    column("rms_rel_err", "RMS error / RMS of result", |at| {
        or("N/A", at.figures.rms_rel_err, CellValue::Error)
    }),
    column("identical", "same bits", |at| {
        or("-", at.figures.identical, CellValue::Same)
    }),
    column("collective", "collective", |at| text(&at.record.collective)),
    column("ranks", "ranks", |at| count(at.record.ranks)),
    column("mode", "mode", |at| text(&at.record.mode)),
    column("protocol", "protocol", |at| text(&at.record.protocol)),
    column("vs_us", "NCCL (us)", |at| {
        of(&at.record.vs, |vs| CellValue::Time(vs.time_us))
    }),
    column("vs_ratio", "NCCL's time over ours", |at| {
        of(&at.record.vs, |vs| CellValue::Ratio(vs.ratio))
    }),
    column("symmetric_us", "NCCL, symmetric windows (us)", |at| {
        of(&at.record.symmetric, |vs| CellValue::Time(vs.time_us))
    }),
    column(
        "symmetric_ratio",
        "NCCL's, symmetric windows, over ours",
        |at| of(&at.record.symmetric, |vs| CellValue::Ratio(vs.ratio)),
    ),
    column("limit_us", "limit (us)", |at| {
        or("-", limit::of_record(at.record), CellValue::Time)
    }),
    column("limit_ratio", "the limit over our time", |at| {
        let limit = limit::of_record(at.record);
        or("-", limit, |limit| {
            CellValue::Ratio(limit / at.figures.time_us)
        })
    }),
];

const fn column(
    key: &'static str,
    title: &'static str,
    value: fn(&PlacedRecord<'_>) -> CellValue,
) -> Column {
    Column { key, title, value }
}

fn text(text: &str) -> CellValue {
    CellValue::Text(text.into())
}

fn count(count: usize) -> CellValue {
    CellValue::Count(count as i64)
}

fn or<T>(missing: &'static str, value: Option<T>, make: impl Fn(T) -> CellValue) -> CellValue {
    value.map_or(CellValue::Missing(missing), make)
}

fn of(versus: &Option<Versus>, make: fn(&Versus) -> CellValue) -> CellValue {
    or("-", versus.as_ref(), make)
}

/// Returns the column with this name.
///
/// # Panics
/// Panics if no column has the name, as names are constants of this program.
pub fn named(key: &str) -> &'static Column {
    let found = COLUMNS.iter().find(|column| column.key == key);
    found.unwrap_or_else(|| panic!("no column is called {key}"))
}

impl Column {
    /// Returns this column's number for the placement with separate buffers, or `None` if the value
    /// is no number.
    pub fn number(&self, record: &Record) -> Option<f64> {
        (self.value)(&PlacedRecord::out_of_place(record)).number()
    }
}

impl<'a> PlacedRecord<'a> {
    /// Returns the record's placement with separate buffers.
    pub fn out_of_place(record: &'a Record) -> PlacedRecord<'a> {
        PlacedRecord {
            record,
            placement: "out_of_place",
            figures: &record.out_of_place,
        }
    }

    /// Returns all placements of `record`.
    pub fn all(record: &'a Record) -> impl Iterator<Item = PlacedRecord<'a>> {
        record
            .placements()
            .map(move |(placement, figures)| PlacedRecord {
                record,
                placement,
                figures,
            })
    }
}

impl CellValue {
    /// Returns the text of the value in a table cell.
    pub fn shown(&self) -> String {
        match *self {
            CellValue::Text(ref text) => text.clone(),
            CellValue::Count(count) => count.to_string(),
            CellValue::Time(us) if us >= 100_000.0 => format!("{us:.0}"),
            CellValue::Time(us) if us >= 1000.0 => format!("{us:.1}"),
            CellValue::Time(us) => format!("{us:.2}"),
            CellValue::Rate(rate) if rate > 0.0 && rate < 0.1 => format!("{rate:.4}"),
            CellValue::Rate(number) | CellValue::Ratio(number) => format!("{number:.2}"),
            CellValue::Error(0.0) => "0".into(),
            CellValue::Error(error) => format!("{error:.2e}"),
            CellValue::Same(same) => if same { "yes" } else { "NO" }.into(),
            CellValue::Missing(text) => text.into(),
        }
    }

    /// Returns the text of a CSV field with all digits, or an empty text for a missing value.
    pub fn exact(&self) -> String {
        match *self {
            CellValue::Text(_) | CellValue::Count(_) => self.shown(),
            CellValue::Time(x) | CellValue::Rate(x) | CellValue::Ratio(x) | CellValue::Error(x) => {
                x.to_string()
            }
            CellValue::Same(same) => same.to_string(),
            CellValue::Missing(_) => String::new(),
        }
    }

    /// Returns the value as a number, or `None` for texts and missing values.
    pub fn number(&self) -> Option<f64> {
        match *self {
            CellValue::Count(count) => Some(count as f64),
            CellValue::Time(x) | CellValue::Rate(x) | CellValue::Ratio(x) | CellValue::Error(x) => {
                Some(x)
            }
            _ => None,
        }
    }
}

/// Writes the CSV file: one line for each record and placement.
///
/// # Errors
/// Returns the writer's errors.
pub fn write_csv(records: &[Record], out: impl std::io::Write) -> std::io::Result<()> {
    let mut csv = csv::Writer::from_writer(out);
    csv.write_record(COLUMNS.iter().map(|column| column.key))?;
    for placed in records.iter().flat_map(PlacedRecord::all) {
        csv.write_record(COLUMNS.iter().map(|column| (column.value)(&placed).exact()))?;
    }
    csv.flush()
}

#[cfg(test)]
mod tests {
    use super::super::record::tests::record;
    use super::*;

    fn csv(records: &[Record]) -> Vec<String> {
        let mut text = Vec::new();
        write_csv(records, &mut text).unwrap();
        let text = String::from_utf8(text).unwrap();
        text.lines().map(str::to_string).collect()
    }

    #[test]
    fn csv_has_a_line_for_each_placement_and_no_blanks() {
        let mut unchecked = record(4096, "raw");
        unchecked.out_of_place.nwrong = None;
        unchecked.in_place = None;
        let lines = csv(&[record(1024, "linear8:block=32"), unchecked]);
        assert_eq!(lines.len(), 1 + 2 + 1);
        for line in &lines {
            assert_eq!(line.split(',').count(), COLUMNS.len(), "{line}");
            assert!(!line.contains(' '), "{line}");
        }
        assert!(lines[1].contains(",out_of_place,") && lines[2].contains(",in_place,"));
        assert!(
            lines[1].starts_with("1024,256,f32,sum,-1,linear8:block=32,direct,shm,341,3.94,2,")
        );
    }

    #[test]
    fn csv_quotes_codecs_of_two_levels() {
        let codec = "intra=raw,inter=dynamic8:block=256";
        let lines = csv(&[record(1024, codec)]);
        let quoted = format!("1024,256,f32,sum,-1,\"{codec}\",direct,");
        assert!(lines[1].starts_with(&quoted), "{}", lines[1]);
    }

    #[test]
    fn columns_have_names_of_their_own() {
        for column in &COLUMNS {
            assert!(std::ptr::eq(named(column.key), column), "{}", column.key);
        }
    }
}
