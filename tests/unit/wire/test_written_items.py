"""What is written means what it says: slips are refused with what was meant, nothing is dropped in silence."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slime_plugins.rollout_buffer.errors import InvalidPayloadError
from slime_plugins.rollout_buffer.rules.validity import LOWEST_LOG_PROB, ROUNDING, checked_log_prob
from slime_plugins.rollout_buffer.wire.written_items import decode_written_item

USER = {"role": "user", "content": "2 + 2?"}
ASSISTANT = {"role": "assistant", "content": "4"}
GENERATION = {"prompt_ids": [1, 2], "output_ids": [3], "output_log_probs": [-0.1], "weight_version": "3"}


def item(**changes: Any) -> dict[str, Any]:
    whole = {"uid": "u", "instance_id": "a", "reward": 1.0, "messages": [USER, ASSISTANT], **changes}
    return {key: value for key, value in whole.items() if value is not ...}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rewad": 1.0, "reward": ...}, r"item\.rewad is not known; did you mean reward\?"),
        ({"mesages": [], "messages": ...}, r"did you mean messages"),
        ({"extra_infos": {}}, r"did you mean extra_info\?"),
        ({"stop_reasn": "stop"}, r"did you mean stop_reason"),
        (
            {"generations": [{**GENERATION, "weight_verison": "4", "weight_version": "3"}]},
            r"weight_verison is not known",
        ),
        (
            {"generations": [{"prompt_ids": [1], "output_ids": [2], "weight_verison": "4"}]},
            r"generations\[0\]\.weight_verison is not known; did you mean weight_version\?",
        ),
        (
            {"generations": [GENERATION, {**GENERATION, "latency": 3}]},
            r"generations\[1\]\.latency .* belong into extra_info",
        ),
        ({"weight_version": 3}, r"item\.weight_version belongs in each entry of generations, and there is none"),
    ],
)
def test_a_misspelt_key_is_refused_with_what_was_meant(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidPayloadError, match=says):
        decode_written_item(item(**changes))


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"role": "assistent", "content": "4"}, r"messages\[1\]\.role is 'assistent'; did you mean assistant\?"),
        ({"role": "assistant", "contnt": "4"}, r"messages\[1\]\.contnt is not known; did you mean content\?"),
        ({"role": "assistant"}, r"messages\[1\] has no content, and none of tool_calls"),
        ({"role": "assistant", "content": None}, "has no content"),
        (
            {"role": "assistant", "content": {"text": "4"}},
            r"messages\[1\]\.content must be a string or a list of parts",
        ),
        ({"role": "assistant", "content": 4}, r"messages\[1\]\.content must be a string or a list of parts"),
        ({"role": "assistant", "content": "4", "step_loss_maks": 0}, r"did you mean step_loss_mask"),
        ({"role": 3, "content": "4"}, "must be an object with a role"),
    ],
)
def test_a_message_that_says_nothing_or_in_no_ones_name_is_refused(message: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidPayloadError, match=says):
        decode_written_item(item(messages=[USER, message]))


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
        {"role": "assistant", "content": None, "reasoning_content": "hm"},
        {"role": "assistant", "content": ""},
        {"role": "tool", "content": "5", "tool_call_id": "c", "name": "f"},
        {"role": "observation", "content": "5"},
        {"role": "critic", "content": "5", "weight": 0.5, "trainable": False},
        {"role": "user", "content": [{"type": "text", "text": "?"}]},
        {"role": "assistant", "content": "4", "step_loss_mask": 0, "reasoning_details": []},
    ],
)
def test_whatever_templates_take_is_taken(message: dict[str, Any]) -> None:
    assert decode_written_item(item(messages=[USER, message])).body["messages"][1] == message


def test_keys_of_ones_own_are_kept_in_extra_info_and_those_of_a_delivered_item_are_not_read() -> None:
    own = {"label": "4", "rewards": [0, 1], "extra_info": {"label": "four", "source": "s"}}
    delivered = {"group_index": 7, "epoch": 0, "slot": 1, "images": [], "weight_version": None}
    kept = decode_written_item(item(**own, **delivered)).extra_info
    assert {key: kept[key] for key in ("label", "rewards", "source")} == {
        "label": "four",
        "rewards": [0, 1],
        "source": "s",
    }
    assert not delivered.keys() & kept.keys()


def test_an_item_names_its_weights_where_its_tokens_are() -> None:
    written = decode_written_item(item(weight_version=3, generations=[GENERATION]))
    assert [generation.weight_version for generation in written.generations] == ["3"]


def test_of_thousands_of_ones_own_keys_the_first_are_compared_with_the_known_ones() -> None:
    many = {f"option{number}": 0 for number in range(20_000)}
    assert len(decode_written_item({**item(), **many, "rewrd": 1}).extra_info) > 20_000
    with pytest.raises(InvalidPayloadError, match="did you mean raw_reward"):
        decode_written_item({"raw_rewrd": 1, **many, **item()})


@given(st.floats() | st.floats(-2 * ROUNDING, 2 * ROUNDING) | st.integers() | st.booleans())
@example(LOWEST_LOG_PROB)
@example(LOWEST_LOG_PROB * 1.01)
@example(10**400)
def test_a_written_log_prob_is_accepted_exactly_if_one_of_an_engine_is(value: Any) -> None:
    written = item(generations=[{**GENERATION, "output_log_probs": [value]}])
    expected = checked_log_prob(value)
    if expected is None:
        with pytest.raises(InvalidPayloadError, match="output_log_probs"):
            decode_written_item(written)
    else:
        assert decode_written_item(written).generations[0].output_log_probs == [expected]
