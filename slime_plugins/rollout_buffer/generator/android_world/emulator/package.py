"""The only file that imports the packages ``android_world`` and ``android_env``, except ``adb_environment``.

They are imported only when a device is created: they write temporary files under names made of task parameters, so each
worker needs its own temporary folder before the import. A process has one environment, because tasks draw from Python's
global random source.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import logging
import os
import random
import re
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from slime_plugins.rollout_buffer.errors import ConfigError, DeviceError, EnvironmentSetupError
from slime_plugins.rollout_buffer.generator.android_world.android_host import AndroidEndpoint
from slime_plugins.rollout_buffer.generator.android_world.emulator.ports import NO_ADB_SEARCH

logger = logging.getLogger(__name__)

FORWARDER_PACKAGE = "com.google.androidenv.accessibilityforwarder"
_SUITE = "android_world"
_TREE = "accessibility_tree"
_TREE_TIMEOUT_S = 10.0
_TREE_POLL_S = 0.05
_MODULES = {
    "loader": "android_env.loader",
    "config_classes": "android_env.components.config_classes",
    "adb_pb2": "android_env.proto.adb_pb2",
    "adb_utils": "android_world.env.adb_utils",
    "controllers": "android_world.env.android_world_controller",
    "launcher": "android_world.env.env_launcher",
    "interface": "android_world.env.interface",
    "registry": "android_world.registry",
}


def check_package() -> None:
    """Raises ``ConfigError`` if the packages are not installed; imports neither."""
    missing = [name for name in ("android_env", "android_world") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"device: android_world needs the package{'s' * (len(missing) - 1)} {' and '.join(missing)} in the device "
            "workers' environment: `rollout-buffer doctor` checks it; android_world_python selects another environment"
        )


def task_seed(suite_seed: int, task_name: str, params_idx: int) -> int:
    """Returns the seed of AndroidWorld's own suites for this instance: the same parameters in every process."""
    digest = hashlib.sha256(f"{suite_seed}_{task_name}_{params_idx}".encode()).hexdigest()
    return int(digest, 16) % 2**32


class AndroidWorldPackage:
    """The imported packages, with one environment connected to one emulator."""

    def __init__(self, temporary_folder: Path) -> None:
        check_package()
        temporary_folder.mkdir(parents=True, exist_ok=True)
        os.environ["TMPDIR"] = str(temporary_folder)
        os.environ.setdefault("no_proxy", "localhost,127.0.0.1")
        os.environ.update(NO_ADB_SEARCH)  # android_env restarts the adb server when a command fails
        tempfile.tempdir = None  # read TMPDIR again
        self._folder = temporary_folder
        try:
            self._modules: Mapping[str, ModuleType] = {
                name: importlib.import_module(module) for name, module in _MODULES.items()
            }
        except ImportError as error:
            raise ConfigError(f"device: android_world: the package cannot be imported: {error}") from error
        logging.getLogger("absl").setLevel(logging.ERROR)  # it logs every adb command
        self._tasks: Mapping[str, Any] = self._modules["registry"].TaskRegistry().get_registry(_SUITE)
        self.env: Any = None
        self._connection: Any = None
        self._has_forwarder = True

    @property
    def adb_utils(self) -> Any:
        """``android_world.env.adb_utils``."""
        return self._modules["adb_utils"]

    def connect(self, endpoint: AndroidEndpoint, *, set_up_apps: bool = False) -> None:
        """Connects to the running Android through its adb server; nothing is downloaded or installed.

        Without an emulator's ports, adb is the only connection to the device, and needs no accessibility forwarder.
        With ``set_up_apps`` the package first downloads, installs and sets up its apps and the forwarder, which takes
        many minutes and is done once, on the base device or on each attached device.

        Raises:
            DeviceError: the emulator does not answer, or the accessibility forwarder is missing.
        """
        self.disconnect()
        self._has_forwarder = endpoint.is_emulator
        controllers: Any = self._modules["controllers"]

        def controller(*_: object, **__: object) -> Any:
            self._close_connection()  # a reconnect would leave the old server and logcat running
            new_controller = self._controller(endpoint, set_up_apps=set_up_apps)
            self._connection = new_controller.env
            return new_controller

        # The package reconnects through this name when it gets no tree; its own function would use the shared adb
        # server and download the forwarder.
        controllers.get_controller = controller
        try:
            self.env = self._modules["interface"].AsyncAndroidEnv(controller())
            self._modules["launcher"].setup_env(self.env, emulator_setup=set_up_apps, freeze_datetime=True)
            packages = self.adb_utils.get_all_package_names(self.env.controller)
        except Exception as error:
            raise DeviceError(f"android_world cannot connect: {type(error).__name__}: {error}") from error
        if self._has_forwarder and FORWARDER_PACKAGE not in packages:
            raise DeviceError(
                f"the base device lacks the app {FORWARDER_PACKAGE}: scripts/set_up_base_device installs it"
            )

    def disconnect(self) -> None:
        """Closes the environment; the emulator continues."""
        self.env = None
        self._close_connection()

    def new_task(self, task_name: str, params_idx: int, suite_seed: int) -> Any:
        """Returns a new task object; equal arguments give equal parameters, in every process.

        Raises:
            EnvironmentSetupError: there is no such task, or its parameters cannot be generated.
        """
        task_class = self._tasks.get(task_name)
        if task_class is None:
            known = {"known": self.task_names()}
            raise EnvironmentSetupError(f"android_world has no task called {task_name!r}", known)
        seed = task_seed(suite_seed, task_name, params_idx)
        random.seed(seed)
        try:
            params = task_class.generate_random_params()
            params["seed"] = seed
            return task_class(params)
        except Exception as error:
            message = f"{task_name} {params_idx} has no parameters: {type(error).__name__}: {error}"
            raise EnvironmentSetupError(message) from error

    def app_packages(self, task: Any) -> list[str]:
        """Returns the packages of the apps that a task names."""
        activities = [self.adb_utils.get_adb_activity(name) for name in task.app_names if name]
        return sorted({activity.partition("/")[0] for activity in activities if activity})

    def task_names(self) -> list[str]:
        """Returns the names of all tasks of the suite."""
        return sorted(self._tasks)

    def adb(self, *words: str) -> str:
        """Runs one adb command on the device and returns its output.

        Raises:
            DeviceError: the command failed.
        """
        response = self.adb_utils.issue_generic_request(list(words), self.env.controller)
        if response.status != self._modules["adb_pb2"].AdbResponse.Status.OK:
            raise DeviceError(f"adb {' '.join(words[:3])} failed: {response.error_message}")
        return bytes(response.generic.output).decode("utf-8", "replace")

    def look(self) -> tuple[Any, Any]:
        """Returns the screen's pixels and the elements that the forwarder sent last, None without a forwarder."""
        if not self._has_forwarder:
            return self.env.controller.screenshot(), None
        # The package's own wait for a stable screen is not used: it takes an old screen for a settled one.
        state = self.env.get_state(wait_to_stabilize=False)
        return state.pixels, state.ui_elements

    def drop_accessibility_trees(self) -> None:
        """Drops the accessibility trees received so far, so that the next one is new."""
        if not self._has_forwarder:
            return  # without a forwarder each tree is made when it is requested
        wrapper = self.env.controller.env
        wrapper.accumulate_new_extras()  # fetches the trees that have arrived
        wrapper.task_extras()  # after this, the next fetch replaces them

    def check_connection(self) -> None:
        """Raises ``DeviceError`` if the screen cannot be read, or no new accessibility tree arrives."""
        if self.env is None:
            raise DeviceError("the device is not connected")
        try:
            self._await_tree()
            self.look()
        except DeviceError:
            raise
        except Exception as error:
            raise DeviceError(f"the connection is broken: {type(error).__name__}: {error}") from error

    def await_fresh_tree(self) -> None:
        """Waits for an accessibility tree that was made after the start of this call.

        The forwarder makes and sends one tree after another: the first to arrive may be older than this call, the
        second is not.

        Raises:
            DeviceError: no tree arrives.
        """
        for _ in range(2):
            self._await_tree()

    def _await_tree(self) -> None:
        if not self._has_forwarder:
            return
        deadline = time.monotonic() + _TREE_TIMEOUT_S
        self.drop_accessibility_trees()
        # Events arrive in the same way, but they are no trees.
        while _TREE not in self.env.controller.env.accumulate_new_extras():
            if time.monotonic() > deadline:
                raise DeviceError(f"the accessibility forwarder sent nothing for {_TREE_TIMEOUT_S:g} s")
            time.sleep(_TREE_POLL_S)

    def apps(self) -> dict[str, str]:
        """Returns names of installed apps, in lower case, and their activities.

        A name that stands for a default app (``gallery``, ``email``) maps to a URI instead.
        """
        installed = set(self.adb_utils.get_all_package_names(self.env.controller))
        # The package's public functions do not list the names: they look one up, or return one for each app.
        defaults = {str(name): str(uri) for name, uri in self.adb_utils._DEFAULT_URIS.items()}
        return defaults | {
            name: activity
            for pattern, activity in self.adb_utils._PATTERN_TO_ACTIVITY.items()
            if activity.partition("/")[0] in installed
            for name in names_in(pattern)
        }

    def _close_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is None:
            return
        try:
            connection.close()
        except Exception as error:  # noqa: BLE001 - closing a broken connection may raise anything
            logger.warning("closing the connection failed: %s: %s", type(error).__name__, error)

    def _controller(self, endpoint: AndroidEndpoint, *, set_up_apps: bool) -> Any:
        if not endpoint.is_emulator:
            from slime_plugins.rollout_buffer.generator.android_world.emulator.adb_environment import AdbController

            return AdbController(endpoint)
        return self._modules["controllers"].AndroidWorldController(
            self._modules["loader"].load(self._environment_config(endpoint)), install_a11y_forwarding_app=set_up_apps
        )

    def _environment_config(self, endpoint: AndroidEndpoint) -> Any:
        classes = self._modules["config_classes"]
        assert endpoint.console_port is not None
        return classes.AndroidEnvConfig(
            task=classes.FilesystemTaskConfig(path=str(self._write_task())),
            simulator=classes.EmulatorConfig(
                emulator_launcher=classes.EmulatorLauncherConfig(
                    emulator_console_port=endpoint.console_port,
                    adb_port=endpoint.console_port + 1,
                    grpc_port=endpoint.grpc_port,
                ),
                adb_controller=classes.AdbControllerConfig(
                    adb_path=endpoint.adb_path, adb_server_port=endpoint.adb_server_port
                ),
            ),
        )

    def _write_task(self) -> Path:
        """Writes a task file of android_env, which here only sets a time limit of two days."""
        path = self._folder / "task.textproto"
        path.write_text('id: "rollout_buffer"\nname: "Device of an agent"\nmax_episode_sec: 172800\n')
        return path


def names_in(pattern: str) -> list[str]:
    """Returns the names in one of the package's patterns, which are regular expressions of alternatives.

    Punctuation at the end of a name (``tasks.org:``) is removed; an alternative with other syntax is ignored.
    """
    names = [re.sub(r"\W+$", "", name.replace("\\", "")).strip().lower() for name in pattern.split("|")]
    return [name for name in names if re.fullmatch(r"[\w .+&'-]+", name)]
