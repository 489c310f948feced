"""Settings of an engine's client: how long and how often a turn is retried."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """Retry limits of the client, times in seconds. A single call has no read timeout: a paused engine may hold a
    request for minutes.

    ``retry_timeout_s`` limits the sum of the pauses between failed tries of one turn since its last sampled token. It
    covers engines that restart or load weights, and other programs that reply at the engine's address (a proxy's page,
    a redirect, an empty body). ``deadline_s`` limits a whole turn, held requests included; None = no limit.
    ``connect_timeout_s`` limits the opening of a connection. ``backoff_first_s`` and ``backoff_longest_s`` are the
    first and the longest pause. A turn fails after ``server_error_tries`` replies with HTTP 500, if the engine answers
    other requests: a router answers so when a worker is lost, and an engine when the request makes it fail.
    ``abort_timeout_s`` limits the abort of a cancelled request. ``connection_limit`` limits open connections; None =
    unlimited. The client resumes a generation that the engine aborted, or broke off in a stream, from its partial
    tokens; with ``resume_aborted`` false it returns the partial output with finish reason ``abort``.
    """

    retry_timeout_s: float = 900.0
    deadline_s: float | None = 7200.0
    connect_timeout_s: float = 10.0
    backoff_first_s: float = 0.5
    backoff_longest_s: float = 15.0
    server_error_tries: int = 3
    abort_timeout_s: float = 5.0
    connection_limit: int | None = None
    resume_aborted: bool = True
