/// Bytes as hexadecimal digits, two each.
pub(super) fn hex(bytes: impl IntoIterator<Item = u8>) -> String {
    let digit = |nibble: u8| char::from_digit(nibble.into(), 16).unwrap_or('0');
    bytes.into_iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect()
}
