// The page: looks at the pod every other second and whenever something happens, and shows it.

import { follow, forgetToken, get, hasToken, takeUnmeasured } from "./api.js";
import { onChange } from "./confirm.js";
import { show } from "./details.js";
import { draw } from "./picture.js";
import { measure } from "./rates.js";
import { add, forget, redraw } from "./timeline.js";

const LOOK_EVERY_MS = 2000;
const SOON_MS = 100;
const [picture, details, timeline, filter, problem] =
  ["picture", "details", "timeline", "filter", "problem"].map((id) => document.getElementById(id));
let pod = { hosts: [], devices: [], instances: [], controllers: [], balance: {} };
let chosen = null;
let looking = null;
let again = false;
let timer = null;

function choose(it) {
  chosen = chosen && chosen.kind === it.kind && chosen.name === it.name ? null : it;
  location.hash = chosen ? `${chosen.kind}/${chosen.name}` : "";
  render();
}

// What an event is about, as long as it is there.
function subjectOf(name) {
  const [host] = name.split("/");
  const there = [["instance", pod.instances, name], ["device", pod.devices, name], ["host", pod.hosts, host]];
  const found = there.find(([, all, name]) => all.some((it) => it.name === name));
  return found ? { kind: found[0], name: found[2] } : null;
}

function chosenByAddress() {
  const [kind, ...name] = decodeURIComponent(location.hash.slice(1)).split("/");
  chosen = ["host", "device", "instance"].includes(kind) && name.length > 0 ? { kind, name: name.join("/") } : null;
}

function render() {
  draw(picture, pod, chosen, choose);
  show(details, pod, chosen);
  document.getElementById("empty").hidden = pod.hosts.length > 0;
  const count = (number, what) => `${number} ${what}${number === 1 ? "" : "s"}`;
  document.getElementById("summary").textContent =
    [count(pod.hosts.length, "host"), count(pod.devices.length, "device"), count(pod.instances.length, "instance")].join(", ");
  const unknown = document.getElementById("unknown");
  unknown.textContent = pod.unmeasured ?? pod.balance.unknown_here ?? "";
  unknown.hidden = unknown.textContent === "";
  document.getElementById("controllers").textContent = controllers(pod.controllers);
  document.getElementById("forget").hidden = !hasToken();
}

// Which of them leads, what each speaks, and who is behind.
function controllers(all) {
  const told = all.map((it) => [
    `${it.replica}${it.leads ? " leads" : it.outside ? " votes" : ""}`, it.protocol && `speaks ${it.protocol}`, it.behind_changes > 0 && `${it.behind_changes} changes behind`,
  ].filter(Boolean).join(", "));
  return told.length === 0 ? "" : `${told.length === 1 ? "controller" : "controllers"} ${told.join("; ")}`;
}

async function look() {
  const abort = AbortSignal.timeout(10000);
  const [hosts, devices, instances, controllers, balance] =
    await Promise.all(["hosts", "devices", "instances", "controllers", "balance"].map((what) => get(`v1/${what}`, abort)));
  measure(devices.devices, performance.now());
  pod = {
    hosts: hosts.hosts, devices: devices.devices, instances: instances.instances, controllers: controllers.controllers, balance,
    unmeasured: takeUnmeasured(),
  };
  render();
}

// One look at a time, and one more if something happened meanwhile.
function lookSoon(after = SOON_MS) {
  if (looking) {
    again = true;
    return;
  }
  clearTimeout(timer);
  timer = setTimeout(async () => {
    looking = look();
    try {
      await looking;
      problem.hidden = true;
    } catch (error) {
      problem.textContent = `What is shown may be old: ${error.message}`;
      problem.hidden = false;
    }
    looking = null;
    const next = again ? SOON_MS : LOOK_EVERY_MS;
    again = false;
    lookSoon(next);
  }, after);
}

function theme() {
  const next = { "": "dark", dark: "light", light: "" };
  const apply = (wanted) => {
    if (wanted) document.documentElement.dataset.theme = wanted;
    else delete document.documentElement.dataset.theme;
  };
  apply(localStorage.getItem("wadi-theme") ?? "");
  document.getElementById("theme").addEventListener("click", () => {
    const wanted = next[document.documentElement.dataset.theme ?? ""];
    localStorage.setItem("wadi-theme", wanted);
    apply(wanted);
  });
}

const STATES = { live: "live", lost: "no connection to the controller", waiting: "connecting" };

async function history() {
  const { events } = await get("v1/events?after=0");
  // Read anew, it is all there is: after a restore from a backup what was told before has not happened.
  forget(timeline);
  for (const event of events) add(timeline, filter.value, event);
  return events.at(-1)?.sequence ?? 0;
}

async function begin() {
  theme();
  chosenByAddress();
  addEventListener("hashchange", () => { chosenByAddress(); render(); });
  filter.addEventListener("change", () => redraw(timeline, filter.value));
  timeline.addEventListener("click", (event) => {
    const name = event.target.dataset.subject;
    if (name === undefined) return;
    event.preventDefault();
    const it = subjectOf(name);
    if (it && (it.kind !== chosen?.kind || it.name !== chosen?.name)) choose(it);
  });
  document.getElementById("forget").addEventListener("click", () => { forgetToken(); location.reload(); });
  onChange(lookSoon);
  lookSoon(0);
  let last = 0;
  try {
    last = await history();
  } catch (error) {
    problem.textContent = error.message;
    problem.hidden = false;
  }
  follow(last, {
    onEvent: (event) => { add(timeline, filter.value, event); lookSoon(); },
    onState: (state) => {
      const connection = document.getElementById("connection");
      connection.dataset.state = state;
      connection.textContent = STATES[state];
    },
    onGone: () => { lookSoon(); return history(); },
  });
}

begin();
