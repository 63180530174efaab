//! `cinch bench --suite`: the rows of the whole comparison, with the most important rows first.

use super::data::InputSource;
use super::metrics::count_of;
use super::options::BenchOptions;
use super::row::Row;
use super::workload::Workload;
use cinch::types::CodecSetting;
use cinch::{Collective, DType, Error};
use std::path::Path;

/// Names of the rows file and the report in the suite's folder.
pub const ROWS: &str = "suite.jsonl";
pub const REPORT: &str = "report.html";

/// Default sizes: smallest and largest in bytes, and the factor between them.
const SIZES: (usize, usize, usize) = (8, 1 << 30, 4);
const HOST_SIZES: (usize, usize, usize) = (1 << 10, 16 << 20, 4);
/// Smallest size in bytes at which codecs are compared; latency dominates smaller messages.
const MIN_CODEC_BYTES: usize = 64 << 10;

/// Collectives in the order in which they run, each with whether codecs are compared for it.
const COLLECTIVES: [(Collective, bool); 7] = [
    (Collective::AllReduce, true),
    (Collective::AllGather, true),
    (Collective::ReduceScatter, true),
    (Collective::AllToAll, false),
    (Collective::Broadcast, false),
    (Collective::SendRecv, false),
    (Collective::Reduce, false),
];

/// Returns the suite's rows for `nranks` ranks in the order in which they run. A time limit drops
/// the last rows. `-b`, `-e`, `-f`, `-d` and `--codec` restrict the rows.
///
/// # Errors
/// Returns an error message about the option that cannot work.
pub fn workload(options: &BenchOptions, nranks: usize, on_gpus: bool) -> Result<Workload, String> {
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
    let mut rows: Vec<Row> = Vec::new();
    for (&graph, (collective, coded)) in modes
        .iter()
        .flat_map(|mode| COLLECTIVES.map(|collective| (mode, collective)))
    {
        if collective == Collective::SendRecv && nranks < 2 {
            continue;
        }
        for (&dtype, &codec) in dtypes
            .iter()
            .flat_map(|dtype| codecs.iter().map(move |codec| (dtype, codec)))
        {
            let lossy = codec.is_lossy();
            let floats = dtype.has_codecs();
            if lossy && !(coded && floats) {
                continue;
            }
            for &size in sizes
                .iter()
                .filter(|&&size| !lossy || size >= MIN_CODEC_BYTES)
            {
                let count = count_of(collective, dtype, nranks, size);
                let row = Row {
                    codec: Some(codec),
                    algorithm: options.algo.0,
                    graph,
                    ..Row::new(collective, dtype, count)
                };
                if count > 0 && rows.last() != Some(&row) {
                    rows.push(row);
                }
            }
        }
    }
    if rows.is_empty() {
        return Err("the suite of these options has no rows; give --codec raw too".into());
    }
    Ok(Workload {
        source: InputSource::generated(options.seed, options.distribution, nranks),
        rows,
    })
}

/// Creates and returns the folder that `--output` names.
///
/// # Errors
/// Returns an invalid-argument error if `--output` is missing or the folder cannot be created.
pub fn folder(options: &BenchOptions) -> cinch::Result<&Path> {
    let folder = options
        .output
        .as_deref()
        .ok_or_else(|| Error::invalid_argument("--suite writes to a folder: give --output DIR"))?;
    std::fs::create_dir_all(folder)
        .map_err(|error| Error::invalid_argument(format!("{}: {error}", folder.display())))?;
    Ok(folder)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::parsed;

    fn rows(line: &str, nranks: usize, on_gpus: bool) -> Result<Vec<Row>, String> {
        workload(&parsed(line).unwrap(), nranks, on_gpus).map(|workload| workload.rows)
    }

    #[test]
    fn suite_is_the_whole_comparison() {
        let all = rows("--suite --output x", 8, true).unwrap();
        let has = |collective, dtype, codec: &str, graph| {
            let codec: CodecSetting = codec.parse().unwrap();
            all.iter().any(|row| {
                (row.collective, row.dtype, row.graph) == (collective, dtype, graph)
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
        // The most important rows come first: all_reduce with graphs.
        assert!(all[0].graph && all[0].collective == Collective::AllReduce);
        assert_eq!((all[0].count, all[0].dtype), (2, DType::F32));
        let largest = all.iter().map(|row| row.count * row.dtype.size()).max();
        assert!(largest.unwrap() >= 1 << 29);
    }

    #[test]
    fn options_narrow_the_suite() {
        let line = "--suite --output x -b 1M -e 1M -d bf16 --codec linear8";
        let all = rows(line, 4, false).unwrap();
        assert_eq!(all.len(), 3);
        assert!(all.iter().all(|row| !row.graph && row.dtype == DType::BF16));
        let few = rows("--suite --output x -e 512", 4, false).unwrap();
        assert!(few.iter().all(|row| row.count * row.dtype.size() <= 512));
        for (line, word) in [
            ("--suite --output x --codec linear8 -e 1K", "no rows"),
            ("--suite --output x --data benches/data", "--data"),
        ] {
            let error = rows(line, 4, true).err().unwrap();
            assert!(error.contains(word), "{error}");
        }
        let nowhere = parsed("--suite").unwrap();
        assert!(
            folder(&nowhere)
                .unwrap_err()
                .message()
                .contains("--output DIR")
        );
    }
}
