//! Variables by which launchers describe a job to its ranks: read here, interpreted in `bootstrap`.

/// The variables of launchers; the variables of `cinch run` come first.
pub const LAUNCHER_VARIABLES: &[&str] = &[
    "CINCH_LAUNCH_ID",
    "CINCH_LAUNCH_RANK",
    "CINCH_LAUNCH_SIZE",
    "CINCH_COMM_ID",
    "RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "PMIX_NAMESPACE",
    "SLURM_PROCID",
    "SLURM_NTASKS",
    "SLURM_STEP_NODELIST",
    "SLURM_NODELIST",
    "SLURM_JOB_NODELIST",
    "SLURM_LAUNCH_NODE_IPADDR",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "PMI_RANK",
    "PMI_SIZE",
];

/// Reads one of [`LAUNCHER_VARIABLES`]; `None` for other names and for values that are unset or not
/// UTF-8.
pub fn launcher_environment(name: &str) -> Option<String> {
    LAUNCHER_VARIABLES
        .contains(&name)
        .then(|| std::env::var(name).ok())
        .flatten()
}
