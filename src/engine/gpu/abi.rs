//! What a launch passes to a kernel: the mirrors of `cinch_step`, `cinch_work`, `cinch_args` and
//! `cinch_oneshot_args` in `kernels/abi.h`. What lies in memory for longer is in `mem::abi`.

use crate::mem::abi::{CommView, SIGNATURE_WORDS};
use crate::schedule::Op;

/// Bytes that a launch passes by value.
pub const ARGS_BYTES: usize = 4096;
/// Most steps of a batch.
pub const MAX_BATCH: usize = 32;
/// Bytes of [`Args::work_buffer`].
pub const BLOB_BYTES: usize = ARGS_BYTES - 24 - 584;

/// `cinch_own`: no own contribution.
pub const OWN_ABSENT: u8 = 0;
/// The own contribution as it is.
pub const OWN_EXACT: u8 = 1;
/// The own contribution as the peers see it.
pub const OWN_CODED: u8 = 2;

/// `cinch_combine`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Combine {
    /// Sum.
    Sum = 0,
    /// Product.
    Prod = 1,
    /// Largest.
    Max = 2,
    /// Smallest.
    Min = 3,
}

/// [`Work::flags`]: own elements times [`Work::factor`].
pub const PREMULTIPLY: u8 = 1;
/// [`Work::flags`]: final sums divided by the number of ranks.
pub const AVERAGE: u8 = 2;
/// [`Work::flags`]: input and output are multiples of 16.
pub const ALIGNED: u8 = 4;
/// [`Work::flags`]: [`Work::factor`] is the address of an element of the call's type.
pub const FACTOR_AT: u8 = 8;
/// [`Work::flags`]: the codec draws, and the launch may be replayed.
pub const REDRAW: u8 = 16;
/// [`Work::flags`]: the next kernel of the stream may begin once no thread waits for a rank any more.
pub const LETS_NEXT_BEGIN: u8 = 32;

/// Of a fused kernel of a codec: everyone sends each other rank a part or block of its own, else all.
pub const SENDS_PARTS: u8 = 1;
/// What it gets is summed up, else kept.
pub const SUMS: u8 = 2;
/// The sums go to all.
pub const SENDS_SUMS: u8 = 4;

/// Parameters of a codec, or the bytes of an element where nothing but bytes is moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct CodecWords {
    /// What they mean is the codec's business.
    pub word: [u32; 8],
}

/// One step of a packed schedule (`cinch_step`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Step {
    /// [`Op`] as a number.
    pub op: u8,
    /// `OWN_*`.
    pub own: u8,
    /// Sources that are added before the own contribution.
    pub own_after: u8,
    /// Steps, from this one on, whose waits are taken together; 0 inside one.
    pub batch: u8,
    /// Stage.
    pub stage: u16,
    /// Part of the pass's range.
    pub part: u16,
    /// Block of the input.
    pub in_block: u16,
    /// Block of the output.
    pub out_block: u16,
    /// Index of its first peer: receives, then sends.
    pub peers: u16,
    /// Messages that it receives.
    pub nrecv: u8,
    /// Messages that it sends.
    pub nsend: u8,
    /// In the first step of a batch: bit r is set if the batch receives from rank r.
    pub recv_mask: u32,
    /// In the first step of a batch: bit r is set if the batch sends to rank r.
    pub send_mask: u32,
}

/// Bytes before the first array of residuals.
pub const RESIDUALS_BYTES: usize = 256;

/// What stands before the residuals of one tensor (`cinch_residuals`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct ResidualsHeader {
    /// Which array of a pair is what the last call left.
    pub turn: u32,
    /// Blocks that are through with the call.
    pub arrived: u32,
}

/// One call, or one message of a group (`cinch_work`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Work {
    /// Device address of the input; 0 where there is none.
    pub input: u64,
    /// Device address of the output; 0 where there is none.
    pub output: u64,
    /// Elements of the message, or of one rank's block.
    pub count: u64,
    /// Elements of a full chunk.
    pub chunk: u64,
    /// Of a pre-multiplied sum, in the accumulator type, in the low bits; or where it is
    /// ([`FACTOR_AT`]).
    pub factor: u64,
    /// What the call is, for the peers.
    pub signature: [u64; SIGNATURE_WORDS],
    /// Device address of the [`ResidualsHeader`] of error feedback; 0 without.
    pub residuals: u64,
    /// Elements of an array of them.
    pub span: u64,
    /// Chunks into which a pass cuts its range.
    pub parts: u32,
    /// Passes over all channels.
    pub passes: u32,
    /// The place in the launch, in channels, of channel 0.
    pub first_block: u16,
    /// Channels.
    pub channels: u16,
    /// The channel of channel 0.
    pub first_lane: u16,
    /// Stages of a pass.
    pub stages: u16,
    /// Index of its first step.
    pub steps: u16,
    /// Steps.
    pub nsteps: u16,
    /// [`Combine`].
    pub combine: u8,
    /// [`PREMULTIPLY`] and its like.
    pub flags: u8,
    /// Of what the call is, for flags, of which packets have 12 bits.
    pub mark: u16,
    /// Parameters of the codec.
    pub codec: CodecWords,
}

/// What the schedule interpreter is launched with (`cinch_args`).
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Args {
    /// The communicator.
    pub comm: CommView,
    /// Device address of the work_buffer where it does not fit; else 0.
    pub far: u64,
    /// Works in the work_buffer.
    pub nworks: u32,
    /// Steps behind them.
    pub nsteps: u32,
    /// Peers behind those.
    pub npeers: u32,
    /// Nothing.
    pub unused: u32,
    /// Works, steps and peers, one after the other.
    pub work_buffer: [u8; BLOB_BYTES],
}

/// What the fused exchange of small messages is launched with (`cinch_oneshot_args`).
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct OneshotArgs {
    /// The communicator.
    pub comm: CommView,
    /// Offset of the area in a box.
    pub area: u64,
    /// Bytes of each of its halves.
    pub half: u64,
    /// Device address of two words: calls so far, blocks of this call that are done.
    pub epoch: u64,
    /// Device address of the input.
    pub input: u64,
    /// Device address of the output.
    pub output: u64,
    /// Elements of the message, or of a block.
    pub count: u64,
    /// As [`Work::factor`].
    pub factor: u64,
    /// Of what the call is, for flags of 64 bits: in the upper 16.
    pub mark: u64,
    /// As [`Work::signature`].
    pub signature: [u64; SIGNATURE_WORDS],
    /// Words of 8 bytes that go from a rank to another on a trip; with a codec elements.
    pub words: u32,
    /// Of a block of threads: packets, a multiple of 32, tiles of lines, or images.
    pub share: u32,
    /// [`Combine`].
    pub combine: u8,
    /// As [`Work::flags`].
    pub flags: u8,
    /// Bytes of an element.
    pub element_bytes: u8,
    /// The rank that a broadcast or reduce has for its root.
    pub root: u8,
    /// [`SENDS_PARTS`] and its like, of a codec.
    pub phases: u8,
    /// Lines that an image takes, of a codec.
    pub image_lines: u8,
    /// Nothing.
    pub unused: [u8; 2],
    /// Parameters of the codec.
    pub codec: CodecWords,
    /// As [`Work::residuals`].
    pub residuals: u64,
    /// As [`Work::span`].
    pub span: u64,
}

const _: () = assert!(size_of::<Step>() == 24 && size_of::<Work>() == 152);
const _: () = assert!(size_of::<Args>() == ARGS_BYTES && size_of::<OneshotArgs>() == 752);
const _: () = assert!(std::mem::offset_of!(Args, far) == 584);
const _: () = assert!(std::mem::offset_of!(Args, work_buffer) == 608);
const _: () = assert!(std::mem::offset_of!(Work, codec) == 120);
const _: () = assert!(Op::Send as u8 == 0 && Op::RecvReduceCopySend as u8 == 7);

/// The bytes of works and steps, as the kernel reads them.
pub(super) fn bytes_of<T: Plain>(items: &[T]) -> &[u8] {
    // SAFETY: `Plain` types are `repr(C)` integers without padding, so every byte is initialised.
    unsafe { std::slice::from_raw_parts(items.as_ptr().cast(), size_of_val(items)) }
}

/// Types without padding.
///
/// # Safety
/// Every byte of a value is initialised.
pub(super) unsafe trait Plain: Copy {}
// SAFETY: 24 bytes of fields in 24 bytes; see the asserts.
unsafe impl Plain for Step {}
// SAFETY: 136 bytes of fields in 136 bytes.
unsafe impl Plain for Work {}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::mem::offset_of;
    use std::process::Command;

    /// Lines of "what number", as the C program below prints them.
    fn ours() -> String {
        let mut text = String::new();
        macro_rules! line {
            ($what:expr, $number:expr) => {
                text += &format!("{} {}\n", $what, $number as usize)
            };
        }
        macro_rules! fields {
            ($name:literal, $type:ty, $($field:ident)*) => {
                line!($name, size_of::<$type>());
                $(line!(concat!($name, ".", stringify!($field)), offset_of!($type, $field));)*
            };
        }
        fields!("cinch_step", Step, op own own_after batch stage part in_block out_block peers
            nrecv nsend recv_mask send_mask);
        fields!("cinch_residuals", ResidualsHeader, turn arrived);
        fields!("cinch_work", Work, input output count chunk factor signature residuals span parts passes
            first_block channels first_lane stages steps nsteps combine flags mark codec);
        fields!("cinch_args", Args, comm far nworks nsteps npeers unused work_buffer);
        fields!("cinch_oneshot_args", OneshotArgs, comm area half epoch input output count factor mark
            signature words share combine flags element_bytes root phases image_lines unused
            codec residuals span);
        fields!("cinch_comm_view", CommView, inbox outbox cursors control timeout_ns rank nranks
            fifo protocol unused);
        for (name, number) in NUMBERS {
            line!(name, *number);
        }
        text
    }

    const NUMBERS: &[(&str, usize)] = &[
        ("CINCH_SEND", Op::Send as usize),
        ("CINCH_RECV", Op::Recv as usize),
        ("CINCH_COPY", Op::Copy as usize),
        ("CINCH_REDUCE", Op::Reduce as usize),
        ("CINCH_RECV_REDUCE_COPY", Op::RecvReduceCopy as usize),
        ("CINCH_RECV_REDUCE_SEND", Op::RecvReduceSend as usize),
        ("CINCH_RECV_COPY_SEND", Op::RecvCopySend as usize),
        (
            "CINCH_RECV_REDUCE_COPY_SEND",
            Op::RecvReduceCopySend as usize,
        ),
        ("CINCH_OWN_ABSENT", OWN_ABSENT as usize),
        ("CINCH_OWN_EXACT", OWN_EXACT as usize),
        ("CINCH_OWN_CODED", OWN_CODED as usize),
        ("CINCH_SUM", Combine::Sum as usize),
        ("CINCH_PROD", Combine::Prod as usize),
        ("CINCH_MAX", Combine::Max as usize),
        ("CINCH_MIN", Combine::Min as usize),
        ("CINCH_PREMULTIPLY", PREMULTIPLY as usize),
        ("CINCH_AVERAGE", AVERAGE as usize),
        ("CINCH_ALIGNED", ALIGNED as usize),
        ("CINCH_FACTOR_AT", FACTOR_AT as usize),
        ("CINCH_REDRAW", REDRAW as usize),
        ("CINCH_LETS_NEXT_BEGIN", LETS_NEXT_BEGIN as usize),
        ("CINCH_SENDS_PARTS", SENDS_PARTS as usize),
        ("CINCH_SUMS", SUMS as usize),
        ("CINCH_SENDS_SUMS", SENDS_SUMS as usize),
        ("CINCH_RESIDUALS_BYTES", RESIDUALS_BYTES),
        ("CINCH_ARGS_BYTES", ARGS_BYTES),
        ("CINCH_BLOB_BYTES", BLOB_BYTES),
        ("CINCH_MAX_BATCH", MAX_BATCH),
        ("CINCH_MAX_RANKS", crate::mem::abi::MAX_RANKS),
        ("CINCH_MAX_LANES", crate::mem::abi::MAX_CHANNELS),
        (
            "CINCH_BLOCK_THREADS",
            crate::engine::gpu::kernels::LARGE[0] as usize,
        ),
        (
            "CINCH_STAGE_BYTES",
            crate::engine::gpu::kernels::LARGE[1] as usize,
        ),
        (
            "CINCH_SMALL_BLOCK_THREADS",
            crate::engine::gpu::kernels::SMALL[0] as usize,
        ),
        (
            "CINCH_SMALL_STAGE_BYTES",
            crate::engine::gpu::kernels::SMALL[1] as usize,
        ),
        (
            "CINCH_ONESHOT_THREADS",
            crate::engine::gpu::kernels::FUSED_THREADS as usize,
        ),
        ("CINCH_TILE_WORDS", crate::engine::gpu::launch::TILE_WORDS),
        ("CINCH_GRANULE_BYTES", crate::plan::GRANULE_BYTES),
        ("CINCH_KEPT_STEPS", crate::plan::KEPT_STEPS),
    ];

    /// Names that the header spells otherwise: (here, in `kernels/abi.h`).
    const HEADER_NAMES: &[(&str, &str)] = &[
        ("CINCH_LETS_NEXT_BEGIN", "CINCH_LAUNCH_DEPENDENTS"),
        ("CINCH_BLOB_BYTES", "CINCH_WORK_BUFFER_BYTES"),
        ("CINCH_MAX_LANES", "CINCH_MAX_CHANNELS"),
        ("CINCH_ONESHOT_THREADS", "CINCH_FUSED_THREADS"),
        ("cinch_work.first_lane", "cinch_work.first_channel"),
        ("cinch_work.mark", "cinch_work.signature_hash"),
        ("cinch_args.far", "cinch_args.overflow"),
        (
            "cinch_oneshot_args.mark",
            "cinch_oneshot_args.signature_hash",
        ),
        (
            "cinch_oneshot_args.image_lines",
            "cinch_oneshot_args.tile_lines",
        ),
    ];

    /// A C program that prints the same lines from the header.
    fn program(ours: &str) -> String {
        let header = concat!(env!("CARGO_MANIFEST_DIR"), "/kernels/abi.h");
        let mut text = format!("#include <stdio.h>\n#include \"{header}\"\nint main(void) {{\n");
        for line in ours.lines() {
            let what = line.split(' ').next().unwrap_or_default();
            let renamed = HEADER_NAMES.iter().find(|(name, _)| *name == what);
            let spelled = renamed.map_or(what, |(_, spelled)| spelled);
            let value = match spelled.split_once('.') {
                Some((name, field)) => format!("offsetof(struct {name}, {field})"),
                None if spelled.starts_with("CINCH") => spelled.to_string(),
                None => format!("sizeof(struct {spelled})"),
            };
            text += &format!("  printf(\"{what} %zu\\n\", (size_t)({value}));\n");
        }
        text + "  return 0;\n}\n"
    }

    #[test]
    fn a_c_compiler_sees_the_same_structs() {
        let stem = std::env::temp_dir().join(format!("cinch-abi-{}", std::process::id()));
        let compile = Command::new("cc")
            .args(["-std=c11", "-x", "c", "-", "-o"])
            .arg(&stem)
            .stdin(std::process::Stdio::piped())
            .spawn();
        let Ok(mut compiler) = compile else {
            println!("skipped: there is no C compiler called cc");
            return;
        };
        let ours = ours();
        let input = compiler.stdin.take();
        input.unwrap().write_all(program(&ours).as_bytes()).unwrap();
        assert!(compiler.wait().unwrap().success());
        let output = Command::new(&stem).output();
        std::fs::remove_file(&stem).unwrap();
        let theirs = String::from_utf8(output.unwrap().stdout).unwrap();
        assert!(ours.lines().count() > 70);
        assert_eq!(ours, theirs);
    }
}
