"""The public face: every name leads somewhere, is documented, and naming the package loads nothing heavy."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import slime_plugins.rollout_buffer as face

ROOT = Path(__file__).resolve().parents[2]
FACE = "slime_plugins.rollout_buffer"
HEAVY = {"aiohttp", "requests", "pydantic", "flask", "gunicorn", "orjson", "transformers", "numpy", "ray", "torch"}
WHOLE = ("client", "trainer.batch_types", "trainer.rollout_feed")
"""Modules that are public as a whole: what they name is in the face, but for the spelling of sources."""
NOT_IN_THE_FACE = {"RowSource", "TokenSource", "Request", "Transport"}


def homes() -> dict[str, str]:
    return {name: module for module, names in face._HOMES.items() for name in names}


def test_every_name_is_promised_once_and_has_a_home() -> None:
    assert sorted(homes()) == sorted(face.__all__) == sorted(set(face.__all__))
    assert set(face.__all__) <= set(dir(face))


@pytest.mark.parametrize("name", face.__all__)
def test_a_name_is_what_its_home_exports_under_it_with_a_docstring(name: str) -> None:
    home = importlib.import_module(f"{FACE}.{homes()[name]}")
    assert getattr(face, name) is getattr(home, name)
    assert name in getattr(home, "__all__", [name])
    assert (inspect.getdoc(getattr(face, name)) or "").strip()


@pytest.mark.parametrize("module", WHOLE)
def test_what_is_public_as_a_whole_is_in_the_face(module: str) -> None:
    exported = set(importlib.import_module(f"{FACE}.{module}").__all__)
    assert exported - NOT_IN_THE_FACE <= set(face.__all__)


LIGHT = (
    FACE,
    f"{FACE}.types",
    f"{FACE}.errors",
    f"{FACE}.trainer",
    f"{FACE}.trainer.batch_types",
    f"{FACE}.generator",
    f"{FACE}.generator.base_generator",
    f"{FACE}.generator.math_reward.answers",
    f"{FACE}.generator.context_editing.calls",
    f"{FACE}.rules.groups",
)


def test_modules_of_the_public_face_import_nothing_heavy() -> None:
    program = f"import sys, {', '.join(LIGHT)}; print(*{{name.split('.')[0] for name in sys.modules}})"
    finished = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert HEAVY & set(finished.stdout.split()) == set()
