"""All tasks by name, and the running task of a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from rollout_buffer_lab.simulated_phone.device_state.state import DeviceState
from rollout_buffer_lab.simulated_phone.tasks.appointments import APPOINTMENT_TASKS
from rollout_buffer_lab.simulated_phone.tasks.base import Params, Task, rng_for
from rollout_buffer_lab.simulated_phone.tasks.files_media import FILES_MEDIA_TASKS
from rollout_buffer_lab.simulated_phone.tasks.notes import NOTES_TASKS
from rollout_buffer_lab.simulated_phone.tasks.people import PEOPLE_TASKS
from rollout_buffer_lab.simulated_phone.tasks.system import SYSTEM_TASKS
from slime_plugins.rollout_buffer.errors import EnvironmentSetupError

VARIATIONS = 20
TASKS: dict[str, Task] = {
    task.name: task for task in (*SYSTEM_TASKS, *PEOPLE_TASKS, *NOTES_TASKS, *FILES_MEDIA_TASKS, *APPOINTMENT_TASKS)
}
_APPS_BY_BEGINNING = {
    "AudioRecorder": "audio recorder",
    "Camera": "camera",
    "Clock": "clock",
    "Contacts": "contacts",
    "Files": "files",
    "Markor": "markor",
    "OpenApp": "camera,clock,contacts,settings,dialer",
    "SimpleCalendar": "simple calendar pro",
    "SimpleSms": "simple sms messenger",
    "System": "settings",
    "TurnOff": "settings",
    "TurnOn": "settings",
}
_OTHER_APPS = {
    "MarkorCreateNoteAndSms": "markor,simple sms messenger",
    "MarkorCreateNoteFromClipboard": "markor,clipper",
    "SimpleSmsSendClipboardContent": "simple sms messenger,clipper",
    "SystemCopyToClipboard": "clipper",
}


def apps_of(task_name: str) -> str:
    """Returns the apps of a task as AndroidWorld names them, with commas between; an empty text for other tasks."""
    by_beginning = (apps for start, apps in _APPS_BY_BEGINNING.items() if task_name.startswith(start))
    return _OTHER_APPS.get(task_name) or next(by_beginning, "")


@dataclass(kw_only=True, slots=True)
class TaskRun:
    """A running task on its own device. ``answer`` is the agent's last answer, None if it gave none."""

    task: Task
    params: Params
    state: DeviceState
    answer: str | None = None

    @property
    def goal(self) -> str:
        """The task in words."""
        return self.task.goal.format_map(self.params)

    def score(self) -> float:
        """Returns the success in [0, 1]."""
        return self.task.success(self.state, self.params, self.answer)


def start_task(task_name: str, params_idx: int, own: Mapping[str, Task] = MappingProxyType({})) -> TaskRun:
    """Returns the task set up on a clean device. ``own`` are further tasks; their ``params_idx`` has no limit.

    Raises:
        EnvironmentSetupError: there is no such task or variation, or the task is already solved.
    """
    task = own.get(task_name) or TASKS.get(task_name)
    if task is None:
        known = sorted({*TASKS, *own})
        raise EnvironmentSetupError(f"the simulated phone has no task called {task_name!r}", {"known": known})
    if task_name not in own and not 0 <= params_idx < VARIATIONS:
        raise EnvironmentSetupError(f"params_idx must lie in 0..{VARIATIONS - 1}, not {params_idx}")

    rng = rng_for(task_name, params_idx)
    params = task.make_params(rng)
    run = TaskRun(task=task, params=params, state=DeviceState())
    task.set_up(run.state, params, rng)
    if run.score() != 0.0:
        raise EnvironmentSetupError(f"{task_name} {params_idx} is already solved before the first step")
    return run
