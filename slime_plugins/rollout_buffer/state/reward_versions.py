"""Scores stored trajectories again, as a new version of their rewards; past deliveries can be read with any version.

A judge that fails or times out is retried; a final failure is reported with its error and is never a reward. Each score
is stored as soon as it is known; scoring again under the same name continues with the missing scores.
"""

from __future__ import annotations

import logging
import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

import orjson

from slime_plugins.rollout_buffer import wire
from slime_plugins.rollout_buffer.errors import (
    ConflictError,
    DamagedError,
    InvalidPayloadError,
    JudgeError,
    NotFoundError,
)
from slime_plugins.rollout_buffer.rules.backoff import backoff_s
from slime_plugins.rollout_buffer.rules.validity import as_reward
from slime_plugins.rollout_buffer.state.job_lookup import find_job
from slime_plugins.rollout_buffer.storage.payload_store import Pieces
from slime_plugins.rollout_buffer.storage.store import Store
from slime_plugins.rollout_buffer.storage.tables import delivery_rows, job_rows, payload_rows, reward_rows
from slime_plugins.rollout_buffer.storage.tables.reward_rows import Score, UnscoredTrajectory
from slime_plugins.rollout_buffer.wire.written_items import encode_turn_rewards

logger = logging.getLogger(__name__)

FIRST_SCORING_PAUSE_S = 0.5
MAX_SCORING_PAUSE_S = 30.0
TRAJECTORIES_PER_JUDGE = 4
"""Number of trajectories that are read at a time for each running judge."""

Judge = Callable[[dict[str, Any]], Any]
"""Takes a stored trajectory; returns a number, or an object with ``reward`` and perhaps ``turn_rewards``."""
Scores = Mapping[tuple[int, str], Score]
"""Scores of the played members of a delivery, by group and uid."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RescoreSettings:
    """Retries of a judge, its timeout, and the number of concurrent calls."""

    retries: int = 3
    timeout_s: float = 60.0
    at_once: int = 8


@dataclass(kw_only=True, slots=True)
class RescoreReport:
    """Numbers of scored trajectories. ``failures`` counts errors by message; failed ones have no reward."""

    job_id: str
    version: int
    name: str
    scored: int = 0
    failures: Counter[str] = field(default_factory=Counter)


def rescore(
    store: Store,
    job_id: str,
    judge: Judge,
    *,
    name: str,
    scorer: str,
    settings: RescoreSettings = RescoreSettings(),
    pause: Callable[[float], object] = time.sleep,
) -> RescoreReport:
    """Scores every trajectory of a job without a reward of the version ``name``, which is created if necessary.

    Raises:
        NotFoundError: there is no such job.
        StorageFullError: the disk is full.
    """
    store.check_room()
    with store.write() as connection:
        job = find_job(connection, job_id)
        version = reward_rows.open_version(connection, job.key, name, scorer, store.clock())
    with store.read() as connection:
        unscored = reward_rows.unscored(connection, job.key, version)
    report = RescoreReport(job_id=job_id, version=version, name=name)

    def score_or_error(row: UnscoredTrajectory) -> Score | Exception:
        try:
            return _score_with_retries(judge, _trajectory(store, job.key, row), settings, pause)
        except (JudgeError, DamagedError) as error:
            return error

    with ThreadPoolExecutor(settings.at_once, thread_name_prefix="judge") as pool:
        part_size = settings.at_once * TRAJECTORIES_PER_JUDGE
        for start in range(0, len(unscored), part_size):
            part = unscored[start : start + part_size]
            for row, score in zip(part, pool.map(score_or_error, part), strict=True):
                if isinstance(score, Exception):
                    logger.warning("trajectory %s has no reward of version %d: %s", row.uid, version, score)
                    report.failures[str(score)] += 1
                    continue
                with store.write() as connection:
                    is_new = reward_rows.insert_score(connection, job.key, version, row.uid, score, store.clock())
                report.scored += is_new
    return report


def scores_for(store: Store, delivery_key: int, version: int) -> Scores:
    """Returns the rewards of a version for a past delivery.

    Raises:
        NotFoundError: its job has no such version.
        ConflictError: some of its trajectories have no reward of that version.
    """
    with store.read() as connection:
        job = job_rows.get_job(connection, delivery_rows.job_of(connection, delivery_key))
        versions = reward_rows.versions_of_job(connection, job.key)
        scores = reward_rows.scores_of_delivery(connection, delivery_key, version)
    if version not in versions:
        raise NotFoundError(
            f"job {job.job_id} has no rewards of version {version} (it has {[0, *versions]}): `rollout-buffer rescore "
            f"{job.job_id}` computes new versions"
        )
    missing = [uid for (_, uid), score in scores.items() if score is None]
    if missing:
        raise ConflictError(
            f"{len(missing)} of {len(scores)} trajectories of this delivery have no reward of version {version}, "
            f"{missing[0]} among them: `rollout-buffer rescore {job.job_id}` under the same name "
            "computes the missing rewards",
            {"missing": missing[:100]},
        )
    return {key: score for key, score in scores.items() if score is not None}


def rescored(
    members: Iterable[tuple[dict[str, Any], Pieces]], scores: Scores
) -> Iterator[tuple[dict[str, Any], Pieces]]:
    """Yields the members of a delivery with rewards of another version; dummies are not changed."""
    for columns, pieces in members:
        score = scores.get((columns["group_index"], columns["uid"]))
        if score is None or columns["remove_sample"]:
            yield columns, pieces
            continue
        body = orjson.loads(b"".join(pieces))
        body.pop("turn_rewards", None)
        body.pop("token_rewards", None)
        body |= encode_turn_rewards(score.turn_rewards, score.token_rewards)
        yield {**columns, "reward": score.reward, "raw_reward": score.reward}, [orjson.dumps(body)]


def _trajectory(store: Store, job_key: int, row: UnscoredTrajectory) -> dict[str, Any]:
    """Returns a trajectory for judges: its payload with the columns of its row."""
    with store.read() as connection:
        payload = payload_rows.payload_of(connection, job_key, row.uid)
    return {**orjson.loads(store.get_payload(*payload)), **asdict(row)}


def _score_with_retries(
    judge: Judge, trajectory: dict[str, Any], settings: RescoreSettings, pause: Callable[[float], object]
) -> Score:
    """Calls a judge, with retries.

    Raises:
        JudgeError: all attempts failed; the message is that of the last attempt.
    """
    failures = 0
    while True:
        try:
            copy = orjson.loads(orjson.dumps(trajectory))  # a judge may change what it is given
            return _score(_answer(judge, copy, settings.timeout_s), trajectory)
        except JudgeError:
            failures += 1
            if failures > settings.retries:
                raise
        pause(backoff_s(failures, first_s=FIRST_SCORING_PAUSE_S, longest_s=MAX_SCORING_PAUSE_S, jitter=random.random()))


def _answer(judge: Judge, trajectory: dict[str, Any], timeout_s: float) -> Any:
    """Calls a judge with a timeout. The thread of a judge that never returns ends with the process."""
    answers: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put((True, judge(trajectory)))
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is no reward
            answers.put((False, error))

    threading.Thread(target=ask, name="judging", daemon=True).start()
    try:
        answered, answer = answers.get(timeout=timeout_s)
    except queue.Empty:
        raise JudgeError(f"the judge did not answer within {timeout_s:g} s") from None
    if not answered:
        raise JudgeError(f"the judge failed: {type(answer).__name__}: {answer}") from answer
    return answer


def _score(answer: Any, trajectory: Mapping[str, Any]) -> Score:
    """Checks a judge's result.

    Raises:
        JudgeError: it is no reward, or does not fit the trajectory's turns.
    """
    scores = answer if isinstance(answer, Mapping) else {"reward": answer}
    try:
        generations = wire.decode_generations(trajectory.get("generations"))
        turns, tokens = wire.checked_turn_rewards(scores, trajectory.get("messages") or [], generations)
        return Score(reward=as_reward(scores.get("reward")), turn_rewards=turns, token_rewards=tokens)
    except ValueError as error:
        raise JudgeError(f"the judge's reward {error}") from error
    except InvalidPayloadError as error:
        raise JudgeError(f"the judge's {error.message}") from error
