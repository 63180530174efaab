//! Probes of the machine: whether peer writes arrive, and the latency and bandwidth of links. The kernels are
//! in `kernels/entry/probe.cu`.

use super::{Context, DeviceMemory, Dim3, Event, Function, PinnedMemory, Stream, kernels};
use crate::error::{Error, ErrorKind, Result};
use crate::sys::cuda::CUdeviceptr;
use std::sync::Arc;
use std::time::Duration;

/// Timeout of one probe.
const PROBE_TIMEOUT: Duration = Duration::from_secs(10);
/// Threads of a block of the probe kernels.
const THREADS: u32 = 512;

/// The probe kernels, loaded on one GPU, and a stream for them.
#[derive(Debug)]
pub struct Probe {
    stream: Stream,
    fill: Function,
    check: Function,
    pingpong: Function,
    copy: Function,
}

impl Probe {
    /// Loads the kernels.
    ///
    /// # Errors
    /// Unsupported if this build has no kernels; the driver's errors.
    pub fn new(context: &Arc<Context>) -> Result<Probe> {
        let module = kernels::load(context, "probe")?;
        Probe::of(context, |name| module.function(name))
    }

    /// Creates a probe with the kernels that `function` returns by name.
    ///
    /// # Errors
    /// The errors of `function`; the driver's errors.
    pub(crate) fn of(
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

    /// Returns a probe with another stream of the GPU.
    fn with_own_stream(&self) -> Result<Probe> {
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

    /// Returns the context of the GPU.
    pub fn context(&self) -> &Arc<Context> {
        self.stream.context()
    }

    /// Writes the pattern of `seed` to `words` 64-bit words at `target`, and waits for the kernel.
    ///
    /// # Errors
    /// Timeout; the driver's errors.
    ///
    /// # Safety
    /// This GPU may write the words, and no other code uses them meanwhile.
    pub unsafe fn fill(&self, target: CUdeviceptr, words: u64, seed: u64) -> Result<()> {
        let args = ProbeFill {
            target,
            words,
            seed,
        };
        // SAFETY: `ProbeFill` is the kernel's parameter, and the kernel only writes the caller's words.
        unsafe {
            self.fill
                .launch(blocks(words), THREADS, 0, &self.stream, &args)?;
        }
        self.stream.wait(PROBE_TIMEOUT)
    }

    /// Returns how many of `words` words at `source` differ from the pattern of `seed`.
    ///
    /// # Errors
    /// Timeout; the driver's errors.
    ///
    /// # Safety
    /// This GPU may read the words.
    pub unsafe fn wrong_words(&self, source: CUdeviceptr, words: u64, seed: u64) -> Result<u32> {
        let wrong = PinnedMemory::new(self.context(), 8)?;
        let args = ProbeCheck {
            source,
            words,
            seed,
            wrong: wrong.address(),
        };
        // SAFETY: `ProbeCheck` is the kernel's parameter, and the kernel only writes `wrong`. On a timeout
        // the kernel may still run, so the code below leaks `wrong`.
        let ended = unsafe {
            self.check
                .launch(blocks(words), THREADS, 0, &self.stream, &args)
                .and_then(|()| self.stream.wait(PROBE_TIMEOUT))
        };
        if let Err(error) = ended {
            if error.kind() == ErrorKind::Timeout {
                std::mem::forget(wrong);
            }
            return Err(error);
        }
        // SAFETY: the memory has 8 aligned bytes, and the kernel has ended.
        Ok(unsafe { wrong.host().cast::<u32>().read_volatile() })
    }

    /// Returns the seconds of a round trip: each GPU polls a 64-bit word that the other GPU writes.
    ///
    /// `here_word` is the word that `self`'s GPU polls, and `there_word` the word that `there`'s GPU polls.
    /// Each has two addresses, for the GPU that polls it and for the GPU that writes it. Both words hold 0.
    ///
    /// # Errors
    /// Timeout if a word did not arrive; the driver's errors.
    ///
    /// # Safety
    /// The addresses are of such words, and no other code uses them meanwhile.
    pub unsafe fn round_trip(
        &self,
        there: &Probe,
        here_word: [CUdeviceptr; 2],
        there_word: [CUdeviceptr; 2],
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
        // Waits for both streams, even if only one kernel was launched: a kernel without a partner ends once
        // its clock budget is spent.
        // SAFETY: `ProbePingpong` is the kernels' parameter. A kernel runs for at most one clock budget after
        // the other kernel stops, and the caller's words and `done` exist until then.
        let ended = unsafe {
            there.pingpong.launch(1, 1, 0, &there.stream, &answer)?;
            begin
                .record(&self.stream)
                .and_then(|()| self.pingpong.launch(1, 1, 0, &self.stream, &serve))
                .and_then(|()| end.record(&self.stream))
                .and(self.stream.wait(PROBE_TIMEOUT))
                .and(there.stream.wait(PROBE_TIMEOUT))
        };
        if let Err(error) = ended {
            std::mem::forget(done);
            return Err(error);
        }
        // SAFETY: each memory has 8 aligned bytes, and the kernels have ended.
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

    /// Queues a copy of `bytes` bytes, a multiple of 16, by a kernel with `blocks` blocks on `stream` of this GPU.
    ///
    /// # Errors
    /// The driver's errors.
    ///
    /// # Safety
    /// This GPU may read and write both ranges until the kernel has ended. They are aligned to 16.
    pub unsafe fn queue_copy(
        &self,
        target: CUdeviceptr,
        source: CUdeviceptr,
        bytes: u64,
        blocks: u32,
        stream: &Stream,
    ) -> Result<()> {
        let args = ProbeCopy {
            target,
            source,
            vectors: bytes / 16,
        };
        // SAFETY: `ProbeCopy` is the kernel's parameter, and the kernel only accesses the caller's two ranges.
        unsafe { self.copy.launch(blocks, THREADS, 0, stream, &args) }
    }

    /// Queues a copy of `bytes` bytes by the driver on `stream`, with which copies by kernels are compared.
    ///
    /// # Errors
    /// The driver's errors.
    ///
    /// # Safety
    /// The stream's GPU may read and write both ranges until the copy has ended.
    pub unsafe fn queue_driver_copy(
        target: CUdeviceptr,
        source: CUdeviceptr,
        bytes: usize,
        stream: &Stream,
    ) -> Result<()> {
        let driver = stream.context().driver();
        let _bound = stream.context().bind()?;
        // SAFETY: the caller keeps both ranges.
        let queued = unsafe {
            let api = driver.api();
            api.cuMemcpyAsync(target, source, bytes, stream.handle())
        };
        driver.check("cuMemcpyAsync", queued)
    }

    /// Returns the bytes per second of a copy kernel with `blocks` blocks. It copies `bytes` bytes, a
    /// multiple of 16, once for warm-up and then `times` times.
    ///
    /// # Errors
    /// Invalid argument if a number is 0 or no multiple of 16; timeout; the driver's errors.
    ///
    /// # Safety
    /// This GPU may read and write both ranges, which are aligned to 16, and no other code writes them
    /// meanwhile.
    pub unsafe fn copy_speed(
        &self,
        target: CUdeviceptr,
        source: CUdeviceptr,
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
        // SAFETY: `ProbeCopy` is the kernel's parameter, and the kernel only accesses the caller's two ranges.
        let launch = || unsafe { self.copy.launch(blocks, THREADS, 0, &self.stream, &args) };
        launch()?;
        begin.record(&self.stream)?;
        for _ in 0..times {
            launch()?;
        }
        end.record(&self.stream)?;
        self.stream.wait(PROBE_TIMEOUT)?;
        Ok(bytes as f64 * f64::from(times) / end.since(&begin)?)
    }
}

/// Measurements of the link between two GPUs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PairSpeed {
    /// Bytes per second that the first GPU writes to the second GPU's memory.
    pub write: f64,
    /// Bytes per second that the first GPU reads from the second GPU's memory.
    pub read: f64,
    /// Seconds of the round trip of a word.
    pub round_trip: f64,
}

/// Measures the link from `here` to `there`, which may be one GPU. It takes some milliseconds, and 64 MiB of
/// each GPU meanwhile.
///
/// # Errors
/// Unsupported without peer access between the GPUs; timeout; the driver's errors.
pub fn pair_speed(here: &Probe, there: &Probe) -> Result<PairSpeed> {
    const BYTES: usize = 64 << 20;
    const BLOCKS: u32 = 64;
    const ROUNDS: u64 = 1000;
    let (one, two) = (here.context(), there.context());
    // Kernels that wait for each other need two streams.
    let second = here.with_own_stream()?;
    let there = if one.handle() == two.handle() {
        &second
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
    let mine = DeviceMemory::zeroed(one, BYTES, PROBE_TIMEOUT)?;
    let theirs = DeviceMemory::zeroed(two, BYTES, PROBE_TIMEOUT)?;
    let (near, far) = (mine.address(), theirs.address());
    // Allocations are zero, as the polled words must be. Each word lies in memory of the GPU that
    // polls it.
    let words = [mine.place(0, 8)?, theirs.place(0, 8)?];
    // SAFETY: only this function has the memory, and peer access was enabled above. Each measurement ends
    // before the next one starts.
    unsafe {
        let round_trip = here.round_trip(there, [words[0]; 2], [words[1]; 2], ROUNDS)?;
        Ok(PairSpeed {
            write: here.copy_speed(far, near, BYTES as u64, BLOCKS, 10)?,
            read: here.copy_speed(near, far, BYTES as u64, BLOCKS, 10)?,
            round_trip,
        })
    }
}

/// Checks that peer writes arrive: `writer`'s GPU writes a pattern through `address`, and the GPU of `memory`
/// compares it. A machine may report peer access and lose the data in an IOMMU, or in a PCIe switch with
/// access control.
///
/// # Errors
/// System, with the number of wrong words; timeout; the driver's errors.
///
/// # Safety
/// `address` is the address of `memory` for `writer`'s GPU, and no other code uses the memory meanwhile.
pub unsafe fn check_peer(
    writer: &Probe,
    address: CUdeviceptr,
    owner: &Probe,
    memory: &DeviceMemory,
    seed: u64,
) -> Result<()> {
    let words = (memory.bytes() / 8) as u64;
    // SAFETY: the caller guarantees that both GPUs may access the memory, which no other code uses.
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

/// A kernel that allows the next programmatic launch of its stream to start early, and then writes after a
/// delay. Tests use it to find kernels that do not wait for earlier work.
#[derive(Debug)]
pub struct LateFill(Function);

impl LateFill {
    /// Loads the kernel.
    ///
    /// # Errors
    /// Unsupported if this build has no kernels; the driver's errors.
    pub fn new(context: &Arc<Context>) -> Result<LateFill> {
        let module = kernels::load(context, "probe")?;
        LateFill::of(|name| module.function(name))
    }

    /// Creates the value with the kernel that `function` returns by name.
    ///
    /// # Errors
    /// The errors of `function`.
    pub(crate) fn of(function: impl Fn(&str) -> Result<Function>) -> Result<LateFill> {
        Ok(LateFill(function("cinch_probe_late")?))
    }

    /// Queues a kernel that writes the pattern of `seed` to `words` 64-bit words at `target` after `delay`.
    ///
    /// # Errors
    /// The driver's errors.
    ///
    /// # Safety
    /// This GPU may write the words, and no other code uses them before the kernel has ended.
    pub unsafe fn queue(
        &self,
        (target, words): (CUdeviceptr, u64),
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
        // SAFETY: `ProbeLate` is the kernel's parameter, and the kernel only writes the caller's words.
        unsafe { self.0.launch(4, THREADS, 0, stream, &args) }
    }
}

/// Returns word `index` of the pattern of `seed`, as the kernels compute it (splitmix64).
pub fn probe_word(seed: u64, index: u64) -> u64 {
    let mut z = seed.wrapping_add(index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Returns the grid for this number of words. It has so few blocks that all of them are resident
/// together.
fn blocks(words: u64) -> Dim3 {
    Dim3::from(words.div_ceil(u64::from(THREADS)).clamp(1, 64) as u32)
}

/// Parameter of the fill kernel, equal to `ProbeFill` in `kernels/entry/probe.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct ProbeFill {
    target: CUdeviceptr,
    words: u64,
    seed: u64,
}

/// Parameter of the late-fill kernel, equal to `ProbeLate` in `kernels/entry/probe.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct ProbeLate {
    target: CUdeviceptr,
    words: u64,
    seed: u64,
    delay: u64,
}

/// Parameter of the check kernel, equal to `ProbeCheck` in `kernels/entry/probe.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct ProbeCheck {
    source: CUdeviceptr,
    words: u64,
    seed: u64,
    wrong: CUdeviceptr,
}

/// Parameter of the ping-pong kernel, equal to `ProbePingpong` in `kernels/entry/probe.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct ProbePingpong {
    mine: CUdeviceptr,
    theirs: CUdeviceptr,
    base: u64,
    rounds: u64,
    budget: u64,
    serves: u32,
    padding: u32,
    done: CUdeviceptr,
}

/// Parameter of the copy kernel, equal to `ProbeCopy` in `kernels/entry/probe.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct ProbeCopy {
    target: CUdeviceptr,
    source: CUdeviceptr,
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
