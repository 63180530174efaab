//! `--emulate`: shared memory that is as slow as the links of a machine file.

use cinch::config::EmulatedMachine;
use cinch::topology::{MachineGraph, read_xml, xml_file_text};
use clap::Args;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Options of `cinch bench` that emulate links.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Emulated links")]
pub struct EmulateOptions {
    /// Topology file in NCCL's XML format, with a GPU for each rank of one host. On host memory, messages take as
    /// long as the links of their path would take. On GPUs, ranks without peer access in the file exchange data
    /// through pinned host memory, at the speed of this machine
    #[arg(long, value_name = "FILE",
          conflicts_with_all = ["explain_hosts", "report", "suite", "hosts"])]
    pub emulate: Option<PathBuf>,
    /// Divisor of the bandwidths, so that links and not cores decide the time (default: 100). Host memory only
    #[arg(long, value_name = "N", requires = "emulate",
          value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub emulate_scale: Option<u32>,
}

/// Divisor of bandwidths where none is given.
const SCALE: u32 = 100;

impl EmulateOptions {
    /// Reads the machine of `--emulate`; `None` without the option. `ranks` is the number of ranks, if it is known.
    ///
    /// # Errors
    /// Returns an error message that names the file if it cannot be read, is malformed, or has fewer GPUs than there
    /// are ranks.
    pub fn machine(&self, ranks: Option<usize>) -> Result<Option<EmulatedMachine>, String> {
        let Some(path) = &self.emulate else {
            return Ok(None);
        };
        let name = path.display().to_string();
        let xml = xml_file_text(path).map_err(|error| format!("--emulate {name}: {error}"))?;
        let machine = read_xml(&xml).map_err(|error| format!("--emulate {name}: {error}"))?;
        let gpus = MachineGraph::new(&machine).gpus.len();
        if let Some(ranks) = ranks.filter(|&ranks| ranks > gpus) {
            return Err(format!(
                "--emulate {name}: the file has {gpus} GPUs, too few for {ranks} ranks"
            ));
        }
        Ok(Some(EmulatedMachine {
            file: name,
            xml,
            scale: self.emulate_scale.unwrap_or(SCALE),
        }))
    }

    /// Reads the machine of `--emulate` for ranks on GPUs, whose bandwidths are not divided.
    ///
    /// # Errors
    /// As for [`EmulateOptions::machine`]; also if a scale is given.
    pub fn machine_of_gpus(&self, ranks: Option<usize>) -> Result<Option<EmulatedMachine>, String> {
        if self.emulate_scale.is_some() {
            return Err("--emulate-scale is for host memory; leave out --device gpu".into());
        }
        let machine = self.machine(ranks)?;
        Ok(machine.map(|machine| EmulatedMachine {
            scale: 1,
            ..machine
        }))
    }
}

/// A machine whose links shared memory emulated.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EmulationInfo {
    /// Topology file of the machine.
    pub file: String,
    /// Divisor of its bandwidths.
    pub scale: u32,
}

/// Returns the line that marks the rows of a run on GPUs as emulated.
pub fn note_of_gpus(emulation: &EmulationInfo) -> String {
    format!(
        "EMULATED: ranks without peer access in {} exchange data through pinned host memory",
        emulation.file
    )
}

/// Returns the line that marks the rows of a run as emulated.
pub fn note(emulation: &EmulationInfo) -> String {
    let EmulationInfo { file, scale } = emulation;
    format!(
        "EMULATED: shared memory carries messages as fast as the links of {file} with bandwidths / {scale}; \
         rows are no measurement of this machine"
    )
}

#[cfg(test)]
mod tests {
    use crate::bench::options::BenchOptions;
    use crate::testing::parsed;
    use std::path::PathBuf;

    fn options(line: &str) -> BenchOptions {
        parsed(line).unwrap()
    }

    fn file() -> String {
        format!("{}/../tests/topology/A.xml", env!("CARGO_MANIFEST_DIR"))
    }

    #[test]
    fn machine_is_read_with_its_scale() {
        let none = options("all_reduce").emulate.machine(Some(8)).unwrap();
        assert_eq!(none, None);
        let emulate = options(&format!("all_reduce --emulate {}", file())).emulate;
        let machine = emulate.machine(Some(8)).unwrap().unwrap();
        assert_eq!((machine.scale, machine.file), (100, file()));
        let few = emulate.machine(Some(9)).unwrap_err();
        assert!(few.contains("A.xml") && few.contains("8 GPUs"), "{few}");
        let line = format!("all_reduce --emulate {} --emulate-scale 7", file());
        let machine = options(&line).emulate.machine(None).unwrap().unwrap();
        assert_eq!(machine.scale, 7);
        let of_gpus = options(&line).emulate.machine_of_gpus(None).unwrap_err();
        assert!(of_gpus.contains("--emulate-scale"), "{of_gpus}");
        let line = format!("all_reduce --device gpu --emulate {}", file());
        let machine = options(&line).emulate.machine_of_gpus(Some(8)).unwrap();
        assert_eq!(machine.unwrap().scale, 1);
    }

    #[test]
    fn unreadable_machine_is_refused_by_name() {
        let mut emulate = options("all_reduce --emulate /no/such/file").emulate;
        let error = emulate.machine(None).unwrap_err();
        assert!(error.contains("/no/such/file"), "{error}");
        emulate.emulate = Some(PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml"));
        let error = emulate.machine(None).unwrap_err();
        assert!(error.contains("no XML"), "{error}");
        for line in [
            "all_reduce --emulate-scale 7",
            "all_reduce --emulate x --emulate-scale 0",
            "all_reduce --emulate x --device gpu --hosts 2",
            "all_reduce --emulate x --explain-hosts 2x2",
        ] {
            assert!(parsed::<BenchOptions>(line).is_err(), "{line}");
        }
    }
}
