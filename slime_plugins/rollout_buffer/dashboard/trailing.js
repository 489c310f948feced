// Columns of a series over a trailing stretch of time. Pure: data in, data out.
//
// A bucket of a few seconds holds one or two episodes: what is drawn of it is noise. Each point tells of a longer
// stretch that ends with its bucket; where buckets are as long as that, nothing changes.

const COUNTED = new Set(["episodes", "completed", "truncated", "aborted", "failed", "groups_valid", "groups_filtered", "groups_failed", "deliveries"]);
const LOWEST = new Set(["reward_min"]);
const HIGHEST = new Set(["reward_max", "behind_max", "wait_max"]);
const AT_ONCE = new Set(["playing", "generating"]);
const WEIGHT = { wait_mean: "deliveries" };

/** Returns the columns with each bucket's value over the last ``windowS`` seconds, and the seconds that it is of. */
export function trailing(columns, { widthS, until, windowS }) {
  const buckets = Math.max(1, Math.ceil(windowS / widthS));
  const lengths = columns.t.map((start) => Math.max(1, Math.min(widthS, until - start)));
  const stretches = columns.t.map((_, at) => [Math.max(0, at - buckets + 1), at + 1]);
  const seconds = stretches.map(([from, to]) => sum(lengths.slice(from, to)));
  const over = (name) => stretches.map(([from, to], at) => {
    const values = columns[name].slice(from, to);
    if (COUNTED.has(name)) return sum(values);
    const known = values.filter((value) => value !== null);
    if (!known.length) return null;
    if (LOWEST.has(name)) return Math.min(...known);
    if (HIGHEST.has(name)) return Math.max(...known);
    if (AT_ONCE.has(name)) return (sum(known) * widthS) / seconds[at];
    return weighted(values, columns[WEIGHT[name] ?? "episodes"].slice(from, to));
  });
  const names = Object.keys(columns).filter((name) => name !== "t");
  return { columns: { t: columns.t, ...Object.fromEntries(names.map((name) => [name, over(name)])) }, seconds };
}

/** Returns four times the mean time that an episode of these buckets held its device; 0 when none told. */
export function fourEpisodes(columns, widthS) {
  const held = sum(columns.playing.filter((value) => value !== null)) * widthS;
  return (4 * held) / (sum(columns.episodes) || 1);
}

const sum = (values) => values.reduce((total, value) => total + value, 0);

function weighted(values, weights) {
  let total = 0;
  let weight = 0;
  values.forEach((value, at) => {
    if (value === null) return;
    total += value * weights[at];
    weight += weights[at];
  });
  return weight ? total / weight : null;
}
