//! The command line tool: starts ranks, measures collectives, and shows versions, machine and
//! settings.
//!
//! Exit codes: 0 for success; 1 for a wrong value, or ranks whose outputs differ; 2 for invalid
//! options; 3 for a failure while running. `cinch run` returns the first failing rank's code.

mod advise;
#[allow(unsafe_code)]
mod arrays;
mod bench;
mod doctor;
mod first_steps;
mod forward;
mod gpus;
mod host_file;
mod hosts;
mod info;
mod join;
mod launch;
mod machine;
mod master;
mod npy;
mod pages;
mod papers;
mod plot;
mod preload;
mod ps;
mod run;
#[cfg(test)]
mod testing;
mod top;
mod topo;

use cinch::Config;
use clap::{Parser, Subcommand};
use papers::{codecs, predict, proofs, table2};
use std::ffi::OsString;
use std::io::{self, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::ExitCode;

/// Exit code for wrong values, or for ranks whose outputs differ.
const WRONG: i32 = 1;
/// Exit code for invalid options.
const USAGE: i32 = 2;
/// Exit code for a failure while the command runs.
const FAILURE: i32 = 3;

/// An exit code, or the exit code and message of a failure.
type ExitResult<T = i32> = Result<T, (i32, String)>;

/// Collective communication with compression inside every pipeline chunk
#[derive(Parser)]
#[command(name = "cinch", version, max_term_width = 100)]
struct Cli {
    /// Without a command, the tool shows first steps.
    #[command(subcommand)]
    command: Option<ToolCommand>,
}

#[derive(Subcommand)]
enum ToolCommand {
    /// Start a program as ranks, on this host or over ssh on the hosts in a file
    ///
    /// Each rank gets RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, and MASTER_ADDR and MASTER_PORT unless they
    /// are set, so torch's init_method "env://" works without torchrun.
    Run(run::RunOptions),
    /// Measure a collective and check its results
    ///
    /// Option letters, sizes and columns are those of nccl-tests. Exit code 0: all results are
    /// right; 1: a wrong value, or ranks whose outputs differ; 2: invalid options; 3: a failure.
    #[command(after_help = bench::options::EXAMPLES)]
    Bench(Box<bench::options::BenchOptions>),
    /// Measure kernel variants on GPUs and write a tuning table
    ///
    /// CINCH_TUNING=FILE makes the library use the table; it can also be built into the library:
    /// see `manual::tuning`.
    Tune(Box<bench::gpu::tune::TuneOptions>),
    /// Show versions, machine, GPUs, transports and settings; as a rank, also the communicator
    Info(InfoOptions),
    /// Check this machine, hosts or a job's environment, and advise on each problem
    ///
    /// Checks NVIDIA's driver and GPUs, limits, interfaces, RDMA ports, clocks, the libnccl that programs find, and
    /// environment variables. Exit code 1: a result is an error.
    Doctor(doctor::DoctorOptions),
    /// Show what running ranks do, and which of them others wait for
    ///
    /// Shows the processes of this user on this host that run with CINCH_PS=1.
    Ps(ps::PsOptions),
    /// Show how much running ranks communicate, and for which ranks they wait, again and again
    ///
    /// Shows the processes of this user on this host that run with CINCH_PS=1.
    Top(top::TopOptions),
    /// Read a run's counters, and predict which codec rules would save how much time
    ///
    /// Rank processes write counters with CINCH_METRICS_FILE. Savings are predicted by the cost model that `cinch
    /// bench --explain` shows.
    Advise(advise::AdviseOptions),
    /// Show a machine's topology and what schedules cost on it: paths, groups, rings, predictions
    Topo(topo::TopoOptions),
    /// List codecs, or with --table show their errors beside the published ones
    Codecs(CodecsOptions),
    /// Measure codecs on arrays in GPU memory, and compressed copies between GPU and host
    ///
    /// Bandwidths are printed beside those of a plain copy in the same run. Exit code 1: elements
    /// that differ from those of the same codec on the host.
    Arrays(arrays::ArraysOptions),
    /// Predict the speed-up of training; without options, print the published model and its figures
    ///
    /// With --layers and costs, predict which codec shortens a step at which rank count.
    Predict(Box<predict::PredictOptions>),
    /// Print a script that completes cinch's options in a shell
    ///
    /// For bash: `cinch completions bash > ~/.local/share/bash-completion/completions/cinch`
    Completions {
        /// Shell that reads the script
        shell: clap_complete::Shell,
    },
    /// Write a man page of the tool and of each subcommand into a folder
    #[command(hide = true)]
    ManPages {
        /// Folder, which must exist
        folder: PathBuf,
    },
}

#[derive(clap::Args)]
struct InfoOptions {
    /// Measure bandwidth and latency between all pairs of GPUs
    #[arg(long, conflicts_with = "preload")]
    probe: bool,
    /// Show which libnccl a program uses: the process --pid, or the program behind --. That program
    /// runs with the drop-in libnccl, found beside this tool or at PATH. Without either, print what
    /// `cinch run --preload` would set
    #[arg(long, value_name = "PATH", num_args = 0..=1, require_equals = true)]
    preload: Option<Option<PathBuf>>,
    /// Process id to inspect, with its descendants
    #[arg(long, requires = "preload", conflicts_with = "command")]
    pid: Option<u32>,
    /// Program and its arguments
    #[arg(last = true, requires = "preload", value_name = "PROGRAM")]
    command: Vec<OsString>,
}

#[derive(clap::Args)]
struct CodecsOptions {
    /// Print mean errors on random samples of distributions
    #[arg(long, group = "work")]
    table: bool,
    /// Print the cells of the published table, each with the explanation of its value
    #[arg(long, group = "work")]
    table2: bool,
    /// Number of samples from each distribution
    #[arg(long, default_value_t = 10_000_000, value_parser = parse_samples, requires = "work",
          conflicts_with = "check")]
    samples: usize,
    /// Seed of the samples and bit patterns
    #[arg(long, default_value_t = 1, requires = "work")]
    seed: u64,
    /// Compare SIMD and scalar code on this many random bit patterns
    #[arg(long, value_name = "N", group = "work", value_parser = clap::value_parser!(u64).range(1..))]
    check: Option<u64>,
    /// Search for errors beyond the documented bounds, by hill climbing. Exit code 1: a bound does not hold
    #[arg(long, group = "work")]
    attack: bool,
    /// Number of blocks that an attack encodes with each codec
    #[arg(long, value_name = "N", default_value_t = 1_000_000, requires = "attack",
          value_parser = clap::value_parser!(u64).range(1..))]
    evaluations: u64,
    /// Compare the codes of all 2^32 fp32 numbers with exact arithmetic; takes minutes. Exit code 1: a wrong code
    #[arg(long, group = "work")]
    exhaustive: bool,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    cinch::sys::process::restore_child_signal();
    let Some(command) = cli.command else {
        return exit_code(finish(first_steps::write(&mut io::stdout().lock())));
    };
    let code = match command {
        ToolCommand::Run(options) => config().and_then(|config| run::run(&options, config)),
        ToolCommand::Bench(options) => config().and_then(|config| bench::main(&options, config)),
        ToolCommand::Tune(options) => {
            config().and_then(|config| bench::gpu::tune::main(&options, config))
        }
        ToolCommand::Info(options) if options.preload.is_some() => show_preload(&options),
        ToolCommand::Info(options) => config().and_then(|config| info(&options, config)),
        ToolCommand::Doctor(options) => doctor::run(&options),
        ToolCommand::Advise(options) => advise::run(&options),
        ToolCommand::Topo(options) => config().and_then(|config| topo::main(&options, &config)),
        ToolCommand::Top(options) => top::run(&options, &mut io::stdout().lock()),
        ToolCommand::Ps(options) => ps::run(&options, &mut io::stdout().lock()),
        ToolCommand::Codecs(options) => codecs(&options),
        ToolCommand::Arrays(options) => arrays::main(&options),
        ToolCommand::Predict(options) => {
            predict::main(&options, &mut io::stdout().lock()).map(|()| 0)
        }
        ToolCommand::Completions { shell } => {
            finish(pages::write_completions(shell, &mut io::stdout().lock()))
        }
        ToolCommand::ManPages { folder } => pages::write_man_pages(&folder),
    };
    exit_code(code)
}

/// Prints the error message of a failure, and returns the exit code.
fn exit_code(code: ExitResult) -> ExitCode {
    match code {
        Ok(code) => ExitCode::from(code.clamp(0, 255) as u8),
        Err((code, sentence)) => {
            // A write error is ignored, because there is nowhere else to report it. The message is
            // one write, so that messages of several ranks do not mix.
            let line = format!("cinch: {sentence}\n");
            let _ = io::stderr().write_all(line.as_bytes());
            ExitCode::from(code as u8)
        }
    }
}

/// Reads the settings from the environment, and warns about `CINCH_` names that are no setting.
fn config() -> ExitResult<Config> {
    let config = Config::from_env().map_err(|error| (USAGE, error.to_string()))?;
    // Ranks print no warning, because the tool that started them has printed it.
    if join::launched_size().is_some() {
        return Ok(config);
    }
    for name in Config::unknown_names() {
        let _ = writeln!(io::stderr(), "cinch: warning: no setting is called {name}");
    }
    Ok(config)
}

fn info(options: &InfoOptions, config: Config) -> ExitResult {
    let comm = match join::launcher() {
        Some(_) => Some(join::join(config.clone()).map_err(|error| (FAILURE, error.to_string()))?),
        None => None,
    };
    let mut out = io::stdout().lock();
    let written = match &comm {
        Some(comm) if comm.rank() != 0 => Ok(()),
        Some(comm) => info::write(&config, options.probe, &mut out)
            .and_then(|()| info::write_communicator(comm, &mut out)),
        None => info::write(&config, options.probe, &mut out),
    };
    if let Some(comm) = comm {
        comm.finalize()
            .map_err(|error| (FAILURE, error.to_string()))?;
    }
    finish(written)
}

/// Shows which libnccl a program uses. The exit code is the program's if that is not 0; otherwise 0
/// if only the drop-in is used, and 1 if not.
fn show_preload(options: &InfoOptions) -> ExitResult {
    let failure = |sentence| (FAILURE, sentence);
    let mut out = io::stdout().lock();
    let verdict = |ours| if ours { 0 } else { WRONG };
    if let Some(pid) = options.pid {
        return preload::show_process(pid, &mut out)
            .map(verdict)
            .map_err(failure);
    }
    let given = options.preload.as_ref().and_then(Option::as_deref);
    let library = preload::find(given).map_err(failure)?;
    if options.command.is_empty() {
        let mut lines = preload::variables(&library, std::env::var_os("LD_PRELOAD")).into_iter();
        return finish(
            lines.try_for_each(|(name, value)| writeln!(out, "{name}={}", value.display())),
        );
    }
    let (ours, status) =
        preload::show_program(&options.command, &library, &mut out).map_err(failure)?;
    let code = status.code().unwrap_or(128 + status.signal().unwrap_or(0));
    Ok(if code == 0 { verdict(ours) } else { code })
}

fn codecs(options: &CodecsOptions) -> ExitResult {
    let mut out = io::stdout().lock();
    let written = match (options.table, options.check) {
        _ if options.attack => proofs::run_attacks(options.evaluations, options.seed, &mut out),
        _ if options.exhaustive => proofs::run_exhaustive(&mut out),
        (_, Some(patterns)) => codecs::check(patterns, options.seed, &mut out),
        _ if options.table2 => table2::run(options.samples, options.seed, &mut out),
        (true, None) => codecs::run(options.samples, options.seed, &mut out),
        (false, None) => list_codecs(&mut out),
    };
    // Tables return an error of kind `Other` if a figure exceeds its tolerance.
    match written {
        Err(error) if error.kind() == io::ErrorKind::Other => Err((WRONG, error.to_string())),
        written => finish(written),
    }
}

fn list_codecs(out: &mut dyn Write) -> io::Result<()> {
    use cinch::types::CodecKind;
    use cinch::{CodecSpec, DType};
    writeln!(
        out,
        "{:<12} {:>13} {:>13}  parameters",
        "codec", "bytes/element", "ratio to f32"
    )?;
    for kind in CodecKind::ALL {
        let bytes = bench::metrics::bytes_per_element(CodecSpec::of(kind), DType::F32);
        let parameters = kind.parameters().to_string();
        let name = kind.name();
        writeln!(
            out,
            "{name:<12} {bytes:>13.4} {:>13.4}  {parameters}",
            4.0 / bytes
        )?;
    }
    Ok(())
}

/// Turns a failed write into an exit code. A reader that closes the pipe early, as `head` does,
/// causes no failure.
fn finish(written: io::Result<()>) -> ExitResult {
    match written {
        Ok(()) => Ok(0),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(0),
        Err(error) => Err((FAILURE, format!("standard output: {error}"))),
    }
}

fn parse_samples(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(samples @ 1000..=1_000_000_000) => Ok(samples),
        _ => Err("must be a number from 1000 to 1000000000".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
        let cli = Cli::try_parse_from(["cinch", "run", "-n", "2", "--", "prog", "-x", "--n"]);
        assert!(cli.is_ok());
        for line in [
            "codecs --check 1000 --table",
            "codecs --samples 1000",
            "codecs --check 0",
            "codecs --check 1000 --samples 1000",
            "predict --ranks 4",
        ] {
            let words = std::iter::once("cinch").chain(line.split(' '));
            let refused = Cli::try_parse_from(words).err();
            assert_eq!(refused.expect(line).exit_code(), USAGE, "{line}");
        }
        for line in ["codecs --table --samples 1000", "codecs --check 1 --seed 3"] {
            let words = std::iter::once("cinch").chain(line.split(' '));
            assert!(Cli::try_parse_from(words).is_ok(), "{line}");
        }
        assert_eq!(
            Cli::try_parse_from(["cinch", "run"])
                .err()
                .unwrap()
                .exit_code(),
            USAGE
        );
    }

    #[test]
    fn listed_codecs_have_their_ratio() {
        let mut out = Vec::new();
        list_codecs(&mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        let linear = text
            .lines()
            .find(|line| line.starts_with("linear8"))
            .unwrap();
        assert!(
            linear.contains("1.0156") && linear.contains("3.9385"),
            "{linear}"
        );
    }
}
