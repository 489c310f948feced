"""Lists a training's arguments that slime's parsers would ignore. Run where slime and Megatron can be imported.

    PYTHONPATH=SLIME:MEGATRON python tools/launching/flag_check.py < arguments.json

slime tells Megatron's parser to ignore unknown flags, because SGLang's arguments have their own parser. So a renamed or
misspelt flag has no effect and no message. This program lets slime parse the arguments and prints flags that no parser
accepts, as a JSON list. A value that a parser refuses ends the program with the parser's message.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from typing import Any

KNOWN_BY_THE_LAST_PARSER = "--hf-checkpoint"


class _ParsedError(BaseException):
    """Stops slime after its last parser."""


def unknown_flags(arguments: Sequence[str]) -> list[str]:
    """Returns the flags that no parser of slime accepts.

    Raises:
        ImportError: slime, Megatron or SGLang cannot be imported.
        SystemExit: a parser refuses a value.
    """
    left: list[list[str]] = []
    parse = argparse.ArgumentParser.parse_known_args

    def listening(parser: argparse.ArgumentParser, *given: Any, **named: Any) -> Any:
        namespace, rest = parse(parser, *given, **named)
        left.append(rest)
        if KNOWN_BY_THE_LAST_PARSER in parser._option_string_actions:
            raise _ParsedError
        return namespace, rest

    module = importlib.import_module("slime.utils.arguments")
    sys.argv = ["train.py", *arguments]
    argparse.ArgumentParser.parse_known_args = listening  # type: ignore[assignment,method-assign]  # records flags
    try:
        module.parse_args()
    except _ParsedError:
        pass
    finally:
        argparse.ArgumentParser.parse_known_args = parse  # type: ignore[method-assign]
    taken_by_none = set.intersection(*(set(rest) for rest in left)) if left else set()
    return [word for word in arguments if word.startswith("--") and word in taken_by_none]


if __name__ == "__main__":
    found = unknown_flags(json.load(sys.stdin))
    sys.stdout.write(json.dumps(found) + "\n")
