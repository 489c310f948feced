"""The document tools for agents of the remote rollout protocol: ``--tools`` …``.remote_tools:DOCUMENT_TOOLS``.

The document comes with the request, as ``document_content``: at its top level, or in its ``extra_info``, its
``tool_kwargs`` or its ``metadata``. Two tools stay behind: ``deleteContext`` changes an episode's own history, which a
remote rollout has not, and ``finish`` ends an episode: a remote rollout ends with the first turn that calls no tool.
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
from slime_plugins.rollout_buffer.remote_rollout.bodies import RolloutBody

OFFERED = tuple(tool for tool in TOOLS if tool.name not in (ToolName.DELETE_CONTEXT, ToolName.FINISH))
_PLACES = ("extra_info", "tool_kwargs", "metadata")
_CAPS = ("max_tokens", "max_completion_tokens", "max_new_tokens")
_KEPT_FOR_A_TURN = 1024
_MAX_SHELVES = 4
_SHELF_CHARACTERS = 16_000_000
_CHARACTERS_PER_TOKEN = 4  # until the first turn is told about


class DocumentToolSession:
    """The document tools of one rollout. Calls are carried out one after the other, in their order."""

    def __init__(self, document: Document, request: RolloutBody) -> None:
        self._room = request.max_tokens_total
        self._kept = _kept_for_a_turn(request)
        self._used = 0
        self._count: Callable[[str], int] = _estimate
        settings = ContextEditingSettings(statelm_enabled=False, max_model_length=self._room)
        self._tools = DocumentTools(document, settings, count=lambda text: self._count(text), budget=self._budget)
        self._busy = asyncio.Lock()

    @property
    def schemas(self) -> Sequence[Mapping[str, Any]]:
        """The nine tools."""
        return DOCUMENT_TOOLS.schemas

    def see_context(self, tokens: int, count: Callable[[str], int]) -> None:
        """Takes how full the context is, and how tokens are counted."""
        self._used, self._count = tokens, count

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Returns the result, structured ones as JSON. It counts as used for the calls behind it.

        Raises:
            ValueError: the tool has no result; the sentence says what to do instead.
        """
        async with self._busy:
            result = await self._result(name, arguments)
            if not result.ok:
                raise ValueError(result.message)
            text = result.message if isinstance(result.message, str) else json.dumps(result.message, ensure_ascii=False)
            self._used += self._count(text)
            return text

    async def close(self) -> None:
        """Does nothing: documents belong to the offer."""

    async def _result(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        names = [str(tool.name) for tool in OFFERED]
        if name not in names:
            raise ValueError(f"there is no tool {name[:80]!r}; use one of {', '.join(names)}")
        checked = self._tools.check(ToolCall(name=name, arguments=dict(arguments)))
        return checked if isinstance(checked, ToolResult) else await self._tools.run(checked)

    def _budget(self) -> Budget:
        return Budget(used=self._used, response_length=self._kept, max_model_length=self._room)


class DocumentToolProvider:
    """Opens the document tools for rollouts. Those of one tokenizer share what they know of the same document.

    Raises:
        ConfigError: the search library is not installed.
    """

    def __init__(self) -> None:
        require_search_library()
        self._schemas = tuple(schemas(OFFERED))
        self._shelves: OrderedDict[tuple[str | None, str | None], DocumentCache] = OrderedDict()

    @property
    def schemas(self) -> Sequence[Mapping[str, Any]]:
        """The nine tools in OpenAI's form."""
        return self._schemas

    def open_session(self, request: RolloutBody) -> DocumentToolSession:
        """Returns the tools on the document that the request carries.

        Raises:
            InvalidPayloadError: it carries none.
        """
        return DocumentToolSession(self._shelf(request).document(_document_of(request)), request)

    def _shelf(self, request: RolloutBody) -> DocumentCache:
        """A document's length in tokens is a tokenizer's own."""
        key = (request.tokenizer_name, request.tokenizer_revision)
        shelf = self._shelves.pop(key, None) or DocumentCache(_SHELF_CHARACTERS)
        self._shelves[key] = shelf
        if len(self._shelves) > _MAX_SHELVES:
            self._shelves.popitem(last=False)
        return shelf


def _document_of(request: RolloutBody) -> str:
    fields = {**request.unknown_fields, "metadata": request.metadata}
    for place in (fields, *(fields.get(name) for name in _PLACES)):
        document = place.get("document_content") if isinstance(place, Mapping) else None
        if isinstance(document, str) and document.strip():
            return document
    raise InvalidPayloadError(
        f"the tools of this server work on a document: give document_content, a text, in the request or in its "
        f"{', '.join(_PLACES[:-1])} or {_PLACES[-1]}"
    )


def _kept_for_a_turn(request: RolloutBody) -> int:
    """The cap that the request gives a turn, or a usual one; never so much that no room is left for results."""
    caps = [cap for name in _CAPS if type(cap := request.sampling_params.get(name)) is int and cap > 0]
    return min([*caps, request.max_tokens_total // 4] if caps else [_KEPT_FOR_A_TURN, request.max_tokens_total // 4])


def _estimate(text: str) -> int:
    return len(text) // _CHARACTERS_PER_TOKEN + 1


DOCUMENT_TOOLS = DocumentToolProvider()
