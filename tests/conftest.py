"""Fixtures that more than one test file uses."""

from __future__ import annotations

import functools
import gc
import os
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
import typer.testing
from flask.testing import FlaskClient
from hypothesis import HealthCheck, settings

from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.generator.registry import load
from slime_plugins.rollout_buffer.rules.heartbeats import SUPERVISOR
from slime_plugins.rollout_buffer.serve_settings import ServeSettings
from slime_plugins.rollout_buffer.server.http import ServerContext
from slime_plugins.rollout_buffer.storage.store import Store
from slime_plugins.rollout_buffer.testing.clock import SettableClock
from tests.asgi_client import create_app
from tests.reruns import SECOND_CHANCE
from tests.skips import lacking, unexpected

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# The machine may be busy: no example has a deadline, and none counts as drawn too slowly. A test states its own number
# of examples with tests.example_counts, which scales it by the profile.
settings.register_profile("quick", max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", settings.get_profile("quick"), max_examples=1000)
settings.load_profile("quick")


LONGEST_FIRST = ("e2e", "crash", "integration")
"""Folders under tests whose files mostly wait for processes, longest first."""
RAY_FIRST = ("test_device_pool_ray", "test_node_memory", "test_device_pool_nodes", "test_ray_head_restart")
"""Files that run before all others: Ray reads where its token is when it is imported, which unit tests do, too."""
WAITING_BEGIN_BY = 0.8
"""The last file that waits begins when this share of the computing files has begun; at the end it would run alone."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mixes files that wait with files that compute, and gives those of ``tests/reruns.py`` a second chance."""

    def rank(file: Path) -> int:
        if file.stem in RAY_FIRST:
            return -1
        _, _, below = file.as_posix().rpartition("/tests/")
        folder = below.partition("/")[0]
        return LONGEST_FIRST.index(folder) if folder in LONGEST_FIRST else len(LONGEST_FIRST)

    files = sorted(dict.fromkeys(item.path for item in items), key=rank)
    waiting_count = sum(rank(file) < len(LONGEST_FIRST) for file in files)
    computing_count = len(files) - waiting_count
    order = {file: WAITING_BEGIN_BY * at / waiting_count for at, file in enumerate(files[:waiting_count])}
    order |= {file: at / computing_count for at, file in enumerate(files[waiting_count:])}
    items.sort(key=lambda item: (rank(item.path) >= 0, order[item.path]))
    for item in items:
        if item.path.parent.name == "integration" and item.path.stem in SECOND_CHANCE:
            item.add_marker(pytest.mark.flaky(reruns=1, reruns_delay=2))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Spares the garbage collector the collected items, which all live to the end: during collection and the tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    """Prints, after all other lines, how many tests lacked what, and which skips fail a run where ``CI`` is set."""
    yield
    skipped = [str(report.longrepr[2]) for report in terminalreporter.stats.get("skipped", [])]
    for need, count in Counter(lacking(skipped)).most_common():
        terminalreporter.write_line(f"skipped {count}: {need}")
    for reason in unexpected(skipped) if os.environ.get("CI") else []:
        terminalreporter.write_line(f"UNEXPECTED SKIP {reason}", red=True)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails a run where ``CI`` is set and a test was skipped that could have run."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CI") and isinstance(reporter, pytest.TerminalReporter) and session.exitstatus == 0:
        skipped = [str(report.longrepr[2]) for report in reporter.stats.get("skipped", [])]
        if unexpected(skipped):
            session.exitstatus = 1


@pytest.fixture(scope="session", autouse=True)
def _one_command_line() -> Iterator[None]:
    """Builds the command line once. Typer's runner would do it in each call, from the signatures of all commands."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("typer.testing._get_command", functools.cache(typer.main.get_command))
        yield


@pytest.fixture
def clock() -> SettableClock:
    return SettableClock()


@pytest.fixture
def buffer(tmp_path: Path, clock: SettableClock) -> Iterator[Buffer]:
    """A buffer on a store of its own, with the test's clock."""
    buffer = Buffer(Store(tmp_path / "data"), clock=clock)
    yield buffer
    buffer.store.close()


@pytest.fixture
def quick_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runners look around often and retry at once."""
    runner = "slime_plugins.rollout_buffer.runner"
    monkeypatch.setattr(f"{runner}.played_job.WATCH_INTERVAL_S", 0.02)
    monkeypatch.setattr(f"{runner}.episode_runner.RETRY_BASE_S", 0.001)
    monkeypatch.setattr(f"{runner}.group_admission.POLL_INTERVAL_S", 0.02)


@pytest.fixture
def real_time_buffer(tmp_path: Path, quick_runner: None) -> Iterator[Buffer]:
    """A buffer on the real clock, for runners that are quick."""
    buffer = Buffer(Store(tmp_path / "data"))
    yield buffer
    buffer.store.close()


@functools.cache
def known_task_types() -> dict[str, Any]:
    """The task types that a supervisor reports to ``make_client``. Cached, since ``load`` imports generator files."""
    known: dict[str, Any] = {name: {"needs_ray": False} for name in ("external", "math")}
    known["remote_rollout"] = {"needs_ray": False, "required_keys": ["tokenizer_path", "remote_rollout_url"]}
    known["strict"] = {
        "needs_ray": False,
        "required_keys": ["place"],
        "option_keys": ["max_turns"],
        "option_sections": load("statelm").option_sections,
    }
    return known


@pytest.fixture
def make_client(tmp_path: Path) -> Iterator[Callable[..., FlaskClient]]:
    """Builds HTTP test clients of an application whose supervisor looks alive."""
    contexts: list[ServerContext] = []

    def make(**settings: object) -> FlaskClient:
        app = create_app(ServeSettings.model_validate({"data_dir": tmp_path / "data", **settings}))
        context: ServerContext = app.extensions["rollout_buffer"]
        contexts.append(context)
        context.buffer.beat(SUPERVISOR.name, os.getpid(), {"task_types": known_task_types(), "broken_generators": {}})
        return app.test_client()

    yield make
    for context in contexts:
        context.buffer.store.close()


@pytest.fixture
def client(make_client: Callable[..., FlaskClient], tmp_path: Path) -> FlaskClient:
    """An HTTP test client; input files may lie in the test's own folder."""
    return make_client(data_roots=(tmp_path,))
