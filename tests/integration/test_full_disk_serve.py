"""``rollout-buffer serve`` on a disk that fills up under it: refused writes, and everything else as ever."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import requests

from tests.integration.conftest import BufferProcess
from tests.small_disks import fill, make_read_only, mounted, mounted_ext4
from tests.support import written
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def on_a_small_disk(tmp_path: Path) -> Iterator[BufferProcess]:
    """A buffer with twelve groups ready, whose data directory is all there is on a disk of 64 MiB."""
    with mounted(tmp_path / "data", megabytes=64):
        buffer = BufferProcess(tmp_path)
        buffer.client.start_rollout({"task_type": "external", "num_repeat_per_sample": 1, "job_id": "j"})
        for number in range(12):
            assert status_of_write(buffer, f"u{number}") == 200
        yield buffer
        buffer.stop()


def status_of_write(buffer: BufferProcess, uid: str) -> int:
    return requests.post(f"{buffer.url}/buffer/write", json=written(uid, uid), timeout=30).status_code


def write_much(buffer: BufferProcess, uid: str) -> int:
    item = written(uid, uid, messages=[{"role": "user", "content": uid * (1024 * 1024 // len(uid))}])
    return requests.post(f"{buffer.url}/buffer/write", json=item, timeout=30).status_code


def take(buffer: BufferProcess, count: int) -> list[str]:
    data = buffer.client.get_rollout_data(job_id="j", lease_s=60, max_groups=count)
    assert buffer.client.ack([data.meta_info["delivery_id"]])["acked"]
    return [item.uid for item in data.items]


@pytest.mark.slow
def test_a_disk_that_is_full_to_the_last_byte_ends_nothing(on_a_small_disk: BufferProcess, tmp_path: Path) -> None:
    buffer = on_a_small_disk
    fill(tmp_path / "data")
    assert status_of_write(buffer, "refused") == 507
    report = requests.get(f"{buffer.url}/health", timeout=30)
    assert (report.status_code, report.json()["status"]) == (200, "degraded")
    assert "full" in report.json()["reason"]
    assert take(buffer, 2) == ["u0", "u1"]
    buffer.kill_server()
    assert take(buffer, 2) == ["u2", "u3"]
    buffer.kill_supervisor()
    buffer.start()
    assert status_of_write(buffer, "refused") == 507
    assert take(buffer, 2) == ["u4", "u5"]
    (tmp_path / "data" / "ballast").unlink()
    wait_until(lambda: status_of_write(buffer, "later") == 200, 30, "a write that is taken again")
    assert take(buffer, 20) == [*(f"u{number}" for number in range(6, 12)), "later"]


@pytest.mark.slow
def test_at_the_quota_polls_go_on_and_what_is_forgotten_makes_room(start_buffer: Callable[..., BufferProcess]) -> None:
    buffer = start_buffer("--max-data-bytes", str(40 * 1024 * 1024))
    buffer.client.start_rollout({"task_type": "external", "num_repeat_per_sample": 1, "job_id": "j"})
    written_until_full = []
    for number in range(300):  # what is used is looked up once a second: a fast machine writes a little more
        status = write_much(buffer, f"u{number:03}")
        if status == 507:
            break
        assert status == 200
        written_until_full.append(f"u{number:03}")
    assert 20 < len(written_until_full) < 300
    assert take(buffer, 300) == written_until_full, "polls and acknowledgements go on"
    assert write_much(buffer, "still full") == 507
    prune = ["prune", "--older-than", "0.1s", "--data-dir", str(buffer.folder / "data")]
    subprocess.run([sys.executable, "-m", "slime_plugins.rollout_buffer", *prune], check=True)
    wait_until(lambda: write_much(buffer, "later") == 200, 30, "a write that is taken again")
    assert take(buffer, 100) == ["later"]


def test_a_server_that_dies_on_a_disk_that_only_reads_comes_back_and_reads(tmp_path: Path) -> None:
    with mounted_ext4(tmp_path / "image", tmp_path / "disk", megabytes=96) as disk:
        (tmp_path / "data").symlink_to(disk)
        buffer = BufferProcess(tmp_path)
        try:
            buffer.client.start_rollout({"task_type": "external", "num_repeat_per_sample": 1, "job_id": "j"})
            assert status_of_write(buffer, "kept") == 200
            make_read_only(disk)
            assert status_of_write(buffer, "refused") == 503
            buffer.kill_server()
            assert buffer.client.trajectory("kept")["uid"] == "kept"
            assert buffer.client.job("j")["job_id"] == "j"
            assert status_of_write(buffer, "refused again") == 503
            health = requests.get(f"{buffer.url}/health", timeout=10)
            assert health.json()["status"] == "degraded"
            assert "is read-only: the kernel" in health.json()["reason"]
            buffer.kill_supervisor()
            buffer.start()  # and so does a supervisor
            assert buffer.client.trajectory("kept")["uid"] == "kept"
            assert status_of_write(buffer, "refused again") == 503
        finally:
            buffer.stop()
