//! Kernel arguments: the structs that a launch passes, and the records in a work buffer.

use super::{CommView, SIGNATURE_WORDS};
use crate::schedule::Op;

/// Most bytes that a launch passes by value.
pub const ARGS_BYTES: usize = 4096;
/// Most steps of a batch.
pub const MAX_BATCH: usize = 32;
/// Bytes of [`ScheduleArgs::work_buffer`].
pub const WORK_BUFFER_BYTES: usize = ARGS_BYTES - 24 - 584;

/// Threads of a schedule kernel's block, which drives one channel, in code for sm_90 and above.
pub const BLOCK_THREADS: u32 = 608;
/// Dynamic shared memory of each warp that moves data through a codec, in code for sm_90 and above.
pub const STAGE_BYTES: u32 = 11520;
/// [`BLOCK_THREADS`] of code that also runs on GPUs with 99 KiB of shared memory.
pub const SMALL_BLOCK_THREADS: u32 = 352;
/// [`STAGE_BYTES`] of code that also runs on GPUs with 99 KiB of shared memory.
pub const SMALL_STAGE_BYTES: u32 = 7168;
/// Threads of a block of a fused kernel without a codec.
pub const FUSED_THREADS: u32 = 512;
/// 8-byte payload words of the four ll128 lines that a warp sends together.
pub const TILE_WORDS: usize = 60;

/// [`KernelStep::own`]: the step adds no own contribution.
pub const OWN_ABSENT: u8 = 0;
/// [`KernelStep::own`]: the step adds this rank's input as it is.
pub const OWN_EXACT: u8 = 1;
/// [`KernelStep::own`]: the step adds this rank's input as peers decode it.
pub const OWN_CODED: u8 = 2;

/// The arithmetic of a `ReduceOp`, without premultiplication and division (`cinch_combine`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Combine {
    /// Sum.
    Sum = 0,
    /// Product.
    Prod = 1,
    /// Maximum.
    Max = 2,
    /// Minimum.
    Min = 3,
}

/// [`KernelWork::flags`]: own elements are multiplied by [`KernelWork::factor`].
pub const PREMULTIPLY: u8 = 1;
/// [`KernelWork::flags`]: final sums are divided by the number of ranks.
pub const AVERAGE: u8 = 2;
/// [`KernelWork::flags`], fused kernels only: input and output addresses are multiples of 16.
pub const ALIGNED: u8 = 4;
/// [`KernelWork::flags`]: [`KernelWork::factor`] is the address of an element of the call's type.
pub const FACTOR_AT: u8 = 8;
/// [`KernelWork::flags`]: the codec rounds stochastically and the launch may be replayed. The kernel mixes a
/// message count into the codec's keys, so that each replay draws other numbers.
pub const REDRAW: u8 = 16;
/// [`KernelWork::flags`]: the stream's next kernel may launch once no thread waits for another rank.
pub const LAUNCH_DEPENDENTS: u8 = 32;

/// [`OneshotArgs::phases`]: every rank sends each other rank a part or block; otherwise its whole input.
pub const SENDS_PARTS: u8 = 1;
/// [`OneshotArgs::phases`]: the receiver stores the sum; otherwise what it receives.
pub const SUMS: u8 = 2;
/// [`OneshotArgs::phases`]: every rank sends its sum to all others.
pub const SENDS_SUMS: u8 = 4;

/// Parameters of a codec (`kernels/codec/params.h` has the fields), or the bytes of an element in word 0
/// for a call without a codec.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct CodecWords {
    /// The codec's own fields.
    pub word: [u32; 8],
}

/// A step of a packed schedule (`cinch_step`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct KernelStep {
    /// Number of the [`Op`].
    pub op: u8,
    /// `OWN_*`.
    pub own: u8,
    /// Sources that are added before the own contribution.
    pub own_after: u8,
    /// Steps of the batch that begins here, whose waits are taken together; 0 inside a batch.
    pub batch: u8,
    /// Stage.
    pub stage: u16,
    /// Part of the pass's range.
    pub part: u16,
    /// Block of the input.
    pub in_block: u16,
    /// Block of the output.
    pub out_block: u16,
    /// Index of the step's first peer: its receives come first, then its sends.
    pub peers: u16,
    /// Messages that the step receives.
    pub nrecv: u8,
    /// Messages that the step sends.
    pub nsend: u8,
    /// In the first step of a batch: bit r is set if the batch receives from rank r.
    pub recv_mask: u32,
    /// In the first step of a batch: bit r is set if the batch sends to rank r.
    pub send_mask: u32,
}

/// Bytes before the first array of residuals.
pub const RESIDUALS_BYTES: usize = 256;

/// The header of one tensor's residuals in device memory (`cinch_residuals`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct ResidualsHeader {
    /// Index of the array that the last call wrote, and that the next call reads.
    pub turn: u32,
    /// Blocks that have finished the call.
    pub arrived: u32,
}

/// A call, or a message of a group (`cinch_work`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct KernelWork {
    /// Device address of the input; 0 without one.
    pub input: u64,
    /// Device address of the output; 0 without one.
    pub output: u64,
    /// Elements of the message, or of one rank's block.
    pub count: u64,
    /// Elements of a full chunk.
    pub chunk: u64,
    /// Factor of a pre-multiplied sum: a number of the accumulator type in the low bits, or an address
    /// ([`FACTOR_AT`]).
    pub factor: u64,
    /// The call's signature, which peers compare with theirs.
    pub signature: [u64; SIGNATURE_WORDS],
    /// Device address of the [`ResidualsHeader`] of error feedback; 0 without it.
    pub residuals: u64,
    /// Elements of an array of residuals.
    pub span: u64,
    /// Chunks into which a pass cuts its range.
    pub parts: u32,
    /// Passes over all channels.
    pub passes: u32,
    /// Block of the launch that drives the work's channel 0.
    pub first_block: u16,
    /// Number of channels.
    pub channels: u16,
    /// The communicator's channel that carries the work's channel 0.
    pub first_channel: u16,
    /// Stages of a pass.
    pub stages: u16,
    /// Index of the work's first step.
    pub steps: u16,
    /// Number of steps.
    pub nsteps: u16,
    /// [`Combine`].
    pub combine: u8,
    /// [`PREMULTIPLY`] to [`LAUNCH_DEPENDENTS`].
    pub flags: u8,
    /// Hash of the signature: the upper bits of flags, of which ll packets carry 12.
    pub signature_hash: u16,
    /// Parameters of the codec.
    pub codec: CodecWords,
}

/// Arguments of a schedule kernel, the interpreter of packed schedules (`cinch_args`).
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ScheduleArgs {
    /// The communicator.
    pub comm: CommView,
    /// Device address of a work buffer that exceeds [`WORK_BUFFER_BYTES`]; 0 if `work_buffer` holds it.
    pub overflow: u64,
    /// Works in the work buffer.
    pub nworks: u32,
    /// Steps behind the works.
    pub nsteps: u32,
    /// Peers behind the steps.
    pub npeers: u32,
    /// Padding.
    pub unused: u32,
    /// Works, steps and peers, back to back.
    pub work_buffer: [u8; WORK_BUFFER_BYTES],
}

/// Arguments of a fused kernel (`cinch_oneshot_args`).
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct OneshotArgs {
    /// The communicator.
    pub comm: CommView,
    /// Offset of the kernel's area in a peer buffer.
    pub area: u64,
    /// Bytes of each of the area's halves.
    pub half: u64,
    /// Device address of two words: calls so far, and blocks that have finished this call.
    pub epoch: u64,
    /// Device address of the input.
    pub input: u64,
    /// Device address of the output.
    pub output: u64,
    /// Elements of the message, or of a block.
    pub count: u64,
    /// See [`KernelWork::factor`].
    pub factor: u64,
    /// Hash of the signature: the upper 16 bits of flags, of which ll packets carry 12.
    pub signature_hash: u64,
    /// See [`KernelWork::signature`].
    pub signature: [u64; SIGNATURE_WORDS],
    /// 8-byte words that a rank sends another rank in a round; elements with a codec.
    pub words: u32,
    /// Share of each block of threads: packets (a multiple of 32), tiles of lines, or encoded tiles.
    pub share: u32,
    /// [`Combine`].
    pub combine: u8,
    /// See [`KernelWork::flags`].
    pub flags: u8,
    /// Bytes of an element.
    pub element_bytes: u8,
    /// Root of a broadcast or reduce.
    pub root: u8,
    /// [`SENDS_PARTS`] to [`SENDS_SUMS`], with a codec.
    pub phases: u8,
    /// Lines of an encoded tile, with a codec.
    pub tile_lines: u8,
    /// Padding.
    pub unused: [u8; 2],
    /// Parameters of the codec.
    pub codec: CodecWords,
    /// See [`KernelWork::residuals`].
    pub residuals: u64,
    /// See [`KernelWork::span`].
    pub span: u64,
}

const _: () = assert!(size_of::<KernelStep>() == 24 && size_of::<KernelWork>() == 152);
const _: () = assert!(size_of::<ScheduleArgs>() == ARGS_BYTES && size_of::<OneshotArgs>() == 752);
const _: () = assert!(std::mem::offset_of!(ScheduleArgs, overflow) == 584);
const _: () = assert!(std::mem::offset_of!(ScheduleArgs, work_buffer) == 608);
const _: () = assert!(std::mem::offset_of!(KernelWork, codec) == 120);
const _: () = assert!(Op::Send as u8 == 0 && Op::RecvReduceCopySend as u8 == 7);

/// Returns the bytes of works or steps, as the kernel reads them.
pub(crate) fn plain_bytes<T: Plain>(items: &[T]) -> &[u8] {
    // SAFETY: `Plain` types are `repr(C)` integers without padding, so every byte is initialised.
    unsafe { std::slice::from_raw_parts(items.as_ptr().cast(), size_of_val(items)) }
}

/// Types without padding.
///
/// # Safety
/// Every byte of a value is initialised.
pub(crate) unsafe trait Plain: Copy {}
// SAFETY: the fields take 24 bytes, and an assertion in this file proves that the struct does too.
unsafe impl Plain for KernelStep {}
// SAFETY: the fields take 152 bytes, and an assertion in this file proves that the struct does too.
unsafe impl Plain for KernelWork {}
