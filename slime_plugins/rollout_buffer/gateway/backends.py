"""The engine, the chat template and the sampling parameters of a job, which its sessions share."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from typing import Any

from slime_plugins.rollout_buffer.chat_tokens import ChatTokens
from slime_plugins.rollout_buffer.engine.base import Engine
from slime_plugins.rollout_buffer.engine.circuit_breaker import CircuitBreaker, ReportThrottle
from slime_plugins.rollout_buffer.engine.factory import make_engine
from slime_plugins.rollout_buffer.engine.http_engine import HttpEngine
from slime_plugins.rollout_buffer.engine.image_token_counts import image_size, size_rule_of
from slime_plugins.rollout_buffer.engine.prompt_probe import EngineFidelity
from slime_plugins.rollout_buffer.errors import ConfigError, ConflictError, InvalidPayloadError
from slime_plugins.rollout_buffer.gateway.slot_claims import PLAYED_BY_RUNNER
from slime_plugins.rollout_buffer.recording.message_matching import matching_of
from slime_plugins.rollout_buffer.recording.messages import digest
from slime_plugins.rollout_buffer.storage.tables.job_rows import JobRecord
from slime_plugins.rollout_buffer.tokenizer_loading import load_tokenizer
from slime_plugins.rollout_buffer.types import EngineReport, EngineTrouble, Image
from slime_plugins.rollout_buffer.wire.job_settings import JobSettings

PIN_OPTION = "pin_sampling_params"
"""Option of a job whose requests cannot change the sampling distribution; see ``chat_requests.sampling_of``."""
TEMPLATE_OPTION = "chat_template_kwargs"
"""Option of a job with arguments for its chat template."""
MAX_TEMPLATES = 16
"""Limit of the cached templates of one backend."""
MAX_TOKENIZERS = 16
"""Limit of the cached tokenizers of this process."""
REOPEN_AFTER_S = 60.0
"""Pause after which a backend that could not be opened is opened again, unless a turn does so before."""

logger = logging.getLogger(__name__)


class JobBackend:
    """The engine and chat template of one job."""

    def __init__(self, settings: JobSettings, engine: Engine, tokenizer: Any) -> None:
        self.engine = engine
        self.probing: asyncio.Task[EngineFidelity | None] | None = None
        """The prompt probe of the engine; the backend's first turn waits for its result."""
        self.stored_prompt_findings: tuple[str, ...] | None = None
        """The findings of the probe that the store has; None before any are stored."""
        self._breaker = CircuitBreaker(engine) if isinstance(engine, HttpEngine) else None
        self.reports = ReportThrottle()
        self.tokenizer = tokenizer
        self.sampling = settings.sampling()
        self.matching = matching_of(settings.options)
        self.is_pinned = settings.options.get(PIN_OPTION) is True
        self.max_turns = _limit(settings.options, "max_turns")
        self.max_tokens_total = _limit(settings.options, "max_tokens_total")
        self._size_rule = size_rule_of(settings.tokenizer_path)
        # The parameters of transformers' own method are reserved. A model's class may override it with options of its
        # template (Kimi's ``thinking``); transformers' class is the last in the MRO that defines the method.
        library: Any = [kind for kind in type(tokenizer).__mro__ if "apply_chat_template" in vars(kind)][-1]
        self._reserved = {"messages", *inspect.signature(library.apply_chat_template).parameters}
        """Arguments of ``apply_chat_template`` that a request must not set."""
        self._template_options: Mapping[str, Any] = settings.options.get(TEMPLATE_OPTION) or {}
        self._chats: OrderedDict[bytes, ChatTokens] = OrderedDict()
        """By the digest of their options, the least recently used first."""
        self.chat_for(None)  # a template that does not work is an error now, not at the first turn

    def chat_for(self, template_options: Mapping[str, Any] | None) -> ChatTokens:
        """Returns the chat template with a request's options over the job's.

        Raises:
            InvalidPayloadError: an option is reserved.
            ConfigError: the template does not work with these options.
        """
        options = {**self._template_options, **(template_options or {})}
        reserved = self._reserved & options.keys()
        if reserved:
            raise InvalidPayloadError(
                f"chat_template_kwargs: {', '.join(sorted(reserved))} cannot be given",
                {"param": "chat_template_kwargs"},
            )
        key = digest(options)
        if key not in self._chats:
            self._chats[key] = ChatTokens(self.tokenizer, options)
            if len(self._chats) > MAX_TEMPLATES:
                self._chats.popitem(last=False)
        self._chats.move_to_end(key)
        return self._chats[key]

    def tokens_of_image(self, image: Image) -> int:
        """Returns the number of prompt tokens of an image.

        It is 1 where the number is unknown: the tokenizer's folder does not say how images are resized, or Pillow is
        not installed.

        Raises:
            InvalidPayloadError: one side of the image is more than 200 times as long as the other.
        """
        if self._size_rule is None or find_spec("PIL") is None or (size := image_size(image.data)) is None:
            return 1
        try:
            return self._size_rule.tokens_of(*size)
        except ValueError as error:
            raise InvalidPayloadError(f"the image {image.sha256}: {error}") from error

    @property
    def trouble(self) -> str | None:
        """Why the engine fails its latest requests; None if the engine works, or was not called."""
        if not isinstance(self.engine, HttpEngine):
            return None
        report = self.engine.report(while_idle=True)
        return None if report.code is EngineTrouble.NONE else f"the engine at {report.url} {report.message}"

    def due_report(self) -> EngineReport | None:
        """Returns the engine's state if it is to be stored now.

        An engine that was unreachable is reported even if no session calls it any more, because agents give up sooner
        than engines recover. The engine is then probed in the background until it answers.
        """
        if not isinstance(self.engine, HttpEngine) or self._breaker is None:
            return None
        report = self.engine.report()
        if report.code is EngineTrouble.NONE and self.engine.is_away and not self._breaker.has_recovered():
            report = self.engine.report(while_idle=True)
        return report if self.reports.is_due(report) else None

    def new_prompt_findings(self) -> tuple[str, ...] | None:
        """Returns the findings of the prompt probe if the store does not have them; None otherwise."""
        fidelity = self.engine.fidelity if isinstance(self.engine, HttpEngine) else None
        if fidelity is None or fidelity.findings == self.stored_prompt_findings:
            return None
        return fidelity.findings

    async def close(self) -> None:
        if self._breaker is not None:
            await self._breaker.close()
        await self.engine.close()


class JobBackends:
    """The backends of all jobs with sessions, created on first use."""

    def __init__(
        self,
        settings_of: Callable[[JobRecord], JobSettings],
        connect: Callable[..., Engine] = make_engine,
        load: Callable[[str], Any] = load_tokenizer,
    ) -> None:
        """``connect`` is called as ``make_engine`` with its tokenizer arguments, ``load`` with a tokenizer's path."""
        self._settings_of, self._connect = settings_of, connect
        self._load = functools.lru_cache(MAX_TOKENIZERS)(functools.partial(_logged_load, load))
        self._backends: dict[int, JobBackend] = {}
        self._making: dict[int, asyncio.Task[JobBackend]] = {}
        self._failed: dict[int, tuple[float, str]] = {}
        """By job key: when the latest attempt to open a backend failed, and why."""

    async def open_ahead(self, jobs: Iterable[JobRecord]) -> None:
        """Opens the backends of jobs before a turn needs them."""
        for job in jobs:
            failed_at, _ = self._failed.get(job.key, (-math.inf, ""))
            if time.monotonic() - failed_at >= REOPEN_AFTER_S:
                with contextlib.suppress(ConflictError):  # the error was logged; the other jobs are opened
                    await self.open(job)

    async def open(self, job: JobRecord) -> JobBackend:
        """Returns the backend of a job. The first call creates it and starts the prompt probe of its engine.

        Raises:
            ConflictError: the job has a runner, or no engine or tokenizer, or the tokenizer does not load.
        """
        if job.has_runner:
            raise ConflictError(PLAYED_BY_RUNNER.format(job.job_id))
        if (backend := self._backends.get(job.key)) is not None:
            return backend
        if (making := self._making.get(job.key)) is None:
            making = self._making[job.key] = asyncio.create_task(self._make_and_keep(job))
        return await asyncio.shield(making)

    async def _make_and_keep(self, job: JobRecord) -> JobBackend:
        try:
            backend = self._backends[job.key] = await self._make(job)
        except ConflictError as error:
            _, logged_message = self._failed.get(job.key, (0.0, ""))
            if error.message != logged_message:
                logger.warning("%s", error.message)
            self._failed[job.key] = time.monotonic(), error.message
            raise
        finally:
            del self._making[job.key]
        if isinstance(backend.engine, HttpEngine):
            backend.probing = asyncio.create_task(backend.engine.probe_prompts())
        return backend

    def engine_moved(self, job: JobRecord) -> None:
        """Gives the engine of a job its present address, which a start may have changed."""
        backend = self._backends.get(job.key)
        if backend is not None and job.engine_url and isinstance(backend.engine, HttpEngine):
            backend.engine.set_base_url(job.engine_url)

    def opened(self) -> dict[int, JobBackend]:
        """Returns the open backends, by job key."""
        return dict(self._backends)

    async def keep_only(self, job_keys: set[int]) -> None:
        """Closes the backends of all other jobs."""
        for key in self._backends.keys() - job_keys:
            await self._backends.pop(key).close()

    async def _make(self, job: JobRecord) -> JobBackend:
        path = job.settings.tokenizer_path
        if not job.engine_url or not path:
            raise ConflictError(
                f"job {job.job_id} takes no sessions: sessions need remote_engine_url and tokenizer_path, "
                "which an external job may be started without"
            )
        try:
            tokenizer = await asyncio.to_thread(self._load, path)
            settings = self._settings_of(job)
            engine = self._connect(
                job.engine_url,
                tokenizer=tokenizer,
                tokenizer_path=path,
                requires_exact_prompts=settings.exact_prompts == "require",
            )
            return JobBackend(settings, engine, tokenizer)
        except Exception as error:  # a broken folder makes transformers raise anything
            raise ConflictError(f"job {job.job_id} takes no sessions: {error}") from error


def _logged_load(load: Callable[[str], Any], path: str) -> Any:
    logger.info("loading the tokenizer %s", path)
    return load(path)


def _limit(options: Mapping[str, Any], name: str) -> int | None:
    """Returns a limit that the options of a job set for each session; None without one."""
    limit = options.get(name)
    if limit is not None and (type(limit) is not int or limit < 1):
        raise ConfigError(f"{name} must be a whole number of at least 1")
    return limit
