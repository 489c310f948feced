"""What engines over HTTP have in common: how long they are retried, their probe, and how they say that they are away.

A generation is one thing to its caller and may be several calls to the engine. The trainer pauses its engines to
update weights: requests in flight come back as aborted with part of their output, new ones are held without an answer
until the engine continues. The client appends what it got to the prompt and goes on, so that nothing sampled is lost
and each token keeps the weight version that sampled it.
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
from typing import Any, ClassVar, Final

import aiohttp

from slime.utils.mask_token_records import ROUTED_EXPERTS, TokenRecords, joined_records
from slime_plugins.rollout_buffer.engine.base import EngineLoad, EngineSettings, GenerateReply, GenerateRequest
from slime_plugins.rollout_buffer.engine.prompt_probe import EngineFidelity
from slime_plugins.rollout_buffer.engine.sglang_protocol import (
    PASSING_STATUSES,
    ForeignReplyError,
    SampledPart,
    engine_sentence,
    is_refusal_of_request,
    parse_generate_reply,
)
from slime_plugins.rollout_buffer.engine.token_records import EXPERTS_PROBES, asked_records, why_misplaced
from slime_plugins.rollout_buffer.errors import ConfigError, EngineAwayError, EngineError, network_reason
from slime_plugins.rollout_buffer.redaction import redacted
from slime_plugins.rollout_buffer.rules.backoff import backoff_s
from slime_plugins.rollout_buffer.types import EngineReport, EngineTrouble, SamplingParams, WeightVersionSpan

logger = logging.getLogger(__name__)

ABORTED: Final = "aborted the request"
KEEP_ALIVE_S: Final = 3.0  # SGLang closes idle connections after 5 s; a request on a closed one would be lost
WARNING_INTERVAL_S: Final = 30.0
MAX_REPLY_BYTES: Final = 256 * 1024 * 1024
MAX_BYTES_READ_AT_ONCE: Final = 1024 * 1024
"""A longer reply, as one with routed experts is, is read in a thread: it would hold up the event loop."""
PROBE_TIMEOUT_S: Final = 30.0
MIN_LOGGED_SILENCE_S: Final = 30.0
"""An engine that has calls and answered none of them for this long is said to be silent."""


class HttpEngine:
    """Samples through one route of a server, with the retries of the settings. Subclasses say what is sent and heard.

    One object serves thousands of coroutines. ``base_url`` may change while requests are under way
    (``set_base_url``): a restarted trainer has a new port.
    """

    route: ClassVar[str]
    """Where a turn is posted to, below the base URL."""

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
        self._refusal = ""
        self._refused_since: float | None = None
        self._last_sign_at = time.monotonic()
        self._answered_at = -math.inf
        self._probing: asyncio.Task[bool] | None = None
        self._probe_refusal = ""
        self._turns = 0
        self._tokens = 0

    @property
    def turns(self) -> int:
        """How many turns were sampled so far."""
        return self._turns

    @property
    def tokens(self) -> int:
        """How many tokens they have."""
        return self._tokens

    @property
    def fidelity(self) -> EngineFidelity | None:
        """What the engine was found to do to prompts; None where nobody asked yet, or it cannot be asked."""
        return None

    async def probe_prompts(self) -> EngineFidelity | None:
        """Asks the engine, once at each address, what it does to prompts; None where it gives no answer."""
        return None

    async def load(self) -> EngineLoad | None:
        """Returns how busy the engine is; None where it does not say."""
        return None

    @property
    def base_url(self) -> str:
        """Where the next call goes."""
        return self._base_url

    def set_base_url(self, base_url: str) -> None:
        """Sends every call from now on to ``base_url``; calls under way are taken from the old address and sent again.

        Raises:
            ConfigError: not an http or https address.
        """
        checked = _checked_base_url(base_url)
        if checked == self._base_url:
            return
        self._base_url = checked
        self._refused_since = None
        for call in tuple(self._in_flight):
            call.cancel()

    @property
    def is_away(self) -> bool:
        """True since a call was refused and none was answered after it; not while weights are updated."""
        return self._refused_since is not None and self._refusal != ABORTED

    @property
    def refusal(self) -> str:
        """What was said last in place of an answer, as what follows "the engine"; empty when nothing was."""
        return self._refusal

    @property
    def probe_refusal(self) -> str:
        """What the engine itself said against the last question of ``answers``; empty when nothing or nobody did."""
        return self._probe_refusal

    async def answers(self) -> bool:
        """Asks for one token, and returns whether it came.

        Calls at the same time share one question. An engine that holds it, as while its weights are updated, is given
        half a minute.
        """
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(self._probe())
        return await asyncio.shield(self._probing)

    def report(self, *, unasked: bool = False) -> EngineReport:
        """Says how the engine is: nothing is wrong while nobody waits for it, unless ``unasked`` is given."""
        now, url = time.monotonic(), redacted(self._base_url)
        waiting = self._waiting or len(self._in_flight)
        is_updating = self._refusal == ABORTED
        held_after_abort = bool(self._in_flight) and is_updating
        if self._refused_since is not None and (self._waiting or held_after_abort or unasked):
            code = EngineTrouble.UPDATING if is_updating else EngineTrouble.REFUSES
            since_s = now - self._refused_since
            return EngineReport(url=url, code=code, message=self._refusal, since_s=since_s, waiting=waiting)
        if self._in_flight and now - self._last_sign_at > MIN_LOGGED_SILENCE_S:
            message, since_s = "has answered no request", now - self._last_sign_at
            return EngineReport(url=url, code=EngineTrouble.SILENT, message=message, since_s=since_s, waiting=waiting)
        return EngineReport(url=url, waiting=waiting)

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """Returns what was sampled, resumed across aborts; cancelling it also ends the work on the engine.

        Raises:
            EngineError: the engine refused the request, sent nonsense, or ran over ``retry_timeout_s`` or its deadline.
                An ``EngineAwayError`` when that is not about this request: it gives no answer to any other either.
        """
        try:
            async with asyncio.timeout(self._settings.deadline_s):
                reply = await self._generate_until_finished(request)
        except TimeoutError as error:
            raise EngineError(
                f"the engine at {self._base_url} did not finish a turn within {self._settings.deadline_s:g} s"
            ) from error
        self._turns += 1
        self._tokens += len(reply.output_ids)
        return reply

    async def check_records(self, params: SamplingParams) -> None:
        """Asks for tokens with what ``params`` ask of single tokens; an engine that gives no answer yet is left be.

        Raises:
            EngineError: it answers without them, or with those of other tokens.
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
            logger.warning("the engine at %s does not say yet what it tells of tokens", redacted(self._base_url))
            return
        experts = [reply.records[ROUTED_EXPERTS] for reply in replies if ROUTED_EXPERTS in reply.records]
        if experts and (misplaced := why_misplaced(experts)):
            raise EngineError(f"the engine at {redacted(self._base_url)} {misplaced}")

    async def close(self) -> None:
        """Ends open connections; a second call does nothing."""
        self._closed = True
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.gather(self._probing, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    # --- what servers differ in --------------------------------------------------------------------------------------

    def _headers(self, session_id: str) -> dict[str, str]:
        """What is sent beside the body of a turn of that session."""
        raise NotImplementedError

    def _body(self, request: GenerateRequest, sampled: Sequence[int], rid: str) -> bytes:
        """The body that asks for what comes after ``sampled``; ``rid`` is new for every call."""
        raise NotImplementedError

    def _part(self, answer: HttpAnswer) -> SampledPart:
        """What an answer sampled.

        Raises:
            RefusalError: the same call may succeed later.
            EngineError: it will not.
        """
        raise NotImplementedError

    def _check(self, part: SampledPart, request: GenerateRequest, sampled: Sequence[int]) -> None:
        """Looks at what came after ``sampled`` before it is taken.

        Raises:
            EngineError: a turn of ``request`` cannot go on like that.
        """

    async def _with_receipt(
        self, request: GenerateRequest, parts: Sequence[SampledPart], reply: GenerateReply
    ) -> GenerateReply:
        """Adds to a finished reply what the engine said of the prompt that it ran, where it can say it."""
        return reply

    def _probe_request(self) -> GenerateRequest:
        """The smallest turn that an engine can be asked for."""
        sampling = SamplingParams(max_new_tokens=1)
        return GenerateRequest(input_ids=(0,), sampling_params=sampling, session_id="probe")

    def _given_up(self, base_url: str, rid: str) -> None:
        """Called when nobody waits for a call any more; a server that can be told to drop it is told."""

    # --- one turn ----------------------------------------------------------------------------------------------------

    async def _generate_until_finished(self, request: GenerateRequest) -> GenerateReply:
        sampled = _Sampled()
        budget = _RetryBudget(settings=self._settings, randomness=self._random)
        while len(sampled.ids) < request.sampling_params.max_new_tokens:
            part = await self._sample_part(request, sampled.ids, budget)
            self._check(part, request, sampled.ids)
            sampled.append(part)
            if part.finish_reason != "abort" or not self._settings.resume_aborted:
                return await self._with_receipt(request, sampled.parts, sampled.reply(part.finish_reason))
            if part.ids:
                budget.renew()
            await self._wait(budget, RefusalError(ABORTED))
        return await self._with_receipt(request, sampled.parts, sampled.reply("length"))

    async def _sample_part(self, request: GenerateRequest, sampled: Sequence[int], budget: _RetryBudget) -> SampledPart:
        """What one answered call sampled after ``sampled``; refused calls are made again."""
        while True:
            try:
                return await self._answered_part(request, sampled)
            except RefusalError as refusal:
                await self._wait(budget, refusal)

    async def _answered_part(self, request: GenerateRequest, sampled: Sequence[int]) -> SampledPart:
        """What one call sampled after ``sampled``.

        Raises:
            RefusalError: it was not answered by an engine that works.
            EngineError: the engine refused it, or sent nonsense.
        """
        rid = uuid.uuid4().hex  # a new one each time: the engine may still be busy with a call that broke off
        answer = await self._post(self._body(request, sampled, rid), request.session_id, rid)
        self._last_sign_at = time.monotonic()
        try:
            is_large = len(answer.body) > MAX_BYTES_READ_AT_ONCE
            part = await asyncio.to_thread(self._part, answer) if is_large else self._part(answer)
        except EngineError:
            self._note_answer()
            raise
        if part.finish_reason != "abort":
            self._note_answer()
        return part

    def _note_answer(self) -> None:
        """An engine answered: whatever is refused from now on is refused since now."""
        self._answered_at, self._refused_since = time.monotonic(), None

    async def _probe(self) -> bool:
        self._probe_refusal = ""
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                await self._answered_part(self._probe_request(), ())
        except EngineError as error:
            self._probe_refusal = error.message
            return False
        except (RefusalError, TimeoutError):
            return False
        return True

    async def _post(self, body: bytes, session_id: str, rid: str) -> HttpAnswer:
        """The engine's answer to one call.

        A task of its own carries the call, so that ``set_base_url`` can end it without cancelling the episode.
        """
        base_url = self._base_url
        self._last_sign_at = self._last_sign_at if self._in_flight else time.monotonic()
        call = asyncio.create_task(self._exchange(base_url + self.route, body, session_id))
        self._in_flight.add(call)
        try:
            await asyncio.wait({call})
        except asyncio.CancelledError:
            call.cancel()
            call.add_done_callback(_ignore_result)
            self._given_up(base_url, rid)
            raise
        finally:
            self._in_flight.discard(call)
        if call.cancelled():
            raise RefusalError("has a new address")
        return call.result()

    async def _exchange(self, url: str, body: bytes, session_id: str) -> HttpAnswer:
        headers = {"Content-Type": "application/json", **self._headers(session_id)}
        try:
            # As a stream, so that the megabytes of a long episode's screenshots do not hold up the event loop.
            async with self._open_session().post(
                url, data=io.BytesIO(body), headers=headers, allow_redirects=False
            ) as response:
                return HttpAnswer(status=response.status, body=await _whole_body(response))
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError) as error:
            raise RefusalError(f"cannot be reached ({network_reason(error)})") from error
        except aiohttp.InvalidURL as error:
            raise EngineError("the engine's address is no URL that can be asked") from error
        except aiohttp.ClientError as error:
            raise RefusalError(f"does not speak HTTP as an engine does ({type(error).__name__})") from error

    async def _wait(self, budget: _RetryBudget, refusal: RefusalError) -> None:
        now = time.monotonic()
        if now - self._warned_at > WARNING_INTERVAL_S:
            self._warned_at = now
            logger.warning("the engine at %s %s; trying again", redacted(self._base_url), refusal)
        self._refused_since = now if self._refused_since is None else self._refused_since
        self._refusal = str(refusal)
        self._waiting += 1
        try:
            if budget.is_spent_on(refusal):
                await self._end_or_renew(budget, refusal)
            await budget.pause()
        finally:
            self._waiting -= 1

    async def _end_or_renew(self, budget: _RetryBudget, refusal: RefusalError) -> None:
        """Ends a turn that was refused too often; a server error that everybody gets is not the turn's, and waited out.

        Raises:
            EngineError: others are answered.
            EngineAwayError: nobody is, for longer than ``retry_timeout_s``.
        """
        spent = f"({budget.tries + 1} tries, {budget.waited_s:.0f} s of waiting)"
        message = f"the engine at {self._base_url} {refusal} {spent}"
        if budget.is_older_than(self._answered_at) or await self.answers():
            raise EngineError(message) from refusal
        if budget.is_over:
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
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout)
        return self._session


class RefusalError(Exception):
    """The engine did not take the call this time; the same call may succeed later. Ends in ``HttpEngine``."""

    def __init__(self, what: str, *, server_error: bool = False) -> None:
        super().__init__(redacted(what))
        self.server_error = server_error


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpAnswer:
    """What came back of one call."""

    status: int
    body: bytes


@dataclass(kw_only=True, slots=True)
class _RetryBudget:
    """Paces the tries of one turn: pauses that double up to a cap, each shortened by up to half at random."""

    settings: EngineSettings
    randomness: random.Random
    tries: int = 0
    server_errors: int = 0
    waited_s: float = 0.0
    refused_at: float | None = None
    """When it was refused first since it last got a token."""

    def renew(self) -> None:
        """Forgets earlier refusals: the engine has sampled something."""
        self.tries, self.server_errors, self.waited_s, self.refused_at = 0, 0, 0.0, None

    def is_older_than(self, moment: float) -> bool:
        """Returns True if it was refused before ``moment``."""
        return self.refused_at is not None and self.refused_at <= moment

    @property
    def is_over(self) -> bool:
        """True when there is no time left to wait."""
        return self.waited_s >= self.settings.retry_timeout_s

    def is_spent_on(self, refusal: RefusalError) -> bool:
        """Counts a refusal, and tells whether it was one too many."""
        self.refused_at = time.monotonic() if self.refused_at is None else self.refused_at
        self.server_errors += refusal.server_error
        return self.is_over or self.server_errors >= self.settings.server_error_tries

    async def pause(self) -> None:
        """Pauses before the next try."""
        pause_s = self._next_pause_s()
        self.tries += 1
        self.waited_s += pause_s
        await asyncio.sleep(pause_s)

    def _next_pause_s(self) -> float:
        pause_s = backoff_s(
            self.tries + 1,
            first_s=self.settings.backoff_first_s,
            longest_s=self.settings.backoff_longest_s,
            jitter=self.randomness.random(),
        )
        return min(pause_s, self.settings.retry_timeout_s - self.waited_s)


@dataclass(slots=True)
class _Sampled:
    """The parts of one turn, in order."""

    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    spans: list[WeightVersionSpan] = field(default_factory=list)
    parts: list[SampledPart] = field(default_factory=list)
    records: dict[str, list[TokenRecords]] = field(default_factory=dict)

    def append(self, part: SampledPart) -> None:
        """Adds a part behind what is there; spans of one version that meet become one."""
        offset = len(self.ids)
        for span in part.spans:
            moved = replace(span, start=span.start + offset, end=span.end + offset)
            if self.spans and (self.spans[-1].weight_version, self.spans[-1].end) == (span.weight_version, moved.start):
                moved = replace(self.spans.pop(), end=moved.end)
            self.spans.append(moved)
        self.ids.extend(part.ids)
        self.log_probs.extend(part.log_probs)
        self.parts.append(part)
        for kind, found in part.records.items():
            known = self.records.setdefault(kind, [])
            # What a pass of an earlier part told stands: it is the one that sampled.
            known.append(found.part(known[-1].end, found.end) if known else found)

    def reply(self, finish_reason: str) -> GenerateReply:
        """All parts as one generation. The prompt is that of the first: later ones hold output of this turn."""
        return GenerateReply(
            output_ids=tuple(self.ids),
            output_log_probs=tuple(self.log_probs),
            finish_reason=finish_reason,
            weight_version=self._last_version(),
            weight_version_spans=tuple(self.spans),
            prompt_tokens=self._prompt_tokens(),
            cached_tokens=next((part.cached_tokens for part in self.parts if part.cached_tokens is not None), None),
            records={kind: self._joined(kind, found) for kind, found in self.records.items()},
        )

    def _joined(self, kind: str, parts: Sequence[TokenRecords]) -> TokenRecords:
        try:
            records = joined_records(parts)
        except ValueError as error:
            raise EngineError(f"the engine's {kind} of a resumed turn have a gap: {error}") from error
        if (prompt := self._prompt_tokens()) is None or records.end != prompt + len(self.ids):
            raise EngineError(f"the engine's {kind} end at token {records.end} of {prompt} and {len(self.ids)} sampled")
        return records

    def _prompt_tokens(self) -> int | None:
        """The count of the first part; a later one stands for it only if nothing had been sampled before."""
        for part in self.parts:
            if part.prompt_tokens is not None or part.ids:
                return part.prompt_tokens
        return None

    def _last_version(self) -> str | None:
        if self.spans:
            return self.spans[-1].weight_version
        return self.parts[-1].weight_version if self.parts else None


def part_of_answer(answer: HttpAnswer, parse: Callable[[bytes], SampledPart]) -> SampledPart:
    """Returns what an answer sampled, read by ``parse``.

    Raises:
        RefusalError: it says nothing against the request, or is no engine's.
        EngineError: it does, or ``parse`` finds nonsense in it.
    """
    if answer.status == 200:
        try:
            return parse(answer.body)
        except ForeignReplyError as error:
            raise RefusalError(f"answers HTTP 200 with what no engine says: {error}") from error
    if answer.status == 503 and (partial := _partial_output(answer.body)) is not None:
        return partial
    sentence = engine_sentence(answer.body)
    if answer.status in PASSING_STATUSES:
        raise RefusalError(f"answers HTTP {answer.status}: {sentence}")
    if answer.status == 500 and not answer.body.lstrip().startswith(b"<"):
        raise RefusalError(f"answers HTTP 500: {sentence}", server_error=True)
    if is_refusal_of_request(answer.status, answer.body):
        raise EngineError(f"the engine refused the request: {sentence}", {"status": answer.status})
    raise RefusalError(f"answers HTTP {answer.status}, not as an engine does: {sentence}")


def _partial_output(body: bytes) -> SampledPart | None:
    """What an abort that came as HTTP 503 carries of its output; None when it carries nothing, as is usual."""
    try:
        return replace(parse_generate_reply(body), finish_reason="abort")
    except (EngineError, ForeignReplyError):
        return None


async def _whole_body(response: aiohttp.ClientResponse) -> bytes:
    """The body of an answer; what is longer than any engine's is none."""
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


def _ignore_result(call: asyncio.Task[Any]) -> None:
    if not call.cancelled():
        call.exception()  # looked at, or asyncio would report it as never retrieved


def _socket_with_keepalive(address: aiohttp.AddrInfoType) -> socket.socket:
    """A socket that notices a dead peer: a held request is silent for minutes, and so is a host that vanished."""
    family, kind, protocol, _, _ = address
    opened = socket.socket(family=family, type=kind, proto=protocol)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):  # not every system has all three
            opened.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
    return opened
