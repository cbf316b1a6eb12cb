//! The page in a real browser: Chromium without a screen, driven over its debugging pipe.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::time::Duration;

use crate::browser::Browser;
use crate::support::{Pod, RunningController, nic, vm};
use cxl_pool::Role;
use pod_api::{ByteSize, CreateVolume};
use pod_protocol::protocol::Protocol;

/// A pod with an instance, and where its page is.
fn pod(lines: &str) -> (Pod, String) {
    let mut pod = Pod::demo();
    // One more NIC to go to.
    pod.join(1, Role::NetBackend, vec![nic("nic9", false)]);
    pod.stop_controller();
    let config = pod.config_with(&format!("listen-tcp = '127.0.0.1:0'\n{lines}"));
    let controller = RunningController::start(&config).expect("a controller");
    let address = controller.address.expect("it listens");
    pod.controller = Some(controller);
    let client = pod.client();
    let volume = CreateVolume::new("vol0", ByteSize::new(4 << 20));
    client.create_volume(&volume).expect("there is room");
    let made = client.create_instance(&vm("vm1", &["vol0"]), Duration::from_secs(30)).expect("there is room");
    assert!(made.ready, "{made:?}");
    (pod, format!("http://{address}/"))
}

#[test]
fn the_pod_is_shown_changed_and_followed() {
    let Some(mut browser) = Browser::start() else { return };
    let (pod, page) = pod("");
    let client = pod.client();
    browser.open(&page);
    browser.wait("document.querySelectorAll('#picture [data-key^=\"device\"]').length === 4", "four devices");
    browser.wait("document.querySelector('#connection').dataset.state === 'live'", "events to be followed");
    assert_eq!(
        browser.text("document.querySelector('#summary').textContent"),
        "3 hosts, 4 devices, 1 instance"
    );
    let nic = client.instance("vm1").expect("it is there").nics[0].clone();
    let uses = |browser: &mut Browser, kind: &str| {
        browser.text(&format!("[...document.querySelectorAll('path.{kind}')].map(it => it.dataset.from + ' ' + it.dataset.to).join()"))
    };
    assert_eq!(uses(&mut browser, "nic"), format!("vm1 {}", nic.nic));
    assert_eq!(uses(&mut browser, "disk"), "vm1 h2/ssd0");
    let backup = nic.backup.expect("a backup");
    assert_eq!(uses(&mut browser, "backup"), format!("vm1 {backup}"));

    // Which versions are spoken, and how devices are loaded.
    assert_eq!(
        browser.text("document.querySelector('#controllers').textContent"),
        format!("controller 0 leads, speaks {}", Protocol::CURRENT)
    );

    // Click through to the instance, and let its NIC fail over: asked first, and not done when the answer is no.
    let click = |browser: &mut Browser, what: &str| {
        browser.run(&format!(
            "{{ const it = {what}; it.dispatchEvent(new MouseEvent('click', {{bubbles: true}})); }}"
        ));
    };
    let labelled = |label: &str| {
        format!("[...document.querySelectorAll('#details button')].find(it => it.textContent === '{label}')")
    };
    click(&mut browser, "document.querySelector('[data-key=\"instance vm1\"]')");
    browser.wait(&format!("{} !== undefined", labelled("fail over")), "the instance's details");
    click(&mut browser, &labelled("fail over"));
    browser.wait("!document.querySelector('#yes').disabled", "that it could be done");
    click(&mut browser, "document.querySelector('#confirm [value=no]')");
    browser.wait("!document.querySelector('#confirm').open", "the question to go");
    assert_eq!(client.instance("vm1").expect("it is there").nics[0].nic, nic.nic, "nobody said yes");
    click(&mut browser, &labelled("fail over"));
    browser.wait("!document.querySelector('#yes').disabled", "that it could be done");
    click(&mut browser, "document.querySelector('#yes')");
    browser
        .wait(&format!("document.querySelector('path.nic')?.dataset.to === '{backup}'"), "the lease to move");
    assert_eq!(client.instance("vm1").expect("it is there").nics[0].nic, backup);
    browser.wait(
        "document.querySelector('#timeline li[data-kind=migrated]') !== null",
        "the move in the timeline",
    );

    click(&mut browser, "document.querySelector('[data-key=\"device h2/nic0\"]')");
    browser.wait(&format!("{} !== undefined", labelled("drain")), "the device's details");
    browser.wait(
        "document.querySelector('#details').textContent.includes('not overloaded; moves are advised only')",
        "its load",
    );
    click(&mut browser, &labelled("drain"));
    browser.wait("!document.querySelector('#yes').disabled", "that it could be done");
    click(&mut browser, "document.querySelector('#yes')");
    browser.wait(
        "document.querySelector('[data-key=\"device h2/nic0\"] .state').textContent === 'drained'",
        "it to be drained",
    );
    assert!(client.device("h2", "nic0").expect("it is there").drained);

    let against = browser.text("document.querySelector('#details .against').textContent");
    assert_eq!(against, "not schedulable: it is to be empty");
    click(&mut browser, "document.querySelector('[data-key=\"instance vm1\"]')");
    browser.wait("document.querySelector('#details summary') !== null", "the instance's details");
    click(&mut browser, "document.querySelector('#details summary')");
    browser.wait(
        "document.querySelector('#details details').textContent.includes('h3/nic0: active')",
        "why it is there",
    );

    // What others do is seen too.
    client.drain_device("h2", "nic0", false).expect("it is there");
    browser.wait(
        "document.querySelector('#timeline li[data-kind=drain-ended]') !== null",
        "the end of the drain",
    );
    let troubles = browser.text("{ const it = document.querySelector('#filter'); it.value = 'troubles'; it.dispatchEvent(new Event('change')); document.querySelectorAll('#timeline li.move').length }");
    assert_eq!(troubles, "0");
    for theme in ["dark", "light", "undefined"] {
        click(&mut browser, "document.querySelector('#theme')");
        assert_eq!(browser.text("String(document.documentElement.dataset.theme)"), theme);
    }
    assert_eq!(browser.complaints(), Vec::<String>::new());
}

#[test]
fn a_token_is_asked_for_and_roles_hold() {
    let Some(mut browser) = Browser::start() else { return };
    let directory = tempfile::tempdir().expect("a directory");
    let tokens = directory.path().join("tokens");
    let made = Command::new(env!("CARGO_BIN_EXE_podctl")).args(["token", "eve", "--role", "viewer"]).output();
    let made = String::from_utf8(made.expect("podctl starts").stdout).expect("text");
    let token = made.lines().nth(1).expect("a token");
    fs::write(&tokens, format!("[[token]]{}", made.split_once("[[token]]").expect("lines").1))
        .expect("written");
    fs::set_permissions(&tokens, fs::Permissions::from_mode(0o600)).expect("a mode");
    let (_pod, page) = pod(&format!("tokens = '{}'", tokens.display()));
    browser.open(&page);
    let say = |browser: &mut Browser, token: &str| {
        browser.wait("document.querySelector('#ask-token').open", "to be asked for a token");
        browser.run(&format!("document.querySelector('#token').value = '{token}'; document.querySelector('#ask-token button').click()"));
    };
    say(&mut browser, "wrong");
    say(&mut browser, token);
    browser.wait("document.querySelector('[data-key=\"host h2\"]') !== null", "the hosts");
    browser.run("document.querySelector('[data-key=\"host h2\"]').dispatchEvent(new MouseEvent('click', {bubbles: true}))");
    let drain = "[...document.querySelectorAll('#details button')].find(it => it.textContent === 'drain')";
    browser.wait(&format!("{drain} !== undefined"), "the host's details");
    browser.run(&format!("{drain}.click()"));
    browser.wait("!document.querySelector('#refusal').hidden", "the refusal");
    let refusal = browser.text("document.querySelector('#refusal').textContent");
    assert!(refusal.contains("viewer"), "{refusal}");
    assert_eq!(browser.text("String(document.querySelector('#yes').disabled)"), "true");
}
