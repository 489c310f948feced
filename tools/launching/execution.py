"""Runs the steps of a training in sequence, and stops background processes afterwards."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence

from tools.launching.models import LaunchError
from tools.launching.steps import Step

HEALTH_TIMEOUT_S = 60.0


def run(steps: Sequence[Step]) -> int:
    """Runs the steps in sequence, stops background processes, and returns the last step's exit code.

    Raises:
        LaunchError: a step before the last one failed.
    """
    background: list[subprocess.Popen[bytes]] = []
    code = 0
    try:
        for at, step in enumerate(steps):
            logging.info("%s", step.title)
            code = _do(step, background)
            if code != 0 and at < len(steps) - 1:
                raise LaunchError(f"could not {step.title}: {step.command[0]} exited with {code}")
    finally:
        for process in background:
            process.send_signal(signal.SIGTERM)
            process.wait()
    return code


def _do(step: Step, background: list[subprocess.Popen[bytes]]) -> int:
    if step.writes is not None:
        path, content = step.writes
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "w", encoding="utf-8", opener=_owners_alone if step.secret else None) as file:
            file.write(content)
        return 0
    try:
        process = subprocess.Popen(step.command, cwd=step.folder)
    except FileNotFoundError as error:
        raise LaunchError(f"could not {step.title}: {error.filename} is not installed") from error
    if not step.background:
        return process.wait()
    background.append(process)
    if step.healthy_url is not None:
        _wait_until_healthy(step.healthy_url, process)
    return 0


def _owners_alone(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + HEALTH_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise LaunchError(f"the rollout buffer exited with {process.returncode}; see its output above")
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except (OSError, urllib.error.URLError):
            time.sleep(0.5)
    raise LaunchError(f"{url} does not answer after {HEALTH_TIMEOUT_S:.0f} s")
