"""What the crash test with agents finds in a run's notes; each test changes a run in which everything is well."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from tests.crash.agents_comparison import Comparison
from tests.crash.workload import Journal, Plan
from tests.gateway_support import tokenizer

NAMES = ["sample-" + 12 * letter for letter in "abc"]
TEXTS = [f"Step {step}, {name}: ls" for step, name in enumerate(NAMES)]
OTHER = "sample-dddddddddddd"
CALL = '\n<tool_call>\n{"name": "Bash", "arguments": {"command": "ls"}}\n</tool_call>'


def ids_of(text: str) -> list[int]:
    found: list[int] = tokenizer.encode(f"{text}{CALL}<|im_end|>")
    return found


class Run:
    """The notes of one session of three steps, each of which takes a second."""

    def __init__(self, folder: Path) -> None:
        values: dict[str, Any] = dict.fromkeys((field.name for field in fields(Plan)), 0)
        self.plan = Plan(**{**values, "folder": str(folder)})
        self.asked = [{"asked": step, "at": step + 0.1} for step in range(len(TEXTS))]
        self.sampled = list(TEXTS)
        self.replies = [self.reply(text, step) for step, text in enumerate(TEXTS)]
        self.session: dict[str, Any] = {"problem": "", "status": "stored"}
        self.stored = {"s1": [ids_of(text) for text in TEXTS]}
        self.trained = [("s1", [ids_of(text) for text in TEXTS])]
        self.kills: list[dict[str, Any]] = []

    def reply(self, text: str, asked_at: float, **changes: Any) -> dict[str, Any]:
        told = {"text": text, "calls": [["Bash", '{"command":"ls"}']], "status": 200, "answered": True}
        return {"asked_at": asked_at, "at": asked_at + 0.9, **told, "error": "", "cut_by": "", **changes}

    def cut(self, step: int, text: str, *, by: str = "gateway") -> None:
        """The request of a step is cut, and asked once more half a second later."""
        self.replies.append(self.reply(text, step - 0.5, answered=False, calls=[], cut_by=by, at=step - 0.1))
        self.asked.append({"asked": step, "at": step - 0.4})
        self.kills.append({"at": step - 0.1, "kind": "gateway"})

    def train(self, text: str) -> None:
        """One turn more is sampled, stored and trained."""
        self.sampled.append(text)
        self.stored["s1"].append(ids_of(text))
        self.trained[0][1].append(ids_of(text))

    def cut_once_stored(self, told: str = "", *, by: str = "gateway") -> None:
        """The reply to the request of step 1 is stored and trained, and cut when its agent was told so much of it."""
        self.cut(1, told, by=by)
        self.train(f"Step 1, {OTHER}: ls")

    def cut_after_the_last_token(self, said: str) -> None:
        self.cut(1, said)
        self.sampled.append(said)

    def cut_with_kills(self, **after_s: float) -> None:
        """The request of step 1 is cut, and what is killed is killed so many seconds after that."""
        self.cut(1, "")
        self.kills = [{"at": self.replies[-1]["at"] + seconds, "kind": kind} for kind, seconds in after_s.items()]

    def cut_with_supervisors(self, *, healthy_after_s: float) -> None:
        """The request of step 1 is cut 7 s after its supervisor was killed, the next one is so much later healthy."""
        self.cut_with_kills(supervisor=-7.0)
        self.kills.append({"at": self.replies[-1]["at"] + healthy_after_s, "healthy_after_s": 7.0 + healthy_after_s})

    def lose(self, *, stored: bool = False, status: str = "stored") -> None:
        """The session is not trained."""
        self.trained, self.stored = [], self.stored if stored else {}
        self.session["status"] = status

    def compared(self) -> Comparison:
        engine, proxy = Journal(self.plan.path("engine.jsonl")), Journal(self.plan.path("proxy.jsonl"))
        for event in self.asked:
            engine.note(session="s1", **event)
        for text in self.sampled:
            engine.note(session="s1", ids=ids_of(text))
        for reply in self.replies:
            proxy.note(**{"session": "s1", **reply})
        for kill in self.kills:
            Journal(self.plan.path("kills.jsonl")).note(**kill)
        Journal(self.plan.path("agents-openai-0.jsonl")).note(session="s1", kind="openai", **self.session)
        return Comparison(self.plan, self.stored, self.trained)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


Change = Callable[[Run], object]
WELL: dict[str, Change] = {
    "nothing happens": lambda run: None,
    "cut before the first word": lambda run: run.cut(1, ""),
    "cut in the middle of a stream": lambda run: run.cut(1, f"Step 1, {OTHER}: l"),
    "cut after the last token": lambda run: run.cut_after_the_last_token(f"Step 1, {OTHER}: ls"),
    "cut once it was stored": lambda run: run.cut_once_stored(f"Step 1, {OTHER}: ls"),
    "cut once it was stored, before its first word": lambda run: run.cut_once_stored(),
    "cut after its supervisor": lambda run: run.cut_with_kills(supervisor=-3.0),
    "cut before the next supervisor": lambda run: run.cut_with_supervisors(healthy_after_s=1.0),
    "cut by its engine": lambda run: run.replies.append(
        run.reply("Step 1, ", 0.5, answered=False, calls=[], error="the engine")
    ),
}


@pytest.mark.parametrize("change", WELL.values(), ids=WELL)
def test_a_session_whose_requests_were_cut_and_then_answered_ended_well(run: Run, change: Change) -> None:
    change(run)
    compared = run.compared()
    assert list(compared.findings()) == []
    assert compared.ended_well(compared.sessions[0])


def test_an_answered_turn_for_whose_step_the_engine_is_asked_once_more_is_sampled_again(run: Run) -> None:
    run.asked.append({"asked": 1, "at": 2.5})
    compared = run.compared()
    assert compared.again(compared.sessions[0]) == [NAMES[1]]
    assert not compared.ended_well(compared.sessions[0])


@pytest.mark.parametrize("change", [{"problem": "APIConnectionError"}, {"status": "failed"}])
def test_a_session_that_failed_or_is_not_stored_did_not_end_well(run: Run, change: dict[str, str]) -> None:
    run.session |= change
    compared = run.compared()
    assert not compared.ended_well(compared.sessions[0])


@pytest.mark.parametrize("status", ["failed", "HTTP 410: its group is closed"])
def test_turns_of_a_session_that_was_given_up_are_dropped_by_rule(run: Run, status: str) -> None:
    run.lose(status=status)
    run.session["problem"] = "it ended with 1: {}"
    run.cut(2, "Step 2, ")
    compared = run.compared()
    assert list(compared.findings()) == []
    assert "it ended with 1; the gateway closed" in compared.cause(compared.sessions[0])


def tell_another_call(run: Run) -> None:
    run.replies[0]["calls"][0][1] = '{"command":"rm"}'


def lose_a_turn_beside_one_that_was_cut(run: Run) -> None:
    run.cut(1, f"Step 1, {OTHER}: l")
    run.trained[0][1].pop(1)


def train_two_turns_of_one_request(run: Run) -> None:
    run.cut_once_stored()
    run.train("Step 1, sample-eeeeeeeeeeee: ls")


OTHER_IDS = ids_of(TEXTS[0] + " -l")
OTHER_REPLY = f"Step 1, {OTHER}: ls"
FINDINGS: dict[str, tuple[Change, str]] = {
    "a session is lost": (lambda run: run.lose(), "LOST: s1 is not trained"),
    "its end is unknown": (lambda run: run.lose(status="ConnectionError"), "LOST: s1 is not trained: ConnectionError"),
    "after it was stored": (lambda run: run.lose(stored=True), "LOST: s1 is stored and not trained"),
    "its agent left it": (
        lambda run: run.replies.append({**run.reply(f"Step 0, {OTHER}: ls", 0.0), "session": "s2"}),
        "LOST: s2 has answered turns",
    ),
    "a turn is lost": (lambda run: run.trained[0][1].pop(), f"LOST: s1: {NAMES[2]} was answered and is not trained"),
    "in the database": (lambda run: run.stored["s1"].pop(), f"LOST: s1: {NAMES[2]} was answered and is not stored"),
    "beside one that was cut": (
        lose_a_turn_beside_one_that_was_cut,
        f"LOST: s1: {NAMES[1]} was answered and is not trained",
    ),
    "the engine did not end it": (
        lambda run: run.replies.append(run.reply(OTHER_REPLY, 0.5)), f"LOST: s1: {OTHER} was answered"
    ),
    "the engine was not asked for it": (
        lambda run: run.asked.pop(1), f"'{NAMES[1]}' was answered, and the engine was not asked"
    ),
    "a session is delivered twice": (lambda run: run.trained.extend(run.trained), "DOUBLED: s1"),
    "a turn is trained twice": (
        lambda run: run.trained[0][1].append(ids_of(TEXTS[0])), f"DOUBLED: {NAMES[0]} is trained 2 times"
    ),
    "in two sessions": (
        lambda run: run.trained.append(("s2", [ids_of(TEXTS[0])])), f"DOUBLED: {NAMES[0]} is trained 2 times"
    ),
    "stored twice": (
        lambda run: run.stored["s1"].append(ids_of(TEXTS[0])), f"DOUBLED: {NAMES[0]} is stored 2 times"
    ),
    "other tokens are trained": (
        lambda run: run.trained[0][1].__setitem__(0, OTHER_IDS), "not trained as it was sampled"
    ),
    "other tokens are stored": (
        lambda run: run.stored["s1"].__setitem__(0, OTHER_IDS), "other ids than it is stored with"
    ),
    "another text is told": (lambda run: run.replies[0].update(text=TEXTS[0] + " -l"), "its agent was told"),
    "another text is told before": (
        lambda run: run.replies.insert(0, run.reply(TEXTS[0] + " -l", 0.0)), "its agent was told"
    ),
    "another call is told": (tell_another_call, "its agent was told"),
    "nobody asked for it": (lambda run: run.train(OTHER_REPLY), "are trained, and were not answered"),
    "two turns of one request": (train_two_turns_of_one_request, "are trained, and were not answered"),
    "its agent hung up": (lambda run: run.cut_once_stored(by="agent"), "are trained, and were not answered"),
    "a session that was given up": (
        lambda run: run.session.update(status="failed"), "was given up (failed) and is trained"
    ),
    "a session that nobody closed": (lambda run: run.trained.append(("s2", [])), "no agent closed it"),
    "a connection closed without a kill": (
        lambda run: run.cut_with_kills(engine=0.0, gateway=-3.0), "was not killed"
    ),
    "before its kill": (lambda run: run.cut_with_kills(gateway=3.0), "was not killed"),
    "long after the supervisor's": (lambda run: run.cut_with_kills(supervisor=-7.0), "was not killed"),
    "after the next supervisor": (lambda run: run.cut_with_supervisors(healthy_after_s=-0.5), "was not killed"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "sentence"), FINDINGS.values(), ids=FINDINGS)
def test_what_does_not_balance_is_said(run: Run, change: Change, sentence: str) -> None:
    change(run)
    assert sentence in next(run.compared().findings())
