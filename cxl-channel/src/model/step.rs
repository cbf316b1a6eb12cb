//! What one side does between two moments at which the other one may come in.

use super::shared::Shared;

/// One step of one side: what was done before is repeated without effect, then comes one load or fence that the other side
/// could notice, then all up to the next one.
pub(super) struct Step {
    pub(super) shared: Shared,
    pub(super) host: usize,
    /// What the call that is under way has loaded.
    pub(super) loaded: Vec<u64>,
    /// How many operations of the call are done.
    pub(super) done: usize,
    /// Which snapshot the load sees, counted from the oldest that it may see.
    pub(super) choice: Option<usize>,
    /// Of how many it could have chosen.
    pub(super) alternatives: usize,
    /// The call met a second such load or fence: what it does from there on is not real.
    pub(super) suspended: bool,
    pub(super) broken_rule: Option<&'static str>,
    operation: usize,
    load: usize,
}

impl Step {
    pub(super) fn new(shared: Shared, host: usize, choice: Option<usize>) -> Self {
        Self {
            shared,
            host,
            loaded: Vec::new(),
            done: 0,
            choice,
            alternatives: 1,
            suspended: false,
            broken_rule: None,
            operation: 0,
            load: 0,
        }
    }

    /// Before a call is made, or made again.
    pub(super) fn rewind(&mut self) {
        (self.operation, self.load, self.suspended) = (0, 0, false);
    }

    /// After a call was made to its end.
    pub(super) fn finish_call(&mut self) {
        (self.done, self.loaded) = (0, Vec::new());
    }

    fn may_run(&mut self, noticeable: bool) -> Option<usize> {
        if self.suspended {
            return None;
        }
        self.operation += 1;
        if self.operation <= self.done {
            return None;
        }
        let choice = if noticeable {
            let Some(choice) = self.choice.take() else {
                self.suspended = true;
                return None;
            };
            choice
        } else {
            0
        };
        self.done = self.operation;
        Some(choice)
    }

    pub(super) fn load(&mut self, line: usize, word: usize) -> u64 {
        if !self.suspended && self.load < self.loaded.len() {
            self.operation += 1;
            self.load += 1;
            return self.loaded[self.load - 1];
        }
        let own = Shared::writer(line) == self.host;
        let Some(choice) = self.may_run(!own) else { return 0 };
        if !own {
            self.alternatives = self.shared.lines[line].snapshots.len();
            self.shared.see(line, choice);
        }
        let line = &self.shared.lines[line];
        let value = line.snapshots[if own { line.newest() } else { 0 }].words[word];
        self.loaded.push(value);
        self.load += 1;
        value
    }

    pub(super) fn store(&mut self, line: usize, word: usize, value: u64) {
        if self.may_run(false).is_some() {
            if Shared::writer(line) != self.host {
                self.broken_rule = Some("a line was written that belongs to the other side");
                return;
            }
            if self.shared.is_stale(line) {
                self.broken_rule = Some("a line was written of which something older may be cached");
                return;
            }
            self.shared.store(line, word, value);
        }
    }

    pub(super) fn write_back(&mut self, line: usize) {
        if self.may_run(false).is_some() && Shared::writer(line) == self.host {
            let line = &mut self.shared.lines[line];
            line.written_back = line.newest();
        }
    }

    pub(super) fn flush(&mut self, line: usize) {
        if self.may_run(false).is_some() && Shared::writer(line) == self.host {
            self.shared.flush(line);
            let line = &mut self.shared.lines[line];
            line.written_back = line.newest();
        }
    }

    pub(super) fn invalidate(&mut self, line: usize) {
        if self.may_run(false).is_some() {
            if Shared::writer(line) == self.host {
                self.broken_rule = Some("a side invalidated a line of its own");
                return;
            }
            let line = &mut self.shared.lines[line];
            line.invalidated = line.invalidated.max(line.held);
        }
    }

    pub(super) fn full_fence(&mut self) {
        // What is pending depends on this side only, so that a fence that changes nothing is so in every order.
        let (host, done) = (self.host, self.operation < self.done);
        let noticeable = !done && self.shared.fence_changes_something(host);
        if self.may_run(noticeable).is_some() {
            self.shared.full_fence(host);
        }
    }
}
