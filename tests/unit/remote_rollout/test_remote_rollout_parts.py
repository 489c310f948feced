"""The parts of the remote rollout protocol one by one: arithmetic, callback hosts, tokenizers, masks, tool calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.errors import ConfigError, InvalidPayloadError
from slime_plugins.rollout_buffer.protocol.request_models import parse
from slime_plugins.rollout_buffer.remote_rollout.bodies import CompletionBody, EndBody, RolloutBody
from slime_plugins.rollout_buffer.remote_rollout.calculator import CALCULATOR_SCHEMAS, calculator, work_out
from slime_plugins.rollout_buffer.remote_rollout.callback_hosts import CallbackHosts
from slime_plugins.rollout_buffer.remote_rollout.errors import (
    CallbackRefusedError,
    TokenizerRefusedError,
    WrongMaskError,
)
from slime_plugins.rollout_buffer.remote_rollout.openai_tool_calls import calls_of, message_with_calls
from slime_plugins.rollout_buffer.remote_rollout.settings import AgentSettings, TokenizerSettings, TrainerSettings
from slime_plugins.rollout_buffer.remote_rollout.tokenizer_catalog import TokenizerCatalog
from slime_plugins.rollout_buffer.remote_rollout.trainer_side.masks import Count, Entered, check_mask
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
    ],
)
def test_sums_have_their_results(expression: str, value: str) -> None:
    assert work_out(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os').system('true')", "().__class__", "a + 1", "'x' * 9", "True + 1", "1j", "lambda: 1", "[1][0]",
        "1 / 0", "0 ** -1", "9 ** 9 ** 9", "9 ** 999", "2 ** 0.5", "1 if 1 else 2", "", "1 +", "(" * 300, "1" * 501,
        "-" * 200 + "1", "9" * 450, "print(1)", "1 << 9", "~1", "1; 2", "1\n2", "1 == 1", "nan",
    ],
)  # fmt: skip
def test_what_is_no_arithmetic_is_refused_and_never_run(expression: str) -> None:
    with pytest.raises(ValueError):
        work_out(expression)


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
    assert calculator(name, arguments) == value
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
        calculator(name, arguments)


# --- callback hosts --------------------------------------------------------------------------------------------------

HOSTS = CallbackHosts(("127.0.0.1", "trainer.local:9001", "*.cluster.example", "10.1.0.0/16", "[::1]:80"))


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


@pytest.mark.parametrize("entry", ["http://host", "host/path", "10.0.0.0/99", "", "user@host", "host:port"])
def test_a_wrong_entry_is_found_at_start(entry: str) -> None:
    with pytest.raises(ConfigError):
        CallbackHosts((entry,))


# --- tokenizers ------------------------------------------------------------------------------------------------------


class Loads:
    """A loader that counts, and gives a small tokenizer."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[tuple[str, str | None, bool, bool]] = []
        self.error = error

    def __call__(self, name: str, revision: str | None, trusted: bool, download: bool) -> Any:
        self.calls.append((name, revision, trusted, download))
        if self.error is not None:
            raise self.error
        return load("small-plain")


async def test_a_tokenizer_is_loaded_once_for_all_who_ask_at_once() -> None:
    catalog = TokenizerCatalog(load=(loads := Loads()))
    found = await asyncio.gather(*(catalog.get("org/model", "main") for _ in range(5)))
    assert len({id(one) for one in found}) == 1
    await catalog.get("org/model", "v2")
    assert loads.calls == [("org/model", "main", False, False), ("org/model", "v2", False, False)]


async def test_the_tokenizers_used_last_are_kept() -> None:
    catalog = TokenizerCatalog(TokenizerSettings(max_cached=2), load=(loads := Loads()))
    for name in ("a", "b", "a", "c", "a", "b"):
        await catalog.get(name)
    assert [name for name, *_ in loads.calls] == ["a", "b", "c", "b"]
    assert catalog.held == 2


async def test_only_listed_names_bring_their_own_code() -> None:
    settings = TokenizerSettings(remote_code_names=frozenset({"good/code"}), download=True)
    catalog = TokenizerCatalog(settings, load=(loads := Loads()))
    await catalog.get("good/code")
    await catalog.get("other/code")
    assert [(trusted, download) for _, _, trusted, download in loads.calls] == [(True, True), (False, True)]


async def test_a_load_that_failed_is_a_sentence_and_is_tried_again() -> None:
    catalog = TokenizerCatalog(load=(loads := Loads(OSError("not in the cache\nmore"))))
    with pytest.raises(
        TokenizerRefusedError, match=r"'org/model' at revision 'v1' cannot be loaded: not in the cache$"
    ):
        await catalog.get("org/model", "v1")
    loads.error = None
    assert (await catalog.get("org/model", "v1")).prompt([{"role": "user", "content": "?"}])


async def test_a_tokenizer_without_a_template_is_refused() -> None:
    bare = load("small-plain")
    catalog = TokenizerCatalog(load=lambda *_: _Bare(bare))
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


async def test_the_demo_tokenizer_is_always_there() -> None:
    catalog = TokenizerCatalog()
    by_name = await catalog.get("demo", "main")
    assert by_name is await catalog.get(str(DEMO_TOKENIZER_PATH))


# --- masks -----------------------------------------------------------------------------------------------------------


def test_a_right_mask_passes_and_says_how_it_was_counted() -> None:
    by_text = Entered(count=3, others=((Count.TEXT, lambda: 2),))
    assert check_mask(None, 1, Entered(count=0)) is Count.IDS
    assert check_mask([], 1, Entered(count=0)) is Count.IDS
    assert check_mask([0, 0, 0], 2, by_text) is Count.IDS
    assert check_mask([0, 0], 2, by_text) is Count.TEXT
    assert check_mask(None, 3, Entered(count=0)) is Count.IDS


@pytest.mark.parametrize("mask", [None, [], [0], [0] * 4, [1, 1, 1], [0, 0, 1], [0, 0, 2], [0, 0, None], {}, "000", 3])
def test_a_wrong_mask_names_turn_expected_and_given(mask: Any) -> None:
    with pytest.raises(WrongMaskError, match=r"^turn 4: response_mask") as caught:
        check_mask(mask, 4, Entered(count=3))
    assert caught.value.detail["expected"] == 3
    assert caught.value.http_status == 422


def test_a_count_by_text_of_nothing_never_excuses_a_missing_mask() -> None:
    with pytest.raises(WrongMaskError, match="is missing"):
        check_mask(None, 2, Entered(count=3, others=((Count.TEXT, lambda: 0),)))


# --- tool calls ------------------------------------------------------------------------------------------------------


def test_calls_are_read_from_the_text_and_from_openais_form() -> None:
    text = (
        'So:\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n<tool_call>{"name": "b"}</tool_call>'
    )
    assert [(c.name, dict(c.arguments)) for c in calls_of({"content": text}, 2)] == [("add", {"a": 1}), ("b", {})]
    message = message_with_calls(text, 2)
    assert message["content"] == "So:"
    assert [c["id"] for c in message["tool_calls"]] == ["call_2_0", "call_2_1"]
    assert [c.name for c in calls_of(message, 2)] == ["add", "b"]


@pytest.mark.parametrize(
    "text", ["<tool_call>{broken</tool_call>", '<tool_call>{"name": "a"}</tool_call> and more', "<tool_call>{}"]
)
def test_text_that_is_no_clean_call_stays_as_it_is(text: str) -> None:
    assert message_with_calls(text, 1) == {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    "call",
    [
        {}, "text", {"function": {"name": ""}}, {"function": {"name": "a", "arguments": "[1]"}},
        {"function": {"name": "a", "arguments": "{"}}, {"function": {"name": 3}},
    ],
)  # fmt: skip
def test_a_call_that_cannot_be_made_has_a_problem(call: Any) -> None:
    (found,) = calls_of({"tool_calls": [call]}, 1)
    assert found.problem


# --- bodies and settings ---------------------------------------------------------------------------------------------


def test_nulls_and_unknown_fields_of_strangers_are_taken() -> None:
    body = {
        "rollout_id": "r", "server_url": "http://x", "messages": [{"role": "user", "content": "?"}], "max_turns": None,
        "metadata": None, "tool_server_url": None, "tokenizer_name": None, "sampling_params": None, "what": 1,
    }  # fmt: skip
    request = parse(RolloutBody, body)
    assert (request.max_turns, request.max_tokens_total, request.metadata) == (10, 8192, {})


@pytest.mark.parametrize(
    "changes", [{"n": 2}, {"stream": True}, {"max_tokens": 0}, {"temperature": "hot"}, {"top_p": 0}]
)
def test_turns_are_one_reply_and_no_stream(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidPayloadError, match=next(iter(changes))):
        parse(CompletionBody, {"rollout_id": "r", "messages": [{"role": "user"}], **changes})


def test_the_end_takes_the_rollout_servers_answer_and_own_fields_win() -> None:
    final = {"status": "COMPLETED", "finish_reason": "max_turns", "metrics": {"num_llm_calls": 2}, "final_messages": []}
    end = parse(EndBody, {"reward": 1, "finish_reason": "stop", "final_response": final})
    assert (end.finish_reason, end.metrics, end.failed) == ("stop", {"num_llm_calls": 2}, False)
    assert parse(EndBody, {"status": "ERROR"}).failed
    assert parse(EndBody, {"finish_reason": "abort"}).failed


@pytest.mark.parametrize(
    "build",
    [
        lambda: AgentSettings(turn_timeout_s=0), lambda: AgentSettings(tries=0), lambda: TrainerSettings(idle_s=0),
        lambda: TrainerSettings(max_sessions=0), lambda: TokenizerSettings(max_cached=0),
    ],
)  # fmt: skip
def test_impossible_settings_are_refused(build: Callable[[], object]) -> None:
    with pytest.raises(ConfigError):
        build()


@pytest.mark.parametrize(
    "inside",
    ["[" * 100_000, '{"name": "f", "arguments": {"n": NaN}}', '{"name": "f", "arguments": "{\\"n\\": Infinity}"}'],
)
def test_a_call_that_is_no_json_is_a_problem_and_no_error(inside: str) -> None:
    inside = inside if inside.startswith("{") else f'{{"name": "f", "arguments": {inside}}}'
    (call,) = calls_of({"content": f"<tool_call>{inside}</tool_call>"}, 0)
    assert call.problem is not None
    assert "JSON" in call.problem


def test_a_call_that_is_only_thought_of_is_not_made() -> None:
    thought, meant = (f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>' for name in ("bad", "good"))
    text = f"<think>perhaps {thought}</think>\n{meant}"
    assert [call.name for call in calls_of({"content": text}, 0)] == ["good"]
    message = message_with_calls(text, 0)
    assert message["content"] == f"<think>perhaps {thought}</think>"
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["good"]
    assert message_with_calls(f"<think>{thought}</think> no", 0) == {
        "role": "assistant",
        "content": f"<think>{thought}</think> no",
    }
