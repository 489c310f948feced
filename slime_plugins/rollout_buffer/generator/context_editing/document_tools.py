"""The tools for the document, the notes and the budget.

``deleteContext`` and ``finish`` change the episode, which executes them; only their arguments are checked here. Every
call gets a result. The result of a refused call is an error, whose message is for the model.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from slime_plugins.rollout_buffer.engine.tool_call_parser import ToolCall
from slime_plugins.rollout_buffer.generator.context_editing.document import ChunkIndex, Document
from slime_plugins.rollout_buffer.generator.context_editing.history import ToolResult
from slime_plugins.rollout_buffer.generator.context_editing.settings import ContextEditingSettings
from slime_plugins.rollout_buffer.generator.context_editing.tool_specs import (
    ArgumentError,
    Tool,
    ToolName,
    checked_arguments,
    handler_of,
    tools_for,
)

MAX_NOTES = 256
MAX_NOTE_CHARACTERS = 20_000
SNIPPET_WORDS = 24
SNIPPET_CHARACTERS = 1000
"""A search hit shows the beginning of its chunk, up to these numbers of words and characters."""
ROOM_AROUND_A_RESULT = 128
"""Tokens reserved for a result besides its message: its ids and status, and the text of the chat template."""
_CUT = " … (cut: this is too long for one result; smaller chunks are shown whole)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """The context in tokens: its present length, the length reserved for a turn, and the limit."""

    used: int
    response_length: int
    max_model_length: int

    @property
    def left(self) -> int:
        """Tokens that may be added before the episode ends; never negative."""
        return max(0, self.max_model_length - self.response_length - self.used)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedCall:
    """A call of an existing tool, with arguments of the right types."""

    tool: str
    arguments: Mapping[str, Any]


class DocumentTools:
    """The tools of one episode.

    ``count`` counts the tokens of a text as a result shows it, ``budget`` returns the context's state.
    """

    def __init__(
        self,
        document: Document,
        settings: ContextEditingSettings,
        *,
        count: Callable[[str], int],
        budget: Callable[[], Budget],
    ) -> None:
        self._document = document
        self._settings = settings
        self._count = count
        self._budget = budget
        self._tools: dict[str, Tool] = {str(tool.name): tool for tool in tools_for(editing=settings.statelm_enabled)}
        self._index: ChunkIndex | None = None
        self.notes: dict[str, str] = {}
        self._handlers: dict[ToolName, Callable[[Mapping[str, Any]], Awaitable[ToolResult]]] = {
            ToolName.ANALYZE_TEXT: self._analyze_text,
            ToolName.LOAD_DOCUMENT: self._load_document,
            ToolName.BUILD_INDEX: self._build_index,
            ToolName.READ_CHUNK: self._read_chunk,
            ToolName.SEARCH_ENGINE: self._search_engine,
            ToolName.NOTE: self._note,
            ToolName.READ_NOTE: self._read_note,
            ToolName.UPDATE_NOTE: self._update_note,
            ToolName.CHECK_BUDGET: self._check_budget,
        }

    def check(self, call: ToolCall) -> CheckedCall | ToolResult:
        """Returns the checked call, or the result of a refused call."""
        if call.problem is not None:
            return _error(call.problem)
        tool = self._tools.get(call.name)
        if tool is None:
            return _error(f"there is no tool {call.name[:80]!r}; use one of {', '.join(self._tools)}")
        try:
            return CheckedCall(tool=tool.name, arguments=checked_arguments(tool, call.arguments))
        except ArgumentError as error:
            return _error(str(error))

    def has(self, name: str) -> bool:
        """Returns True if the episode has a tool of this name."""
        return name in self._tools

    async def run(self, call: CheckedCall) -> ToolResult:
        """Executes a call of any tool but ``deleteContext`` and ``finish``."""
        handler = handler_of(call.tool)
        if handler is None:
            return await self._handlers[ToolName(call.tool)](call.arguments)
        try:
            message = await handler(self._document.text, call.arguments)
        except ArgumentError as error:
            return _error(str(error))
        return ToolResult(message=self._within_limit(message) if isinstance(message, str) else message)

    # ---- the document ------------------------------------------------------------------------------------------------

    async def _analyze_text(self, arguments: Mapping[str, Any]) -> ToolResult:
        tokens = await self._document.token_count(self._count)
        result = {
            "characters": len(self._document.text),
            "words": await self._document.word_count(),
            "tokens": tokens,
            "fits_in_context": tokens < self._room(),
        }
        return ToolResult(message=result)

    async def _load_document(self, arguments: Mapping[str, Any]) -> ToolResult:
        tokens, room = await self._document.token_count(self._count), self._room()
        if tokens >= room:
            return _error(
                f"the document has {tokens} tokens and the context has room for {room}: "
                f"use {ToolName.BUILD_INDEX}, {ToolName.SEARCH_ENGINE} and {ToolName.READ_CHUNK}"
            )
        return ToolResult(message=self._document.text)

    async def _build_index(self, arguments: Mapping[str, Any]) -> ToolResult:
        chunk_words = arguments.get("chunk_size", self._settings.chunk_words)
        overlap = arguments.get("overlap", 0)
        if overlap > chunk_words // 2:
            return _error(f"overlap must be at most half of chunk_size, that is {chunk_words // 2}")
        self._index = await self._document.index(chunk_words=chunk_words, overlap=overlap)
        return ToolResult(message={"chunks": len(self._index.chunks), "chunk_size": chunk_words, "overlap": overlap})

    async def _read_chunk(self, arguments: Mapping[str, Any]) -> ToolResult:
        if self._index is None:
            return _error(f"there are no chunks yet: call {ToolName.BUILD_INDEX} first")
        chunks, chunk_id = self._index.chunks, arguments["chunk_id"]
        if chunk_id >= len(chunks):
            return _error(f"there is no chunk {chunk_id}: the document has {len(chunks)}, numbered from 0")
        return ToolResult(message={"chunk_id": chunk_id, "text": self._within_limit(chunks[chunk_id])})

    async def _search_engine(self, arguments: Mapping[str, Any]) -> ToolResult:
        if self._index is None:
            return _error(f"there is no index yet: call {ToolName.BUILD_INDEX} first")
        hits = self._index.search(arguments["query"], arguments.get("top_k", 5))
        tokens_per_hit = self._settings.max_result_tokens // max(1, len(hits))
        entries = [
            {
                "chunk_id": hit.chunk_id,
                "score": round(hit.score, 3),
                "begins": self._beginning(_snippet(self._index.chunks[hit.chunk_id]), tokens_per_hit),
            }
            for hit in hits
        ]
        return ToolResult(message={"hits": entries})

    # ---- notes -------------------------------------------------------------------------------------------------------

    async def _note(self, arguments: Mapping[str, Any]) -> ToolResult:
        key = arguments["key"]
        if key in self.notes:
            return _error(f"there is a note {key[:80]!r} already: use {ToolName.UPDATE_NOTE}")
        if len(self.notes) >= MAX_NOTES:
            return _error(f"there are {MAX_NOTES} notes already: use {ToolName.UPDATE_NOTE}")
        return self._write(key, arguments["content"])

    async def _update_note(self, arguments: Mapping[str, Any]) -> ToolResult:
        key = arguments["key"]
        if key not in self.notes:
            return self._no_such_note(key)
        appended = arguments.get("mode", "append") == "append"
        return self._write(key, f"{self.notes[key]}\n{arguments['content']}" if appended else arguments["content"])

    async def _read_note(self, arguments: Mapping[str, Any]) -> ToolResult:
        key = arguments.get("key")
        if key is None:
            return self._all_notes()
        if key not in self.notes:
            return self._no_such_note(key)
        return ToolResult(message={"key": key, "content": self._within_limit(self.notes[key])})

    def _all_notes(self) -> ToolResult:
        all_notes = "\n".join(f"{key}\n{text}" for key, text in self.notes.items())
        if self._count(all_notes) > self._settings.max_result_tokens:
            return _error(f"the notes together are too long: read them one by one ({self._note_names()})")
        return ToolResult(message={"notes": dict(self.notes)})

    def _write(self, key: str, content: str) -> ToolResult:
        if len(key) + len(content) > MAX_NOTE_CHARACTERS:
            return _error(f"a note holds at most {MAX_NOTE_CHARACTERS} characters")
        self.notes[key] = content
        return ToolResult(message={"key": key, "notes": len(self.notes)})

    def _no_such_note(self, key: str) -> ToolResult:
        return _error(f"there is no note {key[:80]!r}; there are: {self._note_names()}")

    def _note_names(self) -> str:
        return (", ".join(list(self.notes)[:50]) or "none")[:1000]

    # ---- the budget --------------------------------------------------------------------------------------------------

    async def _check_budget(self, arguments: Mapping[str, Any]) -> ToolResult:
        budget = self._budget()
        result = {
            "tokens_used": budget.used,
            "tokens_left": budget.left,
            "max_model_length": budget.max_model_length,
            "kept_for_a_turn": budget.response_length,
        }
        return ToolResult(message=result)

    def _room(self) -> int:
        """Returns how many tokens the message of one more result may have."""
        return max(0, self._budget().left - ROOM_AROUND_A_RESULT)

    def _within_limit(self, text: str) -> str:
        """Returns a text cut to about the maximum length of a result; a cut text says so at its end."""
        beginning = self._beginning(text, self._settings.max_result_tokens)
        return text if beginning == text else beginning + _CUT

    def _beginning(self, text: str, max_tokens: int) -> str:
        """Returns about the first ``max_tokens`` tokens of a text."""
        tokens = self._count(text)
        return text if tokens <= max_tokens else text[: max(1, len(text) * max_tokens // tokens)]


def _snippet(chunk: str) -> str:
    return " ".join(chunk[:SNIPPET_CHARACTERS].split()[:SNIPPET_WORDS])


def _error(message: str) -> ToolResult:
    return ToolResult(message=message, ok=False)
