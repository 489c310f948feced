"""The invariants of masks, over random hostile conversations, against pieces written by hand."""

from __future__ import annotations

import copy
import functools
import unicodedata
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from slime.utils.mask_utils import MultiTurnLossMaskGenerator, UndecidedReason, get_response_lengths
from tests import chat_tokenizers, mask_conversations, mask_oracle
from tests.example_counts import examples
from tests.mask_conversations import generator_of

NAMES = list(chat_tokenizers.KINDS)
VISION_MARKERS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
SHOWS_IMAGES = {"vision", "thinking", "qwen2_5_vl"}

every_kind = pytest.mark.parametrize("name", NAMES)
example = st.data()
QUESTION = {"role": "user", "content": "And now?"}


def drawn(count: int) -> settings:
    """Settings of ``count`` examples, without Hypothesis's health checks."""
    return examples(count, suppress_health_check=list(HealthCheck))


@functools.cache
def vision_ids(name: str) -> frozenset[int]:
    """The ids that the template of this kind writes for images."""
    if chat_tokenizers.KINDS[name].oracle not in SHOWS_IMAGES:
        return frozenset()

    return frozenset(chat_tokenizers.load(name).convert_tokens_to_ids(VISION_MARKERS))


def draw(data: st.DataObject, name: str) -> mask_conversations.Conversation:
    """Draws a conversation for this kind."""
    return data.draw(mask_conversations.conversations(chat_tokenizers.KINDS[name].oracle))


@every_kind
@drawn(25)
@given(data=example)
def test_ids_and_mask_are_what_the_pieces_say(name: str, data: st.DataObject) -> None:
    """Equal lengths, the template's own ids, 1 exactly on sampled pieces, 0 and reported on edges."""
    messages, tools = draw(data, name)
    right = mask_oracle.expected(chat_tokenizers.load(name), chat_tokenizers.KINDS[name].oracle, messages, tools)
    masked = generator_of(name).mask_conversation(messages, tools)
    # For a DeepSeek, get_loss_mask adds the reasoning of the last message, which the template drops.
    drops_reasoning = any(one.reason is UndecidedReason.DROPPED_REASONING for one in masked.undecided)
    assume("deepseek" not in name or not drops_reasoning)
    token_ids, loss_mask = generator_of(name).get_loss_mask(messages, tools)
    reported = {one.position for one in masked.undecided}

    assert (masked.token_ids, masked.loss_mask) == (token_ids, loss_mask)
    assert token_ids == right.token_ids
    assert len(loss_mask) == len(token_ids)
    assert set(loss_mask) <= {0, 1}
    for at, (given_value, wanted) in enumerate(zip(loss_mask, right.loss_mask, strict=True)):
        if token_ids[at] in vision_ids(name):
            assert given_value == 0
        elif wanted is None:
            assert given_value == 0
            assert at in reported
        else:
            assert given_value == wanted


# DeepSeek's templates let two turns of tool calls share a token, and end no turn of one call.
@pytest.mark.parametrize("name", [name for name in NAMES if "deepseek" not in name])
@drawn(10)
@given(data=example)
def test_every_trained_turn_is_one_region_that_ends_at_the_end_of_turn(name: str, data: st.DataObject) -> None:
    """As many regions as trained turns, each the NFC form of its body with the end-of-turn token."""
    kind = chat_tokenizers.KINDS[name]
    tokenizer = chat_tokenizers.load(name)
    messages, tools = draw(data, name)
    masked = generator_of(name).mask_conversation(messages, tools)
    assume(not any(one.reason in (UndecidedReason.BOUNDARY, UndecidedReason.IMAGE) for one in masked.undecided))
    pieces = mask_oracle.expected(tokenizer, kind.oracle, messages, tools).pieces
    trained = [
        index
        for index, message in enumerate(messages)
        if message["role"] == "assistant" and message.get("step_loss_mask", 1) == 1
    ]

    regions = generator_of(name).get_text_from_loss_mask(masked.token_ids, masked.loss_mask)

    normal = functools.partial(unicodedata.normalize, "NFC")
    assert [normal(region) for region in regions] == [
        normal(mask_oracle.sampled_text(pieces, index)) for index in trained
    ]
    assert all(region.endswith("<|im_end|>") for region in regions)


@every_kind
@drawn(10)
@given(data=example)
def test_what_others_say_never_changes_what_is_trained(name: str, data: st.DataObject) -> None:
    """User, tool and system texts and tool definitions may be anything."""
    messages, tools = draw(data, name)
    other = copy.deepcopy(messages)
    for message in other:
        if message["role"] != "assistant" and isinstance(message["content"], str):
            message["content"] = "x" + data.draw(mask_conversations.texts)
    plain = copy.deepcopy(other)
    for message in plain:
        if message["role"] != "assistant" and isinstance(message["content"], str):
            message["content"] = "x"
    generator = generator_of(name)
    assume(not any(_is_wholly_a_tool_response(message) for message in other))
    if "deepseek" in name:  # calls after earlier calls have no header: the text before may share a token with them
        masked = [generator.mask_conversation(messages) for messages in (other, plain)]
        assume(not any(one.reason is UndecidedReason.BOUNDARY for each in masked for one in each.undecided))

    assert _trained_ids(generator, other, tools) == _trained_ids(generator, plain, None)


def _is_wholly_a_tool_response(message: dict[str, Any]) -> bool:
    """Templates take such a user message for a tool's, which moves the last question: that is theirs to decide."""
    return message["role"] == "user" and "tool_response>" in str(message["content"])


def _trained_ids(generator: MultiTurnLossMaskGenerator, messages: Any, tools: Any) -> list[int]:
    token_ids, loss_mask = generator.get_loss_mask(messages, tools)
    return [token_id for token_id, value in zip(token_ids, loss_mask, strict=True) if value]


@every_kind
@drawn(10)
@given(data=example)
def test_switching_a_turn_off_zeroes_its_region_and_nothing_else(name: str, data: st.DataObject) -> None:
    """Ids stay, the region of that turn becomes 0."""
    messages, tools = draw(data, name)
    generator = generator_of(name)
    before = generator.mask_conversation(messages, tools)
    assume(before.turns)
    turn = data.draw(st.sampled_from(before.turns))
    off = copy.deepcopy(messages)
    off[turn.message_index]["step_loss_mask"] = 0

    after = generator.mask_conversation(off, tools)

    wanted = list(before.loss_mask)
    wanted[turn.start : turn.end] = [0] * (turn.end - turn.start)
    assert after.token_ids == before.token_ids
    assert after.loss_mask == wanted


@pytest.mark.parametrize("name", ["small-default-system", "small-plain", "qwen2.5", "qwen3-2507", "qwen3-vl"])
@drawn(10)
@given(data=example)
def test_a_growing_conversation_keeps_its_prefix(name: str, data: st.DataObject) -> None:
    """Where the template is prefix-stable, what was decided at one turn stays."""
    messages, tools = draw(data, name)
    generator = generator_of(name)
    whole_ids, whole_mask = generator.get_loss_mask(messages, tools)
    for length in range(1, len(messages)):
        if messages[length]["role"] == "tool":
            continue  # consecutive tool results share one turn: the one before is not closed yet
        token_ids, loss_mask = generator.get_loss_mask(messages[:length], tools)
        assert token_ids == whole_ids[: len(token_ids)]
        assert loss_mask == whole_mask[: len(loss_mask)]


@drawn(100)
@given(st.lists(st.integers(0, 1)))
def test_response_length_counts_from_the_first_trained_token(loss_mask: list[int]) -> None:
    """The length is 0 when nothing is trained."""
    (length,) = get_response_lengths([loss_mask])
    response = loss_mask[len(loss_mask) - length :]

    assert sum(response) == sum(loss_mask)
    assert response[:1] == ([1] if 1 in loss_mask else [])


@every_kind
@drawn(10)
@given(data=example)
def test_inputs_stay_and_results_depend_on_nothing_before(name: str, data: st.DataObject) -> None:
    """No mutation, the same result from a warm cache, a fresh one, a tiny one, and in a batch."""
    messages, tools = draw(data, name)
    messages_before, tools_before = copy.deepcopy(messages), copy.deepcopy(tools)
    warm = generator_of(name)
    tokenizer, kind = chat_tokenizers.load(name), chat_tokenizers.KINDS[name].tokenizer_type

    first = warm.get_loss_mask(messages, tools)

    assert (messages, tools) == (messages_before, tools_before)
    assert warm.get_loss_mask(messages, tools) == first
    assert MultiTurnLossMaskGenerator(tokenizer, kind, max_cache_bytes=0).get_loss_mask(messages, tools) == first
    assert warm.get_loss_masks([messages, [QUESTION]], [tools, None])[0] == first


@pytest.mark.parametrize("name", ["small-thinking", "qwen3-vl", "qwen2.5-vl", "qwen3.5"])
@drawn(25)
@given(data=example)
def test_expanding_images_moves_the_mask_and_changes_nothing_else(name: str, data: st.DataObject) -> None:
    """Image tokens are 0, every other token keeps order and mask, whatever size each image has."""
    messages, tools = draw(data, name)
    generator = generator_of(name)
    pad = chat_tokenizers.load(name).convert_tokens_to_ids("<|image_pad|>")
    token_ids, loss_mask = generator.get_loss_mask(messages, tools)
    expanded: list[int] = []
    wanted: list[int] = []
    for token_id, value in zip(token_ids, loss_mask, strict=True):
        copies = data.draw(st.integers(1, 5)) if token_id == pad else 1
        expanded += [token_id] * copies
        wanted += [0 if token_id == pad else value] * copies

    same, mask = generator.get_loss_mask_with_multimodal_alignment(messages, expanded, tools)

    assert same is expanded
    assert mask == wanted
