"""Compares the prompt ids sent to an engine with the ids that it reports to have run. Pure.

Text is compared id by id. An image is one placeholder in the ids that were sent. In the ids that the engine ran it is a
block of placeholders, of any length. An engine that decodes a prompt and tokenises the text again runs other ids than
were sent (slime's SGLang patch does so with every prompt that holds an image, THUDM/slime#2388); training then uses the
engine's ids. If an engine reports no ids, the check is UNKNOWN; ``encodes_to_itself`` then says if tokenising the
decoded prompt again would change nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

from slime_plugins.rollout_buffer.chat_tokens import decoded, encoded, image_placeholder_of
from slime_plugins.rollout_buffer.engine.streamed_calls import begins_at
from slime_plugins.rollout_buffer.types import PromptCheck, PromptReceipt

NOT_PROVEN: Final = "the engine does not report the ids it ran, and those it was sent do not encode to themselves"
OTHER_LENGTH: Final = "the engine does not report the ids it ran, and their number is not that of the ids it was sent"
RESUMED_ELSEWHERE: Final = "the engine was interrupted and resumed after other ids than it had sampled"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedPrompt:
    """Result of the check of one prompt.

    ``ran_ids`` are the ids that the engine ran, with one placeholder per image; None if they equal the ids sent, are
    unknown, or are not to be trained.
    """

    receipt: PromptReceipt
    ran_ids: list[int] | None = None


class PromptChecker:
    """Compares prompts sent with prompts run, for one model."""

    def __init__(self, tokenizer: Any = None) -> None:
        """Without a tokenizer, the result for a prompt with images is ``UNKNOWN``, and ``encodes_to_itself`` is always
        True."""
        self._tokenizer = tokenizer
        self.placeholder_id = None if tokenizer is None else image_placeholder_of(tokenizer)
        self.eos_id: int | None = getattr(tokenizer, "eos_token_id", None)

    def check(self, sent: Sequence[int], ran: Sequence[int] | None, image_count: int) -> CheckedPrompt:
        """Compares the ids of a prompt with ``image_count`` images with those that the engine ran.

        ``ran`` has the engine's expanded images; it is None if the engine did not report the ids.
        """
        if ran is None or (image_count and self.placeholder_id is None):
            return CheckedPrompt(receipt=PromptReceipt(PromptCheck.UNKNOWN))
        sent, ran = list(sent), list(ran)
        if not image_count:
            if sent == ran:
                return CheckedPrompt(receipt=PromptReceipt(PromptCheck.EQUAL))
            return CheckedPrompt(receipt=PromptReceipt(PromptCheck.DIFFERING, sent), ran_ids=ran)
        assert self.placeholder_id is not None
        block_lengths = _block_lengths(sent, ran, self.placeholder_id)
        if block_lengths is not None and len(block_lengths) == image_count:
            return CheckedPrompt(receipt=PromptReceipt(PromptCheck.EQUAL, image_tokens=tuple(block_lengths)))
        collapsed, block_lengths = _collapsed(ran, self.placeholder_id)
        if (blocks := len(block_lengths)) != image_count:
            reason = f"the engine ran {blocks} blocks of image tokens for {image_count} images, not a block for each"
            return CheckedPrompt(receipt=PromptReceipt(PromptCheck.DIFFERING, untrained_because=reason))
        receipt = PromptReceipt(PromptCheck.DIFFERING, sent, image_tokens=tuple(block_lengths))
        return CheckedPrompt(receipt=receipt, ran_ids=collapsed)

    def with_placeholders(self, sent: Sequence[int], ran: Sequence[int]) -> list[int]:
        """Returns ``ran``, the ids run for a prompt with one image, with the placeholder in place of each image token.

        An engine that is asked for the log-probs of its input reports other ids for image tokens.
        """
        assert self.placeholder_id is not None
        before = list(sent).index(self.placeholder_id)
        image_tokens = len(ran) - (len(sent) - 1)  # all ids sent but the placeholder are text
        if image_tokens <= 0:
            return list(ran)
        return [*ran[:before], *[self.placeholder_id] * image_tokens, *ran[before + image_tokens :]]

    def encodes_to_itself(self, ids: Sequence[int]) -> bool:
        """Returns True if the tokenizer encodes the decoded text to the same ids, or if there is no tokenizer.

        It takes about as long as encoding the prompt. Any thread may call it if the tokenizer is a fast one.
        """
        return self._tokenizer is None or self.encoded(self.decoded(ids)) == list(ids)

    def may_end_within(self, ids: Sequence[int], stops: Sequence[str]) -> bool:
        """Returns True if the ids may end within one of the stop sequences ``stops``.

        Their text then ends with the beginning of a stop sequence, or with an incomplete character, which may belong to
        a stop sequence. Without a tokenizer this is unknown: returns True if there are stop sequences.
        """
        if not stops or self._tokenizer is None:
            return bool(stops)
        end = self.decoded(ids[-4 * max(map(len, stops)) :])  # a character may be four tokens
        return end.endswith("\ufffd") or begins_at(end, 0, stops) < len(end)

    def decoded(self, ids: Sequence[int]) -> str:
        """Returns the text of ids, special tokens included."""
        return decoded(self._tokenizer, ids)

    def encoded(self, text: str) -> list[int]:
        """Returns the ids of a text, without special tokens added."""
        return encoded(self._tokenizer, text)


def _block_lengths(sent: list[int], ran: list[int], placeholder: int) -> list[int] | None:
    """Returns the length of the block that the engine ran at each placeholder; None if any other id differs."""
    lengths: list[int] = []
    pos = 0
    for text, is_last in _texts(sent, placeholder):
        if ran[pos : pos + len(text)] != text:
            return None
        pos += len(text)
        if is_last:
            break
        start = pos
        while pos < len(ran) and ran[pos] == placeholder:
            pos += 1
        if pos == start:
            return None
        lengths.append(pos - start)
    return lengths if pos == len(ran) else None


def _texts(ids: list[int], placeholder: int) -> Iterator[tuple[list[int], bool]]:
    """Yields each list of ids between placeholders, and whether it is the last."""
    start = 0
    for _ in range(ids.count(placeholder)):
        end = ids.index(placeholder, start)
        yield ids[start:end], False
        start = end + 1
    yield ids[start:], True


def _collapsed(ran: list[int], placeholder: int) -> tuple[list[int], list[int]]:
    """Returns the ids with one placeholder for each block of placeholders, and the lengths of the blocks."""
    ids: list[int] = []
    lengths: list[int] = []
    for token_id, block in groupby(ran):
        if token_id == placeholder:
            lengths.append(len(list(block)))
            ids.append(token_id)
        else:
            ids.extend(block)
    return ids, lengths
