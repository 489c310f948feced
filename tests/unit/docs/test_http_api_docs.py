"""The pages on HTTP and metrics name every route, field, error and metric that there is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slime_plugins.rollout_buffer.openapi.document import openapi_document
from slime_plugins.rollout_buffer.reporting.prometheus import METRICS
from slime_plugins.rollout_buffer.server.app import OPERATIONS

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


@pytest.mark.parametrize("record", ["StartPayload", "SamplingPayload", "PollPayload", "AckPayload", "WrittenItemBody"])
def test_every_field_that_may_be_sent_is_there(record: str) -> None:
    section = page("http_api.md").split(f"### {record}\n")[1].split("\n### ")[0]
    fields = openapi_document(OPERATIONS)["components"]["schemas"][record]["properties"]
    assert [name for name in fields if f"| `{name}` |" not in section] == []


def test_every_metric_is_there() -> None:
    text = page("metrics.md")
    assert [metric.name for metric in METRICS if f"| `{metric.name}` |" not in text] == []
