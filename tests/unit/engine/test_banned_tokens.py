"""Banned tokens leave no mark on the log-probs of the others, in a sampler that computes as SGLang's does."""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_plugins.rollout_buffer.engine.banned_tokens import ban_bias, with_banned_mass
from slime_plugins.rollout_buffer.engine.sglang_protocol import generate_body, parse_generate_reply
from slime_plugins.rollout_buffer.types import SamplingParams
from tests.example_counts import examples

VOCABULARY = 12
BANNED = frozenset({2, 7, 11})

logits = st.lists(st.floats(-8, 8), min_size=VOCABULARY, max_size=VOCABULARY)


def log_softmax(values: list[float], temperature: float) -> list[float]:
    scaled = [value / temperature for value in values]
    highest = max(scaled)
    return [value - highest - math.log(math.fsum(math.exp(one - highest) for one in scaled)) for value in scaled]


def fp32(value: float) -> float:
    """What is left of a log-prob in SGLang, which takes the logarithm of a softmax in fp32."""
    rounded = struct.unpack("f", struct.pack("f", math.exp(value)))[0]
    return math.log(rounded) if rounded > 1.2e-38 else -3.4e38


def reply_of(token: int, log_probs: list[float], asked: list[int] | None) -> bytes:
    meta: dict[str, Any] = {
        "finish_reason": {"type": "length", "length": 1},
        "completion_tokens": 1,
        "output_token_logprobs": [[min(0.0, log_probs[token]), token, None]],
    }
    if asked is not None:
        meta["output_token_ids_logprobs"] = [[[log_probs[one], one, None] for one in asked]]
    return json.dumps({"output_ids": [token], "meta_info": meta}).encode()


def body_of(params: SamplingParams, banned: frozenset[int] = BANNED) -> dict[str, Any]:
    body = generate_body(input_ids=[1], sampling_params=params, max_new_tokens=1, images=(), rid="r", banned_ids=banned)
    decoded: dict[str, Any] = json.loads(body)
    return decoded


@examples(200)
@given(values=logits, temperature=st.sampled_from([0.2, 0.7, 1.0, 1.3]))
def test_the_log_prob_of_a_token_is_what_it_is_without_the_ban(values: list[float], temperature: float) -> None:
    body = body_of(SamplingParams(max_new_tokens=1, temperature=temperature))
    biased = list(values)
    for token, bias in body["sampling_params"]["logit_bias"].items():
        biased[int(token)] += bias
    sampler = [fp32(value) for value in log_softmax(biased, temperature)]
    token = max(set(range(VOCABULARY)) - BANNED, key=lambda one: values[one])

    part = parse_generate_reply(reply_of(token, sampler, body["token_ids_logprob"]))

    assert part.log_probs[0] == pytest.approx(log_softmax(values, temperature)[token], abs=2e-5)


@examples(50)
@given(values=logits, temperature=st.sampled_from([0.7, 1.0]))
def test_a_banned_token_is_never_sampled(values: list[float], temperature: float) -> None:
    biased = [value + ban_bias(BANNED, temperature).get(str(token), 0.0) for token, value in enumerate(values)]
    log_probs = log_softmax(biased, temperature)
    assert max(log_probs[token] for token in BANNED) < -15.0


def test_an_engine_that_sends_no_log_probs_of_banned_tokens_is_believed() -> None:
    log_probs = log_softmax([0.0] * VOCABULARY, 1.0)
    assert parse_generate_reply(reply_of(3, log_probs, None)).log_probs == (log_probs[3],)
    assert with_banned_mass([-1.0, -2.0], [[[-41.0, 2, None]]]) == (-1.0, -2.0), "one entry for two tokens"


def test_a_token_that_left_fp32_takes_nothing_from_the_others() -> None:
    assert with_banned_mass([-1.0], [[[-3.4028234663852886e38, 2, None], [None, 7, None]]]) == (-1.0,)


def test_the_jobs_own_bias_stays_beside_the_ban() -> None:
    body = body_of(SamplingParams(max_new_tokens=1, extra={"logit_bias": {"5": 1.0, "2": 3.0}}))
    assert body["sampling_params"]["logit_bias"] == {"5": 1.0, "2": -40.0, "7": -40.0, "11": -40.0}
    assert body["token_ids_logprob"] == [2, 7, 11]


def test_without_banned_tokens_nothing_is_asked_for() -> None:
    body = body_of(SamplingParams(max_new_tokens=1), frozenset())
    assert "token_ids_logprob" not in body
    assert "logit_bias" not in body["sampling_params"]


def test_a_greedy_request_is_banned_at_temperature_1() -> None:
    assert set(ban_bias(BANNED, 0.0).values()) == {-40.0}
    body = body_of(SamplingParams(max_new_tokens=1, temperature=0.5, extra={"top_k": 1}))
    assert "token_ids_logprob" not in body, "its log-probs have the temperature of the batch it is in"
