//! Options of `cinch bench`, with the letters of nccl-tests.

use super::data::Distribution;
use super::emulate::EmulateOptions;
use super::gpu::options::GpuOptions;
use super::nccl_tests::options::NcclTestsOptions;
use super::values::{
    Named, Ops, Root, Types, algorithm_help, datatype_help, parse_algorithm, parse_codec,
    parse_collective, parse_datatypes, parse_hosts, parse_ops, parse_root, parse_seconds,
    parse_size, parse_transport, transport_help,
};
use cinch::types::{CodecSetting, TransportKind};
use cinch::{Algorithm, Collective, DType, ReduceOp};
use clap::builder::ArgPredicate;
use clap::{ArgAction, Args, ValueEnum};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

// Groups of options in the help text.
const SIZES: &str = "Sizes and types";
const CHECKS: &str = "Iterations and checks";
const RANKS: &str = "Ranks and links";
const CODEC: &str = "Codec and algorithm";
const INPUT: &str = "Input";
const RESULTS: &str = "Results";

/// Examples below the help text of `cinch bench`.
pub const EXAMPLES: &str = "\
Examples:
  cinch bench all_reduce --ranks 4 -b 1K -e 64M -f 4 --codec raw,linear8
      4 ranks on this host; each size raw and in 8 bits, with errors beside times
  mpirun -n 8 cinch bench all_reduce -b 8 -e 1G -f 2 -g 1 --json rows.jsonl
      a rank on each GPU, with nccl-tests' letters; srun and torchrun work too
  cinch bench --compare before.jsonl after.jsonl
      two saved runs, with ratios, and which rows changed beyond noise";

/// Options of `cinch bench`. Sizes take binary K, M and G.
#[derive(Args, Clone, Debug)]
pub struct BenchOptions {
    /// Collective: all_reduce, all_gather, reduce_scatter, broadcast, reduce, gather, scatter,
    /// all_to_all or send_recv
    #[arg(value_parser = parse_collective, required = false,
          required_unless_present_any = ["suite", "report", "compare"],
          default_value_ifs = [("suite", "true", "all_reduce")],
          default_value_if("report", ArgPredicate::IsPresent, "all_reduce"),
          default_value_if("compare", ArgPredicate::IsPresent, "all_reduce"))]
    pub collective: Collective,
    /// Smallest size in bytes [default: 32M, or the size of --data]
    #[arg(help_heading = SIZES, short = 'b', long, value_name = "BYTES", value_parser = parse_size)]
    pub minbytes: Option<usize>,
    /// Largest size in bytes [default: 32M or -b, or the size of --data]
    #[arg(help_heading = SIZES, short = 'e', long, value_name = "BYTES", value_parser = parse_size)]
    pub maxbytes: Option<usize>,
    /// Factor from one size to the next
    #[arg(help_heading = SIZES, short = 'f', long, value_name = "FACTOR")]
    pub stepfactor: Option<usize>,
    /// Bytes from one size to the next, without -f
    #[arg(help_heading = SIZES, short = 'i', long, value_name = "BYTES", value_parser = parse_size, default_value = "1M")]
    pub stepbytes: usize,
    /// Timed iterations for each size and placement
    #[arg(help_heading = CHECKS, short = 'n', long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub iters: u32,
    /// Warm-up iterations before the timed ones
    #[arg(
        help_heading = CHECKS,
        short = 'w',
        long = "warmup-iters",
        alias = "warmup_iters",
        default_value_t = 5,
        value_parser = clap::value_parser!(u32).range(0..=1_000_000)
    )]
    pub warmup: u32,
    /// Number of calls whose results are compared with fp64 (0: none). Host memory: the first calls, and the
    /// last iteration. GPUs: the last calls of extra repetitions, in 16 pieces of 1 MiB for outputs above 64 MiB
    #[arg(help_heading = CHECKS, short = 'c', long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    pub check: u32,
    #[arg(help_heading = SIZES, short = 'd', long, value_parser = parse_datatypes, help = datatype_help())]
    pub datatype: Option<Types>,
    /// Reduction: sum prod min max avg mulsum, or all
    #[arg(help_heading = SIZES, short = 'o', long, default_value = "sum", value_parser = parse_ops)]
    pub op: Ops,
    /// Root rank, or all (or -1) [default: 0]
    #[arg(help_heading = SIZES, short = 'r', long, allow_negative_numbers = true, value_parser = parse_root)]
    pub root: Option<Root>,
    /// Number of ranks to start on this host [default: join the ranks that a launcher has started]
    #[arg(help_heading = RANKS, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub ranks: Option<u32>,
    #[arg(help_heading = RANKS, long, default_value = "auto", value_parser = parse_transport, help = transport_help())]
    pub transport: Named<TransportKind>,
    #[arg(help_heading = CODEC, long, default_value = "auto", value_parser = parse_algorithm, help = algorithm_help())]
    pub algo: Named<Algorithm>,
    /// Codecs, as [auto:]NAME[:block=B][:tensor=K][:offset=E][:seed=S][:tau=T],...; see `cinch
    /// codecs`. With auto, costs are measured and a row uses the codec only where it is faster
    #[arg(help_heading = CODEC, long, value_name = "CODEC", value_delimiter = ',', value_parser = parse_codec)]
    pub codec: Vec<CodecSetting>,
    /// Write the results as JSON, one line for each row
    #[arg(help_heading = RESULTS, long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Write the results as CSV, one line for each size and placement
    #[arg(help_heading = RESULTS, long, value_name = "FILE")]
    pub csv: Option<PathBuf>,
    /// Draw a chart of bandwidth over size, and of error or time over size
    #[arg(help_heading = RESULTS, long, value_name = "FILE.svg")]
    pub plot: Option<PathBuf>,
    /// Compare with an earlier --json file: print new time over old time for each row. With two files, compare them
    /// and measure nothing; --json then takes the comparison. Without a collective, that is all_reduce
    #[arg(help_heading = RESULTS, long, value_names = ["OLD.json", "NEW.json"], num_args = 1..=2)]
    pub compare: Vec<PathBuf>,
    /// Print candidates, predicted costs and the winner for each size
    #[arg(help_heading = CODEC, long)]
    pub explain: bool,
    /// Print candidates and predicted costs for this many hosts with this many ranks each, such as
    /// 4096x8; verify their schedules and run nothing
    #[arg(help_heading = CODEC, long, value_name = "HOSTSxRANKS", value_parser = parse_hosts,
          conflicts_with_all = ["ranks", "iters", "warmup", "check", "seed", "distribution", "time_limit",
                                "json", "csv", "plot", "compare", "explain", "report", "device"])]
    pub explain_hosts: Option<(usize, usize)>,
    /// Input from .npy files: one for all ranks, one with {rank} in its name, or a folder with one
    /// for each rank. The option may also be given once for each rank
    #[arg(help_heading = INPUT, long, value_name = "FILE|DIR", action = ArgAction::Append,
          conflicts_with_all = ["seed", "distribution"])]
    pub data: Vec<PathBuf>,
    /// Seed of the generated input
    #[arg(help_heading = INPUT, long, default_value_t = 1)]
    pub seed: u64,
    /// Distribution of generated floating-point input
    #[arg(help_heading = INPUT, long, value_enum, default_value_t = Distribution::Gaussian)]
    pub distribution: Distribution,
    /// Stop after about this many seconds: fewer iterations, then fewer sizes
    #[arg(help_heading = CHECKS, long, value_name = "SECONDS", value_parser = parse_seconds)]
    pub time_limit: Option<f64>,
    /// Run the whole comparison: collectives, types, codecs and sizes; on GPUs also with and
    /// without graphs, and beside NCCL with and without symmetric windows. Writes rows and a report
    /// to the folder --output
    #[arg(help_heading = RESULTS, long, conflicts_with_all = ["report", "collective", "graph", "json", "csv", "plot", "compare", "explain", "explain_hosts",
                                           "op", "root", "stepbytes"])]
    pub suite: bool,
    /// Draw a report from the rows of --suite or of --device gpu --json, write it to the file
    /// --output, and run nothing
    #[arg(help_heading = RESULTS, long, value_name = "FILE.jsonl", requires = "output",
          conflicts_with_all = ["collective", "minbytes", "maxbytes", "stepfactor", "stepbytes", "iters",
                                "warmup", "check", "datatype", "op", "root", "ranks", "transport",
                                "algo", "codec", "json", "csv", "plot", "compare", "explain", "data",
                                "seed", "distribution", "time_limit", "device", "gpus", "procs",
                                "ranks_per_gpu", "cyclic", "hosts", "graph", "proto", "vs"])]
    pub report: Option<PathBuf>,
    /// Folder for --suite, or file for --report
    #[arg(help_heading = RESULTS, long, value_name = "DIR|FILE.html")]
    pub output: Option<PathBuf>,
    /// Options that emulate links.
    #[command(flatten)]
    pub emulate: EmulateOptions,
    /// Options for buffers on GPUs.
    #[command(flatten)]
    pub gpu: GpuOptions,
    /// Options of nccl-tests.
    #[command(flatten)]
    pub nccl_tests: NcclTestsOptions,
}

impl BenchOptions {
    /// Refuses output options that have no effect, or that name one file twice.
    ///
    /// # Errors
    /// Returns an error message.
    pub fn check_outputs(&self) -> Result<(), String> {
        let files = [
            ("--json", &self.json),
            ("--csv", &self.csv),
            ("--plot", &self.plot),
            ("-J", &self.nccl_tests.output_file),
        ];
        different(files)?;
        if let (Some(rows), Some(output)) = (&self.report, &self.output)
            && is_same_file(rows, output)
        {
            return Err(format!(
                "--report and --output both name {}: the report would replace its rows",
                output.display()
            ));
        }
        match (&self.output, self.suite || self.report.is_some()) {
            (Some(_), false) => Err(
                "--output is the folder of --suite or the file of --report; --json, --csv and --plot take \
                 files of their own"
                    .into(),
            ),
            (None, true) => Err("--suite writes to a folder: give --output DIR".into()),
            _ => Ok(()),
        }
    }

    /// Returns the sizes to run in ascending order. `natural` is the size of the data files, if
    /// any.
    pub fn sizes(&self, natural: Option<usize>) -> Result<Vec<usize>, String> {
        let default = natural.unwrap_or(32 << 20);
        let low = self.minbytes.unwrap_or(match self.maxbytes {
            Some(high) => default.min(high),
            None => default,
        });
        let high = self.maxbytes.unwrap_or(default.max(low));
        if low > high {
            return Err(format!(
                "-b {low} is larger than -e {high}; sizes go from -b up to -e"
            ));
        }
        let next = |size: usize| match self.stepfactor {
            Some(factor) => size.checked_mul(factor),
            None => size.checked_add(self.stepbytes),
        };
        match self.stepfactor {
            Some(0 | 1) => return Err("-f takes a factor of 2 or more".into()),
            Some(_) if low == 0 => {
                return Err("-f multiplies, so it needs -b of 1 or more; use -i from 0".into());
            }
            None if self.stepbytes == 0 => return Err("-i takes 1 byte or more".into()),
            _ => {}
        }
        let mut sizes = vec![low];
        let mut size = low;
        while let Some(larger) = next(size)
            && larger <= high
        {
            sizes.push(larger);
            size = larger;
            if sizes.len() > 100_000 {
                return Err(format!(
                    "-b {low} -e {high} gives more than 100000 sizes; use -f or a larger -i"
                ));
            }
        }
        Ok(sizes)
    }

    /// Returns the options that influence the measurement, as written on the command line.
    pub fn shown(&self) -> BTreeMap<String, String> {
        let mut shown = BTreeMap::new();
        let mut show = |name: &str, value: String| {
            shown.insert(name.to_string(), value);
        };
        show("iters", self.iters.to_string());
        show("warmup-iters", self.warmup.to_string());
        show("check", self.check.to_string());
        show("seed", self.seed.to_string());
        show("distribution", self.distribution.name());
        let transport = self.transport.0.map_or("auto", |kind| kind.name());
        show("transport", transport.into());
        show(
            "algo",
            self.algo.0.map_or("auto", |algo| algo.name()).into(),
        );
        if !self.codec.is_empty() {
            show("codec", self.codecs());
        }
        if let Some(file) = &self.emulate.emulate {
            show("emulate", file.display().to_string());
            if let Some(scale) = self.emulate.emulate_scale {
                show("emulate-scale", scale.to_string());
            }
        }
        if let Some(seconds) = self.time_limit {
            show("time-limit", seconds.to_string());
        }
        for (name, size) in [
            ("minbytes", self.minbytes),
            ("maxbytes", self.maxbytes),
            ("stepfactor", self.stepfactor),
        ] {
            if let Some(size) = size {
                show(name, size.to_string());
            }
        }
        if !self.data.is_empty() {
            show("data", self.files());
        }
        shown
    }

    /// Returns the names of the data files, separated by blanks.
    pub fn files(&self) -> String {
        let files = self.data.iter().map(|path| path.display().to_string());
        files.collect::<Vec<_>>().join(" ")
    }

    /// Formats the codecs as the option takes them.
    pub fn codecs(&self) -> String {
        let names: Vec<String> = self.codec.iter().map(CodecSetting::to_string).collect();
        match names.as_slice() {
            [] => "default".into(),
            names => names.join(","),
        }
    }

    /// Returns the root ranks that `-r` selects among `nranks` ranks.
    pub fn roots(&self, nranks: usize) -> Result<Vec<usize>, String> {
        if !self.collective.has_root() {
            return match self.root {
                None => Ok(vec![0]),
                Some(_) => Err(format!("{} has no root; leave out -r", self.collective)),
            };
        }
        match self.root.unwrap_or(Root::One(0)) {
            Root::All => Ok((0..nranks).collect()),
            Root::One(root) if root < nranks => Ok(vec![root]),
            Root::One(root) => Err(format!(
                "-r {root}: there are {nranks} ranks, 0 to {}",
                nranks.saturating_sub(1)
            )),
        }
    }

    /// Returns the pairs of type and reduction to run. `native` is the type of the data files, if
    /// any.
    pub fn kinds(&self, native: Option<DType>) -> Result<Vec<(DType, ReduceOp)>, String> {
        let default = Types {
            list: vec![native.unwrap_or(DType::F32)],
            all: false,
        };
        let types = self.datatype.as_ref().unwrap_or(&default);
        let ops = match self.op.list.as_slice() {
            ops if self.collective.reduces() => ops,
            // A collective without a reduction ignores the default `sum` and the value `all`.
            ops if self.op.all || ops == [ReduceOp::Sum] => &[ReduceOp::Sum],
            ops => {
                return Err(format!(
                    "{} reduces nothing, so -o {} has no meaning; leave out -o",
                    self.collective, ops[0]
                ));
            }
        };
        let any = types.all || self.op.all;
        let mut kinds = Vec::new();
        let mut refusal = None;
        for &dtype in &types.list {
            for &op in ops {
                match self.refuses(dtype, op) {
                    None => kinds.push((dtype, op)),
                    why if any => refusal = why,
                    Some(why) => return Err(why),
                }
            }
        }
        match refusal {
            // With `all`, a refusal is an error only if it leaves no combination.
            Some(why) if kinds.is_empty() => Err(why),
            _ => Ok(kinds),
        }
    }

    /// Returns why the codec cannot carry this type and reduction, or `None` if it can.
    fn refuses(&self, dtype: DType, op: ReduceOp) -> Option<String> {
        let codec = self.codec.iter().find(|codec| codec.is_lossy())?;
        if !dtype.has_codecs() {
            return Some(format!(
                "codec {codec} carries f32, f16 and bf16, not {dtype}; leave out --codec or use -d f32"
            ));
        }
        if self.collective.reduces() && !op.is_additive() {
            return Some(format!(
                "codec {codec} carries sums and averages, not {op}; leave out --codec or use -o sum"
            ));
        }
        None
    }
}

/// Returns whether two paths name the same file.
fn is_same_file(one: &Path, other: &Path) -> bool {
    match (one.canonicalize(), other.canonicalize()) {
        (Ok(one), Ok(other)) => one == other,
        _ => one == other,
    }
}

/// Refuses options of which two name the same file.
///
/// # Errors
/// Returns an error message that names both options.
pub fn different<const N: usize>(files: [(&str, &Option<PathBuf>); N]) -> Result<(), String> {
    let given = |(name, path): (&'_ str, &Option<PathBuf>)| Some((name.to_string(), path.clone()?));
    let given: Vec<_> = files.into_iter().filter_map(given).collect();
    for (at, (name, path)) in given.iter().enumerate() {
        if let Some((other, _)) = given[..at].iter().find(|(_, earlier)| earlier == path) {
            return Err(format!(
                "{other} and {name} both name {}; each writes a file of its own",
                path.display()
            ));
        }
    }
    Ok(())
}

impl Distribution {
    /// Returns the name as `--distribution` takes it.
    pub fn name(self) -> String {
        self.to_possible_value()
            .map_or(String::new(), |value| value.get_name().to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::parsed;

    fn parse(line: &str) -> Result<BenchOptions, String> {
        parsed(line)
    }

    #[test]
    fn sizes_are_bytes_with_binary_units() {
        assert_eq!(parse_size("12"), Ok(12));
        assert_eq!(parse_size("8K"), Ok(8192));
        assert_eq!(parse_size("3m"), Ok(3 << 20));
        assert_eq!(parse_size("1G"), Ok(1 << 30));
        for bad in ["", "K", "-1", "1.5M", "1T", "99999999999G", "1MB", "ä"] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn sizes_go_by_factor_or_by_step() {
        let sizes = |line: &str| parse(line).unwrap().sizes(None);
        assert_eq!(
            sizes("all_reduce -b 1K -e 16K -f 4").unwrap(),
            [1024, 4096, 16384]
        );
        assert_eq!(sizes("all_reduce -b 0 -e 5 -i 2").unwrap(), [0, 2, 4]);
        assert_eq!(sizes("all_reduce").unwrap(), [32 << 20]);
        assert_eq!(sizes("all_reduce -b 64M").unwrap(), [64 << 20]);
        assert_eq!(sizes("all_reduce -e 1M").unwrap(), [1 << 20]);
        let natural = parse("all_reduce").unwrap().sizes(Some(1000)).unwrap();
        assert_eq!(natural, [1000]);
        for bad in [
            "all_reduce -b 2 -e 1",
            "all_reduce -b 1 -f 1",
            "all_reduce -b 0 -e 1 -f 2",
            "all_reduce -b 0 -e 1 -i 0",
            "all_reduce -b 0 -e 1G -i 1",
        ] {
            assert!(sizes(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn names_of_nccl_tests_are_understood() {
        let options = parse("alltoall -d float -o mulsum -r all --algo direct").unwrap();
        assert_eq!(options.collective, Collective::AllToAll);
        assert_eq!(options.datatype.unwrap().list, [DType::F32]);
        assert_eq!(options.op.list[0].name(), "premulsum");
        assert_eq!(options.algo.0, Some(Algorithm::Direct));
    }

    #[test]
    fn impossible_options_are_refused_with_a_message() {
        for (line, word) in [
            ("all_reduze", "all_reduce"),
            ("all_reduce -d f31", "bf16"),
            ("all_reduce -o xor", "premulsum".trim_start_matches("pre")),
            ("all_reduce --codec int8", "linear8"),
            ("all_reduce --codec linear8:block=48", "power of two"),
            ("all_reduce --transport ib", "shm"),
            ("all_reduce --algo magic", "hierarchical"),
            ("all_reduce -w 1000001", "1000000"),
            ("all_reduce --explain-hosts 4x2 --ranks 7", "cannot be used"),
            ("all_reduce --explain-hosts 4x2 --json x", "cannot be used"),
            (
                "all_reduce --explain-hosts 4x2 --device gpu",
                "cannot be used",
            ),
            ("--suite --output x -o max", "cannot be used"),
            ("--suite --output x -r 1", "cannot be used"),
            ("--report x --output y --json z", "cannot be used"),
            ("--report x --output y -n 3", "cannot be used"),
            ("--report x --output y --graph", "cannot be used"),
            ("--report x --output y --gpus 2", "cannot be used"),
            ("--report x --output y --procs", "cannot be used"),
            ("--report x --output y --vs z", "cannot be used"),
            ("all_reduce --data x --seed 1", "cannot be used"),
            ("all_reduce --data x --distribution heavy", "cannot be used"),
            ("all_reduce -n 0", "1"),
            ("all_reduce --time-limit -2", "unexpected"),
        ] {
            let error = parse(line).unwrap_err();
            assert!(error.contains(word), "{line}: {error}");
        }
        let kinds = |line: &str| parse(line).unwrap().kinds(None);
        assert!(kinds("all_reduce --codec linear8 -d i32").is_err());
        assert!(kinds("all_reduce --codec linear8 -o max").is_err());
        assert_eq!(
            kinds("all_reduce --codec linear8 -d all -o all")
                .unwrap()
                .len(),
            3 * 3
        );
        assert_eq!(kinds("all_reduce -d all -o all").unwrap().len(), 12 * 6);
        assert!(parse("broadcast -r 4").unwrap().roots(4).is_err());
        assert_eq!(
            parse("broadcast -r all").unwrap().roots(3).unwrap().len(),
            3
        );
        for all in ["broadcast -r -1", "broadcast --root=-1"] {
            assert_eq!(parse(all).unwrap().roots(3).unwrap(), [0, 1, 2]);
        }
        assert_eq!(parse("all_reduce").unwrap().roots(2).unwrap(), [0]);
        let none = parse("all_reduce -r 7").unwrap().roots(8).unwrap_err();
        assert!(none.contains("has no root"), "{none}");
        let twice = parse("all_reduce --json x.out --csv x.out").unwrap();
        assert!(
            twice
                .check_outputs()
                .unwrap_err()
                .contains("--json and --csv")
        );
        for same in ["Cargo.toml", "./Cargo.toml"] {
            let over = parse(&format!("--report Cargo.toml --output {same}")).unwrap();
            let error = over.check_outputs().unwrap_err();
            assert!(error.contains("replace its rows"), "{error}");
        }
        // An option that is given its default value changes nothing.
        for fine in [
            "all_reduce --explain-hosts 4x2 --codec linear8 --algo ring",
            "--suite --output x -n 3",
            "--report x --output y",
        ] {
            parse(fine).unwrap().check_outputs().unwrap();
        }
    }
}
