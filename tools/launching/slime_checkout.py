"""What the slime at hand has: backends, flags, models that it can load. Its files are read, never imported."""

from __future__ import annotations

import re
from pathlib import Path

from tools.launching.models import LaunchError

__all__ = ["backend_of", "has_flag", "loads_hf_weights", "loads_qwen3_vl"]


def backend_of(slime: Path, asked: str | None) -> str:
    """Takes the backend that is asked for, or the first of fsdp and megatron that this slime has.

    Raises:
        LaunchError: it has no such backend, or is no slime.
    """
    if asked not in (None, "", "fsdp", "megatron"):
        raise LaunchError(f"SLIME_SCRIPT_TRAIN_BACKEND is {asked!r}: say fsdp or megatron")
    file = slime / "slime" / "utils" / "arguments.py"
    if not file.is_file():
        raise LaunchError(f"{slime} is no slime checkout: name one in SLIME_DIR")
    found = re.search(r'"--train-backend"[^)]*?choices=\[([^\]]*)\]', file.read_text(encoding="utf-8"))
    known = re.findall(r"[\w-]+", found.group(1)) if found is not None else ["megatron"]
    if asked and asked not in known:
        raise LaunchError(f"this slime has no backend {asked}: it has {', '.join(known)}")
    return asked or next(name for name in ("fsdp", "megatron") if name in known)


def has_flag(slime: Path, flag: str) -> bool:
    """Whether slime's own arguments have the flag."""
    return f'"{flag}"' in (slime / "slime" / "utils" / "arguments.py").read_text(encoding="utf-8")


def loads_qwen3_vl(slime: Path) -> bool:
    """Whether Qwen3-VL can be loaded into Megatron: through a bridge, or by a loader of slime's own."""
    if has_flag(slime, "--megatron-to-hf-mode"):
        return True
    loaders = slime / "slime" / "backends" / "megatron_utils" / "hf_to_megatron" / "__init__.py"
    return loaders.is_file() and '"qwen3_vl"' in loaders.read_text(encoding="utf-8")


def loads_hf_weights(slime: Path) -> bool:
    """Whether its Megatron backend loads a model as it was downloaded; older ones want it converted."""
    return (slime / "slime" / "backends" / "megatron_utils" / "hf_to_megatron").is_dir()
