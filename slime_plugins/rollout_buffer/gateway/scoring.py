"""Requests a session's reward from a scoring callback: one POST with the conversation to an allowed host."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

import aiohttp
import orjson

from slime_plugins.rollout_buffer.errors import InvalidPayloadError, UnavailableError, network_reason
from slime_plugins.rollout_buffer.gateway.closing import Rewards, ScoringRequest
from slime_plugins.rollout_buffer.remote_rollout.callback_hosts import DEFAULT_PORTS, CallbackHosts
from slime_plugins.rollout_buffer.rules.validity import as_reward
from slime_plugins.rollout_buffer.wire.request_fields import MAX_NESTING, is_deeper_than

MAX_REPLY_BYTES = 1024 * 1024


class Scorer:
    """Calls scoring callbacks; does not follow redirects, which could leave the allowed hosts."""

    def __init__(self, allowed_hosts: Sequence[str], timeout_s: float) -> None:
        self._allowed = CallbackHosts(allowed_hosts)
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._session: aiohttp.ClientSession | None = None

    async def score(self, request: ScoringRequest) -> Rewards:
        """Returns the session's rewards and the extra info to store.

        Raises:
            InvalidPayloadError: the host is not allowed.
            UnavailableError: the callback does not answer with a finite ``reward`` and, if it sends rewards of turns or
                tokens, lists. The caller checks whether the lists fit the turns.
        """
        self._check(request.url)
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=self._timeout)
        try:
            body = orjson.dumps(request.body, option=orjson.OPT_NON_STR_KEYS)
            headers = {"Content-Type": "application/json"}
            async with self._session.post(request.url, data=body, headers=headers, allow_redirects=False) as response:
                content = await _read_limited(response)
                return _rewards_of(response.status, content)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _failed(f"cannot be reached ({network_reason(error)})") from error

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _check(self, url: str) -> None:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or DEFAULT_PORTS[parts.scheme]
        if not self._allowed.allows(host, port):
            raise InvalidPayloadError(f"scoring_url: {host[:200]}:{port} is not allowed; see --scoring-host")


async def _read_limited(response: aiohttp.ClientResponse) -> bytes:
    """Returns a reply's body. A result above ``MAX_REPLY_BYTES`` is only the beginning of a body that is too large."""
    content = b""
    async for piece in response.content.iter_chunked(64 * 1024):
        content += piece
        if len(content) > MAX_REPLY_BYTES:
            break
    return content


def _rewards_of(status: int, content: bytes) -> Rewards:
    if status != 200 or len(content) > MAX_REPLY_BYTES:
        raise _failed(f"answered {status} with {len(content)} bytes")
    try:
        answer = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise _failed("did not answer with JSON") from error
    reward = answer.get("reward") if isinstance(answer, dict) else None
    try:
        number = as_reward(reward)
    except ValueError as error:
        raise _failed("answered without a finite number under reward") from error
    extra_info = answer.get("extra_info") or {}
    if not isinstance(extra_info, dict) or is_deeper_than(extra_info, MAX_NESTING):
        raise _failed("answered with an extra_info that is no object, or is nested too deeply")
    turn_rewards, token_rewards = answer.get("turn_rewards"), answer.get("token_rewards")
    for name, rewards in (("turn_rewards", turn_rewards), ("token_rewards", token_rewards)):
        if not isinstance(rewards, list | None):
            raise _failed(f"answered with {name} that are no list with one entry for each turn")
    return Rewards(reward=number, turn_rewards=turn_rewards, token_rewards=token_rewards, extra_info=extra_info)


def _failed(what: str) -> UnavailableError:
    return UnavailableError(f"the scoring callback {what}; the session stays open, close it again")
