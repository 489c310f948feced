"""What the replies of the HTTP API look like, as JSON schemas, described by hand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from slime_plugins.rollout_buffer.protocol.request_models import MAX_ITEMS
from slime_plugins.rollout_buffer.reporting.diagnosis import Severity
from slime_plugins.rollout_buffer.reporting.time_series import COUNTED, MEASURED
from slime_plugins.rollout_buffer.rules.causes import CauseCode
from slime_plugins.rollout_buffer.types import GroupState, JobState, Outcome, StopReason
from slime_plugins.rollout_buffer.wire import WRITTEN_OUTCOMES

__all__ = ["COMPONENTS", "Schema", "integer", "ref", "text"]

Schema = dict[str, Any]


def _object(required: str, /, **properties: Schema) -> Schema:
    return {"type": "object", "required": required.split(), "properties": properties}


def text(description: str = "", **more: Any) -> Schema:
    return {"type": "string", **({"description": description} if description else {}), **more}


def _number(description: str = "", **more: Any) -> Schema:
    return {"type": "number", **({"description": description} if description else {}), **more}


def integer(description: str = "", **more: Any) -> Schema:
    return {"type": "integer", **({"description": description} if description else {}), **more}


def _nullable(schema: Schema) -> Schema:
    return {**schema, "type": [schema["type"], "null"]}


def _array(items: Schema, description: str = "", **more: Any) -> Schema:
    return {"type": "array", "items": items, **({"description": description} if description else {}), **more}


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _counts(keys: Iterator[str] | None, description: str) -> Schema:
    names = list(keys) if keys is not None else []
    return {
        "type": "object",
        "description": description,
        "required": names,
        "properties": {name: integer() for name in names},
        "additionalProperties": {"type": "integer"},
    }


_IDENTIFIER: Schema = {
    "anyOf": [{"type": "string", "minLength": 1, "maxLength": 256}, {"type": "integer"}],
    "description": "1 to 256 printable characters, or an integer",
}
_OUTCOME = text("How the attempt ended", enum=[member.value for member in Outcome])
_STOP_REASON = text("Why the episode stopped", enum=[member.value for member in StopReason])
_MESSAGE = _object("role", role=text())
_GENERATION: Schema = {
    **_object(
        "output_ids prompt_ids",
        keep=integer("The first so many ids of the generation before (prompt and output) come first", minimum=0),
        prompt_ids=_array(integer(minimum=0), "Prompt token ids after the kept ones"),
        output_ids=_array(integer(minimum=0), "Sampled token ids"),
        output_log_probs={"type": ["array", "null"], "items": {"type": "number"}, "description": "One per output id"},
        finish_reason=text("stop, length or abort"),
        weight_version={"description": "The engine's weights that sampled it"},
        trained={"type": "boolean", "description": "False keeps its tokens out of the loss"},
        weight_version_spans=_array(
            _object("start end", weight_version={}, start=integer(), end=integer()),
            "Weights by stretch of output",
        ),
        keep_images=integer("The first so many images of the generation before come first", minimum=0),
        images=_array(text(), "sha256 of the image behind each placeholder of the prompt, after the kept ones"),
        prompt_tokens=_nullable(integer("The engine's count of the prompt with its images expanded")),
    ),
    "description": "What the engine sampled in one turn",
}
_STATISTICS = {
    "total_samples": integer("Trajectories written since the last delivery, before any filter"),
    "num_groups": integer("Groups they belong to"),
    "avg_group_size": _number(),
    "avg_reward": _number("Mean of their rewards; 0 when there are none"),
    "reward_std": _number("Standard deviation (n - 1) of their rewards"),
    "reward_min": _number(),
    "reward_max": _number(),
}

_EPISODE_FACTS = {
    "success": _nullable(_number("In [0, 1]: what the environment said, before any shaping; null when unknown")),
    "turns": _nullable(integer()),
    "sampled_tokens": _nullable(integer()),
    "generate_s": _nullable(_number("Seconds it waited for the engine")),
    "played_s": _nullable(_number("Seconds of all its phases")),
    "oldest_version": _nullable(integer("Of the weights that sampled it")),
    "versions_behind": _nullable(integer("How far that was behind the job's newest when it was written")),
}
_CAUSE_CODES = [code.value for code in CauseCode]
_EXPLANATIONS = _array(ref("Explanation"), "Why it moves or stands still, the most pressing first")
_NEWEST = {"type": "object", "description": "The newest 200 trajectories: episodes, mean reward, success"}

COMPONENTS: Mapping[str, Schema] = {
    "Error": _object(
        "error",
        error=_object(
            "code message detail",
            code=text("Stable, for programs"),
            message=text("A sentence that says what to do"),
            detail={"type": "object", "description": "More of it, for programs"},
        ),
    ),
    "StartReply": _object(
        "message job_id state attached groups group_size",
        message=text("`Rollout started` or `Rollout attached`"),
        job_id=text("Use it in every later call"),
        state=text(enum=[state.value for state in JobState]),
        attached={"type": "boolean", "description": "The job was there already"},
        groups=integer("Instances times epochs"),
        group_size=integer("Slots of each group"),
    ),
    "Item": _object(
        "uid instance_id messages reward raw_reward extra_info group_index epoch slot outcome stop_reason "
        "remove_sample",
        uid=text("Names the trajectory; a dummy has one of its own"),
        instance_id=text(),
        messages=_array(_MESSAGE, "OpenAI messages"),
        reward=_number("What the trainer is to use"),
        raw_reward=_nullable(_number("What the episode earned, when that differs")),
        extra_info={"type": "object"},
        generations=_array(_GENERATION, "Token ids and log-probabilities as sampled; empty when not known"),
        images=_array(text(), "sha256 of each screenshot, in order of first appearance"),
        timings_s={"type": "object", "description": "Seconds by phase of the episode"},
        group_index=integer("One per group"),
        epoch=integer(),
        slot=integer("Place in the group, from 0"),
        outcome=_OUTCOME,
        stop_reason=_STOP_REASON,
        remove_sample={"type": "boolean", "description": "A dummy that stands for a missing member: never train it"},
    ),
    "Acknowledged": _object(
        "acked expired unknown",
        acked=_array(text(), "Received, now or earlier"),
        expired=_array(text(), "Too late: their groups went out in another delivery; do not train them"),
        unknown=_array(text(), "Never heard of"),
    ),
    "MetaInfo": _object(
        "finished_groups delivery_id exhausted outcomes total_samples num_groups",
        **_STATISTICS,
        finished_groups=_array(text(), "instance_id of each group delivered, filtered or failed since the last one"),
        delivery_id=_nullable(text("What to acknowledge; null when nothing was delivered")),
        job_id=text(),
        job_state=text("Only when nothing was delivered"),
        job_cause=text("Why the job is in that state, when there is a reason; only when nothing was delivered"),
        outcomes=_counts(None, "Trajectories since the last delivery by outcome"),
        exhausted={
            "type": "boolean",
            "description": "Nothing will ever be ready again, and nothing is leased to anybody else",
        },
        acknowledged=ref("Acknowledged"),
        weight_version=_nullable(integer("The newest that is known in this run of the trainer")),
        stale_groups=_array(integer(), "`group_index` of groups that are too old, where `stale_groups` is `flag`"),
        note=text("What was done otherwise than asked: a `batch_size` below one group"),
        short_groups=_array(
            _object(
                "group_index instance_id members group_size delivered",
                group_index=integer(),
                instance_id=text(),
                members=integer("Played members"),
                group_size=integer(),
                delivered={"type": "boolean", "description": "False: too few are left, and the group has failed"},
            ),
            "Groups with fewer members than they should have, for a client that takes no dummies",
        ),
    ),
    "RolloutData": _object(
        "success message data",
        success={"type": "boolean", "description": "False when nothing was ready; ask again"},
        message=text(),
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
        outcome=text("completed when left out", enum=[outcome.value for outcome in WRITTEN_OUTCOMES]),
        tools={"type": ["array", "null"], "description": "Shown to the chat template; kept as `extra_info.tools`"},
        stop_reason=text("stop when left out", enum=[reason.value for reason in StopReason]),
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
                items=_array(ref("WrittenItem"), "All are checked before one is kept", minItems=1, maxItems=MAX_ITEMS),
            ),
        ]
    },
    "WriteReply": _object(
        "success message job_id results",
        success={"type": "boolean"},
        message=text(),
        job_id=text(),
        results=_array(
            _object(
                "uid status",
                uid=text(),
                status=text(
                    "stored; duplicate: it was there, nothing changed; late: kept, but its group had closed",
                    enum=["stored", "duplicate", "late"],
                ),
            ),
            "One per item, in order",
        ),
    ),
    "Job": _object(
        "job_id task_type state cause cause_code group_size instances epochs groups slots attempts outcomes late "
        "causes settings damaged refused_items trainer_run measures",
        job_id=text(),
        task_type=text(),
        state=text(enum=[state.value for state in JobState]),
        cause=text("Why it is in that state, when there is a reason"),
        cause_code=text("The same for programs: one of a few stable codes, or empty", enum=_CAUSE_CODES),
        engine_url=_nullable(text("The engine that its episodes ask")),
        group_size=integer("Slots of each group"),
        instances=integer(),
        epochs=integer(),
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
        late=integer("Trajectories that came after their group had closed"),
        damaged=integer("Trajectories that could not be read when they were to be delivered"),
        refused_items=integer("Written items whose reward lay outside of the payload's `reward_range`"),
        trainer_run=integer("Weight versions are ordered within one; every start of the trainer opens the next"),
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
        sha256=text(),
        created={"type": "boolean", "description": "False when it was there already"},
    ),
    "Jobs": _object("jobs", jobs=_array(ref("Job"), "Newest first")),
    "DeliveryEntry": _object(
        "delivery_id state created_at groups samples",
        delivery_id=text(),
        state=text("popped: handed out for good", enum=["leased", "acked", "popped", "expired"]),
        consumer_id=_nullable(text()),
        poll_id=_nullable(text()),
        created_at=_number(),
        lease_expires_at=_nullable(_number()),
        groups=integer(),
        samples=integer(),
    ),
    "DeliveryPage": _object(
        "job_id deliveries next_cursor",
        job_id=text(),
        deliveries=_array(ref("DeliveryEntry"), "Newest first"),
        next_cursor=_nullable(integer("Send it as `cursor` for the next page; null on the last one")),
    ),
    "TrajectoryEntry": _object(
        "job_id uid instance_id outcome stop_reason reward late body_bytes created_at",
        job_id=text(),
        uid=text(),
        instance_id=text(),
        epoch=_nullable(integer()),
        slot=_nullable(integer()),
        attempt=_nullable(integer()),
        outcome=_OUTCOME,
        stop_reason=_STOP_REASON,
        reward=_number("As it was written, before the group functions"),
        raw_reward=_nullable(_number()),
        late={"type": "boolean", "description": "It came after its group had closed"},
        group_state=_nullable(text("State of its group; null when it has none")),
        group_index=_nullable(integer("As in a delivered item")),
        delivery_id=_nullable(text("The delivery its group is in")),
        body_bytes=integer("Size of the payload without screenshots"),
        created_at=_number(),
        **_EPISODE_FACTS,
    ),
    "TrajectoryPage": _object(
        "trajectories next_cursor",
        trajectories=_array(ref("TrajectoryEntry"), "Newest first"),
        next_cursor=_nullable(integer("Send it as `cursor` for the next page; null on the last one")),
    ),
    "StoredTrajectory": {
        "allOf": [
            ref("TrajectoryEntry"),
            _object(
                "messages extra_info",
                messages=_array(_MESSAGE, "OpenAI messages"),
                extra_info={"type": "object"},
                generations=_array(_GENERATION),
                images=_array(text(), "sha256 of each screenshot"),
                timings_s={"type": "object"},
            ),
        ]
    },
    "Explanation": _object(
        "code severity message advice",
        code=text("Stable, for programs"),
        severity=text("stopped: until somebody acts; wait: it ends by itself", enum=[s.value for s in Severity]),
        message=text("What is"),
        says=text("As `message`: its name before; read `message`, this one goes with the next release"),
        advice=text("What to do; empty when there is nothing to do"),
    ),
    "Overview": _object(
        "now supervisor_age_s task_types explanation jobs next_cursor needs_token",
        now=_number(),
        supervisor_age_s=_nullable(_number("Seconds since its heartbeat; null when there is none")),
        task_types=_array(text()),
        disk_free_bytes=integer(),
        explanation=_EXPLANATIONS,
        jobs=_array(
            _object("job_id state slots groups explanation", job_id=text(), explanation=_EXPLANATIONS), "Newest first"
        ),
        next_cursor=_nullable(integer("Send it as `cursor` for the next page; null on the last one")),
        needs_token={"type": "boolean", "description": "The server asks for a token"},
    ),
    "JobExplanation": _object(
        "job_id now explanation",
        job_id=text(),
        now=_number(),
        explanation=_EXPLANATIONS,
        weight_version=_nullable(integer("The newest that any trajectory was sampled with")),
        running_attempts=integer("Episodes that are being played"),
        trajectory_age_s=_nullable(_number("Seconds since one ended")),
        poll_age_s=_nullable(_number("Seconds since a trainer asked")),
        trainer_waits_s=_nullable(_number("Seconds that a trainer has polled in vain; null when none waits")),
        recent_failures=_counts(None, "Failed attempts of the last ten minutes by error code"),
        last_failure=text(),
        devices={"type": "object", "description": "What the runner says of its devices; empty when it does not"},
        engine={"type": "object", "description": "What the runner says of its engine; empty when it does not"},
        newest=_NEWEST,
    ),
    "Series": _object(
        "job_id until width_s columns",
        job_id=text(),
        until=_number("Now, or when the job ended: the last bucket is as long as from its start to there"),
        width_s=integer("Seconds of a bucket"),
        columns=_object(
            "t",
            t=_array(_number(), "Where each bucket starts"),
            **{name: _array(integer()) for name in COUNTED},
            **{name: _array({"type": ["number", "null"]}) for name in MEASURED},
        ),
    ),
    "GroupEntry": _object(
        "group_index epoch instance_id state cause cause_code message group_size members",
        group_index=integer("As in a delivered item"),
        epoch=integer(),
        position=integer("Line of its instance in the input, from 0"),
        instance_id=text(),
        state=text(enum=[state.value for state in GroupState]),
        cause=text("Why it was filtered, failed or skipped"),
        cause_code=text("The same for programs: one of a few stable codes, or empty", enum=_CAUSE_CODES),
        message=text("The same as a sentence for people"),
        says=text("As `message`: its name before; read `message`, this one goes with the next release"),
        group_size=integer(),
        opened_at=_nullable(_number()),
        last_write_at=_nullable(_number()),
        closed_at=_nullable(_number()),
        delivery_id=_nullable(text()),
        members=_array(
            _object("uid slot reward outcome late", uid=text(), reward=_number("As it was written"), **_EPISODE_FACTS),
            "Its trajectories in slot order",
        ),
    ),
    "GroupPage": _object(
        "job_id group_size groups next_cursor",
        job_id=text(),
        group_size=integer(),
        groups=_array(ref("GroupEntry"), "The last touched first"),
        next_cursor=_nullable(text("Send it as `cursor` for the next page; null on the last one")),
    ),
    "Group": {
        "allOf": [
            ref("GroupEntry"),
            _object(
                "job_id attempts delivered instance",
                job_id=text(),
                attempts=_array(
                    _object("slot attempt state", slot=integer(), attempt=integer(), state=text()),
                    "Every try to fill a slot, with its error when it failed",
                ),
                delivered=_array(
                    _object("ordinal uid remove_sample", ordinal=integer(), uid=text()), "What a trainer is given"
                ),
                instance={"type": "object", "description": "Its line of the input"},
            ),
        ]
    },
    "TokenRows": _object(
        "uid job_id contexts rows row pieces why_no_texts",
        uid=text(),
        job_id=text(),
        contexts=_array({"type": "object"}, "For each generation: how its prompt continued the one before"),
        rows=_array({"type": "object"}, "Each training row: tokens, trained, generations"),
        row=integer("Which one `pieces` are of"),
        pieces=_array({"type": "object"}, "Context in stretches, trained tokens in whole characters with log-probs"),
        why_no_texts=text("Empty when there are texts"),
    ),
    "SignedIn": _object("signed_in", signed_in={"type": "boolean"}),
    "Health": _object(
        "status reason supervisor task_types",
        status=text(enum=["ok", "degraded"]),
        reason=_nullable(text("What is not well, and since when; null when all is")),
        supervisor=text("`alive` or `not seen`"),
        task_types=_array(text(), "What can be started"),
    ),
}  # fmt: skip
