// One episode: all of it as one text to scroll, the screen beside it, what it earned and how long it took.

import { ask, path } from "./api.js";
import { branchSection } from "./branches.js";
import { h, show } from "./dom.js";
import { answerOf, asText, deletionsOf, firstQuestion, readEpisode } from "./episode.js";
import { bytes, count, moment, number, plural, reward, short, span } from "./format.js";
import { crumbs, jobHref, json, pill, rewardCell, section } from "./parts.js";
import { player } from "./player.js";
import { Screen } from "./screen.js";
import { tokenSection } from "./tokens.js";
import { markFound, transcript } from "./transcript.js";

const KNOWN = new Set(["steps_log", "reward_breakdown"]);
const RAW_KEY = "rollout-buffer-raw";

export function trajectoryView(stage, jobId, uid) {
  const body = h("div", null, h("p", { class: "loading" }, "Loading …"));
  const poll = stage.poll(path(["trajectories", uid], { job_id: jobId, generations: "false" }), 3600000, (trajectory) => {
    poll.stop(); // what is written never changes
    body.replaceChildren(...page(stage, jobId, trajectory));
  });
  return { title: `Episode ${uid}`, element: body };
}

function page(stage, jobId, trajectory) {
  const episode = readEpisode(trajectory);
  const about = trajectory.extra_info ?? {};
  const siblings = h("div", { class: "row neighbours" });
  const verdict = h("p", { class: "verdict" });
  show(verdict, ...verdictOf(trajectory, about, null));
  learnAround(stage, jobId, trajectory, { siblings, verdict, about });
  return [
    h("div", { class: "row over" }, crumbs(["Jobs", "#/"], [jobId, jobHref(jobId)], ["Trajectories", jobHref(jobId, "trajectories")], [trajectory.uid, null]), h("span", { class: "grow" }), siblings, h("a", { class: "button small", href: path(["trajectories", trajectory.uid], { job_id: jobId }), download: `${trajectory.uid}.json`, title: "The stored trajectory with its generations; screenshots as hashes" }, "Download")),
    h("div", { class: "row head" }, h("h1", { class: "id" }, trajectory.instance_id), rewardCell(trajectory.reward), pill(trajectory.outcome), trajectory.late && h("span", { class: "pill skipped" }, "late"), facts(jobId, trajectory, about)),
    verdict,
    origin(trajectory, about),
    stageOf(stage, jobId, trajectory, episode, about),
    branchSection(jobId, trajectory),
    h("div", { class: "two" }, rewardSection(trajectory, about), timingSection(trajectory)),
    section("Tokens", tokenSection(jobId, trajectory.uid)),
    section(
      "Everything else",
      h("details", { class: "panel" }, h("summary", null, "What the generator noted (extra_info)"), json(Object.fromEntries(Object.entries(about).filter(([key]) => !KNOWN.has(key))))),
      lazily(`${plural((trajectory.messages ?? []).length, "message")} as stored`, () => json(trajectory.messages ?? [])),
    ),
  ]
    .flat()
    .filter(Boolean);
}

function lazily(title, make) {
  const details = h("details", { class: "panel" }, h("summary", null, title));
  details.addEventListener("toggle", () => details.open && details.childElementCount === 1 && details.append(make()));
  return details;
}

function facts(jobId, one, about) {
  const some = (name, value, title) => value !== null && h("span", { class: "some", title: title || null }, h("span", { class: "muted" }, `${name} `), value);
  return h(
    "div",
    { class: "facts-line" },
    one.raw_reward !== null && one.raw_reward !== one.reward && some("raw reward", reward(one.raw_reward, 3)),
    some("success", one.success === null ? "not reported" : one.success >= 1 ? "yes" : one.success > 0 ? number(one.success) : "no"),
    some("stopped", one.stop_reason.replaceAll("_", " ")),
    some("turns", `${count(one.turns)}${about.max_turns ? ` of ${count(about.max_turns)}` : ""}`),
    one.sampled_tokens !== null && some("tokens", count(one.sampled_tokens)),
    one.oldest_version !== null && some("weights", `v${one.oldest_version}${one.versions_behind ? `, ${one.versions_behind} behind` : ""}`),
    one.group_index !== null && some("group", h("a", { href: jobHref(jobId, "groups", one.group_index) }, pill(one.group_state)), one.slot === null ? "" : `slot ${one.slot}, attempt ${one.attempt}, epoch ${one.epoch ?? "–"}`),
    some("written", moment(one.created_at), bytes(one.body_bytes)),
  );
}

// --- around it: its group, the episodes before and after, its label --------------------------------------------------

async function learnAround(stage, jobId, trajectory, { siblings, verdict, about }) {
  const keys = (event) => {
    const link = { "[": ".neighbours [rel=prev]", "]": ".neighbours [rel=next]" }[event.key];
    if (link && !event.target.closest("input, select, textarea")) document.querySelector(link)?.click();
  };
  document.addEventListener("keydown", keys);
  stage.atEnd(() => document.removeEventListener("keydown", keys));
  const asked = [ask(path(["neighbours", trajectory.uid], { job_id: jobId }))];
  if (trajectory.group_index !== null) asked.push(ask(path(["groups", trajectory.group_index])));
  const [around, group] = (await Promise.allSettled(asked)).map((one) => one.value?.body ?? null);
  if (around !== null) show(siblings, ...links(jobId, trajectory, around, group));
  if (group) show(verdict, ...verdictOf(trajectory, about, group.instance));
}

function links(jobId, one, around, group) {
  const href = (uid) => jobHref(jobId, "trajectories", uid);
  const to = (uid, text, rel, title) => (uid ? h("a", { class: "button small", href: href(uid), rel, title }, text) : h("span", { class: "button small off", "aria-hidden": "true" }, text));
  const members = (group?.members ?? []).filter((member) => member.slot !== null);
  const at = members.findIndex((member) => member.uid === one.uid);
  const dots = members.length > 1 && members.map((member) => h("a", { class: `sibling${member.reward > 0 ? " up" : member.reward < 0 ? " down" : ""}`, href: href(member.uid), "aria-current": member.uid === one.uid ? "true" : null, title: `slot ${member.slot}: ${reward(member.reward)}` }, reward(member.reward, 1)));
  return [
    members.length > 1 && at >= 0 && [to(members[at - 1]?.uid, "‹", "prev", "Previous sibling, key ["), h("span", { class: "siblings", role: "group", "aria-label": "Siblings of its group" }, dots.slice(0, 16), dots.length > 16 && h("small", { class: "muted" }, `+${dots.length - 16}`)), to(members[at + 1]?.uid, "›", "next", "Next sibling, key ]"), h("a", { class: "button small", href: `${jobHref(jobId, "groups", one.group_index, "compare")}?${new URLSearchParams({ a: one.uid })}` }, "Compare")],
    h("span", { class: "divider", "aria-hidden": "true" }),
    to(around.newer, "Newer episode", null, "The episode that was written next"),
    to(around.older, "Older episode", null, "The episode that was written before"),
  ];
}

/** The task, the answer, and the expected answer. */
function verdictOf(one, about, instance) {
  const said = (name, value, kind) => value !== null && h("span", { class: `told ${kind ?? ""}` }, h("span", { class: "muted" }, name), " ", short(value, 400));
  const label = [about.label, instance?.label, instance?.answer, instance?.ground_truth, instance?.metadata?.label].map(asText).find(Boolean) ?? null;
  const answer = answerOf(one);
  const right = one.success === null ? "" : one.success >= 1 ? "right" : "wrong";
  return [said("Task", asText(about.goal) || asText(instance?.goal) || firstQuestion(one)), answer && said("Answer", answer, right), label && said("Label", label)].filter(Boolean);
}

/** How it was played, if not by this buffer's own loop. */
function origin(one, about) {
  const marks = [];
  const { remote_rollout: remote, gateway } = about;
  if (isObject(remote)) marks.push(["Remote rollout", `an external rollout server ran the agent${inTurns(remote)}; the tokens are those that were sampled for it here`, remote]);
  if (isObject(gateway)) marks.push(["Gateway session", `an external agent played it through the chat API${inTurns(gateway)}${gateway.branches > 1 ? ` and ${gateway.branches} branches, each a training row; the conversation below is that of the last branch, the tree below it has all branches` : ""}`, gateway]);
  const deletions = deletionsOf(about);
  if (deletions.length) marks.push(["Edited context", `the agent deleted ${plural(deletions.flatMap((one) => one.ids).length, "message")} from its own context, in ${plural(deletions.length, "turn")}; the transcript has all of them`, null]);
  if (about.rollout_mode === "history") marks.push(["History mode", "each turn had a prompt of its own; the transcript has every observation and reply once", null]);
  return marks.length ? marks.map(([name, says, more]) => h("div", { class: "callout wait" }, h("span", { class: "sign", "aria-hidden": "true" }, "⇄"), h("div", null, h("p", null, h("strong", null, name), `: ${says}.`), more && h("details", null, h("summary", null, "Details"), json(more))))) : null;
}

const inTurns = (told) => (Number.isInteger(told.turns) ? `, in ${plural(told.turns, "turn")}` : "");

// --- the transcript and its screen -----------------------------------------------------------------------------------

function stageOf(stage, jobId, trajectory, episode, about) {
  const { turns } = episode;
  const here = jobHref(jobId, "trajectories", trajectory.uid);
  const addressOf = (number) => `${here}?${new URLSearchParams([...[...stage.query].filter(([name]) => name !== "turn"), ["turn", number]])}`;
  const wanted = Number(stage.query.get("turn"));
  const first = Math.max(1, Math.min(turns.length, Number.isInteger(wanted) ? wanted : 1));
  const screen = turns.some((turn) => turn.image) ? new Screen(Array.isArray(about.screen) && about.screen.length === 2 ? about.screen : null) : null;
  let steering = null;
  const text = transcript(episode, { hrefOf: addressOf, onChoose: (index) => steering.choose(index) });
  let raw = remembersRaw();
  text.draw(!raw);
  const toggle = h("button", { type: "button", class: "plain raw-toggle", "aria-pressed": String(raw), title: "Markdown and JSON formatted, or every text as it was sampled" }, "Raw text");
  toggle.addEventListener("click", () => {
    raw = !raw;
    remember(raw);
    toggle.setAttribute("aria-pressed", String(raw));
    text.draw(!raw);
    steering?.start(steering.current() + 1);
  });
  if (!turns.length) return h("section", { "aria-label": "The episode" }, h("div", { class: "row" }, h("span", { class: "grow" }), toggle), text.element, !episode.rest.length && !episode.prelude.length && h("p", { class: "muted" }, "It has no messages."));
  steering = player(stage, { turns, steps: text.steps, screen, addressOf });
  const find = stage.query.get("find") ?? "";
  queueMicrotask(() => {
    steering.start(first, { scroll: stage.query.has("turn") });
    if (find) markFound(text.element, find);
    if (find && stage.query.has("turn")) steering.start(first, { scroll: true });
  });
  stage.atEnd(() => window.CSS?.highlights?.delete("found"));
  const side = h("div", { class: screen ? "side" : "side bar-only" }, screen?.element, steering.controls);
  return h(
    "section",
    { class: "player", "aria-label": "The episode" },
    h("div", { class: screen ? "stage" : "stage plain" }, side, h("div", { class: "beside" }, h("div", { class: "row transcript-head" }, h("span", { class: "muted hint wide-only" }, "← → step, space plays, Home, End; [ and ] go to the siblings"), h("span", { class: "grow" }), toggle), text.element)),
  );
}

function remembersRaw() {
  try {
    return localStorage.getItem(RAW_KEY) === "yes";
  } catch {
    return false;
  }
}

function remember(raw) {
  try {
    localStorage.setItem(RAW_KEY, raw ? "yes" : "no");
  } catch {
    // It holds until the page is left.
  }
}

// --- what it earned, how long it took --------------------------------------------------------------------------------

function rewardSection(one, about) {
  const breakdown = [about.reward_breakdown, about.score].find(isObject) ?? null;
  if (breakdown === null) return section("Reward", h("p", null, rewardCell(one.reward), h("span", { class: "muted" }, " The generator reported no breakdown.")));
  return section("Reward", inWords(breakdown), h("table", null, h("tbody", null, Object.entries(breakdown).map(([name, value]) => h("tr", null, h("th", { scope: "row" }, name.replaceAll("_", " ")), h("td", { class: "num" }, typeof value === "number" ? number(value, Number.isInteger(value) ? 0 : 4) : value === null ? "none" : String(value)))))));
}

function inWords(parts) {
  const { success, step_scale: scale, thinking_bonus: bonus, premature_penalty: penalty, reward: total } = parts;
  if (![scale, bonus, penalty, total].every(Number.isFinite)) return null;
  if (success === null || success === undefined) return h("p", { class: "sum-line" }, "The episode was cut off before the agent said that it was done, which earns nothing.");
  return h("p", { class: "sum-line" }, `success ${number(success)} × step scale ${number(scale, 3)} + thinking ${number(bonus, 3)} − penalty ${number(penalty, 3)} = `, h("b", null, reward(total, 3)));
}

function timingSection(one) {
  const phases = Object.entries(one.timings_s ?? {}).filter(([, seconds]) => typeof seconds === "number" && seconds >= 0);
  if (!phases.length) return section("Time", h("p", { class: "muted" }, "No timings were reported."));
  const total = phases.reduce((sum, [, seconds]) => sum + seconds, 0);
  const words = phases.map(([name, seconds]) => `${name} ${span(seconds)}`).join(", ");
  return section(
    "Time",
    h("div", { class: "bar", role: "img", "aria-label": words }, phases.map(([name, seconds], at) => h("span", { class: `fill phase-${at % 6}`, style: { "flex-grow": seconds }, title: `${name} ${span(seconds)}` }))),
    h("ul", { class: "terms" }, phases.map(([name, seconds], at) => h("li", null, h("span", { class: `key phase-${at % 6}`, "aria-hidden": "true" }), h("b", null, span(seconds)), ` ${name}`)), h("li", null, h("b", null, span(total)), " in total")),
  );
}

const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
