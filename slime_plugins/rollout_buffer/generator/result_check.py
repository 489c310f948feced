"""What the runner requires of the trajectory that a generator returns for an episode."""

from __future__ import annotations

from dataclasses import replace

from slime_plugins.rollout_buffer import wire
from slime_plugins.rollout_buffer.errors import EpisodeError, GeneratorError, InvalidPayloadError
from slime_plugins.rollout_buffer.rules.validity import as_reward
from slime_plugins.rollout_buffer.types import EpisodeRequest, Outcome, Trajectory
from slime_plugins.rollout_buffer.wire.written_items import check_messages


def checked_trajectory(trajectory: Trajectory, request: EpisodeRequest) -> Trajectory:
    """Returns the checked trajectory, with its rewards as floats: rewards of NumPy's types cannot be stored.

    Raises:
        EpisodeError: the episode was aborted.
        GeneratorError: the rewards or messages are invalid, or the trajectory is not that of the request.
    """
    if trajectory.outcome is Outcome.ABORTED:
        raise EpisodeError("the episode was aborted from outside: its reward is unknown, not 0")
    rewards = {"reward": trajectory.reward}
    if trajectory.raw_reward is not None:
        rewards["raw_reward"] = trajectory.raw_reward
    for name, value in rewards.items():
        try:
            rewards[name] = as_reward(value)
        except ValueError as error:
            raise GeneratorError(f"play() returned the {name} {value!r:.100}: it {error}") from error
    try:
        check_messages(trajectory.messages)
    except InvalidPayloadError as error:
        raise GeneratorError(f"play() returned messages that cannot be trained: {error.message}") from error
    turn_level = {"turn_rewards": trajectory.turn_rewards, "token_rewards": trajectory.token_rewards}
    try:
        wire.checked_turn_rewards(turn_level, trajectory.messages, trajectory.generations)
    except InvalidPayloadError as error:
        raise GeneratorError(f"play() returned rewards that do not fit its turns: {error.message}") from error
    if trajectory.uid != request.uid or trajectory.instance_id != request.instance.instance_id:
        raise GeneratorError(
            f"play() returned a trajectory with uid/instance_id {trajectory.uid}/{trajectory.instance_id}, "
            f"but its request has {request.uid}/{request.instance.instance_id}"
        )
    return replace(trajectory, **rewards)  # type: ignore[arg-type]  # the names are those of its rewards
