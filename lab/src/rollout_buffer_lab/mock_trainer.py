"""A trainer without a model, for the demo and the tests: calls a rollout function as slime's trainer does.

It calls ``generate_rollout`` for one rollout after the other with slime's argument names, checks every batch as slime's
RolloutManager would, and writes the checkpoint that slime's data source writes, which holds its metadata but not its
buffered groups. It learns nothing.
"""

from __future__ import annotations

import importlib
import json
import os
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.rollout.agent_rollout import generate_rollout, post_process_rewards
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.utils.types import Sample

Group = list[Any]

DEFAULT_ARGUMENTS: dict[str, Any] = {
    "rollout_buffer_url": "http://127.0.0.1:8889",
    "rollout_task_type": "math",
    "fetch_trajectory_retry_times": -1,
    "loss_mask_type": "qwen",
    "buffer_filter_path": None,
    "prompt_data": None,
    "eval_prompt_data": None,
    "n_samples_per_eval_prompt": 1,
    "num_epoch": 1,
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 4,
    "rollout_max_response_len": 1024,
    "rollout_temperature": 1.0,
    "rollout_top_p": 1.0,
    "rollout_top_k": -1,
    "sglang_router_ip": "127.0.0.1",
    "sglang_router_port": 30000,
    "hf_checkpoint": None,
    "save": None,
    "load": None,
    "rollout_global_dataset": True,
    "offload_rollout": False,
    "advantage_estimator": "grpo",
    "rewards_normalization": True,
    "grpo_std_normalization": True,
    "custom_reward_post_process_path": "slime.rollout.agent_rollout.post_process_rewards",
    "reward_key": None,
    "use_wandb": False,
    "wandb_always_use_train_step": False,
    "log_passrate": False,
}


def trainer_args(**changes: Any) -> Namespace:
    """Returns the arguments that an agent rollout reads, under slime's names.

    ``changes`` replace defaults, and may add ``rollout_buffer_*`` arguments.
    """
    return Namespace(**{**DEFAULT_ARGUMENTS, **changes})


class CheckpointDataSource:
    """Stands in for slime's data source with a buffer: groups are in memory, metadata in checkpoints, and no prompt
    file is read.

    ``save`` and ``load`` use one JSON file per rollout under ``args.save`` and ``args.load``.
    """

    def __init__(self, args: Namespace) -> None:
        self._args = args
        self._buffer: list[Group] = []
        self._metadata: dict[str, Any] = {}
        self._filter = _first_groups if args.buffer_filter_path is None else _load_function(args.buffer_filter_path)

    def get_samples(self, num_samples: int) -> list[Group]:
        """Returns ``num_samples`` groups: those that the buffer's filter chooses, then groups of empty Samples."""
        groups: list[Group] = []
        if self._buffer and num_samples:
            groups = self._filter(self._args, None, self._buffer, num_samples)
        missing = max(0, num_samples - len(groups))
        return groups + [[Sample() for _ in range(self._args.n_samples_per_prompt)] for _ in range(missing)]

    def add_samples(self, samples: list[Group]) -> None:
        """Puts groups into the buffer.

        Raises:
            ValueError: a group does not have exactly ``n_samples_per_prompt`` members.
        """
        for group in samples:
            if len(group) != self._args.n_samples_per_prompt:
                raise ValueError(f"a group has {len(group)} members, not {self._args.n_samples_per_prompt}")
            self._buffer.append(group)

    def get_buffer_length(self) -> int:
        """Returns how many groups are in the buffer."""
        return len(self._buffer)

    def get_metadata(self) -> dict[str, Any]:
        """Returns what the next checkpoint will hold."""
        return self._metadata

    def update_metadata(self, metadata: dict[str, Any]) -> None:
        """Changes entries of the metadata."""
        self._metadata.update(metadata)

    def save(self, rollout_id: int) -> None:
        """Writes the metadata, whole or not at all."""
        path = _checkpoint(self._args.save, rollout_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(self._metadata), encoding="utf-8")
        os.replace(partial, path)

    def load(self, rollout_id: int) -> None:
        """Reads the metadata of a checkpoint; without its file nothing changes."""
        path = _checkpoint(self._args.load, rollout_id) if self._args.load else None
        if path is not None and path.exists():
            self._metadata = json.loads(path.read_text(encoding="utf-8"))


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutRecord:
    """Result of one rollout. ``rewards`` are post-processed as for the loss, one per sample."""

    rollout_id: int
    groups: Sequence[Group]
    samples: Sequence[Sample]
    rewards: Sequence[float]
    metrics: dict[str, Any]


class MockTrainer:
    """Takes rollouts and saves checkpoints, starting from a checkpoint or from scratch."""

    def __init__(self, args: Namespace, *, start_rollout_id: int = 0) -> None:
        """A ``start_rollout_id`` above 0 loads the checkpoint of the rollout before it."""
        self.args = args
        self.data_source = CheckpointDataSource(args)
        self._next_rollout_id = start_rollout_id
        if start_rollout_id > 0:
            self.data_source.load(start_rollout_id - 1)

    def train(
        self, rollouts: int, *, save_interval: int | None = 1, on_rollout: Callable[[RolloutRecord], None] | None = None
    ) -> list[RolloutRecord]:
        """Runs ``rollouts`` rollouts and returns their results.

        A checkpoint is saved after every ``save_interval`` rollouts, with None never.

        Raises:
            ValueError: a batch is not what slime's RolloutManager takes.
        """
        records = []
        for rollout_id in range(self._next_rollout_id, self._next_rollout_id + rollouts):
            record = self._rollout(rollout_id)
            if save_interval is not None and (rollout_id + 1) % save_interval == 0 and self.args.save:
                self.data_source.save(rollout_id)
            self._next_rollout_id = rollout_id + 1
            if on_rollout is not None:
                on_rollout(record)
            records.append(record)
        return records

    def evaluate(self, rollout_id: int = 0) -> dict[str, dict[str, Any]]:
        """Plays the evaluation sets once and returns ``rewards``, ``truncated`` and ``samples`` of each set."""
        output = generate_rollout(self.args, rollout_id, self.data_source, evaluation=True)
        if not isinstance(output, RolloutFnEvalOutput):
            raise TypeError(f"an evaluation returned {type(output).__name__}")
        return output.data

    def _rollout(self, rollout_id: int) -> RolloutRecord:
        output = generate_rollout(self.args, rollout_id, self.data_source)
        if not isinstance(output, RolloutFnTrainOutput):
            raise TypeError(f"a rollout returned {type(output).__name__}")
        check_batch(self.args, output.samples)
        samples = flat_samples(output.samples)
        _, rewards = post_process_rewards(self.args, samples)
        return RolloutRecord(
            rollout_id=rollout_id,
            groups=output.samples,
            samples=samples,
            rewards=rewards,
            metrics=dict(output.metrics or {}),
        )


def flat_samples(nested: Any) -> list[Sample]:
    """Returns the samples of a batch in order, however deep it is nested."""
    if isinstance(nested, Sample):
        return [nested]
    return [sample for entry in nested for sample in flat_samples(entry)]


def check_batch(args: Namespace, groups: Sequence[Group]) -> None:
    """Checks what slime's RolloutManager asserts of a batch, and what it requires without an assertion.

    Raises:
        ValueError: a rule is broken; the message names it.
    """
    count = sum(len(group) for group in groups)
    if count != args.n_samples_per_prompt * args.rollout_batch_size:
        raise ValueError(f"{count} trajectories, not {args.rollout_batch_size} times {args.n_samples_per_prompt}")
    samples = flat_samples(groups)
    trajectories = {id(member): flat_samples(member) for group in groups for member in group}
    if len({rows[0].rollout_id for rows in trajectories.values()}) != len(trajectories):
        raise ValueError("two trajectories share a rollout_id")
    if any(len({row.rollout_id for row in rows}) != 1 for rows in trajectories.values()):
        raise ValueError("rows of one trajectory have different rollout_ids")
    if len({frozenset(sample.metadata) for sample in samples}) != 1:
        raise ValueError("samples have different metadata keys")
    if len({sample.rollout_log_probs is None for sample in samples}) != 1:
        raise ValueError("some samples have log-probs and some have none")
    for sample in samples:
        _check_sample(sample)


def _check_sample(sample: Sample) -> None:
    uid, length = sample.prompt, sample.response_length
    if not 0 < length < len(sample.tokens):
        raise ValueError(f"{uid}: {length} response tokens of {len(sample.tokens)}")
    if sample.loss_mask is None or len(sample.loss_mask) != length:
        raise ValueError(f"{uid}: the loss mask is not as long as the response")
    if sample.rollout_log_probs is not None and len(sample.rollout_log_probs) != length:
        raise ValueError(f"{uid}: the log-probs are not as long as the response")
    if sample.reward is None:
        raise ValueError(f"{uid}: no reward")
    if sum(sample.loss_mask) == 0 and not sample.remove_sample:
        raise ValueError(f"{uid}: nothing is trained, and it is not marked remove_sample")


def _first_groups(args: Namespace, rollout_id: int | None, buffer: list[Group], num_samples: int) -> list[Group]:
    taken = buffer[:num_samples]
    del buffer[:num_samples]
    return taken


def _load_function(path: str) -> Callable[..., list[Group]]:
    module, _, name = path.rpartition(".")
    function: Callable[..., list[Group]] = getattr(importlib.import_module(module), name)
    return function


def _checkpoint(folder: str | Path, rollout_id: int) -> Path:
    return Path(folder) / "rollout" / f"data_source_{rollout_id}.json"
