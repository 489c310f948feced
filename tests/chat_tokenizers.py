"""Tokenizers for the mask tests: small ones built here in code, and real ones that ``fetch_tokenizers.py`` fetched.

(The file is not called ``tokenizers.py``: pytest puts this folder on the path, where it would hide that library.)
"""

from __future__ import annotations

import copy
import functools
import hashlib
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.fetch_tokenizers import tokenizers_folder as folder

TEMPLATES = Path(__file__).resolve().parent / "chat_templates"

CHATML_SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
CHATML_PLAIN = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
DEEPSEEK_SPECIAL = ["<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>"]
DEEPSEEK_PLAIN = ["<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"]

QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CORPUS = [
    "Open the settings and tap the Wi-Fi switch.\n\nThe answer is 42.\n",
    'user\nassistant\nsystem\ntool\n\n{"name": "tap", "arguments": {"x": 10}}\n',
    "The assistant thinks about it, then calls a tool; the user waits for the result.\n \n  \n\n\n",
    "Über den Wolken — 你好世界, مرحبا, 😀 café naïve.",
] * 4


@dataclass(frozen=True, slots=True)
class Kind:
    """A vocabulary with a chat template, the ``tokenizer_type`` a trainer gives for it, and its test oracle's name."""

    name: str
    vocabulary: str
    template: str
    tokenizer_type: str
    oracle: str

    @property
    def is_small(self) -> bool:
        """True for tokenizers that are built here and need nothing fetched."""
        return self.vocabulary.startswith("small")


SMALL = [
    Kind("small-default-system", "small_chatml", "default_system", "qwen", "qwen2_5"),
    Kind("small-plain", "small_chatml", "plain", "qwen3", "plain"),
    Kind("small-hybrid", "small_chatml", "hybrid", "qwen3", "hybrid"),
    Kind("small-thinking", "small_chatml", "thinking", "qwen3_5", "thinking"),
    Kind("small-deepseek", "small_deepseek", "deepseek", "distill_qwen", "deepseek"),
]
REAL = [
    Kind("qwen2.5", "qwen3_without_thinking_tokens", "trl/qwen2_5", "qwen", "qwen2_5"),
    Kind("qwen3-first-release", "qwen3", "own", "qwen3", "hybrid"),
    Kind("qwen3-hybrid", "qwen3", "trl/qwen3", "qwen3", "hybrid"),
    Kind("qwen3-2507", "qwen3", "trl/qwen3_instruct_2507", "qwen3", "plain"),
    Kind("qwen3-vl", "qwen3", "trl/qwen3_vl", "qwen3", "vision"),
    Kind("qwen2.5-vl", "qwen3", "trl/qwen2_5_vl", "qwen", "qwen2_5_vl"),
    Kind("qwen3.5", "qwen3_5", "trl/qwen3_5_think", "qwen3_5", "thinking"),
    Kind("deepseek-r1-distill", "qwen3_with_deepseek_markers", "trl/deepseek_r1_distill", "distill_qwen", "deepseek"),
    Kind("deepseek-v3", "deepseek_v3", "own", "distill_qwen", "deepseek_v3"),
]
KINDS = {kind.name: kind for kind in [*SMALL, *REAL]}


def load(name: str) -> Any:
    """Gives a tokenizer with its chat template; skips the test when it was not fetched."""
    kind = KINDS[name]
    if not kind.is_small and not (folder() / "qwen3").is_dir():
        pytest.skip(f"real tokenizers are not in {folder()}: run python tests/fetch_tokenizers.py")

    return _load(kind.vocabulary, kind.template)


@functools.cache
def _load(vocabulary: str, template: str) -> Any:
    tokenizer = copy.copy(_vocabulary(vocabulary))
    if template.startswith("trl/"):
        tokenizer.chat_template = _read(folder() / "chat_templates" / f"{template.removeprefix('trl/')}.jinja")
    elif template != "own":
        tokenizer.chat_template = _read(TEMPLATES / f"{template}.jinja")
    return tokenizer


def _read(path: Path) -> str:
    if not path.is_file():
        pytest.skip(f"{path} is missing: run python tests/fetch_tokenizers.py")

    return path.read_text(encoding="utf-8")


@functools.cache
def _vocabulary(name: str) -> Any:
    """Gives a tokenizer to be copied, since a template is set on it. The copies share what costs seconds to load."""
    if name == "small_chatml":
        return _wrap(_train(CHATML_SPECIAL, CHATML_PLAIN), "<|im_end|>")

    if name == "small_deepseek":
        return _wrap(_train(DEEPSEEK_SPECIAL, DEEPSEEK_PLAIN), *DEEPSEEK_SPECIAL)

    if name == "qwen3_without_thinking_tokens":
        return _variant_of_qwen3({"<tool_response>", "</tool_response>", "<think>", "</think>"}, [])

    if name == "qwen3_with_deepseek_markers":
        return _variant_of_qwen3(None, [*DEEPSEEK_SPECIAL, *DEEPSEEK_PLAIN])

    return _from_folder(name)


def _from_folder(name: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    path = folder() / name
    if not path.is_dir():
        pytest.skip(f"{path} is missing: run python tests/fetch_tokenizers.py")

    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json"))
    config = _config(path)
    tokenizer.chat_template = config.get("chat_template")
    for key in ("eos_token", "bos_token"):
        if config.get(key):
            setattr(tokenizer, key, config[key])
    return tokenizer


def _config(path: Path) -> dict[str, Any]:
    import json

    config: dict[str, Any] = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8"))
    tokens = {key: value["content"] for key, value in config.items() if isinstance(value, dict) and "content" in value}
    return {**config, **tokens}


def _variant_of_qwen3(without: set[str] | None, added: list[str]) -> Any:
    """Gives Qwen3's byte pairs under other added tokens; ``without=None`` removes all of them. Kept as a file."""
    import json

    path = folder() / "qwen3" / "tokenizer.json"
    if not path.is_file():
        pytest.skip(f"{path} is missing: run python tests/fetch_tokenizers.py")

    wanted = hashlib.sha256(repr((sorted(without or ()), added)).encode()).hexdigest()[:16]
    made = path.with_name(f"variant-{wanted}.json")
    if not made.is_file():
        source = json.loads(path.read_text(encoding="utf-8"))
        tokens = [token for token in source["added_tokens"] if without is not None and token["content"] not in without]
        source["added_tokens"] = tokens
        tokenizer = Tokenizer.from_str(json.dumps(source))
        tokenizer.add_tokens([_added(content, special=content in DEEPSEEK_SPECIAL) for content in added])
        with tempfile.TemporaryDirectory(dir=path.parent) as own_folder:
            new = Path(own_folder) / "new.json"
            tokenizer.save(str(new))
            new.replace(made)
    return _wrap(made, *(DEEPSEEK_SPECIAL if added else ["<|im_end|>"]))


def _train(special: list[str], plain: list[str]) -> Tokenizer:
    """Trains a byte-level BPE of a few hundred tokens with Qwen's splitting and normalising."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([_added(content, special=True) for content in special])
    tokenizer.add_tokens([_added(content, special=False) for content in plain])
    return tokenizer


def _added(content: str, *, special: bool) -> AddedToken:
    return AddedToken(content, special=special, normalized=False)


def _wrap(tokenizer: Tokenizer | Path, eos: str, bos: str | None = None) -> Any:
    from transformers import PreTrainedTokenizerFast

    source = {"tokenizer_file": str(tokenizer)} if isinstance(tokenizer, Path) else {"tokenizer_object": tokenizer}
    return PreTrainedTokenizerFast(**source, eos_token=eos, bos_token=bos)
