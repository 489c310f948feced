"""From delivered items to slime's Samples, and the rewards the loss sees. Pure but for loading a tokenizer.

An item becomes one Sample per training row: from its generations, token by token as they were sampled, or rebuilt turn
by turn from its messages when it carries none. Rows that show images get them as the model's own processor makes them,
where there is one (``agent_rollout_multimodal.py``).

An item that cannot be trained becomes a dummy: two tokens, nothing trained, ``remove_sample`` set. A dummy carries the
mean reward of its group's other members, so that it moves neither the baseline of slime's own normalisation nor the
logged mean.
"""

from __future__ import annotations

import functools
import logging
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slime.rollout.agent_rollout_image_fetch import FetchedImages
from slime.rollout.agent_rollout_masks import Masks, MaskSettings, mask_generator, read_mask_settings
from slime.rollout.agent_rollout_multimodal import (
    ImageProblemError,
    RowImages,
    RowInputs,
    VisionFamily,
    shown_in_messages,
)
from slime.utils.mask_generator import (
    Generation,
    MultiTurnLossMaskGenerator,
    TrainingRow,
    UndecidedReason,
    pack_training_rows,
)
from slime.utils.types import Sample
from slime_plugins.rollout_buffer.rules.vocabulary import LARGEST_VOCABULARY, vocabulary_size
from slime_plugins.rollout_buffer.wire import RolloutItem

__all__ = [
    "Group",
    "SampleConverter",
    "consumed_ids",
    "finish_batch",
    "group_normalized_rewards",
    "images_of",
    "is_agent_group",
    "log_probs_wanted_by",
    "rows_of",
    "trajectories_of",
]

logger = logging.getLogger(__name__)

Group = list[Any]
"""n members; a member is a Sample, or a list of Samples where its trajectory became several rows."""

TOKENS_FROM_GENERATIONS = "generations"
TOKENS_FROM_MESSAGES = "messages"
TOKENS_OF_DUMMY = "dummy"

ROWS_BY_TURN = "turns"
"""``row_source`` of rows rebuilt from messages turn by turn; ``conversation`` where one mask covers the whole."""
ROWS_OF_CONVERSATION = "conversation"
STOPS_THAT_CUT = frozenset({"max_tokens", "max_context", "forbidden_token"})
"""Stop reasons that say that the last reply itself was cut."""
STOPS_BETWEEN_TURNS = frozenset({"max_turns", "terminated", "answered"})
MANY_ROW_TOKENS = 500_000
"""Tokens in all rows of one rebuilt trajectory from which on their cost is warned of."""
FINISH_REASONS_THAT_CUT = frozenset({"length", "abort"})

DUMMY_TOKENS = (0, 0)
MODEL_PARALLEL_ARGUMENTS = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
VIRTUAL_PIPELINE_ARGUMENTS = ("virtual_pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage")
STD_EPSILON = 1e-6
NORMALIZING_ESTIMATORS = frozenset({"grpo", "gspo", "cispo", "reinforce_plus_plus_baseline"})
STD_ESTIMATORS = frozenset({"grpo", "gspo", "cispo"})


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """One sequence ready for a Sample: ``loss_mask`` and ``log_probs`` cover the response alone."""

    tokens: list[int]
    loss_mask: list[int]
    log_probs: list[float] | None
    weight_versions: list[str]
    train_inputs: dict[str, Any] | None = None
    pictures: tuple[Any, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Packed:
    """The rows of a trajectory with the generations that they index, and where they came from."""

    rows: list[TrainingRow]
    generations: Sequence[Generation]
    token_source: str
    row_source: str


class SampleConverter:
    """Turns delivered items into groups of exactly n members, and counts what it met on the way."""

    def __init__(self, args: Any, *, samples_per_group: int) -> None:
        self._args = args
        self._samples_per_group = samples_per_group
        self._row_images: RowImages | None = None
        self.counts: Counter[str] = Counter()

    def groups(
        self, items: Iterable[RolloutItem], vision: VisionFamily | None = None, images: FetchedImages | None = None
    ) -> list[Group]:
        """Returns the groups of one delivery, each padded with dummies or cut to exactly n members.

        ``vision`` gives the rows their ``images``; without it they keep one placeholder for each.
        """
        members_by_group, ungrouped = _by_group(items)
        groups = []
        for members in members_by_group:
            # What is made of an image lives as long as its group is at work: siblings share it, and it is large.
            self._row_images = None if vision is None else RowImages(vision, images or FetchedImages())
            groups.append(self._group(members, ungrouped))
        self._row_images = None
        return groups

    def _group(self, items: list[RolloutItem], ungrouped: list[RolloutItem]) -> Group:
        surplus = len(items) - self._samples_per_group
        if surplus > 0:
            self.counts["surplus_items"] += surplus
            logger.warning("group of %s has %d members too many; they are not trained", items[0].instance_id, surplus)
        taken = [*items[: self._samples_per_group]]
        while ungrouped and len(taken) < self._samples_per_group:
            taken.append(ungrouped.pop())
        members = [self._member(item) for item in taken]
        missing = range(len(members), self._samples_per_group)
        members += [[_dummy(_stand_in(items[0], slot), "the group came with too few members")] for slot in missing]
        self.counts["dummies"] += sum(rows[0].remove_sample for rows in members)
        _neutralize_dummies(members)
        return members_as_group(members)

    def _member(self, item: RolloutItem) -> list[Sample]:
        """Returns the Samples of one item: its rows, or one dummy that says why there are none."""
        refusal = _refusal(item)
        if refusal is not None:
            self.counts["malformed_items"] += item.error is not None
            return [_dummy(item, refusal)]
        self.counts["engine_image_mismatches"] += bool(item.extra_info.get("prompt_tokens_mismatch"))
        try:
            packed = self._packed(item)
            rows = self._rows(item, packed)
        except ImageProblemError as problem:
            logger.warning("trajectory %s is not trained: %s", item.uid, problem)
            self.counts[problem.counter] += 1
            return [_dummy(item, str(problem))]
        except Exception as error:  # one broken record must not block the delivery it came in
            logger.exception("trajectory %s cannot be turned into tokens", item.uid)
            self.counts["malformed_items"] += 1
            return [_dummy(item, f"{type(error).__name__}: {error}")]
        if not rows:
            self.counts["untrained_trajectories"] += 1
            return [_dummy(item, "no token of it is trained")]
        wanted_by = log_probs_wanted_by(self._args)
        if wanted_by is not None and any(row.log_probs is None for row in rows):
            self.counts["without_log_probs"] += 1
            _warn_of_missing_log_probs(wanted_by)
            return [_dummy(item, f"it has no log-probs of the engine, from which {wanted_by} computes the loss")]
        self.counts[f"tokens_from_{packed.token_source}"] += 1
        self.counts["rows"] += len(rows)
        self.counts["row_tokens"] += sum(len(row.tokens) for row in rows)
        self.counts["images"] += sum(len(row.pictures) for row in rows)
        self.counts["image_tensor_bytes"] += sum(_tensor_bytes(row.train_inputs) for row in rows)
        samples = [_sample(item, row, packed, number=number, of=len(rows)) for number, row in enumerate(rows)]
        if getattr(self._args, "rollout_buffer_keep_images", False):
            _keep_pictures(samples, rows)
        return samples

    def _packed(self, item: RolloutItem) -> _Packed:
        if not item.generations:
            return self._rebuilt(item)
        if self._mask_settings.is_own:
            _warn_of_unused_mask()
        rows = _told_their_images(pack_training_rows(item.generations), item)
        self._check_vocabulary(rows)
        self._count_drift(item)
        return _Packed(
            rows=rows,
            generations=item.generations,
            token_source=TOKENS_FROM_GENERATIONS,
            row_source=TOKENS_FROM_GENERATIONS,
        )

    def _check_vocabulary(self, rows: Sequence[TrainingRow]) -> None:
        """An id without an embedding would end the training of the whole batch, on the device and without a name.

        Raises:
            ValueError: the model does not have an id.
        """
        size = vocabulary_size(self._args.hf_checkpoint) or LARGEST_VOCABULARY
        for odd in (token_id for row in rows for token_id in _extremes(row.token_ids) if not 0 <= token_id < size):
            raise ValueError(f"the token id {odd} is not in the vocabulary of {size} ids")

    def _rebuilt(self, item: RolloutItem) -> _Packed:
        """Rebuilds rows from the messages: all that the policy wrote, in every turn, unless the type says otherwise."""
        messages = list(item.messages)
        rebuilt = mask_generator(self._mask_settings).rebuild_rows(
            messages,
            _tools(item),
            cut=_was_cut(item),
            images_before=lambda index: shown_in_messages(messages[: index + 1]),
            max_tokens=getattr(self._args, "rollout_buffer_max_row_tokens", None),
        )
        row_source = ROWS_BY_TURN if rebuilt.by_turn else ROWS_OF_CONVERSATION
        self.counts[f"token_drift/rebuilt_{row_source}"] += 1
        unknown = {one.reason for one in rebuilt.undecided} - {UndecidedReason.EMPTY_THINKING}
        self.counts["token_drift/undecided"] += bool(unknown)
        rows = rebuilt.rows
        row_tokens = sum(len(row.token_ids) for row in rows)
        if row_tokens > MANY_ROW_TOKENS:
            _warn_of_long_rows(len(rows), row_tokens)
        if not rebuilt.by_turn:
            self._check_vocabulary(rows)
            rows = [replace(row, images=shown_in_messages(messages)) for row in rows]
        return _Packed(
            rows=rows,
            generations=rebuilt.generations,
            token_source=TOKENS_FROM_MESSAGES,
            row_source=row_source,
        )

    def _rows(self, item: RolloutItem, packed: _Packed) -> list[_Row]:
        inputs = [(self._with_images(row, item, packed.generations), row) for row in packed.rows]
        rows = [_response_row(with_images, _versions(packed, row)) for with_images, row in inputs]
        return [row for row in rows if row is not None]

    def _with_images(self, row: TrainingRow, item: RolloutItem, generations: Sequence[Generation]) -> RowInputs:
        if self._row_images is None or not images_of(item):
            return RowInputs(row=row, train_inputs=None, pictures=())
        return self._row_images.attach(row, generations)

    def _count_drift(self, item: RolloutItem) -> None:
        """Counts what rebuilding the tokens from messages would have changed; the sampled ones are trained anyway."""
        if not getattr(self._args, "rollout_buffer_report_drift", True) or not item.messages:
            return
        generator = self._drift_measure
        if generator is None:
            self.counts["token_drift/unknown"] += 1
            return
        try:
            report = generator.report_drift(item.messages, item.generations, _tools(item))
        except Exception:  # a report that fails must not cost the trajectory
            logger.exception("the token drift of %s cannot be measured", item.uid)
            self.counts["token_drift/unknown"] += 1
        else:
            self.counts.update(f"token_drift/{kind}" for kind in report.kinds or ["clean"])

    @property
    def _drift_measure(self) -> MultiTurnLossMaskGenerator | None:
        """What drift is measured with; None where there is no tokenizer, which sampled tokens do not need."""
        if not self._args.hf_checkpoint:
            return None
        generator = _mask_generator_or_none(self._mask_settings)
        return generator if isinstance(generator, MultiTurnLossMaskGenerator) else None

    @property
    def _mask_settings(self) -> MaskSettings:
        return read_mask_settings(self._args)


@functools.lru_cache(maxsize=1)
def _warn_of_unused_mask() -> None:
    logger.warning(
        "trajectories carry the tokens that were sampled, and exactly those are trained: the loss mask of one's own "
        "decides only for trajectories that come as messages alone"
    )


@functools.lru_cache(maxsize=1)
def _warn_of_missing_log_probs(flag: str) -> None:
    logger.warning(
        "%s computes the loss from the engine's log-probs: trajectories without them are not trained. They come with "
        "generations, never with messages alone",
        flag,
    )


@functools.lru_cache(maxsize=1)
def _warn_of_long_rows(rows: int, tokens: int) -> None:
    logger.warning(
        "a trajectory rebuilt from its messages is %d rows of %d tokens in all, because its template drops earlier "
        "reasoning: rollout_buffer_max_row_tokens bounds that, and rollout/buffer/row_tokens says what rows cost",
        rows,
        tokens,
    )


@functools.lru_cache(maxsize=4)
def _mask_generator_or_none(settings: MaskSettings) -> Masks | None:
    """Returns the mask generator, or None where it cannot be loaded, which is tried once per process and said once."""
    try:
        return mask_generator(settings)
    except Exception as error:  # noqa: BLE001 - a report that fails must not cost a rollout
        logger.warning("token drift is not measured: the tokenizer cannot be loaded: %s", error)
        return None


# --- one batch -------------------------------------------------------------------------------------------------------


def finish_batch(groups: Sequence[Group], rollout_id: int, args: Any = None) -> list[Group]:
    """Makes the groups of one rollout one batch, as slime's RolloutManager wants it.

    ``group_index`` and ``rollout_id`` become ints that are unique in the run; the rows of one trajectory share them.
    Every metadata has the same keys, and what slime forwards of it a value of one type on every sample. Log-probs are
    there on all samples or on none. Where any trajectory has several rows, every trajectory is a list.
    """
    first_trajectory = rollout_id * sum(len(group) for group in groups)
    trajectories = 0
    for position, group in enumerate(groups):
        for member in group:
            for sample in rows_of(member):
                sample.group_index = rollout_id * len(groups) + position
                sample.rollout_id = first_trajectory + trajectories
            trajectories += 1
    samples = [sample for group in groups for member in group for sample in rows_of(member)]
    _share_metadata_keys(samples)
    _agree_on_round_number(samples)
    _agree_on_source_name(samples)
    _agree_on_log_probs(samples, args)
    if len(samples) == trajectories:
        return [[rows_of(member)[0] for member in group] for group in groups]
    batch: list[Group] = [[rows_of(member) for member in group] for group in groups]
    _fill_steps([rows for group in batch for rows in group], args)
    return batch


def _fill_steps(trajectories: Sequence[list[Sample]], args: Any) -> None:
    """Adds untrained rows where the rows of a step do not go evenly into slime's ranks.

    Micro-batches of one size must: slime ends the training where they do not, and one row for each trajectory always
    does. ``--use-dynamic-batch-size`` packs any number.
    """
    size, share = getattr(args, "global_batch_size", None), _rows_divisor(args)
    if not size or share <= 1:
        return
    for start in range(0, len(trajectories) - size + 1, size):
        step = trajectories[start : start + size]
        missing = -sum(map(len, step)) % share
        step[-1].extend([_filler(step[-1][0]) for _ in range(missing)])
        if missing:
            _warn_of_fillers()


def _rows_divisor(args: Any) -> int:
    """Returns what slime divides the rows of a step by, as far as its arguments tell; 1 where it takes any number."""
    gpus = (getattr(args, "actor_num_nodes", None) or 0) * (getattr(args, "actor_num_gpus_per_node", None) or 0)
    if not gpus or getattr(args, "use_dynamic_batch_size", True):
        return 1
    if any(getattr(args, name, None) for name in VIRTUAL_PIPELINE_ARGUMENTS):
        return int(args.global_batch_size)  # ranks go in groups then, which divide a step of one row each
    parallel: int = math.prod(getattr(args, name, None) or 1 for name in MODEL_PARALLEL_ARGUMENTS)
    return max(1, gpus // parallel) * int(getattr(args, "micro_batch_size", None) or 1)


def _filler(sample: Sample) -> Sample:
    """Returns a row beside one of a trajectory that trains nothing."""
    return replace(
        sample,
        tokens=list(DUMMY_TOKENS),
        response_length=1,
        loss_mask=[0],
        rollout_log_probs=None if sample.rollout_log_probs is None else [0.0],
        multimodal_inputs=None,
        multimodal_train_inputs=None,
        remove_sample=True,
        metadata={**sample.metadata, "token_source": TOKENS_OF_DUMMY, "dummy_reason": "it fills up a training step"},
    )


@functools.lru_cache(maxsize=1)
def _warn_of_fillers() -> None:
    logger.warning(
        "trajectories of several rows make steps that fixed micro-batches do not divide: rows of two untrained tokens "
        "fill them up; --use-dynamic-batch-size needs none"
    )


def rows_of(member: Any) -> list[Sample]:
    """Returns the Samples of one member of a group, which is a Sample or a list of them."""
    return list(member) if isinstance(member, list) else [member]


def members_as_group(members: list[list[Sample]]) -> Group:
    """Returns a group as the data source keeps it: flat unless some trajectory has several rows."""
    return [rows if len(rows) > 1 else rows[0] for rows in members]


def trajectories_of(groups: Iterable[Group]) -> list[list[Sample]]:
    """Returns the rows of every trajectory of the groups, in order."""
    return [rows_of(member) for group in groups for member in group]


def is_agent_group(group: Any) -> bool:
    """Tells our groups from the bare prompts with which slime's data source fills up a short buffer."""
    first = group
    while isinstance(first, list) and first:
        first = first[0]
    return isinstance(first, Sample) and "token_source" in (first.metadata or {})


def consumed_ids(groups: Iterable[Group]) -> list[str]:
    """Returns the instance id of each group."""
    return [str(rows_of(group[0])[0].metadata["instance_id"]) for group in groups]


def _share_metadata_keys(samples: Sequence[Sample]) -> None:
    """slime decides by the first sample's keys what it reads of all of them."""
    keys = list(dict.fromkeys(key for sample in samples for key in sample.metadata))
    for sample in samples:
        sample.metadata = {key: sample.metadata.get(key) for key in keys}


def _agree_on_round_number(samples: Sequence[Sample]) -> None:
    """slime sums the round numbers of all samples. Who has none, a dummy for instance, gets the others' mean."""
    given: list[tuple[Sample, Any]] = [(sample, sample.metadata.get("round_number")) for sample in samples]
    known = [(sample, value) for sample, value in given if _is_finite(value) and not sample.remove_sample]
    if not known:
        for sample in samples:
            sample.metadata.pop("round_number", None)
        return
    whole = all(isinstance(value, int) for _, value in known)
    mean = _mean([float(value) for _, value in known])
    by_sample = {id(sample): value for sample, value in known}
    for sample in samples:
        value = by_sample.get(id(sample), mean)
        sample.metadata["round_number"] = round(value) if whole else float(value)


def _agree_on_source_name(samples: Sequence[Sample]) -> None:
    """slime takes the name of a sample's source as a text; a dummy has that of its group."""
    if not any("source_name" in sample.metadata for sample in samples):
        return
    by_group = {sample.group_index: _name(sample.metadata["source_name"]) for sample in samples[::-1] if _named(sample)}
    for sample in samples:
        own = sample.metadata["source_name"] if _named(sample) else by_group.get(sample.group_index)
        sample.metadata["source_name"] = _name(own)


def _named(sample: Sample) -> bool:
    return sample.metadata.get("source_name") not in (None, "")


def _name(source: Any) -> str:
    return str(source or "unknown")


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def log_probs_wanted_by(args: Any) -> str | None:
    """Returns the flag with which slime computes its loss from the engine's log-probs; None where it does not."""
    given = (getattr(args, name, False) for name in ("use_rollout_logprobs", "use_tis", "get_mismatch_metrics"))
    flags = ("--use-rollout-logprobs", "--use-tis", "--get-mismatch-metrics")
    return next((flag for flag, is_set in zip(flags, given, strict=True) if is_set), None)


def _asks_their_shape(args: Any) -> bool:
    """Tells whether slime takes the mere shape of its advantages from the engine's log-probs.

    It does so where it computes none of its own before the loss: one step for each rollout, without KL penalty, critic,
    old actor or teacher.
    """
    if getattr(args, "loss_type", None) != "policy_loss" or getattr(args, "kl_coef", None) != 0:
        return False
    if any(getattr(args, name, False) for name in ("use_critic", "keep_old_actor", "use_opd")):
        return False
    trajectories = args.rollout_batch_size * args.n_samples_per_prompt
    return bool(trajectories // (getattr(args, "global_batch_size", None) or trajectories) <= 1)


def _agree_on_log_probs(samples: Sequence[Sample], args: Any) -> None:
    """slime reads log-probs of every sample when the first one has them."""
    trained = [sample for sample in samples if not sample.remove_sample]
    lacking = [sample for sample in trained if sample.rollout_log_probs is None]
    if lacking and _asks_their_shape(args):
        _warn_of_unknown_log_probs(len(lacking), len(trained))
        for sample in lacking:
            sample.rollout_log_probs = [math.nan] * sample.response_length
    elif lacking or not trained:
        if len(lacking) < len(trained):
            logger.warning("some trajectories of this batch have no log-probs: the batch goes on without any")
        for sample in samples:
            sample.rollout_log_probs = None
        return
    for sample in samples:
        if sample.rollout_log_probs is None:
            sample.rollout_log_probs = [0.0] * sample.response_length


@functools.lru_cache(maxsize=1)
def _warn_of_unknown_log_probs(lacking: int, trained: int) -> None:
    logger.warning(
        "%d of %d rows have no log-probs of the engine, and slime wants their shape with one step for each rollout and "
        "no KL penalty: they are NaN, which shows in train_rollout_logprob_abs_diff and is in no loss",
        lacking,
        trained,
    )


# --- one item --------------------------------------------------------------------------------------------------------


def _by_group(items: Iterable[RolloutItem]) -> tuple[list[list[RolloutItem]], list[RolloutItem]]:
    """Sorts items into their groups; a malformed item that no longer says where it belongs is a stray."""
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
    """Says why an item is not trained, None when it may be."""
    if item.error is not None:
        return item.error
    if item.remove_sample:
        return str(item.extra_info.get("remove_reason") or "the buffer could not fill this slot")
    if item.outcome in ("aborted", "failed"):
        return f"its outcome is {item.outcome}"
    return None if item.reward is not None else "it has no reward"


def _stand_in(member: RolloutItem, slot: int) -> RolloutItem:
    """Returns a record for the missing member of a group, under a uid of its own."""
    return RolloutItem(
        uid=f"{member.instance_id}.{member.epoch}.{slot}.dummy",
        instance_id=member.instance_id,
        group_index=member.group_index,
        epoch=member.epoch,
        slot=slot,
        outcome="failed",
        remove_sample=True,
    )


def _response_row(inputs: RowInputs, versions: list[str]) -> _Row | None:
    """Cuts the first prompt off mask and log-probs; None when nothing is trained.

    The first token of all has nothing before it that could predict it, so it is always prompt.
    """
    token_ids, loss_mask, log_probs = inputs.row.token_ids, inputs.row.loss_mask, inputs.row.log_probs
    if len(loss_mask) != len(token_ids) or (log_probs is not None and len(log_probs) != len(token_ids)):
        raise ValueError(f"{len(token_ids)} tokens came with a mask or log-probs of another length")
    start = next((index for index, trained in enumerate(loss_mask) if trained and index), None)
    if start is None:
        return None
    return _Row(
        tokens=list(token_ids),
        loss_mask=[int(trained) for trained in loss_mask[start:]],
        log_probs=None if log_probs is None else [float(value) for value in log_probs[start:]],
        weight_versions=versions,
        train_inputs=inputs.train_inputs,
        pictures=inputs.pictures,
    )


def _extremes(token_ids: Sequence[int]) -> tuple[int, ...]:
    return (min(token_ids), max(token_ids)) if token_ids else ()


def images_of(item: RolloutItem) -> list[str]:
    """Returns the hashes of all images that a trajectory may need, each once."""
    in_generations = (sha256 for generation in item.generations for sha256 in generation.images or ())
    return list(dict.fromkeys([*item.images, *in_generations, *shown_in_messages(item.messages)]))


def _told_their_images(rows: list[TrainingRow], item: RolloutItem) -> list[TrainingRow]:
    """Fills in, for generations that do not say it, what an append-only episode of one row saw: all it was shown."""
    if len(rows) != 1 or rows[0].images is not None:
        return rows
    return [replace(rows[0], images=shown_in_messages(item.messages))]


def _keep_pictures(samples: Sequence[Sample], rows: Sequence[_Row]) -> None:
    for sample, row in zip(samples, rows, strict=True):
        if row.pictures:
            sample.multimodal_inputs = {"images": list(row.pictures)}


def _tensor_bytes(train_inputs: dict[str, Any] | None) -> int:
    return sum(int(tensor.nbytes) for tensor in (train_inputs or {}).values())


def _versions(packed: _Packed, row: TrainingRow) -> list[str]:
    """Returns the weight versions that sampled the row's turns, in order; a resumed turn has several."""
    versions: list[str] = []
    for index in row.generation_indices:
        generation = packed.generations[index]
        spans = [span.weight_version for span in generation.weight_version_spans]
        versions += spans or ([generation.weight_version] if generation.weight_version is not None else [])
    return versions


def _tools(item: RolloutItem) -> list[dict[str, Any]] | None:
    tools = item.raw.get("tools") or item.extra_info.get("tools")
    return tools if isinstance(tools, list) else None


def _was_cut(item: RolloutItem) -> bool:
    """Tells whether the last reply never came to its end of turn, as far as the item says so.

    The buffer calls every truncated episode ``length``, also one that ran out of turns; its stop reason tells.
    """
    if item.stop_reason in STOPS_BETWEEN_TURNS:
        return False
    return item.stop_reason in STOPS_THAT_CUT or item.extra_info.get("finish_reason") in FINISH_REASONS_THAT_CUT


def _sample(item: RolloutItem, row: _Row, packed: _Packed, *, number: int, of: int) -> Sample:
    return Sample(
        index=item.instance_id,
        prompt=item.uid,
        tokens=row.tokens,
        multimodal_train_inputs=row.train_inputs,
        response_length=len(row.loss_mask),
        reward=_reward(item.reward),
        loss_mask=row.loss_mask,
        rollout_log_probs=row.log_probs,
        weight_versions=row.weight_versions,
        status=_status(item),
        metadata=_metadata(item, source=packed.token_source, row_source=packed.row_source, row=number, rows=of),
        non_generation_time=_non_generation_time(item),
    )


def _dummy(item: RolloutItem, reason: str) -> Sample:
    """Returns the smallest sample that slime takes and does not train; its reward is set with its group."""
    return Sample(
        index=item.instance_id,
        prompt=item.uid,
        tokens=list(DUMMY_TOKENS),
        response_length=1,
        reward=0.0,
        loss_mask=[0],
        status=Sample.Status.ABORTED,
        remove_sample=True,
        metadata=_metadata(
            item, source=TOKENS_OF_DUMMY, row_source=TOKENS_OF_DUMMY, row=0, rows=1, dummy_reason=reason
        ),
    )


def _metadata(
    item: RolloutItem, *, source: str, row_source: str, row: int, rows: int, dummy_reason: str | None = None
) -> dict[str, Any]:
    return {
        **item.extra_info,
        "uid": item.uid,
        "instance_id": item.instance_id,
        "epoch": item.epoch,
        "slot": item.slot,
        "outcome": item.outcome,
        "stop_reason": item.stop_reason,
        "raw_reward": _reward(item.reward if item.raw_reward is None else item.raw_reward),
        "token_source": source,
        "row_source": row_source,
        "row": row,
        "rows": rows,
        "dummy_reason": dummy_reason,
        "has_images": bool(images_of(item)),
    }


def _status(item: RolloutItem) -> Sample.Status:
    """slime's own generators say only ``extra_info.finish_reason``; ours say the outcome."""
    truncated = item.outcome == "truncated" or item.extra_info.get("finish_reason") == "length"
    return Sample.Status.TRUNCATED if truncated else Sample.Status.COMPLETED


def _non_generation_time(item: RolloutItem) -> float:
    timings = item.raw.get("timings_s")
    if not isinstance(timings, dict):
        return 0.0
    return float(sum(s for phase, s in timings.items() if phase != "generate" and isinstance(s, int | float)))


def _neutralize_dummies(members: Sequence[list[Sample]]) -> None:
    """Gives dummies the mean of the group's real members, as reward and as raw reward."""
    real = [rows[0] for rows in members if not rows[0].remove_sample]
    reward = _mean([_number(sample.reward) for sample in real])
    raw_reward = _mean([float(sample.metadata["raw_reward"]) for sample in real])
    for rows in members:
        if rows[0].remove_sample:
            rows[0].reward = reward
            rows[0].metadata["raw_reward"] = raw_reward


def _number(reward: Any) -> float:
    return float(reward)


def _reward(value: Any) -> float:
    """slime puts the rewards of a batch into one tensor, and sums the raw ones."""
    return 0.0 if value is None else float(value)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


# --- rewards ---------------------------------------------------------------------------------------------------------


def group_normalized_rewards(args: Any, samples: Sequence[Sample]) -> tuple[list[float], list[float]]:
    """Returns raw and normalised rewards, one per sample: GRPO within each ``group_index``.

    Each trajectory counts once however many rows it has, and ``remove_sample`` dummies count not at all and get 0. The
    same arguments decide as in slime: the advantage estimator, ``--disable-rewards-normalization`` and
    ``--disable-grpo-std-normalization``; the standard deviation is the sample one (n - 1). A group with one member, or
    with equal rewards, has no advantage: 0.
    """
    raw_rewards = [float(sample.get_reward_value(args)) for sample in samples]
    estimator = getattr(args, "advantage_estimator", "grpo")
    if estimator not in NORMALIZING_ESTIMATORS or not getattr(args, "rewards_normalization", True):
        return raw_rewards, list(raw_rewards)
    by_std = estimator in STD_ESTIMATORS and getattr(args, "grpo_std_normalization", True)
    groups: dict[Any, dict[Any, float]] = {}
    for position, (sample, reward) in enumerate(zip(samples, raw_rewards, strict=True)):
        if not sample.remove_sample:
            groups.setdefault(sample.group_index, {})[_trajectory_key(sample, position)] = reward
    scales = {index: _baseline(list(rewards.values()), by_std=by_std) for index, rewards in groups.items()}
    normalized = []
    for sample, reward in zip(samples, raw_rewards, strict=True):
        mean, scale = scales.get(sample.group_index, (0.0, 0.0))
        normalized.append(0.0 if sample.remove_sample else (reward - mean) * scale)
    return raw_rewards, normalized


def _trajectory_key(sample: Sample, position: int) -> Any:
    return sample.rollout_id if sample.rollout_id is not None else ("row", position)


def _baseline(rewards: Sequence[float], *, by_std: bool) -> tuple[float, float]:
    """Returns what to subtract and what to multiply by; (mean, 0) where the rewards do not differ."""
    mean = _mean(rewards)
    if max(rewards) == min(rewards):
        return mean, 0.0
    if not by_std:
        return mean, 1.0
    variance = math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1)
    return mean, 1.0 / (math.sqrt(variance) + STD_EPSILON)
