"""Reads Anthropic's Messages API as chat requests; encodes chat replies as its messages, events and errors. Pure.

A request becomes the body of a chat request, which ``chat_requests`` and ``recording.messages`` validate further. A
tool result becomes a message of its own, between the messages with the texts before and after it. ``cache_control``,
``metadata``, ``thinking`` and unknown fields have no effect.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from slime_plugins.rollout_buffer.errors import InvalidPayloadError, RolloutBufferError
from slime_plugins.rollout_buffer.gateway.dialects.chat_completions import (
    CONTENT,
    REASONING,
    TOOL_CALLS,
    ChatReply,
    Piece,
    named_event,
    status_of,
)
from slime_plugins.rollout_buffer.recording.messages import begun_arguments, expect_text, hashed_url, wrong_field
from slime_plugins.rollout_buffer.types import Image

SAME_FIELDS = ("model", "stream", "max_tokens", "temperature", "top_p", "top_k")
TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
REFUSED_FIELDS = {
    "thread": "is not held: send the whole conversation without it",
    "compaction": "is not offered: ask for a summary in a message",
    "mcp_servers": "is not supported: the client must call the servers",
}
UNSUPPORTED_THREAD = "thread_unsupported_request"
"""Code of the error after which Anthropic's clients send the whole conversation."""
HOSTED_TOOLS = ("web_search", "web_fetch", "code_execution", "tool_search", "mcp_toolset")
"""Types of tools that Anthropic's servers run; they are not offered to the model."""
BILLING_LINE = "x-anthropic-billing-header:"
"""Start of a system block that is for Anthropic's servers; it changes between requests of one conversation."""
STOP_REASONS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}
DELTAS = {
    CONTENT: ("text_delta", "text"),
    REASONING: ("thinking_delta", "thinking"),
    TOOL_CALLS: ("input_json_delta", "partial_json"),
}
"""By the key of a piece: the type of its deltas, and the field that holds its text."""
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}

Blocks = list[dict[str, Any]]
Images = dict[str, Image]


# --- requests --------------------------------------------------------------------------------------------------------


def read_request(body: Mapping[str, Any]) -> tuple[dict[str, Any], Images]:
    """Returns a request as the body of a chat request, and its images by hash.

    Raises:
        InvalidPayloadError: names the field and the problem.
    """
    for name, why in REFUSED_FIELDS.items():
        if body.get(name):
            code = {"error_code": UNSUPPORTED_THREAD} if name == "thread" else {}
            raise InvalidPayloadError(f"{name} {why}", {"param": name, **code})
    images: Images = {}
    messages = [{"role": "system", "content": text} for text in _system(body.get("system"))]
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise wrong_field("messages", "must be a list with at least one message")
    for index, message in enumerate(given):
        messages += _messages_of(message, f"messages[{index}]", images)
    if messages[-1]["role"] == "assistant":
        raise wrong_field(f"messages[{len(given) - 1}]", "has the role assistant: the start of a reply cannot be set")
    chat = {name: body[name] for name in SAME_FIELDS if body.get(name) is not None}
    chat |= {"messages": messages, "separate_reasoning": True}
    if body.get("stop_sequences"):
        chat["stop"] = body["stop_sequences"]
    if body.get("tools"):
        chat["tools"] = _tools(body["tools"])
    if body.get("tool_choice") is not None:
        chat["tool_choice"] = _tool_choice(body["tool_choice"])
    output = body.get("output_config")
    if isinstance(output, dict) and output.get("format"):
        chat["response_format"] = {"type": "json_schema", "json_schema": output["format"]}
    return chat, images


def _system(given: Any) -> list[str]:
    """Returns the system prompt as the only entry of a list, which is empty without a system prompt."""
    if given is None or isinstance(given, str):
        return [given] if given else []
    texts = [_text_of(block, f"system[{index}]") for index, block in enumerate(_blocks(given, "system"))]
    texts = [text for text in texts if not text.startswith(BILLING_LINE)]
    return ["\n".join(texts)] if texts else []


def _messages_of(message: Any, where: str, images: Images) -> list[dict[str, Any]]:
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("user", "assistant", "system"):
        raise wrong_field(f"{where}.role", "must be user, assistant or system")
    blocks = _blocks(message.get("content"), f"{where}.content")
    if role == "assistant":
        return [_assistant(blocks, f"{where}.content")]
    messages: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        location = f"{where}.content[{index}]"
        if block["type"] == "tool_result" and role == "user":
            messages.append(_tool_result(block, location, images))
            continue
        if not messages or messages[-1]["role"] == "tool":
            messages.append({"role": role, "content": []})
        messages[-1]["content"].append(_part(block, location, images))
    return messages or [{"role": role, "content": ""}]


def _assistant(blocks: Blocks, where: str) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for index, block in enumerate(blocks):
        location, kind = f"{where}[{index}]", block["type"]
        if kind == "thinking":
            thoughts.append(expect_text(block.get("thinking"), f"{location}.thinking"))
        elif kind == "tool_use":
            if not isinstance(block.get("input"), dict):
                raise wrong_field(f"{location}.input", "must be an object")
            function = {"name": expect_text(block.get("name"), f"{location}.name"), "arguments": block["input"]}
            calls.append(
                {"id": expect_text(block.get("id"), f"{location}.id"), "type": "function", "function": function}
            )
        elif kind != "redacted_thinking":
            texts.append({"type": "text", "text": _text_of(block, location)})
    message: dict[str, Any] = {"role": "assistant", "content": texts, "tool_calls": calls}
    return {**message, "reasoning_content": "\n".join(thoughts)} if thoughts else message


def _tool_result(block: Mapping[str, Any], where: str, images: Images) -> dict[str, Any]:
    content = block.get("content") or ""
    inner_blocks = _blocks(content, f"{where}.content")
    parts = [_part(inner, f"{where}.content[{index}]", images) for index, inner in enumerate(inner_blocks)]
    call_id = expect_text(block.get("tool_use_id"), f"{where}.tool_use_id")
    return {"role": "tool", "tool_call_id": call_id, "content": parts}


def _part(block: Mapping[str, Any], where: str, images: Images) -> dict[str, Any]:
    if block["type"] != "image":
        return {"type": "text", "text": _text_of(block, where)}
    source = block.get("source")
    if not isinstance(source, dict) or source.get("type") not in ("base64", "url"):
        raise wrong_field(f"{where}.source", "must be of type base64, or url with a data URI or sha256:HASH")
    if source["type"] == "base64":
        data = expect_text(source.get("data"), f"{where}.source.data")
        url = hashed_url(f"data:{source.get('media_type')};base64,{data}", images, f"{where}.source")
    else:
        url = hashed_url(source.get("url"), images, f"{where}.source")
    return {"type": "image_url", "image_url": {"url": url}}


def _blocks(content: Any, where: str) -> Blocks:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise wrong_field(where, "must be a string or a list of blocks")
    for index, block in enumerate(content):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise wrong_field(f"{where}[{index}]", "must be a block with a type")
    return content


def _text_of(block: Mapping[str, Any], where: str) -> str:
    if block["type"] != "text":
        raise wrong_field(where, f"is of type {block['type'][:50]}, which is not supported")
    return expect_text(block.get("text"), f"{where}.text")


def _tools(given: Any) -> list[dict[str, Any]]:
    if not isinstance(given, list):
        raise wrong_field("tools", "must be a list")
    return [
        _tool(tool, f"tools[{index}]")
        for index, tool in enumerate(given)
        if not (isinstance(tool, dict) and str(tool.get("type")).startswith(HOSTED_TOOLS))
    ]


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or not isinstance(tool.get("input_schema"), dict):
        raise wrong_field(where, "must have an input_schema: the model knows no tool by its type")
    function = {"name": expect_text(tool.get("name"), f"{where}.name"), "parameters": tool["input_schema"]}
    if tool.get("description") is not None:
        function["description"] = expect_text(tool["description"], f"{where}.description")
    return {"type": "function", "function": function}


def _tool_choice(given: Any) -> str | dict[str, Any]:
    kind = given.get("type") if isinstance(given, dict) else None
    if kind == "tool":
        return {"type": "function", "function": {"name": expect_text(given.get("name"), "tool_choice.name")}}
    if not isinstance(kind, str) or kind not in TOOL_CHOICES:
        raise wrong_field("tool_choice", "must be of type auto, any, tool or none")
    return TOOL_CHOICES[kind]


# --- replies ---------------------------------------------------------------------------------------------------------


def message(reply: ChatReply) -> dict[str, Any]:
    """Encodes a reply that is not streamed."""
    cached = reply.usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "id": f"msg_{reply.name}",
        "type": "message",
        "role": "assistant",
        "model": reply.model,
        "content": _content(reply.message, reply.name),
        "stop_reason": "stop_sequence" if _ends_at_stop(reply) else STOP_REASONS.get(reply.finish_reason, "end_turn"),
        "stop_sequence": reply.stop if _ends_at_stop(reply) else None,
        "usage": {
            "input_tokens": reply.usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": reply.usage["completion_tokens"],
        },
        "metadata": {"weight_version": reply.weight_version},
    }


def _ends_at_stop(reply: ChatReply) -> bool:
    return reply.finish_reason == "stop" and reply.stop is not None


def _content(message: Mapping[str, Any], signature: str) -> Blocks:
    blocks: Blocks = []
    if message.get(REASONING):
        # Clients leave out thoughts without a signature.
        blocks.append({"type": "thinking", "thinking": message[REASONING], "signature": signature})
    if message.get(CONTENT):
        blocks.append({"type": "text", "text": message[CONTENT]})
    for call in message.get(TOOL_CALLS) or []:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        given = begun_arguments(arguments) if isinstance(arguments, str) else arguments
        blocks.append({"type": "tool_use", "id": call["id"], "name": name, "input": given})
    return blocks


class MessageEvents:
    """The events of a streamed reply. ``begin``, ``add``, ``end`` and ``fail`` yield them."""

    def __init__(self) -> None:
        self._index = 0
        """Index of the open block, or of the next one if none is open."""
        self._open = ""
        """The key of the pieces whose block is open; empty if none is."""

    def begin(self, reply: ChatReply) -> Iterator[bytes]:
        self._signature = reply.name
        yield _event("message_start", message={**message(reply), "stop_reason": None})

    def add(self, piece: Piece) -> Iterator[bytes]:
        is_continuation = piece.key == self._open and not piece.call_id
        if not is_continuation:
            yield from self._close()
            self._open = piece.key
            yield _event("content_block_start", index=self._index, content_block=_empty_block(piece))
        kind, field = DELTAS[piece.key]
        yield self._delta(kind, **{field: piece.joint + piece.text if is_continuation else piece.text})

    def end(self, reply: ChatReply) -> Iterator[bytes]:
        yield from self._close()
        whole = message(reply)
        ending = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
        yield _event("message_delta", delta=ending, usage=whole["usage"])
        yield _event("message_stop")

    def fail(self, error: RolloutBufferError) -> Iterator[bytes]:
        yield named_event("error", error_body(error))

    def _delta(self, kind: str, **fields: Any) -> bytes:
        return _event("content_block_delta", index=self._index, delta={"type": kind, **fields})

    def _close(self) -> Iterator[bytes]:
        if self._open == REASONING:
            yield self._delta("signature_delta", signature=self._signature)
        if self._open:
            yield _event("content_block_stop", index=self._index)
            self._open = ""
            self._index += 1


def _empty_block(piece: Piece) -> dict[str, Any]:
    """Returns the empty block that begins with a piece."""
    if piece.key == TOOL_CALLS:
        return {"type": "tool_use", "id": piece.call_id, "name": piece.name, "input": {}}
    if piece.key == REASONING:
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _event(kind: str, **fields: Any) -> bytes:
    return named_event(kind, {"type": kind, **fields})


def error_body(error: RolloutBufferError) -> dict[str, Any]:
    """Encodes an error."""
    status = status_of(error)
    kind = ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    code = error.detail.get("error_code")
    details = {} if code is None else {"details": {"error_code": code}}
    return {"type": "error", "error": {"type": kind, "message": error.message, **details}}
