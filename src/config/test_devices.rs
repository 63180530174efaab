//! Settings of tests: the RDMA devices that they use, and how much they run.

/// Returns whether tests use this machine's RDMA devices instead of simulated ones:
/// `CINCH_TEST_RDMA=device`, as in the virtual machine of `scripts/test-rdma`. Only real devices connect
/// processes.
pub fn on_rdma_devices() -> bool {
    std::env::var_os("CINCH_TEST_RDMA").is_some_and(|value| value == "device")
}

/// Returns the number in a variable of tests; `None` if it is unset.
#[cfg(test)]
pub fn test_number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(
        text.parse()
            .unwrap_or_else(|_| panic!("{name}={text} is no number")),
    )
}
