"""A power cut: whatever the disk had not been told to keep is gone, and everything that was acknowledged is there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.state.recovery import recover
from slime_plugins.rollout_buffer.storage.store import Store
from tests.small_disks import mounted_ext4
from tests.stored_bytes import find_damage
from tests.support import poll, slot_counts, uids

pytestmark = pytest.mark.timeout(240)

WRITER = """
import sys
from pathlib import Path
from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.storage.store import Store
from tests.support import start_external, write
from tests.unit.storage.test_packs import episode, shot
buffer = Buffer(Store(Path(sys.argv[1])))
job = start_external(buffer, 1, job_id="j")
number = 0
while True:
    small = number % 3 == 0
    item = episode(f"u{number}", f"i{number}", shots=[] if small else [shot(number)])
    if small:
        item["messages"] = [{"role": "user", "content": "small"}]
    assert write(buffer, job, item) == ["stored"]
    print(f"u{number}", flush=True)
    number += 1
"""


def cut(disk: Path, image: Path, copy: Path, acknowledged: int) -> list[str]:
    """Copies the disk as it is while somebody writes; returns what had been acknowledged before.

    What a process wrote and nobody flushed is in memory alone, and not in the copy.
    """
    command = [sys.executable, "-c", WRITER, str(disk / "data")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        known = [writer.stdout.readline().strip() for _ in range(acknowledged)]
        os.kill(writer.pid, signal.SIGSTOP)  # wherever it is; nothing may change while the file is copied
        copy_still_file(image, copy)
        writer.kill()
    return known


def copy_still_file(source: Path, target: Path) -> None:
    """Copies a file, again until nothing was written to it meanwhile."""
    before = b""
    while (content := source.read_bytes()) != before:
        before = content
    target.write_bytes(content)


@pytest.mark.slow
@pytest.mark.parametrize("acknowledged", [7, 121])
def test_what_was_acknowledged_is_there_after_a_power_cut(tmp_path: Path, acknowledged: int) -> None:
    image, copy = tmp_path / "disk.img", tmp_path / "after.img"
    with mounted_ext4(image, tmp_path / "disk", megabytes=96) as disk:
        known = cut(disk, image, copy, acknowledged)
    assert known == [f"u{number}" for number in range(acknowledged)]
    with mounted_ext4(copy, tmp_path / "after") as disk:
        buffer = Buffer(Store(disk / "data"))
        assert recover(buffer.store).damaged == []
        assert list(find_damage(buffer.store)) == []
        job = buffer.job("j")
        assert slot_counts(buffer, job)["ready"] >= acknowledged
        assert uids(buffer, poll(buffer, job))[:acknowledged] == known
        buffer.store.close()


@pytest.mark.slow
def test_the_test_would_notice_bytes_that_were_not_flushed(tmp_path: Path) -> None:
    image, copy = tmp_path / "disk.img", tmp_path / "after.img"
    with mounted_ext4(image, tmp_path / "disk", megabytes=32) as disk:
        (disk / "flushed").write_bytes(b"a" * 100_000)
        os.sync()
        (disk / "not flushed").write_bytes(b"b" * 100_000)
        copy_still_file(image, copy)
    with mounted_ext4(copy, tmp_path / "after") as disk:
        assert (disk / "flushed").read_bytes() == b"a" * 100_000
        assert not (disk / "not flushed").exists() or (disk / "not flushed").read_bytes() != b"b" * 100_000
