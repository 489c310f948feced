"""Converts delivered items to training rows. Pure, except for loading a tokenizer.

An item becomes one or more rows. They have the sampled tokens of its generations; without generations they are rebuilt
from its messages. Rows with images get the outputs of the model's image processor (``vision.py``).

An item that cannot be trained stays in its group as a dummy without rows. It gets the mean reward of the other members,
so that group means do not change.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from slime.utils.mask_generator import MultiTurnLossMaskGenerator
from slime.utils.mask_rows import (
    ROUTED_EXPERTS,
    TOP_P_TOKENS,
    Generation,
    TokenRecords,
    TrainingRow,
    pack_training_rows,
)
from slime.utils.mask_template import UndecidedReason
from slime_plugins.rollout_buffer.rules.reward_normalization import mean, token_returns
from slime_plugins.rollout_buffer.rules.validity import MAX_VOCABULARY
from slime_plugins.rollout_buffer.tokenizer_loading import vocabulary_size
from slime_plugins.rollout_buffer.trainer.batch_types import (
    RolloutGroup,
    RolloutRow,
    RolloutTrajectory,
    RowSource,
    TokenSource,
)
from slime_plugins.rollout_buffer.trainer.image_fetch import FetchedImages
from slime_plugins.rollout_buffer.trainer.mask_selection import (
    Masks,
    MaskSettings,
    is_last_reply_truncated,
    mask_generator,
)
from slime_plugins.rollout_buffer.trainer.settings import RowSettings
from slime_plugins.rollout_buffer.trainer.token_alignment import (
    ReadRecords,
    RecordProblemError,
    kept_ids_of_row,
    laid_out,
    mask_old_tokens,
    output_versions,
    read_records,
    routed_experts_of_row,
    trained_values,
    version_spans,
)
from slime_plugins.rollout_buffer.trainer.vision import (
    ImageMismatchError,
    ImageProblemError,
    RowImages,
    RowInputs,
    VisionFamily,
    image_hashes_in_messages,
    why_not_sent,
)
from slime_plugins.rollout_buffer.types import Outcome, WeightVersionSpan
from slime_plugins.rollout_buffer.wire import RolloutItem

logger = logging.getLogger(__name__)

Value = TypeVar("Value")

MANY_ROW_TOKENS = 500_000
"""Tokens in all rows of one rebuilt trajectory above which a warning is logged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Packed:
    """The rows of a trajectory with the generations that they index."""

    rows: list[TrainingRow]
    generations: Sequence[Generation]
    token_source: TokenSource
    row_source: RowSource
    returns: list[list[float]] | None = None
    """Returns of the output tokens of each generation; None if the turns have no rewards, or no discount is set."""
    old_tokens: int = 0
    """Number of tokens masked because of ``max_token_lag``."""
    records: ReadRecords = ()


class RowBuilder:
    """Converts delivered items to groups of ``samples_per_group`` members.

    ``counts`` counts rows, dummies and problems since its creation.
    """

    def __init__(self, settings: RowSettings) -> None:
        self._settings = settings
        self._row_images: RowImages | None = None
        self._trainer_version: int | None = None
        self._fetched_records = FetchedImages()
        self.counts: Counter[str] = Counter()

    def groups(
        self,
        items: Iterable[RolloutItem],
        vision: VisionFamily | None = None,
        images: FetchedImages | None = None,
        *,
        trainer_version: int | None = None,
        records: FetchedImages | None = None,
        image_threads: int = 1,
    ) -> list[RolloutGroup]:
        """Returns the groups of one delivery, each padded or cut to ``samples_per_group`` members.

        ``vision`` converts ``images``; without ``vision`` rows keep one placeholder per image. ``trainer_version`` is
        the trainer's weight version; if it is None (unknown), no token counts as too old. ``records`` are the fetched
        token records. ``image_threads`` is the number of threads that convert the images of a group.
        """
        self._trainer_version = trainer_version
        self._fetched_records = records or FetchedImages()
        members_by_group, ungrouped = _by_group(items)
        groups = []
        with ThreadPoolExecutor(image_threads, thread_name_prefix="images") as pool:
            for members in members_by_group:
                if vision is not None:
                    # The tensors of an image are large: the rows of a group share them, and then they are freed.
                    self._row_images = RowImages(vision, images or FetchedImages())
                    self._row_images.prepare(_image_hashes_of_group(members[: self._settings.samples_per_group]), pool)
                groups.append(self._group(members, ungrouped))
                self._row_images = None
        return groups

    def _group(self, items: list[RolloutItem], ungrouped: list[RolloutItem]) -> RolloutGroup:
        wanted = self._settings.samples_per_group
        surplus = len(items) - wanted
        if surplus > 0:
            self.counts["surplus_items"] += surplus
            logger.warning("group of %s has %d members too many; they are not trained", items[0].instance_id, surplus)
        taken = [*items[:wanted]]
        # A malformed item whose group is unknown fills a place, so that the dummy has the reason of its error.
        while ungrouped and len(taken) < wanted:
            taken.append(ungrouped.pop())
        members = [self._member(item) for item in taken]
        missing = range(len(members), wanted)
        members += [_as_dummy(_missing_item(items[0], slot), "the group came with too few members") for slot in missing]
        self.counts["dummies"] += sum(member.is_dummy for member in members)
        first = items[0]
        trajectories = _with_mean_reward_for_dummies(members)
        return RolloutGroup(group_index=first.group_index, instance_id=first.instance_id, trajectories=trajectories)

    def _member(self, item: RolloutItem) -> RolloutTrajectory:
        """Returns an item with its rows, or as a dummy with the reason."""
        refusal = _refusal(item)
        if refusal is not None:
            self.counts["malformed_items"] += item.error is not None
            return _as_dummy(item, refusal)
        self.counts["engine_image_mismatches"] += bool(item.extra_info.get("prompt_tokens_mismatch"))
        self.counts["repeated_tokens"] += _repeated_tokens(item.extra_info)
        try:
            if not_sent := why_not_sent(item.generations):
                raise ImageMismatchError(not_sent)
            packed = self._with_records(self._without_old_tokens(self._with_returns(item, self._packed(item))))
            rows = self._rows(item, packed)
        except (ImageProblemError, RecordProblemError) as problem:
            logger.warning("trajectory %s is not trained: %s", item.uid, problem)
            self.counts[problem.counter] += 1
            return _as_dummy(item, str(problem))
        except Exception as error:  # one broken item must not fail its delivery
            logger.exception("trajectory %s cannot be turned into tokens", item.uid)
            self.counts["malformed_items"] += 1
            return _as_dummy(item, f"{type(error).__name__}: {error}")
        if not rows:
            self.counts["untrained_trajectories"] += 1
            return _as_dummy(item, self._why_untrained(packed))
        wanted_by = self._settings.log_probs_wanted_by
        if wanted_by is not None and any(row.log_probs is None for row in rows):
            self.counts["without_log_probs"] += 1
            _warn_of_missing_log_probs(wanted_by)
            return _as_dummy(item, f"it has no log-probs of the engine, from which {wanted_by} computes the loss")
        self._count_rows(packed, rows)
        return replace(
            _trajectory(item),
            rows=tuple(rows),
            token_source=packed.token_source,
            row_source=packed.row_source,
            turn_returns=(None if packed.returns is None else tuple(tokens[0] for tokens in packed.returns if tokens)),
        )

    def _with_returns(self, item: RolloutItem, packed: _Packed) -> _Packed:
        """Adds the return of each sampled token, if the turns have rewards and ``turn_discount`` is set.

        Raises:
            ValueError: the numbers of trained turns and of rewards differ.
        """
        discount = self._settings.turn_discount
        if discount is None or (item.turn_rewards is None and item.token_rewards is None):
            return packed
        trained = [generation for generation in packed.generations if generation.trained]
        earned = item.turn_rewards if item.turn_rewards is not None else item.token_rewards
        if len(trained) != len(earned or ()):
            raise ValueError(
                f"{len(earned or ())} turns have rewards, but {len(trained)} turns are trained: rewards cannot be "
                "assigned to turns"
            )
        lengths = [len(generation.output_ids) for generation in trained]
        of_trained = iter(token_returns(item.turn_rewards, item.token_rewards, lengths, discount))
        self.counts["turn_rewards"] += 1
        return replace(packed, returns=[next(of_trained) if turn.trained else [] for turn in packed.generations])

    def _without_old_tokens(self, packed: _Packed) -> _Packed:
        version, max_lag = self._trainer_version, self._settings.max_token_lag
        if version is None or max_lag is None:
            return packed
        rows = [mask_old_tokens(row, packed.generations, version, max_lag) for row in packed.rows]
        masked = sum(sum(before.loss_mask) - sum(row.loss_mask) for before, row in zip(packed.rows, rows, strict=True))
        self.counts["old_tokens"] += masked
        return replace(packed, rows=rows, old_tokens=masked)

    def _with_records(self, packed: _Packed) -> _Packed:
        if not self._settings.records or not any(1 in row.loss_mask for row in packed.rows):
            return packed
        if packed.token_source is not TokenSource.GENERATIONS:
            raise RecordProblemError("its tokens were rebuilt from messages, which have no token records")
        records = read_records(packed.generations, self._settings.records, self._fetched_records)
        return replace(packed, records=records)

    def _why_untrained(self, packed: _Packed) -> str:
        """Returns why no token is trained; counts the trajectory if its tokens are too old."""
        if not packed.old_tokens:
            return "no token of it is trained"
        self.counts["old_trajectories"] += 1
        max_lag, version = self._settings.max_token_lag, self._trainer_version
        return f"its tokens are more than {max_lag} weight versions older than the trainer's version {version}"

    def _count_rows(self, packed: _Packed, rows: Sequence[RolloutRow]) -> None:
        self.counts[f"tokens_from_{packed.token_source}"] += 1
        self.counts["rows"] += len(rows)
        self.counts["row_tokens"] += sum(len(row.token_ids) for row in rows)
        if self._row_images is not None:
            self.counts["images"] += sum(len(row.images) for row in rows if row.train_inputs is not None)
        self.counts["image_tensor_bytes"] += sum(
            sum(int(tensor.nbytes) for tensor in (row.train_inputs or {}).values()) for row in rows
        )

    def _packed(self, item: RolloutItem) -> _Packed:
        if not item.generations:
            return self._rebuilt(item)
        if self._settings.masks.is_users_generator:
            _warn_of_unused_mask()
        rows = _with_image_hashes(pack_training_rows(item.generations), item)
        self._check_vocabulary(rows)
        self._count_drift(item)
        return _Packed(
            rows=rows,
            generations=item.generations,
            token_source=TokenSource.GENERATIONS,
            row_source=RowSource.GENERATIONS,
        )

    def _check_vocabulary(self, rows: Sequence[TrainingRow]) -> None:
        """Refuses ids without an embedding, which would crash the training of the whole batch.

        Raises:
            ValueError: an id is outside of the vocabulary.
        """
        size = vocabulary_size(self._settings.masks.tokenizer_path) or MAX_VOCABULARY
        extremes = [(min(row.token_ids), max(row.token_ids)) for row in rows if row.token_ids]
        if invalid := [token_id for pair in extremes for token_id in pair if not 0 <= token_id < size]:
            raise ValueError(f"the token id {invalid[0]} is not in the vocabulary of {size} ids")

    def _rebuilt(self, item: RolloutItem) -> _Packed:
        """Rebuilds rows from the messages. The mask decides what is trained: by default all assistant messages."""
        messages = list(item.messages)
        rebuilt = mask_generator(self._settings.masks).rebuild_rows(
            messages,
            _tools(item),
            cut=is_last_reply_truncated(item),
            images_before=lambda index: image_hashes_in_messages(messages[: index + 1]),
            max_tokens=self._settings.max_row_tokens,
        )
        row_source = RowSource.TURNS if rebuilt.by_turn else RowSource.CONVERSATION
        self.counts[f"token_drift/rebuilt_{row_source}"] += 1
        # An empty thinking block is in the prompt of every turn without thinking, and is no problem.
        undecided = {part.reason for part in rebuilt.undecided} - {UndecidedReason.EMPTY_THINKING}
        self.counts["token_drift/undecided"] += bool(undecided)
        rows = rebuilt.rows
        if sum(len(row.token_ids) for row in rows) > MANY_ROW_TOKENS:
            _warn_of_long_rows()
        if not rebuilt.by_turn:  # a custom mask may return any ids; rows by turn have the tokenizer's, and their images
            self._check_vocabulary(rows)
            rows = [replace(row, images=image_hashes_in_messages(messages)) for row in rows]
        return _Packed(
            rows=rows, generations=rebuilt.generations, token_source=TokenSource.MESSAGES, row_source=row_source
        )

    def _rows(self, item: RolloutItem, packed: _Packed) -> list[RolloutRow]:
        rows: list[RolloutRow] = []
        for number, row in enumerate(packed.rows):
            if not any(row.loss_mask):
                continue
            inputs = self._with_images(row, item, packed.generations)
            start = _response_start(inputs.row)
            if start is not None:
                rows.append(self._row(item, packed, row, inputs, start, number=number))
        return rows

    def _row(
        self, item: RolloutItem, packed: _Packed, row: TrainingRow, inputs: RowInputs, start: int, *, number: int
    ) -> RolloutRow:
        sampled = [packed.generations[index] for index in row.generation_indices] if packed.generations else []
        counted = [generation for generation in sampled if generation.cached_tokens is not None]
        return RolloutRow(
            uid=item.uid,
            group_index=item.group_index,
            number=number,
            token_ids=list(inputs.row.token_ids),
            loss_mask=[0, *map(int, inputs.row.loss_mask[1:])],
            log_probs=None if inputs.row.log_probs is None else [float(value) for value in inputs.row.log_probs],
            response_start=start,
            reward=_reward(item.reward),
            weight_versions=tuple(_versions(sampled)),
            prompt_tokens=sum(generation.prompt_tokens or len(generation.prompt_ids) for generation in counted),
            cached_tokens=sum(generation.cached_tokens or 0 for generation in counted),
            images=inputs.row.images or (),
            train_inputs=inputs.train_inputs,
            pictures=inputs.pictures if self._settings.keep_pictures else (),
            version_spans=_version_spans(packed, row, inputs.row),
            trainer_version=self._trainer_version,
            returns=_returns(packed, row, inputs.row),
            records=self._records(packed, row, inputs.row, start),
        )

    def _records(self, packed: _Packed, row: TrainingRow, expanded: TrainingRow, start: int) -> dict[str, TokenRecords]:
        records = {}
        if ROUTED_EXPERTS in self._settings.records:
            width = self._settings.experts_width
            records[ROUTED_EXPERTS] = routed_experts_of_row(row, expanded, packed.generations, packed.records, width)
        if TOP_P_TOKENS in self._settings.records:
            records[TOP_P_TOKENS] = kept_ids_of_row(row, expanded, packed.generations, packed.records, start)
        return records

    def _with_images(self, row: TrainingRow, item: RolloutItem, generations: Sequence[Generation]) -> RowInputs:
        if self._row_images is None or not images_of(item):
            return RowInputs(row=row, train_inputs=None, pictures=())
        return self._row_images.attach(row, generations)

    def _count_drift(self, item: RolloutItem) -> None:
        """Counts the differences between the sampled tokens, which are trained, and tokens rebuilt from messages."""
        if not self._settings.report_drift or not item.messages:
            return
        generator = self._drift_generator
        if generator is None:
            self.counts["token_drift/unknown"] += 1
            return
        try:
            report = generator.report_drift(item.messages, item.generations, _tools(item))
        except Exception:  # a failed report must not remove the trajectory from the batch
            logger.exception("the token drift of %s cannot be measured", item.uid)
            self.counts["token_drift/unknown"] += 1
        else:
            self.counts.update(f"token_drift/{kind}" for kind in report.kinds or ["clean"])

    @property
    def _drift_generator(self) -> MultiTurnLossMaskGenerator | None:
        """Returns the mask generator that measures drift; None if there is no tokenizer or it cannot be loaded, or for
        a custom mask that only has ``get_loss_mask``.
        """
        if not self._settings.masks.tokenizer_path:
            return None
        generator = _mask_generator_or_none(self._settings.masks)
        return generator if isinstance(generator, MultiTurnLossMaskGenerator) else None


def _image_hashes_of_group(members: Sequence[RolloutItem]) -> Iterator[str]:
    """Yields the image hashes of members that may be trained and whose images were sent to the engine."""
    for item in members:
        if _refusal(item) is None and not why_not_sent(item.generations):
            yield from images_of(item)


def images_of(item: RolloutItem) -> list[str]:
    """Returns the hashes of all images that a trajectory may need, each once."""
    in_generations = (sha256 for generation in item.generations for sha256 in generation.images or ())
    return list(dict.fromkeys([*item.images, *in_generations, *image_hashes_in_messages(item.messages)]))


def images_of_rows(item: RolloutItem) -> list[str]:
    """Returns the image hashes of a trajectory's rows. An image is listed as often as its tensors are copied."""
    if not item.generations:
        return list(image_hashes_in_messages(item.messages))
    rows = _with_image_hashes(pack_training_rows(item.generations), item)
    return [sha256 for row in rows for sha256 in row.images or ()]


# --- one group -------------------------------------------------------------------------------------------------------


def _by_group(items: Iterable[RolloutItem]) -> tuple[list[list[RolloutItem]], list[RolloutItem]]:
    """Returns the items by group, and the malformed items whose group is unknown."""
    groups: dict[Any, list[RolloutItem]] = {}
    ungrouped = []
    for item in items:
        if item.group_index >= 0:
            groups.setdefault(item.group_index, []).append(item)
        elif item.error is None:
            groups.setdefault((item.instance_id, item.epoch), []).append(item)
        else:
            ungrouped.append(item)
    return list(groups.values()), ungrouped


def _refusal(item: RolloutItem) -> str | None:
    """Returns why an item is not trained; None if it may be trained."""
    if item.error is not None:
        return item.error
    if item.remove_sample:
        return str(item.extra_info.get("remove_reason") or "the buffer could not fill this slot")
    if item.outcome in (Outcome.ABORTED, Outcome.FAILED):
        return f"its outcome is {item.outcome}"
    return None if item.reward is not None else "it has no reward"


def _missing_item(member: RolloutItem, slot: int) -> RolloutItem:
    """Returns a dummy item for a missing member of a group."""
    return RolloutItem(
        uid=f"{member.instance_id}.{member.epoch}.{slot}.dummy",
        instance_id=member.instance_id,
        group_index=member.group_index,
        epoch=member.epoch,
        slot=slot,
        outcome=Outcome.FAILED.value,
        remove_sample=True,
    )


def _with_mean_reward_for_dummies(members: Sequence[RolloutTrajectory]) -> tuple[RolloutTrajectory, ...]:
    """Sets the rewards of dummies to the means of the group's other members."""
    real = [member for member in members if not member.is_dummy]
    reward, raw_reward = mean([member.reward for member in real]), mean([member.raw_reward for member in real])
    return tuple(
        replace(member, reward=reward, raw_reward=raw_reward) if member.is_dummy else member for member in members
    )


# --- one item --------------------------------------------------------------------------------------------------------


def _trajectory(item: RolloutItem) -> RolloutTrajectory:
    timings = item.raw.get("timings_s")
    return RolloutTrajectory(
        uid=item.uid,
        instance_id=item.instance_id,
        group_index=item.group_index,
        epoch=item.epoch,
        slot=item.slot,
        reward=_reward(item.reward),
        raw_reward=_reward(item.reward if item.raw_reward is None else item.raw_reward),
        outcome=item.outcome,
        stop_reason=item.stop_reason,
        has_images=bool(images_of(item)),
        weight_version=item.weight_version,
        replies=_replies(item),
        extra_info=item.extra_info,
        timings_s=timings if isinstance(timings, dict) else {},
    )


def _as_dummy(item: RolloutItem, reason: str) -> RolloutTrajectory:
    return replace(_trajectory(item), dummy_reason=reason)


def _returns(packed: _Packed, row: TrainingRow, expanded: TrainingRow) -> list[float] | None:
    if packed.returns is None:
        return None
    return _along(expanded, trained_values(row, packed.generations, packed.returns), 0.0)


def _version_spans(packed: _Packed, row: TrainingRow, expanded: TrainingRow) -> tuple[WeightVersionSpan, ...]:
    if not packed.generations or packed.token_source is TokenSource.MESSAGES:
        return ()
    versions = [[version or "" for version in output_versions(generation)] for generation in packed.generations]
    return version_spans(_along(expanded, trained_values(row, packed.generations, versions), ""))


def _along(row: TrainingRow, values: Sequence[Value], elsewhere: Value) -> list[Value]:
    """Returns one value per token of a row: the next of ``values`` at a trained token, ``elsewhere`` at another.

    The first token gets ``elsewhere`` even if its mask is 1, because it is never trained.
    """
    by_token = laid_out(row.loss_mask, values, elsewhere)
    return [elsewhere, *by_token[1:]]


def _response_start(row: TrainingRow) -> int | None:
    """Returns the index of the first trained token, None if there is none.

    Token 0 is never trained, because the model has no logits before it.
    """
    token_ids, loss_mask, log_probs = row.token_ids, row.loss_mask, row.log_probs
    if len(loss_mask) != len(token_ids) or (log_probs is not None and len(log_probs) != len(token_ids)):
        raise ValueError(f"the mask or log-probs of {len(token_ids)} tokens have another length")
    return next((index for index, trained in enumerate(loss_mask) if trained and index), None)


def _with_image_hashes(rows: list[TrainingRow], item: RolloutItem) -> list[TrainingRow]:
    """Adds the images of the messages to a single row whose generations do not name their images."""
    if len(rows) != 1 or rows[0].images is not None:
        return rows
    return [replace(rows[0], images=image_hashes_in_messages(item.messages))]


def _replies(item: RolloutItem) -> str:
    """Returns the joined text of the assistant messages."""
    contents = [message.get("content") for message in item.messages if message.get("role") == "assistant"]
    return "\n".join(content for content in contents if isinstance(content, str))


def _versions(sampled: Sequence[Generation]) -> list[str]:
    """Returns the weight versions of the row's turns, in order; a resumed turn has several."""
    versions: list[str] = []
    for generation in sampled:
        spans = [span.weight_version for span in generation.weight_version_spans]
        versions += spans or ([generation.weight_version] if generation.weight_version is not None else [])
    return versions


def _tools(item: RolloutItem) -> list[dict[str, Any]] | None:
    tools = item.raw.get("tools") or item.extra_info.get("tools")
    return tools if isinstance(tools, list) else None


def _reward(value: Any) -> float:
    return 0.0 if value is None else float(value)


# --- logged once -----------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4)
def _mask_generator_or_none(settings: MaskSettings) -> Masks | None:
    """Returns the mask generator, or None, with a warning, if it cannot be loaded."""
    try:
        return mask_generator(settings)
    except Exception as error:  # noqa: BLE001 - a failed report must not fail a rollout
        logger.warning("token drift is not measured: the tokenizer cannot be loaded: %s", error)
        return None


@functools.lru_cache(maxsize=1)
def _warn_of_unused_mask() -> None:
    logger.warning(
        "trajectories contain the sampled tokens, and exactly these are trained: the custom loss mask applies only to "
        "trajectories that consist of messages alone"
    )


@functools.lru_cache(maxsize=1)
def _warn_of_missing_log_probs(flag: str) -> None:
    logger.warning(
        "%s computes the loss from the engine's log-probs: trajectories without them are not trained. Only "
        "trajectories with generations have them",
        flag,
    )


@functools.lru_cache(maxsize=1)
def _warn_of_long_rows() -> None:
    logger.warning(
        "a trajectory rebuilt from its messages has rows with more than %d tokens in total, because its template drops "
        "earlier reasoning: rollout_buffer_max_row_tokens limits this total, and rollout/buffer/row_tokens measures it",
        MANY_ROW_TOKENS,
    )


def _repeated_tokens(extra_info: Mapping[str, Any]) -> int:
    """Returns the number of context tokens that the branches of a gateway session, or of a remote rollout, repeat."""
    session = extra_info.get("gateway", extra_info.get("remote_rollout"))
    repeated = session.get("repeated_ids") if isinstance(session, dict) else None
    return repeated if isinstance(repeated, int) else 0
