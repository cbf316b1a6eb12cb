//! A run: the very code of `Sender` and `Receiver`, on modelled hosts.

use std::thread;

use anyhow::{Context, Result, ensure};
use cxl_channel::{ReceivePolicy, Receiver, RingPlacement, Sender};
use cxl_pool::simulated::Random;
use cxl_pool::{Generation, LineOffset};

use super::link::Link;
use super::memory::ModelledMemory;
use super::world::{Moved, RECEIVING, World};

/// As in the paper.
const SLOTS: u32 = 8192;
/// 16 B, the messages of the paper's figure.
const WORDS: usize = 2;
/// Two laps at full speed come first: in the first one nothing is cached yet.
const WARM_UP: u64 = 2 * SLOTS as u64;
/// How many messages of a fixed rate are not measured, either.
const SETTLE: u64 = 200;

/// Between the two: the ring runs empty.
const PAUSE_NS: f64 = 5e6;

/// What a run is like.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Traffic {
    pub(crate) policy: ReceivePolicy,
    /// Messages per µs; nothing for as fast as it goes.
    pub(crate) rate: Option<f64>,
    /// Messages that are measured.
    pub(crate) messages: u64,
    /// How many are handed over at a time. With one at a time both sides read the clock for each.
    pub(crate) batch: usize,
}

impl Traffic {
    /// As fast as it goes, as in the paper: message by message, with a time in each.
    pub(crate) fn flat_out(policy: ReceivePolicy) -> Self {
        Self { policy, rate: None, messages: 40_000, batch: 1 }
    }

    /// At a rate, in messages per µs.
    pub(crate) fn at(policy: ReceivePolicy, rate: f64) -> Self {
        // A lone message is polled for all the time, which takes the model as long as many messages.
        let messages = if rate < 1.0 { 20_000 } else { 40_000 };
        Self { policy, rate: Some(rate), messages, batch: 1 }
    }
}

/// What a run found.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Found {
    /// Messages per µs.
    pub(crate) rate: f64,
    pub(crate) median_ns: f64,
    pub(crate) p99_ns: f64,
    /// What went over the receiver's link for each message.
    pub(crate) lines_in_per_message: f64,
}

/// What the receiver saw.
struct Received {
    began: Option<(f64, Moved)>,
    ended: f64,
    moved: Moved,
    latencies: Vec<f64>,
}

/// Runs. The same arguments always find the same.
pub(crate) fn run(link: &Link, traffic: Traffic) -> Result<Found> {
    let placement = RingPlacement { start: LineOffset::new(0), slots: SLOTS };
    let lines = usize::try_from(placement.area(WORDS).lines.get()).context("a small number")?;
    let [sending, receiving] = ModelledMemory::pair(World::new(*link, lines));
    let generation = Generation::new(1);
    let total = WARM_UP + SETTLE + traffic.messages;
    let seen = thread::scope(|scope| {
        let sender = scope.spawn(|| {
            let mut sender = Sender::begin(sending.clone(), placement, generation);
            sender.set_wakeups(false);
            sender.set_waits(traffic.policy == ReceivePolicy::Adaptive);
            while !sender.ready() {}
            send(&sending, link, &mut sender, &traffic, total);
            sending.finish();
        });
        receiving.begin();
        let mut receiver =
            Receiver::open(receiving.clone(), placement, generation).with_policy(traffic.policy);
        let seen = receive(&receiving, link, &mut receiver, &traffic, total);
        receiving.finish();
        sender.join().map_err(|_| anyhow::anyhow!("the sending host panicked"))?;
        seen
    })?;
    summarise(seen)
}

/// Polls until all has come.
fn receive(
    host: &ModelledMemory,
    link: &Link,
    receiver: &mut Receiver<ModelledMemory, WORDS>,
    traffic: &Traffic,
    total: u64,
) -> Result<Received> {
    let mut batch = vec![[0; WORDS]; traffic.batch];
    let mut seen = Received { began: None, ended: 0.0, moved: Moved::default(), latencies: Vec::new() };
    let mut next = 0;
    while next < total {
        let count = if traffic.batch > 1 {
            receiver.receive_batch(&mut batch)
        } else {
            receiver.receive().map(|message| batch[0] = message).iter().count()
        };
        host.pass(calls_ns(link, count));
        if count == 0 {
            host.pass(link.pause_ns);
        } else if traffic.batch == 1 {
            host.pass(link.clock_ns);
        }
        let (now, moved) = (host.now(), host.world().moved[RECEIVING]);
        for message in &batch[..count] {
            ensure!(message[1] == next, "message {} came instead of {next}", message[1]);
            next += 1;
            if next > WARM_UP + SETTLE {
                seen.began.get_or_insert((now, moved));
                seen.latencies.push(now - f64::from_bits(message[0]));
                (seen.ended, seen.moved) = (now, moved);
            }
        }
    }
    Ok(seen)
}

/// What the code costs that handles so many messages, all in the cache: a line of them costs no more than one.
fn calls_ns(link: &Link, count: usize) -> f64 {
    let lines = u32::try_from(count.div_ceil(8 / WORDS)).map_or(0.0, f64::from);
    link.call_ns * lines.max(1.0)
}

/// Hands everything over.
fn send(
    host: &ModelledMemory,
    link: &Link,
    sender: &mut Sender<ModelledMemory, WORDS>,
    traffic: &Traffic,
    total: u64,
) {
    let mut random = Random::new(1);
    let mut sent = 0;
    let mut batch = Vec::with_capacity(traffic.batch);
    while sent < WARM_UP || traffic.rate.is_none() && sent < total {
        batch.clear();
        let until = if sent < WARM_UP { WARM_UP } else { total };
        let now = host.now();
        batch.extend((sent..until).take(traffic.batch).map(|number| [now.to_bits(), number]));
        host.pass(calls_ns(link, batch.len()) + if traffic.batch == 1 { link.clock_ns } else { 0.0 });
        let count = if traffic.batch > 1 {
            sender.send_batch(&batch)
        } else {
            usize::from(sender.send(batch[0]).is_ok())
        };
        if count < batch.len() {
            let _ = sender.publish();
        }
        sent += count as u64;
    }
    let _ = sender.publish();
    let Some(rate) = traffic.rate else { return };
    // Messages are due one after the other, a little unevenly: else they might keep step with the polls.
    let gap = 1000.0 / rate;
    let mut due = host.now() + PAUSE_NS;
    while sent < total {
        host.wait_until(due);
        let _ = sender.free();
        // All that is due goes, and is published once there is nothing more to send.
        while sent < total && due <= host.now() {
            host.pass(link.call_ns + link.clock_ns);
            if sender.send([due.to_bits(), sent]).is_err() {
                let _ = sender.publish();
                continue;
            }
            sent += 1;
            due += gap * (0.9 + unit(&mut random) * 0.2);
        }
        let _ = sender.publish();
    }
}

/// From 0 to 1.
#[allow(clippy::cast_precision_loss, reason = "20 bits")]
fn unit(random: &mut Random) -> f64 {
    random.below(1 << 20) as f64 / f64::from(1 << 20)
}

#[allow(clippy::cast_precision_loss, reason = "counts of a run stay far below 2^53")]
fn summarise(mut seen: Received) -> Result<Found> {
    let (began, moved) = seen.began.context("nothing came")?;
    let latencies = &mut seen.latencies;
    let count = latencies.len();
    ensure!(count > 1, "too little came");
    latencies.sort_by(f64::total_cmp);
    Ok(Found {
        rate: (count - 1) as f64 / (seen.ended - began) * 1000.0,
        median_ns: latencies[count / 2],
        p99_ns: latencies[count * 99 / 100],
        lines_in_per_message: (seen.moved.lines_in - moved.lines_in) as f64 / count as f64,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINK: Link = Link { invalidate_ns: 80.0, write_ns: 250.0, ..Link::SOURCED };

    #[test]
    fn every_policy_delivers_everything_and_each_step_of_the_paper_is_faster() {
        let rate =
            |policy| run(&LINK, Traffic { messages: 5_000, ..Traffic::flat_out(policy) }).unwrap().rate;
        let [bypass, naive, consumed, prefetched, adaptive] = [
            ReceivePolicy::Bypass,
            ReceivePolicy::NaivePrefetch,
            ReceivePolicy::InvalidateConsumed,
            ReceivePolicy::InvalidatePrefetched,
            ReceivePolicy::Adaptive,
        ]
        .map(rate);
        assert!(naive > 2.0 * bypass, "{naive} against {bypass}");
        assert!(consumed > 4.0 * naive, "{consumed} against {naive}");
        assert!(prefetched > 4.0 * naive && adaptive > 4.0 * naive);
    }

    #[test]
    fn a_run_repeats_exactly() {
        let traffic = Traffic { messages: 3_000, ..Traffic::at(ReceivePolicy::Adaptive, 14.0) };
        let (first, second) = (run(&LINK, traffic).unwrap(), run(&LINK, traffic).unwrap());
        assert_eq!(first.median_ns.to_bits(), second.median_ns.to_bits());
        assert_eq!(first.rate.to_bits(), second.rate.to_bits());
    }
}
