//! The profiler plug-in: it gets an event for each call of the program, and for each part that runs of it.

use super::CommPlugins;
use super::abi::{EventDescriptor, ProfilerFunctions, event, unset};
use super::loader::Plugin;
use super::logger::log_function;
use crate::types::{as_int, ncclSuccess};
use cinch::{Collective, Communicator};
use std::ffi::{CString, c_int, c_void};
use std::ptr::{NonNull, null};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

/// The activation mask of the process. The first init sets it, and a profiler may change it at any time.
static ACTIVATION_MASK: AtomicI32 = AtomicI32::new(0);

/// The profiler of one communicator.
pub(super) struct CommProfiler {
    plugin: &'static Plugin<ProfilerFunctions>,
    context: *mut c_void,
    pub(super) rank: c_int,
    /// Number of earlier calls of each collective.
    calls: [AtomicU64; Collective::ALL.len()],
    /// Name of the communicator, which the plug-in may read until `finalize`.
    _name: CString,
}

// SAFETY: NCCL requires of profilers that any thread may begin events of a context.
unsafe impl Send for CommProfiler {}
// SAFETY: see `Send`; nothing changes the addresses.
unsafe impl Sync for CommProfiler {}

impl CommProfiler {
    /// Initialises the profiler of a communicator. Logs one warning and returns `None` if the plug-in refuses.
    pub(super) fn init(
        plugin: &'static Plugin<ProfilerFunctions>,
        communicator: &Communicator,
    ) -> Option<CommProfiler> {
        let init = plugin.functions.init?;
        let name = CString::new(communicator.name()).unwrap_or_default();
        let int = |number| as_int(number).unwrap_or(c_int::MAX);
        let rank = int(communicator.rank());
        let mut context = unset();
        // SAFETY: the function is the plug-in's. The mask is a static, and `CommProfiler` keeps the name until
        // `finalize`.
        let result = unsafe {
            init(
                &mut context,
                communicator.number(),
                ACTIVATION_MASK.as_ptr(),
                match name.is_empty() {
                    true => null(),
                    false => name.as_ptr(),
                },
                int(communicator.info().hosts.count()),
                int(communicator.nranks()),
                rank,
                log_function,
            )
        };
        plugin.accept(result)?;
        Some(CommProfiler {
            plugin,
            context,
            rank,
            calls: [const { AtomicU64::new(0) }; Collective::ALL.len()],
            _name: name,
        })
    }

    /// Returns the number of earlier calls of `collective`, and counts this one.
    pub(super) fn next_call(&self, collective: Collective) -> u64 {
        self.calls[collective as usize].fetch_add(1, Ordering::Relaxed)
    }
}

impl Drop for CommProfiler {
    fn drop(&mut self) {
        // NCCL does not finalize a context that an init has left NULL.
        if let Some(finalize) = self.plugin.functions.finalize
            && !self.context.is_null()
        {
            // SAFETY: the function is the plug-in's, with a context that it made. Running events keep the profiler.
            unsafe { finalize(self.context) };
        }
    }
}

/// Kinds of events that the profiler wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WantedEvents(u64);

impl WantedEvents {
    /// Reads the activation mask.
    pub(super) fn read() -> WantedEvents {
        WantedEvents(u64::from(
            ACTIVATION_MASK.load(Ordering::Relaxed).cast_unsigned(),
        ))
    }

    /// Returns whether a kind of event is sent: the mask has its bit, or the bit of an event whose parent it is.
    pub(super) const fn has(self, kind: u64) -> bool {
        let causes = match kind {
            event::GROUP_API => {
                event::GROUP_API
                    | event::COLL_API
                    | event::P2P_API
                    | event::KERNEL_LAUNCH
                    | event::GROUP
                    | event::COLL
                    | event::P2P
            }
            event::COLL_API => event::COLL_API | event::COLL,
            event::P2P_API => event::P2P_API | event::P2P,
            event::GROUP => event::GROUP | event::COLL | event::P2P,
            other => other,
        };
        self.0 & causes != 0
    }

    /// Returns whether any event is sent.
    pub(super) const fn has_any(self) -> bool {
        self.has(event::GROUP_API)
    }
}

/// A running event, which stops when it is dropped.
pub(super) struct ProfilerEvent {
    /// Keeps the profiler from being finalized.
    plugins: Arc<CommPlugins>,
    handle: NonNull<c_void>,
}

impl ProfilerEvent {
    /// Starts an event. Returns `None` if the communicator has no profiler, or if the profiler leaves the event out.
    pub(super) fn start(
        plugins: &Arc<CommPlugins>,
        mut descriptor: EventDescriptor,
    ) -> Option<ProfilerEvent> {
        let profiler = plugins.profiler.as_ref()?;
        let start = profiler.plugin.functions.start?;
        let mut handle = unset();
        // SAFETY: the function is the plug-in's, with a context that it made. It reads the descriptor during the call;
        // texts in it are statics.
        let result = unsafe { start(profiler.context, &mut handle, &mut descriptor) };
        let handle = NonNull::new(handle).filter(|_| result == ncclSuccess)?;
        Some(ProfilerEvent {
            plugins: plugins.clone(),
            handle,
        })
    }

    /// Returns the plug-in's handle, for events whose parent this one is.
    pub(super) fn handle(&self) -> *mut c_void {
        self.handle.as_ptr()
    }

    /// Records that the event has reached a state.
    pub(super) fn record(&self, state: c_int) {
        let profiler = self.plugins.profiler.as_ref();
        if let Some(record) = profiler.and_then(|profiler| profiler.plugin.functions.record) {
            // SAFETY: the function is the plug-in's, with a handle that it made. These states have no arguments.
            unsafe { record(self.handle(), state, unset()) };
        }
    }
}

impl Drop for ProfilerEvent {
    fn drop(&mut self) {
        let profiler = self.plugins.profiler.as_ref();
        if let Some(stop) = profiler.and_then(|profiler| profiler.plugin.functions.stop) {
            // SAFETY: the function is the plug-in's, with a handle that it made and that has not stopped.
            unsafe { stop(self.handle()) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mask_selects_events_and_their_parents() {
        let all = [
            event::GROUP,
            event::COLL,
            event::P2P,
            event::GROUP_API,
            event::COLL_API,
            event::P2P_API,
            event::KERNEL_LAUNCH,
        ];
        let sent = |mask: u64| -> Vec<u64> {
            let wanted = WantedEvents(mask);
            all.into_iter().filter(|&kind| wanted.has(kind)).collect()
        };
        assert_eq!(sent(0), []);
        assert!(!WantedEvents(0).has_any());
        assert_eq!(
            sent(event::COLL),
            [event::GROUP, event::COLL, event::GROUP_API, event::COLL_API]
        );
        assert_eq!(
            sent(event::P2P),
            [event::GROUP, event::P2P, event::GROUP_API, event::P2P_API]
        );
        assert_eq!(
            sent(event::KERNEL_LAUNCH),
            [event::GROUP_API, event::KERNEL_LAUNCH]
        );
        assert_eq!(sent(event::GROUP_API), [event::GROUP_API]);
        assert_eq!(sent(0xfff), all);
        // Events of proxies and kernels' channels, which cinch does not have.
        assert_eq!(sent(1 << 3 | 1 << 5 | 1 << 6), []);
    }
}
