// An episode from its messages: what the agent saw, thought, did and got, turn by turn. Pure: data in, data out.
//
// It knows the phone's tool (mobile_use, a screen of 999 by 999) and the steps_log of Android World; everything else is
// shown as the messages have it: tool calls of the OpenAI form, tags in the text, plain conversations.

const GRID = 999;

/** Returns the turns, and the messages that stand before the first of them. */
export function readEpisode(trajectory) {
  const log = new Map((trajectory.extra_info?.steps_log ?? []).filter(isObject).map((entry) => [entry.turn, entry]));
  const deletions = deletionsOf(trajectory.extra_info ?? {});
  const prelude = [];
  const turns = [];
  let seen = [];
  let image = null;
  for (const message of trajectory.messages ?? []) {
    if (message.role === "system" || message.role === "developer") prelude.push(message);
    else if (message.role === "assistant") {
      const images = imagesOf(seen);
      image = images.at(-1) ?? image;
      turns.push(readTurn(turns.length + 1, seen, images, image, message, log.get(turns.length + 1), trajectory.extra_info ?? {}));
      seen = [];
    } else seen.push(message);
  }
  const earned = Array.isArray(trajectory.turn_rewards) ? [...trajectory.turn_rewards] : [];
  const timings = trajectory.turn_timings ?? [];
  turns.forEach((turn, at) => {
    turn.reward = turn.trained ? (earned.shift() ?? null) : null;
    turn.timing = timings.length === turns.length ? timings[at] : null;
    turn.result = at + 1 < turns.length ? turns[at + 1].seen : seen;
    turn.deletes = deletions.filter((one) => one.turn === turn.number).flatMap((one) => one.ids);
    turn.deletedIn = (message) => deletions.find((one) => one.ids.includes(message.msg_id))?.turn ?? null;
  });
  return { prelude, turns, rest: turns.length ? [] : seen };
}

/** Where two episodes differ first: the turn, from 1, what they saw or replied there, and how far both texts agree; null where nowhere. */
export function firstDifference(one, other) {
  const turns = Math.max(one.turns.length, other.turns.length);
  for (let at = 0; at < turns; at += 1) {
    for (const [where, read] of [["seen", seenText], ["reply", replyText]]) {
      const texts = [one, other].map((episode) => (episode.turns[at] ? read(episode.turns[at]) : null));
      if (texts[0] !== texts[1]) return { turn: at + 1, where, texts, at: commonLength(...texts) };
    }
  }
  return null;
}

const seenText = (turn) => turn.seen.map((message) => [message.role, textOf(message), ...imagesOf([message])].join("\n")).join("\n");

/** A reply as it was sampled; the ids of its tool calls are drawn anew each time and say nothing. */
function replyText({ message, text }) {
  const calls = Array.isArray(message.tool_calls) ? message.tool_calls.map((call) => JSON.stringify(call?.function ?? call)) : [];
  return [message.reasoning_content, text, ...calls].filter(Boolean).join("\n");
}

function commonLength(one, other) {
  let at = 0;
  while (one !== null && other !== null && at < one.length && at < other.length && one[at] === other[at]) at += 1;
  return at;
}

/** What an agent took out of its own context: in which turn, from 1, and the ids of the messages. */
export function deletionsOf(about) {
  const marks = Array.isArray(about.deletions) ? about.deletions.filter(isObject) : [];
  return marks.filter((one) => Number.isInteger(one.turn) && Array.isArray(one.deleted_msg_ids)).map((one) => ({ turn: one.turn + 1, ids: one.deleted_msg_ids }));
}

function readTurn(number, seen, images, image, message, logged, about) {
  const text = textOf(message);
  const { thinking, conclusion, calls, rest, broken } = readReply(text, message);
  const action = actionOf(calls, logged, about);
  return {
    number,
    seen,
    images,
    image,
    message,
    text,
    thinking,
    conclusion,
    calls,
    rest,
    action,
    trained: message.step_loss_mask !== 0,
    malformed: logged?.malformed ?? (broken ? "its tool call is no valid JSON" : ""),
    note: logged?.note ?? "",
    thinkingTokens: logged?.thinking_tokens ?? null,
  };
}

/** The text of a message, whatever form its content has. */
export function textOf(message) {
  if (typeof message.content === "string") return message.content;
  if (!Array.isArray(message.content)) return "";
  return message.content.map((part) => (typeof part === "string" ? part : typeof part?.text === "string" ? part.text : part?.type === "image_url" || part?.type === "image" ? "‹screenshot›" : "")).join("");
}

/** What was asked: the first text of a user; null when there is none. */
export function firstQuestion(trajectory) {
  const asked = (trajectory.messages ?? []).find((message) => message.role === "user");
  return (asked && textOf(asked).replaceAll("‹screenshot›", "").trim()) || null;
}

/** What was answered: as the generator noted it, else the last reply; null when there is none. */
export const answerOf = (trajectory) => asText(trajectory.extra_info?.answer) ?? lastAnswer(trajectory);

/** A text, a number or a list of them as one text; null for anything else, and for nothing. */
export function asText(value) {
  if (typeof value === "string") return value.trim() ? value : null;
  if (typeof value === "number") return String(value);
  const isPlain = Array.isArray(value) && value.length > 0 && value.every((one) => typeof one === "string" || typeof one === "number");
  return isPlain ? value.join(", ") : null;
}

/** The last reply without what it thought and called; null when nothing is left. */
function lastAnswer(trajectory) {
  const said = (trajectory.messages ?? []).findLast((message) => message.role === "assistant");
  if (!said) return null;
  const { rest, conclusion } = readReply(textOf(said), said);
  return rest || conclusion || null;
}

function imagesOf(messages) {
  return messages.flatMap((message) => (Array.isArray(message.content) ? message.content : [])).map(hashOf).filter(Boolean);
}

function hashOf(part) {
  const url = part?.image_url?.url;
  const match = typeof url === "string" ? /^sha256:([0-9a-f]{64})$/.exec(url) : null;
  return match && match[1];
}

function readReply(text, message) {
  const calls = [];
  let broken = false;
  let rest = text;
  const take = (tag, most = 1) => {
    const found = insideOf(rest, tag, most);
    rest = found.outside;
    return found.inside;
  };
  let thinking = take("thinking")[0] || take("think")[0] || "";
  if (!thinking && rest.includes("</think>")) [thinking, rest] = splitOnce(rest, "</think>");
  const conclusion = take("conclusion")[0] ?? "";
  for (const found of take("tool_call", Infinity).filter(Boolean)) {
    const call = parsed(found);
    if (isObject(call)) calls.push({ name: String(call.name ?? "?"), arguments: parsed(call.arguments) ?? {}, id: null });
    else {
      broken = true;
      calls.push({ name: "?", arguments: found, id: null });
    }
  }
  for (const call of Array.isArray(message.tool_calls) ? message.tool_calls : []) {
    calls.push({ name: String(call?.function?.name ?? "?"), arguments: parsed(call?.function?.arguments) ?? call?.function?.arguments ?? {}, id: call?.id ?? null });
  }
  if (typeof message.reasoning_content === "string" && !thinking) thinking = message.reasoning_content;
  return { thinking, conclusion, calls, rest: rest.trim(), broken };
}

/** What stands inside the first tags of a name, and the text without them; one pass over it. */
function insideOf(text, tag, most) {
  const [opening, closing] = [`<${tag}>`, `</${tag}>`];
  const inside = [];
  const outside = [];
  let at = 0;
  while (inside.length < most) {
    const start = text.indexOf(opening, at);
    const end = start < 0 ? -1 : text.indexOf(closing, start);
    if (end < 0) break;
    outside.push(text.slice(at, start));
    inside.push(text.slice(start + opening.length, end).trim());
    at = end + closing.length;
  }
  return { inside, outside: outside.join("") + text.slice(at) };
}

function splitOnce(text, mark) {
  const at = text.indexOf(mark);
  return [text.slice(0, at).trim(), text.slice(at + mark.length)];
}

function parsed(value) {
  if (typeof value !== "string") return value;
  try {
    return JSON.parse(value);
  } catch {
    return undefined;
  }
}

/** What was done on the screen, with points as fractions of it; null when nothing can be drawn. */
function actionOf(calls, logged, about) {
  if (logged?.malformed) return null;
  const told = calls.map((call) => call.arguments).find((one) => isObject(one) && typeof one.action === "string");
  const source = logged?.action ? { ...told, ...logged } : told;
  if (!source) return null;
  return {
    kind: source.action,
    from: pointOf(source.coordinate, source.point, about.screen),
    to: pointOf(source.coordinate2, source.end_point, about.screen),
    text: typeof source.text === "string" ? source.text : "",
    button: source.button ?? "",
    seconds: source.duration_s ?? source.time ?? null,
    status: source.status ?? "",
  };
}

function pointOf(coordinate, pixel, screen) {
  if (isPoint(coordinate)) return coordinate.map((value) => clamp(value / GRID));
  if (isPoint(pixel) && isPoint(screen)) return pixel.map((value, at) => clamp(value / Math.max(1, screen[at] - 1)));
  return null;
}

const isPoint = (value) => Array.isArray(value) && value.length === 2 && value.every(Number.isFinite);
const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
const clamp = (value) => Math.min(1, Math.max(0, value));

/** An action as a sentence's end: taps (500, 300), types “milk”. */
export function actionInWords(action) {
  if (!action) return "";
  const at = (point) => (point ? `(${point.map((value) => Math.round(value * GRID)).join(", ")})` : "somewhere");
  const words = {
    click: () => `taps ${at(action.from)}`,
    long_press: () => `holds ${at(action.from)}${action.seconds ? ` for ${action.seconds} s` : ""}`,
    swipe: () => `swipes ${at(action.from)} → ${at(action.to)}`,
    type: () => `types “${action.text}”`,
    answer: () => `answers “${action.text}”`,
    open: () => `opens ${action.text}`,
    system_button: () => `presses ${action.button}`,
    wait: () => `waits${action.seconds ? ` ${action.seconds} s` : ""}`,
    terminate: () => `ends the task: ${action.status || "no status"}`,
  }[action.kind];
  return words ? words() : String(action.kind);
}
