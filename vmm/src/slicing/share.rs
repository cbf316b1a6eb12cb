use std::fmt;
use std::str::FromStr;

/// How much of their time vCPUs may run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Share {
    /// So many percent, above 0 and up to 100.
    Percent(f64),
    /// What brings what they load and store to the VM's share of the fabric, as the pod finds it.
    Fair,
}

impl FromStr for Share {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.parse() {
            _ if text == "fair" => Ok(Self::Fair),
            Ok(percent) if percent > 0.0 && percent <= 100.0 => Ok(Self::Percent(percent)),
            Ok(0.0) => Err(
                "QEMU waits for each vCPU now and then, so each has to run a little: to halt the guest, say `stop` to QEMU's monitor",
            ),
            _ => Err("a number above 0 and up to 100, or `fair`"),
        }
    }
}

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Percent(percent) => write!(f, "{percent}"),
            Self::Fair => f.write_str("fair"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_percent_or_fair() {
        for (text, share) in
            [("0.01", Share::Percent(0.01)), ("12.5", Share::Percent(12.5)), ("100", Share::Percent(100.0))]
        {
            assert_eq!(text.parse(), Ok(share));
            assert_eq!(share.to_string(), text);
        }
        assert_eq!("fair".parse(), Ok(Share::Fair));
        for wrong in ["", "0", "-0", "101", "-1", "NaN", "inf", "Fair", "fair "] {
            assert!(wrong.parse::<Share>().is_err(), "{wrong}");
        }
    }
}
