//! Looking at the machine: does what a GPU writes arrive, how far away is it, how fast is it.
//! Host side of `kernels/entry/probe.cu`.

use super::{Context, DeviceMemory, Dim3, Event, Function, PinnedMemory, Stream, kernels};
use crate::error::{Error, ErrorKind, Result};
use crate::sys::cuda::CuDevicePtr;
use std::sync::Arc;
use std::time::Duration;

/// How long one probe may take altogether.
const DEADLINE: Duration = Duration::from_secs(10);
/// Threads of a block.
const THREADS: u32 = 512;

/// The probing kernels, loaded on one GPU.
#[derive(Debug)]
pub struct Probe {
    stream: Stream,
    fill: Function,
    check: Function,
    pingpong: Function,
    copy: Function,
}

impl Probe {
    /// Loads them.
    ///
    /// # Errors
    /// Unsupported if this build has no kernels; those of the driver.
    pub fn new(context: &Arc<Context>) -> Result<Probe> {
        let module = kernels::load(context, "probe")?;
        Probe::of(context, |name| module.function(name))
    }

    pub(super) fn of(
        context: &Arc<Context>,
        function: impl Fn(&str) -> Result<Function>,
    ) -> Result<Probe> {
        Ok(Probe {
            stream: Stream::new(context)?,
            fill: function("cinch_probe_fill")?,
            check: function("cinch_probe_check")?,
            pingpong: function("cinch_probe_pingpong")?,
            copy: function("cinch_probe_copy")?,
        })
    }

    /// The same kernels on another stream of the GPU.
    fn beside(&self) -> Result<Probe> {
        let known = [&self.fill, &self.check, &self.pingpong, &self.copy];
        let [fill, check, pingpong, copy] = known.map(Function::clone);
        Ok(Probe {
            stream: Stream::new(self.context())?,
            fill,
            check,
            pingpong,
            copy,
        })
    }

    fn context(&self) -> &Arc<Context> {
        self.stream.context()
    }

    /// Writes the pattern of `seed` to `words` 64-bit words at `target`, and waits until it is
    /// there.
    ///
    /// # Errors
    /// Timeout; those of the driver.
    ///
    /// # Safety
    /// The words are memory that this GPU may write and nobody else uses meanwhile.
    pub unsafe fn fill(&self, target: CuDevicePtr, words: u64, seed: u64) -> Result<()> {
        let args = ProbeFill {
            target,
            words,
            seed,
        };
        // SAFETY: the kernel's parameter; it writes the words alone.
        unsafe {
            self.fill
                .launch(blocks(words), THREADS, 0, &self.stream, &args)?;
        }
        self.stream.wait(DEADLINE)
    }

    /// How many of `words` words at `source` are not the pattern of `seed`.
    ///
    /// # Errors
    /// Timeout; those of the driver.
    ///
    /// # Safety
    /// The words are memory that this GPU may read.
    pub unsafe fn wrong_words(&self, source: CuDevicePtr, words: u64, seed: u64) -> Result<u32> {
        let wrong = PinnedMemory::new(self.context(), 8)?;
        let args = ProbeCheck {
            source,
            words,
            seed,
            wrong: wrong.address(),
        };
        // SAFETY: the kernel's parameter; it writes only `wrong`, which outlives the wait. A
        // kernel that does not end in time keeps it, hence the leak below.
        let ended = unsafe {
            self.check
                .launch(blocks(words), THREADS, 0, &self.stream, &args)
                .and_then(|()| self.stream.wait(DEADLINE))
        };
        if let Err(error) = ended {
            if error.kind() == ErrorKind::Timeout {
                std::mem::forget(wrong);
            }
            return Err(error);
        }
        // SAFETY: in bounds and aligned; the kernel has ended.
        Ok(unsafe { wrong.host().cast::<u32>().read_volatile() })
    }

    /// Seconds that a word takes to the other side and back: `there` writes what this side polls
    /// and the reverse. `words` are two 64-bit words that hold 0, first one that `self`'s GPU
    /// polls, then one that `there`'s GPU polls, each as both GPUs see it: `[mine as I see it,
    /// mine as the other sees it]`.
    ///
    /// # Errors
    /// Timeout if a word did not arrive; those of the driver.
    ///
    /// # Safety
    /// The addresses are of such words, which nobody else uses meanwhile.
    pub unsafe fn round_trip(
        &self,
        there: &Probe,
        here_word: [CuDevicePtr; 2],
        there_word: [CuDevicePtr; 2],
        rounds: u64,
    ) -> Result<f64> {
        let done = [
            PinnedMemory::new(self.context(), 8)?,
            PinnedMemory::new(there.context(), 8)?,
        ];
        let budget = |probe: &Probe| u64::from(probe.context().device().clock_khz) * 1000;
        let answer = ProbePingpong {
            mine: there_word[0],
            theirs: here_word[1],
            base: 0,
            rounds,
            budget: budget(there),
            serves: 0,
            padding: 0,
            done: done[1].address(),
        };
        let serve = ProbePingpong {
            mine: here_word[0],
            theirs: there_word[1],
            base: 0,
            rounds,
            budget: budget(self),
            serves: 1,
            padding: 0,
            done: done[0].address(),
        };
        let (begin, end) = (Event::timed(self.context())?, Event::timed(self.context())?);
        // Both are waited for, also where one could not be launched: the other then gives up.
        // SAFETY: the kernels' parameters; they end by themselves, at the latest a clock budget
        // after the other stopped answering, and the words and `done` are kept until then.
        let ended = unsafe {
            there.pingpong.launch(1, 1, 0, &there.stream, &answer)?;
            begin
                .record(&self.stream)
                .and_then(|()| self.pingpong.launch(1, 1, 0, &self.stream, &serve))
                .and_then(|()| end.record(&self.stream))
                .and(self.stream.wait(DEADLINE))
                .and(there.stream.wait(DEADLINE))
        };
        if let Err(error) = ended {
            std::mem::forget(done);
            return Err(error);
        }
        // SAFETY: in bounds and aligned; the kernels have ended.
        let came = done.map(|done| unsafe { done.host().cast::<u64>().read_volatile() });
        if came != [rounds, rounds] {
            return Err(Error::new(
                ErrorKind::Timeout,
                format!(
                    "{} and {} were to bounce a word {rounds} times; after {} and {} it did not \
                     arrive",
                    self.context().device(),
                    there.context().device(),
                    came[0],
                    came[1]
                ),
            ));
        }
        Ok(end.since(&begin)? / rounds as f64)
    }

    /// Bytes a second that multiprocessors copy, by `blocks` blocks; `bytes` is a multiple of 16,
    /// copied `times` times in a row after one that is not counted.
    ///
    /// # Errors
    /// Timeout; those of the driver.
    ///
    /// # Safety
    /// Both pieces are memory that this GPU may read and write, aligned to 16, and nobody else
    /// writes meanwhile.
    pub unsafe fn copy_speed(
        &self,
        target: CuDevicePtr,
        source: CuDevicePtr,
        bytes: u64,
        blocks: u32,
        times: u32,
    ) -> Result<f64> {
        if !bytes.is_multiple_of(16) || bytes == 0 || times == 0 || blocks == 0 {
            return Err(Error::invalid_argument(format!(
                "a copy of {bytes} bytes, {times} times by {blocks} blocks, cannot be timed; \
                 bytes are a multiple of 16, and none is 0"
            )));
        }
        let args = ProbeCopy {
            target,
            source,
            vectors: bytes / 16,
        };
        let (begin, end) = (Event::timed(self.context())?, Event::timed(self.context())?);
        // SAFETY: the kernel's parameter; it touches the two pieces alone.
        let launch = || unsafe { self.copy.launch(blocks, THREADS, 0, &self.stream, &args) };
        launch()?;
        begin.record(&self.stream)?;
        for _ in 0..times {
            launch()?;
        }
        end.record(&self.stream)?;
        self.stream.wait(DEADLINE)?;
        Ok(bytes as f64 * f64::from(times) / end.since(&begin)?)
    }
}

/// What two GPUs see of each other.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PairSpeed {
    /// Bytes a second that the first one writes to the second one's memory.
    pub write: f64,
    /// Bytes a second that the first one reads from there.
    pub read: f64,
    /// Seconds that a word takes there and back.
    pub round_trip: f64,
}

/// Measures the link from `here` to `there`, which may be the same GPU; takes some milliseconds
/// and, for that long, 64 MiB of each.
///
/// # Errors
/// Unsupported if there is no peer access between them; timeout; those of the driver.
pub fn pair_speed(here: &Probe, there: &Probe) -> Result<PairSpeed> {
    const BYTES: usize = 64 << 20;
    const BLOCKS: u32 = 64;
    const ROUNDS: u64 = 1000;
    let (one, two) = (here.context(), there.context());
    // Kernels that wait for each other need two streams.
    let beside = here.beside()?;
    let there = if one.handle() == two.handle() {
        &beside
    } else {
        there
    };
    if !one.enable_peer(two)? || !two.enable_peer(one)? {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "no peer access between {} and {}",
                one.device(),
                two.device()
            ),
        ));
    }
    let mine = DeviceMemory::zeroed(one, BYTES, DEADLINE)?;
    let theirs = DeviceMemory::zeroed(two, BYTES, DEADLINE)?;
    let (near, far) = (mine.address(), theirs.address());
    // Zero as the bounced words must be, and apart: one line for each on either GPU.
    let words = [mine.place(0, 8)?, theirs.place(0, 8)?];
    // SAFETY: memory of this function's own, which both GPUs reach since access was enabled; each
    // measurement has ended before the next begins.
    unsafe {
        let round_trip = here.round_trip(there, [words[0]; 2], [words[1]; 2], ROUNDS)?;
        Ok(PairSpeed {
            write: here.copy_speed(far, near, BYTES as u64, BLOCKS, 10)?,
            read: here.copy_speed(near, far, BYTES as u64, BLOCKS, 10)?,
            round_trip,
        })
    }
}

/// Whether `writer`'s GPU reaches the memory: it writes a pattern through `address`, and the
/// memory's own GPU looks whether it is there. A machine can promise peer access and lose the
/// data (an IOMMU or a PCIe switch with access control in between).
///
/// # Errors
/// System, with the number of words that are wrong; timeout; those of the driver.
///
/// # Safety
/// `address` is `memory` as `writer`'s GPU sees it, and nobody else uses the memory meanwhile.
pub unsafe fn check_peer(
    writer: &Probe,
    address: CuDevicePtr,
    owner: &Probe,
    memory: &DeviceMemory,
    seed: u64,
) -> Result<()> {
    let words = (memory.bytes() / 8) as u64;
    // SAFETY: by the caller's word.
    let wrong = unsafe {
        writer.fill(address, words, seed)?;
        owner.wrong_words(memory.address(), words, seed)?
    };
    if wrong == 0 {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::System,
        format!(
            "{} wrote {words} words to {}, where {wrong} of them are wrong: peer access does not \
             work on this machine",
            writer.context().device(),
            owner.context().device()
        ),
    ))
}

/// A kernel that lets the next one of its stream begin at once, where GPUs do that, and writes only
/// later: kernels that begin early are tried with it.
#[derive(Debug)]
pub struct LateFill(Function);

impl LateFill {
    /// Loads it.
    ///
    /// # Errors
    /// Unsupported if this build has no kernels; those of the driver.
    pub fn new(context: &Arc<Context>) -> Result<LateFill> {
        let module = kernels::load(context, "probe")?;
        Ok(LateFill(module.function("cinch_probe_late")?))
    }

    /// Queues a kernel that writes the pattern of `seed` to `words` 64-bit words at `target`, once
    /// `delay` has passed.
    ///
    /// # Errors
    /// Those of the driver.
    ///
    /// # Safety
    /// The words are memory that this GPU may write, and nobody else uses before the kernel's end.
    pub unsafe fn queue(
        &self,
        (target, words): (CuDevicePtr, u64),
        seed: u64,
        delay: Duration,
        stream: &Stream,
    ) -> Result<()> {
        let args = ProbeLate {
            target,
            words,
            seed,
            delay: delay.as_nanos() as u64,
        };
        // SAFETY: the kernel's parameter; it writes the words alone.
        unsafe { self.0.launch(4, THREADS, 0, stream, &args) }
    }
}

/// Word `index` of the pattern that `seed` names, as the kernels make it (splitmix64).
pub fn probe_word(seed: u64, index: u64) -> u64 {
    let mut z = seed.wrapping_add(index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Enough blocks for the words, and few enough to start at once.
fn blocks(words: u64) -> Dim3 {
    Dim3::from(words.div_ceil(u64::from(THREADS)).clamp(1, 64) as u32)
}

/// `ProbeFill` of `kernels/entry/probe.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct ProbeFill {
    target: CuDevicePtr,
    words: u64,
    seed: u64,
}

/// `ProbeLate`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct ProbeLate {
    target: CuDevicePtr,
    words: u64,
    seed: u64,
    delay: u64,
}

/// `ProbeCheck`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct ProbeCheck {
    source: CuDevicePtr,
    words: u64,
    seed: u64,
    wrong: CuDevicePtr,
}

/// `ProbePingpong`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct ProbePingpong {
    mine: CuDevicePtr,
    theirs: CuDevicePtr,
    base: u64,
    rounds: u64,
    budget: u64,
    serves: u32,
    padding: u32,
    done: CuDevicePtr,
}

/// `ProbeCopy`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct ProbeCopy {
    target: CuDevicePtr,
    source: CuDevicePtr,
    vectors: u64,
}

const _: () = assert!(
    size_of::<ProbeFill>() == 24
        && size_of::<ProbeLate>() == 32
        && size_of::<ProbeCheck>() == 32
        && size_of::<ProbePingpong>() == 56
        && size_of::<ProbeCopy>() == 24,
    "kernels/entry/probe.cu has the same sizes"
);
