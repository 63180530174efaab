//! Tests which sends and receives of a group share a launch, on which stream they run, and for what
//! they wait.

use super::*;

/// Messages of one group on three streams share one launch. It waits for earlier work of all three
/// streams, and later work of all three waits for it.
#[test]
fn messages_on_several_streams_share_a_launch() {
    let bench = Bench::new();
    let streams = [bench.stream(), bench.stream(), bench.stream()];
    let mut ranks = bench.ranks(4, 16, &simple());
    let memory = bench.memory(4096);
    let calls: Vec<_> = (1..4)
        .map(|peer| {
            let mut problem = Problem::new(Collective::SendRecv, DType::F32, 4, 9);
            (problem.root, problem.peer) = (0, peer);
            call(
                request(&problem, "raw"),
                &memory,
                &memory,
                &streams[peer - 1],
            )
        })
        .collect();
    let counts = || {
        [
            "cuEventRecord",
            "cuStreamWaitEvent",
            "cuEventCreate",
            "cuEventDestroy",
        ]
        .map(|name| bench.process.calls(name))
    };
    let before = counts();
    let engine = &mut ranks[0].engine;
    assert_eq!(engine.run(&calls).unwrap().len(), 3);
    assert_eq!(bench.take().len(), 1);
    let after = counts();
    let grown: Vec<_> = after.iter().zip(before).map(|(a, b)| a - b).collect();
    // The launch waits for an event on each of the two other streams. Both streams then wait for
    // the launch's event.
    assert_eq!(grown, [3, 4, 2, 2]);
    // A group on one stream needs no waits.
    let before = counts();
    engine.run(&calls[..1]).unwrap();
    assert_eq!(counts()[1], before[1]);
}

/// A message of a rank to itself is a copy, which waits for the streams of both its send and its receive. The
/// receive in this test has no bytes.
#[test]
fn message_to_the_own_rank_joins_the_stream_of_its_receive() {
    let bench = Bench::new();
    let (one, two) = (bench.stream(), bench.stream());
    let mut ranks = bench.ranks(2, 16, &simple());
    let memory = bench.memory(4096);
    let mut problem = Problem::new(Collective::SendRecv, DType::F32, 2, 9);
    (problem.root, problem.peer) = (0, 0);
    let send = call(request(&problem, "raw"), &memory, &memory, &one);
    problem.count = 0;
    let mut recv = call(request(&problem, "raw"), &memory, &memory, &two);
    recv.buffers = recv.buffers.emptied();
    // The second group starts on stream two. It also waits for the last copy, which was on stream
    // one.
    for (calls, waits) in [([send, recv], 2), ([recv, send], 3)] {
        let before = bench.process.calls("cuStreamWaitEvent");
        ranks[0].engine.run(&calls).unwrap();
        assert_eq!(bench.process.calls("cuStreamWaitEvent"), before + waits);
        assert!(bench.take().is_empty());
    }
    // A receive whose send is missing queues nothing.
    let before = bench.process.calls("cuEventRecord");
    ranks[0].engine.run(&[recv]).unwrap();
    assert_eq!(bench.process.calls("cuEventRecord"), before);
}

/// Both ends put each message into the same launch. Tests groups between all ranks, with several messages per
/// pair, and with as few resident blocks as on a shared GPU.
#[test]
fn messages_of_a_group_use_the_same_launch_on_both_ends() {
    let bench = Bench::new();
    let stream = bench.stream();
    for (nranks, resident) in [(2, 2), (4, 3), (4, 12), (4, 132), (5, 4), (5, 16)] {
        let mut ranks = bench.ranks(nranks, resident, &simple());
        // The second message is so large that a launch has room for fewer peers.
        let counts = [3usize, 140_000, 1];
        let word = |from: usize, to: usize, k: usize| (100 * from + 10 * to + k) as f32;
        let mut launches = Vec::new();
        let mut outputs = Vec::new();
        for rank in 0..nranks {
            let mut memory = Vec::new();
            for other in (0..nranks).filter(|&other| other != rank) {
                for (k, &count) in counts.iter().enumerate() {
                    let sent: Vec<u8> = std::iter::repeat_n(word(rank, other, k), count)
                        .flat_map(f32::to_le_bytes)
                        .collect();
                    let buffers = [bench.memory(4 * count), bench.memory(4 * count)];
                    buffers[0].write(0, &sent, &stream, WAIT).unwrap();
                    memory.push((other, k, buffers));
                }
            }
            let mut calls = Vec::new();
            for (other, k, [input, output]) in &memory {
                let mut problem =
                    Problem::new(Collective::SendRecv, DType::F32, nranks, counts[*k]);
                (problem.root, problem.peer) = (rank, *other);
                calls.push(call(request(&problem, "raw"), input, output, &stream));
                (problem.root, problem.peer) = (*other, rank);
                calls.push(call(request(&problem, "raw"), input, output, &stream));
            }
            let reports = ranks[rank].engine.run(&calls).unwrap();
            assert_eq!(reports.len(), calls.len());
            launches.push(bench.take_work_buffers());
            for work_buffer in &launches[rank] {
                assert!(
                    work_buffer.channels() <= resident,
                    "{} of {resident}",
                    work_buffer.channels()
                );
            }
            outputs.push(memory);
        }
        assert!(
            World::new(&launches, None, 2).run(),
            "{nranks} ranks, {resident} blocks"
        );
        for (rank, memory) in outputs.iter().enumerate() {
            for (other, k, [_, output]) in memory {
                let mut bytes = vec![0; 4 * counts[*k]];
                output.read(0, &mut bytes, &stream, WAIT).unwrap();
                let wanted = word(*other, rank, *k).to_le_bytes();
                assert!(
                    bytes.chunks(4).all(|found| found == wanted),
                    "{other} to {rank}"
                );
            }
        }
    }
}
