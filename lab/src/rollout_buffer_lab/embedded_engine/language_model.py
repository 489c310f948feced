"""A transformers model with a KV cache of its running requests: tokens in, logits of each request's last token out."""

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
    """Weights that do not fit the served model; the old ones stay loaded."""


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
        self.end_ids = frozenset(_end_ids(model, tokenizer))
        self.cache = SlotKvCache(config.num_hidden_layers)
        self._model = model

    def logits(self, first: int, chunks: Sequence[SequenceChunk]) -> torch.Tensor:
        """Runs the model over one chunk per slot, from slot ``first`` on; returns the logits after the end of each.

        Shorter chunks are padded on the right: the padding is written after the slot's end and overwritten before any
        of its queries attends to it. A chunk with images runs alone and holds them completely.
        """
        longest = max(len(chunk.ids) for chunk in chunks)
        width = max(chunk.start for chunk in chunks) + longest
        self.cache.reserve(first + len(chunks), width)
        device = self._model.device
        ids = torch.tensor([[*s.ids, *[s.ids[-1]] * (longest - len(s.ids))] for s in chunks], device=device)
        places = torch.tensor([s.start for s in chunks], device=device)[:, None] + torch.arange(longest, device=device)
        self.cache.look_at(first, places, width)
        ends = [len(chunk.ids) - 1 for chunk in chunks]
        kept = sorted(set(ends))
        positions, images = _positions(chunks, places)
        with torch.no_grad():
            output = self._model(
                input_ids=ids,
                attention_mask=(torch.arange(width, device=device) <= places[:, :, None])[:, None],
                position_ids=positions,
                past_key_values=self.cache.past_key_values,
                use_cache=True,
                logits_to_keep=torch.tensor(kept, device=device),
                **{name: tensor.to(device) for name, tensor in images.items()},
            )
        logits: torch.Tensor = output.logits[range(len(ends)), [kept.index(end) for end in ends]]
        return logits

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without special tokens. Thread-safe, as ``decode``."""
        ids: list[int] = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of some ids."""
        text: str = self.tokenizer.backend_tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def load_weights(self, path: Path) -> None:
        """Replaces the weights by those of a model of the same shape in the folder ``path``.

        Raises:
            WeightsError: there is none, or its shape differs; the old weights stay.
        """
        model = self._model
        try:
            _check_folder(path)
            fresh = _load_model(type(model), path, model.dtype)
        except Exception as error:
            raise WeightsError(f"cannot load a model from {str(path)[:300]}: {str(error)[:1000]}") from error
        own, other = model.state_dict(), fresh.state_dict()
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
        _check_kind(config, path)
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        sees = hasattr(config, "vision_config")
        kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        model = _load_model(kind, path, getattr(torch, settings.dtype))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{path} holds no model that transformers can load: {error}") from error
    vision = load_vision_inputs(model, path) if sees else None
    model = model.to(_device(settings.device)).eval()
    return LanguageModel(model, tokenizer, vision=vision, context_length=settings.context_length)


def _positions(
    chunks: Sequence[SequenceChunk], places: torch.Tensor
) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
    """Returns the tokens' positions, and the images of a chunk."""
    start, image_prompt = chunks[0].start, chunks[0].image_prompt
    if len(chunks) == 1 and image_prompt is not None and start < len(image_prompt.ids):
        later = torch.arange(len(image_prompt.ids), start + places.shape[1]) + image_prompt.delta
        positions = torch.cat([image_prompt.positions[:, start:], later.expand(3, -1)], dim=1)[:, : places.shape[1]]
        return positions[:, None].to(places.device), image_prompt.inputs_from(start)
    deltas = [0 if chunk.image_prompt is None else chunk.image_prompt.delta for chunk in chunks]
    return places + torch.tensor(deltas, device=places.device)[:, None], {}


def _check_folder(path: Path) -> None:
    """Refuses folders that cannot be read completely, such as one with a named pipe."""
    if not (path / "config.json").is_file():
        raise ValueError("it is no folder with a model: it holds no config.json")
    if odd := sorted(entry.name for entry in path.iterdir() if not (entry.is_file() or entry.is_dir())):
        raise ValueError(f"{odd[0]} is no regular file")


def _load_model(kind: Any, path: Path, dtype: torch.dtype) -> Any:
    """Loads a model and refuses missing weights, which transformers would initialise at random."""
    model, found = kind.from_pretrained(
        path, dtype=dtype, attn_implementation="sdpa", local_files_only=True, output_loading_info=True
    )
    if missing := sorted(found["missing_keys"]):
        raise ValueError(f"{len(missing)} tensors are missing, the first is {missing[0]}")
    if (odd := next((name for name, tensor in model.state_dict().items() if not _is_finite(tensor)), None)) is not None:
        raise ValueError(f"{odd} holds NaN or infinity")
    return model


def _is_finite(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


def _check_kind(config: Any, path: Path) -> None:
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or (
        getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", 1)
    ):
        raise ConfigError(
            f"{path} is a {config.model_type}, some of whose layers do not attend to all tokens "
            f"({', '.join(sorted(kinds))}): the embedded engine serves models with full attention only"
        )


def _device(name: str) -> str:
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def _end_ids(model: Any, tokenizer: Any) -> Iterable[int]:
    configs = (model.config, model.config.get_text_config(), model.generation_config, tokenizer)
    for named in (getattr(config, "eos_token_id", None) for config in configs):
        yield from named if isinstance(named, list | tuple) else () if named is None else (named,)


def _different_shapes(own: dict[str, Any], other: dict[str, Any]) -> str:
    """Returns the first few tensors that are missing on one side or differ in shape; empty if the models are equal."""
    names = sorted(own.keys() | other.keys())
    shapes = [(name, _shape(own.get(name)), _shape(other.get(name))) for name in names]
    return ", ".join(f"{name} is {here} here and {there} there" for name, here, there in shapes if here != there)[:500]


def _shape(tensor: torch.Tensor | None) -> str:
    return "missing" if tensor is None else str(tuple(tensor.shape))
