//! Writes a machine as XML that NCCL reads.

use crate::topology::machine::{CpuSocket, Gpu, GpuLinkKind, Machine, Nic, PciDevice};
use crate::topology::speed;
use std::fmt::Write;

/// Returns `machine` as an XML file in NCCL's format.
pub fn write(machine: &Machine) -> String {
    let mut out = XmlWriter {
        text: String::new(),
        depth: 0,
    };
    let version = machine.version.number();
    out.element(
        "system",
        &[("version", version.to_string())],
        machine,
        |out, machine| {
            machine.sockets.iter().for_each(|socket| out.socket(socket));
        },
    );
    out.text
}

struct XmlWriter {
    text: String,
    depth: usize,
}

/// Attributes of an element, in order.
type Attributes<'a> = [(&'a str, String)];

impl XmlWriter {
    /// Writes an element, and what `content` writes inside it.
    fn element<T: ?Sized>(
        &mut self,
        tag: &str,
        attributes: &Attributes<'_>,
        of: &T,
        content: impl FnOnce(&mut XmlWriter, &T),
    ) {
        let indent = "  ".repeat(self.depth);
        // Writing to a string cannot fail.
        let _ = write!(self.text, "{indent}<{tag}");
        for (name, value) in attributes {
            let _ = write!(self.text, " {name}=\"{}\"", escape(value));
        }
        let before = self.text.len();
        self.text.push_str(">\n");
        self.depth += 1;
        content(self, of);
        self.depth -= 1;
        if self.text.len() == before + 2 {
            self.text.truncate(before);
            self.text.push_str("/>\n");
        } else {
            let _ = writeln!(self.text, "{indent}</{tag}>");
        }
    }

    fn socket(&mut self, socket: &CpuSocket) {
        let number =
            |number: Option<u32>| number.map_or(String::new(), |number| number.to_string());
        let attributes = [
            ("numaid", socket.numa.to_string()),
            ("affinity", socket.affinity.clone()),
            ("arch", socket.arch.clone()),
            ("vendor", socket.vendor.clone()),
            ("familyid", number(socket.family)),
            ("modelid", number(socket.model)),
        ];
        self.element("cpu", &without_empty(attributes), socket, |out, socket| {
            socket.devices.iter().for_each(|device| out.device(device));
            out.nics(&socket.nics);
        });
    }

    /// Writes a device and all behind it. Readers limit the depth, so the recursion is bounded.
    fn device(&mut self, device: &PciDevice) {
        let hex = |id: u16| format!("0x{id:04x}");
        let attributes = [
            ("busid", device.bus_id.to_string()),
            (
                "class",
                device
                    .class
                    .map_or(String::new(), |class| format!("0x{class:06x}")),
            ),
            ("vendor", hex(device.ids[0])),
            ("device", hex(device.ids[1])),
            ("subsystem_vendor", hex(device.ids[2])),
            ("subsystem_device", hex(device.ids[3])),
            (
                "link_speed",
                device
                    .link
                    .speed
                    .map_or(String::new(), speed::generation_text),
            ),
            ("link_width", device.link.width.unwrap_or(0).to_string()),
        ];
        self.element("pci", &attributes, device, |out, device| {
            if let Some(gpu) = &device.gpu {
                out.gpu(gpu);
            }
            out.nics(&device.nics);
            device.devices.iter().for_each(|device| out.device(device));
        });
    }

    fn gpu(&mut self, gpu: &Gpu) {
        let number =
            |number: Option<u32>| number.map_or(String::new(), |number| number.to_string());
        let attributes = [
            ("dev", gpu.dev.to_string()),
            ("sm", number(gpu.sm)),
            ("gcn", number(gpu.gcn)),
            ("rank", number(gpu.rank)),
            ("gdr", u32::from(gpu.gdr).to_string()),
            // NCCL's format lacks the attribute, and NCCL ignores it.
            ("mig", if gpu.mig { "1".into() } else { String::new() }),
        ];
        self.element("gpu", &without_empty(attributes), gpu, |out, gpu| {
            for link in &gpu.links {
                let tag = match link.kind {
                    GpuLinkKind::NvLink => "nvlink",
                    GpuLinkKind::Xgmi => "xgmi",
                    GpuLinkKind::C2c => "c2c",
                };
                let text = |text: Option<String>| text.unwrap_or_default();
                let attributes = [
                    ("target", text(link.target.map(|target| target.to_string()))),
                    ("count", link.count.to_string()),
                    (
                        "tclass",
                        text(link.target_class.map(|class| format!("0x{class:06x}"))),
                    ),
                ];
                out.element(tag, &without_empty(attributes), &(), |_, ()| {});
            }
        });
    }

    fn nics(&mut self, nics: &[Nic]) {
        if nics.is_empty() {
            return;
        }
        self.element("nic", &[], nics, |out, nics| {
            for nic in nics {
                let attributes = [
                    ("name", nic.name.clone()),
                    ("dev", nic.dev.to_string()),
                    (
                        "speed",
                        nic.speed.map_or(String::new(), |speed| speed.to_string()),
                    ),
                    ("port", nic.port.to_string()),
                    ("guid", format!("0x{:x}", nic.guid)),
                    ("gdr", u32::from(nic.gdr).to_string()),
                ];
                out.element("net", &without_empty(attributes), &(), |_, ()| {});
            }
        });
    }
}

fn without_empty<const N: usize>(attributes: [(&str, String); N]) -> Vec<(&str, String)> {
    attributes
        .into_iter()
        .filter(|(_, value)| !value.is_empty())
        .collect()
}

fn escape(value: &str) -> String {
    value
        .replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('"', "&quot;")
        // Readers take line breaks and tabs in attributes as blanks.
        .replace('\n', "&#10;")
        .replace('\r', "&#13;")
        .replace('\t', "&#9;")
}
