//! Tests that start processes, or that depend on the state of their own process. Covers ranks as processes,
//! the command line tool, the NCCL drop-in, C programs and examples.
//!
//! This program runs itself again for each rank process, with `rank_process` as the only test.

mod bootstrap_leftovers;
mod bootstrap_processes;
mod child;
mod containers;
mod examples;
mod ffi;
mod fork;
mod gpu_links;
mod grow;
mod grow_arguments;
mod join_stress;
mod memory_limits;
mod metrics;
mod nccl;
mod near_networks;
mod nvtx;
mod other_users;
mod ps;
mod rank_death;
mod rank_group;
mod shrink;
mod soak;
mod ssh_launcher;
mod stopped_init;
mod stops;
#[path = "../support/mod.rs"]
mod support;
mod teardown;
mod tool;
mod unauthenticated_peers;
mod wire;

/// Runs ranks for the test that started this process; passes without effect if none did.
#[test]
fn rank_process() {
    let Some((module, task)) = child::task() else {
        return;
    };
    match module.as_str() {
        "bootstrap_processes" => bootstrap_processes::rank_process(&task),
        "containers" => containers::rank_process(&task),
        "fork" => fork::rank_process(&task),
        "gpu_links" => gpu_links::rank_process(&task),
        "grow" => grow::rank_process(&task),
        "near_networks" => near_networks::rank_process(&task),
        "other_users" => other_users::rank_process(&task),
        "ps" => ps::rank_process(&task),
        "rank_death" => rank_death::rank_process(&task),
        "stopped_init" => stopped_init::rank_process(&task),
        "stops" => stops::rank_process(&task),
        "shrink" => shrink::rank_process(&task),
        "metrics" => metrics::rank_process(&task),
        "soak" => soak::rank_process(&task),
        "wire" => wire::rank_process(&task),
        other => panic!("{} names {other}, which has no ranks", child::TASK),
    }
}
