"""Continuous batching: requests join and leave between two forward passes; each pass samples one token per request.

transformers' own ``ContinuousBatchingManager`` is not used: its log-probs are computed after top_p (a trainer
recomputes those before it), it has no seed per request, cannot keep or drop a running request's KV cache at a weight
update, and takes no images.

Slots ``0 .. ready`` hold requests that decode, the following slots hold requests in prefill.
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

    The first ``filled`` positions of its slot have keys and values, computed by the weights of ``epoch``.
    """

    rid: str
    ids: list[int]
    sampling: Sampling
    on_finish: Callable[[Request], None]
    on_token: Callable[[Request], None] | None = None
    image_prompt: ImagePrompt | None = None
    prompt_length: int = 0
    filled: int = 0
    epoch: int = -1
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
        """The key of the prefix cache: the ids, with the images instead of their tokens."""
        return self.ids if self.image_prompt is None else [*self.image_prompt.keys, *self.output_ids]

    @property
    def shows_images(self) -> bool:
        """True if an image is still to be prefilled."""
        return self.image_prompt is not None and self.image_prompt.spans[-1][1] > self.filled

    def version_spans(self, current: str) -> list[tuple[str, int, int]]:
        """Returns version, start and end of each chunk of output; one empty chunk of ``current`` if there is none."""
        starts = [*self.versions, ("", len(self.log_probs))]
        return [(version, start, end) for (version, start), (_, end) in pairwise(starts)] or [(current, 0, 0)]


@dataclass(frozen=True, slots=True, eq=False)
class WeightUpdate:
    """New weights, loaded once no request decodes; ``on_done`` gets the error, or None."""

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
        self._rows: list[Request] = []
        self._ready = 0
        self._epoch = 0
        self._updates: deque[WeightUpdate] = deque()
        self._random = random.Random(settings.seed)

    @property
    def has_work(self) -> bool:
        """True if ``step`` has work."""
        return self._may_update() or (not self.paused and bool(self._rows or self._waiting))

    @property
    def running(self) -> int:
        """Number of requests with a slot."""
        return len(self._rows)

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
        self._read_prompts()
        self._decode()

    def abort(self, rid: str | None) -> None:
        """Finishes one request, or with None all, with the output so far."""
        for request in [*self._rows, *self._waiting]:
            if rid is None or request.rid == rid:
                self._remove(request, ABORTED)

    def pause(self, mode: PauseMode) -> None:
        """Pauses the engine; running requests are aborted, kept, or reset to before their prefill."""
        self.paused = True
        if mode is PauseMode.ABORT:
            self.abort(None)
        elif mode is PauseMode.RETRACT:
            self._finish_unresumable()
            self._waiting.extendleft(reversed(self._rows))
            self._rows, self._ready = [], 0

    def _finish_unresumable(self) -> None:
        """Finishes requests that sampled an image placeholder: it would be mistaken for an image of the prompt."""
        vision = self._model.vision
        for request in list(self._rows):
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
        if (self._rows or self._waiting) and not self.paused:
            return False
        self._prefixes.flush()
        return True

    def fail(self, error: BaseException) -> None:
        """Fails every request: a forward pass failed, and the slots are in an unknown state."""
        for request in [*self._rows, *self._waiting]:
            request.error = error
            request.on_finish(request)
        self._rows, self._ready = [], 0
        self._waiting.clear()
        self._prefixes.flush()

    # --- slots -------------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        while self._waiting and len(self._rows) < self._settings.max_running:
            request = self._waiting.popleft()
            if len(request.log_probs) >= request.sampling.max_new_tokens:
                self._finish(request, _length_reached(request))
                continue
            self._rows.append(request)
            request.filled, stored = self._prefixes.find(request.keys)
            if request.image_prompt is not None:
                request.filled = request.image_prompt.start_of_cached(request.filled)
            request.epoch = self._epoch
            if not request.log_probs:
                request.cached_tokens = request.filled
            self._model.cache.reserve(len(self._rows), len(request.ids))
            if request.filled:
                self._model.cache.write(len(self._rows) - 1, stored, request.filled)

    def _remove(self, request: Request, reason: Mapping[str, Any]) -> None:
        """Removes a request and frees its slot; its keys stay cached as a prefix if its weights are the present
        ones."""
        if request in self._rows:
            slot = self._rows.index(request)
            if request.epoch == self._epoch and request.filled:
                self._prefixes.keep(request.keys[: request.filled], self._model.cache.read(slot, request.filled))
            self._close_gap(slot)
        else:
            self._waiting.remove(request)
        self._finish(request, reason)

    def _close_gap(self, slot: int) -> None:
        """Moves the last ready request into a free slot, and the last request into that one's."""
        gaps = [slot, len(self._rows) - 1]
        if slot < self._ready:
            self._ready -= 1
            gaps.insert(1, self._ready)
        for target, source in pairwise(gaps):
            if source != target:
                self._model.cache.move(source, target, self._rows[source].filled)
                self._rows[target] = self._rows[source]
        self._rows.pop()

    def _finish(self, request: Request, reason: Mapping[str, Any]) -> None:
        request.finish_reason = reason
        request.on_finish(request)

    # --- forward passes ----------------------------------------------------------------------------------------------

    def _read_prompts(self) -> None:
        """Prefills as many prompts as fit one pass; a longer one takes several, one with images a pass of its own."""
        reading = self._rows[self._ready :]
        if not reading:
            return
        most = len(reading[0].ids) if reading[0].shows_images else self._settings.prefill_tokens
        batch = reading[:1] if reading[0].shows_images else self._fitting(reading, most)
        logits = self._pass(self._ready, batch, most)
        done = list(takewhile(lambda request: request.filled == len(request.ids), batch))
        self._ready += len(done)
        self._take_tokens(done, logits)

    def _fitting(self, reading: Sequence[Request], most: int) -> list[Request]:
        """Returns the first request, and following ones whose prompts fit completely into a pass of ``most`` tokens."""
        longest, batch = 0, list[Request]()
        for request in takewhile(lambda request: not request.shows_images, reading):
            longest = max(longest, len(request.ids) - request.filled)
            if batch and longest * (len(batch) + 1) > most:
                break
            batch.append(request)
        return batch

    def _decode(self) -> None:
        batch = self._rows[: self._ready]
        if batch:
            self._take_tokens(batch, self._pass(0, batch, 1))

    def _pass(self, first: int, batch: Sequence[Request], most: int) -> torch.Tensor:
        chunks = [SequenceChunk(r.ids[r.filled : r.filled + most], r.filled, r.image_prompt) for r in batch]
        logits = self._model.logits(first, chunks)
        for request, chunk in zip(batch, chunks, strict=True):
            request.filled += len(chunk.ids)
        return logits

    def _take_tokens(self, batch: Sequence[Request], logits: torch.Tensor) -> None:
        if not batch:
            return
        wishes = [request.sampling for request in batch]
        choices = choose(logits[: len(batch)], wishes, [self._uniform(request) for request in batch])
        for request, choice in zip(batch, choices, strict=True):
            self._append(request, choice)
        for request in batch:
            if (reason := self._why_finished(request)) is not None:
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

    def _why_finished(self, request: Request) -> Mapping[str, Any] | None:
        """Checks in SGLang's order: stop strings, stop tokens, length."""
        sampling, last = request.sampling, request.ids[-1]
        if sampling.stop and (matched := self._matched_stop(request)) is not None:
            return {"type": "stop", "matched": matched}
        if not sampling.ignore_eos and (last in self._model.end_ids or last in sampling.stop_token_ids):
            return {"type": "stop", "matched": last}
        return _length_reached(request) if len(request.log_probs) >= sampling.max_new_tokens else None

    def _matched_stop(self, request: Request) -> str | None:
        """Returns the stop string that the last tokens complete; decodes only as many tokens as it can span."""
        most = max(map(len, request.sampling.stop)) + 1
        tail = request.ids[max(request.prompt_length, len(request.ids) - most) :]
        text = self._model.decode(tail, skip_special_tokens=False)
        return next((stop for stop in request.sampling.stop if stop in text), None)

    # --- new weights -------------------------------------------------------------------------------------------------

    def _may_update(self) -> bool:
        return bool(self._updates) and (self.paused or not self._rows)

    def _update_weights(self, update: WeightUpdate) -> None:
        try:
            self._model.load_weights(update.path)
        except Exception as error:  # noqa: BLE001 - reported to the caller
            update.on_done(error if isinstance(error, WeightsError) else WeightsError(f"cannot take weights: {error}"))
            return
        self._epoch += 1
        self._prefixes.flush()
        self.weight_version = update.version or self.weight_version
        update.on_done(None)


def _length_reached(request: Request) -> Mapping[str, Any]:
    return {"type": "length", "length": request.sampling.max_new_tokens}
