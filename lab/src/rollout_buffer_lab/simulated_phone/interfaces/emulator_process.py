"""A process that looks like the Android emulator from outside: same arguments, same gRPC, a device for ``fake_adb``.

Started as ``python -m …emulator_process --folder FOLDER -avd NAME -port 5556 -grpc 8556 …``. The phones' sockets lie in
FOLDER. ``fault_plan`` describes its fault files; if a folder ``exchanges`` is in it, every command is
recorded there. Arguments of the real emulator that have no use here are ignored.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import signal
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout_buffer_lab.simulated_phone.interfaces.accessibility import AccessibilityForwarder
from rollout_buffer_lab.simulated_phone.interfaces.adb_commands import AdbShell
from rollout_buffer_lab.simulated_phone.interfaces.emulator_controller import serve_emulator_controller
from rollout_buffer_lab.simulated_phone.interfaces.emulator_state import EmulatorState
from rollout_buffer_lab.simulated_phone.interfaces.exchanges import ExchangeRecorder
from rollout_buffer_lab.simulated_phone.interfaces.fault_plan import FaultPlan, FaultTrigger
from rollout_buffer_lab.simulated_phone.interfaces.faults import Faults
from rollout_buffer_lab.simulated_phone.interfaces.shell_language import Output, failed, printed

logger = logging.getLogger(__name__)

RECORD_FOLDER = "exchanges"
_LOCK_FILE = "hardware-qemu.ini.lock"


@dataclass(frozen=True, kw_only=True, slots=True)
class EmulatorArguments:
    """The command line, parsed."""

    folder: Path
    avd_name: str
    console_port: int
    grpc_port: int

    @property
    def serial(self) -> str:
        """The device's name to adb."""
        return f"emulator-{self.console_port}"

    @classmethod
    def read(cls, words: Sequence[str]) -> EmulatorArguments:
        """Reads the command line of the emulator.

        Raises:
            ValueError: a port or the folder is missing.
        """
        values = {words[index]: words[index + 1] for index in range(len(words) - 1) if words[index].startswith("-")}
        try:
            return cls(
                folder=Path(values["--folder"]),
                avd_name=values.get("-avd", ""),
                console_port=int(values["-port"]),
                grpc_port=int(values["-grpc"]),
            )
        except KeyError as error:
            raise ValueError(f"the argument {error} is missing") from error


class Emulator:
    """One running phone with its two interfaces, gRPC and adb. ``close`` ends both."""

    def __init__(self, arguments: EmulatorArguments, faults: Faults, off: threading.Event | None = None) -> None:
        """``off`` is set when Android is shut down."""
        self._off = off or threading.Event()
        self.phone = EmulatorState()
        self._plan = FaultPlan(arguments.folder)
        self._adb = AdbShell(self.phone)
        self._inputs = 0
        self._started = time.monotonic()
        self._faults = faults
        self._recorder = _recorder(arguments)
        self._forwarder = AccessibilityForwarder(self.phone)
        self._late_inputs = LateInputs(self._run)
        self._end_of_faults: threading.Timer | None = None
        self.set_faults(faults)
        self._grpc = serve_emulator_controller(self.phone, arguments.grpc_port, faults, self._recorder)
        self._socket_path = arguments.folder / f"{arguments.serial}.sock"
        self._socket_path.unlink(missing_ok=True)
        self._server = _AdbServer(str(self._socket_path), self)
        self._thread = threading.Thread(target=self._server.serve_forever, name="adb", daemon=True)
        self._thread.start()

    def answer(self, words: Sequence[str]) -> Output:
        """Answers one adb command, as the faults allow."""
        trigger = self._plan.trigger(words[-1]) if list(words[:3]) == ["shell", "input", "text"] else None
        if trigger is not None:
            self._begin_faults(trigger)
        if self._faults.hangs:
            threading.Event().wait()
        if self._faults.offline:
            return failed("adb: device offline")
        if list(words[:2]) == ["shell", "getprop"] and not self._booted:
            return printed("\n")
        if list(words) == ["shell", "reboot", "-p"]:
            self._off.set()
            return printed()
        is_input = list(words[:2]) == ["shell", "input"]
        if is_input:
            self._count_input()
        if trigger is not None:
            return printed()  # the word itself is not typed
        if is_input and (self._faults.slow_screen_s > 0 or self._late_inputs.pending):
            self._late_inputs.put(words, self._faults.slow_screen_s)
            return printed()
        return self._run(words)

    def set_faults(self, faults: Faults) -> None:
        """Replaces the faults."""
        self._faults = faults
        self._forwarder.mute = faults.dead_forwarder
        self._forwarder.slow_s = faults.slow_trees_s
        self.phone.never_idle = faults.never_idle

    def _run(self, words: Sequence[str]) -> Output:
        output = self._adb.run(words)
        if self._faults.half_screens and "screencap" in " ".join(words):
            output = Output(text=output.text[: len(output.text) // 2])
        if self._recorder is not None:
            self._recorder.record(words, output)
        self._forwarder.wake()
        return output

    def _begin_faults(self, trigger: FaultTrigger) -> None:
        self._plan.add_next_boots(trigger.next_boots)
        self.set_faults(trigger.faults)
        if self._end_of_faults is not None:  # of the trigger before
            self._end_of_faults.cancel()
        self._end_of_faults = threading.Timer(trigger.for_s, self.set_faults, [Faults()])
        if trigger.for_s > 0:
            self._end_of_faults.start()

    def close(self) -> None:
        """Stops serving."""
        self._socket_path.unlink(missing_ok=True)
        self._server.shutdown()
        self._server.server_close()
        self._late_inputs.close()
        self._forwarder.close()
        self._grpc.stop(None)
        self.phone.close()

    @property
    def _booted(self) -> bool:
        return not self._faults.never_boots and time.monotonic() - self._started >= self._faults.boot_s

    def _count_input(self) -> None:
        self._inputs += 1
        if self._faults.crash_after_inputs is not None and self._inputs >= self._faults.crash_after_inputs:
            os._exit(139)


class LateInputs:
    """Touches, keys and texts of a slow device: each is done some time after its arrival, in the order of arrival.

    ``pending`` is true while an input is not done yet; one that arrives then has to wait for it.
    """

    def __init__(self, run: Callable[[Sequence[str]], object]) -> None:
        self._run = run
        self._waiting: queue.Queue[tuple[float, Sequence[str]] | None] = queue.Queue()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="late-inputs", daemon=True)
        self._thread.start()

    @property
    def pending(self) -> bool:
        return self._waiting.unfinished_tasks > 0

    def put(self, words: Sequence[str], after_s: float) -> None:
        """Queues an input, which is done after so many seconds and after the inputs before it."""
        self._waiting.put((time.monotonic() + after_s, words))

    def close(self) -> None:
        """Ends without doing the inputs that still wait."""
        self._closed.set()
        self._waiting.put(None)
        self._thread.join(timeout=5.0)

    def _work(self) -> None:
        while (entry := self._waiting.get()) is not None:
            due, words = entry
            if not self._closed.wait(max(0.0, due - time.monotonic())):
                self._run(words)
            self._waiting.task_done()


def _recorder(arguments: EmulatorArguments) -> ExchangeRecorder | None:
    """Exchanges are recorded if there is a folder for them next to the sockets."""
    folder = arguments.folder / RECORD_FOLDER
    return ExchangeRecorder(folder / f"{arguments.serial}.jsonl") if folder.is_dir() else None


class _AdbServer(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True

    def __init__(self, path: str, emulator: Emulator) -> None:
        self.emulator = emulator
        super().__init__(path, _AdbRequest)


class _AdbRequest(socketserver.StreamRequestHandler):
    """One connection of ``fake_adb``, or of a test that sets faults."""

    server: _AdbServer

    def handle(self) -> None:
        line = self.rfile.readline()
        if not line:
            return
        request: dict[str, Any] = json.loads(line)
        if "faults" in request:
            self.server.emulator.set_faults(Faults.from_json(request["faults"]))
            self._reply(printed(), stream=False)
            return
        words = request["arguments"]
        stream = words[:1] == ["logcat"] and "-c" not in words and "-d" not in words
        self._reply(self.server.emulator.answer(words), stream=stream)
        if stream:
            self.rfile.read()  # until the client closes the connection

    def _reply(self, output: Output, *, stream: bool) -> None:
        head = json.dumps({"code": output.code, "size": len(output.text), "stream": stream})
        try:
            self.wfile.write(head.encode() + b"\n" + output.text)
        except BrokenPipeError:
            logger.debug("the client closed the connection before the answer")


def main(words: Sequence[str]) -> int:
    """Runs the emulator until SIGTERM or SIGINT; returns its exit code."""
    arguments = EmulatorArguments.read(words)
    faults = FaultPlan(arguments.folder).of_this_boot()
    problem = _avd_problem(arguments.avd_name)
    if faults.exit_at_start or problem:
        sys.stderr.write(f"PANIC: {problem or 'the simulated emulator was stopped'}\n")
        return 1
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with _AvdLock(arguments.avd_name):
        emulator = Emulator(arguments, faults, stop)
        stop.wait()
        emulator.close()
    return 0


def _avd_folder(name: str) -> Path:
    return Path(os.environ.get("ANDROID_AVD_HOME", "")) / f"{name}.avd"


def _avd_problem(name: str) -> str:
    """Returns the problem of the device's files; empty without one."""
    folder = _avd_folder(name)
    if not (folder / "config.ini").is_file():
        return f"Unknown AVD name [{name}]: there is no {folder / 'config.ini'}"
    lock = folder / _LOCK_FILE
    if lock.is_file() and _is_running(lock.read_text().strip()):
        return f"Running multiple emulators with the same AVD is not possible ({name})"
    return ""


def _is_running(pid: str) -> bool:
    return pid.isdecimal() and Path(f"/proc/{pid}").is_dir()


class _AvdLock:
    """Marks the device's files as in use by two lock files; one of them stays, as with the real emulator."""

    def __init__(self, name: str) -> None:
        self._path = _avd_folder(name) / _LOCK_FILE

    def __enter__(self) -> None:
        self._path.write_text(str(os.getpid()))
        self._path.with_name("multiinstance.lock").touch()

    def __exit__(self, *_: object) -> None:
        self._path.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
