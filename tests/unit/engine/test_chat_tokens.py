"""Bridges: what stands between a sampled turn and the next one, for templates of several kinds."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from transformers import AutoTokenizer

from slime_plugins.rollout_buffer.chat_tokens import ChatTokens
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.types import Message

tokenizer: Any = AutoTokenizer.from_pretrained(DEMO_TOKENIZER_PATH, local_files_only=True)

USER: Message = {"role": "user", "content": "Do it."}
NEXT: Message = {"role": "user", "content": [{"type": "text", "text": "Step 2 of 5: "}, {"type": "image_url"}]}

CHATML_TURN = (
    "{{ '<|im_start|>' + m.role + '\\n' }}{{ m.content if m.content is string else 'seen' }}{{ '<|im_end|>\\n' }}"
)
WITH_BOS_AND_DEFAULT_SYSTEM = (
    "{{ '<|endoftext|><|im_start|>system\\nBe good.<|im_end|>\\n' }}{% for m in messages %}"
    + CHATML_TURN
    + "{% endfor %}{{ '<|im_start|>assistant\\n<think>\\n' if add_generation_prompt }}"
)
WITHOUT_OLD_REASONING = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{{ '<|im_start|>assistant\\n' + m.content.split('</think>')[-1].strip() + '<|im_end|>\\n' }}"
    "{% else %}" + CHATML_TURN + "{% endif %}{% endfor %}"
    "{{ '<|im_start|>assistant\\n' if add_generation_prompt }}"
)


def chat_with(template: str | None) -> ChatTokens:
    own = copy.deepcopy(tokenizer)
    own.chat_template = template
    return ChatTokens(own)


@pytest.fixture(scope="module")
def chat() -> ChatTokens:
    return ChatTokens(tokenizer)


def test_prompt_and_turn_and_bridge_are_what_the_template_writes_for_the_whole(chat: ChatTokens) -> None:
    said = "<thinking>hm</thinking>"
    turn = tokenizer.encode(said + "<|im_end|>", add_special_tokens=False)
    held = chat.prompt([USER]) + turn + chat.bridge(NEXT, turn_is_closed=True)
    assert held == chat.prompt([USER, {"role": "assistant", "content": said}, NEXT])


def test_a_cut_turn_is_closed_by_the_bridge(chat: ChatTokens) -> None:
    assert chat.bridge(USER, turn_is_closed=False) == [
        chat.end_of_turn_id,
        *chat.bridge(USER, turn_is_closed=True),
    ]


@pytest.mark.parametrize(
    ("template", "thought"), [(WITH_BOS_AND_DEFAULT_SYSTEM, "<think>\n"), (WITHOUT_OLD_REASONING, "")]
)
def test_what_a_template_writes_or_drops_before_a_message_is_not_in_its_bridge(template: str, thought: str) -> None:
    text = tokenizer.decode(chat_with(template).bridge(USER, turn_is_closed=True))
    assert text == f"\n<|im_start|>user\nDo it.<|im_end|>\n<|im_start|>assistant\n{thought}"


def test_a_bridge_is_cut_once_and_a_copy_given_each_time(chat: ChatTokens) -> None:
    first = chat.bridge(NEXT, turn_is_closed=True)
    first.clear()
    assert chat.bridge(NEXT, turn_is_closed=True).count(chat.image_placeholder_id) == 1


def test_the_text_of_a_turn_keeps_everything_but_its_end(chat: ChatTokens) -> None:
    ids = tokenizer.encode(" <tool_call>{}</tool_call><|im_start|> \n<|im_end|>", add_special_tokens=False)
    assert chat.text(ids) == " <tool_call>{}</tool_call><|im_start|> \n"
    assert chat.text(ids[:-1]) == chat.text(ids)


def test_only_the_templates_own_end_closes_a_turn(chat: ChatTokens) -> None:
    other_stop = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    assert chat.is_closed([5, chat.end_of_turn_id])
    assert not chat.is_closed([5, other_stop])
    assert not chat.is_closed([])


def test_a_truncation_in_the_tokenizers_file_does_not_cut_a_prompt() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO_TOKENIZER_PATH, local_files_only=True)
    whole = ChatTokens(tokenizer).prompt([USER])
    tokenizer.backend_tokenizer.enable_truncation(2)
    chat = ChatTokens(tokenizer)
    assert chat.prompt([USER]) == whole
    tokenizer("text of a generator's own", truncation=True, max_length=2)
    assert chat.prompt([USER]) == whole
    tokenizer("text", padding="max_length", max_length=99, split_special_tokens=True)
    assert chat.prompt([USER]) == whole


def test_a_tokenizer_that_encodes_otherwise_than_its_library_is_asked_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO_TOKENIZER_PATH, local_files_only=True)
    encode = type(tokenizer).encode
    monkeypatch.setattr(type(tokenizer), "encode", lambda self, text, **options: encode(self, text + "!", **options))
    (mark,) = encode(tokenizer, "!", add_special_tokens=False)
    assert ChatTokens(tokenizer).prompt([USER])[-1] == mark


def test_no_tokenizer_is_a_clear_error() -> None:
    with pytest.raises(ConfigError, match="tokenizer_path"):
        ChatTokens(None)


def test_a_template_that_shows_no_images_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 image placeholders for 1 images"):
        chat_with(WITH_BOS_AND_DEFAULT_SYSTEM).prompt([NEXT])


def test_a_placeholder_in_the_text_of_a_message_is_refused_where_the_template_writes_images(chat: ChatTokens) -> None:
    spoofed: Message = {"role": "user", "content": "The token <|image_pad|> stands for an image."}
    with pytest.raises(ConfigError, match="1 image placeholders for 0 images"):
        chat.prompt([spoofed])
    with pytest.raises(ConfigError, match="1 image placeholders for 0 images"):
        chat.bridge(spoofed, turn_is_closed=True)
    assert chat_with(WITH_BOS_AND_DEFAULT_SYSTEM).prompt([spoofed]).count(chat.image_placeholder_id) == 1


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (None, "no chat template"),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", "does not end a turn"),
        ("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]", "does not end a turn"),
        ("{% for m in messages[:2] %}{{ m.content }}{% endfor %}", "does not end a turn"),
    ],
    ids=["none", "line break", "word", "nothing"],
)
def test_a_tokenizer_without_a_template_or_with_one_without_an_end_of_turn_is_refused(
    template: str | None, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        chat_with(template)


def test_a_template_that_refuses_a_role_says_so(chat: ChatTokens) -> None:
    with pytest.raises(ConfigError, match="unknown role"):
        chat.prompt([{"role": "robot", "content": "x"}])


SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    + CHATML_TURN
    + "{% endfor %}{{ '<|im_start|>assistant\\n' if add_generation_prompt }}"
)
LAST_SYSTEM_GOES_FIRST = (
    "{% set state = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% set state.system = m.content %}{% endif %}{% endfor %}{{ state.system }}"
    "{% for m in messages if m.role != 'system' %}"
    + CHATML_TURN
    + "{% endfor %}{{ '<|im_start|>assistant\\n' if add_generation_prompt }}"
)


@pytest.mark.parametrize(
    ("template", "role"),
    [(None, "system"), (SYSTEM_FIRST, "user"), (LAST_SYSTEM_GOES_FIRST, "user")],
    ids=["anywhere", "refused", "moved"],
)
def test_a_late_system_message_is_written_as_the_users_where_the_template_has_no_place_for_it(
    template: str | None, role: str
) -> None:
    chat = chat_with(template or tokenizer.chat_template)
    late: Message = {"role": "system", "content": "Hurry."}
    new = f"<|im_start|>{role}\nHurry.<|im_end|>\n<|im_start|>assistant\n"
    prompt = tokenizer.decode(chat.prompt([{"role": "system", "content": "Be good."}, USER, late]))
    assert prompt.startswith(("<|im_start|>system\nBe good.", "Be good."))
    assert prompt.endswith(f"Do it.<|im_end|>\n{new}")
    assert tokenizer.decode(chat.bridge(late, turn_is_closed=True)) == f"\n{new}"
