"""The registry of generators by task type.

A generator is a Python file in this folder, in a folder given with ``--generator-dir``, or a module that an installed
package names in the group ``rollout_buffer.task_types`` (``extensions.py``). It defines ``TASK_TYPE`` and one of

* ``create_generator() -> Generator``: the protocol of ``base_generator.py``, one episode per call;
* ``run_rollout(data)``: slime's plain form. It gets the whole payload and writes finished items to ``/buffer/write``.

It may define ``REWARD_RANGE = (low, high)``, ``NEEDS_RAY = True`` (or a function of this host's settings),
``REQUIRED_KEYS = ("tokenizer_path",)`` (required keys of the start payload; a class in the module may define them
instead), ``OPTION_KEYS = ("max_turns",)`` (further allowed keys; a job with any other key is refused),
``OPTION_SECTIONS = {"mine.nested": ("max_turns",)}`` (keys of an option that is an object, by its path; a job that
misspells one is refused) and any of the five group functions with slime's signatures. A file that fails to load is
reported with its traceback and does not affect other files.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import linecache
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import decode_source
from pathlib import Path
from types import ModuleType
from typing import Any

from slime_plugins.rollout_buffer.errors import GeneratorError
from slime_plugins.rollout_buffer.extensions import Group, installed
from slime_plugins.rollout_buffer.generator.base_generator import Generator
from slime_plugins.rollout_buffer.generator.group_function_adapter import group_functions_of
from slime_plugins.rollout_buffer.observability.tracebacks import place_and_traceback
from slime_plugins.rollout_buffer.rules.groups import GroupFunctions

BUILT_IN_FOLDER = Path(__file__).parent
NOT_GENERATORS = frozenset(
    {
        "__init__.py",
        "__main__.py",
        "base_generator.py",
        "group_function_adapter.py",
        "plain_generator.py",
        "registry.py",
    }
)
"""Files of the built-in folder that are not loaded. Other files without ``TASK_TYPE`` are loaded and then ignored."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plugin:
    """A generator as its module defines it, with one of ``create_generator`` and ``run_rollout``."""

    task_type: str
    source: Path
    """Its file; for an installed package the module's name."""
    needs_ray: bool
    reward_range: tuple[float, float] | None
    functions: GroupFunctions
    required_keys: tuple[str, ...] = ()
    option_keys: tuple[str, ...] | None = None
    """None allows any option."""
    option_sections: Mapping[str, Sequence[str]] = field(default_factory=dict)
    create_generator: Callable[[], Generator] | None = None
    run_rollout: Callable[[dict[str, Any]], Any] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Catalog:
    """``plugins`` by task type. ``broken`` holds, for each file that cannot be used, the reason: place and traceback of
    its error, or another file with its task type."""

    plugins: dict[str, Plugin] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)


def discover(
    folders: Sequence[Path] = (), *, skip: Sequence[Path] = (), on_file: Callable[[Path], None] | None = None
) -> Catalog:
    """Loads every generator file of the built-in folder and of ``folders``. Never raises for a broken file.

    Files in ``skip`` are not loaded; ``on_file`` is called with each file before it is loaded.
    """
    catalog = Catalog()
    files = [path for folder in (BUILT_IN_FOLDER, *folders) for path in sorted(folder.glob("*.py"))]
    package_modules = {
        Path(extension.target): extension for _, extension in sorted(installed(Group.TASK_TYPES).items())
    }
    for path in (*files, *package_modules):
        if path in skip or (path.parent == BUILT_IN_FOLDER and path.name in NOT_GENERATORS):
            continue
        if on_file is not None:
            on_file(path)
        name = path.name if path not in package_modules else f"{path} of {package_modules[path].package}"
        try:
            plugin = _load_file(path)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's file may raise anything: the catalog has its traceback
            catalog.broken[name] = place_and_traceback(error, path)
            continue
        if plugin is not None and plugin.task_type in catalog.plugins:
            other = catalog.plugins[plugin.task_type].source
            catalog.broken[name] = f"TASK_TYPE {plugin.task_type!r} is taken by {other}"
        elif plugin is not None:
            catalog.plugins[plugin.task_type] = plugin
    return catalog


def load_file(path: Path, task_type: str) -> Plugin | None:
    """Returns the generator in a file; None if the file has another task type. Loads no other file.

    Raises:
        Exception: any error of the file.
    """
    plugin = _load_file(path)
    return plugin if plugin is not None and plugin.task_type == task_type else None


def load(task_type: str, folders: Sequence[Path] = (), *, skip: Sequence[Path] = ()) -> Plugin:
    """Returns the generator of a task type; files in ``skip`` are not loaded.

    Raises:
        GeneratorError: no file has it; names the files that failed to load.
    """
    catalog = discover(folders, skip=skip)
    if task_type in catalog.plugins:
        return catalog.plugins[task_type]
    reasons = "".join(f"\n{name} does not load: {reason}" for name, reason in catalog.broken.items())
    raise GeneratorError(f"no generator has TASK_TYPE {task_type!r}{reasons}")


def _load_file(path: Path) -> Plugin | None:
    module = _import(path)
    task_type = getattr(module, "TASK_TYPE", None)
    if task_type is None:
        return None
    create, run_rollout = getattr(module, "create_generator", None), getattr(module, "run_rollout", None)
    if not isinstance(task_type, str) or not (callable(create) or callable(run_rollout)):
        raise GeneratorError("TASK_TYPE must be a string, and the file needs create_generator() or run_rollout(data)")
    reward_range = getattr(module, "REWARD_RANGE", None)
    return Plugin(
        task_type=task_type,
        source=path,
        needs_ray=_needs_ray(module),
        required_keys=_required_keys(module),
        option_keys=tuple(module.OPTION_KEYS) if hasattr(module, "OPTION_KEYS") else None,
        option_sections={section: tuple(keys) for section, keys in getattr(module, "OPTION_SECTIONS", {}).items()},
        reward_range=None if reward_range is None else (float(reward_range[0]), float(reward_range[1])),
        functions=group_functions_of(module),
        create_generator=create,
        run_rollout=run_rollout if create is None else None,
    )


def _required_keys(module: ModuleType) -> tuple[str, ...]:
    """Returns the module's value, or else that of a class in it."""
    classes = [value for value in vars(module).values() if isinstance(value, type)]
    declared = [key for cls in classes for key in getattr(cls, "REQUIRED_KEYS", ())]
    return tuple(getattr(module, "REQUIRED_KEYS", dict.fromkeys(declared)))


def _needs_ray(module: ModuleType) -> bool:
    declared = getattr(module, "NEEDS_RAY", False)
    return bool(declared() if callable(declared) else declared)


def _import(path: Path) -> ModuleType:
    """Imports the module of a package by its name, and a file under a unique name, so that no two files share a module.

    The file's text is compiled, not its cached bytecode: Python takes bytecode of an earlier text for current if both
    texts have the same size and were written in the same second. Tracebacks show the compiled text, even if the file
    changes.
    """
    if path.suffix != ".py":
        return importlib.import_module(str(path))
    if path.parent == BUILT_IN_FOLDER:
        return importlib.import_module(f"{__package__}.{path.stem}")
    folder = hashlib.sha256(str(path.parent).encode()).hexdigest()[:8]
    name = f"rollout_buffer_generator_{folder}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None:
        raise GeneratorError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    source = path.read_bytes()
    linecache.cache[str(path)] = (len(source), None, decode_source(source).splitlines(keepends=True), str(path))
    sys.modules[name] = module
    exec(compile(source, str(path), "exec", dont_inherit=True), module.__dict__)
    return module


def describe(catalog: Catalog, files: Mapping[str, str]) -> str:
    """Returns the catalog as one line of JSON, for the supervisor, which runs the registry in a short-lived process.

    ``files`` describes the files of the folders as they were before they were loaded.
    """
    task_types = {
        name: {
            "needs_ray": plugin.needs_ray,
            "required_keys": plugin.required_keys,
            "option_keys": plugin.option_keys,
            "option_sections": plugin.option_sections,
            "source": str(plugin.source),
        }
        for name, plugin in catalog.plugins.items()
    }
    extensions = [extension.described() for group in Group for _, extension in sorted(installed(group).items())]
    description = {
        "task_types": task_types,
        "broken_generators": catalog.broken,
        "extensions": extensions,
        "files": files,
    }
    return json.dumps(description)
