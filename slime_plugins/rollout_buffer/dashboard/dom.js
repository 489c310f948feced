// Elements from data. Text only ever becomes text: nothing here, and nothing elsewhere, parses markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.setAttribute("class", value);
    else if (name === "style") for (const [key, entry] of Object.entries(value)) element.style.setProperty(key, entry);
    else if (name === "value" && "value" in element) element.value = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Builds an HTML element: h("a", {href: "#/"}, "text", other). */
export function h(tag, properties, ...children) {
  return fill(document.createElement(tag), properties, children);
}

/** Builds an SVG element. */
export function svg(tag, properties, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

/** Puts new children in place of the old ones, unless they would look the same; keeps the focus where it can. */
export function show(container, ...children) {
  const fresh = h("div", null, ...children);
  if (fresh.isEqualNode(h("div", null, ...[...container.childNodes].map((child) => child.cloneNode(true))))) return;
  const focused = container.contains(document.activeElement) ? pathTo(container, document.activeElement) : null;
  container.replaceChildren(...fresh.childNodes);
  if (focused) follow(container, focused)?.focus({ preventScroll: true });
}

function pathTo(container, element) {
  const path = [];
  for (let at = element; at !== container; at = at.parentNode) path.unshift([...at.parentNode.childNodes].indexOf(at));
  return path;
}

function follow(container, path) {
  return path.reduce((at, index) => at?.childNodes[index], container);
}

/** A box that scrolls when it must, also with the keyboard. */
export function scrolling(...children) {
  return h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Table" }, ...children);
}

/** Keeps one element per item, in the items' order: what is there already is updated, never replaced. */
export class KeyedList {
  constructor(container, keyOf, create) {
    this.container = container;
    this.keyOf = keyOf;
    this.create = create;
    this.entries = new Map();
  }

  show(items) {
    const wanted = new Map();
    for (const item of items) {
      const key = String(this.keyOf(item));
      const entry = this.entries.get(key) ?? this.create(item);
      entry.update(item);
      wanted.set(key, entry);
    }
    for (const [key, entry] of this.entries) if (!wanted.has(key)) entry.element.remove();
    let place = this.container.firstChild;
    for (const entry of wanted.values()) {
      if (entry.element === place) place = place.nextSibling;
      else this.container.insertBefore(entry.element, place);
    }
    this.entries = wanted;
  }
}

/** Says something to who cannot see it. */
export function announce(text) {
  document.getElementById("announcer").textContent = text;
}

/** Asks before something that cannot be undone; resolves to whether it was confirmed. */
export function confirmed(title, text, verb, { danger = false } = {}) {
  return new Promise((resolve) => {
    const dialog = h(
      "dialog",
      { "aria-labelledby": "ask-title" },
      h("h2", { id: "ask-title" }, title),
      h("p", null, text),
      h(
        "form",
        { method: "dialog", class: "row end" },
        h("button", { value: "no", autofocus: true }, "Keep it as it is"),
        h("button", { value: "yes", class: danger ? "danger" : "primary" }, verb),
      ),
    );
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue === "yes");
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}
