//! The Internet checksum (RFC 1071).

/// The ones' complement sum of `bytes` as big-endian words, an odd byte at the end padded with zero. Sums of parts add
/// up where every part but the last has an even length.
pub(crate) fn sum(bytes: &[u8]) -> u64 {
    let mut words = bytes.chunks_exact(2);
    let mut sum: u64 = words.by_ref().map(|word| u64::from(u16::from_be_bytes([word[0], word[1]]))).sum();
    if let [last] = words.remainder() {
        sum += u64::from(*last) << 8;
    }
    sum
}

/// The checksum that stands for a sum.
pub(crate) fn of_sum(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    // What was folded fits.
    !u16::try_from(sum).unwrap_or_default()
}

/// As [`of_sum`], for UDP: zero says "none" there, and all ones is the same number.
pub(crate) fn of_udp_sum(sum: u64) -> u16 {
    match of_sum(sum) {
        0 => 0xffff,
        checksum => checksum,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_example_of_the_standard_sums_up() {
        let bytes = [0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7];
        assert_eq!(of_sum(sum(&bytes)), !0xddf2);
        assert_eq!(of_udp_sum(0xffff), 0xffff);
        assert_eq!(of_sum(0xffff), 0);
    }

    proptest! {
        #[test]
        fn what_carries_its_checksum_sums_up_to_all_ones(mut bytes in prop::collection::vec(any::<u8>(), 2..200)) {
            bytes[..2].fill(0);
            let checksum = of_sum(sum(&bytes));
            bytes[..2].copy_from_slice(&checksum.to_be_bytes());
            prop_assert_eq!(of_sum(sum(&bytes)), 0);
        }

        #[test]
        fn parts_add_up(bytes: Vec<u8>, at: prop::sample::Index) {
            let middle = at.index(bytes.len() + 1) & !1;
            let (first, second) = bytes.split_at(middle);
            prop_assert_eq!(of_sum(sum(first) + sum(second)), of_sum(sum(&bytes)));
        }
    }
}
