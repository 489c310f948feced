"""The mismatch of log-probs between a job's trainer and engine: the worst turns, and means by turn and weight lag."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from slime_plugins.rollout_buffer.state.job_lookup import find_job
from slime_plugins.rollout_buffer.storage.store import Store
from slime_plugins.rollout_buffer.storage.tables import trainer_rows
from slime_plugins.rollout_buffer.storage.tables.trainer_rows import TrainerRow, TurnGap
from slime_plugins.rollout_buffer.wire.trajectory_replies import LagMismatch, MeanGap, Mismatch, TurnMismatch, WorstTurn

MAX_ROWS = 5000
"""Maximum number of rows that are read; those with the largest gaps come first."""


def describe_mismatch(store: Store, job_id: str, limit: int) -> Mismatch:
    """Returns |train - rollout log-prob| of a job: over all, by turn, by weight lag, and its worst turns.

    Raises:
        NotFoundError: there is no such job.
    """
    with store.read() as connection:
        job = find_job(connection, job_id)
        rows = trainer_rows.rows_of_job(connection, job.key, MAX_ROWS)
        overall = trainer_rows.gap_statistics(connection, job.key)
    turns = [(row, turn) for row in rows for turn in row.turns]
    by_turn = _mean_gaps(turns, lambda turn: turn.turn)
    by_lag = _mean_gaps(turns, lambda turn: turn.weight_lag)
    worst = sorted(turns, key=lambda pair: pair[1].gap_max, reverse=True)[:limit]
    return Mismatch(
        job_id=job.job_id,
        rows=len(rows),
        tokens=sum(turn.compared for _, turn in turns),
        mean=overall.get("mean"),
        max=overall.get("max"),
        by_turn=[TurnMismatch(**gap, turn=turn) for turn, gap in by_turn],
        by_weight_lag=[LagMismatch(**gap, weight_lag=lag) for lag, gap in by_lag],
        worst=[_worst(row, turn) for row, turn in worst],
    )


def trainer_rows_of(store: Store, job_id: str, uid: str) -> dict[int, TrainerRow]:
    """Returns the trainer's reports of a trajectory's rows, by row number."""
    with store.read() as connection:
        job = find_job(connection, job_id)
        return {row.row: row for row in trainer_rows.rows_of_trajectory(connection, job.key, uid)}


def describe_trainer_row(row: TrainerRow) -> dict[str, Any]:
    """Encodes the trainer's report of a row; ``log_probs`` are those of the row's trained tokens, in order."""
    shown = {name: getattr(row, name) for name in ("step", "advantage", "entropy", "loss_share", "clip_share")}
    return {**shown, "log_probs": None if row.log_probs is None else list(row.log_probs)}


Key = TypeVar("Key", int, int | None)


def _mean_gaps(
    turns: Iterable[tuple[TrainerRow, TurnGap]], key_of: Callable[[TurnGap], Key]
) -> Iterator[tuple[Key, MeanGap]]:
    """Yields the keys in order, None last, each with the mean and the largest gap over its turns."""
    turns_by_key: dict[Key, list[TurnGap]] = {}
    for _, turn in turns:
        turns_by_key.setdefault(key_of(turn), []).append(turn)
    for key, members in sorted(turns_by_key.items(), key=lambda entry: (entry[0] is None, entry[0])):
        tokens = sum(turn.compared for turn in members)
        mean = sum(turn.gap_sum for turn in members) / tokens
        yield key, MeanGap(tokens=tokens, mean=mean, max=max(turn.gap_max for turn in members))


def _worst(row: TrainerRow, turn: TurnGap) -> WorstTurn:
    return WorstTurn(
        uid=row.uid,
        row=row.row,
        turn=turn.turn,
        at=turn.at,
        gap=turn.gap_max,
        mean=turn.gap_sum / turn.compared,
        weight_lag=turn.weight_lag,
        advantage=row.advantage,
        step=row.step,
    )
