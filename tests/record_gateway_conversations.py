"""Records real clients' requests and the gateway's answers: ``python -m tests.record_gateway_conversations [NAME …]``.

Without names it records all conversations. ``--answers`` keeps the recorded requests and records only the answers
again, after a deliberate change of them. ``ROLLOUT_BUFFER_TEST_NPM`` and ``ROLLOUT_BUFFER_TEST_AGENTS_PYTHON`` are
those of the tests; a client that is not installed ends the program. Secrets, paths and names of this machine are taken
out, and long texts are cut, alike in all requests. The recorded answers are those to the requests in this form.
"""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from slime_plugins.rollout_buffer.http_serving import serving
from slime_plugins.rollout_buffer.wire import encode_data_uri
from tests.command_line_agents import CLAUDE, CODEX
from tests.gateway_support import tokenizer
from tests.integration import test_gateway_agents as frameworks
from tests.integration import test_gateway_command_line_agents as command_line
from tests.recorded_conversations import FOLDER, Recorded, fixed_gateway, replayed
from tests.support import PNG

MAX_TEXT = 80
KEPT_HEADERS = ("x-stainless-retry-count", "anthropic-version", "anthropic-beta")
_IDENTIFIERS = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|\b[0-9a-f]{32,}\b")

THOUGHT = "<think>\nA cat 🐈?\n</think>\n\n"
Opened = dict[str, Any]
Play = Callable[[Opened, Path], Awaitable[None]]


def look(*places: int) -> str:
    return "".join(f'\n<tool_call>\n{{"name": "look", "arguments": {{"at": {at}}}}}\n</tool_call>' for at in places)


SCHEMA: Any = {"type": "object", "properties": {"at": {"type": "integer"}}}
FUNCTION: Any = {"name": "look", "description": "Looks.", "parameters": SCHEMA}
QUESTION: Any = {"role": "user", "content": "What is there?"}


# --- clients ---------------------------------------------------------------------------------------------------------


def command_line_agent(program: str) -> Play:
    return lambda opened, folder: command_line.mended(program, folder / "home", opened)


def framework(program: str) -> Play:
    return lambda opened, folder: frameworks.play(program, opened, folder)


async def play_chat(opened: Opened, folder: Path) -> None:
    import openai

    async with openai.AsyncOpenAI(base_url=opened["base_url"], api_key=opened["api_key"]) as client:
        shown: Any = {"type": "image_url", "image_url": {"url": encode_data_uri(PNG)}}
        messages: list[Any] = [{"role": "developer", "content": "Be brief."}, QUESTION]
        options: Any = {"model": "policy", "tools": [{"type": "function", "function": FUNCTION}]}
        options["extra_body"] = {"separate_reasoning": True}
        for more in ({"stream": True}, {"logprobs": True}, {"stop": ["!"]}):
            if "stream" in more:
                async with client.chat.completions.stream(messages=messages, **options) as stream:
                    said = (await stream.get_final_completion()).choices[0].message
            else:
                said = (await client.chat.completions.create(messages=messages, **options, **more)).choices[0].message
            messages.append(said.model_dump(exclude_none=True))
            results = [{"role": "tool", "tool_call_id": call.id, "content": [shown]} for call in said.tool_calls or ()]
            messages += results or [{"role": "user", "content": "Sure?"}]


async def play_responses(opened: Opened, folder: Path) -> None:
    import openai

    async with openai.AsyncOpenAI(base_url=opened["base_url"], api_key=opened["api_key"]) as client:
        options: Any = {"model": "policy", "tools": [{"type": "function", **FUNCTION}, {"type": "web_search"}]}
        options |= {"instructions": "Be brief.", "include": ["reasoning.encrypted_content"]}
        async with client.responses.stream(input="What is there?", **options) as stream:
            first = await stream.get_final_response()
        shown: Any = {"type": "input_image", "image_url": encode_data_uri(PNG), "detail": "auto"}
        outputs: Any = [
            {"type": "function_call_output", "call_id": item.call_id, "output": [shown]}
            for item in first.output
            if item.type == "function_call"
        ]
        second = await client.responses.create(input=outputs, previous_response_id=first.id, **options)
        items = [item.model_dump(exclude={"parsed_arguments"}, exclude_none=True) for item in first.output]
        said: Any = [QUESTION, *items, *outputs, {"role": "assistant", "content": second.output_text}]
        await client.responses.create(input=[*said, {"role": "user", "content": "Sure?"}], store=False, **options)


async def play_messages(opened: Opened, folder: Path) -> None:
    import anthropic

    source = {"type": "base64", "media_type": "image/png", "data": encode_data_uri(PNG).partition(",")[2]}
    shown = [{"type": "image", "source": source}, {"type": "text", "text": "a screenshot"}]
    async with anthropic.AsyncAnthropic(base_url=opened["anthropic_base_url"], api_key=opened["api_key"]) as client:
        options: Any = {"model": "policy", "system": [{"type": "text", "text": "Be brief."}]}
        options["tools"] = [{"name": "look", "description": "Looks.", "input_schema": SCHEMA}]
        messages: list[Any] = [QUESTION]
        await client.messages.count_tokens(messages=messages, **options)
        options |= {"max_tokens": 100, "thinking": {"type": "adaptive"}}
        for is_streamed in (True, False, True):
            if is_streamed:
                async with client.messages.stream(messages=messages, **options) as stream:
                    said = (await stream.get_final_message()).content
            else:
                said = (await client.messages.create(messages=messages, **options)).content
            results: Any = [
                {"type": "tool_result", "tool_use_id": block.id, "content": shown}
                for block in reversed(said)
                if block.type == "tool_use"
            ]
            text = {"type": "text", "text": "Sure?", "cache_control": {"type": "ephemeral"}}
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": [*results, text]}]


TWO_LOOKS = [f"{THOUGHT}I look.{look(1, 2)}", "It is a cat.", f"{THOUGHT}Sure! I am."]
MEND = "sed -i 's/a - b/a + b/' calc.py"


def mending(tool: str, argument: str) -> list[str]:
    calls = command_line.call(tool, **{argument: "cat calc.py"}) + command_line.call(tool, **{argument: "ls"})
    return [f"I look.{calls}", f"{THOUGHT}I mend it." + command_line.call(tool, **{argument: MEND}), "It adds now."]


def added(*texts: str) -> list[str]:
    return [f"{texts[0]}I add.{frameworks.CALLS}", *texts[1:]]


CLIENTS: dict[str, tuple[Play, list[str], str]] = {
    "claude_code": (command_line_agent(CLAUDE), mending("Bash", "command"), "loose_tool_call"),
    "codex": (command_line_agent(CODEX), mending("exec_command", "cmd"), "loose_tool_call"),
    "openai_chat": (play_chat, TWO_LOOKS, "strict"),
    "openai_responses": (play_responses, TWO_LOOKS, "strict"),
    "anthropic": (play_messages, TWO_LOOKS, "strict"),
    "agents_sdk": (framework(frameworks.AGENTS_SDK), added(THOUGHT, "5, 7.", "I am."), "loose_tool_call"),
    "langgraph": (
        framework(frameworks.OPENAI_MODEL + frameworks.LANGGRAPH),
        added("", "5, 7.", "I am."),
        "loose_tool_call",
    ),
    "smolagents": (framework(frameworks.SMOLAGENTS), added("", frameworks.END), "role_content_only"),
}


# --- recording -------------------------------------------------------------------------------------------------------


class Tap:
    """Passes requests on to the gateway and keeps them with its answers."""

    def __init__(self) -> None:
        self.target = ""
        self.requests: list[dict[str, Any]] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {
            key: value for key, value in request.headers.items() if key.lower() not in ("host", "content-length")
        }
        async with aiohttp.ClientSession(auto_decompress=False) as http:
            url = self.target + request.path_qs
            async with http.request(request.method, url, data=body, headers=headers) as answered:
                if request.method == "POST":
                    kept = {key: request.headers[key] for key in KEPT_HEADERS if key in request.headers}
                    self.requests.append({"path": request.path_qs, "headers": kept, "body": await request.json()})
                response = web.StreamResponse(status=answered.status)
                response.content_type = answered.content_type
                await response.prepare(request)
                async for chunk in answered.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
                return response


def cleaned(value: Any, replaced: dict[str, str]) -> Any:
    """Returns a JSON value without what names this machine, with long texts cut."""
    if isinstance(value, dict):
        return {key: cleaned(inner, replaced) for key, inner in value.items()}
    if isinstance(value, list):
        return [cleaned(inner, replaced) for inner in value]
    if not isinstance(value, str):
        return value
    for secret, shown in replaced.items():
        value = value.replace(secret, shown)
    if value.startswith("data:") or set(value).isdisjoint(" \n"):
        return _IDENTIFIERS.sub("0", value)
    value = _IDENTIFIERS.sub("0", value)
    return value if len(value) <= MAX_TEXT else f"{value[:MAX_TEXT]} …"


async def record(name: str) -> Recorded:
    """Lets a client play its conversation and returns it, with empty answers."""
    play, script, matching = CLIENTS[name]
    sampled = [tokenizer.encode(f"{text}<|im_end|>", add_special_tokens=False) for text in script]
    tap = Tap()
    app = web.Application(client_max_size=2**30)
    app.router.add_route("*", "/{path:.*}", tap.handle)
    with tempfile.TemporaryDirectory() as folder:
        async with (
            serving(app) as url,
            fixed_gateway(Path(folder), sampled, matching, public_url=url) as (gateway, opened, engine),
        ):
            tap.target = gateway.url
            await play(opened, Path(folder))
            assert len(engine.requests) == len(script), name
            rows = (await gateway.close(opened, reward=1.0)).body["branches"]
    requests: list[Any] = cleaned(
        tap.requests, {opened["api_key"]: "KEY", folder: "/home/agent", url: "http://gateway"}
    )
    return Recorded(
        client=name, matching=matching, rows=rows, sampled=sampled, requests=requests, answers=[""] * len(requests)
    )


async def main(words: list[str]) -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in [word for word in words if word in CLIENTS] or CLIENTS:
        path = FOLDER / f"{name}.json"
        recorded = Recorded.read(path) if "--answers" in words else await record(name)
        with tempfile.TemporaryDirectory() as folder:
            replay = await replayed(recorded, Path(folder))
        assert replay.rows == recorded.rows, f"{name}: {replay.rows} rows in place of {recorded.rows}"
        fields = {key: getattr(recorded, key) for key in ("client", "matching", "rows", "sampled", "requests")}
        Recorded(**fields, answers=replay.answers).write(path)
        sys.stdout.write(f"{name}: {len(replay.answers)} answers, {replay.rows} rows\n")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
