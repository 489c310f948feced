// The groups of a job, the last updated first or as they are sorted.

import { path } from "./api.js";
import { h, KeyedList, scrolling, show } from "./dom.js";
import { ago, plural, reward } from "./format.js";
import { SORTED, STATES, empty, filters, headCell, jobHref, keepSort, pager, pill, rewardDots } from "./parts.js";
import { jobHead } from "./view_job.js";

/* Name, what it is sorted by, class. */
const COLUMNS = [["Instance", "instance_id"], ["State"], ["Rewards"], ["Mean", "reward_mean", "num"], ["Result"], ["Updated", "updated_at"]];

export function groupsView(stage, jobId) {
  const rows = h("tbody");
  const table = h(
    "table",
    { class: "list" },
    h("caption", { class: "unseen" }, `Groups of ${jobId}`),
    h("thead", null, h("tr", null, COLUMNS.map((column) => headCell(stage, column, "updated_at")))),
    rows,
  );
  const nothing = h("div");
  const pages = h("div");
  let low = 0;
  let high = 0;
  const list = new KeyedList(rows, (group) => group.group_index, () => {
    const row = h("tr");
    return { element: row, update: (group) => show(row, cells(jobId, group, low, high)) };
  });
  const query = Object.fromEntries(stage.query);
  stage.poll(path(["jobs", jobId, "groups"], { limit: 50, ...query }), query.cursor ? 20000 : 3000, (body) => {
    const rewards = body.groups.flatMap((group) => group.members.map((one) => one.reward));
    low = Math.min(...rewards, 0);
    high = Math.max(...rewards, 0);
    list.show(body.groups);
    table.hidden = !body.groups.length;
    show(nothing, body.groups.length ? null : empty("No group", [...stage.query.keys()].some((name) => !SORTED.includes(name)) ? "No group matches these filters." : "The job has no group yet."));
    show(pages, pager(stage, body.next_cursor, "group", body.groups.length));
  });
  const fields = [
    { name: "state", label: "State", options: STATES },
    { name: "search", label: "Instance contains", wide: true, hint: "task name or instance id" },
    { name: "cause", label: "Cause contains", wide: true, hint: "for instance: timed out" },
  ];
  return {
    title: `Groups of ${jobId}`,
    element: h("div", null, jobHead(jobId, "Groups"), filters(stage, fields, keepSort(stage), SORTED), scrolling(table), nothing, pages),
  };
}

function cells(jobId, group, low, high) {
  const counted = group.members.filter((one) => !one.late);
  const mean = counted.length ? counted.reduce((sum, one) => sum + one.reward, 0) / counted.length : null;
  const at = group.closed_at ?? group.last_write_at ?? group.opened_at;
  return [
    h(
      "th",
      { scope: "row", class: "main" },
      h("a", { href: jobHref(jobId, "groups", group.group_index) }, group.instance_id),
      h("small", null, `epoch ${group.epoch}, ${counted.length} of ${plural(group.group_size, "member")}`),
    ),
    h("td", { "data-name": "State" }, pill(group.state)),
    h("td", { "data-name": "Rewards" }, rewardDots(group.members, low, high)),
    h("td", { class: "num", "data-name": "Mean" }, reward(mean)),
    h("td", { class: "says", "data-name": "Result" }, group.message),
    h("td", { class: "when", "data-name": "Updated" }, at ? ago(at, Date.now() / 1000) : "not begun"),
  ];
}
