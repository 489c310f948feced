"""What a sampled token can be: an id of the model's vocabulary, with a log-probability that is one. Pure but for files.

Token ids and log-probs come from engines and over HTTP, and go into a training as they are: an id that no embedding has
ends the trainer, a log-prob that is none spoils its gradients. So they are checked where they come in.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Mapping, Sized
from pathlib import Path
from typing import Any, Final

MAX_VOCABULARY: Final = 2**24
"""Sixty times the largest vocabulary there is, and far from where 32 bits end: what holds where nothing is known."""
ROUNDING: Final = 1e-3
"""A sure token's log-prob, computed in half precision, may come out this much above 0."""
LOWEST_LOG_PROB: Final = -3.0e38
"""Below it a number is infinite in the 32 bits of a tensor."""
MAX_FILE_BYTES: Final = 256 * 1024 * 1024
UNKNOWN_PADDING: Final = 8192
"""Models pad their vocabulary, and engines may sample ids of the padding: how much is allowed where nobody says."""


def checked_log_prob(value: object) -> float | None:
    """Returns a log-prob; rounding above 0 is cut off. None if it is no number, not finite, or above 0."""
    if type(value) not in (int, float):
        return None
    try:
        number = float(value)  # type: ignore[arg-type]  # one of the two types that were asked for
    except OverflowError:
        return None
    if math.isnan(number) or not LOWEST_LOG_PROB <= number <= ROUNDING:
        return None
    return min(number, 0.0)


def first_beyond(ids: Iterable[int], size: int | None) -> int | None:
    """Returns the first id that a vocabulary of ``size`` does not have; None when it has all of them."""
    bound = MAX_VOCABULARY if size is None else size
    return next((token for token in ids if not 0 <= token < bound), None)


def vocabulary_size(path: str | Path | None, tokenizer: Sized | None = None) -> int | None:
    """Returns how many ids the model in a folder has, its padding included; None where that cannot be read.

    ``config.json`` says it, also of models that see. A folder that holds a tokenizer alone is taken for its highest id
    and some padding, and so is a ``tokenizer`` that came without a folder.
    """
    if path is None or not Path(path).is_dir():
        return None if tokenizer is None else len(tokenizer) + UNKNOWN_PADDING
    files = tuple(Path(path) / name for name in ("config.json", "tokenizer.json"))
    return _size_by_files(*files, tuple(map(_changed_at, files)))


@functools.lru_cache(maxsize=64)
def _size_by_files(config: Path, tokenizer: Path, _changed: tuple[int | None, ...]) -> int | None:
    """The times of change are part of the key: a tokenizer's file is megabytes, and read once."""
    configured = _size_in_config(_json(config))
    if configured is not None:
        return configured
    highest = _highest_id(_json(tokenizer))
    return None if highest is None else highest + 1 + UNKNOWN_PADDING


def _size_in_config(config: Any) -> int | None:
    """The vocabulary's size in a model's configuration, or in that of its part that writes text."""
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
