//! Numbers out of bytes.

/// Takes an input apart. Behind its end there are zeros.
pub(crate) struct Input<'a>(pub(crate) &'a [u8]);

impl<'a> Input<'a> {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// At most this many bytes.
    pub(crate) fn some(&mut self, bytes: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(bytes.min(self.0.len()));
        self.0 = rest;
        taken
    }

    pub(crate) fn array<const BYTES: usize>(&mut self) -> [u8; BYTES] {
        let mut array = [0; BYTES];
        let taken = self.some(BYTES);
        array[..taken.len()].copy_from_slice(taken);
        array
    }

    pub(crate) fn byte(&mut self) -> u8 {
        self.array::<1>()[0]
    }

    pub(crate) fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    pub(crate) fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    pub(crate) fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }

    pub(crate) fn words<const WORDS: usize>(&mut self) -> [u64; WORDS] {
        std::array::from_fn(|_| self.u64())
    }
}
