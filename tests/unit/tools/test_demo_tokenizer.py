"""The small ChatML tokenizer: it is what its tool builds, loads offline, and renders as the Qwen3-VL family does."""

from __future__ import annotations

import itertools
import runpy
from pathlib import Path
from typing import Any

import pytest

from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from tests.demo_tokens import tokenizer

BUILD_TOOL = Path(__file__).resolve().parents[3] / "tools" / "build_demo_tokenizer.py"
IMAGE = {"type": "image_url", "image_url": {"url": "sha256:00"}}


def render(messages: list[dict[str, Any]], **keywords: Any) -> str:
    text = tokenizer.apply_chat_template(messages, tokenize=False, **keywords)
    assert isinstance(text, str)
    return text


def test_the_committed_files_are_what_the_tool_builds(tmp_path: Path) -> None:
    runpy.run_path(str(BUILD_TOOL))["write_tokenizer"](tmp_path)
    for name in ("tokenizer_config.json", "chat_template.jinja", "tokenizer.json"):
        assert (tmp_path / name).read_text() == (DEMO_TOKENIZER_PATH / name).read_text(), name


@pytest.mark.parametrize("arguments", [{"action": "wait"}, '{"action": "wait"}'])
def test_tool_calls_are_written_like_the_policy_writes_them(arguments: Any) -> None:
    call = {"type": "function", "function": {"name": "mobile_use", "arguments": arguments}}
    expected = '<tool_call>\n{"name": "mobile_use", "arguments": {"action": "wait"}}\n</tool_call>'
    only_calls = render([{"role": "assistant", "content": "", "tool_calls": [call, call]}])
    assert only_calls == f"<|im_start|>assistant\n{expected}\n{expected}<|im_end|>\n"
    with_text = render([{"role": "assistant", "content": "Now.", "tool_calls": [call]}])
    assert with_text == f"<|im_start|>assistant\nNow.\n{expected}<|im_end|>\n"


def test_neighbouring_tool_results_share_one_user_block() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "hi"},
        {"role": "tool", "content": "one"},
        {"role": "tool", "content": [IMAGE]},
        {"role": "user", "content": "go on"},
    ]
    assert render(messages) == (
        "<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\none\n</tool_response>"
        "\n<tool_response>\n<|vision_start|><|image_pad|><|vision_end|>\n</tool_response><|im_end|>\n"
        "<|im_start|>user\ngo on<|im_end|>\n"
    )


def test_a_conversation_renders_as_a_prefix_of_its_continuation() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "<think>\nx\n</think>\na"},
        {"role": "user", "content": [IMAGE]},
    ]
    renderings = [render(messages[:count]) for count in range(1, 5)]
    for shorter, longer in itertools.pairwise(renderings):
        assert longer.startswith(shorter)
