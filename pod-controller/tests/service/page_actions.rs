//! Everything that can be done by the page is done in a real browser, and what the page follows is followed for as long as it is there.

use cxl_pool::Role;
use pod_api::DeviceHealth;
use pod_protocol::reports::Report;

use crate::browser::Browser;
use crate::page::{click, page_that_follows, pod};
use crate::support::until;

/// A button of what was chosen.
fn labelled(label: &str) -> String {
    format!("[...document.querySelectorAll('#details button')].find(it => it.textContent === '{label}')")
}

fn choose(browser: &mut Browser, what: &str) {
    let it = format!("document.querySelector('[data-key=\"{what}\"]')");
    browser.wait(&format!("{it} !== null"), what);
    click(browser, &it);
    let (kind, name) = what.split_once(' ').expect("two words");
    let title = if kind == "device" { name.to_owned() } else { what.to_owned() };
    browser.wait(&format!("document.querySelector('#details h2')?.textContent.endsWith('{title}')"), what);
}

/// Presses a button, and says yes to what it asks.
fn carry_out(browser: &mut Browser, label: &str, question: &str) {
    ask(browser, label, question);
    click(browser, "document.querySelector('#yes')");
    browser.wait("!document.querySelector('#confirm').open", "the question to go");
}

fn ask(browser: &mut Browser, label: &str, question: &str) {
    browser.wait(&format!("{} !== undefined", labelled(label)), label);
    click(browser, &labelled(label));
    browser.wait("!document.querySelector('#yes').disabled", "that it could be done");
    assert_eq!(browser.text("document.querySelector('#question').textContent"), question);
}

#[test]
fn each_action_does_what_it_asks() {
    let Some(mut browser) = Browser::start() else { return };
    let (mut pod, page) = pod("flaps-max = 1");
    for role in [Role::NetFrontend, Role::BlkFrontend] {
        pod.join(3, role, Vec::new());
    }
    let client = pod.client();
    browser.open(&page);

    // The instance gets ready to move, and stays.
    choose(&mut browser, "instance vm1");
    let row = "[...document.querySelectorAll('#details .actions')].find(it => it.textContent.includes('migrate to'))";
    browser
        .wait(&format!("[...({row}?.querySelectorAll('option') ?? [])].some(it => it.value === 'h3')"), "h3");
    browser.run(&format!("{row}.querySelector('select').value = 'h3'"));
    carry_out(&mut browser, "migrate to", "Move vm1 to h3?");
    let moves = || client.instance("vm1").expect("it is there").migration.map(|it| it.to);
    until("h3 to get ready", || (moves().as_deref() == Some("h3")).then_some(()));
    carry_out(&mut browser, "stay", "Give up the move of vm1?");
    until("the end of it", || moves().is_none().then_some(()));

    // A host is emptied, and used again.
    choose(&mut browser, "host h3");
    carry_out(&mut browser, "drain", "Drain all devices of h3?");
    let drained = || client.host("h3").expect("it is there").drained;
    until("it to be drained", || drained().then_some(()));
    carry_out(&mut browser, "use again", "Use all devices of h3 again?");
    until("it to be used again", || (!drained()).then_some(()));

    // A lease comes back to the NIC that it had to leave.
    let nic = || client.instance("vm1").expect("it is there").nics[0].nic.clone();
    let link =
        |device: &str, up| Report::Link { device: device.to_owned(), up, reason: "carrier".to_owned() };
    let home = nic();
    assert_eq!(home, "h1/nic9", "local first");
    pod.endpoint(1, Role::NetBackend).reporter.report(link("nic9", false));
    until("the lease to leave", || (nic() != home).then_some(()));
    pod.endpoint(1, Role::NetBackend).reporter.report(link("nic9", true));
    until("the link to be there", || {
        client.device("h1", "nic9").ok().filter(|it| it.health == DeviceHealth::Up)
    });
    choose(&mut browser, &format!("device {home}"));
    carry_out(&mut browser, "fail back", &format!("Bring leases back to {home}?"));
    until("it to come back", || (nic() == home).then_some(()));

    // A link that came and went is trusted again.
    let health = || client.device("h3", "nic0").expect("it is there").health;
    for _ in 0..2 {
        pod.endpoint(3, Role::NetBackend).reporter.report(link("nic0", false));
        until("the link to be lost", || (health() == DeviceHealth::Down).then_some(()));
        pod.endpoint(3, Role::NetBackend).reporter.report(link("nic0", true));
        until("the link to be there", || (health() != DeviceHealth::Down).then_some(()));
    }
    until("the link not to be trusted", || (health() == DeviceHealth::Held).then_some(()));
    choose(&mut browser, "device h3/nic0");
    carry_out(&mut browser, "trust the link", "Trust the link of h3/nic0 again?");
    until("it to be trusted", || (health() == DeviceHealth::Up).then_some(()));
    assert_eq!(browser.complaints(), Vec::<String>::new());
}

#[test]
fn what_has_changed_since_somebody_looked_is_left_alone() {
    let Some(mut browser) = Browser::start() else { return };
    let (pod, page) = pod("");
    let client = pod.client();
    browser.open(&page);
    choose(&mut browser, "instance vm1");
    let nic = client.instance("vm1").expect("it is there").nics[0].nic.clone();
    let backup = client.instance("vm1").expect("it is there").nics[0].backup.clone().expect("a backup");
    ask(&mut browser, "fail over", &format!("Fail net0 of vm1 over to {backup}?"));
    client.prioritize_instance("vm1", 300).expect("it is there");
    click(&mut browser, "document.querySelector('#yes')");
    browser.wait("!document.querySelector('#refusal').hidden", "the refusal");
    let refusal = browser.text("document.querySelector('#refusal').textContent");
    assert!(refusal.contains("resourceVersion"), "{refusal}");
    assert_eq!(client.instance("vm1").expect("it is there").nics[0].nic, nic);
}

#[test]
fn who_follows_a_controller_that_starts_again_or_falls_silent_follows_it_again() {
    let Some((mut pod, mut browser)) = page_that_follows() else { return };
    let state = |state: &str| format!("document.querySelector('#connection').dataset.state === '{state}'");
    let address = pod.controller.as_ref().and_then(|it| it.address).expect("it listens");
    pod.stop_controller();
    browser.wait(&state("lost"), "the page to notice");
    // In its place somebody answers who says nothing more, as where a host has lost power; 45 s are one of the page's turns here.
    browser.run(
        "{
            const [real, later] = [window.fetch, window.setTimeout];
            window.opened = 0;
            window.given_up = 0;
            window.setTimeout = (then, ms) => later(then, ms === 45000 ? 200 : ms);
            window.fetch = async (path, options) => {
                if (!path.includes('events/stream')) return real(path, options);
                window.opened += 1;
                options.signal.addEventListener('abort', () => { window.given_up += 1; });
                if (window.opened > 2) return real(path, options);
                return new Response(new ReadableStream({ start(it) { it.enqueue(new TextEncoder().encode(':\\n')); } }));
            };
        }",
    );
    browser.wait("window.given_up >= 2", "the page to give up who says nothing, again");
    let config = pod.config_with(&format!("listen-tcp = '{address}'"));
    pod.controller = Some(crate::support::RunningController::start(&config).expect("a controller"));
    browser.wait(&format!("window.opened > 2 && {}", state("live")), "events to be followed again");
    pod.client().drain_host("h2", true).expect("it is there");
    browser.wait("document.querySelector('#timeline li[data-kind=drain-begun]') !== null", "what happens");
}

#[test]
fn the_page_says_where_what_daemons_measure_is_missing() {
    let Some((_pod, mut browser)) = page_that_follows() else { return };
    let unknown = "document.querySelector('#unknown')";
    assert_eq!(browser.text(&format!("String({unknown}.hidden)")), "true");
    browser.run(
        "{
            const real = window.fetch;
            window.fetch = async (path, options) => {
                const answer = await real(path, options);
                if (!path.endsWith('v1/devices')) return answer;
                return new Response(answer.body, { status: answer.status, headers: { 'wadi-unmeasured': 'ask controller replica 2' } });
            };
        }",
    );
    browser
        .wait(&format!("{unknown}.textContent === 'ask controller replica 2' && !{unknown}.hidden"), "why");
}
