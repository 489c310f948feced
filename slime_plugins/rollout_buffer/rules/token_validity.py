"""Validates sampled tokens: ids within the model's vocabulary, log-probs that are log-probabilities.

Token ids and log-probs arrive from engines and over HTTP, and are trained without further checks: an id without an
embedding crashes the trainer, an invalid log-prob corrupts its gradients.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Mapping, Sized
from pathlib import Path
from typing import Any, Final

MAX_VOCABULARY: Final = 2**24
"""The limit if the model's vocabulary is unknown: sixty times the largest vocabulary in use."""
ROUNDING: Final = 1e-3
"""A log-prob computed in half precision may exceed 0 by this much."""
LOWEST_LOG_PROB: Final = -3.0e38
"""A smaller number is infinite in float32."""
MAX_FILE_BYTES: Final = 256 * 1024 * 1024
UNKNOWN_PADDING: Final = 8192
"""Models pad their vocabulary, and engines may sample padding ids: the padding that is assumed if it is unknown."""


def checked_log_prob(value: object) -> float | None:
    """Returns a log-prob, rounding errors above 0 clipped; None if it is no number, not finite, or above 0."""
    if type(value) not in (int, float):
        return None
    try:
        number = float(value)  # type: ignore[arg-type]  # one of the two types that were asked for
    except OverflowError:
        return None
    if math.isnan(number) or not LOWEST_LOG_PROB <= number <= ROUNDING:
        return None
    return min(number, 0.0)


def first_invalid_id(ids: Iterable[int], size: int | None) -> int | None:
    """Returns the first id outside of a vocabulary of ``size``; None if all are inside."""
    bound = MAX_VOCABULARY if size is None else size
    return next((token for token in ids if not 0 <= token < bound), None)


def vocabulary_size(path: str | Path | None, tokenizer: Sized | None = None) -> int | None:
    """Returns the vocabulary size of the model in a folder, including padding; None if it cannot be read.

    Read from ``config.json``, also of vision models. For a folder with a tokenizer alone, or a ``tokenizer`` without a
    folder, it is the highest id plus ``UNKNOWN_PADDING``.
    """
    if path is None or not Path(path).is_dir():
        return None if tokenizer is None else len(tokenizer) + UNKNOWN_PADDING
    files = tuple(Path(path) / name for name in ("config.json", "tokenizer.json"))
    return _size_by_files(*files, tuple(map(_changed_at, files)))


@functools.lru_cache(maxsize=64)
def _size_by_files(config: Path, tokenizer: Path, _changed: tuple[int | None, ...]) -> int | None:
    """Cached by modification times: a tokenizer's file has megabytes."""
    configured = _size_in_config(_json(config))
    if configured is not None:
        return configured
    highest = _highest_id(_json(tokenizer))
    return None if highest is None else highest + 1 + UNKNOWN_PADDING


def _size_in_config(config: Any) -> int | None:
    """The vocabulary size of a model's configuration or of its text part."""
    if not isinstance(config, Mapping):
        return None
    parts = [config, *(config.get(name) for name in ("text_config", "llm_config", "language_config"))]
    sizes = [part.get("vocab_size") for part in parts if isinstance(part, Mapping)]
    return max((size for size in sizes if type(size) is int and size > 0), default=None)


def _highest_id(tokenizer: Any) -> int | None:
    if not isinstance(tokenizer, Mapping):
        return None
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
    ids: list[Any] = []
    if isinstance(vocabulary, Mapping):
        ids += vocabulary.values()
    elif isinstance(vocabulary, list):
        ids += range(len(vocabulary))
    if isinstance(added, list):
        ids += [token.get("id") for token in added if isinstance(token, Mapping)]
    return max((token for token in ids if type(token) is int), default=None)


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes()) if path.stat().st_size <= MAX_FILE_BYTES else None
    except (OSError, ValueError, RecursionError):
        return None


def _changed_at(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None
