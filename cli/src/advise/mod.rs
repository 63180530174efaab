//! `cinch advise`: reads a run's counters and predicts which codec rule would save how much time.

mod counters;
mod model;
mod output;

use crate::{ExitResult, FAILURE, USAGE, finish};
use cinch::config::{CollectiveSet, Config};
use cinch::cpu::Isa;
use cinch::plan::{Affine, MeasuredCosts};
use cinch::{CodecSpec, DType};
use counters::{ClassName, ClassSums, CommunicatorCounts, RunCounters};
use model::{CommModel, CoreCosts};
use serde::Serialize;
use std::io;
use std::path::PathBuf;

/// Smallest share of a communicator's time that is worth a rule.
const LEAST_SHARE: f64 = 0.01;

/// Options of `cinch advise`.
#[derive(clap::Args)]
pub struct AdviseOptions {
    /// Files of CINCH_METRICS_FILE, CINCH_DUMP_FILE or `cinch ps --json`; one for each process, or some of them
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Codecs to consider, as `cinch codecs` lists them
    #[arg(
        long,
        value_name = "CODEC",
        value_delimiter = ',',
        default_value = "cast_bf16,linear8,dynamic8,minmax4"
    )]
    codec: Vec<CodecSpec>,
    /// Number of hosts of the run, with as many ranks each [default: those in the files]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65536))]
    hosts: Option<u32>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Saving of a codec on one communicator.
#[derive(Debug, PartialEq, Serialize)]
struct CommSaving {
    communicator: String,
    ranks: usize,
    /// Rule of `CINCH_CODEC_RULES`.
    rule: String,
    /// Predicted seconds that a rank would save.
    saves_seconds: f64,
    /// Bytes that a rank would not send.
    saves_bytes: f64,
}

/// Saving of a codec in the run.
#[derive(Debug, PartialEq, Serialize)]
struct CodecAdvice {
    codec: String,
    /// Largest error of one encode and decode, as in docs/numerics.md.
    error_bound: String,
    /// Value of `CINCH_CODEC_RULES`.
    rules: String,
    saves_seconds: f64,
    /// Share of the time of all timed calls.
    saves_share: f64,
    communicators: Vec<CommSaving>,
}

/// A communicator of the run, for the report.
#[derive(Debug, Serialize)]
struct CommSummary {
    communicator: String,
    ranks: usize,
    hosts: usize,
    /// Seconds of all calls of a rank; calls that were not timed count as the timed ones of their class.
    seconds: f64,
    /// Seconds that a rank waited for others, in waits of a millisecond and more.
    wait_seconds: f64,
    /// GB/s of the link that explains the times; `None` if nothing was timed.
    link_gb_per_s: Option<f64>,
    /// Bytes that a rank sent in calls that were not timed, as those on GPUs, and that a codec may carry.
    untimed_bytes: f64,
    /// Calls that already have a codec.
    coded_calls: f64,
    /// Why no codec was considered, if so.
    note: Option<String>,
}

/// Advice for a run.
#[derive(Debug, Serialize)]
struct RunAdvice {
    communicators: Vec<CommSummary>,
    /// Seconds of a rank in all timed calls.
    seconds: f64,
    /// Codecs that save time, the largest saving first.
    codecs: Vec<CodecAdvice>,
}

/// Runs `cinch advise`.
///
/// # Errors
/// Returns an exit code and an error message if a file is malformed or a codec cannot be built.
pub fn run(options: &AdviseOptions) -> ExitResult {
    let mut counters = RunCounters::new();
    for file in &options.files {
        counters::read(file, &mut counters).map_err(|sentence| (USAGE, sentence))?;
    }
    let isa = Isa::from_setting(&Config::default().simd);
    let isa = isa.map_err(|error| (FAILURE, error.to_string()))?;
    let core = |spec| MeasuredCosts::of_core(Affine::default(), &[spec], isa);
    let hosts = options.hosts.map(|hosts| hosts as usize);
    let advice = advise(&counters, &options.codec, hosts, &core)
        .map_err(|error| (FAILURE, error.to_string()))?;
    let mut out = io::stdout().lock();
    finish(match options.json {
        true => output::write_json(&advice, &mut out),
        false => output::write_text(&advice, &mut out),
    })
}

/// Returns whether the rules of codecs apply to the class without naming its collective.
fn is_gradient(class: &ClassName) -> bool {
    CollectiveSet::GRADIENTS.has(class.collective)
}

fn advise(
    counters: &RunCounters,
    codecs: &[CodecSpec],
    hosts: Option<usize>,
    core: CoreCosts,
) -> cinch::Result<RunAdvice> {
    let mut summaries = Vec::new();
    let mut models = Vec::new();
    for ((name, ranks), comm) in counters {
        let groups = model::groups(comm, *ranks, hosts);
        let mut summary = summary(name, *ranks, groups.count(), comm);
        let model = match *ranks {
            1 => None,
            _ => CommModel::fitted(comm, *ranks, groups, core)?,
        };
        summary.link_gb_per_s = model
            .as_ref()
            .map(|model| 1e-9 / model.link.each.max(1e-15));
        summary.note = note(&summary, comm);
        summaries.push(summary);
        models.extend(model.map(|model| (name.as_str(), *ranks, comm, model)));
    }
    let seconds = summaries.iter().map(|it| it.seconds).sum();
    let mut advice = Vec::new();
    for &codec in codecs {
        let mut savings = Vec::new();
        for (name, ranks, comm, model) in &models {
            savings.extend(saving((name, *ranks), comm, model, codec)?);
        }
        if let Some(codec) = of_codec(codec, savings, seconds) {
            advice.push(codec);
        }
    }
    advice.sort_by(|a: &CodecAdvice, b| b.saves_seconds.total_cmp(&a.saves_seconds));
    Ok(RunAdvice {
        communicators: summaries,
        seconds,
        codecs: advice,
    })
}

/// Returns the seconds of a rank in all calls of a class.
fn seconds_of(sums: &ClassSums, comm: &CommunicatorCounts) -> f64 {
    let mean = sums.timed_seconds / sums.timed_calls.max(1.0);
    mean * sums.calls / comm.ranks_read().max(1.0)
}

fn summary(name: &str, ranks: usize, hosts: usize, comm: &CommunicatorCounts) -> CommSummary {
    let read = comm.ranks_read().max(1.0);
    let raw_gradients = comm
        .classes
        .iter()
        .filter(|(class, _)| class.codec.is_raw() && is_gradient(class));
    let untimed = raw_gradients.filter(|(_, sums)| sums.timed_calls == 0.0);
    let coded = comm
        .classes
        .iter()
        .filter(|(class, _)| !class.codec.is_raw());
    CommSummary {
        communicator: name.into(),
        ranks,
        hosts,
        seconds: comm
            .classes
            .values()
            .map(|sums| seconds_of(sums, comm))
            .sum(),
        wait_seconds: comm.wait_seconds / read,
        link_gb_per_s: None,
        untimed_bytes: untimed.map(|(_, sums)| sums.wire_bytes).sum::<f64>() / read,
        coded_calls: coded.map(|(_, sums)| sums.calls).sum::<f64>() / read,
        note: None,
    }
}

/// Returns why a communicator gets no rule, where that follows from its counters alone.
fn note(summary: &CommSummary, comm: &CommunicatorCounts) -> Option<String> {
    if summary.ranks == 1 {
        return Some("one rank moves no data".into());
    }
    if !comm.classes.keys().any(is_gradient) {
        return Some("no all_reduce and no reduce_scatter, to which rules apply".into());
    }
    if summary.untimed_bytes > 0.0 {
        return Some(
            "calls on GPUs are not timed: measure with `cinch bench --device gpu --codec raw,linear8`".into(),
        );
    }
    None
}

/// Returns what a codec would save on a communicator, from the size on at which it saves most; `None` if that is less
/// than [`LEAST_SHARE`] of the communicator's time.
fn saving(
    (name, ranks): (&str, usize),
    comm: &CommunicatorCounts,
    model: &CommModel,
    codec: CodecSpec,
) -> cinch::Result<Option<CommSaving>> {
    let classes = comm.classes.iter().filter(|(class, sums)| {
        class.codec.is_raw() && is_gradient(class) && sums.timed_calls > 0.0
    });
    let mut savings: Vec<(u64, f64, f64)> = Vec::new();
    let part =
        crate::bench::metrics::bytes_per_element(codec, DType::F32) / DType::F32.size() as f64;
    for (class, sums) in classes {
        let seconds = seconds_of(sums, comm) * (1.0 - model.ratio(class, sums, codec)?);
        let bytes = sums.wire_bytes / comm.ranks_read().max(1.0) * (1.0 - part);
        savings.push((class.size_class, seconds, bytes));
    }
    savings.sort_by_key(|(size, ..)| std::cmp::Reverse(*size));
    let (mut best, mut sum) = ((0, 0.0, 0.0), (0.0, 0.0));
    for &(size, seconds, bytes) in &savings {
        sum = (sum.0 + seconds, sum.1 + bytes);
        // Classes of one size belong together: a rule has one smallest size.
        if sum.0 >= best.1 {
            best = (size, sum.0, sum.1);
        }
    }
    let all: f64 = comm
        .classes
        .values()
        .map(|sums| seconds_of(sums, comm))
        .sum();
    if best.1 <= LEAST_SHARE * all {
        return Ok(None);
    }
    let below = |(size, ..): &&(u64, f64, f64)| *size == best.0 / 2;
    let least = match savings.iter().find(below) {
        // Calls of exactly the next class's size must stay raw.
        Some(_) => best.0 / 2 + 1,
        None => best.0 / 2,
    };
    Ok(Some(CommSaving {
        communicator: name.into(),
        ranks,
        rule: format!("{}={codec}:min={}", pattern(name), shown_bytes(least)),
        saves_seconds: best.1,
        saves_bytes: best.2,
    }))
}

/// Returns a pattern that fits the name. Letters that separate rules are replaced by `?`, and a communicator without a
/// name needs the pattern that fits all.
fn pattern(name: &str) -> String {
    match name {
        "" => "*".into(),
        name => name.replace(['=', ',', '*'], "?"),
    }
}

/// Returns a number of bytes as settings take it.
fn shown_bytes(bytes: u64) -> String {
    let units = [(20, "M"), (10, "K")];
    let exact = units
        .into_iter()
        .find(|(shift, _)| bytes > 0 && bytes.trailing_zeros() >= *shift);
    match exact {
        Some((shift, unit)) => format!("{}{unit}", bytes >> shift),
        None => bytes.to_string(),
    }
}

/// Joins the rules of a codec; `None` if there are none.
fn of_codec(
    codec: CodecSpec,
    mut savings: Vec<CommSaving>,
    all_seconds: f64,
) -> Option<CodecAdvice> {
    // The first rule that fits counts, so the pattern that fits all comes last.
    savings.sort_by(|a, b| {
        let is_last = |it: &CommSaving| it.communicator.is_empty();
        is_last(a)
            .cmp(&is_last(b))
            .then(b.saves_seconds.total_cmp(&a.saves_seconds))
    });
    let mut rules: Vec<&str> = Vec::new();
    let mut patterns: Vec<&str> = Vec::new();
    for saving in &savings {
        let pattern = saving.rule.split('=').next().unwrap_or_default();
        // Communicators of one name and several sizes have one rule.
        if !patterns.contains(&pattern) {
            patterns.push(pattern);
            rules.push(&saving.rule);
        }
    }
    let rules = rules.join(",");
    let saves_seconds: f64 = savings.iter().map(|it| it.saves_seconds).sum();
    (!savings.is_empty()).then(|| CodecAdvice {
        codec: codec.to_string(),
        error_bound: output::error_bound(codec.kind.name()),
        rules,
        saves_seconds,
        saves_share: saves_seconds / all_seconds.max(f64::MIN_POSITIVE),
        communicators: savings,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use cinch::config::{CodecPolicy, CommFacts, Origin};

    fn advice(comms: &[(&str, &[(u64, f64)])]) -> RunAdvice {
        let codecs = ["linear8", "cast_bf16"].map(|name| name.parse().unwrap());
        let named = comms
            .iter()
            .map(|(name, times)| ((name.to_string(), 2), model::tests::counters(times)));
        advise(&named.collect(), &codecs, None, &model::tests::core).unwrap()
    }

    /// Calls of 64 MiB and of 4 KiB over a link of 0.1 GB/s, which only the large ones saturate.
    const SLOW: &[(u64, f64)] = &[(4096, 100e-6), (64 << 20, 0.6)];
    /// Calls of 64 MiB at 10 GB/s.
    const FAST: &[(u64, f64)] = &[(64 << 20, 0.007)];

    #[test]
    fn rule_names_the_communicator_that_gains_and_the_size_from_which() {
        let advice = advice(&[("dp,0", SLOW), ("tp", FAST)]);
        let best = &advice.codecs[0];
        assert_eq!(best.codec, "linear8:block=256");
        assert!(
            best.rules.starts_with("dp?0=linear8:block=256:min="),
            "{}",
            best.rules
        );
        assert!(!best.rules.contains("tp"), "{}", best.rules);
        // 20 calls of two ranks, of which one counter was read, and 0.6 s each: about three quarters are saved.
        assert!((0.6..0.8).contains(&best.saves_share), "{best:?}");
        assert!(best.error_bound.contains("A / 254"), "{}", best.error_bound);
        let half = &advice.codecs[1];
        assert!(half.saves_seconds < best.saves_seconds);
    }

    /// A printed rule must be one that the setting takes, and must apply to the calls that gain.
    #[test]
    fn rule_is_one_that_the_library_takes() {
        let advice = advice(&[("", SLOW), ("dp", SLOW)]);
        let rules = &advice.codecs[0].rules;
        assert!(rules.starts_with("dp=") && rules.contains(",*="), "{rules}");
        for name in ["dp", "other"] {
            let mut config = Config::default();
            config
                .set("CINCH_CODEC_RULES", rules, Origin::Environment)
                .unwrap();
            config.comm_name = name.into();
            let policy = CodecPolicy::new(&config, CommFacts::first(2, 2));
            assert_eq!(policy.codecs[0].codec.to_string(), "linear8:block=256");
            assert!(policy.codecs[0].min_bytes <= 64 << 20);
        }
    }

    #[test]
    fn nothing_is_advised_where_nothing_helps() {
        let fast = advice(&[("tp", FAST)]);
        assert!(fast.codecs.is_empty(), "{fast:?}");
        let none = advice(&[("idle", &[])]);
        assert!(none.codecs.is_empty());
        assert!(
            none.communicators[0]
                .note
                .as_ref()
                .unwrap()
                .contains("no all_reduce")
        );
    }

    #[test]
    fn calls_without_times_are_reported_by_bytes() {
        let mut comm = model::tests::counters(&[(1 << 20, 0.0)]);
        for sums in comm.classes.values_mut() {
            (sums.timed_calls, sums.timed_seconds) = (0.0, 0.0);
        }
        let counters = RunCounters::from([(("gpu".to_string(), 2), comm)]);
        let codecs = ["linear8".parse().unwrap()];
        let advice = advise(&counters, &codecs, None, &model::tests::core).unwrap();
        let summary = &advice.communicators[0];
        assert_eq!(summary.untimed_bytes, 20.0 * (1 << 20) as f64);
        assert!(summary.note.as_ref().unwrap().contains("not timed"));
        assert!(advice.codecs.is_empty());
    }

    #[test]
    fn bytes_are_written_as_settings_take_them() {
        for (bytes, text) in [
            (0, "0"),
            (1000, "1000"),
            (1024, "1K"),
            (524_289, "524289"),
            (1 << 21, "2M"),
        ] {
            assert_eq!(shown_bytes(bytes), text);
        }
    }
}
