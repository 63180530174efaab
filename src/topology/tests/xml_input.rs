//! Files that are refused, and defects that are only reported.

use crate::error::ErrorKind;
use crate::topology::{BandwidthOrigin, MachineGraph, read_xml, write_xml};

/// Returns a file with one socket that contains `devices`.
fn file(devices: &str) -> String {
    format!(
        "<system version=\"1\">\n<cpu numaid=\"0\" arch=\"x86_64\">\n{devices}\n</cpu>\n</system>"
    )
}

/// Returns a GPU at bus `bus` with further attributes and content.
fn gpu(bus: u32, attributes: &str, content: &str) -> String {
    format!(
        "<pci busid=\"0000:{bus:02x}:00.0\" class=\"0x030200\" link_speed=\"16.0 GT/s PCIe\" link_width=\"16\">\
         <gpu {attributes}>{content}</gpu></pci>"
    )
}

fn refused(text: &str, parts: &[&str]) {
    let error = read_xml(text).expect_err(text.get(..200).unwrap_or(text));
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    for part in parts {
        assert!(
            error.message().contains(part),
            "{part:?} is not in {:?}",
            error.message()
        );
    }
}

#[test]
fn bad_files_are_refused_with_the_line() {
    let one = gpu(1, "dev=\"0\"", "");
    refused("", &["no XML"]);
    refused(
        "<system version=\"1\"><cpu></system>",
        &["line 1", "no XML"],
    );
    refused(
        "<graphs version=\"1\"/>",
        &["line 1", "<graphs>", "<system>"],
    );
    refused("<system/>", &["version"]);
    refused(
        "<system version=\"3\"/>",
        &["version 3", "valid: 1 (NCCL), 2 (RCCL)"],
    );
    refused("<system version=\"one\"/>", &["version=\"one\"", "number"]);
    refused(
        "<!DOCTYPE system [<!ENTITY a \"b\">]><system version=\"1\"/>",
        &["DOCTYPE"],
    );
    refused(&file(""), &["no <gpu>"]);
    refused(&file(&gpu(1, "rank=\"0\"", "")), &["line 3", "no dev"]);
    refused(&file("<gpu dev=\"0\"/>"), &["line 3", "outside"]);
    refused(&file("<pci class=\"0x060400\"/>"), &["line 3", "busid"]);
    refused(
        &file("<pci busid=\"here\"/>"),
        &["line 3", "busid=\"here\"", "0000:c1:00.0"],
    );
    for attributes in [
        "dev=\"-1\"",
        "dev=\"99999999999\"",
        "dev=\"0x1\"",
        "dev=\"0\" sm=\"Volta\"",
    ] {
        refused(&file(&gpu(1, attributes, "")), &["line 3", "number"]);
    }
    let twice = |second: String| file(&format!("{one}\n{second}"));
    refused(&twice(gpu(1, "dev=\"1\"", "")), &["line 4", "0000:01:00.0"]);
    refused(&twice(gpu(2, "dev=\"0\"", "")), &["line 4", "dev 0"]);
    let ranks = [
        gpu(1, "dev=\"0\" rank=\"5\"", ""),
        gpu(2, "dev=\"1\" rank=\"5\"", ""),
    ]
    .join("\n");
    refused(&file(&ranks), &["line 4", "rank 5"]);
    let hosts =
        "<system version=\"1\">\n<cpu host_hash=\"0x1\"/>\n<cpu host_hash=\"0x2\"/></system>";
    refused(hosts, &["line 3", "several hosts"]);
    refused(
        &format!("{}<!--{}-->", file(&one), "x".repeat(8 << 20)),
        &["8388608 bytes"],
    );
    let many = "<pci busid=\"0:0:0.0\"/>".repeat(4097);
    refused(&file(&many), &["4096 elements"]);
    let deep = format!(
        "{}{}",
        "<pci busid=\"0:0:0.0\">".repeat(100),
        "</pci>".repeat(100)
    );
    refused(&file(&deep), &["64 levels"]);
    let deepest = format!(
        "{}{}",
        "<pci busid=\"0:0:0.0\">".repeat(300_000),
        "</pci>".repeat(300_000)
    );
    refused(&file(&deepest), &["64 levels"]);
}

#[test]
fn milder_defects_are_reported_once_and_the_rest_is_used() {
    let link =
        |target: &str| format!("<nvlink target=\"{target}\" count=\"2\" tclass=\"0x030200\"/>");
    let itself = gpu(
        1,
        "dev=\"0\" sm=\"70\"",
        &(link("0000:01:00.0") + &link("0000:02:00.0")),
    );
    let nowhere = gpu(2, "dev=\"1\" sm=\"70\"", &link("0000:77:00.0"));
    let no_class =
        "<pci busid=\"0000:03:00.0\" link_speed=\"\" link_width=\"\"><gpu dev=\"2\"/></pci>";
    let behind = gpu(5, "dev=\"3\"", "");
    let slow = format!(
        "<pci busid=\"0000:04:00.0\" class=\"0x060400\" link_speed=\"2.5 GT/s\" link_width=\"1\">{behind}</pci>"
    );
    let behind = gpu(6, "dev=\"4\"", "");
    let again = format!(
        "<pci busid=\"0000:04:00.0\" class=\"0x060400\" link_speed=\"16 GT/s\" link_width=\"0\">{behind}</pci>"
    );
    let text = file(&[itself, nowhere, no_class.into(), slow, again].join("\n"));
    let graph = MachineGraph::new(&read_xml(&text).unwrap());
    let defects: Vec<String> = graph.defects.iter().map(ToString::to_string).collect();
    let expected = [
        "0000:03:00.0 has no class",
        "2 bridges have the address 0000:04:00.0",
        "of 0000:03:00.0 has no usable speed",
        "bridge 0000:04:00.0 claims 2.5 GT/s PCIe x1",
        "of 0000:04:00.0 has no usable speed",
        "0000:01:00.0 lists a link to itself",
        "0000:02:00.0 lists a link to 0000:77:00.0",
        "0000:01:00.0 lists 2 links to 0000:02:00.0, which lists 0 back",
    ];
    assert_eq!(defects.len(), expected.len(), "{defects:#?}");
    for part in expected {
        assert!(
            defects.iter().any(|defect| defect.contains(part)),
            "{part} is not in {defects:#?}"
        );
    }
    assert_eq!(graph.gpus.len(), 5);
    let assumed = graph.links.iter().filter(|link| {
        link.bandwidth.origin == BandwidthOrigin::Assumed && link.bandwidth.mb_s < 1000
    });
    assert_eq!(assumed.count(), 0, "an unknown link is not slow");
}

#[test]
fn width_zero_is_unknown_and_survives_being_written() {
    let switch = |attributes: &str| {
        let gpu = gpu(3, "dev=\"0\"", "");
        file(&format!(
            "<pci busid=\"0000:04:00.0\" class=\"0x060400\"{attributes}>{gpu}</pci>"
        ))
    };
    let text = switch(" link_speed=\"\" link_width=\"0\"");
    let absent = switch("");
    let machine = read_xml(&text).unwrap();
    assert_eq!(read_xml(&absent).unwrap(), machine);
    assert_eq!(read_xml(&write_xml(&machine)).unwrap(), machine);
}

#[test]
fn numbers_wider_than_their_field_are_refused() {
    for attributes in [
        "class=\"0x100030200\"",
        "class=\"0x030200\" vendor=\"0x110de\"",
    ] {
        let text = file(&format!("<pci busid=\"0000:04:00.0\" {attributes}/>"));
        let error = read_xml(&text).unwrap_err();
        assert!(
            error.message().contains("is not a number in range"),
            "{error}"
        );
    }
}
