"""The regression check of the benchmarks, on made-up numbers: what is a regression, what is noise, what is recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ratios import READERS, Ratio, Verdict, compare, read_ratios
from benchmarks.suite import BEGIN, BENCHES, END, keep, main, report_table

ROOT = Path(__file__).resolve().parents[3]


def ratio(*rounds: float, name: str = "buffer: write") -> Ratio:
    return Ratio(name=name, rounds=rounds)


def verdict(recorded: Ratio, measured: Ratio) -> Verdict:
    (finding,) = compare([recorded], [measured])
    return finding.verdict


def report(**ratios: tuple[float, ...]) -> dict[str, Any]:
    """A report with one ratio for each benchmark named."""
    benches = {
        name: {
            "arguments": ["--rounds", "3"],
            "seconds": 10.0,
            "load_before": 0.1,
            "caveat": "made up",
            "ratios": [{"name": f"{name}: speed", "rounds": list(rounds)}],
        }
        for name, rounds in ratios.items()
    }
    about = {"cores": 2, "processor": "none", "memory_gb": 1.0, "system": "Linux", "python": "3.11"}
    return {"machine": about, "benches": benches}


def whole_report(**ratios: tuple[float, ...]) -> dict[str, Any]:
    return report(**({bench.name: (2.0, 2.1, 2.2) for bench in BENCHES} | ratios))


def run_check(folder: Path, recorded: dict[str, Any], measured: dict[str, Any], *more: str) -> int:
    (folder / "recorded.json").write_text(json.dumps(recorded))
    (folder / "bench.json").write_text(json.dumps(measured))
    files = ["--report", str(folder / "bench.json"), "--recorded", str(folder / "recorded.json")]
    return main([*files, "--without-run", "--check", *more])


# --- one ratio -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recorded", "measured", "expected"),
    [
        (ratio(1.0, 1.0, 1.0), ratio(1.0, 1.0, 1.0), Verdict.FINE),
        (ratio(1.0, 1.0, 1.0), ratio(2.0, 2.0, 2.0), Verdict.FINE),
        (ratio(1.0, 1.0, 1.0), ratio(0.91, 0.92, 0.92), Verdict.FINE),
        (ratio(1.0, 1.0, 1.0), ratio(0.80, 0.85, 0.86), Verdict.REGRESSED),
        (ratio(0.8, 1.0, 1.2), ratio(0.65, 0.7, 0.75), Verdict.FINE),
        (ratio(0.8, 1.0, 1.2), ratio(0.5, 0.55, 0.6), Verdict.REGRESSED),
        (ratio(1.0, 1.0, 1.0), ratio(0.3, 0.5, 1.1), Verdict.NOISY),
        (ratio(1.0), ratio(0.8), Verdict.FINE),
        (ratio(1.0), ratio(0.7), Verdict.REGRESSED),
    ],
)
def test_a_ratio_is_judged_by_the_recorded_spread(recorded: Ratio, measured: Ratio, expected: Verdict) -> None:
    assert verdict(recorded, measured) is expected


# --- the command -----------------------------------------------------------------------------------------------------


def test_a_regression_fails_with_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_check(tmp_path, whole_report(), whole_report(masks=(1.0, 1.1, 1.2))) == 1
    out = capsys.readouterr().out
    assert "regressed: masks: speed: 1.10 (1.00–1.20) against a recorded 2.10 (2.00–2.20): below 1.89" in out
    assert out.count("regressed") == 1


def test_a_busy_machine_allows_no_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured = whole_report(masks=(1.0, 1.1, 1.2))
    measured["benches"]["masks"]["load_before"] = 9.0
    assert run_check(tmp_path, whole_report(), measured) == 3
    assert "the machine was busy before masks" in capsys.readouterr().out


def test_a_run_is_recorded_without_its_raw_numbers(tmp_path: Path) -> None:
    page, recorded = tmp_path / "page.md", tmp_path / "recorded.json"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    whole = whole_report()
    whole["benches"]["masks"]["found"] = {"seconds": [1, 2, 3]}
    keep(whole, recorded, page)
    text = page.read_text()
    assert "old" not in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "| speed | 2.10 (2.00–2.20) |" in text
    assert "found" not in recorded.read_text()
    assert json.loads(recorded.read_text())["benches"].keys() == whole["benches"].keys()


def test_ratios_with_two_axes_are_a_table_of_both() -> None:
    of_two = report(buffer=(1.0,))
    names = ("write of 2k", "read of 2k", "write of 1m")
    of_two["benches"]["buffer"]["ratios"] = [{"name": f"buffer: {one}, to a list", "rounds": [2.0]} for one in names]
    text = report_table(of_two)
    assert "`**, to a list (10 s" in text
    assert "| | 2k | 1m |\n|---|---|---|\n| write | 2.00 | 2.00 |\n| read | 2.00 | – |" in text


def test_half_a_run_is_not_recorded(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="lacks buffer"):
        keep(report(masks=(1.0,)), tmp_path / "recorded.json", ROOT / "docs" / "benchmarks.md")
    assert not (tmp_path / "recorded.json").exists()


# --- what is there ---------------------------------------------------------------------------------------------------


def test_every_benchmark_of_the_set_exists_and_can_be_read() -> None:
    assert [bench.name for bench in BENCHES] == list(READERS)
    assert all((ROOT / "benchmarks" / f"bench_{bench.name}.py").exists() for bench in BENCHES)
    assert sum(bench.limit_s for bench in BENCHES) <= 20 * 60


def test_ratios_are_read_from_what_the_programs_write() -> None:
    found = {
        "buffer": {"rates": [{"item": "64KB", "what": "write", "buffer": [5.0, 6.0], "ancestor": [10.0, 10.0]}]},
        "masks": {"results": [{"pair": "qwen", "question": "new", "ancestor_s": [2.0, 4.0], "ours_s": [1.0, 1.0]}]},
        "gateway": {
            "direct c=1": {"lowest_round": 10.0, "requests_per_s": 10.0, "highest_round": 10.0},
            "gateway c=1": {"lowest_round": 1.0, "requests_per_s": 2.0, "highest_round": 3.0},
            "load": 1.0,
        },
        "scheduler": {
            "rounds": {"runner": [{"of_ideal": 0.9, "seconds": 10}], "threads": [{"of_ideal": 0.8, "seconds": 11}]}
        },
        "episodes": [
            {"mode": mode, "steps": steps, "episodes": 1, "to_engine": engine, "stored": stored}
            for mode, steps, engine, stored in (
                ("incremental", 10, 100, 300),
                ("incremental", 25, 400, 500),
                ("history", 10, 100, 300),
                ("history", 25, 200, 750),
            )
        ],
    }
    rounds = {name: [one.rounds for one in read_ratios(name, written)] for name, written in found.items()}
    assert rounds == {
        "buffer": [(0.5, 0.6)],
        "masks": [(2.0, 4.0)],
        "gateway": [(0.1, 0.2, 0.3)],
        "scheduler": [(0.9,), (1.1,)],
        "episodes": [(2.0,), (1.5,), (1.0,)],
    }
