//! Joins the ranks that a launcher has started, or makes a communicator of this process alone.

use cinch::{Communicator, Config, Result, UniqueId};

/// Variables that launchers set in their children.
const LAUNCHED: [&str; 7] = [
    "CINCH_LAUNCH_SIZE",
    "WORLD_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "PMIX_RANK",
    "SLURM_PROCID",
    "MV2_COMM_WORLD_SIZE",
];

/// Returns the launcher's variable that is set.
pub fn launcher() -> Option<&'static str> {
    LAUNCHED
        .into_iter()
        .find(|name| std::env::var_os(name).is_some())
}

/// Returns how many ranks `cinch run` started, if it started this one.
pub fn launched_size() -> Option<usize> {
    std::env::var("CINCH_LAUNCH_SIZE").ok()?.parse().ok()
}

/// Joins the ranks that this process was started with. Without any launcher's variable the communicator
/// has one rank; with such a variable it is an error if the launcher's other variables are incomplete.
///
/// # Errors
/// Returns the errors of joining.
pub fn join(config: Config) -> Result<Communicator> {
    match launcher() {
        Some(name) => Communicator::from_env(config)
            .map_err(|error| error.context(format!("joining the ranks that {name} speaks of"))),
        None => {
            let id = create_id(&config)?;
            Communicator::init(&id, 0, 1, config)
        }
    }
}

/// Creates an id for ranks of several hosts, whose rendezvous runs in this process: at the address of
/// `CINCH_SOCKET_IFNAME`, or of the first interface that is up.
///
/// # Errors
/// Returns the errors of listening.
pub fn create_id_between_hosts(config: &Config) -> Result<UniqueId> {
    UniqueId::create(config)
}

/// Creates an id for ranks of this host, whose rendezvous runs in this process.
///
/// # Errors
/// Returns the errors of listening.
pub fn create_id(config: &Config) -> Result<UniqueId> {
    UniqueId::create_for_one_host(config)
}
