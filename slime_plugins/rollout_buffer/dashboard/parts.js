// Pieces that several views show.

import { confirmed, h, svg } from "./dom.js";
import { path, send } from "./api.js";
import { count, number, plural, reward } from "./format.js";

export const STATES = ["open", "ready", "leased", "delivered", "filtered", "failed", "skipped"];
const MEANINGS = {
  open: "some member is still to come",
  ready: "complete, waits for a poll",
  leased: "handed out, not acknowledged yet",
  delivered: "acknowledged by the trainer",
  filtered: "played and dropped; its cause says why",
  failed: "given up; its cause says why",
  skipped: "trained already, or cancelled",
};

export const pill = (state) => h("span", { class: `pill ${state}`, title: MEANINGS[state] ?? null }, state.replaceAll("_", " "));

/** The state of a job in the colour of its health where that is poor: a job that finished may have given nothing. */
export const jobPill = (state, severity = "unknown") => h("span", { class: `pill ${state} health-${severity}` }, state);

/** Every slot in exactly one state, as one bar. */
export function accountBar(slots) {
  const words = STATES.map((state) => `${count(slots[state])} ${state}`).join(", ");
  return h(
    "div",
    { class: "bar", role: "img", "aria-label": `${count(slots.submitted)} slots submitted: ${words}` },
    STATES.filter((state) => slots[state] > 0).map((state) =>
      h("span", { class: `fill ${state}`, style: { "flex-grow": slots[state] }, title: `${count(slots[state])} ${state}` }),
    ),
  );
}

/** The accounting identity: submitted = open + … + skipped, in slots, as one bar with its numbers. */
export function accounting(slots) {
  const total = slots.submitted;
  const terms = STATES.map((state, at) =>
    h(
      "li",
      { class: slots[state] ? "" : "none", title: MEANINGS[state] },
      h("span", { class: `key ${state}`, "aria-hidden": "true" }),
      h("b", null, count(slots[state])),
      ` ${state}`,
      at < STATES.length - 1 && h("span", { class: "plus", "aria-hidden": "true" }, "+"),
    ),
  );
  return h(
    "div",
    { class: "account" },
    accountBar(slots),
    h("ul", { class: "terms" }, h("li", { class: "sum" }, h("b", null, count(total)), total === 1 ? " slot =" : " slots ="), terms),
  );
}

const SIGNS = { ok: "✓", wait: "…", ended: "–", attention: "!", stopped: "✕" };
const NAMES = { ok: "OK", wait: "Waiting", ended: "Ended", attention: "Attention", stopped: "Stopped" };

/** How well something is, as one character with its word for who cannot see it. */
export const sign = (severity) => [h("span", { class: "sign", "aria-hidden": "true" }, SIGNS[severity]), h("span", { class: "unseen" }, `${NAMES[severity]}: `)];

/** Why it moves or stands still, and what to do. */
export function callouts(explanations) {
  return explanations.map((one) =>
    h(
      "div",
      { class: `callout ${one.severity}`, "data-code": one.code },
      sign(one.severity)[0],
      h(
        "div",
        null,
        h("p", null, sign(one.severity)[1], one.message),
        one.advice && h("p", { class: "advice" }, one.advice),
      ),
    ),
  );
}

/** Where one is: links from the jobs down to here. */
export function crumbs(...steps) {
  const links = steps.map(([text, href]) => h("li", null, href ? h("a", { href }, text) : h("span", { "aria-current": "page" }, text)));
  return h("nav", { "aria-label": "Where you are" }, h("ol", { class: "crumbs" }, links));
}

export const jobHref = (jobId, ...rest) => `#/${["jobs", jobId, ...rest].map(encodeURIComponent).join("/")}`;

/** The tabs of a job. */
export function tabs(jobId, here) {
  const entries = [
    ["Overview", jobHref(jobId)],
    ["Groups", jobHref(jobId, "groups")],
    ["Trajectories", jobHref(jobId, "trajectories")],
    ["Search", jobHref(jobId, "search")],
    ["Settings", jobHref(jobId, "settings")],
  ];
  const links = entries.map(([text, href]) => h("a", { href, "aria-current": text === here ? "page" : null }, text));
  return h("nav", { class: "tabs", "aria-label": "Pages of this job" }, links);
}

export const fact = (name, value, more) =>
  h("div", { class: "fact" }, h("dt", null, name), h("dd", null, value, more && h("small", null, more)));

export const empty = (title, text, ...more) => h("div", { class: "empty" }, h("strong", null, title), h("p", null, text), more);

/** Rewards of a group on one line, so that one sees whether they differ. */
export function rewardDots(members, low, high) {
  const rewards = members.filter((one) => !one.late).map((one) => one.reward);
  if (!rewards.length) return h("span", { class: "muted" }, "–");
  const from = Math.min(low, ...rewards, 0);
  const to = Math.max(high, ...rewards, 0);
  const x = (value) => 4 + ((value - from) / (to - from || 1)) * 112;
  const words = rewards.map((value) => number(value)).join(", ");
  return svg(
    "svg",
    { class: "dots", viewBox: "0 0 120 16", role: "img", "aria-label": `rewards ${words}` },
    svg("title", null, words),
    svg("line", { x1: 2, x2: 118, y1: 8, y2: 8 }),
    svg("line", { x1: x(0), x2: x(0), y1: 3, y2: 13, class: "zero" }),
    rewards.map((value) => svg("circle", { cx: x(value), cy: 8, r: 3.5, class: value > 0 ? "up" : value < 0 ? "down" : "flat" })),
  );
}

export const rewardCell = (value) => h("span", { class: `reward ${value > 0 ? "up" : value < 0 ? "down" : ""}` }, reward(value));

/** Buttons that change a job, each after asking. */
export function actions(job, onDone) {
  const act = async (verb, text, label, danger) => {
    if (!(await confirmed(`${label} ${job.job_id}?`, text, label, { danger }))) return;
    try {
      await send(path(["jobs", job.job_id, verb]));
    } catch (error) {
      await confirmed("That did not work", error.message, "Close");
    }
    onDone();
  };
  const playing = "Episodes that run are played to their end; no new one starts.";
  const buttons = {
    running: [["pause", playing, "Pause"], ["cancel", CANCEL, "Cancel job", true]],
    paused: [["resume", "New episodes start again.", "Resume"], ["cancel", CANCEL, "Cancel job", true]],
  }[job.state] ?? [];
  return buttons.map(([verb, text, label, danger]) =>
    h("button", { type: "button", class: danger ? "danger quiet" : "", onclick: () => act(verb, text, label, danger) }, label),
  );
}

const CANCEL = "Running episodes are given up and what is open is skipped. What is finished is kept. A cancelled job cannot be resumed.";

/**
 * A form whose fields are the query of the address: what is filtered can be linked to, and the back button works.
 * ``others`` are names in the query that filter nothing.
 */
export function filters(stage, fields, apply, others = [], { folded = true } = {}) {
  const controls = fields.map((field) => {
    const value = stage.query.get(field.name) ?? "";
    const control = field.options
      ? h("select", { name: field.name }, h("option", { value: "" }, field.any ?? "any"), field.options.map((one) => option(one, value)))
      : h("input", { name: field.name, type: field.type ?? "search", step: field.step ?? null, placeholder: field.hint ?? null, value });
    return h("label", { class: field.wide ? "wide" : "" }, h("span", null, field.label), control);
  });
  const form = h(
    "form",
    { class: "filters", role: "search", "aria-label": "Filters" },
    controls,
    h("div", { class: "row" }, h("button", { class: "primary" }, "Apply"), h("button", { type: "button", onclick: () => apply(new URLSearchParams()) }, "Clear")),
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const given = [...new FormData(form)].filter(([, value]) => value.trim() !== "");
    apply(new URLSearchParams(given.map(([name, value]) => [name, value.trim()])));
  });
  form.addEventListener("change", (event) => event.target.tagName === "SELECT" && form.requestSubmit());
  if (!folded) return h("div", { class: "filter-box" }, form);
  const set = [...stage.query.keys()].filter((name) => name !== "cursor" && !others.includes(name)).length;
  const wide = matchMedia("(min-width: 48rem)").matches;
  return h("details", { class: "filter-box", open: wide || set > 0 }, h("summary", null, set ? `Filters (${set} set)` : "Filters"), form);
}

const option = (one, value) => {
  const [key, text] = Array.isArray(one) ? one : [one, one.replaceAll("_", " ")];
  return h("option", { value: key, selected: key === value }, text);
};

/** Goes to the same page with another query. */
export function go(query) {
  const address = location.hash.split("?")[0];
  const text = query.toString();
  location.hash = text ? `${address}?${text}` : address;
}

/** Links to the pages before and after. */
export function pager(stage, nextCursor, what, shown) {
  const first = !stage.query.get("cursor");
  const next = new URLSearchParams(stage.query);
  const start = new URLSearchParams(stage.query);
  start.delete("cursor");
  if (nextCursor !== null) next.set("cursor", nextCursor);
  return h(
    "nav",
    { class: "row pager", "aria-label": "Pages" },
    h("span", { class: "muted" }, `${plural(shown, what)} on this page${first ? ", kept up to date" : ""}`),
    h("span", { class: "grow" }),
    !first && h("button", { type: "button", onclick: () => go(start) }, "Newest"),
    !first && h("button", { type: "button", onclick: () => history.back() }, "Newer"),
    nextCursor !== null && h("button", { type: "button", onclick: () => go(next) }, "Older"),
  );
}

/** Any value as an indented tree of text. */
export function json(value) {
  return h("pre", { class: "json", tabindex: 0 }, JSON.stringify(value, null, 2));
}

/** A section with a heading of its own. */
export function section(title, ...children) {
  const id = `s-${title.toLowerCase().replace(/[^a-z]+/g, "-")}`;
  return h("section", { "aria-labelledby": id }, h("h2", { id }, title), children);
}

/** What of an address says how a list is sorted. */
export const SORTED = ["sort", "order"];

/** Goes to a list with other filters, sorted as before. */
export const keepSort = (stage) => (next) => {
  SORTED.forEach((name) => stage.query.get(name) && next.set(name, stage.query.get(name)));
  go(next);
};

/** A column's head; where the list can be sorted by it, a link that does so, or the other way round. `usual` is what it is sorted by otherwise. */
export function headCell(stage, [name, key, kind], usual) {
  const sort = stage.query.get("sort") ?? usual;
  const order = stage.query.get("order") ?? "descending";
  if (!key) return h("th", { scope: "col", class: kind ?? null }, name);
  const here = key === sort;
  const next = new URLSearchParams(stage.query);
  next.delete("cursor");
  next.set("sort", key);
  next.set("order", here && order === "descending" ? "ascending" : "descending");
  const mark = here ? (order === "descending" ? " ↓" : " ↑") : "";
  return h("th", { scope: "col", class: kind ?? null, "aria-sort": here ? order : null }, h("a", { class: "sort", href: `${location.hash.split("?")[0]}?${next}` }, name, h("span", { "aria-hidden": "true" }, mark)));
}
