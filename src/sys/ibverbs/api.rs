//! The functions of libibverbs that this library calls. One list defines the trait that the
//! transport calls, and the table that [`Loaded`](super::Loaded) fills from the system's library.

use super::types::*;
use crate::sys::loader::function_table;
use std::ffi::{c_int, c_uint, c_void};

/// Defines the trait [`Api`] and the table of loaded functions from the list.
macro_rules! verbs_functions {
    (
        optional { $($late:ident = $late_symbol:literal () -> $late_result:ty;)* }
        $($name:ident = $symbol:literal ($($arg:ident: $type:ty),* $(,)?) $(-> $result:ty)?;)*
    ) => {
        /// The exported verbs. Methods have names, arguments and contracts of the C functions.
        ///
        /// # Safety of the methods
        /// The contracts of the C functions: pointers are valid for the accesses of the function;
        /// objects came from the function table and are not destroyed.
        #[allow(clippy::missing_safety_doc)]
        pub trait Api: Send + Sync + std::fmt::Debug {
            /// Names the library, or its simulation, for messages.
            fn source(&self) -> String;
            $(
                #[doc = concat!("`", $symbol, "`")]
                unsafe fn $name(&self, $($arg: $type),*) $(-> $result)?;
            )*
            $(
                #[doc = concat!("`", $late_symbol, "`; `None` if the library lacks it.")]
                unsafe fn $late(&self) -> Option<$late_result>;
            )*
        }

        function_table! {
            /// Functions of the system's library.
            pub(super) struct Functions;
            required { $($name = $symbol: fn($($type),*) $(-> $result)?;)* }
            optional { $($late = $late_symbol: fn() -> $late_result;)* }
        }

        impl Api for super::Loaded {
            fn source(&self) -> String {
                self.library().name().to_string()
            }
            $(
                unsafe fn $name(&self, $($arg: $type),*) $(-> $result)? {
                    // SAFETY: the caller keeps the contract of the C function.
                    unsafe { (self.functions().$name)($($arg),*) }
                }
            )*
            $(
                unsafe fn $late(&self) -> Option<$late_result> {
                    // SAFETY: the function takes no arguments and only returns a state of the
                    // library.
                    self.functions().$late.map(|function| unsafe { function() })
                }
            )*
        }
    };
}

verbs_functions! {
    optional {
        // Exists since rdma-core 35.
        is_fork_initialized = "ibv_is_fork_initialized" () -> c_uint;
    }
    fork_init = "ibv_fork_init" () -> c_int;
    get_device_list = "ibv_get_device_list" (count: *mut c_int) -> *mut *mut IbvDevice;
    free_device_list = "ibv_free_device_list" (list: *mut *mut IbvDevice);
    open_device = "ibv_open_device" (device: *mut IbvDevice) -> *mut IbvContext;
    close_device = "ibv_close_device" (context: *mut IbvContext) -> c_int;
    query_device = "ibv_query_device"
        (context: *mut IbvContext, attributes: *mut IbvDeviceAttr) -> c_int;
    // This old symbol writes all fields except the last, which was added later.
    query_port = "ibv_query_port"
        (context: *mut IbvContext, port: u8, attributes: *mut IbvPortAttr) -> c_int;
    query_gid = "_ibv_query_gid_ex" (
        context: *mut IbvContext, port: u32, index: u32,
        entry: *mut IbvGidEntry, flags: u32, entry_size: usize,
    ) -> c_int;
    get_async_event = "ibv_get_async_event"
        (context: *mut IbvContext, event: *mut IbvAsyncEvent) -> c_int;
    ack_async_event = "ibv_ack_async_event" (event: *mut IbvAsyncEvent);

    alloc_pd = "ibv_alloc_pd" (context: *mut IbvContext) -> *mut IbvPd;
    dealloc_pd = "ibv_dealloc_pd" (domain: *mut IbvPd) -> c_int;
    reg_mr = "ibv_reg_mr"
        (domain: *mut IbvPd, address: *mut c_void, bytes: usize, access: c_int) -> *mut IbvMr;
    dereg_mr = "ibv_dereg_mr" (region: *mut IbvMr) -> c_int;

    create_comp_channel = "ibv_create_comp_channel"
        (context: *mut IbvContext) -> *mut IbvCompChannel;
    destroy_comp_channel = "ibv_destroy_comp_channel" (channel: *mut IbvCompChannel) -> c_int;
    create_cq = "ibv_create_cq" (
        context: *mut IbvContext, entries: c_int, user: *mut c_void,
        channel: *mut IbvCompChannel, vector: c_int,
    ) -> *mut IbvCq;
    destroy_cq = "ibv_destroy_cq" (queue: *mut IbvCq) -> c_int;
    get_cq_event = "ibv_get_cq_event" (
        channel: *mut IbvCompChannel, queue: *mut *mut IbvCq, user: *mut *mut c_void,
    ) -> c_int;
    ack_cq_events = "ibv_ack_cq_events" (queue: *mut IbvCq, events: c_uint);

    create_qp = "ibv_create_qp"
        (domain: *mut IbvPd, attributes: *mut IbvQpInitAttr) -> *mut IbvQp;
    modify_qp = "ibv_modify_qp"
        (pair: *mut IbvQp, attributes: *mut IbvQpAttr, mask: c_int) -> c_int;
    destroy_qp = "ibv_destroy_qp" (pair: *mut IbvQp) -> c_int;
}
