//! Sequences of calls of the C ABI by a program that passes wrong numbers, handles, structs and orders.
//!
//! The program keeps what `cinch.h` demands of pointers: they are NULL, or lead to memory of the size that the call
//! names. Sizes that no memory has go with any pointer.

use super::input::Input;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::{null, null_mut};

/// Declares functions of `cinch.h`, whose results are codes.
macro_rules! c_functions {
    ($($name:ident($($argument:ident: $type:ty),*);)*) => {
        unsafe extern "C" {
            $(fn $name($($argument: $type),*) -> c_int;)*
        }
    };
}

type Handle = *mut c_void;
type In = *const c_void;
type Out = *mut c_void;

c_functions! {
    cinch_unique_id_create(id: Out);
    cinch_comm_init(id: In, rank: c_int, nranks: c_int, config: In, comm: *mut Handle);
    cinch_config_init(config: Out, size: usize, version: u32);
    cinch_comm_rank(comm: Handle, rank: *mut c_int);
    cinch_comm_size(comm: Handle, size: *mut c_int);
    cinch_comm_split(comm: Handle, color: c_int, key: c_int, child: *mut Handle);
    cinch_comm_destroy(comm: Handle);
    cinch_comm_finalize(comm: Handle);
    cinch_comm_abort(comm: Handle);
    cinch_comm_async_error(comm: Handle, error: *mut c_int);
    cinch_barrier(comm: Handle);
    cinch_group_start();
    cinch_group_end();
    cinch_all_reduce(s: In, r: Out, n: usize, dtype: u32, op: u32, comm: Handle, stream: Out);
    cinch_all_gather(s: In, r: Out, n: usize, dtype: u32, comm: Handle, stream: Out);
    cinch_reduce_scatter(s: In, r: Out, n: usize, dtype: u32, op: u32, comm: Handle, stream: Out);
    cinch_broadcast(s: In, r: Out, n: usize, dtype: u32, root: c_int, comm: Handle, stream: Out);
    cinch_reduce(s: In, r: Out, n: usize, dtype: u32, op: u32, root: c_int, comm: Handle, stream: Out);
    cinch_gather(s: In, r: Out, n: usize, dtype: u32, root: c_int, comm: Handle, stream: Out);
    cinch_scatter(s: In, r: Out, n: usize, dtype: u32, root: c_int, comm: Handle, stream: Out);
    cinch_all_to_all(s: In, r: Out, n: usize, dtype: u32, comm: Handle, stream: Out);
    cinch_send(s: In, n: usize, dtype: u32, peer: c_int, comm: Handle, stream: Out);
    cinch_recv(r: Out, n: usize, dtype: u32, peer: c_int, comm: Handle, stream: Out);
    cinch_call_init(call: Out, size: usize, version: u32);
    cinch_call(call: In, report: Out);
    cinch_report_init(report: Out, size: usize, version: u32);
    cinch_comm_stats_init(stats: Out, size: usize, version: u32);
    cinch_comm_stats(comm: Handle, stats: Out);
    cinch_wire_bytes(codec: *const c_char, layout: u32, n: usize, bytes: *mut usize);
    cinch_wire_count(codec: *const c_char, layout: u32, wire: In, size: usize, n: *mut usize);
    cinch_encode(codec: *const c_char, layout: u32, s: In, n: usize, dtype: u32, draw: u64, wire: Out, size: usize, stream: Out);
    cinch_decode(codec: *const c_char, layout: u32, wire: In, size: usize, r: Out, n: usize, dtype: u32, stream: Out);
    cinch_copy(codec: *const c_char, s: In, r: Out, n: usize, dtype: u32, draw: u64, stream: Out);
    cinch_feedback_export(comm: Handle, buffer: Out, capacity: usize, bytes: *mut usize);
    cinch_feedback_import(comm: Handle, buffer: In, bytes: usize);
    cinch_feedback_rescale(comm: Handle, factor: f64);
    cinch_feedback_forget(comm: Handle, feedback: u64);
    cinch_op_create_premulsum(comm: Handle, scalar: In, dtype: u32, op: *mut u32);
    cinch_op_destroy(comm: Handle, op: u32);
    cinch_awp_init(awp: Out, size: usize, version: u32);
    cinch_awp_update(awp: Out, norm: f64, codec: *mut *const c_char);
    cinch_loss_scaler_init(scaler: Out, size: usize, version: u32);
    cinch_loss_scaler_update(scaler: Out, non_finite: c_int, apply: *mut c_int);
    cinch_count_non_finite(data: In, n: usize, dtype: u32, found: *mut u64);
    cinch_dtype_size(dtype: u32, size: *mut usize);
}

unsafe extern "C" {
    fn cinch_last_error() -> *const c_char;
    fn cinch_error_string(code: c_int) -> *const c_char;
}

/// Largest number of elements of a call that the buffers hold, 8 bytes each.
const MOST_ELEMENTS: usize = 256;
/// Bytes of a buffer: room for the elements, or their codes, from any of the offsets.
const BUFFER_BYTES: usize = 16 << 10;
/// Bytes that hold the largest struct of `cinch.h`, whose size field may be up to this.
const STRUCT_WORDS: usize = 512;
/// Largest code of `cinch_result_t`.
const LAST_CODE: c_int = 11;
/// Most communicators that a sequence creates.
const MOST_COMMS: usize = 3;

const CODECS: [&CStr; 10] = [
    c"raw",
    c"linear8",
    c"linear8:block=128",
    c"dynamic8:tensor=2",
    c"minmax4:seed=1",
    c"intra=raw,inter=linear8",
    c"auto:mantissa8",
    c"onebit",
    c"trunc16",
    c"linear8:block=3",
];

/// Buffers are words, so that they are aligned for every element type.
type Buffer = Box<[u64; BUFFER_BYTES / 8]>;

struct Program<'a> {
    input: Input<'a>,
    /// Communicators, and whether each lives as far as the program knows.
    comms: Vec<(Handle, bool)>,
    ops: Vec<u32>,
    buffers: [Buffer; 2],
    structure: Box<[u64; STRUCT_WORDS]>,
    /// Calls that succeeded.
    good: usize,
    /// Whether a described call was recorded in a group that is open.
    recorded: bool,
    /// Whether a call failed behind it in the group.
    failed_behind: bool,
    depth: usize,
}

/// Runs a sequence of calls on communicators of this process alone.
pub fn c_calls(data: &[u8]) -> Option<bool> {
    let mut program = Program {
        input: Input(data),
        comms: Vec::new(),
        ops: vec![0, 1, 2, 3, 4, 5, 6, u32::MAX],
        buffers: [0x3f80_0000_4000_0000, 1].map(|word| Box::new([word; BUFFER_BYTES / 8])),
        structure: Box::new([0; STRUCT_WORDS]),
        good: 0,
        recorded: false,
        failed_behind: false,
        depth: 0,
    };
    program.create();
    for _ in 0..64 {
        if program.input.is_empty() {
            break;
        }
        program.call();
    }
    program.end();
    (program.good > 2).then_some(program.failed_behind)
}

impl Program<'_> {
    /// Checks the code of a call, and the sentence if it failed.
    fn check(&mut self, code: c_int) -> bool {
        assert!((0..=LAST_CODE).contains(&code), "code {code}");
        if code == 0 {
            self.good += 1;
            return true;
        }
        // SAFETY: both functions return texts that live until the thread's next call.
        let [sentence, name] = unsafe {
            [cinch_last_error(), cinch_error_string(code)].map(|text| CStr::from_ptr(text))
        };
        assert!(
            !sentence.is_empty() && !name.is_empty(),
            "code {code} without a sentence"
        );
        false
    }

    fn handle(&mut self) -> Handle {
        match self.input.u8() {
            0 => null_mut(),
            1 => 0x1234_5678_usize as Handle,
            2 => (self.input.u64() as usize) as Handle,
            choice if self.comms.is_empty() => usize::from(choice) as Handle,
            choice => self.comms[usize::from(choice) % self.comms.len()].0,
        }
    }

    /// Returns a place in a buffer from which [`MOST_ELEMENTS`] elements fit, or NULL.
    fn place(&mut self) -> Out {
        let choice = self.input.u8();
        let offset = match choice >> 4 {
            15 => return null_mut(),
            steps @ 0..=8 => usize::from(steps) * 256,
            odd => usize::from(odd),
        };
        let buffer = &mut self.buffers[usize::from(choice & 1)];
        buffer.as_mut_ptr().cast::<u8>().wrapping_add(offset).cast()
    }

    fn count(&mut self) -> usize {
        match self.input.u8() {
            255 => usize::MAX,
            254 => isize::MAX as usize + 1,
            253 => MOST_ELEMENTS,
            count => usize::from(count),
        }
    }

    /// Returns a number that is mostly small, and sometimes any.
    fn number(&mut self) -> c_int {
        match self.input.u8() {
            255 => self.input.u32() as c_int,
            254 => -1,
            number => (number % 16).into(),
        }
    }

    fn op(&mut self) -> u32 {
        let at = self.input.below(self.ops.len());
        self.ops[at]
    }

    fn codec(&mut self) -> *const c_char {
        let choice = usize::from(self.input.u8());
        CODECS.get(choice).map_or(null(), |text| text.as_ptr())
    }

    /// Returns a struct that `init` has initialised with a size and version that may be wrong. Its size, magic
    /// and version may be changed afterwards; behind them are pointers.
    fn structure(
        &mut self,
        init: unsafe extern "C" fn(Out, usize, u32) -> c_int,
        size: usize,
    ) -> Out {
        self.structure.fill(0);
        let place: Out = self.structure.as_mut_ptr().cast();
        let (size, version) = match self.input.u8() {
            255 => (
                usize::from(self.input.u16()) % (8 * STRUCT_WORDS),
                self.number() as u32,
            ),
            _ => (size, 1),
        };
        // SAFETY: `structure` is longer than any size that is passed.
        let code = unsafe { init(place, size, version) };
        self.check(code);
        if self.input.u8() == 255 {
            let (at, value) = (self.input.below(2), self.input.u64());
            self.structure[at] = value;
        }
        // The size field stays within the memory.
        self.structure[0] %= 8 * STRUCT_WORDS as u64;
        place
    }

    fn create(&mut self) {
        if self.comms.len() >= MOST_COMMS {
            return;
        }
        let mut id = [0_u8; 128];
        let mut comm = null_mut();
        let config = self.structure(cinch_config_init, 112);
        // Calls that wait for a peer give up soon. The fields are those of `cinch_config_t`.
        (self.structure[10], self.structure[11]) = (50, 1000);
        let (rank, nranks) = match self.input.u8() {
            255 => (self.number(), self.number().min(1)),
            _ => (0, 1),
        };
        // SAFETY: the id has 128 bytes, the struct is initialised, and `comm` is writable.
        let code = unsafe {
            let code = cinch_unique_id_create(id.as_mut_ptr().cast());
            self.check(code);
            cinch_comm_init(id.as_ptr().cast(), rank, nranks, config, &mut comm)
        };
        if self.check(code) {
            assert!(!comm.is_null());
            self.comms.push((comm, true));
        } else {
            assert!(comm.is_null(), "an output was written without success");
        }
    }

    fn call(&mut self) {
        let choice = self.input.u8();
        // SAFETY: places hold `MOST_ELEMENTS` elements or are NULL, larger counts exceed every memory, and handles
        // and numbers may be any.
        let code = unsafe {
            match choice % 40 {
                0..=11 => self.collective(choice % 40),
                12 => cinch_group_start(),
                13 => cinch_group_end(),
                14 | 15 => self.described_call(),
                16..=21 => self.arrays(choice % 40),
                22..=27 => self.feedback(choice % 40),
                28 => {
                    self.create();
                    return;
                }
                29..=38 => self.communicator(choice % 40),
                _ => self.training(),
            }
        };
        let succeeded = self.check(code);
        match choice % 40 {
            12 if succeeded => self.depth += 1,
            13 if succeeded => {
                self.depth = self.depth.saturating_sub(1);
                self.recorded &= self.depth > 0;
            }
            15 if succeeded && self.depth > 0 => self.recorded = true,
            _ if !succeeded && self.recorded => self.failed_behind = true,
            _ => {}
        }
    }

    unsafe fn collective(&mut self, choice: u8) -> c_int {
        let (s, r, n) = (self.place(), self.place(), self.count());
        let (dtype, comm, op) = (self.number() as u32, self.handle(), self.op());
        let (root, stream) = (self.number(), null_mut());
        // SAFETY: see `call`.
        unsafe {
            match choice {
                0..=2 => cinch_all_reduce(s, r, n, dtype, op, comm, stream),
                3 => cinch_all_gather(s, r, n, dtype, comm, stream),
                4 => cinch_reduce_scatter(s, r, n, dtype, op, comm, stream),
                5 => cinch_broadcast(s, r, n, dtype, root, comm, stream),
                6 => cinch_reduce(s, r, n, dtype, op, root, comm, stream),
                7 => cinch_gather(s, r, n, dtype, root, comm, stream),
                8 => cinch_scatter(s, r, n, dtype, root, comm, stream),
                9 => cinch_all_to_all(s, r, n, dtype, comm, stream),
                10 => cinch_send(s, n, dtype, root, comm, stream),
                _ => cinch_recv(r, n, dtype, root, comm, stream),
            }
        }
    }

    /// Runs `cinch_call` with a struct and a report.
    unsafe fn described_call(&mut self) -> c_int {
        let mut report = [0_u64; 20];
        // SAFETY: the report has more than 152 bytes.
        unsafe { cinch_report_init(report.as_mut_ptr().cast(), 152, 1) };
        let call = self.structure(cinch_call_init, 104);
        let words = [
            self.handle() as u64,
            self.place() as u64,
            self.place() as u64,
            self.count() as u64,
            self.number() as u32 as u64 | (self.number() as u32 as u64) << 32,
            u64::from(self.op()) | (self.number() as u32 as u64) << 32,
            self.number() as u32 as u64 | (self.number() as u32 as u64) << 32,
            self.codec() as u64,
            self.input.u8().into(),
            0,
            self.input.u8().into(),
        ];
        self.structure[2..13].copy_from_slice(&words);
        let with_report = self.input.u8() & 1 == 0;
        let report: Out = if with_report && self.depth == 0 {
            report.as_mut_ptr().cast()
        } else {
            null_mut()
        };
        // SAFETY: see `call`; a report of a call in a group would be written later, so there is none.
        unsafe { cinch_call(call, report) }
    }

    unsafe fn arrays(&mut self, choice: u8) -> c_int {
        let (codec, layout, n) = (self.codec(), self.input.u8() as u32 % 4, self.count());
        let (s, r, dtype) = (self.place(), self.place(), self.number() as u32);
        let size = match self.input.u8() {
            255 => usize::MAX,
            size => usize::from(size) * 16,
        };
        let (mut bytes, mut held, draw, stream) = (0, 0, self.input.u8().into(), null_mut());
        // SAFETY: see `call`; sizes of codes are at most the bytes from the last offset.
        unsafe {
            match choice {
                16 => cinch_wire_bytes(codec, layout, n, &mut bytes),
                17 => cinch_wire_count(codec, layout, s, size, &mut held),
                18 => cinch_encode(codec, layout, s, n, dtype, draw, r, size, stream),
                19 => cinch_decode(codec, layout, s, size, r, n, dtype, stream),
                20 => cinch_copy(codec, s, r, n, dtype, draw, stream),
                _ => {
                    let mut found = 0;
                    cinch_count_non_finite(s, n, dtype, &mut found)
                }
            }
        }
    }

    unsafe fn feedback(&mut self, choice: u8) -> c_int {
        let (comm, place) = (self.handle(), self.place());
        let (size, mut bytes) = (usize::from(self.input.u8()) * 16, 0);
        // SAFETY: see `call`; `size` is at most the bytes from the last offset.
        unsafe {
            match choice {
                22 => cinch_feedback_export(comm, place, size, &mut bytes),
                23 => cinch_feedback_import(comm, place, size),
                24 => cinch_feedback_rescale(comm, f64::from_bits(self.input.u64())),
                25 => cinch_feedback_forget(comm, self.input.u8().into()),
                26 => {
                    let mut op = 0;
                    let code =
                        cinch_op_create_premulsum(comm, place, self.number() as u32, &mut op);
                    if code == 0 {
                        self.ops.push(op);
                    }
                    code
                }
                _ => cinch_op_destroy(comm, self.op()),
            }
        }
    }

    unsafe fn communicator(&mut self, choice: u8) -> c_int {
        let comm = self.handle();
        let mut number = 0;
        // SAFETY: handles may be any, and outputs are writable.
        unsafe {
            match choice {
                29 => cinch_comm_rank(comm, &mut number),
                30 => cinch_comm_size(comm, &mut number),
                31 => {
                    let mut child = null_mut();
                    let code = cinch_comm_split(comm, self.number(), self.number(), &mut child);
                    if code == 0 && !child.is_null() {
                        self.comms.push((child, true));
                    }
                    code
                }
                32 => self.destroy(comm),
                33 => cinch_comm_finalize(comm),
                34 => cinch_comm_abort(comm),
                35 => cinch_comm_async_error(comm, &mut number),
                36 => cinch_barrier(comm),
                37 => {
                    let stats = self.structure(cinch_comm_stats_init, 192);
                    cinch_comm_stats(comm, stats)
                }
                _ => cinch_dtype_size(self.number() as u32, &mut 0),
            }
        }
    }

    /// Destroys a communicator, and notes that its handle is dead.
    unsafe fn destroy(&mut self, comm: Handle) -> c_int {
        // SAFETY: a handle may be any.
        let code = unsafe { cinch_comm_destroy(comm) };
        for (handle, lives) in &mut self.comms {
            if *handle == comm && code == 0 {
                assert!(*lives, "a dead communicator was destroyed again");
                *lives = false;
            }
        }
        code
    }

    unsafe fn training(&mut self) -> c_int {
        let (mut apply, mut codec) = (0, null());
        // SAFETY: the structs are initialised, and outputs are writable.
        unsafe {
            if self.input.u8() & 1 == 0 {
                let awp = self.structure(cinch_awp_init, 56);
                cinch_awp_update(awp, f64::from_bits(self.input.u64()), &mut codec)
            } else {
                let scaler = self.structure(cinch_loss_scaler_init, 80);
                cinch_loss_scaler_update(scaler, self.number(), &mut apply)
            }
        }
    }

    /// Ends open groups and living communicators.
    fn end(&mut self) {
        for _ in 0..=64 {
            // SAFETY: the buffers of recorded calls still live.
            if unsafe { cinch_group_end() } != 0 && self.depth == 0 {
                break;
            }
            self.depth = self.depth.saturating_sub(1);
        }
        for (comm, lives) in std::mem::take(&mut self.comms) {
            if lives {
                // SAFETY: a handle may be any.
                let code = unsafe { cinch_comm_destroy(comm) };
                assert_eq!(code, 0, "a living communicator was not destroyed");
            }
        }
    }
}
