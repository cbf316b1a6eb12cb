// Nothing is changed before somebody has read what will be, and said yes. What would be refused is said before that.

import { change } from "./api.js";

let changed = () => {};

export function onChange(callback) {
  changed = callback;
}

export async function confirm(action) {
  const dialog = document.getElementById("confirm");
  if (dialog.open) return;
  const [question, consequence, refusal, yes] =
    ["question", "consequence", "refusal", "yes"].map((id) => document.getElementById(id));
  question.textContent = action.question;
  consequence.textContent = action.consequence;
  refusal.hidden = true;
  yes.textContent = action.danger ? "yes, do it" : "yes";
  yes.className = action.danger ? "danger" : "";
  yes.disabled = true;
  const { method, path, body, version } = action;
  // One name for all attempts of this one wish.
  const key = crypto.getRandomValues(new Uint32Array(4)).join("-");
  // Not when the dialog says that it was closed: that comes later, when the next question may be there already.
  const answered = new Promise((answer) => {
    dialog.firstElementChild.onsubmit = (event) => answer(event.submitter?.value ?? "no");
    dialog.oncancel = () => answer("no");
  });
  const attempt = async (options, then) => {
    try {
      await change(method, path, { body, version, ...options });
      then();
    } catch (error) {
      refusal.textContent = error.message;
      refusal.hidden = false;
      yes.disabled = true;
      return false;
    }
    return true;
  };
  dialog.showModal();
  attempt({ dryRun: true }, () => { yes.disabled = false; });
  if ((await answered) !== "yes") return;
  const done = await attempt({ key }, changed);
  if (!done) dialog.showModal();
}
