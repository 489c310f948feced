"""``python -m slime_plugins.rollout_buffer``: the same as the ``rollout-buffer`` command."""

from slime_plugins.rollout_buffer.cli.app import main

if __name__ == "__main__":
    main()
