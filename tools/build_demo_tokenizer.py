"""Trains the small ChatML tokenizer that the demo, the scripted engine and the tests use.

    python tools/build_demo_tokenizer.py [--output DIRECTORY]

Byte-level BPE on the two text files in this folder and on generated tool calls and sums; equal input gives equal files.
The special tokens and the chat template follow the Qwen3-VL-Instruct family, so that code which works with this
tokenizer works with a real one; the vocabulary is its own and fits no model.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

HERE = Path(__file__).resolve().parent
DEFAULT_OUTPUT = HERE.parent / "slime_plugins" / "rollout_buffer" / "assets" / "chatml_tokenizer"
TEMPLATE_NAME = "chat_template.jinja"

VOCABULARY_SIZE = 4096
WORD_WEIGHT = 3  # how often each listed word is in the corpus: often enough to become one token
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
# One id each, but ordinary text: they stay when special tokens are skipped.
MARKUP_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

# A word takes one space in front of it, a digit stands alone, line ends stay with the punctuation before them.
PIECE_PATTERN = r"(?i:'[a-z]{1,2}\b)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def main() -> None:
    """Builds the tokenizer into ``--output``; an existing chat template there is not overwritten."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT)
    write_tokenizer(parser.parse_args().output)


def write_tokenizer(output: Path) -> None:
    """Writes ``tokenizer.json``, ``tokenizer_config.json`` and the chat template into ``output``."""
    output.mkdir(parents=True, exist_ok=True)
    train_tokenizer().save(str(output / "tokenizer.json"), pretty=True)
    config = json.dumps(tokenizer_config(), indent=2) + "\n"
    (output / "tokenizer_config.json").write_text(config, encoding="utf-8")
    template = DEFAULT_OUTPUT / TEMPLATE_NAME
    if output.resolve() != DEFAULT_OUTPUT:
        shutil.copyfile(template, output / TEMPLATE_NAME)


def train_tokenizer() -> Tokenizer:
    """Returns a byte-level BPE tokenizer of at most ``VOCABULARY_SIZE`` ids, trained on ``corpus()``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECE_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    added = len(SPECIAL_TOKENS) + len(MARKUP_TOKENS)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE - added,
        min_frequency=2,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKUP_TOKENS])
    return tokenizer


def corpus() -> Iterator[str]:
    """Yields the training text, in a fixed order."""
    yield from (HERE / "demo_tokenizer_corpus.txt").read_text(encoding="utf-8").splitlines(keepends=True) * 2
    words = (HERE / "demo_tokenizer_words.txt").read_text(encoding="utf-8").split()
    for word in words:
        yield from (f" {word}",) * WORD_WEIGHT
        yield from (word[:1].upper() + word[1:],) * 2
    yield from tool_calls()
    yield from sums()


def tool_calls() -> Iterator[str]:
    """Yields tool calls in the exact form that a policy writes them."""
    arguments: list[dict[str, Any]] = [
        {"action": "click", "coordinate": [31 * step % 1000, 47 * step % 1000]} for step in range(1, 60)
    ]
    arguments += [{"action": "swipe", "coordinate": [500, 100 * y], "coordinate2": [500, 900]} for y in range(1, 9)]
    arguments += [{"action": "open", "text": name} for name in ("Settings", "Contacts", "Clock", "Messages", "Notes")]
    arguments += [{"action": "system_button", "button": name} for name in ("Back", "Home", "Menu", "Enter")]
    arguments += [{"action": "terminate", "status": status} for status in ("success", "failure")]
    for item in arguments:
        call = json.dumps({"name": "mobile_use", "arguments": item})
        yield f"</thinking>\n<tool_call>\n{call}\n</tool_call>\n<conclusion>\n"


def sums() -> Iterator[str]:
    """Yields arithmetic in the form of the math prompts and their answers."""
    for left in range(2, 40, 3):
        for right in range(3, 30, 7):
            yield answered(f"What is {left} + {right}? {left} + {right} = {left + right}.", left + right)
            yield answered(f"What is {left} * {right}? {left} * {right} = {left * right}.", left * right)
            yield answered(f"Solve for x: x + {left} = {left + right}. x = {right}.", right)


def answered(work: str, answer: int) -> str:
    """Returns the work followed by its boxed answer."""
    return f"{work} The answer is \\boxed{{{answer}}}."


def tokenizer_config() -> dict[str, Any]:
    """Returns the configuration for transformers, which its versions 4.x and 5.x accept."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "add_bos_token": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "additional_special_tokens": [
            token for token in SPECIAL_TOKENS if token not in ("<|im_end|>", "<|endoftext|>")
        ],
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": False,
        "model_max_length": 131072,
    }


if __name__ == "__main__":
    main()
