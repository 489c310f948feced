"""Loads YAML strictly: duplicate keys are errors, and the values that aliases repeat are limited."""

from __future__ import annotations

from typing import Any, Final

import yaml

from slime_plugins.rollout_buffer.errors import ConfigError

MAX_ALIASED_VALUES: Final = 10_000
"""Values that aliases may repeat in one text ("billion laughs")."""


def load_yaml(text: str, name: str) -> tuple[Any, yaml.Node | None]:
    """Returns the value of a text, and its nodes with line numbers; ``name`` identifies the text in errors.

    Raises:
        ConfigError: the text is no YAML, sets a key twice, or repeats too many values with aliases.
    """
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            return None, None
        values: dict[int, int] = {}
        if _count(root, values, name) - len(values) > MAX_ALIASED_VALUES:
            raise ConfigError(f"{name}: its aliases repeat more than {MAX_ALIASED_VALUES} values")
        return loader.construct_document(root), root
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError) as error:  # a date that does not exist is a ValueError
        raise ConfigError(f"{name} is not valid YAML: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{name} is not valid YAML that can be read: it is nested too deeply") from error


def _count(node: yaml.Node, values: dict[int, int], name: str) -> int:
    """Returns the number of values of a node with aliases expanded; ``values`` caches the number by node."""
    if id(node) not in values:
        values[id(node)] = 2 * MAX_ALIASED_VALUES  # an alias to an enclosing section is infinite
        values[id(node)] = 1 + sum(_count(inner, values, name) for inner in _inner(node, name))
    return values[id(node)]


def _inner(node: yaml.Node, name: str) -> list[yaml.Node]:
    if isinstance(node, yaml.SequenceNode):
        return list(node.value)
    if not isinstance(node, yaml.MappingNode):
        return []
    lines: dict[tuple[str, str], int] = {}
    for key, _ in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            continue
        if (key.tag, key.value) in lines:
            before = lines[key.tag, key.value]
            raise ConfigError(f"{name}: line {line}: {key.value} was already set in line {before}")
        lines[key.tag, key.value] = line
    return [inner for pair in node.value for inner in pair]
