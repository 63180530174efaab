//! Waits of the host for work of a stream.

use crate::error::{Error, ErrorKind, Result};
use crate::gpu::Event;
use crate::sync::Fault;
use std::time::{Duration, Instant};

/// Time between two checks of the fault.
const FAULT_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Waits until `event` has happened. `what` is the work before it, as a plural.
///
/// # Errors
/// The fault's reason; timeout after `limit`; the driver's errors.
pub(super) fn await_event(event: &Event, fault: &Fault, limit: Duration, what: &str) -> Result<()> {
    let begin = Instant::now();
    loop {
        match event.wait(FAULT_POLL_INTERVAL.min(limit)) {
            Err(error) if error.kind() == ErrorKind::Timeout => {}
            ended => return ended,
        }
        fault.ends_waits()?;
        if begin.elapsed() >= limit {
            return Err(Error::new(
                ErrorKind::Timeout,
                format!("{what} have not ended in {:.0} s", limit.as_secs_f64()),
            ));
        }
    }
}
