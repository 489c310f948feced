"""The environment that ``docs/environments.md`` shows whole keeps the contract of devices, and is played to its end."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.devices.interface import Device
from slime_plugins.rollout_buffer.devices.kinds import create_device
from slime_plugins.rollout_buffer.generator.base_generator import GeneratorContext
from slime_plugins.rollout_buffer.generator.gui_agent.device_actions import Action, ActionKind
from slime_plugins.rollout_buffer.generator.registry import load
from slime_plugins.rollout_buffer.testing.device_conformance import DeviceContract
from slime_plugins.rollout_buffer.testing.episodes import episode_request
from slime_plugins.rollout_buffer.testing.fake_engine import FakeEngine
from slime_plugins.rollout_buffer.types import Outcome

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "environments.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"^```python\n# game/(\w+\.py): [^\n]*\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The page's files, where its PYTHONPATH finds them."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("guess_game", None)


class TestTheGame(DeviceContract):
    task = ("guess", 3)

    @pytest.fixture
    def device(self, folder: Path) -> Device[Any]:
        return create_device("guess_game:from_options", {}, 0)

    def harmless_action(self) -> Action:
        return Action(kind=ActionKind.TYPE, text="99")


async def test_the_generator_is_found_and_a_policy_that_guesses_earns_what_the_game_scores(
    folder: Path,
) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(DEMO_TOKENIZER_PATH, local_files_only=True)
    calls = [{"name": "mobile_use", "arguments": {"action": "type", "text": str(number)}} for number in range(1, 21)]
    replies = [f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls]
    create = load("guess", [folder]).create_generator
    assert create is not None
    generator = create()
    engine = FakeEngine(replies, tokenizer=tokenizer)
    await generator.start(GeneratorContext(job_id="job", engine=engine, tokenizer=tokenizer, concurrency=1, options={}))
    line = {"instance_id": "guess-1", "metadata": {"task_name": "guess", "params_idx": 1}}
    trajectory = await generator.play(episode_request(line))
    await generator.close()
    assert (trajectory.reward, trajectory.outcome) == (1.0, Outcome.COMPLETED)
    assert not any(request.images for request in engine.requests)
