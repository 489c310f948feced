"""Generations on the wire.

A prompt is encoded as the number of leading ids that it shares with the previous generation (prompt and output), and
its further ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, model_validator

from slime.utils.mask_rows import ROUTED_EXPERTS, TOP_P_TOKENS, RecordBytes, common_prefix_length
from slime_plugins.rollout_buffer.errors import InvalidPayloadError
from slime_plugins.rollout_buffer.types import Generation, PromptCheck, PromptReceipt, WeightVersionSpan
from slime_plugins.rollout_buffer.wire.checks import (
    LogProbs,
    MustBe,
    Sha256,
    TokenIds,
    WeightVersion,
    WireRecord,
    WrittenRecord,
    checked,
)

MAX_GENERATION_IDS = 2**25
"""Limit of the decoded ids of one item: with ``keep``, a short body can stand for any number of ids."""

Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
TokenRecords = Annotated[
    dict[Literal["routed_experts", "top_p_tokens"], Sha256],
    MustBe(f"records of {ROUTED_EXPERTS} or {TOP_P_TOKENS} by their sha256 in lower-case hex"),
]


class SpanOfWeights(WireRecord):
    """A span of sampled tokens with one weight version."""

    weight_version: WeightVersion | None = None
    """Weight version of the engine that sampled the span."""
    start: int
    """First token of the span."""
    end: int
    """End of the span, exclusive."""


class SentIds(WireRecord):
    """The ids that were sent to the engine, encoded as a difference to the prompt that it ran."""

    keep: Count = 0
    """Number of ids shared at the beginning of the prompt."""
    ids: TokenIds = Field(default_factory=list)
    """The differing ids in between."""
    keep_end: Count = 0
    """Number of ids shared at the end of the prompt."""


class PromptReceiptEntry(WireRecord):
    """The engine's report on the prompt that it ran ([fidelity](fidelity.md))."""

    check: Annotated[PromptCheck, Field(strict=False)]
    """Whether the engine ran the prompt that was sent."""
    image_tokens: list[Annotated[int, Field(gt=0)]] | None = None
    """Number of tokens of each image."""
    keep_images: Count = 0
    """Number of leading images shared with the previous generation."""
    images: list[Sha256] | None = None
    """sha256 of each further image that was sent."""
    untrained_because: str = ""
    """Why the generation is not trained; empty if it is."""
    sent: SentIds | None = None
    """The ids that were sent, if the engine ran other ids."""


class GenerationEntry(WireRecord):
    """What the engine sampled in one turn."""

    keep: Count = 0
    """Number of leading ids shared with the previous generation (prompt and output)."""
    prompt_ids: TokenIds
    """Further prompt token ids."""
    output_ids: TokenIds
    """Sampled token ids."""
    output_log_probs: LogProbs | None = None
    """Log-prob of each output id."""
    finish_reason: str = "stop"
    """stop, length or abort."""
    weight_version: WeightVersion | None = None
    """Weight version of the engine that sampled it."""
    trained: bool = True
    """False if its tokens are not trained."""
    weight_version_spans: list[SpanOfWeights] = Field(default_factory=list)
    """Weight versions of spans of the output."""
    keep_images: Count = 0
    """Number of leading images shared with the previous generation."""
    images: list[Sha256] | None = None
    """sha256 of the image of each further placeholder in the prompt."""
    prompt_tokens: int | None = None
    """Number of prompt tokens in the engine, with images expanded."""
    cached_tokens: int | None = None
    """Number of prompt tokens from the engine's prefix cache."""
    records: TokenRecords = Field(default_factory=dict)
    """Records of single tokens from the engine: sha256 of each, stored under `/images`."""
    prompt_receipt: PromptReceiptEntry | None = None
    """The engine's report on the prompt that it ran."""
    engine_s: Seconds | None = None
    """Seconds that the turn waited for the engine, retries included."""
    environment_s: Seconds | None = None
    """Seconds from its reply to the next request, or to the end of the episode."""

    @model_validator(mode="after")
    def _has_one_log_prob_per_output_id(self) -> GenerationEntry:
        count, expected = len(self.output_log_probs or ()), len(self.output_ids)
        if self.output_log_probs is not None and count != expected:
            raise ValueError(f".output_log_probs has {count} entries for {expected} output ids")
        return self


class WrittenGeneration(WrittenRecord, GenerationEntry):
    """What the engine sampled in one turn. Other keys are refused."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="after")
    def _has_sampled_something(self) -> WrittenGeneration:
        if self.trained and not self.output_ids and self.finish_reason != "abort":
            raise ValueError(".output_ids is empty: nothing was sampled")
        return self


GenerationEntries = Annotated[list[GenerationEntry], Field(fail_fast=True)]
_ENTRIES: TypeAdapter[list[GenerationEntry]] = TypeAdapter(GenerationEntries)


def decode_generations(encoded: Any) -> tuple[Generation, ...]:
    """Rebuilds the generations of an item; the inverse of ``encode_generations``.

    Raises:
        InvalidPayloadError: a key has the wrong type; or as ``joined_generations``.
    """
    return joined_generations(checked(_ENTRIES.validate_python, encoded or [], "generations"))


def joined_generations(entries: Sequence[GenerationEntry]) -> tuple[Generation, ...]:
    """Returns the generations with whole prompts.

    Raises:
        InvalidPayloadError: ``keep`` reaches beyond the previous generation, or there are too many ids in all.
    """
    generations: list[Generation] = []
    last_ids: list[int] = []
    total_ids = 0
    last_images: tuple[str, ...] = ()
    last_sent: tuple[str, ...] = ()
    for index, entry in enumerate(entries):
        generation = _joined(entry, last_ids, last_images, last_sent, f"generations[{index}]")
        generations.append(generation)
        last_ids = [*generation.prompt_ids, *generation.output_ids]
        total_ids += len(last_ids)
        if total_ids > MAX_GENERATION_IDS:
            raise InvalidPayloadError(f"generations hold more than {MAX_GENERATION_IDS} ids together")
        last_images, last_sent = generation.images or (), _sent_images(generation)
    return tuple(generations)


def _sent_images(generation: Generation) -> tuple[str, ...]:
    """Returns the hashes of the images that were sent to the engine, as the prompt receipt names them."""
    return () if generation.prompt_receipt is None else generation.prompt_receipt.images


def _joined_images(
    entry: GenerationEntry | PromptReceiptEntry, before: Sequence[str], where: str
) -> tuple[str, ...] | None:
    """Returns all images of an entry; ``before`` are those of the previous generation."""
    if entry.images is None:
        return None
    if entry.keep_images > len(before):
        raise InvalidPayloadError(
            f"{where}.keep_images is {entry.keep_images}, but the generation before it has {len(before)}"
        )
    return (*before[: entry.keep_images], *entry.images)


def _joined(
    entry: GenerationEntry, last_ids: Sequence[int], last_images: Sequence[str], last_sent: Sequence[str], where: str
) -> Generation:
    """Returns a generation with its whole prompt; ``last_sent`` are the sent images of the previous generation."""
    if entry.keep > len(last_ids):
        raise InvalidPayloadError(f"{where}.keep is {entry.keep}, but the generation before it has {len(last_ids)} ids")
    prompt_ids = [*last_ids[: entry.keep], *entry.prompt_ids]
    log_probs = entry.output_log_probs
    if log_probs and max(log_probs) > 0:  # rounding may raise the log-prob of a certain token above 0
        log_probs = [min(number, 0.0) for number in log_probs]
    return Generation(
        prompt_ids=prompt_ids,
        output_ids=entry.output_ids,
        output_log_probs=log_probs,
        finish_reason=entry.finish_reason,
        weight_version=None if entry.weight_version is None else str(entry.weight_version),
        trained=entry.trained,
        weight_version_spans=tuple(
            WeightVersionSpan(weight_version=str(span.weight_version or ""), start=span.start, end=span.end)
            for span in entry.weight_version_spans
        ),
        images=_joined_images(entry, last_images, where),
        prompt_tokens=entry.prompt_tokens,
        cached_tokens=entry.cached_tokens,
        records={kind: RecordBytes(sha256) for kind, sha256 in entry.records.items()},
        prompt_receipt=_receipt(entry.prompt_receipt, prompt_ids, last_sent, f"{where}.prompt_receipt"),
        engine_s=entry.engine_s,
        environment_s=entry.environment_s,
    )


def _receipt(
    entry: PromptReceiptEntry | None, ran_ids: Sequence[int], last_sent: Sequence[str], where: str
) -> PromptReceipt | None:
    if entry is None:
        return None
    sent_ids = None
    if (sent := entry.sent) is not None:
        if sent.keep + sent.keep_end > len(ran_ids):
            raise InvalidPayloadError(
                f"{where}.sent keeps {sent.keep} and {sent.keep_end} ids of a prompt of {len(ran_ids)}"
            )
        sent_ids = [*ran_ids[: sent.keep], *sent.ids, *ran_ids[len(ran_ids) - sent.keep_end :]]
    return PromptReceipt(
        check=entry.check,
        sent_ids=sent_ids,
        image_tokens=None if entry.image_tokens is None else tuple(entry.image_tokens),
        images=_joined_images(entry, last_sent, where) or (),
        untrained_because=entry.untrained_because,
    )


def record_hashes(generations: Iterable[Generation]) -> list[str]:
    """Returns the hashes of the token records that generations name, each once."""
    records = (record for generation in generations for record in generation.records.values())
    return list(dict.fromkeys(record.sha256 for record in records))


def encode_generations(generations: Sequence[Generation]) -> list[dict[str, Any]]:
    """Encodes generations, each prompt as the number of ids shared with the previous generation and its further ids."""
    encoded: list[dict[str, Any]] = []
    last_ids: list[int] = []
    last_images: tuple[str, ...] = ()
    last_sent: tuple[str, ...] = ()
    for generation in generations:
        keep = common_prefix_length(last_ids, generation.prompt_ids)
        entry = _encode_generation(generation, keep)
        if generation.images is not None:
            entry |= _encode_images(generation.images, last_images)
        if generation.prompt_receipt is not None and generation.prompt_receipt.images:
            entry["prompt_receipt"] |= _encode_images(generation.prompt_receipt.images, last_sent)
        encoded.append(entry)
        last_ids = [*generation.prompt_ids, *generation.output_ids]
        last_images, last_sent = generation.images or (), _sent_images(generation)
    return encoded


def _encode_images(images: Sequence[str], before: Sequence[str]) -> dict[str, Any]:
    """Encodes the images of a turn: the number shared with the previous turn, and the new ones."""
    keep = common_prefix_length(before, images)
    return {"keep_images": keep, "images": list(images[keep:])}


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
    receipt = generation.prompt_receipt
    optional = {
        "trained": None if generation.trained else False,
        "prompt_tokens": generation.prompt_tokens,
        "cached_tokens": generation.cached_tokens,
        "records": {kind: record.sha256 for kind, record in generation.records.items()} or None,
        "prompt_receipt": None if receipt is None else _encode_receipt(receipt, generation.prompt_ids),
        "engine_s": None if generation.engine_s is None else round(generation.engine_s, 4),
        "environment_s": None if generation.environment_s is None else round(generation.environment_s, 4),
        "weight_version_spans": [
            {"weight_version": span.weight_version, "start": span.start, "end": span.end}
            for span in generation.weight_version_spans
        ]
        or None,
    }
    return entry | {name: value for name, value in optional.items() if value is not None}


def _encode_receipt(receipt: PromptReceipt, ran_ids: Sequence[int]) -> dict[str, Any]:
    """Encodes a receipt; of the sent ids only those between the beginning and end that they share with the prompt."""
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
