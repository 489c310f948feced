"""Routes of trajectories: lists, search, one trajectory, its training rows and its turns."""

from __future__ import annotations

import orjson
from flask import Response

from slime_plugins.rollout_buffer import wire
from slime_plugins.rollout_buffer.reporting.inspection import without_generations
from slime_plugins.rollout_buffer.reporting.mismatch import describe_trainer_row, trainer_rows_of
from slime_plugins.rollout_buffer.reporting.token_rows import describe_rows, tokenizer_of
from slime_plugins.rollout_buffer.reporting.turn_tree import describe_turn_tree, emission_order
from slime_plugins.rollout_buffer.server.http import the_buffer, the_context, the_inspection
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
    """Search trajectories.

    Sorted with the newest first, or by `sort` and `order`, without payloads; with `previews` a line each of what was
    asked and answered. All given filters must hold.
    """
    return the_inspection().trajectories(page)


@routes.get("/trajectory_summary", errors=(404,))
def trajectory_summary(filters: TrajectoryFilters) -> TrajectorySummary:
    """Count trajectories.

    Returns the number of those that pass the filters, their means, and a histogram of their rewards.
    """
    return the_inspection().summary(filters)


@routes.get("/search", errors=(404,))
def search(query: SearchQuery) -> SearchPage:
    """Search texts.

    Searches messages, thoughts and tool calls of trajectories, newest first, without an index: payloads are read for
    1.5 seconds at most, then `out_of_time` is true and `next_cursor` continues. Two searches run at a time in each
    server process.
    """
    return the_context().text_search.page(query)


@routes.get("/trajectories/{uid}", reply=StoredTrajectory, errors=(409, 500))
def trajectory(uid: str, query: TrajectoryQuery) -> Response:
    """Show a trajectory.

    Returns it as it is stored: messages, generations, rewards, timings.
    """
    stored = the_inspection().trajectory(uid, query.job_id)
    body = stored.body if query.generations else without_generations(stored.body)
    if query.images == "inline":
        body = b"".join(the_buffer().payloads.inlined(body))
    return Response(orjson.dumps(stored.entry)[:-1] + b"," + body[1:], mimetype="application/json")


@routes.get("/neighbours/{uid}", errors=(409,))
def neighbours(uid: str, query: NamedTrajectoryQuery) -> Neighbours:
    """Show the trajectories before and after one.

    Their order is that in which they were written to the job.
    """
    return the_inspection().neighbours(uid, query.job_id)


@routes.get("/token_rows/{uid}", revalidated=True, errors=(409, 500))
def token_rows(uid: str, query: TokenRowQuery) -> TokenRows:
    """Show the tokens of a trajectory.

    Returns how generations became rows, and the tokens of one row with mask, log-probs and, where the job's tokenizer
    is on this host, texts.
    """
    context = the_context()
    stored = the_inspection().trajectory(uid, query.job_id)
    generations = wire.decode_generations(orjson.loads(stored.body).get("generations"))
    settings = context.buffer.job(stored.entry["job_id"]).settings
    tokenizer, why_no_texts = tokenizer_of(settings.tokenizer_path) if generations else (None, "")
    described = describe_rows(generations, query.row, tokenizer)
    report = trainer_rows_of(context.buffer.store, stored.entry["job_id"], uid).get(query.row)
    return TokenRows(
        **described,
        uid=uid,
        job_id=stored.entry["job_id"],
        why_no_texts=why_no_texts,
        trainer=None if report is None else describe_trainer_row(report),
    )


@routes.get("/turn_tree/{uid}", revalidated=True, errors=(409, 500))
def turn_tree(uid: str, query: NamedTrajectoryQuery) -> TurnTree:
    """Show the turns of a trajectory as a tree.

    The parent of a turn is the turn whose tokens its prompt continues exactly: the branches of a gateway session, or
    the prompts of an edited context. Texts are included if the job's tokenizer is on this host.
    """
    context = the_context()
    stored = the_inspection().trajectory(uid, query.job_id)
    body = orjson.loads(stored.body)
    generations = wire.decode_generations(body.get("generations"))
    settings = context.buffer.job(stored.entry["job_id"]).settings
    tokenizer, why_no_texts = tokenizer_of(settings.tokenizer_path) if generations else (None, "")
    turns = describe_turn_tree(generations, emission_order(body.get("extra_info")), tokenizer)
    return TurnTree(uid=uid, job_id=stored.entry["job_id"], turns=turns, why_no_texts=why_no_texts)
