"""Questions over made-up documents: the same each time, answerable, and answered by the stand-in's policy."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollout_buffer_lab.documents import KINDS, generate, main
from rollout_buffer_lab.scripted_engine.conversation import read_conversation
from rollout_buffer_lab.scripted_engine.policy import reply_to
from rollout_buffer_lab.scripted_engine.rng import SessionRng
from slime_plugins.rollout_buffer.engine.base import GenerateRequest
from tests.context_editing_player import tokenizer

ROOT = Path(__file__).resolve().parents[3]
LINES = list(generate(12, (4_000, 12_000)))


def policy(skill: float, seed: int = 0) -> Any:
    def say(request: GenerateRequest) -> str:
        conversation = read_conversation(tokenizer.decode(list(request.input_ids)), [])
        return reply_to(conversation, skill=skill, rng=SessionRng(seed, request.session_id))

    return say


def first_of(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    assert found is not None, pattern
    return found[1]


def answer_in(line: dict[str, Any]) -> Any:
    """The answer, read off the document with nothing but the question."""
    question, text = line["raw_prompt"][0]["content"], line["document_content"]
    if place := re.search(r"code of the (\w+) archive", question):
        return first_of(rf"code of the {place[1]} archive is ([\w-]+)\.", text)
    if asked := re.search(r"crates of (\w+) did the (.+) unload", question):
        return sum(int(found) for found in re.findall(rf"the {asked[2]} unloaded (\d+) crates of {asked[1]}\.", text))
    good = first_of(r"crates of (\w+)\?", question)
    return sorted(set(re.findall(rf"the ([\w ]+) unloaded \d+ crates of {good}\.", text)))


def test_the_same_seed_gives_the_same_lines_and_another_one_others() -> None:
    assert list(generate(12, (4_000, 12_000))) == LINES
    assert list(generate(12, (4_000, 12_000), seed=8)) != LINES


def test_every_question_can_be_answered_from_its_document_alone() -> None:
    assert [answer_in(line) for line in LINES] == [line["label"] for line in LINES]
    assert {line["extra_info"]["kind"] for line in LINES} == set(KINDS)


def test_lengths_are_what_was_asked_for() -> None:
    lengths = [line["extra_info"]["tokens"] for line in LINES]
    assert lengths == sorted(lengths)
    assert 4_000 <= lengths[0] < 4_200
    assert 12_000 <= lengths[-1] < 12_200
    (long,) = generate(1, (200_000, 200_000))
    assert len(long["document_content"]) > 900_000


def test_lines_have_the_form_that_the_generator_takes() -> None:
    for line in LINES:
        assert set(line) == {"instance_id", "raw_prompt", "document_content", "label", "extra_info"}
        assert line["extra_info"]["evidence"] == len(line["extra_info"]["depths"])


def test_the_command_writes_the_file(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / "generate_documents.py"), "--lines", "3", "--max_tokens", "5000"]
    result = subprocess.run([*command, "--output", str(tmp_path / "a" / "d.jsonl")], capture_output=True, check=False)
    assert result.returncode == 0, result.stderr
    written = (tmp_path / "a" / "d.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in written] == list(generate(3, (4_000, 5_000)))
    with pytest.raises(SystemExit):
        main(["--lines", "0"])
