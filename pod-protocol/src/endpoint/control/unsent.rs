//! What is yet to be told to the controller.

use std::collections::VecDeque;

use crate::reports::Report;

/// Reports in the order in which they are told. A controller that takes nothing does not have it grow with every change of a device
/// that a guest can bring about.
#[derive(Debug, Default)]
pub(super) struct Unsent(VecDeque<Report>);

impl Unsent {
    /// How a device is attached takes the place of how it was before. Of links and devices each loss counts.
    pub(super) fn push(&mut self, report: Report) {
        if let Report::Attachment { lease: of, .. } = report {
            self.0.retain(|known| !matches!(known, Report::Attachment { lease, .. } if *lease == of));
        }
        self.0.push_back(report);
    }

    pub(super) fn first(&self) -> Option<&Report> {
        self.0.front()
    }

    pub(super) fn first_is_sent(&mut self) {
        self.0.pop_front();
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}

impl FromIterator<Report> for Unsent {
    fn from_iter<T: IntoIterator<Item = Report>>(reports: T) -> Self {
        Self(reports.into_iter().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::LeaseId;

    #[test]
    fn of_each_lease_only_the_newest_attachment_waits_and_of_links_all() {
        let attached = |lease, connected| Report::Attachment {
            lease: LeaseId::new(lease).expect("small"),
            connected,
            running: false,
            write_through: false,
            untold: false,
        };
        let link = |up| Report::Link { device: "nic0".into(), up, reason: "carrier".into() };
        let mut unsent = Unsent::default();
        unsent.push(attached(2, true));
        for number in 0..10_000 {
            unsent.push(attached(1, number % 2 == 0));
        }
        unsent.push(link(false));
        unsent.push(link(false));
        assert!(unsent.0.iter().eq(&[attached(2, true), attached(1, false), link(false), link(false)]));
    }
}
