//! Compares settings at the beginning of every init.
//!
//! Each rank computes slots, schedules and channels from its own settings. A difference would hang
//! ranks or corrupt data later. So ranks compare the settings of [`Sharing`] before they connect,
//! and a difference fails all ranks with an error that names the setting.

use crate::bootstrap::{OutOfBand, PeerInfo};
use crate::config::{CodecPolicy, Config, FileChoice, KNOBS, Sharing};
use crate::error::{Error, ErrorKind, Result};
use crate::plan::TuningTable;
use crate::types::DeviceChoice;

/// Names, in errors, the bound on channels that programs for NCCL set. It has no `CINCH_` variable
/// of its own.
const NCCL_BOUND: &str = "the bound of NCCL_MAX_CTAS, NCCL_MAX_NCHANNELS and maxCTAs";

/// Names, in errors, the machine whose links are emulated.
const EMULATED: &str = "the machine of --emulate";

/// Compares the settings that all ranks must share, and returns them.
///
/// # Errors
/// Mismatch, naming the setting, two ranks and both values; the error is equal on all ranks.
pub(super) fn compare_settings(
    exchange: &dyn OutOfBand,
    config: &Config,
    policy: &CodecPolicy,
    table: Option<&TuningTable>,
) -> Result<String> {
    let peers = exchange.peers();
    let one_host = peers.iter().all(|peer| peer.host_id == peers[0].host_id);
    let lines: Vec<String> = shared_settings(config, policy, table, one_host)
        .into_iter()
        .map(|(name, value)| format!("{name}={value}"))
        .collect();
    let own = lines.join("\0");
    compare(&exchange.all_gather(own.as_bytes())?, peers)?;
    Ok(own)
}

/// Returns names and values of the settings that this communicator's ranks must share.
fn shared_settings(
    config: &Config,
    policy: &CodecPolicy,
    table: Option<&TuningTable>,
    one_host: bool,
) -> Vec<(&'static str, String)> {
    let on_host = config.device == DeviceChoice::Host;
    let mut settings = Vec::new();
    for knob in KNOBS {
        let is_shared = match knob.shared {
            Sharing::No => false,
            Sharing::Always => true,
            Sharing::HostMemory => on_host,
            Sharing::HostLinks => on_host || !one_host,
            Sharing::Gpus => !on_host,
            Sharing::Effect => {
                settings.push((knob.name, effect(knob.name, config, policy, table)));
                false
            }
        };
        if is_shared {
            settings.push((knob.name, (knob.show)(config)));
        }
    }
    if !on_host {
        let bound = config.gpu_channels_most;
        let bound = bound.map_or("unset".into(), |most| most.to_string());
        settings.push((NCCL_BOUND, bound));
    }
    let emulated = config.emulated_machine();
    let emulated = emulated.map_or("none".into(), |machine| machine.to_string());
    settings.push((EMULATED, emulated));
    settings
}

/// Returns the part of a [`Sharing::Effect`] setting that ranks must share.
fn effect(
    name: &str,
    config: &Config,
    policy: &CodecPolicy,
    table: Option<&TuningTable>,
) -> String {
    match (name, table, &config.tuning) {
        // Ranks may name different GPUs; they must only agree whether buffers are on a GPU.
        ("CINCH_DEVICE", ..) => match config.device {
            DeviceChoice::Host => "host".into(),
            DeviceChoice::Current | DeviceChoice::Cuda(_) => "cuda".into(),
        },
        // The file may lie elsewhere on each host; its content counts.
        // Files may lie elsewhere; ranks compare what follows from them once it is known.
        ("CINCH_TOPO", ..) => match config.topology {
            FileChoice::Auto => "auto".into(),
            FileChoice::Off => "off".into(),
            FileChoice::File(_) => "a file".into(),
        },
        ("CINCH_TUNING", Some(table), _) => format!("table {}", table.fingerprint()),
        ("CINCH_TUNING", None, FileChoice::Off) => "off".into(),
        ("CINCH_TUNING", None, _) => "auto".into(),
        _ => policy.in_effect(name).unwrap_or_default(),
    }
}

/// Compares the texts of all ranks, in which NUL separates `NAME=value` lines.
fn compare(texts: &[Vec<u8>], peers: &[PeerInfo]) -> Result<()> {
    let Some(rank) = texts.iter().position(|text| *text != texts[0]) else {
        return Ok(());
    };
    let lines = |rank: usize| -> Vec<(&str, &str)> {
        let text = std::str::from_utf8(&texts[rank]).unwrap_or_default();
        let lines = text.split('\0');
        lines.filter_map(|line| line.split_once('=')).collect()
    };
    let (first, other) = (lines(0), lines(rank));
    let differs = first.iter().find_map(|&(name, value)| {
        let (_, other) = other.iter().find(|(known, _)| *known == name)?;
        (*other != value).then_some((name, value, other))
    });
    let (one, two) = (&peers[0], &peers[rank]);
    let text = match differs {
        Some((name, value, other)) => {
            format!("{name} is {value} on {one} and {other} on {two}: set it alike on all ranks")
        }
        None => {
            format!("{one} and {two} compare different sets of settings: use one version of cinch")
        }
    };
    Err(Error::new(ErrorKind::Mismatch, text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bootstrap::LocalOutOfBand;
    use crate::config::{CommFacts, Origin};
    use crate::sync::Fault;
    use std::sync::Arc;

    /// Compares the settings of two ranks of one host, and returns the result. Asserts that both
    /// ranks get equal results.
    fn outcome(settings: [&[(&str, &str)]; 2]) -> Result<()> {
        let faults = [Fault::new(), Fault::new()];
        let world = LocalOutOfBand::world(2, &faults);
        let configs = settings.map(|settings| {
            let mut config = Config::default();
            for (name, value) in settings {
                config.set(name, value, Origin::Environment).unwrap();
            }
            config
        });
        let ranks = || world.iter().zip(&configs);
        let outcomes: Vec<Result<()>> = std::thread::scope(|scope| {
            let compare = |(exchange, config): (&Arc<LocalOutOfBand>, &Config)| {
                let policy = CodecPolicy::new(config, CommFacts::first(2, 1));
                compare_settings(&**exchange, config, &policy, None).map(drop)
            };
            let threads: Vec<_> = ranks()
                .map(|rank| scope.spawn(move || compare(rank)))
                .collect();
            let outcomes = threads.into_iter().map(|thread| thread.join().unwrap());
            outcomes.collect()
        });
        assert_eq!(outcomes[0], outcomes[1]);
        outcomes[0].clone()
    }

    #[test]
    fn shared_setting_that_differs_is_a_mismatch() {
        const GPU: (&str, &str) = ("CINCH_DEVICE", "cuda");
        for (settings, parts) in [
            (
                [&[][..], &[("CINCH_SLOTS", "8")]],
                ["CINCH_SLOTS is 4 on rank 0 (host", "8 on rank 1 (host"],
            ),
            (
                [&[("CINCH_TRANSPORT", "tcp")], &[]],
                ["CINCH_TRANSPORT is tcp on rank 0", "auto on rank 1"],
            ),
            (
                [&[], &[("CINCH_ALGO", "ring"), ("CINCH_FUSE_BYTES", "0")]],
                ["CINCH_ALGO is auto on rank 0", "ring on rank 1"],
            ),
            (
                [&[("CINCH_CODEC", "off")], &[("CINCH_CODEC", "linear8")]],
                [
                    "CINCH_CODEC is off on rank 0",
                    "linear8:block=256 on rank 1",
                ],
            ),
            (
                [&[("CINCH_DEVICE", "host")], &[GPU]],
                ["CINCH_DEVICE is host on rank 0", "cuda on rank 1"],
            ),
            (
                [
                    &[GPU],
                    &[("CINCH_DEVICE", "cuda:1"), ("CINCH_GPU_CHANNELS", "7")],
                ],
                ["CINCH_GPU_CHANNELS is auto on rank 0", "7 on rank 1"],
            ),
        ] {
            let error = outcome(settings).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Mismatch);
            for part in parts {
                assert!(error.message().contains(part), "{part}: {error}");
            }
        }
    }

    #[test]
    fn setting_of_each_rank_may_differ() {
        for settings in [
            [&[("CINCH_TIMEOUT", "5")][..], &[("CINCH_LOG", "none")]],
            [&[("CINCH_GPU_CHANNELS", "7")], &[]],
            [&[("CINCH_CODEC_RULES", "tp=off")], &[]],
            [
                &[("CINCH_DEVICE", "cuda:0"), ("CINCH_SLOTS", "8")],
                &[("CINCH_DEVICE", "cuda:1"), ("CINCH_TCP_SOCKETS", "2")],
            ],
        ] {
            assert_eq!(outcome(settings), Ok(()), "{settings:?}");
        }
    }

    #[test]
    fn setting_of_another_version_is_a_mismatch() {
        let faults = [Fault::new(), Fault::new()];
        let world = LocalOutOfBand::world(2, &faults);
        let texts = [b"CINCH_A=1\0CINCH_B=2".to_vec(), b"CINCH_A=1\xff".to_vec()];
        let error = compare(&texts, world[0].peers()).unwrap_err();
        assert!(error.message().contains("use one version"), "{error}");
    }
}
