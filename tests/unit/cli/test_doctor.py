"""The doctor names exactly what is missing, with a remedy for each, and nothing that is there."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from typer.testing import CliRunner

from slime_plugins.rollout_buffer.cli import doctor, host_checks
from slime_plugins.rollout_buffer.cli.app import app
from slime_plugins.rollout_buffer.cli.doctor import Examination, examine
from slime_plugins.rollout_buffer.cli.host_checks import Finding, State
from slime_plugins.rollout_buffer.generator.android_world.config import CONFIG_VARIABLE, AndroidWorldSettings


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


def test_an_extra_that_is_not_there_is_named_with_what_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(doctor._EXTRAS, "context-editing", ("bm25s", "no_such_parent.module"))
    lacking = examined(AndroidWorldSettings(), tmp_path)["extra context-editing"]
    assert (lacking.state, "no_such_parent.module" in lacking.detail) == (State.NOT_NEEDED, True)
    assert "[context-editing]" in lacking.remedy


def test_a_browser_for_web_pages_is_found_or_told_how_to_get(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PLAYWRIGHT_BROWSERS_PATH", str(tmp_path))
    monkeypatch.delenv("ROLLOUT_BUFFER_CHROMIUM", raising=False)
    lacking = examined(AndroidWorldSettings(), tmp_path)["browser (task type miniwob)"]
    assert (lacking.state, "apt install chromium" in lacking.remedy) == (State.NOT_NEEDED, True)
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
    monkeypatch.setattr(host_checks, "_FREE_BYTES_PER_EMULATOR", 0)
    monkeypatch.setattr(host_checks, "MIN_MEMORY_OF_AN_EMULATOR", 0)
    monkeypatch.setattr(host_checks, "_kvm_problem", lambda path: "")
    assert not [one for one in examined(settings, tmp_path).values() if one.state is State.MISSING]


def test_an_adb_that_fails_is_missing(tmp_path: Path) -> None:
    (tmp_path / "adb").write_text("#!/bin/sh\necho no such library >&2\nexit 1\n")
    (tmp_path / "adb").chmod(0o755)
    finding = examined(bare(tmp_path), tmp_path)["Android SDK: platform-tools"]
    assert (finding.state, finding.detail) == (State.MISSING, f"{tmp_path}/adb, no such library")


def test_ten_devices_of_a_tenth_fit_on_one_cpu() -> None:
    settings = AndroidWorldSettings.model_validate({"num_workers": 20, "resources_per_worker": {"num_cpus": 0.1}})
    assert host_checks.room_for_devices(settings, {"CPU": 1.0, "memory": 2.0**40}) == 10


def test_a_clone_that_exists_wants_no_more_disk_than_it_lacks(tmp_path: Path) -> None:
    settings = bare(tmp_path).model_copy(update={"num_workers": 3, "android_avd_home": str(tmp_path)})
    for name, size in (("0", 4096), ("2", 64 * 4096)):
        clone = tmp_path / f"{settings.base_avd_name_pattern.format(name)}.avd"
        clone.mkdir()
        (clone / "userdata.img").write_bytes(b"x" * size)
    for devices, wanted in ((3, 8 + 7), (1, 0)):
        host = host_checks.HostPlan(settings=settings, devices=devices)
        assert host_checks._bytes_wanted(host, 8 * 4096) == wanted * 4096


def test_what_copies_of_the_base_device_take_is_computed_and_a_base_that_runs_is_named(tmp_path: Path) -> None:
    settings = bare(tmp_path).model_copy(update={"num_workers": 64, "android_avd_home": str(tmp_path / "avd")})
    base = tmp_path / "avd" / "AndroidWorldAvd.avd"
    base.mkdir(parents=True)
    (base / "config.ini").touch()
    (base / "multiinstance.lock").touch()
    findings = examined(settings, tmp_path)
    assert findings["base device can be cloned"].state is State.OK
    assert "64 of them take 0 GiB more" in findings["copies of the base device"].detail
    (base / "hardware-qemu.ini.lock").write_text(f"{os.getpid()}")
    running = examined(settings, tmp_path)["base device can be cloned"]
    assert (running.state, running.detail) == (State.MISSING, f"the process {os.getpid()} runs it")


def test_an_engine_that_does_not_answer_is_missing(tmp_path: Path) -> None:
    finding = examined(AndroidWorldSettings(), tmp_path, "http://127.0.0.1:9")["inference engine"]
    assert (finding.state, "ConnectionError" in finding.detail) == (State.MISSING, True)


def test_the_doctors_exit_code_json_and_text_say_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "host.yaml"
    config.write_text(f"device: android_world\nemulator_path: {tmp_path}/none\nandroid_world_python: {tmp_path}/none\n")
    monkeypatch.setenv(CONFIG_VARIABLE, str(config))
    result = CliRunner().invoke(app, ["doctor", "--json", "--data-dir", str(tmp_path)])
    findings = json.loads(result.stdout)["findings"]
    states = {one["name"]: one["state"] for one in findings}
    assert (result.exit_code, states["package android_world"]) == (1, "missing")
    shown = CliRunner().invoke(app, ["doctor", "--data-dir", str(tmp_path)])
    assert shown.exit_code == 1
    assert "sdkmanager" in shown.stdout
    remedies = {f"{one['name']}: {one['remedy']}" for one in findings if one["remedy"]}
    assert remedies <= set(shown.stdout.splitlines())


def test_what_a_node_of_a_cluster_lacks_is_said_and_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The nodes' findings come from another process, as JSON."""
    findings = [{"name": "10.0.0.2: KVM", "state": "missing", "detail": "there is no /dev/kvm", "remedy": "enable it"}]

    def answer(command: list[str], **_options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(
            command, 0, json.dumps(findings) if "node_checks" in command[-2] else "joins"
        )

    monkeypatch.setattr(doctor, "subprocess", SimpleNamespace(**vars(subprocess) | {"run": answer}))
    settings = ["--android", "device=android_world", "--data-dir", str(tmp_path)]
    with mock.patch.dict(os.environ):  # the settings of --android go there
        done = CliRunner().invoke(app, ["doctor", "--ray-address", "10.0.0.1:6379", *settings])
    assert "10.0.0.2: KVM: enable it" in done.output
    assert done.exit_code == 1
