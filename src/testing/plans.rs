//! Limits and requests for plans of GPU kernels. They need no GPU.

use crate::mem::PeerBufferLayout;
use crate::plan::{GpuLimits, Limits, MachineFacts, Request, Resident};
use crate::schedule::Groups;
use crate::transport::HostLoad;
use crate::types::{CallTuning, Collective, DType, Fused, ReduceOp, TransportKind};

/// Returns the limits of `nranks` GPUs of one host, of whose kernels `resident` blocks are resident at once.
pub fn gpu_limits(nranks: usize, resident: usize) -> Limits {
    let shape = PeerBufferLayout::new(nranks, 64 << 20, 64).unwrap();
    Limits {
        nranks,
        slot_bytes: 0,
        slots: 2,
        channels: 64,
        algorithm: None,
        machine: MachineFacts {
            transport: TransportKind::Cuda,
            inside: TransportKind::Cuda,
            load: HostLoad::LIGHT,
            measured: None,
        },
        hosts: Groups::ONE,
        topology: None,
        gpu: Some(GpuLimits {
            ll128: true,
            ..GpuLimits::new(&shape, Resident::both(resident), 64)
        }),
    }
}

/// Returns the request of a sum of `count` fp32, or of another collective with as many, which runs with `codec`.
pub fn plan_request(collective: Collective, count: usize, codec: &str) -> Request {
    Request {
        collective,
        dtype: DType::F32,
        op: ReduceOp::Sum,
        count,
        root: 0,
        peer: usize::from(collective == Collective::SendRecv),
        codec: codec.parse().unwrap(),
        algorithm: None,
        tuning: CallTuning::AUTO,
        tensor: None,
        feedback: None,
        fused: Fused::ALONE,
    }
}
