"""``rollout-buffer start``: a job from a file, from flags, or from both."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from slime_plugins.rollout_buffer.cli.common import (
    DEFAULT_URL,
    AsJson,
    Url,
    assignments,
    connect,
    console,
    print_json,
    report_errors,
)
from slime_plugins.rollout_buffer.errors import ConfigError


def start(
    payload: Annotated[
        Path | None, typer.Argument(help="A start payload: JSON or YAML, as POST /start_rollout takes it.")
    ] = None,
    task_type: Annotated[str | None, typer.Option(help="Which generator plays it, like `math`.")] = None,
    input_file: Annotated[
        str | None, typer.Option(help="JSONL or Parquet under the server's data roots, one instance a line.")
    ] = None,
    engine_url: Annotated[
        str | None,
        typer.Option("--engine-url", "--remote-engine-url", help="The SGLang server or router that samples."),
    ] = None,
    samples: Annotated[
        int | None, typer.Option("--samples", "--num-repeat-per-sample", help="Samples of each group.")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option("--tokenizer", "--tokenizer-path", help="The engine's tokenizer: a folder on the buffer's host."),
    ] = None,
    job_id: Annotated[str | None, typer.Option(help="Id of the job. Default: derived from the payload.")] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=JSON", help="Any other key of the payload; repeatable. Sections with dots."),
    ] = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Start a job, or attach to the existing one: an equal payload is the same job.

    Flags override the file, and `--set` overrides both.
    """
    options = {
        "task_type": task_type,
        "input_file": input_file,
        "remote_engine_url": engine_url,
        "num_repeat_per_sample": samples,
        "tokenizer_path": tokenizer,
        "job_id": job_id,
    }
    with report_errors():
        flags = {key: value for key, value in options.items() if value is not None}
        body = _merged({} if payload is None else _payload(payload), flags, assignments("--set", setting))
        reply = connect(url).start_rollout(body)
    if as_json:
        print_json(reply.model_dump(mode="json"))
        return
    if reply.reopened:
        outcome = "had failed; its failed groups are played again"
    else:
        outcome = f"exists already and is {reply.state}; attached to it" if reply.attached else "started"
    console.print(f"{reply.job_id}: {outcome}. Its progress: rollout-buffer status {reply.job_id}", soft_wrap=True)
    for note in reply.notes:
        console.print(note, soft_wrap=True)


def _merged(body: Mapping[str, Any], flags: Mapping[str, Any], set_keys: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``body`` with the keys of flags and ``--set``; each replaces a key of ``body`` also under its other name.

    Raises:
        ConfigError: no key was given at all, or a section that ``--set`` names is no object.
    """
    from slime_plugins.rollout_buffer.wire.start_request import SHORT_NAMES

    given = {**flags, **{SHORT_NAMES.get(key, key): value for key, value in set_keys.items()}}
    merged = {key: value for key, value in body.items() if SHORT_NAMES.get(key, key) not in given}
    for key, value in given.items():
        _put(merged, key.split("."), value)
    if not merged:
        raise ConfigError("give a payload file, or --task-type with the options of that task type")
    return merged


def _payload(path: Path) -> dict[str, Any]:
    from slime_plugins.rollout_buffer.strict_yaml import load_yaml

    try:
        text = path.read_text(encoding="utf-8-sig")
        try:
            body = json.loads(text, object_pairs_hook=_each_key_once)
        except (ValueError, RecursionError):
            body, _ = load_yaml(text, str(path))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is neither JSON nor YAML: {error}") from error
    if not isinstance(body, dict):
        raise ConfigError(f"{path} does not hold an object with the keys of a start payload")
    return body


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raises ``ValueError`` if a key is repeated; ``load_yaml`` then names it with its line."""
    if len(body := dict(pairs)) < len(pairs):
        raise ValueError
    return body


def _put(body: dict[str, Any], path: Sequence[str], value: Any) -> None:
    *sections, last = path
    for section in sections:
        if body.get(section) is None:  # an empty section of YAML is null
            body[section] = {}
        body = body[section]
        if not isinstance(body, dict):
            raise ConfigError(f"--set {'.'.join(path)}: {section} is not a section")
    body[last] = value
