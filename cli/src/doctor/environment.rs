//! Environment variables: settings that are unknown, misspelt, out of range or in each other's way, and the job that a
//! launcher describes.

use super::EnvironmentVariables;
use super::check_result::CheckResult;
use cinch::bootstrap::{Rendezvous, discover, half_set};
use cinch::config::{Config, KNOBS, LAUNCHER_VARIABLES, NCCL_NAMES, Origin, unknown_among};
use std::ffi::OsString;

const AREA: &str = "environment";

/// Largest number of changed letters between a name and the one that was probably meant.
const TYPO: usize = 2;

/// Checks all variables. Also returns the settings, without those that are invalid.
pub fn check(variables: &EnvironmentVariables) -> (Config, Vec<CheckResult>) {
    let (config, mut results) = settings(variables);
    results.extend(unknown(variables));
    results.extend(nccl(variables));
    results.extend(contradictions(variables, &config));
    results.extend(job(variables, &config));
    (config, results)
}

/// Reads each setting by itself, so that all invalid ones are found.
fn settings(variables: &EnvironmentVariables) -> (Config, Vec<CheckResult>) {
    let mut config = Config::default();
    let mut results = Vec::new();
    let mut set = Vec::new();
    for knob in KNOBS {
        let Some(value) = variables.get(knob.name) else {
            continue;
        };
        match config.set(knob.name, value, Origin::Environment) {
            Ok(()) => set.push(format!("{}={value}", knob.name)),
            Err(error) => results.push(CheckResult::error(
                AREA,
                knob.name,
                error.message(),
                format!("{}: {}", knob.name, knob.range()),
            )),
        }
    }
    let found = match set.is_empty() {
        true => "no CINCH_ variable is set".to_string(),
        false => set.join(" "),
    };
    results.insert(0, CheckResult::ok(AREA, "settings", found).with("set", set));
    (config, results)
}

/// Names that begin with `CINCH_` and are no settings.
fn unknown(variables: &EnvironmentVariables) -> Vec<CheckResult> {
    let known: Vec<&str> = KNOBS.iter().map(|knob| knob.name).collect();
    let names = unknown_among(variables.names());
    let found = |name: String| {
        let text = format!("no setting is called {name}");
        let advice = match nearest(&name, &known) {
            Some(meant) => format!("did you mean {meant}?"),
            None => "`cinch info` lists the settings".into(),
        };
        // The drop-in refuses unknown names of codecs: the run would be exact by mistake.
        match name.starts_with("CINCH_CODEC") {
            true => CheckResult::error(AREA, &name, text, advice),
            false => CheckResult::warning(AREA, &name, text, advice),
        }
    };
    names.into_iter().map(found).collect()
}

/// NCCL's variables, as the drop-in reads them.
fn nccl(variables: &EnvironmentVariables) -> Vec<CheckResult> {
    let mut results = Vec::new();
    let known: Vec<&str> = NCCL_NAMES.iter().map(|name| name.name).collect();
    let lookup = |name: &str| variables.get(name).map(OsString::from);
    match Config::for_nccl_of(&lookup) {
        Ok(config) => results.extend(config.notes.iter().map(|note| match note.warns {
            true => CheckResult::warning(
                AREA,
                "NCCL_",
                &note.text,
                "unset one of the two, or give a value that cinch has (docs/codec-rules.md)",
            ),
            false => CheckResult::ok(AREA, "NCCL_", &note.text),
        })),
        // Errors of single settings have been found already, so this concerns several.
        Err(error) if KNOBS.iter().all(|knob| is_valid(variables, knob.name)) => {
            results.push(CheckResult::error(
                AREA,
                "NCCL_",
                format!("programs for NCCL will not start: {}", error.message()),
                "change this setting, or unset it",
            ));
        }
        Err(_) => {}
    }
    let mut others: Vec<String> = variables
        .names()
        .filter(|name| name.starts_with("NCCL_") && !known.contains(&name.as_str()))
        .collect();
    others.sort();
    for name in others {
        results.push(match nearest(&name, &known) {
            Some(meant) => CheckResult::warning(
                AREA,
                &name,
                format!("{name} has no effect"),
                format!("did you mean {meant}? If not, it is fine"),
            ),
            None => CheckResult::ok(AREA, &name, format!("{name} has no effect on cinch")),
        });
    }
    results
}

fn is_valid(variables: &EnvironmentVariables, name: &str) -> bool {
    variables.get(name).is_none_or(|value| {
        let mut config = Config::default();
        config.set(name, value, Origin::Environment).is_ok()
    })
}

/// A contradiction: the variables that are in each other's way, whether it applies, and what follows.
struct Contradiction {
    names: [&'static str; 2],
    applies: fn(&Config) -> bool,
    found: &'static str,
    advice: &'static str,
}

const CONTRADICTIONS: &[Contradiction] = &[
    Contradiction {
        names: ["CINCH_CODEC", "CINCH_CODEC_RULES"],
        applies: |config| config.codec_off,
        found: "CINCH_CODEC=off is final, so CINCH_CODEC_RULES has no effect",
        advice: "unset CINCH_CODEC, or write raw, which rules may replace",
    },
    Contradiction {
        names: ["CINCH_CODEC_BOUND", "CINCH_CODEC_BOUND"],
        applies: |config| config.codec_sample == 0,
        found: "CINCH_CODEC_BOUND judges samples, and CINCH_CODEC_SAMPLE takes none",
        advice: "set CINCH_CODEC_SAMPLE, such as 1000",
    },
    Contradiction {
        names: ["CINCH_IB_DISABLE", "CINCH_IB_HCA"],
        applies: |config| config.ib_disable,
        found: "CINCH_IB_DISABLE=1, so CINCH_IB_HCA selects nothing",
        advice: "unset one of them",
    },
    Contradiction {
        names: ["CINCH_SHM_DISABLE", "CINCH_TRANSPORT"],
        applies: |config| {
            config.shm_disable && config.transport == Some(cinch::types::TransportKind::Shm)
        },
        found: "CINCH_TRANSPORT=shm demands what CINCH_SHM_DISABLE=1 forbids",
        advice: "unset one of them",
    },
    Contradiction {
        names: ["CINCH_ENCRYPT", "CINCH_TRANSPORT"],
        applies: |config| {
            config.encrypts && config.transport == Some(cinch::types::TransportKind::Rdma)
        },
        found: "CINCH_TRANSPORT=rdma demands RDMA, which CINCH_ENCRYPT=1 does without",
        advice: "unset one of them",
    },
    Contradiction {
        names: ["CINCH_SECRET_FILE", "CINCH_ALLOW_UNAUTHENTICATED"],
        applies: |config| config.secret_file.is_some() && config.allow_unauthenticated,
        found: "with a secret, CINCH_ALLOW_UNAUTHENTICATED=1 allows nothing more",
        advice: "unset CINCH_ALLOW_UNAUTHENTICATED",
    },
];

fn contradictions(variables: &EnvironmentVariables, config: &Config) -> Vec<CheckResult> {
    let are_set = |names: &[&str]| names.iter().all(|name| variables.get(name).is_some());
    CONTRADICTIONS
        .iter()
        .filter(|it| are_set(&it.names) && (it.applies)(config))
        .map(|it| CheckResult::warning(AREA, it.names[1], it.found, it.advice))
        .collect()
}

/// The job that a launcher describes.
fn job(variables: &EnvironmentVariables, config: &Config) -> Option<CheckResult> {
    let lookup = |name: &str| {
        let is_known = LAUNCHER_VARIABLES.contains(&name);
        is_known.then(|| variables.get(name).map(str::to_string))?
    };
    let found = match discover(config, lookup) {
        Err(error) => {
            return Some(CheckResult::error(
                AREA,
                "job",
                error.message(),
                "correct the launcher's variables, or unset them",
            ));
        }
        Ok(found) => found,
    };
    let Some(info) = found else {
        // RANK alone is a common name, so half of a pair is no error.
        let (set, missing) = half_set(lookup)?;
        return Some(CheckResult::warning(
            AREA,
            "job",
            format!("{set} is set and {missing} is not, so ranks do not find each other by it"),
            format!("set {missing}, or start the program by cinch run, torchrun, mpirun or srun"),
        ));
    };
    let what = format!(
        "rank {} of {}, by {}",
        info.rank, info.nranks, info.launcher
    );
    let result = match &info.rendezvous {
        Rendezvous::Id(_) => CheckResult::ok(AREA, "job", what),
        Rendezvous::Address(host, port) => CheckResult::ok(
            AREA,
            "job",
            format!("{what}, rendezvous at {host} port {port}"),
        ),
        Rendezvous::Unknown(_) if info.nranks == 1 => CheckResult::ok(AREA, "job", what),
        Rendezvous::Unknown(missing) => CheckResult::error(
            AREA,
            "job",
            format!("{what}: {missing}"),
            "set CINCH_COMM_ID=host:port, with an address of rank 0's host",
        ),
    };
    Some(result.with("rank", info.rank).with("ranks", info.nranks))
}

/// Returns the known name that differs least from `name`, if it differs by a few letters only.
fn nearest<'a>(name: &str, known: &[&'a str]) -> Option<&'a str> {
    let near = known.iter().map(|known| (distance(name, known), *known));
    let (changes, known) = near.min_by_key(|(changes, _)| *changes)?;
    (changes <= TYPO).then_some(known)
}

/// Returns the number of letters to insert, delete or replace (Levenshtein's distance).
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, of_a) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, &of_b) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(of_a != of_b);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::super::check_result::Severity;
    use super::*;

    fn results(variables: &[(&str, &str)]) -> Vec<CheckResult> {
        check(&EnvironmentVariables::of(variables)).1
    }

    fn found<'a>(results: &'a [CheckResult], name: &str) -> &'a CheckResult {
        let found = results.iter().find(|it| it.check == name);
        found.unwrap_or_else(|| panic!("{name}: {results:?}"))
    }

    #[test]
    fn empty_environment_has_nothing_to_do() {
        let results = results(&[("PATH", "/bin"), ("CINCH_TEST_X", "1")]);
        assert_eq!(results.len(), 1);
        assert_eq!(results[0].level, Severity::Ok);
    }

    #[test]
    fn misspelt_names_are_found_with_what_was_meant() {
        let results = results(&[
            ("CINCH_CHANELS", "4"),
            ("CINCH_CODEC_RULE", "x"),
            ("CINCH_QQQQQQQQ", "x"),
            ("NCCL_SOCKET_IFNAM", "eth0"),
            ("NCCL_NVLS_ENABLE", "1"),
        ]);
        let typo = found(&results, "CINCH_CHANELS");
        assert_eq!(typo.level, Severity::Warning);
        assert_eq!(typo.advice.as_deref(), Some("did you mean CINCH_CHANNELS?"));
        assert_eq!(found(&results, "CINCH_CODEC_RULE").level, Severity::Error);
        let far = found(&results, "CINCH_QQQQQQQQ");
        assert!(far.advice.as_deref().unwrap().contains("cinch info"));
        let theirs = found(&results, "NCCL_SOCKET_IFNAM");
        assert!(
            theirs
                .advice
                .as_deref()
                .unwrap()
                .contains("NCCL_SOCKET_IFNAME?")
        );
        assert_eq!(found(&results, "NCCL_NVLS_ENABLE").level, Severity::Ok);
    }

    #[test]
    fn every_invalid_value_is_an_error_of_its_own() {
        let variables = EnvironmentVariables::of(&[
            ("CINCH_SLOTS", "3"),
            ("CINCH_CODEC", "linear9"),
            ("CINCH_CHANNELS", "4"),
        ]);
        let (config, results) = check(&variables);
        assert_eq!(found(&results, "CINCH_SLOTS").level, Severity::Error);
        assert_eq!(found(&results, "CINCH_CODEC").level, Severity::Error);
        assert_eq!(config.channels, 4);
        assert!(
            found(&results, "settings")
                .found
                .contains("CINCH_CHANNELS=4")
        );
    }

    #[test]
    fn variables_that_contradict_each_other_are_found() {
        for (variables, name) in [
            (
                &[("CINCH_CODEC", "off"), ("CINCH_CODEC_RULES", "*=linear8")][..],
                "CINCH_CODEC_RULES",
            ),
            (&[("CINCH_CODEC_BOUND", "0.1")], "CINCH_CODEC_BOUND"),
            (
                &[("CINCH_IB_DISABLE", "1"), ("CINCH_IB_HCA", "mlx5")],
                "CINCH_IB_HCA",
            ),
            (
                &[("CINCH_SHM_DISABLE", "1"), ("CINCH_TRANSPORT", "shm")],
                "CINCH_TRANSPORT",
            ),
            (
                &[("CINCH_ENCRYPT", "1"), ("CINCH_TRANSPORT", "rdma")],
                "CINCH_TRANSPORT",
            ),
            (&[("CINCH_LOG", "trace"), ("NCCL_DEBUG", "WARN")], "NCCL_"),
        ] {
            assert_eq!(
                found(&results(variables), name).level,
                Severity::Warning,
                "{name}"
            );
        }
        // Each of them alone is fine, and so are values that do not contradict.
        for variables in [
            &[("CINCH_CODEC", "raw"), ("CINCH_CODEC_RULES", "*=linear8")][..],
            &[
                ("CINCH_CODEC_BOUND", "0.1"),
                ("CINCH_CODEC_SAMPLE", "10"),
                ("CINCH_CODEC", "linear8"),
            ],
            &[("CINCH_IB_DISABLE", "0"), ("CINCH_IB_HCA", "mlx5")],
            &[("CINCH_SHM_DISABLE", "1"), ("CINCH_TRANSPORT", "tcp")],
        ] {
            let results = results(variables);
            assert!(
                results.iter().all(|it| it.level == Severity::Ok),
                "{results:?}"
            );
        }
    }

    #[test]
    fn job_of_a_launcher_is_described_or_its_gap_named() {
        let torchrun = [
            ("RANK", "3"),
            ("WORLD_SIZE", "8"),
            ("MASTER_ADDR", "node1"),
            ("MASTER_PORT", "29500"),
        ];
        let all = results(&torchrun);
        let job = found(&all, "job");
        assert_eq!(job.level, Severity::Ok);
        assert!(
            job.found
                .contains("rank 3 of 8, by torchrun, rendezvous at node1 port 29501")
        );
        let all = results(&torchrun[..2]);
        assert_eq!(found(&all, "job").level, Severity::Error);
        let all = results(&torchrun[..1]);
        assert_eq!(found(&all, "job").level, Severity::Warning);
        let all = results(&[("RANK", "9"), ("WORLD_SIZE", "8")]);
        assert!(found(&all, "job").found.contains("RANK=9 is impossible"));
    }

    #[test]
    fn distance_counts_changed_letters() {
        for (a, b, expected) in [
            ("", "abc", 3),
            ("abc", "abc", 0),
            ("kitten", "sitting", 3),
            ("ab", "ba", 2),
        ] {
            assert_eq!(distance(a, b), expected, "{a} {b}");
            assert_eq!(distance(b, a), expected, "{b} {a}");
        }
    }
}
