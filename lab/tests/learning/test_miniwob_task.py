"""A web page for a tiny policy that reads: the page scores, prompts are short, a player is often wrong."""

from __future__ import annotations

import random
import re

import pytest
from transformers import AddedToken, AutoTokenizer

from rollout_buffer_lab.learning.task_file import find_task
from rollout_buffer_lab.learning.tasks.miniwob_page import create_generator, warm_up_traces
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.generator.base_generator import GeneratorContext
from slime_plugins.rollout_buffer.testing.episodes import episode_request
from slime_plugins.rollout_buffer.testing.fake_engine import FakeEngine
from slime_plugins.rollout_buffer.types import Message, Trajectory
from tests.miniwob_browsers import needs_a_browser

TASK = find_task("miniwob_page", None)
TOKENIZER = AutoTokenizer.from_pretrained(DEMO_TOKENIZER_PATH, local_files_only=True)
TOKENIZER.add_tokens([AddedToken(phrase, normalized=False) for phrase in TASK.phrases])
NUMBER = re.compile(r"\d+")


def text_of(message: Message) -> str:
    content = message["content"]
    return content if isinstance(content, str) else content[0]["text"]


def field_tapped(prompt: str, reply: str) -> str | None:
    """The field of a prompt in whose box the reply taps."""
    x, y = (int(number) for number in NUMBER.findall(reply))
    boxes = re.findall(r'id="tt(\d)" value="" \[(\d+), (\d+), (\d+), (\d+)\]', prompt)
    for field, *edges in boxes:
        left, top, right, bottom = map(int, edges)
        if left <= x <= right and top <= y <= bottom:
            return str(field)
    return None


def field_asked_for(prompt: str) -> str:
    return prompt.split("Focus into the ")[1][0]


def test_the_scripted_player_taps_a_field_and_mostly_the_one_that_was_asked_for() -> None:
    traces = [[text_of(message) for message in trace] for trace in warm_up_traces(random.Random(0))[:1000]]

    tapped = [field_tapped(prompt, reply) for _, prompt, reply in traces]

    assert set(tapped) == {"1", "2", "3"}
    right = sum(field == field_asked_for(prompt) for field, (_, prompt, _) in zip(tapped, traces, strict=True))
    assert 500 < right < 700


@needs_a_browser
@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_the_page_scores_the_field_that_is_tapped_and_looks_like_those_that_were_made_up() -> None:
    rng = random.Random(1)
    taps = [text_of(trace[-1]) for trace in warm_up_traces(rng)[:8]]
    shapes = {NUMBER.sub("0", _prompt(trace)) for trace in warm_up_traces(rng)[:200]}

    scored = []
    for played in await _played(taps, rng):
        (turn,) = played.generations
        prompt, reply = (TOKENIZER.decode(ids) for ids in (turn.prompt_ids, turn.output_ids))
        field = field_tapped(prompt, reply)
        if field is not None:  # beside all of them, a touch may still go to the nearest
            scored.append(played.reward)
            assert played.reward == (1.0 if field == field_asked_for(prompt) else -1.0), prompt
        assert NUMBER.sub("0", prompt) in shapes
        assert len(turn.prompt_ids) < 120
        assert len(turn.output_ids) <= TASK.max_new_tokens
    assert set(scored) == {1.0, -1.0}


def _prompt(trace: list[Message]) -> str:
    return str(TOKENIZER.apply_chat_template(trace[:-1], tokenize=False, add_generation_prompt=True))


async def _played(taps: list[str], rng: random.Random) -> list[Trajectory]:
    """One page for each tap."""
    engine = FakeEngine(lambda request: taps[int(str(request.session_id).split(".")[0])], tokenizer=TOKENIZER)
    generator = create_generator()
    options = TASK.options(None)
    await generator.start(
        GeneratorContext(job_id="job", engine=engine, tokenizer=TOKENIZER, concurrency=8, options=options)
    )
    try:
        lines = TASK.instances(rng, len(taps))
        return [await generator.play(episode_request(line)) for line in lines]
    finally:
        await generator.close()
