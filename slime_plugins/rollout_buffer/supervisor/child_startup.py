"""Waits until a program that was just started serves HTTP, for programs that are not supervised."""

from __future__ import annotations

import time

import requests

from slime_plugins.rollout_buffer.errors import RolloutBufferError
from slime_plugins.rollout_buffer.supervisor.child_processes import ChildProcess

POLL_INTERVAL_S = 0.1
ANSWER_TIMEOUT_S = 5.0


def wait_until_healthy(child: ChildProcess, url: str, *, timeout_s: float, error: type[RolloutBufferError]) -> None:
    """Waits until ``url`` answers without an error.

    Raises:
        RolloutBufferError: of the class ``error``. Either the child exited, and the message has the end of its log; or
            ``url`` did not answer within ``timeout_s``, and the message has the path of the log.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if child.exit_code() is not None:
            raise error(f"the {child.name} ended while starting:\n{child.log_tail(15)}")
        try:
            if requests.get(url, timeout=ANSWER_TIMEOUT_S).ok:
                return
        except requests.RequestException:
            pass
        time.sleep(POLL_INTERVAL_S)
    raise error(f"the {child.name} does not answer at {url}; its log is {child.log_file}")
