//! Tests NCCL's profiler and tuner plug-ins with plug-ins of our own, on host memory.

use super::programs::compile;
use super::{out, root};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

/// Returns the program `name`, which is compiled once: tests run at once, and a running program cannot be written.
fn program(name: &str) -> &'static Path {
    static CALLS: OnceLock<PathBuf> = OnceLock::new();
    static DIFFER: OnceLock<PathBuf> = OnceLock::new();
    match name {
        "plugins" => CALLS.get_or_init(|| compile("plugins")),
        _ => DIFFER.get_or_init(|| compile("plugins_differ")),
    }
}

/// Compiles the plug-in with these macros under a file name in a folder of the test, and returns its path.
fn plugin(folder: &Path, file: &str, macros: &[&str]) -> PathBuf {
    fs::create_dir_all(folder).unwrap();
    let library = folder.join(file);
    let compiled = Command::new("gcc")
        .args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-Wno-unused"])
        .args(["-O1", "-shared", "-fPIC", "-pthread"])
        .args(macros)
        .arg(root().join("nccl/tests/plugins/recorder.c"))
        .arg("-o")
        .arg(&library)
        .output()
        .expect("gcc");
    let errors = String::from_utf8_lossy(&compiled.stderr);
    assert!(compiled.status.success(), "{errors}");
    library
}

/// A run of a program, with the lines of its plug-ins and of its log.
struct Observed {
    output: Output,
    lines: Vec<String>,
    log: String,
}

impl Observed {
    fn run(folder: &Path, name: &str, argument: &str, variables: &[(&str, &str)]) -> Observed {
        let files = ["events", "log"].map(|file| folder.join(file));
        for file in &files {
            let _ = fs::remove_file(file);
        }
        let mut command = Command::new("timeout");
        command.arg("100").arg(program(name)).arg(argument);
        for (name, _) in std::env::vars() {
            if name.starts_with("CINCH_") || name.starts_with("NCCL_") {
                command.env_remove(name);
            }
        }
        let output = command
            .env("CINCH_DEVICE", "host")
            .env("NCCL_DEBUG", "INFO")
            .env("NCCL_DEBUG_SUBSYS", "INIT,TUNING")
            .env("NCCL_DEBUG_FILE", &files[1])
            .env("PLUGIN_TEST_FILE", &files[0])
            .envs(variables.iter().copied())
            .output()
            .unwrap();
        let [events, log] = files.map(|file| fs::read_to_string(file).unwrap_or_default());
        Observed {
            output,
            lines: events.lines().map(String::from).collect(),
            log,
        }
    }

    /// Checks that the program succeeded.
    fn expect_success(self) -> Observed {
        let said = String::from_utf8_lossy(&self.output.stdout);
        let errors = String::from_utf8_lossy(&self.output.stderr);
        assert!(
            self.output.status.success() && said.ends_with("ok\n") && errors.is_empty(),
            "{}\n{said}{errors}\n{}",
            self.output.status,
            self.log
        );
        self
    }

    /// Returns the lines that contain a text.
    fn with(&self, part: &str) -> Vec<&str> {
        let lines = self.lines.iter().map(String::as_str);
        lines.filter(|line| line.contains(part)).collect()
    }

    /// Returns the number of log lines that contain a text.
    fn logged(&self, part: &str) -> usize {
        self.log.lines().filter(|line| line.contains(part)).count()
    }

    fn place(&self, line: &str) -> usize {
        let place = self.lines.iter().position(|one| one == line);
        place.unwrap_or_else(|| panic!("no \"{line}\" in\n{}", self.lines.join("\n")))
    }
}

/// Returns the number behind `name=` in a line, or the word before the first space.
fn number(line: &str, name: &str) -> u32 {
    let value = match name {
        "" => line,
        _ => line.split_once(&format!(" {name}=")).unwrap().1,
    };
    value.split(' ').next().unwrap().parse().unwrap()
}

fn folder(name: &str) -> PathBuf {
    out().join(format!("plugins-{name}"))
}

#[test]
fn profiler_gets_events_of_calls_in_order() {
    let folder = folder("profiler");
    let library = plugin(&folder, "profiler.so", &[]);
    let path = library.to_str().unwrap();
    let ran = Observed::run(&folder, "plugins", "any", &[("NCCL_PROFILER_PLUGIN", path)]);
    let ran = ran.expect_success();
    let inits = ran.with("init id=1 name=- nodes=1 ranks=4 ");
    assert_eq!(inits.len(), 4, "{:?}", ran.lines);
    assert_eq!(ran.with("ranks=1 rank=0").len(), 1);
    assert_eq!(ran.with("finalize").len(), 5);
    assert_eq!(ran.with("tuner").len(), 0);
    for line in ran.lines.iter().filter(|line| line.contains(" start ")) {
        let stop = format!("{} stop", number(line, ""));
        assert!(ran.place(line) < ran.place(&stop), "{line}");
        assert_eq!(
            ran.with(&stop).iter().filter(|one| **one == stop).count(),
            1
        );
    }
    // Three groups of sums, a group of messages, two single calls and the group that did not run.
    let groups = ran.with("start group_api");
    assert_eq!(groups.len(), 7, "{groups:?}");
    let first = number(groups[0], "");
    let [started, ended] = [23, 24].map(|state| ran.place(&format!("{first} state {state} 0")));
    let stopped = ran.place(&format!("{first} stop"));
    let apis = ran.with("start coll_api of=");
    let apis = apis.iter().filter(|line| number(line, "parent") == first);
    let apis: Vec<u32> = apis.map(|line| number(line, "")).collect();
    assert_eq!(apis.len(), 4, "{:?}", ran.lines);
    let calls = ran.with("start coll of=");
    for (rank, api) in apis.into_iter().enumerate() {
        let call = calls.iter().find(|line| number(line, "parent") == api);
        let call = call.unwrap();
        assert!(
            call.contains(&format!(
                " rank={rank} number=0 func=AllReduce buffers=1 count=4096 "
            )) && call.contains(" type=ncclFloat32 root=0 channels=")
                && call.ends_with(" protocol=SIMPLE"),
            "{call}"
        );
        let (group, of) = (number(call, "group"), number(call, "of"));
        let group = ran.place(&format!("{group} start group of={of} parent=0"));
        let at = ran.place(call);
        assert!(started < ended && ended < group, "{call}");
        assert!(group < at && at < stopped, "{call}");
    }
    assert_eq!(calls.len(), 3 * 4 + 2);
    let named = |name: &str| calls.iter().filter(|line| line.contains(name)).count();
    assert!(named("algorithm=TREE") >= 4 && named("algorithm=RING") >= 4);
    assert_eq!(named("number=2 func=AllReduce"), 4);
    assert_eq!(named("number=1 func=Broadcast"), 1);
    for (func, rank, peer) in [("Send", 2, 3), ("Recv", 3, 2)] {
        let api = ran.with(&format!("func={func} count=10 type=ncclInt32 captured=0"));
        let message =
            format!("rank={rank} func={func} buffer=1 count=10 type=ncclInt32 peer={peer}");
        let message = ran.with(&message);
        assert_eq!([api.len(), message.len()], [1, 1], "{func}");
        assert_eq!(number(message[0], "parent"), number(api[0], ""));
    }
    // The group that failed has events of its calls, and none of a run.
    assert_eq!(ran.with("func=AllGather").len(), 1);
    assert_eq!(ran.logged("profiler plug-in \"recorder\", version 6"), 1);
    for rank in 0..4 {
        let text = format!(
            "from the plug-in: {rank} text c -5 1.5 2.5 3.5 4.5 5.5 6.5 7.5 8.5 9.5 10.5 42 end \
             1099511627776"
        );
        assert!(ran.logged(&text) >= 1, "{}", ran.log);
    }
}

#[test]
fn activation_mask_selects_events() {
    let folder = folder("mask");
    let library = plugin(&folder, "libnccl-profiler-recorder.so", &["-DVERSION=5"]);
    let variables = |mask| {
        [
            ("CINCH_NCCL_PROFILER_PLUGIN", "recorder"),
            (
                "LD_LIBRARY_PATH",
                library.parent().unwrap().to_str().unwrap(),
            ),
            ("PLUGIN_TEST_MASK", mask),
        ]
    };
    let ran = Observed::run(&folder, "plugins", "any", &variables("0")).expect_success();
    assert_eq!(ran.with("start").len(), 0);
    assert_eq!(ran.with("finalize").len(), 5);
    assert_eq!(ran.logged("profiler plug-in \"recorder\", version 5"), 1);
    // Bit 10 is that of messages' API events, whose parents are group API events.
    let ran = Observed::run(&folder, "plugins", "any", &variables("1024")).expect_success();
    assert_eq!(ran.with("start p2p_api").len(), 2);
    let others = ran.with(" start ").len() - 2 - ran.with("start group_api").len();
    assert_eq!(others, 0, "{:?}", ran.lines);
}

#[test]
fn tuner_selects_the_algorithm_of_sums() {
    let folder = folder("tuner");
    plugin(&folder, "libnccl-tuner.so", &[]);
    for (prefer, version) in [("tree", 6), ("ring", 5)] {
        plugin(
            &folder,
            "libnccl-tuner.so",
            &[&format!("-DVERSION={version}")],
        );
        let variables = [
            // No setting names the plug-in, so its name is the default one.
            ("LD_LIBRARY_PATH", folder.to_str().unwrap()),
            ("PLUGIN_TEST_PREFER", prefer),
            (
                "PLUGIN_TEST_CHANNELS",
                if prefer == "tree" { "3" } else { "-3" },
            ),
        ];
        let ran = Observed::run(&folder, "plugins", prefer, &variables).expect_success();
        assert_eq!(ran.with("init id=1 ranks=4 nodes=1 domains=1,4,4").len(), 4);
        assert_eq!(ran.with("finalize").len(), 5);
        // Calls that name their algorithm, and calls of one rank, are not tuned.
        let infos = ran.with("info func=");
        let sums =
            "info func=4 bytes=16384 operations=1 registered=0 channels=0 entries=2 tree=1 ring=1";
        assert_eq!(infos.iter().filter(|line| line.ends_with(sums)).count(), 4);
        let gathers = infos
            .iter()
            .filter(|line| line.contains("func=2 bytes=160 "));
        assert_eq!(gathers.count(), 1, "{infos:?}");
        assert_eq!(infos.len(), 5);
        let version = format!("tuner plug-in \"recorder\", version {version}");
        assert_eq!(ran.logged(&version), 1);
        assert!(ran.logged("it sets constants of NCCL's cost model") >= 1);
        let wrong = ran.logged("it sets -3 channels, so cinch keeps the number of its settings");
        assert_eq!(wrong > 0, prefer == "ring", "{}", ran.log);
    }
    for (prefer, logged) in [
        ("nvls", "cinch has no NVLS/SIMPLE for all_reduce"),
        (
            "none",
            "CINCH WARN tuner plug-in \"recorder\": it disables all algorithms and protocols of all_",
        ),
        ("error", "getCollInfo returned 2"),
    ] {
        let variables = [
            ("NCCL_TUNER_PLUGIN", folder.join("libnccl-tuner.so")),
            ("PLUGIN_TEST_PREFER", prefer.into()),
        ];
        let variables = variables
            .each_ref()
            .map(|(name, value)| (*name, value.to_str().unwrap()));
        let ran = Observed::run(&folder, "plugins", "any", &variables).expect_success();
        assert!(ran.logged(logged) >= 1, "{}", ran.log);
    }
}

/// Trees over TCP cut the sums into two passes, which have a channel each unless the tuner bounds their number.
#[test]
fn tuner_selects_protocol_and_bounds_channels_of_sums() {
    let folder = folder("channels");
    let library = plugin(&folder, "both.so", &[]);
    let path = library.to_str().unwrap();
    let ran = |channels, protocol| {
        let variables = [
            ("NCCL_TUNER_PLUGIN", path),
            ("NCCL_PROFILER_PLUGIN", path),
            ("CINCH_TRANSPORT", "tcp"),
            ("CINCH_SLOT_BYTES", "4096"),
            ("PLUGIN_TEST_PREFER", "tree"),
            ("PLUGIN_TEST_PROTOCOL", protocol),
            ("PLUGIN_TEST_CHANNELS", channels),
        ];
        Observed::run(&folder, "plugins", "any", &variables).expect_success()
    };
    let plans = |ran: &Observed, number: u32, plan: &str| {
        let calls = ran.with(&format!("number={number} func=AllReduce"));
        calls.iter().filter(|line| line.ends_with(plan)).count()
    };
    for (set, channels) in [("0", 2), ("1", 1), ("2", 2), ("200", 2), ("4000", 2)] {
        let ran = ran(set, "simple");
        assert_eq!(ran.with("takes func=4").len(), 4, "{:?}", ran.lines);
        let plan = format!("channels={channels} algorithm=TREE protocol=SIMPLE");
        assert_eq!(plans(&ran, 0, &plan), 4, "{plan}: {:?}", ran.lines);
        // The second sum names its algorithm, so it is not tuned.
        let plan = "channels=2 algorithm=TREE protocol=SIMPLE";
        assert_eq!(plans(&ran, 1, plan), 4, "{:?}", ran.lines);
    }
    // Host memory has the protocol simple alone, so the table lacks the entry.
    let ran = ran("1", "ll128");
    assert_eq!(ran.with("takes").len(), 0, "{:?}", ran.lines);
    let calls = ran.with(" number=0 func=AllReduce");
    let bounded = |line: &&&str| line.contains("channels=1 ") && line.ends_with("protocol=SIMPLE");
    assert_eq!(calls.iter().filter(bounded).count(), 4, "{calls:?}");
}

#[test]
fn tuners_that_disagree_fail_the_call_on_all_ranks() {
    let folder = folder("differ");
    let library = plugin(&folder, "tuner.so", &[]);
    let variables = [
        ("NCCL_TUNER_PLUGIN", library.to_str().unwrap()),
        ("NCCL_DEBUG", "NONE"),
    ];
    for (variable, parts) in [
        ("PLUGIN_TEST_PREFER", ["algorithm tree", "algorithm ring"]),
        (
            "PLUGIN_TEST_CHANNELS",
            ["channels at most 2", "channels at most 1"],
        ),
    ] {
        let ran = Observed::run(&folder, "plugins_differ", variable, &variables);
        expect_difference(&ran.expect_success(), parts);
    }
}

/// Checks that the errors of three ranks, of which rank 1 differs, have these parts.
fn expect_difference(ran: &Observed, parts: [&str; 2]) {
    let said = String::from_utf8_lossy(&ran.output.stdout);
    let lines: Vec<&str> = said
        .lines()
        .filter(|line| line.starts_with("rank "))
        .collect();
    assert_eq!(lines.len(), 3, "{said}");
    for line in lines {
        let both = parts.map(|part| line.contains(part));
        assert_eq!(both, [true, true], "{said}");
        // Rank 1 is the one that differs, and the sentence names it and another rank.
        assert!(
            line.contains("rank 1") && (line.matches("rank ").count() >= 2),
            "{said}"
        );
    }
}

#[test]
fn plugin_that_cannot_be_used_is_one_warning() {
    let folder = folder("refused");
    let refused = [
        (
            "old.so",
            "-DVERSION=4",
            ["only ncclProfiler_v4", "only ncclTunerPlugin_v4"],
        ),
        ("none.so", "-DVERSION=9", ["has neither"; 2]),
        (
            "init.so",
            "-DINIT_FAILS",
            ["the init of \"recorder\" returned 2"; 2],
        ),
        (
            "functions.so",
            "-DNO_FUNCTIONS",
            ["no function stopEvent", "no function getCollInfo"],
        ),
        (
            "absent.so",
            "",
            ["absent.so: cannot open shared object file"; 2],
        ),
    ];
    for (file, flag, reasons) in refused {
        let library = match flag {
            "" => folder.join(file),
            flag => plugin(&folder, file, &[flag]),
        };
        let path = library.to_str().unwrap();
        let variables = [("NCCL_PROFILER_PLUGIN", path), ("NCCL_TUNER_PLUGIN", path)];
        let ran = Observed::run(&folder, "plugins", "any", &variables).expect_success();
        for (kind, reason) in ["profiler", "tuner"].into_iter().zip(reasons) {
            let warning = format!(" CINCH WARN no {kind} plug-in:");
            let lines: Vec<&str> = ran
                .log
                .lines()
                .filter(|line| line.contains(&warning))
                .collect();
            assert_eq!(lines.len(), 1, "{file}: {}", ran.log);
            assert!(lines[0].contains(reason), "{}", lines[0]);
        }
        assert_eq!(ran.lines, [""; 0], "{file}");
    }
    let none = [
        ("NCCL_PROFILER_PLUGIN", "none"),
        ("NCCL_TUNER_PLUGIN", "NONE"),
    ];
    let ran = Observed::run(&folder, "plugins", "any", &none).expect_success();
    assert_eq!(ran.logged("plug-in"), 0, "{}", ran.log);
}
