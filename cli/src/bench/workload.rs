//! The rows and inputs of a benchmark. Options that cannot work are refused here, before a rank
//! starts.

use super::data::InputSource;
use super::metrics::count_of;
use super::options::BenchOptions;
use super::row::{Row, memory};
use cinch::Collective;

/// The rows and inputs of a benchmark.
pub struct Workload {
    /// Input data of all ranks.
    pub source: InputSource,
    /// Rows in the order in which they run.
    pub rows: Vec<Row>,
}

impl Workload {
    /// Creates the rows that the options request, for `nranks` ranks.
    ///
    /// # Errors
    /// Returns an error message about the option that cannot work.
    pub fn new(options: &BenchOptions, nranks: usize) -> Result<Workload, String> {
        if options.collective == Collective::SendRecv && nranks < 2 {
            return Err("send_recv needs two ranks or more; give --ranks 2".into());
        }
        let source = match options.data.as_slice() {
            [] => InputSource::generated(options.seed, options.distribution, nranks),
            files => InputSource::from_files(files, nranks)?,
        };
        let native = source.native();
        let sizes = options.sizes(native.map(|(_, bytes)| bytes))?;
        let roots = options.roots(nranks)?;
        // Without `--codec` the settings decide.
        let codecs = match options.codec.as_slice() {
            [] => vec![None],
            codecs => codecs.iter().copied().map(Some).collect(),
        };
        let mut rows: Vec<Row> = Vec::new();
        for (dtype, op) in options.kinds(native.map(|(dtype, _)| dtype))? {
            source.admits(dtype)?;
            for &codec in &codecs {
                for (&root, &size) in roots.iter().flat_map(|r| sizes.iter().map(move |s| (r, s))) {
                    let count = count_of(options.collective, dtype, nranks, size);
                    let row = Row {
                        op,
                        root,
                        codec,
                        algorithm: options.algo.0,
                        graph: options.gpu.graph,
                        ..Row::new(options.collective, dtype, count)
                    };
                    // Sizes that round to the same element count make only one row.
                    if rows.last() != Some(&row) {
                        rows.push(row);
                    }
                }
            }
        }
        let cycles = options.nccl_tests.run_cycles.max(1) as usize;
        Ok(Workload {
            source,
            rows: rows.repeat(cycles),
        })
    }

    /// Returns a note if rows are longer than the data files, because the files' contents then
    /// repeat.
    pub fn repeats(&self, nranks: usize) -> Option<String> {
        let (native, bytes) = self.source.native()?;
        let held = bytes / native.size();
        let longest = self
            .rows
            .iter()
            .map(|row| match row.collective.splits_input() {
                true => row.count * nranks,
                false => row.count,
            });
        let longest = longest.max().filter(|&longest| longest > held)?;
        Some(format!(
            "inputs of up to {longest} elements repeat the data files' {held}"
        ))
    }

    /// Refuses rows whose buffers exceed the free memory for `local` of `nranks` ranks.
    ///
    /// # Errors
    /// Returns an error message with the needed and the free memory.
    pub fn check_memory(
        &self,
        nranks: usize,
        local: usize,
        available: Option<u64>,
    ) -> Result<(), String> {
        let needed = self.rows.iter().map(|row| memory(row, nranks)).max();
        let needed = (needed.unwrap_or(0) / nranks).saturating_mul(local) as u64;
        match available {
            Some(available) if needed > available / 10 * 9 => Err(format!(
                "the largest size needs {} MiB of buffers for {local} ranks, but {} MiB are free; \
                 use a smaller -e or fewer ranks",
                needed >> 20,
                available >> 20
            )),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::parsed;

    fn workload(line: &str, nranks: usize) -> Result<Workload, String> {
        Workload::new(&parsed(line).unwrap(), nranks)
    }

    #[test]
    fn rows_are_types_by_roots_by_sizes() {
        let rows = workload("broadcast -b 1K -e 4K -f 2 -d all -r all", 3)
            .unwrap()
            .rows;
        assert_eq!(rows.len(), 12 * 3 * 3);
        assert_eq!((rows[0].root, rows[0].count), (0, 1024));
        assert_eq!((rows[3].root, rows[3].count), (1, 1024));
        // Blocks are a multiple of 16 bytes, so 16, 32 and 48 bytes give 4 ranks no elements. Only
        // one such row remains.
        let rows = workload("all_gather -b 16 -e 64 -i 16", 4).unwrap().rows;
        assert_eq!(rows.iter().map(|row| row.count).collect::<Vec<_>>(), [0, 4]);
    }

    #[test]
    fn reductions_are_for_collectives_that_reduce() {
        for collective in Collective::ALL {
            let ops = |op: &str| {
                let rows = workload(&format!("{collective} -e 1K -o {op}"), 2)?.rows;
                Ok::<_, String>(rows.iter().map(|row| row.op.name()).collect::<Vec<_>>())
            };
            assert_eq!(ops("sum").unwrap(), ["sum"], "{collective}");
            for op in ["prod", "min", "max", "avg", "premulsum"] {
                match ops(op) {
                    Ok(ops) => assert!(collective.reduces() && ops == [op], "{collective} {ops:?}"),
                    Err(why) => assert!(
                        !collective.reduces()
                            && why.starts_with(collective.name())
                            && why.contains(&format!("-o {op} ")),
                        "{why}"
                    ),
                }
            }
            let all = if collective.reduces() { 6 } else { 1 };
            assert_eq!(ops("all").unwrap().len(), all, "{collective}");
        }
    }

    #[test]
    fn impossible_options_give_error_messages() {
        for (line, nranks, word) in [
            ("sendrecv", 1, "two ranks"),
            ("all_reduce --data /no/such.npy", 2, "/no/such.npy"),
            ("reduce -r 2", 2, "-r 2"),
            ("all_reduce --codec linear8 -d i32", 2, "not i32"),
            ("broadcast -o max", 2, "leave out -o"),
            // With `all`, combinations that do not exist are left out; if none is left, that is an
            // error.
            ("all_reduce --codec linear8 -d i32 -o all", 2, "not i32"),
            ("all_reduce --codec linear8 -d all -o max", 2, "leave out"),
        ] {
            let error = workload(line, nranks).err().unwrap();
            assert!(error.contains(word), "{line}: {error}");
        }
        let data = concat!(
            "all_reduce --data ",
            env!("CARGO_MANIFEST_DIR"),
            "/../benches/data -e"
        );
        assert_eq!(workload(&format!("{data} 4K"), 4).unwrap().repeats(4), None);
        let repeats = workload(&format!("{data} 1M -b 1M"), 4).unwrap().repeats(4);
        assert!(repeats.unwrap().contains("262144 elements"));
        let large = workload("all_reduce -b 1G", 4).unwrap();
        assert!(large.check_memory(4, 4, Some(4 << 30)).is_err());
        assert!(large.check_memory(4, 4, Some(64 << 30)).is_ok());
        assert!(large.check_memory(4, 1, Some(4 << 30)).is_ok());
        assert!(large.check_memory(4, 4, None).is_ok());
    }
}
