"""Tasks about files, photos, videos and sound records."""

from __future__ import annotations

import random

from rollout_buffer_lab.simulated_phone.device_state.state import (
    AUDIO_FOLDER,
    PHOTO_FOLDER,
    STORAGE,
    VIDEO_FOLDER,
    DeviceState,
)
from rollout_buffer_lab.simulated_phone.tasks.base import Params, Task, all_hold
from rollout_buffer_lab.simulated_phone.tasks.words import file_name, sentence

_FOLDERS = ("Alarms", "Download", "Movies", "Music", "Pictures", "Podcasts")


def _draw_names(rng: random.Random) -> tuple[str, list[str]]:
    names: list[str] = []
    for _ in range(rng.randint(4, 9)):
        names.append(file_name(rng, rng.choice((".txt", ".md", ".log")), names))
    return names[0], names[1:]


def _draw_delete(rng: random.Random) -> Params:
    target, noise = _draw_names(rng)
    return {"file_name": target, "subfolder": rng.choice(_FOLDERS), "noise_candidates": noise}


def _write_to_subfolder(state: DeviceState, params: Params, rng: random.Random) -> None:
    for name in (params["file_name"], *params["noise_candidates"]):
        state.files.write(f"{STORAGE}/{params['subfolder']}/{name}", sentence(rng).encode())


def _deleted(state: DeviceState, params: Params, answer: str | None) -> float:
    left = set(state.files.names(f"{STORAGE}/{params['subfolder']}"))
    return all_hold(left == set(params["noise_candidates"]))


def _draw_move(rng: random.Random) -> Params:
    target, noise = _draw_names(rng)
    source, destination = rng.sample(_FOLDERS, 2)
    return {
        "file_name": target,
        "source_folder": source,
        "destination_folder": destination,
        "subfolder": source,
        "noise_candidates": noise,
    }


def _moved(state: DeviceState, params: Params, answer: str | None) -> float:
    return all_hold(
        state.files.exists(f"{STORAGE}/{params['destination_folder']}/{params['file_name']}"),
        not state.files.exists(f"{STORAGE}/{params['source_folder']}/{params['file_name']}"),
    )


def _has_file(folder: str, extension: str, state: DeviceState) -> bool:
    return any(name.endswith(extension) for name in state.files.names(folder))


def _draw_record(rng: random.Random) -> Params:
    return {"file_name": file_name(rng, "").rstrip("."), "text": ""}


FILES_MEDIA_TASKS = (
    Task(
        name="FilesDeleteFile",
        step_budget=22,
        goal="With the Files app, delete the file {file_name} in the folder {subfolder} of the phone's storage.",
        make_params=_draw_delete,
        set_up=_write_to_subfolder,
        success=_deleted,
    ),
    Task(
        name="FilesMoveFile",
        step_budget=20,
        goal=(
            "With the Files app, move the file {file_name} from the folder {source_folder} to the folder "
            "{destination_folder} of the phone's storage."
        ),
        make_params=_draw_move,
        set_up=_write_to_subfolder,
        success=_moved,
    ),
    Task(
        name="CameraTakePhoto",
        step_budget=10,
        goal="Take one photo.",
        success=lambda state, params, answer: all_hold(_has_file(PHOTO_FOLDER, ".jpg", state)),
    ),
    Task(
        name="CameraTakeVideo",
        step_budget=10,
        goal="Take one video.",
        success=lambda state, params, answer: all_hold(_has_file(VIDEO_FOLDER, ".mp4", state)),
    ),
    Task(
        name="AudioRecorderRecordAudio",
        step_budget=12,
        goal="Record some sound with the app Audio Recorder and save it.",
        success=lambda state, params, answer: all_hold(_has_file(AUDIO_FOLDER, ".m4a", state)),
    ),
    Task(
        name="AudioRecorderRecordAudioWithFileName",
        step_budget=20,
        goal='Record some sound with the app Audio Recorder and save it under the name "{file_name}".',
        make_params=_draw_record,
        success=lambda state, params, answer: all_hold(state.files.exists(f"{AUDIO_FOLDER}/{params['file_name']}.m4a")),
    ),
)
