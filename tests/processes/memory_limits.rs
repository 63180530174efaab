//! Tests calls for which the memory does not suffice.

use super::child;
use super::support::{config, world};
use cinch::comm::Call;
use cinch::error::ErrorKind;
use cinch::mem::{UserBuffers, bytes_of, bytes_of_mut};
use cinch::types::TransportKind;
use cinch::{Collective, Communicator, DType};
use std::process::Command;
use std::sync::Barrier;

/// Elements of a call. Its residuals of error feedback take 128 MiB on each rank, more than an arena of malloc holds.
const COUNT: usize = 16 << 20;

/// Sets the soft limit of this process's address space.
fn limit_address_space(limit: &str) {
    let done = Command::new("prlimit")
        .args([
            "--pid",
            &std::process::id().to_string(),
            &format!("--as={limit}:"),
        ])
        .status()
        .expect("prlimit of util-linux");
    assert!(done.success());
}

/// Returns the bytes of this process's address space.
fn address_space() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = text.split(' ').next().unwrap().parse().unwrap();
    pages * 4096
}

#[test]
fn lack_of_memory_for_residuals_is_an_error_and_calls_without_feedback_work() {
    child::alone(|| {
        let barrier = Barrier::new(2);
        world(2, &config(TransportKind::Shm), |comm: Communicator| {
            let input = vec![1.25f32; COUNT];
            let mut output = vec![0f32; COUNT];
            let mut call = Call {
                codec: Some("minmax4".parse().unwrap()),
                ..Call::new(Collective::AllReduce, DType::F32, COUNT)
            };
            let mut run = |call: &Call| {
                comm.call(
                    call,
                    UserBuffers::new(bytes_of(&input), bytes_of_mut(&mut output)),
                )
            };
            run(&call).unwrap();
            call.feedback = Some(7);
            if barrier.wait().is_leader() {
                limit_address_space(&(address_space() + (1 << 20)).to_string());
            }
            barrier.wait();
            let error = run(&call).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::System, "{error}");
            assert!(
                error.message().contains("residuals of error feedback need"),
                "{error}"
            );
            call.feedback = None;
            run(&call).unwrap();
            if barrier.wait().is_leader() {
                limit_address_space("unlimited");
            }
            barrier.wait();
            call.feedback = Some(7);
            run(&call).unwrap();
        });
    });
}
