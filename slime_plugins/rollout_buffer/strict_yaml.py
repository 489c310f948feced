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
        ConfigError: the text is not valid YAML, sets a key twice, or repeats too many values with aliases.
    """
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            return None, None
        counts: dict[int, int] = {}
        # ``counts`` has an entry for each distinct node: the values beyond them are repetitions.
        if _count_values(root, counts, name) - len(counts) > MAX_ALIASED_VALUES:
            raise ConfigError(f"{name}: its aliases repeat more than {MAX_ALIASED_VALUES} values")
        return loader.construct_document(root), root
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError) as error:  # a date that does not exist is a ValueError
        raise ConfigError(f"{name} is not valid YAML: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{name} cannot be read as YAML: it is nested too deeply") from error


def _count_values(node: yaml.Node, counts: dict[int, int], name: str) -> int:
    """Returns the number of values of a node with aliases expanded; ``counts`` caches the number by node."""
    if id(node) not in counts:
        # For an alias inside this node to the node itself: such a node repeats without end, and counts as too large.
        counts[id(node)] = 2 * MAX_ALIASED_VALUES
        counts[id(node)] = 1 + sum(_count_values(inner, counts, name) for inner in _inner_nodes(node, name))
    return counts[id(node)]


def _inner_nodes(node: yaml.Node, name: str) -> list[yaml.Node]:
    """Returns the keys and values directly in a node.

    Raises:
        ConfigError: a key is set twice.
    """
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
            first_line = lines[key.tag, key.value]
            raise ConfigError(f"{name}: line {line}: {key.value} was already set in line {first_line}")
        lines[key.tag, key.value] = line
    return [inner for pair in node.value for inner in pair]
