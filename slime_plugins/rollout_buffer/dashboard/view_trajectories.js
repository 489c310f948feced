// The trajectories of a job: filtered, sorted, summed up, each with what was asked and answered.

import { ask, path } from "./api.js";
import { h, KeyedList, scrolling, show } from "./dom.js";
import { ago, count, number, percent, reward, short, span } from "./format.js";
import { histogram } from "./histogram.js";
import { SORTED, empty, filters, headCell, jobHref, keepSort, pager, pill, rewardCell } from "./parts.js";
import { jobHead } from "./view_job.js";

const OUTCOMES = ["completed", "truncated", "aborted"];
const STOP_REASONS = ["terminated", "answered", "task_ended", "repeated", "stop", "max_turns", "max_tokens", "max_context", "forbidden_token", "aborted"];
const FIELDS = [
  { name: "search", label: "Task, instance or uid contains", wide: true, hint: "ContactsAdd" },
  { name: "outcome", label: "Outcome", options: OUTCOMES },
  { name: "stop_reason", label: "Stopped", options: STOP_REASONS },
  { name: "success", label: "Success", options: [["true", "yes"], ["false", "no"]] },
  { name: "min_reward", label: "Reward from", type: "number", step: "any" },
  { name: "max_reward", label: "to", type: "number", step: "any" },
  { name: "min_version", label: "Weights from", type: "number", step: "1" },
  { name: "max_version", label: "to", type: "number", step: "1" },
];
/* Name, what it is sorted by, class. */
const COLUMNS = [["Task"], ["Answer"], ["Reward", "reward", "num"], ["Outcome"], ["Turns", "turns", "num"], ["Tokens", "sampled_tokens", "num"], ["Took", "played_s", "num"], ["Weights", null, "num"], ["Group"], ["Written", "created_at"]];

export function trajectoriesView(stage, jobId) {
  const query = Object.fromEntries(stage.query);
  const previews = new Map();
  const rows = h("tbody");
  const table = h("table", { class: "list trajectory-list" }, h("caption", { class: "unseen" }, `Trajectories of ${jobId}`), h("thead", null, h("tr", null, COLUMNS.map((column) => headCell(stage, column, "created_at")))), rows);
  const nothing = h("div");
  const pages = h("div");
  const totals = h("div", { class: "panel totals", role: "status", "aria-label": "Totals" });
  totals.hidden = true;
  const list = new KeyedList(rows, (one) => one.uid, () => {
    const row = h("tr");
    return { element: row, update: (one) => show(row, cells(jobId, { ...previews.get(one.uid), ...one })) };
  });
  const asked = { job_id: jobId, limit: 50, ...query };
  let shown = [];
  let asking = false;
  /* What was asked and answered never changes: it is asked for once, not at every look. */
  const learnPreviews = async () => {
    if (asking || shown.every((one) => previews.has(one.uid))) return;
    asking = true;
    try {
      const { body } = await ask(path(["trajectories"], { ...asked, previews: true }));
      body.trajectories.forEach(({ uid, goal, answer }) => previews.set(uid, { goal, answer }));
      list.show(shown);
    } catch {
      // The list stands without them; the next look tries again.
    } finally {
      asking = false;
    }
  };
  stage.poll(path(["trajectories"], asked), query.cursor ? 20000 : 3000, (body) => {
    shown = body.trajectories;
    list.show(shown);
    learnPreviews();
    table.hidden = !shown.length;
    const filtered = [...stage.query.keys()].some((name) => !SORTED.includes(name));
    show(nothing, shown.length ? null : empty("No trajectory", filtered ? "No trajectory matches these filters." : "No episode has ended yet."));
    show(pages, pager(stage, body.next_cursor, "trajectory", shown.length));
  });
  const { cursor, sort, order, ...filtering } = query;
  stage.poll(path(["trajectory_summary"], { job_id: jobId, ...filtering }), 20000, (body) => {
    totals.hidden = !body.trajectories;
    show(totals, ...totalsOf(jobId, body, filtering));
  });
  return {
    title: `Trajectories of ${jobId}`,
    element: h("div", null, jobHead(jobId, "Trajectories"), filters(stage, FIELDS, keepSort(stage), SORTED), totals, scrolling(table), nothing, pages),
  };
}

function totalsOf(jobId, body, filtering) {
  if (!body.trajectories) return [];
  const some = (value, name) => h("span", null, h("b", null, value), " ", name);
  return [
    h(
      "p",
      { class: "facts-line" },
      some(count(body.trajectories), body.trajectories === 1 ? "trajectory" : "trajectories"),
      some(reward(body.reward_mean, 3), "mean reward"),
      body.success !== null && some(percent(body.success), "success"),
      body.turns !== null && some(number(body.turns, 1), "turns per episode"),
      body.sampled_tokens !== null && some(count(body.sampled_tokens), "tokens sampled"),
      body.played_s !== null && some(span(body.played_s), "per episode"),
    ),
    histogram(jobId, body, filtering),
  ].filter(Boolean);
}

function cells(jobId, one) {
  const wrong = one.success !== null && one.success !== undefined && one.success < 1;
  return [
    h(
      "th",
      { scope: "row", class: "main" },
      h("a", { href: jobHref(jobId, "trajectories", one.uid) }, one.instance_id),
      h("span", { class: "which" }, one.epoch === null ? one.uid : `epoch ${one.epoch}, slot ${one.slot} · ${one.uid}`),
      one.goal && h("small", { class: "preview", title: one.goal }, short(one.goal, 160)),
    ),
    h("td", { class: "says answer", "data-name": "Answer" }, one.answer ? h("span", { class: wrong ? "wrong" : null, title: one.answer }, short(one.answer, 140)) : one.answer === undefined ? "" : "–"),
    h("td", { class: "num", "data-name": "Reward" }, rewardCell(one.reward), one.success !== null && one.success >= 1 && h("span", { class: "tick", title: "success" }, " ✓", h("span", { class: "unseen" }, " success"))),
    h("td", { "data-name": "Outcome" }, h("span", { class: `pill ${one.outcome}` }, one.outcome), h("small", { class: "under" }, one.stop_reason.replaceAll("_", " "))),
    h("td", { class: "num", "data-name": "Turns" }, count(one.turns)),
    h("td", { class: "num", "data-name": "Tokens" }, count(one.sampled_tokens)),
    h("td", { class: "num", "data-name": "Took" }, span(one.played_s)),
    h("td", { class: "num", "data-name": "Weights" }, one.oldest_version === null ? "–" : `v${one.oldest_version}`),
    h("td", { "data-name": "Group" }, one.group_index === null ? "–" : h("a", { href: jobHref(jobId, "groups", one.group_index) }, pill(one.group_state)), one.late && h("small", null, "late")),
    h("td", { class: "when", "data-name": "Written" }, ago(one.created_at, Date.now() / 1000)),
  ];
}

