use super::{Refusal, RefusalKind};

/// The longest name: two of them and a run directory still make a socket's path.
pub const NAME_BYTES_MAX: usize = 32;

/// The longest name of a host or device.
const REPORTED_BYTES_MAX: usize = 63;

/// Refuses what is no name: names become files, serial numbers and words on command lines.
pub fn check_name(what: &str, name: &str) -> Result<(), Refusal> {
    let bytes = name.as_bytes();
    let alphanumeric = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let good = bytes.len() <= NAME_BYTES_MAX
        && bytes.first().is_some_and(alphanumeric)
        && bytes.last().is_some_and(alphanumeric)
        && bytes.iter().all(|byte| alphanumeric(byte) || *byte == b'-');
    if good {
        return Ok(());
    }
    let shown: String = name.chars().take(NAME_BYTES_MAX + 8).collect();
    Err(Refusal::new(
        RefusalKind::InvalidName,
        format!(
            "{shown:?} cannot be the name of {what}: use 1 to {NAME_BYTES_MAX} lower-case letters, digits and \
             dashes, with a letter or digit at both ends"
        ),
    ))
}

/// Refuses the name of a host or device that does not fit where such names go: paths of URLs, labels of metrics. The
/// rule is that of the hosts' configuration.
pub(super) fn check_reported_name(what: &str, name: &str) -> Result<(), Refusal> {
    let good = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    let starts_well = name.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric());
    if starts_well && name.len() <= REPORTED_BYTES_MAX && name.bytes().all(good) {
        return Ok(());
    }
    let shown: String = name.chars().take(REPORTED_BYTES_MAX).collect();
    Err(Refusal::new(
        RefusalKind::InvalidName,
        format!(
            "{shown:?} cannot be the name of {what}: use 1 to {REPORTED_BYTES_MAX} letters, digits, '-', '_' or '.', a \
             letter or digit first"
        ),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_hosts_and_volumes_pass() {
        for name in ["h1", "vm-1", "0", "a-b-c", &"x".repeat(NAME_BYTES_MAX)] {
            assert_eq!(check_name("a host", name), Ok(()), "{name}");
        }
    }

    #[test]
    fn what_could_leave_a_directory_is_refused() {
        for name in
            ["", "-a", "a-", "A", "a b", "a/b", "..", "a.b", "ä", "a\n", &"x".repeat(NAME_BYTES_MAX + 1)]
        {
            assert!(check_name("a host", name).is_err(), "{name}");
        }
    }
}
