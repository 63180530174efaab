//! The settings under which a program that was built for NCCL runs.

use cinch::config::{Config, Origin};
use cinch::engine::gpu::device;
use cinch::gpu::Driver;
use cinch::types::DeviceChoice;
use cinch::{Error, Result};
use std::ffi::c_int;

/// Defaults that differ from the library's own.
///
/// Buffers are on the GPU. NCCL has no deadlines: programs leave ranks waiting for as long as
/// others load data or write checkpoints, and have watchdogs of their own. A rank that dies is
/// found without a deadline; these are for one that is stopped.
const DEFAULTS: &[(&str, &str)] = &[
    ("CINCH_DEVICE", "cuda"),
    ("CINCH_TIMEOUT", "86400"),
    ("CINCH_INIT_TIMEOUT", "3600"),
];

/// The process's settings.
pub(crate) fn process() -> Result<Config> {
    let mut config = Config::from_env()?;
    for (name, value) in DEFAULTS {
        config.set_default(name, value)?;
    }
    Ok(config)
}

/// `config` on the GPU of this thread, whichever thread goes on with it.
pub(crate) fn on_this_gpu(mut config: Config) -> Result<Config> {
    if config.device == DeviceChoice::Current {
        let gpu = device::chosen(&Driver::load()?, config.device)?;
        config.device = DeviceChoice::Cuda(gpu.ordinal());
    }
    Ok(config)
}

/// `config` on the GPU with this number, unless buffers are in host memory.
pub(crate) fn on_gpu(mut config: Config, number: c_int) -> Result<Config> {
    if config.device != DeviceChoice::Host {
        let gpu = u32::try_from(number).map_err(|_| {
            Error::invalid_argument(format!("device {number} of devlist is negative"))
        })?;
        let device = DeviceChoice::Cuda(gpu).to_string();
        config.set("CINCH_DEVICE", &device, Origin::Program)?;
    }
    Ok(config)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_those_of_a_library_for_gpus() {
        let config = process().unwrap();
        if std::env::var_os("CINCH_DEVICE").is_none() {
            assert_eq!(config.device, DeviceChoice::Current);
        }
        assert!(config.timeout.as_secs() >= 3600 || std::env::var_os("CINCH_TIMEOUT").is_some());
        let host = Config::default();
        assert_eq!(on_gpu(host.clone(), 3).unwrap(), host);
        let third = on_gpu(process().unwrap(), 3).unwrap();
        if config.device != DeviceChoice::Host {
            assert_eq!(third.device, DeviceChoice::Cuda(3));
            assert!(on_gpu(config, -1).is_err());
        }
    }
}
