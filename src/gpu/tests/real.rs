//! Tests on this machine's GPUs. Without a GPU, or without kernels in the build, each test prints the reason
//! and passes.

use super::*;
use crate::gpu::kernels::{ImageKind, KernelImage};
use crate::gpu::probe::{Probe, check_peer, probe_word};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Returns the GPUs, or none after printing the reason. The lock makes tests use them one after the other: a
/// test that waits for a whole GPU would invalidate another test's capture.
fn devices() -> (MutexGuard<'static, ()>, Vec<Device>) {
    static USED: Mutex<()> = Mutex::new(());
    let lock = USED.lock().unwrap_or_else(PoisonError::into_inner);
    (lock, found())
}

fn found() -> Vec<Device> {
    let found = Driver::load().and_then(|driver| driver.devices());
    match (found, kernels::STATE) {
        (Ok(devices), kernels::State::Built { .. }) => devices,
        (Err(error), _) => {
            println!("SKIPPED: {error}");
            Vec::new()
        }
        (_, state) => {
            println!("SKIPPED: kernels {state}");
            Vec::new()
        }
    }
}

#[test]
fn embedded_kernels_run_on_gpus() {
    let (_lock, devices) = devices();
    for device in devices {
        let context = Context::primary(&device).unwrap();
        let probe = Probe::new(&context).unwrap();
        let stream = Stream::new(&context).unwrap();
        let words = 100_003;
        let memory = DeviceMemory::zeroed(&context, words * 8, SOON).unwrap();
        // SAFETY: only this test has the memory.
        unsafe {
            probe.fill(memory.address(), words as u64, 5).unwrap();
            let wrong = |seed| probe.wrong_words(memory.address(), words as u64, seed);
            assert_eq!(wrong(5).unwrap(), 0);
            assert_eq!(wrong(6).unwrap(), words as u32);
        }
        let mut bytes = vec![0; words * 8];
        memory.read(0, &mut bytes, &stream, SOON).unwrap();
        for (index, word) in bytes.chunks_exact(8).enumerate() {
            let word = u64::from_le_bytes(word.try_into().unwrap());
            assert_eq!(word, probe_word(5, index as u64), "word {index}");
        }
        let found = driver_pointer(&device, memory.address());
        assert_eq!(
            (found.space, found.ordinal),
            (Space::Device, Some(device.ordinal()))
        );
        let pinned = PinnedMemory::new(&context, 4096).unwrap();
        assert_eq!(
            driver_pointer(&device, pinned.address()).space,
            Space::Pinned
        );
        assert_eq!(
            driver_pointer(&device, bytes.as_ptr() as u64).space,
            Space::Pageable
        );
        // SAFETY: only this test has the memory, and both halves are aligned to 16.
        let speed = unsafe {
            let half = (words as u64 * 8 / 2) & !15;
            probe.copy_speed(memory.address() + half, memory.address(), half, 64, 10)
        };
        println!("{device}: copies {:.1} GB/s", speed.unwrap() / 1e9);
    }
}

/// Every file of `kernels/entry/` loads from the image that the library chooses, and from the PTX that newer GPUs
/// get. The driver compiles the latter.
#[test]
fn chosen_images_and_ptx_load_on_gpus() {
    let (_lock, devices) = devices();
    for device in devices {
        let context = Context::primary(&device).unwrap();
        for file in kernels::files() {
            let chosen = kernels::choose(file.images, device.compute_capability);
            let Some(chosen) = chosen else {
                let error = kernels::load(&context, file.name).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
                println!("{}: {error}", file.name);
                continue;
            };
            let is_ptx = |image: &&KernelImage| {
                image.target.kind == ImageKind::Ptx
                    && image.target.runs_on(device.compute_capability)
            };
            for image in [chosen]
                .into_iter()
                .chain(file.images.iter().filter(is_ptx))
            {
                let unpacked = image.unpack().unwrap();
                let begin = Instant::now();
                Module::load(&context, file.name, unpacked.bytes()).unwrap();
                let took = begin.elapsed();
                println!("{device}: {} for {}: {took:.1?}", file.name, image.target);
            }
        }
    }
}

fn driver_pointer(device: &Device, address: u64) -> Pointer {
    device.driver().pointer(address).unwrap()
}

/// Stream-ordered memory is allocated, used and freed on one stream during the capture of another stream.
#[test]
fn queued_memory_during_capture_is_usable() {
    let (_lock, devices) = devices();
    for device in devices {
        let context = Context::primary(&device).unwrap();
        let callers = Stream::new(&context).unwrap();
        let own = Arc::new(Stream::new(&context).unwrap());
        let early = DeviceMemory::queued(&own, 1 << 20).unwrap();
        early.fill(1, &own).unwrap();
        let graph = Graph::capture(&callers, CaptureMode::Global, |_| {
            let late = DeviceMemory::queued(&own, 1 << 20)?;
            late.fill(2, &own)?;
            let mut bytes = [0; 64];
            late.read((1 << 20) - 64, &mut bytes, &own, SOON)?;
            assert_eq!(bytes, [2; 64]);
            early.read(0, &mut bytes, &own, SOON)?;
            assert_eq!(bytes, [1; 64]);
            drop((early, late));
            Ok(())
        });
        graph.unwrap();
        // The memory is dropped after the last other reference to its stream.
        let memory = DeviceMemory::queued(&own, 1 << 20).unwrap();
        drop((own, callers));
        drop(memory);
    }
}

#[test]
fn graph_keeps_objects_until_destroyed() {
    let (_lock, devices) = devices();
    for device in devices {
        let context = Context::primary(&device).unwrap();
        let stream = Stream::new(&context).unwrap();
        let memory = DeviceMemory::zeroed(&context, 64, SOON).unwrap();
        let kept = Arc::new(());
        for mode in [
            CaptureMode::Global,
            CaptureMode::ThreadLocal,
            CaptureMode::Relaxed,
        ] {
            let graph = Graph::capture(&stream, mode, |stream| {
                let beside = Event::new(&context)?;
                assert!(beside.has_happened()?);
                drop(DeviceMemory::new(&context, 64)?);
                assert!(stream.is_capturing()? && stream.keep_for_replay(kept.clone())?);
                memory.fill(mode as u8 + 1, stream)
            })
            .unwrap();
            assert_eq!(Arc::strong_count(&kept), 2);
            let mut bytes = [0; 64];
            memory.read(0, &mut bytes, &stream, SOON).unwrap();
            assert_ne!(bytes, [mode as u8 + 1; 64], "recorded, not run");
            graph.launch(&stream).unwrap();
            memory.read(0, &mut bytes, &stream, SOON).unwrap();
            assert_eq!(bytes, [mode as u8 + 1; 64]);
            drop(graph);
            for _ in 0..2000 {
                if Arc::strong_count(&kept) == 1 {
                    break;
                }
                std::thread::sleep(Duration::from_millis(5));
            }
            assert_eq!(Arc::strong_count(&kept), 1, "released");
        }
    }
}

#[test]
fn replays_are_ordered_with_streams_by_events() {
    let (_lock, devices) = devices();
    for device in devices {
        let context = Context::primary(&device).unwrap();
        let streams = [(); 2].map(|()| Stream::new(&context).unwrap());
        let memory = DeviceMemory::zeroed(&context, 64 << 20, SOON).unwrap();
        let ordered = Event::new(&context).unwrap();
        let fill = |values: [u8; 3], stream: &Stream, behind: &mut dyn FnMut(&Stream)| {
            for value in values {
                memory.fill(value, stream).unwrap();
                behind(stream);
            }
        };
        let graph = Graph::capture(&streams[0], CaptureMode::ThreadLocal, |stream| {
            stream.wait_event_in_replays(&ordered)?;
            let mut end = None;
            fill([1, 2, 3], stream, &mut |stream| {
                end = Some(stream.mark_end(&ordered, end.take()).unwrap());
            });
            Ok(())
        })
        .unwrap();
        let error = streams[0].mark_end(&ordered, None).unwrap_err();
        assert!(error.message().contains("no capture"), "{error}");
        for round in 0..20 {
            graph.launch(&streams[0]).unwrap();
            streams[1].wait_event(&ordered).unwrap();
            fill([4, 5, 6], &streams[1], &mut |_| ());
            ordered.record(&streams[1]).unwrap();
            let (last, value) = match round % 2 {
                0 => (&streams[1], 6),
                _ => {
                    graph.launch(&streams[0]).unwrap();
                    ordered.wait(SOON).unwrap();
                    (&streams[0], 3)
                }
            };
            for at in [0, memory.bytes() - 64] {
                let mut bytes = [0; 64];
                memory.read(at, &mut bytes, last, SOON).unwrap();
                assert_eq!(bytes, [value; 64], "round {round}, at {at}");
            }
        }
    }
}

#[test]
fn round_trip_between_gpus_succeeds() {
    let (_lock, devices) = devices();
    let Some(first) = devices.first() else {
        return;
    };
    // Measures two streams of one GPU, then the first GPU with each other GPU.
    for second in &devices {
        let (here, there) = (
            Context::primary(first).unwrap(),
            Context::primary(second).unwrap(),
        );
        if !here.enable_peer(&there).unwrap() || !there.enable_peer(&here).unwrap() {
            println!("SKIPPED: {first} and {second} do not reach one another");
            continue;
        }
        let (near, far) = (Probe::new(&here).unwrap(), Probe::new(&there).unwrap());
        let mine = DeviceMemory::zeroed(&here, 1 << 20, SOON).unwrap();
        let theirs = DeviceMemory::zeroed(&there, 1 << 20, SOON).unwrap();
        // SAFETY: only this test has the memory, and both GPUs access it at one address.
        unsafe {
            let (a, b) = (mine.address(), theirs.address());
            let trip = near.round_trip(&far, [a, a], [b, b], 2000).unwrap();
            println!("{first} to {second} and back: {:.2} us", trip * 1e6);
            check_peer(&near, theirs.address(), &far, &theirs, 3).unwrap();
            check_peer(&far, mine.address(), &near, &mine, 4).unwrap();
        }
    }
}
