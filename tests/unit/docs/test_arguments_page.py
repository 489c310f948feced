"""``docs/arguments.md`` has every argument that the trainer's side reads, no other, and the defaults they have."""

from __future__ import annotations

import ast
import os
import re
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slime.rollout.agent_rollout_argument_checks import UNSUPPORTED_HOOKS
from slime.rollout.agent_rollout_settings import (
    KNOWN_ATTRIBUTES,
    read_image_settings,
    read_row_settings,
    read_settings,
    read_tracking_settings,
    start_payload,
)
from slime_plugins.rollout_buffer.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
SLIME = os.environ.get("ROLLOUT_BUFFER_TEST_SLIME", "")
READERS = (
    *(ROOT / "slime" / "rollout").glob("agent_rollout*.py"),
    ROOT / "slime_plugins" / "rollout_buffer" / "generator" / "android_world" / "custom_generate.py",
)
HELPERS = {"getattr", "_at_least_one"}
ROW = re.compile(r"^\| (?P<names>`[^|]+`) \| (?P<where>[^|]+) \| (?P<default>[^|]+) \| [^|]+ \|$", re.MULTILINE)


def rows() -> dict[str, tuple[str, str]]:
    """The page's arguments by the name that they have in ``args``: flag or YAML key, and default."""
    page = (ROOT / "docs" / "arguments.md").read_text(encoding="utf-8")
    found = [
        (shown.removeprefix("--").removeprefix("disable-").replace("-", "_"), (row["where"], row["default"]))
        for row in ROW.finditer(page)
        for shown in re.findall(r"`([^`]+)`", row["names"])
    ]
    assert len(found) == len(dict(found)), "an argument stands there twice"
    return dict(found)


def is_args(node: ast.expr) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr == "_args"
    if isinstance(node, ast.Call):
        return ast.unparse(node) == "buffer_attributes(args)"
    return isinstance(node, ast.Name) and node.id in ("args", "attributes")


def constants(nodes: list[ast.expr]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.Tuple):
            yield from constants(node.elts)


def read_in(path: Path) -> Iterator[str]:
    """Every name that a file reads of slime's arguments, however it is spelled there."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and is_args(node.value) and node.attr != "args":
            yield node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in HELPERS and node.args and is_args(node.args[0]):
                yield from constants(node.args[1:2])
            elif node.func.id == "value":  # of an evaluation set, else of the arguments
                yield from constants(node.args[1:])
        elif isinstance(node, ast.GeneratorExp) and ast.unparse(node.elt).startswith("getattr(args, name"):
            yield from constants([node.generators[0].iter])


def test_every_argument_that_is_read_is_in_the_table_and_no_other() -> None:
    read = {name for path in READERS for name in read_in(path)} | UNSUPPORTED_HOOKS.keys()
    assert {"rollout_buffer_wait_s", "eval_temperature", "max_context_len", "n_samples_per_prompt"} <= read
    assert read - rows().keys() == set(), "read, and not in docs/arguments.md"
    assert rows().keys() - read == set(), "in docs/arguments.md, and read nowhere"


def test_every_key_of_ours_in_the_table_is_one_that_the_trainer_takes() -> None:
    ours = {name for name in rows() if name.startswith("rollout_buffer_")}
    assert len(ours) > 15
    assert ours == set(KNOWN_ATTRIBUTES)


def test_a_key_that_is_not_known_is_refused_with_the_nearest() -> None:
    args = bare_args()
    args.rollout_buffer_lease = 60
    with pytest.raises(ConfigError, match="rollout_buffer_lease is not known; did you mean rollout_buffer_lease_s"):
        read_settings(args)


def bare_args() -> Namespace:
    """What slime's parser always sets, and nothing else."""
    return Namespace(
        rollout_buffer_url="http://127.0.0.1:8889",
        rollout_task_type="math",
        prompt_data="tasks.jsonl",
        rollout_batch_size=2,
        n_samples_per_prompt=2,
        rollout_max_response_len=16,
        rollout_temperature=1.0,
        rollout_top_p=1.0,
        hf_checkpoint="/model",
    )


def test_the_defaults_in_the_table_are_those_that_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROLLOUT_BUFFER_TOKEN", raising=False)
    args = bare_args()
    settings, images, tracking = read_settings(args), read_image_settings(args), read_tracking_settings(args)
    assert images is not None
    payload = start_payload(args, job_id="j", skip_instance_ids=[], fresh=False, start_id="s")
    used: dict[str, Any] = {
        "rollout_buffer_wait_s": settings.wait_s,
        "rollout_buffer_lease_s": settings.lease_s,
        "rollout_buffer_timeout_s": settings.timeout_s,
        "rollout_buffer_on_exhausted": settings.on_exhausted,
        "rollout_buffer_image_cache_mb": images.cache_bytes / 1e6,
        "rollout_buffer_image_fetches": images.fetches_at_once,
        "rollout_buffer_image_threads": images.threads,
        "rollout_buffer_example_interval": tracking.example_interval,
        "rollout_num_process": payload["num_process"],
        "num_epoch": payload["num_epoch"],
        "fetch_trajectory_retry_times": -1 if settings.max_failures is None else settings.max_failures,
    }
    table = rows()
    wrong = {
        name: (table[name][1], value)
        for name, value in used.items()
        if table[name][1].strip("`") != (f"{value:g}" if isinstance(value, int | float) else str(value))
    }
    assert wrong == {}
    assert (images.pixel_dtype, settings.token, tracking.use_wandb) == (None, None, False)
    assert read_row_settings(args, 1).keep_pictures is False


@pytest.mark.slime
@pytest.mark.skipif(not SLIME, reason="set ROLLOUT_BUFFER_TEST_SLIME to the path of a slime checkout")
def test_slimes_own_parser_has_each_flag_and_none_of_the_keys() -> None:
    source = (Path(SLIME) / "slime" / "utils" / "arguments.py").read_text(encoding="utf-8")
    flags = {flag.removeprefix("disable-").replace("-", "_") for flag in re.findall(r'"--([a-z0-9-]+)"', source)}
    others_of_slime = {"sglang_router_ip", "sglang_router_port", "sglang_server_concurrency", "eval_datasets"}
    others_of_slime |= {"use_critic", "rollout_sample_hook_path"}  # slimes before August 2026 do not have the hook
    table = rows()
    assert {name for name, (where, _) in table.items() if where not in ("slime", "Megatron", "YAML")} == set()
    assert {name for name, (where, _) in table.items() if where == "slime"} <= flags | others_of_slime
    assert {name for name, (where, _) in table.items() if where == "YAML"} & flags == set()
