"""``docs/android_world.md`` names every setting with its default, every ending, and numbers that tests compute."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from slime_plugins.rollout_buffer.generator.android_world.config import JOB_KEYS, AndroidWorldSettings
from slime_plugins.rollout_buffer.generator.gui_agent.prompting.prompts import history_turn_message, with_history
from slime_plugins.rollout_buffer.types import StopReason

DOCS = (Path(__file__).resolve().parents[3] / "docs" / "android_world.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `([a-z_.]+)` \| (.*?) \| (job)? ?\| .+ \|$", re.MULTILINE)


def settings_of(section: BaseModel, above: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting by its dotted name, with its default."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from settings_of(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def test_every_setting_stands_in_the_table_with_its_default() -> None:
    table = {name: default for name, default, _ in ROW.findall(DOCS)}
    expected = dict(settings_of(AndroidWorldSettings()))
    assert set(table) == set(expected)
    wrong = {name: (table[name], value) for name, value in expected.items() if not _same(table[name], value)}
    assert wrong == {}


def _same(written: str, value: Any) -> bool:
    text = written.strip("`")
    if isinstance(value, float):
        return float(text) == value
    return text == {"": "empty", "None": "null", "True": "true", "False": "false"}.get(str(value), str(value))


def test_the_table_says_what_a_job_may_set() -> None:
    marked = {name.split(".")[0] for name, _, job in ROW.findall(DOCS) if job}
    assert marked == set(JOB_KEYS)


def test_every_ending_of_an_episode_has_its_reward() -> None:
    of_episodes = set(StopReason) - {StopReason.STOP, StopReason.ABORTED}
    rewards = DOCS.split("## Rewards")[1].split("## GRPO")[0]
    assert {reason for reason in of_episodes if f"`{reason}`" not in rewards} == set()


def test_the_prompt_in_the_docs_is_the_one_that_is_sent() -> None:
    lines = ["Opened the app Settings.", 'Tapped "Network & internet".']
    message = with_history("Switch Wi-Fi on.", lines, [], history_turn_message(3, "0"))
    text = message["content"][0]["text"]
    beginning, end = text[: text.index("tags,") + 5], text[-len("\n\nStep 3: ") :]
    block = next(block for block in DOCS.split("```") if "Task progress" in block)
    assert f"system\n{beginning} …\n" in block
    assert block.endswith(f"{end}<image>\n")
