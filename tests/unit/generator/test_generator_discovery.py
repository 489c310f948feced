"""A generator file that hangs, or ends the process that loads it, costs itself and no other."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.generator.base_generator import Generator
from slime_plugins.rollout_buffer.generator.registry import BUILT_IN_FOLDER, discover, load, load_file
from slime_plugins.rollout_buffer.observability.tracebacks import own_traceback, with_place
from slime_plugins.rollout_buffer.supervisor.generator_discovery import GeneratorDiscovery

GOOD = 'TASK_TYPE = "good"\ndef run_rollout(data): ...\n'


def finish(discovery: GeneratorDiscovery) -> dict[str, str]:
    """Tends until all is known of the files as they are now; returns what is broken."""
    deadline = time.monotonic() + 100
    discovery.read_file_times()
    while discovery.catalog is None or discovery.catalog["files"] != discovery._files:
        assert time.monotonic() < deadline
        discovery.reconcile()
        time.sleep(0.02)
    assert discovery.activity() is None
    broken: dict[str, str] = discovery.catalog["broken_generators"]
    return broken


def test_a_file_is_compiled_as_python_compiles_it(tmp_path: Path) -> None:
    """Not with the ``__future__`` imports of the registry."""
    (tmp_path / "typed.py").write_text(GOOD + "def f(x: int): ...\nassert f.__annotations__ == {'x': int}\n")
    assert load_file(tmp_path / "typed.py", "good") is not None


def test_good_files_are_found_beside_broken_ones_and_changed_files_are_listed_again(tmp_path: Path) -> None:
    hanging = tmp_path / "process"
    (tmp_path / "a_hangs.py").write_text(
        f"import os, time\nos.symlink(f'/proc/{{os.getpid()}}', {str(hanging)!r})\ntime.sleep(1000)\n"
    )
    (tmp_path / "b_ends.py").write_text("import os\nos.write(2, b'x' * 3000 + b'my last words')\nos._exit(3)\n")
    (tmp_path / "c_good.py").write_text(GOOD + "import atexit\nprint('junk', end='')\natexit.register(print, '{}')\n")
    (tmp_path / "d_mended.py").write_text("TASK_TYPE = 'mended'\n\ndef run_rollout(data:\n")
    # The time limit passes while the file hangs, and only then, however slow the machine is.
    discovery = GeneratorDiscovery([tmp_path], clock=lambda: time.monotonic() + 1000.0 * hanging.exists())
    discovery.reconcile()
    assert "listed" in (discovery.activity() or "")
    broken = finish(discovery)
    assert discovery.catalog is not None
    assert {"good", "math"} <= discovery.catalog["task_types"].keys()
    assert "did not load within 60 s" in broken["a_hangs.py"]
    assert "exit code 3" in broken["b_ends.py"]
    assert "my last words" in broken["b_ends.py"]
    assert broken["d_mended.py"].startswith(f"{tmp_path}/d_mended.py, line 3: SyntaxError: '(' was never closed\n")
    assert "registry" not in broken["d_mended.py"]
    # A runner is told, and does not hang in its turn.
    skipped = [Path(file) for file in discovery.skipped]
    assert load("good", [tmp_path], skip=skipped).task_type == "good"

    (tmp_path / "a_hangs.py").write_text(GOOD.replace("good", "hung"))
    (tmp_path / "b_ends.py").unlink()
    (tmp_path / "d_mended.py").write_text(GOOD.replace("good", "mended"))
    (tmp_path / "e_new.py").write_text(GOOD.replace("good", "new"))

    assert finish(discovery) == {}
    assert {"good", "hung", "mended", "new"} <= discovery.catalog["task_types"].keys()
    assert discovery.activity() is None


def test_what_cannot_be_listed_again_leaves_the_last_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    discovery = GeneratorDiscovery([tmp_path])
    finish(discovery)
    (tmp_path / "good.py").write_text(GOOD)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    finish(discovery)
    assert discovery.catalog is not None
    assert "math" in discovery.catalog["task_types"]


def test_a_file_is_loaded_as_it_is_now_and_its_traceback_shows_what_ran(tmp_path: Path) -> None:
    file, second = tmp_path / "edited.py", 1_700_000_000
    text = "TASK_TYPE = 'edited'\ndef run_rollout(data): return data['anwser']\n"
    for written in (text.replace("anwser", "answer"), text):  # alike in size, and in the second of their time
        file.write_text(written)
        os.utime(file, (second, second))
        plugin = load_file(file, "edited")
    assert plugin is not None
    assert plugin.run_rollout is not None
    file.write_text("# another text\n" + text)
    with pytest.raises(KeyError, match="anwser") as raised:
        plugin.run_rollout({"answer": 42})
    assert with_place(raised.value, file) == f"{file}, line 2: KeyError: 'anwser'"
    assert "def run_rollout(data): return data['anwser']" in own_traceback(raised.value)


@pytest.mark.parametrize(("task_type", "reward_range"), [("math", (0.0, 1.0)), ("statelm", (-10.0, 1.0))])
def test_a_built_in_generator_is_found_with_its_range_and_needs_no_ray(
    task_type: str, reward_range: tuple[float, float]
) -> None:
    plugin = load(task_type)
    assert (plugin.reward_range, plugin.needs_ray) == (reward_range, False)
    assert plugin.create_generator is not None
    assert isinstance(plugin.create_generator(), Generator)


def test_a_registry_that_cannot_be_listed_at_all_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    discovery = GeneratorDiscovery([])
    with pytest.raises(ConfigError, match="cannot be listed"):
        finish(discovery)


def test_a_machine_without_room_for_a_process_costs_no_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError("fork: retry")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    discovery = GeneratorDiscovery([])
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        with pytest.raises(BlockingIOError):
            discovery.reconcile()
    assert os.listdir("/proc/self/fd") == before


def test_what_is_stopped_while_it_lists_ends(tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text("import time\ntime.sleep(1000)\n")
    discovery = GeneratorDiscovery([tmp_path])
    discovery.reconcile()
    listing = discovery._listing
    assert listing is not None
    discovery.stop()
    assert listing.process.poll() is not None
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
