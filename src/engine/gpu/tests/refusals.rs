//! Tests that calls without a kernel fail before any launch.

use super::*;
use crate::codec::{KERNEL_CODECS, kernel_family};
use crate::engine::gpu::SampleWindows;
use crate::plan::SampleWindow;
use crate::types::{CodecKind, ScaleRule};

#[test]
fn unsupported_group_fails_before_any_launch() {
    let bench = Bench::new();
    let (one, two) = (bench.stream(), bench.stream());
    let other = Device::at(bench.context.driver(), 1).unwrap();
    let other = Context::primary(&other).unwrap();
    let foreign = Stream::new(&other).unwrap();
    let mut ranks = bench.ranks(2, 16, &simple());
    let engine = &mut ranks[0].engine;
    let memory = bench.memory(4096);
    let sum = request(
        &Problem::new(Collective::AllReduce, DType::F32, 2, 9),
        "raw",
    );
    let kept = Request {
        peer: 1,
        ..request(
            &Problem::new(Collective::SendRecv, DType::F32, 2, 9),
            "linear8:tensor=4",
        )
    };
    let missing = request(
        &Problem::new(Collective::AllReduce, DType::F16, 2, 9),
        "raw",
    );
    let mut refused = |calls: &[(Request, &Stream)]| {
        let calls: Vec<_> = calls
            .iter()
            .map(|(request, stream)| call(*request, &memory, &memory, stream))
            .collect();
        engine.run(&calls).unwrap_err()
    };
    let unsupported = ErrorKind::Unsupported;
    for (calls, kind, said) in [
        (
            vec![(sum, &foreign)],
            ErrorKind::InvalidUsage,
            "another context",
        ),
        (
            vec![(sum, &one), (kept, &one)],
            unsupported,
            "linear8:block=256",
        ),
        (
            vec![(sum, &one), (missing, &one)],
            unsupported,
            "ncclDevKernel_cinch_raw_f16",
        ),
    ] {
        let error = refused(&calls);
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.message().contains(said), "{error}");
    }
    let _ = Graph::capture(&two, CaptureMode::Relaxed, |two| {
        let error = refused(&[(sum, &one), (sum, two)]);
        assert!(error.message().contains("same capture"), "{error}");
        Ok(())
    });
    assert!(bench.take().is_empty());
}

/// A green context of the communicator's GPU is accepted, although it owns only a part of the
/// multiprocessors.
#[test]
fn stream_of_a_green_context_is_accepted() {
    let bench = Bench::new();
    let stream = bench.stream();
    bench.process.make_green(stream.handle());
    let mut ranks = bench.ranks(2, 16, &simple());
    let memory = bench.memory(4096);
    let sum = request(
        &Problem::new(Collective::AllReduce, DType::F32, 2, 9),
        "raw",
    );
    let sum = call(sum, &memory, &memory, &stream);
    ranks[0].engine.run(&[sum]).unwrap();
    assert_eq!(bench.take().len(), 1);
    bench
        .process
        .fail("cuStreamGetBothCtx", 0, 1, CuResult::FUNCTION_MISSING);
    let error = ranks[0].engine.run(&[sum]).unwrap_err();
    assert!(error.message().contains("another context"), "{error}");
}

/// A sampled call also needs kernels for its exact sum and for the copy of its input.
#[test]
fn unsupported_sample_window_fails_before_any_launch() {
    let bench = Bench::new();
    let stream = bench.stream();
    let mut ranks = bench.ranks(2, 16, &simple());
    let engine = &mut ranks[0].engine;
    let memory = bench.memory(4096);
    let slices = SampleWindows::new(&bench.context, WAIT).unwrap();
    let coded = |dtype| {
        let problem = Problem::new(Collective::AllReduce, dtype, 2, 1000);
        request(&problem, "linear8")
    };
    // In the first case the coded call has no kernel. In the second case it has one, but its exact
    // sum in f16 has none.
    for (call_of, slice_of, said) in [
        (
            DType::F16,
            DType::F16,
            "ncclDevKernel_cinch_coded_linear8_f16",
        ),
        (DType::F32, DType::F16, "ncclDevKernel_cinch_raw_f16"),
    ] {
        let copies = bench.process.calls("cuMemcpyAsync");
        let slice = SampleWindow::of(&coded(slice_of), 2, 0).unwrap();
        let call = call(coded(call_of), &memory, &memory, &stream);
        let error = slices.admit(engine, &call, &slice).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        assert!(error.message().contains(said), "{error}");
        assert_eq!(bench.process.calls("cuMemcpyAsync"), copies);
    }
    assert!(bench.take().is_empty());
}

/// Only codecs with kernels run, and only with parameters that the kernels support.
#[test]
fn missing_kernel_is_an_error_with_alternatives() {
    let bench = Bench::new();
    let stream = bench.stream();
    let mut ranks = bench.ranks(2, 16, &simple());
    let engine = &mut ranks[0].engine;
    let memory = bench.memory(4096);
    let problem = Problem::new(Collective::AllReduce, DType::F32, 2, 9);
    let plain = request(&problem, "raw");
    let refuses = |engine: &mut GpuEngine, request: Request, said: &[&str]| {
        let calls = [plain, request].map(|request| call(request, &memory, &memory, &stream));
        let explained = engine.explain(&request).unwrap_err();
        let error = engine.run(&calls).unwrap_err();
        assert_eq!(explained.message(), error.message());
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        for said in said {
            assert!(error.message().contains(said), "{said}: {error}");
        }
    };
    for codec in CodecSpec::samples() {
        let kept = codec.kind.has_scale() && matches!(codec.scale, ScaleRule::Tensor { .. });
        if !KERNEL_CODECS.contains(&codec.kind) {
            let codec = Request {
                codec: codec.into(),
                ..plain
            };
            refuses(engine, codec, &["all_reduce", "no kernels", "raw, linear8"]);
        } else if kept {
            let said = ["send_recv", &codec.to_string(), "block=256"];
            let message = Request {
                collective: Collective::SendRecv,
                codec: codec.into(),
                tensor: Some(1),
                peer: 1,
                ..plain
            };
            refuses(engine, message, &said);
        }
    }
    for kind in KERNEL_CODECS {
        // The simulated GPU has kernels for raw calls and for linear8 only.
        let codec = CodecSpec {
            seed: if kind.has_seed() { 7 } else { 0 },
            ..CodecSpec::of(kind)
        };
        let codec = codec.into();
        let calls = [call(Request { codec, ..plain }, &memory, &memory, &stream)];
        let name = format!("ncclDevKernel_cinch_coded_{}_f32", kernel_family(kind));
        match engine.run(&calls) {
            Ok(_) => assert_eq!(kind, CodecKind::Linear8),
            Err(error) => assert!(error.message().contains(&name), "{error}"),
        }
    }
}
