"""Connects the event loop, which receives requests, with the thread that runs the model.

Everything that changes the decoder is a function put into that thread's queue; it runs between two forward passes.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from rollout_buffer_lab.embedded_engine.decoder import Decoder, Request, WeightUpdate
from rollout_buffer_lab.embedded_engine.language_model import LanguageModel, WeightsError
from rollout_buffer_lab.embedded_engine.settings import EmbeddedEngineSettings
from rollout_buffer_lab.embedded_engine.vision_inputs import ImagePrompt
from rollout_buffer_lab.sglang_routes.records import EngineBreakError, GenerateCall, PauseMode, Sampled, check_length
from rollout_buffer_lab.sglang_routes.sampling import BadRequestError, Sampling

logger = logging.getLogger(__name__)

T = TypeVar("T")
ANSWER_LIMIT_S: Final = 600.0
"""Time limit of a request to the decoding thread that samples nothing."""


class EmbeddedEngine:
    """Serves one model; the backend of ``sglang_routes.app``. Created and used on an event loop."""

    def __init__(self, model: LanguageModel, settings: EmbeddedEngineSettings) -> None:
        self.settings = settings
        self._model = model
        self._decoder = Decoder(model, settings)
        self._rids: set[str] = set()
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="embedded-engine", daemon=True)
        self._thread.start()

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, for its chat template."""
        return self._model.tokenizer

    @property
    def paused(self) -> bool:
        """True while requests are paused."""
        return self._decoder.paused

    @property
    def weight_version(self) -> str:
        """The weight version of the next token."""
        return self._decoder.weight_version

    def loads(self) -> tuple[int, int]:
        """Number of running and of waiting requests."""
        running = 0 if self.paused else min(self._decoder.running, len(self._rids))
        return running, len(self._rids) - running

    def model_info(self) -> dict[str, Any]:
        """The reply of ``/model_info``."""
        path = str(self.settings.model_path)
        return {
            "model_path": path,
            "served_model_name": path,
            "tokenizer_path": path,
            "is_generation": True,
            "has_image_understanding": self._model.vision is not None,
            "weight_version": self.weight_version,
            "embedded_engine": True,
        }

    def server_info(self) -> dict[str, Any]:
        """The reply of ``/server_info``."""
        return {
            "model_path": str(self.settings.model_path),
            "version": "embedded",
            "context_length": self._model.context_length,
            "max_total_num_tokens": self._model.context_length * self.settings.max_running,
            "max_running_requests": self.settings.max_running,
            "internal_states": [],
        }

    async def generate(self, call: GenerateCall) -> Sampled:
        """Samples the reply to one request; while the engine is paused the request waits without an answer.

        If the caller is cancelled, the request ends between two forward passes.

        Raises:
            BadRequestError: the request is wrong; the message says what is.
            EngineBreakError: fewer images than placeholders, or a forward pass failed.
        """
        ids = await self._checked_ids(call)
        image_prompt = await asyncio.to_thread(self._image_prompt, ids, call.images) if call.images else None
        ids = ids if image_prompt is None else list(image_prompt.ids)
        check_length(len(ids), call.sampling.max_new_tokens, self._model.context_length)
        rid = call.rid or uuid.uuid4().hex
        if rid in self._rids:
            raise BadRequestError({"message": f"Duplicate request ID detected: {rid}"})
        self._rids.add(rid)
        try:
            request = await self._decode(rid, ids, image_prompt, call)
        finally:
            self._rids.discard(rid)
        if request.error is not None:
            raise EngineBreakError(f"a forward pass failed: {request.error}")
        return self._reply_of(request)

    async def abort(self, rid: str | None) -> None:
        """Finishes one request, or with None all, with the output so far; an unknown id is ignored."""
        await self._between_passes(lambda: self._decoder.abort(rid))

    async def pause(self, mode: PauseMode) -> None:
        """Pauses new requests; running ones are aborted or wait, by ``mode``."""
        await self._between_passes(lambda: self._decoder.pause(mode))

    async def resume(self) -> None:
        """Continues paused requests."""
        await self._between_passes(self._decoder.resume)

    async def update_weight_version(self, version: str) -> None:
        """Sets the version of later tokens."""

        def rename() -> None:
            self._decoder.weight_version = version

        await self._between_passes(rename)

    async def update_weights(self, path: Path, version: str | None) -> None:
        """Loads the weights in a folder, at once while paused, else after the running requests.

        Raises:
            WeightsError: they do not fit or were not loaded in time; the old ones stay.
        """
        loop, done = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

        def answer(error: WeightsError | None) -> None:
            loop.call_soon_threadsafe(_settle, done, None, error)

        update = WeightUpdate(path, version, answer)
        self._tasks.put(lambda: self._decoder.update_weights(update))
        try:
            await _within_limit(done)
        except TimeoutError as error:
            self._tasks.put(lambda: self._decoder.withdraw(update))
            raise WeightsError(
                f"the weights were not loaded within {ANSWER_LIMIT_S:g} s; the update is cancelled: requests run. "
                "Pause the engine before, or abort them (abort_all_requests)"
            ) from error

    async def flush_cache(self) -> bool:
        """Drops cached prefixes; refused (False) while requests run."""
        return await self._between_passes(self._decoder.flush_cache)

    async def close(self) -> None:
        """Aborts running requests and stops the thread."""
        self._tasks.put(lambda: self._decoder.abort(None))
        self._tasks.put(None)
        await asyncio.to_thread(self._thread.join)

    # --- requests ----------------------------------------------------------------------------------------------------

    async def _checked_ids(self, call: GenerateCall) -> list[int]:
        if call.sampling.not_computed:
            names = ", ".join(call.sampling.not_computed)
            raise BadRequestError({"message": f"the embedded engine does not compute these: {names}. Leave them out."})
        if call.images and self._model.vision is None:
            raise BadRequestError({"message": "the served model does not take images."})
        prompt = call.prompt
        ids = await asyncio.to_thread(self._model.encode, prompt) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise BadRequestError({"message": "The prompt is empty."})
        check_length(len(ids), call.sampling.max_new_tokens, self._model.context_length)
        size = self._model.vocab_size
        for token_id in (*ids, *call.sampling.logit_bias, *call.sampling.asked_ids):
            if type(token_id) is not int or not 0 <= token_id < size:
                raise BadRequestError({"message": f"{str(token_id)[:100]} is no id of this model ({size} ids)."})
        return ids

    def _image_prompt(self, ids: list[int], images: Sequence[bytes]) -> ImagePrompt | None:
        return None if self._model.vision is None else self._model.vision.image_prompt(ids, images)

    async def _decode(self, rid: str, ids: list[int], image_prompt: ImagePrompt | None, call: GenerateCall) -> Request:
        loop, done = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

        def report_end(request: Request) -> None:
            loop.call_soon_threadsafe(_settle, done, request, None)

        def report_token(request: Request) -> None:
            assert call.on_token is not None
            loop.call_soon_threadsafe(call.on_token, self._reply_of(request))

        request = Request(
            rid=rid,
            ids=ids,
            sampling=call.sampling,
            on_finish=report_end,
            on_token=None if call.on_token is None else report_token,
            image_prompt=image_prompt,
        )
        self._tasks.put(lambda: self._decoder.submit(request))
        try:
            await done
        except asyncio.CancelledError:
            self._tasks.put(lambda: self._decoder.abort(rid))
            raise
        return request

    def _reply_of(self, request: Request) -> Sampled:
        reason = request.finish_reason or {}
        return Sampled(
            rid=request.rid,
            text=self._text(request.output_ids, reason.get("matched"), request.sampling),
            output_ids=request.output_ids,
            log_probs=list(request.log_probs),
            asked_log_probs=list(request.asked_log_probs) if request.sampling.asked_ids else None,
            finish_reason=reason,
            weight_version=request.versions[-1][0] if request.versions else self.weight_version,
            version_spans=request.version_spans(self.weight_version),
            prompt_ids=request.ids[: request.prompt_length],
            cached_tokens=request.cached_tokens,
            image_tokens=sum(end - start for start, end in request.image_prompt.spans) if request.image_prompt else 0,
        )

    def _text(self, ids: list[int], matched: Any, sampling: Sampling) -> str:
        """Returns the text of a reply; without ``no_stop_trim`` it ends before the matched stop token or string."""
        trim = not sampling.no_stop_trim
        if trim and isinstance(matched, int):
            ids = ids[:-1]
        text = self._model.decode(ids, skip_special_tokens=sampling.skip_special_tokens)
        return text.partition(matched)[0] if trim and isinstance(matched, str) else text

    # --- the thread --------------------------------------------------------------------------------------------------

    async def _between_passes(self, function: Callable[[], T]) -> T:
        """Runs ``function`` in the decoding thread and returns its result.

        Raises:
            EngineBreakError: ``function`` raised, or did not run in time.
        """
        loop, done = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

        def call() -> None:
            try:
                result = function()
            except Exception as error:
                loop.call_soon_threadsafe(_settle, done, None, error)
                raise
            loop.call_soon_threadsafe(_settle, done, result, None)

        self._tasks.put(call)
        try:
            result: T = await _within_limit(done)
        except Exception as error:
            raise EngineBreakError(f"the engine failed: {error!r}") from error
        return result

    def _run(self) -> None:
        while True:
            try:
                task = self._tasks.get(block=not self._decoder.has_work)
            except queue.Empty:
                self._guarded(self._decoder.step)
                continue
            if task is None:
                return
            self._guarded(task)

    def _guarded(self, task: Callable[[], None]) -> None:
        try:
            task()
        except Exception as error:  # a model may raise anything: requests fail, and the engine continues
            logger.exception("a forward pass, or its preparation, failed")
            self._decoder.fail(error)


async def _within_limit(done: asyncio.Future[Any]) -> Any:
    """Awaits a future; raises ``TimeoutError`` after the limit of an answer."""
    async with asyncio.timeout(ANSWER_LIMIT_S):
        return await done


def _settle(done: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    """Completes a future unless it was cancelled."""
    if done.done():
        return
    if error is None:
        done.set_result(result)
    else:
        done.set_exception(error)
