"""A prefix of a growing list of ids, without a copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload


class SharedPrefix(Sequence[int]):
    """The first ``length`` ids of a list that only grows, without a copy of them.

    Without it, the turns of a growing sequence would store each other's tokens: memory quadratic in the number of
    steps. Slices are plain lists.
    """

    __slots__ = ("_ids", "_length")
    __hash__ = None  # type: ignore[assignment]  # equal to lists, which are not hashable

    def __init__(self, ids: list[int], length: int) -> None:
        self._ids = ids
        self._length = length

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            start, stop, step = index.indices(self._length)
            return self._ids[start:stop] if step == 1 else [self._ids[each] for each in range(start, stop, step)]
        return self._ids[range(self._length)[index]]

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids[: self._length])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def __repr__(self) -> str:
        return f"SharedPrefix of {self._length} ids"
