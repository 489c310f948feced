"""Checks whether a node of the cluster can hold a device worker. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_INTERNAL_PREFIXES = ("node:", "object_store_memory")


def why_no_node_fits(wanted: Mapping[str, float], nodes: Sequence[Mapping[str, float]]) -> str:
    """Returns "" if one node has all wanted resources; otherwise a message with the wanted and the existing resources.

    Resources in use count as existing. A worker runs on one node: several nodes together are not enough.
    """
    if any(all(node.get(name, 0.0) >= amount for name, amount in wanted.items()) for node in nodes):
        return ""
    existing = "; ".join(in_words({k: v for k, v in node.items() if _is_worth_naming(k, wanted)}) for node in nodes)
    return f"no node offers {in_words(wanted)}: the cluster has {existing or 'no node'}"


def in_words(resources: Mapping[str, float]) -> str:
    """Formats resources like ``{CPU: 4, phone: 1}``."""
    return "{" + ", ".join(f"{name}: {amount:.12g}" for name, amount in sorted(resources.items())) + "}"


def _is_worth_naming(name: str, wanted: Mapping[str, float]) -> bool:
    return name in wanted or not name.startswith(_INTERNAL_PREFIXES)
