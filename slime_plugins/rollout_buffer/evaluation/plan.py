"""Settings of an evaluation, its plan in the output folder, and the check of its engine.

The plan identifies the evaluation. The same command continues it; a command for another evaluation in the same folder
is refused, so that a report never mixes two evaluations.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import requests

from slime_plugins.rollout_buffer.credentials import key_headers, redacted_values
from slime_plugins.rollout_buffer.errors import ConfigError, EngineError
from slime_plugins.rollout_buffer.state.input_files import read_instances, split_slice
from slime_plugins.rollout_buffer.types import Instance

PLAN_FILE = "evaluation.json"
ENGINE_TIMEOUT_S = 10.0
ANY_REWARD = (-1e12, 1e12)
"""The reward range of an evaluation, which refuses no reward."""
NULLABLE = frozenset({"max_groups_ahead", "pause_when_idle_s"})
"""Settings for which null means no limit; other settings that are None are not sent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationSettings:
    """Settings of an evaluation. ``output`` belongs to one evaluation.

    ``tasks`` is an ``input_file`` of ``start_rollout``, including slices. ``buffer_url`` None starts a buffer in
    ``output``; ``environment`` and ``serve_arguments`` are added to its environment and command. ``retry_given_up``
    allows ``max_attempts`` further attempts for failed slots, once per call.
    """

    output: Path
    task_type: str
    tasks: str
    engine_url: str
    api: str = "sglang"
    model: str | None = None
    api_key: str | None = None
    tokenizer: Path | None = None
    samples_per_task: int = 1
    sampling_params: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    concurrency: int = 16
    max_attempts: int = 5
    retry_given_up: bool = False
    success_threshold: float = 1.0
    group_by: Sequence[str] = ()
    buffer_url: str | None = None
    serve_arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def tasks_file(self) -> Path:
        """The file with the tasks, as an absolute path without a slice."""
        return Path(split_slice(self.tasks)[0]).resolve()


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineFacts:
    """The engine's report on itself; a fact that it does not report is None."""

    model: str | None = None
    weight_version: str | None = None
    tokenizer: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The content of ``evaluation.json``."""

    job_id: str
    work: Mapping[str, Any]
    """What is measured: the settings that must not change between calls."""


def read_tasks(settings: EvaluationSettings) -> list[Instance]:
    """Returns the lines of the task list.

    Raises:
        InputFileError: the list cannot be read, is empty, or has a line without an ``instance_id`` of its own.
    """
    return read_instances(_absolute(settings), [settings.tasks_file.parent])


def ask_engine(settings: EvaluationSettings) -> EngineFacts:
    """Checks the engine's address, key and model before episodes are played.

    Raises:
        EngineError: the engine does not answer.
        ConfigError: the address, the key or the model is wrong.
    """
    return _ask_openai(settings) if settings.api == "openai" else _ask_sglang(settings)


def open_plan(settings: EvaluationSettings, tasks: Sequence[Instance], engine: EngineFacts) -> Plan:
    """Returns the plan of the folder; writes it if there is none.

    Raises:
        ConfigError: the folder belongs to another evaluation, or its plan cannot be read.
    """
    path = settings.output / PLAN_FILE
    work = _work(settings, tasks, engine)
    if not path.exists():
        plan = Plan(job_id=f"eval-{uuid.uuid4().hex[:12]}", work=work)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps({"job_id": plan.job_id, "work": work}, indent=2) + "\n", encoding="utf-8")
        partial.replace(path)
        return plan
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        job_id, stored_work = str(stored["job_id"]), dict(stored["work"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; give another --output") from error
    different = sorted(name for name in {*work, *stored_work} if work.get(name) != stored_work.get(name))
    if different:
        raise ConfigError(
            f"{settings.output} belongs to another evaluation ({_differences(different, stored_work, work)}): "
            "give another --output, or the original command"
        )
    return Plan(job_id=job_id, work=stored_work)


def job_payload(
    settings: EvaluationSettings, plan: Plan, tasks: Sequence[Instance], tokenizer: str | None
) -> dict[str, Any]:
    """Returns the body of ``start_rollout``, for an evaluation job that takes any reward and waits for no trainer.

    Raises:
        ConfigError: an option is a key that the evaluation sets.
    """
    payload = {
        "job_id": plan.job_id,
        "task_type": settings.task_type,
        "evaluation": True,
        "num_epoch": 1,
        "num_repeat_per_sample": settings.samples_per_task,
        "num_process": settings.concurrency,
        "max_attempts": settings.max_attempts,
        "retry_given_up": settings.retry_given_up or None,
        "remote_engine_url": settings.engine_url,
        "engine_api": settings.api,
        "engine_model": plan.work["model"] if settings.api == "openai" else None,
        "tokenizer_path": tokenizer,
        "sampling_params": dict(settings.sampling_params),
        "sampling_seed": settings.seed,
        "reward_range": list(ANY_REWARD),
        "max_groups_ahead": None,
        "pause_when_idle_s": None,
        **_input(settings, tasks),
    }
    clash = sorted(payload.keys() & settings.options.keys())
    if clash:
        raise ConfigError(f"--option may not set {', '.join(clash)}: the evaluation sets it")
    payload |= settings.options
    return {key: value for key, value in payload.items() if value is not None or key in NULLABLE}


def tokenizer_for(settings: EvaluationSettings, engine: EngineFacts) -> str | None:
    """Returns the tokenizer's folder; None for an engine that takes messages.

    Raises:
        ConfigError: a tokenizer is given for an engine that takes messages; or none is given for another engine, and
            the engine names no folder on this machine.
    """
    if settings.api == "openai":
        if settings.tokenizer is not None:
            raise ConfigError("--tokenizer is for --api sglang: an OpenAI-compatible server renders messages itself")
        return None
    if settings.tokenizer is not None:
        return str(settings.tokenizer.resolve())
    folders = [name for name in (engine.tokenizer, engine.model) if name is not None and Path(name).is_dir()]
    if not folders:
        raise ConfigError(
            f"the engine's tokenizer ({engine.tokenizer or engine.model or '/model_info names none'}) is no folder on "
            "this machine: give --tokenizer FOLDER"
        )
    return folders[0]


def _work(settings: EvaluationSettings, tasks: Sequence[Instance], engine: EngineFacts) -> dict[str, Any]:
    """Returns the settings that must not change between calls. The engine's address may change."""
    lines = b"\n".join(orjson.dumps(task.data, option=orjson.OPT_SORT_KEYS) for task in tasks)
    return {
        "task_type": settings.task_type,
        "tasks": len(tasks),
        "tasks_sha256": hashlib.sha256(lines).hexdigest(),
        "samples_per_task": settings.samples_per_task,
        "api": settings.api,
        "model": settings.model or engine.model,
        "weight_version": engine.weight_version,
        "sampling_params": dict(settings.sampling_params),
        "seed": settings.seed,
        "options": redacted_values(settings.options),
    }


def _differences(names: Sequence[str], then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    return "; ".join(f"{name}: {_short(then.get(name))} then, {_short(now.get(name))} now" for name in names[:4])


def _short(value: Any) -> str:
    return json.dumps(value)[:80]


def _input(settings: EvaluationSettings, tasks: Sequence[Instance]) -> dict[str, Any]:
    """Returns the task file's path; for a given buffer, which may have no access to the file, the tasks themselves."""
    if settings.buffer_url is None:
        return {"input_file": _absolute(settings)}
    return {"instances": [dict(task.data) for task in tasks]}


def _absolute(settings: EvaluationSettings) -> str:
    """Returns ``tasks`` with an absolute path, and with its slice."""
    path = split_slice(settings.tasks)[0]
    return f"{settings.tasks_file}{settings.tasks[len(path) :]}"


def _ask_sglang(settings: EvaluationSettings) -> EngineFacts:
    """Asks an engine for its facts; behind a proxy that forwards turns only, they are unknown."""
    headers = key_headers(settings.engine_url)
    for route in ("/model_info", "/get_model_info"):
        answer = _get(f"{settings.engine_url}{route}", headers)
        if answer.status_code == 200:
            fields = _object(answer)
            return EngineFacts(
                model=_text(fields.get("model_path")),
                weight_version=_text(fields.get("weight_version")),
                tokenizer=_text(fields.get("tokenizer_path")),
            )
    if _get(f"{settings.engine_url}/generate", headers).status_code not in (401, 403, 405):  # only a POST is a turn
        raise ConfigError(
            f"{settings.engine_url} has neither /model_info nor /generate, which SGLang has: is the address right, or "
            "is --api openai missing?"
        )
    return EngineFacts()


def _ask_openai(settings: EvaluationSettings) -> EngineFacts:
    headers = {} if settings.api_key is None else {"Authorization": f"Bearer {settings.api_key}"}
    answer = _get(f"{settings.engine_url}/models", headers)
    if answer.status_code in (401, 403):
        raise ConfigError(f"{settings.engine_url} refuses the key (HTTP {answer.status_code}): see --api-key-env")
    if settings.model is not None:
        return EngineFacts(model=settings.model)
    data = _object(answer).get("data") if answer.status_code == 200 else None
    entries = data if isinstance(data, list) else []
    models = [str(entry["id"]) for entry in entries if isinstance(entry, dict) and "id" in entry]
    if len(models) != 1:
        listed = ", ".join(models[:8]) or "none"
        raise ConfigError(f"which model? Give --model ({settings.engine_url}/models lists {listed})")
    return EngineFacts(model=models[0])


def _get(url: str, headers: Mapping[str, str]) -> requests.Response:
    auth = (lambda request: request) if headers else None  # a password of ~/.netrc would replace the key
    try:
        return requests.get(url, headers=headers, timeout=ENGINE_TIMEOUT_S, auth=auth)
    except requests.RequestException as error:
        raise EngineError(f"the engine does not answer at {url}: {error}") from error


def _object(answer: requests.Response) -> dict[str, Any]:
    try:
        fields = answer.json()
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
