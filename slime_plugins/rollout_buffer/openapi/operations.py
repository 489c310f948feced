"""Every route of the HTTP API with its methods, as callers need to know them.

Request bodies and queries come from the pydantic records that check them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import BaseModel

from slime_plugins.rollout_buffer.openapi.schemas import Schema, ref, text
from slime_plugins.rollout_buffer.wire import MAX_ITEMS, RECORDS_TYPE
from slime_plugins.rollout_buffer.wire.control_requests import DrainPayload, SignInPayload
from slime_plugins.rollout_buffer.wire.delivery_requests import AckPayload, PollPayload
from slime_plugins.rollout_buffer.wire.query_params import (
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
from slime_plugins.rollout_buffer.wire.start_request import StartPayload
from slime_plugins.rollout_buffer.wire.trainer_reports import MismatchQuery, TrainerReport

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


PATH_PARAMETERS: Mapping[str, Schema] = {
    "job_id": {"type": "string", "minLength": 1, "description": "The job's id; slashes in it may stand as they are"},
    "verb": {"type": "string", "enum": ["cancel", "pause", "resume"]},
    "delivery_id": {"type": "string", "minLength": 1},
    "uid": {"type": "string", "minLength": 1},
    "group_index": {"type": "integer", "minimum": 0, "description": "As in a delivered item"},
    "sha256": {"type": "string", "description": "sha256 of the bytes: 64 hexadecimal digits, lower case"},
    "file": {"type": "string", "minLength": 1},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """One route with one method, as callers need to know it."""

    route: str
    """Method and path."""
    summary: str
    description: str
    reply: str | Schema
    """A record by its name, or a schema."""
    body: type[BaseModel] | Schema | None = None
    body_types: tuple[str, ...] = (JSON,)
    query: type[BaseModel] | None = None
    errors: tuple[int, ...] = ()
    """Statuses beside those that follow from the rest."""
    content_types: tuple[str, ...] = (JSON,)
    other_replies: Mapping[int, tuple[str, Schema]] = field(default_factory=dict)
    needs_token: bool = True

    @property
    def method(self) -> str:
        """In lower case, as OpenAPI has it."""
        return self.route.split()[0].lower()

    @property
    def path(self) -> str:
        """With its parameters in braces."""
        return self.route.split()[1]

    @property
    def statuses(self) -> set[int]:
        """Every status of an error that it may answer with."""
        found = {403, *self.errors}
        if self.body is not None:
            found |= {400, 413, 415}
        if self.query is not None:
            found.add(400)
        if "{" in self.path and self.method != "put":
            found.add(404)
        if self.needs_token:
            found |= {401, 503} if self.method == "get" else {401, 503, 507}
        return found


OPERATIONS: tuple[Operation, ...] = (
    Operation(
        route="POST /start_rollout",
        summary="Start a job, or attach to it",
        description="The same work is the same job: a repeated call attaches, takes over the new engine URL, and makes "
        "what was handed out but is not in the skip list ready again. Numbers may come as strings. Keys that are not "
        "listed are options of the generator.",
        body=StartPayload,
        reply="StartReply",
        errors=(404, 409),
    ),
    Operation(
        route="POST /get_rollout_data",
        summary="Fetch finished groups",
        description="`{}` hands out everything that is ready, for good. With `lease_s` the groups come back, "
        "identical, unless they are acknowledged in time: under a `delivery_id` of their own, unless it is the same "
        "poll. With `wait_s` it waits for the next group.",
        body=PollPayload,
        reply="PollReply",
        errors=(404, 409),
    ),
    Operation(
        route="POST /ack",
        summary="Acknowledge deliveries",
        description="Says that they were received; saying it again changes nothing. What is answered as `expired` "
        "belongs to another delivery now: leave it out. Give `delivery_id`, `delivery_ids` or both.",
        body=AckPayload,
        reply="Acknowledged",
        errors=(404,),
    ),
    Operation(
        route="POST /buffer/write",
        summary="Write finished items",
        description=f"One item, or up to {MAX_ITEMS} under `items`. Idempotent by `uid`: after a lost "
        "reply, send the same again. What is refused keeps nothing.",
        body=ref("WriteBody"),
        reply="WriteReply",
        errors=(404, 409, 422),
    ),
    Operation(
        route="GET /images/{sha256}",
        summary="A screenshot",
        description="Exactly the bytes that the engine received; or the token records that a generation names.",
        reply=text(format="binary"),
        content_types=(*IMAGE_TYPES, RECORDS_TYPE, "application/octet-stream"),
    ),
    Operation(
        route="POST /jobs/{job_id}/buffer/write",
        summary="Write finished items of a job",
        description="As `/buffer/write`, for items that name no job: what follows `remote_buffer_url` in generators of "
        "slime's form, which get `URL/jobs/{job_id}` for it. A `job_id` in the body comes first.",
        body=ref("WriteBody"),
        reply="WriteReply",
        errors=(409, 422),
    ),
    Operation(
        route="PUT /images/{sha256}",
        summary="Keep a screenshot",
        description="For writers that name it in their messages as `sha256:HASH`, or token records in `records` of a "
        "generation. Again changes nothing.",
        body=text(format="binary"),
        body_types=(*IMAGE_TYPES, RECORDS_TYPE),
        reply="ImageReply",
        other_replies={201: ("It is durable now.", ref("ImageReply"))},
    ),
    Operation(
        route="GET /jobs",
        summary="List the jobs",
        description="Newest first, each with its accounting.",
        reply="Jobs",
    ),
    Operation(
        route="GET /jobs/{job_id}",
        summary="One job",
        description="Its state, progress and accounting: submitted = open + ready + leased + delivered + filtered "
        "+ failed + skipped.",
        reply="Job",
    ),
    Operation(
        route="POST /jobs/{job_id}/{verb}",
        summary="Cancel, pause or resume a job",
        description="Doing it twice changes nothing. A cancelled job keeps what is finished.",
        reply="Job",
        errors=(409,),
    ),
    Operation(
        route="POST /jobs/{job_id}/drain",
        summary="Drain a job",
        description="Pauses it so that no attempt begins any more, also none that a runner was about to begin. The job "
        "is drained when `attempts` of the reply has no `running`: ask until then. What runs comes to its end, or "
        "is given up with `stop`. `resume` goes on. A job that is over is drained already.",
        body=DrainPayload,
        reply="Job",
    ),
    Operation(
        route="GET /jobs/{job_id}/deliveries",
        summary="List a job's deliveries",
        description="Newest first, also those that expired.",
        query=PageQuery,
        reply="DeliveryPage",
    ),
    Operation(
        route="GET /deliveries/{delivery_id}",
        summary="A past delivery again",
        description="Byte for byte what its poll was answered (but for `acknowledged`, which answered that poll's own "
        "`ack`). Changes nothing: no lease, no state.",
        query=DeliveryQuery,
        reply="PollReply",
    ),
    Operation(
        route="GET /trajectories",
        summary="Search trajectories",
        description="Newest first, or as `sort` and `order` say, without payloads; with `previews` a line each of what "
        "was asked and answered. Every filter that is given must hold.",
        query=TrajectoryPageQuery,
        reply="TrajectoryPage",
        errors=(404,),
    ),
    Operation(
        route="GET /trajectory_summary",
        summary="Count trajectories",
        description="How many the filters let through, their means, and a histogram of their rewards.",
        query=TrajectoryFilters,
        reply="TrajectorySummary",
        errors=(404,),
    ),
    Operation(
        route="GET /search",
        summary="Search texts",
        description="In the messages, thoughts and tool calls of trajectories, newest first. There is no index of "
        "words: payloads are read, one after the other, for 1.5 seconds at most. A page whose time was up says so "
        "(`out_of_time`), and its `next_cursor` goes on. Two searches run at a time in each server process.",
        query=SearchQuery,
        reply="SearchPage",
        errors=(404,),
    ),
    Operation(
        route="GET /trajectories/{uid}",
        summary="One trajectory",
        description="As it is stored: messages, generations, rewards, timings.",
        query=TrajectoryQuery,
        reply="StoredTrajectory",
        errors=(409,),
    ),
    Operation(
        route="GET /jobs/{job_id}/explanation",
        summary="Why nothing moves",
        description="In words, with what to do; or that it moves. What `rollout-buffer status` and the dashboard show.",
        reply="JobExplanation",
    ),
    Operation(
        route="GET /jobs/{job_id}/series",
        summary="A job over time",
        description="In buckets. Ask again with `since` and `width_s` for the newest buckets alone.",
        query=SeriesQuery,
        reply="Series",
    ),
    Operation(
        route="GET /jobs/{job_id}/groups",
        summary="Search groups",
        description="The last touched first, or as `sort` and `order` say, with the rewards of their members and why "
        "they were dropped. Open groups are listed from when they are the next to be played.",
        query=GroupPageQuery,
        reply="GroupPage",
    ),
    Operation(
        route="GET /jobs/{job_id}/attempts",
        summary="List attempts that failed",
        description="The last ended first, each with its error and, on request, what was said in it. Of each job the "
        "newest 100 are kept with their messages.",
        query=AttemptPageQuery,
        reply="FailedAttemptPage",
    ),
    Operation(
        route="GET /groups/{group_index}",
        summary="One group",
        description="Its members, every attempt to fill a slot, and what was delivered.",
        reply="Group",
    ),
    Operation(
        route="GET /token_rows/{uid}",
        summary="Tokens of a trajectory",
        description="As the trainer computes its loss on them: how generations became rows, and the tokens of one row "
        "with mask, log-probs and, where the job's tokenizer is on this host, texts.",
        query=TokenRowQuery,
        reply="TokenRows",
        errors=(409,),
    ),
    Operation(
        route="GET /turn_tree/{uid}",
        summary="Turns of a trajectory as a tree",
        description="Each turn stands on the one whose tokens its prompt continues exactly: the branches of a gateway "
        "session, or the prompts of an edited context. With texts where the job's tokenizer is on this host.",
        query=NamedTrajectoryQuery,
        reply="TurnTree",
        errors=(409,),
    ),
    Operation(
        route="GET /neighbours/{uid}",
        summary="Trajectories before and after one",
        description="In the order in which they were written to the job.",
        query=NamedTrajectoryQuery,
        reply="Neighbours",
        errors=(409,),
    ),
    Operation(
        route="GET /overview",
        summary="How the buffer is",
        description="The supervisor, the disk, and the jobs with their accounting and why each moves or stands still.",
        query=OverviewQuery,
        reply="Overview",
    ),
    Operation(
        route="GET /",
        summary="The dashboard",
        description="A page for people. It asks for the token itself.",
        reply=text(),
        content_types=("text/html",),
        needs_token=False,
    ),
    Operation(
        route="GET /dashboard/{file}",
        summary="A file of the dashboard",
        description="Scripts and styles; they hold no data.",
        reply=text(),
        content_types=("text/javascript", "text/css", "text/html", "text/plain", "image/svg+xml"),
        needs_token=False,
    ),
    Operation(
        route="POST /jobs/{job_id}/trainer_rows",
        summary="Say what the trainer computed of rows",
        description="Log-probs of the trained tokens in order; advantage, entropy, share of the loss and of clipped "
        "tokens. Kept beside the trajectory and compared with the engine's log-probs. Optional: nothing else depends "
        "on it. A row that does not fit is left out and named.",
        body=TrainerReport,
        reply="TrainerRowsKept",
    ),
    Operation(
        route="GET /jobs/{job_id}/mismatch",
        summary="How far trainer and engine are apart",
        description="The distance between train and rollout log-prob of the tokens that were reported under "
        "`trainer_rows`: over all, by turn, by weight lag, and the turns with the largest.",
        query=MismatchQuery,
        reply="Mismatch",
    ),
    Operation(
        route="POST /sign_in",
        summary="Sign a browser in",
        description="Answers with a cookie that stands for the token for a week (HttpOnly, SameSite=Strict). Programs "
        "send the token itself instead.",
        body=SignInPayload,
        reply="SignedIn",
        errors=(401,),
        needs_token=False,
    ),
    Operation(
        route="POST /sign_out",
        summary="Sign a browser out",
        description="Takes the cookie away.",
        reply="SignedIn",
        needs_token=False,
    ),
    Operation(
        route="GET /metrics",
        summary="Numbers for Prometheus",
        description="Every number is read from the store when it is asked for. docs/metrics.md lists the names.",
        reply=text(),
        content_types=("text/plain",),
    ),
    Operation(
        route="GET /health",
        summary="Is it well",
        description="Needs no token. Well means: the store can be read and written, and a supervisor lives that plays "
        "jobs. A service that only reads, because its disk is full, is degraded and still answers 200: polls and "
        "acknowledgements work, writes answer 507.",
        reply="Health",
        other_replies={
            503: (
                "No supervisor lives, or it is frozen, or starts: nobody would play a job.",
                {"anyOf": [ref("Health"), ref("Error")]},
            )
        },
        needs_token=False,
    ),
    Operation(
        route="GET /openapi.json",
        summary="This description",
        description="OpenAPI 3.1.",
        reply={"type": "object"},
    ),
)
