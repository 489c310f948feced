"""Makes the trajectory of a session that is closed with a reward. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime_plugins.rollout_buffer import wire
from slime_plugins.rollout_buffer.errors import InvalidPayloadError, UnavailableError
from slime_plugins.rollout_buffer.gateway.session_bodies import CloseBody
from slime_plugins.rollout_buffer.gateway.sessions import Session
from slime_plugins.rollout_buffer.recording.messages import image_hashes_of
from slime_plugins.rollout_buffer.types import Generation, Outcome, StopReason, Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoringRequest:
    """The address and body of a scoring callback."""

    url: str
    body: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewards:
    """The rewards of a session, from its close request or a scoring callback; not yet checked against its turns."""

    reward: float
    turn_rewards: list[Any] | None = None
    token_rewards: list[Any] | None = None
    extra_info: Mapping[str, Any] = field(default_factory=dict)


def shown_images(session: Session) -> list[str]:
    """Returns the hashes of the images that a trajectory of the session needs; they are loaded before it is made."""
    return [*dict.fromkeys((*image_hashes_of(session.view.messages), *sorted(session.recording.images())))]


def trajectory_of(session: Session, body: CloseBody, rewards: Rewards, *, closed_at: float) -> Trajectory:
    """Returns the trajectory of a session whose turns and images are loaded.

    Raises:
        InvalidPayloadError: the close request's rewards do not fit its turns.
        UnavailableError: the scoring callback's rewards do not fit, or a turn was sampled meanwhile; the session stays
            open and can be closed again.
    """
    limit = None if session.refusal is None else session.refusal.limit
    truncated_by = limit or (StopReason.MAX_TOKENS if session.view.finish_reason == "length" else None)
    recording, generations = session.recording, session.recording.generations()
    gateway_info = {**recording.describe(), "tools": list(session.view.tools)}
    turn_rewards, token_rewards = _rewards_of_turns(session, generations, rewards, scoring_url=body.scoring_url)
    return Trajectory(
        uid=session.uid,
        instance_id=session.claim.instance.instance_id,
        messages=list(session.view.messages),
        reward=rewards.reward,
        raw_reward=body.raw_reward,
        turn_rewards=turn_rewards,
        token_rewards=token_rewards,
        outcome=body.outcome or (Outcome.TRUNCATED if truncated_by else Outcome.COMPLETED),
        stop_reason=body.stop_reason or truncated_by or StopReason.STOP,
        generations=generations,
        images=[session.images[sha256] for sha256 in shown_images(session)],
        extra_info={**body.extra_info, **rewards.extra_info, "gateway": gateway_info},
        timings_s={"generate": recording.engine_s(), "session": closed_at - session.claim.claimed_at},
    )


def _rewards_of_turns(
    session: Session, generations: Sequence[Generation], rewards: Rewards, *, scoring_url: str | None
) -> wire.TurnRewards:
    """Checks the rewards of turns, which clients send in the order of sampling; returns them in that of generations,
    branch after branch."""
    numbers = session.recording.numbers()
    index_of = {number: index for index, number in enumerate(sorted(numbers))}

    def in_order_of_generations(rewards_of_turns: list[Any] | None) -> list[Any] | None:
        if rewards_of_turns is None or len(rewards_of_turns) != len(numbers):
            return rewards_of_turns  # ``checked_turn_rewards`` refuses a wrong length
        return [rewards_of_turns[index_of[number]] for number in numbers]

    ordered = {
        "turn_rewards": in_order_of_generations(rewards.turn_rewards),
        "token_rewards": in_order_of_generations(rewards.token_rewards),
    }
    try:
        return wire.checked_turn_rewards(ordered, session.view.messages, generations)
    except InvalidPayloadError as error:
        if scoring_url is None:
            raise
        raise UnavailableError(
            f"the scoring callback's {error.message}; the session stays open, close it again"
        ) from error
