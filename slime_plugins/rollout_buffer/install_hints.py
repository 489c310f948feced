"""Commands to install missing parts, and a check for conflicting installations. Imports only the standard library.

slime's packages have an ``__init__.py``. If slime and this project are both installed, one hides the other, or one has
overwritten files of the other. The overlay into a slime checkout avoids that.
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
    """Returns a warning if both slime and this project's wheel are installed; else None.

    ``path`` is searched for packages, by default ``sys.path``.
    """
    folders = list(sys.path if path is None else path)
    ours = _distribution(OUR_DISTRIBUTION, folders)
    slime = _package_of_slime(folders) or _distribution("slime", folders)
    if ours is None or slime is None:
        return None
    return (
        f"this environment holds both slime ({slime}) and the wheel of {OUR_DISTRIBUTION} ({ours}), which hide each "
        f"other: pip uninstall {OUR_DISTRIBUTION} here, and install the overlay into slime's checkout instead: "
        "python tools/install_into_slime.py CHECKOUT"
    )


def install_extra(extra: str, path: Sequence[str] | None = None) -> str:
    """Returns the command that installs an extra, from the source of this installation (PEP 610).

    ``path`` is as in `advice_on_two_slimes`. Without an installation (an overlay, a checkout on the path) the command
    is for a checkout.
    """
    return _install(OUR_DISTRIBUTION, ".", f"[{extra}]", path)


def install_lab(extra: str = "", path: Sequence[str] | None = None) -> str:
    """Returns the command that installs ``rollout-buffer-lab``, optionally with an extra.

    ``path`` is as in `advice_on_two_slimes`.
    """
    return _install(LAB_DISTRIBUTION, "./lab", f"[{extra}]" if extra else "", path)


def _install(distribution: str, folder: str, extras: str, path: Sequence[str] | None) -> str:
    """Returns the command for the distribution in ``folder`` of this repository."""
    ours = _find(OUR_DISTRIBUTION, list(sys.path if path is None else path))
    if ours is None:
        return f"pip install '{folder}{extras}' in a checkout of this project"
    origin = json.loads(ours.read_text("direct_url.json") or "{}")
    address = urlsplit(str(origin.get("url", "")))
    if address.scheme != "file":
        return f"pip install {shlex.quote(distribution + extras)}"
    editable = "--editable " if origin.get("dir_info", {}).get("editable") else ""
    return f"pip install {editable}{shlex.quote(str(Path(unquote(address.path), folder)) + extras)}"


def _distribution(name: str, folders: list[str]) -> str | None:
    distribution = _find(name, folders)
    return None if distribution is None else str(distribution.locate_file(""))


def _find(name: str, folders: list[str]) -> importlib.metadata.Distribution | None:
    return next(iter(importlib.metadata.distributions(name=name, path=folders)), None)


def _package_of_slime(folders: list[str]) -> str | None:
    """Returns the folder of a ``slime`` package with an ``__init__.py``; this project's ``slime`` has none."""
    spec = PathFinder.find_spec("slime", folders)
    return None if spec is None or spec.origin is None else str(Path(spec.origin).parent)
