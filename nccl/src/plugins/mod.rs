//! NCCL's plug-ins: a profiler, which gets events of calls, and a tuner, which selects algorithms.
//!
//! `abi` has the layouts of the interfaces, `loader` finds a plug-in, `logger` is the log function that plug-ins get,
//! `names` and `costs` translate to NCCL's names and numbers. `docs/nccl.md` lists what is honoured.

mod abi;
mod costs;
mod events;
mod loader;
mod logger;
mod names;
mod profiler;
mod tuner;

pub(crate) use events::{GroupEvents, is_captured, record, take};

use abi::{ProfilerFunctions, TunerFunctions};
use cinch::Communicator;
use cinch::comm::Call;
use cinch::sys::fork_safe::ForkSafeOnce;
use costs::CostCache;
use loader::{Plugin, PluginFunctions, in_turn};
use profiler::{CommProfiler, WantedEvents};
use std::fmt;
use std::sync::Arc;
use tuner::CommTuner;

static PROFILER: ForkSafeOnce<Option<Plugin<ProfilerFunctions>>> = ForkSafeOnce::new();
static TUNER: ForkSafeOnce<Option<Plugin<TunerFunctions>>> = ForkSafeOnce::new();

/// The plug-ins of one communicator, which are finalized when it is dropped.
pub(crate) struct CommPlugins {
    profiler: Option<CommProfiler>,
    tuner: Option<CommTuner>,
    costs: CostCache,
}

impl CommPlugins {
    /// Initialises the plug-ins of a communicator. The settings of the first communicator of a process name them.
    /// Returns `None` if there are none.
    pub(crate) fn open(communicator: &Communicator) -> Option<Arc<CommPlugins>> {
        if matches!((PROFILER.get(), TUNER.get()), (Some(None), Some(None))) {
            return None;
        }
        in_turn(|| {
            let config = communicator.config();
            let profiler = usable(&PROFILER, config.nccl_profiler_plugin.as_deref())
                .and_then(|plugin| CommProfiler::init(plugin, communicator));
            let tuner = usable(&TUNER, config.nccl_tuner_plugin.as_deref())
                .and_then(|plugin| CommTuner::init(plugin, communicator));
            let has_any = profiler.is_some() || tuner.is_some();
            has_any.then(|| {
                Arc::new(CommPlugins {
                    profiler,
                    tuner,
                    costs: CostCache::default(),
                })
            })
        })
    }

    /// Selects algorithm and protocol of a call that names no algorithm, and bounds its channels, as the tuner decides.
    pub(crate) fn tune(&self, communicator: &Communicator, call: &mut Call) {
        if let Some(tuner) = &self.tuner {
            tuner.tune(communicator, &self.costs, call);
        }
    }

    /// Returns whether the profiler wants any event.
    pub(crate) fn is_profiling(&self) -> bool {
        self.profiler.is_some() && WantedEvents::read().has_any()
    }
}

impl fmt::Debug for CommPlugins {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CommPlugins(..)")
    }
}

/// Returns the plug-in that `setting` names; the first call of a process loads it.
fn usable<Functions: PluginFunctions>(
    plugin: &'static ForkSafeOnce<Option<Plugin<Functions>>>,
    setting: Option<&str>,
) -> Option<&'static Plugin<Functions>> {
    let loaded = plugin.get_or_init(|| Plugin::load(setting)).as_ref()?;
    (!loaded.has_failed()).then_some(loaded)
}
