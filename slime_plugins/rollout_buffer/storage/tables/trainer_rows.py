"""Rows of ``trainer_rows``: a trainer's report on a training row."""

from __future__ import annotations

import json
import sqlite3
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from slime_plugins.rollout_buffer.storage.tables.connection import Connection, as_record

_COLUMNS = (
    "uid, row, step, reported_at, advantage, entropy, loss_share, clip_share, compared, gap_sum, gap_max, turns, "
    "log_probs"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnGap:
    """|train - rollout log-prob| in one turn: the sum and the maximum over its ``compared`` tokens.

    ``at`` is the index of the token with the largest difference among the trained tokens of the row.
    """

    turn: int
    weight_lag: int | None
    compared: int
    gap_sum: float
    gap_max: float
    at: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerRow:
    """A trainer's report on one training row. ``log_probs`` are those of its trained tokens, in order."""

    uid: str
    row: int
    step: int | None
    reported_at: float
    advantage: float | None
    entropy: float | None
    loss_share: float | None
    clip_share: float | None
    turns: tuple[TurnGap, ...]
    log_probs: Sequence[float] | None

    @property
    def compared(self) -> int:
        """Tokens with a log-prob of both trainer and engine."""
        return sum(turn.compared for turn in self.turns)

    @property
    def gap_sum(self) -> float:
        """Sum of |train - rollout log-prob|."""
        return sum(turn.gap_sum for turn in self.turns)

    @property
    def gap_max(self) -> float | None:
        """Largest |train - rollout log-prob|; None if no token was compared."""
        return max((turn.gap_max for turn in self.turns), default=None)


def insert_rows(connection: Connection, job_key: int, rows: Sequence[TrainerRow]) -> None:
    """Adds reports, in place of earlier ones on the same rows."""
    connection.executemany(
        f"INSERT OR REPLACE INTO trainer_rows (job_key, {_COLUMNS}) VALUES ({', '.join('?' * 14)})",
        [
            (
                *(job_key, row.uid, row.row, row.step, row.reported_at, row.advantage, row.entropy, row.loss_share),
                *(row.clip_share, row.compared, row.gap_sum, row.gap_max),
                json.dumps([astuple(turn) for turn in row.turns]),
                None if row.log_probs is None else zlib.compress(array("f", row.log_probs).tobytes()),
            )
            for row in rows
        ],
    )


def rows_of_trajectory(connection: Connection, job_key: int, uid: str) -> list[TrainerRow]:
    """Returns the reports on a trajectory's rows, in order."""
    query = f"SELECT {_COLUMNS} FROM trainer_rows WHERE job_key = ? AND uid = ? ORDER BY row"
    return [_as_row(row) for row in connection.execute(query, (job_key, uid))]


def rows_of_job(connection: Connection, job_key: int, limit: int) -> list[TrainerRow]:
    """Returns reports on rows with compared tokens, largest gap first, without log-probs."""
    query = (
        f"SELECT {_COLUMNS.replace('log_probs', 'NULL AS log_probs')} FROM trainer_rows "
        "WHERE job_key = ? AND compared > 0 ORDER BY gap_max DESC LIMIT ?"
    )
    return [_as_row(row) for row in connection.execute(query, (job_key, limit))]


def purge_log_probs(connection: Connection, before: float) -> None:
    """Deletes the log-probs of reports before a time; statistics stay."""
    connection.execute(
        "UPDATE trainer_rows SET log_probs = NULL WHERE log_probs IS NOT NULL AND reported_at < ?", (before,)
    )


def gap_statistics(connection: Connection, job_key: int) -> dict[str, float]:
    """Returns mean and max of |train - rollout log-prob| over all compared tokens of a job; {} without any."""
    query = "SELECT sum(compared), sum(gap_sum), max(gap_max) FROM trainer_rows WHERE job_key = ?"
    compared, total, largest = connection.execute(query, (job_key,)).fetchone()
    return {"mean": float(total) / compared, "max": float(largest)} if compared else {}


def _as_row(row: sqlite3.Row) -> TrainerRow:
    blob = row["log_probs"]
    turns = tuple(
        TurnGap(turn=turn, weight_lag=lag, compared=compared, gap_sum=total, gap_max=largest, at=at)
        for turn, lag, compared, total, largest, at in json.loads(row["turns"])
    )
    log_probs = None if blob is None else array("f", zlib.decompress(blob))
    return as_record(TrainerRow, row, turns=turns, log_probs=log_probs)
