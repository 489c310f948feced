"""The seam through which an episode says what it is doing, for whoever draws traces. Nobody listens unless told to.

Whoever plays marks its phases with ``phase``; a runner puts a tracer in charge with ``traced_by``. Neither knows what
becomes of it: ``telemetry`` has the tracer that sends it to OpenTelemetry.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

Attributes = Mapping[str, str | int | float | bool]


class Span(Protocol):
    """A stretch of time that is being traced."""

    def note(self, attributes: Attributes) -> None:
        """Adds what became known only now."""


class Tracer(Protocol):
    """Takes spans. One that is begun within another belongs to it; an error that leaves one is its end."""

    def span(self, name: str, attributes: Attributes) -> AbstractContextManager[Span]:
        """Traces what happens inside."""


class NoTracer:
    """Takes everything and keeps nothing."""

    @contextlib.contextmanager
    def span(self, name: str, attributes: Attributes) -> Iterator[Span]:
        """Does nothing."""
        yield self

    def note(self, attributes: Attributes) -> None:
        """Does nothing."""


_tracer: contextvars.ContextVar[Tracer] = contextvars.ContextVar("rollout_buffer_tracer")
_NOBODY = NoTracer()


@contextlib.contextmanager
def traced_by(tracer: Tracer) -> Iterator[None]:
    """Gives the phases inside, also of tasks that are begun there, to this tracer."""
    token = _tracer.set(tracer)
    try:
        yield
    finally:
        _tracer.reset(token)


def phase(name: str) -> AbstractContextManager[Span]:
    """Traces a phase of an episode (reset, generate, act, score …), when somebody traces it at all."""
    return _tracer.get(_NOBODY).span(name, {})
