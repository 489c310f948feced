"""Features of a slime checkout: backends, flags, supported models. Its files are read, never imported."""

from __future__ import annotations

import re
from pathlib import Path

from tools.launching.models import LaunchError


def backends_of(slime: Path) -> tuple[str, ...]:
    """Returns the checkout's training backends: fsdp, if it has it, before megatron.

    Raises:
        LaunchError: it is no slime checkout.
    """
    found = re.search(r'"--train-backend"[^)]*?choices=\[([^\]]*)\]', _arguments_of(slime))
    return tuple(sorted(re.findall(r"[\w-]+", found.group(1)))) if found is not None else ("megatron",)


def backend_of(slime: Path, asked: str | None) -> str:
    """Returns the requested backend, or the first of fsdp and megatron that this slime has.

    Raises:
        LaunchError: this slime has no such backend, or is no checkout.
    """
    if asked not in (None, "", "fsdp", "megatron"):
        raise LaunchError(f"SLIME_SCRIPT_TRAIN_BACKEND is {asked!r}: must be fsdp or megatron")
    known = backends_of(slime)
    if asked and asked not in known:
        raise LaunchError(f"this slime has no backend {asked}: it has {', '.join(known)}")
    return asked or next(name for name in ("fsdp", "megatron") if name in known)


def has_flag(slime: Path, flag: str) -> bool:
    """Returns True if slime's arguments define the flag."""
    return f'"{flag}"' in _arguments_of(slime)


def trains_qwen3_vl(slime: Path) -> bool:
    """Returns True if it can train Qwen3-VL and Qwen2.5-VL: with FSDP, or through a Megatron bridge."""
    return "fsdp" in backends_of(slime) or bridges(slime)


def bridges(slime: Path) -> bool:
    """Returns True if its Megatron backend has a bridge to models of the hub (Qwen2.5-VL and Qwen3-VL)."""
    return has_flag(slime, "--megatron-to-hf-mode")


def trains_qwen3_5_vl(slime: Path) -> bool:
    """Returns True if its Megatron backend implements Qwen3.5 with its vision tower."""
    return (slime / "slime_plugins" / "models" / "qwen3_5_vl.py").is_file()


def rows_share_weight(slime: Path) -> bool:
    """Returns True if rows of one trajectory can share its weight: its Sample has a field for the trajectory."""
    types = slime / "slime" / "utils" / "types.py"
    return re.search(r"^    (rollout_id|group_id)\b", types.read_text(encoding="utf-8"), re.MULTILINE) is not None


def takes_weight_off_dummies(slime: Path) -> bool:
    """Returns True if its ranks know the divisor of a trajectory's mean: dummies can be left out there."""
    loss = slime / "slime" / "backends" / "megatron_utils" / "loss.py"
    return loss.is_file() and '"rollout_mask_sums"' in loss.read_text(encoding="utf-8")


def loads_hf_weights(slime: Path) -> bool:
    """Returns True if its Megatron backend loads Hugging Face checkpoints without conversion."""
    return (slime / "slime" / "backends" / "megatron_utils" / "hf_to_megatron").is_dir()


def _arguments_of(slime: Path) -> str:
    file = slime / "slime" / "utils" / "arguments.py"
    if not file.is_file():
        raise LaunchError(f"{slime} is no slime checkout: name one in SLIME_DIR")
    return file.read_text(encoding="utf-8")
