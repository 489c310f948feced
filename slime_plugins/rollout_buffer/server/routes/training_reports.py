"""Routes of training reports: log-probs computed by the trainer, and their mismatch with the engine's."""

from __future__ import annotations

from slime_plugins.rollout_buffer.reporting.mismatch import describe_mismatch
from slime_plugins.rollout_buffer.server.http import read_body, the_buffer
from slime_plugins.rollout_buffer.server.routing import Routes
from slime_plugins.rollout_buffer.wire.request_fields import parse
from slime_plugins.rollout_buffer.wire.trainer_reports import MismatchQuery, TrainerReport
from slime_plugins.rollout_buffer.wire.trajectory_replies import Mismatch, TrainerRowsKept

routes = Routes("training_reports")


@routes.post("/jobs/{job_id}/trainer_rows", body=TrainerReport)
def trainer_rows(job_id: str) -> TrainerRowsKept:
    """Stores the trainer's log-probs of a step's rows."""
    report = parse(TrainerReport, read_body(with_nan=True))
    return the_buffer().add_trainer_report(job_id, report)


@routes.get("/jobs/{job_id}/mismatch")
def mismatch(job_id: str, query: MismatchQuery) -> Mismatch:
    """Returns the mismatch of a job's trainer and engine, by turn and weight lag, with the worst turns."""
    return describe_mismatch(the_buffer().store, job_id, query.limit)
