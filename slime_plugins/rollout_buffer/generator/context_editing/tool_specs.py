"""The tools as data: name, description and parameters, from which schemas and the checks of arguments are made.

A wrong argument raises ``ArgumentError``, whose message is for the model, and never another exception.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

MAX_INTEGER = 10**9
"""Limit of every whole number; a parameter whose schema has no maximum accepts numbers up to it."""
MAX_IDS = 1000
"""Maximum number of message ids in one call of ``deleteContext``."""
_MODES = ("append", "replace")
"""The modes of ``updateNote``."""


class ToolName(StrEnum):
    """Names of the tools."""

    ANALYZE_TEXT = "analyzeText"
    LOAD_DOCUMENT = "loadDocument"
    BUILD_INDEX = "buildIndex"
    READ_CHUNK = "readChunk"
    SEARCH_ENGINE = "searchEngine"
    NOTE = "note"
    READ_NOTE = "readNote"
    UPDATE_NOTE = "updateNote"
    CHECK_BUDGET = "checkBudget"
    DELETE_CONTEXT = "deleteContext"
    FINISH = "finish"


class ArgumentError(Exception):
    """The arguments of a call are invalid; the message is for the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """One parameter. ``read`` converts a value, or raises an ``ArgumentError`` to which ``checked_arguments`` adds the
    parameter's name."""

    name: str
    description: str
    schema: Mapping[str, Any]
    read: Callable[[Any], Any]
    required: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
    """One tool with its parameters."""

    name: str
    description: str
    parameters: tuple[Parameter, ...] = ()

    def schema(self) -> dict[str, Any]:
        """Returns the tool in OpenAI's form."""
        properties = {each.name: {**each.schema, "description": each.description} for each in self.parameters}
        required = [each.name for each in self.parameters if each.required]
        parameters = {"type": "object", "properties": properties, "required": required}
        function = {"name": str(self.name), "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


ToolHandler = Callable[[str, Mapping[str, Any]], Awaitable[Any]]
"""Executes a registered tool: takes the document and the checked arguments, returns a text or JSON for the model.
The model gets the message of an ``ArgumentError``; any other exception fails the attempt, which is retried."""

_registered: dict[str, tuple[Tool, ToolHandler]] = {}


def checked_arguments(tool: Tool, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the converted arguments, without those that the call omits or sets to null.

    Raises:
        ArgumentError: an argument is missing, unknown or of a wrong type; the message names it.
    """
    known = {parameter.name: parameter for parameter in tool.parameters}
    unknown = [name for name in arguments if name not in known]
    if unknown:
        accepted = ", ".join(known) or "no arguments"
        raise ArgumentError(f"{tool.name} has no argument {unknown[0][:80]!r}; it takes {accepted}")
    checked = {}
    for name, parameter in known.items():
        value = arguments.get(name)
        if value is None and parameter.required:
            raise ArgumentError(f"{tool.name} needs the argument {name}: {parameter.description}")
        if value is not None:
            checked[name] = _read(parameter, value)
    return checked


def register_tool(tool: Tool, handler: ToolHandler) -> None:
    """Adds a tool to every episode of this process.

    Call it in the generator file of the job's task type: a job loads no other file.

    Raises:
        ValueError: the name is taken.
    """
    if tool.name in _registered or tool.name in {str(name) for name in ToolName}:
        raise ValueError(f"there is a tool {tool.name!r} already")
    _registered[tool.name] = tool, handler


def unregister_tool(name: str) -> None:
    """Removes a registered tool; an unknown name is ignored."""
    _registered.pop(name, None)


def handler_of(name: str) -> ToolHandler | None:
    """Returns the handler of a registered tool; None for other tools."""
    return _registered[name][1] if name in _registered else None


def tools_for(*, editing: bool) -> tuple[Tool, ...]:
    """Returns the tools of an episode, shipped ones first; if not ``editing``, without ``deleteContext``."""
    shipped = tuple(tool for tool in TOOLS if editing or tool.name != ToolName.DELETE_CONTEXT)
    return (*shipped, *(tool for tool, _ in _registered.values()))


def schemas(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Returns the tools in the form of a chat template's ``tools``."""
    return [tool.schema() for tool in tools]


def _read(parameter: Parameter, value: Any) -> Any:
    try:
        return parameter.read(value)
    except ArgumentError as error:
        raise ArgumentError(f"{parameter.name} {error}") from error


def _text(value: Any) -> str:
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise ArgumentError("must be a text that is not empty")


def _answer(value: Any) -> str:
    """Returns the answer as text; a number, or a list of texts and numbers, is converted."""
    if isinstance(value, list) and value:
        return ", ".join(_text(item) for item in value)
    return _text(value)


def _as_integer(value: Any) -> int | None:
    """Returns the integer that ``value`` is, also as ``3.0`` or as a text of up to 9 digits; None for other values."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    digits = value.strip() if isinstance(value, str) else ""
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 10 else None


def _message_ids(value: Any) -> list[int]:
    """Returns the ids in a list, or a single id, each once and in the given order."""
    values = value if isinstance(value, list) else [value]
    ids = [_as_integer(each) for each in values]
    if not ids or len(ids) > MAX_IDS or any(msg_id is None or abs(msg_id) > MAX_INTEGER for msg_id in ids):
        raise ArgumentError(f"must be one message id or a list of 1 to {MAX_IDS} of them, as whole numbers")
    return list(dict.fromkeys(msg_id for msg_id in ids if msg_id is not None))


def _mode(value: Any) -> str:
    if value not in _MODES:
        raise ArgumentError(f"must be one of {', '.join(_MODES)}")
    return str(value)


def _integer_parameter(name: str, description: str, lowest: int, highest: int, *, required: bool = False) -> Parameter:
    def read(value: Any) -> int:
        number = _as_integer(value)
        if number is None or not lowest <= number <= highest:
            raise ArgumentError(f"must be a whole number from {lowest} to {highest}")
        return number

    schema = {"type": "integer", "minimum": lowest}
    if highest < MAX_INTEGER:
        schema["maximum"] = highest
    return Parameter(name=name, description=description, schema=schema, read=read, required=required)


def _text_parameter(
    name: str, description: str, *, required: bool = True, read: Callable[[Any], str] = _text
) -> Parameter:
    return Parameter(name=name, description=description, schema={"type": "string"}, read=read, required=required)


_IDS_SCHEMA = {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "integer"}]}

TOOLS = (
    Tool(
        name=ToolName.ANALYZE_TEXT,
        description="Tells how long the document is, and whether it would fit into the context.",
    ),
    Tool(
        name=ToolName.LOAD_DOCUMENT,
        description="Shows the whole document. Refused when it does not fit into the context that is left.",
    ),
    Tool(
        name=ToolName.BUILD_INDEX,
        description="Cuts the document into chunks and makes them readable and searchable. Call it before readChunk "
        "and searchEngine; calling it again cuts again.",
        parameters=(
            _integer_parameter("chunk_size", "words per chunk", 20, 5000),
            _integer_parameter("overlap", "words that neighbouring chunks share", 0, 2500),
        ),
    ),
    Tool(
        name=ToolName.READ_CHUNK,
        description="Shows one chunk of the document.",
        parameters=(_integer_parameter("chunk_id", "the chunk's number, from 0", 0, MAX_INTEGER, required=True),),
    ),
    Tool(
        name=ToolName.SEARCH_ENGINE,
        description="Finds the chunks that match a query best (BM25).",
        parameters=(
            _text_parameter("query", "the words to look for"),
            _integer_parameter("top_k", "how many chunks at most", 1, 50),
        ),
    ),
    Tool(
        name=ToolName.NOTE,
        description="Writes a new note. Notes outlast deleted messages.",
        parameters=(_text_parameter("key", "the note's name"), _text_parameter("content", "what to write down")),
    ),
    Tool(
        name=ToolName.READ_NOTE,
        description="Shows one note, or without a key all of them.",
        parameters=(_text_parameter("key", "the note's name", required=False),),
    ),
    Tool(
        name=ToolName.UPDATE_NOTE,
        description="Changes a note that is there.",
        parameters=(
            _text_parameter("key", "the note's name"),
            _text_parameter("content", "what to write down"),
            Parameter(
                name="mode",
                description="append (the default) adds to the note, replace writes it again",
                schema={"type": "string", "enum": list(_MODES)},
                read=_mode,
            ),
        ),
    ),
    Tool(name=ToolName.CHECK_BUDGET, description="Tells how many tokens the context holds and how many are left."),
    Tool(
        name=ToolName.DELETE_CONTEXT,
        description="Deletes messages from the context by their msg_id, for good. What matters should be in a note "
        "first. A tool result says its own id as msg_id and that of the message that called the tool as "
        "msg_id(invoking_assistant).",
        parameters=(
            Parameter(
                name="message_ids",
                description="the msg_id of the message to delete, or a list of them",
                schema=_IDS_SCHEMA,
                read=_message_ids,
                required=True,
            ),
        ),
    ),
    Tool(
        name=ToolName.FINISH,
        description="Gives the final answer and ends the task.",
        parameters=(
            _text_parameter(
                "answer", "the answer and nothing else; several items with commas between them", read=_answer
            ),
        ),
    ),
)
