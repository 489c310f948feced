"""What an engine is asked before its first turn, to learn what it does to prompts; and what its answers say, in words.

Pure. One prompt of text and, for a model that sees, one for each of a few image sizes. In each of them a word is split
into ids that its own tokenizer would not choose, as policies do when they sample; a system prompt and special tokens
are among them. An engine that does not tell which ids it ran (SGLang before 0.5.13) is asked for the log-probs of its
input, which come with ids; there, an image's are not its placeholder.
"""

from __future__ import annotations

import functools
import importlib.util
import io
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from slime_plugins.rollout_buffer.engine.image_tokens import SizeRule, resized_size
from slime_plugins.rollout_buffer.engine.prompt_check import PromptChecker
from slime_plugins.rollout_buffer.engine.tokenizer_probe import PLAIN_TEXT, SPECIAL_TOKENS
from slime_plugins.rollout_buffer.types import Image, PromptCheck

SYSTEM_TEXT: Final = "You are the probe of a rollout buffer."
IMAGE_SIZES: Final = ((40, 56), (540, 1200))
"""Widths and heights: one that a size rule enlarges, and a phone's screen under the default cap, whose sides round."""
IMAGE_MARKUP: Final = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
MAX_SHOWN_IDS: Final = 6


class PromptIntegrity(StrEnum):
    """What an engine does to prompts of one kind."""

    EXACT = "exact"  # the engine runs the ids that it receives
    CHANGED = "changed"
    UNKNOWN = "unknown"  # the engine reports no ids, or was not probed


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineFidelity:
    """What the probe of one engine found; ``images`` is None where its model, or we, can do nothing with one.

    ``findings`` are sentences, of which each follows "the engine".
    """

    text: PromptIntegrity = PromptIntegrity.UNKNOWN
    images: PromptIntegrity | None = None
    findings: tuple[str, ...] = ()

    def of(self, *, images: bool) -> PromptIntegrity:
        """Returns what it does to prompts with images, or without."""
        return (self.images or PromptIntegrity.UNKNOWN) if images else self.text

    @property
    def complaint(self) -> str:
        """Why no exact prompts can be promised of it; empty when they can."""
        told = {"prompts of text": self.text, "prompts with images": self.images}
        silent = [
            f"does not say which ids it runs of {kind}"
            for kind, kept in told.items()
            if kept is PromptIntegrity.UNKNOWN
        ]
        return "; ".join([*self.findings, *silent])


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbePrompt:
    """One prompt to ask with. ``image_tokens`` is what the model's own size rule makes of its image, if it is known."""

    ids: tuple[int, ...]
    images: tuple[Image, ...] = ()
    size: tuple[int, int] | None = None
    image_tokens: int | None = None

    @property
    def kind(self) -> str:
        """What its findings say it is."""
        return "prompts with images" if self.images else "prompts of text"


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptProbe:
    """What to ask an engine of one model, and how its answers are read."""

    text: ProbePrompt
    images: tuple[ProbePrompt, ...]
    checker: PromptChecker

    def verdict(self, answers: Sequence[tuple[ProbePrompt, Sequence[int] | None]]) -> EngineFidelity:
        """Says what an engine does that ran these ids; None where it does not say. What was not asked is untold."""
        findings: list[str] = []
        kept: dict[bool, PromptIntegrity] = {}
        for prompt, ran in answers:
            kept.setdefault(bool(prompt.images), PromptIntegrity.UNKNOWN)
            if ran is None:
                continue
            is_image = bool(prompt.images)
            finding = self._finding(prompt, ran)
            if finding:
                findings.append(finding)
                kept[is_image] = PromptIntegrity.CHANGED
            elif kept[is_image] is PromptIntegrity.UNKNOWN:
                kept[is_image] = PromptIntegrity.EXACT
        findings = list(dict.fromkeys(findings))
        return EngineFidelity(
            text=kept.get(False, PromptIntegrity.UNKNOWN), images=kept.get(True), findings=tuple(findings)
        )

    def _finding(self, prompt: ProbePrompt, ran: Sequence[int]) -> str:
        checked = self.checker.check(prompt.ids, ran, len(prompt.images))
        if checked.receipt.check is PromptCheck.DIFFERING:
            return self._what_changed(prompt, checked.ran_ids or list(ran))
        made = (checked.receipt.image_tokens or (None,))[0]
        if made is not None and prompt.image_tokens is not None and made != prompt.image_tokens:
            width, height = prompt.size or (0, 0)
            return (
                f"makes {made} tokens of an image of {width}x{height}, the model's folder {prompt.image_tokens}: "
                "its image processor has other settings (min_pixels, max_pixels, patch_size)"
            )
        return ""

    def _what_changed(self, prompt: ProbePrompt, ran: list[int]) -> str:
        sent = list(prompt.ids)
        if ran == self.checker.encoded(self.checker.decoded(sent)):
            return (
                f"decodes {prompt.kind} and tokenises them again. slime's SGLang patch does so with images "
                "(THUDM/slime#2388): turns are trained after the engine's own ids, in more rows"
            )
        if len(ran) < len(sent) and SYSTEM_TEXT not in self.checker.decoded(ran):
            return f"drops the system prompt of {prompt.kind}"
        added = len(ran) - len(sent)
        if added > 0 and ran[added:] == sent:
            return f"puts {_shown(ran[:added])} before {prompt.kind}, as a second begin token would be"
        at = next((n for n, (one, other) in enumerate(zip(sent, ran, strict=False)) if one != other), None)
        at = min(len(sent), len(ran)) if at is None else at
        return (
            f"runs other ids than it is sent of {prompt.kind}: from token {at} of {len(sent)} on, "
            f"{_shown(ran[at:])} instead of {_shown(sent[at:])}"
        )


def prompt_probe(tokenizer: Any, rule: SizeRule | None) -> PromptProbe:
    """Returns the probe for a tokenizer of transformers. ``rule`` is that of the model's folder, None if unknown."""
    checker = PromptChecker(tokenizer)
    split = _split_word(checker)
    special = [str(token) for token in tokenizer.all_special_tokens if str(token) not in IMAGE_MARKUP]
    begin = checker.encoded(_system_text(tokenizer))
    text = ProbePrompt(ids=(*begin, *split, *checker.encoded(PLAIN_TEXT + "".join(special[:SPECIAL_TOKENS]))))
    if checker.placeholder_id is None or importlib.util.find_spec("PIL") is None:
        return PromptProbe(text=text, images=(), checker=checker)
    ids = (*begin, *split, *checker.encoded("".join(IMAGE_MARKUP)), *split)
    images = tuple(
        ProbePrompt(
            ids=ids,
            images=(_picture(width, height),),
            size=(width, height),
            image_tokens=None if rule is None else _tokens_by(rule, width, height),
        )
        for width, height in IMAGE_SIZES
    )
    return PromptProbe(text=text, images=images, checker=checker)


def _tokens_by(rule: SizeRule, width: int, height: int) -> int:
    resized = resized_size(width, height, rule)
    return resized[0] * resized[1] // rule.pixels_per_token


def _system_text(tokenizer: Any) -> str:
    """The chat template's system prompt; a plain line where the tokenizer has no template, or one without any."""
    try:
        rendered = tokenizer.apply_chat_template(
            [{"role": "system", "content": SYSTEM_TEXT}, {"role": "user", "content": "-"}], tokenize=False
        )
    except Exception:  # noqa: BLE001 - templates are programs of others; the probe does without
        return f"{SYSTEM_TEXT}\n"
    before, found, _ = str(rendered).rpartition("-")
    return before if found and SYSTEM_TEXT in before else f"{SYSTEM_TEXT}\n"


def _split_word(checker: PromptChecker) -> list[int]:
    """Ids that say something and are not what the tokenizer makes of it; empty where it has one way to say anything."""
    for word in PLAIN_TEXT.split():
        letters = [token for letter in word for token in checker.encoded(letter)]
        if not checker.encodes_to_itself(letters) and checker.decoded(letters) == word:
            return letters
    return []


@functools.lru_cache(maxsize=8)
def _picture(width: int, height: int) -> Image:
    from PIL import Image as PillowImage  # of the extra `android`: whoever sends images has it

    made = io.BytesIO()
    PillowImage.linear_gradient("L").resize((width, height)).convert("RGB").save(made, "PNG")
    return Image(data=made.getvalue())


def _shown(ids: Sequence[int]) -> str:
    return str(list(ids[:MAX_SHOWN_IDS]))
