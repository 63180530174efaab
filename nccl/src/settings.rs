//! Settings of the drop-in.

use cinch::config::{Config, Origin};
use cinch::gpu::Driver;
use cinch::gpu::select;
use cinch::types::DeviceChoice;
use cinch::{Error, Result};
use std::ffi::c_int;

/// Returns the settings that the environment of the process gives.
///
/// # Errors
/// Invalid argument for a setting out of range.
pub(crate) fn process() -> Result<Config> {
    Config::for_nccl()
}

/// Returns `config` with the number of this thread's current GPU, because another thread may create the
/// communicator.
///
/// # Errors
/// Error of the driver.
pub(crate) fn on_this_gpu(mut config: Config) -> Result<Config> {
    if config.device == DeviceChoice::Current {
        let gpu = select::chosen(&Driver::load()?, config.device)?;
        config.device = DeviceChoice::Cuda(gpu.ordinal());
    }
    Ok(config)
}

/// Returns `config` with GPU `number` as its device, unless buffers are in host memory.
///
/// # Errors
/// Invalid argument if `number` is negative.
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
    fn process_settings_default_to_gpu() {
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
