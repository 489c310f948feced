"""Routes of training reports: what a trainer computed of the rows that it trained, and the mismatch that shows."""

from __future__ import annotations

from flask import Blueprint, Response, request

from slime_plugins.rollout_buffer.reporting.mismatch import describe_mismatch
from slime_plugins.rollout_buffer.server.http import json_reply, read_body, the_buffer
from slime_plugins.rollout_buffer.wire.request_fields import parse
from slime_plugins.rollout_buffer.wire.trainer_reports import MismatchQuery, TrainerReport

routes = Blueprint("rollout_buffer_training_reports", __name__)


@routes.post("/jobs/<id:job_id>/trainer_rows")
def trainer_rows(job_id: str) -> Response:
    """Keeps what a trainer computed of the rows of a step, beside their trajectories."""
    report = parse(TrainerReport, read_body(with_nan=True))
    return json_reply(the_buffer().add_trainer_report(job_id, report))


@routes.get("/jobs/<id:job_id>/mismatch")
def mismatch(job_id: str) -> Response:
    """Returns how far a job's trainer and engine are apart, by turn and weight lag, with the worst turns."""
    query = parse(MismatchQuery, request.args.to_dict())
    return json_reply(describe_mismatch(the_buffer().store, job_id, query.limit))
