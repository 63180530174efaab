//! `cinch topo`: shows a machine's topology, and what schedules cost on it.

mod json;
mod probe;
mod svg;
mod text;

use crate::{ExitResult, FAILURE, USAGE, finish};
use cinch::Config;
use cinch::gpu::Driver;
use cinch::sys::numa;
use cinch::sys::nvml::Nvml;
use cinch::topology::{
    self, AllReducePrediction, DetectSources, DriverGpu, Machine, MachineGraph, PathType, Paths,
    PeerAccess, ProcessorFacts, predict, read_xml, write_xml, xml_file_text,
};
use probe::Probed;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Options of `cinch topo`.
#[derive(clap::Args)]
pub struct TopoOptions {
    /// Topology file in NCCL's XML format, as NCCL_TOPO_DUMP_FILE writes it; without it, the machine at hand
    #[arg(long, value_name = "FILE", conflicts_with = "sys")]
    file: Option<PathBuf>,
    /// Directory that looks like /sys, of this or another machine. The processor is read from proc/cpuinfo in
    /// or beside it
    #[arg(long, value_name = "DIR")]
    sys: Option<PathBuf>,
    /// Measure traffic patterns on this machine's GPUs, which takes up to 10 seconds. The limits that they show are
    /// saved in the user's cache directory, where communicators find them. Run it on an idle machine
    #[arg(long, conflicts_with_all = ["file", "sys"])]
    probe: bool,
    /// Message size of the predictions
    #[arg(short, long, value_name = "N", default_value = "256M", value_parser = crate::bench::values::parse_size)]
    bytes: usize,
    /// Farthest path over which GPUs access each other's memory: never, NVL, PIX, PXB, PHB or SYS. By default the rule
    /// of NCCL (version 1) or RCCL (version 2), or never with CINCH_P2P_DISABLE=1
    #[arg(long, value_name = "PATH", value_parser = parse_access)]
    peer_access: Option<PeerAccess>,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
    /// Write the machine in NCCL's XML format
    #[arg(long, value_name = "FILE")]
    xml: Option<PathBuf>,
    /// Draw the machine, its links, and the best rings or groups
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

/// A machine and everything that is shown of it.
struct Shown {
    source: String,
    machine: Machine,
    graph: MachineGraph,
    paths: Paths,
    prediction: AllReducePrediction,
    bytes: u64,
    /// Measured limits; `None` if nothing was measured.
    probed: Option<Probed>,
}

/// Bytes of `linear8` with blocks of 256 elements, per byte of fp32.
fn linear8_ratio() -> f64 {
    use cinch::types::CodecKind;
    use cinch::{CodecSpec, DType};
    crate::bench::metrics::bytes_per_element(CodecSpec::of(CodecKind::Linear8), DType::F32) / 4.0
}

/// Shows the machine that `options` name.
pub fn main(options: &TopoOptions, config: &Config) -> ExitResult {
    let (source, machine) = describe(options)?;
    let graph = MachineGraph::new(&machine);
    let probed = match (options.probe, &options.file, &options.sys) {
        (true, ..) => Some(probe::run(&graph, config)?),
        (false, None, None) => probe::saved(&graph, config)?,
        _ => None,
    };
    let access = match (&options.peer_access, &probed) {
        (Some(access), _) => access.clone(),
        (None, Some(probed)) => probed.saved.access.clone(),
        (None, None) if config.p2p_disable => PeerAccess::Never,
        (None, None) => PeerAccess::Rule,
    };
    let shown = Shown::new((source, machine), &access, options.bytes as u64, probed)?;
    if let Some(path) = &options.xml {
        save(path, &write_xml(&shown.machine))?;
    }
    if let Some(path) = &options.svg {
        save(path, &svg::draw(&shown))?;
    }
    let mut out = io::stdout().lock();
    finish(match options.json {
        true => json::write(&shown, &mut out),
        false => text::write(&shown, &mut out),
    })
}

/// Returns the machine, and where its description comes from.
fn describe(options: &TopoOptions) -> ExitResult<(String, Machine)> {
    let usage = |path: &Path, error: &dyn std::fmt::Display| {
        (USAGE, format!("{}: {error}", path.display()))
    };
    if let Some(path) = &options.file {
        let text = xml_file_text(path).map_err(|error| usage(path, &error))?;
        let machine = read_xml(&text).map_err(|error| usage(path, &error))?;
        return Ok((path.display().to_string(), machine));
    }
    let (root, machine) = match &options.sys {
        Some(root) => (root.as_path(), of_tree(root)),
        None => (Path::new(numa::SYS), at_hand()),
    };
    let machine = machine.map_err(|error| usage(root, &error))?;
    let has_gpu = machine
        .pci_devices()
        .iter()
        .any(|device| device.gpu.is_some());
    if !has_gpu {
        return Err(usage(
            root,
            &"no GPU was found; --file shows the machine of a topology file",
        ));
    }
    Ok((root.display().to_string(), machine))
}

/// Describes the machine of a directory that looks like /sys, without reports of drivers.
fn of_tree(root: &Path) -> cinch::Result<Machine> {
    if !root.is_dir() {
        return Err(cinch::Error::invalid_argument("no such directory"));
    }
    let beside = [root.join("proc/cpuinfo"), root.join("../proc/cpuinfo")];
    let cpuinfo = beside.into_iter().find(|path| path.is_file());
    let processor =
        cpuinfo.map_or_else(ProcessorFacts::default, |path| ProcessorFacts::read(&path));
    topology::detect(
        root,
        &DetectSources {
            processor,
            ..DetectSources::default()
        },
    )
}

/// Describes this machine, by /sys, NVML and the CUDA driver.
fn at_hand() -> cinch::Result<Machine> {
    let nvml = Nvml::open()
        .and_then(|nvml| nvml.gpus())
        .unwrap_or_default();
    let devices = Driver::load()
        .and_then(|driver| driver.devices())
        .unwrap_or_default();
    let driver: Vec<DriverGpu> = devices
        .iter()
        .filter_map(|device| {
            let (major, minor) = device.compute_capability;
            let bus_id = device.pci_bus_id.to_ascii_lowercase().parse().ok()?;
            Some(DriverGpu {
                bus_id,
                sm: Some(10 * major + minor),
                gdr: None,
            })
        })
        .collect();
    let processor = ProcessorFacts::read(Path::new("/proc/cpuinfo"));
    let sources = DetectSources {
        processor,
        nvml: &nvml,
        driver: &driver,
    };
    topology::detect(Path::new(numa::SYS), &sources)
}

fn save(path: &Path, text: &str) -> ExitResult<()> {
    fs::write(path, text).map_err(|error| (FAILURE, format!("{}: {error}", path.display())))
}

fn parse_access(text: &str) -> Result<PeerAccess, String> {
    let classes = [
        PathType::Nvl,
        PathType::Pix,
        PathType::Pxb,
        PathType::Phb,
        PathType::Sys,
    ];
    if text.eq_ignore_ascii_case("never") {
        return Ok(PeerAccess::Never);
    }
    let found = classes
        .into_iter()
        .find(|class| class.name().eq_ignore_ascii_case(text));
    found
        .map(PeerAccess::UpTo)
        .ok_or_else(|| "valid: never, NVL, PIX, PXB, PHB, SYS".into())
}

impl Shown {
    /// Derives everything from a machine, whose source is named, for messages of `bytes` bytes. Measured limits replace
    /// figures of the description.
    fn new(
        (source, machine): (String, Machine),
        access: &PeerAccess,
        bytes: u64,
        probed: Option<Probed>,
    ) -> ExitResult<Shown> {
        let mut graph = MachineGraph::new(&machine);
        if let Some(probed) = &probed {
            let applied = probed.saved.limits.apply(&mut graph);
            applied.map_err(|error| (FAILURE, format!("measured limits: {error}")))?;
        }
        let paths = Paths::new(&graph, access);
        let prediction = predict(&graph, &paths);
        Ok(Shown {
            source,
            machine,
            graph,
            paths,
            prediction,
            bytes,
            probed,
        })
    }

    fn gpus(&self) -> usize {
        self.graph.gpus.len()
    }

    /// Returns predicted times by name, in milliseconds; `None` where the machine has no such schedule.
    fn predicted_ms(&self) -> Vec<(&'static str, f64)> {
        let prediction = &self.prediction;
        let ms = |time: cinch::topology::LinkTime| time.milliseconds(self.bytes);
        let ratio = linear8_ratio();
        vec![
            ("ring_by_rank", ms(prediction.ring_by_rank)),
            ("best_ring", ms(prediction.best_ring.1)),
            ("ring_set", ms(prediction.ring_set.time)),
            ("direct", ms(prediction.direct)),
            ("best", ms(prediction.best())),
            ("bound", ms(prediction.bound)),
            ("direct_linear8", ms(prediction.direct) * ratio),
            ("best_linear8", ms(prediction.best_direct()) * ratio),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cinch::topology::probe::SavedProbe;

    fn shown(file: &str) -> Shown {
        let machine = describe(&options(file)).unwrap();
        Shown::new(machine, &PeerAccess::Rule, 256 << 20, None).unwrap()
    }

    fn options(file: &str) -> TopoOptions {
        let file = format!("{}/../tests/topology/{file}", env!("CARGO_MANIFEST_DIR"));
        TopoOptions {
            file: Some(file.into()),
            sys: None,
            probe: false,
            bytes: 256 << 20,
            peer_access: None,
            json: true,
            xml: None,
            svg: None,
        }
    }

    /// Returns machine C as if it had been measured.
    fn probed() -> Shown {
        let machine = describe(&options("C.xml")).unwrap();
        let graph = MachineGraph::new(&machine.1);
        let text = "fingerprint 0\naccess 11111111 11111111 11111111 11111111 11111111 11111111 11111111 11111111\n\
                    link 10:00.0 80:00.0 53700\nlink 80:00.0 socket_0 39000\nfan 80:00.0 2 2 2700\n\
                    pool 20000 socket_0>socket_1 socket_1>socket_0\n\
                    pattern write 10:00.0>12:00.0=38000 : GPU 0 to GPU 2\n\
                    pattern read 10:00.0>12:00.0=31000 : GPU 0 to GPU 2, by reading\n\
                    pattern write 10:00.0>14:00.0=9500 14:00.0>10:00.0=9500 : GPU 0 and GPU 4 both ways\n";
        let saved = SavedProbe::from_text(text, &graph).unwrap();
        let access = saved.access.clone();
        let source = "saved in /cache".into();
        Shown::new(machine, &access, 256 << 20, Some(Probed { saved, source })).unwrap()
    }

    #[test]
    fn measured_patterns_stand_beside_predicted_rates() {
        let mut out = Vec::new();
        json::write(&probed(), &mut out).unwrap();
        let value: serde_json::Value = serde_json::from_slice(&out).unwrap();
        let patterns = value["measured"].as_array().unwrap();
        assert_eq!(patterns.len(), 3);
        assert_eq!(
            patterns[2]["flows"],
            serde_json::json!([
                ["0000:10:00.0", "0000:14:00.0"],
                ["0000:14:00.0", "0000:10:00.0"]
            ])
        );
        assert_eq!(patterns[2]["gb_s"], serde_json::json!([9.5, 9.5]));
        assert_eq!(
            patterns[2]["predicted_gb_s"],
            serde_json::json!([10.0, 10.0])
        );
        assert_eq!(
            (&patterns[1]["by_reading"], &patterns[0]["by_reading"]),
            (&true.into(), &false.into())
        );
        let links = value["links"].as_array().unwrap();
        let origin = |from: &str, to: &str| {
            let link = links
                .iter()
                .find(|link| link["from"] == from && link["to"] == to)
                .unwrap();
            (
                link["origin"].as_str().unwrap(),
                link["gb_s"].as_f64().unwrap(),
            )
        };
        assert_eq!(origin("0000:10:00.0", "0000:80:00.0"), ("measured", 53.7));
        assert_eq!(origin("0000:11:00.0", "0000:80:00.0"), ("table", 48.0));
        assert_eq!(value["pools"][0]["gb_s"], 20.0);
        assert_eq!(value["fans"][0]["switch"], "0000:80:00.0");
        let mut text = Vec::new();
        text::write(&probed(), &mut text).unwrap();
        let text = String::from_utf8(text).unwrap();
        for part in [
            "GPU 0  0000:10:00.0  53.7m",
            "saved in /cache",
            "20 together: socket 0 > socket 1, socket 1 > socket 0",
            "2.7 out of switch 0000:80:00.0 while at least 2 GPUs send to at least 2 root ports",
            "GPU 0 and GPU 4 both ways",
            "written by the row's GPU",
        ] {
            assert!(text.contains(part), "{part} is not in {text}");
        }
        let mut out = Vec::new();
        json::write(&shown("C.xml"), &mut out).unwrap();
        let value: serde_json::Value = serde_json::from_slice(&out).unwrap();
        assert!(value["measured"].is_null());
    }

    #[test]
    fn one_json_object_describes_a_machine() {
        let mut out = Vec::new();
        json::write(&shown("B.xml"), &mut out).unwrap();
        let value: serde_json::Value = serde_json::from_slice(&out).unwrap();
        assert_eq!(value["gpus"][7], "0000:17:00.0");
        assert_eq!(value["paths"][0][1], "PIX");
        assert_eq!(value["paths"][0][4], "SYS");
        assert_eq!(
            value["groups"],
            serde_json::json!([[0, 1], [2, 3], [4, 5], [6, 7]])
        );
        assert_eq!(
            value["rings"],
            serde_json::json!([[0, 1, 2, 3, 4, 5, 6, 7]])
        );
        for (name, ms) in [
            ("ring_by_rank", 46.98),
            ("best", 39.15),
            ("best_linear8", 9.94),
        ] {
            let found = value["predicted_ms"][name].as_f64().unwrap();
            assert!((found - ms).abs() < 0.01, "{name}: {found}");
        }
    }

    #[test]
    fn text_and_drawing_show_every_gpu() {
        for file in ["A.xml", "G.xml", "H.xml", "K.xml"] {
            let shown = shown(file);
            let mut text = Vec::new();
            text::write(&shown, &mut text).unwrap();
            let text = String::from_utf8(text).unwrap();
            let svg = svg::draw(&shown);
            for gpu in &shown.graph.gpus {
                let name = gpu.bus_id.to_string();
                assert!(
                    text.contains(&name) && svg.contains(&name),
                    "{file}: {name}"
                );
            }
            assert!(text.contains("best ring") || text.contains("best set of rings"));
            assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n"));
        }
    }

    #[test]
    fn peer_access_is_a_class_of_path_or_never() {
        assert_eq!(parse_access("never"), Ok(PeerAccess::Never));
        assert_eq!(parse_access("phb"), Ok(PeerAccess::UpTo(PathType::Phb)));
        assert!(parse_access("near").unwrap_err().contains("PIX"));
    }
}
