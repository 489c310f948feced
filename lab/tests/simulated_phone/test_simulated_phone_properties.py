"""Whatever is done to the simulated phone it stands; whatever it draws can be read back."""

from __future__ import annotations

import string

from hypothesis import given
from hypothesis import strategies as st

from rollout_buffer_lab.simulated_phone.device_state.state import MARKOR_FOLDER, DeviceState
from rollout_buffer_lab.simulated_phone.geometry import SCREEN_HEIGHT, SCREEN_WIDTH, Rect
from rollout_buffer_lab.simulated_phone.glyphs import DRAWABLE, TextSize, wrap
from rollout_buffer_lab.simulated_phone.painting import encode_screen
from rollout_buffer_lab.simulated_phone.palette import Surface
from rollout_buffer_lab.simulated_phone.phone import SimulatedPhone
from rollout_buffer_lab.simulated_phone.screen_reader import read_screen
from rollout_buffer_lab.simulated_phone.tasks.registry import TASKS
from rollout_buffer_lab.simulated_phone.user_interface import UserInterface
from rollout_buffer_lab.simulated_phone.widgets import Widget, WidgetKind
from slime_plugins.rollout_buffer.generator.gui_agent.device_actions import Action, ActionKind, SystemButton
from slime_plugins.rollout_buffer.generator.gui_agent.screenshots import fit_under_pixel_cap
from tests.example_counts import examples

_APP_NAMES = ["Settings", "Contacts", "messages", "Clock", "Markor", "Files", "Camera", "Audio Recorder", "calendar"]
_coordinates = st.integers(-50, 2500) | st.integers(-(10**9), 10**9)
_points = st.none() | st.tuples(_coordinates, _coordinates) | st.tuples(st.integers(0, 1079), st.integers(60, 2399))
_texts = st.none() | st.text(max_size=40) | st.just("x" * 10_000) | st.sampled_from(["a\nb", "\ud83d", "/", "..", "😀"])
_actions = st.builds(
    Action,
    kind=st.sampled_from(ActionKind),
    point=_points,
    end_point=_points,
    text=_texts | st.sampled_from(_APP_NAMES),
    button=st.none() | st.sampled_from(SystemButton),
    duration_s=st.none() | st.floats(),
    status=st.none() | st.sampled_from(["success", "failure"]),
)
_opens = st.builds(Action, kind=st.just(ActionKind.OPEN), text=st.sampled_from(_APP_NAMES))
_taps = st.builds(
    Action,
    kind=st.sampled_from([ActionKind.CLICK, ActionKind.CLICK, ActionKind.LONG_PRESS]),
    point=st.tuples(st.integers(0, 1079), st.integers(80, 2399)),
)


@examples(25)
@given(
    task_name=st.sampled_from(sorted(TASKS)),
    params_idx=st.integers(0, 19),
    actions=st.lists(_actions | _opens | _taps, max_size=12),
)
def test_no_sequence_of_actions_raises_and_the_score_stays_in_range(
    task_name: str, params_idx: int, actions: list[Action]
) -> None:
    phone = SimulatedPhone()
    phone.reset(task_name, params_idx)
    for action in actions:
        look = phone.step(action)
        assert look.screenshot.data
        assert 0.0 <= phone.score() <= 1.0
    phone.close()


class _Monkey:
    """Touches what is there, without drawing it: many more steps in the same time."""

    def __init__(self) -> None:
        self.state = DeviceState()
        self.state.files.write(f"{MARKOR_FOLDER}/folder/note.md", b"text")
        self.ui = UserInterface(self.state)

    def touch(self, choice: int, hold: bool, text: str) -> None:
        """Touches one of the things on the screen, then types if there is a keyboard."""
        reacting = [widget for widget in self.ui.screen().widgets if widget.touchable]
        x, y = reacting[choice % len(reacting)].bounds.center
        if hold:
            self.ui.long_press(x, y, 1.0)
        else:
            self.ui.tap(x, y)
        self.ui.type_text(text)


@examples(60)
@given(st.lists(st.tuples(st.integers(0, 200), st.booleans(), st.text(max_size=6)), max_size=40))
def test_a_monkey_finds_no_way_to_break_an_app(touches: list[tuple[int, bool, str]]) -> None:
    monkey = _Monkey()
    for choice, hold, text in touches:
        monkey.touch(choice, hold, text)
        screen = monkey.ui.screen()
        assert 0 <= screen.scroll <= screen.max_scroll
        assert all(_is_even_and_on_screen(widget.bounds) for widget in screen.widgets)


def _is_even_and_on_screen(bounds: Rect) -> bool:
    corners = (bounds.left, bounds.top, bounds.right, bounds.bottom)
    return all(corner % 2 == 0 for corner in corners) and bounds.top >= 0 and bounds.bottom <= SCREEN_HEIGHT


# Reading back

_words = st.text(alphabet=sorted(DRAWABLE), min_size=1, max_size=9)
_sentences = st.lists(_words, min_size=1, max_size=6).map(" ".join)


def _page(texts: list[str], top: int) -> tuple[Widget, ...]:
    return tuple(
        Widget(
            kind=WidgetKind.TEXT,
            bounds=Rect(left=48, top=top + index * 80, right=SCREEN_WIDTH, bottom=top + index * 80 + 64),
            text=text,
        )
        for index, text in enumerate(texts)
    )


@examples(40)
@given(texts=st.lists(_sentences, min_size=1, max_size=12), top=st.integers(50, 500).map(lambda dots: dots * 2))
def test_lines_are_read_as_they_were_drawn(texts: list[str], top: int) -> None:
    drawn = [wrap(f"A{text}", TextSize.BODY, 1000)[0].rstrip() for text in texts]
    bar = Widget(
        kind=WidgetKind.FILL, bounds=Rect(left=0, top=0, right=SCREEN_WIDTH, bottom=80), surface=Surface.STATUS_BAR
    )
    screen = read_screen(encode_screen((bar, *_page(drawn, top)), 648_000, "png"))
    assert [line.text for line in screen.texts] == drawn


@examples(15)
@given(name=st.text(alphabet=string.ascii_letters + string.digits, min_size=1, max_size=20), text=_sentences)
def test_what_is_typed_stands_in_the_field_and_in_the_state(name: str, text: str) -> None:
    phone = SimulatedPhone()
    phone.reset("SystemCopyToClipboard", 0)
    phone.step(Action(kind=ActionKind.OPEN, text="Clipper"))
    phone.step(Action(kind=ActionKind.CLICK, point=(540, 330)))
    look = phone.step(Action(kind=ActionKind.TYPE, text=f"{name} {text}"))
    field = read_screen(look.screenshot.data).find_field("Text")
    assert field is not None
    assert field.focused
    assert " ".join(field.lines).replace(" ", "") == f"{name}{text}".replace(" ", "")


# Pure parts


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 10_000_000))
def test_a_fitted_size_is_under_the_cap_and_no_larger_than_the_original(width: int, height: int, cap: int) -> None:
    new_width, new_height = fit_under_pixel_cap(width, height, cap)
    assert 1 <= new_width <= width
    assert 1 <= new_height <= height
    assert new_width * new_height <= cap
