//! The page in a real browser: Chromium without a screen, driven over its debugging pipe.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::time::Duration;

use crate::access::restart_by_default;
use crate::browser::Browser;
use crate::support::{Pod, RunningController, nic, ssd, vm};
use cxl_pool::Role;
use pod_api::{AddReplica, ByteSize, CreateVolume, Device, DeviceKind};
use pod_protocol::protocol::Protocol;
use pod_protocol::reports::DeviceReport;

/// A pod with an instance, and where its page is.
pub(crate) fn pod(lines: &str) -> (Pod, String) {
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

pub(crate) fn click(browser: &mut Browser, what: &str) {
    browser.run(&format!(
        "{{ const it = {what}; it.dispatchEvent(new MouseEvent('click', {{bubbles: true, cancelable: true}})); }}"
    ));
}

#[test]
fn the_pod_is_shown_changed_and_followed() {
    let Some(mut browser) = Browser::start() else { return };
    let (mut pod, page) = pod("");
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
    // From there to what it is about, from wherever one is.
    click(&mut browser, "document.querySelector('[data-key=\"host h3\"]')");
    browser.wait("location.hash === '#host/h3'", "another choice");
    for _ in 0..2 {
        click(&mut browser, "document.querySelector('#timeline li[data-kind=migrated] a')");
        browser.wait("location.hash === '#instance/vm1'", "the instance that moved");
    }

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
    pod.join(3, Role::BlkBackend, vec![ssd("ssd0")]);
    browser.wait("document.querySelector('[data-key=\"device h3/ssd0\"]') !== null", "the other SSD");
    let there = AddReplica { device: Some("h3/ssd0".to_owned()), replaces: Some("h2/ssd0".to_owned()) };
    client.add_replica("vol0", &there).expect("there is room");
    browser.wait(
        "document.querySelector('#timeline li.move[data-kind=migration-prepared]') !== null",
        "the volume to move",
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

/// A browser with the page of a pod that follows its events.
pub(crate) fn page_that_follows() -> Option<(Pod, Browser)> {
    let mut browser = Browser::start()?;
    let (pod, page) = pod("");
    browser.open(&page);
    browser.wait("document.querySelector('#connection').dataset.state === 'live'", "events to be followed");
    Some((pod, browser))
}

#[test]
fn who_follows_goes_on_although_what_there_is_cannot_be_read() {
    let Some((_pod, mut browser)) = page_that_follows() else { return };
    // Asked to go on after event 70, the controller has no such event, and what it has cannot be read at first.
    browser.run(
        "(async () => {
            const { follow } = await import('/page/api.js');
            const real = window.fetch;
            const gone = JSON.stringify({ status: 410, type: 'events-gone', detail: 'there is no event 70' });
            window.fetch = async (path, options) => path.endsWith('stream?after=70') ? new Response(gone, { status: 410 }) : real(path, options);
            window.reads = 0;
            window.states = [];
            const onGone = async () => {
                window.reads += 1;
                if (window.reads === 1) throw new Error('no connection');
                return 0;
            };
            follow(70, { onEvent() {}, onState(state) { window.states.push(state); }, onGone });
        })()",
    );
    browser.wait("window.reads === 2 && window.states.includes('live')", "the second attempt");
}

#[test]
fn an_answer_to_an_older_question_says_nothing_of_the_next_one() {
    let Some((_pod, mut browser)) = page_that_follows() else { return };
    browser.run(
        "(async () => {
            const { confirm } = await import('/page/confirm.js');
            const real = window.fetch;
            window.held = [];
            window.fetch = (path, options) => path.endsWith('dry-run=true') ? new Promise((answer) => held.push(answer)) : real(path, options);
            const ask = (question) => confirm({ question, consequence: '', method: 'PUT', path: `v1/${question}` });
            ask('first');
            document.querySelector('#confirm [value=no]').click();
            await new Promise((next) => setTimeout(next));
            ask('second');
        })()",
    );
    browser.wait("window.held.length === 2", "two questions");
    // What is answered is at hand, so all that follows from it has followed when as many steps are done as there are at most.
    let answer = |browser: &mut Browser, number: usize, answer: &str| {
        browser.run(&format!(
            "(async () => {{ held[{number}]({answer}); for (let step = 0; step < 100; step += 1) await null; }})()"
        ));
    };
    let state = "[document.querySelector('#question').textContent, document.querySelector('#yes').disabled, \
                 document.querySelector('#refusal').hidden].join()";
    answer(&mut browser, 0, "{ ok: true }");
    assert_eq!(browser.text(state), "second,true,true", "nothing is known of it");
    answer(&mut browser, 1, "{ ok: false, status: 409, json: async () => ({ status: 409, detail: 'no' }) }");
    assert_eq!(browser.text(state), "second,true,false");
}

#[test]
fn a_nic_moves_where_somebody_says() {
    let Some(mut browser) = Browser::start() else { return };
    let (pod, page) = pod("");
    let client = pod.client();
    let nic = client.instance("vm1").expect("it is there").nics[0].clone();
    let devices = client.devices().expect("devices");
    let is_other = |it: &&Device| {
        matches!(it.kind, DeviceKind::Nic { .. })
            && it.name != nic.nic
            && Some(&it.name) != nic.backup.as_ref()
    };
    let other = devices.iter().find(is_other).expect("a third NIC").name.clone();
    browser.open(&page);
    browser.wait("document.querySelector('[data-key=\"instance vm1\"]') !== null", "the instance");
    click(&mut browser, "document.querySelector('[data-key=\"instance vm1\"]')");
    // The row of the NIC, and not the one that moves the instance.
    let row = "[...document.querySelectorAll('#details .actions')].find(it => it.textContent.includes('fail over'))";
    browser.wait(&format!("{row} !== undefined"), "the NIC's actions");
    let ask = format!(
        "{{ const row = {row}; row.querySelector('select').value = '{other}'; \
           [...row.querySelectorAll('button')].find(it => it.textContent === 'migrate to').click(); }}"
    );
    for (answer, to) in [("no", &nic.nic), ("yes", &other)] {
        browser.run(&ask);
        browser.wait("!document.querySelector('#yes').disabled", "that it could be done");
        let question = browser.text("document.querySelector('#question').textContent");
        assert_eq!(question, format!("Move net0 of vm1 to {other}?"));
        click(&mut browser, &format!("document.querySelector('#confirm [value={answer}]')"));
        browser.wait("!document.querySelector('#confirm').open", "the question to go");
        browser
            .wait(&format!("document.querySelector('path.nic')?.dataset.to === '{to}'"), "the lease there");
        let now = client.instance("vm1").expect("it is there").nics[0].clone();
        assert_eq!((&now.nic, now.lease), (to, nic.lease), "{answer}");
    }
    assert_eq!(browser.complaints(), Vec::<String>::new());
}

#[test]
fn by_default_the_page_shows_and_says_what_changes_take() {
    let Some(mut browser) = Browser::start() else { return };
    let mut pod = Pod::demo();
    let address = restart_by_default(&mut pod, "");
    browser.open(&format!("http://{address}/"));
    browser.wait("document.querySelector('[data-key=\"host h2\"]') !== null", "the hosts");
    browser.wait("document.querySelector('#connection').dataset.state === 'live'", "events to be followed");
    click(&mut browser, "document.querySelector('[data-key=\"host h2\"]')");
    let drain = "[...document.querySelectorAll('#details button')].find(it => it.textContent === 'drain')";
    browser.wait(&format!("{drain} !== undefined"), "the host's details");
    click(&mut browser, drain);
    browser.wait("!document.querySelector('#refusal').hidden", "the refusal");
    let refusal = browser.text("document.querySelector('#refusal').textContent");
    assert!(refusal.contains("podctl") && refusal.contains("controller.tokens"), "{refusal}");
    assert_eq!(browser.text("String(document.querySelector('#yes').disabled)"), "true");
    assert!(!pod.client().host("h2").expect("it is there").drained);
}

/// What WCAG 2 calls the relative luminance of a colour as browsers compute it: `rgb(22, 32, 42)`.
fn luminance(colour: &str) -> f64 {
    let numbers = colour.strip_prefix("rgb(").and_then(|it| it.strip_suffix(')'));
    let numbers = numbers.unwrap_or_else(|| panic!("{colour} is no colour that covers what is below it"));
    let channel = |it: &str| {
        let share = it.trim().parse::<f64>().expect("a number") / 255.0;
        if share <= 0.04045 { share / 12.92 } else { ((share + 0.055) / 1.055).powf(2.4) }
    };
    numbers.split(',').zip([0.2126, 0.7152, 0.0722]).map(|(it, weight)| channel(it) * weight).sum()
}

/// WCAG 2's contrast of two colours, 1 to 21.
fn contrast(one: &str, other: &str) -> f64 {
    let (one, other) = (luminance(one), luminance(other));
    (one.max(other) + 0.05) / (one.min(other) + 0.05)
}

#[test]
fn light_and_dark_can_both_be_read() {
    let Some(mut browser) = Browser::start() else { return };
    let (_pod, page) = pod("");
    browser.open(&page);
    browser.wait("document.querySelector('[data-key=\"device h2/nic0\"]') !== null", "the devices");
    let colour = |browser: &mut Browser, of: &str, property: &str| {
        browser
            .text(&format!("getComputedStyle(document.querySelector('{of}')).getPropertyValue('{property}')"))
    };
    // What is read, its colour, and what it is read on.
    let read = [
        ("body", "color", "body", "background-color"),
        ("h1", "color", "header", "background-color"),
        ("#summary", "color", "header", "background-color"),
        ("h2", "color", "section", "background-color"),
        ("#legend", "color", "section", "background-color"),
        ("#theme", "color", "#theme", "background-color"),
        ("#problem", "color", "#problem", "background-color"),
        ("#refusal", "color", "#confirm", "background-color"),
        ("svg text", "fill", "svg .box", "fill"),
        ("svg .faint", "fill", "svg .box", "fill"),
    ];
    let mut seen = std::collections::BTreeMap::new();
    // As the system says, unless somebody chose: the button goes from there to dark, light and back.
    for (prefers, clicks, expected) in [
        ("light", 0, "light"),
        ("dark", 0, "dark"),
        ("light", 1, "dark"),
        ("dark", 1, "light"),
        ("dark", 1, "dark"),
    ] {
        browser.prefer(prefers);
        for _ in 0..clicks {
            click(&mut browser, "document.querySelector('#theme')");
        }
        let mut colours = Vec::new();
        for (text, property, below, behind) in read {
            let (text_colour, behind_colour) =
                (colour(&mut browser, text, property), colour(&mut browser, below, behind));
            let contrast = contrast(&text_colour, &behind_colour);
            assert!(contrast >= 4.5, "{expected}: {text} is {text_colour} on {behind_colour}: {contrast:.2}");
            colours.push((text_colour, behind_colour));
        }
        let (front, back) = &colours[0];
        assert_eq!(luminance(front) > luminance(back), expected == "dark", "{prefers}: {front} on {back}");
        let known = seen.entry(expected).or_insert_with(|| colours.clone());
        assert_eq!(*known, colours, "{expected}, where the system prefers {prefers}");
    }
    assert_eq!(seen.len(), 2);
    assert_ne!(seen["light"], seen["dark"]);
    assert_eq!(browser.complaints(), Vec::<String>::new());
}

/// The bytes per second and the percent that the page shows, such as `1.5 MiB/s · 12 %`.
fn shown_rate(shown: &str) -> Option<(f64, f64)> {
    let (rate, percent) = shown.split_once("/s \u{b7} ")?;
    let (number, unit) = rate.split_once(' ')?;
    let unit = ["B", "KiB", "MiB", "GiB", "TiB"].iter().position(|it| *it == unit)?;
    let bytes = number.parse::<f64>().ok()? * 1024_f64.powi(i32::try_from(unit).ok()?);
    Some((bytes, percent.strip_suffix(" %")?.parse().ok()?))
}

#[test]
fn what_passes_through_a_device_is_shown_as_it_does() {
    let Some(mut browser) = Browser::start() else { return };
    let (pod, page) = pod("");
    let receive = |bytes: u64| {
        pod.endpoint(2, Role::NetBackend).held.lock().expect("no panic").receives = bytes;
    };
    browser.open(&page);
    let device = "document.querySelector('[data-key=\"device h2/nic0\"]')";
    browser.wait(&format!("{device} !== null"), "the device");
    click(&mut browser, device);
    let row = |name: &str| {
        format!(
            "[...document.querySelectorAll('#details tr')].find(it => it.firstChild.textContent === '{name}')?.lastChild.textContent"
        )
    };
    let now = row("now");
    browser.wait(&format!("{now} === '0 B/s · 0 %'"), "a NIC that does nothing");
    // Of 10 Gbit/s. How many reports come in a second is the daemon's affair.
    receive(20 << 20);
    browser.wait(&format!("!({now} ?? '0 B/s').startsWith('0 B/s')"), "what it receives");
    let both = browser.text(&format!(
        "{now} + '\\n' + [...{device}.querySelectorAll('text')].map(it => it.textContent).join('\\n')"
    ));
    let shown = both.lines().next().expect("a line");
    let (bytes, percent) = shown_rate(shown).unwrap_or_else(|| panic!("no rate: {shown}"));
    let expected = bytes * 8.0 / 10e9 * 100.0;
    assert!(bytes > 0.0 && (expected - percent).abs() <= 1.0, "{shown} of 10 Gbit/s is {expected} %");
    assert!(both.lines().skip(1).any(|line| line == shown), "it is in the picture too: {both}");
    let width = browser.text(&format!("{device}.querySelector('.load').getAttribute('width')"));
    assert!(width.parse::<f64>().expect("a width") > 0.0, "a bar of {width} for {shown}");
    receive(0);
    browser.wait(&format!("{now} === '0 B/s · 0 %'"), "the end of it");
    assert_eq!(browser.complaints(), Vec::<String>::new());
}

#[test]
fn how_busy_an_ssd_is_is_shown_and_how_full() {
    let Some(mut browser) = Browser::start() else { return };
    let (mut pod, page) = pod("");
    let mut able = ssd("ssd0");
    if let DeviceReport::Ssd { iops, bytes_per_second, .. } = &mut able {
        (*iops, *bytes_per_second) = (Some(1000), Some(1 << 30));
    }
    pod.join(3, Role::BlkBackend, vec![able]);
    let reads = |pod: &Pod, each: [u64; 2]| {
        pod.endpoint(3, Role::BlkBackend).held.lock().expect("no panic").reads = each;
    };
    browser.open(&page);
    let device = "document.querySelector('[data-key=\"device h3/ssd0\"]')";
    let picture =
        format!("[...{device}?.querySelectorAll('text') ?? []].map(it => it.textContent).join('\\n')");
    browser.wait(&format!("({picture}).includes('0 B/s · 0 %')"), "an SSD that does nothing");
    browser.wait(&format!("({picture}).includes('0 % full')"), "that nothing is on it");
    // Many small requests: few bytes, and much of what it can do.
    reads(&pod, [500, 512]);
    let percent = format!("Number(({picture}).match(/B.s · ([0-9]+) %/)?.[1] ?? 0)");
    browser.wait(&format!("{percent} > 10"), "how much of its requests that is");
    reads(&pod, [1, 1 << 30]);
    browser.wait(&format!("/[GT]iB.s/.test({picture})"), "what is read");
    browser.wait(&format!("{percent} > 10"), "how much of its bytes that is");
    let width = browser.text(&format!("{device}.querySelector('.load').getAttribute('width')"));
    assert!(width.parse::<f64>().expect("a width") > 0.0, "a bar of {width}");
    reads(&pod, [0, 0]);
    browser.wait(&format!("({picture}).includes('0 B/s · 0 %')"), "the end of it");
    assert_eq!(browser.complaints(), Vec::<String>::new());
}
