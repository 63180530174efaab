//! `cinch bench --suite`: the whole comparison, most telling rows first, and its report.

pub mod host;

use super::data::Source;
use super::html;
use super::metrics::count_of;
use super::options::BenchOptions;
use super::plan::Plan;
use super::record::Record;
use super::row::Row;
use cinch::types::CodecSetting;
use cinch::{Collective, DType, ReduceOp};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Files in the folder of a suite.
const ROWS: &str = "suite.jsonl";
const REPORT: &str = "report.html";

/// Sizes where nothing is said: smallest, largest, factor.
const SIZES: (usize, usize, usize) = (8, 1 << 30, 4);
const HOST_SIZES: (usize, usize, usize) = (1 << 10, 16 << 20, 4);
/// From this size on codecs are compared: smaller messages are bound by latency.
const CODED_FROM: usize = 64 << 10;

/// One measurement: a row, on a stream or as a graph.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Case {
    /// What runs.
    pub row: Row,
    /// Whether replays of a graph are timed.
    pub graph: bool,
}

/// The cases of a suite.
pub struct Cases {
    /// Inputs.
    pub source: Source,
    /// In the order in which they run: what is at the end is left out where the time is short.
    pub list: Vec<Case>,
}

/// Collectives in order, with whether a codec is compared.
const COLLECTIVES: [(Collective, bool); 7] = [
    (Collective::AllReduce, true),
    (Collective::AllGather, true),
    (Collective::ReduceScatter, true),
    (Collective::AllToAll, false),
    (Collective::Broadcast, false),
    (Collective::SendRecv, false),
    (Collective::Reduce, false),
];

impl Cases {
    /// The suite of these options for `nranks` ranks; `-b`, `-e`, `-f`, `-d` and `--codec` say what is
    /// in it where they are given.
    ///
    /// # Errors
    /// A sentence about the option that cannot be.
    pub fn new(options: &BenchOptions, nranks: usize, on_gpus: bool) -> Result<Cases, String> {
        if !options.data.is_empty() {
            return Err("--suite generates its data; leave out --data".into());
        }
        let (low, high, factor) = if on_gpus { SIZES } else { HOST_SIZES };
        let low = options
            .minbytes
            .unwrap_or(options.maxbytes.map_or(low, |high| low.min(high)));
        let sized = BenchOptions {
            minbytes: Some(low),
            maxbytes: Some(options.maxbytes.unwrap_or(high.max(low))),
            stepfactor: Some(options.stepfactor.unwrap_or(factor)),
            ..options.clone()
        };
        let sizes = sized.sizes(None)?;
        let dtypes = match &options.datatype {
            Some(types) => types.list.clone(),
            None => vec![DType::F32, DType::BF16],
        };
        let standard = ["raw", "linear8", "dynamic8", "minmax4"];
        let codecs: Vec<CodecSetting> = match options.codec.as_slice() {
            [] => standard
                .iter()
                .filter_map(|name| name.parse().ok())
                .collect(),
            codecs => codecs.to_vec(),
        };
        let modes: &[bool] = if on_gpus { &[true, false] } else { &[false] };
        let mut list: Vec<Case> = Vec::new();
        for &graph in modes {
            for (collective, coded) in COLLECTIVES {
                if collective == Collective::SendRecv && nranks < 2 {
                    continue;
                }
                for &dtype in &dtypes {
                    for &codec in &codecs {
                        let lossy = codec.is_lossy();
                        let floats = dtype.has_codecs();
                        if lossy && !(coded && floats) {
                            continue;
                        }
                        for &size in &sizes {
                            if lossy && size < CODED_FROM {
                                continue;
                            }
                            let row = Row {
                                collective,
                                dtype,
                                op: ReduceOp::Sum,
                                root: 0,
                                count: count_of(collective, dtype, nranks, size),
                                codec: Some(codec),
                                algorithm: options.algo.0,
                            };
                            let case = Case { row, graph };
                            if row.count > 0 && list.last() != Some(&case) {
                                list.push(case);
                            }
                        }
                    }
                }
            }
        }
        if list.is_empty() {
            return Err("the suite of these options has no rows; give --codec raw too".into());
        }
        Ok(Cases {
            source: Source::generated(options.seed, options.distribution, nranks),
            list,
        })
    }

    /// Their rows, for what counts memory.
    pub fn into_plan(self) -> (Plan, Vec<Case>) {
        let rows = self.list.iter().map(|case| case.row).collect();
        let source = self.source;
        (Plan { source, rows }, self.list)
    }
}

/// When the next of `left` rows should end, so that all of them have their share of the time: a row
/// takes up to half of what is left until its deadline.
pub fn row_deadline(deadline: Option<Instant>, left: usize) -> Option<Instant> {
    let now = Instant::now();
    let share = deadline?.saturating_duration_since(now) / left.max(1) as u32;
    Some(now + 2 * share)
}

/// The folder that `--output` names, made if it is not there.
///
/// # Errors
/// A sentence if there is none, or it cannot be made.
pub fn folder(options: &BenchOptions) -> Result<&Path, String> {
    let folder = options
        .output
        .as_deref()
        .ok_or("--suite writes to a folder: give --output DIR")?;
    std::fs::create_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    Ok(folder)
}

/// The file of rows in it.
pub fn rows(folder: &Path) -> PathBuf {
    folder.join(ROWS)
}

/// Writes the report of `records` into the folder; what to print.
///
/// # Errors
/// A sentence with the file.
pub fn write_report(folder: &Path, records: &[Record]) -> Result<String, String> {
    let path = folder.join(REPORT);
    std::fs::write(&path, html::report(records))
        .map_err(|error| format!("{}: {error}", path.display()))?;
    Ok(format!(
        "{} rows in {}, drawn in {}",
        records.len(),
        rows(folder).display(),
        path.display()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::parsed;

    fn options(line: &str) -> BenchOptions {
        parsed(line).unwrap()
    }

    #[test]
    fn a_suite_is_the_whole_comparison() {
        let all = Cases::new(&options("--suite --output x"), 8, true)
            .unwrap()
            .list;
        let has = |collective, dtype, codec: &str, graph| {
            let codec: CodecSetting = codec.parse().unwrap();
            all.iter().any(|case| {
                let row = case.row;
                (row.collective, row.dtype, case.graph) == (collective, dtype, graph)
                    && row.codec == Some(codec)
            })
        };
        for graph in [true, false] {
            for dtype in [DType::F32, DType::BF16] {
                for codec in ["raw", "linear8", "dynamic8", "minmax4"] {
                    for collective in [
                        Collective::AllReduce,
                        Collective::AllGather,
                        Collective::ReduceScatter,
                    ] {
                        assert!(has(collective, dtype, codec, graph), "{collective} {codec}");
                    }
                }
                assert!(has(Collective::SendRecv, dtype, "raw", graph));
                assert!(!has(Collective::Broadcast, dtype, "linear8", graph));
            }
        }
        // The headline is first.
        assert!(all[0].graph && all[0].row.collective == Collective::AllReduce);
        assert_eq!((all[0].row.count, all[0].row.dtype), (2, DType::F32));
        let largest = all
            .iter()
            .map(|case| case.row.count * case.row.dtype.size())
            .max();
        assert!(largest.unwrap() >= 1 << 29);
    }

    #[test]
    fn options_narrow_it() {
        let line = "--suite --output x -b 1M -e 1M -d bf16 --codec linear8";
        let all = Cases::new(&options(line), 4, false).unwrap().list;
        assert_eq!(all.len(), 3);
        assert!(
            all.iter()
                .all(|case| !case.graph && case.row.dtype == DType::BF16)
        );
        let few = Cases::new(&options("--suite --output x -e 512"), 4, false)
            .unwrap()
            .list;
        assert!(
            few.iter()
                .all(|case| case.row.count * case.row.dtype.size() <= 512)
        );
        for (line, word) in [
            ("--suite --output x --codec linear8 -e 1K", "no rows"),
            ("--suite --output x --data benches/data", "--data"),
        ] {
            let error = Cases::new(&options(line), 4, true).err().unwrap();
            assert!(error.contains(word), "{error}");
        }
        assert!(
            folder(&options("--suite"))
                .unwrap_err()
                .contains("--output DIR")
        );
    }
}
