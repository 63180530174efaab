//! Bandwidths of links by generation, as NCCL 2.28 (`src/graph/topo.h`) and RCCL take them, in MB/s each way.

use super::machine::{CpuSocket, Gpu, GpuLink, GpuLinkKind, PciLink};

/// Speeds of PCIe generations 1 to 6: tenths of a gigatransfer per second, and usable MB/s of 16 lanes.
const PCIE: [(u32, u32); 6] = [
    (25, 3_000),
    (50, 6_000),
    (80, 12_000),
    (160, 24_000),
    (320, 48_000),
    (640, 96_000),
];

/// Returns the bandwidth of a PCIe link; `None` if its speed or its width is unknown.
pub(super) fn pcie(link: PciLink) -> Option<u32> {
    let (speed, width) = (link.speed?, link.width?);
    let (_, sixteen) = PCIE.iter().find(|(known, _)| *known == speed)?;
    matches!(width, 1..=32).then(|| sixteen * width / 16)
}

/// Bandwidth of a PCIe link of unknown speed where a figure is needed: generation 3 with 16 lanes.
pub(super) const ASSUMED_PCIE: u32 = 12_000;

/// Returns the tenths of a gigatransfer that `text` names, such as `16.0 GT/s PCIe`; `None` if it names no
/// generation.
pub(super) fn generation(text: &str) -> Option<u32> {
    let number = text.trim().split_ascii_whitespace().next()?;
    let number = number.strip_suffix("GT/s").unwrap_or(number);
    let (whole, tenth) = number.split_once('.').unwrap_or((number, "0"));
    let tenth = tenth.parse::<u32>().ok().filter(|t| *t < 10)?;
    let tenths = whole
        .parse::<u32>()
        .ok()?
        .checked_mul(10)?
        .checked_add(tenth)?;
    PCIE.iter()
        .any(|(known, _)| *known == tenths)
        .then_some(tenths)
}

/// Returns the text of a speed as Linux prints it below /sys.
pub(super) fn generation_text(tenths: u32) -> String {
    format!("{}.{} GT/s PCIe", tenths / 10, tenths % 10)
}

/// Returns a link as text, such as `16.0 GT/s PCIe x16`.
pub(super) fn link_text(link: PciLink) -> String {
    let speed = link.speed.map_or("speed unknown".into(), generation_text);
    match link.width {
        Some(width) => format!("{speed} x{width}"),
        None => format!("{speed}, width unknown"),
    }
}

/// Returns the speed of a PCIe generation, from 1; `None` if the generation is unknown.
pub(super) fn of_generation(generation: u32) -> Option<u32> {
    let index = usize::try_from(generation).ok()?.checked_sub(1)?;
    PCIE.get(index).map(|(speed, _)| *speed)
}

/// Returns whether a bridge that claims `link` above a device with the link `behind` is an invention of a virtual
/// machine, which has a width of x1 at any generation, or is far slower than the device. Such a bridge transfers data at the
/// speed of the device.
pub(super) fn is_virtual(link: PciLink, behind: PciLink) -> bool {
    let is_narrow = link.width == Some(1) && behind.width.is_some_and(|width| width >= 16);
    let is_slow = match (pcie(link), pcie(behind)) {
        (Some(mb_s), Some(behind)) => mb_s < 1_000 && behind >= 8 * mb_s,
        _ => false,
    };
    is_narrow || is_slow
}

/// Returns the bandwidth between two sockets of this kind; `None` if the processor is unknown.
pub(super) fn between_sockets(socket: &CpuSocket) -> Option<u32> {
    let model = socket.model.unwrap_or(0);
    let six = socket.family == Some(6);
    Some(match (socket.arch.as_str(), socket.vendor.as_str()) {
        ("ppc64" | "ppc64le", _) => 32_000,
        ("arm64" | "aarch64", _) => 6_000,
        ("x86_64", "GenuineIntel") if six && model >= 0xcf => 40_000,
        ("x86_64", "GenuineIntel") if six && model >= 0x8f => 22_000,
        ("x86_64", "GenuineIntel") if six && model >= 0x55 => 10_000,
        ("x86_64", "GenuineIntel") => 6_000,
        ("x86_64", "AuthenticAMD") => 16_000,
        ("x86_64", "CentaurHauls" | "  Shanghai  ")
            if socket.family == Some(7) && model == 0x5b =>
        {
            9_000
        }
        ("x86_64", "CentaurHauls" | "  Shanghai  ") => 6_000,
        _ => return None,
    })
}

/// Bandwidth between sockets of unknown processors.
pub(super) const ASSUMED_BETWEEN_SOCKETS: u32 = 6_000;

/// Returns the bandwidth of all parallel links of `link`.
pub(super) fn gpu_link(gpu: &Gpu, link: &GpuLink) -> u32 {
    let each = link.bandwidth.unwrap_or_else(|| match link.kind {
        GpuLinkKind::NvLink => nvlink(gpu.sm.unwrap_or(80)),
        GpuLinkKind::Xgmi => xgmi(gpu.gcn.unwrap_or(908)),
        GpuLinkKind::C2c => 0,
    });
    each.saturating_mul(link.count)
}

fn nvlink(sm: u32) -> u32 {
    match sm {
        100.. => 40_100,
        90.. => 20_600,
        86 => 12_000,
        70.. => 20_000,
        60.. => 18_000,
        _ => 20_000,
    }
}

fn xgmi(gcn: u32) -> u32 {
    match gcn {
        940.. => 48_000,
        910.. => 36_000,
        _ => 24_000,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pcie_speeds_are_those_of_nccl() {
        let of = |speed, width| {
            pcie(PciLink {
                speed: generation(speed),
                width: Some(width),
            })
        };
        assert_eq!(of("8 GT/s", 16), Some(12_000));
        assert_eq!(of("16.0 GT/s PCIe", 16), Some(24_000));
        assert_eq!(of("32.0 GT/s PCIe", 8), Some(24_000));
        assert_eq!(of("64.0 GT/s PCIe", 16), Some(96_000));
        assert_eq!(of("2.5 GT/s PCIe", 1), Some(187));
        for (speed, width) in [
            ("", 16),
            ("Unknown", 16),
            ("7 GT/s", 16),
            ("429496729.9 GT/s", 16),
            ("8 GT/s", 0),
            ("8 GT/s", 255),
        ] {
            assert_eq!(of(speed, width), None, "{speed} x{width}");
        }
        assert_eq!(generation(&generation_text(25)), Some(25));
    }
}
