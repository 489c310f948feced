// Steps through the turns of a transcript: one is the current one, its screen stands beside it, its number in the address.

import { announce, h, svg } from "./dom.js";
import { turnInWords } from "./transcript.js";

const SPEEDS = [["3000", "slow"], ["1500", "normal"], ["600", "fast"]];
const READING_LINE = 0.2; // of the window, below what is covered
const SETTLES_MS = 300;
const FIRST_SETTLES_MS = 1500; // screenshots and what stands above come later
const MOVES = ["wheel", "touchmove", "pointerdown"];
const NAMES_AFTER_MS = 150; // browsers refuse to change the address at every step of a scroll
const icon = (shape) => svg("svg", { class: "icon", viewBox: "0 0 24 24", "aria-hidden": "true" }, svg("path", { d: shape }));

/** What of the window the bar at its top covers, with what sticks below it where there is no screen. */
function covered() {
  const side = document.querySelector(".side");
  const above = side.classList.contains("bar-only") || !matchMedia("(min-width: 48rem)").matches;
  return document.querySelector(".top").offsetHeight + (above ? side.offsetHeight : 0) + 8;
}

/**
 * Returns ``{controls, start}``. ``turns`` and their elements ``steps`` go together; ``screen`` may be null;
 * ``started(number)`` is told of each turn that becomes the current one.
 */
export function player(stage, { turns, steps, screen, addressOf }) {
  const slider = h("input", { type: "range", min: 1, max: turns.length, value: 1, "aria-label": "Turn" });
  const place = h("output", { class: "place" });
  const speed = h("select", { "aria-label": "Speed" }, SPEEDS.map(([value, name]) => h("option", { value, selected: value === "1500" }, name)));
  const play = h("button", { type: "button", class: "primary", "aria-pressed": "false" }, "Play");
  let at = -1;
  let timer = null;
  let naming = null;
  let settlesUntil = 0;

  const choose = (index, { scroll = true, quietly = false, settlesMs } = {}) => {
    const next = Math.max(0, Math.min(turns.length - 1, index));
    const before = at;
    at = next;
    if (scroll) scrollTo(next, settlesMs);
    if (next === before) return;
    steps[before]?.removeAttribute("aria-current");
    steps[at].setAttribute("aria-current", "step");
    screen?.show(turns[at], turns.length);
    slider.value = at + 1;
    slider.setAttribute("aria-valuetext", `turn ${at + 1} of ${turns.length}`);
    place.textContent = `${at + 1} / ${turns.length}`;
    clearTimeout(naming);
    naming = setTimeout(() => history.replaceState(null, "", addressOf(at + 1)), NAMES_AFTER_MS);
    if (!quietly) announce(turnInWords(turns[at]));
    const ahead = screen && turns[at + 1]?.image;
    if (ahead) new Image().src = `/images/${ahead}`;
  };
  /* What was never on the screen has a guessed height, known only once it is drawn: the turn is held in its place for a
     while, unless somebody else moves the page. */
  const scrollTo = (index, forMs = SETTLES_MS) => {
    settlesUntil = performance.now() + forMs;
    const align = () => {
      if (index !== at || performance.now() > settlesUntil) return;
      const off = steps[index].getBoundingClientRect().top - covered();
      if (Math.abs(off) > 1) window.scrollBy({ top: off, behavior: "instant" });
      requestAnimationFrame(align);
    };
    align();
  };
  const moved = () => (settlesUntil = 0);
  const halt = () => {
    clearInterval(timer);
    timer = null;
    play.textContent = "Play";
    play.setAttribute("aria-pressed", "false");
  };
  const toggle = () => {
    if (timer !== null) return halt();
    if (at === turns.length - 1) choose(0);
    play.textContent = "Pause";
    play.setAttribute("aria-pressed", "true");
    timer = setInterval(() => (at === turns.length - 1 ? halt() : choose(at + 1, { quietly: true })), Number(speed.value));
    return undefined;
  };
  const stepTo = (index) => {
    halt();
    choose(index);
  };

  /* While somebody scrolls, the current turn is the one at the reading line. */
  let waiting = false;
  const follow = () => {
    waiting = false;
    if (timer !== null || performance.now() < settlesUntil + SETTLES_MS / 4) return;
    choose(atReadingLine(steps), { scroll: false, quietly: true });
  };
  const scrolled = () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(follow);
  };
  const keys = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea, dialog")) return;
    if (event.key === " " && event.target.closest("button, a, summary")) return;
    if (["PageDown", "PageUp", "ArrowDown", "ArrowUp", "Tab"].includes(event.key)) moved();
    const deed = { ArrowRight: () => stepTo(at + 1), ArrowLeft: () => stepTo(at - 1), Home: () => stepTo(0), End: () => stepTo(turns.length - 1), " ": toggle }[event.key];
    if (!deed) return;
    event.preventDefault();
    deed();
  };
  play.addEventListener("click", toggle);
  slider.addEventListener("input", () => stepTo(Number(slider.value) - 1));
  speed.addEventListener("change", () => timer !== null && (halt(), toggle()));
  document.addEventListener("keydown", keys);
  window.addEventListener("scroll", scrolled, { passive: true });
  MOVES.forEach((name) => window.addEventListener(name, moved, { passive: true }));
  stage.atEnd(() => {
    halt();
    moved();
    clearTimeout(naming);
    document.removeEventListener("keydown", keys);
    window.removeEventListener("scroll", scrolled);
    MOVES.forEach((name) => window.removeEventListener(name, moved));
  });

  const button = (shape, label, to) => h("button", { type: "button", "aria-label": label, title: label, onclick: () => stepTo(to()) }, icon(shape));
  const controls = h(
    "div",
    { class: "row controls", role: "group", "aria-label": "Player" },
    button("M5 4h3v16H5zM20 4v16L9 12z", "First turn", () => 0),
    button("M18 4v16L6 12z", "Previous turn", () => at - 1),
    play,
    button("M6 4v16l12-8z", "Next turn", () => at + 1),
    slider,
    place,
    speed,
  );
  return {
    controls,
    choose: stepTo,
    current: () => at,
    /** Makes a turn the current one without moving the page; again after the steps were drawn again. */
    start(number, { scroll = false } = {}) {
      at = -1;
      choose(number - 1, { scroll, quietly: true, settlesMs: FIRST_SETTLES_MS });
    },
  };
}

/** The turn that the reading line crosses; at the end of the page, the last. */
function atReadingLine(steps) {
  const root = document.documentElement;
  const line = covered() + window.innerHeight * READING_LINE;
  let [low, high] = [0, steps.length - 1];
  while (low < high) {
    const middle = Math.ceil((low + high) / 2);
    if (steps[middle].getBoundingClientRect().top <= line) low = middle;
    else high = middle - 1;
  }
  const last = steps.at(-1).getBoundingClientRect();
  return window.scrollY + window.innerHeight >= root.scrollHeight - 2 && last.top < window.innerHeight ? steps.length - 1 : low;
}
