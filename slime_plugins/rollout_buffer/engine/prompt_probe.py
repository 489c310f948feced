"""Prompts that are sent to an engine before its first turn, to find out whether it changes prompts.

Pure: builds the prompts and evaluates the replies. There is one text prompt and, for a vision model, one prompt for
each of a few image sizes. Each begins with a system prompt and a word in ids that the tokenizer would not choose, as
the ids of sampled text may be. An engine that does not report the ids it ran (SGLang before 0.5.13) is asked for the
log-probs of its input, which name the ids; for an image they name other ids than its placeholder.
"""

from __future__ import annotations

import functools
import importlib.util
import io
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from slime_plugins.rollout_buffer.engine.image_token_counts import SizeRule
from slime_plugins.rollout_buffer.engine.prompt_check import PromptChecker
from slime_plugins.rollout_buffer.engine.tokenizer_probe import PLAIN_TEXT, SPECIAL_TOKENS
from slime_plugins.rollout_buffer.types import Image, PromptCheck

SYSTEM_TEXT: Final = "You are the probe of a rollout buffer."
IMAGE_SIZES: Final = ((40, 56), (540, 1200))
"""Widths and heights: a small image, which a size rule enlarges, and a phone screen under the default pixel limit."""
IMAGE_MARKUP: Final = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
MAX_SHOWN_IDS: Final = 6


class PromptIntegrity(StrEnum):
    """Result of the probe for prompts of one kind."""

    EXACT = "exact"  # the engine runs the ids that it receives
    CHANGED = "changed"
    UNKNOWN = "unknown"  # the engine reports no ids, or was not probed


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineFidelity:
    """Result of the probe of one engine; ``images`` is None if the model takes none or Pillow is missing.

    ``findings`` are predicates of "the engine".
    """

    text: PromptIntegrity = PromptIntegrity.UNKNOWN
    images: PromptIntegrity | None = None
    findings: tuple[str, ...] = ()

    def of(self, *, images: bool) -> PromptIntegrity:
        """Returns the result for prompts with images, or without."""
        return (self.images or PromptIntegrity.UNKNOWN) if images else self.text

    @property
    def complaint(self) -> str:
        """Predicates of "the engine" on why it does not run prompts exactly; empty if it does."""
        results = {"prompts of text": self.text, "prompts with images": self.images}
        silent = [
            f"does not report the ids it ran for {kind}"
            for kind, result in results.items()
            if result is PromptIntegrity.UNKNOWN
        ]
        return "; ".join([*self.findings, *silent])


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbePrompt:
    """One prompt of the probe. ``image_tokens`` is the count by the model's size rule, None if unknown."""

    ids: tuple[int, ...]
    images: tuple[Image, ...] = ()
    size: tuple[int, int] | None = None
    image_tokens: int | None = None

    @property
    def kind(self) -> str:
        return "prompts with images" if self.images else "prompts of text"


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptProbe:
    """The prompts of the probe for one model, and the evaluation of the engine's answers."""

    text: ProbePrompt
    images: tuple[ProbePrompt, ...]
    checker: PromptChecker

    def verdict(self, answers: Sequence[tuple[ProbePrompt, Sequence[int] | None]]) -> EngineFidelity:
        """Compares each prompt with the ids that the engine ran, None if it reported none, and returns the result."""
        findings: list[str] = []
        results: dict[bool, PromptIntegrity] = {}  # by whether the prompts have images
        for prompt, ran in answers:
            has_images = bool(prompt.images)
            results.setdefault(has_images, PromptIntegrity.UNKNOWN)
            if ran is None:
                continue
            if finding := self._finding(prompt, ran):
                findings.append(finding)
                results[has_images] = PromptIntegrity.CHANGED
            elif results[has_images] is PromptIntegrity.UNKNOWN:
                results[has_images] = PromptIntegrity.EXACT
        findings = list(dict.fromkeys(findings))
        return EngineFidelity(
            text=results.get(False, PromptIntegrity.UNKNOWN), images=results.get(True), findings=tuple(findings)
        )

    def _finding(self, prompt: ProbePrompt, ran: Sequence[int]) -> str:
        """Returns how the engine changes a prompt, as a predicate of "the engine"; empty if it does not."""
        checked = self.checker.check(prompt.ids, ran, len(prompt.images))
        if checked.receipt.check is PromptCheck.DIFFERING:
            try:
                return self._what_changed(prompt, checked.ran_ids or list(ran))
            except Exception as error:  # noqa: BLE001 - a tokenizer may raise anything for ids that an engine reports
                return f"runs other ids than it is sent of {prompt.kind}, on which the tokenizer fails: {error!r}"
        lengths, expected = checked.receipt.image_tokens, prompt.image_tokens
        if lengths and expected is not None and lengths[0] != expected:  # a prompt of the probe has one image
            width, height = prompt.size or (0, 0)
            return (
                f"makes {lengths[0]} tokens of an image of {width}x{height}, where the model's folder makes {expected}:"
                " its image processor has other settings (min_pixels, max_pixels, patch_size)"
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
            return f"puts {_excerpt(ran[:added])} before {prompt.kind}, like a second begin token"
        pairs = enumerate(zip(sent, ran, strict=False))
        pos = next((index for index, (ours, theirs) in pairs if ours != theirs), min(len(sent), len(ran)))
        return (
            f"runs other ids than it is sent of {prompt.kind}: from token {pos} of {len(sent)} on, "
            f"{_excerpt(ran[pos:])} instead of {_excerpt(sent[pos:])}"
        )


def prompt_probe(tokenizer: Any, rule: SizeRule | None) -> PromptProbe:
    """Returns the probe for a transformers tokenizer. ``rule`` is the model folder's size rule, None if unknown."""
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
            image_tokens=None if rule is None else rule.tokens_of(width, height),
        )
        for width, height in IMAGE_SIZES
    )
    return PromptProbe(text=text, images=images, checker=checker)


def _system_text(tokenizer: Any) -> str:
    """Returns the system prompt in the chat template's form; as plain text if the tokenizer has no template or the
    template no system prompt."""
    try:
        rendered = tokenizer.apply_chat_template(
            [{"role": "system", "content": SYSTEM_TEXT}, {"role": "user", "content": "-"}], tokenize=False
        )
    except Exception:  # noqa: BLE001 - a template may raise anything; the probe uses plain text
        return f"{SYSTEM_TEXT}\n"
    before, user_text, _ = str(rendered).rpartition("-")
    return before if user_text and SYSTEM_TEXT in before else f"{SYSTEM_TEXT}\n"


def _split_word(checker: PromptChecker) -> list[int]:
    """Returns ids that decode to a word but that the tokenizer would not choose for it; empty if there are none."""
    for word in PLAIN_TEXT.split():
        letters = [token for letter in word for token in checker.encoded(letter)]
        if not checker.encodes_to_itself(letters) and checker.decoded(letters) == word:
            return letters
    return []


@functools.lru_cache(maxsize=8)
def _picture(width: int, height: int) -> Image:
    from PIL import Image as PillowImage  # in the extra `android`, which image tasks need

    png = io.BytesIO()
    PillowImage.linear_gradient("L").resize((width, height)).convert("RGB").save(png, "PNG")
    return Image(data=png.getvalue())


def _excerpt(ids: Sequence[int]) -> str:
    return str(list(ids[:MAX_SHOWN_IDS]))
