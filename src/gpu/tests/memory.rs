//! Tests of memory: bounds, copies, pinning, pointer attributes, and IPC.

use super::*;
use crate::sys::memory::{Mapping, sealed_memfd};

#[test]
fn copies_outside_memory_are_invalid() {
    let (_, driver) = process(1);
    let context = context(&driver, 0);
    let stream = Stream::new(&context).unwrap();
    let memory = DeviceMemory::zeroed(&context, 100, SOON).unwrap();
    memory.write(90, &[7; 10], &stream, SOON).unwrap();
    let mut back = [1; 100];
    memory.read(0, &mut back, &stream, SOON).unwrap();
    assert!(back[..90] == [0; 90] && back[90..] == [7; 10]);
    for (at, bytes) in [(91, 10), (101, 0), (usize::MAX, 2)] {
        let error = memory
            .write(at, &vec![0; bytes], &stream, SOON)
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{at} {bytes}");
    }
    assert!(memory.place(100, 0).is_ok());
}

#[test]
fn repeat_fills_memory_with_first_bytes() {
    let (_, driver) = process(1);
    let context = context(&driver, 0);
    let stream = Stream::new(&context).unwrap();
    let memory = DeviceMemory::zeroed(&context, 1000, SOON).unwrap();
    let pattern: Vec<u8> = (1..=7).collect();
    memory.write(0, &pattern, &stream, SOON).unwrap();
    memory.repeat(7, &stream).unwrap();
    let mut back = [0; 1000];
    memory.read(0, &mut back, &stream, SOON).unwrap();
    assert!(back.iter().enumerate().all(|(i, &x)| x == pattern[i % 7]));
    for filled in [0, 1001] {
        let error = memory.repeat(filled, &stream).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    }
}

#[test]
fn allocation_beyond_memory_reports_free_bytes() {
    let (_, driver) = process(1);
    let context = context(&driver, 0);
    for refused in [
        DeviceMemory::new(&context, 0).unwrap_err(),
        PinnedMemory::new(&context, 0).unwrap_err(),
    ] {
        assert_eq!(refused.kind(), ErrorKind::InvalidArgument);
    }
    let _some = DeviceMemory::new(&context, 1 << 20).unwrap();
    let error = DeviceMemory::new(&context, 1 << 30).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::System);
    for part in [
        "1073741824 bytes on GPU 0",
        "1072693248 of 1073741824 bytes free",
        "OUT_OF",
    ] {
        assert!(error.message().contains(part), "{part}: {error}");
    }
}

#[test]
fn waits_for_unfinished_work_time_out() {
    let (process, driver) = process(1);
    let context = context(&driver, 0);
    let stream = Stream::new(&context).unwrap();
    let event = Event::new(&context).unwrap();
    let memory = DeviceMemory::new(&context, 64).unwrap();
    event.record(&stream).unwrap();
    process.hang(true);
    let short = Duration::from_millis(30);
    let mut target = [0; 64];
    for waited in [
        stream.wait(short),
        event.wait(short),
        memory.read(0, &mut target, &stream, short),
    ] {
        let error = waited.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout);
        assert!(error.message().contains("30ms"), "{error}");
    }
    assert!(!stream.is_idle().unwrap() && !event.has_happened().unwrap());
    process.hang(false);
    stream.wait(short).unwrap();
    memory.read(0, &mut target, &stream, short).unwrap();
}

#[test]
fn pinned_memory_is_visible_to_all_gpus() {
    let (process, driver) = process(2);
    let (one, two) = (context(&driver, 0), context(&driver, 1));
    let pinned = PinnedMemory::new(&one, 4096).unwrap();
    // SAFETY: the accesses are in bounds, and only this test has the memory.
    unsafe {
        assert_eq!(pinned.host().add(4095).read(), 0);
        pinned.host().write(9);
    }
    let stream = Stream::new(&two).unwrap();
    let device = DeviceMemory::new(&two, 1).unwrap();
    let copied = {
        let _bound = two.bind().unwrap();
        // SAFETY: both memories have at least one byte.
        unsafe {
            driver
                .api()
                .cuMemcpyAsync(device.address(), pinned.address(), 1, stream.handle())
        }
    };
    assert_eq!(
        copied,
        CuResult::SUCCESS,
        "portable: any GPU of the process"
    );
    let mut byte = [0];
    device.read(0, &mut byte, &stream, SOON).unwrap();
    assert_eq!(byte, [9]);
    // If the driver returns no device address, `PinnedMemory::new` frees the memory again.
    process.fail("cuMemHostGetDevicePointer", 0, 1, CuResult::UNKNOWN);
    let before = process.leftovers();
    assert!(PinnedMemory::new(&one, 4096).is_err());
    assert_eq!(process.leftovers(), before);
}

#[test]
fn registered_mapping_keeps_its_owner() {
    let (process, driver) = process(1);
    let context = context(&driver, 0);
    let file = sealed_memfd(8192).unwrap();
    let other = Mapping::shared(&file, 8192).unwrap();
    let mapping = Arc::new(Mapping::shared(&file, 8192).unwrap());
    let weak = Arc::downgrade(&mapping);
    let base = mapping.base();
    // SAFETY: `mapping` keeps 8192 bytes mapped.
    let pinned = unsafe { PinnedMemory::register(&context, base, 8192, mapping.clone()) }.unwrap();
    // SAFETY: `mapping` keeps 8192 bytes mapped.
    let again = unsafe { PinnedMemory::register(&context, base, 8192, mapping) }.unwrap_err();
    assert_eq!(again.kind(), ErrorKind::InvalidUsage);
    assert!(weak.upgrade().is_some());
    // SAFETY: the offsets are in bounds of both mappings.
    unsafe {
        pinned.host().add(8191).write(5);
        assert_eq!(other.base().add(8191).read(), 5);
    }
    drop(pinned);
    assert!(weak.upgrade().is_none());
    drop(context);
    assert_eq!(process.leftovers(), [""; 0]);
}

#[test]
fn pointer_attributes_match_memory_kind() {
    let (_, driver) = process(2);
    let context = context(&driver, 1);
    let device = DeviceMemory::new(&context, 1000).unwrap();
    let pinned = PinnedMemory::new(&context, 64).unwrap();
    let host = [0u8; 64];
    let found = driver.pointer(device.address() + 999).unwrap();
    assert_eq!((found.space, found.ordinal), (Space::Device, Some(1)));
    assert_eq!(found.context, Some(context.handle()));
    assert_eq!(found.range, (device.address(), 1000));
    assert!(found.shareable && found.buffer_id != 0);
    let found = driver.pointer(pinned.address()).unwrap();
    assert_eq!(found.space, Space::Pinned);
    let found = driver.pointer(host.as_ptr() as u64).unwrap();
    assert_eq!(
        (found.space, found.ordinal, found.context, found.range),
        (Space::Pageable, None, None, (0, 0))
    );
}

/// Returns two processes on one machine, with a context on GPU 0 for the first and on GPU 1 for the second.
fn two_processes() -> (Process, Arc<Context>, Process, Arc<Context>) {
    let machine = MockMachine::new(2);
    let (one, two) = (machine.process(), machine.process());
    let drivers = [&one, &two].map(|p| Driver::with(Box::new(p.clone())).unwrap());
    let (ours, theirs) = (context(&drivers[0], 0), context(&drivers[1], 1));
    (one, ours, two, theirs)
}

#[test]
fn foreign_memory_is_mapped_once_until_last_user() {
    let (_one, ours, two, theirs) = two_processes();
    let memory = DeviceMemory::zeroed(&ours, 4096, SOON).unwrap();
    let handle = IpcHandle::export(&ours, memory.address() + 64, 1024).unwrap();
    let handle = IpcHandle::from_bytes(&handle.to_bytes());
    assert_eq!(handle.bytes(), 1024);

    let first = IpcMemory::open(&theirs, &handle).unwrap();
    let second = IpcMemory::open(&theirs, &handle).unwrap();
    assert_eq!(first.address(), second.address());
    assert_ne!(first.address(), memory.address() + 64);
    // A second range of one allocation uses the existing mapping.
    let rest = IpcHandle::export(&ours, memory.address() + 2048, 2048).unwrap();
    let third = IpcMemory::open(&theirs, &rest).unwrap();
    assert_eq!(third.address() - first.address(), 2048 - 64);
    assert_eq!(two.calls("cuIpcOpenMemHandle"), 1);
    assert_eq!(theirs.driver().ipc_mappings(), 1);

    // Writes through the mapping arrive in the owner's memory.
    let stream = Stream::new(&theirs).unwrap();
    {
        let _bound = theirs.bind().unwrap();
        // SAFETY: the mapped range has 1024 bytes.
        let done = unsafe {
            theirs
                .driver()
                .api()
                .cuMemsetD8Async(first.address(), 3, 1024, stream.handle())
        };
        assert_eq!(done, CuResult::SUCCESS);
    }
    let mut seen = [1; 4096];
    memory
        .read(0, &mut seen, &Stream::new(&ours).unwrap(), SOON)
        .unwrap();
    assert!(seen[..64] == [0; 64] && seen[64..1088] == [3; 1024] && seen[1088..] == [0; 3008]);

    drop((first, third));
    assert_eq!(two.calls("cuIpcCloseMemHandle"), 0);
    drop(second);
    assert_eq!(two.calls("cuIpcCloseMemHandle"), 1);
    assert_eq!(theirs.driver().ipc_mappings(), 0);
    IpcMemory::open(&theirs, &handle).unwrap();
    assert_eq!(
        two.calls("cuIpcOpenMemHandle"),
        2,
        "once closed, it is opened anew"
    );
    drop((stream, theirs));
    assert_eq!(two.leftovers(), [""; 0]);
}

#[test]
fn concurrent_opens_share_one_mapping() {
    let (_one, ours, two, theirs) = two_processes();
    let memory = DeviceMemory::new(&ours, 64).unwrap();
    let handle = IpcHandle::export(&ours, memory.address(), 64).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..200 {
                    // The mock rejects a second mapping of one allocation, and closing an
                    // allocation that is not mapped.
                    IpcMemory::open(&theirs, &handle).unwrap();
                }
            });
        }
    });
    assert_eq!(
        two.calls("cuIpcOpenMemHandle"),
        two.calls("cuIpcCloseMemHandle")
    );
    assert_eq!(theirs.driver().ipc_mappings(), 0);
}

#[test]
fn forged_handles_are_refused_without_leak() {
    let (one, ours, two, theirs) = two_processes();
    let memory = DeviceMemory::new(&ours, 4096).unwrap();
    let good = IpcHandle::export(&ours, memory.address(), 4096).unwrap();
    let mut bytes = good.to_bytes();
    bytes[80..88].copy_from_slice(&1u64.to_le_bytes()); // offset
    let error = IpcMemory::open(&theirs, &IpcHandle::from_bytes(&bytes)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Mismatch);
    assert!(error.message().contains("4096 bytes at 1"), "{error}");
    bytes[88..96].copy_from_slice(&u64::MAX.to_le_bytes()); // size: the sum wraps
    assert!(IpcMemory::open(&theirs, &IpcHandle::from_bytes(&bytes)).is_err());
    let nothing = IpcHandle::from_bytes(&[0; IPC_HANDLE_BYTES]);
    assert!(IpcMemory::open(&theirs, &nothing).is_err());
    // A process cannot open a handle of its own memory.
    let error = IpcMemory::open(&ours, &good).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidUsage);
    // Opening fails if the driver does not report the size of the mapping.
    two.fail("cuMemGetAddressRange", 0, 1, CuResult::UNKNOWN);
    assert!(IpcMemory::open(&theirs, &good).is_err());
    // Opening fails between GPUs without peer access.
    one.machine().refuse_peers(0, 1);
    let error = IpcMemory::open(&theirs, &good).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.message().contains("GPU 1"), "{error}");
    assert_eq!(theirs.driver().ipc_mappings(), 0);
    drop(theirs);
    assert_eq!(two.leftovers(), [""; 0]);
}

#[test]
fn export_outside_one_device_allocation_is_invalid() {
    let (process, driver) = process(2);
    let (one, two) = (context(&driver, 0), context(&driver, 1));
    let memory = DeviceMemory::new(&one, 4096).unwrap();
    let pinned = PinnedMemory::new(&one, 64).unwrap();
    let host = [0u8; 64];
    for (context, address, bytes) in [
        (&one, memory.address(), 4097),
        (&one, memory.address() + 4095, 2),
        (&two, memory.address(), 64),
        (&one, pinned.address(), 64),
        (&one, host.as_ptr() as u64, 64),
    ] {
        let error = IpcHandle::export(context, address, bytes).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    }
    process.fail("cuIpcGetMemHandle", 0, 1, CuResult::INVALID_VALUE);
    let error = IpcHandle::export(&one, memory.address(), 64).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.message().contains("pools"), "{error}");
}

/// Stream-ordered memory is freed in the order of its stream, also after the caller has dropped the stream
/// and during a capture. Neither of the driver's allocators frees memory of the other.
#[test]
fn queued_memory_is_freed_by_its_own_allocator() {
    let (process, driver) = process(1);
    let context = context(&driver, 0);
    let own = Arc::new(Stream::new(&context).unwrap());
    let callers = Stream::new(&context).unwrap();
    let before = process.leftovers();
    let outliving = {
        let own = Arc::new(Stream::new(&context).unwrap());
        DeviceMemory::queued(&own, 64).unwrap()
    };
    let memory = DeviceMemory::queued(&own, 4096).unwrap();
    memory.fill(3, &own).unwrap();
    let mut back = [0; 4096];
    memory.read(0, &mut back, &own, SOON).unwrap();
    assert_eq!(back, [3; 4096]);
    let recorded = Graph::capture(&callers, CaptureMode::Global, |_| {
        drop((memory, outliving));
        drop(DeviceMemory::queued(&own, 64)?);
        Ok(())
    });
    drop(recorded.unwrap());
    assert_eq!(process.leftovers(), before);
    assert_eq!(
        (process.calls("cuMemFree"), process.calls("cuMemFreeAsync")),
        (0, 3)
    );

    let (at_once, queued) = (
        DeviceMemory::new(&context, 64).unwrap(),
        DeviceMemory::queued(&own, 64).unwrap(),
    );
    let _bound = context.bind().unwrap();
    // SAFETY: the mock rejects both calls.
    let refused = unsafe {
        [
            driver.api().cuMemFree(queued.address()),
            driver.api().cuMemFreeAsync(at_once.address(), own.handle()),
        ]
    };
    assert_eq!(refused, [CuResult::INVALID_VALUE; 2]);
    assert!(matches!(
        DeviceMemory::queued(&own, 0).unwrap_err().kind(),
        ErrorKind::InvalidArgument
    ));
}
