"""The trainer's side of the remote rollout protocol, on the gateway's engines and jobs.

A body with a ``rollout_id`` sent to ``/v1/chat/completions`` is a turn of that protocol. The turn's session was opened
by ``POST /rollouts`` with a ``job_id``: the engine of that job samples the turns, and the job gets the trajectory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web

from slime_plugins.rollout_buffer.errors import InvalidPayloadError, RolloutBufferError
from slime_plugins.rollout_buffer.gateway.rollout_log import RolloutLog
from slime_plugins.rollout_buffer.gateway.service import Gateway
from slime_plugins.rollout_buffer.remote_rollout.bodies import OpenBody
from slime_plugins.rollout_buffer.remote_rollout.routes import add_trainer_routes, answer_turn, error_response
from slime_plugins.rollout_buffer.remote_rollout.settings import TrainerSettings
from slime_plugins.rollout_buffer.remote_rollout.trainer_side.trainer import Policy, TrainerSide
from slime_plugins.rollout_buffer.wire.written_items import decode_written_item


class RemoteRolloutAdapter:
    """Samples sessions of the remote rollout protocol with a job's engine, and stores their trajectories in the job."""

    def __init__(self, gateway: Gateway, token: str) -> None:
        settings = gateway.settings
        limits = TrainerSettings(
            api_key=token or None,
            open_unknown=False,
            max_sessions=settings.max_sessions,
            max_turns=settings.max_turns,
            idle_s=settings.idle_timeout_s,
        )
        self._gateway = gateway
        self.trainer = TrainerSide(self.policy_of, limits, sink=self, log=RolloutLog(gateway, limits.keep_ended_s))

    def mount(self, app: web.Application) -> None:
        """Adds all routes of the protocol but ``/v1/chat/completions``, which the gateway already serves."""
        add_trainer_routes(app, self.trainer, with_completions=False)

    async def answer(self, request: web.Request, body: Mapping[str, Any]) -> web.StreamResponse:
        """Answers a turn; errors have the protocol's form, not that of OpenAI."""
        try:
            return await answer_turn(self.trainer, request, body)
        except RolloutBufferError as error:
            return error_response(error)

    async def policy_of(self, opening: OpenBody) -> Policy:
        """Returns engine and tokenizer of the job that the opening of a session names.

        Raises:
            InvalidPayloadError: the opening names no job, or a tokenizer that is not the job's.
            ConflictError: the job takes no sessions, or has no such instance.
        """
        if opening.job_id is None:
            raise InvalidPayloadError("job_id is missing: the external job whose engine samples the turns")
        job = await self._gateway.call_store(self._gateway.buffer.job, opening.job_id)
        backend = await self._gateway.backends.open(job)
        if opening.instance_id is not None:
            await self._gateway.call_store(self._gateway.buffer.check_instance, job, opening.instance_id)
        path = str(job.settings.tokenizer_path)
        if opening.tokenizer_name not in (None, path):
            raise InvalidPayloadError(f"the tokenizer of job {job.job_id} is {path}: leave tokenizer_name out")
        return Policy(engine=backend.engine, tokens=backend.chat_for(None))

    async def write(self, items: Sequence[Mapping[str, Any]], *, job_id: str | None = None) -> dict[str, Any]:
        """Stores finished trajectories, as ``/buffer/write`` does.

        Raises:
            RolloutBufferError: the trajectories were refused, or cannot be written now.
        """
        decoded = [decode_written_item(dict(item)) for item in items]
        job, results = await self._gateway.call_store(self._gateway.buffer.write_items, job_id, decoded)
        return {"job_id": job.job_id, "results": [{"uid": result.uid, "status": result.status} for result in results]}
