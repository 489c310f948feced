// The jobs, worst health first, and the health of the buffer. Ended jobs are folded away.

import { send } from "./api.js";
import { KeyedList, h, show } from "./dom.js";
import { ago, bytes, count, percent, plural, reward, span } from "./format.js";
import { accountBar, callouts, empty, filters, go, jobHref, jobPill, pager, sign } from "./parts.js";

const HEALTH = ["stopped", "attention", "wait", "ended", "ok"];
const COLUMNS = [["Job"], ["What happens"], ["Groups"], ["Delivered", "num"], ["Failed", "num"], ["Reward", "num"], ["Success", "num"], ["When"]];
const MOST_OPEN = 100;

export function overviewView(stage) {
  const health = h("div", { class: "facts-line" });
  const service = h("div");
  const open = jobTable();
  const ended = jobTable();
  const failures = h("span", { class: "pill failed", hidden: "" });
  const archive = h("details", { class: "archive" }, h("summary", null, "Jobs that ended ", failures), ended.element);
  const nothing = h("div");
  const pages = h("div");
  const cursor = stage.query.get("cursor");
  const search = stage.query.get("search") ?? "";
  archive.open = cursor !== null || search !== "";
  let chosen = false;
  archive.querySelector("summary").addEventListener("click", () => (chosen = true));
  const asked = (entries) => new URLSearchParams(Object.entries({ search, ...entries }).filter(([, value]) => value)).toString();
  const found = { open: null, ended: null };
  const fits = () => {
    if (found.open === null || found.ended === null) return;
    if (!chosen && !found.open) archive.open = true;
    archive.hidden = !found.ended && cursor === null;
    show(nothing, found.open || found.ended ? null : search ? empty("No job matches", "Clear the search to see all.") : noJobs());
  };
  stage.poll(`/overview?${asked({ state: "open", limit: MOST_OPEN })}`, 3000, (body) => {
    show(health, healthLine(body));
    show(service, callouts(body.explanation));
    const worst = (job) => HEALTH.indexOf(job.explanation[0]?.severity ?? "ok");
    open.show([...body.jobs].sort((a, b) => worst(a) - worst(b)), body.now);
    found.open = body.jobs.length;
    fits();
  });
  stage.poll(`/overview?${asked({ state: "ended", cursor })}`, 6000, (body) => {
    ended.show(body.jobs, body.now);
    const problems = endedBadly(body.jobs);
    failures.hidden = !problems;
    failures.textContent = problems;
    show(pages, cursor || body.next_cursor !== null ? pager(stage, body.next_cursor, "job", body.jobs.length) : null);
    found.ended = body.jobs.length;
    fits();
  });
  archive.append(pages);
  const searching = filters(stage, [{ name: "search", label: "Name or task type contains", wide: true }], go);
  return {
    title: "",
    element: h("div", null, h("div", { class: "row head" }, h("h1", null, "Jobs"), h("span", { class: "grow" }), health), service, searching, open.element, nothing, archive),
  };
}

/** How many of the jobs failed, and how many finished with nothing to train on; empty where none did. */
function endedBadly(jobs) {
  const failed = jobs.filter((job) => job.state === "failed").length;
  const bare = jobs.filter((job) => job.state !== "failed" && job.explanation[0]?.severity === "stopped").length;
  return [failed && `${failed} failed`, bare && `${bare} with nothing to train on`].filter(Boolean).join(", ");
}

function healthLine(body) {
  const alive = body.supervisor_age_s !== null && body.supervisor_age_s <= 15;
  return [
    h("span", { class: `pill ${alive ? "delivered" : "failed"}` }, alive ? "supervisor alive" : "supervisor not seen"),
    h("span", { class: "muted" }, `${bytes(body.disk_free_bytes)} disk free`),
    h("span", { class: "muted wide-only", title: packagesOf(body.extensions) }, `plays ${body.task_types.join(", ") || "nothing"}`),
  ];
}

/** The extensions that installed packages register, one per line. */
function packagesOf(extensions) {
  return extensions.map(({ group, name, package: owner }) => `${owner}: ${name} (${group})`).join("\n");
}

function noJobs() {
  const told = h("p", { role: "status" });
  const button = h("button", { type: "button", class: "primary" }, "Create an example job");
  button.addEventListener("click", async () => {
    button.disabled = true;
    try {
      await putExample();
      told.textContent = "Created; it appears in a moment.";
    } catch (error) {
      told.textContent = error.message;
      button.disabled = false;
    }
  });
  return empty(
    "No job yet",
    "A job appears here as soon as a trainer asks for rollouts. The example is a job of three questions with finished answers; cancel it when you have looked.",
    h("p", null, button),
    told,
    h("p", null, "Or create and fill a job from a shell:"),
    h("pre", null, `curl ${location.origin}/start_rollout -d '{"task_type": "external", "job_id": "mine", "num_repeat_per_sample": 1}'\ncurl ${location.origin}/buffer/write -d '{"job_id": "mine", "uid": "a", "instance_id": "1", "reward": 1, "messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}'`),
    h("p", null, h("code", null, "rollout-buffer demo"), " runs a policy, simulated phones and a trainer with a buffer of their own, which has its own dashboard."),
  );
}

const EXAMPLES = [["2 + 2?", ["4", "**4**", "5", "4, I think"]], ["The capital of Portugal?", ["Lisbon", "Porto", "Lisbon.", "Lisbon"]], ["Is 91 a prime number?", ["No: 91 = 7 · 13", "Yes", "Yes, it is", "No"]]];
const RIGHT = [["4", "**4**", "4, I think"], ["Lisbon", "Lisbon."], ["No: 91 = 7 · 13", "No"]];

/** Creates a job of questions and writes finished answers, as any program may. */
async function putExample() {
  const job_id = "example";
  await send("/start_rollout", { task_type: "external", job_id, num_repeat_per_sample: 4 });
  for (const [at, [question, answers]] of EXAMPLES.entries()) {
    for (const [slot, answer] of answers.entries()) {
      const success = RIGHT[at].includes(answer);
      const messages = [{ role: "user", content: question }, { role: "assistant", content: answer }];
      await send("/buffer/write", { job_id, uid: `example-${at}-${slot}`, instance_id: question, reward: success ? 1 : 0, messages, extra_info: { success, label: RIGHT[at][0] } });
    }
  }
}

function jobTable() {
  const body = h("tbody");
  const rows = new KeyedList(body, (job) => job.job_id, jobRow);
  const head = h("thead", null, h("tr", null, COLUMNS.map(([name, kind]) => h("th", { scope: "col", class: kind ?? null }, name))));
  const table = h("table", { class: "list job-list" }, head, body);
  return {
    element: table,
    show(jobs, now) {
      table.hidden = !jobs.length;
      rows.show(jobs.map((job) => ({ ...job, now })));
    },
  };
}

function jobRow() {
  const element = h("tr");
  return { element, update: (job) => show(element, ...jobCells(job)) };
}

function jobCells(job) {
  const { groups, newest } = job;
  const first = job.explanation[0];
  const total = Object.values(groups).reduce((sum, one) => sum + one, 0);
  const cell = (name, kind, ...children) => h("td", { class: kind, "data-name": name }, children);
  return [
    h("th", { scope: "row", class: "main" }, h("a", { href: jobHref(job.job_id) }, job.job_id), h("small", null, jobPill(job.state, first?.severity), ` ${job.task_type}`)),
    cell("", `says health ${first?.severity ?? "ok"}`, first && [sign(first.severity), h("span", { title: first.advice || null }, first.message)]),
    cell("Groups", "progress", accountBar(job.slots), h("small", null, `${count(total - groups.open)} of ${plural(total, "group")} closed`)),
    cell("Delivered", "num", count(groups.delivered)),
    cell("Failed", `num${groups.failed ? " problem" : ""}`, count(groups.failed)),
    cell("Reward", "num", newest.episodes ? h("span", { title: `mean of the newest ${plural(newest.episodes, "episode")}` }, reward(newest.reward_mean)) : "–"),
    cell("Success", "num", newest.episodes ? percent(newest.success) : "–"),
    cell("When", "when", job.finished_at ? `ended ${ago(job.finished_at, job.now)}, took ${span(job.finished_at - job.created_at)}` : `started ${ago(job.created_at, job.now)}`),
  ];
}
