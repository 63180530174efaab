//! Simulated device, pinned and imported memory, and the attributes of an address.

use super::super::types::*;
use super::Process;
use super::calls::{Done, write_out};
use super::state::*;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::MutexGuard;

#[allow(non_snake_case, clippy::too_many_arguments)]
impl Process {
    pub(super) fn cuMemAlloc(&self, address: *mut CUdeviceptr, bytes: usize) -> Done {
        let (mut state, context) = self.enter_uncaptured("cuMemAlloc")?;
        write_out(
            address,
            state.allocate(self.id, context, Kind::Device, bytes)?,
        );
        Ok(())
    }

    /// Allocates immediately, as a driver does on a stream without work.
    pub(super) fn cuMemAllocAsync(
        &self,
        address: *mut CUdeviceptr,
        bytes: usize,
        stream: CUstream,
    ) -> Done {
        let (mut state, context) = self.enter_context("cuMemAllocAsync")?;
        self.check_not_capturing(&state, context, stream)?;
        let start = state.allocate(self.id, context, Kind::Pooled, bytes)?;
        write_out(address, start);
        Ok(())
    }

    /// Frees memory of [`Process::cuMemAlloc`]. Refuses memory of [`Process::cuMemAllocAsync`], because a
    /// driver would free it without waiting for the work that uses it.
    pub(super) fn cuMemFree(&self, address: CUdeviceptr) -> Done {
        let (state, context) = self.enter_uncaptured("cuMemFree")?;
        self.remove_area(state, context, address, Kind::Device)
    }

    pub(super) fn cuMemFreeAsync(&self, address: CUdeviceptr, stream: CUstream) -> Done {
        let (state, context) = self.enter_context("cuMemFreeAsync")?;
        self.check_not_capturing(&state, context, stream)?;
        self.remove_area(state, context, address, Kind::Pooled)
    }

    pub(super) fn cuMemGetInfo(&self, free: *mut usize, total: *mut usize) -> Done {
        self.enter_context("cuMemGetInfo").map(|(state, context)| {
            let device = state.contexts[&context].device;
            let areas = state.areas.values();
            let used: usize = areas
                .filter(|area| area.kind.is_device())
                .filter(|area| state.contexts[&area.context].device == device)
                .map(|area| area.bytes)
                .sum();
            write_out(free, DEVICE_BYTES - used);
            write_out(total, DEVICE_BYTES);
        })
    }

    pub(super) fn cuMemGetAddressRange(
        &self,
        base: *mut CUdeviceptr,
        bytes: *mut usize,
        address: CUdeviceptr,
    ) -> Done {
        self.enter_context("cuMemGetAddressRange")
            .and_then(|(s, _)| {
                let (start, area) = s.area(self.id, address, 1).ok_or(CuResult::INVALID_VALUE)?;
                write_out(base, start);
                write_out(bytes, area.bytes);
                Ok(())
            })
    }

    pub(super) fn cuMemsetD8Async(&self, a: CUdeviceptr, v: u8, n: usize, s: CUstream) -> Done {
        self.queue("cuMemsetD8Async", s, Work::Set(a, v, n))
    }

    pub(super) fn cuMemcpyAsync(
        &self,
        target: CUdeviceptr,
        source: CUdeviceptr,
        bytes: usize,
        stream: CUstream,
    ) -> Done {
        self.queue("cuMemcpyAsync", stream, Work::Copy(target, source, bytes))
    }

    pub(super) fn cuMemHostAlloc(&self, at: *mut *mut c_void, bytes: usize, _: c_uint) -> Done {
        let (mut state, context) = self.enter_uncaptured("cuMemHostAlloc")?;
        let start = state.allocate(self.id, context, Kind::Pinned, bytes)?;
        write_out(at, start as *mut c_void);
        Ok(())
    }

    pub(super) fn cuMemFreeHost(&self, address: *mut c_void) -> Done {
        let (state, context) = self.enter_uncaptured("cuMemFreeHost")?;
        self.remove_area(state, context, address.addr() as u64, Kind::Pinned)
    }

    pub(super) fn cuMemHostRegister(&self, address: *mut c_void, bytes: usize, _: c_uint) -> Done {
        let (mut state, context) = self.enter_uncaptured("cuMemHostRegister")?;
        let start = address.addr() as u64;
        if state.area(self.id, start, 1).is_some() {
            return Err(CuResult::HOST_MEMORY_ALREADY_REGISTERED);
        }
        let area = Area {
            process: self.id,
            context,
            kind: Kind::Registered,
            bytes,
            id: state.next_id() as u64,
            file: None,
            _mapping: None,
        };
        state.areas.insert((self.id, start), area);
        Ok(())
    }

    pub(super) fn cuMemHostUnregister(&self, address: *mut c_void) -> Done {
        let (state, context) = self.enter_uncaptured("cuMemHostUnregister")?;
        self.remove_area(state, context, address.addr() as u64, Kind::Registered)
    }

    pub(super) fn cuMemHostGetDevicePointer(
        &self,
        device: *mut CUdeviceptr,
        address: *mut c_void,
        _flags: c_uint,
    ) -> Done {
        let entered = self.enter_context("cuMemHostGetDevicePointer");
        entered.and_then(|(state, _)| {
            let start = address.addr() as u64;
            match state.area(self.id, start, 1) {
                Some((_, area)) if matches!(area.kind, Kind::Pinned | Kind::Registered) => {
                    write_out(device, start);
                    Ok(())
                }
                _ => Err(CuResult::INVALID_VALUE),
            }
        })
    }

    pub(super) fn cuPointerGetAttributes(
        &self,
        count: c_uint,
        attributes: *mut CUpointer_attribute,
        data: *mut *mut c_void,
        address: CUdeviceptr,
    ) -> Done {
        self.enter("cuPointerGetAttributes").map(|state| {
            let found = state.area(self.id, address, 1);
            let device =
                matches!(found, Some((_, a)) if a.kind.is_device() || a.kind == Kind::Imported);
            for at in 0..count as usize {
                // SAFETY: the contract of `cuPointerGetAttributes` gives `count` attributes and `count`
                // output pointers.
                let (name, place) = unsafe { (*attributes.add(at), *data.add(at)) };
                let numbers = found.map(|(start, area)| match name {
                    CUpointer_attribute::CU_POINTER_ATTRIBUTE_CONTEXT => area.context as u64,
                    CUpointer_attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID => area.id,
                    CUpointer_attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR => start,
                    CUpointer_attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE => area.bytes as u64,
                    CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE if device => {
                        CUmemorytype::CU_MEMORYTYPE_DEVICE as u64
                    }
                    CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE => {
                        CUmemorytype::CU_MEMORYTYPE_HOST as u64
                    }
                    CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL => {
                        state.contexts[&area.context].device as u64
                    }
                    CUpointer_attribute::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE => {
                        u64::from(area.kind == Kind::Device)
                    }
                    _ => 0,
                });
                match name {
                    CUpointer_attribute::CU_POINTER_ATTRIBUTE_CONTEXT
                    | CUpointer_attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID
                    | CUpointer_attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR
                    | CUpointer_attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE => {
                        write_out(place.cast(), numbers.unwrap_or(0))
                    }
                    CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL => {
                        write_out(place.cast::<c_int>(), numbers.map_or(-2, |n| n as c_int));
                    }
                    _ => write_out(place.cast::<c_uint>(), numbers.unwrap_or(0) as c_uint),
                }
            }
        })
    }

    pub(super) fn cuIpcGetMemHandle(&self, handle: *mut CUipcMemHandle, at: CUdeviceptr) -> Done {
        self.enter_context("cuIpcGetMemHandle")
            .and_then(|(state, _)| match state.area(self.id, at, 1) {
                Some((_, area)) if area.kind == Kind::Device => {
                    let mut reserved = [0; 64];
                    for (to, from) in reserved.iter_mut().zip(area.id.to_le_bytes()) {
                        *to = from as c_char;
                    }
                    write_out(handle, CUipcMemHandle { reserved });
                    Ok(())
                }
                _ => Err(CuResult::INVALID_VALUE),
            })
    }

    pub(super) fn cuIpcOpenMemHandle(
        &self,
        address: *mut CUdeviceptr,
        handle: CUipcMemHandle,
        _flags: c_uint,
    ) -> Done {
        let (mut state, context) = self.enter_context("cuIpcOpenMemHandle")?;
        let id = u64::from_le_bytes(std::array::from_fn(|at| handle.reserved[at] as u8));
        let mut areas = state.areas.values();
        let owned = areas
            .find(|area| area.id == id && area.kind == Kind::Device)
            .ok_or(CuResult::INVALID_VALUE)?;
        let (bytes, owner) = (owned.bytes, owned.context);
        let file = owned.file.clone().ok_or(CuResult::INVALID_VALUE)?;
        if owned.process == self.id {
            return Err(CuResult::INVALID_CONTEXT);
        }
        let devices = (
            state.contexts[&context].device,
            state.contexts[&owner].device,
        );
        if state.refused.contains(&devices) {
            return Err(CuResult::PEER_ACCESS_UNSUPPORTED);
        }
        if state
            .areas
            .values()
            .any(|a| a.id == id && a.context == context)
        {
            return Err(CuResult::ALREADY_MAPPED);
        }
        let start = state.map(self.id, context, Kind::Imported, bytes, id, file)?;
        write_out(address, start);
        Ok(())
    }

    pub(super) fn cuIpcCloseMemHandle(&self, address: CUdeviceptr) -> Done {
        let (state, context) = self.enter_uncaptured("cuIpcCloseMemHandle")?;
        self.remove_area(state, context, address, Kind::Imported)
    }
}

impl Process {
    /// Unmaps and forgets an area of this process. The current context must be the area's own
    /// context.
    fn remove_area(
        &self,
        mut state: MutexGuard<'_, State>,
        context: usize,
        address: u64,
        kind: Kind,
    ) -> Done {
        match state.areas.get(&(self.id, address)) {
            Some(area) if area.kind == kind && area.context == context => {
                state.areas.remove(&(self.id, address));
                Ok(())
            }
            Some(area) if area.kind == kind => Err(CuResult::INVALID_CONTEXT),
            _ => Err(CuResult::INVALID_VALUE),
        }
    }

    /// Rejects unknown streams, and streams in a capture: the mock has no graphs that own memory.
    fn check_not_capturing(&self, state: &State, context: usize, stream: CUstream) -> Done {
        self.stream_context(state, context, stream)?;
        match state.streams.get(&stream.addr()).and_then(|s| s.capture) {
            None => Ok(()),
            Some(_) => Err(CuResult::STREAM_CAPTURE_UNSUPPORTED),
        }
    }
}
