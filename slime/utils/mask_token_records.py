"""Token records of a generation: the routed experts of each token, or the top-p ids that it was sampled from.

They are millions of numbers and therefore binary: ``TokenRecords`` is used for computing, ``RecordBytes`` for storage
and transfer by hash. Consecutive tokens have one record each, of ``width`` numbers (experts: layers times experts per
token) or of variable length (top-p ids). Standard library only.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

ROUTED_EXPERTS = "routed_experts"
"""For each token but the first, the experts of the forward pass that sampled it, or read the token before it."""
TOP_P_TOKENS = "top_p_tokens"
"""For each sampled token the ids within top_p, from which it was sampled."""

RECORDS_MAGIC = b"TOKREC1\0"
_HEADER = struct.Struct("<8sIIHH")
_BELOW_SIGN = bytes(range(128))
_TYPECODES = {1: "B", 2: "H", 4: "I"}


@dataclass(frozen=True, slots=True)
class TokenRecords:
    """Records of the tokens with indices ``start``, ``start + 1`` … of the sequence that the engine ran.

    ``values`` are little-endian unsigned numbers of ``itemsize`` bytes. Each record has ``width`` of them; if ``width``
    is 0, ``ends`` has the end of each record, in numbers.
    """

    start: int
    values: bytes
    itemsize: int
    width: int = 0
    ends: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        numbers, rest = divmod(len(self.values), self.itemsize)
        fits = numbers % self.width == 0 if self.width else numbers == (self.ends[-1] if self.ends else 0)
        if rest or not fits or list(self.ends) != sorted(self.ends):
            raise ValueError(f"{len(self.values)} bytes are not whole records of their tokens")

    @classmethod
    def of_int32(cls, start: int, data: bytes, *, width: int = 0, ends: Iterable[int] = ()) -> TokenRecords:
        """Converts little-endian int32 numbers, as sent by SGLang, to the smallest item size.

        Raises:
            ValueError: a number is negative, or the numbers are not whole records.
        """
        planes = [data[at::4] for at in range(4)]
        if len(data) % 4 or planes[3].translate(None, _BELOW_SIGN):
            raise ValueError("they are no int32 numbers from 0 on")
        if not any(map(_has_bits, planes[1:])):
            return cls(start, planes[0], 1, width, tuple(ends))
        if any(map(_has_bits, planes[2:])):
            return cls(start, data, 4, width, tuple(ends))
        narrow = bytearray(len(data) // 2)
        narrow[0::2], narrow[1::2] = planes[0], planes[1]
        return cls(start, bytes(narrow), 2, width, tuple(ends))

    def __len__(self) -> int:
        return len(self.values) // (self.itemsize * self.width) if self.width else len(self.ends)

    @property
    def end(self) -> int:
        """The index after the last token with a record."""
        return self.start + len(self)

    def numbers(self) -> array[int]:
        """Returns the numbers of all records, concatenated."""
        return array(_TYPECODES[self.itemsize], self.values)

    def split(self) -> list[array[int]]:
        """Returns each token's record."""
        numbers = self.numbers()
        ends = range(self.width, len(numbers) + 1, self.width) if self.width else self.ends
        return [numbers[begin:end] for begin, end in zip([0, *ends][: len(ends)], ends, strict=True)]

    def part(self, start: int, end: int) -> TokenRecords:
        """Returns the records of the tokens from index ``start`` to ``end``, clipped to existing records."""
        first = min(max(start - self.start, 0), len(self))
        last = max(first, min(end - self.start, len(self)))
        begin = self._numbers_before(first)
        values = self.values[begin * self.itemsize : self._numbers_before(last) * self.itemsize]
        ends = tuple(one - begin for one in self.ends[first:last])
        return replace(self, start=self.start + first, values=values, ends=ends)

    def encode(self) -> bytes:
        """Returns the binary form, for ``decode``."""
        ends = array("I", self.ends).tobytes()
        return _HEADER.pack(RECORDS_MAGIC, self.start, len(self), self.itemsize, self.width) + ends + self.values

    @classmethod
    def decode(cls, data: bytes) -> TokenRecords:
        """Parses the result of ``encode``.

        Raises:
            ValueError: the data is invalid.
        """
        if len(data) < _HEADER.size or not data.startswith(RECORDS_MAGIC):
            raise ValueError("these bytes are no token records")
        _, start, count, itemsize, width = _HEADER.unpack_from(data)
        behind = _HEADER.size + (0 if width else 4 * count)
        if itemsize not in _TYPECODES or len(data) < behind:
            raise ValueError("the token records are cut off")
        ends = () if width else tuple(array("I", data[_HEADER.size : behind]))
        found = cls(start, data[behind:], itemsize, width, ends)
        if len(found) != count:
            raise ValueError(f"there are {len(found)} token records, and {count} were written")
        return found

    def _numbers_before(self, index: int) -> int:
        if self.width:
            return index * self.width
        return self.ends[index - 1] if index else 0

    def _widened(self, itemsize: int) -> bytes:
        if itemsize == self.itemsize:
            return self.values
        return array(_TYPECODES[itemsize], self.numbers()).tobytes()


def joined_records(parts: Sequence[TokenRecords]) -> TokenRecords:
    """Joins consecutive parts.

    Raises:
        ValueError: there is a gap or an overlap, or the widths differ.
    """
    for before, after in pairwise(parts):
        if after.start != before.end or after.width != before.width:
            raise ValueError(
                f"token records of {after.width} numbers from place {after.start} on do not follow those of "
                f"{before.width} that end at {before.end}"
            )
    itemsize = max(one.itemsize for one in parts)
    ends: list[int] = []
    for one in parts:
        before_it = ends[-1] if ends else 0
        ends += [before_it + end for end in one.ends]
    values = b"".join(one._widened(itemsize) for one in parts)
    return TokenRecords(parts[0].start, values, itemsize, parts[0].width, tuple(ends))


@dataclass(frozen=True, slots=True)
class RecordBytes:
    """Encoded records with their hash; ``data`` is None if the bytes must be fetched by hash."""

    sha256: str
    data: bytes | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, records: TokenRecords) -> RecordBytes:
        """Encodes and hashes records."""
        data = records.encode()
        return cls(hashlib.sha256(data).hexdigest(), data)


def _has_bits(plane: bytes) -> bool:
    return bool(plane.strip(b"\0"))
