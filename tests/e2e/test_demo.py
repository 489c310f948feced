"""The README's first command, as its process: everything real but the phones and the model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.conftest import process_table


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_brings_48_samples_and_leaves_no_process_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "slime_plugins.rollout_buffer", "demo", "--folder", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert "All well: 48 samples" in result.stdout
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 48
    assert len({sample["reward"] for sample in samples}) > 4
    assert {sample["metadata"]["token_source"] for sample in samples} == {"generations"}
    assert all(sample["loss_mask"] is not None for sample in samples)
    assert [command for _, _, command in process_table() if str(tmp_path) in command] == []
