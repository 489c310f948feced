"""MiniWoB++ without a browser: settings, the elements in words, the list of tasks, errors of the browsers' loop."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from slime_plugins.rollout_buffer.errors import ConfigError, EnvironmentSetupError
from slime_plugins.rollout_buffer.generator.base_generator import GeneratorContext
from slime_plugins.rollout_buffer.generator.config_sources import Layer, validated
from slime_plugins.rollout_buffer.generator.miniwob import package
from slime_plugins.rollout_buffer.generator.miniwob.browser import SharedBrowsers
from slime_plugins.rollout_buffer.generator.miniwob.config import (
    CONFIG_VARIABLE,
    JOB_KEYS,
    SHIPPED_CONFIG,
    MiniWobSettings,
    load_settings,
)
from slime_plugins.rollout_buffer.generator.miniwob.elements import in_words
from slime_plugins.rollout_buffer.generator.miniwob_generator import MiniWobGenerator
from slime_plugins.rollout_buffer.testing.fake_engine import FakeEngine
from tests.demo_tokens import tokenizer

ROOT = Path(__file__).resolve().parents[4]


def test_the_shipped_file_holds_every_setting_with_its_default() -> None:
    values = yaml.safe_load(SHIPPED_CONFIG.read_text(encoding="utf-8"))
    assert set(values) == set(MiniWobSettings.model_fields)
    assert MiniWobSettings.model_validate(values) == MiniWobSettings() == load_settings({})


@pytest.mark.parametrize("key", sorted(set(MiniWobSettings.model_fields) - JOB_KEYS))
def test_what_is_the_hosts_no_job_sets(key: str) -> None:
    with pytest.raises(ConfigError, match=f"miniwob.{key} belongs to the host"):
        load_settings({"miniwob": {key: 1}})


def test_a_wrong_key_is_named_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "pages.yaml"
    file.write_text("num_workers: 4\nmax_turn: 3\n", encoding="utf-8")
    monkeypatch.setenv(CONFIG_VARIABLE, str(file))
    with pytest.raises(ConfigError, match=r"pages\.yaml: line 2: max_turn is not a setting; did you mean max_turns"):
        load_settings({})


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"time_penalty": True}, "time_penalty needs a time_limit_s: the penalty is a share of it"),
        ({"pixels_per_point": 6}, "pixels_per_point makes screenshots larger than screenshot_max_pixels"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(values: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=f"^the settings: {why}$"):
        validated(MiniWobSettings, Layer(values=values))


def test_the_elements_of_a_page_are_lines_with_boxes_in_the_agents_space() -> None:
    common = {"name": "", "classes": "", "id": "", "facts": {}, "text": "", "focused": False, "disabled": False}
    button = common | {"kind": "button", "text": 'say "hi"', "box": [0, 0, 160, 105]}
    field = common | {"kind": "input text", "id": "tt", "facts": {"value": "a"}, "focused": True}
    assert in_words([button, field | {"box": [80, 105, 200, 210]}]).splitlines() == [
        '1. button text="say \\"hi\\"" [0, 0, 999, 500]',
        '2. input text id="tt" value="a" focused [500, 500, 999, 999]',
    ]


def test_a_page_is_one_of_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "html"
    folder.mkdir()
    (folder / "click-test.html").touch()
    (tmp_path / "secret.html").touch()
    assert package.task_names(folder) == ["click-test"]
    assert package.page_of(folder, "click-test").name == "click-test.html"
    for name in ("../secret", "nothing", "flight.AA", "x" * 300, "click-test\0"):
        with pytest.raises(EnvironmentSetupError):
            package.page_of(folder, name)


async def test_a_job_on_a_host_without_the_pages_is_told_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    generator = MiniWobGenerator()
    context = GeneratorContext(job_id="job", engine=FakeEngine([]), tokenizer=tokenizer, concurrency=1)
    with pytest.raises(Exception, match=r"pip install .*\[miniwob\]"):
        await generator.start(context)
    await generator.close()


def test_every_page_of_the_package_is_in_the_shipped_list() -> None:
    pytest.importorskip("miniwob", reason="MiniWoB++ is not installed")
    lines = [json.loads(line) for line in (ROOT / "data" / "miniwob.jsonl").read_text("utf-8").splitlines()]
    listed = {line["metadata"]["task_name"] for line in lines}
    assert listed == set(package.task_names(package.find_pages()))
    assert len({line["instance_id"] for line in lines}) == len(lines) == 4 * len(listed)


def test_a_task_that_cannot_be_set_up_is_no_failure_of_its_page() -> None:
    async def set_up() -> None:
        raise EnvironmentSetupError("the task has no goal")

    with pytest.raises(EnvironmentSetupError, match=r"^the task has no goal$"):
        SharedBrowsers().call(set_up, None, 5.0, "loading the task")
