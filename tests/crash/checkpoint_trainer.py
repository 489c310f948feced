"""A trainer of the crash test with checkpoints: the stand-in for slime's. May be killed at any time.

    python -m tests.crash.checkpoint_trainer PLAN

What a rollout trained is written before its checkpoint is: a rollout without a checkpoint is trained again, and its
file replaced. The files up to the last checkpoint are what the run has trained.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from typing import Any

from rollout_buffer_lab.mock_trainer import MockTrainer, RolloutRecord, trainer_args
from slime_plugins.rollout_buffer.trainer.job_feed import InputExhaustedError
from tests.crash.workload import PLAYED_JOB, PLAYED_TASK_TYPE, Journal, Plan, load_plan


def main(plan_path: str) -> int:
    """Goes on after the last checkpoint until the input is used up."""
    plan = load_plan(plan_path)
    journal = Journal(plan.path("checkpoints.jsonl"))
    start = last_checkpoint(plan) + 1
    journal.note(starts_at=start)
    trainer = MockTrainer(arguments(plan), start_rollout_id=start)
    while _train_one(trainer, plan):
        plan.pause(plan.train_pause_s)
    journal.note(done=True)
    return 0


def arguments(plan: Plan) -> Namespace:
    """Returns slime's arguments for the played job."""
    return trainer_args(
        rollout_buffer_url=plan.url,
        rollout_task_type=PLAYED_TASK_TYPE,
        rollout_buffer_job_id=PLAYED_JOB,
        rollout_buffer_wait_s=2.0,
        rollout_buffer_lease_s=20.0,
        rollout_num_process=16,
        rollout_batch_size=2,
        n_samples_per_prompt=plan.played_size,
        num_epoch=plan.played_epochs,
        prompt_data=str(plan.path("played.jsonl")),
        sglang_router_port=9,
        save=str(plan.path("checkpoints")),
        load=str(plan.path("checkpoints")),
        rollout_buffer_options={"max_groups_ahead": 8, "group_timeout_seconds": 60},
    )


def last_checkpoint(plan: Plan) -> int:
    """Returns the number of the newest checkpoint, -1 when there is none."""
    found = plan.path("checkpoints", "rollout").glob("data_source_*.json")
    return max((int(path.stem.rsplit("_", 1)[1]) for path in found), default=-1)


def trained_groups(plan: Plan) -> list[dict[str, Any]]:
    """Returns every group that was trained up to the last checkpoint, in order."""
    groups = []
    for rollout_id in range(last_checkpoint(plan) + 1):
        path = plan.path("trained", f"{rollout_id}.json")
        groups += json.loads(path.read_text(encoding="utf-8"))
    return groups


def _train_one(trainer: MockTrainer, plan: Plan) -> bool:
    """Trains a rollout; at the end of the input, what is left one by one. False when nothing is left."""
    try:
        (record,) = trainer.train(1, save_interval=None)
    except InputExhaustedError:
        if trainer.args.rollout_batch_size == 1:
            return False
        trainer.args.rollout_batch_size = 1
        return True
    _note_trained(plan, record, trainer.args.rollout_batch_size)
    trainer.data_source.save(record.rollout_id)
    return True


def _note_trained(plan: Plan, record: RolloutRecord, batch_size: int) -> None:
    groups = []
    cut = len(record.groups) > batch_size  # one more group filled the places of a short one, and gave members up
    for group in record.groups:
        first = group[0].metadata
        uids = [member.metadata["uid"] for member in group if not member.remove_sample]
        groups.append({"instance_id": first["instance_id"], "epoch": first["epoch"], "uids": uids, "cut": cut})
    path = plan.path("trained", f"{record.rollout_id}.json")
    path.parent.mkdir(exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(groups), encoding="utf-8")
    os.replace(partial, path)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
