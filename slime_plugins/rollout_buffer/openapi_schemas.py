"""What the replies of the HTTP API look like, as JSON schemas, described by hand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from slime_plugins.rollout_buffer.explain import Severity
from slime_plugins.rollout_buffer.payloads import MAX_ITEMS
from slime_plugins.rollout_buffer.series import COUNTED, MEASURED
from slime_plugins.rollout_buffer.types import GroupState, JobState, Outcome, StopReason

__all__ = ["COMPONENTS", "Schema", "integer_schema", "ref", "text_schema"]

Schema = dict[str, Any]


def _object(required: str, /, **properties: Schema) -> Schema:
    return {"type": "object", "required": required.split(), "properties": properties}


def text_schema(says: str = "", **more: Any) -> Schema:
    return {"type": "string", **({"description": says} if says else {}), **more}


def _number(says: str = "", **more: Any) -> Schema:
    return {"type": "number", **({"description": says} if says else {}), **more}


def integer_schema(says: str = "", **more: Any) -> Schema:
    return {"type": "integer", **({"description": says} if says else {}), **more}


def _nullable(schema: Schema) -> Schema:
    return {**schema, "type": [schema["type"], "null"]}


def _array(items: Schema, says: str = "", **more: Any) -> Schema:
    return {"type": "array", "items": items, **({"description": says} if says else {}), **more}


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _counts(keys: Iterator[str] | None, says: str) -> Schema:
    names = list(keys) if keys is not None else []
    return {
        "type": "object",
        "description": says,
        "required": names,
        "properties": {name: integer_schema() for name in names},
        "additionalProperties": {"type": "integer"},
    }


_IDENTIFIER: Schema = {
    "anyOf": [{"type": "string", "minLength": 1, "maxLength": 256}, {"type": "integer"}],
    "description": "1 to 256 printable characters, or an integer",
}
_OUTCOME = text_schema("How the attempt ended", enum=[member.value for member in Outcome])
_STOP_REASON = text_schema("Why the episode stopped", enum=[member.value for member in StopReason])
_MESSAGE = _object("role", role=text_schema())
_GENERATION: Schema = {
    **_object(
        "output_ids prompt_ids",
        keep=integer_schema("The first so many ids of the generation before (prompt and output) come first", minimum=0),
        prompt_ids=_array(integer_schema(minimum=0), "Prompt token ids after the kept ones"),
        output_ids=_array(integer_schema(minimum=0), "Sampled token ids"),
        output_log_probs={"type": ["array", "null"], "items": {"type": "number"}, "description": "One per output id"},
        finish_reason=text_schema("stop, length or abort"),
        weight_version={"description": "The engine's weights that sampled it"},
        trained={"type": "boolean", "description": "False keeps its tokens out of the loss"},
        weight_version_spans=_array(
            _object("start end", weight_version={}, start=integer_schema(), end=integer_schema()),
            "Weights by stretch of output",
        ),
        keep_images=integer_schema("The first so many images of the generation before come first", minimum=0),
        images=_array(text_schema(), "sha256 of the image behind each placeholder of the prompt, after the kept ones"),
        prompt_tokens=_nullable(integer_schema("The engine's count of the prompt with its images expanded")),
    ),
    "description": "What the engine sampled in one turn",
}
_STATISTICS = {
    "total_samples": integer_schema("Trajectories written since the last delivery, before any filter"),
    "num_groups": integer_schema("Groups they belong to"),
    "avg_group_size": _number(),
    "avg_reward": _number("Mean of their rewards; 0 when there are none"),
    "reward_std": _number("Standard deviation (n - 1) of their rewards"),
    "reward_min": _number(),
    "reward_max": _number(),
}

_EPISODE_FACTS = {
    "success": _nullable(_number("In [0, 1]: what the environment said, before any shaping; null when unknown")),
    "turns": _nullable(integer_schema()),
    "sampled_tokens": _nullable(integer_schema()),
    "generate_s": _nullable(_number("Seconds it waited for the engine")),
    "played_s": _nullable(_number("Seconds of all its phases")),
    "oldest_version": _nullable(integer_schema("Of the weights that sampled it")),
    "versions_behind": _nullable(integer_schema("How far that was behind the job's newest when it was written")),
}
_EXPLANATIONS = _array(ref("Explanation"), "Why it moves or stands still, the most pressing first")
_NEWEST = {"type": "object", "description": "The newest 200 trajectories: episodes, mean reward, success"}

COMPONENTS: Mapping[str, Schema] = {
    "Error": _object(
        "error",
        error=_object(
            "code message detail",
            code=text_schema("Stable, for programs"),
            message=text_schema("A sentence that says what to do"),
            detail={"type": "object", "description": "More of it, for programs"},
        ),
    ),
    "StartReply": _object(
        "message job_id state attached groups group_size",
        message=text_schema("`Rollout started` or `Rollout attached`"),
        job_id=text_schema("Use it in every later call"),
        state=text_schema(enum=[state.value for state in JobState]),
        attached={"type": "boolean", "description": "The job was there already"},
        groups=integer_schema("Instances times epochs"),
        group_size=integer_schema("Slots of each group"),
    ),
    "Item": _object(
        "uid instance_id messages reward raw_reward extra_info group_index epoch slot outcome stop_reason "
        "remove_sample",
        uid=text_schema("Names the trajectory; a dummy has one of its own"),
        instance_id=text_schema(),
        messages=_array(_MESSAGE, "OpenAI messages"),
        reward=_number("What the trainer is to use"),
        raw_reward=_nullable(_number("What the episode earned, when that differs")),
        extra_info={"type": "object"},
        generations=_array(_GENERATION, "Token ids and log-probabilities as sampled; empty when not known"),
        images=_array(text_schema(), "sha256 of each screenshot, in order of first appearance"),
        timings_s={"type": "object", "description": "Seconds by phase of the episode"},
        group_index=integer_schema("One per group"),
        epoch=integer_schema(),
        slot=integer_schema("Place in the group, from 0"),
        outcome=_OUTCOME,
        stop_reason=_STOP_REASON,
        remove_sample={"type": "boolean", "description": "A dummy that stands for a missing member: never train it"},
    ),
    "Acknowledged": _object(
        "acked expired unknown",
        acked=_array(text_schema(), "Received, now or earlier"),
        expired=_array(text_schema(), "Too late: their groups went to somebody else"),
        unknown=_array(text_schema(), "Never heard of"),
    ),
    "MetaInfo": _object(
        "finished_groups delivery_id exhausted outcomes total_samples num_groups",
        **_STATISTICS,
        finished_groups=_array(text_schema(), "instance_id of each group delivered, filtered or failed since the last one"),
        delivery_id=_nullable(text_schema("What to acknowledge; null when nothing was delivered")),
        job_id=text_schema(),
        job_state=text_schema("Only when nothing was delivered"),
        outcomes=_counts(None, "Trajectories since the last delivery by outcome"),
        exhausted={
            "type": "boolean",
            "description": "Nothing will ever be ready again, and nothing is leased to anybody else",
        },
        acknowledged=ref("Acknowledged"),
    ),
    "RolloutData": _object(
        "success message data",
        success={"type": "boolean", "description": "False when nothing was ready; ask again"},
        message=text_schema(),
        data=_object(
            "data meta_info",
            data=_array(ref("Item"), "Whole groups, one after the other"),
            meta_info=ref("MetaInfo"),
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
        outcome=text_schema("completed when left out", enum=[o.value for o in Outcome if o is not Outcome.FAILED]),
        stop_reason=text_schema("stop when left out", enum=[reason.value for reason in StopReason]),
        generations={"type": ["array", "null"], "items": ref("Generation"), "description": "Token ids as sampled"},
        timings_s={"type": "object", "description": "Seconds by phase of the episode"},
    ),
    "Generation": _GENERATION,
    "WriteBody": {
        "anyOf": [
            {"allOf": [ref("WrittenItem"), {"type": "object", "properties": {"job_id": _IDENTIFIER}}]},
            _object(
                "items",
                job_id={**_IDENTIFIER, "description": "May be left out while only one job is open"},
                items=_array(ref("WrittenItem"), "All are kept or none", minItems=1, maxItems=MAX_ITEMS),
            ),
        ]
    },
    "WriteReply": _object(
        "success message job_id results",
        success={"type": "boolean"},
        message=text_schema(),
        job_id=text_schema(),
        results=_array(
            _object(
                "uid status",
                uid=text_schema(),
                status=text_schema(
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
        job_id=text_schema(),
        task_type=text_schema(),
        state=text_schema(enum=[state.value for state in JobState]),
        cause=text_schema("Why it is in that state, when there is a reason"),
        engine_url=_nullable(text_schema("The engine that its episodes ask")),
        group_size=integer_schema("Slots of each group"),
        instances=integer_schema(),
        epochs=integer_schema(),
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
        late=integer_schema("Trajectories that came after their group had closed"),
        damaged=integer_schema("Trajectories that could not be read when they were to be delivered"),
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
        sha256=text_schema(),
        created={"type": "boolean", "description": "False when it was there already"},
    ),
    "Jobs": _object("jobs", jobs=_array(ref("Job"), "Newest first")),
    "DeliveryEntry": _object(
        "delivery_id state created_at groups samples",
        delivery_id=text_schema(),
        state=text_schema("popped: handed out for good", enum=["leased", "acked", "popped", "expired"]),
        consumer_id=_nullable(text_schema()),
        poll_id=_nullable(text_schema()),
        created_at=_number(),
        lease_expires_at=_nullable(_number()),
        groups=integer_schema(),
        samples=integer_schema(),
    ),
    "DeliveryPage": _object(
        "job_id deliveries next_cursor",
        job_id=text_schema(),
        deliveries=_array(ref("DeliveryEntry"), "Newest first"),
        next_cursor=_nullable(integer_schema("Send it as `cursor` for the next page; null on the last one")),
    ),
    "TrajectoryEntry": _object(
        "job_id uid instance_id outcome stop_reason reward late body_bytes created_at",
        job_id=text_schema(),
        uid=text_schema(),
        instance_id=text_schema(),
        epoch=_nullable(integer_schema()),
        slot=_nullable(integer_schema()),
        attempt=_nullable(integer_schema()),
        outcome=_OUTCOME,
        stop_reason=_STOP_REASON,
        reward=_number("As it was written, before the group functions"),
        raw_reward=_nullable(_number()),
        late={"type": "boolean", "description": "It came after its group had closed"},
        group_state=_nullable(text_schema("State of its group; null when it has none")),
        group_index=_nullable(integer_schema("As in a delivered item")),
        delivery_id=_nullable(text_schema("The delivery its group is in")),
        body_bytes=integer_schema("Size of the payload without screenshots"),
        created_at=_number(),
        **_EPISODE_FACTS,
    ),
    "TrajectoryPage": _object(
        "trajectories next_cursor",
        trajectories=_array(ref("TrajectoryEntry"), "Newest first"),
        next_cursor=_nullable(integer_schema("Send it as `cursor` for the next page; null on the last one")),
    ),
    "StoredTrajectory": {
        "allOf": [
            ref("TrajectoryEntry"),
            _object(
                "messages extra_info",
                messages=_array(_MESSAGE, "OpenAI messages"),
                extra_info={"type": "object"},
                generations=_array(_GENERATION),
                images=_array(text_schema(), "sha256 of each screenshot"),
                timings_s={"type": "object"},
            ),
        ]
    },
    "Explanation": _object(
        "code severity says advice",
        code=text_schema("Stable, for programs"),
        severity=text_schema("stopped: until somebody acts; wait: it ends by itself", enum=[s.value for s in Severity]),
        says=text_schema("What is"),
        advice=text_schema("What to do; empty when there is nothing to do"),
    ),
    "Overview": _object(
        "now supervisor_age_s task_types explanation jobs next_cursor needs_token",
        now=_number(),
        supervisor_age_s=_nullable(_number("Seconds since its heartbeat; null when there is none")),
        task_types=_array(text_schema()),
        disk_free_bytes=integer_schema(),
        explanation=_EXPLANATIONS,
        jobs=_array(
            _object("job_id state slots groups explanation", job_id=text_schema(), explanation=_EXPLANATIONS), "Newest first"
        ),
        next_cursor=_nullable(integer_schema("Send it as `cursor` for the next page; null on the last one")),
        needs_token={"type": "boolean", "description": "The server asks for a token"},
    ),
    "JobExplanation": _object(
        "job_id now explanation",
        job_id=text_schema(),
        now=_number(),
        explanation=_EXPLANATIONS,
        weight_version=_nullable(integer_schema("The newest that any trajectory was sampled with")),
        running_attempts=integer_schema("Episodes that are being played"),
        trajectory_age_s=_nullable(_number("Seconds since one ended")),
        poll_age_s=_nullable(_number("Seconds since a trainer asked")),
        trainer_waits_s=_nullable(_number("Seconds that a trainer has polled in vain; null when none waits")),
        recent_failures=_counts(None, "Failed attempts of the last ten minutes by error code"),
        last_failure=text_schema(),
        devices={"type": "object", "description": "What the runner says of its devices; empty when it does not"},
        engine={"type": "object", "description": "What the runner says of its engine; empty when it does not"},
        newest=_NEWEST,
    ),
    "Series": _object(
        "job_id until width_s columns",
        job_id=text_schema(),
        until=_number("Now, or when the job ended: the last bucket is as long as from its start to there"),
        width_s=integer_schema("Seconds of a bucket"),
        columns=_object(
            "t",
            t=_array(_number(), "Where each bucket starts"),
            **{name: _array(integer_schema()) for name in COUNTED},
            **{name: _array({"type": ["number", "null"]}) for name in MEASURED},
        ),
    ),
    "GroupEntry": _object(
        "group_index epoch instance_id state cause says group_size members",
        group_index=integer_schema("As in a delivered item"),
        epoch=integer_schema(),
        position=integer_schema("Line of its instance in the input, from 0"),
        instance_id=text_schema(),
        state=text_schema(enum=[state.value for state in GroupState]),
        cause=text_schema("Why it was filtered, failed or skipped"),
        says=text_schema("The same as a sentence for people"),
        group_size=integer_schema(),
        opened_at=_nullable(_number()),
        last_write_at=_nullable(_number()),
        closed_at=_nullable(_number()),
        delivery_id=_nullable(text_schema()),
        members=_array(
            _object("uid slot reward outcome late", uid=text_schema(), reward=_number("As it was written"), **_EPISODE_FACTS),
            "Its trajectories in slot order",
        ),
    ),
    "GroupPage": _object(
        "job_id group_size groups next_cursor",
        job_id=text_schema(),
        group_size=integer_schema(),
        groups=_array(ref("GroupEntry"), "The last touched first"),
        next_cursor=_nullable(text_schema("Send it as `cursor` for the next page; null on the last one")),
    ),
    "Group": {
        "allOf": [
            ref("GroupEntry"),
            _object(
                "job_id attempts delivered instance",
                job_id=text_schema(),
                attempts=_array(
                    _object("slot attempt state", slot=integer_schema(), attempt=integer_schema(), state=text_schema()),
                    "Every try to fill a slot, with its error when it failed",
                ),
                delivered=_array(
                    _object("ordinal uid remove_sample", ordinal=integer_schema(), uid=text_schema()), "What a trainer is given"
                ),
                instance={"type": "object", "description": "Its line of the input"},
            ),
        ]
    },
    "TokenRows": _object(
        "uid job_id contexts rows row pieces why_no_texts",
        uid=text_schema(),
        job_id=text_schema(),
        contexts=_array({"type": "object"}, "For each generation: how its prompt continued the one before"),
        rows=_array({"type": "object"}, "Each training row: tokens, trained, generations"),
        row=integer_schema("Which one `pieces` are of"),
        pieces=_array({"type": "object"}, "Context in stretches, trained tokens in whole characters with log-probs"),
        why_no_texts=text_schema("Empty when there are texts"),
    ),
    "SignedIn": _object("signed_in", signed_in={"type": "boolean"}),
    "Health": _object(
        "status supervisor task_types",
        status=text_schema(enum=["ok", "degraded"]),
        supervisor=text_schema("`alive` or `not seen`"),
        task_types=_array(text_schema(), "What can be started"),
    ),
}  # fmt: skip
