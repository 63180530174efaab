//! The structs and constants of `<infiniband/verbs.h>` that this library uses.
//!
//! The layouts are libibverbs' ABI: since version 1.1 structs only grow at their ends. Fields have
//! their C names. A test compares every size, offset and value with the installed header. A C union
//! appears as the one member that is used.

use std::ffi::{c_char, c_int, c_uint, c_void};

/// Layout of a struct, with the name of the C struct that it mirrors.
#[cfg(test)]
pub(super) struct Layout {
    pub name: &'static str,
    pub size: usize,
    pub align: usize,
    /// Each field's C name and its offset in the Rust struct.
    pub fields: Vec<(&'static str, usize)>,
}

/// Defines the structs, and the list of their layouts for the test. Fields that begin with `_` are
/// unused and keep later fields in place.
macro_rules! c_structs {
    ($($(#[$doc:meta])* $name:ident = $c_name:literal {
        $($field:ident $(as $c_field:literal)?: $type:ty,)*
    })*) => {
        $(
            $(#[$doc])*
            #[repr(C)]
            #[allow(missing_docs)]
            pub struct $name {
                $(pub $field: $type,)*
            }
        )*

        #[cfg(test)]
        pub(super) fn layouts() -> Vec<Layout> {
            vec![$(Layout {
                name: $c_name,
                size: size_of::<$name>(),
                align: align_of::<$name>(),
                fields: vec![$((
                    { #[allow(unused_variables)] let name = stringify!($field); $(let name = $c_field;)? name },
                    std::mem::offset_of!($name, $field),
                ),)*],
            },)*]
        }
    };
}

/// Defines the constants, and the list of them for the test.
macro_rules! c_constants {
    ($($type:ty { $($name:ident = $value:expr,)* })*) => {
        $($(
            #[allow(missing_docs)]
            pub const $name: $type = $value;
        )*)*

        #[cfg(test)]
        pub(super) const CONSTANTS: &[(&str, i64)] = &[$($((stringify!($name), $name as i64),)*)*];
    };
}

/// Placeholder for an operation of a context that this library does not call.
pub type Unused = usize;

/// Type of the operation that `ibv_poll_cq` calls.
pub type PollCq = unsafe extern "C" fn(*mut IbvCq, c_int, *mut IbvWc) -> c_int;
/// Type of the operation that `ibv_req_notify_cq` calls.
pub type ReqNotifyCq = unsafe extern "C" fn(*mut IbvCq, c_int) -> c_int;
/// Type of the operation that `ibv_post_send` calls.
pub type PostSend = unsafe extern "C" fn(*mut IbvQp, *mut IbvSendWr, *mut *mut IbvSendWr) -> c_int;
/// Type of the operation that `ibv_post_recv` calls.
pub type PostRecv = unsafe extern "C" fn(*mut IbvQp, *mut IbvRecvWr, *mut *mut IbvRecvWr) -> c_int;

c_structs! {
    /// A device in the device list.
    IbvDevice = "ibv_device" {
        _ops: [Unused; 2],
        node_type: c_int,
        transport_type: c_int,
        name: [c_char; 64],
        dev_name: [c_char; 64],
        dev_path: [c_char; 256],
        ibdev_path: [c_char; 256],
    }
    /// Operations of a provider that inline functions call.
    IbvContextOps = "ibv_context_ops" {
        _compat_query_device: Unused,
        _compat_query_port: Unused,
        _compat_alloc_pd: Unused,
        _compat_dealloc_pd: Unused,
        _compat_reg_mr: Unused,
        _compat_rereg_mr: Unused,
        _compat_dereg_mr: Unused,
        alloc_mw: Unused,
        bind_mw: Unused,
        dealloc_mw: Unused,
        _compat_create_cq: Unused,
        poll_cq: Option<PollCq>,
        req_notify_cq: Option<ReqNotifyCq>,
        _compat_cq_event: Unused,
        _compat_resize_cq: Unused,
        _compat_destroy_cq: Unused,
        _compat_create_srq: Unused,
        _compat_modify_srq: Unused,
        _compat_query_srq: Unused,
        _compat_destroy_srq: Unused,
        post_srq_recv: Unused,
        _compat_create_qp: Unused,
        _compat_query_qp: Unused,
        _compat_modify_qp: Unused,
        _compat_destroy_qp: Unused,
        post_send: Option<PostSend>,
        post_recv: Option<PostRecv>,
        _compat_create_ah: Unused,
        _compat_destroy_ah: Unused,
        _compat_attach_mcast: Unused,
        _compat_detach_mcast: Unused,
        _compat_async_event: Unused,
    }
    /// An open device.
    IbvContext = "ibv_context" {
        device: *mut IbvDevice,
        ops: IbvContextOps,
        cmd_fd: c_int,
        async_fd: c_int,
        num_comp_vectors: c_int,
        mutex: libc::pthread_mutex_t,
        abi_compat: *mut c_void,
    }
    /// Limits of a device.
    #[derive(Clone, Copy)]
    IbvDeviceAttr = "ibv_device_attr" {
        fw_ver: [c_char; 64],
        node_guid: u64,
        sys_image_guid: u64,
        max_mr_size: u64,
        page_size_cap: u64,
        vendor_id: u32,
        vendor_part_id: u32,
        hw_ver: u32,
        max_qp: c_int,
        max_qp_wr: c_int,
        device_cap_flags: c_uint,
        max_sge: c_int,
        max_sge_rd: c_int,
        max_cq: c_int,
        max_cqe: c_int,
        max_mr: c_int,
        max_pd: c_int,
        max_qp_rd_atom: c_int,
        max_ee_rd_atom: c_int,
        max_res_rd_atom: c_int,
        max_qp_init_rd_atom: c_int,
        max_ee_init_rd_atom: c_int,
        atomic_cap: c_uint,
        max_ee: c_int,
        max_rdd: c_int,
        max_mw: c_int,
        max_raw_ipv6_qp: c_int,
        max_raw_ethy_qp: c_int,
        max_mcast_grp: c_int,
        max_mcast_qp_attach: c_int,
        max_total_mcast_qp_attach: c_int,
        max_ah: c_int,
        max_fmr: c_int,
        max_map_per_fmr: c_int,
        max_srq: c_int,
        max_srq_wr: c_int,
        max_srq_sge: c_int,
        max_pkeys: u16,
        local_ca_ack_delay: u8,
        phys_port_cnt: u8,
    }
    /// A port of a device.
    #[derive(Clone, Copy)]
    IbvPortAttr = "ibv_port_attr" {
        state: c_uint,
        max_mtu: c_uint,
        active_mtu: c_uint,
        gid_tbl_len: c_int,
        port_cap_flags: u32,
        max_msg_sz: u32,
        bad_pkey_cntr: u32,
        qkey_viol_cntr: u32,
        pkey_tbl_len: u16,
        lid: u16,
        sm_lid: u16,
        lmc: u8,
        max_vl_num: u8,
        sm_sl: u8,
        subnet_timeout: u8,
        init_type_reply: u8,
        active_width: u8,
        active_speed: u8,
        phys_state: u8,
        link_layer: u8,
        flags: u8,
        port_cap_flags2: u16,
    }
    /// An address of a port. The C type is a union with two words, hence the alignment.
    #[repr(align(8))]
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    IbvGid = "ibv_gid" {
        raw: [u8; 16],
    }
    /// An entry of a port's address table, with the type of the address.
    #[derive(Clone, Copy, Debug, Default)]
    IbvGidEntry = "ibv_gid_entry" {
        gid: IbvGid,
        gid_index: u32,
        port_num: u32,
        gid_type: u32,
        ndev_ifindex: u32,
    }
    /// A protection domain: queue pairs may access memory of their own domain only.
    IbvPd = "ibv_pd" {
        context: *mut IbvContext,
        handle: u32,
    }
    /// Registered memory, with the keys by which devices and peers access the memory.
    IbvMr = "ibv_mr" {
        context: *mut IbvContext,
        pd: *mut IbvPd,
        addr: *mut c_void,
        length: usize,
        handle: u32,
        lkey: u32,
        rkey: u32,
    }
    /// A completion channel: completion queues report events through its descriptor.
    IbvCompChannel = "ibv_comp_channel" {
        context: *mut IbvContext,
        fd: c_int,
        refcnt: c_int,
    }
    /// A completion queue, into which a device writes a completion for each finished work request.
    IbvCq = "ibv_cq" {
        context: *mut IbvContext,
        channel: *mut IbvCompChannel,
        cq_context: *mut c_void,
        handle: u32,
        cqe: c_int,
        mutex: libc::pthread_mutex_t,
        cond: libc::pthread_cond_t,
        comp_events_completed: u32,
        async_events_completed: u32,
    }
    /// A queue pair: a send queue and a receive queue, connected to a queue pair of the peer.
    IbvQp = "ibv_qp" {
        context: *mut IbvContext,
        qp_context: *mut c_void,
        pd: *mut IbvPd,
        send_cq: *mut IbvCq,
        recv_cq: *mut IbvCq,
        srq: *mut c_void,
        handle: u32,
        qp_num: u32,
        state: c_uint,
        qp_type: c_uint,
        mutex: libc::pthread_mutex_t,
        cond: libc::pthread_cond_t,
        events_completed: u32,
    }
    /// Limits of a queue pair.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    IbvQpCap = "ibv_qp_cap" {
        max_send_wr: u32,
        max_recv_wr: u32,
        max_send_sge: u32,
        max_recv_sge: u32,
        max_inline_data: u32,
    }
    /// Arguments of the creation of a queue pair.
    IbvQpInitAttr = "ibv_qp_init_attr" {
        qp_context: *mut c_void,
        send_cq: *mut IbvCq,
        recv_cq: *mut IbvCq,
        srq: *mut c_void,
        cap: IbvQpCap,
        qp_type: c_uint,
        sq_sig_all: c_int,
    }
    /// Global route header: routes to another subnet, or in RoCE to any peer.
    #[derive(Clone, Copy, Debug, Default)]
    IbvGlobalRoute = "ibv_global_route" {
        dgid: IbvGid,
        flow_label: u32,
        sgid_index: u8,
        hop_limit: u8,
        traffic_class: u8,
    }
    /// Address of a peer.
    #[derive(Clone, Copy, Debug, Default)]
    IbvAhAttr = "ibv_ah_attr" {
        grh: IbvGlobalRoute,
        dlid: u16,
        sl: u8,
        src_path_bits: u8,
        static_rate: u8,
        is_global: u8,
        port_num: u8,
    }
    /// Attributes of a queue pair, set by a transition of its state.
    #[derive(Clone, Copy, Default)]
    IbvQpAttr = "ibv_qp_attr" {
        qp_state: c_uint,
        cur_qp_state: c_uint,
        path_mtu: c_uint,
        path_mig_state: c_uint,
        qkey: u32,
        rq_psn: u32,
        sq_psn: u32,
        dest_qp_num: u32,
        qp_access_flags: c_uint,
        cap: IbvQpCap,
        ah_attr: IbvAhAttr,
        alt_ah_attr: IbvAhAttr,
        pkey_index: u16,
        alt_pkey_index: u16,
        en_sqd_async_notify: u8,
        sq_draining: u8,
        max_rd_atomic: u8,
        max_dest_rd_atomic: u8,
        min_rnr_timer: u8,
        port_num: u8,
        timeout: u8,
        retry_cnt: u8,
        rnr_retry: u8,
        alt_port_num: u8,
        alt_timeout: u8,
        rate_limit: u32,
    }
    /// A piece of local memory (scatter/gather element).
    #[derive(Clone, Copy, Debug, Default)]
    IbvSge = "ibv_sge" {
        addr: u64,
        length: u32,
        lkey: u32,
    }
    /// Destination of an RDMA write. In C it is the first of three members of a union.
    #[derive(Clone, Copy, Debug, Default)]
    IbvSendWrRdma = "ibv_send_wr__bindgen_ty_2__bindgen_ty_1" {
        remote_addr: u64,
        rkey: u32,
    }
    /// A send work request.
    IbvSendWr = "ibv_send_wr" {
        wr_id: u64,
        next: *mut IbvSendWr,
        sg_list: *mut IbvSge,
        num_sge: c_int,
        opcode: c_uint,
        send_flags: c_uint,
        imm_data as "__bindgen_anon_1": u32,
        rdma as "wr": IbvSendWrRdma,
        _rest_of_wr: [u64; 2],
        qp_type: u32,
        bind_mw as "__bindgen_anon_2": [u64; 6],
    }
    /// A receive work request.
    IbvRecvWr = "ibv_recv_wr" {
        wr_id: u64,
        next: *mut IbvRecvWr,
        sg_list: *mut IbvSge,
        num_sge: c_int,
    }
    /// A work completion: status and opcode of a finished work request.
    #[derive(Clone, Copy, Debug, Default)]
    IbvWc = "ibv_wc" {
        wr_id: u64,
        status: c_uint,
        opcode: c_uint,
        vendor_err: u32,
        byte_len: u32,
        imm_data as "__bindgen_anon_1": u32,
        qp_num: u32,
        src_qp: u32,
        wc_flags: c_uint,
        pkey_index: u16,
        slid: u16,
        sl: u8,
        dlid_path_bits: u8,
    }
    /// An asynchronous event of a device.
    IbvAsyncEvent = "ibv_async_event" {
        element: usize,
        event_type: c_uint,
    }
}

c_constants! {
    c_uint {
        IBV_FORK_DISABLED = 0,
        IBV_FORK_ENABLED = 1,
        IBV_FORK_UNNEEDED = 2,
    }
    u32 {
        IBV_GID_TYPE_IB = 0,
        IBV_GID_TYPE_ROCE_V1 = 1,
        IBV_GID_TYPE_ROCE_V2 = 2,
    }
    c_int {
        IBV_TRANSPORT_IB = 0,
        IBV_NODE_CA = 1,
    }
    u8 {
        IBV_LINK_LAYER_INFINIBAND = 1,
        IBV_LINK_LAYER_ETHERNET = 2,
    }
    c_uint {
        IBV_MTU_256 = 1,
        IBV_MTU_512 = 2,
        IBV_MTU_1024 = 3,
        IBV_MTU_2048 = 4,
        IBV_MTU_4096 = 5,

        IBV_PORT_NOP = 0,
        IBV_PORT_DOWN = 1,
        IBV_PORT_INIT = 2,
        IBV_PORT_ARMED = 3,
        IBV_PORT_ACTIVE = 4,
        IBV_PORT_ACTIVE_DEFER = 5,

        IBV_EVENT_CQ_ERR = 0,
        IBV_EVENT_QP_FATAL = 1,
        IBV_EVENT_QP_REQ_ERR = 2,
        IBV_EVENT_QP_ACCESS_ERR = 3,
        IBV_EVENT_COMM_EST = 4,
        IBV_EVENT_DEVICE_FATAL = 8,
        IBV_EVENT_PORT_ACTIVE = 9,
        IBV_EVENT_PORT_ERR = 10,
        IBV_EVENT_LID_CHANGE = 11,
        IBV_EVENT_GID_CHANGE = 18,

        IBV_WC_SUCCESS = 0,
        IBV_WC_LOC_LEN_ERR = 1,
        IBV_WC_LOC_QP_OP_ERR = 2,
        IBV_WC_LOC_PROT_ERR = 4,
        IBV_WC_WR_FLUSH_ERR = 5,
        IBV_WC_BAD_RESP_ERR = 7,
        IBV_WC_LOC_ACCESS_ERR = 8,
        IBV_WC_REM_INV_REQ_ERR = 9,
        IBV_WC_REM_ACCESS_ERR = 10,
        IBV_WC_REM_OP_ERR = 11,
        IBV_WC_RETRY_EXC_ERR = 12,
        IBV_WC_RNR_RETRY_EXC_ERR = 13,
        IBV_WC_REM_ABORT_ERR = 16,
        IBV_WC_FATAL_ERR = 19,
        IBV_WC_RESP_TIMEOUT_ERR = 20,
        IBV_WC_GENERAL_ERR = 21,

        IBV_WC_RDMA_WRITE = 1,
        IBV_WC_RECV = 128,
        IBV_WC_RECV_RDMA_WITH_IMM = 129,
        IBV_WC_WITH_IMM = 2,

        IBV_ACCESS_LOCAL_WRITE = 1,
        IBV_ACCESS_REMOTE_WRITE = 2,

        IBV_QPT_RC = 2,

        IBV_QPS_RESET = 0,
        IBV_QPS_INIT = 1,
        IBV_QPS_RTR = 2,
        IBV_QPS_RTS = 3,
        IBV_QPS_ERR = 6,

        IBV_QP_STATE = 1 << 0,
        IBV_QP_ACCESS_FLAGS = 1 << 3,
        IBV_QP_PKEY_INDEX = 1 << 4,
        IBV_QP_PORT = 1 << 5,
        IBV_QP_AV = 1 << 7,
        IBV_QP_PATH_MTU = 1 << 8,
        IBV_QP_TIMEOUT = 1 << 9,
        IBV_QP_RETRY_CNT = 1 << 10,
        IBV_QP_RNR_RETRY = 1 << 11,
        IBV_QP_RQ_PSN = 1 << 12,
        IBV_QP_MAX_QP_RD_ATOMIC = 1 << 13,
        IBV_QP_MIN_RNR_TIMER = 1 << 15,
        IBV_QP_SQ_PSN = 1 << 16,
        IBV_QP_MAX_DEST_RD_ATOMIC = 1 << 17,
        IBV_QP_DEST_QPN = 1 << 20,

        IBV_WR_RDMA_WRITE = 0,
        IBV_WR_RDMA_WRITE_WITH_IMM = 1,

        IBV_SEND_SIGNALED = 1 << 1,
        IBV_SEND_INLINE = 1 << 3,
    }
}

impl IbvDevice {
    /// Returns the name, such as `mlx5_0`.
    pub fn name(&self) -> String {
        let bytes = self.name.iter().take_while(|byte| **byte != 0);
        let bytes: Vec<u8> = bytes.map(|byte| *byte as u8).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}
