"""The folder of a run of ``demo`` or ``learn``, which each run empties first."""

from __future__ import annotations

from pathlib import Path

from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.storage.data_dir import OWNER_LOCK, is_owned


def refuse_if_served(data_dir: Path) -> None:
    """Checks that no ``serve`` uses the data directory of an earlier run.

    Raises:
        ConfigError: a supervisor holds its lock.
    """
    if (data_dir / OWNER_LOCK).exists() and is_owned(data_dir):
        raise ConfigError(
            f"a rollout-buffer serve uses {data_dir}, which would be emptied first: stop it, or give another --folder"
        )
