//! Counters of communicators in Prometheus' text format, for its node exporter's textfile collector.

use super::{CallClass, CallCounts, FlightRecorder};
use std::fmt::Write;

/// A metric: its name, type, help, and value of a class of calls.
struct CallMetric {
    name: &'static str,
    help: &'static str,
    value: fn(&CallCounts) -> String,
}

const CALL_METRICS: [CallMetric; 6] = [
    CallMetric {
        name: "cinch_calls_total",
        help: "Calls that have returned.",
        value: |counts| counts.calls.to_string(),
    },
    CallMetric {
        name: "cinch_call_bytes_total",
        help: "Bytes of the larger buffer of calls.",
        value: |counts| counts.bytes.to_string(),
    },
    CallMetric {
        name: "cinch_wire_bytes_total",
        help: "Bytes that this rank sent.",
        value: |counts| counts.wire_bytes.to_string(),
    },
    CallMetric {
        name: "cinch_raw_bytes_total",
        help: "Bytes that this rank would have sent without codecs.",
        value: |counts| counts.raw_bytes.to_string(),
    },
    CallMetric {
        name: "cinch_timed_calls_total",
        help: "Calls whose time was measured; small calls are sampled.",
        value: |counts| counts.timed.to_string(),
    },
    CallMetric {
        name: "cinch_timed_call_seconds_total",
        help: "Seconds of the calls whose time was measured.",
        value: |counts| seconds(counts.nanoseconds),
    },
];

fn seconds(nanoseconds: u64) -> String {
    format!("{:.9}", nanoseconds as f64 * 1e-9)
}

/// Returns the counters of this process's communicators.
pub fn prometheus_text(recorders: &[&FlightRecorder], host: &str) -> String {
    let labels: Vec<String> = recorders.iter().map(|it| labels_of(it, host)).collect();
    let mut text = String::new();
    for metric in &CALL_METRICS {
        head(&mut text, metric.name, "counter", metric.help);
        for (recorder, labels) in recorders.iter().zip(&labels) {
            for (class, counts) in recorder.metrics().calls() {
                let value = (metric.value)(&counts);
                // Writing to a string cannot fail, here and below.
                let _ = writeln!(
                    text,
                    "{}{{{labels},{}}} {value}",
                    metric.name,
                    class_labels(class)
                );
            }
        }
    }
    head(
        &mut text,
        "cinch_peer_wait_seconds_total",
        "counter",
        "Seconds that this rank has waited for another rank.",
    );
    for (recorder, labels) in recorders.iter().zip(&labels) {
        for (rank, time) in recorder.metrics().waits() {
            let name = recorder.label().ranks.get(rank);
            let peer_host = quoted(name.map_or("", |name| name.host.as_str()));
            let value = time.as_secs_f64();
            let _ = writeln!(
                text,
                "cinch_peer_wait_seconds_total{{{labels},peer=\"{rank}\",peer_host={peer_host}}} {value:.9}"
            );
        }
    }
    head(
        &mut text,
        "cinch_communicator_failed",
        "gauge",
        "1 if the communicator has failed.",
    );
    for (recorder, labels) in recorders.iter().zip(&labels) {
        let failed = u8::from(recorder.failure().is_some() || recorder.error().is_some());
        let _ = writeln!(text, "cinch_communicator_failed{{{labels}}} {failed}");
    }
    text
}

fn head(text: &mut String, name: &str, kind: &str, help: &str) {
    let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
}

fn labels_of(recorder: &FlightRecorder, host: &str) -> String {
    let label = recorder.label();
    let id: String = label.id.iter().map(|byte| format!("{byte:02x}")).collect();
    format!(
        "host={},pid=\"{}\",communicator={},id=\"{id}\",rank=\"{}\",ranks=\"{}\"",
        quoted(host),
        std::process::id(),
        quoted(&label.name),
        label.rank,
        label.ranks.len()
    )
}

fn class_labels(class: Option<CallClass>) -> String {
    match class {
        Some(class) => format!(
            "collective=\"{}\",codec=\"{}\",size_class=\"{}\"",
            class.collective.name(),
            class.codec.name(),
            1u64 << class.size_log2.min(63)
        ),
        None => "collective=\"other\",codec=\"other\",size_class=\"other\"".into(),
    }
}

/// Returns a label's value with the escapes of the format.
fn quoted(text: &str) -> String {
    let escaped = text
        .replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n");
    format!("\"{escaped}\"")
}

#[cfg(test)]
mod tests {
    use super::super::{CommLabel, RankName};
    use super::*;
    use crate::types::{CodecKind, Collective};
    use std::time::Duration;

    #[test]
    fn each_metric_has_its_head_once_and_a_line_for_each_class() {
        let recorder = FlightRecorder::new(CommLabel {
            name: "dp \"0\"\n".into(),
            id: [0xab; 8],
            rank: 1,
            ranks: (0..2)
                .map(|rank| RankName {
                    text: String::new(),
                    host: format!("h{rank}"),
                    pid: 1,
                })
                .collect(),
            gpu: None,
        });
        let class = CallClass::new(Collective::AllReduce, CodecKind::Linear8, 1 << 20);
        recorder.metrics().count_call(
            class,
            1 << 20,
            [266_240, 1 << 20],
            Some(Duration::from_micros(1500)),
        );
        recorder.metrics().add_wait(0, Duration::from_millis(250));
        let text = prometheus_text(&[&recorder], "node\\1");
        let common = format!(
            "host=\"node\\\\1\",pid=\"{}\",communicator=\"dp \\\"0\\\"\\n\",id=\"abababababababab\",rank=\"1\",ranks=\"2\"",
            std::process::id()
        );
        let class = "collective=\"all_reduce\",codec=\"linear8\",size_class=\"1048576\"";
        for line in [
            format!("cinch_calls_total{{{common},{class}}} 1"),
            format!("cinch_call_bytes_total{{{common},{class}}} 1048576"),
            format!("cinch_wire_bytes_total{{{common},{class}}} 266240"),
            format!("cinch_raw_bytes_total{{{common},{class}}} 1048576"),
            format!("cinch_timed_calls_total{{{common},{class}}} 1"),
            format!("cinch_timed_call_seconds_total{{{common},{class}}} 0.001500000"),
            format!(
                "cinch_peer_wait_seconds_total{{{common},peer=\"0\",peer_host=\"h0\"}} 0.250000000"
            ),
            format!("cinch_communicator_failed{{{common}}} 0"),
        ] {
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
        let two = prometheus_text(&[&recorder, &recorder], "h");
        let heads = two.lines().filter(|line| line.starts_with("# TYPE"));
        assert_eq!(heads.count(), CALL_METRICS.len() + 2);
        assert!(text.ends_with('\n'));
    }
}
