"""Validates the messages of a chat request and normalises them, so that equal messages compare equal. Pure.

Input is OpenAI's format with its variants: text as a string or as parts, ``null`` content, tool call arguments as a
JSON string. The one output format is used for chat templates, trajectories and digests.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from pydantic_core import from_json

from slime.utils.mask_template import with_reasoning_content
from slime_plugins.rollout_buffer.errors import InvalidPayloadError
from slime_plugins.rollout_buffer.types import MAX_EXACT_INTEGER, Image, Message
from slime_plugins.rollout_buffer.wire import IMAGE_URL_PREFIX, decode_data_uri, is_sha256
from slime_plugins.rollout_buffer.wire.request_fields import MAX_NESTING, is_deeper_than

ROLES = frozenset({"system", "user", "assistant", "tool"})
SAME_ROLES = {"developer": "system", "function": "tool"}
MAX_MESSAGES = 20_000
DIGEST_BYTES = 16
TEXT_TYPES = ("text", "input_text", "output_text")
JOINT = "\n"
"""Joins the text parts of a message without images: most templates expect a string."""

_CALL_ID = re.compile(r"call_([0-9a-f]{24})_\d+", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """Validated messages and their digests."""

    messages: tuple[Message, ...]
    digests: tuple[bytes, ...]


def read_conversation(messages: Any) -> Conversation:
    """Validates the ``messages`` of a request, whose inline images were replaced by hashes.

    Raises:
        InvalidPayloadError: names the message and the problem.
    """
    if not isinstance(messages, list) or not messages:
        raise InvalidPayloadError("messages must be a list with at least one message", {"param": "messages"})
    if len(messages) > MAX_MESSAGES:
        raise InvalidPayloadError(f"messages: there are more than {MAX_MESSAGES}", {"param": "messages"})
    read = _with_calls_together(_read_message(message, f"messages[{index}]") for index, message in enumerate(messages))
    return Conversation(messages=read, digests=tuple(digest(message) for message in read))


def _with_calls_together(messages: Iterable[Message]) -> tuple[Message, ...]:
    """Moves the tool calls of one reply into one message, if a client put each call before its own result."""
    joined: list[Message] = []
    for message in messages:
        calls: list[Any] = message.get("tool_calls") or []
        caller = next((each for each in reversed(joined) if each["role"] != "tool"), None) if calls else None
        if caller is not None and not message["content"] and caller.get("tool_calls"):
            earlier, later = (_CALL_ID.fullmatch(call.get("id", "")) for call in (caller["tool_calls"][-1], calls[0]))
            if earlier is not None and later is not None and earlier[1] == later[1]:
                caller["tool_calls"] += calls
                continue
        joined.append(message)
    return tuple(joined)


def _read_message(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise wrong_field(where, "must be an object")
    message = with_reasoning_content(message)
    role = message.get("role")
    role = SAME_ROLES.get(role, role) if isinstance(role, str) else role
    if not isinstance(role, str) or role not in ROLES:
        raise wrong_field(f"{where}.role", f"must be one of {', '.join(sorted(ROLES))}")
    read: Message = {"role": role, "content": _content(message.get("content"), role, f"{where}.content")}
    for key in ("name", "tool_call_id", "reasoning_content"):
        if message.get(key) is not None:
            read[key] = expect_text(message[key], f"{where}.{key}")
    if role == "assistant" and message.get("tool_calls"):
        read["tool_calls"] = _tool_calls(message["tool_calls"], f"{where}.tool_calls")
    if role == "assistant" and message.get("function_call"):
        raise wrong_field(f"{where}.function_call", "is not supported: use tools and tool_calls")
    return read


def _content(content: Any, role: str, where: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return expect_text(content, where)
    if content is None and role == "assistant":
        return ""
    if not isinstance(content, list):
        raise wrong_field(where, "must be a string or a list of parts")
    parts = [_part(part, f"{where}[{index}]") for index, part in enumerate(content)]
    if any(part["type"] == "image_url" for part in parts):
        if role == "assistant":
            raise wrong_field(where, "an assistant's message cannot show images")
        return parts
    return JOINT.join(part["text"] for part in parts)


def _part(part: Any, where: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in TEXT_TYPES:
        return {"type": "text", "text": expect_text(part.get("text"), f"{where}.text")}
    if kind == "refusal":
        return {"type": "text", "text": expect_text(part.get("refusal"), f"{where}.refusal")}
    if kind == "image_url":
        return {"type": "image_url", "image_url": {"url": _image_url(part.get("image_url"), f"{where}.image_url")}}
    raise wrong_field(where, "must be a part of type text or image_url")


def _image_url(value: Any, where: str) -> str:
    url = value.get("url") if isinstance(value, dict) else value
    if isinstance(url, str) and url.startswith(IMAGE_URL_PREFIX) and is_sha256(url.removeprefix(IMAGE_URL_PREFIX)):
        return url
    if isinstance(url, str) and url.startswith(("http://", "https://")):
        raise wrong_field(where, "is an address: images are not fetched, send a data URI")
    raise wrong_field(where, "must be a base64 data URI of a PNG, JPEG or WebP, or sha256:HASH of an image sent before")


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise wrong_field(where, "must be a list")
    return [_tool_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise wrong_field(where, "must have a function")
    name = expect_text(function.get("name"), f"{where}.function.name")
    arguments = _given_arguments(function.get("arguments"), f"{where}.function.arguments")
    read: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"id": expect_text(call["id"], f"{where}.id"), **read} if call.get("id") is not None else read


def _given_arguments(value: Any, where: str) -> dict[str, Any] | str:
    if isinstance(value, dict):
        return value
    read = read_arguments(expect_text("" if value is None else value, where))
    if is_deeper_than(read, MAX_NESTING):
        raise wrong_field(where, f"is nested more than {MAX_NESTING} levels deep")
    return read


def call_id(reply: str, index: int) -> str:
    """Returns the id of a reply's tool call; ``reply`` is the reply's name, from ``reply_name``."""
    return f"call_{reply}_{index}"


def reply_name() -> str:
    """Returns a new random name of a reply."""
    return secrets.token_hex(12)


def digest(value: Any) -> bytes:
    """Returns a digest of a JSON value, independent of the order of keys."""
    content = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


def whole_numbers_as_int(value: Any) -> Any:
    """Returns a JSON value with 1.0 as 1: both are one number in JavaScript, whose programs send 1."""
    if isinstance(value, dict):
        return {key: whole_numbers_as_int(item) for key, item in value.items()}
    if isinstance(value, list):
        return [whole_numbers_as_int(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < MAX_EXACT_INTEGER else value


def image_hashes_of(messages: Sequence[Message]) -> list[str]:
    """Returns the sha256 of all images in the messages, in order, with repetitions."""
    return [
        part["image_url"]["url"].removeprefix(IMAGE_URL_PREFIX)
        for message in messages
        if isinstance(message.get("content"), list)
        for part in message["content"]
        if part["type"] == "image_url"
    ]


def read_arguments(text: str) -> dict[str, Any] | str:
    """Parses JSON into the object that chat templates expect; returns a text that is no JSON object unchanged."""
    try:
        parsed = orjson.loads(text) if text.strip() else {}
    except orjson.JSONDecodeError:
        return text
    return parsed if isinstance(parsed, dict) else text


def begun_arguments(text: str) -> Any:
    """Parses arguments that were cut, as Anthropic's client does; returns the text if it is no beginning of JSON."""
    try:
        begun = from_json(text, allow_partial=True)
        orjson.dumps(begun)  # refuses a number of more than 64 bits
    except (ValueError, TypeError):
        return text
    return begun


def with_begun_arguments(calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns tool calls whose arguments, if they were cut, are parsed as far as they go."""
    return _with_arguments(calls, lambda given: begun_arguments(given) if isinstance(given, str) else given)


def expect_text(value: Any, where: str) -> str:
    """Returns a value that must be a string; ``where`` names its field in the error."""
    if not isinstance(value, str):
        raise wrong_field(where, "must be a string")
    return value


def hashed_url(url: Any, images: dict[str, Image], where: str) -> str:
    """Returns an image's URL by hash; the image of a data URI is added to ``images``."""
    if not isinstance(url, str) or not url.startswith("data:"):
        return _image_url(url, where)
    try:
        image = decode_data_uri(url, where)
    except InvalidPayloadError as error:
        raise InvalidPayloadError(error.message, {"param": where}) from error
    images[image.sha256] = image
    return IMAGE_URL_PREFIX + image.sha256


def wrong_field(where: str, what: str) -> InvalidPayloadError:
    """Returns the error for a field of a request."""
    return InvalidPayloadError(f"{where} {what}", {"param": where})


def with_string_arguments(calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns tool calls with their arguments as JSON strings, as OpenAI's clients expect."""
    return _with_arguments(calls, lambda given: given if isinstance(given, str) else orjson.dumps(given).decode())


def _with_arguments(calls: Sequence[Mapping[str, Any]], convert: Callable[[Any], Any]) -> list[dict[str, Any]]:
    functions = [{**call["function"], "arguments": convert(call["function"]["arguments"])} for call in calls]
    return [{**call, "function": function} for call, function in zip(calls, functions, strict=True)]
