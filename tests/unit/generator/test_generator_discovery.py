"""A generator file that hangs, or ends the process that loads it, costs itself and no other."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.generator.registry import BUILT_IN_FOLDER, discover, load, load_file
from slime_plugins.rollout_buffer.supervisor.generator_discovery import GeneratorDiscovery

GOOD = 'TASK_TYPE = "good"\ndef run_rollout(data): ...\n'


def finish(discovery: GeneratorDiscovery) -> dict[str, str]:
    """Tends until all is known; returns what is broken."""
    deadline = time.monotonic() + 100
    while discovery.catalog is None:
        assert time.monotonic() < deadline
        discovery.reconcile()
        time.sleep(0.02)
    assert discovery.activity() is None
    broken: dict[str, str] = discovery.catalog["broken_generators"]
    return broken


def test_good_files_are_found_beside_one_that_hangs_and_one_that_ends_the_process(tmp_path: Path) -> None:
    (tmp_path / "a_hangs.py").write_text("import time\ntime.sleep(1000)\n")
    (tmp_path / "b_ends.py").write_text("import os\nos.write(2, b'my last words')\nos._exit(3)\n")
    (tmp_path / "c_good.py").write_text(GOOD + "print('junk', end='')\n")
    discovery = GeneratorDiscovery([tmp_path], file_timeout_s=5.0)
    discovery.reconcile()
    assert "listed" in (discovery.activity() or "")
    broken = finish(discovery)
    assert discovery.catalog is not None
    assert {"good", "math"} <= discovery.catalog["task_types"].keys()
    assert "did not load within 5 s" in broken["a_hangs.py"]
    assert "exit code 3" in broken["b_ends.py"]
    assert "my last words" in broken["b_ends.py"]
    # A runner is told, and does not hang in its turn.
    skipped = [Path(file) for file in discovery.skipped]
    assert load("good", [tmp_path], skip=skipped).task_type == "good"


def test_a_registry_that_cannot_be_listed_at_all_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    discovery = GeneratorDiscovery([])
    with pytest.raises(ConfigError, match="cannot be listed"):
        finish(discovery)


def test_what_is_stopped_while_it_lists_ends(tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text("import time\ntime.sleep(1000)\n")
    discovery = GeneratorDiscovery([tmp_path])
    discovery.reconcile()
    process = discovery._process
    assert process is not None
    discovery.stop()
    assert process.poll() is not None
    discovery.stop()


def test_one_file_is_loaded_without_a_look_at_the_others(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text("TASK_TYPE = 'own'\ndef create_generator(): ...\n", encoding="utf-8")
    (tmp_path / "broken.py").write_text("raise SystemExit('looked at')", encoding="utf-8")

    found = load_file(own, "own")

    assert found is not None
    assert (found.task_type, found.source) == ("own", own)
    assert load_file(own, "another") is None


def test_devices_in_the_runners_own_threads_need_no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    built_in = BUILT_IN_FOLDER / "android_world_generator.py"
    on_a_cluster = load_file(built_in, "android_world")
    monkeypatch.setenv("ROLLOUT_BUFFER_ANDROID_WORLD__DEVICE_POOL", "local")
    in_threads = load_file(built_in, "android_world")
    monkeypatch.setenv("ROLLOUT_BUFFER_ANDROID_WORLD__DEVICE_POOL", "nowhere")
    wrong = discover().plugins["android_world"]

    assert on_a_cluster is not None
    assert in_threads is not None
    assert (on_a_cluster.needs_ray, in_threads.needs_ray, wrong.needs_ray) == (True, False, False)
