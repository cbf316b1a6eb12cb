// The pod as a picture: a column for each host, instances above, devices below, and a line for each use.

import { load, rate } from "./rates.js";

const NS = "http://www.w3.org/2000/svg";
const [WIDTH, GAP, ROW, BOX, EDGE] = [190, 40, 50, 40, 12];

function make(kind, attributes, text) {
  const it = document.createElementNS(NS, kind);
  for (const [name, value] of Object.entries(attributes)) it.setAttribute(name, value);
  if (text !== undefined) it.textContent = text;
  return it;
}

const cut = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

const health = (device) => (device.drained ? "drained" : device.health);

// Draws it anew. `chosen` is what is looked at, as {kind, name}; `choose` is called with another one.
export function draw(svg, { hosts, devices, instances }, chosen, choose) {
  const focused = document.activeElement?.dataset?.key;
  const placed = new Map();
  const boxes = [];
  const rows = (list) => Math.max(1, ...hosts.map((host) => list.filter((it) => it.host === host.name).length));
  const devicesTop = 44 + rows(instances) * ROW + 70;
  const height = devicesTop + rows(devices) * ROW + EDGE;
  hosts.forEach((host, column) => {
    const x = column * (WIDTH + GAP) + 4;
    boxes.push(make("rect", { class: host.drained ? "host drained" : "host", x, y: 4, width: WIDTH, height: height - 8, rx: 8 }));
    const heading = group("host", host.name, `host ${host.name}`, chosen, choose);
    heading.append(make("rect", { class: "box", x: x + EDGE, y: 10, width: WIDTH - 2 * EDGE, height: 26, rx: 4 }));
    const silent = host.endpoints.filter((it) => it.health !== "joined");
    const state = host.drained ? "drained" : silent.length > 0 ? `${silent.length} silent` : "";
    if (silent.length > 0) heading.classList.add("bad");
    heading.append(make("text", { x: x + EDGE + 8, y: 28 }, cut(host.name, 16)));
    heading.append(make("text", { class: "faint state", x: x + WIDTH - EDGE - 6, y: 28, "text-anchor": "end" }, state));
    boxes.push(heading);
    instances.filter((it) => it.host === host.name).forEach((it, row) => {
      const y = 44 + row * ROW;
      const box = group("instance", it.name, `instance ${it.name}`, chosen, choose);
      box.append(make("rect", { class: "box", x: x + EDGE, y, width: WIDTH - 2 * EDGE, height: BOX, rx: 4 }));
      box.append(make("text", { x: x + EDGE + 8, y: y + 17 }, cut(it.name, 20)));
      const moving = it.migration ? `moving to ${it.migration.to}` : it.ready ? "ready" : "waiting";
      box.append(make("text", { class: "faint state", x: x + EDGE + 8, y: y + 32 }, cut(moving, 26)));
      if (!it.ready) box.classList.add("away");
      boxes.push(box);
      placed.set(`instance ${it.name}`, { x: x + WIDTH / 2, y: y + BOX });
    });
    devices.filter((it) => it.host === host.name).forEach((it, row) => {
      const y = devicesTop + row * ROW;
      const box = group("device", it.name, `${it.type === "nic" ? "NIC" : "SSD"} ${it.name}, ${health(it)}`, chosen, choose);
      box.append(make("rect", { class: "box", x: x + EDGE, y, width: WIDTH - 2 * EDGE, height: BOX, rx: 4 }));
      const what = it.type === "nic" ? (it.backup ? "backup NIC" : "NIC") : "SSD";
      box.append(make("text", { x: x + EDGE + 8, y: y + 16 }, cut(it.name.split("/")[1], 14)));
      box.append(make("text", { class: "faint state", x: x + WIDTH - EDGE - 6, y: y + 16, "text-anchor": "end" }, health(it) === "up" ? what : health(it)));
      box.append(make("text", { class: "faint", x: x + EDGE + 8, y: y + 30 }, rate(it)));
      const width = WIDTH - 2 * EDGE - 16;
      if (it.type === "ssd") {
        const full = `${Math.round((it.used_bytes / Math.max(1, it.size_bytes)) * 100)} % full`;
        box.append(make("text", { class: "faint state", x: x + WIDTH - EDGE - 6, y: y + 30, "text-anchor": "end" }, full));
      }
      const share = load(it)?.share ?? 0;
      box.append(make("rect", { class: "bar", x: x + EDGE + 8, y: y + 34, width, height: 3 }));
      box.append(make("rect", { class: share > 0.8 ? "load high" : "load", x: x + EDGE + 8, y: y + 34, width: width * Math.min(1, share), height: 3 }));
      if (it.health === "down" || it.health === "failed") box.classList.add("bad");
      if (it.health === "away") box.classList.add("away");
      boxes.push(box);
      placed.set(`device ${it.name}`, { x: x + WIDTH / 2, y });
    });
  });
  const lines = [];
  const line = (instance, device, kind) => {
    const [from, to] = [placed.get(`instance ${instance}`), placed.get(`device ${device}`)];
    if (!from || !to) return;
    const middle = (from.y + to.y) / 2;
    const dim = chosen && chosen.name !== instance && chosen.name !== device && chosen.kind !== "host";
    const path = make("path", {
      class: `use ${kind}${dim ? " dim" : ""}`,
      d: `M${from.x} ${from.y} C${from.x} ${middle} ${to.x} ${middle} ${to.x} ${to.y}`,
    });
    path.dataset.from = instance;
    path.dataset.to = device;
    lines.push(path);
  };
  for (const it of instances) {
    for (const nic of it.nics) {
      if (nic.backup) line(it.name, nic.backup, "backup");
      line(it.name, nic.nic, "nic");
    }
    for (const disk of it.disks) for (const ssd of disk.ssd.split(", ")) line(it.name, ssd, "disk");
  }
  svg.setAttribute("width", Math.max(1, hosts.length) * (WIDTH + GAP) - GAP + 8);
  svg.setAttribute("height", height);
  svg.replaceChildren(...lines, ...boxes);
  if (focused) svg.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
}

function group(kind, name, label, chosen, choose) {
  const it = make("g", { tabindex: 0, role: "button", "aria-label": label });
  it.dataset.key = `${kind} ${name}`;
  if (chosen && chosen.kind === kind && chosen.name === name) it.classList.add("chosen");
  it.addEventListener("click", () => choose({ kind, name }));
  it.addEventListener("keydown", (event) => {
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      choose({ kind, name });
    }
  });
  return it;
}
