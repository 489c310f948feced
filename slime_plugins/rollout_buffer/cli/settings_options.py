"""Decorators that turn the fields of one class into a command's options; the command gets their values together.

``with_options`` takes a dataclass, ``with_settings`` a settings model. A field of a settings model can be set by a
flag, by an environment variable, and by a key in the file of ``--config``. The flag overrides the variable, the
variable the file, and the file the field's default.
"""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.strict_yaml import load_yaml
from slime_plugins.rollout_buffer.wire.checks import misspelt_key_messages


def with_settings(model: type[BaseModel], prefix: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replaces a command's first parameter by an option for each field of ``model`` that has a description.

    The command gets a dict of field names and values; it includes defaults, but no value that is None. A field that is
    a tuple becomes a repeatable option, and is not in the dict if the option was not given. ``--some-flag`` is
    ``PREFIX_SOME_FLAG`` in the environment and ``some_flag`` in a file. By default a flag is named after its field;
    the field's ``json_schema_extra`` may name another flag.
    """
    fields = {name: field for name, field in model.model_fields.items() if field.description is not None}
    keys = ["CONFIG", *(_file_key_of(name, field).upper() for name, field in fields.items())]

    def read_config(ctx: typer.Context, path: Path | None) -> Path | None:
        if path is not None:
            ctx.default_map = _read_settings_file(path, fields)
        return path

    config = typer.Option(
        envvar=f"{prefix}_CONFIG",
        show_envvar=False,
        is_eager=True,
        callback=read_config,
        help="YAML file with settings; each key is a flag's name with _ for -. Flags and environment override it.",
    )

    def wrap(command: Callable[..., None]) -> Callable[..., None]:
        def run(**given: Any) -> None:
            variables = [name.removeprefix(f"{prefix}_") for name in os.environ if name.startswith(f"{prefix}_")]
            if misspelt := misspelt_key_messages(variables, keys, f"{prefix}_"):
                raise typer.BadParameter(f"environment variable {misspelt[0]}")
            given.pop("config")
            values = {name: given.pop(name) for name in fields}
            command({name: value for name, value in values.items() if value is not None}, **given)

        options = [_option(name, field, prefix) for name, field in fields.items()]
        return _as_command(run, command, [_parameter("config", Annotated[Path | None, config], None), *options])

    return wrap


def with_options(kind: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replaces a command's first parameter, which is a dataclass of type ``kind``, by an option for each of its fields.

    The annotation of each field holds its typer option.
    """
    annotations = get_type_hints(kind, include_extras=True)
    defaults = inspect.signature(kind).parameters
    options = [_parameter(name, annotation, defaults[name].default) for name, annotation in annotations.items()]

    def wrap(command: Callable[..., None]) -> Callable[..., None]:
        def run(**given: Any) -> None:
            command(kind(**{name: given.pop(name) for name in annotations}), **given)

        return _as_command(run, command, options)

    return wrap


def _as_command(
    run: Callable[..., None], command: Callable[..., None], options: list[inspect.Parameter]
) -> Callable[..., None]:
    """Returns ``run`` with name, docstring and parameters of ``command``, whose first parameter ``options`` replace."""
    others = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    parameters = [*options, *(other.replace(kind=inspect.Parameter.KEYWORD_ONLY) for other in others)]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads it
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run


def _option(name: str, field: FieldInfo, prefix: str) -> inspect.Parameter:
    annotation: Any = field.annotation
    default = field.default
    if get_origin(annotation) is tuple:
        annotation, default = list[get_args(annotation)[0]] | None, None  # type: ignore[misc]  # only typer reads it
    flag, variable = _flag_of(name, field), f"{prefix}_{_file_key_of(name, field).upper()}"
    option = typer.Option(flag, envvar=variable, show_envvar=False, help=field.description)
    return _parameter(name, Annotated[annotation, option], default)


def _flag_of(name: str, field: FieldInfo) -> str:
    extra = field.json_schema_extra
    named = extra.get("flag") if isinstance(extra, dict) else None
    return str(named or f"--{name.replace('_', '-')}")


def _file_key_of(name: str, field: FieldInfo) -> str:
    """Returns a field's key in the file: the name of its flag with _ for -."""
    return _flag_of(name, field).removeprefix("--").replace("-", "_")


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def _read_settings_file(path: Path, fields: dict[str, FieldInfo]) -> dict[str, Any]:
    """Returns a file's settings by field name."""
    keys = {_file_key_of(name, field): name for name, field in fields.items()}
    try:
        content, _ = load_yaml(path.read_text("utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"{path} is not YAML: {error}") from error
    except (OSError, ConfigError) as error:
        raise typer.BadParameter(str(error)) from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise typer.BadParameter(f"{path} must be a YAML mapping of settings")
    for key in content:
        if key not in keys:
            near = difflib.get_close_matches(str(key), keys, n=1)
            meant = f"did you mean {near[0]}?" if near else f"known settings: {', '.join(keys)}"
            raise typer.BadParameter(f"{path}: {key} is not known: {meant}")
    values = {keys[key]: value for key, value in content.items() if value is not None}
    return {name: _as_option_value(value, fields[name]) for name, value in values.items()}


def _as_option_value(value: Any, field: FieldInfo) -> Any:
    """Returns a file's value in the form of the option's value: for a repeatable option, a single value in a list."""
    return [value] if get_origin(field.annotation) is tuple and not isinstance(value, list) else value
