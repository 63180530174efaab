//! Facts of the processor, which select the bandwidth between sockets.

use crate::sys::file;
use std::path::Path;

/// Number of bytes of `/proc/cpuinfo` that are read. The first processor suffices, because all sockets have
/// processors of one model.
const READ_BYTES: usize = 64 << 10;

/// Facts of the processor, in the form of NCCL's XML.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProcessorFacts {
    /// Instruction set: `x86_64`, `arm64` or `ppc64`.
    pub arch: String,
    /// Vendor as CPUID gives it; empty if unknown.
    pub vendor: String,
    /// Processor family in NCCL's numbering. Linux reports the sum of family and extended family; NCCL puts
    /// the extended family into higher bits.
    pub family: Option<u32>,
    /// Model as CPUID gives it.
    pub model: Option<u32>,
}

impl ProcessorFacts {
    /// Reads the processor of this machine from `cpuinfo`, which is `/proc/cpuinfo`. Without the file only the
    /// instruction set is known.
    pub fn read(cpuinfo: &Path) -> ProcessorFacts {
        let text = file::read_start(cpuinfo, READ_BYTES).unwrap_or_default();
        let arch = match std::env::consts::ARCH {
            "aarch64" => "arm64",
            "powerpc64" => "ppc64",
            other => other,
        };
        ProcessorFacts::parse(arch, &String::from_utf8_lossy(&text))
    }

    /// Finds the first processor in the text of `/proc/cpuinfo`.
    pub fn parse(arch: &str, cpuinfo: &str) -> ProcessorFacts {
        let find = |name: &str| {
            let lines = cpuinfo.lines().filter_map(|line| line.split_once(':'));
            let mut values = lines.filter(|(key, _)| key.trim() == name);
            values.next().map(|(_, value)| value.trim())
        };
        let number = |name: &str| find(name)?.parse::<u32>().ok();
        // Linux adds the extended family to a family of 15. NCCL, like CPUID, keeps the extended family in
        // higher bits.
        let family = number("cpu family").map(|family| match family {
            15..=270 => 15 + ((family - 15) << 4),
            other => other,
        });
        let vendor =
            find("vendor_id").filter(|vendor| vendor.bytes().all(|b| b.is_ascii_graphic()));
        ProcessorFacts {
            arch: arch.into(),
            vendor: vendor.unwrap_or("").into(),
            family,
            model: number("model"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_are_read_as_nccl_numbers_them() {
        let rome = "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 23\nmodel\t\t: 49\nmodel name\t: AMD\n";
        let facts = ProcessorFacts::parse("x86_64", rome);
        assert_eq!(
            (facts.vendor.as_str(), facts.family, facts.model),
            ("AuthenticAMD", Some(143), Some(49))
        );
        let intel = "vendor_id : GenuineIntel\ncpu family : 6\nmodel : 207\n\nvendor_id : Other\n";
        let facts = ProcessorFacts::parse("x86_64", intel);
        assert_eq!(
            (facts.vendor.as_str(), facts.family, facts.model),
            ("GenuineIntel", Some(6), Some(207))
        );
        for text in [
            "",
            "model\nvendor_id",
            "cpu family : -1\nmodel : 99999999999\nvendor_id : \u{7f}",
        ] {
            let arch = ProcessorFacts {
                arch: "arm64".into(),
                ..ProcessorFacts::default()
            };
            assert_eq!(ProcessorFacts::parse("arm64", text), arch);
        }
        assert!(
            !ProcessorFacts::read(Path::new("/nonexistent/cpuinfo"))
                .arch
                .is_empty()
        );
    }
}
