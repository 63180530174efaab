//! The part of the fuzz target `members` that reads frames of the control plane.

use super::frames::{Assembly, read_contributions, write_contributions};
use crate::wire::Reader;

/// Largest message that the target assembles, in bytes.
const LIMIT: u64 = 1 << 16;

/// Assembles pieces, each preceded by its length, and reads the whole as contributions. What is read must be
/// written alike. Returns whether three ranks contributed bytes in one message of several pieces.
pub(in crate::bootstrap) fn contributions(data: &[u8]) -> Option<bool> {
    let mut reader = Reader(data);
    let count = usize::from(reader.u8().unwrap_or(0) & 15);
    let mut assembly = Assembly::default();
    let mut pieces = 0;
    while let Ok(length) = reader.u8() {
        let piece = reader.bytes(usize::from(length).min(reader.0.len()));
        pieces += 1;
        let Some((_, whole)) = assembly.add(piece.unwrap_or_default(), LIMIT).ok()? else {
            continue;
        };
        assert!(whole.len() as u64 <= LIMIT);
        if let Ok(read) = read_contributions(&whole, count) {
            let mut again = Vec::new();
            write_contributions(&read, |bytes| again.extend_from_slice(bytes));
            assert!(again == whole, "contributions are written differently");
            let all_give = read.iter().all(|one| !one.is_empty());
            return Some(pieces > 1 && read.len() == 3 && all_give);
        }
    }
    None
}
