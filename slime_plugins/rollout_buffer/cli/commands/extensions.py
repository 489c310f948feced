"""Commands of other packages (see ``extensions.py``), such as ``demo``, ``engine`` and ``learn`` of the lab."""

from __future__ import annotations

from collections.abc import Callable

import typer

from slime_plugins.rollout_buffer.cli.common import ExitCode, ended
from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.extensions import OF_THE_LAB, Extension, Group, installed, missing


def register(app: typer.Typer) -> None:
    """Adds the commands. One that is not installed or does not load prints its error when it is called."""
    of_packages = installed(Group.COMMANDS)
    own = {command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands}
    for name in OF_THE_LAB[Group.COMMANDS]:
        if name not in of_packages:
            _register_failing(app, name, missing(Group.COMMANDS, name))
    for name, extension in sorted(of_packages.items()):
        if name in own:
            continue  # no extension may replace a command of this project
        try:
            app.command(name)(_checked(extension))
        except ConfigError as error:
            _register_failing(app, name, error.message)


def _checked(extension: Extension) -> Callable[..., object]:
    """Returns the function of a command, after typer has accepted it: an invalid one would break all others.

    Raises:
        ConfigError: it cannot be loaded, or is no command.
    """
    function = extension.load()
    alone = typer.Typer()
    try:
        alone.command(extension.name)(function)
        typer.main.get_command(alone)
    except Exception as error:  # an extension may raise anything
        raise ConfigError(
            f"{extension.name!r} of {extension.package} ({extension.target}) is no command: "
            f"{type(error).__name__}: {error}"
        ) from error
    return function  # type: ignore[no-any-return]  # of a package; typer has just taken it


def _register_failing(app: typer.Typer, name: str, message: str) -> None:
    taking_anything = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

    @app.command(name, help=f"Not available: {message}", context_settings=taking_anything)
    def command() -> None:
        raise ended(ConfigError(message), ExitCode.NO)
