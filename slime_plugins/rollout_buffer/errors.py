"""Every error this project raises on purpose, in one tree::

    RolloutBufferError
    ├── RequestError              a caller's mistake: an HTTP 4xx that says what to fix; nothing was changed
    │   ├── InvalidPayloadError       400 invalid_payload
    │   │   └── RewardRangeError          422 reward_out_of_range (the job's own range, which its payload set)
    │   ├── UnreadableBodyError       400 unreadable_body
    │   ├── InputFileError            400 input_file
    │   ├── UnauthorizedError         401 unauthorized
    │   ├── ForbiddenError            403 forbidden (a page of another site asked for it)
    │   ├── UnknownTaskTypeError      404 unknown_task_type
    │   ├── NotFoundError             404 not_found
    │   ├── ConflictError             409 conflict
    │   ├── StaleAttemptError         409 stale_attempt (the attempt was given up; its result is refused)
    │   ├── GoneError                 410 gone (a session that is over)
    │   ├── PayloadTooLargeError      413 payload_too_large
    │   ├── UnsupportedEncodingError  415 unsupported_encoding
    │   └── BusyError                 429 busy: as much as may be is under way; the same call may succeed later
    ├── UnavailableError          503 unavailable: try again later, nothing was lost
    │   └── DatabaseDamagedError      503 database_damaged: nothing goes on until somebody has looked at it
    ├── StorageFullError          507 storage_full: the disk or its quota is used up, nothing was lost
    ├── DamagedError              500 damaged: stored bytes are gone or are not what was written
    ├── ConfigError               a setting is wrong; the process does not start
    ├── GeneratorError            a generator cannot be loaded or broke its contract
    └── EpisodeError              an attempt died of its surroundings; never a reward, retried in a new attempt
        ├── DeviceError
        ├── EngineError
        │   └── EngineAwayError    no attempt is counted for it: nobody got an answer of the engine
        ├── AttemptTimeoutError
        ├── JudgeError
        └── EnvironmentSetupError

Each has a stable ``code`` (in HTTP replies, logs and metrics) and survives pickling, because devices raise them in
other processes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from slime_plugins.rollout_buffer.redaction import redacted


class RolloutBufferError(Exception):
    """Base of the tree. ``message`` is one sentence for a person; ``detail`` is machine-readable."""

    code = "internal"
    http_status = 500

    def __init__(self, message: str, detail: Mapping[str, Any] | None = None) -> None:
        """A password in an address is taken out of ``message``: errors are logged, stored and shown."""
        self.message = redacted(message)
        super().__init__(self.message)
        self.detail: dict[str, Any] = dict(detail or {})

    def __reduce__(self) -> tuple[type[RolloutBufferError], tuple[str, dict[str, Any]]]:
        return type(self), (self.message, self.detail)


class RequestError(RolloutBufferError):
    """The caller can mend it; nothing was changed."""

    code = "bad_request"
    http_status = 400


class InvalidPayloadError(RequestError):
    """A field is missing, of the wrong type or out of range."""

    code = "invalid_payload"


class RewardRangeError(InvalidPayloadError):
    """The reward of a written item lies outside of the range that the job's payload set."""

    code = "reward_out_of_range"
    http_status = 422


class UnreadableBodyError(RequestError):
    """The body did not come whole: cut off, too slow, or in chunks that are none."""

    code = "unreadable_body"


class InputFileError(RequestError):
    """The input file cannot be read, lies outside the data roots, or holds a bad line."""

    code = "input_file"


class UnauthorizedError(RequestError):
    """The bearer token is missing or wrong."""

    code = "unauthorized"
    http_status = 401


class ForbiddenError(RequestError):
    """A browser sent it on behalf of a page of another site."""

    code = "forbidden"
    http_status = 403


class UnknownTaskTypeError(RequestError):
    """No generator has this task type."""

    code = "unknown_task_type"
    http_status = 404


class NotFoundError(RequestError):
    """There is no such job, trajectory, delivery or image."""

    code = "not_found"
    http_status = 404


class ConflictError(RequestError):
    """The request contradicts what is stored, or names too little to choose by."""

    code = "conflict"
    http_status = 409


class StaleAttemptError(ConflictError):
    """The attempt was given up before this result arrived; the result is refused."""

    code = "stale_attempt"


class JobPausedError(ConflictError):
    """Nothing of the job begins before it is resumed."""

    code = "job_paused"


class GoneError(RequestError):
    """What was asked for is over and does not come back."""

    code = "gone"
    http_status = 410


class BusyError(RequestError):
    """As much as may be is under way; the same call may succeed later."""

    code = "busy"
    http_status = 429


class PayloadTooLargeError(RequestError):
    """The body is larger than the server takes."""

    code = "payload_too_large"
    http_status = 413


class UnsupportedEncodingError(RequestError):
    """The body is compressed; the server takes it only as it is."""

    code = "unsupported_encoding"
    http_status = 415


class UnavailableError(RolloutBufferError):
    """The service cannot do this now; the same request may succeed later."""

    code = "unavailable"
    http_status = 503


class DatabaseDamagedError(UnavailableError):
    """The database cannot be read as one; nothing goes on before somebody has looked at it."""

    code = "database_damaged"


class StorageFullError(RolloutBufferError):
    """The disk, or the quota on it, is used up; what was acknowledged is safe."""

    code = "storage_full"
    http_status = 507


class DamagedError(RolloutBufferError):
    """Stored bytes cannot be read or are not what was written; whatever does not need them goes on."""

    code = "damaged"


class ConfigError(RolloutBufferError, ValueError):
    """A setting is missing or wrong."""

    code = "config"


class GeneratorError(RolloutBufferError):
    """A generator file does not load, or a generator broke its contract."""

    code = "generator"


class EpisodeError(RolloutBufferError):
    """An attempt ended for a reason that is not the policy's. It has no reward and is retried."""

    code = "episode"


class DeviceError(EpisodeError):
    """The device hung, died or refused a command."""

    code = "device"


class EngineError(EpisodeError):
    """The inference engine refused a request, or stayed out of reach for longer than the client retries."""

    code = "engine"


class EngineAwayError(EngineError):
    """Whatever answers at the engine's address has answered nobody as an engine does, for longer than clients retry."""

    code = "engine_away"


class AttemptTimeoutError(EpisodeError):
    """The attempt took longer than the job's ``attempt_timeout_seconds``."""

    code = "attempt_timeout"


class JudgeError(EpisodeError):
    """Whoever decides what an answer earns did not answer."""

    code = "judge"


class EnvironmentSetupError(EpisodeError):
    """The task could not be set up."""

    code = "environment_setup"


def network_reason(error: BaseException) -> str:
    """Returns in a few words what the network did, as the operating system says it, without the libraries' stack."""
    chain = [error]
    while (inner := chain[-1].__cause__ or chain[-1].__context__) is not None and inner not in chain:
        chain.append(inner)
    if "SSLError" in {kind.__name__ for one in chain for kind in type(one).__mro__}:
        return "it speaks no TLS, or its certificate is not trusted"
    # urllib3 derives a refused connection from a TimeoutError of its own: only Python's counts, and requests' Timeout.
    if any(isinstance(one, TimeoutError) for one in chain) or "Timeout" in [
        kind.__name__ for kind in type(error).__mro__
    ]:
        return "it took too long"
    reasons = [_by_the_system(one) for one in chain if isinstance(one, OSError) and one.strerror]
    return reasons[-1] if reasons else "the connection broke"


def _by_the_system(error: OSError) -> str:
    """asyncio writes a sentence of its own over the system's, with the address as a tuple."""
    return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error.strerror)
