//! Keeps panics from crossing the C boundary, and runs functions in the standard floating-point
//! environment.

use crate::cpu::FloatEnvironment;
use crate::error::{Error, Result};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs `body`, the body of the C function `name`, in the standard floating-point environment.
///
/// # Errors
/// Errors of `body` with the function's name in front; internal if it panics.
pub fn caught<T>(name: &str, body: impl FnOnce() -> Result<T>) -> Result<T> {
    let _environment = FloatEnvironment::standard();
    // A panic leaves no broken state behind: locks are held for single inserts and removals only.
    // The error also fails the thread's open group, which the panic may have interrupted.
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(result) => result.map_err(|error| error.context(name)),
        Err(payload) => Err(panicked(name, payload)),
    }
}

fn panicked(name: &str, payload: Box<dyn Any + Send>) -> Error {
    let message = payload
        .downcast_ref::<&str>()
        .map(|text| text.to_string())
        .or_else(|| payload.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".into());
    // Dropping the panic's payload could panic again, outside of catch_unwind.
    std::mem::forget(payload);
    Error::internal(format!(
        "{name} panicked: {message}; this is a defect of cinch {}, please report it",
        crate::VERSION
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu;

    #[test]
    fn caught_body_runs_with_standard_arithmetic() {
        cpu::under(cpu::STRANGE[0], || {
            let body = || Ok(cpu::is_standard());
            assert!(caught("cinch_f", body).unwrap());
        });
    }
}
