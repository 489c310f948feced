"""slime's data source as an agent rollout uses it: groups in its buffer, consumed instance ids in its metadata.

What the metadata says, and how it is read, is the trainer package's: ``trainer/consumed.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from slime.rollout.agent_rollout_samples import Group, is_agent_group

logger = logging.getLogger(__name__)


class GroupStore:
    """slime's data source as this rollout uses it: a buffer of groups and a place for metadata.

    A data source without a buffer (slime's read-only one, or one of the user's own) is left alone; groups then wait in
    this object.
    """

    def __init__(self, data_source: Any) -> None:
        self._source = data_source
        self._has_buffer = hasattr(data_source, "get_buffer_length") and hasattr(data_source, "add_samples")
        self._has_metadata = hasattr(data_source, "get_metadata") and hasattr(data_source, "update_metadata")
        self._waiting: list[Group] = []

    def held(self) -> int:
        """Returns how many groups are waiting."""
        return int(self._source.get_buffer_length()) if self._has_buffer else len(self._waiting)

    def add(self, groups: Sequence[Group]) -> None:
        """Puts groups behind those that are waiting."""
        if not self._has_buffer:
            self._waiting.extend(groups)
        elif groups:
            self._source.add_samples(list(groups))

    def take(self, count: int) -> list[Group]:
        """Takes at most ``count`` groups, chosen by slime's buffer filter; fewer when the filter drops some.

        slime fills up a short answer with bare prompts. They are left out here: a prompt is no trajectory.
        """
        if not self._has_buffer:
            taken, self._waiting = self._waiting[:count], self._waiting[count:]
            return taken
        found = self._source.get_samples(count)
        groups = [group for group in found if is_agent_group(group)]
        if len(groups) < len(found):
            logger.info("the data source gave %d groups that no agent played; left out", len(found) - len(groups))
        self.add(groups[count:])
        return groups[:count]

    def metadata(self) -> dict[str, Any]:
        """Returns the data source's metadata; {} when it keeps none."""
        return dict(self._source.get_metadata()) if self._has_metadata else {}

    def update_metadata(self, changes: Mapping[str, Any]) -> None:
        """Changes entries of the metadata, which slime saves with its next checkpoint."""
        if self._has_metadata:
            self._source.update_metadata(dict(changes))
