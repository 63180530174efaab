//! Finds and loads the plug-ins of a process, each once.

use super::abi::{ProfilerFunctions, TunerFunctions};
use crate::types::{ncclResult_t, ncclSuccess};
use cinch::sys::log::{self, Level};
use cinch::sys::plugin::{PluginAbsence, PluginLibrary};
use cinch::types::Subsystem;
use std::ffi::{CStr, CString, c_char};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

/// Interval at which a thread checks whether another has ended its use of a plug-in.
const TURN_POLL_INTERVAL: Duration = Duration::from_micros(100);

/// Functions of a kind of plug-ins.
pub(super) trait PluginFunctions: Copy {
    /// Kind, for log lines.
    const KIND: &'static str;
    /// First part of the names of libraries.
    const PREFIX: &'static str;
    /// First part of the names of symbols, before the version.
    const SYMBOL: &'static str;
    /// Variable of NCCL that names the plug-in.
    const VARIABLE: &'static str;

    /// Returns the address of the plug-in's name, which may be NULL.
    fn name(&self) -> *const c_char;

    /// Returns the name of a function that the plug-in lacks.
    fn missing(&self) -> Option<&'static str>;
}

/// Versions of both interfaces that cinch takes, newest first.
const VERSIONS: [u32; 2] = [6, 5];

/// A plug-in whose functions are all there.
pub(super) struct Plugin<Functions> {
    pub(super) functions: Functions,
    /// Name that the plug-in gives itself.
    pub(super) name: String,
    /// Whether an init has failed, after which the plug-in is not used again.
    has_failed: AtomicBool,
}

// SAFETY: the addresses in `functions` are those of a library that is never unloaded, and NCCL requires of plug-ins
// that any number of threads may call them.
unsafe impl<Functions: PluginFunctions> Send for Plugin<Functions> {}
// SAFETY: see `Send`; nothing changes the addresses.
unsafe impl<Functions: PluginFunctions> Sync for Plugin<Functions> {}

impl<Functions: PluginFunctions> Plugin<Functions> {
    /// Loads the plug-in that `setting` names. Logs one warning and returns `None` if it cannot be used.
    pub(super) fn load(setting: Option<&str>) -> Option<Plugin<Functions>> {
        let (kind, variable) = (Functions::KIND, Functions::VARIABLE);
        let warn = |why: &str| {
            let named = setting.map_or(String::new(), |name| format!(" {variable}={name}"));
            log::line(
                Level::Warn,
                format_args!("no {kind} plug-in:{named}: {why}; the program runs without it"),
            );
        };
        let library = match PluginLibrary::open(Functions::PREFIX, setting) {
            Ok(library) => library,
            Err(PluginAbsence::Unwanted) => return None,
            Err(PluginAbsence::Failed(reason)) => {
                warn(&reason);
                return None;
            }
        };
        let symbol = |version: u32| {
            let name = CString::new(format!("{}{version}", Functions::SYMBOL)).ok()?;
            library.symbol(&name)
        };
        let found = VERSIONS
            .iter()
            .find_map(|&version| Some((version, symbol(version)?)));
        let Some((version, address)) = found else {
            let name = Functions::SYMBOL;
            let older = (1..VERSIONS[1])
                .rev()
                .find(|&version| symbol(version).is_some());
            let has = older.map_or("neither".into(), |older| format!("only {name}{older}"));
            let library = library.name();
            warn(&format!(
                "cinch takes {name}5 and {name}6, and {library} has {has}"
            ));
            return None;
        };
        // SAFETY: NCCL gives the symbol of each version a struct that begins with `Functions`.
        let functions = unsafe { address.cast::<Functions>().read_unaligned() };
        if let Some(missing) = functions.missing() {
            warn(&format!(
                "{} has no function {missing} in version {version}",
                library.name()
            ));
            return None;
        }
        // SAFETY: NCCL requires of plug-ins that the name is NULL or a C string.
        let name = unsafe { text(functions.name()) };
        log::line(
            Level::Info,
            format_args!(
                "{kind} plug-in \"{name}\", version {version}, of {}",
                library.name()
            ),
        );
        Some(Plugin {
            functions,
            name,
            has_failed: AtomicBool::new(false),
        })
    }

    /// Returns whether an init has failed.
    pub(super) fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::Relaxed)
    }

    /// Checks the result of an init. Logs one warning for the process if it is a failure.
    pub(super) fn accept(&self, result: ncclResult_t) -> Option<()> {
        if result == ncclSuccess {
            return Some(());
        }
        if !self.has_failed.swap(true, Ordering::Relaxed) {
            log::line(
                Level::Warn,
                format_args!(
                    "no {} plug-in: the init of \"{}\" returned {result}; the program runs without it",
                    Functions::KIND,
                    self.name
                ),
            );
        }
        None
    }

    /// Logs a line of the subsystem TUNING at level INFO, unless it `was_logged`.
    pub(super) fn log_once(&self, was_logged: &AtomicBool, text: impl FnOnce() -> String) {
        self.log_at(Level::Info, was_logged, text);
    }

    /// Logs a warning of the subsystem TUNING, unless it `was_logged`.
    pub(super) fn warn_once(&self, was_logged: &AtomicBool, text: impl FnOnce() -> String) {
        self.log_at(Level::Warn, was_logged, text);
    }

    fn log_at(&self, level: Level, was_logged: &AtomicBool, text: impl FnOnce() -> String) {
        if !was_logged.swap(true, Ordering::Relaxed) {
            let (kind, name, text) = (Functions::KIND, &self.name, text());
            log::line_of(
                Subsystem::Tuning,
                level,
                format_args!("{kind} plug-in \"{name}\": {text}"),
            );
        }
    }
}

/// # Safety
/// `name` is NULL or a C string.
unsafe fn text(name: *const c_char) -> String {
    if name.is_null() {
        return "without a name".into();
    }
    // SAFETY: the caller passes a C string, as `name` is not NULL.
    unsafe { CStr::from_ptr(name) }.to_string_lossy().into()
}

impl PluginFunctions for ProfilerFunctions {
    const KIND: &'static str = "profiler";
    const PREFIX: &'static str = "libnccl-profiler";
    const SYMBOL: &'static str = "ncclProfiler_v";
    const VARIABLE: &'static str = "NCCL_PROFILER_PLUGIN";

    fn name(&self) -> *const c_char {
        self.name
    }

    fn missing(&self) -> Option<&'static str> {
        let functions = [
            ("init", self.init.is_some()),
            ("startEvent", self.start.is_some()),
            ("stopEvent", self.stop.is_some()),
            ("recordEventState", self.record.is_some()),
            ("finalize", self.finalize.is_some()),
        ];
        first_missing(&functions)
    }
}

impl PluginFunctions for TunerFunctions {
    const KIND: &'static str = "tuner";
    const PREFIX: &'static str = "libnccl-tuner";
    const SYMBOL: &'static str = "ncclTunerPlugin_v";
    const VARIABLE: &'static str = "NCCL_TUNER_PLUGIN";

    fn name(&self) -> *const c_char {
        self.name
    }

    fn missing(&self) -> Option<&'static str> {
        let functions = [
            ("init", self.init.is_some()),
            ("getCollInfo", self.coll_info.is_some()),
            ("finalize", self.finalize.is_some()),
        ];
        first_missing(&functions)
    }
}

fn first_missing(functions: &[(&'static str, bool)]) -> Option<&'static str> {
    let missing = functions.iter().find(|(_, is_there)| !is_there);
    missing.map(|(name, _)| *name)
}

/// Process that loads or initialises plug-ins; 0 if none does. A forked child has a number of its own, so it does not
/// wait for a thread of its parent.
static TURN: AtomicU32 = AtomicU32::new(0);

/// Runs `work` while no other thread of the process does. Ranks of one process join at once, and a plug-in that is
/// initialised twice at once may refuse the second.
pub(super) fn in_turn<T>(work: impl FnOnce() -> T) -> T {
    struct Turn;
    impl Drop for Turn {
        fn drop(&mut self) {
            TURN.store(0, Ordering::Release);
        }
    }
    let own = std::process::id();
    loop {
        let held = TURN.load(Ordering::Relaxed);
        let is_free = held != own;
        if is_free
            && TURN
                .compare_exchange(held, own, Ordering::Acquire, Ordering::Relaxed)
                .is_ok()
        {
            break;
        }
        std::thread::sleep(TURN_POLL_INTERVAL);
    }
    let _turn = Turn;
    work()
}
