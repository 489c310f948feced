"""Runs slime's own training code on the CPU for tests, and says what it needs for that."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from slime_plugins.rollout_buffer.supervisor.child_processes import free_port
from tests.slime_step.batches import Row
from tools.install_into_slime import Overlay

SLIME = os.environ.get("ROLLOUT_BUFFER_TEST_SLIME", "")
MEGATRON = os.environ.get("ROLLOUT_BUFFER_TEST_MEGATRON", "")
PYTHON = os.environ.get("ROLLOUT_BUFFER_TEST_SLIME_PYTHON", sys.executable)
HERE = Path(__file__).parent
LIMIT_S = 560

NEEDS_SLIME = pytest.mark.skipif(not SLIME, reason="set ROLLOUT_BUFFER_TEST_SLIME to the path of a slime checkout")
NEEDS_MEGATRON = pytest.mark.skipif(
    not MEGATRON, reason="set ROLLOUT_BUFFER_TEST_MEGATRON to a checkout of Megatron-LM with slime's patch"
)

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
EXPERTS, EXPERT_SIZE = 8, 16
OF_QWEN3_MOE = (
    *("--num-experts", str(EXPERTS), "--moe-router-topk", "2", "--moe-ffn-hidden-size", str(EXPERT_SIZE)),
    *("--moe-router-score-function", "softmax", "--moe-token-dispatcher-type", "alltoall", "--moe-layer-freq", "[1,1]"),
    *("--moe-router-load-balancing-type", "none", "--moe-aux-loss-coeff", "0", "--use-rollout-routing-replay"),
)
OF_QWEN3_5_VL = (
    *("--spec", "megatron_layer", "qwen3_5_vl_provider", "--rotary-percent", "0.5"),
    *("--apply-layernorm-1p", "--attention-output-gate"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Rows of one rollout, and slime's arguments that differ for it.

    The rows are lines as ``record_batches`` writes them, or the file that ``vision_rows`` makes, with tensors.
    """

    name: str
    rows: Sequence[Row] | Path
    changes: dict[str, Any] = field(default_factory=dict)


def checkout_with_overlay(folder: Path, slime: str = SLIME) -> Path:
    """Returns a copy of slime's checkout with our files in place."""
    for name in ("slime", "slime_plugins"):
        shutil.copytree(Path(slime) / name, folder / name, dirs_exist_ok=True)
    Overlay(folder).install()
    return folder


def make_model(folder: Path) -> Path:
    """Writes a tiny Qwen3 with random weights and this project's tokenizer, as a HuggingFace checkpoint."""
    tokenizer = Path(__file__).resolve().parents[2] / "slime_plugins/rollout_buffer/assets/chatml_tokenizer"
    shutil.copytree(tokenizer, folder, dirs_exist_ok=True)
    program = (
        "import sys, json, torch, transformers\n"
        "torch.manual_seed(0)\n"
        "model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**json.loads(sys.argv[2])))\n"
        "with torch.no_grad():\n"
        "    [weight.normal_(0, 0.2) for weight in model.parameters() if weight.dim() > 1]\n"
        "model.save_pretrained(sys.argv[1])\n"
    )
    subprocess.run(
        [PYTHON, "-c", program, str(folder), json.dumps(MODEL)], check=True, timeout=300, capture_output=True
    )
    return folder


def make_model_with_experts(folder: Path) -> Path:
    """Writes a tiny Qwen3-MoE as ``make_model`` does; its experts lie one by one, as in checkpoints of that family."""
    make_model(folder)
    program = (
        "import sys, json, torch\n"
        "from safetensors.torch import load_file, save_file\n"
        "folder, layers, experts, size = sys.argv[1], *map(int, sys.argv[2:])\n"
        "weights = load_file(folder + '/model.safetensors')\n"
        "torch.manual_seed(1)\n"
        "for layer in range(layers):\n"
        "    mlp = f'model.layers.{layer}.mlp.'\n"
        "    hidden = weights.pop(mlp + 'gate_proj.weight').shape[1]\n"
        "    del weights[mlp + 'up_proj.weight'], weights[mlp + 'down_proj.weight']\n"
        "    weights[mlp + 'gate.weight'] = torch.randn(experts, hidden)\n"
        "    for expert in range(experts):\n"
        "        for name, shape in (('gate', (size, hidden)), ('up', (size, hidden)), ('down', (hidden, size))):\n"
        "            weights[f'{mlp}experts.{expert}.{name}_proj.weight'] = torch.randn(shape) * 0.2\n"
        "save_file(weights, folder + '/model.safetensors', {'format': 'pt'})\n"
        "path = folder + '/config.json'\n"
        "config = json.load(open(path))\n"
        "config |= dict(model_type='qwen3_moe', architectures=['Qwen3MoeForCausalLM'], num_experts=experts,\n"
        "    num_experts_per_tok=2, moe_intermediate_size=size, decoder_sparse_step=1, mlp_only_layers=[],\n"
        "    norm_topk_prob=True)\n"
        "json.dump(config, open(path, 'w'))\n"
    )
    sizes = [str(MODEL["num_hidden_layers"]), str(EXPERTS), str(EXPERT_SIZE)]
    subprocess.run([PYTHON, "-c", program, str(folder), *sizes], check=True, timeout=300, capture_output=True)
    return folder


def make_vision_rollout(checkout: Path, folder: Path) -> Path:
    """Writes a tiny Qwen3.5 with vision (``model``), a rollout with pictures (``rows.pt``) and ``log_probs.json``."""
    folder.mkdir(exist_ok=True)
    # slime from the checkout, the rest of the tests from here
    path = os.pathsep.join([str(checkout), str(HERE.parents[1])])
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    command = [PYTHON, str(HERE / "vision_rows.py"), str(folder)]
    made = subprocess.run(command, cwd=checkout, env=environment, timeout=300, capture_output=True, text=True)
    if "requires the Torchvision library" in made.stderr:
        pytest.skip(f"{PYTHON} has no torchvision")
    assert made.returncode == 0, made.stderr[-3000:]
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
        "port": free_port(),
        "arguments": [*ARGUMENTS, *paths, "--actor-num-gpus-per-node", str(ranks), *arguments],
        "batches": [_written(batch, folder) for batch in batches],
    }
    plan_path.write_text(json.dumps(plan))
    logs = [folder / f"{rank}.log" for rank in range(ranks)]
    commands = [[PYTHON, str(HERE / "train_rank.py"), str(plan_path), str(rank)] for rank in range(ranks)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(checkout), MEGATRON]), "HF_HUB_OFFLINE": "1"}
    running = []
    for command, log in zip(commands, logs, strict=True):
        with log.open("w") as said:
            running.append(subprocess.Popen(command, cwd=checkout, env=environment, stdout=said, stderr=said))
    try:
        codes = [process.wait(LIMIT_S) for process in running]
    finally:
        for process in running:
            process.kill()
    assert not any(codes), "\n".join(log.read_text()[-4000:] for log in logs)
    return [json.loads(plan_path.with_suffix(f".{rank}.json").read_text()) for rank in range(ranks)]


def _written(batch: Batch, folder: Path) -> dict[str, Any]:
    if isinstance(batch.rows, Path):
        return {"name": batch.name, "rows": str(batch.rows), "changes": batch.changes}
    path = folder / f"{batch.name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in batch.rows))
    return {"name": batch.name, "rows": str(path), "changes": batch.changes}
