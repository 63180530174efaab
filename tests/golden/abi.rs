//! Declares the functions and structs of `include/cinch.h` that the cases use. The declarations are repeated
//! here, so that the test compiles with every version of the crate that keeps the C ABI.

use cinch as _; // links the library, which exports the functions
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr::{null, null_mut};

/// Mirrors `cinch_result_t`.
pub type Code = u32;

pub const INVALID_ARGUMENT: Code = 4;
pub const INVALID_USAGE: Code = 5;
pub const UNSUPPORTED: Code = 11;

const API_VERSION: u32 = 1;

/// Mirrors `cinch_unique_id_t`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct UniqueId(pub [u8; 128]);

/// Mirrors `cinch_config_t`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct CConfig {
    pub size: usize,
    pub magic: u32,
    pub version: u32,
    pub codec: *const c_char,
    pub network_interface: *const c_char,
    pub transport: u32,
    pub algorithm: u32,
    pub slots: u32,
    pub channels: u32,
    pub tcp_sockets: u32,
    pub heartbeat_ms: u32,
    pub slot_bytes: u64,
    pub buffer_bytes: u64,
    pub codec_min_bytes: u64,
    pub timeout_ms: u64,
    pub init_timeout_ms: u64,
    pub device: *const c_char,
    pub name: *const c_char,
}

/// Mirrors `cinch_report_t`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct CReport {
    pub size: usize,
    pub magic: u32,
    pub version: u32,
    pub valid: u32,
    pub algorithm: u32,
    pub transport: u32,
    pub channels: u32,
    pub wire_bytes: u64,
    pub saturated: u64,
    pub non_finite: u64,
    pub abs_max: f64,
    pub l2_norm: f64,
    pub codec: [c_char; 64],
    pub fused: u64,
}

/// Mirrors `cinch_call_t`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct CCall {
    pub size: usize,
    pub magic: u32,
    pub version: u32,
    pub comm: *mut c_void,
    pub sendbuf: *const c_void,
    pub recvbuf: *mut c_void,
    pub count: usize,
    pub collective: u32,
    pub dtype: u32,
    pub op: u32,
    pub root: c_int,
    pub peer: c_int,
    pub algorithm: u32,
    pub codec: *const c_char,
    pub tensor: u64,
    pub stream: *mut c_void,
    pub feedback: u64,
}

/// Mirrors `cinch_awp_t`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct CAwp {
    pub size: usize,
    pub magic: u32,
    pub version: u32,
    pub threshold: f64,
    pub previous: f64,
    pub interval: u32,
    pub step_bits: u32,
    pub bits: u32,
    pub count: u32,
    pub has_previous: u32,
    pub most_bits: u32,
}

/// Mirrors `cinch_loss_scaler_t`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct CLossScaler {
    pub size: usize,
    pub magic: u32,
    pub version: u32,
    pub scale: f64,
    pub growth: f64,
    pub backoff: f64,
    pub smallest: f64,
    pub largest: f64,
    pub rescale: f64,
    pub skipped: u64,
    pub interval: u32,
    pub clean: u32,
}

/// C functions under their names in the header. Callers must keep the contracts that the header
/// states.
mod c {
    use super::*;

    unsafe extern "C" {
        pub fn cinch_last_error() -> *const c_char;
        pub fn cinch_unique_id_create(id: *mut UniqueId) -> Code;
        pub fn cinch_config_init(config: *mut CConfig, size: usize, version: u32) -> Code;
        pub fn cinch_comm_init(
            id: *const UniqueId,
            rank: c_int,
            nranks: c_int,
            config: *const CConfig,
            comm: *mut *mut c_void,
        ) -> Code;
        pub fn cinch_comm_split(
            comm: *mut c_void,
            color: c_int,
            key: i64,
            new: *mut *mut c_void,
        ) -> Code;
        pub fn cinch_comm_finalize(comm: *mut c_void) -> Code;
        pub fn cinch_comm_destroy(comm: *mut c_void) -> Code;
        pub fn cinch_all_reduce(
            sendbuf: *const c_void,
            recvbuf: *mut c_void,
            count: usize,
            dtype: u32,
            op: u32,
            comm: *mut c_void,
            stream: *mut c_void,
        ) -> Code;
        pub fn cinch_all_gather(
            sendbuf: *const c_void,
            recvbuf: *mut c_void,
            count: usize,
            dtype: u32,
            comm: *mut c_void,
            stream: *mut c_void,
        ) -> Code;
        pub fn cinch_reduce_scatter(
            sendbuf: *const c_void,
            recvbuf: *mut c_void,
            count: usize,
            dtype: u32,
            op: u32,
            comm: *mut c_void,
            stream: *mut c_void,
        ) -> Code;
        pub fn cinch_broadcast(
            sendbuf: *const c_void,
            recvbuf: *mut c_void,
            count: usize,
            dtype: u32,
            root: c_int,
            comm: *mut c_void,
            stream: *mut c_void,
        ) -> Code;
        pub fn cinch_reduce(
            sendbuf: *const c_void,
            recvbuf: *mut c_void,
            count: usize,
            dtype: u32,
            op: u32,
            root: c_int,
            comm: *mut c_void,
            stream: *mut c_void,
        ) -> Code;
        pub fn cinch_gather(
            sendbuf: *const c_void,
            recvbuf: *mut c_void,
            count: usize,
            dtype: u32,
            root: c_int,
            comm: *mut c_void,
            stream: *mut c_void,
        ) -> Code;
        pub fn cinch_scatter(
            sendbuf: *const c_void,
            recvbuf: *mut c_void,
            count: usize,
            dtype: u32,
            root: c_int,
            comm: *mut c_void,
            stream: *mut c_void,
        ) -> Code;
        pub fn cinch_all_to_all(
            sendbuf: *const c_void,
            recvbuf: *mut c_void,
            count: usize,
            dtype: u32,
            comm: *mut c_void,
            stream: *mut c_void,
        ) -> Code;
        pub fn cinch_send(
            sendbuf: *const c_void,
            count: usize,
            dtype: u32,
            peer: c_int,
            comm: *mut c_void,
            stream: *mut c_void,
        ) -> Code;
        pub fn cinch_recv(
            recvbuf: *mut c_void,
            count: usize,
            dtype: u32,
            peer: c_int,
            comm: *mut c_void,
            stream: *mut c_void,
        ) -> Code;
        pub fn cinch_group_start() -> Code;
        pub fn cinch_group_end() -> Code;
        pub fn cinch_op_create_premulsum(
            comm: *mut c_void,
            scalar: *const c_void,
            dtype: u32,
            op: *mut u32,
        ) -> Code;
        pub fn cinch_op_destroy(comm: *mut c_void, op: u32) -> Code;
        pub fn cinch_report_init(report: *mut CReport, size: usize, version: u32) -> Code;
        pub fn cinch_call_init(call: *mut CCall, size: usize, version: u32) -> Code;
        pub fn cinch_call(call: *const CCall, report: *mut CReport) -> Code;
        pub fn cinch_wire_bytes(
            codec: *const c_char,
            layout: u32,
            count: usize,
            bytes: *mut usize,
        ) -> Code;
        pub fn cinch_wire_count(
            codec: *const c_char,
            layout: u32,
            wire: *const c_void,
            wire_bytes: usize,
            count: *mut usize,
        ) -> Code;
        pub fn cinch_encode(
            codec: *const c_char,
            layout: u32,
            src: *const c_void,
            count: usize,
            dtype: u32,
            draw: u64,
            wire: *mut c_void,
            wire_bytes: usize,
            stream: *mut c_void,
        ) -> Code;
        pub fn cinch_decode(
            codec: *const c_char,
            layout: u32,
            wire: *const c_void,
            wire_bytes: usize,
            dst: *mut c_void,
            count: usize,
            dtype: u32,
            stream: *mut c_void,
        ) -> Code;
        pub fn cinch_feedback_export(
            comm: *mut c_void,
            buffer: *mut c_void,
            capacity: usize,
            bytes: *mut usize,
        ) -> Code;
        pub fn cinch_feedback_import(
            comm: *mut c_void,
            buffer: *const c_void,
            bytes: usize,
        ) -> Code;
        pub fn cinch_feedback_rescale(comm: *mut c_void, factor: f64) -> Code;
        pub fn cinch_feedback_forget(comm: *mut c_void, feedback: u64) -> Code;
        pub fn cinch_awp_init(awp: *mut CAwp, size: usize, version: u32) -> Code;
        pub fn cinch_awp_update(awp: *mut CAwp, l2_norm: f64, codec: *mut *const c_char) -> Code;
        pub fn cinch_loss_scaler_init(scaler: *mut CLossScaler, size: usize, version: u32) -> Code;
        pub fn cinch_loss_scaler_update(
            scaler: *mut CLossScaler,
            non_finite: c_int,
            apply: *mut c_int,
        ) -> Code;
        pub fn cinch_count_non_finite(
            data: *const c_void,
            count: usize,
            dtype: u32,
            found: *mut u64,
        ) -> Code;
    }
}

/// Returns the message of this thread's last failed call.
pub fn last_error() -> String {
    // SAFETY: the library returns a C string and keeps it until the thread's next failure.
    let text = unsafe { CStr::from_ptr(c::cinch_last_error()) };
    text.to_string_lossy().into_owned()
}

/// Panics with the last error message unless `code` is 0.
///
/// # Panics
/// If `code` is not 0.
pub fn succeed(what: &str, code: Code) {
    assert_eq!(code, 0, "{what}: {}", last_error());
}

/// Creates a versioned struct with its default values.
fn initialised<T>(init: unsafe extern "C" fn(*mut T, usize, u32) -> Code) -> T {
    let mut value = std::mem::MaybeUninit::<T>::zeroed();
    // SAFETY: `value` has the size that the call receives. Every struct here consists of numbers
    // and pointers, for which zeros are valid.
    unsafe {
        succeed(
            "init",
            init(value.as_mut_ptr(), size_of::<T>(), API_VERSION),
        );
        value.assume_init()
    }
}

impl CConfig {
    pub fn new() -> CConfig {
        initialised(c::cinch_config_init)
    }
}

impl CCall {
    pub fn new() -> CCall {
        initialised(c::cinch_call_init)
    }
}

impl CReport {
    pub fn new() -> CReport {
        initialised(c::cinch_report_init)
    }
}

impl CAwp {
    pub fn new() -> CAwp {
        initialised(c::cinch_awp_init)
    }

    /// Passes a norm on. Returns the result code, and the name of the codec to use next.
    pub fn update(&mut self, l2_norm: f64) -> (Code, String) {
        let mut codec = c"".as_ptr();
        // SAFETY: both pointers lead to writable locals, and the library returns a static string.
        unsafe {
            let code = c::cinch_awp_update(self, l2_norm, &mut codec);
            (code, CStr::from_ptr(codec).to_string_lossy().into_owned())
        }
    }
}

impl CLossScaler {
    pub fn new() -> CLossScaler {
        initialised(c::cinch_loss_scaler_init)
    }

    /// Reports a step. Returns the result code, and whether to apply the step.
    pub fn update(&mut self, non_finite: bool) -> (Code, c_int) {
        let mut apply = -1;
        // SAFETY: both pointers lead to writable locals.
        let code = unsafe { c::cinch_loss_scaler_update(self, non_finite.into(), &mut apply) };
        (code, apply)
    }
}

/// Returns the result code and the number of elements that are not finite.
pub fn count_non_finite(data: &[u8], count: usize, dtype: u32) -> (Code, u64) {
    let mut found = u64::MAX;
    // SAFETY: callers pass a slice of at least `count` elements.
    let code = unsafe { c::cinch_count_non_finite(data.as_ptr().cast(), count, dtype, &mut found) };
    (code, found)
}

pub fn unique_id() -> UniqueId {
    let mut id = UniqueId([0; 128]);
    // SAFETY: the pointer leads to a writable local of 128 bytes.
    succeed("cinch_unique_id_create", unsafe {
        c::cinch_unique_id_create(&mut id)
    });
    id
}

/// A communicator. Dropping it leaks the handle; [`Comm::close`] frees it.
#[derive(Debug)]
pub struct Comm(*mut c_void);

impl Comm {
    pub fn init(id: &UniqueId, rank: usize, nranks: usize, config: &CConfig) -> Result<Comm, Code> {
        let mut comm = null_mut();
        // SAFETY: the references keep the structs valid, and the caller keeps the strings of
        // `config`.
        let code =
            unsafe { c::cinch_comm_init(id, rank as c_int, nranks as c_int, config, &mut comm) };
        if code == 0 { Ok(Comm(comm)) } else { Err(code) }
    }

    pub fn split(&self, color: usize, key: i64) -> Comm {
        let mut comm = null_mut();
        // SAFETY: the handle is open until `close` consumes `self`, and `comm` is writable.
        let code = unsafe { c::cinch_comm_split(self.0, color as c_int, key, &mut comm) };
        succeed("cinch_comm_split", code);
        Comm(comm)
    }

    pub fn close(self) {
        // SAFETY: the handle is open, and this function consumes the only copy that callers use.
        unsafe {
            succeed("cinch_comm_finalize", c::cinch_comm_finalize(self.0));
            succeed("cinch_comm_destroy", c::cinch_comm_destroy(self.0));
        }
    }

    pub fn handle(&self) -> *mut c_void {
        self.0
    }

    /// Creates an operator that multiplies each contribution by `scalar` and adds the products.
    /// Returns the result code and the operator.
    pub fn create_premulsum(&self, scalar: &[u8], dtype: u32) -> (Code, u32) {
        let mut op = 0;
        // SAFETY: callers pass the bytes of an element, and `op` is writable.
        let code =
            unsafe { c::cinch_op_create_premulsum(self.0, scalar.as_ptr().cast(), dtype, &mut op) };
        (code, op)
    }

    pub fn destroy_op(&self, op: u32) -> Code {
        // SAFETY: the library checks both arguments, so any values are valid.
        unsafe { c::cinch_op_destroy(self.0, op) }
    }

    pub fn export_feedback(&self) -> (Code, Vec<u8>) {
        let mut bytes = 0;
        // SAFETY: the first call returns the size with which the buffer of the second call is
        // allocated.
        unsafe {
            let code = c::cinch_feedback_export(self.0, null_mut(), 0, &mut bytes);
            if code != 0 {
                return (code, Vec::new());
            }
            let mut buffer = vec![0u8; bytes];
            let data = buffer.as_mut_ptr().cast();
            let code = c::cinch_feedback_export(self.0, data, bytes, &mut bytes);
            (code, buffer)
        }
    }

    pub fn import_feedback(&self, buffer: &[u8]) -> Code {
        // SAFETY: pointer and length come from one slice.
        unsafe { c::cinch_feedback_import(self.0, buffer.as_ptr().cast(), buffer.len()) }
    }

    pub fn rescale_feedback(&self, factor: f64) -> Code {
        // SAFETY: the handle is open until `close` consumes `self`.
        unsafe { c::cinch_feedback_rescale(self.0, factor) }
    }

    pub fn forget_feedback(&self, tensor: u64) -> Code {
        // SAFETY: the handle is open until `close` consumes `self`.
        unsafe { c::cinch_feedback_forget(self.0, tensor) }
    }
}

pub fn group_start() -> Code {
    // SAFETY: the function has no arguments.
    unsafe { c::cinch_group_start() }
}

/// # Safety
/// The buffers and reports of the group's calls must still exist.
pub unsafe fn group_end() -> Code {
    // SAFETY: the caller keeps the buffers and reports.
    unsafe { c::cinch_group_end() }
}

/// # Safety
/// The buffers of `call` must have the sizes that the header demands. They and `report` must exist
/// until the call has run, which is the end of the group for a call in a group.
pub unsafe fn call(call: &CCall, report: &mut CReport) -> Code {
    // SAFETY: the caller keeps the buffers and the report.
    unsafe { c::cinch_call(call, report) }
}

/// Runs `call` by the C function of its collective, which takes neither codec nor algorithm.
///
/// # Safety
/// The buffers of `call` must have the sizes that the header demands. They must exist until the
/// call has run, which is the end of the group for a call in a group.
pub unsafe fn call_function(call: &CCall) -> Code {
    let &CCall {
        comm,
        sendbuf,
        recvbuf,
        count,
        dtype,
        op,
        root,
        peer,
        ..
    } = call;
    let stream = null_mut();
    // SAFETY: the caller keeps the buffers.
    unsafe {
        match call.collective {
            0 => c::cinch_all_reduce(sendbuf, recvbuf, count, dtype, op, comm, stream),
            1 => c::cinch_all_gather(sendbuf, recvbuf, count, dtype, comm, stream),
            2 => c::cinch_reduce_scatter(sendbuf, recvbuf, count, dtype, op, comm, stream),
            3 => c::cinch_broadcast(sendbuf, recvbuf, count, dtype, root, comm, stream),
            4 => c::cinch_reduce(sendbuf, recvbuf, count, dtype, op, root, comm, stream),
            5 => c::cinch_gather(sendbuf, recvbuf, count, dtype, root, comm, stream),
            6 => c::cinch_scatter(sendbuf, recvbuf, count, dtype, root, comm, stream),
            7 => c::cinch_all_to_all(sendbuf, recvbuf, count, dtype, comm, stream),
            8 => c::cinch_send(sendbuf, count, dtype, peer, comm, stream),
            _ => c::cinch_recv(recvbuf, count, dtype, peer, comm, stream),
        }
    }
}

/// Encodes the first `count` elements of `src`. Returns the result code and the wire bytes.
pub fn encode(
    codec: &str,
    layout: u32,
    src: &[u8],
    count: usize,
    dtype: u32,
    draw: u64,
) -> (Code, Vec<u8>) {
    let codec = CString::new(codec).unwrap();
    let mut bytes = 0;
    // SAFETY: the first call returns the size with which the wire buffer is allocated. Callers pass
    // a slice of at least `count` elements.
    unsafe {
        let code = c::cinch_wire_bytes(codec.as_ptr(), layout, count, &mut bytes);
        if code != 0 {
            return (code, Vec::new());
        }
        let mut wire = vec![0u8; bytes];
        let (from, to) = (src.as_ptr().cast(), wire.as_mut_ptr().cast());
        let code = c::cinch_encode(
            codec.as_ptr(),
            layout,
            from,
            count,
            dtype,
            draw,
            to,
            bytes,
            null_mut(),
        );
        (code, wire)
    }
}

/// Decodes `count` elements of `size` bytes each. Returns the result code and the elements' bytes.
pub fn decode(
    codec: &str,
    layout: u32,
    wire: &[u8],
    count: usize,
    (dtype, size): (u32, usize),
) -> (Code, Vec<u8>) {
    let codec = CString::new(codec).unwrap();
    let mut elements = vec![0u8; count * size];
    // SAFETY: `wire` is a slice passed with its length, and `elements` has room for `count`
    // elements.
    let code = unsafe {
        c::cinch_decode(
            codec.as_ptr(),
            layout,
            wire.as_ptr().cast(),
            wire.len(),
            elements.as_mut_ptr().cast(),
            count,
            dtype,
            null_mut(),
        )
    };
    (code, elements)
}

/// Returns the result code and the number of elements in an encoded array.
pub fn wire_count(codec: &str, layout: u32, wire: &[u8]) -> (Code, usize) {
    let codec = CString::new(codec).unwrap();
    let mut count = usize::MAX;
    // SAFETY: `wire` is a slice passed with its length, and `count` is writable.
    let code = unsafe {
        c::cinch_wire_count(
            codec.as_ptr(),
            layout,
            wire.as_ptr().cast(),
            wire.len(),
            &mut count,
        )
    };
    (code, count)
}

/// Returns a pointer to the C string, or NULL for `None`.
pub fn pointer(text: &Option<CString>) -> *const c_char {
    text.as_ref().map_or(null(), |text| text.as_ptr())
}
