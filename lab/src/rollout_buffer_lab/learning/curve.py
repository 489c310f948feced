"""Pure: draws reward curves as SVG, for light and dark backgrounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 380, 52, 190, 28, 44
COLORS = ("#1a7f37", "#c0392b", "#8250df", "#bc6c00", "#0969da", "#6e7781", "#b5329a", "#0b7a75")


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """A named line: the mean of each step. ``quartiles``, if given, are drawn as a band around it."""

    name: str
    means: Sequence[float]
    quartiles: Sequence[tuple[float, float]] = ()


def name_of_run(metrics: Path) -> str:
    """Returns the name of the curve of a metrics file: the file's name, or the run's folder for the default name.

    ``shuffled.jsonl`` and ``shuffled/run/metrics.jsonl`` are both ``shuffled``.
    """
    if metrics.stem != "metrics":
        return metrics.stem
    folders = [part for part in metrics.absolute().parent.parts if part != "run"]
    return folders[-1].lstrip(".")


def draw(curves: Sequence[Curve], title: str, low: float = 0.0, high: float = 1.0) -> str:
    """Returns the picture. Rewards outside ``low`` … ``high`` widen it.

    Raises:
        ValueError: there is nothing to draw.
    """
    values = [value for curve in curves for value in curve.means]
    if not values:
        raise ValueError("a picture needs at least one curve with a step")
    low, high = min([low, *values]), max([high, *values])
    steps = max(2, *(len(curve.means) for curve in curves))

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / (steps - 1)

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - (value - low) / (high - low or 1.0))

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" font-size="12" '
        'font-family="system-ui, sans-serif">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="18" font-weight="600" fill="#1f2328">{escape(title)}</text>',
    ]
    for tick in range(5):
        value = low + (high - low) * tick / 4
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#d8dee4"/>'
        )
        parts.append(f'<text x="{LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end" fill="#59636e">{value:.2f}</text>')
    parts += [
        f'<text x="{x(step):.1f}" y="{HEIGHT - 24}" text-anchor="middle" fill="#59636e">{step}</text>'
        for step in range(0, steps, max(1, round(steps / 8)))
    ]
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle" fill="#59636e">step</text>')
    labels: list[tuple[float, str, str]] = []
    for number, curve in enumerate(curves):
        color = COLORS[number % len(COLORS)]
        if curve.quartiles:
            upper = [f"{x(step):.1f},{y(top):.1f}" for step, (_, top) in enumerate(curve.quartiles)]
            lower = [f"{x(step):.1f},{y(bottom):.1f}" for step, (bottom, _) in enumerate(curve.quartiles)]
            parts.append(f'<polygon points="{" ".join([*upper, *lower[::-1]])}" fill="{color}" opacity="0.13"/>')
        line = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in enumerate(curve.means))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
        if curve.means:
            labels.append((y(curve.means[-1]), color, curve.name))
    label_y = -math.inf
    for line_y, color, name in sorted(labels):
        label_y = max(line_y, label_y + 15)  # so that the names of lines with close ends do not overlap
        parts.append(f'<text x="{WIDTH - RIGHT + 8}" y="{label_y + 4:.1f}" fill="{color}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
