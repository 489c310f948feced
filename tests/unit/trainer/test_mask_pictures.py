"""The pictures of the page on masks are what the code decides, and show what the page says they show."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.write_mask_pictures import FOLDER, PICTURES, MaskTools, picture_svg, strips_of

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def tools() -> MaskTools:
    return MaskTools()


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_up_to_date_and_in_the_page(name: str, tools: MaskTools) -> None:
    wanted = picture_svg(strips_of(name, tools), tools.tokenizer.decode)
    assert (FOLDER / name).read_text(encoding="utf-8") == wanted, "python tools/write_mask_pictures.py draws it"
    assert f"](images/{name})" in (ROOT / "docs" / "masks.md").read_text(encoding="utf-8")
