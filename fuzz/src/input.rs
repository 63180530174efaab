//! Reads numbers and bytes from the front of an input. After its end every number is 0.

/// The rest of an input.
pub struct Input<'a>(pub &'a [u8]);

impl<'a> Input<'a> {
    /// Returns whether no byte is left.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Takes up to `count` bytes.
    pub fn bytes(&mut self, count: usize) -> &'a [u8] {
        let (front, rest) = self.0.split_at(count.min(self.0.len()));
        self.0 = rest;
        front
    }

    fn word<const N: usize>(&mut self) -> [u8; N] {
        let mut word = [0; N];
        let front = self.bytes(N);
        word[..front.len()].copy_from_slice(front);
        word
    }

    /// Takes a byte.
    pub fn u8(&mut self) -> u8 {
        self.word::<1>()[0]
    }

    /// Takes a little-endian number of 2 bytes.
    pub fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.word())
    }

    /// Takes a little-endian number of 4 bytes.
    pub fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.word())
    }

    /// Takes a little-endian number of 8 bytes.
    pub fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.word())
    }

    /// Takes a number below `end`.
    pub fn below(&mut self, end: usize) -> usize {
        usize::from(self.u8()) % end
    }
}
