//! The table of settings.

use super::codec_policy::{CodecLinks, CodecRules, CollectiveSet, parse_choice};
use super::{Config, TuningChoice};
use crate::types::{Algorithm, CodecSpec, Kernel, Protocol, Subsystems, TransportKind};
use std::time::Duration;

/// One setting.
pub struct Knob {
    /// Environment variable.
    pub name: &'static str,
    /// What values it takes, as a phrase.
    pub range: &'static str,
    /// What it does.
    pub help: &'static str,
    pub(super) apply: fn(&mut Config, &str) -> Result<(), String>,
    /// The value in effect, as it would be written; empty if unset.
    pub show: fn(&Config) -> String,
}

/// `CINCH_` variables that are not settings of the library: the launcher's messages to its
/// children, the build's own, and the tests'.
pub(super) const RESERVED: &[&str] = &[
    "CINCH_CUDA",
    "CINCH_CUDA_ARCHS",
    "CINCH_CUDA_LINES",
    "CINCH_LAUNCH_CORES",
    "CINCH_LAUNCH_ID",
    "CINCH_LAUNCH_RANK",
    "CINCH_LAUNCH_SIZE",
    "CINCH_TEST_CHILD",
    "CINCH_TEST_ENDINGS",
    "CINCH_TEST_KILLS",
    "CINCH_TEST_MISMATCHES",
    "CINCH_TEST_NCCL_INCLUDE",
    "CINCH_TEST_PATTERNS",
    "CINCH_TEST_RDMA",
    "CINCH_TEST_SEED",
];

/// Most blocks that a call on a GPU may have.
pub const MOST_GPU_CHANNELS: usize = 128;

/// Parses a byte count with an optional binary K, M or G.
pub(crate) fn parse_bytes(text: &str) -> Result<usize, String> {
    let text = text.trim();
    let (digits, unit) = match text.char_indices().last() {
        Some((at, 'k' | 'K')) => (&text[..at], 10),
        Some((at, 'm' | 'M')) => (&text[..at], 20),
        Some((at, 'g' | 'G')) => (&text[..at], 30),
        _ => (text, 0),
    };
    let number: usize = digits.parse().map_err(|_| "not a byte count".to_string())?;
    number
        .checked_mul(1 << unit)
        .ok_or_else(|| "too large".to_string())
}

fn bytes_between(text: &str, low: usize, high: usize) -> Result<usize, String> {
    let value = parse_bytes(text)?;
    if (low..=high).contains(&value) {
        Ok(value)
    } else {
        Err("out of range".into())
    }
}

fn count(text: &str, low: usize, high: usize) -> Result<usize, String> {
    match text.trim().parse::<usize>() {
        Ok(value) if (low..=high).contains(&value) => Ok(value),
        Ok(_) => Err("out of range".into()),
        Err(_) => Err("not a whole number".into()),
    }
}

fn seconds(text: &str, low: f64, high: f64) -> Result<Duration, String> {
    match text.trim().parse::<f64>() {
        Ok(value) if value >= low && value <= high => Ok(Duration::from_secs_f64(value)),
        Ok(_) => Err("out of range".into()),
        Err(_) => Err("not a number of seconds".into()),
    }
}

fn one_of<T>(text: &str, find: impl Fn(&str) -> Option<T>) -> Result<Option<T>, String> {
    match text.trim() {
        "auto" => Ok(None),
        name => find(name).map(Some).ok_or_else(|| "no such name".into()),
    }
}

fn word(text: &str, words: &[&str]) -> Result<String, String> {
    let text = text.trim().to_ascii_lowercase();
    if words.contains(&text.as_str()) {
        Ok(text)
    } else {
        Err("no such name".into())
    }
}

fn non_empty(text: &str) -> Result<String, String> {
    if text.trim().is_empty() {
        Err("empty".into())
    } else {
        Ok(text.trim().to_string())
    }
}

/// Every setting.
pub const KNOBS: &[Knob] = &[
    Knob {
        name: "CINCH_SLOT_BYTES",
        range: "4K to 16M, a multiple of 64",
        help: "bytes of one slot in host memory; a chunk never encodes to more",
        apply: |config, text| {
            let value = bytes_between(text, 4 << 10, 16 << 20)?;
            if value % 64 != 0 {
                return Err("not a multiple of 64".into());
            }
            config.slot_bytes = value;
            Ok(())
        },
        show: |config| config.slot_bytes.to_string(),
    },
    Knob {
        name: "CINCH_SLOTS",
        range: "a power of two from 2 to 64",
        help: "slots of one connection in host memory",
        apply: |config, text| {
            let value = count(text, 2, 64)?;
            if !value.is_power_of_two() {
                return Err("not a power of two".into());
            }
            config.slots = value;
            Ok(())
        },
        show: |config| config.slots.to_string(),
    },
    Knob {
        name: "CINCH_CHANNELS",
        range: "1 to 16",
        help: "parallel channels through all ranks",
        apply: |config, text| count(text, 1, 16).map(|value| config.channels = value),
        show: |config| config.channels.to_string(),
    },
    Knob {
        name: "CINCH_BUFFER_BYTES",
        range: "64K to 64G",
        help: "upper bound of slot memory per communicator and rank; slots shrink to fit it",
        apply: |config, text| {
            bytes_between(text, 64 << 10, 64 << 30).map(|value| config.buffer_bytes = value)
        },
        show: |config| config.buffer_bytes.to_string(),
    },
    Knob {
        name: "CINCH_TRANSPORT",
        range: "auto, loopback, shm, tcp, rdma or cuda",
        help: "transport to use between all ranks",
        apply: |config, text| {
            one_of(text, TransportKind::from_name).map(|value| config.transport = value)
        },
        show: |config| config.transport.map_or("auto", TransportKind::name).into(),
    },
    Knob {
        name: "CINCH_DEVICE",
        range: "host, cuda or cuda:N",
        help: "memory that calls work on; cuda is the GPU of the thread's current context, else 0",
        apply: |config, text| text.parse().map(|value| config.device = value),
        show: |config| config.device.to_string(),
    },
    Knob {
        name: "CINCH_P2P_DISABLE",
        range: "0 or 1",
        help: "keeps GPUs from writing each other's memory: slots lie in pinned host memory",
        apply: |config, text| count(text, 0, 1).map(|value| config.p2p_disable = value == 1),
        show: |config| u8::from(config.p2p_disable).to_string(),
    },
    Knob {
        name: "CINCH_GRAPH_MIXING",
        range: "0 or 1",
        help: "orders replays of CUDA graphs with a communicator's other calls; 0 leaves it to you",
        apply: |config, text| count(text, 0, 1).map(|value| config.graph_mixing = value == 1),
        show: |config| u8::from(config.graph_mixing).to_string(),
    },
    Knob {
        name: "CINCH_EARLY_LAUNCH",
        range: "0 or 1",
        help: "launches kernels while what is ahead of them in the stream ends; Hopper and newer",
        apply: |config, text| count(text, 0, 1).map(|value| config.early_launch = value == 1),
        show: |config| u8::from(config.early_launch).to_string(),
    },
    Knob {
        name: "CINCH_SHM_DISABLE",
        range: "0 or 1",
        help: "keeps ranks from sharing host memory: TCP carries it, and GPUs need peer memory",
        apply: |config, text| count(text, 0, 1).map(|value| config.shm_disable = value == 1),
        show: |config| u8::from(config.shm_disable).to_string(),
    },
    Knob {
        name: "CINCH_GPU_CHANNELS",
        range: "auto or 1 to 128",
        help: "upper bound of a call's blocks; auto is 64, on several hosts 8, or half of what the GPU holds if less",
        apply: |config, text| {
            config.gpu_channels = match text.trim() {
                "auto" => None,
                number => Some(count(number, 1, MOST_GPU_CHANNELS)?),
            };
            Ok(())
        },
        show: |config| {
            let number = config.gpu_channels.map(|value| value.to_string());
            number.unwrap_or_else(|| "auto".into())
        },
    },
    Knob {
        name: "CINCH_ALGO",
        range: "auto, ring, tree, oneshot, direct or hierarchical",
        help: "algorithm to use where the collective has it",
        apply: |config, text| {
            one_of(text, Algorithm::from_name).map(|value| config.algorithm = value)
        },
        show: |config| config.algorithm.map_or("auto", Algorithm::name).into(),
    },
    Knob {
        name: "CINCH_PROTO",
        range: "auto, simple, ll or ll128",
        help: "protocol of kernels, where they have it",
        apply: |config, text| {
            one_of(text, Protocol::from_name).map(|value| config.protocol = value)
        },
        show: |config| config.protocol.map_or("auto", Protocol::name).into(),
    },
    Knob {
        name: "CINCH_KERNEL",
        range: "auto, schedule or fused",
        help: "kernels that interpret a schedule, or fused ones for small messages where there is one",
        apply: |config, text| one_of(text, Kernel::from_name).map(|value| config.kernel = value),
        show: |config| config.kernel.map_or("auto", Kernel::name).into(),
    },
    Knob {
        name: "CINCH_TUNING",
        range: "auto, off or the path of a table of `cinch tune`",
        help: "measured choices of algorithm, protocol and blocks on GPUs: the library's where it has \
               a table for them, none, or a file; CINCH_ALGO, CINCH_KERNEL, CINCH_PROTO and CINCH_GPU_CHANNELS win",
        apply: |config, text| {
            config.tuning = match text.trim() {
                "auto" => TuningChoice::Auto,
                "off" => TuningChoice::Off,
                _ => TuningChoice::File(non_empty(text)?.into()),
            };
            Ok(())
        },
        show: |config| match &config.tuning {
            TuningChoice::Auto => "auto".into(),
            TuningChoice::Off => "off".into(),
            TuningChoice::File(path) => path.display().to_string(),
        },
    },
    Knob {
        name: "CINCH_CODEC",
        range: "off, [auto:]NAME[:block=B][:tensor=K][:offset=E][:seed=S][:tau=T], see `cinch codecs`, \
                or intra=NAME...,inter=NAME...",
        help: "codec of calls that name none and admit it: sums and averages of f16, bf16, f32; \
               with auto only where measured costs say that it pays; off is final for rules and calls",
        apply: |config, text| {
            if text.trim() == "off" {
                (config.codec, config.codec_auto) = (CodecSpec::RAW, false);
                config.codec_intra = None;
                config.codec_off = true;
                return Ok(());
            }
            let choice = parse_choice(text)?;
            // Nothing narrower turns on what was turned off for good.
            if !config.codec_off {
                (config.codec, config.codec_auto) = (choice.spec, choice.auto);
                config.codec_intra = choice.intra;
            }
            Ok(())
        },
        show: |config| match config.codec_off {
            true => "off".into(),
            false => config.codec_choice().to_string(),
        },
    },
    Knob {
        name: "CINCH_CODEC_RULES",
        range: "PATTERN=off or PATTERN=CODEC[:min=BYTES][:for=COLLECTIVE+...], commas between",
        help: "codecs by names of communicators, in which * and ? stand for any text and character; the first that fits counts",
        apply: |config, text| CodecRules::parse(text).map(|value| config.codec_rules = value),
        show: |config| config.codec_rules.to_string(),
    },
    Knob {
        name: "CINCH_CODEC_COLLECTIVES",
        range: "names of collectives, commas between",
        help: "collectives that a codec carries which no call asked for",
        apply: |config, text| {
            CollectiveSet::parse(text, ',').map(|value| config.codec_collectives = value)
        },
        show: |config| config.codec_collectives.to_string(),
    },
    Knob {
        name: "CINCH_CODEC_LINKS",
        range: "all or network",
        help: "network keeps calls exact that ask for no codec, where all ranks are on one host",
        apply: |config, text| {
            config.codec_links = match text.trim() {
                "all" => CodecLinks::All,
                "network" => CodecLinks::Network,
                _ => return Err("no such name".into()),
            };
            Ok(())
        },
        show: |config| match config.codec_links {
            CodecLinks::All => "all".into(),
            CodecLinks::Network => "network".into(),
        },
    },
    Knob {
        name: "CINCH_CODEC_MIN_BYTES",
        range: "0 to 64G",
        help: "input bytes below which the default codec stays out",
        apply: |config, text| {
            bytes_between(text, 0, 64 << 30).map(|value| config.codec_min_bytes = value)
        },
        show: |config| config.codec_min_bytes.to_string(),
    },
    Knob {
        name: "CINCH_CODEC_SAMPLE",
        range: "0 to 1000000000 calls",
        help: "every so many coded sums of a communicator, one is also run exactly on a slice and its error logged; 0 is never",
        apply: |config, text| {
            count(text, 0, 1_000_000_000).map(|value| config.codec_sample = value as u32)
        },
        show: |config| config.codec_sample.to_string(),
    },
    Knob {
        name: "CINCH_CODEC_BOUND",
        range: "a number above 0, or inf",
        help: "relative RMS error of such a slice beyond which a communicator goes on without its codec",
        apply: |config, text| match text.trim().parse::<f64>() {
            Ok(value) if value > 0.0 => {
                config.codec_bound = value;
                Ok(())
            }
            _ => Err("no such bound".into()),
        },
        show: |config| config.codec_bound.to_string(),
    },
    Knob {
        name: "CINCH_FUSE_BYTES",
        range: "0 to 1M",
        help: "all_reduces of a group up to this many bytes each travel together on host memory, \
               so all ranks must group them alike; 0 keeps them apart",
        apply: |config, text| {
            bytes_between(text, 0, 1 << 20).map(|value| config.fuse_bytes = value)
        },
        show: |config| config.fuse_bytes.to_string(),
    },
    Knob {
        name: "CINCH_THREADS",
        range: "1 to 256",
        help: "threads that encode or decode a large array outside a collective",
        apply: |config, text| count(text, 1, 256).map(|value| config.threads = value),
        show: |config| config.threads.to_string(),
    },
    Knob {
        name: "CINCH_TIMEOUT",
        range: "0.01 to 1000000 seconds",
        help: "how long a call may wait for a peer",
        apply: |config, text| seconds(text, 0.01, 1e6).map(|value| config.timeout = value),
        show: |config| config.timeout.as_secs_f64().to_string(),
    },
    Knob {
        name: "CINCH_INIT_TIMEOUT",
        range: "0.01 to 1000000 seconds",
        help: "how long joining a communicator may take",
        apply: |config, text| seconds(text, 0.01, 1e6).map(|value| config.init_timeout = value),
        show: |config| config.init_timeout.as_secs_f64().to_string(),
    },
    Knob {
        name: "CINCH_HEARTBEAT",
        range: "0.01 to 60 seconds",
        help: "beat of the control connections",
        apply: |config, text| seconds(text, 0.01, 60.0).map(|value| config.heartbeat = value),
        show: |config| config.heartbeat.as_secs_f64().to_string(),
    },
    Knob {
        name: "CINCH_SOCKET_IFNAME",
        range: "names or beginnings of names or addresses, commas between; =NAME is exact, ^ excludes",
        help: "network interface for TCP; unset takes the first that is up, loopback for one host",
        apply: |config, text| non_empty(text).map(|value| config.interface = Some(value)),
        show: |config| config.interface.clone().unwrap_or_default(),
    },
    Knob {
        name: "CINCH_SOCKET_FAMILY",
        range: "auto, ipv4 or ipv6",
        help: "addresses that count when an interface is chosen; auto takes IPv4 before IPv6",
        apply: |config, text| {
            config.ipv6 = match text.trim() {
                "auto" => None,
                "ipv4" => Some(false),
                "ipv6" => Some(true),
                _ => return Err("no such name".into()),
            };
            Ok(())
        },
        show: |config| match config.ipv6 {
            None => "auto".into(),
            Some(false) => "ipv4".into(),
            Some(true) => "ipv6".into(),
        },
    },
    Knob {
        name: "CINCH_TCP_SOCKETS",
        range: "1 to 16",
        help: "sockets for each connected pair and channel",
        apply: |config, text| count(text, 1, 16).map(|value| config.tcp_sockets = value),
        show: |config| config.tcp_sockets.to_string(),
    },
    Knob {
        name: "CINCH_IB_DISABLE",
        range: "0 or 1",
        help: "keeps RDMA out where CINCH_TRANSPORT does not ask for it: TCP connects hosts",
        apply: |config, text| count(text, 0, 1).map(|value| config.ib_disable = value == 1),
        show: |config| u8::from(config.ib_disable).to_string(),
    },
    Knob {
        name: "CINCH_IB_HCA",
        range: "names or beginnings of names of devices, :PORT behind, commas between; = in front is exact, ^ excludes",
        help: "RDMA devices and ports; unset takes all that are up",
        apply: |config, text| non_empty(text).map(|value| config.ib_hca = Some(value)),
        show: |config| config.ib_hca.clone().unwrap_or_default(),
    },
    Knob {
        name: "CINCH_IB_GID",
        range: "auto, a place in the port's table of addresses, or an address",
        help: "address of a RDMA port; auto takes RoCE v2 over IPv4, then over IPv6, then RoCE v1, whichever all ranks have",
        apply: |config, text| {
            let text = text.trim();
            let known = text.parse::<u8>().is_ok() || text.parse::<std::net::IpAddr>().is_ok();
            config.ib_gid = match text {
                "auto" => None,
                _ if known => Some(text.into()),
                _ => return Err("neither a place in the table nor an address".into()),
            };
            Ok(())
        },
        show: |config| config.ib_gid.clone().unwrap_or_else(|| "auto".into()),
    },
    Knob {
        name: "CINCH_IB_TIMEOUT",
        range: "8 to 22: 4.096 us times two to this",
        help: "how long a RDMA device waits for an answer before it sends again",
        apply: |config, text| count(text, 8, 22).map(|value| config.ib_timeout = value as u8),
        show: |config| config.ib_timeout.to_string(),
    },
    Knob {
        name: "CINCH_IB_RETRY",
        range: "0 to 6",
        help: "how often it sends again before the peer counts as dead",
        apply: |config, text| match count(text, 0, 7)? {
            7 => Err(
                "7 may mean for ever to a device, and a dead peer would never be noticed".into(),
            ),
            value => {
                config.ib_retry = value as u8;
                Ok(())
            }
        },
        show: |config| config.ib_retry.to_string(),
    },
    Knob {
        name: "CINCH_IB_QPS",
        range: "1 to 8",
        help: "RDMA queue pairs for each connected pair and channel; messages take turns",
        apply: |config, text| count(text, 1, 8).map(|value| config.ib_qps = value),
        show: |config| config.ib_qps.to_string(),
    },
    Knob {
        name: "CINCH_IB_SL",
        range: "0 to 15",
        help: "InfiniBand service level; RoCE priority where the network goes by it",
        apply: |config, text| count(text, 0, 15).map(|value| config.ib_service_level = value as u8),
        show: |config| config.ib_service_level.to_string(),
    },
    Knob {
        name: "CINCH_IB_TC",
        range: "0 to 255",
        help: "traffic class of RoCE packets, by which switches choose queues",
        apply: |config, text| {
            count(text, 0, 255).map(|value| config.ib_traffic_class = value as u8)
        },
        show: |config| config.ib_traffic_class.to_string(),
    },
    Knob {
        name: "CINCH_HOST_ID",
        range: "any text",
        help: "stands for the machine's identity, so that one machine can play several hosts",
        apply: |config, text| non_empty(text).map(|value| config.host_id = Some(value)),
        show: |config| config.host_id.clone().unwrap_or_default(),
    },
    Knob {
        name: "CINCH_SIMD",
        range: "auto, scalar, avx2 or avx512",
        help: "widest instruction set to use; results do not depend on it",
        apply: |config, text| {
            word(text, &["auto", "scalar", "avx2", "avx512"]).map(|value| config.simd = value)
        },
        show: |config| config.simd.clone(),
    },
    Knob {
        name: "CINCH_LOG",
        range: "none, version, warn, info or trace",
        help: "log threshold",
        apply: |config, text| {
            word(text, &["none", "version", "warn", "info", "trace"])
                .map(|value| config.log_level = value)
        },
        show: |config| config.log_level.clone(),
    },
    Knob {
        name: "CINCH_LOG_SUBSYS",
        range: "ALL or names such as INIT,COLL,ENV, commas between; ^ in front excludes them",
        help: "what lines of info and trace may be about",
        apply: |config, text| match Subsystems::parse(text) {
            (subsystems, unknown) if unknown.is_empty() => {
                config.log_subsystems = subsystems;
                Ok(())
            }
            (_, unknown) => Err(format!("no subsystem is called {}", unknown.join(", "))),
        },
        show: |config| config.log_subsystems.to_string(),
    },
    Knob {
        name: "CINCH_LOG_FILE",
        range: "a path; %h and %p stand for host and process",
        help: "log destination; unset is standard error",
        apply: |config, text| non_empty(text).map(|value| config.log_file = Some(value.into())),
        show: |config| {
            config
                .log_file
                .as_ref()
                .map_or(String::new(), |path| path.display().to_string())
        },
    },
    Knob {
        name: "CINCH_COMM_ID",
        range: "host:port",
        help: "rendezvous for ranks that are discovered from the environment",
        apply: |config, text| non_empty(text).map(|value| config.comm_id = Some(value)),
        show: |config| config.comm_id.clone().unwrap_or_default(),
    },
    Knob {
        name: "CINCH_SECRET_FILE",
        range: "a path of a file that only its owner can read",
        help: "the job's secret, for ranks that find each other by address",
        apply: |config, text| non_empty(text).map(|value| config.secret_file = Some(value.into())),
        show: |config| {
            config
                .secret_file
                .as_ref()
                .map_or(String::new(), |path| path.display().to_string())
        },
    },
    Knob {
        name: "CINCH_ALLOW_UNAUTHENTICATED",
        range: "0 or 1",
        help: "lets ranks that find each other by a non-loopback address do without a secret",
        apply: |config, text| {
            count(text, 0, 1).map(|value| config.allow_unauthenticated = value == 1)
        },
        show: |config| u8::from(config.allow_unauthenticated).to_string(),
    },
    Knob {
        name: "CINCH_NCCL_VERSION",
        range: "20900 to 99999, as NCCL writes versions: 22809 is 2.28.9",
        help: "what ncclGetVersion of the drop-in answers; programs choose features by it",
        apply: |config, text| {
            count(text, 20900, 99999).map(|value| config.nccl_version = value as u32)
        },
        show: |config| config.nccl_version.to_string(),
    },
];
