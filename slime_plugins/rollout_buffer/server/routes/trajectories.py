"""Routes of trajectories: lists, search, one trajectory, its training rows and its turns."""

from __future__ import annotations

import orjson
from flask import Blueprint, Response, request

from slime_plugins.rollout_buffer import wire
from slime_plugins.rollout_buffer.reporting.inspection import without_generations
from slime_plugins.rollout_buffer.reporting.mismatch import describe_trainer_row, trainer_rows_of
from slime_plugins.rollout_buffer.reporting.token_rows import describe_rows
from slime_plugins.rollout_buffer.reporting.turn_tree import describe_turn_tree, emission_order
from slime_plugins.rollout_buffer.server.http import (
    json_or_unchanged,
    json_reply,
    the_buffer,
    the_context,
    the_inspection,
)
from slime_plugins.rollout_buffer.wire.query_params import (
    NamedTrajectoryQuery,
    SearchQuery,
    TokenRowQuery,
    TrajectoryFilters,
    TrajectoryPageQuery,
    TrajectoryQuery,
)
from slime_plugins.rollout_buffer.wire.request_fields import parse
from slime_plugins.rollout_buffer.wire.trajectory_replies import TokenRows, TurnTree

routes = Blueprint("rollout_buffer_trajectories", __name__)


@routes.get("/trajectories")
def trajectories() -> Response:
    """Lists trajectories without their payloads, newest first."""
    page = parse(TrajectoryPageQuery, request.args.to_dict())
    return json_reply(the_inspection().trajectories(page))


@routes.get("/trajectory_summary")
def trajectory_summary() -> Response:
    """Counts the trajectories that filters let through: their means, and a histogram of their rewards."""
    filters = parse(TrajectoryFilters, request.args.to_dict())
    return json_reply(the_inspection().summary(filters))


@routes.get("/search")
def search() -> Response:
    """Looks for a text in the messages of trajectories, newest first, as far as its time allows."""
    query = parse(SearchQuery, request.args.to_dict())
    return json_reply(the_context().text_search.page(query))


@routes.get("/trajectories/<id:uid>")
def trajectory(uid: str) -> Response:
    """Returns one trajectory as it is stored: messages, generations, rewards, timings."""
    query = parse(TrajectoryQuery, request.args.to_dict())
    found = the_inspection().trajectory(uid, query.job_id)
    body = found.body if query.generations else without_generations(found.body)
    if query.images == "inline":
        body = the_buffer().with_inline_images(body)
    return Response(orjson.dumps(found.light)[:-1] + b"," + body[1:], mimetype="application/json")


@routes.get("/neighbours/<id:uid>")
def neighbours(uid: str) -> Response:
    """Returns the uids of the trajectories that were written to the job just before and just after one."""
    query = parse(NamedTrajectoryQuery, request.args.to_dict())
    return json_reply(the_inspection().neighbours(uid, query.job_id))


@routes.get("/token_rows/<id:uid>")
def token_rows(uid: str) -> Response:
    """Returns how a trajectory's generations became training rows, and the tokens of one row."""
    query = parse(TokenRowQuery, request.args.to_dict())
    context = the_context()
    found = the_inspection().trajectory(uid, query.job_id)
    generations = wire.decode_generations(orjson.loads(found.body).get("generations"))
    settings = context.buffer.job(found.light["job_id"]).settings
    tokenizer, why_no_texts = context.token_texts.tokenizer(settings.tokenizer_path) if generations else (None, "")
    described = describe_rows(generations, query.row, tokenizer)
    report = trainer_rows_of(context.buffer.store, found.light["job_id"], uid).get(query.row)
    return json_or_unchanged(
        TokenRows(
            **described,
            uid=uid,
            job_id=found.light["job_id"],
            why_no_texts=why_no_texts,
            trainer=None if report is None else describe_trainer_row(report),
        )
    )


@routes.get("/turn_tree/<id:uid>")
def turn_tree(uid: str) -> Response:
    """Returns the turns of a trajectory as a tree, each with what its prompt added and what was sampled."""
    query = parse(NamedTrajectoryQuery, request.args.to_dict())
    context = the_context()
    found = the_inspection().trajectory(uid, query.job_id)
    body = orjson.loads(found.body)
    generations = wire.decode_generations(body.get("generations"))
    settings = context.buffer.job(found.light["job_id"]).settings
    tokenizer, why_no_texts = context.token_texts.tokenizer(settings.tokenizer_path) if generations else (None, "")
    turns = describe_turn_tree(generations, emission_order(body.get("extra_info")), tokenizer)
    return json_or_unchanged(TurnTree(uid=uid, job_id=found.light["job_id"], turns=turns, why_no_texts=why_no_texts))
