"""Generated pages are up to date, links between pages lead somewhere, and the README opens with its commands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def text_of(*names: str) -> str:
    return "\n".join((ROOT / name).read_text(encoding="utf-8") for name in names)


@pytest.mark.parametrize("program", ["write_command_line_docs", "write_http_api_docs"])
def test_what_a_program_writes_of_commands_routes_and_metrics_is_up_to_date(program: str) -> None:
    result = subprocess.run(
        [sys.executable, f"tools/{program}.py", "--check"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def test_links_between_pages_lead_somewhere() -> None:
    broken = []
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        targets = re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
        local = [target for target in targets if not target.startswith("http")]
        broken += [f"{page.name}: {target}" for target in local if not (page.parent / target).exists()]
    assert broken == []


def test_the_readme_opens_with_the_two_commands() -> None:
    opening = text_of("README.md")[:1200]
    assert "scripts/demo" in opening
    assert "scripts/test" in opening
    assert (ROOT / "scripts" / "demo").stat().st_mode & 0o111
    assert (ROOT / "scripts" / "test").stat().st_mode & 0o111
