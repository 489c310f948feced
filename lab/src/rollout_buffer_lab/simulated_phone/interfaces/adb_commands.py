"""Answers ``adb -s SERIAL ARGS`` for the simulated phone, with exit code and bytes from the device's state.

Families of shell commands are in separate files; here are adb's own commands (push, pull, install,
emu, logcat ...) and the table of all of them. ``adb shell`` exits with the exit code of the
command on the device, as the real adb does.
"""

from __future__ import annotations

import posixpath
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rollout_buffer_lab.simulated_phone.device_state.filesystem import FileError
from rollout_buffer_lab.simulated_phone.device_state.messages import insert_sms
from rollout_buffer_lab.simulated_phone.interfaces.commands_activities import activity_commands
from rollout_buffer_lab.simulated_phone.interfaces.commands_files import file_commands, shell_files
from rollout_buffer_lab.simulated_phone.interfaces.commands_input import input_commands
from rollout_buffer_lab.simulated_phone.interfaces.commands_providers import provider_commands
from rollout_buffer_lab.simulated_phone.interfaces.commands_settings import settings_commands
from rollout_buffer_lab.simulated_phone.interfaces.emulator_state import EmulatorState
from rollout_buffer_lab.simulated_phone.interfaces.screen_capture import png_of
from rollout_buffer_lab.simulated_phone.interfaces.shell_language import Command, Output, failed, printed, run_script


class AdbShell:
    """Answers adb commands for one phone. ``push`` and ``pull`` read and write files of the host."""

    def __init__(self, phone: EmulatorState) -> None:
        self._phone = phone
        self._commands: dict[str, Command] = {
            **settings_commands(phone),
            **file_commands(phone.state.files),
            **provider_commands(phone),
            **activity_commands(phone),
            **input_commands(phone),
            "screencap": lambda arguments, piped: Output(text=png_of(phone)),
            "su": self._as_root,
            "sh": self._as_root,
            "logcat": lambda arguments, piped: printed(),
        }
        self._verbs: Mapping[str, Callable[[Sequence[str]], Output]] = {
            "shell": self._shell,
            "exec-out": self._shell,
            "push": self._push,
            "pull": self._pull,
            "install": self._install,
            "uninstall": lambda words: self._shell(["pm", "uninstall", *words]),
            "emu": self._emu,
            "logcat": lambda words: printed(),
            "root": lambda words: printed("adbd is already running as root\n"),
            "unroot": lambda words: printed(),
            "remount": lambda words: printed("remount succeeded\n"),
            "forward": lambda words: printed(),
            "reverse": lambda words: printed(),
            "wait-for-device": lambda words: printed(),
            "get-state": lambda words: printed("device\n"),
        }

    def run(self, arguments: Sequence[str]) -> Output:
        """Returns the exit code and output of one command, given without ``-s`` and ``-P``; never raises."""
        verb = arguments[0] if arguments else ""
        handler = self._verbs.get(verb)
        if handler is None:
            return failed(f"adb: unknown command {verb}")
        with self._phone.lock:
            try:
                return handler(arguments[1:])
            except (OSError, ValueError, OverflowError, sqlite3.Error) as error:  # arguments that make no sense
                return failed(f"adb: error: {error}")

    def _shell(self, words: Sequence[str]) -> Output:
        """Runs the words in the device's shell, as one text: adb joins them with blanks."""
        return run_script(" ".join(words), self._commands, shell_files(self._phone.state.files))

    def _as_root(self, words: Sequence[str], piped: bytes) -> Output:
        """Runs ``su 0 COMMAND``, ``su root COMMAND`` or ``sh -c 'COMMAND'``."""
        rest = list(words)
        while rest and rest[0] in ("0", "root", "-c"):
            rest.pop(0)
        return self._shell(rest)

    def _push(self, words: Sequence[str]) -> Output:
        *sources, target = [word for word in words if not word.startswith("--")]
        files = self._phone.state.files
        for source in sources:
            path = Path(source)
            if not path.is_file():
                return failed(f"adb: error: cannot stat '{source}': No such file or directory")
            into_folder = files.is_folder(target) or target.endswith("/")
            files.write(posixpath.join(target, path.name) if into_folder else target, path.read_bytes())
        return printed(f"{len(sources)} file pushed, 0 skipped.\n")

    def _pull(self, words: Sequence[str]) -> Output:
        if len(words) < 2:
            return failed("adb: error: pull needs a place to pull to")
        source, target = words[0], Path(words[1])
        try:
            data = self._phone.state.files.read(source)
        except FileError:
            return failed(f"adb: error: failed to stat remote object '{source}': No such file or directory")
        (target / posixpath.basename(source) if target.is_dir() else target).write_bytes(data)
        return printed(f"{source}: 1 file pulled, 0 skipped.\n")

    def _install(self, words: Sequence[str]) -> Output:
        """Records the file's name as an installed package, which nothing here can run."""
        names = [word for word in words if not word.startswith("-")]
        if not names or not Path(names[-1]).is_file():
            return failed(f"adb: failed to stat {names[-1] if names else ''}: No such file or directory")
        self._phone.installed_later.add(Path(names[-1]).stem)
        return printed("Performing Streamed Install\nSuccess\n")

    def _emu(self, words: Sequence[str]) -> Output:
        """Answers the emulator's console: ``sms send`` stores an incoming message, other commands do nothing."""
        if list(words[:2]) == ["sms", "send"] and len(words) > 2:
            insert_sms(self._phone.state, words[2], " ".join(words[3:]), sent=False)
            self._phone.state.clock.advance(1.0)  # so that the next message is a later one
        return printed("OK\n")
