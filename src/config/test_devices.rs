//! A setting of tests: the RDMA devices that they use.

/// Returns whether tests use this machine's RDMA devices instead of simulated ones:
/// `CINCH_TEST_RDMA=device`, as in the virtual machine of `scripts/test-rdma`. Only real devices connect
/// processes.
pub fn on_rdma_devices() -> bool {
    std::env::var_os("CINCH_TEST_RDMA").is_some_and(|value| value == "device")
}
