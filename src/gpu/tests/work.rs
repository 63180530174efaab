//! Tests of launches, graphs, captures and probes.

use super::*;
use crate::gpu::probe::{Probe, check_peer, pair_speed, probe_word};
use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Parameter of the kernel `add`, which adds `value` to `words` 64-bit words.
#[repr(C)]
#[derive(Clone, Copy)]
struct Add {
    target: u64,
    words: u64,
    value: u64,
}

fn add_kernel(machine: &MockMachine) {
    machine.kernel("add", size_of::<Add>(), |launch| {
        // SAFETY: every bit pattern of the integers is valid, and only the test has the memory.
        unsafe {
            let args: Add = launch.args();
            let Some(words) = launch.words(args.target, args.words) else {
                return CuResult::ILLEGAL_ADDRESS;
            };
            words
                .iter_mut()
                .for_each(|word| *word = word.wrapping_add(args.value));
        }
        CuResult::SUCCESS
    });
}

struct Work {
    process: Process,
    context: Arc<Context>,
    stream: Stream,
    add: Function,
    memory: DeviceMemory,
}

fn work(devices: usize) -> Work {
    let (process, driver) = process(devices);
    add_kernel(process.machine());
    let context = context(&driver, 0);
    let module = Module::load(&context, "test", &[0; 8]).unwrap();
    Work {
        stream: Stream::new(&context).unwrap(),
        add: module.function("add").unwrap(),
        memory: DeviceMemory::zeroed(&context, 64, SOON).unwrap(),
        process,
        context,
    }
}

impl Work {
    fn launch(&self, value: u64) -> crate::Result<()> {
        let args = Add {
            target: self.memory.address(),
            words: 8,
            value,
        };
        // SAFETY: `Add` is the kernel's parameter, and the memory has 8 words.
        unsafe { self.add.launch(2, 128, 0, &self.stream, &args) }
    }

    fn words(&self) -> [u64; 8] {
        let mut bytes = [0; 64];
        self.memory.read(0, &mut bytes, &self.stream, SOON).unwrap();
        std::array::from_fn(|at| u64::from_le_bytes(bytes[at * 8..][..8].try_into().unwrap()))
    }
}

#[test]
fn launch_passes_struct_to_kernel() {
    let work = work(1);
    work.launch(5).unwrap();
    work.launch(6).unwrap();
    assert_eq!(work.words(), [11; 8]);
    assert_eq!(work.add.max_threads, 1024);
    assert_eq!(work.add.blocks_per_multiprocessor(512, 0).unwrap(), 4);
    assert!(work.add.allow_shared(100_000).is_ok());
    let error = work.add.allow_shared(300_000).unwrap_err();
    assert!(error.message().contains("232448"), "{error}");
}

#[test]
fn programmatic_launch_needs_new_ptx_and_driver() {
    let programmatic = |driver_version, compiled_for, start| {
        let machine = MockMachine::new(1);
        machine.set_versions(driver_version, compiled_for);
        add_kernel(&machine);
        let (process, driver) = process_on(&machine);
        let context = context(&driver, 0);
        let module = Module::load(&context, "test", &[0; 8]).unwrap();
        let add = module.function("add").unwrap();
        let stream = Stream::new(&context).unwrap();
        let memory = DeviceMemory::zeroed(&context, 8, SOON).unwrap();
        let args = Add {
            target: memory.address(),
            words: 1,
            value: 1,
        };
        // SAFETY: `Add` is the kernel's parameter, and the memory has the word.
        unsafe { add.launch_with(start, 1, 32, 0, &stream, &args) }.unwrap();
        process.calls(PROGRAMMATIC_LAUNCHES)
    };
    assert_eq!(programmatic(13_000, 90, Launch::Programmatic), 1);
    assert_eq!(programmatic(13_000, 90, Launch::Serialized), 0);
    assert_eq!(programmatic(12_030, 100, Launch::Programmatic), 1);
    // Kernels compiled from PTX before sm_90 do not wait for earlier work on any GPU, so their
    // launch is serialized.
    assert_eq!(programmatic(13_000, 80, Launch::Programmatic), 0);
    // Drivers before CUDA 12.3 do not keep the launch attribute in graphs, so the launch is
    // serialized.
    assert_eq!(programmatic(12_020, 90, Launch::Programmatic), 0);
}

#[test]
fn invalid_launch_reports_reason() {
    let work = work(2);
    let error = Module::load(&work.context, "test", &[0; 8])
        .unwrap()
        .function("subtract")
        .unwrap_err();
    assert!(error.message().contains("test have no subtract"), "{error}");
    let other = context(work.context.driver(), 1);
    let stream = Stream::new(&other).unwrap();
    // SAFETY: the call fails before it launches the kernel.
    let error = unsafe { work.add.launch(1, 1, 0, &stream, &0u64) }.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidUsage);
    assert!(error.message().contains("GPU 0") && error.message().contains("GPU 1"));
    let args = Add {
        target: 0,
        words: 0,
        value: 0,
    };
    // SAFETY: the call fails before it launches the kernel, because of the number of threads.
    let error = unsafe { work.add.launch(1, 2048, 0, &work.stream, &args) }.unwrap_err();
    assert!(error.message().contains("x: 2048") && error.message().contains("add"));
}

#[test]
fn module_load_of_neither_cubin_nor_ptx_is_refused() {
    let work = work(1);
    let calls = work.process.calls("cuModuleLoadDataEx");
    for image in [&b""[..], b".version 9.0", b"\x50\xed\x55\xba"] {
        let error = Module::load(&work.context, "test", image).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Internal, "{error}");
    }
    assert_eq!(work.process.calls("cuModuleLoadDataEx"), calls);
    Module::load(&work.context, "test", b"\x7fELF").unwrap();
}

#[test]
fn module_load_loads_all_kernels() {
    let work = work(1);
    let loaded = work.process.calls("cuFuncLoad");
    work.process
        .machine()
        .kernel("other", 8, |_| CuResult::SUCCESS);
    Module::load(&work.context, "test", &[0; 8]).unwrap();
    assert_eq!(work.process.calls("cuFuncLoad"), loaded + 2);
}

#[test]
fn embedded_module_is_loaded_once_per_gpu() {
    let (process, driver) = process(2);
    let (one, two) = (context(&driver, 0), context(&driver, 1));
    if let kernels::State::Missing { why } = kernels::STATE {
        let error = kernels::load(&one, "probe").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.message().contains(why), "{error}");
        return;
    }
    let mut images = kernels::files().iter().flat_map(|file| file.images);
    if !images.any(|image| image.target.runs_on(one.device().compute_capability)) {
        let error = kernels::load(&one, "probe").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        return;
    }
    let held = kernels::load(&one, "probe").unwrap();
    let again = kernels::load(&one, "probe").unwrap();
    assert!(Arc::ptr_eq(&held, &again));
    assert_eq!(process.calls("cuModuleLoadDataEx"), 1);
    kernels::load(&two, "probe").unwrap();
    kernels::load(&two, "probe").unwrap();
    assert_eq!(process.calls("cuModuleLoadDataEx"), 3, "unloaded between");
    assert!(kernels::load(&one, "no such file").is_err());
    drop((held, again, one, two));
    assert_eq!(process.leftovers(), [""; 0]);
}

/// Adds 1 to the number at `data`.
unsafe extern "C" fn count_call(data: *mut c_void) {
    // SAFETY: the test below passes a counter that outlives all calls.
    let calls = unsafe { &*data.cast::<AtomicUsize>() };
    calls.fetch_add(1, Ordering::Relaxed);
}

#[test]
fn host_function_runs_at_once_and_in_each_replay() {
    let work = work(1);
    let calls = AtomicUsize::new(0);
    let queue = |stream: &Stream| {
        let data = (&raw const calls).cast_mut().cast();
        // SAFETY: the counter outlives all calls.
        unsafe { stream.host_function(count_call, data) }
    };
    queue(&work.stream).unwrap();
    assert_eq!(calls.load(Ordering::Relaxed), 1);
    let graph = Graph::capture(&work.stream, CaptureMode::ThreadLocal, queue).unwrap();
    assert_eq!(calls.load(Ordering::Relaxed), 1);
    graph.launch(&work.stream).unwrap();
    graph.launch(&work.stream).unwrap();
    assert_eq!(calls.load(Ordering::Relaxed), 3);
}

#[test]
fn borrowed_stream_is_not_destroyed() {
    let work = work(1);
    // SAFETY: `work.stream` keeps the stream, which belongs to this context.
    let borrowed = unsafe { Stream::borrowed(&work.context, work.stream.handle()) };
    assert!(borrowed.is_idle().unwrap());
    drop(borrowed);
    assert_eq!(
        work.process.calls("cuStreamDestroy"),
        1,
        "the stream of `zeroed`"
    );
    work.launch(1).unwrap();
}

#[test]
fn graph_replays_recorded_work() {
    let work = work(1);
    let graph = Graph::capture(&work.stream, CaptureMode::ThreadLocal, |stream| {
        assert!(stream.is_capturing()?);
        work.launch(3)
    })
    .unwrap();
    assert!(!work.stream.is_capturing().unwrap());
    assert_eq!(work.words(), [0; 8], "recorded, not run");
    for _ in 0..1000 {
        graph.launch(&work.stream).unwrap();
    }
    assert_eq!(work.words(), [3000; 8]);
}

#[test]
fn library_calls_during_global_capture_are_allowed() {
    let work = work(1);
    let graph = Graph::capture(&work.stream, CaptureMode::Global, |stream| {
        let event = Event::new(&work.context)?;
        assert!(event.has_happened()?);
        let memory = DeviceMemory::new(&work.context, 64)?;
        Module::load(&work.context, "late", &[0; 8])?;
        drop(memory);
        assert!(stream.is_capturing()?);
        // The mock rejects calls made without `bind` and invalidates the capture, as `refused`
        // below shows.
        work.launch(1)
    });
    graph.unwrap().launch(&work.stream).unwrap();
    assert_eq!(work.words(), [1; 8]);
    let refused = Graph::capture(&work.stream, CaptureMode::Global, |_| {
        let api = work.context.driver().api();
        let mut address = 0;
        // SAFETY: the context is pushed and popped; the mock writes to local variables.
        let done = unsafe {
            assert_eq!(
                api.cuCtxPushCurrent(work.context.handle()),
                CuResult::SUCCESS
            );
            let done = api.cuMemAlloc(&mut address, 64);
            api.cuCtxPopCurrent(&mut std::ptr::null_mut());
            done
        };
        assert_eq!(done, CuResult::STREAM_CAPTURE_UNSUPPORTED);
        Ok(())
    });
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::InvalidUsage);
}

#[test]
fn stream_after_failed_capture_is_usable() {
    let work = work(1);
    let error = Graph::capture(&work.stream, CaptureMode::Relaxed, |_| {
        Err(crate::Error::invalid_usage("not today"))
    })
    .unwrap_err();
    assert_eq!(error.message(), "not today");
    // Querying a stream in a capture invalidates the capture.
    let error = Graph::capture(&work.stream, CaptureMode::Relaxed, |stream| {
        assert!(stream.is_idle().is_err());
        assert!(stream.is_capturing().is_err());
        assert!(stream.keep_for_replay(Arc::new(())).is_err());
        Ok(())
    })
    .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidUsage);
    work.launch(1).unwrap();
    assert!(
        work.process
            .leftovers()
            .iter()
            .all(|left| !left.contains("graph"))
    );
}

/// Increments the shared number when it is dropped.
struct Dropped(Arc<AtomicUsize>);

impl Drop for Dropped {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn graph_keeps_objects_of_replays() {
    let work = work(1);
    let count = Arc::new(AtomicUsize::new(0));
    let kept = || Arc::new(Dropped(count.clone()));
    let wait_for = |number| {
        // A thread of the library drops the objects, so the test waits for it.
        for _ in 0..2000 {
            if count.load(Ordering::SeqCst) == number {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        panic!("{} of {number} were dropped", count.load(Ordering::SeqCst));
    };
    assert!(!work.stream.keep_for_replay(kept()).unwrap(), "no capture");
    wait_for(1);
    let graph = Graph::capture(&work.stream, CaptureMode::ThreadLocal, |stream| {
        assert!(stream.keep_for_replay(kept())?);
        work.launch(1)
    })
    .unwrap();
    graph.launch(&work.stream).unwrap();
    assert_eq!(count.load(Ordering::SeqCst), 1, "still needed");
    drop(graph);
    wait_for(2);
    // If the driver refuses to keep the object, the object is dropped.
    for (function, number) in [("cuUserObjectCreate", 3), ("cuGraphRetainUserObject", 4)] {
        work.process.fail(function, 0, 1, CuResult::OUT_OF_MEMORY);
        Graph::capture(&work.stream, CaptureMode::ThreadLocal, |stream| {
            stream.keep_for_replay(kept()).map(drop)
        })
        .unwrap_err();
        wait_for(number);
    }
}

#[test]
fn timed_events_measure_recorded_work() {
    let work = work(1);
    let (begin, end) = (
        Event::timed(&work.context).unwrap(),
        Event::timed(&work.context).unwrap(),
    );
    assert!(end.since(&begin).is_err(), "not recorded");
    begin.record(&work.stream).unwrap();
    work.launch(1).unwrap();
    end.record(&work.stream).unwrap();
    work.stream.wait_event(&begin).unwrap();
    end.wait(SOON).unwrap();
    assert!(end.since(&begin).unwrap() >= 0.0);
    let untimed = Event::new(&work.context).unwrap();
    untimed.record(&work.stream).unwrap();
    assert!(untimed.since(&begin).is_err());
}

/// Adds simulated probe kernels. The fill kernel leaves the last `lose` words unwritten.
fn probe_kernels(machine: &MockMachine, lose: usize) {
    machine.kernel("cinch_probe_fill", 24, move |launch| {
        // SAFETY: every bit pattern of the integers is valid, and only the test has the memory.
        unsafe {
            let [target, words, seed]: [u64; 3] = launch.args();
            let Some(words) = launch.words(target, words) else {
                return CuResult::ILLEGAL_ADDRESS;
            };
            let end = words.len() - lose;
            for (index, word) in words[..end].iter_mut().enumerate() {
                *word = probe_word(seed, index as u64);
            }
        }
        CuResult::SUCCESS
    });
    machine.kernel("cinch_probe_check", 32, |launch| {
        // SAFETY: every bit pattern of the integers is valid, and only the test has the memory.
        unsafe {
            let [source, words, seed, wrong]: [u64; 4] = launch.args();
            let (Some(words), Some(wrong)) = (launch.words(source, words), launch.reach(wrong, 4))
            else {
                return CuResult::ILLEGAL_ADDRESS;
            };
            let found = words.iter().enumerate();
            let count = found.filter(|&(at, &word)| word != probe_word(seed, at as u64));
            *wrong.cast::<u32>() += count.count() as u32;
        }
        CuResult::SUCCESS
    });
    for (name, bytes) in [("cinch_probe_pingpong", 56), ("cinch_probe_copy", 24)] {
        machine.kernel(name, bytes, |_| CuResult::SUCCESS);
    }
}

fn probe(context: &Arc<Context>) -> Probe {
    let module = Module::load(context, "probe", &[0; 8]).unwrap();
    Probe::of(context, |name| module.function(name)).unwrap()
}

#[test]
fn check_peer_with_lost_words_fails() {
    for lose in [0, 3] {
        let (process, driver) = process(2);
        probe_kernels(process.machine(), lose);
        let (one, two) = (context(&driver, 0), context(&driver, 1));
        let memory = DeviceMemory::zeroed(&two, 4096, SOON).unwrap();
        let (writer, owner) = (probe(&one), probe(&two));
        let check = || {
            // SAFETY: only this test has the memory, and the simulated kernels check their accesses.
            unsafe { check_peer(&writer, memory.address(), &owner, &memory, 7) }
        };
        check().unwrap_err(); // The kernel faults without peer access.
        assert!(one.enable_peer(&two).unwrap());
        match (lose, check()) {
            (0, checked) => checked.unwrap(),
            (_, checked) => {
                let error = checked.unwrap_err();
                assert!(error.message().contains("512 words") && error.message().contains("3 of"));
                assert!(error.message().contains("GPU 0") && error.message().contains("GPU 1"));
            }
        }
    }
}

#[test]
fn pair_speed_uses_memory_of_both_gpus() {
    let (process, driver) = process(2);
    probe_kernels(process.machine(), 0);
    let machine = process.machine();
    machine.kernel("cinch_probe_pingpong", 56, |launch| {
        // SAFETY: every bit pattern of the integers is valid, and the probe owns the words and `done`.
        unsafe {
            let [mine, theirs, _, rounds, _, _, done]: [u64; 7] = launch.args();
            let (Some(mine), Some(theirs)) = (launch.words(mine, 1), launch.reach(theirs, 8))
            else {
                return CuResult::ILLEGAL_ADDRESS;
            };
            if mine[0] != 0 || theirs.cast::<u64>().read() != 0 {
                return CuResult(701);
            }
            match launch.reach(done, 8) {
                Some(done) => done.cast::<u64>().write(rounds),
                None => return CuResult::ILLEGAL_ADDRESS,
            }
        }
        CuResult::SUCCESS
    });
    let copies = Arc::new(AtomicUsize::new(0));
    let counted = copies.clone();
    machine.kernel("cinch_probe_copy", 24, move |launch| {
        // SAFETY: every bit pattern of the integers is valid.
        let reached = unsafe {
            let [target, source, vectors]: [u64; 3] = launch.args();
            let bytes = vectors as usize * 16;
            launch.reach(target, bytes).is_some() && launch.reach(source, bytes).is_some()
        };
        counted.fetch_add(1, Ordering::SeqCst);
        if reached {
            CuResult::SUCCESS
        } else {
            CuResult::ILLEGAL_ADDRESS
        }
    });
    let (one, two) = (probe(&context(&driver, 0)), probe(&context(&driver, 1)));
    for (here, there) in [(&one, &two), (&two, &one), (&one, &one)] {
        let speed = pair_speed(here, there).unwrap();
        assert!(speed.write > 0.0 && speed.read > 0.0 && speed.round_trip >= 0.0);
    }
    assert_eq!(copies.load(Ordering::SeqCst), 3 * 2 * 11);
}

#[test]
fn round_trip_without_answer_times_out() {
    let (process, driver) = process(1);
    probe_kernels(process.machine(), 0);
    let context = context(&driver, 0);
    let (here, there) = (probe(&context), probe(&context));
    // SAFETY: the simulated kernels access no memory.
    let error = unsafe { here.round_trip(&there, [0; 2], [0; 2], 10) }.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout);
    assert!(
        error.message().contains("10 times; after 0 and 0"),
        "{error}"
    );
    // SAFETY: the simulated kernels access no memory.
    let error = unsafe { here.copy_speed(0, 0, 8, 1, 1) }.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
}
