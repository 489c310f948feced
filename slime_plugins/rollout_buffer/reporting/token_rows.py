"""The training rows of a trajectory, with the texts of their tokens if a tokenizer is available.

A job's tokenizer is loaded on the first request for its tokens, from ``tokenizer.json`` in the job's
``tokenizer_path``, with the ``tokenizers`` library alone. Two tokenizers are cached. Without a tokenizer, only
ids are shown.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from slime.utils.mask_rows import Generation, TrainingRow, common_prefix_length, pack_training_rows
from slime_plugins.rollout_buffer.wire.trajectory_replies import DescribedRows

MAX_TOKENIZER_BYTES = 256 * 1024 * 1024
IMAGE_TOKENS = ("<|image_pad|>", "<|image|>", "<image>", "<|video_pad|>")
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer decodes to for the bytes of an incomplete character."""
MAX_CHARACTER = 8
"""Most tokens that are joined until they make whole characters."""

logger = logging.getLogger(__name__)


class Tokenizer(Protocol):
    """The methods of ``tokenizers.Tokenizer`` that are used here."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = ...) -> str: ...

    def token_to_id(self, token: str) -> int | None: ...


def tokenizer_of(tokenizer_path: str | None) -> tuple[Tokenizer | None, str]:
    """Returns a job's tokenizer, or None and a sentence with the reason."""
    if not tokenizer_path:
        return None, "The job names no tokenizer_path: token ids are shown without their texts."
    file = Path(tokenizer_path).expanduser() / "tokenizer.json"
    try:
        return _load(file, file.stat().st_mtime), ""
    except FileNotFoundError:
        return None, f"There is no {file} on this host: token ids are shown without their texts."
    except Exception as error:  # noqa: BLE001 - the library raises bare Exceptions; a page without texts is still a page
        logger.warning("the tokenizer %s cannot be loaded: %s", file, error)
        return None, f"{file} cannot be loaded ({str(error)[:200]}): token ids are shown without their texts."


@functools.lru_cache(maxsize=2)
def _load(file: Path, _changed_at: float) -> Tokenizer:
    if file.stat().st_size > MAX_TOKENIZER_BYTES:
        raise ValueError(f"it is larger than {MAX_TOKENIZER_BYTES} bytes")
    import tokenizers  # only when tokens are requested

    loaded: Tokenizer = tokenizers.Tokenizer.from_file(str(file))
    return loaded


def describe_rows(generations: Sequence[Generation], row: int, tokenizer: Tokenizer | None) -> DescribedRows:
    """Returns how each generation continued the previous one, the rows that they make, and the pieces of one row.

    A piece has ``at``, its first token in the row, ``count`` and ``text``, which is None without a tokenizer. A piece
    of context also has its number of ``images``. A trained piece is a few tokens that make whole characters, and also
    has ``ids`` and ``log_probs`` (None if not recorded).
    """
    rows = pack_training_rows(generations)
    row_of = {index: number for number, each in enumerate(rows) for index in each.generation_indices}
    return DescribedRows(
        contexts=list(_contexts(generations, row_of)),
        rows=[_row_entry(each) for each in rows],
        row=row,
        pieces=list(_pieces(rows[row], tokenizer)) if row < len(rows) else [],
    )


def _contexts(generations: Sequence[Generation], row_of: dict[int, int]) -> Iterator[dict[str, Any]]:
    previous: Sequence[int] = ()
    for index, each in enumerate(generations):
        kept = common_prefix_length(previous, each.prompt_ids)
        log_probs = each.output_log_probs
        yield {
            "generation": index,
            "row": row_of.get(index),
            "prompt_tokens": len(each.prompt_ids),
            "kept_tokens": kept,
            "dropped_tokens": len(previous) - kept,
            "new_tokens": len(each.prompt_ids) - kept,
            "output_tokens": len(each.output_ids),
            "mean_log_prob": sum(log_probs) / len(log_probs) if log_probs else None,
            "finish_reason": each.finish_reason,
            "weight_version": each.weight_version,
            "weight_versions": list(dict.fromkeys(span.weight_version for span in each.weight_version_spans)),
            "trained": each.is_trained,
            "prompt_check": None if each.prompt_receipt is None else each.prompt_receipt.check.value,
            "untrained_because": "" if each.prompt_receipt is None else each.prompt_receipt.untrained_because,
            "images": None if each.images is None else len(each.images),
        }
        previous = [*each.prompt_ids, *each.output_ids]


def _row_entry(row: TrainingRow) -> dict[str, Any]:
    return {
        "tokens": len(row.token_ids),
        "trained": sum(row.loss_mask),
        "generations": list(row.generation_indices),
        "has_log_probs": row.log_probs is not None,
        "images": None if row.images is None else len(row.images),
    }


def _pieces(row: TrainingRow, tokenizer: Tokenizer | None) -> Iterator[dict[str, Any]]:
    for start, end, trained in _runs_of(row.loss_mask):
        if trained:
            yield from _trained_pieces(row, start, end, tokenizer)
        else:
            ids = row.token_ids[start:end]
            yield {
                "at": start,
                "count": end - start,
                "text": text_of(tokenizer, ids),
                "images": _images(tokenizer, ids),
            }


def _runs_of(mask: Sequence[int]) -> Iterator[tuple[int, int, bool]]:
    start = 0
    for at in range(1, len(mask) + 1):
        if at == len(mask) or mask[at] != mask[start]:
            yield start, at, bool(mask[start])
            start = at


def _trained_pieces(row: TrainingRow, start: int, end: int, tokenizer: Tokenizer | None) -> Iterator[dict[str, Any]]:
    first = start
    for at in range(start + 1, end + 1):
        ids = row.token_ids[first:at]
        text = text_of(tokenizer, ids)
        whole = text is None or not text.endswith(UNFINISHED) or at - first >= MAX_CHARACTER
        if whole or at == end:
            log_probs = None if row.log_probs is None else row.log_probs[first:at]
            yield {"at": first, "count": at - first, "text": text, "ids": ids, "log_probs": log_probs}
            first = at


def text_of(tokenizer: Tokenizer | None, ids: Sequence[int]) -> str | None:
    """Decodes ids, special tokens included; None without a tokenizer."""
    if tokenizer is None:
        return None
    try:
        return tokenizer.decode(list(ids), skip_special_tokens=False)
    except (OverflowError, ValueError):  # an id outside of the vocabulary
        return UNFINISHED


def _images(tokenizer: Tokenizer | None, ids: Sequence[int]) -> int:
    """Returns the number of image placeholders among context tokens."""
    if tokenizer is None:
        return 0
    placeholders = {tokenizer.token_to_id(token) for token in IMAGE_TOKENS} - {None}
    return sum(token in placeholders for token in ids)
