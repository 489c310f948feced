"""Instant episodes for the dashboard benchmark, as varied as those of a real job, without engine or devices.

An episode is a function of its uid: reward, outcome, seconds by phase, some failed attempts, and a screenshot in every
fiftieth instance.
"""

from __future__ import annotations

import random

from slime_plugins.rollout_buffer.errors import DeviceError, EnvironmentSetupError
from slime_plugins.rollout_buffer.generator.base_generator import GeneratorContext
from slime_plugins.rollout_buffer.types import (
    EpisodeRequest,
    Generation,
    Image,
    Message,
    Outcome,
    StopReason,
    Trajectory,
)

TASK_TYPE = "quick_episodes"
REWARD_RANGE = (-1.0, 2.0)

ENDS = (
    (Outcome.COMPLETED, StopReason.TERMINATED),
    (Outcome.COMPLETED, StopReason.ANSWERED),
    (Outcome.TRUNCATED, StopReason.MAX_TURNS),
    (Outcome.TRUNCATED, StopReason.MAX_CONTEXT),
)
SCREENSHOT_EVERY = 50
SCREENSHOT_BYTES = 30_000
FAILURE_SHARE = 0.03


class QuickEpisodes:
    """Generates an episode from its uid."""

    async def start(self, context: GeneratorContext) -> None:
        """Does nothing."""

    async def play(self, episode: EpisodeRequest) -> Trajectory:
        """Returns a generated trajectory; raises a device or set-up error for some attempts."""
        rng = random.Random(episode.uid)
        if rng.random() < FAILURE_SHARE:
            kind = DeviceError if rng.random() < 0.7 else EnvironmentSetupError
            raise kind(f"made up: attempt {episode.attempt} of {episode.uid} broke")
        return _trajectory(episode, rng)

    async def close(self) -> None:
        """Does nothing."""


def create_generator() -> QuickEpisodes:
    return QuickEpisodes()


def _trajectory(episode: EpisodeRequest, rng: random.Random) -> Trajectory:
    outcome, stop_reason = rng.choices(ENDS, weights=(60, 15, 20, 5))[0]
    equal = rng_of_group(episode).random() < 0.2
    success = 0.0 if outcome is Outcome.TRUNCATED else float(equal or rng.random() < 0.6)
    reward = 0.5 if equal else round(success * rng.uniform(0.2, 1.0) - (1.0 - success) * rng.uniform(0.0, 0.5), 4)
    turns = rng.randint(1, 12)
    images = _screenshots(episode, rng)
    return Trajectory(
        uid=episode.uid,
        instance_id=episode.instance.instance_id,
        messages=_messages(images, turns),
        reward=reward,
        outcome=outcome,
        stop_reason=stop_reason,
        generations=[_generation(turn, rng) for turn in range(turns)],
        images=images,
        extra_info={"goal": "Turn the Wi-Fi off", "reward_breakdown": {"success": success, "steps": turns}},
        timings_s={"acquire": rng.random(), "reset": 2.0, "generate": 1.5 * turns, "act": 4.0 * turns, "score": 0.3},
    )


def rng_of_group(episode: EpisodeRequest) -> random.Random:
    """Returns an rng that all members of a group share: some groups have equal rewards, and are filtered."""
    return random.Random(f"{episode.instance.instance_id}/{episode.epoch}")


def _screenshots(episode: EpisodeRequest, rng: random.Random) -> list[Image]:
    if int(episode.instance.data["number"]) % SCREENSHOT_EVERY:
        return []
    return [Image(data=b"\x89PNG\r\n\x1a\n" + rng.randbytes(SCREENSHOT_BYTES))]


def _messages(images: list[Image], turns: int) -> list[Message]:
    shown = [{"type": "image_url", "image_url": {"url": f"sha256:{image.sha256}"}} for image in images]
    question: Message = {"role": "user", "content": [{"type": "text", "text": "Turn the Wi-Fi off"}, *shown]}
    reply: Message = {"role": "assistant", "content": "<thinking>Settings first.</thinking> I tap the switch."}
    return [question, *([reply, {"role": "user", "content": "Done. What next?"}] * turns), reply]


def _generation(turn: int, rng: random.Random) -> Generation:
    sampled = [rng.randint(300, 900) for _ in range(20)]
    return Generation(
        prompt_ids=list(range(100 + 40 * turn)),
        output_ids=sampled,
        output_log_probs=[-rng.random() for _ in sampled],
        weight_version=str(1 + rng.randint(0, 3)),
    )
