"""The interface of scripts. A script does one kind of thing on the phone, such as sending a message.

It returns the next move for an observation, None when it is finished. It has no state: the screen and the conclusions
of earlier turns show what was done. So it continues from any page, also after a mistake.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Protocol

from rollout_buffer_lab.scripted_engine.phone_policy.actions import app_opened
from rollout_buffer_lab.scripted_engine.phone_policy.moves import BELIEF, Move
from rollout_buffer_lab.scripted_engine.phone_policy.policy_observation import PolicyObservation


class TaskScript(Protocol):
    """One thing to do. ``words`` names the fields whose text comes from the goal, and which a policy can misread."""

    words: ClassVar[tuple[str, ...]] = ()

    def next_move(self, observation: PolicyObservation) -> Move | None:
        """Returns the next move, None when there is nothing left to do."""
        ...


class AppScript(TaskScript):
    """A thing to do in one app; it is finished once a turn has had the conclusion ``done``."""

    app: ClassVar[str]
    done: ClassVar[str]
    """A format string over the script, such as ``Deleted {0.name}.``"""

    @property
    def conclusion(self) -> str:
        """The conclusion of the move that finishes it."""
        return self.done.format(self)

    def next_move(self, observation: PolicyObservation) -> Move | None:
        """Opens the app if it is not in front; then returns the next move in it."""
        if observation.did(self.conclusion):
            return None
        return app_opened(observation, self.app) or self.in_app(observation)

    @abstractmethod
    def in_app(self, observation: PolicyObservation) -> Move:
        """Returns the next move in the app."""


def is_believed_done(observation: PolicyObservation) -> bool:
    """Returns True if the last turn ended with a decisive move, whether or not it had its effect."""
    return bool(observation.history) and observation.history[-1].endswith(BELIEF)
