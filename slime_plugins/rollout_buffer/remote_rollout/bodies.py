"""Request bodies of both sides, as pydantic models. Unknown fields are accepted.

Unknown fields of a rollout request are passed to its tools; elsewhere they are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, model_validator

from slime_plugins.rollout_buffer.errors import InvalidPayloadError
from slime_plugins.rollout_buffer.types import Message
from slime_plugins.rollout_buffer.wire.request_fields import Count, Identifier, Number

MAX_MESSAGES = 20_000
ROLES = frozenset({"system", "user", "assistant", "tool", "function", "developer"})


def _checked_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for place, message in enumerate(messages):
        if message.get("role") not in ROLES:
            raise ValueError(f"message {place} needs a role: one of {', '.join(sorted(ROLES))}")
        content = message.get("content")
        if content is not None and not isinstance(content, str | list):
            raise ValueError(f"message {place}: content must be a text, a list of parts, or null")
        if isinstance(content, list) and not all(isinstance(part, dict) for part in content):
            raise ValueError(f"message {place}: every part of its content must be an object")
        if not isinstance(message.get("tool_calls"), list | None):
            raise ValueError(f"message {place}: tool_calls must be a list")
    return messages


def _checked_key(key: str) -> str:
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ValueError("a key is sent in a header: it must be ASCII without spaces")
    return key


Messages = Annotated[
    list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES), AfterValidator(_checked_messages)
]
Text = Annotated[str, StringConstraints(max_length=100_000)]
Tools = Annotated[list[dict[str, Any]], Field(max_length=1000)]


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_missing(cls, body: Any) -> Any:
        return {key: value for key, value in body.items() if value is not None} if isinstance(body, dict) else body


class RolloutBody(_Body):
    """The body of ``POST /rollout``. Unknown fields are passed to the tools."""

    model_config = ConfigDict(frozen=True, extra="allow", use_attribute_docstrings=True)

    rollout_id: Identifier
    """Id of the rollout; the same id with the same body attaches to it."""
    server_url: Annotated[str, StringConstraints(min_length=1, max_length=2048)]
    """Base URL of the trainer; turns are sent to ``server_url/v1/chat/completions``."""
    messages: Messages
    """The messages before the first turn."""
    sampling_params: dict[str, Any] = {}
    """Copied into the body of every turn."""
    tokenizer_name: Annotated[str, StringConstraints(min_length=1, max_length=1024)] | None = None
    """The trainer's tokenizer; the server's default when it is missing."""
    tokenizer_revision: Annotated[str, StringConstraints(min_length=1, max_length=128)] | None = None
    """The tokenizer's revision on the model hub."""
    max_turns: Annotated[Count, Field(ge=1)] = 10
    """Maximum number of turns."""
    max_tokens_total: Annotated[Count, Field(ge=1)] = 8192
    """Maximum number of tokens of the whole sequence, prompt and replies."""
    callback_api_key: Annotated[str, StringConstraints(max_length=4096), AfterValidator(_checked_key)] | None = None
    """Sent to the trainer as a bearer token."""
    tools: Tools | None = None
    """OpenAI tools to send with every turn; without them, the messages or the trainer name tools."""
    metadata: dict[str, Any] = {}
    """Copied into the answer; tools may read it."""

    @property
    def unknown_fields(self) -> Mapping[str, Any]:
        """The fields beyond the protocol."""
        return self.__pydantic_extra__ or {}


class CompletionBody(_Body):
    """The body of a turn: ``POST /v1/chat/completions`` with a ``rollout_id``."""

    model_config = ConfigDict(frozen=True, extra="allow", use_attribute_docstrings=True)

    rollout_id: Identifier
    """Id of the rollout."""
    messages: Messages
    """The whole conversation before this turn."""
    response_mask: Any = None
    """Null on the first turn; afterwards one 0 for each token that entered since the last turn."""
    max_tokens: Annotated[Count, Field(ge=1)] | None = None
    """Token limit of this turn."""
    max_completion_tokens: Annotated[Count, Field(ge=1)] | None = None
    """The same by OpenAI's newer name."""
    max_new_tokens: Annotated[Count, Field(ge=1)] | None = None
    """The same under SGLang's name."""
    temperature: Annotated[Number, Field(ge=0, le=100)] | None = None
    """Sampling temperature; 1 when it is missing."""
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    """Nucleus sampling; 1 when it is missing."""
    tools: Tools | None = None
    """OpenAI tools for the chat template; calls are then returned as ``tool_calls``."""
    n: Literal[1] | None = None
    """Number of replies; only 1."""
    stream: Literal[False] | None = None
    """Streaming; only false."""


class OpenBody(_Body):
    """The body of ``POST /rollouts``: opens a session before its first turn."""

    rollout_id: Identifier
    """Id of the session."""
    job_id: Identifier | None = None
    """The job of task type ``external`` for the trajectory."""
    instance_id: Identifier | None = None
    """The instance whose group gets the trajectory."""
    uid: Identifier | None = None
    """The trajectory's uid; the ``rollout_id`` when it is missing."""
    api_key: Annotated[str, StringConstraints(min_length=8, max_length=4096)] | None = None
    """The bearer token that turns must send."""
    tokenizer_name: Annotated[str, StringConstraints(min_length=1, max_length=1024)] | None = None
    """The policy's tokenizer; the server's default when it is missing."""
    tokenizer_revision: Annotated[str, StringConstraints(min_length=1, max_length=128)] | None = None
    """The tokenizer's revision on the model hub."""
    tools: Tools = []
    """OpenAI tools for the chat template of every turn."""
    max_new_tokens: Annotated[Count, Field(ge=1)] | None = None
    """Token limit of every turn."""

    @property
    def binding(self) -> tuple[str | None, ...]:
        """Job, instance and uid of the session's trajectory, and the session's key; each None if it was not given."""
        return self.job_id, self.instance_id, self.uid, self.api_key

    def filled_by(self, end: EndBody) -> OpenBody:
        """Returns a copy whose missing job, instance and uid are those of ``end``."""
        names = ("job_id", "instance_id", "uid")
        return self.model_copy(update={name: getattr(self, name) or getattr(end, name) for name in names})


class EndBody(_Body):
    """The body of ``POST /rollouts/<rollout_id>/end``: a reward, and optionally the rollout server's answer."""

    reward: Number | None = None
    """The trajectory's reward. Required, unless the rollout failed."""
    raw_reward: Number | None = None
    """The reward before shaping, if it differs."""
    status: str | None = None
    """``COMPLETED`` or ``ERROR``; an error or an abort makes no trajectory."""
    finish_reason: Annotated[str, StringConstraints(max_length=256)] | None = None
    """``stop``, ``max_turns``, ``max_tokens``, ``error``, ``abort``, or another word, which counts as ``stop``."""
    error_message: Text | None = None
    """Why it failed."""
    final_messages: Messages | None = None
    """The final conversation; tool results after the last turn are stored from it."""
    metrics: dict[str, Any] = {}
    """Stored with the trajectory."""
    final_response: dict[str, Any] | None = None
    """The rollout server's whole answer, instead of the five fields above."""
    job_id: Identifier | None = None
    """As in ``POST /rollouts``, for a session opened by its first turn."""
    instance_id: Identifier | None = None
    """As in ``POST /rollouts``."""
    uid: Identifier | None = None
    """As in ``POST /rollouts``."""
    extra_info: dict[str, Any] = {}
    """Stored with the trajectory."""

    @model_validator(mode="before")
    @classmethod
    def _takes_the_final_response(cls, body: Any) -> Any:
        final = body.get("final_response") if isinstance(body, dict) else None
        if not isinstance(final, dict):
            return body
        reported = {key: final[key] for key in ("status", "finish_reason", "error_message", "metrics") if key in final}
        messages = {"final_messages": final["final_messages"]} if final.get("final_messages") else {}
        return {**{key: value for key, value in reported.items() if value is not None}, **messages, **body}

    @property
    def failed(self) -> bool:
        """True if the rollout server reported a failure."""
        return (self.status or "").upper() in ("ERROR", "FAILED") or self.finish_reason in ("error", "abort")


def check_text_only(messages: list[Message]) -> None:
    """Refuses images and videos.

    Raises:
        InvalidPayloadError: a message shows an image or a video.
    """
    for place, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list) and any(part.get("type") != "text" for part in content):
            raise InvalidPayloadError(
                f"message {place}: remote rollouts are text only; a part of its content is not text"
            )
