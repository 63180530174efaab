//! NCCL's environment variables, for the drop-in: a table of variables and their effects.
//!
//! `CINCH_` variables win. If NCCL accepts a value that cinch cannot apply, cinch logs and ignores
//! it, because the program ran with that value under NCCL. Only errors about compression are final:
//! no NCCL variable concerns compression.

use super::{Config, KNOBS, Knob, Note, Origin};
use crate::error::{Error, Result};
use crate::types::{DeviceChoice, Subsystems};
use std::ffi::OsString;
use std::time::Duration;

/// An environment variable of NCCL.
pub struct NcclName {
    /// Name of the environment variable, such as `NCCL_DEBUG`.
    pub name: &'static str,
    /// Effect of the variable in cinch.
    pub means: Meaning,
}

/// The effect of an NCCL variable in cinch.
pub enum Meaning {
    /// Another name for a setting of cinch.
    Setting {
        /// The setting of cinch.
        ours: &'static str,
        /// Translates NCCL's value to cinch's; returns `None` if the value requests what cinch does
        /// by default.
        translate: fn(&str) -> std::result::Result<Option<String>, String>,
    },
    /// Limits the number of thread blocks of a call, unless `CINCH_GPU_CHANNELS` is set.
    MostChannels,
    /// The variable has no effect; the text states the reason for the log.
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

const fn no_effect(name: &'static str, why: &'static str) -> NcclName {
    NcclName {
        name,
        means: Meaning::Nothing(why),
    }
}

/// The NCCL variables that cinch knows. It logs other NCCL variables as having no effect.
pub const NCCL_NAMES: &[NcclName] = &[
    setting("NCCL_SOCKET_IFNAME", "CINCH_SOCKET_IFNAME", unchanged),
    setting("NCCL_SOCKET_FAMILY", "CINCH_SOCKET_FAMILY", family),
    setting("NCCL_COMM_ID", "CINCH_COMM_ID", unchanged),
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
    setting("NCCL_DEBUG_FILE", "CINCH_LOG_FILE", unchanged),
    setting("NCCL_IB_DISABLE", "CINCH_IB_DISABLE", switch),
    setting("NCCL_NET", "CINCH_IB_DISABLE", network),
    setting("NCCL_IB_HCA", "CINCH_IB_HCA", unchanged),
    setting("NCCL_IB_GID_INDEX", "CINCH_IB_GID", gid),
    setting("NCCL_IB_TIMEOUT", "CINCH_IB_TIMEOUT", unchanged),
    setting("NCCL_IB_RETRY_CNT", "CINCH_IB_RETRY", unchanged),
    setting("NCCL_IB_QPS_PER_CONNECTION", "CINCH_IB_QPS", unchanged),
    setting("NCCL_IB_SL", "CINCH_IB_SL", unchanged),
    setting("NCCL_IB_TC", "CINCH_IB_TC", unchanged),
    no_effect(
        "NCCL_NET_GDR_LEVEL",
        "GPU buffers reach NICs through host memory",
    ),
    no_effect(
        "NCCL_TOPO_FILE",
        "cinch probes links with data instead of reading a topology",
    ),
    setting("NCCL_RAS_ENABLE", "CINCH_NCCL_RAS", switch),
    setting("NCCL_RAS_ADDR", "CINCH_NCCL_RAS_ADDR", unchanged),
    no_effect(
        "NCCL_RAS_TIMEOUT_FACTOR",
        "a query waits 5 s, or the time of its TIMEOUT command",
    ),
    setting(
        "NCCL_PROFILER_PLUGIN",
        "CINCH_NCCL_PROFILER_PLUGIN",
        unless_empty,
    ),
    setting("NCCL_TUNER_PLUGIN", "CINCH_NCCL_TUNER_PLUGIN", unless_empty),
    no_effect("NCCL_CONF_FILE", "settings come from the environment alone"),
];

fn unchanged(value: &str) -> std::result::Result<Option<String>, String> {
    Ok(Some(value.to_string()))
}

fn unless_empty(value: &str) -> std::result::Result<Option<String>, String> {
    Ok((!value.is_empty()).then(|| value.to_string()))
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

/// Translates `NCCL_NET`: `socket` disables RDMA, `ib` is the default.
fn network(value: &str) -> std::result::Result<Option<String>, String> {
    match value.trim().to_ascii_lowercase().as_str() {
        "socket" => Ok(Some("1".into())),
        "ib" => Ok(None),
        _ => Err("cinch supports its values IB and Socket only".into()),
    }
}

/// Translates `NCCL_IB_GID_INDEX`, in which -1 is automatic.
fn gid(value: &str) -> std::result::Result<Option<String>, String> {
    match number(value)? {
        -1 => Ok(None),
        index => Ok(Some(index.to_string())),
    }
}

/// Translates `NCCL_P2P_LEVEL`. Only "never" has an effect, because cinch tests each path with data
/// instead of deciding by the kind of path.
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
            "cinch supports its values {} only",
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
            // NCCL logs aborts at a level of its own between INFO and TRACE.
            ("ABORT", "info"),
            ("TRACE", "trace"),
        ],
    )
}

/// Translates `NCCL_DEBUG_SUBSYS`, and leaves out subsystems that cinch does not have.
fn subsystems(value: &str) -> std::result::Result<Option<String>, String> {
    Ok(Some(Subsystems::parse(value).0.to_string()))
}

/// Default timeout of a call of the drop-in. NCCL waits for ever, and programs rely on it: a rank
/// may write a checkpoint while the others are in the next call. Frameworks have watchdogs of some
/// ten minutes. The death of a rank is found without this timeout, which is for stopped processes.
const CALL_TIMEOUT: Duration = Duration::from_secs(86400);
/// Default timeout of joining a communicator of the drop-in.
const INIT_TIMEOUT: Duration = Duration::from_secs(3600);
/// Default size below which calls run without a codec. Loss scales, norms and flags are smaller
/// than this; gradients are larger.
const MIN_BYTES: usize = 1 << 20;

impl Config {
    /// Reads the settings of a program that was built for NCCL: [`Config::from_env`], then
    /// [`NCCL_NAMES`], then defaults that such programs count on. These are buffers on the GPU of the
    /// current context, codecs from 1 MiB and a timeout of a day. [`Config::notes`] lists the
    /// variables without effect.
    ///
    /// # Errors
    /// Invalid argument for bad values of `CINCH_` variables, as in [`Config::from_env`]. Invalid
    /// argument also for unknown names that begin with `CINCH_CODEC`, because the run would be
    /// exact by mistake. Invalid argument for codecs that need tensor ids, which calls of NCCL do
    /// not have.
    #[cfg(feature = "internal")]
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

    /// Reads the settings of a program that was built for NCCL from the given variables; see [`Config::for_nccl`].
    /// Unknown names are not checked.
    ///
    /// # Errors
    /// As for [`Config::for_nccl`].
    #[cfg(feature = "internal")]
    pub fn for_nccl_of(environment: &dyn Fn(&str) -> Option<OsString>) -> Result<Config> {
        let mut config = Config {
            as_nccl: true,
            device: DeviceChoice::Current,
            codec_min_bytes: MIN_BYTES,
            timeout: CALL_TIMEOUT,
            init_timeout: INIT_TIMEOUT,
            log_subsystems: Subsystems::DEFAULT,
            ..Config::default()
        };
        config.take(environment)?;
        for known in NCCL_NAMES {
            if let Some(value) = environment(known.name) {
                config.apply_nccl(known, &value.to_string_lossy());
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

    /// Returns the setting that could give a communicator a codec that needs tensor ids. Every rule is
    /// checked, because communicators have no names yet.
    fn needing_tensor(&self) -> Option<String> {
        if self.codec_off {
            return None;
        }
        if self.codec.needs_tensor() {
            return Some(format!("CINCH_CODEC={}", self.codec));
        }
        let rule = self.codec_rules.needing_tensor()?;
        Some(format!("CINCH_CODEC_RULES has {rule}"))
    }

    /// Applies an NCCL variable, unless a `CINCH_` variable has set another value.
    fn apply_nccl(&mut self, known: &NcclName, value: &str) {
        let name = known.name;
        let (ours, translate) = match known.means {
            Meaning::Nothing(why) => {
                return self.note(false, format!("{name} has no effect: {why}"));
            }
            Meaning::MostChannels => return self.apply_bound(name, value),
            Meaning::Setting { ours, translate } => (ours, translate),
        };
        let translated = match translate(value) {
            Ok(Some(translated)) => translated,
            Ok(None) => return,
            Err(why) => return self.note(true, format!("{name}=\"{value}\" is left out: {why}")),
        };
        let Some(knob) = Knob::find(ours) else {
            return;
        };
        let was_set = self.is_set(ours);
        let before = self.clone();
        if let Err(error) = self.set(ours, &translated, Origin::Environment) {
            *self = before;
            return self.note(true, format!("{name} is left out: {}", error.message()));
        }
        if was_set {
            let (earlier, later) = ((knob.show)(&before), (knob.show)(self));
            *self = before;
            if earlier != later {
                self.note(
                    true,
                    format!("{name}={value} asks for {ours}={later}, but {ours}={earlier} counts"),
                );
            }
        }
    }

    /// Limits the number of thread blocks of a call, unless `CINCH_GPU_CHANNELS` is set.
    fn apply_bound(&mut self, name: &str, value: &str) {
        const OURS: &str = "CINCH_GPU_CHANNELS";
        let most = match channels(value) {
            Ok(most) => most,
            Err(why) => return self.note(true, format!("{name}=\"{value}\" is left out: {why}")),
        };
        if !self.is_set(OURS) {
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
    fn empty_environment_is_exact_with_long_timeouts() {
        let config = read(&[]).unwrap();
        assert_eq!(config.device, DeviceChoice::Current);
        assert!(!config.codec.is_lossy() && config.codec_min_bytes == 1 << 20);
        assert!(config.timeout >= Duration::from_secs(3600));
        assert!(config.notes.is_empty());
        // `CINCH_` variables override the defaults of the drop-in.
        let ours = read(&[("CINCH_DEVICE", "host"), ("CINCH_CODEC_MIN_BYTES", "0")]).unwrap();
        assert_eq!((ours.device, ours.codec_min_bytes), (DeviceChoice::Host, 0));
    }

    #[test]
    fn nccl_variable_sets_its_setting() {
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
            ("NCCL_PROFILER_PLUGIN", "inspector"),
            ("NCCL_TUNER_PLUGIN", ""),
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
        assert_eq!(config.nccl_profiler_plugin.as_deref(), Some("inspector"));
        assert_eq!(config.nccl_tuner_plugin, None);
        assert_eq!(config.notes, []);
    }

    #[test]
    fn nccl_variables_are_in_the_manual() {
        let manual = include_str!("../../docs/codec-rules.md");
        for known in NCCL_NAMES {
            // The manual shows a variable's name either alone or followed by a value.
            let is_there = |end: &str| manual.contains(&format!("`{}{end}", known.name));
            assert!(is_there("`") || is_there("="), "{}", known.name);
        }
    }

    #[test]
    fn nccl_variable_names_an_existing_setting() {
        for known in NCCL_NAMES {
            assert!(known.name.starts_with("NCCL_"));
            if let Meaning::Setting { ours, .. } = known.means {
                assert!(KNOBS.iter().any(|knob| knob.name == ours), "{ours}");
            }
        }
    }

    #[test]
    fn cinch_variable_wins_with_one_note() {
        let config = read(&[("CINCH_LOG", "trace"), ("NCCL_DEBUG", "WARN")]).unwrap();
        assert_eq!(config.log_level, "trace");
        let [note] = &config.notes[..] else {
            panic!("{:?}", config.notes)
        };
        assert!(
            note.warns && note.text.contains("CINCH_LOG=trace counts"),
            "{note:?}"
        );
        // Setting both names to equal values is no conflict.
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
    fn bound_of_channels_never_raises_their_number() {
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
    fn unknown_value_is_left_out_with_a_note() {
        for (name, value, reason) in [
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
            assert!(note.warns && note.text.contains(reason), "{note:?}");
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
        // These values request what cinch does by default.
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
    fn misspelt_codec_or_codec_with_tensors_is_refused() {
        for (name, value) in [
            ("CINCH_CODEC", "int8"),
            ("CINCH_CODEC", "dynamic8:tensor=50"),
            ("CINCH_CODEC", "intra=dynamic8:tensor=50,inter=linear8"),
            ("CINCH_CODEC_RULES", "dp*=fp8"),
            // A rule with a tensor codec is refused at once, although no communicator has a name
            // yet.
            ("CINCH_CODEC_RULES", "tp*=off,dp*=dynamic8:tensor=50"),
            ("CINCH_CODEC_RULES", "*=dynamic8:tensor=50"),
        ] {
            let error = read(&[(name, value)]).unwrap_err();
            assert!(error.message().contains("CINCH_CODEC"), "{error}");
        }
        // `CINCH_CODEC=off` disables every rule, so a rule with a tensor codec is then not refused.
        let off = [
            ("CINCH_CODEC", "off"),
            ("CINCH_CODEC_RULES", "dp*=dynamic8:tensor=50"),
        ];
        assert!(read(&off).is_ok());
    }
}
