"""What the crash test with agents finds in a run's notes: what became of each turn that was answered.

A turn is answered once its agent has received the event that ends its reply (``agents_proxy``). Each must be in the
database and trained, once, as it was sampled and told, and never be sampled again; but no turn of a session that was
given up is trained. A turn that was not answered may be trained if the gateway died on it (docs/proxy.md).
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.tokenizer_loading import load_tokenizer
from tests.crash.agents_engine import name_of
from tests.crash.agents_proxy import GATEWAY
from tests.crash.workload import Plan, read_journal

STEP = re.compile(r"Step (\d+), ")
CALL, CALL_END, END_OF_TURN = "\n<tool_call>\n", "\n</tool_call>", "<|im_end|>"
STORED = ("stored", "duplicate")
GIVEN_UP = re.compile("failed|HTTP 410")
"""What is said of a session whose turns are dropped by rule: it was abandoned, or its group or its time was over."""

LAST_S = {"gateway": 2.0, "supervisor": 6.0}
"""By the kind of a kill, seconds until the gateway closes its connections: without its supervisor it stops itself. On a
slow machine that takes longer; it has stopped once the next supervisor is healthy."""
NOTED_S = 2.0
"""A kill is noted at most so much later."""

Event = Mapping[str, Any]
Turns = Sequence[Sequence[int]]
"""The sampled ids of the turns of a session."""


class Comparison:
    """The notes of engine, proxy and players against what is in the database and what was trained."""

    def __init__(self, plan: Plan, stored: Mapping[str, Turns], trained: Sequence[tuple[str, Turns]]) -> None:
        """``trained`` has a session for each acknowledged delivery of it."""
        players = [event for path in plan.path().glob("agents-*.jsonl") for event in read_journal(path)]
        self.sessions: list[Event] = [event for event in players if "session" in event]
        self.stored, self.trained = stored, dict(trained)
        self._deliveries = Counter(uid for uid, _ in trained)
        self._replies: dict[str, list[Event]] = defaultdict(list)
        for reply in read_journal(plan.path("proxy.jsonl")):
            self._replies[reply["session"]].append(reply)
        self._deaths = list(_deaths(read_journal(plan.path("kills.jsonl"))))
        self._decode = load_tokenizer(str(DEMO_TOKENIZER_PATH), download=False).decode
        self._sampled: dict[str, Sequence[int]] = {}
        self._asked: dict[tuple[str, int], list[float]] = defaultdict(list)
        """When the engine was asked for a step of a session."""
        for event in read_journal(plan.path("engine.jsonl")):
            if "ids" in event:
                self._sampled[name_of(self._decode(event["ids"]))] = event["ids"]
            else:
                self._asked[event["session"], event["asked"]].append(event["at"])

    def answered(self, uid: str) -> dict[str, Event]:
        """Returns by name the replies that a session's agent has received to their end."""
        return {name_of(reply["text"]): reply for reply in self._replies[uid] if reply["answered"]}

    def again(self, session: Event) -> list[str]:
        """Returns the names of a session's answered turns for whose step the engine was asked afterwards."""
        uid = session["session"]
        return [
            name for name, reply in self.answered(uid).items() if any(at > reply["at"] for at in self._asks(uid, reply))
        ]

    def _asks(self, uid: str, reply: Event) -> list[float]:
        """Returns when the engine was asked for the step of a reply."""
        return self._asked[uid, _step(reply["text"])]

    def ended_well(self, session: Event) -> bool:
        """Returns whether an agent succeeded, its session is stored, and no answered turn of it was sampled again."""
        return not session["problem"] and session["status"] in STORED and not self.again(session)

    def cause(self, session: Event) -> str:
        """Returns why a session did not end well: what its agent says, after which of its requests."""
        if again := len(self.again(session)):
            return f"{again} answered turns were sampled again"
        unanswered = [reply for reply in self._replies[session["session"]] if not reply["answered"]]
        after = _how(unanswered[-1]) if unanswered else "no request without an answer"
        return f"{(session['problem'] or session['status']).partition(':')[0]}; {after}"

    def allowed(self, uid: str) -> int:
        """Returns how many turns of a session are trained, although they were not answered."""
        return len(set(self._names(self.trained.get(uid, ()))) - self.answered(uid).keys())

    def findings(self) -> Iterator[str]:
        """Returns sentences about what is lost, doubled, or not what was sampled and told."""
        yield from (f"DOUBLED: {uid} was acknowledged {n} times" for uid, n in self._deliveries.items() if n > 1)
        for place, found in (("stored", self.stored), ("trained", self.trained)):
            names = Counter(name for turns in found.values() for name in self._names(turns))
            yield from (f"DOUBLED: {name} is {place} {n} times" for name, n in names.items() if n > 1)
        yield from (f"LOST: {uid} is stored and not trained" for uid in self.stored.keys() - self.trained.keys())
        known = {session["session"] for session in self.sessions}
        yield from (f"{uid} is trained, and no agent closed it" for uid in self.trained.keys() - known)
        for uid in self._replies.keys() - known:
            if self.answered(uid):
                yield f"LOST: {uid} has answered turns, and no agent closed it"
        for reply in (one for replies in self._replies.values() for one in replies if one["cut_by"] == GATEWAY):
            if not any(start < reply["at"] < end for start, end in self._deaths):
                yield f"{reply['session']}: the gateway closed the connection of a turn, and was not killed"
        for session in self.sessions:
            yield from self._about(session["session"], session["status"])

    def _about(self, uid: str, status: str) -> Iterator[str]:
        answered = self.answered(uid)
        for name, reply in answered.items():
            if not any(at < reply["at"] for at in self._asks(uid, reply)):
                yield f"{uid}: {name or reply['text']!r} was answered, and the engine was not asked for its step before"
        if GIVEN_UP.match(status):
            if uid in self.trained or uid in self.stored:
                yield f"{uid} was given up ({status}) and is trained"
        elif uid not in self.trained:
            if status in STORED or answered:
                yield f"LOST: {uid} is not trained: {status}"
        else:
            places = {"stored": self.stored.get(uid, ()), "trained": self.trained[uid]}
            names = {place: self._names(turns) for place, turns in places.items()}
            for name in answered:
                if missing := [place for place, found in names.items() if name not in found]:
                    yield f"LOST: {uid}: {name} was answered and is not {' and not '.join(missing)}"
            yield from self._about_unanswered(uid, set(names["trained"]) - answered.keys())
            for ids in self.trained[uid]:
                yield from self._about_turn(uid, ids)
            if names["stored"] == names["trained"] and places["stored"] != places["trained"]:
                yield f"{uid} is trained with other ids than it is stored with"

    def _about_unanswered(self, uid: str, names: set[str]) -> Iterator[str]:
        """Trained turns that were not answered are those on which the gateway died, with their name told or before."""
        cut = [name_of(reply["text"]) for reply in self._replies[uid] if reply["cut_by"] == GATEWAY]
        untold = names - set(cut)
        if len(untold) > cut.count(""):
            yield f"{uid}: {sorted(untold)} are trained, and were not answered"

    def _about_turn(self, uid: str, ids: Sequence[int]) -> Iterator[str]:
        text = self._decode(ids)
        name = name_of(text)
        if list(ids) != list(self._sampled.get(name, ())):
            yield f"{uid}: {name or text!r} is not trained as it was sampled"
            return
        for told in (one for one in self._replies[uid] if one["answered"] and name_of(one["text"]) == name):
            said, *calls = text.removesuffix(END_OF_TURN).split(CALL)
            called = [json.loads(call.removesuffix(CALL_END)) for call in calls]
            trained = [said, [[call["name"], call["arguments"]] for call in called]]
            heard = [told["text"], [[tool, json.loads(arguments)] for tool, arguments in told["calls"]]]
            if trained != heard:
                yield f"{uid}: {name} is trained as {trained}, and its agent was told {heard}"

    def _names(self, turns: Turns) -> list[str]:
        return [name_of(self._decode(ids)) for ids in turns]


def _deaths(events: Sequence[Event]) -> Iterator[tuple[float, float]]:
    """Returns the times in which a gateway may close its connections."""
    healthy_at = [event["at"] for event in events if "healthy_after_s" in event]
    for kill in (event for event in events if event.get("kind") in LAST_S):
        end = kill["at"] + LAST_S[kill["kind"]]
        if kill["kind"] == "supervisor":
            end = max(end, min((at for at in healthy_at if at > kill["at"]), default=end))
        yield kill["at"] - NOTED_S, end


def _step(text: str) -> int:
    found = STEP.search(text)
    return int(found[1]) if found else -1


def _how(reply: Event) -> str:
    """Returns what an agent got in place of an answer."""
    told = "in the middle of a reply" if reply["text"] else "before its first word"
    if reply["cut_by"]:
        return f"the {reply['cut_by']} closed the connection {told}"
    return f"HTTP {reply['status']} with an error {told}"
