"""Scoring again: rewards beside rewards, of which no stored byte changes, and deliveries that say which they had."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner
from werkzeug.wrappers import Request, Response

from slime_plugins.rollout_buffer import wire
from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.cli.app import app as command_line
from slime_plugins.rollout_buffer.errors import ConflictError, JudgeError
from slime_plugins.rollout_buffer.server.delivery_reply import delivery_chunks
from slime_plugins.rollout_buffer.state.deliveries import Delivery
from slime_plugins.rollout_buffer.state.reward_versions import (
    Judge,
    RescoreReport,
    RescoreSettings,
    rescore,
    scores_for,
)
from slime_plugins.rollout_buffer.storage.tables.job_rows import JobRecord
from slime_plugins.rollout_buffer.trainer.mask_selection import MaskSettings
from slime_plugins.rollout_buffer.trainer.row_builder import RowBuilder
from slime_plugins.rollout_buffer.trainer.settings import RowSettings
from slime_plugins.rollout_buffer.wire.poll_requests import PollPayload
from tests.asgi_client import serving_wsgi
from tests.support import polled_delivery, start_external, write, written

TURNS = [{"prompt_ids": [1], "output_ids": [2], "finish_reason": "stop", "output_log_probs": [-0.5]}]


@pytest.fixture
def job(buffer: Buffer) -> JobRecord:
    started = start_external(buffer, 2, job_id="j")
    items = [written(uid, uid[0], reward, generations=TURNS) for uid, reward in (("a1", 0.0), ("a2", 1.0))]
    large = {"too large for its row": "x" * 40_000}
    write(buffer, started, *items, written("b1", "b", 0.25, turn_rewards=[0.5]), written("b2", "b", extra_info=large))
    return buffer.job("j")


def scored(buffer: Buffer, judge: Judge, name: str = "v", **settings: Any) -> RescoreReport:
    wanted = RescoreSettings(**{"retries": 0, "timeout_s": 20.0, "at_once": 2, **settings})
    return rescore(buffer.store, "j", judge, name=name, scorer="tests", settings=wanted, pause=lambda _: None)


def reply(buffer: Buffer, delivery: Delivery, version: int = 0) -> Any:
    scores = scores_for(buffer.store, delivery.key, version) if version else None
    asked = PollPayload(dummies=True)
    chunks = delivery_chunks(buffer, delivery, asked, None, reward_version=version, scores=scores)
    return json.loads(b"".join(bytes(piece) for part in chunks for piece in part))


def rewards(said: Any) -> dict[str, float]:
    return {item["uid"]: item["reward"] for item in said["data"]["data"]}


def by_length(trajectory: dict[str, Any]) -> float:
    """A judge: the reward is the length of the last message."""
    return float(len(trajectory["messages"][-1]["content"]))


def stored(buffer: Buffer) -> dict[str, list[Any]]:
    """Every row of what was there before anything is scored again, and the bytes of every pack."""
    with buffer.store.read() as connection:
        tables = ("trajectories", "members", "groups", "deliveries", "delivery_groups")
        rows = {name: [tuple(row) for row in connection.execute(f"SELECT * FROM {name}")] for name in tables}
    packs = sorted((path.name, path.read_bytes()) for path in buffer.store.data_dir.rglob("*.pack"))
    return {**rows, "packs": packs}


def test_scoring_again_changes_no_stored_byte_of_what_was_there(buffer: Buffer, job: JobRecord) -> None:
    delivery = polled_delivery(buffer, job)
    before, old_reply = stored(buffer), reply(buffer, delivery)
    done = scored(buffer, lambda one: {"reward": by_length(one), "turn_rewards": [2.0]})

    assert (done.version, done.scored, done.failures) == (1, 4, {})
    assert all(before.values()), "a table or the packs hold nothing that could change"
    assert stored(buffer) == before
    assert reply(buffer, delivery) == old_reply


def test_a_delivery_has_the_rewards_of_the_version_that_is_asked_for_and_says_which(
    buffer: Buffer, job: JobRecord
) -> None:
    delivery = polled_delivery(buffer, job)
    scored(buffer, lambda one: 10.0 + one["reward"], "plus ten")
    scored(buffer, lambda one: {"reward": -1, "turn_rewards": [-2.0]}, "turns")

    assert rewards(reply(buffer, delivery)) == {"a1": 0.0, "a2": 1.0, "b1": 0.25, "b2": 1.0}
    assert rewards(reply(buffer, delivery, 1)) == {"a1": 10.0, "a2": 11.0, "b1": 10.25, "b2": 11.0}
    told = [reply(buffer, delivery, version)["data"]["meta_info"]["reward_version"] for version in (0, 1, 2)]
    assert told == [0, 1, 2]
    turns = [
        [item.get("turn_rewards") for item in reply(buffer, delivery, version)["data"]["data"]] for version in range(3)
    ]
    assert turns == [[None, None, [0.5], None], [None] * 4, [[-2.0]] * 4]


def test_what_was_cut_short_goes_on_with_what_is_missing(buffer: Buffer, job: JobRecord) -> None:
    """As if the process had died after the first of four."""
    delivery = polled_delivery(buffer, job)
    asked: list[str] = []

    def dying(one: dict[str, Any]) -> float:
        asked.append(one["uid"])
        if len(asked) > 1:
            raise JudgeError("gone")
        return 7.0

    assert scored(buffer, dying, at_once=1).scored == 1
    with pytest.raises(ConflictError, match="3 of 4 trajectories of this delivery have no reward of version 1"):
        scores_for(buffer.store, delivery.key, 1)
    assert scored(buffer, lambda _: 8.0).scored == 3
    assert sorted(rewards(reply(buffer, delivery, 1)).values()) == [7.0, 8.0, 8.0, 8.0]


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (None, "must be a number"),
        (float("nan"), "finite"),
        ("1.0", "not a string"),
        ({"reward": 1.0, "turn_rewards": [1.0, 2.0]}, "has 2 entries for the 1 turns that are trained"),
        ({}, "must be a number"),
    ],
)
def test_what_is_no_reward_is_a_failure_and_never_one(buffer: Buffer, job: JobRecord, answer: Any, says: str) -> None:
    done = scored(buffer, lambda _: answer)

    assert (done.scored, sum(done.failures.values())) == (0, 4)
    assert says in next(iter(done.failures))


def test_a_judge_that_failed_is_asked_again(buffer: Buffer, job: JobRecord) -> None:
    tries: dict[str, int] = {}

    def moody(one: dict[str, Any]) -> float:
        tries[one["uid"]] = tries.get(one["uid"], 0) + 1
        if tries[one["uid"]] < 3:
            raise RuntimeError("not now")
        return 1.0

    assert scored(buffer, moody, retries=1, name="few").failures == {"the judge failed: RuntimeError: not now": 4}
    tries.clear()
    assert scored(buffer, moody, retries=2, name="enough").scored == 4


def test_a_reward_that_was_given_cannot_be_changed(buffer: Buffer, job: JobRecord) -> None:
    scored(buffer, lambda _: 1.0)
    with pytest.raises(sqlite3.IntegrityError, match="never changed"), buffer.store.write() as connection:
        connection.execute("UPDATE trajectory_rewards SET reward = 2.0")


def test_rows_for_training_are_made_of_a_replayed_delivery(buffer: Buffer, job: JobRecord) -> None:
    delivery = polled_delivery(buffer, job)
    scored(buffer, lambda one: {"reward": 3.0 if one["uid"] == "a1" else 1.0, "turn_rewards": [4.0]})
    data = wire.decode_rollout_data(reply(buffer, delivery, 1))
    masks = MaskSettings(tokenizer_path=None, loss_mask_type="qwen", source=None)
    group = RowBuilder(RowSettings(samples_per_group=2, masks=masks, turn_discount=1.0)).groups(data.items)[0]

    assert [row.reward for row in group.rows] == [3.0, 1.0]
    assert [row.returns for row in group.rows] == [[0.0, 4.0]] * 2


# --- the command -----------------------------------------------------------------------------------------------------


def run(buffer: Buffer, *arguments: str) -> tuple[int, dict[str, Any]]:
    common = ("--data-dir", str(buffer.store.data_dir), "--retries", "0", "--json")
    result = CliRunner().invoke(command_line, ["rescore", "j", *arguments, *common])
    return result.exit_code, json.loads(result.stdout)


def test_the_command_scores_by_a_function_and_says_what_it_did(buffer: Buffer, job: JobRecord, tmp_path: Path) -> None:
    file = tmp_path / "judge.py"
    file.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Own:\n    a: int = 1\n"
        "def score(one):\n    if one['uid'] == 'b2':\n        raise ValueError('odd')\n    return 2.0\n"
    )
    with_function = ("--with", f"{file}:score", "--name", "two")

    code, said = run(buffer, *with_function)
    assert (code, said["version"], said["scored"], said["failed"]) == (1, 1, 3, 1)
    assert said["failures"] == {"the judge failed: ValueError: odd": 1}
    file.write_text("def score(one):\n    return 2.0\n")
    assert run(buffer, *with_function)[0] == 0


def test_the_command_scores_by_a_service(buffer: Buffer, job: JobRecord) -> None:
    @Request.application
    def service(request: Request) -> Response:
        uid = request.get_json()["trajectory"]["uid"]
        turn_rewards = [0.5] if uid != "b1" else [0.5, 0.25]
        scores = orjson.dumps({"reward": 2.0, "turn_rewards": turn_rewards})
        return Response("busy", 503) if uid == "a1" else Response(scores)

    delivery = polled_delivery(buffer, job)
    with serving_wsgi(service) as url:
        code, said = run(buffer, "--with", url.replace("//", "//user:secret@"))

    assert (code, said["scored"], said["failed"]) == (1, 2, 2)
    refusals = " and ".join(sorted(said["failures"]))
    assert "turn_rewards has 2 entries for the 1 turns that are trained" in refusals
    assert "the scoring service answered 503: busy" in refusals
    assert said["name"] == url.replace("//", "//***@")
    with pytest.raises(ConflictError, match="2 of 4 trajectories of this delivery have no reward of version 1"):
        scores_for(buffer.store, delivery.key, 1)
    scored(buffer, lambda _: 1.0, said["name"])
    turns = [item.get("turn_rewards") for item in reply(buffer, delivery, 1)["data"]["data"]]
    assert turns == [None, [0.5], None, [0.5]]
