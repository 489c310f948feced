"""Plays tasks of the ``android_world`` package on an Android that its host, such as ``EmulatorProcess``, has started.

The order of an episode: create the task object for (suite seed, task, index); go home; remove traces of automation;
``initialize_task``; read the goal, which is complete only now; check whether the task is already solved; actions; read
the score before anything is reset; ``tear_down``, also after an error.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from slime_plugins.rollout_buffer.devices.capabilities import REFUSED
from slime_plugins.rollout_buffer.devices.interface import Observation
from slime_plugins.rollout_buffer.devices.leased_device import NOT_RESTORED
from slime_plugins.rollout_buffer.devices.worker_folders import WorkerFolder
from slime_plugins.rollout_buffer.errors import DeviceError, EnvironmentSetupError, EpisodeError
from slime_plugins.rollout_buffer.generator.android_world.android_host import AndroidHost
from slime_plugins.rollout_buffer.generator.android_world.config import AndroidWorldSettings
from slime_plugins.rollout_buffer.generator.android_world.emulator.gestures import Gestures
from slime_plugins.rollout_buffer.generator.android_world.emulator.package import AndroidWorldPackage, check_package
from slime_plugins.rollout_buffer.generator.android_world.emulator.screen_stability import (
    ScreenSample,
    Stability,
    StabilityTimeouts,
    wait_until_stable,
)
from slime_plugins.rollout_buffer.generator.android_world.restored_state import not_restored, part_of
from slime_plugins.rollout_buffer.generator.android_world.task_needs import missing, playable, task_needs
from slime_plugins.rollout_buffer.generator.gui_agent.device_actions import Action, ActionKind
from slime_plugins.rollout_buffer.generator.gui_agent.screenshots import encode_screenshot

logger = logging.getLogger(__name__)

_STEPS_PER_COMPLEXITY = 10
"""A task's budget of steps, per unit of the package's ``complexity``."""
_INITIALIZE_ATTEMPTS = 2
_READABLE_WHEN_BEGUN = {"RetroPlayingQueue": "the app makes the database of its queue when it first plays something"}
"""Tasks whose success cannot be read before the first action, and why. Until then it counts as 0."""
_LEAVES_THE_SCREEN = frozenset({ActionKind.ANSWER, ActionKind.TERMINATE, ActionKind.WAIT})


class AndroidWorldDevice:
    """A ``Device``: owns its host and the connection to its Android, until ``close``.

    ``package`` is for tests and packages of another kind; without one ``android_world`` is imported.

    Raises (when created):
        ConfigError: the packages are missing, or the host cannot start here.
        DeviceError: Android did not come up.
    """

    _solved_at_start = False
    _last_packages: frozenset[str] = frozenset()
    _changed_parts: Mapping[str, str] = MappingProxyType({})

    def __init__(
        self,
        settings: AndroidWorldSettings,
        index: int,
        host: AndroidHost,
        *,
        package: AndroidWorldPackage | None = None,
        times: StabilityTimeouts | None = None,
    ) -> None:
        if package is None:
            check_package()  # before there is anything to clean up
        self._settings = settings
        self._times = times or StabilityTimeouts()
        self._folder = WorkerFolder(f"rollout_buffer_android_world_{index}")
        self._host = host
        self._package = package or AndroidWorldPackage(self._folder.path / "tmp")
        self._gestures = Gestures(self._package)
        self._task: Any = None
        self._closed = False
        try:
            self._connect()
        except BaseException:
            self.close()
            raise

    @property
    def package(self) -> AndroidWorldPackage:
        """The connected package."""
        return self._package

    @property
    def task(self) -> Any:
        """The package's task object of this episode; None between episodes."""
        return self._task

    def reset(self, task_name: str, params_idx: int) -> Observation:
        self._check_open()
        self._tear_down()
        self._check_capabilities(task_name)
        self._task = self._set_up_task(task_name, params_idx)
        try:
            self._solved_at_start = self._is_solved()
            return self._observe(self._home(), note="")
        except EpisodeError:
            self._tear_down()
            raise
        except Exception as error:
            self._tear_down()
            self._check_stayed_connected()  # raises the device's error instead of blaming the task
            message = f"{task_name} {params_idx} cannot be started: {type(error).__name__}: {error}"
            raise EnvironmentSetupError(message) from error

    def step(self, action: Action) -> Observation:
        self._task_in_progress()
        try:
            # Not the last observation: a toast may have vanished, or an accessibility tree have arrived, since then.
            reference = None if action.kind in _LEAVES_THE_SCREEN else self._fresh_sample()
            self._package.drop_accessibility_trees()
            note = self._gestures.do(action)
            return self._observe(reference, note)
        except EpisodeError:
            raise
        except Exception as error:
            raise DeviceError(f"the action {action.kind} failed: {type(error).__name__}: {error}") from error

    def score(self) -> float:
        """As ``Device.score``: the result of the package's ``is_successful``."""
        task = self._task_in_progress()
        try:
            self._package.await_fresh_tree()  # some tasks read it, and the newest may precede the last action
            success = self._success_of(task)
            if success < 1.0:
                self._check_stayed_connected()  # many tasks cannot tell a dead device from a missing file
            return success
        except EpisodeError:
            raise
        except Exception as error:
            raise DeviceError(f"the score could not be read: {type(error).__name__}: {error}") from error

    def health(self) -> Mapping[str, str]:
        """As ``Device.health``: Android answers, its screen can be read, and its accessibility forwarder sends."""
        self._check_open()
        self._check_usable()
        return {
            "kind": self._settings.device,
            "serial": self._endpoint.serial,
            "capabilities": " ".join(sorted(self._endpoint.capabilities)),
        }

    def lost(self) -> str:
        return "" if self._closed else self._host.lost()

    def close(self) -> None:
        """As ``Device.close``: tears the task down, closes the connection and the host."""
        if self._closed:
            return
        self._closed = True
        try:
            self._tear_down()
            self._package.disconnect()
        finally:
            self._host.close()
            self._folder.remove()

    # The parts of a reset

    def _connect(self) -> None:
        self._endpoint = self._host.start()
        self._package.connect(self._endpoint)

    def _check_capabilities(self, task_name: str) -> None:
        names = missing(task_name, self._endpoint.capabilities)
        if names:
            playable_count = len(playable(self._endpoint.capabilities))
            raise EnvironmentSetupError(
                f"{task_name} needs {' and '.join(names)}, which {self._endpoint.serial} does not have: it can play "
                f"{playable_count} of {len(task_needs())} tasks (rollout-buffer doctor names them)",
                {"fault": REFUSED},
            )

    def _set_up_task(self, task_name: str, params_idx: int) -> Any:
        """Returns a task that is set up. A failed set-up is retried once, with a new task object."""
        failure: Exception | None = None
        for _ in range(_INITIALIZE_ATTEMPTS):
            task = self._package.new_task(task_name, params_idx, self._settings.suite_seed)
            self._restore(frozenset(self._package.app_packages(task)))
            try:
                self._package.env.reset(go_home=True)
                self._package.env.hide_automation_ui()
                task.initialize_task(self._package.env)
                return task
            except Exception as error:  # noqa: BLE001 - tasks raise anything; a lost device is distinguished below
                logger.warning("setting up %s failed: %s: %s", task_name, type(error).__name__, error)
                failure = error
                _tear_down(task, self._package.env)
            self._check_usable()  # raises the device's error if the device failed: no retry then
        raise EnvironmentSetupError(
            f"{task_name} {params_idx} cannot be set up: {type(failure).__name__}: {failure}"
        ) from failure

    def _restore(self, packages: frozenset[str]) -> None:
        """Restores the state before an episode with these apps, and compares it with the recorded state.

        Raises:
            DeviceError: a part that the host requires differs, also after a second restore; or the host cannot restore.
        """
        for may_retry in (True, False):
            if not self._host.restore(sorted(self._last_packages | packages)):
                self._connect()
            self._changed_parts, check = self._remaining_changes(packages), self._endpoint.state
            if check is None or not check.required.intersection(map(part_of, self._changed_parts)):
                break
            if not may_retry:
                check.give_up()
                raise not_restored(self._endpoint.serial, self._changed_parts, check.file)
        self._last_packages = packages

    def _remaining_changes(self, packages: frozenset[str]) -> Mapping[str, str]:
        """Returns what differs from the recorded state and cannot be put back."""
        check = self._endpoint.state
        if check is None:
            return {}
        # An app is restored from its snapshot when its task is torn down, otherwise before its task begins.
        apps = self._last_packages if check.snapshots else self._last_packages | packages
        try:
            changed = self._endpoint.put_back(self._endpoint.changed_state(apps))
        except DeviceError as error:
            if check.required:
                raise
            logger.warning("restores of %s are not compared any more: %s", self._endpoint.serial, error.message)
            self._endpoint = replace(self._endpoint, state=None)
            return {}
        if changed:
            logger.warning("%s differs from its recorded state: %s", self._endpoint.serial, changed)
        return changed

    def _is_solved(self) -> bool:
        """Returns True if the task is already solved, as the ``…Verify`` tasks are; they are scored like any other."""
        self._package.await_fresh_tree()
        return self._success_of(self._task) != 0.0

    def _success_of(self, task: Any) -> float:
        try:
            return _share(task.is_successful(self._package.env))
        except EpisodeError:
            raise
        except Exception as error:
            if type(task).__name__ not in _READABLE_WHEN_BEGUN:
                raise
            self._check_stayed_connected()
            logger.info("%s: its success cannot be read yet: %s: %s", type(task).__name__, type(error).__name__, error)
            return 0.0

    def _home(self) -> ScreenSample | None:
        """Goes to the home screen, because setting up and checking may have opened an app; returns the screen before
        it, None if the task does not start on the home screen."""
        before = self._fresh_sample() if self._task.start_on_home_screen else None
        self._package.drop_accessibility_trees()
        if before is not None:
            self._package.adb("shell", "input", "keyevent", "KEYCODE_HOME")
        return before

    def _tear_down(self) -> None:
        task, self._task = self._task, None
        if task is not None and self._package.env is not None:
            _tear_down(task, self._package.env)

    # Observations

    def _observe(self, reference: ScreenSample | None, note: str) -> Observation:
        screen, stability = wait_until_stable(reference, self._sample, self._times)
        if stability is Stability.TIMED_OUT:
            logger.info("the screen still changed at the timeout")
        height, width = screen.pixels.shape[:2]
        task = self._task_in_progress()
        return Observation(
            goal=task.goal,
            screenshot=encode_screenshot(
                screen.pixels, self._settings.screenshot_max_pixels, self._settings.image_format.value
            ),
            screen_width=width,
            screen_height=height,
            step_budget=int(_STEPS_PER_COMPLEXITY * task.complexity),
            note=note,
            details={
                "app": ",".join(task.app_names),
                "settled": stability.value,
                "solved_at_start": str(self._solved_at_start).lower(),
                NOT_RESTORED: " ".join(sorted(self._changed_parts)),
            },
        )

    def _fresh_sample(self) -> ScreenSample:
        """Returns a new sample of the screen, with its elements."""
        self._package.await_fresh_tree()
        return self._sample()

    def _sample(self) -> ScreenSample:
        pixels, elements = self._package.look()
        return ScreenSample(pixels=pixels, elements=elements)

    def _task_in_progress(self) -> Any:
        """Returns the task; raises ``DeviceError`` without one."""
        self._check_open()
        if self._task is None:
            raise DeviceError("the device has no task: reset it first")
        return self._task

    def _check_stayed_connected(self) -> None:
        """Raises ``DeviceError`` if Android does not answer, or was away since the last call."""
        if not self._host.check_alive():
            self._connect()
            raise DeviceError(f"{self._endpoint.serial} was away and is connected again")

    def _check_usable(self) -> None:
        if not self._host.check_alive():
            self._connect()
        self._package.check_connection()

    def _check_open(self) -> None:
        if self._closed:
            raise DeviceError("the device is closed")


def _share(success: Any) -> float:
    """Returns the package's score as a number in [0, 1]."""
    value = float(success)
    if not 0.0 <= value <= 1.0:
        raise DeviceError(f"the score {value} does not lie between 0 and 1")
    return value


def _tear_down(task: Any, env: Any) -> None:
    """Tears the task down; an error is logged, because the next set-up cleans up as well."""
    try:
        task.tear_down(env)
    except Exception as error:  # noqa: BLE001 - tasks raise anything, and must not hide the episode's own error
        logger.warning("tearing down %s failed: %s: %s", type(task).__name__, type(error).__name__, error)
