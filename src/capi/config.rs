//! The settings of a communicator, over those of the environment.

use super::error::cinch_result_t;
use super::text;
use super::types::{NumberedSetting, algorithm, algorithm_number, transport, transport_number};
use super::versioned::{self, Versioned};
use crate::config::{Config, Origin};
use crate::error::Result;
use std::ffi::c_char;

/// Settings of one communicator; what is unset (zero, NULL) is left to the environment and then
/// to the default. `cinch info` prints the environment's names and ranges.
///
/// Initialise it with `cinch_config_default(&config)`. New fields are only ever added at the end.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct cinch_config_t {
    /// Bytes of the struct in the program's header. Set by `cinch_config_default`.
    pub size: usize,
    /// Tells an initialised struct from garbage. Set by `cinch_config_default`.
    pub magic: u32,
    /// Meaning of the fields. Set by `cinch_config_default`.
    pub version: u32,
    /// Codec of calls that name none and admit it, as `CINCH_CODEC`: `linear8:block=128`, or
    /// `auto:linear8` to have costs measured now and the codec where it pays, or by level
    /// `intra=raw,inter=dynamic8`.
    pub codec: *const c_char,
    /// Network interface for TCP, as `CINCH_SOCKET_IFNAME`.
    pub network_interface: *const c_char,
    /// Transport between all ranks.
    pub transport: transport_number,
    /// Algorithm where the collective has it.
    pub algorithm: algorithm_number,
    /// Slots of one connection in host memory: a power of two from 2 to 64.
    pub slots: u32,
    /// Parallel channels through all ranks: 1 to 16.
    pub channels: u32,
    /// Sockets for each connected pair and channel: 1 to 16.
    pub tcp_sockets: u32,
    /// Beat of the control connections in milliseconds: 10 to 60,000.
    pub heartbeat_ms: u32,
    /// Bytes of one slot in host memory: 4 KiB to 16 MiB, a multiple of 64.
    pub slot_bytes: u64,
    /// Upper bound of slot memory per communicator and rank, in bytes: 64 KiB to 64 GiB.
    pub buffer_bytes: u64,
    /// Input bytes below which the default codec stays out; 1 lets it in at every size.
    pub codec_min_bytes: u64,
    /// How long a call may wait for a peer, in milliseconds: 10 to 10^9.
    pub timeout_ms: u64,
    /// How long joining may take, in milliseconds: 10 to 10^9.
    pub init_timeout_ms: u64,
    /// Memory that calls work on, as `CINCH_DEVICE`: `host`, `cuda` (the GPU of the thread's
    /// current context, else 0) or `cuda:1`.
    pub device: *const c_char,
    /// The communicator's name, by which the rules of `CINCH_CODEC_RULES` find it.
    pub name: *const c_char,
}

// SAFETY: `repr(C)`, integers and pointers, without padding (asserted below).
unsafe impl Versioned for cinch_config_t {
    const NAME: &'static str = "cinch_config_t";
    const MAGIC: u32 = 0xC1C4_0C0F;
    const FIRST_BYTES: usize = 96;
}

#[cfg(target_pointer_width = "64")]
const _: () = assert!(size_of::<cinch_config_t>() == 112);

/// Sets nothing in `*config`. `size` and `version` are `sizeof(cinch_config_t)` and
/// `CINCH_API_VERSION` of the program's header: C programs use `cinch_config_default(&config)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_config_init(
    config: *mut cinch_config_t,
    size: usize,
    version: u32,
) -> cinch_result_t {
    guard!("cinch_config_init", {
        // SAFETY: NULL or writable for `size` bytes, by the documented contract.
        unsafe { versioned::initialise(config, size, version) }
    })
}

/// The environment's settings with those of `config`, which may be NULL, over them.
///
/// # Safety
/// `config` is NULL or readable for its size, and so are its strings.
pub(super) unsafe fn read(config: *const cinch_config_t) -> Result<Config> {
    let mut settings = Config::from_env()?;
    if config.is_null() {
        return Ok(settings);
    }
    // SAFETY: as ours.
    let config = unsafe { versioned::read(config) }?;
    let mut set = |name: &str, value: Option<String>| match value {
        Some(value) => settings.set(name, &value, Origin::Program),
        None => Ok(()),
    };
    let number = |value: u64| (value != 0).then(|| value.to_string());
    let seconds = |ms: u64| (ms != 0).then(|| format!("{}", ms as f64 / 1000.0));
    // SAFETY: NULL or strings, by the documented contract.
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
    use super::super::types::{CINCH_API_VERSION, cinch_algorithm_t, cinch_transport_t};
    use super::*;
    use crate::types::{Algorithm, DeviceChoice, TransportKind};
    use std::time::Duration;

    fn initialised() -> cinch_config_t {
        let mut config = std::mem::MaybeUninit::<cinch_config_t>::uninit();
        let size = size_of::<cinch_config_t>();
        // SAFETY: writable for `size`, and initialised by the call.
        unsafe {
            let code = cinch_config_init(config.as_mut_ptr(), size, CINCH_API_VERSION);
            assert_eq!(code, cinch_result_t::CINCH_SUCCESS);
            config.assume_init()
        }
    }

    #[test]
    fn nothing_set_is_the_environment() {
        // SAFETY: a live struct; NULL.
        unsafe {
            let environment = Config::from_env().unwrap();
            assert_eq!(read(&initialised()).unwrap(), environment);
            assert_eq!(read(std::ptr::null()).unwrap(), environment);
        }
    }

    #[test]
    fn every_field_arrives() {
        let config = cinch_config_t {
            codec: c"dynamic8:block=64".as_ptr(),
            network_interface: c"lo".as_ptr(),
            transport: cinch_transport_t::CINCH_TRANSPORT_TCP as u32,
            algorithm: cinch_algorithm_t::CINCH_ALGORITHM_TREE as u32,
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
        // SAFETY: a live struct with static strings.
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
    fn values_out_of_range_are_refused_by_name() {
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
                    transport: 9,
                    ..base
                },
                "transport 9",
            ),
            (
                cinch_config_t {
                    algorithm: 7,
                    ..base
                },
                "algorithm 7",
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
            // SAFETY: a live struct; a wrong size is refused before the tail is read.
            let error = unsafe { read(&config) }.unwrap_err();
            assert!(error.message().contains(said), "{error}");
        }
    }
}
