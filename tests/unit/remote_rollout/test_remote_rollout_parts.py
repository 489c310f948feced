"""The parts of the remote rollout protocol one by one: arithmetic, callback hosts, tokenizers, masks, tool calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime_plugins.rollout_buffer.remote_rollout.calculator import CALCULATOR_SCHEMAS, calculator, evaluate
from slime_plugins.rollout_buffer.remote_rollout.callback_hosts import CallbackHosts
from slime_plugins.rollout_buffer.remote_rollout.conversation import CountMethod
from slime_plugins.rollout_buffer.remote_rollout.errors import (
    CallbackRefusedError,
    TokenizerRefusedError,
    WrongMaskError,
)
from slime_plugins.rollout_buffer.remote_rollout.settings import TokenizerSettings
from slime_plugins.rollout_buffer.remote_rollout.tokenizer_catalog import TokenizerCatalog
from slime_plugins.rollout_buffer.remote_rollout.trainer_side.masks import EnteredTokens, check_entered_mask
from tests.chat_tokenizers import load

# --- arithmetic ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("15 * 23", "345"),
        ("15×23", "345"),
        ("0.1 + 0.2", "0.3"),
        ("-(2 - 5) ** 3", "27"),
        ("7 // 2 + 7 % 2", "4"),
        ("1 / 3", repr(1 / 3)),
        ("2^10", "1024"),
        ("1e3", "1000"),
        ("+4", "4"),
        ("3 ** 800", str(3**800)),
        ("9" * 400, "9" * 400),
    ],
)
def test_sums_have_their_results(expression: str, value: str) -> None:
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os').system('true')", "().__class__", "a + 1", "'x' * 9", "True + 1", "1j", "lambda: 1", "[1][0]",
        "1 / 0", "0 ** -1", "9 ** 9 ** 9", "9 ** 999", "10 ** 400", "3 ** 839", "2 ** 0.5", "1 if 1 else 2",
        "", "1 +", "(" * 300, "1" * 501,
        "-" * 200 + "1", "9" * 450, "print(1)", "1 << 9", "~1", "1; 2", "1\n2", "1 == 1", "nan",
    ],
)  # fmt: skip
def test_what_is_no_arithmetic_is_refused_and_never_run(expression: str) -> None:
    with pytest.raises(ValueError):
        evaluate(expression)


@pytest.mark.parametrize(
    ("name", "arguments", "value"),
    [
        ("add", {"a": 5, "b": 3}, "8"),
        ("multiply", {"a": 15, "b": 23}, "345"),
        ("subtract", {"a": "1.5", "b": "2"}, "-0.5"),
        ("divide", {"a": 1, "b": 4}, "0.25"),
        ("calculate", {"expression": "2 * (3 + 4)"}, "14"),
    ],
)
def test_each_tool_does_what_its_name_says(name: str, arguments: dict[str, Any], value: str) -> None:
    assert calculator(name, **arguments) == value
    assert name in [schema["function"]["name"] for schema in CALCULATOR_SCHEMAS]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("add", {"a": 5}), ("add", {"a": True, "b": 1}), ("add", {"a": [], "b": 1}), ("add", {"a": "x", "b": 1}),
        ("divide", {"a": 1, "b": 0}), ("power", {"a": 1, "b": 2}), ("calculate", {}), ("add", {"a": 1e308, "b": 9e999}),
    ],
)  # fmt: skip
def test_wrong_arguments_are_a_sentence(name: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"\w+ \w+"):
        calculator(name, **arguments)


# --- callback hosts --------------------------------------------------------------------------------------------------

HOSTS = CallbackHosts(("127.0.0.1", "trainer.local:9001", "*.cluster.example", "10.1.0.0/16", "[::1]:80", "fd00::1"))


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://127.0.0.1:9001", "http://127.0.0.1:9001"),
        ("http://127.0.0.1:9001/", "http://127.0.0.1:9001"),
        ("http://127.0.0.1:9001/v1", "http://127.0.0.1:9001"),
        ("http://127.0.0.1:9001/v1/chat/completions", "http://127.0.0.1:9001"),
        ("https://a.cluster.example/base", "https://a.cluster.example/base"),
        ("HTTP://TRAINER.local:9001", "http://TRAINER.local:9001"),
        ("http://10.1.2.3:8000", "http://10.1.2.3:8000"),
        ("http://[::1]", "http://[::1]"),
        ("http://[fd00::1]:9", "http://[fd00::1]:9"),
    ],
)
def test_hosts_on_the_list_are_called(url: str, base: str) -> None:
    assert HOSTS.checked(url) == base


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/latest/meta-data", "http://localhost:9001", "http://2130706433", "http://0x7f.1",
        "http://127.1", "http://[::ffff:127.0.0.1]", "http://trainer.local:9002", "http://trainer.local",
        "http://trainer.local:9001@evil.example", "http://evil.example#@trainer.local:9001", "http://cluster.example",
        "http://evilcluster.example", "http://10.2.0.1", "http://0.0.0.0:9001", "file:///etc/passwd", "ftp://127.0.0.1",
        "gopher://127.0.0.1", "//127.0.0.1", "127.0.0.1:9001", "http://", "http://127.0.0.1:99999", "http://user@127.0.0.1",
        "http://127.0.0.1/?x=1", "http://127.0.0.1\\@evil.example", "http://127.0.0.1 evil", "http://ex\u0430mple.com",
        "http://[::1]:81", "http://127.0.0.1.evil.example", "",
    ],
)  # fmt: skip
def test_everything_else_is_refused(url: str) -> None:
    with pytest.raises(CallbackRefusedError, match="is refused"):
        HOSTS.checked(url)


# --- tokenizers ------------------------------------------------------------------------------------------------------


class Loads:
    """A loader that counts, and gives a small tokenizer."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[tuple[str, str | None, bool, bool]] = []
        self.error = error

    def __call__(self, name: str, *, trusted: bool, revision: str | None, download: bool) -> Any:
        self.calls.append((name, revision, trusted, download))
        if self.error is not None:
            raise self.error
        return load("small-plain")


async def test_only_listed_names_bring_their_own_code() -> None:
    settings = TokenizerSettings(remote_code_names=frozenset({"good/code"}), download=True)
    catalog = TokenizerCatalog(settings, load=(loads := Loads()))
    await catalog.get("good/code")
    await catalog.get("other/code")
    assert [(trusted, download) for _, _, trusted, download in loads.calls] == [(True, True), (False, True)]


async def test_a_tokenizer_without_a_template_is_refused() -> None:
    bare = load("small-plain")
    catalog = TokenizerCatalog(load=lambda _, **__: _Bare(bare))
    with pytest.raises(TokenizerRefusedError, match="has no chat template"):
        await catalog.get("org/model")


class _Bare:
    def __init__(self, tokenizer: Any) -> None:
        self.chat_template = None
        self.encode = tokenizer.encode


@pytest.mark.parametrize(
    "name",
    ["/etc", "../secret", "a/../b", "./local", "a/b/c", "", "a\x00b", "x" * 2000, ".hidden/x", "tests", "a/b ", "ä/b"],
)
async def test_paths_outside_of_the_roots_are_refused(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "inside").mkdir()
    monkeypatch.chdir(tmp_path)
    catalog = TokenizerCatalog(TokenizerSettings(roots=(tmp_path / "inside",)), load=(loads := Loads()))
    with pytest.raises(TokenizerRefusedError):
        await catalog.get(name)
    assert loads.calls == []


async def test_folders_under_the_roots_are_found_by_path_and_by_name_and_links_out_of_them_are_not(
    tmp_path: Path,
) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "model").mkdir(parents=True)
    outside.mkdir()
    (root / "link").symlink_to(outside)
    catalog = TokenizerCatalog(TokenizerSettings(roots=(root,)), load=(loads := Loads()))
    await catalog.get("model", "main")
    await catalog.get(str(root / "model"))
    assert [name for name, *_ in loads.calls] == [str(root / "model")]
    with pytest.raises(TokenizerRefusedError):
        await catalog.get(str(root / "link"))


# --- masks -----------------------------------------------------------------------------------------------------------


def test_a_right_mask_passes_and_says_how_it_was_counted() -> None:
    by_text = EnteredTokens(count=3, others=((CountMethod.TEXT, lambda: 2),))
    assert check_entered_mask(None, 1, EnteredTokens(count=0)) is CountMethod.IDS
    assert check_entered_mask([], 1, EnteredTokens(count=0)) is CountMethod.IDS
    assert check_entered_mask([0, 0, 0], 2, by_text) is CountMethod.IDS
    assert check_entered_mask([0, 0], 2, by_text) is CountMethod.TEXT
    assert check_entered_mask(None, 3, EnteredTokens(count=0)) is CountMethod.IDS


@pytest.mark.parametrize("mask", [None, [], [0], [0] * 4, [1, 1, 1], [0, 0, 1], [0, 0, 2], [0, 0, None], {}, "000", 3])
def test_a_wrong_mask_names_turn_expected_and_given(mask: Any) -> None:
    with pytest.raises(WrongMaskError, match=r"^turn 4: response_mask") as caught:
        check_entered_mask(mask, 4, EnteredTokens(count=3))
    assert caught.value.detail["expected"] == 3
    assert caught.value.http_status == 422


def test_a_count_by_text_of_nothing_never_excuses_a_missing_mask() -> None:
    with pytest.raises(WrongMaskError, match="is missing"):
        check_entered_mask(None, 2, EnteredTokens(count=3, others=((CountMethod.TEXT, lambda: 0),)))
