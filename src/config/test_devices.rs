//! What of this machine tests are to use.

/// Whether tests of RDMA go through this machine's devices, and not through simulated ones:
/// `CINCH_TEST_RDMA=device`, as in the guest of `scripts/test-rdma`. Processes can then, too.
pub fn on_rdma_devices() -> bool {
    std::env::var_os("CINCH_TEST_RDMA").is_some_and(|value| value == "device")
}
