"""Items on the wire: fields that written and delivered items share, and delivered items as a trainer receives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, Field, WithJsonSchema

from slime_plugins.rollout_buffer.errors import InvalidPayloadError
from slime_plugins.rollout_buffer.rules.validity import as_token_rewards, as_turn_rewards
from slime_plugins.rollout_buffer.types import Generation, Message, Outcome, StopReason
from slime_plugins.rollout_buffer.wire.checks import Identifier, Reward, Sha256, WireRecord
from slime_plugins.rollout_buffer.wire.generations import GenerationEntries


def _with_role(message: Message) -> Message:
    if not isinstance(message.get("role"), str):
        raise ValueError("must be an object with a role")
    return message


ChatMessage = Annotated[
    Message,
    AfterValidator(_with_role),
    WithJsonSchema(
        {
            "type": "object",
            "required": ["role"],
            "description": "One OpenAI message: `role` says who speaks; more keys are as its program made them.",
        }
    ),
]


class ItemFields(WireRecord):
    """Fields of written and of delivered items."""

    uid: Identifier
    """Id of the trajectory; writing the same uid again changes nothing. Dummies have uids too."""
    instance_id: Identifier
    """Id of the instance, one line of the input."""
    messages: list[ChatMessage]
    """OpenAI messages; screenshots as data URIs of PNG, JPEG or WebP, or by hash."""
    reward: Reward
    """The reward for the trainer; finite."""
    raw_reward: Reward | None = None
    """The reward before normalisation, if it differs."""
    turn_rewards: list[Reward] | None = None
    """Rewards of turns: one finite number for each trained generation or, without generations, for each trained
    assistant message; absent if unknown."""
    token_rewards: list[list[Reward] | None] | None = None
    """Additional rewards of tokens: for each rewarded turn null, or a number for each output id."""
    extra_info: dict[str, Any] = Field(default_factory=dict)
    """Further fields of the generator; `finish_reason: length` means truncated."""
    generations: GenerationEntries | None = None
    """Token ids and log-probabilities as sampled; empty when not known."""
    timings_s: dict[str, Any] = Field(default_factory=dict)
    """Seconds by phase of the episode."""
    remove_sample: bool = False
    """True for a dummy in place of a missing member, which must not be trained or written."""


class Item(ItemFields):
    """One member of a delivered group."""

    extra_info: dict[str, Any]
    """Further fields of the generator."""
    images: list[Sha256] = Field(default_factory=list)
    """sha256 of each screenshot, in order of first appearance."""
    group_index: int = -1
    """Number of the group, unique in the buffer."""
    epoch: int = 0
    """Epoch of the input, from 0."""
    slot: int = 0
    """Slot in the group, from 0."""
    outcome: Annotated[Outcome, Field(strict=False)] = Outcome.COMPLETED
    """How the attempt ended."""
    stop_reason: Annotated[StopReason, Field(strict=False)] = StopReason.STOP
    """Why the episode stopped."""
    weight_version: int | None = None
    """The oldest weight version that sampled some of its tokens; null if unknown."""


TurnRewards = tuple[tuple[float, ...] | None, tuple[tuple[float, ...] | None, ...] | None]
"""``turn_rewards`` and ``token_rewards``."""


def checked_turn_rewards(
    fields: Mapping[str, Any], messages: Sequence[Message], generations: Sequence[Generation], where: str = ""
) -> TurnRewards:
    """Returns ``turn_rewards`` and ``token_rewards`` of an object, checked against the trained turns of the trajectory.

    Raises:
        InvalidPayloadError: a value is no list, an entry is no reward, or a turn or token has no entry or several.
    """
    if fields.get("turn_rewards") is None and fields.get("token_rewards") is None:
        return None, None
    lengths = trained_turns(messages, generations)
    name = f"{where}.turn_rewards" if where else "turn_rewards"
    try:
        turn_rewards = as_turn_rewards(fields.get("turn_rewards"), len(lengths))
        name = f"{where}.token_rewards" if where else "token_rewards"
        return turn_rewards, as_token_rewards(fields.get("token_rewards"), lengths)
    except ValueError as error:
        raise InvalidPayloadError(f"{name} {error}") from error


def trained_turns(messages: Sequence[Message], generations: Sequence[Generation]) -> list[int | None]:
    """Returns the number of sampled tokens of each trained turn; None for turns without recorded generations."""
    if generations:
        return [len(generation.output_ids) for generation in generations if generation.trained]
    return [None for reply in messages if reply.get("role") == "assistant" and reply.get("step_loss_mask", 1) == 1]
