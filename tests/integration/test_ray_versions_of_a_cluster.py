"""A real Ray whose store says that another Ray and Python started it: the doctor and whoever joins say so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slime_plugins.rollout_buffer.cli.doctor import Examination, examine
from slime_plugins.rollout_buffer.cli.host_checks import Finding, State
from slime_plugins.rollout_buffer.devices.ray_cluster.versions import own_versions
from slime_plugins.rollout_buffer.generator.android_world.config import AndroidWorldSettings
from tests.integration.ray_processes import ON_RAY, local_ray

pytestmark = [*ON_RAY, pytest.mark.large, pytest.mark.timeout(240)]
PRETEND = """
import json, sys
from ray._common.usage import usage_constants
from ray._private import ray_constants
from ray._raylet import GcsClient

client = GcsClient(address=sys.argv[1])
place = {"namespace": ray_constants.KV_NAMESPACE_CLUSTER}
held = json.loads(client.internal_kv_get(usage_constants.CLUSTER_METADATA_KEY, **place))
held |= {"ray_version": "2.40.0", "python_version": "3.11.2"}
client.internal_kv_put(usage_constants.CLUSTER_METADATA_KEY, json.dumps(held).encode(), overwrite=True, **place)
"""


def cluster_finding(address: str, tmp_path: Path) -> Finding:
    settings = AndroidWorldSettings(android_avd_home=str(tmp_path))
    examination = Examination(settings=settings, data_dir=tmp_path, ray_address=address)
    return next(finding for finding in examine(examination) if finding.name == "Ray cluster")


def test_a_cluster_of_other_versions_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with local_ray(tmp_path) as cluster:
        well = cluster_finding(cluster, tmp_path)
        subprocess.run([sys.executable, "-c", PRETEND, cluster], check=True, timeout=60, env=dict(os.environ))
        refused = cluster_finding(cluster, tmp_path)
    assert (well.state, well.detail) == (State.OK, f"{own_versions()}, as the cluster at {cluster}")
    assert refused.state is State.MISSING
    assert f"the Ray cluster at {cluster} runs Ray 2.40.0 on Python 3.11.2" in refused.detail
    assert f"this process has {own_versions()}" in refused.detail
    assert "one Ray, one Python and the same token (RAY_AUTH_MODE)" in refused.remedy
