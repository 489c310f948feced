"""The pages build as a site without a warning: every link leads somewhere, every page is in the navigation."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.large, pytest.mark.timeout(300)]  # a build takes minutes where ten others work

ROOT = Path(__file__).resolve().parents[3]


def build(source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet", "--fresh-env"]
    return subprocess.run([*command, str(source), str(target)], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("sphinx", reason="the extra docs is not installed")
    target = tmp_path_factory.mktemp("site")
    finished = build(ROOT / "docs", target)
    assert finished.returncode == 0, finished.stderr
    return target


def test_every_page_is_built(site: Path) -> None:
    pages = {page.stem for page in (ROOT / "docs").glob("*.md")}
    assert pages <= {page.stem for page in site.glob("*.html")}


def test_a_page_asks_no_other_host_for_anything(site: Path) -> None:
    wanted = re.compile(r'<(?:script|img|link)[^>]+(?:src|href)="((?:https?:)?//[^"]+)"')
    foreign = {page.name: found for page in site.glob("*.html") if (found := wanted.findall(page.read_text("utf-8")))}
    assert foreign == {}
    styles = "".join(path.read_text("utf-8") for path in (site / "_static").rglob("*.css"))
    assert re.findall(r"url\((?:https?:)?//[^)]+\)", styles) == []


def test_pages_come_in_a_newcomers_order(site: Path) -> None:
    navigation = re.findall(
        r'class="reference internal" href="([a-z_]+)\.html"', (site / "index.html").read_text("utf-8")
    )
    first = [name for name in dict.fromkeys(navigation) if name in ("tutorial", "slime", "architecture", "http_api")]
    assert first == ["tutorial", "slime", "architecture", "http_api"]
