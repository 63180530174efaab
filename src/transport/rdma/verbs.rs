//! Objects of libibverbs that give themselves back. A child holds its parent, so that they are
//! destroyed in the order that devices demand.

use crate::error::{Error, ErrorKind, Result};
use crate::mem::Region;
use crate::sys::ibverbs::{self, *};
use crate::sys::log::{self, Level};
use std::ffi::{c_int, c_uint};
use std::io;
use std::os::fd::RawFd;
use std::ptr::null_mut;
use std::sync::Arc;

/// An open device.
#[derive(Debug)]
pub(super) struct Device {
    api: Arc<dyn Api>,
    raw: *mut IbvContext,
    name: String,
}

/// Objects of the library may be used from any thread; what may not be used by two at once is
/// behind `&mut` or a lock, or safe by libibverbs' own (all but rdma-core's documented exceptions).
macro_rules! may_cross_threads {
    ($($name:ident)*) => {$(
        // SAFETY: verbs are thread-safe by specification (IBA 11.1, ibv_* manual pages).
        unsafe impl Send for $name {}
        // SAFETY: as above.
        unsafe impl Sync for $name {}
    )*};
}

may_cross_threads!(Device Domain Registered Channel Queue Pair);

/// What a function that returns a pointer said.
fn made<T>(raw: *mut T, what: impl FnOnce() -> String) -> Result<*mut T> {
    match raw.is_null() {
        false => Ok(raw),
        true => Err(Error::system(what(), io::Error::last_os_error())),
    }
}

/// What a function that returns a number said: an error number, or -1 with the thread's.
fn done(code: c_int) -> io::Result<()> {
    match code {
        0 => Ok(()),
        -1 => Err(io::Error::last_os_error()),
        code => Err(io::Error::from_raw_os_error(code.abs())),
    }
}

/// A destructor must not fail; that it does is said.
fn gone(what: &str, code: c_int) {
    if let Err(error) = done(code) {
        log::line(
            Level::Warn,
            format_args!("an RDMA {what} cannot be given back: {error}"),
        );
    }
}

impl Device {
    /// Opens those devices whose names `wanted` accepts, sorted by name; and the names of all.
    ///
    /// # Errors
    /// Unsupported if the kernel knows no verbs; system, with the name, if one cannot be opened.
    pub fn open_all(
        api: &Arc<dyn Api>,
        wanted: impl Fn(&str) -> bool,
    ) -> Result<(Vec<Arc<Device>>, Vec<String>)> {
        let mut count = 0;
        // SAFETY: `count` is writable.
        let list = unsafe { api.get_device_list(&mut count) };
        if list.is_null() {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "{} finds no verbs in this kernel ({}): the module ib_uverbs is not loaded",
                    api.source(),
                    io::Error::last_os_error()
                ),
            ));
        }
        let (mut open, mut names) = (Vec::new(), Vec::new());
        let mut failure = None;
        for index in 0..count.max(0) as usize {
            // SAFETY: the list has `count` devices.
            let device = unsafe { *list.add(index) };
            // SAFETY: devices live as long as the list.
            let name = unsafe { (*device).name() };
            if wanted(&name) {
                // SAFETY: as above.
                let raw = unsafe { api.open_device(device) };
                let what = || format!("opening the RDMA device {name} (is /dev/infiniband there?)");
                match made(raw, what) {
                    Ok(raw) => open.push(Arc::new(Device {
                        api: api.clone(),
                        raw,
                        name: name.clone(),
                    })),
                    Err(error) => failure = Some(error),
                }
            }
            names.push(name);
        }
        // SAFETY: devices that are needed are open.
        unsafe { api.free_device_list(list) };
        open.sort_by(|one, two| one.name.cmp(&two.name));
        names.sort();
        match failure {
            Some(error) if open.is_empty() => Err(error),
            _ => Ok((open, names)),
        }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What it can do.
    pub fn attributes(&self) -> Result<IbvDeviceAttr> {
        // SAFETY: plain numbers, for which zero is a value; alive, and writable.
        unsafe {
            let mut attributes = std::mem::zeroed();
            done(self.api.query_device(self.raw, &mut attributes)).map_err(|error| {
                Error::system(format!("asking {} what it can", self.name), error)
            })?;
            Ok(attributes)
        }
    }

    /// A port, from 1.
    pub fn port(&self, port: u8) -> Result<IbvPortAttr> {
        // SAFETY: as in `attributes`.
        unsafe {
            let mut attributes = std::mem::zeroed();
            done(self.api.query_port(self.raw, port, &mut attributes)).map_err(|error| {
                Error::system(
                    format!("asking for the state of {}:{port}", self.name),
                    error,
                )
            })?;
            Ok(attributes)
        }
    }

    /// A place of a port's table of addresses; `None` if it is empty.
    pub fn gid(&self, port: u8, index: u32) -> Option<IbvGidEntry> {
        let mut entry = IbvGidEntry::default();
        let (port, bytes) = (u32::from(port), size_of::<IbvGidEntry>());
        // SAFETY: alive, and writable.
        let code = unsafe {
            self.api
                .query_gid(self.raw, port, index, &mut entry, 0, bytes)
        };
        (code == 0 && entry.gid.raw != [0; 16]).then_some(entry)
    }

    /// Descriptor that becomes readable when something happens to the device.
    pub fn event_fd(&self) -> RawFd {
        // SAFETY: alive; the field does not change.
        unsafe { (*self.raw).async_fd }
    }

    /// The next thing that happened to the device, if there is one: its type, and what it is about.
    pub fn event(&self) -> Option<(c_uint, usize)> {
        if !readable(self.event_fd()) {
            return None;
        }
        let mut event = IbvAsyncEvent {
            element: 0,
            event_type: 0,
        };
        // SAFETY: alive, and writable; there is one, so this does not block. Acknowledged at once:
        // what it is about is not touched.
        unsafe {
            if self.api.get_async_event(self.raw, &mut event) != 0 {
                return None;
            }
            self.api.ack_async_event(&mut event);
        }
        Some((event.event_type, event.element))
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: all that came from it holds it, and so is gone.
        gone("device", unsafe { self.api.close_device(self.raw) });
    }
}

/// Whether a descriptor can be read without waiting.
fn readable(fd: RawFd) -> bool {
    let mut interest = libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one entry.
    unsafe { libc::poll(&mut interest, 1, 0) == 1 && interest.revents & libc::POLLIN != 0 }
}

/// A protection domain.
#[derive(Debug)]
pub(super) struct Domain {
    device: Arc<Device>,
    raw: *mut IbvPd,
}

impl Domain {
    pub fn new(device: &Arc<Device>) -> Result<Arc<Domain>> {
        // SAFETY: alive.
        let raw = unsafe { device.api.alloc_pd(device.raw) };
        let raw = made(raw, || format!("a protection domain of {}", device.name))?;
        Ok(Arc::new(Domain {
            device: device.clone(),
            raw,
        }))
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: what belongs to it holds it.
        gone("protection domain", unsafe {
            self.device.api.dealloc_pd(self.raw)
        });
    }
}

/// Memory that a device may read and its peers may write.
#[derive(Debug)]
pub(super) struct Registered {
    domain: Arc<Domain>,
    region: Arc<Region>,
    raw: *mut IbvMr,
}

impl Registered {
    /// Registers all of `region`.
    ///
    /// # Errors
    /// System, with the bytes, the limit of locked memory, and what to do.
    pub fn new(domain: &Arc<Domain>, region: Arc<Region>) -> Result<Registered> {
        let device = &domain.device;
        let bytes = region.bytes();
        let access = (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE) as c_int;
        let address = region.place(0, bytes, 1).cast();
        // SAFETY: alive; the memory is mapped as long as `region`, which outlives the registration.
        let raw = unsafe { device.api.reg_mr(domain.raw, address, bytes, access) };
        let raw = made(raw, || {
            format!(
                "registering {bytes} bytes with {}; this process may lock {} (raise `ulimit -l` \
                 or the container's memlock to at least {} KiB, or lower CINCH_BUFFER_BYTES)",
                device.name,
                locked_memory_limit(),
                bytes.div_ceil(1024)
            )
        })?;
        Ok(Registered {
            domain: domain.clone(),
            region,
            raw,
        })
    }

    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Address of its first byte, for local and remote use.
    pub fn address(&self) -> u64 {
        self.region.place(0, 0, 1).addr() as u64
    }

    pub fn local_key(&self) -> u32 {
        // SAFETY: alive; the field does not change.
        unsafe { (*self.raw).lkey }
    }

    pub fn remote_key(&self) -> u32 {
        // SAFETY: as above.
        unsafe { (*self.raw).rkey }
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        // SAFETY: queue pairs that use it hold it.
        gone("memory region", unsafe {
            self.domain.device.api.dereg_mr(self.raw)
        });
    }
}

/// The limit as a phrase.
fn locked_memory_limit() -> String {
    // SAFETY: plain data, valid as zero, that lives through the call.
    let limit = unsafe {
        let mut limit: libc::rlimit = std::mem::zeroed();
        match libc::getrlimit(libc::RLIMIT_MEMLOCK, &mut limit) {
            0 => limit.rlim_cur,
            _ => libc::RLIM_INFINITY,
        }
    };
    match limit {
        libc::RLIM_INFINITY => "any amount of memory".into(),
        bytes => format!("{} KiB of memory", bytes >> 10),
    }
}

/// Where completion queues say that something came.
#[derive(Debug)]
pub(super) struct Channel {
    device: Arc<Device>,
    raw: *mut IbvCompChannel,
}

impl Channel {
    pub fn new(device: &Arc<Device>) -> Result<Arc<Channel>> {
        // SAFETY: alive.
        let raw = unsafe { device.api.create_comp_channel(device.raw) };
        let raw = made(raw, || format!("a completion channel of {}", device.name))?;
        Ok(Arc::new(Channel {
            device: device.clone(),
            raw,
        }))
    }

    /// Descriptor that becomes readable when a queue has something to say.
    pub fn fd(&self) -> RawFd {
        // SAFETY: alive; the field does not change.
        unsafe { (*self.raw).fd }
    }

    /// Takes what queues have to say: the numbers that they were made with.
    pub fn events(&self, mut each: impl FnMut(usize)) {
        while readable(self.fd()) {
            let (mut queue, mut number) = (null_mut(), null_mut());
            // SAFETY: alive, and writable; there is one, so this does not block. Acknowledged at
            // once: a queue that has events to be acknowledged cannot be destroyed.
            unsafe {
                if self
                    .device
                    .api
                    .get_cq_event(self.raw, &mut queue, &mut number)
                    != 0
                {
                    return;
                }
                self.device.api.ack_cq_events(queue, 1);
            }
            each(number.addr());
        }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // SAFETY: queues hold it.
        gone("completion channel", unsafe {
            self.device.api.destroy_comp_channel(self.raw)
        });
    }
}

/// A completion queue.
#[derive(Debug)]
pub(super) struct Queue {
    channel: Arc<Channel>,
    raw: *mut IbvCq,
}

impl Queue {
    /// With room for `entries`; events carry `number`.
    ///
    /// # Errors
    /// System, with the number of entries.
    pub fn new(channel: &Arc<Channel>, entries: usize, number: usize) -> Result<Arc<Queue>> {
        let device = &channel.device;
        let most = device.attributes()?.max_cqe;
        if entries > most.max(0) as usize {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "a connection over {} needs a completion queue of {entries} entries, and they \
                     have at most {most} (lower CINCH_SLOTS or CINCH_IB_QPS)",
                    device.name
                ),
            ));
        }
        let user = std::ptr::without_provenance_mut(number);
        // SAFETY: alive.
        let raw = unsafe {
            let (api, context) = (&device.api, device.raw);
            api.create_cq(context, entries as c_int, user, channel.raw, 0)
        };
        let raw = made(raw, || {
            format!("a completion queue of {entries} entries of {}", device.name)
        })?;
        Ok(Arc::new(Queue {
            channel: channel.clone(),
            raw,
        }))
    }

    /// Takes what is complete; how many.
    ///
    /// # Errors
    /// The queue is broken.
    #[inline]
    pub fn poll(&self, into: &mut [IbvWc]) -> io::Result<usize> {
        // SAFETY: alive.
        match unsafe { ibverbs::poll_cq(self.raw, into) } {
            count @ 0.. => Ok(count as usize),
            code => Err(io::Error::from_raw_os_error(code.abs())),
        }
    }

    /// Asks for an event with the next completion.
    pub fn arm(&self) -> io::Result<()> {
        // SAFETY: alive.
        done(unsafe { ibverbs::req_notify_cq(self.raw) })
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        // SAFETY: queue pairs hold it.
        gone("completion queue", unsafe {
            self.channel.device.api.destroy_cq(self.raw)
        });
    }
}

/// How two queue pairs reach each other.
#[derive(Clone, Copy, Debug)]
pub(super) struct Route {
    /// Own port.
    pub port: u8,
    /// `IBV_MTU_*` of the path.
    pub mtu: c_uint,
    /// How to address the peer.
    pub address: IbvAhAttr,
    /// The peer's queue pair.
    pub number: u32,
    /// First packet number of the peer.
    pub peer_packet: u32,
    /// Own first packet number.
    pub own_packet: u32,
    /// Patience for an answer: 4.096 us times two to this.
    pub timeout: u8,
    /// How often an unanswered packet is sent again.
    pub retries: u8,
}

/// A queue pair of a reliable connection.
#[derive(Debug)]
pub(super) struct Pair {
    domain: Arc<Domain>,
    _queue: Arc<Queue>,
    raw: *mut IbvQp,
    inline: u32,
}

impl Pair {
    /// With places for `sends` and `recvs`, ready to take room for what comes through `port`.
    ///
    /// # Errors
    /// System, with the sizes.
    pub fn new(
        domain: &Arc<Domain>,
        queue: &Arc<Queue>,
        port: u8,
        (sends, recvs): (u32, u32),
    ) -> Result<Pair> {
        // What travels inline: credits, header lines, small messages with them. A device that has
        // less room for it fetches them from memory.
        let mut pair = Pair::make(domain, queue, (sends, recvs), 128);
        if pair.is_err() {
            pair = Pair::make(domain, queue, (sends, recvs), 0);
        }
        let pair = pair?;
        let mut attributes = IbvQpAttr {
            qp_state: IBV_QPS_INIT,
            port_num: port,
            qp_access_flags: IBV_ACCESS_REMOTE_WRITE,
            ..IbvQpAttr::default()
        };
        let mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
        pair.step(&mut attributes, mask, "init")?;
        Ok(pair)
    }

    fn make(
        domain: &Arc<Domain>,
        queue: &Arc<Queue>,
        (sends, recvs): (u32, u32),
        inline: u32,
    ) -> Result<Pair> {
        let mut attributes = IbvQpInitAttr {
            qp_context: null_mut(),
            send_cq: queue.raw,
            recv_cq: queue.raw,
            srq: null_mut(),
            cap: IbvQpCap {
                max_send_wr: sends,
                max_recv_wr: recvs,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: inline,
            },
            qp_type: IBV_QPT_RC,
            sq_sig_all: 0,
        };
        // SAFETY: alive.
        let raw = unsafe { domain.device.api.create_qp(domain.raw, &mut attributes) };
        let raw = made(raw, || {
            format!(
                "a queue pair of {} with {sends} sends and {recvs} receives (fewer connections \
                 need fewer: lower CINCH_CHANNELS or CINCH_IB_QPS)",
                domain.device.name
            )
        })?;
        Ok(Pair {
            domain: domain.clone(),
            _queue: queue.clone(),
            raw,
            inline,
        })
    }

    /// Its number, by which the peer addresses it.
    pub fn number(&self) -> u32 {
        // SAFETY: alive; the field does not change.
        unsafe { (*self.raw).qp_num }
    }

    /// Connects it.
    ///
    /// # Errors
    /// System, with the step that failed.
    pub fn connect(&self, route: &Route) -> Result<()> {
        let mut attributes = IbvQpAttr {
            qp_state: IBV_QPS_RTR,
            path_mtu: route.mtu,
            rq_psn: route.peer_packet,
            dest_qp_num: route.number,
            ah_attr: IbvAhAttr {
                port_num: route.port,
                ..route.address
            },
            max_dest_rd_atomic: 1,
            // 0.64 ms; room for what comes is always there, so nobody waits for it.
            min_rnr_timer: 12,
            ..IbvQpAttr::default()
        };
        let mask = IBV_QP_STATE
            | IBV_QP_AV
            | IBV_QP_PATH_MTU
            | IBV_QP_DEST_QPN
            | IBV_QP_RQ_PSN
            | IBV_QP_MAX_DEST_RD_ATOMIC
            | IBV_QP_MIN_RNR_TIMER;
        self.step(&mut attributes, mask, "ready to receive")?;
        let mut attributes = IbvQpAttr {
            qp_state: IBV_QPS_RTS,
            sq_psn: route.own_packet,
            timeout: route.timeout,
            retry_cnt: route.retries,
            rnr_retry: route.retries,
            max_rd_atomic: 1,
            ..IbvQpAttr::default()
        };
        let mask = IBV_QP_STATE
            | IBV_QP_TIMEOUT
            | IBV_QP_RETRY_CNT
            | IBV_QP_RNR_RETRY
            | IBV_QP_SQ_PSN
            | IBV_QP_MAX_QP_RD_ATOMIC;
        self.step(&mut attributes, mask, "ready to send")
    }

    fn step(&self, attributes: &mut IbvQpAttr, mask: c_uint, state: &str) -> Result<()> {
        let device = &self.domain.device;
        // SAFETY: alive, and readable.
        done(unsafe { device.api.modify_qp(self.raw, attributes, mask as c_int) }).map_err(
            |error| {
                Error::system(
                    format!("making a queue pair of {} {state}", device.name),
                    error,
                )
            },
        )
    }

    /// Makes room for one more message, with this number on its completion.
    #[inline]
    pub fn post_room(&self, id: u64) -> io::Result<()> {
        let mut room = IbvRecvWr {
            wr_id: id,
            next: null_mut(),
            sg_list: null_mut(),
            num_sge: 0,
        };
        // SAFETY: alive; the list has one piece, and no memory.
        done(unsafe { ibverbs::post_recv(self.raw, &mut room) })
    }

    /// Posts writes, in order, at one go.
    ///
    /// # Safety
    /// Pieces that are not inline lie in registered memory that outlives the queue pair.
    #[inline]
    pub unsafe fn post(&self, writes: &mut [Write]) -> io::Result<()> {
        const MOST: usize = 2;
        assert!(!writes.is_empty() && writes.len() <= MOST);
        let mut works: [IbvSendWr; MOST] = std::array::from_fn(|_| IbvSendWr {
            wr_id: 0,
            next: null_mut(),
            sg_list: null_mut(),
            num_sge: 1,
            opcode: IBV_WR_RDMA_WRITE,
            send_flags: 0,
            imm_data: 0,
            rdma: IbvSendWrRdma::default(),
            _rest_of_wr: [0; 2],
            qp_type: 0,
            bind_mw: [0; 6],
        });
        let mut next: *mut IbvSendWr = null_mut();
        for (work, write) in works.iter_mut().zip(writes.iter_mut()).rev() {
            work.wr_id = write.id;
            work.next = next;
            work.sg_list = &raw mut write.piece;
            work.rdma.remote_addr = write.remote;
            work.rdma.rkey = write.remote_key;
            if let Some(immediate) = write.immediate {
                work.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
                work.imm_data = immediate.to_be();
            }
            if write.signaled {
                work.send_flags |= IBV_SEND_SIGNALED;
            }
            if write.piece.length <= self.inline {
                work.send_flags |= IBV_SEND_INLINE;
            }
            next = work;
        }
        // SAFETY: alive; the list ends with the last write, and lives through the call; the memory
        // by the caller's word.
        done(unsafe { ibverbs::post_send(self.raw, next) })
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        // SAFETY: nobody else has it.
        gone("queue pair", unsafe {
            self.domain.device.api.destroy_qp(self.raw)
        });
    }
}

/// A write into a peer's memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Write {
    /// On its completion.
    pub id: u64,
    /// From where.
    pub piece: IbvSge,
    /// Where to.
    pub remote: u64,
    /// The key of that memory.
    pub remote_key: u32,
    /// A number that the peer gets once all of this write, and all writes before it, are in its
    /// memory.
    pub immediate: Option<u32>,
    /// Whether there is a completion if all goes well.
    pub signaled: bool,
}
