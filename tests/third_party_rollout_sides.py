"""A trainer and a rollout server as a third party would write them from the guide alone.

They share no code with the project: the length of a mask follows from the guide's formula (``last_prompt_length``), and
the trainer renders every conversation again. Both keep the requests and replies that they get, for the tests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

Message = dict[str, Any]


def rendered(tokenizer: Any, messages: Sequence[Message], tools: Any = None) -> list[int]:
    """The prompt of a conversation, as the guide has it."""
    text = tokenizer.apply_chat_template(list(messages), tools=tools, add_generation_prompt=True, tokenize=False)
    return list(tokenizer.encode(text, add_special_tokens=False))


@dataclass
class Said:
    """A reply of the trainer's policy: a text, and the calls that the trainer parsed out of it, if any."""

    text: str
    tool_calls: list[dict[str, Any]] | None = None
    with_end: bool = True
    changes: dict[str, Any] = field(default_factory=dict)
    status: int = 200
    finish_reason: str = "stop"


@dataclass
class ThirdPartySession:
    response_ids: list[int] = field(default_factory=list)
    response_mask: list[int] = field(default_factory=list)
    last_prompt_length: int = 0


class ThirdPartyTrainer:
    """A trainer from the guide: renders the conversation, samples from a script, checks masks by length alone."""

    def __init__(self, tokenizer: Any, script: Sequence[Said], *, tools: Any = None) -> None:
        self.tokenizer = tokenizer
        self.script = list(script)
        self.tools = tools
        self.calls: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.mismatches: list[tuple[int, int | None, int]] = []
        self.sessions: dict[str, ThirdPartySession] = {}

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/v1/chat/completions", self.completions)
        return app

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.calls.append(body)
        self.headers.append(dict(request.headers))
        said = self.script.pop(0)
        if said.status != 200:
            return web.json_response({"detail": f"scripted {said.status}"}, status=said.status)
        session = self.sessions.setdefault(body["rollout_id"], ThirdPartySession())
        prompt = rendered(self.tokenizer, body["messages"], self.tools)
        mask = body["response_mask"]
        expected = len(prompt) - session.last_prompt_length if session.last_prompt_length else 0
        if (len(mask) if mask else 0) != expected:
            self.mismatches.append((len(self.calls), None if mask is None else len(mask), expected))
        end = "<|im_end|>" if said.with_end else ""
        sampled = self.tokenizer.encode(said.text + end, add_special_tokens=False)
        session.response_ids += [*prompt[len(prompt) - expected :], *sampled] if expected else sampled
        session.response_mask += [*(mask or []), *([1] * len(sampled))]
        session.last_prompt_length = len(prompt) + len(sampled)
        message: Message = {"role": "assistant", "content": said.text}
        if said.tool_calls is not None:
            message["tool_calls"] = said.tool_calls
        reply = {
            "id": "x",
            "object": "chat.completion",
            "choices": [{"index": 0, "message": message, "finish_reason": said.finish_reason}],
            "token_ids": sampled,
            "logprobs": [-0.5] * len(sampled),
            "prompt_token_ids": prompt,
        }
        return web.json_response({key: value for key, value in {**reply, **said.changes}.items() if value is not None})


class ThirdPartyRolloutServer:
    """A rollout server from the guide: appends each message that it gets, and carries out calls of ``multiply``.

    ``spoil`` may change a body before it is sent: (turn, body) → body.
    """

    def __init__(self, tokenizer: Any, server_url: str, *, api_key: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.server_url = server_url
        self.headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.messages: list[Message] = []
        self.masks: list[list[int] | None] = []
        self.last_prompt_length = 0
        self.spoil: Callable[[int, dict[str, Any]], dict[str, Any]] = lambda turn, body: body
        self.status = 200
        self.reply: dict[str, Any] = {}

    async def call_llm(self, rollout_id: str, sampling_params: dict[str, Any]) -> dict[str, Any]:
        current = len(rendered(self.tokenizer, self.messages))
        mask = None
        if self.last_prompt_length > 0:
            entered = current - self.last_prompt_length
            mask = [0] * entered if entered > 0 else None
        body = {
            "rollout_id": rollout_id,
            "messages": self.messages,
            "response_mask": mask,
            **sampling_params,
        }
        body = self.spoil(len(self.masks) + 1, body)
        self.masks.append(body.get("response_mask"))
        url = f"{self.server_url}/v1/chat/completions"
        async with aiohttp.ClientSession() as http, http.post(url, json=body, headers=self.headers) as response:
            self.status, self.reply = response.status, await response.json()
        if self.status == 200:
            assert len(self.reply["prompt_token_ids"]) == current
            self.last_prompt_length = current + len(self.reply["token_ids"])
        return self.reply

    async def rollout(
        self, rollout_id: str, messages: Sequence[Message], *, max_turns: int = 10, **sampling: Any
    ) -> list[Message]:
        """The guide's loop; ends at the first refused turn."""
        self.messages = [dict(message) for message in messages]
        for _ in range(max_turns):
            reply = await self.call_llm(rollout_id, {"temperature": 1.0, "max_tokens": 64, **sampling})
            if self.status != 200:
                break
            message = reply["choices"][0]["message"]
            self.messages.append(message)
            results = self.results(message)
            if not results:
                break
            self.messages.extend(results)
        return self.messages

    def results(self, message: Message) -> list[Message]:
        calls = [json.loads(text) for text in re.findall(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", message["content"])]
        factors = [call["arguments"] for call in calls]
        return [{"role": "tool", "content": str(pair["a"] * pair["b"]), "tool_call_id": "c"} for pair in factors]
