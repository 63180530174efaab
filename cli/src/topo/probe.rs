//! Measured limits of the machine at hand: measures and saves them, or finds those that an earlier run has saved.

use crate::{ExitResult, FAILURE, USAGE};
use cinch::config::{FileChoice, cache_directory};
use cinch::gpu_links::GpuPatternMeter;
use cinch::sys::numa;
use cinch::topology::probe::{DRIVER, ProbeKey, SavedProbe, infer, measure, plan};
use cinch::topology::{MachineGraph, Paths};
use cinch::{Config, Error, ErrorKind, Result};
use std::path::{Path, PathBuf};

/// A measured machine, and where the measurement is kept.
pub struct Probed {
    pub saved: SavedProbe,
    /// Phrase for reports, such as `saved in PATH`.
    pub source: String,
}

/// Measures the GPUs of this machine, whose description gives `graph`, and saves the result. A result that cannot be
/// saved is still shown, with the reason.
pub fn run(graph: &MachineGraph, config: &Config) -> ExitResult<Probed> {
    let saved = measured(graph, config).map_err(|error| (FAILURE, error.to_string()))?;
    let source = match save(graph, config, &saved) {
        Ok(path) => format!("saved in {}", path.display()),
        Err(error) => format!("not saved: {error}"),
    };
    Ok(Probed { saved, source })
}

fn measured(graph: &MachineGraph, config: &Config) -> Result<SavedProbe> {
    let mut meter = GpuPatternMeter::new(graph, config.p2p_disable)?;
    let access = meter.peer_access();
    let patterns = plan(graph, &Paths::new(graph, &access));
    let patterns = measure(graph, patterns, &mut meter)?;
    Ok(SavedProbe {
        limits: infer(graph, &access, &patterns),
        access,
        patterns,
    })
}

fn save(graph: &MachineGraph, config: &Config, saved: &SavedProbe) -> Result<PathBuf> {
    let no_cache = || {
        let text = "neither XDG_CACHE_HOME nor HOME is an absolute path";
        Error::new(ErrorKind::Unsupported, text)
    };
    let cache = cache_directory().ok_or_else(no_cache)?;
    key(config)?.save(&cache, graph, saved)
}

fn key(config: &Config) -> Result<ProbeKey> {
    let (sys, driver) = (Path::new(numa::SYS), Path::new(DRIVER));
    Ok(ProbeKey::at_hand(sys, driver, config.p2p_disable)?.0)
}

/// Finds the saved limits of this machine. `None` without any, or if `CINCH_TOPO` is not `auto`. A file of another
/// topology, driver or setting is ignored with a line on standard error.
pub fn saved(graph: &MachineGraph, config: &Config) -> ExitResult<Option<Probed>> {
    let cache = cache_directory().filter(|cache| ProbeKey::any_saved(cache));
    let Some(cache) = cache.filter(|_| config.topology == FileChoice::Auto) else {
        return Ok(None);
    };
    // Without NVML, nothing can have been saved for this machine.
    let Ok(key) = key(config) else {
        return Ok(None);
    };
    let stale = |path: &Path| {
        eprintln!(
            "cinch: {} is ignored, because the topology, the driver or a setting of peer access has changed since; \
             --probe measures again",
            path.display()
        );
    };
    let found = key.load(&cache, graph, stale);
    let found = found.map_err(|error| (USAGE, error.to_string()))?;
    Ok(found.map(|(path, saved)| Probed {
        saved,
        source: format!("saved in {}", path.display()),
    }))
}
