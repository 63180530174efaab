//! Probes whether data arrives: the writer of a peer buffer writes a pattern, and the reader compares
//! it.

use crate::error::Result;
use crate::gpu::probe::Probe;
use crate::mem::PeerBufferLayout;

/// Writes and compares patterns. GPU kernels implement it; tests implement it by code that damages
/// data.
pub(super) trait PathProbe {
    /// Writes the pattern of `seed` to `words` 64-bit words at `address`, and returns when the words have
    /// arrived.
    ///
    /// # Errors
    /// Timeout; the driver's errors.
    ///
    /// # Safety
    /// The words are mapped, and no other code accesses them during the call.
    unsafe fn write(&self, address: u64, words: u64, seed: u64) -> Result<()>;

    /// Returns the number of words that differ from the pattern of `seed`.
    ///
    /// # Errors
    /// Timeout; the driver's errors.
    ///
    /// # Safety
    /// See [`PathProbe::write`].
    unsafe fn count_wrong(&self, address: u64, words: u64, seed: u64) -> Result<u32>;
}

impl PathProbe for Probe {
    unsafe fn write(&self, address: u64, words: u64, seed: u64) -> Result<()> {
        // SAFETY: the caller guarantees that the words are mapped and unused.
        unsafe { self.fill(address, words, seed) }
    }

    unsafe fn count_wrong(&self, address: u64, words: u64, seed: u64) -> Result<u32> {
        // SAFETY: the caller guarantees that the words are mapped and unused.
        unsafe { self.wrong_words(address, words, seed) }
    }
}

/// A peer buffer whose path is probed.
#[derive(Clone, Copy, Debug)]
pub(super) struct ProbedPeerBuffer<'a> {
    /// The rank that writes.
    pub writer: usize,
    /// The rank that reads.
    pub reader: usize,
    /// Address of the peer buffer, as the caller's GPU maps it.
    pub address: u64,
    /// Layout of the peer buffer.
    pub shape: &'a PeerBufferLayout,
    /// A number that differs between communicators, so that old patterns do not pass.
    pub nonce: u64,
}

impl ProbedPeerBuffer<'_> {
    /// Writes the pattern of this pair to the peer buffer.
    ///
    /// # Errors
    /// See [`PathProbe::write`].
    ///
    /// # Safety
    /// A peer buffer of this layout is mapped at the address, and no other code accesses it during the call.
    pub unsafe fn write_pattern(self, probe: &dyn PathProbe) -> Result<()> {
        for (address, words, seed) in self.ranges() {
            // SAFETY: the layout has the range, and the caller guarantees that the peer buffer is mapped
            // and unused.
            unsafe { probe.write(address, words, seed)? };
        }
        Ok(())
    }

    /// Returns the number of words of the peer buffer that arrived wrong.
    ///
    /// # Errors
    /// See [`PathProbe::count_wrong`].
    ///
    /// # Safety
    /// See [`ProbedPeerBuffer::write_pattern`].
    pub unsafe fn count_wrong(self, probe: &dyn PathProbe) -> Result<u64> {
        let mut wrong = 0;
        for (address, words, seed) in self.ranges() {
            // SAFETY: the layout has the range, and the caller guarantees that the peer buffer is mapped
            // and unused.
            wrong += u64::from(unsafe { probe.count_wrong(address, words, seed)? });
        }
        Ok(wrong)
    }

    /// Returns address, number of words and seed of each probed range. Seeds differ by pair and range, so
    /// that data of another pair does not pass for the right data.
    fn ranges(self) -> [(u64, u64, u64); 2] {
        let pair = ((self.writer as u64) << 32) | ((self.reader as u64) << 8);
        let mut range = 0;
        self.shape.probed_ranges().map(|(offset, bytes)| {
            range += 1;
            (
                self.address + offset,
                bytes / 8,
                self.nonce ^ pair.wrapping_add(range).wrapping_mul(0xd6e8_feb8_6659_fd93),
            )
        })
    }
}
