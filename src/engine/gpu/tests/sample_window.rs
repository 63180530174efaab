//! Tests sample windows on a simulated GPU that executes copies and only records kernels.

use super::*;
use crate::engine::gpu::SampleWindows;
use crate::plan::SampleWindow;

/// Returns bytes that differ by buffer and by offset, as contents before the call.
fn pattern(buffer: u8, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at * 7) as u8 ^ buffer).collect()
}

#[test]
fn sample_window_is_summed_exactly_and_copied_to_the_host() {
    let bench = Bench::new();
    let stream = bench.stream();
    let (nranks, count) = (3, 20_000);
    for collective in [Collective::AllReduce, Collective::ReduceScatter] {
        let mut ranks = bench.ranks(nranks, 16, &simple());
        let slices = SampleWindows::new(&bench.context, WAIT).unwrap();
        let problem = Problem::new(collective, DType::F32, nranks, count);
        let (inputs, outputs) = (problem.input_elements(1), problem.output_elements(1));
        let (input, output) = (bench.memory(4 * inputs), bench.memory(4 * outputs));
        let (was_in, was_out) = (pattern(1, 4 * inputs), pattern(2, 4 * outputs));
        input.write(0, &was_in, &stream, WAIT).unwrap();
        output.write(0, &was_out, &stream, WAIT).unwrap();
        let request = request(&problem, "linear8");
        let slice = SampleWindow::of(&request, nranks, 5).unwrap();
        let call = call(request, &input, &output, &stream);
        let engine = &mut ranks[1].engine;
        let sampled = slices.admit(engine, &call, &slice).unwrap();
        let report = slices.start(engine, &sampled).unwrap();
        assert_eq!(report.codec, request.codec);
        assert!(slices.has_arrived().unwrap());

        // Simulated kernels sum nothing, so the exact region still holds the copied input.
        let [exact, coded] = slices.read(&slice);
        let part = slice.part_bytes();
        let saved = slice.input_places().flat_map(|at| &was_in[at..at + part]);
        assert!(exact.iter().eq(saved), "{collective}");
        let place = slice.output_place();
        match slice.gather() {
            None => assert_eq!(coded, was_out[place..place + part]),
            // Simulated kernels gather nothing, so the coded region stays zero.
            Some(_) => assert!(coded.iter().all(|&byte| byte == 0)),
        }

        let names: Vec<String> = bench
            .take()
            .into_iter()
            .map(|seen| match seen {
                Seen::WorkBuffer(name, _) => name,
                Seen::Fused(..) => "fused".into(),
            })
            .collect();
        let mut expected = vec![
            "ncclDevKernel_cinch_coded_linear8_f32",
            "ncclDevKernel_cinch_raw_f32",
        ];
        if slice.gather().is_some() {
            expected.push("ncclDevKernel_cinch_move");
        }
        assert_eq!(names, expected, "{collective}");
    }
}
