// A whole episode as one text to scroll: every message with its role, every tool call, every turn with an address.

import { h } from "./dom.js";
import { actionInWords, textOf } from "./episode.js";
import { count, plural, reward, short, span } from "./format.js";
import { jsonTree, parsedJson } from "./json_tree.js";
import { markdown } from "./markdown.js";

const LONG = 1400;

/**
 * Returns ``{element, steps, draw}``: the transcript, its turns in order, and what draws it again.
 * ``hrefOf(turn)`` is a turn's address, ``onChoose(index)`` is called when one is chosen.
 */
export function transcript(episode, { hrefOf, onChoose }) {
  const element = h("div", { class: "transcript" });
  const steps = [];
  const draw = (formatted) => {
    const body = (text, role) => (formatted ? formattedText(text, role) : [h("p", { class: "pre" }, text)]);
    steps.splice(0, steps.length, ...episode.turns.map((turn, at) => step(turn, at, { body, hrefOf, onChoose, formatted })));
    element.replaceChildren(...[systemPrompt(episode.prelude, body), episode.rest.map((message) => messageBox(message, null, body)), steps, ending(episode, body)].flat().filter(Boolean));
  };
  return { element, steps, draw };
}

/** JSON as a tree and Markdown as it is meant; what a tool returned may be a file or a log, and stays as it is. */
function formattedText(text, role) {
  const value = parsedJson(text);
  if (value !== undefined) return [jsonTree(value)];
  return role === "tool" ? [h("p", { class: "pre output" }, text)] : [h("div", { class: "md" }, markdown(text))];
}

function systemPrompt(messages, body) {
  if (!messages.length) return null;
  const characters = messages.reduce((sum, message) => sum + textOf(message).length, 0);
  const text = h("div", null);
  const details = h("details", { class: "said system" }, h("summary", null, role("system"), h("small", { class: "muted" }, plural(characters, "character"))), text);
  details.addEventListener("toggle", () => details.open && !text.firstChild && text.append(...messages.flatMap((message) => body(textOf(message)))));
  return details;
}

const role = (name, more) => h("span", { class: "role" }, name, more && ` ${more}`);
const messageId = (message) => (Number.isInteger(message.msg_id) ? `#${message.msg_id}` : null);
const notedText = (message) => textOf(message).replaceAll("‹screenshot›", "").trim();

/** One message that is no reply, and whether the agent deleted it later. */
function messageBox(message, turn, body) {
  const text = notedText(message);
  if (!text) return null;
  const deletedIn = turn?.deletedIn(message) ?? null;
  const name = [message.tool_name ?? message.name, messageId(message)].filter(Boolean).join(" ");
  return h("div", { class: `said ${CLASSES.has(message.role) ? message.role : ""}` }, h("div", { class: "row said-head" }, role(String(message.role), name), deletedIn !== null && deletedPill(deletedIn)), clamped(text, body(text, message.role)));
}

const CLASSES = new Set(["user", "tool", "assistant", "system"]);
const deletedPill = (turn) => h("span", { class: "pill skipped" }, `deleted in turn ${turn}`);

/** What is long is cut to some lines, with a button for all of it: it is in the page, so that a search finds it. */
function clamped(text, children) {
  if (text.length <= LONG) return children;
  const box = h("div", { class: "clamp" }, children);
  const more = h("button", { type: "button", class: "more" }, `Show all ${plural(text.length, "character")}`);
  more.addEventListener("click", () => {
    box.classList.remove("clamp");
    more.remove();
  });
  return [box, more];
}

function step(turn, at, { body, hrefOf, onChoose, formatted }) {
  const words = turn.malformed ? "no valid action" : actionInWords(turn.action);
  const deletedIn = turn.deletedIn(turn.message);
  const choose = (event) => {
    event.preventDefault();
    onChoose(at);
  };
  const heading = h(
    "div",
    { class: "row step-head" },
    h("h2", null, h("a", { href: hrefOf(turn.number), onclick: choose }, `Turn ${turn.number}`)),
    words && h("span", { class: `did${turn.malformed ? " bad" : ""}` }, short(words, 120)),
    !turn.trained && h("span", { class: "pill skipped" }, "not trained"),
    turn.reward !== null && h("span", { class: "pill", title: "What this turn earned" }, `reward ${reward(turn.reward)}`),
    deletedIn !== null && deletedPill(deletedIn),
    timeOf(turn.timing),
  );
  const thumbnail = turn.image && h("button", { type: "button", class: "thumb", "aria-label": `Show the screen of turn ${turn.number}`, onclick: choose }, h("img", { src: `/images/${turn.image}`, alt: "", loading: "lazy", decoding: "async" }));
  return h(
    "article",
    { class: "step", "data-turn": turn.number },
    heading,
    h("div", { class: "step-body" }, h("div", { class: "step-text" }, turn.seen.map((message) => messageBox(message, turn, body)), replyBox(turn, body, formatted)), thumbnail),
  );
}

/** How long a turn took: the engine, and what came after its reply; null where nobody measured it. */
function timeOf(timing) {
  const { engine_s: engine = null, environment_s: environment = null } = timing ?? {};
  const parts = [engine !== null && `engine ${span(engine)}`, environment !== null && `environment ${span(environment)}`].filter(Boolean);
  return parts.length ? h("small", { class: "muted took", title: "Until the engine's reply, retries included; from it to the next request or the end" }, parts.join(" · ")) : null;
}

function replyBox(turn, body, formatted) {
  const inner = formatted
    ? [
        turn.thinking && h("div", { class: "thought" }, h("span", { class: "part-name" }, "thinking", turn.thinkingTokens !== null && ` · ${plural(turn.thinkingTokens, "token")}`), clamped(turn.thinking, body(turn.thinking))),
        turn.rest && clamped(turn.rest, body(turn.rest)),
        turn.calls.map((call) => toolCall(call, turn.result, body)),
        turn.conclusion && h("div", { class: "conclusion" }, h("span", { class: "part-name" }, "conclusion"), body(turn.conclusion)),
        !turn.thinking && !turn.rest && !turn.calls.length && !turn.conclusion && h("p", { class: "muted" }, "An empty reply."),
      ]
    : [h("p", { class: "pre" }, turn.text || "An empty text."), Array.isArray(turn.message.tool_calls) && h("pre", { class: "code", tabindex: 0 }, JSON.stringify(turn.message.tool_calls, null, 2))];
  return h(
    "div",
    { class: "said assistant" },
    h("div", { class: "row said-head" }, role("assistant", messageId(turn.message))),
    inner,
    turn.malformed && h("p", { class: "problem" }, `Nothing was done: ${turn.malformed}.`),
    turn.deletes.length > 0 && h("p", { class: "note" }, `Deletes ${plural(turn.deletes.length, "message")} from its context: ${turn.deletes.map((id) => `#${id}`).join(", ")}.`),
    turn.note && h("p", { class: "note" }, turn.note),
  );
}

function toolCall(call, result, body) {
  const value = typeof call.arguments === "string" ? call.arguments : null;
  const answered = call.id === null || call.id === undefined || result.some((message) => message.tool_call_id === call.id) || !result.some((message) => message.tool_call_id !== undefined);
  return h("div", { class: "call" }, h("span", { class: "part-name" }, "tool call ", h("code", null, call.name)), value === null ? jsonTree(call.arguments) : body(value), !answered && h("span", { class: "pill failed" }, "result missing"));
}

/** What came after the last reply, and how it ended. */
function ending(episode, body) {
  const last = episode.turns.at(-1);
  if (!last) return null;
  const after = last.result.map((message) => messageBox(message, last, body)).filter(Boolean);
  return after.length ? h("div", { class: "step" }, h("div", { class: "row step-head" }, h("h2", null, "After the last turn")), after) : null;
}

/** Marks every place of a text in the transcript, where the browser can; returns how many there are. */
export function markFound(element, text) {
  if (!text || !window.CSS?.highlights || !window.Highlight) return 0;
  const wanted = text.toLowerCase();
  const ranges = [];
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node && ranges.length < 2000; node = walker.nextNode()) {
    const lower = node.data.toLowerCase();
    if (lower.length !== node.data.length) continue;
    for (let at = lower.indexOf(wanted); at >= 0 && ranges.length < 2000; at = lower.indexOf(wanted, at + wanted.length)) {
      const range = new Range();
      range.setStart(node, at);
      range.setEnd(node, at + wanted.length);
      ranges.push(range);
      node.parentElement.closest(".clamp")?.classList.remove("clamp");
    }
  }
  CSS.highlights.set("found", new Highlight(...ranges));
  return ranges.length;
}

/** The words of a turn for who hears the page. */
export const turnInWords = (turn) => `Turn ${count(turn.number)}: ${actionInWords(turn.action) || short(turn.rest || turn.text, 80)}`;
