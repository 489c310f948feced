"""Ray requires equal versions: what it refuses with is read, and said with both versions and the way out."""

from __future__ import annotations

import importlib.util
import pickle
from typing import Any, cast

import pytest

from slime_plugins.rollout_buffer.devices.leased_device import DIED
from slime_plugins.rollout_buffer.devices.ray_cluster import pool as device_pool
from slime_plugins.rollout_buffer.devices.ray_cluster import probe as ray_cluster
from slime_plugins.rollout_buffer.devices.ray_cluster.pool import RayDevicePool, try_cluster
from slime_plugins.rollout_buffer.devices.ray_cluster.versions import RayVersionError, RayVersions, version_refusal
from slime_plugins.rollout_buffer.devices.settings import DevicePoolSettings
from slime_plugins.rollout_buffer.errors import ConfigError, DeviceError, RolloutBufferError
from slime_plugins.rollout_buffer.supervisor.child_processes import free_port
from slime_plugins.rollout_buffer.testing.fake_device import ADDRESS

OWN = RayVersions(ray="2.60.0", python="3.11.7")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # Ray announces its own changes when it is imported


def refusal(ray: str, python: str) -> str:
    """What Ray says in a process of its own version and Python."""
    return (
        "Version mismatch: The cluster was started with:\n"
        f"    Ray: {ray}\n    Python: {python}\n"
        f"This process on node 10.0.0.2 was started with:\n    Ray: {OWN.ray}\n    Python: {OWN.python}\n"
    )


@pytest.mark.parametrize(
    ("ray", "python", "says"),
    [
        ("2.54.0", "3.11.7", "install 'ray==2.54.0' here, or 2.60.0 there; or leave --ray-address out"),
        ("2.60.0", "3.11.9", "run both on one Python (3.11.9 there, 3.11.7 here)"),
        ("2.9.3", "3.10.4", "install 'ray==2.9.3' here, or 2.60.0 there and run both on one Python"),
    ],
)
def test_a_refusal_names_both_versions_and_the_remedy(ray: str, python: str, says: str) -> None:
    error = version_refusal(refusal(ray, python), OWN, "10.0.0.1:6379")
    assert error is not None
    assert f"10.0.0.1:6379 runs Ray {ray} on Python {python}" in error.message
    assert "this process has Ray 2.60.0 on Python 3.11.7" in error.message
    assert says in error.message
    assert isinstance(error, ConfigError)
    assert pickle.loads(pickle.dumps(error)).detail == error.detail


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (RuntimeError(refusal("2.54.0", "3.11.7")), RayVersionError),
        (RuntimeError("something else"), DeviceError),
        (ConnectionError("Could not find any running Ray instance."), DeviceError),
    ],
)
def test_joining_a_cluster_raises_an_error_of_the_kind_of_its_cause(
    monkeypatch: pytest.MonkeyPatch, raised: Exception, kind: type[Exception], capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(ray: Any, address: str) -> None:
        raise raised

    monkeypatch.setattr(device_pool, "_join_cluster", refuse)
    with pytest.raises(kind) as caught:
        try_cluster("10.0.0.1:6379")
    is_waited_for = cast("RolloutBufferError", caught.value).detail.get("fault") == DIED
    assert is_waited_for == (kind is DeviceError), "a runner that starts waits for a head that is away"
    assert ray_cluster.main(["10.0.0.1:6379"]) == 1
    assert "10.0.0.1:6379" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
@pytest.mark.timeout(30)
def test_a_head_that_is_away_is_found_out_at_once() -> None:
    with pytest.raises(DeviceError, match="refused"):
        try_cluster(f"127.0.0.1:{free_port()}")


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
@pytest.mark.timeout(30)
async def test_auto_does_not_wait_for_the_head_of_a_cluster_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would wait for minutes, and the runner could not be stopped."""
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{free_port()}")
    monkeypatch.setattr(device_pool, "_PROBE_TIMEOUT_S", 2.0)
    settings = DevicePoolSettings.model_validate({"kind": ADDRESS, "boot_timeout_s": 0.1})
    with pytest.raises(DeviceError, match="the Ray cluster at auto did not answer in 2 s"):
        await RayDevicePool(settings, ray_address="auto", owner="job").start()


async def test_a_pool_that_has_not_joined_its_cluster_says_for_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = DevicePoolSettings.model_validate({"kind": ADDRESS})
    pool = RayDevicePool(settings, ray_address="10.0.0.1:6379", owner="job")
    with pytest.raises(DeviceError, match="not connected yet") as caught:
        await pool.snapshot()
    assert "fault" not in caught.value.detail
    monkeypatch.setattr(device_pool, "_JOIN_TIMEOUT_S", 0.0)
    with pytest.raises(DeviceError, match=r"the Ray cluster at 10.0.0.1:6379 could not be joined for 0 s") as caught:
        await pool.snapshot()
    assert caught.value.detail["fault"] == DIED
