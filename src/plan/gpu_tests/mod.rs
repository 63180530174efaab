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
use crate::types::{CallTuning, CodecSpec, DType, Kernel, Protocol, TransportKind};

pub(in crate::plan) use crate::testing::{gpu_limits as limits, plan_request as request};

fn plan(limits: Limits, request: &Request) -> std::sync::Arc<Plan> {
    Planner::new(limits, 0, Isa::Scalar).plan(request).unwrap()
}
