"""Where the data files that ship with the package lie."""

from __future__ import annotations

from pathlib import Path

__all__ = ["DEMO_TOKENIZER_PATH"]

DEMO_TOKENIZER_PATH = Path(__file__).resolve().parent / "assets" / "chatml_tokenizer"
"""A small ChatML tokenizer in the style of Qwen3-VL-Instruct; ``AutoTokenizer.from_pretrained`` loads it offline."""
