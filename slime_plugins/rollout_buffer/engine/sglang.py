"""An ``Engine`` over ``POST /generate`` of an SGLang server or router: token ids, log-probs and weight versions.

``engine/sglang_protocol.py`` builds the requests and parses the replies.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

import aiohttp

from slime.utils.mask_rows import ROUTED_EXPERTS, TOP_P_TOKENS
from slime_plugins.rollout_buffer.credentials import key_headers, redacted
from slime_plugins.rollout_buffer.engine.base import EngineLoad, GenerateReply, GenerateRequest
from slime_plugins.rollout_buffer.engine.http_engine import HttpAnswer, HttpEngine, part_of_answer
from slime_plugins.rollout_buffer.engine.prompt_check import (
    NOT_PROVEN,
    OTHER_LENGTH,
    RESUMED_ELSEWHERE,
    CheckedPrompt,
    PromptChecker,
)
from slime_plugins.rollout_buffer.engine.prompt_probe import EngineFidelity, ProbePrompt, PromptIntegrity, PromptProbe
from slime_plugins.rollout_buffer.engine.settings import EngineSettings
from slime_plugins.rollout_buffer.engine.sglang_protocol import (
    RETRIED_STATUSES,
    ForeignReplyError,
    SampledPart,
    StreamedReply,
    generate_body,
    has_grammar,
    is_html,
    parse_generate_reply,
    parse_loads,
    parse_probe_reply,
    parse_sees_images,
    probe_body,
    stop_sequences,
    urls_of_workers,
)
from slime_plugins.rollout_buffer.engine.token_records import ReportedExperts, asked_records
from slime_plugins.rollout_buffer.engine.tokenizer_probe import TokenizerProbe
from slime_plugins.rollout_buffer.errors import EngineError
from slime_plugins.rollout_buffer.rules.validity import first_invalid_id
from slime_plugins.rollout_buffer.types import PromptCheck

logger = logging.getLogger(__name__)

SESSION_HEADER: Final = "X-SMG-Routing-Key"
TOKENIZE_TIMEOUT_S: Final = 10.0
MANY_IDS: Final = 4096
"""A prompt of this many ids or more is encoded again in a thread, because that takes milliseconds."""
PROMPT_PROBE_TIMEOUT_S: Final = 60.0
MODEL_ROUTES: Final = ("/model_info", "/get_model_info")
"""SGLang's routes that describe its model, newest first."""
WORKERS_REMEMBERED_S: Final = 10.0  # limits router requests when thousands of episodes are cancelled
LOAD_ROUTES: Final = ("/v1/loads?include=core", "/get_load")
"""SGLang's routes that report its load, newest first."""
LOAD_TIMEOUT_S: Final = 5.0
NO_LOAD_REMEMBERED_S: Final = 60.0
_MISSING_RECORDS: Final = {
    ROUTED_EXPERTS: "does not return routed experts (return_routed_experts): start SGLang with "
    "--enable-return-routed-experts on a model that has experts, or train without routing replay",
    TOP_P_TOKENS: "does not return the ids kept by top_p (return_top_p_token_ids); the SGLang of slime's image does: "
    "use that, or set top_p to 1",
}
"""Predicates of "the engine" on missing per-token records, by kind."""
Answer = TypeVar("Answer")


class SglangEngine(HttpEngine):
    """Samples through ``POST /generate`` of an SGLang server or router."""

    route = "/generate"

    def __init__(
        self,
        base_url: str,
        settings: EngineSettings | None = None,
        *,
        vocabulary_size: int | None = None,
        tokenizer_probe: TokenizerProbe | None = None,
        prompts: PromptChecker | None = None,
        prompt_probe: Callable[[], PromptProbe] | None = None,
        requires_exact_prompts: bool = False,
        randomness: random.Random | None = None,
    ) -> None:
        """``vocabulary_size`` is the number of token ids of the model; without it, ids below 0 or far too large are
        refused.

        With ``tokenizer_probe``, no turn is sent to an engine whose ``/tokenize`` returns other ids. ``prompts``
        compares the ids sent with those run. ``prompt_probe`` makes the probe with which an engine is checked for
        changed prompts before its first turn; with ``requires_exact_prompts``, an engine that changes them gets no
        turn.
        """
        super().__init__(base_url, settings, randomness=randomness)
        self._vocabulary_size = vocabulary_size
        self._tokenizer_probe = tokenizer_probe
        self._prompt_probe = prompt_probe
        self._prompts = prompts or PromptChecker()
        self._requires_exact_prompts = requires_exact_prompts
        self._probes: dict[str, asyncio.Task[EngineFidelity | None]] = {}
        self._tokenizer_checks: dict[str, asyncio.Task[str | None]] = {}
        self._reported_experts = ReportedExperts()
        self._aborts: set[asyncio.Task[None]] = set()
        self._says_no_load: dict[str, float] = {}
        """By address: when the engine there last did not report its load."""
        self._workers: dict[str, tuple[float, tuple[str, ...]]] = {}
        """By address: when its workers were requested, and the addresses of these workers."""

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """As ``Engine.generate``. Sends no turn to an engine that failed the check of its tokenizer or, if required, of
        its prompts."""
        await self._check_tokenizer()
        fidelity = await self.probe_prompts()
        if self._requires_exact_prompts and fidelity is not None and fidelity.complaint:
            raise EngineError(f"exact prompts are required, but the engine {fidelity.complaint}")
        return await super().generate(request)

    async def close(self) -> None:
        """Closes connections after pending aborts were sent. A second call does nothing."""
        probes = [*self._tokenizer_checks.values(), *self._probes.values()]
        for probe in probes:
            probe.cancel()
        await asyncio.gather(*probes, return_exceptions=True)
        while self._aborts:
            await asyncio.wait(self._aborts)
        await super().close()

    async def _asked_once(
        self, tasks: dict[str, asyncio.Task[Answer | None]], ask: Callable[[str], Coroutine[Any, Any, Answer | None]]
    ) -> Answer | None:
        """Returns the result of ``ask`` for the engine's address.

        Concurrent turns share one call. A result is kept for later turns; after None they ask again.
        """
        url = self._base_url
        task = tasks.get(url)
        if task is None:
            task = tasks[url] = asyncio.create_task(ask(url))
        answer = await asyncio.shield(task)
        if answer is None and tasks.get(url) is task:
            del tasks[url]
        return answer

    async def _check_tokenizer(self) -> None:
        """Compares tokenizers once per engine.

        Raises:
            EngineError: the engine has another tokenizer.
        """
        probe, url = self._tokenizer_probe, self._base_url
        if probe is None or self._closed:
            return
        if complaint := await self._asked_once(
            self._tokenizer_checks, lambda url: self._tokenizer_complaint(url, probe)
        ):
            raise EngineError(
                f"the engine at {url} has another tokenizer than the job: {complaint}; "
                "give as tokenizer_path the folder of the model that the engine serves"
            )

    async def _tokenizer_complaint(self, url: str, probe: TokenizerProbe) -> str | None:
        """Returns how the engine's tokenizer differs, None if the engine did not answer.

        Empty if it does not differ, if the engine has no such route, or if a proxy forwards turns but not this route.
        """
        body = {"prompt": probe.text, "add_special_tokens": False}
        try:
            async with asyncio.timeout(TOKENIZE_TIMEOUT_S):
                async with self._open_session().post(
                    f"{url}/tokenize", json=body, headers=key_headers(url), allow_redirects=False
                ) as response:
                    answer = await response.read()
                    if response.status in RETRIED_STATUSES:
                        return None
                    if hidden := _hidden(response, answer):
                        if self._answered_at == -math.inf:
                            return None  # the engine may not have started
                        logger.warning("the tokenizer of the engine at %s is not checked: %s", redacted(url), hidden)
                    return probe.complaint(answer) if response.status == 200 else ""
        except (TimeoutError, aiohttp.ClientError, OSError, EngineError) as error:
            logger.debug("%s has no usable /tokenize: %s", url, error)
            return None

    @property
    def fidelity(self) -> EngineFidelity | None:
        probe = self._probes.get(self._base_url)
        is_answered = probe is not None and probe.done() and not probe.cancelled() and probe.exception() is None
        return probe.result() if probe is not None and is_answered else None

    async def probe_prompts(self) -> EngineFidelity | None:
        """As ``HttpEngine.probe_prompts``; concurrent turns share the probe."""
        make_probe = self._prompt_probe
        if make_probe is None or self._closed:
            return None
        return await self._asked_once(self._probes, lambda url: self._probed_prompts(url, make_probe))

    async def _probed_prompts(self, url: str, make_probe: Callable[[], PromptProbe]) -> EngineFidelity | None:
        try:
            probe = await asyncio.to_thread(make_probe)
            async with asyncio.timeout(PROMPT_PROBE_TIMEOUT_S):
                answers = [(probe.text, await self._ran_ids(url, probe.text))]
                if await self._sees_images(url):
                    answers += [(prompt, await self._ran_ids(url, prompt)) for prompt in probe.images]
                fidelity = probe.verdict(answers)
        except (TimeoutError, aiohttp.ClientError, OSError, EngineError, ForeignReplyError) as error:
            logger.debug("the prompt probe of the engine at %s failed: %s", redacted(url), error)
            return None
        except Exception as error:  # noqa: BLE001 - no turn needs the probe, in which a tokenizer may raise anything
            fidelity = EngineFidelity(findings=(f"was not probed: {error!r}",))
        for finding in fidelity.findings:
            logger.warning("the engine at %s %s", redacted(url), finding)
        return fidelity

    async def _sees_images(self, url: str) -> bool:
        """Asks an engine that has answered a prompt. If a proxy hides the route, prompts with images are not probed."""
        worker = (await self._worker_urls(url))[0]  # a router does not report the model of its workers
        try:
            return parse_sees_images(await self._first_answer(worker, MODEL_ROUTES))
        except ForeignReplyError as error:
            logger.warning("the engine at %s does not say whether its model takes images: %s", redacted(worker), error)
            return False

    async def _first_answer(self, worker: str, routes: Sequence[str]) -> bytes:
        """Returns the body of the first route that a worker has.

        Raises:
            ForeignReplyError: it has none of them, or a proxy hides them.
        """
        hidden = ""
        for route in routes:
            async with self._open_session().get(
                f"{worker}{route}", headers=key_headers(worker), allow_redirects=False
            ) as response:
                body = await response.read()
                is_hidden = _hidden(response, body)
                if response.status == 200 and not is_hidden:
                    return body
                hidden = hidden or is_hidden
        raise ForeignReplyError(hidden or "it has none of the routes")

    async def _ran_ids(self, url: str, prompt: ProbePrompt) -> list[int] | None:
        """Returns the ids that the engine ran for a prompt, images as placeholders; None if it reports none."""
        for by_log_probs in (False, True):  # log-probs are for SGLang before 0.5.13, which reports no ids otherwise
            body = probe_body(prompt.ids, prompt.images, by_log_probs=by_log_probs)
            headers = {"Content-Type": "application/json", SESSION_HEADER: "probe", **key_headers(url)}
            async with self._open_session().post(
                f"{url}{self.route}", data=body, headers=headers, allow_redirects=False
            ) as response:
                ran = parse_probe_reply(response.status, await response.read())
            if ran is not None:
                return self._prompts.with_placeholders(prompt.ids, ran) if by_log_probs and prompt.images else ran
        return None

    async def load(self) -> EngineLoad | None:
        """Returns the running and waiting requests of all workers; None if one of them does not report them.

        An engine that does not report it is asked again after ``NO_LOAD_REMEMBERED_S``.
        """
        url = self._base_url
        if self._closed or time.monotonic() - self._says_no_load.get(url, -math.inf) < NO_LOAD_REMEMBERED_S:
            return None
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                workers = await self._worker_urls(url)
                answers = await asyncio.gather(*(self._first_answer(worker, LOAD_ROUTES) for worker in workers))
                loads = [parse_loads(answer) for answer in answers]
        except (TimeoutError, aiohttp.ClientError, OSError, EngineError, ForeignReplyError) as error:
            logger.debug("the engine at %s does not report its load: %s", redacted(url), error)
            self._says_no_load = {url: time.monotonic()}
            return None
        return EngineLoad(running=sum(load.running for load in loads), waiting=sum(load.waiting for load in loads))

    def _headers(self, session_id: str) -> dict[str, str]:
        return {SESSION_HEADER: session_id, **key_headers(self._base_url)}

    def _body(self, request: GenerateRequest, sampled: Sequence[int], rid: str) -> bytes:
        ids = [*request.input_ids, *sampled]
        return generate_body(
            input_ids=ids,
            sampling_params=request.sampling_params,
            max_new_tokens=request.sampling_params.max_new_tokens - len(sampled),
            images=request.images,
            rid=rid,
            banned_ids=request.banned_ids,
            experts_from=self._experts_from(request, ids),
            is_streamed=self._is_streamed(request),
            reports_prompt=not self._is_streamed(request) or self._needs_ran_ids(request),
        )

    def _needs_ran_ids(self, request: GenerateRequest) -> bool:
        """Returns False for a prompt of text if the engine is known to run such prompts unchanged.

        Each event of a stream would repeat the ids that the engine ran, so they are not requested where nothing can
        differ.
        """
        return bool(request.images) or not self._probe_found(PromptIntegrity.EXACT, request)

    def _is_streamed(self, request: GenerateRequest) -> bool:
        """Returns False without ``on_tokens``, and for a request with banned ids or per-token records.

        ``StreamedReply`` does not join the log-probs of banned ids. Records come with the last event only, so that a
        broken stream would lose them.
        """
        return not (request.on_tokens is None or request.banned_ids or asked_records(request.sampling_params))

    def _stream(self, request: GenerateRequest) -> StreamedReply | None:
        on_tokens = request.on_tokens
        if on_tokens is None or not self._is_streamed(request):
            return None

        def deliver(ids: Sequence[int]) -> None:
            self._check_ids(ids)
            on_tokens(ids)

        return StreamedReply(deliver, request.sampling_params, self._prompts.eos_id)

    def _experts_from(self, request: GenerateRequest, ids: Sequence[int]) -> int:
        """Returns the first position whose experts are still to be reported.

        An engine that changes prompts may have run other ids for a prefix that it reported before: it reports the whole
        sequence each time.
        """
        kinds = asked_records(request.sampling_params)
        if ROUTED_EXPERTS not in kinds or self._probe_found(PromptIntegrity.CHANGED, request):
            return 0
        return self._reported_experts.first_missing(request.session_id, ids, request.images)

    def _part(self, answer: HttpAnswer) -> SampledPart:
        return part_of_answer(answer, parse_generate_reply)

    def _check(self, part: SampledPart, request: GenerateRequest, sampled: Sequence[int]) -> None:
        limit = request.sampling_params.max_new_tokens - len(sampled)
        if len(part.ids) > limit:
            raise EngineError(f"the engine sent {len(part.ids)} tokens for a limit of {limit}")
        if not part.ids and not sampled and part.finish_reason != "abort":
            raise EngineError(f"the engine sent no token and finish_reason {part.finish_reason!r}")
        self._check_ids(part.ids)
        if part.ids:
            self._check_records(part, request, sampled)

    def _can_be_resumed(self, part: SampledPart, request: GenerateRequest) -> bool:
        params = request.sampling_params
        if not part.ids or not (has_grammar(params) or self._prompts.may_end_within(part.ids, stop_sequences(params))):
            return True
        if self._is_streamed(request):
            raise EngineError(f"the engine at {self._base_url} aborted a stream that cannot be continued")
        return False

    def _check_ids(self, ids: Sequence[int]) -> None:
        if (invalid_id := first_invalid_id(ids, self._vocabulary_size)) is not None:
            size = "" if self._vocabulary_size is None else f" of {self._vocabulary_size} ids"
            raise EngineError(f"the engine sent the token id {invalid_id}, which is not in the vocabulary{size}")

    def _check_records(self, part: SampledPart, request: GenerateRequest, sampled: Sequence[int]) -> None:
        if missing := asked_records(request.sampling_params) - part.records.keys():
            raise EngineError(f"the engine at {redacted(self._base_url)} {_MISSING_RECORDS[min(missing)]}")
        if (experts := part.records.get(ROUTED_EXPERTS)) is not None:
            ids = [*request.input_ids, *sampled, *part.ids]
            self._reported_experts.note(request.session_id, ids, request.images, experts)

    async def _with_receipt(
        self, request: GenerateRequest, parts: Sequence[SampledPart], reply: GenerateReply
    ) -> GenerateReply:
        checked = self._checked_prompt(request, parts)
        if checked is None:
            return reply
        receipt = replace(checked.receipt, images=tuple(image.sha256 for image in request.images))
        if receipt.check is PromptCheck.UNKNOWN:
            if not request.images and reply.prompt_tokens not in (None, len(request.input_ids)):
                receipt = replace(receipt, untrained_because=OTHER_LENGTH)
            elif not (self._probe_found(PromptIntegrity.EXACT, request) or await self._is_proven(request, parts)):
                receipt = replace(receipt, untrained_because=NOT_PROVEN)
        return replace(reply, prompt_receipt=receipt, ran_prompt_ids=checked.ran_ids)

    def _checked_prompt(self, request: GenerateRequest, parts: Sequence[SampledPart]) -> CheckedPrompt | None:
        """Returns the prompt check of the first part with sampled tokens; None if no part has any.

        Later parts must have run the same ids and the output so far. A part without reported ids makes the result
        unknown.
        """
        checked: CheckedPrompt | None = None
        prompt, sampled = list(request.input_ids), list[int]()
        for part in (part for part in parts if part.ids):
            of_part = self._prompts.check([*prompt, *sampled], part.prompt_ids, len(request.images))
            if checked is None or of_part.receipt.check is PromptCheck.UNKNOWN:
                checked = of_part
                prompt = prompt if of_part.ran_ids is None else of_part.ran_ids
            elif of_part.receipt.check is PromptCheck.DIFFERING and checked.receipt.check is not PromptCheck.UNKNOWN:
                checked = replace(
                    checked,
                    receipt=replace(checked.receipt, check=PromptCheck.DIFFERING, untrained_because=RESUMED_ELSEWHERE),
                )
            sampled += part.ids
        return checked

    def _probe_found(self, integrity: PromptIntegrity, request: GenerateRequest) -> bool:
        fidelity = self.fidelity
        return fidelity is not None and fidelity.of(images=bool(request.images)) is integrity

    async def _is_proven(self, request: GenerateRequest, parts: Sequence[SampledPart]) -> bool:
        """Returns True if the tokenizer encodes the decoded text of each prompt to the same ids."""
        sampled: list[int] = []
        for part in (part for part in parts if part.ids):
            prompt = [*request.input_ids, *sampled]
            encodes_to_itself = self._prompts.encodes_to_itself
            is_long = len(prompt) >= MANY_IDS
            if not (await asyncio.to_thread(encodes_to_itself, prompt) if is_long else encodes_to_itself(prompt)):
                return False
            sampled += part.ids
        return True

    def _call_cancelled(self, base_url: str, rid: str) -> None:
        if self._closed:
            return
        task = asyncio.create_task(self._abort(base_url, rid))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _abort(self, base_url: str, rid: str) -> None:
        """Aborts a request on the engine, which would otherwise sample up to its length limit; ignores failures."""
        try:
            async with asyncio.timeout(self._settings.abort_timeout_s):
                urls = await self._worker_urls(base_url)
                await asyncio.gather(*(self._post_abort(url, rid) for url in urls))
        except (TimeoutError, aiohttp.ClientError, OSError, EngineError, ForeignReplyError) as error:
            logger.debug("the abort of %s did not reach %s: %s", rid, base_url, error)

    async def _post_abort(self, worker_url: str, rid: str) -> None:
        async with self._open_session().post(
            f"{worker_url}/abort_request", json={"rid": rid}, headers=key_headers(worker_url)
        ) as response:
            await response.read()

    async def _worker_urls(self, base_url: str) -> tuple[str, ...]:
        """Returns the addresses of the engines behind a router; ``base_url`` alone if there is no router.

        A router forwards neither aborts nor questions about load and model, so each worker gets them itself.
        """
        requested_at, urls = self._workers.get(base_url, (-math.inf, ()))
        if time.monotonic() - requested_at < WORKERS_REMEMBERED_S:
            return urls
        async with self._open_session().get(f"{base_url}/workers", headers=key_headers(base_url)) as response:
            body = await response.read()
        urls = urls_of_workers(body) if response.status == 200 and body.lstrip().startswith(b"{") else ()
        self._workers = {base_url: (time.monotonic(), urls or (base_url,))}
        return self._workers[base_url][1]


def _hidden(response: aiohttp.ClientResponse, body: bytes) -> str:
    """Returns which proxy answered a route in place of the engine; empty if the engine did.

    The 404 of SGLang is JSON, that of its router is empty.
    """
    if not (is_html(body) or (response.status == 404 and body[:1] not in (b"", b"{"))):
        return ""
    return f"{response.headers.get('Server', 'a proxy')} answers {response.url.path} with HTTP {response.status}"
