// Tokens as the trainer computes its loss on them: context in grey, what was sampled coloured by its log-prob.

import { ask, path } from "./api.js";
import { h, scrolling } from "./dom.js";
import { count, number, plural } from "./format.js";

const LONG_CONTEXT = 360;
const STEPS = [0.05, 0.3, 0.7, 1.5, 3, 5];
const LEGEND = ["p > 0.95", "p > 0.74", "p > 0.50", "p > 0.22", "p > 0.05", "p > 0.007", "p ≤ 0.007"];

const GAPS = [0.01, 0.03, 0.1, 0.3, 1, 3];
const GAP_LEGEND = ["|train − rollout| < 0.01", "< 0.03", "< 0.1", "< 0.3", "< 1", "< 3", "≥ 3"];

const shadeOfGap = (gap) => GAPS.findIndex((limit) => gap < limit) + 1 || GAPS.length + 1;
/* An advantage has a sign: the better the greener, the worse the redder, 0 in between. */
const shadeOfAdvantage = (advantage) => Math.max(1, Math.min(7, 4 - Math.round(advantage * 2)));
const ADVANTAGE_LEGEND = ["advantage ≥ 1.25", "≥ 0.75", "≥ 0.25", "about 0", "≤ −0.25", "≤ −0.75", "≤ −1.25"];

const shade = (logProb) => STEPS.findIndex((limit) => -logProb < limit) + 1 || STEPS.length + 1;
const visible = (text) => text.replaceAll("\n", "⏎\n");

/** How the context changed between generations, and the tokens of one training row; loaded when it is opened. */
export function tokenSection(jobId, uid) {
  const body = h("div", null, h("p", { class: "muted" }, "Loading …"));
  const details = h("details", { class: "panel" }, h("summary", null, "Tokens, mask and log-probs"), body);
  const load = async (row) => {
    try {
      const found = (await ask(path(["token_rows", uid], { job_id: jobId, row }))).body;
      body.replaceChildren(...describe(found, load).flat().filter(Boolean));
    } catch (error) {
      body.replaceChildren(h("p", { role: "alert", class: "problem" }, error.message));
    }
  };
  details.addEventListener("toggle", () => details.open && !details.asked && (details.asked = true) && load(0));
  return details;
}

function describe(found, load) {
  if (!found.contexts.length) {
    return [h("p", null, "This trajectory carries no token ids: the trainer rebuilds ids and mask from its messages. ", h("code", null, "tools/show_mask.py"), " shows how.")];
  }
  return [
    found.why_no_texts && h("p", { class: "muted" }, found.why_no_texts),
    h("h3", null, "How the context changed between generations"),
    h("p", { class: "muted" }, contextsInWords(found)),
    scrolling(contextTable(found)),
    h("h3", null, "Tokens of a training row"),
    found.rows.length > 0 && rowPicker(found, load),
    found.rows.length > 0 && found.trainer && trainerInWords(found.trainer),
    found.rows.length > 0 ? colouredText(found) : h("p", { class: "muted" }, "No row trains anything."),
  ];
}

function contextsInWords({ contexts, rows }) {
  const breaks = contexts.filter((one) => one.generation > 0 && one.dropped_tokens > 0).length;
  if (contexts.length === 1) return "One generation, one row.";
  if (!breaks) return `Every prompt continued the previous one exactly: ${plural(contexts.length, "generation")} make ${plural(rows.length, "training row")}.`;
  return `${plural(breaks, "prompt")} of ${count(contexts.length)} did not continue the previous one: the context was edited, or a branch began. ${plural(contexts.length, "generation")} make ${plural(rows.length, "training row")}; each sampled token is trained once.`;
}

function contextTable({ contexts }) {
  const names = ["Generation", "Context", "Prompt", "Kept", "Dropped", "New", "Sampled", "Mean log-prob", "Ended", "Weights", "Row"];
  return h(
    "table",
    { class: "dense" },
    h("thead", null, h("tr", null, names.map((name, at) => h("th", { scope: "col", class: at > 1 && at < 8 ? "num" : "" }, name)))),
    h(
      "tbody",
      null,
      contexts.map((one) =>
        h(
          "tr",
          null,
          h("th", { scope: "row" }, one.generation + 1),
          h("td", null, kindOf(one), one.prompt_check === "differing" && h("span", { class: "pill failed", title: "The engine ran other ids than it was sent; the table and the row use those that it ran" }, "engine's ids")),
          [one.prompt_tokens, one.kept_tokens, one.dropped_tokens, one.new_tokens, one.output_tokens].map((value) => h("td", { class: "num" }, count(value))),
          h("td", { class: "num" }, number(one.mean_log_prob, 3)),
          h("td", null, one.finish_reason),
          h("td", null, versions(one)),
          h("td", { title: one.untrained_because }, one.row === null || !one.trained ? "not trained" : one.row + 1),
        ),
      ),
    ),
  );
}

function kindOf(one) {
  if (one.generation === 0) return h("span", { class: "pill open" }, "begins");
  if (one.dropped_tokens === 0) return h("span", { class: "pill delivered" }, "continues");
  return h("span", { class: "pill leased" }, one.kept_tokens ? "edited" : "restarted");
}

const named = (version) => (/^\d+$/.test(version) ? `v${version}` : version);
const versions = (one) => (one.weight_versions.length > 1 ? one.weight_versions.map(named).join(" → ") : one.weight_version === null ? "–" : named(one.weight_version));

function rowPicker(found, load) {
  const text = (row, at) => `row ${at + 1}: ${count(row.trained)} of ${count(row.tokens)} trained, generations ${row.generations.map((index) => index + 1).join(", ")}`;
  const select = h("select", { onchange: () => load(Number(select.value)) }, found.rows.map((row, at) => h("option", { value: at, selected: at === found.row }, text(row, at).slice(0, 90))));
  return h("label", { class: "inline" }, h("span", null, "Row"), select);
}

function trainerInWords(trainer) {
  const parts = [["advantage", trainer.advantage], ["entropy", trainer.entropy], ["weight in the mean", trainer.loss_share], ["clipped", trainer.clip_share]];
  const said = parts.filter(([, value]) => value !== null).map(([name, value]) => `${name} ${number(value, 3)}`);
  return h("p", { class: "muted" }, `Reported by the trainer${trainer.step === null ? "" : ` in step ${count(trainer.step)}`}: ${said.join(", ") || "its log-probs"}.`);
}

/* Each trained token of a piece, in order, has the trainer's log-prob of the same place. */
function withGaps(found) {
  let at = 0;
  for (const piece of found.pieces) {
    if (!piece.ids) continue;
    const theirs = found.trainer?.log_probs?.slice(at, at + piece.ids.length) ?? null;
    piece.train = theirs;
    piece.gap = theirs && piece.log_probs ? Math.max(...theirs.map((value, index) => Math.abs(value - piece.log_probs[index]))) : null;
    at += piece.ids.length;
  }
  return found;
}

/** The tokens of a row, coloured by log-prob, or by what the trainer said where it said something. */
function colouredText(found) {
  withGaps(found);
  const place = h("div", null, tokenText(found, "log-prob"));
  const ways = ["log-prob", found.trainer?.log_probs && "mismatch", found.trainer && found.trainer.advantage !== null && "advantage"].filter(Boolean);
  if (ways.length === 1) return place;
  const names = { "log-prob": "log-prob of the engine", mismatch: "|train − rollout log-prob|", advantage: "advantage" };
  const select = h("select", { "aria-label": "Colour tokens by", onchange: () => place.replaceChildren(...tokenText(found, select.value)) }, ways.map((way) => h("option", { value: way }, names[way])));
  return [h("label", { class: "inline" }, h("span", null, "Colour"), select), place];
}

function tokenText(found, way) {
  const told = h("p", { class: "token-told", role: "status" }, "Point at a trained token, or use the arrow keys inside the text, to see its id and log-prob.");
  const tokens = [];
  const text = h("div", { class: "tokens", tabindex: 0, role: "group", "aria-label": "Tokens of the row; arrow keys move from trained token to trained token" }, found.pieces.map((piece) => (piece.ids ? trained(piece, tokens, way, found.trainer) : context(piece))));
  let at = -1;
  const choose = (index) => {
    tokens[at]?.element.classList.remove("chosen");
    at = Math.max(0, Math.min(tokens.length - 1, index));
    tokens[at].element.classList.add("chosen");
    told.textContent = inWords(tokens[at].piece);
  };
  text.addEventListener("pointerover", (event) => event.target.tokenIndex !== undefined && choose(event.target.tokenIndex));
  text.addEventListener("click", (event) => event.target.tokenIndex !== undefined && choose(event.target.tokenIndex));
  text.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step || !tokens.length) return;
    event.preventDefault();
    event.stopPropagation();
    choose(at + step);
    tokens[at].element.scrollIntoView({ block: "nearest" });
  });
  return [legend(found, way), told, text];
}

function legend(found, way) {
  const words = { mismatch: GAP_LEGEND, advantage: ADVANTAGE_LEGEND }[way];
  const shades = words ? words.map((text, at) => h("li", null, h("span", { class: `t lp${at + 1}` }, "abc"), text)) : found.rows[found.row].has_log_probs ? LEGEND.map((words, at) => h("li", null, h("span", { class: `t lp${at + 1}` }, "abc"), words)) : [h("li", null, h("span", { class: "t lp0" }, "abc"), "trained, no log-prob recorded")];
  return h("ul", { class: "legend" }, h("li", null, h("span", { class: "ctx" }, "abc"), "context, not trained"), shades);
}

function shadeBy(way, piece, trainer) {
  if (way === "advantage") return shadeOfAdvantage(trainer.advantage);
  if (way === "mismatch") return piece.gap === null ? 0 : shadeOfGap(piece.gap);
  return piece.log_probs === null ? 0 : shade(Math.min(...piece.log_probs));
}

function trained(piece, tokens, way, trainer) {
  const element = h("span", { class: `t lp${shadeBy(way, piece, trainer)}` }, piece.text === null ? `${piece.ids.join(" ")} ` : visible(piece.text));
  element.tokenIndex = tokens.length;
  tokens.push({ element, piece });
  return element;
}

function context(piece) {
  const counted = plural(piece.count, "context token");
  if (piece.text === null) return h("span", { class: "ctx folded" }, `[${counted}] `);
  const images = piece.images ? `, ${plural(piece.images, "image placeholder")}` : "";
  if (piece.text.length <= LONG_CONTEXT) return h("span", { class: "ctx" }, visible(piece.text));
  const rest = h("span", { class: "ctx", hidden: true }, visible(piece.text.slice(120, -120)));
  const more = h("button", { type: "button", class: "fold" }, `… ${counted}${images} …`);
  more.addEventListener("click", () => {
    rest.hidden = false;
    more.remove();
  });
  return [h("span", { class: "ctx" }, visible(piece.text.slice(0, 120))), more, rest, h("span", { class: "ctx" }, visible(piece.text.slice(-120)))];
}

function inWords(piece) {
  const ids = piece.ids.join(" ");
  const probs = piece.log_probs === null ? "no log-prob recorded" : piece.log_probs.map((value) => `log-prob ${number(value, 3)} (p = ${number(Math.exp(value), 3)})`).join(", ");
  const train = piece.train ? `; the trainer's log-prob ${piece.train.map((value) => number(value, 3)).join(", ")}` : "";
  return `Position ${count(piece.at)}, id ${ids}${piece.text === null ? "" : `, “${piece.text}”`}: ${probs}${train}`;
}
