//! Kernel arguments: the structs that a launch passes, and the records in a work buffer.

use super::{CommView, SIGNATURE_WORDS};
use crate::schedule::Op;

/// Largest number of argument bytes that a launch passes by value.
pub const ARGS_BYTES: usize = 4096;
/// Largest number of steps in a batch.
pub const MAX_BATCH: usize = 32;
/// Bytes of [`ScheduleArgs::work_buffer`]: the argument limit, less 616 bytes of [`CommView`] and 24 bytes of
/// other fields.
pub const WORK_BUFFER_BYTES: usize = ARGS_BYTES - 24 - 616;

/// Threads of a schedule kernel's block, which drives one channel, in code for sm_90 and above.
pub const BLOCK_THREADS: u32 = 608;
/// Dynamic shared memory of each warp that moves data through a codec, in code for sm_90 and above.
pub const STAGE_BYTES: u32 = 11520;
/// Value of [`BLOCK_THREADS`] in code that also runs on GPUs with 99 KiB of shared memory.
pub const SMALL_BLOCK_THREADS: u32 = 352;
/// Value of [`STAGE_BYTES`] in code that also runs on GPUs with 99 KiB of shared memory.
pub const SMALL_STAGE_BYTES: u32 = 7168;
/// Threads of a block of a fused kernel without a codec.
pub const FUSED_THREADS: u32 = 512;
/// Threads of a block of a kernel that takes the statistics of an array.
pub const STATISTICS_THREADS: u32 = 256;
/// 8-byte payload words of the four ll128 lines that a warp sends together.
pub const TILE_WORDS: usize = 60;

/// Value of [`KernelStep::own`]: the step adds no contribution of this rank.
pub const OWN_ABSENT: u8 = 0;
/// Value of [`KernelStep::own`]: the step adds this rank's input as it is.
pub const OWN_EXACT: u8 = 1;
/// Value of [`KernelStep::own`]: the step adds the values that peers get when they decode this rank's encoded
/// input.
pub const OWN_CODED: u8 = 2;

/// The arithmetic of a `ReduceOp`, without premultiplication and division (`cinch_combine`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Combine {
    /// Adds contributions; integers wrap.
    Sum = 0,
    /// Multiplies contributions; integers wrap.
    Prod = 1,
    /// Takes the largest contribution.
    Max = 2,
    /// Takes the smallest contribution.
    Min = 3,
}

/// Bit of [`KernelWork::flags`]: this rank's elements are multiplied by [`KernelWork::factor`].
pub const PREMULTIPLY: u8 = 1;
/// Bit of [`KernelWork::flags`]: finished sums are divided by the number of ranks.
pub const AVERAGE: u8 = 2;
/// Bit of [`KernelWork::flags`], read by fused kernels only: input and output addresses are
/// multiples of 16.
pub const ALIGNED: u8 = 4;
/// Bit of [`KernelWork::flags`]: [`KernelWork::factor`] is the address of an element of the call's
/// type.
pub const FACTOR_AT: u8 = 8;
/// Bit of [`KernelWork::flags`]: the codec rounds stochastically and the launch may be replayed. The kernel
/// mixes a message count into the codec's keys, so that each replay draws other numbers.
pub const REDRAW: u8 = 16;
/// Bit of [`KernelWork::flags`]: the stream's next kernel may launch once no thread waits for another rank.
pub const LAUNCH_DEPENDENTS: u8 = 32;
/// Bit of [`KernelWork::flags`]: a kernel before has taken the statistics of the input.
pub const HAS_INPUT: u8 = 64;

/// Value of [`KernelWork::intra`]: messages inside groups are encoded as all others.
pub const INTRA_CODED: u8 = 0;
/// Value of [`KernelWork::intra`]: messages inside groups are raw.
pub const INTRA_RAW: u8 = 1;
/// Value of [`KernelWork::intra`]: messages inside groups are encoded by cast16.
pub const INTRA_CAST16: u8 = 2;
/// Value of [`KernelWork::intra`]: messages inside groups are encoded by cast_bf16.
pub const INTRA_CAST_BF16: u8 = 3;
/// Value of [`KernelWork::intra`] where messages inside groups are encoded by linear8, less log2 of the elements of a block,
/// which is 5 to 9.
pub const INTRA_LINEAR8: u8 = 16;

/// Bit of [`OneshotArgs::phases`]: every rank sends each other rank one part or block. Without this bit,
/// every rank sends its whole input.
pub const SENDS_PARTS: u8 = 1;
/// Bit of [`OneshotArgs::phases`]: the receiver sums the messages. Without this bit, it stores them
/// as they are.
pub const SUMS: u8 = 2;
/// Bit of [`OneshotArgs::phases`]: every rank sends its finished sum to all others.
pub const SENDS_SUMS: u8 = 4;

/// Parameters of a codec (`kernels/codec/params.h` has the fields), or, for a call without a codec, the size
/// of an element in bytes in word 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct CodecWords {
    /// Fields of the codec, which `kernels/codec/params.h` defines.
    pub word: [u32; 8],
}

/// A step of a packed schedule (`cinch_step`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct KernelStep {
    /// Number of the [`Op`].
    pub op: u8,
    /// Value [`OWN_ABSENT`], [`OWN_EXACT`] or [`OWN_CODED`].
    pub own: u8,
    /// Number of received messages that the step adds before this rank's contribution.
    pub own_after: u8,
    /// Number of steps in the batch that begins here; 0 inside a batch. A kernel waits once for all
    /// steps of a batch.
    pub batch: u8,
    /// Stage of the pass to which the step belongs.
    pub stage: u16,
    /// Index of the step's chunk among the parts of the pass's element range.
    pub part: u16,
    /// Index of the input's block that has the chunk.
    pub in_block: u8,
    /// Index of the output's block that has the chunk.
    pub out_block: u8,
    /// Number of received messages, the first of all, that are for [`Level::Intra`](crate::types::Level::Intra).
    pub intra_recv: u8,
    /// 1 if the sent messages are for [`Level::Intra`](crate::types::Level::Intra), else 0.
    pub intra_send: u8,
    /// Index of the step's first peer in the work buffer. Peers that the step receives from come
    /// first, then peers that it sends to.
    pub peers: u16,
    /// Number of messages that the step receives.
    pub nrecv: u8,
    /// Number of messages that the step sends.
    pub nsend: u8,
    /// In the first step of a batch: bit r is set if the batch receives from rank r.
    pub recv_mask: u32,
    /// In the first step of a batch: bit r is set if the batch sends to rank r.
    pub send_mask: u32,
}

/// Bytes from a [`ResidualsHeader`] to the first array of residuals.
pub const RESIDUALS_BYTES: usize = 256;

/// The header of one tensor's residuals in device memory (`cinch_residuals`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct ResidualsHeader {
    /// Index of the array that the last call wrote, and that the next call reads.
    pub turn: u32,
    /// Number of thread blocks that have finished the call.
    pub arrived: u32,
}

/// Bytes from a [`ScalesHeader`] to the scale of the first chunk.
pub const SCALES_BYTES: usize = 256;

/// The header of one tensor's kept scales in device memory (`cinch_scales`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct ScalesHeader {
    /// Number of calls since all scales were dropped; a call that finds 0 drops them.
    pub calls: u32,
    /// Number of thread blocks that have finished the call.
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
    /// Number of elements in the message, or in one rank's block.
    pub count: u64,
    /// Number of elements in a full chunk.
    pub chunk: u64,
    /// Factor of a pre-multiplied sum: a number of the accumulator type in the low bits, or an address
    /// ([`FACTOR_AT`]).
    pub factor: u64,
    /// The call's signature, which peers compare with theirs.
    pub signature: [u64; SIGNATURE_WORDS],
    /// Hash of the signature: flags carry its upper bits, and a packet of each ll message all of it.
    pub signature_hash: u64,
    /// Device address of the [`ResidualsHeader`] of error feedback; 0 without it.
    pub residuals: u64,
    /// Number of elements in one array of residuals.
    pub span: u64,
    /// Device address of the [`ScalesHeader`] of a codec with a scale for each chunk; 0 without one.
    pub scales: u64,
    /// Address to which the kernel writes the call's statistics, with the verdict of its output; 0 if it writes none.
    pub statistics: u64,
    /// Number of chunks into which a pass divides its range of elements.
    pub parts: u32,
    /// Number of passes, over all channels.
    pub passes: u32,
    /// Index of the launch's thread block that drives the work's channel 0.
    pub first_block: u16,
    /// Number of channels of the call, each driven by one thread block.
    pub channels: u16,
    /// The communicator's channel that carries the work's channel 0.
    pub first_channel: u16,
    /// Number of stages in a pass.
    pub stages: u16,
    /// Index of the call's first step among the steps in the work buffer.
    pub steps: u16,
    /// Number of steps of the call in one pass.
    pub nsteps: u16,
    /// Reduction of two contributions, a [`Combine`].
    pub combine: u8,
    /// Bits [`PREMULTIPLY`] to [`HAS_INPUT`].
    pub flags: u8,
    /// 1 for the last launch of its call, which writes the statistics, and after which kept scales are a call older.
    pub ends: u8,
    /// How messages for [`Level::Intra`](crate::types::Level::Intra) are encoded: [`INTRA_CODED`] to [`INTRA_CAST_BF16`], or
    /// [`INTRA_LINEAR8`] plus log2 of the elements of a block.
    pub intra: u8,
    /// Parameters of the codec.
    pub codec: CodecWords,
}

/// Arguments of a schedule kernel, the interpreter of packed schedules (`cinch_args`).
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ScheduleArgs {
    /// The kernel's view of the communicator: peer buffers, cursors, control words, timeout, and the rank's
    /// number.
    pub comm: CommView,
    /// Device address of a work buffer that exceeds [`WORK_BUFFER_BYTES`]; 0 if `work_buffer` holds it.
    pub overflow: u64,
    /// Number of work items in the work buffer.
    pub nworks: u32,
    /// Number of steps, which follow the work items in the work buffer.
    pub nsteps: u32,
    /// Number of peers, which follow the steps in the work buffer.
    pub npeers: u32,
    /// Padding, always 0, so that `work_buffer` begins at a multiple of 8.
    pub unused: u32,
    /// The packed [`KernelWork`] items, [`KernelStep`]s and peer ranks, back to back. Unused if `overflow` is
    /// set.
    pub work_buffer: [u8; WORK_BUFFER_BYTES],
}

/// Arguments of a fused kernel (`cinch_oneshot_args`).
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct OneshotArgs {
    /// The kernel's view of the communicator: peer buffers, cursors, control words, timeout, and the rank's
    /// number.
    pub comm: CommView,
    /// Offset of the area for this kernel's messages in a peer buffer.
    pub area: u64,
    /// Bytes of one half of the area; successive calls alternate between both halves.
    pub half: u64,
    /// Device address of two words: the number of calls so far, and of thread blocks that have
    /// finished this call.
    pub epoch: u64,
    /// Device address of the input.
    pub input: u64,
    /// Device address of the output.
    pub output: u64,
    /// Number of elements in the message, or in a block.
    pub count: u64,
    /// Factor of a pre-multiplied sum, as [`KernelWork::factor`].
    pub factor: u64,
    /// Hash of the signature: flags carry its upper bits, and one ll packet of each raw call all of it.
    pub signature_hash: u64,
    /// Signature of the call, which a kernel copies to its failure report.
    pub signature: [u64; SIGNATURE_WORDS],
    /// Number of 8-byte words that a rank sends each other rank in a round; with a codec, number of
    /// elements.
    pub words: u32,
    /// Number of ll packets (a multiple of 32), tiles of ll128 lines, or encoded tiles that each thread block
    /// handles.
    pub share: u32,
    /// Reduction of two contributions, a [`Combine`].
    pub combine: u8,
    /// Option bits, as [`KernelWork::flags`].
    pub flags: u8,
    /// Size of an element in bytes.
    pub element_bytes: u8,
    /// Root of a broadcast or reduce.
    pub root: u8,
    /// Bits [`SENDS_PARTS`] to [`SENDS_SUMS`]; unused without a codec.
    pub phases: u8,
    /// Number of lines that an encoded tile fills; unused without a codec.
    pub tile_lines: u8,
    /// Padding, always 0, to a multiple of 8 bytes.
    pub unused: [u8; 2],
    /// Parameters of the codec.
    pub codec: CodecWords,
    /// Device address of the residuals, as [`KernelWork::residuals`].
    pub residuals: u64,
    /// Number of elements in one array of residuals.
    pub span: u64,
}

/// Arguments of a kernel that takes the statistics of an array (`cinch_statistics_args`).
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct StatisticsArgs {
    /// Device address of the elements.
    pub elements: u64,
    /// Number of elements.
    pub count: u64,
    /// Device address of the rank's [`StatisticsSums`](super::StatisticsSums).
    pub sums: u64,
    /// Address of the result in a launch for the output; 0 in a launch for the input.
    pub result: u64,
    /// Factor of a pre-multiplied sum, as [`KernelWork::factor`].
    pub factor: u64,
    /// Bits [`PREMULTIPLY`] and [`FACTOR_AT`] of a pre-multiplied sum.
    pub flags: u32,
    /// Bits of the fp32 number beyond which finite numbers saturate in the codec; infinite if none do.
    pub largest: u32,
    /// 1 if the result has statistics of the input.
    pub has_input: u32,
    /// Padding, always 0.
    pub unused: u32,
}

const _: () = assert!(size_of::<StatisticsArgs>() == 56);
const _: () = assert!(size_of::<KernelStep>() == 24 && size_of::<KernelWork>() == 176);
const _: () = assert!(size_of::<ScheduleArgs>() == ARGS_BYTES && size_of::<OneshotArgs>() == 784);
const _: () = assert!(std::mem::offset_of!(ScheduleArgs, overflow) == 616);
const _: () = assert!(std::mem::offset_of!(ScheduleArgs, work_buffer) == 640);
const _: () = assert!(std::mem::offset_of!(KernelWork, codec) == 144);
const _: () = assert!(Op::Send as u8 == 0 && Op::RecvReduceFinishSend as u8 == 8);

/// Returns the bytes of work items or steps, as the kernel reads them.
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
// SAFETY: the fields take 176 bytes, and an assertion in this file proves that the struct does too.
unsafe impl Plain for KernelWork {}
