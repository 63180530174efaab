//! Calls of communicators on a simulated GPU, whose kernels only take note.

use super::*;
use crate::comm::Group;
use crate::engine::gpu::tests::{Bench, WAIT, buffers};
use crate::gpu::{Device, Stream};
use crate::sys::fork::{Ours, Owner};
use crate::types::{Algorithm, CodecSpec};
use std::sync::OnceLock;
use std::sync::atomic::AtomicBool;

/// The communicators of two ranks, which sample every other coded sum.
fn communicators(bench: &Bench) -> Vec<Communicator> {
    let config = Config {
        codec_sample: 2,
        ..Config::default()
    };
    let ranks = bench.ranks(2, 16, &config).into_iter();
    let comms = ranks.map(|rank| Communicator {
        info: CommInfo {
            transports: vec![None; 2],
            classes: Vec::new(),
            channels: 16,
            slot_bytes: 0,
            slots: 0,
            buffer_bytes: 0,
            hosts: Hosts::new(rank.exchange.peers().iter().map(|peer| peer.host_id)),
        },
        owner: Owner::this(),
        exchange: rank.exchange,
        fault: rank.fault,
        announced: AtomicBool::new(false),
        policy: CodecPolicy::new(&config, true),
        config: config.clone(),
        sampler: Default::default(),
        counters: Default::default(),
        side: Side::Gpu(Ours::new(Box::new(GpuSide {
            context: bench.context.clone(),
            engine: Mutex::new(rank.engine),
            slices: Some(Slices::new(&bench.context, WAIT).unwrap()),
        }))),
        spare: Mutex::default(),
        refuge: OnceLock::new(),
    });
    comms.collect()
}

/// A sum that has a kernel in fp32, and none in fp16.
fn sum(dtype: DType) -> Call {
    Call {
        codec: Some("linear8".parse::<CodecSpec>().unwrap()),
        algorithm: Some(Algorithm::Direct),
        ..Call::new(Collective::AllReduce, dtype, 1000)
    }
}

/// What is refused before anything is queued leaves a communicator as it was: usable, and its
/// samples due where they were.
#[test]
fn a_refused_call_takes_no_sample_with_it() {
    let bench = Bench::new();
    let stream = bench.stream();
    let other = Device::at(bench.context.driver(), 1).unwrap();
    let foreign = Stream::new(&Context::primary(&other).unwrap()).unwrap();
    let memory = bench.memory(4000);
    let comms = communicators(&bench);
    let on = |stream: &Stream| buffers(&memory, &memory, stream);
    let launches = || bench.process.calls("cuLaunchKernel");
    let run = |comm: &Communicator| {
        let before = launches();
        comm.call_on(&sum(DType::F32), on(&stream)).unwrap();
        launches() - before
    };
    let refused = |comm: &Communicator| {
        let before = launches();
        for (dtype, stream, kind) in [
            (DType::F16, &stream, ErrorKind::Unsupported),
            (DType::F32, &foreign, ErrorKind::InvalidUsage),
        ] {
            let error = comm.call_on(&sum(dtype), on(stream)).unwrap_err();
            assert_eq!(error.kind(), kind, "{error}");
            assert_eq!(comm.async_error(), None);
        }
        assert_eq!(launches(), before);
    };
    let [one, two] = &comms[..] else {
        panic!("two ranks")
    };
    // A call that is sampled has an exact sum behind it.
    refused(one);
    assert_eq!([run(one), run(one), run(one)], [2, 1, 2]);
    refused(one);
    assert_eq!([run(one), run(one)], [1, 2]);
    assert_eq!(one.codec_stats().sampled, 2);

    // So does a group, whichever of its calls is sampled.
    let mut group = Group::new();
    for dtype in [DType::F16, DType::F32] {
        group.add_on(one, &sum(dtype), on(&stream)).unwrap();
    }
    assert_eq!(group.run().unwrap_err().kind(), ErrorKind::Unsupported);
    assert_eq!([run(one), run(one)], [1, 2]);
    // Communicators are queued in the order of their addresses.
    let mut group = Group::new();
    for (comm, dtype) in [(one, DType::F16), (two, DType::F32)] {
        group.add_on(comm, &sum(dtype), on(&stream)).unwrap();
    }
    assert_eq!(group.run().unwrap_err().kind(), ErrorKind::Unsupported);
    assert_eq!([run(one), run(one)], [1, 2]);
    assert_eq!([run(two), run(two)], [2, 1]);
}

#[test]
fn a_group_that_has_begun_fails_as_a_whole() {
    let bench = Bench::new();
    let stream = bench.stream();
    let memory = bench.memory(4000);
    let comms = communicators(&bench);
    let mut in_order: Vec<&Communicator> = comms.iter().collect();
    in_order.sort_by_key(|comm| std::ptr::from_ref(*comm).addr());
    let mut group = Group::new();
    for (comm, dtype) in in_order.iter().zip([DType::F32, DType::F16]) {
        let buffers = buffers(&memory, &memory, &stream);
        group.add_on(comm, &sum(dtype), buffers).unwrap();
    }
    assert_eq!(group.run().unwrap_err().kind(), ErrorKind::Unsupported);
    for comm in comms.iter() {
        let error = comm.async_error().expect("other ranks wait for it");
        assert!(error.message().contains("the same group"), "{error}");
    }
}
