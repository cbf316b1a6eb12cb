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
    const nic = device.type === "nic";
    const bytes = nic ? it.rx_bytes + it.tx_bytes : it.read_bytes + it.write_bytes;
    const before = seen.get(device.name);
    if (before && before.bytes === bytes && now - before.at < 900) continue;
    seen.set(device.name, { bytes, at: now });
    // A counter that fell is one of a new life of the daemon.
    if (!before || bytes < before.bytes || now === before.at) continue;
    const perSecond = ((bytes - before.bytes) * 1000) / (now - before.at);
    const share = nic && device.speed_mbps > 0 ? (perSecond * 8) / (device.speed_mbps * 1e6) : null;
    rates.set(device.name, { perSecond, share });
  }
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
