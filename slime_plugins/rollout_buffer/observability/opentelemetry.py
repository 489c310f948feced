"""OpenTelemetry traces: a span for each attempt, with child spans for the phases of its episode.

Enabled when ``OTEL_EXPORTER_OTLP_ENDPOINT`` or ``OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`` is set and the extra
``telemetry`` is installed; configured by OpenTelemetry's own variables. Spans are exported in the background; an
unreachable collector loses spans, never an episode.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from slime_plugins.rollout_buffer.install_hints import install_extra
from slime_plugins.rollout_buffer.observability.tracing import Attributes, NoTracer, Span, Tracer

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span as OpenTelemetrySpan

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
SERVICE_NAME = "rollout-buffer"
FLUSH_TIMEOUT_MS = 3000

logger = logging.getLogger(__name__)


class OpenTelemetryTracer:
    """Creates OpenTelemetry spans; attributes get the prefix ``rollout_buffer.``"""

    def __init__(self, provider: TracerProvider) -> None:
        self._tracer = provider.get_tracer("slime_plugins.rollout_buffer")

    @contextlib.contextmanager
    def span(self, name: str, attributes: Attributes) -> Iterator[Span]:
        """Traces the block; an exception, cancellation included, marks the span as failed."""
        from opentelemetry.trace import Status, StatusCode

        with self._tracer.start_as_current_span(
            name, attributes=_prefixed(attributes), record_exception=False, set_status_on_exception=False
        ) as span:
            try:
                yield _SpanAdapter(span)
            except BaseException as error:
                span.record_exception(error)
                span.set_attribute("error.type", str(getattr(error, "code", "") or type(error).__name__))
                span.set_status(Status(StatusCode.ERROR, str(error)))
                raise


class _SpanAdapter:
    def __init__(self, span: OpenTelemetrySpan) -> None:
        self._span = span

    def note(self, attributes: Attributes) -> None:
        self._span.set_attributes(_prefixed(attributes))


def _prefixed(attributes: Attributes) -> dict[str, str | int | float | bool]:
    return {f"rollout_buffer.{name}": value for name, value in attributes.items()}


@contextlib.contextmanager
def tracing_from_environment() -> Iterator[Tracer]:
    """Yields the tracer that the environment configures, and flushes it at the end.

    If the packages are missing, it logs that once and traces nothing.
    """
    if not any(os.environ.get(name) for name in ENDPOINT_VARIABLES):
        yield NoTracer()
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        logger.warning("%s is set, but traces need the extra 'telemetry' (%s): %s. Nothing is traced.",
                       " or ".join(ENDPOINT_VARIABLES), error, install_extra("telemetry"))  # fmt: skip
        yield NoTracer()
        return
    named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": SERVICE_NAME}
    provider = TracerProvider(resource=Resource.create(named))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    try:
        yield OpenTelemetryTracer(provider)
    finally:
        provider.force_flush(FLUSH_TIMEOUT_MS)
        provider.shutdown()
