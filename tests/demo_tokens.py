"""The demo's tokenizer, and what tests read and write with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import AutoTokenizer

from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH

tokenizer: Any = AutoTokenizer.from_pretrained(DEMO_TOKENIZER_PATH, local_files_only=True)


def ids_of(text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def chat_ids(content: str) -> list[int]:
    """The prompt of a user's message."""
    return ids_of(f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n")


def trained_text(token_ids: Sequence[int], loss_mask: Sequence[int] | None) -> str:
    """The text of the trained tokens of a row, or of its response."""
    return str(tokenizer.decode([token for token, mask in zip(token_ids, loss_mask or (), strict=True) if mask]))
