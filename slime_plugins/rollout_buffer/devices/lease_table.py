"""The table of leases. Pure: the clock is a parameter, nothing waits here.

Lease ids only grow. A device worker refuses calls under a smaller id than the largest that it has seen. So an owner
that lost its lease (suspended, swapped out, disconnected) cannot touch a device that has been leased to another owner.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from slime_plugins.rollout_buffer.devices.fair_share import Claimant


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """A device leased to ``holder`` until ``expires_at``, on the clock of the table's caller."""

    lease_id: int
    device_id: str
    holder: Claimant
    expires_at: float
    capabilities: frozenset[str] | None = None


class LeaseTable:
    """Free devices and leases. A known device is either free, leased once, or set aside."""

    def __init__(self, *, lease_timeout_s: float, first_lease_id: int) -> None:
        self.lease_timeout_s = lease_timeout_s
        self._next_lease_id = first_lease_id
        self._free: dict[str, frozenset[str] | None] = {}  # with their capabilities, the longest free first
        self._leases: dict[int, Lease] = {}

    @property
    def lent(self) -> int:
        """Number of leased devices."""
        return len(self._leases)

    def free_by_kind(self) -> list[tuple[frozenset[str] | None, int]]:
        """Returns each set of capabilities with the number of free devices that have it.

        Sets with fewer capabilities come first, so that devices that can play more tasks stay free.
        """
        counts = Counter(self._free.values())
        return sorted(counts.items(), key=lambda kind: math.inf if kind[0] is None else len(kind[0]))

    def add(self, device_id: str, capabilities: frozenset[str] | None = None) -> None:
        """Adds a device as free; with ``capabilities`` None it can play any task.

        Raises:
            ValueError: the device is free or leased already.
        """
        if device_id in self._free or any(lease.device_id == device_id for lease in self._leases.values()):
            raise ValueError(f"{device_id} is in the table already")
        self._free[device_id] = capabilities

    def set_aside(self, device_id: str) -> bool:
        """Removes a free device from the table; returns False if it is not free."""
        if device_id not in self._free:
            return False
        del self._free[device_id]
        return True

    def lend(self, holder: Claimant, now: float, capabilities: frozenset[str] | None = None) -> Lease | None:
        """Leases the device with these capabilities that has been free for longest; None if none is free."""
        device_id = next((each for each, kind in self._free.items() if kind == capabilities), None)
        if device_id is None:
            return None
        del self._free[device_id]
        lease = Lease(
            lease_id=self._next_lease_id,
            device_id=device_id,
            holder=holder,
            expires_at=now + self.lease_timeout_s,
            capabilities=capabilities,
        )
        self._next_lease_id += 1
        self._leases[lease.lease_id] = lease
        return lease

    def renew(self, owner: str, lease_ids: Iterable[int], now: float) -> list[int]:
        """Extends the owner's leases and returns the ids of those that it has lost."""
        lost = []
        for lease_id in lease_ids:
            lease = self._leases.get(lease_id)
            if lease is None or lease.holder.owner != owner:
                lost.append(lease_id)
            else:
                self._leases[lease_id] = replace(lease, expires_at=now + self.lease_timeout_s)
        return lost

    def take_back(self, lease_id: int) -> Lease | None:
        """Ends a lease and returns it; its device is set aside. Returns None if the lease had ended before."""
        return self._leases.pop(lease_id, None)

    def take_back_all_of(self, owner: str) -> list[Lease]:
        """Ends every lease of an owner; their devices are set aside."""
        leases = [lease for lease in self._leases.values() if lease.holder.owner == owner]
        for lease in leases:
            del self._leases[lease.lease_id]
        return leases

    def take_back_expired(self, now: float) -> list[Lease]:
        """Ends every expired lease; their devices are set aside."""
        expired = [lease for lease in self._leases.values() if lease.expires_at <= now]
        for lease in expired:
            del self._leases[lease.lease_id]
        return expired

    def held(self, capabilities: frozenset[str] | None = None) -> Counter[Claimant]:
        """Returns the number of devices with these capabilities that each claimant has."""
        return Counter(lease.holder for lease in self._leases.values() if lease.capabilities == capabilities)

    def holders(self) -> dict[str, str]:
        """Returns the owner of each lent device."""
        return {lease.device_id: lease.holder.owner for lease in self._leases.values()}
