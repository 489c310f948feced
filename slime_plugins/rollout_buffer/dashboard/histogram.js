// How rewards lie: a bar for each bin, each a link to the trajectories in it.

import { h } from "./dom.js";
import { count, number, plural, reward } from "./format.js";
import { jobHref } from "./parts.js";

/** Draws the bins of a summary; null where all rewards are the same. ``filtering`` holds beside the bin's limits. */
export function histogram(jobId, summary, filtering = {}) {
  const { bins, bin_width: width, reward_min: low, reward_max: high } = summary;
  if (bins.length < 2) return null;
  const most = Math.max(...bins);
  const bar = (times, at) => {
    const from = low + at * width;
    const to = at === bins.length - 1 ? high : from + width;
    const words = `${plural(times, "trajectory")} of ${reward(from)} to ${reward(to)}`;
    const height = { height: times ? `${Math.max(3, (100 * times) / most)}%` : "0" };
    const kind = from > 0 ? "up" : from < 0 && to <= 0 ? "down" : "flat";
    if (!times) return h("li", { title: words }, h("span", { class: "column" }));
    const query = new URLSearchParams({ ...filtering, min_reward: from, max_reward: to });
    return h("li", null, h("a", { class: "column", href: `${jobHref(jobId, "trajectories")}?${query}`, title: words, "aria-label": words }, h("span", { class: `stick ${kind}`, style: height })));
  };
  return h(
    "figure",
    { class: "histogram", "aria-label": `Rewards from ${reward(low)} to ${reward(high)}` },
    h("ol", { class: "columns" }, bins.map(bar)),
    h("figcaption", { class: "muted" }, h("span", null, reward(low)), h("span", null, `rewards in ${count(bins.length)} bins of ${number(width, 3)}`), h("span", null, reward(high))),
  );
}
