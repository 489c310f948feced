"""What the crash test with agents finds in a run's notes."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from tests.crash.agents_run import Comparison, Trainer
from tests.crash.workload import SESSIONS_JOB, Journal, Plan
from tests.gateway_support import tokenizer

NAMES = ["sample-" + 12 * letter for letter in "abc"]
SAID = [f"Step {step}, {name}: ls" for step, name in enumerate(NAMES)]


def ids_of(text: str) -> list[int]:
    found: list[int] = tokenizer.encode(f"{text}\n<tool_call>\n{{}}\n</tool_call><|im_end|>")
    return found


class Run:
    """The notes of a run with one session, in which everything is well until a test changes it."""

    def __init__(self, folder: Path) -> None:
        values: dict[str, Any] = dict.fromkeys((field.name for field in fields(Plan)), 0)
        self.plan = Plan(**{**values, "folder": str(folder)})
        self.sampled = list(SAID)
        self.session: dict[str, Any] = {"told": list(SAID), "problem": "", "status": "stored"}
        self.trained = [("s1", [ids_of(text) for text in SAID])]

    def compared(self) -> Comparison:
        engine = Journal(self.plan.path("engine.jsonl"))
        for text in self.sampled:
            engine.note(session="s1", text=text, ids=ids_of(text))
        Journal(self.plan.path("agents-openai-0.jsonl")).note(session="s1", kind="openai", **self.session)
        return Comparison(self.plan, Trainer(self.plan, trained=self.trained))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_a_session_whose_turns_were_cut_while_they_were_sampled_ended_well(run: Run) -> None:
    run.sampled.insert(1, "Step 1, sample-dddddddddddd: ls")
    compared = run.compared()
    assert list(compared.findings()) == []
    assert compared.ended_well(compared.sessions[0])


def test_text_of_a_stream_that_was_cut_is_no_answered_turn(run: Run) -> None:
    run.session["told"].insert(1, "Step 1, sample-dddddddddddd: l")
    compared = run.compared()
    assert list(compared.findings()) == []
    assert compared.ended_well(compared.sessions[0])


def test_an_answered_turn_that_is_sampled_again_is_counted_even_if_all_else_is_well(run: Run) -> None:
    run.sampled.append("Step 1, sample-dddddddddddd: ls")
    compared = run.compared()
    assert compared.again(compared.sessions[0]) == [NAMES[1]]
    assert not compared.ended_well(compared.sessions[0])


@pytest.mark.parametrize("change", [{"problem": "APIConnectionError"}, {"status": "failed"}])
def test_a_session_that_failed_or_is_not_stored_did_not_end_well(run: Run, change: dict[str, str]) -> None:
    run.session |= change
    compared = run.compared()
    assert not compared.ended_well(compared.sessions[0])


def lose_a_session(run: Run) -> None:
    run.trained = []


def lose_a_turn(run: Run) -> None:
    run.trained[0][1].pop()


def deliver_twice(run: Run) -> None:
    run.trained *= 2


def train_a_turn_twice(run: Run) -> None:
    run.trained[0][1].append(ids_of(SAID[0]))


def train_other_tokens(run: Run) -> None:
    run.trained[0][1][0] = ids_of(SAID[0] + " -l")


def tell_another_text(run: Run) -> None:
    run.session["told"][0] += " -l"


def train_what_nobody_was_told(run: Run) -> None:
    run.session["told"].pop()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lose_a_session, "LOST: s1 was closed"),
        (lose_a_turn, f"LOST: s1: {NAMES[2]} was answered"),
        (deliver_twice, "DOUBLED: s1"),
        (train_a_turn_twice, f"DOUBLED: {NAMES[0]}"),
        (train_other_tokens, "not trained as it was sampled"),
        (tell_another_text, "its agent was told"),
        (train_what_nobody_was_told, "its agent was not told"),
    ],
)
def test_what_does_not_balance_is_said(run: Run, change: Any, sentence: str) -> None:
    change(run)
    assert sentence in next(run.compared().findings())


def test_a_trajectory_that_no_agent_closed_is_said(run: Run) -> None:
    run.trained.append((f"{SESSIONS_JOB}-2", []))
    assert "no agent closed it" in next(run.compared().findings())
