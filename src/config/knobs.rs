//! The table of settings. Each line defines a field of [`Config`], its default and its parser. The
//! line also defines the row in `cinch info` and `docs/settings.md`, and which ranks must agree.

use super::codec_policy::CodecLinks;
use super::codec_rules::{CodecRules, CollectiveSet, parse_setting};
use super::kinds::{
    Auto, ByteCount, Custom, FilePath, FreeText, Member, Parsed, PowerOfTwo, Seconds, Switch,
    ValueKind, WholeNumber, Word, non_empty,
};
use super::loopback_address::parse_loopback;
use super::{FileChoice, Note, Origin};
use crate::types::{
    Algorithm, CodecSetting, DeviceChoice, Kernel, Protocol, Subsystems, TransportKind,
};
use std::path::PathBuf;
use std::time::Duration;

/// Definition of one setting: its environment variable, documentation and parser.
pub struct Knob {
    /// Environment variable that sets the value.
    pub name: &'static str,
    /// Effect of the setting, as a phrase.
    pub help: &'static str,
    /// Communicators on which all ranks must have the same value.
    pub shared: Sharing,
    range: fn() -> String,
    pub(super) apply: fn(&mut Config, &str) -> Parsed<()>,
    /// Formats the effective value as users write it; returns an empty text for an unset value.
    pub show: fn(&Config) -> String,
}

impl Knob {
    /// Describes the valid values in a phrase.
    pub fn range(&self) -> String {
        (self.range)()
    }

    /// Finds a setting by its name.
    pub fn find(name: &str) -> Option<&'static Knob> {
        KNOBS.iter().find(|knob| knob.name == name)
    }
}

/// Communicators on which all ranks must have one value of a setting. Ranks compare such a value
/// when they join, because each rank computes slots, schedules and channels from its own value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// Each rank may have its own value.
    No,
    /// On every communicator.
    Always,
    /// On communicators whose buffers are in host memory.
    HostMemory,
    /// On communicators whose ranks are connected by host transports: buffers are in host memory, or GPUs are
    /// on several hosts.
    HostLinks,
    /// On communicators whose buffers are on GPUs.
    Gpus,
    /// On every communicator, but ranks compare the effect of the setting, not its text. The module
    /// `comm` computes the effect.
    Effect,
}

/// Beginning of the names of variables that belong to tests.
pub(super) const OF_TESTS: &str = "CINCH_TEST_";

/// `CINCH_` variables that belong to the launcher or the build, and are not settings of the library.
pub(super) const RESERVED: &[&str] = &[
    "CINCH_CUDA",
    "CINCH_CUDA_ARCHS",
    "CINCH_CUDA_LINES",
    "CINCH_LAUNCH_CORES",
    "CINCH_LAUNCH_ID",
    "CINCH_LAUNCH_RANK",
    "CINCH_LAUNCH_SIZE",
    "CINCH_UPDATE_API",
    "CINCH_UPDATE_HEADER",
    "CINCH_UPDATE_SETTINGS",
];

/// Largest number of channels, and so of thread blocks, of a call on a GPU.
pub const MOST_GPU_CHANNELS: usize = 128;

/// Declares [`Config`] and [`KNOBS`]. A line reads
/// `NAME field: type = default, kind of value, ranks that share it, "what it does";`
macro_rules! knobs {
    ($($name:ident $field:ident: $type:ty = $default:expr, $kind:expr, $shared:ident, $help:literal;)*) => {
        /// The effective settings of one communicator.
        ///
        /// Fields with the name of an environment variable are settings of [`KNOBS`].
        #[derive(Clone, Debug, PartialEq)]
        pub struct Config {
            $(
                #[doc = concat!("`", stringify!($name), "`: ", $help, ".")]
                pub $field: $type,
            )*
            /// Upper bound of the channels between two GPUs, set by programs for NCCL. The bound
            /// never raises the number of channels. See [`Config::bound_channels`].
            pub gpu_channels_most: Option<usize>,
            /// `CINCH_CODEC=off`: neither rules nor calls turn compression on.
            pub codec_off: bool,
            /// Whether the program, not the environment, chose [`Config::codec`].
            pub codec_by_program: bool,
            /// Name of the communicator, which codec rules match; empty if it has none.
            pub comm_name: String,
            /// Origin of each setting, in the order of [`KNOBS`].
            pub origins: Vec<Origin>,
            /// Whether NCCL's variables and defaults apply, as in the drop-in.
            pub as_nccl: bool,
            /// Messages about environment variables, for the log.
            pub notes: Vec<Note>,
            /// The machine whose links shared memory emulates. Only the tool sets it.
            #[cfg(feature = "internal")]
            pub emulated: Option<super::EmulatedMachine>,
        }

        impl Default for Config {
            fn default() -> Config {
                Config {
                    $($field: $default,)*
                    gpu_channels_most: None,
                    codec_off: false,
                    codec_by_program: false,
                    comm_name: String::new(),
                    origins: vec![Origin::Default; KNOBS.len()],
                    as_nccl: false,
                    notes: Vec::new(),
                    #[cfg(feature = "internal")]
                    emulated: None,
                }
            }
        }

        /// All settings.
        pub const KNOBS: &[Knob] = &[$(Knob {
            name: stringify!($name),
            help: $help,
            shared: Sharing::$shared,
            range: || $kind.range(),
            apply: |config, text| $kind.apply(config, |config| &mut config.$field, text),
            show: |config| $kind.show_in(config, &config.$field),
        }),*];
    };
}

knobs! {
    CINCH_SLOT_BYTES slot_bytes: usize = 128 << 10, ByteCount(4 << 10, 16 << 20, 64), HostMemory,
        "bytes of one slot in host memory; a chunk never encodes to more";
    CINCH_SLOTS slots: usize = 4, PowerOfTwo(2, 64), HostMemory,
        "slots of one connection in host memory";
    CINCH_CHANNELS channels: usize = 2, WholeNumber(1, 16, ""), HostLinks,
        "parallel channels through all ranks";
    CINCH_BUFFER_BYTES buffer_bytes: usize = 64 << 20, ByteCount(64 << 10, 64 << 30, 1), Always,
        "upper bound of slot memory per communicator and rank; slots shrink to fit it";
    CINCH_TRANSPORT transport: Option<TransportKind> = None, Auto(Member(&TransportKind::ALL, TransportKind::name)), HostLinks,
        "transport between all ranks; auto takes the best that connects each pair";
    CINCH_CHECK checks_data: bool = false, Member(&[false, true], |checks| if checks { "crc32c" } else { "off" }), Always,
        "checks the CRC-32C of each message on host memory and between hosts, so that a bit that flips on the way is an error";
    CINCH_ENCRYPT encrypts: bool = false, Switch, Always,
        "encrypts payloads and control messages between hosts (AES-256-GCM over TCP); without RDMA";
    CINCH_DEVICE device: DeviceChoice = DeviceChoice::Host, Custom("host, cuda or cuda:N", |text| text.parse::<DeviceChoice>()), Effect,
        "memory that calls work on; cuda is the GPU of the thread's current context, else 0";
    CINCH_P2P_DISABLE p2p_disable: bool = false, Switch, No,
        "disables peer memory between GPUs: slots lie in pinned host memory";
    CINCH_GRAPH_MIXING graph_mixing: bool = true, Switch, No,
        "orders replays of CUDA graphs with a communicator's other calls; 0 leaves it to you";
    CINCH_EARLY_LAUNCH early_launch: bool = true, Switch, No,
        "launches kernels while the work ahead of them in the stream ends (programmatic dependent launch); Hopper and newer";
    CINCH_SHM_DISABLE shm_disable: bool = false, Switch, HostLinks,
        "disables shared host memory between ranks: TCP carries host buffers, and GPUs need peer memory";
    CINCH_GPU_CHANNELS gpu_channels: Option<usize> = None, Auto(WholeNumber(1, MOST_GPU_CHANNELS, "")), Gpus,
        "upper bound of a call's blocks; auto is 64, on several hosts 8, or half of what the GPU holds if less";
    CINCH_ALGO algorithm: Option<Algorithm> = None, Auto(Member(&Algorithm::ALL, Algorithm::name)), Always,
        "algorithm to use where the collective has it; auto takes the cheapest by the cost model";
    CINCH_PROTO protocol: Option<Protocol> = None, Auto(Member(&Protocol::ALL, Protocol::name)), Always,
        "protocol of kernels, where they have it";
    CINCH_KERNEL kernel: Option<Kernel> = None, Auto(Member(&Kernel::ALL, Kernel::name)), Always,
        "kernels that interpret a schedule, or fused ones for small messages where there is one";
    CINCH_TUNING tuning: FileChoice = FileChoice::Auto, Custom("auto, off or the path of a table of `cinch tune`", FileChoice::parse), Effect,
        "measured choices of algorithm, protocol and blocks on GPUs: the library's where it has a table for them, none, or a file; CINCH_ALGO, CINCH_KERNEL, CINCH_PROTO and CINCH_GPU_CHANNELS win";
    CINCH_TOPO topology: FileChoice = FileChoice::Auto, Custom("auto, off or the path of a topology file", FileChoice::parse), Effect,
        "topology by which rings and groups are chosen on one host: detected, none, or a file in NCCL's XML format, in which GPUs stand for ranks on host memory too";
    CINCH_CODEC codec: CodecSetting = CodecSetting::RAW, DefaultCodec, Effect,
        "codec of calls that name none and admit it: sums and averages of f16, bf16, f32; with auto only where measured costs say that it pays; off is final for rules and calls";
    CINCH_CALL_TIMES saved_times: bool = true, Member(&[true, false], |saved| if saved { "saved" } else { "measured" }), No,
        "times by which auto decides on GPUs: saved takes those of an earlier communicator of the same GPUs and settings, and measures and saves them if there are none; measured measures at every init; rank 0's value counts";
    CINCH_CODEC_RULES codec_rules: CodecRules = CodecRules::default(), Custom("PATTERN=off or PATTERN=CODEC, then any of :ranks=N-M :hosts=N-M :order=N-M :min=BYTES :max=BYTES :for=COLLECTIVE+... :dtype=DTYPE+..., commas between", CodecRules::parse), No,
        "codecs by properties of communicators and calls; see codec-rules.md";
    CINCH_CODEC_COLLECTIVES codec_collectives: CollectiveSet = CollectiveSet::GRADIENTS, Custom("names of collectives, commas between", |text| CollectiveSet::parse(text, ',')), Effect,
        "collectives whose calls a codec carries although they name none";
    CINCH_CODEC_LINKS codec_links: CodecLinks = CodecLinks::All, Member(&[CodecLinks::All, CodecLinks::Network], CodecLinks::name), No,
        "network keeps calls exact that name no codec, where all ranks are on one host";
    CINCH_CODEC_MIN_BYTES codec_min_bytes: usize = 0, ByteCount(0, 64 << 30, 1), Effect,
        "input bytes below which calls that name no codec are exact";
    CINCH_CODEC_SAMPLE codec_sample: u32 = 0, WholeNumber(0, 1_000_000_000, " calls"), Effect,
        "every so many coded sums of a communicator, one is also run exactly on a slice and its error logged; 0 is never";
    CINCH_CODEC_BOUND codec_bound: f64 = f64::INFINITY, Custom("a number above 0, or inf", parse_bound), Effect,
        "relative RMS error of a sampled slice above which a communicator switches its codec off";
    CINCH_FUSE_BYTES fuse_bytes: usize = 64 << 10, ByteCount(0, 1 << 20, 1), Always,
        "all_reduces of a group up to this many bytes each are fused into one on host memory, and collectives share a launch on GPUs, so all ranks must group them alike; 0 fuses none";
    CINCH_THREADS threads: usize = 1, WholeNumber(1, 256, ""), No,
        "threads that encode or decode a large array outside a collective";
    CINCH_TIMEOUT timeout: Duration = Duration::from_secs(60), Seconds(0.01, 1e6), No,
        "how long a call may wait for a peer";
    CINCH_INIT_TIMEOUT init_timeout: Duration = Duration::from_secs(60), Seconds(0.01, 1e6), No,
        "how long joining a communicator may take";
    CINCH_HEARTBEAT heartbeat: Duration = Duration::from_millis(100), Seconds(0.01, 60.0), No,
        "interval of the heartbeats of control connections";
    CINCH_SOCKET_IFNAME interface: Option<String> = None, FreeText("names or beginnings of names or addresses, commas between; =NAME is exact, ^ excludes"), No,
        "network interface for TCP; unset takes the first that is up, loopback for one host, and lets pairs of ranks use nearer networks";
    CINCH_SOCKET_FAMILY ipv6: Option<bool> = None, Auto(Member(&[false, true], |ipv6| if ipv6 { "ipv6" } else { "ipv4" })), No,
        "addresses that count when an interface is chosen; auto takes IPv4 before IPv6";
    CINCH_TCP_SOCKETS tcp_sockets: usize = 1, WholeNumber(1, 16, ""), HostLinks,
        "sockets for each connected pair and channel";
    CINCH_IB_DISABLE ib_disable: bool = false, Switch, No,
        "disables RDMA unless CINCH_TRANSPORT names it: TCP connects hosts";
    CINCH_IB_HCA ib_hca: Option<String> = None, FreeText("names or beginnings of names of devices, :PORT behind, commas between; = in front is exact, ^ excludes"), No,
        "RDMA devices and ports; unset admits all that are up, of which each rank uses the nearest";
    CINCH_IB_GID ib_gid: Option<String> = None, Auto(Custom("a place in the port's table of addresses, or an address", parse_gid)), No,
        "address of a RDMA port; auto takes RoCE v2 over IPv4, then over IPv6, then RoCE v1, whichever all ranks have";
    CINCH_IB_TIMEOUT ib_timeout: u8 = 16, WholeNumber(8, 22, ": 4.096 us times two to this"), No,
        "how long a RDMA device waits for an answer before it sends again";
    CINCH_IB_RETRY ib_retry: u8 = 3, Custom("0 to 6", parse_retry), No,
        "how often a RDMA device sends again before the peer counts as dead";
    CINCH_IB_QPS ib_qps: usize = 1, WholeNumber(1, 8, ""), HostLinks,
        "RDMA queue pairs for each connected pair and channel; messages use them in turn";
    CINCH_IB_SL ib_service_level: u8 = 0, WholeNumber(0, 15, ""), No,
        "InfiniBand service level; RoCE priority where the network uses it";
    CINCH_IB_TC ib_traffic_class: u8 = 0, WholeNumber(0, 255, ""), No,
        "traffic class of RoCE packets, by which switches choose queues";
    CINCH_HOST_ID host_id: Option<String> = None, FreeText("any text"), No,
        "replaces the machine's identity, so that ranks of one machine count as several hosts";
    CINCH_SIMD simd: String = "auto".into(), Word(&["auto", "scalar", "avx2", "avx512"]), No,
        "widest instruction set to use; results do not depend on it";
    CINCH_LOG log_level: String = "warn".into(), Word(&["none", "version", "warn", "info", "trace"]), No,
        "log threshold";
    CINCH_LOG_FORMAT log_format: String = "short".into(), Word(&["short", "long", "json"]), No,
        "form of log lines; long and json have time, host, rank and communicator";
    CINCH_LOG_SUBSYS log_subsystems: Subsystems = Subsystems::ALL, Custom("ALL or names such as INIT,COLL,ENV, commas between; ^ in front excludes them", parse_subsystems), No,
        "subsystems whose info and trace lines are logged";
    CINCH_LOG_FILE log_file: Option<PathBuf> = None, FilePath("a path; %h and %p stand for host and process"), No,
        "log destination; unset is standard error";
    CINCH_DUMP_FILE dump_file: Option<PathBuf> = None, FilePath("a path; %h and %p stand for host and process"), No,
        "file that gets the latest calls as JSON when a communicator fails, and at SIGUSR2; of the first communicator of a process";
    CINCH_METRICS_FILE metrics_file: Option<PathBuf> = None, FilePath("a path; %h and %p stand for host and process"), No,
        "file that gets counters of calls, bytes, times and waits in Prometheus' text format; of the first communicator of a process";
    CINCH_METRICS_INTERVAL metrics_interval: Duration = Duration::from_secs(10), Seconds(0.1, 86400.0), No,
        "interval at which CINCH_METRICS_FILE is written; the end of a communicator writes it, too";
    CINCH_PS answers_ps: bool = false, Switch, No,
        "shows this process in `cinch ps`, through a socket that only its user can reach; of the first communicator of a process";
    CINCH_COMM_ID comm_id: Option<String> = None, FreeText("host:port"), No,
        "rendezvous for ranks that are discovered from the environment";
    CINCH_SECRET_FILE secret_file: Option<PathBuf> = None, FilePath("a path of a file that only its owner can read"), No,
        "the job's secret, for ranks that find each other by address";
    CINCH_ALLOW_UNAUTHENTICATED allow_unauthenticated: bool = false, Switch, No,
        "lets ranks that find each other by address do without a secret beyond one host and user";
    CINCH_NCCL_VERSION nccl_version: u32 = 22809, WholeNumber(20900, 99999, ", as NCCL writes versions: 22809 is 2.28.9"), No,
        "version that ncclGetVersion of the drop-in returns; programs choose features by it";
    CINCH_NCCL_RAS nccl_ras: bool = false, Switch, No,
        "the drop-in answers the text protocol of NCCL's RAS subsystem, to any process of this host; of the first communicator of a process";
    CINCH_NCCL_RAS_ADDR nccl_ras_addr: String = "localhost:28028".into(), Custom("localhost:port, or a loopback address with a port", parse_loopback), No,
        "where CINCH_NCCL_RAS listens; the processes of a job share it";
    CINCH_NCCL_PROFILER_PLUGIN nccl_profiler_plugin: Option<String> = None, FreeText("none, a name or a path"), No,
        "NCCL profiler plug-in that the drop-in loads; unset is libnccl-profiler.so if it is installed; of the first communicator of a process";
    CINCH_NCCL_TUNER_PLUGIN nccl_tuner_plugin: Option<String> = None, FreeText("none, a name or a path"), No,
        "NCCL tuner plug-in that the drop-in loads; unset is libnccl-tuner.so if it is installed; of the first communicator of a process";
}

/// Parser of `CINCH_CODEC`, which sets three fields. The value `off` means no codec, and also
/// forbids rules and calls to turn compression on.
struct DefaultCodec;

impl ValueKind for DefaultCodec {
    type Value = CodecSetting;

    fn range(&self) -> String {
        "off, [auto:]NAME[:block=B][:tensor=K][:offset=E][:seed=S][:tau=T], see `cinch codecs`, \
         or intra=NAME...,inter=NAME..."
            .into()
    }

    fn parse(&self, text: &str) -> Parsed<CodecSetting> {
        match text.trim() {
            "off" => Ok(CodecSetting::RAW),
            _ => parse_setting(text),
        }
    }

    fn show(&self, value: &CodecSetting) -> String {
        value.to_string()
    }

    fn apply(
        &self,
        config: &mut Config,
        field: fn(&mut Config) -> &mut CodecSetting,
        text: &str,
    ) -> Parsed<()> {
        let setting = self.parse(text)?;
        config.codec_off |= text.trim() == "off";
        // `off` is final: a program cannot turn on compression that the environment has turned off.
        *field(config) = match config.codec_off {
            true => CodecSetting::RAW,
            false => setting,
        };
        Ok(())
    }

    fn show_in(&self, config: &Config, value: &CodecSetting) -> String {
        match config.codec_off {
            true => "off".into(),
            false => self.show(value),
        }
    }
}

fn parse_bound(text: &str) -> Parsed<f64> {
    match text.trim().parse::<f64>() {
        Ok(value) if value > 0.0 => Ok(value),
        _ => Err("no such bound".into()),
    }
}

fn parse_gid(text: &str) -> Parsed<String> {
    match text.parse::<u8>().is_ok() || text.parse::<std::net::IpAddr>().is_ok() {
        true => Ok(text.into()),
        false => Err("neither a place in the table nor an address".into()),
    }
}

fn parse_retry(text: &str) -> Parsed<u8> {
    match WholeNumber(0, 7, "").parse(text)? {
        7 => Err("7 may mean for ever to a device, and a dead peer would never be noticed".into()),
        value => Ok(value),
    }
}

fn parse_subsystems(text: &str) -> Parsed<Subsystems> {
    match Subsystems::parse(text) {
        (subsystems, unknown) if unknown.is_empty() => Ok(subsystems),
        (_, unknown) => Err(format!("no subsystem is called {}", unknown.join(", "))),
    }
}

impl FileChoice {
    fn parse(text: &str) -> Parsed<FileChoice> {
        match text.trim() {
            "auto" => Ok(FileChoice::Auto),
            "off" => Ok(FileChoice::Off),
            _ => Ok(FileChoice::File(non_empty(text)?.into())),
        }
    }
}
