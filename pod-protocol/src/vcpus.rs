//! What an agent that holds the vCPUs of a VM (`vmm slice --share fair`) and a frontend of its host say to each other.
//!
//! The agent counts what the vCPUs load and store by themselves, which no frontend sees; the frontend counts that among what the VM's
//! queues move, and says how long the vCPUs may run. It goes over a socket that keeps messages apart (`SOCK_SEQPACKET`), in the run
//! directory of the host. Each message is a JSON text of at most [`MESSAGE_BYTES_MAX`] bytes; fields that are not known are ignored.
//!
//! ```text
//! agent                                       frontend
//!   hello(version, instance, process)  ──▶
//!                                      ◀──   welcome, or refused(reason) and the end
//!                                      ◀──   order          at the end of each K, once there was a report
//!   report(elapsed, bytes, run, …)     ──▶                  0.9 K after an order
//! ```
//! An order comes at the end of every K, also if the report came too late for it: what is counted in a K is what came about under
//! the order of the K before. An agent that comes from a frontend that is gone goes on with the last order of that one until there is
//! another, and its first report is about all that no frontend has given an order for yet.

mod link;

pub use link::{Link, LinkError, LinkListener};

use serde::{Deserialize, Serialize};

/// The version of these messages.
pub const VERSION: u32 = 1;

/// No message is longer.
pub const MESSAGE_BYTES_MAX: usize = 1024;

/// What an agent says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum FromAgent {
    /// First, and once.
    Hello(Hello),
    /// Once in each K.
    Report(Report),
}

/// Whose vCPUs an agent holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// The version that it speaks, see [`VERSION`].
    pub version: u32,
    /// The name of the instance.
    pub instance: String,
    /// The agent's process.
    pub process: u32,
    /// Whether it holds them, as far as it is told to. One that does not only counts what they do: they are not to be touched, and the VM's
    /// queues have what they leave of its share.
    #[serde(default = "holds", skip_serializing_if = "Clone::clone")]
    pub holds: bool,
}

/// What earlier agents do, which do not say it.
fn holds() -> bool {
    true
}

/// What vCPUs did since the last report, to whichever frontend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// How long that is, in µs; 0 where nothing is known of it yet: then the report says that the agent is there, and no more.
    pub elapsed_us: u64,
    /// What they loaded and stored, in bytes.
    pub bytes: u64,
    /// How much of that time they ran, or could have run had they wanted to, in µs: T_R.
    pub run_us: u64,
    /// For how long they were put to sleep, in µs, summed over vCPUs.
    pub slept_us: u64,
    /// The window in which they are held, in µs: T_W.
    pub window_us: u64,
}

/// What a frontend says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum ToAgent {
    /// The agent is known now.
    Welcome,
    /// Nothing more is said after that.
    Refused {
        /// Why, and what to do.
        reason: String,
    },
    /// For how long the vCPUs may run from now on.
    Order(Order),
}

/// How the vCPUs of a VM are to be held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Order {
    /// K: when to expect the next one, in µs.
    pub sample_us: u64,
    /// T_R in ns.
    pub run_ns: u64,
    /// T_W in ns. An agent that cannot make windows so short makes longer ones, of which the vCPUs run the same part.
    pub window_ns: u64,
    /// What they may load and store, in bytes/s; nothing while they need not be held.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share: Option<u64>,
    /// What they would, in bytes/s.
    pub demand: u64,
}

impl Order {
    /// T_R/T_W, from 0 to 1.
    #[expect(clippy::cast_precision_loss, reason = "a part of a window, which is far below 2^53 ns")]
    pub fn part(&self) -> f64 {
        if self.run_ns >= self.window_ns { 1.0 } else { self.run_ns as f64 / self.window_ns as f64 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_read_back_and_are_short() {
        let order = Order {
            sample_us: u64::MAX,
            run_ns: u64::MAX,
            window_ns: u64::MAX,
            share: Some(u64::MAX),
            demand: u64::MAX,
        };
        let text = serde_json::to_string(&ToAgent::Order(order)).expect("a text");
        assert!(text.len() < MESSAGE_BYTES_MAX / 2, "{text}");
        assert_eq!(serde_json::from_str::<ToAgent>(&text).expect("it reads back"), ToAgent::Order(order));
        let hello = Hello { version: VERSION, instance: "x".repeat(253), process: u32::MAX, holds: false };
        let text = serde_json::to_string(&FromAgent::Hello(hello.clone())).expect("a text");
        assert!(text.len() < MESSAGE_BYTES_MAX / 2, "{text}");
        assert_eq!(serde_json::from_str::<FromAgent>(&text).expect("it reads back"), FromAgent::Hello(hello));
        let text = r#"{"kind":"hello","version":1,"instance":"vm1","process":7}"#;
        let earlier = serde_json::from_str(text).expect("it reads");
        assert!(matches!(&earlier, FromAgent::Hello(Hello { holds: true, .. })));
        assert_eq!(serde_json::to_string(&earlier).expect("a text"), text, "earlier frontends know no more");
    }

    #[test]
    fn what_a_later_version_adds_is_passed_over() {
        let text =
            r#"{"kind":"report","elapsed_us":1,"bytes":2,"run_us":1,"slept_us":0,"window_us":9,"lines":3}"#;
        assert!(matches!(serde_json::from_str(text), Ok(FromAgent::Report(Report { bytes: 2, .. }))));
        assert!(serde_json::from_str::<FromAgent>(&text.replace(":2", ":NaN")).is_err());
        assert!(serde_json::from_str::<FromAgent>(&text.replace(":2", ":-2")).is_err());
    }

    #[test]
    fn a_part_of_a_window() {
        let order = |run_ns, window_ns| Order { sample_us: 1, run_ns, window_ns, share: None, demand: 0 };
        assert!((order(1, 4).part() - 0.25).abs() < 1e-12);
        assert!((order(4, 4).part() - 1.0).abs() < 1e-12);
        assert!((order(0, 0).part() - 1.0).abs() < 1e-12, "no window holds nobody");
    }
}
