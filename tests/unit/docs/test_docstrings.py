"""What docstrings and comments name is there: files, names, the home of a function, the files of a package."""

from __future__ import annotations

import functools
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
WORD = re.compile(r"\w+")
NAMED = re.compile(r"``([^`]+)``")
NAMED_FILE = re.compile(r"(?<![\w/.*<-])((?:[\w-]+/)*[\w*-]+\.(?:py|md|js))\b")
DOTTED = re.compile(r"([a-z_]\w*)\.(\w+)")
DOCSTRING = re.compile(r'^[ \t]*r?"""(?=\S)(.*?)"""$', re.DOTALL | re.MULTILINE)
COMMENT = re.compile(r"(?:^|\s)# (.*)$", re.MULTILINE)
DEFINED = re.compile(r"^(?:async def|def|class) (\w+)", re.MULTILINE)
CODE = (".py", ".js", ".sql", ".yaml", ".toml", ".sh", ".jinja", ".html", ".css")
OTHERS_NAMES = {
    "JSONAction": "android_world's record of an action",
    "ContinuousBatchingManager": "transformers has it, and why it is not used",
    "http.cookies": "of the standard library, and why it is not used",
    "MMDDhhmmYY.ss": "what `date` of Android takes",
    "repetition_frac": "slime's",
}
OTHERS_FILES = {
    "tokenizers.py": "a name that no file here may have",
    "bench.md": "scripts/bench writes it",
    "file.py": "stands for anybody's",
    "my_masks.py": "stands for anybody's",
    "train_async.py": "slime's",
    "convert_hf_to_torch_dist.py": "slime's",
}


@dataclass(frozen=True)
class Prose:
    """A docstring or a comment."""

    file: str
    line: int
    text: str


@dataclass(frozen=True)
class Code:
    """What there is to be named: files, words of the code, and where functions and classes are defined."""

    files: frozenset[str]
    words: frozenset[str]
    homes: dict[str, frozenset[str]]
    words_of: dict[str, frozenset[str]]


def gone_files(proses: Sequence[Prose], code: Code) -> list[str]:
    """Names of files that no file has."""
    return [
        f"{prose.file}:{prose.line}: {name}"
        for prose in proses
        for name in NAMED_FILE.findall(prose.text)
        if Path(name).name not in OTHERS_FILES and not any(_is_named(file, name) for file in code.files)
    ]


def _is_named(file: str, name: str) -> bool:
    return Path(file).match(name) if "*" in name else f"/{file}".endswith(f"/{name}")


def gone_names(proses: Sequence[Prose], code: Code) -> list[str]:
    """Names between double backticks that occur nowhere in the code."""
    return [
        f"{prose.file}:{prose.line}: {name}"
        for prose in proses
        for name in NAMED.findall(prose.text)
        if re.fullmatch(r"[A-Za-z_][\w.]*(\(\))?", name) and not NAMED_FILE.search(name)
        if name not in OTHERS_NAMES and not code.words.issuperset(WORD.findall(name))
    ]


def strayed_functions(proses: Sequence[Prose], code: Code) -> list[str]:
    """``module.function`` where the function is another module's, and nothing in that file is called ``module``."""
    return [
        f"{prose.file}:{prose.line}: {module}.{function} is at home in {', '.join(sorted(code.homes[function]))}"
        for prose in proses
        for name in NAMED.findall(prose.text)
        if (found := DOTTED.fullmatch(name)) is not None
        for module, function in [found.groups()]
        if function in code.homes and module not in code.homes[function] and module not in code.words_of[prose.file]
    ]


def wrong_lists(docstrings: dict[str, str], code: Code) -> list[str]:
    """Lists of a package's files, in its docstring, that lack one or have one too many."""
    wrong = []
    for package, docstring in docstrings.items():
        listed = {name for line in docstring.splitlines() if line.startswith("* ") for name in NAMED.findall(line)}
        if listed:
            folder = Path(package).parent
            there = {Path(file).stem for file in code.files if Path(file).parent == folder and file.endswith(".py")}
            missing = there - {"__init__", "__main__"} - listed
            wrong += [f"{package} does not list {name}" for name in sorted(missing)]
    return wrong


# --- the tree ---------------------------------------------------------------------------------------------------------


@functools.cache
def the_files() -> tuple[str, ...]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    ).stdout.splitlines()  # fmt: skip
    if not listed:
        pytest.skip("not a git checkout")
    return tuple(sorted(file for file in listed if (ROOT / file).is_file()))


@functools.cache
def the_prose() -> tuple[Prose, ...]:
    return tuple(prose for file in the_files() if file.endswith(".py") for prose in prose_of(file, _read(file)))


@functools.cache
def the_code() -> Code:
    files = the_files()
    words = {word for file in files for word in (Path(file).stem, *Path(file).parts)}
    homes: dict[str, set[str]] = {}
    words_of = {}
    for file in files:
        if file.endswith(".py"):
            words_of[file] = frozenset(WORD.findall(COMMENT.sub("", DOCSTRING.sub("", _read(file)))))
            words.update(words_of[file])
            for name in DEFINED.findall(_read(file)):
                homes.setdefault(name, set()).update((Path(file).stem, Path(file).parent.name))
        elif file.endswith(CODE):
            words.update(WORD.findall(_read(file)))
    at_home = {name: frozenset(modules) for name, modules in homes.items()}
    return Code(frozenset(files), frozenset(words), at_home, words_of)


@functools.cache
def _read(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


def prose_of(file: str, source: str) -> Iterator[Prose]:
    for pattern in (DOCSTRING, COMMENT):
        for found in pattern.finditer(source):
            yield Prose(file, source.count("\n", 0, found.start(1)) + 1, found.group(1))


# --- the claims -------------------------------------------------------------------------------------------------------


def test_files_that_docstrings_name_are_there() -> None:
    assert gone_files(the_prose(), the_code()) == []


def test_names_that_docstrings_name_are_there() -> None:
    assert gone_names(the_prose(), the_code()) == []


def test_functions_are_named_by_the_module_they_are_at_home_in() -> None:
    assert strayed_functions(the_prose(), the_code()) == []


def test_a_package_that_lists_its_files_lists_them_all() -> None:
    lists = {prose.file: prose.text for prose in the_prose() if prose.file.endswith("__init__.py") and prose.line == 1}
    assert wrong_lists(lists, the_code()) == []


def test_names_that_are_excused_are_named() -> None:
    texts = "\n".join(prose.text for prose in the_prose() if prose.file != "tests/unit/docs/test_docstrings.py")
    assert [name for name in (*OTHERS_NAMES, *OTHERS_FILES) if name not in texts] == []


CODE_OF_TWO = Code(
    files=frozenset({"pack/__init__.py", "pack/box.py", "pack/lid.py", "docs/masks.md"}),
    words=frozenset({"open_box", "box", "Lid", "lid", "pack"}),
    homes={"open_box": frozenset({"box", "pack"})},
    words_of={"pack/lid.py": frozenset({"Lid"})},
)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("see ``box.open_box`` in box.py, docs/masks.md and pack/*.py", []),
        ("see ``Lid`` of ``pack.box``, ``2 + 2`` and ``open_box()``", []),
        ("see ``crate.py``", ["crate.py"]),
        ("as pack/crate.py has it", ["pack/crate.py"]),
        ("see ``close_box``", ["close_box"]),
        ("see ``lid.open_box``", ["lid.open_box is at home in box, pack"]),
    ],
)
def test_what_is_gone_is_noticed(text: str, found: list[str]) -> None:
    proses = [Prose("pack/lid.py", 7, text)]
    told = [*gone_files(proses, CODE_OF_TWO), *gone_names(proses, CODE_OF_TWO), *strayed_functions(proses, CODE_OF_TWO)]
    assert told == [f"pack/lid.py:7: {one}" for one in found]


def test_a_file_that_a_packages_list_lacks_is_noticed() -> None:
    assert wrong_lists({"pack/__init__.py": "Boxes.\n\n* ``box`` – opens"}, CODE_OF_TWO) == [
        "pack/__init__.py does not list lid"
    ]
    assert wrong_lists({"pack/__init__.py": "Boxes.\n\n* ``box``, ``lid``"}, CODE_OF_TWO) == []
    assert wrong_lists({"pack/__init__.py": "Boxes, as ``box``."}, CODE_OF_TWO) == []
