"""``rollout-buffer mask-tests``: runs users' tests of masks against both sides of the protocol and an engine.

A test file needs no imports; four names are defined in it: ``rollout_server``, whose ``rollout(request)`` plays an
episode; ``trainer``, whose ``get_session(rollout_id)`` has ``response_ids`` and ``response_mask``;
``count_tool_output_tokens``; and ``rollout_id``, the default id of a request.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import tempfile
import traceback
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from slime_plugins.rollout_buffer.chat_tokens import ChatTokens
from slime_plugins.rollout_buffer.engine.factory import make_engine
from slime_plugins.rollout_buffer.errors import ConfigError, UnavailableError
from slime_plugins.rollout_buffer.extensions import Group, installed, missing
from slime_plugins.rollout_buffer.http_serving import serving
from slime_plugins.rollout_buffer.remote_rollout.agent import AgentSide
from slime_plugins.rollout_buffer.remote_rollout.calculator import CALCULATOR_SCHEMAS
from slime_plugins.rollout_buffer.remote_rollout.routes import create_app
from slime_plugins.rollout_buffer.remote_rollout.settings import AgentSettings, TokenizerSettings
from slime_plugins.rollout_buffer.remote_rollout.tokenizer_catalog import DEMO_NAME, TokenizerCatalog
from slime_plugins.rollout_buffer.remote_rollout.trainer_side.trainer import TrainerSide, one_engine
from slime_plugins.rollout_buffer.supervisor.child_processes import ChildProcess, free_port
from slime_plugins.rollout_buffer.supervisor.child_startup import wait_until_healthy
from slime_plugins.rollout_buffer.types import Message

ROLLOUT_ID: Final = "test-3"
TEST_TIMEOUT_S: Final = 300.0
ENGINE_START_TIMEOUT_S: Final = 60.0
ENGINE_STOP_TIMEOUT_S: Final = 10.0
DEFAULT_MESSAGES: Final = [{"role": "user", "content": "Calculate 15 * 23"}]

OnResult = Callable[[str, bool], None]


class RolloutResponse(dict[str, Any]):
    """A final response whose fields are also attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error


class TestedServer:
    """A rollout server and its trainer in this process, with the calculator as its tool."""

    def __init__(self, agent: AgentSide, trainer: TrainerSide, tokens: ChatTokens, server_url: str) -> None:
        self.trainer = trainer
        self._agent = agent
        self._tokens = tokens
        self._server_url = server_url

    async def rollout(self, request: Any) -> RolloutResponse:
        """Plays a request for this trainer, with defaults for missing fields; returns its final response.

        Raises:
            RuntimeError: the rollout failed, with the message of its final response.
        """
        given = request if isinstance(request, Mapping) else {}
        filled = {
            "rollout_id": ROLLOUT_ID,
            "messages": DEFAULT_MESSAGES,
            "tools": list(CALCULATOR_SCHEMAS),
            "sampling_params": {"temperature": 0.7, "max_tokens": 512},
            **{str(key): value for key, value in given.items()},
            "server_url": self._server_url,
        }
        response = RolloutResponse(await self._agent.rollout(filled))
        if response["error_message"]:
            raise RuntimeError(response["error_message"])
        return response

    def count_tool_output_tokens(self, messages: Sequence[Message]) -> int:
        """Returns the number of tokens between turns: tool outputs, and what the chat template adds to them.

        Only the messages and the chat template are used, not the recorded session.
        """
        replies = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        return sum(
            len(self._tokens.bridge_over(messages[reply + 1 : next_reply], turn_is_closed=True))
            for reply, next_reply in pairwise(replies)
        )

    def names(self) -> dict[str, Any]:
        """Returns the names that are defined in a test file."""
        return {
            "rollout_server": self,
            "trainer": self.trainer,
            "count_tool_output_tokens": self.count_tool_output_tokens,
            "rollout_id": ROLLOUT_ID,
        }


def run_mask_tests(file: Path, engine_url: str | None, tokenizer: Path | None, on_result: OnResult) -> int:
    """Runs the tests in a file, reports each result to ``on_result``, and returns the number of failures.

    Args:
        file: a Python file with functions ``test_…``, async or plain.
        engine_url: the SGLang server to sample with; None: the scripted engine is started, which calls the calculator.
        tokenizer: the folder of the engine's tokenizer; None: that of the scripted engine.
        on_result: called with a sentence for each test, and whether it passed.

    Raises:
        ConfigError: the file is not valid Python or holds no test, or the scripted engine cannot run here.
        UnavailableError: the scripted engine did not start.
    """
    return asyncio.run(_run(_compiled(file), engine_url, tokenizer, on_result))


def _compiled(file: Path) -> Any:
    """Compiles the file; if that fails, without its lines ``...``, which mark parts omitted from an example.

    Raises:
        ConfigError: it cannot be read, or is not valid Python.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    without_ellipses = "\n".join("" if line.strip() == "..." else line for line in text.splitlines())
    try:
        return _compile(text, file)
    except SyntaxError:
        try:
            return _compile(without_ellipses, file)
        except SyntaxError as error:
            raise ConfigError(f"{file} line {error.lineno} is not valid Python: {error.msg}") from error


def _compile(text: str, file: Path) -> Any:
    return compile(text, str(file), "exec", dont_inherit=True)


async def _run(code: Any, engine_url: str | None, tokenizer: Path | None, on_result: OnResult) -> int:
    """Runs every test and reports its result; returns the number of failures."""
    async with _engine(engine_url) as url, _served(url, tokenizer) as server:
        module: dict[str, Any] = {"__name__": "mask_tests", **server.names()}
        exec(code, module)
        tests = {name: test for name, test in module.items() if name.startswith("test_") and callable(test)}
        if not tests:
            raise ConfigError("the file has no function whose name begins with test_")
        return sum([not await _passes(name, test, on_result) for name, test in tests.items()])


async def _passes(name: str, test: Callable[[], Any], on_result: OnResult) -> bool:
    try:
        async with asyncio.timeout(TEST_TIMEOUT_S):
            result = test() if inspect.iscoroutinefunction(test) else await asyncio.to_thread(test)
            if inspect.isawaitable(result):
                await result
    except Exception as error:  # noqa: BLE001 - a user's test fails by any error
        trace = "".join(traceback.format_exception(error, limit=-2)).rstrip()
        on_result(f"FAILED {name}\n{trace}", False)
        return False
    on_result(f"passed {name}", True)
    return True


@asynccontextmanager
async def _served(engine_url: str, folder: Path | None) -> AsyncIterator[TestedServer]:
    """Serves the rollout server and its trainer on this event loop."""
    name = DEMO_NAME if folder is None else "given"
    catalog = TokenizerCatalog(TokenizerSettings(default_name=name, folders={} if folder is None else {name: folder}))
    engine = make_engine(engine_url)
    agent = AgentSide(AgentSettings(), tokenizers=catalog)
    trainer = TrainerSide(one_engine(engine, catalog))
    try:
        async with serving(create_app(agent=agent, trainer=trainer)) as url:
            yield TestedServer(agent, trainer, await catalog.get(name), url)
    finally:
        await engine.close()


@asynccontextmanager
async def _engine(url: str | None) -> AsyncIterator[str]:
    """Yields the engine at ``url``, or else a process with the lab's scripted engine."""
    if url is not None:
        yield url
        return
    if "engine" not in installed(Group.COMMANDS):
        raise ConfigError(f"name an engine with --engine-url: {missing(Group.COMMANDS, 'engine')}")
    port = free_port()
    command = [sys.executable, "-m", "slime_plugins.rollout_buffer", "engine", "--port", str(port), "--skill", "1.0"]
    with tempfile.TemporaryDirectory() as folder:
        child = ChildProcess("engine", command, log_file=Path(folder, "engine.log"))
        try:
            started_url = f"http://127.0.0.1:{port}"
            await asyncio.to_thread(
                wait_until_healthy,
                child,
                f"{started_url}/health",
                timeout_s=ENGINE_START_TIMEOUT_S,
                error=UnavailableError,
            )
            yield started_url
        finally:
            child.stop(ENGINE_STOP_TIMEOUT_S)
