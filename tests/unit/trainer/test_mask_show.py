"""The mask viewer shows every token once, in its category; the pictures of the page on masks are up to date."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime.utils.mask_utils import Generation
from slime_plugins.rollout_buffer.wire import encode_generations
from tests.demo_tokens import chat_ids, ids_of
from tools.write_mask_pictures import FOLDER, PICTURES, MaskTools, picture_svg, strips_of

ROOT = Path(__file__).resolve().parents[3]
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
    main: Callable[[list[str]], int] = runpy.run_path(str(ROOT / "tools" / "show_mask.py"))["main"]
    return main


def write(path: Path, content: Any) -> str:
    path.write_text(json.dumps(content), encoding="utf-8")
    return str(path)


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
    prompt, answer = chat_ids("hi"), ids_of("yes<|im_end|>")
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


@pytest.fixture(scope="module")
def tools() -> MaskTools:
    return MaskTools()


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_up_to_date_and_in_the_page(name: str, tools: MaskTools) -> None:
    wanted = picture_svg(strips_of(name, tools), tools.tokenizer.decode)
    assert (FOLDER / name).read_text(encoding="utf-8") == wanted, "python tools/write_mask_pictures.py draws it"
    assert f"](images/{name})" in (ROOT / "docs" / "masks.md").read_text(encoding="utf-8")
