"""The API description is true: Schemathesis sends what it allows and what it forbids, and reads the answers."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given
from hypothesis import strategies as st

from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.openapi.operations import Operation
from slime_plugins.rollout_buffer.rules.heartbeats import SUPERVISOR
from slime_plugins.rollout_buffer.serve_settings import ServeSettings
from slime_plugins.rollout_buffer.server.app import OPERATIONS
from tests.asgi_client import create_app
from tests.example_counts import examples
from tests.support import PNG_HASH, message_with_image, poll, start_external, write, written

MODES = {"allowed": "POSITIVE", "forbidden": "NEGATIVE"}
"""The names of Schemathesis' modes. Only tests import it, since each worker of a run collects this file."""
KNOWN: dict[str, list[str]] = {"sha256": [PNG_HASH], "job_id": ["j", "a/b"], "uid": ["u0", "a/0"], "delivery_id": []}
"""Ids that exist, so that not every case ends at a 404."""


@pytest.fixture(scope="module")
def app() -> Iterator[Any]:
    """An application over a store in which each kind of thing exists."""
    with tempfile.TemporaryDirectory(prefix="rollout-buffer-") as folder:
        found = create_app(ServeSettings(data_dir=Path(folder) / "data", data_roots=(Path(folder),)))
        buffer: Buffer = found.extensions["rollout_buffer"].buffer
        fill(buffer)
        yield found
        buffer.store.close()


@pytest.fixture(scope="module")
def description(app: Any) -> Any:
    """The application's description, as Schemathesis reads it."""
    import schemathesis

    return schemathesis.openapi.from_wsgi("/openapi.json", app)


def fill(buffer: Buffer) -> None:
    job = start_external(buffer, n=2, job_id="j")
    start_external(buffer, n=1, job_id="a/b")
    write(
        buffer,
        job,
        written("u0", reward=0.0, messages=[message_with_image()]),
        written("a/0"),
        written("u1", "other"),
    )
    delivery = poll(buffer, job, lease_s=3600.0)
    assert delivery is not None
    KNOWN["delivery_id"] = [delivery.delivery_id]


def can_be_wrong(operation: Operation) -> bool:
    """Whether the schema of the body forbids anything; an image is wrong only by its hash, which no schema says."""
    return operation.body is not None and "application/json" in operation.body_types


PAIRS = [
    pytest.param(operation, mode, id=f"{operation.method} {operation.path} {mode}")
    for operation in OPERATIONS
    for mode in MODES
    if mode == "allowed" or operation.query is not None or can_be_wrong(operation)
]


@pytest.mark.parametrize(("operation", "mode"), PAIRS)
def test_every_answer_is_one_that_is_described(app: Any, description: Any, operation: Any, mode: str) -> None:
    import schemathesis
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks as of_openapi

    described = description[operation.path][operation.method.upper()]
    buffer: Buffer = app.extensions["rollout_buffer"].buffer
    checks = [
        not_a_server_error,
        of_openapi.status_code_conformance,
        of_openapi.content_type_conformance,
        of_openapi.response_schema_conformance,
    ]
    if mode == "forbidden":
        checks.append(of_openapi.negative_data_rejection)
    generation_mode = schemathesis.GenerationMode[MODES[mode]]

    @examples(
        15,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=described.as_strategy(generation_mode=generation_mode), data=st.data())
    def check(case: Any, data: st.DataObject) -> None:
        buffer.beat(SUPERVISOR.name, os.getpid(), {"task_types": {"external": {}}, "broken_generators": {}})
        if mode == "allowed":
            put_known_ids_into(case, data)
        case.call_and_validate(checks=checks)

    check()


def put_known_ids_into(case: Any, data: st.DataObject) -> None:
    """Makes about every second case be about something that exists."""
    for parameters in (case.path_parameters, case.query, case.body):
        if not isinstance(parameters, dict):
            continue
        for name, ids in KNOWN.items():
            if name in parameters and data.draw(st.booleans()):
                parameters[name] = data.draw(st.sampled_from(ids))
    if isinstance(case.body, dict):
        if "wait_s" in case.body:
            case.body["wait_s"] = 0
        if "task_type" in case.body and data.draw(st.booleans()):
            case.body["task_type"] = "external"
