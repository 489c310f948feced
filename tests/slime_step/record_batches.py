"""A program that plays one small rollout of every generator and mode, and records it for the tests of slime's step.

    python -m tests.slime_step.record_batches

Each is played by the services themselves (server, supervisor, runner, the scripted engine, simulated phones) and comes
through ``generate_rollout``; what is written to ``tests/data/slime_batches`` is the Samples of one batch.
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from rollout_buffer_lab.cli import demo_run as demo
from rollout_buffer_lab.mock_trainer import MockTrainer, trainer_args
from rollout_buffer_lab.run_processes import START_TIMEOUT_S
from slime.rollout.agent_rollout import reset_jobs
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.supervisor.child_processes import ChildProcess, free_port
from slime_plugins.rollout_buffer.supervisor.child_startup import wait_until_healthy

FOLDER = Path(__file__).resolve().parents[1] / "data" / "slime_batches"
ROOT = Path(__file__).resolve().parents[2]
GROUPS, SAMPLES = 2, 4
BATCHES: dict[str, tuple[str, dict[str, Any]]] = {
    "android_world_incremental": ("android_world", {"android_world": {"rollout_mode": "incremental", "max_turns": 4}}),
    "android_world_history": ("android_world", {"android_world": {"rollout_mode": "history", "max_turns": 4}}),
    "math": ("math", {}),
    "remote_rollout": ("remote_rollout", {"remote_rollout_tokenizer": "demo", "max_turns": 2}),
    "statelm": ("statelm", {"statelm": {"max_model_length": 8192}}),
}
MAX_ROWS = 2
"""Rows that are kept of a trajectory: those of edited contexts are many and long."""
KEPT = ("round_number", "source_name", "raw_reward", "token_source", "row_source", "row", "rows", "turns", "success")


@contextmanager
def played(name: str) -> Iterator[tuple[str, list[Any]]]:
    """Plays one rollout of a batch's generator; yields the URL of the buffer, which still serves, and the Samples."""
    task_type, options = BATCHES[name]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        run = Path(folder)
        task = "statelm" if task_type == "statelm" else "android_world"
        settings = demo.DemoSettings(folder=run, task=task, phones=2)
        of_math = task_type in ("math", "remote_rollout")
        input_file = ROOT / "data" / "demo_math.jsonl" if of_math else demo._input_file(settings, run)
        services = demo._processes(settings, run, input_file, Console(stderr=True))
        engine_port, url = stack.enter_context(services)
        if task_type == "remote_rollout":
            options = {**options, "remote_rollout_url": stack.enter_context(_agent_server(run))}
        args = trainer_args(
            rollout_buffer_url=url,
            rollout_buffer_job_id=name,
            rollout_task_type=task_type,
            prompt_data=str(input_file),
            rollout_batch_size=GROUPS,
            n_samples_per_prompt=SAMPLES,
            global_batch_size=GROUPS * SAMPLES,
            rollout_max_response_len=1024,
            sglang_router_ip="127.0.0.1",
            sglang_router_port=engine_port,
            hf_checkpoint=str(DEMO_TOKENIZER_PATH),
            save=str(run / "checkpoints"),
            rollout_buffer_options=options,
        )
        reset_jobs()
        (rollout,) = MockTrainer(args).train(1)
        yield url, list(rollout.samples)


def line_of(sample: Any) -> dict[str, Any]:
    """Returns what is kept of a Sample."""
    return {
        "index": sample.index,
        "group_index": sample.group_index,
        "rollout_id": sample.rollout_id,
        "tokens": sample.tokens,
        "response_length": sample.response_length,
        "loss_mask": sample.loss_mask,
        "rollout_log_probs": sample.rollout_log_probs,
        "reward": sample.reward,
        "status": sample.status.value,
        "remove_sample": sample.remove_sample,
        "weight_versions": sample.weight_versions,
        "metadata": {key: sample.metadata[key] for key in KEPT if key in sample.metadata},
    }


def record(name: str) -> None:
    """Plays one rollout and writes its Samples, a line each."""
    with played(name) as (_, samples):
        rows = [line_of(sample) for sample in samples if sample.metadata["row"] < MAX_ROWS]
    FOLDER.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (FOLDER / f"{name}.jsonl.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


@contextmanager
def _agent_server(run: Path) -> Iterator[str]:
    """Serves the remote rollout protocol, and yields where."""
    port = free_port()
    command = [*(sys.executable, "-m", "slime_plugins.rollout_buffer", "remote-rollout", "--port", str(port))]
    command += ["--tokenizer", f"demo={DEMO_TOKENIZER_PATH}", "--callback-host", "127.0.0.1"]
    process = ChildProcess("agents", command, log_file=run / "agents.log")
    try:
        health = f"http://127.0.0.1:{port}/health"
        wait_until_healthy(process, health, timeout_s=START_TIMEOUT_S, error=demo.DemoError)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.stop(20.0)


def main() -> None:
    """Records the batches named on the command line, or all of them."""
    for name in sys.argv[1:] or list(BATCHES):
        record(name)


if __name__ == "__main__":
    main()
