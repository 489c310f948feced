"""The log-probs of training rows: those that were recorded, and those that transformers computes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from pathlib import Path

from slime.utils.types import Sample

PROGRAM = Path(__file__).with_name("recompute_log_probs.py")


def recorded_of(sample: Sample) -> list[tuple[int, float]]:
    """The trained positions of a sample with the log-probs that came with them."""
    assert sample.loss_mask is not None
    assert sample.rollout_log_probs is not None
    start = len(sample.tokens) - sample.response_length
    columns = enumerate(zip(sample.loss_mask, sample.rollout_log_probs, strict=True), start)
    return [(at, log_prob) for at, (mask, log_prob) in columns if mask]


def recomputed(python: str, model: str, rows: Iterable[Iterable[int]]) -> list[list[float]]:
    """What transformers computes in float32; entry ``at`` of a row is the log-prob of its token ``at``."""
    tokens = json.dumps([list(map(int, row)) for row in rows])
    command = [python, str(PROGRAM), model]
    done = subprocess.run(command, input=tokens, capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == 0, done.stderr[-2000:]
    return [[0.0, *row] for row in json.loads(done.stdout)]
