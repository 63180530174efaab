//! The exported functions of the simulated library.

use super::super::Api;
use super::super::types::*;
use super::state::{Channel, Completions, Context, ListedDevice, Memory, Pair, event_fd, take};
use super::{Fabric, work};
use std::collections::VecDeque;
use std::ffi::{c_int, c_uint, c_void};
use std::os::fd::AsRawFd;
use std::ptr::null_mut;
use std::sync::{Arc, Weak};

fn set_errno(error: c_int) {
    // SAFETY: `errno` is a variable of this thread.
    unsafe { *libc::__errno_location() = error };
}

/// Sets `errno` and returns null, as a C function that returns a pointer does on failure.
fn refuse<T>(error: c_int) -> *mut T {
    set_errno(error);
    null_mut()
}

/// Attributes that a state transition of a reliable connection requires.
const TO_INIT: c_uint = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
const TO_RTR: c_uint = IBV_QP_STATE
    | IBV_QP_AV
    | IBV_QP_PATH_MTU
    | IBV_QP_DEST_QPN
    | IBV_QP_RQ_PSN
    | IBV_QP_MAX_DEST_RD_ATOMIC
    | IBV_QP_MIN_RNR_TIMER;
const TO_RTS: c_uint = IBV_QP_STATE
    | IBV_QP_TIMEOUT
    | IBV_QP_RETRY_CNT
    | IBV_QP_RNR_RETRY
    | IBV_QP_SQ_PSN
    | IBV_QP_MAX_QP_RD_ATOMIC;

impl Fabric {
    /// Returns a weak reference to this fabric, which contexts hold. `Fabric::new` puts every
    /// fabric into an `Arc`.
    fn weak(&self) -> Weak<Fabric> {
        // SAFETY: `self` is inside an `Arc`, whose count is raised before `from_raw` takes
        // ownership of one count.
        unsafe {
            Arc::increment_strong_count(self);
            Arc::downgrade(&Arc::from_raw(self))
        }
    }
}

// SAFETY of the blocks below: the caller passes only objects that this module has made and not
// destroyed. Their variable parts are accessed only under the lock.
impl Api for Fabric {
    fn source(&self) -> String {
        "a simulated libibverbs".into()
    }

    unsafe fn is_fork_initialized(&self) -> Option<c_uint> {
        self.lock().fork
    }

    unsafe fn fork_init(&self) -> c_int {
        let mut state = self.lock();
        if let Err(error) = state.enter("fork_init") {
            return error;
        }
        if !state.is_fork_protected && !state.regions.is_empty() {
            return libc::EINVAL;
        }
        state.is_fork_protected = true;
        0
    }

    unsafe fn get_device_list(&self, count: *mut c_int) -> *mut *mut IbvDevice {
        let mut state = self.lock();
        if let Err(error) = state.enter("get_device_list") {
            return refuse(error);
        }
        let mut list: Vec<*mut IbvDevice> = Vec::new();
        for (index, device) in state.devices.iter().enumerate() {
            // SAFETY: the struct consists of numbers, for which zero is valid.
            let mut listed: Box<ListedDevice> = unsafe { Box::new(std::mem::zeroed()) };
            listed.index = index;
            listed.base.transport_type = IBV_TRANSPORT_IB;
            listed.base.node_type = IBV_NODE_CA;
            for (place, byte) in listed.base.name.iter_mut().zip(device.name.bytes()) {
                *place = byte as _;
            }
            list.push(Box::into_raw(listed).cast());
        }
        // SAFETY: the caller passes a writable `count`.
        unsafe { *count = list.len() as c_int };
        list.push(null_mut());
        Box::into_raw(list.into_boxed_slice()).cast()
    }

    unsafe fn free_device_list(&self, list: *mut *mut IbvDevice) {
        // SAFETY: `get_device_list` made the list, which a null pointer ends.
        unsafe {
            let mut length = 0;
            while !(*list.add(length)).is_null() {
                drop(Box::from_raw((*list.add(length)).cast::<ListedDevice>()));
                length += 1;
            }
            drop(Box::from_raw(std::ptr::slice_from_raw_parts_mut(
                list,
                length + 1,
            )));
        }
    }

    unsafe fn open_device(&self, device: *mut IbvDevice) -> *mut IbvContext {
        let mut state = self.lock();
        if let Err(error) = state.enter("open_device") {
            return refuse(error);
        }
        let Some(event_fd) = event_fd() else {
            return null_mut();
        };
        // SAFETY: `device` is a `ListedDevice`; the context consists of numbers and optional
        // functions, for which zero is valid.
        let (index, mut base): (usize, IbvContext) =
            unsafe { ((*device.cast::<ListedDevice>()).index, std::mem::zeroed()) };
        base.async_fd = event_fd.as_raw_fd();
        base.ops.poll_cq = Some(work::poll_cq);
        base.ops.req_notify_cq = Some(work::req_notify_cq);
        base.ops.post_send = Some(work::post_send);
        base.ops.post_recv = Some(work::post_recv);
        let context = Box::into_raw(Box::new(Context {
            base,
            fabric: self.weak(),
            device: index,
            event_fd,
        }));
        state.contexts.push(context.addr());
        context.cast()
    }

    unsafe fn close_device(&self, context: *mut IbvContext) -> c_int {
        let mut state = self.lock();
        let address = context.addr();
        let used = state.domains.values().any(|&owner| owner == address)
            || state.channels.values().any(|&owner| owner == address)
            || state.queues.values().any(|queue| queue.context == address);
        if used || !state.contexts.contains(&address) {
            set_errno(libc::EBUSY);
            return -1;
        }
        state.contexts.retain(|&one| one != address);
        state.events.remove(&address);
        // SAFETY: `open_device` made the context, which is in the list until this call.
        unsafe { drop(Box::from_raw(context.cast::<Context>())) };
        0
    }

    unsafe fn query_device(&self, context: *mut IbvContext, into: *mut IbvDeviceAttr) -> c_int {
        let mut state = self.lock();
        if let Err(error) = state.enter("query_device") {
            return error;
        }
        // SAFETY: the caller passes an open context and a writable struct.
        unsafe { *into = state.devices[(*context.cast::<Context>()).device].attributes };
        0
    }

    unsafe fn query_port(
        &self,
        context: *mut IbvContext,
        port: u8,
        into: *mut IbvPortAttr,
    ) -> c_int {
        let mut state = self.lock();
        if let Err(error) = state.enter("query_port") {
            return error;
        }
        // SAFETY: the caller passes an open context.
        let device = &state.devices[unsafe { (*context.cast::<Context>()).device }];
        if !(1..=device.attributes.phys_port_cnt).contains(&port) {
            return libc::EINVAL;
        }
        // SAFETY: the caller passes a writable struct.
        unsafe { *into = device.port };
        0
    }

    unsafe fn query_gid(
        &self,
        context: *mut IbvContext,
        port: u32,
        index: u32,
        entry: *mut IbvGidEntry,
        _flags: u32,
        entry_size: usize,
    ) -> c_int {
        let mut state = self.lock();
        if let Err(error) = state.enter("query_gid") {
            return error;
        }
        // SAFETY: the caller passes an open context.
        let device = unsafe { (*context.cast::<Context>()).device };
        let device = &state.devices[device];
        let has_port = (1..=u32::from(device.attributes.phys_port_cnt)).contains(&port);
        match device.gids.iter().find(|gid| gid.gid_index == index) {
            Some(gid) if has_port && entry_size == size_of::<IbvGidEntry>() => {
                // SAFETY: the caller passes a writable entry.
                unsafe { *entry = *gid };
                0
            }
            // The address table has no such entry.
            _ => libc::ENODATA,
        }
    }

    unsafe fn get_async_event(&self, context: *mut IbvContext, event: *mut IbvAsyncEvent) -> c_int {
        // SAFETY: the caller passes an open context. The call may block, so it does not hold the
        // lock.
        if !take(unsafe { (*context).async_fd }) {
            return -1;
        }
        let mut state = self.lock();
        let events = state.events.get_mut(&context.addr());
        match events.and_then(VecDeque::pop_front) {
            Some((event_type, element)) => {
                // SAFETY: the caller passes a writable event.
                unsafe {
                    *event = IbvAsyncEvent {
                        element,
                        event_type,
                    }
                };
                0
            }
            None => -1,
        }
    }

    unsafe fn ack_async_event(&self, _event: *mut IbvAsyncEvent) {}

    unsafe fn alloc_pd(&self, context: *mut IbvContext) -> *mut IbvPd {
        let mut state = self.lock();
        if let Err(error) = state.enter("alloc_pd") {
            return refuse(error);
        }
        let domain = Box::into_raw(Box::new(IbvPd {
            context,
            handle: state.number(),
        }));
        state.domains.insert(domain.addr(), context.addr());
        domain
    }

    unsafe fn dealloc_pd(&self, domain: *mut IbvPd) -> c_int {
        let mut state = self.lock();
        let address = domain.addr();
        let used = state
            .regions
            .values()
            .any(|region| region.domain == address)
            || state.pairs.values().any(|pair| pair.domain == address);
        if used || state.domains.remove(&address).is_none() {
            return libc::EBUSY;
        }
        // SAFETY: `alloc_pd` made the domain, which is in the table until this call.
        unsafe { drop(Box::from_raw(domain)) };
        0
    }

    unsafe fn reg_mr(
        &self,
        domain: *mut IbvPd,
        address: *mut c_void,
        bytes: usize,
        access: c_int,
    ) -> *mut IbvMr {
        let mut state = self.lock();
        if let Err(error) = state.enter("reg_mr") {
            return refuse(error);
        }
        let key = state.number();
        // SAFETY: the caller passes a domain that is not destroyed.
        let context = unsafe { (*domain).context };
        state.regions.insert(
            key,
            Memory {
                domain: domain.addr(),
                address: address.addr() as u64,
                bytes,
                access,
            },
        );
        Box::into_raw(Box::new(IbvMr {
            context,
            pd: domain,
            addr: address,
            length: bytes,
            handle: key,
            lkey: key,
            rkey: key,
        }))
    }

    unsafe fn dereg_mr(&self, region: *mut IbvMr) -> c_int {
        // SAFETY: `reg_mr` made the region, which is in the table until this call.
        let region = unsafe { Box::from_raw(region) };
        match self.lock().regions.remove(&region.lkey) {
            Some(_) => 0,
            None => libc::EINVAL,
        }
    }

    unsafe fn create_comp_channel(&self, context: *mut IbvContext) -> *mut IbvCompChannel {
        let mut state = self.lock();
        if let Err(error) = state.enter("create_comp_channel") {
            return refuse(error);
        }
        let Some(event_fd) = event_fd() else {
            return null_mut();
        };
        let base = IbvCompChannel {
            context,
            fd: event_fd.as_raw_fd(),
            refcnt: 0,
        };
        let channel = Box::into_raw(Box::new(Channel {
            base,
            event_fd,
            waiting: VecDeque::new(),
        }));
        state.channels.insert(channel.addr(), context.addr());
        channel.cast()
    }

    unsafe fn destroy_comp_channel(&self, channel: *mut IbvCompChannel) -> c_int {
        let mut state = self.lock();
        let address = channel.addr();
        let used = state.queues.values().any(|queue| queue.channel == address);
        if used || state.channels.remove(&address).is_none() {
            return libc::EBUSY;
        }
        // SAFETY: `create_comp_channel` made the channel, which is in the table until this call.
        unsafe { drop(Box::from_raw(channel.cast::<Channel>())) };
        0
    }

    unsafe fn create_cq(
        &self,
        context: *mut IbvContext,
        entries: c_int,
        user: *mut c_void,
        channel: *mut IbvCompChannel,
        _vector: c_int,
    ) -> *mut IbvCq {
        let mut state = self.lock();
        if let Err(error) = state.enter("create_cq") {
            return refuse(error);
        }
        // SAFETY: the caller passes an open context.
        let device = unsafe { (*context.cast::<Context>()).device };
        if entries < 1 || entries > state.devices[device].attributes.max_cqe {
            return refuse(libc::EINVAL);
        }
        // SAFETY: the struct consists of numbers and pointers, for which zero is valid.
        let mut queue: Box<IbvCq> = unsafe { Box::new(std::mem::zeroed()) };
        (queue.context, queue.channel) = (context, channel);
        (queue.cq_context, queue.cqe) = (user, entries);
        let queue = Box::into_raw(queue);
        state.queues.insert(
            queue.addr(),
            Completions {
                context: context.addr(),
                channel: channel.addr(),
                capacity: entries as usize,
                entries: VecDeque::new(),
                armed: false,
                overrun: false,
                unacknowledged: 0,
            },
        );
        queue
    }

    unsafe fn destroy_cq(&self, queue: *mut IbvCq) -> c_int {
        let mut state = self.lock();
        let address = queue.addr();
        let mut pairs = state.pairs.values();
        let used = pairs.any(|pair| pair.send_queue == address || pair.recv_queue == address);
        let there = state.queues.get(&address);
        // The real function waits until all events are acknowledged; this one fails instead.
        if used || there.is_none_or(|there| there.unacknowledged > 0) {
            return libc::EBUSY;
        }
        state.queues.remove(&address);
        // SAFETY: `create_cq` made the queue, which is in the table until this call.
        unsafe {
            let channel = (*queue).channel.cast::<Channel>();
            if !channel.is_null() {
                (*channel).waiting.retain(|&one| one != address);
            }
            drop(Box::from_raw(queue));
        }
        0
    }

    unsafe fn get_cq_event(
        &self,
        channel: *mut IbvCompChannel,
        queue: *mut *mut IbvCq,
        user: *mut *mut c_void,
    ) -> c_int {
        // SAFETY: the caller passes a channel that is not destroyed. The call may block, so it does
        // not hold the lock.
        if !take(unsafe { (*channel).fd }) {
            return -1;
        }
        let mut state = self.lock();
        // SAFETY: the channel is used under the lock, and the caller passes writable pointers.
        unsafe {
            let Some(address) = (*channel.cast::<Channel>()).waiting.pop_front() else {
                set_errno(libc::EAGAIN);
                return -1;
            };
            if let Some(there) = state.queues.get_mut(&address) {
                there.unacknowledged += 1;
            }
            *queue = address as *mut IbvCq;
            *user = (**queue).cq_context;
        }
        0
    }

    unsafe fn ack_cq_events(&self, queue: *mut IbvCq, events: c_uint) {
        if let Some(there) = self.lock().queues.get_mut(&queue.addr()) {
            there.unacknowledged -= events;
        }
    }

    unsafe fn create_qp(&self, domain: *mut IbvPd, attributes: *mut IbvQpInitAttr) -> *mut IbvQp {
        let mut state = self.lock();
        if let Err(error) = state.enter("create_qp") {
            return refuse(error);
        }
        // SAFETY: the caller passes a domain that is not destroyed, and writable attributes.
        let (context, attributes) = unsafe { ((*domain).context, &mut *attributes) };
        // SAFETY: the domain's context is open until the domain is destroyed.
        let index = unsafe { (*context.cast::<Context>()).device };
        let device = &state.devices[index];
        let most = device.attributes.max_qp_wr as u32;
        let cap = attributes.cap;
        if cap.max_send_wr > most
            || cap.max_recv_wr > most
            || cap.max_inline_data > device.max_inline
            || attributes.qp_type != IBV_QPT_RC
        {
            return refuse(libc::EINVAL);
        }
        let number = state.number();
        // SAFETY: the struct consists of numbers and pointers, for which zero is valid.
        let mut pair: Box<IbvQp> = unsafe { Box::new(std::mem::zeroed()) };
        (pair.context, pair.pd, pair.qp_num) = (context, domain, number);
        (pair.send_cq, pair.recv_cq) = (attributes.send_cq, attributes.recv_cq);
        pair.qp_type = attributes.qp_type;
        state.pairs.insert(
            number,
            Pair {
                creator: std::thread::current().id(),
                domain: domain.addr(),
                device: index,
                send_queue: attributes.send_cq.addr(),
                recv_queue: attributes.recv_cq.addr(),
                cap,
                state: IBV_QPS_RESET,
                peer: 0,
                access: 0,
                attributes: IbvQpAttr::default(),
                posted: 0,
                freed: 0,
                pending: VecDeque::new(),
                receives: VecDeque::new(),
            },
        );
        Box::into_raw(pair)
    }

    unsafe fn modify_qp(&self, pair: *mut IbvQp, attributes: *mut IbvQpAttr, mask: c_int) -> c_int {
        let mut state = self.lock();
        if let Err(error) = state.enter("modify_qp") {
            return error;
        }
        // SAFETY: the caller passes a queue pair that is not destroyed, and readable attributes.
        let (number, attributes) = unsafe { ((*pair).qp_num, *attributes) };
        let Some(there) = state.pairs.get_mut(&number) else {
            return libc::EINVAL;
        };
        let mask = mask as c_uint;
        let needed = match (there.state, attributes.qp_state) {
            (IBV_QPS_RESET, IBV_QPS_INIT) => TO_INIT,
            (IBV_QPS_INIT, IBV_QPS_RTR) => TO_RTR,
            (IBV_QPS_RTR, IBV_QPS_RTS) => TO_RTS,
            (_, IBV_QPS_ERR) => IBV_QP_STATE,
            _ => return libc::EINVAL,
        };
        if mask != needed {
            return libc::EINVAL;
        }
        match attributes.qp_state {
            IBV_QPS_INIT => there.access = attributes.qp_access_flags,
            IBV_QPS_RTR => there.peer = attributes.dest_qp_num,
            IBV_QPS_ERR => {
                work::break_pair(&mut state, number);
                return 0;
            }
            _ => {}
        }
        // Each transition keeps the attributes that earlier transitions set.
        let before = there.attributes;
        there.attributes = match attributes.qp_state {
            IBV_QPS_RTS => IbvQpAttr {
                timeout: attributes.timeout,
                retry_cnt: attributes.retry_cnt,
                rnr_retry: attributes.rnr_retry,
                ..before
            },
            _ => attributes,
        };
        there.state = attributes.qp_state;
        0
    }

    unsafe fn destroy_qp(&self, pair: *mut IbvQp) -> c_int {
        let mut state = self.lock();
        // SAFETY: `create_qp` made the queue pair; it is dropped only if the table had it.
        unsafe {
            if state.pairs.remove(&(*pair).qp_num).is_none() {
                return libc::EINVAL;
            }
            drop(Box::from_raw(pair));
        }
        0
    }
}
