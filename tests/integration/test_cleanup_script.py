"""``scripts/cleanup.sh`` ends what this project started and nothing that merely looks like it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime_plugins.rollout_buffer.generator.android_world.emulator import watchdog as emulator_watchdog
from slime_plugins.rollout_buffer.generator.android_world.emulator.avd_clones import clone_avd
from slime_plugins.rollout_buffer.generator.android_world.emulator.avd_ownership import AvdOwnership
from slime_plugins.rollout_buffer.generator.android_world.emulator.emulator_process import CHECKOUT_MARK, DEVICE_MARK
from tests.processes import is_alive, start_ticks_of
from tests.waiting import wait_until

CHECKOUT = str(Path(__file__).resolve().parents[2])
SCRIPT = Path(CHECKOUT) / "scripts" / "cleanup.sh"
BOOT = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
EMULATOR = "import signal, time, sys; print('up', flush=True); time.sleep(600)"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
ADB_SERVER = "import socket, sys, time; s = socket.create_server(('127.0.0.1', int(sys.argv[1]))); time.sleep(600)"


class Host:
    """A folder with settings, virtual devices, records and programs of a test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.avd_home = folder / "avd"
        self.records = folder / "records"
        self.temporary = folder / "tmp"
        self.locks = folder / "locks"
        for path in (self.avd_home / "Base.avd", self.records, self.temporary, self.locks):
            path.mkdir(parents=True)
        (self.avd_home / "Base.avd" / "config.ini").write_text("AvdId=Base\n")
        (folder / "config.yaml").write_text(
            f'android_avd_home: "{self.avd_home}/"   # of this test\nbase_avd_name_pattern: "cleanup_test_{{}}"\n'
        )
        self.started: list[subprocess.Popen[bytes]] = []

    def cleanup(self, *options: str, **variables: str) -> str:
        """Runs the script, with these environment variables, and returns what it said."""
        environment = {
            **os.environ,
            **variables,
            "ROLLOUT_BUFFER_DEVICE_RECORDS": str(self.records),
            "ROLLOUT_BUFFER_PORT_LOCKS": str(self.locks),
            "ROLLOUT_BUFFER_DEVICE_TMP": str(self.temporary),
        }
        command = [str(SCRIPT), "--config", str(self.folder / "config.yaml"), *options]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def program(self, *words: str, mark: str | None = None) -> int:
        """Starts a Python that prints a line when it is up; returns its id."""
        environment = {key: value for key, value in os.environ.items() if key != DEVICE_MARK}
        environment |= {} if mark is None else {DEVICE_MARK: mark, CHECKOUT_MARK: CHECKOUT}
        process = subprocess.Popen(
            [sys.executable, "-c", *words], stdout=subprocess.PIPE, env=environment, start_new_session=True
        )
        self.started.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process.pid

    def watchdog(self, avd: str, *, emulator: str = EMULATOR, port: int = 1, checkout: str = CHECKOUT) -> int:
        """Starts a watchdog with an emulator, and returns the emulator's id once it is on record."""
        command = [sys.executable, "-S", emulator_watchdog.__file__, str(self.records), avd, "/bin/true", str(port)]
        command += ["emulator-5554", "0.5", "--", sys.executable, "-c", emulator, "-avd", avd]
        environment = {**os.environ, CHECKOUT_MARK: checkout}
        # An owner that never lets go: its end of the pipe stays open until the test is over.
        self.started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment))
        wait_until(lambda: self.recorded("emulator", avd) is not None)
        return self.recorded("emulator", avd) or 0

    def recorded(self, kind: str, avd: str) -> int | None:
        for path in self.records.glob("[0-9]*-[0-9]*"):
            text = path.read_text()
            if f"kind={kind}\n" in text and f"avd={avd}\n" in text:
                return int(path.name.partition("-")[0])
        return None

    def record(self, kind: str, pid: int, *, avd: str, start: int | None = None, boot: str = BOOT) -> Path:
        path = self.records / f"{pid}-{start if start is not None else start_ticks_of(pid)}"
        facts = f"kind={kind}\navd={avd}\nserial=emulator-5554\nadb_port=1\nadb=adb\nboot={boot}\n"
        path.write_text(f"{facts}checkout={CHECKOUT}\n")
        return path

    def end(self) -> None:
        for process in self.started:
            process.kill()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
            process.wait()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path)
    yield made
    made.end()


def test_emulators_on_record_are_ended_with_their_guards(host: Host) -> None:
    willing, deaf = host.watchdog("cleanup_test_0"), host.watchdog("cleanup_test_1", emulator=DEAF)
    said = host.cleanup()
    assert "ending watchdog" in said
    wait_until(lambda: not is_alive(willing) and not is_alive(deaf))
    assert host.cleanup() == ""


def test_the_farm_of_another_checkout_stays_until_somebody_agrees(host: Host) -> None:
    """So do its clones, which carry the same names where both farms have the shipped settings."""
    foreign = host.watchdog("cleanup_test_0", checkout="/another/checkout")
    clone_avd(host.avd_home, "Base", "cleanup_test_0")
    with AvdOwnership(host.avd_home, "cleanup_test_0", Path("/another/checkout")):
        host.cleanup("--all")
        assert is_alive(foreign)
        assert (host.avd_home / "cleanup_test_0.avd").is_dir()

    host.cleanup("--all", "--yes")
    wait_until(lambda: not is_alive(foreign))
    assert not (host.avd_home / "cleanup_test_0.avd").exists()


def test_an_adb_server_that_came_with_an_emulator_is_on_record_and_ended(host: Host) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    host.watchdog("cleanup_test_0", port=port)
    server = subprocess.Popen([sys.executable, "-c", ADB_SERVER, str(port)], start_new_session=True)
    host.started.append(server)
    wait_until(lambda: host.recorded("adb_server", "cleanup_test_0") == server.pid)
    host.cleanup()
    assert server.wait(timeout=20) == -signal.SIGTERM


def test_what_only_looks_like_ours_survives(host: Host) -> None:
    """Same names, same arguments, recycled ids, another boot, other people's clones, a port that was ours once."""
    with socket.create_server(("127.0.0.1", 0)) as before:
        port = before.getsockname()[1]
    foreign_server = subprocess.Popen([sys.executable, "-c", ADB_SERVER, str(port)], start_new_session=True)
    host.started.append(foreign_server)
    decoys = {
        "an emulator of the same clone name without our mark": host.program(EMULATOR, "-avd", "cleanup_test_0"),
        "an emulator of another clone": host.program(EMULATOR, "-avd", "Pixel_6", mark="Pixel_6"),
        "a marked program that is no emulator": host.program(EMULATOR, "an-editor", mark="cleanup_test_0"),
        "a recycled id": host.program(EMULATOR),
        "an id of another boot": host.program(EMULATOR),
        "a record of another pattern": host.program(EMULATOR),
        "an adb server of somebody else": foreign_server.pid,
    }
    host.record(
        "emulator", decoys["a recycled id"], avd="cleanup_test_2", start=start_ticks_of(decoys["a recycled id"]) - 1
    )
    host.record("emulator", decoys["an id of another boot"], avd="cleanup_test_3", boot="another")
    host.record("emulator", decoys["a record of another pattern"], avd="somebody_elses_4")
    (host.records / "1-x").write_text("kind=emulator\navd=cleanup_test_5\n")
    host.cleanup("--all")
    assert {name: is_alive(pid) for name, pid in decoys.items()} == dict.fromkeys(decoys, True)


def test_a_dry_run_says_everything_and_does_nothing(host: Host) -> None:
    emulator = host.watchdog("cleanup_test_0")
    clone_avd(host.avd_home, "Base", "cleanup_test_0")
    said = host.cleanup("--all", "--dry-run")
    assert f"would end emulator {emulator} of cleanup_test_0" in said
    assert f"would remove {host.avd_home}/cleanup_test_0.avd" in said
    assert is_alive(emulator)
    assert (host.avd_home / "cleanup_test_0.avd").is_dir()


def test_only_clones_with_our_mark_are_removed_and_only_when_asked(host: Host) -> None:
    clone_avd(host.avd_home, "Base", "cleanup_test_0")
    (host.avd_home / "cleanup_test_1.avd").mkdir()  # fits the pattern, but is no clone of ours
    shutil.copytree(host.avd_home / "cleanup_test_0.avd", host.avd_home / "mine.avd")  # has the mark, but not the name
    (host.avd_home / "cleanup_test_2.avd").symlink_to(host.avd_home / "mine.avd")
    host.cleanup()
    assert (host.avd_home / "cleanup_test_0.avd").is_dir()
    host.cleanup("--avd")
    assert sorted(path.name for path in host.avd_home.iterdir()) == [
        "Base.avd", "cleanup_test_1.avd", "cleanup_test_2.avd", "mine.avd",
    ]  # fmt: skip


def test_all_removes_temporary_folders_and_locks_that_nobody_holds(host: Host) -> None:
    for name in ("rollout_buffer_device_0_abc", "rollout_buffer_android_world_11_x", "rollout_buffer_notes", "else"):
        (host.temporary / name).mkdir()
    (host.locks / "5554.lock").touch()
    held = host.locks / "5556.lock"
    holder = host.program(
        f"import fcntl, time; f = open({str(held)!r}, 'w'); fcntl.flock(f, 2); print(flush=True); time.sleep(99)"
    )
    host.cleanup("--all")
    assert sorted(path.name for path in host.temporary.iterdir()) == ["else", "rollout_buffer_notes"]
    assert [path.name for path in host.locks.iterdir()] == ["5556.lock"]
    assert is_alive(holder)
