"""A session as JSON: in short, and whole with its training rows."""

from __future__ import annotations

from typing import Any

from slime_plugins.rollout_buffer.remote_rollout.trainer_side.sessions import TrainerSession, Turn, counts_of


def summary_of(session: TrainerSession) -> dict[str, Any]:
    """Returns a summary of a session."""
    return {
        "rollout_id": session.rollout_id,
        "state": session.state.value,
        "reason": session.reason or None,
        "turns": len(session.turns),
        "tokens": len(session.held_ids),
        "job_id": session.opened.job_id,
        "instance_id": session.opened.instance_id,
        "uid": session.opened.uid,
        "reward": session.reward,
        "opened_at": session.opened_at,
        **counts_of(session.turns),
    }


def details_of(session: TrainerSession) -> dict[str, Any]:
    """Returns all of a session: messages, ids, mask, log-probs, turn by turn, and its training rows."""
    mask, numbers = session.response_mask, session.recording.numbers()
    return {
        **summary_of(session),
        "messages": session.messages,
        "prompt_ids": list(session.turns[0].recorded.context_ids) if session.turns else [],
        "response_ids": session.response_ids,
        "response_mask": mask,
        "log_probs": session.response_log_probs,
        "sampled_tokens": sum(mask),
        "entered_tokens": len(mask) - sum(mask),
        "turn_list": [_turn(number, turn) for number, turn in enumerate(session.turns, 1)],
        "rows": [
            {
                "token_ids": row.token_ids,
                "loss_mask": row.loss_mask,
                "log_probs": row.log_probs,
                "response_length": row.response_length,
                "turns": [numbers[index] for index in row.generation_indices],
            }
            for row in session.rows()
        ],
    }


def _turn(number: int, turn: Turn) -> dict[str, Any]:
    return {
        "turn": number,
        "kind": turn.kind.value,
        "entered_tokens": len(turn.entered_ids),
        "sampled_tokens": len(turn.reply.output_ids),
        "kept_tokens": turn.kept_tokens,
        "counted_by": turn.counted_by.value,
        "finish_reason": turn.reply.finish_reason,
        "weight_version": turn.reply.weight_version,
        "seconds": round(turn.reply.engine_s or 0.0, 6),
    }
