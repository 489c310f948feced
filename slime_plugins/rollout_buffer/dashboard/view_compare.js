// Two of a kind side by side: members of a group and where they differ first, or jobs over the time since their start.

import { ask, path } from "./api.js";
import { chart, CHARTS, seriesOf } from "./charts.js";
import { h, scrolling, show } from "./dom.js";
import { firstDifference, readEpisode } from "./episode.js";
import { count, number, percent, plural, reward, short, span } from "./format.js";
import { crumbs, empty, filters, go, jobHref, section } from "./parts.js";
import { transcript } from "./transcript.js";

/** A table with a column for each of the two; a row is a name, both values, and how a value is written. */
function versus(heads, rows) {
  const cells = ([name, a, b, text]) => {
    const numbers = typeof a === "number" && typeof b === "number";
    const difference = numbers ? `${b > a ? "+" : ""}${text(b - a)}`.replace("++", "+").replace("-", "−") : "";
    return h("tr", null, h("th", { scope: "row" }, name), [text(a), text(b), difference].map((value) => h("td", { class: "num" }, value)));
  };
  return scrolling(
    h(
      "table",
      { class: "dense wraps" },
      h("thead", null, h("tr", null, h("th", { scope: "col" }, ""), heads.map((head) => h("th", { scope: "col", class: "num" }, head)), h("th", { scope: "col", class: "num" }, "second − first"))),
      h("tbody", null, rows.filter(([, a, b]) => known(a) || known(b)).map(cells)),
    ),
  );
}

const known = (value) => value !== null && value !== undefined && value !== "";
const words = (value) => (known(value) ? String(value).replaceAll("_", " ") : "–");

// --- two members of a group ------------------------------------------------------------------------------------------

export function compareMembersView(stage, jobId, groupIndex) {
  const body = h("div", null, h("p", { class: "loading" }, "Loading …"));
  const poll = stage.poll(path(["groups", groupIndex]), 3600000, async (group) => {
    poll.stop(); // what is written never changes
    const pair = chosen(group.members, stage.query.get("a"), stage.query.get("b"));
    const field = (name, label, any) => ({ name, label, any, wide: true, options: group.members.map((one) => [one.uid, memberName(one)]) });
    const choice = filters(stage, [field("a", "First", "highest reward"), field("b", "Second", "furthest from it in reward")], go, [], { folded: false });
    const head = [crumbs(["Jobs", "#/"], [jobId, jobHref(jobId)], ["Groups", jobHref(jobId, "groups")], [group.instance_id, jobHref(jobId, "groups", groupIndex)], ["Compare", null]), h("h1", { class: "id" }, group.instance_id), choice];
    if (pair === null) {
      body.replaceChildren(...head, empty("There are no two to compare", "The group has fewer than two members yet."));
      return;
    }
    try {
      const asked = pair.map((one) => ask(path(["trajectories", one.uid], { job_id: jobId, generations: "false" })));
      const found = (await Promise.all(asked)).map((one) => one.body);
      body.replaceChildren(...head, ...comparison(jobId, pair, found));
    } catch (error) {
      stage.failed(error);
    }
  });
  return { title: `Compare in group ${groupIndex}`, element: body };
}

const memberName = (one) => `slot ${one.slot ?? "–"}${one.attempt > 1 ? `, attempt ${one.attempt}` : ""}: ${reward(one.reward)}${one.late ? ", late" : ""}`;

/** The two that the address names; else the best, and whichever is furthest in reward; null where there are no two. */
function chosen(members, first, second) {
  const named = (uid) => members.find((one) => one.uid === uid);
  const furthest = (from) => members.filter((one) => one !== from).sort((a, b) => Math.abs(b.reward - from.reward) - Math.abs(a.reward - from.reward))[0];
  if (members.length < 2) return null;
  const a = named(first) ?? (named(second) ? furthest(named(second)) : [...members].sort((x, y) => y.reward - x.reward)[0]);
  return [a, named(second) ?? furthest(a)];
}

function comparison(jobId, pair, [a, b]) {
  const episodes = [a, b].map(readEpisode);
  const hrefs = pair.map((one) => jobHref(jobId, "trajectories", one.uid));
  const phases = [...new Set([a, b].flatMap((one) => Object.keys(one.timings_s ?? {})))];
  const row = (name, of, text = words) => [name, of(a), of(b), text];
  const phaseRows = (phase) => [
    row(`${phase} in all`, (one) => one.timings_s?.[phase], span),
    phase === "generate" && row("generate, mean per turn", (one) => (one.turns ? one.timings_s?.[phase] / one.turns : null), span),
  ];
  const rows = [
    row("reward", (one) => one.reward, reward),
    row("raw reward", (one) => one.raw_reward, reward),
    row("success", (one) => one.success, number),
    row("outcome", (one) => one.outcome),
    row("stopped", (one) => one.stop_reason),
    row("turns", (one) => one.turns, count),
    row("sampled tokens", (one) => one.sampled_tokens, count),
    ...phases.flatMap(phaseRows).filter(Boolean),
    row("slowest turn, engine", slowest("engine_s"), span),
    row("slowest turn, environment", slowest("environment_s"), span),
    row("oldest weights", (one) => one.oldest_version, words),
  ];
  return [
    versus(pair.map((one, at) => h("a", { href: hrefs[at] }, memberName(one))), rows),
    ...turnsOf(episodes, hrefs, pair),
  ];
}

const slowest = (name) => (one) => (one.turn_timings ?? []).map((timing) => timing[name]).reduce((most, seconds) => (seconds === null ? most : Math.max(most ?? 0, seconds)), null);

/** Where they differ first, in words; then their turns, those before it folded. */
function turnsOf(episodes, hrefs, pair) {
  const first = firstDifference(...episodes);
  const texts = episodes.map((episode, at) => transcript(episode, { hrefOf: (turn) => `${hrefs[at]}?turn=${turn}`, onChoose: (index) => (location.hash = `${hrefs[at]}?turn=${index + 1}`) }));
  texts.forEach((text) => text.draw(true));
  const longest = Math.max(...texts.map((text) => text.steps.length));
  const side = (turn) => texts.map((text, at) => h("div", null, h("small", { class: "muted" }, memberName(pair[at])), text.steps[turn] ?? h("p", { class: "muted" }, "It has ended.")));
  const rows = Array.from({ length: longest }, (_, turn) => h("div", { class: "panel versus" }, side(turn)));
  const same = first === null ? longest : first.turn - 1;
  return [
    section("First difference", h("div", { class: "callout wait" }, differenceInWords(first))),
    section(
      "Turns",
      same > 0 && h("details", { class: "panel" }, h("summary", null, `The same in both: ${plural(same, "turn")}`), rows.slice(0, same)),
      rows.slice(same),
    ),
  ];
}

function differenceInWords(first) {
  if (first === null) return h("p", null, "All turns are the same; system prompts are not compared, nor what came after the last reply.");
  const { turn, where, texts, at } = first;
  const from = Math.max(0, at - 40);
  const quote = (text) => (text === null ? h("i", null, "has no such turn") : [short(text.slice(from, at), 60), h("mark", null, short(text.slice(at, at + 160), 120) || "ends here")]);
  const same = at > 0 ? `is the same for ${plural(at, "character")}, then differs` : "differs from its first character on";
  return h("div", null, h("p", null, `Turn ${turn}: ${where === "seen" ? "what they saw" : "what they replied"} ${same}.`), texts.map((text, side) => h("p", null, h("b", null, `${side ? "Second" : "First"}: `), quote(text))));
}

// --- two jobs --------------------------------------------------------------------------------------------------------

const COMPARED = CHARTS.filter((spec) => ["reward", "success", "groups", "staleness", "tokens"].includes(spec.id));

export function compareJobsView(stage, jobId) {
  const other = stage.query.get("with");
  const choice = h("div");
  const listed = stage.poll("/overview?limit=100", 3600000, ({ jobs }) => {
    listed.stop();
    const names = jobs.map((job) => job.job_id).filter((name) => name !== jobId);
    show(choice, filters(stage, [{ name: "with", label: "Compare with", any: "choose a job", wide: true, options: names.map((name) => [name, name]) }], go, [], { folded: false }));
  });
  const head = [crumbs(["Jobs", "#/"], [jobId, jobHref(jobId)], ["Compare", null]), h("h1", { class: "id" }, other ? `${jobId} and ${other}` : jobId), choice];
  if (!other) return { title: `Compare ${jobId}`, element: h("div", null, head, empty("Compared with what?", "Choose the other job above.")) };

  const ids = [jobId, other];
  const totals = h("div");
  const drawn = COMPARED.map((spec) => chart({ ...spec, says: `${spec.lines[0].name}, by the time since the start of each`, band: undefined, elapsed: true, lines: ids.map((name, at) => ({ ...spec.lines[0], name, color: ["line-1", "line-3"][at] })) }));
  const jobs = [null, null];
  const summaries = [null, null];
  const series = [null, null];
  ids.forEach((id, at) => {
    const showTotals = (kept) => (body) => {
      kept[at] = body;
      if ([...jobs, ...summaries].every(Boolean)) show(totals, versus(ids.map((name) => h("a", { href: jobHref(name) }, name)), jobRows(jobs, summaries)));
    };
    stage.poll(path(["jobs", id]), 5000, showTotals(jobs));
    stage.poll(path(["trajectory_summary"], { job_id: id }), 10000, showTotals(summaries));
    stage.poll(path(["jobs", id, "series"]), 10000, (body) => {
      series[at] = body;
      if (series.every(Boolean)) drawn.forEach((one, chosen) => one.draw(joined(COMPARED[chosen], series)));
    });
  });
  stage.atEnd(() => drawn.forEach((one) => one.end()));
  return { title: `Compare ${jobId} and ${other}`, element: h("div", null, head, totals, section("Since the start of each", h("div", { class: "charts" }, drawn.map((one) => one.element)))) };
}

/** The first line of a chart for each of the jobs, over the seconds since its first bucket. */
function joined(spec, series) {
  const tables = series.map((body) => [body.columns.t.map((start) => start - body.columns.t[0]), seriesOf(spec, body.columns, body.width_s, body.until)[0]]);
  return window.uPlot.join(tables).map((values) => [...values].map((value) => value ?? null));
}

function jobRows(jobs, summaries) {
  const ofJob = (name, of, text = count) => [name, of(jobs[0]), of(jobs[1]), text];
  const ofAll = (name, of, text) => [name, of(summaries[0]), of(summaries[1]), text];
  return [
    ofJob("state", (job) => job.state, words),
    ofAll("trajectories", (one) => one.trajectories, count),
    ofAll("mean reward", (one) => one.reward_mean, (value) => reward(value, 3)),
    ofAll("success", (one) => one.success, percent),
    ofAll("mean turns", (one) => one.turns, number),
    ofAll("mean sampled tokens", (one) => (one.sampled_tokens ? one.sampled_tokens / one.trajectories : null), count),
    ofAll("mean length of an episode", (one) => one.played_s, span),
    ...["delivered", "filtered", "failed"].map((state) => ofJob(`slots ${state}`, (job) => job.slots[state])),
  ];
}
