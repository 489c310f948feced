"""The simulated phone as a ``Device``: what gestures do, what stays when it fails, how its screenshots look."""

from __future__ import annotations

import io
from typing import Any

import pytest
from PIL import Image

from rollout_buffer_lab.simulated_phone.device_state.state import Settings
from rollout_buffer_lab.simulated_phone.phone import FailingCalls, SimulatedPhone, SimulatedPhoneConfig
from rollout_buffer_lab.simulated_phone.screen_reader import read_screen
from slime_plugins.rollout_buffer.devices.interface import Device, Observation
from slime_plugins.rollout_buffer.errors import ConfigError, DeviceError
from slime_plugins.rollout_buffer.generator.gui_agent.device_actions import Action, ActionKind, SystemButton
from tests.simulated_phone_player import Player

_CLICK = Action(kind=ActionKind.CLICK, point=(10, 10))


@pytest.fixture
def player() -> Player:
    """Somebody in front of a phone with no notes on it."""
    phone = SimulatedPhone()
    return Player(phone, phone.reset("MarkorCreateFolder", 0))


def _step(phone: Device[Action], kind: ActionKind, **details: Any) -> Observation:
    return phone.step(Action(kind=kind, **details))


# Looks


def test_format_and_size_follow_the_config() -> None:
    config = SimulatedPhoneConfig(screenshot_max_pixels=10_000_000, image_format="jpeg")
    look = SimulatedPhone(config).reset("SystemWifiTurnOn", 0)
    image = Image.open(io.BytesIO(look.screenshot.data))
    assert (image.size, image.format, look.screenshot.media_type) == ((1080, 2400), "JPEG", "image/jpeg")


@pytest.mark.parametrize(
    "wrong", [{"screenshot_max_pixels": 0}, {"image_format": "gif"}, {"step_latency_s": -1.0}], ids=str
)
def test_an_impossible_config_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        SimulatedPhoneConfig(**wrong)


# Gestures


def test_an_app_opens_from_its_icon_and_closes_with_back(player: Player) -> None:
    settings = player.screen.find_app("Settings")
    assert settings is not None
    player.tap(settings.center)
    assert player.screen.title == "Settings"
    player.back()
    assert player.screen.is_home


# What cannot be done


@pytest.mark.parametrize(
    "action",
    [
        Action(kind=ActionKind.CLICK, point=(-1, 5)),
        Action(kind=ActionKind.CLICK, point=(1080, 5)),
        Action(kind=ActionKind.CLICK),
        Action(kind=ActionKind.SWIPE, point=(5, 5)),
        Action(kind=ActionKind.SWIPE, point=(5, 5), end_point=(5, 2400)),
        Action(kind=ActionKind.TYPE, text="nobody listens"),
        Action(kind=ActionKind.TYPE, text=""),
        Action(kind=ActionKind.OPEN, text="Snapchat"),
        Action(kind=ActionKind.OPEN, text=""),
        Action(kind=ActionKind.SYSTEM_BUTTON),
        Action(kind=ActionKind.SYSTEM_BUTTON, button=SystemButton.MENU),
        Action(kind=ActionKind.SYSTEM_BUTTON, button=SystemButton.ENTER),
        Action(kind=ActionKind.LONG_PRESS, point=(5, 2300)),
    ],
    ids=lambda action: f"{action.kind}-{action.text}-{action.point}-{action.end_point}",
)
def test_what_cannot_be_done_is_noted_and_changes_nothing(action: Action) -> None:
    phone = SimulatedPhone()
    before = phone.reset("MarkorCreateFolder", 0)
    after = phone.step(action)
    assert after.note
    assert after.screenshot.sha256 == before.screenshot.sha256


# Faults


@pytest.mark.parametrize(("text", "number"), [("5", 5), ("-5", -5), ("--5", 0), ("5 %", 0)])
def test_a_setting_that_is_no_number_counts_as_0(text: str, number: int) -> None:
    settings = Settings()
    settings.put("system", "screen_brightness", text)
    assert settings.number("system", "screen_brightness") == number


def test_a_planned_fault_raises_once_and_changes_nothing() -> None:
    phone = SimulatedPhone(SimulatedPhoneConfig(faults=FailingCalls(at_calls=frozenset({1}))))
    before = phone.reset("SystemWifiTurnOn", 0)
    with pytest.raises(DeviceError):
        _step(phone, ActionKind.OPEN, text="Settings")
    assert phone.step(_CLICK).screenshot.sha256 == before.screenshot.sha256


def test_a_dead_phone_stays_dead() -> None:
    phone = SimulatedPhone(SimulatedPhoneConfig(faults=FailingCalls(dead_from=1)))
    phone.reset("SystemWifiTurnOn", 0)
    assert phone.health()["episodes"] == "1"
    for _ in range(2):
        with pytest.raises(DeviceError):
            phone.step(_CLICK)
        with pytest.raises(DeviceError):
            phone.health()


# State where Android keeps it


def test_episodes_share_nothing() -> None:
    phone = SimulatedPhone()
    player = Player(phone, phone.reset("MarkorCreateFolder", 0))
    player.open("Clipper")
    player.fill("Text", "secret")
    player.tap_button("Copy")
    player = Player(phone, phone.reset("MarkorCreateFolder", 0))
    player.open("Clipper")
    assert player.screen.find_text("Nothing") is not None
    assert read_screen(player.observation.screenshot.data).find_field("Text") is not None
