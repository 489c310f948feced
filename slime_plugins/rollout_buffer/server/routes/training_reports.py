"""Routes of training reports: the numbers that a trainer computed of its rows, and the mismatch with the engine."""

from __future__ import annotations

from slime_plugins.rollout_buffer.reporting.mismatch import describe_mismatch
from slime_plugins.rollout_buffer.server.http import read_body, the_buffer
from slime_plugins.rollout_buffer.server.routing import Routes
from slime_plugins.rollout_buffer.state.trainer_reports import store_report
from slime_plugins.rollout_buffer.wire.request_fields import parse
from slime_plugins.rollout_buffer.wire.trainer_reports import MismatchQuery, TrainerReport
from slime_plugins.rollout_buffer.wire.trajectory_replies import Mismatch, TrainerRowsKept

routes = Routes("training_reports")


@routes.post("/jobs/{job_id}/trainer_rows", body=TrainerReport)
def trainer_rows(job_id: str) -> TrainerRowsKept:
    """Report what the trainer computed for rows.

    A row has the log-probs of its trained tokens in order, its advantage, entropy, and shares of the loss and of
    clipped tokens. It is stored with the trajectory and compared with the engine's log-probs. A row that does not fit
    is left out and named.
    """
    report = parse(TrainerReport, read_body(with_nan=True))
    return store_report(the_buffer().store, job_id, report, clock=the_buffer().clock)


@routes.get("/jobs/{job_id}/mismatch")
def mismatch(job_id: str, query: MismatchQuery) -> Mismatch:
    """Show the mismatch of trainer and engine.

    Returns the distance between train and rollout log-prob of the reported tokens: over all, by turn, by weight lag,
    and the turns with the largest distance.
    """
    return describe_mismatch(the_buffer().store, job_id, query.limit)
