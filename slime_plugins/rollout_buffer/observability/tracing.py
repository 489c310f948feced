"""The tracing interface: episodes mark phases with ``phase``, runners install a tracer with ``traced_by``.

Without a tracer nothing is recorded. ``opentelemetry`` has the tracer for OpenTelemetry.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

Attributes = Mapping[str, str | int | float | bool]


class Span(Protocol):
    def note(self, attributes: Attributes) -> None:
        """Adds attributes."""


class Tracer(Protocol):
    """Creates spans. A span that begins inside another is its child; an exception ends it."""

    def span(self, name: str, attributes: Attributes) -> AbstractContextManager[Span]:
        """Traces the block."""


class NoTracer:
    """Records nothing."""

    @contextlib.contextmanager
    def span(self, name: str, attributes: Attributes) -> Iterator[Span]:
        yield self

    def note(self, attributes: Attributes) -> None: ...


_tracer: contextvars.ContextVar[Tracer] = contextvars.ContextVar("rollout_buffer_tracer")
_NO_TRACER = NoTracer()


@contextlib.contextmanager
def traced_by(tracer: Tracer) -> Iterator[None]:
    """Installs the tracer for the block and the tasks started in it."""
    token = _tracer.set(tracer)
    try:
        yield
    finally:
        _tracer.reset(token)


def phase(name: str) -> AbstractContextManager[Span]:
    """Traces a phase of an episode (reset, generate, act, score …)."""
    return _tracer.get(_NO_TRACER).span(name, {})
