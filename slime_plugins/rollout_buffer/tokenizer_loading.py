"""Loads tokenizers, restricts remote code, and reads the size of a model's vocabulary.

A tokenizer can contain code. It is executed only if the operator selected the tokenizer: on the trainer's side, where
slime runs the checkpoint's code anyway, and for names given with ``--trust-remote-code``. It is never executed for a
tokenizer that a job or a request names.
"""

from __future__ import annotations

import functools
import json
import os
import threading
from collections.abc import Mapping, Sized
from pathlib import Path
from typing import Any, Final

from slime_plugins.rollout_buffer.errors import ConfigError

MAX_FILE_BYTES: Final = 256 * 1024 * 1024
UNKNOWN_PADDING: Final = 8192
"""Number of padding ids that is assumed if it is unknown. Engines may sample the ids of the padding."""
HUB_TIMEOUT_S: Final = 5.0
"""Timeout of the check whether the model hub has a file. Libraries retry for most of a minute, for each file."""
_OFFLINE: Final = "the hub is offline here (HF_HUB_OFFLINE), and the cache does not have it"
_FILES: Final = ("tokenizer_config.json", "tokenizer.json")
_IMPORT_LOCK: Final = threading.Lock()
"""transformers replaces its module in ``sys.modules`` while it is imported. A thread that imports transformers during
this time gets the replaced module, which has no ``AutoTokenizer``."""


def load_tokenizer(
    path: str | Path, *, trusted: bool = False, revision: str | None = None, download: bool | None = None
) -> Any:
    """Returns the tokenizer in a folder of this host, or of a name on the model hub.

    ``trusted`` allows remote code. ``download`` allows downloads; None leaves that to ``HF_HUB_OFFLINE``.

    Raises:
        ConfigError: there is no such folder, and the name cannot be loaded. An unreachable hub is detected within
            ``HUB_TIMEOUT_S``. Errors of transformers for a folder are raised as they are.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # no warning that torch is missing: it is not needed
    with _IMPORT_LOCK:
        from transformers import AutoTokenizer

    folder = Path(path).expanduser()
    if folder.is_dir():
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trusted, local_files_only=True)
    offline = _is_offline() if download is None else not download
    options = {} if revision is None else {"revision": revision}
    trouble = _OFFLINE if offline else _trouble_of_asking(str(path), revision)
    cached_only = bool(trouble)
    try:
        return AutoTokenizer.from_pretrained(
            str(path), trust_remote_code=trusted, local_files_only=cached_only, **options
        )
    except (OSError, ValueError) as error:
        reason, _, _ = str(error).partition("\n")
        why = trouble or f"{type(error).__name__}: {reason[:200]}"
        raise ConfigError(
            f"the tokenizer {path} is no folder of this host, and cannot be loaded from the model hub ({why}): "
            "put the trainer's tokenizer into a folder of this host"
        ) from error


def hub_trouble(name: str) -> str:
    """Returns why a name cannot be loaded from the model hub; empty if it can be loaded, or is in the cache."""
    if _is_cached(name):
        return ""
    return _OFFLINE if _is_offline() else _trouble_of_asking(name, None)


def _is_cached(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return any(isinstance(try_to_load_from_cache(name, file), str) for file in _FILES)
    except HFValidationError:
        return False


def _trouble_of_asking(name: str, revision: str | None) -> str:
    """As ``_ask``, within ``HUB_TIMEOUT_S``: in a thread, because resolving the hub's host has no timeout."""
    replies: list[str] = []
    asking = threading.Thread(target=lambda: replies.append(_ask(name, revision)), name="model hub", daemon=True)
    asking.start()
    asking.join(HUB_TIMEOUT_S)
    return replies[0] if replies else f"the hub did not answer within {HUB_TIMEOUT_S:g} s, and it is not in the cache"


def _ask(name: str, revision: str | None) -> str:
    """Returns why a name cannot be loaded from the model hub; empty if it can be loaded."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError, RepositoryNotFoundError

    try:
        get_hf_file_metadata(hf_hub_url(name, _FILES[0], revision=revision), timeout=HUB_TIMEOUT_S)
    except EntryNotFoundError:
        return ""  # the model exists; some have their tokenizer in other files
    except HFValidationError:
        return "it is not a valid name"
    except RepositoryNotFoundError:
        return "the hub does not have it, or access is restricted"
    except Exception as error:  # noqa: BLE001 - each release of the library raises its own kind for a broken network
        return f"the hub cannot be asked, and it is not in the cache: {type(error).__name__}: {str(error)[:200]}"
    return ""


def _is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")


def vocabulary_size(path: str | Path | None, tokenizer: Sized | None = None) -> int | None:
    """Returns the vocabulary size of the model in a folder, including padding; None if it cannot be read.

    The size is read from ``config.json``, also of vision models. For a folder with a tokenizer alone, or a
    ``tokenizer`` without a folder, it is the number of ids plus ``UNKNOWN_PADDING``.
    """
    if path is None or not Path(path).is_dir():
        return None if tokenizer is None else len(tokenizer) + UNKNOWN_PADDING
    files = tuple(Path(path) / name for name in ("config.json", "tokenizer.json"))
    return _size_by_files(*files, tuple(map(_changed_at, files)))


@functools.lru_cache(maxsize=64)
def _size_by_files(config: Path, tokenizer: Path, _changed: tuple[int | None, ...]) -> int | None:
    """As ``vocabulary_size``. Cached by modification times: reading megabytes of a tokenizer's file takes long."""
    configured = _size_in_config(_json(config))
    if configured is not None:
        return configured
    highest = _highest_id(_json(tokenizer))
    return None if highest is None else highest + 1 + UNKNOWN_PADDING


def _size_in_config(config: Any) -> int | None:
    """Returns the larger vocabulary size of a model's configuration and of its text part."""
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
