"""Actions that many tasks need: opening apps, finding rows, filling in fields.

A function returns the next move towards its action; some return None once the action has had its effect.
"""

from __future__ import annotations

import re
from typing import Final

from rollout_buffer_lab.scripted_engine.phone_policy.moves import (
    Move,
    give_up,
    long_press,
    open_app,
    press,
    swipe,
    tap,
    type_text,
)
from rollout_buffer_lab.scripted_engine.phone_policy.policy_observation import PolicyObservation, Row
from rollout_buffer_lab.simulated_phone.screen_records import Field, TextRole

_FIELD_MENU: Final = "Edit text"
_SCROLL_FROM: Final = (500, 750)
_SCROLL_TO: Final = (500, 300)


def app_opened(observation: PolicyObservation, name: str) -> Move | None:
    """Brings the app to the front; None if it is there."""
    in_front = observation.recalled(r"Opened the app (.+?)\.(?: |$)")
    if in_front == name and not observation.screen.is_home:
        return None
    return open_app(name, f"I need the app {name}. I open it.", f"Opened the app {name}.")


def find_row(observation: PolicyObservation, text: str) -> Row | None:
    """Returns the list entry with exactly this text."""
    return next((row for row in observation.rows if row.text == text), None)


def titled(observation: PolicyObservation, *titles: str) -> bool:
    """Returns True if the page has one of these titles; the screen shortens a long title with an ellipsis."""
    shown = observation.screen.title
    if shown.endswith("…"):
        return any(title.startswith(shown[:-1].rstrip()) for title in titles)
    return shown in titles


def tapped_row(observation: PolicyObservation, text: str, conclusion: str = "", *, decisive: bool = False) -> Move:
    """Taps the row, or scrolls down to find it; gives up at the end of the list."""
    row = find_row(observation, text)
    if row is None:
        return scrolled_to(observation, text)
    return tap(row.center, f'I see "{text}". I tap it.', conclusion or f'Tapped "{text}".', decisive=decisive)


def held_row(observation: PolicyObservation, text: str) -> Move:
    """Presses the row long, which selects it."""
    row = find_row(observation, text)
    if row is None:
        return scrolled_to(observation, text)
    thought = f'I see "{text}". A long press on it shows what can be done with it.'
    return long_press(row.center, thought, f'Pressed long on "{text}".')


def scrolled_to(observation: PolicyObservation, text: str) -> Move:
    """Scrolls down to a row that is not on the screen; gives up if the last swipe did not change the last row."""
    last = observation.rows[-1].text if observation.rows else "nothing"
    conclusion = f'Scrolled down past "{last}".'
    if observation.history and observation.history[-1].startswith(conclusion):
        return give_up(f'I have reached the end of the list, and there is no "{text}".')
    return swipe(_SCROLL_FROM, _SCROLL_TO, f'I do not see "{text}" yet. I scroll down.', conclusion)


def icon_tapped(observation: PolicyObservation, name: str, purpose: str, *, decisive: bool = False) -> Move:
    """Taps an icon; goes back from a page without the icon, which is the wrong page."""
    icon = observation.screen.find_icon(name)
    if icon is None:
        return stepped_back(observation)
    return tap(icon.center, f"I {purpose} with the {name} icon.", f"Tapped the {name} icon.", decisive=decisive)


def button_tapped(observation: PolicyObservation, text: str, conclusion: str = "", *, decisive: bool = False) -> Move:
    """Taps a button; goes back from a page without the button, which is the wrong page."""
    button = observation.screen.find_button(text)
    if button is None:
        return stepped_back(observation)
    return tap(
        button.center, f"Now I tap the button {text}.", conclusion or f"Tapped the button {text}.", decisive=decisive
    )


def stepped_back(observation: PolicyObservation) -> Move:
    """Leaves a page that is of no use."""
    where = f'the page "{observation.screen.title}"' if observation.screen.title else "this page"
    return press("Back", f"I need nothing more on {where}. I go back.", "Went back.")


def field_filled(observation: PolicyObservation, label: str, text: str) -> Move | None:
    """Fills the field with ``text``: gives it the focus, clears it, and types. None if the field has the text."""
    field = observation.screen.find_field(label)
    if observation.screen.title == _FIELD_MENU:
        return tapped_row(observation, "Clear")
    if field is None:
        return stepped_back(observation)
    if same_words(field.text, text):
        return None
    if not field.focused:
        return tap(field.center, f"The field {label} has to be filled in. I tap it.", f"Tapped the field {label}.")
    if field.lines and not field.selected:
        return _menu_opened(field, label)
    return type_text(text, f"The field {label} has the focus. I type the text.", f"Typed into the field {label}.")


def field_pasted(observation: PolicyObservation, label: str) -> Move | None:
    """Pastes the clipboard into the field; None if the field is not empty."""
    field = observation.screen.find_field(label)
    if observation.screen.title == _FIELD_MENU:
        return tapped_row(observation, "Paste")
    if field is None:
        return stepped_back(observation)
    return None if field.lines else _menu_opened(field, label)


def lines_joined(lines: tuple[str, ...] | list[str]) -> str:
    """Returns wrapped lines as one paragraph."""
    return " ".join(line.strip() for line in lines)


def last_message(observation: PolicyObservation, *, sent: bool) -> str:
    """Returns the latest message on the screen that was sent, or received; empty if there is none."""
    messages: list[list[str]] = []
    is_new_message = True
    for line in observation.screen.texts:
        if line.role is TextRole.PRIMARY and line.sent is sent:
            if is_new_message:
                messages.append([])
            messages[-1].append(line.text)
            is_new_message = False
        else:
            is_new_message = True
    return lines_joined(messages[-1]) if messages else ""


def same_words(first: str, second: str) -> bool:
    """Returns True if both are equal without whitespace, because a field's wrapped lines do not show it."""
    return _without_whitespace(first) == _without_whitespace(second)


def ends_with_words(text: str, ending: str) -> bool:
    """Returns True if ``text`` ends with ``ending``, both without whitespace."""
    return _without_whitespace(text).endswith(_without_whitespace(ending))


def _without_whitespace(text: str) -> str:
    return re.sub(r"\s+", "", text)


def _menu_opened(field: Field, label: str) -> Move:
    thought = f"A long press on the field {label} shows what can be done with its text."
    return long_press(field.center, thought, f"Pressed long on the field {label}.")
