"""Common part of engines over HTTP: retries, probes, and reports of an unreachable engine.

One generation may need several calls. The trainer pauses its engines to update weights: running requests return as
aborted with partial output, new ones wait without an answer until the engine continues. The connection of a streamed
reply may break. The client appends the partial output to the prompt and continues, so that no sampled token is lost and
each token has the weight version that sampled it. A part is sampled again if the engine's state at its end would be
lost (a grammar, the beginning of a stop sequence).
"""

from __future__ import annotations

import asyncio
import io
import logging
import math
import random
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Final

import aiohttp

from slime.utils.mask_rows import ROUTED_EXPERTS, TokenRecords, joined_records
from slime_plugins.rollout_buffer.credentials import redacted
from slime_plugins.rollout_buffer.engine.base import EngineLoad, GenerateReply, GenerateRequest
from slime_plugins.rollout_buffer.engine.prompt_probe import EngineFidelity
from slime_plugins.rollout_buffer.engine.settings import EngineSettings
from slime_plugins.rollout_buffer.engine.sglang_protocol import (
    RETRIED_STATUSES,
    ForeignReplyError,
    SampledPart,
    StreamedReply,
    engine_sentence,
    is_html,
    is_refusal_of_request,
    parse_generate_reply,
)
from slime_plugins.rollout_buffer.engine.token_records import EXPERTS_PROBES, asked_records, why_misplaced
from slime_plugins.rollout_buffer.errors import ConfigError, EngineAwayError, EngineError, network_reason
from slime_plugins.rollout_buffer.rules.backoff import backoff_s
from slime_plugins.rollout_buffer.types import EngineReport, EngineTrouble, SamplingParams, WeightVersionSpan

logger = logging.getLogger(__name__)

ABORTED: Final = "aborted the request"
KEEP_ALIVE_S: Final = 3.0  # SGLang closes idle connections after 5 s; a request on a closed one would be lost
WARNING_INTERVAL_S: Final = 30.0
MAX_REPLY_BYTES: Final = 256 * 1024 * 1024
MAX_BYTES_PARSED_ON_LOOP: Final = 1024 * 1024
"""A longer reply, such as one with routed experts, is parsed in a thread: parsing it would block the event loop."""
PROBE_TIMEOUT_S: Final = 30.0
MIN_LOGGED_SILENCE_S: Final = 30.0
"""An engine with calls in flight that has answered none for this long is reported as silent."""
MAX_STREAM_BREAKS: Final = 8
"""A turn whose stream breaks more often fails: its prompt may be what ends the engine."""


class HttpEngine:
    """Samples through one route of a server and retries. Subclasses build requests and parse replies.

    One object serves thousands of coroutines. ``set_base_url`` may change the address while requests are in flight: a
    restarted trainer has a new port.
    """

    route: ClassVar[str]
    """Route of a turn, below the base URL."""

    def __init__(
        self, base_url: str, settings: EngineSettings | None = None, *, randomness: random.Random | None = None
    ) -> None:
        self._base_url = _checked_base_url(base_url)
        self._settings = settings or EngineSettings()
        self._random = randomness or random.Random()
        self._session: aiohttp.ClientSession | None = None
        self._closed = False
        self._in_flight: set[asyncio.Task[HttpAnswer]] = set()
        self._warned_at = -math.inf
        self._waiting = 0
        """Number of turns that wait between two tries."""
        self.refusal = ""
        """The last failure of a call that may succeed later, as a predicate of "the engine"; empty if there is none."""
        self._refused_since: float | None = None
        """When calls began to fail; None after an answer."""
        self._last_sign_at = time.monotonic()
        """When the engine sent something, or the first of the calls in flight began."""
        self._answered_at = -math.inf
        """When the engine at this address last answered a call."""
        self._probing: asyncio.Task[bool] | None = None
        self.probe_refusal = ""
        """The error of the last probe if the engine itself refused it or sent an invalid reply; empty if the probe
        succeeded, or no engine answered it."""
        self.turns = 0
        """Number of turns sampled so far."""
        self.tokens = 0
        """Number of tokens sampled so far."""

    @property
    def fidelity(self) -> EngineFidelity | None:
        """The result of the prompt probe; None if the engine was not probed or cannot be."""
        return None

    async def probe_prompts(self) -> EngineFidelity | None:
        """Probes the engine, once per address, for changes to prompts; None if it does not answer or is not probed."""
        return None

    async def load(self) -> EngineLoad | None:
        """Returns the engine's load; None if it does not report it."""
        return None

    @property
    def base_url(self) -> str:
        """The address of the next call."""
        return self._base_url

    def set_base_url(self, base_url: str) -> None:
        """Sends every following call to ``base_url``; calls in flight are cancelled and sent again.

        Raises:
            ConfigError: not an http or https address.
        """
        if (checked := _checked_base_url(base_url)) == self._base_url:
            return
        self._base_url = checked
        self._refused_since, self._answered_at = None, -math.inf
        for call in tuple(self._in_flight):
            call.cancel()

    @property
    def is_away(self) -> bool:
        """True from a failed call until the next answer; False while the engine aborts calls, as in a weight update."""
        return self._refused_since is not None and self.refusal != ABORTED

    async def answers(self) -> bool:
        """Requests one token and returns whether it came.

        Concurrent calls share one probe, which fails after ``PROBE_TIMEOUT_S`` without a reply, for example during a
        weight update.
        """
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(self._probe())
        return await asyncio.shield(self._probing)

    def report(self, *, while_idle: bool = False) -> EngineReport:
        """Returns the engine's state.

        Failed calls are reported only while turns wait for their next try, aborted ones also while calls are in flight;
        with ``while_idle``, both always.
        """
        now, url = time.monotonic(), redacted(self._base_url)
        waiting = self._waiting or len(self._in_flight)
        is_updating = self.refusal == ABORTED
        is_reported = self._waiting or while_idle or (is_updating and self._in_flight)
        if self._refused_since is not None and is_reported:
            code = EngineTrouble.UPDATING if is_updating else EngineTrouble.REFUSES
            since_s = now - self._refused_since
            return EngineReport(url=url, code=code, message=self.refusal, since_s=since_s, waiting=waiting)
        if self._in_flight and now - self._last_sign_at > MIN_LOGGED_SILENCE_S:
            message, since_s = "has answered no request", now - self._last_sign_at
            return EngineReport(url=url, code=EngineTrouble.SILENT, message=message, since_s=since_s, waiting=waiting)
        return EngineReport(url=url, waiting=waiting)

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """Returns the sampled turn, resumed across aborts; cancelling the call also aborts the request on the engine.

        Raises:
            EngineError: as ``Engine.generate``.
        """
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._settings.deadline_s):
                reply = await self._generate_until_finished(request)
        except TimeoutError as error:
            raise EngineError(
                f"the engine at {self._base_url} did not finish a turn within {self._settings.deadline_s:g} s"
            ) from error
        self.turns += 1
        self.tokens += len(reply.output_ids)
        return replace(reply, engine_s=time.monotonic() - began)

    async def check_records(self, params: SamplingParams) -> None:
        """Samples a few tokens and checks the per-token records that ``params`` request.

        An engine that does not answer within ``PROBE_TIMEOUT_S`` is not checked.

        Raises:
            EngineError: the engine's replies have no such records, or those of other tokens; or as ``generate``.
        """
        if not asked_records(params):
            return
        sampling = replace(params, max_new_tokens=1)
        replies = []
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                for ids in EXPERTS_PROBES:
                    request = GenerateRequest(input_ids=ids, sampling_params=sampling, session_id=uuid.uuid4().hex)
                    replies.append(await self.generate(request))
        except (TimeoutError, EngineAwayError):
            logger.warning("the engine at %s has not confirmed its per-token records yet", redacted(self._base_url))
            return
        experts = [reply.records[ROUTED_EXPERTS] for reply in replies if ROUTED_EXPERTS in reply.records]
        if experts and (misplaced := why_misplaced(experts)):
            raise EngineError(f"the engine at {redacted(self._base_url)} {misplaced}")

    async def close(self) -> None:
        self._closed = True
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.gather(self._probing, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    # --- for subclasses -----------------------------------------------------------------------------------------------

    def _headers(self, session_id: str) -> dict[str, str]:
        """Returns the headers of a turn of that session."""
        raise NotImplementedError

    def _body(self, request: GenerateRequest, sampled: Sequence[int], rid: str) -> bytes:
        """Returns the request body for the tokens after ``sampled``; ``rid`` is new for every call."""
        raise NotImplementedError

    def _stream(self, request: GenerateRequest) -> StreamedReply | None:
        """Returns the object that joins the events of a streamed reply; None for a request that is not streamed."""
        return None

    def _part(self, answer: HttpAnswer) -> SampledPart:
        """Returns the part of a turn in an answer.

        Raises:
            RefusalError: the same call may succeed later.
            EngineError: the same call would fail again.
        """
        raise NotImplementedError

    def _check(self, part: SampledPart, request: GenerateRequest, sampled: Sequence[int]) -> None:
        """Checks the part that follows ``sampled`` before it is appended.

        Raises:
            EngineError: the part is invalid for ``request``.
        """

    def _can_be_resumed(self, part: SampledPart, request: GenerateRequest) -> bool:
        """Returns False for an aborted part that must be sampled again.

        Raises:
            EngineError: the part must be sampled again, but its tokens were streamed already.
        """
        return True

    async def _with_receipt(
        self, request: GenerateRequest, parts: Sequence[SampledPart], reply: GenerateReply
    ) -> GenerateReply:
        """Returns a finished reply, with the result of the prompt check if the subclass checks prompts."""
        return reply

    def _probe_request(self) -> GenerateRequest:
        """Returns the smallest possible turn."""
        sampling = SamplingParams(max_new_tokens=1)
        return GenerateRequest(input_ids=(0,), sampling_params=sampling, session_id="probe")

    def _call_cancelled(self, base_url: str, rid: str) -> None:
        """Is called when a call was cancelled; a subclass aborts the request on the server."""

    # --- one turn ----------------------------------------------------------------------------------------------------

    async def _generate_until_finished(self, request: GenerateRequest) -> GenerateReply:
        sampled = _Sampled()
        budget = _RetryBudget(settings=self._settings, randomness=self._random)
        limit = request.sampling_params.max_new_tokens
        while len(sampled.ids) < limit:
            refusal = RefusalError(ABORTED)  # an aborted part is followed by a pause, like a failed call
            part: SampledPart | None = None
            try:
                part = await self._answered_part(request, sampled.ids)
            except RefusalError as error:
                part, refusal = error.part, error
            if part is not None:
                self._check(part, request, sampled.ids)
                is_resumed = part.finish_reason == "abort" and self._settings.resume_aborted
                if not is_resumed or self._can_be_resumed(part, request):
                    sampled.append(part)
                if not is_resumed:
                    return await self._with_receipt(request, sampled.parts, sampled.reply(part.finish_reason))
                if part.ids:
                    budget.renew()
            if len(sampled.ids) < limit:
                sampled.breaks += refusal.part is not None  # the stream broke after some tokens
                if sampled.breaks > MAX_STREAM_BREAKS:
                    raise EngineError(f"the engine at {self._base_url} broke off {sampled.breaks} streams of a turn")
                await self._wait(budget, refusal)
        return await self._with_receipt(request, sampled.parts, sampled.reply("length"))

    async def _answered_part(self, request: GenerateRequest, sampled: Sequence[int]) -> SampledPart:
        """Returns the part of a turn from one call.

        Raises:
            RefusalError: no working engine answered, or the engine broke off a stream: its tokens are the error's
                ``part``.
            EngineError: the engine refused the call, sent an invalid reply, or broke off a stream that cannot be
                continued.
        """
        stream = self._stream(request)
        try:
            return await self._called_part(request, sampled, stream)
        except RefusalError as refusal:
            if stream is not None and stream.delivered:
                refusal.part = stream.part()
                if refusal.part is None:
                    message = f"the engine at {self._base_url} {refusal}, in the middle of a stream"
                    raise EngineError(message) from refusal
            raise

    async def _called_part(
        self, request: GenerateRequest, sampled: Sequence[int], stream: StreamedReply | None
    ) -> SampledPart:
        rid = uuid.uuid4().hex  # new each time: the engine may still run a call whose connection broke
        answer = await self._post(self._body(request, sampled, rid), request.session_id, rid, stream)
        self._last_sign_at = time.monotonic()
        try:
            is_large = len(answer.body) > MAX_BYTES_PARSED_ON_LOOP
            part = await asyncio.to_thread(self._part, answer) if is_large else self._part(answer)
        except EngineError:  # a refusal or an invalid reply is an answer, too
            self._note_answer()
            raise
        if part.finish_reason != "abort":
            self._note_answer()
        return part

    def _note_answer(self) -> None:
        """Records that the engine answered."""
        self._answered_at, self._refused_since = time.monotonic(), None

    def _note_refusal(self, refusal: RefusalError) -> None:
        """Records that the engine did not answer."""
        self._refused_since = time.monotonic() if self._refused_since is None else self._refused_since
        self.refusal = str(refusal)

    async def _probe(self) -> bool:
        self.probe_refusal = ""
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                await self._answered_part(self._probe_request(), ())
            return True
        except EngineError as error:
            self.probe_refusal = error.message
        except RefusalError as refusal:
            self._note_refusal(refusal)
        except TimeoutError:
            pass  # a paused engine holds the request without an answer
        return False

    async def _post(self, body: bytes, session_id: str, rid: str, stream: StreamedReply | None) -> HttpAnswer:
        """Returns the engine's answer to one call.

        The call runs in its own task, so that ``set_base_url`` can cancel it without cancelling the episode.
        """
        base_url = self._base_url
        self._last_sign_at = self._last_sign_at if self._in_flight else time.monotonic()  # an idle engine is not silent
        call = asyncio.create_task(self._exchange(base_url + self.route, body, session_id, stream))
        self._in_flight.add(call)
        try:
            await asyncio.wait({call})
        except asyncio.CancelledError:
            call.cancel()
            call.add_done_callback(lambda late: late.cancelled() or late.exception())  # so that asyncio logs no error
            self._call_cancelled(base_url, rid)
            raise
        finally:
            self._in_flight.discard(call)
        if call.cancelled():
            raise RefusalError("has a new address")
        return call.result()

    async def _exchange(self, url: str, body: bytes, session_id: str, stream: StreamedReply | None) -> HttpAnswer:
        headers = {"Content-Type": "application/json", **self._headers(session_id)}
        try:
            # Streamed, so that megabytes of screenshots do not block the event loop.
            async with self._open_session().post(
                url, data=io.BytesIO(body), headers=headers, allow_redirects=False
            ) as response:
                if stream is None or response.status != 200 or response.content_type != "text/event-stream":
                    return HttpAnswer(status=response.status, body=await _whole_body(response))
                async for content in response.content.iter_any():
                    self._last_sign_at = time.monotonic()
                    stream.add(content)
                return HttpAnswer(status=stream.status, body=stream.body())
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError) as error:
            raise RefusalError(f"cannot be reached ({network_reason(error)})") from error
        except aiohttp.InvalidURL as error:
            raise EngineError("the engine's address is not a valid URL") from error
        except ForeignReplyError as error:
            raise RefusalError(f"streams what is no engine's reply: {error}") from error
        except aiohttp.ClientError as error:
            raise RefusalError(f"does not answer in valid HTTP ({type(error).__name__})") from error

    async def _wait(self, budget: _RetryBudget, refusal: RefusalError) -> None:
        now = time.monotonic()
        if now - self._warned_at > WARNING_INTERVAL_S:
            self._warned_at = now
            logger.warning("the engine at %s %s; trying again", redacted(self._base_url), refusal)
        self._note_refusal(refusal)
        self._waiting += 1
        try:
            if budget.is_spent_by(refusal):
                await self._end_or_renew(budget, refusal)
            await budget.pause()
        finally:
            self._waiting -= 1

    async def _end_or_renew(self, budget: _RetryBudget, refusal: RefusalError) -> None:
        """Fails a turn whose budget is exhausted; resets its count of server errors if they affect every request.

        Raises:
            EngineError: the engine answers other requests.
            EngineAwayError: the engine answers no request, and the pauses have reached ``retry_timeout_s``.
        """
        spent = f"({budget.pauses + 1} tries, {budget.waited_s:.0f} s of waiting)"  # no pause came before the first try
        message = f"the engine at {self._base_url} {refusal} {spent}"
        if budget.refused_at <= self._answered_at or await self.answers():
            raise EngineError(message) from refusal
        if budget.has_no_time_left:
            raise EngineAwayError(message) from refusal
        budget.server_errors = 0

    def _open_session(self) -> aiohttp.ClientSession:
        if self._closed:
            raise EngineError("this engine client is closed")
        if self._session is None:
            connector = aiohttp.TCPConnector(
                limit=self._settings.connection_limit or 0,
                keepalive_timeout=KEEP_ALIVE_S,
                socket_factory=_socket_with_keepalive,
            )
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._settings.connect_timeout_s)
            jar = aiohttp.DummyCookieJar()  # engines set none, and a jar is searched at each call
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, cookie_jar=jar)
        return self._session


class RefusalError(Exception):
    """A call failed and may succeed when it is repeated, which ``HttpEngine`` does.

    ``predicate`` is what the engine did, as a predicate of "the engine". ``server_error``: it answered HTTP 500.
    """

    def __init__(self, predicate: str, *, server_error: bool = False) -> None:
        super().__init__(redacted(predicate))
        self.server_error = server_error
        self.part: SampledPart | None = None
        """The tokens that a broken stream had delivered; None if it had delivered none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpAnswer:
    """Status and body of one HTTP reply."""

    status: int
    body: bytes


@dataclass(kw_only=True, slots=True)
class _RetryBudget:
    """Retry pauses of one turn. They double up to ``backoff_longest_s``, each shortened at random by up to half."""

    settings: EngineSettings
    randomness: random.Random
    pauses: int = 0
    server_errors: int = 0
    waited_s: float = 0.0
    refused_at: float = math.inf
    """The time of the first refusal since the last token."""

    def renew(self) -> None:
        """Resets the budget after the engine sampled a token."""
        self.pauses, self.server_errors, self.waited_s, self.refused_at = 0, 0, 0.0, math.inf

    @property
    def has_no_time_left(self) -> bool:
        """True when the pauses have reached ``retry_timeout_s``."""
        return self.waited_s >= self.settings.retry_timeout_s

    def is_spent_by(self, refusal: RefusalError) -> bool:
        """Counts a refusal, and returns True if a limit of the budget is reached."""
        self.refused_at = min(self.refused_at, time.monotonic())
        self.server_errors += refusal.server_error
        return self.has_no_time_left or self.server_errors >= self.settings.server_error_tries

    async def pause(self) -> None:
        self.pauses += 1
        longer_s = backoff_s(
            self.pauses,
            first_s=self.settings.backoff_first_s,
            longest_s=self.settings.backoff_longest_s,
            jitter=self.randomness.random(),
        )
        pause_s = min(longer_s, self.settings.retry_timeout_s - self.waited_s)
        self.waited_s += pause_s
        await asyncio.sleep(pause_s)


@dataclass(slots=True)
class _Sampled:
    """The parts of one turn, in order."""

    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    spans: list[WeightVersionSpan] = field(default_factory=list)
    parts: list[SampledPart] = field(default_factory=list)
    records: dict[str, list[TokenRecords]] = field(default_factory=dict)
    breaks: int = 0

    def append(self, part: SampledPart) -> None:
        """Appends a part; adjacent spans of one version are merged.

        Raises:
            EngineError: only this part, or only the parts before it, have weight versions.
        """
        offset = len(self.ids)
        if part.ids and offset and bool(part.spans) != bool(self.spans):
            raise EngineError("the engine reported the weight version of some parts of a turn only")
        for span in part.spans:
            moved = replace(span, start=span.start + offset, end=span.end + offset)
            if self.spans and (self.spans[-1].weight_version, self.spans[-1].end) == (span.weight_version, moved.start):
                moved = replace(self.spans.pop(), end=moved.end)
            self.spans.append(moved)
        self.ids.extend(part.ids)
        self.log_probs.extend(part.log_probs)
        self.parts.append(part)
        for kind, records in part.records.items():
            earlier = self.records.setdefault(kind, [])
            # Records of an earlier part take precedence: its pass sampled the token.
            earlier.append(records.part(earlier[-1].end, records.end) if earlier else records)

    def reply(self, finish_reason: str) -> GenerateReply:
        """Returns all parts as one reply, with the first part's counts of the prompt: later prompts hold sampled
        tokens, too."""
        return GenerateReply(
            output_ids=tuple(self.ids),
            output_log_probs=tuple(self.log_probs),
            finish_reason=finish_reason,
            weight_version=self._last_version(),
            weight_version_spans=tuple(self.spans),
            prompt_tokens=self._prompt_tokens(),
            cached_tokens=next((part.cached_tokens for part in self.parts if part.cached_tokens is not None), None),
            records={kind: self._joined(kind, parts) for kind, parts in self.records.items()},
            breaks=self.breaks,
        )

    def _joined(self, kind: str, parts: Sequence[TokenRecords]) -> TokenRecords:
        try:
            records = joined_records(parts)
        except ValueError as error:
            raise EngineError(f"the engine's {kind} of a resumed turn have a gap: {error}") from error
        token_count = (self._prompt_tokens() or 0) + len(self.ids)
        if records.end != token_count:
            raise EngineError(f"the engine's {kind} end at token {records.end} of a sequence of {token_count} tokens")
        return records

    def _prompt_tokens(self) -> int | None:
        """Returns the number of the prompt's tokens, as the first part that reports it; None if tokens were sampled
        before, because a later prompt holds them."""
        for part in self.parts:
            if part.prompt_tokens is not None or part.ids:
                return part.prompt_tokens
        return None

    def _last_version(self) -> str | None:
        if self.spans:
            return self.spans[-1].weight_version
        return self.parts[-1].weight_version if self.parts else None


def part_of_answer(answer: HttpAnswer, parse: Callable[[bytes], SampledPart]) -> SampledPart:
    """Returns the part of a turn in an answer, parsed by ``parse``.

    Raises:
        RefusalError: the answer does not come from an engine, or a retry may succeed.
        EngineError: the engine refused the request, or its reply is invalid.
    """
    if answer.status == 200:
        try:
            return parse(answer.body)
        except ForeignReplyError as error:
            raise RefusalError(f"answers HTTP 200 with a body that is no engine's reply: {error}") from error
    if answer.status == 503 and (partial := _partial_output(answer.body)) is not None:
        return partial
    sentence = engine_sentence(answer.body)
    if answer.status in RETRIED_STATUSES:
        raise RefusalError(f"answers HTTP {answer.status}: {sentence}")
    if answer.status == 500 and not is_html(answer.body):
        raise RefusalError(f"answers HTTP 500: {sentence}", server_error=True)
    if is_refusal_of_request(answer.status, answer.body):
        raise EngineError(f"the engine refused the request: {sentence}", {"status": answer.status})
    raise RefusalError(f"answers HTTP {answer.status}, not as an engine does: {sentence}")


def _partial_output(body: bytes) -> SampledPart | None:
    """Returns the partial output of an abort that came as HTTP 503; None for any other HTTP 503, the usual case."""
    try:
        return replace(parse_generate_reply(body), finish_reason="abort")
    except (EngineError, ForeignReplyError):
        return None


async def _whole_body(response: aiohttp.ClientResponse) -> bytes:
    """Returns the body of an answer; refuses one above the size limit."""
    content = bytearray()
    async for piece in response.content.iter_any():
        content += piece
        if len(content) > MAX_REPLY_BYTES:
            raise RefusalError(f"answers with more than {MAX_REPLY_BYTES} bytes")
    return bytes(content)


def _checked_base_url(base_url: str) -> str:
    if not base_url.startswith(("http://", "https://")) or not base_url.split("://", 1)[1].strip("/"):
        raise ConfigError(f"the engine's address must look like http://host:port, not {base_url!r}")
    return base_url.rstrip("/")


def _socket_with_keepalive(address: aiohttp.AddrInfoType) -> socket.socket:
    """Returns a socket with TCP keepalive: a held request is silent for minutes, and so is a dead peer."""
    family, kind, protocol, _, _ = address
    opened = socket.socket(family=family, type=kind, proto=protocol)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):  # not every system has all three
            opened.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
    return opened
