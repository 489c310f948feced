"""Every program in benchmarks/ runs to its end with small arguments and writes its numbers; how fast is not asked."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.fetch_tokenizers import tokenizers_folder
from tests.miniwob_browsers import MISSING, WITHOUT_A_BROWSER

ROOT = Path(__file__).resolve().parents[2]

SMALL: dict[str, tuple[str, ...]] = {
    "buffer": ("--rounds", "1", "--kinds", "2k", "--without-ancestor", "--folder", "{folder}"),
    "dashboard": ("--played", "40", "--written", "40", "--repeat", "1"),
    "episodes": ("--episodes", "1", "--steps", "2", "--modes", "history"),
    "gateway": ("--rounds", "1", "--seconds", "0.2"),
    "images": ("--rounds", "1", "--pictures", "2"),
    "masks": ("--rounds", "1", "--batch", "0", "--pairs", "qwen2.5"),
    "miniwob": ("--rounds", "1", "--pages", "1", "--episodes", "1", "--taps", "1"),
    "prompts": ("--rounds", "1", "--turns", "2", "--turn-seconds", "0.01"),
    "scheduler": ("--rounds", "1", "--episodes", "4", "--devices", "2", "--scale", "0.005"),
    "startup": ("--rounds", "1"),
}


def test_every_benchmark_is_here() -> None:
    assert {path.stem.removeprefix("bench_") for path in (ROOT / "benchmarks").glob("bench_*.py")} == set(SMALL)


@pytest.mark.large
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", sorted(SMALL))
def test_a_benchmark_runs_to_its_end(name: str, tmp_path: Path) -> None:
    if name == "masks" and not tokenizers_folder().is_dir():
        pytest.skip("real tokenizers are not there: run python tests/fetch_tokenizers.py")
    if name == "miniwob" and MISSING:
        pytest.skip(WITHOUT_A_BROWSER)
    if name == "images" and not (find_spec("torch") and find_spec("torchvision")):
        pytest.skip("torch and torchvision are not both installed")
    numbers = tmp_path / "numbers.json"
    arguments = [argument.format(folder=tmp_path) for argument in SMALL[name]]
    ended = subprocess.run(
        [sys.executable, "-m", f"benchmarks.bench_{name}", *arguments, "--json", str(numbers)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    assert json.loads(numbers.read_text())
