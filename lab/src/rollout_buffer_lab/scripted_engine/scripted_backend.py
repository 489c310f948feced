"""Who samples behind the scripted engine's routes: scripted replies, under the rules that SGLang has for them."""

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
from slime_plugins.rollout_buffer.engine.image_token_counts import ImageFamily, image_size, image_tokens
from slime_plugins.rollout_buffer.wire import common_prefix_length

MODEL_NAME: Final = "stand-in (a scripted policy, not a model)"
REMEMBERED_SESSIONS: Final = 1024
ASSISTANT_HEADER: Final = "assistant\n"


def image_token_count(image: bytes) -> int:
    """How many tokens one image takes in a Qwen3-VL prompt, its two markers not counted.

    Raises:
        BadRequestError: no image, or a shape that the model's processor does not take.
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
    """All that a reply would become if nothing cuts in."""

    ids: list[int]
    finish_reason: Mapping[str, Any]
    prompt_ids: list[int]
    image_tokens: int


class ScriptedBackend:
    """What ``sglang_routes.app`` asks of who samples: a policy plays from what the prompt shows, nothing is sampled.

    Of the sampling parameters, caps, stops, temperature 0 and seeds have an effect; the rest is checked and then has
    none. Everything but ``_plan`` happens on the event loop; ``_plan`` reads only what never changes.
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
        """How many requests run, and how many wait."""
        waiting = len(self._running) if self.paused else 0
        return len(self._running) - waiting, waiting

    def model_info(self) -> dict[str, Any]:
        """The reply of ``/model_info``, which states that this is no model."""
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
        """The reply of ``/server_info``."""
        return {
            "model_path": MODEL_NAME,
            "version": "stand-in",
            "context_length": self.settings.context_length,
            "max_total_num_tokens": self.settings.context_length,
            "internal_states": [],
        }

    async def generate(self, call: GenerateCall) -> Sampled:
        """Plays one request to its end; while the engine is paused it is held without an answer.

        Raises:
            BadRequestError: the request is wrong, and in which way.
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
        """Ends one request, or with None every one, with what it has; an unknown one is no error."""
        for running, generation in self._running.items():
            if rid is None or rid == running:
                generation.abort()

    async def pause(self, mode: PauseMode) -> None:
        """Holds new requests; those that run are aborted or wait, by ``mode``."""
        self.paused = True
        for generation in self._running.values():
            if mode is PauseMode.ABORT:
                generation.abort()
            else:
                generation.freeze()

    async def resume(self) -> None:
        """Lets held and frozen requests go on."""
        self.paused = False
        for generation in self._running.values():
            generation.thaw()

    async def update_weight_version(self, version: str) -> None:
        """Later tokens carry ``version``."""
        self.weight_version = version
        for generation in self._running.values():
            generation.see_weights(version)

    async def flush_cache(self) -> bool:
        """Forgets the prompts seen; refused (False) while requests run."""
        if self._running and not self.paused:
            return False
        self._seen_prompts.clear()
        return True

    async def close(self) -> None:
        """Aborts what runs and ends the threads."""
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

        for count in range(1, len(plan.ids)) if call.on_token is not None else ():
            await generation.wait_for_tokens(count)
            if generation.produced >= count and call.on_token is not None:
                call.on_token(sampled(count, {}))
                await asyncio.sleep(0)  # who streams writes this one before the next is made
        await generation.wait_for_tokens(len(plan.ids))
        self._remember(call.session, [*plan.prompt_ids, *plan.ids[: generation.produced]])
        return sampled(generation.produced, ABORTED if generation.aborted else plan.finish_reason)

    def _records(self, ids: Sequence[int], sampled: int) -> dict[str, Any]:
        if not self.settings.token_records:
            return {}
        experts = experts_of_passes(ids, self.weight_version)
        return {"experts": experts, "kept_ids": kept_ids(ids[len(ids) - sampled :])}

    def _plan(self, call: GenerateCall, rid: str) -> _Plan:
        """Returns the policy's reply. Runs in a thread: it reads screenshots."""
        ids = self._encode(call.prompt) if isinstance(call.prompt, str) else list(call.prompt)
        if not ids:
            raise BadRequestError({"message": "The prompt is empty."})
        images = self._matched_images(ids, call.images)
        image_tokens = [image_token_count(image) for image in images]
        prompt_ids = self._expanded(ids, image_tokens)
        check_length(len(prompt_ids), call.sampling.max_new_tokens, self.settings.context_length)
        conversation = read_conversation(self._backend.decode(ids, skip_special_tokens=False), images)
        reply = self._policy(conversation, skill=self.settings.skill, rng=self._rng_of(call, rid))
        planned = self._continued(self._encode(reply), conversation.begun_reply, reply, ids, call.sampling)
        kept, finish_reason = self._cut(planned, call.sampling)
        return _Plan(ids=kept, finish_reason=finish_reason, prompt_ids=prompt_ids, image_tokens=sum(image_tokens))

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def _decode_reply(self, ids: list[int], sampling: Sampling) -> str:
        if ids and ids[-1] == self._end_id and not sampling.no_stop_trim:
            ids = ids[:-1]
        text: str = self._backend.decode(ids, skip_special_tokens=sampling.skip_special_tokens)
        return text

    def _matched_images(self, ids: list[int], images: tuple[bytes, ...]) -> tuple[bytes, ...]:
        """The images that have a placeholder. As in SGLang, surplus ones are ignored and missing ones break it."""
        size = self._backend.get_vocab_size()
        wrong = next((token_id for token_id in ids if type(token_id) is not int or not 0 <= token_id < size), None)
        if wrong is not None:
            raise BadRequestError({"message": f"input_ids hold {wrong}, which is no id of the tokenizer ({size} ids)."})
        pads = ids.count(self._pad_id)
        if images and pads > len(images):
            raise EngineBreakError(f"{pads} image placeholders for {len(images)} images")
        return images[:pads]

    def _expanded(self, ids: list[int], image_tokens: list[int]) -> list[int]:
        left = iter(image_tokens)
        runs = ([token_id] * next(left, 1) if token_id == self._pad_id else [token_id] for token_id in ids)
        return list(itertools.chain.from_iterable(runs))

    def _rng_of(self, call: GenerateCall, rid: str) -> SessionRng:
        """Returns the request's rng; that of greedy requests names no session: equal prompts get equal replies."""
        if call.sampling.greedy:
            return SessionRng(self.settings.seed, "")
        owner = call.session or ("" if call.sampling.sampling_seed is not None else rid)
        return SessionRng(self.settings.seed, f"{owner}/{call.sampling.sampling_seed}")

    def _continued(self, reply_ids: list[int], begun: str, reply: str, ids: list[int], sampling: Sampling) -> list[int]:
        """What is still to be said of a reply whose beginning the prompt may hold already."""
        whole = [*reply_ids, self._end_id]
        if sampling.ignore_eos:
            most = len(ids) + sampling.max_new_tokens
            whole = list(itertools.islice(itertools.cycle(reply_ids), most))
        if not begun:
            return whole
        start = len(ids) - 1 - ids[::-1].index(self._start_id)
        begun_ids = ids[start + 1 + len(self._encode(ASSISTANT_HEADER)) :]
        if whole[: len(begun_ids)] == begun_ids:
            return whole[len(begun_ids) :]
        rest = reply.removeprefix(begun)
        return [*self._encode(rest), self._end_id]

    def _cut(self, ids: list[int], sampling: Sampling) -> tuple[list[int], Mapping[str, Any]]:
        """The ids up to where the request wants them to stop, and why they stop there."""
        most = sampling.max_new_tokens
        stops = {*sampling.stop_token_ids} | (set() if sampling.ignore_eos else {self._end_id})
        for at, token_id in enumerate(ids[:most]):
            if token_id in stops:
                return ids[: at + 1], {"type": "stop", "matched": token_id}
            so_far = self._backend.decode(ids[: at + 1], skip_special_tokens=False) if sampling.stop else ""
            matched = next((stop for stop in sampling.stop if stop in so_far), None)
            if matched is not None:
                return ids[: at + 1], {"type": "stop", "matched": matched}
        return ids[:most], {"type": "length", "length": most}

    def _remember(self, session: str, ids: list[int]) -> None:
        """Keeps what a session has sent and got, as a prefix cache would."""
        self._seen_prompts.pop(session, None)
        self._seen_prompts[session] = ids
        if len(self._seen_prompts) > REMEMBERED_SESSIONS:
            self._seen_prompts.popitem(last=False)


def _plausible_log_probs(ids: list[int], *, after: int) -> list[float]:
    """Made-up log-probs in [-3, 0): the same ids in the same place have the same ones, most of them near 0."""
    log_probs = []
    for previous, token_id in itertools.pairwise([after, *ids]):
        share = zlib.crc32(f"{previous}/{token_id}".encode()) / 2**32
        log_probs.append(-0.0005 - 2.9 * share**6)
    return log_probs
