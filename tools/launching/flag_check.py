"""Lists a training's arguments that slime's parsers ignore or that agent rollouts refuse; imports slime and Megatron.

    PYTHONPATH=SLIME:MEGATRON python tools/launching/flag_check.py < arguments.json

slime tells Megatron's parser to ignore unknown flags, because SGLang's arguments have their own parser. So a renamed or
misspelt flag has no effect and no message. This program lets slime parse the arguments and prints a JSON object:
``unknown``, the flags that no parser accepts, and ``refused``, why the rollout function would stop before its first
episode, when the GPUs are loaded. A value that a parser refuses ends the program with the parser's message.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
from collections.abc import Sequence
from typing import Any

KNOWN_BY_THE_LAST_PARSER = "--hf-checkpoint"
CHECKS = "slime.rollout.agent_rollout_argument_checks"


class _ParsedError(BaseException):
    """Stops slime after its last parser, with what was parsed."""

    def __init__(self, parsed: argparse.Namespace) -> None:
        super().__init__()
        self.parsed = parsed


def findings(arguments: Sequence[str]) -> dict[str, list[str]]:
    """Returns the flags that no parser of slime accepts, and the reasons of ``check_arguments``.

    Raises:
        ImportError: slime, Megatron or SGLang cannot be imported.
        SystemExit: a parser refuses a value.
    """
    rests: list[list[str]] = []
    parse = argparse.ArgumentParser.parse_known_args

    def recording_parse(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        namespace, rest = parse(parser, *args, **kwargs)
        rests.append(rest)
        if KNOWN_BY_THE_LAST_PARSER in parser._option_string_actions:
            raise _ParsedError(namespace)
        return namespace, rest

    module = importlib.import_module("slime.utils.arguments")
    sys.argv = ["train.py", *arguments]
    argparse.ArgumentParser.parse_known_args = recording_parse  # type: ignore[assignment,method-assign]  # records flags
    refused: list[str] = []
    try:
        module.parse_args()
    except _ParsedError as stopped:
        refused = refusals(stopped.parsed)
    finally:
        argparse.ArgumentParser.parse_known_args = parse  # type: ignore[method-assign]
    left_by_all = set.intersection(*map(set, rests)) if rests else set()
    unknown = [word for word in arguments if word.startswith("--") and word in left_by_all]
    return {"unknown": unknown, "refused": refused}


def refusals(args: argparse.Namespace) -> list[str]:
    """Returns why agent rollouts refuse these arguments, with the keys of ``--custom-config-path`` set over them."""
    if importlib.util.find_spec(CHECKS) is None:  # a checkout without the overlay
        return []
    if path := getattr(args, "custom_config_path", None):
        yaml = importlib.import_module("yaml")
        with open(path, encoding="utf-8") as file:
            vars(args).update(yaml.safe_load(file) or {})
    reasons: list[str] = importlib.import_module(CHECKS).refusals(args)
    return reasons


if __name__ == "__main__":
    sys.stdout.write(json.dumps(findings(json.load(sys.stdin))) + "\n")
