//! The GPU part of `cinch info`: devices, links between them, and the memory that a communicator
//! needs.

use crate::bench::gpu::driver_version;
use cinch::gpu::probe::{PairSpeed, Probe, pair_speed};
use cinch::gpu::{Context, Device, Driver, kernels};
use cinch::gpu_links::link_class;
use cinch::mem::PeerBufferLayout;
use cinch::{Config, Result};
use std::io::{self, Write};

/// Prints whether kernels were built, the driver version and the GPUs. With `probes`, measures
/// every pair of GPUs.
///
/// # Errors
/// Returns the writer's errors.
pub fn write(config: &Config, probes: bool, out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "\ngpus")?;
    writeln!(out, "  kernels    {}", kernels::STATE)?;
    let driver = match Driver::load() {
        Ok(driver) => driver,
        Err(error) => return writeln!(out, "  driver     {error}"),
    };
    let (major, minor) = (driver.version() / 1000, driver.version() % 1000 / 10);
    writeln!(
        out,
        "  driver     {}, for CUDA {major}.{minor}",
        driver_version()
    )?;
    let devices = match driver.devices() {
        Ok(devices) => devices,
        Err(error) => return writeln!(out, "  devices    {error}"),
    };
    for device in &devices {
        let (major, minor) = device.compute_capability;
        writeln!(
            out,
            "  {device}: sm_{major}{minor}, {} multiprocessors, {} MiB, {}",
            device.multiprocessors,
            device.memory_bytes >> 20,
            uuid(&device.uuid)
        )?;
    }
    if devices.is_empty() {
        return Ok(());
    }
    write_buffers(config, devices.len(), out)?;
    let classes = cells(devices.len(), |from, to| {
        link_class(&devices[from], &devices[to]).map(|class| class.name().to_string())
    });
    write_matrix("paths, as the driver reports them", &classes, out)?;
    match probes {
        true => write_speeds(&devices, out),
        false => Ok(()),
    }
}

/// Prints the bytes of the buffers on each GPU for a communicator with a rank on every GPU.
fn write_buffers(config: &Config, gpus: usize, out: &mut dyn Write) -> io::Result<()> {
    match PeerBufferLayout::new(gpus, config.buffer_bytes, config.gpu_channels_for(1)) {
        Ok(shape) => writeln!(
            out,
            "  buffers    {} bytes on each GPU for a communicator of {gpus} ranks",
            shape.device_bytes()
        ),
        Err(error) => writeln!(out, "  buffers    {error}"),
    }
}

fn write_speeds(devices: &[Device], out: &mut dyn Write) -> io::Result<()> {
    let probes = devices
        .iter()
        .map(|device| Probe::new(&Context::primary(device)?))
        .collect::<Result<Vec<_>>>();
    let probes = match probes {
        Ok(probes) => probes,
        Err(error) => return writeln!(out, "  probe      {error}"),
    };
    let mut pairs = Vec::new();
    for here in &probes {
        pairs.push(probes.iter().map(|there| pair_speed(here, there)).collect());
    }
    let shown = |show: fn(&PairSpeed) -> String| {
        cells(devices.len(), |from, to| {
            let row: &Vec<Result<PairSpeed>> = &pairs[from];
            row[to].as_ref().map(show).map_err(Clone::clone)
        })
    };
    write_matrix(
        "written by the row's GPU to the column's memory, GB/s",
        &shown(|speed| format!("{:.0}", speed.write / 1e9)),
        out,
    )?;
    write_matrix(
        "read by the row's GPU from the column's memory, GB/s",
        &shown(|speed| format!("{:.0}", speed.read / 1e9)),
        out,
    )?;
    write_matrix(
        "there and back, us",
        &shown(|speed| format!("{:.2}", speed.round_trip * 1e6)),
        out,
    )?;
    let failed = pairs.iter().flatten().find_map(|pair| pair.as_ref().err());
    match failed {
        Some(error) => writeln!(out, "  not measured: {error}"),
        None => Ok(()),
    }
}

/// Returns a square matrix of cell texts; a cell whose value is an error becomes `no`.
fn cells(size: usize, cell: impl Fn(usize, usize) -> Result<String>) -> Vec<Vec<String>> {
    let text = |from, to| cell(from, to).unwrap_or_else(|_| "no".into());
    let row = |from| (0..size).map(|to| text(from, to)).collect();
    (0..size).map(row).collect()
}

/// Writes a square matrix of cells below its title.
///
/// # Errors
/// Returns the writer's errors.
pub fn write_matrix(title: &str, cells: &[Vec<String>], out: &mut dyn Write) -> io::Result<()> {
    let widest = cells.iter().flatten().map(String::len).max().unwrap_or(0);
    let width = widest.max(3) + 2;
    writeln!(out, "  {title}")?;
    write!(out, "  {:>6}", "")?;
    for to in 0..cells.len() {
        write!(out, "{to:>width$}")?;
    }
    writeln!(out)?;
    for (from, row) in cells.iter().enumerate() {
        write!(out, "  {from:>6}")?;
        for cell in row {
            write!(out, "{cell:>width$}")?;
        }
        writeln!(out)?;
    }
    Ok(())
}

/// Formats a UUID as nvidia-smi does.
fn uuid(bytes: &[u8; 16]) -> String {
    let mut text = String::from("GPU-");
    for (index, byte) in bytes.iter().enumerate() {
        if [4, 6, 8, 10].contains(&index) {
            text.push('-');
        }
        text += &format!("{byte:02x}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matrices_are_square_and_aligned() {
        let cells = cells(3, |from, to| match (from, to) {
            (1, 2) => Err(cinch::Error::invalid_argument("no way")),
            (from, to) if from == to => Ok("same GPU".into()),
            _ => Ok("NVLink".into()),
        });
        let mut out = Vec::new();
        write_matrix("paths", &cells, &mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 5);
        assert!(
            lines[1..].iter().all(|line| line.len() == 8 + 3 * 10),
            "{text}"
        );
        assert!(
            lines[3].ends_with("  no") && lines[4].ends_with("same GPU"),
            "{text}"
        );
    }

    #[test]
    fn identities_and_buffers_are_written_out() {
        let bytes: [u8; 16] = std::array::from_fn(|i| i as u8 * 16 + 1);
        assert_eq!(uuid(&bytes), "GPU-01112131-4151-6171-8191-a1b1c1d1e1f1");
        let mut out = Vec::new();
        write_buffers(&Config::default(), 8, &mut out).unwrap();
        write_buffers(&Config::default(), 99, &mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        let bytes = text.split_whitespace().nth(1).unwrap();
        let bytes: usize = bytes.parse().unwrap();
        assert!(bytes > 1 << 20 && bytes <= 64 << 20, "{text}");
        assert!(text.contains("99 ranks"), "{text}");
    }
}
