//! The fuzz targets: what another process, a file or a program hands to the library, one target for each format.
//!
//! Programs in `fuzz_targets/` pass inputs of libFuzzer to [`run`]; `tests/fuzz` replays the corpus, and changes of
//! it, through the same bodies on a stable toolchain. A body panics if a property is broken. It returns `None` for
//! an input that is refused. For other inputs it returns whether they reached a structure that no seed of the corpus
//! has, where `scripts/fuzz --self-test` plants a defect.
//!
//! Bodies that need private parts of the library are modules of it, behind its feature `internal`.

mod c_calls;
mod codec_decode;
mod environment;
#[path = "../../cli/src/host_file.rs"]
mod host_file;
mod input;
// The tool opens files itself.
#[allow(dead_code)]
#[path = "../../cli/src/npy.rs"]
mod npy;
mod npy_file;
mod residuals;
mod slots;
mod topology;
mod tuning_table;

use std::sync::OnceLock;

/// A fuzz target.
pub struct Target {
    /// Name of its program, and of its folder in the corpus.
    pub name: &'static str,
    /// Runs one input; see the module's description.
    pub body: fn(&[u8]) -> Option<bool>,
}

/// All targets.
pub const TARGETS: [Target; 13] = [
    target("id", cinch::bootstrap::fuzz::id),
    target("handshake", cinch::bootstrap::fuzz::handshake),
    target("framed_stream", cinch::bootstrap::fuzz::framed_stream),
    target("members", members),
    target("pump", cinch::transport::fuzz::pump),
    target("slots", slots::slots),
    target("codec_decode", codec_decode::codec_decode),
    target("tuning_table", tuning_table::tuning_table),
    target("topology", topology::topology),
    target("environment", environment::environment),
    target("npy", npy_file::npy),
    target("residuals", residuals::residuals),
    target("c_calls", c_calls::c_calls),
];

const fn target(name: &'static str, body: fn(&[u8]) -> Option<bool>) -> Target {
    Target { name, body }
}

/// Reads what members of a communicator send each other: over the control plane, and before they connect.
fn members(data: &[u8]) -> Option<bool> {
    match data.split_first()? {
        (0, rest) => cinch::transport::fuzz::connect_info(rest),
        (_, rest) => cinch::bootstrap::fuzz::members(rest),
    }
}

/// Runs an input through the target `name`. With `FUZZ_PLANTED` in the environment, inputs that reach the place of
/// the planted defect panic.
pub fn run(name: &str, data: &[u8]) {
    static IS_PLANTED: OnceLock<bool> = OnceLock::new();
    let target = TARGETS.iter().find(|target| target.name == name);
    let target = target.expect("no target has this name");
    let reached = (target.body)(data);
    if reached == Some(true)
        && *IS_PLANTED.get_or_init(|| std::env::var_os("FUZZ_PLANTED").is_some())
    {
        panic!("planted defect of {name}");
    }
}
