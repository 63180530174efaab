use super::*;
use crate::comm::{Call, Communicator};
use crate::config::Config;
use crate::error::ErrorKind;
use crate::mem::UserBuffers;
use crate::testing::try_local_world;
use crate::types::{Collective, DType, ReduceOp};
use std::os::fd::AsRawFd;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Wake;
use std::thread;
use std::time::Duration;

/// Runs `body` on each of `ranks` threads, with a communicator of its own.
fn shared_world<R: Send>(ranks: usize, body: impl Fn(&Arc<Communicator>) -> R + Sync) -> Vec<R> {
    try_local_world(ranks, &Config::default(), |comm| {
        body(&Arc::new(comm.unwrap()))
    })
}

fn sum(nranks: usize) -> f32 {
    (nranks * (nranks + 1) / 2) as f32
}

#[test]
fn started_calls_return_what_blocking_calls_return() {
    shared_world(3, |comm| {
        let rank = comm.rank();
        let own = vec![(rank + 1) as f32; 3000];
        let summed = comm.all_reduce_start(own.clone(), ReduceOp::Sum).unwrap();
        let gathered = comm.all_gather_start(vec![rank as i32; 2]).unwrap();
        let scattered = comm.reduce_scatter_start(own, ReduceOp::Max).unwrap();
        let sent = comm.broadcast_start(vec![rank as u8; 5], 2).unwrap();
        // A blocking call comes after all that were started.
        let mut last = [rank as u64];
        comm.all_reduce_in_place(&mut last, ReduceOp::Max).unwrap();
        assert!(sent.is_done().unwrap() && last == [2]);
        let (data, report) = summed.wait().unwrap();
        assert!(data.iter().all(|&it| it == sum(3)) && data.len() == 3000);
        assert!(report.wire_bytes > 0);
        assert_eq!(gathered.wait().unwrap().0, [0, 0, 1, 1, 2, 2]);
        assert_eq!(scattered.wait().unwrap().0, vec![3.0; 1000]);
        assert_eq!(sent.wait().unwrap().0, [2; 5]);
        comm.finalize().unwrap();
    });
}

#[test]
fn many_calls_of_several_threads_keep_their_order() {
    shared_world(2, |comm| {
        let requests: Vec<_> = (0..200u64)
            .map(|index| comm.all_reduce_start(vec![index], ReduceOp::Sum).unwrap())
            .collect();
        for (index, request) in requests.into_iter().enumerate() {
            assert_eq!(request.wait().unwrap().0, [2 * index as u64]);
        }
        // Dropped requests run to their end.
        drop(
            comm.all_reduce_start(vec![1.0f32; 10_000], ReduceOp::Sum)
                .unwrap(),
        );
        comm.finalize().unwrap();
    });
}

#[test]
fn residuals_are_read_and_dropped_after_started_calls() {
    shared_world(2, |comm| {
        let call = Call {
            codec: Some("minmax4".parse().unwrap()),
            feedback: Some(1),
            ..Call::new(Collective::AllReduce, DType::F32, 1000)
        };
        let none = comm.export_residuals().unwrap();
        let run = || {
            // Rank 0's call waits for this rank.
            thread::sleep(Duration::from_millis(50 * comm.rank() as u64));
            let bytes: Vec<u8> = (0..1000).flat_map(|at| (at as f32).to_le_bytes()).collect();
            let data = give_up_buffer(&bytes);
            let buffers = UserBuffers::in_place(data, 0, 4000).unwrap();
            comm.start(&call, buffers).unwrap()
        };
        let first = run();
        let kept = comm.export_residuals().unwrap();
        assert!(first.is_done().unwrap() && kept.len() > none.len());
        first.wait().unwrap();
        let second = run();
        comm.forget_residuals(None).unwrap();
        second.wait().unwrap();
        assert_eq!(comm.export_residuals().unwrap(), none);
    });
}

/// Copies `bytes` to a buffer that is never freed, as started calls require. A list of its addresses shows
/// LeakSanitizer that the buffer is still in use.
fn give_up_buffer(bytes: &[u8]) -> &'static mut [u8] {
    static GIVEN_UP: Mutex<Vec<usize>> = Mutex::new(Vec::new());
    let buffer = Box::leak(bytes.to_vec().into_boxed_slice());
    GIVEN_UP
        .lock()
        .unwrap()
        .push(buffer.as_ptr().expose_provenance());
    buffer
}

#[test]
fn impossible_calls_are_refused_before_they_are_queued() {
    shared_world(2, |comm| {
        let call = Call::new(Collective::AllReduce, DType::F32, 4);
        let small = give_up_buffer(&[0; 8]);
        let buffers = UserBuffers::in_place(small, 0, 8).unwrap();
        let error = comm.start(&call, buffers).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        let error = comm
            .reduce_scatter_start(vec![0u8; 3], ReduceOp::Sum)
            .unwrap_err();
        assert!(error.message().contains("2 ranks do not divide"), "{error}");
        let error = comm.broadcast_start(vec![0u8; 3], 2).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    });
}

#[test]
fn an_abort_ends_started_calls_and_those_behind_them() {
    let kinds = shared_world(2, |comm| {
        if comm.rank() == 1 {
            // Rank 0's call waits for this rank until the abort.
            thread::sleep(Duration::from_millis(50));
            comm.abort();
            return vec![ErrorKind::Aborted; 2];
        }
        let first = comm.all_reduce_start(vec![0u8; 4], ReduceOp::Sum).unwrap();
        let second = comm.all_reduce_start(vec![0u8; 4], ReduceOp::Sum);
        let kind = |result: Result<_>| result.map(|_| ()).unwrap_err().kind();
        vec![kind(first.wait()), kind(second.and_then(CallRequest::wait))]
    });
    assert_eq!(kinds[0], kinds[1]);
}

#[test]
fn a_descriptor_is_readable_from_the_end_of_the_call_on() {
    shared_world(2, |comm| {
        let readable = |request: &CallRequest<_>| {
            let fd = request.descriptor().unwrap();
            let mut polled = [nix::poll::PollFd::new(fd, nix::poll::PollFlags::POLLIN)];
            nix::poll::poll(&mut polled, nix::poll::PollTimeout::ZERO).unwrap() == 1
        };
        if comm.rank() == 1 {
            comm.barrier().unwrap();
            let request = comm.all_reduce_start(vec![1u8], ReduceOp::Sum).unwrap();
            while !request.is_done().unwrap() {
                thread::yield_now();
            }
            // The descriptor of a call that has ended.
            assert!(readable(&request));
            return;
        }
        let barrier = comm
            .all_reduce_start::<u8>(Vec::new(), ReduceOp::Sum)
            .unwrap();
        let request = comm.all_reduce_start(vec![1u8], ReduceOp::Sum).unwrap();
        let number = request.descriptor().unwrap().as_raw_fd();
        assert_eq!(request.descriptor().unwrap().as_raw_fd(), number);
        barrier.wait().unwrap();
        while !readable(&request) {
            thread::yield_now();
        }
        assert_eq!(request.wait().unwrap().0, [2]);
    });
}

#[test]
fn waiting_for_any_returns_a_call_that_has_ended() {
    let (waits, completer) = CallRequest::<u8>::pair();
    let (ended, other) = CallRequest::<Vec<u8>>::pair();
    other.complete(Ok(vec![7]));
    assert_eq!(wait_any(&[&waits, &ended]).unwrap(), 1);
    assert!(wait_any(&[]).is_err());
    let thread = thread::spawn(move || {
        thread::sleep(Duration::from_millis(20));
        completer.complete(Ok(5));
    });
    let (never, _kept) = CallRequest::<u8>::pair();
    assert_eq!(wait_any(&[&never, &waits]).unwrap(), 1);
    thread.join().unwrap();
    assert_eq!((waits.wait().unwrap(), ended.wait().unwrap()), (5, vec![7]));
    // A call that panics completes its request.
    let (lost, completer) = CallRequest::<u8>::pair();
    drop(completer);
    assert_eq!(lost.wait().unwrap_err().kind(), ErrorKind::Internal);
}

#[test]
fn a_request_is_a_future() {
    struct CountWakes(AtomicUsize);
    impl Wake for CountWakes {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }
    let wakes = Arc::new(CountWakes(AtomicUsize::new(0)));
    let waker = Waker::from(wakes.clone());
    let (mut request, completer) = CallRequest::<u8>::pair();
    let mut context = Context::from_waker(&waker);
    assert!(Pin::new(&mut request).poll(&mut context).is_pending());
    completer.complete(Ok(3));
    assert_eq!(wakes.0.load(Ordering::Relaxed), 1);
    match Pin::new(&mut request).poll(&mut context) {
        Poll::Ready(Ok(3)) => {}
        other => panic!("{other:?}"),
    }
}
