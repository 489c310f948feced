"""The small ChatML tokenizer: loads offline, loses nothing, and renders what the Qwen3-VL family renders."""

from __future__ import annotations

import itertools
import runpy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH

BUILD_TOOL = Path(__file__).resolve().parents[3] / "tools" / "build_demo_tokenizer.py"
SPECIAL_TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
MARKUP_TOKENS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
TOOL = {"type": "function", "function": {"name": "mobile_use", "parameters": {}}}
IMAGE = {"type": "image_url", "image_url": {"url": "sha256:00"}}

tokenizer: Any = AutoTokenizer.from_pretrained(DEMO_TOKENIZER_PATH, local_files_only=True)


def render(messages: list[dict[str, Any]], **keywords: Any) -> str:
    text = tokenizer.apply_chat_template(messages, tokenize=False, **keywords)
    assert isinstance(text, str)
    return text


fragments = st.one_of(st.text(), st.sampled_from([*SPECIAL_TOKENS, *MARKUP_TOKENS, "\n", " ", "  \r\n", "Wi-Fi 7"]))


@given(st.lists(fragments, max_size=8).map("".join))
def test_encoding_and_decoding_gives_the_text_back(text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("token", SPECIAL_TOKENS + MARKUP_TOKENS)
def test_each_marker_is_one_id(token: str) -> None:
    assert len(tokenizer.encode(f"a{token}b", add_special_tokens=False)) == 3


def test_only_chatml_and_vision_markers_are_special() -> None:
    text = "<think>a</think><tool_call>{}</tool_call>"
    ids = tokenizer.encode(text + "<|im_end|><|image_pad|>", add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_sampling_ends_at_the_end_of_turn() -> None:
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|endoftext|>"
    assert tokenizer.bos_token is None


def test_all_markers_count_as_special() -> None:
    assert set(tokenizer.all_special_tokens) == set(SPECIAL_TOKENS)


def test_the_vocabulary_is_small_and_dense() -> None:
    assert 3000 <= len(tokenizer) <= 4096
    assert sorted(tokenizer.get_vocab().values()) == list(range(len(tokenizer)))


def test_usual_text_is_not_cut_into_bytes() -> None:
    text = "I see the home screen. The task is to add a contact, so I open the Contacts app first."
    assert len(tokenizer.encode(text)) <= len(text.split()) + 3


def test_the_committed_files_are_what_the_tool_builds(tmp_path: Path) -> None:
    runpy.run_path(str(BUILD_TOOL))["write_tokenizer"](tmp_path)
    for name in ("tokenizer_config.json", "chat_template.jinja", "tokenizer.json"):
        assert (tmp_path / name).read_text() == (DEMO_TOKENIZER_PATH / name).read_text(), name


def test_no_system_text_appears_by_itself() -> None:
    assert render([{"role": "user", "content": "hi"}], add_generation_prompt=True) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_images_stand_where_their_part_stands() -> None:
    content = [{"type": "text", "text": "Step 2 of 10: "}, IMAGE]
    assert render([{"role": "user", "content": content}]) == (
        "<|im_start|>user\nStep 2 of 10: <|vision_start|><|image_pad|><|vision_end|><|im_end|>\n"
    )


def test_tools_follow_the_system_text() -> None:
    text = render([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}], tools=[TOOL])
    system = text.split("<|im_end|>")[0]
    assert system.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n\n")
    assert '<tools>\n{"type": "function", "function": {"name": "mobile_use", "parameters": {}}}\n</tools>' in system
    assert render([{"role": "user", "content": "hi"}], tools=[TOOL]).startswith("<|im_start|>system\n# Tools\n\n")


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


@pytest.mark.parametrize("message", [{"role": "wizard", "content": "x"}, {"role": "user", "content": [{"type": "x"}]}])
def test_what_the_template_does_not_know_is_refused(message: dict[str, Any]) -> None:
    with pytest.raises(Exception, match="unknown"):
        render([message])
