"""``scripts/verify``: every test that needs a variable is in a row; a row reports what it lacks, and failures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools import verify
from tools.verify import ROOT, ROWS, Row, main, read_report, run_row

WITHOUT_A_ROW = {"ROLLOUT_BUFFER_TEST_TOKENIZERS"}
"""Where scripts/test keeps what it fetched."""


def a_row(*tests: str, lacks: str = "") -> Row:
    return Row(name="one", needs="nothing", tests=tests, lacks=lambda _: lacks)


def test_every_test_that_needs_a_variable_is_in_a_row() -> None:
    in_rows = {name for row in ROWS for name in row.tests}
    for name in in_rows:
        assert (ROOT / name).is_file(), name
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        wanted = set(re.findall(r"ROLLOUT_BUFFER_TEST_[A-Z_]+[A-Z]", path.read_text("utf-8"))) - WITHOUT_A_ROW
        if wanted and path.name not in ("test_skips.py", "test_verify.py"):
            assert path.relative_to(ROOT).as_posix() in in_rows, f"{path.name} wants {wanted}"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row.name))
def test_on_a_bare_machine_a_row_says_what_it_lacks(row: Row) -> None:
    if row.name == "torch":
        return  # this environment may have it
    assert row.lacks({"PATH": "/nowhere"})


def test_a_row_that_lacks_something_runs_nothing() -> None:
    result = run_row(a_row("tests/none.py", lacks="X is not set"), {})
    assert (result.state, result.detail) == ("missing", "X is not set")


def written(tmp_path: Path, inside: str, **counts: int) -> Path:
    told = " ".join(f'{name}="{count}"' for name, count in counts.items())
    path = tmp_path / "report.xml"
    path.write_text(f"<testsuites><testsuite {told}>{inside}</testsuite></testsuites>")
    return path


def test_a_report_is_read_by_what_passed_failed_and_was_skipped(tmp_path: Path) -> None:
    skip = '<testcase name="b"><skipped message="no engine"/></testcase>'
    fine = written(tmp_path, f'<testcase name="a"/>{skip}', tests=2, failures=0, errors=0, skipped=1)
    assert read_report(fine, 0) == ("passed", "1 passed, 1 skipped (no engine)")
    assert read_report(written(tmp_path, skip, tests=1, skipped=1), 0)[0] == "missing"
    bad = written(tmp_path, '<testcase name="a"><failure/></testcase>', tests=1, failures=1)
    assert read_report(bad, 1) == ("failed", "1 of 1: a")
    assert read_report(tmp_path / "none.xml", 3) == ("failed", "pytest ended with 3 and no report")


def test_what_was_asked_for_by_name_and_is_missing_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "ROWS", (a_row(lacks="X is not set"),))
    assert main([]) == 0
    assert main(["one"]) == 1
    assert main(["--require-all"]) == 1
    with pytest.raises(SystemExit) as ended:
        main(["two"])
    assert ended.value.code == 2
