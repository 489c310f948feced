"""Validates the body of ``/v1/chat/completions`` and translates its sampling parameters. Pure functions.

Unknown fields, and fields of OpenAI without effect here (``user``, ``store``, ``metadata``, ``parallel_tool_calls`` …),
are ignored, as by other OpenAI-compatible servers. Fields whose effect is not implemented are refused: ``n`` above 1,
``top_logprobs``, audio, ``functions``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.functional_validators import AfterValidator, BeforeValidator, field_validator, model_validator

from slime_plugins.rollout_buffer.engine.token_records import asked_records
from slime_plugins.rollout_buffer.errors import InvalidPayloadError
from slime_plugins.rollout_buffer.serve_settings import validation_messages
from slime_plugins.rollout_buffer.types import SamplingParams

MAX_TOOLS = 1024
MAX_STOPS = 16
Whole = Annotated[int, Field(strict=True)]
Flag = Annotated[bool, BeforeValidator(lambda value: False if value is None else value)]


def _format_parameters(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a ``response_format`` as sampling parameters of SGLang."""
    kind = wanted.get("type", "text")
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_schema": '{"type": "object"}'}
    json_schema = wanted.get("json_schema")
    schema = json_schema.get("schema") if isinstance(json_schema, dict) else None
    if kind != "json_schema" or not isinstance(schema, dict):
        raise ValueError("must be of type text, json_object, or json_schema with a schema")
    return {"json_schema": orjson.dumps(schema).decode()}


class StreamOptions(BaseModel):
    """``stream_options``."""

    include_usage: Flag = False


class ChatBody(BaseModel):
    """A chat request without its messages (see ``messages.py``)."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    model: str | None = None
    n: Annotated[Whole, Field(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[Whole, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[Whole, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Whole | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    logit_bias: dict[str, float] | None = None
    seed: Whole | None = None
    stop: str | list[str] | None = None
    logprobs: bool | None = None
    top_logprobs: Whole | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: Annotated[dict[str, Any], AfterValidator(_format_parameters)] | None = None
    """Holds sampling parameters of SGLang after validation."""
    modalities: list[str] | None = None
    functions: Any = None
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = None
    separate_reasoning: Flag = False

    @field_validator("stop")
    @classmethod
    def _check_number_of_stops(cls, value: str | list[str] | None) -> str | list[str] | None:
        if isinstance(value, list) and len(value) > MAX_STOPS:
            raise ValueError(f"there are more than {MAX_STOPS} stop sequences")
        return value

    @field_validator("tools")
    @classmethod
    def _check_tools(cls, tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        for index, tool in enumerate(tools or ()):
            function = tool.get("function")
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise ValueError(f"number {index} must be a function with a name: the model knows no tool by its type")
            if not isinstance(function.get("parameters") or {}, dict):
                raise ValueError(f"number {index}: the parameters must be a JSON schema")
        return tools

    @model_validator(mode="after")
    def _refuse_unsupported(self) -> ChatBody:
        if self.n is not None and self.n > 1:
            raise ValueError("n must be 1: a session records one reply to each request; repeat the request for another")
        if self.top_logprobs:
            raise ValueError("top_logprobs is not supported: logprobs returns those of the sampled tokens")
        if self.modalities is not None and self.modalities != ["text"]:
            raise ValueError("modalities: only text is supported")
        if self.functions is not None:
            raise ValueError("functions is not supported: use tools")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """The non-empty stop sequences."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(stop for stop in stops if stop)

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """The tools to render into the prompt; none for ``tool_choice: none``."""
        return [] if self.tool_choice == "none" else self.tools or []


def read_chat_body(body: Mapping[str, Any], client_names: Mapping[str, str]) -> ChatBody:
    """Validates a request without its messages.

    ``client_names`` has the fields that the client's dialect names otherwise, with their names there, for errors.

    Raises:
        InvalidPayloadError: fields are invalid; the message has a sentence for each of the first five, and
            ``detail["param"]`` names the first.
    """
    try:
        return ChatBody.model_validate(body)
    except ValidationError as error:
        location = error.errors()[0]["loc"]
        param = str(location[0]) if location else None
        message = "; ".join(validation_messages(error)[:5])
        for name, client_name in client_names.items():
            message = re.sub(rf"(^|; ){name}\b", rf"\1{client_name}", message)
        raise InvalidPayloadError(message, {"param": client_names.get(param or "", param)}) from error


def sampling_of(body: ChatBody, job: SamplingParams, *, pinned: bool) -> SamplingParams:
    """Returns a turn's sampling parameters: those of the request, else the job's; at most the job's ``max_new_tokens``.

    ``pinned`` keeps the job's temperature, top_p and all other parameters of the distribution. A job that records
    values per token is always pinned, because a trainer assumes that they were computed with the job's parameters.
    """
    pinned = pinned or bool(asked_records(job))
    max_tokens = body.max_completion_tokens or body.max_tokens or job.max_new_tokens
    extra = dict(job.extra)
    if not pinned:
        extra |= _requested_extra(body)
    if body.stops:
        extra["stop"] = list(body.stops)
    return SamplingParams(
        max_new_tokens=min(max_tokens, job.max_new_tokens),
        temperature=job.temperature if pinned or body.temperature is None else body.temperature,
        top_p=job.top_p if pinned or body.top_p is None else body.top_p,
        extra=extra,
    )


def _requested_extra(body: ChatBody) -> dict[str, Any]:
    names = ("top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias")
    extra = {name: getattr(body, name) for name in names if getattr(body, name) is not None}
    if body.seed is not None:
        extra["sampling_seed"] = body.seed
    return extra | (body.response_format or {})
