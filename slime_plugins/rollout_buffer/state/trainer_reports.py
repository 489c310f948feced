"""Compares the trainer's log-probs of trained rows with the engine's.

The difference |train - rollout log-prob| is the first measure that grows if masks, weight versions or numerics are
wrong. Grouped by turn, it shows in which turn the trainer's context differs. Grouped by weight lag, it shows which
tokens are too far off-policy.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import orjson

from slime.utils.mask_rows import Generation, TrainingRow, pack_training_rows
from slime_plugins.rollout_buffer import wire
from slime_plugins.rollout_buffer.errors import DamagedError
from slime_plugins.rollout_buffer.state.job_lookup import find_job
from slime_plugins.rollout_buffer.storage.store import Store
from slime_plugins.rollout_buffer.storage.tables import payload_rows, trainer_rows, trajectory_rows
from slime_plugins.rollout_buffer.storage.tables.trainer_rows import TrainerRow, TurnGap
from slime_plugins.rollout_buffer.types import version_number
from slime_plugins.rollout_buffer.wire.trainer_reports import ReportedRow, TrainerReport
from slime_plugins.rollout_buffer.wire.trajectory_replies import RefusedRow, TrainerRowsKept


def store_report(
    store: Store, job_id: str, report: TrainerReport, *, clock: Callable[[], float] = time.time
) -> TrainerRowsKept:
    """Stores a trainer's report; rows that do not match their trajectory are refused with a reason.

    Raises:
        NotFoundError: there is no such job.
        StorageFullError: the disk is full, or the quota used up.
    """
    store.check_room()
    accepted: list[TrainerRow] = []
    refused: list[RefusedRow] = []
    with store.read() as connection:
        job = find_job(connection, job_id)
        payloads = {
            uid: payload_rows.payload_of(connection, job.key, uid)
            for uid in {row.uid for row in report.rows}
            if trajectory_rows.has_trajectory(connection, job.key, uid)
        }
    newest = report.weight_version if report.weight_version is not None else job.weight_version
    rows_by_uid: dict[str, tuple[Sequence[Generation], Sequence[TrainingRow]]] = {}
    for row in report.rows:
        try:
            row.check_numbers()
            if row.uid not in payloads:
                raise ValueError("the job has no trajectory of that uid")
            if row.uid not in rows_by_uid:
                rows_by_uid[row.uid] = _rows_of(store.get_payload(*payloads[row.uid]))
            turns = compare(row, *rows_by_uid[row.uid], newest)
            accepted.append(TrainerRow(**dict(row), step=report.step, reported_at=clock(), turns=turns))
        except (ValueError, DamagedError) as error:
            refused.append(RefusedRow(uid=row.uid, row=row.row, reason=str(error)))
    if accepted:
        with store.write() as connection:
            trainer_rows.insert_rows(connection, job.key, accepted)
    return TrainerRowsKept(kept=len(accepted), refused=refused)


def compare(
    reported: ReportedRow, generations: Sequence[Generation], rows: Sequence[TrainingRow], newest: int | None
) -> tuple[TurnGap, ...]:
    """Returns |train - rollout log-prob| by turn; () if trainer or engine have no log-probs.

    ``newest`` is the weight version that the trainer computed its log-probs with, None if unknown.

    Raises:
        ValueError: there is no such row, or ``log_probs`` has more or fewer numbers than the row has trained tokens.
    """
    if reported.log_probs is None:
        return ()
    if not rows:
        return ()  # the trainer rebuilt the row from messages: its tokens are not known here
    if reported.row >= len(rows):
        raise ValueError("it has no training row of that number")
    row = rows[reported.row]
    trained = [index for index in row.generation_indices if generations[index].is_trained]
    lengths = [len(generations[index].output_ids) for index in trained]
    if sum(row.loss_mask) != sum(lengths) or len(reported.log_probs) != sum(lengths):
        raise ValueError(f"it trains {sum(row.loss_mask)} tokens, and log_probs has {len(reported.log_probs)}")
    gaps, start = [], 0
    for index, length in zip(trained, lengths, strict=True):
        turn = generations[index]
        theirs = reported.log_probs[start : start + length]
        if turn.output_log_probs is not None and length:
            gap = [abs(train - rollout) for train, rollout in zip(theirs, turn.output_log_probs, strict=True)]
            worst = max(range(length), key=gap.__getitem__)
            gaps.append(
                TurnGap(
                    turn=index,
                    weight_lag=_lag(turn, newest),
                    compared=length,
                    gap_sum=math.fsum(gap),
                    gap_max=gap[worst],
                    at=start + worst,
                )
            )
        start += length
    return tuple(gaps)


def _rows_of(payload: bytes) -> tuple[Sequence[Generation], Sequence[TrainingRow]]:
    generations = wire.decode_generations(orjson.loads(payload).get("generations"))
    return generations, pack_training_rows(generations)


def _lag(turn: Generation, newest: int | None) -> int | None:
    version = version_number(turn.weight_version)
    return None if newest is None or version is None else newest - version
