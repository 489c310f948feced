// Full-text search, in one job or over all: newest first, as far as the server got, and on from there.

import { ask, path } from "./api.js";
import { h } from "./dom.js";
import { ago, count, plural } from "./format.js";
import { crumbs, empty, filters, go, jobHref, rewardCell } from "./parts.js";
import { jobHead } from "./view_job.js";

const LIMIT = 20;
const AUTOMATIC_PAGES = 6;
const FIELDS = [
  { name: "text", label: "Text in messages, thoughts and tool calls", wide: true, hint: "for instance: airplane mode" },
  { name: "outcome", label: "Outcome", options: ["completed", "truncated", "aborted"] },
  { name: "success", label: "Success", options: [["true", "yes"], ["false", "no"]] },
  { name: "min_reward", label: "Reward from", type: "number", step: "any" },
  { name: "max_reward", label: "to", type: "number", step: "any" },
];

export const searchView = (stage, jobId = null) => {
  const list = h("ol", { class: "hits" });
  const told = h("p", { class: "muted", role: "status" });
  const more = h("button", { type: "button", hidden: true }, "Search on");
  const nothing = h("div");
  const text = stage.query.get("text") ?? "";
  const state = { cursor: null, searched: 0, found: 0, unreadable: 0 };
  const aborter = new AbortController();
  stage.atEnd(() => aborter.abort());

  /** Asks for page after page until there are enough hits, or for some seconds; the button goes on. */
  const searchOn = async () => {
    more.hidden = true;
    const enough = state.found + LIMIT;
    try {
      for (let page = 0; page < AUTOMATIC_PAGES && state.found < enough; page += 1) {
        told.textContent = `Searching … ${plural(state.searched, "trajectory")} so far.`;
        const { body } = await ask(path(["search"], { ...Object.fromEntries(stage.query), job_id: jobId, limit: LIMIT, cursor: state.cursor }), aborter.signal);
        list.append(...body.hits.map((hit) => hitItem(hit, text, jobId === null)));
        Object.assign(state, { cursor: body.next_cursor, searched: state.searched + body.searched, found: state.found + body.hits.length, unreadable: state.unreadable + body.unreadable });
        if (state.cursor === null) break;
      }
    } catch (error) {
      if (error.name === "AbortError") return;
      if (error.status === 401) stage.failed(error);
      told.textContent = error.message;
      more.hidden = false;
      return;
    }
    more.hidden = state.cursor === null;
    const gone = state.unreadable ? ` ${count(state.unreadable)} of them could not be read any more.` : "";
    told.textContent = `Found in ${plural(state.found, "trajectory")}; ${state.cursor === null ? `all ${count(state.searched)}` : `the newest ${count(state.searched)}`} were searched.${gone}`;
    nothing.replaceChildren(...(state.found || state.cursor !== null ? [] : [empty("Nothing found", "No message, thought or tool call has this text.")]));
  };
  more.addEventListener("click", searchOn);
  if (text) searchOn();
  const head = jobId === null ? [crumbs(["Jobs", "#/"], ["Search", null]), h("div", { class: "row head" }, h("h1", null, "Search"))] : jobHead(jobId, "Search");
  const form = filters(stage, FIELDS, go);
  form.open = true;
  return {
    title: jobId === null ? "Search" : `Search in ${jobId}`,
    element: h("div", null, head, form, text ? told : empty("Search the texts", `Messages, thoughts and tool calls of ${jobId === null ? "all jobs" : "this job"}, in either case of their letters. Payloads are read one after the other, newest first.`), list, nothing, h("div", { class: "row pager" }, more)),
  };
};

function hitItem(hit, text, showsJob) {
  const query = new URLSearchParams({ turn: hit.turn, find: text });
  return h(
    "li",
    { class: "panel hit" },
    h(
      "div",
      { class: "row" },
      h("a", { href: `${jobHref(hit.job_id, "trajectories", hit.uid)}?${query}` }, hit.instance_id),
      rewardCell(hit.reward),
      h("span", { class: `pill ${hit.outcome}` }, hit.outcome),
      h("span", { class: "muted" }, `turn ${count(hit.turn)}, ${hit.role}${hit.places > 1 ? `; in ${plural(hit.places, "text")}` : ""}`),
      h("span", { class: "grow" }),
      h("small", { class: "muted" }, showsJob && [h("a", { href: jobHref(hit.job_id) }, hit.job_id), " · "], ago(hit.created_at, Date.now() / 1000)),
    ),
    h("p", { class: "snippet" }, hit.before, h("mark", null, hit.found), hit.after),
  );
}
