"""Reads OpenAI's Responses API as chat requests; encodes chat replies as its responses, events and errors. Pure.

Neighbouring items of the assistant (reasoning, text, function calls) become one message. The id of a response names its
turn, so that ``previous_response_id`` finds the recorded messages. ``store``, ``include``, ``reasoning``,
``parallel_tool_calls``, ``truncation`` and unknown fields have no effect.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slime_plugins.rollout_buffer.errors import RolloutBufferError
from slime_plugins.rollout_buffer.gateway.dialects.chat_completions import (
    CONTENT,
    TOOL_CALLS,
    ChatReply,
    Piece,
    named_event,
    pieces_of,
)
from slime_plugins.rollout_buffer.gateway.dialects.chat_completions import error_body as chat_error_body
from slime_plugins.rollout_buffer.recording.messages import expect_text, hashed_url, wrong_field
from slime_plugins.rollout_buffer.types import Image, Message

SAME_FIELDS = ("model", "stream", "temperature", "top_p", "top_logprobs")
REFUSED_FIELDS = {
    "background": "is not offered: a turn is answered while its request is open",
    "conversation": "is not held: send the items, or previous_response_id",
    "prompt": "is not held: send instructions and input",
}
TYPED_FIELDS = {"metadata": dict, "include": list, "tools": list, "text": dict}
CLIENT_TOOLS = ("custom", "computer", "local_shell", "shell", "apply_patch")
"""Types of tools that clients run but that have no JSON schema; they are refused. Tools of other types are left out."""
LOG_PROBS = "message.output_text.logprobs"
WITH_INSTRUCTIONS = "i"
"""End of the id of a response whose first message is its ``instructions``, which the next response does not inherit."""

_ITEM_ID = re.compile(r"(?:msg|rs|fc)_(.+)_[0-9]+")
_RESPONSE_ID = re.compile(rf"resp_(.{{1,200}})-([0-9a-f]{{1,24}})({WITH_INSTRUCTIONS}?)")

Parts = list[dict[str, Any]]
Images = dict[str, Image]


# --- requests --------------------------------------------------------------------------------------------------------


def read_response_id(body: Mapping[str, Any]) -> tuple[str, str] | None:
    """Returns session and name of the turn that ``previous_response_id`` names.

    Raises:
        InvalidPayloadError: ``previous_response_id`` is no id of a response.
    """
    given = body.get("previous_response_id")
    if given is None:
        return None
    match = _RESPONSE_ID.fullmatch(expect_text(given, "previous_response_id"))
    if match is None:
        raise wrong_field("previous_response_id", f"is no id of a response: {given[:100]!r}")
    return match[1], match[2]


def read_request(body: Mapping[str, Any], history: Sequence[Message]) -> tuple[dict[str, Any], Images]:
    """Returns a request as the body of a chat request, and its images by hash.

    ``history`` has the messages of the previous response.

    Raises:
        InvalidPayloadError: names the field and the problem.
    """
    for name, why in REFUSED_FIELDS.items():
        if body.get(name):
            raise wrong_field(name, why)
    for name, kind in TYPED_FIELDS.items():
        if body.get(name) is not None and not isinstance(body[name], kind):
            raise wrong_field(name, "must be an object" if kind is dict else "must be a list")
    messages = [dict(message) for message in history]
    if messages and str(body.get("previous_response_id")).endswith(WITH_INSTRUCTIONS):
        del messages[0]
    if body.get("instructions"):
        messages.insert(0, {"role": "system", "content": expect_text(body["instructions"], "instructions")})
    images: Images = {}
    messages += _messages(body.get("input"), images)
    chat = {name: body[name] for name in SAME_FIELDS if body.get(name) is not None}
    chat |= {"messages": messages, "separate_reasoning": True, "logprobs": LOG_PROBS in (body.get("include") or ())}
    if body.get("max_output_tokens") is not None:
        chat["max_tokens"] = body["max_output_tokens"]
    if body.get("tools"):
        chat["tools"] = _tools(body["tools"])
    choice = body.get("tool_choice")
    chat["tool_choice"] = choice if isinstance(choice, str) else "auto"  # a named tool has no effect here
    output = (body.get("text") or {}).get("format")
    if isinstance(output, dict):
        chat["response_format"] = {"type": output.get("type"), "json_schema": output}
    return chat, images


def _messages(given: Any, images: Images) -> list[dict[str, Any]]:
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise wrong_field("input", "must be a string, or a list with at least one item")
    messages: list[dict[str, Any]] = []
    reply = None
    for index, item in enumerate(given):
        where = f"input[{index}]"
        if not isinstance(item, dict):
            raise wrong_field(where, "must be an object")
        previous_reply, reply = reply, _reply_of(item)
        kind = item.get("type") or "message"
        if kind == "function_call_output":
            messages.append(_output(item, where, images))
        elif kind == "message" and item.get("role") != "assistant":
            content = _parts(item.get("content"), f"{where}.content", images)
            messages.append({"role": item.get("role"), "content": content})
            if item.get("role") not in ("user", "system", "developer"):
                raise wrong_field(f"{where}.role", "must be user, assistant, system or developer")
        elif kind in ("message", "reasoning", "function_call"):
            is_same_reply = reply is not None and reply == previous_reply
            _add_to_assistant(messages, item, kind, where, is_same_reply=is_same_reply)
        else:
            raise wrong_field(where, f"is of type {str(kind)[:50]}, which is not supported")
    return messages


def _reply_of(item: Mapping[str, Any]) -> str | None:
    """Returns the name of the reply of which an item is a part, if its id says so."""
    match = _ITEM_ID.fullmatch(item["id"]) if isinstance(item.get("id"), str) else None
    return None if match is None else match[1]


def _add_to_assistant(
    messages: list[dict[str, Any]], item: Mapping[str, Any], kind: str, where: str, *, is_same_reply: bool
) -> None:
    """Adds an item to the assistant's message at the end of ``messages``, or to a new one if it cannot follow there.

    ``is_same_reply``: by its id, the item is a part of the same reply as the item before.
    """
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    # A text after calls belongs to the same turn, because the calls still wait for their outputs.
    if last is None or (kind != "function_call" and last["content"] and not last["tool_calls"] and not is_same_reply):
        last = {"role": "assistant", "content": [], "tool_calls": []}
        messages.append(last)
    if kind == "message":
        last["content"] += _parts(item.get("content"), f"{where}.content", {})
    elif kind == "function_call":
        function = {name: expect_text(item.get(name), f"{where}.{name}") for name in ("name", "arguments")}
        call_id = expect_text(item.get("call_id"), f"{where}.call_id")
        last["tool_calls"].append({"id": call_id, "type": "function", "function": function})
    elif thoughts := _thoughts(item, where):
        last["reasoning_content"] = "\n".join(filter(None, [last.get("reasoning_content"), thoughts]))


def _thoughts(item: Mapping[str, Any], where: str) -> str:
    parts = item.get("content") or item.get("summary") or []
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise wrong_field(f"{where}.content", "must be a list of parts")
    return "\n".join(expect_text(part.get("text"), f"{where}.content[{i}].text") for i, part in enumerate(parts))


def _output(item: Mapping[str, Any], where: str, images: Images) -> dict[str, Any]:
    call_id = expect_text(item.get("call_id"), f"{where}.call_id")
    return {"role": "tool", "tool_call_id": call_id, "content": _parts(item.get("output"), f"{where}.output", images)}


def _parts(content: Any, where: str, images: Images) -> Parts:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise wrong_field(where, "must be a string or a list of parts")
    return [_part(part, f"{where}[{index}]", images) for index, part in enumerate(content)]


def _part(part: Any, where: str, images: Images) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("input_text", "output_text", "text"):
        return {"type": "text", "text": expect_text(part.get("text"), f"{where}.text")}
    if kind == "refusal":
        return {"type": "text", "text": expect_text(part.get("refusal"), f"{where}.refusal")}
    if kind == "input_image" and part.get("image_url") is not None:
        return {"type": "image_url", "image_url": {"url": hashed_url(part["image_url"], images, where)}}
    raise wrong_field(where, "must be of type input_text, output_text, or input_image with an image_url")


def _tools(given: Sequence[Any]) -> list[dict[str, Any]]:
    functions = []
    for index, tool in enumerate(given):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if not isinstance(kind, str) or kind.startswith(CLIENT_TOOLS):
            raise wrong_field(f"tools[{index}]", "must be a function: the model knows no tool by its type")
        if kind == "function":
            expect_text(tool.get("name"), f"tools[{index}].name")
            if not isinstance(tool.get("parameters") or {}, dict):
                raise wrong_field(f"tools[{index}].parameters", "must be a JSON schema")
            function = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}
            functions.append({"type": "function", "function": function})
    return functions


# --- replies ---------------------------------------------------------------------------------------------------------


def response(reply: ChatReply, body: Mapping[str, Any]) -> dict[str, Any]:
    """Encodes a reply that is not streamed: the response that its events end with; ``body`` is the request."""
    events = ResponseEvents(body)
    for encoded in (events.begin(reply), *map(events.add, pieces_of(reply.message)), events.end(reply)):
        list(encoded)
    return events.response


def _frame(reply: ChatReply, body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a response that is in progress."""
    version = {} if reply.weight_version is None else {"weight_version": reply.weight_version}
    return {
        "id": f"resp_{reply.name}{WITH_INSTRUCTIONS if body.get('instructions') else ''}",
        "object": "response",
        "created_at": reply.created,
        "model": reply.model,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
        "instructions": body.get("instructions"),
        "previous_response_id": body.get("previous_response_id"),
        "metadata": {**(body.get("metadata") or {}), **version},
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "temperature": body.get("temperature"),
        "top_p": body.get("top_p"),
        "max_output_tokens": body.get("max_output_tokens"),
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "text": body.get("text") or {"format": {"type": "text"}},
        "store": body.get("store") is not False,
    }


class ResponseEvents:
    """The events of a streamed reply. ``begin``, ``add``, ``end`` and ``fail`` yield them; ``body`` is the request."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = body
        self._number = 0
        self._items: list[dict[str, Any]] = []
        self._open = ""
        """The key of the last item's pieces while more of them may come; empty otherwise."""
        self.response: dict[str, Any] = {}
        """The response so far."""

    def begin(self, reply: ChatReply) -> Iterator[bytes]:
        self._name = reply.name
        self.response = _frame(reply, self._body)
        yield self._event("response.created", response=self.response)
        yield self._event("response.in_progress", response=self.response)

    def add(self, piece: Piece) -> Iterator[bytes]:
        is_continuation = piece.key == self._open and not piece.call_id
        if not is_continuation:
            yield from self._close()
            self._open = piece.key
            yield from self._begin_call(piece) if piece.key == TOOL_CALLS else self._begin_text()
        text = piece.joint + piece.text if is_continuation else piece.text
        if piece.key == TOOL_CALLS:
            self._items[-1]["arguments"] += text
            yield self._of_item("response.function_call_arguments.delta", delta=text)
        else:
            yield self._add_text(text)

    def end(self, reply: ChatReply) -> Iterator[bytes]:
        if all(item["type"] == "reasoning" for item in self._items):  # without text and calls: an empty message
            yield from self._close()
            self._open = CONTENT
            yield from self._begin_text()
        texts = [item["content"][0] for item in self._items if item["type"] == "message"]
        if texts and reply.log_probs is not None:
            texts[-1]["logprobs"] = list(reply.log_probs)
        is_cut = reply.finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        yield from self._close(status)
        usage = reply.usage
        self.response = {
            **_frame(reply, self._body),
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._items,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }
        yield self._event(f"response.{status}", response=self.response)

    def fail(self, error: RolloutBufferError) -> Iterator[bytes]:
        body = chat_error_body(error)
        yield self._event("error", **{key: body["error"][key] for key in ("code", "message", "param")}, **body)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number = self._number
        self._number += 1
        return named_event(kind, {"type": kind, **fields, "sequence_number": number})

    def _of_item(self, kind: str, **fields: Any) -> bytes:
        """Returns an event of the last item."""
        return self._event(kind, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **fields)

    def _of_text(self, kind: str, **fields: Any) -> bytes:
        return self._of_item(kind, content_index=0, **fields)

    def _begin(self, prefix: str, item: Mapping[str, Any]) -> bytes:
        index = len(self._items)
        self._items.append({"id": f"{prefix}_{self._name}_{index}", **item, "status": "in_progress"})
        return self._event("response.output_item.added", output_index=index, item=self._items[-1])

    def _begin_call(self, piece: Piece) -> Iterator[bytes]:
        item = {"type": "function_call", "call_id": piece.call_id, "name": piece.name, "arguments": ""}
        yield self._begin("fc", item)

    def _begin_text(self) -> Iterator[bytes]:
        if self._open == CONTENT:
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            yield self._begin("msg", {"type": "message", "role": "assistant", "content": []})
        else:
            part = {"type": "reasoning_text", "text": ""}
            yield self._begin("rs", {"type": "reasoning", "summary": [], "content": []})
        self._items[-1]["content"].append(part)
        yield self._of_text("response.content_part.added", part=part)

    def _add_text(self, text: str) -> bytes:
        (part,) = self._items[-1]["content"]
        part["text"] += text
        no_log_probs: dict[str, Any] = {"logprobs": []} if "logprobs" in part else {}
        return self._of_text(f"response.{part['type']}.delta", delta=text, **no_log_probs)

    def _close(self, status: str = "completed") -> Iterator[bytes]:
        if not self._open:
            return
        self._open, item = "", self._items[-1]
        if item["type"] == "function_call":
            yield self._of_item("response.function_call_arguments.done", arguments=item["arguments"])
        else:
            (part,) = item["content"]
            log_probs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            yield self._of_text(f"response.{part['type']}.done", text=part["text"], **log_probs)
            yield self._of_text("response.content_part.done", part=part)
        item["status"] = status
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)
