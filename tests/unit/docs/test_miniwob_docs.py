"""``docs/miniwob.md`` names every setting with its default, and says of each whether a job may set it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from slime_plugins.rollout_buffer.devices.settings import WorkerResources
from slime_plugins.rollout_buffer.generator.miniwob.config import JOB_KEYS, MiniWobSettings
from slime_plugins.rollout_buffer.generator.miniwob.package import NOT_PLAYED

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "miniwob.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `([a-z_.]+)` \| ([^|]*?) \|(?: (job)? ?\| .+ \|)?$", PAGE.split("## Settings")[1], re.MULTILINE)


def written(value: Any) -> str:
    if isinstance(value, WorkerResources):
        return "half a CPU" if value.num_cpus == 0.5 else "?"
    if isinstance(value, float):
        return f"{value:g}"
    return {"": "empty", "None": "null", "True": "true", "False": "false"}.get(str(value), str(value))


def test_every_setting_stands_in_the_table_with_its_default() -> None:
    settings = MiniWobSettings()
    table = {name: default.strip("`") for name, default, _ in ROWS}
    assert table == {name: written(getattr(settings, name)) for name in MiniWobSettings.model_fields}


def test_the_table_says_what_a_job_may_set() -> None:
    assert {name for name, _, job in ROWS if job} == set(JOB_KEYS)


def test_the_page_names_what_is_not_played() -> None:
    assert [name for name in NOT_PLAYED if f"`{name}`" not in PAGE] == []
