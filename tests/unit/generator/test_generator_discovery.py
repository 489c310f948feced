"""A generator file that hangs, or ends the process that loads it, costs itself and no other."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.generator import load
from slime_plugins.rollout_buffer.supervisor.generator_discovery import GeneratorDiscovery

GOOD = 'TASK_TYPE = "good"\ndef run_rollout(data): ...\n'


def finish(discovery: GeneratorDiscovery) -> dict[str, str]:
    """Tends until all is known; returns what is broken."""
    deadline = time.monotonic() + 100
    while discovery.catalog is None:
        assert time.monotonic() < deadline
        discovery.tend()
        time.sleep(0.02)
    assert discovery.activity() is None
    broken: dict[str, str] = discovery.catalog["broken_generators"]
    return broken


def test_good_files_are_found_beside_one_that_hangs_and_one_that_ends_the_process(tmp_path: Path) -> None:
    (tmp_path / "a_hangs.py").write_text("import time\ntime.sleep(1000)\n")
    (tmp_path / "b_ends.py").write_text("import os\nos.write(2, b'my last words')\nos._exit(3)\n")
    (tmp_path / "c_good.py").write_text(GOOD + "print('junk', end='')\n")
    discovery = GeneratorDiscovery([tmp_path], file_timeout_s=5.0)
    discovery.tend()
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
    discovery.tend()
    process = discovery._process
    assert process is not None
    discovery.stop()
    assert process.poll() is not None
    discovery.stop()
