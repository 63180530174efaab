//! Saved probes: a file for each set of GPUs, in the folder `topology` of the user's cache.

use super::saved_text::{SavedProbe, fingerprint};
use crate::error::{Error, Result};
use crate::sys::file;
use crate::sys::nvml::Nvml;
use crate::topology::graph::{LinkKind, MachineGraph, NodeKind};
use crate::topology::{DetectSources, ProcessorFacts, detect};
use crate::types::short_digest;
use std::fmt::Write;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Largest size of a saved file in bytes.
const MAX_BYTES: usize = 4 << 20;

/// Largest size of a file of the driver in bytes.
const MAX_DRIVER_BYTES: usize = 64 << 10;

/// Directory of the NVIDIA driver's files.
pub const DRIVER: &str = "/proc/driver/nvidia";

/// Folder in the user's cache.
const FOLDER: &str = "topology";

/// Identity of a machine that was measured, or is to be measured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbeKey {
    /// Fingerprint of topology, driver, GPUs and settings of peer access.
    fingerprint: String,
    /// Name of the file, which depends on the GPUs alone.
    file: String,
}

/// A saved probe as far as it was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SavedLimits {
    /// There is no file for these GPUs.
    Missing,
    /// The file is of another topology, driver, or other settings of peer access.
    Stale(PathBuf),
    /// The text of the file, which [`SavedProbe::from_text`] reads.
    Found(PathBuf, String),
}

impl ProbeKey {
    /// Creates the key of a machine without measured limits. `uuids` are those of its GPUs, `driver` is the
    /// driver's version, and `settings` has the settings that change peer access.
    pub fn new(graph: &MachineGraph, uuids: &[String], driver: &str, settings: &str) -> ProbeKey {
        let mut uuids = uuids.to_vec();
        uuids.sort_unstable();
        let uuids = uuids.join("\n");
        let text = [&static_text(graph), &uuids, driver, settings]
            .map(short_digest)
            .join("\n");
        ProbeKey {
            fingerprint: short_digest(&text),
            file: format!("{}.txt", short_digest(&uuids)),
        }
    }

    /// Creates the key of this machine, whose /sys is `sys`, and whose files of the NVIDIA driver are in `driver`. Also
    /// returns the machine's graph.
    ///
    /// # Errors
    /// Unsupported without NVML, or if it gives no identity of a GPU; the errors of [`detect`].
    pub fn at_hand(
        sys: &Path,
        driver: &Path,
        p2p_disable: bool,
    ) -> Result<(ProbeKey, MachineGraph)> {
        let nvml = Nvml::open()?.gpus()?;
        if nvml.is_empty() || nvml.iter().any(|gpu| gpu.uuid.is_empty()) {
            let text = "NVML gives no UUID of a GPU, so that measured limits have no identity";
            return Err(Error::new(crate::error::ErrorKind::Unsupported, text));
        }
        let sources = DetectSources {
            processor: ProcessorFacts::read(Path::new("/proc/cpuinfo")),
            nvml: &nvml,
            driver: &[],
        };
        let graph = MachineGraph::new(&detect(sys, &sources)?);
        let uuids: Vec<String> = nvml.into_iter().map(|gpu| gpu.uuid).collect();
        let version = read(&driver.join("version"));
        let version = version.lines().next().unwrap_or_default();
        let settings = peer_settings(&read(&driver.join("params")));
        let settings = format!("p2p_disable {p2p_disable}\n{settings}");
        Ok((ProbeKey::new(&graph, &uuids, version, &settings), graph))
    }

    /// Returns whether `cache` has any saved probe. This needs no key, and costs one system call.
    pub fn any_saved(cache: &Path) -> bool {
        cache.join(FOLDER).is_dir()
    }

    /// Looks for the saved probe of this machine in `cache`.
    ///
    /// # Errors
    /// Invalid argument if the file cannot be read or has no fingerprint.
    pub fn find(&self, cache: &Path) -> Result<SavedLimits> {
        let path = self.path(cache);
        let text = match file::read_text(&path, MAX_BYTES) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(SavedLimits::Missing),
            Err(error) => return Err(broken(&path, &error.to_string())),
        };
        match fingerprint(&text) {
            Some(found) if found == self.fingerprint => Ok(SavedLimits::Found(path, text)),
            Some(_) => Ok(SavedLimits::Stale(path)),
            None => Err(broken(&path, "line 1: it has no fingerprint")),
        }
    }

    /// Finds and reads the saved probe of this machine, whose graph is `graph`. Also returns the path of its file.
    /// `None` if there is none for this machine; a stale file is reported to `stale`.
    ///
    /// # Errors
    /// Invalid argument, with the path and what to do, if the file is broken.
    pub fn load(
        &self,
        cache: &Path,
        graph: &MachineGraph,
        stale: impl FnOnce(&Path),
    ) -> Result<Option<(PathBuf, SavedProbe)>> {
        match self.find(cache)? {
            SavedLimits::Missing => Ok(None),
            SavedLimits::Stale(path) => {
                stale(&path);
                Ok(None)
            }
            SavedLimits::Found(path, text) => {
                let saved = SavedProbe::from_text(&text, graph);
                let saved = saved.map_err(|error| broken(&path, error.message()))?;
                Ok(Some((path, saved)))
            }
        }
    }

    /// Saves the probe of this machine in `cache`, in place of an earlier probe. Returns the path of the file.
    ///
    /// # Errors
    /// System, with the path, if the file cannot be written.
    pub fn save(&self, cache: &Path, graph: &MachineGraph, saved: &SavedProbe) -> Result<PathBuf> {
        let path = self.path(cache);
        let text = saved.to_text(graph, &self.fingerprint);
        file::replace(&path, &text, 0o600).map_err(|error| {
            let text = format!("{} cannot be written: {error}", path.display());
            Error::new(crate::error::ErrorKind::System, text)
        })?;
        Ok(path)
    }

    fn path(&self, cache: &Path) -> PathBuf {
        cache.join(FOLDER).join(&self.file)
    }
}

fn broken(path: &Path, why: &str) -> Error {
    Error::invalid_argument(format!(
        "the saved limits {}: {why}; run `cinch topo --probe` again, or delete the file",
        path.display()
    ))
}

/// Reads a file of the driver; empty if it cannot be read, as on systems that hide it.
fn read(path: &Path) -> String {
    file::read_text(path, MAX_DRIVER_BYTES).unwrap_or_default()
}

/// Returns the lines of the driver's parameters that may change peer access. Other parameters differ between
/// containers of one machine.
fn peer_settings(params: &str) -> String {
    let is_used = |line: &&str| {
        let key = line
            .split(':')
            .next()
            .unwrap_or_default()
            .to_ascii_lowercase();
        ["registry", "peer", "p2p"]
            .iter()
            .any(|word| key.contains(word))
    };
    params
        .lines()
        .filter(is_used)
        .collect::<Vec<_>>()
        .join("\n")
}

/// Describes the GPUs of a graph, and the links that carry data between them. Network devices do not count, because
/// they come and go.
fn static_text(graph: &MachineGraph) -> String {
    let mut text = String::new();
    let mut on_a_way = vec![false; graph.nodes.len()];
    for gpu in &graph.gpus {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "gpu {} mig {}", gpu.bus_id, gpu.mig);
        graph
            .ancestors(gpu.node)
            .for_each(|node| on_a_way[node] = true);
    }
    for (node, there) in graph.nodes.iter().zip(&mut on_a_way) {
        *there |= matches!(node.kind, NodeKind::Socket | NodeKind::LinkSwitch);
    }
    for link in &graph.links {
        if link.class != LinkKind::Network && on_a_way[link.from] && on_a_way[link.to] {
            let [from, to] = [link.from, link.to].map(|node| &graph.nodes[node].name);
            let mb_s = link.bandwidth.mb_s;
            let _ = writeln!(text, "{from} > {to} {:?} {mb_s}", link.class);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_of_peer_access_are_taken_from_the_drivers_parameters() {
        let params = "ModifyDeviceFiles: 1\nRegistryDwords: \"ForceP2P=0x11\"\nEnableMSI: 1\n\
                      DmaRemapPeerMmio: 1\nRegistryDwordsPerDevice: \"\"\n";
        let expected = "RegistryDwords: \"ForceP2P=0x11\"\nDmaRemapPeerMmio: 1\n\
                        RegistryDwordsPerDevice: \"\"";
        assert_eq!(peer_settings(params), expected);
    }
}
