//! Hook for warnings of the control plane, such as of a stopped rank.

use crate::sys::log;
use std::sync::Arc;

/// Receives warnings that a user should see.
#[derive(Clone)]
pub struct WarningHook(Arc<dyn Fn(&str) + Send + Sync>);

impl WarningHook {
    /// Calls `hook` with each warning, from the control thread: it must not block.
    pub fn new(hook: impl Fn(&str) + Send + Sync + 'static) -> WarningHook {
        WarningHook(Arc::new(hook))
    }

    /// Writes warnings to the log.
    pub fn log() -> WarningHook {
        WarningHook::new(|sentence| log::line(log::Level::Warn, format_args!("{sentence}")))
    }

    pub(super) fn warn(&self, sentence: &str) {
        (self.0)(sentence);
    }
}

impl std::fmt::Debug for WarningHook {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("WarningHook(..)")
    }
}
