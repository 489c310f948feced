"""Writes ``docs/http_api.md`` and ``docs/metrics.md`` from the API description and the table of metrics.

``--check`` writes nothing and only checks that the pages are up to date.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slime_plugins.rollout_buffer.openapi.document import openapi_document
from slime_plugins.rollout_buffer.openapi.operations import ERRORS, Operation
from slime_plugins.rollout_buffer.reporting.prometheus import METRICS
from slime_plugins.rollout_buffer.server.app import OPERATIONS
from slime_plugins.rollout_buffer.wire.query_params import TrajectoryFilters

DOCS = Path(__file__).resolve().parents[1] / "docs"
API_OPENING = """# HTTP API

Written by `python tools/write_http_api_docs.py`. The server describes every route, with its fields, replies and errors,
at `/openapi.json` (OpenAPI 3.1):
`curl http://127.0.0.1:8889/openapi.json | jq '.components.schemas.Job.properties'`.

JSON in, JSON out, whatever the content type says. Bodies are sent uncompressed, up to
[the route's limit](operations.md#anonymous-clients). Half surrogates are refused, and NaN and
Infinity outside of trainers' reports. The last of two equal keys counts. Numbers may be sent as strings.

With `--token-file`, every route but `/health` and the sign-in page needs `Authorization: Bearer TOKEN`.

## Retries

Every POST and PUT may be sent again after a lost reply. It changes nothing the second time if it carries its id: the
`uid` of a written item, `start_id` of a start with `fresh`, `consumer_id` and `poll_id` of a poll, `delivery_id` of an
acknowledgement. A reply to a write means that the items are on disk. A request that got another 4xx than 429 changed
nothing; do not repeat it unchanged. After 429, 503 and 507 repeat it, when `Retry-After` has passed.

## Errors

`{"error": {"code": "…", "message": "…", "detail": {…}}}`: `code` is for programs and stays, `message` says what to
do. HTTP's own 405, 414 and 431 occur as well.

| status | when |
|---|---|
"""

METRICS_OPENING = """# Prometheus metrics

Written by `python tools/write_http_api_docs.py` from the table of metrics.

`GET /metrics` answers in Prometheus' text format. Every number is a gauge, read from the store when it is asked for, so
it survives restarts. Jobs that are over stay in the list. The trainer logs the same metrics of its job as
`rollout/buffer/…`, with slashes for underscores: `rollout_buffer_slots{state="ready"}` is `rollout/buffer/slots/ready`.

In `prometheus.yml` (`authorization` only if the server has a token):

```yaml
scrape_configs:
  - job_name: rollout_buffer
    static_configs: [{targets: ["127.0.0.1:8889"]}]
    authorization: {credentials_file: /path/to/token}
```

Metrics with *job* have the labels `job_id` and `task_type`, those with *device* `pool` and `device_id`.

| metric | labels | meaning |
|---|---|---|
"""
COMMON_LABELS: Mapping[tuple[str, ...], str] = {("job_id", "task_type"): "*job*", ("pool", "device_id"): "*device*"}


METRICS_CLOSING = """
Worth an alarm:

| expression | it means |
|---|---|
| `absent(rollout_buffer_supervisor_heartbeat_age_seconds)` | the supervisor has ended: no episodes are played |
| `rollout_buffer_supervisor_heartbeat_age_seconds > 15` | the supervisor hangs or was killed |
| `rollout_buffer_slots_submitted != sum without (state) (rollout_buffer_slots)` | slots do not add up: a defect |
| `rollout_buffer_oldest_ready_group_age_seconds > 3600` | groups wait, and no trainer fetches them |
| `rate(rollout_buffer_attempts{state="failed"}[10m]) > 0.1` | devices or the engine are failing |
| `rollout_buffer_disk_free_bytes < 10e9` | the disk is filling up |

## Grafana

`deploy/grafana_dashboard.json` has a panel for every metric of this page. In Grafana: Dashboards → New → Import, upload
the file, and choose the Prometheus data source at the top of the dashboard.

Prometheus 2.42 answered every expression of the file and of the table above; the file was not loaded into a Grafana.
"""


FILTERS = tuple(TrajectoryFilters.model_fields)
"""Query parameters that select trajectories; several routes take them, and the page lists them once."""
SENT = ("StartPayload", "PollPayload", "WrittenItemBody")
"""Records that people write by hand or in their programs; the page shows their fields."""


def http_api_page() -> str:
    """Returns the page: what holds for all routes, one line for each, and the fields of what is sent."""
    errors = "".join(f"| {status} | {text} |\n" for status, text in ERRORS.items())
    routes = "".join(map(_route, OPERATIONS))
    records = "\n".join("\n".join(_record(name)) for name in SENT)
    filters = ", ".join(f"`{name}`" for name in FILTERS)
    others = (
        "`/openapi.json` has the other records under `components.schemas`: `SamplingPayload`, `WrittenGeneration` "
        "(`prompt_ids`, `output_ids`, `output_log_probs`, `weight_version` …) and all replies."
    )
    heading = f"## Routes\n\n*filters*: {filters}.\n\n| route | what it does | takes |\n|---|---|---|\n"
    return f"{API_OPENING}{errors}\n{heading}{routes}\n## What is sent\n\n{others}\n\n{records}".rstrip() + "\n"


def metrics_page() -> str:
    """Returns the reference of every metric."""
    rows = "".join(f"| `{metric.name}` | {_labels(metric.labels)} | {metric.help} |\n" for metric in METRICS)
    return METRICS_OPENING + rows + METRICS_CLOSING


def _labels(labels: tuple[str, ...]) -> str:
    common = COMMON_LABELS.get(labels[:2], "")
    shown = [common] if common else []
    return ", ".join([*shown, *(f"`{label}`" for label in labels[len(shown) * 2 :])]) or "–"


def _route(operation: Operation) -> str:
    taken = []
    if operation.body is not None:
        schema = openapi_document(OPERATIONS)["paths"][operation.path][operation.method]["requestBody"]["content"]
        taken.append(_type(next(iter(schema.values()))["schema"]))
    if operation.query is not None:
        names = list(operation.query.model_fields)
        takes_filters = set(FILTERS) <= set(names)
        own = [f"`{name}`" for name in names if not (takes_filters and name in FILTERS)]
        taken.append("?" + ", ".join([*own, "filters"] if takes_filters else own))
    first_sentence = re.split(r"(?<=\.) (?=[A-Z0-9`])", operation.description, maxsplit=1)[0]
    return f"| `{operation.route}` | {operation.summary}. {first_sentence} | {', '.join(taken) or '–'} |\n"


def _record(name: str) -> Iterator[str]:
    schema = openapi_document(OPERATIONS)["components"]["schemas"][name]
    yield from (f"### {name}\n", f"{schema['description']}\n")
    yield from _fields(schema)
    yield ""


def _fields(schema: Mapping[str, Any]) -> Iterator[str]:
    yield from ("| field | type, default | meaning |", "|---|---|---|")
    required = schema.get("required", [])
    for name, entry in schema.get("properties", {}).items():
        text = entry.get("description", "")
        yield f"| `{name}` | {_type(entry)}{_default(entry, name in required)} | {text} |"


def _default(schema: Mapping[str, Any], required: bool) -> str:
    if required:
        return ", required"
    value = schema.get("default")
    if value is None or isinstance(value, dict) or value == []:
        return ""
    return f", `{value}`".replace("'", '"').replace("False", "false").replace("True", "true")


def _type(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[-1]
        return f"[{name}](#{name.lower()})" if name in SENT else f"`{name}`"
    if "enum" in schema:
        return " \\| ".join(f"`{value}`" for value in schema["enum"])
    options = list(
        dict.fromkeys(
            _type(option)
            for option in (*schema.get("anyOf", ()), *schema.get("allOf", ()))
            if option.get("type") != "null"
        )
    )
    if options:
        is_number = options[0].startswith(("integer", "number"))
        return options[0] if is_number and options[1:] == ["string"] else " or ".join(options)
    kinds = schema.get("type", "anything")
    kind = " or ".join(name for name in kinds if name != "null") if isinstance(kinds, list) else kinds
    if "items" in schema:
        return f"{kind} of {_type(schema['items'])}"
    return kind + _bounds(schema)


def _bounds(schema: Mapping[str, Any]) -> str:
    """Returns the bounds of a number; those from a million on, which no user comes near, are left out."""
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤"}
    bounds = {key: f"{schema[key]:g}" for key in signs if key in schema and abs(schema[key]) < 1e6}
    if bounds.keys() == {"minimum", "maximum"}:
        return f" {bounds['minimum']}–{bounds['maximum']}"
    return f" {', '.join(f'{signs[key]} {bound}' for key, bound in bounds.items())}" if bounds else ""


PAGES = {"http_api.md": http_api_page, "metrics.md": metrics_page}


def main() -> int:
    """Writes the pages, or with ``--check`` checks that they are up to date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 when a page is out of date")
    checking = parser.parse_args().check
    outdated = []
    for name, page in PAGES.items():
        path, wanted = DOCS / name, page()
        if not checking:
            path.write_text(wanted, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != wanted:
            outdated.append(name)
    for name in outdated:
        sys.stderr.write(f"docs/{name} is out of date: python tools/write_http_api_docs.py writes it\n")
    return 1 if outdated else 0


if __name__ == "__main__":
    sys.exit(main())
