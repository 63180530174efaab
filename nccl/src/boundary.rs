//! The C ABI boundary: exports each function as `nccl*` and `pnccl*`, and turns errors and panics
//! into an `ncclResult_t`.

use crate::error;
use crate::types::{ncclInProgress, ncclResult_t, ncclSuccess};
use cinch::capi::core::guard::caught;
use cinch::capi::core::open_group;
use cinch::{Error, Result};

/// Result of a function that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CallProgress {
    /// The call is complete: `ncclSuccess`.
    Done,
    /// The call continues in the background: `ncclInProgress`.
    Underway,
}

/// Defines a function of nccl.h, under its name and under its second name for interposers.
///
/// The body is a `Result<CallProgress>`, or a value of the type after `returning`; `else` gives the value to
/// return after a panic. If a function marked `counted` fails, the thread's open group fails. As in NCCL,
/// these are collectives and functions that create or end communicators.
macro_rules! export {
    ($(#[doc = $doc:literal])* fn $($rest:tt)*) => {
        export!(by enter, $(#[doc = $doc])* fn $($rest)*);
    };
    ($(#[doc = $doc:literal])* counted fn $($rest:tt)*) => {
        export!(by enter_counted, $(#[doc = $doc])* fn $($rest)*);
    };
    (by $enter:ident, $(#[doc = $doc:literal])* fn $name:ident | $twin:ident
        ($($arg:ident: $type:ty),* $(,)?) $body:block) => {
        #[doc(hidden)]
        #[allow(unused_imports)]
        mod $name {
            use super::*;
            pub(super) unsafe fn body($($arg: $type),*) -> cinch::Result<$crate::boundary::CallProgress> {
                $body
            }
        }
        export!(names $(#[doc = $doc])* ($name, $twin) ($($arg: $type),*)
            -> $crate::types::ncclResult_t {
            // SAFETY: the program passes pointers that are valid as nccl.h documents for this
            // function.
            $crate::boundary::$enter(stringify!($name), || unsafe { $name::body($($arg),*) })
        });
    };
    (by enter, $(#[doc = $doc:literal])* fn $name:ident | $twin:ident
        ($($arg:ident: $type:ty),* $(,)?) returning $returns:ty $body:block else $fallback:expr) => {
        #[doc(hidden)]
        #[allow(unused_imports)]
        mod $name {
            use super::*;
            pub(super) unsafe fn body($($arg: $type),*) -> $returns {
                $body
            }
        }
        export!(names $(#[doc = $doc])* ($name, $twin) ($($arg: $type),*) -> $returns {
            $crate::boundary::enter_value(
                stringify!($name),
                // SAFETY: the program passes pointers that are valid as nccl.h documents for this
                // function.
                || unsafe { $name::body($($arg),*) },
                || $fallback,
            )
        });
    };
    // Both functions contain the body, and neither calls the other: an interposer may replace one
    // and call the other.
    (names $(#[doc = $doc:literal])* ($name:ident, $twin:ident)
        ($($arg:ident: $type:ty),*) -> $returns:ty $body:block) => {
        $(#[doc = $doc])*
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $type),*) -> $returns $body
        #[doc = concat!("`", stringify!($name), "`, for interposers.")]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $twin($($arg: $type),*) -> $returns $body
    };
}

/// Runs `body`, the body of the function `name`, and returns its code.
pub(crate) fn enter(name: &str, body: impl FnOnce() -> Result<CallProgress>) -> ncclResult_t {
    enter_with(name, body, |_| {})
}

/// Runs `body` as [`enter`] does; a failure also fails the thread's open group.
pub(crate) fn enter_counted(
    name: &str,
    body: impl FnOnce() -> Result<CallProgress>,
) -> ncclResult_t {
    enter_with(name, body, open_group::fail)
}

fn enter_with(
    name: &str,
    body: impl FnOnce() -> Result<CallProgress>,
    on_error: impl FnOnce(&Error),
) -> ncclResult_t {
    match caught(name, body) {
        Ok(CallProgress::Done) => ncclSuccess,
        Ok(CallProgress::Underway) => ncclInProgress,
        Err(error) => {
            on_error(&error);
            error::remember(&error)
        }
    }
}

/// Runs `body`, the body of the function `name`, and returns its value; `fallback` if it panics.
pub(crate) fn enter_value<T>(
    name: &str,
    body: impl FnOnce() -> T,
    fallback: impl FnOnce() -> T,
) -> T {
    caught(name, || Ok(body())).unwrap_or_else(|error| {
        error::remember(&error);
        fallback()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{ncclInternalError, ncclInvalidUsage};

    #[test]
    fn error_or_panic_becomes_code() {
        assert_eq!(enter("ncclF", || Ok(CallProgress::Done)), ncclSuccess);
        assert_eq!(
            enter("ncclF", || Ok(CallProgress::Underway)),
            ncclInProgress
        );
        let code = enter("ncclF", || Err(Error::invalid_usage("no")));
        assert_eq!(code, ncclInvalidUsage);
        assert_eq!(error::sentence(), "invalid usage: ncclF: no");
        let code = enter("ncclG", || panic!("{}", "broken"));
        assert_eq!(code, ncclInternalError);
        assert!(error::sentence().contains("ncclG panicked: broken"));
        assert_eq!(enter_value("ncclH", || panic!("again"), || 7), 7);
        assert!(error::sentence().contains("again"));
    }
}
