"""The device pool on Ray. Only this file imports Ray, and only when a pool is used.

One detached ``DeviceManager`` actor per cluster and pool owns detached device workers, one device each; all have names
in one namespace. Manager and workers outlive the runner that started them, and the next runner finds them. If the
manager died, a runner starts another manager, which first kills the workers of the earlier one: each episode on them
fails, which costs it one attempt.

Ray reads the cluster's credentials from ``RAY_AUTH_MODE`` and ``RAY_AUTH_TOKEN_PATH`` when it is imported.

Object references are awaited: no ``ray.get`` blocks an event loop, and no thread pool limits the number of concurrent
calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from slime_plugins.rollout_buffer.devices.device_manager import DeviceManager, Grant
from slime_plugins.rollout_buffer.devices.fair_share import Purpose
from slime_plugins.rollout_buffer.devices.interface import Action, Observation
from slime_plugins.rollout_buffer.devices.kinds import misconfigured
from slime_plugins.rollout_buffer.devices.leased_device import LeaseReport, device_died
from slime_plugins.rollout_buffer.devices.pool import DevicePool
from slime_plugins.rollout_buffer.devices.ray_cluster.node_memory import shortage, wait_for_shortage
from slime_plugins.rollout_buffer.devices.ray_cluster.resource_check import in_words, why_no_node_fits
from slime_plugins.rollout_buffer.devices.ray_cluster.versions import own_versions, version_refusal
from slime_plugins.rollout_buffer.devices.settings import DevicePoolSettings
from slime_plugins.rollout_buffer.devices.worker import DeviceWorker
from slime_plugins.rollout_buffer.errors import ConfigError, DeviceError, EpisodeError

logger = logging.getLogger(__name__)

NAMESPACE = "rollout_buffer_devices"
MANAGER_NAME = "device_manager"
WORKER_NAME_PREFIX = "device_worker"
_IMPORT_ROOT = Path(__file__).resolve().parents[4]
_HEAD_NODE = "node:__internal_head__"
_WATCH_GROUP = "watch"
_CALL_TIMEOUT_S = 60.0
_HEAD_TIMEOUT_S = 5.0
"""Time limit of the connection that shows whether the cluster's head is there."""
_PROBE_TIMEOUT_S = 60.0
"""Time limit of the process that shows whether the head that ``auto`` names is there."""
_JOIN_TIMEOUT_S = 15.0
"""Time after which a pool that has not joined the cluster is reported as unreachable."""
_NODES_JOIN_S = 60.0
"""Time after a manager's start in which missing nodes may still join: the cluster may have started with the manager."""
_NODES_POLL_S = 1.0
_GIVING_UP_S = 3.0
"""Pause between the report that a device is given up and the closing of the device."""


class RayDevicePool(DevicePool):
    """A ``DevicePool`` whose devices are Ray actors, shared with every other runner on the same cluster."""

    def __init__(self, settings: DevicePoolSettings, *, ray_address: str, owner: str) -> None:
        _import_ray()
        super().__init__(_RemoteDeviceManager(ray_address, settings.farm), settings, owner=owner)


# ---- on the runner ---------------------------------------------------------------------------------------------------


class _RemoteDeviceManager:
    """``DeviceManagerCalls`` over Ray. Connects at the first ``configure``, and again at the next one after a
    failure."""

    def __init__(self, ray_address: str, farm: str) -> None:
        self._ray_address = ray_address
        self._farm = farm
        self._actor: Any = None
        self._created_at = time.monotonic()
        self._connected_here = False

    async def configure(self, settings: Mapping[str, Any], *, new_start: bool = False) -> None:
        await asyncio.to_thread(self._connect)
        await _ask(self._actor.configure, dict(settings), timeout_s=_CALL_TIMEOUT_S, new_start=new_start)

    async def ready(self, wait_s: float) -> str:
        return cast("str", await _ask(self._actor.ready, wait_s, timeout_s=wait_s + _CALL_TIMEOUT_S))

    async def acquire(
        self, owner: str, purpose: Purpose, wanted: int, wait_s: float, needs: frozenset[str] = frozenset()
    ) -> list[Grant]:
        granted: list[Grant] = await _ask(
            self._actor.acquire, owner, purpose, wanted, wait_s, needs, timeout_s=wait_s + _CALL_TIMEOUT_S
        )
        return [
            Grant(lease_id=grant.lease_id, device_id=grant.device_id, calls=_RemoteDevice(grant.device_id, grant.calls))
            for grant in granted
        ]

    async def renew(self, owner: str, lease_ids: Sequence[int]) -> list[int]:
        return cast("list[int]", await _ask(self._actor.renew, owner, list(lease_ids), timeout_s=_CALL_TIMEOUT_S))

    async def release(self, lease_id: int, report: LeaseReport) -> None:
        await _ask(self._actor.release, lease_id, report, timeout_s=_CALL_TIMEOUT_S)

    async def leave(self, owner: str) -> None:
        await _ask(self._actor.leave, owner, timeout_s=_CALL_TIMEOUT_S)

    async def snapshot(self) -> dict[str, Any]:
        if self._actor is None:
            if (waited_s := time.monotonic() - self._created_at) < _JOIN_TIMEOUT_S:
                raise DeviceError("the device manager is not connected yet")
            raise device_died(f"the Ray cluster at {self._ray_address} could not be joined for {waited_s:.0f} s")
        return cast("dict[str, Any]", await _ask(self._actor.snapshot, timeout_s=_CALL_TIMEOUT_S))

    async def close(self) -> None:
        """Disconnects this process; manager and devices stay for the next runner."""
        connected_here, self._connected_here = self._connected_here, False
        if connected_here:
            await asyncio.to_thread(_import_ray().shutdown)

    def _connect(self) -> None:
        """Joins the cluster and finds or starts the manager. Blocks; run it in a thread.

        A restarted head is another cluster: after a failure this process leaves, and the next call joins again.
        """
        ray = _import_ray()
        with _ray_errors(ray, self._ray_address):
            if not ray.is_initialized():
                if self._ray_address == "auto":  # which may name a head that is gone
                    run_probe("auto", _PROBE_TIMEOUT_S)
                _join_cluster(ray, self._ray_address)
                self._connected_here = True
            try:
                self._actor = _find_manager(ray, self._farm)
            except Exception:
                if self._connected_here:  # otherwise the connection is the trainer's, which must stay open
                    self._connected_here = False
                    ray.shutdown()
                raise


class _RemoteDevice:
    """``DeviceCalls`` over Ray."""

    def __init__(self, device_id: str, actor: Any) -> None:
        self._device_id = device_id
        self._actor = actor

    async def reset(self, lease_id: int, task_name: str, params_idx: int) -> Observation:
        return cast("Observation", await _ask(self._actor.reset, lease_id, task_name, params_idx))

    async def step(self, lease_id: int, action: Action) -> Observation:
        return cast("Observation", await _ask(self._actor.step, lease_id, action))

    async def score(self, lease_id: int) -> float:
        return cast("float", await _ask(self._actor.score, lease_id))

    async def lost(self, lease_id: int, wait_s: float) -> str:
        watch = self._actor.lost.options(concurrency_group=_WATCH_GROUP)
        return cast("str", await _ask(watch, lease_id, wait_s))


async def _ask(method: Any, *arguments: Any, timeout_s: float | None = None, **keywords: Any) -> Any:
    """Calls an actor; re-raises its ``EpisodeError``, and converts other errors into DeviceError."""
    ray = _import_ray()
    reference = _submit(method, arguments, keywords)
    try:
        async with asyncio.timeout(timeout_s):
            return await reference
    except TimeoutError as timeout:
        raise DeviceError(f"the device manager did not answer within {timeout_s} s") from timeout
    except ray.exceptions.RayTaskError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, EpisodeError):
            raise type(cause)(cause.message, cause.detail) from error
        raise DeviceError(f"a device worker or the device manager failed: {error}") from error
    except ray.exceptions.RayError as error:
        raise device_died(f"a device worker or the device manager is gone: {type(error).__name__}: {error}") from error


def _submit(method: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Awaitable[Any]:
    """Sends a call.

    Raises:
        DeviceError: this process has left the cluster, in which case Ray would start a local one.
    """
    if not _import_ray().is_initialized():
        raise device_died("this process has left the devices' cluster")
    try:
        reference: Awaitable[Any] = method.remote(*arguments, **keywords)
    except Exception as error:  # Ray raises plain exceptions for an actor of a cluster that was left
        raise device_died(f"the actor of a device cannot be called: {error}") from error
    return reference


def try_cluster(address: str) -> None:
    """Joins the cluster and leaves it again. Blocks.

    Raises:
        ConfigError: Ray is not installed, or (``RayVersionError``) the cluster runs another Ray or Python.
        DeviceError: the cluster cannot be used for another reason.
    """
    ray = _import_ray()
    with _ray_errors(ray, address):
        _join_cluster(ray, address)
        ray.shutdown()


def run_probe(address: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Runs ``probe``. ``ray.init`` waits up to 20 minutes for a head that is gone; only a process can be ended before.

    Raises:
        subprocess.TimeoutExpired: the head does not answer.
    """
    command = [sys.executable, "-m", "slime_plugins.rollout_buffer.devices.ray_cluster.probe", address]
    environment = os.environ | {"PYTHONPATH": _python_path()}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeReply:
    """A node's answer: ``result``, or ``problem`` if the node gave no result."""

    address: str
    resources: Mapping[str, float]
    result: Any = None
    problem: str = ""


def on_every_node(address: str, call: Callable[[Mapping[str, float]], Any], timeout_s: float) -> list[NodeReply]:
    """Joins the cluster, makes ``call`` on every living node, with the node's resources, and leaves it. Blocks.

    Nodes that have not answered after ``timeout_s`` have a ``problem``.

    Raises:
        ConfigError, DeviceError: as ``try_cluster``.
    """
    ray = _import_ray()
    with _ray_errors(ray, address):
        _join_cluster(ray, address)
        affinity = importlib.import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
        task = ray.remote(lambda resources: call(resources))  # Ray takes functions only
        nodes = {  # by the reference to the node's result
            task.options(num_cpus=0, max_retries=0, scheduling_strategy=affinity(node["NodeID"], soft=False)).remote(
                node["Resources"]
            ): node
            for node in ray.nodes()
            if node["Alive"]
        }
        ready, _ = ray.wait(list(nodes), num_returns=len(nodes), timeout=timeout_s)
        replies = [_reply(node, result if result in ready else None, timeout_s) for result, node in nodes.items()]
        ray.shutdown()
    return replies


def _reply(node: Mapping[str, Any], result: Any, timeout_s: float) -> NodeReply:
    """Returns a node's reply; ``result`` is Ray's reference to its result, None if it has not answered in time."""
    ray = _import_ray()
    reply = NodeReply(address=node["NodeManagerAddress"], resources=node["Resources"])
    if result is None:
        return replace(reply, problem=f"did not answer within {timeout_s:g} s")
    try:
        return replace(reply, result=ray.get(result))
    except ray.exceptions.RayError as error:
        return replace(reply, problem=f"cannot be examined: {str(error).strip().splitlines()[-1]}")


@contextlib.contextmanager
def _ray_errors(ray: Any, address: str) -> Iterator[None]:
    """Converts Ray's errors into this project's."""
    try:
        yield
    except subprocess.TimeoutExpired as expired:
        why = f"the Ray cluster at {address} did not answer in {expired.timeout:g} s; give the HOST:PORT of its head"
        raise device_died(why) from expired
    except (ray.exceptions.RayError, ConnectionError, OSError, RuntimeError, ValueError) as error:
        refusal = version_refusal(str(error), own_versions(), address)
        raise refusal or device_died(f"the Ray cluster at {address} cannot be used: {error}") from error


def _join_cluster(ray: Any, address: str) -> None:
    host, _, port = address.rpartition(":")
    if port.isdigit() and "/" not in host:
        # ray.init waits up to a quarter of an hour for a head that is away, and cannot be interrupted.
        socket.create_connection((host.strip("[]"), int(port)), timeout=_HEAD_TIMEOUT_S).close()
    ray.init(
        address=address,
        namespace=NAMESPACE,
        ignore_reinit_error=True,
        log_to_driver=False,
        configure_logging=False,
        runtime_env={"env_vars": {"PYTHONPATH": _python_path()}},
    )


def _python_path() -> str:
    """Returns the import path of this package, which workers search first."""
    inherited = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join(part for part in (str(_IMPORT_ROOT), inherited) if part)


def _find_manager(ray: Any, farm: str) -> Any:
    """Returns the pool's manager; starts it if there is none."""
    return (
        ray.remote(_DeviceManagerActor)
        .options(
            name=_name_in(farm, MANAGER_NAME),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            # On the head node, which the cluster needs anyway: the loss of another node must cost only that node's
            # devices.
            resources={_HEAD_NODE: 0.001},
            # Not restarted by Ray: its memory monitor prefers to kill actors that Ray may restart.
            max_restarts=0,
        )
        .remote(farm)
    )


def _import_ray() -> Any:
    try:
        ray = importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError(
            'the device pool needs Ray: install this package with its "android" extra, or set device_pool: local'
        ) from error
    return ray


# ---- in the cluster --------------------------------------------------------------------------------------------------


class _DeviceManagerActor(DeviceManager):
    """The manager as a detached actor. Its methods are coroutines, so it serves many calls at once."""

    def __init__(self, farm: str) -> None:
        _kill_workers_of_earlier_manager(farm)
        launch = functools.partial(_RemoteWorker, time.monotonic() + _NODES_JOIN_S)
        super().__init__(launch, name=_name_in(farm, "ray"))


class _WorkerActor(DeviceWorker):
    """A device worker that reports its node, and gives its device up before the node's memory runs out."""

    def boot(self) -> None:
        if self._settings.resources_per_worker.memory:  # a device without reserved memory counts as small
            if why := shortage():
                raise DeviceError(f"the device is not booted: {why}")
            threading.Thread(target=self._give_up_at_shortage, name="node-memory", daemon=True).start()
        super().boot()

    def _give_up_at_shortage(self) -> None:
        why, lock = wait_for_shortage()
        logger.error("device %d is given up: %s", self._index, why)
        self.give_up(why)
        # Meanwhile the episode's runner learns of the loss, and the manager may kill this process.
        time.sleep(_GIVING_UP_S)
        if self._device is None:  # it still boots, which cannot be interrupted
            os._exit(1)
        self.close()
        lock.close()

    def place(self) -> str:
        """Returns the short node id, the host and the process id."""
        node = str(_import_ray().get_runtime_context().get_node_id())
        return f"node {node[:8]} on {socket.gethostname()}, process {os.getpid()}"


class _RemoteWorker:
    """The manager's handle on one device worker: a ``Worker`` over Ray.

    Until ``nodes_join_until`` on the monotonic clock, nodes of a new cluster may still join.
    """

    def __init__(self, nodes_join_until: float, settings: DevicePoolSettings, index: int, workers_before: int) -> None:
        self._nodes_join_until = nodes_join_until
        resources = settings.resources_per_worker
        self._wanted = resources.as_ray_names_them()
        # Half of it, so that the error of a missing place comes before that of the boot timeout.
        self._placement_timeout_s = settings.boot_timeout_s / 2
        self._actor = (
            _import_ray()
            .remote(concurrency_groups={_WATCH_GROUP: 2})(_WorkerActor)
            .options(
                name=f"{_name_in(settings.farm, WORKER_NAME_PREFIX)}-{index}-{os.getpid()}-{workers_before}",
                namespace=NAMESPACE,
                lifetime="detached",
                num_cpus=resources.num_cpus,
                memory=resources.memory or None,
                resources=dict(resources.custom) or None,
                max_restarts=0,
            )
            .remote(settings, index)
        )

    @property
    def calls(self) -> Any:
        return self._actor

    async def prepare(self) -> None:
        await self._wait_for_placement()
        await _ask(self._actor.prepare)

    async def boot(self) -> str:
        place = await self._wait_for_placement()
        await _ask(self._actor.boot)
        return place

    async def _wait_for_placement(self) -> str:
        """Waits until Ray has placed the actor, and returns where it runs.

        Raises:
            DeviceError: no node can ever hold the actor, or none has room in time.
        """
        while why_not := why_no_node_fits(self._wanted, await asyncio.to_thread(_living_nodes)):
            if time.monotonic() >= self._nodes_join_until:
                raise misconfigured(why_not)
            await asyncio.sleep(_NODES_POLL_S)
        try:
            async with asyncio.timeout(self._placement_timeout_s):
                return cast("str", await _ask(self._actor.place))
        except TimeoutError as timeout:
            nodes = f"every node that offers {in_words(self._wanted)}"
            raise DeviceError(f"no worker within {self._placement_timeout_s:g} s: {nodes} is full or slow") from timeout

    async def check_health(self) -> frozenset[str] | None:
        return cast("frozenset[str] | None", await _ask(self._actor.check_health))

    def kill(self) -> None:
        _import_ray().kill(self._actor, no_restart=True)


def _living_nodes() -> list[dict[str, float]]:
    """Returns the total resources of each node. Blocks; run it in a thread."""
    return [dict(node["Resources"]) for node in _import_ray().nodes() if node["Alive"]]


def _name_in(farm: str, name: str) -> str:
    """Returns the name of an actor, which no other pool has."""
    return f"{farm}.{name}" if farm else name


def _kill_workers_of_earlier_manager(farm: str) -> None:
    """Kills the workers of an earlier manager: its leases are lost, so nobody would return the leased devices."""
    ray = _import_ray()
    for entry in ray.util.list_named_actors(all_namespaces=True):
        if entry["namespace"] == NAMESPACE and entry["name"].startswith(_name_in(farm, WORKER_NAME_PREFIX)):
            logger.warning("killing %s of an earlier manager", entry["name"])
            ray.kill(ray.get_actor(entry["name"], namespace=NAMESPACE), no_restart=True)
