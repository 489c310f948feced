"""The exceptions of this project, in one tree::

    RolloutBufferError
    ├── RequestError              an invalid request: HTTP 4xx with advice; nothing was changed
    │   ├── InvalidPayloadError       400 invalid_payload
    │   │   └── RewardRangeError          422 reward_out_of_range (the job's own range, which its payload set)
    │   ├── UnreadableBodyError       400 unreadable_body
    │   ├── InputFileError            400 input_file
    │   ├── UnauthorizedError         401 unauthorized
    │   ├── ForbiddenError            403 forbidden (a request from a page of another site)
    │   ├── UnknownTaskTypeError      404 unknown_task_type
    │   ├── NotFoundError             404 not_found
    │   ├── ConflictError             409 conflict
    │   ├── JobPausedError            409 job_paused (no attempt begins)
    │   ├── StaleAttemptError         409 stale_attempt (the attempt was given up; its result is refused)
    │   ├── GoneError                 410 gone (the session of the request has ended)
    │   ├── PayloadTooLargeError      413 payload_too_large
    │   ├── UnsupportedEncodingError  415 unsupported_encoding
    │   └── BusyError                 429 busy: a limit of concurrent work is reached; retry later
    ├── UnavailableError          503 unavailable: retry later, nothing was lost
    │   └── DatabaseDamagedError      503 database_damaged: needs an operator
    ├── StorageFullError          507 storage_full: the disk or its quota is used up, nothing was lost
    ├── DamagedError              500 damaged: stored bytes are missing or differ from what was written
    ├── ConfigError               an invalid setting; the process does not start
    ├── GeneratorError            a generator cannot be loaded or violated its contract
    └── EpisodeError              an infrastructure failure of an attempt; never a reward, retried in a new attempt
        ├── DeviceError
        ├── EngineError
        │   └── EngineAwayError    the engine answers no request; not counted as a failed attempt
        ├── AttemptTimeoutError
        ├── JudgeError
        └── EnvironmentSetupError

Each has a stable ``code`` (in HTTP replies, logs and metrics) and survives pickling, because devices raise them in
other processes.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from typing import Any

from slime_plugins.rollout_buffer.credentials import redacted


class RolloutBufferError(Exception):
    """Base of the tree. ``message`` is for people; ``detail`` is machine-readable."""

    code = "internal"
    http_status = 500

    def __init__(self, message: str, detail: Mapping[str, Any] | None = None) -> None:
        """Passwords in ``message`` are redacted, because errors are logged, stored and shown."""
        self.message = redacted(message)
        super().__init__(self.message)
        self.detail: dict[str, Any] = dict(detail or {})

    def __reduce__(self) -> tuple[type[RolloutBufferError], tuple[str, dict[str, Any]]]:
        return type(self), (self.message, self.detail)


class RequestError(RolloutBufferError):
    """The request is invalid; nothing was changed."""

    code = "bad_request"
    http_status = 400


class InvalidPayloadError(RequestError):
    """A field is missing, of the wrong type or out of range."""

    code = "invalid_payload"


class RewardRangeError(InvalidPayloadError):
    """The reward of a written item is outside of the job's ``reward_range``."""

    code = "reward_out_of_range"
    http_status = 422


class UnreadableBodyError(RequestError):
    """The body is incomplete: truncated, too slow, or with invalid chunks."""

    code = "unreadable_body"


class InputFileError(RequestError):
    """The input file cannot be read, is outside of the data roots, or has an invalid line."""

    code = "input_file"


class UnauthorizedError(RequestError):
    """The bearer token is missing or wrong."""

    code = "unauthorized"
    http_status = 401


class ForbiddenError(RequestError):
    """A browser sent the request on behalf of a page of another site."""

    code = "forbidden"
    http_status = 403


class UnknownTaskTypeError(RequestError):
    """No generator has this task type."""

    code = "unknown_task_type"
    http_status = 404


class NotFoundError(RequestError):
    """There is no such job, group, trajectory, delivery or image."""

    code = "not_found"
    http_status = 404


class ConflictError(RequestError):
    """The request contradicts the stored state, or is ambiguous."""

    code = "conflict"
    http_status = 409


class StaleAttemptError(ConflictError):
    """The attempt was given up, or its runner replaced, before this result arrived; the result is refused."""

    code = "stale_attempt"


class JobPausedError(ConflictError):
    """The job is paused: no attempt begins."""

    code = "job_paused"


class GoneError(RequestError):
    """The session of the request has ended."""

    code = "gone"
    http_status = 410


class BusyError(RequestError):
    """A limit of concurrent work is reached; the same request may succeed later."""

    code = "busy"
    http_status = 429


class PayloadTooLargeError(RequestError):
    """The body exceeds the server's limit."""

    code = "payload_too_large"
    http_status = 413


class UnsupportedEncodingError(RequestError):
    """The body is compressed, which the server does not support."""

    code = "unsupported_encoding"
    http_status = 415


class UnavailableError(RolloutBufferError):
    """The service cannot process the request now; the same request may succeed later."""

    code = "unavailable"
    http_status = 503


class DatabaseDamagedError(UnavailableError):
    """The database is damaged and needs an operator."""

    code = "database_damaged"


class StorageFullError(RolloutBufferError):
    """The disk or the quota is used up; acknowledged data is safe."""

    code = "storage_full"
    http_status = 507


class DamagedError(RolloutBufferError):
    """Stored bytes cannot be read or differ from what was written."""

    code = "damaged"


class ConfigError(RolloutBufferError, ValueError):
    """A setting is missing or wrong."""

    code = "config"


class GeneratorError(RolloutBufferError):
    """A generator file cannot be loaded, or a generator violated its contract."""

    code = "generator"


class EpisodeError(RolloutBufferError):
    """An infrastructure failure ended an attempt. It has no reward and is retried.

    All but ``EngineAwayError`` count towards ``max_attempts``.
    """

    code = "episode"


class DeviceError(EpisodeError):
    """The device hung, crashed or rejected a command."""

    code = "device"


class EngineError(EpisodeError):
    """The inference engine rejected a request, or stayed unreachable for longer than the client retries."""

    code = "engine"


class EngineAwayError(EngineError):
    """No request to the engine's address got a valid reply for longer than clients retry."""

    code = "engine_away"


class AttemptTimeoutError(EpisodeError):
    """The attempt took longer than the job's ``attempt_timeout_seconds``."""

    code = "attempt_timeout"


class JudgeError(EpisodeError):
    """The judge that computes the reward did not answer."""

    code = "judge"


class EnvironmentSetupError(EpisodeError):
    """The task could not be set up."""

    code = "environment_setup"


def network_reason(error: BaseException) -> str:
    """Returns a short reason of a network error, in the words of the operating system or of OpenSSL."""
    chain = [error]
    while (inner := chain[-1].__cause__ or chain[-1].__context__) is not None and inner not in chain:
        chain.append(inner)
    if tls_errors := [cause for cause in chain if isinstance(cause, ssl.SSLError)]:
        return _tls_reason(tls_errors[-1])
    # urllib3 derives a refused connection from its own TimeoutError: only Python's and requests' count.
    own_kinds = {kind.__name__ for kind in type(error).__mro__}
    if "Timeout" in own_kinds or any(isinstance(cause, TimeoutError) for cause in chain):
        return "it took too long"
    system_errors = [cause for cause in chain if isinstance(cause, OSError) and cause.strerror]
    if not system_errors:
        return "the connection broke"
    # asyncio replaces the system's message by its own, with the address as a tuple.
    number = system_errors[-1].errno
    return os.strerror(number) if number and number > 0 else str(system_errors[-1].strerror)


def _tls_reason(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}"
    if error.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"):  # OpenSSL's names of an answer in plain HTTP
        return "it answers without TLS: its address begins with http, not https"
    return f"the TLS connection failed: {str(error.reason).replace('_', ' ').lower()}"
