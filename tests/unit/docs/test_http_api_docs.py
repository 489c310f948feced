"""The pages on HTTP and metrics name every route, field, error and metric that there is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slime_plugins.rollout_buffer.openapi.operations import OPERATIONS
from slime_plugins.rollout_buffer.openapi.schemas import COMPONENTS
from slime_plugins.rollout_buffer.protocol import query_params, request_models
from slime_plugins.rollout_buffer.reporting.prometheus import METRICS

ROOT = Path(__file__).resolve().parents[3]


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def test_the_pages_are_up_to_date() -> None:
    result = subprocess.run(
        [sys.executable, "tools/write_http_api_docs.py", "--check"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: f"{operation.method} {operation.path}")
def test_every_route_has_a_section_with_an_example(operation: object) -> None:
    method, path, example = (getattr(operation, name) for name in ("method", "path", "example"))
    section = page("http_api.md").split(f"### `{method.upper()} {path}`\n")[1].split("\n### ")[0]
    assert example
    assert "```bash\ncurl " in section


@pytest.mark.parametrize(
    "record", [request_models.StartPayload, request_models.PollPayload, request_models.AckPayload,
    request_models.SamplingPayload, query_params.PageQuery,
     query_params.TrajectoryPageQuery, query_params.TrajectoryQuery, query_params.DeliveryQuery],
)  # fmt: skip
def test_every_field_that_may_be_sent_is_there(record: type[request_models.Body]) -> None:
    text = page("http_api.md")
    assert [name for name in record.model_fields if f"| `{name}` |" not in text] == []


def test_every_field_of_a_written_item_is_there() -> None:
    section = page("http_api.md").split("### WrittenItemBody\n")[1].split("\n### ")[0]
    assert [name for name in COMPONENTS["WrittenItemBody"]["properties"] if f"| `{name}` |" not in section] == []


def test_every_metric_is_there() -> None:
    text = page("metrics.md")
    assert [metric.name for metric in METRICS if f"| `{metric.name}` |" not in text] == []
