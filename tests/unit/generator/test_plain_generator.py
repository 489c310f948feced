"""slime's BaseGenerator and query_single_turn, for generators that import them: what they ask, send and skip."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime_plugins.rollout_buffer.errors import EngineError, InvalidPayloadError, UnavailableError
from slime_plugins.rollout_buffer.generator import BaseGenerator, base_generator, query_single_turn

QUESTION = [{"role": "user", "content": "2 + 2?"}]


class ScriptedClient:
    """An OpenAI client that answers from a script of (text, reason) pairs and errors, and keeps what it was asked."""

    def __init__(self, *script: tuple[str, str] | Exception) -> None:
        self.script = list(script)
        self.asked: list[dict[str, Any]] = []
        self.chat = SimpleNamespace(completions=self)

    def create(self, **query: Any) -> Any:
        self.asked.append(query)
        said = self.script.pop(0)
        if isinstance(said, Exception):
            raise said
        text, reason = said
        choice = SimpleNamespace(message=SimpleNamespace(content=text), finish_reason=reason)
        return SimpleNamespace(choices=[choice], usage=SimpleNamespace(completion_tokens=len(text.split())))


class ScriptedBuffer:
    """A buffer that takes items after it raised what its script says."""

    def __init__(self, *script: Exception) -> None:
        self.script = list(script)
        self.items: list[dict[str, Any]] = []

    def write(self, items: Sequence[dict[str, Any]], *, job_id: str | None = None) -> dict[str, Any]:
        if self.script:
            raise self.script.pop(0)
        self.items += items
        return {}


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime_plugins.rollout_buffer.generator.plain_generator.time.sleep", lambda seconds: None)


@pytest.fixture
def input_file(tmp_path: Path) -> str:
    """Three problems, one with a number for its id and one with none."""
    lines: list[dict[str, Any]] = [{"instance_id": "a"}, {"instance_id": 7}, {}]
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps({**line, "prompt": QUESTION, "label": "4"}) + "\n" for line in lines))
    return str(path)


def generator(**changes: Any) -> tuple[BaseGenerator, ScriptedBuffer]:
    made = BaseGenerator("http://127.0.0.1:1", "http://127.0.0.1:2", **{"num_process": 2, **changes})
    made._buffer = buffer = ScriptedBuffer()  # type: ignore[assignment]  # a scripted client in its place
    return made, buffer


def four(client: Any, prompt: Any, params: Any) -> tuple[list[dict[str, Any]], str]:
    return [*prompt, {"role": "assistant", "content": "4"}], "stop"


def test_both_modules_export_what_slimes_do() -> None:
    assert base_generator.BaseGenerator is BaseGenerator
    assert base_generator.query_single_turn is query_single_turn


def test_a_reply_that_an_update_cut_goes_on_within_its_cap() -> None:
    client = ScriptedClient(("the answer", "abort"), (" is 4", "stop"))

    messages, reason = query_single_turn(client, QUESTION, {"max_tokens": 8, "temperature": 0.5})

    assert messages == [*QUESTION, {"role": "assistant", "content": "the answer is 4"}]
    assert reason == "stop"
    assert [asked["max_tokens"] for asked in client.asked] == [8, 6]
    assert client.asked[1]["messages"][-1] == {"role": "assistant", "content": "the answer"}
    assert client.asked[1]["extra_body"] == {"continue_final_message": True}
    assert {asked["temperature"] for asked in client.asked} == {0.5}


def test_a_query_that_failed_is_made_again_and_six_failures_are_an_error() -> None:
    lucky = ScriptedClient(OSError("refused"), ("4", "stop"))
    assert query_single_turn(lucky, QUESTION, {})[0][-1]["content"] == "4"

    for said in (OSError("refused"), ("half", "abort")):
        with pytest.raises(EngineError, match="no reply in 6 tries: refused"):
            query_single_turn(ScriptedClient(said, *[OSError("refused")] * 5), QUESTION, {"max_tokens": 8})


def test_a_reply_that_an_update_cut_at_its_cap_is_whole() -> None:
    messages, reason = query_single_turn(ScriptedClient(("it is 4", "abort")), QUESTION, {"max_tokens": 3})
    assert (messages[-1]["content"], reason) == ("it is 4", "length")


def test_items_have_slimes_keys_and_text_for_an_id(input_file: str) -> None:
    made, buffer = generator(num_repeat_per_sample=2, max_tokens=9)

    made.entry(input_file, four, lambda item: float(item["messages"][-1]["content"] == item["label"]))

    assert sorted(item["instance_id"] for item in buffer.items) == ["2", "2", "7", "7", "a", "a"]
    assert len({item["uid"] for item in buffer.items}) == 6
    item = buffer.items[0]
    assert (item["reward"], item["messages"][-1]["content"]) == (1.0, "4")
    assert {"label": "4", "finish_reason": "stop", "round_number": 1, "max_tokens": 9}.items() <= item[
        "extra_info"
    ].items()


def test_an_item_is_sent_until_it_is_stored_and_a_refused_one_is_a_failure(input_file: str) -> None:
    made, buffer = generator()
    buffer.script = [UnavailableError("no room"), OSError("gone")]
    made.run(input_file, four, lambda item: 1.0)
    assert len(buffer.items) == 3

    made, buffer = generator()
    buffer.script = [InvalidPayloadError("no such instance")]
    made.run(input_file, four, lambda item: 1.0)
    assert len(buffer.items) == 2
