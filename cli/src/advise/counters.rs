//! Counters of a run: files of `CINCH_METRICS_FILE`, and JSON of `cinch ps --json` and `CINCH_DUMP_FILE`.

use cinch::types::CodecKind;
use cinch::{Collective, sys::file};
use serde_json::Value;
use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::path::Path;

/// Largest file that is read, in bytes.
const MAX_BYTES: usize = 256 << 20;

/// Counts of a class of calls, summed over the ranks whose counters were read.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ClassSums {
    pub calls: f64,
    /// Bytes of the calls' larger buffers.
    pub bytes: f64,
    /// Bytes that the ranks sent.
    pub wire_bytes: f64,
    pub timed_calls: f64,
    /// Seconds of the timed calls.
    pub timed_seconds: f64,
}

impl ClassSums {
    fn add(&mut self, other: &ClassSums) {
        self.calls += other.calls;
        self.bytes += other.bytes;
        self.wire_bytes += other.wire_bytes;
        self.timed_calls += other.timed_calls;
        self.timed_seconds += other.timed_seconds;
    }
}

/// Collective, codec and size of calls. Buffers of the class have more than half of `size_class` bytes, up to all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClassName {
    pub collective: Collective,
    pub codec: CodecKind,
    pub size_class: u64,
}

impl ClassName {
    fn key(&self) -> (u64, u8, u8) {
        (self.size_class, self.collective as u8, self.codec as u8)
    }
}

impl PartialOrd for ClassName {
    fn partial_cmp(&self, other: &ClassName) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for ClassName {
    fn cmp(&self, other: &ClassName) -> Ordering {
        self.key().cmp(&other.key())
    }
}

/// Counters of the communicators of one name and number of ranks.
#[derive(Clone, Debug, Default)]
pub struct CommunicatorCounts {
    pub classes: BTreeMap<ClassName, ClassSums>,
    /// Host of each rank that is known.
    pub hosts: BTreeMap<usize, String>,
    /// Ranks whose counters were read, by id of the communicator.
    seen: BTreeMap<(String, usize), ()>,
    /// Ids of the communicators.
    ids: BTreeMap<String, ()>,
    /// Seconds that ranks waited for others, in waits of a millisecond and more.
    pub wait_seconds: f64,
}

impl CommunicatorCounts {
    /// Returns the number of ranks whose counters were read, of each communicator on average.
    pub fn ranks_read(&self) -> f64 {
        self.seen.len() as f64 / self.ids.len().max(1) as f64
    }

    fn see(&mut self, id: &str, rank: usize) {
        self.seen.insert((id.to_string(), rank), ());
        self.ids.insert(id.to_string(), ());
    }
}

/// Communicators by name and number of ranks.
pub type RunCounters = BTreeMap<(String, usize), CommunicatorCounts>;

/// Reads a file and adds its counters.
///
/// # Errors
/// Returns an error message that names the file and line.
pub fn read(path: &Path, into: &mut RunCounters) -> Result<(), String> {
    let text =
        file::read_text(path, MAX_BYTES).map_err(|error| format!("{}: {error}", path.display()))?;
    let added = match text.trim_start().starts_with(['{', '[']) {
        true => parse_json(&text, into),
        false => parse_prometheus(&text, into),
    };
    added.map_err(|why| format!("{}: {why}", path.display()))
}

/// Adds the counters of all communicators in a JSON text.
fn parse_json(text: &str, into: &mut RunCounters) -> Result<(), String> {
    let mut found = 0;
    // A dump has one object on each line, `cinch ps --json` one in all.
    for value in serde_json::Deserializer::from_str(text).into_iter::<Value>() {
        let value = value.map_err(|error| format!("no JSON: {error}"))?;
        let processes = match value.get("processes").and_then(Value::as_array) {
            Some(processes) => processes.clone(),
            None => vec![value],
        };
        for process in &processes {
            let communicators = process.get("communicators").and_then(Value::as_array);
            for communicator in communicators.into_iter().flatten() {
                add_communicator(communicator, into)
                    .ok_or_else(|| format!("malformed communicator: {communicator:.200}"))?;
                found += 1;
            }
        }
    }
    match found {
        0 => Err(
            "there is no communicator in it; `cinch ps --json` and CINCH_DUMP_FILE write them"
                .into(),
        ),
        _ => Ok(()),
    }
}

fn add_communicator(value: &Value, into: &mut RunCounters) -> Option<()> {
    let text = |name: &str| value.get(name)?.as_str();
    let rank = usize::try_from(value.get("rank")?.as_u64()?).ok()?;
    let ranks = value.get("ranks")?.as_array()?;
    let entry = into
        .entry((text("name")?.to_string(), ranks.len()))
        .or_default();
    entry.see(text("id")?, rank);
    for (rank, name) in ranks.iter().enumerate() {
        // `rank 3 (host b, pid 412)`
        let host = name
            .as_str()?
            .split_once("(host ")
            .and_then(|(_, rest)| rest.split_once(','));
        if let Some((host, _)) = host {
            entry.hosts.insert(rank, host.to_string());
        }
    }
    let metrics = value.get("metrics")?;
    for call in metrics.get("calls")?.as_array()? {
        let number = |name: &str| call.get(name)?.as_f64();
        let text = |name: &str| call.get(name)?.as_str();
        let size_class = call.get("size_class")?.as_u64()?;
        let sums = ClassSums {
            calls: number("calls")?,
            bytes: number("bytes")?,
            wire_bytes: number("wire_bytes")?,
            timed_calls: number("timed_calls")?,
            timed_seconds: number("timed_seconds")?,
        };
        if let Some(class) = class_name(text("collective")?, text("codec")?, size_class) {
            entry.classes.entry(class).or_default().add(&sums);
        }
    }
    for wait in metrics.get("peer_waits")?.as_array()? {
        entry.wait_seconds += wait.get("seconds")?.as_f64()?;
    }
    Some(())
}

/// Returns the class by its names; `None` for `other`, whose calls have no common size.
fn class_name(collective: &str, codec: &str, size_class: u64) -> Option<ClassName> {
    Some(ClassName {
        collective: Collective::from_name(collective)?,
        codec: CodecKind::ALL.into_iter().find(|it| it.name() == codec)?,
        size_class,
    })
}

/// Adds the counters of a text in Prometheus' format. Metrics of other programs are skipped.
fn parse_prometheus(text: &str, into: &mut RunCounters) -> Result<(), String> {
    let mut found = 0;
    for (at, line) in text.lines().enumerate() {
        if !line.starts_with("cinch_") {
            continue;
        }
        add_line(line)
            .map_err(|why| format!("line {}: {why}", at + 1))
            .map(|added| {
                if let Some(added) = added {
                    added.into_counters(into);
                }
            })?;
        found += 1;
    }
    match found {
        0 => Err("there is no metric of cinch in it; CINCH_METRICS_FILE writes them".into()),
        _ => Ok(()),
    }
}

/// A sample of a metric.
struct Sample<'a> {
    metric: &'a str,
    labels: BTreeMap<String, String>,
    value: f64,
    rank: usize,
    ranks: usize,
}

impl Sample<'_> {
    fn label(&self, name: &str) -> &str {
        self.labels.get(name).map_or("", String::as_str)
    }

    fn into_counters(self, into: &mut RunCounters) {
        let key = (self.label("communicator").to_string(), self.ranks);
        let entry = into.entry(key).or_default();
        entry.see(self.label("id"), self.rank);
        entry
            .hosts
            .insert(self.rank, self.label("host").to_string());
        if self.metric == "cinch_peer_wait_seconds_total" {
            entry.wait_seconds += self.value;
            if let Ok(peer) = self.label("peer").parse() {
                entry
                    .hosts
                    .insert(peer, self.label("peer_host").to_string());
            }
            return;
        }
        let size_class = self.label("size_class").parse().unwrap_or(0);
        let class = class_name(self.label("collective"), self.label("codec"), size_class);
        let Some(class) = class else {
            return;
        };
        let sums = entry.classes.entry(class).or_default();
        match self.metric {
            "cinch_calls_total" => sums.calls += self.value,
            "cinch_call_bytes_total" => sums.bytes += self.value,
            "cinch_wire_bytes_total" => sums.wire_bytes += self.value,
            "cinch_timed_calls_total" => sums.timed_calls += self.value,
            "cinch_timed_call_seconds_total" => sums.timed_seconds += self.value,
            _ => {}
        }
    }
}

/// Parses a line; `None` for metrics without a rank.
fn add_line(line: &str) -> Result<Option<Sample<'_>>, String> {
    let (metric, rest) = line
        .split_once('{')
        .ok_or("a metric of cinch without labels")?;
    let (labels, rest) = labels(rest).ok_or("malformed labels")?;
    let value = rest.split_whitespace().next().unwrap_or_default();
    let value = value
        .parse()
        .map_err(|_| format!("\"{value}\" is no number"))?;
    let number = |name: &str| -> Option<usize> { labels.get(name)?.parse().ok() };
    let (Some(rank), Some(ranks)) = (number("rank"), number("ranks")) else {
        return Ok(None);
    };
    Ok(Some(Sample {
        metric,
        value,
        rank,
        ranks,
        labels,
    }))
}

/// Parses `NAME="VALUE",...}` and returns the labels and the rest of the line.
fn labels(mut text: &str) -> Option<(BTreeMap<String, String>, &str)> {
    let mut labels = BTreeMap::new();
    loop {
        let (name, rest) = text.split_once("=\"")?;
        let mut value = String::new();
        let mut letters = rest.char_indices();
        let end = loop {
            match letters.next()? {
                (at, '"') => break at + 1,
                (_, '\\') => value.push(match letters.next()?.1 {
                    'n' => '\n',
                    other => other,
                }),
                (_, other) => value.push(other),
            }
        };
        labels.insert(name.to_string(), value);
        text = &rest[end..];
        match text.strip_prefix(',') {
            Some(rest) => text = rest,
            None => return text.strip_prefix('}').map(|rest| (labels, rest)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lines as `cinch::recorder` writes them for a rank.
    fn lines(rank: usize) -> String {
        let labels = format!(
            "host=\"h{rank}\",pid=\"7\",communicator=\"dp \\\"0\\\"\",id=\"ab\",rank=\"{rank}\",ranks=\"2\""
        );
        let class = "collective=\"all_reduce\",codec=\"raw\",size_class=\"1048576\"";
        let other = "collective=\"other\",codec=\"other\",size_class=\"other\"";
        format!(
            "# HELP cinch_calls_total x\n# TYPE cinch_calls_total counter\nnode_load1 0.5\n\
             cinch_calls_total{{{labels},{class}}} 10\n\
             cinch_calls_total{{{labels},{other}}} 5\n\
             cinch_call_bytes_total{{{labels},{class}}} 10000000\n\
             cinch_wire_bytes_total{{{labels},{class}}} 9000000\n\
             cinch_timed_calls_total{{{labels},{class}}} 10\n\
             cinch_timed_call_seconds_total{{{labels},{class}}} 0.500000000\n\
             cinch_peer_wait_seconds_total{{{labels},peer=\"{}\",peer_host=\"h{}\"}} 0.25\n\
             cinch_communicator_failed{{{labels}}} 0\n",
            1 - rank,
            1 - rank
        )
    }

    fn class() -> ClassName {
        ClassName {
            collective: Collective::AllReduce,
            codec: CodecKind::Raw,
            size_class: 1 << 20,
        }
    }

    #[test]
    fn prometheus_files_of_ranks_add_up() {
        let mut counters = RunCounters::new();
        parse_prometheus(&lines(0), &mut counters).unwrap();
        parse_prometheus(&lines(1), &mut counters).unwrap();
        let comm = &counters[&("dp \"0\"".to_string(), 2)];
        assert_eq!(comm.ranks_read(), 2.0);
        assert_eq!(comm.hosts.values().collect::<Vec<_>>(), ["h0", "h1"]);
        assert_eq!(comm.wait_seconds, 0.5);
        let expected = ClassSums {
            calls: 20.0,
            bytes: 2e7,
            wire_bytes: 1.8e7,
            timed_calls: 20.0,
            timed_seconds: 1.0,
        };
        assert_eq!(comm.classes.len(), 1);
        assert_eq!(comm.classes[&class()], expected);
    }

    #[test]
    fn json_of_ps_and_dumps_is_read() {
        let process = r#"{"cinch":"0.1.0","pid":1,"communicators":[{"name":"tp","id":"cd","rank":1,"nranks":2,
            "ranks":["rank 0 (host a, pid 1)","rank 1 (host b, pid 2)"],"calls":3,
            "metrics":{"calls":[{"collective":"all_reduce","codec":"raw","size_class":1048576,"calls":3,"bytes":3000000,
            "wire_bytes":3000000,"timed_calls":3,"timed_seconds":0.3}],"peer_waits":[{"rank":0,"seconds":0.1}]},
            "recent":[]}]}"#;
        for text in [
            process.to_string(),
            format!("{{\"processes\":[{process}],\"held_up_by\":[]}}"),
        ] {
            let mut counters = RunCounters::new();
            parse_json(&text, &mut counters).unwrap();
            let comm = &counters[&("tp".to_string(), 2)];
            assert_eq!(comm.hosts[&1], "b");
            assert_eq!(comm.classes[&class()].timed_seconds, 0.3);
            assert_eq!(comm.wait_seconds, 0.1);
        }
    }

    /// JSON that the library itself writes is read without loss. `tests/processes/metrics.rs` does so with text.
    #[test]
    fn json_of_the_library_is_read() {
        use cinch::recorder::{CallClass, CommLabel, FlightRecorder, RankName, process_json};
        use std::time::Duration;
        let rank = |rank: usize| RankName {
            text: format!("rank {rank} (host h{rank}, pid 1)"),
            host: format!("h{rank}"),
            pid: 1,
        };
        let recorder = FlightRecorder::new(CommLabel {
            name: "a\\b".into(),
            id: [1; 8],
            rank: 0,
            ranks: vec![rank(0), rank(1)],
            gpu: None,
        });
        let class_of = CallClass::new(Collective::AllReduce, CodecKind::Raw, 1_000_000);
        let time = Some(Duration::from_millis(2));
        let metrics = recorder.metrics();
        metrics.count_call(class_of, 1_000_000, [500, 500], time);
        let mut counters = RunCounters::new();
        parse_json(&process_json([&recorder], "h0", "test"), &mut counters).unwrap();
        let comm = &counters[&("a\\b".to_string(), 2)];
        let sums = comm.classes[&class()];
        assert_eq!(
            (sums.calls, sums.bytes, sums.timed_seconds),
            (1.0, 1e6, 0.002)
        );
        assert_eq!(comm.hosts[&0], "h0");
    }

    #[test]
    fn malformed_files_are_refused_by_line() {
        let mut counters = RunCounters::new();
        let refused =
            |text: &str, counters: &mut RunCounters| parse_prometheus(text, counters).unwrap_err();
        let good = lines(0);
        let broken = good.replace("} 9000000", "} many");
        assert!(refused(&broken, &mut counters).contains("line 7: \"many\" is no number"));
        let open = good.replace("rank=\"0\",", "rank=\"0,");
        assert!(refused(&open, &mut counters).starts_with("line 4: "));
        assert!(refused("node_load1 1\n", &mut counters).contains("no metric of cinch"));
        assert!(
            parse_json("{\"a\":1}", &mut counters)
                .unwrap_err()
                .contains("no communicator")
        );
        assert!(
            parse_json("{\"a\":", &mut counters)
                .unwrap_err()
                .contains("no JSON")
        );
    }
}
