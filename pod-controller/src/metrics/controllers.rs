//! Whether anything can be decided.

use super::Page;
use crate::controller::Handle;

pub(super) fn add(page: &mut Page, handle: &Handle) {
    let office = handle.office();
    let has_leader = "Whether a controller leads, as far as this one knows";
    page.number("controller_has_leader", has_leader, office.has_leader.into());
    page.number("controller_leads", "Whether this controller is the one that leads", office.leads.into());
    let available = "Whether what is decided can be kept, as far as this controller goes";
    page.number("store_available", available, handle.store_away().is_none().into());
    let behind = "Changes that a controller replica has yet to get; whoever leads knows";
    let behind = page.gauges("controller_behind_changes", behind);
    if office.leads {
        for controller in handle.controllers() {
            let labels = vec![("replica", controller.replica.to_string())];
            behind.get_or_create(&labels).set(controller.behind_changes.unwrap_or(0));
        }
    }
}
