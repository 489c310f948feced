"""A cache of the tokenizers that requests name.

A name is a configured name, a folder below a configured root, or a name of a model hub. Tokenizers load in a thread;
concurrent requests for the same tokenizer share the load. Only the code of listed names is executed.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from slime_plugins.rollout_buffer.chat_tokens import ChatTokens
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.remote_rollout.errors import TokenizerRefusedError
from slime_plugins.rollout_buffer.remote_rollout.settings import TokenizerSettings
from slime_plugins.rollout_buffer.tokenizer_loading import load_tokenizer

DEMO_NAME: Final = "demo"
_HUB_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?", re.ASCII)
_REVISION: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}", re.ASCII)
_MAIN: Final = "main"

logger = logging.getLogger(__name__)

Key = tuple[str, str | None, bool]
"""Folder or name at the hub, revision, and whether its code may run."""


class TokenizerCatalog:
    """Returns tokenizers by name and revision. ``load`` is replaced in tests."""

    def __init__(self, settings: TokenizerSettings | None = None, *, load: Callable[..., Any] = load_tokenizer) -> None:
        self._settings = settings or TokenizerSettings()
        self._load = load
        self._cached: OrderedDict[Key, asyncio.Task[ChatTokens]] = OrderedDict()

    async def get(self, name: str | None, revision: str | None = None) -> ChatTokens:
        """Returns the named tokenizer, from the cache or loaded.

        Raises:
            TokenizerRefusedError: the tokenizer is unknown, is outside of the roots, has no chat template, or has code
                that is not allowed.
        """
        name = name or self._settings.default_name or ""
        key = self._key_of(name, revision)
        task = self._cached.get(key)
        if task is None:
            task = self._cached[key] = asyncio.create_task(self._load_chat_tokens(key, name))
            task.add_done_callback(lambda loaded: self._evict_failed(key, loaded))
        self._cached.move_to_end(key)
        while len(self._cached) > self._settings.max_cached:
            self._cached.popitem(last=False)
        return await asyncio.shield(task)

    def _key_of(self, name: str, revision: str | None) -> Key:
        if not name:
            raise TokenizerRefusedError("tokenizer_name is missing, and this server has no default tokenizer")
        if revision is not None and (not _REVISION.fullmatch(revision) or ".." in revision):
            raise TokenizerRefusedError(f"tokenizer_revision {revision[:80]!r} is not the name of a revision")
        folder = self._folder(name)
        if folder is None:
            self._check_hub_name(name)
            return name, revision, name in self._settings.remote_code_names
        if revision not in (None, _MAIN):  # "main", the default at a hub, selects nothing
            raise TokenizerRefusedError(
                f"tokenizer {name!r} is a folder and has no revision {revision!r}: leave tokenizer_revision out"
            )
        return str(folder), None, name in self._settings.remote_code_names

    def _folder(self, name: str) -> Path | None:
        """Returns the local folder of a name, or None."""
        if name == DEMO_NAME or Path(name) == DEMO_TOKENIZER_PATH:
            return DEMO_TOKENIZER_PATH
        if name in self._settings.folders:
            return Path(self._settings.folders[name])
        if "\x00" in name or len(name) > 1024:
            return None
        for root in (root.resolve() for root in self._settings.roots):
            folder = (root / name).resolve()
            if folder.is_relative_to(root) and folder.is_dir():
                return folder
        return None

    def _check_hub_name(self, name: str) -> None:
        if not _HUB_NAME.fullmatch(name) or ".." in name:
            raise TokenizerRefusedError(
                f"tokenizer {name[:200]!r} is neither a name of a model hub nor a folder under the tokenizer roots"
            )
        if Path(name).exists():  # transformers would load a folder of the working directory
            raise TokenizerRefusedError(f"tokenizer {name!r} is a path outside of this server's tokenizer roots")

    async def _load_chat_tokens(self, key: Key, requested_name: str) -> ChatTokens:
        name, revision, trusted = key
        try:
            options = {"trusted": trusted, "revision": revision, "download": self._settings.download}
            tokens = ChatTokens(await asyncio.to_thread(self._load, name, **options))
        except ConfigError as error:
            raise TokenizerRefusedError(f"tokenizer {requested_name!r} cannot be used: {error.message}") from error
        except Exception as error:
            version = f" at revision {revision!r}" if revision else ""
            raise TokenizerRefusedError(
                f"tokenizer {requested_name!r}{version} cannot be loaded: {_first_line(error)}"
            ) from error
        logger.info("loaded tokenizer %s%s", name, f" at {revision}" if revision else "")
        return tokens

    def _evict_failed(self, key: Key, task: asyncio.Task[ChatTokens]) -> None:
        """Removes a failed load, so that the next request tries again."""
        failed = task.cancelled() or task.exception() is not None
        if failed and self._cached.get(key) is task:
            del self._cached[key]


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
