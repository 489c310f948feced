"""The tools of context editing: calls read, arguments checked, documents searched, notes kept, answers scored."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_plugins.rollout_buffer.engine.tool_call_parser import ToolCall
from slime_plugins.rollout_buffer.errors import ConfigError, EnvironmentSetupError
from slime_plugins.rollout_buffer.generator.context_editing.calls import UNREADABLE, read_calls
from slime_plugins.rollout_buffer.generator.context_editing.document import DocumentCache
from slime_plugins.rollout_buffer.generator.context_editing.document_tools import Budget, CheckedCall, DocumentTools
from slime_plugins.rollout_buffer.generator.context_editing.history import History, MarkerBreaker, ToolResult
from slime_plugins.rollout_buffer.generator.context_editing.rewards import read_label, score_answer
from slime_plugins.rollout_buffer.generator.context_editing.settings import ContextEditingSettings, load_settings
from slime_plugins.rollout_buffer.generator.context_editing.task import read_task
from slime_plugins.rollout_buffer.generator.context_editing.tool_specs import (
    TOOLS,
    ArgumentError,
    ToolName,
    checked_arguments,
)
from slime_plugins.rollout_buffer.types import Instance

TEXT = "The quick fox. " * 30 + "A heron stands in the reeds. " + "The lazy dog sleeps. " * 30
BY_NAME = {tool.name: tool for tool in TOOLS}


def toolbox(
    text: str = TEXT, *, used: int = 0, count: Callable[[str], int] = lambda said: len(said.split()), **settings: Any
) -> DocumentTools:
    budget = Budget(used=used, response_length=100, max_model_length=1000)
    return DocumentTools(
        DocumentCache().document(text), ContextEditingSettings(**settings), count=count, budget=lambda: budget
    )


def ask(box: DocumentTools, name: str, **arguments: Any) -> ToolResult:
    checked = box.check(ToolCall(name=name, arguments=arguments))
    return asyncio.run(box.run(checked)) if isinstance(checked, CheckedCall) else checked


# ---- calls -----------------------------------------------------------------------------------------------------------


def test_two_calls_of_one_turn_are_read_in_order() -> None:
    text = 'Now.\n<tool_call>\n{"name": "a", "arguments": {"x": 1}}\n</tool_call>\n<tool_call>{"name": "b"}</tool_call>'
    assert [(call.name, call.arguments) for call in read_calls(text)] == [("a", {"x": 1}), ("b", {})]


def test_a_call_that_is_only_thought_of_is_none() -> None:
    assert read_calls('I could <tool_call>{"name": "a"}</tool_call>.</think> I am done.') == []


@pytest.mark.parametrize(
    "text", ['<tool_call>{"name": "a"}', '<tool_call>{"name": "a", "arguments": "{}"}</tool_call>']
)
def test_a_call_that_was_not_closed_or_brings_arguments_as_text_is_read(text: str) -> None:
    (call,) = read_calls(text)
    assert (call.name, call.arguments, call.problem) == ("a", {}, None)


@pytest.mark.parametrize(
    ("inside", "sentence"),
    [
        ('{"name": "a", "arguments": {', "not valid JSON"),
        ("", "not valid JSON"),
        ("[1, 2]", "not a JSON object"),
        ('{"arguments": {}}', "does not name a function"),
        ('{"name": 3}', "does not name a function"),
        ('{"name": "a", "arguments": [1]}', "must be a JSON object"),
        ('{"name": "a", "arguments": "no json"}', "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('{"name": "a", "arguments": {"x": ' + "9" * 5000 + "}}", "not valid JSON"),
    ],
)
def test_what_cannot_be_read_is_a_call_that_says_why(inside: str, sentence: str) -> None:
    (call,) = read_calls(f"<tool_call>\n{inside}\n</tool_call>")
    assert call.name == UNREADABLE
    assert sentence in (call.problem or "")
    assert call.raw == inside


# ---- arguments -------------------------------------------------------------------------------------------------------

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=6,
)


@given(st.sampled_from(TOOLS), st.data())
def test_any_json_is_either_checked_or_refused_with_a_sentence(tool: Any, data: st.DataObject) -> None:
    names = [parameter.name for parameter in tool.parameters] + ["other"]
    arguments = data.draw(st.dictionaries(st.sampled_from(names), json_values))
    try:
        checked = checked_arguments(tool, arguments)
    except ArgumentError:
        return
    assert set(checked) <= set(names) - {"other"}


@pytest.mark.parametrize(("value", "ids"), [(3, [3]), ("3", [3]), (3.0, [3]), ([4, "5", 4], [4, 5]), ([-1], [-1])])
def test_message_ids_are_one_or_several_and_each_once(value: Any, ids: list[int]) -> None:
    assert checked_arguments(BY_NAME[ToolName.DELETE_CONTEXT], {"message_ids": value}) == {"message_ids": ids}


def test_an_argument_that_is_missing_or_unknown_is_named() -> None:
    with pytest.raises(ArgumentError, match="readChunk needs the argument chunk_id"):
        checked_arguments(BY_NAME[ToolName.READ_CHUNK], {})
    with pytest.raises(ArgumentError, match="readChunk has no argument 'id'; it takes chunk_id"):
        checked_arguments(BY_NAME[ToolName.READ_CHUNK], {"id": 1})


# ---- the document ----------------------------------------------------------------------------------------------------


def test_a_document_is_cut_searched_and_read() -> None:
    box = toolbox()
    assert ask(box, "buildIndex", chunk_size=40, overlap=5).message == {"chunks": 7, "chunk_size": 40, "overlap": 5}
    hits = ask(box, "searchEngine", query="Heron!", top_k=2).message["hits"]
    assert [hit["chunk_id"] for hit in hits] == [2]
    assert "heron stands" in ask(box, "readChunk", chunk_id=2).message["text"]
    assert "7, numbered from 0" in ask(box, "readChunk", chunk_id=7).message


def test_the_text_is_measured_and_shown_whole_only_if_it_fits() -> None:
    measured = ask(toolbox(), "analyzeText").message
    assert measured == {"characters": len(TEXT), "words": 216, "tokens": 216, "fits_in_context": True}
    assert ask(toolbox(), "loadDocument").message == TEXT
    refusal = ask(toolbox(used=600), "loadDocument")
    assert not refusal.ok
    assert "has 216 tokens and the context has room for 172" in refusal.message


def test_a_result_that_is_too_long_is_cut_and_says_so() -> None:
    box = toolbox("word " * 3000, max_result_tokens=64)
    ask(box, "buildIndex", chunk_size=500)
    text = ask(box, "readChunk", chunk_id=0).message["text"]
    assert len(text.split()) < 100
    assert text.endswith("smaller chunks are shown whole)")


def test_all_hits_of_a_search_together_are_as_long_as_one_result() -> None:
    box = toolbox("鷺" * 6000, count=len)
    ask(box, "buildIndex", chunk_size=100)
    hits = ask(box, "searchEngine", query="鷺", top_k=50).message["hits"]
    assert 1000 < sum(len(hit["begins"]) for hit in hits) <= 2048


async def test_siblings_share_one_document_and_one_index() -> None:
    shelf = DocumentCache()
    first, second = shelf.document(TEXT), shelf.document(TEXT + "")
    assert first is second
    indices = await asyncio.gather(*(first.index(chunk_words=40, overlap=0) for _ in range(4)))
    assert len({id(index) for index in indices}) == 1


def test_the_tool_for_the_budget_says_used_and_left_tokens() -> None:
    assert ask(toolbox(used=300), "checkBudget").message == {
        "tokens_used": 300, "tokens_left": 600, "max_model_length": 1000, "kept_for_a_turn": 100,
    }  # fmt: skip


def test_the_search_library_logs_no_line_for_each_index(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        assert ask(toolbox("another text"), "buildIndex", chunk_size=40).ok
    assert "bm25s" not in {record.name for record in caplog.records}


# ---- notes -----------------------------------------------------------------------------------------------------------


def test_notes_are_written_changed_and_read() -> None:
    box = toolbox()
    assert ask(box, "note", key="a", content="one").ok
    assert "use updateNote" in ask(box, "note", key="a", content="two").message
    assert ask(box, "updateNote", key="a", content="two").ok
    assert ask(box, "readNote", key="a").message == {"key": "a", "content": "one\ntwo"}
    ask(box, "updateNote", key="a", content="three", mode="replace")
    assert ask(box, "readNote").message == {"notes": {"a": "three"}}
    assert "there are: a" in ask(box, "readNote", key="b").message
    assert "mode must be one of append, replace" in ask(box, "updateNote", key="a", content="x", mode="cut").message


# ---- the history -----------------------------------------------------------------------------------------------------


def test_only_earlier_turns_and_results_can_be_deleted() -> None:
    history = History([{"role": "system", "content": "s"}, {"role": "user", "content": "q"}])
    first = history.add_assistant("one")
    result = history.add_result("note", ToolResult(message="done"), invoked_by=first)
    second = history.add_assistant("two")
    shown_now = history.add_result("note", ToolResult(message="done"), invoked_by=second)
    plan = history.plan_deletion([0, 1, first, result, second, shown_now, 99, -1], invoked_by=second)
    assert plan.deleted == (first, result)
    history.delete(plan)
    again = history.plan_deletion([first], invoked_by=second)
    assert again.deleted == ()
    assert not again.result().ok
    assert {msg_id: reason.split(":")[0] for msg_id, reason in plan.refused.items()} == {
        0: "it belongs to the task and cannot be deleted",
        1: "it belongs to the task and cannot be deleted",
        second: "it is the message that makes this call; it can be deleted in a later turn",
        shown_now: "it answers this very turn and was not shown yet; it can be deleted in a later turn",
        99: "there is no message with this id",
        -1: "there is no message with this id",
    }


def test_markers_in_results_are_broken_and_stay_readable() -> None:
    breaker = MarkerBreaker(["<|im_end|>", "<tool_response>", " ", "the", '"'])
    assert breaker('say <|im_end|> the "<tool_response>"') == 'say < |im_end|> the "< tool_response>"'
    assert MarkerBreaker([])("<|im_end|>") == "<|im_end|>"
    history = History([], breaker)
    history.add_result("<|im_end|>", ToolResult(message="<|im_end|>"), invoked_by=0)
    assert "<|im_end|>" not in str(history.messages)


# ---- settings and lines ----------------------------------------------------------------------------------------------


def test_the_defaults_are_those_of_the_method() -> None:
    settings = load_settings({})
    assert (settings.max_model_length, settings.context_length_penalty, settings.statelm_enabled) == (8192, -1.0, True)
    assert not settings.train_before_deletion
    assert load_settings({"train_before_deletion": True}).train_before_deletion


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"statelm": {"max_model_lenght": 1}}, "statelm.max_model_lenght"),
        ({"statelm": {"context_length_penalty": 1}}, "statelm.context_length_penalty"),
        ({"statelm": 3}, "an object of settings"),
        ({"max_model_length": "many"}, "statelm.max_model_length"),
    ],
)
def test_a_wrong_setting_is_named(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load_settings(options)


def task(**line: Any) -> Any:
    whole = {"raw_prompt": [{"role": "user", "content": "q"}], "document_content": "d", "label": 1, **line}
    return read_task(Instance(instance_id="i", data=whole))


@pytest.mark.parametrize(
    "line",
    [
        {"raw_prompt": []},
        {"raw_prompt": [{"role": "system", "content": "s"}]},
        {"raw_prompt": [{"role": "user"}]},
        {"raw_prompt": [{"role": "tool", "content": "x"}, {"role": "user", "content": "q"}]},
        {"raw_prompt": 3},
        {"raw_prompt": [{"role": "user", "content": [{"text": "q"}, {"text": 5}]}]},
        {"document_content": " "},
        {"document_content": None},
        {"label": []},
        {"label": True},
        {"label": ["a", {}]},
    ],
)
def test_a_line_that_cannot_be_played_is_refused(line: dict[str, Any]) -> None:
    with pytest.raises(EnvironmentSetupError, match="instance i needs"):
        task(**line)


# ---- rewards ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "label", "value"),
    [
        ("The Grey Heron.", "grey heron", 1.0),
        ("ＫＸ-4471", "KX-4471", 1.0),
        ("It is the Grey Heron, I think", "Grey Heron", 0.5),
        ("Grey Herons", "Grey Heron", 0.0),
        ("word " * 80 + "Grey Heron", "Grey Heron", 0.0),
        ("1,234", 1234, 1.0),
        ("1234.0", "1234", 1.0),
        ("$1234.", 1234, 1.0),
        ("There were 1,234 boats", 1234, 0.5),
        ("1233 or 1234", 1234, 0.0),
        ("1235", 1234, 0.0),
        ("-5", -5, 1.0),
        (".5", "0.5", 0.0),
        ("0.5", 0.5, 1.0),
        ("the", "the", 1.0),
        ("", "x", 0.0),
        ("B, A", ["a", "b"], 1.0),
        ("A and B", ["a", "b"], 1.0),
        ("A; C", ["a", "b"], 0.25),
        ("B; salt and pepper; 1,234", ["1,234", "Salt and Pepper", "b"], 1.0),
        ("!", ["!"], 0.0),
        ("C", ["a", "b"], 0.0),
    ],
)
def test_an_answer_scores_by_the_table_for_its_label(answer: str, label: Any, value: float) -> None:
    read = read_label(label)
    assert read is not None
    assert score_answer(answer, read).value == pytest.approx(value)


@given(st.text(), st.text() | st.integers() | st.floats(allow_nan=False) | st.lists(st.text(), max_size=3))
def test_any_answer_has_a_score_between_0_and_1(answer: str, value: Any) -> None:
    label = read_label(value)
    if label is not None:
        assert 0.0 <= score_answer(answer, label).value <= 1.0
