// One host, device or instance: what is true of it, and what can be done with it.

import { get } from "./api.js";
import { confirm } from "./confirm.js";
import { bytes, rate } from "./rates.js";

const escape = encodeURIComponent;
const devicePath = (name) => `v1/devices/${name.split("/").map(escape).join("/")}`;

function element(kind, text, className) {
  const it = document.createElement(kind);
  if (text !== undefined) it.textContent = text;
  if (className) it.className = className;
  return it;
}

function table(rows) {
  const it = element("table");
  for (const [name, value] of rows.filter(([, value]) => value !== undefined && value !== null && value !== "")) {
    const row = element("tr");
    row.append(element("th", name), element("td", String(value)));
    it.append(row);
  }
  return it;
}

function list(className, lines) {
  const it = element("ul", undefined, className);
  it.append(...lines.map((line) => element("li", line)));
  return it;
}

// What speaks against it; nothing if nothing does.
const against = (conditions = []) =>
  conditions.filter((it) => !it.status).map((it) => `not ${it.type}${it.message ? `: ${it.message}` : ""}`);

function button(label, action, danger) {
  const it = element("button", label, danger ? "danger" : "");
  it.type = "button";
  it.addEventListener("click", () => confirm(action));
  return it;
}

function actions(...buttons) {
  const it = element("div", undefined, "actions");
  it.append(...buttons);
  return it;
}

function drain(path, what, drained) {
  return drained
    ? button("use again", { method: "DELETE", path: `${path}/drain`, question: `Use ${what} again?`, consequence: "It may be given new leases again." })
    : button("drain", {
        method: "PUT", path: `${path}/drain`, question: `Drain ${what}?`, danger: true,
        consequence: "Nothing new is placed there, and what is there leaves in order, as far as there is somewhere to go.",
      }, true);
}

function host(pod, name) {
  const it = pod.hosts.find((host) => host.name === name);
  if (!it) return null;
  return [
    element("h2", `host ${name}`),
    list("against", against(it.conditions)),
    actions(drain(`v1/hosts/${escape(name)}`, `all devices of ${name}`, it.drained)),
    table(it.endpoints.map((endpoint) => [
      endpoint.role, [endpoint.health, endpoint.software, endpoint.protocol && `speaks ${endpoint.protocol}`].filter(Boolean).join(", "),
    ])),
    table([["instances", it.instances.join(", ")], ["devices", it.devices.join(", ")], ["labels", labels(it)], ["version", it.resourceVersion]]),
  ];
}

function device(pod, name) {
  const it = pod.devices.find((device) => device.name === name);
  if (!it) return null;
  const path = devicePath(name);
  const nic = it.type === "nic";
  const users = pod.instances.filter((instance) =>
    instance.nics.some((used) => used.nic === name) || instance.disks.some((disk) => disk.ssd.split(", ").includes(name)));
  const buttons = [drain(path, name, it.drained)];
  if (nic) {
    buttons.push(button("fail back", {
      method: "POST", path: `${path}/fail-back`, question: `Bring leases back to ${name}?`,
      consequence: "Every lease that belongs there, has moved away and finds room comes back. Nothing is lost on the way.",
    }));
  }
  if (it.health === "held") {
    buttons.push(button("trust the link", {
      method: "POST", path: `${path}/release`, question: `Trust the link of ${name} again?`, consequence: "Leases may move there at once.",
    }));
  }
  const counters = it.counters;
  return [
    element("h2", `${nic ? "NIC" : "SSD"} ${name}`),
    list("against", against(it.conditions)),
    actions(...buttons),
    table([
      ["health", it.health], ["reason", it.reason], ["driver", it.driver], ["now", rate(it)],
      ...balance(pod.balance, name, nic),
      ["speed", nic ? `${it.speed_mbps} Mbit/s, ${it.reserved_mbps} reserved` : undefined],
      ["size", nic ? undefined : `${bytes(it.size_bytes)}, ${bytes(it.used_bytes)} used`],
      ["leases", it.leases], ["standby", nic ? it.standby_leases : undefined],
      ["used by", users.map((instance) => instance.name).join(", ")],
      ["errors", counters?.errors], ["labels", labels(it)], ["version", it.resourceVersion],
    ]),
  ];
}

// Words to find something by, as they are asked for.
function labels(it) {
  return Object.entries(it.labels ?? {}).map((pair) => pair.join("=")).join(", ");
}

// Whether a device carries too much, and what would relieve it, or does.
function balance(all, name, nic) {
  const of = nic ? all : all?.volumes;
  const load = (nic ? of?.nics : of?.ssds)?.find((load) => load.name === name);
  if (!load) return [];
  const moves = of.moves.filter((move) => move.from === name);
  const does = { off: "nothing moves by itself", advise: "moves are advised only", move: "it is relieved by itself" }[of.mode];
  return [
    ["balance", `${load.overloaded ? "carries too much" : "not overloaded"}${load.copying ? ", volumes are copied" : ""}; ${does}`],
    ["would leave", moves.map((move) => `${move.volume ?? move.device} of ${move.instance} for ${move.to}`).join(", ")],
  ];
}

function instance(pod, name) {
  const it = pod.instances.find((instance) => instance.name === name);
  if (!it) return null;
  const path = `v1/instances/${escape(name)}`;
  const nodes = [
    element("h2", `instance ${name}`),
    list("against", against(it.conditions)),
    table([["host", it.host], ["type", it.instance_type], ["copies", it.copies], ["priority", it.priority], ["labels", labels(it)], ["version", it.resourceVersion]]),
  ];
  nodes.push(it.migration
    ? actions(button("stay", { method: "DELETE", path: `${path}/migration`, question: `Give up the move of ${name}?`, consequence: `It stays on ${it.host}. A VMM on ${it.migration.to} loses its devices.` }, true))
    : mover(pod.hosts.map((host) => host.name).filter((host) => host !== it.host), "migrate to", (to) => ({
        method: "POST", path: `${path}/migration`, body: { to }, version: it.resourceVersion, question: `Move ${name} to ${to}?`,
        consequence: `The daemons of ${to} get ready for it, and it goes on running on ${it.host}. Then start a VMM there that receives the guest: the leases follow.`,
      })));
  for (const nic of it.nics) {
    nodes.push(element("h3", nic.device), table([["NIC", nic.nic], ["backup", nic.backup ?? "none"], ["belongs to", nic.home], ["MAC", nic.mac], ["VMM", nic.connected ? "connected" : "not connected"]]));
    const migrate = `${path}/nics/${escape(nic.device)}/migrate`;
    const move = (to) => ({
      method: "POST", path: migrate, body: { to }, version: it.resourceVersion, question: `Move ${nic.device} of ${name} to ${to}?`,
      consequence: `Both NICs work: no packet is lost, and for a few seconds it still receives from ${nic.nic}.`,
    });
    const others = pod.devices.filter((device) => device.type === "nic" && device.name !== nic.nic && device.health === "up");
    const row = mover(others.map((device) => device.name), "migrate to", move);
    if (nic.backup) {
      row.append(button("fail over", {
        ...move(nic.backup), danger: true, question: `Fail ${nic.device} of ${name} over to ${nic.backup}?`,
        consequence: `It leaves ${nic.nic} for its backup, as it would by itself if ${nic.nic} failed.`,
      }, true));
    }
    nodes.push(row);
  }
  for (const disk of it.disks) {
    nodes.push(element("h3", disk.device), table([["volume", disk.volume], ["SSD", disk.ssd], ["VMM", disk.connected ? "connected" : "not connected"]]));
  }
  const why = element("details");
  why.append(element("summary", "why there?"));
  why.addEventListener("toggle", () => why.open && explain(path, why), { once: true });
  nodes.push(why);
  return nodes;
}

function mover(places, label, action) {
  const row = actions();
  if (places.length === 0) return row;
  const select = element("select");
  select.append(...places.map((place) => element("option", place)));
  select.setAttribute("aria-label", label);
  const go = element("button", label);
  go.type = "button";
  go.addEventListener("click", () => confirm(action(select.value)));
  row.append(go, select);
  return row;
}

async function explain(path, into) {
  try {
    const { devices } = await get(`${path}/explanation`);
    for (const device of devices) {
      into.append(element("h3", device.device), element("p", device.rule), element("p", device.on_failure));
      for (const candidate of device.candidates) {
        into.append(element("b", `${candidate.name}: ${candidate.part}`), list("notes", candidate.notes));
      }
    }
  } catch (error) {
    into.append(element("p", error.message, "against"));
  }
}

let last = "";

// Shows what was chosen; leaves alone what somebody works with, unless it has changed.
export function show(into, pod, chosen) {
  const kinds = { host, device, instance };
  const nodes = chosen ? kinds[chosen.kind](pod, chosen.name) : null;
  into.hidden = nodes === null;
  const text = nodes === null ? "" : JSON.stringify(chosen) + nodes.map((node) => node.outerHTML).join("");
  if (text === last) return;
  last = text;
  into.replaceChildren(...(nodes ?? []));
}
