//! The NICs over which a port sends at the same time, its rails, and which flow goes over which of them.
//!
//! The rails are ports of one link aggregation group, so the switch takes an address from any of them. The rail of a packet
//! follows from the queue that it comes from, or from the addresses of its flow where only one queue runs. So it changes only when
//! a rail dies or comes back, and then only once nothing is under way that could be overtaken: what a dead rail gives back
//! goes over another one before anything new, and a rail that comes back gets nothing before all that went elsewhere was
//! acknowledged. Flows whose rail lives stay where they are.

use std::time::{Duration, Instant};

use cxl_pool::Memory;
use pod_protocol::ids::{ChannelId, LeaseGeneration};
use pod_protocol::objects::{PortObject, RAILS_MAX, RailState, Route};

use super::port::Port;
use super::receive::Channel;
use super::under_way::UnderWay;
use crate::counters::DropReason;
use crate::message::{NetMessage, REOPENS};

/// After how long a rail is tried again that gave packets back, and of which the controller says that it is up.
const TRY_AGAIN_AFTER: Duration = Duration::from_millis(100);
/// How long packets wait where no rail works. By then the controller has moved the instance, if it can.
const DEAD_HOLD: Duration = Duration::from_secs(1);

/// Rails by their numbers, as bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct RailSet(u8);

const _: () = assert!(RAILS_MAX <= u8::BITS as usize);

impl RailSet {
    pub(super) const NONE: Self = Self(0);
    /// All that there may be.
    pub(super) const ALL: Self = Self(u8::MAX);

    pub(super) const fn of(rail: u8) -> Self {
        Self(1 << rail)
    }

    #[inline]
    pub(super) const fn contains(self, rail: u8) -> bool {
        self.0 >> rail & 1 == 1
    }

    const fn with(self, rail: u8) -> Self {
        Self(self.0 | 1 << rail)
    }

    const fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// The one that has so many smaller ones before it, round and round.
    fn nth(self, number: u32) -> Option<u8> {
        let mut left = number.checked_rem(self.0.count_ones())?;
        self.iter().find(|_| {
            let found = left == 0;
            left = left.wrapping_sub(1);
            found
        })
    }

    pub(super) fn iter(self) -> impl Iterator<Item = u8> {
        (0..8).filter(move |rail| self.contains(*rail))
    }
}

#[derive(Clone, Copy, Debug)]
struct Rail {
    route: Route,
    state: RailState,
    /// When it last gave a packet back.
    gave_back: Option<Instant>,
    /// It has given packets back, and does so until it is told that we know.
    closed: bool,
}

/// The rails of a port; one, unless its NIC is in a link aggregation group.
#[derive(Debug)]
pub(super) struct Rails {
    all: Vec<Rail>,
    /// Its NIC is in no group.
    single: bool,
    /// Those that flows are spread over.
    spread_over: RailSet,
    /// Those of them over which packets are announced now.
    open: RailSet,
    /// Flows are told apart by their queues.
    by_queue: bool,
    /// Flows may have other rails from now on, and nothing was taken since.
    unsettled: bool,
    /// Since when none works.
    dead_since: Option<Instant>,
}

/// What can be done with packets of the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Steering {
    /// They can be taken.
    Ready,
    /// What is under way comes first.
    Settling,
    /// No rail has worked for long: they are lost, as on any cable.
    Dead,
}

impl Rails {
    pub(super) fn new(object: &PortObject) -> Self {
        let rail = |route, state| Rail { route, state, gave_back: None, closed: false };
        let mut all: Vec<Rail> =
            object.rails.iter().take(RAILS_MAX).map(|it| rail(it.route, it.state)).collect();
        if all.is_empty() {
            all.push(rail(object.active, RailState::Up));
        }
        let mut this = Self {
            single: object.rails.is_empty(),
            all,
            spread_over: RailSet::NONE,
            open: RailSet::NONE,
            by_queue: false,
            unsettled: true,
            dead_since: None,
        };
        this.spread_over = this.usable();
        this.open = this.spread_over;
        this
    }

    /// Those that the controller says are up; all, if none is.
    fn usable(&self) -> RailSet {
        let mut all = RailSet::NONE;
        let mut up = RailSet::NONE;
        for (number, rail) in self.numbered() {
            all = all.with(number);
            if rail.state == RailState::Up {
                up = up.with(number);
            }
        }
        if up == RailSet::NONE { all } else { up }
    }

    fn numbered(&self) -> impl Iterator<Item = (u8, &Rail)> {
        (0..).zip(&self.all)
    }

    /// Whether there is no choice.
    #[inline]
    pub(super) fn is_single(&self) -> bool {
        self.single
    }

    /// Those over which packets are announced now.
    #[inline]
    pub(super) fn open(&self) -> RailSet {
        self.open
    }

    pub(super) fn route(&self, rail: u8) -> Option<Route> {
        self.all.get(usize::from(rail)).map(|it| it.route)
    }

    /// The rail with this route.
    #[inline]
    pub(super) fn find(&self, route: Route) -> Option<u8> {
        self.numbered().find(|(_, rail)| rail.route == route).map(|(number, _)| number)
    }

    /// Those over a channel.
    pub(super) fn over(&self, channel: ChannelId) -> RailSet {
        let over = self.numbered().filter(|(_, rail)| rail.route.channel == channel);
        over.fold(RailSet::NONE, |all, (number, _)| all.with(number))
    }

    pub(super) fn routes(&self) -> impl Iterator<Item = Route> {
        self.all.iter().map(|rail| rail.route)
    }

    /// With which generation of the lease all of them are used.
    pub(super) fn has_generation(&self, generation: LeaseGeneration) -> bool {
        self.all.iter().all(|rail| rail.route.generation == generation)
    }

    /// Whether flows are told apart by the queues that their packets come from.
    #[inline]
    pub(super) fn is_by_queue(&self) -> bool {
        self.by_queue
    }

    /// The rail for a flow.
    #[inline]
    pub(super) fn rail_of(&self, flow: u32) -> u8 {
        if self.is_single() {
            return 0;
        }
        // There are a few.
        let count = u32::try_from(self.all.len()).unwrap_or(1);
        let own = u8::try_from(flow % count).unwrap_or(0);
        if self.spread_over.contains(own) {
            return own;
        }
        self.spread_over.nth(flow / count).unwrap_or(own)
    }

    /// A rail gave a packet back.
    pub(super) fn note_given_back(&mut self, rail: u8) {
        if let Some(rail) = self.all.get_mut(usize::from(rail)) {
            rail.gave_back = Some(Instant::now());
            rail.closed = true;
        }
    }

    /// Whether the time goes by after which packets are given up that no rail takes.
    pub(super) fn waits_for_one(&self) -> bool {
        self.dead_since.is_some_and(|since| since.elapsed() <= DEAD_HOLD + TRY_AGAIN_AFTER)
    }

    /// Takes over rails in the place of others, and says which number each of those has now.
    fn replace(&mut self, new: Self) -> [Option<u8>; RAILS_MAX] {
        let mut numbers = [None; RAILS_MAX];
        let old = std::mem::replace(self, new);
        let mut spread_over = RailSet::NONE;
        for (place, (number, before)) in numbers.iter_mut().zip(old.numbered()) {
            let Some(now) = self.find(before.route) else { continue };
            *place = Some(now);
            if old.spread_over.contains(number) {
                spread_over = spread_over.with(now);
            }
            let rail = &mut self.all[usize::from(now)];
            let came_back = before.state != RailState::Up && rail.state == RailState::Up;
            rail.gave_back = before.gave_back.filter(|_| !came_back);
            rail.closed = before.closed;
        }
        if spread_over != RailSet::NONE {
            self.spread_over = spread_over;
            self.open = spread_over.and(old.open);
        }
        self.by_queue = old.by_queue;
        self.unsettled = old.unsettled || !old.routes().eq(self.routes());
        numbers
    }

    /// Those that work. One that gave packets back is told with `reopen` that we know of all of them, before it is used again.
    fn working<M: Memory>(
        &mut self,
        channels: &mut [Channel<M>],
        under_way: &UnderWay,
        reopen: &NetMessage,
    ) -> RailSet {
        let mut working = RailSet::NONE;
        for (number, rail) in (0..).zip(&mut self.all) {
            if rail.gave_back.is_some_and(|at| at.elapsed() >= TRY_AGAIN_AFTER) {
                rail.gave_back = None;
            }
            let channel = channels.iter_mut().find(|it| it.end.object().id == rail.route.channel);
            let Some(channel) = channel.filter(|_| rail.state == RailState::Up && rail.gave_back.is_none())
            else {
                continue;
            };
            if !channel.end.ready() {
                continue;
            }
            if rail.closed && !under_way.awaits_on(RailSet::of(number)) {
                rail.closed = !channel.end.send(reopen);
            }
            if !rail.closed {
                working = working.with(number);
            }
        }
        working
    }
}

impl Port {
    /// Takes over the rails of a new object. What was announced over one that is not there any more, or where nobody answers, is
    /// announced again over another one.
    pub(super) fn change_rails(&mut self) {
        let numbers = self.rails.replace(Rails::new(&self.object));
        let known = |rail: u8| numbers.get(usize::from(rail)).copied().flatten();
        if self.rails.is_single() && known(0) == Some(0) {
            return;
        }
        self.under_way.retry = false;
        self.under_way.renumber(known);
        let gone = self.rails.numbered().filter(|(_, rail)| rail.state == RailState::Gone);
        let gone = gone.fold(RailSet::NONE, |all, (number, _)| all.with(number));
        self.under_way.send_again_on(gone);
        self.spread_waiting();
    }

    /// Gives waiting packets a rail again whose own one is not used.
    pub(super) fn spread_waiting(&mut self) {
        let Self { rails, under_way, .. } = self;
        under_way.reroute(|rail| !rails.spread_over.contains(rail), |flow| rails.rail_of(flow));
    }

    /// Gives all waiting packets a rail anew.
    pub(super) fn spread_all(&mut self) {
        let Self { rails, under_way, .. } = self;
        under_way.reroute(|_| true, |flow| rails.rail_of(flow));
    }

    /// Looks which rails work, and moves flows as soon as that keeps them in order.
    pub(super) fn steer<M: Memory>(&mut self, channels: &mut [Channel<M>]) -> Steering {
        if self.rails.is_single() {
            return Steering::Ready;
        }
        let reopen = NetMessage { sequence: REOPENS, ..self.offloads_message() };
        let working = self.rails.working(channels, &self.under_way, &reopen);
        self.rails.open = self.rails.spread_over.and(working);
        if working == RailSet::NONE {
            let since = *self.rails.dead_since.get_or_insert_with(Instant::now);
            return if since.elapsed() > DEAD_HOLD { Steering::Dead } else { Steering::Settling };
        }
        self.rails.dead_since = None;
        let lost = self.rails.spread_over.without(working);
        if lost != RailSet::NONE {
            // What it still has to give back comes before the rest of its flows.
            if self.under_way.awaits_on(lost) {
                return Steering::Settling;
            }
            let left = self.rails.open;
            self.rails.spread_over = if left == RailSet::NONE { working } else { left };
            self.rails.open = self.rails.spread_over;
            self.spread_waiting();
        }
        let queues = self.rings.iter().skip(1).step_by(2).flatten();
        let running = queues.filter(|ring| ring.is_enabled() && !ring.is_broken());
        let by_queue = running.count() > 1;
        let Rails { spread_over, by_queue: before, unsettled, .. } = self.rails;
        if spread_over != working || by_queue != before || unsettled {
            if self.under_way.waiting() > 0 || self.under_way.awaits() {
                return Steering::Settling;
            }
            self.rails.spread_over = working;
            self.rails.open = working;
            self.rails.by_queue = by_queue;
            self.rails.unsettled = false;
        }
        Steering::Ready
    }

    /// Drops what waits: no rail has worked for long.
    pub(super) fn drop_waiting(&mut self) {
        for _ in 0..self.under_way.drop_waiting() {
            self.counters.count_drop(DropReason::LinkDown);
        }
    }

    /// Whether it sends over this channel.
    pub(super) fn sends_over(&self, channel: ChannelId) -> bool {
        self.rails.over(channel) != RailSet::NONE
    }
}
