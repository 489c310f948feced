"""Commands of other packages (see ``extensions.py``), such as ``demo``, ``engine`` and ``learn`` of the lab."""

from __future__ import annotations

from collections.abc import Callable

import typer

from slime_plugins.rollout_buffer.cli.common import ExitCode, exit_after
from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.extensions import OF_THE_LAB, Extension, Group, installed, missing


def register(app: typer.Typer) -> None:
    """Adds the commands. A command that is not installed or does not load prints its error when it is called."""
    commands_of_packages = installed(Group.COMMANDS)
    own_names = {command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands}
    for name in OF_THE_LAB[Group.COMMANDS]:
        if name not in commands_of_packages:
            _register_failing(app, name, missing(Group.COMMANDS, name))
    for name, extension in sorted(commands_of_packages.items()):
        if name in own_names:
            continue  # no extension may replace a command of this project
        try:
            app.command(name)(_checked(extension))
        except ConfigError as error:
            _register_failing(app, name, error.message)


def _checked(extension: Extension) -> Callable[..., object]:
    """Returns the function of a command after typer has accepted it; an invalid function would break every command.

    Raises:
        ConfigError: the function cannot be loaded, or typer refuses it.
    """
    function = extension.load()
    trial_app = typer.Typer()
    try:
        trial_app.command(extension.name)(function)
        typer.main.get_command(trial_app)
    except Exception as error:  # an extension may raise anything
        raise ConfigError(
            f"{extension.name!r} of {extension.package} ({extension.target}) is no command: "
            f"{type(error).__name__}: {error}"
        ) from error
    return function  # type: ignore[no-any-return]  # a package's function, which typer has just accepted


def _register_failing(app: typer.Typer, name: str, message: str) -> None:
    accept_any_arguments = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

    @app.command(name, help=f"Not available: {message}", context_settings=accept_any_arguments)
    def command() -> None:
        raise exit_after(ConfigError(message), ExitCode.NO)
