"""YAML of people, as each place that takes it reads it: doubled keys and aliases that multiply are refused at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from slime_plugins.rollout_buffer.cli.app import app
from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.generator import config_sources

BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 30))
ENDLESS = "a: &a [*a]\n"


def refusal_of_start(path: Path) -> Any:
    result = CliRunner().invoke(app, ["start", str(path), "--url", "http://127.0.0.1:9"])
    raise ConfigError(" ".join(result.output.split()))


READERS: list[Callable[[Path], Any]] = [config_sources.from_file, refusal_of_start]


@pytest.mark.timeout(30)
@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, "its aliases repeat more than 10000 values"),
        (ENDLESS, "its aliases repeat more than 10000 values"),
        ("a: 1\nb: 2\na: 3\n", "line 3: a was already set in line 1"),
        ('{"a": [{"b": 1,\n"b": 2}]}', "line 2: b was already set in line 1"),
        ('{"b": 1, "b": 2}', "line 1: b was already set in line 1"),
        ("a: " + "[" * 5000, "nested too deeply"),
        ("a: 2026-02-31\n", "is not valid YAML"),
        ("a: \0\n", "is not valid YAML"),
    ],
)
def test_yaml_that_hangs_a_reader_or_hides_a_key_is_refused(
    tmp_path: Path, read: Callable[[Path], Any], text: str, message: str
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message) as refused:
        read(file)
    assert str(refused.value).count(file.name) == 1
