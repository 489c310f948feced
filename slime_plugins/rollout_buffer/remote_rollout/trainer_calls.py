"""Calls a trainer for one turn: ``POST server_url/v1/chat/completions``, with limits of time, tries and bytes.

A turn must not be sampled twice without the agent's knowledge. A call is repeated only if it certainly had no effect
(no connection, HTTP 429 or 503), or if the trainer recognises turns: every call names its turn in the header
``X-Rollout-Turn``, and a trainer that returns the header gives the same answer to the same turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

import aiohttp
import orjson

from slime_plugins.rollout_buffer.remote_rollout.errors import TrainerReplyError
from slime_plugins.rollout_buffer.remote_rollout.settings import AgentSettings
from slime_plugins.rollout_buffer.remote_rollout.trainer_replies import TrainerReply, read_reply, sentence_of
from slime_plugins.rollout_buffer.rules.backoff import backoff_s

TURN_HEADER: Final = "X-Rollout-Turn"
_MAX_CALL_PAUSE_S: Final = 60.0
_DID_NOTHING: Final = frozenset({429, 503})
"""Statuses of a trainer that has not begun the turn."""
_REFUSED_MASK: Final = frozenset({400, 409, 422})
"""Statuses with which trainers refuse an invalid request, a wrong mask included."""


class MaskRefusedError(TrainerReplyError):
    """The trainer refused a turn with a status for invalid requests: the mask may be what it refuses."""


class _NotTakenError(Exception):
    """The call had no effect; it may be repeated."""


class _UnansweredError(Exception):
    """The effect of the call is unknown; it may be repeated if the trainer recognises turns."""


def open_connections() -> aiohttp.ClientSession:
    """Returns connections to trainers, without a time limit: ``AgentSettings`` limits turns and rollouts.

    A connection is used once, so that no call fails on a stale one. Proxies in the environment are ignored.
    """
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    return aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False)


class TrainerCalls:
    """The calls of one rollout to its trainer."""

    def __init__(
        self, session: aiohttp.ClientSession, server_url: str, api_key: str | None, settings: AgentSettings
    ) -> None:
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._session = session
        self._url = f"{server_url}/v1/chat/completions"
        self._settings = settings
        self._knows_turns = False
        """True once the trainer has returned the header, so that it answers a repeated call without sampling again."""

    async def sample(self, body: Mapping[str, Any], turn: int) -> TrainerReply:
        """Returns the trainer's reply to a turn.

        Raises:
            MaskRefusedError: the trainer refused the call as invalid.
            TrainerReplyError: it did not answer, failed, or sent an invalid reply; names the turn.
        """
        try:
            async with asyncio.timeout(self._settings.turn_timeout_s):
                return await self._try_until_answered(orjson.dumps(body), turn)
        except TimeoutError as error:
            raise TrainerReplyError(
                f"turn {turn}: the trainer did not answer within {self._settings.turn_timeout_s:g} s"
            ) from error

    async def _try_until_answered(self, body: bytes, turn: int) -> TrainerReply:
        for attempt in range(1, self._settings.tries + 1):
            try:
                return await self._exchange(body, turn)
            except (_NotTakenError, _UnansweredError) as error:
                is_repeatable = isinstance(error, _NotTakenError) or self._knows_turns
                if not is_repeatable:
                    raise TrainerReplyError(
                        f"turn {turn}: the trainer {error}; the turn may have been sampled, so it is not repeated"
                    ) from error
                if attempt == self._settings.tries:
                    raise TrainerReplyError(f"turn {turn}: the trainer {error}; tried {attempt} times") from error
            await asyncio.sleep(backoff_s(attempt, first_s=self._settings.backoff_s, longest_s=_MAX_CALL_PAUSE_S))
        raise AssertionError("the loop above returns or raises")

    async def _exchange(self, body: bytes, turn: int) -> TrainerReply:
        headers = {**self._headers, TURN_HEADER: str(turn)}
        try:
            async with self._session.post(self._url, data=body, headers=headers, allow_redirects=False) as response:
                content = await self._read(response, turn)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise _NotTakenError(f"cannot be reached ({error})") from error
        except (aiohttp.ClientError, OSError) as error:
            raise _UnansweredError(
                f"closed the connection during the answer ({type(error).__name__}: {error})"
            ) from error
        self._knows_turns = self._knows_turns or response.headers.get(TURN_HEADER) == str(turn)
        _check_status(response.status, content, turn)
        return read_reply(content, turn)

    async def _read(self, response: aiohttp.ClientResponse, turn: int) -> bytes:
        limit = self._settings.max_reply_bytes
        pieces: list[bytes] = []
        size = 0
        async for piece in response.content.iter_chunked(1 << 16):
            pieces.append(piece)
            size += len(piece)
            if size > limit:
                raise TrainerReplyError(f"turn {turn}: the trainer's reply is larger than {limit} bytes")
        return b"".join(pieces)


def _check_status(status: int, content: bytes, turn: int) -> None:
    if status == 200:
        return
    message = f"answered {status}: {sentence_of(content)}"
    if status in _DID_NOTHING:
        raise _NotTakenError(message)
    if status >= 500:
        raise _UnansweredError(message)
    if 300 <= status < 400:
        raise TrainerReplyError(f"turn {turn}: the trainer answered with a redirect ({status}), which is not followed")
    kind = MaskRefusedError if status in _REFUSED_MASK else TrainerReplyError
    raise kind(f"turn {turn}: the trainer {message}")
