//! The topology file of a communicator.

use crate::error::{Error, Result};
use crate::sys::fork_safe::ForkSafe;
use crate::sys::log::{self, Level};
use crate::topology::{Machine, MachineGraph, PeerAccess, RankTopology, read_xml, xml_file_text};
use std::collections::BTreeSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;

/// Reads the machine of a file.
pub(super) fn read_file(path: &Path) -> Result<Machine> {
    read_xml(&xml_file_text(path)?)
}

/// Logs each defect of the file, once in the process. Ranks of one communicator have equal files, or fail, so one rank of
/// them calls it.
pub(super) fn warn_of_defects(path: &Path, graph: &MachineGraph) {
    for line in unlogged_defects(path, graph) {
        log::line(Level::Warn, format_args!("{line}"));
    }
}

/// Returns a line for each defect of the file for which no earlier call returned a line.
pub(super) fn unlogged_defects(path: &Path, graph: &MachineGraph) -> Vec<String> {
    /// Hashes of the lines so far.
    static LOGGED: ForkSafe<BTreeSet<u64>> = ForkSafe::new(BTreeSet::new());
    let line = |defect| format!("CINCH_TOPO={}: {defect}", path.display());
    let is_new = |line: &String| {
        let mut hasher = DefaultHasher::new();
        line.hash(&mut hasher);
        LOGGED.with(|logged| logged.insert(hasher.finish()))
    };
    graph.defects.iter().map(line).filter(is_new).collect()
}

/// Returns the topology of ranks on the GPUs of a file. The rank that `warns` logs the defects of the file.
pub(super) fn of_file(
    path: &Path,
    ranks: usize,
    access: &PeerAccess,
    warns: bool,
) -> Result<RankTopology> {
    let graph = MachineGraph::new(&read_file(path)?);
    if warns {
        warn_of_defects(path, &graph);
    }
    let gpus = graph.by_rank();
    if gpus.len() < ranks {
        return Err(Error::invalid_argument(format!(
            "the file has {} GPUs for {ranks} ranks of this host",
            gpus.len()
        )));
    }
    RankTopology::new(&graph, &gpus[..ranks], access)
}
