"""Extensions by installed packages, found by their entry points.

A package declares each extension in its ``pyproject.toml``, with one group for each kind (docs/extending.md)::

    [project.entry-points."rollout_buffer.task_types"]
    dice = "my_package.dice"                      # a module with TASK_TYPE = "dice"

The simulated phone and the commands ``demo``, ``engine`` and ``learn`` of ``rollout-buffer-lab`` are entry points, too.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from typing_extensions import TypedDict

from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.install_hints import LAB_DISTRIBUTION, install_lab


class Group(StrEnum):
    """The groups of entry points, and the required object of each."""

    TASK_TYPES = "rollout_buffer.task_types"
    """A generator module (``generator/registry.py``) whose ``TASK_TYPE`` is the entry point's name."""
    DEVICES = "rollout_buffer.devices"
    """A function (settings, index) → ``Device``, for ``device: NAME`` of the Android World settings."""
    ENGINES = "rollout_buffer.engines"
    """A function (url, settings or None) → ``HttpEngine`` on token ids, for ``engine_api: NAME``."""
    SCORERS = "rollout_buffer.scorers"
    """A function from a trajectory to its reward, for ``rescore --with NAME``."""
    COMMANDS = "rollout_buffer.commands"
    """A function with the parameters of a typer command, for ``rollout-buffer NAME``."""


OF_THE_LAB: Mapping[Group, tuple[str, ...]] = {
    Group.COMMANDS: ("demo", "engine", "learn"),
    Group.DEVICES: ("simulated",),
}
"""Extensions of ``rollout-buffer-lab``: if they are missing, the error names the package to install."""


class InstalledExtension(TypedDict):
    """One entry point of an installed package."""

    group: str
    """`task_types`, `devices`, `engines`, `scorers` or `commands`."""
    name: str
    """Name by which it is selected."""
    target: str
    """`module` or `module:object`."""
    package: str
    """Its distribution and version."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Extension:
    """One entry point of an installed package."""

    group: Group
    name: str
    target: str
    """``module`` or ``module:object``."""
    package: str
    """The distribution, as ``name version``."""

    def load(self) -> Any:
        """Returns the object that the entry point names.

        Raises:
            ConfigError: the object cannot be imported; the message names its package.
        """
        try:
            return importlib.metadata.EntryPoint(self.name, self.target, self.group.value).load()
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"{self.name!r} of {self.package} ({self.target}) cannot be loaded: {type(error).__name__}: {error}"
            ) from error

    def described(self) -> InstalledExtension:
        """Returns the extension for ``/health`` and ``doctor``."""
        group = self.group.value.removeprefix("rollout_buffer.")
        return InstalledExtension(group=group, name=self.name, target=self.target, package=self.package)


def installed(group: Group) -> Mapping[str, Extension]:
    """Returns the entry points of a group by name; of equal names, that of the first package in alphabetical order."""
    extensions = {}
    for point in importlib.metadata.entry_points(group=group.value):
        package = "?" if point.dist is None else f"{point.dist.name} {point.dist.version}"
        extensions[package, point.name] = Extension(group=group, name=point.name, target=point.value, package=package)
    return {name: extensions[package, name] for package, name in sorted(extensions, reverse=True)}


def load(group: Group, name: str) -> Any:
    """Returns the object of an entry point.

    Raises:
        ConfigError: no package has it, or it cannot be imported.
    """
    names = installed(group)
    if name not in names:
        raise ConfigError(missing(group, name))
    return names[name].load()


def missing(group: Group, name: str) -> str:
    """Returns the error message for a missing entry point: what to install, or the installed names."""
    if name in OF_THE_LAB.get(group, ()):
        return f"{name} belongs to the package {LAB_DISTRIBUTION}, which is not installed: {install_lab()}"
    names = installed(group)
    known = f"installed are {', '.join(sorted(names))}" if names else "none is installed"
    return f"no package of {sys.executable} has {name!r} among its entry points {group.value}; {known}"
