"""The doctor names exactly what is missing, with a remedy for each, and nothing that is there."""

from __future__ import annotations

import json
import os
import socket
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slime_plugins.rollout_buffer.cli import doctor
from slime_plugins.rollout_buffer.cli.app import app
from slime_plugins.rollout_buffer.cli.doctor import Examination, Finding, State, examine, verdict
from slime_plugins.rollout_buffer.generator.android_world.config import CONFIG_VARIABLE, AndroidWorldSettings

ROOT = Path(__file__).resolve().parents[3]


def examined(settings: AndroidWorldSettings, tmp_path: Path, engine_url: str | None = None) -> dict[str, Finding]:
    examination = Examination(
        settings=settings, data_dir=tmp_path / "data", engine_url=engine_url, kvm=tmp_path / "kvm"
    )
    return {finding.name: finding for finding in examine(examination)}


@pytest.fixture(autouse=True)
def nothing_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")


def bare(tmp_path: Path) -> AndroidWorldSettings:
    return AndroidWorldSettings(
        device="android_world",
        android_avd_home=str(tmp_path / "avd"),
        emulator_path=str(tmp_path / "emulator"),
        adb_path=str(tmp_path / "adb"),
        android_world_python=str(tmp_path / "python"),
        num_workers=1,
    )


def test_on_a_bare_machine_all_that_emulators_need_is_named_with_its_remedy(tmp_path: Path) -> None:
    findings = examined(bare(tmp_path), tmp_path)
    missing = {name for name, finding in findings.items() if finding.state is State.MISSING}
    assert missing - {"disk of the data folder", "disk of the virtual devices", "memory"} == {
        "KVM",
        "Android SDK: emulator",
        "Android SDK: platform-tools",
        "virtual device AndroidWorldAvd",
        "package android-env",
        "package android_world",
        "package slime-rollout-buffer, for the devices",
        "ffmpeg",
    }
    assert all(bool(finding.remedy) == (finding.state is not State.OK) for finding in findings.values())


def test_of_what_a_simulated_phone_does_not_need_nothing_is_said(tmp_path: Path) -> None:
    findings = examined(AndroidWorldSettings(android_avd_home=str(tmp_path)), tmp_path)
    assert not findings.keys() & {"KVM", "ffmpeg", "memory", "Android SDK: emulator"}
    assert not [one for one in findings.values() if one.state is State.MISSING and "disk" not in one.name]


def test_every_extra_that_a_user_may_want_has_its_row(tmp_path: Path) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    rows = {name.removeprefix("extra ") for name in examined(AndroidWorldSettings(), tmp_path) if "extra " in name}
    assert rows == extras.keys() - {"bench", "dev", "docs"}  # those are for who works on the project


def test_an_extra_that_is_not_there_is_named_with_what_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(doctor._EXTRAS, "context-editing", ("bm25s", "no_such_parent.module"))
    lacking = examined(AndroidWorldSettings(), tmp_path)["extra context-editing"]
    assert (lacking.state, "no_such_parent.module" in lacking.detail) == (State.ABSENT, True)
    assert "[context-editing]" in lacking.remedy


def test_a_browser_for_web_pages_is_found_or_told_how_to_get(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PLAYWRIGHT_BROWSERS_PATH", str(tmp_path))
    monkeypatch.delenv("ROLLOUT_BUFFER_CHROMIUM", raising=False)
    lacking = examined(AndroidWorldSettings(), tmp_path)["browser (task type miniwob)"]
    assert (lacking.state, "apt install chromium" in lacking.remedy) == (State.ABSENT, True)
    (tmp_path / "chromium").write_text("#!/bin/sh\n")
    (tmp_path / "chromium").chmod(0o755)
    there = examined(AndroidWorldSettings(), tmp_path)["browser (task type miniwob)"]
    assert (there.state, there.detail) == (State.OK, str(tmp_path / "chromium"))


def test_what_is_there_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = bare(tmp_path)
    for path in (tmp_path / "emulator", tmp_path / "adb", tmp_path / "python", tmp_path / "ffmpeg"):
        path.write_text("#!/bin/sh\nexit 0\n")
        path.chmod(0o755)
    (tmp_path / "kvm").touch()
    (tmp_path / "avd" / "AndroidWorldAvd.avd").mkdir(parents=True)
    (tmp_path / "avd" / "AndroidWorldAvd.avd" / "config.ini").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(doctor, "_FREE_BYTES_SERVER", 0)
    monkeypatch.setattr(doctor, "_FREE_BYTES_PER_EMULATOR", 0)
    monkeypatch.setattr(doctor, "_MEMORY_PER_EMULATOR", 0)
    monkeypatch.setattr(doctor, "_kvm_problem", lambda path: "")
    assert not [one for one in examined(settings, tmp_path).values() if one.state is State.MISSING]


def test_the_verdict_names_what_is_missing_and_nothing_else() -> None:
    found = [Finding(name=name, state=state, detail="") for name, state in zip("abc", State, strict=True)]
    assert verdict(found, "android_world") == "Missing for device: android_world: b. The remedies stand beside them."
    assert verdict(found[:1], "simulated") == "Nothing is missing for device: simulated."


def test_a_file_called_kvm_is_not_taken_for_one(tmp_path: Path) -> None:
    (tmp_path / "kvm").touch()
    finding = examined(bare(tmp_path), tmp_path)["KVM"]
    assert (finding.state, "is no KVM device" in finding.detail) == (State.MISSING, True)


def test_more_emulators_than_the_memory_holds_are_named(tmp_path: Path) -> None:
    finding = examined(bare(tmp_path).model_copy(update={"num_workers": 10_000}), tmp_path)["memory"]
    assert finding.state is State.MISSING
    assert "10000 emulators" in finding.detail


def test_spare_devices_want_room_like_the_others(tmp_path: Path) -> None:
    findings = examined(bare(tmp_path).model_copy(update={"num_workers": 2, "spare_devices": 3}), tmp_path)
    assert "5 emulators" in findings["memory"].detail
    assert "60 GB wanted" in findings["disk of the virtual devices"].detail
    assert "5 wanted" in findings["ports of the emulators"].detail


def test_what_copies_of_the_base_device_take_is_computed_and_a_base_that_runs_is_named(tmp_path: Path) -> None:
    settings = bare(tmp_path).model_copy(update={"num_workers": 64, "android_avd_home": str(tmp_path / "avd")})
    base = tmp_path / "avd" / "AndroidWorldAvd.avd"
    base.mkdir(parents=True)
    (base / "config.ini").touch()
    (base / "multiinstance.lock").touch()
    findings = examined(settings, tmp_path)
    assert findings["base device can be cloned"].state is State.OK
    assert "64 of them take 0 GB" in findings["copies of the base device"].detail
    (base / "hardware-qemu.ini.lock").write_text(f"{os.getpid()}")
    running = examined(settings, tmp_path)["base device can be cloned"]
    assert (running.state, running.detail) == (State.MISSING, f"the process {os.getpid()} runs it")


def test_a_port_that_is_taken_leaves_one_emulator_less(tmp_path: Path) -> None:
    settings = bare(tmp_path).model_copy(update={"base_console_port": 5682})
    free = examined(settings, tmp_path)["ports of the emulators"]
    assert (free.state, free.detail) == (State.OK, "1 pairs of console ports are free from 5682 on, 1 wanted")
    with socket.create_server(("127.0.0.1", 5683)):
        taken = examined(settings, tmp_path)["ports of the emulators"]
    assert (taken.state, taken.detail) == (State.MISSING, "0 pairs of console ports are free from 5682 on, 1 wanted")


def test_the_accessibility_forwarder_is_named_with_the_device_that_needs_it(tmp_path: Path) -> None:
    remedy = examined(bare(tmp_path), tmp_path)["virtual device AndroidWorldAvd"].remedy
    assert "com.google.androidenv.accessibilityforwarder" in remedy


def test_an_engine_that_does_not_answer_is_missing(tmp_path: Path) -> None:
    finding = examined(AndroidWorldSettings(), tmp_path, "http://127.0.0.1:9")["inference engine"]
    assert (finding.state, "ConnectionError" in finding.detail) == (State.MISSING, True)


def test_the_command_tells_by_its_exit_code_and_in_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "host.yaml"
    config.write_text(f"device: android_world\nemulator_path: {tmp_path}/none\nandroid_world_python: {tmp_path}/none\n")
    monkeypatch.setenv(CONFIG_VARIABLE, str(config))
    result = CliRunner().invoke(app, ["doctor", "--json", "--data-dir", str(tmp_path)])
    states = {one["name"]: one["state"] for one in json.loads(result.stdout)["findings"]}
    assert (result.exit_code, states["package android_world"]) == (1, "missing")
    shown = CliRunner().invoke(app, ["doctor", "--data-dir", str(tmp_path)])
    assert shown.exit_code == 1
    assert "sdkmanager" in shown.stdout
