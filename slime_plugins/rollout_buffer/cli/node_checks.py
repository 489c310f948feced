"""A program that checks every node of a Ray cluster for what emulators need; ``rollout-buffer doctor`` runs it.

    python -m slime_plugins.rollout_buffer.cli.node_checks ADDRESS < SETTINGS

Reads the Android World settings as JSON and prints a JSON list of findings, each with its node's address.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace

from slime_plugins.rollout_buffer.cli.host_checks import Finding, checked, examine_node, room_for_devices
from slime_plugins.rollout_buffer.devices.ray_cluster.pool import on_every_node
from slime_plugins.rollout_buffer.errors import RolloutBufferError
from slime_plugins.rollout_buffer.generator.android_world.config import AndroidWorldSettings

_TIMEOUT_S = 60.0


def main(arguments: Sequence[str]) -> int:
    """Prints the findings; returns the exit code."""
    try:
        findings = examine_nodes(arguments[0], AndroidWorldSettings.model_validate_json(sys.stdin.read()), _TIMEOUT_S)
    except RolloutBufferError as error:
        sys.stderr.write(f"{error.message}\n")
        return 1
    json.dump([asdict(finding) for finding in findings], sys.stdout)
    return 0


def examine_nodes(address: str, settings: AndroidWorldSettings, timeout_s: float) -> list[Finding]:
    """Returns the findings of all nodes, and a finding on whether all devices fit on them.

    Raises:
        ConfigError, DeviceError: as ``on_every_node``.
    """
    replies = on_every_node(address, functools.partial(examine_node, settings), timeout_s)
    findings = []
    for reply in replies:
        if reply.problem:
            remedy = "restart Ray on that node, or look whether it is overloaded"
            findings += checked(f"node {reply.address}", False, reply.problem, remedy, needed=True)
        else:
            findings += [replace(each, name=f"{reply.address}: {each.name}") for each in reply.result]
    wanted = settings.num_workers + settings.spare_devices
    room = sum(room_for_devices(settings, reply.resources) for reply in replies)
    detail = f"{room} of {wanted} devices fit on the nodes at once"
    remedy = "add nodes, set num_workers lower, or resources_per_worker to what a device really takes"
    return [*findings, *checked("room for the devices", room >= wanted, detail, remedy, needed=True)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
