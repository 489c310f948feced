// Runs in every page before the page's own scripts, and is all that this project adds to one: a viewport as wide as a
// task, a clock that begins at the same moment in every episode, and the functions that the device calls.
(() => {
  const BEGINNING = Date.UTC(2016, 11, 1, 12);
  const OUTSIDE = '#query, #reward-display, #click-canvas, #sync-task-cover, script, style';
  const INTERACTIVE = 'button, input, select, textarea, a, option, label, [onclick], [role], [tabindex], ' +
    '[contenteditable], .ui-slider-handle, .ui-draggable';
  const QUIET_MS = 3000;
  const QUIET_FRAMES = 3;
  const READABLE = 4;  // points; a menu that is folded up holds its letters at a twentieth of their size
  const WATCHED = {attributes: true, characterData: true, childList: true, subtree: true};
  const pictures = new WeakMap();
  let changes = 0;
  let restless = false;

  const SystemDate = Date;
  let since = SystemDate.now();
  const now = () => BEGINNING + SystemDate.now() - since;
  window.Date = new Proxy(SystemDate, {
    construct: (target, given, made) => Reflect.construct(target, given.length ? given : [now()], made),
    apply: () => new SystemDate(now()).toString(),
    get: (target, name) => name === 'now' ? now : Reflect.get(target, name),
  });

  document.addEventListener('DOMContentLoaded', () => {
    const viewport = document.createElement('meta');
    viewport.name = 'viewport';
    viewport.content = 'width=device-width, initial-scale=1, maximum-scale=1, user-scalable=no';
    // A caret that blinks, and the shade that fades where a finger was, would make two screenshots of one state differ.
    const style = document.createElement('style');
    style.textContent =
      '* { caret-color: transparent !important; -webkit-tap-highlight-color: transparent !important; }';
    document.head.append(viewport, style);
    new MutationObserver(() => { changes += 1; }).observe(document.documentElement, WATCHED);
  });

  const round = (number) => Math.round(number * 10) / 10;
  const words = (text) => (text || '').replace(/\s+/g, ' ').trim();
  const ownText = (element) =>
    words([...element.childNodes].filter((node) => node instanceof Text).map((node) => node.data).join(' '));

  function start(seed, mode, limitMs) {
    since = SystemDate.now();
    if (typeof core === 'undefined') throw new Error('the page has no core.js');
    core.setDataMode(mode);
    core.EPISODE_MAX_TIME = limitMs;
    Math.seedrandom(seed);
    core.startEpisodeReal();
    window.rolloutEpisode = true;
  }

  const moving = () => (window.jQuery && jQuery.timers && jQuery.timers.length > 0) || document.getAnimations().some(
    (animation) => animation.playState === 'running' && animation.effect.getComputedTiming().endTime !== Infinity);

  // Waits for the pictures that styles show since the last call. Browsers have no event for these: each picture is
  // requested again, which is answered after the browser's own request.
  async function untilPicturesAreThere() {
    const urls = new Set();
    for (const element of document.querySelectorAll('body *')) {
      const {content, backgroundImage} = getComputedStyle(element);
      const named = `${content} ${backgroundImage}`;
      if (pictures.get(element) === named) continue;
      pictures.set(element, named);
      for (const [, url] of named.matchAll(/url\("([^"]+)"\)/g)) urls.add(url);
    }
    const loaded = [...urls].map((src) => Object.assign(new Image(), {src}).decode());
    await Promise.race([Promise.allSettled(loaded), new Promise((done) => setTimeout(done, QUIET_MS))]);
  }

  // Two frames and new pictures, and then until nothing has moved for a few. A page that never stops is waited for once.
  async function untilQuiet() {
    const frame = () => new Promise((done) => requestAnimationFrame(done));
    await frame();
    await frame();
    await untilPicturesAreThere();
    const deadline = performance.now() + QUIET_MS;
    for (let quiet = 1, seen = changes; quiet < QUIET_FRAMES && !restless; ) {
      restless = performance.now() >= deadline;
      await frame();
      quiet = seen === changes && !moving() ? quiet + 1 : 0;
      seen = changes;
    }
  }

  const state = () => ({
    begun: window.rolloutEpisode === true,
    ready: WOB_TASK_READY,
    done: WOB_DONE_GLOBAL,
    reward: WOB_REWARD_GLOBAL,
    raw_reward: WOB_RAW_REWARD_GLOBAL,
  });

  function goal() {
    const said = core.getUtterance();
    return words(typeof said === 'string' ? said : said.utterance);
  }

  const observe = async () => {
    await untilQuiet();
    return {...state(), goal: goal(), elements: elements()};
  };

  const focused = () => document.activeElement !== null && document.activeElement !== document.body;

  // Whether a finger that moves by (dx, dy) from (x, y) would scroll something there.
  function scrolls(x, y, dx, dy) {
    for (let element = document.elementFromPoint(x, y); element; element = element.parentElement) {
      const style = getComputedStyle(element);
      const moves = (overflow) => overflow === 'auto' || overflow === 'scroll';
      const down = moves(style.overflowY) && element.scrollHeight > element.clientHeight + 1;
      const across = moves(style.overflowX) && element.scrollWidth > element.clientWidth + 1;
      if (Math.abs(dy) >= Math.abs(dx) ? down : across) return true;
    }
    return false;
  }

  function visible(element, box) {
    if (element instanceof SVGTextContentElement && box.height < READABLE) return false;
    if (box.width < 1 || box.height < 1 || box.right <= 0 || box.bottom <= 0) return false;
    if (box.left >= innerWidth || box.top >= innerHeight) return false;
    const style = getComputedStyle(element);
    if (style.visibility === 'hidden' || style.display === 'none' || Number(style.opacity) === 0) return false;
    // What has been scrolled out of the box around it cannot be seen either.
    for (let above = element.parentElement; above; above = above.parentElement) {
      if (getComputedStyle(above).overflowY === 'visible') continue;
      const frame = above.getBoundingClientRect();
      const middle = (box.top + box.bottom) / 2;
      if (middle < frame.top || middle > frame.bottom) return false;
    }
    return true;
  }

  function kind(element) {
    const role = element.getAttribute('role');
    const tag = element.tagName.toLowerCase();
    return role || (tag === 'input' ? `${tag} ${element.type}` : tag);
  }

  function described(element) {
    const facts = {};
    const name = element.getAttribute('aria-label') || element.getAttribute('placeholder') ||
      element.getAttribute('alt') || element.getAttribute('title') || '';
    const text = ownText(element) || (element.matches('button, a, label') ? words(element.textContent) : '');
    if (element instanceof HTMLInputElement || element instanceof HTMLTextAreaElement) {
      if (element.type === 'checkbox' || element.type === 'radio') facts.checked = element.checked;
      else facts.value = element.value;
    } else if (element instanceof HTMLSelectElement) {
      facts.options = [...element.options].map((option) => words(option.textContent));
      facts.chosen = [...element.selectedOptions].map((option) => words(option.textContent));
    }
    if (element instanceof SVGElement && element.tagName !== 'text') {
      facts.fill = getComputedStyle(element).fill;
    }
    const classes = typeof element.className === 'string' ? element.className.trim() : '';
    return {kind: kind(element), name, text, facts, classes, id: element.id || ''};
  }

  // Every element that can be seen and says something or can be used, in the order of the page.
  function elements() {
    const found = [];
    for (const element of document.body.querySelectorAll('*')) {
      if (element.closest(OUTSIDE) || element instanceof HTMLOptionElement) continue;
      const shape = element instanceof SVGGeometryElement;
      const swatch = !shape && element.children.length === 0 && element.matches('[style*="background"], [class]');
      if (!element.matches(INTERACTIVE) && !ownText(element) && !shape && !swatch && !element.matches('img')) continue;
      if (element instanceof HTMLLabelElement && !ownText(element)) continue;
      const box = element.getBoundingClientRect();
      if (!visible(element, box)) continue;
      const about = described(element);
      if (swatch && !shape && !about.text) about.facts.colour = getComputedStyle(element).backgroundColor;
      found.push({
        ...about,
        focused: document.activeElement === element,
        disabled: element.disabled === true,
        box: [box.left, box.top, box.right, box.bottom].map(round),
      });
    }
    return found;
  }

  window.rollout = {start, observe, state, scrolls, focused, untilQuiet};
})();
