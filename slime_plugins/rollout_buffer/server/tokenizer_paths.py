"""Checks a job's ``tokenizer_path``, which is loaded in processes of this host: jobs may name folders in data roots and
the folders and hub names of ``--allow-tokenizer``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.errors import InvalidPayloadError
from slime_plugins.rollout_buffer.tokenizer_loading import hub_trouble


def check_tokenizer(named: str, roots: Sequence[Path], allowed: Sequence[str]) -> None:
    """Checks a job's ``tokenizer_path``.

    ``roots`` are the data roots. ``allowed`` has folders, and names of the model hub.

    Raises:
        InvalidPayloadError: the path is not inside these folders (folders outside are not examined), or is an allowed
            name that cannot be loaded within ``HUB_TIMEOUT_S``.
    """
    if named in allowed and not _is_path(named):
        _check_hub_name(named)
        return
    folders = [Path(name).expanduser().resolve() for name in allowed if _is_path(name)]
    try:
        folder = Path(named).expanduser().resolve()
        inside = folder == DEMO_TOKENIZER_PATH or any(folder.is_relative_to(root) for root in (*roots, *folders))
        if inside and folder.is_dir():
            return
    except (OSError, RuntimeError):  # a cycle of symbolic links, or the home folder of an unknown user
        pass
    allowed_folders = ", ".join(map(str, (*roots, *folders)))
    what = "a folder" if _is_path(named) else "a folder, or an allowed name of the model hub,"
    raise InvalidPayloadError(
        f"tokenizer_path {named} is not {what} that jobs may use on the buffer host: put the trainer's tokenizer under "
        f"{allowed_folders}, or start serve with --allow-tokenizer {named}"
    )


def _check_hub_name(named: str) -> None:
    trouble = "" if Path(named).is_dir() else hub_trouble(named)
    if trouble:
        raise InvalidPayloadError(
            f"tokenizer_path {named} cannot be loaded on the buffer host: {trouble}. Put the trainer's tokenizer into "
            "a folder of that host, or load it there once while the hub can be reached"
        )


def _is_path(named: str) -> bool:
    return named.startswith(("/", "./", "../", "~")) or named in (".", "..")
