"""Lists the generators in a short-lived process, so that a broken file neither stops nor blocks the supervisor.

When a generator file has changed, the list is made again; the previous list holds until the new list is complete. A
file that hangs, or that ends the process that loads it, is reported as broken like a file with a syntax error, and is
skipped until it changes. ``reconcile`` makes the next step and waits for nothing.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.observability.liveness import Heartbeat
from slime_plugins.rollout_buffer.serve_settings import generator_files
from slime_plugins.rollout_buffer.supervisor.child_processes import die_with_parent

FILE_TIMEOUT_S = 60.0
SLOW_AFTER_S = 5.0
MAX_SKIPPED = 50
MAX_ERROR_CHARACTERS = 2000

logger = logging.getLogger(__name__)


class GeneratorDiscovery:
    """Lists the generators of the built-in folder and of ``folders``."""

    def __init__(
        self,
        folders: Sequence[Path],
        *,
        file_timeout_s: float = FILE_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.catalog: dict[str, Any] | None = None
        """The newest list (``task_types``, ``broken_generators``, ``files`` with times); None before the first."""
        self.skipped: dict[str, str] = {}
        """Why a file is skipped, by path. A skipped file is not loaded until it changes."""
        self._files = generator_files(folders)
        self._skipped_as: dict[str, str | None] = {}
        """The time that each skipped file had when it was skipped."""
        self._folders = folders
        self._file_timeout_s = file_timeout_s
        self._clock = clock
        self._listing: _Listing | None = None
        self._slow_file: str | None = None
        """The file that was last logged as slow."""

    def reconcile(self) -> None:
        """Makes the next step.

        Raises:
            ConfigError: the generators could never be listed, whichever files are skipped.
        """
        if self._listing is None and self.catalog is not None and self.catalog["files"] == self._files:
            return
        if self._listing is None:
            self._start()
        elif self._listing.process.poll() is None:
            self._watch(self._listing)
        else:
            self._collect(self._listing)

    def read_file_times(self) -> None:
        """Reads the files' times, so that ``reconcile`` notices changes; may wait for the disk."""
        self._files = generator_files(self._folders)

    def activity(self) -> str | None:
        """Returns a sentence on the first listing; None once there is a list."""
        if self.catalog is not None:
            return None
        file, loading_s = self._listing.loading() if self._listing else ("", 0.0)
        return f"generators are being listed: {file or 'the registry'} has been loading for {loading_s:.0f} s"

    def stop(self) -> None:
        """Kills the listing process."""
        if self._listing is not None:
            self._listing.close()
            self._listing = None

    # --- steps -------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self.skipped = {
            file: why for file, why in self.skipped.items() if self._files.get(file) == self._skipped_as[file]
        }
        self._listing = _Listing(self._folders, self.skipped, self._clock)

    def _watch(self, listing: _Listing) -> None:
        file, loading_s = listing.loading()
        if loading_s > SLOW_AFTER_S and file != self._slow_file:
            self._slow_file = file
            logger.warning("%s is slow to load; the limit is %.0f s",
                           f"generator file {file}" if file else "the registry", self._file_timeout_s)  # fmt: skip
        if loading_s > self._file_timeout_s:
            self.stop()
            self._skip_file(file, f"it did not load within {self._file_timeout_s:.0f} s")

    def _collect(self, listing: _Listing) -> None:
        file, _ = listing.loading()
        code, (answer, error_output) = listing.process.returncode, listing.output()
        self.stop()
        try:
            if code != 0:
                raise ValueError(f"exit code {code}")
            catalog: dict[str, Any] = json.loads(answer)
        except ValueError as error:
            self._skip_file(file, f"loading it ended the process ({error}):\n{error_output[-MAX_ERROR_CHARACTERS:]}")
            return
        catalog["broken_generators"] |= {Path(file).name: reason for file, reason in self.skipped.items()}
        for name, reason in catalog["broken_generators"].items():
            logger.error("generator file %s does not load:\n%s", name, reason)
        self.catalog = catalog

    def _skip_file(self, file: str, reason: str) -> None:
        """Skips a file in the next listing. If the file is unknown or is skipped already, or ``MAX_SKIPPED`` files are,
        the previous list holds."""
        if not file or file in self.skipped or len(self.skipped) >= MAX_SKIPPED:
            if self.catalog is None:
                raise ConfigError(f"the generators cannot be listed: {reason}")
            logger.error("the generators cannot be listed again, the previous list holds: %s", reason)
            self.catalog = {**self.catalog, "files": self._files}
            return
        logger.error("generator file %s is skipped: %s", file, reason)
        self.skipped[file] = reason
        self._skipped_as[file] = self._files.get(file)


class _Listing:
    """A process that lists the generators, without the files in ``skipped``.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(self, folders: Sequence[Path], skipped: Iterable[str], clock: Callable[[], float]) -> None:
        self._clock = clock
        self._started_at = clock()
        self._progress = Heartbeat(clock=clock)
        self._answer, self._error_output = os.memfd_create("generators"), os.memfd_create("generator errors")
        command = [sys.executable, "-m", "slime_plugins.rollout_buffer.generator"]
        command += ["--progress-fd", str(self._progress.descriptor)]
        for file in skipped:
            command += ["--skip", file]
        try:
            self.process = subprocess.Popen(
                [*command, *map(str, folders)],
                stdin=subprocess.DEVNULL,
                stdout=self._answer,
                stderr=self._error_output,
                pass_fds=(self._progress.descriptor,),
                start_new_session=True,
                preexec_fn=functools.partial(die_with_parent, os.getpid()),
            )
        except OSError:
            self._close_files()
            raise

    def loading(self) -> tuple[str, float]:
        """Returns the file being loaded, and for how many seconds."""
        beat = self._progress.last()
        if beat is None:
            return "", self._clock() - self._started_at
        return str(beat.detail.get("file", "")), beat.age_s

    def output(self) -> tuple[str, str]:
        """Returns what the process has printed, and its error output."""
        return _read(self._answer), _read(self._error_output)

    def close(self) -> None:
        """Kills the process if it runs, and closes its files."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self._close_files()

    def _close_files(self) -> None:
        self._progress.close()
        os.close(self._answer)
        os.close(self._error_output)


def _read(descriptor: int) -> str:
    size = os.fstat(descriptor).st_size
    return os.pread(descriptor, size, 0).decode(errors="replace")
