"""Reads the supervisor's state as a server process sees it: whether it is alive, its task types, and its problem."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slime_plugins.rollout_buffer.errors import RolloutBufferError
from slime_plugins.rollout_buffer.rules.heartbeats import SUPERVISOR
from slime_plugins.rollout_buffer.server.http import ServerContext


@dataclass(frozen=True, kw_only=True, slots=True)
class SupervisorState:
    """The supervisor's state.

    ``serving`` is True if the supervisor runs jobs: it is alive and has started. ``reason`` is a sentence on a problem,
    None if there is no problem.

    A service that is read-only because of a full disk is serving: it answers polls and acknowledgements.
    """

    alive: bool
    serving: bool
    reason: str | None
    catalog: Mapping[str, Any]


def read_supervisor_state(context: ServerContext) -> SupervisorState:
    """Returns the state from the heartbeat in shared memory; if there is none, from the heartbeat in the store."""
    stored, problem = _stored(context)
    problem = problem or context.buffer.store.trouble()
    beat = None if context.supervisor is None else context.supervisor.last()
    if beat is not None:
        age_s, detail = beat.age_s, beat.detail
    else:
        age_s, detail = (float("inf") if stored is None else stored[0]), {}
    catalog = {} if stored is None else stored[1]
    if SUPERVISOR.is_silent(age_s):
        return SupervisorState(alive=False, serving=False, reason=_silence_reason(age_s), catalog=catalog)
    reason = detail.get("starting") or problem or detail.get("reason")
    if stored is None and reason is None:
        return SupervisorState(alive=True, serving=False, reason="the supervisor is starting", catalog=catalog)
    return SupervisorState(alive=True, serving="starting" not in detail, reason=reason, catalog=catalog)


def _stored(context: ServerContext) -> tuple[tuple[float, dict[str, Any]] | None, str | None]:
    """Returns the heartbeat in the store, and the error of reading it."""
    try:
        return context.buffer.heartbeat(SUPERVISOR.name), None
    except RolloutBufferError as error:
        return None, error.message


def _silence_reason(age_s: float) -> str:
    if age_s == float("inf"):
        return "no supervisor has reported yet"
    return f"the supervisor's last heartbeat was {age_s:.0f} s ago: it is frozen or has exited"
