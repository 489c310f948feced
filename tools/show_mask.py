"""Shows which tokens of a conversation or a stored trajectory are trained, in the terminal or as HTML.

    python tools/show_mask.py conversation.json --tokenizer /path/to/model --type qwen3
    python tools/show_mask.py item.json --html mask.html

The file holds OpenAI messages (a list, or an object with ``messages`` and optionally ``tools``), or an item of the
server with ``generations``: then the training rows packed from these are shown, with the differences to a mask rebuilt
from the messages. ``--line N`` selects line N of a JSONL file. Without ``--tokenizer`` the small tokenizer of this
package is used, which shows the structure but not a model's own tokens.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from slime.utils.mask_utils import MultiTurnLossMaskGenerator, pack_training_rows
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.reporting.mask_view import (
    Category,
    Piece,
    Section,
    page,
    pieces_of,
    print_sections,
)
from slime_plugins.rollout_buffer.wire import decode_generations


def read_input(path: Path, line: int | None) -> dict[str, Any]:
    """Reads the file; a bare list holds messages."""
    text = path.read_text(encoding="utf-8")
    found = json.loads(text if line is None else text.splitlines()[line - 1])
    item = {"messages": found} if isinstance(found, list) else found
    if not isinstance(item, dict) or not isinstance(item.get("messages"), list):
        raise SystemExit(f"{path} holds neither a list of messages nor an object with messages")

    return item


def sections_of(item: dict[str, Any], generator: MultiTurnLossMaskGenerator) -> list[Section]:
    """Returns the packed rows if there are generations, else the conversation rebuilt from its messages."""
    if item.get("generations"):
        return list(_row_sections(item, generator))

    return [_conversation_section(item, generator)]


def _conversation_section(item: dict[str, Any], generator: MultiTurnLossMaskGenerator) -> Section:
    masked = generator.mask_conversation(item["messages"], item.get("tools"))
    reported = {one.position for one in masked.undecided if one.position is not None}
    pieces = list(_pieces(generator, masked.token_ids, masked.loss_mask, reported))
    remarks = [
        f"message {one.message_index}, token {one.position}: {one.detail or one.reason.value}"
        for one in masked.undecided
    ]
    title = f"rebuilt from {len(item['messages'])} messages: {_count(masked.loss_mask)}"
    return Section(title, pieces, remarks)


def _row_sections(item: dict[str, Any], generator: MultiTurnLossMaskGenerator) -> Iterator[Section]:
    generations = decode_generations(item["generations"])
    for number, row in enumerate(pack_training_rows(generations), 1):
        pieces = list(_pieces(generator, row.token_ids, row.loss_mask, set(), row.log_probs))
        members = ", ".join(str(index) for index in row.generation_indices)
        yield Section(f"row {number}, generations {members}: {_count(row.loss_mask)}", pieces, [])
    drift = generator.report_drift(item["messages"], generations, item.get("tools"))
    if drift.is_clean:
        yield Section("rebuilding from messages would give the same ids and mask", [], [])
        return

    where = f"first in turn {drift.first_differing_turn}, {drift.tokens_affected} sampled tokens affected"
    yield Section(f"rebuilding from messages would differ: {', '.join(drift.kinds)} ({where})", [], [])


def _count(loss_mask: Sequence[int]) -> str:
    return f"{sum(loss_mask)} of {len(loss_mask)} tokens trained"


def _pieces(
    generator: MultiTurnLossMaskGenerator,
    token_ids: Sequence[int],
    loss_mask: Sequence[int],
    reported: set[int],
    log_probs: Sequence[float] | None = None,
) -> Iterator[Piece]:
    categories = [
        _category(token_id, mask, at in reported, generator)
        for at, (token_id, mask) in enumerate(zip(token_ids, loss_mask, strict=True))
    ]
    return pieces_of(token_ids, categories, generator.tokenizer.decode, log_probs)


def _category(token_id: int, mask: int, reported: bool, generator: MultiTurnLossMaskGenerator) -> Category:
    if mask:
        return Category.TRAINED

    if reported:
        return Category.REPORTED

    return Category.IMAGE if token_id in generator.image_token_ids else Category.CONTEXT


def load_tokenizer(path: Path | str) -> Any:
    """Loads a tokenizer from a folder or by name."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Shows one file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="JSON: messages, or an item with generations")
    parser.add_argument("--line", type=int, help="line of a JSONL file, counted from 1")
    parser.add_argument("--tokenizer", default=DEMO_TOKENIZER_PATH, help="folder or name of a tokenizer")
    parser.add_argument("--type", default="qwen", help="value of --loss-mask-type in training (qwen)")
    parser.add_argument("--messages", action="store_true", help="rebuild from messages even if there are generations")
    parser.add_argument("--html", type=Path, help="write a page instead of colours in the terminal")
    options = parser.parse_args(arguments)
    item = read_input(options.file, options.line)
    if options.messages:
        item.pop("generations", None)
    generator = MultiTurnLossMaskGenerator(load_tokenizer(options.tokenizer), options.type)
    try:
        sections = sections_of(item, generator)
    except Exception as error:
        raise SystemExit(f"this cannot be shown with this tokenizer: {error}") from error

    if options.html:
        options.html.write_text(page(sections), encoding="utf-8")
    else:
        print_sections(sections, Console())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
