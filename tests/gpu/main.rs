//! Tests of the library on GPUs: on all GPUs of the machine, or with several ranks on a single GPU.
//! The program also runs on machines without cargo: build it with `cargo test --no-run --test gpu`,
//! copy it, and start it, as `scripts/test-gpu` does.
//!
//! A worker process runs the checks one after the other. The supervisor process waits for each
//! check with a deadline. It starts another worker after a check that failed, hung or crashed.
//! Without a driver or without kernels every check is skipped, with the reason.

mod arena;
mod arrays;
mod automatic;
mod case;
mod codecs;
mod coded;
mod collectives;
mod cover;
mod early;
mod factors;
mod failures;
mod feedback;
mod figures;
mod graphs;
mod groups;
mod harness;
mod hosts;
mod many_ranks;
mod models;
mod options;
mod packed_copies;
mod pinned;
mod ranks;
mod recovery;
mod refusals;
mod samples;
mod scales;
mod soak;
mod statistics;
mod supervise;
mod topology;
mod world;

use harness::Check;
use options::{Options, Role};
use std::process::ExitCode;

fn main() -> ExitCode {
    let options = match Options::parse(std::env::args().skip(1)) {
        Ok(options) => options,
        Err(why) => {
            eprintln!("{why}\n{}", options::USAGE);
            return ExitCode::from(2);
        }
    };
    match &options.role {
        Role::Supervisor => supervise::run(&options, &checks(&options)),
        Role::Worker { from } => harness::work(&options, &checks(&options), *from),
        Role::Rank { task } => models::run_rank(&options, task),
    }
}

/// Returns the checks that match the filter. Their order is equal in each process of a run, because
/// processes identify checks by number.
fn checks(options: &Options) -> Vec<Check> {
    let mut all = Vec::new();
    all.extend(collectives::checks(options));
    all.extend(codecs::checks(options));
    all.extend(arrays::checks(options));
    all.extend(packed_copies::checks(options));
    all.extend(coded::checks(options));
    all.extend(many_ranks::checks());
    all.extend(models::checks(options));
    all.extend(factors::checks());
    all.extend(refusals::checks());
    all.extend(graphs::checks(options));
    all.extend(groups::checks(options));
    all.extend(automatic::checks(options));
    all.extend(early::checks());
    all.extend(feedback::checks(options));
    all.extend(scales::checks(options));
    all.extend(samples::checks());
    all.extend(statistics::checks(options));
    all.extend(failures::checks());
    all.extend(figures::checks());
    all.extend(pinned::checks());
    all.extend(recovery::checks());
    all.extend(hosts::checks(options));
    all.extend(topology::checks(options));
    all.extend(soak::checks(options));
    let kept = |check: &Check| match &options.filter {
        None => true,
        Some(part) => check.name.contains(part.as_str()),
    };
    all.retain(kept);
    all
}
