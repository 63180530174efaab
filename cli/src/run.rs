//! `cinch run`: starts local ranks, watches them, and leaves none behind: see `launch`. Ranks of
//! other hosts are started by a `cinch run` there: see `hosts`.

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
    /// Ranks to start; with --hosts, as many as the hosts have slots; with --preload and without
    /// this, the program is started once, in this one's place
    #[arg(short = 'n', long = "ranks", group = "starts",
          required_unless_present_any = ["hosts", "agent", "preload"],
          value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(super) ranks: Option<u32>,
    /// Start the ranks on the hosts of this file over ssh: lines of `HOST [slots=N]`
    #[arg(long, value_name = "FILE", group = "starts")]
    pub(super) hosts: Option<std::path::PathBuf>,
    /// Program that runs a command on a host, called with the host and the command; if it is called
    /// ssh, with `-o BatchMode=yes` in front: it cannot ask anything here
    #[arg(
        long,
        value_name = "PROGRAM",
        default_value = "ssh",
        requires = "hosts"
    )]
    pub(super) ssh: OsString,
    /// Where cinch is on the hosts [default: where it is here]
    #[arg(long, value_name = "PATH", requires = "hosts")]
    pub(super) remote_cinch: Option<String>,
    /// Variables that ranks on other hosts get besides those that begin with CINCH_
    #[arg(long = "env", value_name = "NAME", requires = "hosts")]
    pub(super) environment: Vec<String>,
    /// Be what --hosts starts on a host
    #[arg(long, hide = true)]
    agent: bool,
    /// Put the drop-in libnccl.so.2 in front of the program: the one beside this tool, or at PATH;
    /// with --hosts, beside the tool or at PATH there
    #[arg(long, value_name = "PATH", num_args = 0..=1, require_equals = true)]
    pub(super) preload: Option<Option<PathBuf>>,
    #[arg(long, default_value = "auto", value_parser = super::bench::options::parse_transport,
          help = super::bench::options::transport_help(), requires = "starts")]
    pub(super) transport: super::bench::options::Named<TransportKind>,
    /// Put the rank in front of each line of output
    #[arg(long, requires = "starts")]
    pub(super) label: bool,
    /// Give each rank one core; an error if there are fewer cores than ranks
    #[arg(long, requires = "starts")]
    pub(super) bind: bool,
    /// Seconds that the other ranks have to end by themselves after one failed
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
/// Exit code and sentence: options that cannot be, or ranks that cannot be started.
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
        // Each host looks for its own drop-in.
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

/// Returns the core of each rank, if each is to have one.
///
/// # Errors
/// A sentence, if there are too few.
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
        _ => Err("a number of seconds from 0 to 3600".into()),
    }
}
