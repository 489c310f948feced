"""Packs generations into training rows, in which each sampled token follows exactly the ids that it was sampled after.

Part of ``slime.utils.mask_utils``, which is the name to import from. Standard library only.

Token records of a generation are the routed experts of each token, or the top-p ids that it was sampled from. They are
millions of numbers and therefore binary: ``TokenRecords`` is used for computing, ``RecordBytes`` for storage and
transfer by hash. Consecutive tokens have one record each, of ``width`` numbers (experts: layers times experts per
token) or of variable length (top-p ids).
"""

from __future__ import annotations

import hashlib
import math
import struct
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from typing import Any

ROUTED_EXPERTS = "routed_experts"
"""For each token but the first, the experts of the forward pass that read the token before it (and sampled it, if it
was sampled)."""
TOP_P_TOKENS = "top_p_tokens"
"""For each sampled token, the ids within top_p from which it was sampled."""

RECORDS_MAGIC = b"TOKREC1\0"
_HEADER = struct.Struct("<8sIIHH")
_TOP_BYTES_FROM_0_ON = bytes(range(128))
"""The values of the highest byte of an int32 that is not negative."""
_TYPECODES = {1: "B", 2: "H", 4: "I"}
"""The type codes of ``array`` for unsigned numbers, by the bytes of a number."""


@dataclass(frozen=True, slots=True)
class TokenRecords:
    """Records of the tokens with indices ``start``, ``start + 1`` … of the sequence that the engine ran.

    ``values`` are little-endian unsigned numbers of ``itemsize`` bytes. Each record has ``width`` of them; if ``width``
    is 0, ``ends`` has the index in ``values``, counted in numbers, at which each record ends.
    """

    start: int
    values: bytes
    itemsize: int
    width: int = 0
    ends: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        numbers, rest = divmod(len(self.values), self.itemsize)
        fits = numbers % self.width == 0 if self.width else numbers == max(self.ends, default=0)
        if rest or not fits or list(self.ends) != sorted(self.ends):
            raise ValueError(f"{len(self.values)} bytes are not whole records of their tokens")

    @classmethod
    def of_int32(cls, start: int, data: bytes, *, width: int = 0, ends: Iterable[int] = ()) -> TokenRecords:
        """Converts little-endian int32 numbers, as sent by SGLang, to the smallest item size.

        Raises:
            ValueError: a number is negative, or the numbers are not whole records.
        """
        planes = [
            data[byte::4] for byte in range(4)
        ]  # the lowest byte of each number, the second, the third, the highest
        if len(data) % 4 or planes[3].translate(None, _TOP_BYTES_FROM_0_ON):
            raise ValueError("the records are no int32 numbers from 0 on")
        if not any(map(_has_bits, planes[1:])):
            return cls(start, planes[0], 1, width, tuple(ends))
        if any(map(_has_bits, planes[2:])):
            return cls(start, data, 4, width, tuple(ends))
        narrow = bytearray(len(data) // 2)
        narrow[0::2], narrow[1::2] = planes[0], planes[1]
        return cls(start, bytes(narrow), 2, width, tuple(ends))

    def __len__(self) -> int:
        return len(self.values) // (self.itemsize * self.width) if self.width else len(self.ends)

    @property
    def end(self) -> int:
        """The index after the last token with a record."""
        return self.start + len(self)

    def numbers(self) -> array[int]:
        """Returns the numbers of all records, concatenated."""
        return array(_TYPECODES[self.itemsize], self.values)

    def split(self) -> list[array[int]]:
        """Returns each token's record."""
        numbers = self.numbers()
        ends = range(self.width, len(numbers) + 1, self.width) if self.width else self.ends
        return [numbers[begin:end] for begin, end in pairwise([0, *ends])]

    def part(self, start: int, end: int) -> TokenRecords:
        """Returns the records of the tokens from index ``start`` to ``end``, clipped to existing records."""
        first = min(max(start - self.start, 0), len(self))
        last = max(first, min(end - self.start, len(self)))
        begin = self._numbers_before(first)
        values = self.values[begin * self.itemsize : self._numbers_before(last) * self.itemsize]
        ends = tuple(end_of_record - begin for end_of_record in self.ends[first:last])
        return replace(self, start=self.start + first, values=values, ends=ends)

    def encode(self) -> bytes:
        """Returns the binary form, for ``decode``."""
        ends = array("I", self.ends).tobytes()
        return _HEADER.pack(RECORDS_MAGIC, self.start, len(self), self.itemsize, self.width) + ends + self.values

    @classmethod
    def decode(cls, data: bytes) -> TokenRecords:
        """Parses the result of ``encode``.

        Raises:
            ValueError: the data is invalid.
        """
        if len(data) < _HEADER.size or not data.startswith(RECORDS_MAGIC):
            raise ValueError("these bytes are no token records")
        _, start, count, itemsize, width = _HEADER.unpack_from(data)
        values_start = _HEADER.size + (0 if width else 4 * count)  # the ends of records of variable length come first
        if itemsize not in _TYPECODES or len(data) < values_start:
            raise ValueError("the token records are damaged or cut off")
        ends = () if width else tuple(array("I", data[_HEADER.size : values_start]))
        records = cls(start, data[values_start:], itemsize, width, ends)
        if len(records) != count:
            raise ValueError(f"there are {len(records)} token records, and {count} were written")
        return records

    def _numbers_before(self, index: int) -> int:
        if self.width:
            return index * self.width
        return self.ends[index - 1] if index else 0

    def _widened(self, itemsize: int) -> bytes:
        if itemsize == self.itemsize:
            return self.values
        return array(_TYPECODES[itemsize], self.numbers()).tobytes()


def joined_records(parts: Sequence[TokenRecords]) -> TokenRecords:
    """Joins consecutive parts.

    Raises:
        ValueError: there is a gap or an overlap, or the widths differ.
    """
    for before, after in pairwise(parts):
        if after.start != before.end or after.width != before.width:
            raise ValueError(
                f"token records of {after.width} numbers from token {after.start} on do not follow those of "
                f"{before.width} that end at {before.end}"
            )
    itemsize = max(part.itemsize for part in parts)
    ends: list[int] = []
    for part in parts:
        numbers_before = ends[-1] if ends else 0
        ends += [numbers_before + end for end in part.ends]
    values = b"".join(part._widened(itemsize) for part in parts)
    return TokenRecords(parts[0].start, values, itemsize, parts[0].width, tuple(ends))


@dataclass(frozen=True, slots=True)
class RecordBytes:
    """Encoded ``TokenRecords`` by their hash; ``data`` is None if the bytes must be fetched by hash."""

    sha256: str
    data: bytes | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, records: TokenRecords) -> RecordBytes:
        """Encodes and hashes records."""
        data = records.encode()
        return cls(hashlib.sha256(data).hexdigest(), data)


def _has_bits(plane: bytes) -> bool:
    return bool(plane.strip(b"\0"))


@dataclass(frozen=True, slots=True)
class WeightVersionSpan:
    """Output tokens ``start`` to ``end`` (exclusive) of one generation were sampled by ``weight_version``."""

    weight_version: str
    start: int
    end: int


class PromptCheck(StrEnum):
    """Result of comparing the prompt ids that were sent to an engine with those that it ran."""

    EQUAL = "equal"
    DIFFERING = "differing"  # it ran other ids
    UNKNOWN = "unknown"  # it does not report the ids


@dataclass(frozen=True, slots=True)
class PromptReceipt:
    """The engine's report on the prompt of one turn.

    ``sent_ids`` are the ids that were sent, set only if the engine ran others. ``image_tokens`` is the number of tokens
    of each image of the prompt in the engine; None if unknown. ``images`` are the sha256 of the images in the request,
    in order. ``untrained_because`` is the reason why the output must not be trained; empty if it may.
    """

    check: PromptCheck
    sent_ids: Sequence[int] | None = None
    image_tokens: tuple[int, ...] | None = None
    images: tuple[str, ...] = ()
    untrained_because: str = ""


@dataclass(frozen=True, slots=True)
class Generation:
    """Prompt and sampled output of one turn, exactly as sent and received.

    ``prompt_ids`` are the ids that the engine ran if it reports them, else those that it was sent, with one placeholder
    per image. ``prompt_receipt`` is its report on the prompt, None if it was not requested. ``output_log_probs`` is as
    long as ``output_ids``, None if the engine returned none. A turn that was aborted and resumed is one generation with
    several ``weight_version_spans``. With ``trained=False`` the tokens are context only.

    ``images`` are the sha256 of the images of the prompt's placeholders, in order; None if unknown. ``prompt_tokens``
    is the engine's count of prompt tokens with images expanded, and ``cached_tokens`` the number of them in its prefix
    cache; None if unknown. ``records`` are the token records by kind. ``engine_s`` are the seconds that the turn waited
    for the engine, retries included; ``environment_s`` are the seconds from the engine's reply to the next request or
    the end of the episode; None if unknown.
    """

    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    output_log_probs: Sequence[float] | None = None
    finish_reason: str = "stop"
    weight_version: str | None = None
    trained: bool = True
    weight_version_spans: tuple[WeightVersionSpan, ...] = field(default=())
    images: tuple[str, ...] | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    records: Mapping[str, RecordBytes] = field(default_factory=dict)
    prompt_receipt: PromptReceipt | None = None
    engine_s: float | None = None
    environment_s: float | None = None

    @property
    def is_trained(self) -> bool:
        """True if its output is to be trained and its prompt is known."""
        return self.trained and (self.prompt_receipt is None or not self.prompt_receipt.untrained_because)

    def __post_init__(self) -> None:
        if self.output_log_probs is not None and len(self.output_log_probs) != len(self.output_ids):
            raise ValueError(
                f"a generation has {len(self.output_ids)} output ids but {len(self.output_log_probs)} log-probs"
            )


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """One sequence with a loss; the three lists have equal lengths.

    ``loss_mask`` is 1 on sampled, trained tokens and 0 elsewhere. ``log_probs`` are the engine's at these tokens and
    0.0 elsewhere, or None if the engine returned none. ``response_length`` counts from the first trained token to the
    end. ``generation_indices`` are the ascending indices of the generations in this row. ``images`` are the image
    hashes of its placeholders in order; None if unknown.
    """

    token_ids: list[int]
    loss_mask: list[int]
    log_probs: list[float] | None
    response_length: int
    generation_indices: tuple[int, ...]
    images: tuple[str, ...] | None = None


def response_length_of(loss_mask: Sequence[int]) -> int:
    """Counts the tokens from the first trained one to the end; 0 if none is trained."""
    return len(loss_mask) - loss_mask.index(1) if 1 in loss_mask else 0


def get_response_lengths(loss_masks: Sequence[Sequence[int]]) -> list[int]:
    """Returns ``response_length_of`` for each mask. A length of 0 is an empty response: never slice with ``[-0:]``."""
    return [response_length_of(loss_mask) for loss_mask in loss_masks]


def pack_training_rows(generations: Sequence[Generation]) -> list[TrainingRow]:
    """Packs generations into rows by greedy exact prefix matching; each output to be trained is in exactly one row.

    A generation whose ``prompt_ids`` start with all tokens of the previous row continues that row: the rest of its
    prompt is context (0), its output is trained (1). Any other generation (an edited context, reasoning dropped by the
    template, a re-tokenised history, other images at the same placeholders) starts a new row. Tokens are never
    realigned. Rows without trained tokens are dropped; tokens of generations that are not trained are context.

    ``log_probs`` is None in a row with a trained output that has none, and in all rows if no generation has any. Time
    is linear in the total length of prompts and outputs.

    Raises:
        ValueError: a trained token's recorded log-prob is not finite.
    """
    return _pack(list(enumerate(generations)))


def pack_training_rows_within(
    generations: Sequence[Generation], max_tokens: int
) -> tuple[list[TrainingRow], list[int]]:
    """Packs the generations whose prompt and output have at most ``max_tokens`` together.

    Also returns the indices of the longer generations, which are dropped.
    """
    numbered = list(enumerate(generations))
    dropped = [index for index, turn in numbered if len(turn.prompt_ids) + len(turn.output_ids) > max_tokens]
    return _pack([(index, turn) for index, turn in numbered if index not in set(dropped)]), dropped


def _pack(numbered: Sequence[tuple[int, Generation]]) -> list[TrainingRow]:
    has_log_probs = any(generation.output_log_probs is not None for _, generation in numbered)
    rows: list[_OpenRow] = []
    for index, generation in numbered:
        if not rows or not rows[-1].continued_by(generation):
            rows.append(_OpenRow())
        rows[-1].append(index, generation)
    return [row.close(has_log_probs) for row in rows if 1 in row.loss_mask]


class _OpenRow:
    """A row that later generations may continue."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.loss_mask: list[int] = []
        self.log_probs: list[float] = []
        self.log_probs_complete = True
        self.generation_indices: list[int] = []
        self.images: tuple[str, ...] | None = None

    def continued_by(self, generation: Generation) -> bool:
        """True if the prompt starts with all tokens of this row, and with its images."""
        if not self._shows_the_images_of(generation):
            return False

        length = len(self.token_ids)
        prompt = generation.prompt_ids
        if len(prompt) < length or (length and prompt[length - 1] != self.token_ids[-1]):
            return False

        return _as_list(prompt[:length]) == self.token_ids

    def append(self, index: int, generation: Generation) -> None:
        """Appends the new part of the prompt as context, and the output."""
        context = _as_list(generation.prompt_ids[len(self.token_ids) :])
        self._extend(context, 0, [0.0] * len(context))
        output = _as_list(generation.output_ids)
        self._extend(output, int(generation.is_trained), self._log_probs_of(index, generation))
        self.generation_indices.append(index)
        self.images = generation.images

    def close(self, has_log_probs: bool) -> TrainingRow:
        return TrainingRow(
            token_ids=self.token_ids,
            loss_mask=self.loss_mask,
            log_probs=self.log_probs if has_log_probs and self.log_probs_complete else None,
            response_length=response_length_of(self.loss_mask),
            generation_indices=tuple(self.generation_indices),
            images=self.images,
        )

    def _shows_the_images_of(self, generation: Generation) -> bool:
        if self.images is None:
            return True

        return generation.images is not None and generation.images[: len(self.images)] == self.images

    def _extend(self, token_ids: list[int], mask: int, log_probs: list[float]) -> None:
        self.token_ids.extend(token_ids)
        self.loss_mask.extend([mask] * len(token_ids))
        self.log_probs.extend(log_probs)

    def _log_probs_of(self, index: int, generation: Generation) -> list[float]:
        if not generation.is_trained or not len(generation.output_ids):
            return [0.0] * len(generation.output_ids)

        if generation.output_log_probs is None:
            self.log_probs_complete = False
            return [0.0] * len(generation.output_ids)

        log_probs = [float(value) for value in generation.output_log_probs]
        if not all(map(math.isfinite, log_probs)):
            position = next(position for position, value in enumerate(log_probs) if not math.isfinite(value))
            raise ValueError(f"generation {index} has the log-prob {log_probs[position]} at output token {position}")

        return log_probs


def expand_image_tokens(row: TrainingRow, image_token_id: int, tokens_per_image: Sequence[int]) -> TrainingRow:
    """Replaces the k-th image placeholder of a row by ``tokens_per_image[k]`` of them, all context.

    Every other token keeps its order, mask and log-prob. ``tokens_per_image`` comes from the image processor: for
    Qwen-VL ``grid_thw.prod() // merge_size ** 2``.

    Raises:
        ValueError: the numbers of placeholders and images differ, or a placeholder was itself sampled.
    """
    places = [index for index, token_id in enumerate(row.token_ids) if token_id == image_token_id]
    if len(places) != len(tokens_per_image):
        raise ValueError(f"a row holds {len(places)} image placeholders for {len(tokens_per_image)} images")

    if any(row.loss_mask[place] for place in places):
        raise ValueError("an image placeholder was sampled by the model: ban vision tokens at sampling")

    token_ids: list[int] = []
    loss_mask: list[int] = []
    log_probs: list[float] | None = None if row.log_probs is None else []
    start = 0
    for place, count in zip([*places, len(row.token_ids)], [*tokens_per_image, 0], strict=True):
        token_ids += row.token_ids[start:place] + [image_token_id] * count
        loss_mask += row.loss_mask[start:place] + [0] * count
        if log_probs is not None and row.log_probs is not None:
            log_probs += row.log_probs[start:place] + [0.0] * count
        start = place + 1
    return replace(
        row,
        token_ids=token_ids,
        loss_mask=loss_mask,
        log_probs=log_probs,
        response_length=response_length_of(loss_mask),
    )


def align_with_expanded(
    token_ids: Sequence[int], loss_mask: Sequence[int], expanded: Sequence[int], placeholders: Collection[int]
) -> list[int]:
    """Aligns a mask with ids in which a processor repeated the image placeholders; placeholders are 0.

    How often a placeholder was repeated is read from the ids: a run of equal placeholders may be longer in
    ``expanded``.

    Raises:
        ValueError: the ids differ otherwise than in the number of consecutive placeholders.
    """
    mask: list[int] = []
    start = 0
    while start < len(token_ids):
        position = len(mask)  # in ``expanded``
        if token_ids[start] in placeholders:
            length, expanded_length = _equal_from(token_ids, start), _equal_from(expanded, position)
            if position >= len(expanded) or expanded[position] != token_ids[start] or expanded_length < length:
                raise ValueError(f"input_ids have no image at {position}, where the rendered conversation has one")
            mask += [0] * expanded_length
            start += length
        else:
            later = range(start, len(token_ids))
            end = next((index for index in later if token_ids[index] in placeholders), len(token_ids))
            if list(expanded[position : position + end - start]) != list(token_ids[start:end]):
                raise ValueError(f"input_ids differ from the rendered conversation at or after token {position}")
            mask += loss_mask[start:end]
            start = end
    if len(mask) != len(expanded):
        raise ValueError(f"input_ids continue after the end of the rendered conversation, at token {len(mask)}")

    return mask


def _equal_from(ids: Sequence[int], start: int) -> int:
    """Counts the consecutive ids from ``start`` on that equal the first of them."""
    end = start
    while end < len(ids) and ids[end] == ids[start]:
        end += 1
    return end - start


def common_prefix_length(left: Sequence[Any], right: Sequence[Any]) -> int:
    """Returns how many leading items two sequences share. An exact prefix, the usual case, costs one comparison."""
    shorter = min(len(left), len(right))
    if list(left[:shorter]) == list(right[:shorter]):
        return shorter

    return next(index for index in range(shorter) if left[index] != right[index])


def _as_list(ids: Sequence[int]) -> list[int]:
    """Returns a list of Python integers, also for arrays and tensors."""
    if isinstance(ids, list):
        return ids

    return ids.tolist() if hasattr(ids, "tolist") else list(ids)
