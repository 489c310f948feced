"""One line for an environment that holds both slime and this project's wheel. Needs nothing but Python.

slime's packages have an ``__init__.py``. Where both are installed, either one hides the other, or one lies over the
other's files, this project's stand-ins for slime's types included. The overlay is the way.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

__all__ = ["advice_on_two_slimes"]

OUR_DISTRIBUTION = "slime-rollout-buffer"


def advice_on_two_slimes(path: Sequence[str] | None = None) -> str | None:
    """Returns the line; None when there is nothing to say.

    ``path`` is where packages are looked for, ``sys.path`` when it is None.
    """
    places = list(sys.path if path is None else path)
    ours = _distribution(OUR_DISTRIBUTION, places)
    slime = _package_of_slime(places) or _distribution("slime", places)
    if ours is None or slime is None:
        return None
    return (
        f"this environment holds both slime ({slime}) and the wheel of {OUR_DISTRIBUTION} ({ours}), which hide each "
        f"other: pip uninstall {OUR_DISTRIBUTION} here, and lay the overlay over slime's checkout instead: "
        "python tools/install_into_slime.py CHECKOUT"
    )


def _distribution(name: str, places: list[str]) -> str | None:
    found = next(iter(importlib.metadata.distributions(name=name, path=places)), None)
    return None if found is None else str(found.locate_file(""))


def _package_of_slime(places: list[str]) -> str | None:
    """Where ``slime`` is a package with an ``__init__.py``, which this project's never is."""
    spec = PathFinder.find_spec("slime", places)
    return None if spec is None or spec.origin is None else str(Path(spec.origin).parent)
