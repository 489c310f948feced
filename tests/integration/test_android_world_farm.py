"""A farm of eight simulated devices under the real ``android_world`` package, from ``start_rollout`` to Samples.

Everything is what runs in production, as processes of their own: server, supervisor, runner, Ray with one actor per
device, the package in the device workers' environment, its adb and gRPC traffic. What stands in: the emulators are the
simulated phone, the engine's replies come from a script, the trainer trains nothing.

Needs the package: set ROLLOUT_BUFFER_TEST_ANDROID_WORLD to the python of an environment that has it and this project.
Takes about eight minutes of two cores.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rollout_buffer_lab.mock_trainer import MockTrainer, RolloutRecord, flat_samples, trainer_args
from rollout_buffer_lab.simulated_phone.interfaces.fault_plan import FaultTrigger
from rollout_buffer_lab.simulated_phone.interfaces.faults import Faults
from rollout_buffer_lab.simulated_phone.interfaces.simulated_sdk import SimulatedSdk, make_simulated_sdk
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from tests.android_world_expert import say
from tests.android_world_script import OtherReply, Script, engine_with, task_params
from tests.integration.conftest import ANDROID_WORLD_PYTHON as PYTHON
from tests.integration.conftest import BufferProcess, needs_android_world
from tests.processes import processes_with
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, needs_android_world, pytest.mark.timeout(3600)]

DEVICES, AT_ONCE, SAMPLES = 8, 16, 2
MAX_ATTEMPTS = 4
TASKS = (
    "AudioRecorderRecordAudio", "AudioRecorderRecordAudioWithFileName", "CameraTakePhoto", "CameraTakeVideo",
    "ClockStopWatchPausedVerify", "ClockStopWatchRunning", "ClockTimerEntry", "ContactsAddContact",
    "FilesDeleteFile", "FilesMoveFile", "MarkorAddNoteHeader", "MarkorChangeNoteContent",
    "MarkorCreateNoteAndSms", "MarkorCreateNote", "MarkorCreateNoteFromClipboard", "MarkorDeleteAllNotes",
    "MarkorDeleteNewestNote", "MarkorDeleteNote", "MarkorEditNote", "MarkorMoveNote",
    "SimpleSmsReply", "SimpleSmsReplyMostRecent", "SimpleSmsResend", "SimpleSmsSend",
    "SimpleSmsSendClipboardContent", "SimpleSmsSendReceivedAddress", "OpenAppTaskEval", "SystemBluetoothTurnOff",
    "SystemBluetoothTurnOn", "SystemBrightnessMax", "SystemBrightnessMin", "SystemCopyToClipboard",
    "SystemWifiTurnOff", "SystemWifiTurnOn", "TurnOffWifiAndTurnOnBluetooth", "TurnOnWifiAndOpenApp",
    "SimpleCalendarLocationOfEvent", "SimpleCalendarNextMeetingWithPerson", "SimpleCalendarDeleteOneEvent",
    "ContactsNewContactDraft",
)  # fmt: skip
assert len(TASKS) == 40
HESITATION = OtherReply(turn=0, reply=say(thinking="I wait a moment first.", action="wait", time=1))
"""The second member of a group takes one action more: without a difference there is nothing for GRPO to learn."""

TRIGGERS = {
    "faultcrash": FaultTrigger(faults=Faults(crash_after_inputs=1)),
    "faultboot": FaultTrigger(
        faults=Faults(crash_after_inputs=1), next_boots=(Faults(exit_at_start=True), Faults(exit_at_start=True))
    ),
    "faulthang": FaultTrigger(faults=Faults(hangs=True)),
    "faultoffline": FaultTrigger(faults=Faults(offline=True)),
    "faultforwarder": FaultTrigger(faults=Faults(dead_forwarder=True)),
    "faultslow": FaultTrigger(faults=Faults(slow_screen_s=1.2), for_s=20.0),
}
HARMLESS = "faultslow"


@pytest.fixture(scope="module")
def params() -> dict[str, Any]:
    return task_params(PYTHON, TASKS)


@contextmanager
def buffer_on(sdk: SimulatedSdk, folder: Path) -> Iterator[BufferProcess]:
    """``rollout-buffer serve`` with a farm on this SDK; afterwards nothing that it started may live."""
    config = folder / "android_world.yaml"
    config.write_text(
        f"device: android_world\nandroid_world_python: {PYTHON}\nnum_workers: {DEVICES}\n"
        f"avd_name: {sdk.avd_name}\nandroid_avd_home: {sdk.avd_home}\nandroid_sdk_root: {sdk.folder}\n"
        f"emulator_path: {sdk.emulator_path}\nadb_path: {sdk.adb_path}\n"
        "resources_per_worker: {num_cpus: 0.1, memory: 0}\n"  # a simulated phone's, not an emulator's
        "boot_timeout_s: 300\nreset_timeout_s: 240\nstep_timeout_s: 60\nscore_timeout_s: 60\n"
        "base_console_port: 5560\nbase_grpc_port: 44100\nbase_adb_server_port: 44400\n",
        encoding="utf-8",
    )
    environment = {
        "ROLLOUT_BUFFER_ANDROID_WORLD_CONFIG": str(config),
        "ROLLOUT_BUFFER_DEVICE_RECORDS": str(folder / "records"),
    }
    buffer = BufferProcess(folder, "--ray-num-cpus", "2", environment=environment)
    try:
        yield buffer
    finally:
        buffer.stop()
    ours = {os.getpid()}
    wait_until(lambda: processes_with(str(folder)).keys() <= ours, 60, "the end of everything that was started")
    assert not list((folder / "records").glob("[0-9]*"))


def write_input(folder: Path) -> Path:
    path = folder / "tasks.jsonl"
    lines = [
        json.dumps({"instance_id": f"{name}-0", "metadata": {"task_name": name, "params_idx": 0}}) for name in TASKS
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def train(buffer: BufferProcess, engine_port: int, input_file: Path, groups: int) -> RolloutRecord:
    """One rollout of that many groups, by the trainer side that ships."""
    args = trainer_args(
        rollout_buffer_url=buffer.url,
        rollout_buffer_job_id="farm",
        rollout_task_type="android_world",
        prompt_data=str(input_file),
        rollout_batch_size=groups,
        n_samples_per_prompt=SAMPLES,
        rollout_num_process=AT_ONCE,
        rollout_max_response_len=1024,
        sglang_router_port=engine_port,
        hf_checkpoint=str(DEMO_TOKENIZER_PATH),
        save=str(input_file.parent / "checkpoints"),
        rollout_buffer_options={
            "max_attempts": MAX_ATTEMPTS,
            "android_world": {"max_turns": 40, "max_context_len": 65536},
        },
    )
    (record,) = MockTrainer(args).train(1)
    return record


def is_over(job: Mapping[str, Any]) -> bool:
    return bool(job["slots"]["open"] == 0)


def test_faults_in_a_third_of_the_episodes_cost_attempts_and_never_make_a_reward(
    folder: Path, params: dict[str, Any]
) -> None:
    """Two groups are struck in every attempt and fail; of the others each struck slot is filled by a later attempt."""
    sdk = make_simulated_sdk(folder / "sdk", python=PYTHON)
    sdk.fault_plan.set_triggers(TRIGGERS)
    sdk.fault_plan.add_next_boots([Faults(exit_at_start=True), Faults(never_boots=True)])
    replies: dict[tuple[int, int], tuple[OtherReply, ...]] = {
        (position, 1): (HESITATION,) for position in range(len(TASKS))
    }
    struck: dict[tuple[int, int], str] = {}
    doomed = (13, 26)
    words = tuple(TRIGGERS)
    for number, slot_number in enumerate(range(0, len(TASKS) * SAMPLES, 3)):
        struck[divmod(slot_number, SAMPLES)] = words[number % len(words)]
    for position in doomed:
        struck |= {(position, slot): "faultcrash" for slot in range(SAMPLES)}
    for place, word in struck.items():
        attempts = 1000 if place[0] in doomed else 1
        strike = OtherReply(turn=1, reply=say(thinking="A fault.", action="type", text=word), attempts=attempts)
        replies[place] = (*replies.get(place, ()), strike)
    with (
        engine_with(Script(tasks=TASKS, params=params, other_replies=replies)) as port,
        buffer_on(sdk, folder) as buffer,
    ):
        record = train(buffer, port, write_input(folder), len(TASKS) - len(doomed))
        wait_until(lambda: is_over(buffer.client.job("farm")), 600, "the end of the job")
        job = buffer.client.job("farm")
    samples = flat_samples(record.groups)
    assert len(samples) == (len(TASKS) - len(doomed)) * SAMPLES
    slots = job["slots"]
    assert slots["submitted"] == len(TASKS) * SAMPLES
    assert (slots["delivered"], slots["failed"]) == (len(samples), len(doomed) * SAMPLES)
    # Every reward is that of an episode which was played to its end and solved its task.
    assert all(one.metadata["success"] and not one.remove_sample for one in samples)
    harmful = [place for place, word in struck.items() if word != HARMLESS]
    assert job["attempts"]["failed"] >= len(harmful)
