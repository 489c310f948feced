"""The one file that spells JSON keys: records on one side, what goes over HTTP and into payload files on the other.

Standard library only, because the trainer's client stands on it. What comes in is checked key by key: a wrong type is
an ``InvalidPayloadError`` whose sentence names the key, never a ``KeyError`` from somewhere deeper.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime.utils.mask_records import RECORDS_MAGIC, ROUTED_EXPERTS, TOP_P_TOKENS, RecordBytes
from slime_plugins.rollout_buffer.errors import InvalidPayloadError
from slime_plugins.rollout_buffer.rules.prompt_receipts import prompt_counts
from slime_plugins.rollout_buffer.rules.rewards import as_reward, as_token_rewards, as_turn_rewards
from slime_plugins.rollout_buffer.rules.typos import misspelt, nearest
from slime_plugins.rollout_buffer.rules.vocabulary import MAX_VOCABULARY, checked_log_prob
from slime_plugins.rollout_buffer.types import (
    Generation,
    Image,
    Message,
    Outcome,
    PromptCheck,
    PromptReceipt,
    StopReason,
    Trajectory,
    WeightVersionSpan,
)

MAX_IDENTIFIER = 256
"""Characters of an id."""
IMAGE_URL_PREFIX = "sha256:"
MAX_GENERATION_IDS = 2**25
"""Ids of all generations of one item, each prompt counted anew: with ``keep``, a short body can mean any number."""

_DATA_URI = re.compile(r"data:(image/(?:png|jpeg|webp));base64,", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
RECORDS_TYPE = "application/x-token-records"
"""Of token records, which are kept and fetched as screenshots are."""
_MEDIA_TYPE_BY_MAGIC = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"RIFF", "image/webp"),
    (RECORDS_MAGIC, RECORDS_TYPE),
)

RECORD_KINDS = (ROUTED_EXPERTS, TOP_P_TOKENS)
WRITTEN_OUTCOMES = (Outcome.COMPLETED, Outcome.TRUNCATED)
"""How an attempt ended that may have earned a reward."""

ITEM_KEYS = frozenset(
    {
        "uid", "instance_id", "messages", "reward", "raw_reward", "turn_rewards", "token_rewards", "extra_info",
        "outcome", "stop_reason", "tools", "generations", "timings_s", "remove_sample",
    }
)  # fmt: skip
KEYS_OF_DELIVERED_ITEMS = frozenset({"group_index", "epoch", "slot", "images", "weight_version"})
"""What a delivered item has beside those: it is the buffer's to find out, and nothing that is written."""
GENERATION_KEYS = frozenset(
    {
        "keep", "prompt_ids", "output_ids", "output_log_probs", "finish_reason", "weight_version",
        "weight_version_spans", "trained", "keep_images", "images", "prompt_tokens", "cached_tokens",
        "records",
        "prompt_receipt",
    }
)  # fmt: skip
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


@dataclass(frozen=True, kw_only=True, slots=True)
class StartReply:
    """The buffer's answer to ``start_rollout``. ``attached`` is true when the job was there already.

    ``notes`` say what its settings do to the data.
    """

    job_id: str
    state: str
    message: str
    attached: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutItem:
    """One delivered member of a group, as the trainer sees it.

    ``group_index`` is one integer per (job, epoch, instance). ``weight_version`` is the oldest that sampled some of its
    tokens, None when it is unknown. ``remove_sample`` marks a dummy that stands for a member that could not be played.
    ``error`` is set when this one item came malformed: it is then a dummy as well, and the rest of the delivery is not
    affected. ``raw`` is the item exactly as it came over the wire.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutData:
    """One reply to ``get_rollout_data``. ``success`` is false when nothing was ready; ask again then."""

    success: bool
    message: str
    items: tuple[RolloutItem, ...] = ()
    meta_info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def delivery_id(self) -> str | None:
        """What to acknowledge; None when nothing was delivered."""
        value = self.meta_info.get("delivery_id")
        return value if isinstance(value, str) else None

    @property
    def group_numbers(self) -> frozenset[int]:
        """The ``group_index`` of each group in it."""
        return frozenset(item.group_index for item in self.items if item.group_index >= 0)

    @property
    def exhausted(self) -> bool:
        """True when every group of the job is finished and nothing more will ever be ready."""
        return self.meta_info.get("exhausted") is True


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


# --- generations -----------------------------------------------------------------------------------------------------


def encode_generations(generations: Sequence[Generation]) -> list[dict[str, Any]]:
    """Encodes each prompt as what it shares with the sequence before it, plus the new ids: linear in the episode."""
    encoded: list[dict[str, Any]] = []
    held: list[int] = []
    shown: tuple[str, ...] = ()
    sent: tuple[str, ...] = ()
    for generation in generations:
        keep = common_prefix_length(held, generation.prompt_ids)
        entry = _encode_generation(generation, keep)
        if generation.images is not None:
            entry |= _encode_images(generation.images, shown)
        if generation.prompt_receipt is not None and generation.prompt_receipt.images:
            entry["prompt_receipt"] |= _encode_images(generation.prompt_receipt.images, sent)
        encoded.append(entry)
        held = [*generation.prompt_ids, *generation.output_ids]
        shown, sent = generation.images or (), _sent_images(generation)
    return encoded


def _encode_images(images: Sequence[str], before: Sequence[str]) -> dict[str, Any]:
    """Encodes the images of a turn as its ids are: how many of the turn before, and the new ones."""
    keep = common_prefix_length(before, images)
    return {"keep_images": keep, "images": list(images[keep:])}


def _sent_images(generation: Generation) -> tuple[str, ...]:
    return () if generation.prompt_receipt is None else generation.prompt_receipt.images


def _encode_generation(generation: Generation, keep: int) -> dict[str, Any]:
    log_probs = generation.output_log_probs
    entry: dict[str, Any] = {
        "keep": keep,
        "prompt_ids": list(generation.prompt_ids[keep:]),
        "output_ids": list(generation.output_ids),
        "output_log_probs": None if log_probs is None else list(log_probs),
        "finish_reason": generation.finish_reason,
        "weight_version": generation.weight_version,
    }
    if not generation.trained:
        entry["trained"] = False
    if generation.prompt_tokens is not None:
        entry["prompt_tokens"] = generation.prompt_tokens
    if generation.cached_tokens is not None:
        entry["cached_tokens"] = generation.cached_tokens
    if generation.records:
        entry["records"] = {kind: one.sha256 for kind, one in generation.records.items()}
    if generation.prompt_receipt is not None:
        entry["prompt_receipt"] = _encode_receipt(generation.prompt_receipt, generation.prompt_ids)
    if generation.weight_version_spans:
        entry["weight_version_spans"] = [
            {"weight_version": span.weight_version, "start": span.start, "end": span.end}
            for span in generation.weight_version_spans
        ]
    return entry


def _encode_receipt(receipt: PromptReceipt, ran_ids: Sequence[int]) -> dict[str, Any]:
    """Encodes the ids that were sent as what stands between a beginning and an end that they share with the prompt."""
    entry: dict[str, Any] = {"check": receipt.check.value}
    if receipt.image_tokens is not None:
        entry["image_tokens"] = list(receipt.image_tokens)
    if receipt.untrained_because:
        entry["untrained_because"] = receipt.untrained_because
    if receipt.sent_ids is not None:
        ran, sent = list(ran_ids), list(receipt.sent_ids)
        keep = common_prefix_length(ran, sent)
        keep_end = common_prefix_length(ran[keep:][::-1], sent[keep:][::-1])
        entry["sent"] = {"keep": keep, "ids": sent[keep : len(sent) - keep_end], "keep_end": keep_end}
    return entry


def common_prefix_length(left: Sequence[int] | Sequence[str], right: Sequence[int] | Sequence[str]) -> int:
    """Returns how many leading ids two sequences share. An exact prefix, the usual case, costs one comparison."""
    shorter = min(len(left), len(right))
    if list(left[:shorter]) == list(right[:shorter]):
        return shorter
    return next(index for index in range(shorter) if left[index] != right[index])


def decode_generations(encoded: Any) -> tuple[Generation, ...]:
    """Rebuilds the generations of an item; the inverse of ``encode_generations``.

    Raises:
        InvalidPayloadError: a key has the wrong type, or ``keep`` reaches beyond the generation before it.
    """
    if encoded is None:
        return ()
    generations: list[Generation] = []
    held: list[int] = []
    total = 0
    shown: tuple[str, ...] = ()
    sent: tuple[str, ...] = ()
    for index, entry in enumerate(_expect(encoded, list, "generations")):
        where = f"generations[{index}]"
        generation = _decode_generation(_expect(entry, dict, where), held, shown, sent, where)
        generations.append(generation)
        held = [*generation.prompt_ids, *generation.output_ids]
        total += len(held)
        if total > MAX_GENERATION_IDS:
            raise InvalidPayloadError(f"generations hold more than {MAX_GENERATION_IDS} ids together")
        shown, sent = generation.images or (), _sent_images(generation)
    return tuple(generations)


def _decode_images(entry: Mapping[str, Any], shown: Sequence[str], where: str) -> tuple[str, ...] | None:
    if entry.get("images") is None:
        return None
    keep = _expect(entry.get("keep_images", 0), int, f"{where}.keep_images")
    if not 0 <= keep <= len(shown):
        raise InvalidPayloadError(f"{where}.keep_images is {keep}, but the generation before it has {len(shown)}")
    new = _expect(entry["images"], list, f"{where}.images")
    if not all(isinstance(sha256, str) and is_sha256(sha256) for sha256 in new):
        raise InvalidPayloadError(f"{where}.images must be a list of sha256 in lower-case hex")
    return (*shown[:keep], *new)


def _weight_version(entry: Mapping[str, Any], where: str) -> str | None:
    version = entry.get("weight_version")
    if version is None:
        return None
    if isinstance(version, bool) or not isinstance(version, str | int):
        raise InvalidPayloadError(f"{where}.weight_version must be a string or an integer, not {_kind(version)}")
    return str(version)


def _count(entry: Mapping[str, Any], key: str, where: str) -> int | None:
    value = entry.get(key)
    return None if value is None else int(_expect(value, int, f"{where}.{key}"))


def _decode_generation(
    entry: Mapping[str, Any], held: Sequence[int], shown: Sequence[str], sent: Sequence[str], where: str
) -> Generation:
    keep = _expect(entry.get("keep", 0), int, f"{where}.keep")
    if not 0 <= keep <= len(held):
        raise InvalidPayloadError(f"{where}.keep is {keep}, but the generation before it has {len(held)} ids")
    output_ids = _token_ids(entry.get("output_ids"), f"{where}.output_ids")
    prompt_ids = [*held[:keep], *_token_ids(entry.get("prompt_ids"), f"{where}.prompt_ids")]
    return Generation(
        prompt_ids=prompt_ids,
        output_ids=output_ids,
        output_log_probs=_log_probs(entry.get("output_log_probs"), len(output_ids), f"{where}.output_log_probs"),
        finish_reason=_expect(entry.get("finish_reason", "stop"), str, f"{where}.finish_reason"),
        weight_version=_weight_version(entry, where),
        trained=_expect(entry.get("trained", True), bool, f"{where}.trained"),
        weight_version_spans=_spans(entry.get("weight_version_spans", []), f"{where}.weight_version_spans"),
        images=_decode_images(entry, shown, where),
        prompt_tokens=_count(entry, "prompt_tokens", where),
        cached_tokens=_count(entry, "cached_tokens", where),
        records=_records(entry.get("records", {}), f"{where}.records"),
        prompt_receipt=_receipt(entry.get("prompt_receipt"), prompt_ids, sent, f"{where}.prompt_receipt"),
    )


def _records(value: Any, where: str) -> dict[str, RecordBytes]:
    named = _expect(value, dict, where)
    for kind, sha256 in named.items():
        if kind not in RECORD_KINDS or not isinstance(sha256, str) or not is_sha256(sha256):
            raise InvalidPayloadError(
                f"{where} must name records of {' or '.join(RECORD_KINDS)} by their sha256 in lower-case hex"
            )
    return {kind: RecordBytes(sha256) for kind, sha256 in named.items()}


def record_hashes(generations: Iterable[Generation]) -> list[str]:
    """Returns the token records that generations name, each once."""
    return list(dict.fromkeys(one.sha256 for generation in generations for one in generation.records.values()))


def _receipt(value: Any, ran_ids: Sequence[int], sent: Sequence[str], where: str) -> PromptReceipt | None:
    if value is None:
        return None
    entry = _expect(value, dict, where)
    check, tokens = entry.get("check"), entry.get("image_tokens")
    if check not in set(PromptCheck):
        raise InvalidPayloadError(f"{where}.check must be one of {', '.join(PromptCheck)}, not {_short(str(check))}")
    counts = None if tokens is None else _expect(tokens, list, f"{where}.image_tokens")
    if counts is not None and not all(type(count) is int and count > 0 for count in counts):
        raise InvalidPayloadError(f"{where}.image_tokens must be a list of integers above 0")
    return PromptReceipt(
        check=PromptCheck(check),
        sent_ids=_sent_ids(entry.get("sent"), ran_ids, f"{where}.sent"),
        image_tokens=None if counts is None else tuple(counts),
        images=_decode_images(entry, sent, where) or (),
        untrained_because=_expect(entry.get("untrained_because", ""), str, f"{where}.untrained_because"),
    )


def _sent_ids(value: Any, ran_ids: Sequence[int], where: str) -> list[int] | None:
    if value is None:
        return None
    entry = _expect(value, dict, where)
    keep = _expect(entry.get("keep", 0), int, f"{where}.keep")
    keep_end = _expect(entry.get("keep_end", 0), int, f"{where}.keep_end")
    if min(keep, keep_end) < 0 or keep + keep_end > len(ran_ids):
        raise InvalidPayloadError(f"{where} keeps {keep} and {keep_end} ids of a prompt of {len(ran_ids)}")
    new = _token_ids(entry.get("ids", []), f"{where}.ids")
    return [*ran_ids[:keep], *new, *ran_ids[len(ran_ids) - keep_end :]]


def _token_ids(value: Any, where: str) -> list[int]:
    ids: list[int] = _expect(value, list, where)
    if not all(type(token) is int and 0 <= token < MAX_VOCABULARY for token in ids):
        raise InvalidPayloadError(f"{where} must be a list of token ids (integers from 0, below {MAX_VOCABULARY})")
    return ids


def _log_probs(value: Any, expected: int, where: str) -> list[float] | None:
    if value is None:
        return None
    numbers = _expect(value, list, where)
    if len(numbers) != expected:
        raise InvalidPayloadError(f"{where} has {len(numbers)} entries for {expected} output ids")
    log_probs = [checked_log_prob(number) for number in numbers]
    if None in log_probs:
        wrong = numbers[log_probs.index(None)]
        raise InvalidPayloadError(f"{where} holds {_short(str(wrong))}, not a finite number of at most 0")
    return log_probs  # type: ignore[return-value]  # none of them is None


def _spans(value: Any, where: str) -> tuple[WeightVersionSpan, ...]:
    spans = []
    for entry in _expect(value, list, where):
        span = _expect(entry, dict, where)
        start, end = _expect(span.get("start"), int, where), _expect(span.get("end"), int, where)
        version = _weight_version(span, where) or ""
        spans.append(WeightVersionSpan(weight_version=version, start=start, end=end))
    return tuple(spans)


# --- trajectories and items ------------------------------------------------------------------------------------------


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


def decode_written_item(entry: Any, *, where: str = "item", images: Mapping[str, Image] | None = None) -> WrittenItem:
    """Checks one item of a ``/buffer/write`` body and takes the images out of its messages.

    ``images`` are screenshots that were taken out of the body already, by hash.

    Raises:
        InvalidPayloadError: names the key that is missing or wrong, and what it should be.
    """
    item = _expect(entry, dict, where)
    own = item.keys() - ITEM_KEYS - KEYS_OF_DELIVERED_ITEMS
    _refuse_misspelt(own, ITEM_KEYS - item.keys(), where)
    messages = _messages(item.get("messages"), f"{where}.messages")
    check_messages(messages, f"{where}.messages")
    came = dict(images or {})
    shown: dict[str, None] = {}
    extra_info = _expect(item.get("extra_info", {}), dict, f"{where}.extra_info")
    extra_info = {**{key: item[key] for key in sorted(own)}, **extra_info}
    if item.get("tools") is not None:  # the trainer shows them to the chat template
        extra_info = {**extra_info, "tools": _expect(item["tools"], list, f"{where}.tools")}
    outcome, stop_reason = _outcome(item, extra_info, where)
    raw_reward = item.get("raw_reward")
    generations = decode_generations(item.get("generations"))
    _check_keys_of_generations(item, where)
    _check_something_sampled(messages, generations, where)
    turn_rewards = checked_turn_rewards(item, messages, generations, where)
    body = {
        "messages": [_take_images_out(message, came, shown, f"{where}.messages") for message in messages],
        "extra_info": {**extra_info, "outcome": outcome.value, "stop_reason": stop_reason.value},
        "generations": encode_generations(generations),
        "images": list(shown),
        "timings_s": _expect(item.get("timings_s", {}), dict, f"{where}.timings_s"),
        **encode_turn_rewards(*turn_rewards),
    }
    return WrittenItem(
        uid=identifier(item.get("uid"), f"{where}.uid"),
        instance_id=identifier(item.get("instance_id"), f"{where}.instance_id"),
        reward=_reward(item.get("reward"), f"{where}.reward"),
        raw_reward=None if raw_reward is None else _reward(raw_reward, f"{where}.raw_reward"),
        outcome=outcome,
        stop_reason=stop_reason,
        body=body,
        images=came,
        generations=generations,
        largest_id=max((_largest_id(entry) for entry in item.get("generations") or ()), default=-1),
    )


def _check_keys_of_generations(item: Mapping[str, Any], where: str) -> None:
    generations = item.get("generations") or ()
    if item.get("weight_version") is not None and not generations:
        raise InvalidPayloadError(f"{where}.weight_version stands in each of its generations, and it has none")
    for index, entry in enumerate(generations):
        if unknown := sorted(entry.keys() - GENERATION_KEYS):
            where = f"generations[{index}]"
            _refuse_misspelt(unknown, GENERATION_KEYS - entry.keys(), where)
            raise InvalidPayloadError(f"{where}.{unknown[0]} is not known: what is yours goes into extra_info")


def _check_something_sampled(messages: Sequence[Message], generations: Sequence[Generation], where: str) -> None:
    if not messages and not generations:
        raise InvalidPayloadError(f"{where} has neither messages nor generations: there is nothing to train")
    for index, generation in enumerate(generations):
        if generation.trained and not generation.output_ids and generation.finish_reason != "abort":
            raise InvalidPayloadError(f"{where}.generations[{index}].output_ids is empty: nothing was sampled")


def _largest_id(entry: Mapping[str, Any]) -> int:
    return max(max(entry["prompt_ids"], default=-1), max(entry["output_ids"], default=-1))


def _outcome(item: Mapping[str, Any], extra_info: Mapping[str, Any], where: str) -> tuple[Outcome, StopReason]:
    """slime's own generators say only ``extra_info.finish_reason``; ours say the outcome."""
    finish_reason = extra_info.get("finish_reason")
    truncated = finish_reason == "length"
    aborted = Outcome.ABORTED if finish_reason == "abort" else Outcome.COMPLETED
    outcome = item.get("outcome", (Outcome.TRUNCATED if truncated else aborted).value)
    stop_reason = item.get("stop_reason", StopReason.MAX_TOKENS.value if truncated else StopReason.STOP.value)
    if outcome not in list(WRITTEN_OUTCOMES):
        raise InvalidPayloadError(
            f"{where}.outcome is {_short(outcome)}; a written item has one of {', '.join(WRITTEN_OUTCOMES)}: what a "
            "failed or aborted attempt earned is unknown, and it is not written"
        )
    if item.get("remove_sample") is True:
        raise InvalidPayloadError(f"{where}.remove_sample is true: what is not to be trained is not written")
    if stop_reason not in list(StopReason):  # not a set: what came may not be hashable
        raise InvalidPayloadError(f"{where}.stop_reason is {_short(stop_reason)}; use one of {', '.join(StopReason)}")
    return Outcome(outcome), StopReason(stop_reason)


def _messages(value: Any, where: str) -> list[Message]:
    messages: list[Any] = _expect(value, list, where)
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InvalidPayloadError(f"{where}[{index}] must be an object with a role")
    return messages


def check_messages(messages: Sequence[Message], where: str = "messages") -> None:
    """Checks that each message says something: what a chat template skips in silence would be a gap in training.

    What was stored by an earlier version is read without it.

    Raises:
        InvalidPayloadError: one has no content, or a misspelt role or key; names it, and what was meant.
    """
    for index, message in enumerate(messages):
        _check_message(message, f"{where}[{index}]")


def _check_message(message: Message, where: str) -> None:
    if not message.keys() <= MESSAGE_KEYS:
        _refuse_misspelt(message.keys() - MESSAGE_KEYS, MESSAGE_KEYS - message.keys(), where)
    role, content = message["role"], message.get("content")
    if role not in ROLES and (near := nearest(role, ROLES)):
        raise InvalidPayloadError(f"{where}.role is {_short(role)}; did you mean {near}?")
    if content is None and not any(message.get(key) for key in IN_PLACE_OF_CONTENT):
        raise InvalidPayloadError(f"{where} has no content, and none of {', '.join(IN_PLACE_OF_CONTENT)}")
    if not isinstance(content, str | list | None):
        raise InvalidPayloadError(f"{where}.content must be a string or a list of parts, not {_kind(content)}")


def _refuse_misspelt(given: Iterable[str], known: Collection[str], where: str) -> None:
    if wrong := misspelt(given, known, f"{where}."):
        raise InvalidPayloadError("; ".join(wrong))


def _take_images_out(message: Message, came: dict[str, Image], shown: dict[str, None], where: str) -> Message:
    """Replaces inline screenshots by their hash, so that each is stored once however often it is sent."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": [_take_image_out(part, came, shown, where) for part in content]}


def _take_image_out(part: Any, came: dict[str, Image], shown: dict[str, None], where: str) -> Any:
    if not isinstance(part, dict) or part.get("type") != "image_url":
        return part
    named = part.get("image_url")
    url = named.get("url") if isinstance(named, dict) else None
    if not isinstance(url, str):
        return part
    if url.startswith("data:"):
        image = decode_data_uri(url, where)
        came[image.sha256] = image
        url = IMAGE_URL_PREFIX + image.sha256
        part = {**part, "image_url": {**part["image_url"], "url": url}}
    if url.startswith(IMAGE_URL_PREFIX):
        sha256 = url.removeprefix(IMAGE_URL_PREFIX)
        if not is_sha256(sha256):
            raise InvalidPayloadError(f"{where}: an image is named sha256: and 64 digits in lower-case hex")
        shown[sha256] = None
    return part


def decode_data_uri(uri: str, where: str = "image") -> Image:
    """Decodes a ``data:image/...;base64,`` URI.

    Raises:
        InvalidPayloadError: not base64, or not the PNG, JPEG or WebP that it says it is.
    """
    match = _DATA_URI.match(uri)
    if match is None:
        raise InvalidPayloadError(f"{where}: an inline image must be a base64 data URI of a PNG, JPEG or WebP")
    try:
        data = base64.b64decode(uri[match.end() :], validate=True)
    except binascii.Error as error:
        raise InvalidPayloadError(f"{where}: the inline image is not valid base64 ({error})") from error
    media_type = image_media_type(data)
    if media_type is None or media_type != match.group(1):
        raise InvalidPayloadError(f"{where}: the inline image says {match.group(1)} but holds {media_type}")
    return Image(data=data, media_type=media_type)


def encode_data_uri(data: bytes) -> str:
    """Returns the bytes of an image as a data URI."""
    media_type = image_media_type(data) or "application/octet-stream"
    return f"data:{media_type};base64,{base64.b64encode(data).decode('ascii')}"


def image_media_type(data: bytes) -> str | None:
    """Tells PNG, JPEG, WebP or token records by the first bytes; None for anything else."""
    for magic, media_type in _MEDIA_TYPE_BY_MAGIC:
        if data.startswith(magic):
            return media_type
    return None


_SHOWS_IMAGE = b'"url":"sha256:'
_STORED_IMAGE = re.compile(rb'"url":"sha256:([0-9a-f]{64})"')


def shows_images(body: bytes) -> bool:
    """Tells quickly whether a stored payload may name screenshots; False is certain."""
    return _SHOWS_IMAGE in body


ImageSpot = tuple[int, int, str]
"""Where a stored payload names a screenshot: start, end, hash. What lies between start and end is the URL."""


def image_spots(body: bytes) -> list[ImageSpot]:
    """Returns where a stored payload names screenshots, in order.

    The quotes cannot be forged from inside a message's text: there they are escaped.
    """
    if not shows_images(body):
        return []
    return [
        (match.start(1) - len(IMAGE_URL_PREFIX), match.end(1), match[1].decode("ascii"))
        for match in _STORED_IMAGE.finditer(body)
    ]


def image_hashes(body: bytes) -> list[str]:
    """Returns the screenshots that a stored payload names, each once."""
    return list(dict.fromkeys(sha256 for _, _, sha256 in image_spots(body)))


def is_sha256(text: str) -> bool:
    """Tells whether the text is a sha256 in lower-case hex."""
    return _SHA256.fullmatch(text) is not None


# --- what the trainer reads ------------------------------------------------------------------------------------------


def decode_start_reply(reply: Any) -> StartReply:
    """Checks the reply to ``start_rollout``; raises ``ValueError`` on anything else."""
    body = _reply_object(reply)
    if not isinstance(body.get("job_id"), str) or not isinstance(body.get("state"), str):
        raise ValueError("the buffer's reply to start_rollout has no job_id and state")
    return StartReply(
        job_id=body["job_id"],
        state=body["state"],
        message=str(body.get("message", "")),
        attached=body.get("attached") is True,
        notes=tuple(map(str, body.get("notes") or ())),
    )


def decode_rollout_data(reply: Any) -> RolloutData:
    """Checks a reply to ``get_rollout_data``. One malformed item becomes an item with ``error``.

    Raises:
        ValueError: the reply itself is not what the protocol says.
    """
    body = _reply_object(reply)
    success, data = body.get("success"), body.get("data")
    if not isinstance(success, bool) or not isinstance(data, dict) or not isinstance(data.get("data"), list):
        raise ValueError("the buffer's reply needs success (true or false) and data.data (a list)")
    meta_info = data.get("meta_info", {})
    if not isinstance(meta_info, dict):
        raise ValueError("the buffer's reply has a data.meta_info that is not an object")
    return RolloutData(
        success=success,
        message=str(body.get("message", "")),
        items=tuple(decode_item(item, position) for position, item in enumerate(data["data"])),
        meta_info=meta_info,
    )


def decode_item(item: Any, position: int = 0) -> RolloutItem:
    """Decodes one delivered item; a malformed one comes back with ``error`` and ``remove_sample`` set."""
    raw = item if isinstance(item, dict) else {"item": item}
    try:
        return _decode_item(_expect(item, dict, f"item {position}"))
    except (InvalidPayloadError, ValueError) as error:
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


def _decode_item(item: Mapping[str, Any]) -> RolloutItem:
    remove_sample = item.get("remove_sample") is True
    reward = item.get("reward")
    raw_reward = item.get("raw_reward")
    messages = tuple(_messages(item.get("messages"), "messages"))
    generations = decode_generations(item.get("generations"))
    turn_rewards, token_rewards = (None, None) if remove_sample else checked_turn_rewards(item, messages, generations)
    return RolloutItem(
        uid=identifier(item.get("uid"), "uid"),
        instance_id=identifier(item.get("instance_id"), "instance_id"),
        messages=messages,
        reward=None if remove_sample and reward is None else _finite(reward, "reward"),
        raw_reward=None if raw_reward is None else _finite(raw_reward, "raw_reward"),
        turn_rewards=turn_rewards,
        token_rewards=token_rewards,
        extra_info=_expect(item.get("extra_info"), dict, "extra_info"),
        generations=generations,
        images=tuple(_expect(item.get("images", []), list, "images")),
        group_index=_expect(item.get("group_index", -1), int, "group_index"),
        weight_version=None if item.get("weight_version") is None else _expect(item["weight_version"], int, "version"),
        epoch=_expect(item.get("epoch", 0), int, "epoch"),
        slot=_expect(item.get("slot", 0), int, "slot"),
        outcome=str(item.get("outcome", Outcome.COMPLETED.value)),
        stop_reason=str(item.get("stop_reason", StopReason.STOP.value)),
        remove_sample=remove_sample,
        raw=item,
    )


# --- helpers ---------------------------------------------------------------------------------------------------------


def identifier(value: Any, where: str) -> str:
    """Returns an id as a string (integers are taken as well).

    Raises:
        InvalidPayloadError: missing, empty, longer than 256 characters, or with control characters.
    """
    if type(value) is int:
        value = str(value)
    if not isinstance(value, str) or not value or len(value) > MAX_IDENTIFIER or not value.isprintable():
        length = f"1 to {MAX_IDENTIFIER} printable characters"
        raise InvalidPayloadError(f"{where} must be a string of {length} (or an integer)")
    return value


def _reward(value: Any, where: str) -> float:
    """What comes in; what an earlier version stored is read as it is."""
    try:
        return as_reward(value)
    except ValueError as error:
        raise InvalidPayloadError(f"{where} {error}") from error


def _finite(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidPayloadError(f"{where} must be a number, not {_kind(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise InvalidPayloadError(f"{where} must be a finite number")
    return number


def _expect(value: Any, kind: type, where: str) -> Any:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise InvalidPayloadError(f"{where} must be {_KIND_NAMES[kind]}, not {_kind(value)}")
    return value


def _short(value: Any) -> str:
    return repr(value[:80]) if isinstance(value, str) else _kind(value)


def _kind(value: Any) -> str:
    return "missing" if value is None else _KIND_NAMES.get(type(value), type(value).__name__)


def _integer_or(value: Any, default: int) -> int:
    return value if type(value) is int else default


def _reply_object(reply: Any) -> Mapping[str, Any]:
    if not isinstance(reply, dict):
        raise ValueError(f"the buffer's reply is {_kind(reply)}, not an object")
    return reply


_KIND_NAMES: dict[type, str] = {
    dict: "an object",
    list: "a list",
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
}


def encode_error(code: str, message: str, detail: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns the reply to a request that failed: a stable code, a sentence, and what a program may read."""
    return {"error": {"code": code, "message": message, "detail": dict(detail or {})}}


def decode_error(content: bytes) -> tuple[str, str, dict[str, Any]] | None:
    """Returns code, message and detail of such a reply; None for what is none."""
    try:
        error = json.loads(content)["error"]
        code, message, detail = error["code"], error["message"], error.get("detail") or {}
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    if not isinstance(code, str) or not isinstance(message, str) or not isinstance(detail, dict):
        return None
    return code, message, detail
