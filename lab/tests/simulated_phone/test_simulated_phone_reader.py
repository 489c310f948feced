"""The screen reader: what is drawn is what is read, at full size and halved, and colours that keep it possible."""

from __future__ import annotations

import io
import time
from typing import Literal

import pytest
from PIL import Image

from rollout_buffer_lab.simulated_phone.geometry import Rect
from rollout_buffer_lab.simulated_phone.glyphs import DRAWABLE, TextSize
from rollout_buffer_lab.simulated_phone.icons import ICON_NAMES, icon_mask
from rollout_buffer_lab.simulated_phone.painting import encode_screen, paint
from rollout_buffer_lab.simulated_phone.palette import TEXT_COLORS_ON, Surface
from rollout_buffer_lab.simulated_phone.phone import (
    SimulatedPhone,
    SimulatedPhoneConfig,
)
from rollout_buffer_lab.simulated_phone.reading.ocr import sizes_on
from rollout_buffer_lab.simulated_phone.screen_reader import read_screen
from rollout_buffer_lab.simulated_phone.tasks.base import rng_for
from rollout_buffer_lab.simulated_phone.tasks.registry import TASKS
from rollout_buffer_lab.simulated_phone.widgets import Widget, WidgetKind
from slime_plugins.rollout_buffer.generator.gui_agent.device_actions import Action, ActionKind
from slime_plugins.rollout_buffer.generator.gui_agent.screenshots import fit_under_pixel_cap
from tests.simulated_phone_player import SOLUTIONS, Player

_HALF = 648_000
_FULL = 2_592_000


def _line(text: str, surface: Surface, size: TextSize) -> tuple[Widget, ...]:
    """A surface with one line on it."""
    color = TEXT_COLORS_ON[surface][0]
    ground = Widget(kind=WidgetKind.FILL, bounds=Rect(left=0, top=80, right=1080, bottom=1000), surface=surface)
    bounds = Rect(left=48, top=300, right=1040, bottom=460)
    line = Widget(
        kind=WidgetKind.TEXT, bounds=bounds, text=text, text_size=size, text_color=color, surface=ground.surface
    )
    return ground, line


# The rules that make screens readable


def test_no_two_roles_share_a_colour() -> None:
    assert len({surface.rgb for surface in Surface}) == len(Surface)


@pytest.mark.parametrize("surface", list(TEXT_COLORS_ON), ids=lambda surface: surface.name)
def test_no_blend_of_a_letter_with_its_ground_looks_like_a_surface(surface: Surface) -> None:
    others = [other.rgb for other in Surface if other is not surface]
    for color in TEXT_COLORS_ON[surface]:
        for share in range(4 * 255 + 1):
            blend = tuple(
                round(ground + (ink - ground) * share / 1020)
                for ground, ink in zip(surface.rgb, color.rgb, strict=True)
            )
            nearest = min(max(map(abs, map(int.__sub__, blend, other))) for other in others)
            assert nearest > 1  # halving rounds once more


def test_all_icons_look_different() -> None:
    assert len({icon_mask(name).tobytes() for name in ICON_NAMES}) == len(ICON_NAMES)


# Letters


_READ_GROUNDS = [surface for surface in TEXT_COLORS_ON if surface is not Surface.KEY]  # the keyboard is not read


@pytest.mark.parametrize(
    ("surface", "max_pixels"),
    [*((surface, _HALF) for surface in _READ_GROUNDS), (Surface.DIALOG, _FULL)],
    ids=str,
)
def test_every_character_of_every_size_is_read_on_every_ground(surface: Surface, max_pixels: int) -> None:
    characters = sorted(DRAWABLE)
    for size in sizes_on(surface):
        per_line = 8 if size is TextSize.DISPLAY else 20
        for start in range(0, len(characters), per_line):
            text = "A" + "".join(characters[start : start + per_line]) + " z"
            screen = read_screen(encode_screen(_line(text, surface, size), max_pixels, "png"))
            assert [line.text for line in screen.texts] == [text]


def test_blanks_inside_a_line_are_counted() -> None:
    widgets = _line("a b  c i l  1", Surface.SCREEN, TextSize.BODY)
    assert read_screen(encode_screen(widgets, _HALF, "png")).texts[0].text == "a b  c i l  1"


def test_bounds_of_a_line_hold_its_ink() -> None:
    screen = read_screen(encode_screen(_line("Hello", Surface.SCREEN, TextSize.BODY), _HALF, "png"))
    bounds = screen.texts[0].bounds
    assert 46 <= bounds.left <= 54
    assert 300 <= bounds.top < bounds.bottom <= 460
    x, y = screen.texts[0].center
    assert (round(x * 1079 / 999), round(y * 2399 / 999)) == pytest.approx(bounds.center, abs=2)


# Whole screens


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


def test_a_slider_is_read_with_its_value() -> None:
    phone = SimulatedPhone()
    player = Player(phone, phone.reset("SystemBrightnessMax", 0))
    player.open("Settings")
    player.tap_row("Display")
    slider = player.screen.find_slider("Brightness level")
    assert slider is not None
    for place in (0.0, 0.25, 0.5, 1.0):
        x = slider.bounds.left + round(place * (slider.bounds.width - 1))
        player.act(ActionKind.CLICK, point=(x, slider.bounds.center[1]))
        moved = player.screen.find_slider("Brightness level")
        assert moved is not None
        assert moved.value == pytest.approx(place, abs=0.01)
        assert (moved.bounds.left, moved.bounds.right) == pytest.approx(
            (slider.bounds.left, slider.bounds.right), abs=4
        )


def test_a_dialog_hides_what_is_under_it() -> None:
    phone = SimulatedPhone()
    player = Player(phone, phone.reset("MarkorDeleteNote", 0))
    player.open("Markor")
    first = next(line for line in player.screen.texts if line.role == "primary")
    player.hold(first.center)
    assert player.screen.title == "1 selected"
    marked = player.screen.find_text(first.text)
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


def test_blank_lines_in_a_note_are_read() -> None:
    phone = SimulatedPhone()
    player = Player(phone, phone.reset("MarkorCreateFolder", 0))
    player.open("Markor")
    player.tap_icon("add")
    player.fill("Name", "n.md")
    player.tap_button("OK")
    player.type("one\n\nthree")
    field = player.screen.find_field("Note")
    assert field is not None
    assert field.lines == ("one", "", "three")


def test_reading_is_fast() -> None:
    phone = SimulatedPhone()
    phone.reset("SimpleSmsReply", 0)
    shots = [
        phone.step(Action(kind=ActionKind.OPEN, text=app)).screenshot.data for app in ("Settings", "Files", "Contacts")
    ]
    for data in shots:
        read_screen(data)
    started = time.process_time()
    for data in shots:
        read_screen(data)
    assert (time.process_time() - started) / len(shots) < 0.12


# Other sizes and formats


@pytest.mark.parametrize(
    ("max_pixels", "image_format"), [(_HALF, "jpeg"), (_FULL, "jpeg"), (1_200_000, "png")], ids=str
)
def test_a_lossy_or_resized_settings_page_is_still_read(max_pixels: int, image_format: Literal["png", "jpeg"]) -> None:
    phone = SimulatedPhone(SimulatedPhoneConfig(screenshot_max_pixels=max_pixels, image_format=image_format))
    player = Player(phone, phone.reset("TurnOnWifiAndOpenApp", 0))
    player.open("Settings")
    player.tap_row("Network & internet")
    screen = player.screen
    assert screen.title == "Network & internet"
    assert [(switch.label, switch.is_on) for switch in screen.switches] == [
        ("Wi-Fi", False),
        ("Mobile data", True),
        ("Airplane mode", False),
    ]
    assert screen.find_icon("back") is not None


@pytest.mark.parametrize("task_name", ["SimpleSmsSend", "MarkorDeleteNote", "SystemBrightnessMin", "ClockTimerEntry"])
def test_tasks_can_be_solved_by_looking_at_jpegs(task_name: str) -> None:
    phone = SimulatedPhone(SimulatedPhoneConfig(image_format="jpeg"))
    player = Player(phone, phone.reset(task_name, 1))
    SOLUTIONS[task_name](player, TASKS[task_name].make_params(rng_for(task_name, 1)))
    assert phone.score() == 1.0


def test_bytes_that_are_no_image_are_a_value_error() -> None:
    with pytest.raises(ValueError, match="no image"):
        read_screen(b"not an image")


def test_any_image_is_read_as_something() -> None:
    buffer = io.BytesIO()
    Image.effect_noise((300, 500), 80).save(buffer, "PNG")
    assert read_screen(buffer.getvalue()).title == ""


def test_painting_has_the_size_of_the_device() -> None:
    assert paint(()).size == (1080, 2400)


@pytest.mark.parametrize(
    ("size", "cap", "expected"),
    [
        ((1080, 2400), 648_000, (540, 1200)),
        ((1080, 2400), 2_592_000, (1080, 2400)),
        ((1080, 2400), 10, (2, 4)),
        ((1, 5), 2, (1, 2)),
        ((2400, 1080), 648_000, (1200, 540)),
    ],
)
def test_sizes_under_a_pixel_cap(size: tuple[int, int], cap: int, expected: tuple[int, int]) -> None:
    assert fit_under_pixel_cap(*size, cap) == expected


def test_a_cap_must_be_positive() -> None:
    with pytest.raises(ValueError, match="positive"):
        fit_under_pixel_cap(10, 10, 0)
