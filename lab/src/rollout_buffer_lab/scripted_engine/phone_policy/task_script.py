"""What a script is: one kind of thing to do on the phone.

A script looks at the observation and names the next move; None when it is finished. It keeps no state of its own: what
was done shows on the screen or was concluded in an earlier turn. So it goes on sensibly from wherever a mistake has
left it.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Protocol

from rollout_buffer_lab.scripted_engine.phone_policy.actions import app_opened
from rollout_buffer_lab.scripted_engine.phone_policy.moves import BELIEF, Move
from rollout_buffer_lab.scripted_engine.phone_policy.policy_observation import PolicyObservation


class TaskScript(Protocol):
    """One thing to do. ``words`` names the fields whose text the user gave, and which can be misread."""

    words: ClassVar[tuple[str, ...]] = ()

    def next_move(self, observation: PolicyObservation) -> Move | None:
        """The next move, None when there is nothing left to do."""
        ...


class AppScript(TaskScript):
    """A thing to do in one app; it is finished once a turn has ended with the conclusion ``done``."""

    app: ClassVar[str]
    done: ClassVar[str]
    """May name the script's fields, as in ``Deleted {0.name}.``"""

    @property
    def conclusion(self) -> str:
        """The conclusion of the move that finishes it."""
        return self.done.format(self)

    def next_move(self, observation: PolicyObservation) -> Move | None:
        """Opens the app where it is not in front, and goes on in it."""
        if observation.did(self.conclusion):
            return None
        return app_opened(observation, self.app) or self.in_app(observation)

    @abstractmethod
    def in_app(self, observation: PolicyObservation) -> Move:
        """The next move in the app."""


def is_believed_done(observation: PolicyObservation) -> bool:
    """Whether the last turn ended in the belief that it had done it."""
    return bool(observation.history) and observation.history[-1].endswith(BELIEF)
