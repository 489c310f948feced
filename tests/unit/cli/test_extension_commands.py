"""A command of an installed package is one of ours; a broken one says so when it is called, and stops no other."""

from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

from slime_plugins.rollout_buffer.cli.commands import extensions
from slime_plugins.rollout_buffer.extensions import Extension, Group

HERE = __name__


def works(count: int = 1) -> None:
    typer.echo(f"worked {count}")


def of_two_types(value: int | str) -> None:
    """A signature that typer refuses."""


NO_COMMAND = 7


@pytest.mark.parametrize(
    "target", ["no_such_module:command", f"{HERE}:no_such_name", f"{HERE}:NO_COMMAND", f"{HERE}:of_two_types"]
)
def test_a_command_that_cannot_be_run_stops_no_other(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    targets = {"broken": target, "works": f"{HERE}:works"}
    of_packages = {
        name: Extension(group=Group.COMMANDS, name=name, target=to, package="theirs 1.0")
        for name, to in targets.items()
    }
    monkeypatch.setattr(extensions, "installed", lambda group: of_packages)
    app = typer.Typer()
    extensions.register(app)
    assert CliRunner().invoke(app, ["works", "--count", "3"]).output == "worked 3\n"
    broken = CliRunner().invoke(app, ["broken", "--any", "thing"])
    assert broken.exit_code == 1
    assert "'broken' of theirs 1.0" in broken.output
