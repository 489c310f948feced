"""KV cache of all running requests: each has one slot of the tensors of every layer, filled from its start.

A query at position p attends to the first p + 1 positions of its slot, so that slots of different lengths need no
padding on the left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

StoredKeys = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of one sequence, a pair per layer, each of shape (heads, tokens, size)."""

MIN_CAPACITY = 64


@dataclass(slots=True)
class _Window:
    """The slots of a forward pass: ``count`` of them from ``first`` on.

    ``positions`` (slots, tokens) are where the pass writes; its queries read the first ``width`` positions.
    """

    first: int
    count: int
    positions: torch.Tensor
    width: int


class _SlotLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is not followed by mypy
    """One layer's keys and values: (slots, heads, capacity, size)."""

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.window: _Window | None = None
        self.slots, self.capacity = 0, 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor | None = None) -> None:
        """Allocates tensors of the size that ``reserve`` asked for."""
        values = key_states if value_states is None else value_states
        self.keys = self._empty(key_states)
        self.values = self._empty(values)
        self.is_initialized = True

    def reserve(self, slots: int, capacity: int) -> None:
        """Grows to at least this many slots and positions; the content is preserved."""
        if slots <= self.slots and capacity <= self.capacity:
            return
        self.slots, self.capacity = max(slots, self.slots), max(capacity, self.capacity)
        if self.is_initialized:
            self.keys, self.values = self._grown(self.keys), self._grown(self.values)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes a pass's keys and values into the window's positions; returns those that its queries attend to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        window = self.window
        assert window is not None, "a forward pass needs SlotKvCache.select first"
        slots = slice(window.first, window.first + window.count)
        rows = torch.arange(window.count, device=key_states.device)[:, None]
        keys, values = self.keys[slots], self.values[slots]
        keys[rows, :, window.positions] = key_states.transpose(1, 2)
        values[rows, :, window.positions] = value_states.transpose(1, 2)
        return keys[:, :, : window.width], values[:, :, : window.width]

    def get_mask_sizes(self, *_: Any) -> tuple[int, int]:
        """Returns the width of the window; the mask itself is passed to the model."""
        return (self.window.width if self.window else 0), 0

    def get_seq_length(self, *_: Any) -> int:
        """Returns the number of positions before the current pass, of the slot with the fewest."""
        return int(self.window.positions.min()) if self.window else 0

    def get_max_length(self) -> int:
        """Returns -1: the cache grows without a limit."""
        return -1

    def get_max_cache_shape(self) -> int:
        """Returns the same under the name in older versions of transformers."""
        return -1

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_zeros((self.slots, like.shape[1], self.capacity, like.shape[3]))

    def _grown(self, old: torch.Tensor) -> torch.Tensor:
        new = self._empty(old)
        new[: old.shape[0], :, : old.shape[2]] = old
        return new


class SlotKvCache:
    """The slots of all layers. ``past_key_values`` is the cache object for a transformers model."""

    def __init__(self, layer_count: int) -> None:
        self._layers = [_SlotLayer() for _ in range(layer_count)]
        self.past_key_values = Cache(layers=self._layers)
        self._slots, self._capacity = 0, MIN_CAPACITY

    def reserve(self, slots: int, capacity: int) -> None:
        """Makes room for that many slots and positions; the number of positions grows by doubling."""
        while self._capacity < capacity:
            self._capacity *= 2
        self._slots = max(self._slots, slots)
        for layer in self._layers:
            layer.reserve(self._slots, self._capacity)

    def select(self, first: int, positions: torch.Tensor, width: int) -> None:
        """Selects the slots of the next forward pass, from slot ``first`` on.

        ``positions`` (slots, tokens) are where it writes; its queries read the first ``width`` positions.
        """
        window = _Window(first=first, count=positions.shape[0], positions=positions, width=width)
        for layer in self._layers:
            layer.window = window

    def move(self, source: int, target: int, length: int) -> None:
        """Copies the first ``length`` positions of one slot to another."""
        for layer in self._layers:
            if layer.is_initialized:
                layer.keys[target, :, :length] = layer.keys[source, :, :length]
                layer.values[target, :, :length] = layer.values[source, :, :length]

    def read(self, slot: int, length: int) -> StoredKeys:
        """Returns a copy of the first ``length`` positions of a slot."""
        return [
            (layer.keys[slot, :, :length].clone(), layer.values[slot, :, :length].clone()) for layer in self._layers
        ]

    def write(self, slot: int, stored: Sequence[tuple[torch.Tensor, torch.Tensor]], length: int) -> None:
        """Copies the first ``length`` positions of ``stored`` into a slot, which must be reserved."""
        for layer, (keys, values) in zip(self._layers, stored, strict=True):
            if not layer.is_initialized:
                layer.lazy_initialization(keys[None], values[None])
            layer.keys[slot, :, :length] = keys[:, :length]
            layer.values[slot, :, :length] = values[:, :length]
