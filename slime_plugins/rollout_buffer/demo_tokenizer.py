"""Path of the tokenizer that is shipped with the package. Built by ``tools/build_demo_tokenizer.py``.

Besides demos and tests, ``engine/openai.py`` uses it in production, for prompts to chat servers.
"""

from __future__ import annotations

from pathlib import Path

DEMO_TOKENIZER_PATH = Path(__file__).resolve().parent / "assets" / "chatml_tokenizer"
"""A small ChatML tokenizer in the style of Qwen3-VL-Instruct; ``AutoTokenizer.from_pretrained`` loads it offline."""
