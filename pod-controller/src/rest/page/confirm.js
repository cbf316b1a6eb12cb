// Nothing is changed before somebody has read what will be, and said yes. What would be refused is said before that.

import { change } from "./api.js";

let changed = () => {};
let asked = 0;

export function onChange(callback) {
  changed = callback;
}

export async function confirm(action) {
  const dialog = document.getElementById("confirm");
  if (dialog.open) return;
  // What is answered to an older question says nothing about this one.
  const number = ++asked;
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
      if (number !== asked && options.dryRun) return false;
      if (number !== asked && dialog.open) {
        refusal.textContent = `Before: ${action.question} ${error.message}`;
        refusal.hidden = false;
        return true;
      }
      question.textContent = action.question;
      consequence.textContent = action.consequence;
      refusal.textContent = error.message;
      refusal.hidden = false;
      yes.disabled = true;
      return false;
    }
    return true;
  };
  dialog.showModal();
  attempt({ dryRun: true }, () => { if (number === asked) yes.disabled = false; });
  if ((await answered) !== "yes") return;
  const done = await attempt({ key }, changed);
  if (!done) dialog.showModal();
}
