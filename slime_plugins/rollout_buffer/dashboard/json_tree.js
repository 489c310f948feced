// JSON as a tree of text: keys, values and lines as they were written, large parts folded.

import { h } from "./dom.js";
import { plural, short } from "./format.js";

const DEEPEST = 12;
const MOST_ENTRIES = 200;
const OPEN_DEPTH = 2;
const LONG = 24;

/** Returns the value as an element. Nothing deeper than 12 and no list longer than 200 is unfolded. */
export function jsonTree(value) {
  return h("div", { class: "tree" }, node(value, 0));
}

/** The value that a text is, when the whole of it is an object or a list in JSON; else undefined. */
export function parsedJson(text) {
  const trimmed = text.trim();
  if (!/^[[{]/.test(trimmed) || !/[\]}]$/.test(trimmed)) return undefined;
  try {
    return JSON.parse(trimmed);
  } catch {
    return undefined;
  }
}

function node(value, depth) {
  if (value === null || typeof value !== "object") return scalar(value);
  const isList = Array.isArray(value);
  const entries = isList ? value.map((entry, at) => [at, entry]) : Object.entries(value);
  if (!entries.length) return h("span", { class: "j-none" }, isList ? "[]" : "{}");
  if (isList && entries.length <= LONG && value.every((one) => typeof one === "number" || typeof one === "boolean")) return h("span", { class: "j-number" }, `[${value.join(", ")}]`);
  if (depth >= DEEPEST) return h("span", { class: "j-none" }, isList ? `[… ${plural(entries.length, "entry")}]` : `{… ${plural(entries.length, "entry")}}`);
  const shown = entries.slice(0, MOST_ENTRIES);
  const rows = () => [
    shown.map(([key, entry]) => h("li", null, !isList && h("span", { class: "j-key" }, `${key}: `), node(entry, depth + 1))),
    entries.length > shown.length && h("li", { class: "muted" }, `… and ${plural(entries.length - shown.length, "more entry", "more entries")}`),
  ];
  if (depth < OPEN_DEPTH && entries.length <= LONG) return h("ul", { class: isList ? "j-list" : "" }, rows());
  const body = h("ul", { class: isList ? "j-list" : "" });
  const summary = isList ? `[${plural(entries.length, "entry")}]` : `{${short(Object.keys(value).slice(0, 4).join(", "), 60)}${entries.length > 4 ? ", …" : ""}}`;
  const details = h("details", null, h("summary", { class: "j-none" }, summary), body);
  details.addEventListener("toggle", () => details.open && !body.firstChild && body.append(...rows().flat().filter(Boolean)));
  return details;
}

function scalar(value) {
  if (typeof value === "string") return h("span", { class: value.includes("\n") ? "j-text j-lines" : "j-text" }, value === "" ? "“”" : value);
  return h("span", { class: "j-number" }, String(value));
}
