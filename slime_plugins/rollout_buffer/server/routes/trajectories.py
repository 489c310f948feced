"""Routes of trajectories: lists, search, one trajectory, its training rows and its turns."""

from __future__ import annotations

import orjson
from flask import Response

from slime_plugins.rollout_buffer import wire
from slime_plugins.rollout_buffer.reporting.inspection import without_generations
from slime_plugins.rollout_buffer.reporting.mismatch import describe_trainer_row, trainer_rows_of
from slime_plugins.rollout_buffer.reporting.token_rows import describe_rows
from slime_plugins.rollout_buffer.reporting.turn_tree import describe_turn_tree, emission_order
from slime_plugins.rollout_buffer.server.http import (
    the_buffer,
    the_context,
    the_inspection,
)
from slime_plugins.rollout_buffer.server.routing import Routes
from slime_plugins.rollout_buffer.wire.query_params import (
    NamedTrajectoryQuery,
    SearchQuery,
    TokenRowQuery,
    TrajectoryFilters,
    TrajectoryPageQuery,
    TrajectoryQuery,
)
from slime_plugins.rollout_buffer.wire.trajectory_replies import (
    Neighbours,
    SearchPage,
    StoredTrajectory,
    TokenRows,
    TrajectoryPage,
    TrajectorySummary,
    TurnTree,
)

routes = Routes("trajectories")


@routes.get("/trajectories", errors=(404,))
def trajectories(page: TrajectoryPageQuery) -> TrajectoryPage:
    """Lists trajectories without their payloads, newest first."""
    return the_inspection().trajectories(page)


@routes.get("/trajectory_summary", errors=(404,))
def trajectory_summary(filters: TrajectoryFilters) -> TrajectorySummary:
    """Returns the number of trajectories that match filters, their means, and a histogram of rewards."""
    return the_inspection().summary(filters)


@routes.get("/search", errors=(404,))
def search(query: SearchQuery) -> SearchPage:
    """Searches the messages of trajectories, newest first, within a time limit."""
    return the_context().text_search.page(query)


@routes.get("/trajectories/{uid}", reply=StoredTrajectory, errors=(409,))
def trajectory(uid: str, query: TrajectoryQuery) -> Response:
    """Returns one stored trajectory: messages, generations, rewards, timings."""
    found = the_inspection().trajectory(uid, query.job_id)
    body = found.body if query.generations else without_generations(found.body)
    if query.images == "inline":
        body = the_buffer().with_inline_images(body)
    return Response(orjson.dumps(found.light)[:-1] + b"," + body[1:], mimetype="application/json")


@routes.get("/neighbours/{uid}", errors=(409,))
def neighbours(uid: str, query: NamedTrajectoryQuery) -> Neighbours:
    """Returns the uids of the job's previous and next trajectory."""
    return the_inspection().neighbours(uid, query.job_id)


@routes.get("/token_rows/{uid}", revalidated=True, errors=(409,))
def token_rows(uid: str, query: TokenRowQuery) -> TokenRows:
    """Returns the training rows made of a trajectory's generations, and the tokens of one row."""
    context = the_context()
    found = the_inspection().trajectory(uid, query.job_id)
    generations = wire.decode_generations(orjson.loads(found.body).get("generations"))
    settings = context.buffer.job(found.light["job_id"]).settings
    tokenizer, why_no_texts = context.token_texts.tokenizer(settings.tokenizer_path) if generations else (None, "")
    described = describe_rows(generations, query.row, tokenizer)
    report = trainer_rows_of(context.buffer.store, found.light["job_id"], uid).get(query.row)
    return TokenRows(
        **described,
        uid=uid,
        job_id=found.light["job_id"],
        why_no_texts=why_no_texts,
        trainer=None if report is None else describe_trainer_row(report),
    )


@routes.get("/turn_tree/{uid}", revalidated=True, errors=(409,))
def turn_tree(uid: str, query: NamedTrajectoryQuery) -> TurnTree:
    """Returns a trajectory's turns as a tree, each with its new prompt text and its sampled text."""
    context = the_context()
    found = the_inspection().trajectory(uid, query.job_id)
    body = orjson.loads(found.body)
    generations = wire.decode_generations(body.get("generations"))
    settings = context.buffer.job(found.light["job_id"]).settings
    tokenizer, why_no_texts = context.token_texts.tokenizer(settings.tokenizer_path) if generations else (None, "")
    turns = describe_turn_tree(generations, emission_order(body.get("extra_info")), tokenizer)
    return TurnTree(uid=uid, job_id=found.light["job_id"], turns=turns, why_no_texts=why_no_texts)
