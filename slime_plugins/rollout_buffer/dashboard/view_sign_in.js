// The form that a browser sees first where the server asks for a token.

import { send } from "./api.js";
import { h } from "./dom.js";

export function signInView(onDone) {
  const problem = h("p", { role: "alert", class: "problem" });
  const field = h("input", { type: "password", name: "token", autocomplete: "current-password", required: true, autofocus: true });
  const form = h(
    "form",
    { class: "sign-in panel" },
    h("h1", null, "Sign in"),
    h("p", { class: "muted" }, "This buffer requires its token: the first line of the file that --token-file names."),
    h("label", null, h("span", null, "Token"), field),
    problem,
    h("button", { class: "primary" }, "Sign in"),
  );
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    problem.textContent = "";
    try {
      await send("/sign_in", { token: field.value });
    } catch (error) {
      problem.textContent = error.status === 401 ? "This is not the server's token." : error.message;
      field.select();
      return;
    }
    onDone();
  });
  requestAnimationFrame(() => field.focus());
  return form;
}
