"""The Python client of the buffer, used by the trainer side and the command line.

Two classes have the same methods: ``RolloutBufferClient`` blocks, ``AsyncRolloutBufferClient`` awaits. The calls are
implemented in the second; the first runs them with a transport that blocks. Neither takes proxies from the environment.

An error reply of the server is raised as the class of ``errors`` that has its code, with the server's message; the
error is an ``aiohttp.ClientError`` as well. Network errors are ``requests.RequestException`` of the blocking client,
``aiohttp.ClientError`` or ``asyncio.TimeoutError`` of the other. A reply that violates the protocol is an
``InvalidReplyError``, which is a ``ValueError``.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import aiohttp
import requests

from slime_plugins.rollout_buffer import errors, wire
from slime_plugins.rollout_buffer.credentials import redacted
from slime_plugins.rollout_buffer.wire import RolloutData, StartReply

__all__ = ["AsyncRolloutBufferClient", "Request", "RolloutBufferClient", "Transport"]

Result = TypeVar("Result")
P = ParamSpec("P")

DEFAULT_TIMEOUT_S = 100.0
MAX_WRITE_BYTES = 16 * 1024 * 1024
"""Limit of a write with several items: half of what the server parses at once. A larger item is sent alone."""
_CLIENT_ERRORS: dict[type[errors.RolloutBufferError], type[errors.RolloutBufferError]] = {}
"""For each class of the error tree, its subclass that is also an ``aiohttp.ClientError``."""


class Request(NamedTuple):
    """An HTTP request: method, path with query, and JSON body or None."""

    method: str
    path: str
    body: bytes | None


def _read_json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError as error:
        raise wire.InvalidReplyError(f"the buffer's reply is not JSON: {content[:120]!r}") from error


def _read_object(content: bytes) -> dict[str, Any]:
    value = _read_json(content)
    if not isinstance(value, dict):
        raise wire.InvalidReplyError("the buffer's reply is not an object")
    return value


def _list_in(reply: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    if not isinstance(value := reply.get(name), list):
        raise wire.InvalidReplyError(f"the buffer's reply has no list of {name}")
    return value


def _encoded_lists(items: Sequence[Mapping[str, Any]]) -> Iterator[bytes]:
    """Yields the items of each request as a JSON list; without items, one empty list, which the server refuses."""
    encoded: list[bytes] = []
    size = 0
    for item in items:
        text = _encoded(item)
        if encoded and (len(encoded) == wire.MAX_ITEMS or size + len(text) > MAX_WRITE_BYTES):
            yield b"[%b]" % b",".join(encoded)
            encoded, size = [], 0
        encoded.append(text)
        size += len(text)
    yield b"[%b]" % b",".join(encoded)


def _encoded(value: Mapping[str, Any]) -> bytes:
    return json.dumps(dict(value)).encode()  # NaN is sent: the server's error names the number


def _without_none(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if value is not None}


def _job_path(job_id: str, *below: str) -> str:
    return "/".join(("/jobs", quote(job_id, safe=""), *below))


def _read_start_reply(content: bytes) -> StartReply:
    return wire.decode_start_reply(_read_json(content))


def _read_rollout_data(content: bytes) -> RolloutData:
    return wire.decode_rollout_data(_read_json(content))


def _headers(token: str | None) -> dict[str, str]:
    if token and not (token.isascii() and token.isprintable()):
        raise errors.ConfigError("the token (ROLLOUT_BUFFER_TOKEN) has a line break or a character that is not ASCII")
    return {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})


def _raise_for_status(status: int, content: bytes) -> None:
    """Raises the error of an error reply, chosen by the reply's code or else by its status."""
    if status < 400:
        return
    text = content[:200].decode(errors="replace").strip() or "nothing more"
    of_another_server = ("", f"the server answered HTTP {status} ({text}): is it a rollout buffer?", dict[str, Any]())
    code, message, detail = wire.decode_error(content) or of_another_server
    raise _client_error(_error_class(code, status), message, detail)


def _client_error(
    kind: type[errors.RolloutBufferError], message: str, detail: Mapping[str, Any]
) -> errors.RolloutBufferError:
    """Builds an error that is also an ``aiohttp.ClientError``, which loops written for slime's buffer catch."""
    if kind not in _CLIENT_ERRORS:

        def reduce(self: errors.RolloutBufferError) -> tuple[Any, ...]:
            return _client_error, (kind, self.message, self.detail)  # pickle cannot import a class made here

        names = {"__reduce__": reduce, "__module__": kind.__module__, "__doc__": kind.__doc__}
        _CLIENT_ERRORS[kind] = type(kind.__name__, (kind, aiohttp.ClientError), names)
    return _CLIENT_ERRORS[kind](message, detail)


def _error_class(code: str, status: int) -> type[errors.RolloutBufferError]:
    # A program may define a subclass without a code of its own: it does not stand for the code that it inherits.
    by_code = {kind.code: kind for kind in _with_subclasses(errors.RolloutBufferError) if "code" in vars(kind)}
    if code in by_code:
        return by_code[code]
    if status == 429:  # a proxy answers without a code
        return errors.BusyError
    return errors.RequestError if status < 500 else errors.UnavailableError


def _with_subclasses(kind: type[errors.RolloutBufferError]) -> list[type[errors.RolloutBufferError]]:
    return [kind, *(descendant for child in kind.__subclasses__() for descendant in _with_subclasses(child))]


def why_no_answer(error: Exception) -> str:
    """Returns the address that did not answer, and a short reason."""
    where = _address(error)
    return f"no answer from the buffer{f' at {where}' if where else ''}: {errors.network_reason(error)}"


def _address(error: Exception) -> str:
    """Returns the address to which the failed request was sent; empty if the error does not name it."""
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"{error.host}:{error.port}"
    url = urlsplit(str(getattr(getattr(error, "request", None), "url", "") or ""))
    return redacted(f"{url.scheme}://{url.netloc}") if url.netloc else ""


class Transport(Protocol):
    """Sends requests over the network."""

    async def send(self, request: Request, timeout_s: float) -> tuple[int, bytes]:
        """Returns the status and the body of the reply."""
        ...

    async def close(self) -> None:
        """Closes the connections; a second call does nothing."""
        ...


class _AiohttpTransport:
    def __init__(self, base_url: str, headers: Mapping[str, str]) -> None:
        self._base_url = base_url
        self._headers = headers
        self._session: aiohttp.ClientSession | None = None

    async def send(self, request: Request, timeout_s: float) -> tuple[int, bytes]:
        if self._session is None:
            self._session = aiohttp.ClientSession(headers=self._headers)
        timeout, url = aiohttp.ClientTimeout(total=timeout_s), self._base_url + request.path
        async with self._session.request(request.method, url, data=request.body, timeout=timeout) as response:
            return response.status, await response.read()

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()


class _BlockingTransport:
    """Blocks instead of awaiting. Each request has its own session, so that threads share none."""

    def __init__(self, base_url: str, headers: Mapping[str, str]) -> None:
        self._base_url = base_url
        self._headers = headers
        # A name and password of ~/.netrc would replace the token.
        self._auth = (lambda request: request) if "Authorization" in headers else None

    async def send(self, request: Request, timeout_s: float) -> tuple[int, bytes]:
        response = requests.request(  # noqa: ASYNC210 - there is no loop to block: see _result_of
            request.method,
            self._base_url + request.path,
            data=request.body,
            headers=self._headers,
            timeout=timeout_s,
            auth=self._auth,
            proxies={"http": "", "https": ""},  # instead of those of the environment
        )
        return response.status_code, response.content

    async def close(self) -> None:
        """Does nothing: no connection is kept."""


class AsyncRolloutBufferClient:
    """Talks to a rollout buffer. Use it as an async context manager, or call ``close`` at the end."""

    def __init__(
        self,
        base_url: str,
        *,
        token: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        transport: Transport | None = None,
    ) -> None:
        """``base_url`` is like ``http://127.0.0.1:8889``. ``timeout_s`` limits one call, in addition to a poll's
        ``wait_s``.

        ``transport`` replaces aiohttp; ``base_url`` and ``token`` are not used then.
        """
        self._timeout_s = timeout_s
        self._transport = transport or _AiohttpTransport(base_url.rstrip("/"), _headers(token))

    async def __aenter__(self) -> AsyncRolloutBufferClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connections; a second call does nothing."""
        await self._transport.close()

    async def start_rollout(self, payload: Mapping[str, Any]) -> StartReply:
        """Starts a job, or attaches to it if it exists."""
        return await self._post("/start_rollout", dict(payload), _read_start_reply)

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
        """Fetches ready groups; with ``lease_s``, groups that are not acknowledged within it are delivered again.

        Members that could not be played are delivered as dummies with ``remove_sample``, unless ``dummies`` is False.
        ``weight_version`` is the trainer's newest, to which the lag of samples is relative.
        """
        if dummies is None and lease_s is None:
            dummies = True  # without a lease the server leaves them out, for callers that ignore remove_sample
        options = {
            "job_id": job_id,
            "max_groups": max_groups,
            "batch_size": batch_size,
            "wait_s": wait_s,
            "lease_s": lease_s,
            "ack": list(ack) or None,
            "consumer_id": consumer_id,
            "poll_id": poll_id,
            "images": images,
            "dummies": dummies,
            "weight_version": weight_version,
        }
        extra_wait_s = float(wait_s or 0.0)
        return await self._post(
            "/get_rollout_data", _without_none(options), _read_rollout_data, extra_wait_s=extra_wait_s
        )

    async def ack(self, delivery_ids: Sequence[str]) -> dict[str, Any]:
        """Acknowledges deliveries; idempotent.

        The deliveries in ``expired`` of the reply must not be trained: their leases ended, and another consumer got
        their groups.
        """
        return await self._post("/ack", {"delivery_ids": list(delivery_ids)}, _read_object)

    async def write(self, items: Sequence[Mapping[str, Any]], *, job_id: str | None = None) -> dict[str, Any]:
        """Writes finished items into a job of task type ``external``; the same uid twice is one item.

        The items are sent in requests of at most 100 items and 16 MiB; a larger item is sent alone. Each request is
        stored completely or not at all. After an error, send the same items again.
        """
        job_field = b"" if job_id is None else b',"job_id":' + json.dumps(job_id).encode()
        reply: dict[str, Any] = {"results": []}
        for encoded in _encoded_lists(items):
            body = b'{"items":%b%b}' % (encoded, job_field)
            newest = await self._send(Request("POST", "/buffer/write", body), _read_object)
            reply = {**newest, "results": [*reply["results"], *_list_in(newest, "results")]}
        return reply

    async def jobs(self) -> list[dict[str, Any]]:
        """Lists the jobs, newest first."""
        return _list_in(await self._get("/jobs", _read_object), "jobs")

    async def job(self, job_id: str) -> dict[str, Any]:
        """Returns one job with its progress and accounting."""
        return await self._get(_job_path(job_id), _read_object)

    async def cancel(self, job_id: str) -> dict[str, Any]:
        """Cancels a job; its ready groups can still be fetched."""
        return await self._post(_job_path(job_id, "cancel"), {}, _read_object)

    async def pause(self, job_id: str) -> dict[str, Any]:
        """Pauses a job: running episodes end by themselves, and none begins until it is resumed."""
        return await self._post(_job_path(job_id, "pause"), {}, _read_object)

    async def drain(self, job_id: str, *, stop: bool = False) -> dict[str, Any]:
        """Pauses a job so that no attempt begins; it is drained when ``attempts`` in the reply has no ``running``.

        Running attempts end by themselves; with ``stop`` they are given up and played again after ``resume``. Call it
        again until the job is drained.
        """
        return await self._post(_job_path(job_id, "drain"), {"stop": stop}, _read_object)

    async def resume(self, job_id: str) -> dict[str, Any]:
        """Resumes a paused job."""
        return await self._post(_job_path(job_id, "resume"), {}, _read_object)

    async def deliveries(self, job_id: str, *, limit: int = 50, cursor: int | None = None) -> dict[str, Any]:
        """Lists a job's deliveries, newest first; ``next_cursor`` of the reply fetches the next page."""
        return await self._get(_job_path(job_id, "deliveries"), _read_object, {"limit": limit, "cursor": cursor})

    async def delivery(self, delivery_id: str, *, images: str | None = None) -> RolloutData:
        """Fetches the groups of a past delivery again; changes neither leases nor states."""
        return await self._get(f"/deliveries/{quote(delivery_id, safe='')}", _read_rollout_data, {"images": images})

    async def delivery_body(
        self, delivery_id: str, *, images: str | None = None, reward_version: int | None = None
    ) -> bytes:
        """As ``delivery``, but returns the bytes of the reply; ``reward_version`` chooses recomputed rewards."""
        query = {"images": images, "reward_version": reward_version}
        return await self._get(f"/deliveries/{quote(delivery_id, safe='')}", bytes, query)

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
        """Lists trajectories that pass all given filters, newest first, without payloads."""
        filters = {"job_id": job_id, "instance_id": instance_id, "outcome": outcome, "stop_reason": stop_reason}
        rewards = {"min_reward": min_reward, "max_reward": max_reward}
        return await self._get("/trajectories", _read_object, {**filters, **rewards, "limit": limit, "cursor": cursor})

    async def trajectory(self, uid: str, *, job_id: str | None = None, images: str | None = None) -> dict[str, Any]:
        """Returns one stored trajectory; ``job_id`` is required if several jobs have that uid."""
        return await self._get(
            f"/trajectories/{quote(uid, safe='')}", _read_object, {"job_id": job_id, "images": images}
        )

    async def report_training(
        self,
        job_id: str,
        rows: Sequence[Mapping[str, Any]],
        *,
        step: int | None = None,
        weight_version: int | None = None,
    ) -> dict[str, Any]:
        """Reports the trainer's values for rows: ``uid``, ``row``, ``log_probs`` of the trained tokens, advantage …

        Returns how many rows were kept, and which rows do not fit their trajectory, with the reason. A call takes at
        most 1000 rows.
        """
        body = _without_none({"rows": [dict(row) for row in rows], "step": step, "weight_version": weight_version})
        return await self._post(_job_path(job_id, "trainer_rows"), body, _read_object)

    async def mismatch(self, job_id: str, *, limit: int = 20) -> dict[str, Any]:
        """Returns the difference between the log-probs of a job's trainer and engine, by turn and weight lag."""
        return await self._get(_job_path(job_id, "mismatch"), _read_object, {"limit": limit})

    async def groups(
        self,
        job_id: str,
        *,
        state: str | None = None,
        cause: str | None = None,
        search: str | None = None,
        sort: str | None = None,
        order: str | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> dict[str, Any]:
        """Lists a job's groups with rewards and causes, last changed first or by ``sort``."""
        filters = {"state": state, "cause": cause, "search": search, "sort": sort, "order": order}
        page = {"limit": limit, "cursor": cursor}
        return await self._get(_job_path(job_id, "groups"), _read_object, {**filters, **page})

    async def attempts(
        self,
        job_id: str,
        *,
        error_code: str | None = None,
        search: str | None = None,
        transcripts: bool = False,
        limit: int = 50,
        cursor: str | None = None,
    ) -> dict[str, Any]:
        """Lists failed attempts of a job with errors and, if requested, transcripts, last ended first."""
        filters = {"error_code": error_code, "search": search, "transcripts": "true" if transcripts else None}
        return await self._get(
            _job_path(job_id, "attempts"), _read_object, {**filters, "limit": limit, "cursor": cursor}
        )

    async def group(self, group_index: int) -> dict[str, Any]:
        """Returns one group with its members, attempts and delivered members."""
        return await self._get(f"/groups/{group_index}", _read_object)

    async def explanation(self, job_id: str) -> dict[str, Any]:
        """Returns the reasons why a job makes progress or none, with figures."""
        return await self._get(_job_path(job_id, "explanation"), _read_object)

    async def health(self) -> dict[str, Any]:
        """Returns the health report of the buffer."""
        return await self._get("/health", _read_object)

    async def get_image(self, sha256: str) -> bytes:
        """Returns the bytes of a screenshot."""
        return await self._get(f"/images/{quote(sha256, safe='')}", bytes)

    async def _get(self, path: str, read: Callable[[bytes], Result], query: Mapping[str, Any] | None = None) -> Result:
        parameters = urlencode(_without_none(query or {}))
        return await self._send(Request("GET", f"{path}?{parameters}" if parameters else path, None), read)

    async def _post(
        self, path: str, body: Mapping[str, Any], read: Callable[[bytes], Result], *, extra_wait_s: float = 0.0
    ) -> Result:
        return await self._send(Request("POST", path, _encoded(body)), read, extra_wait_s)

    async def _send(self, request: Request, read: Callable[[bytes], Result], extra_wait_s: float = 0.0) -> Result:
        status, content = await self._transport.send(request, self._timeout_s + extra_wait_s)
        _raise_for_status(status, content)
        return read(content)


def _blocking(
    method: Callable[Concatenate[AsyncRolloutBufferClient, P], Coroutine[Any, Any, Result]],
) -> Callable[Concatenate[RolloutBufferClient, P], Result]:
    """Returns a method that blocks where ``method`` awaits, with its signature and its docstring."""

    def call(self: RolloutBufferClient, /, *args: P.args, **kwargs: P.kwargs) -> Result:
        return _result_of(method(self._client, *args, **kwargs))

    call.__name__, call.__qualname__ = method.__name__, f"RolloutBufferClient.{method.__name__}"
    call.__doc__, call.__module__ = method.__doc__, method.__module__
    call.__signature__ = inspect.signature(method)  # type: ignore[attr-defined] # what inspect and the docs show
    return call


def _result_of(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Runs a coroutine that never suspends, because its transport blocks, and returns its result."""
    try:
        coroutine.send(None)
    except StopIteration as finished:
        result: Result = finished.value
        return result
    coroutine.close()
    raise RuntimeError("the blocking client waited for an event loop")


class RolloutBufferClient:
    """The methods of ``AsyncRolloutBufferClient`` as blocking calls. Safe to use from several threads."""

    def __init__(self, base_url: str, *, token: str | None = None, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """``base_url`` is that of ``AsyncRolloutBufferClient``; ``timeout_s`` limits each wait for bytes of a reply."""
        self._client = AsyncRolloutBufferClient(
            base_url, timeout_s=timeout_s, transport=_BlockingTransport(base_url.rstrip("/"), _headers(token))
        )

    start_rollout = _blocking(AsyncRolloutBufferClient.start_rollout)
    get_rollout_data = _blocking(AsyncRolloutBufferClient.get_rollout_data)
    ack = _blocking(AsyncRolloutBufferClient.ack)
    write = _blocking(AsyncRolloutBufferClient.write)
    jobs = _blocking(AsyncRolloutBufferClient.jobs)
    job = _blocking(AsyncRolloutBufferClient.job)
    cancel = _blocking(AsyncRolloutBufferClient.cancel)
    pause = _blocking(AsyncRolloutBufferClient.pause)
    drain = _blocking(AsyncRolloutBufferClient.drain)
    resume = _blocking(AsyncRolloutBufferClient.resume)
    deliveries = _blocking(AsyncRolloutBufferClient.deliveries)
    delivery = _blocking(AsyncRolloutBufferClient.delivery)
    delivery_body = _blocking(AsyncRolloutBufferClient.delivery_body)
    trajectories = _blocking(AsyncRolloutBufferClient.trajectories)
    trajectory = _blocking(AsyncRolloutBufferClient.trajectory)
    report_training = _blocking(AsyncRolloutBufferClient.report_training)
    mismatch = _blocking(AsyncRolloutBufferClient.mismatch)
    groups = _blocking(AsyncRolloutBufferClient.groups)
    attempts = _blocking(AsyncRolloutBufferClient.attempts)
    group = _blocking(AsyncRolloutBufferClient.group)
    explanation = _blocking(AsyncRolloutBufferClient.explanation)
    health = _blocking(AsyncRolloutBufferClient.health)
    get_image = _blocking(AsyncRolloutBufferClient.get_image)
