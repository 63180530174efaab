//! Tuning tables, which come from a file.

use cinch::Collective;
use cinch::plan::{TableEntry, TuningTable, WireClass};

/// Parses a table, looks up calls of many sizes, and writes the table.
pub fn tuning_table(data: &[u8]) -> Option<bool> {
    let text = String::from_utf8_lossy(data);
    let table = match TuningTable::parse("fuzz", &text) {
        Ok(table) => table,
        Err(error) => {
            assert!(error.message().contains("line"), "{error}");
            return None;
        }
    };
    for collective in [Collective::AllReduce, Collective::AllGather] {
        for codec in [cinch::CodecKind::Raw, cinch::CodecKind::Linear8] {
            for element_bytes in [1, 4] {
                let wire = WireClass {
                    codec,
                    element_bytes,
                };
                for shift in 0..usize::BITS {
                    let choice = table.choice(collective, wire, 1 << shift);
                    let seconds = choice
                        .and_then(|choice| choice.line)
                        .map(|line| line.seconds);
                    assert!(seconds.is_none_or(|seconds| seconds >= 0.0), "{seconds:?}");
                }
            }
        }
    }
    let _ = (table.cliffs(), table.fingerprint().len());
    let entries: Vec<_> = table.entries().copied().collect();
    for entry in &entries {
        assert!(entry.from < entry.to, "an empty range of sizes");
    }
    let has_chunk = |entry: &TableEntry| entry.variant.chunk > 0;
    Some(entries.iter().any(has_chunk))
}
