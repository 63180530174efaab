//! Option letters of nccl-tests beyond those that `cinch bench` shares with it. Each is honoured, or refused with a
//! sentence if it would change what is measured.

use clap::{Args, ValueEnum};
use std::ops::RangeInclusive;
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

/// A letter of which only some values describe what the bench does.
struct FixedLetter {
    letter: char,
    value: fn(&NcclTestsOptions) -> u32,
    /// Values that are accepted for buffers on GPUs, and for buffers in host memory.
    accepted: [RangeInclusive<u32>; 2],
    /// Why other values are refused, and what to use instead.
    reason: &'static str,
}

/// Declares a letter with equal values for both kinds of buffers.
const fn fixed(
    letter: char,
    value: fn(&NcclTestsOptions) -> u32,
    (least, most): (u32, u32),
    reason: &'static str,
) -> FixedLetter {
    FixedLetter {
        letter,
        value,
        accepted: [least..=most, least..=most],
        reason,
    }
}

const CALLS_ONLY: &str = "the bench calls the library only; leave it out";

static FIXED: [FixedLetter; 11] = [
    fixed(
        'm',
        |it| it.agg_iters,
        (1, 1),
        "each iteration is one call; leave it out",
    ),
    fixed(
        'a',
        |it| it.average,
        (3, 3),
        "times are those of the slowest rank (-a 3); leave it out",
    ),
    FixedLetter {
        // A call on host memory starts after a barrier, and returns when it is done.
        accepted: [0..=0, 0..=3],
        ..fixed(
            'z',
            |it| it.blocking,
            (0, 0),
            "calls on GPUs are queued without waiting; leave it out",
        )
    },
    fixed(
        'y',
        |it| it.stream_null,
        (0, 0),
        "calls run on a stream of their own; leave it out",
    ),
    fixed(
        'C',
        |it| it.report_cputime,
        (0, 0),
        "times are those of calls, not of the processor; leave it out",
    ),
    fixed(
        'R',
        |it| it.local_register,
        (0, 1),
        "cinch has no symmetric windows; --suite measures NCCL's beside it",
    ),
    fixed(
        'x',
        |it| it.cta_policy,
        (0, 0),
        "CINCH_CHANNELS sets the number of blocks; leave it out",
    ),
    fixed('D', |it| it.device_implementation, (0, 0), CALLS_ONLY),
    fixed('V', |it| it.device_cta_count, (16, 16), CALLS_ONLY),
    fixed(
        'M',
        |it| it.memory,
        (0, 0),
        "`cinch info` prints the memory of a communicator; leave it out",
    ),
    fixed(
        'u',
        |it| it.unalign,
        (0, 0),
        "buffers are aligned; leave it out",
    ),
];

impl NcclTestsOptions {
    /// Returns why an option cannot be honoured, and what to use instead; `None` if all can.
    pub fn refusal(&self, on_gpus: bool) -> Option<String> {
        for fixed in &FIXED {
            let value = (fixed.value)(self);
            if !fixed.accepted[usize::from(!on_gpus)].contains(&value) {
                return Some(format!("-{} {value}: {}", fixed.letter, fixed.reason));
            }
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
