// Numbers and times as people read them.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export const count = (value) => (value === null || value === undefined ? "–" : whole.format(value));

/** A number with so many digits behind the point, with a true minus sign. */
export function number(value, digits = 2) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  return value.toFixed(digits).replace("-", "−");
}

/** A reward: always with its sign, so that columns line up. */
export function reward(value, digits = 2) {
  if (value === null || value === undefined) return "–";
  return value < 0 ? number(value, digits) : `+${number(value, digits)}`;
}

export const percent = (value) => (value === null || value === undefined ? "–" : `${number(100 * value, 0)} %`);

/** A length of time. */
export function span(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds !== 0 && Math.abs(seconds) < 0.1) return `${number(1000 * seconds, 0)} ms`;
  if (seconds < 10 && !Number.isInteger(seconds)) return `${number(seconds, 1)} s`;
  if (seconds < 120) return `${number(seconds, 0)} s`;
  if (seconds < 7200) return `${number(seconds / 60, 0)} min`;
  if (seconds < 172800) return `${number(seconds / 3600, 0)} h`;
  return `${number(seconds / 86400, 0)} d`;
}

/** How long ago, by the server's clock. */
export const ago = (at, now) => (at ? `${span(Math.max(0, now - at))} ago` : "never");

const stamp = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium", timeStyle: "medium" });

export const moment = (at) => (at ? stamp.format(new Date(at * 1000)) : "–");

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  const power = value < 1 ? 0 : Math.min(units.length - 1, Math.floor(Math.log10(value) / 3));
  return `${number(value / 1000 ** power, power ? 1 : 0)} ${units[power]}`;
}

export const plural = (value, one, many = one.endsWith("y") ? `${one.slice(0, -1)}ies` : `${one}s`) => `${count(value)} ${value === 1 ? one : many}`;

/** Short text on one line. */
export function short(text, length) {
  const line = String(text ?? "").replace(/\s+/g, " ").trim();
  return line.length > length ? `${line.slice(0, length - 1)}…` : line;
}
