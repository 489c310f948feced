"""Runs slime's own training code on the CPU for tests, and says what it needs for that."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tools.install_into_slime import Overlay

SLIME = os.environ.get("ROLLOUT_BUFFER_TEST_SLIME", "")
MEGATRON = os.environ.get("ROLLOUT_BUFFER_TEST_MEGATRON", "")
PYTHON = os.environ.get("ROLLOUT_BUFFER_TEST_SLIME_PYTHON", sys.executable)
HERE = Path(__file__).parent
BATCHES = HERE.parent / "data" / "slime_batches"
LIMIT_S = 560

NEEDS_SLIME = pytest.mark.skipif(not SLIME, reason="set ROLLOUT_BUFFER_TEST_SLIME to the path of a slime checkout")
NEEDS_MEGATRON = pytest.mark.skipif(
    not MEGATRON, reason="set ROLLOUT_BUFFER_TEST_MEGATRON to a checkout of Megatron-LM with slime's patch"
)

Row = dict[str, Any]

MODEL = {
    "vocab_size": 4096,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": True,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
}
ARGUMENTS = (HERE / "arguments.txt").read_text(encoding="utf-8").split()


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Rows of one rollout as ``record_batches`` writes them, and slime's arguments that are other for this one."""

    name: str
    rows: Sequence[Row]
    changes: dict[str, Any] = field(default_factory=dict)


def recorded(name: str) -> list[Row]:
    """Returns the rows of a recorded batch."""
    return [json.loads(line) for line in gzip.decompress((BATCHES / f"{name}.jsonl.gz").read_bytes()).splitlines()]


def with_dummies(rows: Sequence[Row], trajectories: Sequence[int]) -> list[Row]:
    """Returns the rows with these trajectories replaced by dummies, as ``agent_rollout`` makes them."""
    left = [row for row in rows if row["rollout_id"] not in trajectories]
    dummies = [_dummy(next(row for row in rows if row["rollout_id"] == number)) for number in trajectories]
    return sorted([*left, *dummies], key=lambda row: row["rollout_id"])


def _dummy(row: Row) -> Row:
    empty = {"tokens": [0, 0], "response_length": 1, "loss_mask": [0], "rollout_log_probs": [0.0]}
    return {**row, **empty, "reward": 0.0, "remove_sample": True, "status": "aborted"}


def checkout_with_overlay(folder: Path, slime: str = SLIME) -> Path:
    """Returns a copy of slime's checkout with our files in place."""
    for name in ("slime", "slime_plugins"):
        shutil.copytree(Path(slime) / name, folder / name)
    Overlay(folder).install()
    return folder


def make_model(folder: Path) -> Path:
    """Writes a tiny Qwen3 with random weights and this project's tokenizer, as a HuggingFace checkpoint."""
    tokenizer = Path(__file__).resolve().parents[2] / "slime_plugins/rollout_buffer/assets/chatml_tokenizer"
    shutil.copytree(tokenizer, folder)
    program = (
        "import sys, json, torch, transformers\n"
        "torch.manual_seed(0)\n"
        "model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**json.loads(sys.argv[2])))\n"
        "with torch.no_grad():\n"
        "    [weight.normal_(0, 0.2) for weight in model.parameters() if weight.dim() > 1]\n"
        "model.save_pretrained(sys.argv[1])\n"
    )
    subprocess.run(
        [PYTHON, "-c", program, str(folder), json.dumps(MODEL)], check=True, timeout=120, capture_output=True
    )
    return folder


def train(
    checkout: Path,
    model: Path,
    folder: Path,
    batches: Sequence[Batch],
    *,
    ranks: int = 1,
    arguments: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Trains the batches one by one from the same weights; returns what each rank saw, by the batch's name."""
    folder = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
    plan_path = folder / "plan.json"
    paths = ["--hf-checkpoint", str(model), "--load", str(model), "--ref-load", str(model)]
    plan = {
        "ranks": ranks,
        "port": _free_port(),
        "arguments": [*ARGUMENTS, *paths, "--actor-num-gpus-per-node", str(ranks), *arguments],
        "batches": [_written(batch, folder) for batch in batches],
    }
    plan_path.write_text(json.dumps(plan))
    logs = [folder / f"{rank}.log" for rank in range(ranks)]
    commands = [[PYTHON, str(HERE / "train_rank.py"), str(plan_path), str(rank)] for rank in range(ranks)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(checkout), MEGATRON]), "HF_HUB_OFFLINE": "1"}
    running = [
        subprocess.Popen(command, cwd=checkout, env=environment, stdout=log.open("w"), stderr=subprocess.STDOUT)
        for command, log in zip(commands, logs, strict=True)
    ]
    try:
        codes = [process.wait(LIMIT_S) for process in running]
    finally:
        for process in running:
            process.kill()
    assert not any(codes), "\n".join(log.read_text()[-4000:] for log in logs)
    return [json.loads(plan_path.with_suffix(f".{rank}.json").read_text()) for rank in range(ranks)]


def _written(batch: Batch, folder: Path) -> dict[str, Any]:
    path = folder / f"{batch.name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in batch.rows))
    return {"name": batch.name, "rows": str(path), "changes": batch.changes}


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])
