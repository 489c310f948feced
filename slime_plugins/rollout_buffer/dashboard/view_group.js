// One group: its members side by side, and the reason of its state.

import { ask, path } from "./api.js";
import { confirmed, h, scrolling, show } from "./dom.js";
import { answerOf } from "./episode.js";
import { count, moment, number, percent, reward, short, span } from "./format.js";
import { callouts, crumbs, fact, jobHref, json, pill, rewardCell, rewardDots, section } from "./parts.js";

const SEVERITY = { filtered: "attention", failed: "attention", delivered: "ok", ready: "ok", leased: "ok", open: "wait", skipped: "wait" };
const MOST_SCREENS = 32;

export function groupView(stage, jobId, groupIndex) {
  const head = h("div");
  const body = h("div");
  const screens = new LastLooks(stage);
  let members = "";
  const cards = h("ul", { class: "members" });
  stage.poll(path(["groups", groupIndex]), 3000, (group) => {
    show(head, ...headOf(jobId, group));
    const text = JSON.stringify(group.members) + group.delivered.length;
    if (text !== members) {
      members = text;
      cards.replaceChildren(...memberCards(jobId, group, screens));
    }
    show(body, ...detailsOf(group));
  });
  return { title: `Group ${groupIndex} of ${jobId}`, element: h("div", null, head, section("Members side by side", cards), body) };
}

function headOf(jobId, group) {
  const rewards = group.members.filter((one) => !one.late).map((one) => one.reward);
  const mean = rewards.length ? rewards.reduce((sum, one) => sum + one, 0) / rewards.length : null;
  const told = group.members.filter((one) => one.success !== null && !one.late);
  return [
    crumbs(["Jobs", "#/"], [jobId, jobHref(jobId)], ["Groups", jobHref(jobId, "groups")], [group.instance_id, null]),
    h("div", { class: "row head" }, h("h1", { class: "id" }, group.instance_id), pill(group.state), h("span", { class: "grow" }), group.members.length > 1 && h("a", { class: "button", href: jobHref(jobId, "groups", group.group_index, "compare") }, "Compare two"), group.members.length > 0 && h("button", { type: "button", title: "Its trajectories as they are stored, one per line; screenshots by their hash", onclick: () => download(jobId, group) }, "Download")),
    callouts([{ severity: SEVERITY[group.state], message: group.message, code: group.state }]),
    h(
      "dl",
      { class: "facts" },
      fact("Mean reward", reward(mean), rewardDots(group.members, -0.5, 1)),
      fact("Spread", rewards.length ? number(Math.max(...rewards) - Math.min(...rewards)) : "–", "highest − lowest"),
      fact("Success", told.length ? percent(told.filter((one) => one.success >= 1).length / told.length) : "–", told.length ? "of its members" : "not reported"),
      fact("Members", `${rewards.length} / ${group.group_size}`, `epoch ${group.epoch}`),
      fact("Took", group.opened_at && (group.closed_at || group.state === "open") ? span((group.closed_at ?? Date.now() / 1000) - group.opened_at) : "–", group.closed_at ? `closed ${moment(group.closed_at)}` : group.state === "open" ? "not closed" : "not played to its end"),
    ),
  ];
}

/** All members as JSONL, read one after the other. */
async function download(jobId, group) {
  const lines = [];
  try {
    for (const one of group.members) lines.push(`${(await ask(path(["trajectories", one.uid], { job_id: jobId }))).text}\n`);
  } catch (error) {
    await confirmed("The download failed", error.message, "Close");
    return;
  }
  const url = URL.createObjectURL(new Blob(lines, { type: "application/jsonl" }));
  h("a", { href: url, download: `${group.instance_id}-epoch${group.epoch}.jsonl` }).click();
  URL.revokeObjectURL(url);
}

function memberCards(jobId, group, screens) {
  const delivered = new Map(group.delivered.filter((one) => one.source_uid === one.uid).map((one) => [one.uid, one]));
  const best = Math.max(...group.members.map((one) => one.reward));
  const found = group.members.map((one, at) => {
    const given = delivered.get(one.uid);
    const href = jobHref(jobId, "trajectories", one.uid);
    return h(
      "li",
      { class: `panel member${one.reward === best ? " best" : ""}` },
      h("div", { class: "row" }, h("h3", null, `Slot ${one.slot ?? "–"}`), h("span", { class: "grow" }), rewardCell(one.reward)),
      at < MOST_SCREENS && screens.place(jobId, one.uid, href),
      h(
        "p",
        null,
        one.success !== null && h("span", { class: `pill ${one.success >= 1 ? "delivered" : "failed"}` }, one.success >= 1 ? "success" : "no success"),
        " ",
        h("span", { class: `pill ${one.outcome}` }, one.outcome),
        one.late && h("span", { class: "pill skipped" }, "late"),
      ),
      h(
        "dl",
        { class: "pairs" },
        pair("stopped", one.stop_reason.replaceAll("_", " ")),
        pair("turns", count(one.turns)),
        pair("sampled", one.sampled_tokens === null ? "–" : `${count(one.sampled_tokens)} tokens`),
        pair("took", span(one.played_s)),
        pair("engine", span(one.generate_s)),
        pair("weights", one.oldest_version === null ? "–" : `v${one.oldest_version}${one.versions_behind ? `, ${one.versions_behind} behind` : ""}`),
        given && given.reward !== one.reward ? pair("delivered as", reward(given.reward, 3)) : null,
        one.attempt > 1 ? pair("attempt", one.attempt) : null,
      ),
      h("a", { class: "button", href }, "Play", h("span", { class: "unseen" }, ` the episode of slot ${one.slot}`)),
    );
  });
  const missing = Math.max(0, group.group_size - group.members.filter((one) => !one.late).length);
  return [...found, ...Array.from({ length: Math.min(missing, 64) }, () => h("li", { class: "panel member missing" }, h("p", null, group.state === "open" ? "pending" : "missing")))];
}

const pair = (name, value) => [h("dt", null, name), h("dd", null, value)];

function detailsOf(group) {
  const failed = group.attempts.filter((one) => one.state !== "finished");
  const dummies = group.delivered.filter((one) => one.remove_sample).length;
  return [
    section(
      "Attempts",
      failed.length
        ? scrolling(h(
              "table",
              null,
              h("caption", { class: "unseen" }, "Attempts without a trajectory"),
              h("thead", null, h("tr", null, ["Slot", "Attempt", "State", "Took", "Error"].map((name) => h("th", { scope: "col" }, name)))),
              h("tbody", null, failed.map((one) => h("tr", null, h("td", null, one.slot), h("td", null, one.attempt), h("td", null, one.state.replace("_", " ")), h("td", null, one.ended_at ? span(one.ended_at - one.started_at) : `since ${moment(one.started_at)}`), h("td", { class: "says" }, one.error_code && h("code", null, one.error_code), " ", one.error_message)))),
            ),
          )
        : h("p", { class: "muted" }, group.attempts.length ? `All ${group.attempts.length} attempts ended with a trajectory.` : group.members.length ? "Its trajectories were written over HTTP: this buffer made no attempt." : "No attempt has begun."),
    ),
    group.delivered.length > 0 &&
      section(
        group.state === "ready" ? "To be delivered to the trainer" : "Delivered to the trainer",
        h("p", null, `${group.delivered.length} members`, dummies ? `, ${dummies} of them dummies in place of missing members, which are never trained` : "", group.delivery_id ? ", in delivery " : ".", group.delivery_id && h("code", null, group.delivery_id)),
      ),
    section("The instance", h("details", null, h("summary", null, "Its line of the input file"), json(group.instance))),
  ];
}

/** The last screenshot and the answer of each member, requested one after the other when they are scrolled into view. */
class LastLooks {
  constructor(stage) {
    this.known = new Map();
    this.queue = Promise.resolve();
    this.watcher = new IntersectionObserver((entries) => entries.filter((one) => one.isIntersecting).forEach((one) => this.load(one.target)), { rootMargin: "200px" });
    stage.atEnd(() => {
      this.ended = true;
      this.watcher.disconnect();
    });
  }

  place(jobId, uid, href) {
    const box = h("div", { class: "last-look" }, h("a", { class: "shot", href, tabindex: -1, "aria-hidden": "true" }));
    if (this.known.has(uid)) this.fill(box, this.known.get(uid));
    else {
      box.ask = () => ask(path(["trajectories", uid], { job_id: jobId, generations: "false" }));
      box.uid = uid;
      this.watcher.observe(box);
    }
    return box;
  }

  load(box) {
    this.watcher.unobserve(box);
    this.queue = this.queue.then(async () => {
      if (this.ended) return;
      try {
        const { body } = await box.ask();
        this.known.set(box.uid, { image: body.images?.at(-1) ?? null, answer: answerOf(body) });
      } catch {
        this.known.set(box.uid, { image: null, answer: null });
      }
      this.fill(box, this.known.get(box.uid));
    });
  }

  fill(box, { image, answer }) {
    const link = box.firstChild;
    if (image === null) link.classList.add("none");
    else link.replaceChildren(h("img", { src: `/images/${encodeURIComponent(image)}`, alt: "", loading: "lazy" }));
    if (answer) box.append(h("p", { class: "answer", title: short(answer, 400) }, short(answer, 240)));
  }
}
