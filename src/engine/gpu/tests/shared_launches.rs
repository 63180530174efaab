//! Tests which small collectives of a group share a launch, and that they have the results of separate launches.

use super::*;

/// Memory of one call of a rank.
struct CallMemory {
    input: DeviceMemory,
    output: DeviceMemory,
}

/// Returns memory for a sum of `count` elements, whose input holds `value`.
fn filled(bench: &Bench, stream: &Stream, count: usize, value: f32) -> CallMemory {
    let [input, output] = [0, 1].map(|_| bench.memory(4 * count));
    let bytes: Vec<u8> = std::iter::repeat_n(value, count)
        .flat_map(f32::to_le_bytes)
        .collect();
    input.write(0, &bytes, stream, WAIT).unwrap();
    CallMemory { input, output }
}

fn value(rank: usize, number: usize) -> f32 {
    (100 * number + rank + 1) as f32
}

fn sum(count: usize) -> Request {
    plan_request(Collective::AllReduce, count, "raw")
}

/// Asserts that all elements of `memory` are `expected`.
fn check(memory: &DeviceMemory, stream: &Stream, expected: f32, what: &str) {
    let mut bytes = vec![0; memory.bytes()];
    memory.read(0, &mut bytes, stream, WAIT).unwrap();
    let (words, _) = bytes.as_chunks::<4>();
    let found: Vec<f32> = words.iter().map(|word| f32::from_le_bytes(*word)).collect();
    assert!(
        found.iter().all(|found| *found == expected),
        "{what}: {found:?} is not {expected}"
    );
}

#[test]
fn small_sums_of_a_group_are_one_launch() {
    let bench = Bench::new();
    let stream = bench.stream();
    let counts = [1, 1000, 16 << 10, 37, 37, 16 << 10];
    for (nranks, resident, expected) in [(2, 32, 1), (3, 32, 1), (8, 32, 1), (4, 4, 2), (4, 1, 6)] {
        let mut ranks = bench.ranks(nranks, resident, &simple());
        let mut launches = Vec::new();
        let mut memory = Vec::new();
        for (rank, Rank { engine, .. }) in ranks.iter_mut().enumerate() {
            let numbered = counts.iter().enumerate();
            let own: Vec<CallMemory> = numbered
                .map(|(number, count)| filled(&bench, &stream, *count, value(rank, number)))
                .collect();
            let calls = own.iter().zip(counts);
            let calls: Vec<_> = calls
                .map(|(one, count)| call(sum(count), &one.input, &one.output, &stream))
                .collect();
            let reports = engine.run(&calls).unwrap();
            assert_eq!(reports.len(), counts.len());
            launches.push(bench.take_work_buffers());
            assert_eq!(
                launches[rank].len(),
                expected,
                "{nranks} ranks, {resident} blocks"
            );
            assert!(
                launches[rank]
                    .iter()
                    .all(|launch| launch.channels() <= resident)
            );
            memory.push(own);
        }
        assert!(
            World::new(&launches, None, 2).run(),
            "{nranks} ranks, {resident} blocks"
        );
        for (rank, own) in memory.iter().enumerate() {
            for (number, one) in own.iter().enumerate() {
                let total: f32 = (0..nranks).map(|rank| value(rank, number)).sum();
                check(
                    &one.output,
                    &stream,
                    total,
                    &format!("call {number} of rank {rank}"),
                );
            }
        }
    }
}

/// Rank 0 sums the result of the first call in the second one. Its peers see no difference.
#[test]
fn calls_that_depend_on_each_other_on_one_rank_follow_each_other_there() {
    let bench = Bench::new();
    let stream = bench.stream();
    let nranks = 3;
    let count = 100;
    let mut ranks = bench.ranks(nranks, 32, &simple());
    let mut launches = Vec::new();
    let mut memory = Vec::new();
    for (rank, Rank { engine, .. }) in ranks.iter_mut().enumerate() {
        let own = [0, 1].map(|number| filled(&bench, &stream, count, value(rank, number)));
        let second = match rank {
            0 => &own[0].output,
            _ => &own[1].input,
        };
        let calls = [
            call(sum(count), &own[0].input, &own[0].output, &stream),
            call(sum(count), second, &own[1].output, &stream),
        ];
        engine.run(&calls).unwrap();
        launches.push(bench.take_work_buffers());
        memory.push(own);
    }
    assert_eq!(launches.iter().map(Vec::len).collect::<Vec<_>>(), [2, 1, 1]);
    // Peers use the same channels, whatever the launches are.
    let first_channel = |work: &abi::KernelWork| work.first_channel;
    let channels = launches.iter().map(|launches| {
        let works = launches.iter().flat_map(|launch| launch.works());
        works.map(first_channel).collect::<Vec<_>>()
    });
    let channels: Vec<_> = channels.collect();
    assert!(
        channels.iter().all(|one| *one == channels[0]),
        "{channels:?}"
    );
    assert!(World::new(&launches, None, 2).run());
    let first: f32 = (0..nranks).map(|rank| value(rank, 0)).sum();
    let second = first + value(1, 1) + value(2, 1);
    for own in &memory {
        check(&own[0].output, &stream, first, "the first call");
        check(&own[1].output, &stream, second, "the second call");
    }
}

/// Calls of one shape share the steps of the launch, so that many of them fit its arguments.
#[test]
fn calls_of_one_shape_share_steps() {
    let bench = Bench::new();
    let stream = bench.stream();
    let mut ranks = bench.ranks(8, 32, &simple());
    let memory = filled(&bench, &stream, 1 << 16, 1.0);
    let part = |at: usize| (memory.input.address() + 400 * at as u64, 400);
    let calls: Vec<GpuCall<'_>> = (0..16)
        .map(|at| {
            // SAFETY: `memory` outlives the calls, whose kernels only record their arguments.
            let buffers = unsafe { DeviceBuffers::new(part(at), part(at), stream.handle().addr()) };
            GpuCall {
                request: sum(100),
                buffers,
            }
        })
        .collect();
    ranks[0].engine.run(&calls).unwrap();
    let launches = bench.take_work_buffers();
    assert_eq!(launches.len(), 1);
    let [works, steps, _] = launches[0].counts();
    assert_eq!(works, 16);
    assert!(steps < 32, "{steps} steps");
    assert!(launches[0].len() <= abi::WORK_BUFFER_BYTES);
}
