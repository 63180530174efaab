//! Packed schedules with messages of another encoding inside groups than between them, compared with the bits of the host
//! engine.

use super::super::tests::interpreter::{World, floats};
use super::tests::only;
use super::*;
use crate::comm::Call;
use crate::config::{Config, FileChoice};
use crate::cpu::Isa;
use crate::gpu::abi;
use crate::mem::{PeerBufferLayout, UserBuffers};
use crate::plan::{GpuLimits, Limits, Planner, Request, Resident};
use crate::testing::{Data, Pattern, gpu_limits, local_world, plan_request};
use crate::topology::{MachineGraph, PeerAccess, RankTopology, read_xml};
use crate::types::{Algorithm, Collective, DType};
use std::sync::Arc;

const COUNT: usize = 100_003;

fn path(file: &str) -> String {
    format!("{}/tests/topology/{file}", env!("CARGO_MANIFEST_DIR"))
}

/// Returns the limits of 8 ranks on the GPUs of a machine file, which run hierarchical schedules.
fn limits(file: &str) -> Limits {
    let machine = read_xml(&std::fs::read_to_string(path(file)).unwrap()).unwrap();
    let gpus = [0, 1, 2, 3, 4, 5, 6, 7];
    let graph = MachineGraph::new(&machine);
    let topology = RankTopology::new(&graph, &gpus, &PeerAccess::Rule).unwrap();
    let shape = PeerBufferLayout::new(8, 64 << 20, 64).unwrap();
    Limits {
        slots: 4,
        algorithm: Some(Algorithm::Hierarchical),
        topology: Some(Arc::new(topology)),
        gpu: Some(GpuLimits::new(&shape, Resident::both(16), 64)),
        ..gpu_limits(8, 16)
    }
}

fn request(collective: Collective, codec: &str) -> Request {
    plan_request(collective, COUNT, codec)
}

fn data() -> Data {
    Data {
        pattern: Pattern::Gaussian,
        dtype: DType::F32,
        seed: 11,
    }
}

/// Returns the outputs of all ranks by their packed schedules.
fn packed(limits: &Limits, request: &Request) -> Vec<Vec<f32>> {
    let inputs: Vec<Vec<f32>> = (0..8)
        .map(|rank| floats(&data().vec(rank, COUNT)))
        .collect();
    let mut outputs = vec![vec![f32::NAN; COUNT]; 8];
    let mut codec = None;
    let mut slots = 0;
    let launches: Vec<Vec<WorkBuffer>> = (0..8)
        .map(|rank| {
            let plan = Planner::new(limits.clone(), rank, Isa::Scalar).plan(request);
            let plan = plan.unwrap();
            assert_eq!(plan.algorithm, Algorithm::Hierarchical);
            assert!(plan.codec.is_some());
            let packed = only(&plan);
            let at = Addresses {
                input: inputs[rank].as_ptr().expose_provenance() as u64,
                output: outputs[rank].as_mut_ptr().expose_provenance() as u64,
            };
            let work = work(&plan, request.op, at).unwrap();
            assert_ne!(work.intra, abi::INTRA_CODED);
            (codec, slots) = (plan.codec.clone(), plan.pattern.slots());
            let mut work_buffer = WorkBuffer::default();
            work_buffer.add(&packed, work).unwrap();
            vec![work_buffer]
        })
        .collect();
    assert!(World::new(&launches, codec.as_deref(), slots).run());
    outputs
}

/// Returns the outputs of all ranks by the host engine, with the limits and thus the cuts of the GPUs.
fn on_host(file: &str, limits: &Limits, codec: &str) -> Vec<Vec<f32>> {
    let config = Config {
        slot_bytes: 1 << 20,
        slots: 4,
        codec: codec.parse().unwrap(),
        // Ranks without groups have one codec.
        topology: FileChoice::File(path(file).into()),
        ..Config::default()
    };
    local_world(8, &config, |comm| {
        comm.copy_limits(limits.clone()).unwrap();
        let input = data().vec(comm.rank(), COUNT);
        let mut output = vec![0; input.len()];
        let call = Call::new(Collective::AllReduce, DType::F32, COUNT);
        comm.call(&call, UserBuffers::new(&input, &mut output))
            .unwrap();
        floats(&output)
    })
}

#[test]
fn messages_of_another_encoding_inside_groups_give_the_bits_of_the_host() {
    let bits = |values: &[f32]| -> Vec<u32> { values.iter().map(|x| x.to_bits()).collect() };
    // Switches, and sockets.
    for file in ["B.xml", "F.xml"] {
        let limits = limits(file);
        for codec in [
            "intra=raw,inter=linear8",
            "intra=raw,inter=dynamic8",
            "intra=cast16,inter=linear8",
            "intra=cast_bf16,inter=minmax4",
            "intra=linear8,inter=minmax4",
            "intra=linear8:block=64,inter=linear8",
        ] {
            let found = packed(&limits, &request(Collective::AllReduce, codec));
            let wanted = on_host(file, &limits, codec);
            for (rank, (found, wanted)) in found.iter().zip(&wanted).enumerate() {
                assert!(bits(found) == bits(wanted), "{file} {codec}: rank {rank}");
            }
            // With one codec for both levels the sums of groups are rounded sooner.
            let inter = codec.split_once("inter=").unwrap().1;
            let both = on_host(file, &limits, inter);
            assert!(bits(&both[0]) != bits(&wanted[0]), "{file} {codec}");
        }
    }
}
