//! What no kernel does is refused before anything is launched.

use super::*;
use crate::codec::KERNEL_CODECS;
use crate::types::CodecKind;

#[test]
fn what_cannot_run_is_refused_before_anything_is_launched() {
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
    let kept = request(
        &Problem::new(Collective::AllReduce, DType::F32, 2, 9),
        "linear8:tensor=4",
    );
    let missing = request(
        &Problem::new(Collective::AllReduce, DType::F16, 2, 9),
        "raw",
    );
    let mut refused = |calls: &[(Request, &Stream)]| {
        let calls: Vec<_> = calls
            .iter()
            .map(|(request, stream)| call(*request, &memory, &memory, stream))
            .collect();
        let error = engine.run(&calls).unwrap_err();
        assert!(engine.is_untouched(), "{error}");
        error
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
            "cinch_raw_f16",
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

/// Only the codecs that kernels have, as they have them.
#[test]
fn what_kernels_do_not_have_is_refused_in_a_sentence() {
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
        assert!(engine.is_untouched(), "{error}");
        assert_eq!(explained.message(), error.message());
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        for said in said {
            assert!(error.message().contains(said), "{said}: {error}");
        }
    };
    let mut count = 0;
    for codec in CodecSpec::samples() {
        if !KERNEL_CODECS.contains(&codec.kind) {
            let known = "raw, linear8, dynamic8, static8, mantissa8, cast_bf16, cast16";
            refuses(
                engine,
                Request { codec, ..plain },
                &["all_reduce", &codec.to_string(), "no kernels", known],
            );
            count += 1;
        }
    }
    assert!(count >= 4, "{count} codecs without kernels");
    for kind in KERNEL_CODECS {
        let codec = CodecSpec {
            seed: 7,
            ..CodecSpec::of(kind)
        };
        refuses(
            engine,
            Request { codec, ..plain },
            &[kind.name(), "at random", "seed is 7"],
        );
        // As it is, it has a kernel; this machine has those of linear8.
        let codec = CodecSpec::of(kind);
        let calls = [call(Request { codec, ..plain }, &memory, &memory, &stream)];
        let name = format!("cinch_coded_{}_f32", kind.name());
        match engine.run(&calls) {
            Ok(_) => assert_eq!(kind, CodecKind::Linear8),
            Err(error) => assert!(error.message().contains(&name), "{error}"),
        }
    }
    for codec in ["raw", "linear8"] {
        let fed = Request {
            feedback: Some(42),
            ..request(&problem, codec)
        };
        refuses(
            engine,
            fed,
            &["error feedback", "tensor 42", "host buffers only"],
        );
    }
}
