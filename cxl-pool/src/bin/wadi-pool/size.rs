//! Sizes as people write them.

/// Reads `1G`, `512M`, `2097152`: a number and a binary unit.
pub(crate) fn parse(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|letter: char| !letter.is_ascii_digit());
    let shift = match text[digits.len()..].trim_end_matches("iB").trim_end_matches('B') {
        "" => 0,
        "K" | "k" => 10,
        "M" => 20,
        "G" => 30,
        "T" => 40,
        _ => return Err("write a number and a unit: 512M, 1G or 4T".to_owned()),
    };
    let number: u64 = digits.parse().map_err(|_| "write a number and a unit: 512M, 1G or 4T".to_owned())?;
    number.checked_mul(1 << shift).ok_or_else(|| "that is more than a pool can have".to_owned())
}

/// Writes the largest unit that leaves no fraction, or one digit of it.
pub(crate) fn display(bytes: u64) -> String {
    let units = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
    let Some((unit, shift)) = units.into_iter().find(|(_, shift)| bytes >= 1 << shift) else {
        return format!("{bytes} B");
    };
    let (whole, tenths) = (bytes >> shift, ((bytes & ((1 << shift) - 1)) * 10) >> shift);
    if tenths == 0 { format!("{whole} {unit}") } else { format!("{whole}.{tenths} {unit}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_and_written() {
        assert_eq!(parse("1G"), Ok(1 << 30));
        assert_eq!(parse("512MiB"), Ok(512 << 20));
        assert_eq!(parse("64"), Ok(64));
        for wrong in ["", "G", "-1G", "1.5G", "1X", "99999999999T"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
        assert_eq!(display(1 << 30), "1 GiB");
        assert_eq!(display((3 << 30) / 2), "1.5 GiB");
        assert_eq!(display(63), "63 B");
    }
}
