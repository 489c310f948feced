"""Explains a refusal to join a Ray cluster because of other versions of Ray or Python than the cluster's. Pure.

The devices' cluster and a process that joins it (a runner, slime's rollout worker, the trainer's launch script) may
have different environments. Ray's own error has six lines and names no remedy.
"""

from __future__ import annotations

import importlib.metadata
import platform
import re
from dataclasses import dataclass

from slime_plugins.rollout_buffer.errors import ConfigError

_STARTED_WITH = re.compile(r"started with:\s*Ray: (?P<ray>\S+)\s*Python: (?P<python>\S+)")


class RayVersionError(ConfigError):
    """A process with another Ray or Python tried to join a Ray cluster."""

    code = "ray_version"


@dataclass(frozen=True, kw_only=True, slots=True)
class RayVersions:
    """Versions of a process or a cluster; ``ray`` is empty if Ray is not installed."""

    ray: str
    python: str

    def __str__(self) -> str:
        return f"Ray {self.ray or '(not installed)'} on Python {self.python}"


def own_versions() -> RayVersions:
    """Returns the versions of this process."""
    try:
        ray = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        ray = ""
    return RayVersions(ray=ray, python=platform.python_version())


def version_refusal(message: str, own: RayVersions, address: str) -> RayVersionError | None:
    """Returns the error for Ray's ``message`` on a failed join; None if the message has another reason."""
    match = _STARTED_WITH.search(message)
    if match is None:
        return None
    cluster = RayVersions(ray=match["ray"], python=match["python"])
    return RayVersionError(
        f"the Ray cluster at {address} runs {cluster}, and this process has {own}: Ray requires equal versions. "
        f"{_remedy(cluster, own)}; or leave --ray-address out, and the buffer starts a cluster of its own",
        {"address": address, "cluster": str(cluster), "own": str(own)},
    )


def _remedy(cluster: RayVersions, own: RayVersions) -> str:
    ray = f"install 'ray=={cluster.ray}' here, or {own.ray} there" if cluster.ray != own.ray else ""
    python = f"run both on one Python ({cluster.python} there, {own.python} here)"
    steps = [step for step in (ray, python if cluster.python != own.python else "") if step]
    return "To correct it, " + " and ".join(steps)
