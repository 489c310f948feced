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
from tests.skips import needs, unexpected

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# No example has a deadline, and none is drawn too slowly: the machine may be busy. What a test says for itself it says
# through tests.example_counts, which knows the profile.
settings.register_profile("quick", max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", settings.get_profile("quick"), max_examples=1000)
settings.load_profile("quick")


LONGEST_FIRST = ("e2e", "crash", "integration")
"""Folders under tests whose files mostly wait for processes, longest first."""
RAY_FIRST = ("test_device_pool_ray", "test_node_memory", "test_device_pool_nodes", "test_ray_head_restart")
"""Files before all others: Ray reads how its token is given when a process imports it, which unit tests also do."""
BEGUN_BY = 0.8
"""Part of the other files that have begun when the last of those does: at the end it would run alone."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mixes files that wait with files that compute, and gives those of ``tests/reruns.py`` a second chance."""

    def place(file: Path) -> int:
        if file.stem in RAY_FIRST:
            return -1
        _, _, below = file.as_posix().rpartition("/tests/")
        folder = below.partition("/")[0]
        return LONGEST_FIRST.index(folder) if folder in LONGEST_FIRST else len(LONGEST_FIRST)

    files = sorted(dict.fromkeys(item.path for item in items), key=place)
    waiting = sum(place(file) < len(LONGEST_FIRST) for file in files)
    computing = len(files) - waiting
    order = {file: BEGUN_BY * at / waiting for at, file in enumerate(files[:waiting])}
    order |= {file: at / computing for at, file in enumerate(files[waiting:])}
    items.sort(key=lambda item: (place(item.path) >= 0, order[item.path]))
    for item in items:
        if item.path.parent.name == "integration" and item.path.stem in SECOND_CHANCE:
            item.add_marker(pytest.mark.flaky(reruns=1, reruns_delay=2))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What collection makes stays: no garbage is looked for in it, neither meanwhile nor during the tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    """Prints behind all other lines how many tests were skipped for want of what, and which skips fail a run of CI."""
    yield
    skipped = [str(report.longrepr[2]) for report in terminalreporter.stats.get("skipped", [])]
    for need, count in Counter(needs(skipped)).most_common():
        terminalreporter.write_line(f"skipped {count}: {need}")
    for reason in unexpected(skipped) if os.environ.get("CI") else []:
        terminalreporter.write_line(f"UNEXPECTED SKIP {reason}", red=True)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Makes such a run one that failed."""
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
    found = Buffer(Store(tmp_path / "data"), clock=clock)
    yield found
    found.store.close()


@functools.cache
def known_task_types() -> dict[str, Any]:
    """What the supervisor of those clients has found. Cached: ``load`` imports the file of every generator."""
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
