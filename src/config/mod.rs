//! Every setting, once: name, default, range, help. Parsed into a [`Config`] that is passed down.
//!
//! No other module reads the environment (the tool's launcher sets it for its children).

mod codec_policy;
mod knobs;
mod launch;
mod nccl;
mod test_devices;

pub use codec_policy::{CodecLinks, CodecPolicy, CodecRules, CollectiveSet, call_codec};
pub use knobs::{KNOBS, Knob, MOST_GPU_CHANNELS};
pub use launch::{LAUNCHER_VARIABLES, launcher_environment};
pub use nccl::{NCCL_NAMES, NcclName};
#[doc(hidden)]
pub use test_devices::on_rdma_devices;

use crate::error::{Error, Result};
use crate::types::{
    Algorithm, CodecChoice, CodecSpec, DeviceChoice, Kernel, KernelProtocol, LevelCodecs, Protocol,
    Subsystems, TransportKind,
};
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

/// The effective settings of one communicator.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Bytes of one slot's payload; a chunk never encodes to more.
    pub slot_bytes: usize,
    /// Slots of one connection.
    pub slots: usize,
    /// Parallel channels through all ranks.
    pub channels: usize,
    /// Upper bound of slot memory per communicator and rank.
    pub buffer_bytes: usize,
    /// Transport to use, `None` = the best that connects each pair.
    pub transport: Option<TransportKind>,
    /// The memory that calls work on.
    pub device: DeviceChoice,
    /// Keeps GPUs from writing each other's memory: their slots lie in pinned host memory.
    pub p2p_disable: bool,
    /// Whether graphs that hold calls of a communicator are ordered with its other calls.
    pub graph_mixing: bool,
    /// Whether kernels are launched while what is ahead of them in the stream ends (programmatic
    /// dependent launch).
    pub early_launch: bool,
    /// Keeps ranks from sharing host memory.
    pub shm_disable: bool,
    /// Upper bound of the parallel channels between two GPUs, and so of a call's blocks; `None` =
    /// [`Config::GPU_CHANNELS`], on several hosts [`Config::GPU_CHANNELS_BETWEEN_HOSTS`], and no
    /// more than half of what a GPU holds at once.
    pub gpu_channels: Option<usize>,
    /// A bound of that which raises nothing, as programs for NCCL set it: see
    /// [`Config::bound_channels`].
    pub gpu_channels_most: Option<usize>,
    /// Algorithm to use, `None` = the cheapest by the cost model.
    pub algorithm: Option<Algorithm>,
    /// Protocol of kernels to use where it can be, `None` = the cheapest by the cost model.
    pub protocol: Option<Protocol>,
    /// Kind of kernel to use where it can be, `None` = the cheapest by the cost model.
    pub kernel: Option<Kernel>,
    /// Where measured choices of kernels come from.
    pub tuning: TuningChoice,
    /// Codec of calls that name none and admit it.
    pub codec: CodecSpec,
    /// Keeps that codec to the calls where the model of costs says that it pays.
    pub codec_auto: bool,
    /// Codec of contributions inside a host, where it is another one.
    pub codec_intra: Option<CodecSpec>,
    /// Whether compression is off for good: neither rules nor calls turn it on.
    pub codec_off: bool,
    /// Whether the program, not the environment, chose `codec`.
    pub codec_by_program: bool,
    /// Codecs by names of communicators.
    pub codec_rules: CodecRules,
    /// Collectives that a codec carries which no call asked for.
    pub codec_collectives: CollectiveSet,
    /// Communicators that a codec is for which no call asked for.
    pub codec_links: CodecLinks,
    /// Below this many bytes of input the default codec stays out: exact is as fast.
    pub codec_min_bytes: usize,
    /// Every so many coded calls, one is also run exactly on a slice; 0 = never.
    pub codec_sample: u32,
    /// Relative error of such a slice from which the codec is switched off; infinite = none.
    pub codec_bound: f64,
    /// The communicator's name, by which rules find it; empty if it has none.
    pub comm_name: String,
    /// Calls of a group of up to this many bytes each may travel as one; 0: none do.
    pub fuse_bytes: usize,
    /// Threads of calls that encode or decode a large array outside a collective.
    pub threads: usize,
    /// How long a call may wait for a peer.
    pub timeout: Duration,
    /// How long joining a communicator may take.
    pub init_timeout: Duration,
    /// Beat of the control connections.
    pub heartbeat: Duration,
    /// Network interface, by name or by an address prefix; `None` = the first that is up.
    pub interface: Option<String>,
    /// Whether only addresses of IPv6 (or of IPv4) count; `None` = both.
    pub ipv6: Option<bool>,
    /// Sockets for each connected pair and channel.
    pub tcp_sockets: usize,
    /// Keeps RDMA out where the transport is not named.
    pub ib_disable: bool,
    /// RDMA devices and ports, as a list of names; `None` = all.
    pub ib_hca: Option<String>,
    /// The address of a RDMA port, by its place in the table or as text; `None` = the best that
    /// all ranks have.
    pub ib_gid: Option<String>,
    /// Patience for an answer: 4.096 us times two to this.
    pub ib_timeout: u8,
    /// How often a packet without an answer is sent again.
    pub ib_retry: u8,
    /// Queue pairs for each connected pair and channel.
    pub ib_qps: usize,
    /// InfiniBand service level; RoCE priority where the network goes by it.
    pub ib_service_level: u8,
    /// Traffic class of RoCE packets.
    pub ib_traffic_class: u8,
    /// Stands for the machine's identity, so that one machine can play several hosts.
    pub host_id: Option<String>,
    /// Widest instruction set to use: `auto`, `scalar`, `avx2`, `avx512`.
    pub simd: String,
    /// Log threshold: `none`, `version`, `warn`, `info`, `trace`.
    pub log_level: String,
    /// What lines of `info` and `trace` may be about.
    pub log_subsystems: Subsystems,
    /// Log destination; `None` = standard error.
    pub log_file: Option<PathBuf>,
    /// `host:port` of the rendezvous where ranks are discovered from the environment.
    pub comm_id: Option<String>,
    /// File with the job's secret, for ranks that find each other by address.
    pub secret_file: Option<PathBuf>,
    /// Lets ranks that find each other by a non-loopback address do without a secret.
    pub allow_unauthenticated: bool,
    /// What `ncclGetVersion` of the drop-in answers, as NCCL writes versions.
    pub nccl_version: u32,
    /// Where each setting came from, in the order of [`KNOBS`].
    pub origins: Vec<Origin>,
    /// Whether NCCL's names count and its manners hold ([`Config::for_nccl`]).
    pub as_nccl: bool,
    /// What is to be said about the environment.
    pub notes: Vec<Note>,
}

/// Where measured choices of kernels come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TuningChoice {
    /// The library's table for the GPUs, their number and their links, where it has one.
    Auto,
    /// Nowhere: the cost model decides.
    Off,
    /// This file, which must be for them.
    File(PathBuf),
}

/// A sentence about the environment, for the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    /// Whether something is not as it was asked for; else it is information.
    pub warns: bool,
    /// The sentence.
    pub text: String,
}

/// Where a setting came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Nothing was said.
    Default,
    /// An environment variable.
    Environment,
    /// A call of the program.
    Program,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            slot_bytes: 128 << 10,
            slots: 4,
            channels: 2,
            buffer_bytes: 64 << 20,
            transport: None,
            device: DeviceChoice::Host,
            p2p_disable: false,
            graph_mixing: true,
            early_launch: true,
            shm_disable: false,
            gpu_channels: None,
            gpu_channels_most: None,
            algorithm: None,
            protocol: None,
            kernel: None,
            tuning: TuningChoice::Auto,
            codec: CodecSpec::RAW,
            codec_auto: false,
            codec_intra: None,
            codec_off: false,
            codec_by_program: false,
            codec_rules: CodecRules::default(),
            codec_collectives: CollectiveSet::GRADIENTS,
            codec_links: CodecLinks::All,
            codec_min_bytes: 0,
            codec_sample: 0,
            codec_bound: f64::INFINITY,
            comm_name: String::new(),
            fuse_bytes: 64 << 10,
            threads: 1,
            timeout: Duration::from_secs(60),
            init_timeout: Duration::from_secs(60),
            heartbeat: Duration::from_millis(100),
            interface: None,
            ipv6: None,
            tcp_sockets: 1,
            ib_disable: false,
            ib_hca: None,
            ib_gid: None,
            ib_timeout: 16,
            ib_retry: 3,
            ib_qps: 1,
            ib_service_level: 0,
            ib_traffic_class: 0,
            host_id: None,
            simd: "auto".into(),
            log_level: "warn".into(),
            log_subsystems: Subsystems::ALL,
            log_file: None,
            comm_id: None,
            secret_file: None,
            allow_unauthenticated: false,
            nccl_version: 22809,
            origins: vec![Origin::Default; KNOBS.len()],
            as_nccl: false,
            notes: Vec::new(),
        }
    }
}

impl Config {
    /// Channels between two GPUs where no number is asked for: blocks enough for the wire, and few
    /// enough that the calls of two communicators fit an H100 or H200 at once.
    pub const GPU_CHANNELS: usize = 64;

    /// The same where ranks are on several hosts. Few, so that slots are large: a message costs a
    /// proxy and the network the same whatever its size, and 8 channels carry more than a network.
    pub const GPU_CHANNELS_BETWEEN_HOSTS: usize = 8;

    /// Upper bound of the parallel channels between two GPUs of a communicator on so many hosts.
    pub fn gpu_channels_for(&self, hosts: usize) -> usize {
        let channels = self.gpu_channels.unwrap_or(match hosts {
            0 | 1 => Config::GPU_CHANNELS,
            _ => Config::GPU_CHANNELS_BETWEEN_HOSTS,
        });
        channels.min(self.gpu_channels_most.unwrap_or(channels))
    }

    /// Asks for a kernel and its protocol where a call has them; `None` leaves the choice to the cost
    /// model.
    pub fn force_kernel(&mut self, kernel: Option<KernelProtocol>) {
        self.kernel = kernel.map(|kernel| kernel.kernel);
        self.protocol = kernel.map(|kernel| kernel.protocol);
    }

    /// Lets there be at most `most` channels, also where fewer would be by default: of several bounds the
    /// least counts.
    pub fn bound_channels(&mut self, most: usize) {
        if most < MOST_GPU_CHANNELS {
            let least = self.gpu_channels_most.unwrap_or(most).min(most);
            self.gpu_channels_most = Some(least);
        }
    }

    /// The settings that the process environment asks for.
    ///
    /// # Errors
    /// Invalid argument, naming variable, value and range, if a `CINCH_` variable holds a value
    /// that it does not take. Unknown `CINCH_` names are returned by [`Config::unknown_names`].
    pub fn from_env() -> Result<Config> {
        let mut config = Config::default();
        config.take(&|name| std::env::var_os(name))?;
        Ok(config)
    }

    /// The default codecs of both levels.
    pub fn codecs(&self) -> LevelCodecs {
        LevelCodecs {
            intra: self.codec_intra.unwrap_or(self.codec),
            inter: self.codec,
        }
    }

    /// Sets what `environment` holds under our own names.
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

    /// The codec of calls that name none, and whether it has to pay.
    pub fn codec_choice(&self) -> CodecChoice {
        CodecChoice {
            spec: self.codec,
            auto: self.codec_auto,
            intra: self.codec_intra,
        }
    }

    /// Whether environment or program have said something about a setting.
    pub fn says(&self, name: &str) -> bool {
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
                knob.range
            ))
        })?;
        self.origins[index] = origin;
        if name == "CINCH_CODEC" {
            self.codec_by_program = origin == Origin::Program;
        }
        Ok(())
    }

    /// Sets a setting of which nobody has said anything, as the default of a library or a tool.
    ///
    /// # Errors
    /// As [`Config::set`].
    pub fn set_default(&mut self, name: &str, value: &str) -> Result<()> {
        let index = KNOBS.iter().position(|knob| knob.name == name);
        match index.map(|index| self.origins[index]) {
            Some(Origin::Environment | Origin::Program) => Ok(()),
            _ => self.set(name, value, Origin::Default),
        }
    }

    /// `CINCH_` names in the environment that no setting has.
    pub fn unknown_names() -> Vec<String> {
        let mut names: Vec<String> = std::env::vars_os()
            .filter_map(|(name, _)| name.into_string().ok())
            .filter(|name| name.starts_with("CINCH_"))
            .filter(|name| KNOBS.iter().all(|knob| knob.name != name))
            .filter(|name| !knobs::RESERVED.contains(&name.as_str()))
            .collect();
        names.sort();
        names
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_print_and_parse_back() {
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
    fn bad_values_are_refused_by_name() {
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
    fn a_codec_may_be_left_to_the_model() {
        let mut config = Config::default();
        for (text, auto, shown) in [
            ("auto:dynamic8", true, "auto:dynamic8:block=256"),
            ("linear8:block=64", false, "linear8:block=64"),
        ] {
            config.set("CINCH_CODEC", text, Origin::Program).unwrap();
            assert_eq!((config.codec_auto, config.codec.is_lossy()), (auto, true));
            let knob = KNOBS.iter().find(|knob| knob.name == "CINCH_CODEC");
            assert_eq!((knob.unwrap().show)(&config), shown);
        }
    }

    #[test]
    fn defaults_give_way_to_what_was_said() {
        let mut config = Config::default();
        config.set_default("CINCH_SLOTS", "8").unwrap();
        assert_eq!(config.slots, 8);
        config
            .set("CINCH_SLOTS", "16", Origin::Environment)
            .unwrap();
        config.set_default("CINCH_SLOTS", "8").unwrap();
        assert_eq!(config.slots, 16);
        assert!(config.set_default("CINCH_NO_SUCH", "8").is_err());
        assert!(config.set_default("CINCH_CHANNELS", "99").is_err());
    }

    #[test]
    fn sizes_take_units() {
        let mut config = Config::default();
        config
            .set("CINCH_SLOT_BYTES", "256K", Origin::Program)
            .unwrap();
        assert_eq!(config.slot_bytes, 256 << 10);
    }
}
