//! Layout of the peer buffers between GPU ranks.
//!
//! A peer buffer belongs to one ordered pair of ranks: only the sender writes it, and only the
//! receiver polls it.
//!
//! ```text
//! counters of simple | counters of ll | counters of ll128     one line a channel
//! areas of the fused kernels, for packets and for lines: two halves each, used alternately
//! slots of ll | slots of ll128
//! slots of simple: header line, payload, header line, payload, ...
//! ```
//! The layout follows from the number of ranks and from settings that all ranks compare, so ranks
//! exchange no offsets.

use crate::error::{Error, ErrorKind, Result};
use crate::gpu::abi::{
    Fifo, LINE_BYTES, MAX_CHANNELS, MAX_RANKS, PROTOCOLS, Protocol, SIGNATURE_WORDS, cursors_bytes,
};

/// Returns the bytes of device memory of a rank of `nranks` in addition to its peer buffers: cursors, and a line for
/// the fused kernels' call counters.
pub const fn private_bytes(nranks: usize) -> usize {
    cursors_bytes(nranks) + LINE_BYTES
}

/// Allocation granularity of the driver for large allocations.
const PAGE: usize = 2 << 20;
/// Total bytes of peer buffers from which a budget counts whole pages. The driver allocates smaller
/// buffers in smaller units.
const IN_PAGES: usize = 16 * PAGE;

/// Smallest payload of simple slots, in bytes; below it the number of channels shrinks instead.
const SMALLEST_SLOT: usize = 16 << 10;

/// Number of slots of a channel: the sender fills one slot while the receiver reads the other.
const DEPTH: usize = 2;

/// Number of slots of a simple channel if the budget allows. An allreduce sends two messages in
/// each pass, so with two slots the next pass would wait until the peer has finished this pass.
const DEEP: usize = 2 * DEPTH;
/// Number of slots of a simple channel in a smaller budget, in which a larger slot is worth more
/// than a fourth slot.
const LESS_DEEP: usize = DEEP - 1;

/// Payload bytes of an ll128 line, without its 8-byte flag.
const LINE_PAYLOAD: usize = LINE_BYTES - 8;
/// Granularity of a half of the area for ll128 lines. Each half splits into two rounds of whole granules, and
/// into whole tiles of four lines.
const LINES_UNIT: usize = 32 * LINE_BYTES;
/// Largest allreduce, in bytes, that fused kernels with ll128 run in two rounds, if the budget allows. Two
/// ranks need only one round, and may send four times as many bytes. For larger messages schedule kernels are
/// as fast.
const LINES_MESSAGE: usize = 2 << 20;

/// The layout of a peer buffer, equal for all pairs of a communicator. Offsets are multiples of 128.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerBufferLayout {
    nranks: usize,
    sizes: Sizes,
    fifos: [Fifo; PROTOCOLS],
    oneshot: usize,
    lines: usize,
    bytes: usize,
}

/// The sizes that a layout chooses; everything else follows from them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Sizes {
    /// Largest number of payload bytes that a fused kernel sends to a rank in packets.
    oneshot: usize,
    /// Bytes of each half of the area for ll128 lines, flags included. A multiple of [`LINES_UNIT`].
    lines: usize,
    /// Payload bytes of a simple slot, and number of channels.
    simple: (usize, usize),
    /// Number of slots of a simple channel.
    depth: usize,
    /// Bytes of an ll slot, flags included, and number of channels.
    ll: (usize, usize),
    /// Bytes of an ll128 slot, flags included, and number of channels.
    ll128: (usize, usize),
}

impl PeerBufferLayout {
    /// Returns the largest peer buffers with which a rank stays within `budget_bytes` of device memory and
    /// `max_channels` channels.
    ///
    /// # Errors
    /// Unsupported for more than [`MAX_RANKS`] ranks. Invalid argument if `max_channels` is not 1
    /// to [`MAX_CHANNELS`]. Invalid argument, with the bytes that are needed, if the smallest peer
    /// buffers exceed the budget.
    pub fn new(
        nranks: usize,
        budget_bytes: usize,
        max_channels: usize,
    ) -> Result<PeerBufferLayout> {
        PeerBufferLayout::within(
            nranks,
            budget_bytes,
            max_channels,
            true,
            PeerBufferLayout::taken_bytes,
        )
    }

    /// Returns the largest peer buffers within a budget. `need` computes how much of the budget a layout
    /// takes. If `has_lines` is false, fused kernels send no ll128 lines, and the layout has no area for
    /// ll128 lines.
    ///
    /// # Errors
    /// See [`PeerBufferLayout::new`].
    pub fn within(
        nranks: usize,
        budget_bytes: usize,
        max_channels: usize,
        has_lines: bool,
        need: impl Fn(&PeerBufferLayout) -> usize,
    ) -> Result<PeerBufferLayout> {
        if nranks == 0 || nranks > MAX_RANKS {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!("{nranks} ranks: a communicator on GPUs has 1 to {MAX_RANKS}"),
            ));
        }
        if max_channels == 0 || max_channels > MAX_CHANNELS {
            return Err(Error::invalid_argument(format!(
                "{max_channels} channels between two GPUs: there are 1 to {MAX_CHANNELS} \
                 (CINCH_GPU_CHANNELS)"
            )));
        }
        let mut smallest = 0;
        for mut sizes in ladder(nranks, max_channels) {
            if !has_lines {
                sizes.lines = 0;
            }
            let shape = PeerBufferLayout::of(nranks, sizes);
            smallest = need(&shape);
            if smallest <= budget_bytes {
                return Ok(shape);
            }
        }
        Err(Error::invalid_argument(format!(
            "CINCH_BUFFER_BYTES={budget_bytes} is too small: {nranks} ranks on GPUs need {smallest} \
             bytes each for the smallest slots (raise it)"
        )))
    }

    fn of(nranks: usize, sizes: Sizes) -> PeerBufferLayout {
        let mut end = 0;
        let mut take = |bytes: usize| {
            let at = end;
            end += bytes.next_multiple_of(LINE_BYTES);
            at
        };
        let channels = [sizes.simple.1, sizes.ll.1, sizes.ll128.1];
        let counters = channels.map(|channels| take(channels * LINE_BYTES));
        let oneshot = take(2 * half_of_packets(sizes.oneshot));
        let lines = take(2 * sizes.lines);
        let ll_stride = LINE_BYTES + sizes.ll.0;
        let ll = take(channels[1] * DEPTH * ll_stride) + LINE_BYTES;
        let ll128 = take(channels[2] * DEPTH * sizes.ll128.0);
        let simple_stride = LINE_BYTES + sizes.simple.0;
        let simple = take(channels[0] * sizes.depth * simple_stride) + LINE_BYTES;
        let fifo = |protocol: Protocol, slots: usize, stride: usize, payload: usize| Fifo {
            counters: counters[protocol as usize] as u64,
            slots: slots as u64,
            stride: stride as u32,
            slot_bytes: payload as u32,
            depth: match protocol {
                Protocol::Simple => sizes.depth,
                Protocol::Ll | Protocol::Ll128 => DEPTH,
            } as u32,
            channels: channels[protocol as usize] as u32,
        };
        PeerBufferLayout {
            nranks,
            sizes,
            fifos: [
                fifo(Protocol::Simple, simple, simple_stride, sizes.simple.0),
                // Flags take half of each packet, and 8 of the 128 bytes of each line.
                fifo(Protocol::Ll, ll, ll_stride, sizes.ll.0 / 2),
                fifo(
                    Protocol::Ll128,
                    ll128,
                    sizes.ll128.0,
                    sizes.ll128.0 / 16 * 15,
                ),
            ],
            oneshot,
            lines,
            bytes: end,
        }
    }

    /// Returns the number of ranks of the communicator.
    pub fn nranks(&self) -> usize {
        self.nranks
    }

    /// Returns the FIFOs of a protocol.
    pub fn fifo(&self, protocol: Protocol) -> Fifo {
        self.fifos[protocol as usize]
    }

    /// Returns the largest number of payload bytes that a fused kernel sends to a rank in ll packets.
    pub fn oneshot_bytes(&self) -> usize {
        self.sizes.oneshot
    }

    /// Returns the offset of the area for ll packets, and the bytes of each of its two halves.
    pub fn oneshot_area(&self) -> (u64, u64) {
        let half = half_of_packets(self.sizes.oneshot);
        (self.oneshot as u64, half as u64)
    }

    /// Returns the largest number of payload bytes that a fused kernel sends to a rank in ll128 lines. Each
    /// line of 128 bytes carries 120.
    pub fn lines_bytes(&self) -> usize {
        self.sizes.lines / LINE_BYTES * LINE_PAYLOAD
    }

    /// Returns the offset of the area for ll128 lines, and the bytes of each of its two halves.
    pub fn lines_area(&self) -> (u64, u64) {
        (self.lines as u64, self.sizes.lines as u64)
    }

    /// Returns the bytes of a peer buffer.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns a rank's bytes of device memory: peer buffers from all other ranks, and private memory.
    pub fn device_bytes(&self) -> usize {
        (self.nranks - 1) * self.bytes + private_bytes(self.nranks)
    }

    /// Returns the bytes that the driver allocates for peer buffers and private memory. Large
    /// allocations take whole pages.
    fn taken_bytes(&self) -> usize {
        let peer_buffers = (self.nranks - 1) * self.bytes;
        if peer_buffers < IN_PAGES {
            return self.device_bytes();
        }
        peer_buffers.next_multiple_of(PAGE) + private_bytes(self.nranks).next_multiple_of(PAGE)
    }

    /// Returns offset and bytes of two payloads for the path probe: the first and the last simple slot. Their
    /// initial content has no meaning.
    pub fn probed_ranges(&self) -> [(u64, u64); 2] {
        let fifo = self.fifo(Protocol::Simple);
        let last = u64::from(fifo.channels * fifo.depth - 1);
        let bytes = u64::from(fifo.slot_bytes);
        [
            (fifo.slots, bytes),
            (fifo.slots + last * u64::from(fifo.stride), bytes),
        ]
    }
}

/// Returns the payload bytes of a slot for `codes` codes of 8 bits, with two 32-bit numbers for each 256
/// codes. If `codes` is a power of two, as most messages are, all channels have equally many chunks.
const fn slot_of(codes: usize) -> usize {
    codes / 32 * 33
}

/// Returns the bytes of ll packets that carry `payload` bytes, with a line at the end of each of two rounds. The last
/// packet carries the hash of the call's signature.
const fn half_of_packets(payload: usize) -> usize {
    2 * payload + 2 * LINE_BYTES
}

/// Returns the bytes of ll128 lines that carry `payload` bytes, rounded up to a multiple of [`LINES_UNIT`].
const fn lines_of(payload: usize) -> usize {
    payload.div_ceil(LINES_UNIT / LINE_BYTES * LINE_PAYLOAD) * LINES_UNIT
}

/// Returns sizes from large to small. Large messages need all channels, and slots large enough to hide the
/// cost of a message. Small messages need the one-shot area, which shrinks only after the slots.
fn ladder(nranks: usize, max_channels: usize) -> Vec<Sizes> {
    let kib = |number: usize| number << 10;
    let mut sizes = Sizes {
        oneshot: kib(256),
        lines: lines_of(match nranks {
            ..=2 => 4 * LINES_MESSAGE,
            _ => 2 * LINES_MESSAGE / nranks,
        }),
        simple: (slot_of(kib(256)), max_channels),
        depth: DEEP,
        ll: (kib(16), max_channels.min(16)),
        ll128: (kib(16), max_channels.min(64)),
    };
    let mut ladder = vec![sizes];
    let mut step = |change: &dyn Fn(&mut Sizes)| {
        change(&mut sizes);
        ladder.push(sizes);
    };
    for (slot, message) in [(128, 2 * LINES_MESSAGE), (64, LINES_MESSAGE)] {
        step(&|sizes| sizes.simple.0 = slot_of(kib(slot)));
        // Shrinks the area for ll128 lines before slots shrink again: for the longest messages larger slots
        // gain more than larger line areas.
        step(&|sizes| sizes.lines = sizes.lines.min(lines_of(message)));
    }
    // The areas for packets and ll slots shrink first, because ll128 lines replace most packets. Simple slots
    // serve large messages.
    step(&|sizes| sizes.oneshot = kib(128));
    step(&|sizes| sizes.ll128.0 = kib(8));
    step(&|sizes| sizes.ll.0 = kib(8));
    step(&|sizes| sizes.depth = LESS_DEEP);
    step(&|sizes| sizes.ll128.1 = max_channels.min(32));
    for slot in [32, 16] {
        step(&|sizes| {
            (sizes.simple.0, sizes.depth) = (slot_of(kib(slot)), DEEP);
            sizes.ll128.1 = max_channels.min(64);
        });
        step(&|sizes| sizes.depth = LESS_DEEP);
        step(&|sizes| sizes.oneshot = kib(64));
    }
    for channels in [32, 16] {
        step(&|sizes| sizes.ll128.1 = max_channels.min(channels));
        step(&|sizes| sizes.lines = lines_of(sizes.lines / 4));
    }
    step(&|sizes| sizes.depth = DEPTH);
    for channels in [64, 32] {
        step(&|sizes| sizes.simple.1 = max_channels.min(channels));
    }
    step(&|sizes| sizes.oneshot = kib(32));
    for channels in [8, 4, 2, 1] {
        step(&|sizes| {
            sizes.simple.1 = max_channels.min(2 * channels);
            sizes.ll.1 = max_channels.min(channels);
            sizes.ll128.1 = max_channels.min(channels);
        });
    }
    step(&|sizes| sizes.simple.1 = 1);
    step(&|sizes| (sizes.oneshot, sizes.lines) = (kib(16), 0));
    debug_assert!(ladder.iter().all(|sizes| sizes.simple.0 >= SMALLEST_SLOT));
    ladder
}

const _: () = assert!(SIGNATURE_WORDS * 8 <= LINE_BYTES); // a header holds a signature

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const BUDGET: usize = 64 << 20;

    /// Returns every used range, as (begin, end), computed only from the fields that kernels
    /// receive.
    fn pieces(shape: &PeerBufferLayout) -> Vec<(u64, u64)> {
        let mut pieces = Vec::new();
        for protocol in Protocol::ALL {
            let fifo = shape.fifo(protocol);
            let (header, memory) = match protocol {
                Protocol::Simple => (128, u64::from(fifo.slot_bytes)),
                // A packet of 16 bytes carries 8 bytes; a line of 128 bytes carries 120.
                Protocol::Ll => (0, u64::from(fifo.slot_bytes) / 8 * 16),
                Protocol::Ll128 => (0, u64::from(fifo.slot_bytes).div_ceil(120) * 128),
            };
            for channel in 0..u64::from(fifo.channels) {
                let counters = fifo.counters + channel * 128;
                pieces.push((counters, counters + 128));
                for slot in 0..u64::from(fifo.depth) {
                    let index = channel * u64::from(fifo.depth) + slot;
                    let at = fifo.slots + index * u64::from(fifo.stride);
                    pieces.push((at - header, at + memory));
                }
            }
        }
        let (packets, lines) = (shape.oneshot_area(), shape.lines_area());
        assert!(packets.1 >= 2 * shape.oneshot_bytes() as u64);
        assert_eq!(lines.1 * 120, 128 * shape.lines_bytes() as u64);
        for (area, half) in [packets, lines] {
            pieces.push((area, area + half));
            pieces.push((area + half, area + 2 * half));
        }
        pieces
    }

    #[test]
    fn layout_has_no_overlap_and_stays_in_its_budget() {
        for nranks in (1..=40).chain([48, 64, 128, 255, MAX_RANKS]) {
            for channels in [1, 2, 3, 16, 33, 64, 128] {
                for budget in [2 << 20, 5_000_000, 16 << 20, BUDGET, 1 << 30] {
                    let Ok(shape) = PeerBufferLayout::new(nranks, budget, channels) else {
                        // `new` may refuse only budgets too small for one channel of 16 KiB slots
                        // and 16 KiB of packets.
                        assert!(
                            budget < nranks * (3 << 16) + private_bytes(nranks),
                            "{nranks} {budget}"
                        );
                        continue;
                    };
                    let what =
                        format!("{nranks} ranks, {channels} channels, {budget} bytes: {shape:?}");
                    assert!(
                        (nranks - 1) * shape.bytes() + private_bytes(nranks) <= budget,
                        "{what}"
                    );
                    let mut pieces = pieces(&shape);
                    pieces.sort_unstable();
                    for pair in pieces.windows(2) {
                        assert!(pair[0].1 <= pair[1].0, "{pair:?} of {what}");
                    }
                    for (begin, _) in &pieces {
                        assert!(begin.is_multiple_of(128), "{what}");
                    }
                    assert!(pieces.last().unwrap().1 <= shape.bytes() as u64, "{what}");
                    assert!(shape.bytes().is_multiple_of(128), "{what}");
                    for protocol in Protocol::ALL {
                        let fifo = shape.fifo(protocol);
                        assert!(
                            fifo.channels >= 1 && fifo.channels as usize <= channels,
                            "{what}"
                        );
                        assert!(fifo.stride.is_multiple_of(128) && fifo.depth >= 2, "{what}");
                    }
                    let simple = shape.fifo(Protocol::Simple);
                    let codes = simple.slot_bytes / 33 * 32;
                    assert!(codes.is_multiple_of(8 << 10), "{what}");
                    assert_eq!(
                        slot_of(codes as usize),
                        simple.slot_bytes as usize,
                        "{what}"
                    );
                    assert!((16 << 10..=512 << 10).contains(&codes), "{what}");
                    for (at, bytes) in shape.probed_ranges() {
                        let inside = |piece: &&(u64, u64)| piece.0 + 128 == at;
                        let piece = pieces.iter().find(inside).expect("a simple slot");
                        assert_eq!(piece.1, at + bytes);
                    }
                }
            }
        }
    }

    #[test]
    fn default_budget_gives_expected_slots() {
        let simple = |nranks: usize, channels: usize| {
            let fifo = PeerBufferLayout::new(nranks, BUDGET, channels)
                .unwrap()
                .fifo(Protocol::Simple);
            (fifo.slot_bytes / 33 * 32 / 1024, fifo.channels, fifo.depth)
        };
        assert_eq!(simple(2, 64), (128, 64, 4));
        assert_eq!(simple(4, 64), (64, 64, 4));
        assert_eq!(simple(8, 64), (32, 64, 3));
        assert_eq!(simple(2, MAX_CHANNELS), (64, 128, 4));
        assert_eq!(simple(4, MAX_CHANNELS), (32, 128, 4));
        assert_eq!(simple(8, MAX_CHANNELS), (16, 128, 3));
        assert_eq!(simple(16, MAX_CHANNELS), (16, 64, 2));
        assert_eq!(simple(32, MAX_CHANNELS), (16, 32, 2));
        let two = PeerBufferLayout::new(2, BUDGET, 64).unwrap();
        assert_eq!(two.oneshot_bytes(), 256 << 10);
        assert_eq!(two.oneshot_area().1, (512 << 10) + 256);
        assert!(two.lines_bytes() >= 8 << 20);
        let (ll, ll128) = (two.fifo(Protocol::Ll), two.fifo(Protocol::Ll128));
        assert_eq!(
            (ll.channels, ll.slot_bytes, ll.stride),
            (16, 8 << 10, (16 << 10) + 128)
        );
        assert_eq!(
            (ll128.channels, ll128.slot_bytes, ll128.stride),
            (64, 15 << 10, 16 << 10)
        );
        // With eight ranks, packets and lines still carry messages up to these sizes.
        let eight = PeerBufferLayout::new(8, BUDGET, MAX_CHANNELS).unwrap();
        assert_eq!(eight.oneshot_bytes(), 64 << 10);
        assert!(8 * eight.lines_bytes() / 2 >= 2 << 20);
        // With few channels, the slots are larger.
        let narrow = PeerBufferLayout::new(8, BUDGET, 4)
            .unwrap()
            .fifo(Protocol::Simple);
        assert_eq!(
            (narrow.slot_bytes as usize, narrow.channels),
            (slot_of(256 << 10), 4)
        );
    }

    /// Counts whole pages, which the driver allocates.
    #[test]
    fn layout_stays_within_the_budget_in_whole_pages() {
        let pages = |bytes: usize| bytes.next_multiple_of(2 << 20);
        for nranks in 2..=MAX_RANKS {
            for channels in [1, 16, 64, 128] {
                let shape = PeerBufferLayout::new(nranks, BUDGET, channels).unwrap();
                let peer_buffers = (nranks - 1) * shape.bytes();
                let taken = pages(peer_buffers) + pages(shape.device_bytes() - peer_buffers);
                assert!(
                    taken <= BUDGET,
                    "{nranks} ranks, {channels} channels: {taken}"
                );
            }
        }
    }

    /// Smaller budgets shorten the long lines of two ranks before they halve slots again.
    #[test]
    fn smaller_budget_of_two_ranks_shortens_lines_before_slots() {
        let sizes = |mib: usize| {
            let shape = PeerBufferLayout::new(2, mib << 20, 64).unwrap();
            let fifo = shape.fifo(Protocol::Simple);
            let slot = fifo.slot_bytes / 33 * 32 / 1024;
            (slot, fifo.channels, shape.lines_bytes() >> 20)
        };
        assert_eq!(sizes(64), (128, 64, 8));
        assert_eq!(sizes(48), (128, 64, 4));
        assert_eq!(sizes(24), (64, 64, 2));
        assert_eq!(sizes(16), (32, 64, 2));
        assert_eq!(sizes(4).1, 64);
    }

    #[test]
    fn layout_without_lines_has_no_line_area() {
        let need = PeerBufferLayout::device_bytes;
        let shape = |has_lines| PeerBufferLayout::within(2, BUDGET, 64, has_lines, need).unwrap();
        let (with, without) = (shape(true), shape(false));
        assert_eq!((without.lines_bytes(), without.lines_area().1), (0, 0));
        let saved = with.bytes() - without.bytes();
        assert!(saved as u64 >= 2 * with.lines_area().1, "{saved}");
    }

    #[test]
    fn larger_budget_never_gives_a_smaller_layout() {
        let mut last = 0;
        for budget in (1 << 20..=288 << 20).step_by(1 << 20) {
            if let Ok(shape) = PeerBufferLayout::new(8, budget, 64) {
                assert!(shape.bytes() >= last);
                last = shape.bytes();
            } else {
                assert_eq!(last, 0);
            }
        }
        assert!(last > 32 << 20);
    }

    #[test]
    fn impossible_layout_is_an_error_with_numbers() {
        let error = PeerBufferLayout::new(MAX_RANKS + 1, BUDGET, 64).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.message().contains("257"), "{error}");
        assert!(PeerBufferLayout::new(0, BUDGET, 64).is_err());
        assert!(PeerBufferLayout::new(2, BUDGET, 0).is_err());
        assert!(PeerBufferLayout::new(2, BUDGET, MAX_CHANNELS + 1).is_err());
        let error = PeerBufferLayout::new(32, 64 << 10, 64).unwrap_err();
        let need: usize = error
            .message()
            .split(|c: char| !c.is_ascii_digit())
            .filter_map(|word| word.parse().ok())
            .max()
            .unwrap();
        assert!(PeerBufferLayout::new(32, need, 64).is_ok());
        assert!(PeerBufferLayout::new(32, need - 1, 64).is_err());
    }
}
