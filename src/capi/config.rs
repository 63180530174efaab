//! Settings of a communicator, which override those of the environment.

use super::error::cinch_result_t;
use super::text;
use super::types::{NumberedSetting, algorithm, algorithm_number, transport, transport_number};
use super::versioned;
use crate::config::{Config, Origin};
use crate::error::Result;
use std::ffi::c_char;

/// Settings of one communicator. An unset field (zero, NULL) has the value of the environment, else its
/// default. `cinch info` prints names and ranges of the environment's settings.
///
/// Initialise it with `cinch_config_default(&config)`. New fields are only ever added at the end.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct cinch_config_t {
    /// Bytes of the struct in the program's header. Set by `cinch_config_default`.
    pub size: usize,
    /// Constant by which the library detects an uninitialised struct. Set by `cinch_config_default`.
    pub magic: u32,
    /// Version of the program's header. Set by `cinch_config_default`.
    pub version: u32,
    /// Codec of calls that name no codec and that this codec can carry, as in `CINCH_CODEC`:
    /// `linear8:block=128`, or `intra=raw,inter=dynamic8` for codecs inside and between hosts.
    /// `auto:linear8` measures costs when the communicator is created, and uses the codec where the
    /// cost model predicts a gain.
    pub codec: *const c_char,
    /// Network interface for TCP, as in `CINCH_SOCKET_IFNAME`.
    pub network_interface: *const c_char,
    /// Transport between all pairs of ranks.
    pub transport: transport_number,
    /// Algorithm of collectives that have it.
    pub algorithm: algorithm_number,
    /// Slots per connection in host memory: a power of two from 2 to 64.
    pub slots: u32,
    /// Channels: 1 to 16.
    pub channels: u32,
    /// TCP sockets per pair of ranks and channel: 1 to 16.
    pub tcp_sockets: u32,
    /// Heartbeat interval of the control plane in milliseconds: 10 to 60,000.
    pub heartbeat_ms: u32,
    /// Bytes of one slot in host memory: 4 KiB to 16 MiB, a multiple of 64.
    pub slot_bytes: u64,
    /// Limit of slot memory per communicator and rank in bytes: 64 KiB to 64 GiB.
    pub buffer_bytes: u64,
    /// Input bytes below which the default codec is not used; 1 uses it at every size.
    pub codec_min_bytes: u64,
    /// Timeout of a call that waits for a peer, in milliseconds: 10 to 10^9.
    pub timeout_ms: u64,
    /// Timeout of creating the communicator, in milliseconds: 10 to 10^9.
    pub init_timeout_ms: u64,
    /// Memory that calls work on, as in `CINCH_DEVICE`: `host`, `cuda:1` for GPU 1, or `cuda` for the GPU
    /// of the thread's current context, else GPU 0.
    pub device: *const c_char,
    /// Name of the communicator, which the patterns of `CINCH_CODEC_RULES` match.
    pub name: *const c_char,
}

cinch_struct!(cinch_config_t, magic 0xC1C4_0C0F, first 96, now 112);

/// Initialises `*config` with nothing set.
///
/// C programs use `cinch_config_default(&config)`, which passes `sizeof(cinch_config_t)` and
/// `CINCH_API_VERSION` of the program's header as `size` and `version`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_config_init(
    config: *mut cinch_config_t,
    size: usize,
    version: u32,
) -> cinch_result_t {
    guard!("cinch_config_init", {
        // SAFETY: cinch.h requires of the program that `config` is NULL or writable for `size`
        // bytes.
        unsafe { versioned::initialise(config, size, version) }
    })
}

/// Returns the environment's settings, overridden by those of `config`, which may be NULL.
///
/// # Errors
/// Invalid argument for a value out of range.
///
/// # Safety
/// `config` is NULL, or readable for the size that it gives, with NULL or valid strings.
pub(super) unsafe fn read(config: *const cinch_config_t) -> Result<Config> {
    let mut settings = Config::from_env()?;
    if config.is_null() {
        return Ok(settings);
    }
    // SAFETY: the caller passes `config` as NULL or readable for the size that it gives.
    let config = unsafe { versioned::read(config) }?;
    let mut set = |name: &str, value: Option<String>| match value {
        Some(value) => settings.set(name, &value, Origin::Program),
        None => Ok(()),
    };
    let number = |value: u64| (value != 0).then(|| value.to_string());
    let seconds = |ms: u64| (ms != 0).then(|| format!("{}", ms as f64 / 1000.0));
    // SAFETY: the caller passes a struct whose strings are NULL or end with NUL.
    let (codec, interface, device, name) = unsafe {
        (
            text::read(config.codec, "config.codec")?,
            text::read(config.network_interface, "config.network_interface")?,
            text::read(config.device, "config.device")?,
            text::read(config.name, "config.name")?,
        )
    };
    set("CINCH_DEVICE", device.map(str::to_string))?;
    set("CINCH_CODEC", codec.map(str::to_string))?;
    set("CINCH_SOCKET_IFNAME", interface.map(str::to_string))?;
    set(
        "CINCH_TRANSPORT",
        choice_name(transport(config.transport)?, |kind| kind.name()),
    )?;
    set(
        "CINCH_ALGO",
        choice_name(algorithm(config.algorithm)?, |algorithm| algorithm.name()),
    )?;
    set("CINCH_SLOTS", number(config.slots.into()))?;
    set("CINCH_CHANNELS", number(config.channels.into()))?;
    set("CINCH_TCP_SOCKETS", number(config.tcp_sockets.into()))?;
    set("CINCH_HEARTBEAT", seconds(config.heartbeat_ms.into()))?;
    set("CINCH_SLOT_BYTES", number(config.slot_bytes))?;
    set("CINCH_BUFFER_BYTES", number(config.buffer_bytes))?;
    set("CINCH_CODEC_MIN_BYTES", number(config.codec_min_bytes))?;
    set("CINCH_TIMEOUT", seconds(config.timeout_ms))?;
    set("CINCH_INIT_TIMEOUT", seconds(config.init_timeout_ms))?;
    if let Some(name) = name {
        settings.comm_name = name.into();
    }
    Ok(settings)
}

fn choice_name<T>(choice: NumberedSetting<T>, name: fn(T) -> &'static str) -> Option<String> {
    match choice {
        NumberedSetting::Unset => None,
        NumberedSetting::Auto => Some("auto".into()),
        NumberedSetting::One(one) => Some(name(one).into()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::types::{CINCH_API_VERSION, algorithm_of, transport_of};
    use super::*;
    use crate::types::{Algorithm, DeviceChoice, TransportKind};
    use std::time::Duration;

    fn initialised() -> cinch_config_t {
        let mut config = std::mem::MaybeUninit::<cinch_config_t>::uninit();
        let size = size_of::<cinch_config_t>();
        // SAFETY: `config` has `size` bytes, which the call initialises.
        unsafe {
            let code = cinch_config_init(config.as_mut_ptr(), size, CINCH_API_VERSION);
            assert_eq!(code, cinch_result_t::CINCH_SUCCESS);
            config.assume_init()
        }
    }

    #[test]
    fn config_without_fields_equals_environment() {
        // SAFETY: the first call passes a complete struct, the other NULL, which `read` allows.
        unsafe {
            let environment = Config::from_env().unwrap();
            assert_eq!(read(&initialised()).unwrap(), environment);
            assert_eq!(read(std::ptr::null()).unwrap(), environment);
        }
    }

    #[test]
    fn config_field_sets_its_setting() {
        let config = cinch_config_t {
            codec: c"dynamic8:block=64".as_ptr(),
            network_interface: c"lo".as_ptr(),
            transport: transport_of(Some(TransportKind::Tcp)),
            algorithm: algorithm_of(Algorithm::Tree),
            slots: 8,
            channels: 3,
            tcp_sockets: 5,
            heartbeat_ms: 250,
            slot_bytes: 65536,
            buffer_bytes: 1 << 21,
            codec_min_bytes: 1,
            timeout_ms: 1500,
            init_timeout_ms: 1_000_000_000,
            device: c"cuda:3".as_ptr(),
            name: c"dp".as_ptr(),
            ..initialised()
        };
        // SAFETY: `config` is a complete struct of this test with static strings.
        let read = unsafe { read(&config) }.unwrap();
        assert_eq!(read.codec.to_string(), "dynamic8:block=64");
        assert_eq!(read.interface.as_deref(), Some("lo"));
        assert_eq!(read.transport, Some(TransportKind::Tcp));
        assert_eq!(read.algorithm, Some(Algorithm::Tree));
        assert_eq!((read.slots, read.channels, read.tcp_sockets), (8, 3, 5));
        assert_eq!(read.heartbeat, Duration::from_millis(250));
        assert_eq!((read.slot_bytes, read.buffer_bytes), (65536, 1 << 21));
        assert_eq!(read.codec_min_bytes, 1);
        assert_eq!(read.timeout, Duration::from_millis(1500));
        assert_eq!(read.device, DeviceChoice::Cuda(3));
        assert_eq!(read.comm_name, "dp");
        assert_eq!(read.init_timeout, Duration::from_secs(1_000_000));
        let program = |origin: &&Origin| **origin == Origin::Program;
        assert_eq!(read.origins.iter().filter(program).count(), 14);
    }

    #[test]
    fn config_value_out_of_range_is_refused_by_name() {
        let base = initialised();
        for (config, said) in [
            (cinch_config_t { slots: 3, ..base }, "CINCH_SLOTS=\"3\""),
            (
                cinch_config_t {
                    channels: 17,
                    ..base
                },
                "CINCH_CHANNELS",
            ),
            (
                cinch_config_t {
                    timeout_ms: 1,
                    ..base
                },
                "CINCH_TIMEOUT",
            ),
            (
                cinch_config_t {
                    timeout_ms: u64::MAX,
                    ..base
                },
                "CINCH_TIMEOUT",
            ),
            (
                cinch_config_t {
                    slot_bytes: 100,
                    ..base
                },
                "CINCH_SLOT_BYTES",
            ),
            (
                cinch_config_t {
                    transport: 99,
                    ..base
                },
                "transport 99",
            ),
            (
                cinch_config_t {
                    algorithm: 99,
                    ..base
                },
                "algorithm 99",
            ),
            (
                cinch_config_t {
                    codec: c"int8".as_ptr(),
                    ..base
                },
                "int8",
            ),
            (
                cinch_config_t {
                    codec: c"".as_ptr(),
                    ..base
                },
                "CINCH_CODEC",
            ),
            (
                cinch_config_t {
                    codec: c"\xff".as_ptr(),
                    ..base
                },
                "UTF-8",
            ),
            (cinch_config_t { magic: 7, ..base }, "magic 0x7"),
            (cinch_config_t { size: 0, ..base }, "size 0"),
            (cinch_config_t { version: 2, ..base }, "version 2"),
        ] {
            // SAFETY: `config` is a complete struct; `read` refuses a wrong size before it reads
            // beyond the header.
            let error = unsafe { read(&config) }.unwrap_err();
            assert!(error.message().contains(said), "{error}");
        }
    }
}
