"""The screen reader: what is drawn is what is read, at full size and halved, and colours that keep it possible."""

from __future__ import annotations

import pytest

from rollout_buffer_lab.simulated_phone.phone import SimulatedPhone, SimulatedPhoneConfig
from rollout_buffer_lab.simulated_phone.screen_reader import read_screen
from tests.simulated_phone_player import Player

_HALF = 648_000
_FULL = 2_592_000


@pytest.mark.parametrize("max_pixels", [_HALF, _FULL])
def test_a_settings_page_is_read_with_its_switches(max_pixels: int) -> None:
    phone = SimulatedPhone(SimulatedPhoneConfig(screenshot_max_pixels=max_pixels))
    player = Player(phone, phone.reset("TurnOnWifiAndOpenApp", 0))
    player.open("Settings")
    player.tap_row("Network & internet")
    screen = player.screen
    assert (screen.title, screen.clock_text, screen.wifi_shown, screen.bluetooth_shown) == (
        "Network & internet",
        "15:34",
        False,
        True,
    )
    assert [(switch.label, switch.is_on) for switch in screen.switches] == [
        ("Wi-Fi", False),
        ("Mobile data", True),
        ("Airplane mode", False),
    ]
    assert screen.find_icon("back") is not None
    assert (screen.is_home, screen.is_dialog, screen.keyboard_visible) == (False, False, False)


def test_a_dialog_hides_what_is_under_it() -> None:
    phone = SimulatedPhone()
    player = Player(phone, phone.reset("MarkorDeleteNote", 0))
    player.open("Markor")
    note = next(line for line in player.screen.texts if line.role == "primary")
    player.hold(note.center)
    assert player.screen.title == "1 selected"
    marked = player.screen.find_text(note.text)
    assert marked is not None
    assert marked.selected
    player.tap_icon("delete")
    screen = player.screen
    assert (screen.is_dialog, screen.title, [button.text for button in screen.buttons]) == (
        True,
        "Delete",
        ["Cancel", "Delete"],
    )
    assert screen.find_icon("add") is None


def test_bytes_that_are_no_image_are_a_value_error() -> None:
    with pytest.raises(ValueError, match="no image"):
        read_screen(b"not an image")
