"""What our HTTP engines promise in addition to ``EngineContract``, as tests to inherit.

``SglangServerContract`` holds for the client with a server that speaks SGLang's HTTP, ``VisionContract`` for such a
server with a vision model: the scripted engine, the embedded one and a real SGLang. ``HttpClientContract`` tests a
client alone: how it handles the replies of a proxy between it and its engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from typing import Any, ClassVar, Final

import aiohttp

from slime_plugins.rollout_buffer.engine.base import Engine, GenerateReply, GenerateRequest
from slime_plugins.rollout_buffer.engine.http_engine import HttpEngine
from slime_plugins.rollout_buffer.engine.settings import EngineSettings
from slime_plugins.rollout_buffer.engine.sglang import SglangEngine
from slime_plugins.rollout_buffer.errors import EngineAwayError, EngineError
from slime_plugins.rollout_buffer.testing.engine_conformance import EngineContract, assert_spans_cover
from slime_plugins.rollout_buffer.types import Image, SamplingParams

WAIT_S = 180.0


class SglangServerContract(EngineContract):
    """What the client promises together with an SGLang server at ``base_url``.

    The server needs about a second for ``tokens_of_a_long_turn`` tokens.
    """

    tokens_of_a_long_turn: ClassVar[int] = 200

    def long_request(self) -> GenerateRequest:
        """A turn that lasts long enough to be aborted or paused, and ends only at its limit of tokens."""
        return self.request(max_new_tokens=self.tokens_of_a_long_turn, ignore_eos=True)

    async def aborted_once(self, engine: Engine, base_url: str, request: GenerateRequest) -> GenerateReply:
        """The reply to ``request``, which the engine aborted once while it ran."""
        turn = asyncio.create_task(engine.generate(request))
        await until_running(base_url)
        assert not turn.done()
        await post(base_url, "abort_request", {"abort_all": True})
        return await asyncio.wait_for(turn, WAIT_S)

    async def test_a_turn_goes_on_after_an_update_of_the_weights(self, engine: Engine, base_url: str) -> None:
        """The trainer's order: pause (which aborts what runs), new weights, continue."""
        await post(base_url, "update_weight_version", {"new_version": "41"})
        turn = asyncio.create_task(engine.generate(self.long_request()))
        await until_running(base_url)
        await post(base_url, "pause_generation", {})
        await post(base_url, "update_weight_version", {"new_version": "42"})
        await post(base_url, "continue_generation", {})
        reply = await asyncio.wait_for(turn, WAIT_S)
        assert (len(reply.output_ids), reply.finish_reason) == (self.tokens_of_a_long_turn, "length")
        assert_spans_cover(reply)
        assert [span.weight_version for span in reply.weight_version_spans] == ["41", "42"]
        assert reply.prompt_tokens == len(self.prompt_ids)

    async def test_an_aborted_turn_is_resumed(self, engine: Engine, base_url: str) -> None:
        reply = await self.aborted_once(engine, base_url, self.long_request())
        assert (len(reply.output_ids), len(reply.output_log_probs)) == (
            self.tokens_of_a_long_turn,
            self.tokens_of_a_long_turn,
        )
        assert reply.finish_reason == "length"

    async def test_a_streamed_turn_comes_token_by_token(self, engine: Engine) -> None:
        heard: list[Sequence[int]] = []
        reply = await engine.generate(replace(self.long_request(), on_tokens=heard.append))
        assert list(itertools.chain.from_iterable(heard)) == list(reply.output_ids)
        assert len(heard) > 1

    async def test_a_turn_frozen_in_place_goes_on_as_one_call(self, engine: Engine, base_url: str) -> None:
        turn = asyncio.create_task(engine.generate(self.long_request()))
        await until_running(base_url)
        await post(base_url, "pause_generation", {"mode": "in_place"})
        await asyncio.sleep(0.2)
        assert not turn.done()
        await post(base_url, "continue_generation", {})
        reply = await asyncio.wait_for(turn, WAIT_S)
        assert (len(reply.output_ids), reply.finish_reason) == (self.tokens_of_a_long_turn, "length")

    async def test_a_turn_sent_to_a_paused_engine_waits(self, engine: Engine, base_url: str) -> None:
        await post(base_url, "pause_generation", {})
        turn = asyncio.create_task(engine.generate(self.request()))
        await asyncio.sleep(0.3)
        assert not turn.done()
        await post(base_url, "update_weight_version", {"new_version": "43"})
        await post(base_url, "continue_generation", {})
        reply = await asyncio.wait_for(turn, WAIT_S)
        assert reply.weight_version == "43"

    async def test_a_cancelled_turn_leaves_the_engine_idle(self, engine: Engine, base_url: str) -> None:
        turn = asyncio.create_task(
            engine.generate(self.request(max_new_tokens=20 * self.tokens_of_a_long_turn, ignore_eos=True))
        )
        await until_running(base_url)
        turn.cancel()
        await asyncio.wait({turn})
        await until(base_url, lambda load: load == 0)

    async def test_the_client_reads_how_busy_the_server_is(self, engine: Engine, base_url: str) -> None:
        observer = SglangEngine(base_url)
        turn = asyncio.create_task(engine.generate(self.long_request()))
        await until_running(base_url)
        busy = await observer.load()
        await asyncio.wait_for(turn, WAIT_S)
        await until(base_url, lambda load: load == 0)
        idle = await observer.load()
        await observer.close()
        assert busy is not None
        assert idle is not None
        assert busy.running + busy.waiting > 0
        assert (idle.running, idle.waiting) == (0, 0)

    async def test_a_wrong_request_is_refused_in_the_engines_words(self, engine: Engine) -> None:
        await assert_refused(engine.generate(self.request(max_length=3)), "unknown field `max_length`")

    async def test_a_prompt_beyond_the_context_is_refused(self, engine: Engine) -> None:
        await assert_refused(engine.generate(self.request(max_new_tokens=10_000_000)), "maximum context length")

    async def test_a_second_turn_finds_its_prefix_cached(self, engine: Engine) -> None:
        first = await engine.generate(self.request(session_id="contract/cached"))
        longer = [*self.prompt_ids, *first.output_ids, *self.prompt_ids]
        second = await engine.generate(replace(self.request(session_id="contract/cached"), input_ids=longer))
        assert second.prompt_tokens == len(longer)
        assert second.cached_tokens is not None
        assert second.cached_tokens >= len(self.prompt_ids)


class VisionContract:
    """What holds for a server with a vision model.

    ``image_prompt_ids`` has two placeholders, for ``images`` of 64x128 and 128x64 pixels. Qwen3-VL counts 72 tokens for
    each.
    """

    image_prompt_ids: ClassVar[Sequence[int]]
    images: ClassVar[tuple[Image, Image]]
    image_tokens: ClassVar[int] = 72

    def image_request(self, images: Sequence[Image]) -> GenerateRequest:
        """A turn after a prompt with two image placeholders."""
        params = SamplingParams(max_new_tokens=8, temperature=1.0)
        return GenerateRequest(
            input_ids=self.image_prompt_ids, sampling_params=params, session_id="contract/images", images=images
        )

    async def test_each_image_is_expanded_at_its_placeholder(self, engine: Engine) -> None:
        reply = await engine.generate(self.image_request(self.images))
        assert reply.prompt_tokens == len(self.image_prompt_ids) + 2 * (self.image_tokens - 1)
        assert reply.output_ids

    async def test_a_missing_image_is_an_engine_error(self, engine: Engine) -> None:
        await assert_refused(engine.generate(self.image_request(self.images[:1])), "HTTP 500")

    async def test_bytes_that_are_no_image_are_refused(self, engine: Engine) -> None:
        broken = (self.images[0], Image(data=b"no picture"))
        await assert_refused(engine.generate(self.image_request(broken)), "Could not decode image")


class HttpClientContract:
    """What a client does with answers that are not its engine's, over real sockets.

    ``own_reply`` is the body of an engine's HTTP 200, ``own_refusal`` that of its HTTP 400 about one request.
    """

    own_reply: ClassVar[bytes]
    own_refusal: ClassVar[bytes] = b'{"error": {"message": "the prompt is too long"}}'
    quick: ClassVar[EngineSettings] = EngineSettings(retry_timeout_s=30.0, backoff_first_s=0.01, backoff_longest_s=0.02)
    impatient: ClassVar[EngineSettings] = EngineSettings(
        retry_timeout_s=0.05, backoff_first_s=0.01, backoff_longest_s=0.02, server_error_tries=2
    )

    def connect(self, base_url: str, settings: EngineSettings) -> HttpEngine:
        raise NotImplementedError

    def turn(self, max_new_tokens: int = 20) -> GenerateRequest:
        """A turn that ``own_reply`` answers."""
        sampling = SamplingParams(max_new_tokens=max_new_tokens)
        return GenerateRequest(input_ids=(1, 2, 3), sampling_params=sampling, session_id="contract")

    async def played(self, answer: Answer, settings: EngineSettings | None = None) -> GenerateReply:
        """The reply to one turn, of an engine behind a server that answers with ``answer``."""
        async with answering(answer) as base_url:
            engine = self.connect(base_url, settings or self.quick)
            try:
                return await asyncio.wait_for(engine.generate(self.turn()), WAIT_S)
            finally:
                await engine.close()

    async def test_a_turn_is_sent_again_until_the_engine_itself_answers(self) -> None:
        for foreign in FOREIGN_ANSWERS:
            script = [foreign, foreign, foreign, http_answer(200, self.own_reply)]
            reply = await self.played(lambda _, script=script: script.pop(0))  # type: ignore[misc]  # bound here
            assert (bool(reply.output_ids), script) == (True, []), foreign

    async def test_the_engine_counts_as_away_when_no_answer_was_its_own_until_the_time_limit(self) -> None:
        for foreign in FOREIGN_ANSWERS:
            turn = self.played(lambda _, foreign=foreign: foreign, self.impatient)  # type: ignore[misc]  # bound here
            (outcome,) = await asyncio.gather(turn, return_exceptions=True)
            assert isinstance(outcome, EngineAwayError), (foreign, outcome)

    async def test_the_turn_has_failed_when_the_engine_answers_all_requests_but_this(self) -> None:
        """A proxy may refuse one long prompt permanently, while the engine answers all other requests."""
        page = FOREIGN_ANSWERS[0]
        proper = http_answer(200, self.own_reply)
        one_token = (b":1,", b":1}")  # the client's probe
        turn = self.played(lambda body: proper if any(mark in body for mark in one_token) else page, self.impatient)
        (outcome,) = await asyncio.gather(turn, return_exceptions=True)
        assert isinstance(outcome, EngineError)
        assert not isinstance(outcome, EngineAwayError)

    async def test_the_engines_own_refusal_ends_the_turn_at_once(self) -> None:
        asked: list[bytes] = []

        def refuse(body: bytes) -> bytes:
            asked.append(body)
            return http_answer(400, self.own_refusal)

        await assert_refused(self.played(refuse), "the prompt is too long")
        assert len(asked) == 1

    async def test_a_body_that_is_too_large_for_a_proxy_ends_the_turn_at_once(self) -> None:
        page = http_answer(413, b"<html>413 Request Entity Too Large</html>", "text/html")
        await assert_refused(self.played(lambda _: page), "413 Request Entity Too Large")

    async def test_a_redirect_is_not_followed(self) -> None:
        asked: list[bytes] = []

        def note(body: bytes) -> bytes:
            asked.append(body)
            return http_answer(200, self.own_reply)

        async with answering(note) as elsewhere:
            moved = http_answer(307, b"", "text/html", location=f"{elsewhere}/generate")
            turn = self.played(lambda _: moved, self.impatient)
            (outcome,) = await asyncio.gather(turn, return_exceptions=True)
        assert isinstance(outcome, EngineAwayError)
        assert asked == []

    async def test_the_engine_counts_as_away_until_it_answers_again(self) -> None:
        answers = [FOREIGN_ANSWERS[0]]
        async with answering(lambda _: answers[0]) as base_url:
            engine = self.connect(base_url, self.impatient)
            away = [engine.is_away]
            await asyncio.gather(engine.generate(self.turn()), return_exceptions=True)
            away.append(engine.is_away)
            assert not await engine.answers()
            answers[0] = http_answer(400, self.own_refusal)
            assert not await engine.answers(), "an engine that refuses one token does not work"
            answers[0] = http_answer(200, self.own_reply)
            assert await engine.answers()
            assert [*away, engine.is_away] == [False, True, False]
            await engine.close()


Answer = Callable[[bytes], bytes]
"""From the body of a request to the bytes of a whole HTTP answer."""


def http_answer(status: int, body: bytes, content_type: str = "application/json", location: str = "") -> bytes:
    """An HTTP answer as it goes over the wire; the connection ends with it."""
    headers = {"Content-Type": content_type, "Content-Length": str(len(body)), "Connection": "close"}
    if location:
        headers["Location"] = location
    lines = [f"HTTP/1.1 {status} X", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    return "\r\n".join(lines).encode() + body


_PAGE: Final = b"<html><body>Not here</body></html>"
FOREIGN_ANSWERS: Final = (
    http_answer(404, _PAGE, "text/html"),
    http_answer(200, _PAGE, "text/html"),
    http_answer(200, _PAGE),
    http_answer(200, b""),
    http_answer(200, b"null"),
    http_answer(200, b"[]"),
    http_answer(200, b'{"status": "ok"}'),
    http_answer(200, b'{"meta_info": 5, "choices": 5}'),
    http_answer(200, b"[" * 100_000),
    http_answer(202, b"{}"),
    http_answer(204, b""),
    http_answer(302, b"", "text/html", location="/login"),
    http_answer(400, _PAGE, "text/html"),
    http_answer(401, _PAGE, "text/html"),
    http_answer(403, b'{"message": "Forbidden"}'),
    http_answer(404, b'{"detail": "Not Found"}'),
    http_answer(404, b"404 page not found", "text/plain"),
    http_answer(405, b'{"detail": "Method Not Allowed"}'),
    http_answer(500, _PAGE, "text/html"),
    http_answer(502, _PAGE, "text/html"),
    http_answer(504, b"upstream request timeout", "text/plain"),
    http_answer(521, _PAGE, "text/html"),
    b"SSH-2.0-OpenSSH_9.6\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{",
    b"",
)
"""What proxies, other programs and broken connections answer in an engine's place."""


@asynccontextmanager
async def answering(answer: Answer) -> AsyncIterator[str]:
    """A server on a port of its own that answers every request with what ``answer`` makes of its body."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            head = await reader.readuntil(b"\r\n\r\n")
            lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            body = await reader.readexactly(int(lengths[0].split(b":")[1])) if lengths else b""
            writer.write(answer(body))
            await writer.drain()

    server = await asyncio.start_server(_forgiving(serve), "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def _forgiving(
    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    """A client may hang up at any time."""

    async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, EOFError):
            await serve(reader, writer)

    return served


async def assert_refused(turn: Awaitable[GenerateReply], sentence: str) -> None:
    """Asserts that the turn fails with an ``EngineError`` whose message contains ``sentence``."""
    (outcome,) = await asyncio.gather(turn, return_exceptions=True)
    assert isinstance(outcome, EngineError), f"the engine did not refuse: {outcome!r}"
    assert sentence in outcome.message, outcome.message


async def post(base_url: str, route: str, body: dict[str, Any]) -> None:
    async with aiohttp.ClientSession() as session, session.post(f"{base_url}/{route}", json=body) as response:
        assert response.status == 200, await response.text()


async def until_running(base_url: str) -> None:
    """Waits until the server works on something, and a moment longer, so that there is output to lose."""
    await until(base_url, lambda load: load > 0)
    await asyncio.sleep(0.3)


async def until(base_url: str, is_so: Callable[[int], bool]) -> None:
    async with asyncio.timeout(WAIT_S), aiohttp.ClientSession() as session:
        while not is_so(await _running_requests(session, base_url)):  # noqa: ASYNC110 - a server is watched
            await asyncio.sleep(0.05)


async def _running_requests(session: aiohttp.ClientSession, base_url: str) -> int:
    async with session.get(f"{base_url}/v1/loads?include=core") as response:
        loads = (await response.json())["loads"]
    return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)
