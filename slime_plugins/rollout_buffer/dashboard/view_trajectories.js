// The trajectories of a job, newest first.

import { path } from "./api.js";
import { h, KeyedList, scrolling, show } from "./dom.js";
import { ago, count, span } from "./format.js";
import { empty, filters, go, jobHref, pager, pill, rewardCell } from "./parts.js";
import { jobHead } from "./view_job.js";

const OUTCOMES = ["completed", "truncated", "aborted"];
const STOP_REASONS = ["terminated", "answered", "stop", "max_turns", "max_tokens", "max_context", "forbidden_token", "aborted"];
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

export function trajectoriesView(stage, jobId) {
  const rows = h("tbody");
  const table = h(
    "table",
    { class: "list" },
    h("caption", { class: "unseen" }, `Trajectories of ${jobId}, newest first`),
    h(
      "thead",
      null,
      h("tr", null, h("th", { scope: "col" }, "Instance"), h("th", { scope: "col", class: "num" }, "Reward"), ["Outcome", "Stopped"].map((name) => h("th", { scope: "col" }, name)), ["Turns", "Tokens", "Took", "Weights"].map((name) => h("th", { scope: "col", class: "num" }, name)), ["Group", "Written"].map((name) => h("th", { scope: "col" }, name))),
    ),
    rows,
  );
  const nothing = h("div");
  const pages = h("div");
  const list = new KeyedList(rows, (one) => one.uid, () => {
    const row = h("tr");
    return { element: row, update: (one) => show(row, cells(jobId, one)) };
  });
  const query = Object.fromEntries(stage.query);
  stage.poll(path(["trajectories"], { job_id: jobId, limit: 50, ...query }), query.cursor ? 20000 : 3000, (body) => {
    list.show(body.trajectories);
    table.hidden = !body.trajectories.length;
    show(nothing, body.trajectories.length ? null : empty("No trajectory", [...stage.query.keys()].length ? "No trajectory matches these filters." : "No episode has ended yet."));
    show(pages, pager(stage, body.next_cursor, "trajectory", body.trajectories.length));
  });
  return {
    title: `Trajectories of ${jobId}`,
    element: h("div", null, jobHead(jobId, "Trajectories"), filters(stage, FIELDS, go), scrolling(table), nothing, pages),
  };
}

function cells(jobId, one) {
  return [
    h(
      "th",
      { scope: "row", class: "main" },
      h("a", { href: jobHref(jobId, "trajectories", one.uid) }, one.instance_id),
      h("small", null, one.epoch === null ? one.uid : `epoch ${one.epoch}, slot ${one.slot} · ${one.uid}`),
    ),
    h("td", { class: "num", "data-name": "Reward" }, rewardCell(one.reward), one.success !== null && one.success >= 1 && h("span", { class: "tick", title: "success" }, " ✓", h("span", { class: "unseen" }, " success"))),
    h("td", { "data-name": "Outcome" }, h("span", { class: `pill ${one.outcome}` }, one.outcome)),
    h("td", { "data-name": "Stopped" }, one.stop_reason.replaceAll("_", " ")),
    h("td", { class: "num", "data-name": "Turns" }, count(one.turns)),
    h("td", { class: "num", "data-name": "Tokens" }, count(one.sampled_tokens)),
    h("td", { class: "num", "data-name": "Took" }, span(one.played_s)),
    h("td", { class: "num", "data-name": "Weights" }, one.oldest_version === null ? "–" : `v${one.oldest_version}`),
    h("td", { "data-name": "Group" }, one.group_index === null ? "–" : h("a", { href: jobHref(jobId, "groups", one.group_index) }, pill(one.group_state)), one.late && h("small", null, "late")),
    h("td", { class: "when", "data-name": "Written" }, ago(one.created_at, Date.now() / 1000)),
  ];
}
