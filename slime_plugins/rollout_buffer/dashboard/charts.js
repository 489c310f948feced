// Time series with uPlot, each with its numbers in words and as a table.

import { h, scrolling, show } from "./dom.js";
import { moment, number } from "./format.js";
import { trailing, fourEpisodes } from "./trailing.js";

const HEIGHT = 170;
const WINDOW_S = 60;
const FEW_POINTS = 30;

/** A colour as a canvas takes it: a variable of the style sheet holds both themes'. */
function color(name) {
  const probe = h("span", { hidden: true, style: { color: `var(--${name})` } });
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}
const faded = (name) => `color-mix(in srgb, ${color(name)} 18%, transparent)`;

const perMinute = (values, seconds) => values.map((value, at) => (value * 60) / seconds[at]);
const asPercent = (values) => values.map((value) => (value === null ? null : value * 100));

/**
 * What is drawn. ``from`` names a column of the series; ``as`` turns it into what is shown. A point tells of the last
 * minute, or of what ``windowS`` says, where its interval is shorter.
 */
export const CHARTS = [
  {
    id: "reward",
    title: "Reward",
    says: "mean of the episodes that ended; the band reaches from the lowest to the highest",
    unit: "",
    digits: 2,
    lines: [
      { from: "reward_mean", name: "mean", color: "line-1", width: 2 },
      { from: "reward_max", name: "highest", color: "line-1", width: 0 },
      { from: "reward_min", name: "lowest", color: "line-1", width: 0 },
    ],
    band: [2, 3],
  },
  {
    id: "success",
    title: "Success",
    says: "share of the episodes that the environment called a success",
    unit: "%",
    digits: 0,
    range: [0, 100],
    lines: [{ from: "success", name: "success", color: "line-2", width: 2, as: asPercent }],
  },
  {
    id: "groups",
    title: "Groups per minute",
    says: "closed groups by state",
    unit: "",
    digits: 1,
    zero: true,
    counts: true,
    lines: [
      { from: "groups_valid", name: "valid", color: "delivered", as: perMinute },
      { from: "groups_filtered", name: "filtered", color: "filtered", as: perMinute },
      { from: "groups_failed", name: "failed", color: "failed", as: perMinute },
    ],
  },
  {
    id: "outcomes",
    title: "Episodes per minute",
    says: "by how they ended; failed ones have no reward and are retried",
    unit: "",
    digits: 1,
    zero: true,
    counts: true,
    lines: [
      { from: "completed", name: "completed", color: "delivered", as: perMinute },
      { from: "truncated", name: "truncated", color: "leased", as: perMinute },
      { from: "aborted", name: "aborted", color: "skipped", as: perMinute },
      { from: "failed", name: "failed", color: "failed", as: perMinute },
    ],
  },
  {
    id: "staleness",
    title: "Staleness",
    says: "weight versions that an episode was behind the newest when it was written",
    unit: "",
    digits: 1,
    zero: true,
    lines: [
      { from: "behind_mean", name: "mean", color: "line-1", width: 2 },
      { from: "behind_max", name: "max", color: "line-3" },
    ],
  },
  {
    id: "use",
    title: "Episodes and engine requests in progress",
    says: "mean number at a time, from the durations of recently ended episodes: playing from reset to score, generating at the engine",
    unit: "",
    digits: 1,
    zero: true,
    windowS: (columns, widthS) => Math.max(WINDOW_S, fourEpisodes(columns, widthS)),
    lines: [
      { from: "playing", name: "episodes", color: "line-2", width: 2 },
      { from: "generating", name: "requests at the engine", color: "line-3" },
    ],
  },
  {
    id: "wait",
    title: "Poll wait",
    says: "seconds that the trainer had polled before it got each delivery",
    unit: "s",
    digits: 1,
    zero: true,
    points: true,
    windowS: () => 0,
    lines: [
      { from: "wait_mean", name: "mean", color: "line-1", width: 2 },
      { from: "wait_max", name: "longest", color: "line-3" },
    ],
  },
  {
    id: "tokens",
    title: "Sampled tokens per episode",
    says: "mean number of tokens that the model sampled",
    unit: "",
    digits: 0,
    zero: true,
    lines: [{ from: "sampled_tokens", name: "tokens", color: "line-2", width: 2 }],
  },
];

/** What a chart draws of the columns of a job: one list of values per line. */
export function seriesOf(spec, columns, widthS, until) {
  const windowS = spec.windowS?.(columns, widthS) ?? WINDOW_S;
  const recent = trailing(columns, { widthS, until, windowS });
  return spec.lines.map((line) => (line.as ? line.as(recent.columns[line.from], recent.seconds) : recent.columns[line.from]));
}

/** One chart: ``update(columns, widthS, now)`` and ``draw(data)`` draw it again, ``end()`` lets it go. */
export function chart(spec) {
  const plot = h("div", { class: "plot", "aria-hidden": "true" });
  const words = h("p", { class: "words" });
  const numbers = scrolling();
  const details = h("details", null, h("summary", null, "Numbers"), numbers);
  const figure = h("figure", { class: "panel chart", id: `chart-${spec.id}` }, h("figcaption", null, h("h3", null, spec.title), h("p", { class: "muted" }, spec.says)), words, plot, details);
  let drawn = null;
  let data = null;
  let width = 0;

  const pointed = (plotted) => show(words, inWords(spec, data, plotted.cursor.idx ?? null));
  const draw = () => {
    drawn?.destroy();
    drawn = null;
    if (data === null || !plot.clientWidth || !hasAny(spec, data)) {
      plot.replaceChildren(h("p", { class: "empty-plot" }, data === null ? "" : "nothing yet"));
      return;
    }
    plot.replaceChildren();
    width = plot.clientWidth;
    drawn = new window.uPlot(options(spec, width, pointed), data, plot);
  };
  const resized = new ResizeObserver(() => {
    if (plot.clientWidth === width) return;
    if (drawn === null) draw();
    else drawn.setSize({ width: (width = plot.clientWidth), height: HEIGHT });
  });
  resized.observe(plot);
  window.addEventListener("themechange", draw);
  details.addEventListener("toggle", () => details.open && show(numbers, table(spec, data)));

  return {
    element: figure,
    title: spec.title,
    hasData: () => data !== null && hasAny(spec, data),
    update(columns, widthS, until) {
      this.draw([columns.t, ...seriesOf(spec, columns, widthS, until)]);
    },
    draw(fresh) {
      const sameKind = drawn !== null && hasAny(spec, fresh);
      data = fresh;
      if (sameKind) drawn.setData(data);
      else draw();
      show(words, inWords(spec, data, drawn?.cursor.idx ?? null));
      if (details.open) show(numbers, table(spec, data));
    },
    end() {
      resized.disconnect();
      window.removeEventListener("themechange", draw);
      drawn?.destroy();
    },
  };
}

/** Where things are counted, nothing but zeros means that nothing happened; a measured zero is a value. */
const hasAny = (spec, data) => data.slice(1).some((values) => values.some((value) => value !== null && !(spec.counts && value === 0)));

const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit" });
const clockSeconds = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const day = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short" });

/** Seconds as hours, minutes and seconds: 1:02:30. */
function elapsed(seconds) {
  const two = (value) => String(value).padStart(2, "0");
  const [hours, minutes] = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60];
  return `${hours ? `${hours}:${two(minutes)}` : minutes}:${two(Math.floor(seconds % 60))}`;
}

const momentOf = (spec, at) => (spec.elapsed ? `after ${elapsed(at)}` : moment(at));

/** Times along the axis in 24 hours; where a day begins, the day. */
function clockTimes(_, splits) {
  const step = splits.length > 1 ? splits[1] - splits[0] : 60;
  return splits.map((at, index) => {
    const date = new Date(at * 1000);
    if (step >= 86400 || (index > 0 && date.getHours() === 0 && date.getMinutes() === 0)) return day.format(date);
    return (step < 60 ? clockSeconds : clock).format(date);
  });
}

/* Seconds make a label wide: they are shown where 40 pixels are less than a minute. */
function options(spec, width, onCursor) {
  const axis = { stroke: color("muted"), grid: { stroke: color("grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
  return {
    width,
    height: HEIGHT,
    padding: [8, 30, 0, 0],
    cursor: { points: { size: 7 }, drag: { x: false, y: false } },
    legend: { show: false },
    hooks: { setCursor: [onCursor] },
    scales: { x: { time: !spec.elapsed }, y: { range: spec.range ?? rangeOf(spec) } },
    axes: [{ ...axis, space: (_, __, from, to, width) => ((to - from) / width < 1.5 ? 74 : 40), size: 28, values: spec.elapsed ? (_, splits) => splits.map(elapsed) : clockTimes }, { ...axis, size: 46, space: 30 }],
    series: [
      {},
      ...spec.lines.map((line) => ({
        label: line.name,
        stroke: color(line.color),
        width: line.width ?? 1.5,
        points: { show: spec.points ?? (line.width === 0 ? false : alone), size: 5 },
        spanGaps: true,
      })),
    ],
    bands: spec.band ? [{ series: spec.band, fill: faded(spec.lines[0].color) }] : undefined,
  };
}

/** Where values stand alone or are few, a line alone would not show them. */
function alone(plot, series, from, to) {
  const values = plot.data[series].slice(from, to + 1);
  return values.filter((value) => value !== null && value !== undefined).length <= FEW_POINTS;
}

/** From zero where that means something; with some air; never a line of no height. */
function rangeOf(spec) {
  return (_, low, high) => {
    if (low === null || high === null) return [0, 1];
    const bottom = spec.zero ? 0 : low;
    const air = (high - bottom) * 0.08 || Math.abs(high) * 0.1 || 1;
    return [spec.zero ? 0 : bottom - air, high + air];
  };
}

/** The numbers at the pointer, else the last that there are. */
function inWords(spec, data, index) {
  if (data === null) return null;
  const parts = spec.lines.map((line, at) => {
    const values = (index === null ? data[at + 1] : [data[at + 1][index]]).filter((value) => value !== null && value !== undefined);
    return values.length ? h("span", null, h("i", { style: { background: `var(--${line.color})` }, "aria-hidden": "true" }), `${line.name} `, h("b", null, `${number(values.at(-1), spec.digits)}${spec.unit && ` ${spec.unit}`}`)) : null;
  });
  const when = index === null || data[0][index] === undefined ? h("span", { class: "muted" }, "last") : h("span", { class: "muted" }, momentOf(spec, data[0][index]));
  return parts.some(Boolean) ? [parts, when] : h("span", { class: "muted" }, "Nothing yet");
}

function table(spec, data) {
  if (data === null) return null;
  const rows = data[0].map((start, at) => [start, ...data.slice(1).map((values) => values[at])]);
  const shown = rows.filter((row) => row.slice(1).some((value) => value !== null && value !== 0)).slice(-40).reverse();
  return h(
    "table",
    null,
    h("caption", { class: "unseen" }, `${spec.title}: ${spec.says}, newest first`),
    h("thead", null, h("tr", null, h("th", { scope: "col" }, "from"), spec.lines.map((line) => h("th", { scope: "col", class: "num" }, line.name)))),
    h("tbody", null, shown.map(([start, ...values]) => h("tr", null, h("th", { scope: "row" }, momentOf(spec, start)), values.map((value) => h("td", { class: "num" }, number(value, spec.digits)))))),
  );
}
