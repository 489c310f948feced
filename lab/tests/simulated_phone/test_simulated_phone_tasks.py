"""The simulated phone's tasks: unsolved at the start, the same everywhere. ``TestPhone`` solves each by looking."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollout_buffer_lab.simulated_phone.apps.launcher import arrange_home
from rollout_buffer_lab.simulated_phone.device_state.contacts import add_contact, delete_contact
from rollout_buffer_lab.simulated_phone.device_state.packages import INSTALLED_APPS
from rollout_buffer_lab.simulated_phone.device_state.state import DeviceState
from rollout_buffer_lab.simulated_phone.geometry import Rect
from rollout_buffer_lab.simulated_phone.palette import Surface
from rollout_buffer_lab.simulated_phone.phone import SimulatedPhone, SimulatedPhoneConfig
from rollout_buffer_lab.simulated_phone.tasks import registry
from rollout_buffer_lab.simulated_phone.tasks.base import Task
from rollout_buffer_lab.simulated_phone.tasks.registry import TASKS, VARIATIONS
from rollout_buffer_lab.simulated_phone.user_interface import UserInterface
from rollout_buffer_lab.simulated_phone.widgets import WidgetKind
from slime_plugins.rollout_buffer.errors import EnvironmentSetupError
from slime_plugins.rollout_buffer.generator.gui_agent.device_actions import Action, ActionKind
from tests.simulated_phone_player import Player


@pytest.mark.parametrize("task_name", sorted(TASKS))
def test_no_variation_is_solved_at_the_start(task_name: str) -> None:
    for params_idx in range(VARIATIONS):
        run = registry.start_task(task_name, params_idx)
        assert run.score() == 0.0
        assert "{" not in run.goal
        run.state.close()


def test_a_phone_plays_tasks_of_ones_own_in_as_many_variations_as_one_likes() -> None:
    task = Task(
        name="OpenAnything",
        step_budget=3,
        goal="Open the app {app_name}.",
        make_params=lambda rng: {"app_name": rng.choice(("Clock", "Camera"))},
        success=lambda state, params, answer: float("clock" in state.focused_component),
    )
    phone = SimulatedPhone(SimulatedPhoneConfig(tasks={task.name: task}))

    seen = phone.reset("OpenAnything", 10**6)
    phone.step(Action(kind=ActionKind.OPEN, text="Clock"))

    assert seen.goal in ("Open the app Clock.", "Open the app Camera.")
    assert phone.score() == 1.0
    assert phone.reset("SystemWifiTurnOn", 0).goal
    with pytest.raises(EnvironmentSetupError, match="no task called 'OpenAnything'"):
        SimulatedPhone().reset("OpenAnything", 0)


def test_nothing_of_a_deleted_contact_is_left_in_the_database() -> None:
    run = registry.start_task("ContactsAddContact", 0)
    database = run.state.contacts_db

    def counts() -> list[int]:
        return [database.query(f"SELECT count(*) AS n FROM {table}")[0]["n"] for table in _CONTACT_TABLES]

    before = counts()
    contact_id = add_contact(run.state, "Ada", "Lovelace", "12345")
    assert counts() == [before[0] + 1, before[1] + 1, before[2] + 2]
    delete_contact(run.state, contact_id)
    assert counts() == before
    run.state.close()


_CONTACT_TABLES = ("contacts", "raw_contacts", "data")


def test_an_arranged_home_screen_shows_those_apps_in_that_order_each_in_its_colour() -> None:
    def tiles(state: DeviceState) -> list[tuple[str, Rect, Surface | None]]:
        widgets = UserInterface(state).screen().widgets
        return [
            (each.text, each.bounds, each.surface) for each in widgets if each.kind is WidgetKind.ICON and each.text
        ]

    arranged_state = DeviceState()
    arrange_home(arranged_state, ("Clock", "Settings"))
    plain, arranged = tiles(DeviceState()), tiles(arranged_state)

    assert [text for text, _, _ in plain] == [app.label for app in INSTALLED_APPS]
    assert [text for text, _, _ in arranged] == ["Clock", "Settings"]
    assert [bounds for _, bounds, _ in arranged] == [bounds for _, bounds, _ in plain[:2]]
    colour_of = {text: surface for text, _, surface in plain}
    assert all(surface is colour_of[text] for text, _, surface in arranged)


def test_goals_and_first_screens_are_the_same_in_another_process() -> None:
    program = (
        "import json\n"
        "from rollout_buffer_lab.simulated_phone.phone import SimulatedPhone\n"
        "phone = SimulatedPhone()\n"
        "looks = [phone.reset(name, 3) for name in ('SimpleSmsReply', 'FilesMoveFile', 'OpenAppTaskEval')]\n"
        "print(json.dumps([[look.goal, look.screenshot.sha256] for look in looks]))\n"
    )
    printed = [
        subprocess.run(
            [sys.executable, "-c", program],
            cwd=Path(__file__).parents[3],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
            timeout=50,
        ).stdout
        for seed in ("1", "2")
    ]
    phone = SimulatedPhone()
    here = [phone.reset(name, 3) for name in ("SimpleSmsReply", "FilesMoveFile", "OpenAppTaskEval")]
    assert printed[0] == printed[1]
    assert json.loads(printed[0]) == [[look.goal, look.screenshot.sha256] for look in here]


def test_a_wrong_answer_earns_nothing() -> None:
    phone = SimulatedPhone()
    player = Player(phone, phone.reset("SimpleCalendarLocationOfEvent", 0))
    player.answer("somewhere else")
    assert phone.score() == 0.0
