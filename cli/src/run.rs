//! `cinch run`: starts ranks on this host (see `launch`), or through a `cinch run --agent` on each
//! of several hosts (see `hosts`).
//!
//! Each rank gets `RANK`, `WORLD_SIZE`, `LOCAL_RANK` and `LOCAL_WORLD_SIZE`, as torchrun sets them, and the
//! variables of `master`.

use super::launch::{LocalLaunch, PEER_EXIT_TIMEOUT, one_core_each};
use super::preload;
use super::{FAILURE, USAGE};
use cinch::Config;
use cinch::config::Origin;
use cinch::sys::cpu;
use cinch::types::TransportKind;
use clap::Args;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

/// Options of `cinch run`.
#[derive(Args, Clone, Debug)]
#[command(group = clap::ArgGroup::new("starts").multiple(true))]
pub struct RunOptions {
    /// Number of ranks to start [default with --hosts: all slots]. With --preload and without -n,
    /// this process becomes the program
    #[arg(short = 'n', long = "ranks", group = "starts",
          required_unless_present_any = ["hosts", "agent", "preload"],
          value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(super) ranks: Option<u32>,
    /// Start the ranks over ssh on the hosts in this file, which has lines of `HOST [slots=N]`
    #[arg(long, value_name = "FILE", group = "starts")]
    pub(super) hosts: Option<std::path::PathBuf>,
    /// Program that runs a command on a host, called with the host and the command. If its name is
    /// ssh, it also gets `-o BatchMode=yes`, as it cannot ask questions
    #[arg(
        long,
        value_name = "PROGRAM",
        default_value = "ssh",
        requires = "hosts"
    )]
    pub(super) ssh: OsString,
    /// Path of cinch on the other hosts [default: the path on this host]
    #[arg(long, value_name = "PATH", requires = "hosts")]
    pub(super) remote_cinch: Option<String>,
    /// Name of a variable to pass to ranks on other hosts, in addition to all that begin with
    /// CINCH_
    #[arg(long = "env", value_name = "NAME", requires = "hosts")]
    pub(super) environment: Vec<String>,
    /// Run as the agent that --hosts starts on each host
    #[arg(long, hide = true)]
    agent: bool,
    /// Preload the drop-in libnccl.so.2 that is beside this tool or at PATH; with --hosts, beside
    /// the tool or at PATH on each host
    #[arg(long, value_name = "PATH", num_args = 0..=1, require_equals = true)]
    pub(super) preload: Option<Option<PathBuf>>,
    #[arg(long, default_value = "auto", value_parser = super::bench::values::parse_transport,
          help = super::bench::values::transport_help(), requires = "starts")]
    pub(super) transport: super::bench::values::Named<TransportKind>,
    /// Print the rank in front of each line of output
    #[arg(long, requires = "starts")]
    pub(super) label: bool,
    /// Bind each rank to a core of its own; an error if there are fewer cores than ranks
    #[arg(long, requires = "starts")]
    pub(super) bind: bool,
    /// Seconds that the other ranks have to end by themselves after one has failed
    #[arg(long = "grace", value_name = "SECONDS", default_value_t = PEER_EXIT_TIMEOUT.as_secs_f64(), value_parser = parse_exit_timeout,
          requires = "starts")]
    pub(super) exit_timeout: f64,
    /// Program and its arguments
    #[arg(
        required_unless_present = "agent",
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "PROGRAM"
    )]
    pub(super) command: Vec<OsString>,
}

/// Runs `cinch run` and returns its exit code.
///
/// # Errors
/// Returns an exit code and an error message if options are invalid or ranks cannot be started.
pub fn run(options: &RunOptions, mut config: Config) -> crate::ExitResult {
    let usage = |sentence: String| (USAGE, sentence);
    let failure = |sentence: String| (FAILURE, sentence);
    if options.agent {
        return super::hosts::agent().map_err(failure);
    }
    let mut transport = None;
    if let Some(kind) = options.transport.0 {
        transport = Some(("CINCH_TRANSPORT".to_string(), kind.name().to_string()));
        config
            .set("CINCH_TRANSPORT", kind.name(), Origin::Program)
            .map_err(|error| usage(error.to_string()))?;
    }
    if let Some(file) = &options.hosts {
        // The drop-in is not located here, because each host locates its own.
        let variables = transport.into_iter().collect();
        return super::hosts::run(options, file, variables, &config);
    }
    let library = match &options.preload {
        Some(given) => Some(preload::find(given.as_deref()).map_err(failure)?),
        None => None,
    };
    if let (Some(library), None) = (&library, options.ranks) {
        return preload::become_program(&options.command, library).map_err(failure);
    }
    let earlier = std::env::var_os("LD_PRELOAD");
    let preloading = library.map(|library| preload::variables(&library, earlier));
    let transport = transport.map(|(name, value)| (name, value.into()));
    let ranks = options.ranks.unwrap_or(1) as usize;
    let launch = LocalLaunch {
        variables: preloading.into_iter().flatten().chain(transport).collect(),
        label: options.label,
        cores: bound(options.bind, ranks).map_err(usage)?,
        exit_timeout: Duration::from_secs_f64(options.exit_timeout),
        ..LocalLaunch::new(options.command.clone(), ranks)
    };
    launch.run_with_rendezvous(&config).map_err(failure)
}

/// Returns the core of each rank; an empty list if ranks are not bound.
///
/// # Errors
/// Returns an error message if there are fewer cores than ranks.
pub(super) fn bound(bind: bool, ranks: usize) -> Result<Vec<usize>, String> {
    if !bind {
        return Ok(Vec::new());
    }
    one_core_each(ranks).ok_or_else(|| {
        format!(
            "--bind gives each rank a core, but {ranks} ranks have {} cores",
            cpu::count(&cpu::allowed())
        )
    })
}

fn parse_exit_timeout(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.0..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err("must be a number of seconds from 0 to 3600".into()),
    }
}
