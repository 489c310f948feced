"""What the slime at hand has: backends, flags, models that it can load. Its files are read, never imported."""

from __future__ import annotations

import re
from pathlib import Path

from tools.launching.models import LaunchError


def backends_of(slime: Path) -> tuple[str, ...]:
    """Returns the backends that this slime trains with: fsdp, where it is, before megatron.

    Raises:
        LaunchError: it is no slime.
    """
    found = re.search(r'"--train-backend"[^)]*?choices=\[([^\]]*)\]', _arguments_of(slime))
    return tuple(sorted(re.findall(r"[\w-]+", found.group(1)))) if found is not None else ("megatron",)


def backend_of(slime: Path, asked: str | None) -> str:
    """Takes the backend that is asked for, or the first of fsdp and megatron that this slime has.

    Raises:
        LaunchError: it has no such backend, or is no slime.
    """
    if asked not in (None, "", "fsdp", "megatron"):
        raise LaunchError(f"SLIME_SCRIPT_TRAIN_BACKEND is {asked!r}: say fsdp or megatron")
    known = backends_of(slime)
    if asked and asked not in known:
        raise LaunchError(f"this slime has no backend {asked}: it has {', '.join(known)}")
    return asked or next(name for name in ("fsdp", "megatron") if name in known)


def has_flag(slime: Path, flag: str) -> bool:
    """Whether slime's own arguments have the flag."""
    return f'"{flag}"' in _arguments_of(slime)


def trains_qwen3_vl(slime: Path) -> bool:
    """Whether Qwen3-VL and Qwen2.5-VL can be trained: with FSDP, or through a bridge into Megatron."""
    return "fsdp" in backends_of(slime) or bridges(slime)


def bridges(slime: Path) -> bool:
    """Whether its Megatron takes models of the hub through a bridge, which knows Qwen2.5-VL and Qwen3-VL."""
    return has_flag(slime, "--megatron-to-hf-mode")


def trains_qwen3_5_vl(slime: Path) -> bool:
    """Whether its Megatron knows Qwen3.5 with its vision tower by itself."""
    return (slime / "slime_plugins" / "models" / "qwen3_5_vl.py").is_file()


def rows_share_weight(slime: Path) -> bool:
    """Whether the rows of one trajectory can weigh as one: its Sample says which execution each is a row of."""
    types = slime / "slime" / "utils" / "types.py"
    return re.search(r"^    (rollout_id|group_id)\b", types.read_text(encoding="utf-8"), re.MULTILINE) is not None


def takes_weight_off_dummies(slime: Path) -> bool:
    """Whether its ranks know by what a trajectory's part of the mean is divided: there dummies lose their weight."""
    loss = slime / "slime" / "backends" / "megatron_utils" / "loss.py"
    return loss.is_file() and '"rollout_mask_sums"' in loss.read_text(encoding="utf-8")


def loads_hf_weights(slime: Path) -> bool:
    """Whether its Megatron backend loads a model as it was downloaded; older ones want it converted."""
    return (slime / "slime" / "backends" / "megatron_utils" / "hf_to_megatron").is_dir()


def _arguments_of(slime: Path) -> str:
    file = slime / "slime" / "utils" / "arguments.py"
    if not file.is_file():
        raise LaunchError(f"{slime} is no slime checkout: name one in SLIME_DIR")
    return file.read_text(encoding="utf-8")
