"""An attempt is a span, its phases are spans in it, and without a listener nothing happens."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.errors import DeviceError
from slime_plugins.rollout_buffer.observability import opentelemetry
from slime_plugins.rollout_buffer.observability.opentelemetry import (
    ENDPOINT_VARIABLES,
    OpenTelemetryTracer,
    tracing_from_environment,
)
from slime_plugins.rollout_buffer.observability.tracing import NoTracer, phase
from slime_plugins.rollout_buffer.runner.job_runner import JobRunner
from slime_plugins.rollout_buffer.types import EpisodeRequest
from tests.unit.generator.gui_agent.test_episode import CLICK, DONE
from tests.unit.generator.gui_agent.test_episode import play as play_on_a_device
from tests.unit.runner.test_runner import ScriptedGenerator, plugin_of, start


class Listener:
    """A tracer, and what it was told."""

    def __init__(self) -> None:
        self._kept = InMemorySpanExporter()
        self._provider = TracerProvider()
        self._provider.add_span_processor(SimpleSpanProcessor(self._kept))
        self.tracer = OpenTelemetryTracer(self._provider)

    def spans(self, name: str | None = None) -> list[ReadableSpan]:
        return [span for span in self._kept.get_finished_spans() if name in (None, span.name)]

    def within(self, parent: ReadableSpan) -> list[str]:
        """The names of a span's children, in the order they began."""
        found = [span for span in self.spans() if span.parent and span.parent.span_id == parent.context.span_id]
        return [span.name for span in sorted(found, key=lambda span: span.start_time or 0)]


@pytest.fixture
def listener() -> Listener:
    return Listener()


async def scripted_play(episode: EpisodeRequest) -> Any:
    """Plays an episode on a scripted device; the first attempt at one slot breaks while it resets the device."""
    if (episode.instance.instance_id, episode.slot, episode.attempt) == ("i0", 0, 1):
        with phase("reset"):
            raise DeviceError("the screen is gone")
    await play_on_a_device([CLICK, DONE])
    return float(episode.slot)


async def test_an_attempt_is_a_span_with_its_phases_in_it(listener: Listener, real_time_buffer: Buffer) -> None:
    job = start(real_time_buffer, 2)
    generator = ScriptedGenerator(scripted_play)
    plugin, url = plugin_of(generator), "http://127.0.0.1:9"
    await JobRunner(real_time_buffer, job.key, plugin, buffer_url=url, tracer=listener.tracer).run()
    attempts = listener.spans("attempt")
    assert len(attempts) == len(generator.requests) == 5
    assert len({span.context.trace_id for span in attempts}) == 5
    by_uid = {span.attributes["rollout_buffer.uid"]: span for span in attempts if span.attributes}
    assert by_uid.keys() == {request.uid for request in generator.requests}
    for request in generator.requests:
        span = by_uid[request.uid]
        said = {name.removeprefix("rollout_buffer."): value for name, value in (span.attributes or {}).items()}
        assert (said["job"], said["task"]) == (job.job_id, request.instance.instance_id)
        assert said["attempt"] == request.attempt
        if span.status.status_code is StatusCode.ERROR:
            assert (said["error.type"], said.get("outcome")) == ("device", None)
            assert listener.within(span) == ["reset"]
        else:
            assert (said["outcome"], said["reward"]) == ("completed", request.slot)
            assert listener.within(span) == ["reset", "generate", "act", "generate", "score"]
    assert [span.status.status_code for span in attempts].count(StatusCode.ERROR) == 1


def test_nothing_is_traced_unless_a_collector_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENDPOINT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with tracing_from_environment() as tracer:
        assert isinstance(tracer, NoTracer)


@pytest.mark.filterwarnings("ignore")
def test_a_collector_that_is_away_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENDPOINT_VARIABLES[0], "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setattr(opentelemetry, "FLUSH_TIMEOUT_MS", 200)
    with tracing_from_environment() as tracer, tracer.span("attempt", {"uid": "u"}) as span:
        span.note({"reward": 1.0})
    assert isinstance(tracer, OpenTelemetryTracer)
