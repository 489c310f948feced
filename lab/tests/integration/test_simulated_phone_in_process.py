"""The simulated phone inside of android_env's own classes, without processes, ports and the android_world package."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollout_buffer_lab.simulated_phone.interfaces.accessibility import AccessibilityForwarder
from rollout_buffer_lab.simulated_phone.interfaces.emulator_state import EmulatorState
from rollout_buffer_lab.simulated_phone.interfaces.in_process import android_environment
from slime_plugins.rollout_buffer.generator.android_world.emulator.package import AndroidWorldPackage
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("android_env") is None, reason="the package android-env is not installed"
)
WIDTH, HEIGHT = 1080, 2400


@pytest.fixture
def phone() -> Iterator[EmulatorState]:
    made = EmulatorState()
    yield made
    made.close()


@pytest.fixture
def environment(phone: EmulatorState) -> Iterator[Any]:
    made = android_environment(phone)
    yield made
    made.close()


def act(environment: Any, kind: int, x: float = 0.0, y: float = 0.0) -> Any:
    """One of android_env's raw actions: a finger at a share of the screen, on it or lifted."""
    action = {
        "action_type": np.array(kind, np.int32),
        "touch_position": np.array([x, y], np.float32),
        "keycode": np.array(0, np.int32),
    }
    return environment.step({name: action[name] for name in environment.action_spec()})


def tap(environment: Any, phone: EmulatorState, label: str) -> Any:
    from android_env.components.action_type import ActionType

    widget = next(one for one in phone.ui.screen().widgets if one.text == label and one.on_tap is not None)
    x, y = widget.bounds.center
    act(environment, ActionType.TOUCH, x / WIDTH, y / HEIGHT)
    return act(environment, ActionType.LIFT, x / WIDTH, y / HEIGHT)


def shell(environment: Any, *words: str) -> Any:
    from android_env.proto import adb_pb2

    generic = adb_pb2.AdbRequest.GenericRequest(args=["shell", *words])
    return environment.execute_adb_call(adb_pb2.AdbRequest(generic=generic, timeout_sec=10))


def test_raw_touches_reach_the_phone_and_its_screen_comes_back(environment: Any, phone: EmulatorState) -> None:
    from android_env.components.action_type import ActionType

    first = environment.reset().observation["pixels"]
    assert first.shape == (HEIGHT, WIDTH, 3)
    assert first.dtype == np.uint8
    tap(environment, phone, "Settings")
    assert phone.ui.front.package == "com.android.settings"
    wait_until(lambda: not np.array_equal(act(environment, ActionType.REPEAT).observation["pixels"], first))


def test_adb_calls_are_answered_by_the_phone(environment: Any) -> None:
    from android_env.components import errors
    from android_env.proto import adb_pb2

    environment.reset()
    done = shell(environment, "settings", "put", "global", "wifi_on", "0")
    assert done.status == adb_pb2.AdbResponse.Status.OK
    assert shell(environment, "settings", "get", "global", "wifi_on").generic.output.strip() == b"0"
    with pytest.raises(errors.AdbControllerError, match="no-such-command"):
        shell(environment, "no-such-command")
    packages = adb_pb2.AdbRequest.PackageManagerRequest(
        list=adb_pb2.AdbRequest.PackageManagerRequest.List(
            packages=adb_pb2.AdbRequest.PackageManagerRequest.List.Packages()
        )
    )
    listed = environment.execute_adb_call(adb_pb2.AdbRequest(package_manager=packages))
    assert "net.gsantner.markor" in listed.package_manager.list.items


def test_the_accessibility_wrapper_gets_the_forest_of_the_screen(
    phone: EmulatorState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the download of the forwarder's APK is left out: the phone has one."""
    from android_env.wrappers import a11y_grpc_wrapper

    forwarder = AccessibilityForwarder(phone)
    wrapper = a11y_grpc_wrapper.A11yGrpcWrapper(
        android_environment(phone), install_a11y_forwarding=False, start_a11y_service=True, enable_a11y_tree_info=True
    )
    try:
        wrapper.reset()
        extras = wait_until(wrapper.accumulate_new_extras)
        forest = extras["accessibility_tree"][-1]
        texts = {node.text for window in forest.windows for node in window.tree.nodes}
        assert {"Settings", "Clock"} <= texts
        forwarder.close()
        assert "accessibility_tree" in wrapper.accumulate_new_extras()
        package: Any = SimpleNamespace(
            _has_forwarder=True, env=SimpleNamespace(controller=SimpleNamespace(env=wrapper))
        )
        AndroidWorldPackage.drop_accessibility_trees(package)
        assert "accessibility_tree" not in wrapper.accumulate_new_extras()
    finally:
        forwarder.close()
        wrapper.close()
