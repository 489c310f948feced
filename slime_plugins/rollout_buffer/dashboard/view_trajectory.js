// One episode, played: what the agent saw and did, turn by turn, what it earned and how long it took.

import { path } from "./api.js";
import { announce, h, show, svg } from "./dom.js";
import { actionInWords, deletionsOf, readEpisode, textOf } from "./episode.js";
import { bytes, count, moment, number, plural, reward, short, span } from "./format.js";
import { crumbs, fact, jobHref, json, pill, rewardCell, section } from "./parts.js";
import { Screen } from "./screen.js";
import { tokenSection } from "./tokens.js";

const SPEEDS = [["3000", "slow"], ["1500", "normal"], ["600", "fast"]];
const icon = (shape) => svg("svg", { class: "icon", viewBox: "0 0 24 24", "aria-hidden": "true" }, svg("path", { d: shape }));
const KNOWN = new Set(["steps_log", "reward_breakdown"]);

export function trajectoryView(stage, jobId, uid) {
  const body = h("div", null, h("p", { class: "loading" }, "Loading …"));
  const poll = stage.poll(path(["trajectories", uid], { job_id: jobId }), 3600000, (trajectory) => {
    poll.stop(); // what is written never changes
    body.replaceChildren(...page(stage, jobId, trajectory));
  });
  return { title: `Episode ${uid}`, element: body };
}

function page(stage, jobId, trajectory) {
  const episode = readEpisode(trajectory);
  const about = trajectory.extra_info ?? {};
  return [
    crumbs(["Jobs", "#/"], [jobId, jobHref(jobId)], ["Trajectories", jobHref(jobId, "trajectories")], [trajectory.uid, null]),
    h("div", { class: "row head" }, h("h1", { class: "id" }, trajectory.instance_id), rewardCell(trajectory.reward), pill(trajectory.outcome), trajectory.late && h("span", { class: "pill skipped" }, "late")),
    about.goal && h("p", { class: "goal" }, h("span", { class: "muted" }, "Task: "), String(about.goal)),
    facts(jobId, trajectory, about),
    origin(trajectory, about),
    episode.turns.length ? player(stage, episode, about) : conversation(trajectory.messages ?? []),
    h("div", { class: "two" }, rewardSection(trajectory, about), timingSection(trajectory)),
    section("Tokens", tokenSection(jobId, trajectory.uid)),
    section(
      "Everything else",
      episode.prelude.length > 0 && h("details", { class: "panel" }, h("summary", null, "System prompt"), episode.prelude.map((message) => h("pre", { tabindex: 0 }, textOf(message)))),
      h("details", { class: "panel" }, h("summary", null, "What the generator noted (extra_info)"), json(Object.fromEntries(Object.entries(about).filter(([key]) => !KNOWN.has(key))))),
      h("details", { class: "panel" }, h("summary", null, plural((trajectory.messages ?? []).length, "message"), " as stored"), json(trajectory.messages ?? [])),
    ),
  ]
    .flat()
    .filter(Boolean);
}

function facts(jobId, one, about) {
  return h(
    "dl",
    { class: "facts" },
    fact("Reward", reward(one.reward, 3), one.raw_reward !== null && one.raw_reward !== one.reward ? `earned ${reward(one.raw_reward, 3)}` : null),
    fact("Success", one.success === null ? "–" : one.success >= 1 ? "yes" : one.success > 0 ? number(one.success) : "no", one.success === null ? "not told" : "said the environment"),
    fact("Stopped", one.stop_reason.replaceAll("_", " ")),
    fact("Turns", count(one.turns), about.max_turns ? `of ${about.max_turns}` : null),
    fact("Weights", one.oldest_version === null ? "–" : `v${one.oldest_version}`, one.versions_behind ? `${one.versions_behind} behind when written` : null),
    fact("Group", one.group_index === null ? "–" : h("a", { href: jobHref(jobId, "groups", one.group_index) }, pill(one.group_state)), one.slot === null ? null : `slot ${one.slot}, attempt ${one.attempt}, epoch ${one.epoch ?? "–"}`),
    fact("Written", moment(one.created_at), bytes(one.body_bytes)),
  );
}

/** Where it came from when it was not played by this buffer's own loop. */
function origin(one, about) {
  const marks = [];
  const { remote_rollout: remote, gateway } = about;
  if (isObject(remote)) marks.push(["Remote rollout", `a rollout server elsewhere ran the agent${inTurns(remote)}; the tokens are those that were sampled for it here`, remote]);
  if (isObject(gateway)) marks.push(["Gateway session", `an agent elsewhere drove it over the chat API${inTurns(gateway)}${gateway.branches > 1 ? ` and ${gateway.branches} branches, each a training row; the conversation below is the last one` : ""}`, gateway]);
  const deletions = deletionsOf(about);
  if (deletions.length) marks.push(["Edited context", `the agent deleted ${plural(deletions.flatMap((one) => one.ids).length, "message")} from its own context, in ${plural(deletions.length, "turn")}; the conversation below has all of them`, null]);
  if (about.rollout_mode === "history") marks.push(["History mode", "each turn had a prompt of its own; the conversation below has every observation and reply once", null]);
  return marks.length ? marks.map(([name, says, more]) => h("div", { class: "callout wait" }, h("span", { class: "sign", "aria-hidden": "true" }, "⇄"), h("div", null, h("p", null, h("strong", null, name), `: ${says}.`), more && h("details", null, h("summary", null, "Details"), json(more))))) : null;
}

const inTurns = (told) => (Number.isInteger(told.turns) ? `, in ${plural(told.turns, "turn")}` : "");

// --- the player ------------------------------------------------------------------------------------------------------

function player(stage, episode, about) {
  const { turns } = episode;
  const hasScreens = turns.some((turn) => turn.image);
  const screen = new Screen(Array.isArray(about.screen) && about.screen.length === 2 ? about.screen : null);
  const words = h("div", { class: "turn" });
  const film = h("ol", { class: "film" });
  const slider = h("input", { type: "range", min: 1, max: turns.length, value: 1, "aria-label": "Turn" });
  const place = h("output", { class: "place" });
  const speed = h("select", { "aria-label": "Speed" }, SPEEDS.map(([value, name]) => h("option", { value, selected: value === "1500" }, name)));
  const play = h("button", { type: "button", class: "primary", "aria-pressed": "false" }, "Play");
  let at = 0;
  let timer = null;

  const frames = turns.map((turn, index) => filmFrame(turn, index, () => go(index)));
  film.append(...frames);

  const go = (index, { quietly = false } = {}) => {
    at = Math.max(0, Math.min(turns.length - 1, index));
    const turn = turns[at];
    screen.show(turn, turns.length);
    show(words, ...turnInWords(turn, turns[at + 1], () => (halt(), go(at + 1))));
    slider.value = at + 1;
    slider.setAttribute("aria-valuetext", `turn ${at + 1} of ${turns.length}`);
    place.textContent = `${at + 1} / ${turns.length}`;
    frames.forEach((frame, other) => frame.firstChild.setAttribute("aria-current", other === at ? "step" : "false"));
    const frame = frames[at];
    film.scrollTo({ left: frame.offsetLeft - film.clientWidth / 2 + frame.clientWidth / 2, behavior: "instant" });
    if (!quietly) announce(`Turn ${at + 1}: ${actionInWords(turn.action) || short(turn.text, 80)}`);
    const next = turns[at + 1]?.image;
    if (next) new Image().src = `/images/${next}`;
  };
  const halt = () => {
    clearInterval(timer);
    timer = null;
    play.textContent = "Play";
    play.setAttribute("aria-pressed", "false");
  };
  const toggle = () => {
    if (timer !== null) return halt();
    if (at === turns.length - 1) go(0);
    play.textContent = "Pause";
    play.setAttribute("aria-pressed", "true");
    timer = setInterval(() => (at === turns.length - 1 ? halt() : go(at + 1, { quietly: true })), Number(speed.value));
    return undefined;
  };
  play.addEventListener("click", toggle);
  slider.addEventListener("input", () => (halt(), go(Number(slider.value) - 1)));
  speed.addEventListener("change", () => timer !== null && (halt(), toggle()));
  const keys = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea, dialog")) return;
    if (event.key === " " && event.target.closest("button, a, summary")) return;
    const deed = { ArrowRight: () => go(at + 1), ArrowLeft: () => go(at - 1), Home: () => go(0), End: () => go(turns.length - 1), " ": toggle }[event.key];
    if (!deed) return;
    event.preventDefault();
    if (event.key !== " ") halt();
    deed();
  };
  document.addEventListener("keydown", keys);
  stage.atEnd(() => {
    halt();
    document.removeEventListener("keydown", keys);
  });
  const step = (shape, label, to) => h("button", { type: "button", "aria-label": label, title: label, onclick: () => (halt(), go(to())) }, icon(shape));
  const controls = h(
    "div",
    { class: "row controls", role: "group", "aria-label": "Player" },
    step("M5 4h3v16H5zM20 4v16L9 12z", "First turn", () => 0),
    step("M18 4v16L6 12z", "Turn before", () => at - 1),
    play,
    step("M6 4v16l12-8z", "Next turn", () => at + 1),
    slider,
    place,
    speed,
  );
  queueMicrotask(() => go(0, { quietly: true }));
  return h(
    "section",
    { class: "player", "aria-label": "The episode" },
    controls,
    h("p", { class: "muted hint wide-only" }, "Keys: ← → step, space plays and pauses, Home and End."),
    turns.length > 1 && hasScreens && film,
    h("div", { class: hasScreens ? "stage" : "stage plain" }, hasScreens && screen.element, words),
  );
}

function filmFrame(turn, index, onclick) {
  const words = turn.malformed ? "no action" : actionInWords(turn.action) || short(turn.rest || turn.text, 40);
  return h(
    "li",
    null,
    h(
      "button",
      { type: "button", onclick, class: turn.malformed ? "bad" : "" },
      turn.image ? h("img", { src: `/images/${turn.image}`, alt: "", loading: "lazy" }) : h("span", { class: "blank" }),
      h("span", { class: "cap" }, h("span", { class: "unseen" }, "Turn "), `${index + 1} ${short(words, 22)}`),
    ),
  );
}

const messageId = (message) => (Number.isInteger(message.msg_id) ? `#${message.msg_id}` : null);

/** Messages other than replies, each with its role and whether the agent deleted it later. */
function said(messages, turn) {
  const shown = messages.map((message) => [message, textOf(message).replaceAll("‹screenshot›", "").trim()]).filter(([, text]) => text);
  return shown.map(([message, text]) => {
    const deletedIn = turn.deletedIn(message);
    const gone = deletedIn !== null && h("span", { class: "pill skipped" }, `deleted in turn ${deletedIn}`);
    const name = message.role === "user" ? null : [message.role, message.tool_name ?? message.name, messageId(message)].filter(Boolean).join(" ");
    return h("div", { class: `said ${message.role}` }, name && h("span", { class: "role" }, name), gone, fold(text));
  });
}

function turnInWords(turn, next, onNext) {
  const told = said(turn.seen, turn);
  const deletedIn = turn.deletedIn(turn.message);
  return [
    h("h2", null, `Turn ${turn.number}`, messageId(turn.message) && h("small", { class: "muted" }, messageId(turn.message)), !turn.trained && h("span", { class: "pill skipped" }, "not trained"), deletedIn !== null && h("span", { class: "pill skipped" }, `deleted in turn ${deletedIn}`)),
    told.length > 0 && part("It was told", told),
    turn.thinking && part("It thought", h("p", { class: "thought" }, turn.thinking), turn.thinkingTokens !== null && h("small", { class: "muted" }, plural(turn.thinkingTokens, "token"))),
    part("It did", ...deeds(turn)),
    turn.deletes.length > 0 && part("It deleted", h("p", null, `${plural(turn.deletes.length, "message")} from its context: ${turn.deletes.map((id) => `#${id}`).join(", ")}.`)),
    turn.conclusion && part("It concluded", h("p", null, turn.conclusion)),
    part("Then", ...results(turn, next, onNext)),
    h("details", null, h("summary", null, "The reply as it was sampled"), h("pre", { tabindex: 0 }, turn.text || JSON.stringify(turn.message, null, 2))),
  ].filter(Boolean);
}

const part = (name, ...children) => h("div", { class: "part" }, h("h3", null, name), children);

function fold(text) {
  if (text.length <= 420) return h("p", { class: "pre" }, text);
  return h("details", null, h("summary", null, short(text, 160)), h("p", { class: "pre" }, text));
}

function deeds(turn) {
  const words = actionInWords(turn.action);
  const found = [];
  if (words) found.push(h("p", { class: "did" }, h("b", null, words)));
  turn.calls.forEach((call) => found.push(h("pre", { class: "call", tabindex: 0 }, `${call.name} ${typeof call.arguments === "string" ? call.arguments : JSON.stringify(call.arguments)}`)));
  if (turn.rest) found.push(fold(turn.rest));
  if (!found.length) found.push(h("p", { class: "muted" }, "Nothing that could be read as an action."));
  return found;
}

function results(turn, next, onNext) {
  const found = [];
  if (turn.malformed) found.push(h("p", { class: "problem" }, `Nothing was done: ${turn.malformed}.`));
  if (turn.note) found.push(h("p", null, turn.note));
  found.push(...said(turn.result, turn));
  if (next?.image) {
    const words = next.image === turn.image ? "the screen stayed as it was" : "what it saw next";
    found.push(h("button", { type: "button", class: "result", onclick: onNext }, h("img", { src: `/images/${next.image}`, alt: "" }), h("span", { class: "muted" }, words), h("span", { class: "unseen" }, `, go on to turn ${next.number}`)));
  } else if (!found.length) found.push(h("p", { class: "muted" }, turn.result.length ? "It went on." : "The episode ended."));
  return found;
}

function conversation(messages) {
  return section("Messages", messages.length ? messages.map((message) => h("div", { class: `said ${message.role}` }, h("span", { class: "role" }, message.role), fold(textOf(message)))) : h("p", { class: "muted" }, "It has none."));
}

// --- what it earned, how long it took --------------------------------------------------------------------------------

function rewardSection(one, about) {
  const breakdown = [about.reward_breakdown, about.score].find(isObject) ?? null;
  if (breakdown === null) return section("Reward", h("p", null, rewardCell(one.reward), h("span", { class: "muted" }, " The generator told no more of it.")));
  return section("Reward", inWords(breakdown), h("table", null, h("tbody", null, Object.entries(breakdown).map(([name, value]) => h("tr", null, h("th", { scope: "row" }, name.replaceAll("_", " ")), h("td", { class: "num" }, typeof value === "number" ? number(value, Number.isInteger(value) ? 0 : 4) : value === null ? "not asked" : String(value)))))));
}

function inWords(parts) {
  const { success, step_scale: scale, thinking_bonus: bonus, premature_penalty: penalty, reward: total } = parts;
  if (![scale, bonus, penalty, total].every(Number.isFinite)) return null;
  if (success === null || success === undefined) return h("p", { class: "sum-line" }, "The episode was cut before the agent said that it was done: nothing is earned.");
  return h("p", { class: "sum-line" }, `success ${number(success)} × step scale ${number(scale, 3)} + thinking ${number(bonus, 3)} − penalty ${number(penalty, 3)} = `, h("b", null, reward(total, 3)));
}

function timingSection(one) {
  const phases = Object.entries(one.timings_s ?? {}).filter(([, seconds]) => typeof seconds === "number" && seconds >= 0);
  if (!phases.length) return section("Time", h("p", { class: "muted" }, "No timings were told."));
  const total = phases.reduce((sum, [, seconds]) => sum + seconds, 0);
  const words = phases.map(([name, seconds]) => `${name} ${span(seconds)}`).join(", ");
  return section(
    "Time",
    h("div", { class: "bar", role: "img", "aria-label": words }, phases.map(([name, seconds], at) => h("span", { class: `fill phase-${at % 6}`, style: { "flex-grow": seconds }, title: `${name} ${span(seconds)}` }))),
    h("ul", { class: "terms" }, phases.map(([name, seconds], at) => h("li", null, h("span", { class: `key phase-${at % 6}`, "aria-hidden": "true" }), h("b", null, span(seconds)), ` ${name}`)), h("li", null, h("b", null, span(total)), " in all")),
  );
}

const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
