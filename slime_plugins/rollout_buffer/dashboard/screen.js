// A screenshot with what was done on it drawn over it.

import { h, svg } from "./dom.js";
import { actionInWords } from "./episode.js";

const WIDTH = 1000;
const TEXT_ACTIONS = new Set(["type", "answer", "open", "system_button", "wait", "terminate"]);

/** ``show(turn)`` changes the screenshot; the marks fit themselves to its shape. */
export class Screen {
  constructor(shape) {
    this.height = shape ? (WIDTH * shape[1]) / shape[0] : 2000;
    this.image = h("img", { alt: "", decoding: "async" });
    this.marks = svg("svg", { class: "marks", "aria-hidden": "true", preserveAspectRatio: "none" });
    this.caption = h("p", { class: "deed" });
    this.none = h("p", { class: "no-image", hidden: true }, "no screenshot in this turn");
    this.element = h("div", { class: "screen" }, h("div", { class: "glass" }, this.image, this.marks, this.none), this.caption);
    this.image.addEventListener("load", () => {
      this.height = (WIDTH * this.image.naturalHeight) / this.image.naturalWidth;
      this.draw();
    });
    this.image.addEventListener("error", () => {
      this.image.hidden = true;
      this.none.hidden = false;
      this.none.textContent = "this screenshot is not kept any more";
    });
  }

  show(turn, count) {
    this.turn = turn;
    const there = Boolean(turn.image);
    this.image.hidden = !there;
    this.none.hidden = there;
    if (there) {
      this.none.textContent = "no screenshot in this turn";
      const source = `/images/${turn.image}`;
      if (this.image.getAttribute("src") !== source) this.image.setAttribute("src", source);
    }
    const words = turn.malformed ? "nothing: the reply held no valid action" : actionInWords(turn.action);
    this.image.setAttribute("alt", `Screenshot that the agent saw in turn ${turn.number} of ${count}${words ? `; then it ${words}` : ""}`);
    this.caption.textContent = words;
    this.caption.className = `deed ${turn.malformed ? "bad" : ""} ${turn.action && TEXT_ACTIONS.has(turn.action.kind) ? "loud" : ""}`;
    this.caption.hidden = !words;
    this.draw();
  }

  draw() {
    this.marks.setAttribute("viewBox", `0 0 ${WIDTH} ${this.height}`);
    this.marks.replaceChildren(...(this.turn?.action && this.turn.image ? marksOf(this.turn.action, this.height) : []));
  }
}

function marksOf(action, height) {
  const place = (point) => [point[0] * WIDTH, point[1] * height];
  if (action.kind === "swipe" && action.from && action.to) return swipe(place(action.from), place(action.to));
  if (action.from === null) return [];
  const [x, y] = place(action.from);
  const ring = (r, kind) => svg("circle", { cx: x, cy: y, r, class: kind });
  const marks = [ring(46, "halo"), ring(46, "ring"), ring(12, "dot"), ring(46, "pulse")];
  return action.kind === "long_press" ? [...marks, ring(72, "ring held")] : marks;
}

function swipe(from, to) {
  const [dx, dy] = [to[0] - from[0], to[1] - from[1]];
  const length = Math.hypot(dx, dy) || 1;
  const [ux, uy] = [dx / length, dy / length];
  const head = [to[0] - ux * 60, to[1] - uy * 60];
  const corner = (side) => `${head[0] - side * uy * 34},${head[1] + side * ux * 34}`;
  const line = { x1: from[0], y1: from[1], x2: head[0], y2: head[1] };
  return [
    svg("line", { ...line, class: "halo-line" }),
    svg("line", { ...line, class: "path" }),
    svg("polygon", { points: `${to.join(",")} ${corner(1)} ${corner(-1)}`, class: "head" }),
    svg("circle", { cx: from[0], cy: from[1], r: 24, class: "start" }),
  ];
}
