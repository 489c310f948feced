"""What an agent may call: a box of tools, one for each rollout. The calculator is the reference; any other fits in.

A generator offers its tools by a function that opens a box for a rollout::

    def open_box(request: RolloutRequest) -> ToolBox: ...
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from slime_plugins.rollout_buffer.remote_rollout.calculator import CALCULATOR_SCHEMAS, calculator
from slime_plugins.rollout_buffer.remote_rollout.tool_calls import ToolCall
from slime_plugins.rollout_buffer.types import Message

__all__ = ["CalculatorBox", "FunctionBox", "ToolBox", "answer_call"]

LONGEST_RESULT = 100_000
"""Characters of one tool result; the rest is cut off, and the text says so."""

ToolFunction = Callable[..., Any]


class ToolBox(Protocol):
    """The tools of one rollout, with whatever state they keep between calls."""

    @property
    def schemas(self) -> Sequence[Mapping[str, Any]]:
        """The tools in OpenAI's form, as ``GET /tools`` lists them."""
        ...

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Returns what the tool answers, as text for the model.

        Raises:
            Exception: any; the model is told its text.
        """
        ...

    async def close(self) -> None:
        """Gives back what the tools hold; called once, at the end of the rollout."""
        ...


class CalculatorBox:
    """The calculator: ``calculate`` an expression, or ``add``, ``subtract``, ``multiply``, ``divide`` two numbers."""

    @property
    def schemas(self) -> Sequence[Mapping[str, Any]]:
        """The five tools."""
        return CALCULATOR_SCHEMAS

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Returns the result.

        Raises:
            ValueError: unknown tool, wrong arguments, or no result.
        """
        return calculator(name, arguments)

    async def close(self) -> None:
        """Does nothing."""


class FunctionBox:
    """Plain functions as tools: ``functions`` by name, plain or async, called with the arguments as keywords.

    A plain function runs in a thread.
    """

    def __init__(self, schemas: Sequence[Mapping[str, Any]], functions: Mapping[str, ToolFunction]) -> None:
        self._schemas = tuple(schemas)
        self._functions = dict(functions)

    @property
    def schemas(self) -> Sequence[Mapping[str, Any]]:
        """The tools in OpenAI's form."""
        return self._schemas

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Returns what the function returned, as text.

        Raises:
            ValueError: there is no such function.
        """
        function = self._functions.get(name)
        if function is None:
            raise ValueError(f"there is no tool {name!r}; there are {', '.join(sorted(self._functions))}")
        if inspect.iscoroutinefunction(function):
            return str(await function(**arguments))
        return str(await asyncio.to_thread(function, **arguments))

    async def close(self) -> None:
        """Does nothing."""


async def answer_call(box: ToolBox, call: ToolCall, timeout_s: float) -> Message:
    """Makes one call and returns its tool message; what goes wrong with the tool is an answer, too."""
    return {"role": "tool", "tool_call_id": call.call_id, "content": await _answer(box, call, timeout_s)}


async def _answer(box: ToolBox, call: ToolCall, timeout_s: float) -> str:
    if call.problem is not None:
        return f"Error: {call.problem}"
    try:
        async with asyncio.timeout(timeout_s):
            return _cut(await _awaited(box.call(call.name, call.arguments)))
    except TimeoutError:
        return f"Error: {call.name} did not answer within {timeout_s:g} s"
    except Exception as error:  # noqa: BLE001 - a tool is anybody's program: its complaint is for the model to read
        return _cut(f"Error: {str(error) or type(error).__name__}")


async def _awaited(result: Awaitable[str]) -> str:
    return str(await result)


def _cut(text: str) -> str:
    text = text.encode("utf-8", "replace").decode("utf-8")  # half a surrogate pair cannot be sent
    if len(text) <= LONGEST_RESULT:
        return text
    return f"{text[:LONGEST_RESULT]}\n[{len(text) - LONGEST_RESULT} characters were cut off]"
