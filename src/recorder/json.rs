//! Recorders as JSON.

use super::{CallRecord, FlightRecorder};
use crate::sys::clock::monotonic_nanoseconds;
use crate::sys::json_string::escaped;
use crate::types::CallSignature;
use std::fmt::Write;
use std::time::{SystemTime, UNIX_EPOCH};

/// Returns the recorders of this process as one JSON object on one line. `reason` is why they are written.
pub fn process_json<'a>(
    recorders: impl IntoIterator<Item = &'a FlightRecorder>,
    host: &str,
    reason: &str,
) -> String {
    let now = monotonic_nanoseconds();
    let time = SystemTime::now().duration_since(UNIX_EPOCH);
    let communicators: Vec<String> = recorders
        .into_iter()
        .map(|recorder| communicator(recorder, now))
        .collect();
    format!(
        "{{\"cinch\":{},\"pid\":{},\"host\":{},\"time\":{:.3},\"reason\":{},\"communicators\":[{}]}}\n",
        escaped(crate::VERSION),
        std::process::id(),
        escaped(host),
        time.unwrap_or_default().as_secs_f64(),
        escaped(reason),
        communicators.join(",")
    )
}

fn communicator(recorder: &FlightRecorder, now: u64) -> String {
    let label = recorder.label();
    let id: String = label.id.iter().map(|byte| format!("{byte:02x}")).collect();
    let ranks: Vec<String> = label.ranks.iter().map(|rank| escaped(&rank.text)).collect();
    let mut text = format!(
        "{{\"name\":{},\"id\":\"{id}\",\"rank\":{},\"nranks\":{},\"ranks\":[{}],\"calls\":{}",
        escaped(&label.name),
        label.rank,
        label.ranks.len(),
        ranks.join(","),
        recorder.count()
    );
    if let Some(failure) = recorder.failure() {
        // Writing to a string cannot fail, here and below.
        let _ = write!(text, ",\"failed\":{}", escaped(failure));
    }
    if let Some(waits) = recorder.waits() {
        let missing: Vec<String> = waits
            .missing
            .iter()
            .map(|(rank, what)| format!("{{\"rank\":{rank},\"what\":{}}}", escaped(what)))
            .collect();
        let _ = write!(
            text,
            ",\"waits\":{{\"seconds\":{:.3},\"missing\":[{}]}}",
            seconds(waits.since, now),
            missing.join(",")
        );
    }
    let _ = write!(text, ",\"metrics\":{}", metrics_json(recorder));
    let records: Vec<String> = recorder
        .records()
        .iter()
        .map(|record| call(record, now))
        .collect();
    let _ = write!(text, ",\"recent\":[{}]}}", records.join(","));
    text
}

/// Returns the counters of a rank as one JSON object: an array of call classes, and the waits by rank.
pub fn metrics_json(recorder: &FlightRecorder) -> String {
    let calls = recorder.metrics().calls();
    let calls = calls.iter().map(|(class, counts)| {
        let (collective, codec, size_class) = match class {
            Some(class) => (
                class.collective.name(),
                class.codec.name(),
                1u64 << class.size_log2.min(63),
            ),
            None => ("other", "other", 0),
        };
        format!(
            "{{\"collective\":\"{collective}\",\"codec\":\"{codec}\",\"size_class\":{size_class},\"calls\":{},\
             \"bytes\":{},\"wire_bytes\":{},\"raw_bytes\":{},\"timed_calls\":{},\"timed_seconds\":{:.9}}}",
            counts.calls,
            counts.bytes,
            counts.wire_bytes,
            counts.raw_bytes,
            counts.timed,
            counts.nanoseconds as f64 * 1e-9
        )
    });
    let waits = recorder.metrics().waits();
    let waits = waits
        .iter()
        .map(|(rank, time)| format!("{{\"rank\":{rank},\"seconds\":{:.9}}}", time.as_secs_f64()));
    format!(
        "{{\"calls\":[{}],\"peer_waits\":[{}]}}",
        calls.collect::<Vec<_>>().join(","),
        waits.collect::<Vec<_>>().join(",")
    )
}

fn call(record: &CallRecord, now: u64) -> String {
    format!(
        "{{\"number\":{},\"call\":{},\"state\":\"{}\",\"begun_seconds_ago\":{:.3}}}",
        record.number,
        escaped(&CallSignature::describe(&record.words)),
        record.state.name(),
        seconds(record.begun, now)
    )
}

/// Returns the seconds between two times.
fn seconds(from: u64, to: u64) -> f64 {
    to.saturating_sub(from) as f64 * 1e-9
}

#[cfg(test)]
mod tests {
    use super::super::{CallState, CommLabel, WaitRecord};
    use super::*;

    #[test]
    fn all_fields_are_there() {
        let recorder = FlightRecorder::new(CommLabel {
            name: "tp \"0\"".into(),
            id: [0xab; 8],
            rank: 1,
            ranks: Vec::new(),
            gpu: None,
        });
        recorder.begin(&[6, 0, 9, 3, 0], CallState::Running);
        recorder.set_waits(Some(WaitRecord {
            missing: vec![(0, "2 messages".into())],
            since: 0,
        }));
        recorder.fail("rank 0 died");
        let text = process_json([&recorder], "node", "SIGUSR2");
        for part in [
            "\"host\":\"node\"",
            "\"reason\":\"SIGUSR2\"",
            "\"name\":\"tp \\\"0\\\"\",\"id\":\"abababababababab\",\"rank\":1,\"nranks\":0",
            "\"calls\":1,\"failed\":\"rank 0 died\"",
            "\"missing\":[{\"rank\":0,\"what\":\"2 messages\"}]",
            "\"number\":0,\"call\":\"call 3",
            "\"state\":\"running\"",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
        assert!(text.ends_with("]}]}\n"));
    }
}
