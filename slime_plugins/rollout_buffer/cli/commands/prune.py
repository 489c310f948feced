"""``rollout-buffer prune``: frees the disk space of old deliveries."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from slime_plugins.rollout_buffer.cli.common import (
    AsJson,
    ServedDataDir,
    console,
    opened_store,
    print_json,
    report_errors,
)
from slime_plugins.rollout_buffer.errors import ConfigError

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}


def prune(
    older_than: Annotated[str, typer.Option(metavar="AGE", help="Like 7d, 12h, 90m, 30s or 2w.")],
    data_dir: ServedDataDir = Path("rollout_buffer_data"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be deleted; delete nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete payloads and screenshots of groups delivered more than AGE ago.

    All rows are kept, and what was written after the oldest undelivered item. Purged groups stay delivered: choose AGE
    longer than the age of the oldest checkpoint to return to.
    """
    from slime_plugins.rollout_buffer.storage import retention

    with report_errors():
        retain_s = seconds_of(older_than)
        purge = retention.would_purge if dry_run else retention.purge
        with opened_store(data_dir) as store:
            purged = purge(store, now=store.clock(), retain_s=retain_s)
    numbers = {"payloads": purged.payloads, "screenshots": purged.images, "packs": purged.packs, "bytes": purged.bytes}
    if as_json:
        print_json({"dry_run": dry_run, "older_than_s": retain_s, **numbers})
        return
    verbs = ("would purge", "remove") if dry_run else ("purged", "removed")
    console.print(
        f"{verbs[0]} {purged.payloads} payloads and {purged.images} screenshots, and {verbs[1]} {purged.packs} packs: "
        f"{purged.bytes / 1e6:.1f} MB"
    )


def seconds_of(age: str) -> float:
    """Parses an age like ``7d``.

    Raises:
        ConfigError: it is invalid or 0.
    """
    match = re.fullmatch(r"(\d{1,9}(?:\.\d+)?)\s*([smhdw])", age.strip())
    seconds = float(match[1]) * UNITS[match[2]] if match else 0.0
    if seconds <= 0:
        raise ConfigError(f"--older-than {age!r} is no age: give a number above 0 and s, m, h, d or w, like 7d")
    return seconds
