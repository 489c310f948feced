"""Settings from several layers; errors name the layer.

    defaults  <  YAML file  <  environment  <  command line

Each layer stores where every key was set, so that an error names its line, variable or option. The caller passes the
settings model.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml
from pydantic import BaseModel, ValidationError

from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.strict_yaml import load_yaml

_Settings = TypeVar("_Settings", bound=BaseModel)

Address = tuple[str | int, ...]
"""A key with the sections around it, the outermost first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """Values, nested as the settings are, and where each was set: a prefix of errors like ``config.yaml: line 3: ``."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[Address, str] = field(default_factory=dict)


# ---- reading ---------------------------------------------------------------------------------------------------------


def from_file(path: Path) -> Layer:
    """Returns the settings in a YAML file, with their line numbers.

    Raises:
        ConfigError: the file cannot be read, is no mapping, or has a duplicate key.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the config {path} cannot be read: {error}") from error
    values, root = load_yaml(text, path.name)
    if values is None:
        return Layer()
    if not isinstance(values, dict):
        raise ConfigError(f"the config {path} must be a list of `key: value` lines")
    return Layer(values=values, places={key: f"{path.name}: line {line}: " for key, line in _key_lines(root)})


def from_variables(environment: Mapping[str, str], prefix: str) -> Layer:
    """Returns the settings in environment variables: ``{prefix}REWARD__STEP_DECAY`` is ``reward.step_decay``.

    Raises:
        ConfigError: a value is not valid YAML.
    """
    names = sorted(name for name in environment if name.startswith(prefix))
    assigned = [
        (tuple(name.removeprefix(prefix).lower().split("__")), environment[name], f"environment variable {name}: ")
        for name in names
    ]
    return _assigned(assigned)


def from_assignments(assignments: Sequence[str], option: str) -> Layer:
    """Returns the settings in ``key=value`` texts, sections with dots: ``reward.step_decay=0.2``.

    Raises:
        ConfigError: a text has no ``=``, or its value is not valid YAML.
    """
    assigned = []
    for text in assignments:
        key, equals_sign, value = text.partition("=")
        if not equals_sign or not key.strip():
            raise ConfigError(f"{option} {text}: must be KEY=VALUE, as in num_workers=8")
        assigned.append((tuple(key.strip().split(".")), value, f"{option} {text}: "))
    return _assigned(assigned)


def as_variables(assignments: Sequence[str], prefix: str) -> dict[str, str]:
    """Converts ``key=value`` texts into the variables of ``from_variables``, for child processes."""
    pairs = (text.partition("=") for text in assignments)
    return {prefix + key.strip().upper().replace(".", "__"): value for key, _, value in pairs}


def _assigned(assignments: Iterable[tuple[tuple[str, ...], str, str]]) -> Layer:
    """Returns the layer of (address, YAML value, place) entries; later ones override earlier ones."""
    layer = Layer()
    for address, text, place in assignments:
        nested, _ = load_yaml(text, f"{place}the value")
        for key in reversed(address):
            nested = {key: nested}
        layer = merged([layer, Layer(values=nested, places=dict.fromkeys(_addresses(nested), place))])
    return layer


def _addresses(values: Any, above: Address = ()) -> Iterator[Address]:
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield (*above, str(key))
            yield from _addresses(value, (*above, str(key)))


def _key_lines(node: yaml.Node | None, above: Address = ()) -> Iterator[tuple[Address, int]]:
    """Yields the line of every key below ``node``."""
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        address = (*above, str(key.value))
        yield address, key.start_mark.line + 1
        yield from _key_lines(value, address)


# ---- merging ---------------------------------------------------------------------------------------------------------


def merged(layers: Sequence[Layer]) -> Layer:
    """Returns the merged layers; later ones override earlier ones, section by section."""
    values: dict[str, Any] = {}
    places: dict[Address, str] = {}
    for layer in layers:
        values = _overridden(values, layer.values)
        places |= layer.places
    return Layer(values=values, places=places)


def _overridden(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in top.items():
        overridden = result.get(key)
        are_sections = isinstance(overridden, Mapping) and isinstance(value, Mapping)
        result[key] = _overridden(cast("Mapping[str, Any]", overridden), value) if are_sections else value
    return result


# ---- validation ------------------------------------------------------------------------------------------------------


def validated(model: type[_Settings], layer: Layer) -> _Settings:
    """Returns the settings in a layer.

    Raises:
        ConfigError: a key is unknown or out of range; names the key and its place.
    """
    try:
        return model.model_validate(layer.values)
    except ValidationError as error:
        names = list(setting_names(model))
        raise ConfigError(
            "; ".join(describe_problem(dict(problem), layer, names) for problem in error.errors())
        ) from error


def with_job_options(
    settings: _Settings, options: Mapping[str, Any], *, section: str, keys: frozenset[str], variable: str
) -> _Settings:
    """Returns the host's settings overridden by ``section`` of a job's payload, which may set ``keys`` only.

    Raises:
        ConfigError: as ``validated``; or a key is reserved for the host's own file, which ``variable`` names.
    """
    overrides = options.get(section) or {}
    if not isinstance(overrides, Mapping):
        raise ConfigError(f"{section} in the payload must be an object of settings")
    model = type(settings)
    refused = sorted(str(key) for key in overrides if key in model.model_fields and key not in keys)
    if refused:
        raise ConfigError(
            f"{section}.{refused[0]} belongs to the host and cannot be set by a job: "
            f"set it in the file that {variable} names"
        )
    host = Layer(values=settings.model_dump())
    return validated(model, merged([host, Layer(values=dict(overrides), places={(): f"{section}."})]))


def setting_names(model: type[BaseModel], above: str = "") -> Iterator[str]:
    """Yields the name of every setting; a setting of a section has a dot: ``reward.step_decay``."""
    for name, field_info in model.model_fields.items():
        kind = field_info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from setting_names(kind, f"{above}{name}.")
        else:
            yield f"{above}{name}"


# ---- error messages --------------------------------------------------------------------------------------------------


def describe_problem(problem: Mapping[str, Any], layer: Layer, names: Sequence[str]) -> str:
    """Returns a pydantic error as one sentence with its place: ``config.yaml: line 3: max_turns: Input should be …``.

    ``names`` are all settings, with dots; an unknown key gets a suggestion.
    """
    location: Address = tuple(problem["loc"])
    key = ".".join(str(part) for part in location) or "the settings"
    place = _place_of(location, layer.places)
    if problem["type"] == "extra_forbidden":
        return f"{place}{key} is not a setting{suggestion(key, names)}"
    message = str(problem["msg"]).removeprefix("Value error, ")
    is_about_a_section = problem["type"] == "value_error" and isinstance(problem["input"], Mapping)
    return f"{place}{key}: {message}" + ("" if is_about_a_section else f", not {problem['input']!r:.200}")


def suggestion(key: str, names: Sequence[str]) -> str:
    """Returns ``; did you mean …?`` if a setting has a similar name, or the same name in another section."""
    elsewhere = [name for name in names if name.rpartition(".")[2] == key.rpartition(".")[2]]
    close = elsewhere or difflib.get_close_matches(key, names, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def _place_of(location: Address, places: Mapping[Address, str]) -> str:
    """Returns the place of the key, else of the section around it, else of the layer. YAML keys need not be strings."""
    location = tuple(str(part) for part in location)
    while location and location not in places:
        location = location[:-1]
    return places.get(location, "")
