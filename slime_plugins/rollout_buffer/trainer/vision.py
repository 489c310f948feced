"""From training rows with one placeholder per image to what a vision model is trained on.

An engine gets one placeholder for each image and expands it; a training row holds the expanded run, and beside it go
the tensors that the model's own image processor makes of the images, joined along their first dimension in the order
of the placeholders. Nothing here is guessed or mended: a row whose tokens, images and grids do not agree, or whose
prompt the engine counted otherwise, is refused with its reason.

torch and the processor are imported when the first trajectory with images comes, and only here. A model family is one
class with three methods (``VisionFamily``) and one line in ``FAMILIES``.
"""

from __future__ import annotations

import functools
import io
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any, ClassVar, Protocol

from slime.utils.mask_rows import Generation, TrainingRow, expand_image_tokens
from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.tokenizer_loading import load_tokenizer
from slime_plugins.rollout_buffer.trainer.image_fetch import FetchedImages

logger = logging.getLogger(__name__)

IMAGE_URL_PREFIX = "sha256:"


class ImageProblemError(ValueError):
    """A trajectory that cannot be trained because of its images. ``counter`` is the metric that counts it."""

    counter: ClassVar[str] = "image_mismatches"


class ImageMismatchError(ImageProblemError):
    """Tokens, images and grids do not agree, or the engine counted otherwise than the processor."""


class ImageUnavailableError(ImageProblemError):
    """An image could not be had, or is none."""

    counter: ClassVar[str] = "images_missing"


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageFeatures:
    """What the processor made of one image: tensors to join along dimension 0, and how many tokens it becomes."""

    tensors: Mapping[str, Any]
    tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RowInputs:
    """A row with its placeholders expanded, the model's inputs beside it (None without images), and the pictures."""

    row: TrainingRow
    train_inputs: dict[str, Any] | None
    pictures: tuple[Any, ...]


class VisionFamily(Protocol):
    """What differs between models that see. One object serves all trajectories of a process."""

    @property
    def placeholder_id(self) -> int:
        """The token that stands for one image in a prompt, and for one image token in a training row."""
        ...

    def prepare(self, picture: Any) -> ImageFeatures:
        """Returns what the model's own processor makes of one picture (a PIL image)."""
        ...

    def check_tokens(self, token_ids: Sequence[int]) -> None:
        """Looks at a row with one placeholder per image.

        Raises:
            ImageMismatchError: vision tokens stand where the model would not understand them.
        """
        ...

    def join(self, features: Sequence[ImageFeatures]) -> dict[str, Any]:
        """Returns the inputs of several images, in their order.

        Raises:
            ImageMismatchError: the joined tensors do not fit each other.
        """
        ...


class QwenVision:
    """Qwen-VL models: ``pixel_values`` holds one row per patch, ``image_grid_thw`` one row per image.

    An image becomes ``grid.prod() / merge_size ** 2`` tokens between its two markers. Positions are computed by the
    model from tokens and grids: it looks for an image behind each opening marker, so each placeholder must follow one.
    """

    def __init__(
        self,
        processor: Any,
        *,
        concat: Callable[[list[Any]], Any],
        tensor_type: str = "pt",
        cast: Callable[[Any], Any] | None = None,
    ) -> None:
        """``concat`` joins the tensors of ``tensor_type`` along dimension 0; ``cast`` changes the pixels' type."""
        self._image_processor = processor.image_processor
        self._concat = concat
        self._tensor_type = tensor_type
        self._cast = cast
        self._placeholder_id = _token_id(processor, "<|image_pad|>")
        self._opening_id = _token_id(processor, "<|vision_start|>")
        self._video_id = _token_id(processor, "<|video_pad|>")

    @property
    def placeholder_id(self) -> int:
        """As ``VisionFamily``: the id of ``<|image_pad|>``."""
        return self._placeholder_id

    def prepare(self, picture: Any) -> ImageFeatures:
        """As ``VisionFamily``."""
        made = self._image_processor(images=[picture], return_tensors=self._tensor_type)
        pixels, grid = made["pixel_values"], made["image_grid_thw"]
        patches = math.prod(int(side) for side in grid[0])
        merged = int(self._image_processor.merge_size) ** 2
        if tuple(grid.shape) != (1, 3) or patches % merged or int(pixels.shape[0]) != patches:
            raise ImageMismatchError(f"the processor made {pixels.shape[0]} patches with the grid {grid.tolist()}")
        tensors = {"pixel_values": pixels if self._cast is None else self._cast(pixels), "image_grid_thw": grid}
        return ImageFeatures(tensors=tensors, tokens=patches // merged)

    def check_tokens(self, token_ids: Sequence[int]) -> None:
        """As ``VisionFamily``."""
        if self._video_id in token_ids:
            raise ImageMismatchError("a video token stands in a row, and no video was ever shown")
        for place, token_id in enumerate(token_ids):
            if token_id == self._placeholder_id and (not place or token_ids[place - 1] != self._opening_id):
                raise ImageMismatchError(f"the image placeholder at {place} does not follow <|vision_start|>")

    def join(self, features: Sequence[ImageFeatures]) -> dict[str, Any]:
        """As ``VisionFamily``."""
        names = ("pixel_values", "image_grid_thw")
        joined = {name: self._concat([one.tensors[name] for one in features]) for name in names}
        grids = joined["image_grid_thw"].tolist()
        patches = sum(math.prod(grid) for grid in grids)
        if len(grids) != len(features) or int(joined["pixel_values"].shape[0]) != patches:
            raise ImageMismatchError(f"{len(features)} images have {len(grids)} grids that stand for {patches} patches")
        return joined


FAMILIES: Mapping[str, Callable[..., VisionFamily]] = {
    "Qwen2_5_VLProcessor": QwenVision,
    "Qwen3VLProcessor": QwenVision,
}
"""By the class of the model's processor. Called with the processor, ``concat`` and ``cast``."""


@functools.lru_cache(maxsize=2)
def load_vision(checkpoint: str, pixel_dtype: str | None = None) -> VisionFamily | None:
    """Returns how the model of ``checkpoint`` sees, loaded once per process; None, with a warning, if it sees nothing.

    ``pixel_dtype`` (``bfloat16``, for instance) changes the type of the pixels; None leaves them as the processor
    made them.

    Raises:
        ConfigError: the processor of a vision model cannot be loaded, or is of a family that is not in the table.
    """
    why = "there is none beside its tokenizer"
    try:
        name, processor = _load_processor(checkpoint)
    except Exception as error:  # noqa: BLE001 - whatever is missing, the answer is the same: there is no processor
        why = str(error).strip()[:300]
    else:
        if getattr(processor, "image_processor", None) is not None:
            return _family_of(name, processor, pixel_dtype)
    if _is_vision_model(checkpoint):
        raise ConfigError(
            f"the image processor of the vision model {checkpoint} cannot be loaded where the rollout runs: {why}; "
            "install what it needs (often torchvision), or train on tokens alone (rollout_buffer_images: tokens)"
        )
    logger.warning("no image processor can be loaded from %s: %s", checkpoint, why)
    return None


def _is_vision_model(checkpoint: str) -> bool:
    from transformers import PretrainedConfig

    try:
        config, _ = PretrainedConfig.get_config_dict(checkpoint)
    except (OSError, ValueError):
        return False
    return "vision_config" in config


def _load_processor(checkpoint: str) -> tuple[str, Any]:
    """Returns the name of a model's processor and the processor.

    Its part for videos needs torchvision. Where the whole cannot be had, its parts for images and text are taken.
    """
    from transformers import AutoImageProcessor, AutoProcessor, ImageProcessingMixin

    try:
        processor = AutoProcessor.from_pretrained(checkpoint, trust_remote_code=True)
    except Exception:
        settings, _ = ImageProcessingMixin.get_image_processor_dict(checkpoint)
        if "processor_class" not in settings:
            raise
        image_processor = AutoImageProcessor.from_pretrained(checkpoint, trust_remote_code=True)
        tokenizer = load_tokenizer(checkpoint, trusted=True)
        parts = SimpleNamespace(image_processor=image_processor, tokenizer=tokenizer)
        return str(settings["processor_class"]), parts
    return type(processor).__name__, processor


def _family_of(name: str, processor: Any, pixel_dtype: str | None) -> VisionFamily:
    family = FAMILIES.get(name)
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        raise ConfigError(f"trajectories have images and {name} is not among {known}")
    import torch

    dtype = None if pixel_dtype is None else getattr(torch, pixel_dtype)
    return family(processor, concat=torch.concat, cast=None if dtype is None else lambda pixels: pixels.to(dtype))


class RowImages:
    """Gives rows their images. One for each group: what is made of an image serves all rows that show it."""

    def __init__(self, vision: VisionFamily, images: FetchedImages) -> None:
        self._vision = vision
        self._images = images
        self._features: dict[str, tuple[Any, ImageFeatures] | Exception] = {}

    def prepare(self, hashes: Iterable[str], pool: Executor) -> None:
        """Makes what rows will ask for, in the threads of ``pool``."""
        wanted = list(dict.fromkeys(hashes))
        self._features.update(zip(wanted, pool.map(self._made, wanted), strict=True))

    def attach(self, row: TrainingRow, generations: Sequence[Generation] = ()) -> RowInputs:
        """Returns the row as it is trained. ``generations`` are those of the trajectory, as the row counts them.

        Raises:
            ImageMismatchError: the numbers of placeholders and images differ, a vision token was sampled or stands
                where none belongs, or the engine counted another number of tokens in a prompt.
            ImageUnavailableError: an image is missing or cannot be read.
        """
        if row.images is None:
            raise ImageMismatchError("the generations do not say which images they saw")
        self._vision.check_tokens(row.token_ids)
        prepared = [self._prepared(sha256) for sha256 in row.images]
        counts = [features.tokens for _, features in prepared]
        self._check_turns(row, generations)
        expanded = _expanded(row, self._vision.placeholder_id, counts)
        joined = self._vision.join([features for _, features in prepared]) if prepared else None
        return RowInputs(row=expanded, train_inputs=joined, pictures=tuple(picture for picture, _ in prepared))

    def _prepared(self, sha256: str) -> tuple[Any, ImageFeatures]:
        if sha256 not in self._features:
            self._features[sha256] = self._made(sha256)
        made = self._features[sha256]
        if isinstance(made, Exception):
            raise made
        return made

    def _made(self, sha256: str) -> tuple[Any, ImageFeatures] | Exception:
        """A picture and what the one call of the processor made of it; or why that cannot be had."""
        try:
            picture = _picture(sha256, self._images)
            return picture, self._vision.prepare(picture)
        except Exception as error:  # noqa: BLE001 - each trajectory that shows it is refused, and no other
            return error

    def _check_turns(self, row: TrainingRow, generations: Sequence[Generation]) -> None:
        """Checks the images of each turn's prompt: the engine made its tokens with a processor of its own."""
        for index in row.generation_indices if generations else ():
            generation = generations[index]
            placeholders = list(generation.prompt_ids).count(self._vision.placeholder_id)
            _check_images_of_turn(generation, index, placeholders)
            if generation.is_trained and row.images is not None:
                tokens = [self._prepared(sha256)[1].tokens for sha256 in row.images[:placeholders]]
                _check_tokens_of_turn(generation, index, tokens)


def why_not_sent(generations: Sequence[Generation]) -> str:
    """Says which image of a turn is not the one whose bytes the engine was sent in its place; empty where all are."""
    for index, generation in enumerate(generations):
        sent = () if generation.prompt_receipt is None else generation.prompt_receipt.images
        if not sent or generation.images is None:
            continue
        for number, (ours, theirs) in enumerate(zip_longest(generation.images, sent, fillvalue="")):
            if ours != theirs:
                return (
                    f"image {number} of turn {index} is {ours[:12] or 'missing'}, and the engine was sent "
                    f"{theirs[:12] or 'none'} in its place"
                )
    return ""


def _check_images_of_turn(generation: Generation, index: int, placeholders: int) -> None:
    """An engine ignores images beyond the placeholders without a word."""
    if generation.images is not None and len(generation.images) != placeholders:
        raise ImageMismatchError(
            f"the prompt of turn {index} has {placeholders} image placeholders for {len(generation.images)} images"
        )


def _check_tokens_of_turn(generation: Generation, index: int, tokens: Sequence[int]) -> None:
    """Compares image by image what both processors made; by the sum where the engine tells no more than that."""
    receipt = generation.prompt_receipt
    if receipt is not None and receipt.image_tokens is not None:
        of_engine = receipt.image_tokens
        if len(of_engine) != len(tokens):
            raise ImageMismatchError(
                f"the engine saw {len(of_engine)} images in turn {index}, which shows {len(tokens)}"
            )
        for number, (theirs, ours) in enumerate(zip(of_engine, tokens, strict=True)):
            if theirs != ours:
                raise ImageMismatchError(
                    f"the engine made {theirs} tokens of image {number} of turn {index}, "
                    f"and this image processor makes {ours}"
                )
    elif generation.prompt_tokens is not None:
        expected = len(generation.prompt_ids) - len(tokens) + sum(tokens)
        if generation.prompt_tokens != expected:
            raise ImageMismatchError(
                f"the engine counted {generation.prompt_tokens} tokens in the prompt of turn {index}, "
                f"and this image processor makes it {expected}"
            )


def tensor_bytes(vision: VisionFamily, shown: Iterable[str], images: FetchedImages) -> int:
    """Returns about how much the tensors of images will take: one is made, the others go by their areas.

    0 where none of them can be read.
    """
    areas = {sha256: area for sha256, data in images.data.items() if (area := _area(data))}
    readable = [sha256 for sha256 in shown if sha256 in areas]
    for sha256 in dict.fromkeys(readable):
        try:
            tensors = vision.prepare(_picture(sha256, images)).tensors.values()
        except Exception:  # noqa: BLE001 - trajectories that show it are refused later, each with its reason
            continue
        made = sum(getattr(tensor, "nbytes", 0) for tensor in tensors)
        return round(made / areas[sha256] * sum(areas[one] for one in readable))
    return 0


def _area(data: bytes) -> int:
    """The pixels of an encoded picture, by its head alone; 0 for what is none."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data)) as picture:
            return int(picture.width * picture.height)
    except (OSError, ValueError, SyntaxError):
        return 0


def shown_in_messages(messages: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Returns the hashes of the images that an append-only conversation had shown by its last reply, in order.

    What is shown after the last reply stands in no generation.
    """
    shown: list[str] = []
    by_last_reply = 0
    for message in messages:
        if message.get("role") == "assistant":
            by_last_reply = len(shown)
        content = message.get("content")
        shown += [_hash_of(part) for part in content if _is_image(part)] if isinstance(content, list) else []
    return tuple(shown[:by_last_reply])


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url")


def _hash_of(part: Mapping[str, Any]) -> str:
    """Returns the sha256 an image part names; one that names none is refused later, as an image nobody has."""
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, Mapping) else None
    return str(url).removeprefix(IMAGE_URL_PREFIX)


def _token_id(processor: Any, token: str) -> int:
    token_id = processor.tokenizer.convert_tokens_to_ids(token)
    if token_id is None or token_id == getattr(processor.tokenizer, "unk_token_id", None):
        raise ConfigError(f"the tokenizer beside the image processor has no {token}: it belongs to another model")
    return int(token_id)


def _picture(sha256: str, images: FetchedImages) -> Any:
    from PIL import Image

    if sha256 not in images.data:
        reason = images.missing.get(sha256, "nobody has it")
        raise ImageUnavailableError(f"image {sha256[:12]} is missing: {reason}")
    try:
        picture = Image.open(io.BytesIO(images.data[sha256]))
        picture.load()
    except (OSError, ValueError, SyntaxError) as error:
        raise ImageUnavailableError(f"image {sha256[:12]} cannot be read: {error}") from error
    return picture


def _expanded(row: TrainingRow, placeholder_id: int, counts: Sequence[int]) -> TrainingRow:
    try:
        expanded = expand_image_tokens(row, placeholder_id, counts)
    except ValueError as error:
        raise ImageMismatchError(str(error)) from error
    _check_expansion(row, expanded, placeholder_id, counts)
    return expanded


def _check_expansion(before: TrainingRow, after: TrainingRow, placeholder_id: int, counts: Sequence[int]) -> None:
    """Looks at the result and not at how it came about: runs as long as the grids say, all else as it was."""
    runs = _run_lengths(after.token_ids, placeholder_id)
    trained_images = any(
        mask for token, mask in zip(after.token_ids, after.loss_mask, strict=True) if token == placeholder_id
    )
    same_text = _without(before, placeholder_id) == _without(after, placeholder_id)
    if runs != list(counts) or trained_images or not same_text:
        raise ImageMismatchError(f"a row with images of {list(counts)} tokens was expanded to runs of {runs}")


def _run_lengths(token_ids: Sequence[int], placeholder_id: int) -> list[int]:
    runs: list[int] = []
    before = None
    for token_id in token_ids:
        if token_id == placeholder_id:
            if before == placeholder_id:
                runs[-1] += 1
            else:
                runs.append(1)
        before = token_id
    return runs


def _without(row: TrainingRow, placeholder_id: int) -> list[tuple[int, int, float]]:
    log_probs = row.log_probs or [0.0] * len(row.token_ids)
    columns = zip(row.token_ids, row.loss_mask, log_probs, strict=True)
    return [column for column in columns if column[0] != placeholder_id]
