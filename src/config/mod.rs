//! Settings: one table ([`KNOBS`]), parsed into a [`Config`] that is passed down.
//!
//! No other module reads the environment; the tool's launcher sets it for its children.

mod cache;
mod codec_policy;
mod codec_rules;
mod emulated;
mod kinds;
mod knobs;
mod launch;
mod loopback_address;
mod nccl;
mod profiler;
#[cfg(feature = "internal")]
mod test_devices;

pub use cache::{cache_directory, runtime_directory};
pub use codec_policy::{CodecLinks, CodecPolicy, PolicyCodec, call_codec};
pub use codec_rules::{CodecRules, CollectiveSet, CommFacts};
pub use emulated::EmulatedMachine;
pub use kinds::parse_bytes;
pub use knobs::{Config, KNOBS, Knob, MOST_GPU_CHANNELS, Sharing};
pub use launch::{LAUNCHER_VARIABLES, launcher_environment};
pub use loopback_address::loopback_addresses;
pub use nccl::{NCCL_NAMES, NcclName};
pub(crate) use profiler::{NVTX_VARIABLE, nvtx_library};
#[cfg(feature = "internal")]
pub use test_devices::on_rdma_devices;
#[cfg(all(test, feature = "internal"))]
pub use test_devices::test_number;

use crate::error::{Error, Result};
use crate::types::KernelProtocol;
use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;

/// Source of facts that the library knows, that a file states, or that are not to be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FileChoice {
    /// The library's own facts: its tuning table for these GPUs, or the topology that it detects.
    Auto,
    /// No such facts are used.
    Off,
    /// The facts of a file: a tuning table, or a topology in NCCL's XML format.
    File(PathBuf),
}

impl fmt::Display for FileChoice {
    /// Formats the choice as a value of `CINCH_TUNING` or `CINCH_TOPO`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FileChoice::Auto => f.write_str("auto"),
            FileChoice::Off => f.write_str("off"),
            FileChoice::File(path) => path.display().fmt(f),
        }
    }
}

/// A message about an environment variable, for the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    /// Whether the message is a warning, because a requested value has no effect; otherwise it is
    /// information.
    pub warns: bool,
    /// Text of the message.
    pub text: String,
}

/// Origin of a setting's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The default of the setting.
    Default,
    /// An environment variable.
    Environment,
    /// A call of the program.
    Program,
}

impl Config {
    /// Default number of channels between two GPUs of one host. This many thread blocks saturate
    /// the link, and the calls of two communicators fit on an H100 or H200 at once.
    pub const GPU_CHANNELS: usize = 64;

    /// Default number of channels between two GPUs if ranks are on several hosts. With fewer
    /// channels the slots are larger, and each message has a fixed cost for proxy thread and
    /// network. 8 channels already exceed a network's bandwidth.
    pub const GPU_CHANNELS_BETWEEN_HOSTS: usize = 8;

    /// Returns the upper bound of the channels between two GPUs of a communicator on `hosts` hosts.
    pub fn gpu_channels_for(&self, hosts: usize) -> usize {
        let channels = self.gpu_channels.unwrap_or(match hosts {
            0 | 1 => Config::GPU_CHANNELS,
            _ => Config::GPU_CHANNELS_BETWEEN_HOSTS,
        });
        channels.min(self.gpu_channels_most.unwrap_or(channels))
    }

    /// Limits the channels between two GPUs to at most `most`. The smallest of several limits
    /// applies.
    pub fn bound_channels(&mut self, most: usize) {
        if most < MOST_GPU_CHANNELS {
            let least = self.gpu_channels_most.unwrap_or(most).min(most);
            self.gpu_channels_most = Some(least);
        }
    }

    /// Forces a kernel and its protocol for calls that support them; `None` leaves the choice to the cost
    /// model.
    #[cfg(feature = "internal")]
    pub fn force_kernel(&mut self, kernel: Option<KernelProtocol>) {
        self.kernel = kernel.map(|kernel| kernel.kernel);
        self.protocol = kernel.map(|kernel| kernel.protocol);
    }

    /// Returns the machine whose links shared memory emulates; `None` outside of `cinch bench --emulate`.
    pub(crate) fn emulated_machine(&self) -> Option<&EmulatedMachine> {
        #[cfg(feature = "internal")]
        return self.emulated.as_ref();
        #[cfg(not(feature = "internal"))]
        None
    }

    /// Reads the settings of the process environment.
    ///
    /// # Errors
    /// Invalid argument, naming variable, value and range, if a `CINCH_` variable holds a value
    /// that it does not take. Unknown `CINCH_` names are returned by [`Config::unknown_names`].
    pub fn from_env() -> Result<Config> {
        let mut config = Config::default();
        config.take(&|name| std::env::var_os(name))?;
        Ok(config)
    }

    /// Sets the values of the `CINCH_` variables in `environment`.
    fn take(&mut self, environment: &dyn Fn(&str) -> Option<OsString>) -> Result<()> {
        for knob in KNOBS {
            let Some(value) = environment(knob.name) else {
                continue;
            };
            let value = value
                .into_string()
                .map_err(|_| Error::invalid_argument(format!("{} is not UTF-8", knob.name)))?;
            self.set(knob.name, &value, Origin::Environment)?;
        }
        Ok(())
    }

    /// Returns whether the environment or the program has set a setting.
    pub fn is_set(&self, name: &str) -> bool {
        let mut settings = KNOBS.iter().zip(&self.origins);
        settings.any(|(knob, origin)| knob.name == name && *origin != Origin::Default)
    }

    /// Sets one setting by its `CINCH_` name.
    ///
    /// # Errors
    /// Invalid argument if there is no such setting or the value is outside its range.
    pub fn set(&mut self, name: &str, value: &str, origin: Origin) -> Result<()> {
        let (index, knob) = KNOBS
            .iter()
            .enumerate()
            .find(|(_, knob)| knob.name == name)
            .ok_or_else(|| Error::invalid_argument(format!("no setting is called {name}")))?;
        (knob.apply)(self, value).map_err(|why| {
            let shown: String = value.chars().take(80).collect();
            Error::invalid_argument(format!(
                "{name}=\"{shown}\": {why}; it takes {}",
                knob.range()
            ))
        })?;
        self.origins[index] = origin;
        if name == "CINCH_CODEC" {
            self.codec_by_program = origin == Origin::Program;
        }
        Ok(())
    }

    /// Returns the `CINCH_` names in the environment that are no setting, sorted.
    pub fn unknown_names() -> Vec<String> {
        let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
        unknown_among(names)
    }
}

/// Returns the names that begin with `CINCH_` and are no settings, sorted.
pub fn unknown_among(names: impl Iterator<Item = String>) -> Vec<String> {
    let mut names: Vec<String> = names
        .filter(|name| name.starts_with("CINCH_"))
        .filter(|name| KNOBS.iter().all(|knob| knob.name != name))
        .filter(|name| !knobs::RESERVED.contains(&name.as_str()))
        .filter(|name| !name.starts_with(knobs::OF_TESTS))
        .collect();
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_survives_text() {
        let default = Config::default();
        for knob in KNOBS {
            let shown = (knob.show)(&default);
            if shown.is_empty() {
                continue;
            }
            let mut config = Config::default();
            config.set(knob.name, &shown, Origin::Default).unwrap();
            assert_eq!(config, default, "{}={shown}", knob.name);
        }
    }

    #[test]
    fn bad_value_is_refused_by_name() {
        for (name, value) in [
            ("CINCH_SLOT_BYTES", "-1"),
            ("CINCH_SLOT_BYTES", "1"),
            ("CINCH_SLOT_BYTES", "999999999999999999999"),
            ("CINCH_SLOTS", ""),
            ("CINCH_TIMEOUT", "NaN"),
            ("CINCH_TIMEOUT", "-3"),
            ("CINCH_CODEC", "int8"),
            ("CINCH_CODEC", "auto"),
            ("CINCH_CODEC", "auto:"),
            ("CINCH_FUSE_BYTES", "2M"),
            ("CINCH_THREADS", "0"),
            ("CINCH_TRANSPORT", "ib"),
            ("CINCH_DEVICE", "gpu"),
            ("CINCH_P2P_DISABLE", "yes"),
            ("CINCH_GPU_CHANNELS", "129"),
            ("CINCH_ALGO", "magic"),
            ("CINCH_PROTO", "ll64"),
            ("CINCH_TUNING", " "),
            ("CINCH_SIMD", "avx1024"),
            ("CINCH_CODEC", "of"),
            ("CINCH_CODEC_RULES", "dp*=dynamic9"),
            ("CINCH_CODEC_COLLECTIVES", "all_reduce,allgather"),
            ("CINCH_CODEC_LINKS", "nvlink"),
            ("CINCH_CODEC_SAMPLE", "-1"),
            ("CINCH_CODEC_BOUND", "0"),
            ("CINCH_CODEC_BOUND", "NaN"),
            ("CINCH_SOCKET_FAMILY", "ipx"),
            ("CINCH_SHM_DISABLE", "2"),
            ("CINCH_IB_RETRY", "7"),
            ("CINCH_IB_TIMEOUT", "0"),
            ("CINCH_IB_GID", "eth0"),
            ("CINCH_IB_HCA", ""),
            ("CINCH_LOG_SUBSYS", "INIT,NVLS"),
        ] {
            let error = Config::default()
                .set(name, value, Origin::Program)
                .unwrap_err();
            assert!(
                error.message().contains(name) && error.message().contains("takes"),
                "{error}"
            );
        }
        assert!(
            Config::default()
                .set("CINCH_NO_SUCH", "1", Origin::Program)
                .is_err()
        );
    }

    #[test]
    fn optional_codec_is_shown_with_auto() {
        let mut config = Config::default();
        for (text, auto, shown) in [
            ("auto:dynamic8", true, "auto:dynamic8:block=256"),
            ("linear8:block=64", false, "linear8:block=64"),
        ] {
            config.set("CINCH_CODEC", text, Origin::Program).unwrap();
            assert_eq!((config.codec.auto, config.codec.is_lossy()), (auto, true));
            let knob = Knob::find("CINCH_CODEC").unwrap();
            assert_eq!((knob.show)(&config), shown);
        }
    }

    #[test]
    fn range_is_derived_from_the_kind_of_value() {
        for (name, range) in [
            ("CINCH_SLOT_BYTES", "4K to 16M, a multiple of 64"),
            ("CINCH_BUFFER_BYTES", "64K to 64G"),
            ("CINCH_SLOTS", "a power of two from 2 to 64"),
            ("CINCH_GPU_CHANNELS", "auto or 1 to 128"),
            ("CINCH_SOCKET_FAMILY", "auto, ipv4 or ipv6"),
            ("CINCH_CODEC_LINKS", "all or network"),
            ("CINCH_TIMEOUT", "0.01 to 1000000 seconds"),
            ("CINCH_IB_TIMEOUT", "8 to 22: 4.096 us times two to this"),
            (
                "CINCH_IB_GID",
                "auto, a place in the port's table of addresses, or an address",
            ),
        ] {
            assert_eq!(Knob::find(name).unwrap().range(), range);
        }
    }

    #[test]
    fn byte_count_takes_units() {
        let mut config = Config::default();
        config
            .set("CINCH_SLOT_BYTES", "256K", Origin::Program)
            .unwrap();
        assert_eq!(config.slot_bytes, 256 << 10);
    }
}
