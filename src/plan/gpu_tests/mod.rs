//! Tests of plans for GPU kernels. They need no GPU.

mod chunks;
mod levels;
mod links;
mod selection;

use super::gpu::*;
use super::*;
use crate::cpu::Isa;
use crate::gpu_links::{LinkClass, PairLinks};
use crate::mem::PeerBufferLayout;
use crate::schedule::{self, Groups};
use crate::topology::{MachineGraph, PeerAccess, read_xml};
use crate::types::{
    CallTuning, CodecSpec, DType, Fused, Kernel, Protocol, ReduceOp, TransportKind,
};

pub(in crate::plan) fn limits(nranks: usize, resident: usize) -> Limits {
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
            oversubscribed: false,
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

pub(in crate::plan) fn request(collective: Collective, count: usize, codec: &str) -> Request {
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

fn plan(limits: Limits, request: &Request) -> std::sync::Arc<Plan> {
    Planner::new(limits, 0, Isa::Scalar).plan(request).unwrap()
}
