"""The Python client of the buffer, used by the trainer side and the command line alike.

Two classes with the same methods: ``RolloutBufferClient`` blocks, ``AsyncRolloutBufferClient`` awaits. What a call
sends and how its reply is read is written once, as a ``_Call``; the classes only carry it over the network.

Errors: what the server refuses is raised as the matching member of the error tree, with the server's own sentence, and
is an ``aiohttp.ClientError`` as well. What the network does is raised as ``requests.RequestException`` or
``aiohttp.ClientError`` / ``asyncio.TimeoutError``. A reply that is not what the protocol says is a ``ValueError``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, TypeVar
from urllib.parse import quote, urlencode

import aiohttp
import requests

from slime_plugins.rollout_buffer import errors, wire
from slime_plugins.rollout_buffer.wire import RolloutData, StartReply

__all__ = ["AsyncRolloutBufferClient", "RolloutBufferClient"]

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Call(Generic[Result]):
    """One request: where it goes, what it carries, how long it may take beyond the usual, how its reply is read."""

    method: str
    path: str
    read: Callable[[bytes], Result]
    body: Any = None
    extra_wait_s: float = 0.0


def _json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError as error:
        raise ValueError(f"the buffer's reply is not JSON: {content[:120]!r}") from error


def _object(content: bytes) -> dict[str, Any]:
    value = _json(content)
    if not isinstance(value, dict):
        raise ValueError("the buffer's reply is not an object")
    return value


def _jobs(content: bytes) -> list[dict[str, Any]]:
    jobs = _object(content).get("jobs")
    if not isinstance(jobs, list):
        raise ValueError("the buffer's reply has no list of jobs")
    return jobs


def _start_rollout(payload: Mapping[str, Any]) -> _Call[StartReply]:
    return _Call(
        method="POST",
        path="/start_rollout",
        body=dict(payload),
        read=lambda content: wire.decode_start_reply(_json(content)),
    )


def _get_rollout_data(options: Mapping[str, Any]) -> _Call[RolloutData]:
    body = {key: value for key, value in options.items() if value is not None and value != []}
    return _Call(
        method="POST",
        path="/get_rollout_data",
        body=body,
        read=lambda content: wire.decode_rollout_data(_json(content)),
        extra_wait_s=float(options.get("wait_s") or 0.0),
    )


def _poll_options(
    *,
    job_id: str | None,
    max_groups: int | None,
    batch_size: int | None,
    wait_s: float | None,
    lease_s: float | None,
    ack: Sequence[str],
    consumer_id: str | None,
    poll_id: str | None,
    images: str | None,
    dummies: bool | None,
    weight_version: int | None,
) -> dict[str, Any]:
    if dummies is None and lease_s is None:
        dummies = True  # who leases is known to know them; RolloutItem says which they are
    return {
        "job_id": job_id,
        "max_groups": max_groups,
        "batch_size": batch_size,
        "wait_s": wait_s,
        "lease_s": lease_s,
        "ack": list(ack),
        "consumer_id": consumer_id,
        "poll_id": poll_id,
        "images": images,
        "dummies": dummies,
        "weight_version": weight_version,
    }


def _ack(delivery_ids: Sequence[str]) -> _Call[dict[str, Any]]:
    return _Call(method="POST", path="/ack", body={"delivery_ids": list(delivery_ids)}, read=_object)


def _write(items: Sequence[Mapping[str, Any]], job_id: str | None) -> _Call[dict[str, Any]]:
    body: dict[str, Any] = {"items": [dict(item) for item in items]}
    if job_id is not None:
        body["job_id"] = job_id
    return _Call(method="POST", path="/buffer/write", body=body, read=_object)


def _job(job_id: str, verb: str = "") -> _Call[dict[str, Any]]:
    path = f"/jobs/{quote(job_id, safe='')}"
    if not verb:
        return _Call(method="GET", path=path, read=_object)
    return _Call(method="POST", path=f"{path}/{verb}", body={}, read=_object)


def _rollout_data(content: bytes) -> RolloutData:
    return wire.decode_rollout_data(_json(content))


def _with_query(path: str, options: Mapping[str, Any]) -> str:
    given = {key: value for key, value in options.items() if value is not None}
    return f"{path}?{urlencode(given)}" if given else path


def _deliveries(job_id: str, limit: int, cursor: int | None) -> _Call[dict[str, Any]]:
    path = _with_query(f"/jobs/{quote(job_id, safe='')}/deliveries", {"limit": limit, "cursor": cursor})
    return _Call(method="GET", path=path, read=_object)


def _delivery(delivery_id: str, images: str | None, read: Callable[[bytes], Result]) -> _Call[Result]:
    path = _with_query(f"/deliveries/{quote(delivery_id, safe='')}", {"images": images})
    return _Call(method="GET", path=path, read=read)


def _trajectories(options: Mapping[str, Any]) -> _Call[dict[str, Any]]:
    return _Call(method="GET", path=_with_query("/trajectories", options), read=_object)


def _trajectory(uid: str, job_id: str | None, images: str | None) -> _Call[dict[str, Any]]:
    path = _with_query(f"/trajectories/{quote(uid, safe='')}", {"job_id": job_id, "images": images})
    return _Call(method="GET", path=path, read=_object)


def _groups(job_id: str, options: Mapping[str, Any]) -> _Call[dict[str, Any]]:
    path = _with_query(f"/jobs/{quote(job_id, safe='')}/groups", options)
    return _Call(method="GET", path=path, read=_object)


def _group(group_index: int) -> _Call[dict[str, Any]]:
    return _Call(method="GET", path=f"/groups/{group_index}", read=_object)


def _explanation(job_id: str) -> _Call[dict[str, Any]]:
    return _Call(method="GET", path=f"/jobs/{quote(job_id, safe='')}/explanation", read=_object)


def _raise_for_status(status: int, content: bytes) -> None:
    """Raises the member of the error tree that the server named; a plain one by status when it named none."""
    if status < 400:
        return
    try:
        error = json.loads(content)["error"]
        code, message, detail = error["code"], error["message"], error.get("detail") or {}
    except (ValueError, KeyError, TypeError):
        text = content[:200].decode(errors="replace").strip() or "nothing more"
        code, message, detail = "", f"what answers says {status} ({text}): is it a rollout buffer?", {}
    raise _refusal(_error_class(code, status), message, detail)


def _refusal(
    kind: type[errors.RolloutBufferError], message: str, detail: Mapping[str, Any]
) -> errors.RolloutBufferError:
    """Builds the error that the server named as one of aiohttp's too: loops over slime's buffer catch those."""
    if kind not in _REFUSALS:

        def reduce(self: errors.RolloutBufferError) -> tuple[Any, ...]:
            return _refusal, (kind, self.message, self.detail)

        names = {"__reduce__": reduce, "__module__": kind.__module__, "__doc__": kind.__doc__}
        _REFUSALS[kind] = type(kind.__name__, (kind, aiohttp.ClientError), names)
    return _REFUSALS[kind](message, detail)


_REFUSALS: dict[type[errors.RolloutBufferError], type[errors.RolloutBufferError]] = {}
"""For each member of the error tree the class that is one of aiohttp's errors as well."""


def _error_class(code: str, status: int) -> type[errors.RolloutBufferError]:
    found = _all_errors(errors.RolloutBufferError)
    by_code = {kind.code: kind for kind in found if not issubclass(kind, aiohttp.ClientError)}
    if code in by_code:
        return by_code[code]
    return errors.RequestError if status < 500 else errors.UnavailableError


def _all_errors(kind: type[errors.RolloutBufferError]) -> list[type[errors.RolloutBufferError]]:
    return [kind, *(found for child in kind.__subclasses__() for found in _all_errors(child))]


class RolloutBufferClient:
    """Talks to a rollout buffer and blocks until it has answered. Safe to use from several threads."""

    def __init__(self, base_url: str, *, token: str | None = None, timeout_s: float = 100.0) -> None:
        """``base_url`` like ``http://127.0.0.1:8889``; ``timeout_s`` for one call, added to what a long poll waits."""
        self._base_url = base_url.rstrip("/")
        self._timeout_s = timeout_s
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def start_rollout(self, payload: Mapping[str, Any]) -> StartReply:
        """Starts a job, or attaches to it when it is there already."""
        return self._send(_start_rollout(payload))

    def get_rollout_data(
        self,
        *,
        job_id: str | None = None,
        max_groups: int | None = None,
        batch_size: int | None = None,
        wait_s: float | None = None,
        lease_s: float | None = None,
        ack: Sequence[str] = (),
        consumer_id: str | None = None,
        poll_id: str | None = None,
        images: str | None = None,
        dummies: bool | None = None,
        weight_version: int | None = None,
    ) -> RolloutData:
        """Fetches finished groups. With ``lease_s`` they come back unless they are acknowledged in time.

        ``dummies=False`` leaves out members that could not be played; else they have ``remove_sample``.
        ``weight_version`` is the trainer's newest: the lag of what was sampled is measured by it.
        """
        options = _poll_options(
            job_id=job_id,
            max_groups=max_groups,
            batch_size=batch_size,
            wait_s=wait_s,
            lease_s=lease_s,
            ack=ack,
            consumer_id=consumer_id,
            poll_id=poll_id,
            images=images,
            dummies=dummies,
            weight_version=weight_version,
        )
        return self._send(_get_rollout_data(options))

    def ack(self, delivery_ids: Sequence[str]) -> dict[str, Any]:
        """Says that deliveries were received; saying it again changes nothing.

        Those in ``expired`` of the reply went out in another delivery after their lease: they are not to be trained.
        """
        return self._send(_ack(delivery_ids))

    def write(self, items: Sequence[Mapping[str, Any]], *, job_id: str | None = None) -> dict[str, Any]:
        """Writes finished items into a job of task type ``external``; the same uid twice is one item."""
        return self._send(_write(items, job_id))

    def jobs(self) -> list[dict[str, Any]]:
        """Lists the jobs, newest first."""
        return self._send(_Call(method="GET", path="/jobs", read=_jobs))

    def job(self, job_id: str) -> dict[str, Any]:
        """Returns one job with its progress and accounting."""
        return self._send(_job(job_id))

    def cancel(self, job_id: str) -> dict[str, Any]:
        """Ends a job; what is finished stays and can still be fetched."""
        return self._send(_job(job_id, "cancel"))

    def pause(self, job_id: str) -> dict[str, Any]:
        """Lets running episodes end and starts no new ones."""
        return self._send(_job(job_id, "pause"))

    def resume(self, job_id: str) -> dict[str, Any]:
        """Goes on after ``pause``."""
        return self._send(_job(job_id, "resume"))

    def deliveries(self, job_id: str, *, limit: int = 50, cursor: int | None = None) -> dict[str, Any]:
        """Lists a job's deliveries, newest first; ``next_cursor`` of the reply fetches the next page."""
        return self._send(_deliveries(job_id, limit, cursor))

    def delivery(self, delivery_id: str, *, images: str | None = None) -> RolloutData:
        """Fetches the groups of a past delivery again. Changes nothing: no lease, no state."""
        return self._send(_delivery(delivery_id, images, _rollout_data))

    def delivery_body(self, delivery_id: str, *, images: str | None = None) -> bytes:
        """As ``delivery``, but the reply's own bytes: the ones its poll was given."""
        return self._send(_delivery(delivery_id, images, bytes))

    def trajectories(
        self,
        *,
        job_id: str | None = None,
        instance_id: str | None = None,
        outcome: str | None = None,
        stop_reason: str | None = None,
        min_reward: float | None = None,
        max_reward: float | None = None,
        limit: int = 50,
        cursor: int | None = None,
    ) -> dict[str, Any]:
        """Searches trajectories, newest first, without their payloads; every filter that is given must hold."""
        filters = {"job_id": job_id, "instance_id": instance_id, "outcome": outcome, "stop_reason": stop_reason}
        rewards = {"min_reward": min_reward, "max_reward": max_reward}
        return self._send(_trajectories({**filters, **rewards, "limit": limit, "cursor": cursor}))

    def trajectory(self, uid: str, *, job_id: str | None = None, images: str | None = None) -> dict[str, Any]:
        """Returns one trajectory as it is stored; ``job_id`` is needed when several jobs have that uid."""
        return self._send(_trajectory(uid, job_id, images))

    def groups(
        self,
        job_id: str,
        *,
        state: str | None = None,
        cause: str | None = None,
        search: str | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> dict[str, Any]:
        """Lists a job's groups, the last touched first, with their rewards and what became of them in words."""
        filters = {"state": state, "cause": cause, "search": search, "limit": limit, "cursor": cursor}
        return self._send(_groups(job_id, filters))

    def group(self, group_index: int) -> dict[str, Any]:
        """Returns one group with its members, attempts and what was delivered of it."""
        return self._send(_group(group_index))

    def explanation(self, job_id: str) -> dict[str, Any]:
        """Returns why a job stands still, or that it moves, in sentences and numbers."""
        return self._send(_explanation(job_id))

    def health(self) -> dict[str, Any]:
        """Returns the health report of the buffer."""
        return self._send(_Call(method="GET", path="/health", read=_object))

    def get_image(self, sha256: str) -> bytes:
        """Returns the bytes of a screenshot."""
        return self._send(_Call(method="GET", path=f"/images/{quote(sha256, safe='')}", read=bytes))

    def _send(self, call: _Call[Result]) -> Result:
        response = requests.request(
            call.method,
            self._base_url + call.path,
            json=call.body,
            headers=self._headers,
            timeout=self._timeout_s + call.extra_wait_s,
        )
        _raise_for_status(response.status_code, response.content)
        return call.read(response.content)


class AsyncRolloutBufferClient:
    """The same calls, awaitable. Use it as an async context manager, or call ``close`` at the end."""

    def __init__(self, base_url: str, *, token: str | None = None, timeout_s: float = 100.0) -> None:
        """``base_url`` like ``http://127.0.0.1:8889``; ``timeout_s`` for one call, added to what a long poll waits."""
        self._base_url = base_url.rstrip("/")
        self._timeout_s = timeout_s
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> AsyncRolloutBufferClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connections; a second call does nothing."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def start_rollout(self, payload: Mapping[str, Any]) -> StartReply:
        """As ``RolloutBufferClient.start_rollout``."""
        return await self._send(_start_rollout(payload))

    async def get_rollout_data(
        self,
        *,
        job_id: str | None = None,
        max_groups: int | None = None,
        batch_size: int | None = None,
        wait_s: float | None = None,
        lease_s: float | None = None,
        ack: Sequence[str] = (),
        consumer_id: str | None = None,
        poll_id: str | None = None,
        images: str | None = None,
        dummies: bool | None = None,
        weight_version: int | None = None,
    ) -> RolloutData:
        """As ``RolloutBufferClient.get_rollout_data``."""
        options = _poll_options(
            job_id=job_id,
            max_groups=max_groups,
            batch_size=batch_size,
            wait_s=wait_s,
            lease_s=lease_s,
            ack=ack,
            consumer_id=consumer_id,
            poll_id=poll_id,
            images=images,
            dummies=dummies,
            weight_version=weight_version,
        )
        return await self._send(_get_rollout_data(options))

    async def ack(self, delivery_ids: Sequence[str]) -> dict[str, Any]:
        """As ``RolloutBufferClient.ack``."""
        return await self._send(_ack(delivery_ids))

    async def write(self, items: Sequence[Mapping[str, Any]], *, job_id: str | None = None) -> dict[str, Any]:
        """As ``RolloutBufferClient.write``."""
        return await self._send(_write(items, job_id))

    async def jobs(self) -> list[dict[str, Any]]:
        """As ``RolloutBufferClient.jobs``."""
        return await self._send(_Call(method="GET", path="/jobs", read=_jobs))

    async def job(self, job_id: str) -> dict[str, Any]:
        """As ``RolloutBufferClient.job``."""
        return await self._send(_job(job_id))

    async def cancel(self, job_id: str) -> dict[str, Any]:
        """As ``RolloutBufferClient.cancel``."""
        return await self._send(_job(job_id, "cancel"))

    async def pause(self, job_id: str) -> dict[str, Any]:
        """As ``RolloutBufferClient.pause``."""
        return await self._send(_job(job_id, "pause"))

    async def resume(self, job_id: str) -> dict[str, Any]:
        """As ``RolloutBufferClient.resume``."""
        return await self._send(_job(job_id, "resume"))

    async def deliveries(self, job_id: str, *, limit: int = 50, cursor: int | None = None) -> dict[str, Any]:
        """As ``RolloutBufferClient.deliveries``."""
        return await self._send(_deliveries(job_id, limit, cursor))

    async def delivery(self, delivery_id: str, *, images: str | None = None) -> RolloutData:
        """As ``RolloutBufferClient.delivery``."""
        return await self._send(_delivery(delivery_id, images, _rollout_data))

    async def delivery_body(self, delivery_id: str, *, images: str | None = None) -> bytes:
        """As ``RolloutBufferClient.delivery_body``."""
        return await self._send(_delivery(delivery_id, images, bytes))

    async def trajectories(
        self,
        *,
        job_id: str | None = None,
        instance_id: str | None = None,
        outcome: str | None = None,
        stop_reason: str | None = None,
        min_reward: float | None = None,
        max_reward: float | None = None,
        limit: int = 50,
        cursor: int | None = None,
    ) -> dict[str, Any]:
        """As ``RolloutBufferClient.trajectories``."""
        filters = {"job_id": job_id, "instance_id": instance_id, "outcome": outcome, "stop_reason": stop_reason}
        rewards = {"min_reward": min_reward, "max_reward": max_reward}
        return await self._send(_trajectories({**filters, **rewards, "limit": limit, "cursor": cursor}))

    async def trajectory(self, uid: str, *, job_id: str | None = None, images: str | None = None) -> dict[str, Any]:
        """As ``RolloutBufferClient.trajectory``."""
        return await self._send(_trajectory(uid, job_id, images))

    async def groups(
        self,
        job_id: str,
        *,
        state: str | None = None,
        cause: str | None = None,
        search: str | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> dict[str, Any]:
        """As ``RolloutBufferClient.groups``."""
        filters = {"state": state, "cause": cause, "search": search, "limit": limit, "cursor": cursor}
        return await self._send(_groups(job_id, filters))

    async def group(self, group_index: int) -> dict[str, Any]:
        """As ``RolloutBufferClient.group``."""
        return await self._send(_group(group_index))

    async def explanation(self, job_id: str) -> dict[str, Any]:
        """As ``RolloutBufferClient.explanation``."""
        return await self._send(_explanation(job_id))

    async def health(self) -> dict[str, Any]:
        """As ``RolloutBufferClient.health``."""
        return await self._send(_Call(method="GET", path="/health", read=_object))

    async def get_image(self, sha256: str) -> bytes:
        """As ``RolloutBufferClient.get_image``."""
        return await self._send(_Call(method="GET", path=f"/images/{quote(sha256, safe='')}", read=bytes))

    async def _send(self, call: _Call[Result]) -> Result:
        if self._session is None:
            self._session = aiohttp.ClientSession(headers=self._headers)
        timeout = aiohttp.ClientTimeout(total=self._timeout_s + call.extra_wait_s)
        url = self._base_url + call.path
        async with self._session.request(call.method, url, json=call.body, timeout=timeout) as response:
            content = await response.read()
            _raise_for_status(response.status, content)
            return call.read(content)
