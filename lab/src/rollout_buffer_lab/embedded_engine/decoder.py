"""Continuous batching: requests join and leave between two forward passes; each pass samples one token per request.

transformers' own ``ContinuousBatchingManager`` is not used: its log-probs are computed after top_p, whereas a trainer
recomputes those before top_p; it has no seed per request, cannot keep or drop a running request's KV cache at a weight
update, and takes no images.

The first ``_ready`` slots hold requests that decode, the following slots hold requests in prefill.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import torch

from rollout_buffer_lab.embedded_engine.language_model import LanguageModel, SequenceChunk, WeightsError
from rollout_buffer_lab.embedded_engine.prefix_cache import PrefixCache
from rollout_buffer_lab.embedded_engine.settings import EmbeddedEngineSettings
from rollout_buffer_lab.embedded_engine.token_sampling import TokenChoice, choose
from rollout_buffer_lab.embedded_engine.vision_inputs import ImagePrompt
from rollout_buffer_lab.sglang_routes.records import ABORTED, PauseMode
from rollout_buffer_lab.sglang_routes.sampling import Sampling

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Request:
    """One running generation. ``ids`` are prompt and output; the decoding thread calls ``on_token`` after each token
    but the last, and ``on_finish`` once.

    The first ``filled`` positions of its slot have keys and values. ``update_number`` is that of the newest weight
    update when they were computed, -1 before the request has a slot.
    """

    rid: str
    ids: list[int]
    sampling: Sampling
    on_finish: Callable[[Request], None]
    on_token: Callable[[Request], None] | None = None
    image_prompt: ImagePrompt | None = None
    prompt_length: int = 0
    filled: int = 0
    update_number: int = -1
    cached_tokens: int = 0
    log_probs: list[float] = field(default_factory=list)
    asked_log_probs: list[tuple[float, ...]] = field(default_factory=list)
    versions: list[tuple[str, int]] = field(default_factory=list)
    finish_reason: Mapping[str, Any] | None = None
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self.prompt_length = len(self.ids)

    @property
    def output_ids(self) -> list[int]:
        """The sampled ids so far."""
        return self.ids[self.prompt_length :]

    @property
    def keys(self) -> list[int]:
        """The key of the prefix cache: the ids, with numbers made of the images in place of image tokens."""
        return self.ids if self.image_prompt is None else [*self.image_prompt.keys, *self.output_ids]

    @property
    def has_unread_images(self) -> bool:
        """True if an image is not prefilled yet."""
        return self.image_prompt is not None and self.image_prompt.spans[-1][1] > self.filled

    def version_spans(self, current: str) -> list[tuple[str, int, int]]:
        """Returns version, start and end of each span of output; without output an empty span of ``current``."""
        starts = [*self.versions, ("", len(self.log_probs))]
        return [(version, start, end) for (version, start), (_, end) in pairwise(starts)] or [(current, 0, 0)]


@dataclass(frozen=True, slots=True, eq=False)
class WeightUpdate:
    """A request for new weights, which are loaded once no request decodes; ``on_done`` gets the error, or None."""

    path: Path
    version: str | None
    on_done: Callable[[WeightsError | None], None]


class Decoder:
    """All requests of an engine. Used from one thread, which calls ``step`` while ``has_work``."""

    def __init__(self, model: LanguageModel, settings: EmbeddedEngineSettings) -> None:
        self.paused = False
        self.weight_version = settings.weight_version
        self._model = model
        self._settings = settings
        self._prefixes = PrefixCache(settings.prefix_cache_mb << 20)
        self._waiting: deque[Request] = deque()
        self._slots: list[Request] = []
        self._ready = 0
        self._update_number = 0
        self._updates: deque[WeightUpdate] = deque()
        self._random = random.Random(settings.seed)

    @property
    def has_work(self) -> bool:
        """True if ``step`` has work."""
        return self._may_update() or (not self.paused and bool(self._slots or self._waiting))

    @property
    def running(self) -> int:
        """Number of requests with a slot."""
        return len(self._slots)

    def submit(self, request: Request) -> None:
        """Queues a request; it starts when it has a slot."""
        self._waiting.append(request)

    def step(self) -> None:
        """Loads pending weights, then runs one forward pass for prefill and one for decoding."""
        if self._may_update():
            self._update_weights(self._updates.popleft())
        if self.paused:
            return
        if not self._updates:
            self._admit()
        self._prefill()
        self._decode()

    def abort(self, rid: str | None) -> None:
        """Finishes one request, or with None all, with the output so far."""
        for request in [*self._slots, *self._waiting]:
            if rid is None or request.rid == rid:
                self._remove(request, ABORTED)

    def pause(self, mode: PauseMode) -> None:
        """Pauses the engine; running requests are aborted, keep their slots, or wait for a new prefill."""
        self.paused = True
        if mode is PauseMode.ABORT:
            self.abort(None)
        elif mode is PauseMode.RETRACT:
            self._finish_unresumable()
            self._waiting.extendleft(reversed(self._slots))
            self._slots, self._ready = [], 0

    def _finish_unresumable(self) -> None:
        """Finishes requests that sampled an image placeholder, which a new prefill would take for an image."""
        vision = self._model.vision
        for request in list(self._slots):
            if vision is not None and request.image_prompt is not None and vision.placeholder_id in request.output_ids:
                self._remove(request, ABORTED)

    def resume(self) -> None:
        """Continues paused requests."""
        self.paused = False

    def update_weights(self, update: WeightUpdate) -> None:
        """Loads new weights once no request decodes: at once while paused, else after the running requests."""
        self._updates.append(update)

    def withdraw(self, update: WeightUpdate) -> None:
        """Cancels a pending weight update."""
        if update in self._updates:
            self._updates.remove(update)

    def flush_cache(self) -> bool:
        """Drops the prefixes of finished requests; refused (False) while requests run."""
        if (self._slots or self._waiting) and not self.paused:
            return False
        self._prefixes.flush()
        return True

    def fail(self, error: BaseException) -> None:
        """Fails every request: a forward pass failed, and the slots are in an unknown state."""
        for request in [*self._slots, *self._waiting]:
            request.error = error
            request.on_finish(request)
        self._slots, self._ready = [], 0
        self._waiting.clear()
        self._prefixes.flush()

    # --- slots -------------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        while self._waiting and len(self._slots) < self._settings.max_running:
            request = self._waiting.popleft()
            if len(request.log_probs) >= request.sampling.max_new_tokens:
                self._finish(request, _length_reached(request))
                continue
            self._slots.append(request)
            request.filled, stored = self._prefixes.find(request.keys)
            if request.image_prompt is not None:
                request.filled = request.image_prompt.start_of_cached(request.filled)
            request.update_number = self._update_number
            if not request.log_probs:
                request.cached_tokens = request.filled
            self._model.cache.reserve(len(self._slots), len(request.ids))
            if request.filled:
                self._model.cache.write(len(self._slots) - 1, stored, request.filled)

    def _remove(self, request: Request, reason: Mapping[str, Any]) -> None:
        """Removes a request and frees its slot; its KV cache is kept as a prefix unless the weights have changed."""
        if request in self._slots:
            slot = self._slots.index(request)
            if request.update_number == self._update_number and request.filled:
                self._prefixes.keep(request.keys[: request.filled], self._model.cache.read(slot, request.filled))
            self._close_gap(slot)
        else:
            self._waiting.remove(request)
        self._finish(request, reason)

    def _close_gap(self, slot: int) -> None:
        """Closes the gap of a free slot by moving other requests.

        The last decoding request fills a gap among the decoding ones; the last request fills the gap that is left.
        """
        gaps = [slot, len(self._slots) - 1]
        if slot < self._ready:
            self._ready -= 1
            gaps.insert(1, self._ready)
        for target, source in pairwise(gaps):
            if source != target:
                self._model.cache.move(source, target, self._slots[source].filled)
                self._slots[target] = self._slots[source]
        self._slots.pop()

    def _finish(self, request: Request, reason: Mapping[str, Any]) -> None:
        request.finish_reason = reason
        request.on_finish(request)

    # --- forward passes ----------------------------------------------------------------------------------------------

    def _prefill(self) -> None:
        """Prefills as many prompts as fit one pass. A long prompt takes several; one with images has its own.

        Only the first request of a pass can be left unfinished: ``_fitting`` adds others if they fit completely.
        """
        unfinished = self._slots[self._ready :]
        if not unfinished:
            return
        alone = unfinished[0].has_unread_images
        max_tokens = len(unfinished[0].ids) if alone else self._settings.prefill_tokens
        batch = unfinished[:1] if alone else self._fitting(unfinished, max_tokens)
        logits = self._pass(self._ready, batch, max_tokens)
        prefilled = list(takewhile(lambda request: request.filled == len(request.ids), batch))
        self._ready += len(prefilled)
        self._take_tokens(prefilled, logits)

    def _fitting(self, requests: Sequence[Request], max_tokens: int) -> list[Request]:
        """Returns the first request, and the next ones while all fit completely into a pass of ``max_tokens``."""
        longest, batch = 0, list[Request]()
        for request in takewhile(lambda request: not request.has_unread_images, requests):
            longest = max(longest, len(request.ids) - request.filled)
            if batch and longest * (len(batch) + 1) > max_tokens:  # a pass pads all chunks to the longest
                break
            batch.append(request)
        return batch

    def _decode(self) -> None:
        batch = self._slots[: self._ready]
        if batch:
            self._take_tokens(batch, self._pass(0, batch, 1))

    def _pass(self, first: int, batch: Sequence[Request], max_tokens: int) -> torch.Tensor:
        """Runs at most ``max_tokens`` further tokens of each request; returns the logits after each one's last."""
        chunks = [SequenceChunk(r.ids[r.filled : r.filled + max_tokens], r.filled, r.image_prompt) for r in batch]
        logits = self._model.logits(first, chunks)
        for request, chunk in zip(batch, chunks, strict=True):
            request.filled += len(chunk.ids)
        return logits

    def _take_tokens(self, batch: Sequence[Request], logits: torch.Tensor) -> None:
        if not batch:
            return
        samplings = [request.sampling for request in batch]
        choices = choose(logits[: len(batch)], samplings, [self._uniform(request) for request in batch])
        for request, choice in zip(batch, choices, strict=True):
            self._append(request, choice)
        for request in batch:
            if (reason := self._finish_reason(request)) is not None:
                self._remove(request, reason)
            elif request.on_token is not None:
                request.on_token(request)

    def _append(self, request: Request, choice: TokenChoice) -> None:
        if not request.versions or request.versions[-1][0] != self.weight_version:
            request.versions.append((self.weight_version, len(request.log_probs)))
        request.ids.append(choice.token_id)
        request.log_probs.append(choice.log_prob)
        request.asked_log_probs.append(choice.asked_log_probs)

    def _uniform(self, request: Request) -> float:
        """Returns a number in [0, 1): with a seed, a function of seed and position, so that resuming gives equal
        tokens."""
        seed = request.sampling.sampling_seed
        return (self._random if seed is None else random.Random(f"{seed}/{len(request.ids)}")).random()

    def _finish_reason(self, request: Request) -> Mapping[str, Any] | None:
        """Returns the reason to finish, or None. The order of the checks is SGLang's: stop strings, tokens, length."""
        sampling, last = request.sampling, request.ids[-1]
        if sampling.stop and (matched := self._matched_stop(request)) is not None:
            return {"type": "stop", "matched": matched}
        if not sampling.ignore_eos and (last in self._model.eos_ids or last in sampling.stop_token_ids):
            return {"type": "stop", "matched": last}
        return _length_reached(request) if len(request.log_probs) >= sampling.max_new_tokens else None

    def _matched_stop(self, request: Request) -> str | None:
        """Returns the stop string that the last token completes; decodes only as many tokens as it can span."""
        num_tokens = max(map(len, request.sampling.stop)) + 1
        tail = request.ids[max(request.prompt_length, len(request.ids) - num_tokens) :]
        text = self._model.decode(tail, skip_special_tokens=False)
        return next((stop for stop in request.sampling.stop if stop in text), None)

    # --- new weights -------------------------------------------------------------------------------------------------

    def _may_update(self) -> bool:
        return bool(self._updates) and (self.paused or not self._slots)

    def _update_weights(self, update: WeightUpdate) -> None:
        try:
            self._model.load_weights(update.path)
        except Exception as error:  # noqa: BLE001 - reported to the caller
            update.on_done(error if isinstance(error, WeightsError) else WeightsError(f"cannot take weights: {error}"))
            return
        self._update_number += 1
        self._prefixes.flush()
        self.weight_version = update.version or self.weight_version
        update.on_done(None)


def _length_reached(request: Request) -> Mapping[str, Any]:
    return {"type": "length", "length": request.sampling.max_new_tokens}
