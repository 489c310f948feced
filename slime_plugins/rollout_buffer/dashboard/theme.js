// Runs before the first paint: the theme that was chosen here before, else the system's.
(() => {
  let chosen = null;
  try {
    chosen = localStorage.getItem("rollout-buffer-theme");
  } catch {
    // Storage is switched off: the system's theme holds.
  }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
