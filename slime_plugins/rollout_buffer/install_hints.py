"""How this project came here, and what to type where something is missing. Needs nothing but Python.

slime's packages have an ``__init__.py``. Where both are installed, either one hides the other, or one lies over the
other's files, this project's stand-ins for slime's types included. The overlay is the way.
"""

from __future__ import annotations

import importlib.metadata
import json
import shlex
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from urllib.parse import unquote, urlsplit

OUR_DISTRIBUTION = "slime-rollout-buffer"
LAB_DISTRIBUTION = "rollout-buffer-lab"


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


def install_extra(extra: str, path: Sequence[str] | None = None) -> str:
    """Returns what to type for an extra: from where this project was installed, which pip notes (PEP 610).

    ``path`` is as in `advice_on_two_slimes`. Where nothing is installed (an overlay, a checkout on the path) it is
    typed in a checkout.
    """
    return _install(OUR_DISTRIBUTION, ".", f"[{extra}]", path)


def install_lab(extra: str = "", path: Sequence[str] | None = None) -> str:
    """Returns what to type for the distribution ``rollout-buffer-lab``, with one of its extras where one is named.

    ``path`` is as in `advice_on_two_slimes`.
    """
    return _install(LAB_DISTRIBUTION, "./lab", f"[{extra}]" if extra else "", path)


def _install(distribution: str, folder: str, extras: str, path: Sequence[str] | None) -> str:
    """The command for a distribution that lies in ``folder`` of this repository."""
    found = _find(OUR_DISTRIBUTION, list(sys.path if path is None else path))
    if found is None:
        return f"pip install '{folder}{extras}' in a checkout of this project"
    origin = json.loads(found.read_text("direct_url.json") or "{}")
    address = urlsplit(str(origin.get("url", "")))
    if address.scheme != "file":
        return f"pip install {shlex.quote(distribution + extras)}"
    editable = "--editable " if origin.get("dir_info", {}).get("editable") else ""
    return f"pip install {editable}{shlex.quote(str(Path(unquote(address.path), folder)) + extras)}"


def _distribution(name: str, places: list[str]) -> str | None:
    found = _find(name, places)
    return None if found is None else str(found.locate_file(""))


def _find(name: str, places: list[str]) -> importlib.metadata.Distribution | None:
    return next(iter(importlib.metadata.distributions(name=name, path=places)), None)


def _package_of_slime(places: list[str]) -> str | None:
    """Where ``slime`` is a package with an ``__init__.py``, which this project's never is."""
    spec = PathFinder.find_spec("slime", places)
    return None if spec is None or spec.origin is None else str(Path(spec.origin).parent)
