"""Routes of jobs: start, list, show, cancel, pause, resume, drain, failed attempts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from flask import Response

from slime_plugins.rollout_buffer import wire
from slime_plugins.rollout_buffer.errors import InvalidPayloadError, UnavailableError, UnknownTaskTypeError
from slime_plugins.rollout_buffer.json_bodies import json_object
from slime_plugins.rollout_buffer.reporting.failed_attempts import failed_attempts
from slime_plugins.rollout_buffer.reporting.job_description import describe_job, settings_for_display
from slime_plugins.rollout_buffer.rules.groups import GROUP_TIMEOUT_NOTE
from slime_plugins.rollout_buffer.serve_settings import generator_files
from slime_plugins.rollout_buffer.server.http import (
    json_reply,
    read_bytes,
    refuse_too_many_objects,
    the_buffer,
    the_context,
    the_inspection,
)
from slime_plugins.rollout_buffer.server.routing import Routes
from slime_plugins.rollout_buffer.server.supervisor_state import SupervisorState, read_supervisor_state
from slime_plugins.rollout_buffer.server.tokenizer_paths import check_tokenizer
from slime_plugins.rollout_buffer.state import input_files
from slime_plugins.rollout_buffer.state.runner_reports import devices_of_job
from slime_plugins.rollout_buffer.types import Instance
from slime_plugins.rollout_buffer.wire.checks import misspelt_key_messages
from slime_plugins.rollout_buffer.wire.control_requests import DrainPayload
from slime_plugins.rollout_buffer.wire.group_replies import FailedAttemptPage
from slime_plugins.rollout_buffer.wire.job_replies import Job, JobDetails, Jobs
from slime_plugins.rollout_buffer.wire.job_settings import EXTERNAL_TASK_TYPE
from slime_plugins.rollout_buffer.wire.query_params import AttemptPageQuery
from slime_plugins.rollout_buffer.wire.request_fields import parse
from slime_plugins.rollout_buffer.wire.start_request import MAX_GROUPS, StartPayload

KEY_DESCRIPTIONS = {
    "tokenizer_path": "the folder of the trainer's tokenizer, on the buffer host",
    "remote_rollout_url": "the address of the rollout server, like http://host:port",
}

LISTING_TIMEOUT_S = 20.0
"""Seconds for which a start waits until the supervisor has listed changed generator files."""
LISTING_POLL_S = 0.1

routes = Routes("jobs")


@routes.post("/start_rollout", body=StartPayload, reply=wire.StartReply, errors=(404, 409))
def start_rollout() -> Response:
    """Start a job, or attach to it.

    A call with the same payload attaches to the job and updates its engine URL; with a skip list it makes delivered
    groups outside the list ready again. Numbers may be sent as strings. Other keys are options of the generator.
    """
    content = read_bytes()
    refuse_too_many_objects(content, "the body")
    body = json_object(content)
    task = _check_task_type(body.get("task_type"))
    payload = parse(StartPayload, body)
    _check_required_keys(payload, task.get("required_keys", ()))
    _check_options(payload, task)
    tokenizer_path, notes = _usable_tokenizer(payload)
    payload = payload.model_copy(update={"tokenizer_path": tokenizer_path})
    instances = _instances(payload)
    _check_size(payload, len(instances))
    started = the_buffer().start_job(payload, instances)
    job = started.job
    reply = wire.StartReply(
        message=started.message,
        job_id=job.job_id,
        state=job.state,
        attached=started.attached,
        reopened=started.reopened,
        groups=job.instance_count * job.num_epoch,
        group_size=job.group_size,
        notes=[*notes, *([GROUP_TIMEOUT_NOTE] if job.gives_up_slow_members else [])],
    )
    return json_reply(reply.model_dump())


def _check_task_type(task_type: Any) -> Mapping[str, Any]:
    """Returns the catalog's entry of a task type; refuses an unknown type, and every type without a supervisor."""
    state = _when_listed(task_type)
    if state.alive and not state.serving:
        raise UnavailableError(f"no job can be started yet: {state.reason}. Try again in a moment")
    if not state.serving:
        raise UnavailableError(f"no supervisor would run this job: {state.reason}. Is rollout-buffer serve running?")
    if not isinstance(task_type, str):
        return {}  # ``StartPayload`` refuses the payload
    known: dict[str, Mapping[str, Any]] = state.catalog.get("task_types", {})
    if task_type in known:
        return known[task_type]
    if not known:  # the catalog was not read, or not written since the start
        raise UnavailableError(f"the task types are not known yet: {state.reason or 'the supervisor is starting'}")
    broken = state.catalog.get("broken_generators", {})
    hint = "".join(f"\n{name} does not load: {reason}" for name, reason in broken.items())
    names = ", ".join(sorted(known))
    near = get_close_matches(task_type, known, n=1, cutoff=0.7)
    hint = (f"; did you mean {near[0]}?" if near else "") + hint
    raise UnknownTaskTypeError(
        f"no generator has task_type {task_type[:100]!r}; known: {names}{hint}",
        {"task_types": sorted(known), "broken_generators": broken},
    )


def _when_listed(task_type: Any) -> SupervisorState:
    """Returns the supervisor's state once it has listed the present generator files, or that of the task type.

    Raises:
        UnavailableError: changed files are not listed within ``LISTING_TIMEOUT_S``.
    """
    context = the_context()
    deadline = time.monotonic() + LISTING_TIMEOUT_S
    while True:
        state = read_supervisor_state(context)
        source = state.catalog.get("task_types", {}).get(str(task_type), {}).get("source")
        listed = state.catalog.get("files", {})
        files = generator_files(context.settings.generator_dirs)
        is_listed = files == listed or (source is not None and files.get(source) == listed.get(source))
        if is_listed or not state.serving:
            return state
        if time.monotonic() > deadline:
            changed = sorted(Path(file).name for file in files | listed if files.get(file) != listed.get(file))
            raise UnavailableError(
                f"the generators are still being listed again: {', '.join(changed[:5])} changed. The log of serve "
                "names the slow file"
            )
        time.sleep(LISTING_POLL_S)


def _check_required_keys(payload: StartPayload, required: Sequence[str]) -> None:
    """Refuses a payload without the keys that the task type requires."""
    given = {**payload.model_dump(exclude_none=True), **payload.options}
    missing = [key for key in required if not given.get(key)]
    if payload.engine_api == "openai":  # such an engine takes messages, not token ids
        missing = [key for key in missing if key != "tokenizer_path"]
    if missing:
        raise InvalidPayloadError(
            "; ".join(
                f"{key} is missing: task_type {payload.task_type} needs {KEY_DESCRIPTIONS.get(key, 'it')}"
                for key in missing
            )
        )


def _check_options(payload: StartPayload, task: Mapping[str, Any]) -> None:
    """Refuses options unknown to a generator that declares its options, and misspelt keys of declared sections."""
    for path, keys in task.get("option_sections", {}).items():
        section: Any = payload.options
        for name in path.split("."):
            section = section.get(name) if isinstance(section, Mapping) else None
        if isinstance(section, Mapping) and (wrong := misspelt_key_messages(map(str, section), keys, f"{path}.")):
            raise InvalidPayloadError("; ".join(wrong))
    if task.get("option_keys") is None:
        return
    known = [*task["option_keys"], *task.get("required_keys", ())]
    unknown = [key for key in payload.options if key not in known]
    if unknown:
        near = get_close_matches(unknown[0], known, n=1)
        meant = f"did you mean {near[0]}?" if near else f"it takes {', '.join(known) or 'no options'}"
        raise InvalidPayloadError(f"{unknown[0][:100]} is not known to task_type {payload.task_type}: {meant}")


def _usable_tokenizer(payload: StartPayload) -> tuple[str | None, list[str]]:
    """Returns the path of the job's tokenizer, and notes: an external job with a tokenizer that cannot be used gets a
    note instead of an error, because it needs none."""
    path, settings = payload.tokenizer_path, the_context().settings
    if path is None:
        return None, []
    try:
        check_tokenizer(path, settings.resolved_data_roots(), settings.allowed_tokenizers)
    except InvalidPayloadError as error:
        if payload.task_type != EXTERNAL_TASK_TYPE:
            raise
        return None, [f"the job has no tokenizer, which gateway sessions and the texts of tokens need: {error}"]
    return path, []


def _check_size(payload: StartPayload, instances: int) -> None:
    groups = instances * payload.num_epoch
    if groups > MAX_GROUPS:
        raise InvalidPayloadError(
            f"{instances} instances times num_epoch {payload.num_epoch} are {groups} groups; a job has up to "
            f"{MAX_GROUPS}: ask for fewer epochs, or start several jobs on slices (path@[a:b])"
        )


def _instances(payload: StartPayload) -> list[Instance]:
    if payload.instances is not None:
        return input_files.instances_from_lines(payload.instances)
    if payload.input_file is not None:
        return input_files.read_instances(payload.input_file, the_context().settings.resolved_data_roots())
    return []


@routes.get("/jobs")
def jobs() -> Jobs:
    """List the jobs.

    The newest comes first; each has its accounting.
    """
    buffer = the_buffer()
    return Jobs(jobs=[describe_job(buffer.store, job) for job in buffer.jobs()])


@routes.get("/jobs/{job_id}")
def job(job_id: str) -> JobDetails:
    """Show a job.

    Returns its state, progress and accounting: submitted = open + ready + leased + delivered + filtered + failed +
    skipped.
    """
    buffer = the_buffer()
    record = buffer.job(job_id)
    return JobDetails(
        **describe_job(buffer.store, record),
        settings=settings_for_display(buffer.store, record),
        devices=devices_of_job(buffer.store, record.key),
    )


@routes.post("/jobs/{job_id}/{verb}", errors=(409,))
def change_job(job_id: str, verb: str) -> Job:
    """Cancel, pause or resume a job.

    Repeating it changes nothing. A cancelled job keeps its closed groups.
    """
    buffer = the_buffer()
    return describe_job(buffer.store, buffer.change_job(job_id, verb))


@routes.post("/jobs/{job_id}/drain")
def drain_job(job_id: str, payload: DrainPayload) -> Job:
    """Drain a job.

    Pauses it: running attempts are completed or, with `stop`, given up. The job is drained when `attempts` of the reply
    has no `running`: repeat the call until then. `resume` continues the job.
    """
    buffer = the_buffer()
    return describe_job(buffer.store, buffer.drain_job(job_id, stop=payload.stop))


@routes.get("/jobs/{job_id}/attempts")
def attempts(job_id: str, page: AttemptPageQuery) -> FailedAttemptPage:
    """List attempts that failed.

    The last to end comes first; each has its error and, on request, its messages. Of each job the newest 100 are kept
    with their messages.
    """
    return failed_attempts(the_inspection().store, job_id, page)
