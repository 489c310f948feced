"""The programs that make input files, run as a user runs them, and the files that ship."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_plugins.rollout_buffer.tools.assign_instance_id import assign_instance_ids, main

ROOT = Path(__file__).resolve().parents[3]
DATA = ROOT / "data"
DEMO_ANDROID_WORLD = DATA.parent / "slime_plugins/rollout_buffer/assets/demo_android_world.jsonl"
PACKAGED = ROOT / "slime_plugins" / "rollout_buffer" / "tools" / "assign_instance_id.py"


def run(program: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(program), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=program.parent)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# ---- assign_instance_id ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", [PACKAGED, ROOT / "tools" / "assign_instance_id.py"])
def test_both_paths_number_the_lines_of_a_file(program: Path, tmp_path: Path) -> None:
    problems = tmp_path / "problems.jsonl"
    problems.write_text('{"prompt": "ä"}\n\n{"prompt": "b"}\n', encoding="utf-8")
    done = run(program, "--input_path", problems)
    assert done.returncode == 0, done.stderr
    assert "2 lines, 2 of them with a new instance_id" in done.stdout
    assert lines_of(tmp_path / "problems_instance_id.jsonl") == [
        {"prompt": "ä", "instance_id": "math_0"},
        {"prompt": "b", "instance_id": "math_1"},
    ]


def test_task_type_and_output_path_are_the_users(tmp_path: Path) -> None:
    problems, output = tmp_path / "problems.jsonl", tmp_path / "out.jsonl"
    problems.write_text("{}\n", encoding="utf-8")
    arguments = ["--input_path", str(problems), "--task_type", "code", "--output_path", str(output)]
    assert main(arguments) == 0
    assert lines_of(output) == [{"instance_id": "code_0"}]


@given(st.lists(st.none() | st.integers(0, 5) | st.sampled_from(["math_0", "math_1", "own", ""]), max_size=8))
def test_given_ids_stay_and_new_ones_avoid_them(given_ids: list[Any]) -> None:
    lines = [{} if given_id is None else {"instance_id": given_id} for given_id in given_ids]
    texts = [str(given_id) for given_id in given_ids if given_id not in (None, "")]
    if len(set(texts)) != len(texts):
        with pytest.raises(ValueError, match="already"):
            assign_instance_ids(lines, "math")
        return
    numbered = [line["instance_id"] for line in assign_instance_ids(lines, "math")]
    assert len(set(numbered)) == len(lines)
    assert all(new == str(old) for new, old in zip(numbered, given_ids, strict=True) if old not in (None, ""))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b'{"instance_id": "a"}\n{"instance_id": "a"}\n', "line 2: instance_id 'a' is that of line 1 already"),
        (b'{"instance_id": [1]}\n', "line 1: instance_id must be text or a whole number"),
        (b"{}\n{broken\n", "line 2 is not JSON"),
        (b"[1]\n", "line 1 is not a JSON object"),
        (b"\n", "has no lines"),
        (b"PAR1\xff\xfe", "not a UTF-8 text file"),
    ],
)
def test_a_bad_file_gets_a_sentence_and_nothing_is_written(
    content: bytes, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    problems = tmp_path / "problems.jsonl"
    problems.write_bytes(content)
    assert main(["--input_path", str(problems)]) == 2
    assert sentence in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [problems]


def test_a_missing_file_or_folder_gets_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--input_path", str(tmp_path / "none.jsonl")]) == 2
    problems = tmp_path / "problems.jsonl"
    problems.write_text("{}\n", encoding="utf-8")
    assert main(["--input_path", str(problems), "--output_path", str(tmp_path / "no" / "out.jsonl")]) == 2
    said = capsys.readouterr().err
    assert "No such file" in said
    assert "does not exist" in said


# ---- generate_tasks --------------------------------------------------------------------------------------------------


def test_the_task_file_that_ships_is_what_the_tool_writes(tmp_path: Path) -> None:
    done = run(ROOT / "tools" / "generate_tasks.py", "--output", tmp_path / "tasks.jsonl")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "tasks.jsonl").read_bytes() == (DATA / "tasks.jsonl").read_bytes()


def test_the_demo_file_is_what_the_tool_writes_for_its_tasks(tmp_path: Path) -> None:
    tasks = sorted({line["metadata"]["task_name"] for line in lines_of(DEMO_ANDROID_WORLD)})
    done = run(ROOT / "tools" / "generate_tasks.py", "--params", "2", "--output", tmp_path / "demo", "--tasks", *tasks)
    assert done.returncode == 0, done.stderr
    assert sorted(lines_of(tmp_path / "demo"), key=str) == sorted(lines_of(DEMO_ANDROID_WORLD), key=str)
    assert len(tasks) == 12


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--tasks", "MakeCoffee"], "MakeCoffee: not in"),
        (["--params", "21"], "--params must be between 1 and 20"),
        (["--task-list", "/no/such/list"], "No such file"),
        (["--output", "/no/such/folder/tasks.jsonl"], "No such file"),
    ],
)
def test_a_wrong_argument_gets_a_sentence_and_code_2(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    done = run(ROOT / "tools" / "generate_tasks.py", "--output", tmp_path / "x.jsonl", *arguments)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert list(tmp_path.iterdir()) == []


# ---- a curriculum ----------------------------------------------------------------------------------------------------


def by_curriculum(text: str, tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    file = tmp_path / "mine.txt"
    file.write_text(text, encoding="utf-8")
    output = tmp_path / "tasks.jsonl"
    return run(ROOT / "tools" / "generate_tasks.py", "--curriculum", file, "--output", output, *arguments)


def counted(tmp_path: Path) -> Counter[tuple[str, int]]:
    lines = lines_of(tmp_path / "tasks.jsonl")
    assert len({line["instance_id"] for line in lines}) == len(lines)
    return Counter((line["metadata"]["task_name"], line["metadata"]["params_idx"]) for line in lines)


def test_a_curriculum_chooses_tasks_variations_and_how_often_each_comes(tmp_path: Path) -> None:
    text = """
    # comments and empty lines do not count
    ContactsAdd*                           # all variations once
    ClockTimerEntry  weight=3 params=0-2,7
    BrowserMaze      params=5   weight=1
    BrowserDraw
    BrowserDraw      weight=0              # a later line wins
    """
    done = by_curriculum(text, tmp_path)
    assert done.returncode == 0, done.stderr
    expected = Counter({("ContactsAddContact", index): 1 for index in range(20)})
    expected.update({("ClockTimerEntry", index): 3 for index in (0, 1, 2, 7)})
    expected["BrowserMaze", 5] = 1
    assert counted(tmp_path) == expected
    assert "33 lines of 3 tasks" in done.stdout


def test_a_fraction_takes_that_part_of_the_variations_and_always_the_same(tmp_path: Path) -> None:
    text = "ContactsAddContact weight=0.25\nClockTimerEntry weight=2.5 params=0-9\n"
    assert by_curriculum(text, tmp_path).returncode == 0
    first = counted(tmp_path)
    written = (tmp_path / "tasks.jsonl").read_bytes()
    assert sum(count for (task, _), count in first.items() if task == "ContactsAddContact") == 5
    timer = [first["ClockTimerEntry", index] for index in range(10)]
    assert (sum(timer), min(timer), max(timer)) == (25, 2, 3)
    assert by_curriculum(text, tmp_path).returncode == 0
    assert (tmp_path / "tasks.jsonl").read_bytes() == written


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("ContactsAddContac", "line 2: no task is called ContactsAddContac; did you mean ContactsAddContact?"),
        ("Zzz*", "line 2: no task is called Zzz*"),
        ("BrowserMaze 3", "line 2: '3' is neither weight=NUMBER nor params=NUMBERS"),
        ("BrowserMaze weight=3 weight=4", "line 2: BrowserMaze is given a setting twice"),
        ("BrowserMaze weight=-1", "line 2: weight=-1: must be a number from 0 to 1000"),
        ("BrowserMaze weight=nan", "line 2: weight=nan: must be a number"),
        ("BrowserMaze weight=much", "line 2: weight=much: must be a number"),
        ("BrowserMaze weight=0.01", "line 2: weight=0.01 of 20 variations leaves nothing"),
        ("BrowserMaze weight=0.5 params=3", "line 2: weight=0.5 of 1 variations leaves nothing"),
        ("BrowserMaze params=3-", "line 2: params=3-: must be numbers and ranges"),
        ("BrowserMaze params=a", "line 2: params=a: must be numbers and ranges"),
        ("BrowserMaze params=18-20", "line 2: params=18-20: 18-20 is not within 0-19"),
        ("BrowserMaze params=4-3", "line 2: params=4-3: 4-3 is not within 0-19"),
        ("BrowserMaze params=1,0-2", "line 2: params=1,0-2 names a variation twice"),
        ("* weight=0", "mine.txt asks for no task"),
    ],
)
def test_a_wrong_line_of_a_curriculum_is_named_and_nothing_is_written(line: str, sentence: str, tmp_path: Path) -> None:
    done = by_curriculum(f"# mine\n{line}\n", tmp_path)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert not (tmp_path / "tasks.jsonl").exists()


# ---- generate_math ---------------------------------------------------------------------------------------------------


def test_the_math_file_that_ships_is_what_the_tool_writes(tmp_path: Path) -> None:
    done = run(ROOT / "tools" / "generate_math.py", "--output", tmp_path / "math.jsonl")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "math.jsonl").read_bytes() == (DATA / "demo_math.jsonl").read_bytes()
