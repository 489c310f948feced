"""Clones of virtual devices: from bases as emulators leave them, with disks that stand on other disks."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from slime_plugins.rollout_buffer.errors import ConfigError, DeviceError
from slime_plugins.rollout_buffer.generator.android_world.emulator import avd_clones
from slime_plugins.rollout_buffer.generator.android_world.emulator.avd_clones import (
    CHECKOUT,
    CopyLimits,
    clone_avd,
    running_emulator,
)
from slime_plugins.rollout_buffer.generator.android_world.emulator.avd_ownership import AvdOwnership
from slime_plugins.rollout_buffer.generator.android_world.emulator.disk_overlays import backing_file
from tests.processes import is_alive, write_program
from tests.waiting import wait_until

CLUSTER = 65536


@pytest.fixture
def home(tmp_path: Path) -> Path:
    base = tmp_path / "avd" / "Base.avd"
    base.mkdir(parents=True)
    (base / "config.ini").write_text("AvdId=Base\n")
    (base / "userdata-qemu.img").write_bytes(b"data" * 1000)
    (base.parent / "Base.ini").write_text(f"path={base}\ntarget=android-33\n")
    return base.parent


def write_overlay(path: Path, backing: str) -> None:
    """A qcow2 file as ``qemu-img create -b`` begins it: header, and the name in the first cluster."""
    name = backing.encode()
    head = struct.pack(">4sIQIIQ", b"QFI\xfb", 3, 600, len(name), 16, 1 << 30)
    path.write_bytes((head.ljust(600, b"\0") + name).ljust(CLUSTER, b"\0") + b"blocks")


def exited() -> int:
    child = subprocess.Popen([sys.executable, "-S", "-c", ""])
    child.wait()
    return child.pid


# ---- running or not --------------------------------------------------------------------------------------------------


def test_a_base_that_was_booted_and_stopped_is_cloned_without_its_locks(home: Path) -> None:
    base = home / "Base.avd"
    (base / "multiinstance.lock").touch()
    (base / "hardware-qemu.ini.lock").write_text(f"{exited()}")
    assert running_emulator(base) is None
    clone_avd(home, "Base", "clone_0")
    assert sorted(path.name for path in (home / "clone_0.avd").iterdir()) == [
        "config.ini",
        "rollout_buffer_clone_of",
        "userdata-qemu.img",
    ]


def test_a_process_that_started_after_the_lock_was_written_is_not_the_one_that_runs_the_base(home: Path) -> None:
    lock = home / "Base.avd" / "hardware-qemu.ini.lock"
    lock.write_text(f"{os.getpid()}")
    assert running_emulator(home / "Base.avd") == os.getpid()
    os.utime(lock, (0, 0))
    assert running_emulator(home / "Base.avd") is None


# ---- disks on disks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["{base}/userdata-qemu.img", "userdata-qemu.img", "../Base.avd/userdata-qemu.img"])
def test_an_overlay_leads_to_the_clones_own_disk_however_it_named_it(home: Path, form: str) -> None:
    base = home / "Base.avd"
    write_overlay(base / "userdata-qemu.img.qcow2", form.format(base=base))
    clone_avd(home, "Base", "clone_0")
    overlay = home / "clone_0.avd" / "userdata-qemu.img.qcow2"
    assert backing_file(overlay) == "userdata-qemu.img"
    original = (base / overlay.name).read_bytes()
    assert overlay.read_bytes()[CLUSTER:] == original[CLUSTER:] == b"blocks"
    assert backing_file(base / overlay.name) == form.format(base=base)


@pytest.mark.parametrize("name", ["Mine", "Base"])
def test_a_device_that_is_no_clone_of_ours_is_never_overwritten(home: Path, name: str) -> None:
    own = home / f"{name}.avd" / "userdata.img"
    own.parent.mkdir(exist_ok=True)
    own.write_bytes(b"years of work")
    with pytest.raises(ConfigError, match=f"{name}.avd exists already and is no clone"):
        clone_avd(home, "Base", name)
    assert own.read_bytes() == b"years of work"


# ---- cut off, limited ------------------------------------------------------------------------------------------------


def test_a_copy_that_was_cut_off_goes_on_with_what_is_missing(home: Path) -> None:
    (home / "Base.avd" / "zzz.img").write_bytes(b"last")
    clone_avd(home, "Base", "clone_0")
    clone = home / "clone_0.avd"
    kept = (clone / "userdata-qemu.img").stat().st_ino
    (clone / "rollout_buffer_clone_of").write_text("")  # as it is while it is being made
    (clone / "zzz.img").rename(clone / "zzz.img.rollout_buffer_part")
    (clone / "rubbish").mkdir()
    (clone / "rubbish" / "file").touch()
    clone_avd(home, "Base", "clone_0")
    assert (clone / "userdata-qemu.img").stat().st_ino == kept
    assert (clone / "zzz.img").read_bytes() == b"last"
    assert not (clone / "rubbish").exists()
    assert list(clone.glob("*_part")) == []


def test_a_clone_is_made_again_once_its_base_has_changed(home: Path) -> None:
    clone_avd(home, "Base", "clone_0")
    used = home / "clone_0.avd" / "userdata-qemu.img"
    used.write_bytes(b"used")
    (home / "Base.avd" / "forwarder.apk").touch()
    clone_avd(home, "Base", "clone_0")
    assert (home / "clone_0.avd" / "forwarder.apk").exists()
    assert used.read_bytes() == b"data" * 1000


# ---- one owner -------------------------------------------------------------------------------------------------------


def test_nothing_is_copied_into_a_clone_that_somebody_uses(home: Path) -> None:
    clone_avd(home, "Base", "clone_0")
    (home / "Base.avd" / "userdata-qemu.img").write_bytes(b"other" * 1000)
    used = f"clone_0 is in use by process {os.getpid()} .started at tick [0-9]+. of /another/checkout"
    with AvdOwnership(home, "clone_0", Path("/another/checkout")), pytest.raises(DeviceError, match=used):
        clone_avd(home, "Base", "clone_0")
    assert (home / "clone_0.avd" / "userdata-qemu.img").read_bytes() == b"data" * 1000
    clone_avd(home, "Base", "clone_0")
    assert (home / "clone_0.avd" / "userdata-qemu.img").read_bytes() == b"other" * 1000


WORKER = """
import pathlib, subprocess, sys
from slime_plugins.rollout_buffer.generator.android_world.emulator.avd_ownership import AvdOwnership
owner = AvdOwnership(pathlib.Path(sys.argv[1]), "clone_0", pathlib.Path("/checkout"))
guard = subprocess.Popen(["sleep", "60"], pass_fds=(owner.fileno(),), stdout=subprocess.DEVNULL)
print(guard.pid, flush=True)
sys.stdin.read()
"""


def test_a_device_outlives_its_killed_worker_with_whoever_guards_its_emulator(home: Path) -> None:
    command = [sys.executable, "-c", WORKER, str(home)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        guard = int(worker.stdout.readline())
        worker.kill()
    with pytest.raises(DeviceError, match=f"in use by process {worker.pid} "):
        AvdOwnership(home, "clone_0", CHECKOUT)
    os.kill(guard, signal.SIGKILL)
    wait_until(lambda: not is_alive(guard))
    AvdOwnership(home, "clone_0", CHECKOUT).release()


def test_no_more_are_copied_at_once_than_allowed_and_all_are_made(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = slow_cp(home, monkeypatch, seconds=0.05)
    limits = CopyLimits(at_once=3)
    copies = [threading.Thread(target=clone_avd, args=(home, "Base", f"clone_{n}", limits)) for n in range(6)]
    for copy in copies:
        copy.start()
    for copy in copies:
        copy.join(timeout=120)
    assert all((home / f"clone_{number}.avd" / "userdata-qemu.img").is_file() for number in range(6))
    under_way = most = 0
    for line in log.read_text().splitlines():
        under_way += 1 if line == "begins" else -1
        most = max(most, under_way)
    assert 1 <= most <= 3


def test_a_copy_ends_with_the_worker_that_made_it(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = slow_cp(home, monkeypatch, seconds=3600)
    imports = f"import sys; from pathlib import Path; from {avd_clones.__name__} import clone_avd"
    program = f"{imports}; clone_avd(Path(sys.argv[1]), 'Base', 'c')"
    worker = subprocess.Popen([sys.executable, "-c", program, str(home)])
    wait_until(lambda: log.exists() and (home / "pid").exists() and (home / "pid").read_text().strip() != "")
    copying = int((home / "pid").read_text())
    worker.kill()
    worker.wait()
    wait_until(lambda: not is_alive(copying))


def slow_cp(home: Path, monkeypatch: pytest.MonkeyPatch, *, seconds: float) -> Path:
    """Puts a ``cp`` before the real one that takes its time and writes down when it begins and ends."""
    folder, log = home.parent / "bin", home.parent / "log"
    wait = f"exec sleep {seconds}" if seconds > 1 else f"sleep {seconds}"  # what never ends has no child of its own
    write_program(
        folder / "cp", f'echo $$ > {home}/pid\necho begins >> {log}\n{wait}\n/bin/cp "$@"\necho ends >> {log}'
    )
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return log
