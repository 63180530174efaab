//! NVIDIA's driver, NVML, GPUs, and access between them.

use super::Scope;
use super::check_result::CheckResult;
use crate::bench::record::driver_version_below;
use cinch::gpu::{Device, Driver, kernels};
use cinch::sys::nvml::Nvml;
use std::fs;
use std::path::Path;

const AREA: &str = "gpus";

/// Number of NVIDIA's PCI vendor.
const NVIDIA: &str = "0x10de";

/// Beginning of the PCI classes of display and 3D controllers.
const DISPLAY: &str = "0x03";

/// Smallest compute capability that the kernels support.
const OLDEST: (u32, u32) = (8, 0);

/// Checks the driver and the GPUs. Libraries of the driver are opened only for this machine.
pub fn check(scope: &Scope) -> Vec<CheckResult> {
    let gpus = gpus_on_bus(&scope.root);
    let version = driver_version_below(&scope.root);
    let mut results = vec![kernel_driver(gpus, version.as_deref())];
    if gpus == 0 || !scope.is_here {
        return results;
    }
    if let kernels::State::Missing { why } = kernels::STATE {
        results.push(CheckResult::error(
            AREA,
            "kernels",
            format!("this build has no kernels: {why}"),
            "build with nvcc (scripts/setup), or use a package: without kernels, buffers on GPUs are refused",
        ));
    }
    results.push(nvml());
    match Driver::load().and_then(|driver| driver.devices()) {
        Err(error) => results.push(CheckResult::error(
            AREA,
            "libcuda",
            error.message(),
            "install NVIDIA's driver; in a container pass the GPUs (docker run --gpus all), which brings libcuda.so.1",
        )),
        Ok(devices) => {
            results.extend(devices.iter().map(of_device));
            results.extend(peer_access(&devices));
        }
    }
    results
}

/// Returns the number of NVIDIA's GPUs on the PCI bus.
fn gpus_on_bus(root: &Path) -> usize {
    let entries = fs::read_dir(root.join("sys/bus/pci/devices"));
    let is = |folder: &Path, file: &str, beginning: &str| {
        fs::read_to_string(folder.join(file)).is_ok_and(|text| text.starts_with(beginning))
    };
    let devices = entries.into_iter().flatten().filter_map(Result::ok);
    devices
        .filter(|entry| is(&entry.path(), "vendor", NVIDIA) && is(&entry.path(), "class", DISPLAY))
        .count()
}

/// Judges whether the kernel has a driver for the GPUs.
fn kernel_driver(gpus: usize, version: Option<&str>) -> CheckResult {
    let result = match (gpus, version) {
        (0, None) => CheckResult::ok(AREA, "driver", "no NVIDIA GPU; buffers lie in host memory"),
        (0, Some(version)) => CheckResult::warning(
            AREA,
            "driver",
            format!("the driver {version} is loaded, but no GPU is on the PCI bus"),
            "see `lspci` and the kernel's log: a GPU may have failed, or belong to another virtual machine",
        ),
        (gpus, None) => CheckResult::error(
            AREA,
            "driver",
            format!("{gpus} NVIDIA GPUs are on the PCI bus, and NVIDIA's driver is not loaded"),
            "install the driver, or load it: `modprobe nvidia`",
        ),
        (gpus, Some(version)) => CheckResult::ok(
            AREA,
            "driver",
            format!("{version}, {gpus} GPUs on the PCI bus"),
        ),
    };
    result.with("gpus", gpus).with("driver", version)
}

fn nvml() -> CheckResult {
    let found = Nvml::open().and_then(|nvml| nvml.gpus());
    match found {
        Ok(gpus) => CheckResult::ok(AREA, "nvml", format!("lists {} GPUs", gpus.len()))
            .with("gpus", gpus.len()),
        Err(error) => CheckResult::warning(
            AREA,
            "nvml",
            error.message(),
            "install libnvidia-ml.so.1 of the driver's version: without it NVLinks are unknown, and rings are chosen \
             by the PCI bus alone",
        ),
    }
}

fn of_device(device: &Device) -> CheckResult {
    let (major, minor) = device.compute_capability;
    let found = format!("{device}, compute capability {major}.{minor}");
    let name = format!("gpu {}", device.ordinal());
    match device.compute_capability < OLDEST {
        true => CheckResult::error(
            AREA,
            &name,
            found,
            "cinch needs 8.0 or newer; leave this GPU out with CUDA_VISIBLE_DEVICES",
        ),
        false => CheckResult::ok(AREA, &name, found).with("memory_bytes", device.memory_bytes),
    }
}

/// Judges which pairs of GPUs reach each other's memory.
fn peer_access(devices: &[Device]) -> Option<CheckResult> {
    if devices.len() < 2 {
        return None;
    }
    let mut without = Vec::new();
    for from in devices {
        for to in devices.iter().filter(|to| to.ordinal() > from.ordinal()) {
            if !matches!(from.can_access(to), Ok(true)) {
                without.push(format!("{}-{}", from.ordinal(), to.ordinal()));
            }
        }
    }
    let pairs = devices.len() * (devices.len() - 1) / 2;
    Some(judge_pairs(pairs, &without))
}

fn judge_pairs(pairs: usize, without: &[String]) -> CheckResult {
    let result = match without.len() {
        0 => CheckResult::ok(
            AREA,
            "peers",
            format!("all {pairs} pairs of GPUs reach each other's memory"),
        ),
        missing => CheckResult::warning(
            AREA,
            "peers",
            format!(
                "{missing} of {pairs} pairs of GPUs do not reach each other's memory, and exchange data through \
                 pinned host memory: {}",
                without.join(" ")
            ),
            "expected for GPUs below different sockets without NVLink, and in virtual machines; else switch off ACS \
             in the bridges and see `nvidia-smi topo -p2p r`",
        ),
    };
    result
        .with("pairs", pairs)
        .with("without_access", without.len())
}

#[cfg(test)]
mod tests {
    use super::super::check_result::Severity;
    use super::super::tests::FakeRoot;
    use super::*;

    #[test]
    fn gpus_without_a_driver_are_an_error() {
        let root = FakeRoot::new("gpus");
        let judged = || check(&root.scope()).remove(0);
        assert_eq!(judged().level, Severity::Ok);
        let device = |address: &str, vendor: &str, class: &str| {
            root.write(&format!("sys/bus/pci/devices/{address}/vendor"), vendor);
            root.write(&format!("sys/bus/pci/devices/{address}/class"), class);
        };
        // An audio function of NVIDIA and a display of another vendor are no GPUs of NVIDIA.
        device("0000:01:00.1", "0x10de\n", "0x040300\n");
        device("0000:02:00.0", "0x1002\n", "0x030000\n");
        assert_eq!(judged().values["gpus"], 0);
        device("0000:01:00.0", "0x10de\n", "0x030200\n");
        assert_eq!(
            (judged().level, &judged().values["gpus"]),
            (Severity::Error, &1.into())
        );
        root.write(
            "proc/driver/nvidia/version",
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n",
        );
        let found = judged();
        assert_eq!(
            (found.level, &found.values["driver"]),
            (Severity::Ok, &"580.159.04".into())
        );
        std::fs::remove_dir_all(root.0.join("sys")).unwrap();
        assert_eq!(judged().level, Severity::Warning);
    }

    #[test]
    fn pairs_without_access_are_named() {
        assert_eq!(judge_pairs(6, &[]).level, Severity::Ok);
        let found = judge_pairs(6, &["0-2".into(), "1-3".into()]);
        assert_eq!(found.level, Severity::Warning);
        assert!(found.found.contains("2 of 6 pairs") && found.found.contains("0-2 1-3"));
    }
}
