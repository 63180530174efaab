//! Tests the Dockerfile and the Kubernetes manifest of `packaging/` as far as that works without Docker and a cluster.

use crate::source::root;
use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

const JOB: &str = "packaging/kubernetes/job.yaml";

fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap()
}

/// Returns the value of the first line `key: VALUE`, without quotes.
fn value<'a>(text: &'a str, key: &str) -> &'a str {
    let begins = format!("{key}: ");
    let line = text
        .lines()
        .find_map(|line| line.trim_start_matches([' ', '-']).strip_prefix(&begins));
    line.unwrap_or_else(|| panic!("no {key}")).trim_matches('"')
}

/// Returns the variables of `env:`.
fn variables(manifest: &str) -> BTreeMap<String, String> {
    let lines: Vec<&str> = manifest.lines().map(str::trim).collect();
    let pairs = lines.windows(2).filter_map(|pair| {
        let name = pair[0].strip_prefix("- name: ")?;
        let value = pair[1].strip_prefix("value: ")?;
        Some((name.to_string(), value.trim_matches('"').to_string()))
    });
    pairs.collect()
}

/// Returns the shell script of the container: the block below `- |`.
fn script(manifest: &str) -> String {
    let mut lines = manifest.lines().skip_while(|line| line.trim() != "- |");
    let indent = lines.next().unwrap().find('-').unwrap() + 2;
    let block = lines.take_while(|line| line.len() - line.trim_start().len() >= indent);
    block.map(|line| format!("{}\n", &line[indent..])).collect()
}

#[test]
fn dockerfile_installs_the_package_that_is_built() {
    let text = read("packaging/containers/Dockerfile").replace("\\\n", " ");
    let known = ["ARG", "FROM", "COPY", "RUN", "USER", "WORKDIR", "CMD"];
    let mut instructions = Vec::new();
    for line in text
        .lines()
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
    {
        let (instruction, rest) = line.split_once(' ').unwrap();
        assert!(known.contains(&instruction), "{line}");
        if instruction == "RUN" {
            let parsed = Command::new("sh")
                .args(["-n", "-c", rest])
                .status()
                .unwrap();
            assert!(parsed.success(), "{rest}");
        }
        instructions.push(instruction);
    }
    assert_eq!(instructions[..2], ["ARG", "FROM"]);
    // The name of the package, as scripts/package writes it with the version between.
    let package = read("scripts/package");
    assert!(package.contains("/cinch_${version}_$debian_arch.deb\""));
    assert!(package.contains("debian_arch=amd64"));
    assert!(text.contains("COPY cinch_*_amd64.deb /tmp/"));
    assert!(text.contains(" /tmp/cinch_*_amd64.deb "));
}

#[test]
fn manifest_names_its_own_service_pods_and_ranks() {
    let text = read(JOB);
    assert!(!text.contains('\t'));
    let documents: Vec<&str> = text.split("\n---\n").collect();
    let [service, job] = documents[..] else {
        panic!("{} documents", documents.len());
    };
    assert_eq!(
        (value(service, "kind"), value(job, "kind")),
        ("Service", "Job")
    );
    assert_eq!(value(service, "clusterIP"), "None");
    let (service_name, job_name) = (value(service, "name"), value(job, "name"));
    assert_eq!(value(service, "job-name"), job_name);
    assert_eq!(value(job, "subdomain"), service_name);
    assert_eq!(value(job, "completionMode"), "Indexed");
    // All pods must run at once.
    assert_eq!(value(job, "completions"), value(job, "parallelism"));
    let variables = variables(job);
    assert_eq!(
        variables["MASTER_ADDR"],
        format!("{job_name}-0.{service_name}")
    );
    let number = |text: &str| text.parse::<usize>().unwrap();
    let ranks = number(value(job, "completions")) * number(&variables["LOCAL_WORLD_SIZE"]);
    assert_eq!(number(&variables["WORLD_SIZE"]), ranks);
}

/// Runs the script of each pod with a program in the place of the tool.
#[test]
fn script_of_each_pod_starts_its_ranks_once() {
    let folder = std::env::temp_dir().join(format!("cinch-pods-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let tool = folder.join("cinch");
    let log = folder.join("log");
    let fake = format!(
        "#!/bin/sh\n[ $1 = doctor ] && exit 0\necho \"$RANK $LOCAL_RANK $WORLD_SIZE $(stat -c %a $CINCH_SECRET_FILE)\" >> {}\n\
         [ $RANK != \"$FAILS\" ]\n",
        log.display()
    );
    std::fs::write(&tool, fake).unwrap();
    std::fs::set_permissions(&tool, PermissionsExt::from_mode(0o755)).unwrap();
    let secret = folder.join("mounted");
    std::fs::write(&secret, "0123456789abcdef").unwrap();
    let manifest = read(JOB);
    let script = script(&manifest).replace("/run/cinch/secret", &secret.display().to_string());
    let run = |pod: usize, fails: &str| {
        let mut command = Command::new("sh");
        command.args(["-c", &script]).envs(variables(&manifest));
        command
            .env("CINCH_SECRET_FILE", folder.join(format!("secret-{pod}")))
            .env("JOB_COMPLETION_INDEX", pod.to_string())
            .env("FAILS", fails)
            .env(
                "PATH",
                format!("{}:{}", folder.display(), std::env::var("PATH").unwrap()),
            );
        command.status().unwrap().success()
    };
    assert!(run(0, "none") && run(1, "none"));
    let text = std::fs::read_to_string(&log).unwrap();
    let mut lines: Vec<&str> = text.lines().collect();
    lines.sort_unstable();
    let expected: Vec<String> = (0..8)
        .map(|rank| format!("{rank} {} 8 600", rank % 4))
        .collect();
    assert_eq!(lines, expected);
    // A failed rank fails its pod.
    assert!(!run(1, "6"));
    // Its other ranks may still write.
    let until = std::time::Instant::now() + std::time::Duration::from_secs(10);
    while let Err(error) = std::fs::remove_dir_all(&folder) {
        assert!(std::time::Instant::now() < until, "{error}");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}
