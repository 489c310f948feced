"""Every route of the HTTP API with its methods, as callers need to know them.

Request bodies and queries come from the pydantic records that check them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import BaseModel

from slime_plugins.rollout_buffer.openapi.schemas import Schema, integer, ref, text
from slime_plugins.rollout_buffer.protocol.query_params import (
    AttemptPageQuery,
    DeliveryQuery,
    GroupPageQuery,
    NamedTrajectoryQuery,
    OverviewQuery,
    PageQuery,
    SearchQuery,
    SeriesQuery,
    TokenRowQuery,
    TrajectoryFilters,
    TrajectoryPageQuery,
    TrajectoryQuery,
)
from slime_plugins.rollout_buffer.protocol.request_models import (
    MAX_ITEMS,
    AckPayload,
    DrainPayload,
    PollPayload,
    SignInPayload,
    StartPayload,
)
from slime_plugins.rollout_buffer.protocol.trainer_reports import MismatchQuery, TrainerReport
from slime_plugins.rollout_buffer.wire import RECORDS_TYPE

__all__ = ["ERRORS", "JSON", "OPERATIONS", "Operation"]

JSON = "application/json"
IMAGE_TYPES = ("image/png", "image/jpeg", "image/webp")

ERRORS: Mapping[int, str] = {
    400: "A field is missing or wrong; the message names it. Nothing was changed.",
    401: "The bearer token is missing or wrong.",
    403: "A page of another site made a browser send it, or the server does not answer for that host.",
    404: "There is no such thing.",
    409: "The request contradicts what is stored, or names too little to choose by.",
    413: "The body, or the list in it, is larger than the server takes.",
    415: "The body is compressed; send it as it is.",
    422: "The job does not take what was sent; the message says why. Nothing was changed.",
    503: "Cannot be done now; the same request may succeed later (Retry-After says when). Nothing was lost.",
    507: "The disk is full. What was acknowledged is safe.",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """One route with one method, as callers need to know it."""

    method: str
    path: str
    summary: str
    description: str
    reply: Schema
    reply_description: str
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


_JOB_ID = {"job_id": text("The job's id; slashes in it may stand as they are", minLength=1)}

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        method="post",
        path="/start_rollout",
        summary="Start a job, or attach to it",
        description="The same work is the same job: a repeated call attaches, takes over the new engine URL, and makes "
        "what was handed out but is not in the skip list ready again. Numbers may come as strings. Keys that are not "
        "listed are options of the generator.",
        body=StartPayload,
        reply=ref("StartReply"),
        reply_description="The job runs.",
        errors=(400, 404, 409, 503, 507),
        example="""-d '{"task_type": "external", "num_repeat_per_sample": 8, "job_id": "run-1"}' URL/start_rollout""",
    ),
    Operation(
        method="post",
        path="/get_rollout_data",
        summary="Fetch finished groups",
        description="`{}` hands out everything that is ready, for good. With `lease_s` the groups come back, "
        "identical, unless they are acknowledged in time: under a `delivery_id` of their own, unless it is the same "
        "poll. With `wait_s` it waits for the next group.",
        body=PollPayload,
        reply=ref("RolloutData"),
        reply_description="Whole groups; or `success: false` and no data when nothing is ready.",
        errors=(400, 404, 409, 503, 507),
        example="""-d '{"job_id": "run-1", "wait_s": 30, "lease_s": 600}' URL/get_rollout_data""",
    ),
    Operation(
        method="post",
        path="/ack",
        summary="Acknowledge deliveries",
        description="Says that they were received; saying it again changes nothing. What is answered as `expired` "
        "belongs to another delivery now: leave it out. Give `delivery_id`, `delivery_ids` or both.",
        body=AckPayload,
        reply=ref("Acknowledged"),
        reply_description="What became of each.",
        errors=(400, 404, 503, 507),
        example="""-d '{"delivery_id": "DELIVERY"}' URL/ack""",
    ),
    Operation(
        method="post",
        path="/buffer/write",
        summary="Write finished items",
        description=f"One item, or up to {MAX_ITEMS} under `items`. Idempotent by `uid`: after a lost "
        "reply, send the same again. What is refused keeps nothing; of more than 100 items, a disk that fails may have "
        "kept the first ones.",
        body=ref("WriteBody"),
        reply=ref("WriteReply"),
        reply_description="All items are durable.",
        errors=(400, 404, 409, 422, 503, 507),
        example="""-d '{"uid": "a/0", "instance_id": "a", "reward": 1.0,
        "messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}' URL/buffer/write""",
    ),
    Operation(
        method="get",
        path="/images/{sha256}",
        summary="A screenshot",
        description="Exactly the bytes that the engine received; or the token records that a generation names.",
        reply=text(format="binary"),
        reply_description="The image, or token records.",
        path_parameters={"sha256": text("64 hexadecimal digits, lower case")},
        content_types=(*IMAGE_TYPES, RECORDS_TYPE, "application/octet-stream"),
        errors=(404, 503),
        example="-o screen.png URL/images/SHA256",
    ),
    Operation(
        method="post",
        path="/jobs/{job_id}/buffer/write",
        summary="Write finished items of a job",
        description="As `/buffer/write`, for items that name no job: what follows `remote_buffer_url` in generators of "
        "slime's form, which get `URL/jobs/{job_id}` for it. A `job_id` in the body comes first.",
        body=ref("WriteBody"),
        reply=ref("WriteReply"),
        reply_description="All items are durable.",
        path_parameters=_JOB_ID,
        errors=(400, 404, 409, 422, 503, 507),
        example="""-d '{"uid": "a/1", "instance_id": "a", "reward": 0.0,
        "messages": [{"role": "assistant", "content": "!"}]}' URL/jobs/run-1/buffer/write""",
    ),
    Operation(
        method="put",
        path="/images/{sha256}",
        summary="Keep a screenshot",
        description="For writers that name it in their messages as `sha256:HASH`, or token records in `records` of a "
        "generation. Again changes nothing.",
        body=text(format="binary"),
        body_types=(*IMAGE_TYPES, RECORDS_TYPE),
        reply=ref("ImageReply"),
        reply_description="It was there already.",
        other_replies={201: ("It is durable now.", ref("ImageReply"))},
        path_parameters={"sha256": text("sha256 of the body: 64 hexadecimal digits, lower case")},
        errors=(400, 503, 507),
        example="-T screen.png URL/images/SHA256",
    ),
    Operation(
        method="get",
        path="/jobs",
        summary="List the jobs",
        description="Newest first, each with its accounting.",
        reply=ref("Jobs"),
        reply_description="Every job.",
        errors=(503,),
        example="URL/jobs",
    ),
    Operation(
        method="get",
        path="/jobs/{job_id}",
        summary="One job",
        description="Its state, progress and accounting: submitted = open + ready + leased + delivered + filtered "
        "+ failed + skipped.",
        reply=ref("Job"),
        reply_description="The job.",
        path_parameters=_JOB_ID,
        errors=(404, 503),
        example="URL/jobs/run-1",
    ),
    Operation(
        method="post",
        path="/jobs/{job_id}/{verb}",
        summary="Cancel, pause or resume a job",
        description="Doing it twice changes nothing. A cancelled job keeps what is finished.",
        reply=ref("Job"),
        reply_description="The job afterwards.",
        path_parameters={**_JOB_ID, "verb": text(enum=["cancel", "pause", "resume"])},
        errors=(404, 409, 503, 507),
        example="-X POST URL/jobs/run-1/pause",
    ),
    Operation(
        method="post",
        path="/jobs/{job_id}/drain",
        summary="Drain a job",
        description="Pauses it so that no attempt begins any more, also none that a runner was about to begin. The job "
        "is drained when `attempts` of the reply has no `running`: ask until then. What runs comes to its end, or "
        "is given up with `stop`. `resume` goes on. A job that is over is drained already.",
        body=DrainPayload,
        reply=ref("Job"),
        reply_description="The job, with what still runs in `attempts`.",
        path_parameters=_JOB_ID,
        errors=(400, 404, 503, 507),
        example="-X POST URL/jobs/run-1/drain",
    ),
    Operation(
        method="get",
        path="/jobs/{job_id}/deliveries",
        summary="List a job's deliveries",
        description="Newest first, also those that expired.",
        query=PageQuery,
        reply=ref("DeliveryPage"),
        reply_description="One page.",
        path_parameters=_JOB_ID,
        errors=(400, 404, 503),
        example="'URL/jobs/run-1/deliveries?limit=10'",
    ),
    Operation(
        method="get",
        path="/deliveries/{delivery_id}",
        summary="A past delivery again",
        description="Byte for byte what its poll was answered (but for `acknowledged`, which answered that poll's own "
        "`ack`). Changes nothing: no lease, no state.",
        query=DeliveryQuery,
        reply=ref("RolloutData"),
        reply_description="The groups of that delivery.",
        path_parameters={"delivery_id": text(minLength=1)},
        errors=(400, 404, 503),
        example="'URL/deliveries/DELIVERY?images=hash'",
    ),
    Operation(
        method="get",
        path="/trajectories",
        summary="Search trajectories",
        description="Newest first, or as `sort` and `order` say, without payloads; with `previews` a line each of what "
        "was asked and answered. Every filter that is given must hold.",
        query=TrajectoryPageQuery,
        reply=ref("TrajectoryPage"),
        reply_description="One page.",
        errors=(400, 404, 503),
        example="'URL/trajectories?job_id=run-1&min_reward=0.5&limit=20'",
    ),
    Operation(
        method="get",
        path="/trajectory_summary",
        summary="Count trajectories",
        description="How many the filters let through, their means, and a histogram of their rewards.",
        query=TrajectoryFilters,
        reply=ref("TrajectorySummary"),
        reply_description="Totals; `limit` and `cursor` mean nothing here.",
        errors=(400, 404, 503),
        example="'URL/trajectory_summary?job_id=run-1&success=true'",
    ),
    Operation(
        method="get",
        path="/search",
        summary="Search texts",
        description="In the messages, thoughts and tool calls of trajectories, newest first. There is no index of "
        "words: payloads are read, one after the other, for 1.5 seconds at most. A page whose time was up says so "
        "(`out_of_time`), and its `next_cursor` goes on. Two searches run at a time in each server process.",
        query=SearchQuery,
        reply=ref("SearchPage"),
        reply_description="Where the text was found, and how far the search came.",
        errors=(400, 404, 503),
        example="'URL/search?job_id=run-1&text=airplane%20mode'",
    ),
    Operation(
        method="get",
        path="/trajectories/{uid}",
        summary="One trajectory",
        description="As it is stored: messages, generations, rewards, timings.",
        query=TrajectoryQuery,
        reply=ref("StoredTrajectory"),
        reply_description="The trajectory.",
        path_parameters={"uid": text(minLength=1)},
        errors=(400, 404, 409, 503),
        example="'URL/trajectories/a/0?job_id=run-1'",
    ),
    Operation(
        method="get",
        path="/jobs/{job_id}/explanation",
        summary="Why nothing moves",
        description="In words, with what to do; or that it moves. What `rollout-buffer status` and the dashboard show.",
        reply=ref("JobExplanation"),
        reply_description="At least one sentence.",
        path_parameters=_JOB_ID,
        errors=(404, 503),
        example="URL/jobs/run-1/explanation",
    ),
    Operation(
        method="get",
        path="/jobs/{job_id}/series",
        summary="A job over time",
        description="In buckets. Ask again with `since` and `width_s` for the newest buckets alone.",
        query=SeriesQuery,
        reply=ref("Series"),
        reply_description="Columns of one entry per bucket; null where nothing was measured.",
        path_parameters=_JOB_ID,
        errors=(400, 404, 503),
        example="'URL/jobs/run-1/series?range_s=3600'",
    ),
    Operation(
        method="get",
        path="/jobs/{job_id}/groups",
        summary="Search groups",
        description="The last touched first, or as `sort` and `order` say, with the rewards of their members and why "
        "they were dropped. Open groups are listed from when they are the next to be played.",
        query=GroupPageQuery,
        reply=ref("GroupPage"),
        reply_description="One page.",
        path_parameters=_JOB_ID,
        errors=(400, 404, 503),
        example="'URL/jobs/run-1/groups?state=filtered'",
    ),
    Operation(
        method="get",
        path="/jobs/{job_id}/attempts",
        summary="List attempts that failed",
        description="The last ended first, each with its error and, on request, what was said in it. Of each job the "
        "newest 100 are kept with their messages.",
        query=AttemptPageQuery,
        reply=ref("FailedAttemptPage"),
        reply_description="One page.",
        path_parameters=_JOB_ID,
        errors=(400, 404, 503),
        example="'URL/jobs/run-1/attempts?transcripts=true'",
    ),
    Operation(
        method="get",
        path="/groups/{group_index}",
        summary="One group",
        description="Its members, every attempt to fill a slot, and what was delivered.",
        reply=ref("Group"),
        reply_description="The group.",
        path_parameters={"group_index": integer("As in a delivered item", minimum=0)},
        errors=(404, 503),
        example="URL/groups/1",
    ),
    Operation(
        method="get",
        path="/token_rows/{uid}",
        summary="Tokens of a trajectory",
        description="As the trainer computes its loss on them: how generations became rows, and the tokens of one row "
        "with mask, log-probs and, where the job's tokenizer is on this host, texts.",
        query=TokenRowQuery,
        reply=ref("TokenRows"),
        reply_description="One row, and what all rows are.",
        path_parameters={"uid": text(minLength=1)},
        errors=(400, 404, 409, 503),
        example="'URL/token_rows/a/0?job_id=run-1&row=0'",
    ),
    Operation(
        method="get",
        path="/turn_tree/{uid}",
        summary="Turns of a trajectory as a tree",
        description="Each turn stands on the one whose tokens its prompt continues exactly: the branches of a gateway "
        "session, or the prompts of an edited context. With texts where the job's tokenizer is on this host.",
        query=NamedTrajectoryQuery,
        reply=ref("TurnTree"),
        reply_description="Every turn.",
        path_parameters={"uid": text(minLength=1)},
        errors=(400, 404, 409, 503),
        example="'URL/turn_tree/a/0?job_id=run-1'",
    ),
    Operation(
        method="get",
        path="/neighbours/{uid}",
        summary="Trajectories before and after one",
        description="In the order in which they were written to the job.",
        query=NamedTrajectoryQuery,
        reply=ref("Neighbours"),
        reply_description="Their uids.",
        path_parameters={"uid": text(minLength=1)},
        errors=(400, 404, 409, 503),
        example="'URL/neighbours/a/0?job_id=run-1'",
    ),
    Operation(
        method="get",
        path="/overview",
        summary="How the buffer is",
        description="The supervisor, the disk, and the jobs with their accounting and why each moves or stands still.",
        query=OverviewQuery,
        reply=ref("Overview"),
        reply_description="One page of jobs.",
        errors=(400, 503),
        example="URL/overview",
    ),
    Operation(
        method="get",
        path="/",
        summary="The dashboard",
        description="A page for people. It asks for the token itself.",
        reply=text(),
        reply_description="HTML.",
        content_types=("text/html",),
        needs_token=False,
        example="URL/",
    ),
    Operation(
        method="get",
        path="/dashboard/{file}",
        summary="A file of the dashboard",
        description="Scripts and styles; they hold no data.",
        reply=text(),
        reply_description="The file.",
        path_parameters={"file": text(minLength=1)},
        content_types=("text/javascript", "text/css", "text/html", "text/plain", "image/svg+xml"),
        errors=(404,),
        needs_token=False,
        example="URL/dashboard/style.css",
    ),
    Operation(
        method="post",
        path="/jobs/{job_id}/trainer_rows",
        summary="Say what the trainer computed of rows",
        description="Log-probs of the trained tokens in order; advantage, entropy, share of the loss and of clipped "
        "tokens. Kept beside the trajectory and compared with the engine's log-probs. Optional: nothing else depends "
        "on it. A row that does not fit is left out and named.",
        body=TrainerReport,
        path_parameters=_JOB_ID,
        reply=ref("TrainerRowsKept"),
        reply_description="What was kept.",
        errors=(400, 404, 503, 507),
        example="""-d '{"rows": [{"uid": "a.0.0", "log_probs": [-0.1, -2.5], "advantage": 1.2}]}' """
        "URL/jobs/run-1/trainer_rows",
    ),
    Operation(
        method="get",
        path="/jobs/{job_id}/mismatch",
        summary="How far trainer and engine are apart",
        description="The distance between train and rollout log-prob of the tokens that were reported under "
        "`trainer_rows`: over all, by turn, by weight lag, and the turns with the largest.",
        query=MismatchQuery,
        path_parameters=_JOB_ID,
        reply=ref("Mismatch"),
        reply_description="Means and the worst turns; empty where no trainer said anything.",
        errors=(400, 404, 503),
        example="URL/jobs/run-1/mismatch",
    ),
    Operation(
        method="post",
        path="/sign_in",
        summary="Sign a browser in",
        description="Answers with a cookie that stands for the token for a week (HttpOnly, SameSite=Strict). Programs "
        "send the token itself instead.",
        body=SignInPayload,
        reply=ref("SignedIn"),
        reply_description="Signed in; also where no token is asked for.",
        errors=(400, 401, 403),
        needs_token=False,
        example="""-d '{"token": "TOKEN"}' URL/sign_in""",
    ),
    Operation(
        method="post",
        path="/sign_out",
        summary="Sign a browser out",
        description="Takes the cookie away.",
        reply=ref("SignedIn"),
        reply_description="Signed out.",
        errors=(403,),
        needs_token=False,
        example="-X POST URL/sign_out",
    ),
    Operation(
        method="get",
        path="/metrics",
        summary="Numbers for Prometheus",
        description="Every number is read from the store when it is asked for. docs/metrics.md lists the names.",
        reply=text(),
        reply_description="Prometheus' text format.",
        content_types=("text/plain",),
        errors=(503,),
        example="URL/metrics",
    ),
    Operation(
        method="get",
        path="/health",
        summary="Is it well",
        description="Needs no token. Well means: the store can be read and written, and a supervisor lives that plays "
        "jobs. A service that only reads, because its disk is full, is degraded and still answers 200: polls and "
        "acknowledgements work, writes answer 507.",
        reply=ref("Health"),
        reply_description="It is well, or degraded and serving: `reason` says why.",
        other_replies={
            503: (
                "No supervisor lives, or it is frozen, or starts: nobody would play a job.",
                {"anyOf": [ref("Health"), ref("Error")]},
            )
        },
        needs_token=False,
        example="URL/health",
    ),
    Operation(
        method="get",
        path="/openapi.json",
        summary="This description",
        description="OpenAPI 3.1.",
        reply={"type": "object"},
        reply_description="The document.",
        example="URL/openapi.json",
    ),
)
