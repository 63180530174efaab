//! Tests the command line tool from outside: exit codes, error messages, and no process left
//! behind.

use crate::support::launcher::{self, Deadline, alive, end, signal, wait_until};
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

fn cinch(line: &[&str]) -> Command {
    let mut command = launcher::cinch();
    command.args(line).current_dir(env!("CARGO_MANIFEST_DIR"));
    command
}

fn output(line: &[&str]) -> (i32, String, String) {
    let Output {
        status,
        stdout,
        stderr,
    } = launcher::output(&mut cinch(line));
    (
        status.code().unwrap_or(-1),
        String::from_utf8(stdout).unwrap(),
        String::from_utf8(stderr).unwrap(),
    )
}

/// Script of a rank that starts a child and waits for it, like a script that starts a program.
const WITH_CHILD: &str = "echo $$; sleep 600 & wait";

/// Starts ranks that print their pid and sleep. Returns the launcher and the ranks' pids.
fn sleepers(ranks: usize, script: &str) -> (Child, Vec<i32>) {
    let count = ranks.to_string();
    let mut launcher = cinch(&["run", "-n", &count, "--", "sh", "-c", script])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let _deadline = Deadline::of(&launcher);
    let out = BufReader::new(launcher.stdout.take().unwrap());
    let pids: Vec<i32> = out
        .lines()
        .take(ranks)
        .map(|line| line.unwrap().trim().parse().unwrap())
        .collect();
    assert_eq!(pids.len(), ranks, "{pids:?}");
    (launcher, pids)
}

fn words(line: &str) -> Vec<&str> {
    line.split(' ').collect()
}

#[test]
fn bad_options_give_an_error_sentence_and_exit_code_2() {
    for (line, word) in [
        ("bench all_reduze", "reduce_scatter"),
        ("bench all_reduce -b 1X", "byte"),
        ("bench all_reduce -d f31 --ranks 2", "bf16"),
        ("bench all_reduce --codec int8", "linear8"),
        ("bench all_reduce --ranks 0", "1..=4096"),
        ("bench reduce -r 7 --ranks 2", "-r 7"),
        (
            "bench all_gather -o max --ranks 2",
            "all_gather reduces nothing, so -o max",
        ),
        ("bench all_reduce -b 2 -e 1 --ranks 2", "-b 2"),
        ("bench all_reduce --ranks 2 --data /no.npy", "/no.npy"),
        ("bench all_reduce --ranks 2 --json /no/x", "/no/x"),
        ("bench all_reduce --ranks 2 --compare Cargo.toml", "--json"),
        ("bench all_reduce --ranks 64 -b 1000G", "MiB"),
        ("bench all_reduce --graph", "--device gpu"),
        ("bench all_reduce --device gpu --ranks 2", "--gpus"),
        ("bench all_reduce --device gpu --vs /no.so", "/no.so"),
        (
            "bench all_reduce --device gpu --transport tcp",
            "--transport",
        ),
        ("run -n 2", "PROGRAM"),
        ("codecs --table --samples 3", "1000"),
        ("bench all_reduce -r 7 --ranks 2", "no root"),
        ("bench all_reduce --json x --csv x --ranks 2", "each writes"),
        ("predict --latency-us 5", "--latency-us"),
        ("predict --measure --json x", "--json"),
        ("nothing", "subcommand"),
    ] {
        let (code, out, err) = output(&words(line));
        assert_eq!(code, 2, "{line}: {err}");
        assert!(err.contains(word), "{line}: {err}");
        assert!(out.is_empty() && !err.contains("panicked"), "{line}: {out}");
    }
}

/// An option without effect must be refused, not ignored.
#[test]
fn options_without_effect_are_refused() {
    for (line, word) in [
        ("run --preload --transport tcp -- true", "--ranks"),
        ("run --preload --label -- true", "--ranks"),
        ("run --preload --bind -- true", "--ranks"),
        ("run --preload --grace 1 -- true", "--ranks"),
        ("run --preload --env HOME -- true", "--hosts"),
        ("run -n 1 --env HOME -- true", "--hosts"),
        ("run -n 1 --ssh rsh -- true", "--hosts"),
        ("run -n 1 --remote-cinch /bin/cinch -- true", "--hosts"),
        ("info --preload --probe", "--probe"),
        ("topo --probe --file tests/topology/A.xml", "--file"),
        ("topo --probe --sys /sys", "--sys"),
        ("arrays -b 5000", "multiple of 4K"),
        ("arrays -b 0", "multiple of 4K"),
        ("bench all_reduce --data benches/data --seed 2", "--seed"),
        ("bench --report Cargo.toml --output x --graph", "--graph"),
        (
            "bench --report Cargo.toml --output Cargo.toml",
            "replace its rows",
        ),
    ] {
        let (code, out, err) = output(&words(line));
        assert_eq!(code, 2, "{line:?}: {err}");
        assert!(out.is_empty() && err.contains(word), "{line:?}: {err}");
    }
}

/// Invalid options give exit code 2 and failures while running give 3, wherever they are detected.
#[test]
fn exit_codes_distinguish_bad_options_from_failures() {
    let name = format!("cinch-tool-hosts-{}", std::process::id());
    let hosts = std::env::temp_dir().join(name);
    std::fs::write(&hosts, "localhost slots=1\n").unwrap();
    let file = hosts.to_str().unwrap();
    let rows = "benches/baselines/gpu-h200x4-128-blocks.jsonl";
    let unset = "CINCH_TEST_NO_SUCH_NAME";
    for (line, word, expected) in [
        ("run -n 4096 --bind true".to_string(), "--bind", 2),
        ("run --hosts /no/such/file true".into(), "/no/such/file", 2),
        (format!("run --hosts {file} --env {unset} true"), unset, 2),
        ("run -n 1 /no/such/program".into(), "/no/such/program", 3),
        (
            "bench --report /no/rows --output /dev/null".into(),
            "/no/rows",
            2,
        ),
        (
            format!("bench --report {rows} --output /dev/full"),
            "/dev/full",
            3,
        ),
        ("bench --suite --output Cargo.toml".into(), "Cargo.toml", 2),
        (
            "bench --suite --output Cargo.toml --ranks 2".into(),
            "Cargo.toml",
            2,
        ),
    ] {
        let (code, _, err) = output(&words(&line));
        assert_eq!(code, expected, "{line}: {err}");
        assert!(err.contains(word), "{line}: {err}");
    }
    std::fs::remove_file(hosts).unwrap();
}

/// A full disk is a failure; a reader that closes the pipe early is not.
#[test]
fn results_that_cannot_be_written_are_a_failure() {
    let line = words("bench all_reduce --ranks 2 -b 1K -e 1K -n 1 -w 0");
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full");
    let lost = cinch(&line).stdout(full.unwrap()).output().unwrap();
    let err = String::from_utf8(lost.stderr).unwrap();
    assert_eq!(lost.status.code(), Some(3), "{err}");
    assert!(err.contains("standard output"), "{err}");
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let left = cinch(&line).stdout(writer).output().unwrap();
    assert_eq!(left.status.code(), Some(0), "{left:?}");
}

/// A run that cannot measure anything must not change the file of earlier rows.
#[test]
fn run_without_a_gpu_keeps_earlier_rows_of_the_file() {
    let name = format!("cinch-tool-arrays-{}", std::process::id());
    let rows = std::env::temp_dir().join(name);
    std::fs::write(&rows, "earlier\n").unwrap();
    let file = rows.to_str().unwrap();
    let (code, out, err) = output(&["arrays", "--gpu", "4096", "--json", file]);
    let kept = std::fs::read_to_string(&rows).unwrap();
    std::fs::remove_file(&rows).unwrap();
    assert_eq!((code, out.as_str()), (3, ""), "{err}");
    assert_eq!(kept, "earlier\n", "{err}");
}

#[test]
fn world_size_without_rank_is_refused() {
    let alone = cinch(&["info"]).env("WORLD_SIZE", "2").output().unwrap();
    assert_eq!(alone.status.code(), Some(3));
    let err = String::from_utf8(alone.stderr).unwrap();
    assert!(err.contains("WORLD_SIZE is set and RANK is not"), "{err}");
}

#[test]
fn unknown_setting_is_reported_by_the_tool_and_in_the_log() {
    let line = words("bench all_reduce --ranks 3 -b 1K -e 1K -n 1");
    let ran = cinch(&line).env("CINCH_FOO", "1").output().unwrap();
    let err = String::from_utf8(ran.stderr).unwrap();
    assert_eq!(err.matches("CINCH_FOO").count(), 2, "{err}");
}

#[test]
fn settings_out_of_range_are_named() {
    let output = cinch(&["info"]).env("CINCH_SLOTS", "3").output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let err = String::from_utf8(output.stderr).unwrap();
    assert!(
        err.contains("CINCH_SLOTS") && err.contains("power of two"),
        "{err}"
    );
}

#[test]
fn info_and_codecs_print_plain_text() {
    let (code, out, err) = output(&["info"]);
    assert_eq!((code, err.as_str()), (0, ""));
    assert!(out.contains("CINCH_TIMEOUT") && out.contains("shm") && !out.contains('\x1b'));
    let (code, out, _) = output(&["codecs"]);
    assert_eq!(code, 0);
    assert!(out.lines().any(|line| line.starts_with("dynamic8")));
}

#[test]
fn reader_that_closes_the_pipe_is_no_failure() {
    let mut child = cinch(&["info"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut one = [0];
    child.stdout.take().unwrap().read_exact(&mut one).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn ranks_get_an_id_and_their_labels() {
    let script = "echo ${#CINCH_LAUNCH_ID} $CINCH_TRANSPORT $0 $1";
    let mut line = vec!["run", "-n", "2", "--label", "--transport", "tcp", "--"];
    line.extend(["sh", "-c", script, "--flag", "-n"]);
    let (code, out, err) = output(&line);
    assert_eq!(code, 0, "{err}");
    let mut lines: Vec<_> = out.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["[0] 256 tcp --flag -n", "[1] 256 tcp --flag -n"]);
}

/// All output that ranks write before they end must be forwarded, however slow its reader is.
#[test]
fn a_slow_reader_gets_all_labelled_lines() {
    let mut launcher = cinch(&["run", "--label", "-n", "1", "--", "seq", "1", "15000"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let _deadline = Deadline::of(&launcher);
    std::thread::sleep(Duration::from_secs(2));
    let lines = BufReader::new(launcher.stdout.take().unwrap()).lines();
    assert_eq!(lines.count(), 15000);
    assert_eq!(end(&mut launcher).code(), Some(0));
}

#[test]
fn launcher_exits_with_the_first_failing_code() {
    let (code, _, err) = output(&["run", "-n", "3", "sh", "-c", "exit $((RANK * 5))"]);
    assert!(code == 5 || code == 10, "{code}");
    assert!(err.contains("exited with code"), "{err}");
    let (code, _, err) = output(&["run", "-n", "1", "/no/such/program"]);
    assert_eq!(code, 3);
    assert!(err.contains("/no/such/program"), "{err}");
}

/// The variables of torch's `env://`: the ranks agree on an address, which nothing else listens on.
#[test]
fn ranks_get_an_address_for_the_store_of_torch() {
    let script = "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT";
    let run = |variables: &[(&str, &str)]| {
        let mut command = cinch(&["run", "-n", "2", "--", "sh", "-c", script]);
        command.env_remove("MASTER_ADDR").env_remove("MASTER_PORT");
        command.envs(variables.iter().copied());
        let out = String::from_utf8(launcher::output(&mut command).stdout).unwrap();
        let mut lines: Vec<String> = out.lines().map(str::to_string).collect();
        lines.sort();
        lines
    };
    let lines = run(&[]);
    let port = lines[0].rsplit(' ').next().unwrap();
    let expected = [0, 1].map(|rank| format!("{rank} 2 {rank} 2 127.0.0.1 {port}"));
    assert_eq!(lines, expected);
    assert!(std::net::TcpListener::bind(("127.0.0.1", port.parse().unwrap())).is_ok());
    let given = run(&[("MASTER_ADDR", "node7"), ("MASTER_PORT", "29500")]);
    let expected = [0, 1].map(|rank| format!("{rank} 2 {rank} 2 node7 29500"));
    assert_eq!(given, expected);
}

#[test]
fn signals_go_to_the_ranks() {
    for (name, code) in [("TERM", 143), ("INT", 130)] {
        let (mut launcher, pids) = sleepers(3, WITH_CHILD);
        signal(launcher.id(), name);
        assert_eq!(end(&mut launcher).code(), Some(code), "{name}");
        assert!(!pids.iter().any(|&pid| alive(pid)), "{name}: {pids:?}");
    }
}

/// Signals that `nohup` and background jobs of scripts ignore must not end the ranks.
#[test]
fn ignored_signals_do_not_end_the_ranks() {
    let script = "trap '' HUP INT QUIT; exec \"$0\" run -n 1 -- sh -c 'echo on; sleep 0.5; exit 5'";
    let mut launcher = Command::new("sh")
        .args(["-c", script])
        .arg(launcher::tool())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let _deadline = Deadline::of(&launcher);
    let mut on = [0; 3];
    launcher
        .stdout
        .as_mut()
        .unwrap()
        .read_exact(&mut on)
        .unwrap();
    for name in ["HUP", "INT", "QUIT"] {
        signal(launcher.id(), name);
    }
    assert_eq!(end(&mut launcher).code(), Some(5));
}

/// A parent that ignores SIGCHLD must not keep the launcher from seeing the ends of its ranks.
/// Ranks must not inherit the ignored signal either.
#[test]
fn launcher_with_sigchld_ignored_sees_the_ends_of_ranks() {
    let rank = "grep -q 'SigIgn.*[02468ace]....$' /proc/self/status || exit 6; exit 5";
    // `trap` in a shell does not change SIGCHLD, so `env` sets it to ignored.
    let mut launcher = Command::new("env")
        .arg("--ignore-signal=CHLD")
        .arg(launcher::tool())
        .args(["run", "-n", "2", "--", "sh", "-c", rank])
        .spawn()
        .unwrap();
    assert_eq!(end(&mut launcher).code(), Some(5));
}

#[test]
fn ranks_die_with_a_killed_launcher() {
    let (mut launcher, pids) = sleepers(2, "echo $$; exec sleep 600");
    assert!(pids.iter().all(|&pid| alive(pid)));
    launcher.kill().unwrap();
    end(&mut launcher);
    wait_until("the ranks' end", || !pids.iter().any(|&pid| alive(pid)));
}

#[test]
fn a_killed_rank_ends_the_others() {
    let (mut launcher, pids) = sleepers(3, WITH_CHILD);
    signal(pids[1] as u32, "KILL");
    assert_eq!(end(&mut launcher).code(), Some(128 + 9));
    assert!(!pids.iter().any(|&pid| alive(pid)), "{pids:?}");
}

#[test]
fn predictions_come_as_tables_and_files() {
    let (code, out, err) = output(&["predict"]);
    assert_eq!((code, err.as_str()), (0, ""));
    assert_eq!(out.matches("does not follow").count(), 8, "{out}");
    let folder = std::env::temp_dir().join(format!("cinch-predict-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = |name: &str| folder.join(name).to_str().unwrap().to_string();
    std::fs::write(path("net.csv"), "name,elements\nfc,4000000\n").unwrap();
    let costs = r#"{"link":{"latency_us":20,"message_us":5,"gb_per_s":1},"add_ns":0.1,"codecs":[
        {"codec":"raw","encode_ns":0.1,"decode_ns":0.1},
        {"codec":"linear8","encode_ns":0.2,"decode_ns":0.1}]}"#;
    std::fs::write(path("costs.json"), costs).unwrap();
    let (net, file) = (path("net.csv"), path("costs.json"));
    let (json, svg) = (path("out.json"), path("out.svg"));
    let mut line = vec!["predict", "--layers", &net, "--costs", &file];
    line.extend(["--ranks", "1,8", "--json", &json, "--svg", &svg]);
    let (code, out, err) = output(&line);
    assert_eq!((code, err.as_str()), (0, ""));
    assert!(
        out.contains("8 ranks: linear8:block=256 is fastest"),
        "{out}"
    );
    let json = std::fs::read_to_string(json).unwrap();
    assert!(json.contains("\"pays\": true"), "{json}");
    assert!(std::fs::read_to_string(svg).unwrap().starts_with("<svg"));
    for (options, said) in [
        (vec!["predict", "--layers", &net], "needs costs"),
        (vec!["predict", "--layers", "/no/such"], "/no/such"),
        (
            vec![
                "predict", "--layers", &net, "--costs", &file, "--ranks", "0",
            ],
            "--ranks 0",
        ),
        (
            vec!["predict", "--layers", &file, "--costs", &file],
            "line 1",
        ),
    ] {
        let (code, _, err) = output(&options);
        assert_eq!(code, 2, "{err}");
        assert!(err.contains(said), "{err}");
    }
    std::fs::remove_dir_all(folder).unwrap();
}

/// Compiles a minimal library that the tool accepts as the drop-in, and returns its path.
fn stand_in(name: &str) -> std::path::PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::create_dir_all(&folder).unwrap();
    let (source, library) = (folder.join("nccl.c"), folder.join("libnccl.so.2"));
    let text = "const char nccl_mark[] = \"CINCH_CODEC_RULES\";\nint ncclGetUniqueId(void) { return 0; }\n";
    std::fs::write(&source, text).unwrap();
    let done = Command::new("cc")
        .args(["-shared", "-fPIC", "-Wl,-soname,libnccl.so.2", "-o"])
        .args([&library, &source])
        .status()
        .unwrap();
    assert!(done.success());
    library.canonicalize().unwrap()
}

#[test]
fn preloading_puts_the_library_in_front_and_proves_it() {
    let library = stand_in("preload");
    let option = format!("--preload={}", library.display());
    let show = "echo $LD_PRELOAD $VLLM_NCCL_SO_PATH $SGLANG_NCCL_SO_PATH $RANK-$WORLD_SIZE";
    let path = library.display();
    // Without `-n` the tool becomes the program, and sets no rank variables.
    let (code, out, _) = output(&["run", &option, "--", "sh", "-c", show]);
    assert_eq!((code, out), (0, format!("{path} {path} {path} -\n")));
    let (code, out, _) = output(&["run", "-n", "1", &option, "--", "sh", "-c", show]);
    assert_eq!((code, out), (0, format!("{path} {path} {path} 0-1\n")));

    let sleep = ["info", &option, "--", "sh", "-c", "sleep 0.5; exit 0"];
    let (code, out, _) = output(&sleep);
    assert_eq!(code, 0, "{out}");
    assert!(out.contains(&format!("cinch {path}")), "{out}");
    assert!(out.contains("0 on another alone, 0 on none"), "{out}");
    let (code, _, _) = output(&["info", &option, "--", "sh", "-c", "sleep 0.2; exit 7"]);
    assert_eq!(code, 7);

    // A process that has not mapped the drop-in must be reported as such.
    let mut other = Command::new("sleep").arg("600").spawn().unwrap();
    let pid = other.id().to_string();
    let (code, out, _) = output(&["info", "--preload", "--pid", &pid]);
    other.kill().unwrap();
    other.wait().unwrap();
    assert_eq!(code, 1, "{out}");
    assert!(out.starts_with("0 processes run on cinch's"), "{out}");

    let (code, out, _) = output(&["info", &option]);
    assert_eq!((code, out.lines().count()), (0, 3), "{out}");
    let (code, _, error) = output(&["run", "--preload=/no/such", "--", "true"]);
    assert_eq!(code, 3);
    assert!(error.contains("/no/such"), "{error}");
    let (code, _, error) = output(&["run", "--", "true"]);
    assert_eq!(code, 2, "{error}");
}
