//! The log function that plug-ins get: a C function with a format and any number of arguments.
//!
//! Stable Rust cannot define such a function. So a few instructions store the argument registers where a `va_list` of
//! the platform expects them, and pass the list on. The C library formats the text.

use cinch::capi::core::guard::caught;
use cinch::sys::log::{self, Level};
use cinch::types::Subsystem;
use std::ffi::{CStr, c_char, c_int, c_ulong, c_void};

/// Longest text in bytes; the rest of a longer text is cut off.
const LONGEST_TEXT: usize = 1024;

/// Levels by NCCL's numbers.
const LEVELS: [Level; 6] = [
    Level::None,
    Level::Version,
    Level::Warn,
    Level::Info,
    // Aborts are of a level between INFO and TRACE.
    Level::Info,
    Level::Trace,
];

/// Subsystems by NCCL's bits; the log has no lines of the others.
const SUBSYSTEMS: [(u32, Subsystem); 13] = [
    (0, Subsystem::Init),
    (1, Subsystem::Coll),
    (2, Subsystem::P2p),
    (3, Subsystem::Shm),
    (4, Subsystem::Net),
    (5, Subsystem::Graph),
    (6, Subsystem::Tuning),
    (7, Subsystem::Env),
    (8, Subsystem::Alloc),
    (9, Subsystem::Call),
    (10, Subsystem::Proxy),
    (12, Subsystem::Bootstrap),
    (13, Subsystem::Reg),
];

unsafe extern "C" {
    /// Formats a text as `vsnprintf` of the C library. A `va_list` as an argument is an address on both platforms.
    fn vsnprintf(
        text: *mut c_char,
        bytes: usize,
        format: *const c_char,
        list: *mut c_void,
    ) -> c_int;
}

/// Logs a line: `ncclDebugLogger_t`, with the arguments of `format` behind it.
///
/// # Safety
/// `format` is a C string, and its arguments follow.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
pub(super) unsafe extern "C" fn log_function(
    level: c_int,
    subsystems: c_ulong,
    file: *const c_char,
    line: c_int,
    format: *const c_char,
) {
    // The frame: a `va_list` of 24 bytes at 0, and the registers at 32, six of 8 bytes and eight of 16. Five registers
    // of 8 bytes hold named arguments. The stack's arguments are behind the frame and the return address.
    core::arch::naked_asm!(
        "sub rsp, 216",
        "mov [rsp + 32], rdi",
        "mov [rsp + 40], rsi",
        "mov [rsp + 48], rdx",
        "mov [rsp + 56], rcx",
        "mov [rsp + 64], r8",
        "mov [rsp + 72], r9",
        "test al, al",
        "je 2f",
        "movaps [rsp + 80], xmm0",
        "movaps [rsp + 96], xmm1",
        "movaps [rsp + 112], xmm2",
        "movaps [rsp + 128], xmm3",
        "movaps [rsp + 144], xmm4",
        "movaps [rsp + 160], xmm5",
        "movaps [rsp + 176], xmm6",
        "movaps [rsp + 192], xmm7",
        "2:",
        "mov dword ptr [rsp], 40",
        "mov dword ptr [rsp + 4], 48",
        "lea rax, [rsp + 224]",
        "mov [rsp + 8], rax",
        "lea rax, [rsp + 32]",
        "mov [rsp + 16], rax",
        "mov r9, rsp",
        "call {log_list}",
        "add rsp, 216",
        "ret",
        log_list = sym log_list,
    )
}

/// Logs a line: `ncclDebugLogger_t`, with the arguments of `format` behind it.
///
/// # Safety
/// `format` is a C string, and its arguments follow.
#[cfg(target_arch = "aarch64")]
#[unsafe(naked)]
pub(super) unsafe extern "C" fn log_function(
    level: c_int,
    subsystems: c_ulong,
    file: *const c_char,
    line: c_int,
    format: *const c_char,
) {
    // The frame: two registers at 0, a `va_list` of 32 bytes at 16, and the argument registers, eight of 8 bytes at 64
    // and eight of 16 bytes at 128. Five registers of 8 bytes hold named arguments, so 24 bytes are left of these.
    core::arch::naked_asm!(
        "stp x29, x30, [sp, #-256]!",
        "mov x29, sp",
        "stp x0, x1, [sp, #64]",
        "stp x2, x3, [sp, #80]",
        "stp x4, x5, [sp, #96]",
        "stp x6, x7, [sp, #112]",
        "stp q0, q1, [sp, #128]",
        "stp q2, q3, [sp, #160]",
        "stp q4, q5, [sp, #192]",
        "stp q6, q7, [sp, #224]",
        "add x8, sp, #256",
        "str x8, [sp, #16]",
        "str x8, [sp, #32]",
        "add x8, sp, #128",
        "str x8, [sp, #24]",
        "mov w8, #-24",
        "str w8, [sp, #40]",
        "mov w8, #-128",
        "str w8, [sp, #44]",
        "add x5, sp, #16",
        "bl {log_list}",
        "ldp x29, x30, [sp], #256",
        "ret",
        log_list = sym log_list,
    )
}

/// Logs the text of `format` and of its arguments in `list`, if lines of this level are logged.
unsafe extern "C" fn log_list(
    level: c_int,
    subsystems: c_ulong,
    _file: *const c_char,
    _line: c_int,
    format: *const c_char,
    list: *mut c_void,
) {
    let log = || {
        let level = usize::try_from(level).ok().and_then(|at| LEVELS.get(at));
        let Some(&level) = level.filter(|_| !format.is_null()) else {
            return Ok(());
        };
        let Some(subsystem) = listening(level, subsystems) else {
            return Ok(());
        };
        let mut text = [0 as c_char; LONGEST_TEXT];
        // SAFETY: the plug-in passes a format with its arguments; `text` has room for its size, which ends with a zero.
        let text = unsafe {
            vsnprintf(text.as_mut_ptr(), text.len(), format, list);
            CStr::from_ptr(text.as_ptr())
        };
        let text = text.to_string_lossy();
        log::line_of(subsystem, level, format_args!("{}", text.trim_end()));
        Ok(())
    };
    // An error is a panic, which must not reach the plug-in.
    let _ = caught("the log function of a plug-in", log);
}

/// Returns a subsystem of these bits whose lines of `level` are logged. Bits without a subsystem stand for INIT.
fn listening(level: Level, bits: c_ulong) -> Option<Subsystem> {
    let mut named = SUBSYSTEMS
        .iter()
        .filter(|(bit, _)| bits >> bit & 1 != 0)
        .map(|(_, subsystem)| *subsystem)
        .peekable();
    if named.peek().is_none() {
        return log::enabled(level).then_some(Subsystem::Init);
    }
    named.find(|&subsystem| log::enabled_for(subsystem, level))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subsystem_of_a_plugin_is_one_of_the_log() {
        // Tests run at the default level, which logs warnings only.
        assert_eq!(listening(Level::Info, 0x40), None);
        for (bits, expected) in [
            (0x41, Subsystem::Init),
            (0x40, Subsystem::Tuning),
            (0x4000, Subsystem::Init),
        ] {
            assert_eq!(listening(Level::Warn, bits), Some(expected));
        }
    }
}
