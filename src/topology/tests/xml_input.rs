//! Files that are refused, and defects that are only reported.

use crate::error::ErrorKind;
use crate::topology::{
    AllReducePrediction, BandwidthOrigin, LinkKind, LinkTime, MachineGraph, Paths, PeerAccess,
    predict, read_xml, write_xml, xml_file_text,
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
    refused("", &["line 1", "no XML", "write the file again"]);
    refused(
        "<system version=\"1\">\n<cpu></system>",
        &["line 2", "no XML", "correct the line"],
    );
    refused(
        "<graphs version=\"1\"/>",
        &["line 1", "<graphs>", "<system>", "NCCL_TOPO_DUMP_FILE"],
    );
    refused("<!-- -->\n<system/>", &["line 2", "no version", "valid: 1"]);
    refused(
        "<system version=\"3\"/>",
        &["line 1", "version 3", "valid: 1 (NCCL), 2 (RCCL)"],
    );
    refused(
        "<system version=\"one\"/>",
        &["version=\"one\"", "whole number"],
    );
    refused(
        "<?xml version=\"1.0\"?>\n<!DOCTYPE system [<!ENTITY a \"b\">]>\n<system version=\"1\"/>",
        &["line 2", "DOCTYPE", "remove"],
    );
    refused(&file(""), &["line 1", "no <gpu>", "put one"]);
    refused(
        &file(&gpu(1, "rank=\"0\"", "")),
        &["line 3", "no dev", "from 0"],
    );
    refused(
        &file("<pci class=\"0x060400\"/>"),
        &["line 3", "no busid", "add"],
    );
    refused(
        &file("<pci busid=\"here\"/>"),
        &["line 3", "busid=\"here\"", "0000:c1:00.0", "correct it"],
    );
    for attributes in [
        "dev=\"-1\"",
        "dev=\"99999999999\"",
        "dev=\"0x1\"",
        "dev=\"0.0\"",
        "dev=\"0\" sm=\"Volta\"",
    ] {
        let range = "is not a whole number from 0 to 4294967295, in digits; correct it";
        refused(&file(&gpu(1, attributes, "")), &["line 3", range]);
    }
    let nic = format!("{one}<nic><net name=\"a\" speed=\"10000.0\"/></nic>");
    refused(
        &file(&nic),
        &["line 3", "<net speed=\"10000.0\"> is not a whole number"],
    );
    let twice = |second: String| file(&format!("{one}\n{second}"));
    refused(
        &twice(gpu(1, "dev=\"1\"", "")),
        &["line 4", "0000:01:00.0", "remove one"],
    );
    refused(
        &twice(gpu(2, "dev=\"0\"", "")),
        &["line 4", "dev 0", "from 0"],
    );
    let ranks = [
        gpu(1, "dev=\"0\" rank=\"5\"", ""),
        gpu(2, "dev=\"1\" rank=\"5\"", ""),
    ]
    .join("\n");
    refused(&file(&ranks), &["line 4", "rank 5", "or none"]);
    let hosts =
        "<system version=\"1\">\n<cpu host_hash=\"0x1\"/>\n<cpu host_hash=\"0x2\"/></system>";
    refused(hosts, &["line 3", "several hosts", "file of its own"]);
    refused(
        &format!("{}<!--{}-->", file(&one), "x".repeat(8 << 20)),
        &["line 5", "8388608 bytes", "one host"],
    );
    let many = "<pci busid=\"0:0:0.0\"/>\n".repeat(4097);
    refused(&file(&many), &["line 4097", "4096 elements", "leave out"]);
    let deep = format!(
        "{}{}",
        "<pci busid=\"0:0:0.0\">\n".repeat(100),
        "</pci>".repeat(100)
    );
    refused(&file(&deep), &["line 65", "64 levels", "leave out"]);
    let deepest = format!(
        "{}{}",
        "<pci busid=\"0:0:0.0\">".repeat(300_000),
        "</pci>".repeat(300_000)
    );
    refused(&file(&deepest), &["64 levels"]);
}

/// If two GPUs have one `dev`, the second in the file is named, also if it is nearer to the socket.
#[test]
fn gpus_where_none_is_read_are_refused_with_the_line() {
    let one = gpu(1, "dev=\"0\"", "");
    let stray = "\n<gpu dev=\"1\"/>";
    refused(&file(stray), &["line 4", "outside of any <pci>", "busid"]);
    let inside =
        |element: &str| format!("{one}<{element} busid=\"0000:02:00.0\">{stray}</{element}>");
    let in_gpu = gpu(1, "dev=\"0\"", stray);
    let files = [
        file(&inside("nic")),
        file(&inside("cpu")),
        file(&inside("other")),
        file(&in_gpu),
        file(&format!(
            "{one}<cpu><pci busid=\"0000:02:00.0\">{stray}</pci></cpu>"
        )),
    ];
    for text in files {
        refused(&text, &["line 4", "not read", "below a <cpu> of <system>"]);
    }
    let in_system = |content: &str| file(&one).replace("</cpu>", &format!("</cpu>{content}"));
    refused(&in_system(stray), &["line 5", "not read"]);
    refused(&in_system(&inside("pci")), &["line 4", "not read"]);
    // GPUs of a channel are no devices.
    let graphs = "<graphs version=\"1\"><graph id=\"0\"><channel><gpu dev=\"0\"/></channel></graph></graphs>";
    assert!(read_xml(&in_system(graphs)).is_ok());
    let behind = gpu(1, "dev=\"0\"", "");
    let bridge = format!("<pci busid=\"0000:02:00.0\">{behind}\n<gpu dev=\"0\"/></pci>");
    refused(&file(&bridge), &["line 4", "dev 0"]);
}

#[test]
fn control_characters_reach_no_terminal() {
    // XML itself refuses the others.
    let hostile = "&#155;2J&#127;&#10;&#9;";
    let nic = format!("<nic><net name=\"mlx{hostile}5\"/></nic>");
    let text = file(&(gpu(1, "dev=\"0\"", "") + &nic));
    let text = text.replace(
        "arch=\"x86_64\"",
        &format!("arch=\"a{hostile}b\" vendor=\"{hostile}\""),
    );
    let machine = read_xml(&text).unwrap();
    let socket = &machine.sockets[0];
    let name = MachineGraph::new(&machine)
        .nodes
        .last()
        .unwrap()
        .name
        .clone();
    for text in [
        &name,
        &socket.nics[0].name,
        &socket.arch,
        &socket.vendor,
        &socket.affinity,
    ] {
        assert!(!text.contains(char::is_control), "{text:?}");
    }
    assert!(name == "mlx\u{fffd}2J\u{fffd}\u{fffd}\u{fffd}5", "{name:?}");
    assert_eq!(read_xml(&write_xml(&machine)).as_ref(), Ok(&machine));
    for attributes in ["dev", "dev=\"0\" gcn"] {
        let text = file(&gpu(1, &format!("{attributes}=\"{hostile}\""), ""));
        let error = read_xml(&text).unwrap_err();
        assert!(!error.message().contains(char::is_control), "{error:?}");
    }
}

#[test]
fn files_that_are_too_long_or_no_text_are_refused_with_the_line() {
    let path = std::env::temp_dir().join(format!("cinch-long-{}.xml", std::process::id()));
    let of = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        xml_file_text(&path).map_err(|error| error.message().to_string())
    };
    let text = file(&gpu(1, "dev=\"0\"", ""));
    assert_eq!(of(text.as_bytes()), Ok(text));
    let long = "\n".repeat(9 << 20);
    let error = of(long.as_bytes()).unwrap_err();
    assert!(
        error.starts_with("line 8388609: ") && error.contains("8388608 bytes"),
        "{error}"
    );
    let error = of(b"<system>\n\xff").unwrap_err();
    assert!(error.starts_with("line 2: no UTF-8"), "{error}");
    std::fs::remove_file(&path).unwrap();
    assert!(xml_file_text(&path).is_err());
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
            error.message().contains("hexadecimal number of at most"),
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

/// The link of GPU 0 to the socket is half as fast as that of GPU 1, which is behind it.
#[test]
fn data_between_gpus_of_which_one_is_behind_the_other_takes_one_link() {
    let inner = gpu(2, "dev=\"1\"", "");
    let outer = format!("<gpu dev=\"0\"/>{inner}");
    let text = gpu(1, "dev=\"0\"", "").replace("<gpu dev=\"0\"></gpu>", &outer);
    let text = text.replacen("link_width=\"16\"", "link_width=\"8\"", 1);
    let graph = MachineGraph::new(&read_xml(&file(&text)).unwrap());
    let prediction = predict(&graph, &Paths::new(&graph, &PeerAccess::Rule));
    assert_eq!(prediction.best(), LinkTime::new(1, 1, 24_000));
    assert!(prediction.bound <= prediction.best());
}
