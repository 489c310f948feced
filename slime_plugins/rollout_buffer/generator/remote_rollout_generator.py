"""Episodes played by another rollout server: each slot is one ``POST /rollout`` to it.

An input line: ``{"instance_id": "7", "prompt": [{"role": "user", "content": "Calculate 15 * 23"}], "label": "345"}``.
The runner serves the trainer's side of the protocol at an address that the rollout server must reach. Turns sampled
there are recorded with exact ids; the reward is computed here, from the final messages: 1 if the last answer equals the
label, else 0. For another reward subclass ``RemoteRolloutGenerator`` in your own file and override ``reward``.

Options of the job (only the first and the job's ``tokenizer_path`` are required; defaults are in parentheses):

* ``remote_rollout_url``: the rollout server. The environment variable ``ROLLOUT_SERVER_TOKEN`` is its bearer token.
* ``remote_rollout_callback_host`` (127.0.0.1), ``remote_rollout_callback_port`` (a free one): where the runner listens.
* ``remote_rollout_callback_url``: the address sent to the rollout server, if it differs from the one listened on.
* ``remote_rollout_tokenizer`` (the ``name_or_path`` of the job's tokenizer), ``remote_rollout_tokenizer_revision``: the
  tokenizer that the rollout server loads.
* ``remote_rollout_show_tools`` (true): the prompt shows the tools that ``GET /tools`` lists.
* ``remote_rollout_timeout_s`` (3600), ``max_turns`` (10), ``max_tokens_total`` (8192).
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Final

import aiohttp
from pydantic import ValidationError

from slime_plugins.rollout_buffer.chat_tokens import ChatTokens
from slime_plugins.rollout_buffer.errors import ConfigError, EnvironmentSetupError, GeneratorError, JudgeError
from slime_plugins.rollout_buffer.generator.base_generator import GeneratorContext, SingleTurnGenerator
from slime_plugins.rollout_buffer.generator.math_reward.answers import final_answer, is_same_text, label_of
from slime_plugins.rollout_buffer.http_serving import serving
from slime_plugins.rollout_buffer.remote_rollout.bodies import EndBody, OpenBody
from slime_plugins.rollout_buffer.remote_rollout.routes import create_app
from slime_plugins.rollout_buffer.remote_rollout.settings import TrainerSettings
from slime_plugins.rollout_buffer.remote_rollout.trainer_side.trainer import Policy, TrainerSide
from slime_plugins.rollout_buffer.remote_rollout.trainer_side.trajectories import messages_of
from slime_plugins.rollout_buffer.rules.backoff import backoff_s
from slime_plugins.rollout_buffer.serve_settings import validation_messages
from slime_plugins.rollout_buffer.types import EpisodeRequest, Instance, Message, Trajectory

TASK_TYPE = "remote_rollout"
REQUIRED_KEYS = ("tokenizer_path", "remote_rollout_url")
REWARD_RANGE = (0.0, 1.0)

TOKEN_VARIABLE: Final = "ROLLOUT_SERVER_TOKEN"
TRIES: Final = 5
"""Maximum number of requests for one answer of the rollout server."""
MAX_RETRY_PAUSE_S: Final = 15.0


class RemoteRolloutGenerator:
    """Sends slots to a rollout server and converts its sessions into trajectories."""

    def __init__(self) -> None:
        self._trainer: TrainerSide | None = None
        self._serving = AsyncExitStack()
        self._http: aiohttp.ClientSession | None = None
        self._options: Mapping[str, Any] = {}
        self._server_url = ""
        self._callback_url = ""
        self._tokenizer_name = ""
        self._tools: list[dict[str, Any]] | None = None

    async def reward(self, instance: Instance, final_messages: Sequence[Message]) -> float:
        """Returns the reward of a rollout: 1 if its last answer equals the line's ``label``. Override this.

        Raises:
            EnvironmentSetupError: the line has no label.
        """
        label = label_of(instance)
        last = final_messages[-1] if final_messages else {}
        content = last.get("content") if last.get("role") == "assistant" else None
        answer = final_answer(content) if isinstance(content, str) else None
        return float(answer is not None and is_same_text(answer, label))

    async def start(self, context: GeneratorContext) -> None:
        """Starts the trainer's side for the job.

        Raises:
            ConfigError: the job names no rollout server or no tokenizer, or the callback address cannot be listened on.
        """
        self._options = context.options
        self._server_url = _server_url(context.options)
        tokens = ChatTokens(context.tokenizer, context.options.get("apply_chat_template_kwargs"))
        self._tokenizer_name = str(
            context.options.get("remote_rollout_tokenizer") or getattr(context.tokenizer, "name_or_path", "")
        )
        # The runner has the trajectories of ended sessions: only late calls of agents still name them.
        settings = TrainerSettings(open_unknown=False, max_sessions=max(64, 2 * context.concurrency), max_ended=64)
        policy = Policy(engine=context.engine, tokens=tokens)

        async def policy_of(session: OpenBody) -> Policy:
            return policy

        self._trainer = TrainerSide(policy_of, settings)
        self._callback_url = await self._listen(self._trainer)
        token = os.environ.get(TOKEN_VARIABLE)
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            headers={"Authorization": f"Bearer {token}"} if token else {},
            trust_env=False,
        )

    async def play(self, episode: EpisodeRequest) -> Trajectory:
        """Requests one episode and returns its trajectory.

        Raises:
            EpisodeError: the rollout server failed, did not answer, ended with an error, or sent an invalid response.
        """
        trainer = self._trainer_side()
        messages = SingleTurnGenerator().messages(episode.instance)
        key = secrets.token_urlsafe(24)
        opening = {"rollout_id": episode.uid, "instance_id": episode.instance.instance_id, "uid": episode.uid}
        session = await trainer.open({**opening, "api_key": key, "tools": await self._shown_tools()})
        try:
            end = _end_of(await self._rollout(self._body(episode, messages, key)))
            if end.failed:
                raise EnvironmentSetupError(f"the rollout server ended with an error: {end.error_message}")
            if not session.turns:
                raise EnvironmentSetupError("the rollout server sampled no turn")
            reward = await self.reward(episode.instance, messages_of(session, end))
            return trainer.finish(session, end.model_copy(update={"reward": reward}))
        finally:
            episode.transcript.extend(session.messages or messages)
            trainer.drop(session, "the attempt ended without a trajectory")

    async def close(self) -> None:
        """Closes the trainer's side and connections."""
        await self._serving.aclose()
        if self._http is not None:
            await self._http.close()

    def _trainer_side(self) -> TrainerSide:
        if self._trainer is None:
            raise GeneratorError(f"{type(self).__name__} was not started")
        return self._trainer

    async def _listen(self, trainer: TrainerSide) -> str:
        host = str(self._options.get("remote_rollout_callback_host") or "127.0.0.1")
        port = int(self._options.get("remote_rollout_callback_port") or 0)
        served_on = await self._serving.enter_async_context(serving(create_app(trainer=trainer), host, port))
        return str(self._options.get("remote_rollout_callback_url") or served_on)

    async def _shown_tools(self) -> list[dict[str, Any]]:
        """Returns the rollout server's tools, requested once."""
        if self._options.get("remote_rollout_show_tools", True) is not True:
            return []
        if self._tools is None:
            answer = await self._call("GET", "/tools", None, timeout_s=30.0)
            tools = answer.get("tools")
            self._tools = [tool for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
        return self._tools

    def _body(self, episode: EpisodeRequest, messages: Sequence[Message], key: str) -> dict[str, Any]:
        sampling = episode.sampling_params
        params = {"temperature": sampling.temperature, "top_p": sampling.top_p, "max_tokens": sampling.max_new_tokens}
        return {
            "rollout_id": episode.uid,
            "server_url": self._callback_url,
            "messages": list(messages),
            "sampling_params": {**sampling.extra, **params, "logprobs": True},
            "tokenizer_name": self._tokenizer_name,
            "tokenizer_revision": self._options.get("remote_rollout_tokenizer_revision"),
            "max_turns": int(self._options.get("max_turns") or 10),
            "max_tokens_total": int(self._options.get("max_tokens_total") or 8192),
            "callback_api_key": key,
            "metadata": {"instance_id": episode.instance.instance_id},
        }

    async def _rollout(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Requests a rollout and returns its final response.

        The request is repeated after a broken connection: a request with the same id attaches to the running rollout.
        """
        timeout_s = float(self._options.get("remote_rollout_timeout_s") or 3600.0)
        return await self._call("POST", "/rollout", body, timeout_s=timeout_s)

    async def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None, *, timeout_s: float
    ) -> dict[str, Any]:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._call_until_answered(method, path, body)
        except TimeoutError as error:
            message = f"the rollout server did not answer {path} within {timeout_s:g} s"
            raise EnvironmentSetupError(message) from error

    async def _call_until_answered(self, method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        problem = ""
        for tried in range(TRIES):
            await asyncio.sleep(backoff_s(tried, first_s=1.0, longest_s=MAX_RETRY_PAUSE_S))
            try:
                return await self._exchange(method, path, body)
            except (aiohttp.ClientError, OSError) as error:
                problem = f"{type(error).__name__}: {error}"
        problem = f"the rollout server gave no usable answer to {path} ({problem}); tried {TRIES} times"
        raise EnvironmentSetupError(problem)  # not EngineError: the runner pauses a job for its engine alone

    async def _exchange(self, method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        if self._http is None:
            raise GeneratorError(f"{type(self).__name__} was not started")
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        url = f"{self._server_url}{path}"
        async with self._http.request(method, url, json=body, timeout=timeout, allow_redirects=False) as response:
            if response.status in (429, 502, 503, 504):
                raise aiohttp.ClientConnectionError(f"the rollout server is busy (status {response.status})")
            if response.status != 200:
                raise EnvironmentSetupError(
                    f"the rollout server refused {path} with {response.status}: {(await response.text())[:500]}"
                )
            try:
                answer = await response.json(content_type=None)
            except ValueError as error:
                raise EnvironmentSetupError(f"the rollout server's answer to {path} is not JSON") from error
        if not isinstance(answer, dict):
            raise EnvironmentSetupError(f"the rollout server's answer to {path} is not one JSON object")
        return answer


def _end_of(final: Mapping[str, Any]) -> EndBody:
    """Parses a final response. Without ``status`` and ``finish_reason`` it is invalid: the rollout may have failed."""
    try:
        end = EndBody.model_validate({"final_response": final})
    except ValidationError as error:
        raise JudgeError(
            f"the rollout server's final response cannot be read: {'; '.join(validation_messages(error))}"
        ) from error
    if not end.status and not end.finish_reason:
        raise JudgeError("the rollout server's final response has neither status nor finish_reason")
    return end


def _server_url(options: Mapping[str, Any]) -> str:
    url = options.get("remote_rollout_url")
    if not isinstance(url, str) or not url.startswith(("http://", "https://")):
        raise ConfigError("remote_rollout_url must be the address of the rollout server, like http://host:port")
    return url.rstrip("/")


def create_generator() -> RemoteRolloutGenerator:
    return RemoteRolloutGenerator()
