// The shell: which view the address names, the connection, the theme, signing in and out.

import { ApiError, Poll, ask, send } from "./api.js";
import { announce, h } from "./dom.js";
import { compareJobsView, compareMembersView } from "./view_compare.js";
import { groupView } from "./view_group.js";
import { groupsView } from "./view_groups.js";
import { jobView } from "./view_job.js";
import { overviewView } from "./view_overview.js";
import { searchView } from "./view_search.js";
import { settingsView } from "./view_settings.js";
import { signInView } from "./view_sign_in.js";
import { trajectoriesView } from "./view_trajectories.js";
import { trajectoryView } from "./view_trajectory.js";

const ROUTES = [
  [/^$/, overviewView],
  [/^jobs\/([^/]+)$/, jobView],
  [/^jobs\/([^/]+)\/groups$/, groupsView],
  [/^jobs\/([^/]+)\/groups\/(\d+)$/, groupView],
  [/^jobs\/([^/]+)\/groups\/(\d+)\/compare$/, compareMembersView],
  [/^jobs\/([^/]+)\/compare$/, compareJobsView],
  [/^jobs\/([^/]+)\/trajectories$/, trajectoriesView],
  [/^jobs\/([^/]+)\/trajectories\/([^/]+)$/, trajectoryView],
  [/^jobs\/([^/]+)\/search$/, searchView],
  [/^jobs\/([^/]+)\/settings$/, settingsView],
  [/^search$/, searchView],
];

const main = document.getElementById("main");
const connection = document.getElementById("connection");
let current = null;

/** What a view may use of the shell; everything it starts here ends with it. */
class Stage {
  constructor(query) {
    this.query = query;
    this.polls = [];
    this.endings = [];
  }

  poll(pathOf, every, onData, onMissing) {
    const poll = new Poll(pathOf, {
      every,
      onAnswer: () => connected(true),
      onError: (error) => this.failed(error, onMissing),
      onData: (body) => {
        onData(body);
        this.arrived();
      },
    });
    this.polls.push(poll);
    return poll;
  }

  failed(error, onMissing) {
    if (error instanceof ApiError && error.status === 401) return showSignIn();
    if (error instanceof ApiError && error.status < 500) {
      connected(true);
      (onMissing ?? showError)(error);
      return undefined;
    }
    return connected(false, error);
  }

  arrived() {
    document.getElementById("sign-out").hidden = !needsToken;
  }

  atEnd(ending) {
    this.endings.push(ending);
  }

  end() {
    this.polls.forEach((poll) => poll.stop());
    this.endings.forEach((ending) => ending());
  }
}

let needsToken = false;

/** Asked once: does the server ask for a token at all? */
async function learnNeedsToken() {
  try {
    needsToken = (await ask("/overview?limit=1")).body.needs_token;
    document.getElementById("sign-out").hidden = !needsToken;
  } catch {
    // Not signed in yet, or the server is away: the view says so.
  }
}

function connected(well, error) {
  const text = well ? "" : error instanceof ApiError ? error.message : "The server does not answer; retrying …";
  if (connection.textContent !== text) connection.textContent = text;
  connection.classList.toggle("lost", !well);
}

function showError(error) {
  current?.end();
  main.replaceChildren(
    h("div", { class: "callout stopped", role: "alert" }, h("strong", null, "This cannot be shown. "), error.message),
    h("p", null, h("a", { href: "#/" }, "To the jobs")),
  );
}

function showSignIn() {
  current?.end();
  needsToken = true;
  document.getElementById("sign-out").hidden = true;
  place(signInView(route), "Sign in");
}

function place(element, title) {
  main.replaceChildren(element);
  document.title = title ? `${title} · Rollout Buffer` : "Rollout Buffer";
}

function parse() {
  const [address, query] = location.hash.replace(/^#\/?/, "").split("?");
  for (const [pattern, view] of ROUTES) {
    const match = pattern.exec(address);
    if (match) return { view, ids: match.slice(1).map(decode), query: new URLSearchParams(query ?? "") };
  }
  return null;
}

function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function route(event) {
  current?.end();
  const found = parse();
  if (found === null) {
    showError(new Error("There is no such page."));
    return;
  }
  current = new Stage(found.query);
  const { title, element } = found.view(current, ...found.ids);
  place(element, title);
  if (event) {
    main.focus({ preventScroll: true });
    window.scrollTo(0, 0);
    announce(title || "Jobs");
  }
}

// --- the theme -------------------------------------------------------------------------------------------------------

const themeButton = document.getElementById("theme");
const systemDark = matchMedia("(prefers-color-scheme: dark)");

function isDark() {
  return (document.documentElement.dataset.theme ?? (systemDark.matches ? "dark" : "light")) === "dark";
}

function nameTheme() {
  themeButton.textContent = isDark() ? "Light" : "Dark";
  themeButton.setAttribute("aria-label", isDark() ? "Use the light theme" : "Use the dark theme");
  window.dispatchEvent(new Event("themechange"));
}

themeButton.addEventListener("click", () => {
  const theme = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem("rollout-buffer-theme", theme);
  } catch {
    // It holds until the page is left.
  }
  nameTheme();
});
systemDark.addEventListener("change", nameTheme);

document.getElementById("sign-out").addEventListener("click", async () => {
  await send("/sign_out");
  showSignIn();
});
document.querySelector("[data-skip]").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
  main.scrollIntoView();
});
window.addEventListener("hashchange", route);
nameTheme();
route();
learnNeedsToken();
