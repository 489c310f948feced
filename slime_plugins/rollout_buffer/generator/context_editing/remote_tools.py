"""The document tools of a rollout server that is started with ``--tools MODULE:DOCUMENT_TOOLS``; MODULE is this module.

The request carries the document, as ``document_content``: at its top level, or in its ``extra_info``, ``tool_kwargs``
or ``metadata``. Two tools are not offered: ``deleteContext``, because a remote rollout has no history of its own
to change, and ``finish``, because a remote rollout ends with the first turn that calls no tool.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slime_plugins.rollout_buffer.engine.tool_call_parser import ToolCall
from slime_plugins.rollout_buffer.errors import InvalidPayloadError
from slime_plugins.rollout_buffer.generator.context_editing.document import (
    Document,
    DocumentCache,
    require_search_library,
)
from slime_plugins.rollout_buffer.generator.context_editing.document_tools import Budget, DocumentTools
from slime_plugins.rollout_buffer.generator.context_editing.history import ToolResult
from slime_plugins.rollout_buffer.generator.context_editing.settings import ContextEditingSettings
from slime_plugins.rollout_buffer.generator.context_editing.tool_specs import TOOLS, ToolName, schemas
from slime_plugins.rollout_buffer.remote_rollout.agent_loop import CAP_KEYS
from slime_plugins.rollout_buffer.remote_rollout.bodies import RolloutBody

OFFERED = tuple(tool for tool in TOOLS if tool.name not in (ToolName.DELETE_CONTEXT, ToolName.FINISH))
_HOLDERS = ("extra_info", "tool_kwargs", "metadata")
_RESERVED_TOKENS = 1024
"""Reserved for a turn of a request without a token limit of its own."""
_MAX_CACHES = 4
_MAX_CACHE_CHARACTERS = 16_000_000
_CHARACTERS_PER_TOKEN = 4  # an estimate until the first turn provides a token counter


class DocumentToolSession:
    """The document tools of one rollout. Calls are executed in order."""

    def __init__(self, document: Document, request: RolloutBody) -> None:
        self._max_tokens = request.max_tokens_total
        self._reserved_tokens = _tokens_reserved_for_a_turn(request)
        self._used = 0
        self._count: Callable[[str], int] = lambda text: len(text) // _CHARACTERS_PER_TOKEN + 1
        settings = ContextEditingSettings(statelm_enabled=False, max_model_length=self._max_tokens)
        # Not self._count itself, which see_context replaces.
        self._tools = DocumentTools(document, settings, count=lambda text: self._count(text), budget=self._budget)
        self._busy = asyncio.Lock()

    @property
    def schemas(self) -> Sequence[Mapping[str, Any]]:
        return DOCUMENT_TOOLS.schemas

    def see_context(self, tokens: int, count: Callable[[str], int]) -> None:
        """Stores the length of the context in tokens, and the counter of a text's tokens."""
        self._used, self._count = tokens, count

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Returns the result; a structured result is JSON. Later calls count its tokens as used.

        Raises:
            ValueError: the call was refused; the message is for the model.
        """
        async with self._busy:
            result = await self._result(name, arguments)
            if not result.ok:
                raise ValueError(result.message)
            text = result.message if isinstance(result.message, str) else json.dumps(result.message, ensure_ascii=False)
            self._used += self._count(text)
            return text

    async def close(self) -> None:
        """Does nothing, because documents belong to the provider."""

    async def _result(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        names = [str(tool.name) for tool in OFFERED]
        if name not in names:
            raise ValueError(f"there is no tool {name[:80]!r}; use one of {', '.join(names)}")
        checked = self._tools.check(ToolCall(name=name, arguments=dict(arguments)))
        return checked if isinstance(checked, ToolResult) else await self._tools.run(checked)

    def _budget(self) -> Budget:
        return Budget(used=self._used, response_length=self._reserved_tokens, max_model_length=self._max_tokens)


class DocumentToolProvider:
    """Opens the document tools for rollouts. Rollouts with the same tokenizer share a document cache.

    Raises:
        ConfigError: the search library is not installed.
    """

    def __init__(self) -> None:
        require_search_library()
        self._schemas = tuple(schemas(OFFERED))
        self._caches: OrderedDict[tuple[str | None, str | None], DocumentCache] = OrderedDict()

    @property
    def schemas(self) -> Sequence[Mapping[str, Any]]:
        return self._schemas

    def open_session(self, request: RolloutBody) -> DocumentToolSession:
        """Returns the tools for the document of the request.

        Raises:
            InvalidPayloadError: the request has no document.
        """
        return DocumentToolSession(self._cache_for(request).document(_document_of(request)), request)

    def _cache_for(self, request: RolloutBody) -> DocumentCache:
        """Returns the cache of the request's tokenizer: a document's token count depends on it."""
        key = (request.tokenizer_name, request.tokenizer_revision)
        cache = self._caches.pop(key, None) or DocumentCache(_MAX_CACHE_CHARACTERS)
        self._caches[key] = cache
        if len(self._caches) > _MAX_CACHES:
            self._caches.popitem(last=False)
        return cache


def _document_of(request: RolloutBody) -> str:
    fields = {**request.unknown_fields, "metadata": request.metadata}
    for holder in (fields, *(fields.get(name) for name in _HOLDERS)):
        document = holder.get("document_content") if isinstance(holder, Mapping) else None
        if isinstance(document, str) and document.strip():
            return document
    raise InvalidPayloadError(
        f"the tools of this server need a document: give document_content, a text, in the request or in its "
        f"{', '.join(_HOLDERS[:-1])} or {_HOLDERS[-1]}"
    )


def _tokens_reserved_for_a_turn(request: RolloutBody) -> int:
    """Returns the request's token limit of a turn, or a default, but at most a quarter of the whole limit."""
    caps = [cap for name in CAP_KEYS if type(cap := request.sampling_params.get(name)) is int and cap > 0]
    return min(*(caps or [_RESERVED_TOKENS]), request.max_tokens_total // 4)


DOCUMENT_TOOLS = DocumentToolProvider()
