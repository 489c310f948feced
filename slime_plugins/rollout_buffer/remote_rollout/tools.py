"""The tools of an agent; the calculator is the reference implementation.

A ``ToolProvider`` opens a ``ToolSession`` for each rollout. A server is started with the provider's address,
``MODULE:NAME``.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, cast, runtime_checkable

from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.remote_rollout.bodies import RolloutBody
from slime_plugins.rollout_buffer.remote_rollout.calculator import CALCULATOR_SCHEMAS, CALCULATOR_TOOLS, calculator
from slime_plugins.rollout_buffer.remote_rollout.openai_tool_calls import NumberedCall
from slime_plugins.rollout_buffer.types import Message

MAX_RESULT = 100_000
"""Maximum number of characters of a tool result; the rest is replaced by a note."""

ToolFunction = Callable[..., Any]


class ToolSession(Protocol):
    """The tools of one rollout, with their state between calls."""

    @property
    def schemas(self) -> Sequence[Mapping[str, Any]]:
        """The tools in OpenAI's form, as ``GET /tools`` lists them."""

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Returns the tool's answer, as text for the model.

        Raises:
            Exception: any exception; the model gets its message.
        """

    async def close(self) -> None:
        """Releases the tools' resources; called once, at the end of the rollout."""


@runtime_checkable
class ContextAware(Protocol):
    """A tool session that uses the length of the context."""

    def see_context(self, tokens: int, count: Callable[[str], int]) -> None:
        """Gets the token count of the sequence before the calls of each turn; ``count`` counts tokens of a text."""


class ToolProvider(Protocol):
    """Tools for any number of rollouts."""

    @property
    def schemas(self) -> Sequence[Mapping[str, Any]]:
        """The tools in OpenAI's form, as ``GET /tools`` lists them."""

    def open_session(self, request: RolloutBody) -> ToolSession:
        """Returns the tools of one rollout; ``request.unknown_fields`` holds the request's fields beyond the protocol.

        Raises:
            InvalidPayloadError: the request lacks a field that the tools need; the reply is HTTP 400.
        """


class FunctionToolSession:
    """Functions as tools. ``functions`` maps names to functions, which are called with the arguments as keywords.

    A function that is not async runs in a thread.
    """

    def __init__(self, schemas: Sequence[Mapping[str, Any]], functions: Mapping[str, ToolFunction]) -> None:
        self._schemas = tuple(schemas)
        self._functions = dict(functions)

    @property
    def schemas(self) -> Sequence[Mapping[str, Any]]:
        return self._schemas

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Returns the function's result, as text.

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


class CalculatorProvider:
    """The calculator: ``calculate``, ``add``, ``subtract``, ``multiply`` and ``divide``."""

    @property
    def schemas(self) -> Sequence[Mapping[str, Any]]:
        return CALCULATOR_SCHEMAS

    def open_session(self, request: RolloutBody) -> ToolSession:
        return FunctionToolSession(CALCULATOR_SCHEMAS, {name: partial(calculator, name) for name in CALCULATOR_TOOLS})


CALCULATOR = CalculatorProvider()


def load_provider(address: str) -> ToolProvider:
    """Returns the provider at ``MODULE:NAME``.

    Raises:
        ConfigError: there is no such module or name, the import fails, or the object is no provider.
    """
    module_name, _, name = address.partition(":")
    if not module_name or not name:
        raise ConfigError(f"--tools {address!r}: must be MODULE:NAME")
    provider = getattr(_imported(address, module_name), name, None)
    if provider is None:
        raise ConfigError(f"--tools {address!r}: the module {module_name} has no {name}")
    if isinstance(provider, type):
        raise ConfigError(f"--tools {address!r}: is a class; name an instance of it")
    if not callable(getattr(provider, "open_session", None)):
        raise ConfigError(f"--tools {address!r}: is no tool provider; it needs open_session(request) and schemas")
    if not _are_schemas(getattr(provider, "schemas", None)):
        raise ConfigError(
            f"--tools {address!r}: its schemas must be a list of tools in OpenAI's form, each with a name"
        )
    return cast("ToolProvider", provider)


def _imported(address: str, module_name: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except ConfigError as error:
        raise ConfigError(f"--tools {address!r}: {error}") from error
    except Exception as error:  # importing a user's module may raise anything
        raise ConfigError(f"--tools {address!r} cannot be loaded: {type(error).__name__}: {error}") from error


def _are_schemas(schemas: Any) -> bool:
    if not isinstance(schemas, list | tuple) or not schemas:
        return False
    functions = [schema.get("function") if isinstance(schema, Mapping) else None for schema in schemas]
    return all(isinstance(function, Mapping) and isinstance(function.get("name"), str) for function in functions)


async def answer_call(tool_session: ToolSession, call: NumberedCall, timeout_s: float) -> Message:
    """Makes one call and returns its tool message; an error of the tool becomes its answer."""
    return {"role": "tool", "tool_call_id": call.call_id, "content": await _answer(tool_session, call, timeout_s)}


async def _answer(tool_session: ToolSession, call: NumberedCall, timeout_s: float) -> str:
    if call.problem is not None:
        return f"Error: {call.problem}"
    try:
        async with asyncio.timeout(timeout_s):
            return _cut(str(await tool_session.call(call.name, call.arguments)))
    except TimeoutError:
        return f"Error: {call.name} did not answer within {timeout_s:g} s"
    except Exception as error:  # noqa: BLE001 - a tool may raise anything: the model gets the message
        return _cut(f"Error: {str(error) or type(error).__name__}")


def _cut(text: str) -> str:
    text = text.encode("utf-8", "replace").decode("utf-8")  # half a surrogate pair cannot be sent
    if len(text) <= MAX_RESULT:
        return text
    return f"{text[:MAX_RESULT]}\n[{len(text) - MAX_RESULT} characters were removed]"
