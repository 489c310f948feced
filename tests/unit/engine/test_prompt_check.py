"""What is trained was sampled after the ids that stand before it, whatever the engine made of its prompt."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any
from unittest.mock import Mock

import pytest
from aiohttp import web

from slime.utils.mask_utils import Generation, PromptCheck, PromptReceipt, pack_training_rows
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.engine.base import GenerateReply, GenerateRequest
from slime_plugins.rollout_buffer.engine.prompt_check import NOT_PROVEN, OTHER_LENGTH, RESUMED_ELSEWHERE, PromptChecker
from slime_plugins.rollout_buffer.engine.prompt_probe import EngineFidelity, PromptIntegrity, prompt_probe
from slime_plugins.rollout_buffer.engine.sglang import SglangEngine
from slime_plugins.rollout_buffer.engine.sglang_protocol import parse_probe_reply
from slime_plugins.rollout_buffer.tokenizer_loading import load_tokenizer
from slime_plugins.rollout_buffer.types import Image, SamplingParams
from slime_plugins.rollout_buffer.wire import decode_generations, encode_generations
from tests.unit.engine.test_engine_sglang_client import QUICK, ScriptedSglang, page_of_nginx

TOKENIZER: Any = load_tokenizer(str(DEMO_TOKENIZER_PATH))
CHECKER = PromptChecker(TOKENIZER)
PAD = CHECKER.placeholder_id or 0
START, END = TOKENIZER.convert_tokens_to_ids("<|vision_start|>"), TOKENIZER.convert_tokens_to_ids("<|vision_end|>")
LETTERS = [TOKENIZER.encode(letter, add_special_tokens=False)[0] for letter in "the"]
WORD = TOKENIZER.encode("the", add_special_tokens=False)
PICTURE = Image(data=b"\x89PNG\r\n\x1a\nnone")


def shown(*, run: int = 1) -> list[int]:
    return [START, *[PAD] * run, END]


class TestComparing:
    def test_text_is_equal_id_by_id(self) -> None:
        assert CHECKER.check([1, 2, 3], [1, 2, 3], image_count=0).receipt == PromptReceipt(PromptCheck.EQUAL)

    def test_another_id_in_the_same_place_is_a_difference(self) -> None:
        found = CHECKER.check([1, 2, 3], [1, 9, 3], image_count=0)
        assert (found.receipt.check, found.ran_ids, found.receipt.sent_ids) == ("differing", [1, 9, 3], [1, 2, 3])

    def test_an_image_is_equal_whatever_its_run_is_and_its_length_is_kept(self) -> None:
        sent = [1, *shown(), 2, *shown(), 3]
        ran = [1, *shown(run=4), 2, *shown(run=7), 3]
        assert CHECKER.check(sent, ran, image_count=2).receipt == PromptReceipt(PromptCheck.EQUAL, image_tokens=(4, 7))

    def test_text_beside_an_image_is_compared_and_the_engines_ids_come_back_with_one_placeholder(self) -> None:
        found = CHECKER.check([*LETTERS, *shown(), 3], [*WORD, *shown(run=4), 3], image_count=1)
        assert found.ran_ids == [*WORD, *shown(), 3]
        assert found.receipt.image_tokens == (4,)
        assert not found.receipt.untrained_because

    @pytest.mark.parametrize(
        ("sent", "ran", "images"),
        [
            ([1, *shown(), 3], [1, 3], 1),
            ([1, *shown(), 3], [1, *shown(run=2), *shown(run=2), 3], 1),
            ([1, *shown(run=2), 3], [1, *shown(run=7), 3], 2),
        ],
        ids=["dropped", "doubled", "adjacent"],
    )
    def test_images_whose_tokens_cannot_be_told_apart_train_nothing(
        self, sent: list[int], ran: list[int], images: int
    ) -> None:
        found = CHECKER.check(sent, ran, image_count=images)
        assert found.receipt.check is PromptCheck.DIFFERING
        assert f"blocks of image tokens for {images} images" in found.receipt.untrained_because
        assert found.ran_ids is None

    @pytest.mark.parametrize("ran", [[1, *shown(run=3)], [1, *shown(run=3), 3, 3], [1, START, END, 3]])
    def test_what_is_missing_or_too_much_is_a_difference(self, ran: list[int]) -> None:
        assert CHECKER.check([1, *shown(), 3], ran, image_count=1).receipt.check is PromptCheck.DIFFERING

    def test_a_prompt_encodes_to_itself_or_does_not(self) -> None:
        assert CHECKER.encodes_to_itself([*WORD, *shown(), *WORD])
        assert not CHECKER.encodes_to_itself([*LETTERS, *shown()])

    @pytest.mark.parametrize(
        ("text", "stops", "may"),
        [("a </", ["x", "</s>"], True), ("a </", ["s>"], False), ("é", ["é!"], True), ("a", [], False)],
    )
    def test_a_text_within_a_stop_sequence_is_recognised(self, text: str, stops: list[str], may: bool) -> None:
        assert CHECKER.may_end_within(CHECKER.encoded(text), stops) is may
        assert CHECKER.may_end_within(CHECKER.encoded(text + "观")[:-1], stops) is bool(stops), "within a character"
        assert PromptChecker().may_end_within([1], stops) is bool(stops)


class TestRows:
    def test_a_turn_that_ran_other_ids_begins_a_row_on_the_engines(self) -> None:
        held = [1, 2, *LETTERS, 5]
        ran = [1, 2, *WORD, 5]
        first = Generation([1, 2], LETTERS, [-1.0] * len(LETTERS))
        reply = GenerateReply(
            output_ids=(7,),
            output_log_probs=(-0.5,),
            finish_reason="stop",
            prompt_receipt=PromptReceipt(PromptCheck.DIFFERING, held),
            ran_prompt_ids=ran,
        )
        one, other = pack_training_rows([first, reply.as_generation(held)])
        assert (one.token_ids, sum(one.loss_mask)) == ([1, 2, *LETTERS], len(LETTERS))
        assert (other.token_ids, other.loss_mask) == ([*ran, 7], [0] * len(ran) + [1])

    def test_a_turn_after_a_prompt_that_nobody_knows_is_context(self) -> None:
        unknown = PromptReceipt(PromptCheck.UNKNOWN, untrained_because=NOT_PROVEN)
        turns = [Generation([1], [2], [-1.0]), Generation([1, 2, 3], [4], [-1.0], prompt_receipt=unknown)]
        (row,) = pack_training_rows(turns)
        assert (row.token_ids, row.loss_mask, row.log_probs) == ([1, 2, 3, 4], [0, 1, 0, 0], [0.0, -1.0, 0.0, 0.0])

    def test_receipts_come_through_the_wire(self) -> None:
        receipts = [
            PromptReceipt(PromptCheck.EQUAL, image_tokens=(4, 7)),
            PromptReceipt(PromptCheck.DIFFERING, [1, 2, 8, 8, 5], image_tokens=()),
            PromptReceipt(PromptCheck.UNKNOWN, untrained_because="why"),
            None,
        ]
        turns = tuple(Generation([1, 2, 9, 5], [6], prompt_receipt=receipt) for receipt in receipts)
        encoded = json.loads(json.dumps(encode_generations(turns)))
        assert encoded[1]["prompt_receipt"]["sent"] == {"keep": 2, "ids": [8, 8], "keep_end": 1}
        assert decode_generations(encoded) == turns


class TestTheClient:
    async def test_an_engine_that_says_what_it_ran_is_believed(self) -> None:
        reply = await played([1, *LETTERS], answered([7], prompt=[1, *WORD]))
        assert reply.ran_prompt_ids == [1, *WORD]
        assert reply.prompt_receipt == PromptReceipt(PromptCheck.DIFFERING, [1, *LETTERS])

    async def test_what_an_engine_does_not_say_is_trained_where_it_encodes_to_itself(self) -> None:
        safe, other = await played([*WORD], answered([7])), await played(LETTERS, answered([7]))
        assert safe.prompt_receipt == PromptReceipt(PromptCheck.UNKNOWN)
        assert other.prompt_receipt == PromptReceipt(PromptCheck.UNKNOWN, untrained_because=NOT_PROVEN)

    async def test_ids_that_no_model_has_count_as_not_reported(self) -> None:
        reply = await played([*WORD], answered([7], prompt=[-1]))
        assert reply.prompt_receipt == PromptReceipt(PromptCheck.UNKNOWN)
        answers = [answered([7], prompt=[2**40]), answered([7], input_token_logprobs=[[-1.0, -1, None]])]
        async with engine_of(*answers, prompt_probe=lambda: prompt_probe(TOKENIZER, None)) as engine:
            assert await engine.probe_prompts() == EngineFidelity()

    @pytest.mark.parametrize(
        ("page", "sentence"),
        [
            (lambda: page_of_nginx(200), "nginx/1.24.0 answers /model_info"),
            (lambda: page_of_nginx(404), "nginx/1.24.0 answers /model_info"),
            (lambda: web.Response(text="OK"), "not JSON: OK"),
        ],
    )
    async def test_a_proxy_that_passes_turns_alone_is_named_and_prompts_of_text_are_probed(
        self, page: Callable[[], web.Response], sentence: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        probe = prompt_probe(TOKENIZER, None)
        scripted = ScriptedSglang(
            [web.json_response(answered([7], prompt=list(probe.text.ids)))],
            other_route=page,
        )
        async with engine_on(scripted, prompt_probe=lambda: probe) as engine:
            assert await engine.probe_prompts() == EngineFidelity(text=PromptIntegrity.EXACT)
        assert sentence in caplog.text

    async def test_a_prompt_of_another_length_is_not_trained_even_if_its_ids_are_not_said(self) -> None:
        same, longer = [await played([*WORD], answered([7], prompt_tokens=len(WORD) + more)) for more in (0, 1)]
        assert same.prompt_receipt == PromptReceipt(PromptCheck.UNKNOWN)
        assert longer.prompt_receipt == PromptReceipt(PromptCheck.UNKNOWN, untrained_because=OTHER_LENGTH)

    async def test_a_turn_that_goes_on_after_its_own_tokens_is_equal(self) -> None:
        cut = answered(LETTERS[:2], prompt=[1], finish="abort")
        reply = await played([1], cut, answered([7], prompt=[1, *LETTERS[:2]]))
        assert reply.prompt_receipt == PromptReceipt(PromptCheck.EQUAL)
        assert reply.output_ids == (*LETTERS[:2], 7)

    async def test_a_turn_that_goes_on_after_other_tokens_than_its_own_is_not_trained(self) -> None:
        cut = answered(LETTERS, prompt=[1], finish="abort")
        reply = await played([1], cut, answered([7], prompt=[1, *WORD]))
        assert reply.prompt_receipt == PromptReceipt(PromptCheck.DIFFERING, untrained_because=RESUMED_ELSEWHERE)

    async def test_an_abort_before_the_first_token_leaves_the_receipt_equal(self) -> None:
        nothing = answered([], finish="abort", completion_tokens=0)
        reply = await played([1], nothing, answered([7], prompt=[1]))
        assert reply.prompt_receipt == PromptReceipt(PromptCheck.EQUAL)


def test_the_finding_on_ids_that_the_tokenizer_cannot_decode_names_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = prompt_probe(TOKENIZER, None)
    monkeypatch.setattr(probe.checker, "decoded", Mock(side_effect=IndexError("piece id is out of range")))
    fidelity = probe.verdict([(probe.text, [1, 2])])
    assert fidelity.complaint == (
        "runs other ids than it is sent of prompts of text, on which the tokenizer fails: "
        "IndexError('piece id is out of range')"
    )


def answered(ids: list[int], *, prompt: list[int] | None = None, finish: str = "stop", **meta: Any) -> dict[str, Any]:
    entries = [[-0.5, token_id, None] for token_id in ids]
    told = {} if prompt is None else {"prompt_token_ids": prompt}
    meta_info = {"finish_reason": {"type": finish}, "output_token_logprobs": entries, **meta}
    return {"output_ids": ids, "meta_info": meta_info, **told}


async def played(prompt: list[int], *answers: dict[str, Any]) -> GenerateReply:
    request = GenerateRequest(input_ids=prompt, sampling_params=SamplingParams(max_new_tokens=20), session_id="one")
    async with engine_of(*answers) as engine:
        return await engine.generate(request)


def engine_of(*answers: dict[str, Any], **options: Any) -> AbstractAsyncContextManager[SglangEngine]:
    return engine_on(ScriptedSglang([web.json_response(answer) for answer in answers]), **options)


@asynccontextmanager
async def engine_on(scripted: ScriptedSglang, **options: Any) -> AsyncIterator[SglangEngine]:
    async with scripted.serving() as url:
        engine = SglangEngine(url, QUICK, prompts=CHECKER, **options)
        try:
            yield engine
        finally:
            await engine.close()


@pytest.mark.parametrize(
    ("status", "body"), [(404, b'{"detail":"Not Found"}'), (400, b'{"error": {}}'), (500, b"Internal Server Error")]
)
def test_an_engine_that_refuses_the_prompt_probe_itself_reports_no_ids(status: int, body: bytes) -> None:
    assert parse_probe_reply(status, body) is None
