// What happened, newest first, as the controller tells it.

const MOVES = new Set([
  "failover", "migrated", "balanced", "drained", "failed-back", "migration-prepared", "migration-aborted", "instance-migrated",
  "drain-begun", "drain-ended",
]);
const TROUBLES = new Set([
  "endpoint-silent", "endpoint-fenced", "endpoint-gone", "join-refused", "link-down", "link-held", "device-failed", "device-gone", "device-refused", "disk-failed",
  "failover", "degraded", "replica-dropped", "command-failed", "pool-full", "memory-failed", "overloaded",
]);
// Of each sort, so that much of one does not push out the other.
const KEPT = 500;

const events = [];

const sort = ({ kind }) => `${MOVES.has(kind)} ${TROUBLES.has(kind)}`;

const shown = (event, filter) =>
  filter === "all" || (filter === "moves" ? MOVES : TROUBLES).has(event.kind);

function item(event) {
  const it = document.createElement("li");
  if (TROUBLES.has(event.kind)) it.classList.add("trouble");
  else if (MOVES.has(event.kind)) it.classList.add("move");
  const when = document.createElement("time");
  const date = new Date(event.time_ms);
  when.dateTime = date.toISOString();
  when.textContent = date.toLocaleTimeString();
  when.title = date.toLocaleString();
  const what = document.createElement("b");
  const subject = document.createElement("a");
  subject.href = "#";
  subject.dataset.subject = event.subject;
  subject.textContent = event.subject;
  what.append(` ${event.kind} `, subject);
  const words = document.createElement("div");
  words.textContent = event.message;
  it.dataset.kind = event.kind;
  it.append(when, what, words);
  return it;
}

export function add(list, filter, event) {
  events.unshift(event);
  const alike = events.filter((other) => sort(other) === sort(event));
  if (alike.length > KEPT) events.splice(events.lastIndexOf(alike.at(-1)), 1);
  if (!shown(event, filter)) return;
  list.prepend(item(event));
  while (list.children.length > KEPT) list.lastElementChild.remove();
}

export function forget(list) {
  events.length = 0;
  list.replaceChildren();
}

export function redraw(list, filter) {
  list.replaceChildren(...events.filter((event) => shown(event, filter)).map(item));
}
