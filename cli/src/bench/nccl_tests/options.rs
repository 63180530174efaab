//! Option letters of nccl-tests beyond those of [`BenchOptions`]. Each is honoured, or refused with a sentence
//! if it would change what is measured.

use super::super::gpu::options::{BufferPlace, GpuOptions};
use super::super::options::BenchOptions;
use cinch::Config;
use cinch::config::Origin;
use clap::{Args, ValueEnum};
use std::path::PathBuf;

/// Largest number of cycles of `-N`.
const MOST_CYCLES: i64 = 1_000_000;

/// Columns of the table on standard output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum TableFormat {
    /// Columns of nccl-tests, and columns about compression, errors and kernels.
    #[default]
    Cinch,
    /// Columns of nccl-tests alone, in its widths.
    NcclTests,
}

/// Options that nccl-tests has and `cinch bench` would not need.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Options of nccl-tests")]
pub struct NcclTestsOptions {
    /// Columns of the table: cinch's, or those of nccl-tests for programs that read them
    #[arg(long, value_enum, default_value_t = TableFormat::Cinch)]
    pub format: TableFormat,
    /// GPUs of each thread of -t: as --device gpu --gpus N
    #[arg(short = 'g', long, value_name = "N", conflicts_with_all = ["gpus", "ranks"],
          value_parser = clap::value_parser!(u32).range(1..=64))]
    pub ngpus: Option<u32>,
    /// Threads, each with the GPUs of -g
    #[arg(short = 't', long, value_name = "N", conflicts_with_all = ["gpus", "ranks"],
          value_parser = clap::value_parser!(u32).range(1..=64))]
    pub nthreads: Option<u32>,
    /// Times to run all sizes
    #[arg(
        short = 'N',
        long,
        alias = "run_cycles",
        value_name = "N",
        default_value_t = 1,
        allow_negative_numbers = true
    )]
    pub run_cycles: i64,
    /// Measure replays of CUDA graphs, if not 0: as --graph
    #[arg(short = 'G', long, value_name = "N", default_value_t = 0)]
    pub cudagraph: u32,
    /// Print the time in UTC in each row, with --format nccl-tests
    #[arg(short = 'S', long, alias = "report_timestamps", value_name = "0|1", default_value_t = 0,
          value_parser = clap::value_parser!(u8).range(0..=1))]
    pub report_timestamps: u8,
    /// Write results in the JSON form of nccl-tests
    #[arg(short = 'J', long, alias = "output_file", value_name = "FILE.json")]
    pub output_file: Option<PathBuf>,
    /// Time of each iteration in the file of -J
    #[arg(short = 'I', long, alias = "per_iter_timing", value_name = "0|1", default_value_t = 0,
          requires = "output_file", value_parser = clap::value_parser!(u8).range(0..=1))]
    pub per_iter_timing: u8,
    /// Leading iterations that statistics of -I leave out
    #[arg(
        short = 'K',
        long,
        alias = "per_iter_skip",
        value_name = "N",
        default_value_t = 0,
        requires = "output_file"
    )]
    pub per_iter_skip: usize,
    /// Seconds after which a call fails: as CINCH_TIMEOUT
    #[arg(short = 'T', long, value_name = "SECONDS")]
    pub timeout: Option<u32>,
    /// Accepted: ranks are always created in parallel
    #[arg(
        short = 'p',
        long,
        alias = "parallel_init",
        value_name = "0|1",
        default_value_t = 1,
        hide = true
    )]
    pub parallel_init: u8,
    /// Calls in one group in each iteration: 1
    #[arg(
        short = 'm',
        long,
        alias = "agg_iters",
        value_name = "N",
        default_value_t = 1,
        hide = true
    )]
    pub agg_iters: u32,
    /// Rank whose time is reported: 3, the slowest
    #[arg(
        short = 'a',
        long,
        value_name = "0..3",
        default_value_t = 3,
        hide = true
    )]
    pub average: u32,
    /// Wait after each iteration
    #[arg(
        short = 'z',
        long,
        value_name = "0..3",
        default_value_t = 0,
        hide = true
    )]
    pub blocking: u32,
    /// Use the default stream
    #[arg(
        short = 'y',
        long,
        alias = "stream_null",
        value_name = "0|1",
        default_value_t = 0,
        hide = true
    )]
    pub stream_null: u32,
    /// Report the time of the processor
    #[arg(
        short = 'C',
        long,
        alias = "report_cputime",
        value_name = "0|1",
        default_value_t = 0,
        hide = true
    )]
    pub report_cputime: u32,
    /// Register buffers
    #[arg(
        short = 'R',
        long,
        alias = "local_register",
        value_name = "0..2",
        default_value_t = 0,
        hide = true
    )]
    pub local_register: u32,
    /// CTA policy
    #[arg(
        short = 'x',
        long,
        alias = "cta_policy",
        value_name = "N",
        default_value_t = 0,
        hide = true
    )]
    pub cta_policy: u32,
    /// Implementation in a kernel of the test
    #[arg(
        short = 'D',
        long,
        alias = "device_implementation",
        value_name = "N",
        default_value_t = 0,
        hide = true
    )]
    pub device_implementation: u32,
    /// CTAs of that implementation
    #[arg(
        short = 'V',
        long,
        alias = "device_cta_count",
        value_name = "N",
        default_value_t = 16,
        hide = true
    )]
    pub device_cta_count: u32,
    /// Report memory
    #[arg(
        short = 'M',
        long,
        value_name = "0|1",
        default_value_t = 0,
        hide = true
    )]
    pub memory: u32,
    /// Index of the first element in the buffers
    #[arg(short = 'u', long, value_name = "N", default_value_t = 0, hide = true)]
    pub unalign: u32,
}

impl NcclTestsOptions {
    /// Returns why an option cannot be honoured, and what to use instead; `None` if all can.
    fn refusal(&self, on_gpus: bool) -> Option<String> {
        // A call on host memory returns when it is done, after a barrier.
        let most_blocking = if on_gpus { 0 } else { 3 };
        let refused = [
            (
                'm',
                self.agg_iters,
                1,
                1,
                "each iteration is one call; leave out -m",
            ),
            (
                'a',
                self.average,
                3,
                3,
                "times are those of the slowest rank, which -a 3 reports; leave out -a",
            ),
            (
                'z',
                self.blocking,
                0,
                most_blocking,
                "calls on GPUs are queued without waiting; leave out -z",
            ),
            (
                'y',
                self.stream_null,
                0,
                0,
                "calls run on a stream of their own; leave out -y",
            ),
            (
                'C',
                self.report_cputime,
                0,
                0,
                "times are those of the calls, not of the processor; leave out -C",
            ),
            (
                'R',
                self.local_register,
                0,
                1,
                "cinch has no symmetric windows; --suite measures NCCL's beside it",
            ),
            (
                'x',
                self.cta_policy,
                0,
                0,
                "CINCH_CHANNELS sets the number of blocks of a kernel; leave out -x",
            ),
            (
                'D',
                self.device_implementation,
                0,
                0,
                "the bench calls the library only; leave out -D",
            ),
            (
                'V',
                self.device_cta_count,
                16,
                16,
                "the bench calls the library only; leave out -V",
            ),
            (
                'M',
                self.memory,
                0,
                0,
                "`cinch info` prints the memory of a communicator; leave out -M",
            ),
            ('u', self.unalign, 0, 0, "buffers are aligned; leave out -u"),
        ];
        let refused = refused
            .into_iter()
            .find(|(_, value, least, most, _)| value < least || value > most);
        if let Some((letter, value, .., why)) = refused {
            return Some(format!("-{letter} {value}: {why}"));
        }
        match self.run_cycles {
            0 => Some("-N 0 never ends: give the number of cycles".into()),
            1..=MOST_CYCLES => None,
            other => Some(format!(
                "-N {other}: the number of cycles is 1 to {MOST_CYCLES}"
            )),
        }
    }
}

impl BenchOptions {
    /// Returns the options with the letters of nccl-tests turned into cinch's own options and settings.
    ///
    /// # Errors
    /// Returns an error message that names the letter and what to use instead.
    pub fn with_nccl_tests_letters(&self, config: &mut Config) -> Result<BenchOptions, String> {
        let mut options = self.clone();
        let letters = &self.nccl_tests;
        if letters.ngpus.is_some() || letters.nthreads.is_some() {
            let gpus = letters.ngpus.unwrap_or(1) * letters.nthreads.unwrap_or(1);
            options.gpu = GpuOptions {
                device: BufferPlace::Gpu,
                gpus: Some(gpus),
                ..options.gpu
            };
        }
        options.gpu.graph |= letters.cudagraph > 0;
        let on_gpus = options.gpu.device == BufferPlace::Gpu;
        if let Some(refusal) = letters.refusal(on_gpus) {
            return Err(refusal);
        }
        if let Some(seconds) = letters.timeout {
            config
                .set("CINCH_TIMEOUT", &seconds.to_string(), Origin::Program)
                .map_err(|error| format!("-T {seconds}: {}", error.message()))?;
        }
        Ok(options)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::parsed;

    fn adopted(line: &str) -> Result<BenchOptions, String> {
        let options: BenchOptions = parsed(&format!("all_reduce {line}"))?;
        options.with_nccl_tests_letters(&mut Config::default())
    }

    #[test]
    fn command_lines_of_nccl_tests_are_accepted() {
        for line in [
            "-b 8 -e 128M -f 2 -g 8",
            "-b 1M -e 1G -f 2 -g 1 -c 1 -n 20 -w 5 -G 1 -d float",
            "--minbytes 8 --maxbytes 1K --stepfactor 2 --ngpus 2 --nthreads 2 --iters 5 --warmup_iters 1",
            "--run_cycles 3 --parallel_init 1 --check 0 --op sum --datatype half --root 0 --blocking 0",
            "--timeout 10 --average 3 --agg_iters 1 --stream_null 0 --local_register 1 --unalign 0",
            "--report_timestamps 1 --output_file x.json --per_iter_timing 1 --per_iter_skip 2",
        ] {
            assert!(adopted(line).is_ok(), "{line}: {:?}", adopted(line).err());
        }
    }

    #[test]
    fn letters_become_options_of_cinch() {
        let options = adopted("-g 2 -t 4 -G 3").unwrap();
        assert_eq!(options.gpu.device, BufferPlace::Gpu);
        assert_eq!((options.gpu.gpus, options.gpu.graph), (Some(8), true));
        let plain = adopted("").unwrap();
        assert_eq!(
            (plain.gpu.device, plain.gpu.graph),
            (BufferPlace::Host, false)
        );
        let mut config = Config::default();
        let line: BenchOptions = parsed("all_reduce -T 7").unwrap();
        line.with_nccl_tests_letters(&mut config).unwrap();
        assert_eq!(config.timeout.as_secs(), 7);
    }

    #[test]
    fn letters_that_would_change_the_measurement_are_refused_by_name() {
        for line in [
            "-m 4",
            "-a 1",
            "-g 1 -z 1",
            "-y 1",
            "-C 1",
            "-R 2",
            "-x 1",
            "-D 1",
            "-V 8",
            "-M 1",
            "-u 1",
            "-N 0",
            "-N -1",
        ] {
            let letter = &line[line.rfind('-').unwrap().min(line.len() - 4)..];
            let error = adopted(line).expect_err(line);
            assert!(
                error.starts_with(letter.trim()) || error.starts_with("-N -1"),
                "{line}: {error}"
            );
        }
        assert!(adopted("-z 3").is_ok(), "calls on host memory block");
        assert!(adopted("-g 1 --gpus 2").is_err() && adopted("-g 1 --ranks 2").is_err());
    }
}
