"""Composes, shows and runs the commands that start a training: slime, its Ray cluster and the rollout buffer.

``scripts/run_agent.sh`` and the scripts in ``examples/android_world/`` call this program with a kind of run:

    python tools/launch_training.py math --dry-run              # run_agent.sh
    python tools/launch_training.py android_world               # run_android_world.sh
    python tools/launch_training.py android_world --only-train  # run_android_world.py: Ray and model are there

Settings are environment variables (``SLIME_SCRIPT_…``, listed by ``--help``); arguments after ``--`` are passed to
slime and override the composed ones. ``--dry-run`` prints the exact commands and runs none, ``--check``
(``rollout-buffer doctor --launch``) checks the requirements of a run. Each start checks them too, and reports every
missing one before anything is started.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.launching.models import Kind, LaunchError
from tools.launching.preconditions import checked_preconditions, missing
from tools.launching.settings import VARIABLES, misspelt, read_settings
from tools.launching.steps import compose, run, show


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the training's exit code, or 2 after printing an error."""
    options, extra = _parse(arguments)
    logging.basicConfig(level=logging.INFO, format="launch_training: %(message)s")
    for remark in misspelt(os.environ):
        logging.warning("%s", remark)
    try:
        settings = read_settings(Kind(options.kind), os.environ)
        steps = compose(settings, extra, only_train=options.only_train)
        if options.dry_run:
            sys.stdout.write(show(steps, [settings.wandb_key, settings.buffer_token]))
        if options.check:
            return _report(checked_preconditions(settings, extra, only_train=options.only_train))
        problems = missing(settings, extra, only_train=options.only_train)
        if options.dry_run:
            for problem in problems:
                logging.warning("%s", problem)
            return 0
        return _refuse(problems) if problems else run(steps)
    except (LaunchError, OSError) as error:
        return _refuse([str(error)])


def _report(checks: Iterable[tuple[str, Sequence[str]]]) -> int:
    """Prints every check with its problems; returns 0, or 1 if there are any."""
    is_ready = True
    for name, problems in checks:
        is_ready = is_ready and not problems
        sys.stdout.writelines(f"missing  {name}: {problem}\n" for problem in problems)
        if not problems:
            sys.stdout.write(f"ok       {name}\n")
    return 0 if is_ready else 1


def _refuse(problems: Sequence[str]) -> int:
    sys.stderr.writelines(f"launch_training: {problem}\n" for problem in problems)
    return 2


def _parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    lines = [f"  {name}  {meaning} [{default or 'unset'}]" for name, (default, meaning) in VARIABLES.items()]
    parser = argparse.ArgumentParser(
        prog="launch_training",
        description=(__doc__ or "").splitlines()[0],
        epilog="environment variables:\n" + "\n".join(lines) + "\n\narguments after -- go to slime",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("kind", choices=[kind.value for kind in Kind])
    parser.add_argument("--dry-run", action="store_true", help="print the exact commands and run none")
    parser.add_argument("--check", action="store_true", help="check the requirements of the run and exit")
    parser.add_argument(
        "--only-train", action="store_true", help="neither clean up, nor start Ray, nor download the model"
    )
    words = list(sys.argv[1:] if arguments is None else arguments)
    end = words.index("--") if "--" in words else len(words)
    return parser.parse_args(words[:end]), words[end + 1 :]


if __name__ == "__main__":
    sys.exit(main())
