"""Converts an ended session into a trajectory, and into an item for a job of task type ``external``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from slime_plugins.rollout_buffer.recording.messages import read_conversation
from slime_plugins.rollout_buffer.remote_rollout.bodies import EndBody
from slime_plugins.rollout_buffer.remote_rollout.trainer_side.sessions import TrainerSession, counts_of
from slime_plugins.rollout_buffer.types import Message, Outcome, StopReason, Trajectory
from slime_plugins.rollout_buffer.wire.written_items import encode_body

_ENDINGS = {
    "max_turns": (Outcome.TRUNCATED, StopReason.MAX_TURNS),
    "max_tokens": (Outcome.TRUNCATED, StopReason.MAX_CONTEXT),
    "length": (Outcome.TRUNCATED, StopReason.MAX_TOKENS),
}


class TrajectorySink(Protocol):
    """Destination of finished trajectories, such as a buffer's client. Writes are idempotent by uid."""

    async def write(self, items: Sequence[Mapping[str, Any]], *, job_id: str | None = None) -> dict[str, Any]:
        """Writes the items into a job and returns the result of each.

        Raises:
            RolloutBufferError: they were refused, or cannot be written now.
        """


def trajectory_of(session: TrainerSession, end: EndBody, *, reward: float) -> Trajectory:
    """Returns the trajectory of a session: its messages and generations, with the given reward."""
    finish_reason = end.finish_reason or "stop"
    if finish_reason == "stop" and session.turns[-1].reply.finish_reason == "length":
        finish_reason = "length"
    outcome, stop_reason = _ENDINGS.get(finish_reason, (Outcome.COMPLETED, StopReason.STOP))
    opened = session.opened.filled_by(end)
    # Outcome and stop reason follow from the finish reason, whatever ``extra_info`` holds under their names.
    reported = {key: value for key, value in end.extra_info.items() if key not in ("outcome", "stop_reason")}
    return Trajectory(
        uid=opened.uid or session.rollout_id,
        instance_id=opened.instance_id or session.rollout_id,
        messages=messages_of(session, end),
        reward=reward,
        raw_reward=end.raw_reward,
        outcome=outcome,
        stop_reason=stop_reason,
        generations=session.generations,
        extra_info={
            **reported,
            "finish_reason": finish_reason,
            "remote_rollout": {
                "rollout_id": session.rollout_id,
                **session.recording.describe(),
                **counts_of(session.turns),
                "metrics": dict(end.metrics),
            },
        },
        timings_s={"generate": session.recording.engine_s()},
    )


def item_of(trajectory: Trajectory) -> dict[str, Any]:
    """Returns a trajectory as an item of ``/buffer/write``."""
    return {
        "uid": trajectory.uid,
        "instance_id": trajectory.instance_id,
        "reward": trajectory.reward,
        "raw_reward": trajectory.raw_reward,
        "outcome": trajectory.outcome.value,
        "stop_reason": trajectory.stop_reason.value,
        **encode_body(trajectory),
    }


def messages_of(session: TrainerSession, end: EndBody) -> list[Message]:
    """Returns our own messages, and those that the other side has after them, such as the last tool results."""
    ours, final = session.messages, read_conversation(end.final_messages).messages if end.final_messages else ()
    behind = final[len(ours) :]
    # The last of our messages is the latest reply, which the other side may have in another form.
    grew = len(final) > len(ours) and final[: len(ours) - 1] == tuple(ours[:-1])
    return [*ours, *behind] if grew and all(message["role"] != "assistant" for message in behind) else ours
