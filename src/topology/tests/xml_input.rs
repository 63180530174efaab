//! Files that are refused, and defects that are only reported.

use crate::error::ErrorKind;
use crate::topology::{
    AllReducePrediction, BandwidthOrigin, LinkKind, LinkTime, MachineGraph, Paths, PeerAccess,
    predict, read_xml, write_xml,
};

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
fn equal_defects_are_reported_once() {
    let link = |target: &str, count: &str| {
        format!("<nvlink target=\"{target}\" count=\"{count}\" tclass=\"0x030200\"/>")
    };
    let twice = [link("0000:01:00.0", "1"), link("0000:77:00.0", "1")]
        .concat()
        .repeat(2);
    let counts = [
        link("0000:02:00.0", "0"),
        link("0000:02:00.0", "4294967295"),
    ]
    .concat();
    let bridge = |bus: u32| {
        let behind = gpu(bus, &format!("dev=\"{bus}\""), "");
        format!("<pci busid=\"0000:80:00.0\" link_width=\"0\">{behind}</pci>")
    };
    let devices = [
        gpu(1, "dev=\"1\" sm=\"70\"", &(twice + &counts)),
        bridge(2),
        bridge(3),
    ]
    .concat();
    let text = file(&devices).replace("</cpu>", "</cpu><cpu numaid=\"-1\"/><cpu numaid=\"-1\"/>");
    let graph = MachineGraph::new(&read_xml(&text).unwrap());
    let defects: Vec<String> = graph.defects.iter().map(ToString::to_string).collect();
    let expected = [
        "0000:80:00.0 has no class",
        "2 bridges have the address 0000:80:00.0",
        "of 0000:80:00.0 has no usable speed",
        "a socket has no NUMA node",
        "0000:01:00.0 lists a link to itself",
        "0000:01:00.0 lists a link to 0000:77:00.0",
        "0000:01:00.0 lists 0 links",
        "0000:01:00.0 lists 4294967295 links",
    ];
    assert_eq!(defects.len(), expected.len(), "{defects:#?}");
    for (part, defect) in expected.iter().zip(&defects) {
        assert!(defect.contains(part), "{part} is not in {defect}");
    }
    let nvlinks = graph
        .links
        .iter()
        .filter(|link| link.class == LinkKind::NvLink);
    assert_eq!(nvlinks.count(), 0);
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

/// Returns the prediction of two switches of four GPUs each, whose links to the socket have these attributes.
fn two_switches(link: [&str; 2]) -> (Vec<String>, AllReducePrediction) {
    let switch = |at: u32| {
        let gpus = (0..4).map(|gpu| 4 * at + gpu);
        let gpus: String = gpus
            .map(|dev| gpu(0x10 + dev, &format!("dev=\"{dev}\""), ""))
            .collect();
        let attributes = link[at as usize];
        format!(
            "<pci busid=\"0000:{:02x}:00.0\" class=\"0x060400\" {attributes}>{gpus}</pci>",
            0x80 + at
        )
    };
    let graph = MachineGraph::new(&read_xml(&file(&(switch(0) + &switch(1)))).unwrap());
    let defects = graph.defects.iter().map(ToString::to_string).collect();
    (
        defects,
        predict(&graph, &Paths::new(&graph, &PeerAccess::Rule)),
    )
}

#[test]
fn links_of_unknown_speed_make_no_groups_and_slow_nothing_down() {
    let own = LinkTime::new(14, 8, 24_000);
    let known = "link_speed=\"16 GT/s\" link_width=\"16\"";
    let (defects, both) = two_switches([known; 2]);
    assert!(defects.is_empty(), "{defects:?}");
    assert_eq!(both.groups, [[0, 1, 2, 3], [4, 5, 6, 7]]);
    assert!(both.direct > own);
    for (text, defect) in [
        ("link_speed=\"\" link_width=\"\"", "no usable speed"),
        ("link_speed=\"8 GT/s\" link_width=\"0\"", "no usable speed"),
        (
            "link_speed=\"2.5 GT/s\" link_width=\"1\"",
            "claims 2.5 GT/s PCIe x1",
        ),
        (
            "link_speed=\"16 GT/s\" link_width=\"1\"",
            "claims 16.0 GT/s PCIe x1",
        ),
        (
            "link_speed=\"64 GT/s\" link_width=\"1\"",
            "claims 64.0 GT/s PCIe x1",
        ),
    ] {
        let (defects, unknown) = two_switches([text; 2]);
        assert!(
            defects.len() == 2 && defects.iter().all(|d| d.contains(defect)),
            "{defects:?}"
        );
        assert_eq!(unknown.partitions, [], "{text}");
        assert_eq!(unknown.groups.len(), 1, "{text}");
        let times = [
            unknown.direct,
            unknown.ring_by_rank,
            unknown.best(),
            unknown.bound,
        ];
        assert_eq!(times, [own; 4], "{text}");
        // The other switch is still a group.
        let (_, one) = two_switches([known, text]);
        assert_eq!(one.groups[0], [0, 1, 2, 3], "{text}");
    }
}

/// GPUs 0 and 1 have NVLinks; all PCIe links are of unknown speed.
#[test]
fn bounds_count_links_of_unknown_speed_that_paths_cross() {
    let link =
        |target: &str| format!("<nvlink target=\"{target}\" count=\"2\" tclass=\"0x030200\"/>");
    let unknown = |bus: u32, content: &str| {
        format!(
            "<pci busid=\"0000:{bus:02x}:00.0\" class=\"0x030200\"><gpu dev=\"{bus}\" sm=\"70\">{content}</gpu></pci>"
        )
    };
    let gpus = [
        unknown(1, &link("0000:02:00.0")),
        unknown(2, &link("0000:01:00.0")),
        unknown(3, ""),
    ];
    let graph = MachineGraph::new(&read_xml(&file(&gpus.concat())).unwrap());
    let prediction = predict(&graph, &Paths::new(&graph, &PeerAccess::Rule));
    // GPU 3 sends and receives S, at the 12 GB/s that are assumed.
    assert_eq!(prediction.bound, LinkTime::new(1, 1, 12_000));
    assert!(prediction.bound <= prediction.best());
}
