"""The phone for a tiny policy that sees: short prompts, a player who is often wrong, a step on what was seen."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="the policy needs torch")

from transformers import AddedToken, AutoTokenizer  # noqa: E402 - the policy needs torch

from rollout_buffer_lab.learning.batches import batch_of, trained_logits  # noqa: E402 - below the skip
from rollout_buffer_lab.learning.losses import policy_loss, token_log_probs, token_weights  # noqa: E402 - below the skip
from rollout_buffer_lab.learning.policy import (  # noqa: E402 - below the skip
    PolicySize,
    load_policy,
    new_policy,
    save_policy,
    save_processors,
)
from rollout_buffer_lab.learning.task_file import WarmUp, find_task  # noqa: E402 - below the skip
from slime_plugins.rollout_buffer import RolloutRow, RolloutTrajectory, RowSettings  # noqa: E402 - below the skip
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH  # noqa: E402 - below the skip
from slime_plugins.rollout_buffer.trainer.image_fetch import FetchedImages  # noqa: E402 - below the skip
from slime_plugins.rollout_buffer.trainer.mask_selection import MaskSettings  # noqa: E402 - below the skip
from slime_plugins.rollout_buffer.trainer.row_builder import RowBuilder  # noqa: E402 - below the skip
from slime_plugins.rollout_buffer.trainer.vision import load_vision  # noqa: E402 - below the skip

pytestmark = pytest.mark.usefixtures("one_thread")

TASK = find_task("phone", None)
TOKENIZER = AutoTokenizer.from_pretrained(DEMO_TOKENIZER_PATH, local_files_only=True)
TOKENIZER.add_tokens([AddedToken(phrase, normalized=False) for phrase in TASK.phrases])
MODES = ("incremental", "history")
IMAGE_TOKENS = 24


def played(mode: str, episodes: int = 40) -> WarmUp:
    return TASK.warm_up(TOKENIZER, random.Random(1), episodes, TASK.options(mode))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that sees, with its processors."""
    path = tmp_path_factory.mktemp("policy")
    save_processors(TOKENIZER, path, patch_size=TASK.patch_size)
    save_policy(new_policy(TOKENIZER, PolicySize(), 3, patch_size=TASK.patch_size), path)
    return path


def trajectories(warm_up: WarmUp, folder: Path) -> list[RolloutTrajectory]:
    masks = MaskSettings(tokenizer_path=str(folder), loss_mask_type="qwen", source=None)
    rows = RowBuilder(RowSettings(samples_per_group=1, masks=masks, report_drift=False))
    groups = rows.groups(warm_up.items, load_vision(str(folder)), FetchedImages(data=warm_up.images))
    return [each for group in groups for each in group.trajectories]


def log_probs(policy: Any, of: Sequence[RolloutTrajectory]) -> Any:
    batch = batch_of(of)
    with torch.no_grad():
        return token_log_probs(trained_logits(policy, batch), batch.targets)


# --- the task --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_the_scripted_player_is_right_in_most_of_its_episodes_and_wrong_in_many(mode: str) -> None:
    items = played(mode).items

    rewards = [item.reward for item in items]
    assert set(rewards) == {0.0, 1.0}
    assert 0.5 < sum(map(float, map(str, rewards))) / len(rewards) < 0.9
    assert {len(item.generations) for item in items} == {2}


# --- a policy that sees ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_rows_carry_the_pictures_that_their_turns_saw(mode: str, folder: Path) -> None:
    (one,) = trajectories(played(mode, 1), folder)

    images = [len(row.images) for row in one.rows]
    assert images == ([2] if mode == "incremental" else [1, 1])
    for row in one.rows:
        assert row.train_inputs is not None
        assert row.train_inputs["image_grid_thw"].tolist() == [[1, 16, 6]] * len(row.images)
        placeholder = TOKENIZER.convert_tokens_to_ids("<|image_pad|>")
        assert list(row.token_ids).count(placeholder) == IMAGE_TOKENS * len(row.images)


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_gives_each_row_its_own_pictures(mode: str, folder: Path) -> None:
    policy, _ = load_policy(folder)
    of = trajectories(played(mode, 5), folder)

    together = log_probs(policy, of)
    alone = torch.cat([log_probs(policy, [each]) for each in of])
    swapped = log_probs(policy, [_with_pictures_of(one, other) for one, other in zip(of, of[1:] + of[:1], strict=True)])

    assert torch.allclose(together, alone, atol=1e-5)
    assert not torch.allclose(together, swapped, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_the_gradient_is_that_of_sampled_tokens_alone_and_reaches_the_eyes(mode: str, folder: Path) -> None:
    """Against a plain forward pass over each row by itself, in which every token that the generator sampled counts."""
    policy, _ = load_policy(folder)
    of = trajectories(played(mode, 4), folder)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    batch = batch_of(of)
    log_probs = token_log_probs(trained_logits(policy, batch), batch.targets)
    weights = advantages[batch.trajectories] * token_weights(batch.trajectories)
    policy_loss(log_probs, log_probs.detach(), weights, torch.ones_like(weights)).loss.backward()
    found = _gradients(policy)

    for item, trajectory, advantage in zip(played(mode, 4).items, of, advantages, strict=True):
        sampled = [token for turn in item.generations for token in turn.output_ids]
        terms = [_log_prob_of_sampled(policy, row) for row in trajectory.rows]
        assert sum(count for _, count in terms) == len(sampled)
        (-advantage * sum(total for total, _ in terms) / len(sampled) / len(of)).backward()

    expected = _gradients(policy)
    assert all(torch.allclose(found[name], expected[name], atol=1e-5) for name in expected)
    assert float(found["model.visual.patch_embed.proj.weight"].abs().max()) > 0


def _with_pictures_of(one: RolloutTrajectory, other: RolloutTrajectory) -> RolloutTrajectory:
    rows = [replace(row, train_inputs=its.train_inputs) for row, its in zip(one.rows, other.rows, strict=True)]
    return replace(one, rows=tuple(rows))


def _log_prob_of_sampled(policy: Any, row: RolloutRow) -> tuple[Any, int]:
    """The sum of the log-probs of a row's replies, each with the end of its turn, and how many tokens they are."""
    ids = torch.tensor([list(row.token_ids)])
    kinds = (ids == policy.config.image_token_id).int()
    logits = policy(input_ids=ids, mm_token_type_ids=kinds, **(row.train_inputs or {})).logits[0]
    log_probs = torch.log_softmax(logits, -1)
    opening, end = (TOKENIZER.convert_tokens_to_ids(token) for token in ("<|im_start|>", "<|im_end|>"))
    total, count = torch.zeros(()), 0
    for place, token in enumerate(row.token_ids):
        if token == opening and "assistant" in TOKENIZER.decode([row.token_ids[place + 1]]):
            at = place + len(TOKENIZER.encode("<|im_start|>assistant\n", add_special_tokens=False))
            reply = list(row.token_ids[at:])
            reply = reply[: reply.index(end) + 1]
            total = total + sum(log_probs[at + step - 1, one] for step, one in enumerate(reply))
            count += len(reply)
    return total, count


def _gradients(policy: Any) -> dict[str, Any]:
    """The gradient of each parameter that has one, which is taken away."""
    found = {name: each.grad for name, each in policy.named_parameters() if each.grad is not None}
    policy.zero_grad(set_to_none=True)
    return found
