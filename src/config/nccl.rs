//! NCCL's environment, for the drop-in: which of its names mean something here, and what.
//!
//! Ours win. A value that NCCL takes and we cannot is said in the log and left out, because the
//! program ran with it; only what concerns compression is an error, since no such name is NCCL's.

use super::{Config, KNOBS, Note, Origin};
use crate::error::{Error, Result};
use crate::types::{DeviceChoice, Subsystems};
use std::ffi::OsString;
use std::time::Duration;

/// One of NCCL's names.
pub struct NcclName {
    /// The variable.
    pub name: &'static str,
    /// What it does here.
    pub means: Meaning,
}

/// What one of NCCL's names does here.
pub enum Meaning {
    /// It is another name for one of our settings.
    Setting {
        /// Ours.
        ours: &'static str,
        /// Our value for NCCL's; `None` where it asks for what happens anyway.
        translate: fn(&str) -> std::result::Result<Option<String>, String>,
    },
    /// It bounds a call's blocks, and raises nothing, unless `CINCH_GPU_CHANNELS` says how many there
    /// are.
    MostChannels,
    /// Nothing, for this reason.
    Nothing(&'static str),
}

const fn setting(
    name: &'static str,
    ours: &'static str,
    translate: fn(&str) -> std::result::Result<Option<String>, String>,
) -> NcclName {
    NcclName {
        name,
        means: Meaning::Setting { ours, translate },
    }
}

const fn most_channels(name: &'static str) -> NcclName {
    NcclName {
        name,
        means: Meaning::MostChannels,
    }
}

const fn nothing(name: &'static str, why: &'static str) -> NcclName {
    NcclName {
        name,
        means: Meaning::Nothing(why),
    }
}

/// NCCL's names that are known here. Any other is left to NCCL, and said to have no effect.
pub const NCCL_NAMES: &[NcclName] = &[
    setting("NCCL_SOCKET_IFNAME", "CINCH_SOCKET_IFNAME", as_it_is),
    setting("NCCL_SOCKET_FAMILY", "CINCH_SOCKET_FAMILY", family),
    setting("NCCL_COMM_ID", "CINCH_COMM_ID", as_it_is),
    setting("NCCL_P2P_DISABLE", "CINCH_P2P_DISABLE", switch),
    setting("NCCL_P2P_LEVEL", "CINCH_P2P_DISABLE", level),
    setting("NCCL_SHM_DISABLE", "CINCH_SHM_DISABLE", switch),
    setting("NCCL_GRAPH_MIXING_SUPPORT", "CINCH_GRAPH_MIXING", switch),
    most_channels("NCCL_MAX_CTAS"),
    most_channels("NCCL_MAX_NCHANNELS"),
    setting("NCCL_ALGO", "CINCH_ALGO", algorithm),
    setting("NCCL_PROTO", "CINCH_PROTO", protocol),
    setting("NCCL_DEBUG", "CINCH_LOG", debug),
    setting("NCCL_DEBUG_SUBSYS", "CINCH_LOG_SUBSYS", subsystems),
    setting("NCCL_DEBUG_FILE", "CINCH_LOG_FILE", as_it_is),
    setting("NCCL_IB_DISABLE", "CINCH_IB_DISABLE", switch),
    setting("NCCL_NET", "CINCH_IB_DISABLE", network),
    setting("NCCL_IB_HCA", "CINCH_IB_HCA", as_it_is),
    setting("NCCL_IB_GID_INDEX", "CINCH_IB_GID", gid),
    setting("NCCL_IB_TIMEOUT", "CINCH_IB_TIMEOUT", as_it_is),
    setting("NCCL_IB_RETRY_CNT", "CINCH_IB_RETRY", as_it_is),
    setting("NCCL_IB_QPS_PER_CONNECTION", "CINCH_IB_QPS", as_it_is),
    setting("NCCL_IB_SL", "CINCH_IB_SL", as_it_is),
    setting("NCCL_IB_TC", "CINCH_IB_TC", as_it_is),
    nothing(
        "NCCL_NET_GDR_LEVEL",
        "GPU buffers reach NICs through host memory",
    ),
    nothing("NCCL_TOPO_FILE", "links are tried with data, not looked up"),
    nothing("NCCL_CONF_FILE", "settings come from the environment alone"),
];

fn as_it_is(value: &str) -> std::result::Result<Option<String>, String> {
    Ok(Some(value.to_string()))
}

fn family(value: &str) -> std::result::Result<Option<String>, String> {
    match value {
        "AF_INET" => Ok(Some("ipv4".into())),
        "AF_INET6" => Ok(Some("ipv6".into())),
        _ => Err("it takes AF_INET or AF_INET6".into()),
    }
}

fn number(value: &str) -> std::result::Result<i64, String> {
    value
        .trim()
        .parse()
        .map_err(|_| "it is not a whole number".to_string())
}

fn switch(value: &str) -> std::result::Result<Option<String>, String> {
    number(value).map(|value| Some(u8::from(value != 0).to_string()))
}

/// Sockets, or what happens anyway.
fn network(value: &str) -> std::result::Result<Option<String>, String> {
    match value.trim().to_ascii_lowercase().as_str() {
        "socket" => Ok(Some("1".into())),
        "ib" => Ok(None),
        _ => Err("of its values only IB and Socket mean something here".into()),
    }
}

/// -1 is NCCL's word for automatic.
fn gid(value: &str) -> std::result::Result<Option<String>, String> {
    match number(value)? {
        -1 => Ok(None),
        index => Ok(Some(index.to_string())),
    }
}

/// Only "never" can be said here: what connects two GPUs does not matter, whether data passes does.
fn level(value: &str) -> std::result::Result<Option<String>, String> {
    match value.trim() {
        "LOC" | "0" => Ok(Some("1".into())),
        _ => Ok(None),
    }
}

fn channels(value: &str) -> std::result::Result<usize, String> {
    let above_0 = usize::try_from(number(value)?)
        .ok()
        .filter(|&most| most > 0);
    above_0.ok_or_else(|| "it is not above 0".into())
}

fn one_of(value: &str, known: &[(&str, &str)]) -> std::result::Result<Option<String>, String> {
    let found = known
        .iter()
        .find(|(theirs, _)| theirs.eq_ignore_ascii_case(value.trim()));
    match found {
        Some((_, ours)) => Ok(Some((*ours).into())),
        None => Err(format!(
            "of its values only {} mean something here",
            known
                .iter()
                .map(|(theirs, _)| *theirs)
                .collect::<Vec<_>>()
                .join(", ")
        )),
    }
}

fn algorithm(value: &str) -> std::result::Result<Option<String>, String> {
    one_of(value, &[("Ring", "ring"), ("Tree", "tree")])
}

fn protocol(value: &str) -> std::result::Result<Option<String>, String> {
    one_of(
        value,
        &[("Simple", "simple"), ("LL", "ll"), ("LL128", "ll128")],
    )
}

fn debug(value: &str) -> std::result::Result<Option<String>, String> {
    one_of(
        value,
        &[
            ("NONE", "none"),
            ("VERSION", "version"),
            ("WARN", "warn"),
            ("INFO", "info"),
            // Between INFO and TRACE there: lines of a communicator that is aborted.
            ("ABORT", "info"),
            ("TRACE", "trace"),
        ],
    )
}

/// NCCL has subsystems that we have not; a list may name them.
fn subsystems(value: &str) -> std::result::Result<Option<String>, String> {
    Ok(Some(Subsystems::parse(value).0.to_string()))
}

/// What a call of the drop-in waits at most where nothing is set. NCCL waits for ever, and programs
/// count on it: one rank may write a checkpoint while the others are in the next call. Frameworks
/// have watchdogs of their own, of some ten minutes. A rank that dies is found without a deadline;
/// this is for one that is stopped.
const PATIENCE: Duration = Duration::from_secs(86400);
/// The same of joining.
const INIT_PATIENCE: Duration = Duration::from_secs(3600);
/// Input bytes of a rank below which loss scales, norms and flags are found, not gradients.
const MIN_BYTES: usize = 1 << 20;

impl Config {
    /// The settings of a program that was built for NCCL: those of [`Config::from_env`], then what
    /// [`NCCL_NAMES`] say, then defaults that such programs count on: buffers on the GPU of the
    /// current context, codecs from 1 MiB, a day's patience. [`Config::notes`] says what of the
    /// environment has no effect.
    ///
    /// # Errors
    /// Invalid argument for what `CINCH_` names hold, as in [`Config::from_env`], for names that
    /// begin with `CINCH_CODEC` and are none (a run would be exact by mistake), and for codecs that
    /// need what calls of NCCL cannot say.
    pub fn for_nccl() -> Result<Config> {
        let mut config = Config::for_nccl_of(&|name| std::env::var_os(name))?;
        let unknown = Config::unknown_names();
        if let Some(name) = unknown.iter().find(|name| name.starts_with("CINCH_CODEC")) {
            return Err(Error::invalid_argument(format!(
                "no setting is called {name}; those of codecs are {}",
                KNOBS
                    .iter()
                    .map(|knob| knob.name)
                    .filter(|name| name.starts_with("CINCH_CODEC"))
                    .collect::<Vec<_>>()
                    .join(", ")
            )));
        }
        let others = std::env::vars_os()
            .filter_map(|(name, _)| name.into_string().ok())
            .filter(|name| name.starts_with("NCCL_"))
            .filter(|name| NCCL_NAMES.iter().all(|known| known.name != name));
        let mut others: Vec<String> = others.collect();
        others.sort();
        if !others.is_empty() {
            config.note(false, format!("without effect: {}", others.join(", ")));
        }
        Ok(config)
    }

    fn for_nccl_of(environment: &dyn Fn(&str) -> Option<OsString>) -> Result<Config> {
        let mut config = Config {
            as_nccl: true,
            device: DeviceChoice::Current,
            codec_min_bytes: MIN_BYTES,
            timeout: PATIENCE,
            init_timeout: INIT_PATIENCE,
            log_subsystems: Subsystems::DEFAULT,
            ..Config::default()
        };
        config.take(environment)?;
        for known in NCCL_NAMES {
            if let Some(value) = environment(known.name) {
                config.honour(known, &value.to_string_lossy());
            }
        }
        match config.needing_tensor() {
            None => Ok(config),
            Some(setting) => Err(Error::invalid_argument(format!(
                "{setting}: its scales live from call to call of one tensor, and calls of \
                 NCCL do not say which tensor they are; give the codec a block (block=256)"
            ))),
        }
    }

    /// A setting that gives calls of some communicator, which has no name yet, a codec that needs the
    /// tensor ids of calls.
    fn needing_tensor(&self) -> Option<String> {
        if self.codec_off {
            return None;
        }
        if super::CodecPolicy::new(self, false).needs_tensor() {
            return Some(format!("CINCH_CODEC={}", self.codec_choice()));
        }
        let rule = self.codec_rules.needing_tensor()?;
        Some(format!("CINCH_CODEC_RULES has {rule}"))
    }

    /// Does what one of NCCL's names asks for, unless one of ours has said something else.
    fn honour(&mut self, known: &NcclName, value: &str) {
        let name = known.name;
        let (ours, translate) = match known.means {
            Meaning::Nothing(why) => {
                return self.note(false, format!("{name} has no effect: {why}"));
            }
            Meaning::MostChannels => return self.honour_bound(name, value),
            Meaning::Setting { ours, translate } => (ours, translate),
        };
        let translated = match translate(value) {
            Ok(Some(translated)) => translated,
            Ok(None) => return,
            Err(why) => return self.note(true, format!("{name}=\"{value}\" is left out: {why}")),
        };
        let Some(at) = KNOBS.iter().position(|knob| knob.name == ours) else {
            return;
        };
        let before = self.clone();
        if let Err(error) = self.set(ours, &translated, Origin::Environment) {
            *self = before;
            return self.note(true, format!("{name} is left out: {}", error.message()));
        }
        let show = KNOBS[at].show;
        if before.origins[at] != Origin::Default {
            let (earlier, later) = (show(&before), show(self));
            *self = before;
            if earlier != later {
                self.note(
                    true,
                    format!("{name}={value} asks for {ours}={later}, but {ours}={earlier} counts"),
                );
            }
        }
    }

    /// Bounds a call's blocks, unless ours has said how many there are.
    fn honour_bound(&mut self, name: &str, value: &str) {
        const OURS: &str = "CINCH_GPU_CHANNELS";
        let most = match channels(value) {
            Ok(most) => most,
            Err(why) => return self.note(true, format!("{name}=\"{value}\" is left out: {why}")),
        };
        if !self.says(OURS) {
            self.bound_channels(most);
        } else if most < self.gpu_channels_for(1) {
            let counts = self.gpu_channels_for(1);
            let text = format!("{name}={value} is left out: {OURS} counts, with {counts}");
            self.note(true, text);
        }
    }

    fn note(&mut self, warns: bool, text: String) {
        self.notes.push(Note { warns, text });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{Algorithm, Protocol};

    fn read(variables: &[(&str, &str)]) -> Result<Config> {
        Config::for_nccl_of(&|name| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| value.into())
        })
    }

    #[test]
    fn nothing_set_is_exact_and_patient() {
        let config = read(&[]).unwrap();
        assert_eq!(config.device, DeviceChoice::Current);
        assert!(!config.codec.is_lossy() && config.codec_min_bytes == 1 << 20);
        assert!(config.timeout >= Duration::from_secs(3600));
        assert!(config.notes.is_empty());
        // Ours still count.
        let ours = read(&[("CINCH_DEVICE", "host"), ("CINCH_CODEC_MIN_BYTES", "0")]).unwrap();
        assert_eq!((ours.device, ours.codec_min_bytes), (DeviceChoice::Host, 0));
    }

    #[test]
    fn each_name_that_maps_arrives() {
        let config = read(&[
            ("NCCL_SOCKET_IFNAME", "^docker,lo"),
            ("NCCL_SOCKET_FAMILY", "AF_INET6"),
            ("NCCL_COMM_ID", "10.0.0.1:4000"),
            ("NCCL_P2P_DISABLE", "1"),
            ("NCCL_SHM_DISABLE", "1"),
            ("NCCL_MAX_CTAS", "16"),
            ("NCCL_ALGO", "RING"),
            ("NCCL_PROTO", "LL128"),
            ("NCCL_DEBUG", "info"),
            ("NCCL_DEBUG_SUBSYS", "INIT,NVLS,COLL"),
            ("NCCL_DEBUG_FILE", "/tmp/log.%h.%p"),
            ("NCCL_NET", "Socket"),
            ("NCCL_IB_HCA", "^=mlx5_3:1"),
            ("NCCL_IB_GID_INDEX", "3"),
            ("NCCL_IB_TIMEOUT", "20"),
            ("NCCL_IB_RETRY_CNT", "5"),
            ("NCCL_IB_QPS_PER_CONNECTION", "4"),
            ("NCCL_IB_SL", "1"),
            ("NCCL_IB_TC", "106"),
        ])
        .unwrap();
        assert_eq!(config.interface.as_deref(), Some("^docker,lo"));
        assert_eq!(config.ipv6, Some(true));
        assert_eq!(config.comm_id.as_deref(), Some("10.0.0.1:4000"));
        assert!(config.p2p_disable && config.shm_disable);
        assert_eq!(
            (config.gpu_channels, config.gpu_channels_for(1)),
            (None, 16)
        );
        assert_eq!(config.algorithm, Some(Algorithm::Ring));
        assert_eq!(config.protocol, Some(Protocol::Ll128));
        assert_eq!(config.log_level, "info");
        assert_eq!(config.log_subsystems.to_string(), "INIT,COLL");
        assert_eq!(config.log_file, Some("/tmp/log.%h.%p".into()));
        assert!(config.ib_disable);
        assert_eq!(config.ib_hca.as_deref(), Some("^=mlx5_3:1"));
        assert_eq!(config.ib_gid.as_deref(), Some("3"));
        assert_eq!(
            (config.ib_timeout, config.ib_retry, config.ib_qps),
            (20, 5, 4)
        );
        assert_eq!((config.ib_service_level, config.ib_traffic_class), (1, 106));
        assert_eq!(config.notes, []);
    }

    #[test]
    fn the_manual_names_each() {
        let manual = include_str!("../../docs/codec-rules.md");
        for known in NCCL_NAMES {
            // Alone, or with a value.
            let is_there = |end: &str| manual.contains(&format!("`{}{end}", known.name));
            assert!(is_there("`") || is_there("="), "{}", known.name);
        }
    }

    #[test]
    fn every_mapped_name_has_a_setting_of_ours() {
        for known in NCCL_NAMES {
            assert!(known.name.starts_with("NCCL_"));
            if let Meaning::Setting { ours, .. } = known.means {
                assert!(KNOBS.iter().any(|knob| knob.name == ours), "{ours}");
            }
        }
    }

    #[test]
    fn ours_win_and_that_is_said_once() {
        let config = read(&[("CINCH_LOG", "trace"), ("NCCL_DEBUG", "WARN")]).unwrap();
        assert_eq!(config.log_level, "trace");
        let [note] = &config.notes[..] else {
            panic!("{:?}", config.notes)
        };
        assert!(
            note.warns && note.text.contains("CINCH_LOG=trace counts"),
            "{note:?}"
        );
        // The same wish is no conflict.
        let same = read(&[("CINCH_P2P_DISABLE", "1"), ("NCCL_P2P_DISABLE", "1")]).unwrap();
        assert!(same.p2p_disable && same.notes.is_empty());
        let ours = [("CINCH_GPU_CHANNELS", "16"), ("NCCL_MAX_CTAS", "8")];
        let ours = read(&ours).unwrap();
        assert_eq!(
            (ours.gpu_channels_for(1), ours.gpu_channels_for(2)),
            (16, 16)
        );
        let [note] = &ours.notes[..] else {
            panic!("{:?}", ours.notes)
        };
        assert!(note.text.contains("CINCH_GPU_CHANNELS counts, with 16"));
    }

    #[test]
    fn bounds_of_channels_raise_nothing() {
        let default = Config::default();
        for (names, channels) in [
            (&[("NCCL_MAX_CTAS", "100")][..], [64, 8]),
            (&[("NCCL_MAX_NCHANNELS", "32")], [32, 8]),
            (&[("NCCL_MAX_CTAS", "4")], [4, 4]),
            (
                &[("NCCL_MAX_CTAS", "4"), ("NCCL_MAX_NCHANNELS", "2")],
                [2, 2],
            ),
            (
                &[("NCCL_MAX_CTAS", "2"), ("NCCL_MAX_NCHANNELS", "4")],
                [2, 2],
            ),
        ] {
            let config = read(names).unwrap();
            assert_eq!(
                [config.gpu_channels_for(1), config.gpu_channels_for(2)],
                channels,
                "{names:?}"
            );
            assert_eq!(config.gpu_channels, default.gpu_channels);
            assert_eq!(config.notes, []);
        }
    }

    #[test]
    fn what_is_not_understood_is_said_and_left_out() {
        for (name, value, said) in [
            ("NCCL_P2P_DISABLE", "yes", "whole number"),
            ("NCCL_ALGO", "NVLS", "Ring, Tree"),
            ("NCCL_ALGO", "^Tree", "Ring, Tree"),
            ("NCCL_PROTO", "LL,Simple", "Simple, LL, LL128"),
            ("NCCL_SOCKET_FAMILY", "6", "AF_INET6"),
            ("NCCL_MAX_CTAS", "0", "above 0"),
            ("NCCL_SOCKET_IFNAME", "", "CINCH_SOCKET_IFNAME"),
            ("NCCL_IB_RETRY_CNT", "7", "for ever"),
            ("NCCL_NET", "AWS Libfabric", "IB and Socket"),
        ] {
            let config = read(&[(name, value)]).unwrap();
            let [note] = &config.notes[..] else {
                panic!("{name}: {:?}", config.notes)
            };
            assert!(note.warns && note.text.contains(said), "{note:?}");
            assert!(note.text.contains(name), "{note:?}");
            let untouched = Config {
                notes: config.notes.clone(),
                ..read(&[]).unwrap()
            };
            assert_eq!(config, untouched, "{name}");
        }
        let quiet = [("NCCL_NET_GDR_LEVEL", "PIX"), ("NCCL_TOPO_FILE", "/x.xml")];
        let quiet = read(&quiet).unwrap();
        assert_eq!(quiet.notes.len(), 2);
        assert!(quiet.notes.iter().all(|note| !note.warns));
        // These ask for what happens anyway.
        for (name, value) in [
            ("NCCL_P2P_LEVEL", "NVL"),
            ("NCCL_MAX_CTAS", "512"),
            ("NCCL_NET", "IB"),
            ("NCCL_IB_GID_INDEX", "-1"),
        ] {
            assert_eq!(read(&[(name, value)]).unwrap(), read(&[]).unwrap());
        }
        assert!(read(&[("NCCL_P2P_LEVEL", "LOC")]).unwrap().p2p_disable);
    }

    #[test]
    fn codecs_that_are_misspelt_or_need_tensors_are_errors() {
        for (name, value) in [
            ("CINCH_CODEC", "int8"),
            ("CINCH_CODEC", "dynamic8:tensor=50"),
            ("CINCH_CODEC", "intra=dynamic8:tensor=50,inter=linear8"),
            ("CINCH_CODEC_RULES", "dp*=fp8"),
            // No communicator has a name by now.
            ("CINCH_CODEC_RULES", "tp*=off,dp*=dynamic8:tensor=50"),
            ("CINCH_CODEC_RULES", "*=dynamic8:tensor=50"),
        ] {
            let error = read(&[(name, value)]).unwrap_err();
            assert!(error.message().contains("CINCH_CODEC"), "{error}");
        }
        // Nothing comes to it.
        let off = [
            ("CINCH_CODEC", "off"),
            ("CINCH_CODEC_RULES", "dp*=dynamic8:tensor=50"),
        ];
        assert!(read(&off).is_ok());
    }
}
