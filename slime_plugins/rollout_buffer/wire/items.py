"""Items on the wire: what a program writes, what a trainer is given, and what is stored of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, WithJsonSchema, model_validator

from slime_plugins.rollout_buffer.errors import InvalidPayloadError
from slime_plugins.rollout_buffer.rules.prompt_receipts import prompt_counts
from slime_plugins.rollout_buffer.rules.rewards import as_token_rewards, as_turn_rewards
from slime_plugins.rollout_buffer.rules.typos import nearest
from slime_plugins.rollout_buffer.types import Generation, Image, Message, Outcome, StopReason, Trajectory
from slime_plugins.rollout_buffer.wire.checks import (
    MAX_ITEMS,
    Identifier,
    MustBe,
    Reward,
    Sha256,
    WireRecord,
    WrittenRecord,
    checked,
    refuse_misspelt,
)
from slime_plugins.rollout_buffer.wire.generations import (
    GenerationEntries,
    WrittenGeneration,
    encode_generations,
    joined_generations,
)
from slime_plugins.rollout_buffer.wire.images import take_images_out

MESSAGE_KEYS = frozenset(
    {
        "role", "content", "tool_calls", "tool_call_id", "function_call", "name", "reasoning_content", "reasoning",
        "refusal", "step_loss_mask",
    }
)  # fmt: skip
"""What chat templates and loss masks read; beside them a message may hold anything."""
IN_PLACE_OF_CONTENT = ("tool_calls", "function_call", "reasoning_content", "reasoning", "refusal")
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "observation", "ipython", "model"})
"""Those that are often used: what a misspelt one may have meant. Any other is the template's business."""


# --- messages --------------------------------------------------------------------------------------------------------


def _with_role(message: Message) -> Message:
    if not isinstance(message.get("role"), str):
        raise ValueError("must be an object with a role")
    return message


def _with_content(message: Message) -> Message:
    """Refuses what a chat template would skip in silence: a gap in training."""
    if not message.keys() <= MESSAGE_KEYS:
        refuse_misspelt(message, MESSAGE_KEYS)
    role, content = message["role"], message.get("content")
    if role not in ROLES and (near := nearest(role, ROLES)):
        raise ValueError(f".role is {role[:80]!r}; did you mean {near}?")
    if content is None and not any(message.get(key) for key in IN_PLACE_OF_CONTENT):
        raise ValueError(f"has no content, and none of {', '.join(IN_PLACE_OF_CONTENT)}")
    if not isinstance(content, str | list | None):
        raise ValueError(".content must be a string or a list of parts")
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
WrittenMessages = Annotated[list[Annotated[ChatMessage, AfterValidator(_with_content)]], Field(fail_fast=True)]
_MESSAGES: TypeAdapter[list[Message]] = TypeAdapter(WrittenMessages)


def check_messages(messages: Sequence[Message]) -> None:
    """Checks that each message says something.

    Raises:
        InvalidPayloadError: one has no content, or a misspelt role or key; names it, and what was meant.
    """
    checked(_MESSAGES.validate_python, list(messages), "messages")


# --- items -----------------------------------------------------------------------------------------------------------


class _ItemFields(WireRecord):
    """What a written item and a delivered one have in common."""

    uid: Identifier
    """Names the trajectory; the same uid twice is one item. A dummy has one of its own."""
    instance_id: Identifier
    """The line of the input that it belongs to."""
    messages: list[ChatMessage]
    """OpenAI messages; screenshots as data URIs of PNG, JPEG or WebP, or by hash."""
    reward: Reward
    """What the trainer is to use; finite."""
    raw_reward: Reward | None = None
    """What the episode earned, when that differs."""
    turn_rewards: list[Reward] | None = None
    """What each turn earned: one finite number for each generation that is trained, or, without generations, for each
    assistant message that is; left out where nobody said."""
    token_rewards: list[list[Reward] | None] | None = None
    """What single tokens earned beside: for each of those turns null, or a number for each output id."""
    extra_info: dict[str, Any] = Field(default_factory=dict)
    """What the generator says of it; `finish_reason: length` means truncated."""
    generations: GenerationEntries | None = None
    """Token ids and log-probabilities as sampled; empty when not known."""
    timings_s: dict[str, Any] = Field(default_factory=dict)
    """Seconds by phase of the episode."""
    remove_sample: bool = False
    """A dummy that stands for a missing member: never train it, never write it."""


class Item(_ItemFields):
    """One member of a delivered group."""

    extra_info: dict[str, Any]
    """What the generator says of it."""
    images: list[Sha256] = Field(default_factory=list)
    """sha256 of each screenshot, in order of first appearance."""
    group_index: int = -1
    """One per group."""
    epoch: int = 0
    """Which pass over the input, from 0."""
    slot: int = 0
    """Place in the group, from 0."""
    outcome: Annotated[Outcome, Field(strict=False)] = Outcome.COMPLETED
    """How the attempt ended."""
    stop_reason: Annotated[StopReason, Field(strict=False)] = StopReason.STOP
    """Why the episode stopped."""
    weight_version: int | None = None
    """The oldest weights that sampled it; null when it is unknown."""


class WrittenItemBody(WrittenRecord, _ItemFields):
    """A finished trajectory. Any other key is kept in `extra_info`, but one that is nearly one of these is refused as a
    slip. `weight_version` stands in each of `generations`, which have no keys of your own."""

    model_config = ConfigDict(extra="allow")

    messages: WrittenMessages
    """OpenAI messages; screenshots as data URIs of PNG, JPEG or WebP, or by hash."""
    generations: Annotated[list[WrittenGeneration], Field(fail_fast=True)] | None = None  # type: ignore[assignment]  # a list of less general entries, which is not changed
    """Token ids as sampled."""
    outcome: (
        Annotated[
            Literal["completed", "truncated"],
            MustBe("completed or truncated: what a failed or aborted attempt earned is unknown, and it is not written"),
        ]
        | None
    ) = None
    """completed when left out."""
    stop_reason: Annotated[StopReason, Field(strict=False)] | None = None
    """stop when left out."""
    tools: list[Any] | None = None
    """Shown to the chat template; kept as `extra_info.tools`."""

    @model_validator(mode="after")
    def _is_to_be_trained(self) -> WrittenItemBody:
        if self.remove_sample:
            raise ValueError(".remove_sample is true: what is not to be trained is not written")
        if not self.messages and not self.generations:
            raise ValueError("has neither messages nor generations: there is nothing to train")
        if self.outcome is None and self.extra_info.get("finish_reason") == "abort":
            raise ValueError(
                ".extra_info.finish_reason is abort: what an aborted attempt earned is unknown, and it is not written"
            )
        return self

    @model_validator(mode="after")
    def _names_its_weights_where_its_tokens_are(self) -> WrittenItemBody:
        if (self.model_extra or {}).get("weight_version") is not None and not self.generations:
            raise ValueError(".weight_version stands in each of its generations, and it has none")
        return self

    def kept_extra_info(self) -> dict[str, Any]:
        """Returns ``extra_info`` with keys of the writer's own; what is the buffer's to find out is left out."""
        own = (self.model_extra or {}).items()
        kept = {key: value for key, value in own if key not in Item.model_fields} | self.extra_info
        if self.tools is not None:  # the trainer shows them to the chat template
            kept["tools"] = self.tools
        truncated = self.extra_info.get("finish_reason") == "length"
        outcome = self.outcome or (Outcome.TRUNCATED if truncated else Outcome.COMPLETED)
        stop_reason = self.stop_reason or (StopReason.MAX_TOKENS if truncated else StopReason.STOP)
        return {**kept, "outcome": Outcome(outcome).value, "stop_reason": stop_reason.value}


class ItemOfJob(WrittenItemBody):
    """The body of a write of one item."""

    job_id: Identifier | None = None
    """The job it belongs to; may be left out while only one is open."""


class ItemsOfJob(WireRecord):
    """The body of a write of several items."""

    job_id: Identifier | None = None
    """The job they belong to; may be left out while only one is open."""
    items: Annotated[list[WrittenItemBody], Field(min_length=1, max_length=MAX_ITEMS)]
    """All are checked before one is kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenItem:
    """One item that a generator somewhere posted to ``/buffer/write``, checked and with its images taken out."""

    uid: str
    instance_id: str
    reward: float
    raw_reward: float | None
    outcome: Outcome
    stop_reason: StopReason
    body: dict[str, Any]
    images: Mapping[str, Image]
    """Screenshots that came with it, by hash; of other items of the same call as well."""
    generations: tuple[Generation, ...] = ()
    largest_id: int = -1
    """Of all token ids that came; -1 when none did."""

    @property
    def extra_info(self) -> Mapping[str, Any]:
        """What the generator says of it."""
        return self.body["extra_info"]  # type: ignore[no-any-return]  # the body is JSON, checked when it came

    @property
    def timings_s(self) -> Mapping[str, Any]:
        """Seconds by phase."""
        return self.body["timings_s"]  # type: ignore[no-any-return]  # as above


def decode_written_item(entry: Any, *, where: str = "item", images: Mapping[str, Image] | None = None) -> WrittenItem:
    """Checks one item of a ``/buffer/write`` body and takes the images out of its messages.

    ``images`` are screenshots that were taken out of the body already, by hash.

    Raises:
        InvalidPayloadError: names the key that is missing or wrong, and what it should be.
    """
    item = checked(WrittenItemBody.model_validate, entry, where)
    generations = joined_generations(item.generations or ())
    turn_rewards = checked_turn_rewards(entry, item.messages, generations, where)
    extra_info = item.kept_extra_info()
    came = dict(images or {})
    shown: dict[str, None] = {}
    body = {
        "messages": [take_images_out(message, came, shown, f"{where}.messages") for message in item.messages],
        "extra_info": extra_info,
        "generations": encode_generations(generations),
        "images": list(shown),
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
        images=came,
        generations=generations,
        largest_id=max((_largest_id(entry) for entry in item.generations or ()), default=-1),
    )


def _largest_id(entry: WrittenGeneration) -> int:
    return max(max(entry.prompt_ids, default=-1), max(entry.output_ids, default=-1))


# --- what is stored --------------------------------------------------------------------------------------------------


def encode_body(trajectory: Trajectory) -> dict[str, Any]:
    """Encodes the part of a trajectory that only readers care about; what the buffer decides by stays in columns."""
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
    """Encodes the rewards of turns and tokens; no key where there are none."""
    encoded: dict[str, Any] = {}
    if turn_rewards is not None:
        encoded["turn_rewards"] = [float(reward) for reward in turn_rewards]
    if token_rewards is not None:
        encoded["token_rewards"] = [None if own is None else [float(one) for one in own] for own in token_rewards]
    return encoded


TurnRewards = tuple[tuple[float, ...] | None, tuple[tuple[float, ...] | None, ...] | None]
"""What turns earned, and what their tokens earned beside."""


def checked_turn_rewards(
    fields: Mapping[str, Any], messages: Sequence[Message], generations: Sequence[Generation], where: str = ""
) -> TurnRewards:
    """Returns ``turn_rewards`` and ``token_rewards`` of an object, held to the trajectory's turns that are trained.

    Raises:
        InvalidPayloadError: no list, a number that is no reward, or not one for each turn (and token).
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
    """Returns the sampled tokens of each turn that is trained; None of a trajectory that came as messages alone."""
    if generations:
        return [len(one.output_ids) for one in generations if one.trained]
    return [None for one in messages if one.get("role") == "assistant" and one.get("step_loss_mask", 1) == 1]
