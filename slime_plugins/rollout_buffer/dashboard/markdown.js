// Markdown as elements. Whatever it is given was written by a model, a tool or a device: nothing is ever parsed as
// markup, every text becomes a text node, and of all attributes only `class` and `start` are set. Links and images are
// shown as what was written, with their address to read and nothing to click or load. One pass over the text: what does
// not close is text, and how deep things lie within each other is bounded.

import { h } from "./dom.js";

const MOST_CHARACTERS = 40000;
const MOST_COLUMNS = 40;
const DEEPEST = 6;
const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*(?:([\w+#.-]{1,20})[ \t]*)?$/;
const HEADING = /^ {0,3}(#{1,6})\s+(?!\s)(.*)$/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const ITEM = /^( {0,12})(?:([-*+])|(\d{1,9})[.)])[ \t]+(?![ \t])(.*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const TABLE_LINE = /^\s*\|.{0,4000}\|\s*$/;
const TABLE_RULE = /^\s*\|(?:\s*:?-+:?\s*\|)+\s*$/;

/** Returns the elements of a text; what is longer than 40,000 characters is left as it was written. */
export function markdown(text) {
  const whole = String(text).replace(/\r\n?/g, "\n");
  if (whole.length > MOST_CHARACTERS) return [h("p", { class: "pre" }, whole)];
  return blocks(whole.split("\n"), 0);
}

function blocks(lines, depth) {
  const found = [];
  let at = 0;
  let words = [];
  const flush = () => {
    if (words.length) found.push(h("p", null, inline(words.join("\n"))));
    words = [];
  };
  const add = (element, next) => {
    flush();
    found.push(element);
    at = next;
  };
  while (at < lines.length) {
    const line = lines[at];
    const fence = FENCE.exec(line);
    const heading = HEADING.exec(line);
    if (!line.trim()) {
      flush();
      at += 1;
    } else if (fence) add(...codeBlock(lines, at, fence));
    else if (heading) add(h("p", { class: `md-h md-h${heading[1].length}` }, inline(heading[2].replace(/\s#+\s*$/, ""))), at + 1);
    else if (RULE.test(line)) add(h("hr"), at + 1);
    else if (depth < DEEPEST && QUOTE.test(line)) add(...quote(lines, at, depth));
    else if (depth < DEEPEST && ITEM.test(line)) add(...list(lines, at, depth));
    else if (TABLE_LINE.test(line) && TABLE_RULE.test(lines[at + 1] ?? "") && line.split("|").length - 2 <= MOST_COLUMNS) add(...table(lines, at));
    else {
      words.push(line);
      at += 1;
    }
  }
  flush();
  return found;
}

/** A code block ends with a fence as long as its own, or with the text. */
function codeBlock(lines, at, [, mark, language]) {
  let end = at + 1;
  const closes = (line) => line.trim().length >= mark.length && [...line.trim()].every((one) => one === mark[0]);
  while (end < lines.length && !closes(lines[end])) end += 1;
  const code = lines.slice(at + 1, end).join("\n");
  return [h("pre", { class: "code", tabindex: 0 }, language && h("span", { class: "language" }, `${language}\n`), code), end + 1];
}

function quote(lines, at, depth) {
  const inner = [];
  let end = at;
  for (let match = QUOTE.exec(lines[end]); match; match = end < lines.length ? QUOTE.exec(lines[end]) : null) {
    inner.push(match[1]);
    end += 1;
  }
  return [h("blockquote", null, blocks(inner, depth + 1)), end];
}

function list(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  const items = [];
  let end = at;
  while (end < lines.length) {
    const item = ITEM.exec(lines[end]);
    const indent = lines[end].length - lines[end].trimStart().length;
    if (item && item[1].length <= first[1].length) {
      if (Boolean(item[3]) !== Boolean(first[3]) || item[1].length < first[1].length) break;
      items.push([item[4]]);
    } else if (items.length && lines[end].trim() && indent > first[1].length) items.at(-1).push(lines[end].slice(Math.min(indent, first[1].length + 2)));
    else break;
    end += 1;
  }
  const children = items.map((one) => h("li", null, blocks(one, depth + 1)));
  return [first[3] ? h("ol", { start: Number(first[3]) }, children) : h("ul", null, children), end];
}

function table(lines, at) {
  const cells = (line) => line.trim().slice(1, -1).split("|").map((one) => one.trim());
  let end = at + 2;
  while (end < lines.length && TABLE_LINE.test(lines[end]) && cells(lines[end]).length <= MOST_COLUMNS) end += 1;
  const row = (tag, line) => h("tr", null, cells(line).map((cell) => h(tag, null, inline(cell))));
  return [h("div", { class: "scroll" }, h("table", { class: "dense" }, h("thead", null, row("th", lines[at])), h("tbody", null, lines.slice(at + 2, end).map((line) => row("td", line))))), end];
}

// --- within a line ---------------------------------------------------------------------------------------------------

const MARKS = [["**", "strong"], ["__", "strong"], ["~~", "s"], ["*", "em"], ["_", "em"]];
const SPECIAL = /[`*_~\\]/g;

/** Code, bold, italic and struck text; everything else, links too, stays as it was written. */
function inline(text) {
  const closed = new Set(); // marks that nothing closes any more: what is looked for once in vain is not looked for again
  const walk = (from, to, within) => {
    const found = [];
    let plain = from;
    SPECIAL.lastIndex = from;
    for (let match = SPECIAL.exec(text); match && match.index < to; match = SPECIAL.exec(text)) {
      const piece = pieceAt(text, match.index, to, within, closed, walk);
      if (piece === null) continue;
      if (match.index > plain) found.push(text.slice(plain, match.index));
      found.push(piece.node);
      plain = piece.end;
      SPECIAL.lastIndex = piece.end;
    }
    if (to > plain) found.push(text.slice(plain, to));
    return found;
  };
  return walk(0, text.length, []);
}

function pieceAt(text, at, to, within, closed, walk) {
  const one = text[at];
  if (one === "\\") return at + 1 < to && /[!-/:-@[-`{-~]/.test(text[at + 1]) ? { node: text[at + 1], end: at + 2 } : null;
  if (one === "`") return codeAt(text, at, to, closed);
  for (const [mark, tag] of MARKS) {
    if (!text.startsWith(mark, at) || within.includes(tag)) continue;
    const end = closing(text, mark, at + mark.length, to, closed);
    if (end < 0 || !opens(text, at, mark)) continue;
    return { node: h(tag, null, walk(at + mark.length, end, [...within, tag])), end: end + mark.length };
  }
  return null;
}

function codeAt(text, at, to, closed) {
  let width = 1;
  while (text[at + width] === "`") width += 1;
  const mark = "`".repeat(width);
  const end = find(text, mark, at + width, to, closed);
  if (end < 0) return { node: mark, end: Math.min(to, at + width) };
  return { node: h("code", null, text.slice(at + width, end)), end: end + width };
}

const opens = (text, at, mark) => !/\s/.test(text[at + mark.length] ?? " ") && (mark[0] !== "_" || !/\w/.test(text[at - 1] ?? " "));

/** Where a mark closes: after something that is no space; an underscore only at the end of a word. */
function closing(text, mark, from, to, closed) {
  const end = find(text, mark, from, to, closed);
  if (end <= from || /\s/.test(text[end - 1])) return -1;
  return mark[0] === "_" && /\w/.test(text[end + mark.length] ?? " ") ? -1 : end;
}

function find(text, mark, from, to, closed) {
  if (closed.has(mark)) return -1;
  const end = text.indexOf(mark, from);
  if (end < 0) closed.add(mark);
  return end < 0 || end + mark.length > to ? -1 : end;
}
