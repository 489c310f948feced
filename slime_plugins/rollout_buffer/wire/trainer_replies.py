"""Replies as a trainer decodes them: ``start_rollout``, ``get_rollout_data``, and errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

from slime_plugins.rollout_buffer.errors import InvalidPayloadError
from slime_plugins.rollout_buffer.types import Generation, JobState, Message, Outcome, StopReason
from slime_plugins.rollout_buffer.wire.checks import WireRecord, checked
from slime_plugins.rollout_buffer.wire.generations import joined_generations
from slime_plugins.rollout_buffer.wire.items import Item, checked_turn_rewards


class ErrorBody(WireRecord):
    """What went wrong."""

    code: str
    """Stable code for programs."""
    message: str
    """A sentence for people."""
    detail: dict[str, Any] | None = None
    """Details for programs."""


class Error(WireRecord):
    """The reply to a request that failed."""

    error: ErrorBody
    """The error."""


class InvalidReplyError(ValueError):
    """A reply does not follow the protocol; it is probably not from a rollout buffer."""


class StartReply(WireRecord):
    """The buffer's answer to ``start_rollout``."""

    message: str = ""
    """`Rollout started` or `Rollout attached`."""
    job_id: str
    """Id of the job, for later calls."""
    state: Annotated[JobState, Field(strict=False)]
    """Its state."""
    attached: bool = False
    """True if the job existed."""
    reopened: bool = False
    """True if the job had failed: its failed groups are played again."""
    groups: int = 0
    """Instances times epochs."""
    group_size: int = 0
    """Slots of each group."""
    notes: list[str] = Field(default_factory=list)
    """Warnings about effects of the settings on the data."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutItem:
    """One delivered member of a group, as the trainer sees it.

    ``group_index`` is one integer per (job, epoch, instance). ``weight_version`` is the oldest version that sampled
    some of its tokens, None if unknown. ``remove_sample`` marks a dummy in place of a member that could not be played.
    ``error`` is set if this item was malformed: it is then a dummy as well, and the other items are not affected.
    ``raw`` is the item as it was received.
    """

    uid: str
    instance_id: str
    messages: Sequence[Message] = ()
    reward: float | None = None
    raw_reward: float | None = None
    turn_rewards: tuple[float, ...] | None = None
    token_rewards: tuple[tuple[float, ...] | None, ...] | None = None
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    generations: Sequence[Generation] = ()
    images: Sequence[str] = ()
    group_index: int = -1
    weight_version: int | None = None
    epoch: int = 0
    slot: int = 0
    outcome: str = Outcome.COMPLETED.value
    stop_reason: str = StopReason.STOP.value
    remove_sample: bool = False
    error: str | None = None
    raw: Mapping[str, Any] = field(default_factory=dict)


class _Groups(WireRecord):
    """The groups of a delivery, whose items are not checked yet."""

    data: list[Any]
    meta_info: dict[str, Any] = Field(default_factory=dict)


class _PollReply(WireRecord):
    """A reply to ``get_rollout_data``, whose items are not checked yet."""

    success: bool
    message: str = ""
    data: _Groups


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutData:
    """One reply to ``get_rollout_data``. ``success`` is False if no group was ready: poll again later."""

    success: bool
    message: str
    items: tuple[RolloutItem, ...] = ()
    meta_info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def delivery_id(self) -> str | None:
        """Id to acknowledge; None if nothing was delivered."""
        value = self.meta_info.get("delivery_id")
        return value if isinstance(value, str) else None

    @property
    def group_numbers(self) -> frozenset[int]:
        """The ``group_index`` of each group of the delivery."""
        return frozenset(item.group_index for item in self.items if item.group_index >= 0)

    @property
    def exhausted(self) -> bool:
        """True if no group of the job can become ready any more."""
        return self.meta_info.get("exhausted") is True


def decode_start_reply(reply: Any) -> StartReply:
    """Checks the reply to ``start_rollout``; raises ``InvalidReplyError`` if it does not follow the protocol."""
    try:
        return checked(StartReply.model_validate, reply, "the buffer's reply to start_rollout")
    except InvalidPayloadError as error:
        raise InvalidReplyError(error.message) from error


def decode_rollout_data(reply: Any) -> RolloutData:
    """Checks a reply to ``get_rollout_data``. One malformed item becomes an item with ``error``.

    Raises:
        InvalidReplyError: the reply, apart from its items, does not follow the protocol.
    """
    try:
        poll_reply = checked(_PollReply.model_validate, reply, "the buffer's reply")
    except InvalidPayloadError as error:
        raise InvalidReplyError(error.message) from error
    return RolloutData(
        success=poll_reply.success,
        message=poll_reply.message,
        items=tuple(decode_item(item, position) for position, item in enumerate(poll_reply.data.data)),
        meta_info=poll_reply.data.meta_info,
    )


def decode_item(item: Any, position: int = 0) -> RolloutItem:
    """Decodes one delivered item; a malformed item is returned with ``error`` and ``remove_sample`` set."""
    try:
        return _decode_item(item, checked(Item.model_validate, item, f"item {position}"))
    except InvalidPayloadError as error:
        raw = item if isinstance(item, dict) else {"item": item}
        return RolloutItem(
            uid=str(raw.get("uid", f"malformed-{position}")),
            instance_id=str(raw.get("instance_id", "")),
            group_index=_integer_or(raw.get("group_index"), -1),
            epoch=_integer_or(raw.get("epoch"), 0),
            slot=_integer_or(raw.get("slot"), position),
            outcome=Outcome.FAILED.value,
            remove_sample=True,
            error=str(error),
            raw=raw,
        )


def _decode_item(raw: Mapping[str, Any], item: Item) -> RolloutItem:
    generations = joined_generations(item.generations or ())
    turn_rewards, token_rewards = None, None
    if not item.remove_sample:
        turn_rewards, token_rewards = checked_turn_rewards(raw, item.messages, generations)
    return RolloutItem(
        uid=item.uid,
        instance_id=item.instance_id,
        messages=tuple(item.messages),
        reward=item.reward,
        raw_reward=item.raw_reward,
        turn_rewards=turn_rewards,
        token_rewards=token_rewards,
        extra_info=item.extra_info,
        generations=generations,
        images=tuple(item.images),
        group_index=item.group_index,
        weight_version=item.weight_version,
        epoch=item.epoch,
        slot=item.slot,
        outcome=item.outcome.value,
        stop_reason=item.stop_reason.value,
        remove_sample=item.remove_sample,
        raw=raw,
    )


def _integer_or(value: Any, default: int) -> int:
    return value if type(value) is int else default


def encode_error(code: str, message: str, detail: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns the reply to a request that failed: stable code, sentence, and details for programs."""
    return {"error": {"code": code, "message": message, "detail": dict(detail or {})}}


def decode_error(content: bytes) -> tuple[str, str, dict[str, Any]] | None:
    """Returns code, message and detail of an error reply; None for other content."""
    try:
        error = Error.model_validate_json(content).error
    except ValueError:
        return None
    return error.code, error.message, error.detail or {}
