"""A transformers model with the KV cache of its running requests: takes tokens, returns each request's last logits."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from rollout_buffer_lab.embedded_engine.kv_cache import SlotKvCache
from rollout_buffer_lab.embedded_engine.settings import EmbeddedEngineSettings
from rollout_buffer_lab.embedded_engine.vision_inputs import ImagePrompt, VisionInputs, load_vision_inputs
from slime_plugins.rollout_buffer.errors import ConfigError

logger = logging.getLogger(__name__)

DEFAULT_CONTEXT: Final = 4096


class WeightsError(Exception):
    """Weights that do not fit the served model, or were not loaded in time; the old ones stay."""


@dataclass(frozen=True, slots=True)
class SequenceChunk:
    """Input of one slot in a forward pass: ``ids``, written from position ``start`` on.

    With images in the prompt (``image_prompt``), rotary positions differ from slot positions.
    """

    ids: Sequence[int]
    start: int
    image_prompt: ImagePrompt | None = None


class LanguageModel:
    """Weights and KV cache. Used from one thread."""

    def __init__(
        self, model: Any, tokenizer: Any, *, vision: VisionInputs | None = None, context_length: int | None = None
    ) -> None:
        config = model.config.get_text_config()
        self.tokenizer = tokenizer
        self.vision = vision
        self.vocab_size = int(model.get_input_embeddings().num_embeddings)
        self.context_length = context_length or int(getattr(config, "max_position_embeddings", DEFAULT_CONTEXT))
        self.eos_ids = frozenset(_eos_ids(model, tokenizer))
        self.cache = SlotKvCache(config.num_hidden_layers)
        self._model = model

    def logits(self, first: int, chunks: Sequence[SequenceChunk]) -> torch.Tensor:
        """Runs the model over one chunk per slot, from slot ``first`` on; returns the logits after each chunk's end.

        Shorter chunks are padded on the right: the padding is written after the slot's end, and overwritten before a
        query of the slot attends to it. A chunk with images must be the only one, and hold the images completely.
        """
        longest = max(len(chunk.ids) for chunk in chunks)
        width = max(chunk.start for chunk in chunks) + longest
        self.cache.reserve(first + len(chunks), width)
        device = self._model.device
        padded = [[*chunk.ids, *[chunk.ids[-1]] * (longest - len(chunk.ids))] for chunk in chunks]
        starts = torch.tensor([chunk.start for chunk in chunks], device=device)
        slot_positions = starts[:, None] + torch.arange(longest, device=device)
        self.cache.select(first, slot_positions, width)
        ends = [len(chunk.ids) - 1 for chunk in chunks]
        distinct = sorted(set(ends))
        rotary_positions, images = _rotary_positions(chunks, slot_positions)
        with torch.no_grad():
            output = self._model(
                input_ids=torch.tensor(padded, device=device),
                attention_mask=(torch.arange(width, device=device) <= slot_positions[:, :, None])[:, None],
                position_ids=rotary_positions,
                past_key_values=self.cache.past_key_values,
                use_cache=True,
                logits_to_keep=torch.tensor(distinct, device=device),
                **{name: tensor.to(device) for name, tensor in images.items()},
            )
        logits: torch.Tensor = output.logits[range(len(ends)), [distinct.index(end) for end in ends]]
        return logits

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without special tokens. Thread-safe, as ``decode``."""
        ids: list[int] = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Returns the text of some ids. Thread-safe, as ``encode``."""
        text: str = self.tokenizer.backend_tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def load_weights(self, path: Path) -> None:
        """Replaces the weights by those of a model of the same shape in the folder ``path``.

        Raises:
            WeightsError: the folder holds no such model; the old weights stay.
        """
        model = self._model
        try:
            _check_folder(path)
            loaded = _load_model(type(model), path, model.dtype)
        except Exception as error:
            raise WeightsError(f"cannot load a model from {str(path)[:300]}: {str(error)[:1000]}") from error
        own, other = model.state_dict(), loaded.state_dict()
        if shapes := _different_shapes(own, other):
            raise WeightsError(f"{path} holds another model than the served one: {shapes}")
        model.load_state_dict(other)


def load_language_model(settings: EmbeddedEngineSettings) -> LanguageModel:
    """Returns the model in the settings' folder, with image inputs for a vision model.

    Raises:
        ConfigError: the folder holds no supported model.
    """
    path = settings.model_path
    disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        _check_attention(config, path)
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        takes_images = hasattr(config, "vision_config")
        model_class = AutoModelForImageTextToText if takes_images else AutoModelForCausalLM
        model = _load_model(model_class, path, getattr(torch, settings.dtype))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{path} holds no model that transformers can load: {error}") from error
    vision = load_vision_inputs(model, path) if takes_images else None
    model = model.to(_device(settings.device)).eval()
    return LanguageModel(model, tokenizer, vision=vision, context_length=settings.context_length)


def _rotary_positions(
    chunks: Sequence[SequenceChunk], slot_positions: torch.Tensor
) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
    """Returns the rotary positions of the tokens, and the model's inputs for the images of a chunk that has some."""
    start, image_prompt = chunks[0].start, chunks[0].image_prompt
    length, device = slot_positions.shape[1], slot_positions.device
    if len(chunks) == 1 and image_prompt is not None and start < len(image_prompt.ids):
        after_prompt = torch.arange(len(image_prompt.ids), start + length) + image_prompt.delta
        positions = torch.cat([image_prompt.positions[:, start:], after_prompt.expand(3, -1)], dim=1)[:, :length]
        return positions[:, None].to(device), image_prompt.inputs_from(start)
    deltas = [0 if chunk.image_prompt is None else chunk.image_prompt.delta for chunk in chunks]
    return slot_positions + torch.tensor(deltas, device=device)[:, None], {}


def _check_folder(path: Path) -> None:
    """Raises ValueError for a folder without a model, or with a file that is not regular, such as a named pipe."""
    if not (path / "config.json").is_file():
        raise ValueError("it is no folder with a model: it holds no config.json")
    if irregular := sorted(entry.name for entry in path.iterdir() if not (entry.is_file() or entry.is_dir())):
        raise ValueError(f"{irregular[0]} is no regular file")


def _load_model(model_class: Any, path: Path, dtype: torch.dtype) -> Any:
    """Loads a model; raises ValueError for weights that are not finite, or missing (transformers makes them random)."""
    model, report = model_class.from_pretrained(
        path, dtype=dtype, attn_implementation="sdpa", local_files_only=True, output_loading_info=True
    )
    if missing := sorted(report["missing_keys"]):
        raise ValueError(f"{len(missing)} tensors are missing, the first is {missing[0]}")
    if (bad := next((name for name, tensor in model.state_dict().items() if not _is_finite(tensor)), None)) is not None:
        raise ValueError(f"{bad} holds NaN or infinity")
    return model


def _is_finite(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


def _check_attention(config: Any, path: Path) -> None:
    text = config.get_text_config()
    layer_types = set(getattr(text, "layer_types", None) or ["full_attention"])
    if layer_types != {"full_attention"} or (
        getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", 1)
    ):
        raise ConfigError(
            f"{path} is a {config.model_type}, some of whose layers do not attend to all tokens "
            f"({', '.join(sorted(layer_types))}): the embedded engine serves models with full attention only"
        )


def _device(name: str) -> str:
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def _eos_ids(model: Any, tokenizer: Any) -> Iterable[int]:
    configs = (model.config, model.config.get_text_config(), model.generation_config, tokenizer)
    for eos in (getattr(config, "eos_token_id", None) for config in configs):
        if eos is not None:
            yield from eos if isinstance(eos, list | tuple) else (eos,)


def _different_shapes(own: dict[str, Any], other: dict[str, Any]) -> str:
    """Returns a text of the tensors that one side lacks or that differ in shape; empty if the models have one shape."""
    names = sorted(own.keys() | other.keys())
    shapes = [(name, _shape(own.get(name)), _shape(other.get(name))) for name in names]
    return ", ".join(f"{name} is {here} here and {there} there" for name, here, there in shapes if here != there)[:500]


def _shape(tensor: torch.Tensor | None) -> str:
    return "missing" if tensor is None else str(tuple(tensor.shape))
