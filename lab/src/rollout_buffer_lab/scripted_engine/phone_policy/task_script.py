"""What a script is: one kind of thing to do on the phone.

A script looks at the observation and names the next move; None when it is finished. It keeps no state of its own: what
was done shows on the screen or was concluded in an earlier turn. So it goes on sensibly from wherever a mistake has
left it.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

from rollout_buffer_lab.scripted_engine.phone_policy.moves import BELIEF, Move
from rollout_buffer_lab.scripted_engine.phone_policy.policy_observation import PolicyObservation


class TaskScript(Protocol):
    """One thing to do. ``words`` names the fields whose text the user gave, and which can be misread."""

    words: ClassVar[tuple[str, ...]] = ()

    def next_move(self, observation: PolicyObservation) -> Move | None:
        """The next move, None when there is nothing left to do."""
        ...


def is_believed_done(observation: PolicyObservation) -> bool:
    """Whether the last turn ended in the belief that it had done it."""
    return bool(observation.history) and observation.history[-1].endswith(BELIEF)
