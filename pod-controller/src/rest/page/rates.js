// Rates from two looks at counters.

const seen = new Map();

// What passes through a device now, and how much of what it can that is, if that is known.
export function load(device) {
  return rates.get(device.name) ?? null;
}

const rates = new Map();

export function measure(devices, now) {
  for (const device of devices) {
    const it = device.counters;
    if (!it) {
      rates.delete(device.name);
      continue;
    }
    const bytes = device.type === "nic" ? it.rx_bytes + it.tx_bytes : it.read_bytes + it.write_bytes;
    const operations = it.operations ?? 0;
    const before = seen.get(device.name);
    if (before && before.bytes === bytes && before.operations === operations && now - before.at < 900) continue;
    seen.set(device.name, { bytes, operations, at: now });
    // A counter that fell is one of a new life of the daemon.
    if (!before || bytes < before.bytes || operations < before.operations || now === before.at) continue;
    const seconds = (now - before.at) / 1000;
    const [perSecond, requests] = [(bytes - before.bytes) / seconds, (operations - before.operations) / seconds];
    rates.set(device.name, { perSecond, share: share(device, perSecond, requests) });
  }
}

// How much of what a device can do that is: of an SSD, of requests or of bytes, whichever is more.
function share(device, perSecond, requests) {
  const parts = device.type === "nic"
    ? [[perSecond * 8, device.speed_mbps * 1e6]]
    : [[perSecond, device.bytes_per_second], [requests, device.iops]];
  const known = parts.filter(([, most]) => most > 0);
  return known.length > 0 ? Math.max(...known.map(([does, most]) => does / most)) : null;
}

export function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (count >= 1024 && unit < units.length - 1) {
    count /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? Math.round(count) : count.toFixed(1)} ${units[unit]}`;
}

export function rate(device) {
  const now = load(device);
  if (!now) return "";
  const percent = now.share === null ? "" : ` · ${Math.round(now.share * 100)} %`;
  return `${bytes(now.perSecond)}/s${percent}`;
}
