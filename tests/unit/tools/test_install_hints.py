"""slime and this wheel in one environment are reported in one line; an extra comes from where the project came."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slime_plugins.rollout_buffer.cli import doctor
from slime_plugins.rollout_buffer.cli.host_checks import State
from slime_plugins.rollout_buffer.install_hints import advice_on_two_slimes, install_extra
from tools import install_into_slime

ROOT = Path(__file__).resolve().parents[3]
SLIME = os.environ.get("ROLLOUT_BUFFER_TEST_SLIME", "")
SLIME_PYTHON = os.environ.get("ROLLOUT_BUFFER_TEST_SLIME_PYTHON", sys.executable)
REMEDY = "pip uninstall slime-rollout-buffer here, and install the overlay into slime's checkout"


def installed(site: Path, name: str, *, package: bool = False) -> str:
    """A site-packages folder with a distribution of that name, and slime's regular package when asked for."""
    info = site / f"{name.replace('-', '_')}-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n", encoding="utf-8")
    if package:
        (site / "slime").mkdir(exist_ok=True)
        (site / "slime" / "__init__.py").touch()
    return str(site)


def said_by(program: str, folder: Path, *path: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs a program in a folder, with this path of modules."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)


def test_slime_and_the_wheel_in_one_site_packages_are_reported_in_one_line(tmp_path: Path) -> None:
    site = installed(tmp_path, "slime", package=True)
    installed(tmp_path, "slime-rollout-buffer")
    advice = advice_on_two_slimes([site])
    assert advice is not None
    assert REMEDY in advice
    assert str(tmp_path / "slime") in advice
    assert "\n" not in advice


def test_slime_from_elsewhere_or_in_a_checkout_beside_the_wheel_is_reported_too(tmp_path: Path) -> None:
    wheel, checkout = installed(tmp_path / "site", "slime-rollout-buffer"), tmp_path / "checkout"
    (checkout / "slime").mkdir(parents=True)
    (checkout / "slime" / "__init__.py").touch()
    assert REMEDY in (advice_on_two_slimes([str(checkout), wheel]) or "")
    assert REMEDY in (advice_on_two_slimes([installed(tmp_path / "other", "slime"), wheel]) or "")


def test_either_alone_is_not_reported(tmp_path: Path) -> None:
    (tmp_path / "ours" / "slime").mkdir(parents=True)  # a namespace package, as ours is
    assert advice_on_two_slimes([installed(tmp_path / "ours", "slime-rollout-buffer")]) is None
    assert advice_on_two_slimes([installed(tmp_path / "theirs", "slime", package=True)]) is None
    assert advice_on_two_slimes([]) is None


def test_this_environment_has_one_slime() -> None:
    assert advice_on_two_slimes() is None


def test_the_doctor_counts_two_slimes_as_missing_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "advice_on_two_slimes", lambda: "both are here: uninstall one")
    (finding,) = doctor._two_slimes(None)  # type: ignore[arg-type]  # it reads nothing of the examination
    assert (finding.state, finding.detail, finding.remedy) == (State.MISSING, "both are here", "uninstall one")


def test_the_installer_reports_two_slimes_and_checks_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    installed(tmp_path / "site", "slime", package=True)
    monkeypatch.syspath_prepend(installed(tmp_path / "site", "slime-rollout-buffer"))
    (tmp_path / "checkout").mkdir()
    assert install_into_slime.main([str(tmp_path / "checkout"), "--check"]) == 1
    advice, finding = capsys.readouterr().out.splitlines()
    assert REMEDY in advice
    assert "has no overlay" in finding


def test_the_trainers_side_reports_two_slimes_once_where_it_can_be_imported(tmp_path: Path) -> None:
    module = "slime.rollout.agent_rollout"
    site = installed(tmp_path, "slime")
    installed(tmp_path, "slime-rollout-buffer")
    program = f"import {module}; import importlib; importlib.import_module({module!r})"
    assert said_by(program, tmp_path, ROOT, site).stderr.count(REMEDY) == 1


def test_the_command_reports_a_slime_that_hides_this_project(tmp_path: Path) -> None:
    """slime's ``slime_plugins`` has an ``__init__.py``: the wheel's modules cannot be found beside it."""
    (tmp_path / "slime_plugins" / "rollout_buffer").mkdir(parents=True)
    (tmp_path / "slime_plugins" / "__init__.py").touch()
    program = "import sys; import rollout_buffer_command; sys.exit(rollout_buffer_command.main())"
    ended = said_by(program, tmp_path, tmp_path, ROOT)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith("rollout-buffer: slime's own slime_plugins")
    assert "tools/install_into_slime.py" in line


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, "pip install 'slime-rollout-buffer[math]'"),
        ({"url": "https://index.example/x.whl", "archive_info": {}}, "pip install 'slime-rollout-buffer[math]'"),
        ({"url": "file:///opt/a%20b", "dir_info": {"editable": True}}, "pip install --editable '/opt/a b[math]'"),
        ({"url": "file:///opt/clone", "dir_info": {}}, "pip install '/opt/clone[math]'"),
        ({"url": "file:///tmp/x-0.1-py3.whl", "archive_info": {}}, "pip install '/tmp/x-0.1-py3.whl[math]'"),
    ],
)
def test_an_extra_comes_from_where_the_project_came(
    tmp_path: Path, origin: dict[str, object] | None, command: str
) -> None:
    site = installed(tmp_path, "slime-rollout-buffer")
    if origin is not None:
        (info,) = tmp_path.glob("*.dist-info")
        (info / "direct_url.json").write_text(json.dumps(origin), encoding="utf-8")
    assert install_extra("math", [site]) == command


def test_without_an_installation_an_extra_comes_from_a_checkout() -> None:
    assert install_extra("math", []) == "pip install '.[math]' in a checkout of this project"


@pytest.mark.slime
@pytest.mark.skipif(not SLIME, reason="set ROLLOUT_BUFFER_TEST_SLIME to the path of a slime checkout")
def test_a_real_slime_beside_the_wheel_is_reported(tmp_path: Path) -> None:
    site = installed(tmp_path, "slime-rollout-buffer")
    program = "import runpy, sys; print(runpy.run_path(sys.argv[1])['advice_on_two_slimes']())"
    file = ROOT / "slime_plugins" / "rollout_buffer" / "install_hints.py"
    said = subprocess.run(
        [SLIME_PYTHON, "-c", program, str(file)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([SLIME, site])},
        capture_output=True, text=True, check=True, cwd=tmp_path,
    ).stdout  # fmt: skip
    assert f"{Path(SLIME) / 'slime'}" in said
    assert REMEDY in said
