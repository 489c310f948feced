"""The pictures of the page on masks are what the code decides, and show what the page says they show."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.write_mask_pictures import FOLDER, PICTURES, Studio, picture_svg, strips_of

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def studio() -> Studio:
    return Studio()


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_up_to_date_and_in_the_page(name: str, studio: Studio) -> None:
    wanted = picture_svg(strips_of(name, studio), studio.tokenizer.decode)
    assert (FOLDER / name).read_text(encoding="utf-8") == wanted, "python tools/write_mask_pictures.py draws it"
    assert f"](images/{name})" in (ROOT / "docs" / "masks.md").read_text(encoding="utf-8")
