"""Converts requests and replies of ``/v1/chat/completions``. There are no streams, and tool calls stay text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from rollout_buffer_lab.sglang_routes.images import read_images
from rollout_buffer_lab.sglang_routes.records import GenerateCall, Sampled
from rollout_buffer_lab.sglang_routes.sampling import BadRequestError, read_sampling_params

DEFAULT_MAX_TOKENS = 1024


def chat_call(body: Mapping[str, Any], tokenizer: Any, *, session: str) -> GenerateCall:
    """Returns the request as one of ``/generate``: its messages are rendered with the tokenizer's chat template.

    Raises:
        BadRequestError: there are no messages, the template refuses them, or a stream is requested.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequestError({"message": "Messages cannot be empty."})
    if body.get("stream"):
        raise BadRequestError({"message": "this engine does not stream: leave stream out."})
    return GenerateCall(
        prompt=_rendered(messages, body, tokenizer),
        images=read_images([_image_url(part) for part in _image_parts(messages)]),
        sampling=read_sampling_params(_sampling_params(body)),
        rid=str(body.get("rid") or ""),
        session=session or str(body.get("user") or ""),
    )


def chat_reply(sampled: Sampled, body: Mapping[str, Any], *, created: int, model: str) -> dict[str, Any]:
    """Returns the reply in OpenAI's form, with ids if ``return_token_ids`` and log-probs if ``logprobs`` is set."""
    reason = sampled.finish_reason["type"]
    choice: dict[str, Any] = {
        "index": 0,
        "message": {"role": "assistant", "content": sampled.text, "reasoning_content": None, "tool_calls": None},
        "finish_reason": reason,
        "matched_stop": sampled.finish_reason.get("matched"),
    }
    if body.get("logprobs"):
        entries = zip(sampled.output_ids, sampled.log_probs, strict=True)
        choice["logprobs"] = {
            "content": [{"token": f"token_id:{token_id}", "logprob": log_prob} for token_id, log_prob in entries]
        }
    if body.get("return_token_ids"):
        choice |= {"prompt_token_ids": sampled.prompt_ids, "response_token_ids": sampled.output_ids}
    prompt_tokens, completion_tokens = len(sampled.prompt_ids), len(sampled.output_ids)
    return {
        "id": sampled.rid,
        "object": "chat.completion",
        "created": created,
        "model": body.get("model", model),
        "choices": [choice],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sampled.cached_tokens},
        },
        "metadata": {"weight_version": sampled.weight_version},
    }


def _rendered(messages: Sequence[Any], body: Mapping[str, Any], tokenizer: Any) -> str:
    continued = bool(body.get("continue_final_message"))
    try:
        text: str = tokenizer.apply_chat_template(
            messages,
            tools=body.get("tools") or None,
            tokenize=False,
            add_generation_prompt=not continued,
            continue_final_message=continued,
            **(body.get("chat_template_kwargs") or {}),
        )
    except (TemplateError, ValueError, TypeError, AttributeError) as error:
        raise BadRequestError({"message": f"the chat template refuses these messages: {error}"}) from error
    return text


def _sampling_params(body: Mapping[str, Any]) -> dict[str, Any]:
    max_new_tokens = body.get("max_completion_tokens") or body.get("max_tokens") or DEFAULT_MAX_TOKENS
    names = ("temperature", "top_p", "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens", "no_stop_trim", "n")
    params = {name: body[name] for name in names if body.get(name) is not None}
    return params | {"max_new_tokens": max_new_tokens, "sampling_seed": body.get("seed")}


def _image_parts(messages: Sequence[Any]) -> Iterator[Mapping[str, Any]]:
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else []:
            if isinstance(part, dict) and part.get("type") in ("image", "image_url"):
                yield part


def _image_url(part: Mapping[str, Any]) -> Any:
    image = part.get("image_url", part.get("image"))
    return image.get("url") if isinstance(image, dict) else image
