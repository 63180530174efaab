//! The topology by which a communicator's ranks choose rings and groups, agreed between all ranks.

use crate::bootstrap::OutOfBand;
use crate::config::{Config, FileChoice};
use crate::error::{Error, ErrorKind, Result};
use crate::sys::file;
use crate::topology::{MAX_XML_BYTES, MachineGraph, PeerAccess, RankTopology, read_xml};
use std::path::Path;
use std::sync::Arc;

/// Returns the topology of ranks on host memory: that of `CINCH_TOPO=FILE`, in which GPUs stand for ranks in the
/// order of their `rank`, or `dev`. `None` without a file, or on several hosts. All ranks call it together.
///
/// # Errors
/// Invalid argument if the file cannot be used. Mismatch, naming two ranks and both fingerprints, if ranks have
/// different topologies; all ranks get this error alike.
pub(super) fn on_host(
    exchange: &dyn OutOfBand,
    config: &Config,
) -> Result<Option<Arc<RankTopology>>> {
    let peers = exchange.peers();
    let one_host = peers.iter().all(|peer| peer.host_id == peers[0].host_id);
    let FileChoice::File(path) = &config.topology else {
        return Ok(None);
    };
    if !one_host || peers.len() < 2 {
        return Ok(None);
    }
    let topology = of_file(path, peers.len(), &access(config))
        .map_err(|error| error.context(format!("CINCH_TOPO={}", path.display())))
        // The other ranks wait for this rank next.
        .inspect_err(|error| exchange.announce(error))?;
    agree(exchange, &topology)?;
    Ok(Some(Arc::new(topology)))
}

fn access(config: &Config) -> PeerAccess {
    match config.p2p_disable {
        true => PeerAccess::Never,
        false => PeerAccess::Rule,
    }
}

fn of_file(path: &Path, ranks: usize, access: &PeerAccess) -> Result<RankTopology> {
    let text = file::read_text(path, MAX_XML_BYTES)
        .map_err(|error| Error::invalid_argument(error.to_string()))?;
    let graph = MachineGraph::new(&read_xml(&text)?);
    let gpus = graph.by_rank();
    if gpus.len() < ranks {
        return Err(Error::invalid_argument(format!(
            "the file has {} GPUs for {ranks} ranks of this host",
            gpus.len()
        )));
    }
    RankTopology::new(&graph, &gpus[..ranks], access)
}

/// Compares the fingerprints of all ranks.
fn agree(exchange: &dyn OutOfBand, topology: &RankTopology) -> Result<()> {
    let own = format!("{} ({topology})", topology.fingerprint());
    let all = exchange.all_gather(own.as_bytes())?;
    let Some(rank) = all.iter().position(|other| *other != all[0]) else {
        return Ok(());
    };
    let peers = exchange.peers();
    let text = |rank: usize| String::from_utf8_lossy(&all[rank]).into_owned();
    Err(Error::new(
        ErrorKind::Mismatch,
        format!(
            "the topology is {} on {} and {} on {}: give all ranks one CINCH_TOPO, or off",
            text(0),
            peers[0],
            text(rank),
            peers[rank]
        ),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bootstrap::LocalOutOfBand;
    use crate::sync::Fault;

    /// Returns the topologies of ranks with these values of `CINCH_TOPO`.
    fn outcomes(files: &[&str]) -> Vec<Result<Option<Arc<RankTopology>>>> {
        let faults: Vec<_> = files.iter().map(|_| Fault::new()).collect();
        let world = LocalOutOfBand::world(files.len(), &faults);
        let of = |file: &&str| Config {
            topology: FileChoice::File(
                format!("{}/tests/topology/{file}", env!("CARGO_MANIFEST_DIR")).into(),
            ),
            ..Config::default()
        };
        let configs: Vec<Config> = files.iter().map(of).collect();
        std::thread::scope(|scope| {
            let ranks = world.iter().zip(&configs);
            let threads: Vec<_> = ranks
                .map(|(exchange, config)| scope.spawn(|| on_host(&**exchange, config)))
                .collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .collect()
        })
    }

    #[test]
    fn equal_files_give_all_ranks_equal_groups() {
        for outcome in outcomes(&["B.xml"; 8]) {
            let topology = outcome.unwrap().unwrap();
            assert_eq!(topology.to_string(), "4 switches of 2 ranks");
        }
    }

    #[test]
    fn different_files_are_a_mismatch_on_all_ranks() {
        for outcome in outcomes(&["A.xml", "A.xml", "F.xml", "A.xml", "A.xml"]) {
            let error = outcome.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Mismatch);
            for part in [
                "2 switches of 1 to 4 ranks",
                "2 sockets of 1 to 4 ranks",
                "rank 0",
                "rank 2",
            ] {
                assert!(error.message().contains(part), "{part} is not in {error}");
            }
        }
    }

    #[test]
    fn file_with_too_few_gpus_is_refused_with_both_numbers() {
        let error = outcomes(&["G.xml"; 5]).remove(0).unwrap_err();
        assert!(error.message().contains("4 GPUs for 5 ranks"), "{error}");
        assert!(error.message().contains("CINCH_TOPO="), "{error}");
    }
}
