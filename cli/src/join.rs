//! Becomes a rank: of those that a launcher has started, or the only one.

use cinch::{Communicator, Config, Result, UniqueId};

/// Variables by which launchers tell their children how many they are.
const LAUNCHED: [&str; 7] = [
    "CINCH_LAUNCH_SIZE",
    "WORLD_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "PMIX_RANK",
    "SLURM_PROCID",
    "MV2_COMM_WORLD_SIZE",
];

/// The launcher's variable that is set, if any is.
pub fn launcher() -> Option<&'static str> {
    LAUNCHED
        .into_iter()
        .find(|name| std::env::var_os(name).is_some())
}

/// How many ranks `cinch run` started, if it did.
pub fn launched_size() -> Option<usize> {
    std::env::var("CINCH_LAUNCH_SIZE").ok()?.parse().ok()
}

/// Joins the ranks that this process was started with. Without any launcher's variable it is
/// alone; with one it never is by mistake: what the launcher says must then hold.
///
/// # Errors
/// Those of joining.
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

/// A new id for ranks of several hosts, whose rendezvous runs in this process: at the address of
/// `CINCH_SOCKET_IFNAME`, or of the first interface that is up.
///
/// # Errors
/// Those of listening.
pub fn create_id_between_hosts(config: &Config) -> Result<UniqueId> {
    UniqueId::create(config)
}

/// A new id for ranks of this host, whose rendezvous runs in this process.
///
/// # Errors
/// Those of listening.
pub fn create_id(config: &Config) -> Result<UniqueId> {
    UniqueId::create_for_one_host(config)
}
