//! Tests on the simulated machine, which rejects wrong contexts and accesses that a GPU could not make.
//! `real` tests the machine's GPUs.

mod memory;
mod real;
mod work;

use super::*;
use crate::error::ErrorKind;
use crate::sys::cuda::CuResult;
use crate::sys::cuda::mock::{MockMachine, PROGRAMMATIC_LAUNCHES, Process};
use std::sync::Arc;
use std::time::Duration;

const SOON: Duration = Duration::from_secs(20);

/// Returns a process with its driver, on a new machine.
fn process(devices: usize) -> (Process, Arc<Driver>) {
    process_on(&MockMachine::new(devices))
}

fn process_on(machine: &Arc<MockMachine>) -> (Process, Arc<Driver>) {
    let process = machine.process();
    let driver = Driver::with(Box::new(process.clone())).unwrap();
    (process, driver)
}

fn context(driver: &Arc<Driver>, ordinal: u32) -> Arc<Context> {
    Context::primary(&Device::at(driver, ordinal).unwrap()).unwrap()
}

#[test]
fn devices_of_driver_have_its_properties() {
    let (_, driver) = process(3);
    let devices = driver.devices().unwrap();
    assert_eq!(devices.len(), 3);
    assert_eq!(
        devices[2].to_string(),
        "GPU 2 (Simulated GPU at 0000:02:00.0)"
    );
    assert_eq!(devices[1].compute_capability, (9, 0));
    assert_eq!(devices[1].uuid, [2; 16]);
    let error = Device::at(&driver, 3).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(error.message().contains("GPU 3") && error.message().contains("there are 3"));
}

#[test]
fn driver_without_devices_is_unsupported() {
    let process = MockMachine::new(0).process();
    let error = Driver::with(Box::new(process)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(
        error
            .message()
            .contains("cuInit: CUDA_ERROR_NO_DEVICE (100)"),
        "{error}"
    );
}

#[test]
fn driver_load_never_panics() {
    match Driver::load() {
        Ok(driver) => assert!(driver.version() >= 12_000),
        Err(error) => assert!(!error.message().is_empty()),
    }
}

#[test]
fn callers_context_is_restored() {
    let (process, driver) = process(2);
    let (one, two) = (context(&driver, 0), context(&driver, 1));
    assert_eq!(process.current(), None);
    {
        let _bound = one.bind().unwrap();
        assert_eq!(process.current(), Some(one.handle()));
        let stream = Stream::new(&two).unwrap();
        let memory = DeviceMemory::zeroed(&two, 100, SOON).unwrap();
        assert_eq!(process.current(), Some(one.handle()));
        drop((memory, stream));
        assert_eq!(process.current(), Some(one.handle()));
        let (process, two) = (process.clone(), two.clone());
        std::thread::spawn(move || {
            assert_eq!(process.current(), None, "another thread has its own");
            drop(two.bind().unwrap());
        })
        .join()
        .unwrap();
    }
    assert_eq!(process.current(), None);
}

#[test]
fn failed_call_restores_callers_context() {
    let (process, driver) = process(1);
    let context = context(&driver, 0);
    for function in [
        "cuThreadExchangeStreamCaptureMode",
        "cuMemAlloc",
        "cuCtxPushCurrent",
    ] {
        process.fail(function, 0, 1, CuResult::UNKNOWN);
        let error = DeviceMemory::new(&context, 64).unwrap_err();
        assert!(error.message().contains(function), "{error}");
        assert_eq!(process.current(), None, "{function}");
    }
    DeviceMemory::new(&context, 64).unwrap();
}

#[test]
fn objects_dropped_in_any_order_are_all_freed() {
    let (process, driver) = process(2);
    process
        .machine()
        .kernel("nothing", 8, |_| CuResult::SUCCESS);
    let context = context(&driver, 0);
    let module = Module::load(&context, "test", &[0; 8]).unwrap();
    let function = module.function("nothing").unwrap();
    let stream = Stream::new(&context).unwrap();
    let event = Event::new(&context).unwrap();
    let memory = DeviceMemory::new(&context, 4096).unwrap();
    let pinned = PinnedMemory::new(&context, 4096).unwrap();
    assert_eq!(process.leftovers().len(), 6, "{:?}", process.leftovers());
    // Parents are dropped before their children.
    drop((driver, context, module));
    event.record(&stream).unwrap();
    // SAFETY: the kernel takes 8 bytes and accesses no memory.
    unsafe { function.launch(1, 32, 0, &stream, &0u64).unwrap() };
    drop((stream, event, memory, pinned));
    assert_eq!(process.leftovers(), ["1 modules", "1 retained contexts"]);
    drop(function);
    assert_eq!(process.leftovers(), [""; 0]);
}

#[test]
fn destructors_after_driver_shutdown_do_not_panic() {
    let (process, driver) = process(1);
    let context = context(&driver, 0);
    let held = (
        DeviceMemory::new(&context, 64).unwrap(),
        PinnedMemory::new(&context, 64).unwrap(),
        Stream::new(&context).unwrap(),
        Event::new(&context).unwrap(),
    );
    for function in ["cuCtxPushCurrent", "cuStreamDestroy", "cuEventDestroy"] {
        process.fail(function, 0, usize::MAX, CuResult::DEINITIALIZED);
    }
    drop(held);
}

#[test]
fn peer_access_is_enabled_once_per_direction() {
    let (process, driver) = process(3);
    process.machine().refuse_peers(0, 2);
    let contexts: Vec<_> = (0..3).map(|ordinal| context(&driver, ordinal)).collect();
    assert!(contexts[0].enable_peer(&contexts[0]).unwrap());
    assert!(contexts[0].enable_peer(&contexts[1]).unwrap());
    assert!(contexts[0].enable_peer(&contexts[1]).unwrap(), "again");
    assert!(!contexts[0].enable_peer(&contexts[2]).unwrap(), "refused");
    // Access in one direction does not allow the other direction.
    let there = DeviceMemory::new(&contexts[1], 64).unwrap();
    let here = DeviceMemory::new(&contexts[0], 64).unwrap();
    let [first, second] = [0, 1].map(|at| Stream::new(&contexts[at]).unwrap());
    there.fill(1, &first).unwrap();
    assert!(here.fill(1, &second).is_err());
    // The driver may report access and refuse to enable it.
    process.fail(
        "cuCtxEnablePeerAccess",
        0,
        1,
        CuResult::PEER_ACCESS_UNSUPPORTED,
    );
    assert!(!contexts[1].enable_peer(&contexts[2]).unwrap());
    process.fail("cuCtxEnablePeerAccess", 0, 1, CuResult::UNKNOWN);
    let error = contexts[1].enable_peer(&contexts[2]).unwrap_err();
    assert!(error.message().contains("from GPU 1") && error.message().contains("GPU 2"));
}

#[test]
fn stack_limit_is_only_raised() {
    let (process, driver) = process(1);
    let context = context(&driver, 0);
    context.raise_stack(512).unwrap();
    assert_eq!(process.calls("cuCtxSetLimit"), 0);
    context.raise_stack(4096).unwrap();
    context.raise_stack(4096).unwrap();
    assert_eq!(process.calls("cuCtxSetLimit"), 1);
}

#[test]
fn old_driver_error_names_missing_function() {
    let (process, driver) = process(1);
    let context = context(&driver, 0);
    process
        .machine()
        .kernel("nothing", 8, |_| CuResult::SUCCESS);
    // Without the functions of CUDA 12.4, a kernel is loaded when its attributes are queried.
    for function in ["cuFuncLoad", "cuModuleGetFunctionCount"] {
        process.fail(function, 0, usize::MAX, CuResult::FUNCTION_MISSING);
    }
    let module = Module::load(&context, "test", &[0; 8]).unwrap();
    let queries = process.calls("cuFuncGetAttribute");
    module.function("nothing").unwrap();
    assert!(process.calls("cuFuncGetAttribute") > queries);
    // Required functions have no substitute.
    process.fail("cuMemAlloc", 0, 1, CuResult::FUNCTION_MISSING);
    let error = DeviceMemory::new(&context, 64).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(
        error
            .message()
            .contains("CUDA 13.0) is too old for cuMemAlloc"),
        "{error}"
    );
}
