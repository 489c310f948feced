"""What the crash test with agents finds in a run's notes; each test changes a run in which everything is well."""

from __future__ import annotations

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


def nothing(run: Run) -> None:
    pass


def cut_before_the_first_word(run: Run) -> None:
    run.cut(1, "")


def cut_in_the_middle_of_a_stream(run: Run) -> None:
    run.cut(1, f"Step 1, {OTHER}: l")


def cut_after_the_last_token(run: Run) -> None:
    run.cut(1, f"Step 1, {OTHER}: ls")
    run.sampled.append(f"Step 1, {OTHER}: ls")


def cut_once_it_was_stored(run: Run) -> None:
    run.cut(1, f"Step 1, {OTHER}: ls")
    run.train(f"Step 1, {OTHER}: ls")


def cut_once_it_was_stored_before_its_first_word(run: Run) -> None:
    run.cut(1, "")
    run.train(f"Step 1, {OTHER}: ls")


def cut_after_its_supervisor(run: Run) -> None:
    run.cut(1, "")
    run.kills = [{"at": run.replies[-1]["at"] - 3.0, "kind": "supervisor"}]


def cut_by_its_engine(run: Run) -> None:
    run.replies.append(run.reply("Step 1, ", 0.5, answered=False, calls=[], error="the engine"))


@pytest.mark.parametrize(
    "change",
    [
        nothing,
        cut_before_the_first_word,
        cut_in_the_middle_of_a_stream,
        cut_after_the_last_token,
        cut_once_it_was_stored,
        cut_once_it_was_stored_before_its_first_word,
        cut_after_its_supervisor,
        cut_by_its_engine,
    ],
)
def test_a_session_whose_requests_were_cut_and_then_answered_ended_well(run: Run, change: Any) -> None:
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
    run.session |= {"problem": "it ended with 1: {}", "status": status}
    run.stored, run.trained = {}, []
    run.cut(2, "Step 2, ")
    compared = run.compared()
    assert list(compared.findings()) == []
    assert "it ended with 1; the gateway closed" in compared.cause(compared.sessions[0])


def lose_a_session(run: Run) -> None:
    run.stored, run.trained = {}, []


def lose_a_session_whose_end_is_unknown(run: Run) -> None:
    run.session["status"] = "ConnectionError"
    lose_a_session(run)


def lose_a_session_after_it_was_stored(run: Run) -> None:
    run.trained = []


def lose_a_session_that_its_agent_left(run: Run) -> None:
    run.replies.append({**run.reply(f"Step 0, {OTHER}: ls", 0.0), "session": "s2"})


def lose_a_turn(run: Run) -> None:
    run.trained[0][1].pop()


def lose_a_turn_in_the_database(run: Run) -> None:
    run.stored["s1"].pop()


def lose_a_turn_beside_one_that_was_cut(run: Run) -> None:
    cut_in_the_middle_of_a_stream(run)
    run.trained[0][1].pop(1)


def lose_an_answered_turn_that_the_engine_did_not_end(run: Run) -> None:
    run.replies.append(run.reply(f"Step 1, {OTHER}: ls", 0.5))


def deliver_twice(run: Run) -> None:
    run.trained *= 2


def train_a_turn_twice(run: Run) -> None:
    run.trained[0][1].append(ids_of(TEXTS[0]))


def train_a_turn_in_two_sessions(run: Run) -> None:
    run.trained.append(("s2", [ids_of(TEXTS[0])]))


def store_a_turn_twice(run: Run) -> None:
    run.stored["s1"].append(ids_of(TEXTS[0]))


def train_other_tokens(run: Run) -> None:
    run.trained[0][1][0] = ids_of(TEXTS[0] + " -l")


def tell_another_text(run: Run) -> None:
    run.replies[0]["text"] += " -l"


def tell_another_text_before(run: Run) -> None:
    run.replies.insert(0, run.reply(TEXTS[0] + " -l", 0.0))


def store_other_tokens(run: Run) -> None:
    run.stored["s1"][0] = ids_of(TEXTS[0] + " -l")


def tell_another_call(run: Run) -> None:
    run.replies[0]["calls"][0][1] = '{"command":"rm"}'


def train_what_nobody_asked_for(run: Run) -> None:
    run.train(f"Step 1, {OTHER}: ls")


def train_two_turns_of_one_request(run: Run) -> None:
    cut_once_it_was_stored_before_its_first_word(run)
    run.train("Step 1, sample-eeeeeeeeeeee: ls")


def train_what_its_agent_hung_up_on(run: Run) -> None:
    run.cut(1, "", by="agent")
    run.train(f"Step 1, {OTHER}: ls")


def train_a_session_that_was_given_up(run: Run) -> None:
    run.session["status"] = "failed"


def train_a_session_that_nobody_closed(run: Run) -> None:
    run.trained.append(("s2", []))


def close_a_connection_without_a_kill(run: Run) -> None:
    run.cut(1, "")
    at = run.replies[-1]["at"]
    run.kills = [{"at": at, "kind": "engine"}, {"at": at - 3.0, "kind": "gateway"}, {"at": at + 3.0, "kind": "gateway"}]


def close_a_connection_long_after_the_supervisor(run: Run) -> None:
    run.cut(1, "")
    run.kills = [{"at": run.replies[-1]["at"] - 7.0, "kind": "supervisor"}]


def answer_what_the_engine_was_not_asked_for(run: Run) -> None:
    run.asked.pop(1)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lose_a_session, "LOST: s1 is not trained"),
        (lose_a_session_whose_end_is_unknown, "LOST: s1 is not trained: ConnectionError"),
        (lose_a_session_after_it_was_stored, "LOST: s1 is stored and not trained"),
        (lose_a_session_that_its_agent_left, "LOST: s2 has answered turns"),
        (lose_a_turn, f"LOST: s1: {NAMES[2]} was answered and is not trained"),
        (lose_a_turn_in_the_database, f"LOST: s1: {NAMES[2]} was answered and is not stored"),
        (lose_a_turn_beside_one_that_was_cut, f"LOST: s1: {NAMES[1]} was answered and is not trained"),
        (lose_an_answered_turn_that_the_engine_did_not_end, f"LOST: s1: {OTHER} was answered"),
        (answer_what_the_engine_was_not_asked_for, f"'{NAMES[1]}' was answered, and the engine was not asked"),
        (deliver_twice, "DOUBLED: s1"),
        (train_a_turn_twice, f"DOUBLED: {NAMES[0]} is trained 2 times"),
        (train_a_turn_in_two_sessions, f"DOUBLED: {NAMES[0]} is trained 2 times"),
        (store_a_turn_twice, f"DOUBLED: {NAMES[0]} is stored 2 times"),
        (train_other_tokens, "not trained as it was sampled"),
        (tell_another_text, "its agent was told"),
        (tell_another_text_before, "its agent was told"),
        (store_other_tokens, "other ids than it is stored with"),
        (tell_another_call, "its agent was told"),
        (train_what_nobody_asked_for, "are trained, and were not answered"),
        (train_two_turns_of_one_request, "are trained, and were not answered"),
        (train_what_its_agent_hung_up_on, "are trained, and were not answered"),
        (train_a_session_that_was_given_up, "was given up (failed) and is trained"),
        (train_a_session_that_nobody_closed, "no agent closed it"),
        (close_a_connection_without_a_kill, "was not killed"),
        (close_a_connection_long_after_the_supervisor, "was not killed"),
    ],
)
def test_what_does_not_balance_is_said(run: Run, change: Any, sentence: str) -> None:
    change(run)
    assert sentence in next(run.compared().findings())
