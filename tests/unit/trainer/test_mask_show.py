"""The mask viewer: every token is shown once, in its category, in the terminal and on the page."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime.utils.mask_utils import Generation
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.wire import encode_generations

PROGRAM = Path(__file__).resolve().parents[3] / "tools" / "show_mask.py"
MESSAGES = [
    {"role": "user", "content": "Open <b>settings</b>"},
    {"role": "assistant", "content": "tap 😀"},
    {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": "sha256:0"}}, {"type": "text", "text": "2"}],
    },
    {"role": "assistant", "content": "\nwait"},
]


@pytest.fixture(scope="module")
def show() -> Callable[[list[str]], int]:
    """The program's main function."""
    main: Callable[[list[str]], int] = runpy.run_path(str(PROGRAM))["main"]
    return main


def write(path: Path, content: Any) -> str:
    """Writes a JSON file and names it."""
    path.write_text(json.dumps(content), encoding="utf-8")
    return str(path)


def tokenize(text: str) -> list[int]:
    """The demo tokenizer's ids."""
    from transformers import AutoTokenizer

    found: list[int] = AutoTokenizer.from_pretrained(DEMO_TOKENIZER_PATH)(text, add_special_tokens=False)["input_ids"]
    return found


def test_a_conversation_is_shown_whole(
    show: Callable[[list[str]], int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert show([write(tmp_path / "c.json", MESSAGES)]) == 0
    out = capsys.readouterr().out
    assert "rebuilt from 4 messages" in out
    assert "tap 😀<|im_end|>" in out


def test_the_page_is_self_contained_and_escapes_what_it_shows(show: Callable[[list[str]], int], tmp_path: Path) -> None:
    page = tmp_path / "mask.html"
    assert show([write(tmp_path / "c.json", {"messages": MESSAGES}), "--html", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert "<b>" not in text
    assert "src=" not in text
    assert "href=" not in text
    for category in ("trained", "not", "image"):
        assert f'<span class="{category}" title="token ' in text


def test_a_stored_item_is_shown_as_its_rows_with_its_drift(
    show: Callable[[list[str]], int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = tokenize("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    answer = tokenize("yes<|im_end|>")
    generations = [
        Generation(prompt, answer, [-0.5] * len(answer)),
        Generation([*prompt, 0], answer, [-0.5] * len(answer)),
    ]
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    item = {"messages": [*said, *said], "generations": encode_generations(generations)}
    lines = tmp_path / "items.jsonl"
    lines.write_text("\n" + json.dumps(item) + "\n", encoding="utf-8")
    assert show([str(lines), "--line", "2"]) == 0
    out = capsys.readouterr().out
    assert "row 1, generations 0" in out
    assert "row 2, generations 1" in out
    assert "would differ: context, rows" in out
