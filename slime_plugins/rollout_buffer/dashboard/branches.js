// Every turn of an episode whose prompts did not always continue each other, as a tree: what each turn stands on.

import { ask, path } from "./api.js";
import { h } from "./dom.js";
import { count, number, plural, short } from "./format.js";
import { markdown } from "./markdown.js";
import { section } from "./parts.js";

const ROLES = new Set(["system", "user", "assistant", "tool"]);
const MESSAGE = /<\|im_start\|>([a-z_]{1,20})\n?([\s\S]*?)(?:<\|im_end\|>\n?|(?=<\|im_start\|>)|$)/g;

/** The tree of a session with branches; null for an episode without. */
export function branchSection(jobId, trajectory) {
  const session = trajectory.extra_info?.gateway ?? trajectory.extra_info?.remote_rollout;
  const branches = session?.branches;
  if (!(Number.isInteger(branches) && branches > 1)) return null;
  const body = h("div", null, h("p", { class: "muted" }, "Loading …"));
  const load = async () => {
    try {
      const found = (await ask(path(["turn_tree", trajectory.uid], { job_id: jobId }))).body;
      body.replaceChildren(...tree(found, session));
    } catch (error) {
      body.replaceChildren(h("p", { role: "alert", class: "problem" }, error.message));
    }
  };
  load();
  return section("Branches", h("div", { class: "panel branches" }, body));
}

function tree(found, session) {
  const children = new Map();
  const forks = new Map((session.forks ?? []).map((fork) => [fork.turn, fork]));
  for (const turn of found.turns) {
    turn.fork = forks.get(turn.sampled_as);
    const key = turn.parent ?? -1;
    children.set(key, [...(children.get(key) ?? []), turn]);
  }
  const leaves = found.turns.filter((turn) => !children.has(turn.turn)).length;
  return [
    h("p", { class: "muted" }, `${plural(found.turns.length, "turn")} in ${plural(leaves, "branch", "branches")}. A turn stands below the one whose tokens its prompt continues exactly.${session.repeated_ids ? ` The branches repeat ${plural(session.repeated_ids, "token")} of context.` : ""}`),
    found.why_no_texts && h("p", { class: "muted" }, found.why_no_texts),
    h("ol", { class: "branch-list" }, (children.get(-1) ?? []).map((turn) => branch(turn, children))),
  ].filter(Boolean);
}

/** A line of turns without a fork stays one list; each fork begins lists within the last of them. */
function branch(turn, children) {
  const line = [turn];
  for (let next = children.get(turn.turn); next?.length === 1; next = children.get(next[0].turn)) line.push(next[0]);
  const forks = children.get(line.at(-1).turn) ?? [];
  return h("li", null, line.map(turnBox), forks.length > 0 && h("ol", { class: "branch-list" }, forks.map((fork) => branch(fork, children))));
}

function turnBox(turn) {
  const name = turn.sampled_as === null ? turn.turn + 1 : turn.sampled_as;
  const about = [plural(turn.new_tokens, "new context token"), plural(turn.output_tokens, "token") + " sampled", turn.mean_log_prob !== null && `mean log-prob ${number(turn.mean_log_prob, 2)}`, turn.finish_reason, turn.row !== null && `row ${count(turn.row + 1)}`].filter(Boolean).join(", ");
  return h(
    "div",
    { class: "branch-turn" },
    h("div", { class: "row step-head" }, h("h3", null, `Turn ${count(name)}`), h("small", { class: "muted" }, about)),
    turn.fork && h("p", { class: "muted fork" }, whyForked(turn.fork)),
    turn.context !== null && messagesOf(turn.context).map(([role, text]) => h("div", { class: ROLES.has(role) ? `said ${role}` : "said" }, h("span", { class: "role" }, role), fold(text))),
    turn.output !== null && h("div", { class: "said assistant" }, h("span", { class: "role" }, "assistant"), h("div", { class: "md" }, markdown(turn.output.replace(/<\|im_end\|>\s*$/, "")))),
  );
}

/** Why a branch began: what the client sent otherwise than the nearest branch had it. */
function whyForked(fork) {
  const [first] = fork.differs;
  const why = { asked_again: "the request repeats an earlier one", other_conversation: "no message is that of another branch", tools: "other tools are offered" }[first] ?? `message ${fork.message} (${fork.role}) differs in ${fork.differs.join(", ").replaceAll("_", " ")}`;
  return `A branch of its own: ${why}${fork.repeated_ids ? `; repeats ${plural(fork.repeated_ids, "token")}` : ""}.`;
}

/** The messages of a decoded context in ChatML; any other template is shown as one text. */
function messagesOf(text) {
  const found = [...text.matchAll(MESSAGE)].map((match) => [match[1], match[2].trim()]).filter(([, said]) => said);
  if (found.length) return found;
  return text.replace(/<\|im_(?:start|end)\|>(?:assistant)?/g, "").trim() ? [["context", text.trim()]] : [];
}

function fold(text) {
  if (text.length <= 600) return h("p", { class: "pre" }, text);
  return h("details", null, h("summary", null, short(text, 140)), h("p", { class: "pre" }, text));
}
