//! Joins the ranks that a launcher has started, or creates a communicator whose only rank is this
//! process.

use cinch::{Communicator, Config, Result, UniqueId};

/// Variables that launchers set for the ranks that they start.
const LAUNCHED: [&str; 7] = [
    "CINCH_LAUNCH_SIZE",
    "WORLD_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "PMIX_RANK",
    "SLURM_PROCID",
    "MV2_COMM_WORLD_SIZE",
];

/// Returns the name of a launcher's variable that is set, if any.
pub fn launcher() -> Option<&'static str> {
    LAUNCHED
        .into_iter()
        .find(|name| std::env::var_os(name).is_some())
}

/// Returns the number of ranks if `cinch run` has started this process.
pub fn launched_size() -> Option<usize> {
    std::env::var("CINCH_LAUNCH_SIZE").ok()?.parse().ok()
}

/// Returns a number of the job whose ranks join by `id`.
pub fn job_number(id: &UniqueId) -> u64 {
    u64::from(u32::from_be_bytes(id.fingerprint()))
}

/// Joins the ranks that a launcher has started together with this one. If no launcher's variable is
/// set, the communicator has one rank. If only some of a launcher's variables are set, this is an
/// error.
///
/// # Errors
/// Returns the errors of joining.
pub fn join(config: Config) -> Result<Communicator> {
    match launcher() {
        Some(name) => Communicator::from_env(config).map_err(|error| {
            error.context(format!("joining the ranks of the launcher that set {name}"))
        }),
        None => {
            let id = create_id(&config)?;
            Communicator::init(&id, 0, 1, config)
        }
    }
}

/// Creates a unique id for ranks on several hosts, and serves its rendezvous in this process. The
/// server listens at the address of `CINCH_SOCKET_IFNAME`, or of the first interface that is up.
///
/// # Errors
/// Returns an error if the server cannot listen.
pub fn create_id_between_hosts(config: &Config) -> Result<UniqueId> {
    UniqueId::create(config)
}

/// Creates a unique id for ranks on this host, and serves its rendezvous in this process.
///
/// # Errors
/// Returns an error if the server cannot listen.
pub fn create_id(config: &Config) -> Result<UniqueId> {
    UniqueId::create_for_one_host(config)
}
