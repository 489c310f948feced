"""The simulated phone as a ``Device``: what gestures do, what stays when it fails, how its screenshots look."""

from __future__ import annotations

import io
import sqlite3
import time
from typing import Any

import pytest
from PIL import Image

from rollout_buffer_lab.simulated_phone.device_state.contacts import (
    add_contact,
    contacts,
)
from rollout_buffer_lab.simulated_phone.device_state.databases import CONTACTS_DB
from rollout_buffer_lab.simulated_phone.device_state.filesystem import FileError
from rollout_buffer_lab.simulated_phone.device_state.packages import INSTALLED_APPS
from rollout_buffer_lab.simulated_phone.device_state.state import (
    MARKOR_FOLDER,
    DeviceState,
)
from rollout_buffer_lab.simulated_phone.phone import (
    FaultPlan,
    SimulatedPhone,
    SimulatedPhoneConfig,
)
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


def test_the_default_screenshot_is_exactly_half_the_screen() -> None:
    look = SimulatedPhone().reset("SystemWifiTurnOn", 0)
    image = Image.open(io.BytesIO(look.screenshot.data))
    assert (image.size, image.format) == ((540, 1200), "PNG")
    assert (look.screen_width, look.screen_height, look.step_budget) == (1080, 2400, 10)


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


def test_a_reset_and_a_step_are_fast() -> None:
    phone = SimulatedPhone()
    phone.reset("SimpleSmsReply", 0)
    started = time.process_time()
    for params_idx in range(10):
        phone.reset("SimpleSmsReply", params_idx)
    assert (time.process_time() - started) / 10 < 0.1

    started = time.process_time()
    for index in range(10):
        _step(phone, ActionKind.OPEN, text=INSTALLED_APPS[index].label)
    assert (time.process_time() - started) / 10 < 0.2


# Gestures


def test_an_app_opens_from_its_icon_and_closes_with_back(player: Player) -> None:
    settings = player.screen.find_app("Settings")
    assert settings is not None
    player.tap(settings.center)
    assert player.screen.title == "Settings"
    player.back()
    assert player.screen.is_home


def test_a_swipe_up_on_the_home_screen_shows_all_apps(player: Player) -> None:
    player.act(ActionKind.SWIPE, point=(540, 2000), end_point=(540, 900))
    assert player.screen.title == "Apps"
    player.tap_row("Camera")
    assert player.screen.find_icon("shutter") is not None


def test_home_keeps_the_app_as_it_was(player: Player) -> None:
    player.open("settings")
    player.tap_row("Display")
    player.act(ActionKind.SYSTEM_BUTTON, button=SystemButton.HOME)
    assert player.screen.is_home
    player.open("Settings")
    assert player.screen.title == "Display"


def test_a_list_longer_than_the_screen_scrolls_and_stops_at_its_ends(player: Player) -> None:
    player.open("Settings")
    assert player.screen.find_text("About phone") is None
    for _ in range(3):
        player.act(ActionKind.SWIPE, point=(540, 2000), end_point=(540, 400))
    assert player.screen.find_text("About phone") is not None
    for _ in range(3):
        player.act(ActionKind.SWIPE, point=(540, 400), end_point=(540, 2000))
    assert player.screen.find_text("Network & internet") is not None


def test_a_slider_follows_the_finger(player: Player) -> None:
    player.open("Settings")
    player.tap_row("Sound & vibration")
    slider = player.screen.find_slider("Media volume")
    assert slider is not None
    player.act(ActionKind.SWIPE, point=slider.bounds.center, end_point=(slider.bounds.left, slider.bounds.top))
    moved = player.screen.find_slider("Media volume")
    assert moved is not None
    assert moved.value == 0.0


def test_back_hides_the_keyboard_before_it_leaves_the_page(player: Player) -> None:
    player.open("Clipper")
    player.fill("Text", "abc")
    assert player.screen.keyboard_visible
    player.back()
    after_one = player.screen
    assert not after_one.keyboard_visible
    assert after_one.title == "Clipper"
    player.back()
    assert player.screen.is_home


def test_keys_of_the_keyboard_type_shift_and_erase(player: Player) -> None:
    player.open("Clipper")
    player.fill("Text", "a")
    for point in ((80, 2130), (54, 1816), (54, 1816), (1000, 2130)):  # shift, Q, q, backspace
        player.act(ActionKind.CLICK, point=point)
    field = player.screen.find_field("Text")
    assert field is not None
    assert field.text == "aQ"


def test_enter_is_a_line_feed_in_a_note_and_hides_the_keyboard_elsewhere(player: Player) -> None:
    player.open("Markor")
    player.tap_icon("add")
    player.fill("Name", "list")
    player.act(ActionKind.SYSTEM_BUTTON, button=SystemButton.ENTER)
    assert not player.screen.keyboard_visible
    player.tap_button("OK")
    player.fill("Note", "one")
    player.act(ActionKind.SYSTEM_BUTTON, button=SystemButton.ENTER)
    player.type("two")
    field = player.screen.find_field("Note")
    assert field is not None
    assert field.lines == ("one", "two")
    assert player.screen.title == "list.md"


def test_a_marked_value_is_replaced_by_typing_and_the_menu_copies_and_clears(player: Player) -> None:
    player.open("Clipper")
    player.fill("Text", "old")
    for choice in ("Copy", "Select all"):
        field = player.screen.find_field("Text")
        assert field is not None
        player.hold(field.center)
        player.tap_row(choice)
    field = player.screen.find_field("Text")
    assert field is not None
    assert (field.text, field.selected) == ("old", True)
    player.type("new")
    field = player.screen.find_field("Text")
    assert field is not None
    assert (field.text, field.selected) == ("new", False)


def test_a_long_text_in_a_note_stays_whole_and_its_end_is_shown(player: Player) -> None:
    text = "\n".join(f"line {number}" for number in range(60))
    player.open("Markor")
    player.tap_icon("add")
    player.fill("Name", "long.txt")
    player.tap_button("OK")
    player.type(text)
    assert player.screen.find_text("line 59") is not None
    assert player.screen.find_text("line 0") is None


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


def test_half_surrogates_and_characters_without_a_glyph_are_kept_or_replaced_but_never_raise(player: Player) -> None:
    player.open("Simple SMS Messenger")
    player.tap_icon("add")
    player.fill("Phone number", "123")
    player.fill("Message", "é😀 \ud83d")
    player.tap_button("Send")
    sent = next(line for line in player.screen.texts if line.sent)
    assert sent.text == "\N{WHITE SQUARE}\N{WHITE SQUARE} ?"


# Faults


def test_a_planned_fault_raises_once_and_changes_nothing() -> None:
    phone = SimulatedPhone(SimulatedPhoneConfig(faults=FaultPlan(at_calls=frozenset({1}))))
    before = phone.reset("SystemWifiTurnOn", 0)
    with pytest.raises(DeviceError):
        _step(phone, ActionKind.OPEN, text="Settings")
    assert phone.step(_CLICK).screenshot.sha256 == before.screenshot.sha256


def test_a_dead_phone_stays_dead() -> None:
    phone = SimulatedPhone(SimulatedPhoneConfig(faults=FaultPlan(dead_from=1)))
    phone.reset("SystemWifiTurnOn", 0)
    assert phone.health()["episodes"] == "1"
    for _ in range(2):
        with pytest.raises(DeviceError):
            phone.step(_CLICK)
        with pytest.raises(DeviceError):
            phone.health()


def test_without_a_task_there_is_nothing_to_do() -> None:
    phone = SimulatedPhone()
    with pytest.raises(DeviceError, match="reset"):
        phone.step(_CLICK)
    phone.reset("SystemWifiTurnOn", 0)
    with pytest.raises(Exception, match="no task called"):
        phone.reset("NoSuchTask", 0)
    with pytest.raises(DeviceError, match="reset"):
        phone.score()


def test_a_closed_phone_refuses_everything_and_closes_twice() -> None:
    phone = SimulatedPhone()
    phone.reset("SystemWifiTurnOn", 0)
    phone.close()
    phone.close()
    with pytest.raises(DeviceError, match="closed"):
        phone.reset("SystemWifiTurnOn", 0)


# State where Android keeps it


def test_a_database_can_be_pulled_changed_and_pushed_as_a_file(tmp_path: Any) -> None:
    state = DeviceState()
    add_contact(state, "Ada", "Lovelace", "+100")
    pulled = tmp_path / "contacts2.db"
    pulled.write_bytes(state.files.read(CONTACTS_DB))
    with sqlite3.connect(pulled) as connection:
        connection.execute("UPDATE raw_contacts SET display_name = 'Ada King'")
    connection.close()
    state.files.write(CONTACTS_DB, pulled.read_bytes())
    assert [contact.name for contact in contacts(state)] == ["Ada King"]
    with pytest.raises(sqlite3.DatabaseError):
        state.files.write(CONTACTS_DB, b"no database at all" * 100)
    assert [contact.name for contact in contacts(state)] == ["Ada King"]


def test_sdcard_is_a_link_and_folders_move_with_what_is_in_them() -> None:
    files = DeviceState().files
    files.write("/sdcard/Documents/Markor/a/note.md", b"text")
    files.move(f"{MARKOR_FOLDER}/a", f"{MARKOR_FOLDER}/b")
    assert files.read("/sdcard/Documents/Markor/b/note.md") == b"text"
    assert files.names(MARKOR_FOLDER) == ["b"]
    with pytest.raises(FileError):
        files.move(f"{MARKOR_FOLDER}/b", f"{MARKOR_FOLDER}/b/c")
    with pytest.raises(FileError):
        files.read("/nowhere")


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
