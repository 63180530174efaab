//! Memory: of devices, pinned, imported; and what an address points to.

use super::super::types::*;
use super::Process;
use super::calls::{Done, put};
use super::state::*;
use std::ffi::{c_int, c_uint, c_void};
use std::sync::MutexGuard;

#[allow(non_snake_case, clippy::too_many_arguments)]
impl Process {
    pub(super) fn cuMemAlloc(&self, address: *mut CuDevicePtr, bytes: usize) -> Done {
        let (mut state, context) = self.enter_ordered("cuMemAlloc")?;
        put(
            address,
            state.allocate(self.id, context, Kind::Device, bytes)?,
        );
        Ok(())
    }

    /// There at once, as on a stream without work.
    pub(super) fn cuMemAllocAsync(
        &self,
        address: *mut CuDevicePtr,
        bytes: usize,
        stream: CuStream,
    ) -> Done {
        let (mut state, context) = self.enter_context("cuMemAllocAsync")?;
        self.uncaptured(&state, context, stream)?;
        let start = state.allocate(self.id, context, Kind::Pooled, bytes)?;
        put(address, start);
        Ok(())
    }

    /// Of what [`Process::cuMemAllocAsync`] gave, nothing: a driver would free it without waiting
    /// for the work that uses it.
    pub(super) fn cuMemFree(&self, address: CuDevicePtr) -> Done {
        let (state, context) = self.enter_ordered("cuMemFree")?;
        self.give_back(state, context, address, Kind::Device)
    }

    pub(super) fn cuMemFreeAsync(&self, address: CuDevicePtr, stream: CuStream) -> Done {
        let (state, context) = self.enter_context("cuMemFreeAsync")?;
        self.uncaptured(&state, context, stream)?;
        self.give_back(state, context, address, Kind::Pooled)
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
            put(free, DEVICE_BYTES - used);
            put(total, DEVICE_BYTES);
        })
    }

    pub(super) fn cuMemGetAddressRange(
        &self,
        base: *mut CuDevicePtr,
        bytes: *mut usize,
        address: CuDevicePtr,
    ) -> Done {
        self.enter_context("cuMemGetAddressRange")
            .and_then(|(s, _)| {
                let (start, area) = s.area(self.id, address, 1).ok_or(CuResult::INVALID_VALUE)?;
                put(base, start);
                put(bytes, area.bytes);
                Ok(())
            })
    }

    pub(super) fn cuMemsetD8Async(&self, a: CuDevicePtr, v: u8, n: usize, s: CuStream) -> Done {
        self.queue("cuMemsetD8Async", s, Work::Set(a, v, n))
    }

    pub(super) fn cuMemcpyAsync(
        &self,
        target: CuDevicePtr,
        source: CuDevicePtr,
        bytes: usize,
        stream: CuStream,
    ) -> Done {
        self.queue("cuMemcpyAsync", stream, Work::Copy(target, source, bytes))
    }

    pub(super) fn cuMemHostAlloc(&self, at: *mut *mut c_void, bytes: usize, _: c_uint) -> Done {
        let (mut state, context) = self.enter_ordered("cuMemHostAlloc")?;
        let start = state.allocate(self.id, context, Kind::Pinned, bytes)?;
        put(at, start as *mut c_void);
        Ok(())
    }

    pub(super) fn cuMemFreeHost(&self, address: *mut c_void) -> Done {
        let (state, context) = self.enter_ordered("cuMemFreeHost")?;
        self.give_back(state, context, address.addr() as u64, Kind::Pinned)
    }

    pub(super) fn cuMemHostRegister(&self, address: *mut c_void, bytes: usize, _: c_uint) -> Done {
        let (mut state, context) = self.enter_ordered("cuMemHostRegister")?;
        let start = address.addr() as u64;
        if state.area(self.id, start, 1).is_some() {
            return Err(CuResult::HOST_MEMORY_ALREADY_REGISTERED);
        }
        let area = Area {
            process: self.id,
            context,
            kind: Kind::Registered,
            bytes,
            id: state.number() as u64,
            file: None,
            _mapping: None,
        };
        state.areas.insert((self.id, start), area);
        Ok(())
    }

    pub(super) fn cuMemHostUnregister(&self, address: *mut c_void) -> Done {
        let (state, context) = self.enter_ordered("cuMemHostUnregister")?;
        self.give_back(state, context, address.addr() as u64, Kind::Registered)
    }

    pub(super) fn cuMemHostGetDevicePointer(
        &self,
        device: *mut CuDevicePtr,
        address: *mut c_void,
        _flags: c_uint,
    ) -> Done {
        let entered = self.enter_context("cuMemHostGetDevicePointer");
        entered.and_then(|(state, _)| {
            let start = address.addr() as u64;
            match state.area(self.id, start, 1) {
                Some((_, area)) if matches!(area.kind, Kind::Pinned | Kind::Registered) => {
                    put(device, start);
                    Ok(())
                }
                _ => Err(CuResult::INVALID_VALUE),
            }
        })
    }

    pub(super) fn cuPointerGetAttributes(
        &self,
        count: c_uint,
        attributes: *mut c_uint,
        data: *mut *mut c_void,
        address: CuDevicePtr,
    ) -> Done {
        self.enter("cuPointerGetAttributes").map(|state| {
            let found = state.area(self.id, address, 1);
            let device =
                matches!(found, Some((_, a)) if a.kind.is_device() || a.kind == Kind::Imported);
            for at in 0..count as usize {
                // SAFETY: `count` names and places by contract.
                let (name, place) = unsafe { (*attributes.add(at), *data.add(at)) };
                let numbers = found.map(|(start, area)| match name {
                    pointer_attribute::CONTEXT => area.context as u64,
                    pointer_attribute::BUFFER_ID => area.id,
                    pointer_attribute::RANGE_START => start,
                    pointer_attribute::RANGE_SIZE => area.bytes as u64,
                    pointer_attribute::MEMORY_TYPE if device => u64::from(memory_type::DEVICE),
                    pointer_attribute::MEMORY_TYPE => u64::from(memory_type::HOST),
                    pointer_attribute::DEVICE_ORDINAL => {
                        state.contexts[&area.context].device as u64
                    }
                    pointer_attribute::IS_LEGACY_IPC_CAPABLE => {
                        u64::from(area.kind == Kind::Device)
                    }
                    _ => 0,
                });
                match name {
                    pointer_attribute::CONTEXT
                    | pointer_attribute::BUFFER_ID
                    | pointer_attribute::RANGE_START
                    | pointer_attribute::RANGE_SIZE => put(place.cast(), numbers.unwrap_or(0)),
                    pointer_attribute::DEVICE_ORDINAL => {
                        put(place.cast::<c_int>(), numbers.map_or(-2, |n| n as c_int));
                    }
                    _ => put(place.cast::<c_uint>(), numbers.unwrap_or(0) as c_uint),
                }
            }
        })
    }

    pub(super) fn cuIpcGetMemHandle(&self, handle: *mut CuIpcMemHandle, at: CuDevicePtr) -> Done {
        self.enter_context("cuIpcGetMemHandle")
            .and_then(|(state, _)| match state.area(self.id, at, 1) {
                Some((_, area)) if area.kind == Kind::Device => {
                    let mut name = [0; 64];
                    name[..8].copy_from_slice(&area.id.to_le_bytes());
                    put(handle, CuIpcMemHandle(name));
                    Ok(())
                }
                _ => Err(CuResult::INVALID_VALUE),
            })
    }

    pub(super) fn cuIpcOpenMemHandle(
        &self,
        address: *mut CuDevicePtr,
        handle: CuIpcMemHandle,
        _flags: c_uint,
    ) -> Done {
        let (mut state, context) = self.enter_context("cuIpcOpenMemHandle")?;
        let mut id = [0; 8];
        id.copy_from_slice(&handle.0[..8]);
        let id = u64::from_le_bytes(id);
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
        put(address, start);
        Ok(())
    }

    pub(super) fn cuIpcCloseMemHandle(&self, address: CuDevicePtr) -> Done {
        let (state, context) = self.enter_ordered("cuIpcCloseMemHandle")?;
        self.give_back(state, context, address, Kind::Imported)
    }
}

impl Process {
    /// Ends an area of this process; the current context must be the one that it was made in.
    fn give_back(
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
    /// A live stream that is not being captured: a graph of its own memory is another thing, and
    /// nothing here makes one.
    fn uncaptured(&self, state: &State, context: usize, stream: CuStream) -> Done {
        self.stream_context(state, context, stream)?;
        match state.streams.get(&stream.0).and_then(|s| s.capture) {
            None => Ok(()),
            Some(_) => Err(CuResult::STREAM_CAPTURE_UNSUPPORTED),
        }
    }
}
