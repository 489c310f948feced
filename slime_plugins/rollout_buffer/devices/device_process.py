"""A device in a process of its own, which may have another Python, with the interface of ``Device``.

The imports of a device kind may conflict with the environment of the runner or of Ray's workers: ``android_world`` pins
numpy, pandas and protobuf. So the device worker starts ``python -m …device_process`` in an environment with these
packages and sends each call over a pipe. A call is a pickled ``(name, arguments)``, its reply a pickled
``(result, error)``; each is preceded by its length. Over a second pipe the child reports a device that died between two
calls. The child exits when its worker exits, also after SIGKILL, because its standard input is closed then.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from io import FileIO
from queue import Queue
from typing import IO, Any

from slime_plugins.rollout_buffer.devices.interface import Action, Device, Observation, ReportsLoss
from slime_plugins.rollout_buffer.devices.kinds import create_device
from slime_plugins.rollout_buffer.errors import DeviceError, RolloutBufferError

logger = logging.getLogger(__name__)

_LENGTH = struct.Struct("!Q")
_MODULE = "slime_plugins.rollout_buffer.devices.device_process"
_CLOSE_TIMEOUT_S = 60.0
_EXIT_TIMEOUT_S = 5.0
_WATCH_INTERVAL_S = 1.0
_MAX_LOSS_BYTES = 4000
_ORPHANED_S = 20.0
"""Time that a child whose parent is gone has for its cleanup. Then it exits, even if a call hangs, because its emulator
holds the clone that the next worker needs; the emulator's watchdog stops the emulator.
"""


class DeviceProcess:
    """A ``Device`` that ``create_device(kind, options, index)`` creates in a child process of ``python``.

    ``setting`` is the name of the setting that holds ``python``, for error messages.

    Raises:
        RolloutBufferError: the device kind raised it in the child, or (``DeviceError``) the child did not start or
            exited.
    """

    def __init__(self, python: str, kind: str, options: Mapping[str, Any], index: int, *, setting: str) -> None:
        self._python_in_messages = f"{setting} {python}"
        self._child, self._loss_reports = _start_child(python, self._python_in_messages)
        self._why_lost = ""
        try:
            self._call("create", kind, dict(options), index)
        except BaseException:
            self.close()
            raise

    def reset(self, task_name: str, params_idx: int) -> Observation:
        observation: Observation = self._call("reset", task_name, params_idx)
        return observation

    def step(self, action: Action) -> Observation:
        observation: Observation = self._call("step", action)
        return observation

    def score(self) -> float:
        return float(self._call("score"))

    def health(self) -> Mapping[str, str]:
        facts: Mapping[str, str] = self._call("health")
        return facts

    def lost(self) -> str:
        """As ``ReportsLoss.lost``: the child's report, or the exit of the child."""
        with contextlib.suppress(ValueError):  # another thread closes the pipe at the same time
            report = self._loss_reports.read(_MAX_LOSS_BYTES)
            if report is not None and not self._why_lost:
                exit_message = f"the device's process is gone (exit code {self._child.poll()})"
                self._why_lost = report.decode("utf-8", "replace") or exit_message
        return self._why_lost

    def close(self) -> None:
        """As ``Device.close``; kills a child that does not exit within a minute."""
        if self._child.stdin is not None and not self._child.stdin.closed:
            with contextlib.suppress(BrokenPipeError):  # a call to a child that has exited is still in the buffer
                self._child.stdin.close()
        try:
            self._child.wait(timeout=_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            logger.error("the device's process %d does not exit; killing it", self._child.pid)
            self._child.kill()
            self._child.wait()
        if self._child.stdout is not None:
            self._child.stdout.close()
        self._loss_reports.close()

    def _call(self, name: str, *arguments: Any) -> Any:
        if self._child.stdin is None or self._child.stdout is None or self._child.stdin.closed:
            raise DeviceError("the device's process is closed")
        try:
            _write(self._child.stdin, (name, arguments))
            result, error = _read(self._child.stdout)
        except (OSError, EOFError) as broken:
            raise DeviceError(self._how_it_ended(name), {"fault": "died"}) from broken
        if error is not None:
            raise error
        return result

    def _how_it_ended(self, called: str) -> str:
        """Returns a message with the child's exit code; the child has closed its pipes and may take a moment to
        exit."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(timeout=_EXIT_TIMEOUT_S)
        code = self._child.returncode
        if called != "create":
            return f"the device's process is gone (exit code {code})"
        return (
            f"{self._python_in_messages} exited with code {code} before it had a device; "
            "the worker's log has the reason. `rollout-buffer doctor` checks whether it can import this project"
        )


def _start_child(python: str, python_in_messages: str) -> tuple[subprocess.Popen[bytes], FileIO]:
    """Starts the child; returns it and its non-blocking pipe of loss reports."""
    reading_end, writing_end = os.pipe()
    os.set_blocking(reading_end, False)
    try:
        command = [python, "-m", _MODULE, str(writing_end)]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[writing_end])
    except OSError as error:
        os.close(reading_end)
        raise DeviceError(f"{python_in_messages} cannot be started: {error}") from error
    finally:
        os.close(writing_end)
    return child, FileIO(reading_end, "rb")


def _write(stream: IO[bytes], value: Any) -> None:
    data = pickle.dumps(value)
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def _read(stream: IO[bytes]) -> Any:
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError("the other end is closed")
    (length,) = _LENGTH.unpack(head)
    data = stream.read(length)
    if len(data) < length:
        raise EOFError("the other end closed in the middle of a message")
    return pickle.loads(data)


# ---- the child's side ------------------------------------------------------------------------------------------------


def main(words: Sequence[str]) -> int:
    """Serves one device over the standard streams until the parent closes them; returns the exit code.

    The only element of ``words`` is the file descriptor for loss reports.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # prints of imported packages must not mix with replies
    calls: Queue[tuple[str, Sequence[Any]] | None] = Queue()
    threading.Thread(target=_listen, args=(calls,), daemon=True).start()
    device: Device[Any] | None = None
    while (call := calls.get()) is not None:
        name, arguments = call
        try:
            if name == "create":
                device = create_device(*arguments)
                _notify_when_lost(device, int(words[0]))
                result: Any = None
            else:
                result = getattr(device, name)(*arguments)
            _write(replies, (result, None))
        except RolloutBufferError as error:
            _write(replies, (None, error))
        except Exception as error:
            logger.exception("the call of %s failed", name)
            _write(replies, (None, DeviceError(f"the call of {name} failed: {type(error).__name__}: {error}")))
    if device is not None:
        device.close()
    return 0


def _listen(calls: Queue[tuple[str, Sequence[Any]] | None]) -> None:
    """Queues calls. When the parent is gone, exits after the cleanup time even if a call hangs."""
    try:
        while True:
            calls.put(_read(sys.stdin.buffer))
    except (EOFError, OSError):
        calls.put(None)
        threading.Timer(_ORPHANED_S, os._exit, [1]).start()


def _notify_when_lost(device: Device[Any], loss_reports: int) -> None:
    """Watches a device that detects its own loss, and writes the reason to the file descriptor once."""
    os.set_inheritable(loss_reports, False)

    def watch(reporter: ReportsLoss) -> None:
        while not (why := reporter.lost()):
            time.sleep(_WATCH_INTERVAL_S)
        os.write(loss_reports, why.encode()[:_MAX_LOSS_BYTES])

    if isinstance(device, ReportsLoss):
        threading.Thread(target=watch, args=[device], name="death-watch", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
