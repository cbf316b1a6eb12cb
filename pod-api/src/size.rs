use std::fmt;
use std::str::FromStr;

use serde::de::{Deserializer, Error, Visitor};
use serde::{Deserialize, Serialize};

/// A size in bytes; read from a number, or from text such as `"8G"` (powers of 1024: K, M, G, T).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct ByteSize(u64);

impl ByteSize {
    /// From a number of bytes.
    pub const fn new(bytes: u64) -> Self {
        Self(bytes)
    }

    /// The number of bytes.
    pub const fn get(self) -> u64 {
        self.0
    }
}

/// Text that is no size.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a size: write a number of bytes, or a number with K, M, G or T, such as 8G")]
pub struct ParseByteSizeError(String);

impl FromStr for ByteSize {
    type Err = ParseByteSizeError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let refuse = || ParseByteSizeError(text.chars().take(40).collect());
        let trimmed = text.trim();
        let digits = trimmed.find(|character: char| !character.is_ascii_digit()).unwrap_or(trimmed.len());
        let (number, unit) = trimmed.split_at(digits);
        let shift = match unit.trim().to_ascii_uppercase().trim_end_matches("IB").trim_end_matches('B') {
            "" => 0,
            "K" => 10,
            "M" => 20,
            "G" => 30,
            "T" => 40,
            _ => return Err(refuse()),
        };
        let number: u64 = number.parse().map_err(|_| refuse())?;
        number.checked_mul(1 << shift).map(Self).ok_or_else(refuse)
    }
}

/// In the largest unit that keeps three digits: `8.0 GiB`.
impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(u32, &str); 4] = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
        for (shift, unit) in UNITS {
            let one = 1_u64 << shift;
            if self.0 >= one {
                let whole = self.0 >> shift;
                let tenth = (u128::from(self.0 & (one - 1)) * 10) >> shift;
                return f.pad(&format!("{whole}.{tenth} {unit}"));
            }
        }
        f.pad(&format!("{} B", self.0))
    }
}

impl<'de> Deserialize<'de> for ByteSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NumberOrText;

        impl Visitor<'_> for NumberOrText {
            type Value = ByteSize;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number of bytes, or text such as \"8G\"")
            }

            fn visit_u64<E: Error>(self, bytes: u64) -> Result<ByteSize, E> {
                Ok(ByteSize(bytes))
            }

            fn visit_i64<E: Error>(self, bytes: i64) -> Result<ByteSize, E> {
                u64::try_from(bytes).map(ByteSize).map_err(|_| E::custom("a size cannot be negative"))
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<ByteSize, E> {
                text.parse().map_err(E::custom)
            }
        }

        deserializer.deserialize_any(NumberOrText)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn sizes_with_units_are_powers_of_1024() {
        for (text, bytes) in
            [("8G", 8 << 30), ("1", 1), ("4k", 4096), ("3 MiB", 3 << 20), ("2T", 2 << 40), ("7B", 7)]
        {
            assert_eq!(text.parse(), Ok(ByteSize::new(bytes)), "{text}");
        }
    }

    #[test]
    fn what_is_no_size_is_refused() {
        for text in ["", "G", "-1", "1.5G", "8X", "99999999999T", "8GG", "0x10"] {
            assert!(text.parse::<ByteSize>().is_err(), "{text}");
        }
        for json in ["-1", "1.5", "true", "\"8X\"", "null"] {
            assert!(serde_json::from_str::<ByteSize>(json).is_err(), "{json}");
        }
    }

    #[test]
    fn display_has_one_decimal() {
        assert_eq!(ByteSize::new(8 << 30).to_string(), "8.0 GiB");
        assert_eq!(ByteSize::new(1536).to_string(), "1.5 KiB");
        assert_eq!(ByteSize::new(12).to_string(), "12 B");
        assert_eq!(ByteSize::new(u64::MAX).to_string(), "16777215.9 TiB");
    }

    proptest! {
        #[test]
        fn any_text_is_a_size_or_an_error(text: String) {
            let _ = text.parse::<ByteSize>();
        }

        #[test]
        fn numbers_survive_json(bytes: u64) {
            let json = serde_json::to_string(&ByteSize::new(bytes)).expect("a number");
            prop_assert_eq!(serde_json::from_str::<ByteSize>(&json).ok(), Some(ByteSize::new(bytes)));
        }
    }
}
