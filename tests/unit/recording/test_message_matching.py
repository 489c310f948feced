"""What clients do to the history that they send back, and which rule takes it for the recorded one."""

from __future__ import annotations

import copy
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.utils.mask_utils import Generation
from slime_plugins.rollout_buffer.recording import turns as recorded_turns
from slime_plugins.rollout_buffer.recording.message_matching import (
    Fingerprint,
    Thinking,
    fingerprint,
    is_same,
    matching_of,
)
from slime_plugins.rollout_buffer.recording.messages import (
    begun_arguments,
    call_id,
    digest,
    read_conversation,
    reply_name,
)
from slime_plugins.rollout_buffer.recording.turns import Match, Recording, Turn
from slime_plugins.rollout_buffer.types import Message, MessageMatching
from tests.example_counts import examples
from tests.reply_streams import gateway_message

STRICT, LOOSE, ROLES = MessageMatching
History = list[dict[str, Any]]
KEY = digest([])
REPLY = reply_name()


def call(at: int, /, **arguments: Any) -> dict[str, Any]:
    return {"id": call_id(REPLY, at), "type": "function", "function": {"name": "edit", "arguments": arguments}}


def assistant(content: str = "", **parts: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **parts}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def result(at: int, content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id(REPLY, at), "content": content}


REMINDER = "\n<system-reminder>\nToday is Friday.\n</system-reminder>\n"
PICTURE = {"type": "image_url", "image_url": {"url": "sha256:" + "a" * 64}}
HISTORY: History = [
    {"role": "system", "content": "You help."},
    user(f"{REMINDER}\nMend add."),
    assistant("I mend.", reasoning_content="A minus.", tool_calls=[call(0, old="a ", at=1.0), call(1, old="b")]),
    result(0, "mended a"),
    result(1, [{"type": "text", "text": "mended b"}, PICTURE]),
    assistant("Both mended.\n", reasoning_content="Done."),
    user("Check."),
    assistant("", reasoning_content="Shall I?"),
    user("Well?"),
    assistant("It adds."),
]
"""What four turns were asked and answered; the third has thoughts alone."""


def record(messages: History, rule: MessageMatching) -> Recording:
    """A recording of the replies in a conversation."""
    recording, number = Recording(rule), 0
    read = read_conversation(messages)
    for at, message in enumerate(read.messages):
        if message["role"] != "assistant":
            continue
        sent = recording.fingerprints(read.messages[:at], read.digests[:at])
        match, number = recording.find(KEY, sent), number + 1
        recording.add(turn(number, match.turn, sent[match.consumed :], message))
    return recording


def turn(number: int, parent: Turn | None, context: tuple[Fingerprint, ...], message: Message) -> Turn:
    return Turn(
        parent=parent,
        number=number,
        request=bytes([number]),
        key=KEY,
        context=context,
        context_ids=array("i", [number]),
        images=(),
        sampled=Generation([], array("i", [9]), array("d", [0.0])),
        message=message,
        created=0.0,
        from_start=parent is None,
        is_closed=True,
    )


def matched(rule: MessageMatching, messages: History) -> Match:
    """The part of a conversation that matches the recorded ``HISTORY``; a new message follows the conversation."""
    read = read_conversation([*messages, user("And now?")])
    recording = record(HISTORY, rule)
    assert recording.branches() == 1
    return recording.find(KEY, recording.fingerprints(read.messages, read.digests))


def changed(at: int, **parts: Any) -> Callable[[History], object]:
    return lambda history: history[at].update(parts)


def swap_results(history: History) -> None:
    history[3], history[4] = history[4], history[3]


def merge_results(history: History) -> None:
    history[4]["content"] = [{"type": "text", "text": "mended a\nmended b"}, PICTURE]
    del history[3]


def give_new_ids(history: History) -> None:
    for at, one in enumerate([*history[2]["tool_calls"], history[3], history[4]]):
        one["id" if "function" in one else "tool_call_id"] = f"toolu_{at % 2}"


def separate_calls(history: History) -> None:
    first, second = history[2]["tool_calls"]
    history[2]["tool_calls"] = [first]
    history.insert(4, assistant(tool_calls=[second]))


def drop_thoughts(history: History) -> None:
    for one in history:
        one.pop("reasoning_content", None)


def summarise(history: History) -> None:
    history[1:] = [user("Summary: add was mended.")]


def roll_back(history: History) -> None:
    del history[-1]


def normalised_calls(history: History) -> None:
    history[2]["tool_calls"] = [call(0, old="a", at="1", all=False), call(1, old="b")]


def renamed_calls(history: History) -> None:
    give_new_ids(history)
    for one in history[2]["tool_calls"]:
        one["function"]["arguments"] = {"at": None, **one["function"]["arguments"]} | {"old": "b "}


FOUR = {STRICT: 4, LOOSE: 4, ROLES: 4}
REWRITES: list[tuple[str, Callable[[History], object], dict[MessageMatching, int], set[str], Any]] = [
    # what the client did; how many turns each rule takes for recorded; what the loosest rule tolerates in all four;
    # the first difference for the rules that take fewer: message, role, parts
    ("nothing", lambda history: None, FOUR, set(), None),
    ("thoughts are left out", drop_thoughts, FOUR, {"reasoning"}, None),
    ("white space around a reply", changed(5, content="Both mended."), FOUR, {"form"}, None),
    ("1.0 is written 1", lambda h: h[2]["tool_calls"][0].update(call(0, old="a ", at=1)), FOUR, {"form"}, None),
    ("calls of one reply in two messages", separate_calls, FOUR, set(), None),
    ("defaults and other forms of arguments", normalised_calls, {STRICT: 0, LOOSE: 4, ROLES: 4}, {"tool_calls"},
     (2, "assistant", ("tool_calls",))),
    ("ids of its own", give_new_ids, {STRICT: 0, LOOSE: 4, ROLES: 4}, {"ids"}, (2, "assistant", ("ids",))),
    ("results in another order", swap_results, {STRICT: 1, LOOSE: 4, ROLES: 4}, {"order"},
     (3, "tool", ("ids", "images", "text"))),
    ("an empty reply is left out", lambda h: h.pop(7), {STRICT: 2, LOOSE: 4, ROLES: 4}, {"empty_reply"},
     (7, "user", ("reasoning", "role", "text"))),
    ("ids and arguments of its own", renamed_calls, {STRICT: 0, LOOSE: 0, ROLES: 4}, {"ids", "tool_calls"},
     (2, "assistant", ("ids", "tool_calls"))),
    ("results in one message", merge_results, {STRICT: 1, LOOSE: 1, ROLES: 4}, {"order"},
     (3, "tool", ("ids", "images", "text"))),
    ("another reminder", changed(1, content="Mend add."), {STRICT: 0, LOOSE: 0, ROLES: 4}, {"additions"},
     (1, "user", ("additions",))),
    ("its calls in the text", changed(9, content=f"It adds.</code>\nCalling tools:\n[{call(1)}]".replace('"', "'")),
     {STRICT: 3, LOOSE: 3, ROLES: 4}, {"additions"}, (9, "assistant", ("additions",))),
    ("a reminder in a message of its own", lambda h: h.insert(4, user(REMINDER)), {STRICT: 1, LOOSE: 1, ROLES: 4},
     {"order"}, (4, "user", ("ids", "images", "role", "text"))),
    ("the first reminder of a session", changed(0, content=f"You help. {REMINDER}"), {STRICT: 0, LOOSE: 0, ROLES: 4},
     {"additions"}, (0, "system", ("additions",))),
    ("a reply that it edits", changed(5, content="None."), {STRICT: 1, LOOSE: 1, ROLES: 1}, set(),
     (5, "assistant", ("text",))),
    ("a picture that it leaves out", changed(4, content="mended b"), {STRICT: 1, LOOSE: 1, ROLES: 1}, set(),
     (4, "tool", ("images",))),
    ("a result that it clears", changed(3, content="[cleared]"), {STRICT: 1, LOOSE: 1, ROLES: 1}, set(),
     (3, "tool", ("text",))),
    ("the last reply is rolled back", roll_back, {STRICT: 3, LOOSE: 3, ROLES: 3}, set(), (9, "user", ("role", "text"))),
    ("compaction", summarise, {STRICT: 0, LOOSE: 0, ROLES: 0}, set(), (1, "user", ("text",))),
    ("a sub-agent's prompt", lambda h: h.__setitem__(slice(None), [{"role": "system", "content": "You look."}]),
     {STRICT: 0, LOOSE: 0, ROLES: 0}, set(), (0, "system", ("other_conversation",))),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _by_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns are looked up in the index however few they are."""
    monkeypatch.setattr(recorded_turns, "MAX_COMPARED_TURNS", -1)


def test_a_message_that_is_a_reminder_alone_may_be_left_out_under_roles_and_text() -> None:
    asked = [user("Mend add."), assistant("How?"), user(REMINDER), assistant("So.")]
    read = read_conversation([asked[0], asked[1], asked[3], user("And now?")])
    recording = record(asked, ROLES)
    found = recording.find(KEY, recording.fingerprints(read.messages, read.digests))
    assert found.turn is not None
    assert (found.turn.number, found.consumed, found.tolerated) == (2, 3, frozenset({"order"}))


@pytest.mark.parametrize("rule", MessageMatching)
@pytest.mark.parametrize(("rewrite", "turns", "tolerated", "why_not"), [one[1:] for one in REWRITES],
                         ids=[one[0] for one in REWRITES])  # fmt: skip
def test_a_rewritten_history_goes_on_from_the_recorded_turns_that_the_rule_takes_for_the_same(
    rule: MessageMatching, rewrite: Callable[[History], object], turns: Any, tolerated: set[str], why_not: Any
) -> None:
    history = copy.deepcopy(HISTORY)
    rewrite(history)
    match = matched(rule, history)
    assert (match.turn.number if match.turn else 0) == turns[rule]
    if turns[rule] == 4:
        assert match.difference is None
    else:
        assert match.difference is not None
        assert (match.difference.message, match.difference.role, match.difference.differs) == why_not
    if rule is ROLES and turns[rule] == 4:
        assert match.tolerated == tolerated


@pytest.mark.parametrize(
    ("sampled", "sent", "rules"),
    [
        ({"at": 1.0}, {"at": 1}, {STRICT, LOOSE, ROLES}),
        ({"at": [{"x": -2.0}]}, {"at": [{"x": -2}]}, {STRICT, LOOSE, ROLES}),
        ({"at": 1}, {"at": True}, {ROLES}),
        ({"at": 1.5}, {"at": 1}, {ROLES}),
        ({"at": 1.0}, {"at": "1"}, {LOOSE, ROLES}),
        ({"at": " 1\n"}, {"at": "1", "on": None}, {LOOSE, ROLES}),
        ({"at": "a  b"}, {"at": "a b"}, {ROLES}),
    ],
)
def test_arguments_of_calls_with_other_ids_are_compared_by_rule(sampled: Any, sent: Any, rules: Any) -> None:
    one, other = (
        fingerprint(message, digest(message))
        for message in (assistant(tool_calls=[{"function": {"name": "x", "arguments": a}}]) for a in (sampled, sent))
    )
    assert {rule for rule in MessageMatching if is_same(rule, one, other)} == rules


def test_thoughts_in_the_text_of_a_reply_may_be_left_out_under_any_rule() -> None:
    replies = [assistant(content=text) for text in ("<think>\nHm.\n</think>\n\nYes.", "Yes.", "Hm.</think>Yes.", "No.")]
    whole, *others = (fingerprint(reply, digest(reply)) for reply in replies)
    assert [[is_same(rule, whole, one) for one in others] for rule in MessageMatching] == [[True, True, False]] * 3
    assert whole.differences(others[0]) == {"reasoning"}


SAID = st.text("ab<`", max_size=3) | st.sampled_from(["</think>", "`</think>`", " <", "Yes.\n"])
PLACES = st.integers(0, 99)


@examples(300)
@given(st.lists(SAID, min_size=1, max_size=4), SAID, st.sampled_from(Thinking), st.booleans(), PLACES, PLACES)
def test_only_what_a_reply_thought_may_be_left_out(
    said: list[str], thought: str, thinking: Thinking, thinks: bool, place: int, at: int
) -> None:
    """Whatever marks a reply quotes: no letter of its text or its thoughts may change, but white space at the ends."""
    thought = thought.replace("</think>", "") + "."
    prompt = "<think>" if thinking is Thinking.FROM_START else ""
    place = place % (len(said) + 1) if not prompt else 0

    def reply(said: Sequence[str], thought: str | None) -> Message:
        inside = [] if thought is None else [("" if prompt else "<think>") + thought + "</think>"]
        text = "".join([*said[:place], *inside, *said[place:]])
        return gateway_message(text, prompt, separate_reasoning=thinking is Thinking.APART)

    thinks = thinks or bool(prompt)
    message = reply(said, thought if thinks else None)
    held = fingerprint(message, digest(message), thinking)

    def rules(sent: Message) -> set[MessageMatching]:
        sent = {**sent, "content": f" {sent['content']}\n"}
        return {rule for rule in MessageMatching if is_same(rule, held, fingerprint(sent, digest(sent)))}

    words = "".join(said)
    assert rules(message) == {*MessageMatching}
    assert rules(assistant(message["content"] if thinking is Thinking.APART else words)) == {*MessageMatching}
    at %= len(words) + 1
    more = {"reasoning_content": thought} if thinks else {}
    for edited in (words[:at] + "X" + words[at:], "X" + words, "X</think>" + words):
        assert rules(assistant(edited)) == rules(assistant(edited, **more)) == set()
    if thinks:
        assert rules(reply(said, thought + "X")) == set()
    said[at % len(said)] += "X"
    assert rules(reply(said, thought if thinks else None)) == set()


def test_of_two_replies_that_count_as_the_same_the_one_that_was_sent_back_exactly_is_continued() -> None:
    asked = [user("Mend add.")]
    replies = [assistant(tool_calls=[{**call(0, old=name), "id": name}]) for name in "ab"]
    recording = record([*asked, replies[0]], ROLES)
    sent = read_conversation(asked)
    recording.add(turn(2, None, recording.fingerprints(sent.messages, sent.digests), replies[1]))
    for number, reply in enumerate(replies, start=1):
        read = read_conversation([*asked, reply, user("And now?")])
        found = recording.find(KEY, recording.fingerprints(read.messages, read.digests)).turn
        assert found is not None
        assert found.number == number


def test_cut_arguments_with_a_number_that_no_answer_can_hold_stay_text() -> None:
    text = '{"n": 18446744073709551616, "b": "x'
    assert begun_arguments(text) == text
    assert begun_arguments('{"n": 1, "b": "x') == {"n": 1}


def test_a_rule_has_the_name_that_users_of_miles_know() -> None:
    assert matching_of({}) is LOOSE
    assert matching_of({"message_matching": "role_content_only"}) is ROLES
