"""The demo empties no folder that a server shows."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from rich.console import Console

from slime_plugins.rollout_buffer.cli.demo import DemoSettings, run_demo
from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.storage import data_dir


def test_a_run_that_a_server_shows_is_kept(tmp_path: Path) -> None:
    data = tmp_path / "run" / "data"
    lock = data_dir.own(data)
    kept = tmp_path / "run" / "samples.jsonl"
    kept.write_text("{}\n", encoding="utf-8")

    with pytest.raises(ConfigError, match="stop it, or give another --folder"):
        run_demo(DemoSettings(folder=tmp_path), Console(quiet=True))

    lock.close()
    assert kept.is_file()
    data_dir.refuse_if_owned(data)


def test_a_demo_that_lacks_a_library_says_so_before_it_empties_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bm25s", None)
    kept = tmp_path / "run" / "samples.jsonl"
    kept.parent.mkdir()
    kept.write_text("{}\n", encoding="utf-8")

    with pytest.raises(ConfigError, match="context-editing"):
        run_demo(DemoSettings(folder=tmp_path, task="statelm"), Console(quiet=True))

    assert kept.is_file()
