"""The SGLang client against a scripted HTTP server on loopback: what it sends, what it survives, what it refuses."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port

from slime_plugins.rollout_buffer.engine import sglang
from slime_plugins.rollout_buffer.engine.base import EngineLoad, GenerateReply, GenerateRequest
from slime_plugins.rollout_buffer.engine.settings import EngineSettings
from slime_plugins.rollout_buffer.engine.sglang import SglangEngine
from slime_plugins.rollout_buffer.engine.tokenizer_probe import TokenizerProbe
from slime_plugins.rollout_buffer.errors import ConfigError, EngineError
from slime_plugins.rollout_buffer.types import (
    EngineReport,
    EngineTrouble,
    Image,
    PromptCheck,
    PromptReceipt,
    SamplingParams,
    WeightVersionSpan,
)
from tests.waiting import until

QUICK = EngineSettings(retry_timeout_s=20.0, deadline_s=40.0, backoff_first_s=0.01, backoff_longest_s=0.02)

Answer = web.Response | Callable[[], Awaitable[web.Response]]


@dataclass
class ScriptedSglang:
    """Answers ``/generate`` from a list and remembers what it was sent."""

    answers: list[Answer]
    bodies: list[dict[str, Any]] = field(default_factory=list)
    sessions: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    worker_urls: list[str] | None = None
    tokenize_answers: list[web.Response] = field(default_factory=list)
    tokenized: list[dict[str, Any]] = field(default_factory=list)
    other_route: Callable[[], web.Response] = lambda: web.json_response({"detail": "Not Found"}, status=404)

    async def model_info(self, _: web.Request) -> web.Response:
        return self.other_route()

    async def tokenize(self, request: web.Request) -> web.Response:
        self.tokenized.append(await request.json())
        return self.tokenize_answers.pop(0)

    async def generate(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        self.sessions.append(request.headers.get("X-SMG-Routing-Key", ""))
        answer = self.answers.pop(0)
        return answer if isinstance(answer, web.Response) else await answer()

    async def abort(self, request: web.Request) -> web.Response:
        self.aborted.append((await request.json())["rid"])
        return web.Response()

    async def workers(self, _: web.Request) -> web.Response:
        if self.worker_urls is None:
            return self.other_route()
        return web.json_response({"workers": [{"url": url, "is_healthy": True} for url in self.worker_urls]})

    @asynccontextmanager
    async def serving(self, port: int | None = None) -> AsyncIterator[str]:
        application = web.Application()
        application.router.add_post("/generate", self.generate)
        application.router.add_post("/abort_request", self.abort)
        application.router.add_get("/workers", self.workers)
        for route in sglang.MODEL_ROUTES:
            application.router.add_get(route, self.model_info)
        if self.tokenize_answers:
            application.router.add_post("/tokenize", self.tokenize)
        async with TestServer(application, port=port) as server:
            yield str(server.make_url("")).rstrip("/")


def answered(
    ids: list[int],
    *,
    finish: str | dict[str, Any] = "stop",
    version: str = "3",
    output_ids: list[int] | None = None,
    status: int = 200,
    **meta: Any,
) -> web.Response:
    meta_info = {
        "finish_reason": {"type": finish} if isinstance(finish, str) else finish,
        "weight_version": version,
        "prompt_tokens": 3,
        "cached_tokens": 64,
        "output_token_logprobs": [[-0.5 - token_id / 1000, token_id, None] for token_id in ids],
        **meta,
    }
    body = {"text": "", "output_ids": ids if output_ids is None else output_ids, "meta_info": meta_info}
    return web.json_response(body, status=status)


def without_output_ids(ids: list[int], **meta: Any) -> web.Response:
    """A reply of which only the log-probs say what was sampled."""
    body = json.loads(str(answered(ids, **meta).text))
    return web.json_response({key: value for key, value in body.items() if key != "output_ids"})


def turn(max_new_tokens: int = 20, images: tuple[Image, ...] = (), **extra: Any) -> GenerateRequest:
    return GenerateRequest(
        input_ids=[1, 2, 3],
        sampling_params=SamplingParams(max_new_tokens=max_new_tokens, temperature=0.7, top_p=0.9, extra=extra),
        session_id="job/1/0",
        images=images,
    )


async def play(
    *answers: Answer, request: GenerateRequest | None = None, settings: EngineSettings = QUICK
) -> tuple[GenerateReply, ScriptedSglang]:
    server = ScriptedSglang(list(answers))
    async with server.serving() as url:
        engine = SglangEngine(url, settings, randomness=random.Random(0))
        try:
            return await engine.generate(request or turn()), server
        finally:
            await engine.close()


def never() -> Callable[[], Awaitable[web.Response]]:
    async def hold() -> web.Response:
        await asyncio.sleep(3600)
        raise AssertionError("held for ever")

    return hold


class TestWhatIsSent:
    async def test_ids_and_sampling_parameters_go_in_sglangs_words(self) -> None:
        _, server = await play(answered([7]), request=turn(20, max_tokens=5, top_k=4, stop_token_ids=[9]))
        (body,) = server.bodies
        rid = body.pop("rid")
        assert len(rid) == 32
        assert int(rid, 16) >= 0
        assert body == {
            "input_ids": [1, 2, 3],
            "return_logprob": True,
            "return_prompt_token_ids": True,
            "sampling_params": {
                "max_new_tokens": 20,
                "temperature": 0.7,
                "top_p": 0.9,
                "top_k": 4,
                "stop_token_ids": [9],
                "skip_special_tokens": False,
                "spaces_between_special_tokens": False,
                "no_stop_trim": True,
            },
        }

    async def test_images_go_as_data_uris_in_order(self) -> None:
        images = (Image(data=b"first"), Image(data=b"second", media_type="image/jpeg"))
        _, server = await play(answered([7]), request=turn(images=images))
        assert server.bodies[0]["image_data"] == [
            "data:image/png;base64," + base64.b64encode(b"first").decode(),
            "data:image/jpeg;base64," + base64.b64encode(b"second").decode(),
        ]

    async def test_a_turn_without_tokens_left_needs_no_call(self) -> None:
        reply, server = await play(request=turn(max_new_tokens=0))
        assert (reply.output_ids, reply.finish_reason, server.bodies) == ((), "length", [])


class TestWhatComesBack:
    async def test_ids_and_log_probs_are_those_of_the_engine(self) -> None:
        reply, _ = await play(answered([7, 8, 9], finish="length"))
        assert reply == GenerateReply(
            output_ids=(7, 8, 9),
            output_log_probs=(-0.507, -0.508, -0.509),
            finish_reason="length",
            weight_version="3",
            weight_version_spans=(WeightVersionSpan("3", 0, 3),),
            prompt_tokens=3,
            cached_tokens=64,
            prompt_receipt=PromptReceipt(PromptCheck.UNKNOWN),
        )
        assert reply.engine_s is not None
        assert reply.as_generation([1]).engine_s == reply.engine_s

    async def test_versions_per_token_win_over_the_version_of_the_reply(self) -> None:
        spans = [{"version": "7", "start": 0, "end": 2}, {"version": "8", "start": 2, "end": 3}]
        reply, _ = await play(answered([7, 8, 9], version="8", weight_versions=spans))
        assert reply.weight_version_spans == (WeightVersionSpan("7", 0, 2), WeightVersionSpan("8", 2, 3))
        assert reply.weight_version == "8"

    @pytest.mark.parametrize(
        "spans",
        [
            *([{"version": "7", "start": 0, "end": end}] for end in (2, float("inf"), float("nan"), "many", None)),
            [{"start": 0}],
            "new",
            [7],
        ],
    )
    async def test_versions_that_do_not_fit_the_output_are_not_used(self, spans: Any) -> None:
        reply, _ = await play(answered([7, 8, 9], weight_versions=spans))
        assert reply.weight_version_spans == (WeightVersionSpan("3", 0, 3),)

    async def test_an_engine_without_versions_gives_none(self) -> None:
        reply, _ = await play(answered([7, 8], weight_version=None))
        assert (reply.weight_version, reply.weight_version_spans) == (None, ())


class TestAborts:
    async def test_a_partial_output_is_kept_and_continued(self) -> None:
        first = answered([7, 8], finish="abort", version="3")
        reply, server = await play(first, answered([9], version="4", prompt_tokens=72, cached_tokens=72))
        assert server.bodies[1]["input_ids"] == [1, 2, 3, 7, 8]
        assert server.bodies[1]["sampling_params"]["max_new_tokens"] == 18
        assert server.bodies[1]["rid"] != server.bodies[0]["rid"]
        assert server.sessions == ["job/1/0"] * 2
        assert reply.output_ids == (7, 8, 9)
        assert reply.output_log_probs == (-0.507, -0.508, -0.509)
        assert reply.weight_version_spans == (WeightVersionSpan("3", 0, 2), WeightVersionSpan("4", 2, 3))
        assert (reply.finish_reason, reply.weight_version) == ("stop", "4")
        assert (reply.prompt_tokens, reply.cached_tokens) == (3, 64)

    @pytest.mark.parametrize("lost", [{"json_schema": "{}"}, {"regex": "a+"}, {"stop": "\n"}])
    async def test_a_part_whose_state_the_engine_lost_is_sampled_again(self, lost: dict[str, Any]) -> None:
        parts = [answered([7, 8], finish="abort"), answered([], finish="abort"), answered([9])]
        reply, server = await play(*parts, request=turn(**lost))
        assert [body["input_ids"] for body in server.bodies] == [[1, 2, 3]] * 3
        assert (reply.output_ids, server.bodies[2]["sampling_params"]["max_new_tokens"]) == ((9,), 20)

    async def test_an_abort_without_a_change_of_weights_leaves_one_span(self) -> None:
        reply, _ = await play(answered([7, 8], finish="abort"), answered([9]))
        assert reply.weight_version_spans == (WeightVersionSpan("3", 0, 3),)

    async def test_an_abort_in_the_queue_has_no_output_to_keep(self) -> None:
        queued = web.json_response(
            {"text": "", "output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}, "completion_tokens": 0}}
        )
        reply, server = await play(queued, answered([9]))
        assert reply.output_ids == (9,)
        assert server.bodies[1]["input_ids"] == [1, 2, 3]

    async def test_an_abort_at_the_cap_is_a_cut_turn(self) -> None:
        reply, server = await play(answered([7, 8], finish="abort"), request=turn(max_new_tokens=2))
        assert (reply.output_ids, reply.finish_reason, len(server.bodies)) == ((7, 8), "length", 1)

    async def test_an_abort_as_http_503_keeps_what_it_carries(self) -> None:
        carrying = answered([7, 8], finish="abort", status=503)
        reply, server = await play(carrying, answered([9]))
        assert reply.output_ids == (7, 8, 9)
        assert server.bodies[1]["input_ids"] == [1, 2, 3, 7, 8]

    async def test_an_abort_that_blames_the_request_is_not_repeated(self) -> None:
        refused = answered([], finish={"type": "abort", "message": "no room for that", "status_code": 400})
        with pytest.raises(EngineError, match="no room for that"):
            await play(refused)

    async def test_endless_aborts_without_output_end_with_the_timeout(self) -> None:
        settings = EngineSettings(retry_timeout_s=0.05, backoff_first_s=0.01, backoff_longest_s=0.01)
        with pytest.raises(EngineError, match="aborted the request"):
            await play(*[answered([], finish="abort") for _ in range(50)], settings=settings)


class TestRetries:
    @pytest.mark.parametrize("status", [408, 429, 502, 503, 504])
    async def test_a_passing_refusal_is_ridden_out(self, status: int) -> None:
        busy = [web.json_response({"error": {"message": "busy"}}, status=status) for _ in range(4)]
        reply, server = await play(*busy, answered([7]))
        assert reply.output_ids == (7,)
        assert len({body["rid"] for body in server.bodies}) == 5

    async def test_retries_end_after_their_timeout_with_the_last_refusal(self) -> None:
        settings = EngineSettings(retry_timeout_s=0.05, backoff_first_s=0.01, backoff_longest_s=0.01)
        busy = [web.json_response({"detail": "queue is full"}, status=503) for _ in range(50)]
        with pytest.raises(EngineError, match=r"HTTP 503: queue is full \(\d+ tries"):
            await play(*busy, settings=settings)

    async def test_a_server_error_is_tried_a_few_times_only(self) -> None:
        broken = [web.Response(status=500, text="Internal Server Error") for _ in range(QUICK.server_error_tries)]
        server = ScriptedSglang([*broken, answered([7])])
        async with server.serving() as url:
            engine = SglangEngine(url, QUICK)
            with pytest.raises(EngineError, match="HTTP 500: Internal Server Error"):
                await engine.generate(turn())
            await engine.close()
        *tries, question = server.bodies
        assert len(tries) == QUICK.server_error_tries
        assert question["sampling_params"]["max_new_tokens"] == 1, "others are answered: the request is to blame"

    async def test_one_server_error_is_survived(self) -> None:
        reply, server = await play(web.Response(status=500), answered([7]))
        assert (reply.output_ids, len(server.bodies)) == ((7,), 2)

    async def test_a_server_error_that_everybody_gets_is_waited_out(self) -> None:
        broken = [web.Response(status=500, text="Internal Server Error") for _ in range(20)]
        reply, server = await play(*broken, answered([7]))
        assert reply.output_ids == (7,)
        assert len(server.bodies) == 21

    @pytest.mark.parametrize(
        "body",
        [
            {"error": {"message": "The input is too long"}},
            {"error": "The input is too long"},
            {"object": "error", "message": "The input is too long", "code": 400},
            {"detail": "The input is too long"},
        ],
    )
    async def test_the_engines_own_sentence_ends_a_wrong_request_at_once(self, body: dict[str, Any]) -> None:
        server = ScriptedSglang([web.json_response(body, status=400), answered([7])])
        async with server.serving() as url:
            engine = SglangEngine(url, QUICK)
            with pytest.raises(EngineError, match=r"refused the request: The input is too long$") as caught:
                await engine.generate(turn())
            await engine.close()
        assert len(server.bodies) == 1
        assert caught.value.detail == {"status": 400}

    async def test_an_engine_that_starts_late_is_waited_for(self) -> None:
        port = unused_port()
        engine = SglangEngine(f"http://127.0.0.1:{port}", QUICK)
        running = asyncio.create_task(engine.generate(turn()))
        await asyncio.sleep(0.05)
        async with ScriptedSglang([answered([7])]).serving(port):
            assert (await running).output_ids == (7,)
        await engine.close()


class TestNonsense:
    @pytest.mark.parametrize(
        ("answer", "complaint"),
        [
            (web.json_response({"output_ids": [7], "meta_info": {"finish_reason": {"type": "stop"}}}), "logprobs"),
            (answered([7, 8], output_ids=[7]), "1 output ids and log-probs of 2"),
            (without_output_ids([7, 8], completion_tokens=5), "5 sampled tokens, but sent log-probs of 2"),
            (answered([7, 8], output_ids=[7, 9]), "do not belong together"),
            (answered([7], output_token_logprobs=[[None, 7, None]]), "not a finite number"),
            (
                web.Response(text=json.dumps({"meta_info": {"output_token_logprobs": [[float("nan"), 7]]}})),
                "is nan, not",
            ),
            (web.Response(text='{"meta_info": {"output_token_logprobs": [[-1e999, 7]]}}'), "is -inf, not"),
            (web.Response(text='{"meta_info": {"output_token_logprobs": [[-1e99, 7]]}}'), "is -1e[+]99, not"),
            (answered([7], output_token_logprobs=[[0.5, 7, None]]), "is 0.5, not a finite number of at most 0"),
            (answered([7], output_token_logprobs=[["-0.5", 7, None]]), "not a finite number"),
            (answered([10**12]), "the token id 1000000000000, which is not in the vocabulary$"),
            (answered([2**24]), "not in the vocabulary"),
            (answered([-1]), "the token id -1, which is not in the vocabulary"),
            (answered([7] * 21), "21 tokens for a limit of 20"),
            (answered([7] * 5021), "5021 tokens for a limit of 20"),
            (answered([]), "no token and finish_reason 'stop'"),
            (answered([], finish="length"), "no token and finish_reason 'length'"),
            (answered([7], output_token_logprobs=[[-0.1, "7", None]]), "not \\[log-prob, id, text\\]"),
            (answered([7], output_token_logprobs=[[-0.1, True, None]]), "not \\[log-prob, id, text\\]"),
            (answered([7], output_token_logprobs=[7]), "not \\[log-prob, id, text\\]"),
            (answered([7], finish="tired"), "finish_reason"),
            (answered([7], finish_reason=None), "finish_reason"),
        ],
    )
    async def test_a_reply_that_cannot_be_trained_on_is_an_error(self, answer: web.Response, complaint: str) -> None:
        with pytest.raises(EngineError, match=complaint):
            await play(answer)

    @pytest.mark.parametrize(("token", "is_taken"), [(151_935, True), (151_936, False)])
    async def test_an_id_of_the_vocabularys_padding_is_taken_and_none_beyond(self, token: int, is_taken: bool) -> None:
        server = ScriptedSglang([answered([token])])
        async with server.serving() as url:
            engine = SglangEngine(url, QUICK, vocabulary_size=151_936)
            (outcome,) = await asyncio.gather(engine.generate(turn()), return_exceptions=True)
            await engine.close()
        if is_taken:
            assert isinstance(outcome, GenerateReply)
        else:
            assert isinstance(outcome, EngineError)
            assert "151936, which is not in the vocabulary of 151936 ids" in outcome.message

    async def test_log_probs_alone_say_what_was_sampled_where_nothing_contradicts_them(self) -> None:
        for meta in ({}, {"completion_tokens": 2}):
            reply, _ = await play(without_output_ids([7, 8], **meta))
            assert reply.output_ids == (7, 8)

    @pytest.mark.parametrize("count", [-1, 2**70, 1.5, "70", True])
    async def test_a_count_of_tokens_that_is_no_count_is_left_out(self, count: Any) -> None:
        """It would be written as JSON with the trajectory, which has no number so large."""
        reply, _ = await play(answered([7], prompt_tokens=count, cached_tokens=count))
        assert (reply.prompt_tokens, reply.cached_tokens) == (None, None)

    async def test_the_cap_holds_over_all_parts_of_a_turn(self) -> None:
        with pytest.raises(EngineError, match="19 tokens for a limit of 18"):
            await play(answered([7, 8], finish="abort"), answered([7] * 19))

    async def test_rounding_above_zero_is_a_log_prob_of_zero(self) -> None:
        reply, _ = await play(answered([7], output_token_logprobs=[[1e-6, 7, None]]))
        assert reply.output_log_probs == (0.0,)

    @pytest.mark.parametrize("url", ["", "localhost:30000", "http://", "ftp://host"])
    def test_an_address_that_is_no_http_url_is_refused(self, url: str) -> None:
        with pytest.raises(ConfigError, match="http://host:port"):
            SglangEngine(url)


def page_of_nginx(status: int = 404) -> web.Response:
    page = "<html><head><title>404 Not Found</title></head></html>"
    return web.Response(text=page, status=status, content_type="text/html", headers={"Server": "nginx/1.24.0"})


PROBE = TokenizerProbe(text="Hello", ids=(5, 6, 7))


async def turns_with_probe(answers: list[Answer], tokenize: list[web.Response], turns: int = 2) -> ScriptedSglang:
    """Plays turns through a client that compares tokenizers; an error of the last one is raised."""
    server = ScriptedSglang(answers, tokenize_answers=tokenize)
    async with server.serving() as url:
        engine = SglangEngine(url, QUICK, tokenizer_probe=PROBE)
        try:
            for _ in range(turns - 1):
                with contextlib.suppress(EngineError):
                    await engine.generate(turn())
            await engine.generate(turn())
        finally:
            await engine.close()
    return server


class TestTokenizer:
    async def test_an_engine_with_another_tokenizer_is_sent_no_prompt(self) -> None:
        server = ScriptedSglang([], tokenize_answers=[web.json_response({"tokens": [5, 9, 7]})])
        async with server.serving() as url:
            engine = SglangEngine(url, QUICK, tokenizer_probe=PROBE)
            for _ in range(2):
                with pytest.raises(EngineError, match=r"another tokenizer.*token 1 is 9 instead of 6.*tokenizer_path"):
                    await engine.generate(turn())
            await engine.close()
        assert server.bodies == []
        assert server.tokenized == [{"prompt": "Hello", "add_special_tokens": False}]

    @pytest.mark.parametrize("odd", [None, b"", b"[]", b"null", b'{"tokens": 5}', b"[" * 100_000])
    async def test_an_engine_with_a_tokenize_route_that_answers_nonsense_or_with_none_is_accepted(
        self, odd: bytes | None
    ) -> None:
        tokenize = [] if odd is None else [web.Response(body=odd)]
        server = await turns_with_probe([answered([7]), answered([7])], tokenize)
        assert len(server.bodies) == 2

    async def test_an_engine_that_starts_late_is_asked_when_it_is_there(self) -> None:
        port = unused_port()
        engine = SglangEngine(f"http://127.0.0.1:{port}", QUICK, tokenizer_probe=PROBE)
        first = asyncio.create_task(engine.generate(turn()))
        await until(lambda: engine.is_away)
        server = ScriptedSglang([answered([7])], tokenize_answers=[web.json_response({"tokens": [1]})])
        async with server.serving(port):
            await first
            with pytest.raises(EngineError, match="another tokenizer"):
                await engine.generate(turn())
            await engine.close()

    async def test_an_engine_that_was_not_ready_to_say_is_asked_again(self) -> None:
        with pytest.raises(EngineError, match="another tokenizer"):
            await turns_with_probe([answered([7])], [web.Response(status=503), web.json_response({"tokens": [1]})])

    async def test_a_proxys_page_before_the_engines_first_turn_is_no_answer_about_its_tokenizer(self) -> None:
        with pytest.raises(EngineError, match="another tokenizer"):
            await turns_with_probe([answered([7])], [page_of_nginx(), web.json_response({"tokens": [1]})])

    async def test_a_proxy_that_passes_turns_but_not_the_tokenize_route_is_named(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        server = await turns_with_probe([answered([7]) for _ in range(4)], [page_of_nginx(), page_of_nginx()], turns=4)
        assert (len(server.bodies), len(server.tokenized)) == (4, 2)
        (record,) = [one for one in caplog.records if one.name == sglang.__name__]
        assert "nginx/1.24.0 answers /tokenize with HTTP 404" in record.message

    async def test_many_turns_share_one_check_of_the_tokenizer(self) -> None:
        server = ScriptedSglang(
            [answered([7]) for _ in range(50)], tokenize_answers=[web.json_response({"tokens": [5, 6, 7]})]
        )
        async with server.serving() as url:
            engine = SglangEngine(url, QUICK, tokenizer_probe=PROBE)
            await asyncio.gather(*(engine.generate(turn()) for _ in range(50)))
            await engine.close()
        assert len(server.tokenized) == 1


class TestLifetime:
    async def test_cancelling_a_turn_aborts_it_on_the_engine(self) -> None:
        server = ScriptedSglang([never()])
        async with server.serving() as url:
            engine = SglangEngine(url, QUICK)
            running = asyncio.create_task(engine.generate(turn()))
            await until(lambda: len(server.bodies) == 1)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            await until(lambda: server.aborted == [server.bodies[0]["rid"]])
            await engine.close()

    async def test_behind_a_router_every_worker_is_told_of_the_abort(self) -> None:
        workers = [ScriptedSglang([]), ScriptedSglang([])]
        async with workers[0].serving() as first_url, workers[1].serving() as second_url:
            router = ScriptedSglang([never()], worker_urls=[first_url, second_url])
            async with router.serving() as url:
                engine = SglangEngine(url, QUICK)
                running = asyncio.create_task(engine.generate(turn()))
                await until(lambda: len(router.bodies) == 1)
                running.cancel()
                await asyncio.wait({running})
                await engine.close()  # waits for the aborts under way
        rid = router.bodies[0]["rid"]
        assert [worker.aborted for worker in workers] == [[rid], [rid]]
        assert router.aborted == []

    async def test_a_deadline_ends_a_held_turn_and_aborts_it(self) -> None:
        server = ScriptedSglang([never()])
        async with server.serving() as url:
            engine = SglangEngine(url, EngineSettings(deadline_s=0.2))
            with pytest.raises(EngineError, match=r"did not finish a turn within 0\.2 s"):
                await engine.generate(turn())
            await until(lambda: server.aborted == [server.bodies[0]["rid"]])
            await engine.close()

    async def test_a_new_address_takes_over_turns_under_way(self) -> None:
        old, new = ScriptedSglang([never()]), ScriptedSglang([answered([7])])
        async with old.serving() as old_url, new.serving() as new_url:
            engine = SglangEngine(old_url, QUICK)
            running = asyncio.create_task(engine.generate(turn()))
            await until(lambda: len(old.bodies) == 1)
            engine.set_base_url(new_url + "/")
            assert (await running).output_ids == (7,)
            assert engine.base_url == new_url
            await engine.close()

    async def test_a_new_address_ends_the_retries_at_the_old_one(self) -> None:
        new = ScriptedSglang([answered([7])])
        async with new.serving() as new_url:
            engine = SglangEngine(f"http://127.0.0.1:{unused_port()}", QUICK)
            running = asyncio.create_task(engine.generate(turn()))
            await asyncio.sleep(0.03)
            engine.set_base_url(new_url)
            assert (await running).output_ids == (7,)
            await engine.close()

    async def test_the_same_address_again_disturbs_nothing(self) -> None:
        server = ScriptedSglang([never()])
        async with server.serving() as url:
            engine = SglangEngine(url, QUICK)
            running = asyncio.create_task(engine.generate(turn()))
            await until(lambda: len(server.bodies) == 1)
            engine.set_base_url(url + "/")
            await asyncio.sleep(0.05)
            assert len(server.bodies) == 1
            running.cancel()
            await asyncio.wait({running})
            await engine.close()

    async def test_hundreds_of_turns_wait_at_once(self) -> None:
        gate = asyncio.Event()

        async def when_open() -> web.Response:
            await gate.wait()
            return answered([7])

        server = ScriptedSglang([when_open] * 300)
        async with server.serving() as url:
            engine = SglangEngine(url, QUICK)
            running = [asyncio.create_task(engine.generate(turn())) for _ in range(300)]
            await until(lambda: len(server.bodies) == 300)
            gate.set()
            assert {reply.output_ids for reply in await asyncio.gather(*running)} == {(7,)}
            await engine.close()

    async def test_closing_twice_does_nothing_and_a_closed_client_says_so(self) -> None:
        engine = SglangEngine("http://127.0.0.1:9", QUICK)
        await engine.close()
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await engine.generate(turn())


@pytest.fixture(autouse=True)
def _no_task_is_left_behind(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert not [record for record in caplog.records if record.name == "asyncio"]


class TestTheReport:
    """What an operator is told while no tokens come."""

    async def test_an_engine_that_is_well_has_nothing_to_say(self) -> None:
        server = ScriptedSglang([answered([7])])
        async with server.serving() as url:
            engine = SglangEngine(url, QUICK)
            await engine.generate(turn())
            report = engine.report()
            await engine.close()
        assert report == EngineReport(url=url)

    async def test_an_engine_that_is_not_there_is_said_to_be_out_of_reach(self) -> None:
        engine = SglangEngine("http://127.0.0.1:9", EngineSettings(backoff_first_s=5.0))
        waiting = asyncio.create_task(engine.generate(turn()))
        await until(lambda: bool(engine.report().message))
        report = engine.report()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert "cannot be reached" in report.message
        assert (report.waiting, report.code) == (1, EngineTrouble.REFUSES)
        assert engine.report().code is EngineTrouble.NONE
        await engine.close()

    async def test_an_engine_that_holds_what_it_aborted_still_updates_its_weights(self) -> None:
        server = ScriptedSglang([answered([7], finish="abort"), never()])
        async with server.serving() as url:
            engine = SglangEngine(url, QUICK)
            going = asyncio.create_task(engine.generate(turn()))
            await until(lambda: len(server.bodies) == 2)
            report = engine.report()
            going.cancel()
            await asyncio.gather(going, return_exceptions=True)
            await engine.close()
        assert (report.code, report.waiting) == (EngineTrouble.UPDATING, 1)

    async def test_an_engine_that_aborts_is_said_to_update_its_weights(self) -> None:
        server = ScriptedSglang([answered([7], finish="abort"), answered([8])])
        async with server.serving() as url:
            engine = SglangEngine(url, EngineSettings(backoff_first_s=1.0))
            going = asyncio.create_task(engine.generate(turn()))
            await until(lambda: bool(engine.report().message))
            assert engine.report().code is EngineTrouble.UPDATING
            reply = await going
            assert engine.report().code is EngineTrouble.NONE
            await engine.close()
        assert reply.output_ids == (7, 8)


# --- how busy it is --------------------------------------------------------------------------------------------------

NEWER = {"loads": [{"num_running_reqs": 5, "num_waiting_reqs": 2}, {"num_running_reqs": 1, "num_waiting_reqs": 0}]}
OLDER = [{"dp_rank": 0, "num_reqs": 9, "num_waiting_reqs": 3, "num_tokens": 800}]


@asynccontextmanager
async def saying_load(**routes: Any) -> AsyncIterator[tuple[str, list[str]]]:
    """A server with these replies: ``v1_loads``, ``get_load``, ``workers``; and what it was asked."""
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path_qs)
        reply = routes.get(request.path.strip("/").replace("/", "_"))
        if reply is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        return web.Response(text=reply) if isinstance(reply, str) else web.json_response(reply)

    application = web.Application()
    application.router.add_get("/{route:.*}", answer)
    async with TestServer(application) as server:
        yield str(server.make_url("")).rstrip("/"), asked


@pytest.mark.parametrize(("routes", "load"), [
    ({"v1_loads": NEWER, "get_load": OLDER}, (6, 2)),
    ({"get_load": OLDER}, (6, 3)),
    ({"v1_loads": {"loads": []}}, (0, 0)),
])  # fmt: skip
async def test_an_engine_says_how_busy_it_is_by_either_route(routes: dict[str, Any], load: tuple[int, int]) -> None:
    async with saying_load(**routes) as (url, _):
        engine = SglangEngine(url)
        assert await engine.load() == EngineLoad(running=load[0], waiting=load[1])
        await engine.close()


@pytest.mark.parametrize("reply", ["<html>", "null", "{}", "[7]", '{"loads": 3}', '{"loads": [{"num_reqs": "many"}]}'])
async def test_a_reply_that_is_no_load_is_none_and_the_route_rests_for_a_while(reply: str) -> None:
    async with saying_load(v1_loads=reply) as (url, asked):
        engine = SglangEngine(url)
        assert [await engine.load(), await engine.load()] == [None, None]
        assert len([path for path in asked if "loads" in path]) == 1
        await engine.close()


async def test_the_load_of_a_router_is_that_of_all_its_workers() -> None:
    async with (
        saying_load(v1_loads=NEWER) as (first, _),
        saying_load(get_load=OLDER) as (second, _),
        saying_load(workers={"workers": [{"url": first}, {"url": second}]}) as (router, asked),
    ):
        engine = SglangEngine(router)
        assert await engine.load() == EngineLoad(running=12, waiting=5)
        assert asked == ["/workers"]
        await engine.close()


async def test_an_engine_that_is_away_or_closed_has_no_load() -> None:
    engine = SglangEngine(f"http://127.0.0.1:{unused_port()}")
    assert await engine.load() is None
    await engine.close()
    assert await engine.load() is None
