"""Imports go one way. This file is the list of who may import whom; ``docs/architecture.md`` says why."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUFFER = "slime_plugins.rollout_buffer"
GENERATOR = f"{BUFFER}.generator"
ANDROID = f"{GENERATOR}.android_world"

# A room may import from rooms to its left only. Rooms in one string stand on the same level.
LEVELS = [
    "redaction",
    "errors types overlay_advice backoff vocabulary",
    "hosts logs tracing liveness sampled_json storage_errors write_lock data_dir shared_clock",
    "disk_reserve",
    "wire config sglang_protocol chat_tokens demo_tokenizer groups staleness committer "
    "image_tokens episode_facts explain sign_in mask_view telemetry",
    "connection_limits poll_watcher request_bodies write_batcher wsgi_bridge evaluation_statistics openai_protocol "
    "payloads engine client jobs inputs processes duties generator_discovery packs inline_images token_rows",
    "evaluation_report tokenizer_paths openai_engine pack_reader supervised_child turn_watch",
    "sglang_server",
    "embedded_engine",
    "evaluation_plan store fake_engine engine_contract remote_rollout",
    "tables",
    "deliveries job_starts retention queries contents device_reports series",
    "large_starts",
    "mending",
    "delivered state_changes",
    "item_writer",
    "buffer inspection",
    "metrics openapi_schemas slot_claims views",
    "openapi_operations",
    "openapi",
    "evaluation generator",
    "device_watch engine_watch",
    "runner web progress stand_in_engine doctor cli_common",
    "supervisor_state",
    "server_inspect server_dashboard data_routes",
    "server",
    "asgi",
    "gateway asgi_worker",
    "child_commands runner_main",
    "supervisor",
    "trainer_stand_in",
    "demo mask_tests",
    "cli_inspect cli_export cli_skip_list cli_prune cli_eval cli_serve",
    "cli",
    "__main__",
]


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


HTTP = tuple(f"{BUFFER}.{room}" for room in ("asgi", "server", "server_inspect", "data_routes", "web"))
KEEPERS = tuple(f"{BUFFER}.{room}" for room in ("buffer", "store", "tables", "server", "runner", "supervisor"))
RAY_USERS = (f"{ANDROID}.device_pool", f"{ANDROID}.device_registry", f"{ANDROID}.device_worker")
FILES = {
    module_name(path): imports_of(path) for top in ("slime", "slime_plugins") for path in (ROOT / top).rglob("*.py")
}


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def room_of(name: str) -> str | None:
    if not name.startswith(f"{BUFFER}."):
        return None
    return name.removeprefix(f"{BUFFER}.").split(".")[0]


def level_of(room: str) -> int:
    return next(index for index, rooms in enumerate(LEVELS) if room in rooms.split())


def offenders(who: tuple[str, ...], whom: tuple[str, ...], *, but: tuple[str, ...] = ()) -> list[str]:
    return sorted(
        f"{name} imports {target}"
        for name, targets in FILES.items()
        if within(name, *who) and not within(name, *but)
        for target in targets
        if within(target, *whom)
    )


def test_every_room_has_its_level() -> None:
    rooms = {room for name in FILES if (room := room_of(name)) is not None and room != "tools"}
    listed = {room for rooms_of_level in LEVELS for room in rooms_of_level.split()}
    assert rooms == listed


def test_a_room_imports_only_from_rooms_below_it() -> None:
    wrong = []
    for name, targets in FILES.items():
        room = room_of(name)
        if room is None or room == "tools":
            continue
        for target in {t for target in targets if (t := room_of(target)) is not None and f"{BUFFER}.{t}" in ROOMS}:
            if target != room and level_of(target) >= level_of(room):
                wrong.append(f"{name} ({room}) imports {target}")
    assert wrong == []


ROOMS = {f"{BUFFER}.{room}" for rooms_of_level in LEVELS for room in rooms_of_level.split()}


@pytest.mark.parametrize(
    ("who", "whom", "but"),
    [
        # The server is HTTP over the store and knows nothing of playing.
        (HTTP, (GENERATOR, f"{BUFFER}.engine", f"{BUFFER}.runner", "ray"), ()),
        # The gateway is a process of its own: nobody's runner, no generator, nothing of the server's.
        ((f"{BUFFER}.gateway",), (GENERATOR, f"{BUFFER}.runner", f"{BUFFER}.stand_in_engine", "ray", "flask"), ()),
        ((f"{BUFFER}.gateway",), HTTP, ()),
        ((*HTTP, GENERATOR, f"{BUFFER}.runner"), (f"{BUFFER}.gateway", f"{BUFFER}.slot_claims"), ()),
        # A generator plays; where its trajectories go is not its business.
        ((GENERATOR,), KEEPERS, ()),
        # Ray is known to the device pool alone.
        (("slime", "slime_plugins"), ("ray",), RAY_USERS),
        # Who plays marks phases; where traces go is one room's business.
        (("slime", "slime_plugins"), ("opentelemetry",), (f"{BUFFER}.telemetry",)),
        # The trainer's environment has requests and aiohttp, and no more of ours than the client.
        (("slime.rollout",), (f"{BUFFER}",), ("slime.rollout.agent_rollout_probe",)),
        (("slime.utils",), (BUFFER, "slime.rollout"), ()),
        # torch is for the images of a batch and the embedded engine; that, as the stand-in, for the command line alone.
        (
            ("slime", "slime_plugins"),
            ("torch",),
            ("slime.rollout.agent_rollout_multimodal", f"{BUFFER}.embedded_engine"),
        ),
        (
            ("slime", "slime_plugins"),
            (f"{BUFFER}.embedded_engine",),
            (f"{BUFFER}.embedded_engine", f"{BUFFER}.cli_serve"),
        ),
        (
            ("slime", "slime_plugins"),
            (f"{BUFFER}.stand_in_engine",),
            (f"{BUFFER}.stand_in_engine", f"{BUFFER}.cli_serve", f"{BUFFER}.mask_tests"),
        ),
    ],
)  # fmt: skip
def test_corridors(who: tuple[str, ...], whom: tuple[str, ...], but: tuple[str, ...]) -> None:
    allowed_for_the_trainer = tuple(
        f"{BUFFER}.{room}"
        for room in ("client", "wire", "types", "errors", "overlay_advice", "backoff", "vocabulary", "redaction")
    )
    found = offenders(who, whom, but=but)
    if who == ("slime.rollout",):
        found = [line for line in found if not within(line.split(" imports ")[1], *allowed_for_the_trainer)]
    assert found == []


def test_a_client_needs_nothing_that_the_trainer_does_not_have() -> None:
    third_party = {"flask", "pydantic", "orjson", "typer", "rich", "gunicorn", "tenacity", "yaml", "numpy", "PIL"}
    rooms = tuple(
        f"{BUFFER}.{room}" for room in ("client", "wire", "types", "errors", "backoff", "vocabulary", "redaction")
    )
    with_more = tuple(f"slime.rollout.agent_rollout_{room}" for room in ("probe", "multimodal", "tracking"))
    assert offenders((*rooms, "slime"), tuple(third_party), but=with_more) == []
