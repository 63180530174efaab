//! Reads `ncclCollConfig_t`, the options of one collective call.

use crate::extension::{self, ncclConfigExt_t};
use crate::types::{NCCL_API_MAGIC, cudaEvent_t};
use crate::versioned::{self, Unset};
use cinch::types::{Algorithm, CodecSpec};
use cinch::{Error, Result};
use std::ffi::{CStr, c_char, c_int};
use std::ptr::{null, null_mut};

const INT: c_int = c_int::UNSET;

versioned! {
    /// The struct `ncclCollConfig_t` as in NCCL 2.32.
    struct ncclCollConfig_t, "NCCL_COLLCONFIG_INITIALIZER", magic NCCL_API_MAGIC;
    ext: *const ncclConfigExt_t = null(), since 23100;
    minCTAs: c_int = INT, since 23100;
    maxCTAs: c_int = INT, since 23100;
    nvlsCTAs: c_int = INT, since 23100;
    cgaClusterSize: c_int = INT, since 23100;
    algSelection: *const c_char = null(), since 23100;
    forceAlgSelection: c_int = 1, since 23100;
    CTAPolicy: c_int = INT, since 23100;
    userProfilerTag: u64 = 0, since 23100;
    launchCompletionEvent: cudaEvent_t = null_mut(), since 23200;
}

/// Fields of [`ncclCollConfig_t`] that affect cinch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct CallOptions {
    /// Codec of the call; `None` if the program set none.
    pub(crate) codec: Option<CodecSpec>,
    /// Algorithm of the call; `None` if the program set none.
    pub(crate) algorithm: Option<Algorithm>,
}

impl CallOptions {
    /// Reads the options at `config`; for NULL none are set.
    ///
    /// # Errors
    /// Invalid argument or invalid usage for options that cinch does not have.
    ///
    /// # Safety
    /// `config` is NULL, or readable for the size that it gives, with valid strings and options.
    pub(crate) unsafe fn read(config: *const ncclCollConfig_t) -> Result<CallOptions> {
        // SAFETY: the caller passes `config` as NULL or readable for the size that it gives.
        let Some(config) = (unsafe { versioned::read(config)? }) else {
            return Ok(CallOptions::default());
        };
        if !config.launchCompletionEvent.is_null() {
            return Err(Error::invalid_usage(
                "ncclCollConfig_t.launchCompletionEvent is set, which cinch does not record: leave \
                 it NULL and record the event on the stream behind the call",
            ));
        }
        Ok(CallOptions {
            // SAFETY: the caller passes a config whose list of options ends and has valid strings.
            codec: unsafe { extension::codec(config.ext)? },
            // SAFETY: the caller passes a config whose strings are NULL or valid.
            algorithm: unsafe { algorithm(config.algSelection, config.forceAlgSelection != 0)? },
        })
    }
}

/// Returns the algorithm that a list of names selects; `None` leaves the choice to cinch.
///
/// Unless forced, a list is a hint. A forced list must contain exactly one algorithm of cinch.
///
/// # Errors
/// Invalid argument if a forced list does not.
///
/// # Safety
/// `text` is NULL or a valid string.
unsafe fn algorithm(text: *const c_char, force: bool) -> Result<Option<Algorithm>> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller passes a valid string, as `text` is not NULL.
    let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
    if text.trim().is_empty() {
        return Ok(None);
    }
    let names: Vec<&str> = text.split(',').map(str::trim).collect();
    let known: Vec<Algorithm> = names
        .iter()
        .filter_map(|name| Algorithm::from_name(&name.to_ascii_lowercase()))
        .collect();
    match known[..] {
        [one] if names.len() == 1 => Ok(Some(one)),
        [] | [_, ..] if !force => Ok(None),
        [one] => Ok(Some(one)),
        _ => Err(Error::invalid_argument(format!(
            "ncclCollConfig_t.algSelection \"{text}\" is forced and names {} algorithms of cinch; \
             name one of {}, or clear forceAlgSelection",
            known.len(),
            Algorithm::ALL.map(Algorithm::name).join(", ")
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::versioned::NcclStruct;

    fn read(change: impl Fn(&mut ncclCollConfig_t)) -> Result<CallOptions> {
        let mut config = ncclCollConfig_t {
            version: 23203,
            ..ncclCollConfig_t::unset()
        };
        change(&mut config);
        // SAFETY: `config` is a complete struct of this test with static strings.
        unsafe { CallOptions::read(&config) }
    }

    #[test]
    fn algorithm_is_selected_by_name() {
        assert_eq!(size_of::<ncclCollConfig_t>(), 72);
        assert_eq!(read(|_| {}).unwrap(), CallOptions::default());
        let ask = |text: &'static CStr, force: c_int| {
            read(|config| {
                config.algSelection = text.as_ptr();
                config.forceAlgSelection = force;
            })
            .map(|choice| choice.algorithm)
        };
        assert_eq!(ask(c"RING", 1).unwrap(), Some(Algorithm::Ring));
        assert_eq!(ask(c"nvls, tree", 1).unwrap(), Some(Algorithm::Tree));
        assert_eq!(ask(c"", 1).unwrap(), None);
        assert_eq!(ask(c"nvls", 0).unwrap(), None);
        assert_eq!(ask(c"ring,tree", 0).unwrap(), None);
        for text in [c"nvls", c"ring,tree"] {
            let error = ask(text, 1).unwrap_err();
            assert!(error.message().contains("ring, tree, oneshot"), "{error}");
        }
    }

    #[test]
    fn event_in_older_config_is_ignored() {
        let set = |version: u32| {
            read(|config| {
                config.version = version;
                config.launchCompletionEvent = std::ptr::without_provenance_mut(64);
            })
        };
        assert!(set(23102).is_ok());
        assert!(
            set(23203)
                .unwrap_err()
                .message()
                .contains("launchCompletionEvent")
        );
        let error = read(|config| config.magic = 7).unwrap_err();
        assert!(error.message().contains("NCCL_COLLCONFIG_INITIALIZER"));
    }
}
