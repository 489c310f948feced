"""Installs the rollout buffer into a slime checkout as an overlay, checks the overlay, or removes it.

    python tools/install_into_slime.py ~/slime               # install or update
    python tools/install_into_slime.py ~/slime --trainer-only  # the buffer runs elsewhere
    python tools/install_into_slime.py ~/slime --check       # 0: as installed; 1: changed, incomplete or not installed
    python tools/install_into_slime.py ~/slime --uninstall   # afterwards git status is what it was before

It installs ``slime/rollout/agent_rollout*.py``, our masks next to slime's ``mask_utils.py``,
``slime_plugins/rollout_buffer/``, ``examples/android_world/``, and the launch scripts with their modules.
``--trainer-only`` installs of ``slime_plugins/rollout_buffer/`` only the modules that the trainer's side imports, and a
``buffer.py`` that prints how to start the buffer. slime's types and its ``mask_utils.py`` are not replaced. A replaced
file is stored in ``.rollout_buffer_overlay/`` of the checkout, next to a manifest of all installed files, and restored
by ``--uninstall``. Files changed since the installation are not overwritten or removed without ``--force``; an edited
``config.yaml`` of the device pool is never replaced, with a warning.
"""

from __future__ import annotations

import argparse
import ast
import functools
import hashlib
import importlib.metadata
import json
import os
import runpy
import shlex
import shutil
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

SOURCE = Path(__file__).resolve().parent.parent
PATTERNS = (
    "slime/rollout/agent_rollout*.py",
    "slime/utils/mask_[!u]*.py",  # without mask_utils.py, which is slime's
    "slime_plugins/rollout_buffer/**/*",
    "examples/android_world/**/*",
    "scripts/cleanup.sh",
    "scripts/run_agent.sh",
    "tools/__init__.py",
    "tools/launch_training.py",
    "tools/generate_tasks.py",
    "tools/launching/*.py",
    "data/demo_math.jsonl",
    "data/task_list.txt",
    "data/tasks.jsonl",
)
TRAINER_ROOTS = ("slime/rollout/agent_rollout*.py", "tools/launch_training.py")
"""Entry points of a trainer: its rollout functions and the launch program."""
TRAINER_PACKAGES = ("aiohttp", "requests", "transformers", "pydantic")
"""Packages that the trainer's end imports."""
TRAINER_FILES = (
    *TRAINER_ROOTS,
    "slime_plugins/rollout_buffer/tools/assign_instance_id.py",
    "examples/android_world/config.yaml",
    "examples/android_world/multi_node_ray_start.sh",
    "examples/android_world/run_android_world*",
    "scripts/run_agent.sh",
    "tools/launching/*.py",
)
"""Files installed by ``--trainer-only``, in addition to the modules that they import. Input files are not among them:
the buffer opens them on its own host."""
BUFFER_PROGRAM = "slime_plugins/rollout_buffer/buffer.py"
TRAINER_ONLY_BUFFER = "tools/launching/trainer_only_buffer.py"
"""Installed as ``buffer.py`` by ``--trainer-only``."""
STATE = ".rollout_buffer_overlay"
FARM_CONFIG = "examples/android_world/config.yaml"
"""A file for users to edit; an edited one is not reported and not replaced."""
NAMES_OF_SLIME: Mapping[str, frozenset[str]] = {
    "slime/__init__.py": frozenset(),
    "slime/utils/types.py": frozenset({"Sample"}),
    "slime/rollout/base_types.py": frozenset({"RolloutFnTrainOutput", "RolloutFnEvalOutput"}),
    "slime/rollout/data_source.py": frozenset({"RolloutDataSourceWithBuffer"}),
    "slime/ray/rollout.py": frozenset({"RolloutManager"}),
    "slime/utils/mask_utils.py": frozenset({"MultiTurnLossMaskGenerator"}),
}
"""Names that a slime tree must define for this overlay."""
FIELDS_OF_SAMPLE = frozenset(
    {"group_index", "index", "loss_mask", "metadata", "multimodal_train_inputs", "remove_sample", "response_length"}
    | {"reward", "rollout_log_probs", "status", "tokens", "weight_versions"}
)
EXECUTION_FIELDS = frozenset({"rollout_id", "group_id"})
"""Fields of a Sample that name its trajectory; slime's version decides which it has. Without any, slime treats each row
as a trajectory."""
EDITED = "changed since it was installed"
ONE_ROW_EACH = (
    "this slime is from before 25 May 2026: it weighs each row as a trajectory of its own. Trajectories of one row are "
    "trained (mathematics, Android World's mode incremental); with one of several rows, a rollout fails with an error"
)


class OverlayError(Exception):
    """The checkout cannot be changed as requested; the message has the reason and the remedy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """An installed file: its hash, and whether it replaced a file of slime."""

    sha256: str
    replaced: bool


class Overlay:
    """The overlay of one slime checkout.

    The manifest is written before the files, so that an interrupted installation can be repeated or removed.
    """

    def __init__(self, checkout: Path, source: Path = SOURCE) -> None:
        self._checkout = checkout.resolve()
        self._source = source
        self._state = self._checkout / STATE
        self._trainer_only = False
        self._entries = self._read_manifest()

    @property
    def is_installed(self) -> bool:
        """True if the checkout holds an overlay, complete or not."""
        return bool(self._entries)

    @property
    def warnings(self) -> list[str]:
        """Returns differences that are not errors, one sentence each."""
        warnings = []
        if self._farm_config_is_edited():
            warnings.append(f"{FARM_CONFIG} stays as it was edited; what ships is {self._source / FARM_CONFIG}")
        if not self._sample_fields() & EXECUTION_FIELDS:
            warnings.append(ONE_ROW_EACH)
        return warnings

    def install(self, *, force: bool = False, trainer_only: bool = False) -> int:
        """Installs every file and returns their number; removes files of an earlier overlay that no longer exist.

        ``trainer_only`` leaves out modules that only the buffer's processes need.

        Raises:
            OverlayError: this is no supported slime checkout, or files of the overlay were changed.
        """
        self._check_tree()
        self._trainer_only = trainer_only
        self._refuse_changed(force, except_for=FARM_CONFIG)
        wanted = self._files()
        sources = _sources(self._source, trainer_only)
        edited = {FARM_CONFIG} if self._farm_config_is_edited() and not force else set()
        entries = {path: Entry(sha256=digest, replaced=self._keep_original(path)) for path, digest in wanted.items()}
        obsolete = {path: entry for path, entry in self._entries.items() if path not in entries}
        self._write_manifest({**obsolete, **entries})
        for path in wanted.keys() - edited:
            self._copy(sources[path], self._checkout / path, as_link=True)
        for path, entry in obsolete.items():
            self._remove_or_restore(path, entry)
        self._write_manifest(entries)
        return len(wanted)

    def uninstall(self, *, force: bool = False) -> int:
        """Removes every file, restores slime's own, and returns the number of both.

        Raises:
            OverlayError: there is no overlay, or files of it were changed.
        """
        if not self.is_installed:
            raise OverlayError(f"{self._checkout} has no overlay: nothing to uninstall")
        self._refuse_changed(force)
        entries = dict(self._entries)
        for path, entry in entries.items():
            self._remove_or_restore(path, entry)
        self._entries = {}
        shutil.rmtree(self._state)
        return len(entries)

    def findings(self) -> list[str]:
        """Returns one message for each wrong file; empty if the overlay is as installed."""
        if not self.is_installed:
            return [f"{self._checkout} has no overlay: run this without --check to install it"]
        wanted = self._files()
        states = {path: self._state_of(path) for path in sorted(self._entries)}
        messages = [
            f"{path}: {state}"
            for path, state in states.items()
            if state is not None and not (path == FARM_CONFIG and state == EDITED)
        ]
        messages += [f"{path}: not installed" for path in sorted(wanted.keys() - self._entries.keys())]
        messages += [
            f"{path}: another version is installed"
            for path, entry in sorted(self._entries.items())
            if path in wanted and wanted[path] != entry.sha256
        ]
        return messages

    # --- state of the checkout ---------------------------------------------------------------------------------------

    def _check_tree(self) -> None:
        if (self._checkout / "tools" / Path(__file__).name).exists():
            raise OverlayError(f"{self._checkout} is this project itself: name a checkout of slime")
        for path, names in NAMES_OF_SLIME.items():
            missing = names - _definitions(self._original_or_current(path)).keys()
            if missing:
                raise OverlayError(f"this is no slime that is known here: {path} does not define {_listed(missing)}")
        missing = FIELDS_OF_SAMPLE - self._sample_fields()
        if missing:
            raise OverlayError(f"slime's Sample has no {_listed(missing)}: this slime is older than the overlay needs")

    def _sample_fields(self) -> frozenset[str]:
        return _definitions(self._original_or_current("slime/utils/types.py"))["Sample"]

    def _original_or_current(self, path: str) -> Path:
        original = self._state / "originals" / path
        file = original if original.is_file() else self._checkout / path
        if not file.is_file():
            raise OverlayError(f"{self._checkout} is no slime checkout: it has no {path}")
        return file

    def _files(self) -> dict[str, str]:
        return _digests(self._source, self._trainer_only)

    def _state_of(self, path: str) -> str | None:
        file = self._checkout / path
        if not file.is_file():
            return "missing"
        return None if _sha256(file) == self._entries[path].sha256 else EDITED

    def _farm_config_is_edited(self) -> bool:
        return FARM_CONFIG in self._entries and self._is_foreign(FARM_CONFIG, self._files())

    def _refuse_changed(self, force: bool, *, except_for: str | None = None) -> None:
        wanted = self._files()
        changed = [path for path in self._entries if path != except_for and self._is_foreign(path, wanted)]
        if changed and not force:
            raise OverlayError(
                f"changed since they were installed: {_listed(changed)}; keep your changes elsewhere and repeat with "
                "--force, which drops them"
            )

    def _is_foreign(self, path: str, wanted: Mapping[str, str]) -> bool:
        """Returns True if the file is neither the overlay's nor slime's; an interrupted run leaves one of these."""
        file, original = self._checkout / path, self._state / "originals" / path
        if not file.is_file():
            return False
        own_digests = {self._entries[path].sha256, wanted.get(path)}
        if original.is_file():
            own_digests.add(_sha256(original))
        return _sha256(file) not in own_digests

    # --- changes -----------------------------------------------------------------------------------------------------

    def _keep_original(self, path: str) -> bool:
        """Stores slime's own file of that path; returns True if there is one."""
        entry = self._entries.get(path)
        if entry is not None:
            return entry.replaced
        file = self._checkout / path
        if not file.is_file():
            return False
        self._copy(file, self._state / "originals" / path)
        return True

    def _remove_or_restore(self, path: str, entry: Entry) -> None:
        file = self._checkout / path
        for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
            compiled.unlink()
        if entry.replaced:
            self._copy(self._state / "originals" / path, file)
            return
        file.unlink(missing_ok=True)
        self._remove_empty(file.parent)

    def _remove_empty(self, folder: Path) -> None:
        """Removes folders that hold nothing but compiled files of removed modules."""
        while folder != self._checkout and folder.is_dir():
            rest = [entry for entry in folder.iterdir() if entry.name != "__pycache__"]
            if rest:
                return
            shutil.rmtree(folder)
            folder = folder.parent

    @staticmethod
    def _copy(source: Path, target: Path, *, as_link: bool = False) -> None:
        """Copies a file atomically; ``as_link`` copies a symbolic link as a link."""
        target.parent.mkdir(parents=True, exist_ok=True)
        new = target.with_name(target.name + ".new")
        new.unlink(missing_ok=True)  # of an interrupted run
        shutil.copy2(source, new, follow_symlinks=not as_link)
        os.replace(new, target)

    def _read_manifest(self) -> dict[str, Entry]:
        file = self._state / "manifest.json"
        if not file.is_file():
            return {}
        try:
            manifest = json.loads(file.read_text(encoding="utf-8"))
            files, self._trainer_only = manifest["files"], bool(manifest.get("trainer_only"))
            return {path: Entry(sha256=entry["sha256"], replaced=entry["replaced"]) for path, entry in files.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise OverlayError(f"{file} cannot be read ({error}): restore the checkout with git") from error

    def _write_manifest(self, entries: Mapping[str, Entry]) -> None:
        self._state.mkdir(exist_ok=True)
        (self._state / ".gitignore").write_text("*\n", encoding="utf-8")
        files = {path: {"sha256": entry.sha256, "replaced": entry.replaced} for path, entry in sorted(entries.items())}
        new = self._state / "manifest.json.new"
        manifest = {"trainer_only": self._trainer_only, "files": files}
        new.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        os.replace(new, self._state / "manifest.json")
        self._entries = dict(entries)


@functools.cache
def _sources(source: Path, trainer_only: bool) -> dict[str, Path]:
    """Returns the source of each file of the overlay, by its path in the checkout."""
    patterns = TRAINER_FILES if trainer_only else PATTERNS
    files = {file for pattern in patterns for file in source.glob(pattern)}
    if trainer_only:
        roots = [file for pattern in TRAINER_ROOTS for file in source.glob(pattern)]
        files |= import_closure(source, roots) - {source / path for path in NAMES_OF_SLIME}
    sources = {
        file.relative_to(source).as_posix(): file
        for file in sorted(files)
        if file.is_file() and "__pycache__" not in file.parts
    }
    if trainer_only:
        sources[BUFFER_PROGRAM] = sources.pop(TRAINER_ONLY_BUFFER)
    return sources


@functools.cache
def _digests(source: Path, trainer_only: bool) -> dict[str, str]:
    return {path: _sha256(file) for path, file in _sources(source, trainer_only).items()}


def import_closure(source: Path, roots: Sequence[Path]) -> set[Path]:
    """Returns ``roots`` and all modules of ``source`` that they import at run time, transitively.

    Imports inside of functions count; those under ``if TYPE_CHECKING`` do not.
    """
    closure: set[Path] = set()
    waiting = list(roots)
    while waiting:
        file = waiting.pop()
        if file not in closure:
            closure.add(file)
            for module in _imported_modules(ast.parse(file.read_bytes())):
                parts = module.split(".")
                for depth in range(1, len(parts) + 1):
                    place = source.joinpath(*parts[:depth])
                    waiting += [each for each in (place.with_suffix(".py"), place / "__init__.py") if each.is_file()]
    return closure


def _imported_modules(tree: ast.AST) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{name.name}" for name in node.names)
        yield from _imported_modules(node)


def _definitions(file: Path) -> dict[str, frozenset[str]]:
    """Returns the names that a module defines, each class with its methods and annotated fields."""
    try:
        tree = ast.parse(file.read_bytes())
    except SyntaxError as error:
        raise OverlayError(f"{file} is no Python {sys.version_info[0]}.{sys.version_info[1]}: {error}") from error
    definitions: dict[str, frozenset[str]] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            definitions[node.name] = frozenset(_members(node))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            definitions[node.name] = frozenset()
        elif isinstance(node, ast.Assign):
            definitions |= {target.id: frozenset() for target in node.targets if isinstance(target, ast.Name)}
    return definitions


def _members(node: ast.ClassDef) -> set[str]:
    functions = {item.name for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)}
    fields = (item.target for item in node.body if isinstance(item, ast.AnnAssign))
    return functions | {target.id for target in fields if isinstance(target, ast.Name)}


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _listed(names: Sequence[str] | set[str] | frozenset[str]) -> str:
    shown = sorted(names)
    return ", ".join(shown[:5]) + (f" and {len(shown) - 5} more" if len(shown) > 5 else "")


def missing_requirements(source: Path = SOURCE, *, trainer_only: bool = False) -> list[str]:
    """Returns the requirements of this project, or of its trainer's end, that the running Python does not meet."""
    project = tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = map(Requirement, project["dependencies"])
    wanted = [each for each in requirements if not trainer_only or each.name in TRAINER_PACKAGES]
    return [str(each) for each in wanted if not _is_met(each)]


def _is_met(requirement: Requirement) -> bool:
    try:
        return requirement.specifier.contains(importlib.metadata.version(requirement.name), prereleases=True)
    except importlib.metadata.PackageNotFoundError:
        return False


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    description = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="install_into_slime", description=description)
    parser.add_argument("checkout", type=Path, metavar="PATH", help="a checkout of slime")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="only say whether the overlay is as it was installed")
    what.add_argument("--uninstall", action="store_true", help="take the overlay away and bring slime's files back")
    parser.add_argument(
        "--trainer-only", action="store_true", help="leave out what only a buffer needs: the buffer runs elsewhere"
    )
    parser.add_argument("--force", action="store_true", help="overwrite or remove files that were changed")
    return parser.parse_args(arguments)


def advice_on_two_slimes(source: Path = SOURCE) -> str | None:
    """Returns a warning if the running Python has both slime and this project's wheel installed; else None.

    The file is read, not imported: the two packages shadow each other.
    """
    file = source / "slime_plugins/rollout_buffer/install_hints.py"
    line: str | None = runpy.run_path(str(file))["advice_on_two_slimes"]()
    return line


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, 1 if a check finds a difference, 2 after printing an error."""
    options = _parse(arguments)
    if not options.uninstall and (advice := advice_on_two_slimes()) is not None:
        sys.stdout.write(f"{advice}\n")
    try:
        return _run(options)
    except (OverlayError, OSError) as error:
        sys.stderr.write(f"install_into_slime: {error}\n")
        return 2


def _run(options: argparse.Namespace) -> int:
    overlay = Overlay(options.checkout)
    if options.check:
        findings = overlay.findings()
        sys.stdout.write("\n".join(findings or ["the overlay is as it was installed"]) + "\n")
        return 1 if findings else 0
    if options.uninstall:
        sys.stdout.write(f"{overlay.uninstall(force=options.force)} files taken away or restored\n")
        return 0
    sys.stdout.write(f"{overlay.install(force=options.force, trainer_only=options.trainer_only)} files are in place\n")
    sys.stdout.writelines(f"warning: {warning}\n" for warning in overlay.warnings)
    missing = missing_requirements(trainer_only=options.trainer_only)
    if missing:
        packages = shlex.join(missing)
        sys.stdout.write(f"this Python lacks packages of the overlay; in slime's environment: pip install {packages}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
