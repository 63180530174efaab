//! A simulated machine whose GPUs several processes use. Memory is on the heap. The simulated driver has only
//! the functions that connecting needs, and can have the faults of real drivers.

use crate::sys::cuda::*;
use std::cell::RefCell;
use std::collections::{BTreeMap, HashSet};
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr::without_provenance_mut;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

thread_local! {
    /// Stack of the thread's current contexts, each given by its GPU's ordinal.
    static CURRENT: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// The state that all processes of a machine share.
#[derive(Default)]
pub(super) struct Machine {
    /// Number of GPUs of the simulated machine.
    pub devices: usize,
    /// Pairs of GPUs to which the driver refuses peer access; a pair names the accessing GPU first.
    pub refused: HashSet<(usize, usize)>,
    /// Whether `cuCtxEnablePeerAccess` fails although `cuDeviceCanAccessPeer` allows it.
    pub enabling_fails: bool,
    /// Whether links between GPUs have native atomics.
    pub atomics: bool,
    /// Compute capabilities of GPUs that differ from 9.0.
    pub capabilities: BTreeMap<usize, (c_int, c_int)>,
    /// Whether opening IPC handles fails.
    pub ipc_fails: bool,
    /// Whether exporting IPC handles fails.
    pub export_fails: bool,
    /// Bytes of device memory of each GPU.
    pub memory: usize,
    /// Bytes and GPU of each allocation, by address; host memory has no GPU.
    allocations: Mutex<BTreeMap<u64, (usize, Option<usize>)>>,
    registered: Mutex<HashSet<u64>>,
    mappings: AtomicUsize,
    contexts: AtomicUsize,
    streams: AtomicUsize,
}

impl Machine {
    /// Returns a machine without faults.
    pub fn new(devices: usize) -> Machine {
        Machine {
            devices,
            atomics: true,
            memory: 1 << 30,
            ..Machine::default()
        }
    }

    /// Returns the numbers of allocations, registrations, mappings, contexts and streams that still
    /// exist.
    pub fn left(&self) -> [usize; 5] {
        [
            self.allocations.lock().unwrap().len(),
            self.registered.lock().unwrap().len(),
            self.mappings.load(Ordering::Relaxed),
            self.contexts.load(Ordering::Relaxed),
            self.streams.load(Ordering::Relaxed),
        ]
    }

    /// Returns the GPU that has the memory at `address`; `None` for host memory.
    pub fn owner(&self, address: u64) -> Option<usize> {
        self.around(address).expect("an address of nothing").2
    }

    fn around(&self, address: u64) -> Option<(u64, usize, Option<usize>)> {
        let allocations = self.allocations.lock().unwrap();
        let (&start, &(bytes, owner)) = allocations.range(..=address).next_back()?;
        (address < start + bytes as u64).then_some((start, bytes, owner))
    }

    fn allocate(&self, bytes: usize, owner: Option<usize>) -> Option<u64> {
        let mut allocations = self.allocations.lock().unwrap();
        let used: usize = allocations
            .values()
            .filter(|(_, of)| owner.is_some() && *of == owner)
            .map(|(bytes, _)| bytes)
            .sum();
        if used + bytes > self.memory {
            return None;
        }
        // A driver does not zero memory, so new memory gets a nonzero pattern.
        let memory = vec![0xa5u8; bytes + 256].leak();
        let address = (memory.as_ptr() as u64).next_multiple_of(256);
        allocations.insert(address, (bytes, owner));
        Some(address)
    }
}

/// The driver of one process.
pub(super) struct Process {
    pub machine: Arc<Machine>,
    /// GPUs of the machine that the process sees, in the order of its ordinals.
    pub visible: Vec<usize>,
}

impl Process {
    fn current(&self) -> usize {
        CURRENT.with_borrow(|stack| *stack.last().expect("no context is current"))
    }
}

fn name(of: String, to: *mut c_char, bytes: c_int) -> CuResult {
    assert!(of.len() < bytes as usize);
    // SAFETY: the driver's contract gives room for `bytes` bytes.
    unsafe {
        to.cast::<u8>().copy_from(of.as_ptr(), of.len());
        to.add(of.len()).write(0);
    }
    CuResult::SUCCESS
}

/// Writes `value` through an output pointer of the driver's API.
fn give<T>(to: *mut T, value: T) -> CuResult {
    // SAFETY: the driver's contract makes every output pointer writable.
    unsafe { to.write(value) };
    CuResult::SUCCESS
}

#[allow(non_snake_case)]
impl Api for Process {
    fn source(&self) -> String {
        "a simulated machine".into()
    }
    unsafe fn cuInit(&self, _: c_uint) -> CuResult {
        CuResult::SUCCESS
    }
    unsafe fn cuDriverGetVersion(&self, version: *mut c_int) -> CuResult {
        give(version, 13000)
    }
    unsafe fn cuDeviceGet(&self, device: *mut CUdevice, ordinal: c_int) -> CuResult {
        give(device, self.visible[ordinal as usize] as c_int)
    }
    unsafe fn cuDeviceGetCount(&self, count: *mut c_int) -> CuResult {
        give(count, self.visible.len() as c_int)
    }
    unsafe fn cuDeviceGetName(&self, to: *mut c_char, bytes: c_int, _: CUdevice) -> CuResult {
        name("simulated".into(), to, bytes)
    }
    unsafe fn cuDeviceGetUuid(&self, uuid: *mut CUuuid, device: CUdevice) -> CuResult {
        give(
            uuid,
            CUuuid {
                bytes: [device as c_char + 1; 16],
            },
        )
    }
    unsafe fn cuDeviceGetPCIBusId(
        &self,
        to: *mut c_char,
        bytes: c_int,
        device: CUdevice,
    ) -> CuResult {
        name(format!("0000:0{device}:00.0"), to, bytes)
    }
    unsafe fn cuDeviceGetAttribute(
        &self,
        value: *mut c_int,
        attribute: CUdevice_attribute,
        device: CUdevice,
    ) -> CuResult {
        let capabilities = &self.machine.capabilities;
        let capability = capabilities.get(&(device as usize)).unwrap_or(&(9, 0));
        let found = match attribute {
            CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR => capability.0,
            CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR => capability.1,
            _ => 1,
        };
        give(value, found)
    }
    unsafe fn cuDeviceTotalMem(&self, bytes: *mut usize, _: CUdevice) -> CuResult {
        give(bytes, self.machine.memory)
    }
    unsafe fn cuDeviceCanAccessPeer(
        &self,
        can: *mut c_int,
        device: CUdevice,
        peer: CUdevice,
    ) -> CuResult {
        let pair = (device as usize, peer as usize);
        give(can, c_int::from(!self.machine.refused.contains(&pair)))
    }
    unsafe fn cuDeviceGetP2PAttribute(
        &self,
        value: *mut c_int,
        attribute: CUdevice_P2PAttribute,
        _: CUdevice,
        _: CUdevice,
    ) -> CuResult {
        match attribute {
            CUdevice_P2PAttribute::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED => {
                give(value, c_int::from(self.machine.atomics))
            }
            CUdevice_P2PAttribute::CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK => give(value, 3),
            _ => CuResult::INVALID_VALUE,
        }
    }
    unsafe fn cuDevicePrimaryCtxRetain(
        &self,
        context: *mut CUcontext,
        device: CUdevice,
    ) -> CuResult {
        self.machine.contexts.fetch_add(1, Ordering::Relaxed);
        give(context, without_provenance_mut(device as usize + 1))
    }
    unsafe fn cuDevicePrimaryCtxRelease(&self, _: CUdevice) -> CuResult {
        self.machine.contexts.fetch_sub(1, Ordering::Relaxed);
        CuResult::SUCCESS
    }
    unsafe fn cuCtxPushCurrent(&self, context: CUcontext) -> CuResult {
        CURRENT.with_borrow_mut(|stack| stack.push(context.addr() - 1));
        CuResult::SUCCESS
    }
    unsafe fn cuCtxPopCurrent(&self, context: *mut CUcontext) -> CuResult {
        let top = CURRENT.with_borrow_mut(|stack| stack.pop().expect("nothing is current"));
        give(context, without_provenance_mut(top + 1))
    }
    unsafe fn cuThreadExchangeStreamCaptureMode(&self, _: *mut CUstreamCaptureMode) -> CuResult {
        CuResult::SUCCESS
    }
    unsafe fn cuCtxEnablePeerAccess(&self, _: CUcontext, _: c_uint) -> CuResult {
        match self.machine.enabling_fails {
            true => CuResult::PEER_ACCESS_UNSUPPORTED,
            false => CuResult::SUCCESS,
        }
    }
    unsafe fn cuMemAlloc(&self, address: *mut CUdeviceptr, bytes: usize) -> CuResult {
        match self.machine.allocate(bytes, Some(self.current())) {
            Some(found) => give(address, found),
            None => CuResult::OUT_OF_MEMORY,
        }
    }
    unsafe fn cuMemFree(&self, address: CUdeviceptr) -> CuResult {
        match self.machine.allocations.lock().unwrap().remove(&address) {
            Some(_) => CuResult::SUCCESS,
            None => CuResult::INVALID_VALUE,
        }
    }
    unsafe fn cuMemGetInfo(&self, free: *mut usize, total: *mut usize) -> CuResult {
        give(free, 0);
        give(total, self.machine.memory)
    }
    unsafe fn cuMemGetAddressRange(
        &self,
        base: *mut CUdeviceptr,
        bytes: *mut usize,
        address: CUdeviceptr,
    ) -> CuResult {
        let Some((start, size, _)) = self.machine.around(address) else {
            return CuResult::NOT_FOUND;
        };
        give(base, start);
        give(bytes, size)
    }
    unsafe fn cuMemsetD8Async(
        &self,
        address: CUdeviceptr,
        value: u8,
        bytes: usize,
        _: CUstream,
    ) -> CuResult {
        // SAFETY: the caller passes heap memory of that size, which `Machine` keeps.
        unsafe { (address as *mut u8).write_bytes(value, bytes) };
        CuResult::SUCCESS
    }
    unsafe fn cuMemHostAlloc(
        &self,
        address: *mut *mut c_void,
        bytes: usize,
        _: c_uint,
    ) -> CuResult {
        match self.machine.allocate(bytes, None) {
            Some(found) => give(address, found as *mut c_void),
            None => CuResult::OUT_OF_MEMORY,
        }
    }
    unsafe fn cuMemFreeHost(&self, address: *mut c_void) -> CuResult {
        // SAFETY: the caller's contract is equal to `cuMemFree`'s.
        unsafe { self.cuMemFree(address as u64) }
    }
    unsafe fn cuMemHostRegister(&self, address: *mut c_void, _: usize, _: c_uint) -> CuResult {
        match self
            .machine
            .registered
            .lock()
            .unwrap()
            .insert(address as u64)
        {
            true => CuResult::SUCCESS,
            false => CuResult::HOST_MEMORY_ALREADY_REGISTERED,
        }
    }
    unsafe fn cuMemHostUnregister(&self, address: *mut c_void) -> CuResult {
        match self
            .machine
            .registered
            .lock()
            .unwrap()
            .remove(&(address as u64))
        {
            true => CuResult::SUCCESS,
            false => CuResult::HOST_MEMORY_NOT_REGISTERED,
        }
    }
    unsafe fn cuMemHostGetDevicePointer(
        &self,
        device: *mut CUdeviceptr,
        address: *mut c_void,
        _: c_uint,
    ) -> CuResult {
        give(device, address as u64)
    }
    unsafe fn cuPointerGetAttributes(
        &self,
        count: c_uint,
        names: *mut CUpointer_attribute,
        places: *mut *mut c_void,
        address: CUdeviceptr,
    ) -> CuResult {
        let Some((start, bytes, Some(owner))) = self.machine.around(address) else {
            return CuResult::INVALID_VALUE;
        };
        let ordinal = self.visible.iter().position(|&device| device == owner);
        for at in 0..count as usize {
            // SAFETY: the driver's contract gives `count` names and `count` pointers, each to a value of its
            // attribute's type.
            unsafe {
                let place = *places.add(at);
                match *names.add(at) {
                    CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE => give(
                        place.cast::<c_uint>(),
                        CUmemorytype::CU_MEMORYTYPE_DEVICE as c_uint,
                    ),
                    CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL => {
                        give(place.cast::<c_int>(), ordinal.unwrap() as c_int)
                    }
                    CUpointer_attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR => {
                        give(place.cast::<u64>(), start)
                    }
                    CUpointer_attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE => {
                        give(place.cast::<usize>(), bytes)
                    }
                    CUpointer_attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID => {
                        give(place.cast::<u64>(), start)
                    }
                    CUpointer_attribute::CU_POINTER_ATTRIBUTE_CONTEXT => {
                        give(place.cast::<usize>(), 0)
                    }
                    _ => give(place.cast::<c_uint>(), 0),
                }
            };
        }
        CuResult::SUCCESS
    }
    unsafe fn cuStreamCreateWithPriority(
        &self,
        stream: *mut CUstream,
        _: c_uint,
        _: c_int,
    ) -> CuResult {
        self.machine.streams.fetch_add(1, Ordering::Relaxed);
        give(stream, without_provenance_mut(77))
    }
    unsafe fn cuStreamDestroy(&self, _: CUstream) -> CuResult {
        self.machine.streams.fetch_sub(1, Ordering::Relaxed);
        CuResult::SUCCESS
    }
    unsafe fn cuStreamQuery(&self, _: CUstream) -> CuResult {
        CuResult::SUCCESS
    }
    unsafe fn cuIpcGetMemHandle(
        &self,
        handle: *mut CUipcMemHandle,
        address: CUdeviceptr,
    ) -> CuResult {
        if self.machine.export_fails {
            return CuResult::NOT_SUPPORTED;
        }
        let mut bytes = [0; 64];
        for (to, from) in bytes.iter_mut().zip(address.to_le_bytes()) {
            *to = from as c_char;
        }
        give(handle, CUipcMemHandle { reserved: bytes })
    }
    unsafe fn cuIpcOpenMemHandle(
        &self,
        address: *mut CUdeviceptr,
        handle: CUipcMemHandle,
        _: c_uint,
    ) -> CuResult {
        if self.machine.ipc_fails {
            return CuResult::NOT_SUPPORTED;
        }
        self.machine.mappings.fetch_add(1, Ordering::Relaxed);
        let named: [u8; 8] = std::array::from_fn(|at| handle.reserved[at] as u8);
        give(address, u64::from_le_bytes(named))
    }
    unsafe fn cuIpcCloseMemHandle(&self, _: CUdeviceptr) -> CuResult {
        self.machine.mappings.fetch_sub(1, Ordering::Relaxed);
        CuResult::SUCCESS
    }
}
