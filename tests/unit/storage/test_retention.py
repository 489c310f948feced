"""Retention purges what was delivered long ago and nothing else; the quota refuses what is beyond it."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import orjson
import pytest

from slime_plugins.rollout_buffer import wire
from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.errors import NotFoundError, StorageFullError, UnavailableError
from slime_plugins.rollout_buffer.reporting.inspection import Inspection
from slime_plugins.rollout_buffer.reporting.job_description import describe_job
from slime_plugins.rollout_buffer.reporting.mismatch import trainer_rows_of
from slime_plugins.rollout_buffer.state.trainer_reports import store_report
from slime_plugins.rollout_buffer.storage import retention
from slime_plugins.rollout_buffer.storage.pack_writer import BlobRef
from slime_plugins.rollout_buffer.storage.payload_store import PendingPayload
from slime_plugins.rollout_buffer.storage.retention import Purged, purge, would_purge
from slime_plugins.rollout_buffer.storage.store import Store
from slime_plugins.rollout_buffer.storage.tables import image_rows
from slime_plugins.rollout_buffer.testing.clock import SettableClock
from slime_plugins.rollout_buffer.wire.trainer_reports import ReportedRow, TrainerReport
from tests.support import (
    PNG,
    PNG_HASH,
    delivered_items,
    poll,
    polled_delivery,
    slot_counts,
    start_external,
    uids,
    write,
    written,
)

BIG = "x" * 100_000


def with_screenshot(uid: str, instance_id: str, reward: float, shot: bytes = PNG) -> dict[str, Any]:
    image = {"type": "image_url", "image_url": {"url": wire.encode_data_uri(shot)}}
    messages = [{"role": "user", "content": [image, {"type": "text", "text": BIG}]}]
    return written(uid, instance_id, reward, messages=messages)


def packs(buffer: Buffer) -> int:
    return len(list(buffer.store.packs_dir.glob("*.pack")))


def test_what_was_delivered_long_ago_is_purged_and_keeps_its_accounting(buffer: Buffer, clock: SettableClock) -> None:
    job = start_external(buffer, job_id="j")
    write(buffer, job, with_screenshot("a0", "a", 0), with_screenshot("a1", "a", 1))
    poll(buffer, job)
    buffer.store._writer.close()  # as a process that ended
    clock.advance(100)
    assert purge(buffer.store, now=clock.now, retain_s=50) == Purged(payloads=2, images=1, packs=1)
    assert packs(buffer) == 0
    assert slot_counts(buffer, job)["delivered"] == 2
    assert describe_job(buffer.store, job)["outcomes"] == {"completed": 2}
    assert purge(buffer.store, now=clock.now, retain_s=50) == Purged(payloads=0, images=0, packs=0)


def test_log_probs_that_a_trainer_reported_go_with_the_bytes_of_their_trajectories(
    buffer: Buffer, clock: SettableClock
) -> None:
    job = start_external(buffer, job_id="j")
    turn = {"prompt_ids": [1], "output_ids": [2, 3], "output_log_probs": [-1.0, -1.0], "finish_reason": "stop"}
    write(buffer, job, written("a0", "a", 0, generations=[turn]), written("a1", "a", 1, generations=[turn]))
    poll(buffer, job)
    said = TrainerReport(rows=[ReportedRow(uid=uid, log_probs=[-1.0, -3.0]) for uid in ("a0", "a1")])
    assert store_report(buffer.store, "j", said, clock=clock)["kept"] == 2
    clock.advance(100)
    purge(buffer.store, now=clock.now, retain_s=200)
    (row,) = trainer_rows_of(buffer.store, "j", "a0").values()
    assert list(row.log_probs or ()) == [-1.0, -3.0]
    purge(buffer.store, now=clock.now, retain_s=50)
    (row,) = trainer_rows_of(buffer.store, "j", "a0").values()
    assert (row.log_probs, row.gap_max) == (None, 2.0)


def test_nothing_that_is_still_to_be_delivered_is_purged(buffer: Buffer, clock: SettableClock) -> None:
    job = start_external(buffer)
    write(buffer, job, with_screenshot("a0", "a", 0), with_screenshot("a1", "a", 1))
    clock.advance(1000)
    assert purge(buffer.store, now=clock.now, retain_s=1) == Purged(payloads=0, images=0, packs=0)
    polled_delivery(buffer, job, lease_s=10)
    assert purge(buffer.store, now=clock.now, retain_s=1).payloads == 0


def test_what_was_written_after_the_clock_was_set_back_is_kept_with_its_screenshots(
    buffer: Buffer, clock: SettableClock
) -> None:
    job = start_external(buffer)
    write(buffer, job, with_screenshot("a0", "a", 0), with_screenshot("a1", "a", 1))
    clock.advance(-500)
    write(buffer, job, with_screenshot("b0", "b", 0, PNG + b"b"))
    clock.advance(100)
    assert purge(buffer.store, now=clock.now, retain_s=50).images == 0


def test_what_was_delivered_just_now_stays_for_the_time_of_retention_however_old_it_is(
    buffer: Buffer, clock: SettableClock
) -> None:
    job = start_external(buffer)
    write(buffer, job, with_screenshot("a0", "a", 0), with_screenshot("a1", "a", 1))
    clock.advance(1000)
    delivery = polled_delivery(buffer, job)
    clock.advance(49)
    assert purge(buffer.store, now=clock.now, retain_s=50) == Purged(payloads=0, images=0, packs=0)
    assert all(BIG.encode() in body for _, body in delivered_items(buffer, delivery))
    clock.advance(2)
    assert purge(buffer.store, now=clock.now, retain_s=50).payloads == 2


def test_a_long_backlog_is_purged_in_short_transactions(
    buffer: Buffer, clock: SettableClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "PURGED_AT_ONCE", 1)
    job = start_external(buffer, 3)
    write(buffer, job, written("a0"), written("a1"), with_screenshot("a2", "i", 0))
    poll(buffer, job)
    clock.advance(100)
    with monkeypatch.context() as of_the_dry_run:
        of_the_dry_run.setattr(buffer.store, "write", Mock(side_effect=AssertionError("a dry run only reads")))
        would = would_purge(buffer.store, now=clock.now, retain_s=50)
    with buffer.store.write() as connection:
        first = retention._purge_rows(connection, clock.now, 50, 1)
    assert first == (1, 0, True), "the screenshots of payloads that are still there stay"
    rest = purge(buffer.store, now=clock.now, retain_s=50)
    assert (would.payloads, would.images) == (3, 1) == (1 + rest.payloads, rest.images)


def test_a_full_pack_may_go_before_its_last_row_is_written_and_then_the_row_is_refused(buffer: Buffer) -> None:
    pending = PendingPayload(BIG.encode(), [], {}, "item 'u'", "u")
    (stored,) = buffer.payloads.store([pending])
    buffer.store._writer.seal()
    assert purge(buffer.store, now=buffer.clock(), retain_s=50).packs == 1
    with pytest.raises(UnavailableError, match="write the item again"):
        buffer.store.commit(lambda connection: stored.record(connection, buffer.clock()))
    (stored,) = buffer.payloads.store([pending])
    buffer.store.commit(lambda connection: stored.record(connection, buffer.clock()))


def test_a_clock_that_is_set_back_makes_no_screenshot_older(buffer: Buffer) -> None:
    (sha256,), place = ["ab" * 32], BlobRef(1, 0, 1, b"12345678")
    with buffer.store.write() as connection:
        image_rows.insert_images(connection, {sha256: place}, 1000.0)
        image_rows.insert_images(connection, {sha256: place}, 500.0)
        image_rows.mark_images_used(connection, [sha256], 500.0)
        assert image_rows.purge_images(connection, 1000.0) == 0


def test_a_screenshot_lives_as_long_as_a_younger_trajectory_names_it(buffer: Buffer, clock: SettableClock) -> None:
    job = start_external(buffer)
    write(buffer, job, with_screenshot("a0", "a", 0), with_screenshot("a1", "a", 1))
    poll(buffer, job)
    clock.advance(100)
    write(buffer, job, with_screenshot("b0", "b", 0), with_screenshot("b1", "b", 1))
    poll(buffer, job)
    buffer.store._writer.close()
    assert purge(buffer.store, now=clock.now, retain_s=50) == Purged(payloads=2, images=0, packs=0)
    assert buffer.payloads.image(PNG_HASH) == PNG
    clock.advance(100)
    purge(buffer.store, now=clock.now, retain_s=50)
    with pytest.raises(NotFoundError):
        buffer.payloads.image(PNG_HASH)


def test_a_screenshot_that_was_purged_is_stored_again_when_it_comes_again(buffer: Buffer, clock: SettableClock) -> None:
    job = start_external(buffer)
    write(buffer, job, with_screenshot("a0", "a", 0), with_screenshot("a1", "a", 1))
    poll(buffer, job)
    buffer.store._writer.close()
    clock.advance(100)
    purge(buffer.store, now=clock.now, retain_s=50)
    write(buffer, job, with_screenshot("b0", "b", 0), with_screenshot("b1", "b", 1))
    delivery = polled_delivery(buffer, job)
    assert len(list(delivered_items(buffer, delivery))) == 2
    assert buffer.payloads.image(PNG_HASH) == PNG


def test_a_trainer_that_goes_back_further_than_retention_gets_what_is_left(
    buffer: Buffer, clock: SettableClock
) -> None:
    job = start_external(buffer, job_id="j")
    write(buffer, job, with_screenshot("a0", "a", 0), with_screenshot("a1", "a", 1))
    poll(buffer, job)
    clock.advance(100)
    write(buffer, job, with_screenshot("b0", "b", 0), with_screenshot("b1", "b", 1))
    poll(buffer, job)
    purge(buffer.store, now=clock.now, retain_s=50)
    start_external(buffer, job_id="j", skip_instance_ids=[], start_id="back to the start")
    assert uids(buffer, poll(buffer, job)) == ["b0", "b1"]
    assert slot_counts(buffer, job)["delivered"] == 4


@pytest.mark.parametrize("n", [2, 3])
def test_what_was_skipped_and_purged_is_not_delivered_to_a_trainer_that_goes_back(
    buffer: Buffer, clock: SettableClock, n: int
) -> None:
    job = start_external(buffer, n, job_id="j")
    write(buffer, job, with_screenshot("a0", "a", 0), with_screenshot("a1", "a", 1))
    start_external(buffer, n, job_id="j", skip_instance_ids=["a"], start_id="a checkpoint")
    clock.advance(100)
    assert purge(buffer.store, now=clock.now, retain_s=50).payloads == 2
    start_external(buffer, n, job_id="j", skip_instance_ids=[], start_id="back to the start")
    assert poll(buffer, job) is None
    assert slot_counts(buffer, job)["skipped"] == n


def test_a_write_beyond_the_quota_is_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    buffer = Buffer(Store(tmp_path / "data", max_bytes=500_000))
    job = start_external(buffer, n=50)
    stored = []
    refusal = None
    for number in range(50):
        buffer.store._used_bytes = (0.0, 0)  # look again at once
        try:
            write(buffer, job, written(f"u{number}", messages=[{"role": "user", "content": BIG + str(number)}]))
        except StorageFullError as error:
            refusal = error
            break
        stored.append(f"u{number}")
    assert "--max-data-bytes" in str(refusal)
    assert stored
    assert buffer.count_trajectories(job.key) == len(stored)
    assert all(Inspection(buffer.store).trajectory(uid, None).body for uid in stored)
    buffer.store.close()


def test_what_was_purged_comes_as_a_dummy_that_says_so_and_never_looks_played(
    buffer: Buffer, clock: SettableClock
) -> None:
    job = start_external(buffer, 2)
    write(buffer, job, written("a"), written("b", reward=0.0))
    asked = {"consumer_id": "c", "poll_id": "p"}
    assert uids(buffer, poll(buffer, job, **asked)) == ["a", "b"]
    clock.advance(100.0)
    assert purge(buffer.store, now=clock.now, retain_s=50.0).payloads == 2
    again = poll(buffer, job, **asked)  # whoever lost the reply asks once more
    assert again is not None
    for light, body in delivered_items(buffer, again):
        assert (light["remove_sample"], light["outcome"], light["reward"]) == (True, "failed", 0.0)
        assert "was purged" in orjson.loads(body)["extra_info"]["error"]
    assert describe_job(buffer.store, job)["damaged"] == 0, "the disk is not at fault"
