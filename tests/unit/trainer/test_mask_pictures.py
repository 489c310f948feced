"""The pictures of the page on masks are what the code decides, and show what the page says they show."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.write_mask_pictures import FOLDER, PICTURES, Strip, Studio, picture_svg, strips_of

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def studio() -> Studio:
    return Studio()


def trained_text(studio: Studio, strip: Strip) -> str:
    ids = [token for token, mask in zip(strip.token_ids, strip.loss_mask, strict=True) if mask]
    return str(studio.tokenizer.decode(ids))


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_up_to_date_and_in_the_page(name: str, studio: Studio) -> None:
    wanted = picture_svg(strips_of(name, studio), studio.tokenizer.decode)
    assert (FOLDER / name).read_text(encoding="utf-8") == wanted, "python tools/write_mask_pictures.py draws it"
    assert f"](images/{name})" in (ROOT / "docs" / "masks.md").read_text(encoding="utf-8")


def test_generations_and_messages_agree_on_an_episode_that_ended(studio: Studio) -> None:
    (rebuilt,) = strips_of("mask_conversation.svg", studio)
    (packed,) = strips_of("mask_growing.svg", studio)
    length = len(packed.token_ids)
    assert list(rebuilt.token_ids[:length]) == list(packed.token_ids)
    assert list(rebuilt.loss_mask[:length]) == list(packed.loss_mask)
    assert studio.tokenizer.decode(rebuilt.token_ids[length:]) == "\n"


def test_an_edited_context_trains_each_reply_once(studio: Studio) -> None:
    first, second = strips_of("mask_edited.svg", studio)
    assert trained_text(studio, first) == "It says 345.<|im_end|>deleteContext(0)<|im_end|>"
    assert trained_text(studio, second) == "It is 345.<|im_end|>"
    assert "It says 345." in studio.tokenizer.decode(second.token_ids)


def test_only_a_rebuilt_turn_trains_an_end_that_was_not_sampled(studio: Studio) -> None:
    packed, rebuilt = strips_of("mask_cut.svg", studio)
    assert trained_text(studio, packed) == "I think that"
    assert trained_text(studio, rebuilt) == "I think that<|im_end|>"


def test_the_command_says_whether_they_are_up_to_date() -> None:
    finished = subprocess.run(
        [sys.executable, "tools/write_mask_pictures.py", "--check"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
