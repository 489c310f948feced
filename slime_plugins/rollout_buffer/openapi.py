"""What ``GET /openapi.json`` says: the OpenAPI 3.1 description of every route.

Request bodies and queries come from the pydantic records that check them; replies are described here by hand. A test
holds this against the routes that are really there, and Schemathesis against what they really answer.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from slime_plugins.rollout_buffer.explain import Severity
from slime_plugins.rollout_buffer.payloads import MAX_ITEMS, AckPayload, PollPayload, SignInPayload, StartPayload
from slime_plugins.rollout_buffer.queries import (
    DeliveryQuery,
    GroupPageQuery,
    OverviewQuery,
    PageQuery,
    SeriesQuery,
    TokenRowQuery,
    TrajectoryPageQuery,
    TrajectoryQuery,
)
from slime_plugins.rollout_buffer.series import COUNTED, MEASURED
from slime_plugins.rollout_buffer.types import GroupState, JobState, Outcome, StopReason

__all__ = ["OPERATIONS", "Operation", "openapi_document"]

Schema = dict[str, Any]

JSON = "application/json"
IMAGE_TYPES = ("image/png", "image/jpeg", "image/webp")

ERRORS: Mapping[int, str] = {
    400: "A field is missing or wrong; the message names it. Nothing was changed.",
    401: "The bearer token is missing or wrong.",
    403: "A page of another site made a browser send it.",
    404: "There is no such thing.",
    409: "The request contradicts what is stored, or names too little to choose by.",
    413: "The body, or the list in it, is larger than the server takes.",
    415: "The body is compressed; send it as it is.",
    503: "Cannot be done now; the same request may succeed later. Nothing was lost.",
    507: "The disk is full. What was acknowledged is safe.",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """One route with one method, as callers need to know it."""

    method: str
    path: str
    summary: str
    says: str
    reply: Schema
    reply_says: str
    body: type[BaseModel] | Schema | None = None
    body_types: tuple[str, ...] = (JSON,)
    query: type[BaseModel] | None = None
    path_parameters: Mapping[str, Schema] = field(default_factory=dict)
    errors: tuple[int, ...] = ()
    content_types: tuple[str, ...] = (JSON,)
    other_replies: Mapping[int, tuple[str, Schema]] = field(default_factory=dict)
    needs_token: bool = True
    example: str = ""
    """What follows ``curl`` and the base URL on a command line."""


# --- schemas ---------------------------------------------------------------------------------------------------------


def _object(required: str, /, **properties: Schema) -> Schema:
    return {"type": "object", "required": required.split(), "properties": properties}


def _text(says: str = "", **more: Any) -> Schema:
    return {"type": "string", **({"description": says} if says else {}), **more}


def _number(says: str = "", **more: Any) -> Schema:
    return {"type": "number", **({"description": says} if says else {}), **more}


def _integer(says: str = "", **more: Any) -> Schema:
    return {"type": "integer", **({"description": says} if says else {}), **more}


def _nullable(schema: Schema) -> Schema:
    return {**schema, "type": [schema["type"], "null"]}


def _array(items: Schema, says: str = "", **more: Any) -> Schema:
    return {"type": "array", "items": items, **({"description": says} if says else {}), **more}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _counts(keys: Iterator[str] | None, says: str) -> Schema:
    names = list(keys) if keys is not None else []
    return {
        "type": "object",
        "description": says,
        "required": names,
        "properties": {name: _integer() for name in names},
        "additionalProperties": {"type": "integer"},
    }


_IDENTIFIER: Schema = {
    "anyOf": [{"type": "string", "minLength": 1, "maxLength": 256}, {"type": "integer"}],
    "description": "1 to 256 printable characters, or an integer",
}
_OUTCOME = _text("How the attempt ended", enum=[member.value for member in Outcome])
_STOP_REASON = _text("Why the episode stopped", enum=[member.value for member in StopReason])
_MESSAGE = _object("role", role=_text())
_GENERATION: Schema = {
    **_object(
        "output_ids prompt_ids",
        keep=_integer("The first so many ids of the generation before (prompt and output) come first", minimum=0),
        prompt_ids=_array(_integer(minimum=0), "Prompt token ids after the kept ones"),
        output_ids=_array(_integer(minimum=0), "Sampled token ids"),
        output_log_probs={"type": ["array", "null"], "items": {"type": "number"}, "description": "One per output id"},
        finish_reason=_text("stop, length or abort"),
        weight_version={"description": "The engine's weights that sampled it"},
        trained={"type": "boolean", "description": "False keeps its tokens out of the loss"},
        weight_version_spans=_array(
            _object("start end", weight_version={}, start=_integer(), end=_integer()), "Weights by stretch of output"
        ),
        keep_images=_integer("The first so many images of the generation before come first", minimum=0),
        images=_array(_text(), "sha256 of the image behind each placeholder of the prompt, after the kept ones"),
        prompt_tokens=_nullable(_integer("The engine's count of the prompt with its images expanded")),
    ),
    "description": "What the engine sampled in one turn",
}
_STATISTICS = {
    "total_samples": _integer("Trajectories written since the last delivery, before any filter"),
    "num_groups": _integer("Groups they belong to"),
    "avg_group_size": _number(),
    "avg_reward": _number("Mean of their rewards; 0 when there are none"),
    "reward_std": _number("Standard deviation (n - 1) of their rewards"),
    "reward_min": _number(),
    "reward_max": _number(),
}

_EPISODE_FACTS = {
    "success": _nullable(_number("In [0, 1]: what the environment said, before any shaping; null when unknown")),
    "turns": _nullable(_integer()),
    "sampled_tokens": _nullable(_integer()),
    "generate_s": _nullable(_number("Seconds it waited for the engine")),
    "played_s": _nullable(_number("Seconds of all its phases")),
    "oldest_version": _nullable(_integer("Of the weights that sampled it")),
    "versions_behind": _nullable(_integer("How far that was behind the job's newest when it was written")),
}
_EXPLANATIONS = _array(_ref("Explanation"), "Why it moves or stands still, the most pressing first")
_NEWEST = {"type": "object", "description": "The newest 200 trajectories: episodes, mean reward, success"}

COMPONENTS: Mapping[str, Schema] = {
    "Error": _object(
        "error",
        error=_object(
            "code message detail",
            code=_text("Stable, for programs"),
            message=_text("A sentence that says what to do"),
            detail={"type": "object", "description": "More of it, for programs"},
        ),
    ),
    "StartReply": _object(
        "message job_id state attached groups group_size",
        message=_text("`Rollout started` or `Rollout attached`"),
        job_id=_text("Use it in every later call"),
        state=_text(enum=[state.value for state in JobState]),
        attached={"type": "boolean", "description": "The job was there already"},
        groups=_integer("Instances times epochs"),
        group_size=_integer("Slots of each group"),
    ),
    "Item": _object(
        "uid instance_id messages reward raw_reward extra_info group_index epoch slot outcome stop_reason "
        "remove_sample",
        uid=_text("Names the trajectory; a dummy has one of its own"),
        instance_id=_text(),
        messages=_array(_MESSAGE, "OpenAI messages"),
        reward=_number("What the trainer is to use"),
        raw_reward=_nullable(_number("What the episode earned, when that differs")),
        extra_info={"type": "object"},
        generations=_array(_GENERATION, "Token ids and log-probabilities as sampled; empty when not known"),
        images=_array(_text(), "sha256 of each screenshot, in order of first appearance"),
        timings_s={"type": "object", "description": "Seconds by phase of the episode"},
        group_index=_integer("One per group"),
        epoch=_integer(),
        slot=_integer("Place in the group, from 0"),
        outcome=_OUTCOME,
        stop_reason=_STOP_REASON,
        remove_sample={"type": "boolean", "description": "A dummy that stands for a missing member: never train it"},
    ),
    "Acknowledged": _object(
        "acked expired unknown",
        acked=_array(_text(), "Received, now or earlier"),
        expired=_array(_text(), "Too late: their groups went to somebody else"),
        unknown=_array(_text(), "Never heard of"),
    ),
    "MetaInfo": _object(
        "finished_groups delivery_id exhausted outcomes total_samples num_groups",
        **_STATISTICS,
        finished_groups=_array(_text(), "instance_id of each group delivered, filtered or failed since the last one"),
        delivery_id=_nullable(_text("What to acknowledge; null when nothing was delivered")),
        job_id=_text(),
        job_state=_text("Only when nothing was delivered"),
        outcomes=_counts(None, "Trajectories since the last delivery by outcome"),
        exhausted={
            "type": "boolean",
            "description": "Nothing will ever be ready again, and nothing is leased to anybody else",
        },
        acknowledged=_ref("Acknowledged"),
    ),
    "RolloutData": _object(
        "success message data",
        success={"type": "boolean", "description": "False when nothing was ready; ask again"},
        message=_text(),
        data=_object(
            "data meta_info",
            data=_array(_ref("Item"), "Whole groups, one after the other"),
            meta_info=_ref("MetaInfo"),
        ),
    ),
    "WrittenItem": _object(
        "uid instance_id messages reward",
        uid={**_IDENTIFIER, "description": "Names the trajectory; the same uid twice is one item"},
        instance_id={**_IDENTIFIER, "description": "The instance it belongs to"},
        messages=_array(_MESSAGE, "OpenAI messages; screenshots as data URIs of PNG, JPEG or WebP, or by hash"),
        reward=_number("Finite"),
        raw_reward=_nullable(_number("What the episode earned, when that differs")),
        extra_info={"type": "object", "description": "Anything; `finish_reason: length` means truncated"},
        outcome=_text("completed when left out", enum=[o.value for o in Outcome if o is not Outcome.FAILED]),
        stop_reason=_text("stop when left out", enum=[reason.value for reason in StopReason]),
        generations={"type": ["array", "null"], "items": _ref("Generation"), "description": "Token ids as sampled"},
        timings_s={"type": "object", "description": "Seconds by phase of the episode"},
    ),
    "Generation": _GENERATION,
    "WriteBody": {
        "anyOf": [
            {"allOf": [_ref("WrittenItem"), {"type": "object", "properties": {"job_id": _IDENTIFIER}}]},
            _object(
                "items",
                job_id={**_IDENTIFIER, "description": "May be left out while only one job is open"},
                items=_array(_ref("WrittenItem"), "All are kept or none", minItems=1, maxItems=MAX_ITEMS),
            ),
        ]
    },
    "WriteReply": _object(
        "success message job_id results",
        success={"type": "boolean"},
        message=_text(),
        job_id=_text(),
        results=_array(
            _object(
                "uid status",
                uid=_text(),
                status=_text(
                    "stored; duplicate: it was there, nothing changed; late: kept, but its group had closed",
                    enum=["stored", "duplicate", "late"],
                ),
            ),
            "One per item, in order",
        ),
    ),
    "Job": _object(
        "job_id task_type state cause group_size instances epochs groups slots attempts outcomes late causes settings "
        "damaged measures",
        job_id=_text(),
        task_type=_text(),
        state=_text(enum=[state.value for state in JobState]),
        cause=_text("Why it is in that state, when there is a reason"),
        engine_url=_nullable(_text("The engine that its episodes ask")),
        group_size=_integer("Slots of each group"),
        instances=_integer(),
        epochs=_integer(),
        created_at=_number("Seconds since 1970, as all times"),
        updated_at=_number(),
        finished_at=_nullable(_number()),
        last_poll_at=_nullable(_number("When a trainer last asked for its data")),
        groups=_counts((state.value for state in GroupState), "Groups by state"),
        slots=_counts(
            iter(["submitted", *(state.value for state in GroupState)]),
            "Slots by state; `submitted` is always the sum of the others",
        ),
        attempts=_counts(None, "Attempts by state, and `failed:CODE` by error code"),
        outcomes=_counts(None, "Trajectories by outcome"),
        late=_integer("Trajectories that came after their group had closed"),
        damaged=_integer("Trajectories that could not be read when they were to be delivered"),
        measures={
            "type": "object",
            "additionalProperties": {"type": "object", "additionalProperties": {"type": "number"}},
            "description": "Over the whole job: `reward` (mean, min, max), `success` (mean), `staleness` in weight "
            "versions and `poll_wait_seconds` (mean, max); what is unknown is left out",
        },
        causes={"type": "object", "description": "Why groups were filtered or failed: state, cause, count"},
        settings={"type": "object", "description": "What the job keeps of its start payload"},
        devices=_nullable(
            {
                "type": "object",
                "description": "Only for one job: the last report on its devices, `age_s` seconds old: the farm's name "
                "`pool`, who waits, and for each of `devices` its state, last error, counters and times",
            }
        ),
    ),
    "ImageReply": _object(
        "sha256 created",
        sha256=_text(),
        created={"type": "boolean", "description": "False when it was there already"},
    ),
    "Jobs": _object("jobs", jobs=_array(_ref("Job"), "Newest first")),
    "DeliveryEntry": _object(
        "delivery_id state created_at groups samples",
        delivery_id=_text(),
        state=_text("popped: handed out for good", enum=["leased", "acked", "popped", "expired"]),
        consumer_id=_nullable(_text()),
        poll_id=_nullable(_text()),
        created_at=_number(),
        lease_expires_at=_nullable(_number()),
        groups=_integer(),
        samples=_integer(),
    ),
    "DeliveryPage": _object(
        "job_id deliveries next_cursor",
        job_id=_text(),
        deliveries=_array(_ref("DeliveryEntry"), "Newest first"),
        next_cursor=_nullable(_integer("Send it as `cursor` for the next page; null on the last one")),
    ),
    "TrajectoryEntry": _object(
        "job_id uid instance_id outcome stop_reason reward late body_bytes created_at",
        job_id=_text(),
        uid=_text(),
        instance_id=_text(),
        epoch=_nullable(_integer()),
        slot=_nullable(_integer()),
        attempt=_nullable(_integer()),
        outcome=_OUTCOME,
        stop_reason=_STOP_REASON,
        reward=_number("As it was written, before the group functions"),
        raw_reward=_nullable(_number()),
        late={"type": "boolean", "description": "It came after its group had closed"},
        group_state=_nullable(_text("State of its group; null when it has none")),
        group_index=_nullable(_integer("As in a delivered item")),
        delivery_id=_nullable(_text("The delivery its group is in")),
        body_bytes=_integer("Size of the payload without screenshots"),
        created_at=_number(),
        **_EPISODE_FACTS,
    ),
    "TrajectoryPage": _object(
        "trajectories next_cursor",
        trajectories=_array(_ref("TrajectoryEntry"), "Newest first"),
        next_cursor=_nullable(_integer("Send it as `cursor` for the next page; null on the last one")),
    ),
    "StoredTrajectory": {
        "allOf": [
            _ref("TrajectoryEntry"),
            _object(
                "messages extra_info",
                messages=_array(_MESSAGE, "OpenAI messages"),
                extra_info={"type": "object"},
                generations=_array(_GENERATION),
                images=_array(_text(), "sha256 of each screenshot"),
                timings_s={"type": "object"},
            ),
        ]
    },
    "Explanation": _object(
        "code severity says advice",
        code=_text("Stable, for programs"),
        severity=_text("stopped: until somebody acts; wait: it ends by itself", enum=[s.value for s in Severity]),
        says=_text("What is"),
        advice=_text("What to do; empty when there is nothing to do"),
    ),
    "Overview": _object(
        "now supervisor_age_s task_types explanation jobs next_cursor needs_token",
        now=_number(),
        supervisor_age_s=_nullable(_number("Seconds since its heartbeat; null when there is none")),
        task_types=_array(_text()),
        disk_free_bytes=_integer(),
        explanation=_EXPLANATIONS,
        jobs=_array(
            _object("job_id state slots groups explanation", job_id=_text(), explanation=_EXPLANATIONS), "Newest first"
        ),
        next_cursor=_nullable(_integer("Send it as `cursor` for the next page; null on the last one")),
        needs_token={"type": "boolean", "description": "The server asks for a token"},
    ),
    "JobExplanation": _object(
        "job_id now explanation",
        job_id=_text(),
        now=_number(),
        explanation=_EXPLANATIONS,
        weight_version=_nullable(_integer("The newest that any trajectory was sampled with")),
        running_attempts=_integer("Episodes that are being played"),
        trajectory_age_s=_nullable(_number("Seconds since one ended")),
        poll_age_s=_nullable(_number("Seconds since a trainer asked")),
        trainer_waits_s=_nullable(_number("Seconds that a trainer has polled in vain; null when none waits")),
        recent_failures=_counts(None, "Failed attempts of the last ten minutes by error code"),
        last_failure=_text(),
        devices={"type": "object", "description": "What the runner says of its devices; empty when it does not"},
        engine={"type": "object", "description": "What the runner says of its engine; empty when it does not"},
        newest=_NEWEST,
    ),
    "Series": _object(
        "job_id until width_s columns",
        job_id=_text(),
        until=_number("Now, or when the job ended: the last bucket is as long as from its start to there"),
        width_s=_integer("Seconds of a bucket"),
        columns=_object(
            "t",
            t=_array(_number(), "Where each bucket starts"),
            **{name: _array(_integer()) for name in COUNTED},
            **{name: _array({"type": ["number", "null"]}) for name in MEASURED},
        ),
    ),
    "GroupEntry": _object(
        "group_index epoch instance_id state cause says group_size members",
        group_index=_integer("As in a delivered item"),
        epoch=_integer(),
        position=_integer("Line of its instance in the input, from 0"),
        instance_id=_text(),
        state=_text(enum=[state.value for state in GroupState]),
        cause=_text("Why it was filtered, failed or skipped"),
        says=_text("The same as a sentence for people"),
        group_size=_integer(),
        opened_at=_nullable(_number()),
        last_write_at=_nullable(_number()),
        closed_at=_nullable(_number()),
        delivery_id=_nullable(_text()),
        members=_array(
            _object("uid slot reward outcome late", uid=_text(), reward=_number("As it was written"), **_EPISODE_FACTS),
            "Its trajectories in slot order",
        ),
    ),
    "GroupPage": _object(
        "job_id group_size groups next_cursor",
        job_id=_text(),
        group_size=_integer(),
        groups=_array(_ref("GroupEntry"), "The last touched first"),
        next_cursor=_nullable(_text("Send it as `cursor` for the next page; null on the last one")),
    ),
    "Group": {
        "allOf": [
            _ref("GroupEntry"),
            _object(
                "job_id attempts delivered instance",
                job_id=_text(),
                attempts=_array(
                    _object("slot attempt state", slot=_integer(), attempt=_integer(), state=_text()),
                    "Every try to fill a slot, with its error when it failed",
                ),
                delivered=_array(
                    _object("ordinal uid remove_sample", ordinal=_integer(), uid=_text()), "What a trainer is given"
                ),
                instance={"type": "object", "description": "Its line of the input"},
            ),
        ]
    },
    "TokenRows": _object(
        "uid job_id contexts rows row pieces why_no_texts",
        uid=_text(),
        job_id=_text(),
        contexts=_array({"type": "object"}, "For each generation: how its prompt continued the one before"),
        rows=_array({"type": "object"}, "Each training row: tokens, trained, generations"),
        row=_integer("Which one `pieces` are of"),
        pieces=_array({"type": "object"}, "Context in stretches, trained tokens in whole characters with log-probs"),
        why_no_texts=_text("Empty when there are texts"),
    ),
    "SignedIn": _object("signed_in", signed_in={"type": "boolean"}),
    "Health": _object(
        "status supervisor task_types",
        status=_text(enum=["ok", "degraded"]),
        supervisor=_text("`alive` or `not seen`"),
        task_types=_array(_text(), "What can be started"),
    ),
}  # fmt: skip

_JOB_ID = {"job_id": _text("The job's id; slashes in it may stand as they are", minLength=1)}

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        method="post",
        path="/start_rollout",
        summary="Start a job, or attach to it",
        says="The same work is the same job: a repeated call attaches, takes over the new engine URL, and makes what "
        "was handed out but is not in the skip list ready again. Numbers may come as strings. Keys that are not listed "
        "are options of the generator.",
        body=StartPayload,
        reply=_ref("StartReply"),
        reply_says="The job runs.",
        errors=(400, 404, 409, 503, 507),
        example="""-d '{"task_type": "external", "num_repeat_per_sample": 8, "job_id": "run-1"}' URL/start_rollout""",
    ),
    Operation(
        method="post",
        path="/get_rollout_data",
        summary="Fetch finished groups",
        says="`{}` hands out everything that is ready, for good. With `lease_s` the groups come back, identical, "
        "unless they are acknowledged in time. With `wait_s` it waits for the next group.",
        body=PollPayload,
        reply=_ref("RolloutData"),
        reply_says="Whole groups; or `success: false` and no data when nothing is ready.",
        errors=(400, 404, 409, 503, 507),
        example="""-d '{"job_id": "run-1", "wait_s": 30, "lease_s": 600}' URL/get_rollout_data""",
    ),
    Operation(
        method="post",
        path="/ack",
        summary="Acknowledge deliveries",
        says="Says that they were received; saying it again changes nothing. "
        "Give `delivery_id`, `delivery_ids` or both.",
        body=AckPayload,
        reply=_ref("Acknowledged"),
        reply_says="What became of each.",
        errors=(400, 404, 503, 507),
        example="""-d '{"delivery_id": "DELIVERY"}' URL/ack""",
    ),
    Operation(
        method="post",
        path="/buffer/write",
        summary="Write finished items",
        says=f"One item, or up to {MAX_ITEMS} under `items`. Idempotent by `uid`: after a lost "
        "reply, send the same again.",
        body=_ref("WriteBody"),
        reply=_ref("WriteReply"),
        reply_says="All items are durable.",
        errors=(400, 404, 409, 503, 507),
        example="""-d '{"uid": "a/0", "instance_id": "a", "reward": 1.0,
        "messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}' URL/buffer/write""",
    ),
    Operation(
        method="get",
        path="/images/{sha256}",
        summary="A screenshot",
        says="Exactly the bytes that the engine received.",
        reply=_text(format="binary"),
        reply_says="The image.",
        path_parameters={"sha256": _text("64 hexadecimal digits, lower case")},
        content_types=(*IMAGE_TYPES, "application/octet-stream"),
        errors=(404, 503),
        example="-o screen.png URL/images/SHA256",
    ),
    Operation(
        method="put",
        path="/images/{sha256}",
        summary="Keep a screenshot",
        says="For writers that name it in their messages as `sha256:HASH`. Again changes nothing.",
        body=_text(format="binary"),
        body_types=IMAGE_TYPES,
        reply=_ref("ImageReply"),
        reply_says="It was there already.",
        other_replies={201: ("It is durable now.", _ref("ImageReply"))},
        path_parameters={"sha256": _text("sha256 of the body: 64 hexadecimal digits, lower case")},
        errors=(400, 503, 507),
        example="-T screen.png URL/images/SHA256",
    ),
    Operation(
        method="get",
        path="/jobs",
        summary="List the jobs",
        says="Newest first, each with its books.",
        reply=_ref("Jobs"),
        reply_says="Every job.",
        errors=(503,),
        example="URL/jobs",
    ),
    Operation(
        method="get",
        path="/jobs/{job_id}",
        summary="One job",
        says="Its state, progress and books: "
        "submitted = open + ready + leased + delivered + filtered + failed + skipped.",
        reply=_ref("Job"),
        reply_says="The job.",
        path_parameters=_JOB_ID,
        errors=(404, 503),
        example="URL/jobs/run-1",
    ),
    Operation(
        method="post",
        path="/jobs/{job_id}/{verb}",
        summary="Cancel, pause or resume a job",
        says="Doing it twice changes nothing. A cancelled job keeps what is finished.",
        reply=_ref("Job"),
        reply_says="The job afterwards.",
        path_parameters={**_JOB_ID, "verb": _text(enum=["cancel", "pause", "resume"])},
        errors=(404, 409, 503, 507),
        example="-X POST URL/jobs/run-1/pause",
    ),
    Operation(
        method="get",
        path="/jobs/{job_id}/deliveries",
        summary="List a job's deliveries",
        says="Newest first, also those that expired.",
        query=PageQuery,
        reply=_ref("DeliveryPage"),
        reply_says="One page.",
        path_parameters=_JOB_ID,
        errors=(400, 404, 503),
        example="'URL/jobs/run-1/deliveries?limit=10'",
    ),
    Operation(
        method="get",
        path="/deliveries/{delivery_id}",
        summary="A past delivery again",
        says="Byte for byte what its poll was answered (but for `acknowledged`, which answered that poll's own `ack`). "
        "Changes nothing: no lease, no state.",
        query=DeliveryQuery,
        reply=_ref("RolloutData"),
        reply_says="The groups of that delivery.",
        path_parameters={"delivery_id": _text(minLength=1)},
        errors=(400, 404, 503),
        example="'URL/deliveries/DELIVERY?images=hash'",
    ),
    Operation(
        method="get",
        path="/trajectories",
        summary="Search trajectories",
        says="Newest first, without payloads. Every filter that is given must hold.",
        query=TrajectoryPageQuery,
        reply=_ref("TrajectoryPage"),
        reply_says="One page.",
        errors=(400, 404, 503),
        example="'URL/trajectories?job_id=run-1&min_reward=0.5&limit=20'",
    ),
    Operation(
        method="get",
        path="/trajectories/{uid}",
        summary="One trajectory",
        says="As it is stored: messages, generations, rewards, timings.",
        query=TrajectoryQuery,
        reply=_ref("StoredTrajectory"),
        reply_says="The trajectory.",
        path_parameters={"uid": _text(minLength=1)},
        errors=(400, 404, 409, 503),
        example="'URL/trajectories/a/0?job_id=run-1'",
    ),
    Operation(
        method="get",
        path="/jobs/{job_id}/explanation",
        summary="Why nothing moves",
        says="In words, with what to do; or that it moves. What `rollout-buffer status` and the dashboard show.",
        reply=_ref("JobExplanation"),
        reply_says="At least one sentence.",
        path_parameters=_JOB_ID,
        errors=(404, 503),
        example="URL/jobs/run-1/explanation",
    ),
    Operation(
        method="get",
        path="/jobs/{job_id}/series",
        summary="A job over time",
        says="In buckets. Ask again with `since` and `width_s` for the newest buckets alone.",
        query=SeriesQuery,
        reply=_ref("Series"),
        reply_says="Columns of one entry per bucket; null where nothing was measured.",
        path_parameters=_JOB_ID,
        errors=(400, 404, 503),
        example="'URL/jobs/run-1/series?range_s=3600'",
    ),
    Operation(
        method="get",
        path="/jobs/{job_id}/groups",
        summary="Search groups",
        says="The last touched first, with the rewards of their members and why they were dropped.",
        query=GroupPageQuery,
        reply=_ref("GroupPage"),
        reply_says="One page.",
        path_parameters=_JOB_ID,
        errors=(400, 404, 503),
        example="'URL/jobs/run-1/groups?state=filtered'",
    ),
    Operation(
        method="get",
        path="/groups/{group_index}",
        summary="One group",
        says="Its members, every attempt to fill a slot, and what was delivered.",
        reply=_ref("Group"),
        reply_says="The group.",
        path_parameters={"group_index": _integer("As in a delivered item", minimum=0)},
        errors=(404, 503),
        example="URL/groups/1",
    ),
    Operation(
        method="get",
        path="/token_rows/{uid}",
        summary="Tokens of a trajectory",
        says="As the trainer computes its loss on them: how generations became rows, and the tokens of one row with "
        "mask, log-probs and, where the job's tokenizer is on this host, texts.",
        query=TokenRowQuery,
        reply=_ref("TokenRows"),
        reply_says="One row, and what all rows are.",
        path_parameters={"uid": _text(minLength=1)},
        errors=(400, 404, 409, 503),
        example="'URL/token_rows/a/0?job_id=run-1&row=0'",
    ),
    Operation(
        method="get",
        path="/overview",
        summary="How the buffer is",
        says="The supervisor, the disk, and the jobs with their books and why each moves or stands still.",
        query=OverviewQuery,
        reply=_ref("Overview"),
        reply_says="One page of jobs.",
        errors=(400, 503),
        example="URL/overview",
    ),
    Operation(
        method="get",
        path="/",
        summary="The dashboard",
        says="A page for people. It asks for the token itself.",
        reply=_text(),
        reply_says="HTML.",
        content_types=("text/html",),
        needs_token=False,
        example="URL/",
    ),
    Operation(
        method="get",
        path="/dashboard/{file}",
        summary="A file of the dashboard",
        says="Scripts and styles; they hold no data.",
        reply=_text(),
        reply_says="The file.",
        path_parameters={"file": _text(minLength=1)},
        content_types=("text/javascript", "text/css", "text/html", "text/plain", "image/svg+xml"),
        errors=(404,),
        needs_token=False,
        example="URL/dashboard/style.css",
    ),
    Operation(
        method="post",
        path="/sign_in",
        summary="Sign a browser in",
        says="Answers with a cookie that stands for the token for a week (HttpOnly, SameSite=Strict). Programs send "
        "the token itself instead.",
        body=SignInPayload,
        reply=_ref("SignedIn"),
        reply_says="Signed in; also where no token is asked for.",
        errors=(400, 401, 403),
        needs_token=False,
        example="""-d '{"token": "TOKEN"}' URL/sign_in""",
    ),
    Operation(
        method="post",
        path="/sign_out",
        summary="Sign a browser out",
        says="Takes the cookie away.",
        reply=_ref("SignedIn"),
        reply_says="Signed out.",
        errors=(403,),
        needs_token=False,
        example="-X POST URL/sign_out",
    ),
    Operation(
        method="get",
        path="/metrics",
        summary="Numbers for Prometheus",
        says="Every number is read from the store when it is asked for. docs/metrics.md lists the names.",
        reply=_text(),
        reply_says="Prometheus' text format.",
        content_types=("text/plain",),
        errors=(503,),
        example="URL/metrics",
    ),
    Operation(
        method="get",
        path="/health",
        summary="Is it well",
        says="Needs no token. Well means: the store can be read, and a supervisor lives that plays jobs.",
        reply=_ref("Health"),
        reply_says="It is well.",
        other_replies={503: ("It is not well: nobody would play a job.", {"anyOf": [_ref("Health"), _ref("Error")]})},
        needs_token=False,
        example="URL/health",
    ),
    Operation(
        method="get",
        path="/openapi.json",
        summary="This description",
        says="OpenAPI 3.1.",
        reply={"type": "object"},
        reply_says="The document.",
        example="URL/openapi.json",
    ),
)


# --- the document ----------------------------------------------------------------------------------------------------


@functools.cache
def openapi_document() -> dict[str, Any]:
    """Returns the OpenAPI 3.1 document; the same object each time, not to be changed."""
    schemas = {name: dict(schema) for name, schema in COMPONENTS.items()}
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Rollout Buffer",
            "version": "1",
            "description": "A durable rollout buffer for training agents. Errors are JSON: `error.code` for programs, "
            "`error.message` for people.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(operation: Operation, schemas: dict[str, Any]) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": _operation_id(operation),
        "summary": operation.summary,
        "description": operation.says,
        "parameters": [*_path_parameters(operation), *_query_parameters(operation)],
        "responses": _responses(operation),
        # The empty alternative: a server without --token-file asks for none.
        "security": [{"token": []}, {}] if operation.needs_token else [{}],
    }
    if operation.body is not None:
        schema = _body_schema(operation.body, schemas)
        described["requestBody"] = {"content": {kind: {"schema": schema} for kind in operation.body_types}}
    return described


def _operation_id(operation: Operation) -> str:
    words = operation.path.replace("{", "").replace("}", "").replace(".", "/").strip("/").split("/")
    return "_".join([operation.method, *words])


def _path_parameters(operation: Operation) -> Iterator[dict[str, Any]]:
    for name, schema in operation.path_parameters.items():
        yield {"name": name, "in": "path", "required": True, "schema": schema}


def _query_parameters(operation: Operation) -> Iterator[dict[str, Any]]:
    if operation.query is None:
        return
    document = operation.query.model_json_schema()
    for name, schema in document["properties"].items():
        resolved = _without_null(_bounds_by_name(_resolved(schema, document.get("$defs", {}))))
        says = resolved.pop("description", "")
        yield {"name": name, "in": "query", "required": False, "description": says, "schema": resolved}


def _resolved(schema: Any, definitions: Mapping[str, Any]) -> Any:
    """Puts definitions in place of references: a parameter's schema is easier to read whole."""
    if isinstance(schema, dict) and "$ref" in schema:
        found = _resolved(definitions[schema["$ref"].rsplit("/", 1)[1]], definitions)
        return {**{key: value for key, value in found.items() if key not in ("title", "description")}, **_rest(schema)}
    if isinstance(schema, dict):
        return {key: _resolved(value, definitions) for key, value in schema.items() if key != "title"}
    if isinstance(schema, list):
        return [_resolved(value, definitions) for value in schema]
    return schema


def _rest(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key != "$ref"}


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """A query parameter is left out, never null."""
    kept = [option for option in schema.get("anyOf", []) if option != {"type": "null"}]
    rest = {key: value for key, value in schema.items() if key != "anyOf" and not (key == "default" and value is None)}
    if len(kept) == 1:
        return {**kept[0], **rest}
    return {**rest, "anyOf": kept} if kept else rest


def _body_schema(body: type[BaseModel] | Schema, schemas: dict[str, Any]) -> Schema:
    if isinstance(body, dict):
        return body
    document = body.model_json_schema(ref_template="#/components/schemas/{model}")
    for name, schema in {**document.pop("$defs", {}), body.__name__: document}.items():
        schemas[name] = _numbers_also_as_strings(_bounds_by_name(schema))
    return _ref(body.__name__)


_BOUNDS = {"ge": "minimum", "le": "maximum", "gt": "exclusiveMinimum", "lt": "exclusiveMaximum"}


def _bounds_by_name(schema: Any) -> Any:
    """Spells bounds as JSON Schema does: behind a validator of ours, pydantic leaves them as it spells them itself."""
    if isinstance(schema, list):
        return [_bounds_by_name(entry) for entry in schema]
    if isinstance(schema, dict):
        return {_BOUNDS.get(key, key): _bounds_by_name(value) for key, value in schema.items()}
    return schema


def _numbers_also_as_strings(schema: Any) -> Any:
    """slime's trainer sends numbers as strings: what takes a number takes it so, within the same bounds."""
    if isinstance(schema, list):
        return [_numbers_also_as_strings(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("type") in ("integer", "number"):
        about = {key: schema[key] for key in ("default", "description", "title") if key in schema}
        number = {key: value for key, value in schema.items() if key not in about}
        return {**about, "anyOf": [number, {"type": "string", "description": "The same number as a string"}]}
    return {key: _numbers_also_as_strings(value) for key, value in schema.items()}


def _responses(operation: Operation) -> dict[str, Any]:
    content = {content_type: {"schema": operation.reply} for content_type in operation.content_types}
    responses: dict[str, Any] = {"200": {"description": operation.reply_says, "content": content}}
    for status, (says, schema) in operation.other_replies.items():
        responses[str(status)] = {"description": says, "content": {JSON: {"schema": schema}}}
    for status in sorted(_error_statuses(operation)):
        responses[str(status)] = {"description": ERRORS[status], "content": {JSON: {"schema": _ref("Error")}}}
    return responses


def _error_statuses(operation: Operation) -> set[int]:
    statuses = set(operation.errors)
    if operation.needs_token:
        statuses.add(401)
    if operation.method != "get":
        statuses.add(403)
    if operation.body is not None:
        statuses |= {413, 415}
    return statuses
