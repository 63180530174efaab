//! Whether what a peer writes arrives: each side writes a pattern into the other's inbox, and the
//! other looks.

use crate::error::Result;
use crate::gpu::probe::Probe;
use crate::mem::PeerBufferLayout;

/// What writes and looks: kernels, or in tests something that may be made to fail.
pub(super) trait PathProbe {
    /// Writes the pattern of `seed` to `words` 64-bit words at `address`, and returns when they
    /// are there.
    ///
    /// # Errors
    /// Timeout; those of the driver.
    ///
    /// # Safety
    /// The words are mapped, and nobody else uses them meanwhile.
    unsafe fn write(&self, address: u64, words: u64, seed: u64) -> Result<()>;

    /// How many of the words are not the pattern.
    ///
    /// # Errors
    /// Timeout; those of the driver.
    ///
    /// # Safety
    /// As for [`PathProbe::write`].
    unsafe fn wrong(&self, address: u64, words: u64, seed: u64) -> Result<u32>;
}

impl PathProbe for Probe {
    unsafe fn write(&self, address: u64, words: u64, seed: u64) -> Result<()> {
        // SAFETY: by the caller's word.
        unsafe { self.fill(address, words, seed) }
    }

    unsafe fn wrong(&self, address: u64, words: u64, seed: u64) -> Result<u32> {
        // SAFETY: by the caller's word.
        unsafe { self.wrong_words(address, words, seed) }
    }
}

/// The probe of one box.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pair<'a> {
    /// The writer's rank.
    pub from: usize,
    /// The reader's rank.
    pub to: usize,
    /// Of the box, as the caller's GPU sees it.
    pub address: u64,
    /// Layout of the box.
    pub shape: &'a PeerBufferLayout,
    /// A number that ranks of other communicators do not use.
    pub nonce: u64,
}

impl Pair<'_> {
    /// The writer's part.
    ///
    /// # Errors
    /// See [`PathProbe::write`].
    ///
    /// # Safety
    /// A box of that shape is mapped at the address, and only this probe uses it.
    pub unsafe fn write(self, probe: &dyn PathProbe) -> Result<()> {
        for (address, words, seed) in self.places() {
            // SAFETY: inside the box, by the shape.
            unsafe { probe.write(address, words, seed)? };
        }
        Ok(())
    }

    /// The reader's part: words that are wrong.
    ///
    /// # Errors
    /// See [`PathProbe::wrong`].
    ///
    /// # Safety
    /// As for [`Pair::write`].
    pub unsafe fn wrong(self, probe: &dyn PathProbe) -> Result<u64> {
        let mut wrong = 0;
        for (address, words, seed) in self.places() {
            // SAFETY: as above.
            wrong += u64::from(unsafe { probe.wrong(address, words, seed)? });
        }
        Ok(wrong)
    }

    fn places(self) -> [(u64, u64, u64); 2] {
        // Different for each box and place, so that data that went astray is not taken for right.
        let pair = ((self.from as u64) << 32) | ((self.to as u64) << 8);
        let mut place = 0;
        self.shape.probed_ranges().map(|(offset, bytes)| {
            place += 1;
            (
                self.address + offset,
                bytes / 8,
                self.nonce ^ pair.wrapping_add(place).wrapping_mul(0xd6e8_feb8_6659_fd93),
            )
        })
    }
}
