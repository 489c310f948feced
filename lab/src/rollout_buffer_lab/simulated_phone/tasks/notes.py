"""Tasks about notes in Markor."""

from __future__ import annotations

import random
from collections.abc import Sequence

from rollout_buffer_lab.simulated_phone.device_state.state import MARKOR_FOLDER, DeviceState
from rollout_buffer_lab.simulated_phone.tasks.base import Params, Task, all_hold, same_text
from rollout_buffer_lab.simulated_phone.tasks.people import fill_phone, sent
from rollout_buffer_lab.simulated_phone.tasks.words import file_name, number, sentence

_DAY_MS = 86_400_000
_FOLDERS = ("BookNotes", "Projects", "Recipes", "Travel")


def _write(state: DeviceState, name: str, text: str, days_ago: int = 1) -> None:
    modified_ms = state.clock.now_ms - days_ago * _DAY_MS
    state.files.write(f"{MARKOR_FOLDER}/{name}", text.encode(), modified_ms=modified_ms)


def _other_names(rng: random.Random, count: int, *taken: str) -> list[str]:
    names = list(taken)
    while len(names) < count + len(taken):
        names.append(file_name(rng, rng.choice((".md", ".txt")), names))
    return names[len(taken) :]


def _write_noise(state: DeviceState, params: Params, rng: random.Random) -> None:
    for name in params["noise_candidates"]:
        _write(state, name, sentence(rng), days_ago=rng.randint(2, 300))


def _all_exist(state: DeviceState, names: Sequence[str], folder: str = MARKOR_FOLDER) -> bool:
    return all(state.files.exists(f"{folder}/{name}") for name in names)


def _note_contains(state: DeviceState, name: str, text: str) -> bool:
    path = f"{MARKOR_FOLDER}/{name}"
    return (
        state.files.exists(path)
        and not state.files.is_folder(path)
        and same_text(_without_blank_lines(state.files.read_text(path)), _without_blank_lines(text))
    )


def _without_blank_lines(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if line.strip())


# Making


def _draw_note(rng: random.Random) -> dict[str, object]:
    name = file_name(rng, rng.choice((".md", ".txt")))
    return {"file_name": name, "text": sentence(rng), "noise_candidates": _other_names(rng, 3, name)}


def _note_made(state: DeviceState, params: Params, answer: str | None) -> float:
    return all_hold(_note_contains(state, params["file_name"], params["text"]))


def _draw_clipboard_note(rng: random.Random) -> Params:
    params = _draw_note(rng)
    return {**params, "file_content": params["text"]}


def _copy_content(state: DeviceState, params: Params, rng: random.Random) -> None:
    _write_noise(state, params, rng)
    state.clipboard = params["file_content"]


def _draw_note_and_sms(rng: random.Random) -> Params:
    params = _draw_note(rng)
    return {**params, "number": number(rng), "message": params["text"]}


def _set_up_note_and_sms(state: DeviceState, params: Params, rng: random.Random) -> None:
    _write_noise(state, params, rng)
    fill_phone(state, params, rng)


def _note_made_and_sent(state: DeviceState, params: Params, answer: str | None) -> float:
    return (_note_made(state, params, answer) + sent(state, params, answer)) / 2


def _draw_folder(rng: random.Random) -> Params:
    name = f"{rng.choice(('archive', 'drafts', 'lists', 'plans', 'work'))}_{rng.randint(100, 999)}"
    return {"folder_name": name, "noise_candidates": _other_names(rng, 2)}


def _folder_made(state: DeviceState, params: Params, answer: str | None) -> float:
    return all_hold(state.files.is_folder(f"{MARKOR_FOLDER}/{params['folder_name']}"))


# Deleting


def _draw_delete(rng: random.Random) -> Params:
    name = file_name(rng, ".md")
    return {"file_name": name, "noise_candidates": _other_names(rng, rng.randint(3, 8), name)}


def _write_target_and_noise(state: DeviceState, params: Params, rng: random.Random) -> None:
    _write(state, params["file_name"], sentence(rng), days_ago=1)
    _write_noise(state, params, rng)


def _only_target_gone(state: DeviceState, params: Params, answer: str | None) -> float:
    gone = not state.files.exists(f"{MARKOR_FOLDER}/{params['file_name']}")
    return all_hold(gone, _all_exist(state, params["noise_candidates"]))


def _draw_delete_all(rng: random.Random) -> Params:
    return {"noise_candidates": _other_names(rng, rng.randint(3, 6))}


def _all_gone(state: DeviceState, params: Params, answer: str | None) -> float:
    return all_hold(not state.files.files_under(MARKOR_FOLDER))


# Changing


def _draw_move(rng: random.Random) -> Params:
    source, destination = rng.sample(_FOLDERS, 2)
    name = file_name(rng, ".md")
    return {
        "file_name": name,
        "source_folder": source,
        "destination_folder": destination,
        "noise_candidates": _other_names(rng, 2, name),
    }


def _set_up_move(state: DeviceState, params: Params, rng: random.Random) -> None:
    for folder in _FOLDERS:
        state.files.make_folders(f"{MARKOR_FOLDER}/{folder}")
    for name in (params["file_name"], *params["noise_candidates"]):
        _write(state, f"{params['source_folder']}/{name}", sentence(rng))


def _moved(state: DeviceState, params: Params, answer: str | None) -> float:
    name = params["file_name"]
    return all_hold(
        state.files.exists(f"{MARKOR_FOLDER}/{params['destination_folder']}/{name}"),
        not state.files.exists(f"{MARKOR_FOLDER}/{params['source_folder']}/{name}"),
    )


def _draw_edit(rng: random.Random) -> Params:
    name = file_name(rng, ".md")
    original, footer = sentence(rng), sentence(rng)
    return {
        "file_name": name,
        "original": original,
        "footer": footer,
        "edit_type": "footer",
        "noise_candidates": _other_names(rng, 2, name),
    }


def _set_up_edit(state: DeviceState, params: Params, rng: random.Random) -> None:
    _write(state, params["file_name"], params["original"])
    _write_noise(state, params, rng)


def _edited(state: DeviceState, params: Params, answer: str | None) -> float:
    return all_hold(_note_contains(state, params["file_name"], f"{params['original']}\n{params['footer']}"))


def _draw_change(rng: random.Random) -> Params:
    original_name = file_name(rng, ".md")
    new_name = file_name(rng, ".md", [original_name])
    return {
        "original_name": original_name,
        "new_name": new_name,
        "original_content": sentence(rng),
        "updated_content": sentence(rng),
        "header": sentence(rng),
        "noise_candidates": _other_names(rng, 2, original_name, new_name),
    }


def _set_up_change(state: DeviceState, params: Params, rng: random.Random) -> None:
    _write(state, params["original_name"], params["original_content"])
    _write_noise(state, params, rng)


def _renamed_with(state: DeviceState, params: Params, content: str) -> float:
    gone = not state.files.exists(f"{MARKOR_FOLDER}/{params['original_name']}")
    return all_hold(gone, _note_contains(state, params["new_name"], content))


_IN_MARKOR = "In Markor, "

NOTES_TASKS = (
    Task(
        name="MarkorCreateNote",
        step_budget=16,
        goal=_IN_MARKOR + "create a note named {file_name} with this text: {text}",
        make_params=_draw_note,
        set_up=_write_noise,
        success=_note_made,
    ),
    Task(
        name="MarkorCreateNoteFromClipboard",
        step_budget=14,
        goal=_IN_MARKOR + "create a note named {file_name} and paste into it what is on the clipboard.",
        make_params=_draw_clipboard_note,
        set_up=_copy_content,
        success=_note_made,
    ),
    Task(
        name="MarkorCreateNoteAndSms",
        step_budget=18,
        goal=(
            _IN_MARKOR + "create a note named {file_name} with this text: {text} "
            "Then send the same text to {number} with Simple SMS Messenger."
        ),
        make_params=_draw_note_and_sms,
        set_up=_set_up_note_and_sms,
        success=_note_made_and_sent,
    ),
    Task(
        name="MarkorCreateFolder",
        step_budget=10,
        goal=_IN_MARKOR + "create a folder named {folder_name}.",
        make_params=_draw_folder,
        set_up=_write_noise,
        success=_folder_made,
    ),
    Task(
        name="MarkorDeleteNote",
        step_budget=10,
        goal=_IN_MARKOR + "delete the note named {file_name}.",
        make_params=_draw_delete,
        set_up=_write_target_and_noise,
        success=_only_target_gone,
    ),
    Task(
        name="MarkorDeleteNewestNote",
        step_budget=10,
        goal=_IN_MARKOR + "delete the note that was changed last.",
        make_params=_draw_delete,
        set_up=_write_target_and_noise,
        success=_only_target_gone,
    ),
    Task(
        name="MarkorDeleteAllNotes",
        step_budget=14,
        goal=_IN_MARKOR + "delete all notes.",
        make_params=_draw_delete_all,
        set_up=_write_noise,
        success=_all_gone,
    ),
    Task(
        name="MarkorMoveNote",
        step_budget=14,
        goal=_IN_MARKOR + "move the note {file_name} from the folder {source_folder} to the folder "
        "{destination_folder}.",
        make_params=_draw_move,
        set_up=_set_up_move,
        success=_moved,
    ),
    Task(
        name="MarkorEditNote",
        step_budget=12,
        goal=_IN_MARKOR + "open the note {file_name} and add this as a new line at its end: {footer}",
        make_params=_draw_edit,
        set_up=_set_up_edit,
        success=_edited,
    ),
    Task(
        name="MarkorAddNoteHeader",
        step_budget=12,
        goal=(
            _IN_MARKOR + "put this text, followed by a blank line, before what stands in the note {original_name}: "
            "{header} Then rename the note to {new_name}."
        ),
        make_params=_draw_change,
        set_up=_set_up_change,
        success=lambda state, params, answer: _renamed_with(
            state, params, f"{params['header']}\n{params['original_content']}"
        ),
    ),
    Task(
        name="MarkorChangeNoteContent",
        step_budget=12,
        goal=(
            _IN_MARKOR + "replace what stands in the note {original_name} by this text: {updated_content} "
            "Then rename the note to {new_name}."
        ),
        make_params=_draw_change,
        set_up=_set_up_change,
        success=lambda state, params, answer: _renamed_with(state, params, params["updated_content"]),
    ),
)
