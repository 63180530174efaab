//! How results are written to the output: through the caches or past them.
//!
//! A store through the caches reads its line first, so that an output that is in no cache costs twice its bytes of the
//! memory's bandwidth, and a store past them once. But an output that is in a cache is stored several times faster there.
//! Which holds depends on the program, so both ways are measured: separately for sums and other results, for outputs apart
//! from the input and in place, and for each size.
//!
//! A call has one way. Where its lines are depends on how the call before it wrote them, so that a comparison makes two
//! calls of each way in turn and measures the second. What counts is the time of all steps, since stores past the caches
//! delay what others read from memory at the same time: ranks that make the same calls compare at the same time.

use crate::cpu::StreamFence;
use crate::mem::UserBuffers;
use crate::reduce::Reducer;
use crate::sys::clock::monotonic_nanoseconds;

/// Least bytes of an output that may go past the caches. A smaller one stays in a cache of the core for its reader. Cached
/// calls have smaller outputs.
pub(super) const LEAST_OUTPUT: usize = 4 << 20;

/// Least bytes of one write past the caches, whose first and last line go through them in part.
const LEAST_WRITE: usize = 4 << 10;

/// Sizes of outputs with a choice of their own: from [`LEAST_OUTPUT`], twice that and so on.
const SIZES: usize = 6;

/// Part of the time through the caches below which the time past them must be: the reader may find an output that went
/// through them in a cache.
const LEAST_GAIN: f32 = 0.93;

/// Calls of a comparison: two of each way in turn, twice.
const COMPARED_CALLS: u8 = 8;

/// Calls up to the next comparison, at least and at most. It doubles while comparisons have the same result.
const INTERVALS: (u32, u32) = (256, 4096);

/// Bytes of a sum that are formed in the first-level cache before they go past the caches. A multiple of a line and of every
/// element's size.
const STAGED: usize = 1 << 10;

const LINE: usize = 64;

/// The choice for calls of one kind.
#[derive(Clone, Copy, Debug)]
struct WayChoice {
    /// Calls of the current comparison; [`COMPARED_CALLS`] between comparisons.
    compared: u8,
    /// Least nanoseconds of a call for a KiB of its output, through the caches and past them.
    least: [f32; 2],
    /// The result of the last comparison: whether calls go past the caches.
    streams: bool,
    /// Calls since the last comparison, and up to the next one.
    seen: u32,
    interval: u32,
}

impl WayChoice {
    const NEW: WayChoice = WayChoice {
        compared: 0,
        least: [f32::INFINITY; 2],
        streams: false,
        seen: 0,
        interval: INTERVALS.0,
    };

    /// Returns whether the next call goes past the caches, and whether it is measured.
    fn next(&self) -> (bool, bool) {
        match self.compared < COMPARED_CALLS {
            true => (self.compared % 4 >= 2, self.compared % 2 == 1),
            false => (self.streams, false),
        }
    }

    /// Counts a call, with its nanoseconds for a KiB if it was measured.
    fn count(&mut self, streamed: bool, per_kib: Option<f32>) {
        if self.compared == COMPARED_CALLS {
            self.seen += 1;
            if self.seen >= self.interval {
                (self.compared, self.least) = (0, [f32::INFINITY; 2]);
            }
            return;
        }
        if let Some(time) = per_kib {
            let least = &mut self.least[usize::from(streamed)];
            *least = least.min(time);
        }
        self.compared += 1;
        if self.compared == COMPARED_CALLS {
            let [cached, past] = self.least;
            let streams = past < cached * LEAST_GAIN;
            let (least, most) = INTERVALS;
            self.interval = match streams == self.streams {
                true => (self.interval * 2).min(most),
                false => least,
            };
            (self.streams, self.seen) = (streams, 0);
        }
    }
}

/// The choices of an engine.
#[derive(Debug)]
pub(super) struct OutputChoices {
    /// Whether outputs may go past the caches at all.
    may_stream: bool,
    choices: [WayChoice; 4 * SIZES],
}

impl OutputChoices {
    /// Begins with comparisons. Nothing goes past the caches unless `may_stream`.
    pub fn new(may_stream: bool) -> OutputChoices {
        OutputChoices {
            may_stream,
            choices: [WayChoice::NEW; 4 * SIZES],
        }
    }

    /// Begins a call on these buffers, which reduces or not.
    pub fn begin(&self, reduces: bool, buffers: &UserBuffers<'_>) -> OutputWrites {
        let times = buffers.output_bytes() / LEAST_OUTPUT;
        if !self.may_stream || times == 0 {
            return OutputWrites::plain();
        }
        let size = (times.ilog2() as usize).min(SIZES - 1);
        let kind = usize::from(reduces) + 2 * usize::from(buffers.are_apart());
        let choice = kind * SIZES + size;
        let (streams, is_measured) = self.choices[choice].next();
        OutputWrites {
            choice: Some(choice),
            output_bytes: buffers.output_bytes(),
            streams,
            is_measured,
            ..OutputWrites::plain()
        }
    }

    /// Ends a call.
    pub fn end(&mut self, writes: &OutputWrites) {
        if let Some(choice) = writes.choice {
            let per_kib = writes.nanoseconds as f32 * 1024.0 / writes.output_bytes as f32;
            self.choices[choice].count(writes.streams, writes.is_measured.then_some(per_kib));
        }
    }
}

/// How one call writes its output.
#[derive(Debug)]
pub(super) struct OutputWrites {
    /// Index of the call's choice; `None` if it has none.
    choice: Option<usize>,
    output_bytes: usize,
    streams: bool,
    is_measured: bool,
    /// Present during a step that goes past the caches.
    fence: Option<StreamFence>,
    /// Time at which the current step began, and time of those before it, if they are measured.
    begun: Option<u64>,
    nanoseconds: u64,
}

impl OutputWrites {
    /// Writes through the caches.
    pub fn plain() -> OutputWrites {
        OutputWrites {
            choice: None,
            output_bytes: 0,
            streams: false,
            is_measured: false,
            fence: None,
            begun: None,
            nanoseconds: 0,
        }
    }

    /// Begins a step, which does not access again what it has written.
    pub fn begin_step(&mut self) {
        self.fence = self.streams.then(StreamFence::new);
        self.begun = self.is_measured.then(monotonic_nanoseconds);
    }

    /// Ends a step: makes its writes visible to other threads before what this thread stores later.
    pub fn end_step(&mut self) {
        self.fence = None;
        if let Some(begun) = self.begun.take() {
            self.nanoseconds += monotonic_nanoseconds().saturating_sub(begun);
        }
    }

    /// Returns the fence if a write of `bytes` goes past the caches.
    fn fence(&self, bytes: usize) -> Option<&StreamFence> {
        self.fence.as_ref().filter(|_| bytes >= LEAST_WRITE)
    }

    /// Writes `payload` to the output at byte `at`.
    #[inline]
    pub fn write(&self, buffers: &mut UserBuffers<'_>, at: usize, payload: &[u8]) {
        match self.fence(payload.len()) {
            Some(fence) => fence.copy(buffers.output_mut(at, payload.len()), payload),
            None => buffers.write_output(at, payload),
        }
    }

    /// Copies `bytes` bytes of the input from byte `from` to the output at byte `to`.
    pub fn copy(&self, buffers: &mut UserBuffers<'_>, from: usize, to: usize, bytes: usize) {
        match self.fence(bytes) {
            Some(fence) if buffers.are_apart() => {
                buffers.lend(from, to, bytes, |input, output| {
                    if let Some(input) = input {
                        fence.copy(output, input);
                    }
                });
            }
            _ => buffers.copy(from, to, bytes),
        }
    }

    /// Writes the sum of `payload` and the input from byte `from` to the output at byte `to`.
    pub fn add(
        &self,
        buffers: &mut UserBuffers<'_>,
        (from, to): (usize, usize),
        (payload, reducer): (&[u8], &Reducer),
    ) {
        match self.fence(payload.len()) {
            Some(fence) => add_streaming(fence, buffers, (from, to), (payload, reducer)),
            None => add_through_caches(buffers, (from, to), (payload, reducer)),
        }
    }
}

/// Writes the sum of `payload` and the input from byte `from` to the output at byte `to`, through the caches.
#[inline]
pub(super) fn add_through_caches(
    buffers: &mut UserBuffers<'_>,
    (from, to): (usize, usize),
    (payload, reducer): (&[u8], &Reducer),
) {
    buffers.lend(from, to, payload.len(), |input, output| match input {
        Some(input) => reducer.pair(input, payload, output),
        None => reducer.assign(output, payload),
    });
}

/// Adds `payload` and the input in pieces that end with lines of the output, as far as its elements do.
fn add_streaming(
    fence: &StreamFence,
    buffers: &mut UserBuffers<'_>,
    (from, to): (usize, usize),
    (payload, reducer): (&[u8], &Reducer),
) {
    #[repr(align(64))]
    struct Stage([u8; STAGED]);
    let mut stage = Stage([0; STAGED]);
    let size = reducer.dtype().size();
    let up_to_line = (buffers.output_address() + to).wrapping_neg() % LINE;
    // The first piece is empty if the output begins with a line.
    let (mut at, mut end) = (0, up_to_line / size * size);
    buffers.assert_apart_or_same(from, to, payload.len());
    while at < payload.len() {
        end = end.min(payload.len());
        let stage = &mut stage.0[..end - at];
        reducer.pair(
            buffers.input(from + at, stage.len()),
            &payload[at..end],
            stage,
        );
        fence.copy(buffers.output_mut(to + at, stage.len()), stage);
        (at, end) = (end, end + STAGED);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::{CAN_STREAM, Isa};
    use crate::types::{DType, ReduceOp};

    /// Makes calls that take a time by whether this call and the last one went past the caches, and returns how many of the
    /// latter half did.
    fn run(calls: usize, time: impl Fn(bool, bool) -> f32) -> usize {
        let (mut choice, mut before, mut streamed) = (WayChoice::NEW, true, 0);
        for call in 0..calls {
            let (streams, is_measured) = choice.next();
            choice.count(streams, is_measured.then(|| time(streams, before)));
            streamed += usize::from(streams && call >= calls / 2);
            before = streams;
        }
        streamed
    }

    #[test]
    fn faster_way_is_found() {
        // The output fits no cache.
        assert!(run(10_000, |streams, _| if streams { 50.0 } else { 100.0 }) > 4900);
        assert!(run(10_000, |streams, _| if streams { 95.0 } else { 100.0 }) < 100);
        // The output fits a cache, unless the call before has written it past the caches.
        let fits = |streams: bool, before: bool| match (streams, before) {
            (true, _) => 50.0,
            (false, true) => 100.0,
            (false, false) => 30.0,
        };
        assert!(run(10_000, fits) < 100);
    }

    #[test]
    fn calls_without_writes_keep_to_the_caches() {
        let mut choice = WayChoice::NEW;
        for _ in 0..100 {
            let (streams, _) = choice.next();
            choice.count(streams, None);
        }
        assert!(!choice.streams);
    }

    /// Returns the writes of a call that goes past the caches, if this machine can.
    fn streaming() -> OutputWrites {
        OutputWrites {
            streams: CAN_STREAM,
            is_measured: true,
            ..OutputWrites::plain()
        }
    }

    #[test]
    fn output_is_equal_by_both_ways() {
        let input: Vec<u8> = (0..40_000_u32).map(|at| (at * 7 % 253) as u8).collect();
        let reducer = Reducer::new(DType::U8, ReduceOp::Sum, Isa::detect()).unwrap();
        for (from, to, bytes) in [(0, 0, 8192), (5, 3, 4099), (64, 16, 20_001), (1, 77, 1023)] {
            let payload = &input[7..7 + bytes];
            let results = [OutputWrites::plain(), streaming()].map(|mut writes| {
                [0, 1, 2].map(|kind| {
                    let mut output = vec![0xee; 40_000];
                    let mut buffers = UserBuffers::new(&input, &mut output);
                    writes.begin_step();
                    assert_eq!(writes.fence.is_some(), writes.streams);
                    match kind {
                        0 => writes.write(&mut buffers, to, payload),
                        1 => writes.copy(&mut buffers, from, to, bytes),
                        _ => writes.add(&mut buffers, (from, to), (payload, &reducer)),
                    }
                    writes.end_step();
                    let outside = output[..to].iter().chain(&output[to + bytes..]);
                    assert!(outside.into_iter().all(|&byte| byte == 0xee));
                    output
                })
            });
            assert!(
                results[0] == results[1],
                "{bytes} bytes from {from} to {to}"
            );
            assert!(results[0][0][to..to + bytes] == *payload);
        }
    }

    #[test]
    fn sums_in_place_are_equal_by_both_ways() {
        let reducer = Reducer::new(DType::F32, ReduceOp::Sum, Isa::detect()).unwrap();
        let payload: Vec<u8> = (0..5000).flat_map(|at| (at as f32).to_ne_bytes()).collect();
        let results = [OutputWrites::plain(), streaming()].map(|mut writes| {
            let mut bytes = payload.clone();
            let mut buffers = UserBuffers::in_place(&mut bytes, 0, payload.len()).unwrap();
            writes.begin_step();
            writes.add(&mut buffers, (0, 0), (&payload, &reducer));
            writes.end_step();
            bytes
        });
        assert!(results[0] == results[1]);
        let sum = |at: usize| f32::from_ne_bytes(results[0][4 * at..][..4].try_into().unwrap());
        assert!((0..5000).all(|at| sum(at) == 2.0 * at as f32));
    }

    #[test]
    fn only_large_outputs_of_engines_that_may_stream_have_a_choice() {
        let (input, mut output) = (vec![0; LEAST_OUTPUT], vec![0; LEAST_OUTPUT]);
        for (may_stream, bytes) in [(true, 0), (true, 1), (false, 0)] {
            let mut choices = OutputChoices::new(may_stream);
            let output = &mut output[bytes..];
            let buffers = UserBuffers::new(&input, output);
            let streamed = (0..8).filter(|_| {
                let writes = choices.begin(false, &buffers);
                choices.end(&writes);
                writes.streams
            });
            assert_eq!(
                streamed.count(),
                if may_stream && bytes == 0 { 4 } else { 0 }
            );
        }
    }
}
