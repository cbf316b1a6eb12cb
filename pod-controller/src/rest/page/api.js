// What is asked of the controller. The token stays in this tab.

const KEPT = "wadi-token";
let token = sessionStorage.getItem(KEPT);
let asking = null;
// Why what daemons measure is missing in what was answered, unless it is there.
let unmeasured = null;

export function takeUnmeasured() {
  const why = unmeasured;
  unmeasured = null;
  return why;
}

// Why the controller refused, in its own words.
export class Refused extends Error {
  constructor(problem) {
    super(problem.detail);
    this.status = problem.status;
    this.kind = problem.type;
  }
}

export const hasToken = () => token !== null;

export function forgetToken() {
  token = null;
  sessionStorage.removeItem(KEPT);
}

// One dialog for all requests that wait for it.
function askForToken() {
  asking ??= new Promise((answered) => {
    const dialog = document.getElementById("ask-token");
    const input = document.getElementById("token");
    input.value = "";
    dialog.addEventListener("close", () => {
      const said = input.value.trim();
      input.value = "";
      if (said !== "") {
        token = said;
        sessionStorage.setItem(KEPT, said);
      }
      asking = null;
      answered();
    }, { once: true });
    dialog.showModal();
  });
  return asking;
}

async function send(path, options = {}) {
  for (;;) {
    if (asking) await asking;
    const used = token;
    const headers = { ...options.headers };
    if (used) headers.authorization = `Bearer ${used}`;
    const answer = await fetch(path, { ...options, headers, cache: "no-store" });
    if (answer.ok) {
      unmeasured = answer.headers.get("wadi-unmeasured") ?? unmeasured;
      return answer;
    }
    const problem = await answer.json().catch(() => ({ status: answer.status, detail: `the answer was ${answer.status}` }));
    if (answer.status !== 401) throw new Refused(problem);
    // Somebody may have said another one meanwhile.
    if (token === used) await askForToken();
  }
}

export const get = async (path, signal) => (await send(path, { signal })).json();

// A change; only tried if so said. Sent again after an answer that got lost, it is not carried out twice.
export async function change(method, path, { body, version, key, dryRun } = {}) {
  const headers = { "content-type": "application/json" };
  if (key) headers["idempotency-key"] = key;
  if (version) headers["if-match"] = `"${version}"`;
  const options = { method, headers };
  if (body !== undefined) options.body = JSON.stringify(body);
  await send(dryRun ? `${path}?dry-run=true` : path, options);
}

// A controller that lives says so every 15 s. One whose host has lost power ends no connection.
const SILENCE_MAX_MS = 45000;

function withinSilence(reading) {
  let timer;
  const silence = new Promise((_, fail) => {
    timer = setTimeout(() => fail(new Error("nothing is heard")), SILENCE_MAX_MS);
  });
  return Promise.race([reading, silence]).finally(() => clearTimeout(timer));
}

// Follows events for ever: goes on after the last one when the connection ends, or nothing is heard.
export async function follow(last, { onEvent, onState, onGone }) {
  for (;;) {
    const abort = new AbortController();
    try {
      const answer = await withinSilence(send(`v1/events/stream?after=${last}`, { signal: abort.signal }));
      onState("live");
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = "";
      for (;;) {
        const { value, done } = await withinSilence(reader.read());
        if (done) break;
        text += value;
        const lines = text.split("\n");
        text = lines.pop();
        for (const line of lines) {
          if (!line.startsWith("data:")) continue;
          const event = JSON.parse(line.slice(5));
          last = event.sequence;
          onEvent(event);
        }
      }
    } catch (error) {
      if (error instanceof Refused && error.status === 410) {
        try {
          last = await onGone();
        } catch {
          // What there is cannot be read now: the next attempt is refused as this one was, and leads here again.
        }
      }
    }
    abort.abort();
    onState("lost");
    await new Promise((resume) => setTimeout(resume, 1000));
  }
}
