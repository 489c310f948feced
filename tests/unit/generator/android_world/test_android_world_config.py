"""Settings: the shipped file is the defaults, mistakes are named with key and line, jobs may not touch the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.generator.android_world.config import (
    CONFIG_VARIABLE,
    JOB_KEYS,
    SETTING_PREFIX,
    SHIPPED_CONFIG,
    AndroidWorldSettings,
    environment_for,
    load_settings,
    read_settings,
)


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    return tmp_path / "mine.yaml"


def test_the_shipped_file_spells_out_exactly_the_defaults() -> None:
    assert read_settings(SHIPPED_CONFIG) == AndroidWorldSettings()
    values = yaml.safe_load(SHIPPED_CONFIG.read_text(encoding="utf-8"))
    assert set(values) == set(AndroidWorldSettings.model_fields)
    assert set(values["reward"]) == set(type(AndroidWorldSettings().reward).model_fields)


def test_the_variable_names_the_hosts_file_when_a_job_starts(
    config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config_file.write_text("num_workers: 64\nresources_per_worker:\n  num_cpus: 4\n", encoding="utf-8")
    monkeypatch.setenv(CONFIG_VARIABLE, str(config_file))
    settings = load_settings({})
    assert (settings.num_workers, settings.resources_per_worker.num_cpus) == (64, 4)


def test_a_job_overrides_key_by_key_also_within_a_section() -> None:
    settings = load_settings({"android_world": {"max_turns": 5, "reward": {"thinking_bonus": 0.2}}})
    assert (settings.max_turns, settings.reward.thinking_bonus, settings.reward.step_decay) == (5, 0.2, 0.1)


@pytest.mark.parametrize("key", sorted(set(AndroidWorldSettings.model_fields) - JOB_KEYS))
def test_what_belongs_to_the_host_is_refused_from_a_job(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"android_world\.{key} belongs to the host"):
        load_settings({"android_world": {key: "/bin/sh"}})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"max_turn": 5}, "android_world.max_turn is not a setting"),
        ({"max_turns": 0}, "android_world.max_turns: Input should be greater than or equal to 1, not 0"),
        ({"reward": {"premature_penalty": 3}}, "android_world.reward.premature_penalty: "),
        ({"rollout_mode": "backwards"}, "android_world.rollout_mode: "),
        ("max_turns=5", "must be an object"),
    ],
)
def test_a_wrong_override_is_named(overrides: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings({"android_world": overrides})
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_workers: 2\nmax_turn: 5\n", "mine.yaml: line 2: max_turn is not a setting; did you mean max_turns?"),
        ("\nnum_cpus: 5\n", "line 2: num_cpus is not a setting; did you mean resources_per_worker.num_cpus?"),
        ("toaster: 5\n", "mine.yaml: line 1: toaster is not a setting"),
        ("resources_per_worker:\n  num_cpu: 1\n", "line 2: resources_per_worker.num_cpu is not a setting; did you"),
        (
            "resources_per_worker:\n  num_cpus: 1\n  custom:\n    phone: 0\n",
            "line 4: resources_per_worker.custom.phone:",
        ),
        ("resources_per_worker: 4\n", "line 1: resources_per_worker: "),
        ("evaluation_share: 1\n", "line 1: evaluation_share: Input should be less than 1, not 1"),
        ("# one\n\nmax_turns: many\n", "mine.yaml: line 3: max_turns: "),
        ("reward:\n  step_decay: -1\n", "mine.yaml: line 2: reward.step_decay: "),
        ("num_workers: 2\nnum_workers: 3\n", "mine.yaml: line 2: num_workers was already set in line 1"),
        ("base_avd_name_pattern: worker\n", "line 1: base_avd_name_pattern: must contain {} once"),
        ("\nbase_avd_name_pattern: ../{}\n", "line 2: base_avd_name_pattern: may hold letters, digits"),
        ("avd_name: a/b\n", "line 1: avd_name: may hold letters, digits"),
        ("boot_timeout_s: .inf\n", "line 1: boot_timeout_s: Input should be a finite number"),
        ("num_workers: 2\n7: 8\n", "line 2: 7: Keys should be strings"),
        ("\nnum_workers: yes\n", "mine.yaml: line 2: num_workers: must not be true or false"),
        (
            "resources_per_worker:\n  custom:\n    phone: on\n",
            "line 3: resources_per_worker.custom.phone: must not be true",
        ),
        ("device: toaster\n", "line 1: device: must be android_world"),
        ("- a\n- b\n", "must be a list of `key: value` lines"),
        ("max_turns: [1\n", "is not valid YAML"),
    ],
)
def test_a_mistake_in_the_file_is_named_with_its_line(config_file: Path, text: str, message: str) -> None:
    config_file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read_settings(config_file)
    assert message in caught.value.message


# ---- layers ----------------------------------------------------------------------------------------------------------


def test_the_environment_comes_before_the_file_and_the_command_line_before_both(
    config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config_file.write_text("num_workers: 3\nspare_devices: 3\nmax_turns: 3\nquarantine_s: 3\n", encoding="utf-8")
    monkeypatch.setenv(f"{SETTING_PREFIX}SPARE_DEVICES", "4")
    monkeypatch.setenv(f"{SETTING_PREFIX}MAX_TURNS", "4")
    for name, value in environment_for(config_file, ["max_turns=5", "reward.step_decay=0.5"]).items():
        monkeypatch.setenv(name, value)
    settings = load_settings({"android_world": {"history_images": 6}})
    found = (settings.num_workers, settings.spare_devices, settings.max_turns, settings.history_images)
    assert found == (3, 4, 5, 6)
    assert (settings.quarantine_s, settings.reward.step_decay, settings.recycle_after_episodes) == (3, 0.5, None)
    assert load_settings({"android_world": {"max_turns": 7}}).max_turns == 7


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("num_workers", "--android num_workers: must be KEY=VALUE"),
        ("=4", "--android =4: must be KEY=VALUE"),
        ("num_workers=0", "--android num_workers=0: num_workers: Input should be greater than or equal to 1, not 0"),
        ("reward.step_deca=1", "reward.step_deca is not a setting; did you mean reward.step_decay?"),
        ("device=toaster", "--android device=toaster: device: must be android_world, attached, simulated"),
    ],
)
def test_a_wrong_option_is_named_before_anything_starts(assignment: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        environment_for(None, [assignment])
    assert message in caught.value.message


def test_a_mistake_is_blamed_on_the_layer_that_made_it(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config_file.write_text("num_workers: 0\n", encoding="utf-8")
    monkeypatch.setenv(f"{SETTING_PREFIX}NUM_WORKERS", "-1")
    with pytest.raises(ConfigError, match=r"^environment variable .*NUM_WORKERS: num_workers: .*, not -1$"):
        environment_for(config_file, [])
    assert environment_for(config_file, ["num_workers=1"])[CONFIG_VARIABLE] == str(config_file)


DOCUMENTED = """
max_turns: 5
max_context_len: 16384
num_workers: 64
resources_per_worker:
  num_cpus: 4
  memory: 8589934592
avd_name: "AndroidWorldAvd"
base_avd_name_pattern: "slime_aw_{}"
base_console_port: 5556
base_grpc_port: 8554
base_adb_server_port: 5037
android_avd_home: "/root/android/avd/"
android_sdk_root: "/root/android/"
emulator_path: "/root/android/emulator/emulator"
adb_path: "/root/android/platform-tools/adb"
"""


@pytest.mark.parametrize(
    ("text", "device"),
    [
        (DOCUMENTED, "android_world"),
        ("num_workers: 64\n", "android_world"),
        ("emulator_path: /opt/emulator\n", "android_world"),
        ('base_avd_name_pattern: "mine_{}"\n', "android_world"),
        (DOCUMENTED + "device_pool: local\n", "android_world"),
        (DOCUMENTED + "device: simulated\n", "simulated"),
        ("device_pool: local\nnum_workers: 3\n", "simulated"),
        ("max_turns: 30\n", "simulated"),
    ],
)
def test_a_farms_file_means_real_devices_unless_it_says_otherwise(text: str, device: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)

    assert read_settings(file).device == device


def test_the_documented_file_is_read_as_it_stands_and_is_the_examples(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(DOCUMENTED)
    example = Path(__file__).resolve().parents[4] / "examples" / "android_world" / "config.yaml"

    settings = read_settings(file)
    assert (settings.max_turns, settings.max_context_len, settings.num_workers) == (5, 16384, 64)
    assert (settings.resources_per_worker.num_cpus, settings.resources_per_worker.memory) == (4, 8589934592)
    assert read_settings(example) == settings


def test_real_devices_have_the_documented_defaults_and_variables_win(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLOUT_BUFFER_ANDROID_WORLD__DEVICE", "android_world")
    real = load_settings({})
    monkeypatch.setenv("ROLLOUT_BUFFER_ANDROID_WORLD__NUM_WORKERS", "3")

    assert (real.num_workers, real.resources_per_worker.num_cpus) == (64, 4)
    assert real.resources_per_worker.memory == 8 * 1024**3
    assert load_settings({}).num_workers == 3
    monkeypatch.delenv("ROLLOUT_BUFFER_ANDROID_WORLD__DEVICE")
    assert load_settings({}).resources_per_worker.num_cpus == 0.1


def test_a_real_device_reserves_what_its_emulator_takes_with_its_memory_flag(config_file: Path) -> None:
    for flags, gib in (("-gpu host", 8), ("-memory 4096", 8), ("-no-audio -memory 8192", 11)):
        config_file.write_text(f"device: android_world\nemulator_flags: {flags}\n", encoding="utf-8")
        assert read_settings(config_file).resources_per_worker.memory == gib * 1024**3
