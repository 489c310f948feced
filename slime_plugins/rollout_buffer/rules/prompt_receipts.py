"""Pure: counts the turns of a trajectory by whether the engine ran the prompt ids that were sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace

from slime.utils.mask_rows import pack_training_rows
from slime_plugins.rollout_buffer.types import Generation, PromptCheck, TrainingRow

MAX_EXTRA_SHARE = 0.2
"""Share of a job's row tokens that are duplicated because of differing prompts, above which diagnosis reports it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptCounts:
    """Turns by the result of the prompt check. The names are those of the columns of ``prompt_sums``.

    ``untrained`` turns are also counted as equal, differing or unknown. ``forked`` counts the additional rows that
    differing prompts made necessary, ``extra_tokens`` the tokens that these rows repeat, and ``row_tokens`` the tokens
    of all rows.
    """

    equal: int = 0
    differing: int = 0
    unknown: int = 0
    untrained: int = 0
    forked: int = 0
    extra_tokens: int = 0
    row_tokens: int = 0

    def as_dict(self) -> dict[str, int]:
        """Returns the counts by name; ``checked`` are the turns whose prompt ids the engine returned."""
        return {"checked": self.equal + self.differing, **asdict(self)}


def prompt_counts(generations: Sequence[Generation]) -> PromptCounts | None:
    """Counts the receipts of a trajectory's turns; None if there are none."""
    receipts = [one.prompt_receipt for one in generations if one.prompt_receipt is not None]
    if not receipts:
        return None
    checks = Counter(receipt.check for receipt in receipts)
    rows = _rows(generations)
    forked = extra_tokens = 0
    if checks[PromptCheck.DIFFERING]:
        as_sent = _rows(_as_sent(generations))
        forked = max(0, len(rows) - len(as_sent))
        extra_tokens = max(0, _tokens(rows, generations) - _tokens(as_sent, generations))
    return PromptCounts(
        equal=checks[PromptCheck.EQUAL],
        differing=checks[PromptCheck.DIFFERING],
        unknown=checks[PromptCheck.UNKNOWN],
        untrained=sum(bool(receipt.untrained_because) for receipt in receipts),
        forked=forked,
        extra_tokens=extra_tokens,
        row_tokens=_tokens(rows, generations),
    )


def _rows(generations: Iterable[Generation]) -> list[TrainingRow]:
    return pack_training_rows([replace(one, output_log_probs=None) for one in generations])


def _as_sent(generations: Iterable[Generation]) -> list[Generation]:
    """Returns the turns with the prompt ids that were sent in place of the ids that the engine ran."""
    return [
        replace(one, prompt_ids=one.prompt_receipt.sent_ids)
        if one.prompt_receipt is not None and one.prompt_receipt.sent_ids is not None
        else one
        for one in generations
    ]


def _tokens(rows: Iterable[TrainingRow], generations: Iterable[Generation]) -> int:
    """Counts tokens, with images expanded where the engine returned their numbers of tokens."""
    expanded: dict[str, int] = {}
    for one in generations:
        if one.images is not None and one.prompt_receipt is not None and one.prompt_receipt.image_tokens is not None:
            expanded.update(zip(one.images, one.prompt_receipt.image_tokens, strict=False))
    return sum(len(row.token_ids) + sum(expanded.get(image, 1) - 1 for image in row.images or ()) for row in rows)
