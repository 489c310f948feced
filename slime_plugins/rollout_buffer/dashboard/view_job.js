// One job: its health, its rewards, and the states of its groups.

import { path } from "./api.js";
import { chart, CHARTS } from "./charts.js";
import { h, scrolling, show } from "./dom.js";
import { count, moment, number, percent, plural, reward, span } from "./format.js";
import { histogram } from "./histogram.js";
import { accounting, actions, callouts, crumbs, fact, jobHref, jobPill, pill, section, tabs } from "./parts.js";

const RANGES = [
  ["", "whole job"],
  ["900", "15 min"],
  ["3600", "1 h"],
  ["21600", "6 h"],
  ["86400", "24 h"],
];

/** Head and tabs that all pages of a job share. */
export function jobHead(jobId, here, ...more) {
  return [
    crumbs(["Jobs", "#/"], [jobId, here === "Overview" ? null : jobHref(jobId)], ...(here === "Overview" ? [] : [[here, null]])),
    h("div", { class: "row head" }, h("h1", { class: "id" }, jobId), more),
    tabs(jobId, here),
  ];
}

export function jobView(stage, jobId) {
  const state = h("span");
  const buttons = h("div", { class: "row actions" });
  const why = h("div", { role: "status", "aria-label": "State of the job and its reasons" });
  const trace = h("div");
  const facts = h("dl", { class: "facts" });
  const account = h("div");
  const losses = h("div", { class: "two" });
  const failed = h("div");
  const farm = h("div");
  const apart = h("div");
  const bias = h("div");
  const rewards = h("div", { class: "panel", hidden: true });
  let job = null;
  let health;
  let shownState = null;
  let shownFailures = "";
  const showState = () => job && show(state, jobPill(job.state, health));

  const jobPoll = stage.poll(path(["jobs", jobId]), 3000, (body) => {
    job = body;
    showState();
    if (shownState !== job.state) {
      shownState = job.state;
      trace.replaceChildren(...(job.cause.includes("\n") ? [h("details", null, h("summary", null, "Traceback"), h("pre", null, job.cause))] : []));
      buttons.replaceChildren(...actions(job, () => [jobPoll, explanationPoll].forEach((poll) => poll.now())));
    }
    show(account, accounting(job.slots));
    show(losses, whereLost(job));
    show(bias, ...biasOf(job.bias));
    show(farm, ...farmOf(job.devices, ["finished", "cancelled", "failed"].includes(job.state)));
  });
  const explanationPoll = stage.poll(path(["jobs", jobId, "explanation"]), 2000, (body) => {
    health = body.explanation[0].severity;
    showState();
    show(why, callouts(body.explanation));
    show(facts, factsOf(body, jobId));
  });

  stage.poll(path(["trajectory_summary"], { job_id: jobId }), 20000, (body) => {
    const bars = histogram(jobId, body);
    rewards.hidden = bars === null;
    show(rewards, h("h2", { class: "small" }, `Rewards of all ${count(body.trajectories)} trajectories; a bar opens the list of its trajectories`), bars);
  });
  stage.poll(path(["jobs", jobId, "attempts"], { limit: 5 }), 4000, (body) => {
    const newest = JSON.stringify(body.attempts);
    if (newest === shownFailures) return; // an opened fold stays open
    shownFailures = newest;
    show(failed, ...failuresOf(body));
  });
  stage.poll(path(["jobs", jobId, "mismatch"], { limit: 10 }), 20000, (body) => show(apart, ...mismatchOf(body)));

  const element = h(
    "div",
    null,
    jobHead(jobId, "Overview", state, h("span", { class: "grow" }), h("a", { class: "button", href: jobHref(jobId, "compare") }, "Compare"), buttons),
    why,
    trace,
    facts,
    h("div", { class: "beside-each-other" }, h("div", { class: "panel" }, h("h2", { class: "small" }, "Every slot in exactly one state"), account), rewards),
    charts(stage, jobId),
    losses,
    failed,
    bias,
    apart,
    farm,
  );
  return { title: jobId, element };
}

function factsOf(body, jobId) {
  const { newest } = body;
  const range = newest.episodes ? `${reward(newest.reward_min)} to ${reward(newest.reward_max)}` : "";
  return [
    fact("Mean reward", newest.episodes ? reward(newest.reward_mean) : "–", newest.episodes ? `newest ${count(newest.episodes)}, ${range}` : "no episode yet"),
    fact("Success", percent(newest.success), newest.success === null ? "not reported" : `newest ${count(newest.episodes)}`),
    fact("Being played", count(body.running_attempts), body.trajectory_age_s === null ? (newest.episodes ? "episodes" : "no trajectory") : `last ended ${span(body.trajectory_age_s)} ago`),
    fact("Episodes at once", body.concurrency?.limit === undefined ? "–" : count(body.concurrency.limit), body.concurrency?.reason ? `auto: ${body.concurrency.reason}` : body.concurrency?.limit === undefined ? "not reported" : "num_process of the job"),
    fact("Devices", devices(body.devices), deviceWords(body.devices)),
    fact("Weights", body.weight_version === null ? "–" : `v${body.weight_version}`, body.weight_version === null ? "not reported" : "newest seen"),
    fact("Trainer", body.poll_age_s === null ? "never" : `${span(body.poll_age_s)} ago`, body.trainer_waits_s === null ? "last poll" : `waits for ${span(body.trainer_waits_s)}`),
  ];
}

const devices = (report) => (report.total === undefined ? "–" : `${count(report.busy ?? 0)} / ${count(report.total)}`);

function deviceWords(report) {
  if (report.total === undefined) return "not reported";
  const parts = ["busy"];
  for (const name of ["waiting", "starting", "broken"]) if (report[name]) parts.push(`${count(report[name])} ${name}`);
  return parts.join(", ");
}

function whereLost(job) {
  const causes = Object.entries(job.causes).flatMap(([state, byCause]) => Object.entries(byCause).map(([cause, times]) => [state, cause, times]));
  const failures = Object.entries(job.attempts).filter(([name]) => name.startsWith("failed:"));
  const attempts = ["running", "finished", "given_up"].filter((name) => job.attempts[name]).map((name) => `${count(job.attempts[name])} ${name.replace("_", " ")}`);
  const outcomes = Object.entries(job.outcomes).map(([name, times]) => `${count(times)} ${name}`);
  return [
    section(
      "Why groups were dropped",
      causes.length
        ? h(
            "table",
            null,
            h("thead", null, h("tr", null, h("th", { scope: "col" }, "State"), h("th", { scope: "col" }, "Cause"), h("th", { scope: "col", class: "num" }, "Groups"))),
            h("tbody", null, causes.map(([state, cause, times]) => h("tr", null, h("td", null, pill(state)), h("td", null, h("a", { href: `${jobHref(job.job_id, "groups")}?${new URLSearchParams({ state, cause })}` }, cause || "no cause")), h("td", { class: "num" }, count(times))))),
          )
        : h("p", { class: "muted" }, "None was dropped."),
    ),
    section(
      "Episodes",
      h("p", null, outcomes.length ? `Trajectories: ${outcomes.join(", ")}` : "No trajectory", job.late ? `, ${count(job.late)} came late` : "", job.damaged ? `, ${count(job.damaged)} damaged` : "", ". "),
      attempts.length > 0 && h("p", null, `Attempts: ${attempts.join(", ")}.`),
      job.measures.prompts && h("p", null, promptsInWords(job.measures.prompts)),
      failures.length
        ? h(
            "table",
            null,
            h("thead", null, h("tr", null, h("th", { scope: "col" }, "Failed attempts, by error"), h("th", { scope: "col", class: "num" }, "Attempts"))),
            h("tbody", null, failures.map(([name, times]) => h("tr", null, h("td", null, h("code", null, name.slice(7))), h("td", { class: "num" }, count(times))))),
          )
        : h("p", { class: "muted" }, "No attempt failed."),
    ),
  ];
}

/** A job's id as a shell takes it. */
const quoted = (id) => (/^[\w@%+=:,./-]+$/.test(id) ? id : `'${id.replaceAll("'", `'"'"'`)}'`);

/** The newest attempts that failed, each folded: its traceback, and where its runner logs. */
function failuresOf({ job_id, attempts, log }) {
  if (!attempts.length) return [];
  const fold = (one) =>
    h(
      "details",
      null,
      h("summary", null, h("code", null, one.error_code), ` ${one.error_message} `, h("span", { class: "muted" }, `${one.instance_id}, slot ${one.slot}, attempt ${one.attempt}, ${moment(one.ended_at)}`)),
      one.traceback ? h("pre", null, one.traceback) : h("p", { class: "muted" }, "No traceback: its code says what failed."),
    );
  return [
    section(
      "Newest failed attempts",
      attempts.map(fold),
      h("p", { class: "muted" }, h("code", null, `rollout-buffer attempts ${quoted(job_id)}`), " lists all of them with their messages.", log && [" The runner's log: ", h("code", null, log)]),
    ),
  ];
}

/** Results of the comparison of prompts with what the engine ran. */
function promptsInWords({ checked, differing, unknown, untrained, forked, extra_tokens, row_tokens }) {
  const parts = [`${count(checked)} compared with what the engine ran, ${count(differing)} differ`];
  if (unknown) parts.push(`for ${count(unknown)} the engine reports nothing`);
  if (untrained) parts.push(`${plural(untrained, "turn")} not trained because the prompt that the engine ran is unknown`);
  if (forked) parts.push(`${plural(forked, "additional row")} from forks, which repeat ${percent(extra_tokens / row_tokens)} of all tokens`);
  return `Prompts: ${parts.join("; ")}.`;
}

/** How many of the submitted members were trained, as soon as enough groups are closed. */
function biasOf(rows) {
  if (!rows.length) return [];
  const right = { scope: "col", class: "num" };
  const head = h("tr", null, ["By", "Members"].map((name) => h("th", { scope: "col" }, name)), ["Submitted", "Trained", "For rewards", "Given up", "Failed", "Lost", "Share trained"].map((name) => h("th", right, name)));
  const cells = ({ submitted, trained, filtered, given_up, failed }) =>
    [...[submitted, trained, filtered, given_up, failed, submitted - trained - filtered - given_up - failed].map(count), percent(trained / submitted)];
  return [
    section(
      "Trained against submitted",
      scrolling(h("table", { class: "dense" }, h("thead", null, head), h("tbody", null, rows.map((row) => h("tr", null, h("td", null, row.by), h("td", null, row.name), cells(row).map((cell) => h("td", { class: "num" }, cell))))))),
    ),
  ];
}

/** The distance between the log-probs of trainer and engine, if a trainer reported its own. */
function mismatchOf(body) {
  if (body.mean === null) return [];
  const table = (names, rows) =>
    scrolling(
      h(
        "table",
        { class: "dense" },
        h("thead", null, h("tr", null, names.map((name) => h("th", { scope: "col", class: "num" }, name)))),
        h("tbody", null, rows.map((cells) => h("tr", null, cells.map((cell) => h("td", { class: "num" }, cell))))),
      ),
    );
  const means = (name, entries) => entries.map((entry) => [entry[name] === null ? "not reported" : count(entry[name] + (name === "turn" ? 1 : 0)), count(entry.tokens), number(entry.mean, 4), number(entry.max, 3)]);
  const link = (entry) => h("a", { href: jobHref(body.job_id, "trajectories", entry.uid) }, entry.uid);
  const worst = body.worst.map((entry) => [link(entry), count(entry.row + 1), count(entry.turn + 1), number(entry.gap, 3), entry.weight_lag === null ? "–" : count(entry.weight_lag), number(entry.advantage, 2)]);
  return [
    section(
      "Trainer and engine",
      h("p", null, `|train − rollout log-prob| over ${count(body.tokens)} tokens of ${count(body.rows)} rows: mean ${number(body.mean, 4)}, max ${number(body.max, 3)}.`),
      h("div", { class: "two" }, table(["Turn", "Tokens", "Mean", "Max"], means("turn", body.by_turn)), table(["Weight lag", "Tokens", "Mean", "Max"], means("weight_lag", body.by_weight_lag))),
      h("h3", null, "Largest distances"),
      table(["Trajectory", "Row", "Turn", "Distance", "Weight lag", "Advantage"], worst),
    ),
  ];
}

const DEVICE_PILLS = { ready: "delivered", leased: "ready", preparing: "leased", booting: "leased", checking: "leased", recycling: "leased", quarantined: "failed" };

/** The devices as the job's runner last reported them; an ended job has given them back since. */
function farmOf(report, over) {
  if (!report?.devices?.length) return [];
  const old = report.age_s > 30;
  const names = ["Device", "State", "Episodes", "Actions", "Reset", "Action", "Failures", "Renewed", "Last error"];
  const failures = (device) => Object.entries(device.failures ?? {}).map(([kind, times]) => `${count(times)} ${kind}`).join(", ") || "none";
  const row = (device) =>
    h(
      "tr",
      null,
      h("th", { scope: "row" }, device.device_id),
      h("td", null, over && device.state === "leased" ? h("span", { class: "pill" }, "given back") : h("span", { class: `pill ${DEVICE_PILLS[device.state] ?? ""}` }, device.state)),
      [count(device.episodes), count(device.steps), span(device.reset_s_p50), span(device.step_s_p50)].map((value) => h("td", { class: "num" }, value)),
      h("td", null, failures(device)),
      h("td", { class: "num" }, count((device.replacements ?? 0) + (device.recyclings ?? 0))),
      h("td", { class: "says" }, device.last_error || ""),
    );
  return [
    section(
      "Devices",
      old && h("p", { class: "muted" }, `Last reported ${span(report.age_s)} ago.`),
      scrolling(h("table", { class: "dense" }, h("caption", { class: "unseen" }, "Devices of the pool; reset and action are medians"), h("thead", null, h("tr", null, names.map((name, at) => h("th", { scope: "col", class: (at > 1 && at < 6) || at === 7 ? "num" : "" }, name)))), h("tbody", null, report.devices.map(row)))),
    ),
  ];
}

// --- charts ----------------------------------------------------------------------------------------------------------

function charts(stage, jobId) {
  const drawn = CHARTS.map(chart);
  const full = h("div", { class: "charts" });
  const bare = h("div", { class: "charts" });
  const names = h("summary");
  const folded = h("details", { class: "archive" }, names, bare);
  const select = h("select", null, RANGES.map(([value, text]) => h("option", { value }, text)));
  const told = h("span", { class: "muted" });
  const feed = new Feed();
  const poll = stage.poll(
    () => path(["jobs", jobId, "series"], feed.query(select.value)),
    4000,
    (body) => {
      feed.take(body);
      drawn.forEach((one) => one.update(feed.columns, feed.widthS, body.until));
      sortOut(drawn, full, bare);
      const without = drawn.filter((one) => !one.hasData());
      folded.hidden = !without.length;
      show(names, `Charts without data yet: ${without.map((one) => one.title).join(", ")}`);
      show(told, feed.widthS < 60 ? `one point per ${span(feed.widthS)}, over the minute before it` : `one point per ${span(feed.widthS)}`);
    },
  );
  select.addEventListener("change", () => {
    feed.forget();
    poll.now();
  });
  stage.atEnd(() => drawn.forEach((one) => one.end()));
  return h(
    "section",
    { "aria-labelledby": "s-charts" },
    h("div", { class: "row head" }, h("h2", { id: "s-charts" }, "Over time"), told, h("span", { class: "grow" }), h("label", { class: "inline" }, h("span", null, "Show"), select)),
    full,
    folded,
  );
}

/** Charts with data are visible, the others are folded away; both keep their order. */
function sortOut(drawn, full, bare) {
  for (const [place, wanted] of [[full, drawn.filter((one) => one.hasData())], [bare, drawn.filter((one) => !one.hasData())]]) {
    const elements = wanted.map((one) => one.element);
    if (elements.length !== place.childElementCount || elements.some((element, at) => place.children[at] !== element)) place.append(...elements);
  }
}

/** Holds the columns: the whole range is requested once, later only the newest buckets. */
class Feed {
  constructor() {
    this.forget();
  }

  forget() {
    this.columns = null;
    this.wholeAt = 0;
  }

  query(rangeS) {
    this.rangeS = rangeS;
    const old = performance.now() - this.wholeAt > 120000;
    if (this.columns === null || old || this.columns.t.length < 3) {
      this.columns = null;
      this.wholeAt = performance.now();
      return { range_s: rangeS };
    }
    return { range_s: rangeS, width_s: this.widthS, since: this.columns.t.at(-2) };
  }

  take(body) {
    if (this.columns === null) {
      this.columns = body.columns;
      this.widthS = body.width_s;
      return;
    }
    const from = body.columns.t[0];
    const keep = this.columns.t.filter((start) => start < from).length;
    const drop = this.rangeS ? this.columns.t.filter((start) => start < body.until - Number(this.rangeS) - this.widthS).length : 0;
    for (const name of Object.keys(this.columns)) this.columns[name] = [...this.columns[name].slice(drop, keep), ...body.columns[name]];
  }
}

