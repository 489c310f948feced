"""Scripts for MiniWoB++ pages: for each kind of goal a function from the page to the next move.

A script has no memory. Whether a move has had its effect, it reads from the page.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime
from re import Match
from typing import Final

from rollout_buffer_lab.scripted_engine.phone_policy.moves import Move, tap, type_text
from rollout_buffer_lab.scripted_engine.web_policy.screen import Element, Screen

Script = Callable[[Screen, "Match[str]"], Move | None]

_COLOURS: Final = {
    "red": "rgb(255, 0, 0)", "blue": "rgb(0, 0, 255)", "yellow": "rgb(255, 255, 0)", "cyan": "rgb(0, 255, 255)",
    "aqua": "rgb(0, 255, 255)", "magenta": "rgb(255, 0, 255)", "fuchsia": "rgb(255, 0, 255)",
    "green": "rgb(0, 128, 0)", "lime": "rgb(0, 255, 0)", "black": "rgb(0, 0, 0)", "white": "rgb(255, 255, 255)",
    "purple": "rgb(128, 0, 128)", "orange": "rgb(255, 165, 0)", "pink": "rgb(255, 192, 203)",
    "grey": "rgb(128, 128, 128)", "gray": "rgb(128, 128, 128)", "olive": "rgb(128, 128, 0)",
}  # fmt: skip
_BUTTONS: Final = ("button", "input button", "input submit")


def next_move(goal: str, screen: Screen) -> Move | None:
    """Returns the next move of the script for a goal; None without a script, or if the script finds no move."""
    for pattern, script in _SCRIPTS:
        match = re.search(pattern, goal)
        if match is not None:
            return script(screen, match)
    return None


# ---- for several scripts ---------------------------------------------------------------------------------------------


def _tap(element: Element | None, name: str = "") -> Move | None:
    if element is None:
        return None
    label = name or element.text or element.kind
    return tap(element.center, f'I see "{label}" and tap it.', f'Tapped "{label}".')


def _submit(screen: Screen, *names: str) -> Move | None:
    wanted = names or ("Submit",)
    elements = (screen.saying(name) for name in wanted)
    return _tap(next((element for element in elements if element is not None), None))


def _filled(field: Element, text: str) -> Move | None:
    """Taps the field, then enters the text; None once the field has it."""
    if field.value == text:
        return None
    if not field.focused:
        return tap(field.center, f'The field is to hold "{text}". I tap it first.', "Tapped the input field.")
    return type_text(text, f'I enter "{text}".', f'Entered "{text}".')


def _filled_all(screen: Screen, texts: list[str], *submit: str) -> Move | None:
    for field, text in zip(screen.fields, texts, strict=False):
        move = _filled(field, text)
        if move is not None:
            return move
    return _submit(screen, *submit)


def _ticked(screen: Screen, wanted: set[str]) -> Move | None:
    """Ticks the boxes with the wanted labels one by one, then submits; a box's label is the one on its line."""
    for box in screen.of_kind("input checkbox", "input radio"):
        labels = (label for label in screen.of_kind("label") if label.box[1] - 40 <= box.center[1] <= label.box[3] + 10)
        label = next(labels, None)
        if label is not None and (label.text in wanted) and not box.checked:
            return _tap(box, label.text)
    return _submit(screen)


def _ordinal(text: str) -> int:
    return int(re.sub(r"\D", "", text))


# ---- one script for each kind of goal --------------------------------------------------------------------------------


def _named_button(screen: Screen, match: Match[str]) -> Move | None:
    return _tap(screen.saying(match[1], *_BUTTONS) or screen.saying(match[1]))


def _dialog(screen: Screen, match: Match[str]) -> Move | None:
    if match[1] == "x":
        return _tap(next(iter(screen.classed("ui-dialog-titlebar-close")), None), "x")
    return _named_button(screen, match)


def _any_button(screen: Screen, _match: Match[str]) -> Move | None:
    return _tap(next(iter(screen.of_kind(*_BUTTONS)), None))


def _button_sequence(screen: Screen, _match: Match[str]) -> Move | None:
    one, two = screen.saying("ONE"), screen.saying("TWO")
    return _tap(two if one is not None and one.focused else one)


def _select(screen: Screen, match: Match[str]) -> Move | None:
    if match[1] == "nothing":
        return _submit(screen)
    options = next(iter(screen.of_kind("select")), None)
    if options is not None:
        return _option(screen, options, match[1])
    return _ticked(screen, set(match[1].split(", ")))


def _option(screen: Screen, options: Element, wanted: str) -> Move | None:
    if options.facts.get("chosen") == [wanted]:
        return _submit(screen)
    if not options.focused:
        return _tap(options, "the list")
    return type_text(wanted, f'The list is open. I choose "{wanted}".', f'Chose "{wanted}".')


def _coloured(screen: Screen, match: Match[str]) -> Move | None:
    wanted = _COLOURS.get(match[1])
    return _tap(next((e for e in screen.classed("color") if e.facts.get("colour") == wanted), None), match[1])


def _quoted_text(screen: Screen, match: Match[str]) -> Move | None:
    return _filled_all(screen, [match[1]])


def _in_case(screen: Screen, match: Match[str]) -> Move | None:
    return _filled_all(screen, [match[1].upper() if match[2] == "upper" else match[1].lower()])


def _password_twice(screen: Screen, match: Match[str]) -> Move | None:
    return _filled_all(screen, [match[1], match[1]])


def _login(screen: Screen, match: Match[str]) -> Move | None:
    popup = screen.saying("Cancel", *_BUTTONS)
    return _tap(popup) if popup is not None else _filled_all(screen, [match[1], match[2]], "Login")


def _date(screen: Screen, match: Match[str]) -> Move | None:
    field = next(iter(screen.of_kind("input date")), None)
    if field is None:
        return None
    iso = datetime.strptime(match[1], "%m/%d/%Y").strftime("%Y-%m-%d")
    if field.value == iso:
        return _submit(screen)
    if not field.focused:
        left, top, _, bottom = field.box
        return tap((left + 60, (top + bottom) // 2), "The date comes first.", "Tapped the month of the date.")
    return type_text(match[1].replace("/", ""), "I enter the date.", f"Entered {match[1]}.")


def _focus(screen: Screen, match: Match[str]) -> Move | None:
    index = _ordinal(match[1]) - 1 if match[1] else 0
    return _tap(screen.fields[index], "the field") if index < len(screen.fields) else None


def _link(screen: Screen, match: Match[str]) -> Move | None:
    """Taps the link if it is visible; otherwise opens the tab or section after the open one."""
    links = [e for e in screen.classed("alink") if e.text == match[1]]
    if links:
        return _tap(links[0])
    tabs = screen.of_kind("tab")
    opened = next((index for index, tab in enumerate(tabs) if _is_open(tab)), -1)
    return _tap(tabs[(opened + 1) % len(tabs)], "the next part") if tabs else None


def _is_open(tab: Element) -> bool:
    return tab.has_class("ui-tabs-active") or tab.has_class("ui-accordion-header-active")


def _expanded(screen: Screen, _match: Match[str]) -> Move | None:
    section = next(iter(screen.of_kind("tab")), None)
    return _tap(section, "the section") if section is not None and not _is_open(section) else _submit(screen)


def _tab(screen: Screen, match: Match[str]) -> Move | None:
    return _tap(screen.saying(f"Tab #{match[1]}"))


def _widget(screen: Screen, match: Match[str]) -> Move | None:
    kinds = {"radio": "input radio", "checkbox": "input checkbox", "text": "input text"}
    return _tap(next(iter(screen.of_kind(kinds.get(match[1], match[1]))), None), match[1])


def _grid_point(screen: Screen, match: Match[str]) -> Move | None:
    return _tap(next((e for e in screen.elements if e.facts.get("id") == match[1]), None), match[1])


def _shape_name(screen: Screen, _match: Match[str]) -> Move | None:
    shape = next((e for e in screen.elements if "fill" in e.facts and e.kind != "path"), None)
    letter = next((e for e in screen.of_kind("text")), None)
    if letter is not None:
        return _tap(screen.saying("Number" if letter.text.isdigit() else "Letter", *_BUTTONS))
    names = {"rect": "Rectangle", "circle": "Circle", "polygon": "Triangle"}
    return _tap(screen.saying(names[shape.kind], *_BUTTONS)) if shape is not None and shape.kind in names else None


def _table(screen: Screen, match: Match[str]) -> Move | None:
    cells = [cell.text for cell in screen.of_kind("td")]
    if match[1] not in cells[:-1]:
        return None
    return _filled_all(screen, [cells[cells.index(match[1]) + 1]])


def _algebra(screen: Screen, _match: Match[str]) -> Move | None:
    problem = next((e.text for e in screen.elements if "=" in e.text and re.search(r"\d", e.text)), "")
    parts = re.fullmatch(r"(x|-?\d+)\s*([+-])\s*(x|-?\d+)\s*=\s*(x|-?\d+)", problem)
    if parts is None:
        return None
    left, sign, right, result = parts[1], 1 if parts[2] == "+" else -1, parts[3], parts[4]
    if left == "x":
        x = int(result) - sign * int(right)
    elif right == "x":
        x = sign * (int(result) - int(left))
    else:
        x = int(left) + sign * int(right)
    return _filled_all(screen, [str(x)])


def _arithmetic(screen: Screen, _match: Match[str]) -> Move | None:
    problem = next((e.text for e in screen.elements if re.search(r"\d\s*[-+x]\s*\d", e.text)), "")
    parts = re.search(r"(\d+)\s*([-+x])\s*(\d+)", problem)
    if parts is None:
        return None
    left, right = int(parts[1]), int(parts[3])
    return _filled_all(screen, [str({"+": left + right, "-": left - right, "x": left * right}[parts[2]])])


def _block_count(screen: Screen, _match: Match[str]) -> Move | None:
    return _filled_all(screen, [str(len(screen.classed("addition-block")))])


def _word(screen: Screen, match: Match[str]) -> Move | None:
    words = next((e.text for e in screen.of_kind("p")), "").split()
    index = _ordinal(match[1]) - 1
    return _filled_all(screen, [words[index].strip(".,")]) if index < len(words) else None


def _last_word(screen: Screen, _match: Match[str]) -> Move | None:
    written = next((e.text for e in screen.of_kind("textarea")), "").split()
    field = next((e for e in screen.fields if e.kind != "textarea"), None)
    if not written or field is None:
        return None
    return _filled(field, written[-1].strip(".,")) or _submit(screen)


def _letters(screen: Screen, _match: Match[str]) -> Move | None:
    return _filled_all(screen, ["".join(e.text for e in screen.of_kind("span"))])


def _tree(screen: Screen, match: Match[str]) -> Move | None:
    entry = screen.saying(match[1])
    if entry is not None:
        return _tap(entry)
    closed = [e for e in screen.elements if e.has_class("expandable-hitarea")]
    return _tap(closed[0], "a folder that is closed") if closed else None


def _mail(screen: Screen, match: Match[str]) -> Move | None:
    sender = next((e for e in screen.classed("email-sender") if e.text == match[1]), None)
    icons = screen.classed("trash" if match[2] == "trash" else "star")
    if sender is None or not icons:
        return None
    return _tap(min(icons, key=lambda icon: abs(icon.center[1] - sender.center[1])), f"the {match[2]} icon")


def _form(screen: Screen, match: Match[str]) -> Move | None:
    radios, index = screen.of_kind("input radio"), _ordinal(match[1]) - 1
    if index < len(radios) and not radios[index].checked:
        return _tap(radios[index], "the radio button")
    field = _ordinal(match[3]) - 1
    return (_filled(screen.fields[field], match[2]) if field < len(screen.fields) else None) or _submit(screen)


def _autocomplete(screen: Screen, match: Match[str]) -> Move | None:
    field = next(iter(screen.fields), None)
    if field is None:
        return None
    ending = match[2] if match.lastindex and match.lastindex > 1 else ""
    offered = [e for e in screen.of_kind("menuitem", "div", "li", "a") if e.text.startswith(match[1])]
    fitting = [e for e in offered if e.text.endswith(ending)]
    if (field.value or "").startswith(match[1]) and field.value != match[1]:
        return _submit(screen)
    return _tap(fitting[0]) if fitting else _filled(field, match[1])


def _odd_or_even(screen: Screen, _match: Match[str]) -> Move | None:
    """Marks line by line from above. The elements show no marks, but the button tapped last has the focus."""
    focused = next((e for e in screen.of_kind("button") if e.focused), None)
    marked_to = focused.box[3] if focused is not None else 0
    number = next((e for e in screen.classed("display-number") if e.center[1] > marked_to), None)
    if number is None:
        return _submit(screen)
    side = "Odd" if int(number.text) % 2 else "Even"
    buttons = [e for e in screen.of_kind("button") if e.text == side]
    return _tap(min(buttons, key=lambda e: abs(e.center[1] - number.center[1])))


_SCRIPTS: Final[tuple[tuple[str, Script], ...]] = (
    (r"^Click button ONE, then click button TWO", _button_sequence),
    (r"^Click button (ONE)\.", _named_button),
    (r"^Click the button\.", _any_button),
    (r'^Click on the "(.+)" button', _named_button),
    (r'in the dialog box labeled "(.+)"', _dialog),
    (r'link "(.+)"\.$', _link),
    (r"^Expand the section below and click submit", _expanded),
    (r"^Click on Tab #(\d+)", _tab),
    (r"^Click on the (\w+) colored box", _coloured),
    (r'^Click on a "(\w+)" widget', _widget),
    (r"^Click on the grid coordinate (\(-?\d,-?\d\))", _grid_point),
    (r"^Select (.+) from the list and click Submit", _select),
    (r"^Select (.+) and click Submit", _select),
    (r'^Type "(.+)" in all (upper|lower) case letters', _in_case),
    (r'^Enter the password "(.+)" into both', _password_twice),
    (r'^Enter the username "(.+)" and the password "(.+)" into', _login),
    (r"^Enter (\d\d/\d\d/\d{4}) as the date", _date),
    (r'^Enter an item that starts with "(.+?)" and ends with "(.+?)"', _autocomplete),
    (r'^Enter an item that starts with "(.+?)"', _autocomplete),
    (r'^Enter "(.+)" into the text field', _quoted_text),
    (r"^Enter the value of (.+) into the text field", _table),
    (r"^Focus into the (?:(\d+)\w\w input )?textbox", _focus),
    (r"button that best describes the figure", _shape_name),
    (r"^Solve for x", _algebra),
    (r"^Solve the math problem", _arithmetic),
    (r"^Type the total number of blocks", _block_count),
    (r"^Find the (\d+)\w\w word in the paragraph", _word),
    (r"^Find the last word in the text area", _last_word),
    (r"^Type the text below into the text field", _letters),
    (r'folder or file named "(.+)"', _tree),
    (r"^Find the email by (.+) and click the (trash|star) icon", _mail),
    (r'^Check the (\w+) radio button and enter the number "(.+)" into the (\w+) textbox', _form),
    (r"^Mark the numbers below as odd or even", _odd_or_even),
)
