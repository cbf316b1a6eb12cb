//! Numbers by which what is reported can be told apart, wherever it comes out.

use pod_protocol::telemetry::Telemetry;
use serde_json::Value;

/// What says which thing a report is about, and what has few values.
const KEPT: [&str; 8] = ["sequence", "lease", "channel", "peer", "instance", "element", "level", "up"];

/// What is reported under this name, such as `leases.tx_bytes`, where all numbers are to differ.
pub(crate) fn number_of(field: &str) -> f64 {
    number(field).into()
}

/// Large enough for no two of some dozens to be the same, and small enough for µs and ns to be less than a second.
pub(super) fn number(field: &str) -> u32 {
    let mix = |hash: u32, byte: u8| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193);
    100_000 + field.bytes().fold(0x811c_9dc5, mix) % 800_000
}

/// The same report, with another number in place of each that is there.
pub(super) fn told_apart(telemetry: &Telemetry) -> Telemetry {
    let mut report = serde_json::to_value(telemetry).expect("it is sent as JSON");
    tell_apart(&mut report, "");
    serde_json::from_value(report).expect("it is what it was, but for numbers")
}

fn tell_apart(value: &mut Value, field: &str) {
    match value {
        Value::Number(said) => *said = number(field).into(),
        Value::Array(all) => all.iter_mut().for_each(|it| tell_apart(it, field)),
        Value::Object(fields) => {
            for (name, value) in fields.iter_mut().filter(|(name, _)| !KEPT.contains(&name.as_str())) {
                let dot = if field.is_empty() { "" } else { "." };
                tell_apart(value, &format!("{field}{dot}{name}"));
            }
        }
        Value::Null | Value::Bool(_) | Value::String(_) => {}
    }
}
