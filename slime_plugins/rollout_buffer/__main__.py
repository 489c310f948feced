"""``python -m slime_plugins.rollout_buffer``: the same as the ``rollout-buffer`` command."""

import sys

if __name__ == "__main__":
    try:
        from slime_plugins.rollout_buffer.cli.app import main

        main()
    except ModuleNotFoundError as error:  # an overlay into slime installs no packages
        if error.name is None or error.name.startswith("slime_plugins"):
            raise
        sys.exit(
            f"rollout-buffer: {sys.executable} has no package {error.name}: tools/install_into_slime.py prints what to "
            "install in slime's environment, or run `rollout-buffer serve` in one of its own"
        )
