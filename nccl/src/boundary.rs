//! The boundary: both names of a function, and no panic or error that leaves it other than as a
//! code.

use crate::types::{ncclInProgress, ncclResult_t, ncclSuccess};
use crate::{error, group};
use cinch::{Error, Result};

/// What a function that did not fail returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CallProgress {
    /// It is done.
    Done,
    /// It goes on in the background: `ncclInProgress`.
    Underway,
}

/// Defines a function of the interface under both of its names. The body is a
/// `Result<CallProgress>`, or what `returning` says, with the value for a panic behind it.
macro_rules! export {
    ($(#[doc = $doc:literal])* fn $($rest:tt)*) => {
        export!(by enter, $(#[doc = $doc])* fn $($rest)*);
    };
    // A part of the open group, if one is: its failure is the group's.
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
            // SAFETY: the caller's arguments are as the header says.
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
                // SAFETY: the caller's arguments are as the header says.
                || unsafe { $name::body($($arg),*) },
                || $fallback,
            )
        });
    };
    // Neither name calls the other: a program may put a function of its own in the place of one,
    // and call the other from it.
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

/// The code of what `body`, the function `name`, returns.
pub(crate) fn enter(name: &str, body: impl FnOnce() -> Result<CallProgress>) -> ncclResult_t {
    enter_with(name, body, |_| {})
}

fn enter_with(
    name: &str,
    body: impl FnOnce() -> Result<CallProgress>,
    failed: impl FnOnce(&Error),
) -> ncclResult_t {
    match cinch::capi::caught(name, body) {
        Ok(CallProgress::Done) => ncclSuccess,
        Ok(CallProgress::Underway) => ncclInProgress,
        Err(error) => {
            failed(&error);
            error::remember(&error)
        }
    }
}

/// The same for what is a part of the thread's open group.
pub(crate) fn enter_counted(
    name: &str,
    body: impl FnOnce() -> Result<CallProgress>,
) -> ncclResult_t {
    enter_with(name, body, group::fail)
}

pub(crate) fn enter_value<T>(
    name: &str,
    body: impl FnOnce() -> T,
    fallback: impl FnOnce() -> T,
) -> T {
    cinch::capi::caught(name, || Ok(body())).unwrap_or_else(|error| {
        error::remember(&error);
        fallback()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{ncclInternalError, ncclInvalidUsage};

    #[test]
    fn nothing_but_codes_leaves() {
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
