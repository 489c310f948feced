"""Faults laid out beforehand: at the next boots, or when a certain word is typed."""

from __future__ import annotations

import importlib.util
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout_buffer_lab.simulated_phone.interfaces.fault_plan import FaultPlan, FaultTrigger
from rollout_buffer_lab.simulated_phone.interfaces.faults import Faults
from tests.waiting import wait_until

WELL = Faults()
STATE = ["shell", "settings", "get", "global", "wifi_on"]


@pytest.fixture
def folder() -> Iterator[Path]:
    """pytest's own folders are too deep for the sockets of Unix."""
    with tempfile.TemporaryDirectory(prefix="aw_") as path:
        yield Path(path)


def test_each_of_the_next_boots_takes_its_own_fault_once(folder: Path) -> None:
    plan = FaultPlan(folder)
    plan.add_next_boots([Faults(exit_at_start=True)])
    plan.add_next_boots([Faults(never_boots=True)])
    assert plan.of_this_boot() == Faults(exit_at_start=True)
    assert FaultPlan(folder).of_this_boot() == Faults(never_boots=True)
    assert plan.of_this_boot() == WELL
    plan.set_boot_faults(Faults(boot_s=3.0))
    assert plan.of_this_boot() == plan.of_this_boot() == Faults(boot_s=3.0)


@pytest.mark.skipif(importlib.util.find_spec("android_env") is None, reason="the package android-env is not installed")
def test_a_typed_trigger_breaks_just_this_phone_and_only_for_its_time(folder: Path) -> None:
    from rollout_buffer_lab.simulated_phone.interfaces.emulator_process import Emulator, EmulatorArguments

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    plan = FaultPlan(folder)
    later = Faults(exit_at_start=True)
    plan.set_triggers({"hush": FaultTrigger(faults=Faults(offline=True), for_s=1.0, next_boots=(later,))})
    arguments = EmulatorArguments(folder=folder, avd_name="", console_port=5554, grpc_port=port)
    emulator = Emulator(arguments, WELL)
    try:
        assert emulator.answer(["shell", "input", "text", "harmless"]).code == 0
        assert emulator.answer(STATE).code == 0
        assert b"offline" in emulator.answer(["shell", "input", "text", "hush"]).text
        assert emulator.answer(STATE).code != 0
        wait_until(lambda: emulator.answer(STATE).code == 0)
        assert plan.of_this_boot() == later
    finally:
        emulator.close()


@pytest.mark.skipif(importlib.util.find_spec("android_env") is None, reason="the package android-env is not installed")
def test_inputs_of_a_slow_screen_are_done_in_the_order_in_which_they_came(folder: Path) -> None:
    from rollout_buffer_lab.simulated_phone.interfaces.emulator_process import LateInputs

    done: list[str] = []
    late = LateInputs(lambda words: done.append(words[-1]))
    late.put(["typed while it was slow"], 0.5)
    late.put(["typed when it was well again"], 0.0)
    assert done == []
    wait_until(lambda: not late.pending)
    assert done == ["typed while it was slow", "typed when it was well again"]
    late.put(["too late"], 60)
    late.close()
    assert len(done) == 2
