"""Kept ids and experts that an engine tells reach the right token over turns, edits and resumed parts."""

from __future__ import annotations

import base64
import random
import threading
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from slime.utils.mask_rows import ROUTED_EXPERTS, TOP_P_TOKENS, RecordBytes, TokenRecords, joined_records
from slime_plugins.rollout_buffer.engine import http_engine, sglang
from slime_plugins.rollout_buffer.engine.base import GenerateReply, GenerateRequest
from slime_plugins.rollout_buffer.engine.sglang import SglangEngine
from slime_plugins.rollout_buffer.engine.sglang_protocol import SampledPart, parse_generate_reply
from slime_plugins.rollout_buffer.engine.token_records import why_misplaced
from slime_plugins.rollout_buffer.errors import EngineError
from slime_plugins.rollout_buffer.types import SamplingParams
from tests.unit.engine.test_engine_sglang_client import QUICK, ScriptedSglang, answered

WIDTH = 3
KEEP = {"return_top_p_token_ids": True}


def experts(start: int, end: int, *, by: int = 0) -> str:
    """Experts of the passes from ``start`` to ``end``, each of them different; ``by`` tells who routed."""
    numbers = [by * 100 + (place * WIDTH + at) % 90 for place in range(start, end) for at in range(WIDTH)]
    return base64.b64encode(array("i", numbers).tobytes()).decode()


def kept(*spans: Sequence[int]) -> dict[str, Any]:
    ids = [one for span in spans for one in span]
    offsets = [sum(map(len, spans[:at])) for at in range(len(spans) + 1)]
    return {
        "top_p_token_ids": base64.b64encode(array("i", ids).tobytes()).decode(),
        "top_p_token_offsets": base64.b64encode(array("i", offsets).tobytes()).decode(),
    }


def routed(prompt: int, ids: list[int], *, start: int = 0, by: int = 0, **more: Any) -> dict[str, Any]:
    passes = experts(start, prompt + len(ids) - 1, by=by)
    return {"prompt_tokens": prompt, "routed_experts": passes, "routed_experts_start_len": start, **more}


def asking(
    ids: Sequence[int], *, session: str = "s", banned: frozenset[int] = frozenset(), **extra: Any
) -> GenerateRequest:
    params = SamplingParams(max_new_tokens=20, top_p=0.9, extra=extra)
    return GenerateRequest(input_ids=ids, sampling_params=params, session_id=session, banned_ids=banned)


async def play(answers: list[Any], requests: list[GenerateRequest]) -> tuple[list[GenerateReply], list[dict[str, Any]]]:
    server = ScriptedSglang(answers)
    async with server.serving() as url:
        engine = SglangEngine(url, QUICK, randomness=random.Random(0))
        try:
            return [await engine.generate(request) for request in requests], server.bodies
        finally:
            await engine.close()


class TestKeptIds:
    async def test_each_sampled_token_has_the_ids_that_top_p_kept_for_it(self) -> None:
        answer = answered([7, 8], prompt_tokens=3, **kept([7, 70_000], [8]))
        (reply,), (body,) = await play([answer], [asking([1, 2, 3], custom_params=KEEP)])
        records = reply.records[TOP_P_TOKENS]
        assert [list(one) for one in records.split()] == [[7, 70_000], [8]]
        assert (records.start, records.end) == (3, 5)
        assert body["sampling_params"]["custom_params"] == KEEP

    async def test_a_resumed_turn_keeps_those_of_both_parts(self) -> None:
        parts = [
            answered([7], finish="abort", prompt_tokens=3, **kept([7, 9])),
            answered([8], prompt_tokens=4, **kept([8, 5, 6])),
        ]
        (reply,), _ = await play(parts, [asking([1, 2, 3], custom_params=KEEP)])
        assert [list(one) for one in reply.records[TOP_P_TOKENS].split()] == [[7, 9], [8, 5, 6]]

    async def test_the_log_probs_of_kept_ids_are_not_corrected_for_a_ban(self) -> None:
        answer = answered([7], prompt_tokens=3, **kept([7]))
        request = asking([1, 2, 3], banned=frozenset({5}), custom_params=KEEP)
        _, (body,) = await play([answer], [request])
        assert "token_ids_logprob" not in body
        assert "5" in body["sampling_params"]["logit_bias"]

    @pytest.mark.parametrize(
        "meta",
        [
            {**kept([7], [8]), "top_p_token_offsets": [0, 1]},
            {**kept([7], [8]), "top_p_token_offsets": [0, 2, 1]},
            {**kept([7], [8]), "top_p_token_offsets": [0, 1, 3]},
            {**kept([7], [8]), "top_p_token_offsets": None},
            {**kept([7], [8]), "top_p_token_ids": "no base64!"},
            {**kept([7], [8]), "top_p_token_ids": [-1, 8]},
            {**kept([7], [8]), "prompt_tokens": None},
        ],
    )
    async def test_spans_that_do_not_fit_the_sampled_tokens_are_the_engines_error(self, meta: dict[str, Any]) -> None:
        with pytest.raises(EngineError, match="engine"):
            await play([answered([7, 8], **meta)], [asking([1, 2, 3], custom_params=KEEP)])


async def test_a_long_reply_is_read_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def noted(body: bytes) -> SampledPart:
        threads.append(threading.current_thread() is threading.main_thread())
        return parse_generate_reply(body)

    monkeypatch.setattr(sglang, "parse_generate_reply", noted)
    await play([answered([7])], [asking([1])])
    monkeypatch.setattr(http_engine, "MAX_BYTES_PARSED_ON_LOOP", 10)
    await play([answered([7])], [asking([1])])
    assert threads == [True, False]


class TestExperts:
    async def test_a_first_turn_has_those_of_every_token_but_the_first(self) -> None:
        answer = answered([7, 8], **routed(3, [7, 8]))
        (reply,), (body,) = await play([answer], [asking([1, 2, 3], return_routed_experts=True)])
        records = reply.records[ROUTED_EXPERTS]
        assert (records.start, records.end, records.width, records.itemsize) == (1, 5, WIDTH, 1)
        assert (body["return_routed_experts"], body["routed_experts_start_len"]) == (True, 0)
        assert "return_routed_experts" not in body["sampling_params"]

    async def test_a_turn_that_goes_on_is_asked_for_what_was_not_told_yet(self) -> None:
        answers = [answered([7, 8], **routed(3, [7, 8])), answered([11], **routed(6, [11], start=4))]
        turns = [asking(ids, return_routed_experts=True) for ids in ([1, 2, 3], [1, 2, 3, 7, 8, 9])]
        (first, second), bodies = await play(answers, turns)
        assert bodies[1]["routed_experts_start_len"] == 4
        both = joined_records([first.records[ROUTED_EXPERTS], second.records[ROUTED_EXPERTS]])
        assert both.values == TokenRecords.of_int32(1, base64.b64decode(experts(0, 6)), width=WIDTH).values

    @pytest.mark.parametrize(
        ("ids", "session"), [([1, 2, 4, 7, 8, 9], "s"), ([1, 2, 3], "s"), ([1, 2, 3, 7, 8, 9], "another")]
    )
    async def test_an_edited_prompt_or_another_session_is_asked_for_everything(
        self, ids: list[int], session: str
    ) -> None:
        answers = [answered([7, 8], **routed(3, [7, 8])), answered([11], **routed(len(ids), [11]))]
        requests = [
            asking([1, 2, 3], return_routed_experts=True),
            asking(ids, session=session, return_routed_experts=True),
        ]
        _, bodies = await play(answers, requests)
        assert bodies[1]["routed_experts_start_len"] == 0

    @pytest.mark.parametrize("start", [0, 4])
    async def test_of_a_resumed_turn_each_token_has_the_experts_that_sampled_it(self, start: int) -> None:
        """The second part may tell those of the first again, by other weights."""
        parts = [
            answered([7, 8], finish="abort", **routed(3, [7, 8])),
            answered([9, 10], **routed(5, [9, 10], start=start, by=1)),
        ]
        (reply,), bodies = await play(parts, [asking([1, 2, 3], return_routed_experts=True)])
        by = [record[0] >= 100 for record in reply.records[ROUTED_EXPERTS].split()]
        assert by == [False] * 4 + [True] * 2
        assert bodies[1]["routed_experts_start_len"] == 4

    @pytest.mark.parametrize(
        "meta",
        [
            {"routed_experts": experts(0, 3)},  # one pass too few for 3 + 2 tokens
            {"routed_experts_start_len": 9},
            {"routed_experts_start_len": "x"},
            {"routed_experts": base64.b64encode(array("i", [70_000] * 12).tobytes()).decode()},
            {"routed_experts": base64.b64encode(array("i", [-1] * 12).tobytes()).decode()},
            {"routed_experts": ""},
            {"prompt_tokens": None},
        ],
    )
    async def test_experts_that_do_not_fit_the_tokens_are_the_engines_error(self, meta: dict[str, Any]) -> None:
        answer = answered([7, 8], **{**routed(3, [7, 8]), **meta})
        with pytest.raises(EngineError, match="engine"):
            await play([answer], [asking([1, 2, 3], return_routed_experts=True)])

    async def test_a_gap_between_the_parts_of_a_turn_is_the_engines_error(self) -> None:
        parts = [
            answered([7, 8], finish="abort", **routed(3, [7, 8])),
            answered([9, 10], **routed(5, [9, 10], start=5)),
        ]
        with pytest.raises(EngineError, match="gap"):
            await play(parts, [asking([1, 2, 3], return_routed_experts=True)])

    async def test_another_number_of_experts_in_the_same_session_is_the_engines_error(self) -> None:
        twice = base64.b64encode(array("i", [1] * 2 * WIDTH * 2).tobytes()).decode()
        answers = [
            answered([7, 8], **routed(3, [7, 8])),
            answered([11], **routed(6, [11], start=4) | {"routed_experts": twice}),
        ]
        turns = [asking(ids, return_routed_experts=True) for ids in ([1, 2, 3], [1, 2, 3, 7, 8, 9])]
        with pytest.raises(EngineError, match="6 experts per token, after 3 in earlier turns"):
            await play(answers, turns)


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"return_routed_experts": True}, "--enable-return-routed-experts"),
        ({"custom_params": KEEP}, "set top_p to 1"),
    ],
)
async def test_an_engine_that_does_not_answer_what_was_asked_is_refused(extra: dict[str, Any], says: str) -> None:
    with pytest.raises(EngineError, match=says):
        await play([answered([7])], [asking([1, 2, 3], **extra)])


def test_probes_of_one_length_whose_experts_differ_in_number_are_a_finding() -> None:
    narrow, wide = (TokenRecords.of_int32(1, bytes(4 * 16 * width), width=width) for width in (WIDTH, 2 * WIDTH))
    assert "of different sizes" in why_misplaced([narrow, narrow, narrow, wide])


class TestAsBytes:
    @pytest.mark.parametrize(("largest", "itemsize"), [(255, 1), (256, 2), (65_535, 2), (65_536, 4)])
    def test_numbers_take_as_few_bytes_as_they_need(self, largest: int, itemsize: int) -> None:
        numbers = [0, largest, 3, 4]
        records = TokenRecords.of_int32(1, array("i", numbers).tobytes(), width=2)
        assert (records.itemsize, records.numbers().tolist()) == (itemsize, numbers)
        assert TokenRecords.decode(records.encode()) == records

    def test_parts_and_their_joint_are_what_they_were_before(self) -> None:
        for records in (
            TokenRecords.of_int32(5, array("i", range(12)).tobytes(), width=2),
            TokenRecords.of_int32(5, array("i", range(400)).tobytes(), ends=(0, 1, 1, 300, 400)),
        ):
            for at in range(5, records.end + 1):
                head, tail = records.part(0, at), records.part(at, 99)
                assert (len(head), tail.start) == (at - 5, at)
                assert joined_records([head, tail]) == records
                assert TokenRecords.decode(tail.encode()) == tail

    def test_parts_of_other_sizes_are_widened(self) -> None:
        narrow = TokenRecords.of_int32(1, array("i", [1, 2]).tobytes(), width=1)
        wide = TokenRecords.of_int32(3, array("i", [300, 70_000]).tobytes(), width=1)
        assert joined_records([narrow, wide]).numbers().tolist() == [1, 2, 300, 70_000]

    @pytest.mark.parametrize("spoil", [lambda data: data[:-1], lambda data: b"x" + data[1:], lambda data: data[:9]])
    def test_bytes_that_are_cut_or_other_are_refused(self, spoil: Callable[[bytes], bytes]) -> None:
        records = TokenRecords.of_int32(5, array("i", range(4)).tobytes(), ends=(1, 4))
        with pytest.raises(ValueError, match=r"token records|bytes are not whole"):
            TokenRecords.decode(spoil(records.encode()))

    def test_a_turn_that_is_cut_loses_the_records_of_what_was_cut_off(self) -> None:
        reply = GenerateReply(
            output_ids=(7, 8, 9),
            output_log_probs=(-1.0, -1.0, -1.0),
            finish_reason="stop",
            records={
                ROUTED_EXPERTS: TokenRecords.of_int32(1, array("i", range(5)).tobytes(), width=1),
                TOP_P_TOKENS: TokenRecords.of_int32(3, array("i", [7, 8, 9]).tobytes(), ends=(1, 2, 3)),
            },
        )
        records = reply.as_generation([1, 2, 3], length=1).records
        found = {kind: TokenRecords.decode(one.data or b"") for kind, one in records.items()}
        assert found[ROUTED_EXPERTS].numbers().tolist() == [0, 1, 2]
        assert found[TOP_P_TOKENS].numbers().tolist() == [7]
        assert records[TOP_P_TOKENS] == RecordBytes.of(found[TOP_P_TOKENS])
