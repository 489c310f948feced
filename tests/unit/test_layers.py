"""Imports go one way. This file holds the layers and the contracts between them; ``docs/architecture.md`` says why."""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUFFER = "slime_plugins.rollout_buffer"

# Lowest first. A package, or a module of the root, imports only from layers above its own in this list; those in one
# string stand on one layer and know nothing of each other.
LAYERS = [
    "types credentials install_hints demo_tokenizer tools",
    "errors",
    "extensions",
    "serve_settings rules observability chat_tokens tokenizer_loading strict_yaml",
    "devices engine wire http_auth http_serving",
    "client storage recording json_bodies",
    "trainer",
    "state",
    "reporting",
    "buffer openapi",
    "remote_rollout server",
    "generator gateway",
    "supervisor testing",
    "runner evaluation",
    "cli",
    "__main__",
]
WIDEST_FOLDER = 20
MAX_BODY = 60


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> set[str]:
    """Every module that a file imports, also inside functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


@functools.cache
def files() -> dict[str, set[str]]:
    """Every module of the product, with what it imports."""
    roots = (ROOT / "slime", ROOT / "slime_plugins")
    return {module_name(path): imports_of(path) for root in roots for path in root.rglob("*.py")}


LAYER_OF = {package: level for level, packages in enumerate(LAYERS) for package in packages.split()}
TORCH_USERS = (
    "trainer.vision",
    "slime.rollout.agent_rollout_data_postprocess",
    "slime.rollout.agent_rollout_advantages",
)
CLIENTS_SIDE = ("client", "credentials", "errors", "install_hints", "rules", "tokenizer_loading", "types", "wire")
RAY_USERS = ("devices.ray_cluster",)
BOOKKEEPING = tuple(f"{BUFFER}.{name}" for name in ("buffer", "state", "storage", "server", "runner", "supervisor"))


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def package_of(name: str) -> str | None:
    """The package, or the module of the root, that a module of the buffer belongs to."""
    return name.removeprefix(f"{BUFFER}.").split(".")[0] if name.startswith(f"{BUFFER}.") else None


def offenders(who: tuple[str, ...], whom: tuple[str, ...], *, but: tuple[str, ...] = ()) -> list[str]:
    return sorted(
        f"{name} imports {target}"
        for name, targets in files().items()
        if within(name, *who) and not within(name, *but)
        for target in targets
        if within(target, *whom)
    )


def test_every_package_has_its_layer() -> None:
    assert {package for name in files() if (package := package_of(name)) is not None} == set(LAYER_OF)


def test_a_package_imports_only_from_lower_layers() -> None:
    wrong = []
    for name, targets in files().items():
        package = package_of(name)
        for target in sorted(targets):
            imported = package_of(target)
            if package is None or imported not in LAYER_OF or imported == package:
                continue
            if LAYER_OF[imported] >= LAYER_OF[package]:
                wrong.append(f"{name} imports {target}")
    assert wrong == []


@pytest.mark.parametrize(
    ("who", "whom", "but"),
    [
        # Pure rules, engines, devices and the forms of requests know no storage.
        (("rules", "engine", "devices", "wire"), ("storage", "state", "buffer"), ()),
        # State knows no HTTP.
        (("rules", "engine", "storage", "state", "buffer"), ("server", "openapi", "flask", "gunicorn"), ()),
        # The server is HTTP over the store and knows nothing of playing.
        (("server",), ("generator", "engine", "devices", "runner", "ray"), ()),
        # The gateway is a process of its own: nobody's runner, no generator, nothing of the server's.
        (("gateway",), ("generator", "runner", "server", "ray", "flask"), ()),
        (("server", "generator", "runner"), ("gateway",), ()),
        # A generator plays; where its trajectories go is not its business.
        (("generator",), BOOKKEEPING, ()),
        # The trainer's side knows no more of the buffer than a client.
        (("slime", "trainer"), tuple(sorted(LAYER_OF.keys() - {"trainer", *CLIENTS_SIDE})), ()),
        # Ray is known to the device pool alone.
        (("slime", "slime_plugins"), ("ray",), RAY_USERS),
        # Who plays marks phases; where traces go is one module's business.
        (("slime", "slime_plugins"), ("opentelemetry",), ("observability.opentelemetry",)),
        (("slime.utils",), (BUFFER, "slime.rollout", "numpy", "requests", "tokenizers", "transformers"), ()),
        # torch is for images and slime's ranks.
        (("slime", "slime_plugins"), ("torch",), TORCH_USERS),
        # The lab comes in through entry points alone.
        (("slime", "slime_plugins"), ("rollout_buffer_lab",), ()),
        # What agents at a screen have in common knows no kind of screen, and one kind nothing of another.
        (("generator.gui_agent", "generator.miniwob"), ("generator.android_world",), ()),
        (("generator.gui_agent", "generator.android_world"), ("generator.miniwob",), ()),
    ],
)
def test_the_contracts_between_packages_hold(who: tuple[str, ...], whom: tuple[str, ...], but: tuple[str, ...]) -> None:
    assert offenders(*(tuple(map(_full, names)) for names in (who, whom)), but=tuple(map(_full, but))) == []


def _full(name: str) -> str:
    """A package of the buffer by its short name, anything else as it is."""
    return f"{BUFFER}.{name}" if name.split(".")[0] in LAYER_OF else name


def test_the_core_of_the_trainers_side_knows_no_trainer() -> None:
    trainer = (f"{BUFFER}.trainer",)
    # Loss masks are pure and below everything else; they stand in this folder because slime loads them from there.
    found = {line.split(" imports ")[1] for line in offenders(trainer, ("slime",))}
    assert {name for name in found if not name.startswith("slime.utils.mask_")} == set()
    core = (ROOT / "slime_plugins" / "rollout_buffer" / "trainer").glob("*.py")
    assert [path.name for path in core if re.search(r"\bargs\.|\bSample\b", path.read_text(encoding="utf-8"))] == []


def test_a_client_needs_nothing_that_the_trainer_does_not_have() -> None:
    """pydantic is there: SGLang, without which no slime samples, needs it."""
    has = {"aiohttp", "requests", "transformers", "huggingface_hub", "pybase64", "pydantic", "pydantic_core"}
    more = {
        f"{BUFFER}.trainer.vision": {"PIL", "torch"},
        f"{BUFFER}.trainer.tracking": {"PIL", "tensorboardX", "wandb"},
        "slime.rollout.agent_rollout_sample_fields": {"numpy"},
        "slime.rollout.agent_rollout_data_postprocess": {"megatron", "torch"},
        "slime.rollout.agent_rollout_advantages": {"torch"},
    }
    ours = {"slime", "slime_plugins", "typing_extensions", *sys.stdlib_module_names}
    modules = ("slime", *map(_full, ("trainer", *CLIENTS_SIDE)))
    found = {
        name: {target.split(".")[0] for target in targets} - ours - has - more.get(name, set())
        for name, targets in files().items()
        if within(name, *modules)
    }
    assert {name: packages for name, packages in found.items() if packages} == {}


def test_no_folder_is_wider_than_a_reader_can_take_in() -> None:
    root = ROOT / "slime_plugins" / "rollout_buffer"
    folders = {path.parent for path in root.rglob("*.py")}
    widths = {str(folder.relative_to(root)): len(list(folder.glob("*.py"))) for folder in folders}
    too_wide = {name: width for name, width in widths.items() if width > WIDEST_FOLDER}
    assert too_wide == {}


def functions_in(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Looks into statements alone: expressions are most of a tree."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield from functions_in(child)


def test_no_function_is_longer_than_a_screen() -> None:
    """Without its signature: a command names all its options there."""
    bodies = {
        f"{path.relative_to(ROOT)}: {node.name}": node.end_lineno - node.body[0].lineno + 1
        for top in ("slime", "slime_plugins", "lab/src", "tools", "benchmarks", "tests")
        for path in (ROOT / top).rglob("*.py")
        for node in functions_in(ast.parse(path.read_text(encoding="utf-8")))
        if node.end_lineno is not None
    }
    assert {name: lines for name, lines in bodies.items() if lines > MAX_BODY} == {}
