"""What memory is left: the machine's, or the control group's where that is less."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_plugins.rollout_buffer.trainer.delivery_conversion import available_bytes

MIB = 1 << 20


@pytest.mark.parametrize(
    ("limit", "left"),
    [("max", 8 * MIB), (str(10 * MIB), 10 * MIB - 5 * MIB + 2 * MIB), (str(4 * MIB), MIB), (None, 8 * MIB)],
)
def test_the_smaller_of_machine_and_control_group_counts(tmp_path: Path, limit: str | None, left: int) -> None:
    (tmp_path / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {8 * 1024} kB\n")
    if limit is not None:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text(str(5 * MIB))
        (tmp_path / "memory.stat").write_text(f"anon 7\ninactive_file {2 * MIB}\n")
    assert available_bytes(tmp_path / "meminfo", tmp_path) == left
