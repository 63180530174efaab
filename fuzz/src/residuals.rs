//! Exported residuals of error feedback, which a program stores and hands back.

use super::input::Input;
use cinch::codec::feedback::Feedback;

/// Imports residuals of the rank that they name. What was read must be exported alike.
pub fn residuals(data: &[u8]) -> Option<bool> {
    let mut header = Input(data.get(8..).unwrap_or_default());
    let (rank, nranks) = (header.u32() as usize, header.u32() as usize);
    let feedback = Feedback::import(data, rank, nranks).ok()?;
    let exported = feedback.export(rank, nranks);
    let again = Feedback::import(&exported, rank, nranks).expect("exported residuals");
    assert!(
        again.export(rank, nranks) == exported,
        "residuals change by being exported"
    );
    let _ = (feedback.check_chunks(), feedback.check_elements());
    let count =
        |(_, residuals): (u64, &cinch::codec::feedback::Residuals)| residuals.iter().count();
    let arrays: usize = feedback.iter().map(count).sum();
    Some(arrays >= 2 && nranks > 2)
}
