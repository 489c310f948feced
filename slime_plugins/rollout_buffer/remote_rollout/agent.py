"""Plays rollouts for trainers. Each rollout id is played once; a repeated request attaches to it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from slime_plugins.rollout_buffer.errors import InvalidPayloadError, NotFoundError, UnavailableError
from slime_plugins.rollout_buffer.remote_rollout.agent_loop import RolloutLoop
from slime_plugins.rollout_buffer.remote_rollout.bodies import RolloutBody, check_text_only
from slime_plugins.rollout_buffer.remote_rollout.callback_hosts import CallbackHosts
from slime_plugins.rollout_buffer.remote_rollout.errors import RolloutConflictError
from slime_plugins.rollout_buffer.remote_rollout.settings import AgentSettings
from slime_plugins.rollout_buffer.remote_rollout.tokenizer_catalog import TokenizerCatalog
from slime_plugins.rollout_buffer.remote_rollout.tools import CALCULATOR, ToolProvider
from slime_plugins.rollout_buffer.remote_rollout.trainer_calls import open_connections
from slime_plugins.rollout_buffer.wire.request_fields import parse


@dataclass(kw_only=True, slots=True)
class _Rollout:
    """A rollout in play, or one that has ended since ``ended_at``."""

    fingerprint: bytes
    task: asyncio.Task[dict[str, Any]]
    ended_at: float | None = None


class AgentSide:
    """Plays rollouts on one event loop, with ``tools``."""

    def __init__(
        self,
        settings: AgentSettings | None = None,
        *,
        tokenizers: TokenizerCatalog | None = None,
        tools: ToolProvider = CALCULATOR,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings or AgentSettings()
        self._tokenizers = tokenizers or TokenizerCatalog(self.settings.tokenizers)
        self._hosts = CallbackHosts(self.settings.callback_hosts)
        self.tools = tools
        self._clock = clock
        self._rollouts: OrderedDict[str, _Rollout] = OrderedDict()
        self._session: aiohttp.ClientSession | None = None

    async def rollout(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Plays the rollout and returns its final response; a repeated call waits for the same rollout.

        The rollout continues if its caller disconnects.

        Raises:
            RequestError: a field is invalid, the callback host or the tokenizer is refused, or the id has another
                request.
            UnavailableError: too many rollouts are running.
        """
        request = parse(RolloutBody, body)
        fingerprint = hashlib.sha256(json.dumps(body, sort_keys=True).encode("ascii")).digest()
        self._evict_old()
        rollout = self._rollouts.get(request.rollout_id)
        if rollout is None:
            rollout = self._start(request, fingerprint)
        elif rollout.fingerprint != fingerprint:
            raise RolloutConflictError(
                f"rollout {request.rollout_id!r} exists with another request: give new work a new rollout_id"
            )
        return await asyncio.shield(rollout.task)

    def state_of(self, rollout_id: str) -> dict[str, Any]:
        """Returns whether a rollout is running, and its final response after its end.

        Raises:
            NotFoundError: the rollout is unknown, or its result has expired.
        """
        self._evict_old()
        rollout = self._rollouts.get(rollout_id)
        if rollout is None:
            raise NotFoundError(f"there is no rollout {rollout_id!r}")
        is_done = rollout.task.done() and not rollout.task.cancelled() and rollout.task.exception() is None
        state = {"rollout_id": rollout_id, "state": "done" if is_done else "running"}
        return {**state, "response": rollout.task.result()} if is_done else state

    async def close(self) -> None:
        """Cancels all running rollouts and closes connections."""
        tasks = [rollout.task for rollout in self._rollouts.values() if not rollout.task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _start(self, request: RolloutBody, fingerprint: bytes) -> _Rollout:
        running = sum(not rollout.task.done() for rollout in self._rollouts.values())
        if running >= self.settings.max_running:
            raise UnavailableError(f"{running} rollouts are running, which is the limit: try again later")
        if request.max_turns > self.settings.max_turns:
            raise InvalidPayloadError(f"max_turns: the limit of this server is {self.settings.max_turns} turns")
        check_text_only(request.messages)
        server_url = self._hosts.checked(request.server_url)
        rollout = _Rollout(fingerprint=fingerprint, task=asyncio.create_task(self._play(request, server_url)))
        self._rollouts[request.rollout_id] = rollout
        rollout.task.add_done_callback(lambda task: self._ended(request.rollout_id, rollout, task))
        return rollout

    async def _play(self, request: RolloutBody, server_url: str) -> dict[str, Any]:
        tokens = await self._tokenizers.get(request.tokenizer_name, request.tokenizer_revision)
        tool_session = self.tools.open_session(request)
        return await RolloutLoop(request, server_url, tokens, tool_session, self._http(), self.settings).play()

    def _ended(self, rollout_id: str, rollout: _Rollout, task: asyncio.Task[dict[str, Any]]) -> None:
        """Stores the result of a rollout, or removes a refused one, so that a corrected request may use its id."""
        rollout.ended_at = self._clock()
        if self._rollouts.get(rollout_id) is not rollout:
            return
        if task.cancelled() or task.exception() is not None:
            del self._rollouts[rollout_id]
        else:
            self._rollouts.move_to_end(rollout_id)

    def _evict_old(self) -> None:
        now = self._clock()
        # In the order in which they ended, because ``_ended`` moves each to the end.
        ended = [(name, rollout.ended_at) for name, rollout in self._rollouts.items() if rollout.ended_at is not None]
        surplus = len(ended) - self.settings.max_kept
        for place, (name, ended_at) in enumerate(ended):
            if place < surplus or now - ended_at > self.settings.keep_result_s:
                del self._rollouts[name]

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = open_connections()
        return self._session
