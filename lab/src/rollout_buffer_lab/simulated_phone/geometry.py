"""Rectangles on the device's screen, its size, and the agent's coordinates.

All lengths are device pixels. Whatever is drawn starts and ends at even pixels, so that halving a screenshot is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

SCREEN_WIDTH = 1080
SCREEN_HEIGHT = 2400
RELATIVE_MAX = 999  # the agent's coordinates run from 0 to this, both included


@dataclass(frozen=True, kw_only=True, slots=True)
class Rect:
    """A rectangle in device pixels; ``right`` and ``bottom`` are the first pixels outside of it."""

    left: int
    top: int
    right: int
    bottom: int

    @property
    def width(self) -> int:
        """Width in pixels."""
        return self.right - self.left

    @property
    def height(self) -> int:
        """Height in pixels."""
        return self.bottom - self.top

    @property
    def center(self) -> tuple[int, int]:
        """The middle in device pixels."""
        return (self.left + self.right) // 2, (self.top + self.bottom) // 2

    @property
    def relative_center(self) -> tuple[int, int]:
        """The middle in the agent's 0..999 coordinates of a 1080x2400 screen."""
        x, y = self.center
        return round(x * RELATIVE_MAX / (SCREEN_WIDTH - 1)), round(y * RELATIVE_MAX / (SCREEN_HEIGHT - 1))

    def contains(self, x: int, y: int) -> bool:
        """Returns True if the pixel lies inside."""
        return self.left <= x < self.right and self.top <= y < self.bottom

    def encloses(self, other: Rect) -> bool:
        """Returns True if the other rectangle lies completely inside."""
        return (
            self.left <= other.left
            and self.top <= other.top
            and other.right <= self.right
            and other.bottom <= self.bottom
        )

    def moved(self, dx: int, dy: int) -> Rect:
        """Returns a rectangle of the same size, moved by ``dx`` and ``dy``."""
        return Rect(left=self.left + dx, top=self.top + dy, right=self.right + dx, bottom=self.bottom + dy)

    def clipped(self, other: Rect) -> Rect:
        """Returns the part that both share; its width or height is not positive if they share none."""
        return Rect(
            left=max(self.left, other.left),
            top=max(self.top, other.top),
            right=min(self.right, other.right),
            bottom=min(self.bottom, other.bottom),
        )
