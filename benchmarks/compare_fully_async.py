"""Compares slime's own ``fully_async_rollout`` with this buffer: speed, lag, what is never trained, CPU time.

    ROLLOUT_BUFFER_TEST_SLIME=CHECKOUT ROLLOUT_BUFFER_TEST_SLIME_PYTHON=PYTHON \
        python -m benchmarks.compare_fully_async --seeds 3 --json fully_async.json

The checkout is slime with ``slime/rollout/fully_async_rollout.py``; the Python has slime's CPU requirements. Both sides
run from one copy of the checkout with our files laid over it, in turns, with the same episodes (``sleeping_episodes``):
64 at once, 24 batches of 8 groups of 8. ``--step-s`` is the length of a training step in seconds: 0 gives cells that
are limited by their episodes; the recorded cell that is limited by training has 2.5. Bias is that of the trained
members of the first 120 instances against all of them that do not fail: later ones may be cut off by the end of the
run.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.ratios import spread
from benchmarks.servers import ROOT, is_healthy, running, serve_command
from benchmarks.sleeping_episodes import SleepingEpisode
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.supervisor.child_processes import free_port
from tools.install_into_slime import Overlay

GROUPS, MEMBERS, STEPS, CONCURRENCY = 8, 8, 24, 64
LOOKED_AT = 120
INSTANCES = 600
SIDES = ("slime", "buffer")
LIMIT_S = 900


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One side of one cell: a seed, a sigma and the length of a step.

    Shares are of those members of the first ``LOOKED_AT`` instances that do not fail. ``samples_per_s`` counts from the
    first batch on, because only one side's first batch waits for a server's start.
    """

    side: str
    seed: int
    sigma: float
    step_s: float
    samples_per_s: float
    first_batch_s: float
    lag_mean: float
    lag_p95: int
    lag_max: int
    never_trained: float
    length_bias: float
    reward_bias: float
    whole_groups: float
    processor_s: float


def result_of(cell: dict[str, Any], report: dict[str, Any], processor_s: float) -> Result:
    """Returns the numbers of a run."""
    trained = [(instance, slot) for instance, slot, _ in report["trained"]]
    lags = sorted(lag for *_, lag in report["trained"])
    episodes = {
        (instance, slot): SleepingEpisode.of(cell["seed"], cell["sigma"], instance, slot)
        for instance in range(LOOKED_AT)
        for slot in range(MEMBERS)
    }
    playable = {key: episode for key, episode in episodes.items() if not episode.fails}
    played = [playable[key] for key in trained if key in playable]
    sizes = [sum(number == instance for number, _ in trained) for instance in range(LOOKED_AT)]
    possible = [sum((instance, slot) in playable for slot in range(MEMBERS)) for instance in range(LOOKED_AT)]

    def bias(of: str) -> float:
        trained_mean = statistics.fmean(float(getattr(episode, of)) for episode in played)
        return float(trained_mean / statistics.fmean(float(getattr(episode, of)) for episode in playable.values()) - 1)

    return Result(
        side=cell["side"],
        seed=cell["seed"],
        sigma=cell["sigma"],
        step_s=cell["step_s"],
        samples_per_s=(len(trained) - report["first_batch_size"]) / (report["arrived_s"][-1] - report["arrived_s"][0]),
        first_batch_s=report["arrived_s"][0],
        lag_mean=statistics.fmean(lags),
        lag_p95=lags[int(0.95 * len(lags))],
        lag_max=lags[-1],
        never_trained=1 - len(played) / len(playable),
        length_bias=bias("seconds"),
        reward_bias=bias("reward"),
        whole_groups=statistics.fmean(size == most for size, most in zip(sizes, possible, strict=True)),
        processor_s=processor_s,
    )


def play(checkout: Path, python: str, cell: dict[str, Any]) -> Result:
    """Plays one side of one cell, with a server of its own where it needs one."""
    before = _children_s()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fully-async-")))
        prompts = folder / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"instance_id": str(n)}) + "\n" for n in range(INSTANCES)))
        port = free_port()
        cell = {
            **cell,
            "groups": GROUPS,
            "members": MEMBERS,
            "steps": STEPS,
            "concurrency": CONCURRENCY,
            "folder": str(folder),
            "prompts": str(prompts),
            "version_file": str(folder / "version"),
            "tokenizer": str(DEMO_TOKENIZER_PATH),
            "buffer_url": f"http://127.0.0.1:{port}",
        }
        if cell["side"] == "buffer":
            roots = ("--data-root", str(folder), "--data-root", str(DEMO_TOKENIZER_PATH))
            generators = ("--generator-dir", str(ROOT / "benchmarks/generators"))
            command = serve_command(port, folder, *roots, *generators)
            stack.enter_context(running(command, folder / "serve.log", lambda: is_healthy(port)))
        command = [python, "-m", "benchmarks.fully_async_trainer", json.dumps(cell)]
        environment = {**os.environ, "PYTHONPATH": str(checkout), "HF_HUB_OFFLINE": "1"}
        ended = subprocess.run(
            command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        if ended.returncode:
            raise SystemExit(f"{cell['side']} stopped:\n{ended.stderr[-4000:]}")
    return result_of(cell, json.loads(ended.stdout.splitlines()[-1]), _children_s() - before)


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def table_of(results: Sequence[Result]) -> Table:
    """Returns one row for each side of each kind of cell: medians over the seeds, and the range of the speed."""
    table = Table("sigma", "step s", "side", "samples/s", "first s", "lag mean/95%/max", "never trained", "length",
                  "reward", "whole", "processor s")  # fmt: skip
    for sigma, step_s, side in sorted({(result.sigma, result.step_s, result.side) for result in results}):
        cells = [result for result in results if (result.sigma, result.step_s, result.side) == (sigma, step_s, side)]

        def median(of: str, cells: Sequence[Result] = cells) -> float:
            return statistics.median(float(getattr(result, of)) for result in cells)

        table.add_row(
            f"{sigma:g}",
            f"{step_s:g}",
            side,
            spread([result.samples_per_s for result in cells], "{:.1f}"),
            f"{median('first_batch_s'):.1f}",
            f"{median('lag_mean'):.1f} / {median('lag_p95'):g} / {median('lag_max'):g}",
            f"{median('never_trained'):.1%}",
            f"{median('length_bias'):+.1%}",
            f"{median('reward_bias'):+.1%}",
            f"{median('whole_groups'):.0%}",
            f"{median('processor_s'):.1f}",
        )
    return table


def main() -> None:
    """Runs the cells that are asked for and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sigmas", type=float, nargs="+", default=[0.2, 0.8, 1.5])
    parser.add_argument("--step-s", type=float, nargs="+", default=[0.0, 1.5], help="seconds of a training step")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--option", action="append", default=[], metavar="KEY=JSON", help="for the buffer's payload")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    slime, python = os.environ.get("ROLLOUT_BUFFER_TEST_SLIME"), os.environ.get("ROLLOUT_BUFFER_TEST_SLIME_PYTHON")
    if not slime:
        raise SystemExit("set ROLLOUT_BUFFER_TEST_SLIME to the path of a slime checkout")
    payload = {key: json.loads(value) for key, value in (option.split("=", 1) for option in options.option)}
    console, results = Console(width=160), []
    with tempfile.TemporaryDirectory(prefix="slime-") as name:
        checkout = Path(name)
        for folder in ("slime", "slime_plugins"):
            shutil.copytree(Path(slime) / folder, checkout / folder)
        Overlay(checkout).install(trainer_only=True)
        shutil.copytree(ROOT / "benchmarks", checkout / "benchmarks")
        for seed in range(1, options.seeds + 1):
            for sigma in options.sigmas:
                for step_s in options.step_s:
                    for side in options.sides if seed % 2 else options.sides[::-1]:
                        cell = {"side": side, "seed": seed, "sigma": sigma, "step_s": step_s, "options": payload}
                        results.append(play(checkout, python or sys.executable, cell))
                        console.print(asdict(results[-1]))
    console.print(table_of(results))
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
