"""The backend of the scripted engine: a policy's replies, with SGLang's rules for length, stops, aborts and pauses."""

from __future__ import annotations

import asyncio
import itertools
import uuid
import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

from rollout_buffer_lab.scripted_engine.conversation import END_OF_TURN, IMAGE_PAD, START_OF_TURN, read_conversation
from rollout_buffer_lab.scripted_engine.generation import Generation, Pace
from rollout_buffer_lab.scripted_engine.policy import Policy, reply_to
from rollout_buffer_lab.scripted_engine.rng import SessionRng
from rollout_buffer_lab.scripted_engine.settings import ScriptedEngineSettings
from rollout_buffer_lab.scripted_engine.token_records import experts_of_passes, kept_ids
from rollout_buffer_lab.sglang_routes.images import undecodable
from rollout_buffer_lab.sglang_routes.records import (
    ABORTED,
    EngineBreakError,
    GenerateCall,
    PauseMode,
    Sampled,
    check_length,
)
from rollout_buffer_lab.sglang_routes.sampling import BadRequestError, Sampling
from slime.utils.mask_rows import common_prefix_length
from slime_plugins.rollout_buffer.engine.image_token_counts import ImageFamily, image_size, image_tokens

MODEL_NAME: Final = "stand-in (a scripted policy, not a model)"
REMEMBERED_SESSIONS: Final = 1024
ASSISTANT_HEADER: Final = "assistant\n"


def image_token_count(image: bytes) -> int:
    """Returns how many tokens an image has in a Qwen3-VL prompt, without the two tokens around them.

    Raises:
        BadRequestError: the bytes are no image, or of a shape that the model's processor does not take.
    """
    size = image_size(image)
    if size is None:
        raise undecodable("these bytes are no picture")
    try:
        return image_tokens(*size, ImageFamily.QWEN3_VL)
    except ValueError as error:
        raise undecodable(str(error)) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """A whole reply, as it is sent unless the request is aborted."""

    ids: list[int]
    finish_reason: Mapping[str, Any]
    prompt_ids: list[int]
    image_tokens: int


class ScriptedBackend:
    """An ``SglangBackend`` that samples nothing: a policy replies to what the prompt shows.

    Of the sampling parameters, limits, stops, temperature 0 and seeds have an effect; the others are only checked.
    Everything but ``_plan`` runs on the event loop; ``_plan`` reads only what never changes.
    """

    def __init__(self, settings: ScriptedEngineSettings, tokenizer: Any, policy: Policy = reply_to) -> None:
        self.settings = settings
        self._policy = policy
        self.weight_version = settings.weight_version
        self.paused = False
        self.tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer  # safe for several threads; the wrapper around it is not
        self._end_id = self._backend.token_to_id(END_OF_TURN)
        self._start_id = self._backend.token_to_id(START_OF_TURN)
        self._pad_id = self._backend.token_to_id(IMAGE_PAD)
        self._pool = ThreadPoolExecutor(settings.threads, thread_name_prefix="stand-in-policy")
        self._running: dict[str, Generation] = {}
        self._seen_prompts: OrderedDict[str, list[int]] = OrderedDict()

    def loads(self) -> tuple[int, int]:
        """Returns how many requests run, and how many wait."""
        waiting = len(self._running) if self.paused else 0
        return len(self._running) - waiting, waiting

    def model_info(self) -> dict[str, Any]:
        """Returns the reply of ``/model_info``, which states that this is no model."""
        return {
            "model_path": MODEL_NAME,
            "served_model_name": "stand-in",
            "tokenizer_path": str(self.settings.tokenizer_path),
            "is_generation": True,
            "has_image_understanding": True,
            "weight_version": self.weight_version,
            "stand_in": True,
            "skill": self.settings.skill,
            "seed": self.settings.seed,
        }

    def server_info(self) -> dict[str, Any]:
        """Returns the reply of ``/server_info``."""
        return {
            "model_path": MODEL_NAME,
            "version": "stand-in",
            "context_length": self.settings.context_length,
            "max_total_num_tokens": self.settings.context_length,
            "internal_states": [],
        }

    async def generate(self, call: GenerateCall) -> Sampled:
        """Replies to one request; while the engine is paused the request waits without an answer.

        Raises:
            BadRequestError: the request is wrong; the message says what is.
            EngineBreakError: fewer images than placeholders.
        """
        rid = call.rid or uuid.uuid4().hex
        if rid in self._running:
            raise BadRequestError({"message": f"Duplicate request ID detected: {rid}"})
        pace = Pace(latency_s=self.settings.latency_s, token_latency_s=self.settings.token_latency_s)
        generation = self._running[rid] = Generation(pace, self.weight_version)
        try:
            return await self._play(call, rid, generation)
        finally:
            del self._running[rid]

    async def abort(self, rid: str | None) -> None:
        """Finishes one request, or with None all, with the tokens so far; an unknown id is ignored."""
        for running, generation in self._running.items():
            if rid is None or rid == running:
                generation.abort()

    async def pause(self, mode: PauseMode) -> None:
        """Holds new requests; running ones are aborted or wait, by ``mode``."""
        self.paused = True
        for generation in self._running.values():
            if mode is PauseMode.ABORT:
                generation.abort()
            else:
                generation.freeze()

    async def resume(self) -> None:
        """Continues held and frozen requests."""
        self.paused = False
        for generation in self._running.values():
            generation.thaw()

    async def update_weight_version(self, version: str) -> None:
        """Sets the weight version of later tokens."""
        self.weight_version = version
        for generation in self._running.values():
            generation.set_weight_version(version)

    async def flush_cache(self) -> bool:
        """Forgets the prompts seen; refused (False) while requests run."""
        if self._running and not self.paused:
            return False
        self._seen_prompts.clear()
        return True

    async def close(self) -> None:
        """Aborts running requests and ends the threads."""
        await self.abort(None)
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _play(self, call: GenerateCall, rid: str, generation: Generation) -> Sampled:
        plan = await asyncio.get_running_loop().run_in_executor(self._pool, self._plan, call, rid)
        await generation.wait_until(lambda: generation.aborted or not self.paused)
        if not generation.aborted:
            generation.begin(len(plan.ids))
        cached = common_prefix_length(self._seen_prompts.get(call.session, []), plan.prompt_ids[:-1])

        def sampled(count: int, reason: Mapping[str, Any]) -> Sampled:
            ids = plan.ids[:count]
            return Sampled(
                rid=rid,
                text=self._decode_reply(ids, call.sampling),
                output_ids=ids,
                log_probs=_plausible_log_probs(ids, after=plan.prompt_ids[-1]),
                finish_reason=reason,
                weight_version=self.weight_version,
                version_spans=generation.version_spans(count),
                prompt_ids=plan.prompt_ids,
                cached_tokens=cached,
                image_tokens=plan.image_tokens,
                **self._records([*plan.prompt_ids, *ids], count),
            )

        if call.on_token is not None:
            for count in range(1, len(plan.ids)):
                await generation.wait_for_tokens(count)
                if generation.produced >= count:
                    call.on_token(sampled(count, {}))
                    await asyncio.sleep(0)  # lets the stream send this event before the next one
        await generation.wait_for_tokens(len(plan.ids))
        self._remember(call.session, [*plan.prompt_ids, *plan.ids[: generation.produced]])
        return sampled(generation.produced, ABORTED if generation.aborted else plan.finish_reason)

    def _records(self, ids: Sequence[int], sampled_count: int) -> dict[str, Any]:
        if not self.settings.token_records:
            return {}
        experts = experts_of_passes(ids, self.weight_version)
        return {"experts": experts, "kept_ids": kept_ids(ids[len(ids) - sampled_count :])}

    def _plan(self, call: GenerateCall, rid: str) -> _Plan:
        """Returns the policy's reply. Runs in a thread: it reads screenshots."""
        ids = self._encode(call.prompt) if isinstance(call.prompt, str) else list(call.prompt)
        if not ids:
            raise BadRequestError({"message": "The prompt is empty."})
        images = self._matched_images(ids, call.images)
        image_tokens = [image_token_count(image) for image in images]
        prompt_ids = self._with_image_tokens(ids, image_tokens)
        check_length(len(prompt_ids), call.sampling.max_new_tokens, self.settings.context_length)
        conversation = read_conversation(self._backend.decode(ids, skip_special_tokens=False), images)
        reply = self._policy(conversation, skill=self.settings.skill, rng=self._rng_of(call, rid))
        planned = self._continued(self._encode(reply), conversation.begun_reply, reply, ids, call.sampling)
        reply_ids, finish_reason = self._cut(planned, call.sampling)
        return _Plan(ids=reply_ids, finish_reason=finish_reason, prompt_ids=prompt_ids, image_tokens=sum(image_tokens))

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def _decode_reply(self, ids: list[int], sampling: Sampling) -> str:
        if ids and ids[-1] == self._end_id and not sampling.no_stop_trim:
            ids = ids[:-1]
        text: str = self._backend.decode(ids, skip_special_tokens=sampling.skip_special_tokens)
        return text

    def _matched_images(self, ids: list[int], images: tuple[bytes, ...]) -> tuple[bytes, ...]:
        """Returns the images that have a placeholder; as in SGLang, surplus images are ignored.

        Raises:
            BadRequestError: an id is none of the tokenizer's.
            EngineBreakError: there are images, but fewer than placeholders.
        """
        size = self._backend.get_vocab_size()
        wrong = next((token_id for token_id in ids if type(token_id) is not int or not 0 <= token_id < size), None)
        if wrong is not None:
            raise BadRequestError({"message": f"input_ids hold {wrong}, which is no id of the tokenizer ({size} ids)."})
        pads = ids.count(self._pad_id)
        if images and pads > len(images):
            raise EngineBreakError(f"{pads} image placeholders for {len(images)} images")
        return images[:pads]

    def _with_image_tokens(self, ids: list[int], image_tokens: list[int]) -> list[int]:
        counts = iter(image_tokens)  # exhausted for placeholders without an image, which stay single
        runs = ([token_id] * next(counts, 1) if token_id == self._pad_id else [token_id] for token_id in ids)
        return list(itertools.chain.from_iterable(runs))

    def _rng_of(self, call: GenerateCall, rid: str) -> SessionRng:
        """Returns the request's rng; greedy requests share theirs, so that equal prompts get equal replies.

        Requests without a session share theirs if they have one ``sampling_seed``; without a seed each has its own.
        """
        if call.sampling.greedy:
            return SessionRng(self.settings.seed, "")
        owner = call.session or ("" if call.sampling.sampling_seed is not None else rid)
        return SessionRng(self.settings.seed, f"{owner}/{call.sampling.sampling_seed}")

    def _continued(self, reply_ids: list[int], begun: str, reply: str, ids: list[int], sampling: Sampling) -> list[int]:
        """Returns the ids of a reply after ``begun``, the part of it that the prompt ``ids`` end with."""
        whole = [*reply_ids, self._end_id]
        if sampling.ignore_eos:  # the reply is repeated until the limit cuts it
            length = len(ids) + sampling.max_new_tokens
            whole = list(itertools.islice(itertools.cycle(reply_ids), length))
        if not begun:
            return whole
        start = len(ids) - 1 - ids[::-1].index(self._start_id)
        begun_ids = ids[start + 1 + len(self._encode(ASSISTANT_HEADER)) :]
        if whole[: len(begun_ids)] == begun_ids:
            return whole[len(begun_ids) :]
        rest = reply.removeprefix(begun)  # the begun part may be tokenized otherwise within the whole reply
        return [*self._encode(rest), self._end_id]

    def _cut(self, ids: list[int], sampling: Sampling) -> tuple[list[int], Mapping[str, Any]]:
        """Returns the ids up to where the request wants them to stop, and the finish reason."""
        max_tokens = sampling.max_new_tokens
        stop_ids = {*sampling.stop_token_ids} | (set() if sampling.ignore_eos else {self._end_id})
        for count, token_id in enumerate(ids[:max_tokens], start=1):
            if token_id in stop_ids:
                return ids[:count], {"type": "stop", "matched": token_id}
            so_far = self._backend.decode(ids[:count], skip_special_tokens=False) if sampling.stop else ""
            matched = next((stop for stop in sampling.stop if stop in so_far), None)
            if matched is not None:
                return ids[:count], {"type": "stop", "matched": matched}
        return ids[:max_tokens], {"type": "length", "length": max_tokens}

    def _remember(self, session: str, ids: list[int]) -> None:
        """Stores prompt and reply of a session, as a prefix cache would, for ``cached_tokens`` of its next turn."""
        self._seen_prompts.pop(session, None)
        self._seen_prompts[session] = ids
        if len(self._seen_prompts) > REMEMBERED_SESSIONS:
            self._seen_prompts.popitem(last=False)


def _plausible_log_probs(ids: list[int], *, after: int) -> list[float]:
    """Returns made-up log-probs in [-3, 0), most of them near 0; equal ids after equal ids get equal ones."""
    log_probs = []
    for previous, token_id in itertools.pairwise([after, *ids]):
        share = zlib.crc32(f"{previous}/{token_id}".encode()) / 2**32
        log_probs.append(-0.0005 - 2.9 * share**6)
    return log_probs
