//! Tests the memory of kept scales on a GPU.

use super::*;
use crate::codec::REFRESH_WORD;

/// Calls that name one tensor find its scales at the same address. During a capture no scales are allocated.
#[test]
fn scales_of_one_tensor_keep_their_memory() {
    let bench = Bench::new();
    let stream = bench.stream();
    let mut ranks = bench.ranks(3, 16, &Config::default());
    let engine = &mut ranks[0].engine;
    let memory = bench.memory(4 << 20);
    let kept = |tensor: u64, collective, count: usize, codec: &str| {
        let problem = Problem::new(collective, DType::F32, 3, count);
        Request {
            tensor: Some(tensor),
            ..request(&problem, codec)
        }
    };
    let mut place = |request: Request| {
        engine
            .run(&[call(request, &memory, &memory, &stream)])
            .unwrap();
        match &bench.take()[0] {
            Seen::WorkBuffer(_, work_buffer) => {
                let work = work_buffer.works()[0];
                (work.scales, work.codec.word[REFRESH_WORD], work.ends)
            }
            Seen::Fused(..) => (0, 0, 0),
        }
    };
    let sum = Collective::AllReduce;
    let first = place(kept(1, sum, 5000, "linear8:tensor=7"));
    assert!(first.0 != 0 && first.1 == 7 && first.2 == 1);
    assert_eq!(place(kept(1, sum, 5000, "linear8:tensor=7")), first);
    let others = [
        kept(2, sum, 5000, "linear8:tensor=7"),
        kept(1, sum, 5000, "linear8:tensor=8"),
        kept(1, sum, 4000, "linear8:tensor=7"),
        kept(1, Collective::ReduceScatter, 5000, "linear8:tensor=7"),
    ];
    let mut addresses = vec![first.0];
    for other in others {
        let (address, refresh, _) = place(other);
        assert!(!addresses.contains(&address), "{other:?}");
        let is_eight = other.codec.to_string().ends_with('8');
        assert_eq!(refresh, if is_eight { 8 } else { 7 }, "{other:?}");
        addresses.push(address);
    }
    // Scales of blocks are not kept.
    assert_eq!(place(kept(1, sum, 5000, "linear8")).0, 0);

    let captured = Graph::capture(&stream, CaptureMode::ThreadLocal, |stream| {
        let known = kept(1, sum, 5000, "linear8:tensor=7");
        engine.run(&[call(known, &memory, &memory, stream)])?;
        let unknown = kept(5, sum, 5000, "linear8:tensor=7");
        let error = engine
            .run(&[call(unknown, &memory, &memory, stream)])
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidUsage);
        assert!(error.message().contains("before it is captured"), "{error}");
        Ok(())
    });
    captured.unwrap();
}

#[test]
fn calls_that_cannot_keep_scales_are_refused() {
    let bench = Bench::new();
    let stream = bench.stream();
    let mut ranks = bench.ranks(2, 16, &Config::default());
    let engine = &mut ranks[0].engine;
    let memory = bench.memory(4096);
    let device_factor = ReduceOp::PreMulSum(Scalar::Device(memory.address()));
    let (sum, message) = (Collective::AllReduce, Collective::SendRecv);
    for (collective, op, count, tensor, said) in [
        (message, ReduceOp::Sum, 9, Some(1), "messages"),
        (sum, ReduceOp::Sum, 9, None, "without a tensor id"),
        (sum, device_factor, 9, Some(1), "factors in device memory"),
        (sum, ReduceOp::Sum, 1 << 32, Some(1), "4294967295"),
    ] {
        let problem = Problem::new(collective, DType::F32, 2, count);
        let request = Request {
            op,
            tensor,
            peer: usize::from(collective == message),
            ..request(&problem, "linear8:tensor=7")
        };
        let calls = [call(request, &memory, &memory, &stream)];
        let error = engine.run(&calls).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        assert!(error.message().contains(said), "{error}");
    }
}
