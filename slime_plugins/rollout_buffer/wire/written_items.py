"""Items as programs write them, with their checks, and items as they are stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, model_validator

from slime_plugins.rollout_buffer.rules.prompt_receipts import prompt_counts
from slime_plugins.rollout_buffer.types import Generation, Image, Message, Outcome, StopReason, Trajectory
from slime_plugins.rollout_buffer.wire.checks import (
    MAX_ITEMS,
    Identifier,
    MustBe,
    WireRecord,
    WrittenRecord,
    checked,
    nearest_key,
    refuse_misspelt,
)
from slime_plugins.rollout_buffer.wire.generations import WrittenGeneration, encode_generations, joined_generations
from slime_plugins.rollout_buffer.wire.images import take_images_out
from slime_plugins.rollout_buffer.wire.items import ChatMessage, Item, ItemFields, checked_turn_rewards

MESSAGE_KEYS = frozenset(
    {
        "role", "content", "tool_calls", "tool_call_id", "function_call", "name", "reasoning_content", "reasoning",
        "refusal", "step_loss_mask",
    }
)  # fmt: skip
"""Keys that chat templates and loss masks read; a message may have other keys."""
IN_PLACE_OF_CONTENT = ("tool_calls", "function_call", "reasoning_content", "reasoning", "refusal")
"""A message without content must have one of these keys."""
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "observation", "ipython", "model"})
"""Common roles. A role that resembles one of them is refused as misspelt; other roles are for the chat template."""


# --- messages --------------------------------------------------------------------------------------------------------


def _with_content(message: Message) -> Message:
    """Refuses messages that a chat template would skip silently: they would be missing in training."""
    if not message.keys() <= MESSAGE_KEYS:
        refuse_misspelt(message, MESSAGE_KEYS)
    role, content = message["role"], message.get("content")
    if role not in ROLES and (near := nearest_key(role, ROLES)):
        raise ValueError(f".role is {role[:80]!r}; did you mean {near}?")
    if content is None and not any(message.get(key) for key in IN_PLACE_OF_CONTENT):
        raise ValueError(f"has no content, and none of {', '.join(IN_PLACE_OF_CONTENT)}")
    if not isinstance(content, str | list | None):
        raise ValueError(".content must be a string or a list of parts")
    return message


WrittenMessages = Annotated[list[Annotated[ChatMessage, AfterValidator(_with_content)]], Field(fail_fast=True)]
_MESSAGES: TypeAdapter[list[Message]] = TypeAdapter(WrittenMessages)


def check_messages(messages: Sequence[Message]) -> None:
    """Checks that each message has content.

    Raises:
        InvalidPayloadError: a message has no content, or a misspelt role or key; the error suggests what was meant.
    """
    checked(_MESSAGES.validate_python, list(messages), "messages")


# --- items -----------------------------------------------------------------------------------------------------------


class WrittenItemBody(WrittenRecord, ItemFields):
    """A finished trajectory. Other keys are stored in `extra_info`, except near misspellings of these keys, which are
    refused. `weight_version` belongs in each entry of `generations`; an entry with an unknown key is refused."""

    model_config = ConfigDict(extra="allow")

    messages: WrittenMessages
    """OpenAI messages; screenshots as data URIs of PNG, JPEG or WebP, or by hash."""
    generations: Annotated[list[WrittenGeneration], Field(fail_fast=True)] | None = None  # type: ignore[assignment]  # a list of less general entries, which is not changed
    """Token ids as sampled."""
    outcome: (
        Annotated[
            Literal["completed", "truncated"],
            MustBe("completed or truncated: the reward of a failed or aborted attempt is unknown, so do not write it"),
        ]
        | None
    ) = None
    """By default `completed`, or `truncated` if `extra_info.finish_reason` is `length`."""
    stop_reason: Annotated[StopReason, Field(strict=False)] | None = None
    """By default `stop`, or `max_tokens` if `extra_info.finish_reason` is `length`."""
    tools: list[Any] | None = None
    """Tools for the chat template; stored as `extra_info.tools`."""

    @model_validator(mode="after")
    def _is_to_be_trained(self) -> WrittenItemBody:
        if self.remove_sample:
            raise ValueError(".remove_sample is true: do not write items that are not to be trained")
        if not self.messages and not self.generations:
            raise ValueError("has neither messages nor generations: there is nothing to train")
        if self.outcome is None and self.extra_info.get("finish_reason") == "abort":
            raise ValueError(
                ".extra_info.finish_reason is abort: the reward of an aborted attempt is unknown, so do not write it"
            )
        return self

    @model_validator(mode="after")
    def _names_its_weights_where_its_tokens_are(self) -> WrittenItemBody:
        if (self.model_extra or {}).get("weight_version") is not None and not self.generations:
            raise ValueError(".weight_version belongs in each entry of generations, and there is none")
        return self

    def stored_extra_info(self) -> dict[str, Any]:
        """Returns ``extra_info`` with the writer's own keys of the item, without keys that the buffer sets itself."""
        own_keys = (self.model_extra or {}).items()
        stored = {key: value for key, value in own_keys if key not in Item.model_fields} | self.extra_info
        if self.tools is not None:  # the trainer passes them to the chat template
            stored["tools"] = self.tools
        truncated = self.extra_info.get("finish_reason") == "length"
        outcome = self.outcome or (Outcome.TRUNCATED if truncated else Outcome.COMPLETED)
        stop_reason = self.stop_reason or (StopReason.MAX_TOKENS if truncated else StopReason.STOP)
        return {**stored, "outcome": Outcome(outcome).value, "stop_reason": stop_reason.value}


class ItemOfJob(WrittenItemBody):
    """The body of a write of one item."""

    job_id: Identifier | None = None
    """The job; may be left out while only one job is open."""


class ItemsOfJob(WireRecord):
    """The body of a write of several items."""

    job_id: Identifier | None = None
    """The job; may be left out while only one job is open."""
    items: Annotated[list[WrittenItemBody], Field(min_length=1, max_length=MAX_ITEMS)]
    """The items; either all are stored or none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenItem:
    """An item from a body of ``/buffer/write``: checked, with its images extracted."""

    uid: str
    instance_id: str
    reward: float
    raw_reward: float | None
    outcome: Outcome
    stop_reason: StopReason
    body: dict[str, Any]
    images: Mapping[str, Image]
    """Screenshots of the request by hash, including those of its other items."""
    generations: tuple[Generation, ...] = ()
    largest_id: int = -1
    """The largest token id of the item; -1 without token ids."""

    @property
    def extra_info(self) -> Mapping[str, Any]:
        """Further fields of the generator."""
        return self.body["extra_info"]  # type: ignore[no-any-return]  # the body is JSON, checked when it came

    @property
    def timings_s(self) -> Mapping[str, Any]:
        """Seconds by phase of the episode."""
        return self.body["timings_s"]  # type: ignore[no-any-return]  # as above


def decode_written_item(written: Any, *, where: str = "item", images: Mapping[str, Image] | None = None) -> WrittenItem:
    """Checks one item of a ``/buffer/write`` body and replaces the screenshots in its messages by hashes.

    ``images`` are screenshots that were taken out of the body before it was parsed, by hash.

    Raises:
        InvalidPayloadError: names the key that is missing or wrong, and what it should be.
    """
    item = checked(WrittenItemBody.model_validate, written, where)
    generations = joined_generations(item.generations or ())
    turn_rewards = checked_turn_rewards(written, item.messages, generations, where)
    extra_info = item.stored_extra_info()
    id_lists = [ids for entry in item.generations or () for ids in (entry.prompt_ids, entry.output_ids)]
    inline = dict(images or {})
    hashes: dict[str, None] = {}
    body = {
        "messages": [take_images_out(message, inline, hashes, f"{where}.messages") for message in item.messages],
        "extra_info": extra_info,
        "generations": encode_generations(generations),
        "images": list(hashes),
        "timings_s": item.timings_s,
        **encode_turn_rewards(*turn_rewards),
    }
    return WrittenItem(
        uid=item.uid,
        instance_id=item.instance_id,
        reward=item.reward,
        raw_reward=item.raw_reward,
        outcome=Outcome(extra_info["outcome"]),
        stop_reason=StopReason(extra_info["stop_reason"]),
        body=body,
        images=inline,
        generations=generations,
        largest_id=max((max(ids, default=-1) for ids in id_lists), default=-1),
    )


# --- what is stored --------------------------------------------------------------------------------------------------


def encode_body(trajectory: Trajectory) -> dict[str, Any]:
    """Encodes the payload of a trajectory. Values that the buffer's rules need are in columns as well."""
    extra_info = {
        **trajectory.extra_info,
        "outcome": trajectory.outcome.value,
        "stop_reason": trajectory.stop_reason.value,
    }
    if (prompts := prompt_counts(trajectory.generations)) is not None:
        extra_info["prompts"] = prompts.as_dict()
    extra_info.setdefault("finish_reason", "length" if trajectory.outcome is Outcome.TRUNCATED else "stop")
    return {
        "messages": list(trajectory.messages),
        "extra_info": extra_info,
        "generations": encode_generations(trajectory.generations),
        "images": [image.sha256 for image in trajectory.images],
        "timings_s": dict(trajectory.timings_s),
        **encode_turn_rewards(trajectory.turn_rewards, trajectory.token_rewards),
    }


def encode_turn_rewards(
    turn_rewards: Sequence[float] | None, token_rewards: Sequence[Sequence[float] | None] | None
) -> dict[str, Any]:
    """Encodes the rewards of turns and tokens; without rewards there is no key."""
    encoded: dict[str, Any] = {}
    if turn_rewards is not None:
        encoded["turn_rewards"] = [float(reward) for reward in turn_rewards]
    if token_rewards is not None:
        encoded["token_rewards"] = [None if turn is None else list(map(float, turn)) for turn in token_rewards]
    return encoded
