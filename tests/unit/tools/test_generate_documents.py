"""Questions over made-up documents: the same each time, answerable, and answered by the stand-in's policy."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollout_buffer_lab.scripted_engine.conversation import read_conversation
from rollout_buffer_lab.scripted_engine.policy import reply_to
from rollout_buffer_lab.scripted_engine.rng import SessionRng
from slime.utils.mask_utils import pack_training_rows
from slime_plugins.rollout_buffer.engine.base import GenerateRequest
from slime_plugins.rollout_buffer.tools.generate_documents import KINDS, generate, main
from tests.context_editing_player import Played, play, tokenizer

ROOT = Path(__file__).resolve().parents[3]
LINES = list(generate(12, (4_000, 12_000)))


def policy(skill: float, seed: int = 0) -> Any:
    def say(request: GenerateRequest) -> str:
        conversation = read_conversation(tokenizer.decode(list(request.input_ids)), [])
        return reply_to(conversation, skill=skill, rng=SessionRng(seed, request.session_id))

    return say


async def played(line: dict[str, Any], skill: float = 1.0, seed: int = 0) -> Played:
    return await play(policy(skill, seed), line=line, max_model_length=8192)


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


def test_lengths_are_counted_by_a_tokenizer_when_one_is_given() -> None:
    def count(text: str) -> int:
        return len(list(tokenizer.encode(text, add_special_tokens=False)))

    (line,) = generate(1, (2_000, 2_000), count=count)
    assert 2_000 <= count(line["document_content"]) < 2_200


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


@pytest.mark.parametrize("line", LINES[:6], ids=lambda line: line["instance_id"])
async def test_the_stand_in_reads_notes_deletes_and_answers(line: dict[str, Any]) -> None:
    trajectory = (await played(line)).trajectory
    assert trajectory.reward == 1.0
    assert {
        "analyzeText",
        "buildIndex",
        "searchEngine",
        "readChunk",
        "note",
        "deleteContext",
        "readNote",
        "finish",
    } <= set(trajectory.extra_info["tool_calls"])
    assert trajectory.extra_info["had_delete_operation"]
    assert len(pack_training_rows(trajectory.generations)) > 1


async def test_without_skill_it_fails_in_several_ways() -> None:
    line = LINES[1]
    games = [(await played(line, 0.0, seed)).trajectory for seed in range(8)]
    assert {game.reward for game in games} >= {0.0}
    assert len({(game.reward, str(game.stop_reason)) for game in games}) > 1


async def test_a_slip_is_repaired_in_the_next_turn() -> None:
    games = [(await played(LINES[0], 1.0, seed)).trajectory for seed in range(12)]
    slipped = [game for game in games if game.extra_info["failed_tool_calls"]]
    assert slipped
    assert all(game.reward == 1.0 for game in games)
