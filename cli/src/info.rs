//! `cinch info`: prints facts about this build, this machine and the settings.

use crate::machine::{MachineInfo, host_name};
use cinch::config::{KNOBS, Origin};
use cinch::cpu::Isa;
use cinch::gpu::{Driver, kernels};
use cinch::types::{CodecKind, TransportKind};
use cinch::{Algorithm, Communicator, Config, Error, ErrorKind};
use std::io::{self, Write};

/// Prints versions, machine, GPUs, transports and settings. With `probes`, measures the links
/// between GPUs.
///
/// # Errors
/// Returns the writer's errors.
pub fn write(config: &Config, probes: bool, out: &mut dyn Write) -> io::Result<()> {
    let machine = MachineInfo::detect();
    let build = if cfg!(debug_assertions) {
        "debug"
    } else {
        "release"
    };
    writeln!(out, "cinch {} ({build}, {})", cinch::VERSION, machine.arch)?;
    writeln!(out, "wire format  {}", cinch::types::FORMAT_VERSION)?;
    writeln!(out, "\nmachine")?;
    writeln!(out, "  host       {}", host_name())?;
    writeln!(out, "  kernel     {}", machine.kernel)?;
    writeln!(out, "  cpu        {}", machine.cpu)?;
    writeln!(out, "  cores      {}", machine.cores)?;
    writeln!(out, "  memory     {} MiB", machine.memory_bytes >> 20)?;
    let sets: Vec<_> = Isa::available().into_iter().map(Isa::name).collect();
    let used = match Isa::from_setting(&config.simd) {
        Ok(isa) => isa.name().to_string(),
        Err(error) => error.to_string(),
    };
    writeln!(out, "  simd       {}; in use: {used}", sets.join(" "))?;
    crate::gpus::write(config, probes, out)?;
    writeln!(out, "\ntransports")?;
    for kind in TransportKind::ALL {
        writeln!(out, "  {:<10} {}", kind.name(), probe(kind, config))?;
    }
    let algorithms: Vec<_> = Algorithm::ALL.iter().map(|a| a.name()).collect();
    writeln!(out, "\nalgorithms   {}", algorithms.join(" "))?;
    let codecs: Vec<_> = CodecKind::ALL.iter().map(|c| c.name()).collect();
    writeln!(out, "codecs       {}", codecs.join(" "))?;
    writeln!(out, "\nsettings")?;
    for (knob, origin) in KNOBS.iter().zip(&config.origins) {
        let value = match (knob.show)(config) {
            empty if empty.is_empty() => "(unset)".to_string(),
            value => value,
        };
        writeln!(
            out,
            "  {:<28} {value:<14} {}",
            knob.name,
            origin_name(*origin)
        )?;
        writeln!(out, "  {:<28}   {}; takes {}", "", knob.help, knob.range())?;
    }
    let unknown = Config::unknown_names();
    if !unknown.is_empty() {
        writeln!(
            out,
            "\nwarning: no setting is called {}",
            unknown.join(", ")
        )?;
    }
    Ok(())
}

/// Prints channels, slots and transports of a communicator, as its rank sees them.
///
/// # Errors
/// Returns the writer's errors.
pub fn write_communicator(comm: &Communicator, out: &mut dyn Write) -> io::Result<()> {
    let info = comm.info();
    writeln!(
        out,
        "\ncommunicator of {} ranks, as rank {} sees it",
        comm.nranks(),
        comm.rank()
    )?;
    writeln!(out, "  channels     {}", info.channels)?;
    writeln!(
        out,
        "  slots        {} of {} bytes",
        info.slots, info.slot_bytes
    )?;
    writeln!(out, "  slot memory  {} bytes", info.buffer_bytes)?;
    for (peer, transport) in comm.peers().iter().zip(&info.transports) {
        let transport = transport.map_or("itself", TransportKind::name);
        writeln!(out, "  {peer}: {transport}")?;
    }
    Ok(())
}

/// Returns the printed form of a setting's origin.
fn origin_name(origin: Origin) -> &'static str {
    match origin {
        Origin::Default => "default",
        Origin::Environment => "environment",
        Origin::Program => "program",
    }
}

/// Returns `yes`, or the reason why a transport does not work on this machine, after trying to use
/// it.
fn probe(kind: TransportKind, config: &Config) -> String {
    let tried = cinch::transport::probe(kind, config).unwrap_or_else(|| {
        if let kernels::State::Missing { why } = kernels::STATE {
            let why = format!("no kernels in this build: {why}");
            return Err(Error::new(ErrorKind::Unsupported, why));
        }
        Driver::load()?.device_count()?;
        Ok("peer memory, or pinned host memory")
    });
    match tried {
        Err(error) => format!("no: {}", error.message()),
        Ok("") => "yes".into(),
        Ok(resource) => format!("yes: {resource}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_has_its_origin() {
        let mut config = Config::default();
        config.set("CINCH_SLOTS", "8", Origin::Program).unwrap();
        let mut out = Vec::new();
        write(&config, false, &mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        for knob in KNOBS {
            let line = text
                .lines()
                .find(|line| line.contains(&format!("{} ", knob.name)));
            let line = line.unwrap_or_else(|| panic!("{} is missing", knob.name));
            let expected = if knob.name == "CINCH_SLOTS" {
                "program"
            } else {
                "default"
            };
            assert!(line.trim_end().ends_with(expected), "{line}");
        }
        for kind in TransportKind::ALL {
            assert!(text.contains(&format!("\n  {}", kind.name())), "{kind}");
        }
        assert!(text.contains(cinch::VERSION));
        assert!(text.contains(&format!("\n  kernels    {}\n", kernels::STATE)));
        assert!(text.contains("\n  driver     "));
    }
}
