"""Adapter for slime's data source: groups in its buffer, consumed instance ids in its metadata.

``trainer/consumed.py`` defines the format of the metadata.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from slime.rollout.agent_rollout_argument_checks import refusals
from slime.rollout.agent_rollout_samples import Group, is_agent_group
from slime_plugins.rollout_buffer.errors import ConfigError

logger = logging.getLogger(__name__)


def checked_data_source(args: Any) -> Any:
    """Returns slime's data source, after a check of slime's arguments; for ``--data-source-path``.

    slime makes its data source while the engines start, so that wrong arguments fail before all models are loaded.

    Raises:
        ConfigError: the rollout function would refuse these arguments.
    """
    if reasons := refusals(args):
        raise ConfigError("; ".join(reasons), {"reasons": reasons})
    return importlib.import_module("slime.rollout.data_source").RolloutDataSourceWithBuffer(args)


class SlimeDataSource:
    """A buffer of groups and metadata, in slime's data source.

    If the data source has no buffer (slime's read-only one, or a custom one), groups are stored in this object.
    """

    def __init__(self, data_source: Any) -> None:
        self._source = data_source
        self._has_buffer = hasattr(data_source, "get_buffer_length") and hasattr(data_source, "add_samples")
        self._has_metadata = hasattr(data_source, "get_metadata") and hasattr(data_source, "update_metadata")
        self._waiting: list[Group] = []

    def waiting_count(self) -> int:
        """Returns the number of stored groups."""
        return int(self._source.get_buffer_length()) if self._has_buffer else len(self._waiting)

    def add(self, groups: Sequence[Group]) -> None:
        """Appends groups."""
        if not self._has_buffer:
            self._waiting.extend(groups)
        elif groups:
            self._source.add_samples(list(groups))

    def take(self, count: int) -> list[Group]:
        """Removes and returns at most ``count`` groups, chosen by slime's buffer filter; fewer if it rejects some.

        Prompts with which slime pads the result are left out.
        """
        if not self._has_buffer:
            taken, self._waiting = self._waiting[:count], self._waiting[count:]
            return taken
        samples = self._source.get_samples(count)
        groups = [group for group in samples if is_agent_group(group)]
        if len(groups) < len(samples):
            logger.info("dropped %d groups of the data source that are prompts", len(samples) - len(groups))
        self.add(groups[count:])  # a filter may return more groups than were asked for
        return groups[:count]

    def metadata(self) -> dict[str, Any]:
        """Returns the data source's metadata; {} if it has none."""
        return dict(self._source.get_metadata()) if self._has_metadata else {}

    def update_metadata(self, changes: Mapping[str, Any]) -> None:
        """Updates the metadata, which slime saves with its next checkpoint."""
        if self._has_metadata:
            self._source.update_metadata(dict(changes))
