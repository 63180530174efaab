//! Choices on GPUs whose ranks reach each other through pinned host memory only.

use super::gpu_tests::{limits, request};
use super::*;
use crate::cpu::Isa;
use crate::gpu_links::{LinkClass, PairLinks};
use crate::types::KernelProtocol;

/// Returns the limits of ranks that share a GPU without peer memory.
fn pinned(nranks: usize) -> Limits {
    let mut pairs = PairLinks::NVLINK;
    pairs.ranks_per_gpu = nranks;
    for one in 0..nranks {
        (0..one).for_each(|other| pairs.set(one, other, LinkClass::Host));
    }
    let mut limits = limits(nranks, 66 / nranks);
    limits.gpu = limits.gpu.map(|gpu| GpuLimits {
        ll128: false,
        pairs,
        ..gpu
    });
    limits
}

/// "Protocols over pinned host memory" in benches/FIGURES.md has the times of all kernels at these sizes.
#[test]
fn sizes_choose_the_fastest_measured_kernel() {
    for (nranks, bytes, kernel) in [
        (2, 4 << 10, KernelProtocol::FUSED_LL),
        (2, 32 << 10, KernelProtocol::FUSED_LL),
        (2, 64 << 10, KernelProtocol::FUSED_LL),
        (2, 1 << 20, KernelProtocol::SIMPLE),
        (4, 32 << 10, KernelProtocol::FUSED_LL),
        (4, 64 << 10, KernelProtocol::FUSED_LL),
        (4, 256 << 10, KernelProtocol::SIMPLE),
        (4, 1 << 20, KernelProtocol::SIMPLE),
    ] {
        let request = request(Collective::AllReduce, bytes / 4, "raw");
        let mut planner = Planner::new(pinned(nranks), 0, Isa::Scalar);
        println!("{}", planner.explain(&request).unwrap());
        let plan = planner.plan(&request).unwrap();
        assert_eq!(plan.kernel, kernel, "{nranks} ranks, {bytes} bytes");
        // Each rank writes to one neighbor, which host memory carries faster than writes to all.
        assert_eq!(plan.algorithm == Algorithm::Ring, bytes == 1 << 20);
    }
}

/// Calls through a codec take the fused kernels of packets. A table of coded calls in the same section has the times of both
/// algorithms.
#[test]
fn coded_sizes_choose_the_fastest_algorithm() {
    use Algorithm::{Direct, OneShot};
    for (nranks, kib, algorithm) in [
        (2, 4, OneShot),
        (2, 64, OneShot),
        (2, 256, OneShot),
        (4, 4, OneShot),
        (4, 64, Direct),
        (4, 256, Direct),
    ] {
        for codec in ["linear8", "dynamic8", "minmax4"] {
            let request = request(Collective::AllReduce, kib << 8, codec);
            let mut planner = Planner::new(pinned(nranks), 0, Isa::Scalar);
            println!("{}", planner.explain(&request).unwrap());
            let plan = planner.plan(&request).unwrap();
            let chosen = (plan.algorithm, plan.kernel);
            let wanted = (algorithm, KernelProtocol::FUSED_LL);
            assert_eq!(chosen, wanted, "{codec}, {nranks} ranks, {kib} KiB");
        }
    }
}
