"""The demo empties no folder that a server shows, and ends in peace when it is interrupted."""

from __future__ import annotations

import io
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

from rollout_buffer_lab.cli import demo_run as demo
from rollout_buffer_lab.cli.demo_run import DemoSettings, run_demo
from rollout_buffer_lab.run_processes import refuse_if_served
from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.storage import data_dir


def test_a_run_that_a_server_shows_is_kept(tmp_path: Path) -> None:
    data = tmp_path / "run" / "data"
    lock = data_dir.acquire_ownership(data)
    kept = tmp_path / "run" / "samples.jsonl"
    kept.write_text("{}\n", encoding="utf-8")

    with pytest.raises(ConfigError, match="stop it, or give another --folder"):
        run_demo(DemoSettings(folder=tmp_path), Console(quiet=True))

    lock.close()
    assert kept.is_file()
    refuse_if_served(data)


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


def test_an_interrupted_demo_names_its_logs_and_keeps_the_retries_of_its_trainer_to_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def processes(*_: object) -> Iterator[tuple[int, str]]:
        yield 1, "http://127.0.0.1:1"

    over = threading.Event()

    class Waiting:
        def train(self, *_: object, **__: object) -> None:
            over.wait(60)

    ours = logging.getLogger("slime_plugins.rollout_buffer")
    monkeypatch.setattr(ours, "level", ours.level)
    monkeypatch.setattr(demo, "_processes", processes)
    monkeypatch.setattr(demo, "MockTrainer", lambda _: Waiting())
    monkeypatch.setattr(demo, "_job_or_none", _interrupt)
    output = io.StringIO()

    with pytest.raises(KeyboardInterrupt):
        run_demo(DemoSettings(folder=tmp_path), Console(file=output, width=400))

    over.set()
    assert f"stopped before its end; logs: {tmp_path}/run/*.log" in output.getvalue()
    assert not logging.getLogger("slime_plugins.rollout_buffer.trainer.job_feed").isEnabledFor(logging.WARNING)


def test_what_follows_the_progress_stands_on_a_line_of_its_own_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Done:
        error = None
        records: tuple[()] = ()

        def run(self) -> None: ...

    monkeypatch.setattr(demo, "_job_or_none", lambda _: None)
    output = io.StringIO()
    console = Console(file=output, width=100)
    demo._watch(cast("Any", Done()), cast("Any", None), console, DemoSettings(folder=tmp_path))
    console.print("what follows")
    assert output.getvalue().splitlines()[-1] == "what follows"


def test_a_demo_that_ended_well_says_how_to_look_at_it_and_why_its_job_is_cancelled(tmp_path: Path) -> None:
    output = io.StringIO()
    run, slots = tmp_path / "run", {"submitted": 1920, "open": 1872}
    demo._print_paths(Console(file=output, width=400), run, run / "samples.jsonl", slots)
    look, address, state = output.getvalue().splitlines()[-3:]
    assert f"serve --data-dir {tmp_path}/run/data" in look
    assert address.startswith("and open http://127.0.0.1:")
    assert "its job is cancelled there, with 48 of 1920 episodes played" in state


def _interrupt(_: object) -> None:
    raise KeyboardInterrupt
