//! What is remembered of a state that was met.

use std::hash::{Hash, Hasher};

/// 128 bits of a state: that two of a few million states have the same is out of the question.
pub(super) fn fingerprint(state: &impl Hash) -> (u64, u64) {
    let mut fingerprint = Fingerprint(0x243f_6a88_85a3_08d3, 0x1319_8a2e_0370_7344);
    state.hash(&mut fingerprint);
    (fingerprint.0, fingerprint.1)
}

/// Two halves that multiply and fold, with different factors. The standard hasher takes most of the search's time.
struct Fingerprint(u64, u64);

fn fold(left: u64, right: u64) -> u64 {
    let product = u128::from(left) * u128::from(right);
    // The upper half has 64 bits; of the lower one no more are wanted.
    let (upper, lower) = (product >> 64, product & u128::from(u64::MAX));
    u64::try_from(upper ^ lower).unwrap_or_default()
}

impl Hasher for Fingerprint {
    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_le_bytes(word));
        }
    }

    fn write_u64(&mut self, word: u64) {
        self.0 = fold(self.0 ^ word, 0x9e37_79b9_7f4a_7c15).rotate_left(23);
        self.1 = fold(self.1.wrapping_add(word) | 1, 0xc2b2_ae3d_27d4_eb4f ^ self.0);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}
