// Asking the server. Replies carry an ETag where they can: what has not changed is not sent again.

export class ApiError extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

async function read(reply) {
  const text = await reply.text();
  let body = null;
  try {
    body = JSON.parse(text);
  } catch {
    // An answer that is no JSON comes from something in between.
  }
  if (reply.ok && body !== null) return { text, body };
  const error = body?.error ?? {};
  throw new ApiError(reply.status, error.code ?? "unreadable", error.message ?? `the server answered ${reply.status}`);
}

export async function ask(path, signal) {
  return read(await fetch(path, { cache: "no-cache", credentials: "same-origin", signal }));
}

export async function send(path, body = {}) {
  const reply = await fetch(path, {
    method: "POST",
    credentials: "same-origin",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
  });
  return (await read(reply)).body;
}

/** Spells a path; ids may hold slashes, question marks and anything else that prints. */
export function path(parts, query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const spelled = `/${parts.map(encodeURIComponent).join("/")}`;
  return given.length ? `${spelled}?${new URLSearchParams(given)}` : spelled;
}

/**
 * Asks again and again, tells of every reply that differs from the one before, and of every failure.
 * Nothing is asked while nobody looks; a server that is away is asked less and less often.
 */
export class Poll {
  constructor(pathOf, { every = 3000, onData, onError, onAnswer }) {
    Object.assign(this, { pathOf, every, onData, onError, onAnswer, failures: 0, last: null, timer: null });
    this.aborter = new AbortController();
    this.wake = () => !document.hidden && this.now();
    document.addEventListener("visibilitychange", this.wake);
    this.run();
  }

  now() {
    clearTimeout(this.timer);
    this.run();
  }

  async run() {
    if (this.running || this.stopped) return;
    this.running = true;
    try {
      const { text, body } = await ask(typeof this.pathOf === "function" ? this.pathOf() : this.pathOf, this.aborter.signal);
      this.failures = 0;
      this.onAnswer?.();
      if (!this.stopped && text !== this.last) {
        this.last = text;
        this.onData(body);
      }
    } catch (error) {
      if (this.stopped || error.name === "AbortError") return;
      this.failures += 1;
      this.onError?.(error);
    } finally {
      this.running = false;
      if (!this.stopped && !document.hidden) {
        clearTimeout(this.timer);
        this.timer = setTimeout(() => this.run(), this.every * Math.min(8, 1 + this.failures));
      }
    }
  }

  stop() {
    this.stopped = true;
    this.aborter.abort();
    clearTimeout(this.timer);
    document.removeEventListener("visibilitychange", this.wake);
  }
}
