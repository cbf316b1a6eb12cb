//! A hash for ids and addresses that the controller chose: quick, and no protection against chosen keys, which nobody
//! else can put into a table.

use std::hash::{BuildHasherDefault, Hasher};

/// For maps whose keys the controller chose.
pub(crate) type IdHash = BuildHasherDefault<IdHasher>;

/// Multiplies by an odd number with its bits well spread, and folds both halves of the product together: every bit of a key
/// reaches the low bits, which choose a bucket, and the high ones, which tell keys of a bucket apart.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct IdHasher(u64);

impl IdHasher {
    const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;

    #[inline]
    const fn mix(&mut self, word: u64) {
        let product = (self.0 ^ word) as u128 * Self::FACTOR as u128;
        #[expect(clippy::cast_possible_truncation, reason = "the two halves")]
        let (low, high) = (product as u64, (product >> 64) as u64);
        self.0 = low ^ high;
    }
}

impl Hasher for IdHasher {
    #[inline]
    fn finish(&self) -> u64 {
        self.0
    }

    #[inline]
    fn write(&mut self, bytes: &[u8]) {
        for piece in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..piece.len()].copy_from_slice(piece);
            self.mix(u64::from_le_bytes(word));
        }
    }

    #[inline]
    fn write_u32(&mut self, word: u32) {
        self.mix(word.into());
    }

    #[inline]
    fn write_u64(&mut self, word: u64) {
        self.mix(word);
    }

    #[inline]
    fn write_usize(&mut self, word: usize) {
        self.mix(word as u64);
    }
}

#[cfg(test)]
mod tests {
    use std::hash::BuildHasher;

    use pod_protocol::ids::{LeaseId, MacAddress};

    use super::*;

    /// How many of 256 buckets the hashes of so many keys fall into.
    fn buckets<K: std::hash::Hash>(keys: impl Iterator<Item = K>) -> usize {
        let hash = IdHash::default();
        keys.map(|key| hash.hash_one(key) % 256).collect::<std::collections::BTreeSet<_>>().len()
    }

    #[test]
    fn neighbouring_ids_and_addresses_spread() {
        assert!(buckets((0..256).filter_map(LeaseId::new)) > 128);
        assert!(buckets((0..=255).map(|last| MacAddress::new([2, 0, 0, 0, 0, last]))) > 128);
        assert!(buckets((0..=255).map(|third| MacAddress::new([2, 0, 0, third, 0, 0]))) > 128);
    }
}
