//! Where the control plane reports what is no error, such as a frozen rank.

use crate::sys::log;
use std::sync::Arc;

/// A hook for sentences that a user should see.
#[derive(Clone)]
pub struct Notice(Arc<dyn Fn(&str) + Send + Sync>);

impl Notice {
    /// Calls `hook` with each sentence, from the control plane's thread: it must not block.
    pub fn new(hook: impl Fn(&str) + Send + Sync + 'static) -> Notice {
        Notice(Arc::new(hook))
    }

    /// Writes warnings to the log.
    pub fn log() -> Notice {
        Notice::new(|sentence| log::line(log::Level::Warn, format_args!("{sentence}")))
    }

    pub(super) fn say(&self, sentence: &str) {
        (self.0)(sentence);
    }
}

impl std::fmt::Debug for Notice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Notice(..)")
    }
}
