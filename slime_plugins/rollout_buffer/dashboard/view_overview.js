// The jobs, and whether the buffer is well.

import { KeyedList, h, show } from "./dom.js";
import { ago, bytes, percent, plural, reward, span } from "./format.js";
import { books, callouts, empty, jobHref, pager, pill } from "./parts.js";

export function overviewView(stage) {
  const health = h("div", { class: "facts-line" });
  const service = h("div");
  const list = h("ul", { class: "jobs" });
  const nothing = h("div");
  const pages = h("div");
  const cards = new KeyedList(list, (job) => job.job_id, jobCard);
  const cursor = stage.query.get("cursor");
  stage.poll(`/overview${cursor ? `?cursor=${encodeURIComponent(cursor)}` : ""}`, 3000, (body) => {
    show(health, healthLine(body));
    show(service, callouts(body.explanation));
    body.jobs.forEach((job) => (job.now = body.now));
    cards.show(body.jobs);
    show(nothing, body.jobs.length ? null : noJobs());
    show(pages, body.jobs.length && (cursor || body.next_cursor !== null) ? pager(stage, body.next_cursor, "job", body.jobs.length) : null);
  });
  return {
    title: "",
    element: h("div", null, h("div", { class: "row head" }, h("h1", null, "Jobs"), h("span", { class: "grow" }), health), service, list, nothing, pages),
  };
}

function healthLine(body) {
  const alive = body.supervisor_age_s !== null && body.supervisor_age_s <= 15;
  return [
    h("span", { class: `pill ${alive ? "delivered" : "failed"}` }, alive ? "supervisor alive" : "supervisor not seen"),
    h("span", { class: "muted" }, `${bytes(body.disk_free_bytes)} disk free`),
    h("span", { class: "muted wide-only" }, `plays ${body.task_types.join(", ") || "nothing"}`),
  ];
}

function noJobs() {
  return empty(
    "No job yet",
    "A job appears here as soon as a trainer asks for rollouts. To see one on this machine:",
    h("pre", null, "rollout-buffer demo"),
  );
}

function jobCard(first) {
  const head = h("div", { class: "row" });
  const why = h("div");
  const account = h("div");
  const facts = h("p", { class: "muted line" });
  const name = h("h2", null, h("a", { href: jobHref(first.job_id) }, first.job_id));
  const state = h("span");
  head.append(name, state, h("span", { class: "grow" }), h("span", { class: "muted" }, first.task_type));
  return {
    element: h("li", { class: "panel job" }, head, why, account, facts),
    update(job) {
      show(state, pill(job.state));
      show(why, callouts(job.explanation.slice(0, 2)));
      show(account, books(job.slots));
      show(facts, factsOf(job));
    },
  };
}

function factsOf(job) {
  const { newest } = job;
  const closed = job.slots.submitted - job.slots.open;
  const done = job.slots.submitted ? Math.floor((100 * closed) / job.slots.submitted) : 0;
  const parts = [`${done} % of the slots closed`];
  if (newest.episodes) {
    parts.push(`newest ${plural(newest.episodes, "episode")}: mean reward ${reward(newest.reward_mean)}`);
    if (newest.success !== null) parts.push(`success ${percent(newest.success)}`);
  }
  parts.push(job.finished_at ? `took ${span(job.finished_at - job.created_at)}, ended ${ago(job.finished_at, job.now)}` : `started ${ago(job.created_at, job.now)}`);
  return parts.join(" · ");
}
